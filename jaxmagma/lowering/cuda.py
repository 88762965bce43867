"""From a plan to one CUDA kernel, as readable source.

The kernel is a sequence of *stages* (sweeps of fibre operations, and gemms; see ``sweeps``), each
handing tiles on to the next through shared memory. It is compiled for its exact sizes when XLA
builds the executable. The device functions it calls are the headers in ``cuda/``.

* One thread owns one fibre of a tile: inputs in registers, outputs by unrolled multiply-adds.
* Their matrix stands in the constant bank, where it is an operand of the instruction itself. Its
  values are no part of the source: a constant is written there when the kernel is loaded, a traced
  array is copied there, in stream order, before each launch. Both run the same kernel.
* A block of threads works on several elements. Global memory is read by the first stage that needs
  a tile and written by the one that makes it.
* An output summed over elements: each block sums a fixed share of the elements, and a second kernel
  adds the partial sums in a fixed order.

Names in the source: ``g7`` is tile 7 of the plan in global memory, ``s7`` in shared memory, ``r7``
in registers, ``bank.m7`` in the constant bank.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxmagma.lowering import banks
from jaxmagma.lowering.banks import Access, Layout
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.sweeps import (
    ALONG,
    Gemm,
    Move,
    Scheduler,
    Stage,
    Sweep,
    Value,
    as_mode,
    copy_sweep,
)
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.program import Constant, ElementProgram, Input


TARGET = "jaxmagma_cuda"
BGEMM_TARGET = "jaxmagma_cuda_bgemm"
LARGEST_BGEMM = 32  # as in cuda/bgemm.h

TYPES = {
    np.dtype("float64"): "double",
    np.dtype("float32"): "float",
    np.dtype("complex128"): "Complex<double>",
    np.dtype("complex64"): "Complex<float>",
}

# The device function of each pointwise function of a program.
MAPS = {"add": "Add()"}

CONSTANT_BYTES = 64 << 10
# A block takes no more shared memory than every GPU since sm_80 has, unless one element needs more:
# then what those made for float64 have.
SHARED_BYTES = 99 << 10
MOST_SHARED_BYTES = 163 << 10
MAX_THREADS = 1024

# Why the constant bank ends in zeros.
UNKNOWN_ZEROS = "added to each use: else values would stay in registers from one to the next"

# Blocks that share a sum: enough to fill any GPU several times over.
SUM_BLOCKS = 2112


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the model in this module."""

    threads: int | None = None  # of a group: threads that work together on some elements
    elements: int | None = None  # of a group
    pack: int = 1  # elements of one thread, which share what it fetches of a matrix
    groups: int = 1  # in a block; groups of one warp never wait for another
    slices: int = 1  # that a group works through, one after the other
    prefetch: bool = True  # asks for tiles some time before they are read
    min_blocks: int | None = None  # on a multiprocessor, for the compiler's choice of registers
    padding: bool = True  # of tiles in shared memory, against bank conflicts
    shared_bytes: int = SHARED_BYTES  # most shared memory for one block

    def __post_init__(self) -> None:
        if self.groups > 1 and self.threads != 32:
            raise ValueError(f"groups of {self.threads} threads: several in a block have 32 each")


def lower(
    plan: Plan, extents: tuple[int, ...], parameters: Parameters | None = None
) -> Kernel | Declined:
    """The CUDA kernel for ``plan``, or why there is none.

    ``extents`` of the batch axes only size the workspace.
    """
    reason = _unsupported(plan)
    if reason is not None:
        return Declined(reason)
    compiled = _bgemm(plan) if parameters is None else None
    if compiled is not None:
        return compiled
    plan = _constants_folded(plan)
    generator = _Generator(plan, parameters or Parameters())
    reason = generator.choose()
    if reason is not None:
        return Declined(reason)
    return generator.kernel(extents)


def _unsupported(plan: Plan) -> str | None:
    program = plan.program
    if program.batch_rank == 0:
        return "no operand has a batch axis"
    for dtype in {tile.dtype for tile in plan.tiles}:
        if dtype not in TYPES:
            return f"{dtype} has no CUDA kernel"
    if len({tile.dtype for tile in plan.tiles}) > 1:
        return "operands of different dtypes"
    for step in plan.steps:
        if isinstance(step, Pointwise) and step.function not in MAPS:
            return f"the function {step.function!r} has no CUDA kernel"
        if isinstance(step, Pointwise) and len(step.operands) != 2:
            return f"the function {step.function!r} of {len(step.operands)} operands"
    if any(0 in tile.shape for tile in plan.tiles):
        return "a tile is empty"
    everything = frozenset(range(program.batch_rank))
    sums = {out.batch for out in program.outputs if set(out.batch) != everything}
    if len(sums) > 1:
        return "outputs are summed over different batch axes"
    return None


def _bgemm(plan: Plan) -> Kernel | None:
    """The kernel from the compiled family, if the plan is one product of square matrices."""
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if not isinstance(step, Product):
        return None
    program = plan.program
    sizes = set(step.extents.values())
    plain = len(step.rows) == len(step.columns) == len(step.contracted) == 1 and not step.paired
    if not plain or len(sizes) > 1 or max(sizes) > LARGEST_BGEMM:
        return None
    if sorted(step.operands) != [0, 1] or len(program.inputs) > 2 or len(program.outputs) > 1:
        return None
    axes = program.outputs[0].batch
    if len(axes) < program.batch_rank or any(x.batch != axes for x in program.inputs):
        return None
    left = step.left_labels[0] == step.contracted
    right = step.right_labels[0] == step.columns
    out = step.output_labels[0] == step.columns
    if step.left == 1:
        # C = B A is the transpose of A' B'.
        left, right, out = not right, not left, not out
    (size,) = sizes
    return Kernel(
        BGEMM_TARGET,
        {"size": size, "transposed": left + 2 * right + 4 * out},
        description=f"compiled product of {size} x {size} matrices",
    )


def _constants_folded(plan: Plan) -> Plan:
    """Steps on constants alone are done now: their results become inputs of the plan."""
    program = plan.program
    first = len(program.inputs)
    known = {n: x.constant.array for n, x in enumerate(program.inputs) if x.constant is not None}
    for number, step in plan.numbered_steps():
        if all(x in known for x in step.operands):
            known[number] = _evaluate(step, [known[x] for x in step.operands])
    done = [n for n in sorted(known) if n >= first]
    if not done:
        return plan
    left = [n for n in range(first, len(plan.tiles)) if n not in known]
    order = [*range(first), *done, *left]
    numbers = {old: new for new, old in enumerate(order)}

    def renumbered(step: Step) -> Step:
        if isinstance(step, Product):
            return replace(step, left=numbers[step.left], right=numbers[step.right])
        if isinstance(step, Rearrange):
            return replace(step, operand=numbers[step.operand])
        return replace(step, operands=tuple(numbers[x] for x in step.operands))

    constants = tuple(Input((), known[n].shape, known[n].dtype, Constant(known[n])) for n in done)
    # The operations go: from here on the steps of the plan are all that is read.
    folded = ElementProgram(
        program.batch_rank,
        program.inputs + constants,
        (),
        tuple(
            replace(out, value=numbers[value])
            for out, value in zip(program.outputs, plan.results, strict=True)
        ),
    )
    return Plan(
        folded,
        tuple(plan.tiles[n] for n in order),
        tuple(renumbered(plan.steps[n - first]) for n in left),
        tuple(numbers[value] for value in plan.results),
    )


def _evaluate(step: Step, operands: list[np.ndarray]) -> np.ndarray:
    if isinstance(step, Pointwise):
        return operands[0] + operands[1]
    if isinstance(step, Product):
        terms = f"{step.left_labels},{step.right_labels}"
    else:
        terms = step.labels
        new = [x for x in step.output_labels if x not in step.labels]
        operands = [*operands, *(np.ones(step.extents[x], operands[0].dtype) for x in new)]
        terms = ",".join([terms, *new])
    made = np.einsum(f"{terms}->{step.output_labels}", *operands)
    return np.ascontiguousarray(made, operands[0].dtype)


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


def _blocking(step: Product | Rearrange, itemsize: int) -> Blocking:
    extents = step.extents
    if isinstance(step, Rearrange):
        return Blocking("", "", 1, 1, tuple((x, extents[x]) for x in step.output_labels))
    most = 4 if itemsize <= 8 else 2

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
class Pointer:
    """A parameter of the kernel: an array of the call with its batch axes and tile size."""

    name: str
    buffer: int
    axes: tuple[int, ...]
    size: int
    written: bool


# ---- The kernel ------------------------------------------------------------------------------


class _Generator:
    def __init__(self, plan: Plan, parameters: Parameters) -> None:
        self.plan = plan
        self.program = plan.program
        self.parameters = parameters
        self.inputs = len(plan.program.inputs)
        self.dtype = plan.tiles[0].dtype
        self.type = TYPES[self.dtype]
        everything = set(range(self.program.batch_rank))
        self.summed = [n for n, x in enumerate(self.program.outputs) if set(x.batch) != everything]
        self.stored = [n for n in range(len(self.program.outputs)) if n not in self.summed]
        self.bank = self._bank()
        self.groups = 1 if self.summed else parameters.groups
        self.slices = 1 if self.summed else parameters.slices
        self.staging = True
        self.stages: list[Stage] = []

    # ---- Choices ---------------------------------------------------------------------------------

    def _bank(self) -> list[int]:
        """The matrices that stand in the constant bank, in that order."""
        bank: list[int] = []
        left = CONSTANT_BYTES - 4 * len(self.plan.steps)
        for step in self.plan.steps:
            mode = as_mode(self.plan, step)
            if mode is not None and mode.matrix not in bank:
                size = self.plan.tiles[mode.matrix].size * self.dtype.itemsize
                if size <= left:
                    bank.append(mode.matrix)
                    left -= size
        return bank

    def choose(self) -> str | None:
        """Chooses stages, threads, elements and layouts; returns why they cannot be had, if so."""
        for staging in (True, False):
            self.staging = staging
            self.stages = self._stages()
            self._find_uses()
            # A thread of a gemm has a block of one element.
            fibres = all(isinstance(stage, Sweep) for stage in self.stages)
            self.pack = self.parameters.pack if fibres else 1
            # For sweeps it pays to let the compiler take the registers it likes, for gemms not.
            self.min_blocks = self.parameters.min_blocks
            if self.min_blocks is None:
                self.min_blocks = int(fibres)
            for elements, threads in self._shapes():
                self.elements, self.threads = elements, threads
                self._lay_out()
                fewest = self.elements == self.pack and self.groups == 1
                most = MOST_SHARED_BYTES if fewest else self.parameters.shared_bytes
                if self._shared_bytes() <= most:
                    return None
        return (
            f"one element needs {self._shared_bytes() >> 10} KB of shared memory, and a block has "
            f"{MOST_SHARED_BYTES >> 10} KB"
        )

    def _shared_bytes(self) -> int:
        return self.shared_values * self.dtype.itemsize * self.groups

    def _stages(self) -> list[Stage]:
        stages: list[Stage] = []
        staged: set[int] = set()
        made: set[int] = set()
        for stage in Scheduler(self.plan).stages():
            if isinstance(stage, Gemm):
                for operand in stage.step.operands:
                    if self._is_batched_input(operand) and self.staging and operand not in staged:
                        staged.add(operand)
                        stages.append(copy_sweep(self.plan, operand))
            stages.append(stage)
            made |= stage.tiles.keys() if isinstance(stage, Sweep) else {stage.number}
        for out in self.stored:
            value = self.plan.results[out]
            if value < self.inputs and value not in made:
                stages.append(copy_sweep(self.plan, value))
                made.add(value)
        self.staged = staged
        return stages

    def _is_batched_input(self, tile: int) -> bool:
        return tile < self.inputs and self.plan.tiles[tile].batched

    def _find_uses(self) -> None:
        """Which stage makes each tile, and which ones read it from shared memory."""
        self.maker: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for tile in self._made(stage):
                if tile >= self.inputs or tile in self.staged:
                    self.maker.setdefault(tile, position)
        for position, stage in enumerate(self.stages):
            for tile in self._read(stage):
                if tile in self.maker and self.maker[tile] < position:
                    self.readers.setdefault(tile, []).append(position)
        for out in self.summed:
            tile = self.plan.results[out]
            if tile in self.maker:
                self.readers.setdefault(tile, []).append(len(self.stages))
        self.in_shared = {tile for tile in self.maker if self.readers.get(tile)}

    def _made(self, stage: Stage) -> list[int]:
        if isinstance(stage, Gemm):
            return [stage.number]
        return [move.result.tile for move in stage.moves]

    def _read(self, stage: Stage) -> list[int]:
        if isinstance(stage, Gemm):
            return list(stage.step.operands)
        return [value.tile for value in stage.loads]

    def _lines(self, stage: Stage) -> int:
        if isinstance(stage, Gemm):
            return _blocking(stage.step, self.dtype.itemsize).count
        return stage.count

    def _shapes(self) -> list[tuple[int, int]]:
        """(elements, threads) of a group: the model's favourite, then ever smaller ones."""
        most = max([self._lines(stage) for stage in self.stages], default=1)
        given = self.parameters
        if given.elements is not None:
            slots = max(1, given.elements // self.pack)
            threads = given.threads or min(MAX_THREADS, _round_up(slots * most, 32))
            return [(slots * self.pack, threads)]
        largest = given.threads or 256
        if most > largest:
            return [(self.pack, given.threads or min(512, _round_up(most, 32)))]
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

    def _lay_out(self) -> None:
        self.layouts: dict[int, Layout] = {}
        sums = {self.plan.results[out] for out in self.summed}
        for tile in sorted(self.in_shared):
            shape = self.plan.tiles[tile].shape
            if self.parameters.padding:
                accesses = tuple(dict.fromkeys(self._accesses(tile)))
                self.layouts[tile] = banks.choose(
                    shape,
                    self.dtype.itemsize,
                    self.elements // self.pack,
                    accesses,
                    tile not in sums,
                )
            else:
                self.layouts[tile] = banks.row_major(shape)
        self.offsets: dict[int, int] = {}
        placed: list[tuple[int, int, int, int]] = []  # first stage, last stage, begin, end
        self.shared_values = 0
        for tile in sorted(self.in_shared, key=lambda x: (self.maker[x], x)):
            first, last = self.maker[tile], max(self.readers[tile])
            size = self.layouts[tile].element * self.elements
            size = _round_up(size, max(1, 16 // self.dtype.itemsize))
            begin = 0
            for other_begin, end in sorted(
                (b, e) for f, until, b, e in placed if f <= last and first <= until
            ):
                if begin + size <= other_begin:
                    break
                begin = max(begin, end)
            self.offsets[tile] = begin
            placed.append((first, last, begin, begin + size))
            self.shared_values = max(self.shared_values, begin + size)

    def _accesses(self, tile: int) -> Iterable[Access]:
        for position in (self.maker[tile], *self.readers[tile]):
            if position == len(self.stages):
                continue
            stage = self.stages[position]
            if isinstance(stage, Sweep):
                values = [v for v in stage.loads if v.tile == tile and position != self.maker[tile]]
                made = stage.tiles.get(tile)
                if made is not None and position == self.maker[tile]:
                    values.append(made)
                for value in values:
                    lines = tuple((stage.extents[x], value.labels.find(x)) for x in stage.lines)
                    yield Access(lines, self.threads)
                continue
            blocking = _blocking(stage.step, self.dtype.itemsize)
            for labels in self._labels_of(stage, tile):
                yield Access(tuple((n, labels.find(x)) for x, n in blocking.lines), self.threads)

    def _labels_of(self, stage: Gemm, tile: int) -> list[str]:
        step = stage.step
        if isinstance(step, Rearrange):
            pairs = [(step.operand, step.labels)]
        else:
            pairs = [(step.left, step.left_labels), (step.right, step.right_labels)]
        return [x for n, x in [*pairs, (stage.number, step.output_labels)] if n == tile]

    # ---- Printing --------------------------------------------------------------------------------

    def kernel(self, extents: tuple[int, ...]) -> Kernel:
        source = self._source()
        return Kernel(
            TARGET,
            self._attributes(source),
            self._workspace(extents),
            self._description(),
            source,
        )

    def _pointers(self) -> list[Pointer]:
        parameters: list[Pointer] = []
        arguments = 0
        read = {v.tile for s in self.stages if isinstance(s, Sweep) for v in s.loads}
        read |= {x for s in self.stages if isinstance(s, Gemm) for x in s.step.operands}
        read |= {self.plan.results[out] for out in self.summed}
        read |= {
            m.matrix.tile
            for s in self.stages
            if isinstance(s, Sweep)
            for m in s.moves
            if m.matrix is not None and m.matrix.tile not in self.bank
        }
        for tile, operand in enumerate(self.program.inputs):
            if operand.constant is None:
                if tile in read:
                    size = self.plan.tiles[tile].size
                    parameters.append(Pointer(f"g{tile}", arguments, operand.batch, size, False))
                arguments += 1
        sums = 0
        for number, out in enumerate(self.program.outputs):
            size = self.plan.tiles[self.plan.results[number]].size
            if number in self.summed:
                buffer = arguments + len(self.program.outputs) + sums
                parameters.append(Pointer(f"partial{number}", buffer, (), size, True))
                sums += 1
            else:
                parameters.append(
                    Pointer(f"out{number}", arguments + number, out.batch, size, True)
                )
        return parameters

    def _tables(self) -> list[int]:
        """Constants that stand in global memory: read at places that differ between threads."""
        tables: dict[int, None] = {}
        for stage in self.stages:
            operands = self._read(stage)
            if isinstance(stage, Sweep):
                operands += [
                    m.matrix.tile
                    for m in stage.moves
                    if m.matrix is not None and m.matrix.tile not in self.bank
                ]
            tables.update((x, None) for x in operands if self._is_constant(x))
        tables.update(
            (self.plan.results[out], None)
            for out in self.summed
            if self._is_constant(self.plan.results[out])
        )
        return list(tables)

    def _is_constant(self, tile: int) -> bool:
        return tile < self.inputs and self.program.inputs[tile].constant is not None

    def _source(self) -> str:
        pointers = self._pointers()
        self.uses = 0
        text = _Text()
        for line in self._steps():
            text(f"// {line}")
        text("//")
        text(f"// {self._description()}")
        text('#include "kernel.cuh"')
        text("")
        text("using namespace jaxmagma;")
        text("")
        text(f"constexpr int kThreads = {self.threads};")
        text(f"constexpr int kElements = {self.elements};  // of {self._group()}")
        if self.pack > 1:
            text(f"constexpr int kPack = {self.pack};  // of them in one thread")
        if self.groups > 1:
            text(f"constexpr int kGroups = {self.groups};  // in a block")
        if self.slices > 1:
            text(f"constexpr int kSlices = {self.slices};  // of so many elements, in turn")
        text("")
        for name, tiles, space in (
            ("bank", self.bank, "__constant__"),
            ("table", self._tables(), "__device__"),
        ):
            if tiles:
                text(f"struct {name.capitalize()} {{")
                for tile in tiles:
                    size = self.plan.tiles[tile].size
                    member = f"m{tile}" if name == "bank" else f"t{tile}"
                    text(f"  {self.type} {member}[{size}];", self._shape(tile))
                if name == "bank":
                    text(f"  int zero[{self._uses()}];", UNKNOWN_ZEROS)
                text("};")
                text(f'extern "C" {{ {space} {name.capitalize()} {name}; }}')
                text("")
        rank = self.program.batch_rank
        batched = [x for x in pointers if x.axes]
        batch = f"Batch<{rank}, {len(batched)}>" if rank > 1 else f"Batch<1, {len(batched)}>"
        bounds = "kThreads * kGroups" if self.groups > 1 else "kThreads"
        if self.min_blocks:
            bounds += f", {self.min_blocks}"
        arguments = [f"const {batch} batch"]
        for x in pointers:
            constant = "" if x.written else "const "
            arguments.append(f"{constant}{self.type}* __restrict__ {x.name}_")
        text(f'extern "C" __global__ void __launch_bounds__({bounds})')
        text(f"kernel({(',' + chr(10) + ' ' * 7).join(arguments)}) {{")
        text.indent += 1
        if self.shared_values:
            text("extern __shared__ __align__(16) unsigned char memory[];")
        if self.groups > 1:
            text("const int thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;")
        else:
            text("const int thread = threadIdx.x;")
        if self.shared_values:
            own = f" + {self.shared_values} * group" if self.groups > 1 else ""
            text(f"{self.type}* const shared = reinterpret_cast<{self.type}*>(memory){own};")
        for out in self.summed:
            size = self.plan.tiles[self.plan.results[out]].size
            text(f"Sum<{self.type}, {size}, kThreads> sum{out};")
            text(f"zero(sum{out}.value);")
        self._print_elements(text, batched)
        for x in pointers:
            if x.axes:
                text(
                    f"const auto {x.name} = [&](int e) {{ return {x.name}_ + "
                    f"batch.offset<{batched.index(x)}, {x.size}>(slice.element(e)); }};"
                )
            elif not x.name.startswith("partial"):
                text(f"const auto {x.name} = [&](int) {{ return {x.name}_; }};")
        for tile in self._tables():
            text(f"const auto t{tile} = [&](int) {{ return table.t{tile}; }};")
        for tile, offset in self.offsets.items():
            size = self.layouts[tile].element
            text(
                f"const auto s{tile} = [&](int e) {{ return shared + {offset} + {size} * e; }};",
                self._shape(tile),
            )
        self._print_stages(text)
        if self.loops:
            text.indent -= 1
            text("}")
        if self.summed:
            for out in self.summed:
                size = self.plan.tiles[self.plan.results[out]].size
                text(
                    f"store(partial{out}_ + blockIdx.x * static_cast<long long>({size}), "
                    f"sum{out}, thread);"
                )
        text.indent -= 1
        text("}")
        if self.summed:
            text("")
            text('extern "C" __global__ void __launch_bounds__(128)')
            text(f"finish(const {self.type}* partial, {self.type}* sum, long long values,")
            text("       long long chunks, long long size) {")
            text("  total(partial, sum, values, chunks, size);")
            text("}")
        return text.source

    @property
    def loops(self) -> bool:
        """Whether a group of threads works through several slices."""
        return bool(self.summed) or self.slices > 1

    def _print_elements(self, text: "_Text", batched: list[Pointer]) -> None:
        """Which elements the group works on; opens the loop over slices, if there is one."""
        group = "blockIdx.x * kGroups + group" if self.groups > 1 else "blockIdx.x"
        if self.summed:
            text("const auto run = share<kElements>(batch, blockIdx.x);")
        elif self.slices > 1:
            text(f"const auto run = jaxmagma::run<kElements * kSlices>(batch, {group});")
        else:
            text(f"const auto run = jaxmagma::run<kElements>(batch, {group});")

        ask = self.parameters.prefetch and bool(self.stages)
        reads = [(slot, x.name, x.size) for slot, x in enumerate(batched) if not x.written]
        soon = {f"g{x}" for x in self._read(self.stages[0])} if self.stages else set()

        def print_prefetch(names: set[str], slice_: str) -> None:
            wanted = [x for x in reads if x[1] in names]
            if ask and wanted:
                text("if (thread == 0) {")
                for slot, name, size in wanted:
                    text(f"  prefetch<{slot}, {size}>({name}_, batch, {slice_});")
                text("}")

        here, ahead = "jaxmagma::slice<kElements>(", ", run.end)"
        names = {name for _, name, _ in reads}
        if not self.loops:
            text(f"const auto slice = {here}run.first{ahead};")
            print_prefetch(names - soon, "slice")
            return
        print_prefetch(names - soon, f"{here}run.first{ahead}")
        text("for (long long first = run.first; first < run.end; first += kElements) {")
        text.indent += 1
        text(f"const auto slice = {here}first{ahead};")
        print_prefetch(names, f"{here}first + kElements{ahead}")

    def _print_stages(self, text: "_Text") -> None:
        reads: set[int] = set()
        writes: set[int] = set()
        for position, stage in enumerate(self.stages):
            text("")
            now_read = {x for x in self._read(stage) if self._from_shared(x, position)}
            now_written = {
                x for x in self._made(stage) if x in self.in_shared and self.maker[x] == position
            }
            if self._clash(now_read, writes) or self._clash(now_written, reads | writes):
                text("sync<kThreads>();")
                reads, writes = set(), set()
            reads |= now_read
            writes |= now_written
            if isinstance(stage, Sweep):
                self._print_sweep(text, stage, position)
            else:
                self._print_gemm(text, stage, position)
        if not self.summed:
            if self.slices > 1 and self.shared_values:
                text("sync<kThreads>();")
            return
        text("")
        sums = {self.plan.results[out] for out in self.summed}
        if self._clash(sums & self.in_shared, writes):
            text("sync<kThreads>();")
        for out in self.summed:
            tile = self.plan.results[out]
            text(f"reduce(sum{out}, thread, slice, {self._pointer(tile, len(self.stages))});")
        if self.shared_values:
            text("sync<kThreads>();")

    def _clash(self, some: set[int], others: set[int]) -> bool:
        """Whether tiles overlap in shared memory."""

        def where(tile: int) -> tuple[int, int]:
            begin = self.offsets[tile]
            return begin, begin + self.layouts[tile].element * self.elements

        return any(
            where(x)[0] < where(y)[1] and where(y)[0] < where(x)[1] for x in some for y in others
        )

    def _from_shared(self, tile: int, position: int) -> bool:
        return tile in self.in_shared and self.maker[tile] < position

    def _uses(self) -> int:
        """How often a matrix in the constant bank is used."""
        modes = [as_mode(self.plan, step) for step in self.plan.steps]
        return sum(mode is not None and mode.matrix in self.bank for mode in modes)

    def _matrix(self, tile: int) -> str:
        """Where a matrix is, for one more use of it."""
        if tile in self.bank:
            self.uses += 1
            return f"bank.m{tile} + bank.zero[{self.uses - 1}]"
        return f"table.t{tile}" if self._is_constant(tile) else f"g{tile}_"

    def _pointer(self, tile: int, position: int) -> str:
        """A function of the element, for a tile that `position` reads."""
        if self._from_shared(tile, position):
            return f"s{tile}"
        if self._is_constant(tile):
            return f"t{tile}"
        return f"g{tile}"

    def _read_place(self, tile: int, position: int) -> tuple[str, tuple[int, ...]]:
        """Where a tile is read from, for element e, and the strides of its axes."""
        pointer = self._pointer(tile, position)
        if self._from_shared(tile, position):
            return self._element(pointer), self.layouts[tile].strides
        return self._element(pointer), banks.row_major(self.plan.tiles[tile].shape).strides

    def _element(self, pointer: str, slice_: str = "") -> str:
        """The tile of the thread's element, or the tiles of its elements."""
        if self.pack > 1:
            return f"each<kPack, kElements>({pointer}, e{slice_})"
        return f"{pointer}(e)"

    def _shape(self, tile: int) -> str:
        return _shape(self.plan.tiles[tile].shape)

    def _print_sweep(self, text: "_Text", sweep: Sweep, position: int) -> None:
        extents = "".join(f", {sweep.extents[x]}" for x in sweep.lines)
        names = "".join(f", int {x}" for x in sweep.lines)
        elements = "kElements / kPack" if self.pack > 1 else "kElements"
        text(
            f"lines<kThreads, {elements}{extents}>(thread, [&](int e{names}) {{",
            _shape((self.elements // self.pack, *(sweep.extents[x] for x in sweep.lines))),
        )
        text.indent += 1
        loaded: dict[Value, str] = {}
        names_used: dict[str, int] = {}

        def register(value: Value) -> str:
            """The name of a fibre, loaded if it is not there yet."""
            if value in loaded:
                return loaded[value]
            name = value.name
            names_used[name] = names_used.get(name, 0) + 1
            if names_used[name] > 1:
                name += LETTERS[names_used[name] - 1]
            loaded[value] = name
            place, strides = self._read_place(value.tile, position)
            step = f", {self._step(value, strides)}" if value.length > 1 else ""
            text(
                f"const auto {name} = load<{value.length}{step}>"
                f"({place}{self._at(sweep, value, strides)});",
                _shape((value.length,)),
            )
            return name

        for move in sweep.moves:
            operands = [register(x) for x in move.operands]
            name = move.result.name
            if move.step is not None:
                names_used[name] = 1
                loaded[move.result] = name
                text(
                    f"const auto {name} = {self._expression(move, operands)};",
                    _shape((move.result.length,)),
                )
            else:
                name = operands[0]
            self._print_stores(text, sweep, move.result, name, position)
        text.indent -= 1
        text("});")

    def _print_stores(
        self, text: "_Text", sweep: Sweep, value: Value, name: str, position: int
    ) -> None:
        tile = value.tile
        if tile in self.in_shared and self.maker[tile] == position:
            strides = self.layouts[tile].strides
            step = f"<{self._step(value, strides)}>" if value.length > 1 else ""
            place = self._element(f"s{tile}") + self._at(sweep, value, strides)
            text(
                f"store{step}({place}, {name});",
                _shape((value.length,)),
            )
        if tile < self.inputs and tile in self.staged and self.maker[tile] != position:
            return
        for out in self.stored:
            if self.plan.results[out] == tile and self._stores_output(tile, position):
                strides = banks.row_major(self.plan.tiles[tile].shape).strides
                step = f"<{self._step(value, strides)}>" if value.length > 1 else ""
                guard = "if (slice.has(e)) " if self.pack == 1 else ""
                text(
                    f"{guard}store{step}({self._element(f'out{out}', ', slice')}"
                    f"{self._at(sweep, value, strides)}, {name});",
                    _shape((value.length,)),
                )

    def _stores_output(self, tile: int, position: int) -> bool:
        return next(n for n, s in enumerate(self.stages) if tile in self._made(s)) == position

    def _step(self, value: Value, strides: tuple[int, ...]) -> int:
        """The stride along a fibre."""
        return strides[value.labels.index(ALONG)] if ALONG in value.labels else 0

    def _at(self, sweep: Sweep, value: Value, strides: tuple[int, ...]) -> str:
        return _sum(
            (x, strides[value.labels.index(x)], sweep.extents[x])
            for x in sweep.lines
            if x in value.labels
        )

    def _expression(self, move: Move, operands: list[str]) -> str:
        step = move.step
        if move.matrix is not None:
            strides = banks.row_major(self.plan.tiles[move.matrix.tile].shape).strides
            row = 0 if move.matrix.row is None else strides[move.matrix.row]
            column = 0 if move.matrix.column is None else strides[move.matrix.column]
            sizes = f"{move.result.length}, {move.operands[0].length}, {row}, {column}"
            return f"gemm<{sizes}>({self._matrix(move.matrix.tile)}, {operands[0]})"
        if isinstance(step, Pointwise):
            return f"map({MAPS[step.function]}, {', '.join(operands)})"
        if isinstance(step, Product):
            return f"map(Multiply(), {', '.join(operands)})"
        assert isinstance(step, Rearrange)
        if ALONG in move.operands[0].labels and ALONG not in move.result.labels:
            return f"reduce({operands[0]})"
        return operands[0]

    def _print_gemm(self, text: "_Text", stage: Gemm, position: int) -> None:
        step = stage.step
        extents = step.extents
        blocking = _blocking(step, self.dtype.itemsize)
        names = _spare_names(extents)
        counts = "".join(f", {n}" for _, n in blocking.lines)
        arguments = "".join(f", int {names[x]}" for x, _ in blocking.lines)
        text(
            f"lines<kThreads, kElements{counts}>(thread, [&](int e{arguments}) {{",
            _shape((self.elements, *(n for _, n in blocking.lines))),
        )
        text.indent += 1
        r = f"r{stage.number}"
        shape = _shape((blocking.rows, blocking.columns))
        text(f"Block<{self.type}, {blocking.rows}, {blocking.columns}> {r};", shape)
        text(f"zero({r});")
        output = step.output_labels
        summed = [x for x in extents if x not in output]
        for number, label in enumerate(summed):
            if number == len(summed) - 1:
                text(f"#pragma unroll {min(4, extents[label])}", flush=True)
            name = names[label]
            text(f"for (int {name} = 0; {name} < {extents[label]}; ++{name}) {{")
            text.indent += 1

        def piece(tile: int, labels: str, label: str, length: int) -> str:
            place, strides = self._read_place(tile, position)
            by_label = dict(zip(labels, strides, strict=True))
            at = _sum((names[x], s, extents[x]) for x, s in by_label.items() if x != label)
            if not label:
                return f"load<1>({place}{at})"
            return (
                f"load_piece<{extents[label]}, {length}, {by_label[label]}>"
                f"({place}{at}, {names[label]})"
            )

        if isinstance(step, Rearrange):
            one = f"Fibre<{self.type}, 1>{{{{{self.type}{{1}}}}}}"
            text(f"gemm({r}, {piece(step.operand, step.labels, '', 1)}, {one});", shape)
        else:
            left = piece(step.left, step.left_labels, blocking.row, blocking.rows)
            right = piece(step.right, step.right_labels, blocking.column, blocking.columns)
            text(f"gemm({r}, {left}, {right});", shape)
        for _ in summed:
            text.indent -= 1
            text("}")
        row, column = blocking.row, blocking.column

        def put(place: str, strides: tuple[int, ...], guard: str) -> None:
            by_label = dict(zip(output, strides, strict=True))
            at = _sum((names[x], by_label[x], extents[x]) for x in output if x not in (row, column))
            template = ", ".join(
                str(x)
                for x in (
                    extents.get(row, 1),
                    extents.get(column, 1),
                    by_label.get(row, 0),
                    by_label.get(column, 0),
                )
            )
            where = f"{names.get(row, '0')}, {names.get(column, '0')}"
            text(f"{guard}store<{template}>({place}{at}, {r}, {where});", shape)

        if stage.number in self.in_shared:
            put(f"s{stage.number}(e)", self.layouts[stage.number].strides, "")
        for out in self.stored:
            if self.plan.results[out] == stage.number:
                strides = banks.row_major(self.plan.tiles[stage.number].shape).strides
                put(f"out{out}(e)", strides, "if (slice.has(e)) ")
        text.indent -= 1
        text("});")

    # ---- The call --------------------------------------------------------------------------------

    def _description(self) -> str:
        sweeps = sum(isinstance(stage, Sweep) for stage in self.stages)
        stages = [f"{sweeps} sweeps"] if sweeps else []
        if sweeps < len(self.stages):
            stages.append(f"{len(self.stages) - sweeps} gemms")
        return (
            f"{' and '.join(stages) or 'a sum'}, {self.elements * self.groups} elements on "
            f"{self.threads * self.groups} threads, {self._shared_bytes()} bytes of shared memory"
        )

    def _group(self) -> str:
        return "a group of threads" if self.groups > 1 else "a block"

    def _steps(self) -> list[str]:
        lines = []
        for number, step in self.plan.numbered_steps():
            shape = "x".join(str(x) for x in step.shape) or "scalar"
            if isinstance(step, Product):
                over = f"sum_{step.contracted} " if step.contracted else ""
                lines.append(
                    f"%{number}[{step.output_labels}] = {over}%{step.left}[{step.left_labels}] "
                    f"%{step.right}[{step.right_labels}]  ({shape})"
                )
            elif isinstance(step, Rearrange):
                lines.append(
                    f"%{number}[{step.output_labels}] = %{step.operand}[{step.labels}]  ({shape})"
                )
            else:
                operands = ", ".join(f"%{x}" for x in step.operands)
                lines.append(f"%{number} = {step.function}({operands})  ({shape})")
        return lines

    def _element_order(self) -> tuple[tuple[int, ...], int]:
        """Batch axes in the order in which elements are numbered, and how many of them are kept."""
        kept = self.program.outputs[self.summed[0]].batch if self.summed else ()
        batched = [n for n in range(self.inputs) if self.plan.tiles[n].batched]
        largest = max(
            batched, key=lambda n: (len(self.program.inputs[n].batch), self.plan.tiles[n].size)
        )
        order = [*kept]
        order += [x for x in self.program.inputs[largest].batch if x not in order]
        order += [x for x in range(self.program.batch_rank) if x not in order]
        return tuple(order), len(kept)

    def _chunks(self, extents: tuple[int, ...]) -> tuple[int, int]:
        order, kept = self._element_order()
        outer = math.prod(extents[x] for x in order[:kept])
        inner = math.prod(extents[x] for x in order[kept:])
        slices = -(-inner // self.elements)
        return outer, max(1, min(slices, SUM_BLOCKS // max(1, outer)))

    def _workspace(self, extents: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        outer, chunks = self._chunks(extents)
        sizes = [self.plan.tiles[self.plan.results[out]].size for out in self.summed]
        return tuple(((outer, chunks, size), self.dtype) for size in sizes)

    def _attributes(self, source: str) -> dict[str, object]:
        order, kept = self._element_order()
        arguments: dict[int, int] = {}
        for tile, operand in enumerate(self.program.inputs):
            if operand.constant is None:
                arguments[tile] = len(arguments)
        copies: list[int] = []  # argument, offset in the bank, bytes
        itemsize = self.dtype.itemsize
        offset = 0
        for tile in self.bank:
            size = self.plan.tiles[tile].size * itemsize
            if tile in arguments:
                copies += [arguments[tile], offset, size]
            offset += size
        pointers: list[int] = []  # buffer, number of batch axes, the axes
        for x in self._pointers():
            pointers += [x.buffer, len(x.axes), *x.axes]
        sums: list[int] = []  # result, workspace, values of a tile
        first = len(arguments)
        for number, out in enumerate(self.summed):
            size = self.plan.tiles[self.plan.results[out]].size
            sums += [first + out, first + len(self.program.outputs) + number, size]
        return {
            "name": "jaxmagma_" + hashlib.sha256(source.encode()).hexdigest()[:8],
            "source": source,
            "threads": self.threads * self.groups,
            "elements": self.elements * self.groups * self.slices,
            "shared_bytes": self._shared_bytes(),
            "order": _integers([kept, *order]),
            "pointers": _integers(pointers),
            "copies": _integers(copies),
            "sums": _integers(sums),
            "bank": self._values(self.bank, 4 * self._uses()),
            "table": self._values(self._tables()),
        }

    def _values(self, tiles: list[int], zeros: int = 0) -> np.ndarray:
        """The bytes of constants one after the other, zeros where unknown, and more zeros."""
        data = b"\0"  # an attribute may not be empty
        for tile in tiles:
            constant = self.program.inputs[tile].constant
            size = self.plan.tiles[tile].size * self.dtype.itemsize
            data += constant.array.tobytes() if constant else bytes(size)
        return np.frombuffer(data + bytes(zeros), np.uint8)


LETTERS = "abcdfghijklmnopqrstuvwxyz"


class _Text:
    """Lines of source; the comments at their ends are the shapes of what they move."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 0

    def __call__(self, line: str, comment: str = "", flush: bool = False) -> None:
        line = ("" if flush or not line else "  " * self.indent) + line
        self.lines.append(f"{line}  // {comment}" if comment else line)

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def _sum(terms: Iterable[tuple[str, int, int]]) -> str:
    """`` + 4 * i + j``: labels times strides; those of extent 1 are left out."""
    text = ""
    for label, stride, extent in terms:
        if extent > 1:
            text += f" + {label}" if stride == 1 else f" + {stride} * {label}"
    return text


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(str(x) for x in shape)})"


def _spare_names(extents: dict[str, int]) -> dict[str, str]:
    """Names of loop variables: labels themselves, but for `e`, which is the element."""
    spare = next(x for x in reversed(LETTERS) if x not in extents)
    return {x: spare if x == "e" else x for x in extents}


def _integers(values: list[int]) -> np.ndarray:
    """Preceded by their number, since an attribute may not be empty."""
    return np.array([len(values), *values], np.int64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
