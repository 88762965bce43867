"""Small matrices: as accurate as LAPACK, one kernel, and with the derivatives that JAX has."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.jaxpr import Unsupported
from jaxmagma.programs import linalg
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Map
from tests.einsums import assert_close
from tests.jaxprs import programs
from tests.test_jaxpr import read


Function = Callable[..., Any]
GetKey = Callable[[], jax.Array]
Array = np.ndarray

SIZES = (1, 2, 3, 4)
DTYPES = (np.float64, np.float32)
# Each size, the larger ones in both.
SIZES_AND_DTYPES = [(1, np.float32), (2, np.float64), *((n, x) for n in (3, 4) for x in DTYPES)]
# Of what is eliminated, not iterated.
REFLECTED = [*SIZES_AND_DTYPES, (6, np.float32), (6, np.float64)]
ELIMINATED = [*REFLECTED, (9, np.float64)]
TRIANGULAR = [*ELIMINATED, (12, np.float32)]
LONG = np.longdouble

pytestmark = pytest.mark.usefixtures("standard_promotion")


def transposed(a: Array) -> Array:
    return np.swapaxes(a, -1, -2)


def norms(a: Array) -> Array:
    return np.sqrt(np.sum(np.asarray(a, LONG) ** 2, (-2, -1)))


def matrices(rows: int, columns: int, symmetric: bool = False, each: int = 40) -> Array:
    """Random, singular, graded, with values alike, badly scaled, diagonal, of integers, zero."""
    random = np.random.default_rng(rows + 10 * columns)
    count = min(rows, columns)
    left = np.linalg.qr(random.normal(size=(each, rows, rows)))[0][..., :count]
    right = np.linalg.qr(random.normal(size=(each, columns, columns)))[0][..., :count]
    right = left if symmetric else right
    spectra = [
        random.normal(size=(each, count)),
        10.0 ** random.uniform(-16, 0, (each, count)),
        1 + 10.0 ** random.uniform(-16, -1, (each, count)),
        random.integers(-1, 2, (each, count)),
        10.0 ** random.uniform(-8, 8, (each, count)),
        1e-30 * random.normal(size=(each, count)),
        1e30 * random.normal(size=(each, count)),
    ]
    integers = random.integers(-2, 3, (each, rows, columns)).astype(float)
    general = random.normal(size=(each, rows, columns))
    scales = 10.0 ** random.uniform(-6, 6, (each, rows, 1))
    found = [
        *((left * x[:, None]) @ transposed(right) for x in spectra),
        integers,
        integers * np.eye(rows, columns),
        scales * general,
        general * transposed(scales) if rows == columns else general,
        np.zeros((1, rows, columns)),
    ]
    if symmetric:
        found = [(x + transposed(x)) / 2 for x in found[:-2]] + [
            scales * (general + transposed(general)) * transposed(scales)
        ]
    return np.concatenate(found)


POINTS = 8
NEXT = np.roll(np.eye(POINTS), 1, 0)


def run(function: Function, *arguments: Any) -> list[Array]:
    """The results for many matrices, in long double.

    They are those at the points of elements, behind a contraction that moves points and another
    one that moves them back: without them the backends leave a program to XLA.
    """
    count = len(arguments[0])
    places = np.arange(-(-count // POINTS) * POINTS) % count

    def moved(x: Any) -> Any:
        table = jnp.asarray(NEXT, x.dtype)
        there = jnp.maximum(jnp.einsum("pq,q...->p...", table, x), -jnp.inf)
        return jnp.einsum("qp,q...->p...", table, there)

    def at_points(*fields: Any) -> Any:
        return jax.vmap(function)(*map(moved, fields))

    fields = [x[places].reshape(-1, POINTS, *x.shape[1:]) for x in map(np.asarray, arguments)]
    fused = jm.fuse(at_points)
    (explained,) = jm.explain(fused, *fields, quiet=True)
    assert explained.reason is None and explained.divided is None
    results = jax.tree.leaves(jax.jit(fused)(*fields))
    return [np.asarray(x, LONG).reshape(-1, *x.shape[2:])[:count] for x in results]


def small(error: Array, scale: Array, dtype: Any, factor: float) -> bool:
    """Whether errors are a few roundings of what they are errors of."""
    tiny = np.finfo(dtype).tiny
    bound = factor * np.finfo(dtype).eps * np.maximum(np.asarray(scale, LONG), tiny)
    return bool(np.all(error <= bound))


# ---- Backward errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "dtype"), ELIMINATED)
def test_lu(rows: int, dtype: Any) -> None:
    for columns in {rows, 2 if dtype == np.float32 else 4}:
        a = matrices(rows, columns).astype(dtype)
        lu, pivots, order = run(jax.lax.linalg.lu, a)
        count = min(rows, columns)
        lower = np.tril(lu, -1)[:, :, :count] + np.eye(rows, count)
        upper = np.triu(lu)[:, :count]
        taken = np.take_along_axis(a, order.astype(int)[..., None], 1)
        # Golub & Van Loan 3.4.6: the error is of |L| |U|, entry by entry.
        scale = abs(lower) @ abs(upper)
        assert small(abs(lower @ upper - taken), scale, dtype, count)
        assert np.all(abs(lower) <= 1)
        others = jax.vmap(jax.lax.linalg.lu)(a)
        same = (np.asarray(others[1]) == pivots).all(1)
        assert same.mean() > 0.9  # but for those that rounding decides
        np.testing.assert_array_equal(np.asarray(others[2])[same], order[same])


@pytest.mark.parametrize(("size", "dtype"), ELIMINATED)
def test_solve(size: int, dtype: Any) -> None:
    a = matrices(size, size).astype(dtype)
    b = np.random.default_rng(0).normal(size=(len(a), size)).astype(dtype)
    (x,) = run(jnp.linalg.solve, a, b)
    finite = np.isfinite(x).all(-1)
    assert finite.mean() > 0.7
    a, b, x = a[finite].astype(LONG), b[finite], x[finite]
    residual = abs((a @ x[..., None])[..., 0] - b).max(-1)
    assert small(residual, norms(a) * abs(x).max(-1) + abs(b).max(-1), dtype, 2 * size)


def adjugates(a: Array) -> tuple[Array, Array]:
    """Those of matrices of up to three rows, and the determinants."""
    if a.shape[-1] == 1:
        turned = np.ones_like(a)
    elif a.shape[-1] == 2:
        turned = np.stack([a[:, 1, 1], -a[:, 1, 0], -a[:, 0, 1], a[:, 0, 0]], -1).reshape(-1, 2, 2)
    else:
        rows = [np.cross(a[:, i - 2], a[:, i - 1]) for i in range(3)]
        turned = np.stack(rows, -2)
    return transposed(turned), np.sum(a[:, 0] * turned[:, 0], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_inverses_and_determinants(size: int, dtype: Any) -> None:
    """With errors of a few roundings times the condition, as from LAPACK."""
    random = np.random.default_rng(size)
    left, right = np.linalg.qr(random.normal(size=(2, 800, size, size)))[0]
    digits = 6 if dtype == np.float64 else 3
    spectra = 10.0 ** random.uniform(-digits, 0, (800, size))
    a = (left * spectra[:, None]) @ right
    a[::4] *= 10.0 ** random.uniform(-6, 6, (200, size, 1))
    exponent = 110 if dtype == np.float64 else 12
    a[1::4] *= 10.0 ** random.uniform(-exponent, exponent, (200, 1, 1))
    a = a.astype(dtype)
    wide = a.astype(LONG)
    adjugate, det = adjugates(wide)
    exact = adjugate / det[:, None, None]
    # The condition that scaling rows does not change (Bauer, Skeel).
    skeel = abs(exact) @ abs(wide)
    found, ours = run(jnp.linalg.inv, a)[0], run(jnp.linalg.det, a)[0]
    scale = skeel @ abs(exact)
    assert small(abs(found - exact).max((1, 2)), scale.max((1, 2)), dtype, 4 * size)
    # A change of one row by a few roundings, and what vanishes beside the smallest number.
    first = np.sum(abs(wide[:, 0] * adjugate[:, :, 0]), -1)
    info = np.finfo(dtype)
    fits = first < info.max
    assert np.all(abs(ours - det)[fits] <= 8 * info.eps * first[fits] + 9 * info.tiny)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_determinant_and_an_inverse_have_one_set_of_minors(size: int) -> None:
    def operations(function: Function) -> Counter[str]:
        (program,) = programs(jm.fuse(function), np.zeros((5, size, size)))
        assert not any(x.constant and x.constant.array.any() == 0 for x in program.inputs)
        normal, _ = normal_form(program)
        return Counter(x.function for x in normal.operations if isinstance(x, Map))

    inverse = operations(jnp.linalg.inv)
    both = operations(lambda a: (jnp.linalg.inv(a), jnp.linalg.det(a)))
    minors = 9 if size == 3 else 0
    assert inverse["product_error"] == both["product_error"] == minors
    assert both.total() - inverse.total() == (3 if size == 3 else 0)


@pytest.mark.parametrize(("size", "dtype"), TRIANGULAR)
def test_cholesky(size: int, dtype: Any) -> None:
    a = matrices(size, size)
    a = (np.clip(a, -1e15, 1e15) @ transposed(np.clip(a, -1e15, 1e15))).astype(dtype)
    (lower,) = run(jnp.linalg.cholesky, a)
    found = np.isfinite(lower).all((-2, -1))
    # It is none where an eigenvalue is not positive.
    least = np.linalg.eigvalsh(a.astype(float))[:, 0] / np.maximum(norms(a), 1e-300)
    assert found[least > 1e-5].all()
    assert not np.diagonal(lower[~found], axis1=1, axis2=2).max(initial=-np.inf) > -np.inf
    lower, a = lower[found], a[found]
    assert small(norms(lower @ transposed(lower) - a), norms(a), dtype, size + 1)
    np.testing.assert_array_equal(lower, np.tril(lower))


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_eigh(size: int, dtype: Any) -> None:
    """Of the lower triangle or of the upper one."""
    lower = (size % 2 == 1) == (dtype == np.float64)
    a = matrices(size, size, symmetric=True).astype(dtype)
    triangle = np.tril(a) if lower else np.triu(a)
    v, w = run(lambda a: jax.lax.linalg.eigh(a, lower=lower, symmetrize_input=False), triangle)
    assert np.all(np.diff(w) >= 0)
    assert small(norms(a.astype(LONG) @ v - v * w[:, None]), norms(a), dtype, 3 * size)
    assert small(norms(transposed(v) @ v - np.eye(size)), np.ones(len(a)), dtype, 8 * size)
    (values,) = run(lambda a: jnp.linalg.eigvalsh(a, UPLO="L" if lower else "U"), a)
    assert small(abs(values - w).max(-1), norms(a), dtype, 6 * size)


def reference_singular_values(a: Array) -> Array:
    """One-sided Jacobi in long double, until nothing changes."""
    a = np.asarray(a if a.shape[1] >= a.shape[2] else transposed(a), LONG)
    scale = np.maximum(abs(a).max((1, 2), keepdims=True), LONG(1e-300))
    w = a / scale
    for _ in range(12):
        for p in range(w.shape[2]):
            for q in range(p + 1, w.shape[2]):
                x, y = w[:, :, p].copy(), w[:, :, q].copy()
                angle = np.arctan2(2 * (x * y).sum(1), (x * x).sum(1) - (y * y).sum(1)) / 2
                c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
                w[:, :, p], w[:, :, q] = c * x + s * y, c * y - s * x
    values = np.sqrt((w * w).sum(1)) * scale[:, 0]
    return -np.sort(-values, axis=-1)


@pytest.mark.parametrize(("rows", "dtype"), SIZES_AND_DTYPES)
def test_svd(rows: int, dtype: Any) -> None:
    for columns in {rows, 2}:
        a = matrices(rows, columns).astype(dtype)
        (values,) = run(lambda a: jnp.linalg.svd(a, compute_uv=False), a)
        assert small(abs(values - reference_singular_values(a)).max(-1), norms(a), dtype, 20)
        for full in (True, False) if rows != columns and dtype == np.float64 else (True,):
            u, s, vt = run(lambda a, full=full: jnp.linalg.svd(a, full_matrices=full), a)
            count = min(rows, columns)
            assert np.all(s >= 0) and np.all(np.diff(s) <= 0)
            product = (u[:, :, :count] * s[:, None]) @ vt[:, :count]
            assert small(norms(product - a), norms(a), dtype, 8 * count)
            one = np.ones(len(a))
            for q in (transposed(u) @ u, vt @ transposed(vt)):
                assert small(norms(q - np.eye(q.shape[-1])), one, dtype, 8 * rows + 8)


def test_small_singular_values_of_scaled_columns() -> None:
    """Relative to themselves, where LAPACK's are right relative to the largest."""
    random = np.random.default_rng(0)
    a = random.normal(size=(200, 3, 3)) * 10.0 ** random.uniform(-12, 0, (200, 1, 3))
    (values,) = run(lambda a: jnp.linalg.svd(a, compute_uv=False), a)
    expected = reference_singular_values(a)
    well = np.linalg.cond(a / np.sqrt((a * a).sum(1, keepdims=True))) < 1e3
    assert well.mean() > 0.9
    assert np.all(abs(values - expected)[well] <= 1e-12 * expected[well])


@pytest.mark.parametrize(("rows", "dtype"), REFLECTED)
def test_qr(rows: int, dtype: Any) -> None:
    for columns in {rows, 2}:
        a = matrices(rows, columns).astype(dtype)
        for mode in ("reduced", "complete") if rows > columns else ("reduced",):
            q, r = run(lambda a, mode=mode: tuple(jnp.linalg.qr(a, mode=mode)), a)
            # Column by column.
            scale = np.sqrt(np.sum(np.asarray(a, LONG) ** 2, 1))
            error = np.sqrt(np.sum((q @ r - a) ** 2, 1))
            assert small(error, scale, dtype, 8 * rows)
            assert small(
                norms(transposed(q) @ q - np.eye(q.shape[-1])), np.ones(len(a)), dtype, 8 * rows
            )
            np.testing.assert_array_equal(r, np.triu(r))
    expected = jax.vmap(jnp.linalg.qr)(a[:40])
    found = jm.fuse(jnp.linalg.qr)(a[:40])
    assert_close(found, expected, 1e3 * np.finfo(dtype).eps)  # signs, too


# ---- What JAX makes of them ----------------------------------------------------------------------


def spd(a: Any) -> Any:
    return a @ jnp.swapaxes(a, -1, -2) + 0.5 * jnp.eye(a.shape[-1])


def tensor(a: Any) -> Any:
    """Of what has signs of its own, something that has not."""
    w, v = jnp.linalg.eigh(a + jnp.swapaxes(a, -1, -2))
    return jnp.einsum("...ij,...j,...kj->...ik", v, jnp.exp(w), v)


def stretch(a: Any) -> Any:
    u, s, vt = jnp.linalg.svd(a)
    return jnp.einsum("...ij,...j,...jk->...ik", u, s * s, vt)


def lu_parts(a: Any) -> Any:
    p, lower, upper = jax.scipy.linalg.lu(a)
    return p @ lower @ jnp.sin(upper)


# Each of a matrix or a field of them.
FUNCTIONS: dict[str, Function] = {
    "det": jnp.linalg.det,
    "inv": jnp.linalg.inv,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "sign of det": lambda a: jnp.linalg.slogdet(a)[0] * a[..., 0, 0],
    "solve": lambda a: jnp.linalg.solve(a, jnp.sin(a)),
    "solve one": lambda a: jnp.linalg.solve(a, a[..., :1])[..., 0],
    "cholesky": lambda a: jnp.linalg.cholesky(spd(a)),
    "lower triangle": lambda a: jnp.linalg.cholesky(spd(a), symmetrize_input=False),
    "matrix power": lambda a: jnp.linalg.matrix_power(a, 3),
    "inverse power": lambda a: jnp.linalg.matrix_power(a, -2),
    "norm": lambda a: jnp.linalg.norm(a, axis=(-2, -1)),
    "spectral and nuclear norm": lambda a: (
        jnp.linalg.norm(a, ord=2, axis=(-2, -1)) * jnp.linalg.norm(a, ord="nuc", axis=(-2, -1))
    ),
    "trace": lambda a: jnp.trace(a, axis1=-2, axis2=-1),
    "eigvalsh": jnp.linalg.eigvalsh,
    "function of a tensor": tensor,
    "singular values": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "svd": stretch,
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "pinv": jnp.linalg.pinv,
    "condition": jnp.linalg.cond,
    "triangular": lambda a: jax.scipy.linalg.solve_triangular(a, jnp.cos(a), lower=True),
    "transposed": lambda a: jax.scipy.linalg.solve_triangular(a, jnp.cos(a), trans=1),
    "unit diagonal": lambda a: jax.scipy.linalg.solve_triangular(
        a, jnp.cos(a), unit_diagonal=True, lower=True
    ),
    "from the right": lambda a: jax.lax.linalg.triangular_solve(a, jnp.cos(a), lower=True),
    "conjugate": lambda a: jax.lax.linalg.triangular_solve(
        a, jnp.cos(a), transpose_a=True, conjugate_a=True
    ),
    "cho_solve": lambda a: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(spd(a)), True), a),
    "lu_solve": lambda a: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), jnp.cos(a)),
    "lu_solve transposed": lambda a: jax.scipy.linalg.lu_solve(
        jax.scipy.linalg.lu_factor(a), jnp.cos(a), trans=1
    ),
    "lu": lu_parts,
    "sort": lambda a: jnp.sort(a, -1) * a,
    "all in order": lambda a: jnp.sort(a.reshape(-1)) * a.reshape(-1),
    "largest": lambda a: jax.lax.top_k(a, 2)[0] @ a[:2],
    "rows in order": lambda a: jnp.take_along_axis(a, jnp.argsort(a, -1), -1) @ a,
}
# Those of a field differentiate slowly in plain JAX, or compile slowly.
FIELDS = ("det", "inv", "slogdet", "solve", "cholesky", "eigvalsh", "svd", "qr", "triangular")


def well_conditioned(*shape: int) -> jax.Array:
    random = np.random.default_rng(len(shape))
    rows = np.eye(shape[-1])[::-1] * 3 + np.diag(np.arange(shape[-1]))
    return jnp.asarray(random.uniform(-1, 1, shape) + rows)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_are_those_of_vmap(name: str) -> None:
    function, a = FUNCTIONS[name], well_conditioned(5, 3, 3)
    twice = name in ("inv", "slogdet", "cholesky", "eigvalsh", "triangular", "lu_solve")

    def everything(transform: Function) -> list[Any]:
        mapped = jax.jit(transform(function))
        assert len(programs(mapped, a)) == (transform is jm.fuse)
        gradient = jax.grad(lambda a: jnp.sum(jnp.sin(mapped(a))))

        def values(a: jax.Array) -> list[Any]:
            if twice:
                return [mapped(a), *jax.jvp(gradient, (a,), (jnp.cos(a),))]
            return [mapped(a), gradient(a)]

        return list(jax.jit(values)(a))

    found, expected = everything(jm.fuse), everything(jax.vmap)
    for one, other, tolerance in zip(found, expected, (1e-11, 1e-10, 1e-9), strict=False):
        assert_close(one, other, tolerance)


@pytest.mark.parametrize(
    ("name", "size"), [("solve one", 9), ("slogdet", 9), ("inv", 7), ("cholesky", 12)]
)
def test_larger_matrices(name: str, size: int) -> None:
    function = FUNCTIONS[name]
    a = well_conditioned(5, size, size) + 2 * size * jnp.eye(size)

    def everything(transform: Function) -> Any:
        mapped = jax.jit(transform(function))
        assert len(programs(mapped, a)) == (transform is jm.fuse)
        return jax.jit(lambda a: (mapped(a), jax.grad(lambda a: jnp.sum(mapped(a) ** 2))(a)))(a)

    for one, other in zip(everything(jm.fuse), everything(jax.vmap), strict=True):
        assert_close(one, other, 1e-11)


@pytest.mark.parametrize(
    ("name", "size"), [(x, size) for n, x in enumerate(FIELDS) for size in {3, SIZES[n % 4]}]
)
def test_matrices_at_the_points_of_a_tile(name: str, size: int) -> None:
    function, a = FUNCTIONS[name], well_conditioned(3, 2, 5, size, size)
    fused, plain = (jax.jit(f(function)) for f in (jm.fuse, jax.vmap))
    (program,) = programs(fused, a)
    assert_close(fused(a), plain(a), 1e-11)
    # What vmap of a function of a point makes of it is the same.
    of_points = jax.vmap(jax.vmap(function))
    assert len(programs(jm.fuse(of_points), a)) == 1
    # There are no tables of what is one number at each point.
    assert size == 1 or all(x.constant is None or x.tile == () for x in program.inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_right_sides(dtype: Any) -> None:
    a, b = well_conditioned(4, 3, 3).astype(dtype), np.ones((4, 3, 20), dtype) / 7
    (x,) = run(jnp.linalg.solve, a, b)
    assert small(abs(np.asarray(a, LONG) @ x - b), np.ones(()), dtype, 50)


def test_a_cross_product() -> None:
    a, b = well_conditioned(5, 3, 3), well_conditioned(5, 3, 3) + 1
    assert len(programs(jm.fuse(jnp.cross), a, b)) == 1
    assert_close(jm.fuse(jnp.cross)(a, b), jax.vmap(jnp.cross)(a, b))


def test_without_elements() -> None:
    a = jnp.zeros((0, 3, 3))
    for name in ("inv", "svd"):
        assert_close(jm.fuse(FUNCTIONS[name])(a), jax.vmap(FUNCTIONS[name])(a))


@pytest.mark.parametrize("name", ["det", "slogdet", "inv", "solve", "cholesky", "eigvalsh", "qr"])
def test_singular_matrices_and_what_is_no_number(name: str) -> None:
    nan, inf = np.nan, np.inf
    a = jnp.asarray(
        [
            np.zeros((3, 3)),
            [[1, 2, 3], [2, 4, 6], [1, 1, 1]],
            -np.eye(3),
            [[1, 2, 3], [2, 5, nan], [1, 1, 1]],
            [[1, 2, 3], [2, 5, inf], [1, 1, 1]],
        ]
    )
    function = FUNCTIONS[name] if name != "cholesky" else jnp.linalg.cholesky
    found, expected = (np.asarray(f(function)(a)) for f in (jm.fuse, jax.vmap))
    # NaN goes at least as far; but the inverse of a singular matrix is of "nan or inf values".
    is_inverse = name in ("inv", "solve")
    unclean = slice(3 if is_inverse else 0, None)
    assert np.isnan(found[unclean][np.isnan(expected[unclean])]).all()
    if is_inverse:
        found, expected = (np.where(np.isfinite(x), x, np.nan) for x in (found, expected))
    np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("size", "dtype"), [(2, np.float32), (3, np.float64), (4, np.float32)])
def test_eigenvalues_and_vectors_of_what_is_infinite(size: int, dtype: Any) -> None:
    """All are NaN, wherever the infinite number stands."""
    places = np.transpose(np.tril_indices(size))
    made = np.tile(np.stack([np.eye(size), np.ones((size, size))])[:, None], (len(places), 1, 1))
    for n, (i, j) in enumerate(places):
        made[:, n, i, j] = made[:, n, j, i] = np.inf, -np.inf
    a = jnp.asarray(made.reshape(-1, size, size), dtype)
    assert np.isnan(jax.vmap(jnp.linalg.eigvalsh)(a)).all()
    for function in (jnp.linalg.eigvalsh, jnp.linalg.eigh):
        assert all(np.isnan(x).all() for x in jax.tree.leaves(jm.fuse(function)(a)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_of_what_is_nearly_infinite(dtype: Any) -> None:
    """Only numbers of the triangle that is read count, and no sum of them is too large."""
    scale = np.finfo(dtype).max
    a = jnp.asarray([scale * np.diag([0.75, -0.5, 0.25, 0.5]) + np.diag([np.inf] * 3, 1)], dtype)

    def function(a: jax.Array) -> Any:
        return jax.lax.linalg.eigh(a, symmetrize_input=False)

    v, w = map(np.asarray, jm.fuse(function)(a))
    np.testing.assert_array_equal(w / scale, [[-0.5, 0.25, 0.5, 0.75]])
    assert np.isfinite(v).all()


@pytest.mark.parametrize("name", ["det", "slogdet"])
def test_the_derivative_of_a_singular_determinant(name: str) -> None:
    a = jnp.asarray([np.zeros((3, 3)), [[1, 2, 3], [2, 4, 6], [1, 1, 1]], np.diag([1, 1, 0])])
    found, expected = (
        jax.grad(lambda a, f=f: jnp.sum(f(FUNCTIONS[name])(a)))(a) for f in (jm.fuse, jax.vmap)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_a_zero_beside_what_is_no_number() -> None:
    """Zeros that are values stay: they make NaN of what is infinite."""
    a = jnp.tile(jnp.eye(3), (2, 1, 1))
    b = jnp.asarray([[1, np.nan, 2], [np.inf, 1, 1]])

    def function(a: Any, b: Any) -> Any:
        return jax.scipy.linalg.solve_triangular(a, b, lower=True)

    found, expected = (np.asarray(f(function)(a, b)) for f in (jm.fuse, jax.vmap))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.parametrize(
    ("name", "size"), [("inv", 10), ("cholesky", 13), ("qr", 7), ("svd", 5), ("solve", 10)]
)
def test_complex_and_large_matrices_are_left_to_jax(name: str, size: int) -> None:
    function = FUNCTIONS[name]
    a = well_conditioned(3, 3, 3) + 1j * jnp.eye(3)
    assert_close(jm.fuse(function)(a), jax.vmap(function)(a))
    with pytest.raises(Unsupported, match=f"{size} x {size}"):
        read(function, (size, size))
    b = well_conditioned(3, size, size)
    assert_close(jm.fuse(function)(b), jax.vmap(function)(b), 1e-11)


def test_permutations() -> None:
    pivots = np.stack(np.meshgrid(*[range(n, 4) for n in range(4)], indexing="ij"), -1).reshape(
        -1, 4
    )

    def emit(function: str, *xs: Any) -> Any:
        """Numbers are Python's."""
        return xs[0] == xs[1] if function == "eq" else xs[2] if xs[0] else xs[1]

    for row in pivots[::5]:
        numbers = np.array([linalg.Number(emit, int(x)) for x in row], object)
        found = [int(x.value) for x in linalg.permutation(numbers, 4)]
        expected = jax.lax.linalg.lu_pivots_to_permutation(jnp.asarray(row, jnp.int32), 4)
        assert found == expected.tolist()


# ---- Places that are computed --------------------------------------------------------------------


def place(a: Any) -> Any:
    return jnp.argmax(jnp.abs(a[0]))


PLACES: dict[str, Function] = {
    "element": lambda a: a[place(a)] @ a,
    "component": lambda a: a[:, place(a)] * a[0],
    "number": lambda a: a[place(a), jnp.argmin(a[1])] * a,
    "from the end": lambda a: a[-1 - place(a)] @ a,
    "clipped": lambda a: jnp.take(a, place(a) + 1, 0, mode="clip") * a,
    "filled": lambda a: jnp.nan_to_num(jnp.take(a, place(a) + 1, 0, mode="fill")) * a,
    "wrapped": lambda a: jnp.take(a, place(a) + 2, 1, mode="wrap") * a[:, 0],
    "along an axis": lambda a: jnp.take_along_axis(a, jnp.argsort(a, 1), 1) @ a,
    "several": lambda a: a[jnp.argmax(a, 1)] * a,
    "of a table": lambda a: jnp.array([1.0, 3.0, 5.0])[place(a)] * a,
    "of known integers": lambda a: a * jnp.array([3, 1, 2])[place(a)],
    "slice": lambda a: jax.lax.dynamic_slice(a, (place(a) + 1, 0), (2, 2)) @ a[:2],
    "slice at both": lambda a: jax.lax.dynamic_slice(a, (place(a), place(a)), (2, 1)) * a[:2],
    "counter": lambda a: a * jnp.cumsum(a > 0, 1) + jnp.sum(a > 0) * 2 % 3,
    "half": lambda a: a * (place(a) // 2 + jnp.argmax(a[0]) // -2),
    "around": lambda a: a * (jnp.argmax(a, 1).astype(jnp.uint8) - 1).astype(float),
    "differences": lambda a: (jnp.argmax(a, 1) - jnp.argmin(a, 1)) * a,
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_computed(name: str) -> None:
    function = PLACES[name]
    a = jnp.asarray(np.random.default_rng(1).normal(size=(40, 3, 3)))
    assert len(programs(jm.fuse(function), a)) == 1

    def everything(transform: Function) -> Any:
        mapped = transform(function)
        gradient = jax.grad(lambda a: jnp.sum(jnp.sin(mapped(a))))
        return jax.jit(lambda a: (mapped(a), gradient(a)))(a)

    assert_close(everything(jm.fuse), everything(jax.vmap))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a: a.reshape(-1)[jnp.argmax(a)], "25 places"),
        (lambda a: a * jnp.prod(jnp.argmax(a, 1)), "int"),
        (lambda a: a * (jnp.argmax(a) ^ 2), "int"),
        (lambda a: a * (jnp.argmax(a) + 2**53), "int"),
        (lambda a: a * (jnp.sum(a).astype(np.int64) - 1).astype(float), "int"),
        (lambda a: jnp.sort(jnp.tile(a, 2).reshape(-1)), "sort of 50"),
        (lambda a: jnp.argsort(a.reshape(-1)) * 1.0, "sort of 25"),
    ],
)
def test_what_is_left_to_jax(function: Function, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        read(function, (5, 5))
    a = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5, 5)))
    assert_close(jm.fuse(function)(a), jax.vmap(function)(a))


@pytest.mark.parametrize("repeats", [1, 3])
def test_sorting_what_is_no_number(repeats: int) -> None:
    rows = [[np.nan, 1, -np.inf, 0.0], [2, np.nan, np.inf, 1], [0.0, -0.0, 0.0, -0.0], [np.nan] * 4]
    a = jnp.tile(jnp.asarray(rows), repeats)
    for function in (jnp.sort, jnp.argsort, lambda x: jnp.sort(x, descending=True)):
        found, expected = jm.fuse(function)(a), jax.vmap(function)(a)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(jnp.signbit(found), jnp.signbit(expected))
    largest = lambda x: jax.lax.top_k(jnp.abs(x), 3)  # noqa: E731
    for found, expected in zip(jm.fuse(largest)(a), jax.vmap(largest)(a), strict=True):
        np.testing.assert_array_equal(found, expected)
    keys = lambda x: jax.lax.sort((jnp.floor(x), x, 2 * x), num_keys=2)  # noqa: E731
    for found, expected in zip(jm.fuse(keys)(a), jax.vmap(keys)(a), strict=True):
        np.testing.assert_array_equal(found, expected)


# ---- Derivatives that are taken outside ----------------------------------------------------------


def mixed(a: Any, b: Any) -> Any:
    x = jnp.linalg.solve(a @ a.T + jnp.eye(len(a)), jnp.sin(b[:, 0]))
    return jnp.max(a @ x) + jnp.linalg.slogdet(a)[1] * jnp.linalg.det(a) + jax.nn.relu(x)


# Each of a matrix and some right sides.
SOLVERS: dict[str, Function] = {
    "solve one": lambda a, b: a @ jnp.sin(jnp.linalg.solve(a, b[:, 0])),
    "solve": lambda a, b: jnp.linalg.solve(a, b) @ b.T,
    "slogdet": lambda a, b: jnp.linalg.slogdet(a @ a)[1],
    "det": lambda a, b: jnp.linalg.det(a @ a),
    "mixed": mixed,
}


def second_derivatives(mapped: Function) -> dict[str, Function]:
    """Forward over reverse and so on, along directions that are functions of the point."""

    def along(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.cos(a), jnp.sin(b)

    def total(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(mapped(a, b)))

    gradient = jax.grad(total, (0, 1))

    def tangent(a: jax.Array, b: jax.Array) -> Any:
        return jax.jvp(mapped, (a, b), along(a, b))[1]

    return {
        "forward over reverse": lambda *x: jax.jvp(gradient, x, along(*x)),
        "reverse over forward": jax.grad(lambda *x: jnp.sum(tangent(*x)), (0, 1)),
        "forward over forward": lambda *x: jax.jvp(tangent, x, along(*x)),
        "hessian": jax.hessian(total),
        "reverse over reverse": jax.grad(
            lambda *x: sum(jnp.sum(y**2) for y in gradient(*x)), (0, 1)
        ),
    }


def first_derivatives(mapped: Function) -> dict[str, Function]:
    """Each of all elements."""
    gradient = jax.grad(lambda a, b: jnp.sum(jnp.sin(mapped(a, b))), (0, 1))

    def turned(a: jax.Array, b: jax.Array) -> Any:
        return jax.vmap(gradient)(jnp.stack([a, a + 1]), jnp.stack([b, b + 1]))

    return {
        "gradient": gradient,
        "tangent": lambda a, b: jax.jvp(mapped, (a, b), (jnp.cos(a), jnp.sin(b))),
        "pulled back": lambda a, b: jax.vjp(mapped, a, b)[1](jnp.cos(mapped(a, b))),
        "forward": jax.jacfwd(mapped, (0, 1)),
        "reverse": jax.jacrev(mapped, (0, 1)),
        "vmap": turned,
    }


def solvable(size: int, dtype: Any, getkey: GetKey) -> tuple[jax.Array, jax.Array]:
    a = jax.random.normal(getkey(), (4, size, size), np.float64) + 2 * jnp.eye(size)[::-1]
    return a.astype(dtype), jax.random.normal(getkey(), (4, size, 2), dtype)


def assert_derivatives_are_kernels(
    name: str,
    dtype: Any,
    derivatives: Callable[[Function], dict[str, Function]],
    order: int,
    values: tuple[jax.Array, jax.Array],
) -> None:
    """Those are what plain JAX has in double precision, up to powers of condition numbers."""
    fused, plain = (derivatives(f(SOLVERS[name])) for f in (jm.fuse, jax.vmap))
    fused = {kind: jax.jit(derivative) for kind, derivative in fused.items()}
    for kind, derivative in fused.items():
        parts = jm.explain(derivative, *values, quiet=True)
        assert parts, kind
        assert not [x.reason for x in parts if x.program is None], kind

    def everything(functions: dict[str, Function]) -> Function:
        return jax.jit(lambda *x: {kind: f(*x) for kind, f in functions.items()})

    found = everything(fused)(*values)
    expected = everything(plain)(*(x.astype(np.float64) for x in values))
    worst = float(np.linalg.cond(np.asarray(values[0], np.float64)).max())
    tolerance = 100 * float(np.finfo(dtype).eps) * worst ** (order + 2)
    for kind, made in found.items():
        for one, other in zip(*map(jax.tree.leaves, (made, expected[kind])), strict=True):
            assert one.dtype == dtype
            scale = max(float(abs(other).max()), 1.0)
            assert float(abs(one - other).max()) <= tolerance * scale, kind


@pytest.mark.parametrize(("name", "size"), [(x, 2 + n % 3) for n, x in enumerate(SOLVERS)])
def test_derivatives_of_solvers_are_kernels_outside(name: str, size: int, getkey: GetKey) -> None:
    values = solvable(size, np.float64, getkey)
    assert_derivatives_are_kernels(name, np.float64, first_derivatives, 1, values)


@pytest.mark.parametrize(("name", "size"), [("solve one", 3), ("slogdet", 2)])
def test_derivatives_of_solvers_in_single_precision(name: str, size: int, getkey: GetKey) -> None:
    values = solvable(size, np.float32, getkey)
    assert_derivatives_are_kernels(name, np.float32, first_derivatives, 1, values)


@pytest.mark.parametrize(("name", "size"), [("solve one", 2), ("slogdet", 2), ("det", 3)])
def test_second_derivatives_of_solvers(name: str, size: int, getkey: GetKey) -> None:
    values = solvable(size, np.float64, getkey)
    assert_derivatives_are_kernels(name, np.float64, second_derivatives, 2, values)


def test_derivatives_of_solvers_without_jit(getkey: GetKey) -> None:
    values = solvable(3, np.float64, getkey)
    fused, plain = (first_derivatives(f(SOLVERS["solve one"])) for f in (jm.fuse, jax.vmap))
    for kind in ("gradient", "tangent", "vmap"):
        for one, other in zip(
            *(jax.tree.leaves(f[kind](*values)) for f in (fused, plain)), strict=True
        ):
            assert_close(one, other, 1e-10)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["solve one", "solve", "slogdet"])
def test_derivatives_of_solvers_of_singular_matrices(name: str, size: int, getkey: GetKey) -> None:
    """They are infinite, or no number, or neither, where those of plain JAX are."""
    ones, identity = np.ones((size, size)), np.eye(size)
    last = np.diag(np.arange(size) < size - 1).astype(float)
    a = jnp.asarray([0 * ones, last, last[::-1], last[:, ::-1], ones, identity])
    b = jax.random.normal(getkey(), (len(a), size, 1))

    def function(a: Any, b: Any) -> Any:
        x = b[:, 0] if name == "solve one" else b
        return jnp.linalg.slogdet(a)[1] if name == "slogdet" else jnp.linalg.solve(a, x)

    def derivatives(mapped: Function) -> Any:
        def both(a: jax.Array, b: jax.Array) -> Any:
            gradient = jax.grad(lambda a, b: jnp.sum(mapped(a, b)), (0, 1))
            return gradient(a, b), jax.jvp(mapped, (a, b), (jnp.ones_like(a), jnp.ones_like(b)))[1]

        return jax.tree.leaves(jax.jit(both)(a, b))

    for one, other in zip(*(derivatives(f(function)) for f in (jm.fuse, jax.vmap)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_derivatives_of_solvers_of_what_is_gathered(getkey: GetKey) -> None:
    places = np.asarray([[0, 1, 2], [1, 2, 3], [2, 3, 4], [4, 5, 6]])
    a, _ = solvable(3, np.float64, getkey)
    u = jax.random.normal(getkey(), (7,))

    def function(u: Any, a: Any) -> Any:
        return a @ jnp.linalg.solve(a + jnp.outer(u, u), u)

    def derivatives(mapped: Function) -> Function:
        gradient = jax.grad(lambda u, a: jnp.sum(mapped(u, a) ** 2), (0, 1))
        return jax.jit(lambda u, a: jax.jvp(gradient, (u, a), (jnp.cos(u), jnp.sin(a))))

    fused = derivatives(jm.fuse(function, in_axes=(jm.gather(places), 0)))
    plain = derivatives(lambda u, a: jax.vmap(function)(u[places], a))
    assert all(x.program is not None for x in jm.explain(fused, u, a, quiet=True))
    for one, other in zip(*(jax.tree.leaves(f(u, a)) for f in (fused, plain)), strict=True):
        assert_close(one, other, 1e-9)


def test_second_derivatives_of_solvers_are_transposed(getkey: GetKey) -> None:
    """What is linear in the direction of the inner derivative, and not of the outer one."""
    a, b = solvable(3, np.float64, getkey)
    directions = jnp.cos(a), jnp.sin(a)

    def pulled(mapped: Function) -> jax.Array:
        def tangent(a: jax.Array, along: jax.Array) -> Any:
            return jax.jvp(lambda a: mapped(a, b), (a,), (along,))[1]

        def second(along: jax.Array) -> Any:
            return jax.jvp(lambda a: tangent(a, along), (a,), directions[:1])[1]

        found: tuple[jax.Array] = jax.linear_transpose(second, a)(second(directions[1]))
        return found[0]

    fused, plain = (pulled(f(SOLVERS["solve one"])) for f in (jm.fuse, jax.vmap))
    assert_close(fused, plain, 1e-9)


def test_a_solver_that_nothing_depends_on(getkey: GetKey) -> None:
    """A cotangent that is zero is none: times infinity it would be no number."""

    def function(a: Any, b: Any) -> Any:
        return jnp.linalg.solve(a, b[:, 0]), a @ b

    a, b = jnp.zeros((4, 3, 3)), jax.random.normal(getkey(), (4, 3, 2))
    gradient = jax.grad(lambda a: jnp.sum(jm.fuse(function)(a, b)[1]))(a)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(jnp.sum(b, -1)[:, None], a.shape))


def test_the_line_of_a_solver_that_is_too_large(getkey: GetKey) -> None:
    values = solvable(10, np.float64, getkey)
    gradient = jax.grad(lambda a, b: jnp.sum(jm.fuse(SOLVERS["solve one"])(a, b)))
    reasons = [x.reason or "" for x in jm.explain(gradient, *values, quiet=True)]
    assert any("test_linalg.py" in x and "10 x 10" in x for x in reasons)
    assert not any("unknown line" in x for x in reasons)
