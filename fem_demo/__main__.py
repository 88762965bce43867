"""The command line: ``python -m fem_demo [PROBLEM] [options]``, see ``--help``."""

import json
import sys
from argparse import Namespace
from functools import partial
from typing import Any

import jax

from fem_demo.animation import Film
from fem_demo.arguments import (
    command_line,
    require_matplotlib,
    run_command,
    writable_directory,
    writable_file,
)
from fem_demo.checkpoint import load_checkpoint, save_checkpoint
from fem_demo.errors import velocity_errors
from fem_demo.machine import machine
from fem_demo.mesh import coarse_mesh
from fem_demo.picture import Plane, save_picture
from fem_demo.progress import progress_bar
from fem_demo.rates import Rates, rates, table
from fem_demo.simulation import Configuration, Observation, Simulation, Stop
from fem_demo.vtk import save_vtk


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


def _check_outputs(arguments: Namespace, dim: int | None) -> None:
    """Everything that would go wrong after the run, before it."""
    if arguments.plot:
        require_matplotlib("--plot", "use --no-plot")
    if arguments.animate:
        require_matplotlib("--animate", "leave it out")
    if arguments.cut is not None and dim != 3:
        raise ValueError("--cut needs three dimensions")
    if arguments.animate and dim == 1:
        raise ValueError("--animate needs two or three dimensions")
    if arguments.plot or arguments.animate or arguments.vtk:
        writable_directory(arguments.out)
    if arguments.checkpoint_every is not None:
        if arguments.checkpoint is None:
            raise ValueError("--checkpoint-every needs --checkpoint FILE")
        if arguments.checkpoint_every < 1:
            raise ValueError(
                f"checkpoint-every must be at least 1, got {arguments.checkpoint_every}"
            )
    for file in (arguments.json, arguments.checkpoint):
        if file is not None:
            writable_file(file)


def summary(simulation: Simulation, measured: Rates) -> dict[str, Any]:
    """The result of a run as plain numbers."""
    c, o = simulation.configuration, simulation.observation()
    return {
        "problem": c.problem,
        "dim": c.dim,
        "order": c.order,
        "refine": c.refine,
        "mesh": c.mesh,
        "integrator": c.integrator,
        "assembly": c.assembly,
        "machine": machine(),
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
        "velocity_errors": (
            velocity_errors(simulation)._asdict() if simulation.problem.vortex else None
        ),
        "wall_s": simulation.wall_s,
        "compile_s": simulation.compile_s,
        "rates": measured.rate._asdict(),
        "phase_seconds": measured.seconds._asdict(),
    }


def _run(arguments: Namespace) -> None:
    configuration = _configuration(arguments)
    _check_outputs(arguments, configuration.dim)
    plane = None if arguments.cut is None else Plane.parse(arguments.cut)
    if plane is not None:
        plane.check(coarse_mesh(str(configuration.mesh)))
    _choose_platform(arguments.platform)
    jax.config.update("jax_enable_x64", True)

    simulation = Simulation(configuration)
    if arguments.restart is not None:
        load_checkpoint(simulation, arguments.restart)
    stops = []
    if arguments.checkpoint_every is not None:
        keep = partial(save_checkpoint, simulation, arguments.checkpoint)
        stops.append(Stop(keep, every_steps=arguments.checkpoint_every))
    film = Film(simulation, plane) if arguments.animate else None
    if film is not None:
        stops.append(film.stop)

    with progress_bar(simulation) as report:
        final = simulation.run(report, stops=stops)
    print(
        f"step {final.step}, t = {final.t:.6g}, dt = {final.dt:.6f}, |e| = {final.e_norm:.10e}, "
        f"energy change = {simulation.energy_change():.3e}, {simulation.wall_s:.1f} s, "
        f"after {simulation.compile_s:.1f} s of compilation"
    )
    if simulation.problem.vortex:
        errors = velocity_errors(simulation)
        print(
            f"velocity error: L_inf = {errors.l_inf:.10e}, L_1 = {errors.l_1:.10e}, "
            f"L_2 = {errors.l_2:.10e}"
        )
    if arguments.checkpoint is not None:
        save_checkpoint(simulation, arguments.checkpoint)
        print(f"checkpoint: {arguments.checkpoint}")
    _write_pictures(arguments, simulation, final, plane, film)
    if arguments.rates or arguments.json is not None:
        measured = rates(simulation)
        print(f"rates on {machine()}")
        print(table(measured))
        if arguments.json is not None:
            result = summary(simulation, measured)
            arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            print(f"json: {arguments.json}")


def _write_pictures(
    arguments: Namespace,
    simulation: Simulation,
    final: Observation,
    plane: Plane | None,
    film: Film | None,
) -> None:
    stem = arguments.out / simulation.configuration.problem
    if arguments.plot:
        picture = stem.with_suffix(".png")
        save_picture(simulation, final, picture, plane)
        print(f"picture: {picture}")
    if film is not None:
        animation = stem.with_suffix(".gif")
        film.save(animation)
        print(f"animation: {animation}")
    if arguments.vtk:
        file = stem.with_suffix(".vtu")
        save_vtk(simulation, final, file)
        print(f"vtk: {file}")


def main(argv: list[str] | None = None) -> int:
    return run_command(command_line(), _run, argv)


if __name__ == "__main__":
    sys.exit(main())
