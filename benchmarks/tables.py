"""Tune what the benchmarks measure and what the demo runs; add the winners to a shipped table.

The same programs and entries as those of ``python -m jaxmagma.tune``, for cases that need more
than the package has: global vectors, and the phases of a hydrodynamics run.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import cases
from fem_demo.hydrodynamics import both_rhs, point_data, velocity_mass
from fem_demo.simulation import Configuration, Simulation
from jaxmagma import choices
from jaxmagma.choices import Book
from jaxmagma.tune.tuner import entry, programs, tune_program


Call = tuple[str, Callable[..., Any], list[jax.ShapeDtypeStruct]]


def measured(suite: str, pattern: str, megabytes: float) -> Iterator[Call]:
    """The cases of a suite of the benchmarks."""
    for workload in cases.build([suite], megabytes * 1e6, pattern):
        shapes = [jax.ShapeDtypeStruct(s, workload.dtype) for s in workload.shapes]
        yield workload.name, workload.functions()["jm"], shapes


def phases(order: int) -> Iterator[Call]:
    """The kernels of a three-dimensional Sedov run."""
    simulation = Simulation(Configuration("sedov", dim=3, order=order, refine=4, max_steps=1))
    hydro, progress = simulation.hydro, simulation.progress
    state = jax.eval_shape(lambda: progress.state)
    points = jax.eval_shape(lambda: progress.points)
    name = f"sedov-3d/k{order}"
    yield f"{name} update", lambda s: point_data(hydro, s), [state]
    yield f"{name} forces", lambda p, v: both_rhs(hydro, p, v), [points, state.v]
    yield f"{name} mass", lambda v: velocity_mass(hydro, v), [state.v]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--suite", default="ceiling", choices=cases.SUITES)
    parser.add_argument("--cases", default="^$", metavar="REGEX", help="cases of the suite")
    parser.add_argument("--orders", type=int, nargs="*", default=[], help="of Sedov runs")
    parser.add_argument("--seconds", type=float, default=4.0, help="for one program")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of a case")
    parser.add_argument("--table", type=Path, required=True)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    platform = "cuda" if device.platform == "gpu" else "cpu"
    arch, book = choices.architecture(platform), Book(args.table, "table")
    started = time.perf_counter()
    calls = [call for order in args.orders for call in phases(order)]
    calls += measured(args.suite, args.cases, args.megabytes)
    for name, function, shapes in calls:
        for number, (program, extents) in enumerate(programs(function, *shapes)):
            left = args.budget - (time.perf_counter() - started)
            if left < 1:
                print(f"{name}.{number}: no time left")
                continue
            tuning = tune_program(program, extents, seconds=min(args.seconds, left), store=False)
            kept = entry(tuning, device.device_kind, f"{name}.{number}")
            book.add(arch, {choices.entry_name(program, extents): kept})
            print(
                f"{name}.{number}: {tuning.winner.gbytes:.0f} GB/s, {tuning.regret:.2f} x model, "
                f"{tuning.winner.choice}",
                flush=True,
            )


if __name__ == "__main__":
    main()
