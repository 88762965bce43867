"""The CUDA source of a kernel, written to be read.

Names in the source: ``g7`` is tile 7 of the plan in global memory, ``s7`` in shared memory, ``r7``
in registers, ``bank.m7`` in the constant bank; ``out0`` is output 0.  The comment at the end of a
line is the shape of what it moves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxmagma.lowering import banks
from jaxmagma.lowering.blocks import Block, blocking_of
from jaxmagma.lowering.sweeps import ALONG, Gemm, Move, Sweep, Value
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange


# The device function of each pointwise function of a program.
MAPS = {"add": "Add()"}

# Why the constant bank ends in zeros.
UNKNOWN_ZEROS = "added to each use: else values would stay in registers from one to the next"


@dataclass(frozen=True)
class Pointer:
    """A parameter of the kernel: an array of the call with its batch axes and tile size."""

    name: str
    buffer: int
    axes: tuple[int, ...]
    size: int
    written: bool


class Source:
    """Prints the kernel of a ``Block``."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.type = block.type
        self.matrices = 0  # uses of the constant bank so far
        self.pointers = self._pointers()
        self.text = self._source()

    def _pointers(self) -> list[Pointer]:
        parameters: list[Pointer] = []
        arguments = 0
        read = {v.tile for s in self.block.stages if isinstance(s, Sweep) for v in s.loads}
        read |= {x for s in self.block.stages if isinstance(s, Gemm) for x in s.step.operands}
        read |= {self.block.plan.results[out] for out in self.block.summed}
        read |= {
            m.matrix.tile
            for s in self.block.stages
            if isinstance(s, Sweep)
            for m in s.moves
            if m.matrix is not None and m.matrix.tile not in self.block.bank
        }
        for tile, operand in enumerate(self.block.program.inputs):
            if operand.constant is None:
                if tile in read:
                    size = self.block.plan.tiles[tile].size
                    parameters.append(Pointer(f"g{tile}", arguments, operand.batch, size, False))
                arguments += 1
        sums = 0
        for number, out in enumerate(self.block.program.outputs):
            size = self.block.plan.tiles[self.block.plan.results[number]].size
            if number in self.block.summed:
                buffer = arguments + len(self.block.program.outputs) + sums
                parameters.append(Pointer(f"partial{number}", buffer, (), size, True))
                sums += 1
            else:
                parameters.append(
                    Pointer(f"out{number}", arguments + number, out.batch, size, True)
                )
        return parameters

    def _source(self) -> str:
        pointers = self.pointers
        text = _Text()
        for line in _steps(self.block.plan):
            text(f"// {line}")
        text("//")
        text(f"// {self.block.describe()}")
        text('#include "kernel.cuh"')
        text("")
        text("using namespace jaxmagma;")
        text("")
        text(f"constexpr int kThreads = {self.block.threads};")
        text(f"constexpr int kElements = {self.block.elements};  // of {self._group()}")
        if self.block.pack > 1:
            text(f"constexpr int kPack = {self.block.pack};  // of them in one thread")
        if self.block.groups > 1:
            text(f"constexpr int kGroups = {self.block.groups};  // in a block")
        if self.block.slices > 1:
            text(f"constexpr int kSlices = {self.block.slices};  // of so many elements, in turn")
        text("")
        for name, tiles, space in (
            ("bank", self.block.bank, "__constant__"),
            ("table", self.block.tables(), "__device__"),
        ):
            if tiles:
                text(f"struct {name.capitalize()} {{")
                for tile in tiles:
                    size = self.block.plan.tiles[tile].size
                    member = f"m{tile}" if name == "bank" else f"t{tile}"
                    text(f"  {self.type} {member}[{size}];", self._shape(tile))
                if name == "bank":
                    text(f"  int zero[{self.block.uses()}];", UNKNOWN_ZEROS)
                text("};")
                text(f'extern "C" {{ {space} {name.capitalize()} {name}; }}')
                text("")
        rank = self.block.program.batch_rank
        batched = [x for x in pointers if x.axes]
        batch = f"Batch<{rank}, {len(batched)}>" if rank > 1 else f"Batch<1, {len(batched)}>"
        bounds = "kThreads * kGroups" if self.block.groups > 1 else "kThreads"
        if self.block.min_blocks:
            bounds += f", {self.block.min_blocks}"
        arguments = [f"const {batch} batch"]
        for x in pointers:
            constant = "" if x.written else "const "
            arguments.append(f"{constant}{self.type}* __restrict__ {x.name}_")
        text(f'extern "C" __global__ void __launch_bounds__({bounds})')
        text(f"kernel({(',' + chr(10) + ' ' * 7).join(arguments)}) {{")
        text.indent += 1
        if self.block.shared_values:
            text("extern __shared__ __align__(16) unsigned char memory[];")
        if self.block.groups > 1:
            text("const int thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;")
        else:
            text("const int thread = threadIdx.x;")
        if self.block.shared_values:
            own = f" + {self.block.shared_values} * group" if self.block.groups > 1 else ""
            text(f"{self.type}* const shared = reinterpret_cast<{self.type}*>(memory){own};")
        for out in self.block.summed:
            size = self.block.plan.tiles[self.block.plan.results[out]].size
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
        for tile in self.block.tables():
            text(f"const auto t{tile} = [&](int) {{ return table.t{tile}; }};")
        for tile, offset in self.block.offsets.items():
            size = self.block.layouts[tile].element
            text(
                f"const auto s{tile} = [&](int e) {{ return shared + {offset} + {size} * e; }};",
                self._shape(tile),
            )
        self._print_stages(text)
        if self.block.loops:
            text.indent -= 1
            text("}")
        if self.block.summed:
            for out in self.block.summed:
                size = self.block.plan.tiles[self.block.plan.results[out]].size
                text(
                    f"store(partial{out}_ + blockIdx.x * static_cast<long long>({size}), "
                    f"sum{out}, thread);"
                )
        text.indent -= 1
        text("}")
        if self.block.summed:
            text("")
            text('extern "C" __global__ void __launch_bounds__(128)')
            text(f"finish(const {self.type}* partial, {self.type}* sum, long long values,")
            text("       long long chunks, long long size) {")
            text("  total(partial, sum, values, chunks, size);")
            text("}")
        return text.source

    def _print_elements(self, text: "_Text", batched: list[Pointer]) -> None:
        """Which elements the group works on; opens the loop over slices, if there is one."""
        group = "blockIdx.x * kGroups + group" if self.block.groups > 1 else "blockIdx.x"
        if self.block.summed:
            text("const auto run = share<kElements>(batch, blockIdx.x);")
        elif self.block.slices > 1:
            text(f"const auto run = jaxmagma::run<kElements * kSlices>(batch, {group});")
        else:
            text(f"const auto run = jaxmagma::run<kElements>(batch, {group});")

        ask = self.block.parameters.prefetch and bool(self.block.stages)
        reads = [(slot, x.name, x.size) for slot, x in enumerate(batched) if not x.written]
        soon = (
            {f"g{x}" for x in self.block.read(self.block.stages[0])} if self.block.stages else set()
        )

        def print_prefetch(names: set[str], slice_: str) -> None:
            wanted = [x for x in reads if x[1] in names]
            if ask and wanted:
                text("if (thread == 0) {")
                for slot, name, size in wanted:
                    text(f"  prefetch<{slot}, {size}>({name}_, batch, {slice_});")
                text("}")

        here, ahead = "jaxmagma::slice<kElements>(", ", run.end)"
        names = {name for _, name, _ in reads}
        if not self.block.loops:
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
        for position, stage in enumerate(self.block.stages):
            text("")
            now_read = {x for x in self.block.read(stage) if self.block.from_shared(x, position)}
            now_written = {
                x
                for x in self.block.made(stage)
                if x in self.block.in_shared and self.block.maker[x] == position
            }
            if self.block.overlap(now_read, writes) or self.block.overlap(
                now_written, reads | writes
            ):
                text("sync<kThreads>();")
                reads, writes = set(), set()
            reads |= now_read
            writes |= now_written
            if isinstance(stage, Sweep):
                self._print_sweep(text, stage, position)
            else:
                self._print_gemm(text, stage, position)
        if not self.block.summed:
            if self.block.slices > 1 and self.block.shared_values:
                text("sync<kThreads>();")
            return
        text("")
        sums = {self.block.plan.results[out] for out in self.block.summed}
        if self.block.overlap(sums & self.block.in_shared, writes):
            text("sync<kThreads>();")
        for out in self.block.summed:
            tile = self.block.plan.results[out]
            text(f"reduce(sum{out}, thread, slice, {self._pointer(tile, len(self.block.stages))});")
        if self.block.shared_values:
            text("sync<kThreads>();")

    def _matrix(self, tile: int) -> str:
        """Where a matrix is, for one more use of it."""
        if tile in self.block.bank:
            self.matrices += 1
            return f"bank.m{tile} + bank.zero[{self.matrices - 1}]"
        return f"table.t{tile}" if self.block.is_constant(tile) else f"g{tile}_"

    def _pointer(self, tile: int, position: int) -> str:
        """A function of the element, for a tile that `position` reads."""
        if self.block.from_shared(tile, position):
            return f"s{tile}"
        if self.block.is_constant(tile):
            return f"t{tile}"
        return f"g{tile}"

    def _read_place(self, tile: int, position: int) -> tuple[str, tuple[int, ...]]:
        """Where a tile is read from, for element e, and the strides of its axes."""
        pointer = self._pointer(tile, position)
        if self.block.from_shared(tile, position):
            return self._element(pointer), self.block.layouts[tile].strides
        return self._element(pointer), banks.row_major(self.block.plan.tiles[tile].shape).strides

    def _element(self, pointer: str, slice_: str = "") -> str:
        """The tile of the thread's element, or the tiles of its elements."""
        if self.block.pack > 1:
            return f"each<kPack, kElements>({pointer}, e{slice_})"
        return f"{pointer}(e)"

    def _shape(self, tile: int) -> str:
        return _shape(self.block.plan.tiles[tile].shape)

    def _print_sweep(self, text: "_Text", sweep: Sweep, position: int) -> None:
        extents = "".join(f", {sweep.extents[x]}" for x in sweep.lines)
        names = "".join(f", int {x}" for x in sweep.lines)
        elements = "kElements / kPack" if self.block.pack > 1 else "kElements"
        verb = "values" if sweep.single else "lines"
        text(
            f"{verb}<kThreads, {elements}{extents}>(thread, [&](int e{names}) {{",
            _shape(
                (self.block.elements // self.block.pack, *(sweep.extents[x] for x in sweep.lines))
            ),
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
        if tile in self.block.in_shared and self.block.maker[tile] == position:
            strides = self.block.layouts[tile].strides
            step = f"<{self._step(value, strides)}>" if value.length > 1 else ""
            place = self._element(f"s{tile}") + self._at(sweep, value, strides)
            text(
                f"store{step}({place}, {name});",
                _shape((value.length,)),
            )
        if (
            tile < self.block.inputs
            and tile in self.block.staged
            and self.block.maker[tile] != position
        ):
            return
        for out in self.block.stored:
            if self.block.plan.results[out] == tile and self._stores_output(tile, position):
                strides = banks.row_major(self.block.plan.tiles[tile].shape).strides
                step = f"<{self._step(value, strides)}>" if value.length > 1 else ""
                guard = "if (slice.has(e)) " if self.block.pack == 1 else ""
                text(
                    f"{guard}store{step}({self._element(f'out{out}', ', slice')}"
                    f"{self._at(sweep, value, strides)}, {name});",
                    _shape((value.length,)),
                )

    def _stores_output(self, tile: int, position: int) -> bool:
        return (
            next(n for n, s in enumerate(self.block.stages) if tile in self.block.made(s))
            == position
        )

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
            strides = banks.row_major(self.block.plan.tiles[move.matrix.tile].shape).strides
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
        blocking = blocking_of(step, self.block.dtype.itemsize)
        names = _spare_names(extents)
        counts = "".join(f", {n}" for _, n in blocking.lines)
        arguments = "".join(f", int {names[x]}" for x, _ in blocking.lines)
        text(
            f"lines<kThreads, kElements{counts}>(thread, [&](int e{arguments}) {{",
            _shape((self.block.elements, *(n for _, n in blocking.lines))),
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
                text(f"#pragma unroll {min(4, extents[label])}")
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
            left = piece(step.operand, step.labels, "", 1)
            right = f"Fibre<{self.type}, 1>{{{{{self.type}{{1}}}}}}"
        else:
            left = piece(step.left, step.left_labels, blocking.row, blocking.rows)
            right = piece(step.right, step.right_labels, blocking.column, blocking.columns)
        text(f"const auto left = {left};", _shape((blocking.rows,)))
        text(f"const auto right = {right};", _shape((blocking.columns,)))
        text(f"gemm({r}, left, right);", shape)
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

        if stage.number in self.block.in_shared:
            put(f"s{stage.number}(e)", self.block.layouts[stage.number].strides, "")
        for out in self.block.stored:
            if self.block.plan.results[out] == stage.number:
                strides = banks.row_major(self.block.plan.tiles[stage.number].shape).strides
                put(f"out{out}(e)", strides, "if (slice.has(e)) ")
        text.indent -= 1
        text("});")

    def _group(self) -> str:
        return "a group of threads" if self.block.groups > 1 else "a block"


LETTERS = "abcdfghijklmnopqrstuvwxyz"


class _Text:
    """Lines of source; the comments at their ends are the shapes of what they move."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 0

    def __call__(self, line: str, comment: str = "") -> None:
        line = "  " * self.indent + line if line else ""
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


def _steps(plan: Plan) -> list[str]:
    """The plan in mathematical notation, a line for each step."""
    lines = []
    for number, step in plan.numbered_steps():
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
