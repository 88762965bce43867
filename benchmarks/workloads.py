"""What is measured: each workload's expression, shapes, least traffic and flops.

Layouts: ``e`` is the element axis; ``b`` and ``g`` are (q, n) tables of a basis and its
derivative at the quadrature points, shared by all elements. Least traffic reads each input once
and writes each output once; flops are those of the best known factorisation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np


Array = Any  # jax.Array, or np.ndarray in extended precision
Einsum = Callable[..., Array]


@dataclass(frozen=True)
class Workload:
    """A function written with the einsum passed in, so that every einsum runs the same one.

    If it is ``fused``, what is passed in is ``jax.vmap`` or ``jm.fuse``.
    ``shared[i]`` says that argument ``i`` has no element axis. ``leading`` says that the output's
    first axis is the element axis and that its first elements can be computed alone, in numpy.
    """

    name: str
    make: Callable[[Any], Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    shared: tuple[bool, ...]
    least_bytes: int
    flops: int
    dtype: str = "float64"
    leading: bool = True
    fused: bool = False

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.shared):
            raise ValueError(f"{self.name}: {len(self.shapes)} shapes, {len(self.shared)} shared")

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def input_bytes(self) -> int:
        return sum(int(np.prod(s)) for s in self.shapes) * self.itemsize


def elements(total_bytes: float, bytes_per_element: int) -> int:
    return max(1, int(total_bytes // bytes_per_element))


# ---- Transformations of workloads ------------------------------------------------------------


def constant(workload: Workload, seed: int = 0) -> Workload:
    """The same, with the shared arguments known when the function is traced."""
    rng = np.random.default_rng(seed)
    tables = [
        rng.uniform(-1, 1, shape).astype(workload.dtype) if shared else None
        for shape, shared in zip(workload.shapes, workload.shared, strict=True)
    ]

    def make(einsum: Einsum) -> Callable[..., Any]:
        fn = workload.make(einsum)

        def apply(*batched: Array) -> Any:
            rest = iter(batched)
            return fn(*(next(rest) if table is None else table for table in tables))

        return apply

    batched = [not shared for shared in workload.shared]
    shapes = tuple(s for s, keep in zip(workload.shapes, batched, strict=True) if keep)
    return replace(workload, make=make, shapes=shapes, shared=(False,) * len(shapes))


def pullback(
    workload: Workload,
    wrt: Sequence[int],
    *,
    name: str,
    out: tuple[int, ...],
    least_bytes: int,
    flops: int,
) -> Workload:
    """Gradient with respect to the arguments ``wrt``, given the cotangent of the output."""

    def make(einsum: Einsum) -> Callable[..., Any]:
        fn = workload.make(einsum)

        def apply(*args: Array) -> Any:
            *primals, cotangent = args

            def of(*chosen: Array) -> Array:
                full = list(primals)
                for i, value in zip(wrt, chosen, strict=True):
                    full[i] = value
                return fn(*full)

            return jax.vjp(of, *(primals[i] for i in wrt))[1](cotangent)

        return apply

    return replace(
        workload,
        name=name,
        make=make,
        shapes=(*workload.shapes, out),
        shared=(*workload.shared, False),
        least_bytes=least_bytes,
        flops=flops,
        leading=False,  # as far as numpy is concerned: it has no vjp
    )


# ---- Tensor-product finite elements ----------------------------------------------------------


def interp3d(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Values at the quadrature points."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (n**3 + q**3) * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda b, u: einsum("xa,yb,zc,eabc->exyz", b, b, b, u)

    return Workload(
        name=f"interp3d/p{p}",
        make=make,
        shapes=((q, n), (e, n, n, n)),
        shared=(True, False),
        least_bytes=e * (n**3 + q**3) * w,
        flops=2 * e * (q * n**3 + q * q * n * n + q**3 * n),
        dtype=dtype,
    )


def bk1(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Mass operator: interpolate, scale, and transpose back."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n**3 + q**3) * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        spec = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
        return lambda b, d, u: einsum(spec, b, b, b, d, b, b, b, u)

    return Workload(
        name=f"bk1/p{p}",
        make=make,
        shapes=((q, n), (e, q, q, q), (e, n, n, n)),
        shared=(True, False, False),
        least_bytes=e * (2 * n**3 + q**3) * w,
        flops=4 * e * (q * n**3 + q * q * n * n + q**3 * n) + e * q**3,
        dtype=dtype,
    )


def bk1_grad(p: int, wrt: str, total_bytes: float, dtype: str = "float64") -> Workload:
    """Gradient of ``bk1`` with respect to some of ``u`` and ``d``, with constant bases.

    d/du reads d and the cotangent; d/dd reads u and the cotangent; both together read all three.
    """
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    per_element = {"u": 2 * n**3 + q**3, "d": 2 * n**3 + q**3, "ud": 3 * n**3 + 2 * q**3}[wrt] * w
    e = elements(total_bytes, per_element)
    sweep = 2 * (q * n**3 + q * q * n * n + q**3 * n)  # all three directions, one way
    flops = {"u": 2 * sweep + q**3, "d": 2 * sweep + q**3, "ud": 3 * sweep + 2 * q**3}[wrt]
    forward = constant(bk1(p, e * (2 * n**3 + q**3) * w, dtype))
    return pullback(
        forward,
        [{"d": 0, "u": 1}[a] for a in wrt],
        name=f"bk1-grad-{wrt}/p{p}",
        out=(e, n, n, n),
        least_bytes=e * per_element,
        flops=e * flops,
    )


def _diffusion(einsum: Einsum, b: Array, g: Array, d: Array, u: Array) -> Array:
    """grad^T (D grad u), with the six values of the symmetric D at each point."""
    ux = einsum("xa,yb,zc,eabc->exyz", g, b, b, u)
    uy = einsum("xa,yb,zc,eabc->exyz", b, g, b, u)
    uz = einsum("xa,yb,zc,eabc->exyz", b, b, g, u)
    wx = d[:, 0] * ux + d[:, 1] * uy + d[:, 2] * uz
    wy = d[:, 1] * ux + d[:, 3] * uy + d[:, 4] * uz
    wz = d[:, 2] * ux + d[:, 4] * uy + d[:, 5] * uz
    vx = einsum("xi,yj,zk,exyz->eijk", g, b, b, wx)
    vy = einsum("xi,yj,zk,exyz->eijk", b, g, b, wy)
    vz = einsum("xi,yj,zk,exyz->eijk", b, b, g, wz)
    return vx + vy + vz


def bk3(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Diffusion operator, as separate einsums."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n**3 + 6 * q**3) * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda b, g, d, u: _diffusion(einsum, b, g, d, u)

    # Sum factorisation with shared partial sums, forward and transposed.
    flops = 2 * 2 * e * (2 * q * n**3 + 3 * q * q * n * n + 3 * q**3 * n) + 15 * e * q**3
    return Workload(
        name=f"bk3/p{p}",
        make=make,
        shapes=((q, n), (q, n), (e, 6, q, q, q), (e, n, n, n)),
        shared=(True, True, False, False),
        least_bytes=e * (2 * n**3 + 6 * q**3) * w,
        flops=flops,
        dtype=dtype,
    )


def bk5(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Diffusion with collocated points: interpolation is the identity, derivatives remain."""
    n, w = p + 1, np.dtype(dtype).itemsize
    e = elements(total_bytes, 8 * n**3 * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        def apply(g: Array, d: Array, u: Array) -> Array:
            ux = einsum("xa,eayz->exyz", g, u)
            uy = einsum("yb,exbz->exyz", g, u)
            uz = einsum("zc,exyc->exyz", g, u)
            wx = d[:, 0] * ux + d[:, 1] * uy + d[:, 2] * uz
            wy = d[:, 1] * ux + d[:, 3] * uy + d[:, 4] * uz
            wz = d[:, 2] * ux + d[:, 4] * uy + d[:, 5] * uz
            vx = einsum("xa,exyz->eayz", g, wx)
            vy = einsum("yb,exyz->exbz", g, wy)
            vz = einsum("zc,exyz->exyc", g, wz)
            return vx + vy + vz

        return apply

    return Workload(
        name=f"bk5/p{p}",
        make=make,
        shapes=((n, n), (e, 6, n, n, n), (e, n, n, n)),
        shared=(True, False, False),
        least_bytes=8 * e * n**3 * w,
        flops=e * (12 * n**4 + 15 * n**3),
        dtype=dtype,
    )


# ---- Small matrices --------------------------------------------------------------------------


def chain(n: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """B^T (D * (B A B^T)) B: the two-dimensional mass operator, with n points per direction."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, 3 * n * n * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda b, a, d: einsum("xi,yj,exy,xk,yl,ekl->eij", b, b, d, b, b, a)

    return Workload(
        name=f"chain/n{n}",
        make=make,
        shapes=((n, n), (e, n, n), (e, n, n)),
        shared=(True, False, False),
        least_bytes=3 * e * n * n * w,
        flops=e * (8 * n**3 + n * n),
        dtype=dtype,
    )


def bgemm(n: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """One product of two n by n matrices per element."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, 3 * n * n * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda a, b: einsum("eij,ejk->eik", a, b)

    return Workload(
        name=f"bgemm/n{n}",
        make=make,
        shapes=((e, n, n), (e, n, n)),
        shared=(False, False),
        least_bytes=3 * e * n * n * w,
        flops=2 * e * n**3,
        dtype=dtype,
    )


def bgemv(m: int, n: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """One matrix times one vector per element."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, m * n * w)

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda a, x: einsum("eij,ej->ei", a, x)

    return Workload(
        name=f"bgemv/{m}x{n}",
        make=make,
        shapes=((e, m, n), (e, n)),
        shared=(False, False),
        least_bytes=e * (m * n + m + n) * w,
        flops=2 * e * m * n,
        dtype=dtype,
    )


def gemv(m: int, n: int, dtype: str = "float64") -> Workload:
    """One large matrix times one vector."""

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda a, x: einsum("ij,j->i", a, x)

    return Workload(
        name=f"gemv/{m}x{n}",
        make=make,
        shapes=((m, n), (n,)),
        shared=(False, True),
        least_bytes=m * n * np.dtype(dtype).itemsize,
        flops=2 * m * n,
        dtype=dtype,
    )


# ---- What a drop-in replacement must not slow down -------------------------------------------


def plain(name: str, spec: str, sizes: dict[str, int], dtype: str = "float64") -> Workload:
    """Any einsum, counted as it is written; the first label of the output is the leading one."""
    inputs, output = spec.split("->")
    terms = inputs.split(",")

    def size(labels: str) -> int:
        return int(np.prod([sizes[label] for label in labels], dtype=np.int64))

    def make(einsum: Einsum) -> Callable[..., Array]:
        return lambda *args: einsum(spec, *args)

    # A diagonal reads only its own entries.
    traffic = sum(size("".join(dict.fromkeys(term))) for term in [*terms, output])
    leading = output[:1]
    return Workload(
        name=name,
        make=make,
        shapes=tuple(tuple(sizes[label] for label in term) for term in terms),
        shared=tuple(not leading or term[:1] != leading for term in terms),
        least_bytes=traffic * np.dtype(dtype).itemsize,
        flops=len(terms) * size("".join(dict.fromkeys(inputs.replace(",", "")))),
        dtype=dtype,
        # Only if no term has the label elsewhere can the first rows be computed alone.
        leading=bool(leading) and all(leading not in term[1:] for term in terms),
    )
