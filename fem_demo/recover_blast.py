"""Recovers the energy of a blast from the density it left: ``python -m fem_demo.recover_blast``.

An inverse problem through the whole simulation.  A Sedov blast of a known energy is run to its end,
and only its final density is kept.  Then, from a wrong guess of the energy E0, gradient descent
minimises the misfit

    f(E0) = 1/2 integral over the gas of (rho(E0) - rho_observed)^2 dm

with the density compared where the gas is: at the quadrature points, which move with it.  The
derivative of f is that of the program, by reverse-mode differentiation through every time step,
force and mass solve.

* f has to be smooth in E0.  So the time steps are a given sequence, recorded in an adaptive run of
  the first guess (where a step is rejected, f would jump), and the viscosity is the smooth one of
  `physics`.
* A derivative needs the states in reverse order.  Keeping all of them would take memory for every
  intermediate array of every stage of n steps; here the loop is a loop over about sqrt n blocks of
  about sqrt n steps, both under `jax.checkpoint`: only the states at the ends of the blocks are
  kept, and the rest is computed again, a block at a time.
* A mass solve is differentiated by the implicit function theorem, by one more solve (see `cg`).

The unknown is log E0, which keeps the energy positive, and the length of a step of the descent is
the last step over the change of the gradient (Barzilai and Borwein; in one unknown this is the
secant method for f' = 0), halved until the misfit falls.
"""

import math
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmagma as jm
from fem_demo import operators
from fem_demo.arguments import (
    OneLineParser,
    require_matplotlib,
    run_command,
    writable_directory,
)
from fem_demo.hydrodynamics import Hydrodynamics, State, point_data
from fem_demo.integrators import INTEGRATORS, Integrator, Work, step
from fem_demo.picture import new_figure
from fem_demo.simulation import Configuration, Simulation


def recorded_time_steps(configuration: Configuration) -> jax.Array:
    """The accepted steps of the adaptive run, ``(steps,)``."""
    simulation = Simulation(configuration)
    times = [0.0]
    simulation.run(lambda now: times.append(now.t), attempts_between_reports=1)
    steps = np.diff(times)
    return jnp.asarray(steps[steps > 0])  # a rejected attempt does not move the time


def final_state(
    hydro: Hydrodynamics, integrator: Integrator, start: State, time_steps: jax.Array
) -> State:
    """After the given steps; differentiable with the memory of about 2 sqrt(steps) states."""
    count = len(time_steps)
    block = max(1, math.isqrt(count))
    blocks = -(-count // block)
    # The last block is filled up with steps of length zero, which change nothing.
    padded = jnp.concatenate([time_steps, jnp.zeros(blocks * block - count)])

    @jax.checkpoint
    def one_step(state: State, dt: jax.Array) -> tuple[State, None]:
        new = step(hydro, integrator, state, point_data(hydro, state), dt, Work.none())
        return new.state, None

    @jax.checkpoint
    def one_block(state: State, steps: jax.Array) -> tuple[State, None]:
        return lax.scan(one_step, state, steps)

    return lax.scan(one_block, start, padded.reshape(blocks, block))[0]


def density(hydro: Hydrodynamics, state: State) -> jax.Array:
    """rho = m / (w |J|) at the quadrature points, ``(e, points...)``."""

    def of_element(x: jax.Array, mass: jax.Array) -> jax.Array:
        J = jnp.moveaxis(operators.gradient(hydro.element, x), (1, 0), (-2, -1))
        return mass / (hydro.element.weights * jnp.linalg.det(J))

    fused = jm.fuse(of_element, in_axes=(hydro.numbering.gather, 0))
    return fused(state.x.ravel(), hydro.material.mass)


class Blast(NamedTuple):
    """The forward problem: E0 -> final density, a function that can be differentiated."""

    hydro: Hydrodynamics
    unit: State  # the initial state for E0 = 1; its energy is proportional to E0
    time_steps: jax.Array  # (steps,)


def final_density(blast: Blast, integrator: Integrator, e0: jax.Array) -> jax.Array:
    start = blast.unit._replace(e=e0 * blast.unit.e)
    return density(blast.hydro, final_state(blast.hydro, integrator, start, blast.time_steps))


def misfit(
    log_e0: jax.Array, blast: Blast, integrator: Integrator, observed: jax.Array
) -> jax.Array:
    """Half the squared difference of the densities, integrated over the mass of the gas."""
    difference = final_density(blast, integrator, jnp.exp(log_e0)) - observed
    return 0.5 * jnp.sum(blast.hydro.material.mass * difference**2)


misfit_and_slope = jax.jit(jax.value_and_grad(misfit), static_argnames="integrator")


class Iterate(NamedTuple):
    log_e0: float
    misfit: float
    slope: float  # d misfit / d log E0

    @property
    def e0(self) -> float:
        return math.exp(self.log_e0)


def descend(
    value_and_slope: Callable[[float], tuple[float, float]],
    start: float,
    iterations: int,
    tolerance: float,
    first_step: float = 0.1,
) -> Iterator[Iterate]:
    """Minimises a function of one variable; ends when a step is smaller than the tolerance.

    Every iterate costs one evaluation with its slope, and one more for each halving.
    """
    now = Iterate(start, *value_and_slope(start))
    yield now
    step_length = -math.copysign(first_step, now.slope)
    for _ in range(iterations):
        while True:
            trial = now.log_e0 + step_length
            new = Iterate(trial, *value_and_slope(trial))
            if new.misfit <= now.misfit or abs(step_length) <= tolerance:
                break
            step_length /= 2
        curvature = (new.slope - now.slope) / step_length
        now = new
        yield now
        if now.slope == 0 or abs(step_length) <= tolerance:
            return
        # A negative curvature says nothing about the distance: the step stays as long as it was.
        newton = abs(now.slope / curvature) if curvature > 0 else abs(step_length)
        step_length = -math.copysign(min(newton, 1.0), now.slope)


def make_blast(configuration: Configuration, guess: float) -> tuple[Blast, Integrator]:
    """The forward problem, with the time steps of the guess."""
    unit = Simulation(replace(configuration, e0=1.0))
    smooth = replace(unit.hydro.physics, smooth_viscosity=True)
    time_steps = recorded_time_steps(replace(configuration, e0=guess))
    blast = Blast(replace(unit.hydro, physics=smooth), unit.progress.state, time_steps)
    return blast, unit.integrator


def recover(
    blast: Blast,
    integrator: Integrator,
    observed: jax.Array,
    guess: float,
    iterations: int = 20,
    tolerance: float = 1e-9,
) -> Iterator[Iterate]:
    """The iterates from the guess to the energy whose blast has the observed density."""

    def value_and_slope(log_e0: float) -> tuple[float, float]:
        value, slope = misfit_and_slope(jnp.asarray(log_e0), blast, integrator, observed)
        return float(value), float(slope)

    yield from descend(value_and_slope, math.log(guess), iterations, tolerance)


def save_convergence(iterates: list[Iterate], truth: float, path: Path) -> None:
    """A picture of E0 and of the misfit against the iteration."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(9.0, 3.6)
    energy, misfits = figure.subplots(1, 2)
    numbers = range(len(iterates))
    colour = "#b5367a"
    energy.axhline(truth, color="0.6", linewidth=1, linestyle="--")
    energy.annotate(
        "true energy", (1, truth), (0, 4), ("axes fraction", "data"), "offset points",
        ha="right", fontsize=8, color="0.4",
    )  # fmt: skip
    energy.plot(numbers, [i.e0 for i in iterates], "o-", color=colour, markersize=4)
    energy.set_title("blast energy E0", loc="left", fontsize=10)
    misfits.semilogy(numbers, [i.misfit for i in iterates], "o-", color=colour, markersize=4)
    misfits.set_title("misfit of the density", loc="left", fontsize=10)
    for axes in (energy, misfits):
        axes.set_xlabel("iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(length=2, color="0.6", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=170, bbox_inches="tight", pad_inches=0.15)


def command_line() -> OneLineParser:
    parser = OneLineParser(
        prog="fem_demo.recover_blast",
        description="Recovers the energy of a 2D Sedov blast from its final density.",
        formatter_class=ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--truth", type=float, default=1.0, metavar="E0", help="the energy to recover")
    add("--guess", type=float, default=2.0, metavar="E0", help="where to start; at least the truth")
    add("--order", type=int, default=2, metavar="K", help="degree of position and velocity")
    add("--refine", type=int, default=2, metavar="R", help="times that the mesh is refined")
    add("--t-final", type=float, default=0.4, metavar="T", help="when the density is observed")
    add("--integrator", default="rk2avg", metavar="NAME", help=" or ".join(INTEGRATORS))
    add("--iterations", type=int, default=20, metavar="N", help="at most")
    add("--out", type=Path, default=Path("fem_demo_output"), metavar="DIR", help="for the picture")
    return parser


def _run(arguments: Namespace) -> None:
    truth, guess = arguments.truth, arguments.guess
    configuration = Configuration(
        "sedov", dim=2, order=arguments.order, refine=arguments.refine, e0=guess,
        t_final=arguments.t_final, integrator=arguments.integrator, cfl=0.3, cg_tol=1e-12,
    ).resolved()  # fmt: skip
    replace(configuration, e0=truth).resolved()  # a positive number?
    require_matplotlib("the picture")
    writable_directory(arguments.out)
    jax.config.update("jax_enable_x64", True)

    began = time.perf_counter()
    blast, integrator = make_blast(configuration, guess)
    observe = jax.jit(final_density, static_argnames="integrator")
    observed = observe(blast, integrator, jnp.asarray(truth))
    elements = 4 ** (arguments.refine + 1)
    print(f"{elements} elements of order {arguments.order}, {len(blast.time_steps)} steps")
    print(f"{'iteration':>9} {'E0':>16} {'misfit':>12} {'d/d log E0':>12} {'wall [s]':>9}")
    iterates: list[Iterate] = []
    for i in recover(blast, integrator, observed, guess, arguments.iterations):
        wall = time.perf_counter() - began
        print(f"{len(iterates):>9} {i.e0:>16.12f} {i.misfit:>12.4e} {i.slope:>12.4e} {wall:>9.1f}")
        iterates.append(i)
    print(f"relative error of E0: {abs(iterates[-1].e0 / truth - 1):.1e}")
    picture = arguments.out / "recover_blast.png"
    save_convergence(iterates, truth, picture)
    print(f"picture: {picture}")


def main(argv: list[str] | None = None) -> int:
    return run_command(command_line(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
