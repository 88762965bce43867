"""Identities, as derivatives in all directions at once begin with: what is zero there goes.

``jax.jacfwd``, ``jax.jacrev`` and ``jax.hessian`` repeat a derivative for the rows of an identity,
each in the shape of the argument: ``eye(30).reshape(30, 10, 3)`` for ten nodes that have three
components. Of its first axis they make both axes of the argument anew. A product with it is no
work: what is summed over is another name of what is not.
"""

import itertools
import math

import numpy as np

from jaxmagma.programs.builder import MOST_MERGED, Builder
from jaxmagma.programs.labels import letters


def identity(builder: Builder, array: np.ndarray, matrix: bool = False) -> int | None:
    """A known array as a value whose zeros are not computed with, if it is such an identity.

    One of its axes is all others, of which there are at least two, unless it may be a ``matrix``,
    of nodes: zeros that are multiplied with components are values.
    """
    axes = sum(extent > 1 for extent in array.shape)
    nodes = matrix and min(array.shape, default=0) > MOST_MERGED
    found = _rows(array) if axes > 2 or nodes else None
    if found is None:
        return None
    axis, order = found
    others = letters(array.ndim - 1)  # of the other axes
    rows = letters(2 * len(others))[len(others) :]  # and of their parts in this one
    terms = [
        (_of_axis(builder, array.shape[n], array.dtype), rows[k] + others[n - (n > axis)])
        for k, n in enumerate(order)
    ]
    output = others[:axis] + rows + others[axis:]
    sizes = {
        x: array.shape[n] for k, n in enumerate(order) for x in (rows[k], others[n - (n > axis)])
    }
    return builder.merged(builder.contract(terms, output, sizes), array.shape)


def _rows(array: np.ndarray) -> tuple[int, tuple[int, ...]] | None:
    """The axis that all others are, and these in the order in which they are."""
    size = math.isqrt(array.size)
    if size < 2 or size not in array.shape or array.dtype.kind not in "fc":
        return None
    if size**2 != array.size or np.count_nonzero(array) != size:
        return None
    axis = array.shape.index(size)
    for order in itertools.permutations(n for n in range(array.ndim) if n != axis):
        if (array.transpose(axis, *order).reshape(size, size) == np.eye(size)).all():
            return axis, order
    return None


def _of_axis(builder: Builder, extent: int, dtype: np.dtype) -> int:
    """Of an axis of nodes, or of components, of which there are fewer, that of each of them."""
    if extent > MOST_MERGED:
        return builder.identity(extent, dtype)
    one, zero = builder.constant(np.ones((), dtype)), builder.zero((), dtype)
    rows = [[one if n == k else zero for k in range(extent)] for n in range(extent)]
    return builder.stack([builder.stack(row, 0) for row in rows], 0)
