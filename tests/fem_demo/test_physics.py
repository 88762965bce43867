"""The response of points against NumPy's eigenvectors and singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from fem_demo.physics import Material, Response, respond


DIMS = [1, 2, 3]
ORDER, GAMMA, LENGTH = 2, 1.4, 0.3


def _response(
    mass: jax.Array, inverse: jax.Array, x: jax.Array, energy: jax.Array, v: jax.Array | None
) -> Response:
    material = Material(mass, jnp.asarray(GAMMA), inverse, jnp.asarray(LENGTH))
    return respond(material, ORDER, x, energy, v, vorticity_factor=True)


def _fields(dim: int, elements: int = 4) -> list[np.ndarray]:
    """Of elements with 5 points on each axis: mass, J0^-1, and the gradients of x, e and v."""
    rng = np.random.default_rng(dim)
    points = (5,) * dim
    near_identity = np.eye(dim).reshape(dim, dim, *(1,) * dim)
    matrices = (elements, dim, dim, *points)
    return [
        rng.uniform(1, 2, (elements, *points)),
        near_identity + 0.1 * rng.standard_normal(matrices),
        near_identity + 0.1 * rng.standard_normal(matrices),
        rng.uniform(-0.1, 1, (elements, *points)),
        rng.standard_normal(matrices),
    ]


@pytest.mark.parametrize("dim", DIMS)
def test_response_is_that_of_the_formulas(dim: int) -> None:
    fields = _fields(dim)
    fused = jm.fuse(_response)
    (explanation,) = jm.explain(fused, *map(jnp.asarray, fields), quiet=True)
    assert explanation.reason is None
    stress, inverse_time_step, volume = fused(*map(jnp.asarray, fields))

    mass, inverse, x, energy, v = fields
    J0inv = np.moveaxis(inverse, (1, 2), (-2, -1))
    J, V = (np.moveaxis(a, (1, 2), (-1, -2)) for a in (x, v))
    Jinv = np.linalg.inv(J)
    det, h_min = np.linalg.det(J), np.linalg.svd(J)[1][..., -1] / ORDER
    L = V @ Jinv
    D = (L + L.swapaxes(-1, -2)) / 2
    values, vectors = np.linalg.eigh(D)
    mu, s = values[..., 0], vectors[..., :1]
    h = LENGTH * np.linalg.norm((J @ J0inv @ s)[..., 0], axis=-1)
    p = (GAMMA - 1) * np.maximum(energy, 0)
    sound = np.sqrt(GAMMA * p)
    psi = abs(np.trace(L, axis1=-2, axis2=-1)) / np.linalg.norm(L, axis=(-2, -1))
    nu = 2 * h**2 * abs(mu) + 0.5 * h * sound * psi * (mu <= 0)
    sigma = nu[..., None, None] * D - p[..., None, None] * np.eye(dim)
    S = mass[..., None, None] * sigma @ Jinv.swapaxes(-1, -2)
    np.testing.assert_allclose(volume, det, rtol=1e-13)
    np.testing.assert_allclose(inverse_time_step, sound / h_min + 2.5 * nu / h_min**2, rtol=1e-12)
    expected = np.moveaxis(S, (-1, -2), (1, 2))
    np.testing.assert_allclose(stress, expected, rtol=1e-12, atol=1e-12 * abs(S).max())


@pytest.mark.parametrize("dim", DIMS)
def test_points_turned_inside_out_allow_no_step(dim: int) -> None:
    mass, inverse, x, energy, v = map(jnp.asarray, _fields(dim))
    found = jm.fuse(_response)(mass, inverse, x.at[:, 0].multiply(-1), energy, v)
    assert np.isposinf(found.inverse_time_step).all()


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("flat", [1e-4, 1e-8])
def test_time_step_of_flat_elements(dim: int, flat: float) -> None:
    """As accurate as J is; an eigenvalue of J^T J has half the digits."""
    mass, inverse, x, energy, _ = _fields(dim)
    left, right = np.linalg.qr(
        np.random.default_rng(0).standard_normal((2, *energy.shape, dim, dim))
    )[0]
    J = left * np.array([1.0, 0.5, flat])[-dim:] @ right
    J *= np.sign(np.linalg.det(J))[..., None, None]
    x = np.moveaxis(J, (-1, -2), (1, 2))
    found = jm.fuse(_response)(mass, inverse, x, np.ones_like(energy), None).inverse_time_step
    sound, h_min = np.sqrt(GAMMA * (GAMMA - 1)), np.linalg.svd(J)[1][..., -1] / ORDER
    np.testing.assert_allclose(found, sound / h_min, rtol=4e-15 / flat)


@pytest.mark.parametrize("dim", DIMS)
def test_gas_at_rest_is_differentiable(dim: int) -> None:
    mass, inverse, x, energy, v = map(jnp.asarray, _fields(dim))

    def working(energy: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jm.fuse(_response)(mass, inverse, x, energy, v).stress * x)

    slopes = jax.grad(working, (0, 1))(0 * energy, 0 * v)
    assert all(np.isfinite(slope).all() for slope in slopes)
