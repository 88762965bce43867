"""Rates of the phases of a run, in millions of unknowns (or points) processed per second.

The time loop is one compiled program, in which a phase cannot be timed.  So each phase is timed by
itself after the run, on the final state, and its cost is multiplied by the exact number of times
that the run performed it.  The rates are then, with T the time of the phase,

    cg_h1             H1 dofs * (CG iterations summed over components // dim) / T
    cg_l2             L2 dofs * CG iterations / T
    forces            (H1 + L2 dofs) * evaluations / T, F and its transpose together
    update_quad_data  quadrature points * evaluations / T
    major_kernels     the work of cg_h1, forces and update_quad_data over the sum of their times

with T in microseconds.  The H1 sweeps are timed on all components at once, as they run.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fem_demo.hydrodynamics import (
    Hydrodynamics,
    State,
    both_rhs,
    energy_rhs,
    momentum_rhs,
    point_data,
    solve_energy,
    solve_velocity,
)
from fem_demo.simulation import Progress, Simulation


MEASURE_SECONDS = 0.05  # per phase
# A GPU waits for the host at every turn of a loop whose end is not known before, as it does once in
# a time step. That is no part of a short phase, so these are repeated so many times in each turn.
PASSES = 16
SOLVE_ITERATIONS = 20


class PhaseSeconds(NamedTuple):
    """The cost of one sweep of each solve and of one evaluation of each of the rest."""

    cg_h1: float
    cg_l2: float
    forces: float
    update_quad_data: float


class Phases(NamedTuple):
    """One number for each phase of a run."""

    cg_h1: float
    cg_l2: float
    forces: float
    update_quad_data: float
    major_kernels: float


class Rates(NamedTuple):
    rate: Phases  # in millions per second
    seconds: Phases  # that the run spent, by the cost of one sweep or evaluation


def _waves(shape: tuple[int, ...]) -> jax.Array:
    """A right-hand side on which CG does not finish early."""
    size = 1
    for extent in shape:
        size *= extent
    return jnp.sin(jnp.arange(size, dtype=jnp.float64) ** 2).reshape(shape)


Phase = Callable[[Hydrodynamics, Progress], Progress]

# A phase starts from what the one before left, behind a barrier, so that a loop over it can neither
# hoist it nor leave it out, and nothing is added to its cost.  A solve starts from its own result,
# with so little of it that it stays the same.
NOTHING = 1e-300


def _cg_h1(hydro: Hydrodynamics, p: Progress) -> Progress:
    v = p.state.v + NOTHING * solve_velocity(hydro, p.state.v).x
    return p._replace(state=p.state._replace(v=v))


def _cg_l2(hydro: Hydrodynamics, p: Progress) -> Progress:
    e = p.state.e + NOTHING * solve_energy(hydro, p.state.e).x
    return p._replace(state=p.state._replace(e=e))


def _forces(hydro: Hydrodynamics, p: Progress) -> Progress:
    """Leaves its results where the position and the energy were, which it does not need."""
    points, state = lax.optimization_barrier((p.points, p.state))
    momentum, energy = both_rhs(hydro, points, state.v)
    return p._replace(state=State(momentum, state.v, energy))


def _forces_one_by_one(hydro: Hydrodynamics, p: Progress) -> Progress:
    points, state = lax.optimization_barrier((p.points, p.state))
    momentum, energy = momentum_rhs(hydro, points), energy_rhs(hydro, points, state.v)
    return p._replace(state=State(momentum, state.v, energy))


def _update_quad_data(hydro: Hydrodynamics, p: Progress) -> Progress:
    state, _ = lax.optimization_barrier((p.state, p.points))
    return p._replace(state=state, points=point_data(hydro, state))


@partial(jax.jit, static_argnames=("phase", "passes"))
def _repeat(
    hydro: Hydrodynamics, start: Progress, phase: Phase, passes: int, rounds: jax.Array
) -> Progress:
    """Rounds of passes inside one program: starting it does not count as the phase's cost."""

    def once(_: jax.Array, p: Progress) -> Progress:
        return phase(hydro, p)

    return lax.fori_loop(0, rounds, lambda _, p: lax.fori_loop(0, passes, once, p), start)


def _seconds_per_pass(
    hydro: Hydrodynamics, start: Progress, phase: Phase, passes: int = 1
) -> float:
    def seconds(rounds: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(_repeat(hydro, start, phase, passes, jnp.asarray(rounds)))
        return time.perf_counter() - began

    seconds(1)
    rounds = max(1, int(MEASURE_SECONDS / seconds(1)))
    return min(seconds(rounds) for _ in range(3)) / rounds / passes


def phase_seconds(simulation: Simulation) -> PhaseSeconds:
    """Each phase by itself, on the state where the simulation stands."""
    p, hydro = simulation.progress, simulation.hydro
    endless = hydro.controls._replace(
        cg_tolerance=jnp.zeros(()), cg_max_iterations=jnp.asarray(SOLVE_ITERATIONS)
    )
    solving = replace(hydro, controls=endless)
    v, e = _waves(p.state.v.shape), _waves(p.state.e.shape)
    waves = p._replace(state=p.state._replace(v=v, e=e))
    energy_iterations = SOLVE_ITERATIONS if hydro.energy_inverse is None else 1
    forces = _forces_one_by_one if simulation.integrator.average_velocity else _forces
    passes = 1 if jax.default_backend() == "cpu" else PASSES
    return PhaseSeconds(
        cg_h1=_seconds_per_pass(solving, waves, _cg_h1) / SOLVE_ITERATIONS,
        cg_l2=_seconds_per_pass(solving, waves, _cg_l2) / energy_iterations,
        forces=_seconds_per_pass(hydro, p, forces, passes),
        update_quad_data=_seconds_per_pass(hydro, p, _update_quad_data, passes),
    )


def rates(simulation: Simulation, cost: PhaseSeconds | None = None) -> Rates:
    """The rates of a finished run."""
    cost = phase_seconds(simulation) if cost is None else cost
    work = [int(count) for count in jax.device_get(simulation.progress.work)]
    iterations, sweeps, energy_iterations, forces, updates = work
    h1, l2 = simulation.dofs_h1, simulation.dofs_l2
    points = simulation.mesh.element_count * simulation.element.points_per_axis**simulation.mesh.dim

    amounts = (
        1e-6 * h1 * (iterations // simulation.mesh.dim),
        1e-6 * l2 * energy_iterations,
        1e-6 * (h1 + l2) * forces,
        1e-6 * points * updates,
    )
    times = (
        cost.cg_h1 * sweeps,
        cost.cg_l2 * energy_iterations,
        cost.forces * forces,
        cost.update_quad_data * updates,
    )

    major = (0, 2, 3)  # the energy solve is not one of them

    def rate(*phases: int) -> float:
        """Of some phases together; a phase that did nothing, in a run without steps, has rate 0."""
        seconds = sum(times[i] for i in phases)
        return sum(amounts[i] for i in phases) / seconds if seconds > 0 else 0.0

    return Rates(
        Phases(rate(0), rate(1), rate(2), rate(3), major_kernels=rate(*major)),
        Phases(*times, major_kernels=sum(times[i] for i in major)),
    )


LABELS = {
    "cg_h1": ("CG (H1)", "megadofs x CG iterations / second"),
    "cg_l2": ("CG (L2)", "megadofs x CG iterations / second"),
    "forces": ("Forces", "megadofs x evaluations / second"),
    "update_quad_data": ("UpdateQuadData", "megaquads x evaluations / second"),
    "major_kernels": ("Major kernels", "megadofs x evaluations / second, without CG (L2)"),
}


def table(measured: Rates) -> str:
    """The rates for people to read: phase, time and rate."""
    rate, seconds = measured.rate._asdict(), measured.seconds._asdict()
    lines = [
        f"{label:<15} {seconds[name]:>9.3f} s {rate[name]:>10.3f} {unit}"
        for name, (label, unit) in LABELS.items()
    ]
    return "\n".join(lines)
