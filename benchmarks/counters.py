"""How busy a GPU's units are in the kernels of some cases, by the counters of Nsight Compute.

``python -m benchmarks.counters --short RESULT.json --json FILE`` does so for all cases that fall
short of their goals in a result, ``--cases REGEX`` for those that match. It needs ``ncu`` on the
path, and leave to read counters.

Every case runs once, on random inputs. What Nsight Compute says of each launch is from several runs
of the same kernel, with caches emptied before each, at clocks as they are. Of a case with several
kernels the shares are means over their time.
"""

import argparse
import csv
import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks import cases, goals
from benchmarks.record import Counters, Run, machine
from benchmarks.workloads import Function, Workload
from jaxmagma.tune.tuner import programs


# What ``Counters`` has, and the counters that say it.
TIME = "gpu__time_duration.sum"
SHARES = {
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "double": "sm__pipe_shared_cycles_active.avg.pct_of_peak_sustained_active",
    "issued": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
}
WARPS = "sm__warps_active.avg.per_cycle_active"
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}

# Kernels that are specialised have this name; those that add up partial sums another one.
KERNEL = "kernel"
MARK = "launches: "


def counted(names: Sequence[str], megabytes: float) -> dict[str, Counters]:
    """What the counters say of each case, in a process of its own."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu, of Nsight Compute, is not on the path")
    metrics = ",".join((TIME, *SHARES.values(), WARPS))
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--metrics", metrics]
    command += ["--kernel-name", f"regex:^{KERNEL}$", sys.executable, "-m", "benchmarks.counters"]
    command += ["--megabytes", str(megabytes), "--launch", *names]
    folder = Path(__file__).parent.parent
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{done.stdout}")
    said = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    launches: dict[str, int] = json.loads(said.removeprefix(MARK))
    rows = list(read(done.stdout))
    if len(rows) != sum(launches.values()):
        raise SystemExit(f"{len(rows)} kernels were counted, and {launches} were launched")
    found, first = {}, 0
    for name, count in launches.items():
        found[name] = mean(name, rows[first : first + count])
        first += count
    return found


def read(printed: str) -> list[dict[str, float]]:
    """The rows of Nsight Compute's table, one for each launch; times are seconds."""
    lines = printed.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    unit = dict(zip(names, units, strict=True))
    found = []
    for row in rows:
        values = dict(zip(names, row, strict=True))
        numbers = {x: float(values[x].replace(",", "")) for x in (TIME, *SHARES.values(), WARPS)}
        numbers[TIME] *= SECONDS[unit[TIME]]
        found.append(numbers)
    return found


def mean(name: str, rows: Sequence[Mapping[str, float]]) -> Counters:
    """Of a case with several kernels."""
    seconds = sum(row[TIME] for row in rows)
    means = {
        field: sum(row[counter] * row[TIME] for row in rows) / seconds
        for field, counter in {**SHARES, "warps": WARPS}.items()
    }
    shares = {field: means[field] / 100 for field in SHARES}
    return Counters(name, seconds, **shares, warps=means["warps"])


def launch(names: Sequence[str], megabytes: float) -> None:
    """Runs each case once, and prints how many kernels it has.

    Inputs come from the host, without kernels: those of XLA would be examined, too.
    """
    every = {w.name: w for w in cases.build(["all"], megabytes * 1e6)}
    workloads = [every[name] for name in names]
    most = max(math.prod(shape) for w in workloads for shape in w.shapes)
    numbers = np.random.default_rng(0).uniform(-1, 1, most)
    launches = {}
    with ThreadPoolExecutor() as executor:
        for workload, (run, kernels) in zip(
            workloads, executor.map(_compiled, workloads), strict=True
        ):
            drawn = [numbers[: math.prod(x)].reshape(x) for x in workload.shapes]
            jax.block_until_ready(run(*_given(workload, drawn)))
            launches[workload.name] = kernels
    print(MARK + json.dumps(launches), flush=True)


def _given(workload: Workload, drawn: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arguments, made on the host."""
    numbers = [x.astype(workload.dtype) for x in drawn]
    if workload.given is None:
        return numbers
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return list(jax.tree.map(np.asarray, workload.given(*numbers)))


def _compiled(workload: Workload) -> tuple[Function, int]:
    """A case ready to run, and how many kernels it has."""
    function, arguments = workload.functions()["jm"], workload.arguments
    kernels = len(list(programs(function, *arguments)))
    return jax.jit(function).lower(*arguments).compile(), kernels


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--short", type=Path, metavar="RESULT", help="cases that fall short in it")
    which.add_argument("--cases", metavar="REGEX", help="cases that match")
    which.add_argument("--launch", nargs="+", metavar="CASE", help="run these, and count nothing")
    parser.add_argument("--megabytes", type=float, default=300.0, help="of a case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was counted")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if args.launch:
        launch(args.launch, args.megabytes)
        return
    if args.short:
        names = goals.short(Run.load(args.short).results)
    else:
        names = [w.name for w in cases.build(["all"], args.megabytes * 1e6, args.cases)]
    run = Run(machine(), {"megabytes": args.megabytes})
    run.counters = counted(names, args.megabytes)
    for x in run.counters.values():
        print(
            f"{x.case:<24}{x.seconds * 1e6:>9.1f} us  memory {x.memory:4.0%}  L1 {x.l1:4.0%}  "
            f"double {x.double:4.0%}  issued {x.issued:4.0%}  {x.warps:.1f} warps"
        )
    if args.json:
        run.save(args.json)


if __name__ == "__main__":
    main()
