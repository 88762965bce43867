"""The semi-discrete equations: from a state (x, v, e) to (dx/dt, dv/dt, de/dt).

    M_v dv/dt = -F 1 (+ gravity)        one constrained solve per component
    M_e de/dt = F^T v (+ heat source)   one solve over all elements
        dx/dt = v

F integrates the stress against velocity gradients.  Both mass matrices are constant in time, since
every quadrature point carries its mass with it.

All operators are applied without being assembled.  The solves come in two kinds: with *partial*
assembly every component of the velocity has its own conjugate gradients and M_e is solved by them
too; with *full* assembly the components are one system and M_e, which is block diagonal, has an
exact inverse in every element.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxmagma as jm
from fem_demo import operators
from fem_demo.basis import ReferenceElement
from fem_demo.cg import Operator, Solution, conjugate_gradients
from fem_demo.physics import Material, respond
from fem_demo.problems import Physics
from fem_demo.spaces import Numbering


class State(NamedTuple):
    x: jax.Array  # (dim, nodes), position
    v: jax.Array  # (dim, nodes), velocity
    e: jax.Array  # (e, z, y, x), Bernstein coefficients of the specific internal energy


class PointData(NamedTuple):
    """Everything the forces need from the quadrature points, at one state."""

    stress: jax.Array  # (e, g, c, points...)
    heat: jax.Array | None  # (e, points...), the heat source times w |J|
    time_step: jax.Array  # (), the largest stable one


class Controls(NamedTuple):
    """Numbers that may change without compiling anew."""

    cfl: jax.Array
    cg_tolerance: jax.Array
    cg_max_iterations: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hydrodynamics:
    """One discretised problem; an argument of the compiled functions, not a constant in them."""

    element: ReferenceElement = field(metadata={"static": True})
    physics: Physics = field(metadata={"static": True})
    numbering: Numbering
    material: Material
    velocity_mass: jax.Array  # (e, points...), rho0(X) |J0| w with the density as a function
    inverse_diagonal: jax.Array  # (nodes,), of the full velocity mass matrix
    energy_inverse: jax.Array | None  # (e, n, n), M_e^-1 with n = k^dim; with full assembly only
    gravity_force: jax.Array | None  # (dim, nodes), M_v times the acceleration
    controls: Controls

    @property
    def dim(self) -> int:
        return self.element.dim


def _fused(hydro: Hydrodynamics, operator: Callable[..., Any], arguments: str, results: Any) -> Any:
    """An operator of one element, as one of all of them.

    ``arguments`` has a letter for each array: ``v`` is a global vector field, ``(dim, nodes)``,
    which an element reads its part of; ``e`` has the axis of the elements first.  ``results`` is
    such a letter, or a tuple of them; to a global field an element adds its part.
    """
    in_axis = {"v": hydro.numbering.gather, "e": 0}
    out_axis = {"v": hydro.numbering.scatter, "e": 0}
    in_axes = tuple(in_axis[kind] for kind in arguments)
    apply = jm.fuse(operator, in_axes, jax.tree.map(out_axis.get, results))

    def of_all(*fields: Any) -> Any:
        flat = [x.ravel() if k == "v" else x for k, x in zip(arguments, fields, strict=True)]
        made = apply(*flat)
        return jax.tree.map(lambda k, x: x.reshape(hydro.dim, -1) if k == "v" else x, results, made)

    return of_all


@jax.jit  # traced once for the first state and for the loop
def point_data(hydro: Hydrodynamics, state: State) -> PointData:
    """Stress, heat and stable time step at the quadrature points of a state."""
    element, physics, length = hydro.element, hydro.physics, hydro.material.length
    source = physics.planar_heat_source if hydro.dim == 2 else None

    def update(
        x: jax.Array,
        v: jax.Array,
        e: jax.Array,
        mass: jax.Array,
        gamma: jax.Array,
        inverse_jacobian: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        response = respond(
            Material(mass, gamma, inverse_jacobian, length),
            element.order,
            operators.gradient(element, x),
            operators.evaluate(operators.energy_tables(element), e),
            operators.gradient(element, v) if physics.viscous else None,
            physics.vorticity_factor,
            physics.smooth_viscosity,
        )
        heat = None
        if source is not None:
            at = operators.evaluate(operators.node_tables(element), x)
            heat = jnp.asarray(element.weights) * response.volume * source(at)
        return response.stress, response.inverse_time_step, heat

    mass, gamma, inverse_jacobian, _ = hydro.material
    update_all = _fused(hydro, update, "vveeee", "e")
    stress, inverse_time_step, heat = update_all(*state, mass, gamma, inverse_jacobian)
    # The step size controls the computation and is no part of the solution: no derivatives.
    stable = lax.stop_gradient(jnp.max(inverse_time_step))
    return PointData(stress, heat, hydro.controls.cfl / stable)


def velocity_mass(hydro: Hydrodynamics, velocity: jax.Array) -> jax.Array:
    """M_v, unconstrained: ``(m, nodes) -> (m, nodes)``."""
    mass = partial(operators.mass, hydro.element.values)
    return _fused(hydro, mass, "ev", "v")(hydro.velocity_mass, velocity)


def energy_mass(hydro: Hydrodynamics, energy: jax.Array) -> jax.Array:
    """M_e: ``(e, z, y, x) -> (e, z, y, x)``."""
    mass = partial(operators.mass, hydro.element.energy_values)
    return _fused(hydro, mass, "ee", "e")(hydro.velocity_mass, energy)


def solve_velocity(hydro: Hydrodynamics, rhs: jax.Array) -> Solution:
    """M_v dv = rhs with the wall components held at zero.

    The direction of the solve vanishes on the walls, so zeroing the product there constrains the
    operator; for the same reason masking the solution changes only its derivatives.
    """
    free, controls = hydro.numbering.free, hydro.controls

    def solve(operator: Operator, rhs: jax.Array, inverse_diagonal: jax.Array) -> Solution:
        tolerance, limit = controls.cg_tolerance, controls.cg_max_iterations
        return conjugate_gradients(operator, rhs, tolerance, limit, inverse_diagonal)

    def constrained(v: jax.Array) -> jax.Array:
        return free * velocity_mass(hydro, v)

    if hydro.energy_inverse is None:
        x, iterations = solve(constrained, free * rhs, hydro.inverse_diagonal[None])
    else:  # all components are one system, with one test
        together = hydro.inverse_diagonal[None, None]
        x, iterations = solve(lambda v: constrained(v[0])[None], (free * rhs)[None], together)
        x, iterations = x[0], jnp.broadcast_to(iterations, hydro.dim)
    return Solution(free * x, iterations)


def solve_energy(hydro: Hydrodynamics, rhs: jax.Array) -> Solution:
    """M_e de = rhs: solved as one system without preconditioner, or by the inverse."""
    if hydro.energy_inverse is not None:
        flat = rhs.reshape(len(rhs), -1)  # (e, n)
        x = jnp.einsum("eij,ej->ei", hydro.energy_inverse, flat)
        return Solution(x.reshape(rhs.shape), jnp.int64(1))
    x, iterations = conjugate_gradients(
        lambda e: energy_mass(hydro, e[0])[None],
        rhs[None],
        hydro.controls.cg_tolerance,
        hydro.controls.cg_max_iterations,
    )
    return Solution(x[0], iterations[0])


def _with_gravity(hydro: Hydrodynamics, force: jax.Array) -> jax.Array:
    return force if hydro.gravity_force is None else hydro.gravity_force + force


def _force(element: ReferenceElement, stress: jax.Array) -> jax.Array:
    """-F 1 of one element, the sign its own: not one more pass over global vectors."""
    return -operators.force(element, stress)


def _work(
    element: ReferenceElement, stress: jax.Array, velocity: jax.Array, *heat: jax.Array
) -> jax.Array:
    """F^T v of one element, with the heat if there is any: ``(z, y, x)``."""
    density = sum(heat, start=operators.power(element, stress, velocity))
    return operators.integrate(operators.energy_tables(element), density)


def _heat(points: PointData) -> tuple[jax.Array, ...]:
    return () if points.heat is None else (points.heat,)


def momentum_rhs(hydro: Hydrodynamics, points: PointData) -> jax.Array:
    """-F 1 (+ gravity): ``(dim, nodes)``."""
    force = _fused(hydro, partial(_force, hydro.element), "e", "v")
    return _with_gravity(hydro, force(points.stress))


def energy_rhs(hydro: Hydrodynamics, points: PointData, velocity: jax.Array) -> jax.Array:
    """F^T v (+ heat source): ``(e, z, y, x)``."""
    heat = _heat(points)
    work = _fused(hydro, partial(_work, hydro.element), "ev" + "e" * len(heat), "e")
    return work(points.stress, velocity, *heat)


def both_rhs(
    hydro: Hydrodynamics, points: PointData, velocity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Those of momentum and energy, by one kernel: the stress, most of the traffic, is read once.

    For a velocity that is known before the momentum equation is solved.
    """
    element, heat = hydro.element, _heat(points)

    def both(stress: jax.Array, v: jax.Array, *heat: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _force(element, stress), _work(element, stress, v, *heat)

    both_of_all = _fused(hydro, both, "ev" + "e" * len(heat), ("v", "e"))
    force, work = both_of_all(points.stress, velocity, *heat)
    return _with_gravity(hydro, force), work


class Energies(NamedTuple):
    internal: jax.Array
    kinetic: jax.Array


def energies(hydro: Hydrodynamics, state: State) -> Energies:
    """sum_q m e and 1/2 sum_q m |v|^2."""
    element = hydro.element

    def of_element(mass: jax.Array, e: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        at_points = operators.evaluate(operators.energy_tables(element), e)
        v = operators.evaluate(operators.node_tables(element), v)
        return jnp.sum(mass * at_points), 0.5 * jnp.sum(mass[None] * v * v)

    internal, kinetic = _fused(hydro, of_element, "eev", "e")(hydro.material.mass, state.e, state.v)
    return Energies(jnp.sum(internal), jnp.sum(kinetic))
