"""The element contractions: interpolation, gradients, mass, force and its transpose.

Each is one einsum over all elements with the one-dimensional tables of the reference element; a
fused implementation runs it as one kernel in which every intermediate stays on chip.

Letters: e element; m vector component; a, b, c the nodes along x, y, z that are summed; i, j, k
the nodes that are kept; x, y, z the quadrature points.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from fem_demo.basis import ReferenceElement


# Tables are listed in the order of the axes of the arrays: z, y, x.
_EVALUATE = {1: "xa,mea->mex", 2: "yb,xa,meba->meyx", 3: "zc,yb,xa,mecba->mezyx"}
_INTEGRATE = {1: "xi,mex->mei", 2: "yj,xi,meyx->meji", 3: "zk,yj,xi,mezyx->mekji"}
_MASS = {
    1: "xi,ex,xa,mea->mei",
    2: "yj,xi,eyx,yb,xa,meba->meji",
    3: "zk,yj,xi,ezyx,zc,yb,xa,mecba->mekji",
}


def evaluate(tables: list[np.ndarray], field: jax.Array) -> jax.Array:
    """Values at the quadrature points: ``(m, e, nodes...) -> (m, e, points...)``."""
    return jm.einsum(_EVALUATE[len(tables)], *tables, field)


def integrate(tables: list[np.ndarray], field: jax.Array) -> jax.Array:
    """Transpose of `evaluate`: point values tested with each basis function and summed."""
    return jm.einsum(_INTEGRATE[len(tables)], *tables, field)


def mass(table: np.ndarray, weights: jax.Array, field: jax.Array) -> jax.Array:
    """B^T diag(weights) B of every element: ``(m, e, nodes...) -> (m, e, nodes...)``."""
    dim = weights.ndim - 1
    tables = [table] * dim
    return jm.einsum(_MASS[dim], *tables, weights, *tables, field)


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
    """Reference gradient at the points: ``(m, e, nodes...) -> (g, m, e, points...)``."""
    return jnp.stack([evaluate(slope_tables(element, g), field) for g in range(element.dim)])


def force(element: ReferenceElement, stress: jax.Array) -> jax.Array:
    """F 1: the stress tested with the gradients of the basis functions.

    ``(g, m, e, points...) -> (m, e, nodes...)``, with sum_q sum_g S[g, m] dphi/dxi_g.
    """
    terms = [integrate(slope_tables(element, g), stress[g]) for g in range(element.dim)]
    return sum(terms[1:], start=terms[0])


def power(element: ReferenceElement, stress: jax.Array, velocity: jax.Array) -> jax.Array:
    """The working of the stress on a velocity at each point: ``(e, points...)``.

    F^T v is this density tested with the energy basis: sum over c and g of S[g, c] dv_c/dxi_g.
    """
    return jnp.sum(stress * gradient(element, velocity), axis=(0, 1))
