"""Functions of one element, repeated by ``jax.vmap`` or by ``jm.fuse``: what each one computes.

Least traffic and flops are counted as in ``workloads``; the bases are constants.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from benchmarks.workloads import Array, Workload, elements
from fem_demo import operators
from fem_demo.basis import ReferenceElement
from fem_demo.physics import Material, respond


Repeat = Callable[..., Callable[..., Any]]  # jax.vmap or jm.fuse


def tables(p: int, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values and slopes of the basis, (q, n)."""
    rng = np.random.default_rng(seed)
    b, g = rng.uniform(-1, 1, (2, p + 2, p + 1)).astype(dtype)
    return b, g


def diffusion(b: np.ndarray, g: np.ndarray, u: Array, d: Array) -> Array:
    """sum_k G_k^T (D G u)_k: u (n, n, n), and the six components of D, (6, q, q, q)."""
    slopes = ((g, b, b), (b, g, b), (b, b, g))
    x, y, z = (jnp.einsum("xa,yb,zc,abc->xyz", *slope, u) for slope in slopes)
    flux = (
        d[0] * x + d[1] * y + d[2] * z,
        d[1] * x + d[3] * y + d[4] * z,
        d[2] * x + d[4] * y + d[5] * z,
    )
    terms = [jnp.einsum("xa,yb,zc,xyz->abc", *s, f) for s, f in zip(slopes, flux, strict=True)]
    return terms[0] + terms[1] + terms[2]


def _flops(p: int) -> int:
    n, q = p + 1, p + 2
    return 2 * 2 * (2 * q * n**3 + 3 * q * q * n * n + 3 * q**3 * n) + 15 * q**3


def bk3(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """The diffusion operator."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (2 * n**3 + 6 * q**3) * w)
    return Workload(
        name=f"fuse-bk3/p{p}",
        make=lambda repeat: repeat(partial(diffusion, *tables(p, dtype))),
        shapes=((e, n, n, n), (e, 6, q, q, q)),
        shared=(False, False),
        least_bytes=e * (2 * n**3 + 6 * q**3) * w,
        flops=e * _flops(p),
        dtype=dtype,
        leading=False,
        fused=True,
    )


def bk3_grad(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Its gradients with respect to u and D, given the cotangent of the result."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    e = elements(total_bytes, (3 * n**3 + 12 * q**3) * w)

    def make(repeat: Repeat) -> Callable[..., Any]:
        fn = repeat(partial(diffusion, *tables(p, dtype)))
        return lambda u, d, cotangent: jax.vjp(fn, u, d)[1](cotangent)

    return Workload(
        name=f"fuse-bk3-grad/p{p}",
        make=make,
        shapes=((e, n, n, n), (e, 6, q, q, q), (e, n, n, n)),
        shared=(False, False, False),
        least_bytes=e * (3 * n**3 + 12 * q**3) * w,
        flops=2 * e * _flops(p),
        dtype=dtype,
        leading=False,
        fused=True,
    )


def global_diffusion(p: int, total_bytes: float, dtype: str = "float64") -> Workload:
    """Diffusion of a global vector on a box of elements: gather, bk3, scatter."""
    n, q, w = p + 1, p + 2, np.dtype(dtype).itemsize
    cells = max(1, round(elements(total_bytes, (2 * p**3 + 6 * q**3) * w + 4 * n**3) ** (1 / 3)))
    nodes = cells * p + 1
    along = np.arange(cells)[:, None] * p + np.arange(n)  # (cells, n)
    x, y, z = np.meshgrid(*[np.arange(cells)] * 3, indexing="ij")
    places = [along[c.ravel()] for c in (x, y, z)]
    dofs = (places[0][:, :, None, None] * nodes + places[1][:, None, :, None]) * nodes
    dofs = (dofs + places[2][:, None, None, :]).astype(np.int32)
    size, e = nodes**3, cells**3

    def make(repeat: Repeat) -> Callable[..., Any]:
        element = partial(diffusion, *tables(p, dtype))
        if repeat is jm.fuse:
            return jm.fuse(element, (jm.gather(dofs), 0), jm.scatter_add(dofs, size))
        index = jnp.asarray(dofs)
        return lambda v, d: jnp.zeros_like(v).at[index].add(repeat(element)(v[index], d))

    return Workload(
        name=f"fuse-diffusion/p{p}",
        make=make,
        shapes=((size,), (e, 6, q, q, q)),
        shared=(True, False),
        # The vector is read and written once; the indices are traffic that cannot be avoided.
        least_bytes=2 * size * w + e * (6 * q**3 * w + 4 * n**3),
        flops=e * _flops(p),
        dtype=dtype,
        leading=False,
        fused=True,
    )


def corner_force(order: int, total_bytes: float) -> Workload:
    """Hydrodynamics: from position, velocity and energy of an element to the force on its nodes."""
    element = ReferenceElement(3, order)
    n, q = order + 1, 2 * order
    per_element = 8 * (9 * n**3 + order**3 + 10 * q**3)
    e = elements(total_bytes, per_element)
    identity = np.eye(3).reshape(3, 3, 1, 1, 1)
    nodes = np.stack(np.meshgrid(*[np.linspace(0, 1, n)] * 3, indexing="ij")[::-1])

    def force(x: Array, v: Array, energy: Array, mass: Array, inverse: Array) -> Array:
        response = respond(
            Material(mass, jnp.asarray(1.4), identity + 0.01 * inverse, jnp.asarray(0.1)),
            order,
            operators.gradient(element, nodes + 0.01 * x),
            operators.evaluate(operators.energy_tables(element), energy[None])[0],
            operators.gradient(element, v),
        )
        return operators.force(element, response.stress)

    return Workload(
        name=f"corner-force/k{order}",
        make=lambda repeat: repeat(force),
        shapes=(
            (e, 3, n, n, n),
            (e, 3, n, n, n),
            (e, order, order, order),
            (e, q, q, q),
            (e, 3, 3, q, q, q),
        ),
        shared=(False,) * 5,
        least_bytes=e * per_element,
        # Three components of three contractions each: two gradients, one force; and the points.
        flops=e * (27 * 2 * (q * n**3 + q * q * n * n + q**3 * n) + 600 * q**3),
        leading=False,
        fused=True,
    )
