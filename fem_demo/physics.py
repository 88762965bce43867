"""What happens at one quadrature point: equation of state, artificial viscosity, time step.

With J the Jacobian reference -> current, J0 the same on the initial mesh, V' the reference gradient
of the velocity and m = rho0 |J0| w the mass that the point carries for ever:

    rho   = m / (w |J|)                            mass conservation
    p     = (gamma - 1) rho e,  c_s = sqrt(gamma (gamma - 1) e)      with e clipped at 0
    L     = V' J^-1,  D = (L + L^T)/2,  (mu, s) = its smallest eigenvalue and eigenvector
    h     = h0 |J J0^-1 s|                         length scale along the direction of compression
    nu    = 2 rho h^2 |mu| + (1/2) rho h c_s psi [compression]
    sigma = -p I + nu D
    1/dt  = c_s / h_min + 2.5 nu / (rho h_min^2),  h_min = smallest singular value of J over k
    S     = w |J| sigma J^-T                       what the force integrates

In the code p, nu and sigma are those for rho = 1: all three are proportional to the density, which
then meets w |J| in S, and their product is m.

As a function of the state, nu jumps where a point starts to expand ([compression] is almost a
step) and where the eigenvalues of D cross (s turns by a right angle).  The *smooth* viscosity, for
derivatives through a run, has a wide step and the mean stretch h = h0 ||J J0^-1||_F / sqrt(dim).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fem_demo import spectrum
from fem_demo.spectrum import positive_or_one, square_root


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


def viscosity(
    material: Material,
    J: jax.Array,
    L: jax.Array,
    D: jax.Array,
    sound: jax.Array,
    vorticity_factor: bool,
    smooth: bool,
) -> jax.Array:
    """nu / rho."""
    mu, s, _ = spectrum.ends(D)
    if smooth:
        square = jnp.sum((J @ material.inverse_jacobian) ** 2) / len(J)
    else:
        square = jnp.sum((J @ (material.inverse_jacobian @ s)) ** 2) / (s @ s)
    h = material.length * jnp.sqrt(square)

    psi = jnp.ones_like(mu)
    if vorticity_factor:  # less viscosity where the flow turns rather than compresses
        norm = square_root(jnp.sum(L**2))
        trace = jnp.abs(jnp.trace(L))
        psi = jnp.where(norm > 0, trace / positive_or_one(norm), 1.0)
    gate = compression(mu, SMOOTH_SWITCH if smooth else SWITCH)
    return h * (2 * h * jnp.abs(mu) + 0.5 * sound * psi * gate)


def respond_at_point(
    material: Material,
    order: int,
    position_gradient: jax.Array,
    energy: jax.Array,
    velocity_gradient: jax.Array | None,
    vorticity_factor: bool,
    smooth_viscosity: bool,
) -> Response:
    """With the reference gradients ``(g, m)`` of position and velocity at one point."""
    J = position_gradient.T
    det, inverse = jnp.linalg.det(J), jnp.linalg.inv(J)
    # The smallest singular value of J is 1 / the largest of its inverse, which suffers no
    # cancellation however flat J is.
    inverse_h = order * spectrum.largest_singular_value(inverse)

    m, p = material.mass, (material.gamma - 1) * jnp.maximum(energy, 0.0)
    sound = square_root(material.gamma * p)
    inverse_time_step = sound * inverse_h
    if velocity_gradient is None:
        stress = -m * p * inverse
    else:
        L = velocity_gradient.T @ inverse
        D = 0.5 * (L + L.T)
        nu = viscosity(material, J, L, D, sound, vorticity_factor, smooth_viscosity)
        inverse_time_step = inverse_time_step + 2.5 * nu * inverse_h**2
        stress = inverse @ (m * (nu * D - p * jnp.eye(len(J))))

    # A point that is flat or inside out asks for a time step of zero, so the step is repeated.
    inverse_time_step = jnp.where(det <= 0, jnp.inf, inverse_time_step)
    return Response(stress, inverse_time_step, det)


def respond(
    material: Material,
    order: int,
    position_gradient: jax.Array,
    energy: jax.Array,
    velocity_gradient: jax.Array | None,
    vorticity_factor: bool = False,
    smooth_viscosity: bool = False,
) -> Response:
    """The response of each point of an element; without a velocity gradient there is no viscosity.

    The gradients are ``(g, m, points...)``, as `operators.gradient` makes them.
    """

    def at_point(mass: jax.Array, inverse_jacobian: jax.Array, *fields: Any) -> Response:
        own = material._replace(mass=mass, inverse_jacobian=inverse_jacobian)
        x, e, v = fields
        return respond_at_point(own, order, x, e, v, vorticity_factor, smooth_viscosity)

    for axis in range(1, energy.ndim + 1):  # in this order they stay as they lie in memory
        at_point = jax.vmap(at_point, in_axes=-axis, out_axes=-axis)
    fields = position_gradient, energy, velocity_gradient
    return at_point(material.mass, material.inverse_jacobian, *fields)
