"""Pointwise functions: each is its ``jax.lax`` namesake, and differentiates as that does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from jaxmagma.programs.functions import COMPLEX_FUNCTIONS, FUNCTIONS, ROUNDINGS, evaluate
from tests.jaxprs import programs


# Arguments inside of every function's domain, away from kinks.
INSIDE = np.array([0.2, 0.35, 0.6, 0.85])
ABOVE_ONE = {"acosh"}
TRUTHS = ["lt", "le", "gt", "ge", "eq", "ne", "is_finite", "not", "and", "or", "xor"]
LAX = {name for name in FUNCTIONS if hasattr(lax, name)} - {"and", "or", "xor", "not", "select"}


def operands(name: str) -> list[jax.Array]:
    first = INSIDE + (1.0 if name in ABOVE_ONE else 0.0)
    return [jnp.asarray(np.roll(first, n) + 0.01 * n) for n in range(FUNCTIONS[name].operands)]


def test_names() -> None:
    assert len(LAX) > 35
    assert set(TRUTHS) <= set(FUNCTIONS) and set(COMPLEX_FUNCTIONS) <= set(FUNCTIONS)


@pytest.mark.parametrize("name", sorted(LAX))
def test_function_is_its_namesake(name: str) -> None:
    expected = getattr(lax, name)(*operands(name))
    found = FUNCTIONS[name].evaluate(*operands(name))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected.astype(np.float64))


@pytest.mark.parametrize("name", TRUTHS)
def test_truth_values_are_numbers(name: str) -> None:
    cases = [jnp.array([0.0, 0.0, 1.0, 1.0, 2.5]), jnp.array([0.0, 1.0, 0.0, 1.0, 2.5])]
    found = FUNCTIONS[name].evaluate(*cases[: FUNCTIONS[name].operands])
    assert found.dtype == np.float64
    assert set(found.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "expected"), [("and", [0, 0, 1]), ("or", [0, 1, 1]), ("xor", [0, 1, 0])]
)
def test_logic(name: str, expected: list[float]) -> None:
    a, b = jnp.array([0.0, 0.0, 2.0]), jnp.array([0.0, 3.0, 5.0])
    assert evaluate(name, a, b).tolist() == expected
    assert evaluate("not", a).tolist() == [1, 1, 0]


def test_select_and_rounding() -> None:
    which = jnp.array([0.0, 1.0, 2.0])
    assert evaluate("select", which, jnp.array(5.0), jnp.array(7.0)).tolist() == [5, 7, 7]
    halves = jnp.array([0.5, 1.5, -0.5, 2.5])
    assert evaluate("round_even", halves).tolist() == [0, 2, 0, 2]
    assert evaluate("round_away", halves).tolist() == [1, 2, -1, 3]


DIFFERENTIABLE = sorted(LAX - set(TRUTHS) - {"floor", "ceil", "sign", "rem", "eq", "ne"})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((x, np.float64) for x in DIFFERENTIABLE), *((x, np.float32) for x in DIFFERENTIABLE[::3])],
)
def test_fused_function_and_its_derivatives(name: str, dtype: Any) -> None:
    function: Callable[..., jax.Array] = getattr(lax, name)
    xs = [x.astype(dtype) for x in operands(name)]

    def derivatives(transform: Callable[..., Any]) -> Any:
        def value(*xs: jax.Array) -> jax.Array:
            return jnp.sum(jnp.cos(transform(function)(*xs)))

        def energy(*xs: jax.Array) -> Any:
            values, slopes = jax.value_and_grad(value, tuple(range(len(xs))))(*xs)
            return sum(jnp.sum(x) for x in slopes), (values, slopes)

        return jax.jit(jax.grad(energy, tuple(range(len(xs))), has_aux=True))(*xs)

    assert programs(jm.fuse(function), *xs)
    found, expected = derivatives(jm.fuse), derivatives(jax.vmap)
    eps = float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        # Second derivatives cancel: terms up to a hundred leave results of one.
        np.testing.assert_allclose(x, y, rtol=1e3 * eps, atol=1e3 * eps)


def test_nan_and_infinity_go_where_jax_lets_them_go() -> None:
    x = jnp.array([np.nan, np.inf, -np.inf, 0.0, -1.0, 1.0])

    def function(x: jax.Array) -> Any:
        return (
            jnp.maximum(x, 0.5), jnp.minimum(x, 0.5), jnp.clip(x, -2.0, 2.0), jnp.sign(x),
            jnp.sqrt(x), jnp.log(x), 1 / x, x * 0.0, jnp.where(jnp.isnan(x), 0.0, x), x < 0.5,
        )  # fmt: skip

    for found, expected in zip(jm.fuse(function)(x), jax.vmap(function)(x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_zeros_of_a_table_have_their_signs() -> None:
    table = np.array([0.0, -0.0, 0.0])

    def function(x: jax.Array) -> Any:
        zeros = jnp.where(x > 0, table, x)
        return jnp.arctan2(table, x), 1 / zeros, 1 / (x * table)

    x = jnp.array([[-1.0, -1.0, 2.0], [3.0, 4.0, -5.0]])
    for found, expected in zip(jm.fuse(function)(x), jax.vmap(function)(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("name", sorted(COMPLEX_FUNCTIONS - {*ROUNDINGS.values()}))
def test_complex(name: str) -> None:
    xs = [jax.lax.complex(x, 0.5 * x) for x in operands(name)]
    function = getattr(lax, name)
    np.testing.assert_allclose(jm.fuse(function)(*xs), function(*xs), rtol=1e-15)
