"""Products of tiles of an element that one sweep makes: their sums, and places for each thread.

What dots of a sweep read serves all of them, and with several places of each line in registers it
serves all of these, too, as in blocks of a product of matrices.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from jaxmagma.lowering.cuda.parameters import WARP
from jaxmagma.lowering.cuda.schedule.gemms import LARGEST_BLOCK
from jaxmagma.lowering.cuda.schedule.steps import Steps
from jaxmagma.lowering.cuda.schedule.sweeps import Move, Sweep, Value, words
from jaxmagma.plans.plan import Pointwise


# The registers that values at several places may take.
_REGISTERS = 128


def together(steps: Steps, sweep: Sweep) -> Sweep:
    """The sweep with sums of dots as one, and so many places of a thread that dots read least.

    As long as a warp has work, or half of one if dots would read more than they multiply.
    """
    sweep = _with_sums(steps, sweep)
    best = min(_with_places(steps, sweep, WARP), key=reads_for_each)
    if reads_for_each(best) <= 1:
        return best
    other = min(_with_places(steps, sweep, WARP // 2), key=reads_for_each)
    return other if reads_for_each(other) <= 1 else best


def reads_for_each(sweep: Sweep) -> float:
    """How many values dots read for each product of two."""
    products = sum(sweep.size(move.result) * len(move.pairs) for move in sweep.dots)
    return sum(map(sweep.size, _read(sweep))) / products


def _with_sums(steps: Steps, sweep: Sweep) -> Sweep:
    """The sweep with sums of dots as dots of more terms, where nothing else is done with them.

    Dots come first: they are of what the sweep reads.
    """
    uses = Counter(x for step in steps.plan.steps for x in step.operands)
    uses.update(steps.plan.results)
    made: dict[Value, Move] = {}
    for move in sweep.moves:
        parts = [made.get(x) for x in move.operands]
        dots = [x for x in parts if x is not None and x.is_dot and uses[x.result.tile] == 1]
        if _is_sum(move) and len(dots) == 2 and len({x.operands[0].length for x in dots}) == 1:
            for x in dots:
                del made[x.result]
            operands = tuple(value for x in dots for value in x.operands)
            move = replace(dots[0], result=move.result, operands=operands)
        made[move.result] = move
    moves = sorted(made.values(), key=lambda x: (not x.is_dot, x.is_dot and x.operands[0].length))
    return replace(sweep, moves=tuple(moves), tiles={x.result.tile: x.result for x in moves})


def _is_sum(move: Move) -> bool:
    step, labels = move.step, move.result.labels
    added = isinstance(step, Pointwise) and step.function == "add"
    return added and all(x.labels == labels for x in move.operands)


def _with_places(steps: Steps, sweep: Sweep, threads: int) -> Iterator[Sweep]:
    """Several places along two lines at most, the fewest first, as long as threads have work.

    With fewer threads for an element matrices of 8 nodes took 1.2 times as long, with places for
    fewer than two those of 27 nodes 1.5 times (benchmarks/results/elements-h200.txt).
    """
    yield sweep
    registers = words(steps.plan, sweep.dots[0].result.tile)
    for numbers in itertools.product(range(1, 1 + LARGEST_BLOCK), repeat=2):
        places = zip(sweep.lines[-2:], numbers, strict=False)
        found = replace(sweep, places={x: n for x, n in places if n > 1})
        values = [*(x.result for x in sweep.dots), *_read(sweep)]
        held = sum(n for n in map(found.size, values) if n > 1)
        if found.places and held * registers <= _REGISTERS and found.count >= threads:
            yield found


def _read(sweep: Sweep) -> set[Value]:
    return {x for move in sweep.dots for x in move.operands}
