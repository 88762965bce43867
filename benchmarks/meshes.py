"""Operators on global vectors: what an element reads is gathered, and its results are added up.

Masses, diffusion, elasticity and solids on a box of squares or cubes, written as in the tutorial:
components last, derivatives by ``jax.grad``, ``jnp.linalg`` at a point, the geometry from the
coordinates of the nodes. There are as many points as nodes.

``python -m benchmarks.meshes`` prints how long the first call of each takes, on a million elements.

The traffic that these are compared with reads the vectors and the index of the mesh once, writes
the results of the elements, reads them and the transposed index, and writes the vector of sums.
"""

import functools
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from benchmarks.workloads import Array, Function, Workload, elements
from fem_demo.basis import lagrange


class Mesh(NamedTuple):
    """What an operator is given beside its vectors, as the tutorial does."""

    mine: jm.GatherAxis
    add: jm.ScatterAxis


class Cell(NamedTuple):
    """Lagrange polynomials on equidistant nodes of [-1, 1]^d, at Gauss points."""

    dimension: int
    values: np.ndarray  # (points, nodes), in one direction
    slopes: np.ndarray
    weights: np.ndarray  # of all points

    @staticmethod
    def of_degree(p: int, dimension: int) -> "Cell":
        points, w = np.polynomial.legendre.leggauss(p + 1)
        weights = w
        for _ in range(dimension - 1):
            weights = np.multiply.outer(weights, w)
        return Cell(dimension, *lagrange(np.linspace(-1, 1, p + 1), points), weights)

    def interpolated(self, u: Array) -> Array:
        """(n, n, n, ...) -> (q, q, q, ...)"""
        return jnp.einsum(self._spec, *[self.values] * self.dimension, u)

    def derivatives(self, u: Array) -> Array:
        """(n, n, n, ...) -> (q, q, q, ..., d)"""
        axes = range(self.dimension)
        tables = ([self.slopes if i == j else self.values for j in axes] for i in axes)
        return jnp.stack([jnp.einsum(self._spec, *t, u) for t in tables], -1)

    def integral(self, density: Function, *fields: Array) -> Array:
        """Of a function of one point."""
        for _ in range(self.dimension):
            density = jax.vmap(density)
        return jnp.sum(self.weights * density(*fields))

    @property
    def _spec(self) -> str:
        matrices = ("xa", "yb", "zc")[: self.dimension]
        points, nodes = ("".join(x) for x in zip(*matrices, strict=True))
        return f"{','.join(matrices)},{nodes}...->{points}..."


# ---- Densities at a point, of a value or of derivatives with respect to coordinates --------------


def mass(u: Array) -> Array:
    return 0.5 * u**2


def diffusion(slope: Array) -> Array:
    return 0.5 * slope @ slope


def elasticity(slope: Array) -> Array:
    strain = 0.5 * (slope + slope.T)
    return 0.7 * jnp.sum(strain**2) + 0.5 * jnp.trace(strain) ** 2


def solid(slope: Array) -> Array:
    F = jnp.eye(len(slope)) + slope
    log = jnp.log(jnp.linalg.det(F))
    return 0.5 * jnp.sum(F * F) - log + 0.5 * log**2


def of_element(cell: Cell, density: Function, slopes: bool) -> Function:
    """What an energy of such a density adds to the nodes of an element."""

    def at_point(u: Array, dx: Array) -> Array:
        return density(u @ jnp.linalg.inv(dx) if slopes else u) * jnp.linalg.det(dx)

    def energy(u: Array, x: Array) -> Array:
        at_points = cell.derivatives(u) if slopes else cell.interpolated(u)
        return cell.integral(at_point, at_points, cell.derivatives(x))

    return jax.grad(energy)


# Whether of vectors, whether of derivatives, and the operations at a point.
OPERATORS: dict[str, tuple[Function, bool, bool, int]] = {
    "mass": (mass, False, False, 20),
    "diffusion": (diffusion, False, True, 80),
    "elasticity": (elasticity, True, True, 180),
    "solid": (solid, True, True, 260),
}
SIZES = ((2, 2), (3, 1), (3, 2), (3, 3), (3, 4), (3, 6))


def every(total_bytes: float) -> Iterator[Workload]:
    for (dimension, p), name in product(SIZES, OPERATORS):
        yield operator(name, dimension, p, total_bytes)


def operator(name: str, dimension: int, p: int, total_bytes: float) -> Workload:
    """One of the operators on a box, bent a little at random."""
    density, vectors, slopes, at_point = OPERATORS[name]
    d, n, c = dimension, p + 1, dimension if vectors else 1
    element = of_element(Cell.of_degree(p, d), density, slopes)
    per_node = 8 * (d + 2 * c)  # coordinates, argument and result of a node
    per_element = n**d * (2 * 4 + 2 * 8 * c)  # both indices, and what is added up
    cells = round(elements(total_bytes, per_node * p**d + per_element) ** (1 / d))
    cells = max(cells, 1)
    side = cells * p + 1
    size = side**d
    mesh = functools.cache(lambda: box(cells, p, d))

    def given(u: Array, x: Array) -> tuple[Array, Array, Mesh]:
        lines = jnp.meshgrid(*[jnp.linspace(0, 1, side)] * d, indexing="ij")
        straight = jnp.stack(lines, -1).reshape(size, d)
        step = 0.05 / (cells * p**2)  # small against the distance of nodes
        return step * u, straight + step * x, jax.tree.map(jnp.asarray, mesh())

    def by_vmap(u: Array, x: Array, mesh: Mesh) -> Array:
        index = mesh.mine.index
        return jnp.zeros_like(u).at[index].add(jax.vmap(element)(u[index], x[index]))

    def by_fuse(u: Array, x: Array, mesh: Mesh) -> Array:
        return jm.fuse(element, mesh.mine, mesh.add)(u, x)

    # All values of a field, and then their derivatives at the points.
    sweeps = d * 2 * d + 2 * c * (2 * d if slopes else d)
    return Workload(
        name=f"{name}-of-mesh{d}d/p{p}",
        shapes=((size, c) if vectors else (size,), (size, d)),
        shared=(True, True),
        least_bytes=size * per_node + cells**d * per_element,
        flops=cells**d * (sweeps * 2 * n ** (d + 1) + at_point * n**d),
        ways=lambda: {"jm": by_fuse, "vmap": by_vmap},
        given=given,
        leading=False,
    )


def box(cells: int, p: int, dimension: int) -> Mesh:
    """Of so many elements in each direction."""
    side, n = cells * p + 1, p + 1
    dofs = np.zeros((1,) * (2 * dimension), np.int32)
    along = (np.arange(cells)[:, None] * p + np.arange(n)).astype(np.int32)
    for axis in range(dimension):
        shape = [1] * (2 * dimension)
        shape[axis], shape[dimension + axis] = cells, n
        dofs = side * dofs + along.reshape(shape)
    mine = jm.gather(dofs.reshape(cells**dimension, *[n] * dimension), side**dimension)
    return Mesh(mine, jm.scatter_add(mine, side**dimension))


def main(elements: int = 1_000_000) -> None:
    """Seconds for the tables of a mesh, and then for the first call of each operator."""
    jax.config.update("jax_enable_x64", True)
    for dimension, p in SIZES:
        cells = round(elements ** (1 / dimension))
        start = time.perf_counter()
        mesh = jax.block_until_ready(box(cells, p, dimension))
        print(f"{dimension}d/p{p}: {cells**dimension} elements, tables {_since(start)}", flush=True)
        size = (cells * p + 1) ** dimension
        u = 1e-3 / cells * jax.random.normal(jax.random.key(0), (size, dimension))
        lines = jnp.meshgrid(*[jnp.linspace(0, 1, cells * p + 1)] * dimension, indexing="ij")
        x = jax.block_until_ready(jnp.stack(lines, -1).reshape(size, dimension))
        for name, (density, vectors, slopes, _) in OPERATORS.items():
            element = of_element(Cell.of_degree(p, dimension), density, slopes)
            v = jax.block_until_ready(u if vectors else u[:, 0])
            start = time.perf_counter()
            jax.block_until_ready(_applied(element)(v, x, mesh))
            print(f"  {name} {_since(start)}", flush=True)


def _applied(element: Function) -> Function:
    return jax.jit(lambda u, x, mesh: jm.fuse(element, mesh.mine, mesh.add)(u, x))


def _since(start: float) -> str:
    return f"{time.perf_counter() - start:.2f} s"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
