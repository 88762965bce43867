"""The element operators: interpolation, gradients, mass, force and its transpose.

Each is a function of one element, with the one-dimensional tables of the reference element;
`jaxmagma.fuse` runs it over all of them as one kernel, in which every intermediate stays on chip.
A field of an element has its axes z, y, x last: ``(nodes...)``, at the quadrature points
``(points...)``, and one of vectors has its components ahead of them, ``(m, nodes...)``.

Letters: a, b, c the nodes along x, y, z; x, y, z the quadrature points.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fem_demo.basis import ReferenceElement


# Tables are listed in the order of the axes of the arrays: z, y, x.
_EVALUATE = {1: "xa,...a->...x", 2: "yb,xa,...ba->...yx", 3: "zc,yb,xa,...cba->...zyx"}
_INTEGRATE = {1: "xa,...x->...a", 2: "yb,xa,...yx->...ba", 3: "zc,yb,xa,...zyx->...cba"}


def evaluate(tables: list[np.ndarray], field: jax.Array) -> jax.Array:
    """Values at the quadrature points: ``(..., nodes...) -> (..., points...)``."""
    return jnp.einsum(_EVALUATE[len(tables)], *tables, field)


def integrate(tables: list[np.ndarray], values: jax.Array) -> jax.Array:
    """Transpose of `evaluate`: point values tested with each basis function and summed."""
    return jnp.einsum(_INTEGRATE[len(tables)], *tables, values)


def mass(table: np.ndarray, weights: jax.Array, field: jax.Array) -> jax.Array:
    """B^T diag(weights) B, weights ``(points...)``: ``(..., nodes...) -> (..., nodes...)``."""
    tables = [table] * weights.ndim
    values = evaluate(tables, field)
    return integrate(tables, jnp.broadcast_to(weights, values.shape) * values)


def node_tables(element: ReferenceElement) -> list[np.ndarray]:
    return [element.values] * element.dim


def energy_tables(element: ReferenceElement) -> list[np.ndarray]:
    return [element.energy_values] * element.dim


def slope_tables(element: ReferenceElement, direction: int) -> list[np.ndarray]:
    """Tables of the reference derivative along ``direction`` (0 is x, the last axis)."""
    tables = node_tables(element)
    tables[element.dim - 1 - direction] = element.slopes
    return tables


def gradient(element: ReferenceElement, field: jax.Array) -> jax.Array:
    """Reference gradient at the points: ``(m, nodes...) -> (g, m, points...)``."""
    return jnp.stack([evaluate(slope_tables(element, g), field) for g in range(element.dim)])


def geometry(element: ReferenceElement, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the Jacobian its determinant, ``(points...)``, and its inverse, ``(g, m, points...)``."""
    J = jnp.moveaxis(gradient(element, positions), (1, 0), (-2, -1))  # dx_m / dxi_g
    return jnp.linalg.det(J), jnp.moveaxis(jnp.linalg.inv(J), (-2, -1), (0, 1))


def force(element: ReferenceElement, stress: jax.Array) -> jax.Array:
    """F 1: the stress tested with the gradients of the basis functions.

    ``(g, m, points...) -> (m, nodes...)``, with sum_q sum_g S[g, m] dphi/dxi_g.
    """
    terms = [integrate(slope_tables(element, g), stress[g]) for g in range(element.dim)]
    return sum(terms[1:], start=terms[0])


def power(element: ReferenceElement, stress: jax.Array, velocity: jax.Array) -> jax.Array:
    """The working of the stress on a velocity at each point: ``(points...)``.

    F^T v is this density tested with the energy basis: sum over c and g of S[g, c] dv_c/dxi_g.
    """
    return jnp.sum(stress * gradient(element, velocity), axis=(0, 1))
