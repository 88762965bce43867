"""Rules of differentiation inside of fused functions: JAX's derivatives, as kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from tests.einsums import normal
from tests.jaxprs import primitives, programs


GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]

ELEMENTS, SIZE = 5, 7
DOFS = np.array([[0, 1, 2], [2, 3, 4], [1, 3, 5], [0, 4, 5], [2, 5, 6]])
MATRIX = np.random.default_rng(0).uniform(-1, 1, (3, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


# ---- Functions -----------------------------------------------------------------------------------
# Rules that are wrong show whether they are used.


@jax.custom_jvp
def inner(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@inner.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dot,) = primals, tangents
    return inner(x), 3 * jnp.cos(x) * dot


@jax.custom_jvp
def outer(x: jax.Array) -> jax.Array:
    return inner(x) ** 2


@outer.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dot,) = primals, tangents
    return outer(x), (inner(x) + outer(x)) * dot


def power(k: int, x: jax.Array) -> jax.Array:
    return x**k


own_power: Any = jax.custom_jvp(power, nondiff_argnums=(0,))


@own_power.defjvp
def _(k: int, primals: Any, tangents: Any) -> Any:
    return power(k, primals[0]), 5 * primals[0] * tangents[0]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """The identity, with a small gradient."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.3, 0.3),))


@jax.custom_vjp
def reverse(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * y, jnp.sin(x)


reverse.defvjp(
    lambda x, y: ((x * y, jnp.sin(x)), (x, y)),
    lambda saved, ct: (ct[0] * saved[1] + 2 * ct[1], 5 * ct[0] * saved[0]),
)


def matrix(x: jax.Array) -> jax.Array:
    return jnp.asarray(MATRIX, x.dtype) @ x


def looped(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 2, lambda _, c: outer(matrix(c)) + x, x)


# Of a vector; and whether they have a forward mode.
RULES: dict[str, tuple[Function, bool]] = {
    "relu": (lambda x: jax.nn.relu(matrix(x)) * x, True),
    "silu": (lambda x: jax.nn.silu(matrix(x)), True),
    "softplus": (lambda x: jax.nn.softplus(matrix(x)) * x, True),
    "softmax": (lambda x: jax.nn.softmax(matrix(x)), True),
    "stop_gradient": (lambda x: jax.lax.stop_gradient(jnp.sin(matrix(x))) * x * x, True),
    "where": (lambda x: jnp.where(x > 0, jnp.sin(x), jax.lax.stop_gradient(x) * x), True),
    "a condition": (lambda x: jax.lax.cond(x[0] > 0, lambda y: y * jnp.sin(y), jnp.exp, x), True),
    "maximum": (lambda x: jnp.max(matrix(x)) * jnp.sin(x), True),
    "ties": (lambda x: jnp.max(jnp.round(x)) * x + jnp.min(jnp.abs(x - x[0])) * x, True),
    "maximum so far": (lambda x: jax.lax.cummax(x * x) * x, True),
    "clamp": (lambda x: jax.lax.clamp(-0.5 + 0 * x, matrix(x), 0.5 + 0 * x) * x**2, True),
    "clamp at a bound": (lambda x: jax.lax.clamp(x[0], x, x[2]) * x, True),
    "scatter": (
        lambda x: x.at[np.array([0, 1])].multiply(matrix(x)[1:], unique_indices=True) * x, True
    ),
    "best at places": (lambda x: x.at[np.array([0, 2, 2])].max(jnp.round(matrix(x))) * x, True),
    "best at computed places": (
        lambda x: jnp.zeros(2).at[(matrix(x) > 0).astype(int)].min(x)[:, None] * matrix(x), True
    ),
    "custom_jvp": (lambda x: inner(matrix(x)) * x, True),
    "custom_jvp in custom_jvp": (lambda x: outer(matrix(x)) * x, True),
    # Which rules in loops JAX 0.10 loses is another matter for each order of modes.
    "custom_jvp in a loop": (looped, False),
    "nondiff_argnums": (lambda x: own_power(3, matrix(x)) * x, True),
    "checkpoint": (jax.checkpoint(lambda x: outer(matrix(x)) * jax.nn.silu(x)), True),
    "custom_vjp": (lambda x: clipped(jnp.sin(matrix(x))) * x, False),
    "several results": (lambda x: reverse(matrix(x), jax.nn.relu(x)), False),
    "both": (lambda x: outer(clipped(matrix(x))) * jnp.max(x), False),
}  # fmt: skip


def ordered(x: jax.Array) -> jax.Array:
    """The values in order, by a sort of so many that it is no operation of a kernel."""
    return jnp.sort(jnp.tile(x, 11))[::11]


SPLIT: dict[str, tuple[Function, bool]] = {
    "sort": (lambda x: jax.nn.relu(ordered(outer(matrix(x)))) * inner(x), True),
    "sort inside": (lambda x: jax.nn.silu(ordered(matrix(x)) * jnp.max(x)) + matrix(x), True),
    "sort beside custom_vjp": (lambda x: clipped(ordered(matrix(x))) * inner(x), False),
}
EVERY = RULES | SPLIT
DERIVED = ["relu", "custom_jvp in custom_jvp", "maximum", "several results", "sort inside"]


def energy_of(function: Function) -> Function:
    def energy(*arguments: Any) -> jax.Array:
        return jnp.asarray(sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*arguments))))

    return energy


def derivatives(function: Function, name: str, x: jax.Array) -> Any:
    """Values, first and second derivatives, of ``DERIVED`` in every order of modes.

    Others have by turns one order beside that of reverse mode alone.
    """
    energy, along = energy_of(function), jnp.cos(3 * x)
    gradient = jax.grad(energy)

    def slope(x: jax.Array) -> jax.Array:
        return jax.jvp(energy, (x,), (along,))[1]

    def everything(x: jax.Array) -> Any:
        found = [function(x), gradient(x), jax.grad(energy_of(gradient))(x)]
        if EVERY[name][1]:
            orders = [
                lambda x: jax.jvp(gradient, (x,), (along,)),
                lambda x: jax.jvp(slope, (x,), (along,)),
                jax.grad(slope),
            ]
            turn = list(EVERY).index(name) % 3
            found += [order(x) for order in (orders if name in DERIVED else orders[turn:][:1])]
            found += [jax.linearize(function, x)[1](along)]
        return found

    return jax.jit(everything)(x)


def assert_same(found: Any, expected: Any, dtype: Any) -> None:
    tolerance = 1e-10 if dtype == np.float64 else 2e-4
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def pulled(function: Function) -> Function:
    return lambda x: jax.vjp(function, x)[1](jax.tree.map(jnp.ones_like, function(x)))


# ---- Derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float64) for name in EVERY), ("several results", np.float32)],
)
def test_derivatives_are_those_of_vmap(name: str, dtype: Any, getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3), dtype)
    found, expected = (derivatives(f(EVERY[name][0]), name, x) for f in (jm.fuse, jax.vmap))
    assert_same(found, expected, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((x, np.float64) for x in DERIVED if x != "several results"),
        ("several results", np.float32),
    ],
)
def test_behind_a_gather(name: str, dtype: Any, getkey: GetKey) -> None:
    vector = normal(getkey(), (SIZE,), dtype)
    first = lambda x: jax.tree.leaves(EVERY[name][0](x))[0]  # noqa: E731
    fused = jm.fuse(first, jm.gather(DOFS), jm.scatter_add(DOFS, SIZE))

    def plain(vector: jax.Array) -> jax.Array:
        return jnp.zeros(SIZE, dtype).at[DOFS].add(jax.vmap(first)(vector[DOFS]))

    found, expected = (derivatives(f, name, vector) for f in (fused, plain))
    assert_same(found, expected, dtype)


@pytest.mark.parametrize("name", DERIVED)
def test_third_derivatives_and_those_under_transformations(name: str, getkey: GetKey) -> None:
    x = normal(getkey(), (2, ELEMENTS, 3))
    function, forward = EVERY[name]

    def everything(transform: Function) -> Any:
        energy = energy_of(transform(function))
        second = jax.grad(energy_of(jax.grad(energy)))
        kept = jax.grad(energy_of(jax.checkpoint(transform(function))))
        step = lambda x, _: (x - 0.1 * jax.grad(energy)(x), None)  # noqa: E731

        def of_all(x: jax.Array) -> Any:
            found = [jax.grad(energy_of(second))(x[0]), jax.vmap(second)(x), kept(x[0])]
            found += [jax.lax.scan(step, x[0], length=2)[0]]
            return [*found, jax.hessian(energy)(x[0])] if forward else found

        return jax.jit(of_all)(x)

    assert_same(everything(jm.fuse), everything(jax.vmap), np.float64)


@pytest.mark.parametrize("size", [3, 7, 12])
def test_a_maximum_is_one_of_its_values_in_every_program(size: int, getkey: GetKey) -> None:
    """Sums in another order, or by plain JAX, make others; then the gradient were that of none."""
    table, x = normal(getkey(), (5, size)), normal(getkey(), (ELEMENTS, size))

    def curvature(transform: Function) -> jax.Array:
        energy = energy_of(transform(lambda x: jnp.max(table @ x) * jnp.sin(x)))
        return jax.jit(jax.hessian(energy))(x)

    assert_same(curvature(jm.fuse), curvature(jax.vmap), np.float64)


def test_shared_and_integer_arguments(getkey: GetKey) -> None:
    x, y = normal(getkey(), (ELEMENTS, 3)), normal(getkey(), (3,))
    k = jnp.arange(ELEMENTS) % 2

    def function(x: jax.Array, y: jax.Array, k: jax.Array) -> jax.Array:
        return clipped(inner(x * y)) * jnp.max(y) * k.astype(x.dtype)

    def gradient(transform: Function) -> Any:
        energy = energy_of(transform(function, (0, None, 0)))
        return jax.jit(jax.grad(energy, (0, 1)))(x, y, k)

    assert_same(gradient(jm.fuse), gradient(jax.vmap), np.float64)


def test_what_has_no_tangent_has_none_in_the_derivative(getkey: GetKey) -> None:
    """Zero times infinity is no zero."""
    x = normal(getkey(), (ELEMENTS, 3))
    function = lambda x, y: inner(x) * jnp.max(x) + jnp.sqrt(y - y)  # noqa: E731
    found, expected = (
        jax.grad(lambda x, f=f: energy_of(f(function))(x, jnp.ones_like(x)))(x)
        for f in (jm.fuse, jax.vmap)
    )
    assert np.isfinite(expected).all()
    assert_same(found, expected, np.float64)


# ---- Forward mode of reverse rules ---------------------------------------------------------------


def half_reverse(x: jax.Array, y: jax.Array) -> jax.Array:
    return clipped(x * x) * jax.nn.relu(y) * jnp.max(y)


@pytest.mark.parametrize(
    "stopped",
    [
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jax.lax.clamp(x, x * x, jax.lax.stop_gradient(x)) * 0 + jnp.round(x),
        lambda x: jax.lax.stop_gradient(jnp.max(x)) + jnp.sign(x),
    ],
)
def test_what_is_stopped_has_no_tangent_behind_the_program(stopped: Function) -> None:
    """Zero times the infinite derivative of what comes next would be NaN."""

    def function(x: jax.Array) -> Any:
        y = jax.lax.stop_gradient(stopped(x))
        return jax.lax.rsqrt(y, accuracy=jax.lax.Tolerance(0.0, 1e-9, 0)), jnp.max(x) * x

    x = np.array([[-1.0, -0.0, 2.0], [0.0, -3.0, -2.0]])
    for derive in (
        lambda f: jax.jvp(f, (x,), (np.cos(x),)),
        lambda f: jax.jit(lambda x: jax.vjp(f, x)[1](f(x)))(x),
        lambda f: jax.jvp(jax.vmap(f), (x[None],), (np.cos(x)[None],)),
        lambda f: jax.jvp(jax.checkpoint(f), (x,), (np.cos(x),)),
    ):
        found, expected = (jax.tree.leaves(derive(f(function))) for f in (jm.fuse, jax.vmap))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-12)


def test_what_all_elements_share_is_shared_beside_a_rule() -> None:
    def element(x: jax.Array, shared: jax.Array) -> Any:
        return clipped(jnp.sin(x)) * jnp.max(x), jnp.bitwise_not(shared)

    def gradient(transform: Function, x: jax.Array, shared: jax.Array) -> Any:
        over = transform(element, in_axes=(0, None), out_axes=(0, None))
        made, pull, others = jax.vjp(lambda x: over(x, shared), x, has_aux=True)
        return pull(made)[0], others

    x, shared = np.cos(np.arange(6.0).reshape(2, 3)), np.array(False)
    for wrapped in (lambda f: f, jax.jit):
        found, expected = (
            wrapped(functools.partial(gradient, transform))(x, shared)
            for transform in (jm.fuse, jax.vmap)
        )
        np.testing.assert_allclose(found[0], expected[0], 1e-12)
        assert found[1].shape == expected[1].shape == ()


def test_each_cotangent_counts_once_of_what_all_elements_share(getkey: GetKey) -> None:
    """There vmap counts them too often, or raises an error."""
    x, ys = normal(getkey(), (3,)), normal(getkey(), (ELEMENTS, 3))
    weights = normal(getkey(), (2, ELEMENTS, 3))

    def one_by_one(x: jax.Array, ys: jax.Array) -> Any:
        return [jnp.stack(results) for results in zip(*(reverse(x, y) for y in ys), strict=True)]

    found, expected = (
        jax.grad(lambda x, f=f: jnp.sum(weights * jnp.stack(f(x, ys))))(x)
        for f in (jm.fuse(reverse, in_axes=(None, 0)), one_by_one)
    )
    np.testing.assert_allclose(found, expected, 1e-12)


def test_second_derivatives_of_the_error_function_at_infinity() -> None:
    x = jnp.array([[-np.inf, np.inf, 0.5]])
    for function, sign in ((jax.lax.erf, 1.0), (jax.lax.erfc, -1.0)):
        slope = jax.grad(lambda x, f=function: jnp.sum(jm.fuse(lambda x: f(x))(x)))
        found = jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]
        expected = -sign * 2 / np.pi**0.5 * np.exp(-0.25)
        np.testing.assert_allclose(found, [[0.0, 0.0, expected]], 1e-12)


def test_forward_mode_where_no_tangent_reaches_a_reverse_rule(getkey: GetKey) -> None:
    x, y = normal(getkey(), (ELEMENTS, 3)), normal(getkey(), (ELEMENTS, 3))
    found, expected = (
        jax.jit(lambda y, f=f: jax.jvp(lambda y: f(half_reverse)(x, y), (y,), (x,)))(y)
        for f in (jm.fuse, jax.vmap)
    )
    assert_same(found, expected, np.float64)


@pytest.mark.parametrize("jit", [False, True])
def test_forward_mode_of_a_reverse_rule_is_an_error(jit: bool, getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3))
    for transform in (jax.vmap, jm.fuse):
        push = lambda x, f=transform: jax.jvp(lambda x: f(half_reverse)(x, x), (x,), (x,))  # noqa: E731
        with pytest.raises(TypeError, match="forward-mode autodiff"):
            (jax.jit(push) if jit else push)(x)


def test_collectives_in_a_reverse_rule(getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3))

    @jax.custom_vjp
    def centred(x: jax.Array) -> jax.Array:
        return x - jax.lax.pmean(jnp.sin(x), "e")

    centred.defvjp(
        lambda x: (centred(x), x),
        lambda x, ct: (3 * ct * jnp.cos(x) - jax.lax.psum(ct, "e"),),
    )
    found, expected = (
        jax.jit(jax.grad(energy_of(f(lambda x: centred(matrix(x)) * x, axis_name="e"))))(x)
        for f in (jm.fuse, jax.vmap)
    )
    assert_same(found, expected, np.float64)


def test_reverse_rules_under_shard_map(getkey: GetKey) -> None:
    """What all devices share gets the sum of their cotangents."""
    x, y = normal(getkey(), (8, 3)), normal(getkey(), (3,))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return clipped(matrix(x * y)) * jax.nn.softplus(x)

    def sharded(x: jax.Array, y: jax.Array) -> Any:
        fused = jm.fuse(function, (0, None))
        return jax.shard_map(fused, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(x, y)

    found = jax.jit(jax.grad(energy_of(sharded), (0, 1)))(x, y)
    expected = jax.grad(energy_of(jax.vmap(function, (0, None))), (0, 1))(x, y)
    assert_same(found, expected, np.float64)


# ---- As kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_gradient_is_two_programs_and_nothing_else(name: str, getkey: GetKey) -> None:
    """The values, with what the rules need of them; and the gradient."""
    x = normal(getkey(), (ELEMENTS, 3))
    gradient = pulled(jm.fuse(RULES[name][0]))
    calls = {"custom_jvp_call", "jit", "pjit", "stop_gradient", "convert_element_type"}
    made = [x for x in primitives(gradient, x) if x not in calls]
    # The cotangents are ones, in the shapes of another call's results.
    assert set(made) <= {"element_program", "broadcast_in_dim"}
    assert made.count("element_program") == 3


@pytest.mark.parametrize("name", SPLIT)
def test_what_splits_a_function_splits_its_gradient(name: str, getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3))
    made = set(primitives(pulled(jm.fuse(SPLIT[name][0])), x))
    # Sorting, and putting back what was sorted; nothing is computed in plain JAX.
    assert made.isdisjoint({"mul", "sin", "cos", "tanh", "logistic", "dot_general", "max", "eq"})
    assert "sort" in made


def test_what_a_rule_does_not_need_is_computed_on_chip(getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3))
    function = jm.fuse(lambda x: jax.nn.silu(matrix(x)) + jnp.max(jnp.sin(x)))
    values, gradient = programs(lambda x, ct: jax.vjp(function, x)[1](ct), x, x)
    assert len(values.outputs) == 1
    # The argument and the cotangent, beside the matrix.
    assert len([x for x in gradient.arguments if x.batch]) == 2


def test_explain_shows_the_kernels_of_a_gradient(getkey: GetKey) -> None:
    x = normal(getkey(), (ELEMENTS, 3))
    for function in (lambda x: jax.nn.relu(matrix(x)) * x, lambda x: clipped(matrix(x)) * x):
        found = jm.explain(jax.grad(energy_of(jm.fuse(function))), x, quiet=True)
        assert len(found) == 2
        assert all(x.program is not None for x in found)


def test_arrays_of_numpy_under_a_trace() -> None:
    x = np.ones((3, 4))

    def gradient() -> Any:
        return jax.grad(lambda x: jm.fuse(lambda x: jnp.max(x) * x)(x).sum())(x)

    def tangent() -> Any:
        return jax.jvp(jm.fuse(jax.nn.relu), (x,), (x,))[1]

    for function in (gradient, tangent, lambda: jm.fuse(jnp.max)(x)):
        jax.make_jaxpr(function)()
    np.testing.assert_allclose(jax.jit(gradient)(), np.full((3, 4), 2.0), rtol=1e-6)


def test_what_is_known_in_a_loop_that_is_differentiated() -> None:
    """A loop over zeros that a function has put, in the derivative of a function with rules."""

    def function(a: Any, x: Any) -> Any:
        zeros = jnp.zeros((2, 12)).at[0, 1::3].set(a).at[1, 2::3].set(a)[1, ::3]
        return jax.lax.scan(lambda c, x: (jnp.abs(c) * jnp.cos(x), c), x, zeros, reverse=True)

    rng = np.random.default_rng(0)
    a, x = rng.uniform(-1, 1, (2, 4)), rng.uniform(-1, 1, 2)
    found, wanted = (jax.vjp(f(function), a, x) for f in (jm.fuse, jax.vmap))
    for one, other in zip(found[1](found[0]), wanted[1](wanted[0]), strict=True):
        np.testing.assert_allclose(one, other, 1e-6)
