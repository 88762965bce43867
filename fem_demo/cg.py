"""Preconditioned conjugate gradients for several right-hand sides at once.

The solution is differentiable by the implicit function theorem: the derivative of A^-1 b along db
is A^-1 db, another solve of the same kind, whatever iterations led to it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


Operator = Callable[[jax.Array], jax.Array]


class Solution(NamedTuple):
    x: jax.Array  # (m, ...)
    iterations: jax.Array  # (m,) int64, one application of the operator each


class _Iterate(NamedTuple):
    sweeps: jax.Array  # ()
    x: jax.Array  # (m, ...)
    residual: jax.Array  # (m, ...)
    direction: jax.Array  # (m, ...)
    product: jax.Array  # (m,), the inner product (z, r) of the preconditioned residual z
    iterations: jax.Array  # (m,)


def conjugate_gradients(
    operator: Operator,
    rhs: jax.Array,
    tolerance: jax.Array,
    max_iterations: jax.Array,
    inverse_diagonal: jax.Array | None = None,
) -> Solution:
    """Solves ``operator(x)[m] = rhs[m]`` for each m, from x = 0.

    System m stops when (z, r) <= tolerance^2 (z0, r0), with z = r * inverse_diagonal.  All systems
    share each application of the operator, but each has its own coefficients and its own test: a
    system that has met it takes steps of length zero from then on, so its iterates are those it
    would have had alone.

    The operator has to be symmetric and positive, where right-hand sides (and for derivatives also
    cotangents of the solution) come from.
    """
    x, iterations = lax.custom_linear_solve(
        operator,
        rhs,
        lambda matvec, b: _iterate(matvec, b, tolerance, max_iterations, inverse_diagonal),
        symmetric=True,
        has_aux=True,
    )
    return Solution(x, iterations)


def _iterate(
    operator: Operator,
    rhs: jax.Array,
    tolerance: jax.Array,
    max_iterations: jax.Array,
    inverse_diagonal: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(1, rhs.ndim))

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * b, axis=axes)  # (m,)

    def scale(coefficients: jax.Array, field: jax.Array) -> jax.Array:
        return jnp.expand_dims(coefficients, axes) * field

    def precondition(residual: jax.Array) -> jax.Array:
        return residual if inverse_diagonal is None else residual * inverse_diagonal

    def unfinished(it: _Iterate) -> jax.Array:
        return (it.sweeps < max_iterations) & jnp.any(it.product > target)

    def advance(it: _Iterate) -> _Iterate:
        active = it.product > target  # (m,); stays false, for a frozen residual does not change
        image = operator(it.direction)
        step = jnp.where(active, it.product / inner(it.direction, image), 0.0)
        x = it.x + scale(step, it.direction)
        residual = it.residual - scale(step, image)
        z = precondition(residual)
        product = inner(z, residual)
        momentum = jnp.where(active, product / it.product, 0.0)
        return _Iterate(
            it.sweeps + 1,
            x,
            residual,
            z + scale(momentum, it.direction),
            product,
            it.iterations + active.astype(it.iterations.dtype),
        )

    z0 = precondition(rhs)
    product0 = inner(z0, rhs)
    target = tolerance**2 * product0
    start = _Iterate(
        jnp.zeros((), max_iterations.dtype),
        jnp.zeros_like(rhs),
        rhs,
        z0,
        product0,
        jnp.zeros(rhs.shape[0], jnp.int64),
    )
    last = lax.while_loop(unfinished, advance, start)
    return last.x, last.iterations
