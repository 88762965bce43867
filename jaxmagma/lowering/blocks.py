"""How a plan is done by blocks of threads: stages, threads, and where tiles are on chip.

The stages of a plan (see ``sweeps``) are done one after the other by a group of threads, for
several elements at a time.  Here the sizes are chosen, the matrices that go to the constant bank,
and the layout and place of every tile in shared memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxmagma.lowering import banks
from jaxmagma.lowering.banks import Access, Layout
from jaxmagma.lowering.sources import Origin, Strided, composed, origin, placed_once
from jaxmagma.lowering.sweeps import (
    ALONG,
    Assembly,
    Gemm,
    Move,
    Scheduler,
    Stage,
    Sweep,
    copy_sweep,
    live_registers,
)
from jaxmagma.plan import Plan, Product, Rearrange
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
MOST_SHARED_BYTES = 163 << 10
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
CROWDED_MOVES = 100

# Tensor cores take fibres of so many values or more, if a thread would need more registers than
# this. A quad has so many fibres one after the other, which share what it has of a matrix; a warp
# that has them eight at a time does all of an element if it need not do so more often than this,
# and those of two elements together if they are longer than that.
FEW_VALUES = 10
THREAD_REGISTERS = 60
QUAD_LINES = 4
FEW_OCTETS = 4
MANY_VALUES = 24
# Matrices stay in registers, if they take no more than this; less for each element more of a quad.
HELD_REGISTERS = 140
PACK_REGISTERS = 20

# Rows of an output that are so long go through shared memory, to be written side by side.
LONG_ROW = 4

# Rows and columns of the block of a gemm that one thread has.
LARGEST_BLOCK = 4


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the model in this module."""

    threads: int | None = None  # of a group: threads that work together on some elements
    elements: int | None = None  # of a group
    pack: int | None = None  # elements of one thread, which share what it fetches of a matrix
    groups: int | None = None  # in a block; groups of one warp never wait for another
    slices: int = 1  # that a group works through, one after the other
    prefetch: bool = True  # asks for tiles some time before they are read
    min_blocks: int | None = None  # on a multiprocessor, for the compiler's choice of registers
    quads: bool | None = None  # fibres are owned by four lanes, and tensor cores multiply them
    hold: bool | None = None  # matrices for tensor cores stay in registers
    padding: bool = True  # of tiles in shared memory, against bank conflicts
    in_place: bool | None = None  # tiles take the place of those that they are made from
    shared_bytes: int = SHARED_BYTES  # most shared memory for one block

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups > 1 and self.threads != 32:
            raise ValueError(f"groups of {self.threads} threads: several in a block have 32 each")


# ---- Gemms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocking:
    """How the threads divide the result of a gemm: blocks of rows x columns."""

    row: str  # the label cut into pieces of `rows`, "" if none
    column: str
    rows: int
    columns: int
    lines: tuple[tuple[str, int], ...]  # labels with the number of places along each

    @property
    def count(self) -> int:
        return math.prod(extent for _, extent in self.lines)


def blocking_of(step: Product | Rearrange, itemsize: int) -> Blocking:
    extents = step.extents
    if isinstance(step, Rearrange):
        return Blocking("", "", 1, 1, tuple((x, extents[x]) for x in step.output_labels))
    most = LARGEST_BLOCK if itemsize <= 8 else LARGEST_BLOCK // 2

    def piece(labels: str) -> tuple[str, int]:
        if not labels:
            return "", 1
        label = max(labels, key=lambda x: extents[x])
        pieces = -(-extents[label] // most)
        return label, -(-extents[label] // pieces)

    row, rows = piece(step.rows)
    column, columns = piece(step.columns)
    pieces = {
        **extents,
        **({row: -(-extents[row] // rows)} if row else {}),
        **({column: -(-extents[column] // columns)} if column else {}),
    }
    lines = tuple((x, pieces[x]) for x in step.output_labels)
    return Blocking(row, column, rows, columns, lines)


@dataclass(frozen=True)
class Pieces:
    """A matrix cut into pieces for tensor cores, and the strides of its rows and columns."""

    tile: int
    rows: int
    columns: int
    row: int
    column: int

    @property
    def name(self) -> str:
        """Tiles may be used transposed as well."""
        return f"m{self.tile}{'t' if self.row < self.column else ''}"

    @property
    def counts(self) -> tuple[int, int]:
        """Pieces along the columns and along the rows."""
        return -(-self.columns // 4), -(-self.rows // 8)

    def arranged(self, matrix: np.ndarray) -> np.ndarray:
        """The values in the order in which lanes read them; zeros beyond the matrix."""
        columns, rows = self.counts
        strides = [x * matrix.itemsize for x in (self.row, self.column)]
        whole = np.zeros((rows * 8, columns * 4), matrix.dtype)
        view = np.lib.stride_tricks.as_strided(matrix, (self.rows, self.columns), strides)
        whole[: self.rows, : self.columns] = view
        # Lane 8 i + 4 h + j has row i + 4 h and column j of a piece, see cuda/quad.cuh.
        parts = whole.reshape(rows, 2, 4, columns, 4)
        return np.ascontiguousarray(parts.transpose(3, 0, 2, 1, 4))


def pieces_of(plan: Plan, move: Move) -> Pieces:
    """The matrix of a mode product."""
    assert move.matrix is not None
    strides = banks.row_major(plan.tiles[move.matrix.tile].shape).strides
    row = 0 if move.matrix.row is None else strides[move.matrix.row]
    column = 0 if move.matrix.column is None else strides[move.matrix.column]
    return Pieces(move.matrix.tile, move.result.length, move.operands[0].length, row, column)


@dataclass
class Room:
    """A place in shared memory and the tiles that are there, one after the other.

    ``axes`` says which axis of the place each axis of a tile is.
    """

    shape: tuple[int, ...]
    axes: dict[int, tuple[int, ...]]


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
        self.viewed = {x.tile for x in self.origins.values() if x.index is None}
        self.written, self.skipped = self._find_written()
        self.quads = False
        self.bank: list[int] = []
        self.pack = self.groups = 1
        self.slices = 1 if self.summed else parameters.slices
        self.staging = True
        self.stages: list[Stage] = []

    # ---- Where values are ------------------------------------------------------------------------

    def origin(self, tile: int) -> Origin:
        return self.origins.get(tile) or Origin(tile)

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

    def _choose_quads(self) -> bool:
        """Whether tensor cores multiply fibres: if whole ones are too much for a thread."""
        if self.dtype != np.float64:
            return False
        if self.parameters.quads is not None:
            return self.parameters.quads
        return any(
            self._longest(stage) >= FEW_VALUES
            and live_registers(self.plan, stage) > THREAD_REGISTERS
            for stage in self._stages()
            if isinstance(stage, Sweep)
        )

    def _longest(self, sweep: Sweep) -> int:
        """Values of the longest fibre that a matrix multiplies."""
        moves = [move for move in sweep.moves if move.matrix is not None]
        return max((x.length for m in moves for x in (m.result, *m.operands)), default=0)

    def _fill_bank(self) -> list[int]:
        """The matrices that stand in the constant bank, in that order."""
        bank: list[int] = []
        left = CONSTANT_BYTES - 4 * len(self.plan.steps)
        for matrix in self.matrices(lanes=1):
            size = self.plan.tiles[matrix].size * self.dtype.itemsize
            if matrix not in bank and size <= left:
                bank.append(matrix)
                left -= size
        return bank

    def pieces(self) -> list[Pieces]:
        """The matrices that tensor cores multiply with."""
        moves = (
            move
            for stage in self.stages
            if isinstance(stage, Sweep) and stage.lanes > 1
            for move in stage.moves
            if move.matrix is not None
        )
        return list(dict.fromkeys(pieces_of(self.plan, move) for move in moves))

    @property
    def holds(self) -> bool:
        """Whether all matrices stay in the registers of every warp."""
        if self.parameters.hold is not None:
            return self.parameters.hold
        words = sum(math.prod(x.counts) for x in self.pieces()) * self.dtype.itemsize // 4
        return words <= HELD_REGISTERS - PACK_REGISTERS * (self.pack - 1)

    def matrices(self, lanes: int) -> list[int]:
        """The matrices of mode products whose fibres so many lanes own, one for each product."""
        return [
            move.matrix.tile
            for stage in self.stages
            if isinstance(stage, Sweep) and stage.lanes == lanes
            for move in stage.moves
            if move.matrix is not None
        ]

    def choose(self) -> str | None:
        """Chooses stages, threads, elements and layouts; returns why they cannot be had, if so."""
        self.quads = self._choose_quads()
        for staging in (True, False):
            self.staging = staging
            self.stages = self._stages()
            self._find_uses()
            self.bank = self._fill_bank()
            # A thread of a gemm has a block of one element.
            fibres = not any(isinstance(stage, Gemm) for stage in self.stages)
            plain = all(isinstance(stage, Sweep) for stage in self.stages) and not self.gathered
            self._choose_groups(plain)
            crowded = not self.quads and any(self._crowded(stage) for stage in self.stages)
            for elements, threads in self._shapes():
                self.elements, self.threads = elements, threads
                self.min_blocks = self.parameters.min_blocks
                if self.min_blocks is None:
                    # For sweeps it pays to let the compiler take the registers it likes, unless
                    # they are so many that too few threads are left; for gemms not.
                    few = min(3, max(1, round(BUSY_THREADS / threads))) if crowded else 1
                    self.min_blocks = few if fibres else 0
                self._lay_out(self.parameters.in_place or self.quads)
                if self.parameters.in_place is None and not self._has_room():
                    self._lay_out(in_place=True)
                fewest = self.elements == self.pack and self.groups == 1
                most = MOST_SHARED_BYTES if fewest else self.parameters.shared_bytes
                if self.shared_bytes() <= most:
                    return None
        return (
            f"one element needs {self.shared_bytes() >> 10} KB of shared memory, and a block has "
            f"{MOST_SHARED_BYTES >> 10} KB"
        )

    def _crowded(self, stage: Stage) -> bool:
        """Whether a thread would take more registers than leave room for enough threads."""
        if not isinstance(stage, Sweep):
            return False
        if stage.single:
            return len(stage.moves) > CROWDED_MOVES
        several = len(stage.moves) > SEVERAL_MOVES
        return several and live_registers(self.plan, stage) > CROWDED_REGISTERS

    def _choose_groups(self, plain: bool) -> None:
        """Elements of a thread, and groups of a block; a ``plain`` program has sweeps alone."""
        given = self.parameters
        # A warp that has few fibres of an element does all of them, and waits for no other warp.
        alone = self.alone
        sweeps = [stage for stage in self.stages if isinstance(stage, Sweep)]
        longest = max(map(self._longest, sweeps), default=0)
        pack, groups = given.pack, given.groups
        if pack is None:
            pack = 2 if alone and longest > MANY_VALUES else 1
        if groups is None:
            groups = 2 if alone and pack == 1 and given.threads in (None, 32) else 1
        self.pack = pack if plain else 1
        self.groups = 1 if self.summed else groups

    @property
    def alone(self) -> bool:
        """Whether one warp has all fibres of an element."""
        return 0 < self._octets() <= FEW_OCTETS

    def _octets(self) -> int:
        """How often one warp would take eight fibres of an element, in the largest sweep."""
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and x.lanes > 1]
        return -(-max((sweep.count for sweep in sweeps), default=0) // 8)

    def _has_room(self) -> bool:
        """Whether shared memory leaves a multiprocessor enough threads to be busy."""
        blocks = MULTIPROCESSOR_BYTES // (self.shared_bytes() + RESERVED_BYTES)
        return blocks * self.threads * self.groups >= ENOUGH_THREADS

    def shared_bytes(self) -> int:
        return self.shared_values * self.dtype.itemsize * self.groups

    def _stages(self) -> list[Stage]:
        stages: list[Stage] = []
        staged: set[int] = set()
        made: set[int] = set()
        for stage in Scheduler(self.plan, self.skipped, self.quads).stages():
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
        for value in self.written:
            if value not in made or value in self.rewritten:
                stages.append(copy_sweep(self.plan, value))
        self.staged = staged
        return stages

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

    def _find_uses(self) -> None:
        """Which stage makes each tile, and which ones read it from shared memory."""
        self.maker: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for tile in self.made(stage):
                outside = tile in self.origins or tile < self.inputs
                if not outside or tile in self.staged:
                    self.maker.setdefault(tile, position)
        for position, stage in enumerate(self.stages):
            for tile in self.read(stage):
                if tile in self.maker and self.maker[tile] < position:
                    self.readers.setdefault(tile, []).append(position)
        for out in self.summed:
            tile = self.plan.results[out]
            if tile in self.maker:
                self.readers.setdefault(tile, []).append(len(self.stages))
        self.in_shared = {tile for tile in self.maker if self.readers.get(tile)}

    def made(self, stage: Stage) -> list[int]:
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
            staged = tile in self.staged and not self._copies(stage, tile)
            at = Origin(tile) if staged else self.origin(tile)
            found[at.tile] = None
            if at.index is not None:
                found[at.index] = None
        return list(found)

    def _copies(self, stage: Stage, tile: int) -> bool:
        return isinstance(stage, Sweep) and stage.moves[0].step is None

    def _threads_of(self, stage: Stage) -> int:
        """Threads that one element keeps busy."""
        if isinstance(stage, Gemm):
            return blocking_of(stage.step, self.dtype.itemsize).count
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
            slots = max(1, given.elements // self.pack)
            threads = given.threads or min(MAX_THREADS, _round_up(slots * most, 32))
            return [(slots * self.pack, threads)]
        if self.alone:
            # Warps that have long fibres of two elements need the registers of several.
            together = 2 if self.pack > 1 and given.threads is None else 1
            return [(self.pack * together, given.threads or (128 if together > 1 else 32))]
        largest = given.threads or 256
        if most > largest:
            most = largest if self.quads else min(512, _round_up(most, 32))
            return [(self.pack, given.threads or most)]
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
            (slots * self.pack, given.threads or _round_up(slots * most, 32))
            for slots in range(best, 0, -1)
        ]

    # ---- Shared memory ---------------------------------------------------------------------------

    def _lay_out(self, in_place: bool) -> None:
        sums = {self.plan.results[out] for out in self.summed}
        assembled = {stage.number for stage in self.stages if isinstance(stage, Assembly)}
        plain = sums | self.viewed | assembled
        self.layouts: dict[int, Layout] = {}
        self.offsets: dict[int, int] = {}
        placed: list[tuple[int, int, int, int]] = []  # first stage, last stage, begin, end
        self.shared_values = 0
        for room in self._rooms(plain, in_place):
            layout = self._layout(room, not plain & room.axes.keys())
            first = min(self.maker[tile] for tile in room.axes)
            last = max(max(self.readers[tile]) for tile in room.axes)
            size = _round_up(layout.element * self.elements, max(1, 16 // self.dtype.itemsize))
            begin = 0
            for other_begin, end in sorted(
                (b, e) for f, until, b, e in placed if f <= last and first <= until
            ):
                if begin + size <= other_begin:
                    break
                begin = max(begin, end)
            placed.append((first, last, begin, begin + size))
            self.shared_values = max(self.shared_values, begin + size)
            for tile, axes in room.axes.items():
                self.layouts[tile] = Layout(tuple(layout.strides[x] for x in axes), layout.element)
                self.offsets[tile] = begin

    def _layout(self, room: "Room", inner_padding: bool) -> Layout:
        if not self.parameters.padding:
            return banks.row_major(room.shape)
        accesses = [
            replace(x, lines=tuple((n, axes[at] if at >= 0 else -1) for n, at in x.lines))
            for tile, axes in room.axes.items()
            for x in self._accesses(tile)
        ]
        return banks.choose(
            room.shape,
            self.dtype.itemsize,
            self.elements // self.pack,
            tuple(dict.fromkeys(accesses)),
            inner_padding,
        )

    def _rooms(self, plain: set[int], in_place: bool) -> "list[Room]":
        """The tiles in shared memory, those together that take each other's place."""
        rooms: list[Room] = []
        room_of: dict[int, Room] = {}
        for tile in sorted(self.in_shared, key=lambda x: (self.maker[x], x)):
            shape = self.plan.tiles[tile].shape
            found = self._replaced(tile, plain, room_of) if in_place else None
            if found is None:
                room = Room(shape, {tile: tuple(range(len(shape)))})
                rooms.append(room)
            else:
                before, order = found
                room = room_of.pop(before)
                room.axes[tile] = axes = tuple(room.axes[before][n] for n in order)
                extents = dict(zip(axes, shape, strict=True))
                room.shape = tuple(max(x, extents[n]) for n, x in enumerate(room.shape))
            room_of[tile] = room
        return rooms

    def _replaced(
        self, tile: int, plain: set[int], candidates: Iterable[int]
    ) -> tuple[int, list[int]] | None:
        """A tile whose place another one may take, and which of its axes are the other's.

        Every fibre is read by who writes the new one there, and by nobody after that.
        """
        stage = self.stages[self.maker[tile]]
        if tile in plain or not isinstance(stage, Sweep):
            return None
        made = stage.tiles[tile]
        for value in stage.loads:
            before = value.tile
            if before not in candidates or before in plain or tile == before:
                continue
            if self.maker[before] == self.maker[tile]:
                continue
            alone = all(x == value or self.origin(x.tile).tile != before for x in stage.loads)
            users = [move for move in stage.moves if value in move.operands]
            # Other operations read value by value, and may do so twice where there are several.
            whole = stage.single or all(move.matrix is not None for move in users)
            makers = [move.result for move in stage.moves]
            if not users or stage.moves.index(users[0]) > makers.index(made):
                continue  # its fibres are not in registers yet
            same = sorted(value.labels) == sorted(made.labels) and len(set(made.labels)) == len(
                made.labels
            )
            if alone and whole and same and max(self.readers[before]) == self.maker[tile]:
                return before, [value.labels.index(x) for x in made.labels]
        return None

    def _accesses(self, tile: int) -> Iterable[Access]:
        for position in (self.maker[tile], *self.readers[tile]):
            if position == len(self.stages):
                continue
            stage = self.stages[position]
            if isinstance(stage, Assembly):
                continue
            if isinstance(stage, Sweep):
                values = [v for v in stage.loads if v.tile == tile and position != self.maker[tile]]
                made = stage.tiles.get(tile)
                if made is not None and position == self.maker[tile]:
                    values.append(made)
                for value in values:
                    lines = tuple((stage.extents[x], value.labels.find(x)) for x in stage.lines)
                    if stage.lanes > 1:
                        lines = (*lines, (stage.lanes, value.labels.find(ALONG)))
                    yield Access(lines, self.threads)
                continue
            blocking = blocking_of(stage.step, self.dtype.itemsize)
            for labels in self._labels_of(stage, tile):
                yield Access(tuple((n, labels.find(x)) for x, n in blocking.lines), self.threads)

    def _labels_of(self, stage: Gemm, tile: int) -> list[str]:
        step = stage.step
        if isinstance(step, Rearrange):
            pairs = [(step.operand, step.labels)]
        else:
            pairs = [(step.left, step.left_labels), (step.right, step.right_labels)]
        return [x for n, x in [*pairs, (stage.number, step.output_labels)] if n == tile]

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
        return bool(self.summed) or self.slices > 1

    def overlap(self, some: set[int], others: set[int]) -> bool:
        """Whether tiles overlap in shared memory."""

        def where(tile: int) -> tuple[int, int]:
            begin = self.offsets[tile]
            return begin, begin + self.layouts[tile].element * self.elements

        return any(
            where(x)[0] < where(y)[1] and where(y)[0] < where(x)[1] for x in some for y in others
        )

    def from_shared(self, tile: int, position: int) -> bool:
        return tile in self.in_shared and self.maker[tile] < position

    def uses(self) -> int:
        """How often a matrix in the constant bank is used."""
        return sum(matrix in self.bank for matrix in self.matrices(lanes=1))

    def busy(self) -> float:
        """The part of the threads that the widest stage has work for."""
        most = max([self._threads_of(stage) for stage in self.stages], default=1)
        work = self.elements // self.pack * most
        return work / (_round_up(work, self.threads))

    def describe(self) -> str:
        sweeps = sum(isinstance(stage, Sweep) for stage in self.stages)
        stages = [f"{sweeps} sweeps"] if sweeps else []
        if sweeps < len(self.stages):
            stages.append(f"{len(self.stages) - sweeps} gemms")
        return (
            f"{' and '.join(stages) or 'a sum'}, {self.elements * self.groups} elements on "
            f"{self.threads * self.groups} threads, {self.shared_bytes()} bytes of shared memory"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
