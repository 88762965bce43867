"""Matrices, or halves of them, cut into the pieces that tensor cores multiply with."""

from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda import banks
from jaxmagma.lowering.cuda.sweeps import Move
from jaxmagma.parity import Halves
from jaxmagma.plan import Plan


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


def pieces_of(plan: Plan, move: Move) -> Pieces:
    """The matrix of a mode product."""
    assert move.matrix is not None
    strides = banks.row_major(plan.tiles[move.matrix.tile].shape).strides
    row = 0 if move.matrix.row is None else strides[move.matrix.row]
    column = 0 if move.matrix.column is None else strides[move.matrix.column]
    return Pieces(move.matrix.tile, *move.shape, row, column)


def split_pieces_of(plan: Plan, move: Move, halves: Halves) -> tuple[Pieces, Pieces]:
    """What its symmetric matrix is to sums and to differences of opposite values of a fibre."""
    whole = pieces_of(plan, move)
    (row, column), names = banks.row_major(halves.even.shape).strides, ("even", "odd")
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
