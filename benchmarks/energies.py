"""Forces and matrices of nonlinear solids, as derivatives that JAX takes of an energy.

Coordinates and displacements of the nodes come in. Least traffic is theirs and that of the result.
Flops are those of tables applied to values at the points, of half of a symmetric matrix, and of the
formulas of a material.
"""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs import Program, small
from benchmarks.workloads import Array, Function


# Of an element: its points, its nodes, its dimensions.
ELEMENTS = {
    "triangle2": (3, 6, 2),
    "square1": (4, 4, 2),
    "square2": (9, 8, 2),
    "tet1": (1, 4, 3),
    "tet2": (4, 10, 3),
    "wedge1": (6, 6, 3),
    "hex1": (8, 8, 3),
    "hex2": (27, 20, 3),
}


def every() -> Iterator[Program]:
    for material, energy in MATERIALS.items():
        for element, (points, nodes, dimensions) in ELEMENTS.items():
            table = _table(points, nodes, dimensions)
            square = dimensions * dimensions
            gradients = points * (3 * 2 * nodes * square + 50)
            forces = gradients + points * (2 * nodes * square + 200)
            yield _program(f"{material}-forces/{element}", jax.grad, energy, table, forces)
            tangent = 2 * nodes * square * square + nodes * (nodes + 1) * square * dimensions
            matrix = gradients + points * (tangent + 400)
            yield _program(f"{material}-matrix/{element}", jax.hessian, energy, table, matrix)


def _table(points: int, nodes: int, dimensions: int) -> Array:
    """Slopes of shape functions at the points, and a weight for each."""
    return np.random.default_rng(nodes).uniform(-1, 1, (points, nodes, dimensions + 1))


def _program(
    name: str,
    derivative: Callable[[Function], Function],
    energy: Function,
    table: Array,
    flops: int,
) -> Program:
    slopes, weights = table[..., :-1], np.abs(table[:, 0, -1]) + 0.1
    _, nodes, dimensions = slopes.shape
    one = np.eye(dimensions)

    def element(x: Array, u: Array) -> Array:
        jacobian = jnp.einsum("qnd,ni->qid", slopes, x) + 4 * one  # a small change of a cube
        g = slopes @ jnp.linalg.inv(jacobian)
        volumes = weights * jnp.linalg.det(jacobian)

        def total(u: Array) -> Array:
            f = one + jnp.einsum("na,qne->qae", u, g)
            return jnp.sum(volumes * jax.vmap(energy)(f))

        return derivative(total)(u)

    shape = (nodes, dimensions)
    result = shape if derivative is jax.grad else (*shape, *shape)
    values = 2 * nodes * dimensions + math.prod(result)
    return Program(name, element, (shape, shape), values, flops, others={}, given=small)


# ---- Energies of a solid by the gradient of its deformation --------------------------------------


def neo_hooke(f: Array) -> Array:
    j = jnp.log(jnp.linalg.det(f))
    return 0.35 * (jnp.trace(f.T @ f) - len(f)) - 0.7 * j + 0.65 * j**2


def saint_venant(f: Array) -> Array:
    strain = (f.T @ f - jnp.eye(len(f))) / 2
    return 0.65 * jnp.trace(strain) ** 2 + 0.7 * jnp.trace(strain @ strain)


def mooney_rivlin(f: Array) -> Array:
    j, c = jnp.linalg.det(f), f.T @ f
    first = jnp.trace(c)
    second = (first**2 - jnp.trace(c @ c)) / 2
    return (
        0.3 * (j ** (-2 / 3) * first - 3) + 0.2 * (j ** (-4 / 3) * second - 3) + 0.65 * (j - 1) ** 2
    )


def linear(f: Array) -> Array:
    strain = (f + f.T) / 2 - jnp.eye(len(f))
    return 0.65 * jnp.trace(strain) ** 2 + 0.7 * jnp.sum(strain * strain)


MATERIALS = {
    "neo-hooke": neo_hooke,
    "saint-venant": saint_venant,
    "mooney-rivlin": mooney_rivlin,
    "linear": linear,
}
