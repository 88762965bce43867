"""How far the velocity of a vortex is from the exact one."""

from functools import reduce
from typing import NamedTuple

import numpy as np

from fem_demo.basis import gauss_legendre, lagrange
from fem_demo.simulation import Simulation
from fem_demo.tensor import evaluate, jacobian


class VelocityErrors(NamedTuple):
    """Norms of |v - v0| over the moved mesh, v0 the initial velocity as a function of the place."""

    l_inf: float
    l_1: float
    l_2: float


def velocity_errors(simulation: Simulation) -> VelocityErrors:
    """By the Gauss-Legendre rule of order + 2 points; L_inf is the largest at those points."""
    element, state = simulation.element, simulation.progress.state
    nodes = np.asarray(simulation.hydro.numbering.nodes)
    x, v = (np.asarray(field)[:, nodes] for field in (state.x, state.v))  # (dim, e, nodes...)
    points, line = gauss_legendre(element.order + 2)
    tables = [lagrange(element.nodes, points)[0]] * element.dim
    weights = reduce(np.multiply.outer, [line] * element.dim)
    volumes = np.linalg.det(jacobian(element, [points] * element.dim, x)) * weights

    exact = simulation.problem.velocity_at(evaluate(tables, x))
    error = np.linalg.norm(evaluate(tables, v) - exact, axis=0)  # (e, points...)
    return VelocityErrors(
        l_inf=float(error.max()),
        l_1=float(np.sum(volumes * error)),
        l_2=float(np.sqrt(np.sum(volumes * error**2))),
    )
