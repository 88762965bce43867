"""Numbering of the continuous (H1) nodes, and the way between global and element fields.

A global H1 field is ``(components, nodes)``, nodes numbered lexicographically over the whole box,
x fastest.  Its element form is ``(components, e, z, y, x)``, in 2D ``(components, e, y, x)``: every
element's own copy of its nodes, and the layout of every contraction in this package.  A
discontinuous (L2) field has only an element form, ``(e, z, y, x)``.

Operators read global vectors through `jaxmagma.gather` and sum into them through
`jaxmagma.scatter_add`, which always adds in the same order: a run is reproducible to the bit.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from fem_demo.basis import ReferenceElement
from fem_demo.mesh import BoxMesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Numbering:
    """Tables between global and element H1 fields.

    ``nodes[e, z, y, x]`` is the global number of an element's node.  ``free[c, i]`` is 0 where a
    wall holds component c of the velocity and 1 elsewhere.  ``gather`` and ``scatter`` take an
    element's part, ``(components, z, y, x)``, of a flat vector field.
    """

    nodes: jax.Array  # (e, z, y, x)
    free: jax.Array  # (components, nodes)
    gather: jm.GatherAxis
    scatter: jm.ScatterAxis

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


def free_components(mesh: BoxMesh, order: int) -> np.ndarray:
    """Slip walls: component c vanishes on both closed walls normal to axis c."""
    counts = [cells * order + 1 for cells in reversed(mesh.cells)]  # nodes along z, y, x
    free = np.ones((mesh.dim, *counts))
    for component in range(mesh.dim):
        walls = np.moveaxis(free[component], mesh.dim - 1 - component, 0)
        walls[0] = walls[-1] = 0.0
    return free.reshape(mesh.dim, -1)  # (components, nodes)


def number(mesh: BoxMesh, element: ReferenceElement) -> Numbering:
    """All of it is data: what is compiled for one mesh serves others of its shape."""
    nodes = node_table(mesh, element.order)
    count = prod(cells * element.order + 1 for cells in mesh.cells)
    components = np.arange(mesh.dim).reshape(mesh.dim, *(1,) * mesh.dim)
    vector = nodes[:, None] + count * components  # (e, components, z, y, x)
    gather = jm.gather(vector, mesh.dim * count)
    return Numbering(
        nodes=jnp.asarray(nodes.astype(np.int32)),
        free=jnp.asarray(free_components(mesh, element.order)),
        gather=gather,
        scatter=jm.scatter_add(gather, mesh.dim * count),
    )


def to_nodes(nodes: np.ndarray, element_field: np.ndarray, node_count: int) -> np.ndarray:
    """Global form of a field that is already continuous, at set-up: ``(components, nodes)``."""
    components = element_field.shape[0]
    out = np.empty((components, node_count))
    out[:, nodes.ravel()] = element_field.reshape(components, -1)
    return out
