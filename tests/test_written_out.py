"""Loops over points that Python has written out."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.frontends.closed import closed_forms
from jaxmagma.frontends.written_out import rolled
from jaxmagma.programs.normal import normal_form
from tests.jaxprs import programs
from tests.references import both


RNG = np.random.default_rng(0)
SIGNS = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
POINTS = SIGNS / np.sqrt(3)
WEIGHTS = RNG.uniform(0.5, 1.5, 8)


def slopes_at(point: np.ndarray) -> np.ndarray:
    """Of the shape functions of a hexahedron: (8, 3)."""
    x, y, z = (1 + SIGNS * point).T
    return SIGNS * np.stack([y * z, x * z, x * y], 1) / 8


SLOPES = np.array(list(map(slopes_at, POINTS)))
NODES = (SIGNS + 1) / 2 + RNG.uniform(-0.1, 0.1, (5, 8, 3))
FIELD = RNG.uniform(-0.1, 0.1, (5, 8, 3))
DENSITY = RNG.uniform(0.5, 1.5, (5, 8))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def geometry(slopes: Any, nodes: Any) -> tuple[Any, Any]:
    jacobian = slopes.T @ nodes
    return slopes @ jnp.linalg.inv(jacobian).T, jnp.linalg.det(jacobian)


def laplacian(nodes: Any, field: Any, density: Any) -> Any:
    matrix = jnp.zeros((8, 8))
    for slopes in SLOPES:
        g, det = geometry(slopes, nodes)
        matrix = matrix + g @ g.T * det
    return matrix


def at_point(slopes: Any, nodes: Any, field: Any) -> Any:
    g, det = geometry(slopes, nodes)
    F = jnp.eye(3) + field.T @ g
    log = jnp.log(jnp.linalg.det(F))
    return (0.5 * jnp.sum(F * F) - log + 0.5 * log**2) * det


def energy(nodes: Any, field: Any, density: Any) -> Any:
    """With what Python knows, what an argument has, and a term of another kind."""
    total = 0.0
    for q in range(8):
        total += WEIGHTS[q] * density[q] * at_point(SLOPES[q], nodes, field)
    return total + jnp.sum(field**2)


def residual(nodes: Any, field: Any, density: Any) -> Any:
    return jax.grad(energy, 1)(nodes, field, density)


def listed(nodes: Any, field: Any, density: Any) -> Any:
    return sum(at_point(x, nodes, field) for x in SLOPES), jnp.mean(field)


def stacked(nodes: Any, field: Any, density: Any) -> Any:
    return jnp.stack([geometry(x, nodes)[0].T @ field for x in SLOPES], 1)


def backwards(nodes: Any, field: Any, density: Any) -> Any:
    found = [at_point(SLOPES[q], nodes, field) * density[q] for q in reversed(range(8))]
    return jnp.array(found[::-1])


def within(nodes: Any, field: Any, density: Any) -> Any:
    """A loop in a loop, each of which adds up."""
    total = 0.0
    for q, r in itertools.product(range(8), range(4)):
        total += at_point(SLOPES[q], nodes, field) * jnp.sin(SLOPES[r] * field).sum()
    return total


def differentiated(nodes: Any, field: Any, density: Any) -> Any:
    return jax.value_and_grad(energy, (0, 1, 2))(nodes, field, density)


def chosen(nodes: Any, field: Any, density: Any) -> Any:
    total = jnp.zeros((8, 3))
    for q, slopes in enumerate(SLOPES):
        g, det = geometry(slopes, nodes)
        stretch = jnp.maximum(g.T @ field, 0.0)
        total += g @ jnp.where(density[q] > 1, stretch, -stretch) * det
    return total


def one_of_another_kind(nodes: Any, field: Any, density: Any) -> Any:
    total = at_point(SLOPES[0], nodes, field) ** 2
    for slopes in SLOPES[1:]:
        total += at_point(slopes, nodes, field)
    return total


def taken_apart(nodes: Any, field: Any, density: Any) -> Any:
    """At all points at once, and then component by component at each of them."""
    g = jnp.einsum("qnd,nd->qnd", SLOPES, nodes)
    total = jnp.zeros((8, 8))
    for q in range(8):
        one, other = g[q, :, 0] + jnp.sin(g[q, :, 2]), g[q, ::-1, 1] * jnp.cos(g[q, :, 2])
        total = total + jnp.outer(one, other) + jnp.outer(other, g[q, :, 0]) * density[q]
    return total


LOOPS = [
    laplacian,
    energy,
    residual,
    listed,
    stacked,
    backwards,
    within,
    differentiated,
    chosen,
    one_of_another_kind,
]


def running(nodes: Any, field: Any, density: Any) -> Any:
    """Each step needs what the one before has made."""
    total, state = jnp.zeros(3), field
    for slopes in SLOPES:
        g, det = geometry(slopes, nodes)
        state = jnp.tanh(state + g @ (g.T @ state))
        total += det * state.sum(0)
    return total


def used_again(nodes: Any, field: Any, density: Any) -> Any:
    """Partial sums are results."""
    sums = [0.0]
    for slopes in SLOPES:
        sums.append(sums[-1] + at_point(slopes, nodes, field))
    return jnp.array(sums)


def conditional(nodes: Any, field: Any, density: Any) -> Any:
    total = 0.0
    for q, slopes in enumerate(SLOPES):
        total += jax.lax.cond(
            density[q] > 1, lambda x: at_point(x, nodes, field), lambda x: x.sum(), slopes
        )
    return total


def few(nodes: Any, field: Any, density: Any) -> Any:
    return sum(at_point(x, nodes, field) for x in SLOPES[:3])


NO_LOOPS = [running, used_again, conditional, few]


def equations(function: Callable[..., Any]) -> tuple[int, int]:
    """How many there are, and how many are left."""
    with closed_forms():
        closed = jax.make_jaxpr(function)(NODES[0], FIELD[0], DENSITY[0])
    return len(closed.jaxpr.eqns), len(rolled(closed).jaxpr.eqns)


@pytest.mark.parametrize("function", LOOPS)
def test_loops_are_found(function: Callable[..., Any]) -> None:
    before, after = equations(function)
    assert 3 * after < before


def test_places_in_parts_of_an_axis_are_found() -> None:
    """What each point has of one component is a part of what all have."""
    before, after = equations(taken_apart)
    assert 3 * after < 2 * before


@pytest.mark.parametrize("function", NO_LOOPS)
def test_what_is_no_loop_is_left_alone(function: Callable[..., Any]) -> None:
    before, after = equations(function)
    assert after == before


@pytest.mark.parametrize("function", [*LOOPS, *NO_LOOPS, taken_apart])
def test_values(function: Callable[..., Any]) -> None:
    found, wanted = both(lambda f: f(function), NODES, FIELD, DENSITY)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, 1e-11, 1e-12)


@pytest.mark.parametrize("function", [energy, chosen, stacked, within])
def test_derivatives(function: Callable[..., Any]) -> None:
    def derivatives(mapped: Callable[..., Any]) -> Callable[..., Any]:
        def total(*arguments: Any) -> Any:
            return jnp.sum(jnp.sin(mapped(function)(*arguments)))

        def tangent(nodes: Any, field: Any, density: Any) -> Any:
            return jax.jvp(lambda x: mapped(function)(x, field, density), (nodes,), (field,))[1]

        return lambda *x: (*jax.grad(total, (0, 1, 2))(*x), tangent(*x))

    for one, other in zip(*both(derivatives, NODES, FIELD, DENSITY), strict=True):
        np.testing.assert_allclose(one, other, 1e-10, 1e-11)


def test_is_the_program_of_a_mapped_function() -> None:
    def mapped(nodes: Any, field: Any, density: Any) -> Any:
        def matrix(slopes: Any) -> Any:
            g, det = geometry(slopes, nodes)
            return g @ g.T * det

        return jnp.sum(jax.vmap(matrix)(jnp.asarray(SLOPES)), 0)

    arguments = NODES, FIELD, DENSITY
    assert programs(jm.fuse(laplacian), *arguments) == programs(jm.fuse(mapped), *arguments)


def test_plain_values_are_not_changed() -> None:
    """What JAX computes of a loop is what it was, term by term."""
    with closed_forms():
        closed = jax.make_jaxpr(energy)(NODES[0], FIELD[0], DENSITY[0])
    loops = rolled(closed)
    assert len(loops.jaxpr.eqns) < len(closed.jaxpr.eqns)
    for n in range(len(NODES)):
        found, wanted = (
            jax.core.eval_jaxpr(x.jaxpr, x.consts, NODES[n], FIELD[n], DENSITY[n])
            for x in (loops, closed)
        )
        np.testing.assert_allclose(found, wanted, 1e-13)


def test_without_jit() -> None:
    with jax.disable_jit():
        found = jm.fuse(residual)(NODES, FIELD, DENSITY)
    wanted = jax.vmap(residual)(NODES, FIELD, DENSITY)
    np.testing.assert_allclose(found, wanted, 1e-10, 1e-11)


def test_what_is_not_a_number() -> None:
    field = FIELD.copy()
    field[1, 2, 0] = np.nan
    found, wanted = both(lambda f: f(stacked), NODES, field, DENSITY)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_allclose(found, wanted, 1e-10, 1e-11)


# ---- Strain matrices -----------------------------------------------------------------------------

MODULI = np.diag([1.0, 1.0, 1.0, 0.5, 0.5, 0.5]) + np.pad(np.full((3, 3), 0.7), (0, 3))
PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (0, 2))


def put(g: Any) -> Any:
    """Six strains by three displacements of each node, which are side by side."""
    matrix = jnp.zeros((6, 24), g.dtype)
    for row, (one, other) in enumerate(PAIRS):
        matrix = matrix.at[row, one::3].set(g[:, other])
        matrix = matrix.at[row, other::3].set(g[:, one])
    return matrix


def added(g: Any) -> Any:
    """The same, with what is there already."""
    matrix = jnp.zeros((24, 6), g.dtype)
    for row, (one, other) in enumerate(PAIRS):
        matrix = matrix.at[one::3, row].add(g[:, other] / (1 + (one == other)))
        matrix = matrix.at[other::3, row].add(g[:, one] / (1 + (one == other)))
    return matrix.T


def stacked_rows(g: Any) -> Any:
    zero = jnp.zeros(8, g.dtype)
    rows = []
    for one, other in PAIRS:
        components = [zero] * 3
        components[one], components[other] = g[:, other], g[:, one]
        rows.append(jnp.stack(components, 1).reshape(24))
    return jnp.stack(rows)


def stiffness(strains: Callable[..., Any], nodes: Any, field: Any) -> Any:
    matrix = jnp.zeros((24, 24))
    for slopes in SLOPES:
        g, det = geometry(slopes, nodes)
        b = strains(g)
        matrix += b.T @ MODULI @ b * det
    return matrix


def internal(strains: Callable[..., Any], nodes: Any, field: Any) -> Any:
    forces = jnp.zeros(24)
    for slopes in SLOPES:
        g, det = geometry(slopes, nodes)
        b = strains(g)
        forces += b.T @ (MODULI @ (b @ field.reshape(24))) * det
    return forces.reshape(8, 3)


@pytest.mark.parametrize("strains", [put, added, stacked_rows])
@pytest.mark.parametrize("what", [stiffness, internal])
def test_strain_matrices(what: Callable[..., Any], strains: Callable[..., Any]) -> None:
    """Nodes stay an axis, so that a program has as many operations as one with a few nodes."""

    def function(nodes: Any, field: Any) -> Any:
        return what(strains, nodes, field)

    fused = jax.jit(jm.fuse(function))
    (program,) = programs(fused, NODES, FIELD)
    assert len(program.operations) < 500
    if strains is stacked_rows:
        (other,) = programs(jm.fuse(lambda *x: what(put, *x)), NODES, FIELD)
        assert normal_form(program)[0] == normal_form(other)[0]
    np.testing.assert_allclose(fused(NODES, FIELD), jax.vmap(function)(NODES, FIELD), 1e-10, 1e-11)
    gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1))
    for one, other in zip(*both(lambda f: f(gradient), NODES, FIELD), strict=True):
        np.testing.assert_allclose(one, other, 1e-10, 1e-11)


def test_derivatives_stay_small() -> None:
    """A matrix times a vector: what is put in steps is read in steps, too."""

    def function(nodes: Any, field: Any) -> Any:
        return jnp.sum(jnp.sin(stiffness(put, nodes, field) @ field.reshape(24)))

    gradient = jax.grad(function, (0, 1))
    (program,) = programs(jm.fuse(gradient), NODES, FIELD)
    assert len(normal_form(program)[0].operations) < 1500
    for one, other in zip(*both(lambda f: f(gradient), NODES, FIELD), strict=True):
        np.testing.assert_allclose(one, other, 1e-10, 1e-11)


def test_places_in_steps_that_are_not_numbers() -> None:
    """What is put is what is there, whatever was there; zeros that were put are values."""

    def function(u: Any, v: Any) -> Any:
        matrix = jnp.zeros((2, 18)).at[0, 1::3].set(u).at[1, 2::3].set(v).at[0, 1::3].add(v)
        return matrix @ jnp.ones(18), matrix.T @ jnp.zeros(2), matrix[:, 2::3], matrix[1, 5]

    u, v = RNG.uniform(-1, 1, (2, 4, 6))
    u[1, 3], v[2, 0], v[3, 1] = np.nan, np.inf, np.nan
    found, wanted = both(lambda f: f(function), u, v)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-13)
