"""The ends of the spectrum of a small symmetric matrix, differentiable where eigenvalues are equal.

``jnp.linalg.eigh`` has no derivatives there, and finds all eigenvalues and vectors, where the
physics needs one of each.  The closed forms here are of one matrix, ``(dim, dim)`` with dim up to
3; `jax.vmap` takes them to many points.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Ends(NamedTuple):
    """The extreme eigenvalues, and a vector of the lower one.

    The vector is not normalised; its length is between 1 and sqrt 2.
    """

    smallest: jax.Array  # ()
    vector: jax.Array  # (dim,)
    largest: jax.Array  # ()


def ends(A: jax.Array) -> Ends:
    """Of a symmetric matrix.  Equal eigenvalues yield the first coordinate direction there is."""
    if len(A) == 1:
        return Ends(A[0, 0], jnp.ones(1), A[0, 0])
    return _ends_2(A) if len(A) == 2 else _ends_3(A)


def _ends_2(A: jax.Array) -> Ends:
    """By the one rotation that makes [[a, b], [b, d]] diagonal.

    With h = (d - a)/2, the smaller root of t^2 + 2 (h/b) t = 1 is its tangent
    t = sign(h) b / (|h| + sqrt(h^2 + b^2)), at most 45 degrees.  The eigenvalues are a - t b and
    d + t b, the vectors (1, -t) and (t, 1).
    """
    a, b, d = A[0, 0], A[0, 1], A[1, 1]
    h = 0.5 * (d - a)
    t = jnp.where(h < 0, -b, b) / positive_or_one(jnp.abs(h) + square_root(h * h + b * b))
    first, second = a - t * b, d + t * b
    vector = jnp.where(first <= second, jnp.array([1.0, -t]), jnp.array([t, 1.0]))
    return Ends(jnp.minimum(first, second), vector, jnp.maximum(first, second))


def _ends_3(A: jax.Array) -> Ends:
    """Deflation: first the eigenvalue farthest from the others, then the 2x2 rest.

    A = q I + p B with tr B = 0 and tr B^2 = 6.  The eigenvalues of B solve z^3 - 3 z = det B; the
    one with the sign of det B is isolated from the others, which may coincide.  So its eigenvector,
    a cross product of two rows of B - z I, is accurate to round-off, and so is what B does on the
    plane orthogonal to it.
    """
    q = jnp.trace(A) / 3
    B = _minus(A, q)
    p = square_root(jnp.sum(B * B) / 6)
    B = B / positive_or_one(p)
    r = jnp.clip(0.5 * jnp.linalg.det(B), -1.0, 1.0)
    z = jnp.where(r < 0, -1.0, 1.0) * _isolated_root(jnp.abs(r))

    first, second, third = _minus(B, z)
    u = jnp.cross(first, second)
    for other in (jnp.cross(second, third), jnp.cross(third, first)):
        u = jnp.where(other @ other > u @ u, other, u)
    u = _normalised(u)  # e_z for a multiple of the identity, when B = 0

    v = jnp.where(abs(u[0]) >= abs(u[1]), jnp.array([u[2], 0, -u[0]]), jnp.array([0, u[2], -u[1]]))
    v = _normalised(v)
    plane = jnp.stack([v, jnp.cross(u, v)])  # (2, 3)
    rest = _ends_2(plane @ B @ plane.T)
    smallest = jnp.where(r < 0, z, rest.smallest)
    vector = jnp.where(r < 0, u, rest.vector @ plane)
    largest = jnp.where(r < 0, rest.largest, z)
    return Ends(q + p * smallest, vector, q + p * largest)


def _isolated_root(r: jax.Array) -> jax.Array:
    """The root of z^3 - 3 z = 2 r in [sqrt 3, 2], for 0 <= r <= 1, by Newton's method.

    It is far from the other two.  The chord between the roots for r = 0 and r = 1 is off by less
    than 0.01, and three steps square that down to round-off.
    """
    z = 3**0.5 + (2 - 3**0.5) * r
    for _ in range(3):
        z = 2 * (z * z * z + r) / (3 * (z * z - 1))
    return z


def _minus(A: jax.Array, q: jax.Array) -> jax.Array:
    """A - q I, without products with the zeros of I."""
    return A - jnp.diag(jnp.full(3, q))


def _normalised(u: jax.Array) -> jax.Array:
    return u / jnp.sqrt(u @ u)


def largest_singular_value(A: jax.Array) -> jax.Array:
    if len(A) == 1:
        return jnp.abs(A[0, 0])
    if len(A) == 2:  # the two singular values are the sum and difference of these halves
        (a, b), (c, d) = A
        rotation = jnp.sqrt((a + d) ** 2 + (b - c) ** 2)
        reflection = jnp.sqrt((a - d) ** 2 + (b + c) ** 2)
        return 0.5 * (rotation + reflection)
    return jnp.sqrt(ends(A.T @ A).largest)


def positive_or_one(a: jax.Array) -> jax.Array:
    """A denominator for quotients whose numerator vanishes with it."""
    return jnp.where(a > 0, a, 1.0)


def square_root(a: jax.Array) -> jax.Array:
    """sqrt(a), with the derivative 0 instead of infinity at 0: gas at rest is differentiable."""
    zero = a == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, a)))
