"""Products of two values of an element along a long axis, as a table applied to one value.

An element's matrix is a sum over points of the gradients of two functions, the metric between
them. Tensor cores apply tables that all elements share, to many elements at a time; so of
``A (T B)``, with a table ``T`` and values ``A`` and ``B`` of an element, the product ``A B`` comes
first, and the table last.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxmagma.plans.plan import Plan, Pointwise, Product, Step, Tile, renumbered
from jaxmagma.programs.labels import letters


# Shorter axes have components.
SHORTEST = 4


def associations(plan: Plan) -> tuple[Plan, ...]:
    """Plans with tables last, that of the left or of the right; ``plan`` itself if it is one."""
    found = [_associated(plan, right) for right in (False, True)]
    other = _exchanged(found[0])
    # Exchanged again the first table is last, of what has all other values.
    return tuple(dict.fromkeys([*found, other, _exchanged(other)]))


def _associated(plan: Plan, right: bool) -> Plan:
    """The table of the right side is last, if either can be."""
    for number, step in plan.numbered_steps():
        if isinstance(step, Product) and all(plan.tiles[x].batched for x in step.operands):
            for steps in _rewritten(plan, step, right):
                return _associated(_with(plan, number, steps), right)
    return plan


def _exchanged(plan: Plan) -> Plan:
    """A product of a table with another one and values: that other table last."""
    for number, step in plan.numbered_steps():
        if isinstance(step, Product):
            batched = [plan.tiles[x].batched for x in step.operands]
            if batched.count(True) == 1:
                for steps in _rewritten(plan, step, right=batched[1]):
                    return _with(plan, number, steps)
    return plan


# A tile, and the labels of its axes.
_Term = tuple[int, str]


def _rewritten(plan: Plan, step: Product, right: bool) -> Iterator[list[Product]]:
    """The products of all that a table is applied to, and the table times that.

    What they make has the numbers beyond the plan's tiles.
    """
    sides = (step.terms[::-1], step.terms) if right else (step.terms, step.terms[::-1])
    for side, other in sides:
        sizes = dict(step.extents)
        found = _table_and_values(plan, side, sizes)
        if found is None:
            continue
        table, values = found
        terms = [*values, other]
        long = {x for x in table[1] if sizes[x] >= SHORTEST}
        new = long & set(step.output_labels) - {x for _, labels in terms for x in labels}
        if not new or not long & set(step.contracted) & set(other[1]):
            continue
        steps: list[Product] = []
        left = terms[0]
        for number, term in enumerate(terms[1:], 1):
            later = {x for _, labels in (table, *terms[number + 1 :]) for x in labels}
            wanted = later | set(step.output_labels)
            kept = "".join(x for x in dict.fromkeys(left[1] + term[1]) if x in wanted)
            if set(left[1] + term[1]) - set(kept) - (set(left[1]) & set(term[1])):
                break  # a sum of one operand alone
            steps.append(_product(left, term, kept, sizes))
            left = len(plan.tiles) + len(steps) - 1, kept
        else:
            yield [*steps, _product(table, left, step.output_labels, sizes)]


def _table_and_values(
    plan: Plan, term: _Term, sizes: dict[str, int]
) -> tuple[_Term, list[_Term]] | None:
    """A table, and values of an element, of which a term is the product.

    They are used but once. Labels that the term does not have are new, and have ``sizes`` then.
    """
    tile, labels = term
    first = len(plan.program.inputs)
    uses = [x for step in plan.steps for x in step.operands].count(tile)
    if tile < first or uses + plan.results.count(tile) > 1:
        return None
    step = plan.steps[tile - first]
    if not (isinstance(step, Product) or (isinstance(step, Pointwise) and step.function == "mul")):
        return None
    if set(step.output_labels) - {x for _, known in step.terms for x in known}:
        return None  # it is repeated
    names = dict(zip(step.output_labels, labels, strict=True))
    fresh = (x for x in letters(len(sizes) + len(step.extents)) if x not in sizes)
    names |= {x: next(fresh) for x in step.extents if x not in names}
    sizes |= {names[x]: n for x, n in step.extents.items()}
    terms = [(x, "".join(names[y] for y in known)) for x, known in step.terms]
    for side, other in (terms, terms[::-1]):
        if plan.tiles[side[0]].batched:
            found = _table_and_values(plan, side, sizes)
            if found is not None:
                table, values = found
                return table, [*values, other]
        elif any(sizes[x] >= SHORTEST for x in side[1]):
            return side, [other]
    return None


def _product(left: _Term, right: _Term, output: str, sizes: dict[str, int]) -> Product:
    used = sorted({*left[1], *right[1]})
    extents = tuple((x, sizes[x]) for x in used)
    return Product(left[0], right[0], left[1], right[1], output, extents)


def _with(plan: Plan, number: int, steps: list[Product]) -> Plan:
    """The plan with these steps in place of one."""
    made = list(range(len(plan.program.inputs)))
    tiles: list[Tile] = list(plan.tiles[: len(made)])
    new: list[Step] = []
    for n, step in plan.numbered_steps():
        here = steps if n == number else [step]
        # Their own have the numbers beyond the plan's tiles.
        numbers = [*made, *[-1] * (len(plan.tiles) - len(made))]
        for one in here:
            moved = renumbered(one, numbers)
            shape = moved.shape if isinstance(moved, Product) else plan.tiles[n].shape
            numbers.append(len(tiles))
            tiles.append(Tile(shape, plan.tiles[n].dtype, plan.tiles[n].batched))
            new.append(moved)
        made.append(len(tiles) - 1)
    results = tuple(made[x] for x in plan.results)
    assert math.prod(tiles[made[number]].shape) == plan.tiles[number].size
    found = replace(plan, tiles=tuple(tiles), steps=tuple(new), results=results)
    return found.without_dead_steps()
