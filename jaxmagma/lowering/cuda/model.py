"""What blocks of threads are chosen, where their parameters leave it open.

The rules and numbers here were found by timing (``python -m benchmarks.variants``), on an H200.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from jaxmagma import parity
from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.blocks import FEW_OCTETS, QUAD_FIBRES, WORD, Block
from jaxmagma.lowering.cuda.gemms import blocking_of
from jaxmagma.lowering.cuda.parameters import (
    FREED,
    MAX_THREADS,
    RESERVED_BYTES,
    WARP,
    Parameters,
)
from jaxmagma.lowering.cuda.shared import Shared, rooms_of
from jaxmagma.lowering.cuda.sweeps import (
    BY_TENSOR_CORES,
    Accumulation,
    Assembly,
    Gemm,
    Stage,
    Sweep,
    as_mode,
    live_registers,
)
from jaxmagma.lowering.kernel import Declined, Excess
from jaxmagma.parity import Halves
from jaxmagma.plan import Plan, Product


# Threads that a multiprocessor should have at a time.
ENOUGH_THREADS = 512

# So many threads keep a multiprocessor busy even if each has work of its own. The compiler must be
# told to leave room for them where a thread does several operations on fibres of so many registers,
# or so many on single values; and for all that there can be, where it needs no more than the last.
BUSY_THREADS = 384
CROWDED_REGISTERS = 45
SEVERAL_MOVES = 8
CROWDED_MOVES = 100
LIGHT_REGISTERS = 42

# Tensor cores take fibres of so many values or more, if a thread would need more registers than
# this; than the next, if an element has few fibres. A quad has so many fibres one after the other,
# which share what it has of a matrix.
FEW_VALUES = 10
THREAD_REGISTERS = 43
ALONE_REGISTERS = 59
QUAD_LINES = 4
# Of complex fibres: so long ones, where pieces of matrices take less than this of the time that
# threads take; or where these would need more registers than the first; always beyond the second.
COMPLEX_VALUES = 8
COMPLEX_SHARE = 0.7
COMPLEX_REGISTERS = 88
MOST_COMPLEX_REGISTERS = 150
# Threads of an element whose fibres are many. Twice as many if shared memory has room for one such
# group alone, or for two and registers for both.
QUAD_THREADS = 128
QUAD_REGISTERS = 60
# Registers of a thread for places in memory, beside its values and matrices; more for both ends of
# fibres in several operations; and at least, beside whole sums and fibres.
QUAD_PLACES = 36
MIRRORED_PLACES = 32
WHOLE_PLACES = 16
# Symmetric matrices are multiplied half by half where so many multiply-adds for each value of
# memory take time; by tensor cores if they are so large: lesser halves leave much of a piece empty.
MANY_PRODUCTS = 10
SPLIT_BY_QUADS = 13
# Beyond so many stages, values go through shared memory more often than is worth it.
MOST_STAGES = 5
# The bytes that memory gives at once.
SECTOR = 32
# The copy engine brings operands, unless a warp reads them in so few steps, or a multiprocessor
# would have fewer groups than these.
DIRECT_OCTETS = 2
FEWEST_GROUPS = 2
# Multiply-adds of an accumulation that are work for one thread.
ACCUMULATED_VALUES = 1024
# What threads have at hand of the constant bank. Each value beyond takes them ten cycles and more.
CONSTANT_CACHE_BYTES = 2048
# Where a fibre of four-byte values takes no more registers, a thread has so many at a time; two, if
# it is multiplied with matrices in shared memory, and not for several operations.
PACKED = ((10, 4), (18, 2))
NEAR_REGISTERS = 75
# A warp that has to arrange matrices for itself uses them for so many elements in turn.
TRACED_SLICES = 8
# The most padding of an axis in shared memory. Four lanes along fibres and lines side by side may
# need strides that are far from those of a tile.
NARROW = 5
WIDE = 15
# Bank conflicts that a value of an element is worth, where there is room for many elements, and
# where there is not.
CHEAP, DEAR = 1e-3, 0.03
# So long are rows that had better come to each warp as it needs them.
ROW_VALUES = 11
# One warp has registers for so many of sums, and a multiprocessor for so many warps then. So many
# threads of others have one element, if there are sums.
WARP_SUMS = 24
WARPS_WITH_SUMS = 8
THREADS_WITH_SUMS = 48
# What a multiprocessor asks for of the elements after these, at most: more is gone when it is read.
ASKED_BYTES = 96 << 10
# Matrices stay in registers, if they take no more than this; less for each fibre more of a quad.
HELD_REGISTERS = 150
ANOTHER_FIBRE = 20
# Of 252 bytes of registers that the threads of a warp share, matrices beside sums have so many:
# with 200 others would spill.
UNIFORM_BYTES = 192


def choose(
    plan: Plan,
    parameters: Parameters,
    limits: Limits,
    even_odd: bool | None = None,
    in_rows: bool = False,
) -> Block | Declined:
    """The block for a plan, with these parameters and else the model's; or why there is none."""
    block = _choose(plan, parameters, limits, even_odd, in_rows)
    if isinstance(block, Block) and wants_ahead(block):
        ahead = _choose(plan, replace(parameters, ahead=FREED), limits, even_odd, in_rows)
        # Not if gathered tiles, which then have a place of their own, leave less room for others.
        if isinstance(ahead, Block) and ahead.fetched == block.fetched:
            return ahead
    return block


def wants_rows(block: Block) -> bool:
    """Whether to try how quads do if operands come to them in rows, as they need them."""
    return block.quads and not (block.alone or block.summed) and block.limits.bulk_copies


def comes_in_rows(block: Block) -> bool:
    """Whether most of what a block reads and writes does, in rows that are long enough."""
    sizes = block.plan.tiles
    rows = sum(sizes[tile].size for stream in block.streams for tile in stream.tiles)
    moved = {block.origin(x).tile for stage in block.stages for x in block.read(stage)}
    moved = {x for x in moved if block.is_outside(x)}
    results = {block.plan.results[out] for out in block.stored}
    every = sum(sizes[x].size for x in moved) + sum(sizes[x].size for x in results)
    return 2 * rows > every and all(x.length >= ROW_VALUES for x in block.streams)


def wants_panels(block: Block | Declined) -> bool:
    """Whether warps had better have elements whole."""
    if isinstance(block, Declined):
        return True
    if len(block.stages) > MOST_STAGES or reads_apart(block):
        return True
    gemms = [x for x in block.stages if isinstance(x, Gemm)]
    return any(not block.plan.tiles[x].batched for gemm in gemms for x in gemm.step.operands)


def keeps_more_busy(joined: Block, apart: Block) -> bool:
    """Whether fields of vectors, which have more lines, take no more stages and memory than apart.

    Where they take more, points are no stage by themselves if fields are apart, which saves more.
    """
    room, room_apart = (x.elements * x.groups * resident(x) for x in (joined, apart))
    return len(joined.stages) <= len(apart.stages) and room >= room_apart


def reads_apart(block: Block) -> bool:
    """Whether threads have an element each, and access more of it than a sector of memory."""
    if len(block.stages) > 1 or block.elements < block.threads:
        return False
    ends = (*range(len(block.program.inputs)), *block.plan.results)
    tiles = [block.plan.tiles[x] for x in ends]
    return max(x.size * x.dtype.itemsize for x in tiles if x.batched) > SECTOR


def wants_ahead(block: Block) -> bool:
    """Whether operands had better come ahead: few groups would wait, first for an index."""
    waits = bool(block.fetched) and bool(block.gathered) and not block.summed
    return block.parameters.ahead is None and waits


def _choose(
    plan: Plan, parameters: Parameters, limits: Limits, even_odd: bool | None, in_rows: bool
) -> Block | Declined:
    block = Block(plan, parameters, limits, even_odd, in_rows)
    block.halves = halves_of(block)
    # Without padding only where an element has no room otherwise.
    for tight, staging in itertools.product((False, True), (True, False)):
        if not staging and not any(block.origin(x).index is None for x in block.staged):
            continue  # nothing was staged that need not be
        block.staging = staging
        block.stages = block.schedule()
        if not block.quads and wants_quads(block):
            block.quads = True
            block.halves = halves_of(block)
            block.stages = block.schedule()
        block.holds = holds(block)
        if block.accumulations and block.holds:
            block.stages = block.schedule(block.matrix_registers())
            block.holds = holds(block)
        block.near = [] if block.quads else block.find_near(CONSTANT_CACHE_BYTES)
        block.bank = block.fill_bank()
        block.packed = packed(block)
        choose_groups(block)
        block.streams = block.find_streams(block.stages)
        read = block.read_whole()
        for count in fetches(block, len(read)):
            block.uses = block.find_uses(read[:count])
            for elements, threads in shapes(block):
                choose_threads(block, elements, threads, tight)
                fewest = block.elements == block.groups == 1
                most = most_shared(block, fewest)
                alone = count and not block.ahead and resident(block) < FEWEST_GROUPS
                if block.shared_bytes() <= most and not (alone and block.parameters.fetch is None):
                    block.prefetch = wants_prefetch(block)
                    return block
    count = block.elements * block.groups
    most = most_shared(block, count == 1)
    return Declined(
        f"{'one element needs' if count == 1 else f'{count} elements need'} "
        f"{-(-block.shared_bytes() >> 10)} KB of shared memory, and a block has {most >> 10} KB",
        Excess("room", block.shared_bytes() / most),
    )


def wants_prefetch(block: Block) -> bool:
    """Whether to ask for what is read later, and for sums of what the elements after these have.

    All multiprocessors share a cache. What the next elements have must fit there beside what these
    read and write, or either is gone when it is read. Warps that have elements of their own have
    little of both.
    """
    if not block.summed or block.alone:
        return True
    read = {block.origin(x).tile for stage in block.stages for x in block.read(stage)}
    tiles = [block.plan.tiles[x] for x in read - block.gathered if x < block.inputs]
    values = block.groups * block.elements * sum(x.size for x in tiles if x.batched)
    blocks = min(resident(block), max(1, BUSY_THREADS // (block.groups * block.threads)))
    return blocks * values * block.dtype.itemsize <= ASKED_BYTES


def halves_of(block: Block) -> dict[int, Halves]:
    """Constant matrices of mode products that are better multiplied half by half."""
    found: dict[int, Halves] = {}
    asked = block.even_odd
    if not (multiplies_much(block) if asked is None else asked):
        return found
    for _, step in block.plan.numbered_steps():
        mode = as_mode(block.plan, step)
        array = None if mode is None else block.constant(mode.matrix)
        if mode is None or array is None or array.ndim != 2 or mode.matrix in found:
            continue
        rows, columns = array.shape
        worth = parity.is_worth(rows, columns, block.dtype)
        if block.quads and asked is None:
            worth = worth and min(rows, columns) >= SPLIT_BY_QUADS
        halves = parity.halves(array) if worth else None
        if halves is not None:
            found[mode.matrix] = halves
    return found


def multiplies_much(block: Block) -> bool:
    """Whether products are so many for each value of memory that fewer of them save time."""
    steps = [step for step in block.plan.steps if isinstance(step, Product)]
    products = sum(math.prod(step.extents.values()) for step in steps)
    moved = {
        block.origin(x).tile
        for step in block.plan.steps
        for x in step.operands
        if block.is_outside(x)
    }
    tiles = [*moved, *(block.plan.results[out] for out in block.stored)]
    return products >= MANY_PRODUCTS * sum(block.plan.tiles[x].size for x in tiles)


def wants_quads(block: Block) -> bool:
    """Whether tensor cores had better multiply fibres: whole ones are too much for a thread."""
    if block.dtype not in BY_TENSOR_CORES or block.parameters.owner is not None:
        return False
    if any(min(block.plan.tiles[x].shape) >= SPLIT_BY_QUADS for x in block.halves):
        return True
    sweeps = [stage for stage in block.stages if isinstance(stage, Sweep)]
    if block.dtype.kind == "c":
        return wants_complex_quads(block, sweeps)
    few = -(-max((x.count for x in sweeps), default=0) // 8) <= FEW_OCTETS
    most = ALONE_REGISTERS if few or share_of_quads(block, sweeps) > 1 else THREAD_REGISTERS
    return any(
        longest(block, x) >= FEW_VALUES and live_registers(block.plan, x, {}) > most for x in sweeps
    )


def wants_complex_quads(block: Block, sweeps: list[Sweep]) -> bool:
    """The same for complex numbers: four real products each, so that their time counts sooner."""
    long = max((longest(block, x) for x in sweeps), default=0)
    if not long:
        return False
    share = share_of_quads(block, sweeps)
    live = max(live_registers(block.plan, x, {}) for x in sweeps)
    if live > MOST_COMPLEX_REGISTERS:
        return True
    crowded = live > COMPLEX_REGISTERS and share < 1
    return crowded or (long >= COMPLEX_VALUES and share < COMPLEX_SHARE)


def share_of_quads(block: Block, sweeps: Iterable[Sweep]) -> float:
    """Time of tensor cores, which multiply whole pieces, of that of threads."""
    moves = [move for sweep in sweeps for move in sweep.moves if move.matrix is not None]
    products = [(move.result.length, move.operands[0].length) for move in moves]
    pieces = sum(-(-rows // 8) * 8 * (-(-columns // 4) * 4) for rows, columns in products)
    wanted = max(1, sum(rows * columns for rows, columns in products))
    return pieces / block.limits.tensor_rate / wanted


def longest(block: Block, sweep: Sweep) -> int:
    """Values of the longest fibre that a matrix multiplies."""
    moves = [move for move in sweep.moves if move.matrix is not None]
    return max((x.length for m in moves for x in (m.result, *m.operands)), default=0)


def holds(block: Block) -> bool:
    """Whether all matrices stay in registers: of every warp, or those that its threads share.

    Of the latter beside sums only, where it was faster.
    """
    if not block.quads:
        return bool(block.summed) and block.thread_matrix_bytes() <= UNIFORM_BYTES
    fibres = block.parameters.fibres or QUAD_FIBRES
    most = HELD_REGISTERS - ANOTHER_FIBRE * (fibres - 1) - block.kept_registers
    return block.matrix_registers() <= most


def packed(block: Block) -> int:
    """Fibres that a thread has at a time: several short ones of small values.

    They share what it reads of matrices, and more of memory is on its way.
    """
    if block.quads or block.whole:
        return 1
    if block.parameters.fibres is not None:
        return block.parameters.fibres
    if block.dtype.itemsize >= WORD:
        return 1
    sweeps = [x for x in block.stages if isinstance(x, Sweep)]
    live = max((live_registers(block.plan, x, block.halves) for x in sweeps), default=0)
    if block.near:
        few = all(len(x.moves) <= SEVERAL_MOVES for x in sweeps)
        return 2 if few and live <= NEAR_REGISTERS else 1
    return next((n for most, n in PACKED if live <= most), 1)


def choose_groups(block: Block) -> None:
    """Groups of a block, and how many slices of elements each works through."""
    groups = block.parameters.groups
    if groups is None:
        groups = 2 if is_direct(block) and block.parameters.threads in (None, 32) else 1
    block.groups = 1 if block.summed else groups
    slices = block.parameters.slices
    if slices is None:
        traced = any(not block.is_constant(x.tile) for x in block.pieces())
        slices = TRACED_SLICES if (is_direct(block) and traced) or block.near else 1
    block.slices = 1 if block.summed or block.parameters.ahead else slices


def fetches(block: Block, most: int) -> Iterable[int]:
    """How many operands the copy engine may bring, the model's favourite first."""
    if block.parameters.fetch is not None:
        return (min(block.parameters.fetch, most),)
    none = not block.quads or is_direct(block) or not block.limits.bulk_copies
    return (0,) if none else range(most, -1, -1)


def shapes(block: Block) -> list[tuple[int, int]]:
    """(elements, threads) of a group: the model's favourite, then ever smaller ones."""
    most = max([threads_of(block, stage) for stage in block.stages], default=1)
    given = block.parameters
    if given.elements is not None:
        threads = min(MAX_THREADS, _round_up(given.elements * most, 32))
        return [(given.elements, given.threads or threads)]
    if block.alone:
        if block.accumulations and block.octets() > 2:
            return [(1, given.threads or 32)]  # no registers for a second element beside sums
        # Eight fibres are multiplied in the time of sixteen.
        return [(1 + block.octets() % 2, given.threads or 32)]
    largest = given.threads or 256
    if block.quads and most >= QUAD_THREADS:
        return [(1, given.threads or QUAD_THREADS)]
    if most > largest:
        return [(1, given.threads or min(512, _round_up(most, 32)))]
    if block.accumulations and not (block.quads or given.threads) and most >= THREADS_WITH_SUMS:
        # Sums have barriers of their own: the fewer threads, the fewer wait there.
        return [(1, _round_up(most, 32))]
    best, best_score = 1, 0.0
    for slots in range(1, 1 + (1 if block.streams else largest // most)):
        threads = given.threads or _round_up(slots * most, 32)
        used = slots * most / threads
        # 128 threads are enough to be several blocks on a multiprocessor, and few enough for
        # their barriers to cost little.
        far = math.log2(threads / 128)
        score = used * (1 - (0.3 * far if far > 0 else -0.6 * far))
        if score > best_score:
            best, best_score = slots, score
    return [(slots, given.threads or _round_up(slots * most, 32)) for slots in range(best, 0, -1)]


def threads_of(block: Block, stage: Stage) -> int:
    """Threads that one element keeps busy."""
    if isinstance(stage, Gemm):
        return blocking_of(stage.step, block.dtype.itemsize).count
    if isinstance(stage, Accumulation):
        return -(-math.prod(stage.step.extents.values()) // ACCUMULATED_VALUES)
    if isinstance(stage, Assembly):
        return -(-block.plan.tiles[stage.number].size // 4)
    if stage.lanes > 1:
        return 32 * -(-block.octets() // QUAD_LINES)
    if stage.light:
        # A thread takes several values, and more of them where a gemm comes after.
        copied = block.staged | block.rewritten
        staged = any(move.result.tile in copied for move in stage.moves)
        return -(-stage.count // (16 if staged else 4))
    fibres = any(isinstance(x, Sweep) and not x.single for x in block.stages)
    if stage.single and fibres and len(stage.moves) <= CROWDED_MOVES:
        # The threads that have fibres take several points, unless points are the most work.
        return -(-stage.count // 4)
    return -(-stage.count // (1 if stage.single else block.packed))


def choose_threads(block: Block, elements: int, threads: int, tight: bool) -> None:
    """Chooses how a group of threads does so many elements, and where their tiles are."""
    block.elements, block.threads = elements, threads
    if threads > WARP:
        # Barriers of several warps are barriers of the whole block.
        block.groups = 1
    place_tiles(block, tight)
    if wants_more_threads(block):
        # Two groups of twice the threads would not have registers for sums.
        both = bool(block.accumulations) and not block.alone and resident(block) == 2
        block.threads = BUSY_THREADS // 2 if both else 2 * block.threads
        place_tiles(block, tight)
    given = block.parameters.min_blocks
    block.min_blocks = least_blocks(block) if given is None else given


def least_blocks(block: Block) -> int:
    """How many blocks the compiler must leave registers for on a multiprocessor; 0 if it may say.

    For sweeps it pays to let it take the registers it likes, unless they are so many that too few
    threads are left; for gemms, of which a thread has blocks, not.
    """
    if any(isinstance(stage, Gemm) for stage in block.stages):
        return 0
    few = 1
    sweeps = [x for x in block.stages if isinstance(x, Sweep)]
    if block.whole:
        live = max(live_registers(block.plan, x, block.halves) for x in sweeps)
        needed = block.kept_registers + live + WHOLE_PLACES
        most = block.limits.registers // (block.threads * needed)
        few = min(resident(block), most, ENOUGH_THREADS // block.threads)
    elif block.accumulations:
        # Sums leave the compiler no registers to keep what it could as well read again.
        several = block.alone or any(len(x.moves) > SEVERAL_MOVES for x in sweeps)
        few = min(resident(block), BUSY_THREADS // (2 if several else 1) // block.threads)
    elif block.quads:
        most = block.limits.registers // (block.threads * quad_registers(block))
        few = 1 if block.alone else min(resident(block), enough_blocks(block), most)
    elif any(is_crowded(block, stage) for stage in block.stages):
        few = min(3, round(BUSY_THREADS / block.threads))
    elif wants_all_threads(block):
        few = min(resident(block), MAX_THREADS // block.threads)
    return max(1, few)


def place_tiles(block: Block, tight: bool) -> None:
    """Finds room for tiles: those that take each other's place where it is short."""
    in_place = block.quads
    block.shared = shared_of(block, in_place, tight)
    if not (in_place or has_room(block)):
        in_place = True
        block.shared = shared_of(block, in_place, tight)
    may_wait = block.ahead and not block.twice and not block.alone
    if may_wait and block.fetched and not has_room(block):
        # Where more groups have room so, what comes ahead comes late.
        early, most = block.shared, resident(block)
        block.shared = shared_of(block, in_place, tight, late=True)
        if resident(block) == most:
            block.shared = early
    # What warps have of a sum meets there.
    block.shared.values = max([block.shared.values, *map(block.sum_size, block.accumulated)])


def shared_of(block: Block, in_place: bool, tight: bool, late: bool = False) -> Shared:
    """The places of tiles, for the threads and elements of the block."""
    padding = 0 if tight else WIDE if block.quads else NARROW
    possible = block.possible_spreads()
    price = DEAR if is_crowded_by_tiles(block) else CHEAP
    threads, elements = block.threads, block.elements
    shared = Shared(block.uses, threads, elements, padding, possible, price, late)
    return shared.place(rooms_of(block.uses, in_place))


def is_crowded_by_tiles(block: Block) -> bool:
    """Whether tiles leave shared memory room for few elements.

    Those do that wait for what they are multiplied with, and those of quads, of which an element
    has many. Complex values need theirs.
    """
    if any(isinstance(stage, Accumulation) for stage in block.stages):
        return True
    return block.quads and not block.alone and block.dtype.kind == "f"


def wants_more_threads(block: Block) -> bool:
    """Whether quads have room for few groups, and registers for more threads."""
    if not block.quads or block.parameters.threads is not None:
        return False
    if block.alone:
        # Two warps share sums that are too large for one, or memory that is too small for all.
        large = block.sums_registers(1) > WARP_SUMS
        few = resident(block) < WARPS_WITH_SUMS
        return bool(block.accumulations) and block.octets() > 2 and (large or few)
    if not QUAD_THREADS <= block.threads <= MAX_THREADS // 2:
        return False
    sweeps = [x for x in block.stages if isinstance(x, Sweep) and x.lanes > 1]
    light = all(live_registers(block.plan, x, block.halves) <= QUAD_REGISTERS for x in sweeps)
    return resident(block) == 1 or (resident(block) == 2 and light)


def wants_all_threads(block: Block) -> bool:
    """Whether threads have little each, but a compiler would have them load many points ahead.

    Then more of them hide more of the time that loads take.
    """
    sweeps = [stage for stage in block.stages if isinstance(stage, Sweep)]
    fibres = max((x.count for x in sweeps if not x.single), default=0)
    light = all(live_registers(block.plan, x, block.halves) <= LIGHT_REGISTERS for x in sweeps)
    points = [x.count for x in sweeps if x.single and not block.copies(x)]
    return light and any(count >= 4 * fibres > 0 for count in points)


def is_crowded(block: Block, stage: Stage) -> bool:
    """Whether a thread would take more registers than leave room for enough threads."""
    if not isinstance(stage, Sweep):
        return False
    if stage.single:
        return len(stage.moves) > CROWDED_MOVES
    several = len(stage.moves) > SEVERAL_MOVES
    return several and live_registers(block.plan, stage, block.halves) > CROWDED_REGISTERS


def has_room(block: Block) -> bool:
    """Whether shared memory leaves a multiprocessor enough threads to be busy."""
    return resident(block) * block.threads * block.groups >= ENOUGH_THREADS


def resident(block: Block) -> int:
    """Blocks that a multiprocessor has shared memory for."""
    return block.limits.shared // (block.shared_bytes() + RESERVED_BYTES)


def quad_registers(block: Block) -> int:
    """Registers that a thread needs, or it would keep some of its values in memory."""
    sweeps = [x for x in block.stages if isinstance(x, Sweep) and x.lanes > 1]
    live = max((live_registers(block.plan, x, block.halves) for x in sweeps), default=0)
    several = any(block.is_mirrored(x) and len(x.moves) > SEVERAL_MOVES for x in sweeps)
    places = QUAD_PLACES + (MIRRORED_PLACES if several else 0)
    return live + places + (block.matrix_registers() if block.holds else 0)


def enough_blocks(block: Block) -> int:
    """So many that more would not have the registers that quads need."""
    return max(1, round(BUSY_THREADS / (block.threads * block.groups)))


def is_direct(block: Block) -> bool:
    """Whether a warp reads an element in so few steps that no copy engine pays."""
    return 0 < block.octets() <= DIRECT_OCTETS


def most_shared(block: Block, fewest: bool) -> int:
    """Bytes of shared memory that a block may have, of one element or of several."""
    most = block.limits.shared_of_block
    return most if fewest else min(most, block.parameters.shared_bytes)


def busy(block: Block) -> float:
    """The part of the threads that the widest stage has work for."""
    most = max([threads_of(block, stage) for stage in block.stages], default=1)
    work = block.elements * most
    return work / (_round_up(work, block.threads))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
