"""Loops that add to what they carry, however that is written: they are what the plainest one is."""

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
TABLE = RNG.uniform(-1, 1, (9, 6))
X = RNG.uniform(0.5, 1, (7, 6))
Y = RNG.uniform(-1, 1, (7, 9))
EVEN, ODD = np.arange(0, 6, 2), np.arange(1, 6, 2)

Step = Callable[[Any, Any, Any], Any]

pytestmark = pytest.mark.usefixtures("standard_promotion")


def scanned(step: Step, first: Any = None, reverse: bool = False) -> Callable[..., Any]:
    def function(x: Any, y: Any) -> Any:
        start = jnp.zeros(6) if first is None else first(x)
        every = jnp.asarray(TABLE), y

        def one(total: Any, at: Any) -> Any:
            row, weight = at
            return step(total, weight * jnp.tanh(row @ x) * row, x), None

        return lax.scan(one, start, every, reverse=reverse)[0]

    return function


def counted(x: Any, y: Any) -> Any:
    def step(q: Any, total: Any) -> Any:
        row = jnp.asarray(TABLE)[q]
        return total - y[q] * jnp.tanh(row @ x) * row

    return lax.fori_loop(0, 9, step, jnp.zeros(6))


def down(x: Any, y: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        q, total = carry
        row = jnp.asarray(TABLE)[q]
        return (q - 1, total - y[q] * jnp.tanh(row @ x) * row), None

    return lax.scan(step, (8, jnp.zeros(6)), None, 9)[0][1]


# Each beside the plainest way to write the same.
ADDED = scanned(lambda total, made, x: total + made)
SUBTRACTED = scanned(lambda total, made, x: total + -made)
HALF = scanned(lambda total, made, x: total + jnp.concatenate([made[:3], jnp.zeros(3)]))
ALIKE = {
    "made + total": (scanned(lambda total, made, x: made + total), ADDED),
    "backwards": (scanned(lambda total, made, x: total + made, reverse=True), ADDED),
    "minus": (scanned(lambda total, made, x: total - made), SUBTRACTED),
    "counted": (counted, SUBTRACTED),
    "at[:].add": (scanned(lambda total, made, x: total.at[:].add(made)), ADDED),
    "at[:].subtract": (scanned(lambda total, made, x: total.at[:].subtract(made)), SUBTRACTED),
    "at[:3]": (scanned(lambda total, made, x: total.at[:3].add(made[:3])), HALF),
    "several": (
        scanned(lambda total, made, x: total - x * made + jnp.sin(made)),
        scanned(lambda total, made, x: total + (-(x * made) + jnp.sin(made))),
    ),
    "where": (
        scanned(lambda total, made, x: jnp.where(x[0] > 0.7, total + made, total)),
        scanned(lambda total, made, x: total + jnp.where(x[0] > 0.7, made, 0.0)),
    ),
    "either": (
        scanned(lambda total, made, x: jnp.where(made > 0, total + made, total - x * made)),
        scanned(lambda total, made, x: total + jnp.where(made > 0, made, -(x * made))),
    ),
    "from what is there": (
        scanned(lambda total, made, x: total - made, lambda x: x * x[0]),
        scanned(lambda total, made, x: total + -made, lambda x: x * x[0]),
    ),
}
# What is put together of parts is as many operations.
IN_PARTS = {
    "down": down,
    "at[::2], at[1::2]": scanned(
        lambda total, made, x: total.at[::2].add(made[::2]).at[1::2].add(made[1::2])
    ),
    "at[index]": scanned(
        lambda total, made, x: total.at[EVEN].add(made[EVEN]).at[ODD].subtract(made[ODD])
    ),
    "parts": scanned(
        lambda total, made, x: jnp.concatenate([total[:3] - made[:3], made[3:] + total[3:]])
    ),
    "rows": scanned(lambda total, made, x: (total.reshape(2, 3) + made.reshape(2, 3)).reshape(6)),
}
EVERY = IN_PARTS | {name: x for name, (x, _) in ALIKE.items()}


def per_leaf(x: Any, y: Any) -> Any:
    def step(carry: Any, at: Any) -> Any:
        row, weight = at
        made = weight * jnp.tanh(row @ x) * row
        up, down, part = carry
        return (up + made + made * x, down - jnp.sum(made), part.at[1:3].subtract(made[:2])), made

    return lax.scan(step, (x, x[0], jnp.zeros(4)), (jnp.asarray(TABLE), y))


def derivatives(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    def one(*arguments: Any) -> Any:
        return function(*arguments)[0]

    return [function, jax.jacfwd(function), jax.jacrev(function), jax.hessian(one)]


def assert_same(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, 1e-11, 1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_values_and_derivatives(name: str) -> None:
    for own in derivatives(EVERY[name]):
        fused, plain = (jax.jit(f(own)) for f in (jm.fuse, jax.vmap))
        assert len(programs(fused, X, Y)) == 1
        assert_same(fused(X, Y), plain(X, Y))


@pytest.mark.parametrize("name", ALIKE)
def test_is_the_program_of_the_plainest_spelling(name: str) -> None:
    for spelling, plainest in zip(*map(derivatives, ALIKE[name]), strict=True):
        found, wanted = (programs(jm.fuse(f), X, Y) for f in (spelling, plainest))
        assert [len(p.operations) for p in found] == [len(p.operations) for p in wanted]


def test_each_of_several_sums() -> None:
    assert len(programs(jm.fuse(per_leaf), X, Y)) == 1
    assert_same(*(jax.jit(f(per_leaf))(X, Y) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("function", [per_leaf, *EVERY.values()])
def test_gradients_of_the_whole(function: Callable[..., Any]) -> None:
    def total(f: Callable[..., Any], x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(z)) for z in jax.tree.leaves(f(function)(x, y)))

    assert_same(*(jax.grad(total, (1, 2))(f, X, Y) for f in (jm.fuse, jax.vmap)))


# ---- What is no sum ------------------------------------------------------------------------------


def _rounded(total: Any, made: Any, x: Any) -> Any:
    return (total.astype(np.float64) + 1e-3 * made).astype(np.float32)


MORE = {
    "from the other side": scanned(lambda total, made, x: made - total),
    "twice": scanned(lambda total, made, x: total + total + made),
    "moved": scanned(lambda total, made, x: total[::-1] + made),
    "moved by one": scanned(lambda total, made, x: jnp.roll(total, 1).at[0].add(made[0])),
    "one number": scanned(lambda total, made, x: jnp.broadcast_to(total[:1], (6,)) - made),
    "a choice by it": scanned(lambda total, made, x: jnp.where(total > 0, total + made, total)),
    "begins again": scanned(lambda total, made, x: jnp.where(made > 0.3, 0.0, total + made)),
    "spread": scanned(lambda total, made, x: jnp.sin(total[:, None] + made).mean(0)),
    "of all pairs": scanned(lambda total, made, x: jnp.diagonal(total - made[:, None])),
    "set": scanned(lambda total, made, x: total.at[:3].set(made[:3])),
    "part of itself": scanned(lambda total, made, x: total.at[:3].add(total[3:] * made[:3])),
    "rounded": scanned(_rounded, lambda x: x.astype(np.float32)),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_more_than_a_sum(name: str) -> None:
    for own in derivatives(MORE[name])[: 1 if name == "rounded" else 2]:
        assert_same(*(jax.jit(f(own))(X, Y) for f in (jm.fuse, jax.vmap)))


def test_sums_of_each_other() -> None:
    def function(x: Any, y: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            one, other = carry
            return (one - at * x, other + one), None

        def swap(carry: Any, at: Any) -> Any:
            one, other = carry
            return (other + at * x, one), None

        return [lax.scan(f, (x, x * x), y)[0] for f in (step, swap)]

    assert_same(*(jax.jit(f(function))(X, Y) for f in (jm.fuse, jax.vmap)))


# ---- Numbers at their ends -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("name", ["minus", "where", "at[:3]", "several"])
def test_few_steps(count: int, name: str) -> None:
    step = {
        "minus": lambda total, made: total - made,
        "where": lambda total, made: jnp.where(made > 0, total + made, total),
        "at[:3]": lambda total, made: total.at[:3].subtract(made[:3]),
        "several": lambda total, made: total - made + made * made,
    }[name]

    def function(x: Any, y: Any) -> Any:
        def one(q: Any, total: Any) -> Any:
            row = jnp.asarray(TABLE)[q]
            return step(total, y[q] * jnp.tanh(row @ x) * row)

        return lax.fori_loop(0, count, one, x)

    for own in derivatives(function)[:3]:
        assert_same(*(jax.jit(f(own))(X, Y) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_added_may_be_anything(value: float) -> None:
    """Where it is, the sum has it, and nowhere else."""

    def function(x: Any, y: Any) -> Any:
        def step(total: Any, at: Any) -> Any:
            row, weight = at
            made = jnp.tanh(row @ x) * row / weight
            return jnp.where(jnp.abs(weight) < 10, total - made, total), None

        return lax.scan(step, x, (jnp.asarray(TABLE), y))[0]

    y = Y.copy()
    y[2, 4], y[3, 5] = value, 0.0
    assert_same(*(jax.jit(f(function))(X, y) for f in (jm.fuse, jax.vmap)))
    assert np.isfinite(jm.fuse(function)(X, y)[2]).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_integers_wrap_around(dtype: Any) -> None:
    def function(x: Any, y: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            count, signs, total = carry
            signs = signs - jnp.where(at > 0, 3, 1).astype(dtype)
            return (count - dtype(100), signs, total - at * x), None

        return lax.scan(step, (dtype(7), dtype(2), x), y)[0]

    assert_same(*(jax.jit(f(function))(X, Y) for f in (jm.fuse, jax.vmap)))


def test_narrower_numbers() -> None:
    def function(x: Any, y: Any) -> Any:
        def step(carry: Any, at: Any) -> Any:
            few, many = carry
            return (few - at.astype(np.float32) * 2, many - at * x), None

        return lax.scan(step, (np.float32(1), x), y)[0]

    found, wanted = (jax.jit(f(function))(X, Y) for f in (jm.fuse, jax.vmap))
    assert found[0].dtype == wanted[0].dtype
    np.testing.assert_allclose(found[0], wanted[0], 1e-5, 1e-5)
    np.testing.assert_allclose(found[1], wanted[1], 1e-12, 1e-13)


def test_values_put_at_places_are_subtracted() -> None:
    """Outside of a loop, too."""

    def function(x: Any, y: Any) -> Any:
        where = jnp.asarray([1, 1, 4])
        return jnp.tanh(TABLE @ x).at[where].subtract(jnp.sin(TABLE[:3] @ x))

    assert programs(jm.fuse(function), X, Y)
    for own in derivatives(function)[:3]:
        assert_same(*(jax.jit(f(own))(X, Y) for f in (jm.fuse, jax.vmap)))
