"""Programs over several devices: values, gradients, and what the devices tell each other.

The CPU is eight devices (``tests/conftest.py``), so nothing here is ever skipped.
"""

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.frontends.einsum import FusedCall, capture
from jaxmagma.primitives import partition
from tests.einsums import Einsum, assert_close, normal


GetKey = Callable[[], jax.Array]

# A multiple of the number of devices, with enough elements for each of them.
ELEMENTS = 8 * 64
MASS = "xi,yj,exy,xa,yb,eab->eij"


def mass(einsum: Einsum) -> Callable[..., jax.Array]:
    """Linear in weights and values, of degree four in the shared table."""
    return lambda b, d, u: einsum(MASS, b, b, d, b, b, u)


@pytest.fixture
def operands(getkey: GetKey) -> tuple[jax.Array, ...]:
    """A table, weights at the points, and values at the nodes."""
    shapes = (3, 2), (ELEMENTS, 3, 3), (ELEMENTS, 2, 2)
    return tuple(normal(getkey(), shape) for shape in shapes)


def pullback(einsum: Einsum) -> Callable[..., Any]:
    """The cotangents of all operands, for the result itself as its cotangent."""

    def evaluate(b: jax.Array, d: jax.Array, u: jax.Array) -> Any:
        result, pull = jax.vjp(mass(einsum), b, d, u)
        return pull(result)

    return evaluate


def energy(einsum: Einsum) -> Callable[..., jax.Array]:
    return lambda *xs: jnp.sum(jnp.sin(mass(einsum)(*xs)))


def collectives(function: Callable[..., Any], *arguments: Any) -> collections.Counter[str]:
    """How often the compiled function communicates, by kind."""
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


def make_mesh(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@contextlib.contextmanager
def using(mesh: Mesh) -> Iterator[None]:
    """Explicit meshes must be the current ones; automatic ones need not be."""
    if mesh.axis_types[0] is AxisType.Explicit:
        with jax.set_mesh(mesh):
            yield
    else:
        yield


def put(mesh: Mesh, arrays: tuple[jax.Array, ...], *specs: P) -> list[jax.Array]:
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]


def spec_of(x: jax.Array) -> P:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


# ---- Batch axes that jit splits --------------------------------------------------------------


def test_the_cpu_is_eight_devices() -> None:
    assert jax.device_count() == 8


@KINDS
def test_sharded_batch_needs_no_communication(
    kind: AxisType, operands: tuple[jax.Array, ...]
) -> None:
    mesh = make_mesh(kind, d=8)
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        assert collectives(mass(jm.einsum), *sharded) == {}
        result = jax.jit(mass(jm.einsum))(*sharded)
    assert spec_of(result)[0] == "d"
    assert_close(result, mass(jnp.einsum)(*operands))


@KINDS
def test_sharded_batch_eagerly(kind: AxisType, operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(kind, d=8)
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        result = mass(jm.einsum)(*sharded)
    assert spec_of(result)[0] == "d"
    assert_close(result, mass(jnp.einsum)(*operands))


@KINDS
def test_gradient_of_the_shared_operand_is_one_all_reduce(
    kind: AxisType, operands: tuple[jax.Array, ...]
) -> None:
    mesh = make_mesh(kind, d=8)
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        assert collectives(pullback(jm.einsum), *sharded) == {"all-reduce": 1}
        found = jax.jit(pullback(jm.einsum))(*sharded)
    assert [x.sharding.is_fully_replicated for x in found] == [True, False, False]
    assert_close(found, pullback(jnp.einsum)(*operands))


@KINDS
def test_gradients_of_batched_operands_need_no_communication(
    kind: AxisType, operands: tuple[jax.Array, ...]
) -> None:
    mesh = make_mesh(kind, d=8)
    b, *sharded = put(mesh, operands, P(), P("d"), P("d"))

    def gradients(d: jax.Array, u: jax.Array) -> Any:
        return jax.grad(lambda d, u: energy(jm.einsum)(b, d, u), (0, 1))(d, u)

    with using(mesh):
        assert collectives(gradients, *sharded) == {}


@KINDS
@pytest.mark.parametrize("spec", [P(("a", "b")), P("a"), P("b"), P(("b", "a")), P()])
def test_meshes_of_two_axes(kind: AxisType, spec: P, operands: tuple[jax.Array, ...]) -> None:
    """The batch is cut by both, one or none of them."""
    mesh = make_mesh(kind, a=4, b=2)
    sharded = put(mesh, operands, P(), spec, spec)
    with using(mesh):
        counted = collectives(pullback(jm.einsum), *sharded)
        found = jax.jit(pullback(jm.einsum))(*sharded)
    assert counted == ({"all-reduce": 1} if spec != P() else {})
    assert_close(found, pullback(jnp.einsum)(*operands))


@pytest.mark.parametrize("specs", [(P("d"), P()), (P(), P("d"))])
def test_some_batched_operands_sharded(specs: tuple[P, P], operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(d=8)
    sharded = put(mesh, operands, P(), *specs)
    assert "all-gather" not in collectives(mass(jm.einsum), *sharded)
    for function in (mass, pullback):
        assert_close(jax.jit(function(jm.einsum))(*sharded), function(jnp.einsum)(*operands))


def test_operands_sharded_over_different_axes(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(a=4, b=2)
    sharded = put(mesh, operands, P(), P("a"), P("b"))
    for function in (mass, pullback):
        assert_close(jax.jit(function(jm.einsum))(*sharded), function(jnp.einsum)(*operands))


def test_sharded_tiles_are_gathered_and_right(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(a=4, b=2)
    for specs in ((P(None, "b"), P(), P("a", "b")), (P(), P(), P(None, "b", None))):
        sharded = put(mesh, operands, *specs)
        for function in (mass, pullback):
            assert_close(jax.jit(function(jm.einsum))(*sharded), function(jnp.einsum)(*operands))


@pytest.mark.usefixtures("standard_promotion")
def test_complex_operands_of_a_program_of_real_numbers(getkey: GetKey) -> None:
    mesh = make_mesh(d=8)
    B = np.asarray(normal(getkey(), (6, 5)))
    x, *parts = (normal(getkey(), (8 * 40, n)) for n in (6, 5, 5))

    def total(over: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(u: jax.Array, x: jax.Array) -> Any:
            return jnp.sum(over(lambda u, x: B.T @ (jnp.abs(B @ u) ** 2 * x))(u, x) ** 2)

        return jax.value_and_grad(evaluate, (0, 1))

    operands = jax.lax.complex(*parts), x
    sharded = put(mesh, operands, P("d"), P("d"))
    assert collectives(total(jm.fuse), *sharded) == {"all-reduce": 1}
    assert_close(jax.jit(total(jm.fuse))(*sharded), total(jax.vmap)(*operands))


def test_two_batch_axes_on_two_mesh_axes(getkey: GetKey) -> None:
    mesh = make_mesh(a=4, b=2)
    spec = "feij,ejk->feki"
    arrays = normal(getkey(), (66 * 4, 6, 2, 3)), normal(getkey(), (6, 3, 2))
    call = capture(spec, *arrays)
    assert isinstance(call, FusedCall)
    assert call.element_labels == "fe"
    sharded = put(mesh, arrays, P("a", "b"), P("b"))

    def gradients(einsum: Einsum) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(einsum(spec, *xs))), (0, 1))

    assert collectives(lambda *xs: jm.einsum(spec, *xs), *sharded) == {}
    result = jax.jit(lambda *xs: jm.einsum(spec, *xs))(*sharded)
    assert_close(result, jnp.einsum(spec, *arrays))
    # The second operand has no `f`, which the mesh axis `a` cuts.
    assert collectives(gradients(jm.einsum), *sharded) == {"all-reduce": 1}
    assert_close(jax.jit(gradients(jm.einsum))(*sharded), gradients(jnp.einsum)(*arrays))


def sum_over_elements(getkey: GetKey) -> tuple[str, tuple[jax.Array, ...]]:
    shapes = (ELEMENTS, 3), (ELEMENTS, 3, 2), (ELEMENTS, 2)
    return "ei,eij,ej->", tuple(normal(getkey(), shape) for shape in shapes)


def test_sum_over_elements_is_one_all_reduce(getkey: GetKey) -> None:
    mesh = make_mesh(d=8)
    spec, arrays = sum_over_elements(getkey)
    sharded = put(mesh, arrays, P("d"), P("d"), P("d"))

    def total(einsum: Einsum) -> Callable[..., jax.Array]:
        return lambda *xs: jnp.cos(einsum(spec, *xs))

    assert collectives(total(jm.einsum), *sharded) == {"all-reduce": 1}
    assert_close(jax.jit(total(jm.einsum))(*sharded), total(jnp.einsum)(*arrays))
    found = jax.jit(jax.grad(total(jm.einsum), (0, 1, 2)))(*sharded)
    assert_close(found, jax.grad(total(jnp.einsum), (0, 1, 2))(*arrays))


def test_sum_over_an_explicitly_sharded_axis_is_an_error_as_in_jnp(getkey: GetKey) -> None:
    mesh = make_mesh(AxisType.Explicit, d=8)
    spec, arrays = sum_over_elements(getkey)
    sharded = put(mesh, arrays, P("d"), P("d"), P("d"))
    with using(mesh):
        with pytest.raises(Exception, match="out_sharding") as expected:
            jax.make_jaxpr(lambda *xs: jnp.einsum(spec, *xs))(*sharded)
        with pytest.raises(expected.type, match="out_sharding"):
            jax.make_jaxpr(lambda *xs: jm.einsum(spec, *xs))(*sharded)


@pytest.mark.parametrize("elements", [67, 9, 5])
def test_elements_that_do_not_divide_evenly(elements: int, getkey: GetKey) -> None:
    """Padding of the last shard goes into no sum."""
    mesh = make_mesh(d=8)
    sharding = NamedSharding(mesh, P("d"))
    shapes = (3, 2), (elements, 3, 3), (elements, 2, 2)
    arrays = tuple(normal(getkey(), shape) for shape in shapes)

    def constrained(function: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(b: jax.Array, d: jax.Array, u: jax.Array) -> Any:
            d, u = jax.lax.with_sharding_constraint((d, u), sharding)
            return function(b, d, u)

        return jax.jit(evaluate)

    for function in (mass, pullback):
        found = constrained(function(jm.einsum))(*arrays)
        assert_close(found, function(jnp.einsum)(*arrays))


def test_constant_basis(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(d=8)
    table = np.asarray(operands[0])
    _, d, u = put(mesh, operands, P(), P("d"), P("d"))
    function = lambda d, u: mass(jm.einsum)(table, d, u)  # noqa: E731
    assert collectives(function, d, u) == {}
    assert_close(jax.jit(function)(d, u), mass(jnp.einsum)(*operands))


def test_result_in_a_sharding_asked_for(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(a=4, b=2)
    sharded = put(mesh, operands, P(), P("a"), P("a"))
    for spec in (P("b"), P(("a", "b")), P(), P("a", "b")):
        function = jax.jit(mass(jm.einsum), out_shardings=NamedSharding(mesh, spec))
        assert_close(function(*sharded), mass(jnp.einsum)(*operands))


def test_out_sharding_is_passed_on(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(AxisType.Explicit, d=8)
    _, d, u = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        function = jax.jit(
            lambda d, u: jm.einsum("exy,eab->xyab", d, u, out_sharding=NamedSharding(mesh, P()))
        )
        result = function(d, u)
    assert_close(result, jnp.einsum("exy,eab->xyab", *operands[1:]))


@pytest.mark.parametrize("einsum", [jnp.einsum, jm.einsum])
def test_sharding_types_follow_the_batch(einsum: Einsum, operands: tuple[jax.Array, ...]) -> None:
    """With an explicit mesh a type tells the sharding; it is what ``jnp.einsum`` says."""
    mesh = make_mesh(AxisType.Explicit, a=4, b=2)
    sharded = put(mesh, operands, P(), P("a"), P("a"))
    with using(mesh):
        aval = jax.make_jaxpr(mass(einsum))(*sharded).out_avals[0]
        gradients = jax.make_jaxpr(pullback(einsum))(*sharded).out_avals
    assert aval.sharding.spec == P("a", None, None)
    assert [x.sharding.spec[0] for x in gradients] == [None, "a", "a"]


def test_operands_whose_sharding_types_disagree_are_an_error_as_in_jnp(
    operands: tuple[jax.Array, ...],
) -> None:
    mesh = make_mesh(AxisType.Explicit, a=4, b=2)
    sharded = put(mesh, operands, P(), P("a"), P("b"))
    with using(mesh):
        with pytest.raises(Exception) as expected:
            jax.make_jaxpr(mass(jnp.einsum))(*sharded)
        with pytest.raises(expected.type):
            jax.make_jaxpr(mass(jm.einsum))(*sharded)


# ---- With other transformations --------------------------------------------------------------


@KINDS
def test_vmap(kind: AxisType, operands: tuple[jax.Array, ...], getkey: GetKey) -> None:
    """The mapped axis is one more batch axis, so it can be cut as well."""
    mesh = make_mesh(kind, a=4, b=2)
    b, d, _ = operands
    us = normal(getkey(), (2, ELEMENTS, 2, 2))
    mapped = lambda einsum: jax.vmap(mass(einsum), (None, None, 0))  # noqa: E731
    sharded = put(mesh, (b, d, us), P(), P("a"), P("b", "a"))
    with using(mesh):
        assert collectives(mapped(jm.einsum), *sharded) == {}
        result = jax.jit(mapped(jm.einsum))(*sharded)
    assert_close(result, mapped(jnp.einsum)(b, d, us))


def test_vmap_of_one_element(operands: tuple[jax.Array, ...]) -> None:
    """Elements that only ``vmap`` makes a batch are cut like others."""
    mesh = make_mesh(d=8)
    _, d, u = put(mesh, operands, P(), P("d"), P("d"))
    b = operands[0]

    def mapped(einsum: Einsum) -> Any:
        one = lambda d, u: einsum("xi,yj,xy,xa,yb,ab->ij", b, b, d, b, b, u)  # noqa: E731
        return jax.vmap(one)

    assert collectives(mapped(jm.einsum), d, u) == {}
    assert_close(jax.jit(mapped(jm.einsum))(d, u), mass(jnp.einsum)(*operands))
    # Of one element alone, every device computes all.
    one = put(mesh, (operands[1][0], operands[2][0]), P(), P())
    found = jax.jit(lambda d, u: jm.einsum("xi,yj,xy,xa,yb,ab->ij", b, b, d, b, b, u))(*one)
    assert_close(found, mass(jnp.einsum)(*operands)[0])


@KINDS
def test_scan(kind: AxisType, operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(kind, d=8)

    def steps(einsum: Einsum) -> Callable[..., jax.Array]:
        def run(b: jax.Array, d: jax.Array, u: jax.Array) -> jax.Array:
            step = lambda u, _: (u - 0.01 * mass(einsum)(b, d, u), None)  # noqa: E731
            return jax.lax.scan(step, u, None, length=3)[0]

        return run

    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        assert collectives(steps(jm.einsum), *sharded) == {}
        result = jax.jit(steps(jm.einsum))(*sharded)
    assert_close(result, steps(jnp.einsum)(*operands))


@KINDS
def test_checkpoint(kind: AxisType, operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(kind, d=8)

    def gradients(einsum: Einsum) -> Any:
        function = jax.checkpoint(lambda *xs: jnp.sum(jnp.sin(mass(einsum)(*xs))))
        return jax.grad(function, (0, 1, 2))

    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        assert collectives(gradients(jm.einsum), *sharded) == {"all-reduce": 1}
        found = jax.jit(gradients(jm.einsum))(*sharded)
    assert_close(found, jax.jit(gradients(jnp.einsum))(*operands))


@KINDS
def test_hessian_products(kind: AxisType, operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(kind, d=8)

    def products(einsum: Einsum) -> Callable[..., Any]:
        gradient = jax.grad(energy(einsum), (0, 1, 2))
        return lambda *xs: jax.jvp(gradient, xs, xs)[1]

    sharded = put(mesh, operands, P(), P("d"), P("d"))
    with using(mesh):
        assert "all-gather" not in collectives(products(jm.einsum), *sharded)
        found = jax.jit(products(jm.einsum))(*sharded)
    assert_close(found, jax.jit(products(jnp.einsum))(*operands))


def test_vmap_over_tangents_alone(operands: tuple[jax.Array, ...], getkey: GetKey) -> None:
    """Terms with and without the new axis are added; the sums over devices stay apart."""
    mesh = make_mesh(d=8)
    tangents = normal(getkey(), (2, ELEMENTS, 2, 2))

    def transformed(einsum: Einsum) -> Callable[..., Any]:
        def evaluate(b: jax.Array, d: jax.Array, u: jax.Array, ts: jax.Array) -> Any:
            def tangent(b: jax.Array) -> jax.Array:
                one = lambda t: jax.jvp(mass(einsum), (b, d, u), (b, d, t))[1]  # noqa: E731
                return jnp.sum(jnp.sin(jax.vmap(one)(ts)))

            return jax.grad(tangent)(b)

        return evaluate

    sharded = put(mesh, (*operands, tangents), P(), P("d"), P("d"), P(None, "d"))
    found = jax.jit(transformed(jm.einsum))(*sharded)
    assert_close(found, jax.jit(transformed(jnp.einsum))(*operands, tangents))


# ---- shard_map -------------------------------------------------------------------------------


def mapped_over(mesh: Mesh, einsum: Einsum, spec: P, **options: Any) -> Callable[..., jax.Array]:
    return jax.shard_map(
        mass(einsum), mesh=mesh, in_specs=(P(), spec, spec), out_specs=spec, **options
    )


@KINDS
def test_shard_map(kind: AxisType, operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(kind, d=8)
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    function = mapped_over(mesh, jm.einsum, P("d"))
    with using(mesh):
        assert collectives(function, *sharded) == {}
        assert_close(jax.jit(function)(*sharded), mass(jnp.einsum)(*operands))


def test_shard_map_eagerly(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(d=8)
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    assert_close(mapped_over(mesh, jm.einsum, P("d"))(*sharded), mass(jnp.einsum)(*operands))


def test_gradient_of_shard_map(operands: tuple[jax.Array, ...]) -> None:
    """The replicated table's cotangent is the sum over all devices."""
    mesh = make_mesh(d=8)

    def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(function(*xs))), (0, 1, 2))

    found = gradients(mapped_over(mesh, jm.einsum, P("d")))
    sharded = put(mesh, operands, P(), P("d"), P("d"))
    assert collectives(found, *sharded) == {"all-reduce": 1}
    assert_close(jax.jit(found)(*sharded), gradients(mass(jnp.einsum))(*operands))


def test_gradient_inside_shard_map(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(d=8)

    def gradients(b: jax.Array, d: jax.Array, u: jax.Array) -> Any:
        return jax.grad(energy(jm.einsum), (0, 1, 2))(b, d, u)

    specs = (P(), P("d"), P("d"))
    function = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)
    expected = jax.grad(energy(jnp.einsum), (0, 1, 2))(*operands)
    assert_close(jax.jit(function)(*operands), expected)


def test_hessian_products_of_shard_map(operands: tuple[jax.Array, ...]) -> None:
    mesh = make_mesh(d=8)

    def products(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(function(*xs))), (0, 1, 2))
        return jax.jit(lambda *xs: jax.jvp(gradient, xs, xs)[1])

    found = products(mapped_over(mesh, jm.einsum, P("d")))(*operands)
    assert_close(found, products(mass(jnp.einsum))(*operands))


@pytest.mark.parametrize("closed_over", [False, True])
def test_shard_map_over_one_of_two_mesh_axes(
    closed_over: bool, operands: tuple[jax.Array, ...]
) -> None:
    mesh = make_mesh(a=4, b=2)
    function = mapped_over(mesh, jm.einsum, P("a"), axis_names={"a"})
    if closed_over:
        table = np.asarray(operands[0])
        function = jax.shard_map(
            lambda d, u: mass(jm.einsum)(table, d, u),
            mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"), axis_names={"a"},
        )  # fmt: skip
    arguments = operands[1:] if closed_over else operands
    assert_close(jax.jit(function)(*arguments), mass(jnp.einsum)(*operands))
    loss = lambda *xs: jnp.sum(jnp.sin(function(*xs)))  # noqa: E731
    found = jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)
    expected = jax.grad(energy(jnp.einsum), (0, 1, 2))(*operands)
    assert_close(found, expected[3 - len(found) :])


def test_shard_map_over_one_axis_of_arrays_sharded_over_both(
    operands: tuple[jax.Array, ...],
) -> None:
    mesh = make_mesh(a=4, b=2)
    sharded = put(mesh, operands, P(), P(("a", "b")), P(("a", "b")))
    function = mapped_over(mesh, jm.einsum, P("a"), axis_names={"a"})
    assert_close(jax.jit(function)(*sharded), mass(jnp.einsum)(*operands))


def test_vmap_of_shard_map(operands: tuple[jax.Array, ...], getkey: GetKey) -> None:
    mesh = make_mesh(d=8)
    b, d, _ = operands
    us = normal(getkey(), (2, ELEMENTS, 2, 2))
    function = jax.vmap(mapped_over(mesh, jm.einsum, P("d")), (None, None, 0))
    assert_close(jax.jit(function)(b, d, us), jax.vmap(mass(jnp.einsum), (None, None, 0))(b, d, us))


def test_sum_over_elements_in_shard_map(getkey: GetKey) -> None:
    mesh = make_mesh(d=8)
    spec, arrays = sum_over_elements(getkey)

    def total(einsum: Einsum) -> Callable[..., jax.Array]:
        return lambda *xs: jax.lax.psum(einsum(spec, *xs), "d")

    function = jax.shard_map(total(jm.einsum), mesh=mesh, in_specs=(P("d"),) * 3, out_specs=P())
    assert_close(jax.jit(function)(*arrays), jnp.einsum(spec, *arrays))
    found = jax.jit(jax.grad(function, (0, 1, 2)))(*arrays)
    assert_close(found, jax.grad(lambda *xs: jnp.einsum(spec, *xs), (0, 1, 2))(*arrays))


# ---- The rule --------------------------------------------------------------------------------


def rule_of(spec: str, *shapes: tuple[int, ...]) -> tuple[str, dict[str, tuple[str, ...]]]:
    call = capture(spec, *(np.ones(shape) for shape in shapes))
    assert isinstance(call, FusedCall)
    return partition.sharding_rule(call.program)


def test_rule_cuts_batch_axes_and_no_tiles() -> None:
    assert rule_of("xa,eab->exb", (4, 3), (9, 3, 2)) == (
        "t0 t1, b0 t2 t3 -> b0 t4 t5",
        {"need_replication_factors": ("t0", "t1", "t2", "t3", "t4", "t5")},
    )


def test_rule_names_what_is_summed_over() -> None:
    rule, factors = rule_of("ei,eij,ej->", (9, 3), (9, 3, 2), (9, 2))
    assert rule == "b0 t0, b0 t1 t2, b0 t3 -> "
    assert factors["reduction_factors"] == ("b0",)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.max(x) * x,
        lambda x: jax.nn.relu(x) * x,
        lambda x: x[1:3] * x[0],
        lambda x: jnp.pad(x, (1, 1)),
        lambda x: jnp.cumsum(x.reshape(2, 2) ** 2, 0).reshape(4),
    ],
    ids=["max", "relu", "slice", "pad", "reshape"],
)
def test_gradients_on_an_explicit_mesh(function: Callable[..., Any], getkey: GetKey) -> None:
    mesh = make_mesh(AxisType.Explicit, d=8)
    x = jax.random.normal(getkey(), (64, 4))

    def energy(transform: Callable[..., Any], x: jax.Array) -> jax.Array:
        return jnp.sum(transform(function)(x) ** 2)

    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("d", None)))
        found, expected = (
            jax.jit(jax.grad(functools.partial(energy, f)))(sharded) for f in (jm.fuse, jax.vmap)
        )
        assert jax.typeof(found).sharding == jax.typeof(expected).sharding
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_loops_of_xla_on_an_explicit_mesh(loops: None, getkey: GetKey) -> None:
    """Plain JAX, though the function calls one that is compiled."""
    mesh = make_mesh(AxisType.Explicit, d=8)
    x = jax.random.normal(getkey(), (64, 4))
    function = functools.partial(jnp.trapezoid, dx=0.1)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("d", None)))
        found, expected = (jax.jit(f(function))(sharded) for f in (jm.fuse, jax.vmap))
        assert jax.typeof(found).sharding == jax.typeof(expected).sharding
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _halved(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: jnp.sum(c * c) > 0.1, lambda c: 0.5 * c, x)


def _relaxed(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(weight > 3, jnp.sin(c), c + x), jnp.sum(c)

    return jax.lax.scan(step, x, jnp.arange(100.0))[1]


def _solved(x: jax.Array) -> jax.Array:
    return jnp.linalg.solve(jnp.outer(x, x) + 3 * jnp.eye(4), jnp.tanh(x))


@pytest.mark.parametrize(
    ("function", "derivative"),
    [(_halved, "forward"), (_relaxed, "gradient"), (_solved, "gradient")],
    ids=["while", "scan", "solve"],
)
def test_loops_and_solvers_on_an_explicit_mesh(
    function: Callable[..., Any], derivative: str, getkey: GetKey
) -> None:
    """What is no operation of a kernel holds a jaxpr, which is one of values on that mesh."""
    mesh = make_mesh(AxisType.Explicit, d=8)
    x = jax.random.normal(getkey(), (64, 4))

    def values(transform: Callable[..., Any], x: jax.Array) -> Any:
        mapped = transform(function)
        if derivative == "forward":
            return mapped(x), jax.jvp(mapped, (x,), (x,))[1]
        return mapped(x), jax.grad(lambda x: jnp.sum(mapped(x) ** 2))(x)

    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("d", None)))
        found, expected = (
            jax.jit(functools.partial(values, f))(sharded) for f in (jm.fuse, jax.vmap)
        )
    for one, other in zip(found, expected, strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.fixture
def compilation_cache(tmp_path: Path) -> Iterator[Path]:
    """JAX's persistent cache, to begin with empty, in which partitioned calls have no addresses."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_remove_custom_partitioning_ptr_from_cache_key": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def test_compilation_cache(operands: tuple[jax.Array, ...], compilation_cache: Path) -> None:
    """Executables are found again, and those of other programs with the same shapes are not."""
    b, *cut = operands
    cut = put(make_mesh(d=8), tuple(cut), P("d"), P("d"))

    def entries() -> set[str]:
        return {x.name for x in compilation_cache.iterdir() if x.name.endswith("-cache")}

    def compiled(b: jax.Array, subscripts: str) -> int:
        """The number of executables that were not found."""
        function = lambda einsum, d, u: einsum(subscripts, b, b, d, b, b, u)  # noqa: E731
        jax.clear_caches()
        expected, before = function(jnp.einsum, *cut), entries()
        assert_close(jax.jit(functools.partial(function, jm.einsum))(*cut), expected)
        return len(entries() - before)

    assert compiled(b, MASS) == 1
    assert compiled(b, MASS) == 0
    # With another constant, and with the points in another order.
    assert compiled(b + 1, MASS) == 1
    assert compiled(b, "xi,yj,eyx,xa,yb,eab->eij") == 1
