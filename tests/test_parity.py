"""Even and odd halves: which matrices have them, what they say of the matrix, and when they pay."""

import numpy as np
import pytest

from fem_demo import basis
from jaxmagma.plans import parity
from tests.cuda_programs import Array, random


DTYPES = ["float32", "float64", "complex64", "complex128"]


def whole(found: parity.Halves, rows: int, columns: int) -> Array:
    """The matrix that has these halves, in extended precision."""
    wide = np.result_type(found.even, np.longdouble)
    even, odd = found.even.astype(wide), found.odd.astype(wide)
    top = np.hstack([even + odd, (even - odd)[:, ::-1]])
    top = np.delete(top, columns // 2, 1) if columns % 2 else top
    bottom = found.sign * top[::-1, ::-1]
    return np.vstack([top, bottom[rows % 2 :]])


def scale(matrix: Array) -> Array:
    """Of each entry, the lesser of the largest in its row and in its column, or opposite ones."""
    size = np.abs(matrix)
    size = np.maximum(size, size[::-1, ::-1])
    rows, columns = (np.maximum(x, np.flip(x)) for x in (size.max(1), size.max(0)))
    return np.minimum(rows[:, None], columns[None, :])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(4, 4), (5, 4), (4, 5), (5, 5), (1, 3), (9, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_the_matrix(dtype: str, shape: tuple[int, int], sign: int) -> None:
    x = random(np.random.default_rng(0), shape, dtype)
    matrix = x + sign * np.flip(x)
    found = parity.halves(matrix)
    assert found is not None and found.sign == sign and found.even.dtype == matrix.dtype
    assert found.even.shape == found.odd.shape == (-(-shape[0] // 2), -(-shape[1] // 2))
    error = np.abs(whole(found, *shape) - matrix)
    assert (error <= np.finfo(dtype).eps * scale(matrix)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", range(1, 16))
def test_tables_of_finite_elements_have_halves(order: int, dtype: str) -> None:
    nodes, points = basis.gauss_lobatto(order + 1), basis.gauss_legendre(order + 2)[0]
    values, slopes = basis.lagrange(nodes, points)
    collocated = basis.lagrange(nodes, nodes)[1]
    tables = [(values, 1), (slopes, -1), (collocated, -1), (basis.bernstein(order, points), 1)]
    for table, sign in tables:
        matrix = table.astype(dtype)
        found = parity.halves(matrix)
        assert found is not None and found.sign == sign
        error = np.abs(whole(found, *matrix.shape) - matrix)
        allowed = sum(matrix.shape) + 1
        assert (error <= allowed * np.finfo(dtype).eps * scale(matrix)).all()


def test_other_matrices_have_none() -> None:
    x = random(np.random.default_rng(0), (6, 5), "float64")
    symmetric = x + np.flip(x)
    assert parity.halves(x) is None
    assert parity.halves(x[0]) is None
    assert parity.halves(symmetric.round(6).astype(int)) is None
    for value in (np.nan, np.inf):
        spoiled = symmetric.copy()
        spoiled[1, 2] = spoiled[4, 2] = value
        assert parity.halves(spoiled) is None


def test_a_little_off_is_more_than_rounding_in_small_rows_and_columns() -> None:
    """A row or a column of small entries may be all that matters of a result."""
    x = np.ones((6, 6))
    x[0, 0] += 20 * np.finfo(float).eps
    assert parity.halves(x) is not None
    x[0, 0] += 20 * np.finfo(float).eps
    assert parity.halves(x) is None
    for other in (np.diag([1, 1e-17, 3e-17, 1]), np.outer([1, 1, 1], [1e-17, 1, 3e-17])):
        assert parity.halves(other) is None and parity.halves(other.T) is None
    assert parity.halves(np.diag([1, 3e-17, 3e-17, 1])) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_where_operations_are_saved(dtype: str) -> None:
    real = np.dtype(dtype).kind == "f"
    for rows, columns in ((1, 9), (2, 2), (3, 4), (4, 4), (4, 5)):
        assert not parity.is_worth(rows, columns, np.dtype("float64"))
        assert not real or not parity.is_worth(columns, rows, np.dtype(dtype))
    for rows, columns in ((6, 5), (8, 7), (9, 9), (17, 16), (16, 6)):
        assert parity.is_worth(rows, columns, np.dtype(dtype))
        assert parity.is_worth(columns, rows, np.dtype(dtype))
    # A complex multiplication is four real ones, an addition two.
    assert parity.is_worth(4, 4, np.dtype(dtype)) == (not real)


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXMAGMA_EVEN_ODD", raising=False)
    assert parity.is_wanted() is None
    for value, wanted in (("on", True), ("off", False), ("perhaps", None)):
        monkeypatch.setenv("JAXMAGMA_EVEN_ODD", value)
        assert parity.is_wanted() is wanted
