"""Loops that stay loops: those that end by values of an element, and long ones."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.jaxpr import nested
from jaxmagma.programs.fallback import plain_calls
from tests.jaxprs import programs


RNG = np.random.default_rng(7)
MATRIX = RNG.uniform(-1, 1, (4, 4)) / 4
VECTORS = RNG.uniform(-1, 1, (33, 4))
MATRICES = RNG.uniform(-1, 1, (33, 3, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def root(a: Any) -> Any:
    """Newton's method for a root of a matrix, whose steps differ from element to element."""
    a = a @ a.T + np.eye(3)

    def step(state: Any) -> Any:
        x, count = state
        return (x + jnp.linalg.solve(x, a)) / 2, count + 1

    return lax.while_loop(lambda s: jnp.max(jnp.abs(s[0] @ s[0] - a)) > 1e-8, step, (a, 0))


def until_small(x: Any) -> Any:
    """What is carried are vectors, a number, a truth value and what is the same for all."""

    def step(state: Any) -> Any:
        x, size, is_first, number, same = state
        x = MATRIX @ jnp.tanh(x) + x / 2
        return x, x @ x, is_first & (size > 9), number + jnp.int8(1), same

    first = x, x @ x, True, jnp.int8(0), jnp.arange(3)
    return lax.while_loop(lambda s: (s[1] > 0.01) & (s[3] < 100), step, first)


def never(x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] > 5, lambda s: MATRIX @ s, x)


def within(x: Any) -> Any:
    """A loop inside of a loop, each of which ends by itself."""

    def step(x: Any) -> Any:
        return lax.while_loop(lambda y: y[0] > x[0] / 2, lambda y: y * 0.9 + (MATRIX @ y) / 9, x)

    return lax.while_loop(lambda x: jnp.max(x) > 0.05, lambda x: step(0.9 * jnp.abs(x)), abs(x))


def chosen(x: Any) -> Any:
    """A condition on an element in a step, and a number of steps that depends on it."""

    def step(state: Any) -> Any:
        n, x = state
        return n + 1, lax.cond(x[0] > 0, jnp.sin, lambda x: MATRIX @ x, x)

    return lax.while_loop(lambda s: s[0] < 3 + (x[1] > 0), step, (0, x))[1]


ENDING = {x.__name__: x for x in (root, until_small, never, within, chosen)}


def arguments(name: str) -> Any:
    return MATRICES if name == "root" else VECTORS


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-11) -> None:
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_allclose(one, other, tolerance, tolerance)


@pytest.mark.parametrize("name", ENDING)
def test_values_and_tangents_are_those_of_vmap(name: str) -> None:
    function, given = ENDING[name], arguments(name)
    assert_same(*(jax.jit(f(function))(given) for f in (jm.fuse, jax.vmap)))
    assert_same(*(f(function)(given[:2]) for f in (jm.fuse, jax.vmap)))

    def moved(x: Any) -> Any:
        return jax.tree.leaves(function(x))[0]

    along = RNG.uniform(-1, 1, given.shape)
    found, wanted = (jax.jvp(f(moved), (given,), (along,)) for f in (jm.fuse, jax.vmap))
    assert_same(found, wanted, 1e-9)


def loops_of(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The equations of all loops."""
    every = nested(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [x for x in every if x.primitive.name in ("while", "scan")]


@pytest.mark.parametrize("name", ["root", "until_small", "never"])
def test_a_step_is_one_program_and_nothing_else(name: str) -> None:
    """Not even the choice of who goes on."""
    (loop,) = loops_of(jm.fuse(ENDING[name]), arguments(name))
    body = loop.params["body_jaxpr"].jaxpr
    large = [x.primitive.name for x in body.eqns if any(v.aval.shape[1:] for v in x.outvars)]
    assert large == ["element_program"]
    assert not loop.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape


@pytest.mark.parametrize("name", ENDING)
def test_reason_says_that_it_is_a_loop(name: str) -> None:
    with plain_calls() as calls:
        jax.eval_shape(jm.fuse(ENDING[name]), arguments(name))
    assert "a loop that ends by values of an element" in calls[0].reason


def test_not_a_number_ends_a_loop_as_in_vmap() -> None:
    vectors = VECTORS.copy()
    vectors[3, 1], vectors[5, 0] = np.nan, np.inf

    def function(x: Any) -> Any:
        return lax.while_loop(lambda s: jnp.sum(s * s) > 1e-3, lambda s: MATRIX @ s, x)

    assert_same(*(jax.jit(f(function))(vectors) for f in (jm.fuse, jax.vmap)))


def test_what_is_not_taken_has_no_infinite_derivative() -> None:
    """An element that is done goes on in the kernel, with what it has."""

    def function(x: Any) -> Any:
        def step(state: Any) -> Any:
            x, left = state
            return MATRIX @ jnp.sqrt(left[0] * jnp.abs(x)) + x, left - 1

        return lax.while_loop(lambda s: s[1][0] > 0.5, step, (x, jnp.round(3 + x)))[0]

    along = RNG.uniform(-1, 1, VECTORS.shape)
    found, wanted = (jax.jvp(f(function), (VECTORS,), (along,)) for f in (jm.fuse, jax.vmap))
    assert np.all(np.isfinite(found[1]))
    assert_same(found, wanted, 1e-10)


def test_none_has_a_reverse_derivative() -> None:
    for transform in (jm.fuse, jax.vmap):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(lambda x, f=transform: f(never)(x).sum())(VECTORS)


def test_two_axes_of_elements() -> None:
    def both(transform: Callable[..., Any]) -> Any:
        inner = transform(lambda x, y: never(x) * until_small(y)[1])
        return jax.jit(jax.vmap(inner, (0, None)))(VECTORS[:30].reshape(3, 10, 4), VECTORS[:10])

    assert_same(both(jm.fuse), both(jax.vmap))
    (loop, *_) = loops_of(jax.vmap(jm.fuse(never)), VECTORS[:30].reshape(3, 10, 4))
    assert not loop.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape


def test_no_elements_and_one() -> None:
    for count in (0, 1):
        assert_same(*(jax.jit(f(until_small))(VECTORS[:count]) for f in (jm.fuse, jax.vmap)))


def test_what_happens_in_a_loop_happens_as_often(capfd: Any) -> None:
    def function(x: Any) -> Any:
        def step(x: Any) -> Any:
            jax.debug.print("step {}", x[0])
            return x / 2

        return lax.while_loop(lambda x: x[0] > 0.6, step, x)

    printed = []
    for transform in (jm.fuse, jax.vmap):
        jax.block_until_ready(transform(function)(abs(VECTORS)))
        jax.effects_barrier()
        printed.append(sorted(capfd.readouterr().out.split("\n")))
    assert printed[0] == printed[1]


# ---- Loops of many steps -------------------------------------------------------------------------


def oscillations(x: Any, *, length: int = 331, reverse: bool = False) -> Any:
    """What each step makes is kept, and each is given something."""
    given = jnp.sin(jnp.arange(length, dtype=x.dtype))

    def step(state: Any, force: Any) -> Any:
        x, count = state
        x = x + 0.01 * (jnp.tanh(MATRIX @ x) + force)
        return (x, count + 1), (x[:2], count)

    return lax.scan(step, (x, 0), given, reverse=reverse)


def averaged(x: Any, *, length: int = 5000) -> Any:
    """Nothing is stacked and nothing is given."""
    return lax.fori_loop(0, length, lambda _, y: 0.5 * (MATRIX @ y + x), x)


def special(x: Any, *, length: int = 17, reverse: bool = False) -> Any:
    """Each step is a program, what no kernel computes, and a program."""

    def step(x: Any, _: Any) -> Any:
        return MATRIX @ lax.bessel_i0e(2 + jnp.tanh(MATRIX @ x)), None

    return lax.scan(step, x, None, length, reverse)[0]


def until_known(x: Any, *, length: int = 3000) -> Any:
    """The number of steps is known, and large."""

    def step(state: Any) -> Any:
        return state[0] + 1, 0.5 * (MATRIX @ state[1] + x)

    return lax.while_loop(lambda state: state[0] < length, step, (0, x))[1]


SCANS: dict[str, Callable[..., Any]] = {
    "oscillations": oscillations,
    "oscillations in reverse": functools.partial(oscillations, reverse=True),
    "averaged": averaged,
    "special": special,
    "special in reverse": functools.partial(special, reverse=True),
}


@pytest.mark.parametrize("name", [*SCANS, "until known"])
def test_long_loops(name: str) -> None:
    function = SCANS.get(name, until_known)
    assert_same(*(jax.jit(f(function))(VECTORS) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("name", SCANS)
def test_gradients_of_long_loops(name: str) -> None:
    function = SCANS[name]

    def last(transform: Callable[..., Any], x: Any) -> Any:
        return sum(jnp.sum(y * y) for y in jax.tree.leaves(transform(function)(x)))

    gradients = (
        jax.jit(jax.grad(functools.partial(last, f)))(VECTORS) for f in (jm.fuse, jax.vmap)
    )
    assert_same(*gradients)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 300, 301, 2003])
def test_any_number_of_steps(length: int) -> None:
    """Several in a kernel, and what remains."""
    function = functools.partial(oscillations, length=length)
    assert_same(*(jax.jit(f(function))(VECTORS) for f in (jm.fuse, jax.vmap)))


def test_several_steps_are_one_program() -> None:
    """What a step reads and writes goes through memory once for all of them."""
    (loop,) = loops_of(jm.fuse(oscillations), VECTORS)
    assert loop.params["length"] < 331 // 4
    assert len(programs(jm.fuse(oscillations), VECTORS)) <= 2


def test_a_number_of_steps_that_is_traced() -> None:
    """The same for all elements, and not known: no kernel asks about the end."""

    def repeated(transform: Callable[..., Any], count: Any, x: Any) -> Any:
        return transform(lambda x: lax.fori_loop(0, count, lambda _, y: MATRIX @ jnp.sin(y), x))(x)

    for count in (0, 1, 9):
        found, wanted = (
            jax.jit(functools.partial(repeated, f))(count, VECTORS) for f in (jm.fuse, jax.vmap)
        )
        assert_same(found, wanted)
    (loop,) = loops_of(functools.partial(repeated, jm.fuse), 3, VECTORS)
    assert len(loop.params["cond_jaxpr"].jaxpr.eqns) == 1


def test_loops_of_xla_stay_as_they_are(loops: None) -> None:
    """A kernel would be no faster than what XLA has for a step."""

    def function(x: Any) -> Any:
        return MATRIX @ (lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, x[0]) * x)

    (loop,) = loops_of(jm.fuse(function), VECTORS)
    names = {x.primitive.name for x in loop.params["body_jaxpr"].jaxpr.eqns}
    assert "element_program" not in names
    assert_same(*(jax.jit(f(function))(VECTORS) for f in (jm.fuse, jax.vmap)))


@pytest.mark.parametrize("function", [until_small, within, chosen, oscillations, special])
def test_under_shard_map(function: Callable[..., Any]) -> None:
    """What is known, and so the same on all devices, is carried along with what is not."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(jm.fuse(function), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    found, wanted = (jax.jit(f)(VECTORS[:32]) for f in (sharded, jax.vmap(function)))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, 1e-11, 1e-11)


def test_what_no_kernel_does_is_not_written_out() -> None:
    """As it is in each step, there are as many kernels for one step at a time."""

    def function(x: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            many = jnp.sort(jnp.outer(x, jnp.arange(1.0, 17.0)).reshape(-1))
            return MATRIX @ many[::16] / 40 + x / 2, None

        return lax.scan(step, x, None, length=700)[0]

    (loop,) = (x for x in loops_of(jm.fuse(function), VECTORS) if x.params["length"] == 700)
    names = [x.primitive.name for x in loop.params["jaxpr"].jaxpr.eqns]
    assert names.count("sort") <= 1
    assert_same(*(jax.jit(f(function))(VECTORS) for f in (jm.fuse, jax.vmap)))
