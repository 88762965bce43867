"""Divisions by one value share its reciprocal.

A quotient in double precision takes some twenty instructions, most of them for the reciprocal of
the divisor. Where that is at hand seven are enough, and its bits are those of the division: what
the product leaves is exact, and corrects it (Markstein, Computation of elementary functions on the
IBM RISC System/6000 processor, 1990). See ``Quotient`` in ``cuda/functions.cuh``.
"""

import math
from collections import Counter
from dataclasses import replace

from jaxmagma.plans.plan import Plan, Pointwise, Step, Tile, renumbered


def reciprocals_shared(plan: Plan) -> Plan:
    """The plan with a reciprocal of each value that several values of an element are divided by.

    Also of constants that one is divided by: what depends on them alone is computed when the kernel
    is made.
    """
    if plan.program.dtype.kind != "f":
        return plan
    shared = _shared(plan)
    first = len(plan.program.inputs)
    tiles, steps = list(plan.tiles[:first]), list[Step]()
    numbers, reciprocals = {n: n for n in range(first)}, dict[int, int]()

    def add(step: Step, tile: Tile) -> int:
        tiles.append(tile)
        steps.append(step)
        return len(tiles) - 1

    for number, step in plan.numbered_steps():
        new = renumbered(step, numbers)
        if isinstance(new, Pointwise) and _divisor(step) in shared:
            value, divisor = new.operands
            labels = new.labels[1]
            if divisor not in reciprocals:
                sizes = tuple((x, new.extents[x]) for x in sorted(labels))
                inverse = Pointwise("reciprocal", (divisor,), (labels,), labels, sizes)
                reciprocals[divisor] = add(inverse, tiles[divisor])
            operands = (value, divisor, reciprocals[divisor])
            new = replace(new, function="quotient", operands=operands, labels=(*new.labels, labels))
        numbers[number] = add(new, plan.tiles[number])
    results = tuple(numbers[value] for value in plan.results)
    return replace(plan, tiles=tuple(tiles), steps=tuple(steps), results=results)


def _shared(plan: Plan) -> set[int]:
    """The divisors whose reciprocals are worth a value of their own.

    None of a table that is an argument: a kernel has no steps for all elements.
    """
    known = {n for n, x in enumerate(plan.program.inputs) if x.constant is not None}
    quotients = Counter[int]()
    for number, step in plan.numbered_steps():
        if all(x in known for x in step.operands):
            known.add(number)
        elif (divisor := _divisor(step)) is not None:
            quotients[divisor] += math.prod(step.shape) // plan.tiles[divisor].size
    several = {n for n, count in quotients.items() if count > 1 and plan.tiles[n].batched}
    return several | (quotients.keys() & known)


def _divisor(step: Step) -> int | None:
    divides = isinstance(step, Pointwise) and step.function == "div"
    return step.operands[1] if divides else None
