"""Products of two values of an element along a long axis, as a table applied to one value.

An element's matrix is a sum over points of the gradients of two functions, the metric between
them. Tensor cores apply tables that all elements share, to many elements at a time; so of
``A (T B)``, with a table ``T`` and values ``A`` and ``B`` of an element, the product ``A B`` comes
first, and the table last.
"""

import itertools
import math
from collections.abc import Iterator

from jaxmagma.labels import letters
from jaxmagma.plan import Plan, Pointwise, Product, Step, Tile, renumbered


# Shorter axes have components.
SHORTEST = 4


def associations(plan: Plan) -> tuple[Plan, ...]:
    """Plans with tables last, that of the left or of the right; ``plan`` itself if it is one."""
    return tuple(dict.fromkeys(_associated(plan, right) for right in (False, True)))


def _associated(plan: Plan, right: bool) -> Plan:
    """The table of the right side is last, if either can be."""
    for number, step in plan.numbered_steps():
        if isinstance(step, Product) and all(plan.tiles[x].batched for x in step.operands):
            for steps in _rewritten(plan, number, step, right):
                return _associated(_with(plan, number, steps), right)
    return plan


def _rewritten(
    plan: Plan, number: int, step: Product, right: bool
) -> Iterator[tuple[Product, Product]]:
    """The product of what a table is applied to, and the table times that: its left operand."""
    sides = (step.terms[::-1], step.terms) if right else (step.terms, step.terms[::-1])
    for (side, labels), (other, others) in sides:
        made = _table_and_value(plan, side)
        if made is None:
            continue
        (table, of_table), (value, of_value), output, extents = made
        # The labels of what makes the side, as those of the product.
        names = dict(zip(output, labels, strict=True))
        used = {*labels, *others}
        fresh = (x for x in letters(26 + len(extents)) if x not in used)
        names |= {x: next(fresh) for x in extents if x not in names}
        sizes = {**step.extents, **{names[x]: n for x, n in extents.items()}}
        of_table = "".join(names[x] for x in of_table)
        of_value = "".join(names[x] for x in of_value)
        long = {x for x in of_table if sizes[x] >= SHORTEST}
        new = long & set(step.output_labels) - set(others) - set(of_value)
        if not new or not long & set(step.contracted) & set(others):
            continue
        wanted = {*of_table, *step.output_labels}
        kept = "".join(x for x in dict.fromkeys(of_value + others) if x in wanted)
        if set(of_value + others) - set(kept) - (set(of_value) & set(others)):
            continue  # a sum of one operand alone
        inner = _product((value, of_value), (other, others), kept, sizes)
        yield inner, _product((table, of_table), (number, kept), step.output_labels, sizes)


def _table_and_value(
    plan: Plan, tile: int
) -> tuple[tuple[int, str], tuple[int, str], str, dict[str, int]] | None:
    """A table and a value of an element of which a tile is the product, with their labels.

    Also says which labels the tile has, and how long they are. It is used but once.
    """
    first = len(plan.program.inputs)
    uses = [x for step in plan.steps for x in step.operands].count(tile)
    if tile < first or uses + plan.results.count(tile) > 1:
        return None
    step = plan.steps[tile - first]
    if not (isinstance(step, Product) or (isinstance(step, Pointwise) and step.function == "mul")):
        return None
    terms = sorted(step.terms, key=lambda x: plan.tiles[x[0]].batched)
    if [plan.tiles[x].batched for x, _ in terms] != [False, True]:
        return None
    if set(step.output_labels) - {x for _, labels in terms for x in labels}:
        return None  # it is repeated
    return terms[0], terms[1], step.output_labels, step.extents


def _product(
    left: tuple[int, str], right: tuple[int, str], output: str, sizes: dict[str, int]
) -> Product:
    used = sorted({*left[1], *right[1]})
    extents = tuple((x, sizes[x]) for x in used)
    return Product(left[0], right[0], left[1], right[1], output, extents)


def _with(plan: Plan, number: int, steps: tuple[Product, Product]) -> Plan:
    """The plan with two steps in place of one."""
    made = list(range(len(plan.program.inputs)))
    tiles: list[Tile] = list(plan.tiles[: len(made)])
    new: list[Step] = []
    for n, step in plan.numbered_steps():
        for one in steps if n == number else (step,):
            # The second of the two is of the first, which has no number before.
            numbers = [*made, *itertools.repeat(len(tiles) - 1, len(plan.tiles) - len(made))]
            moved = renumbered(one, numbers)
            shape = moved.shape if isinstance(moved, Product) else plan.tiles[n].shape
            tiles.append(Tile(shape, plan.tiles[n].dtype, plan.tiles[n].batched))
            new.append(moved)
        made.append(len(tiles) - 1)
    results = tuple(made[x] for x in plan.results)
    assert math.prod(tiles[made[number]].shape) == plan.tiles[number].size
    return Plan(plan.program, tuple(tiles), tuple(new), results).without_dead_steps()
