"""``jm.fuse`` means ``jax.vmap``: values, all derivatives, errors, under every transformation.

What runs natively and what plain JAX runs makes no difference to any test here.
"""

import functools
import importlib.util
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.programs import reference
from jaxmagma.programs.fallback import plain_calls
from tests.einsums import assert_close, normal
from tests.jaxprs import equations, primitives, programs


GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]

ELEMENTS = 6


# ---- What functions are made of ------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


@jax.custom_jvp
def doubled(x: jax.Array) -> jax.Array:
    """The identity, with twice its derivative, which shows whether its rule is used."""
    return jnp.sin(x)


@doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return doubled(primals[0]), 2 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def tripled(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


tripled.defvjp(lambda x: (tripled(x), x), lambda x, ct: (3 * jnp.cos(x) * ct,))

WHOLE: dict[str, Function] = {
    "custom_jvp": lambda a, b: doubled(a @ b) @ a,
    "custom_vjp": lambda a, b: tripled(a @ b) @ a,
    "both": lambda a, b: doubled(a) @ tripled(b) @ b,
    "custom_jvp in a loop": lambda a, b: jax.lax.fori_loop(0, 2, lambda _, c: doubled(c @ b), a),
    "custom_vjp in a branch": lambda a, b: jax.lax.cond(a[0, 0] > 0, tripled, jnp.cos, a @ b) @ a,
    "stop_gradient": lambda a, b: jax.lax.stop_gradient(jnp.sin(a)) @ b * a[0, 0],
    "checkpoint": lambda a, b: jax.checkpoint(lambda a: jnp.sin(a @ a))(a) @ b,
    "jit": lambda a, b: jax.jit(lambda a, b: jnp.sin(a @ b))(a, b) @ a,
    "jm.einsum": lambda a, b: jm.einsum("ij,jk,kl->il", a, b, jnp.sin(a)),
    "jm.fuse": lambda a, b: jm.fuse(lambda x, b: jnp.sin(b @ x), (0, None))(a, b) @ b,
    "jm.fuse along columns": lambda a, b: jm.fuse(lambda x: x / x.sum(), 1, 1)(jnp.exp(a)) @ b,
    "vmap": lambda a, b: jax.vmap(lambda x: jnp.sin(b @ x), 1)(a) @ a,
    "grad": lambda a, b: jax.grad(lambda x: jnp.sum(jnp.sin(x @ b)))(a) @ b,
    "hessian": lambda a, b: jax.hessian(lambda x: jnp.sum(jnp.sin(b @ x) ** 2))(a[0]) @ a,
    "jacobian": lambda a, b: jnp.einsum("ijkl,kl->ij", jax.jacfwd(lambda x: x @ x @ b)(a), b),
    "relu": lambda a, b: jax.nn.relu(a @ b) @ jax.nn.silu(a),
    "constant result": lambda a, b: (a @ b, jnp.ones(3), 2.0),
    "argument as a result": lambda a, b: (a, b, a @ b, a),
    "truth": lambda a, b: jnp.where((a @ b > 0) | (a < b), a, b),
}


def energy_of(function: Function) -> Function:
    def energy(*arguments: Any) -> jax.Array:
        return jnp.asarray(sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(function(*arguments))))

    return energy


@pytest.fixture
def pair(getkey: GetKey) -> tuple[jax.Array, jax.Array]:
    return normal(getkey(), (ELEMENTS, 3, 3)), normal(getkey(), (ELEMENTS, 3, 3))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "in_axes"),
    # By turns elements have both arguments, or share the second or the first one.
    [(x, (0, (0, None), (None, 1))[n % 3]) for n, x in enumerate(WHOLE)],
    ids=str,
)
def test_values_and_gradients(name: str, in_axes: Any, pair: tuple[jax.Array, ...]) -> None:
    first, second = (in_axes, in_axes) if in_axes == 0 else in_axes
    pair = tuple(x[0] if axis is None else x for x, axis in zip(pair, (first, second), strict=True))
    if second == 1:
        pair = pair[0], jnp.moveaxis(pair[1], 0, 1)

    def both(transform: Function) -> Any:
        function = transform(WHOLE[name], in_axes=in_axes)
        gradient = jax.value_and_grad(energy_of(function), (0, 1))
        return jax.jit(lambda *xs: (function(*xs), gradient(*xs)))(*pair)

    assert_close(both(jm.fuse), both(jax.vmap))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "name",
    [
        "custom_jvp",
        "custom_vjp",
        "stop_gradient",
        "checkpoint",
        "grad",
        "relu",
    ],
)
def test_second_derivatives(name: str, pair: tuple[jax.Array, ...]) -> None:
    def product(transform: Function) -> Any:
        gradient = jax.grad(energy_of(transform(WHOLE[name])), (0, 1))
        if name == "custom_vjp":  # has no forward mode
            return jax.jit(jax.grad(lambda *xs: jnp.sum(gradient(*xs)[0] ** 2), (0, 1)))(*pair)
        return jax.jit(lambda *xs: jax.jvp(gradient, xs, (jnp.cos(xs[0]), xs[0])))(*pair)

    assert_close(product(jm.fuse), product(jax.vmap))


def test_the_derivative_of_a_maximum_is_shared_by_all_that_attain_it() -> None:
    a = jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 1.0]])
    found, expected = (
        jax.grad(lambda a, f=f: jnp.sum(f(jnp.max)(a)))(a) for f in (jm.fuse, jax.vmap)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("derive", [jax.grad, jax.jacfwd, jax.hessian])
def test_results_that_no_element_changes_count_once(derive: Function) -> None:
    """What depends on shared arguments alone, beside what depends on the element."""
    a, b = jnp.linspace(0.2, 1.0, ELEMENTS), jnp.array(0.7)

    def function(a: jax.Array, b: jax.Array) -> Any:
        c = jnp.sin(b)
        return c * c, a * c, c, jnp.exp(b) + a

    found, expected = (
        derive(lambda b, f=f: energy_of(f(function, (0, None)))(a, b))(b)
        for f in (jm.fuse, jax.vmap)
    )
    assert_close(found, expected)


def test_a_function_of_known_operations_is_one_program(pair: tuple[jax.Array, ...]) -> None:
    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        strain = 0.5 * (a + a.T + a.T @ a)
        return jnp.trace(strain) * jnp.eye(3) + jnp.sin(b)[::-1] @ strain

    with plain_calls() as calls:
        assert len(programs(jm.fuse(function), *pair)) == 1
        assert len(programs(jax.grad(energy_of(jm.fuse(function)), (0, 1)), *pair)) <= 3
    assert calls == []


def test_a_function_is_traced_once(pair: tuple[jax.Array, ...]) -> None:
    count = 0

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        nonlocal count
        count += 1
        return a @ b

    fused = jax.jit(jm.fuse(function))
    for _ in range(3):
        fused(*pair)
    assert count == 1


@pytest.mark.usefixtures("standard_promotion")
def test_trees_none_and_keywords(pair: tuple[jax.Array, ...]) -> None:
    a, b = pair

    def function(d: Any, point: Point, *, scale: jax.Array, nothing: None = None) -> Any:
        assert d["none"] is None and nothing is None
        result = Point(d["a"] @ point.x, [point.y @ d["a"]])
        return {"point": result, "none": None, "scaled": (scale[0] * d["a"],)}

    arguments = {"a": a, "none": None}, Point(b, b)
    axes = (0, Point(0, None))
    shared = arguments[0], Point(b, b[0])
    for in_axes, xs in ((0, arguments), (axes, shared), (({"a": 0, "none": None}, 0), arguments)):
        found, expected = (f(function, in_axes)(*xs, scale=a) for f in (jm.fuse, jax.vmap))
        assert_close(found, expected)
        assert isinstance(found["point"], Point)


def test_out_axes_of_trees(pair: tuple[jax.Array, ...]) -> None:
    function = lambda a, b: {"x": a @ b, "y": (a[0], jnp.sum(b))}  # noqa: E731
    for axes in (0, {"x": 1, "y": 0}, {"x": -1, "y": (1, 0)}):
        found, expected = (f(function, 0, axes)(*pair) for f in (jm.fuse, jax.vmap))
        assert_close(found, expected)
    # What does not depend on the element needs no axis.
    found = jm.fuse(lambda a, b: b @ b, (0, None), None)(pair[0], pair[1][0])
    assert_close(found, pair[1][0] @ pair[1][0])


# ---- Arrays that the function closes over --------------------------------------------------------


def test_closures(pair: tuple[jax.Array, ...]) -> None:
    """Known, traced, differentiated and mapped arrays."""
    a, b = pair

    def outer(transform: Function, c: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(transform(lambda a: jnp.sin(a @ c) @ b[0])(a)))

    for derive in (lambda f: f, jax.grad, lambda f: jax.jvp(f, (b[1],), (b[2],)), jax.hessian):
        results = []
        for transform in (jm.fuse, jax.vmap):
            derived = derive(functools.partial(outer, transform))
            results.append(jax.jit(derived)(b[1]) if callable(derived) else derived)
        found, expected = results
        assert_close(found, expected)
    found, expected = (
        jax.jit(jax.vmap(functools.partial(outer, transform)))(b)
        for transform in (jm.fuse, jax.vmap)
    )
    assert_close(found, expected)


def test_closure_over_an_array_with_a_mapped_and_differentiated_value(
    pair: tuple[jax.Array, ...],
) -> None:
    a, b = pair

    def outer(transform: Function) -> Function:
        def energy(c: jax.Array, a: jax.Array) -> jax.Array:
            return jnp.sum(transform(lambda x: jnp.tanh(c @ x))(a) ** 2)

        return jax.jit(jax.vmap(jax.grad(energy, (0, 1)), (0, None)))

    assert_close(outer(jm.fuse)(b, a), outer(jax.vmap)(b, a))


# ---- Transformations -----------------------------------------------------------------------------


def stress(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(a @ b) + jnp.trace(a) * b.T


def plain(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.vmap(stress)(a, b)


def fused(a: jax.Array, b: jax.Array) -> jax.Array:
    return jm.fuse(stress)(a, b)


TRANSFORMED: dict[str, Callable[[Function], Function]] = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(energy_of(f), (0, 1)),
    "vmap of one": lambda f: lambda a, b: jax.vmap(f, (0, None))(jnp.stack([a, 2 * a]), b),
    "vmap of grad": lambda f: (
        lambda a, b: jax.vmap(jax.grad(energy_of(f), 1), (None, 0))(a, jnp.stack([b, b + 1]))
    ),
    "nested vmap": lambda f: (
        lambda a, b: jax.vmap(jax.vmap(f, (0, None), 1), (None, 0))(
            jnp.stack([a, 2 * a]), jnp.stack([b, b + 1, b * b])
        )
    ),
    "scan": lambda f: lambda a, b: jax.lax.scan(lambda c, _: (f(c, b), None), a, None, 3)[0],
    "grad of scan": lambda f: jax.grad(
        lambda a, b: jnp.sum(jax.lax.scan(lambda c, _: (f(c, b), jnp.sum(c)), a, None, 3)[1]),
        (0, 1),
    ),
    "checkpoint": lambda f: jax.grad(energy_of(jax.checkpoint(f)), (0, 1)),
    "linearize": lambda f: lambda a, b: jax.linearize(f, a, b)[1](b, a),
    "linear_transpose": lambda f: (
        lambda a, b: jax.linear_transpose(lambda t: jax.jvp(lambda a: f(a, b), (a,), (t,))[1], a)(b)
    ),
    "jacfwd": lambda f: lambda a, b: jax.jacfwd(f)(a[:2], b[:2]),
    "jacrev": lambda f: lambda a, b: jax.jacrev(f, 1)(a[:2], b[:2]),
    "eval_shape": lambda f: lambda a, b: jnp.zeros(jax.eval_shape(f, a, b).shape),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformation(name: str, pair: tuple[jax.Array, ...]) -> None:
    transform = TRANSFORMED[name]
    assert_close(jax.jit(transform(fused))(*pair), jax.jit(transform(plain))(*pair))


# ---- Devices and export --------------------------------------------------------------------------


@pytest.fixture
def sharded(getkey: GetKey) -> tuple[jax.Array, ...]:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    by_element = NamedSharding(mesh, P("d"))
    arrays = [normal(getkey(), (4 * 64, 3, 3)) for _ in range(2)]
    return tuple(jax.device_put(x, by_element) for x in arrays)


@pytest.mark.parametrize("derive", [lambda f: f, lambda f: jax.grad(energy_of(f), (0, 1))])
def test_elements_on_several_devices(derive: Function, sharded: tuple[jax.Array, ...]) -> None:
    compiled = jax.jit(derive(fused)).lower(*sharded).compile()
    assert "all-gather" not in (compiled.as_text() or "")
    found = compiled(*sharded)
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(found))
    assert_close(found, derive(plain)(*sharded))


def test_shard_map(sharded: tuple[jax.Array, ...]) -> None:
    sharding = sharded[0].sharding
    assert isinstance(sharding, NamedSharding)
    spec = P("d")
    mapped = jax.shard_map(fused, mesh=sharding.mesh, in_specs=(spec, spec), out_specs=spec)
    gradient = jax.jit(jax.value_and_grad(energy_of(mapped), (0, 1)))
    assert_close(gradient(*sharded), jax.value_and_grad(energy_of(plain), (0, 1))(*sharded))


def test_gathered_vectors_on_several_devices(sharded: tuple[jax.Array, ...]) -> None:
    """The elements of a vector are cut over the devices, the vector itself is on each of them."""
    dofs = np.arange(256)[:, None] + np.arange(3)
    operator = jm.fuse(
        lambda u, a: jnp.tanh(a @ u), (jm.gather(dofs), 0), jm.scatter_add(dofs, 258)
    )
    vector = jnp.linspace(-1.0, 1.0, 258)

    def expected(v: jax.Array, a: jax.Array) -> jax.Array:
        values = jax.vmap(lambda u, a: jnp.tanh(a @ u))(v[dofs], a)
        return jnp.zeros(258).at[dofs].add(values)

    for derive in (lambda f: f, lambda f: jax.grad(energy_of(f), (0, 1))):
        found = jax.jit(derive(operator))(vector, sharded[0])
        assert_close(found, derive(expected)(vector, jnp.asarray(np.asarray(sharded[0]))))


def test_export(pair: tuple[jax.Array, ...]) -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        pytest.skip("jax.export serialises with flatbuffers, which is not installed")
    allowed = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in ("jaxmagma_cpu", "jaxmagma_cuda", "CustomSPMDPartitioning")
    ]
    both = jax.jit(lambda *xs: (fused(*xs), jax.grad(energy_of(fused))(*xs)))
    exported = jax.export.export(both, disabled_checks=allowed)(*pair)
    found = jax.export.deserialize(exported.serialize()).call(*pair)
    assert_close(found, (plain(*pair), jax.grad(energy_of(plain))(*pair)))


# ---- Long functions ------------------------------------------------------------------------------


def powers(x: jax.Array, length: int) -> jax.Array:
    for _ in range(length):
        x = x - 0.5 * x * x
    return x[0]


def layers(x: jax.Array, length: int) -> jax.Array:
    matrix = np.random.default_rng(0).uniform(-1, 1, (3, 3))
    for _ in range(length):
        x = jnp.tanh(matrix @ x)
    return x


def neighbours(x: jax.Array, length: int) -> jax.Array:
    for _ in range(length):
        x = x - 0.1 * jnp.sin(x[::-1]) * jnp.roll(x, 1)
    return x


def normalised(x: jax.Array, length: int) -> jax.Array:
    for _ in range(length):
        x = jnp.sin(x) / jnp.sqrt(1 + jnp.sum(x * x))
    return x


@pytest.mark.parametrize("function", [powers, layers, neighbours, normalised])
@pytest.mark.usefixtures("standard_promotion")
def test_programs_grow_like_the_function(function: Function) -> None:
    """A value that is used twice is read once, in values and gradients."""
    x = jnp.ones((ELEMENTS, 3))

    def sizes(length: int) -> list[int]:
        fused = jm.fuse(functools.partial(function, length=length))
        found = [*programs(fused, x), *programs(jax.grad(energy_of(fused)), x)]
        return [len(program.operations) for program in found]

    for two, three, four in zip(*map(sizes, (8, 12, 16)), strict=True):
        assert four - three == three - two > 0


@pytest.mark.parametrize("function", [powers, layers])
@pytest.mark.usefixtures("standard_promotion")
def test_functions_longer_than_the_stack_is_deep(function: Function) -> None:
    x = jnp.linspace(0.1, 1.0, 3 * ELEMENTS).reshape(ELEMENTS, 3)
    found, expected = (
        jax.value_and_grad(energy_of(transform(functools.partial(function, length=300))))
        for transform in (jm.fuse, jax.vmap)
    )
    with plain_calls() as calls:
        results = jax.jit(found)(x)
    assert calls == []
    # XLA takes very long to compile the plain function as a whole.
    assert_close(results, expected(x))


# ---- To the letter -------------------------------------------------------------------------------

VECTORS = np.linspace(-1.0, 2.0, 4 * ELEMENTS).reshape(ELEMENTS, 4)


def assert_same(found: Any, expected: Any) -> None:
    """Values, and all that is said of their types."""
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(x) is type(y)
        assert jax.typeof(x) == jax.typeof(y), (jax.typeof(x), jax.typeof(y))
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


LETTER: dict[str, Function] = {
    "apply": lambda x: x.at[1].apply(jnp.sin),
    "reshape in another order": lambda x: jnp.reshape(x, (2, 2), order="F"),
    "reshape with dimensions": lambda x: jax.lax.reshape(x.reshape(2, 2), (4,), (1, 0)),
    "filled": lambda x: x.at[np.array([0, 9])].get(mode="fill", fill_value=7),
    "filled with what is no number": lambda x: x.at[np.array([0, 9])].get(mode="fill"),
    "filled with complex numbers": lambda x: (x + 0j).at[9].get(mode="fill", fill_value=1 + 2j),
    "complex update": lambda x: (x + 0j).at[1].set(1 + 2j),
    "nothing": lambda x: (x[1:1], x.reshape(2, 2)[:, 2:]),
    "nothing, added up": lambda x: jnp.sum(x[4:]) + jnp.cumsum(x[:0]).sum() + x,
    "nothing, updated": lambda x: x.at[:0].set(2.0).at[np.zeros(0, int)].add(x[:0]),
    "nothing, split off": lambda x: jnp.split(x, [0, 3]),
    "nothing, padded": lambda x: jnp.pad(x[:0], (1, 2)) + jnp.pad(x[:3], 0),
    "all updated": lambda x: jax.lax.dynamic_update_slice(x, 2 * x, (0,)),
    "rolled along one value": lambda x: jnp.roll(x[None], 1, 0),
    "no step": lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x[:0]),
    "to the power of nothing": lambda x: (jax.lax.integer_pow(x, 0), x**0 * 2),
    "tie of a bound": lambda x: jax.lax.clamp(x[0], x, x[2]),
    "counted in few bits": lambda x: jnp.sum((x > -9).astype(jnp.int8), dtype=jnp.int8) * x,
    "large number": lambda x: jnp.where(jnp.argmax(x) == 2**60 + 1, x, 2 * x),
    "truth": lambda x: ((x > 0) @ (x < 9), jnp.cumsum(x > 0), (x > 0).at[9].get(mode="fill")),
    "weak": lambda x: (2.0, 1, True, 2.0 * jax.lax.full((), 3.0), jnp.asarray(3.0) + x[0]),
    "numbers of steps": lambda x: jax.lax.fori_loop(
        0, 3, lambda n, c: (c[0] + n, c[1] * 2), (0, x)
    ),
    "a value known to vmap": lambda x: x if jnp.sum(jnp.ones(2)) > 0 else 2 * x,
    "window": lambda x: jax.lax.reduce_window(
        x, jnp.asarray(0.0), jax.lax.add, (2,), (1,), "VALID"
    ),
    "maximum beside a condition": lambda x: (
        jnp.max(x) + jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    ),
    "pole of a branch": lambda x: jax.lax.cond(
        x[0] > 0, lambda y: jnp.sqrt(y - x[0]), lambda y: 0.0 * y, x[0]
    ),
    "conditions in a loop": lambda x: jax.lax.scan(
        lambda c, y: (c + y, jax.lax.cond(c > 0.5, jnp.sqrt, jnp.cos, c)), 0.0, x
    ),
    "one of three": lambda x: jax.lax.switch(jnp.argmax(x[:3]), [jnp.sin, jnp.cos, jnp.exp], x),
    "mapped but known": lambda x: jnp.argmax(x[:1]) + x[:0].sum(),
}
WITHOUT_GRADIENT = {"apply", "a value known to vmap", "window"}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("error::DeprecationWarning", "error::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("name", LETTER)
def test_values_types_and_gradients_to_the_letter(name: str) -> None:
    def everything(transform: Function) -> Any:
        function = transform(LETTER[name])
        if name in WITHOUT_GRADIENT:
            return function(VECTORS)

        def energy(x: jax.Array) -> jax.Array:
            made = [jnp.real(y) for y in jax.tree.leaves(function(x))]
            return jnp.sum(0 * x) + sum(jnp.nansum(jnp.sin(y.astype(float))) for y in made)

        return jax.jit(lambda x: (function(x), jax.grad(energy)(x)))(VECTORS)

    assert_same(everything(jm.fuse), everything(jax.vmap))


def test_the_function_is_run_at_each_call_as_by_vmap() -> None:
    scale = 2.0

    def function(x: jax.Array) -> jax.Array:
        return scale * x

    assert_close(jm.fuse(function)(VECTORS), 2 * VECTORS)
    scale = 3.0
    assert_close(jm.fuse(function)(VECTORS), 3 * VECTORS)


@pytest.mark.usefixtures("standard_promotion")
def test_derivatives_at_zero_and_of_nothing() -> None:
    x, nothing = jnp.array([0.0, 2.0]), jnp.zeros((2, 0))
    for power in (-1, -2, -3):
        function = functools.partial(jax.lax.integer_pow, y=power)
        found, expected = (jax.jvp(f(function), (x,), (x + 1,)) for f in (jm.fuse, jax.vmap))
        assert_same(found, expected)

    def own(x: jax.Array, a: jax.Array) -> Any:
        return tripled(a), doubled(jnp.sin(a)), jax.nn.relu6(a), jax.nn.log_softmax(x[None]), a != a

    def gradient(transform: Function) -> Any:
        return jax.grad(lambda x, a: transform(own)(x, a)[3].sum(), (0, 1))(x, nothing)

    assert_same(jm.fuse(own)(x, nothing), jax.vmap(own)(x, nothing))
    assert_same(gradient(jm.fuse), gradient(jax.vmap))


STATIC: dict[str, tuple[Function, Any]] = {
    "truth": (lambda x, s: jnp.sin(x) if s else x, True),
    "length": (lambda x, s: sum(jnp.sin(x) for _ in range(s)), 3),
    "word": (lambda x, s: {"sum": x.sum, "max": x.max}[s](), "max"),
    "function": (lambda x, s: s(x), jnp.cos),
    "known array": (lambda x, s: x if s.sum() > 1 else -x, jnp.ones(3)),
    "result": (lambda x, s: (s, np.ones(2), 3, x), 2.5),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", STATIC)
def test_unmapped_arguments_are_what_they_are(name: str) -> None:
    function, static = STATIC[name]
    found, expected = (f(function, (0, None))(VECTORS, static) for f in (jm.fuse, jax.vmap))
    assert_same(found, expected)


NAMED: dict[str, Function] = {
    "psum": lambda x: jnp.sin(x) - jax.lax.psum(jnp.sin(x), "e"),
    "number": lambda x: x * jax.lax.axis_index("e"),
    "size": lambda x: x * jax.lax.psum(1, "e"),
    "all_gather": lambda x: jax.lax.all_gather(jnp.sin(x), "e") @ x,
    "ppermute": lambda x: jax.lax.ppermute(
        jnp.sin(x), "e", [(n, (n + 1) % ELEMENTS) for n in range(ELEMENTS)]
    ),
    "condition on a sum": lambda x: jax.lax.cond(
        jax.lax.psum(x[0], "e") > 0, jnp.sin, jnp.cos, 2 * x
    ),
    "condition on the number": lambda x: jax.lax.cond(
        jax.lax.axis_index("e") > 2, jnp.sin, jnp.cos, 2 * x
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", NAMED)
def test_collectives(name: str) -> None:
    def everything(transform: Function) -> Any:
        function = transform(NAMED[name], axis_name="e")
        return jax.jit(lambda x: (function(x), jax.grad(energy_of(function))(x)))(VECTORS)

    assert_same(everything(jm.fuse), everything(jax.vmap))


def test_named_axes_of_several_fuses() -> None:
    def nested(transform: Function) -> Any:
        function = lambda x: jnp.sin(x) - jax.lax.psum(jnp.sin(x), ("i", "j", "k"))  # noqa: E731
        for name in "kji":
            function = transform(function, axis_name=name)
        return function(VECTORS.reshape(2, 3, 4))

    assert_same(nested(jm.fuse), nested(jax.vmap))


@pytest.mark.usefixtures("standard_promotion")
def test_size_of_the_axis_and_sums_of_results() -> None:
    for transform in (jm.fuse, jax.vmap):
        assert transform(lambda: jnp.ones(3), axis_size=4)().shape == (4, 3)
        total = transform(lambda x: 2 * x, out_axes=None, sum_match=True)(VECTORS)
        assert_close(total, 2 * VECTORS.sum(0))
        number = transform(lambda: 2.0 * jax.lax.axis_index("e"), axis_size=3, axis_name="e")
        assert number().tolist() == [0, 2, 4]


EFFECTS: dict[str, Callable[[Function], Function]] = {
    "of the element": lambda log: lambda x: (jax.debug.callback(log, x[0]), jnp.sin(x))[1],
    "of what is known": lambda log: lambda x: (jax.debug.callback(log, 3.0), jnp.sin(x))[1],
    "in order": lambda log: (
        lambda x: (
            jax.debug.callback(log, 1),
            jnp.sin(x),
            jax.debug.callback(log, 2),
            jnp.max(x) + x,
        )[3]
    ),
    "io": lambda log: (
        lambda x: (
            jnp.sin(x)
            + jax.experimental.io_callback(
                lambda v: (log(v), np.float64(v))[1], jax.ShapeDtypeStruct((), x.dtype), x[0]
            )
        )
    ),
    "pure": lambda log: (
        lambda x: (
            jnp.sin(x)
            + jax.pure_callback(
                lambda v: (log(v), np.float64(v))[1],
                jax.ShapeDtypeStruct((), x.dtype),
                np.float64(2.0),
                vmap_method="sequential",
            )
        )
    ),
    "pure, of what is known of each element": lambda log: (
        lambda x: (
            jnp.sin(x)
            + jax.pure_callback(
                lambda v: (log(v), np.float64(v))[1],
                jax.ShapeDtypeStruct((), x.dtype),
                jnp.argmax(x[:1]),
                vmap_method="sequential",
            )
        )
    ),
    "in a loop": lambda log: (
        lambda x: jax.lax.fori_loop(
            0, 2, lambda n, c: (jax.debug.callback(log, n), jnp.sin(c))[1], x
        )
    ),
    "in a branch": lambda log: (
        lambda x: jax.lax.cond(
            x[0] > 0, lambda c: (jax.debug.callback(log, 1), jnp.sin(c))[1], jnp.cos, x
        )
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_when_and_as_often_as_under_vmap(name: str) -> None:
    logs: list[list[float]] = []
    for transform in (jm.fuse, jax.vmap):
        log: list[float] = []
        traced = jax.jit(transform(EFFECTS[name](lambda v, log=log: log.append(float(v)))))
        compiled = traced.lower(VECTORS).compile()
        assert log == []
        for _ in range(2):
            jax.block_until_ready(compiled(VECTORS))
        jax.effects_barrier()
        logs.append(log)
    found, expected = logs
    assert sorted(found) == sorted(expected) and expected


@pytest.mark.usefixtures("standard_promotion")
def test_checks() -> None:
    def function(x: jax.Array) -> jax.Array:
        checkify.check(x[0] < 1.0, "too large: {x}", x=x[0])
        return jnp.sin(x)

    errors = [checkify.checkify(f(function))(VECTORS)[0].get() for f in (jm.fuse, jax.vmap)]
    assert errors[0] == errors[1] and "too large" in str(errors[0])


def test_automatic_checks_see_every_operation() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jnp.log(x - 0.5) / jnp.sum(x)

    def error(transform: Any, checks: Any) -> Any:
        return jax.jit(checkify.checkify(transform(function), errors=checks))(VECTORS)[0].get()

    for checks in (checkify.float_checks, checkify.all_checks, checkify.user_checks):
        assert error(jm.fuse, checks) == error(jax.vmap, checks)
    assert "log" in error(jm.fuse, checkify.nan_checks)


def test_nothing_traced_is_kept() -> None:
    def function(a: Any) -> Any:
        return jnp.linalg.inv(a) @ jax.nn.relu(a), {"one": 1.0}

    def energy(a: Any) -> Any:
        return jnp.sum(jm.fuse(function)(a)[0])

    a = np.eye(3) + np.arange(18.0).reshape(2, 3, 3) ** 0.5
    with jax.checking_leaks():
        jax.jit(jm.fuse(function))(a)
        jax.jit(jax.grad(energy))(a)
        jax.jit(jm.fuse(jnp.sum, jm.gather(np.array([[0, 1], [1, 2]]))))(np.ones(3))


def test_what_constants_overwrite_differs_from_element_to_element() -> None:
    def overwritten(x: Any) -> Any:
        return jax.lax.dynamic_update_slice(x, jnp.zeros(2, x.dtype), (0,))[:2]

    for transform in (jm.fuse, jax.vmap):
        with pytest.raises(ValueError, match="out_axes"):
            transform(overwritten, out_axes=None)(VECTORS)
        assert transform(overwritten)(VECTORS).shape == (len(VECTORS), 2)


def test_effects_of_arrays_without_values_happen_for_each_element() -> None:
    seen: list[Any] = []

    def function(empty: Any, x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(x.shape), empty)
        jax.debug.callback(lambda x: seen.append(x.shape), jnp.frexp(empty)[0])
        _, carried = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, -s[1]), (0, empty))
        jax.debug.callback(lambda x: seen.append(x.shape), carried)
        return x

    for transform in (jm.fuse, jax.vmap):
        transform(function)(np.zeros((len(VECTORS), 0)), VECTORS)
        jax.effects_barrier()
    assert seen == [(0,)] * 6 * len(VECTORS)


def test_what_a_loop_leaves_differs_where_it_ends_sooner_for_some_elements() -> None:
    def counted(x: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < x[0], lambda s: (s[0] + 0.5, s[1] + 1), (0.0, 0))

    def repeated(x: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, 2 * s[1]), (0, x))

    for transform in (jm.fuse, jax.vmap):
        with pytest.raises(ValueError, match="out_axes"):
            transform(counted, out_axes=(0, None))(VECTORS)
        assert transform(repeated, out_axes=(None, 0))(VECTORS)[0] == 3


@pytest.mark.filterwarnings("error")
def test_integers_in_products_of_complex_numbers() -> None:
    z = np.exp(1j * VECTORS).astype(np.complex64)
    weights = np.array([-3, 1, 4, 2], np.int16)
    with jax.numpy_dtype_promotion("standard"):
        found = jm.fuse(lambda x: jnp.inner(x, weights))(z)
    np.testing.assert_allclose(found, z @ weights, rtol=1e-5)


def test_complex_numbers_have_no_order() -> None:
    for transform in (jm.fuse, jax.vmap):
        with pytest.raises(TypeError, match="complex"):
            jax.jit(transform(jnp.argmin))(np.ones((ELEMENTS, 1), np.complex64))


def test_zero_tangents_stay_zero_beside_infinities() -> None:
    def gradient(transform: Any, y: Any) -> Any:
        _, pull = jax.vjp(lambda y: transform(jnp.remainder)(jnp.ones(y.shape, y.dtype), y), y)
        return pull(jnp.ones(y.shape, y.dtype))[0]

    y = np.array([[0.0, -1.0, 1.5]], np.float32)
    found, expected = (
        jax.jvp(lambda y, f=f: gradient(f, y), (y,), (np.ones_like(y),))
        for f in (jm.fuse, jax.vmap)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("taken", [1.0, -1.0])
def test_a_condition_that_all_elements_share_stays_one(taken: float) -> None:
    """One branch runs, and its derivative is its own; a program is in each."""

    def function(x: jax.Array, p: jax.Array) -> jax.Array:
        return jax.lax.cond(p > 0, lambda y: jnp.sqrt(y - x[0]), lambda y: jnp.sin(2 * y), x)

    def derived(transform: Function) -> Function:
        fused = transform(function, (0, None))
        return lambda x, p: (fused(x, p), jax.grad(energy_of(fused))(x, p))

    p = jnp.asarray(taken)
    found, expected = (jax.jit(derived(f))(VECTORS, p) for f in (jm.fuse, jax.vmap))
    assert_same(found, expected)
    fused = jm.fuse(function, (0, None))
    assert "cond" in primitives(fused, VECTORS, p)
    assert len(programs(fused, VECTORS, p)) >= 2
    # Where an outer vmap maps it, both branches run, as they do under two.
    outer = [
        jax.jit(jax.vmap(derived(f), (None, 0)))(VECTORS, jnp.array([1.0, -1.0]))
        for f in (jm.fuse, jax.vmap)
    ]
    assert_same(*outer)


@pytest.mark.usefixtures("standard_promotion")
def test_derivatives_of_several_kinds_of_rules() -> None:
    """Forward over reverse where a reverse rule is, and where an argument has no tangent."""

    @jax.custom_vjp
    def fourfold(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    fourfold.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (4 * jnp.cos(x) * ct,))

    def product(transform: Function) -> Any:
        gradient = jax.grad(energy_of(transform(lambda x: fourfold(x) * jnp.max(x))))
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),)))(VECTORS)

    def forward(transform: Function) -> Any:
        function = transform(lambda x, y: jnp.max(x) + jnp.sqrt(y - y))
        return jax.jvp(lambda x: function(x, VECTORS[:, 0]), (VECTORS,), (VECTORS,))

    for each in (product, forward):
        assert_same(each(jm.fuse), each(jax.vmap))


@pytest.mark.parametrize("precision", [None, "default", "highest"])
def test_what_stands_for_a_kernel_is_as_precise(precision: Any) -> None:
    """Plain JAX multiplies on a GPU in fewer bits if nobody asks for all of them."""
    a, b = jnp.ones((3, 3), jnp.float32), jnp.ones((ELEMENTS, 3, 3), jnp.float32)

    def function(b: jax.Array) -> jax.Array:
        return jnp.sin(b) @ (a @ jnp.matmul(a, b, precision=precision))

    for program in programs(jm.fuse(function), b):
        arrays = [jnp.ones((1,) * len(x.batch) + x.tile, x.dtype) for x in program.arguments]
        jaxpr = jax.make_jaxpr(functools.partial(reference.evaluate, program))(*arrays)
        products = [x for x in equations(jaxpr.jaxpr) if x.primitive.name == "dot_general"]
        assert products
        for x in products:
            assert set(x.params["precision"]) == {jax.lax.Precision.HIGHEST}


# ---- Errors --------------------------------------------------------------------------------------

X = np.ones((ELEMENTS, 3))
WRONG: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "sizes": ({}, (X, X[:2])),
    "too few axes": ({"in_axes": (0,)}, (X, X)),
    "too many axes": ({"in_axes": (0, 0, 0)}, (X, X)),
    "no tree of axes": ({"in_axes": ({"a": 0}, 0)}, (X, X)),
    "axis out of range": ({"in_axes": (2, 0)}, (X, X)),
    "negative axis out of range": ({"in_axes": (0, -3)}, (X, X)),
    "axis of a scalar": ({}, (1.0, X)),
    "no axis at all": ({"in_axes": None}, (X, X)),
    "axes of no integer": ({"in_axes": ("a", 0)}, (X, X)),
    "out axis out of range": ({"out_axes": 2}, (X, X)),
    "tree of out axes": ({"out_axes": (0, 0)}, (X, X)),
    "none of a result that depends": ({"out_axes": None}, (X, X)),
    "no arrays": ({}, ("a", X)),
    "shapes in the element": ({}, (X, np.ones((ELEMENTS, 4)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_vmap(name: str) -> None:
    axes, arguments = WRONG[name]

    def add(a: Any, b: Any) -> Any:
        return a + b

    errors = []
    for transform in (jax.vmap, jm.fuse):
        with pytest.raises(Exception) as caught:
            transform(add, **axes)(*arguments)
        errors.append(caught.value)
    expected, found = errors
    assert type(found) is type(expected)
    # vmap calls the function by its name, which fuse keeps; the first line tells what is wrong.
    assert str(found).splitlines()[0] == str(expected).splitlines()[0]


def test_messages_about_the_function_name_it_and_its_arguments() -> None:
    def sign(first: jax.Array, others: Any) -> Any:
        return first if others["x"][0] > 0 else -first

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jm.fuse(sign)(X, {"x": X})
    assert "the function sign at" in str(caught.value)
    assert "others['x']" in str(caught.value)
    with pytest.raises(TypeError, match=r"<class 'str'>.*not a valid JAX type"):
        jm.fuse(lambda x: "a")(X)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="callable"):
        jm.fuse(3)  # type: ignore[arg-type]


def test_name_and_documentation_are_kept() -> None:
    assert jm.fuse(doubled).__doc__ == doubled.__doc__
    assert jm.fuse(stress).__name__ == "stress"


def test_an_error_of_the_function_itself_is_its_own() -> None:
    def wrong(a: jax.Array) -> jax.Array:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        jm.fuse(wrong)(X)
