"""Determinants and inverses of matrices of up to three rows, in closed form.

``jnp.linalg`` factorises such a matrix, as one does a large one.  That takes a dozen decisions at
every point of every element, and its derivative as many again.  Where ``fuse`` traces a function,
``jnp.linalg`` takes what follows in its place: sums of products, whose derivatives are sums of
products.  A determinant and an inverse of one matrix have the same minors, which are found once.

**Rounding.**  A minor of three rows is found to two units in the last place, so the error of a
determinant is that of changing the entries of one row by so much, and that of an inverse X of A at
most a few units times ``cond(A) |X|``, as from LAPACK.  Products of two entries must be in the
range of numbers, as a minor is one; those of three need not, where the result is none: to invert,
the determinant is found with the first row scaled by a power of two.  Systems of fewer right sides
than rows are left to elimination, whose residual is small whatever the matrix.

**Complex numbers.**  Determinants are sums of products as they are written, and so are inverses of
up to two rows; systems of up to four are real ones of twice as many, left to elimination.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmagma import internals
from jaxmagma.programs.exact import difference_of_products, fused_multiply_add, inverse_binade


SIZES = (1, 2, 3)
MOST_COMPLEX_ROWS = 4

# A part of the key of whatever JAX keeps of traced functions.
_wanted = jax.make_user_context(False)


@contextlib.contextmanager
def closed_forms() -> Iterator[None]:
    """In its body ``jnp.linalg`` traces determinants and inverses in closed form."""
    with _wanted(True):
        yield


def det(a: Any) -> jax.Array | None:
    """The determinants of matrices along the last two axes; None where it is left to JAX."""
    if _is_complex(a) and a.shape[-1] in SIZES:
        entries = _entries(a)
        return _dot(entries[0], [row[0] for row in _adjugate(entries, _as_written)])
    if not _applies(a):
        return None
    entries = _entries(a)
    return _det(entries[0], _adjugate(entries))


def inv(a: Any) -> jax.Array | None:
    """The inverses of matrices along the last two axes; None where it is left to JAX."""
    return _joined(_inverse(_entries(a))) if _has_inverse(a) else None


def solve(a: Any, b: Any) -> jax.Array | None:
    """X of A X = B for at least as many right sides as rows; None where it is left to JAX."""
    several = b.shape[:-1] == a.shape[:-1] and b.shape[-1] >= a.shape[-1]
    if not several or not _has_inverse(a):
        in_parts = _is_complex(a) and jnp.iscomplexobj(b) and a.shape[-1] <= MOST_COMPLEX_ROWS
        return _solve_in_parts(a, b) if in_parts else None
    columns = list(zip(*_entries(b), strict=True))
    return _joined([[_dot(row, column) for column in columns] for row in _inverse(_entries(a))])


def _applies(a: Any) -> bool:
    return (
        _wanted.value
        and isinstance(a, jax.Array)
        and a.ndim >= 2
        and a.shape[-2] == a.shape[-1]
        and a.shape[-1] in SIZES
        and a.dtype in (np.float32, np.float64)
    )


def _has_inverse(a: Any) -> bool:
    return _applies(a) or (_is_complex(a) and a.shape[-1] < 3)


def _is_complex(a: Any) -> bool:
    square = isinstance(a, jax.Array) and a.ndim >= 2 and a.shape[-2] == a.shape[-1]
    return _wanted.value and square and jnp.iscomplexobj(a)


def _solve_in_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    """X of A X = B by the parts of all three; B may be a vector."""
    axis = a.ndim - 2
    left = jnp.concatenate([a.real, a.imag], axis)
    whole = jnp.concatenate([left, jnp.concatenate([-a.imag, a.real], axis)], axis + 1)
    made = jnp.linalg.solve(whole, jnp.concatenate([b.real, b.imag], axis))
    return lax.complex(*jnp.split(made, 2, axis))


Entries = list[list[jax.Array]]


def _entries(a: jax.Array) -> Entries:
    """The entries along the last two axes."""

    def entry(i: int, j: int) -> jax.Array:
        row = lax.index_in_dim(a, i, a.ndim - 2, keepdims=False)
        return lax.index_in_dim(row, j, a.ndim - 2, keepdims=False)

    return [[entry(i, j) for j in range(a.shape[-1])] for i in range(a.shape[-2])]


def _joined(entries: Entries) -> jax.Array:
    return jnp.stack([jnp.stack(row, -1) for row in entries], -2)


def _as_written(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
    return a * b - c * d


def _adjugate(a: Entries, difference: Callable[..., jax.Array] = difference_of_products) -> Entries:
    """The cofactors of each row as a column."""
    if len(a) == 1:
        return [[lax.full_like(a[0][0], 1)]]
    if len(a) == 2:
        (p, q), (r, s) = a
        return [[s, -q], [-r, p]]
    turns = [(1, 2), (2, 0), (0, 1)]
    return [[difference(a[i][m], a[j][n], a[i][n], a[j][m]) for i, j in turns] for m, n in turns]


def _det(first: Sequence[jax.Array], adjugate: Entries) -> jax.Array:
    """Of the matrix with this first row: a change of that is none of its cofactors."""
    cofactors = [row[0] for row in adjugate]
    if len(first) == 2:
        return _dot(first, cofactors)
    *others, last = zip(first, cofactors, strict=True)
    total = last[0] * last[1]
    for x, y in reversed(others):
        total = fused_multiply_add(x, y, total)
    return total


def _inverse(a: Entries) -> Entries:
    adjugate = _adjugate(a)
    if len(a) < 3:
        reciprocal = 1 / _det(a[0], adjugate)
        return [[x * reciprocal for x in row] for row in adjugate]
    scale = inverse_binade(_largest(a[0]))
    reciprocal = 1 / _det([x * scale for x in a[0]], adjugate)
    return [[x * reciprocal * scale for x in row] for row in adjugate]


def _largest(numbers: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(lax.max, map(abs, numbers))


def _dot(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, map(operator.mul, left, right))


internals.of_small_matrices(det, inv, solve)
