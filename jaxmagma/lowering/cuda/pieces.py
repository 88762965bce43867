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
    tails: bool = False  # threads multiply with a last row or column that would begin a piece

    @property
    def name(self) -> str:
        """Tiles may be used transposed as well."""
        return f"m{self.tile}{self.half[:1]}{'t' if self.row < self.column else ''}"

    @property
    def has_row(self) -> bool:
        """Whether the last row is for threads."""
        return self.tails and self.rows % 8 == 1

    @property
    def has_column(self) -> bool:
        """Whether the last column is for threads."""
        return self.tails and self.columns % 4 == 1

    @property
    def counts(self) -> tuple[int, int]:
        """Pieces along the columns and along the rows."""
        return -(-self.columns // 4) - self.has_column, -(-self.rows // 8) - self.has_row

    @property
    def values(self) -> int:
        """That a lane has of the matrix."""
        columns, rows = self.counts
        column = 2 * rows if self.has_column else 0
        row = columns + self.has_column if self.has_row else 0
        return columns * rows + column + row

    def arranged(self, matrix: np.ndarray) -> np.ndarray:
        """The values in the order in which lanes read them, see ``cuda/quad.cuh``: (values, 32)."""
        strides = [x * matrix.itemsize for x in (self.row, self.column)]
        view = np.lib.stride_tricks.as_strided(matrix, (self.rows, self.columns), strides)
        columns, rows = self.counts
        below, beside = max(0, 8 * rows - self.rows), max(0, 4 * columns - self.columns)
        whole = np.pad(view, ((0, below), (0, 0)), "edge" if self.tails else "constant")
        whole = np.pad(whole, ((0, 0), (0, beside)))
        # Lane 8 i + 4 h + j has row i + 4 h and column j of a piece.
        parts = whole[: 8 * rows, : 4 * columns].reshape(rows, 2, 4, columns, 4)
        lanes = [parts.transpose(3, 0, 2, 1, 4).reshape(-1, 8, 4)]
        # Quads have the same of tails.
        if self.has_column:
            lanes.append(whole[: 8 * rows, -1].reshape(-1, 1, 4))
        if self.has_row:
            lanes.append(whole[-1, : 4 * columns].reshape(-1, 1, 4))
        if self.has_row and self.has_column:
            lanes.append(whole[-1:, -1:, np.newaxis])
        return np.concatenate([np.broadcast_to(x, (len(x), 8, 4)) for x in lanes])


def pieces_of(plan: Plan, move: Move, tails: bool = False) -> Pieces:
    """The matrix of a mode product."""
    assert move.matrix is not None
    strides = banks.row_major(plan.tiles[move.matrix.tile].shape).strides
    row = 0 if move.matrix.row is None else strides[move.matrix.row]
    column = 0 if move.matrix.column is None else strides[move.matrix.column]
    return Pieces(move.matrix.tile, *move.shape, row, column, tails=tails)


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
