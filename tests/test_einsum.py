"""``jm.einsum`` beside ``jnp.einsum`` and ``np.einsum``: values, dtypes, and what is fused."""

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxmagma as jm
from jaxmagma.frontends.einsum import FusedCall, capture
from jaxmagma.programs.fallback import PlainCall
from tests.einsums import (
    ELEMENTS,
    PROGRAMS,
    Call,
    assert_accurate,
    assert_within,
    calls,
    fused_calls,
    normal,
    operands_of,
    products_per_value,
)
from tests.jaxprs import compilations, primitives, programs


GetKey = Callable[[], jax.Array]

BK1 = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
FLOATS = [np.float32, np.float64, np.complex64, np.complex128]


def bk1(getkey: GetKey, dtype: Any = np.float64) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A table, weights at the points and coefficients of the nodes of hexahedra."""
    n, q = 3, 4
    shapes = (q, n), (ELEMENTS, q, q, q), (ELEMENTS, n, n, n)
    table, weights, u = (normal(getkey(), shape, dtype) for shape in shapes)
    return table, weights, u


# ---- Values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str, dtype: Any, getkey: GetKey) -> None:
    spec, operands = operands_of(name, getkey, dtype)
    result = jm.einsum(spec, *operands)
    assert result.dtype == dtype
    assert_accurate(result, spec, *operands)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_values_of_a_mass_matrix_in_three_dimensions(dtype: Any, getkey: GetKey) -> None:
    table, weights, u = bk1(getkey, dtype)
    operands = (table, table, table, weights, table, table, table, u)
    assert_accurate(jm.einsum(BK1, *operands), BK1, *operands)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        # Repeated labels.
        ("eii,eij->ej", ((ELEMENTS, 3, 3), (ELEMENTS, 3, 2))),
        ("eii,ejj->e", ((ELEMENTS, 3, 3), (ELEMENTS, 2, 2))),
        ("iei,ei->ie", ((3, ELEMENTS, 3), (ELEMENTS, 3))),
        ("eei,ei->ei", ((ELEMENTS, ELEMENTS, 3), (ELEMENTS, 3))),
        ("xx,xa,ea,eb->exb", ((3, 3), (3, 2), (ELEMENTS, 2), (ELEMENTS, 4))),
        # Labels in one operand only.
        ("eijk,ej->e", ((ELEMENTS, 2, 3, 4), (ELEMENTS, 3))),
        ("ei,jk,ejl->e", ((ELEMENTS, 2), (3, 4), (ELEMENTS, 3, 2))),
        # Outputs in any order.
        ("eij,ejk->kie", ((ELEMENTS, 2, 3), (ELEMENTS, 3, 4))),
        ("ije,jek->ike", ((2, 3, ELEMENTS), (3, ELEMENTS, 4))),
        ("jei,kje->eki", ((3, ELEMENTS, 2), (4, 3, ELEMENTS))),
        # Implicit outputs.
        ("iae,iec", ((3, 2, ELEMENTS), (3, ELEMENTS, 4))),
        ("xi,jx,ij", ((ELEMENTS, 2), (3, ELEMENTS), (2, 3))),
        # Ellipsis.
        ("...ij,...jk->...ik", ((ELEMENTS, 2, 3), (ELEMENTS, 3, 4))),
        ("...ij,...jk->i...k", ((2, ELEMENTS, 2, 3), (ELEMENTS, 3, 4))),
        ("xa,yb,...ab->...xy", ((4, 3), (4, 3), (2, ELEMENTS, 3, 3))),
        # Extents of 1 broadcast, in a batch and in a tile.
        ("eij,ejk->eik", ((1, 2, 3), (ELEMENTS, 3, 4))),
        ("eij,ejk->eik", ((ELEMENTS, 2, 1), (ELEMENTS, 3, 4))),
        ("eij,ejk,ek->eik", ((ELEMENTS, 1, 3), (ELEMENTS, 3, 4), (ELEMENTS, 1))),
        ("...ij,...jk->...ik", ((ELEMENTS, 1, 2, 3), (5, 3, 4))),
        ("eij,ejk->eik", ((1, 2, 3), (1, 3, 4))),
        # Scalars.
        (",eij,,ejk->eik", ((), (ELEMENTS, 2, 3), (), (ELEMENTS, 3, 4))),
        # One operand in several places, with other labels.
        ("eij,fij,ejk->efk", ((ELEMENTS, 2, 3), (ELEMENTS, 2, 3), (ELEMENTS, 3, 2))),
        # Labels of both cases and beyond ASCII.
        ("Eij,Ejé->Eié", ((ELEMENTS, 2, 3), (ELEMENTS, 3, 4))),
    ],
)
def test_values_of_unusual_subscripts(
    spec: str, shapes: Sequence[tuple[int, ...]], getkey: GetKey
) -> None:
    operands = [normal(getkey(), shape) for shape in shapes]
    result = jm.einsum(spec, *operands)
    np.testing.assert_allclose(result, jnp.einsum(spec, *operands), rtol=1e-12, atol=1e-12)
    if spec.isascii() and "->" in spec:
        assert_accurate(result, spec, *operands)


def test_values_of_many_operands(getkey: GetKey) -> None:
    labels = "abcdefghijklmnop"
    spec = ",".join(f"Z{x}{y}" for x, y in itertools.pairwise(labels)) + "->Zap"
    operands = [normal(getkey(), (ELEMENTS, 2, 2)) for _ in labels[1:]]
    assert_accurate(jm.einsum(spec, *operands), spec, *operands)


def test_operand_that_is_passed_several_times(getkey: GetKey) -> None:
    u = normal(getkey(), (ELEMENTS, 3, 3))
    for spec in ("eij,ejk,ekl->eil", "eij,eji,eij->e", "eij,ekj->eik", "eii,eij->ej"):
        operands = [u] * (spec.count(",") + 1)
        assert_accurate(jm.einsum(spec, *operands), spec, *operands)


@settings(max_examples=20)
@given(fused_calls() | calls())
def test_values_of_random_einsums(call: Call) -> None:
    assert_accurate(jm.einsum(call.spec, *call.operands), call.spec, *call.operands)


def test_values_of_random_einsums_in_any_dtype() -> None:
    """Also counts them: most are programs."""
    seen: collections.Counter[bool] = collections.Counter()

    dtypes = (np.float32, np.float64, np.complex64, np.complex128, np.int32)

    @settings(max_examples=30)
    @given(fused_calls(dtypes=dtypes) | calls(dtypes=dtypes))
    def check(call: Call) -> None:
        with jax.numpy_dtype_promotion("standard"):
            result, fused = jax.jit(call.function(jm.einsum))(*call.distinct), call.fused
            assert result.dtype == jnp.result_type(*call.operands)
        hypothesis.event("program" if fused else "plain JAX")
        seen[fused] += 1
        if jnp.issubdtype(result.dtype, jnp.inexact):
            assert_accurate(result, call.spec, *call.operands)
        else:
            assert result.tolist() == np.einsum(call.spec, *call.operands).tolist()

    check()
    assert seen[True] > 0.5 * seen.total(), seen


@settings(max_examples=6)
@given(fused_calls() | calls(least_operands=2))
def test_gradients_of_random_einsums(call: Call) -> None:
    """In float32, against float64; the error bound is that of the gradient's own sums."""
    function, reference = call.function(jm.einsum), call.function(jnp.einsum)
    wide = call.distinct
    narrow = tuple(x.astype(np.float32) for x in wide)
    shape = jax.eval_shape(reference, *wide).shape
    cotangent = np.random.default_rng(0).standard_normal(shape)

    def pullback(einsum: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
        return jax.jit(lambda xs, ct: jax.vjp(einsum, *xs)[1](ct))

    found = pullback(function)(narrow, cotangent.astype(np.float32))
    rounded = [x.astype(np.float64) for x in narrow]
    exact = pullback(reference)(rounded, cotangent.astype(np.float32).astype(np.float64))
    scale = pullback(reference)([np.abs(x) for x in rounded], np.abs(cotangent))
    # Each value adds up as many products as there are in all, at most.
    ones = [np.ones_like(x) for x in call.operands]
    total = int(np.prod(np.shape(cotangent))) * products_per_value(call.spec, *ones)
    for x, y, s in zip(found, exact, scale, strict=True):
        assert x.dtype == np.float32
        additions = total // max(1, math.prod(x.shape)) + 2 * len(ones) + len(call.operands)
        assert_within(np.abs(np.asarray(x) - np.asarray(y)), 2 * additions, s, np.float32)


# ---- Edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("eij,ejk->eik", ((0, 2, 3), (0, 3, 4))),
        ("xa,yb,eab->exy", ((4, 3), (4, 3), (0, 3, 3))),
        ("eij,ejk->eik", ((ELEMENTS, 2, 0), (ELEMENTS, 0, 4))),
        ("eij,ejk->eik", ((ELEMENTS, 0, 3), (ELEMENTS, 3, 4))),
        ("ei,ei,ei->", ((0, 3), (0, 3), (0, 3))),
        ("eij,ejk->eik", ((0, 2, 3), (1, 3, 4))),
        ("...ij,...jk->...ik", ((3, 0, 2, 3), (0, 3, 4))),
    ],
)
def test_empty_operands(spec: str, shapes: Sequence[tuple[int, ...]]) -> None:
    operands = [np.ones(shape) for shape in shapes]
    expected = np.einsum(spec, *operands)
    for function in (jm.einsum, jax.jit(jm.einsum, static_argnums=0)):
        result = function(spec, *operands)
        assert result.shape == expected.shape
        np.testing.assert_array_equal(result, expected)


def test_gradient_of_empty_batches_is_zero() -> None:
    table, u = np.ones((4, 3)), np.ones((0, 3, 3))
    gradient = jax.grad(lambda *xs: jm.einsum("xa,yb,eab->", xs[0], xs[0], xs[1]), (0, 1))
    for x, y in zip(gradient(table, u), (table, u), strict=True):
        np.testing.assert_array_equal(x, np.zeros_like(y))


def test_batch_of_one_element(getkey: GetKey) -> None:
    table, u = normal(getkey(), (4, 3)), normal(getkey(), (1, 3, 3))
    operands = (table, table, u)
    assert_accurate(jm.einsum("xa,yb,eab->exy", *operands), "xa,yb,eab->exy", *operands)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_goes_where_it_goes_in_numpy(value: float, getkey: GetKey) -> None:
    """It stays in its element, and not even a zero removes it."""
    table, weights, u = (np.abs(np.asarray(x)) for x in bk1(getkey))
    weights[5, 0, 0, 0] = value
    u[9, 1, 1, 1] = value
    u[11] = 0
    weights[11, 0, 0, 0] = value
    operands = (table, table, table, weights, table, table, table, u)
    result, expected = jm.einsum(BK1, *operands), np.einsum(BK1, *operands, optimize=True)
    assert not np.isfinite(expected[[5, 9, 11]]).any()
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    np.testing.assert_allclose(result, expected, rtol=1e-13)


def test_nan_in_a_shared_operand_reaches_every_element(getkey: GetKey) -> None:
    table, weights, u = map(np.array, bk1(getkey))
    table[0, 0] = np.nan
    operands = (table, table, table, weights, table, table, table, u)
    expected = np.einsum(BK1, *operands, optimize=True)
    np.testing.assert_array_equal(np.isnan(jm.einsum(BK1, *operands)), np.isnan(expected))
    traced = jax.jit(lambda u: jm.einsum(BK1, *operands[:-1], u))(u)
    np.testing.assert_array_equal(np.isnan(traced), np.isnan(expected))


def test_large_and_small_values_do_not_overflow_early() -> None:
    big, small = np.full((ELEMENTS, 2, 2), 1e200), np.full((ELEMENTS, 2, 2), 1e-200)
    np.testing.assert_allclose(jm.einsum("eij,ejk->eik", big, small), 2.0)


# ---- Operands --------------------------------------------------------------------------------


class Wrapped:
    """An array by the protocol ``__jax_array__``, as of a module's parameter."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, Wrapped])
def test_kinds_of_arrays(kind: Callable[[Any], Any], getkey: GetKey) -> None:
    spec, operands = operands_of("mass", getkey)
    result = jm.einsum(spec, *(kind(np.asarray(x)) for x in operands))
    assert isinstance(result, jax.Array)
    assert_accurate(result, spec, *operands)
    traced = jax.jit(lambda u: jm.einsum(spec, *(kind(np.asarray(x)) for x in operands[:-1]), u))
    assert_accurate(traced(operands[-1]), spec, *operands)


def test_arrays_of_any_memory_layout(getkey: GetKey) -> None:
    a = np.asfortranarray(normal(getkey(), (ELEMENTS, 2, 3)))
    b = np.asarray(normal(getkey(), (4, ELEMENTS, 6))).transpose(1, 2, 0)[:, ::-2]
    assert_accurate(jm.einsum("eij,ejk->eik", a, b), "eij,ejk->eik", a, b)
    table = np.asarray(normal(getkey(), (3, 8))).T[::2]
    traced = jax.jit(lambda u: jm.einsum("xa,yb,eab->exy", table, table, u))
    u = normal(getkey(), (ELEMENTS, 3, 3))
    assert_accurate(traced(u), "xa,yb,eab->exy", table, table, u)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("scalar", [2, 2.5, True, np.float64(2.5), np.int32(2), np.array(2.5)])
def test_scalar_operands(scalar: Any, getkey: GetKey) -> None:
    a, b = normal(getkey(), (ELEMENTS, 2, 3)), normal(getkey(), (ELEMENTS, 3, 4))
    spec = "eij,,ejk->eik"
    assert_accurate(jm.einsum(spec, a, scalar, b), spec, a, scalar, b)
    assert_accurate(jax.jit(lambda a: jm.einsum(spec, a, scalar, b))(a), spec, a, scalar, b)


def test_operands_are_not_written_to(getkey: GetKey) -> None:
    spec, operands = operands_of("mass", getkey)
    arrays = [np.array(x) for x in operands]
    jm.einsum(spec, *arrays)
    jax.jit(lambda u: jm.einsum(spec, *arrays[:-1], u))(arrays[-1])
    for array, operand in zip(arrays, operands, strict=True):
        assert array.flags.writeable
        np.testing.assert_array_equal(array, operand)


# ---- Dtypes ----------------------------------------------------------------------------------

DTYPES = [
    np.bool_, np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float16, jnp.bfloat16,
    np.float32, np.float64, np.complex64, np.complex128, jnp.float8_e4m3fn,
]  # fmt: skip


def type_of_result(einsum: Callable[..., Any], spec: str, *operands: Any, **options: Any) -> Any:
    """The result's dtype and whether it is weak, or the type of the error."""
    try:
        aval = jax.make_jaxpr(lambda *xs: einsum(spec, *xs, **options))(*operands).out_avals[0]
    except Exception as error:
        return type(error)
    return aval.dtype, aval.weak_type


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("first", DTYPES, ids=lambda x: np.dtype(x).name)
def test_promotion_of_two_dtypes(first: Any) -> None:
    spec = "eij,ejk->eik"
    for second in DTYPES:
        a, b = np.ones((ELEMENTS, 2, 3)).astype(first), np.ones((ELEMENTS, 3, 4)).astype(second)
        expected = type_of_result(jnp.einsum, spec, a, b)
        assert type_of_result(jm.einsum, spec, a, b) == expected, second


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("scalar", [2.5, 2j, np.float32(2), np.float64(2), jnp.asarray(2.5)])
def test_promotion_with_scalars(scalar: Any) -> None:
    """Closed over, since an argument of a traced function would not be a Python scalar."""
    for dtype in DTYPES:
        a = np.ones((ELEMENTS, 3, 3)).astype(dtype)

        def type_with(einsum: Callable[..., Any], a: np.ndarray = a) -> Any:
            closed = lambda spec, *xs: einsum(spec, scalar, *xs)  # noqa: E731
            return type_of_result(closed, ",eij,ejk->eik", a, a)

        # With some dtypes jnp's own order of contraction meets a conversion it refuses.
        assert type_with(jnp.einsum) in (type_with(jm.einsum), TypeError), dtype


@pytest.mark.usefixtures("standard_promotion")
def test_weak_types() -> None:
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    whole = weak * jnp.ones((ELEMENTS, 3, 3), np.int32)
    assert whole.weak_type
    strong = np.ones((ELEMENTS, 3, 3), np.float32)
    for operands in ([whole, whole], [whole, strong], [strong, whole], [whole, 1 * strong > 0]):
        expected = type_of_result(jnp.einsum, "eij,ejk->eik", *operands)
        assert type_of_result(jm.einsum, "eij,ejk->eik", *operands) == expected


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "dtypes",
    [
        (np.int32, np.float32),
        (np.float32, np.float64),
        (np.bool_, np.complex64),
        (np.float64, np.complex64),
        (np.uint8, np.float16),
        (np.float16, np.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, np.float32),
    ],
    ids=lambda pair: "-".join(np.dtype(x).name for x in pair),
)
def test_values_of_mixed_dtypes(dtypes: tuple[Any, Any], getkey: GetKey) -> None:
    table = np.asarray(normal(getkey(), (4, 3), dtypes[0]))
    u = normal(getkey(), (ELEMENTS, 3, 3), dtypes[1])
    spec = "xa,yb,xb,eab->ey"
    operands = (table, table, table, u)
    assert_accurate(jm.einsum(spec, *operands), spec, *operands)
    traced = jax.jit(lambda u: jm.einsum(spec, table, table, table, u))(u)
    assert_accurate(traced, spec, *operands)


def test_integers_are_exact() -> None:
    a = np.arange(ELEMENTS * 6).reshape(ELEMENTS, 2, 3) + (1 << 60)
    result = jm.einsum("eij,ekj->eik", a, a)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, np.einsum("eij,ekj->eik", a, a))


def test_strict_promotion_is_an_error_as_in_jnp() -> None:
    a, b = np.ones((ELEMENTS, 2, 3), np.float32), np.ones((ELEMENTS, 3, 4))
    expected = type_of_result(jnp.einsum, "eij,ejk->eik", a, b)
    assert type_of_result(jm.einsum, "eij,ejk->eik", a, b) == expected
    assert issubclass(expected, Exception)


def test_without_float64_everything_is_float32(getkey: GetKey) -> None:
    spec, operands = operands_of("mass", getkey)
    arrays = [np.asarray(x) for x in operands]
    with jax.enable_x64(False):
        result = jm.einsum(spec, *arrays)
        traced = jax.jit(lambda u: jm.einsum(spec, *arrays[:-1], u))(arrays[-1])
    assert result.dtype == traced.dtype == np.float32
    rounded = [x.astype(np.float32) for x in arrays]
    assert_accurate(result, spec, *rounded)
    assert_accurate(traced, spec, *rounded)


# ---- Options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimize", [True, False, "auto", "greedy", "optimal", [(0, 1), (0, 1)]])
@pytest.mark.parametrize("spec", ["eij,ejk,ek->ei", "ij,jk,k->i"])
def test_optimize(optimize: Any, spec: str, getkey: GetKey) -> None:
    shapes = [tuple({"e": ELEMENTS}.get(x, 3) for x in t) for t in spec.split("->")[0].split(",")]
    operands = [normal(getkey(), shape) for shape in shapes]
    assert_accurate(jm.einsum(spec, *operands, optimize=optimize), spec, *operands)


@pytest.mark.parametrize(
    "precision",
    ["highest", "high", "default", jax.lax.Precision.HIGHEST, ("high", "highest"), "float32"],
)
def test_precision(precision: Any, getkey: GetKey) -> None:
    spec, operands = operands_of("mass", getkey, np.float32)
    result = jax.jit(lambda *xs: jm.einsum(spec, *xs, precision=precision))(*operands)
    assert_accurate(result, spec, *operands)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("terms", [2, 3])
def test_unknown_options_are_errors(terms: int, dtype: Any) -> None:
    u = np.ones((ELEMENTS, 3, 3), dtype)
    spec = ",".join(["eij", "ejk", "ekl"][:terms]) + "->ei" + "kl"[terms - 2]
    functions: list[Any] = [jnp.einsum, jm.einsum]
    for einsum in functions:
        for wrong in ("most of it", 3):
            with pytest.raises((ValueError, TypeError), match=r"[Pp]recision"):
                einsum(spec, *[u] * terms, precision=wrong)
        with pytest.raises(TypeError):
            einsum(spec, *[u] * terms, optimize=3)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, "float32", jnp.bfloat16, complex, int])
def test_preferred_element_type(dtype: Any, getkey: GetKey) -> None:
    spec, operands = operands_of("products", getkey, np.float32)
    options = dict(preferred_element_type=dtype)
    expected = type_of_result(jnp.einsum, spec, *operands, **options)
    assert type_of_result(jm.einsum, spec, *operands, **options) == expected
    result = jm.einsum(spec, *operands, preferred_element_type=dtype)
    np.testing.assert_array_equal(result, jnp.einsum(spec, *operands, preferred_element_type=dtype))


def test_out_is_not_supported() -> None:
    u = np.ones((ELEMENTS, 3, 3))
    einsums: list[Any] = [jnp.einsum, jm.einsum]
    for einsum in einsums:
        with pytest.raises(NotImplementedError, match="out"):
            einsum("eij,ejk->eik", u, u, out=u)


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="casting"):
        jm.einsum("i->", np.ones(3), casting="safe")  # type: ignore[call-arg]


# ---- What becomes a program ------------------------------------------------------------------


def test_mass_matrix_is_one_program(getkey: GetKey) -> None:
    table, weights, u = bk1(getkey)

    def mass(table: jax.Array, weights: jax.Array, u: jax.Array) -> jax.Array:
        return jm.einsum(BK1, table, table, table, weights, table, table, table, u)

    assert primitives(mass, table, weights, u) == ["element_program"]
    (program,) = programs(mass, table, weights, u)
    # The table is one operand in six places.
    assert len(program.inputs) == 3
    assert [x.shared for x in program.inputs] == [True, False, False]


@pytest.mark.parametrize("name", PROGRAMS)
def test_contraction_over_elements_is_one_program(name: str, getkey: GetKey) -> None:
    spec, operands = operands_of(name, getkey)
    (program,) = programs(lambda *xs: jm.einsum(spec, *xs), *operands)
    assert program.batch_rank == (2 if name == "two batch axes" else 1)
    called = primitives(lambda *xs: jm.einsum(spec, *xs), *operands)
    assert set(called) <= {"element_program", "transpose"}


@pytest.mark.parametrize(
    ("spec", "shapes", "reason"),
    [
        ("ij,jk->ik", ((ELEMENTS, 3), (3, 4)), "one matrix product"),
        ("ij,jk->ki", ((80, 80), (80, 80)), "one matrix product"),
        ("ij,kj->ik", ((ELEMENTS, 3), (90, 3)), "one matrix product"),
        ("bsd,df->bsf", ((2, ELEMENTS, 8), (8, 16)), "one matrix product"),
        ("ij,j->i", ((ELEMENTS, 3), (3,)), "one matrix product"),
        ("eij,eij->eij", ((ELEMENTS, 3, 3), (ELEMENTS, 3, 3)), "nothing is contracted"),
        ("e,eij->eij", ((ELEMENTS,), (ELEMENTS, 3, 3)), "nothing is contracted"),
        ("eij,kl->eijkl", ((ELEMENTS, 3, 3), (2, 2)), "nothing is contracted"),
        ("ii->", ((ELEMENTS, ELEMENTS),), "no label runs over elements"),
        ("eii->e", ((ELEMENTS, 3, 3),), "nothing is contracted"),
        ("eij->ei", ((ELEMENTS, 3, 3),), "nothing is contracted"),
        ("eij->eji", ((ELEMENTS, 3, 3),), "nothing is contracted"),
        ("i,i->", ((ELEMENTS,), (ELEMENTS,)), "no label runs over elements"),
        (",->", ((), ()), "no label runs over elements"),
        ("eij,ejk->eik", ((0, 3, 3), (0, 3, 3)), "empty"),
        ("eijk,ekl->eijl", ((5, 40, 40, 40), (5, 40, 3)), "too many to stay on chip"),
        ("xa,eab,eb->ex", ((200, 200), (300, 200, 3), (300, 3)), "too many to stay on chip"),
        ("eij,ejk->eik", ((3, 200, 200), (3, 200, 200)), "too many to stay on chip"),
        # The second operand's matrix is large, and every ``f`` needs it.
        ("feij,ejk->feik", ((200, 5, 2, 16), (5, 16, 64)), "would be read 28 times"),
    ],
)
def test_what_does_not_gain_is_left_to_jnp(
    spec: str, shapes: Sequence[tuple[int, ...]], reason: str
) -> None:
    operands = [np.ones(shape) for shape in shapes]
    call = capture(spec, *operands)
    assert isinstance(call, PlainCall)
    assert reason in call.reason
    if "chip" not in reason:
        ours = jax.make_jaxpr(lambda *xs: jm.einsum(spec, *xs))(*operands)
        theirs = jax.make_jaxpr(lambda *xs: jnp.einsum(spec, *xs))(*operands)
        assert str(ours) == str(theirs)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"preferred_element_type": np.float64}, "preferred_element_type is float64"),
        ({"out_sharding": object()}, "out_sharding"),
    ],
)
def test_options_that_are_left_to_jnp(options: dict[str, Any], reason: str) -> None:
    u = np.ones((ELEMENTS, 3, 3), np.float32)
    call = capture("eij,ejk->eik", u, u, **options)
    assert isinstance(call, PlainCall)
    assert reason in call.reason


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8])
def test_what_is_no_floating_point_is_left_to_jnp(dtype: Any) -> None:
    u = np.ones((ELEMENTS, 3, 3), dtype)
    call = capture("eij,ejk->eik", u, u)
    assert isinstance(call, PlainCall)
    assert "not a floating-point dtype" in call.reason


@pytest.mark.parametrize(
    ("spec", "shapes", "elements"),
    [
        ("eij,ejk->eik", ((5, 9, 9), (5, 9, 9)), "e"),
        ("xa,yb,eab->exy", ((4, 3), (4, 3), (9, 3, 3)), "e"),
        ("xa,exb->eab", ((4, 3), (ELEMENTS, 4, 3)), "e"),
        ("xa,ebxj->ebaj", ((4, 3), (ELEMENTS, 5, 4, 2)), "eb"),
        ("efij,efjk->efik", ((5, 6, 3, 3), (5, 6, 3, 3)), "ef"),
        ("fij,eik,fejk->fe", ((9, 3, 3), (200, 3, 3), (9, 200, 3, 3)), "e"),
        ("ei,eij,ej->", ((ELEMENTS, 3), (ELEMENTS, 3, 3), (ELEMENTS, 3)), "e"),
        # However few they are, elements are the axis that a basis does not have.
        ("xa,yb,eab->exy", ((9, 5), (9, 5), (4, 5, 5)), "e"),
        ("xi,ex,xa,mea->mei", ((9, 5), (7, 9), (9, 5), (2, 7, 5)), "me"),
        ("ei,eij,ej->", ((2, 3), (2, 3, 3), (2, 3)), "e"),
        # One element alone has none; its program is for `vmap` to repeat.
        ("xa,yb,zc,abc->xyz", ((5, 4), (5, 4), (5, 4), (4, 4, 4)), ""),
        ("xi,yj,xy,xa,yb,ab->ij", ((5, 4), (5, 4), (5, 5), (5, 4), (5, 4), (4, 4)), ""),
        ("i,ij,j->", ((3,), (3, 4), (4,)), ""),
    ],
)
def test_labels_that_run_over_elements(
    spec: str, shapes: Sequence[tuple[int, ...]], elements: str
) -> None:
    call = capture(spec, *(np.ones(shape) for shape in shapes))
    assert isinstance(call, FusedCall)
    assert call.element_labels == elements


@pytest.mark.parametrize("spec", ["xi,yj,xy,xa,yb,ab->ij", "xa,yb,ab->yx", "xa,yb,ab,xy->"])
def test_values_of_one_element(spec: str, getkey: GetKey) -> None:
    shapes = [tuple(4 if x in "xy" else 3 for x in t) for t in spec.split("->")[0].split(",")]
    operands = [normal(getkey(), shape) for shape in shapes]
    (program,) = programs(lambda *xs: jm.einsum(spec, *xs), *operands)
    assert program.batch_rank == 0
    assert_accurate(jm.einsum(spec, *operands), spec, *operands)
    closed = jax.jit(lambda u: jm.einsum(spec, *map(np.asarray, operands[:-1]), u))
    assert_accurate(closed(operands[-1]), spec, *operands)


def test_shared_operands_are_contracted_with_each_other_once(getkey: GetKey) -> None:
    """``B D B`` is one matrix for all elements."""
    b, d = np.asarray(normal(getkey(), (9, 3))), np.asarray(normal(getkey(), (9, 9)))
    u = normal(getkey(), (ELEMENTS, 3, 5))
    spec = "xi,xy,yj,ejk->eik"
    traced = lambda u: jm.einsum(spec, b, d, b, u)  # noqa: E731
    found = programs(traced, u)
    assert [x.tile for x in found[0].inputs if x.shared] == [(3, 3)] if found else True
    assert_accurate(jax.jit(traced)(u), spec, b, d, b, u)


# ---- Constants -------------------------------------------------------------------------------

INTERPOLATE = "xa,yb,eab->exy"


def test_basis_closed_over_under_jit_is_a_constant(getkey: GetKey) -> None:
    table, u = normal(getkey(), (4, 3)), normal(getkey(), (ELEMENTS, 3, 3))
    for basis in (table, np.asarray(table)):
        (program,) = programs(lambda u, basis=basis: jm.einsum(INTERPOLATE, basis, basis, u), u)
        constant, batched = (x.constant for x in program.inputs)
        assert batched is None
        assert constant is not None
        np.testing.assert_array_equal(constant.array, table)


def test_basis_passed_as_an_argument_is_none(getkey: GetKey) -> None:
    table, u = normal(getkey(), (4, 3)), normal(getkey(), (ELEMENTS, 3, 3))
    (program,) = programs(lambda b, u: jm.einsum(INTERPOLATE, b, b, u), table, u)
    assert [x.constant for x in program.inputs] == [None, None]


def test_large_and_batched_operands_are_no_constants(getkey: GetKey) -> None:
    large, u = np.ones((100, 100)), np.ones((ELEMENTS, 100, 2))
    (program,) = programs(lambda u: jm.einsum("xa,eab,eb->ex", large, u, u[:, 0]), u)
    assert all(x.constant is None for x in program.inputs)
    weights = np.ones((ELEMENTS, 3))
    (program,) = programs(lambda u: jm.einsum("ei,eij->ej", weights, u), np.ones((ELEMENTS, 3, 3)))
    assert all(x.constant is None for x in program.inputs)


def test_constant_is_the_value_when_it_was_traced(getkey: GetKey) -> None:
    table, u = np.array(normal(getkey(), (4, 3))), normal(getkey(), (ELEMENTS, 3, 3))
    before = table.copy()
    function = jax.jit(lambda u: jm.einsum(INTERPOLATE, table, table, u))
    function(u)
    table[:] = 0
    assert_accurate(function(u), INTERPOLATE, before, before, u)


# ---- Tracing and compiling -------------------------------------------------------------------


def test_jit_traces_and_compiles_once(getkey: GetKey) -> None:
    table, u = normal(getkey(), (4, 3)), normal(getkey(), (ELEMENTS, 3, 3))
    traces = []

    @jax.jit
    def interpolate(table: jax.Array, u: jax.Array) -> jax.Array:
        traces.append(u.shape)
        return jm.einsum(INTERPOLATE, table, table, u)

    interpolate(table, u)
    with compilations() as compiled:
        for factor in (2.0, 3.0):
            interpolate(factor * np.asarray(table), factor * np.asarray(u))
    assert len(traces) == 1
    assert compiled == []
    with compilations() as compiled:
        interpolate(table, u[:5])
    assert len(traces) == 2
    assert sum("interpolate" in name for name in compiled) == 1


def test_eager_calls_with_changing_values_compile_once(getkey: GetKey) -> None:
    def call() -> None:
        table, u = (np.asarray(normal(getkey(), s)) for s in ((4, 3), (ELEMENTS, 3, 3)))
        jm.einsum(INTERPOLATE, table, table, u)

    call()
    with compilations() as compiled:
        call()
        call()
    assert compiled == []


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("transformation", ["grad", "vmap", "jvp", "linearize"])
def test_eager_transformations_of_a_changing_basis_compile_once(
    transformation: str, kind: Callable[[Any], Any], getkey: GetKey
) -> None:
    """Only where a function is traced to be run often is a basis part of the kernel."""
    u = normal(getkey(), (ELEMENTS, 3, 3))

    def call() -> None:
        table = kind(normal(getkey(), (4, 3)))

        def function(u: jax.Array) -> jax.Array:
            return jm.einsum(INTERPOLATE, table, table, u)

        match transformation:
            case "grad":
                jax.grad(lambda u: function(u).sum())(u)
            case "vmap":
                jax.vmap(function)(u[None])
            case "jvp":
                jax.jvp(function, (u,), (u,))
            case "linearize":
                jax.linearize(function, u)[1](u)

    call()
    with compilations() as compiled:
        call()
    assert [name for name in compiled if "element" in name] == []


def test_one_program_serves_every_number_of_elements(getkey: GetKey) -> None:
    table = normal(getkey(), (4, 3))
    shapes = [(elements, 3, 3) for elements in (64, 100, 1000)]
    found = {
        programs(lambda b, u: jm.einsum(INTERPOLATE, b, b, u), table, np.ones(shape))[0]
        for shape in shapes
    }
    assert len(found) == 1
