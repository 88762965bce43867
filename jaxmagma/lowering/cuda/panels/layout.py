"""Where tables stand in shared memory: each one once, for products with it and with its transpose.

A table is cut into squares of eight by eight values, those of a row of squares side by side; what
is in a square, and in which order, is said in ``cuda/panel.cuh``. Behind the tables stand operands
of which lanes read what belongs to their points.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.panels.fields import Fields, Load, Multiply, Table
from jaxmagma.plans.plan import Plan


# Values of float64, or both parts of those of float32.
SQUARE_BYTES = 512
# Of an operand that lanes read value by value: larger ones they read from memory.
_MOST_VALUES = 1024


@dataclass(frozen=True)
class Matrix:
    """A table of so many rows and columns in shared memory, from square ``offset`` on."""

    table: Table
    rows: int
    columns: int
    offset: int

    @property
    def across(self) -> int:
        """The squares of a row of them."""
        return -(-self.columns // 8)

    @property
    def size(self) -> int:
        return -(-self.rows // 8) * self.across


@dataclass(frozen=True)
class Reading:
    """How a product reads a matrix: as it is, or transposed.

    Attributes:
      down: from the first square of eight rows of the product to that of the next.
      along: from the first square of eight columns to that of the next.
    """

    matrix: Matrix
    transposed: bool

    @property
    def down(self) -> int:
        return 1 if self.transposed else self.matrix.across

    @property
    def along(self) -> int:
        return self.matrix.across if self.transposed else 1


@dataclass(frozen=True)
class Layout:
    """The tables of a kernel, and how each of its products reads them.

    Attributes:
      squares: of all tables.
      shared: where an operand is, of those that lanes read value by value.
      values: of these.
    """

    matrices: tuple[Matrix, ...]
    readings: tuple[tuple[Reading, ...], ...]  # of each field, of those that are products
    squares: int
    shared: Mapping[int, int]
    values: int

    def bytes(self, itemsize: int) -> int:
        """Of shared memory, with values of so many bytes."""
        return SQUARE_BYTES * self.squares + itemsize * self.values

    def __repr__(self) -> str:
        vectors = [f"operand {x} at {offset}" for x, offset in self.shared.items()]
        tables = [
            f"table {x.table.operand}[{x.table.offset}]: {x.rows} x {x.columns} at {x.offset}"
            for x in self.matrices
        ]
        return "\n".join([*tables, *vectors])


def layout_of(plan: Plan, fields: Fields) -> Layout:
    """Equal tables are one, also where one is the transpose of the other."""
    shared: dict[int, int] = {}
    values = squares = 0
    for field in fields.fields:
        if isinstance(field, Load) and _is_by_point(plan, field) and field.operand not in shared:
            shared[field.operand] = values
            values += plan.tiles[field.operand].size
    matrices: list[Matrix] = []
    known: dict[object, Reading] = {}
    readings: list[list[Reading]] = [[] for _ in fields.fields]
    for number, table, rows, columns in _tables(fields):
        straight = _identity(plan, table, rows, columns)
        if straight not in known:
            matrices.append(Matrix(table, rows, columns, squares))
            squares += matrices[-1].size
            turned = Table(table.operand, table.offset, table.column, table.row)
            known[_identity(plan, turned, columns, rows)] = Reading(matrices[-1], True)
            known[straight] = Reading(matrices[-1], False)
        readings[number].append(known[straight])
    return Layout(tuple(matrices), tuple(map(tuple, readings)), squares, shared, values)


def _is_by_point(plan: Plan, field: Load) -> bool:
    """Whether lanes read different values of an operand that all elements share."""
    tile = plan.tiles[field.operand]
    own = not tile.batched and field.index is None and (field.axis is not None or field.row > 0)
    return own and tile.size <= _MOST_VALUES


def _tables(fields: Fields) -> Iterator[tuple[int, Table, int, int]]:
    """Those of each product, with their rows and columns."""
    for number, field in enumerate(fields.fields):
        if isinstance(field, Multiply):
            for table, operand in zip(field.tables, field.operands, strict=True):
                column = fields.fields[operand].axis
                assert column is not None  # of what is multiplied
                yield number, table, fields.extents[field.axis], fields.extents[column]


def _identity(plan: Plan, table: Table, rows: int, columns: int) -> object:
    """What equal tables have in common: their values, if these are known, else where they are."""
    constant = plan.program.inputs[table.operand].constant
    if constant is None:
        return table, rows, columns
    at = np.add.outer(table.row * np.arange(rows), table.column * np.arange(columns))
    values = constant.array.reshape(-1)[table.offset + at]
    return values.tobytes(), rows, columns
