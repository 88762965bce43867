"""Elements of low order, as textbooks write them.

Coordinates of the nodes come in, and what is wanted of the element goes out: gradients of shape
functions are computed first and used everywhere, for one unknown or for several of different
orders. Least traffic and flops are counted as in ``programs``: tables are applied to values of the
element; an inverse of 3 x 3 and its determinant are 50 operations, and those of a material are
those of its formulas.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs import Program, in_float32, small
from benchmarks.workloads import Array, Function


def every() -> Iterator[Program]:
    """All of them, in float64 and in float32."""
    for program in _each():
        yield program
        yield in_float32(program)


def _each() -> Iterator[Program]:
    nodes, ten, eight = (4, 3), 4 * 10 * 9 * 2, 8 * 8 * 9 * 2
    yield _program("strains/tet1", strains, (nodes, nodes), 12, 50 + 4 * 72 + 50)
    yield _program("element-matrix/tet1", stiffness, (nodes,), 144, 50 + 72 + 144 * 6)
    yield _program("neo-hooke/tet1", elastic, (nodes, nodes), 12, 50 + 4 * 72 + 200)
    yield _program("neo-hooke/tet2", elastic, (nodes, (10, 3)), 30, 50 + 2 * ten + 4 * 300)
    yield _program("stokes/tet2", stokes, (nodes, (10, 3), (4,)), 34, 50 + 3 * ten + 4 * 150)
    conducting = 50 + 4 * (60 + 9 * 10 * 2 + 3 * 100 * 2)
    yield _program("element-matrix/tet2", diffusion, (nodes, (10,)), 100, conducting)
    yield _program("diffusion/wedge2", wedge, ((3, 3), (18,)), 18, 50 + 6 * (18 * 3 * 4 + 30))
    shapes = ((8, 3), (8, 3), (8, 6), (8,))
    yield _program("plasticity/hex1", plasticity, shapes, 80, 3 * eight + 8 * 250)
    yield _program("upwind/hex1", upwind, ((8, 3), (8,), ()), 8, eight + 8 * (4 * 48 + 80))
    yield _program("edges/tet1", edges, (nodes, (6,), (6,)), 6, 200 + 2 * 4 * 6 * 3 * 2 + 4 * 36)
    yield _program("collision/d3q19", collision, ((19,),), 19, 2 * 2 * 19 * 19)
    yield _program("cholesky/n6", spd_solve, ((6, 6), (6,)), 6, 2 * 216 + 72 + 144)
    yield _program("metric/hex2", metric, ((27, 3, 3),), 27 * 9, 27 * (50 + 60))
    yield _program("volume/hex2", volume, ((3, 3, 3, 3, 3),), 27, 27 * 18)
    yield _program("curved/tet2", curved, ((10, 3), (11, 3, 3)), 30, 2 * 11 * 10 * 18 + 11 * 300)
    cube = (2, 2, 2, 3)
    point = 144 + 50 + 144
    yield _program("conduction/hex1", conduction, ((8, 3),), 64, 8 * (point + 3 * 64 * 2))
    stiff = 8 * (point + 9 * 64 * 2) + 27 * 64
    yield _program("strain-matrices/hex1", by_strains, ((8, 3),), 576, stiff)
    yield _program("moduli/hex1", by_moduli, ((8, 3),), 576, stiff)
    yield _program("moduli-of-points/hex1", by_moduli_of_points, ((8, 3),), 576, stiff)
    forces = 8 * (point + 144 + 66 + 36 + 144)
    yield _program("strain-forces/hex1", forces_by_strains, ((8, 3), (8, 3)), 24, forces)
    solid = 8 * (point + 2 * 144 + 300)
    yield _program("neo-hooke/hex1", point_by_point, ((8, 3), (8, 3)), 24, solid)
    yield _program("curved/hex1", cubes, (cube, (2, 2, 2, 3, 3)), 24, 2 * eight + 8 * 300)


def _program(
    name: str, element: Function, shapes: tuple[tuple[int, ...], ...], results: int, flops: int
) -> Program:
    values = sum(map(math.prod, shapes)) + results
    return Program(name, element, shapes, values, flops, others={}, given=small)


def _table(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).uniform(-1, 1, shape)


# Shape functions and their derivatives at the points, and weights there.
TABLES = {
    "G1": _table(4, 3),
    "G2": _table(4, 10, 3),
    "G8": _table(8, 8, 3),
    "G18": _table(6, 18, 3),
    "B1": _table(4, 4),
    "B2": _table(4, 10),
    "B8": _table(8, 8),
    "W4": np.abs(_table(4)) + 0.1,
    "W6": np.abs(_table(6)) + 0.1,
    "W8": np.abs(_table(8)) + 0.1,
    "E4": _table(4, 6, 3),
    "C6": _table(6, 3),
    "M19": _table(19, 19),
    "INVERSE19": np.linalg.inv(_table(19, 19)),
    "G11": _table(11, 10, 3),
    "W11": np.abs(_table(11)) + 0.1,
    "W27": np.abs(_table(27)) + 0.1,
}


def _of(x: Array, *names: str) -> tuple[Array, ...]:
    """Tables of the dtype of an argument, each time in arrays of their own.

    Threads that share one, and trace with and without float64, get it rounded to float32 at times,
    from plain JAX, too.
    """
    return tuple(TABLES[name].astype(x.dtype) for name in names)


def _mapped(jacobian: Array) -> tuple[Array, Array]:
    """The inverse and the determinant, of small changes of a cube."""
    jacobian = jacobian + 4 * jnp.eye(3, dtype=jacobian.dtype)  # of one, or of several points
    return jnp.linalg.inv(jacobian), jnp.linalg.det(jacobian)


def strains(x: Array, u: Array) -> Array:
    """Forces of a linear elastic tetrahedron."""
    (G1,) = _of(x, "G1")
    inverse, volume = _mapped(x.T @ G1)
    g = G1 @ inverse
    h = u.T @ g
    strain = (h + h.T) / 2
    stress = 2 * strain + jnp.trace(strain) * jnp.eye(3, dtype=u.dtype)
    return volume / 6 * (g @ stress)


def stiffness(x: Array) -> Array:
    """Its matrix."""
    (G1,) = _of(x, "G1")
    inverse, volume = _mapped(x.T @ G1)
    g = G1 @ inverse
    one = jnp.eye(3, dtype=x.dtype)
    found = jnp.einsum("na,mb->namb", g, g) + jnp.einsum("nb,ma->namb", g, g)
    found = found + jnp.einsum("nc,mc,ab->namb", g, g, one)
    return volume / 6 * found.reshape(12, 12)


def _energy(f: Array) -> Array:
    """Of a neo-Hookean solid."""
    j = jnp.log(jnp.linalg.det(f))
    return (jnp.sum(f * f) - 3) / 2 - j + j**2


def elastic(x: Array, u: Array) -> Array:
    """Forces as the gradient of an energy, of four nodes or ten."""
    G1, G2, W4 = _of(x, "G1", "G2", "W4")
    inverse, volume = _mapped(x.T @ G1)
    table, weights = (G1[None], W4[:1]) if len(u) == 4 else (G2, W4)
    one = jnp.eye(3, dtype=u.dtype)

    def energy(u: Array) -> Array:
        f = 8 * one + jnp.einsum("na,qnd,de->qae", u, table, inverse)
        return volume * jnp.sum(weights * jax.vmap(_energy)(f))

    return jax.grad(energy)(u)


def stokes(x: Array, u: Array, p: Array) -> tuple[Array, Array]:
    """Taylor and Hood's element, with convection."""
    G1, G2, B1, B2, W4 = _of(x, "G1", "G2", "B1", "B2", "W4")
    inverse, volume = _mapped(x.T @ G1)
    g = jnp.einsum("qnd,de->qne", G2, inverse)
    h = jnp.einsum("qne,na->qae", g, u)
    one = jnp.eye(3, dtype=u.dtype)
    stress = h + h.swapaxes(1, 2) - jnp.einsum("q,ab->qab", B1 @ p, one)
    convected = jnp.einsum("qae,qe->qa", h, B2 @ u)
    forces = jnp.einsum("q,qae,qne->na", W4, stress, g)
    forces = forces + jnp.einsum("q,qa,qn->na", W4, convected, B2)
    return volume * forces, volume * (B1.T @ (W4 * jnp.trace(h, axis1=1, axis2=2)))


def diffusion(x: Array, k: Array) -> Array:
    """The matrix of an element whose conductivity is a field."""
    G1, G2, B2, W4 = _of(x, "G1", "G2", "B2", "W4")
    inverse, volume = _mapped(x.T @ G1)
    g = jnp.einsum("qnd,de->qne", G2, inverse)
    return jnp.einsum("q,qne,qme->nm", volume * W4 * (B2 @ k), g, g)


def wedge(jacobian: Array, u: Array) -> Array:
    """A prism of second order."""
    G18, W6 = _of(u, "G18", "W6")
    inverse, volume = _mapped(jacobian)
    h = jnp.einsum("qnd,n,de->qe", G18, u, inverse)
    return volume * jnp.einsum("q,qe,qnd,de->n", W6, h, G18, inverse)


def _gradients(x: Array) -> tuple[Array, Array]:
    """Of the shape functions of a hexahedron, and the weights of its points."""
    G8, W8 = _of(x, "G8", "W8")
    inverse, volume = _mapped(jnp.einsum("qnd,ni->qid", G8, x))
    return jnp.einsum("qnd,qde->qne", G8, inverse), W8 * volume


def plasticity(x: Array, u: Array, plastic: Array, hardening: Array) -> tuple[Array, Array, Array]:
    """Return mapping of von Mises with isotropic hardening; six components of strains."""
    g, weights = _gradients(x)
    one = jnp.eye(3, dtype=u.dtype)
    full = np.array([[0, 3, 4], [3, 1, 5], [4, 5, 2]])
    rows, columns = np.array([0, 1, 2, 0, 0, 1]), np.array([0, 1, 2, 1, 2, 2])

    def at_point(h: Array, plastic: Array, hardening: Array) -> tuple[Array, Array, Array]:
        strain, old = (h + h.T) / 2, plastic[full]
        mean = jnp.trace(strain)
        trial = 2 * (strain - mean / 3 * one - old)
        size = jnp.sqrt(jnp.sum(trial * trial))
        excess = size - math.sqrt(2 / 3) * (0.1 + 0.1 * hardening)
        flow = jnp.where(excess > 0, excess / 2.1, 0)
        direction = trial / jnp.where(size > 0, size, 1)
        stress = trial - 2 * flow * direction + mean * one
        new = old + flow * direction
        return stress, new[rows, columns], hardening + math.sqrt(2 / 3) * flow

    h = jnp.einsum("qne,na->qae", g, u)
    stress, plastic, hardening = jax.vmap(at_point)(h, plastic, hardening)
    return jnp.einsum("q,qae,qne->na", weights, stress, g), plastic, hardening


def upwind(x: Array, u: Array, step: Array) -> Array:
    """Streamline diffusion."""
    (B8,) = _of(x, "B8")
    g, weights = _gradients(x)
    along = g @ np.array([1.0, 2.0, 3.0], x.dtype)
    slope = along @ u
    size = jnp.cbrt(weights)
    delay = 1 / jnp.sqrt(4 / size**2 + 9 + step**2)
    return B8.T @ (weights * slope) + along.T @ (weights * delay * slope)


def edges(x: Array, u: Array, signs: Array) -> Array:
    """Nedelec's element of lowest order: the curl of the curl, and the mass."""
    G1, E4, C6, W4 = _of(x, "G1", "E4", "C6", "W4")
    jacobian = x.T @ G1
    inverse, volume = _mapped(jacobian)
    own = signs * u
    curl = jacobian @ (C6.T @ own) / volume
    field = jnp.einsum("qed,e,da->qa", E4, own, inverse)
    mass = jnp.einsum("q,qed,da,qa->e", W4, E4, inverse, field)
    return signs * (C6 @ (jacobian.T @ curl) + volume * mass)


def collision(f: Array) -> Array:
    """Of a lattice Boltzmann method, in moments."""
    M19, INVERSE19 = _of(f, "M19", "INVERSE19")
    m = M19 @ f
    still = jnp.concatenate([m[:4], m[1:4] ** 2 / (2 + m[0] ** 2), m[4:16] / 2])
    return f - INVERSE19 @ (0.7 * (m - still))


def spd_solve(a: Array, b: Array) -> Array:
    """Of a tensor in Voigt's notation, made positive definite."""
    lower = jnp.linalg.cholesky(a @ a.T + jnp.eye(6, dtype=a.dtype))
    return jax.scipy.linalg.cho_solve((lower, True), b)


def metric(jacobian: Array) -> Array:
    """What diffusion needs of a hexahedron at its points."""
    (W27,) = _of(jacobian, "W27")

    def at_point(jacobian: Array, weight: Array) -> Array:
        inverse, volume = _mapped(jacobian)
        return weight * volume * inverse @ inverse.T

    return jax.vmap(at_point)(jacobian, W27)


def volume(jacobian: Array) -> Array:
    """The determinants at points along three axes."""
    mapped = jnp.linalg.det
    for _ in range(3):
        mapped = jax.vmap(mapped)
    return mapped(jacobian)


def curved(u: Array, inverse: Array) -> Array:
    """Forces of an element whose inverse Jacobians at its points are known: ten nodes, or eight."""
    G8, G11, W8, W11 = _of(u, "G8", "G11", "W8", "W11")
    table, weights = (G8, W8) if len(u) == 8 else (G11, W11)
    one = jnp.eye(3, dtype=u.dtype)

    def energy(u: Array) -> Array:
        f = 8 * one + jnp.einsum("na,qnd,qde->qae", u, table, inverse)
        return jnp.sum(weights * jax.vmap(_energy)(f))

    return jax.grad(energy)(u)


def cubes(u: Array, inverse: Array) -> Array:
    """The same of a hexahedron whose nodes and points are in cubes."""
    return curved(u.reshape(8, 3), inverse.reshape(8, 3, 3)).reshape(u.shape)


# ---- Loops over points, as they are written in Python --------------------------------------------


def _at_points(x: Array) -> Iterator[tuple[Array, Array]]:
    """Gradients of the shape functions of a hexahedron, and the weight, point by point."""
    G8, W8 = _of(x, "G8", "W8")
    for slopes, weight in zip(G8, W8, strict=True):
        inverse, volume = _mapped(x.T @ slopes)
        yield slopes @ inverse, weight * volume


def conduction(x: Array) -> Array:
    matrix = jnp.zeros((8, 8), x.dtype)
    for g, weight in _at_points(x):
        matrix += weight * g @ g.T
    return matrix


def _strains_of(g: Array) -> Array:
    """Six strains by the displacements of eight nodes."""
    matrix = jnp.zeros((6, 24), g.dtype)
    for row, (axis, component) in enumerate(((0, 0), (1, 1), (2, 2))):
        matrix = matrix.at[row, component::3].set(g[:, axis])
    for row, (one, other) in enumerate(((0, 1), (1, 2), (0, 2)), start=3):
        matrix = matrix.at[row, one::3].set(g[:, other]).at[row, other::3].set(g[:, one])
    return matrix


def _moduli(x: Array) -> Array:
    moduli = np.diag([1.0, 1.0, 1.0, 0.5, 0.5, 0.5])
    moduli[:3, :3] += 0.7
    return moduli.astype(x.dtype)


def by_strains(x: Array) -> Array:
    matrix = jnp.zeros((24, 24), x.dtype)
    for g, weight in _at_points(x):
        strains = _strains_of(g)
        matrix += strains.T @ _moduli(x) @ strains * weight
    return matrix


def _fourth_order(x: Array) -> Array:
    """Moduli of an isotropic solid, as a tensor."""
    one = np.eye(3)
    pairs = np.einsum("ik,jl->ijkl", one, one) + np.einsum("il,jk->ijkl", one, one)
    return (0.7 * np.einsum("ij,kl->ijkl", one, one) + 0.5 * pairs).astype(x.dtype)


def by_moduli(x: Array) -> Array:
    """The same matrix by one einsum."""
    G8, W8 = _of(x, "G8", "W8")
    inverse, volume = _mapped(jnp.einsum("nc,qnd->qcd", x, G8))
    g = jnp.einsum("qnd,qdc->qnc", G8, inverse)
    found = jnp.einsum("qaj,ijkl,qbl,q->aibk", g, _fourth_order(x), g, W8 * volume)
    return found.reshape(24, 24)


def by_moduli_of_points(x: Array) -> Array:
    """The same, of a function of a point."""

    def point(slopes: Array, weight: Array) -> Array:
        inverse, volume = _mapped(x.T @ slopes)
        g = slopes @ inverse
        return jnp.einsum("aj,ijkl,bl->aibk", g, _fourth_order(x), g) * weight * volume

    return jax.vmap(point)(*_of(x, "G8", "W8")).sum(0).reshape(24, 24)


def forces_by_strains(x: Array, u: Array) -> Array:
    forces = jnp.zeros(24, x.dtype)
    for g, weight in _at_points(x):
        strains = _strains_of(g)
        forces += strains.T @ (_moduli(x) @ (strains @ u.reshape(24))) * weight
    return forces


def point_by_point(x: Array, u: Array) -> Array:
    """Forces as the gradient of an energy."""

    def energy(u: Array) -> Array:
        total = jnp.zeros((), u.dtype)
        for g, weight in _at_points(x):
            total += weight * _energy(jnp.eye(3, dtype=u.dtype) + u.T @ g)
        return total

    return jax.grad(energy)(u)
