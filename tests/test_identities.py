"""Derivatives in all directions at once: the identity that they begin with costs nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.identities import identity
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, ElementProgram, Map
from tests.jaxprs import programs


RNG = np.random.default_rng(5)
NODES, POINTS = 7, 4
SLOPES = RNG.uniform(-1, 1, (POINTS, NODES, 3))
WEIGHTS = RNG.uniform(0.5, 1.5, POINTS)
X = RNG.uniform(-0.2, 0.2, (5, NODES, 3))
U = RNG.uniform(-0.2, 0.2, (5, NODES, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def geometry(x: Any) -> tuple[Any, Any]:
    jacobian = jnp.einsum("qnd,ni->qid", SLOPES, x) + 4 * jnp.eye(3)
    g = jnp.einsum("qnd,qde->qne", SLOPES, jnp.linalg.inv(jacobian))
    return g, WEIGHTS * jnp.linalg.det(jacobian)


def energy(u: Any, x: Any) -> Any:
    g, weights = geometry(x)
    f = jnp.eye(3) + jnp.einsum("qne,na->qae", g, u)
    log = jnp.log(jnp.linalg.det(f))
    return jnp.sum(weights * (jnp.sum(f * f, (1, 2)) / 2 - log + log**2))


def of_scalars(u: Any, x: Any) -> Any:
    g, weights = geometry(x)
    return jnp.sum(weights * jnp.sum(jnp.einsum("qne,n->qe", g, u) ** 2, 1)) / 2


DERIVATIVES = {
    "hessian": jax.hessian,
    "forward": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse": lambda f: jax.jacrev(jax.grad(f)),
}


def products(program: ElementProgram) -> list[int]:
    """How many products each product of two tiles of an element adds up, of all its values."""
    return [
        int(np.prod(list(x.extents.values())))
        for x in normal_form(program)[0].operations
        if isinstance(x, Contract) and len(x.terms) == 2 and len(x.output) < len(x.extents)
    ]


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_tangents(derivative: Callable[..., Any]) -> None:
    def matrix(u: Any, x: Any) -> Any:
        return derivative(energy)(u, x).reshape(3 * NODES, 3 * NODES)

    found, wanted = (jax.jit(f(matrix))(U, X) for f in (jm.fuse, jax.vmap))
    np.testing.assert_allclose(found, wanted, 1e-11, 1e-11)
    if derivative is DERIVATIVES["reverse"]:
        return  # it is two programs
    (program,) = programs(jm.fuse(matrix), U, X)
    # No product has all directions, only those of one component.
    assert max(products(program)) <= max(POINTS * NODES**2, SLOPES.size * 3)


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_matrices_of_scalar_fields(derivative: Callable[..., Any]) -> None:
    """As many products as a contraction of gradients has."""

    def matrix(u: Any, x: Any) -> Any:
        return derivative(of_scalars)(u, x)

    def contraction(u: Any, x: Any) -> Any:
        g, weights = geometry(x)
        return jnp.einsum("qae,qbe,q->ab", g, g, weights)

    found, wanted = (jax.jit(jm.fuse(f))(U[..., 0], X) for f in (matrix, contraction))
    np.testing.assert_allclose(found, wanted, 1e-11, 1e-11)
    (one,), (other,) = (programs(jm.fuse(f), U[..., 0], X) for f in (matrix, contraction))
    assert products(one) == products(other)


ENERGIES = {
    "determinant": jnp.linalg.det,
    "trace": lambda f: jnp.trace(f.T @ f) ** 2,
    "strain": lambda f: jnp.sum((f.T @ f - jnp.eye(3)) ** 2),
    "minors": lambda f: jnp.sum(jnp.cross(f[0], f[1]) * f[2]) ** 3,
}


@pytest.mark.parametrize("energy", ENERGIES.values(), ids=ENERGIES)
def test_no_direction_is_multiplied_where_it_is_zero(energy: Callable[..., Any]) -> None:
    """At several points, of what takes components apart or adds up a diagonal."""

    def matrix(u: Any) -> Any:
        def total(u: Any) -> Any:
            f = jnp.eye(3) + jnp.einsum("qne,na->qae", SLOPES, u)
            return jnp.sum(WEIGHTS * jax.vmap(energy)(f))

        return jax.hessian(total)(u)

    found, wanted = (jax.jit(f(matrix))(U) for f in (jm.fuse, jax.vmap))
    np.testing.assert_allclose(found, wanted, 1e-11, 1e-11)
    (program,) = programs(jm.fuse(matrix), U)
    form = normal_form(program)[0]
    known = {n: x.constant for n, x in enumerate(form.inputs) if x.constant is not None}
    zeros = {n for n, x in known.items() if not x.array.any()}
    products = [x for x in form.operations if isinstance(x, Map) and x.function == "mul"]
    assert products and not any(zeros.intersection(x.operands) for x in products)


def test_what_does_not_depend_on_a_value_does_not_have_its_nan() -> None:
    u = U.copy()
    u[2, 3, 1] = np.nan
    found = jax.jit(jm.fuse(jax.hessian(energy)))(u, X)
    assert np.isnan(found[2]).all() and np.isfinite(np.delete(found, 2, 0)).all()


@pytest.mark.parametrize(
    ("shape", "order"),
    [((6, 2, 3), (0, 1, 2)), ((15, 5, 3), (0, 2, 1)), ((1, 8, 2, 4), (1, 0, 2, 3))],
)
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_identities_are_found(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> None:
    size = max(shape)
    array = np.eye(size, dtype=dtype).reshape(shape).transpose(order)
    builder = Builder(1)
    assert identity(builder, array) is not None
    array[(0,) * array.ndim] = 2
    assert identity(builder, array) is None
    assert identity(builder, np.eye(size, dtype=dtype)) is None  # a table as others are
