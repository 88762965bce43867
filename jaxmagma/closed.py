"""Determinants and inverses of 2 × 2 and 3 × 3 matrices, in closed form.

``jnp.linalg`` factorises such a matrix, as one does a large one.  That takes a dozen decisions at
every point of every element, and its derivative as many again.  Where ``fuse`` traces a function,
``jnp.linalg`` takes what follows in its place: sums of products, whose derivatives are sums of
products.

**Rounding.**  A minor is found to two units in the last place, so the error of a determinant is
that of changing the entries of one row by so much, and that of an inverse X of A at most a few
units times ``cond(A) |X|``, as from LAPACK.  The rows of a matrix to invert are scaled by powers of
two, so that no product overflows because the matrix is large or small.  Systems of fewer right
sides than rows are left to elimination, whose residual is small whatever the matrix.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmagma import internals
from jaxmagma.exact import difference_of_products, fused_multiply_add, inverse_binade


SIZES = (2, 3)

# A part of the key of whatever JAX keeps of traced functions.
_wanted = jax.make_user_context(False)


@contextlib.contextmanager
def closed_forms() -> Iterator[None]:
    """In its body ``jnp.linalg`` traces determinants and inverses in closed form."""
    with _wanted(True):
        yield


def _entries(a: jax.Array) -> list[list[jax.Array]]:
    """The entries along the last two axes."""

    def entry(i: int, j: int) -> jax.Array:
        row = lax.index_in_dim(a, i, a.ndim - 2, keepdims=False)
        return lax.index_in_dim(row, j, a.ndim - 2, keepdims=False)

    return [[entry(i, j) for j in range(a.shape[-1])] for i in range(a.shape[-2])]


def _cofactors(a: list[list[jax.Array]], row: int) -> list[jax.Array]:
    """Those of the entries of one row."""
    if len(a) == 2:
        b = a[1 - row]
        return [b[1], -b[0]] if row == 0 else [-b[1], b[0]]
    b, c = a[(row + 1) % 3], a[(row + 2) % 3]
    pairs = [(1, 2), (2, 0), (0, 1)]
    return [difference_of_products(b[m], c[n], b[n], c[m]) for m, n in pairs]


def _det(a: list[list[jax.Array]], first: list[jax.Array]) -> jax.Array:
    """From the cofactors of the first row."""
    if len(a) == 2:
        return difference_of_products(a[0][0], a[1][1], a[0][1], a[1][0])
    total = a[0][2] * first[2]
    return fused_multiply_add(a[0][0], first[0], fused_multiply_add(a[0][1], first[1], total))


def _largest(numbers: list[jax.Array]) -> jax.Array:
    largest = abs(numbers[0])
    for x in numbers[1:]:
        largest = lax.max(largest, abs(x))
    return largest


def _applies(a: Any) -> bool:
    return (
        _wanted.value
        and a.ndim >= 2
        and a.shape[-2] == a.shape[-1]
        and a.shape[-1] in SIZES
        and a.dtype in (np.float32, np.float64)
    )


def det(a: jax.Array) -> jax.Array | None:
    """The determinants of matrices along the last two axes; None where it is left to JAX."""
    if not _applies(a):
        return None
    entries = _entries(a)
    return _det(entries, _cofactors(entries, 0))


def solve(a: jax.Array, b: jax.Array) -> jax.Array | None:
    """X of A X = B for at least as many right sides as rows; None where it is left to JAX."""
    if not _applies(a) or b.shape[:-1] != a.shape[:-1] or b.shape[-1] < a.shape[-1]:
        return None
    entries, right = _entries(a), _entries(b)
    count = range(a.shape[-1])
    scales = [inverse_binade(_largest(row)) for row in entries]
    entries = [[x * s for x in row] for row, s in zip(entries, scales, strict=True)]
    cofactors = [_cofactors(entries, row) for row in count]
    inverse = 1 / _det(entries, cofactors[0])
    factors = [inverse * s for s in scales]
    right = [[x * s for x in row] for row, s in zip(right, factors, strict=True)]
    columns = range(b.shape[-1])
    rows = [
        jnp.stack(
            [_dot([cofactors[k][i] for k in count], [r[n] for r in right]) for n in columns], -1
        )
        for i in count
    ]
    return jnp.stack(rows, -2)


def _dot(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    total = left[0] * right[0]
    for x, y in zip(left[1:], right[1:], strict=True):
        total = total + x * y
    return total


internals.of_small_matrices(det, solve)
