"""How a plan is done by blocks of threads: who does what, and how many at a time.

The stages of a plan (see ``sweeps``) are done one after the other by a group of threads, for
several elements at a time.  Here the sizes are chosen, who owns fibres, and the matrices that go to
the constant bank; ``shared`` finds room for the tiles.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxmagma import parity
from jaxmagma.choices import architecture
from jaxmagma.lowering.cuda import banks
from jaxmagma.lowering.cuda.accumulations import SHARED_REGISTERS, accumulations, registers_of
from jaxmagma.lowering.cuda.gemms import blocking_of
from jaxmagma.lowering.cuda.pieces import Pieces, pieces_of, split_pieces_of
from jaxmagma.lowering.cuda.shared import BEFORE, Shared, Uses, rooms_of
from jaxmagma.lowering.cuda.sources import Origin, Strided, composed, origin, placed_once
from jaxmagma.lowering.cuda.sweeps import (
    ALONG,
    QUAD,
    Accumulation,
    Assembly,
    Gemm,
    Move,
    Scheduler,
    Stage,
    Sweep,
    as_mode,
    copy_sweep,
    is_mirrored,
    live_registers,
)
from jaxmagma.parity import Halves
from jaxmagma.plan import Plan, Product
from jaxmagma.program import Gather, Place, View


TYPES = {
    np.dtype("float64"): "double",
    np.dtype("float32"): "float",
    np.dtype("complex128"): "Complex<double>",
    np.dtype("complex64"): "Complex<float>",
}

CONSTANT_BYTES = 64 << 10
# A block takes no more shared memory than every GPU since sm_80 has, unless one element needs more:
# then what those made for float64 have.
SHARED_BYTES = 99 << 10
MOST_SHARED_BYTES = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
LEAST_SHARED_BYTES = 163 << 10
MAX_THREADS = 1024

# Shared memory of a multiprocessor, what the system takes of it for each block, and the threads
# that should be there at a time.
MULTIPROCESSOR_BYTES = 227 << 10
RESERVED_BYTES = 1 << 10
ENOUGH_THREADS = 512

# So many threads keep a multiprocessor busy even if each has work of its own. The compiler must be
# told to leave room for them where a thread does several operations on fibres of so many registers,
# or so many on single values.
BUSY_THREADS = 384
CROWDED_REGISTERS = 45
SEVERAL_MOVES = 8
LIGHT_REGISTERS = 42
CROWDED_MOVES = 100

# Tensor cores take fibres of so many values or more, if a thread would need more registers than
# this; than the next, if an element has few fibres. A quad has so many fibres one after the other,
# which share what it has of a matrix; a warp that has them eight at a time does all of an element,
# if it need not do so more often than this.
FEW_VALUES = 10
THREAD_REGISTERS = 43
ALONE_REGISTERS = 59
QUAD_LINES = 4
FEW_OCTETS = 4
# Fibres of a quad at a time: those of two lines, which sm_90 multiplies in the time of one.
QUAD_FIBRES = 2
# Threads of an element whose fibres are many. Twice as many if shared memory has room for one such
# group alone, or for two and registers for both.
QUAD_THREADS = 128
QUAD_REGISTERS = 60
# Symmetric matrices are multiplied half by half where so many multiply-adds for each value of
# memory take time; by tensor cores if they are so large: lesser halves leave much of a piece empty.
MANY_PRODUCTS = 10
SPLIT_BY_QUADS = 13
# The copy engine brings operands, unless a warp reads them in so few steps, or a multiprocessor
# would have fewer groups than these.
DIRECT_OCTETS = 2
FEWEST_GROUPS = 2
# Multiply-adds of an accumulation that are work for one thread.
ACCUMULATED_VALUES = 1024
# A warp that has to arrange matrices for itself uses them for so many elements in turn.
TRACED_SLICES = 8
# The most padding of an axis in shared memory. Four lanes along fibres and lines side by side may
# need strides that are far from those of a tile.
NARROW = 5
WIDE = 15
# GPUs without a copy engine.
WITHOUT_ENGINE = ("sm_80", "sm_86", "sm_87", "sm_89")
# Matrices stay in registers, if they take no more than this; less for each fibre more of a quad.
HELD_REGISTERS = 150
ANOTHER_FIBRE = 20

# Rows of an output that are so long go through shared memory, to be written side by side.
LONG_ROW = 4


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the model in this module."""

    threads: int | None = None  # of a group: threads that work together on some elements
    elements: int | None = None  # of a group
    groups: int | None = None  # in a block; groups of one warp never wait for another
    slices: int | None = None  # that a group works through, one after the other
    prefetch: bool = True  # asks for tiles some time before they are read
    min_blocks: int | None = None  # on a multiprocessor, for the compiler's choice of registers
    quads: bool | None = None  # fibres are owned by four lanes, and tensor cores multiply them
    fibres: int | None = None  # of four lanes at a time
    hold: bool | None = None  # matrices for tensor cores stay in registers
    fetch: int | None = None  # operands of quads that the copy engine brings to shared memory
    ahead: bool | None = None  # while there is work on the elements before
    padding: int | None = None  # at most, of axes in shared memory, against bank conflicts
    in_place: bool | None = None  # tiles take the place of those that they are made from
    shared_bytes: int = SHARED_BYTES  # most shared memory for one block
    # Of matrices that are symmetric about their centre, even and odd halves are multiplied.
    even_odd: bool | None = None
    accumulate: bool | None = None  # products only summed over elements stay in registers

    def __post_init__(self) -> None:
        for name in ("threads", "elements", "groups", "slices", "fibres"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name}={given} is none at all")
        if self.groups is not None and self.groups > 1 and self.threads != 32:
            raise ValueError(f"groups of {self.threads} threads: several in a block have 32 each")


# ---- Blocks of threads ------------------------------------------------------------------------


class Block:
    """How a plan is done by blocks of threads: the stages, who does them, and where tiles are."""

    def __init__(self, plan: Plan, parameters: Parameters) -> None:
        self.plan = plan
        self.program = plan.program
        self.parameters = parameters
        self.inputs = len(plan.program.inputs)
        self.dtype = plan.program.dtype
        self.type = TYPES[self.dtype]
        everything = set(range(self.program.batch_rank))
        self.summed = [n for n, x in enumerate(self.program.outputs) if set(x.batch) != everything]
        self.stored = [n for n in range(len(self.program.outputs)) if n not in self.summed]
        self.origins = {
            n: origin(plan, n) for n, s in plan.numbered_steps() if isinstance(s, View | Gather)
        }
        self.gathered = {x.tile for x in self.origins.values() if x.index is not None}
        self.written, self.skipped = self._find_written()
        self.accumulations, gone = accumulations(plan, parameters.accumulate)
        self.accumulated = {x.output for x in self.accumulations}
        self.skipped |= gone
        self.quads = bool(parameters.quads) and self.dtype == np.float64
        self.halves = self._find_halves()
        self.bank: list[int] = []
        self.groups = 1
        self.slices = 1
        self.staging = True
        self.tight = False
        self.stages: list[Stage] = []

    # ---- Where values are ------------------------------------------------------------------------

    def origin(self, tile: int) -> Origin:
        return self.origins.get(tile) or Origin(tile)

    def _find_halves(self) -> dict[int, Halves]:
        """Constant matrices of mode products that are better multiplied half by half."""
        found: dict[int, Halves] = {}
        asked = self.parameters.even_odd
        asked = parity.is_wanted() if asked is None else asked
        if not (self._multiplies_much() if asked is None else asked):
            return found
        for _, step in self.plan.numbered_steps():
            mode = as_mode(self.plan, step)
            array = None if mode is None else self.constant(mode.matrix)
            if mode is None or array is None or array.ndim != 2 or mode.matrix in found:
                continue
            rows, columns = array.shape
            worth = parity.is_worth(rows, columns, self.dtype)
            if self.quads and asked is None:
                worth = worth and min(rows, columns) >= SPLIT_BY_QUADS
            halves = parity.halves(array) if worth else None
            if halves is not None:
                found[mode.matrix] = halves
        return found

    def _multiplies_much(self) -> bool:
        """Whether products are so many for each value of memory that fewer of them save time."""
        steps = [step for step in self.plan.steps if isinstance(step, Product)]
        products = sum(math.prod(step.extents.values()) for step in steps)
        moved = {
            self.origin(x).tile
            for step in self.plan.steps
            for x in step.operands
            if self._is_outside(x)
        }
        tiles = [*moved, *(self.plan.results[out] for out in self.stored)]
        return products >= MANY_PRODUCTS * sum(self.plan.tiles[x].size for x in tiles)

    def _find_written(self) -> tuple[dict[int, list[tuple[int, Strided]]], set[int]]:
        """For each tile the outputs it is part of, and where; and tiles written by their parts."""
        written: dict[int, list[tuple[int, Strided]]] = {}
        direct_places: set[int] = set()

        def write(tile: int, out: int, at: Strided) -> None:
            step = self.plan.steps[tile - self.inputs] if tile >= self.inputs else None
            direct = isinstance(step, Place) and placed_once(step, self.plan.tiles)
            parts = []
            if isinstance(step, Place) and direct:
                parts = [
                    composed(at, step.tile, Strided(offset, strides), self.plan.tiles[value].shape)
                    for value, offset, strides in step.pieces
                ]
            if isinstance(step, Place) and parts and None not in parts:
                for value, part in zip(step.operands, parts, strict=True):
                    assert part is not None
                    write(value, out, part)
                direct_places.add(tile)
            else:
                written.setdefault(tile, []).append((out, at))

        for out in self.stored:
            tile = self.plan.results[out]
            write(tile, out, Strided(0, banks.row_major(self.plan.tiles[tile].shape).strides))
        # A tile that is written by its parts, and read by nobody else, is not put together.
        summed = {self.plan.results[out] for out in self.summed}
        skipped: set[int] = set()
        for number, step in reversed(self.plan.numbered_steps()):
            users = {n for n, s in self.plan.numbered_steps() if number in s.operands}
            alone = users <= skipped and number not in summed and number not in written
            if isinstance(step, Place) and number in direct_places and alone:
                skipped.add(number)
        return written, skipped

    # ---- Choices ---------------------------------------------------------------------------------

    def _wants_quads(self) -> bool:
        """Whether tensor cores had better multiply fibres: whole ones are too much for a thread."""
        if self.dtype != np.float64 or self.parameters.quads is not None:
            return False
        if any(min(self.plan.tiles[x].shape) >= SPLIT_BY_QUADS for x in self.halves):
            return True
        sweeps = [stage for stage in self.stages if isinstance(stage, Sweep)]
        few = -(-max((x.count for x in sweeps), default=0) // 8) <= FEW_OCTETS
        most = ALONE_REGISTERS if few else THREAD_REGISTERS
        return any(
            self._longest(x) >= FEW_VALUES and live_registers(self.plan, x, {}) > most
            for x in sweeps
        )

    def _longest(self, sweep: Sweep) -> int:
        """Values of the longest fibre that a matrix multiplies."""
        moves = [move for move in sweep.moves if move.matrix is not None]
        return max((x.length for m in moves for x in (m.result, *m.operands)), default=0)

    def _fill_bank(self) -> list[int]:
        """The matrices that stand in the constant bank, in that order."""
        bank: list[int] = []
        left = CONSTANT_BYTES - 4 * len(self.plan.steps)
        for matrix in self._thread_matrices():
            size = self.bank_size(matrix) * self.dtype.itemsize
            if matrix not in bank and size <= left:
                bank.append(matrix)
                left -= size
        return bank

    def bank_size(self, matrix: int) -> int:
        """Values of a matrix in the constant bank: all of them, or those of its halves."""
        halves = self.halves.get(matrix)
        return self.plan.tiles[matrix].size if halves is None else 2 * halves.even.size

    def bank_values(self, matrix: int) -> np.ndarray:
        """What stands there when the kernel is loaded: zeros, if the values are not known yet."""
        halves, array = self.halves.get(matrix), self.constant(matrix)
        if halves is not None:
            return np.stack([halves.even, halves.odd])
        return np.zeros(self.bank_size(matrix), self.dtype) if array is None else array

    def splits(self, move: Move) -> Halves | None:
        """The halves that threads multiply a fibre with, if not the whole matrix."""
        if move.matrix is None or move.matrix.tile not in self.bank:
            return None
        return self.halves.get(move.matrix.tile)

    def pieces(self) -> list[Pieces]:
        """The matrices that tensor cores multiply with."""
        sweeps = (x for x in self.stages if isinstance(x, Sweep) and x.lanes == QUAD)
        found = (x for s in sweeps for m in s.moves if m.matrix for x in self.pieces_of(s, m))
        return list(dict.fromkeys(found))

    def pieces_of(self, sweep: Sweep, move: Move) -> tuple[Pieces, ...]:
        """A matrix that tensor cores multiply with, or its two halves."""
        if move.matrix is not None and self.is_mirrored(sweep):
            return split_pieces_of(self.plan, move, self.halves[move.matrix.tile])
        return (pieces_of(self.plan, move),)

    def is_mirrored(self, sweep: Sweep) -> bool:
        """Whether quads have opposite values of fibres in one lane, and multiply halves."""
        return is_mirrored(sweep, self.halves)

    def arranged(self) -> list[np.ndarray]:
        """The values of constant matrices for tensor cores, in the order of ``pieces``."""
        found = []
        for x in self.pieces():
            array = self.constant(x.tile)
            if x.half:
                array = getattr(self.halves[x.tile], x.half)
            if array is not None:
                found.append(x.arranged(array))
        return found

    @property
    def holds(self) -> bool:
        """Whether all matrices stay in the registers of every warp."""
        if self.parameters.hold is not None:
            return self.parameters.hold
        fibres = self.parameters.fibres or QUAD_FIBRES
        most = HELD_REGISTERS - ANOTHER_FIBRE * (fibres - 1) - self._kept_registers
        return self._matrix_registers() <= most

    def _matrix_registers(self) -> int:
        """Registers of a thread for all matrices that tensor cores multiply with."""
        return sum(math.prod(x.counts) for x in self.pieces()) * self.dtype.itemsize // 4

    def fibres(self, sweep: Sweep) -> int:
        """Fibres that a quad has at a time: as many as leave no warp without."""
        octets = -(-self.elements * sweep.count // 8)
        most = -(-octets // (self.threads // 32))
        return min(self.parameters.fibres or QUAD_FIBRES, most)

    def _products(self, lanes: int) -> list[Move]:
        """The mode products whose fibres so many lanes own."""
        sweeps = (x for x in self.stages if isinstance(x, Sweep) and x.lanes == lanes)
        return [move for sweep in sweeps for move in sweep.moves if move.matrix is not None]

    def _thread_matrices(self) -> list[int]:
        """The matrices that threads multiply with, one for each product."""
        return [move.matrix.tile for move in self._products(1) if move.matrix is not None]

    def choose(self) -> str | None:
        """Chooses stages, threads, elements and layouts; returns why they cannot be had, if so."""
        # Without padding only where an element has no room otherwise.
        for tight, staging in itertools.product((False, True), (True, False)):
            self.tight, self.staging = tight, staging
            self.stages = self._stages()
            if not self.quads and self._wants_quads():
                self.quads = True
                self.halves = self._find_halves()
                self.stages = self._stages()
            if self.accumulations and self.holds:
                self.stages = self._stages(self._matrix_registers())
            self.bank = self._fill_bank()
            self._choose_groups()
            read = self._read_by_quads()
            for count in self._fetches(len(read)):
                self.uses = self._find_uses(read[:count])
                for elements, threads in self._shapes():
                    self._choose_threads(elements, threads)
                    fewest = self.elements == self.groups == 1
                    most = self.most_shared if fewest else self.parameters.shared_bytes
                    alone = count and not self.ahead and self._blocks() < FEWEST_GROUPS
                    if self.shared_bytes() <= most and not (
                        alone and self.parameters.fetch is None
                    ):
                        return None
        return (
            f"one element needs {self.shared_bytes() >> 10} KB of shared memory, and a block has "
            f"{self.most_shared >> 10} KB"
        )

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return MOST_SHARED_BYTES.get(architecture("cuda"), LEAST_SHARED_BYTES)

    def _fetches(self, most: int) -> Iterable[int]:
        """How many operands the copy engine may bring, the model's favourite first."""
        if self.parameters.fetch is not None:
            return (min(self.parameters.fetch, most),)
        none = self._direct or architecture("cuda") in WITHOUT_ENGINE
        return (0,) if none else range(most, -1, -1)

    def _choose_threads(self, elements: int, threads: int) -> None:
        """Chooses how a group of threads does so many elements, and where their tiles are."""
        self.elements, self.threads = elements, threads
        self._place_tiles()
        if self._wants_more_threads():
            self.threads *= 2
            self._place_tiles()
        self.min_blocks = self.parameters.min_blocks
        if self.min_blocks is None:
            # For sweeps it pays to let the compiler take the registers it likes, unless they are so
            # many that too few threads are left; for gemms, of which a thread has blocks, not.
            few = 1
            if self.quads:
                few = 1 if self.alone else min(self._blocks(), self._enough_blocks())
            elif any(self._crowded(stage) for stage in self.stages):
                few = min(3, max(1, round(BUSY_THREADS / self.threads)))
            elif self._wants_all_threads():
                few = min(self._blocks(), MAX_THREADS // self.threads)
            if self.accumulations:
                # Sums leave the compiler no registers to keep what it could as well read again.
                sweeps = (x for x in self.stages if isinstance(x, Sweep))
                several = self.alone or any(len(x.moves) > SEVERAL_MOVES for x in sweeps)
                few = BUSY_THREADS // (2 if several else 1) // self.threads
                few = min(self._blocks(), few)
            fibres = not any(isinstance(stage, Gemm) for stage in self.stages)
            self.min_blocks = max(1, few) if fibres else 0

    def _wants_more_threads(self) -> bool:
        """Whether quads have room for few groups, and registers for more threads."""
        if not self.quads or self.parameters.threads is not None or self.threads < QUAD_THREADS:
            return False
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and x.lanes > 1]
        light = all(live_registers(self.plan, x, self.halves) <= QUAD_REGISTERS for x in sweeps)
        return self._blocks() == 1 or (self._blocks() == 2 and light)

    def _wants_all_threads(self) -> bool:
        """Whether threads have little each, but a compiler would have them load many points ahead.

        Then more of them hide more of the time that loads take.
        """
        sweeps = [stage for stage in self.stages if isinstance(stage, Sweep)]
        fibres = max((x.count for x in sweeps if not x.single), default=0)
        light = all(live_registers(self.plan, x, self.halves) <= LIGHT_REGISTERS for x in sweeps)
        points = [x.count for x in sweeps if x.single and not self._copies(x)]
        return light and any(count >= 4 * fibres > 0 for count in points)

    def _crowded(self, stage: Stage) -> bool:
        """Whether a thread would take more registers than leave room for enough threads."""
        if not isinstance(stage, Sweep):
            return False
        if stage.single:
            return len(stage.moves) > CROWDED_MOVES
        several = len(stage.moves) > SEVERAL_MOVES
        return several and live_registers(self.plan, stage, self.halves) > CROWDED_REGISTERS

    def _choose_groups(self) -> None:
        """Groups of a block, and how many slices of elements each works through."""
        groups = self.parameters.groups
        if groups is None:
            groups = 2 if self._direct and self.parameters.threads in (None, 32) else 1
        self.groups = 1 if self.summed else groups
        slices = self.parameters.slices
        if slices is None:
            traced = any(not self.is_constant(x.tile) for x in self.pieces())
            slices = TRACED_SLICES if self._direct and traced else 1
        self.slices = 1 if self.summed or self.parameters.ahead else slices

    @property
    def alone(self) -> bool:
        """Whether one warp has all fibres of an element."""
        return 0 < self._octets() <= FEW_OCTETS

    @property
    def _direct(self) -> bool:
        """Whether a warp reads an element in so few steps that no copy engine pays."""
        return 0 < self._octets() <= DIRECT_OCTETS

    def _octets(self) -> int:
        """How often one warp would take eight fibres of an element, in the largest sweep."""
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and x.lanes > 1]
        return -(-max((sweep.count for sweep in sweeps), default=0) // 8)

    def _has_room(self) -> bool:
        """Whether shared memory leaves a multiprocessor enough threads to be busy."""
        return self._blocks() * self.threads * self.groups >= ENOUGH_THREADS

    def _blocks(self) -> int:
        """Blocks that a multiprocessor has shared memory for."""
        return MULTIPROCESSOR_BYTES // (self.shared_bytes() + RESERVED_BYTES)

    def _enough_blocks(self) -> int:
        """So many that more would not have the registers that quads need."""
        return max(1, round(BUSY_THREADS / (self.threads * self.groups)))

    def _place_tiles(self) -> None:
        """Finds room for tiles: those that take each other's place where it is short."""
        in_place = self.quads if self.parameters.in_place is None else self.parameters.in_place
        self.shared = self._shared(in_place)
        if self.parameters.in_place is None and not self._has_room():
            self.shared = self._shared(in_place=True)
        # What warps have of a sum meets there.
        self.shared.values = max([self.shared.values, *map(self._size, self.accumulated)])

    def _size(self, output: int) -> int:
        return self.plan.tiles[self.plan.results[output]].size

    @property
    def split(self) -> int:
        """How many warps share the columns of a sum: two if one has no registers for them all."""
        return 2 if self._sums_registers(1) > SHARED_REGISTERS and self.threads % 64 == 0 else 1

    def _sums_registers(self, split: int) -> int:
        """Registers of a thread that hold sums from one element to the next."""
        registers = 0
        for output in self.accumulated:
            rows, columns = self.plan.tiles[self.plan.results[output]].shape
            registers += registers_of(rows, columns, self.dtype.itemsize, split)
        return registers

    @property
    def _kept_registers(self) -> int:
        """The same, if warps share them where they had better."""
        every = self._sums_registers(1)
        return self._sums_registers(2) if every > SHARED_REGISTERS else every

    def _shared(self, in_place: bool) -> Shared:
        padding = self.parameters.padding
        if padding is None:
            padding = 0 if self.tight else WIDE if self.quads else NARROW
        shared = Shared(self.uses, self.threads, self.elements, padding)
        return shared.place(rooms_of(self.uses, in_place))

    def shared_bytes(self) -> int:
        return self.shared.values * self.dtype.itemsize * self.groups

    def _stages(self, kept: int = 0) -> list[Stage]:
        """Stages of threads that keep so many registers, and those of sums, all the time."""
        stages: list[Stage] = []
        staged: set[int] = set()
        made: set[int] = set()
        kept += self._kept_registers
        scheduler = Scheduler(self.plan, self.skipped, self.quads, self.halves, kept)
        for stage in scheduler.stages():
            if isinstance(stage, Gemm):
                for operand in stage.step.operands:
                    needed = self.staging or self.origin(operand).index is not None
                    if self._is_outside(operand) and needed and operand not in staged:
                        staged.add(operand)
                        stages.append(copy_sweep(self.plan, operand))
            stages.append(stage)
            if isinstance(stage, Sweep):
                made |= stage.tiles.keys()
            elif isinstance(stage, Gemm):
                made.add(stage.number)
        self.rewritten = {x for x in self.written if x in made and self._in_rows(x, stages)}
        copied = [x for x in self.written if x not in made or x in self.rewritten]
        self.staged = staged
        if self.accumulations:
            return self._accumulated(stages, copied)
        return stages + [copy_sweep(self.plan, value) for value in copied]

    def _accumulated(self, stages: list[Stage], copied: list[int]) -> list[Stage]:
        """The stages with accumulations, and copies to outputs, as soon as they can be had.

        Tiles then leave shared memory early, and what reads them waits for no barrier of its own.
        """
        known = set(range(self.inputs))
        waiting = [*self.accumulations]
        found: list[Stage] = []

        def follow() -> None:
            for tile in [x for x in copied if self.origin(x).tile in known]:
                copied.remove(tile)
                found.append(copy_sweep(self.plan, tile))
            for sum_ in [*waiting]:
                if {self.origin(x).tile for x in sum_.step.operands} <= known:
                    waiting.remove(sum_)
                    found.append(sum_)

        follow()
        for stage in stages:
            found.append(stage)
            known.update(self.made(stage))
            follow()
        return found

    def _in_rows(self, tile: int, stages: list[Stage]) -> bool:
        """Whether threads would write fibres that are rows of an output.

        Threads side by side would write far apart, and memory be asked for every row many times.
        """
        for stage in stages:
            made = stage.tiles.get(tile) if isinstance(stage, Sweep) and stage.lanes == 1 else None
            if made is not None and made.length >= LONG_ROW and ALONG in made.labels:
                axis = made.labels.index(ALONG)
                return any(at.strides[axis] == 1 for _, at in self.written[tile])
        return False

    def _is_outside(self, tile: int) -> bool:
        """Whether a batched tile is in global memory."""
        at = self.origin(tile)
        return at.tile < self.inputs and self.plan.tiles[tile].batched

    def _read_by_quads(self) -> list[int]:
        """The operands that quads read all of, in the order in which they need them."""
        by_quads: dict[int, set[int]] = {}  # of each operand the parts that are read
        for stage in self.stages:
            for value in stage.loads if isinstance(stage, Sweep) and stage.lanes > 1 else ():
                at = self.origin(value.tile)
                if self._is_outside(value.tile) and at.index is None and at.tile not in self.staged:
                    by_quads.setdefault(at.tile, set()).add(value.tile)
        size = {x: self.plan.tiles[x].size for parts in by_quads.values() for x in parts}
        return [
            tile
            for tile, parts in by_quads.items()
            if sum(size[x] for x in parts) >= self.plan.tiles[tile].size
        ]

    def _find_uses(self, fetched: list[int]) -> Uses:
        self.fetched = fetched
        maker: dict[int, int] = dict.fromkeys(self.fetched, BEFORE)
        readers: dict[int, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for tile in self.made(stage):
                outside = tile in self.origins or tile < self.inputs
                if not outside or tile in self.staged:
                    maker.setdefault(tile, position)
        for position, stage in enumerate(self.stages):
            for tile in self.read(stage):
                if tile in maker and maker[tile] < position:
                    readers.setdefault(tile, []).append(position)
        sums = {self.plan.results[out] for out in self.summed}
        for tile in sums & maker.keys():
            readers.setdefault(tile, []).append(len(self.stages))
        assembled = {stage.number for stage in self.stages if isinstance(stage, Assembly)}
        viewed = {x.tile for x in self.origins.values() if x.index is None}
        plain = sums | viewed | assembled
        return Uses(
            self.plan, self.stages, maker, readers, self.origins, plain, set(fetched), self.ahead
        )

    @property
    def ahead(self) -> bool:
        """Whether operands of the next elements are fetched during the work on these."""
        return bool(self.parameters.ahead) and bool(self.fetched)

    @property
    def strides(self) -> bool:
        """Whether there are as many groups as a GPU has room for, and take turns with elements."""
        return self.ahead and not self.summed

    def made(self, stage: Stage) -> list[int]:
        if isinstance(stage, Accumulation):
            return []
        if not isinstance(stage, Sweep):
            return [stage.number]
        return [move.result.tile for move in stage.moves]

    def read(self, stage: Stage) -> list[int]:
        """The tiles that a stage reads where they are in memory."""
        if isinstance(stage, Sweep):
            tiles = [value.tile for value in stage.loads]
        else:
            tiles = list(stage.step.operands)
        found: dict[int, None] = {}
        for tile in tiles:
            staged = tile in self.staged and not self._copies(stage)
            at = Origin(tile) if staged else self.origin(tile)
            found[at.tile] = None
            if at.index is not None:
                found[at.index] = None
        return list(found)

    def _copies(self, stage: Stage) -> bool:
        return isinstance(stage, Sweep) and stage.moves[0].step is None

    def _threads_of(self, stage: Stage) -> int:
        """Threads that one element keeps busy."""
        if isinstance(stage, Gemm):
            return blocking_of(stage.step, self.dtype.itemsize).count
        if isinstance(stage, Accumulation):
            return -(-math.prod(stage.step.extents.values()) // ACCUMULATED_VALUES)
        if isinstance(stage, Assembly):
            return -(-self.plan.tiles[stage.number].size // 4)
        if stage.lanes > 1:
            return 32 * -(-self._octets() // QUAD_LINES)
        if stage.light:
            # A thread takes several values, and more of them where a gemm comes after.
            copied = self.staged | self.rewritten
            staged = any(move.result.tile in copied for move in stage.moves)
            return -(-stage.count // (16 if staged else 4))
        fibres = any(isinstance(x, Sweep) and not x.single for x in self.stages)
        if stage.single and fibres and len(stage.moves) <= CROWDED_MOVES:
            # The threads that have fibres take several points, unless points are the most work.
            return -(-stage.count // 4)
        return stage.count

    def _shapes(self) -> list[tuple[int, int]]:
        """(elements, threads) of a group: the model's favourite, then ever smaller ones."""
        most = max([self._threads_of(stage) for stage in self.stages], default=1)
        given = self.parameters
        if given.elements is not None:
            threads = min(MAX_THREADS, _round_up(given.elements * most, 32))
            return [(given.elements, given.threads or threads)]
        if self.alone:
            if self._sums_registers(1) > SHARED_REGISTERS:
                return [(1, given.threads or 64)]
            # Eight fibres are multiplied in the time of sixteen.
            return [(1 + self._octets() % 2, given.threads or 32)]
        largest = given.threads or 256
        if self.quads and most >= QUAD_THREADS:
            return [(1, given.threads or QUAD_THREADS)]
        if most > largest:
            return [(1, given.threads or min(512, _round_up(most, 32)))]
        best, best_score = 1, 0.0
        for slots in range(1, largest // most + 1):
            threads = given.threads or _round_up(slots * most, 32)
            used = slots * most / threads
            # 128 threads are enough to be several blocks on a multiprocessor, and few enough for
            # their barriers to cost little.
            far = math.log2(threads / 128)
            score = used * (1 - (0.3 * far if far > 0 else -0.6 * far))
            if score > best_score:
                best, best_score = slots, score
        return [
            (slots, given.threads or _round_up(slots * most, 32)) for slots in range(best, 0, -1)
        ]

    # ---- Tiles -----------------------------------------------------------------------------------

    def tables(self) -> list[int]:
        """Constants that stand in global memory: read at places that differ between threads."""
        tables: dict[int, None] = {}
        for stage in self.stages:
            operands = self.read(stage)
            if isinstance(stage, Sweep):
                operands += self.outside_bank(stage)
            tables.update((x, None) for x in operands if self.is_constant(x))
        tables.update(
            (self.plan.results[out], None)
            for out in self.summed
            if self.is_constant(self.plan.results[out])
        )
        return list(tables)

    def outside_bank(self, sweep: Sweep) -> list[int]:
        """The matrices of a sweep of threads that are read from global memory."""
        return [
            m.matrix.tile
            for m in sweep.moves
            if m.matrix is not None and sweep.lanes == 1 and m.matrix.tile not in self.bank
        ]

    def is_constant(self, tile: int) -> bool:
        return self.constant(tile) is not None

    def constant(self, tile: int) -> np.ndarray | None:
        """The values of a tile that is known before the kernel runs."""
        constant = self.program.inputs[tile].constant if tile < self.inputs else None
        return None if constant is None else constant.array

    @property
    def loops(self) -> bool:
        """Whether a group of threads works through several slices."""
        return bool(self.summed) or self.slices > 1 or self.ahead

    def bank_uses(self) -> int:
        """How often a matrix in the constant bank is used."""
        return sum(matrix in self.bank for matrix in self._thread_matrices())

    def split_products(self) -> int:
        """How many products are done half by half."""
        threads = sum(self.splits(move) is not None for move in self._products(1))
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and self.is_mirrored(x)]
        return threads + sum(move.matrix is not None for x in sweeps for move in x.moves)

    def busy(self) -> float:
        """The part of the threads that the widest stage has work for."""
        most = max([self._threads_of(stage) for stage in self.stages], default=1)
        work = self.elements * most
        return work / (_round_up(work, self.threads))

    def describe(self) -> str:
        sweeps = sum(isinstance(stage, Sweep) for stage in self.stages)
        stages = [f"{sweeps} sweeps"] if sweeps else []
        sums = sum(isinstance(stage, Accumulation) for stage in self.stages)
        if sweeps + sums < len(self.stages):
            stages.append(f"{len(self.stages) - sweeps - sums} gemms")
        if sums:
            stages.append(f"{sums} products summed over elements")
        split = self.split_products()
        halves = f", {split} products by even and odd halves" if split else ""
        return (
            f"{' and '.join(stages) or 'a sum'}, {self.elements * self.groups} elements on "
            f"{self.threads * self.groups} threads, {self.shared_bytes()} bytes of shared memory"
            f"{halves}"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
