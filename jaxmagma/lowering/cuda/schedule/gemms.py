"""How the threads divide the product of two tiles of one element: a block of it for each."""

import math
from dataclasses import dataclass

from jaxmagma.plans.plan import Product


# Rows and columns of the block of a gemm that one thread has; smaller ones, where else an element
# had work for fewer threads (benchmarks/results/elements-h200.txt).
LARGEST_BLOCK = 4
FEWEST_BLOCKS = 16


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


def blocking_of(step: Product, itemsize: int) -> Blocking:
    extents = step.extents
    most, size = LARGEST_BLOCK if itemsize <= 8 else LARGEST_BLOCK // 2, math.prod(step.shape)
    if size < FEWEST_BLOCKS * most**2:
        most = min(most, 2)

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
