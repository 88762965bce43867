"""Numbering of the continuous (H1) nodes, and the way between global and element fields.

A global H1 field is ``(components, nodes)``, nodes numbered lexicographically over the whole box,
x fastest.  Its element form is ``(components, e, z, y, x)``, in 2D ``(components, e, y, x)``: every
element's own copy of its nodes, and the layout of every contraction in this package.  A
discontinuous (L2) field has only an element form, ``(e, z, y, x)``.

Summing element contributions into nodes is written as a *gather*: each node lists the at most 2^dim
places that contribute to it.  Unlike a scatter it runs in parallel and always adds in the same
order, so a run is reproducible to the bit on every device.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from fem_demo.basis import ReferenceElement
from fem_demo.mesh import BoxMesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Numbering:
    """Tables between global and element H1 fields.

    ``nodes[e, z, y, x]`` is the global number of an element's node.  ``contributions[n, i]`` is the
    flat position in the element form of the n-th place that node i collects from; nodes with fewer
    places point one past the end, where a zero stands.  ``free[c, i]`` is 0 where a wall holds
    component c of the velocity and 1 elsewhere.
    """

    nodes: jax.Array  # (e, z, y, x)
    contributions: jax.Array  # (2^dim, nodes)
    free: jax.Array  # (components, nodes)

    @property
    def node_count(self) -> int:
        return self.free.shape[1]


def _axis_nodes(cells: int, order: int) -> np.ndarray:
    return np.arange(cells)[:, None] * order + np.arange(order + 1)  # (cells, k+1)


def node_table(mesh: BoxMesh, order: int) -> np.ndarray:
    """Global node numbers of each element, ``(e, z, y, x)``."""
    dim = mesh.dim
    table = np.zeros((1,) * (2 * dim), dtype=np.int64)
    stride = 1
    for axis, cells in enumerate(mesh.cells):
        numbers = _axis_nodes(cells, order) * stride
        spread = [1] * (2 * dim)
        spread[dim - 1 - axis], spread[2 * dim - 1 - axis] = numbers.shape
        table = table + numbers.reshape(spread)
        stride *= cells * order + 1
    return table.reshape((mesh.element_count,) + (order + 1,) * dim)


def contribution_table(nodes: np.ndarray, node_count: int, columns: int) -> np.ndarray:
    """The transpose of ``nodes``: where each node's contributions stand, ``(columns, nodes)``."""
    flat = nodes.ravel()
    places = np.argsort(flat, kind="stable")  # grouped by node
    owners = flat[places]
    rank = np.arange(flat.size) - np.searchsorted(owners, owners)  # position within its group
    table = np.full((columns, node_count), flat.size, dtype=np.int64)
    table[rank, owners] = places
    return table


def free_components(mesh: BoxMesh, order: int) -> np.ndarray:
    """Slip walls: component c vanishes on both closed walls normal to axis c."""
    counts = [cells * order + 1 for cells in reversed(mesh.cells)]  # nodes along z, y, x
    free = np.ones((mesh.dim, *counts))
    for component in range(mesh.dim):
        walls = np.moveaxis(free[component], mesh.dim - 1 - component, 0)
        walls[0] = walls[-1] = 0.0
    return free.reshape(mesh.dim, -1)  # (components, nodes)


def number(mesh: BoxMesh, element: ReferenceElement) -> Numbering:
    nodes = node_table(mesh, element.order)
    count = prod(cells * element.order + 1 for cells in mesh.cells)
    places = contribution_table(nodes, count, 2**mesh.dim)
    index = np.int32 if nodes.size < 2**31 else np.int64
    return Numbering(
        nodes=jnp.asarray(nodes.astype(index)),
        contributions=jnp.asarray(places.astype(index)),
        free=jnp.asarray(free_components(mesh, element.order)),
    )


def to_nodes(nodes: np.ndarray, element_field: np.ndarray, node_count: int) -> np.ndarray:
    """Global form of a field that is already continuous, at set-up: ``(components, nodes)``."""
    components = element_field.shape[0]
    out = np.empty((components, node_count))
    out[:, nodes.ravel()] = element_field.reshape(components, -1)
    return out


def _pick(field: jax.Array, places: jax.Array) -> jax.Array:
    """``field[:, places]``; the tables are in bounds by construction, so nothing is checked."""
    return field.at[:, places].get(mode="promise_in_bounds", wrap_negative_indices=False)


def restrict(numbering: Numbering, field: jax.Array) -> jax.Array:
    """The elements' copies of a global field: ``(m, nodes) -> (m, e, z, y, x)``."""
    return _pick(field, numbering.nodes)


def assemble(numbering: Numbering, element_field: jax.Array) -> jax.Array:
    """The transpose of `restrict`, a sum over elements: ``(m, e, z, y, x) -> (m, nodes)``."""
    components = element_field.shape[0]
    zero = jnp.zeros((components, 1), element_field.dtype)
    places = jnp.concatenate([element_field.reshape(components, -1), zero], axis=1)
    # One gather per column: a sum over a stacked axis would be a slower reduction.
    columns = [_pick(places, column) for column in numbering.contributions]
    return sum(columns[1:], start=columns[0])  # (m, nodes)
