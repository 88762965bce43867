"""Loops whose steps write what they make of a point into an array that is carried."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from tests.jaxprs import programs


RNG = np.random.default_rng()
TABLE = RNG.uniform(-1, 1, (8, 6))
X = RNG.uniform(-1, 1, (7, 6))
H = RNG.uniform(0, 1, (7, 8))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def law(row: Any, x: Any, h: Any) -> tuple[Any, Any]:
    made = jnp.tanh(row @ x) * (1 + h)
    return made * row, jnp.maximum(h, made)


def stacked(x: Any, h: Any) -> Any:
    def step(total: Any, at: Any) -> Any:
        force, after = law(at[0], x, at[1])
        return total - force, after

    return lax.scan(step, jnp.zeros(6), (jnp.asarray(TABLE), h))


def written(x: Any, h: Any) -> Any:
    def step(q: Any, carry: Any) -> Any:
        force, after = law(jnp.asarray(TABLE)[q], x, h[q])
        return carry[0] - force, carry[1].at[q].set(after)

    return lax.fori_loop(0, 8, step, (jnp.zeros(6), jnp.zeros(8)))


def in_place(x: Any, h: Any) -> Any:
    def step(q: Any, carry: Any) -> Any:
        force, after = law(jnp.asarray(TABLE)[q], x, carry[1][q])
        return carry[0] - force, carry[1].at[q].set(after)

    return lax.fori_loop(0, 8, step, (jnp.zeros(6), h))


def by_slices(x: Any, h: Any) -> Any:
    def step(q: Any, carry: Any) -> Any:
        own = lax.dynamic_index_in_dim(carry[1], q, keepdims=False)
        force, after = law(jnp.asarray(TABLE)[q], x, own)
        return carry[0] - force, lax.dynamic_update_index_in_dim(carry[1], after, q, 0)

    return lax.fori_loop(0, 8, step, (jnp.zeros(6), h))


ALIKE = [written, in_place, by_slices]


def columns(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        return made.at[:, q].set(jnp.sin(x[:3] * h[q]))

    return lax.fori_loop(0, 8, step, jnp.zeros((3, 8)))


def some_places(x: Any, h: Any) -> Any:
    """The others have what was there; no step goes beyond the end."""

    def step(q: Any, made: Any) -> Any:
        return made.at[1 + 2 * q].set(jnp.sin(TABLE[0] @ x * made[1 + 2 * q]))

    return lax.fori_loop(0, 6, step, h)


def by_table(x: Any, h: Any) -> Any:
    def step(made: Any, at: Any) -> Any:
        place, row = at
        return made.at[place].set(jnp.sin(row @ x)), made[place]

    return lax.scan(step, h, (jnp.asarray([3, 0, 6, 5]), jnp.asarray(TABLE[:4])), reverse=True)


# What some step writes another one reads or writes again.


def recursion(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        return made.at[q].set(jnp.sin(made[q - 1] + jnp.asarray(TABLE)[q] @ x))

    return lax.fori_loop(1, 8, step, h)


def ahead(x: Any, h: Any) -> Any:
    """What a later step writes is what was given still."""

    def step(q: Any, made: Any) -> Any:
        return made.at[q].set(jnp.sin(made[q + 1] + jnp.asarray(TABLE)[q] @ x))

    return lax.fori_loop(0, 7, step, h)


def again(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        return made.at[q // 2].set(jnp.sin(jnp.asarray(TABLE)[q] @ x))

    return lax.fori_loop(0, 8, step, h)


def twice(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        made = made.at[q].set(jnp.sin(jnp.asarray(TABLE)[q] @ x))
        return made.at[7 - q].set(2 * made[q])

    return lax.fori_loop(0, 8, step, h)


def by_values(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        return made.at[jnp.argmax(x) + q].set(jnp.sin(jnp.asarray(TABLE)[q] @ x))

    return lax.fori_loop(0, 4, step, h)


def added_after(x: Any, h: Any) -> Any:
    def step(q: Any, made: Any) -> Any:
        return made.at[q].set(jnp.sin(jnp.asarray(TABLE)[q] @ x)) + x[0]

    return lax.fori_loop(0, 8, step, h)


EVERY = [*ALIKE, columns, some_places, by_table, recursion, ahead, again, twice, by_values]


def assert_same(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, 1e-11, 1e-12)


@pytest.mark.parametrize("function", [*EVERY, added_after])
def test_values_and_derivatives(function: Callable[..., Any]) -> None:
    for own in (function, jax.jacfwd(function), jax.jacrev(function)):
        assert_same(*(jax.jit(f(own))(X, H) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("function", EVERY)
def test_gradients_of_the_whole(function: Callable[..., Any]) -> None:
    def total(f: Callable[..., Any], x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(z)) for z in jax.tree.leaves(f(function)(x, y)))

    assert_same(*(jax.grad(total, (1, 2))(f, X, H) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("function", [*ALIKE, jax.jacfwd(written)])
def test_is_the_program_of_a_loop_that_stacks(function: Callable[..., Any]) -> None:
    plain = stacked if function in ALIKE else jax.jacfwd(stacked)
    (found,), (wanted,) = (programs(jm.fuse(f), X, H) for f in (function, plain))
    assert len(found.operations) == len(wanted.operations)


def test_rows_at_the_index_are_rows_that_are_scanned() -> None:
    rows = RNG.uniform(-1, 1, (7, 8, 5))

    def by_index(h: Any) -> Any:
        def step(q: Any, carry: Any) -> Any:
            made = jnp.sin(h[q]) * jnp.sum(h[q])
            return carry[0] - made, carry[1].at[q].set(made)

        return lax.fori_loop(0, 8, step, (jnp.zeros(5), jnp.zeros((8, 5))))

    def by_scan(h: Any) -> Any:
        def step(total: Any, row: Any) -> Any:
            made = jnp.sin(row) * jnp.sum(row)
            return total - made, made

        return lax.scan(step, jnp.zeros(5), h)

    (found,), (wanted,) = (programs(jm.fuse(f), rows) for f in (by_index, by_scan))
    assert len(found.operations) == len(wanted.operations)
    assert_same(*(jax.jit(f(by_index))(rows) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_steps(count: int) -> None:
    def function(x: Any, h: Any) -> Any:
        def step(q: Any, carry: Any) -> Any:
            force, after = law(jnp.asarray(TABLE)[q], x, carry[1][q])
            return carry[0] - force, carry[1].at[q].set(after)

        return lax.fori_loop(0, count, step, (jnp.zeros(6), h))

    assert_same(*(jax.jit(f(function))(X, H) for f in (jm.fuse, jax.vmap)))
