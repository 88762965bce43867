"""Numbers whose digits are masked, as JAX does in derivatives of the normal distribution."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from jaxmagma.jaxpr import with_digits
from jaxmagma.programs.digits import keep_digits_p
from tests.einsums import assert_close
from tests.jaxprs import primitives, programs


Array = np.ndarray
Function = Callable[..., Any]
POINTS = 8
# Of each dtype: the bits of a number that JAX keeps where it squares that exactly.
MASKS: dict[Any, int] = {np.float64: 0xFFFFFFFFF8000000, np.float32: 0xFFFFF000, np.float16: 0xFFE0}


def masked(x: Any, mask: int | None = None) -> jax.Array:
    own = np.dtype(f"uint{8 * x.dtype.itemsize}")
    mask = MASKS[x.dtype.type] if mask is None else mask
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, own) & own.type(mask), x.dtype)


def in_kernel(function: Function) -> Function:
    """Behind a contraction that changes nothing: without one XLA computes the program."""
    return lambda x: function(jnp.einsum("pq,q->p", np.eye(POINTS, dtype=x.dtype), x))


def numbers(dtype: Any) -> Array:
    info, random = jnp.finfo(dtype), np.random.default_rng(0)
    exponents = random.integers(info.minexp, info.maxexp - 1, 400)
    values = (random.normal(size=400) * np.exp2(exponents.astype(float))).astype(dtype)
    values[::10] = (random.uniform(-1, 1, 40) * float(info.tiny)).astype(dtype)
    values[:8] = [0, -0.0, info.max, -info.max, info.tiny, 1, -2, 3]
    return values.reshape(-1, POINTS)


@pytest.mark.parametrize("dtype", MASKS)
def test_digits_are_masked(dtype: Any) -> None:
    function = in_kernel(lambda x: masked(x) + 0)
    x = numbers(dtype)
    (program,) = programs(jm.fuse(function), x)
    assert "bitcast_convert_type" not in primitives(jm.fuse(function), x)
    # Threads of XLA take subnormal numbers for zeros.
    found, own = np.asarray(jax.jit(jm.fuse(function))(x)), np.asarray(jax.vmap(masked)(x))
    tiny = float(jnp.finfo(dtype).tiny) if dtype != np.float16 else 0
    np.testing.assert_allclose(found, own, 0, tiny)
    assert program.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_infinities_stay_and_so_does_what_is_no_number(dtype: Any) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, 1, 0, -0.0, 2, 3]], dtype)
    found = jax.jit(jm.fuse(lambda x: masked(x) * jnp.ones(8, dtype)))(x)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(("dtype", "wide"), [(np.float32, np.float64), (np.float16, np.float32)])
def test_digits_of_a_narrower_dtype(dtype: Any, wide: Any) -> None:
    def function(x: jax.Array) -> jax.Array:
        fields = jnp.einsum("pq,q->p", np.eye(POINTS, dtype=wide), x.astype(wide))
        return masked(fields.astype(dtype)).astype(wide) * jnp.cos(fields * 0)

    x = numbers(dtype)
    (program,) = programs(jm.fuse(function), x)
    assert program.dtype == wide
    found, own = jax.jit(jm.fuse(function))(x), jax.vmap(masked)(x)
    tiny = float(jnp.finfo(dtype).tiny) if dtype != np.float16 else 0
    np.testing.assert_allclose(found, np.asarray(own).astype(wide), 0, tiny)


@pytest.mark.parametrize("mask", [2**64 - 1, 2**64 - 2, 2**64 - 2**52, 2**64 - 2**51 - 3])
def test_any_digits(mask: int) -> None:
    x = numbers(np.float64)
    function = in_kernel(lambda x: masked(x, mask) + 0)
    tiny = float(np.finfo(np.float64).tiny)
    np.testing.assert_allclose(jax.jit(jm.fuse(function))(x), masked(x, mask), 0, tiny)
    assert len(programs(jm.fuse(function), x)) == 1


@pytest.mark.parametrize("mask", [2**63 - 1, 2**63, 2**62 - 1, 0])
def test_other_bits_are_left_to_jax(mask: int) -> None:
    """The sign or the exponent is another one."""
    x = numbers(np.float64)
    function = in_kernel(lambda x: masked(x, mask) * 2)
    assert "bitcast_convert_type" in primitives(jm.fuse(function), x)
    expected = jax.vmap(lambda x: masked(x, mask) * 2)(x)
    np.testing.assert_array_equal(jm.fuse(function)(x), expected)


def test_bits_that_something_else_reads_stay() -> None:
    def function(x: Any) -> Any:
        bits = lax.bitcast_convert_type(x, np.uint64) & np.uint64(MASKS[np.float64])
        return lax.bitcast_convert_type(bits, np.float64), bits

    x = numbers(np.float64)
    closed = with_digits(jax.make_jaxpr(function)(x))
    assert [y.primitive.name for y in closed.jaxpr.eqns] == [
        "bitcast_convert_type",
        "and",
        "keep_digits",
    ]
    for found, expected in zip(jm.fuse(function)(x), function(x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_digits_of_plain_jax() -> None:
    x = numbers(np.float64)

    def kept(x: Any) -> Any:
        return keep_digits_p.bind(x, like=2 - 2.0**-25)

    for function in (kept, jax.jit(kept), jax.vmap(kept), jax.vmap(kept, 1, 1)):
        np.testing.assert_array_equal(function(x), masked(x))
    near = np.cos(np.arange(8.0))
    np.testing.assert_array_equal(jax.grad(lambda x: x @ kept(x))(near), kept(near))


def test_derivatives_of_what_is_masked() -> None:
    """Digits are constant nearly everywhere, as JAX has it."""
    x = np.random.default_rng(0).normal(size=(50, POINTS))

    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(masked(x) * x) @ jnp.cos(x)

    def derivatives(transform: Function) -> Any:
        whole = transform(in_kernel(function))
        first = jax.grad(lambda x: jnp.sum(whole(x)))
        return first(x), jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(x)

    for found, expected in zip(derivatives(jm.fuse), derivatives(jax.vmap), strict=True):
        assert_close(found, expected)


# ---- The normal distribution ---------------------------------------------------------------------

NORMAL: dict[str, Function] = {
    "erf": lax.erf,
    "erfc": lax.erfc,
    "ndtr": jax.scipy.special.ndtr,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NORMAL)
def test_derivatives_are_programs(name: str, dtype: Any) -> None:
    matrix = np.random.default_rng(1).normal(size=(5, POINTS)).astype(dtype)
    energy = lambda x: jnp.sum(NORMAL[name](matrix @ x) ** 2)  # noqa: E731
    x = np.random.default_rng(0).normal(size=(20, POINTS)).astype(dtype)
    tolerance = 1e3 * float(np.finfo(dtype).eps)
    for function in (jax.grad(energy), jax.hessian(energy), jax.jacrev(jax.grad(energy))):
        assert all(e.fused and not e.parts for e in explained(function, x))
        assert len(programs(jm.fuse(function), x)) == 1
        assert_close(jax.jit(jm.fuse(function))(x), jax.jit(jax.vmap(function))(x), tolerance)

    def gradient(transform: Function) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(transform(jax.grad(energy))(x))))(x)

    assert_close(gradient(jm.fuse), gradient(jax.vmap), tolerance)


def explained(function: Function, *arguments: Any) -> list[Any]:
    found = jm.explain(jm.fuse(function), *arguments, quiet=True)
    return list(found) if isinstance(found, tuple | list) else [found]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_slopes_far_out_have_all_digits(dtype: Any) -> None:
    """Of ``exp(-x * x)``, an error of the square would be hundreds of units of the last place."""
    x = np.linspace(-8, 26 if dtype == np.float64 else 9, 8 * 500).astype(dtype).reshape(-1, POINTS)
    x[0, :4] = [0, -0.0, np.inf, -np.inf]
    found = jax.jit(jm.fuse(in_kernel(jax.vmap(jax.grad(lax.erf)))))(x[1:])
    wide = x[1:].astype(np.longdouble)
    expected = 2 / np.sqrt(np.arctan(np.longdouble(1)) * 4) * np.exp(-wide * wide)
    plain = jax.jit(jax.vmap(jax.vmap(jax.grad(lax.erf))))(x[1:])
    eps = np.finfo(dtype).eps

    def error(slopes: Any) -> float:
        normal = expected > np.finfo(dtype).tiny
        return float(np.max(np.where(normal, abs(np.asarray(slopes) / expected - 1), 0)))

    assert error(found) <= max(8 * eps, 2 * error(plain))
    ends = jax.jit(jm.fuse(jax.vmap(jax.grad(lax.erf))))(x[:1])
    np.testing.assert_allclose(ends, jax.vmap(jax.vmap(jax.grad(lax.erf)))(x[:1]), 4 * eps)
