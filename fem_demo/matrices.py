"""Algebra of 1x1, 2x2 and 3x3 matrices, one at each of very many points.

A matrix is a nested list of arrays, ``A[row][column]``, all of the shape of the point set, so that
every formula is a pointwise one and compiles into a vectorised loop over the points.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


Matrix = list[list[jax.Array]]
Vector = list[jax.Array]


def total(terms: Sequence[jax.Array]) -> jax.Array:
    return sum(terms[1:], start=terms[0])


def stack(A: Matrix) -> jax.Array:
    return jnp.stack([jnp.stack(row) for row in A])  # (rows, columns, ...)


def unstack(A: jax.Array) -> Matrix:
    return [[A[i, j] for j in range(A.shape[1])] for i in range(A.shape[0])]


def transpose(A: Matrix) -> Matrix:
    return [list(column) for column in zip(*A, strict=True)]


def multiply(A: Matrix, B: Matrix) -> Matrix:
    n = range(len(A))
    return [[total([A[i][k] * B[k][j] for k in n]) for j in n] for i in n]


def apply(A: Matrix, u: Vector) -> Vector:
    return [total([a * b for a, b in zip(row, u, strict=True)]) for row in A]


def squared_norm(u: Vector) -> jax.Array:
    return total([a * a for a in u])


def adjugate(A: Matrix) -> Matrix:
    """The transposed cofactors: adj(A) A = det(A) I."""
    if len(A) == 1:
        return [[jnp.ones_like(A[0][0])]]
    if len(A) == 2:
        return [[A[1][1], -A[0][1]], [-A[1][0], A[0][0]]]

    def minor(i: int, j: int) -> jax.Array:
        # Cyclic rows and columns carry the sign of the cofactor.
        r, s, p, q = (i + 1) % 3, (i + 2) % 3, (j + 1) % 3, (j + 2) % 3
        return A[r][p] * A[s][q] - A[r][q] * A[s][p]

    return [[minor(j, i) for j in range(3)] for i in range(3)]


def determinant(A: Matrix, adj: Matrix) -> jax.Array:
    """det(A), given its adjugate: the product of its first row and their first column."""
    return total([A[0][k] * adj[k][0] for k in range(len(A))])


def cross(u: Vector, v: Vector) -> Vector:
    return [u[(i + 1) % 3] * v[(i + 2) % 3] - u[(i + 2) % 3] * v[(i + 1) % 3] for i in range(3)]


def dot(u: Vector, v: Vector) -> jax.Array:
    return total([a * b for a, b in zip(u, v, strict=True)])


def normalised(u: Vector) -> Vector:
    norm = jnp.sqrt(squared_norm(u))
    return [a / norm for a in u]


def combine(c: Vector, v: Vector, w: Vector) -> Vector:
    return [c[0] * a + c[1] * b for a, b in zip(v, w, strict=True)]


def choose(condition: jax.Array, u: Vector, v: Vector) -> Vector:
    return [jnp.where(condition, a, b) for a, b in zip(u, v, strict=True)]


def positive_or_one(a: jax.Array) -> jax.Array:
    """A denominator for quotients whose numerator vanishes with it."""
    return jnp.where(a > 0, a, 1.0)


def square_root(a: jax.Array) -> jax.Array:
    """sqrt(a), with the derivative 0 instead of infinity at 0: gas at rest is differentiable."""
    zero = a == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, a)))


class Eigen(NamedTuple):
    """The ends of the spectrum of a symmetric matrix, and a vector of the lower one.

    The vector is not normalised; its length is between 1 and sqrt 2.
    """

    smallest: jax.Array
    vector: Vector
    largest: jax.Array


def _eigen_2(a: jax.Array, b: jax.Array, d: jax.Array) -> Eigen:
    """Of [[a, b], [b, d]], by the one rotation that makes it diagonal.

    With h = (d - a)/2, the smaller root of t^2 + 2 (h/b) t = 1 is its tangent
    t = sign(h) b / (|h| + sqrt(h^2 + b^2)), at most 45 degrees.  The eigenvalues are a - t b and
    d + t b, the vectors (1, -t) and (t, 1).
    """
    h = 0.5 * (d - a)
    t = jnp.where(h < 0, -b, b) / positive_or_one(jnp.abs(h) + square_root(h * h + b * b))
    one = jnp.ones_like(t)
    first, second = a - t * b, d + t * b
    vector = choose(first <= second, [one, -t], [t, one])
    return Eigen(jnp.minimum(first, second), vector, jnp.maximum(first, second))


def _isolated_root(r: jax.Array) -> jax.Array:
    """The root of z^3 - 3 z = 2 r in [sqrt 3, 2], for 0 <= r <= 1, by Newton's method.

    It is far from the other two.  The chord between the roots for r = 0 and r = 1 is off by less
    than 0.01, and three steps square that down to round-off.
    """
    z = 3**0.5 + (2 - 3**0.5) * r
    for _ in range(3):
        z = 2 * (z * z * z + r) / (3 * (z * z - 1))
    return z


def _eigen_3(A: Matrix) -> Eigen:
    """Deflation: first the eigenvalue farthest from the others, then the 2x2 rest.

    A = q I + p B with tr B = 0 and tr B^2 = 6.  The eigenvalues of B solve z^3 - 3 z = det B; the
    one with the sign of det B is isolated from the others, which may coincide.  So its eigenvector,
    a cross product of two rows of B - z I, is accurate to round-off, and so is what B does on the
    plane orthogonal to it.
    """
    q = (A[0][0] + A[1][1] + A[2][2]) / 3
    shifted = [[A[i][j] - q if i == j else A[i][j] for j in range(3)] for i in range(3)]
    p = square_root(total([squared_norm(row) for row in shifted]) / 6)
    B = [[a / positive_or_one(p) for a in row] for row in shifted]
    r = jnp.clip(0.5 * determinant(B, adjugate(B)), -1.0, 1.0)
    z = jnp.where(r < 0, -1.0, 1.0) * _isolated_root(jnp.abs(r))

    rows = [[B[i][j] - z if i == j else B[i][j] for j in range(3)] for i in range(3)]
    u = cross(rows[0], rows[1])
    for i, j in ((1, 2), (2, 0)):
        other = cross(rows[i], rows[j])
        u = choose(squared_norm(other) > squared_norm(u), other, u)
    u = normalised(u)  # e_z for a multiple of the identity, when B = 0

    zero = jnp.zeros_like(q)
    v = choose(jnp.abs(u[0]) >= jnp.abs(u[1]), [u[2], zero, -u[0]], [zero, u[2], -u[1]])
    v = normalised(v)
    w = cross(u, v)
    Bv, Bw = apply(B, v), apply(B, w)
    plane = _eigen_2(dot(v, Bv), dot(v, Bw), dot(w, Bw))
    within = combine(plane.vector, v, w)
    smallest = jnp.where(r < 0, z, plane.smallest)
    largest = jnp.where(r < 0, plane.largest, z)
    return Eigen(q + p * smallest, choose(r < 0, u, within), q + p * largest)


def eigen(A: Matrix) -> Eigen:
    """Of a symmetric matrix.  Equal eigenvalues yield the first coordinate direction there is."""
    if len(A) == 1:
        return Eigen(A[0][0], [jnp.ones_like(A[0][0])], A[0][0])
    if len(A) == 2:
        return _eigen_2(A[0][0], A[0][1], A[1][1])
    return _eigen_3(A)


def largest_singular_value(A: Matrix) -> jax.Array:
    if len(A) == 1:
        return jnp.abs(A[0][0])
    if len(A) == 2:  # the two singular values are the sum and difference of these halves
        (a, b), (c, d) = A
        rotation = jnp.sqrt((a + d) ** 2 + (b - c) ** 2)
        reflection = jnp.sqrt((a - d) ** 2 + (b + c) ** 2)
        return 0.5 * (rotation + reflection)
    return jnp.sqrt(eigen(multiply(transpose(A), A)).largest)
