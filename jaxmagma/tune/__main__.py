"""Tune a suite of programs on this device and keep the winners.

Winners go to the user's cache and, with --table, into a table that can be shipped with the package.
With --regret nothing is searched: the model's choices run against the winners that are known.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

import jaxmagma
from jaxmagma import choices
from jaxmagma.choices import MODEL, Book, Choice
from jaxmagma.programs.program import ElementProgram
from jaxmagma.tune import regret, suite
from jaxmagma.tune.device import Device, platform_of
from jaxmagma.tune.suite import SUITES, Case
from jaxmagma.tune.tuner import Tuning, entry, programs, tune_program


# Of arguments and results, and of time for one case.
MEGABYTES = {"cuda": 1000.0, "cpu": 48.0}
SECONDS = {"cuda": 6.0, "cpu": 15.0}
# With less time left no case is started.
LEAST_SECONDS = 1.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmagma.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=SUITES, help="default: the platform's")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases that match")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all cases together")
    parser.add_argument("--seconds", type=float, help="for one case (cpu: 15, gpu: 6)")
    parser.add_argument("--megabytes", type=float, help="size of a case (cpu: 48, gpu: 1000)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="add the winners to a table")
    parser.add_argument("--missing", action="store_true", help="only what the table lacks")
    parser.add_argument("--regret", type=Path, metavar="FILE", help="search nothing: compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--verbose", action="store_true", help="print every variant")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Row:
    """One line of the table at the end."""

    name: str
    choice: Choice
    seconds: float
    model_seconds: float
    gbytes: float
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.model_seconds / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.name:20} {self.gbytes:8.1f} GB/s {self.seconds * 1e3:9.4f} ms "
            f"{self.ratio:6.3f} x model  {self.choice}{self.note}"
        )


class Bar(Protocol):
    """What is used of tqdm, which need not be installed."""

    def write(self, line: str) -> None: ...
    def update(self, n: int) -> Any: ...
    def set_description(self, text: str) -> None: ...


class Lines:
    """Without tqdm, and where nobody looks at a bar: lines."""

    def write(self, line: str) -> None:
        print(line, flush=True)

    def update(self, n: int) -> None:
        pass

    def set_description(self, text: str) -> None:
        pass


@contextlib.contextmanager
def progress(total: int) -> Iterator[Bar]:
    try:
        from tqdm import tqdm
    except ImportError:
        yield Lines()
        return
    if not sys.stderr.isatty():
        yield Lines()
        return
    with tqdm(total=total, unit="case") as bar:
        yield bar


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    if args.list:
        print("\n".join(case.name for case in suite.build(args.suite or "gpu", args.cases)))
        return 0
    device = jax.devices()[0]
    platform = platform_of(device)
    arch = choices.architecture(platform)
    if platform not in MEGABYTES or not arch:
        print(f"there is no backend for {device.platform}", file=sys.stderr)
        return 2
    cases = suite.build(args.suite or ("cpu" if platform == "cpu" else "gpu"), args.cases)
    if not cases:
        print(f"no case matches {args.cases!r}", file=sys.stderr)
        return 2
    size = (args.megabytes or MEGABYTES[platform]) * 1e6
    run = Run(args, device, arch, size, args.seconds or SECONDS[platform])
    print(f"{device.device_kind} ({arch}), jax {jax.__version__}, {len(cases)} cases", flush=True)
    with progress(len(cases)) as bar:
        run.all(cases, bar)
    run.report()
    return 0


class Run:
    """One run of the command: its cases, and what came of them."""

    def __init__(
        self, args: argparse.Namespace, device: jax.Device, arch: str, size: float, each: float
    ) -> None:
        self.args = args
        self.device = device
        self.arch = arch
        self.size = size
        self.each = each
        self.book = Book(args.table, "table") if args.table else None
        self.started = time.perf_counter()
        self.rows: list[Row] = []
        self.tunings: dict[str, Tuning] = {}
        self.left_out: list[str] = []
        self.failed: dict[str, str] = {}

    def all(self, cases: Sequence[Case], bar: Bar) -> None:
        for case in cases:
            bar.set_description(case.name)
            if self.left() < LEAST_SECONDS:
                self.left_out.append(case.name)
            else:
                try:
                    self.one(case, bar)
                except Exception as error:  # one case that fails does not cost the others
                    self.failed[case.name] = f"{type(error).__name__}: {error}"
                    bar.write(f"{case.name:20} FAILED: {self.failed[case.name][:200]}")
            bar.update(1)

    def left(self) -> float:
        budget = math.inf if self.args.budget is None else self.args.budget
        return budget - (time.perf_counter() - self.started)

    def one(self, case: Case, bar: Bar) -> None:
        tasks = list(programs(case.function, *case.arguments(self.size)))
        for number, (program, extents) in enumerate(tasks):
            name = case.name if len(tasks) == 1 else f"{case.name}.{number}"
            entry_name = choices.entry_name(program, extents)
            if self.args.regret:
                self.compare(name, program, extents, bar)
                continue
            if self.args.missing and self.book and entry_name in self.book.entries(self.arch):
                continue
            seconds = min(self.each, self.left())
            tuning = tune_program(program, extents, seconds=seconds)
            self.tunings[name] = tuning
            if self.book:
                kept = entry(tuning, self.device.device_kind, name)
                self.book.add(self.arch, {entry_name: kept})
            best, model = tuning.winner, tuning.model
            note = f"  ({len(tuning.variants)} of {tuning.visited} timed)"
            row = Row(name, best.choice, best.seconds, model.seconds, best.gbytes, note)
            self.rows.append(row)
            bar.write(str(row))
            if self.args.verbose:
                bar.write(str(tuning))

    def compare(
        self, name: str, program: ElementProgram, extents: tuple[int, ...], bar: Bar
    ) -> None:
        """The model's choice against the known one, of the table or else of what calls use."""
        if self.book:
            found = self.book.entries(self.arch).get(choices.entry_name(program, extents))
            tuned = MODEL if found is None else choices.decoded(found, self.book.origin)
        else:
            tuned = choices.choose(program, extents, platform_of(self.device))
            found = None if tuned.origin == MODEL.origin else {}
        if found is None:
            self.left_out.append(name)
            return
        seconds = regret.compare(Device(program, extents, self.device), tuned)
        medians = {choice: statistics.median(x) for choice, x in seconds.items()}
        model = medians[MODEL]
        best = medians.get(tuned, model)
        row = Row(name, tuned, best, model, program.least_bytes(extents) / best / 1e9)
        self.rows.append(row)
        bar.write(str(row))

    def report(self) -> None:
        print(f"\n{len(self.rows)} programs in {time.perf_counter() - self.started:.0f} s")
        for row in self.rows:
            print(row)
        ratios = {row.name: row.ratio for row in self.rows}
        print(
            f"model's time over the winner's: {regret.geometric_mean(ratios.values()):.3f} "
            f"(geometric mean), {max(ratios.values(), default=1.0):.3f} at most"
        )
        if self.left_out:
            print(f"left out: {' '.join(self.left_out)}")
        for name, why in self.failed.items():
            print(f"failed: {name}: {why}")
        facts = {
            "device": self.device.device_kind,
            "architecture": self.arch,
            "jax": jax.__version__,
            "jaxmagma": jaxmagma.__version__,
            "megabytes": self.size / 1e6,
            "left_out": self.left_out,
            "failed": self.failed,
        }
        if self.args.regret:
            write(self.args.regret, regret.as_json(ratios, facts))
        if self.args.json:
            found = {name: tuning.as_json() for name, tuning in self.tunings.items()}
            write(self.args.json, {**regret.as_json(ratios, facts), "programs": found})


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
