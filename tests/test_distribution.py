"""Gradients of shape functions that are computed first, and used everywhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, ElementProgram, Map
from tests import cuda_fused
from tests.jaxprs import programs


POINTS, NODES, FEW = 5, 10, 4
RANDOM = np.random.default_rng(11)
G: Any = RANDOM.uniform(-1, 1, (POINTS, NODES, 3))
B: Any = RANDOM.uniform(-1, 1, (POINTS, NODES))
C: Any = RANDOM.uniform(-1, 1, (POINTS, FEW))
W: Any = RANDOM.uniform(0.5, 1, POINTS)
M: Any = RANDOM.uniform(-1, 1, (FEW, 3))
# Coordinates of nodes: of a straight element, and of one with a Jacobian at each point.
STRAIGHT, CURVED = (3, 3), (NODES, 3)
# Inverses that are given, of an element or at each point, or what nodes have in their place.
GIVEN, AT_POINTS, OF_FEW = (1, 3, 3), (POINTS, 3, 3), (FEW, 3)
SHAPES = (STRAIGHT, CURVED, GIVEN, AT_POINTS, OF_FEW)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def gradients(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the shape functions, at all points, and the weights there."""
    if x.shape == AT_POINTS:
        return jnp.einsum("qnd,qde->qne", G, x), W * x[:, 0, 0]
    if x.shape in (GIVEN, OF_FEW):
        given = x[0] if x.shape == GIVEN else M.T @ x
        return G @ given, W * given[0, 0]
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


def turned(x: jax.Array, u: jax.Array) -> jax.Array:
    """Gradients along directions of the element, weighted where they are used twice."""
    g, w = gradients(x)
    directions = u[:3] + 2 * jnp.eye(3)
    t = jnp.einsum("qne,ef->qnf", g, directions)
    return jnp.einsum(
        "qnf,qfa->na", w[:, None, None] * t, jnp.tanh(jnp.einsum("qnf,na->qfa", t, u))
    )


def at_points(x: jax.Array, u: jax.Array) -> jax.Array:
    """Forces of a function of a point, added up, and something else for each node."""
    g, w = gradients(x)

    def point(g: jax.Array, w: jax.Array) -> jax.Array:
        return w * (g @ jnp.tanh(g.T @ u))

    return jnp.sum(jax.vmap(point)(g, w), 0) + 0.5 * u


def with_more(x: jax.Array, u: jax.Array) -> jax.Array:
    """Sums of products with gradients, between which others are added and subtracted."""
    g, w = gradients(x)
    h = jnp.einsum("qne,na->qae", g, u)
    first = jnp.einsum("qn,q->n", g[:, :, 0], w * h[:, 0, 0])
    second = jnp.einsum("qn,q->n", g[:, :, 1], w * h[:, 1, 0])
    third = jnp.einsum("qn,q->n", g[:, :, 2], w * h[:, 2, 1])
    return (first - u[:, 0] + jnp.sum(w)) - (u[:, 1] - second) - third


# Those whose results are of nodes: none of their values has nodes and points.
OF_NODES = (diffusion, elasticity, stokes, upwind, turned, at_points, with_more)
PROGRAMS = (*OF_NODES, stiffness, coupling)


def largest_value(program: ElementProgram) -> int:
    first = len(program.inputs)
    tiles = [x.tile for n, x in enumerate(program.operations, first) if program.batch[n]]
    return max(int(np.prod(tile)) for tile in tiles)


def products(program: ElementProgram) -> int:
    """Multiplications with tables."""
    found = [x for x in program.operations if isinstance(x, Contract) and len(x.terms) > 1]
    return sum(int(np.prod(list(x.extents.values()))) for x in found)


def operations(program: ElementProgram) -> int:
    """Of values with axes: not those of one small matrix of an element."""
    maps = [x for x in program.operations if isinstance(x, Map)]
    return 2 * products(program) + sum(int(np.prod(x.tile)) for x in maps if x.tile)


def written(element: Callable[..., Any], nodes: tuple[int, ...]) -> ElementProgram:
    return cuda_fused.program_of(element, nodes, (NODES, 3), dtype="float64")


def normal(element: Callable[..., Any], nodes: tuple[int, ...]) -> ElementProgram:
    return normal_form(written(element, nodes))[0]


@pytest.mark.parametrize("nodes", SHAPES)
@pytest.mark.parametrize("element", PROGRAMS)
def test_values_and_derivatives(element: Callable[..., Any], nodes: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize("nodes", SHAPES)
@pytest.mark.parametrize("element", OF_NODES)
def test_no_value_has_all_nodes_at_all_points(
    element: Callable[..., Any], nodes: tuple[int, ...]
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


@pytest.mark.parametrize("element", [*OF_NODES, stiffness])
def test_a_matrix_that_is_given_takes_as_many_operations_as_an_inverse(
    element: Callable[..., Any],
) -> None:
    inverse, given = normal(element, STRAIGHT), normal(element, GIVEN)
    assert operations(given) == operations(inverse)
    assert products(normal(element, AT_POINTS)) == products(inverse)
    assert products(normal(element, OF_FEW)) == products(inverse) + FEW * 9


@pytest.mark.parametrize("nodes", [GIVEN, AT_POINTS, OF_FEW])
@pytest.mark.parametrize("element", OF_NODES)
def test_takes_fewer_operations_than_what_is_written(
    element: Callable[..., Any], nodes: tuple[int, ...]
) -> None:
    assert operations(normal(element, nodes)) < operations(written(element, nodes))


@pytest.mark.parametrize("nodes", SHAPES)
@pytest.mark.parametrize("element", PROGRAMS)
def test_what_is_found_is_its_own_normal_form(
    element: Callable[..., Any], nodes: tuple[int, ...]
) -> None:
    found = normal(element, nodes)
    assert normal_form(found)[0] == found


def test_values_at_points_do_not_wait_for_what_a_matrix_needs() -> None:
    """Gradients at points come from nodes by the table, though a matrix needs ``g``, too."""

    def matrix(x: jax.Array, u: jax.Array) -> jax.Array:
        jacobian = jnp.einsum("qnd,ni->qid", G, x) + 4 * jnp.eye(3)[None]
        g = jnp.einsum("qnd,qde->qne", G, jnp.linalg.inv(jacobian))
        h = jnp.einsum("qne,n->qe", g, u)
        return jnp.einsum("q,qne,qme->nm", W * (1 + jnp.sum(h * h, 1)), g, g)

    nodes = G.shape[1]
    x, u = RANDOM.normal(size=(5, nodes, 3)) / 4, RANDOM.normal(size=(5, nodes))
    found, wanted = (jax.jit(f(matrix))(x, u) for f in (jm.fuse, jax.vmap))
    np.testing.assert_allclose(found, wanted, 1e-12, 1e-12)
    (program,) = programs(jm.fuse(matrix), x, u)
    form = normal_form(program)[0]
    summed = [x for x in form.operations if isinstance(x, Contract) and len(x.terms) == 2]
    over_nodes = [x for x in summed if nodes in x.extents.values() and nodes not in x.tile]
    assert over_nodes and normal_form(form)[0] == form
    for contraction in over_nodes:
        assert any(not form.batch[value] for value, _ in contraction.terms)


def given_first(J: jax.Array, u: jax.Array) -> jax.Array:
    g = G @ J
    return jnp.einsum("qne,qea->na", g, jnp.tanh(jnp.einsum("qne,na->qea", g, u)))


def given_last(J: jax.Array, u: jax.Array) -> jax.Array:
    h = jnp.tanh(jnp.einsum("de,qda->qea", J, jnp.einsum("qnd,na->qda", G, u)))
    return jnp.einsum("qnd,qda->na", G, jnp.einsum("de,qea->qda", J, h))


def test_a_matrix_before_or_after_what_is_derived() -> None:
    J, u = RANDOM.normal(size=(7, 3, 3)), RANDOM.normal(size=(7, NODES, 3))
    g = np.einsum("qnd,xde->xqne", G, J)
    h = np.tanh(np.einsum("xqne,xna->xqea", g, u))
    expected = np.einsum("xqne,xqea->xna", g, h)

    def square(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda J, u: (f(J, u) ** 2).sum()

    theirs = jax.grad(square(jax.vmap(given_first)), (0, 1))(J, u)
    for element in (given_first, given_last):
        fused = jm.fuse(element)
        np.testing.assert_allclose(fused(J, u), expected, rtol=1e-12, atol=1e-12)
        for x, y in zip(jax.grad(square(fused), (0, 1))(J, u), theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)
    first, last = (normal(x, (3, 3)) for x in (given_first, given_last))
    assert operations(first) <= operations(last)


def stored(J: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients are a result, too."""
    g = G @ J
    return g, jnp.einsum("qne,qe->n", g, jnp.einsum("qne,n->qe", g, u[:, 0]))


def bounded(J: jax.Array, u: jax.Array) -> jax.Array:
    """A function of them needs them as they are."""
    g = G @ J
    return jnp.tanh(g) @ jnp.einsum("qne,na->qea", g, u)


def of_corners(J: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
    """Few nodes, which are no small matrix of what is taken apart."""
    h = jnp.einsum("qnd,na->qda", G[:FEW, :FEW], u[:FEW])
    return jnp.einsum("qda,de->qea", h, J), jnp.einsum("qda,qdb->qab", h, h), h


@pytest.mark.parametrize("element", [stored, bounded, of_corners])
def test_what_is_used_as_it_is_takes_no_more_operations(element: Callable[..., Any]) -> None:
    J, u = RANDOM.normal(size=(7, 3, 3)), RANDOM.normal(size=(7, NODES, 3))
    ours, theirs = jm.fuse(element)(J, u), jax.vmap(element)(J, u)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-11)
    assert operations(normal(element, (3, 3))) <= operations(written(element, (3, 3)))


def test_sums_that_are_used_twice_each_time() -> None:
    """The ways from what is computed first to the result are many more than the operations."""

    def doubled(J: Any, u: Any) -> Any:
        g = G @ J
        for n in range(60):
            g = (g + g * u[n % NODES, 0]) / 2
        return jnp.einsum("qne,qe->n", g, jnp.einsum("qne,n->qe", g, u[:, 1]))

    J, u = RANDOM.normal(size=(7, 3, 3)), RANDOM.uniform(0.9, 1.1, size=(7, NODES, 3))
    np.testing.assert_allclose(jm.fuse(doubled)(J, u), jax.vmap(doubled)(J, u), rtol=1e-10)
    assert largest_value(normal(doubled, (3, 3))) < POINTS * NODES


def test_many_fields_with_one_derivative_are_left_as_they_are() -> None:
    """One sum of three tables is applied to them with a third of the work."""

    def along(x: jax.Array, u: jax.Array) -> jax.Array:
        g, _ = gradients(x)
        return g[:, :, 0] @ u

    program = cuda_fused.program_of(along, STRAIGHT, (NODES, 40), dtype="float64")
    found = normal_form(program)[0]
    applied = [x for x in found.operations if isinstance(x, Contract)]
    assert sum(int(np.prod(list(x.extents.values()))) for x in applied) < 2 * POINTS * NODES * 40


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_goes_where_it_should(bad: float) -> None:
    x: Any = RANDOM.normal(size=(5, *STRAIGHT))
    u: Any = RANDOM.normal(size=(5, NODES, 3))
    u[2, 4, 1] = bad
    ours, theirs = jm.fuse(elasticity)(x, u), jax.vmap(elasticity)(x, u)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
