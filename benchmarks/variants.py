"""Time the programs of a case with several choices of parameters of their kernels.

A choice is written as ``owner="quads",fetch=0``; an empty one leaves all to the model, and
``known`` is what calls use now, ``known,fetch=0`` that with another value of ``fetch``. The
parameters are those of ``Parameters`` in the backend's lowering. With ``--table`` the fastest goes
into a table, of those whose registers do not spill and that are faster than what is known by more
than ``--margin``.
"""

import argparse
import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import cases, measure
from benchmarks.record import Timing
from jaxmagma import choices
from jaxmagma.choices import MODEL, Book, Choice
from jaxmagma.lowering.kernel import Declined
from jaxmagma.lowering.rules import Candidate
from jaxmagma.tune.device import Device, Executable
from jaxmagma.tune.tuner import entry_of, programs


KNOWN = "known"


@dataclass(frozen=True)
class Task:
    """A program on a device, and what is compiled for it, by the texts of the choices."""

    name: str
    machine: Device
    compiled: Mapping[str, Future[tuple[Candidate, Executable]]]

    @property
    def entry_name(self) -> str:
        return choices.entry_name(self.machine.program, self.machine.extents)


def choice(text: str, machine: Device) -> Choice:
    """What ``name=value,...`` asks for.

    Raises:
      ValueError: it is something else.
    """
    known, _, more = text.partition(",")
    given: dict[str, Any] = {}
    if known == KNOWN:
        now = choices.choose(machine.program, machine.extents, machine.platform)
        if not more:
            return now
        given = dict(now.parameters or ())
    pairs = (more if known == KNOWN else text).split(",")
    try:
        split = (pair.split("=", 1) for pair in pairs if pair)
        given |= {name: ast.literal_eval(value) for name, value in split}
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{text!r} is not name=value, with values as in Python") from error
    # None leaves a parameter to the model, like one that is not there.
    given = {name: value for name, value in given.items() if value is not None}
    return Choice.of(given, "variants") if given else MODEL


def build(machine: Device, text: str) -> tuple[Candidate, Executable]:
    """The program compiled with the choice, and what its kernel takes.

    Raises:
      ValueError: there is no such kernel.
    """
    chosen = choice(text, machine)
    candidate = Candidate(chosen)
    if not chosen.plain:
        kernel = machine.lower(chosen)
        if isinstance(kernel, Declined):
            raise ValueError(kernel.reason)
        candidate.kernel, candidate.resources = kernel, machine.resources(kernel)
    return candidate, machine.compile(machine.stage(chosen))


def tasks(args: argparse.Namespace, executor: ThreadPoolExecutor) -> Iterator[Task]:
    """The programs of all cases that match."""
    texts = dict.fromkeys([*args.choices, *([KNOWN, ""] if args.table else [])])
    for workload in cases.build(["all"], args.megabytes * 1e6, args.cases):
        try:
            found = list(programs(workload.functions()["jm"], *workload.arguments))
        except ValueError as error:  # plain JAX runs it
            print(f"{workload.name}: {error}", flush=True)
            continue
        for number, (program, extents) in enumerate(found):
            machine = Device(program, extents, jax.devices()[0])
            compiled = {text: executor.submit(build, machine, text) for text in texts}
            yield Task(f"{workload.name}.{number}", machine, compiled)


def compare(task: Task, seconds: float) -> dict[str, tuple[Candidate, Timing]]:
    """Times what could be compiled, and prints a line for each choice."""
    built: dict[str, tuple[Candidate, Executable]] = {}
    failed: dict[str, str] = {}
    first: list[jax.Array] | None = None
    for text, one in task.compiled.items():
        error = one.exception()
        if error is not None:  # not raised here, where it would keep the arrays
            failed[text] = repr(error)
            continue
        try:
            built[text] = one.result()
            executable = built[text][1]
            if first is None:
                first = task.machine.outputs(executable)
            elif not task.machine.same(executable, first):
                failed[text] = "computes something else than the first"
        except Exception as error:  # of the compiler, the driver or XLA: others go on
            failed[text] = repr(error)
    fns = {text: executable for text, (_, executable) in built.items() if text not in failed}
    sets = [tuple(arrays) for arrays in task.machine.inputs]
    timings = measure.compare(fns, sets, measure.Effort(seconds, 3, 15))
    least_bytes = task.machine.program.least_bytes(task.machine.extents)
    for text in task.compiled:
        said = failed.get(text, "")
        if text in timings:
            median, candidate = timings[text].median, built[text][0]
            said = f"{least_bytes / median / 1e9:7.0f} GB/s {median * 1e3:9.4f} ms"
            said += f" {candidate.registers:4} registers" if candidate.registers else ""
            said += f", {candidate.spilled} bytes spilled" if candidate.spilled else ""
        print(f"{task.name:<20} {said}  {text}", flush=True)
    return {text: (built[text][0], timing) for text, timing in timings.items()}


def entry(
    task: Task, found: Mapping[str, tuple[Candidate, Timing]], margin: float
) -> dict[str, Any] | None:
    """What a table should have of the program instead; None if nothing else."""
    if not {KNOWN, ""} <= found.keys():
        return None
    seconds = {text: timing.median for text, (_, timing) in found.items()}
    clean = [text for text in found if not found[text][0].spilled]
    best = min(clean, key=lambda text: seconds[text], default=KNOWN)
    if seconds[best] >= seconds[KNOWN] * (1 - margin):
        return None
    elements, device = math.prod(task.machine.extents), task.machine.device.device_kind
    chosen = found[best][0].choice
    return entry_of(chosen, elements, seconds[best], seconds[""], device, task.name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("cases", metavar="REGEX", help="cases of all suites")
    parser.add_argument("choices", metavar="NAME=VALUE,...", nargs="*", default=[""])
    parser.add_argument("--megabytes", type=float, default=1000.0, help="size of a case")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each choice")
    parser.add_argument("--table", type=Path, metavar="FILE", help="add what is faster to it")
    parser.add_argument("--margin", type=float, default=0.01, help="as a part of the time")
    args = parser.parse_intermixed_args(argv)
    jax.config.update("jax_enable_x64", True)
    with ThreadPoolExecutor() as executor:
        waiting = list(tasks(args, executor))
        # Calls would wait for processors that are busy with the compiler.
        futures.wait([one for task in waiting for one in task.compiled.values()])
        while waiting:
            task = waiting.pop(0)  # which has its arrays only as long as it runs
            found = compare(task, args.seconds)
            kept = entry(task, found, args.margin) if args.table else None
            if kept is not None:
                Book(args.table, "table").add(task.machine.arch, {task.entry_name: kept})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
