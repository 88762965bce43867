"""How a plan is done by blocks of threads: who does what, and where tiles are.

The stages of a plan (see ``sweeps``) are done one after the other by a group of threads, for
several elements at a time.  How many threads and elements, and who owns fibres, is chosen in
``model``; ``shared`` finds room for the tiles.
"""

import numpy as np

from jaxmagma.lowering.cuda import spreads
from jaxmagma.lowering.cuda.accumulations import (
    SHARED_REGISTERS,
    WHOLE_REGISTERS,
    accumulations,
    registers_of,
    whole_registers,
)
from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.destinations import find_destinations
from jaxmagma.lowering.cuda.origins import Origin, origin
from jaxmagma.lowering.cuda.outers import with_outers
from jaxmagma.lowering.cuda.parameters import CONSTANT_BYTES, TWICE, Parameters
from jaxmagma.lowering.cuda.pieces import Pieces, pieces_of, split_pieces_of
from jaxmagma.lowering.cuda.scheduler import Scheduler
from jaxmagma.lowering.cuda.shared import BEFORE, Shared, Uses
from jaxmagma.lowering.cuda.streams import Stream, find_streams
from jaxmagma.lowering.cuda.sweeps import (
    ALONG,
    BY_TENSOR_CORES,
    QUAD,
    Accumulation,
    Assembly,
    Gemm,
    Move,
    Stage,
    Sweep,
    copy_sweep,
    is_mirrored,
    made_by,
)
from jaxmagma.parity import Halves
from jaxmagma.plan import Plan
from jaxmagma.program import Gather, View


TYPES = {
    np.dtype("float64"): "double",
    np.dtype("float32"): "float",
    np.dtype("complex128"): "Complex<double>",
    np.dtype("complex64"): "Complex<float>",
}

# Fibres of a quad at a time: those of two lines, which sm_90 multiplies in the time of one.
QUAD_FIBRES = 2
# A warp that has fibres eight at a time does all of an element, if it need not do so more often.
FEW_OCTETS = 4
# Threads read several values of four bytes of a matrix at once, and from shared memory a group.
WORD = 8
GROUP = 16
# Rows of an output that are so long go through shared memory, to be written side by side.
LONG_ROW = 4


class Block:
    """How a plan is done by blocks of threads: the stages, who does them, and where tiles are.

    What is open when it is made, the ``model`` chooses. Matrices that are symmetric about their
    centre may be multiplied by ``even_odd`` halves, and operands may come ``in_rows``.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Parameters,
        limits: Limits,
        even_odd: bool | None,
        in_rows: bool,
    ) -> None:
        self.plan = plan
        self.program = plan.program
        self.parameters = parameters
        self.limits = limits
        self.even_odd = even_odd
        self.in_rows = in_rows
        self.inputs = len(plan.program.inputs)
        self.dtype = plan.program.dtype
        self.type = TYPES[self.dtype]
        everything = set(range(self.program.batch_rank))
        self.summed = [n for n, x in enumerate(self.program.outputs) if set(x.batch) != everything]
        self.stored = [n for n in range(len(self.program.outputs)) if n not in self.summed]
        self.brought = self._find_brought()
        self.origins = {
            n: origin(plan, n, self.brought)
            for n, step in plan.numbered_steps()
            if isinstance(step, View | Gather) and n not in self.brought
        }
        self.gathered = {x.vector for x in plan.steps if isinstance(x, Gather)}
        self.written, self.skipped = find_destinations(plan, self.stored)
        self.accumulations, gone = accumulations(plan)
        self.accumulated = {x.output for x in self.accumulations}
        self.whole: set[int] = set()  # of these, those that every thread has whole
        self.skipped |= gone
        self.quads = parameters.owner == "quads" and self.dtype in BY_TENSOR_CORES
        self.halves: dict[int, Halves] = {}
        self.holds = False  # matrices stay in registers from one product to the next
        self.packed = 1  # fibres that a thread has at a time
        self.bank: list[int] = []
        self.near: list[int] = []  # matrices in shared memory
        self.elements = self.threads = self.groups = self.slices = 1
        self.min_blocks = 0
        self.staging = True
        self.prefetch = True  # what later stages or slices read is asked for
        self.stages: list[Stage] = []
        self._groups: dict[tuple[bool, frozenset[int], int], list[Stage]] = {}
        self.fetched: list[int] = []
        self.streams: list[Stream] = []
        self.shared: Shared
        self.uses: Uses

    # ---- Where values are ------------------------------------------------------------------------

    def _find_brought(self) -> dict[int, Gather]:
        """The gathered tiles that threads bring to shared memory ahead of their use."""
        return {
            n: step
            for n, step in self.plan.numbered_steps()
            if self.parameters.ahead
            and isinstance(step, Gather)
            and self.plan.tiles[step.index].batched
            and not self.is_constant(step.index)
        }

    def origin(self, tile: int) -> Origin:
        return self.origins.get(tile) or Origin(tile)

    # ---- Matrices --------------------------------------------------------------------------------

    def fill_bank(self) -> list[int]:
        """The matrices that stand in the constant bank, in that order."""
        bank: list[int] = []
        left = CONSTANT_BYTES - 4 * len(self.plan.steps)
        for matrix in self._thread_matrices():
            size = self.bank_bytes(matrix)
            if matrix not in bank and matrix not in self.near and size <= left:
                bank.append(matrix)
                left -= size
        return bank

    def find_near(self, most: int) -> list[int]:
        """The matrices that are copied to shared memory: beyond so many bytes in the bank.

        Not those of halves, which are multiplied from there.
        """
        near: list[int] = []
        for matrix in dict.fromkeys(self._thread_matrices()):
            most -= self.bank_bytes(matrix)
            whole = len(self.plan.tiles[matrix].shape) == 2 and matrix not in self.halves
            if most < 0 and whole:
                near.append(matrix)
        return near

    def bank_size(self, matrix: int) -> int:
        """Values of a matrix in the constant bank: all of them, or those of its halves."""
        halves = self.halves.get(matrix)
        return self.plan.tiles[matrix].size if halves is None else 2 * halves.even.size

    def bank_bytes(self, matrix: int) -> int:
        """What it takes there, where small values begin at multiples of a group of them."""
        itemsize = self.dtype.itemsize
        size = self.bank_size(matrix) * itemsize
        return size if itemsize >= WORD else -(-size // GROUP) * GROUP

    def near_stride(self, matrix: int) -> int:
        """From a row of a matrix in shared memory to the next one: whole groups of values."""
        return self._whole_groups(self.plan.tiles[matrix].shape[1])

    def near_places(self) -> dict[int, int]:
        """Where these matrices begin, behind the tiles."""
        places, end = {}, self._whole_groups(self.shared.values)
        for matrix in self.near:
            places[matrix] = end
            end += self._near_size(matrix)
        return places

    def _near_size(self, matrix: int) -> int:
        return self.plan.tiles[matrix].shape[0] * self.near_stride(matrix)

    def shared_values(self) -> int:
        """Values in the shared memory of a group: of tiles, of matrices, and of streams."""
        if not self.near and not self.streams:
            return self.shared.values
        near = sum(map(self._near_size, self.near))
        return (
            self._whole_groups(self.shared.values) + near + sum(map(self.stream_size, self.streams))
        )

    def stream_places(self) -> dict[int, int]:
        """Where the pieces of each streamed operand begin, behind everything else."""
        places, end = {}, self.shared_values()
        for stream in reversed(self.streams):
            end -= self.stream_size(stream)
            places[stream.operand] = end
        return places

    def stream_size(self, stream: Stream) -> int:
        sweep = self.stages[stream.position]
        assert isinstance(sweep, Sweep)
        return stream.values(self.threads // 32, self.fibres(sweep))

    def find_streams(self, stages: list[Stage]) -> list[Stream]:
        """The operands whose rows come to each warp as it needs them.

        Several warps then have one element at a time.
        """
        one = self.groups == 1 and self.parameters.elements in (None, 1)
        if not (self.in_rows and self.quads and one) or self.alone:
            return []

        def possible(tile: int) -> bool:
            return self.is_outside(tile) and tile not in self.staged

        return find_streams(self.plan, stages, self.origin, possible)

    def streamed(self, position: int) -> set[int]:
        """The tiles that a sweep reads so."""
        return {x for stream in self.streams if stream.position == position for x in stream.tiles}

    def _whole_groups(self, values: int) -> int:
        group = max(1, GROUP // self.dtype.itemsize)
        return -(-values // group) * group

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
        sweeps = (x for x in self.stages if isinstance(x, Sweep))
        return list(dict.fromkeys(x for sweep in sweeps for x in self.pieces_in(sweep)))

    def pieces_in(self, sweep: Sweep) -> list[Pieces]:
        """The same in one sweep."""
        moves = sweep.moves if sweep.lanes == QUAD else ()
        return list(dict.fromkeys(x for m in moves if m.matrix for x in self.pieces_of(sweep, m)))

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

    def matrix_registers(self) -> int:
        """Registers of a thread for all matrices that tensor cores multiply with."""
        return sum(x.values for x in self.pieces()) * self.dtype.itemsize // 4

    def fibres(self, sweep: Sweep) -> int:
        """Fibres that a thread, or a quad, has at a time: as many as leave none without."""
        fibres = self.elements * sweep.count
        if sweep.lanes == 1:
            return 1 if sweep.single else min(self.packed, -(-fibres // self.threads))
        octets = -(-fibres // 8)
        most = -(-octets // (self.threads // 32))
        return min(self.parameters.fibres or QUAD_FIBRES, most)

    def packs(self, sweep: Sweep) -> bool:
        """Whether values of a sweep come in packs, one for each fibre of their owner."""
        return sweep.lanes > 1 or self.fibres(sweep) > 1

    def _products(self, lanes: int) -> list[Move]:
        """The mode products whose fibres so many lanes own."""
        sweeps = (x for x in self.stages if isinstance(x, Sweep) and x.lanes == lanes)
        return [move for sweep in sweeps for move in sweep.moves if move.matrix is not None]

    def _thread_matrices(self) -> list[int]:
        """The matrices that threads multiply with, one for each product."""
        return [move.matrix.tile for move in self._products(1) if move.matrix is not None]

    def thread_matrix_bytes(self) -> int:
        """What these matrices take in the constant bank, each once."""
        return sum(map(self.bank_bytes, set(self._thread_matrices())))

    @property
    def alone(self) -> bool:
        """Whether one warp has all fibres of an element."""
        return 0 < self.octets() <= FEW_OCTETS

    def octets(self) -> int:
        """How often one warp would take eight fibres of an element, in the largest sweep."""
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and x.lanes > 1]
        return -(-max((sweep.count for sweep in sweeps), default=0) // 8)

    def sum_size(self, output: int) -> int:
        return self.plan.tiles[self.plan.results[output]].size

    @property
    def split(self) -> int:
        """How many warps share the columns of a sum: two if one has no registers for them all."""
        return 2 if self.sums_registers(1) > SHARED_REGISTERS and self.threads % 64 == 0 else 1

    def sums_registers(self, split: int) -> int:
        """Registers of a thread that hold pieces of sums from one element to the next."""
        registers = 0
        for output in self.accumulated - self.whole:
            rows, columns = self.plan.tiles[self.plan.results[output]].shape
            registers += registers_of(rows, columns, self.dtype, split)
        return registers

    @property
    def kept_registers(self) -> int:
        """The same, if warps share them where they had better, and those for whole sums."""
        every = self.sums_registers(1)
        pieces = self.sums_registers(2) if every > SHARED_REGISTERS else every
        return pieces + sum(whole_registers(self.plan, self.plan.results[x]) for x in self.whole)

    def shared_bytes(self) -> int:
        return self.shared_values() * self.dtype.itemsize * self.groups

    def schedule(self, kept: int = 0) -> list[Stage]:
        """Stages of threads that keep so many registers, and those of sums, all the time."""
        stages: list[Stage] = []
        staged: set[int] = set()
        made: set[int] = set()
        self.whole = self._whole_sums()
        kept += self.kept_registers
        for stage in self._grouped(kept):
            if isinstance(stage, Gemm):
                for operand in stage.step.operands:
                    needed = self.staging or self.origin(operand).index is not None
                    if self.is_outside(operand) and needed and operand not in staged:
                        staged.add(operand)
                        stages.append(copy_sweep(self.plan, operand))
            stages.append(stage)
            if isinstance(stage, Sweep):
                made |= stage.tiles.keys()
            elif isinstance(stage, Gemm):
                made.add(stage.number)
        self.staged = staged
        self.rewritten = {x for x in self.written if x in made and self._in_fibres(x, stages)}
        copied = [x for x in self.written if x not in made or x in self.rewritten]
        if self.accumulations:
            whole = [x for x in self.accumulations if x.output in self.whole]
            return self._accumulated(with_outers(stages, whole, self.origins), copied)
        return stages + [copy_sweep(self.plan, value) for value in copied]

    def _grouped(self, kept: int) -> list[Stage]:
        """The steps as the scheduler groups them, which does so once for each question."""
        question = self.quads, frozenset(self.halves), kept
        if question not in self._groups:
            scheduler = Scheduler(self.plan, self.skipped, self.quads, self.halves, kept)
            self._groups[question] = scheduler.stages()
        return self._groups[question]

    def _whole_sums(self) -> set[int]:
        """The sums that every thread has whole: small ones, of fibres that threads own."""
        if self.quads:
            return set()
        found: set[int] = set()
        left = WHOLE_REGISTERS
        for output in sorted(self.accumulated):
            registers = whole_registers(self.plan, self.plan.results[output])
            if registers <= left:
                found.add(output)
                left -= registers
        return found

    def _accumulated(self, stages: list[Stage], copied: list[int]) -> list[Stage]:
        """The stages with accumulations, and copies to outputs, as soon as they can be had.

        Tiles then leave shared memory early, and what reads them waits for no barrier of its own.
        """
        known = set(range(self.inputs))
        waiting = [x for x in self.accumulations if x.output not in self.whole]
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
            known.update(made_by(stage))
            follow()
        return found

    def _in_fibres(self, tile: int, stages: list[Stage]) -> bool:
        """Whether threads have fibres of an output, and would write it far apart.

        Memory would be asked for rows many times, and for parts of sectors.
        """
        for stage in (x for x in stages if isinstance(x, Sweep)):
            made = stage.tiles.get(tile)
            if made is not None and ALONG in made.labels:
                axis = made.labels.index(ALONG)
                rows = any(at.strides[axis] == 1 for _, at in self.written[tile])
                return rows and made.length >= LONG_ROW and stage.lanes == 1
        return False

    def is_outside(self, tile: int) -> bool:
        """Whether a batched tile is in global memory."""
        at = self.origin(tile)
        return at.tile < self.inputs and self.plan.tiles[tile].batched

    def read_whole(self) -> list[int]:
        """The operands that sweeps read all of, in the order in which they need them.

        Those of quads; or of threads where there are no quads, and one copy brings all elements.
        """
        if not self.quads and not self.together:
            return []
        read: dict[int, set[int]] = {}  # of each operand the parts that are read
        for stage in self.stages:
            quads = isinstance(stage, Sweep) and (stage.lanes > 1) == self.quads
            for value in stage.loads if isinstance(stage, Sweep) and quads else ():
                at = self.origin(value.tile)
                streamed = any(value.tile in x.tiles for x in self.streams)
                known = streamed or at.index is not None or at.tile in self.staged
                if self.is_outside(value.tile) and not known:
                    read.setdefault(at.tile, set()).add(value.tile)
        size = {x: self.plan.tiles[x].size for parts in read.values() for x in parts}
        return [
            tile
            for tile, parts in read.items()
            if sum(size[x] for x in parts) >= self.plan.tiles[tile].size
        ]

    def find_uses(self, fetched: list[int]) -> Uses:
        self.fetched = fetched
        maker: dict[int, int] = dict.fromkeys((*self.fetched, *self.brought), BEFORE)
        readers: dict[int, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for tile in made_by(stage):
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
        plain = sums | viewed | assembled | self.brought.keys()
        before = {*fetched, *self.brought}
        return Uses(
            self.plan,
            self.stages,
            maker,
            readers,
            self.origins,
            plain,
            before,
            self.ahead,
            self.twice,
            self.together,
            {tile: [at.strides for _, at in places] for tile, places in self.written.items()},
            {position: self.streamed(position) for position in range(len(self.stages))},
        )

    def possible_spreads(self) -> dict[int, tuple[int, ...]]:
        """Of each sweep of quads, by its position: which lines neighbours may have."""
        found: dict[int, tuple[int, ...]] = {}
        for position, stage in enumerate(self.stages):
            if isinstance(stage, Sweep) and stage.lanes > 1:
                fibres, most = self.fibres(stage), max(spreads.SPREADS)
                if self.dtype.kind != "f":
                    most = 1  # shared memory serves two quads of complex values at a time
                elif self.streamed(position) and fibres % 2:
                    most = 2  # a piece of a stream has the lines of one octet
                possible = spreads.possible(self.elements * stage.count, fibres)
                found[position] = tuple(x for x in possible if x <= most)
        return found

    @property
    def ahead(self) -> bool:
        """Whether operands of the next elements are fetched during the work on these."""
        return bool(self.parameters.ahead) and bool(self.fetched or self.brought)

    @property
    def twice(self) -> bool:
        """Whether they have a place of their own, from the beginning of that work."""
        return self.parameters.ahead == TWICE and self.ahead and not self.brought

    @property
    def together(self) -> bool:
        """Whether the fetched tiles of all elements come in one copy, as they follow each other.

        Those of threads, whose tiles are small: a copy for each would cost more than it brings.
        """
        return self.program.batch_rank == 1 and not self.quads

    @property
    def rereads(self) -> bool:
        """Whether matrices in the constant bank are read anew for each product of a thread."""
        return self.quads or not self.holds

    @property
    def strides(self) -> bool:
        """Whether there are as many groups as a GPU has room for, and take turns with elements."""
        return self.ahead and not self.summed

    def read(self, stage: Stage) -> list[int]:
        """The tiles that a stage reads where they are in memory."""
        if isinstance(stage, Sweep):
            tiles = [value.tile for value in stage.loads]
        else:
            tiles = list(stage.step.operands)
        found: dict[int, None] = {}
        for tile in tiles:
            staged = tile in self.staged and not self.copies(stage)
            at = Origin(tile) if staged else self.origin(tile)
            found[at.tile] = None
            if at.index is not None:
                found[at.index] = None
        return list(found)

    def copies(self, stage: Stage) -> bool:
        return isinstance(stage, Sweep) and any(move.step is None for move in stage.moves)

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
        """How often a matrix in the constant bank is read anew."""
        return self.rereads * sum(matrix in self.bank for matrix in self._thread_matrices())

    def split_products(self) -> int:
        """How many products are done half by half."""
        threads = sum(self.splits(move) is not None for move in self._products(1))
        sweeps = [x for x in self.stages if isinstance(x, Sweep) and self.is_mirrored(x)]
        return threads + sum(move.matrix is not None for x in sweeps for move in x.moves)

    def describe(self) -> str:
        sweeps = sum(isinstance(stage, Sweep) for stage in self.stages)
        stages = [f"{sweeps} sweeps"] if sweeps else []
        sums = sum(isinstance(stage, Accumulation) for stage in self.stages)
        outers = sum(len(stage.outers) for stage in self.stages if isinstance(stage, Sweep))
        if sweeps + sums < len(self.stages):
            stages.append(f"{len(self.stages) - sweeps - sums} gemms")
        if sums + outers:
            stages.append(f"{sums + outers} products summed over elements")
        split = self.split_products()
        halves = f", {split} products by even and odd halves" if split else ""
        return (
            f"{' and '.join(stages) or 'a sum'}, {self.elements * self.groups} elements on "
            f"{self.threads * self.groups} threads, {self.shared_bytes()} bytes of shared memory"
            f"{halves}{', operands ahead' if self.ahead else ''}{', twice' if self.twice else ''}"
            f"{', rows as they are needed' if self.streams else ''}"
        )
