"""``while`` loops that end by what is known while a function is read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from tests.jaxprs import programs


RNG = np.random.default_rng(0)
MATRIX = RNG.uniform(-1, 1, (3, 3)) + 3 * np.eye(3)
LOADS = RNG.uniform(-1, 1, (7, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def newton(load: Any) -> Any:
    """Six steps towards the solution of a cubic system."""

    def step(state: Any) -> Any:
        x, count = state
        residual = x**3 + MATRIX @ x - load
        return x - jnp.linalg.solve(jnp.diag(3 * x**2) + MATRIX, residual), count + 1

    return lax.while_loop(lambda state: state[1] < 6, step, (load / 3, 0))[0]


def halves(load: Any) -> Any:
    """The end depends on what is carried by way of another number, which is a float."""

    def step(state: Any) -> Any:
        size, steps, x = state
        return size / 2, steps + 1, jnp.sin(MATRIX @ x) * size

    return lax.while_loop(lambda state: state[0] > 0.1, step, (1.0, 0, load))


def never(load: Any) -> Any:
    return lax.while_loop(lambda n: n[0] < 0, lambda n: (n[0] + 1, 2 * n[1]), (0, MATRIX @ load))


def times(count: Any, x: Any) -> Any:
    def step(state: Any) -> Any:
        return state[0] + 1, MATRIX @ state[1] / 4

    return lax.while_loop(lambda state: state[0] < count, step, (0, x))[1]


def nested(load: Any) -> Any:
    def step(state: Any) -> Any:
        return state[0] + 1, times(state[0], state[1])

    return lax.while_loop(lambda state: state[0] < 3, step, (0, load))[1]


COUNTED = [newton, halves, never, nested]


@pytest.mark.parametrize("function", COUNTED)
def test_is_one_program(function: Callable[..., Any]) -> None:
    assert len(programs(jm.fuse(function), LOADS)) == 1


def assert_same(function: Callable[..., Any]) -> None:
    for found, wanted in zip(
        *(jax.tree.leaves(jax.jit(f(function))(LOADS)) for f in (jm.fuse, jax.vmap)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, 1e-12, 1e-13)


@pytest.mark.parametrize("function", COUNTED)
def test_values_and_tangents(function: Callable[..., Any]) -> None:
    def last(load: Any) -> Any:
        return jax.tree.leaves(function(load))[-1]

    assert_same(function)
    along = RNG.uniform(-1, 1, LOADS.shape)
    found, wanted = (jax.jvp(f(last), (LOADS,), (along,))[1] for f in (jm.fuse, jax.vmap))
    np.testing.assert_allclose(found, wanted, 1e-11, 1e-12)


def test_there_is_no_reverse_derivative() -> None:
    for transform in (jm.fuse, jax.vmap):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(lambda x, f=transform: f(newton)(x).sum())(LOADS)


def endless(load: Any) -> Any:
    return times(1000, load)


def until_small(load: Any) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x * x) > 0.1, lambda x: MATRIX @ x / 8, load)


def differs_at_first(load: Any) -> Any:
    """The first step depends on the element, the others count."""

    def step(state: Any) -> Any:
        _, count, x = state
        return count.astype(load.dtype), count + 1, MATRIX @ x / 4

    return lax.while_loop(lambda state: state[0] < 0.2, step, (load[0], 0, load))


def ends_apart(load: Any) -> Any:
    """Known numbers are compared with one of the element."""
    return lax.while_loop(lambda n: n[0] < load[0], lambda n: (n[0] + 0.1, 2 * n[1]), (-1.0, load))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (endless, "a loop of more than"),
        (until_small, "a loop that ends by values of an element"),
        (differs_at_first, "a loop that ends by values of an element"),
        (ends_apart, "a loop that ends by values of an element"),
    ],
)
def test_others_are_plain(function: Callable[..., Any], reason: str) -> None:
    assert any(reason in str(x.reason) for x in jm.explain(jm.fuse(function), LOADS))
    assert_same(function)


def test_counts_wrap_as_integers_do() -> None:
    def wrapped(load: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0] + np.int8(9), MATRIX @ state[1] / 4

        return lax.while_loop(lambda state: state[0] > 0, step, (np.int8(100), load))

    assert_same(wrapped)
