"""Explicit Runge-Kutta integrators, as tables.

Row i of ``tableau`` says how the state after i+1 stages is made of the rates so far:

    S_{i+1} = S + dt sum_j tableau[i][j] k_j,        k_i = f(S_i),  S_0 = S,

and the last row is the result; the other rows and it are the a and b of a Butcher tableau.
``rk2`` is the midpoint rule, ``rk3`` the strong-stability-preserving one of Shu and Osher (in
Butcher's form), ``rk4`` the classical one, and ``rk6`` the sixth-order formula of Verner's "most
efficient" 6(5) pair in eight stages.

RK2Avg is the midpoint table with one change: the energy and the
position move with the *average* of the old velocity and the velocity that the stage arrives at,

    V = v + (dt/2) dv,   k = (V, dv, M_e^-1 F^T V),

so that the work taken from the kinetic energy arrives in the internal energy exactly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fem_demo.hydrodynamics import (
    Hydrodynamics,
    PointData,
    State,
    both_rhs,
    energy_rhs,
    momentum_rhs,
    point_data,
    solve_energy,
    solve_velocity,
)


@dataclass(frozen=True)
class Integrator:
    name: str
    order: int  # of convergence
    tableau: tuple[tuple[float, ...], ...]
    average_velocity: bool = False

    @property
    def stages(self) -> int:
        return len(self.tableau)

    @property
    def matrix(self) -> np.ndarray:
        matrix = np.zeros((self.stages, self.stages))
        for i, row in enumerate(self.tableau):
            matrix[i, : len(row)] = row
        return matrix


_VERNER_6 = (
    (0.06,),
    (0.019239962962962962, 0.07669337037037037),
    (0.035975, 0, 0.107925),
    (1.3186834152331484, 0, -5.042058063628562, 4.220674648395414),
    (
        -41.872591664327516, 0, 159.4325621631375, -122.11921356501003,
        5.531743066200054,
    ),
    (
        -54.430156935316504, 0, 207.06725136501848, -158.61081378459,
        6.991816585950242, -0.018597231062203234,
    ),
    (
        -54.66374178728198, 0, 207.95280625538936, -159.2889574744995,
        7.018743740796944, -0.018338785905045722, -0.0005119484997882099,
    ),
    (
        0.03438957868357036, 0, 0, 0.2582624555633503,
        0.4209371189673537, 4.40539646966931, -176.48311902429865, 172.36413340141507,
    ),
)  # fmt: skip

INTEGRATORS = {
    integrator.name: integrator
    for integrator in (
        Integrator("euler", 1, ((1,),)),
        Integrator("rk2", 2, ((1 / 2,), (0, 1))),
        Integrator("rk3", 3, ((1,), (1 / 4, 1 / 4), (1 / 6, 1 / 6, 2 / 3))),
        Integrator("rk4", 4, ((1 / 2,), (0, 1 / 2), (0, 0, 1), (1 / 6, 1 / 3, 1 / 3, 1 / 6))),
        Integrator("rk6", 6, _VERNER_6),
        Integrator("rk2avg", 2, ((1 / 2,), (0, 1)), average_velocity=True),
    )
}


def find_integrator(name: str) -> Integrator:
    integrator = INTEGRATORS.get(name)
    if integrator is None:
        known = ", ".join(INTEGRATORS)
        raise ValueError(f"unknown integrator {name!r}; the integrators are {known}")
    return integrator


class Work(NamedTuple):
    """Counts, for the rates.

    The components of the velocity share their CG sweeps: a sweep is one application of the mass
    matrix to all of them and counts as one iteration of each component that still needs it.
    """

    velocity_iterations: jax.Array  # summed over the components
    velocity_sweeps: jax.Array
    energy_iterations: jax.Array
    forces: jax.Array
    updates: jax.Array

    @staticmethod
    def none() -> "Work":
        zero = jnp.zeros((), jnp.int64)
        return Work(zero, zero, zero, zero, zero)


class Step(NamedTuple):
    state: State
    points: PointData
    time_step: jax.Array  # (), the smallest stable one of all states after the first
    work: Work


def step(
    hydro: Hydrodynamics,
    integrator: Integrator,
    state: State,
    points: PointData,
    dt: jax.Array,
    work: Work,
) -> Step:
    """One step from ``state``, whose point data are at hand."""
    tableau = jnp.asarray(integrator.matrix)  # (stages, stages)

    def stage(i: jax.Array, carry: tuple[Step, State]) -> tuple[Step, State]:
        at, rates = carry
        if integrator.average_velocity:
            dv, iterations = solve_velocity(hydro, momentum_rhs(hydro, at.points))
            moving = state.v + 0.5 * dt * dv
            energy = energy_rhs(hydro, at.points, moving)
        else:
            moving = at.state.v
            momentum, energy = both_rhs(hydro, at.points, moving)
            dv, iterations = solve_velocity(hydro, momentum)
        de, energy_iterations = solve_energy(hydro, energy)
        row = dt * lax.dynamic_index_in_dim(tableau, i, keepdims=False)  # (stages,)
        latest = State(moving, dv, de)
        # The history is still zero at i.  Reading it before it is updated spares XLA a copy of it.
        arrived = jax.tree.map(
            lambda s, k, history: s + row[i] * k + jnp.tensordot(row, history, 1),
            state,
            latest,
            rates,
        )
        rates = jax.tree.map(
            lambda k, history: lax.dynamic_update_index_in_dim(history, k, i, 0), latest, rates
        )
        data = point_data(hydro, arrived)
        done = Work(
            velocity_iterations=jnp.sum(iterations),
            velocity_sweeps=jnp.max(iterations),
            energy_iterations=energy_iterations,
            forces=jnp.int64(1),
            updates=jnp.int64(1),
        )
        new = Step(
            arrived,
            data,
            jnp.minimum(at.time_step, data.time_step),
            jax.tree.map(jnp.add, at.work, done),
        )
        return new, rates

    rates = jax.tree.map(lambda s: jnp.zeros((integrator.stages, *s.shape), s.dtype), state)
    start = Step(state, points, jnp.full_like(dt, jnp.inf), work)
    return lax.fori_loop(0, integrator.stages, stage, (start, rates))[0]
