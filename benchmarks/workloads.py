"""What is measured: each workload's function, shapes, least traffic and flops.

Layouts: ``e`` is the element axis; ``b`` and ``g`` are (q, n) tables of a basis and its
derivative at the quadrature points, shared by all elements. Least traffic reads each input once
and writes each output once; flops are those of the best known factorisation.

A workload is written twice: for all elements at once, with the einsum passed in, and for one
element, by hand. The first is what ``jnp.einsum`` and ``jm.einsum`` run, and ``np.einsum`` in
extended precision; the second what ``jax.vmap`` and ``jm.fuse`` repeat.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from fem_demo.basis import gauss_legendre, gauss_lobatto, lagrange


Array = Any  # jax.Array, or np.ndarray in extended precision
Einsum = Callable[..., Array]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """A function to time, and what it needs.

    Attributes:
      name: family and size, as in ``bk1/p3``.
      shapes: of the arguments, or of the random arrays of which ``given`` makes them.
      shared: whether an argument has no element axis.
      least_bytes: of the arguments, and of the results.
      flops: a complex multiplication and addition counted as two.
      batched: from an einsum to the function of all elements.
      element: the function of one element.
      fused: whether jaxmagma runs ``jm.fuse(element)``, not ``batched(jm.einsum)``.
      ways: returns the functions to compare, where they are not made of the two above.
      wrt: if not empty, the gradients with respect to these arguments are what is timed, given the
        cotangent of the result as the last argument.
      leading: whether the first elements of the result can be computed alone, in numpy.
      in_cache: whether to time it on data that is still in a cache.
      given: makes the arguments of arrays of numbers in (-1, 1): in the ranges, and in the order
        in memory, that the function wants them in. This is not timed.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    shared: tuple[bool, ...]
    least_bytes: int
    flops: int
    batched: Callable[[Einsum], Function] | None = None
    element: Function | None = None
    fused: bool = False
    ways: Callable[[], dict[str, Function]] | None = None
    wrt: tuple[int, ...] = ()
    dtype: str = "float64"
    leading: bool = True
    in_cache: bool = False
    given: Callable[..., tuple[Array, ...]] | None = None

    @property
    def arguments(self) -> list[Any]:
        """What stands for the arguments where none are at hand."""
        drawn = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in self.shapes]
        return list(jax.eval_shape(self.given, *drawn)) if self.given else drawn

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.shared):
            raise ValueError(f"{self.name}: {len(self.shapes)} shapes, {len(self.shared)} shared")

    @property
    def family(self) -> str:
        return self.name.split("/")[0]

    @property
    def input_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.arguments))

    @property
    def real_flops(self) -> int:
        return self.flops * (4 if np.dtype(self.dtype).kind == "c" else 1)

    def functions(self) -> dict[str, Function]:
        """``jm``, and what it is compared with: ``jnp`` (its einsum), ``vmap``, or both."""
        found = self.ways() if self.ways else {}
        axes = tuple(None if shared else 0 for shared in self.shared[: self._inputs])
        if self.batched:
            found |= {"jm": self.batched(jm.einsum), "jnp": self.batched(jnp.einsum)}
        if self.element:
            found["vmap"] = jax.vmap(self.element, axes)
        if self.element and self.fused:
            found["jm"] = jm.fuse(self.element, axes)
        return {name: _pullback(fn, self.wrt) if self.wrt else fn for name, fn in found.items()}

    @property
    def _inputs(self) -> int:
        return len(self.shapes) - bool(self.wrt)  # without the cotangent


def _pullback(fn: Function, wrt: tuple[int, ...]) -> Function:
    def apply(*args: Array) -> Any:
        *primals, cotangent = args

        def of(*chosen: Array) -> Array:
            full = list(primals)
            for i, value in zip(wrt, chosen, strict=True):
                full[i] = value
            return fn(*full)

        return jax.vjp(of, *(primals[i] for i in wrt))[1](cotangent)

    return apply


def elements(total_bytes: float, bytes_per_element: int) -> int:
    return max(1, int(total_bytes // bytes_per_element))


# ---- Transformations of workloads ------------------------------------------------------------


def renamed(workload: Workload, suffix: str) -> Workload:
    family, size = workload.name.split("/")
    return replace(workload, name=f"{family}-{suffix}/{size}")


def tables(workload: Workload, seed: int = 0) -> list[np.ndarray | None]:
    """Values for the shared arguments, none for the others."""
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(-1, 1, shape).astype(workload.dtype) if shared else None
        for shape, shared in zip(workload.shapes, workload.shared, strict=True)
    ]


def with_gauss_points(workload: Workload) -> Workload:
    """With tables of a basis and its derivative on symmetric points, as finite elements have them.

    Nodes are Gauss-Lobatto points; so are the points where there is no basis to interpolate with.
    """
    shapes = [s for s, shared in zip(workload.shapes, workload.shared, strict=True) if shared]
    q, n = shapes[0]
    nodes = gauss_lobatto(n)
    collocated = workload.family == "bk5"
    known = lagrange(nodes, nodes if collocated else gauss_legendre(q)[0])
    left = iter(known[1:] if collocated else known)
    values = [next(left).astype(workload.dtype) if x else None for x in workload.shared]
    return renamed(constant(workload, values), "symmetric")


def constant(workload: Workload, values: list[np.ndarray | None] | None = None) -> Workload:
    """The same, with the shared arguments known when the function is traced."""
    known = values or tables(workload)

    def close(fn: Function) -> Function:
        def apply(*batched: Array) -> Any:
            rest = iter(batched)
            return fn(*(next(rest) if table is None else table for table in known))

        return apply

    batched, element = workload.batched, workload.element
    shapes = tuple(s for s, table in zip(workload.shapes, known, strict=True) if table is None)
    return replace(
        workload,
        batched=batched and (lambda einsum: close(batched(einsum))),
        element=element and close(element),
        shapes=shapes,
        shared=(False,) * len(shapes),
    )


def gradient(
    workload: Workload, suffix: str, out: tuple[int, ...], least_bytes: int, flops: int
) -> Workload:
    """Its gradient with respect to all of its arguments."""
    return replace(
        renamed(workload, suffix),
        wrt=tuple(range(len(workload.shapes))),
        shapes=(*workload.shapes, out),
        shared=(*workload.shared, False),
        least_bytes=least_bytes,
        flops=flops,
        leading=False,  # as far as numpy is concerned: it has no vjp
    )


# ---- Tensor-product finite elements ----------------------------------------------------------


def apply_1d(table: Array, u: Array) -> Array:
    """Applies a table (m, k) along every axis of u (k, ..., k)."""
    for _ in range(u.ndim):
        u = jnp.tensordot(u, table, (0, 1))  # the first axis leaves, its successor comes last
    return u


def interpolate(b: Array, u: Array) -> Array:
    return apply_1d(b, u)


def integrate(b: Array, u: Array) -> Array:
    return apply_1d(b.T, u)


def sweep(n: int, q: int, dimension: int) -> int:
    """Flops of n values per direction to q, one direction after the other."""
    return sum(2 * n ** (dimension - k) * q ** (k + 1) for k in range(dimension))


def interp(
    dimension: int,
    p: int,
    total_bytes: float,
    dtype: str = "float64",
    *,
    transposed: bool = False,
) -> Workload:
    """Values at the quadrature points, or the transpose of that: integrals against the basis."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    per_element = n**dimension + q**dimension
    e = elements(total_bytes, per_element * w)
    nodes, points = "abc"[:dimension], "xyz"[:dimension]
    into, out = (points, nodes) if transposed else (nodes, points)
    spec = ",".join(map("".join, zip(points, nodes, strict=True))) + f",e{into}->e{out}"

    def batched(einsum: Einsum) -> Function:
        return lambda b, u: einsum(spec, *[b] * dimension, u)

    return Workload(
        name=f"interp{dimension}d{'-transposed' if transposed else ''}/p{p}",
        shapes=((q, n), (e, *[q if transposed else n] * dimension)),
        shared=(True, False),
        least_bytes=e * per_element * w,
        flops=e * sweep(n, q, dimension),
        batched=batched,
        element=integrate if transposed else interpolate,
        dtype=dtype,
    )


def bk1(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Mass operator: interpolate, scale, and transpose back."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n**3 + q**3) * w)

    def batched(einsum: Einsum) -> Function:
        spec = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
        return lambda b, d, u: einsum(spec, b, b, b, d, b, b, b, u)

    return Workload(
        name=f"bk1/p{p}",
        shapes=((q, n), (e, q, q, q), (e, n, n, n)),
        shared=(True, False, False),
        least_bytes=e * (2 * n**3 + q**3) * w,
        flops=e * (2 * sweep(n, q, 3) + q**3),
        batched=batched,
        element=lambda b, d, u: integrate(b, d * interpolate(b, u)),
        dtype=dtype,
    )


def bk1_grad(p: int, total_bytes: float, dtype: str = "float64", *, bases: bool) -> Workload:
    """Gradient of ``bk1`` with respect to u and d, and to the basis if ``bases``."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    per_element = (3 * n**3 + 2 * q**3) * w
    e = elements(total_bytes, per_element)
    forward = bk1(p, e * (2 * n**3 + q**3) * w, dtype)
    # One way for u, d's operand; one for the cotangent; one back. The reverse mode of a sequence of
    # steps: all steps but the last forward, and twice all of them back.
    flops = 6 * sweep(n, q, 3) - 2 * q * n**3 if bases else 3 * sweep(n, q, 3)
    return gradient(
        forward if bases else constant(forward),
        "grad-all" if bases else "grad",
        (e, n, n, n),
        e * per_element,
        e * (flops + 2 * q**3),
    )


def bk1_in_cache(
    p: int, total_bytes: float, dtype: str = "float64", *, times: int = 50
) -> Workload:
    """``bk1`` of its own result, many times over: what is measured is not the call."""
    once = bk1(p, total_bytes, dtype)
    # Orthonormal columns, and the inputs are below one in magnitude: nothing grows.
    table = np.linalg.qr(np.random.default_rng(0).normal(size=once.shapes[0]))[0].astype(dtype)
    once = constant(once, [table, None, None])
    assert once.batched is not None
    batched = once.batched

    def repeated(einsum: Einsum) -> Function:
        apply = batched(einsum)

        def of_jax(d: Array, u: Array) -> Array:
            # Two at a time, so that the results alternate between two buffers and none is copied.
            return jax.lax.fori_loop(0, times // 2, lambda _, v: apply(d, apply(d, v)), u)

        def of_numpy(d: Array, u: Array) -> Array:
            for _ in range(times):
                u = apply(d, u)
            return u

        return lambda d, u: (of_numpy if isinstance(u, np.ndarray) else of_jax)(d, u)

    return replace(
        renamed(once, "in-cache"),
        batched=repeated,
        element=None,
        least_bytes=times * once.least_bytes,
        flops=times * once.flops,
        in_cache=True,
    )


def diffusion(einsum: Einsum, b: Array, g: Array, u: Array, d: Any, e: str) -> Array:
    """grad^T (D grad u), with the six values of the symmetric D at each point.

    ``e`` is the label of the elements, or empty for one element.
    """
    slopes = ((g, b, b), (b, g, b), (b, b, g))
    x, y, z = (einsum(f"xa,yb,zc,{e}abc->{e}xyz", *slope, u) for slope in slopes)
    terms = [
        einsum(f"xa,yb,zc,{e}xyz->{e}abc", *slope, flux)
        for slope, flux in zip(slopes, symmetric(d, x, y, z), strict=True)
    ]
    return terms[0] + terms[1] + terms[2]


def collocated_diffusion(einsum: Einsum, g: Array, u: Array, d: Any, e: str) -> Array:
    """The same with nodes at the points: interpolation is the identity, derivatives remain."""
    x = einsum(f"xa,{e}ayz->{e}xyz", g, u)
    y = einsum(f"yb,{e}xbz->{e}xyz", g, u)
    z = einsum(f"zc,{e}xyc->{e}xyz", g, u)
    x, y, z = symmetric(d, x, y, z)
    return (
        einsum(f"xa,{e}xyz->{e}ayz", g, x)
        + einsum(f"yb,{e}xyz->{e}xbz", g, y)
        + einsum(f"zc,{e}xyz->{e}xyc", g, z)
    )


def symmetric(d: Array, x: Array, y: Array, z: Array) -> tuple[Array, Array, Array]:
    """D times a vector at every point, with the six values of the symmetric D."""
    return (
        d[0] * x + d[1] * y + d[2] * z,
        d[1] * x + d[3] * y + d[4] * z,
        d[2] * x + d[4] * y + d[5] * z,
    )


def _components(d: Array) -> list[Array]:
    """Of all elements, (e, 6, q, q, q): each of the six."""
    return [d[:, k] for k in range(6)]


def gradient_sweep(n: int, q: int) -> int:
    """Flops of the three derivatives at the points, with shared partial sums."""
    return 2 * (2 * q * n**3 + 3 * q * q * n * n + 3 * q**3 * n)


def bk3(p: int, total_bytes: float, dtype: str = "float64", *, fused: bool = True) -> Workload:
    """Diffusion operator, as one fused function or as six einsums."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n**3 + 6 * q**3) * w)
    return Workload(
        name=f"bk3{'' if fused else '-einsums'}/p{p}",
        shapes=((q, n), (q, n), (e, n, n, n), (e, 6, q, q, q)),
        shared=(True, True, False, False),
        least_bytes=e * (2 * n**3 + 6 * q**3) * w,
        flops=e * (2 * gradient_sweep(n, q) + 15 * q**3),
        batched=lambda einsum: lambda b, g, u, d: diffusion(einsum, b, g, u, _components(d), "e"),
        element=lambda b, g, u, d: diffusion(jnp.einsum, b, g, u, d, ""),
        fused=fused,
        dtype=dtype,
    )


def bk3_grad(p: int, total_bytes: float, dtype: str = "float64", *, bases: bool) -> Workload:
    """Gradient of ``bk3`` with respect to u and d, and to the bases if ``bases``."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    per_element = (3 * n**3 + 12 * q**3) * w
    e = elements(total_bytes, per_element)
    forward = bk3(p, e * (2 * n**3 + 6 * q**3) * w, dtype)
    flops = 6 * gradient_sweep(n, q) - 4 * q * n**3 if bases else 3 * gradient_sweep(n, q)
    return gradient(
        forward if bases else constant(forward),
        "grad-all" if bases else "grad",
        (e, n, n, n),
        e * per_element,
        e * (flops + 27 * q**3),
    )


def bk5(p: int, total_bytes: float, dtype: str = "float64", *, fused: bool = True) -> Workload:
    """Diffusion with collocated points."""
    n, w = p + 1, np.dtype(dtype).itemsize
    e = elements(total_bytes, 8 * n**3 * w)
    return Workload(
        name=f"bk5{'' if fused else '-einsums'}/p{p}",
        shapes=((n, n), (e, n, n, n), (e, 6, n, n, n)),
        shared=(True, False, False),
        least_bytes=8 * e * n**3 * w,
        flops=e * (12 * n**4 + 15 * n**3),
        batched=lambda einsum: (
            lambda g, u, d: collocated_diffusion(einsum, g, u, _components(d), "e")
        ),
        element=lambda g, u, d: collocated_diffusion(jnp.einsum, g, u, d, ""),
        fused=fused,
        dtype=dtype,
    )


# ---- Small matrices --------------------------------------------------------------------------


def chain(n: int, q: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """B^T (D * (B A B^T)) B: the two-dimensional mass operator, with q points per direction."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n * n + q * q) * w)
    return Workload(
        name=f"chain/n{n}" if n == q else f"chain-rectangular/{n}x{q}",
        shapes=((q, n), (e, n, n), (e, q, q)),
        shared=(True, False, False),
        least_bytes=e * (2 * n * n + q * q) * w,
        flops=e * (2 * sweep(n, q, 2) + q * q),
        batched=lambda einsum: lambda b, a, d: einsum("xi,yj,exy,xk,yl,ekl->eij", b, b, d, b, b, a),
        element=lambda b, a, d: b.T @ (d * (b @ a @ b.T)) @ b,
        dtype=dtype,
    )


def chain_grad(n: int, total_bytes: float, dtype: str = "float64", *, bases: bool) -> Workload:
    """Gradient of ``chain`` with respect to a and d, and to the basis if ``bases``."""
    w = np.dtype(dtype).itemsize
    per_element = 5 * n * n * w
    e = elements(total_bytes, per_element)
    forward = chain(n, n, e * 3 * n * n * w, dtype)
    flops = 6 * sweep(n, n, 2) - 2 * n**3 if bases else 3 * sweep(n, n, 2)
    return gradient(
        forward if bases else constant(forward),
        "grad-all" if bases else "grad",
        (e, n, n),
        e * per_element,
        e * (flops + 2 * n * n),
    )


def bgemm(
    m: int, k: int, n: int, total_bytes: float, dtype: str = "float64", transposes: str = "nn"
) -> Workload:
    """One product of an (m, k) and a (k, n) matrix per element, or of their transposes."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, (m * k + k * n + m * n) * w)
    left, right = (t == "t" for t in transposes)
    spec = f"e{'ji' if left else 'ij'},e{'kj' if right else 'jk'}->eik"
    suffix = "" if transposes == "nn" else f"-{transposes}"
    name = f"bgemm{suffix}/n{n}" if m == k == n else f"bgemm-rectangular{suffix}/{m}x{k}x{n}"
    return Workload(
        name=name,
        shapes=((e, k, m) if left else (e, m, k), (e, n, k) if right else (e, k, n)),
        shared=(False, False),
        least_bytes=e * (m * k + k * n + m * n) * w,
        flops=2 * e * m * k * n,
        batched=lambda einsum: lambda a, b: einsum(spec, a, b),
        element=lambda a, b: (a.T if left else a) @ (b.T if right else b),
        dtype=dtype,
    )


def bgemv(m: int, n: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """One matrix times one vector per element."""
    w = np.dtype(dtype).itemsize
    e = elements(total_bytes, (m * n + m + n) * w)
    return Workload(
        name=f"bgemv/{m}x{n}",
        shapes=((e, m, n), (e, n)),
        shared=(False, False),
        least_bytes=e * (m * n + m + n) * w,
        flops=2 * e * m * n,
        batched=lambda einsum: lambda a, x: einsum("eij,ej->ei", a, x),
        element=lambda a, x: a @ x,
        dtype=dtype,
    )


def gemv(m: int, n: int, dtype: str = "float64") -> Workload:
    """One large matrix times one vector."""
    return Workload(
        name=f"gemv/{m}x{n}",
        shapes=((m, n), (n,)),
        shared=(False, True),
        least_bytes=m * n * np.dtype(dtype).itemsize,
        flops=2 * m * n,
        batched=lambda einsum: lambda a, x: einsum("ij,j->i", a, x),
        dtype=dtype,
    )


# ---- What a drop-in replacement must not slow down -------------------------------------------


def plain(name: str, spec: str, sizes: dict[str, int], dtype: str = "float64") -> Workload:
    """Any einsum, counted as it is written; the first label of the output is the leading one."""
    inputs, output = spec.split("->")
    terms = inputs.split(",")

    def size(labels: str) -> int:
        return math.prod(sizes[label] for label in labels)

    # A diagonal reads only its own entries.
    traffic = sum(size("".join(dict.fromkeys(term))) for term in [*terms, output])
    leading = output[:1]
    return Workload(
        name=name,
        shapes=tuple(tuple(sizes[label] for label in term) for term in terms),
        shared=tuple(not leading or term[:1] != leading for term in terms),
        least_bytes=traffic * np.dtype(dtype).itemsize,
        flops=len(terms) * size("".join(dict.fromkeys(inputs.replace(",", "")))),
        batched=lambda einsum: lambda *args: einsum(spec, *args),
        dtype=dtype,
        # Only if no term has the label elsewhere can the first rows be computed alone.
        leading=bool(leading) and all(leading not in term[1:] for term in terms),
    )
