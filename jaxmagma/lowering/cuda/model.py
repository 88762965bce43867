"""What blocks of threads are chosen, where their parameters leave it open.

The rules and numbers here were found by timing (``python -m benchmarks.variants``), on an H200.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.layout import ENOUGH_THREADS, layout_of
from jaxmagma.lowering.cuda.matrices import held_registers, matrices_of
from jaxmagma.lowering.cuda.ownership import QUAD_THREADS, SEVERAL_MOVES, ownerships
from jaxmagma.lowering.cuda.panels import Panels
from jaxmagma.lowering.cuda.parameters import MAX_THREADS, SHARED_BYTES, WARP, Parameters
from jaxmagma.lowering.cuda.quads import schedules
from jaxmagma.lowering.cuda.schedule.ends import ends_of
from jaxmagma.lowering.cuda.schedule.sweeps import Gemm, Sweep, made_by
from jaxmagma.lowering.cuda.transfers import transfers_of
from jaxmagma.lowering.cuda.transfers.streams import streams_of
from jaxmagma.lowering.kernel import Declined, Excess
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.program import Gather


# So many threads keep a multiprocessor busy even if each has work of its own.
BUSY_THREADS = 384
# Of quads twice as many threads if shared memory has room for one group alone, or for two and
# registers for both.
QUAD_REGISTERS = 60
# Registers of a thread for places in memory, beside its values and matrices; more for both ends of
# fibres in several operations; and at least, beside whole sums and fibres.
QUAD_PLACES = 36
MIRRORED_PLACES = 32
WHOLE_PLACES = 16
# Values that may go through shared memory for each that an element has in memory. Shared memory
# moves about seven times as many as memory does, at best: with bank conflicts, and with all else
# that goes through L1, it is the slower one from here on (benchmarks/results/rules-h200.txt).
MOST_EXCHANGED = 3
# Registers that a lane may keep in local memory to save that (benchmarks/results/meshes-h200.txt).
FEW_SPILLED = 64
# The part of a tile that padding makes it larger by, at most.
PADDING = 0.25
# The bytes that memory gives at once, and that L1 keeps together.
SECTOR, LINE = 32, 128
# The copy engine brings operands, unless a multiprocessor would have fewer groups than these.
FEWEST_GROUPS = 2
# So long are rows that had better come to each warp as it needs them.
ROW_VALUES = 11
# What a multiprocessor asks for of the elements after these, and of these for later stages, at
# most: more is gone when it is read (benchmarks/results/rules-h200.txt).
ASKED_BYTES = 96 << 10
ASKED_LATER_BYTES = 224 << 10


def choose(
    plan: Plan,
    parameters: Parameters,
    limits: Limits,
    even_odd: bool | None = None,
    in_rows: bool = False,
) -> Block | Declined:
    """The block for a plan, with these parameters and else the model's; or why there is none.

    Matrices that are symmetric about their centre may be multiplied by ``even_odd`` halves, and
    operands may come ``in_rows``.
    """
    for block in _candidates(plan, parameters, limits, even_odd, in_rows):
        bytes_, most = block.shared_bytes, _most_shared(block)
        given = parameters.min_blocks
        few = _least_blocks(block) if given is None else given
        if bytes_ <= most and not (_may_fetch(block, parameters) and _is_alone(block, few)):
            block = replace(block, min_blocks=few)
            return replace(block, prefetch=_wants_prefetch(block))
    count = block.elements
    return Declined(
        f"{'one element needs' if count == 1 else f'{count} elements need'} "
        f"{-(-bytes_ >> 10)} KB of shared memory, and a block has {most >> 10} KB",
        Excess("room", bytes_ / most),
    )


def _candidates(
    plan: Plan, parameters: Parameters, limits: Limits, even_odd: bool | None, in_rows: bool
) -> Iterator[Block]:
    """The model's favourite, then others that take less shared memory.

    Tiles have no padding only where an element has no room otherwise.
    """
    found = schedules(ends_of(plan, bool(parameters.ahead)), parameters, limits, even_odd)
    for tight in (False, True):
        for schedule in found:
            matrices = matrices_of(schedule)
            streams = streams_of(schedule, parameters) if in_rows else ()
            for transfers in transfers_of(schedule, streams, parameters, limits):
                room = math.inf
                for ownership in ownerships(matrices, transfers, parameters):
                    if 1 < ownership.elements > room:
                        continue
                    layout = layout_of(matrices, transfers, ownership, limits, tight)
                    block = Block(schedule, matrices, transfers, ownership, layout, limits)
                    threads = _more_threads(block) if parameters.threads is None else None
                    if threads is not None:
                        more = replace(ownership, threads=threads)
                        layout = layout_of(matrices, transfers, more, limits, tight)
                        block = replace(block, ownership=more, layout=layout)
                    yield block
                    # Elements of which there may be room for so many, if others have less padding.
                    fitting = ownership.elements * _most_shared(block) / max(1, block.shared_bytes)
                    room = (1 + PADDING) * fitting
                    if not schedule.quads and _may_fetch(block, parameters):
                        break  # threads had better have more elements


# ---- Threads -------------------------------------------------------------------------------------


def _more_threads(block: Block) -> int | None:
    """How many threads a group had better have: more, if few groups have room."""
    schedule, threads = block.schedule, block.ownership.threads
    if not schedule.quads:
        work = block.ownership.elements * block.ownership.widest
        more = min(BUSY_THREADS // max(1, block.resident), work) // WARP * WARP
        return more if more > threads and block.ownership.groups == 1 else None
    if schedule.alone:
        return None
    sweeps = [x for x in schedule.sweeps if x.lanes > 1]
    light = all(schedule.live_registers(x) <= QUAD_REGISTERS for x in sweeps)
    few = block.resident == 1 or (block.resident == 2 and light)
    return 2 * threads if few and QUAD_THREADS <= threads <= MAX_THREADS // 2 else None


def _least_blocks(block: Block) -> int:
    """How many blocks the compiler must leave registers for on a multiprocessor; 0 if it may say.

    For gemms, of which a thread has blocks, and matrices that are read in groups of values, it
    knows best.
    """
    schedule, threads = block.schedule, block.ownership.threads
    if any(isinstance(stage, Gemm) for stage in schedule.stages):
        return 0
    few, busy = 1, max(1, round(BUSY_THREADS / block.threads))
    if schedule.whole:
        needed = schedule.kept_registers + schedule.most_registers + WHOLE_PLACES
        most = block.limits.registers // (threads * needed)
        few = min(block.resident, most, ENOUGH_THREADS // threads)
    elif block.ends.accumulations:
        # Sums leave the compiler no registers to keep what it could as well read again.
        few = min(block.resident, BUSY_THREADS // 2 // threads)
    elif schedule.quads:
        most = block.limits.registers // (threads * _quad_registers(block))
        # More would not have the registers that quads need.
        few = 1 if schedule.alone else min(block.resident, busy, most)
    elif not block.matrices.near:
        few = busy
    return max(1, few)


def _quad_registers(block: Block) -> int:
    """Registers that a thread needs, or it would keep some of its values in memory."""
    schedule = block.schedule
    sweeps = [x for x in schedule.sweeps if x.lanes > 1]
    live = max(map(schedule.live_registers, sweeps), default=0)
    several = any(schedule.is_mirrored(x) and len(x.moves) > SEVERAL_MOVES for x in sweeps)
    places = QUAD_PLACES + (MIRRORED_PLACES if several else 0)
    return live + places + (held_registers(schedule) if block.matrices.held else 0)


# ---- Memory --------------------------------------------------------------------------------------


def _most_shared(block: Block) -> int:
    """Bytes of shared memory that a block may have, of one element or of several."""
    most = block.limits.shared_of_block
    return most if block.elements == 1 else min(most, SHARED_BYTES)


def _may_fetch(block: Block, parameters: Parameters) -> bool:
    """Whether the copy engine brings operands because the model likes it."""
    return bool(block.transfers.fetched) and parameters.fetch is None


def _is_alone(block: Block, few: int) -> bool:
    """Whether a multiprocessor has fewer groups than fetching is good for.

    Those of threads had better be so ``few`` as the compiler leaves registers for. Where it leaves
    registers for all, more of them do as well.
    """
    if not block.schedule.quads:
        return few == 1 or block.resident < few
    return not block.transfers.ahead and block.resident < FEWEST_GROUPS


def _wants_prefetch(block: Block) -> bool:
    """Whether to ask for what later stages read; for sums, for what the elements after these have.

    All multiprocessors share a cache. What they ask for must fit there beside what they read and
    write meanwhile, or it is gone when it is read. Warps that have elements of their own have
    little of both.
    """
    ends, schedule = block.ends, block.schedule
    if schedule.alone:
        return True
    if ends.summed:
        read, most = schedule.everything_read, ASKED_BYTES
        blocks = min(block.resident, max(1, BUSY_THREADS // block.threads))
    else:
        first = {x for stage in schedule.stages[:1] for x in schedule.read(stage)}
        first.update(block.transfers.fetched)
        read, most = schedule.everything_read - first, ASKED_LATER_BYTES
        blocks = block.min_blocks if block.min_blocks > 1 else block.resident
    tiles = [block.plan.tiles[x] for x in read - ends.gathered if x < ends.inputs]
    values = block.elements * sum(x.size for x in tiles if x.batched)
    return blocks * values * ends.dtype.itemsize <= most


# ---- Other ways ----------------------------------------------------------------------------------


def wants_rows(block: Block) -> bool:
    """Whether to try how quads do if operands come to them in rows, as they need them."""
    schedule = block.schedule
    few = schedule.alone or block.ends.summed
    return schedule.quads and not few and block.limits.bulk_copies


def comes_in_rows(block: Block) -> bool:
    """Whether most of what a block reads and writes does, in rows that are long enough."""
    ends, sizes, streams = block.ends, block.plan.tiles, block.transfers.streams
    rows = sum(sizes[tile].size for stream in streams for tile in stream.tiles)
    moved = {ends.origin(x).tile for x in block.schedule.everything_read}
    results = {block.plan.results[out] for out in ends.stored}
    every = sum(sizes[x].size for x in moved if ends.is_outside(x))
    every += sum(sizes[x].size for x in results)
    return 2 * rows > every and all(x.length >= ROW_VALUES for x in streams)


def may_have_panels(block: Block | Declined) -> bool:
    """Whether warps may do better that have elements whole."""
    if isinstance(block, Declined):
        return True
    needed = _needs_panels(block) or _applies_tables(block)
    return needed or _exchanges_most(block) or _works_in_rows(block)


def wants_panels(block: Block | Declined, panels: Panels) -> bool:
    """Whether these warps do better."""
    if isinstance(block, Declined) or _needs_panels(block):
        return True
    if _works_in_rows(block) and panels.has_rows:
        return True
    if _applies_tables(block) and panels.ownership.lanes > 1 and not panels.ownership.spilled:
        return True
    return _exchanges_most(block) and panels.ownership.spilled <= FEW_SPILLED


def keeps_more_busy(joined: Block, apart: Block) -> bool:
    """Whether fields of vectors, which have more lines, take no more stages and memory than apart.

    Where they take more, points are no stage by themselves if fields are apart, which saves more.
    """
    room, room_apart = (x.elements * x.resident for x in (joined, apart))
    return len(joined.schedule.stages) <= len(apart.schedule.stages) and room >= room_apart


def _works_alone(block: Block) -> bool:
    """Whether a thread has an element by itself in some stage, and not little of it in memory.

    Of half a sector threads side by side use half of what comes; of more, ever less. And what such
    a thread stores for others it could have kept, if it had everything itself: except for little
    that comes by way of shared memory. Where operands are gathered, half of them is apart in any
    case.
    """
    alone = any(x.count == 1 for x in block.schedule.sweeps)
    if _exchanged(block) and sum(_accessed(block)) <= LINE:
        return False
    most = SECTOR if block.ends.gathered else SECTOR // 2
    return alone and max(_accessed(block)) > most


def _needs_panels(block: Block) -> bool:
    """Whether threads have an element by themselves, or one operand of a product is a table."""
    gemms = [x for x in block.schedule.stages if isinstance(x, Gemm)]
    tables = any(not block.plan.tiles[x].batched for gemm in gemms for x in gemm.step.operands)
    return tables or _works_alone(block)


def _applies_tables(block: Block) -> bool:
    """Whether a thread has an element by itself that tables of float32 are applied to.

    Tensor cores do that without exchanges between threads; in float64 that is a loss for some
    (benchmarks/results/rules-h200.txt).
    """
    products = (x for x in block.schedule.sweeps if any(y.matrix is not None for y in x.moves))
    return block.ends.dtype == np.float32 and any(x.count == 1 for x in products)


def _works_in_rows(block: Block) -> bool:
    """Whether threads may have rows of an element: no matrix is applied, nothing is exchanged.

    They are apart in memory then, as lanes with elements are.
    """
    if not _is_pointwise(block):
        return False
    tiles = (block.plan.tiles[x] for x in (*range(block.ends.inputs), *block.plan.results))
    return any(x.batched and len(x.shape) > 1 for x in tiles)


def _exchanges_most(block: Block) -> bool:
    """Whether what goes through shared memory takes longer than what elements have in memory."""
    return _exchanged(block) >= MOST_EXCHANGED * _in_memory(block)


def _exchanged(block: Block) -> int:
    """Values of an element that stages read from shared memory and write there."""
    ends, size, shared = block.ends, block.plan.tiles, block.layout.tiles
    values = 0
    for stage in block.schedule.stages:
        read = [x.tile for x in stage.loads] if isinstance(stage, Sweep) else stage.step.operands
        values += sum(size[x].size for x in read if ends.origin(x).tile in shared)
        values += sum(size[x].size for x in made_by(stage) if x in shared)
    return values


def _in_memory(block: Block) -> int:
    """Values of an element's operands and results, and of what is gathered for it."""
    plan, first = block.plan, block.ends.inputs
    gathers = {n: x for n, x in plan.numbered_steps() if isinstance(x, Gather)}
    indices = {x.index for x in gathers.values()}
    operands = (x for x in range(first) if plan.tiles[x].batched and x not in indices)
    return sum(plan.tiles[x].size for x in (*operands, *gathers, *plan.results))


def _is_pointwise(block: Block) -> bool:
    """Whether all stages are sweeps, and none of them applies a matrix."""
    sweeps = block.schedule.sweeps
    matrices = any(move.matrix or move.is_dot for sweep in sweeps for move in sweep.moves)
    return len(sweeps) == len(block.schedule.stages) and not matrices and not block.ends.summed


def _accessed(block: Block) -> list[int]:
    """Bytes of each operand and result of an element."""
    tiles = [block.plan.tiles[x] for x in (*range(block.ends.inputs), *block.plan.results)]
    return [x.size * x.dtype.itemsize for x in tiles if x.batched]
