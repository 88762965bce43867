"""Loops whose steps do not need each other: what they compute, in programs of one step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from tests import jaxprs


RNG = np.random.default_rng(0)
TABLE, WEIGHTS = RNG.uniform(-1, 1, (9, 5)), RNG.uniform(0, 1, 9)
X = RNG.uniform(-1, 1, (6, 5))
Y = RNG.uniform(-1, 1, (6, 9))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def point(row: Any, weight: Any, x: Any) -> Any:
    return weight * jnp.tanh(row @ x) * row


def by_vmap(x: Any, y: Any) -> Any:
    return jax.vmap(point, (0, 0, None))(TABLE, y, x).sum(0)


def by_scan(x: Any, y: Any) -> Any:
    def step(total: Any, at: Any) -> Any:
        row, weight = at
        return total + point(row, weight, x), None

    return lax.scan(step, jnp.zeros(5), (jnp.asarray(TABLE), y))[0]


def by_fori(x: Any, y: Any) -> Any:
    def step(q: Any, total: Any) -> Any:
        return total + point(jnp.asarray(TABLE)[q], y[q], x)

    return lax.fori_loop(0, 9, step, jnp.zeros(5))


def backwards(x: Any, y: Any) -> Any:
    def step(carry: Any, at: Any) -> Any:
        count, total = carry
        made = point(at, y[count], x)
        return (count - 1, made + total), made[0]

    start = jnp.asarray(8), jnp.zeros(5)
    (count, total), first = lax.scan(step, start, jnp.asarray(TABLE), reverse=True)
    return total, first, count


def from_what_is_there(x: Any, y: Any) -> Any:
    def step(carry: Any, at: Any) -> Any:
        kept, total, square = carry
        return (kept, total + at * kept, square + jnp.sin(at) ** 2), at * kept[0]

    return lax.scan(step, (x, x * x, y[0]), y[:4])


def mapped(x: Any, y: Any) -> Any:
    return lax.map(lambda w: jnp.exp(w) * x, y)


def every_second(x: Any, y: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        place, total = carry
        return (place + 2, total + y[place] * x[0]), None

    return lax.scan(step, (1, 0.0), None, length=4)[0][1]


def powers(x: Any, y: Any) -> Any:
    """Each step needs the one before."""

    def step(carry: Any, at: Any) -> Any:
        power, total = carry
        return (power * x, total + at * power), None

    return lax.scan(step, (x, jnp.zeros(5)), y[:4])[0]


def reads_its_sum(x: Any, y: Any) -> Any:
    """So the sum is more than a sum."""

    def step(total: Any, at: Any) -> Any:
        return total + at * jnp.cos(total), total

    return lax.scan(step, x, y[:4])


def force(x: Any, y: Any) -> Any:
    """The derivative of a loop."""

    def energy(x: Any) -> Any:
        def step(q: Any, total: Any) -> Any:
            return total + y[q] * jnp.log1p((jnp.asarray(TABLE)[q] @ x) ** 2)

        return lax.fori_loop(0, 9, step, 0.0)

    return jax.grad(energy)(x)


def never_counts(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 100, lambda _, total: total + x * y[0], x)


CASES = [by_scan, by_fori, backwards, from_what_is_there, mapped, every_second, force, never_counts]


@pytest.mark.parametrize("function", [*CASES, powers, reads_its_sum])
def test_values(function: Callable[..., Any]) -> None:
    found, wanted = (jax.jit(f(function))(X, Y) for f in (jm.fuse, jax.vmap))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, 1e-12, 1e-13)


@pytest.mark.parametrize("function", [by_scan, by_fori, from_what_is_there])
def test_gradients(function: Callable[..., Any]) -> None:
    def total(f: Callable[..., Any], x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(z)) for z in jax.tree.leaves(f(function)(x, y)))

    found, wanted = (jax.grad(total, (1, 2))(f, X, Y) for f in (jm.fuse, jax.vmap))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, 1e-11, 1e-12)


@pytest.mark.parametrize("function", [by_scan, by_fori])
def test_a_quadrature_is_one_program_however_it_is_written(function: Callable[..., Any]) -> None:
    sizes = []
    for spelling in (function, by_vmap):
        (program,) = jaxprs.programs(jm.fuse(spelling), X, Y)
        sizes.append(len(program.operations))
    assert sizes[0] == sizes[1]


def test_many_steps() -> None:
    """More than are read one after the other."""
    table = RNG.uniform(-1, 1, (200, 5))

    def function(x: Any) -> Any:
        def step(k: Any, total: Any) -> Any:
            return total + jnp.sin(jnp.asarray(table)[k] @ x)

        return lax.fori_loop(0, 200, step, 0.0)

    assert jaxprs.programs(jm.fuse(function), X)
    np.testing.assert_allclose(jm.fuse(function)(X), np.sin(X @ table.T).sum(1), 1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite(value: float) -> None:
    y = Y.copy()
    y[2, 4] = value
    np.testing.assert_array_equal(
        np.isfinite(jm.fuse(by_scan)(X, y)), np.isfinite(jax.vmap(by_scan)(X, y))
    )
