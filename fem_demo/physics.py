"""What happens at one quadrature point: equation of state, artificial viscosity, time step.

With J the Jacobian reference -> current, J0 the same on the initial mesh, V' the reference gradient
of the velocity and m = rho0 |J0| w the mass that the point carries for ever:

    rho   = m / (w |J|)                            mass conservation
    p     = (gamma - 1) rho e,  c_s = sqrt(gamma (gamma - 1) e)      with e clipped at 0
    D     = sym(V' J^-1),  (mu, s) = its smallest eigenvalue and eigenvector
    h     = h0 |J J0^-1 s|                         length scale along the direction of compression
    nu    = 2 rho h^2 |mu| + (1/2) rho h c_s psi [compression]
    sigma = -p I + nu D
    1/dt  = c_s / h_min + 2.5 nu / (rho h_min^2),  h_min = smallest singular value of J over k
    S     = w |J| sigma J^-T = w sigma adj(J)^T    what the force integrates

As a function of the state, nu jumps where a point starts to expand ([compression] is almost a
step) and where the eigenvalues of D cross (s turns by a right angle).  The *smooth* viscosity, for
derivatives through a run, has a wide step and the mean stretch h = h0 ||J J0^-1||_F / sqrt(dim).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fem_demo.matrices import (
    Matrix,
    adjugate,
    apply,
    determinant,
    eigen,
    largest_singular_value,
    multiply,
    positive_or_one,
    square_root,
    squared_norm,
    stack,
    total,
    transpose,
    unstack,
)


# The linear viscosity term is on for mu <= SWITCH and off for mu >= 3 SWITCH, on an absolute scale.
SWITCH = 1e-12
SMOOTH_SWITCH = 0.1


class Material(NamedTuple):
    """What the elements keep from the initial mesh, each with the axis of the elements first."""

    mass: jax.Array  # (points...), rho0 |J0| w
    gamma: jax.Array  # ()
    inverse_jacobian: jax.Array  # (dim, dim, points...), J0^-1
    length: jax.Array  # (), h0


class Response(NamedTuple):
    stress: jax.Array  # (g, c, points...), S with the reference direction first
    inverse_time_step: jax.Array  # (points...), 1/dt for cfl = 1
    volume: jax.Array  # (points...), |J|


def compression(mu: jax.Array, switch: float) -> jax.Array:
    """1 for mu <= switch, 0 for mu >= 3 switch, a smooth cubic in between."""
    y = jnp.clip((mu - switch) / (2 * switch), 0.0, 1.0)
    return 1 - (3 - 2 * y) * y * y


def kinematic_viscosity(
    material: Material,
    jacobian: Matrix,
    velocity_gradient: Matrix,
    sound: jax.Array,
    vorticity_factor: bool,
    smooth: bool,
) -> jax.Array:
    """nu / rho."""
    n = range(len(jacobian))
    L = velocity_gradient
    mu, s, _ = eigen([[0.5 * (L[i][j] + L[j][i]) for j in n] for i in n])
    if smooth:
        stretch = multiply(jacobian, unstack(material.inverse_jacobian))
        square = total([squared_norm(row) for row in stretch]) / len(jacobian)
    else:
        stretched = apply(jacobian, apply(unstack(material.inverse_jacobian), s))
        square = squared_norm(stretched) / squared_norm(s)
    h = material.length * jnp.sqrt(square)

    psi = jnp.ones_like(mu)
    if vorticity_factor:  # less viscosity where the flow turns rather than compresses
        norm = square_root(total([squared_norm(row) for row in L]))
        trace = jnp.abs(total([L[i][i] for i in n]))
        psi = jnp.where(norm > 0, trace / positive_or_one(norm), 1.0)
    gate = compression(mu, SMOOTH_SWITCH if smooth else SWITCH)
    return h * (2 * h * jnp.abs(mu) + 0.5 * sound * psi * gate)


def respond(
    material: Material,
    order: int,
    jacobian: jax.Array,
    energy: jax.Array,
    reference_velocity_gradient: jax.Array | None,
    vorticity_factor: bool = False,
    smooth_viscosity: bool = False,
) -> Response:
    """The response of each point of an element; without a velocity gradient there is no viscosity.

    ``jacobian`` and ``reference_velocity_gradient`` are ``(g, m, points...)``, the reference
    direction first, as `operators.gradient` makes them.
    """
    n = range(len(jacobian))
    J = transpose(unstack(jacobian))
    adj = adjugate(J)
    det = determinant(J, adj)
    inverse_det = 1 / det
    energy = jnp.maximum(energy, 0.0)
    specific_pressure = (material.gamma - 1) * energy  # p / rho
    sound = square_root(material.gamma * specific_pressure)
    # The singular values of adj(J) are the products of all but one singular value of J, so
    # 1/h_min comes from the largest of them, which suffers no cancellation however flat J is.
    inverse_h = order * largest_singular_value(adj) * jnp.abs(inverse_det)
    inverse_time_step = sound * inverse_h

    weighted_density = material.mass * inverse_det  # w rho
    weighted_pressure = weighted_density * specific_pressure
    stress = [[-weighted_pressure * adj[g][c] for c in n] for g in n]
    if reference_velocity_gradient is not None:
        V = transpose(unstack(reference_velocity_gradient))  # dv_c/dxi_g
        L = [[inverse_det * a for a in row] for row in multiply(V, adj)]  # dv_c/dx_m
        nu = kinematic_viscosity(material, J, L, sound, vorticity_factor, smooth_viscosity)
        inverse_time_step = inverse_time_step + 2.5 * nu * inverse_h**2
        half_nu = 0.5 * weighted_density * nu
        twice_D = [[L[c][m] + L[m][c] for m in n] for c in n]
        shear = multiply(adj, twice_D)
        stress = [[half_nu * shear[g][c] + stress[g][c] for c in n] for g in n]

    # A point that turned inside out asks for a time step of zero, so the step is repeated.
    inverse_time_step = jnp.where(det < 0, jnp.inf, inverse_time_step)
    return Response(stack(stress), inverse_time_step, det)
