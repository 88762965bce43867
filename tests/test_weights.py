"""Sums over points of weighted products."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, ElementProgram
from tests.jaxprs import programs


POINTS, NODES = 5, 7
RNG = np.random.default_rng(0)
A = RNG.uniform(-1, 1, (4, POINTS, NODES))
B = RNG.uniform(-1, 1, (4, POINTS, NODES))
W = RNG.uniform(0.5, 1.5, (4, POINTS))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def one_einsum(a: Any, b: Any, w: Any) -> Any:
    return jnp.einsum("q,qi,qj->ij", w, jnp.sin(a), b)


def point_by_point(a: Any, b: Any, w: Any) -> Any:
    outer = jnp.sin(a)[:, :, None] * b[:, None, :]
    return jnp.sum(w[:, None, None] * outer, 0)


def mapped(a: Any, b: Any, w: Any) -> Any:
    return jnp.sum(jax.vmap(lambda a, b, w: jnp.outer(jnp.sin(a), b) * w)(a, b, w), 0)


def several(a: Any, b: Any, w: Any) -> Any:
    """Differences, numbers, weights of weights, and a product with what has no axis."""
    outer = jnp.einsum("qi,qj->qij", a, b)
    swapped = jnp.einsum("qi,qj->qij", 3 * b, jnp.cos(a))
    alone = jnp.broadcast_to(b[:, :, None], outer.shape)
    return jnp.sum((w**2)[:, None, None] * (w[:, None, None] * (outer - swapped) + alone), 0)


def shared(a: Any, b: Any, w: Any) -> Any:
    """Products that two sums have in common, each with a number of its own."""
    outer = jnp.einsum("qi,qj->qij", a, b)
    other = jnp.einsum("qi,qj->qij", 2 * a, b)
    return jnp.sum(w[:, None, None] * outer, 0), jnp.sum(w[:, None, None] * other, 0)


def needed(a: Any, b: Any, w: Any) -> Any:
    """What is a result at the points, too."""
    outer = jnp.einsum("qi,qj->qij", a, b)
    return outer, jnp.sum(w[:, None, None] * outer, 0)


def to_the_sum(a: Any, b: Any, w: Any) -> Any:
    """A function of a product is none."""
    outer = jnp.einsum("qi,qj->qij", a, b)
    return jnp.sum(w[:, None, None] * jnp.tanh(outer), 0)


def same_at_all_points(a: Any, b: Any, w: Any) -> Any:
    outer = jnp.einsum("qi,qj->qij", a, b)
    return jnp.sum(w[:, None, None] * outer + a[0][:, None] * b[1] + b[2][:, None], 0)


FUNCTIONS = [
    same_at_all_points,
    one_einsum,
    point_by_point,
    mapped,
    several,
    shared,
    needed,
    to_the_sum,
]


def program(function: Callable[..., Any]) -> ElementProgram:
    (found,) = programs(jm.fuse(function), A, B, W)
    return normal_form(found)[0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(function: Callable[..., Any]) -> None:
    found, wanted = (jax.tree.leaves(jax.jit(f(function))(A, B, W)) for f in (jm.fuse, jax.vmap))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-12, 1e-12)


@pytest.mark.parametrize("function", [point_by_point, mapped])
def test_is_a_program_like_that_of_one_einsum(function: Callable[..., Any]) -> None:
    """But for the factor that has the weight."""
    assert len(program(function).operations) == len(program(one_einsum).operations)


@pytest.mark.parametrize("function", [point_by_point, mapped, several, shared])
def test_nothing_has_all_nodes_and_nodes_at_all_points(function: Callable[..., Any]) -> None:
    assert max(len(x.tile) for x in program(function).operations) == 2


def test_numbers_come_after_the_sum() -> None:
    products = [x for x in program(shared).operations if isinstance(x, Contract)]
    assert len(products) == 1


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_a_number(function: Callable[..., Any], which: int) -> None:
    given = [x.copy() for x in (A, B, W)]
    given[which][2, 3] = np.nan
    found, wanted = (jax.tree.leaves(jax.jit(f(function))(*given)) for f in (jm.fuse, jax.vmap))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))


# Two gradients of each function, and what stresses they make.
PAIRS = RNG.uniform(-1, 1, (2, 6, POINTS, NODES, 2))
MODULI = RNG.uniform(-1, 1, (2, 3, 2, 3))
WEIGHTS = RNG.uniform(0.5, 1.5, (6, POINTS))


def gradients(a: Any) -> Any:
    """What is computed component by component."""
    return jnp.stack([jnp.sin(a[..., 0]), a[..., 1] * a[..., 0]], -1)


def by_one_einsum(a: Any, b: Any, w: Any) -> Any:
    """Blocks of a matrix that are sums of the same products, each times a tensor of moduli."""
    return jnp.einsum("qnj,jilk,qml,q->nimk", gradients(a), MODULI, gradients(b), w)


def moduli_first(a: Any, b: Any, w: Any) -> Any:
    """The same point by point, where gradients are multiplied by moduli first."""

    def point(a: Any, b: Any, w: Any) -> Any:
        stresses = jnp.einsum("nj,jilk->nilk", gradients(a), MODULI)
        return jnp.einsum("nilk,ml->nimk", stresses, gradients(b)) * w

    return jnp.sum(jax.vmap(point)(a, b, w), 0)


def test_tables_come_after_products() -> None:
    """No stress of a node is at the points, nor a product of two, and values are the same."""
    found = []
    for function in (by_one_einsum, moduli_first):
        (program,) = programs(jm.fuse(function), *PAIRS, WEIGHTS)
        normal, _ = normal_form(program)
        at_points = [x.tile for x in normal.operations if POINTS in x.tile]
        assert max(map(math.prod, at_points)) <= POINTS * NODES * 2
        found.append(jax.jit(jm.fuse(function))(*PAIRS, WEIGHTS))
        wanted = jax.jit(jax.vmap(function))(*PAIRS, WEIGHTS)
        np.testing.assert_allclose(found[-1], wanted, 1e-12, 1e-12)
    np.testing.assert_allclose(found[0], found[1], 1e-12, 1e-12)


def test_tables_of_what_is_used_again_stay() -> None:
    def function(a: Any, b: Any, w: Any) -> Any:
        stresses = jnp.einsum("qnj,jilk->qnilk", gradients(a), MODULI)
        outer = jnp.einsum("qnilk,qml->qnimk", stresses, b)
        return jnp.sum(outer * w[:, None, None, None, None], 0), stresses - 1

    found, wanted = (jax.jit(f(function))(*PAIRS, WEIGHTS) for f in (jm.fuse, jax.vmap))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-12, 1e-12)
