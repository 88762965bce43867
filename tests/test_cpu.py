"""The CPU backend: every kind of step, odd sizes, sums over elements, threads, instruction sets.

Programs are built, planned and encoded here directly.  The reference is numpy in extended
precision, and the tolerance is an error bound: a sum of K products, each rounded, is off by at most
about ``K eps sum |a| |b|``.
"""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import native
from jaxmagma.frontends.fuse import fuse
from jaxmagma.lowering.cpu import encode, lower, planned
from jaxmagma.lowering.cpu.lanes import POINT_MATRIX, Encoder
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.plans.plan import plan
from jaxmagma.primitives import assembly
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.program import ElementProgram, Input, Output
from jaxmagma.programs.reference import evaluate
from tests import cpu_programs
from tests.cpu_programs import einsum_program, point_matrix_program


Array = np.ndarray[Any, Any]

ROOT = Path(__file__).resolve().parent.parent

# The bound assumes sums in any order; chains of up to seven products each add a few roundings.
_ROUNDINGS = 8.0


def random(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
    x = rng.uniform(-1, 1, shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.uniform(-1, 1, shape)
    return np.asarray(x, dtype)


def kernel(program: ElementProgram) -> Kernel:
    native.load("cpu")
    found = encode(planned(program))
    assert isinstance(found, Kernel), found
    return found


def call(program: ElementProgram, *arguments: Any) -> list[jax.Array]:
    """Runs a program on the CPU backend, whatever the gain."""
    shapes = [x.shape for x in arguments]
    found = kernel(program)
    results = [
        jax.ShapeDtypeStruct(shape, program.dtype)
        for shape in program.output_shapes(program.batch_extents(shapes))
    ]
    with jax.default_device(jax.devices("cpu")[0]):
        run = jax.ffi.ffi_call(found.target, results)
        return list(run(*arguments, **found.attributes))


def check_einsum(
    spec: str, batch: str, *operands: Array, constants: Sequence[int] = (), terms: float = 1
) -> None:
    """Compares one einsum with numpy; ``terms`` more roundings are allowed for long sums."""
    program, arguments = einsum_program(spec, batch, operands, constants)
    (got,) = (np.asarray(x) for x in call(program, *arguments))
    wide = np.clongdouble if got.dtype.kind == "c" else np.longdouble
    want = np.einsum(spec, *(x.astype(wide) for x in operands), optimize=("greedy", 2**40))
    scale = np.einsum(
        spec, *(abs(x).astype(np.longdouble) for x in operands), optimize=("greedy", 2**40)
    )
    assert got.shape == want.shape
    extents = [operation.sizes for operation in program.operations][-1:]  # type: ignore[union-attr]
    roundings = _ROUNDINGS + sum(extent for sizes in extents for _, extent in sizes) + terms
    eps = np.finfo(got.dtype).eps
    assert np.all(abs(got - want) <= roundings * eps * scale), spec


# ---- What is computed --------------------------------------------------------------------------


DTYPES = ["float64", "float32", "complex128", "complex64"]
ELEMENTS = [1, 2, 7, 8, 9, 64, 131]


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (n, dtype)
        for n in range(1, 13)
        for k, dtype in enumerate(DTYPES)
        if dtype == "float64" or n % 3 == k % 3
    ],
)
def test_sum_factorisation(n: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    elements = ELEMENTS[n % len(ELEMENTS)] + n
    b = random(rng, (n + 1, n), dtype)
    d2, u2 = random(rng, (elements, n + 1, n + 1), dtype), random(rng, (elements, n, n), dtype)
    check_einsum("xi,yj,exy,xk,yl,ekl->eij", "e", b, b, d2, b, b, u2)
    if n < 9 or dtype == "float64":
        u = random(rng, (elements, n, n, n), dtype)
        d = random(rng, (elements, n + 1, n + 1, n + 1), dtype)
        check_einsum("xa,yb,zc,eabc->exyz", "e", b, b, b, u, constants=(0, 1, 2))
        check_einsum("xa,yb,zc,eabc->ezxy", "e", b, b, b, u)
        if n < 9:
            check_einsum("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", "e", b, b, b, d, b, b, b, u)


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [(x, dtype) for n, x in enumerate(ELEMENTS) for dtype in DTYPES[n % 2 :: 2]],
)
@pytest.mark.parametrize(
    "spec",
    [
        "eij,ejk->eik",
        "eij,ekj->eki",
        "eij,ej->ei",
        "ei,ej->eij",
        "eij,eij->eij",
        "eij,eji->eij",
        "eij,eij->e",
        "eij,eik->ejk",
        "eijk,eikl->eijl",
        "ij,eij->eij",
        "ij,eij->eji",
        "i,eij->eij",
        "ijk,ek->eij",
        "jik,eki->ej",
        "ijk,ekji->e",
        "eij->eji",
        "eij->ej",
        "eij->e",
        "eij->eij",
        "eij,jk,ekl->eil",
        "ij,jk,ek->ei",
    ],
)
def test_every_shape_of_product(spec: str, elements: int, dtype: str) -> None:
    rng = np.random.default_rng(elements)
    for n in (1, 2, 5) if elements > 10 else (3, 7):
        sizes = {"e": elements, "i": n, "j": n + 1, "k": n + 2, "l": n}
        if spec in ("eij,eji->eij",):
            sizes["j"] = n
        shapes = [tuple(sizes[label] for label in term) for term in spec.split("->")[0].split(",")]
        check_einsum(spec, "e", *(random(rng, shape, dtype) for shape in shapes))


def test_gemm_of_every_size() -> None:
    rng = np.random.default_rng(0)
    for m in range(1, 14):
        n, k = (5 * m) % 13 + 1, (3 * m) % 11 + 1
        for dtype in ("float64", "complex64"):
            a, b = random(rng, (19, m, k), dtype), random(rng, (19, k, n), dtype)
            check_einsum("eij,ejk->eik", "e", a, b)
            check_einsum("ij,ejk->eik", "e", a[0], b)
            check_einsum("eij,jk->eik", "e", a, b[0])


@pytest.mark.parametrize(
    ("elements", "dtype"), [(1, "float32"), (3, "float64"), (70, "float64"), (70, "float32")]
)
@pytest.mark.parametrize(
    "spec",
    [
        f"{a},{b}->{c}"
        for a in ("eij", "eji", "ij", "ji")
        for b in ("ejk", "ekj", "jk", "kj")
        for c in ("eik", "eki")
        if "e" in a + b
    ],
)
def test_gemm_in_every_transposition(spec: str, elements: int, dtype: str) -> None:
    """Rows from one vector to several fill the lanes; short ones have elements there."""
    rng = np.random.default_rng(elements)
    for i, j, k in [
        (1, 3, 5),
        (5, 1, 8),
        (7, 6, 9),
        (8, 8, 8),
        (13, 5, 16),
        (4, 17, 33),
        (19, 2, 70),
    ]:
        sizes = {"e": elements, "i": i, "j": j, "k": k}
        shapes = [tuple(sizes[label] for label in term) for term in spec.split("->")[0].split(",")]
        check_einsum(spec, "e", *(random(rng, shape, dtype) for shape in shapes))


@pytest.mark.parametrize(
    ("spec", "n", "dtype"),
    [
        ("eij,ejk->eik", 2, "float64"),
        ("eij,ejk->eik", 2, "complex64"),
        ("eij,ejk->eik", 3, "float32"),
        ("eij,ejk->eik", 3, "float16"),
        ("eij,ejk->eik", 5, "float64"),
        ("eij,ejk->eik", 16, "float32"),
        ("eij,ejk->eik", 16, "complex64"),
        ("xa,yb,eab->exy", 7, "float64"),
        ("xa,yb,eab->exy", 7, "float16"),
        ("xa,yb,eab->exy", 19, "float32"),
        ("xa,yb,eab->exy", 19, "complex64"),
        ("feij,jk->efik", 3, "float64"),
        ("feij,jk->efik", 3, "complex64"),
        ("feij,efjk->efik", 16, "float32"),
        ("feij,efjk->efik", 16, "float16"),
    ],
)
def test_large_results_have_the_same_bits(spec: str, n: int, dtype: str) -> None:
    """Results that exceed the caches go past them, if they are next to each other."""
    rng = np.random.default_rng(n)
    terms = spec.split("->")[0].split(",")
    batched = [term for term in terms if "e" in term]
    other = 3 if "f" in spec else 1
    value = n * n * other * np.dtype(dtype).itemsize * (len(batched) + 1)
    elements = (36 << 20) // value + 5
    assert (elements - 5) * value > 32 << 20
    sizes = dict.fromkeys("ijkabxy", n) | {"e": elements, "f": other}
    operands = []
    for term in terms:
        shape = tuple(sizes[label] for label in term)
        values = random(rng, (1021,), dtype)
        operands.append(np.resize(values, shape))
    batch = "ef" if "f" in spec else "e"
    program, arguments = einsum_program(spec, batch, operands)
    (got,) = call(program, *arguments)
    for first in (0, elements - 33):
        some = [
            np.take(x, range(first, first + 33), axis=t.index("e")) if "e" in t else x
            for t, x in zip(terms, operands, strict=True)
        ]
        program, arguments = einsum_program(spec, batch, some)
        (want,) = call(program, *arguments)
        np.testing.assert_array_equal(np.asarray(got)[first : first + 33], want)
    want = np.einsum(spec, *(x.astype(np.complex128) for x in operands), optimize=True)
    assert abs(np.asarray(got, np.complex128) - want).max() < 64 * n * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("elements", [8, 21])
def test_rows_of_every_length(elements: int, dtype: str) -> None:
    """Rows begin and end anywhere in a line of the cache."""
    rng = np.random.default_rng(elements)
    for length in range(1, 42):
        # Two bases, for one alone is multiplied where it lies.
        operands = [
            rng.integers(-9, 9, shape).astype(dtype)
            for shape in ((length, 3), (1, 2), (elements, 3, 2))
        ]
        program, arguments = einsum_program("xa,yb,eab->exy", "e", operands)
        (got,) = call(program, *arguments)
        np.testing.assert_array_equal(got, np.einsum("xa,yb,eab->exy", *operands))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_number_of_elements(dtype: str) -> None:
    """Blocks are whole, or end with the last element, or are single vectors."""
    rng = np.random.default_rng(0)
    builder = Builder(1)
    a, b = (builder.input(Input((0,), (), np.dtype(dtype))) for _ in range(2))
    value = builder.map("add", builder.map("mul", a, b), a)
    outputs = [Output(value, (0,)), Output(value, ())]
    program = builder.build(outputs).program
    whole = [rng.integers(-3, 4, 1100).astype(dtype) for _ in range(2)]
    x, y = (v.astype(np.float64) for v in whole)
    want = x * y + x
    for elements in (*range(1, 75), *range(250, 262), 511, 512, 513, 520, 545, 1024, 1100):
        values, total = call(program, *(v[:elements] for v in whole))
        np.testing.assert_array_equal(values, want[:elements].astype(dtype))
        np.testing.assert_allclose(
            np.float64(total), want[:elements].sum(), rtol=2 * float(jnp.finfo(dtype).eps)
        )


def test_several_large_results() -> None:
    """The first is on its way past the caches when the second comes, of other and odd size."""
    rng = np.random.default_rng(0)
    b, c = random(rng, (3, 5), "float64"), random(rng, (7, 5), "float64")
    elements = (36 << 20) // (8 * (5 + 3 + 7) * 5) + 5
    u = np.resize(random(rng, (1021,), "float64"), (elements, 5, 5))

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.einsum("xa,ab->xb", b, x), jnp.einsum("xa,ab->xb", c, x)

    results = jax.jit(fuse(both))(u)
    assert sum(x.nbytes for x in results) + u.nbytes > 32 << 20
    for got, basis in zip(results, (b, c), strict=True):
        want = np.einsum("xa,eab->exb", basis, u)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_single(dtype: str) -> None:
    """Only operands and results are rounded to 16 bits, sums over elements included."""
    rng = np.random.default_rng(0)
    half = jnp.dtype(dtype)
    b, c = (random(rng, (4, 3), "float32").astype(half) for _ in range(2))
    u = random(rng, (21, 3, 3), "float32").astype(half)
    v = random(rng, (21, 4, 4), "float32").astype(half)
    single = [x.astype(np.float32) for x in (b, c, u, v)]
    for spec in ("xa,yb,eab,exy->exy", "xa,yb,eab,exy->xy", "xa,yb,eab,exy->ex"):
        for constants in ((), (0, 1)):
            program, arguments = einsum_program(spec, "e", (b, c, u, v), constants)
            (got,) = call(program, *arguments)
            want = np.einsum(spec, *single)
            assert got.dtype == half
            np.testing.assert_allclose(
                np.asarray(got, np.float32),
                want.astype(half).astype(np.float32),
                rtol=float(jnp.finfo(half).eps),
                atol=1e-5,
            )


def test_half_precision_keeps_special_values() -> None:
    for dtype in (jnp.float16, jnp.bfloat16):
        every = np.arange(1 << 16, dtype=np.uint16).view(np.dtype(dtype)).reshape(-1, 8)
        program, arguments = einsum_program("ei->ei", "e", (every,))
        got = np.asarray(call(program, *arguments)[0])
        np.testing.assert_array_equal(got.astype(np.float32), every.astype(np.float32))


def test_diffusion_operator() -> None:
    """Several contractions, products with stored factors, and sums of their results."""
    rng = np.random.default_rng(0)
    n, q, elements = 3, 4, 29
    b, g = random(rng, (q, n), "float64"), random(rng, (q, n), "float64")
    u, d = (
        random(rng, (elements, n, n, n), "float64"),
        random(rng, (elements, 3, q, q, q), "float64"),
    )
    double = np.dtype("float64")
    sizes = dict.fromkeys("xyz", q) | dict.fromkeys("abcijk", n) | {"m": 3}
    builder = Builder(1)
    nb, ng = builder.input(Input((), b.shape, double)), builder.input(Input((), g.shape, double))
    nu = builder.input(Input((0,), u.shape[1:], double))
    nd = [builder.input(Input((0,), d.shape[2:], double)) for _ in range(3)]
    bases = [(ng, nb, nb), (nb, ng, nb), (nb, nb, ng)]
    gradient = [
        builder.contract([(x, "xa"), (y, "yb"), (z, "zc"), (nu, "abc")], "xyz", sizes)
        for x, y, z in bases
    ]
    flux = [
        builder.sum(
            [
                builder.contract([(nd[abs(i - j)], "xyz"), (gradient[j], "xyz")], "xyz", sizes)
                for j in range(3)
            ]
        )
        for i in range(3)
    ]
    total = builder.sum(
        [
            builder.contract([(x, "xi"), (y, "yj"), (z, "zk"), (flux[i], "xyz")], "ijk", sizes)
            for i, (x, y, z) in enumerate(bases)
        ]
    )
    program = builder.build([Output(total, (0,)), Output(flux[0], (0,))]).program
    got, got_flux = call(program, b, g, u, *(np.ascontiguousarray(d[:, m]) for m in range(3)))

    tables = [(g, b, b), (b, g, b), (b, b, g)]
    grad = [np.einsum("xa,yb,zc,eabc->exyz", *t, u) for t in tables]
    fluxes = [sum(d[:, abs(i - j)] * grad[j] for j in range(3)) for i in range(3)]
    want = sum(np.einsum("xi,yj,zk,exyz->eijk", *t, w) for t, w in zip(tables, fluxes, strict=True))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-13 * q**3)
    np.testing.assert_allclose(got_flux, fluxes[0], rtol=0, atol=1e-14 * n**3)


def check_point_matrix(rows: int, points: int, symmetric: bool, dtype: str) -> None:
    program, number = point_matrix_program(rows, points, symmetric, dtype)
    assert POINT_MATRIX in [step[0] for step in Encoder(plan(program)).steps]
    rng = np.random.default_rng(0)
    d, *b, u = (random(rng, (19, *x.tile) if x.batch else x.tile, dtype) for x in program.inputs)
    (got,) = call(program, d, *b, u)
    wide = [np.asarray(x, np.clongdouble) for x in (d[:, number], np.stack(b), u)]
    want = np.einsum("ixa,eikx,kxb,eb->ea", wide[1], *wide[:2], wide[2])
    bound = np.finfo(dtype).eps * 8 * points * rows * np.sqrt(points)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rows", [2, 3])
def test_matrices_at_points(rows: int, symmetric: bool, dtype: str) -> None:
    for points in (5, 4096 // np.dtype(dtype).itemsize):  # the latter: entries a page apart
        check_point_matrix(rows, points, symmetric, dtype)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_sums_of_products(dtype: str) -> None:
    """Products are added to a tile in place, but only if nothing else reads that tile."""
    rng = np.random.default_rng(0)
    elements, n = 11, 3
    arrays = [random(rng, (elements, n, n), dtype) for _ in range(6)]
    shared = random(rng, (n, n), dtype)
    sizes = dict.fromkeys("ijk", n)
    builder = Builder(1)
    a, b, c, d, e, f = (builder.input(Input((0,), (n, n), np.dtype(dtype))) for _ in arrays)
    s = builder.input(Input((), (n, n), np.dtype(dtype)))

    def times(x: int, y: int) -> int:
        return builder.contract([(x, "ij"), (y, "ij")], "ij", sizes)

    ab, cd = times(a, b), times(c, d)
    first = builder.map("add", ab, cd)
    second = builder.map("add", first, builder.contract([(s, "ik"), (e, "kj")], "ij", sizes))
    third = builder.map("add", f, builder.contract([(first, "ik"), (second, "kj")], "ij", sizes))
    fourth = builder.map("add", third, builder.contract([(s, "ik"), (third, "kj")], "ij", sizes))
    doubled = builder.map("add", ab, ab)
    outputs = [Output(x, (0,)) for x in (second, fourth, doubled)]
    got = call(builder.build(outputs).program, *arrays, shared)
    va, vb, vc, vd, ve, vf = (x.astype(np.clongdouble) for x in arrays)
    vs = shared.astype(np.clongdouble)
    v1 = va * vb + vc * vd
    v2 = v1 + vs @ ve
    v3 = vf + v1 @ v2
    tolerance = 100 * np.finfo(dtype).eps
    for result, want in zip(got, (v2, v3 + vs @ v3, 2 * va * vb), strict=True):
        np.testing.assert_allclose(result, want, rtol=0, atol=tolerance * np.max(abs(want)))


def test_traced_and_constant_bases_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    b, u = random(rng, (5, 4), "float64"), random(rng, (37, 4, 4, 4), "float64")
    spec = "xa,yb,zc,eabc->exyz"
    traced, arguments = einsum_program(spec, "e", (b, b, b, u))
    constant, rest = einsum_program(spec, "e", (b, b, b, u), constants=(0, 1, 2))
    assert len(arguments) == 2 and len(rest) == 1
    np.testing.assert_array_equal(call(traced, *arguments)[0], call(constant, *rest)[0])


def test_results_that_are_operands() -> None:
    """A program may return an input, twice the same value, or a value shared by all elements."""
    double = np.dtype("float64")
    builder = Builder(1)
    a = builder.input(Input((0,), (3,), double))
    s = builder.input(Input((), (3,), double))
    twice = builder.map("add", a, a)
    shared = builder.map("add", s, s)
    mixed = builder.map("add", shared, a)
    outputs = [Output(x, (0,)) for x in (a, twice, twice, shared, mixed)]
    program = builder.build(outputs).program
    x, y = np.arange(33.0).reshape(11, 3), np.array([0.5, 1.5, 2.5])
    got = call(program, x, y)
    for result, want in zip(got, (x, 2 * x, 2 * x, 2 * y + 0 * x, 2 * y + x), strict=True):
        np.testing.assert_array_equal(result, want)


# ---- Pointwise functions, movement and gathers ---------------------------------------------------


def check_program(program: ElementProgram, *arguments: Any, ulps: float = 8) -> None:
    """Compares a program with its meaning in plain JAX."""
    got = call(program, *arguments)
    want = jax.jit(functools.partial(evaluate, program))(*arguments)
    for result, expected in zip(got, want, strict=True):
        a, b = np.asarray(result), np.asarray(expected)
        assert a.shape == b.shape and a.dtype == b.dtype
        eps = float(jnp.finfo(a.dtype).eps)
        a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=ulps * eps, atol=ulps * eps)


def special_values(dtype: str) -> Array:
    found = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.7, 30.0, -30.0, 1e-3, 700.0]
    found += [np.inf, -np.inf, np.nan, 1e30, -1e30]
    with np.errstate(all="ignore"):
        return np.array(found).astype(dtype)


# Where products overflow, their error is another one if XLA does not optimise it.
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"power_of_root"}))  # of CUDA plans
def test_every_function(name: str, dtype: str) -> None:
    values = special_values(dtype)
    function = FUNCTIONS[name]
    pairs = np.array(list(itertools.product(values, repeat=min(function.operands, 2))), dtype)
    if name in ("sin", "cos", "tan"):
        pairs = np.where(abs(pairs) > 1e4, 3.0, pairs)  # XLA is less accurate there
    arguments = [
        np.ascontiguousarray(np.resize(pairs[:, min(n, pairs.shape[1] - 1)], (len(pairs) // 3, 3)))
        for n in range(function.operands)
    ]
    builder = Builder(1)
    inputs = [builder.input(Input((0,), (3,), np.dtype(dtype))) for _ in arguments]
    program = builder.build([Output(builder.map(name, *inputs), (0,))]).program
    if dtype == "float16":
        # In single precision, which the reference does not compute in.
        single = [x.astype(np.float32) for x in arguments]
        want = np.asarray(function.evaluate(*map(jnp.asarray, single)))
        with np.errstate(all="ignore"):
            want = want.astype(np.float16)
        (got,) = call(program, *arguments)
        np.testing.assert_allclose(np.asarray(got, float), want.astype(float), rtol=4e-3, atol=1e-6)
    else:
        # XLA's hyperbolic functions lose some bits of large arguments.
        check_program(program, *arguments, ulps=2048 if name in ("sinh", "cosh") else 32)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("elements", [1, 7, 33, 200])
@pytest.mark.parametrize("shared", [True, False])
def test_functions_that_only_one_branch_needs(shared: bool, elements: int, dtype: str) -> None:
    """Long ones are computed where a lane takes the branch, whatever the others are."""
    rng = np.random.default_rng(elements)
    builder = Builder(1)
    kind = np.dtype(dtype)
    x = builder.input(Input((0,), (3,), kind))
    which = builder.input(Input((0,), () if shared else (3,), kind))
    zero = builder.constant(np.zeros((), kind))
    labels, sizes = "" if shared else "i", {"i": 3}
    taken = builder.pointwise("gt", [(which, labels), (zero, "")], labels, sizes)

    def choice(if_not: int, if_so: int) -> int:
        terms = [(taken, labels), (if_not, "i"), (if_so, "i")]
        return builder.pointwise("select", terms, "i", sizes)

    logarithm = builder.map("log", builder.map("sin", x))  # of which some are NaN
    both = choice(builder.map("exp", x), builder.map("mul", logarithm, x))
    used = builder.map("cos", x)  # also by others
    inner = choice(x, builder.map("atan", builder.map("tanh", both)))
    outputs = [both, choice(used, x), used, choice(inner, builder.map("sinh", x))]
    program = builder.build([Output(y, (0,)) for y in outputs]).program
    values = rng.uniform(-3, 3, (elements, 3)).astype(kind)
    shape = (elements,) if shared else (elements, 3)
    runs = np.resize(np.repeat([0, 1], 21), shape)
    for mask in (np.zeros(shape), np.ones(shape), rng.integers(0, 2, shape), runs):
        check_program(program, values, mask.astype(kind), ulps=64)


def test_a_branch_whose_values_are_read_twice_each() -> None:
    """It is gone through once, not once for each way through it; and one value is also a result."""
    builder = Builder(1)
    kind = np.dtype("float64")
    x = builder.input(Input((0,), (3,), kind))
    zero = builder.constant(np.zeros((), kind))
    taken = builder.pointwise("gt", [(x, "i"), (zero, "")], "i", {"i": 3})
    first = value = builder.map("sin", x)
    for _ in range(60):
        value = builder.map("mul", builder.map("add", value, x), value)
        value = builder.map("tanh", value)
    terms = [(taken, "i"), (x, "i"), (value, "i")]
    chosen = builder.pointwise("select", terms, "i", {"i": 3})
    program = builder.build([Output(y, (0,)) for y in (chosen, first)]).program
    check_program(program, np.random.default_rng(0).uniform(-3, 3, (50, 3)), ulps=2**12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
@pytest.mark.parametrize("elements", [1, 7, 33, 200])
def test_broadcasts_views_and_stacks(elements: int, dtype: str) -> None:
    rng = np.random.default_rng(elements)
    builder = Builder(1)
    kind = np.dtype(dtype)
    a = builder.input(Input((0,), (4, 5, 3), kind))
    b = builder.input(Input((0,), (5, 4), kind))
    t = builder.input(Input((0,), (), kind))
    s = builder.input(Input((), (5,), kind))
    c = builder.constant(np.asarray(0.5, dtype))
    sizes = {"i": 4, "j": 5, "k": 3}
    parts = [builder.index(a, 2, k) for k in range(3)]
    product = builder.pointwise("mul", [(parts[0], "ij"), (b, "ji")], "ij", sizes)
    scaled = builder.pointwise("mul", [(product, "ij"), (t, "")], "ij", sizes)
    total = builder.pointwise("add", [(scaled, "ij"), (parts[2], "ij")], "ij", sizes)
    shifted = builder.pointwise("sub", [(total, "ij"), (s, "j")], "ij", sizes)
    shared = builder.pointwise("mul", [(s, "j"), (c, "")], "j", sizes)
    mixed = builder.pointwise("mul", [(shifted, "ij"), (shared, "j")], "ij", sizes)
    transposed = builder.contract([(mixed, "ij"), (total, "kj")], "ik", {**sizes, "k": 4})
    reverse = builder.slice(mixed, 1, 4, -2, 2)
    lone = builder.pointwise("neg", [(t, "")], "", sizes)
    values = [builder.stack([total, mixed, shifted], 2), transposed, reverse, lone, shared]
    values.append(builder.place([(total, 0, (5, 1)), (mixed, 3, (5, 1))], (23,)))
    program = builder.build([Output(x, (0,)) for x in values]).program
    own: list[tuple[int, ...]] = [(4, 5, 3), (5, 4), ()]
    some = [random(rng, (elements, *shape), dtype) for shape in own]
    check_program(program, *some, random(rng, (5,), dtype))
    nothing = [random(rng, (0, *shape), dtype) for shape in own]
    assert all(x.size == 0 for x in call(program, *nothing, np.zeros(5, dtype)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "float16"])
@pytest.mark.parametrize("components", [(), (3,)])
@pytest.mark.parametrize("batched", [False, True])
def test_gathers(batched: bool, components: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    index = rng.integers(-2, 50, (37, 4)).astype(np.int32)
    builder = Builder(2 if batched else 1)
    own = (1,) if batched else ()
    vector = builder.input(Input(own, (50, *components), np.dtype(dtype)))
    at = builder.input(Input((0,), (4,), np.dtype(np.int32)))
    value = builder.gather(vector, at)
    labels = "ic"[: 1 + len(components)]
    sizes = {"i": 4, "c": 3}
    total = builder.contract([(value, labels)], labels[1:], sizes)
    program = builder.build([Output(total, (*own, 0)), Output(value, (0, *own))]).program
    x = random(rng, (*(2,) * batched, 50, *components), dtype)
    check_program(program, x, index)
    # An index that points outside reads nothing there.
    wrong = np.full((37, 4), np.iinfo(np.int32).max, np.int32)
    np.testing.assert_array_equal(np.asarray(call(program, x, wrong)[0]), 0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@pytest.mark.parametrize("components", [(), (3,)])
@pytest.mark.parametrize("axes", [0, 1])
@pytest.mark.parametrize("widths", [(8,), (1,), (2, 1), (16, 3)])
def test_assembly(
    widths: tuple[int, ...], axes: int, components: tuple[int, ...], dtype: str
) -> None:
    """Steps of an assembly: of one table or two, a column or more."""
    rng = np.random.default_rng(0)
    shapes = [(37, width) if width > 1 else (37,) for width in widths]
    vectors = [(50, *components), (20, *components)][: len(shapes)]
    indices = [
        rng.integers(-1, size, shape).astype(np.int32)
        for (size, *_), shape in zip(vectors, shapes, strict=True)
    ]
    rows = tuple(x.shape[1:] for x in indices)
    program = assembly.summing(rows, tuple(vectors), axes, np.dtype(dtype))
    values = [random(rng, (*(2,) * axes, *vector), dtype) for vector in vectors]
    check_program(program, *(x for pair in zip(values, indices, strict=True) for x in pair))


def corner_force(jacobian: jax.Array, gradient: jax.Array, weights: jax.Array) -> jax.Array:
    """As hydrodynamics has it: invariants of a matrix at every point, branches, and products."""
    symmetric = 0.5 * (gradient + jnp.swapaxes(gradient, -1, -2))
    mean = jnp.trace(symmetric, axis1=-2, axis2=-1) / 3
    shifted = symmetric - mean[..., None, None] * jnp.eye(3)[None, None, None]
    scale = jnp.sqrt(jnp.sum(shifted * shifted, (-1, -2)) / 6 + 1e-9)
    angle = jnp.arctan2(jnp.sqrt(1 + scale), mean) / 3
    largest = mean + 2 * scale * jnp.cos(angle)
    viscosity = jnp.where(largest > 0, 0.0, largest * largest)
    stress = viscosity[..., None, None] * symmetric
    flux = jnp.einsum("xyzij,xyzkj->xyzik", stress, jacobian)
    return jnp.einsum("xa,yb,zc,xyzik->abcik", weights, weights, weights, flux)


@pytest.mark.parametrize("elements", [1, 19])
def test_fused_function(elements: int) -> None:
    rng = np.random.default_rng(0)
    jacobian, gradient = (random(rng, (elements, 4, 4, 4, 3, 3), "float64") for _ in range(2))
    weights = random(rng, (4, 2), "float64")
    with jax.default_device(jax.devices("cpu")[0]):
        axes = (0, 0, None)
        got = jax.jit(fuse(corner_force, axes))(jacobian, gradient, weights)
        want = jax.jit(jax.vmap(corner_force, axes))(jacobian, gradient, weights)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


# ---- Batch axes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize(
    ("spec", "batch"),
    [
        ("ceij,ejk->ceik", "ce"),
        ("ceij,ejk->ecik", "ce"),
        ("ecij,ejk->ceik", "ce"),
        ("cij,ejk->ecik", "ec"),
        ("cij,ejk->cik", "ec"),
        ("cij,ejk->eik", "ec"),
        ("cij,ejk->ik", "ec"),
        ("ceij,ejk->ik", "ce"),
        ("ceij,ejk->eik", "ce"),
        ("ceij,ecjk->cik", "ce"),
        ("dceij,ejk,dkl->cil", "cde"),
        ("dceij,ejk,dkl->dil", "cde"),
        ("dceij,ejk,dkl->ecil", "cde"),
        ("dceij,ejk,dkl->edcil", "cde"),
        ("ij,ejk->ik", "e"),
    ],
)
def test_batch_axes(spec: str, batch: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for c, d, e in [(3, 2, 11), (1, 5, 8), (17, 1, 2), (2, 3, 1)]:
        sizes = {"c": c, "d": d, "e": e, "i": 3, "j": 4, "k": 2, "l": 5}
        shapes = [tuple(sizes[label] for label in term) for term in spec.split("->")[0].split(",")]
        check_einsum(spec, batch, *(random(rng, shape, dtype) for shape in shapes), terms=c * d * e)


def test_outputs_that_sum_over_different_axes() -> None:
    """No one order of the elements suits all sums: they need several passes."""
    rng = np.random.default_rng(0)
    x, y = random(rng, (7, 13, 3), "float64"), random(rng, (13, 3), "float64")
    double = np.dtype("float64")
    builder = Builder(2)
    a = builder.input(Input((0, 1), (3,), double))
    b = builder.input(Input((1,), (3,), double))
    value = builder.contract([(a, "i"), (b, "i")], "i", {"i": 3})
    kept: list[tuple[int, ...]] = [(0, 1), (1, 0), (0,), (1,), ()]
    outputs = [Output(value, axes) for axes in kept] + [Output(b, (1,)), Output(b, ())]
    got = call(builder.build(outputs).program, x, y)
    full = x * y
    wants = [full, full.swapaxes(0, 1), full.sum(1), full.sum(0), full.sum((0, 1)), y, y.sum(0)]
    for result, want in zip(got, wants, strict=True):
        assert result.shape == want.shape
        np.testing.assert_allclose(result, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("extents", [(0, 3), (3, 0), (0, 0)])
def test_no_elements(extents: tuple[int, int]) -> None:
    double = np.dtype("float64")
    builder = Builder(2)
    a = builder.input(Input((0, 1), (2,), double))
    b = builder.input(Input((1,), (2,), double))
    value = builder.contract([(a, "i"), (b, "i")], "i", {"i": 2})
    outputs = [Output(value, axes) for axes in [(0, 1), (0,), (1,), ()]] + [Output(b, (1,))]
    x, y = np.ones((*extents, 2)), np.ones((extents[1], 2))
    got = call(builder.build(outputs).program, x, y)
    for result, want in zip(got, [x, x.sum(1), x.sum(0), x.sum((0, 1)), y], strict=True):
        np.testing.assert_array_equal(result, want)


def test_long_sums_are_accurate() -> None:
    """A running sum over this many elements would be wrong in the fourth digit.

    Here each of at least four lanes of a chunk has at most 300 values, and there are 256 chunks.
    """
    x = np.full((300_001, 1), 0.1, np.float32)
    program, arguments = einsum_program("ei->i", "e", (x,))
    (got,) = call(program, *arguments)
    want = np.float64(np.float32(0.1)) * 300_001
    assert abs(float(got[0]) - want) < (300 + 256) * np.finfo(np.float32).eps / 2 * want


# ---- Values that are not numbers ---------------------------------------------------------------


def test_not_a_number_stays_in_its_element() -> None:
    rng = np.random.default_rng(0)
    b = random(rng, (4, 3), "float64")
    for elements in (1, 5, 13, 40):
        u = random(rng, (elements, 3, 3), "float64")
        clean = u.copy()
        u[elements // 2, 1, 1] = np.nan
        u[elements - 1, 0, 0] = np.inf
        program, arguments = einsum_program("xa,yb,eab->exy", "e", (b, b, u))
        got = np.asarray(call(program, *arguments)[0])
        good = np.ones(elements, bool)
        good[[elements // 2, elements - 1]] = False
        np.testing.assert_array_equal(np.asarray(call(program, b, clean)[0])[good], got[good])
        assert not np.isfinite(got[~good]).any()


def test_nothing_is_skipped_because_it_is_zero() -> None:
    u = np.full((9, 3, 3), np.inf)
    program, arguments = einsum_program("xa,eab->exb", "e", (np.zeros((2, 3)), u))
    assert np.isnan(call(program, *arguments)[0]).all()
    program, arguments = einsum_program("eab,eab->eab", "e", (np.zeros_like(u), u))
    assert np.isnan(call(program, *arguments)[0]).all()


def test_floating_point_flags_are_left_alone() -> None:
    """Unused lanes compute with copies of real values, so they raise nothing of their own."""
    program, arguments = einsum_program("eij,ejk->eik", "e", (np.ones((1, 3, 3)),) * 2)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(call(program, *arguments)[0], 3 * np.ones((1, 3, 3)))


# ---- Declining, and errors ---------------------------------------------------------------------


def declined(spec: str, *shapes: tuple[int, ...], dtype: str = "float64") -> str | None:
    """Why a CPU kernel is not used for an einsum over ``e``, or None."""
    operands = [np.ones(shape, dtype) for shape in shapes]
    program, arguments = einsum_program(spec, "e", operands)
    found = lower(plan(program), program.batch_extents([x.shape for x in arguments]))
    return found.reason if isinstance(found, Declined) else None


def test_declines_what_it_cannot_do() -> None:
    reason = declined("ij,jk,ekl->eil", (300, 300), (300, 300), (2, 300, 300))
    assert "exceed the on-chip limit" in (reason or "")
    builder = Builder(1)
    a = builder.input(Input((0,), (2,), np.dtype("float64")))
    b = builder.input(Input((0,), (2,), np.dtype("float32")))
    program = builder.build([Output(builder.map("add", a, b), (0,))]).program
    found = lower(plan(program), (4,))
    assert isinstance(found, Declined) and "float32, float64" in found.reason


def declined_powers(count: int, *row: int) -> str | None:
    """Why products of so many of three numbers, each with each, are no kernel, if they are none.

    Each number may be a row of several.
    """
    builder = Builder(1)
    x = builder.input(Input((0,), (3, *row), np.dtype("float64")))
    numbers = [builder.index(x, 0, k) for k in range(3)]
    made = [
        functools.reduce(lambda a, b: builder.map("mul", a, b), factors)
        for factors in itertools.product(numbers, repeat=count)
    ]
    program = builder.build([Output(builder.stack(made, 0), (0,))]).program
    found = lower(plan(program), (10000,))
    return found.reason if isinstance(found, Declined) else None


def test_products_of_a_function_of_an_operand_are_xlas() -> None:
    """They are in no row: all are of the same values, which XLA computes first."""
    rng = np.random.default_rng(0)
    matrices = [rng.uniform(-1, 1, (9, 9)) for _ in range(2)]
    x = jnp.ones((1000, 9))

    def reason(function: Callable[..., Any]) -> str | None:
        (found,) = jm.explain(fuse(function), x, quiet=True)
        return found.reason

    beside = reason(lambda x: tuple(m @ (1.0 + x) for m in matrices))
    assert "matrix products for all elements" in (beside or "")
    assert reason(lambda x: matrices[1] @ jnp.tanh(matrices[0] @ (1.0 + x))) is None


def declined_sums(count: int, *functions: str) -> str | None:
    """Why sums of the first numbers, or of functions of them, are no kernel, if they are none."""
    builder = Builder(1)
    x = builder.input(Input((0,), (count,), np.dtype("float64")))
    terms = [builder.index(x, 0, k) for k in range(count)]
    for function in functions:
        terms = [builder.map(function, term) for term in terms]
    made = list(itertools.accumulate(terms, lambda a, b: builder.map("add", a, b)))
    program = builder.build([Output(builder.stack(made, 0), (0,))]).program
    found = lower(plan(program), (10000,))
    return found.reason if isinstance(found, Declined) else None


def test_sums_of_first_values_gain_where_they_are_many_or_take_long() -> None:
    """For each of them XLA adds up all values again."""
    assert "bound by memory" in (declined_sums(8) or "")
    assert declined_sums(12) is None
    assert declined_sums(8, "exp") is None


def test_declines_what_does_not_gain() -> None:
    n, e = 6, 1000
    few = "worth a call of their own"
    assert few in (declined("eij,ejk->eik", (2, n, n), (2, n, n)) or "")
    assert few in (declined("eij,ejk->eik", (0, n, n), (0, n, n)) or "")
    for spec in ("eij,eij->eij", "eij,eij->e", "eij->eji", "eij,ej->ei", "ij,eij->eij"):
        shapes = [(n,) * len(x) for x in spec.replace("e", "").split("->")[0].split(",")]
        batched = ["e" in x for x in spec.split("->")[0].split(",")]
        shapes = [(e, *x) if b else x for x, b in zip(shapes, batched, strict=True)]
        assert "bound by memory" in (declined(spec, *shapes) or ""), spec
    assert "bound by memory" in (declined_powers(1) or "")
    assert "bound by memory" in (declined_powers(1, 4) or "")
    assert declined_powers(2, 4) is None  # pieces of several values, computed where they stand
    assert declined_powers(3) is None  # 27 pieces
    one = "one matrix product for all elements"
    assert one in (declined("ij,ej->ei", (n, n), (e, n)) or "")
    assert one in (declined("eij,jk->eik", (e, n, n), (n, n)) or "")
    for pair in [((e, 3, 3), (e, 3, 3)), ((e, 4, 3), (e, 3, 4)), ((e, 6, 2), (e, 2, 2))]:
        assert "fused loops" in (declined("eij,ejk->eik", *pair) or "")
        assert declined("eij,ejk->eik", *pair, dtype="complex128") is None
    assert declined("eij,ejk->eik", (e, 4, 4), (e, 4, 2)) is None
    assert declined("ij,ejk->eik", (3, 3), (e, 3, 3)) is None
    assert declined("ij,ejk->eik", (n, n), (e, n, n)) is None
    assert declined("eij,ejk->eik", (e, n, n), (e, n, n)) is None
    assert (
        declined("xi,yj,exy,xa,yb,eab->eij", *[(4, 3)] * 2, (e, 4, 4), *[(4, 3)] * 2, (e, 3, 3))
        is None
    )


def test_wrong_shapes_are_errors() -> None:
    a = np.ones((4, 2, 2))
    program, _ = einsum_program("eij,ejk->eik", "e", (a, a))
    found = kernel(program)
    shape = jax.ShapeDtypeStruct((4, 2, 2), np.float64)
    single = jax.ShapeDtypeStruct((4, 2, 2), np.float32)
    run = jax.ffi.ffi_call

    def message(attempt: Callable[[], Any]) -> str:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(attempt())
        return str(caught.value)

    bad = np.ones((5, 2, 2))
    text = message(lambda: run(found.target, [shape])(a, bad, **found.attributes))
    assert "jaxmagma_cpu: operand 1 of shape (5, 2, 2)" in text
    text = message(lambda: run(found.target, [single])(a, a, **found.attributes))
    assert "jaxmagma_cpu: result 0 has the wrong dtype" in text
    text = message(lambda: run(found.target, [shape])(a, **found.attributes))
    assert "jaxmagma_cpu: too few operands" in text
    code = found.attributes["plan"].copy()
    for position in range(len(code)):
        wrong = {**found.attributes, "plan": code[:position]}
        text = message(lambda: run(found.target, [shape])(a, a, **wrong))  # noqa: B023
        assert "jaxmagma_cpu: the attribute 'plan'" in text


def test_no_plan_crashes() -> None:
    """Whatever the numbers of a plan: an error or a result; ``cpu_plans.cc`` tries many more."""
    rng = np.random.default_rng(0)
    outcomes = []
    for program in cpu_programs.programs():
        found = kernel(program)
        code = found.attributes["plan"]
        arguments = [np.ones(((3,) * len(x.batch)) + x.tile, x.dtype) for x in program.arguments]
        shapes = program.output_shapes((3,) * program.batch_rank)
        results = [jax.ShapeDtypeStruct(x, program.dtype) for x in shapes]
        for _ in range(2):
            wrong = code.copy()
            value = rng.choice([-1, 0, 1, 2, 5, 1 << 19, 1 << 40, -(1 << 63), (1 << 63) - 1])
            wrong[rng.integers(len(code))] = value
            run = jax.ffi.ffi_call(found.target, results)
            try:
                jax.block_until_ready(run(*arguments, **{**found.attributes, "plan": wrong}))
                outcomes.append("result")
            except jax.errors.JaxRuntimeError as error:
                assert "jaxmagma_cpu: " in str(error)
                outcomes.append("error")
    assert set(outcomes) == {"error", "result"}


@pytest.mark.parametrize("dtype", ["float64", "complex64", "float16"])
@pytest.mark.parametrize("components", [(), (3,)])
def test_no_index_reads_outside(components: tuple[int, ...], dtype: str) -> None:
    """What an index points to that is not in the vector is zero, as for -1."""
    extremes = [-(2**31), -(2**30), -51, -2, -1, 0, 49, 50, 51, 2**30, 2**31 - 1]
    index = np.array(extremes * 3, np.int32).reshape(11, 3)
    builder = Builder(1)
    vector = builder.input(Input((), (50, *components), np.dtype(dtype)))
    at = builder.input(Input((0,), (3,), np.dtype(np.int32)))
    value = builder.gather(vector, at)
    program = builder.build([Output(value, (0,))]).program
    x = random(np.random.default_rng(0), (50, *components), dtype)
    inside = ((index >= 0) & (index < 50)).reshape(*index.shape, *(1,) * len(components))
    (got,) = call(program, x, index)
    np.testing.assert_array_equal(got, np.where(inside, x[index.clip(0, 49)], 0).astype(dtype))


def test_out_of_memory_is_an_error() -> None:
    """On whichever thread; the process goes on, and so does the program."""
    code = """
import resource
import jax, numpy as np
from jaxmagma.lowering.cpu import encode, planned
from jaxmagma import native
from tests.cpu_programs import einsum_program

native.load("cpu")
u = np.ones((20_000, 3, 3), np.float32)
program, arguments = einsum_program("xa,eab->exb", "e", (np.ones((3, 3), np.float32), u))
found = encode(planned(program))
greedy = found.attributes["plan"].copy()
greedy[5:7] = 1 << 20, 8  # values of scratch, vectors of elements in a block
shape = jax.ShapeDtypeStruct(u.shape, u.dtype)


def run(plan):
    call = jax.ffi.ffi_call("jaxmagma_cpu", shape)
    return jax.block_until_ready(call(*arguments, **{**found.attributes, "plan": plan}))


once = run(found.attributes["plan"])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for _ in range(3):
    try:
        run(greedy)
        print("no error")
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter by JAX 0.10
        print("out of memory" in str(error))
np.testing.assert_array_equal(run(found.attributes["plan"]), once)
"""
    assert run_elsewhere("-c", code).split() == ["True"] * 3


# ---- Threads and instruction sets ----------------------------------------------------------------


def sweep() -> str:
    """Some of everything, large enough for several threads; the sums' bits as text."""
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        for n in (1, 2, 3, 5, 8):
            b, u = random(rng, (n + 1, n), dtype), random(rng, (21, n, n), dtype)
            d = random(rng, (21, n + 1, n + 1), dtype)
            check_einsum("xi,yj,exy,xk,yl,ekl->eij", "e", b, b, d, b, b, u)
            check_einsum("eij->ji", "e", u, terms=21)
        for rows, symmetric in itertools.product((2, 3), (False, True)):
            check_point_matrix(rows, 13, symmetric, dtype)
        for n in (1, 2, 3, 5, 8, 19, 70):
            u = random(rng, (5, n, n), dtype)
            check_einsum("eij,ejk->eik", "e", u, u)
            check_einsum("eij,ekj->eik", "e", u, u)
    for n in (3, 16):  # beyond the caches
        u = random(rng, ((36 << 20) // (24 * n * n), n, n), "float64")
        check_einsum("eij,ejk->eik", "e", u, u)
    bits = []
    for elements, n in [(20_011, 3), (5_000, 7)]:
        u, v = random(rng, (elements, n, n), "float64"), random(rng, (elements, n, n), "float64")
        program, arguments = einsum_program("eij,ejk->ik", "e", (u, v))
        (total,) = call(program, *arguments)
        np.testing.assert_allclose(total, np.einsum("eij,ejk->ik", u, v), rtol=0, atol=1e-9)
        bits.append(np.asarray(total).tobytes().hex())
    return native_name() + " " + " ".join(bits)


def native_name() -> str:
    module = native.load("cpu")
    assert not isinstance(module, str), module
    return str(module.instruction_set())


def run_elsewhere(*command: str, **env: str) -> str:
    """What a process prints that has other environment variables, and the same packages."""
    paths = [*(path for path in sys.path if Path(path) != ROOT), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}
    done = subprocess.run(
        [sys.executable, "-P", *command], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sweep_elsewhere(**env: str) -> str:
    """The result of ``sweep`` in a process with other environment variables."""
    return run_elsewhere(__file__, **env)


@functools.cache
def instruction_sets(name: str) -> str:
    """What the instruction set is if ``JAXMAGMA_CPU_ISA`` asks for this one, or the error."""
    code = """
import jax, jax.numpy as jnp
import jaxmagma as jm
from jaxmagma import native

try:
    jax.jit(lambda u: jm.einsum("xa,yb,eab->exy", *[jnp.ones((2, 2))] * 2, u))(jnp.ones((9, 2, 2)))
    print(native.load("cpu").instruction_set())
except ValueError as error:
    print(error)
"""
    return run_elsewhere("-c", code, JAXMAGMA_CPU_ISA=name)


def test_unknown_instruction_set_is_an_error() -> None:
    best = instruction_sets("")
    text = instruction_sets("sse9")
    assert text.startswith("JAXMAGMA_CPU_ISA is 'sse9', which is no instruction set of kernels")
    choices = text.split("it may be: ")[1].split(", ")
    assert choices[0] == best and choices[-1] == "baseline"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
def test_instruction_sets(name: str) -> None:
    found = instruction_sets(name)
    if found == name:
        assert sweep_elsewhere(JAXMAGMA_CPU_ISA=name).split()[0] == name
    else:
        assert "this processor lacks" in found or "is no instruction set" in found


@pytest.mark.slow
def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    results = {sweep_elsewhere(PJRT_NPROC=str(threads)) for threads in (1, 7)}
    assert results == {sweep()}


def test_many_calls_at_once() -> None:
    """Calls that share the pool, and the caller's own thread, neither wait for ever nor mix."""
    rng = np.random.default_rng(0)
    u = random(rng, (20_000, 4, 4), "float64")
    b = random(rng, (5, 4), "float64")
    program, arguments = einsum_program("xa,yb,eab->exy", "e", (b, b, u))
    once = call(program, *arguments)[0]

    @jax.jit
    def many(b: jax.Array, u: jax.Array) -> list[jax.Array]:
        return [call(program, b * s, u)[0] for s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]

    for scale, result in zip((1.0, 2.0, 4.0, 8.0, 16.0, 32.0), many(b, u), strict=True):
        np.testing.assert_array_equal(result, once * scale**2)
    results = [jnp.asarray(call(program, *arguments)[0]) for _ in range(20)]
    for result in results:
        np.testing.assert_array_equal(result, once)


@pytest.mark.parametrize("elements", [7, 4_000])
def test_python_threads_share_a_function(elements: int) -> None:
    """Threads that call one jitted function with arrays and bases of their own get their own."""
    rng = np.random.default_rng(0)
    threads = 4
    bases = [random(rng, (4, 3), "float64") for _ in range(threads)]
    arrays = [random(rng, (elements, 3, 3), "float64") for _ in range(threads)]
    program, _ = einsum_program("xa,yb,eab->exy", "e", (bases[0], bases[0], arrays[0]))
    mass = jax.jit(functools.partial(call, program))
    wanted = [np.asarray(mass(b, u)[0]) for b, u in zip(bases, arrays, strict=True)]
    np.testing.assert_allclose(wanted[1], bases[1] @ arrays[1] @ bases[1].T, rtol=0, atol=1e-12)

    def wrong(thread: int) -> int:
        b, u, want = bases[thread], arrays[thread], wanted[thread]
        return sum(not np.array_equal(mass(b, u)[0], want) for _ in range(200))

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(wrong, range(threads))) == 0


def test_calls_leave_no_memory_behind() -> None:
    """Neither the 74 kB of a traced operand nor its 74 kB of panels."""
    rng = np.random.default_rng(0)
    b, u = random(rng, (96, 96), "float64"), random(rng, (9, 96), "float64")
    program, arguments = einsum_program("xa,ea->ex", "e", (b, u))
    run = jax.jit(functools.partial(call, program))

    def resident() -> int:
        """In bytes, after 400 more calls."""
        for _ in range(400):
            jax.block_until_ready(run(*arguments))
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    resident()
    before = resident()
    assert resident() < before + (16 << 20)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(sweep())
