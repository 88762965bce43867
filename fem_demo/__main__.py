"""The command line: ``python -m fem_demo [PROBLEM] [options]``, see ``--help``."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from fem_demo.arguments import command_line
from fem_demo.rates import rates
from fem_demo.simulation import Configuration, Observation, Simulation


def _configuration(arguments: Namespace) -> Configuration:
    names = Configuration.__dataclass_fields__
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return Configuration(**given).resolved()


def _choose_platform(platform: str | None) -> None:
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif platform == "gpu":
        try:
            jax.config.update("jax_default_device", jax.devices("gpu")[0])
        except RuntimeError as error:
            raise ValueError("--platform gpu: JAX finds no GPU") from error


def _writable_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to directory {directory}: {error.strerror}") from error


def _check_outputs(arguments: Namespace) -> None:
    """Everything that would go wrong after the run, before it."""
    if arguments.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'jaxmagma[demo]', or use --no-plot")
    if arguments.plot or arguments.vtk:
        _writable_directory(arguments.out)
    if arguments.json is not None:
        if arguments.json.is_dir():
            raise ValueError(f"cannot write {arguments.json}: it is a directory")
        _writable_directory(arguments.json.parent)


@contextmanager
def _progress_bar(simulation: Simulation) -> Iterator[Callable[[Observation], None]]:
    """Yields the function that shows an observation."""
    try:
        tqdm = import_module("tqdm")
    except ImportError:
        print("no progress bar without tqdm: pip install 'jaxmagma[demo]'", file=sys.stderr)
        yield lambda now: None
        return

    limit = simulation.configuration.max_steps
    bar = tqdm.tqdm(
        total=1.0,
        desc=simulation.problem.name,
        bar_format="{percentage:3.0f}%|{bar:20}| {desc} [{elapsed}<{remaining}]",
    )

    def report(now: Observation) -> None:
        done = now.t / simulation.t_final if simulation.t_final > 0 else 1.0
        if limit:
            done = max(done, now.step / limit)
        bar.n = min(done, 1.0)
        bar.set_description_str(
            f"step {now.step}, t {now.t:.4f}, dt {now.dt:.2e}, energy {now.energy:.8f}"
        )

    with bar:
        yield report


def summary(simulation: Simulation, with_rates: bool = True) -> dict[str, Any]:
    """The result of a run as plain numbers."""
    c, o = simulation.configuration, simulation.observation()
    out: dict[str, Any] = {
        "problem": c.problem,
        "dim": c.dim,
        "order": c.order,
        "refine": c.refine,
        "mesh": c.mesh,
        "integrator": c.integrator,
        "platform": jax.tree.leaves(simulation.progress)[0].device.platform,
        "step": o.step,
        "repeats": o.repeats,
        "t": o.t,
        "dt": o.dt,
        "e_norm": o.e_norm,
        "internal_energy": o.internal_energy,
        "kinetic_energy": o.kinetic_energy,
        "energy_change": simulation.energy_change(),
        "x_norm": o.x_norm,
        "v_norm": o.v_norm,
        "dofs_h1": simulation.dofs_h1,
        "dofs_l2": simulation.dofs_l2,
        "wall_s": simulation.wall_s,
    }
    if with_rates:
        out["rates"] = rates(simulation)._asdict()
    return out


def _run(arguments: Namespace) -> None:
    configuration = _configuration(arguments)
    _check_outputs(arguments)
    _choose_platform(arguments.platform)
    jax.config.update("jax_enable_x64", True)

    simulation = Simulation(configuration)
    with _progress_bar(simulation) as report:
        final = simulation.run(report)
    print(
        f"step {final.step}, t = {final.t:.6g}, dt = {final.dt:.6f}, |e| = {final.e_norm:.10e}, "
        f"energy change = {simulation.energy_change():.3e}, {simulation.wall_s:.1f} s"
    )
    if arguments.plot:
        from fem_demo.picture import save_picture

        picture = arguments.out / f"{configuration.problem}.png"
        save_picture(simulation, final, picture)
        print(f"picture: {picture}")
    if arguments.vtk:
        from fem_demo.vtk import save_vtk

        file = arguments.out / f"{configuration.problem}.vtu"
        save_vtk(simulation, final, file)
        print(f"vtk: {file}")
    if arguments.json is not None:
        result = summary(simulation)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        each = ", ".join(f"{name} {value:.3g}" for name, value in result["rates"].items())
        print(f"rates (millions per second): {each}")
        print(f"json: {arguments.json}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; bad input is one line and the exit code 2, a failed run 1."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    try:
        _run(arguments)
    except ValueError as error:
        parser.error(str(error))
    except (FloatingPointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
