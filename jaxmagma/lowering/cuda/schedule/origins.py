"""Where the values of a tile are: what ``View`` and ``Gather`` mean to whoever reads the tile.

Neither moves anything: a tile that shows part of another is read where that one is, and a gathered
one where its index points.  A view that has no such reading (of another view, or across the
components of gathered values) is of a copy, which :func:`resolvable` adds to the plan.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxmagma.plans.plan import Plan, Product, Rearrange, Step, Tile, renumbered
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Gather, View
from jaxmagma.programs.strides import row_major


@dataclass(frozen=True)
class Strided:
    """A place in a row-major tile for each value of another: ``offset + strides . (i, j, ...)``."""

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """The tile that holds the values, and where; ``view`` is None if it is the tile itself.

    Of gathered values ``tile`` is the vector, ``index`` the tile that says where an element's
    values are in it, ``view`` a place in the index and ``component`` one in what it points to.
    """

    tile: int
    view: Strided | None = None
    index: int | None = None
    component: Strided | None = None
    components: int = 1


def origin(plan: Plan, tile: int, whole: Collection[int] = ()) -> Origin:
    """Where the values of ``tile`` are, in a plan that is ``resolvable``.

    Those of ``whole`` tiles are where they say, whatever made them.
    """
    found = _origin(plan.steps, plan.tiles, len(plan.program.inputs), tile, whole)
    assert found is not None
    return found


def _origin(
    steps: tuple[Step, ...] | list[Step],
    tiles: tuple[Tile, ...] | list[Tile],
    first: int,
    tile: int,
    whole: Collection[int] = (),
) -> Origin | None:
    step = steps[tile - first] if tile >= first and tile not in whole else None
    if isinstance(step, View):
        inner = _origin(steps, tiles, first, step.operand, whole)
        return _shown(step, inner, tiles[step.operand])
    if isinstance(step, Gather):
        rank = len(tiles[step.index].shape)
        shape = tiles[tile].shape
        rest = row_major(shape[rank:])
        return Origin(
            step.vector,
            Strided(0, row_major(shape[:rank]) + (0,) * len(rest)),
            step.index,
            Strided(0, (0,) * rank + rest),
            Tile(shape[rank:], tiles[tile].dtype, True).size,
        )
    return Origin(tile)


def _shown(view: View, inner: Origin | None, tile: Tile) -> Origin | None:
    """A view of what is at ``inner``, if that can be said; ``tile`` is the operand's."""
    if inner is None:
        return None
    if inner.index is None:
        if inner.view is not None:
            return None
        return Origin(inner.tile, Strided(view.offset, view.strides))
    assert inner.view is not None and inner.component is not None
    size = inner.components
    whole = inner.view.offset == inner.component.offset == 0 and all(
        x * size + y == z
        for x, y, z in zip(
            inner.view.strides, inner.component.strides, row_major(tile.shape), strict=True
        )
    )
    least = view.offset % size
    most = least + sum(s % size * (n - 1) for s, n in zip(view.strides, view.tile, strict=True))
    if not whole or most >= size or any(s < 0 for s in view.strides):
        return None
    return replace(
        inner,
        view=Strided(view.offset // size, tuple(s // size for s in view.strides)),
        component=Strided(least, tuple(s % size for s in view.strides)),
    )


def resolvable(plan: Plan) -> Plan:
    """The plan with copies of those tiles that cannot be read where their values are."""
    first = len(plan.program.inputs)
    tiles: list[Tile] = list(plan.tiles[:first])
    steps: list[Step] = []
    numbers = {n: n for n in range(first)}

    def add(step: Step, batched: bool) -> int:
        tiles.append(Tile(step.shape, plan.program.dtype, batched))
        steps.append(step)
        return len(tiles) - 1

    copies: dict[int, int] = {}

    def copied(tile: int) -> int:
        if tile not in copies:
            labels = letters(len(tiles[tile].shape))
            sizes = tuple(zip(labels, tiles[tile].shape, strict=True))
            copies[tile] = add(Rearrange(tile, labels, labels, sizes), tiles[tile].batched)
        return copies[tile]

    def gathered(tile: int) -> bool:
        found = _origin(steps, tiles, first, tile)
        return found is not None and found.index is not None

    for number, step in plan.numbered_steps():
        step = renumbered(step, numbers)
        if isinstance(step, View):
            inner = _origin(steps, tiles, first, step.operand)
            if _shown(step, inner, tiles[step.operand]) is None:
                step = replace(step, operand=copied(step.operand))
        elif isinstance(step, Product) and all(tiles[x].batched for x in step.operands):
            # A product of two tiles of an element reads both many times.
            left = copied(step.left) if gathered(step.left) else step.left
            right = copied(step.right) if gathered(step.right) else step.right
            step = replace(step, left=left, right=right)
        numbers[number] = add(step, plan.tiles[number].batched)
    everything = set(range(plan.program.batch_rank))
    results = []
    for out, value in zip(plan.program.outputs, plan.results, strict=True):
        value = numbers[value]
        moved = value >= first and isinstance(steps[value - first], View | Gather)
        if set(out.batch) != everything and moved:
            value = copied(value)
        results.append(value)
    return replace(plan, tiles=tuple(tiles), steps=tuple(steps), results=tuple(results))
