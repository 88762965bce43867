import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fem_demo.matrices import adjugate, determinant, eigen, largest_singular_value, unstack


SPECTRA = [
    (1, 1, 2), (1, 2, 2), (1, 1, 1), (-1, 0, 0), (0, 0, 1), (-1, 0, 1), (0, 0, 0),
    (1, 1 + 1e-9, 3), (1, 1e-8, -1e-8), (1e-20, 2e-20, 5e-20), (-3, -2, 1e3),
]  # fmt: skip


def _symmetric(spectrum: tuple[float, ...], count: int = 2000) -> np.ndarray:
    n = len(spectrum)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((count, n, n)))[0]
    A = np.einsum("pij,j,pkj->ikp", rotation, np.array(spectrum, dtype=float), rotation)
    return (A + A.swapaxes(0, 1)) / 2


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_eigen_is_accurate_for_near_and_equal_eigenvalues(
    spectrum: tuple[float, ...], dim: int
) -> None:
    spectrum = spectrum[:dim]
    A = _symmetric(spectrum)
    smallest, vector, largest = jax.jit(lambda A: eigen(unstack(A)))(jnp.asarray(A))
    scale = max(map(abs, spectrum))
    s = np.stack([np.asarray(x) for x in vector])
    np.testing.assert_allclose(smallest, min(spectrum), rtol=0, atol=4e-15 * scale)
    np.testing.assert_allclose(largest, max(spectrum), rtol=0, atol=4e-15 * scale)
    length = np.sqrt((s**2).sum(axis=0))
    assert 1 - 1e-15 <= length.min() <= length.max() <= 2**0.5 + 1e-15
    residual = np.einsum("ijp,jp->ip", A, s) - np.asarray(smallest) * s
    assert np.abs(residual).max() <= 4e-15 * scale


@pytest.mark.parametrize("dim", [2, 3])
def test_eigen_of_a_multiple_of_the_identity_is_along_x(dim: int) -> None:
    for multiple in (0.0, 1.0, -2.5):
        A = unstack(jnp.asarray(multiple * np.eye(dim)[..., None]))
        _, vector, _ = eigen(A)
        np.testing.assert_array_equal(np.concatenate(vector), np.eye(dim)[0])


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_singular_value_adjugate_and_determinant(dim: int) -> None:
    A = np.random.default_rng(1).standard_normal((dim, dim, 5000))
    rows = unstack(jnp.asarray(A))
    adj = adjugate(rows)
    det = determinant(rows, adj)
    matrices = np.moveaxis(A, -1, 0)
    np.testing.assert_allclose(det, np.linalg.det(matrices), atol=1e-13)
    singular = np.linalg.svd(matrices, compute_uv=False)
    np.testing.assert_allclose(largest_singular_value(rows), singular[:, 0], rtol=4e-15)
