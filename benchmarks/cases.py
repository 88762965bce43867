"""Which workloads are measured: suites of them, the most telling first."""

import re
from collections.abc import Callable, Iterator
from itertools import product

from benchmarks import elements, energies, functions, fused, meshes, programs, users
from benchmarks import workloads as w
from benchmarks.workloads import Workload


DEGREES = range(1, 16)
SIZES = range(2, 33)
SUFFIXES = {"float64": "", "float32": "f32", "complex64": "c64", "complex128": "c128"}


def build(suites: list[str], total_bytes: float, pattern: str = "") -> list[Workload]:
    """The workloads of some suites, each about ``total_bytes`` large, whose names match."""
    found: dict[str, Workload] = {}
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"suite {suite!r} is none of {', '.join(SUITES)}")
        for workload in SUITES[suite](total_bytes):
            if re.search(pattern, workload.name):
                found.setdefault(workload.name, workload)
    return list(found.values())


# Bases are constants unless a name says otherwise: that is how most programs have them.


def chain(size: float) -> Iterator[Workload]:
    """The two-dimensional mass operator, as many points as nodes, every size."""
    for n in SIZES:
        yield w.constant(w.chain(n, n, size))


def rectangular(size: float) -> Iterator[Workload]:
    """The same with more points than nodes."""
    for n, q in product(range(2, 12), range(3, 13)):
        if n < q:
            yield w.constant(w.chain(n, q, size))


def interp(size: float) -> Iterator[Workload]:
    """Interpolation in three and in two dimensions, and its transpose."""
    for dimension, transposed in product((3, 2), (False, True)):
        for p in DEGREES:
            yield w.constant(w.interp(dimension, p, size, transposed=transposed))


def bk(size: float) -> Iterator[Workload]:
    """The mass and diffusion operators of CEED's bake-off kernels."""
    for kernel, p in product((w.bk1, w.bk3, w.bk5), DEGREES):
        yield w.constant(kernel(p, size))


def symmetric(size: float) -> Iterator[Workload]:
    """Operators with the tables of finite elements, and with random ones of the same sizes.

    The former are multiplied by even and odd halves, except with ``JAXMAGMA_EVEN_ODD=off``.
    """
    for p in range(4, 16):  # below, halves are as many operations
        for kernel in (w.bk1, w.bk3, w.bk5):
            yield w.constant(kernel(p, size))
            yield w.with_gauss_points(kernel(p, size))
        yield w.constant(w.chain(p + 1, p + 1, size))
        yield w.with_gauss_points(w.chain(p + 1, p + 1, size))


def gradients(size: float) -> Iterator[Workload]:
    """With respect to what has an element axis, and with respect to the traced bases, too."""
    for bases in (False, True):
        for n in SIZES:
            yield w.chain_grad(n, size, bases=bases)
        for p in DEGREES:
            yield w.bk1_grad(p, size, bases=bases)
        for p in DEGREES:
            yield w.bk3_grad(p, size, bases=bases)


def traced(size: float) -> Iterator[Workload]:
    """With bases that are arguments."""
    for n in SIZES:
        yield w.renamed(w.chain(n, n, size), "traced")
    for kernel, p in product((w.bk1, w.bk3, w.bk5), DEGREES):
        yield w.renamed(kernel(p, size), "traced")
    for p in range(1, 9):
        yield w.renamed(w.interp(3, p, size), "traced")


def bgemm(size: float) -> Iterator[Workload]:
    """Batched products of square matrices: every size, transpose and dtype."""
    for dtype, transposes, n in product(SUFFIXES, ("nn", "nt", "tn", "tt"), SIZES):
        yield _of_dtype(w.bgemm(n, n, n, size, dtype, transposes))


def matrices(size: float) -> Iterator[Workload]:
    """Batched products of rectangular matrices and of larger ones, and products with vectors."""
    for dtype, n in product(SUFFIXES, (33, 40, 48, 64)):
        yield _of_dtype(w.bgemm(n, n, n, size, dtype, "nn"))
    for m, k, n in product((3, 8, 24), (4, 8, 32), (1, 5, 16)):
        yield w.bgemm(m, k, n, size)
    for m, n in ((8, 8), (16, 16), (17, 31), (32, 32)):
        yield w.bgemv(m, n, size)
    for m, n in ((64, 65536), (16384, 64), (65536, 1000)):
        if 8 * m * n < size:
            yield w.gemv(m, n)


def precisions(size: float) -> Iterator[Workload]:
    """Other dtypes."""
    for dtype in ("float32", "complex64", "complex128"):
        for n in (2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32):
            yield _of_dtype(w.constant(w.chain(n, n, size, dtype)))
        for p in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15):
            yield _of_dtype(w.constant(w.interp(3, p, size, dtype)))
            yield _of_dtype(w.constant(w.bk1(p, size, dtype)))
            yield _of_dtype(w.constant(w.bk3(p, size, dtype)))
        for bases in (False, True):
            for n in (4, 8, 16):
                yield _of_dtype(w.chain_grad(n, size, dtype, bases=bases))
            for p in (2, 4, 6):
                yield _of_dtype(w.bk1_grad(p, size, dtype, bases=bases))


def applications(size: float) -> Iterator[Workload]:
    """Fused functions of a whole code: hydrodynamics, and diffusion of a global vector."""
    for k in (2, 3, 4, 5, 6, 8):  # the last two are several kernels
        yield fused.corner_force(k, size)
    for p in range(1, 9):
        yield fused.global_diffusion(p, size)


def whole_programs(size: float) -> Iterator[Workload]:
    """Whole programs of an element as array code says them, in every spelling that there is."""
    for program in programs.every():
        yield from program.workloads(size)


def whole_programs_in_float32(size: float) -> Iterator[Workload]:
    """The same of arrays and tables of float32."""
    for program in programs.every():
        if program.dtype == "float64":
            yield from programs.in_float32(program).workloads(size)


def elsewhere(size: float) -> Iterator[Workload]:
    """Faces, particles, filters, reactions, small networks: what must not lose by a kernel."""
    for program in users.every():
        yield from program.workloads(size)


def single_functions(size: float) -> Iterator[Workload]:
    """Every function of a number, alone and among multiplications and additions."""
    for program in functions.every():
        yield from program.workloads(size)


def textbook_elements(size: float) -> Iterator[Workload]:
    """Tetrahedra, wedges and hexahedra of low order, gradients of shape functions first."""
    for program in elements.every():
        yield from program.workloads(size)


def derivatives_of_energies(size: float) -> Iterator[Workload]:
    """Forces and matrices of nonlinear solids as ``jax.grad`` and ``jax.hessian``."""
    for program in energies.every():
        yield from program.workloads(size)


def global_vectors(size: float) -> Iterator[Workload]:
    """Operators on global vectors, the geometry of elements from the coordinates of their nodes."""
    yield from meshes.every(size)


def library(size: float) -> Iterator[Workload]:
    """Work that XLA does well: here the aim is to lose nothing."""
    n = 1 << max(6, (int((size / 8 / 24) ** 0.5)).bit_length() - 1)

    def e(count: int) -> int:
        return w.elements(size, 8 * count)

    yield w.plain("library/matmul", "ij,jk->ik", {"i": n, "j": n, "k": n})
    yield w.plain("library/rows-times-shared", "ei,ij->ej", {"e": e(128), "i": 64, "j": 64})
    yield w.plain(
        "library/bgemm-n64", "eij,ejk->eik", {"e": e(3 * 64**2)} | dict.fromkeys("ijk", 64)
    )
    yield w.plain("library/elementwise", "ei,ei->ei", {"e": e(3 * 64), "i": 64})
    yield w.plain("library/row-sums", "ei->e", {"e": e(65), "i": 64})
    yield w.plain("library/trace", "eii->e", {"e": e(64), "i": 8})
    yield w.plain("library/transpose", "eijk->ekji", {"e": e(2 * 8**3)} | dict.fromkeys("ijk", 8))
    yield w.plain("library/dot", "i,i->", {"i": e(2)})
    yield w.plain("library/outer", "i,j->ij", {"i": n, "j": 2 * n})
    for p in (3, 7):
        yield w.constant(w.bk3(p, size, fused=False))
        yield w.constant(w.bk5(p, size, fused=False))


def in_cache(size: float) -> Iterator[Workload]:
    """The mass operator on data that stays in a cache: what the arithmetic alone allows."""
    for p in range(1, 9):
        yield w.bk1_in_cache(p, min(size, 512e3))


def ceiling(size: float) -> Iterator[Workload]:
    """Everything of which this library promises a share of the device's speed, in float64."""
    for suite in (chain, rectangular, interp, bk, gradients, traced):
        yield from suite(size)


def overview(size: float) -> Iterator[Workload]:
    """Some of everything."""
    sizes = r"/(p[1235678]|n(2|3|4|7|8|12|16|20|24|32)|k[23]|3x4|7x8|11x12)$"
    for suite in (bk, chain, interp, rectangular, gradients, applications):
        yield from (x for x in suite(size) if re.search(sizes, x.name))
    for suite in (bgemm, precisions, traced):
        yield from (x for x in suite(size) if re.search(r"/(p[36]|n(4|8|16))$", x.name))
    yield from matrices(size)
    yield from library(size)


def cpu(size: float) -> Iterator[Workload]:
    """What a CPU is judged by, and what it must not slow down."""
    for n in (2, 3, 4, 6, 8, 12, 16, 24, 32):
        yield w.constant(w.chain(n, n, size))
    for p in range(1, 9):
        yield w.constant(w.interp(3, p, size))
    for kernel, p in product((w.bk1, w.bk3), range(1, 9)):
        yield w.constant(kernel(p, size))
    yield from in_cache(size)
    for n in (2, 3, 4, 8, 16, 32):
        yield w.bgemm(n, n, n, size)
    yield fused.corner_force(2, size)
    yield from library(size)


def everything(size: float) -> Iterator[Workload]:
    """All of the above."""
    for name, suite in SUITES.items():
        if name != "all":
            yield from suite(size)


SUITES: dict[str, Callable[[float], Iterator[Workload]]] = {
    "overview": overview,
    "cpu": cpu,
    "ceiling": ceiling,
    "chain": chain,
    "rectangular": rectangular,
    "interp": interp,
    "bk": bk,
    "symmetric": symmetric,
    "gradients": gradients,
    "traced": traced,
    "bgemm": bgemm,
    "matrices": matrices,
    "precisions": precisions,
    "applications": applications,
    "programs": whole_programs,
    "programs-f32": whole_programs_in_float32,
    "users": elsewhere,
    "functions": single_functions,
    "elements": textbook_elements,
    "energies": derivatives_of_energies,
    "meshes": global_vectors,
    "library": library,
    "in-cache": in_cache,
    "all": everything,
}


def _of_dtype(workload: Workload) -> Workload:
    suffix = SUFFIXES[workload.dtype]
    return w.renamed(workload, suffix) if suffix else workload
