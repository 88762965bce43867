"""Matrices cut into the pieces that tensor cores multiply with."""

from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda import banks
from jaxmagma.lowering.cuda.sweeps import Move
from jaxmagma.plan import Plan


@dataclass(frozen=True)
class Pieces:
    """A matrix cut into pieces for tensor cores, and the strides of its rows and columns."""

    tile: int
    rows: int
    columns: int
    row: int
    column: int

    @property
    def name(self) -> str:
        """Tiles may be used transposed as well."""
        return f"m{self.tile}{'t' if self.row < self.column else ''}"

    @property
    def counts(self) -> tuple[int, int]:
        """Pieces along the columns and along the rows."""
        return -(-self.columns // 4), -(-self.rows // 8)

    def arranged(self, matrix: np.ndarray) -> np.ndarray:
        """The values in the order in which lanes read them; zeros beyond the matrix."""
        columns, rows = self.counts
        strides = [x * matrix.itemsize for x in (self.row, self.column)]
        whole = np.zeros((rows * 8, columns * 4), matrix.dtype)
        view = np.lib.stride_tricks.as_strided(matrix, (self.rows, self.columns), strides)
        whole[: self.rows, : self.columns] = view
        # Lane 8 i + 4 h + j has row i + 4 h and column j of a piece, see cuda/quad.cuh.
        parts = whole.reshape(rows, 2, 4, columns, 4)
        return np.ascontiguousarray(parts.transpose(3, 0, 2, 1, 4))


def pieces_of(plan: Plan, move: Move) -> Pieces:
    """The matrix of a mode product."""
    assert move.matrix is not None
    strides = banks.row_major(plan.tiles[move.matrix.tile].shape).strides
    row = 0 if move.matrix.row is None else strides[move.matrix.row]
    column = 0 if move.matrix.column is None else strides[move.matrix.column]
    return Pieces(move.matrix.tile, move.result.length, move.operands[0].length, row, column)
