"""``jax.export`` of functions that jaxmagma runs: what comes back computes the same."""

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from tests.einsums import ELEMENTS, assert_close, normal


GetKey = Callable[[], jax.Array]
MASS = "xi,yj,exy,xa,yb,eab->eij"

# Nobody but jaxmagma promises that a later version still knows a kernel of this one.
CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in ("jaxmagma_cpu", "jaxmagma_cuda")
]


def export(function: Callable[..., Any], *arguments: Any, **options: Any) -> jax.export.Exported:
    return jax.export.export(jax.jit(function), disabled_checks=CHECKS, **options)(*arguments)


@pytest.fixture
def operands(getkey: GetKey) -> tuple[jax.Array, ...]:
    shapes = (4, 3), (ELEMENTS, 4, 4), (ELEMENTS, 3, 3)
    return tuple(normal(getkey(), shape) for shape in shapes)


def mass(b: Any, d: jax.Array, u: jax.Array) -> jax.Array:
    return jm.einsum(MASS, b, b, d, b, b, u)


def round_trip(exported: jax.export.Exported, derivatives: int = 1) -> jax.export.Exported:
    if importlib.util.find_spec("flatbuffers") is None:
        pytest.skip("jax.export serialises with flatbuffers, which is not installed")
    return jax.export.deserialize(exported.serialize(vjp_order=derivatives))


def test_call(operands: tuple[jax.Array, ...]) -> None:
    exported = export(mass, *operands)
    assert_close(exported.call(*operands), mass(*operands), 1e-14)
    assert_close(jax.jit(exported.call)(*operands), mass(*operands), 1e-14)


def test_round_trip(operands: tuple[jax.Array, ...]) -> None:
    found = round_trip(export(mass, *operands))
    assert_close(found.call(*operands), mass(*operands), 1e-14)


def test_round_trip_of_a_constant_basis(operands: tuple[jax.Array, ...]) -> None:
    table, *others = operands
    found = round_trip(export(lambda d, u: mass(np.asarray(table), d, u), *others))
    assert_close(found.call(*others), mass(*operands), 1e-14)


def test_round_trip_of_a_gradient(operands: tuple[jax.Array, ...]) -> None:
    gradients = jax.grad(lambda *xs: jnp.sum(jnp.sin(mass(*xs))), (0, 1, 2))
    found = round_trip(export(gradients, *operands))
    assert_close(found.call(*operands), gradients(*operands), 1e-13)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_round_trip_of_arrays_on_several_devices(
    kind: AxisType, operands: tuple[jax.Array, ...]
) -> None:
    """They are cut when it is called as they were when it was exported."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    table, others = operands[0], [x[:64] for x in operands[1:]]
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        cut = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in others]
        gradients = jax.grad(lambda *xs: jnp.sum(jnp.sin(mass(table, *xs))), (0, 1))
        found = round_trip(export(gradients, *cut), derivatives=0)
        assert_close(jax.jit(found.call)(*cut), gradients(*others))


def test_gradient_of_what_comes_back(operands: tuple[jax.Array, ...]) -> None:
    def gradients(function: Callable[..., jax.Array]) -> Any:
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(function(*xs))), (0, 1, 2))(*operands)

    found = round_trip(export(mass, *operands))
    assert_close(gradients(found.call), gradients(mass), 1e-13)


def test_any_number_of_elements(operands: tuple[jax.Array, ...]) -> None:
    """A symbolic extent is left to plain JAX."""
    table = np.asarray(operands[0])
    (elements,) = jax.export.symbolic_shape("e")
    structs = [jax.ShapeDtypeStruct((elements, *x.shape[1:]), x.dtype) for x in operands[1:]]
    exported = export(lambda d, u: mass(table, d, u), *structs)
    for count in (1, 5, ELEMENTS):
        d, u = (x[:count] for x in operands[1:])
        assert_close(exported.call(d, u), mass(table, d, u), 1e-13)


def test_symbolic_extent_is_the_same_for_products_of_matrices() -> None:
    n, m = jax.export.symbolic_shape("n, m")
    structs = (
        jax.ShapeDtypeStruct((n, m, 3), np.float64),
        jax.ShapeDtypeStruct((n, 3, m), np.float64),
    )
    exported = export(lambda a, b: jm.einsum("eij,ejk->eik", a, b), *structs)
    assert exported.out_avals[0].shape == (n, m, m)


TABLE = np.random.default_rng(0).random((4, 3))

# Functions of one element, a matrix, and how many rows it has.
OF_ELEMENTS: dict[str, tuple[Callable[[jax.Array], Any], int]] = {
    "pointwise": (jnp.sin, 2),
    "product": (lambda u: TABLE @ u @ u.T, 3),
    "gradient": (jax.grad(lambda u: jnp.sum(jnp.sin(TABLE @ u) ** 2)), 3),
    "inverse": (jnp.linalg.inv, 3),
    "eigenvalues": (jnp.linalg.eigvalsh, 3),
    "softmax": (jax.nn.softmax, 2),
    "einsum": (lambda u: jm.einsum("xa,yb,ab->xy", TABLE, TABLE, u), 3),
}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_any_number_of_elements_of_a_function(name: str, getkey: GetKey) -> None:
    function, rows = OF_ELEMENTS[name]
    (elements,) = jax.export.symbolic_shape("e")
    exported = export(jm.fuse(function), jax.ShapeDtypeStruct((elements, rows, 3), np.float64))
    for count in (1, ELEMENTS):
        u = jnp.eye(rows, 3)[None] + 0.1 * normal(getkey(), (count, rows, 3))
        assert_close(exported.call(u), jax.vmap(function)(u), 1e-12)


def test_any_number_of_elements_of_a_vmapped_einsum(getkey: GetKey) -> None:
    (elements,) = jax.export.symbolic_shape("e")
    interpolate = jax.vmap(OF_ELEMENTS["einsum"][0])
    exported = export(interpolate, jax.ShapeDtypeStruct((elements, 3, 3), np.float64))
    u = normal(getkey(), (ELEMENTS, 3, 3))
    assert_close(exported.call(u), interpolate(u), 1e-13)


def test_gradients_for_any_number_of_elements(getkey: GetKey) -> None:
    def gradients(repeated: Callable[..., Any]) -> Callable[..., Any]:
        function = repeated(lambda table, u: jnp.tanh(table @ u), (None, 0))
        return jax.grad(lambda *xs: jnp.sum(function(*xs) ** 2), (0, 1))

    (elements,) = jax.export.symbolic_shape("e")
    structs = [jax.ShapeDtypeStruct(shape, np.float64) for shape in ((4, 3), (elements, 3))]
    exported = export(gradients(jm.fuse), *structs)
    u = normal(getkey(), (ELEMENTS, 3))
    assert_close(exported.call(TABLE, u), gradients(jax.vmap)(TABLE, u), 1e-12)


@pytest.mark.parametrize("function", [jnp.sin, jnp.sum, lambda u: u @ u.T])
def test_elements_of_any_size(function: Callable[..., Any], getkey: GetKey) -> None:
    (size,) = jax.export.symbolic_shape("n")
    exported = export(jm.fuse(function), jax.ShapeDtypeStruct((ELEMENTS, 2, size), np.float64))
    u = normal(getkey(), (ELEMENTS, 2, 5))
    assert_close(exported.call(u), jax.vmap(function)(u), 1e-12)


DOFS = np.array([[0, 2], [2, 1], [1, 0]])


@pytest.mark.parametrize(
    ("mode", "dtype"), [(None, np.int16), ("fill", np.int32), ("clip", np.int64)]
)
def test_vectors_and_meshes_of_any_size(mode: Any, dtype: Any, getkey: GetKey) -> None:
    """They are gathered from and added to by plain JAX, and so are their derivatives."""

    def assembled(dofs: jax.Array, u: jax.Array) -> jax.Array:
        into = jm.scatter_add(dofs, 4, mode=mode)
        return jm.fuse(lambda u: jnp.sin(u) * u[0], jm.gather(dofs, mode=mode), into)(u)

    def function(dofs: jax.Array, u: jax.Array) -> Any:
        gradient = jax.grad(lambda u: jnp.sum(assembled(dofs, u) ** 2))(u)
        return assembled(dofs, u), gradient

    elements, size = jax.export.symbolic_shape("e, n")
    exported = export(
        function,
        jax.ShapeDtypeStruct((elements, 2), dtype),
        jax.ShapeDtypeStruct((size,), np.float64),
    )
    for count in (2, 5):
        arguments = jnp.asarray(DOFS, dtype), normal(getkey(), (count,))
        assert_close(exported.call(*arguments), jax.jit(function)(*arguments), 1e-13)


def test_known_indices_in_vectors_of_any_size(getkey: GetKey) -> None:
    """It takes a constraint to know that all of them are inside."""
    function = jm.fuse(lambda u: 2 * u, jm.gather(DOFS))

    def exported(*constraints: str) -> jax.export.Exported:
        (size,) = jax.export.symbolic_shape("n", constraints=constraints)
        return export(function, jax.ShapeDtypeStruct((size, 2), np.float64))

    u = normal(getkey(), (5, 2))
    assert_close(exported("n >= 3").call(u), 2 * u[DOFS])
    with pytest.raises(Exception, match=r"comparison .* is inconclusive"):
        exported()


@pytest.mark.parametrize("platforms", [("tpu",), ("cpu", "tpu"), ("cpu", "cuda", "tpu")])
def test_other_platforms(platforms: tuple[str, ...], operands: tuple[jax.Array, ...]) -> None:
    """A program lowers for platforms that this machine has not, one without a backend included."""
    exported = export(mass, *operands, platforms=platforms)
    assert exported.platforms == platforms
    if "cpu" in platforms and jax.default_backend() == "cpu":
        assert_close(exported.call(*operands), mass(*operands), 1e-13)
