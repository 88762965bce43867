"""The options of the command line, and what they may name."""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from fem_demo.integrators import INTEGRATORS
from fem_demo.mesh import COARSE_MESHES
from fem_demo.problems import PROBLEMS
from fem_demo.simulation import ASSEMBLIES, Configuration


class OneLineParser(argparse.ArgumentParser):
    """Ends with the exit code 2 after one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    argv: list[str] | None,
) -> int:
    """Runs a command; bad input is one line and the exit code 2, a failed run 1."""
    arguments = parser.parse_args(argv)
    try:
        run(arguments)
    except ValueError as error:
        parser.error(str(error))
    except (FloatingPointError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return 0


def require_matplotlib(what: str, otherwise: str = "") -> None:
    if find_spec("matplotlib") is None:
        alternative = f", or {otherwise}" if otherwise else ""
        raise ValueError(f"{what} needs matplotlib: pip install 'jaxmagma[demo]'{alternative}")


def writable_directory(directory: Path) -> None:
    """Makes it if need be; ValueError if that fails, or if nothing can be written to it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to directory {directory}: {error.strerror}") from error


def writable_file(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f"cannot write {file}: it is a directory")
    writable_directory(file.parent)


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are values; None is the problem's choice."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def command_line() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="fem_demo",
        description="High-order Lagrangian hydrodynamics on jaxmagma.",
        epilog="Mesh, refinement and end time are by default the problem's own.",
        formatter_class=_Defaults,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "problem",
        nargs="?",
        metavar="PROBLEM",
        help=", ".join(PROBLEMS),
    )
    add("--dim", type=int, choices=(1, 2, 3), help="default: that of the mesh, or 2")
    add("--order", type=int, metavar="K", help="degree of position and velocity")
    add("--refine", type=int, metavar="R", help="times that the mesh is refined")
    add("--mesh", metavar="NAME", help=", ".join(COARSE_MESHES))
    add("--t-final", type=float, metavar="T", help="the time to end at")
    add("--integrator", metavar="NAME", help=" or ".join(INTEGRATORS))
    add("--assembly", metavar="NAME", help="of the solves: " + " or ".join(ASSEMBLIES))
    add("--cfl", type=float, metavar="C", help="time step over the stable one")
    add("--e0", type=float, metavar="E0", help="energy of the blast, in all orthants together")
    add("--cg-tol", type=float, metavar="TOL", help="relative tolerance of the solves")
    add("--cg-max-iter", type=int, metavar="N", help="most iterations of a solve")
    add("--max-steps", type=int, metavar="N", help="end after N steps, if not at T before")
    add("--platform", choices=("cpu", "gpu"), help="default: whatever there is")
    add("--out", type=Path, metavar="DIR", default=Path("fem_demo_output"), help="for the files")
    add("--checkpoint", type=Path, metavar="FILE", help="write the run's state, to go on from")
    add("--checkpoint-every", type=int, metavar="N", help="every N steps, not only at the end")
    add("--restart", type=Path, metavar="FILE", help="go on from a checkpoint of the same run")
    add("--rates", action="store_true", help="measure and print the rates of the phases")
    add("--json", type=Path, metavar="FILE", help="write a summary, with the rates of the phases")
    add(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a picture of density, speed and energy on the curved mesh",
    )
    add("--cut", metavar="AXIS=X", help="in 3D: the section with a plane, as z=0.5")
    add("--animate", action="store_true", help="an animated picture of the density")
    add("--vtk", action="store_true", help="a file for ParaView")
    parser.set_defaults(**asdict(Configuration()))
    return parser
