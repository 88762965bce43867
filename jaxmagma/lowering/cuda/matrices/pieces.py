"""Matrices, or halves of them, cut into the pieces that tensor cores multiply with."""

from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.sweeps import QUAD, Move, Sweep
from jaxmagma.plans.parity import Halves
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.strides import row_major


@dataclass(frozen=True)
class Pieces:
    """A matrix cut into pieces for tensor cores, and the strides of its rows and columns.

    It may be the even or the odd half of one that is symmetric.
    """

    tile: int
    rows: int
    columns: int
    row: int
    column: int
    half: str = ""  # "even" or "odd"

    @property
    def name(self) -> str:
        """Tiles may be used transposed as well."""
        return f"m{self.tile}{self.half[:1]}{'t' if self.row < self.column else ''}"

    @property
    def counts(self) -> tuple[int, int]:
        """Pieces along the columns and along the rows."""
        return -(-self.columns // 4), -(-self.rows // 8)

    @property
    def values(self) -> int:
        """That a lane has of the matrix."""
        columns, rows = self.counts
        return columns * rows

    def arranged(self, matrix: np.ndarray) -> np.ndarray:
        """The values in the order in which lanes read them, see ``cuda/quad.cuh``: (values, 32)."""
        strides = [x * matrix.itemsize for x in (self.row, self.column)]
        view = np.lib.stride_tricks.as_strided(matrix, (self.rows, self.columns), strides)
        columns, rows = self.counts
        whole = np.pad(view, ((0, 8 * rows - self.rows), (0, 4 * columns - self.columns)))
        # Lane 8 i + 4 h + j has row i + 4 h and column j of a piece.
        parts = whole.reshape(rows, 2, 4, columns, 4)
        return parts.transpose(3, 0, 2, 1, 4).reshape(-1, 32)


def pieces_of(schedule: Schedule, sweep: Sweep, move: Move) -> tuple[Pieces, ...]:
    """The matrix of a mode product that tensor cores do, or its two halves."""
    if move.matrix is not None and schedule.is_mirrored(sweep):
        return _split(schedule.plan, move, schedule.halves[move.matrix.tile])
    return (whole_of(schedule.plan, move),)


def pieces_in(schedule: Schedule, sweep: Sweep) -> list[Pieces]:
    """Those of one sweep."""
    moves = sweep.moves if sweep.lanes == QUAD else ()
    return list(dict.fromkeys(x for m in moves if m.matrix for x in pieces_of(schedule, sweep, m)))


def every_piece(schedule: Schedule) -> list[Pieces]:
    return list(dict.fromkeys(x for y in schedule.sweeps for x in pieces_in(schedule, y)))


def whole_of(plan: Plan, move: Move) -> Pieces:
    """The matrix of a mode product."""
    assert move.matrix is not None
    strides = row_major(plan.tiles[move.matrix.tile].shape)
    row = 0 if move.matrix.row is None else strides[move.matrix.row]
    column = 0 if move.matrix.column is None else strides[move.matrix.column]
    return Pieces(move.matrix.tile, *move.shape, row, column)


def _split(plan: Plan, move: Move, halves: Halves) -> tuple[Pieces, Pieces]:
    """What its symmetric matrix is to sums and to differences of opposite values of a fibre."""
    whole = whole_of(plan, move)
    (row, column), names = row_major(halves.even.shape), ("even", "odd")
    if whole.row < whole.column:
        row, column = column, row
        names = names if halves.sign > 0 else names[::-1]
    rows, columns = whole.rows // 2, whole.columns // 2
    middle_row, middle_column = whole.rows % 2, whole.columns % 2
    if halves.sign > 0:
        shapes = (rows + middle_row, columns + middle_column), (rows, columns)
    else:
        # Where both middles meet, zero is added: what is not finite must not be lost.
        both = middle_row * middle_column
        shapes = (rows, columns + middle_column), (rows + middle_row, columns + both)
    sums, differences = (
        Pieces(whole.tile, m, k, row, column, name)
        for (m, k), name in zip(shapes, names, strict=True)
    )
    return sums, differences
