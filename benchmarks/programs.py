"""Programs of an element as array code says them, and the same mathematics in other spellings.

Nothing here is written for a compiler: derivatives come from ``jax.grad``, fields and derivatives
are axes of arrays, and what is done at a point is done to all of them at once. A program has one
or more such spellings, which compute the same of the same numbers; how far their times are apart
says how much it matters how a program is written.

As elsewhere least traffic reads each argument once and writes the result once, and operations are
those of the best known factorisation. Beside its sums of products every function of a point
counts: an addition, multiplication, division or root as one operation, exp and log as ten.

Layouts: nodes (n, n, n) and points (q, q, q) of a hexahedron come first, then components ``v``,
then derivatives ``d``. J[..., d, f] is the derivative of reference coordinate d in direction f.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Array, Function, Workload, elements, gradient_sweep, sweep
from fem_demo.basis import lagrange


Arguments = tuple[Array, ...]


@dataclass(frozen=True)
class Spelling:
    """One way to write a program.

    Attributes:
      element: the function of one element.
      arranged: makes its arguments of those of the plain array code.
      restored: makes the result of the plain array code of its own.
    """

    element: Function
    arranged: Callable[..., Arguments] = lambda *args: args
    restored: Callable[[Array], Array] = lambda result: result


@dataclass(frozen=True)
class Program:
    """What is computed of one element, in the spellings that there are.

    Attributes:
      name: family and size, as in ``elasticity/p2``.
      plain: the array code that most people would write.
      shapes: of its arguments.
      values: of its arguments and of its result.
      flops: of one element.
      others: the other spellings, by name.
      given: makes its arguments of random numbers in (-1, 1).
    """

    name: str
    plain: Function
    shapes: tuple[tuple[int, ...], ...]
    values: int
    flops: int
    others: dict[str, Spelling]
    given: Callable[..., Arguments] = lambda *numbers: numbers
    dtype: str = "float64"

    @property
    def spellings(self) -> dict[str, Spelling]:
        """By the family of the workload that each one is: ``solid``, ``solid:by-hand``."""
        family = self.name.split("/")[0]
        return {family: Spelling(self.plain)} | {f"{family}:{k}": x for k, x in self.others.items()}

    def workloads(self, total_bytes: float) -> Iterator[Workload]:
        """A workload for each spelling, of the same numbers in the order that it wants them in."""
        per_element = self.values * np.dtype(self.dtype).itemsize
        e = elements(total_bytes, per_element)
        plain = Workload(
            name=self.name,
            shapes=tuple((e, *shape) for shape in self.shapes),
            shared=(False,) * len(self.shapes),
            least_bytes=e * per_element,
            flops=e * self.flops,
            fused=True,
            dtype=self.dtype,
            leading=False,
        )
        size = self.name.split("/")[1]
        for family, spelling in self.spellings.items():
            yield replace(
                plain,
                name=f"{family}/{size}",
                element=spelling.element,
                given=jax.vmap(self._given(spelling)),
            )

    def _given(self, spelling: Spelling) -> Callable[..., Arguments]:
        return lambda *numbers: spelling.arranged(*self.given(*numbers))


def small(*numbers: Array) -> Arguments:
    """No element is turned inside out."""
    return tuple(0.2 * x for x in numbers)


def in_float32(program: Program) -> Program:
    """The same of arrays and tables of float32."""

    def single(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_single(*arguments: Array) -> Any:
            with jax.enable_x64(False):
                return function(*arguments)

        return of_single

    family, size = program.name.split("/")
    return replace(
        program,
        name=f"{family}-f32/{size}",
        plain=single(program.plain),
        others={k: replace(x, element=single(x.element)) for k, x in program.others.items()},
        given=single(program.given),
        dtype="float32",
    )


def every() -> Iterator[Program]:
    """All programs at all sizes, those of a family next to each other."""
    for family, sizes in FAMILIES.items():
        for size in sizes:
            yield family(size)


# ---- Three by three --------------------------------------------------------------------------


def transposed(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def trace(a: Array) -> Array:
    return jnp.trace(a, axis1=-2, axis2=-1)


def cofactors(f: Array) -> Array:
    """The determinant times the transposed inverse."""
    others = ((1, 2), (2, 0), (0, 1))
    return jnp.stack([jnp.cross(f[..., i, :], f[..., j, :]) for i, j in others], -2)


def determinant(f: Array, cofactor: Array) -> Array:
    return jnp.sum(f[..., 0, :] * cofactor[..., 0, :], -1)


# ---- Hexahedra -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hexahedron:
    """Lagrange polynomials on equidistant nodes of [-1, 1]^3, at Gauss points."""

    values: np.ndarray  # (q, n), in one direction
    slopes: np.ndarray  # (q, n), in one direction
    weights: np.ndarray  # (q, q, q)

    @staticmethod
    def of_degree(p: int, q: int) -> "Hexahedron":
        points, w = np.polynomial.legendre.leggauss(q)
        values, slopes = lagrange(np.linspace(-1, 1, p + 1), points)
        return Hexahedron(values, slopes, np.einsum("x,y,z->xyz", w, w, w))

    @property
    def tables(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """Of each derivative: what is applied along each axis."""
        b, g = self.values, self.slopes
        return (g, b, b), (b, g, b), (b, b, g)

    def gradient(self, u: Array) -> Array:
        """Of scalars or vectors (n, n, n, ...) the derivatives at the points (q, q, q, ..., d)."""
        return jnp.stack(
            [jnp.einsum("xa,yb,zc,abc...->xyz...", *table, u) for table in self.tables], -1
        )

    def divergence(self, flux: Array) -> Array:
        """Its transpose: of (q, q, q, v, d) what every node gets, (n, n, n, v)."""
        return sum(
            jnp.einsum("xa,yb,zc,xyzv->abcv", *table, flux[..., d])
            for d, table in enumerate(self.tables)
        )


def elasticity(p: int) -> Program:
    """Isotropic linear elasticity, J at the points given: the residual of a displacement.

    Also as the gradient of an energy, as a function of a point that is vmapped three times, and
    with lists of components, each an array (n, n, n) or (q, q, q) of its own.
    """
    n, q = p + 1, p + 2
    cell = Hexahedron.of_degree(p, q)
    w = cell.weights

    def residual(u: Array, J: Array) -> Array:  # (n, n, n, v), (q, q, q, d, f)
        g = cell.gradient(u) @ J
        stress = 0.7 * (g + transposed(g)) + trace(g)[..., None, None] * jnp.eye(3)
        return cell.divergence(w[..., None, None] * stress @ transposed(J))

    def energy(u: Array, J: Array) -> Array:
        g = jnp.einsum("...vd,...df->...vf", cell.gradient(u), J)
        strain = 0.5 * (g + transposed(g))
        return jnp.sum(w * (0.7 * jnp.sum(strain**2, (-1, -2)) + 0.5 * trace(strain) ** 2))

    def of_points(u: Array, J: Array) -> Array:
        def at_point(g: Array, J: Array, w: Array) -> Array:
            g = g @ J
            return w * (0.7 * (g + g.T) + jnp.trace(g) * jnp.eye(3)) @ J.T

        return cell.divergence(jax.vmap(jax.vmap(jax.vmap(at_point)))(cell.gradient(u), J, w))

    def of_components(u: Array, J: Array) -> Array:  # (v, n, n, n), (d, f, q, q, q)
        axes = range(3)
        slopes = [[jnp.einsum("xa,yb,zc,abc->xyz", *t, u[v]) for t in cell.tables] for v in axes]
        g = [[sum(slopes[v][d] * J[d, f] for d in axes) for f in axes] for v in axes]
        dilation = g[0][0] + g[1][1] + g[2][2]
        stress = [
            [w * (0.7 * (g[v][f] + g[f][v]) + (dilation if v == f else 0)) for f in axes]
            for v in axes
        ]
        flux = [[sum(stress[v][f] * J[d, f] for f in axes) for d in axes] for v in axes]
        return jnp.stack(
            [
                sum(
                    jnp.einsum("xa,yb,zc,xyz->abc", *table, flux[v][d])
                    for d, table in enumerate(cell.tables)
                )
                for v in axes
            ]
        )

    def components_first(u: Array, J: Array) -> Arguments:
        return jnp.moveaxis(u, -1, 0), jnp.moveaxis(J, (-2, -1), (0, 1))

    return Program(
        f"elasticity/p{p}",
        residual,
        shapes=((n, n, n, 3), (q, q, q, 3, 3)),
        values=6 * n**3 + 9 * q**3,
        flops=6 * gradient_sweep(n, q) + 120 * q**3,
        others={
            "energy": Spelling(jax.grad(energy)),
            "pointwise": Spelling(of_points),
            "components": Spelling(
                of_components, components_first, lambda result: jnp.moveaxis(result, 0, -1)
            ),
        },
        given=lambda u, J: (0.1 * u, J),
    )


def solid(p: int) -> Program:
    """A Neo-Hookean solid, J at the points given: the gradient of the energy of an element.

    Also with ``jnp.linalg.det`` in a function of a point, and with the stress derived by hand.
    """
    n, q = p + 1, p + 2
    cell = Hexahedron.of_degree(p, q)
    w = cell.weights

    def deformation(u: Array, J: Array) -> Array:
        return 0.05 * cell.gradient(u) @ J + jnp.eye(3)  # (q, q, q, v, f)

    def energy(u: Array, J: Array) -> Array:  # (n, n, n, v), (q, q, q, d, f)
        F = deformation(u, J)
        minors = jnp.cross(F[..., 1, :], F[..., 2, :])
        log = jnp.log(jnp.einsum("...i,...i->...", F[..., 0, :], minors))
        return jnp.sum(w * (0.5 * jnp.sum(F * F, (-1, -2)) - log + 0.5 * log**2))

    def energy_by_linalg(u: Array, J: Array) -> Array:
        def density(F: Array) -> Array:
            log = jnp.log(jnp.linalg.det(F))
            return 0.5 * jnp.sum(F * F) - log + 0.5 * jnp.log(jnp.linalg.det(F)) ** 2

        F = jnp.eye(3) + 0.05 * jnp.einsum("xyzvd,xyzdf->xyzvf", cell.gradient(u), J)
        return jnp.sum(w * jax.vmap(jax.vmap(jax.vmap(density)))(F))

    def by_hand(u: Array, J: Array) -> Array:
        F = deformation(u, J)
        cofactor = cofactors(F)
        det = determinant(F, cofactor)
        stress = F + ((jnp.log(det) - 1) / det)[..., None, None] * cofactor  # first Piola-Kirchhoff
        return cell.divergence(0.05 * w[..., None, None] * stress @ transposed(J))

    return Program(
        f"solid/p{p}",
        jax.grad(energy),
        shapes=((n, n, n, 3), (q, q, q, 3, 3)),
        values=6 * n**3 + 9 * q**3,
        flops=6 * gradient_sweep(n, q) + 200 * q**3,
        others={"linalg": Spelling(jax.grad(energy_by_linalg)), "by-hand": Spelling(by_hand)},
        given=lambda u, J: (0.1 / p**2 * u, J),
    )


def solid_tangent(p: int) -> Program:
    """The stiffness of ``solid`` times a direction v: forward over reverse."""
    n, q = p + 1, p + 2
    residual = solid(p).plain

    def tangent(u: Array, v: Array, J: Array) -> Array:
        return jax.jvp(lambda u: residual(u, J), (u,), (v,))[1]

    return Program(
        f"solid-tangent/p{p}",
        tangent,
        shapes=((n, n, n, 3), (n, n, n, 3), (q, q, q, 3, 3)),
        values=9 * n**3 + 9 * q**3,
        flops=9 * gradient_sweep(n, q) + 500 * q**3,
        others={},
        given=lambda u, v, J: (0.1 / p**2 * u, v, J),
    )


def diffusion_of_geometry(p: int) -> Program:
    """Diffusion whose metric comes from the coordinates of the nodes: the gradient of an energy.

    Also with ``jnp.linalg.inv`` and ``det``. As many points as nodes.
    """
    n = q = p + 1
    cell = Hexahedron.of_degree(p, q)
    w = cell.weights
    nodes = np.stack(np.meshgrid(*[np.linspace(-1, 1, n)] * 3, indexing="ij"), -1)  # (n, n, n, 3)

    def energy(u: Array, x: Array) -> Array:  # (n, n, n), (n, n, n, v)
        F = cell.gradient(x)
        cofactor = cofactors(F)
        det = determinant(F, cofactor)
        g = jnp.einsum("...i,...ji->...j", cell.gradient(u), cofactor) / det[..., None]
        return 0.5 * jnp.sum(w * det * jnp.sum(g * g, -1))

    def energy_by_linalg(u: Array, x: Array) -> Array:
        F = cell.gradient(x)
        g = jnp.einsum("...i,...ij->...j", cell.gradient(u), jnp.linalg.inv(F))
        return 0.5 * jnp.sum(w * jnp.linalg.det(F) * jnp.sum(g * g, -1))

    return Program(
        f"diffusion-of-geometry/p{p}",
        jax.grad(energy),
        shapes=((n, n, n), (n, n, n, 3)),
        values=5 * n**3,
        flops=5 * gradient_sweep(n, q) + 80 * q**3,
        others={"linalg": Spelling(jax.grad(energy_by_linalg))},
        given=lambda u, x: (u, nodes + 0.05 / p**2 * x),
    )


def convection(p: int) -> Program:
    """The convective term (u . grad) u of the Navier-Stokes equations, over-integrated."""
    n, q = p + 1, (3 * (p + 1) + 1) // 2
    cell = Hexahedron.of_degree(p, q)
    b = cell.values

    def term(u: Array, J: Array) -> Array:  # (n, n, n, v), (q, q, q, d, f)
        values = jnp.einsum("xa,yb,zc,abcv->xyzv", b, b, b, u)
        rate = jnp.einsum("xyzvd,xyzdf,xyzf->xyzv", cell.gradient(u), J, values)
        return jnp.einsum("xa,yb,zc,xyz,xyzv->abcv", b, b, b, cell.weights, rate)

    return Program(
        f"convection/p{p}",
        term,
        shapes=((n, n, n, 3), (q, q, q, 3, 3)),
        values=6 * n**3 + 9 * q**3,
        flops=3 * gradient_sweep(n, q) + 6 * sweep(n, q, 3) + 45 * q**3,
        others={},
    )


def euler(p: int) -> Program:
    """The volume term of a discontinuous Galerkin method for the compressible Euler equations.

    Points are nodes; density, momentum and energy come last.
    """
    n = p + 1
    g = Hexahedron.of_degree(p, n).slopes
    at_rest = np.array([2.0, 0.0, 0.0, 0.0, 5.0])

    def volume(state: Array, metric: Array) -> Array:  # (n, n, n, 5), (n, n, n, d, f)
        density, momentum, energy = state[..., 0], state[..., 1:4], state[..., 4]
        velocity = momentum / density[..., None]
        pressure = 0.4 * (energy - 0.5 * jnp.sum(momentum * velocity, -1))
        of_momentum = momentum[..., :, None] * velocity[..., None, :]
        of_momentum = of_momentum + pressure[..., None, None] * jnp.eye(3)
        of_energy = (energy + pressure)[..., None] * velocity
        flux = jnp.concatenate(
            [momentum[..., None, :], of_momentum, of_energy[..., None, :]], -2
        )  # (n, n, n, 5, f)
        flux = flux @ transposed(metric)  # (n, n, n, 5, d)
        along = ("xa,xbcv->abcv", "yb,aycv->abcv", "zc,abzv->abcv")
        return sum(jnp.einsum(spec, g, flux[..., d]) for d, spec in enumerate(along))

    return Program(
        f"euler/p{p}",
        volume,
        shapes=((n, n, n, 5), (n, n, n, 3, 3)),
        values=19 * n**3,
        flops=30 * n**4 + 120 * n**3,
        others={},
        given=lambda state, metric: (at_rest + 0.1 * state, metric),
    )


# ---- Tetrahedra ------------------------------------------------------------------------------


def nodes_of_tetrahedron(p: int) -> int:
    return (p + 1) * (p + 2) * (p + 3) // 6


def dense_tables(points: int, nodes: int) -> np.ndarray:
    """What stands for the derivatives of a basis at the points: (d, points, nodes)."""
    return np.random.default_rng(0).uniform(-1, 1, (3, points, nodes))


def tetrahedra(p: int) -> Program:
    """Diffusion with dense tables, one J of an element and a coefficient at every point.

    Also with the metric J J^T first, all of it in one einsum.
    """
    nodes, points = nodes_of_tetrahedron(p), {1: 4, 2: 11, 3: 24, 4: 46, 5: 74}[p]
    D = dense_tables(points, nodes)

    def diffusion(u: Array, J: Array, c: Array) -> Array:  # (nodes,), (d, f), (points,)
        g = jnp.einsum("dqi,i->qd", D, u) @ J * c[:, None]
        return jnp.einsum("dqi,qd->i", D, g @ J.T)

    def metric_first(u: Array, J: Array, c: Array) -> Array:
        slopes = jnp.einsum("fqi,i->qf", D, u)
        return jnp.einsum("dqi,df,q,qf->i", D, J @ J.T, c, slopes)

    return Program(
        f"tetrahedra/p{p}",
        diffusion,
        shapes=((nodes,), (3, 3), (points,)),
        values=2 * nodes + 9 + points,
        flops=12 * points * nodes + 18 * points + 45,
        others={"metric-first": Spelling(metric_first)},
    )


def tetrahedra_vector(p: int) -> Program:
    """Linear elasticity with dense tables: the gradient of an energy, three components last."""
    nodes, points = nodes_of_tetrahedron(p), {1: 4, 2: 11, 3: 24, 4: 46}[p]
    D = dense_tables(points, nodes)
    w = np.random.default_rng(1).uniform(0.5, 1, points)

    def energy(u: Array, J: Array) -> Array:  # (nodes, v), (d, f)
        g = jnp.einsum("dqi,iv->qvd", D, u) @ J
        strain = 0.5 * (g + transposed(g))
        shear = jnp.einsum("q,qij,qij->", w, strain, strain)
        return shear + 0.5 * jnp.sum(w * trace(strain) ** 2)

    return Program(
        f"tetrahedra-vector/p{p}",
        jax.grad(energy),
        shapes=((nodes, 3), (3, 3)),
        values=6 * nodes + 9,
        flops=36 * points * nodes + 110 * points,
        others={},
    )


def stiffness(p: int) -> Program:
    """The matrix of diffusion of an element, with dense tables.

    Also as the Hessian of an energy.
    """
    nodes, points = nodes_of_tetrahedron(p), {1: 1, 2: 4, 3: 11}[p]
    D = dense_tables(points, nodes)

    def matrix(J: Array, c: Array) -> Array:  # (d, f), (points,)
        return jnp.einsum("dqi,df,q,gf,gqj->ij", D, J, c, J, D)

    def hessian(J: Array, c: Array) -> Array:
        def energy(u: Array) -> Array:
            return 0.5 * jnp.einsum("q,qf->", c, (jnp.einsum("dqi,i->qd", D, u) @ J) ** 2)

        return jax.hessian(energy)(jnp.zeros(nodes))

    # Either the six entries of J J^T times tables that are known, or products with J first.
    of_metric = 12 * nodes**2 + 45
    of_points = 6 * points * nodes**2 + 30 * points * nodes
    return Program(
        f"stiffness/p{p}",
        matrix,
        shapes=((3, 3), (points,)),
        values=nodes**2 + 9 + points,
        flops=min(of_metric, of_points),
        others={"hessian": Spelling(hessian)},
    )


# ---- Channels --------------------------------------------------------------------------------


def tensor_product(channels: int) -> Program:
    """A tensor product of irreducible representations up to degree 2 in each channel, float32.

    One coupling of eight is not zero.
    """
    rng = np.random.default_rng(0)
    couplings = rng.uniform(-1, 1, (9, 9, 9)) * (rng.uniform(size=(9, 9, 9)) < 0.12)
    couplings = couplings.astype("float32")

    def channelwise(x: Array, y: Array) -> Array:  # (channels, 9), (channels, 9)
        return jnp.einsum("ijk,ui,uj->uk", couplings, x, y, precision="highest")

    return Program(
        f"tensor-product/c{channels}",
        channelwise,
        shapes=((channels, 9), (channels, 9)),
        values=27 * channels,
        flops=3 * channels * int(np.count_nonzero(couplings)),
        others={},
        dtype="float32",
    )


FAMILIES: dict[Callable[[int], Program], tuple[int, ...]] = {
    elasticity: (1, 2, 3, 4, 6),
    solid: (1, 2, 3, 4, 6),
    solid_tangent: (1, 2, 3),
    diffusion_of_geometry: (1, 2, 3, 4, 6),
    convection: (2, 3, 5, 7),
    euler: (2, 3, 5, 7),
    tetrahedra: (1, 2, 3, 4, 5),
    tetrahedra_vector: (1, 2, 3, 4),
    stiffness: (1, 2, 3),
    tensor_product: (32, 128),
}
