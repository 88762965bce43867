"""The CUDA source of a kernel, written to be read.

Names in the source: ``g7`` is tile 7 of the plan in global memory, ``s7`` in shared memory, ``r7``
in registers, ``bank.m7`` in the constant bank; ``out0`` is output 0.  The comment at the end of a
line is the shape of what it moves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda import banks
from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.functors import FUNCTORS
from jaxmagma.lowering.cuda.gemms import blocking_of
from jaxmagma.lowering.cuda.pieces import Pieces, pieces_of
from jaxmagma.lowering.cuda.sources import Origin, Strided
from jaxmagma.lowering.cuda.sweeps import (
    ALONG,
    Accumulation,
    Assembly,
    Gemm,
    Move,
    Sweep,
    Value,
    grouped,
    slots,
)
from jaxmagma.parity import Halves
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange


# Why the constant bank ends in zeros.
UNKNOWN_ZEROS = "added to each use: else values would stay in registers from one to the next"
# The same for matrices that are read anew for each slice of elements.
UNKNOWN_ZERO = "else matrices would stay in registers, where sums are"


@dataclass(frozen=True)
class Pointer:
    """A parameter of the kernel: an array of the call with its batch axes and tile size."""

    name: str
    buffer: int
    axes: tuple[int, ...]
    size: int
    written: bool
    type: str


@dataclass(frozen=True)
class Reading:
    """Where a stage reads a tile: a pointer to its first value, and the strides of its axes.

    A gathered tile has, beyond that of the index, the place of a component in the vector.
    """

    place: str
    strides: tuple[int, ...]
    vector: str = ""
    component: Strided | None = None
    components: int = 1


class Source:
    """Prints the kernel of a ``Block``."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.type = block.type
        self.brought = {n: x for n, x in block.brought.items() if n in block.uses.tiles}
        self.matrices = 0  # uses of the constant bank so far
        self.pointers = self._pointers()
        self.text = self._source()

    def _pointers(self) -> list[Pointer]:
        parameters: list[Pointer] = []
        arguments = 0
        read = {x for stage in self.block.stages for x in self.block.read(stage)}
        read |= {self.block.plan.results[out] for out in self.block.summed}
        sweeps = (x for x in self.block.stages if isinstance(x, Sweep))
        read |= {x for sweep in sweeps for x in self.block.outside_bank(sweep)}
        read |= {x.tile for x in self.block.pieces()}
        read |= {x for step in self.brought.values() for x in (step.vector, step.index)}
        for tile, operand in enumerate(self.block.program.inputs):
            if operand.constant is None:
                if tile in read:
                    size = self.block.plan.tiles[tile].size
                    type_ = "int" if operand.dtype.kind == "i" else self.type
                    parameters.append(
                        Pointer(f"g{tile}", arguments, operand.batch, size, False, type_)
                    )
                arguments += 1
        sums = 0
        for number, out in enumerate(self.block.program.outputs):
            size = self.block.plan.tiles[self.block.plan.results[number]].size
            if number in self.block.summed:
                buffer = arguments + len(self.block.program.outputs) + sums
                parameters.append(Pointer(f"partial{number}", buffer, (), size, True, self.type))
                sums += 1
            else:
                parameters.append(
                    Pointer(f"out{number}", arguments + number, out.batch, size, True, self.type)
                )
        return parameters

    def _source(self) -> str:
        pointers, plan = self.pointers, self.block.plan
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
        if self.block.groups > 1:
            text(f"constexpr int kGroups = {self.block.groups};  // in a block")
        if self.block.slices > 1:
            text(f"constexpr int kSlices = {self.block.slices};  // of so many elements, in turn")
        text("")
        arranged = [x for x in self.block.pieces() if self.block.is_constant(x.tile)]
        for name, tiles, space in (
            ("bank", self.block.bank, "__constant__"),
            ("table", self.block.tables(), "__device__"),
        ):
            if tiles or (name == "table" and arranged):
                text(f"struct {name.capitalize()} {{")
                for tile in tiles:
                    member, size, shape = f"t{tile}", plan.tiles[tile].size, self._shape(tile)
                    if name == "bank":
                        member, size = f"m{tile}", self.block.bank_size(tile)
                        shape += " in even and odd halves" if tile in self.block.halves else ""
                    text(f"  {self.type} {member}[{size}];", shape)
                if name == "bank":
                    text(f"  int zero[{self.block.bank_uses()}];", UNKNOWN_ZEROS)
                else:
                    for matrix in arranged:
                        columns, rows = matrix.counts
                        shape = f"({matrix.rows}, {matrix.columns}) in pieces"
                        text(f"  {self.type} {matrix.name}[{columns} * {rows} * 32];", shape)
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
            arguments.append(f"{constant}{x.type}* __restrict__ {x.name}_")
        text(f'extern "C" __global__ void __launch_bounds__({bounds})')
        text(f"kernel({(',' + chr(10) + ' ' * 7).join(arguments)}) {{")
        text.indent += 1
        if self.block.shared.values:
            text("extern __shared__ __align__(16) unsigned char memory[];")
        if self.block.groups > 1:
            text("const int thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;")
        else:
            text("const int thread = threadIdx.x;")
        if self.block.shared.values:
            own = f" + {self.block.shared.values} * group" if self.block.groups > 1 else ""
            text(f"{self.type}* const shared = reinterpret_cast<{self.type}*>(memory){own};")
        if self.block.fetched:
            count = len(self.block.fetched)
            groups, own = ("[kGroups]", "[group]") if self.block.groups > 1 else ("", "")
            text(f"__shared__ Arrival arrivals{groups}[{count}];")
            text(f"Arrival* const arrived = arrivals{own};")
            text(f"prepare<kThreads, kElements>(thread, arrived, {count});")
            if self.block.loops:
                text("unsigned phase = 0;")
        for out in self.block.summed:
            result = self.block.plan.tiles[self.block.plan.results[out]]
            if out in self.block.accumulated:
                rows, columns = result.shape
                sizes = f"{rows}, {columns}, {self.block.split}"
                text(f"ProductSum<{self.type}, {sizes}> sum{out};", _shape(result.shape))
                continue
            text(f"Sum<{self.type}, {result.size}, kThreads> sum{out};")
            text(f"zero(sum{out}.value);")
        if self.block.holds:
            self._print_matrices(text, self.block.pieces())
        self._print_elements(text, batched)
        for x in pointers:
            if not x.name.startswith("partial"):
                self._print_pointer(text, x)
        read = {x for stage in self.block.stages for x in self.block.read(stage)}
        read |= {self.block.plan.results[out] for out in self.block.summed}
        for tile in sorted(read.intersection(self.block.tables())):
            text(f"const auto t{tile} = [&](int) {{ return table.t{tile}; }};")
        for tile in self.block.shared.offsets:
            self._print_place(text, tile)
        if not self.block.ahead:
            for tile in self.block.fetched:
                self._print_fetch(text, tile)
        self._print_stages(text)
        if self.block.loops:
            text.indent -= 1
            text("}")
        if self.block.summed:
            for out in self.block.summed:
                size = self.block.plan.tiles[self.block.plan.results[out]].size
                own = f"partial{out}_ + blockIdx.x * static_cast<long long>({size})"
                if out in self.block.accumulated:
                    text(f"store<kThreads>({own}, sum{out}, shared, thread);")
                else:
                    text(f"store({own}, sum{out}, thread);")
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
        elif self.block.strides:
            groups = "gridDim.x"
            if self.block.groups > 1:
                group, groups = f"({group})", "kGroups * gridDim.x"
            text(f"const Run run = {{static_cast<long long>(kElements) * {group}, batch.inner}};")
            text(f"const long long step = static_cast<long long>(kElements) * {groups};")
        elif self.block.slices > 1:
            text(f"const auto run = jaxmagma::run<kElements * kSlices>(batch, {group});")
        else:
            text(f"const auto run = jaxmagma::run<kElements>(batch, {group});")

        # A warp that works alone reads soon what it would ask for now.
        waits = not self.block.alone or bool(self.block.accumulations)
        ask = self.block.parameters.prefetch and bool(self.block.stages) and waits
        fetched = {f"g{x}" for x in self.block.fetched}
        vectors = {f"g{x}" for x in self.block.gathered}
        if not self.block.accumulations:
            vectors |= fetched
        reads = [
            (slot, x.name, x.size)
            for slot, x in enumerate(batched)
            if not x.written and x.name not in vectors
        ]
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

        soon |= fetched
        here, ahead = "jaxmagma::slice<kElements>(", ", run.end)"
        names = {name for _, name, _ in reads}
        if not self.block.loops:
            text(f"const auto slice = {here}run.first{ahead};")
            print_prefetch(names - soon, "slice")
            return
        # Indices are read for the slice after each, so they are asked for one earlier.
        indices = {f"g{step.index}" for step in self.brought.values()}
        print_prefetch(names - soon - indices, f"{here}run.first{ahead}")
        print_prefetch(indices, f"{here}run.first + {self._step_on}{ahead}")
        if self.block.ahead and self.block.fetched:
            self._print_fetches(text, self.block.fetched, "run.first")
        if self.brought:
            text("{")
            text.indent += 1
            text(f"const auto next = {here}run.first{ahead};")
            self._print_places(text)
            self._print_gathers(text, self.brought)
            text.indent -= 1
            text("}")
        text(f"for (long long first = run.first; first < run.end; first += {self._step_on}) {{")
        text.indent += 1
        if self._reread:
            text("const int again = static_cast<int>(first >> 62);", f"zero: {UNKNOWN_ZERO}")
        text(f"const auto slice = {here}first{ahead};")
        later = fetched if self.block.ahead else set()
        print_prefetch(names - later - indices, f"{here}first + {self._step_on}{ahead}")
        if self.brought:
            text(f"const auto next = {here}first + {self._step_on}{ahead};")
            print_prefetch(indices, f"{here}first + 2 * {self._step_on}{ahead}")
            self._print_places(text)
            text("await_copies<kThreads>();")

    @property
    def _step_on(self) -> str:
        """How far the loop over slices goes on."""
        return "step" if self.block.strides else "kElements"

    def _print_pointer(self, text: "_Text", x: Pointer) -> None:
        """Where the tiles of an array are in global memory."""
        text(f"const auto {x.name} = {self._tiles(x, 'slice')};")

    def _tiles(self, x: Pointer, slice_: str) -> str:
        """A function of the element: where the tile of an array is in global memory."""
        if not x.axes:
            return f"[&](int) {{ return {x.name}_; }}"
        slot = [y for y in self.pointers if y.axes].index(x)
        return (
            f"[&](int e) {{ return {x.name}_ + "
            f"batch.offset<{slot}, {x.size}>({slice_}.element(e)); }}"
        )

    def _print_place(self, text: "_Text", tile: int) -> None:
        """Where a tile is in shared memory."""
        text(f"const auto s{tile} = {self._place(tile)};", self._shape(tile))

    def _place(self, tile: int) -> str:
        """The same, in shared memory."""
        size = self.block.shared.layouts[tile].element
        place = f"shared + {self.block.shared.offsets[tile]} + {size} * e"
        if tile in self.block.fetched:
            place = f"fetched({place}, g{tile}(e))"
        return f"[&](int e) {{ return {place}; }}"

    def _print_places(self, text: "_Text") -> None:
        """Reads where gathered tiles of the next elements are in their vectors."""
        for tile, step in self.brought.items():
            size = self.block.plan.tiles[step.index].size
            index = self._tiles(self._parameter(step.index), "next")
            text(f"const auto places{tile} = places<kThreads, kElements, {size}>(thread, {index});")

    def _print_gathers(self, text: "_Text", tiles: Iterable[int]) -> None:
        """Brings gathered tiles of the next elements."""
        for tile in tiles:
            step = self.brought[tile]
            components = self.block.plan.tiles[tile].size // self.block.plan.tiles[step.index].size
            vector = self._tiles(self._parameter(step.vector), "next")
            text(f"gather<{components}>(thread, {self._place(tile)}, {vector}, places{tile});")

    def _parameter(self, tile: int) -> Pointer:
        return next(x for x in self.pointers if x.name == f"g{tile}")

    def _print_fetch(self, text: "_Text", tile: int) -> None:
        number, size = self.block.fetched.index(tile), self.block.plan.tiles[tile].size
        text(f"fetch<kThreads, kElements, {size}>(thread, arrived[{number}], s{tile}, g{tile});")

    def _print_fetches(self, text: "_Text", tiles: Iterable[int], first: str) -> None:
        """Brings operands of the elements from ``first`` on, if there are any."""
        text(f"if ({first} < run.end) {{")
        text.indent += 1
        text(f"const auto slice = jaxmagma::slice<kElements>({first}, run.end);")
        for tile in tiles:
            self._print_pointer(text, self._parameter(tile))
            self._print_place(text, tile)
            self._print_fetch(text, tile)
        text.indent -= 1
        text("}")

    def _print_stages(self, text: "_Text") -> None:
        reads: set[int] = set()
        writes: set[int] = set()
        waiting = [*self.block.fetched, *self.brought] if self.block.ahead else []

        def print_barrier(position: int) -> None:
            """What has been read by then may be replaced by what comes next."""
            text("sync<kThreads>();")
            gone = [x for x in waiting if max(self.block.uses.readers[x]) < position]
            fetched = [x for x in gone if x not in self.brought]
            if fetched:
                self._print_fetches(text, fetched, f"first + {self._step_on}")
            self._print_gathers(text, [x for x in gone if x in self.brought])
            waiting[:] = [x for x in waiting if x not in gone]

        for position, stage in enumerate(self.block.stages):
            text("")
            now_read = {
                x for x in self.block.read(stage) if self.block.uses.from_shared(x, position)
            }
            now_written = {
                x for x in self.block.made(stage) if self.block.uses.to_shared(x, position)
            }
            own = isinstance(stage, Sweep) and stage.lanes > 1 and not self.block.holds
            if own:
                # Matrices come while others are still at work on what the stage reads.
                assert isinstance(stage, Sweep)
                text("{")
                text.indent += 1
                pieces = [self.block.pieces_of(stage, x) for x in stage.moves if x.matrix]
                self._print_matrices(text, dict.fromkeys(x for found in pieces for x in found))
            if self.block.shared.overlap(now_read, writes) or self.block.shared.overlap(
                now_written, reads | writes
            ):
                print_barrier(position)
                reads, writes = set(), set()
            reads |= now_read
            writes |= now_written
            for number, tile in enumerate(self.block.fetched):
                if min(self.block.uses.readers[tile]) == position:
                    phase = "phase" if self.block.loops else "0"
                    text(f"wait<kThreads>(arrived[{number}], {phase});")
            if isinstance(stage, Sweep):
                self._print_sweep(text, stage, position)
            elif isinstance(stage, Gemm):
                self._print_gemm(text, stage, position)
            elif isinstance(stage, Accumulation):
                self._print_accumulation(text, stage, position)
            else:
                self._print_assembly(text, stage, position)
            if own:
                text.indent -= 1
                text("}")
        if self.block.fetched and self.block.loops:
            text("phase ^= 1;")
        if not self.block.summed:
            awaited = bool(self.brought) and not waiting  # by a barrier, too
            if self.block.loops and self.block.shared.values and not awaited:
                print_barrier(len(self.block.stages))
            return
        text("")
        sums = {self.block.plan.results[out] for out in self.block.summed}
        if self.block.shared.overlap(sums & self.block.uses.tiles, writes):
            text("sync<kThreads>();")
        for out in self.block.summed:
            if out in self.block.accumulated:
                continue
            tile = self.block.plan.results[out]
            text(f"reduce(sum{out}, thread, slice, {self._pointer(tile, len(self.block.stages))});")
        if self.block.shared.offsets:
            print_barrier(len(self.block.stages) + 1)

    @property
    def _reread(self) -> str:
        """What is added to a matrix in a loop over elements, so that it is read each time."""
        return " + again" if self.block.accumulations else ""

    def _matrix(self, tile: int) -> str:
        """Where a matrix is, for one more use of it."""
        if tile in self.block.bank:
            self.matrices += 1
            return f"bank.m{tile} + bank.zero[{self.matrices - 1}]{self._reread}"
        place = f"table.t{tile}" if self.block.is_constant(tile) else f"g{tile}_"
        return place + self._reread

    def _pointer(self, tile: int, position: int) -> str:
        """A function of the element, for a tile that `position` reads."""
        if self.block.uses.from_shared(tile, position):
            return f"s{tile}"
        if self.block.is_constant(tile):
            return f"t{tile}"
        return f"g{tile}"

    def _reading(self, tile: int, position: int) -> Reading:
        """Where a tile is read from, for element e."""
        block = self.block
        at = Origin(tile) if block.uses.from_shared(tile, position) else block.origin(tile)
        if at.index is not None:
            assert at.view is not None
            index = self._element(self._pointer(at.index, position), position)
            return Reading(
                index + _offset(at.view.offset),
                at.view.strides,
                self._element(self._pointer(at.tile, position), position),
                at.component,
                at.components,
            )
        place = self._element(self._pointer(at.tile, position), position)
        if at.view is not None:
            return Reading(place + _offset(at.view.offset), at.view.strides)
        if block.uses.from_shared(tile, position):
            return Reading(place, block.shared.layouts[tile].strides)
        return Reading(place, banks.row_major(block.plan.tiles[tile].shape).strides)

    def _element(self, pointer: str, position: int, slice_: str = "") -> str:
        """The tile of the thread's element, or the tiles of those of its fibres."""
        return f"each({pointer}, e{slice_})" if self._packed(position) else f"{pointer}(e)"

    def _packed(self, position: int) -> bool:
        """Whether a stage's values come in packs, one for each fibre of a quad."""
        stage = self.block.stages[position]
        return isinstance(stage, Sweep) and stage.lanes > 1

    def _shape(self, tile: int) -> str:
        return _shape(self.block.plan.tiles[tile].shape)

    def _print_sweep(self, text: "_Text", sweep: Sweep, position: int) -> None:
        extents = "".join(f", {sweep.extents[x]}" for x in sweep.lines)
        names = ["e", *sweep.lines]
        verb = "values<kThreads" if sweep.light else "lines<kThreads"
        parameters = [f"int {x}" for x in names]
        if sweep.lanes > 1:
            fibres = self.block.fibres(sweep)
            verb = f"quads<kThreads, {fibres}"
            parameters = [f"const Pack<int, {fibres}>& {x}" for x in names]
            parameters.insert(0, f"const {self._owner(sweep)}& quad")
        text(
            f"{verb}, kElements{extents}>(thread, [&]({', '.join(parameters)}) {{",
            _shape((self.block.elements, *(sweep.extents[x] for x in sweep.lines))),
        )
        text.indent += 1
        printed = _Registers(sweep)
        groups = grouped(sweep.moves)
        for number, group in enumerate(groups):
            if group[0].pointwise:
                later = {x for g in groups[number + 1 :] for m in g for x in m.operands}
                self._print_points(text, sweep, group, later, printed, position)
                continue
            (move,) = group
            operands = [self._fibre(text, sweep, x, printed, position) for x in move.operands]
            name = operands[0]
            if move.step is not None:
                name = printed.fibre(move.result)
                text(
                    f"const auto {name} = {self._expression(sweep, move, operands)};",
                    _shape((move.result.length,)),
                )
            if self._replaces(move.result.tile, printed.loaded, position):
                text("sync<32>();", "who shares a fibre has read it")
                printed.loaded.clear()
            self._print_stores(text, sweep, move.result, name, position)
        text.indent -= 1
        text("});")

    def _replaces(self, tile: int, loaded: set[int], position: int) -> bool:
        """Whether a stage writes a tile where some were that it has loaded."""
        written = self.block.uses.to_shared(tile, position)
        return written and self.block.shared.overlap({tile}, loaded)

    def _owner(self, sweep: Sweep) -> str:
        """The type that says where a quad has the values of fibres."""
        name = "MirroredQuad" if self.block.is_mirrored(sweep) else "Quad"
        return f"{name}<{self.block.fibres(sweep)}>"

    def _print_matrices(self, text: "_Text", matrices: Iterable[Pieces]) -> None:
        """Matrices for tensor cores, in the registers of each warp."""
        for x in matrices:
            sizes, place = f"{x.rows}, {x.columns}", f"table.{x.name}"
            if not self.block.is_constant(x.tile):
                sizes, place = f"{sizes}, {x.row}, {x.column}", f"g{x.tile}_"
            if not self.block.holds:
                place += self._reread
            text(
                f"const auto {x.name} = load_matrix<{sizes}>({place}, thread);",
                _shape((x.rows, x.columns)),
            )

    def _fibre(
        self, text: "_Text", sweep: Sweep, value: Value, printed: "_Registers", position: int
    ) -> str:
        """The name of a fibre, loaded if it is not there yet."""
        if value in printed.fibres:
            return printed.fibres[value]
        if value in printed.values:
            return f"{self._fibre_type(sweep, 1)}{{{{{printed.values[value]}}}}}"
        name = printed.fibre(value)
        reading = self._reading(value.tile, position)
        place = reading.place + self._at(sweep, value, reading.strides)
        step = self._step(value, reading.strides)
        if reading.component is not None:
            component = reading.component
            own = self._step(value, component.strides)
            at = f"{component.offset}{self._at(sweep, value, component.strides)}"
            text(
                f"const auto {name} = load_gathered<{value.length}, {step}, {own}, "
                f"{reading.components}>({_quad(sweep)}{reading.vector}, {place}, {at});",
                _shape((value.length,)),
            )
            return name
        stride = f", {step}" if value.length > 1 or sweep.lanes > 1 else ""
        text(
            f"const auto {name} = load<{value.length}{stride}>({_quad(sweep)}{place});",
            _shape((value.length,)),
        )
        if sweep.lanes > 1 and self.block.uses.from_shared(value.tile, position):
            printed.loaded.add(value.tile)
        return name

    def _fibre_type(self, sweep: Sweep, length: int) -> str:
        if sweep.lanes > 1:
            owner = f", {self._owner(sweep)}" if self.block.is_mirrored(sweep) else ""
            return f"QuadFibre<{self.type}, {self.block.fibres(sweep)}, {length}{owner}>"
        return f"Fibre<{self.type}, {length}>"

    def _print_points(
        self,
        text: "_Text",
        sweep: Sweep,
        group: list[Move],
        later: set[Value],
        printed: "_Registers",
        position: int,
    ) -> None:
        """Pointwise operations, all of them at one point of the fibre after the other."""
        length = group[0].result.length
        inside = {move.result for move in group}
        kept = [move.result for move in group if move.result in later and length > 1]
        for value in {x: None for move in group for x in move.operands}:
            if length > 1 and value.length == 1 and not printed.has(value) and value not in inside:
                self._print_value(text, sweep, value, printed, position)
        scope = printed
        quad, mirrored = sweep.lanes > 1, self.block.is_mirrored(sweep)
        point, put = (SLOT if quad else POINT), "put("
        if quad:
            put = f"put<{length}>(quad, {SLOT if length > 1 else 0}, "
        if length > 1:
            names = [printed.fibre(value) for value in kept]
            if names:
                text(f"{self._fibre_type(sweep, length)} {', '.join(names)};", _shape((length,)))
            text("#pragma unroll")
            count = slots(length, sweep.lanes, mirrored)
            text(f"for (int {point} = 0; {point} < {count}; ++{point}) {{")
            text.indent += 1
            if quad:
                text(f"const int {POINT} = position<{length}>(quad, {SLOT});")
            scope = printed.inner()
        for move in group:
            operands = []
            for value in move.operands:
                if value in scope.values:
                    operands.append(scope.values[value])
                elif value in scope.fibres and value not in inside:
                    operands.append(f"{scope.fibres[value]}[{point if value.length > 1 else 0}]")
                else:
                    operands.append(self._print_value(text, sweep, value, scope, position))
            name = operands[0]
            if move.step is not None:
                name = scope.value(move.result)
                text(f"const auto {name} = {self._expression(sweep, move, operands)};")
            if move.result in kept:
                text(f"{printed.fibres[move.result]}[{point}] = {name};")
            for place, strides, guard in self._stores(move.result, position):
                at = (
                    place
                    + self._at(sweep, move.result, strides)
                    + self._point(move.result, strides)
                )
                text(f"{guard}{put}{at}, {name});")
        if length > 1:
            text.indent -= 1
            text("}")

    def _print_value(
        self, text: "_Text", sweep: Sweep, value: Value, scope: "_Registers", position: int
    ) -> str:
        """One value of a tile in memory; a constant is printed as it is."""
        literal = self._literal(value.tile)
        if literal:
            scope.values[value] = literal
            return literal
        name = scope.value(value)
        reading = self._reading(value.tile, position)

        def at(strides: tuple[int, ...]) -> str:
            return self._at(sweep, value, strides) + self._point(value, strides)

        if reading.component is not None:
            component = f"{reading.component.offset}{at(reading.component.strides)}"
            text(
                f"const auto {name} = gathered<{reading.components}>({reading.vector}, "
                f"{reading.place}{at(reading.strides)}, {component});"
            )
        else:
            text(f"const auto {name} = get({reading.place}{at(reading.strides)});")
        return name

    def _literal(self, tile: int) -> str:
        """A finite real constant of one value, to the last bit."""
        if not self.block.is_constant(tile) or self.block.plan.tiles[tile].size > 1:
            return ""
        constant = self.block.program.inputs[tile].constant
        assert constant is not None
        value = constant.array.reshape(-1)[0]
        if value.dtype.kind != "f" or not np.isfinite(value):
            return ""
        return f"{self.type}({float(value).hex()})"

    def _point(self, value: Value, strides: tuple[int, ...]) -> str:
        return _sum([(POINT, self._step(value, strides), value.length)])

    def _print_stores(
        self, text: "_Text", sweep: Sweep, value: Value, name: str, position: int
    ) -> None:
        for place, strides, guard in self._stores(value, position):
            step = self._step(value, strides)
            stride = f"<{step}>" if value.length > 1 or sweep.lanes > 1 else ""
            at = self._at(sweep, value, strides)
            text(
                f"{guard}store{stride}({_quad(sweep)}{place}{at}, {name});",
                _shape((value.length,)),
            )

    def _stores(self, value: Value, position: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Where a stage stores what it makes: place, strides and condition."""
        tile = value.tile
        found = []
        if self.block.uses.to_shared(tile, position):
            place = self._element(f"s{tile}", position)
            found.append((place, self.block.shared.layouts[tile].strides, ""))
        if self._stores_output(tile, position):
            # A place of several fibres knows itself which of them are to be written.
            packed = self._packed(position)
            for out, at in self.block.written.get(tile, []):
                place = self._element(f"out{out}", position, ", slice" if packed else "")
                guard = "" if packed else "if (slice.has(e)) "
                found.append((place + _offset(at.offset), at.strides, guard))
        return found

    def _stores_output(self, tile: int, position: int) -> bool:
        """Whether this stage is the first to have the tile in registers, or the one to copy it."""
        block = self.block
        having = [
            n
            for n, stage in enumerate(block.stages)
            if not isinstance(stage, Assembly) and tile in block.made(stage)
        ]
        return bool(having) and position == having[-1 if tile in block.rewritten else 0]

    def _print_assembly(self, text: "_Text", stage: Assembly, position: int) -> None:
        number, step = stage.number, stage.step
        size = self.block.plan.tiles[number].size
        text(f"values<kThreads, kElements, {size}>(thread, [&](int e, int a) {{")
        text(f"  s{number}(e)[a] = {self.type}{{}};")
        text("});")
        for tile, offset, strides in step.pieces:
            shape = self.block.plan.tiles[tile].shape
            labels = [x for x in LETTERS if x != "e"][: len(shape)]
            extents = dict(zip(labels, shape, strict=True))
            value = Value(tile, "".join(labels))
            names = "".join(f", int {x}" for x in labels)
            text("sync<kThreads>();")
            text(
                f"values<kThreads, kElements{''.join(f', {n}' for n in shape)}>"
                f"(thread, [&](int e{names}) {{",
                _shape(shape),
            )
            text.indent += 1
            lines = Sweep("".join(labels), extents)
            name = self._print_value(text, lines, value, _Registers(lines), position)
            text(f"s{number}(e)[{offset}{self._at(lines, value, strides)}] += {name};")
            text.indent -= 1
            text("});")

    def _step(self, value: Value, strides: tuple[int, ...]) -> int:
        """The stride along a fibre."""
        return strides[value.labels.index(ALONG)] if ALONG in value.labels else 0

    def _at(self, sweep: Sweep, value: Value, strides: tuple[int, ...]) -> str:
        return _sum(
            (x, strides[value.labels.index(x)], sweep.extents[x])
            for x in sweep.lines
            if x in value.labels
        )

    def _expression(self, sweep: Sweep, move: Move, operands: list[str]) -> str:
        step = move.step
        if move.matrix is not None:
            if sweep.lanes > 1:
                return self._quad_gemm(sweep, move, operands[0])
            x = pieces_of(self.block.plan, move)
            sizes = f"{x.rows}, {x.columns}, {x.row}, {x.column}"
            halves = self.block.splits(move)
            if halves is not None:
                return self._split_gemm(move, halves, operands[0])
            return f"gemm<{sizes}>({self._matrix(move.matrix.tile)}, {operands[0]})"
        if isinstance(step, Pointwise):
            return f"map({FUNCTORS[step.function]}(), {', '.join(operands)})"
        if isinstance(step, Product):
            return f"map(Multiply(), {', '.join(operands)})"
        assert isinstance(step, Rearrange)
        if ALONG in move.operands[0].labels and ALONG not in move.result.labels:
            return f"reduce({_quad(sweep)}{operands[0]})"
        return operands[0]

    def _quad_gemm(self, sweep: Sweep, move: Move, operand: str) -> str:
        assert move.matrix is not None
        names = ", ".join(x.name for x in self.block.pieces_of(sweep, move))
        if not self.block.is_mirrored(sweep):
            return f"gemm(quad, {names}, {operand})"
        sign = self.block.halves[move.matrix.tile].sign
        sizes = f"{sign}, {move.result.length}, {move.operands[0].length}"
        return f"split_gemm<{sizes}>(quad, {names}, {operand})"

    def _split_gemm(self, move: Move, halves: Halves, operand: str) -> str:
        assert move.matrix is not None
        rows, columns = move.result.length, move.operands[0].length
        strides, even, odd = banks.row_major(halves.even.shape).strides, 0, halves.even.size
        if move.matrix.row == 1:
            # What takes even to odd vectors takes, transposed, odd ones to even ones.
            strides = strides[::-1]
            even, odd = (even, odd) if halves.sign > 0 else (odd, even)
        sizes = ", ".join(str(x) for x in (halves.sign, rows, columns, *strides, even, odd))
        return f"split_gemm<{sizes}>({self._matrix(move.matrix.tile)}, {operand})"

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
            reading = self._reading(tile, position)
            place = reading.place
            by_label = dict(zip(labels, reading.strides, strict=True))
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

        if stage.number in self.block.uses.tiles:
            put(f"s{stage.number}(e)", self.block.shared.layouts[stage.number].strides, "")
        for out, where_ in self.block.written.get(stage.number, []):
            put(f"out{out}(e){_offset(where_.offset)}", where_.strides, "if (slice.has(e)) ")
        text.indent -= 1
        text("});")

    def _print_accumulation(self, text: "_Text", stage: Accumulation, position: int) -> None:
        step = stage.step
        names = _spare_names(step.extents)
        outer, inner = stage.contracted[:-1], stage.contracted[-1]
        along: list[int] = []
        steps: list[int] = []
        places: list[str] = []
        for tile, labels, own in (
            (step.left, step.left_labels, step.rows),
            (step.right, step.right_labels, step.columns),
        ):
            reading = self._reading(tile, position)
            strides = dict(zip(labels, reading.strides, strict=True))
            along.append(strides[own])
            steps.append(strides[inner])
            at = _sum((names[x], strides[x], step.extents[x]) for x in outer)
            places.append(f"{reading.place}{at}")
        terms = ", ".join(str(x) for x in (*along, *steps, step.extents[inner]))
        extents = "".join(f", {step.extents[x]}" for x in outer)
        arguments = "".join(f", int {names[x]}" for x in outer)
        text(
            f"accumulate<Terms<{terms}>, kThreads{extents}>(sum{stage.output}, thread, slice, "
            f"[&](int e{arguments}) {{",
            _shape((step.extents[step.rows], step.extents[step.columns])),
        )
        text(f"  return operands<{self.type}>({', '.join(places)});")
        text("});")

    def _group(self) -> str:
        return "a group of threads" if self.block.groups > 1 else "a block"


LETTERS = "abcdfghijklmnopqrstuvwxyz"
# The place along a fibre, where values are made one by one; and a lane's number of it.
POINT = "at"
SLOT = "slot"


def _quad(sweep: Sweep) -> str:
    """The argument that says which part of a fibre a lane has."""
    return "quad, " if sweep.lanes > 1 else ""


class _Registers:
    """Names of what a thread has in registers: fibres (``r7``) and single values (``v7``)."""

    def __init__(self, sweep: Sweep, outer: "_Registers | None" = None) -> None:
        self.sweep = sweep
        self.fibres: dict[Value, str] = dict(outer.fibres) if outer else {}
        self.values: dict[Value, str] = dict(outer.values) if outer else {}
        # Tiles of which lanes may still be reading what others of their quad will replace.
        self.loaded: set[int] = outer.loaded if outer else set()

    def inner(self) -> "_Registers":
        return _Registers(self.sweep, self)

    def has(self, value: Value) -> bool:
        return value in self.fibres or value in self.values

    def fibre(self, value: Value) -> str:
        self.fibres[value] = f"r{value.tile}{self._suffix(value)}"
        return self.fibres[value]

    def value(self, value: Value) -> str:
        self.values[value] = f"v{value.tile}{self._suffix(value)}"
        return self.values[value]

    def _suffix(self, value: Value) -> str:
        """A letter, if the same tile is read along several labels."""
        same = list(dict.fromkeys(x for x in self.sweep.loads if x.tile == value.tile))
        position = same.index(value) if value in same else 0
        return LETTERS[position] if position else ""


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


def _offset(offset: int) -> str:
    return f" + {offset}" if offset else ""


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
        elif isinstance(step, Pointwise):
            operands = ", ".join(
                f"%{x}[{labels}]" for x, labels in zip(step.operands, step.labels, strict=True)
            )
            lines.append(
                f"%{number}[{step.output_labels}] = {step.function}({operands})  ({shape})"
            )
        else:
            lines.append(f"%{number} = {step!r}  ({shape})")
    return lines
