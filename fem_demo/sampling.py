"""The fields of a state at chosen reference points of every element, for pictures and files."""

from typing import NamedTuple

import numpy as np

from fem_demo.basis import bernstein, lagrange
from fem_demo.initial import project
from fem_demo.simulation import Simulation
from fem_demo.tensor import evaluate, jacobian


class Samples(NamedTuple):
    """Values at the tensor grid of points of every element; the points stand as (z, y, x)."""

    position: np.ndarray  # (dim, e, points...)
    velocity: np.ndarray  # (dim, e, points...)
    energy: np.ndarray  # (e, points...)
    density: np.ndarray  # (e, points...)
    pressure: np.ndarray  # (e, points...)

    @property
    def speed(self) -> np.ndarray:
        return np.sqrt(np.sum(self.velocity**2, axis=0))


def sample(simulation: Simulation, points: list[np.ndarray]) -> Samples:
    """The present fields on the grid with the reference coordinates ``points``, as (z, y, x).

    The density follows from pointwise conservation of mass, rho |J| = rho0 |J0|.
    """
    element, state = simulation.element, simulation.progress.state
    nodes = np.asarray(simulation.hydro.numbering.nodes)
    x = np.asarray(state.x)[:, nodes]
    x0 = np.asarray(simulation.initial_positions)[:, nodes]
    v = np.asarray(state.v)[:, nodes]
    degree = element.energies_per_axis - 1
    values = [lagrange(element.nodes, p)[0] for p in points]
    energy_values = [bernstein(degree, p) for p in points]

    rho0 = evaluate(energy_values, project(simulation.mesh, degree, simulation.problem.density))
    volumes0, volumes = (np.linalg.det(jacobian(element, points, at)) for at in (x0, x))
    density = rho0 * volumes0 / volumes
    energy = evaluate(energy_values, np.asarray(state.e))
    gamma = simulation.problem.gamma(simulation.mesh.positions(np.array([0.5])))
    pressure = (gamma - 1) * density * np.maximum(energy, 0.0)
    return Samples(evaluate(values, x), evaluate(values, v), energy, density, pressure)
