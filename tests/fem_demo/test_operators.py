"""The fused operators against dense matrices made of the same tables."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from fem_demo import operators
from fem_demo.basis import ReferenceElement


CASES = [(1, 3), (2, 2), (2, 4), (3, 2)]


def _kron(tables: list[np.ndarray]) -> np.ndarray:
    return reduce(np.kron, tables)  # (points, nodes), both with x fastest


@pytest.mark.parametrize(("dim", "order"), CASES)
def test_mass(dim: int, order: int) -> None:
    element = ReferenceElement(dim, order)
    rng = np.random.default_rng(0)
    weights = rng.random((5, *element.weights.shape))
    field = rng.random((2, 5, *(order + 1,) * dim))
    B = _kron([element.values] * dim)
    dense = np.einsum("qi,eq,qj,mej->mei", B, weights.reshape(5, -1), B, field.reshape(2, 5, -1))
    mass = jm.fuse(partial(operators.mass, element.values), in_axes=(0, 1), out_axes=1)
    result = mass(jnp.asarray(weights), jnp.asarray(field))
    np.testing.assert_allclose(result.reshape(2, 5, -1), dense, rtol=1e-12)


@pytest.mark.parametrize(("dim", "order"), CASES)
def test_gradient_force_and_power(dim: int, order: int) -> None:
    element = ReferenceElement(dim, order)
    rng = np.random.default_rng(0)
    velocity = rng.random((dim, 4, *(order + 1,) * dim))
    stress = rng.random((dim, dim, 4, *element.weights.shape))
    G = np.stack([_kron(operators.slope_tables(element, g)) for g in range(dim)])
    gradient = np.einsum("gqi,mei->gmeq", G, velocity.reshape(dim, 4, -1))
    flat = stress.reshape(dim, dim, 4, -1)

    def fused(operator: Callable[..., Any], in_axes: Any, out_axes: int) -> Callable[..., Any]:
        return jm.fuse(partial(operator, element), in_axes, out_axes)

    result = fused(operators.gradient, 1, 2)(jnp.asarray(velocity))
    np.testing.assert_allclose(result.reshape(gradient.shape), gradient, rtol=1e-11, atol=1e-12)
    force = fused(operators.force, 2, 1)(jnp.asarray(stress))
    expected = np.einsum("gqi,gmeq->mei", G, flat)
    np.testing.assert_allclose(force.reshape(expected.shape), expected, rtol=1e-11, atol=1e-12)
    power = fused(operators.power, (2, 1), 0)(jnp.asarray(stress), jnp.asarray(velocity))
    expected = np.einsum("gmeq,gmeq->eq", flat, gradient)
    np.testing.assert_allclose(power.reshape(expected.shape), expected, rtol=1e-11, atol=1e-12)
