"""Exact arithmetic: rounded as its definition says, in a kernel and in plain JAX."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.exact import (
    difference_of_products,
    fused_multiply_add,
    inverse_binade,
    product_error,
)
from tests.einsums import assert_close


Array = np.ndarray
TYPES = (np.float64, np.float32)
POINTS = 8


def in_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Behind a contraction that changes nothing: without one XLA computes the program."""
    return jax.jit(
        jm.fuse(
            lambda *xs: function(
                *(jnp.einsum("pq,q->p", np.eye(POINTS, dtype=x.dtype), x) for x in xs)
            )
        )
    )


def run(function: Callable[..., Any], how: str, *xs: Array) -> Array:
    fields = [x.reshape(-1, POINTS) for x in xs]
    whole = in_kernel(function) if how == "kernel" else jax.jit(jax.vmap(function))
    return np.asarray(whole(*fields)).reshape(-1)


def numbers(dtype: Any, seed: int) -> Array:
    random = np.random.default_rng(seed)
    values = random.normal(size=400) * 2.0 ** random.integers(-20, 20, 400)
    return values.astype(dtype)


def exactly(x: Any) -> Fraction:
    return Fraction(float(x))


@pytest.mark.parametrize("how", ["kernel", "plain"])
@pytest.mark.parametrize("dtype", TYPES)
def test_rounding(how: str, dtype: Any) -> None:
    a, b, c, d = (numbers(dtype, seed) for seed in range(4))
    # Half of the sums cancel nearly all of the product.
    c[::2] = -(a * b)[::2]
    c[::4] = np.nextafter(c[::4], dtype(0))
    found = run(fused_multiply_add, how, a, b, c)
    for x, y, z, own in zip(a, b, c, found, strict=True):
        exact = exactly(x) * exactly(y) + exactly(z)
        assert abs(exactly(own) - exact) <= Fraction(float(np.spacing(abs(own)))) * Fraction(
            51, 100
        )
    error = run(product_error, how, a, b)
    for x, y, own in zip(a, b, error, strict=True):
        assert exactly(own) == exactly(x) * exactly(y) - exactly(dtype(x * y))
    d[::2] = (dtype(1) + 3 * np.finfo(dtype).eps) * a[::2]
    c[::2] = b[::2]
    difference = run(difference_of_products, how, a, b, c, d)
    for own, *of in zip(difference, a, b, c, d, strict=True):
        w, x, y, z = map(exactly, of)
        assert abs(exactly(own) - (w * x - y * z)) <= 2 * Fraction(float(np.spacing(abs(own))))


@pytest.mark.parametrize("how", ["kernel", "plain"])
@pytest.mark.parametrize("dtype", TYPES)
def test_binades(how: str, dtype: Any) -> None:
    info = np.finfo(dtype)
    powers = dtype(2) ** np.arange(info.minexp, info.maxexp - 1, dtype=dtype)
    some = np.random.default_rng(0).permutation(powers)[:200]
    a = np.concatenate([some, 1.75 * some, -some, np.nextafter(some, dtype(0))[some > info.tiny]])
    a = np.resize(a, -(-len(a) // POINTS) * POINTS).astype(dtype)
    scale = run(inverse_binade, how, a)
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    assert np.all((abs(a * scale) >= 1) & (abs(a * scale) < 2))
    others = np.array([0, -0.0, np.inf, np.nan, info.max, info.smallest_subnormal, 1, 1], dtype)
    assert np.isfinite(run(inverse_binade, how, others)).all()


def test_derivatives() -> None:
    a, b, c = np.random.default_rng(0).normal(size=(3, 40, POINTS))

    def function(a: Any, b: Any, c: Any) -> Any:
        a, b, c = (jnp.einsum("pq,q->p", np.eye(POINTS), x) for x in (a, b, c))
        total = fused_multiply_add(a, b, jnp.sin(c)) + 3 * product_error(a, c)
        return total * jnp.cos(inverse_binade(b))

    def plain(a: Any, b: Any, c: Any) -> Any:
        return (a * b + jnp.sin(c)) * jnp.cos(inverse_binade(b))

    def second(f: Any) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jax.grad(lambda *y: jnp.sum(jnp.sin(f(*y))), 1)(*xs)))

    for derivative in (lambda f: jax.grad(lambda *xs: jnp.sum(f(*xs)), (0, 1, 2)), second):
        assert_close(derivative(jm.fuse(function))(a, b, c), derivative(plain)(a, b, c))
        assert_close(derivative(jax.vmap(function))(a, b, c), derivative(plain)(a, b, c))
