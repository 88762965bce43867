"""``jm.einsum`` under the transformations of JAX and pairs of them, beside ``jnp.einsum``."""

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxmagma as jm
from jaxmagma.plans.plan import plan
from tests.einsums import (
    ELEMENTS,
    PROGRAMS,
    Call,
    Einsum,
    assert_close,
    fused_calls,
    normal,
    operands_of,
)
from tests.jaxprs import primitives, programs


GetKey = Callable[[], jax.Array]
LOOPS = {"scan", "while", "fori_loop", "map"}

INTERPOLATE = "xa,yb,eab->exy"
MASS = "xi,yj,exy,xa,yb,eab->eij"


def interpolate(einsum: Einsum) -> Callable[..., jax.Array]:
    return lambda b, u: einsum(INTERPOLATE, b, b, u)


def mass(einsum: Einsum) -> Callable[..., jax.Array]:
    """Linear in weights and values, of degree four in the table."""
    return lambda b, d, u: einsum(MASS, b, b, d, b, b, u)


def mass_operands(getkey: GetKey, dtype: Any = np.float64) -> tuple[jax.Array, ...]:
    shapes = (4, 3), (ELEMENTS, 4, 4), (ELEMENTS, 3, 3)
    return tuple(normal(getkey(), shape, dtype) for shape in shapes)


def energy(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A real number that is not linear in the result, nor even in any of its values."""

    def evaluate(*operands: jax.Array) -> jax.Array:
        result = function(*operands)
        weights = 1.0 + jnp.arange(result.size, dtype=result.real.dtype).reshape(result.shape)
        return jnp.sum(jnp.cos(weights) * jnp.real(result * jnp.conj(result)))

    return evaluate


def of_named(name: str, getkey: GetKey) -> tuple[Callable[[Einsum], Any], list[jax.Array]]:
    spec, operands = operands_of(name, getkey)
    return lambda einsum: lambda *xs: einsum(spec, *xs), operands


def assert_same(transformed: Callable[[Einsum], Any], *arguments: Any) -> None:
    """A function made with ``jm.einsum`` and with ``jnp.einsum``, both under ``jit``."""
    ours, theirs = jax.jit(transformed(jm.einsum)), jax.jit(transformed(jnp.einsum))
    assert_close(ours(*arguments), theirs(*arguments))


# ---- jit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_jit(name: str, getkey: GetKey) -> None:
    function, operands = of_named(name, getkey)
    assert_close(jax.jit(function(jm.einsum))(*operands), function(jm.einsum)(*operands), 1e-14)
    assert_same(function, *operands)


def test_nested_jit(getkey: GetKey) -> None:
    table, weights, u = mass_operands(getkey)
    assert_same(lambda f: jax.jit(lambda *xs: jax.jit(mass(f))(*xs) + 1), table, weights, u)


# ---- vmap ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_axes", "out_axes"),
    [
        ((None, None, 0), 0),
        ((None, 0, 0), 0),
        ((0, 0, 0), 0),
        ((0, None, None), 0),
        ((None, 1, 2), 1),
        ((1, -1, -2), -1),
        ((None, None, 3), 3),
        ((2, None, 0), 2),
    ],
)
def test_vmap(in_axes: tuple[int | None, ...], out_axes: int, getkey: GetKey) -> None:
    """It adds a batch axis to the program, wherever the axis is, and never a loop."""
    operands = []
    for x, axis in zip(mass_operands(getkey), in_axes, strict=True):
        shape = list(x.shape)
        if axis is not None:
            shape.insert(axis if axis >= 0 else axis + x.ndim + 1, 5)
        operands.append(normal(getkey(), shape))

    def transformed(einsum: Einsum) -> Any:
        return jax.vmap(mass(einsum), in_axes, out_axes)

    assert_same(transformed, *operands)
    found = primitives(transformed(jm.einsum), *operands)
    assert found.count("element_program") == 1
    assert not LOOPS & set(found)
    (program,) = programs(transformed(jm.einsum), *operands)
    assert program.batch_rank == 2


def test_vmap_of_all_but_the_elements(getkey: GetKey) -> None:
    """What is written for one element becomes one program over all of them."""
    table, weights, u = mass_operands(getkey)
    spec = "xi,yj,xy,xa,yb,ab->ij"

    def one(einsum: Einsum) -> Any:
        return jax.vmap(lambda d, u: einsum(spec, table, table, d, table, table, u))

    assert_same(one, weights, u)
    assert_same(lambda f: jax.grad(energy(one(f)), (0, 1)), weights, u)
    assert primitives(one(jm.einsum), weights, u) == ["element_program"]
    (mapped,) = programs(one(jm.einsum), weights, u)
    (whole,) = programs(lambda d, u: mass(jm.einsum)(table, d, u), weights, u)
    assert (mapped.batch_rank, mapped.outputs) == (whole.batch_rank, whole.outputs)
    assert mapped.inputs == whole.inputs
    assert plan(mapped).flops == plan(whole).flops


def test_nested_vmap(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    b, d, u = (normal(getkey(), s) for s in ((2, *b.shape), (3, *d.shape), (2, *u.shape, 3)))

    def transformed(einsum: Einsum) -> Any:
        inner = jax.vmap(mass(einsum), (None, 0, -1), 1)
        return jax.vmap(inner, (0, None, 0))

    assert_same(transformed, b, d, u)
    (program,) = programs(transformed(jm.einsum), b, d, u)
    assert program.batch_rank == 3
    assert [len(x.batch) for x in program.inputs] == [1, 2, 3]


def test_vmap_of_a_constant_basis(getkey: GetKey) -> None:
    table, _, u = mass_operands(getkey)
    us = jnp.stack([u, 2 * u])
    function = jax.jit(jax.vmap(lambda u: jm.einsum(INTERPOLATE, table, table, u)))
    (program,) = programs(function, us)
    assert program.inputs[0].constant is not None
    assert_close(function(us), jnp.einsum("xa,yb,keab->kexy", table, table, us))


def test_vmap_over_nothing_that_is_used(getkey: GetKey) -> None:
    table, weights, u = mass_operands(getkey)
    assert_same(lambda f: jax.vmap(lambda k: mass(f)(table, weights, u) * k), jnp.arange(3.0))


# ---- jvp and linearize -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_jvp(name: str, getkey: GetKey) -> None:
    function, operands = of_named(name, getkey)
    tangents = tuple(normal(getkey(), x.shape) for x in operands)
    assert_same(lambda f: lambda *xs: jax.jvp(function(f), xs, tangents), *operands)


def test_jvp_is_one_program_for_value_and_one_for_tangent(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    found = programs(lambda *xs: jax.jvp(mass(jm.einsum), xs, xs), *operands)
    assert len(found) == 2


def test_jvp_in_some_operands(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    assert_same(lambda f: lambda u: jax.jvp(lambda u: mass(f)(b, d, u), (u,), (2 * u,)), u)
    assert_same(lambda f: lambda b: jax.jvp(lambda b: mass(f)(b, d, u), (b,), (3 * b,)), b)


def test_linearize(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    tangents = [normal(getkey(), x.shape) for x in operands]
    value, derivative = jax.linearize(mass(jm.einsum), *operands)
    expected, reference = jax.linearize(mass(jnp.einsum), *operands)
    assert_close((value, derivative(*tangents)), (expected, reference(*tangents)))
    assert len(programs(derivative, *tangents)) == 1


def test_jacobians_agree(getkey: GetKey) -> None:
    """``vmap`` of ``jvp`` and of ``vjp`` with constant primals."""
    table, u = normal(getkey(), (4, 3)), normal(getkey(), (3, 3, 3))
    assert_same(lambda f: jax.jacfwd(interpolate(f), (0, 1)), table, u)
    assert_same(lambda f: jax.jacrev(interpolate(f), (0, 1)), table, u)


# ---- Gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_grad(name: str, getkey: GetKey) -> None:
    function, operands = of_named(name, getkey)
    everything = tuple(range(len(operands)))
    assert_same(lambda f: jax.grad(energy(function(f)), everything), *operands)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradient_is_one_program(name: str, getkey: GetKey) -> None:
    """One for the value and one for all operands' cotangents; not a chain of them."""
    function, operands = of_named(name, getkey)
    everything = tuple(range(len(operands)))
    assert len(programs(jax.grad(energy(function(jm.einsum)), everything), *operands)) == 2
    _, pullback = jax.vjp(function(jm.einsum), *operands)
    result = function(jm.einsum)(*operands)
    (program,) = programs(pullback, result)
    assert len(program.outputs) == len(operands)
    plain = {"dot_general", "reduce_sum", "mul", "add", "add_any"}
    assert not plain & set(primitives(pullback, result))


def test_gradient_of_a_shared_operand_sums_over_elements_inside_the_program(
    getkey: GetKey,
) -> None:
    b, d, u = mass_operands(getkey)
    _, pullback = jax.vjp(lambda b: mass(jm.einsum)(b, d, u), b)
    (program,) = programs(pullback, u)
    assert [out.batch for out in program.outputs] == [()]
    assert program.batch[program.outputs[0].value] == {0}


def test_grad_of_two_calls_that_share_operands(getkey: GetKey) -> None:
    def transformed(einsum: Einsum) -> Any:
        def loss(b: jax.Array, d: jax.Array, u: jax.Array) -> jax.Array:
            v = mass(einsum)(b, d, u)
            return jnp.sum(mass(einsum)(b, d, v + u) * u)

        return jax.grad(loss, (0, 1, 2))

    operands = mass_operands(getkey)
    assert_same(transformed, *operands)
    assert len(programs(transformed(jm.einsum), *operands)) == 4


def test_value_and_grad_eagerly(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    found = jax.value_and_grad(energy(mass(jm.einsum)), (0, 1, 2))(*operands)
    assert_close(found, jax.value_and_grad(energy(mass(jnp.einsum)), (0, 1, 2))(*operands))


@pytest.mark.parametrize("name", ["mass", "energy", "sum over elements"])
def test_numerical_derivatives(name: str, getkey: GetKey) -> None:
    function, operands = of_named(name, getkey)
    small = [0.1 * x for x in operands]
    check_grads(jax.jit(function(jm.einsum)), small, order=2, modes=("fwd", "rev"), rtol=1e-6)


def test_linear_transpose(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    result = normal(getkey(), u.shape)

    def transformed(einsum: Einsum) -> Any:
        return jax.linear_transpose(lambda u: mass(einsum)(b, d, u), u)

    assert_same(transformed, result)
    # The mass matrix is symmetric.
    (found,) = transformed(jm.einsum)(result)
    assert_close(found, mass(jm.einsum)(b, d, result), 1e-13)


def test_integer_operands_have_no_gradient(getkey: GetKey) -> None:
    _, d, u = mass_operands(getkey)
    table = np.arange(12).reshape(4, 3)
    with jax.numpy_dtype_promotion("standard"):

        def transformed(einsum: Einsum) -> Any:
            return jax.grad(energy(lambda u: mass(einsum)(table, d, u)))

        assert_close(transformed(jm.einsum)(u), transformed(jnp.einsum)(u))


def test_gradient_keeps_the_dtype_of_each_operand(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    with jax.numpy_dtype_promotion("standard"):
        narrow = b.astype(np.float32), d, u.astype(np.float16)
        found = jax.grad(energy(mass(jm.einsum)), (0, 1, 2))(*narrow)
    assert [x.dtype for x in found] == [np.float32, np.float64, np.float16]


# ---- Complex ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mass", "products", "energy"])
def test_complex_gradient_of_a_real_loss(name: str, getkey: GetKey) -> None:
    spec, operands = operands_of(name, getkey, np.complex128)
    everything = tuple(range(len(operands)))
    assert_same(lambda f: jax.grad(energy(lambda *xs: f(spec, *xs)), everything), *operands)


def test_holomorphic_gradient(getkey: GetKey) -> None:
    operands = mass_operands(getkey, np.complex128)

    def transformed(einsum: Einsum) -> Any:
        return jax.grad(lambda *xs: jnp.sum(mass(einsum)(*xs) ** 2), (0, 1, 2), holomorphic=True)

    assert_same(transformed, *operands)


def test_complex_gradient_with_a_real_basis(getkey: GetKey) -> None:
    b, d, _ = mass_operands(getkey)
    _, _, u = mass_operands(getkey, np.complex128)
    with jax.numpy_dtype_promotion("standard"):

        def transformed(einsum: Einsum) -> Any:
            return jax.grad(energy(mass(einsum)), (0, 1, 2))

        found, expected = transformed(jm.einsum)(b, d, u), transformed(jnp.einsum)(b, d, u)
        assert [x.dtype for x in found] == [np.float64, np.float64, np.complex128]
        assert_close(found, expected)


# ---- Second derivatives ----------------------------------------------------------------------


def hessian_products(order: str) -> Callable[[Callable[..., jax.Array]], Any]:
    """The Hessian times a vector, by both modes in the order given."""

    def product(loss: Callable[..., jax.Array], xs: Any, vs: Any) -> Any:
        everything = tuple(range(len(xs)))
        if order == "forward over reverse":
            return jax.jvp(jax.grad(lambda ys: loss(*ys)), (xs,), (vs,))[1]
        if order == "reverse over forward":
            return jax.grad(lambda ys: jax.jvp(loss, ys, vs)[1])(xs)
        gradient = jax.grad(loss, everything)
        return jax.grad(
            lambda ys: sum(jnp.sum(g * v) for g, v in zip(gradient(*ys), vs, strict=True))
        )(xs)

    return lambda loss: lambda xs, vs: product(loss, xs, vs)


ORDERS = ["forward over reverse", "reverse over forward", "reverse over reverse"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mass", "products", "energy"])
def test_second_derivatives(order: str, name: str, getkey: GetKey) -> None:
    function, operands = of_named(name, getkey)
    xs = tuple(operands)
    vs = tuple(normal(getkey(), x.shape) for x in xs)
    assert_same(lambda f: hessian_products(order)(energy(function(f))), xs, vs)


def test_hessian(getkey: GetKey) -> None:
    """``vmap`` over tangents alone adds terms with and without the new batch axis."""
    u, v = normal(getkey(), (3, 2, 2)), normal(getkey(), (3, 2, 2))

    def transformed(einsum: Einsum) -> Any:
        return jax.hessian(energy(lambda u, v: einsum("eij,ejk->eik", u, v)), (0, 1))

    assert_same(transformed, u, v)


def test_second_derivatives_of_a_linear_map_vanish(getkey: GetKey) -> None:
    b, _, u = mass_operands(getkey)
    linear = lambda u: jnp.sum(jm.einsum(INTERPOLATE, b, b, u))  # noqa: E731
    found = jax.jvp(jax.grad(linear), (u,), (u,))[1]
    assert not np.any(found)


# ---- Pairs of vmap and derivatives -----------------------------------------------------------


def test_vmap_of_grad(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    us = normal(getkey(), (*u.shape, 3))

    def transformed(einsum: Einsum) -> Any:
        return jax.vmap(jax.grad(energy(mass(einsum)), (0, 1, 2)), (None, None, 3))

    assert_same(transformed, b, d, us)
    found = primitives(transformed(jm.einsum), b, d, us)
    assert found.count("element_program") == 2
    assert not LOOPS & set(found)


def test_grad_of_vmap(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    us = normal(getkey(), (3, *u.shape))

    def transformed(einsum: Einsum) -> Any:
        mapped = jax.vmap(mass(einsum), (None, None, 0))
        return jax.grad(energy(mapped), (0, 1, 2))

    assert_same(transformed, b, d, us)
    assert len(programs(transformed(jm.einsum), b, d, us)) == 2


def test_vmap_over_tangents_alone(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    directions = normal(getkey(), (3, *u.shape))
    assert_same(
        lambda f: jax.vmap(lambda v: jax.jvp(mass(f), (b, d, u), (b, 2 * d, v))[1]), directions
    )


def test_vmap_over_cotangents_alone(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    cotangents = normal(getkey(), (3, *operands[-1].shape))

    def transformed(einsum: Einsum) -> Any:
        _, pullback = jax.vjp(mass(einsum), *operands)
        return jax.vmap(pullback)

    assert_same(transformed, cotangents)


def test_grad_through_a_vmap_over_tangents(getkey: GetKey) -> None:
    """Its program adds terms with and without a batch axis; neither sum may count one twice."""
    b, d, u = mass_operands(getkey)
    scales = jnp.arange(1.0, 4.0)

    def transformed(einsum: Einsum) -> Any:
        def loss(b: jax.Array, d: jax.Array, u: jax.Array) -> jax.Array:
            def tangent(s: jax.Array) -> jax.Array:
                return jax.jvp(mass(einsum), (b, d, u), (b, d, s * u))[1]

            return jnp.sum(jnp.sin(jax.vmap(tangent)(scales)))

        return jax.grad(loss, (0, 1, 2))

    assert_same(transformed, b, d, u)


def test_vmap_of_hessian_products(getkey: GetKey) -> None:
    xs = mass_operands(getkey)
    us = normal(getkey(), (2, *xs[-1].shape))

    def transformed(einsum: Einsum) -> Any:
        product = hessian_products("forward over reverse")(energy(mass(einsum)))
        return jax.vmap(lambda u: product((*xs[:2], u), xs))

    assert_same(transformed, us)


# ---- Control flow and rematerialisation ------------------------------------------------------


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_grad_of_checkpoint(policy: Any, getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    assert_same(
        lambda f: jax.grad(energy(jax.checkpoint(mass(f), policy=policy)), (0, 1, 2)), *operands
    )


def steps(einsum: Einsum) -> Callable[..., Any]:
    """Three steps of a damped iteration."""

    def run(b: jax.Array, d: jax.Array, u: jax.Array) -> Any:
        def step(u: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = mass(einsum)(b, d, u)
            return u - 0.01 * scale * v, jnp.sum(v)

        return jax.lax.scan(step, u, jnp.arange(1.0, 4.0))

    return run


def test_scan(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    assert_same(steps, *operands)
    assert len(programs(steps(jm.einsum), *operands)) == 1


def test_grad_of_scan(getkey: GetKey) -> None:
    operands = mass_operands(getkey)
    assert_same(lambda f: jax.grad(lambda *xs: steps(f)(*xs)[1].sum(), (0, 1, 2)), *operands)
    assert_same(lambda f: jax.grad(energy(lambda *xs: steps(f)(*xs)[0]), (0, 1, 2)), *operands)


def test_vmap_and_jvp_of_scan(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)
    us = normal(getkey(), (2, *u.shape))
    assert_same(lambda f: jax.vmap(steps(f), (None, None, 0)), b, d, us)
    assert_same(lambda f: lambda *xs: jax.jvp(steps(f), xs, xs), b, d, u)


def test_scan_over_the_operands_of_an_einsum(getkey: GetKey) -> None:
    b, _, u = mass_operands(getkey)
    us = normal(getkey(), (4, *u.shape))
    assert_same(lambda f: lambda us: jax.lax.map(lambda u: f(INTERPOLATE, b, b, u), us), us)


def test_while_loop(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)

    def transformed(einsum: Einsum) -> Any:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            count, u = state
            v = mass(einsum)(b, d, u)
            return count + 1, v / jnp.max(jnp.abs(v))

        return lambda u: jax.lax.while_loop(lambda s: s[0] < 4, body, (jnp.asarray(0), u))

    assert_same(transformed, u)
    assert_same(lambda f: lambda u: jax.jvp(lambda u: transformed(f)(u)[1], (u,), (u,)), u)


def test_cond_and_custom_derivatives(getkey: GetKey) -> None:
    b, d, u = mass_operands(getkey)

    def transformed(einsum: Einsum) -> Any:
        @jax.custom_vjp
        def doubled(u: jax.Array) -> jax.Array:
            return 2 * mass(einsum)(b, d, u)

        doubled.defvjp(lambda u: (doubled(u), None), lambda _, ct: (3 * mass(einsum)(b, d, ct),))

        def loss(u: jax.Array) -> jax.Array:
            return jnp.sum(
                jax.lax.cond(jnp.sum(u) > 0, doubled, lambda u: mass(einsum)(b, d, u), u)
            )

        return jax.grad(loss)

    for sign in (1.0, -1.0):
        assert_same(transformed, sign * jnp.abs(u))


# ---- Random einsums under random transformations ---------------------------------------------


def transform(name: str, function: Callable[..., jax.Array], axes: tuple[int | None, ...]) -> Any:
    """A function of primals ``xs`` and directions ``vs``; ``axes`` are to be mapped."""
    everything = tuple(range(len(axes)))
    loss = energy(function)
    mapped = jax.vmap(function, axes)

    def pullback(xs: Any, vs: Any) -> Any:
        result, pull = jax.vjp(function, *xs)
        return pull(jnp.cos(1 + jnp.arange(result.size, dtype=float)).reshape(result.shape))

    table: dict[str, Callable[[Any, Any], Any]] = {
        "vjp": pullback,
        "jvp": lambda xs, vs: jax.jvp(function, xs, vs),
        "vmap": lambda xs, vs: mapped(*xs),
        "grad of vmap": lambda xs, vs: jax.grad(energy(mapped), everything)(*xs),
        "vmap of grad": lambda xs, vs: jax.vmap(jax.grad(loss, everything), axes)(*xs),
        "vmap of tangents": lambda xs, vs: jax.vmap(lambda v: jax.jvp(function, xs, v)[1])(
            jax.tree.map(lambda v: jnp.stack([v, jnp.sin(v)]), vs)
        ),
    } | {order: hessian_products(order)(loss) for order in ORDERS}
    return table[name]


TRANSFORMATIONS = [
    "vjp", "jvp", "vmap", "grad of vmap", "vmap of grad", "vmap of tangents", *ORDERS,
]  # fmt: skip


@settings(max_examples=8)
@given(fused_calls(), st.data())
def test_random_programs_under_random_transformations(call: Call, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(TRANSFORMATIONS))
    hypothesis.event(name)
    count = len(call.distinct)
    mapped = data.draw(st.integers(0, count - 1))
    axes: list[int | None] = []
    xs: list[np.ndarray] = []
    random = np.random.default_rng(0)
    for n, x in enumerate(call.distinct):
        axis = (
            data.draw(st.integers(0, x.ndim)) if n == mapped or data.draw(st.booleans()) else None
        )
        if "vmap" in name and axis is not None and name != "vmap of tangents":
            x = random.standard_normal((*x.shape[:axis], 2, *x.shape[axis:]))
        axes.append(axis)
        xs.append(x)
    vs = tuple(np.asarray(random.standard_normal(x.shape)) for x in xs)

    def transformed(einsum: Einsum) -> Any:
        return transform(name, call.function(einsum), tuple(axes))

    assert_same(transformed, tuple(xs), vs)
