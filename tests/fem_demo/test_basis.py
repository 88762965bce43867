import numpy as np
import pytest

from fem_demo.basis import ReferenceElement, bernstein, gauss_legendre, gauss_lobatto, lagrange


def test_gauss_legendre_integrates_polynomials_exactly() -> None:
    for count in range(1, 11):
        points, weights = gauss_legendre(count)
        for degree in range(2 * count):
            integral = np.sum(weights * points**degree)
            np.testing.assert_allclose(integral, 1 / (degree + 1), rtol=1e-14)


@pytest.mark.parametrize(
    ("count", "points"),
    [
        (2, [0, 1]),
        (3, [0, 0.5, 1]),
        (4, [0, 0.5 - 0.5 / 5**0.5, 0.5 + 0.5 / 5**0.5, 1]),
        (5, [0, 0.5 - 0.5 * (3 / 7) ** 0.5, 0.5, 0.5 + 0.5 * (3 / 7) ** 0.5, 1]),
    ],
)
def test_gauss_lobatto_points(count: int, points: list[float]) -> None:
    np.testing.assert_allclose(gauss_lobatto(count), points, rtol=0, atol=2e-16)


def test_lagrange_reproduces_polynomials_and_their_slopes() -> None:
    for count in range(2, 8):
        nodes, points = gauss_lobatto(count), np.linspace(0, 1, 13)
        values, slopes = lagrange(nodes, points)
        np.testing.assert_allclose(lagrange(nodes, nodes)[0], np.eye(count), atol=1e-14)
        for degree in range(count):
            np.testing.assert_allclose(values @ nodes**degree, points**degree, atol=1e-13)
            exact = degree * points ** max(degree - 1, 0)
            np.testing.assert_allclose(slopes @ nodes**degree, exact, atol=1e-11)


def test_bernstein_is_a_positive_partition_of_unity() -> None:
    points = np.linspace(0, 1, 11)
    for degree in range(6):
        table = bernstein(degree, points)
        assert table.min() >= 0
        np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-14)
        np.testing.assert_allclose(table @ (np.arange(degree + 1)), degree * points, atol=1e-13)


def test_reference_element_tables_have_the_shapes_of_the_pair_of_spaces() -> None:
    element = ReferenceElement(3, 4)
    assert element.values.shape == element.slopes.shape == (8, 5)
    assert element.energy_values.shape == (8, 4)
    assert element.weights.shape == (8, 8, 8)
    np.testing.assert_allclose(element.weights.sum(), 1, rtol=1e-14)
    assert element == ReferenceElement(3, 4)
    assert hash(element) == hash(ReferenceElement(3, 4))


def test_reference_element_rejects_nonsense() -> None:
    with pytest.raises(ValueError, match="dimension"):
        ReferenceElement(4, 2)
    with pytest.raises(ValueError, match="order"):
        ReferenceElement(2, 0)
