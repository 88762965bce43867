"""Whether tensor cores multiply fibres, and which matrices are multiplied by halves.

The rules and numbers here were found by timing (``python -m benchmarks.variants``), on an H200.
"""

import math
from collections.abc import Iterable, Mapping

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.matrices import are_held, held_registers
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.schedule import FEW_OCTETS, Schedule, schedules_of
from jaxmagma.lowering.cuda.schedule.ends import Ends
from jaxmagma.lowering.cuda.schedule.sweeps import BY_TENSOR_CORES, Sweep, as_mode, live_registers
from jaxmagma.plans import parity
from jaxmagma.plans.parity import Halves
from jaxmagma.plans.plan import Product


# Tensor cores take fibres of so many values or more, if a thread would need more registers than
# this; than the next, if an element has few fibres.
FEW_VALUES = 10
THREAD_REGISTERS = 43
ALONE_REGISTERS = 59
# Complex fibres of so many values or more, four real products each, if they are done sooner so.
COMPLEX_VALUES = 8
# More multiply-adds than so many for each value of memory take time. Only then symmetric matrices
# are multiplied half by half, by tensor cores if they are so large: lesser halves leave much of a
# piece empty. And only then tensor cores are worth more than the registers of threads
# (benchmarks/results/rules-h200.txt).
MANY_PRODUCTS = 12
SPLIT_BY_QUADS = 13


def schedules(
    ends: Ends, parameters: Parameters, limits: Limits, asked: bool | None
) -> list[Schedule]:
    """As ``schedules_of``; with halves, where that is less work, if ``asked`` for."""
    quads = parameters.owner == "quads" and ends.dtype in BY_TENSOR_CORES
    halves = _halves(ends, quads, asked)
    found = schedules_of(ends, quads, halves)
    if parameters.owner is None and _wants_quads(found[0], limits):
        quads, halves = True, _halves(ends, True, asked)
        found = schedules_of(ends, quads, halves)
    if ends.accumulations and are_held(found[0]):
        found = schedules_of(ends, quads, halves, held_registers(found[0]))
    return found


# ---- Halves --------------------------------------------------------------------------------------


def _halves(ends: Ends, quads: bool, asked: bool | None) -> Mapping[int, Halves]:
    """Constant matrices of mode products that are better multiplied half by half."""
    found: dict[int, Halves] = {}
    if not (_multiplies_much(ends) if asked is None else asked):
        return found
    for _, step in ends.plan.numbered_steps():
        mode = as_mode(ends.plan, step)
        array = None if mode is None else ends.constant(mode.matrix)
        if mode is None or array is None or array.ndim != 2 or mode.matrix in found:
            continue
        rows, columns = array.shape
        worth = parity.is_worth(rows, columns, ends.dtype)
        if quads and asked is None:
            worth = worth and min(rows, columns) >= SPLIT_BY_QUADS
        halves = parity.halves(array) if worth else None
        if halves is not None:
            found[mode.matrix] = halves
    return found


def _multiplies_much(ends: Ends) -> bool:
    """Whether mode products are so many for each value of memory that fewer save time."""
    plan = ends.plan
    steps = [x for x in plan.steps if isinstance(x, Product) and as_mode(plan, x) is not None]
    products = sum(math.prod(step.extents.values()) for step in steps)
    read = {x for step in plan.steps for x in step.operands if ends.is_outside(x)}
    tiles = [*{ends.origin(x).tile for x in read}, *(plan.results[out] for out in ends.stored)]
    return products > MANY_PRODUCTS * sum(plan.tiles[x].size for x in tiles)


# ---- Tensor cores --------------------------------------------------------------------------------


def _wants_quads(schedule: Schedule, limits: Limits) -> bool:
    """Whether tensor cores had better multiply fibres: whole ones are too much for a thread."""
    plan, sweeps = schedule.plan, schedule.sweeps
    if schedule.ends.dtype not in BY_TENSOR_CORES:
        return False
    if any(min(plan.tiles[x].shape) >= SPLIT_BY_QUADS for x in schedule.halves):
        return True
    if schedule.ends.dtype.kind == "c":
        long = any(_longest(x) >= COMPLEX_VALUES for x in sweeps)
        return long and _share(sweeps, limits) < 1
    if not _multiplies_much(schedule.ends):
        return False
    few = -(-max((x.count for x in sweeps), default=0) // 8) <= FEW_OCTETS
    most = ALONE_REGISTERS if few or _share(sweeps, limits) > 1 else THREAD_REGISTERS
    return any(_longest(x) >= FEW_VALUES and live_registers(plan, x, {}) > most for x in sweeps)


def _share(sweeps: Iterable[Sweep], limits: Limits) -> float:
    """Time of tensor cores, which multiply whole pieces, of that of threads."""
    moves = [move for sweep in sweeps for move in sweep.moves if move.matrix is not None]
    products = [(move.result.length, move.operands[0].length) for move in moves]
    pieces = sum(-(-rows // 8) * 8 * (-(-columns // 4) * 4) for rows, columns in products)
    wanted = max(1, sum(rows * columns for rows, columns in products))
    return pieces / limits.tensor_rate / wanted


def _longest(sweep: Sweep) -> int:
    """Values of the longest fibre that a matrix multiplies."""
    moves = [move for move in sweep.moves if move.matrix is not None]
    return max((x.length for m in moves for x in (m.result, *m.operands)), default=0)
