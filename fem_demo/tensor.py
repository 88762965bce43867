"""Tensor-product evaluation in NumPy, for what is done once: set-up and output.

The same contractions as in `operators`, without a compilation.
"""

import numpy as np

from fem_demo.basis import ReferenceElement, lagrange


def evaluate(tables: list[np.ndarray], field: np.ndarray) -> np.ndarray:
    """``(..., columns z, y, x) -> (..., rows z, y, x)``, one table (rows, columns) per axis.

    With basis tables it evaluates at points; with their transposes it integrates.
    """
    first = field.ndim - len(tables)
    for axis, table in enumerate(tables):
        field = np.moveaxis(np.tensordot(table, field, (1, first + axis)), 0, first + axis)
    return field


def jacobian(element: ReferenceElement, points: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Of the element positions ``(dim, e, nodes...)`` at a grid of points, listed as (z, y, x).

    Returns ``(e, points..., dim, dim)``, dx_m / dxi_g in row m and column g.
    """
    tables = [lagrange(element.nodes, p) for p in points]
    columns = []
    for direction in range(element.dim):
        axis = element.dim - 1 - direction
        chosen = [slopes if a == axis else values for a, (values, slopes) in enumerate(tables)]
        columns.append(evaluate(chosen, x))
    return np.moveaxis(np.stack(columns, axis=-1), 0, -2)
