import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fem_demo.spectrum import ends, largest_singular_value


SPECTRA = [
    (1, 1, 2), (1, 2, 2), (1, 1, 1), (-1, 0, 0), (0, 0, 1), (-1, 0, 1), (0, 0, 0),
    (1, 1 + 1e-9, 3), (1, 1e-8, -1e-8), (1e-20, 2e-20, 5e-20), (-3, -2, 1e3),
]  # fmt: skip


ends_of_many = jax.jit(jax.vmap(ends))
slopes_of_ends = jax.jit(jax.jacobian(ends))


def _symmetric(spectrum: tuple[float, ...], count: int = 2000) -> np.ndarray:
    n = len(spectrum)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((count, n, n)))[0]
    A = np.einsum("pij,j,pkj->pik", rotation, np.array(spectrum, dtype=float), rotation)
    return (A + A.swapaxes(1, 2)) / 2


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_ends_are_accurate_for_near_and_equal_eigenvalues(
    spectrum: tuple[float, ...], dim: int
) -> None:
    spectrum = spectrum[:dim]
    A = _symmetric(spectrum)
    smallest, s, largest = ends_of_many(jnp.asarray(A))
    scale = max(map(abs, spectrum))
    np.testing.assert_allclose(smallest, min(spectrum), rtol=0, atol=4e-15 * scale)
    np.testing.assert_allclose(largest, max(spectrum), rtol=0, atol=4e-15 * scale)
    length = np.sqrt((np.asarray(s) ** 2).sum(axis=1))
    assert 1 - 1e-15 <= length.min() <= length.max() <= 2**0.5 + 1e-15
    residual = np.einsum("pij,pj->pi", A, s) - np.asarray(smallest)[:, None] * s
    assert np.abs(residual).max() <= 4e-15 * scale


@pytest.mark.parametrize("dim", [2, 3])
def test_the_vector_of_a_multiple_of_the_identity_is_along_x(dim: int) -> None:
    multiples = np.array([0.0, 1.0, -2.5])
    _, vectors, _ = ends_of_many(multiples[:, None, None] * np.eye(dim))
    np.testing.assert_array_equal(vectors, np.tile(np.eye(dim)[0], (3, 1)))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_ends_are_differentiable_at_equal_eigenvalues(dim: int) -> None:
    """With derivatives that add up to those of the trace, which are the identity."""
    for multiple in (0.0, 1.0, -2.5):
        A = multiple * jnp.eye(dim)
        slopes = slopes_of_ends(A)
        for derivative in (slopes[0], slopes[2]):
            assert np.trace(derivative) == pytest.approx(1)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_singular_value(dim: int) -> None:
    A = np.random.default_rng(1).standard_normal((5000, dim, dim))
    singular = np.linalg.svd(A, compute_uv=False)
    found = jax.jit(jax.vmap(largest_singular_value))(jnp.asarray(A))
    np.testing.assert_allclose(found, singular[:, 0], rtol=4e-15)
