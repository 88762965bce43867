"""Tune what the benchmarks measure and what the demo runs; add the winners to a shipped table.

The same programs and entries as those of ``python -m jaxmagma.tune``, for cases that need more
than the package has: global vectors, and the phases of a hydrodynamics run. With ``--count`` it
says what these programs do, and tunes nothing.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import cases
from fem_demo.hydrodynamics import both_rhs, point_data, velocity_mass
from fem_demo.simulation import Configuration, Simulation
from jaxmagma import choices
from jaxmagma.choices import Book
from jaxmagma.plans.plan import Pointwise, plan
from jaxmagma.programs.program import ElementProgram
from jaxmagma.tune.tuner import entry, programs, tune_program


Call = tuple[str, Callable[..., Any], list[jax.ShapeDtypeStruct]]


def measured(suite: str, pattern: str, megabytes: float) -> Iterator[Call]:
    """The cases of a suite of the benchmarks."""
    for workload in cases.build([suite], megabytes * 1e6, pattern):
        yield workload.name, workload.functions()["jm"], workload.arguments


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


def counted(program: ElementProgram, extents: Sequence[int]) -> str:
    """The work of a program, as it is planned."""
    planned = plan(program)
    points: Counter[str] = Counter()
    for step in planned.steps:
        if isinstance(step, Pointwise):
            points[step.function] += math.prod(step.shape)
    megabytes = program.least_bytes(extents) / 1e6
    return (
        f"{math.prod(extents):,} elements, least traffic {megabytes:.0f} MB; "
        f"of an element {planned.flops:,} flops, {points.total():,} of them on single values, "
        f"{points['div']:,} divisions and {points['sqrt']:,} roots"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--suite", default="ceiling", choices=cases.SUITES)
    parser.add_argument("--cases", default="^$", metavar="REGEX", help="cases of the suite")
    parser.add_argument("--orders", type=int, nargs="*", default=[], help="of Sedov runs")
    parser.add_argument("--seconds", type=float, default=4.0, help="for one program")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of a case")
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--table", type=Path, help="add the winners to this file")
    todo.add_argument("--count", action="store_true", help="say what the programs do instead")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    device = jax.devices()[0]
    platform = "cuda" if device.platform == "gpu" else "cpu"
    arch = choices.architecture(platform)
    book = None if args.count else Book(args.table, "table")
    started = time.perf_counter()
    calls = [call for order in args.orders for call in phases(order)]
    calls += measured(args.suite, args.cases, args.megabytes)
    for name, function, shapes in calls:
        for number, (program, extents) in enumerate(programs(function, *shapes)):
            if book is None:
                print(f"{name}.{number}: {counted(program, extents)}")
                continue
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
