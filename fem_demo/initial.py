"""From the functions of a problem to a discretisation and its initial state."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from fem_demo import operators
from fem_demo.basis import ReferenceElement, bernstein, gauss_legendre
from fem_demo.hydrodynamics import Controls, Hydrodynamics, State
from fem_demo.mesh import BoxMesh
from fem_demo.physics import Material
from fem_demo.problems import Field, Problem
from fem_demo.spaces import Numbering, number, to_nodes
from fem_demo.tensor import evaluate


ORIGIN_TOLERANCE = 1e-12


def project(mesh: BoxMesh, degree: int, function: Field) -> np.ndarray:
    """Bernstein coefficients of the interpolant at the Gauss-Legendre points, ``(e, z, y, x)``."""
    points, _ = gauss_legendre(degree + 1)
    to_bernstein = np.linalg.inv(bernstein(degree, points))  # (degree+1, degree+1)
    return evaluate([to_bernstein] * mesh.dim, function(mesh.positions(points)))


def deposit(mesh: BoxMesh, element: ReferenceElement, volumes: np.ndarray, e0: float) -> np.ndarray:
    """A point blast at the origin, ``(e, z, y, x)``.

    In every element with a corner at the origin the Bernstein coefficient of that corner is set;
    all are scaled so that the integral of e is e0 / 2^dim, one orthant's share.
    """
    corners = mesh.positions(np.array([0.0, 1.0]))  # (dim, e, 2, ..., 2)
    hit = np.sqrt(np.sum(corners**2, axis=0)) <= ORIGIN_TOLERANCE  # (e, 2, ..., 2)
    if not hit.any():
        raise ValueError(f"the blast needs a vertex at the origin; mesh {mesh.name} has none")
    n = element.energies_per_axis
    energy = np.zeros((mesh.element_count,) + (n,) * mesh.dim)
    for e, *corner in np.argwhere(hit).tolist():
        energy[(e, *(c * (n - 1) for c in corner))] = 1.0
    total = np.sum(volumes * evaluate([element.energy_values] * mesh.dim, energy))
    return energy * (e0 / 2**mesh.dim / total)


def _velocity(
    mesh: BoxMesh, element: ReferenceElement, problem: Problem, numbering: Numbering
) -> np.ndarray:
    """Interpolation at the nodes, with the walls applied: ``(dim, nodes)``."""
    values = problem.velocity_at(mesh.positions(element.nodes))
    nodal = to_nodes(np.asarray(numbering.nodes), values, numbering.node_count)
    return nodal * np.asarray(numbering.free)


def energy_mass_inverse(element: ReferenceElement, weights: np.ndarray) -> np.ndarray:
    """The inverse of every element's B^T diag(weights) B: ``(e, n, n)``, n = k^dim."""
    B = reduce(np.kron, [element.energy_values] * element.dim)  # (all points, n)
    blocks = [(B.T * w.ravel()) @ B for w in weights]
    return np.linalg.inv(np.stack(blocks))


def discretise(
    problem: Problem,
    mesh: BoxMesh,
    order: int,
    e0: float,
    controls: Controls,
    full_assembly: bool,
) -> tuple[Hydrodynamics, State]:
    """The compiled functions' data for a problem on a (refined) mesh, and the initial state."""
    element = ReferenceElement(mesh.dim, order)
    numbering = number(mesh, element)
    nodes = np.asarray(numbering.nodes)
    positions = mesh.positions(element.nodes)  # (dim, e, nodes...)
    x = to_nodes(nodes, positions, numbering.node_count)
    v = _velocity(mesh, element, problem, numbering)

    # Geometry of the initial mesh at the quadrature points.
    at_points = jax.jit(jm.fuse(partial(operators.geometry, element), in_axes=1))
    determinants, inverse = at_points(positions)
    volumes = np.asarray(determinants) * element.weights  # (e, points...), |J0| w
    length = (volumes.sum() / mesh.element_count) ** (1 / mesh.dim) / order

    degree = element.energies_per_axis - 1
    energy_tables = [element.energy_values] * mesh.dim
    density = evaluate(energy_tables, project(mesh, degree, problem.density))
    gamma = problem.gamma(mesh.positions(np.array([0.5])))  # (e, 1, ..., 1)
    material = Material(
        mass=jnp.asarray(density * volumes),
        gamma=jnp.asarray(gamma.ravel()),
        inverse_jacobian=inverse,
        length=jnp.asarray(length),
    )

    def nodal_integrals(basis: np.ndarray) -> np.ndarray:
        """The weights tested with the functions of a one-dimensional table: ``(nodes,)``."""
        integrals = evaluate([basis.T] * mesh.dim, weights)  # (e, z, y, x)
        return np.bincount(nodes.ravel(), integrals.ravel(), numbering.node_count)

    # The mass matrices take the density as the function, not its projection; both agree when
    # material interfaces follow element faces.
    weights = problem.density(mesh.positions(element.points)) * volumes  # (e, points...)
    diagonal = nodal_integrals(element.values**2)
    gravity = None
    if problem.gravity:
        g = np.zeros((mesh.dim, 1))
        g[: len(problem.gravity), 0] = problem.gravity
        gravity = jnp.asarray(g * nodal_integrals(element.values))  # M_v applied to a constant

    if problem.energy is None:
        e = deposit(mesh, element, volumes, e0)
    else:
        e = project(mesh, degree, problem.energy)
    hydro = Hydrodynamics(
        element=element,
        physics=problem.physics,
        numbering=numbering,
        material=material,
        velocity_mass=jnp.asarray(weights),
        inverse_diagonal=jnp.asarray(1 / diagonal),
        energy_inverse=(
            jnp.asarray(energy_mass_inverse(element, weights)) if full_assembly else None
        ),
        gravity_force=gravity,
        controls=controls,
    )
    return hydro, State(jnp.asarray(x), jnp.asarray(v), jnp.asarray(e))
