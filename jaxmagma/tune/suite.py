"""The programs that ``python -m jaxmagma.tune`` tunes, the most telling first.

Tensor-product finite elements and small matrices. Bases are constants, n nodes and q points in each
direction, and what is left are functions of arrays with one element axis in front.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.frontends.einsum import einsum
from jaxmagma.frontends.fuse import fuse


Array = Any
SUITES = ("gpu", "cpu")


@dataclass(frozen=True)
class Case:
    """A function of arrays with the given tiles behind one element axis."""

    name: str
    function: Callable[..., Any]
    tiles: tuple[tuple[int, ...], ...]
    dtype: str = "float64"

    def arguments(self, total_bytes: float) -> list[jax.ShapeDtypeStruct]:
        """So many elements that arguments and results have about that many bytes."""
        sample = jax.eval_shape(self.function, *self._shapes(_SAMPLE))
        results = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(sample)]
        read = sum(math.prod(tile) for tile in self.tiles) * np.dtype(self.dtype).itemsize
        elements = int(total_bytes // (read + sum(results) / _SAMPLE))
        return self._shapes(max(1, elements))

    def _shapes(self, elements: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((elements, *x), np.dtype(self.dtype)) for x in self.tiles]


# More elements than any other extent, so that they are what the program is repeated over.
_SAMPLE = 1 << 12


def build(suite: str, pattern: str = "") -> list[Case]:
    """The cases of a suite whose names match.

    Raises:
      ValueError: there is no such suite.
    """
    if suite not in SUITES:
        raise ValueError(f"suite {suite!r} is none of {', '.join(SUITES)}")
    cases = _gpu() if suite == "gpu" else _cpu()
    return [case for case in cases if re.search(pattern, case.name)]


def _gpu() -> Iterator[Case]:
    for p in range(1, 9):
        yield bk1(p)
    for n in range(2, 17):
        yield chain(n)
    for case in (bk3, bk5, interp3d):
        for p in range(1, 9):
            yield case(p)
    for n in range(17, 33):
        yield chain(n)
    for case in (bk1, bk3, bk5):
        for p in range(9, 16):
            yield case(p)
    for p in range(1, 9):
        yield gradient(bk1(p))
    for p in range(1, 9):
        yield gradient(bk3(p))
    for n in (4, 8, 12, 16):
        yield gradient(chain(n))
    for n, q in itertools.combinations(range(2, 13), 2):
        yield chain(n, q=q)
    for p in range(1, 9):
        yield interp3d(p, transposed=True)
    for m, k, n in ((3, 8, 3), (4, 6, 8), (7, 9, 13), (17, 31, 5), (24, 8, 24)):
        yield product(m, k, n)
    for p in (1, 2, 3, 4, 6, 8):
        yield bk1(p, "float32")
        yield bk3(p, "float32")
    for n in range(2, 33):
        yield product(n, n, n)
    for n in (2, 3, 4, 8, 12, 16):
        yield chain(n, "float32")


def _cpu() -> Iterator[Case]:
    for p in range(1, 9):
        yield bk1(p)
    for n in (2, 3, 4, 6, 8, 12, 16):
        yield chain(n)
    for p in (1, 2, 3, 5, 8):
        yield interp3d(p)
        yield bk3(p)
        yield bk5(p)
    for n in (2, 3, 4, 6, 8, 12, 16):
        yield product(n, n, n)
    for p in (1, 3, 5):
        yield gradient(bk1(p))
        yield bk1(p, "float32")


# ---- Cases -----------------------------------------------------------------------------------


def table(q: int, n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Values of a basis, (q, n): only their number matters here."""
    return np.random.default_rng(seed).uniform(-1, 1, (q, n)).astype(dtype)


def _name(family: str, size: str, dtype: str) -> str:
    short = {"float64": "", "float32": "-f32", "complex64": "-c64", "complex128": "-c128"}[dtype]
    return f"{family}{short}/{size}"


def interp3d(p: int, dtype: str = "float64", *, transposed: bool = False) -> Case:
    """Values at the points, or the transpose of that."""
    n, q = p + 1, p + 2
    b = table(q, n, dtype)
    spec = "xa,yb,zc,exyz->eabc" if transposed else "xa,yb,zc,eabc->exyz"
    return Case(
        _name("interp3d-transposed" if transposed else "interp3d", f"p{p}", dtype),
        lambda u: einsum(spec, b, b, b, u),
        ((q, q, q) if transposed else (n, n, n),),
        dtype,
    )


def bk1(p: int, dtype: str = "float64") -> Case:
    """The mass operator: interpolate, scale, and transpose back."""
    n, q = p + 1, p + 2
    b = table(q, n, dtype)
    spec = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
    return Case(
        _name("bk1", f"p{p}", dtype),
        lambda d, u: einsum(spec, b, b, b, d, b, b, b, u),
        ((q, q, q), (n, n, n)),
        dtype,
    )


def _flux(d: Array, x: Array, y: Array, z: Array) -> tuple[Array, Array, Array]:
    """D times a gradient, with the six values of the symmetric D."""
    return (
        d[0] * x + d[1] * y + d[2] * z,
        d[1] * x + d[3] * y + d[4] * z,
        d[2] * x + d[4] * y + d[5] * z,
    )


def _diffusion(b: np.ndarray, g: np.ndarray, u: Array, d: Array) -> Array:
    slopes = ((g, b, b), (b, g, b), (b, b, g))
    flux = _flux(d, *(jnp.einsum("xa,yb,zc,abc->xyz", *slope, u) for slope in slopes))
    terms = [jnp.einsum("xa,yb,zc,xyz->abc", *s, f) for s, f in zip(slopes, flux, strict=True)]
    return terms[0] + terms[1] + terms[2]


def bk3(p: int, dtype: str = "float64") -> Case:
    """The diffusion operator."""
    n, q = p + 1, p + 2
    b, g = table(q, n, dtype), table(q, n, dtype, seed=1)
    return Case(
        _name("bk3", f"p{p}", dtype),
        fuse(partial(_diffusion, b, g)),
        ((n, n, n), (6, q, q, q)),
        dtype,
    )


def _collocated(g: np.ndarray, u: Array, d: Array) -> Array:
    flux = _flux(
        d,
        jnp.einsum("xa,ayz->xyz", g, u),
        jnp.einsum("yb,xbz->xyz", g, u),
        jnp.einsum("zc,xyc->xyz", g, u),
    )
    return (
        jnp.einsum("xa,xyz->ayz", g, flux[0])
        + jnp.einsum("yb,xyz->xbz", g, flux[1])
        + jnp.einsum("zc,xyz->xyc", g, flux[2])
    )


def bk5(p: int, dtype: str = "float64") -> Case:
    """The diffusion operator with collocated points: interpolation is the identity."""
    n = p + 1
    g = table(n, n, dtype)
    return Case(
        _name("bk5", f"p{p}", dtype),
        fuse(partial(_collocated, g)),
        ((n, n, n), (6, n, n, n)),
        dtype,
    )


def chain(n: int, dtype: str = "float64", *, q: int | None = None) -> Case:
    """B^T (D * (B A B^T)) B: the two-dimensional mass operator, with n points if not q."""
    q = n if q is None else q
    b = table(q, n, dtype)
    name = ("chain", f"n{n}") if q == n else ("chain-rectangular", f"{n}x{q}")
    return Case(
        _name(*name, dtype),
        lambda a, d: einsum("xi,yj,exy,xk,yl,ekl->eij", b, b, d, b, b, a),
        ((n, n), (q, q)),
        dtype,
    )


def product(m: int, k: int, n: int, dtype: str = "float64") -> Case:
    """One product of two matrices per element."""
    size = f"n{n}" if m == k == n else f"{m}x{k}x{n}"
    return Case(
        _name("bgemm", size, dtype),
        lambda a, b: einsum("eij,ejk->eik", a, b),
        ((m, k), (k, n)),
        dtype,
    )


def gradient(case: Case) -> Case:
    """The gradient by all arguments, given the cotangent of the result."""
    shapes = case.arguments(1e8)
    (result,) = jax.tree.leaves(jax.eval_shape(case.function, *shapes))

    def pullback(*arguments: Array) -> Any:
        *primals, cotangent = arguments
        return jax.vjp(case.function, *primals)[1](cotangent)

    family, size = case.name.split("/")
    tiles = (*case.tiles, tuple(result.shape[1:]))
    return Case(f"{family}-grad/{size}", pullback, tiles, case.dtype)
