"""The CUDA source of a panel kernel, written to be read.

Names in the source: ``g7`` is where operand 7 is, for a lane's elements, ``c7`` where it is in
shared memory, ``out0`` output 0; ``m2`` table 2 in shared memory. A field is ``f12`` if it is
whole, ``v12`` if a single value or the value at a point, ``t12`` a tile of one that a table made,
``p12`` a tile of a loaded one, ``x12`` a value at a point of all of a lane's elements.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxmagma.lowering.cuda.blocks import TYPES
from jaxmagma.lowering.cuda.functors import FUNCTORS, applied
from jaxmagma.lowering.cuda.panels.fields import (
    Apply,
    Field,
    Load,
    Multiply,
    Number,
    Store,
    Sum,
)
from jaxmagma.lowering.cuda.panels.layout import Layout, Reading
from jaxmagma.lowering.cuda.panels.ownership import Ownership
from jaxmagma.lowering.cuda.panels.schedule import Loop, Schedule, Scope, Straight
from jaxmagma.lowering.cuda.panels.transfers import Staged, Transfers
from jaxmagma.lowering.cuda.source.text import Text, listed
from jaxmagma.lowering.cuda.source.tiles import Pointer, operands_of
from jaxmagma.plans.plan import Plan


def pointers_of(plan: Plan, schedule: Schedule) -> tuple[Pointer, ...]:
    """Of the arrays that a kernel reads, and of those that it writes."""
    program = plan.program
    loads = [x for x in schedule.fields.fields if isinstance(x, Load)]
    gathered = {x.operand for x in loads if x.index is not None}
    read = {x.operand for x in loads} | {x.index for x in loads}
    read |= {
        table.operand
        for x in schedule.fields.fields
        if isinstance(x, Multiply)
        for table in x.tables
    }
    type_, itemsize = TYPES[program.dtype], program.dtype.itemsize
    pointers = operands_of(plan, read, gathered, type_)
    for number, out in enumerate(program.outputs):
        buffer, size = len(program.arguments) + number, plan.tiles[plan.results[number]].size
        pointers.append(Pointer(f"out{number}", buffer, out.batch, size, itemsize, True, type_))
    # Rows of an element are more axes over elements.
    fields = schedule.fields
    over = tuple(program.batch_rank + n for n in range(len(fields.rows)))
    common = {f"g{x}" for x in fields.common}
    return tuple(
        replace(x, axes=(*x.axes, *over), size=x.size // fields.count)
        if x.axes and x.name not in common
        else x
        for x in pointers
    )


def tables_of(plan: Plan, schedule: Schedule) -> list[int]:
    """The constants that a kernel reads from memory, in the order in which they stand there."""
    fields = schedule.fields.fields
    used = {x.operand for x in fields if isinstance(x, Load)}
    used |= {table.operand for x in fields if isinstance(x, Multiply) for table in x.tables}
    return [n for n in sorted(used) if plan.program.inputs[n].constant is not None]


def source_of(
    plan: Plan, schedule: Schedule, ownership: Ownership, layout: Layout, transfers: Transfers
) -> str:
    """The text of a kernel."""
    return _Printer(plan, schedule, ownership, layout, transfers).source


class _Printer:
    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        ownership: Ownership,
        layout: Layout,
        transfers: Transfers,
    ) -> None:
        self.plan = plan
        self.schedule = schedule
        self.fields = schedule.fields.fields
        self.extents = schedule.fields.extents
        self.ownership = ownership
        self.layout = layout
        self.transfers = transfers
        self.type = TYPES[plan.program.dtype]
        self.pointers = pointers_of(plan, schedule)
        self.batched = [x for x in self.pointers if x.axes]
        self.constants = set(tables_of(plan, schedule))
        self.text = Text()
        self.steps: Mapping[int | Store, int] = {}  # of the scope that is printed
        self._print_head()
        self._print_kernel()
        self.source = self.text.source

    @property
    def pack(self) -> str:
        """The type of a value of each of a lane's elements."""
        return f"Pack<{self.type}, {self.ownership.elements}>"

    # ---- Around the work -------------------------------------------------------------------------

    def _print_head(self) -> None:
        text = self.text
        for line in repr(self.plan).splitlines():
            text(f"// {line}")
        text('#include "batch.cuh"')
        text('#include "panel.cuh"')
        if self.transfers.stages:
            text('#include "stage.cuh"')
        text()
        text("using namespace jaxmagma;")
        text()
        text(f"constexpr int kThreads = {self.transfers.threads};")
        text(f"constexpr int kPanel = {self.ownership.panel};  // elements of a warp")
        text(f"constexpr int kLanes = {self.ownership.lanes};  // that have an element together")
        text(f"constexpr int kElements = {self.ownership.elements};  // of these, side by side")
        text()
        if self.constants:
            with text.braces("struct Table", closing="};"):
                for x in sorted(self.constants):
                    text(f"{self.type} t{x}[{self.plan.tiles[x].size}];")
            text('extern "C" { __device__ Table table; }')
            text()

    def _print_kernel(self) -> None:
        text = self.text
        axes = self.plan.program.batch_rank + len(self.schedule.fields.rows)
        batch = f"Batch<{axes if self._apart else 1}, {len(self.batched)}>"
        parameters = [f"const {batch} batch"]
        for x in self.pointers:
            parameters.append(f"{'' if x.written else 'const '}{x.type}* __restrict__ {x.name}_")
        parameters += [f"const int length{x.name[1:]}" for x in self.pointers if x.gathered]
        bounds = f"kThreads, {self.transfers.blocks}"
        text(f'extern "C" __global__ void __launch_bounds__({bounds})')
        separator = ",\n" + " " * len("kernel(")
        with text.braces(f"kernel({separator.join(parameters)})"):
            if self.layout.squares or self.layout.values or self.transfers.stages:
                text("extern __shared__ __align__(16) unsigned char memory[];")
                behind = "memory"
                if self.layout.squares:
                    square = f"Square<{self.type}>"
                    text(f"{square}* const squares = reinterpret_cast<{square}*>(memory);")
                    behind = f"squares + {self.layout.squares}"
                text(f"{self.type}* const shared = reinterpret_cast<{self.type}*>({behind});")
            self._print_tables()
            text("const auto quad = panel_lane<kElements, kLanes>(threadIdx.x);")
            text("const auto rows = panel_rows<kElements, kLanes>(threadIdx.x);")
            text("const long long warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;")
            text(
                "const long long step = "
                "static_cast<long long>(gridDim.x) * (kThreads / 32) * kPanel;"
            )
            stages = self.transfers.stages
            if stages:
                own = f"{self.transfers.of_warp} * (threadIdx.x / 32)"
                text(f"{self.type}* const own = shared + {self.layout.values} + {own};")
            if stages > 1:
                text("int half = 0;")
                self._print_bring("kPanel * warp", "0")
            with text.braces(
                "for (long long first = kPanel * warp; first < batch.inner; first += step)"
            ):
                if stages > 1:
                    text("half ^= 1;")
                    self._print_bring("first + step", "half")
                    text("await_stages<1>();")
                elif stages:
                    self._print_bring("first", "0")
                    text("await_stages<0>();")
                text("const auto slice = jaxmagma::slice<kPanel>(first, batch.inner);")
                if any(isinstance(x, Load) and x.row for x in self.fields):
                    count = self.schedule.fields.count
                    text(f"const int row = slice.element(threadIdx.x % 32) % {count};")
                self._print_places()
                first, *others = self.schedule.scopes
                self._print_parts(first)
                for scope in others:
                    self._print_scope(scope)
                self._print_send()

    def _print_scope(self, scope: Scope) -> None:
        opening = ""
        if scope.count > 1:
            self.text("#pragma unroll 1")
            opening = f"for (int n = 0; n < {scope.count}; ++n)"
        with self.text.braces(opening):
            self._print_parts(scope)

    def _print_parts(self, scope: Scope) -> None:
        self.steps = scope.steps
        for part in scope.parts:
            if isinstance(part, Straight):
                self._print_straight(part)
            else:
                self._print_loop(part)

    def _print_bring(self, first: str, half: str) -> None:
        """Has a warp bring the tiles of a panel to one of its stages."""
        text = self.text
        with text.braces(f"if ({first} < batch.inner)"):
            text(f"const auto slice = jaxmagma::slice<kPanel>({first}, batch.inner);")
            for x in self.transfers.read:
                to = f"own + {x.offset} + {half} * {self.transfers.panel}"
                tile = self._moved(f"g{x.tile}")
                text(f"bring<kPanel, {x.size}, {x.stride}>(threadIdx.x, {to}, {tile}, slice);")
        text("commit_stage();")

    def _print_send(self) -> None:
        """Has a warp store the results of a panel."""
        if not self.transfers.stages:
            return
        text = self.text
        text("__syncwarp();", "all have read their operands, and have results there")
        for x in self.transfers.written:
            tile = self._moved(f"out{x.tile}")
            where = f"own + {self._sent(x)}"
            text(f"send<kPanel, {x.size}, {x.stride}>(threadIdx.x, {where}, {tile}, slice);")
        if self.transfers.written:
            text("__syncwarp();")

    def _sent(self, x: Staged) -> int:
        """Where results are, behind all stages of operands."""
        return self.transfers.stages * self.transfers.panel + x.offset

    def _print_tables(self) -> None:
        if not (self.layout.squares or self.layout.values):
            return
        text = self.text
        for operand, offset in self.layout.shared.items():
            values = f"kThreads, {self.plan.tiles[operand].size}"
            text(f"{self.type}* const c{operand} = shared + {offset};")
            text(f"repeat<{values}>(threadIdx.x, c{operand}, {self._memory(operand)});")
        for n, x in enumerate(self.layout.matrices):
            where = f"{self._memory(x.table.operand)} + {x.table.offset}"
            text(f"Square<{self.type}>* const m{n} = squares + {x.offset};")
            text(
                f"arrange<kThreads, {x.rows}, {x.columns}>(threadIdx.x, m{n}, {where}, "
                f"{x.table.row}, {x.table.column});"
            )
        text("__syncthreads();")

    def _print_places(self) -> None:
        """Where a lane's elements are in arrays."""
        loads = [x for x in self.fields if isinstance(x, Load) and x.index is not None]
        gathers = {f"g{n}" for x in loads for n in (x.operand, x.index)}
        staged = {
            f"g{x.tile}": f"{x.offset}{self._half} + {x.stride} * e" for x in self.transfers.read
        }
        staged |= {
            f"out{x.tile}": f"{self._sent(x)} + {x.stride} * e" for x in self.transfers.written
        }
        for x in self.pointers:
            if x.name in staged:
                where = f"[&](int e) {{ return own + {staged[x.name]}; }}"
            elif x.axes or x.name in gathers:
                where = self._global(x)
            else:
                continue
            self.text(f"const auto {x.name} = each({where}, rows, slice);")

    def _pointer(self, name: str) -> Pointer:
        return next(x for x in self.pointers if x.name == name)

    @property
    def _half(self) -> str:
        """From the first stage to the one that is worked on."""
        return f" + (half ^ 1) * {self.transfers.panel}" if self.transfers.stages > 1 else ""

    @property
    def _apart(self) -> bool:
        """Whether tiles of some operands do not follow each other."""
        fields = self.schedule.fields
        return self.plan.program.batch_rank > 1 or bool(fields.common)

    def _moved(self, name: str) -> str:
        """Where the tiles of a slice are: the first one, where they follow each other."""
        x = self._pointer(name)
        if self._apart:
            return self._global(x)
        return f"{x.name}_ + batch.offset<{self.batched.index(x)}, {x.size}>(slice.first)"

    def _global(self, x: Pointer) -> str:
        """A function of the element of a slice: where its tile of an array is."""
        if not x.axes:
            return f"[&](int) {{ return {x.name}_; }}"
        offset = f"batch.offset<{self.batched.index(x)}, {x.size}>(slice.element(e))"
        return f"[&](int e) {{ return {x.name}_ + {offset}; }}"

    def _shared(self, operand: int) -> str:
        return f"c{operand}" if operand in self.layout.shared else self._memory(operand)

    def _memory(self, operand: int) -> str:
        return f"table.t{operand}" if operand in self.constants else f"g{operand}_"

    # ---- Whole fields, and single values ---------------------------------------------------------

    def _print_straight(self, part: Straight) -> None:
        for axis, run in itertools.groupby(part.fields, self._axis_of_function):
            if axis is None:
                for x in run:
                    self._print_whole(x, self.fields[x])
            else:
                self._print_whole_functions(list(run), self.extents[axis])
        for store in part.stores:
            self._print_store(store)

    def _axis_of_function(self, number: int) -> int | None:
        field = self.fields[number]
        return field.axis if isinstance(field, Apply) else None

    def _print_whole_functions(self, functions: Sequence[int], extent: int) -> None:
        """Functions of whole fields, point by point: what they alone use is never whole."""
        text, own = self.text, set(functions)
        users = {y for n, x in enumerate(self.fields) if n not in own for y in x.operands}
        users |= {x.field for x in self.schedule.fields.stores}
        kept = [x for x in functions if x in users]
        for x in kept:
            text(f"Whole<{self.pack}, {extent}> f{x};")
        text("#pragma unroll")
        with text.braces(f"for (int slot = 0; slot < {-(-extent // 4)}; ++slot)"):
            self._print_functions(functions, {x: f"f{x}[slot]" for x in kept})

    def _print_whole(self, number: int, field: Field) -> None:
        name = self._name(number)
        if isinstance(field, Number):
            return
        if isinstance(field, Load):
            if field.axis is None and number in self.ownership.reread:
                return  # where functions use it
            of_elements = field.index is not None or self.plan.tiles[field.operand].batched
            alone = ".value[0]" if of_elements and self.ownership.lanes == 1 else ""
            self.text(f"const auto {name} = {self._loaded(number, field)}{alone};")
        elif isinstance(field, Apply):
            operands = list(map(self._name, field.operands))
            if self.ownership.lanes == 1:
                made = applied(field.function, operands)
            else:
                made = f"map({listed([f'{FUNCTORS[field.function]}()', *operands])})"
            self.text(f"const auto {name} = {made};")
        elif isinstance(field, Sum):
            (operand,) = field.operands
            axis = self.fields[operand].axis
            assert axis is not None  # of what is summed
            self.text(
                f"const auto {name} = sum_whole<{self.extents[axis]}, {self.type}>"
                f"(quad, {self._name(operand)});"
            )
        else:
            self._print_product(number, field)

    def _offset(self, place: int | Store, offset: int) -> str:
        """Where a load or a store is, from where its operand or output begins."""
        step = self.steps.get(place, 0)
        return f"{offset} + {step} * n" if step else str(offset)

    def _loaded(self, number: int, field: Load) -> str:
        """A whole field, or a single value."""
        shared = not self.plan.tiles[field.operand].batched
        offset = self._offset(number, field.offset)
        if field.axis is None:
            if field.index is not None:
                return self._gathered(field, offset)
            if shared:
                row = f" + {field.row} * row" if field.row else ""
                return f"{self.type}({self._shared(field.operand)}[{offset}{row}])"
            return f"get(g{field.operand} + ({offset}))"
        extent = self.extents[field.axis]
        if field.index is not None:
            sizes = f"{extent}, {field.stride}, 0, {field.components}"
            return (
                f"load_gathered<{sizes}>(quad, g{field.operand}, length{field.operand}, "
                f"g{field.index} + {offset}, {field.component})"
            )
        if shared:
            where = f"{self._shared(field.operand)} + {offset}"
            return f"load_shared<{extent}, {field.stride}>(quad, {where})"
        if number in self.ownership.reread:
            size = f"{self.type}, {self.ownership.elements}, {extent}, {field.stride}"
            return f"Reread<{size}>{{quad, g{field.operand} + {offset}}}"
        return f"load<{extent}, {field.stride}>(quad, g{field.operand} + {offset})"

    def _gathered(self, field: Load, at: str) -> str:
        return (
            f"gathered<{field.components}>(g{field.operand}, length{field.operand}, "
            f"g{field.index} + ({at}), {field.component})"
        )

    def _print_product(self, number: int, field: Multiply) -> None:
        """Of whole fields: each of their values meets all rows at once."""
        rows = self.extents[field.axis]
        size = f"{self.type}, {self.ownership.elements}, {rows}"
        self.text(f"Accumulator<{size}> y{number};")
        for reading, operand in zip(self.layout.readings[number], field.operands, strict=True):
            axis = self.fields[operand].axis
            assert axis is not None  # of what is multiplied
            sizes = f"{rows}, {self.extents[axis]}, {reading.down}, {reading.along}, {self.type}"
            self.text(
                f"accumulate_whole<{sizes}>(quad, {self._matrix(reading)}, {_lanes(reading)}, "
                f"y{number}, {self._name(operand)});"
            )
        self.text(f"const auto {self._name(number)} = y{number}.whole();")

    def _print_store(self, store: Store) -> None:
        name = self._name(store.field)
        to = f"out{store.output} + {self._offset(store, store.offset)}"
        if store.axis is None:
            self.text(f"store_one(quad, {to}, {name});")
        else:
            sizes = f"{self.extents[store.axis]}, {store.stride}"
            self.text(f"store_whole<{sizes}>(quad, {to}, {name});")

    # ---- Tiles -----------------------------------------------------------------------------------

    def _print_loop(self, loop: Loop) -> None:
        text, extent = self.text, self.extents[self.schedule.tiled]
        products = [x for x in loop.accumulated if self._is_product(x)]
        sums = [x for x in loop.accumulated if not self._is_product(x)]
        for x in products:
            text(f"Accumulator<{self.type}, kElements, {self._rows(x)}> y{x};")
        for x in sums:
            text(f"{self.pack} y{x} = {{}};")
        if extent >= 8:
            text("#pragma unroll 1")
            with text.braces(f"for (int t = 0; t < {extent // 8}; ++t)"):
                self._print_tile(loop, 8)
        if extent % 8:
            with text.braces():
                text(f"constexpr int t = {extent // 8};")
                self._print_tile(loop, extent % 8)
        for x in products:
            text(f"const auto {self._name(x)} = y{x}.whole();")
        for x in sums:
            text(f"const auto {self._name(x)} = of_quad(y{x});")

    def _print_tile(self, loop: Loop, count: int) -> None:
        """Of so many positions: all that is done for them."""
        text = self.text
        text(f"constexpr int kCount = {count};")
        self._print_loads(loop)
        for x in loop.multiplied:
            text(f"Tile<{self.type}, kElements> t{x};")
        self._print_multiply(loop.multiplied)
        self._print_points(loop)
        self._print_accumulate(x for x in loop.accumulated if self._is_product(x))
        for x in loop.accumulated:
            if not self._is_product(x):
                (operand,) = self.fields[x].operands
                text(f"y{x} += sum({self._tile(operand)});")

    def _is_product(self, number: int) -> bool:
        return isinstance(self.fields[number], Multiply)

    def _print_loads(self, loop: Loop) -> None:
        """What is loaded at the points of a tile, before anything waits for products."""
        loads = [(x, f) for x in loop.points if isinstance(f := self.fields[x], Load)]
        for x, field in loads:
            shared = not self.plan.tiles[field.operand].batched
            text = self.type if shared and field.index is None else self.pack
            self.text(f"{text} p{x}[2];")
        if not loads:
            return
        with self.text.braces("positions<kCount>(quad, 8 * t, [&](int slot, int i)", closing="});"):
            for x, field in loads:
                at = f"{self._offset(x, field.offset)} + i * {field.stride}"
                if field.index is not None:
                    value = self._gathered(field, at)
                elif self.plan.tiles[field.operand].batched:
                    value = f"get(g{field.operand} + ({at}))"
                else:
                    value = f"{self._shared(field.operand)}[{at}]"
                self.text(f"p{x}[slot] = {value};")

    def _by_table(self, numbers: Iterable[int]) -> list[tuple[Reading, list[tuple[int, int]]]]:
        """Products with their operands, those with the same table together."""
        groups: dict[tuple[Reading, int | None], list[tuple[int, int]]] = {}
        for number in numbers:
            operands = self.fields[number].operands
            for reading, operand in zip(self.layout.readings[number], operands, strict=True):
                key = reading, self.fields[operand].axis
                groups.setdefault(key, []).append((number, operand))
        return [(reading, pairs) for (reading, _), pairs in groups.items()]

    def _print_multiply(self, products: Iterable[int]) -> None:
        """The fields that a table is applied to meet all tables that are applied to them."""
        groups: dict[tuple[bool, int, tuple[int, ...]], list[tuple[Reading, list[int]]]] = {}
        for reading, pairs in self._by_table(products):
            key = reading.transposed, reading.along, tuple(x for _, x in pairs)
            groups.setdefault(key, []).append((reading, [x for x, _ in pairs]))
        for (_, along, operands), group in groups.items():
            axis = self.fields[operands[0]].axis
            assert axis is not None  # of what is multiplied
            at = listed(f"{self._matrix(x)} + t * {x.down}" for x, _ in group)
            made = listed(f"{{{listed(f'&t{x}' for x in of_table)}}}" for _, of_table in group)
            sizes = f"{self.extents[axis]}, {along}, {self.type}, kElements, {len(group)}"
            self.text(
                f"multiply<{sizes}>(quad, {{{at}}}, {_lanes(group[0][0])}, {{{made}}}, "
                f"{listed(map(self._name, operands))});"
            )

    def _print_points(self, loop: Loop) -> None:
        """Functions at a point, element by element, and what is stored of them."""
        text = self.text
        functions = [x for x in loop.points if isinstance(self.fields[x], Apply)]
        used = {y for x in loop.accumulated for y in self.fields[x].operands}
        used |= {x.field for x in loop.stores}
        kept = [x for x in functions if x in used]
        for x in kept:
            text(f"Tile<{self.type}, kElements> x{x};")
        if not (functions or loop.stores):
            return
        text("#pragma unroll")
        with text.braces("for (int slot = 0; slot < (kCount + 3) / 4; ++slot)"):
            if functions:
                self._print_functions(functions, {x: f"x{x}[slot]" for x in kept})
            for store in loop.stores:
                to = f"out{store.output} + {self._offset(store, store.offset)}"
                at = f"(8 * t + position<kCount>(quad, slot)) * {store.stride}"
                value = f"spread<{self.type}, kElements>({self._at_points(store.field)}[slot])"
                text(f"put<kCount>(quad, slot, {to} + {at}, {value});")

    def _print_functions(self, functions: Sequence[int], kept: Mapping[int, str]) -> None:
        """Functions of values in one slot, and where some of them are kept for all elements."""
        text, own = self.text, set(functions)
        text("#pragma unroll")
        with text.braces("for (int w = 0; w < kElements; ++w)"):
            used = {y for x in functions for y in self.fields[x].operands}
            for x in sorted(used & self.ownership.reread):
                load = self.fields[x]
                assert isinstance(load, Load)
                at = f"g{load.operand}.at[w] + ({self._offset(x, load.offset)})"
                text(f"const {self.type} v{x} = reread({at});")
                own.add(x)
            for x in functions:
                field = self.fields[x]
                assert isinstance(field, Apply)
                operands = [f"v{y}" if y in own else self._of_element(y) for y in field.operands]
                text(f"const {self.type} v{x} = {applied(field.function, operands)};")
                if x in kept:
                    text(f"{kept[x]}.value[w] = v{x};")

    def _of_element(self, number: int) -> str:
        """A value that a lane has in one slot, of its element w."""
        field = self.fields[number]
        if isinstance(field, Number):
            return self._name(number)
        if field.axis is None:
            return f"of_fibre({self._name(number)}, w)"
        if field.axis != self.schedule.tiled:
            return f"of_fibre(f{number}[slot], w)"
        if isinstance(field, Load):
            return f"of_fibre(p{number}[slot], w)"
        return f"t{number}[slot].value[w]"

    def _at_points(self, number: int) -> str:
        """The same, at all points of a tile and of all of a lane's elements."""
        field = self.fields[number]
        if isinstance(field, Load):
            return f"p{number}"
        return f"t{number}" if isinstance(field, Multiply) else f"x{number}"

    def _tile(self, number: int) -> str:
        """The same, and zero beyond the last point."""
        return f"tile<kCount, {self.type}>(quad, {self._at_points(number)})"

    def _print_accumulate(self, products: Iterable[int]) -> None:
        for reading, pairs in self._by_table(products):
            rows = self._rows(pairs[0][0])
            made = listed(f"&y{x}" for x, _ in pairs)
            given = listed(self._tile(x) for _, x in pairs)
            sizes = f"{rows}, kCount, {reading.down}, {self.type}, kElements, {len(pairs)}"
            self.text(
                f"accumulate<{sizes}>({self._matrix(reading)} + t * {reading.along}, "
                f"{_lanes(reading)}, {{{made}}}, {{{given}}});"
            )

    # ---- Names -----------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        field = self.fields[number]
        if isinstance(field, Number):
            return _literal(field.value, self.type)
        return f"v{number}" if field.axis is None else f"f{number}"

    def _rows(self, number: int) -> int:
        axis = self.fields[number].axis
        assert axis is not None  # of a product
        return self.extents[axis]

    def _matrix(self, reading: Reading) -> str:
        return f"m{self.layout.matrices.index(reading.matrix)}"


def _lanes(reading: Reading) -> str:
    return "quad.by_columns" if reading.transposed else "quad.by_rows"


def _literal(value: float, type_: str) -> str:
    text = f"{value!r}f" if type_ == "float" else repr(value)
    return f"({text})" if text.startswith("-") else text
