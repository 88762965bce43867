"""A plan as scalar fields: what a lane computes with, whatever the tiles of the plan look like.

A field is a value for each position of one *long axis* (the nodes of an element, its points), or a
single value of the element, or of one of its rows (see ``axes``). All axes that are not long are
taken apart, a field for each component. A tile with two long axes is no fields, nor is one that
elements share and some step computes.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from jaxmagma.lowering.cuda.panels.axes import Axes
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.programs.program import Gather, Place, View
from jaxmagma.programs.strides import box_of, places, row_major


# More fields, numbers aside, make a kernel that takes too long to compile.
MOST_FIELDS = 5000


@dataclass(frozen=True)
class Number:
    """A value that is known; of two zeros that are equal, the ``negative`` one is another."""

    value: float
    negative: bool = False
    axis: None = None

    @staticmethod
    def of(value: float) -> "Number":
        return Number(value, math.copysign(1, value) < 0)

    @property
    def operands(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Load:
    """``operand.flat[offset + stride * i]``, for each position i of an axis, if there is one.

    Of a vector that is gathered from: row ``index.flat[offset + stride * i]`` of it, and of that
    number ``component`` of ``components``. What all elements share may differ from one row of an
    element to the next, which is ``row`` values further.
    """

    operand: int
    offset: int
    stride: int
    axis: int | None
    index: int | None = None
    component: int = 0
    components: int = 1
    row: int = 0

    @property
    def operands(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Apply:
    """A pointwise function of fields along the same axis, and of single values."""

    function: str
    operands: tuple[int, ...]
    axis: int | None


@dataclass(frozen=True)
class Table:
    """A matrix: ``operand.flat[offset + row * m + column * k]``, of a shared operand."""

    operand: int
    offset: int
    row: int
    column: int


@dataclass(frozen=True)
class Multiply:
    """``sum over terms and k of table[m, k] * field[k]``: tables applied to fields of one axis."""

    tables: tuple[Table, ...]
    operands: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class Sum:
    """Over all positions of a field: a single value."""

    operands: tuple[int, ...]
    axis: None = None


Field = Number | Load | Apply | Multiply | Sum


@dataclass(frozen=True)
class Store:
    """A field as part of an output: ``out.flat[offset + stride * i]``."""

    output: int
    offset: int
    stride: int
    axis: int | None
    field: int


@dataclass(frozen=True)
class Fields:
    """Fields in the order in which they can be computed, and what is stored of them.

    ``extents`` are those of the long axes, ``rows`` of the axes over rows of an element, which
    follow each other in every operand and result; offsets are those of the first one. All rows have
    the same of an operand that is ``common``.
    """

    rows: tuple[int, ...]
    common: frozenset[int]
    extents: tuple[int, ...]
    fields: tuple[Field, ...]
    stores: tuple[Store, ...]

    @property
    def count(self) -> int:
        """Of the rows of an element."""
        return math.prod(self.rows)

    @property
    def has_products(self) -> bool:
        """Whether tables are applied."""
        return any(isinstance(x, Multiply) for x in self.fields)

    def needed(self, some: Iterable[int], given: Set[int] = frozenset()) -> list[int]:
        """The fields that some are made of, themselves among them, but those that are given."""
        needed = set(some)
        for number in reversed(range(len(self.fields))):
            if number in needed and number not in given:
                needed.update(self.fields[number].operands)
        return sorted(needed - given)

    def __repr__(self) -> str:
        rows = f", {self.count} rows" if self.rows else ""
        lines = [f"axes {list(self.extents)}{rows}"]
        for tables, group in itertools.groupby(enumerate(self.fields), lambda x: _is_of_all(x[1])):
            some = list(group)
            if not tables and len(some) > _MOST_LINES:
                lines.append(f"%{some[0][0]} to %{some[-1][0]}: {_counted(x for _, x in some)}")
            else:
                lines += [self._line(*x) for x in some]
        lines += [f"out{x.output}[{x.offset}{_stride(x.stride)}] = %{x.field}" for x in self.stores]
        return "\n".join(lines)

    def _line(self, number: int, field: Field) -> str:
        along = "" if field.axis is None else f" along {self.extents[field.axis]}"
        return f"%{number}{along} = {_formula(field)}"


# Of loads and functions, one after the other; more are counted.
_MOST_LINES = 4


def _is_of_all(field: Field) -> bool:
    """Whether it is made of all positions of another."""
    return isinstance(field, Multiply | Sum)


def _counted(fields: Iterable[Field]) -> str:
    named = (x.function if isinstance(x, Apply) else type(x).__name__.lower() for x in fields)
    return ", ".join(f"{count} {name}" for name, count in Counter(named).items())


def _formula(field: Field) -> str:
    if isinstance(field, Number):
        return repr(field.value)
    if isinstance(field, Load):
        at = f"{field.offset}{_stride(field.stride)}{_stride(field.row, 'row')}"
        if field.index is not None:
            return f"operand {field.operand}[operand {field.index}[{at}]][{field.component}]"
        return f"operand {field.operand}[{at}]"
    if isinstance(field, Apply):
        return f"{field.function}({', '.join(f'%{x}' for x in field.operands)})"
    if isinstance(field, Sum):
        return f"sum %{field.operands[0]}"
    return " + ".join(
        f"table {x.operand}[{x.offset}{_stride(x.row, 'm')}{_stride(x.column, 'k')}] %{y}[k]"
        for x, y in zip(field.tables, field.operands, strict=True)
    )


def _stride(stride: int, label: str = "i") -> str:
    return f" + {stride} {label}" if stride else ""


class Unsuitable(Exception):
    """Why a plan is no fields."""


class TwoLong(Unsuitable):
    """So far: with other axes than these it may be fields."""


def fields_of(plan: Plan, apart: bool = False, common: bool = True) -> Fields:
    """The fields of a plan, with no long axis if all is taken ``apart``.

    Elements have no rows that have an operand in ``common``, if that is not wanted. Of an element's
    matrix one axis is taken apart, where the other one is long. Raises ``Unsuitable`` if some tile
    is no fields.
    """
    try:
        axes = Axes(plan, apart)
        if axes.common and not common:
            axes = Axes(plan, apart, rows=False)
        return _fields_along(plan, axes)
    except TwoLong:
        # A table's axes may be those of one tile here, and of another there.
        alone = Axes(plan, apart, joined=False)
        others = (Axes(plan, apart, False, n) for n in range(len(alone.extents)))
        for axes in itertools.chain([alone], others):
            with contextlib.suppress(TwoLong):
                return _fields_along(plan, axes)
        raise


def _fields_along(plan: Plan, axes: Axes) -> Fields:
    made = _Reading(plan, axes)
    fields, stores = tuple(made.numbers), tuple(made.stores)
    return _merged(Fields(axes.rows, axes.common, axes.extents, fields, stores))


def _stored_in_parts(plan: Plan) -> dict[int, Sequence[tuple[int, int, tuple[int, ...]]]]:
    """Results that nobody reads, all of whose values come from one part each."""
    read = {x for step in plan.steps for x in step.operands}
    found: dict[int, Sequence[tuple[int, int, tuple[int, ...]]]] = {}
    for number, step in plan.numbered_steps():
        if isinstance(step, Place) and number in plan.results and number not in read:
            at = [places(*x[1:], plan.tiles[x[0]].shape).ravel() for x in step.pieces]
            every = np.concatenate(at)
            if len(every) == math.prod(step.tile) == len(np.unique(every)):
                found[number] = step.pieces
    return found


# ---- Taking apart --------------------------------------------------------------------------------

# Positions along the axes of a tile that are not long.
_Index = tuple[int, ...]


class _Reading:
    """Makes the fields of a plan, tile by tile."""

    def __init__(self, plan: Plan, axes: Axes) -> None:
        self.plan = plan
        self.axes = axes
        self.extents = self.axes.extents
        self.numbers: dict[Field, int] = {}  # equal fields are one
        self.fields: list[Field] = []
        self.count = 0  # of those that are no numbers
        self.parts: dict[int, dict[_Index, int]] = {}
        self.stored = _stored_in_parts(plan)
        for number, step in plan.numbered_steps():
            if not plan.tiles[number].batched:
                raise Unsuitable("a table is computed")
            if not self.extents and math.prod(step.shape) > MOST_FIELDS * math.prod(self.axes.rows):
                raise Unsuitable("too many fields")
            self._long(number)
            if number not in self.stored:
                self.parts[number] = dict(self._of_step(number, step))
        self.stores = [x for n, tile in enumerate(plan.results) for x in self._stores(n, tile)]

    def add(self, field: Field) -> int:
        number = self.numbers.setdefault(field, len(self.fields))
        if number == len(self.fields):
            self.fields.append(field)
            self.count += not isinstance(field, Number)
        if self.count > MOST_FIELDS:
            raise Unsuitable("too many fields")
        return number

    def apply(self, function: str, *operands: int) -> int:
        axes = {self.fields[x].axis for x in operands} - {None}
        if len(axes) > 1:
            raise Unsuitable("a function of fields along different axes")
        if function in ("add", "mul"):
            operands = tuple(sorted(operands))  # as they are, nothing changes
        return self.add(Apply(function, operands, next(iter(axes), None)))

    def total(self, fields: Iterable[int]) -> int:
        """The sum of some fields."""
        first, *others = fields
        for x in others:
            first = self.apply("add", first, x)
        return first

    # Tiles.

    def _long(self, tile: int) -> tuple[int, int] | None:
        """Which axis of a batched tile is long, and the number of that axis."""
        found = [
            (n, axis)
            for n in range(len(self.plan.tiles[tile].shape))
            if (axis := self.axes.of(tile, n)) is not None
        ]
        if len(found) > 1:
            raise TwoLong("a tile has several long axes")
        return found[0] if found else None

    def _short(self, tile: int) -> list[int]:
        """The axes of a tile along which it is taken apart."""
        axes = range(len(self.plan.tiles[tile].shape))
        whole = [n for n in axes if self.axes.is_of_rows(tile, n)]
        return [n for n in axes if n not in whole and self.axes.of(tile, n) is None]

    def _indices(self, tile: int) -> Iterator[_Index]:
        shape = self.plan.tiles[tile].shape
        return itertools.product(*(range(shape[n]) for n in self._short(tile)))

    def _of_term(
        self, tile: int, labels: str, at: Mapping[str, int], long: Mapping[str, int]
    ) -> int:
        """The field of a component of what a step reads, which has ``labels``."""
        index = tuple(at[x] for x in labels if x in at)
        if self.plan.tiles[tile].batched:
            return self._read(tile, index)
        along = [(n, long[x]) for n, x in enumerate(labels) if x in long]
        if len(along) > 1:
            raise TwoLong("a table as a field")
        short = [n for n, x in enumerate(labels) if x in at]
        return self._loaded(tile, index, short, along[0] if along else None)

    def _read(self, tile: int, index: _Index) -> int:
        """The field of a component of a tile."""
        if tile >= len(self.plan.program.inputs):
            return self.parts[tile][index]
        return self._loaded(tile, index, self._short(tile), self._long(tile))

    def _loaded(
        self, tile: int, index: _Index, short: list[int], long: tuple[int, int] | None
    ) -> int:
        """The field of a component of an operand, whose axes are ``short`` but for the long one."""
        strides = row_major(self.plan.tiles[tile].shape)
        offset = sum(i * strides[n] for i, n in zip(index, short, strict=True))
        of_rows = [x for n, x in enumerate(strides) if self.axes.is_of_rows(tile, n)]
        row = 0 if self.plan.tiles[tile].batched else min(of_rows, default=0)
        constant = self.plan.program.inputs[tile].constant
        if long is None and constant is not None and not row:
            value = float(constant.array.reshape(-1)[offset])
            if math.isfinite(value):
                return self.add(Number.of(value))
        stride, axis = (0, None) if long is None else (strides[long[0]], long[1])
        return self.add(Load(tile, offset, stride, axis, row=row))

    def _stores(self, output: int, tile: int) -> list[Store]:
        """Those of a result, in the order in which they are in memory."""
        whole = tile, 0, row_major(self.plan.tiles[tile].shape)
        found = [
            Store(output, offset, stride, axis, self._read(part, index))
            for part, first, strides in self.stored.get(tile, [whole])
            for index, offset, stride, axis in self._places(part, first, strides)
        ]
        return sorted(found, key=lambda x: x.offset)

    def _places(
        self, tile: int, first: int, strides: Sequence[int]
    ) -> Iterator[tuple[_Index, int, int, int | None]]:
        """The components of a tile whose values are so far apart: where each begins, and steps."""
        long = self._long(tile)
        stride, axis = (0, None) if long is None else (strides[long[0]], long[1])
        for index in self._indices(tile):
            offset = sum(i * strides[n] for i, n in zip(index, self._short(tile), strict=True))
            yield index, first + offset, stride, axis

    # Steps.

    def _of_step(
        self, number: int, step: Product | Rearrange | Pointwise | View | Place | Gather
    ) -> Iterator[tuple[_Index, int]]:
        if isinstance(step, View):
            return self._of_view(number, step)
        if isinstance(step, Place):
            return self._of_place(number, step)
        if isinstance(step, Gather):
            return self._of_gather(number, step)
        return self._of_labelled(number, step)

    def _of_labelled(
        self, number: int, step: Product | Rearrange | Pointwise
    ) -> Iterator[tuple[_Index, int]]:
        terms = step.terms
        long: dict[str, int] = {}
        apart: dict[str, None] = {}  # labels of axes along which tiles are taken apart
        for tile, labels in ((number, step.output_labels), *terms):
            for n, label in enumerate(labels):
                axis = self.axes.of(tile, n)
                if axis is not None:
                    long[label] = axis
                elif not self.axes.is_of_rows(tile, n):
                    apart[label] = None
        apart = {x: None for x in apart if x not in long}
        made = [x for x in step.output_labels if x in apart]
        summed = [x for x in apart if x not in step.output_labels]
        for index in itertools.product(*(range(step.extents[x]) for x in made)):
            at = dict(zip(made, index, strict=True))
            if isinstance(step, Pointwise):
                operands = [self._of_term(x, labels, at, long) for x, labels in terms]
                yield index, self.apply(step.function, *operands)
                continue
            addends = []
            for more in itertools.product(*(range(step.extents[x]) for x in summed)):
                addends.append({**at, **dict(zip(summed, more, strict=True))})
            yield index, self._contracted(step, long, addends)

    def _contracted(
        self, step: Product | Rearrange, long: Mapping[str, int], addends: list[dict[str, int]]
    ) -> int:
        """The sum over all addends, and over long axes that the output does not have."""
        terms = step.terms
        over = {x for _, labels in terms for x in labels if x in long} - set(step.output_labels)
        tables = [(x, labels) for x, labels in terms if not self.plan.tiles[x].batched]
        if len(tables) == len(terms):
            raise Unsuitable("a table is computed")
        if isinstance(step, Product) and tables and over:
            ((table, labels),) = tables
            ((field, others),) = (x for x in terms if x[0] != table or x[1] != labels)
            new = [x for x in labels if x in long and x in step.output_labels]
            if new and new[0] not in others:
                return self._applied(table, labels, field, others, new[0], over, long, addends)
        made = []
        for at in addends:
            factors = [self._of_term(x, labels, at, long) for x, labels in terms]
            made.append(factors[0] if len(factors) == 1 else self.apply("mul", *factors))
        total = self.total(self._without_zeros(made))
        for label in over:
            if self.fields[total].axis is None:  # the same everywhere
                total = self.apply("mul", total, self.add(Number.of(float(step.extents[label]))))
            else:
                total = self.add(Sum((total,)))
        return total

    def _without_zeros(self, addends: list[int]) -> list[int]:
        """With fewer products by zero, of which a table may have many.

        They are zero if they are of finite values, and NaN else. So they are as they were if
        each value of which the other factors are sums and products is multiplied by zero, once.
        """
        by_zero = [x for x in addends if self._is_by_zero(x)]
        values = self._values_of(by_zero)
        if len(by_zero) <= len(values):
            return addends
        zero = self.add(Number.of(0.0))
        nan = self.total([self.apply("mul", zero, x) for x in values] or [zero])
        return [*(x for x in addends if x not in by_zero), nan]

    def _is_by_zero(self, number: int) -> bool:
        field = self.fields[number]
        factors = [self.fields[x] for x in field.operands]
        known = [x for x in factors if isinstance(x, Number) and x.value == 0]
        return isinstance(field, Apply) and field.function == "mul" and bool(known)

    def _values_of(self, fields: Iterable[int]) -> list[int]:
        """The values of which fields are sums and products, each once."""
        left, seen, found = [*fields], set[int](), set[int]()
        while left:
            number = left.pop()
            field = self.fields[number]
            if number in seen:
                continue
            seen.add(number)
            if isinstance(field, Apply) and field.function in ("add", "mul", "neg", "sub"):
                left += field.operands
            elif not isinstance(field, Number):
                found.add(number)
        return sorted(found)

    def _applied(
        self,
        table: int,
        labels: str,
        field: int,
        others: str,
        row: str,
        over: set[str],
        long: Mapping[str, int],
        addends: list[dict[str, int]],
    ) -> int:
        if len(over) != 1 or not over <= set(labels) or not over <= set(others):
            raise Unsuitable("a table along several axes")
        (column,) = over
        strides = dict(zip(labels, row_major(self.plan.tiles[table].shape), strict=True))
        tables, fields = [], []
        for at in addends:
            offset = sum(at[x] * stride for x, stride in strides.items() if x not in (row, column))
            tables.append(Table(table, offset, strides[row], strides[column]))
            fields.append(self._of_term(field, others, at, long))
        if any(self.fields[x].axis != long[column] for x in fields):
            raise Unsuitable("a table of what is the same everywhere")
        return self.add(Multiply(tuple(tables), tuple(fields), long[row]))

    def _of_view(self, number: int, step: View) -> Iterator[tuple[_Index, int]]:
        given = step.operand < len(self.plan.program.inputs)
        if given and self.plan.tiles[step.operand].batched and not self._is_in_rows(number):
            for index, offset, stride, axis in self._places(number, step.offset, step.strides):
                yield index, self.add(Load(step.operand, offset, stride, axis))
            return
        for index, at in self._inside(step.operand, number, step.offset, step.strides):
            yield index, self._read(step.operand, at)

    def _is_in_rows(self, tile: int) -> bool:
        return any(self.axes.is_of_rows(tile, n) for n in range(len(self.plan.tiles[tile].shape)))

    def _of_place(self, number: int, step: Place) -> Iterator[tuple[_Index, int]]:
        pieces: dict[_Index, list[int]] = {x: [] for x in self._indices(number)}
        for part, offset, strides in step.pieces:
            for index, at in self._inside(number, part, offset, strides):
                pieces[at].append(self._read(part, index))
        for index, fields in pieces.items():
            yield index, self.total(fields) if fields else self.add(Number.of(0.0))

    def _inside(
        self, whole: int, part: int, offset: int, strides: Sequence[int]
    ) -> Iterator[tuple[_Index, _Index]]:
        """The components of a part of a tile, and where they are in that tile."""
        shape, own = self.plan.tiles[whole].shape, self.plan.tiles[part].shape
        short, short_of_part = self._short(whole), self._short(part)
        if len(short) == len(shape) and len(short_of_part) == len(own):
            for index in self._indices(part):
                place = offset + sum(n * stride for n, stride in zip(index, strides, strict=True))
                yield index, tuple(map(int, np.unravel_index(place, shape)))
            return
        box = box_of(shape, offset, strides, own)
        if box is None:
            raise Unsuitable("a part of a tile that is no box")
        for axis, (start, by, count, position) in enumerate(box):
            if axis not in short and (start, by, count) != (0, 1, shape[axis]):
                raise Unsuitable("a part of a long axis")
            if axis in short and position is not None and position not in short_of_part:
                raise Unsuitable("a long axis that is part of a short one")
        for index in self._indices(part):
            at = dict(zip(short_of_part, index, strict=True))
            places = [
                start + (0 if position is None else by * at[position])
                for axis, (start, by, _, position) in enumerate(box)
                if axis in short
            ]
            yield index, tuple(places)

    def _of_gather(self, number: int, step: Gather) -> Iterator[tuple[_Index, int]]:
        if self.plan.program.inputs[step.index].constant is not None:
            raise Unsuitable("an index that is known")
        shape = self.plan.tiles[step.index].shape
        strides = row_major(shape)
        components = self.plan.tiles[step.vector].shape[1:]
        if any(self.axes.of(number, len(shape) + n) is not None for n in range(len(components))):
            raise Unsuitable("a long axis of a vector that is gathered from")
        long = self._long(number)
        for index in self._indices(number):
            own = [n for n in range(len(shape)) if long is None or n != long[0]]
            offset = sum(i * strides[n] for i, n in zip(index, own, strict=False))
            component = 0
            for i, extent in zip(index[len(own) :], components, strict=True):
                component = component * extent + i
            stride, axis = (0, None) if long is None else (strides[long[0]], long[1])
            load = Load(
                step.vector, offset, stride, axis, step.index, component, math.prod(components)
            )
            yield index, self.add(load)


# ---- Sums of products ----------------------------------------------------------------------------


def _merged(given: Fields) -> Fields:
    """Sums of tables times fields are one product, in which nothing is added but by it."""
    uses = [0] * len(given.fields)
    for field in given.fields:
        for x in field.operands:
            uses[x] += 1
    for store in given.stores:
        uses[store.field] += 1
    fields = list(given.fields)
    for number, field in enumerate(fields):
        if not isinstance(field, Apply) or field.function != "add":
            continue
        left, right = (fields[x] for x in field.operands)
        alone = all(uses[x] == 1 for x in field.operands)
        if isinstance(left, Multiply) and isinstance(right, Multiply) and alone:
            along = {fields[x].axis for x in (*left.operands, *right.operands)}
            if len(along) == 1:
                fields[number] = Multiply(
                    left.tables + right.tables, left.operands + right.operands, left.axis
                )
    return _live(replace(given, fields=tuple(fields)))


def _live(given: Fields) -> Fields:
    """Without fields that nothing needs."""
    return _in_order(given, given.needed(x.field for x in given.stores))


def _in_order(given: Fields, order: Sequence[int]) -> Fields:
    numbers = {old: new for new, old in enumerate(order)}

    def renumbered(field: Field) -> Field:
        if isinstance(field, Number | Load):
            return field
        return replace(field, operands=tuple(numbers[x] for x in field.operands))

    return replace(
        given,
        fields=tuple(renumbered(given.fields[x]) for x in order),
        stores=tuple(replace(x, field=numbers[x.field]) for x in given.stores),
    )


def made_late(given: Fields) -> Fields:
    """Each field shortly before the first one that it is needed for.

    Of operands that which keeps the most values while it is made comes first (Sethi and Ullman,
    1970, who have trees).
    """
    kept: list[int] = []  # values, while each field is made
    for field in given.fields:
        own = sorted((kept[x] for x in set(field.operands)), reverse=True)
        kept.append(max((x + n for n, x in enumerate(own)), default=1))
    order: dict[int, None] = {}
    waiting = [store.field for store in reversed(given.stores)]
    while waiting:
        number = waiting[-1]
        left = [x for x in given.fields[number].operands if x not in order]
        if left and number not in order:
            waiting += sorted(reversed(left), key=lambda x: kept[x])
        else:
            order[waiting.pop()] = None
    return _in_order(given, list(order))
