"""What a run leaves behind: its results, on what machine, as a JSON file."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from fem_demo.machine import processor
from jaxmagma.tune.device import cpu_cache_bytes


@dataclass(frozen=True)
class Timing:
    """Seconds for one call, over the rounds measured."""

    median: float
    best: float
    quartiles: tuple[float, float]
    calls: int


@dataclass(frozen=True)
class Result:
    """One case, on a device that copies ``copy`` bytes and does ``peak`` operations in a second."""

    case: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    least_bytes: int
    flops: int
    copy: float
    peak: float
    timings: Mapping[str, Timing]  # of "jm", and of what it is compared with
    error: float | None  # of jaxmagma against a peer, relative to the largest value
    exact_error: float | None  # of its first rows against extended precision
    platform: str
    device: str
    cores: int
    compared: "Result | None" = None  # an earlier one of the case with peers, if this has none

    @property
    def seconds(self) -> float:
        return self.timings["jm"].median

    @property
    def bandwidth(self) -> float:
        return self.least_bytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def of_copy(self) -> float:
        return self.bandwidth / self.copy

    @property
    def of_roofline(self) -> float:
        return max(self.least_bytes / self.copy, self.flops / self.peak) / self.seconds

    def speedup(self, peer: str) -> float | None:
        """How many times faster than a peer in the same run."""
        if peer in self.timings:
            return self.timings[peer].median / self.seconds
        return None if self.compared is None else self.compared.speedup(peer)

    def known(self, name: str) -> Timing | None:
        """The timing of jaxmagma, or of a peer, be it from an earlier run."""
        found = self.timings.get(name)
        return found if found or self.compared is None else self.compared.known(name)


@dataclass(frozen=True)
class FirstCall:
    """Seconds of a program's first call in a process."""

    case: str
    cold: float
    cached: float  # its kernel was on disk
    jnp: float  # of jnp.einsum


@dataclass(frozen=True)
class Counters:
    """How busy units were in the kernels of a case: parts of what they could do, and warps."""

    case: str
    seconds: float
    memory: float  # of its bandwidth
    l1: float  # the cache that shared memory is part of
    double: float  # tensor cores and multiply-adds, one pipe
    issued: float  # cycles in which an instruction was issued
    warps: float  # of a multiprocessor at a time


@dataclass
class Run:
    """All results of one run on one machine."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    results: dict[str, Result] = field(default_factory=dict)
    first_calls: list[FirstCall] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    # Cases of earlier runs whose kernels have changed since; added by hand.
    outdated: list[str] = field(default_factory=list)
    counters: dict[str, Counters] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        derived = {
            r.case: {
                "gigabytes_per_second": r.bandwidth / 1e9,
                "teraflops_per_second": r.flops_per_second / 1e12,
                "of_copy": r.of_copy,
                "of_roofline": r.of_roofline,
                "speedups": {peer: r.speedup(peer) for peer in r.timings if peer != "jm"},
            }
            for r in self.results.values()
        }
        record = {
            "machine": self.machine,
            "settings": self.settings,
            "cases": [_plain(asdict(r)) | derived[r.case] for r in self.results.values()],
            "first_calls": [asdict(x) for x in self.first_calls],
            "failures": self.failures,
            **({"outdated": self.outdated} if self.outdated else {}),
            **({"counters": [asdict(x) for x in self.counters.values()]} if self.counters else {}),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> "Run":
        record = json.loads(path.read_text())
        machine = record["machine"]
        known = {k: machine[k] for k in ("platform", "device", "cores")}
        fields = Result.__dataclass_fields__
        results = {}
        for case in record["cases"]:
            values = {k: v for k, v in case.items() if k in fields} | known
            values["timings"] = {name: Timing(**t) for name, t in case["timings"].items()}
            results[case["case"]] = Result(**values)
        first_calls = [FirstCall(**x) for x in record["first_calls"]]
        outdated = record.get("outdated", [])
        counters = {x["case"]: Counters(**x) for x in record.get("counters", [])}
        return Run(
            machine,
            record["settings"],
            results,
            first_calls,
            record["failures"],
            outdated,
            counters,
        )


def _plain(case: dict[str, Any]) -> dict[str, Any]:
    """Without what the whole run has in common."""
    common = ("platform", "device", "cores", "compared")
    return {k: v for k, v in case.items() if k not in common}


def together(runs: Sequence[Run]) -> Run:
    """Runs on one kind of device as one; where two have the same case, the later one counts.

    If it compared a case with nothing, speed-ups are those of an earlier one. What it says is
    outdated does not count at all.
    """
    runs = sorted(runs, key=lambda run: str(run.machine.get("date")))
    devices = {run.machine["device"] for run in runs}
    if len(devices) != 1:
        raise ValueError(f"not results of one device: {', '.join(sorted(devices)) or 'none'}")
    timed = [run for run in runs if run.results] or runs
    whole = Run(timed[-1].machine, timed[-1].settings)
    for run in runs:
        whole.results = {n: x for n, x in whole.results.items() if n not in run.outdated}
        for name, result in run.results.items():
            before = whole.results.get(name)
            if before is not None and not result.timings.keys() - {"jm"}:
                result = replace(result, compared=before.compared or before)
            whole.results[name] = result
        whole.failures |= run.failures
        whole.first_calls = run.first_calls or whole.first_calls
        whole.counters |= run.counters
    # In the order of the largest run, and what it lacks behind.
    order = sorted(runs, key=lambda run: len(run.results), reverse=True)
    names = dict.fromkeys(name for run in order for name in run.results)
    whole.results = {name: whole.results[name] for name in names if name in whole.results}
    return whole


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(x) for x in values]
    return math.exp(sum(logarithms) / len(logarithms))


# ---- The machine -----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    cpu = processor()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else cpu,
        "driver": _driver() if device.platform == "gpu" else None,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": cpu_cache_bytes(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "numpy", "jaxmagma")
        },
        "environment": {
            name: os.environ[name] for name in ("XLA_FLAGS", "GLIBC_TUNABLES") if name in os.environ
        },
        "commit": _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
        ),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
