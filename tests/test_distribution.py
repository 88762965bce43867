"""Gradients of shape functions that are computed first, and used everywhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, ElementProgram
from tests import cuda_fused


POINTS, NODES, FEW = 5, 10, 4
RANDOM = np.random.default_rng(11)
G: Any = RANDOM.uniform(-1, 1, (POINTS, NODES, 3))
B: Any = RANDOM.uniform(-1, 1, (POINTS, NODES))
C: Any = RANDOM.uniform(-1, 1, (POINTS, FEW))
W: Any = RANDOM.uniform(0.5, 1, POINTS)
# Coordinates of nodes: of a straight element, and of one with a Jacobian at each point.
STRAIGHT, CURVED = (3, 3), (NODES, 3)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def gradients(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the shape functions, at all points, and the weights there."""
    if x.shape == STRAIGHT:
        jacobian = x + 4 * jnp.eye(3)
        return jnp.einsum("qnd,de->qne", G, jnp.linalg.inv(jacobian)), W * jnp.linalg.det(jacobian)
    jacobian = jnp.einsum("qnd,ni->qid", G, x) + 12 * jnp.eye(3)[None]
    inverse = jnp.linalg.inv(jacobian)
    return jnp.einsum("qnd,qde->qne", G, inverse), W * jnp.linalg.det(jacobian)


def spherical(pressure: jax.Array) -> jax.Array:
    return jnp.einsum("q,ab->qab", pressure, jnp.eye(3))


def diffusion(x: jax.Array, u: jax.Array) -> jax.Array:
    g, w = gradients(x)
    return jnp.einsum("q,qne,qe->n", w, g, jnp.einsum("qne,n->qe", g, u[:, 0]))


def elasticity(x: jax.Array, u: jax.Array) -> jax.Array:
    g, w = gradients(x)
    h = jnp.einsum("qne,na->qae", g, u)
    strain = (h + h.swapaxes(1, 2)) / 2
    stress = 2 * strain + spherical(jnp.trace(strain, axis1=1, axis2=2))
    return jnp.einsum("q,qae,qne->na", w, stress, g)


def stokes(x: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With a pressure of lower order."""
    g, w = gradients(x)
    h = jnp.einsum("qne,na->qae", g, u)
    stress = h - spherical(C @ u[:FEW, 0])
    divergence = jnp.trace(h, axis1=1, axis2=2)
    return jnp.einsum("q,qae,qne->na", w, stress, g), C.T @ (w * divergence)


def upwind(x: jax.Array, u: jax.Array) -> jax.Array:
    """Along the velocity of each point, which the test functions lean to."""
    g, w = gradients(x)
    along = jnp.einsum("qne,qe->qn", g, B @ u)
    return (B - 0.1 * along).T @ (w * (along @ u[:, 0]))


def stiffness(x: jax.Array, u: jax.Array) -> jax.Array:
    g, w = gradients(x)
    return jnp.einsum("q,qne,qme->nm", w * (1 + (B @ u[:, 0]) ** 2), g, g)


def coupling(x: jax.Array, u: jax.Array) -> jax.Array:
    g, w = gradients(x)
    return jnp.einsum("q,qn,qme->nme", w, B * u[0, 0], g)


PROGRAMS = (diffusion, elasticity, stokes, upwind, stiffness, coupling)
# Those whose results are of nodes: none of their values has nodes and points.
OF_NODES = (diffusion, elasticity, stokes, upwind)


def largest_value(program: ElementProgram) -> int:
    first = len(program.inputs)
    tiles = [x.tile for n, x in enumerate(program.operations, first) if program.batch[n]]
    return max(int(np.prod(tile)) for tile in tiles)


def products(program: ElementProgram) -> int:
    """Multiplications with tables."""
    found = [x for x in program.operations if isinstance(x, Contract) and len(x.terms) > 1]
    return sum(int(np.prod(list(x.extents.values()))) for x in found)


def normal(element: Callable[..., Any], nodes: tuple[int, int]) -> ElementProgram:
    program = cuda_fused.program_of(element, nodes, (NODES, 3), dtype="float64")
    return normal_form(program)[0]


@pytest.mark.parametrize("nodes", [STRAIGHT, CURVED])
@pytest.mark.parametrize("element", PROGRAMS)
def test_values_and_derivatives(element: Callable[..., Any], nodes: tuple[int, int]) -> None:
    x, u = RANDOM.normal(size=(7, *nodes)), RANDOM.normal(size=(7, NODES, 3))
    fused, mapped = jm.fuse(element), jax.vmap(element)

    def agree(ours: Any, theirs: Any) -> None:
        for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-11 * np.abs(right).max())

    agree(fused(x, u), mapped(x, u))
    tangents = (RANDOM.normal(size=x.shape), RANDOM.normal(size=u.shape))
    agree(jax.jvp(fused, (x, u), tangents), jax.jvp(mapped, (x, u), tangents))
    result, pull = jax.vjp(fused, x, u)
    cotangents = jax.tree.map(lambda y: RANDOM.normal(size=y.shape), result)
    agree(pull(cotangents), jax.vjp(mapped, x, u)[1](cotangents))


@pytest.mark.parametrize("nodes", [STRAIGHT, CURVED])
@pytest.mark.parametrize("element", OF_NODES)
def test_no_value_has_all_nodes_at_all_points(
    element: Callable[..., Any], nodes: tuple[int, int]
) -> None:
    assert largest_value(normal(element, nodes)) < POINTS * NODES


def derived_first(x: jax.Array, u: jax.Array) -> jax.Array:
    """As ``elasticity``, without gradients of shape functions."""
    jacobian = x + 4 * jnp.eye(3)
    inverse, w = jnp.linalg.inv(jacobian), W * jnp.linalg.det(jacobian)
    h = jnp.einsum("qad,de->qae", jnp.einsum("qnd,na->qad", G, u), inverse)
    strain = (h + h.swapaxes(1, 2)) / 2
    stress = 2 * strain + spherical(jnp.trace(strain, axis1=1, axis2=2))
    flux = jnp.einsum("q,qae,de->qad", w, stress, inverse)
    return jnp.einsum("qad,qnd->na", flux, G)


def test_multiplies_with_tables_as_often_as_what_is_derived_first() -> None:
    first, other = normal(elasticity, STRAIGHT), normal(derived_first, STRAIGHT)
    assert products(first) == products(other)


def test_many_fields_with_one_derivative_are_left_as_they_are() -> None:
    """One sum of three tables is applied to them with a third of the work."""

    def along(x: jax.Array, u: jax.Array) -> jax.Array:
        g, _ = gradients(x)
        return g[:, :, 0] @ u

    program = cuda_fused.program_of(along, STRAIGHT, (NODES, 40), dtype="float64")
    written = normal_form(program)[0]
    applied = [x for x in written.operations if isinstance(x, Contract)]
    assert sum(int(np.prod(list(x.extents.values()))) for x in applied) < 2 * POINTS * NODES * 40


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_goes_where_it_should(bad: float) -> None:
    x: Any = RANDOM.normal(size=(5, *STRAIGHT))
    u: Any = RANDOM.normal(size=(5, NODES, 3))
    u[2, 4, 1] = bad
    ours, theirs = jm.fuse(elasticity)(x, u), jax.vmap(elasticity)(x, u)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
