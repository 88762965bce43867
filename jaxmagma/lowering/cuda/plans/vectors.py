"""Fields that are components of one, as long as all of them go through the same matrices.

The normal form takes components apart from the arguments on, for at the points each is a value of
its own.  On its way there each has as many lines as one field has, and where those are few, most
threads of a block have nothing to do: a field of vectors has three times as many.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmagma.plans.plan import Plan, Product, Step, Tile, renumbered
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import View
from jaxmagma.programs.strides import box_of, row_major


Place = tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """All values of a tile at one place along some of its axes."""

    whole: int
    axes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class _Alike:
    """Products that differ in the part that they read alone, by the places of the parts."""

    product: Product  # of one of them
    tile: int  # that it reads
    part: _Part  # which that is
    members: dict[Place, int]


def with_vectors(plan: Plan) -> Plan:
    """The plan with products of all parts of a tile with one matrix as one product of the tile."""
    while groups := _groups(plan):
        plan = _joined(plan, groups)
    return plan


def _groups(plan: Plan) -> list[_Alike]:
    """Products of which there is one of each part of a tile."""
    parts = {n: part for n, x in plan.numbered_steps() if (part := _part(plan, x)) is not None}
    found: dict[Any, _Alike] = {}
    for number, step in plan.numbered_steps():
        if isinstance(step, Product):
            own = [x for x in step.operands if x in parts]
            if len(own) == 1 and not all(plan.tiles[x].batched for x in step.operands):
                part = parts[own[0]]
                others = {x: -1 if x in own else x for x in step.operands}
                key = part.whole, part.axes, renumbered(step, others)
                alike = found.setdefault(key, _Alike(step, own[0], part, {}))
                alike.members.setdefault(part.place, number)
    return [
        x
        for x in found.values()
        if len(x.members) == math.prod(plan.tiles[x.part.whole].shape[n] for n in x.part.axes) > 1
    ]


def _part(plan: Plan, step: Step) -> _Part | None:
    """What a view shows, if it is everything along the axes that it has."""
    if not isinstance(step, View) or not plan.tiles[step.operand].batched:
        return None
    shape = plan.tiles[step.operand].shape
    box = box_of(shape, step.offset, step.strides, step.tile)
    if box is None:
        return None
    axes = tuple(n for n, (*_, position) in enumerate(box) if position is None)
    shown = [x for x in enumerate(box) if x[0] not in axes]
    whole = all((start, by, count) == (0, 1, shape[n]) for n, (start, by, count, _) in shown)
    in_order = [position for _, (*_, position) in shown] == list(range(len(step.tile)))
    place = tuple(box[n][0] for n in axes)
    return _Part(step.operand, axes, place) if whole and in_order and axes else None


def _joined(plan: Plan, groups: Sequence[_Alike]) -> Plan:
    """The plan with one product in the place of the first of each group."""
    first = len(plan.program.inputs)
    group_of = {number: group for group in groups for number in group.members.values()}
    tiles: list[Tile] = list(plan.tiles[:first])
    steps: list[Step] = []
    numbers = {n: n for n in range(first)}

    def add(step: Step, tile: Tile) -> int:
        steps.append(step)
        tiles.append(tile)
        return len(tiles) - 1

    for number, step in plan.numbered_steps():
        if number in numbers:
            continue
        group = group_of.get(number)
        if group is None:
            numbers[number] = add(renumbered(step, numbers), plan.tiles[number])
            continue
        product = _of_all(plan, group, numbers)
        tile = replace(plan.tiles[number], shape=product.shape)
        made, strides = add(product, tile), row_major(tile.shape)
        for place, member in group.members.items():
            offset = sum(n * stride for n, stride in zip(place, strides, strict=False))
            view = View(made, offset, strides[len(place) :], plan.tiles[member].shape)
            numbers[member] = add(view, plan.tiles[member])
    results = tuple(numbers[x] for x in plan.results)
    found = replace(plan, tiles=tuple(tiles), steps=tuple(steps), results=results)
    return found.without_dead_steps()


def _of_all(plan: Plan, group: _Alike, numbers: Mapping[int, int]) -> Product:
    """The product of all parts at once; the result has the axes of the parts first."""
    step, part = group.product, group.part
    shape = plan.tiles[part.whole].shape
    new = letters(len(step.extents) + len(part.axes))[len(step.extents) :]
    sizes = dict(step.extents) | {x: shape[n] for x, n in zip(new, part.axes, strict=True)}

    def of_whole(labels: str) -> str:
        own, along = iter(labels), dict(zip(part.axes, new, strict=True))
        return "".join(along.get(n) or next(own) for n in range(len(shape)))

    (left, left_labels), (right, right_labels) = (
        (numbers[part.whole], of_whole(labels)) if x == group.tile else (numbers[x], labels)
        for x, labels in step.terms
    )
    output = new + step.output_labels
    return Product(left, right, left_labels, right_labels, output, tuple(sizes.items()))
