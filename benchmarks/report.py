"""What a run leaves behind: lines on the terminal, a JSON file, a plot."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import Ceilings, Timing


@dataclass(frozen=True)
class Result:
    """One case: jaxmagma against jnp on the same inputs."""

    case: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    least_bytes: int
    flops: int
    jm: Timing
    jnp: Timing
    jm_compile: float  # seconds of the first call
    jnp_compile: float
    error: float  # of jaxmagma against jnp, relative to the largest value
    extended_error: dict[str, float] | None  # of each against extended precision

    @property
    def speedup(self) -> float:
        return self.jnp.median / self.jm.median

    @property
    def bandwidth(self) -> float:
        return self.least_bytes / self.jm.median

    def of_copy(self, ceilings: Ceilings) -> float:
        return self.bandwidth / ceilings.copy

    def of_roofline(self, ceilings: Ceilings) -> float:
        return ceilings.seconds(self.least_bytes, self.flops) / self.jm.median


# ---- Terminal --------------------------------------------------------------------------------

HEADER = (
    f"{'case':<28}{'jnp ms':>10}{'jm ms':>10}{'GB/s':>8}{'% copy':>8}{'% roof':>8}"
    f"{'speed-up':>10}{'error':>9}"
)


def line(r: Result, ceilings: Ceilings) -> str:
    text = (
        f"{r.case:<28}{r.jnp.median * 1e3:>10.3f}{r.jm.median * 1e3:>10.3f}"
        f"{r.bandwidth / 1e9:>8.1f}{r.of_copy(ceilings):>8.0%}{r.of_roofline(ceilings):>8.0%}"
        f"{r.speedup:>9.2f}x{r.error:>9.0e}"
    )
    if r.extended_error:
        text += "  against extended: " + ", ".join(
            f"{k} {v:.0e}" for k, v in r.extended_error.items()
        )
    return text


# ---- JSON ------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    cpu = _cpu()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else cpu,
        "driver": _driver() if device.platform == "gpu" else None,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": last_level_cache(),
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


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def last_level_cache() -> int:
    """Bytes of the largest CPU cache; 32 MiB if unknown."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    found = [s.read_text().strip() for s in sizes]
    return max((int(s[:-1]) * units[s[-1]] for s in found if s[-1:] in units), default=32 << 20)


def as_json(results: Sequence[Result], ceilings: Ceilings, settings: dict[str, Any]) -> str:
    cases = [
        asdict(r)
        | {
            "speedup": r.speedup,
            "gigabytes_per_second": r.bandwidth / 1e9,
            "gigaflops_per_second": r.flops / r.jm.median / 1e9,
            "of_copy": r.of_copy(ceilings),
            "of_roofline": r.of_roofline(ceilings),
        }
        for r in results
    ]
    record = {
        "machine": machine(),
        "settings": settings,
        "ceilings": asdict(ceilings) | {"copy": ceilings.copy},
        "cases": cases,
    }
    return json.dumps(record, indent=1) + "\n"


# ---- Plot ------------------------------------------------------------------------------------

PANELS = {
    "bk1": "mass operator, bk1",
    "bk1-traced": "bk1, traced bases",
    "bk1-grad-ud": "gradient of bk1",
    "interp3d": "interpolation, interp3d",
    "chain": "two-dimensional mass, chain",
    "bgemm": "batched matrix product, bgemm",
}


def plot(path: Path, results: Sequence[Result], ceilings: Ceilings, title: str) -> None:
    """Effective bandwidth over the size, one panel for each family, with the speed-ups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    families: dict[str, list[tuple[int, Result]]] = {}
    for r in results:
        family, _, size = r.case.partition("/")
        if family in PANELS and re.fullmatch(r"[pn]\d+", size):
            families.setdefault(family, []).append((int(size[1:]), r))
    if not families:
        raise ValueError("no case of this run belongs in the plot")

    drawn = [r for points in families.values() for _, r in points]
    lowest = min(r.least_bytes / max(r.jm.median, r.jnp.median) for r in drawn) / 1e9
    columns = min(3, len(families))
    rows = -(-len(families) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4 * columns, 3 * rows),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for ax in axes.flat:
        ax.axis("off")
    shown = [f for f in PANELS if f in families]
    for ax, family in zip(axes.flat, shown, strict=False):
        points = sorted(families[family], key=lambda point: point[0])
        x = [size for size, _ in points]
        ax.axis("on")
        ax.axhline(ceilings.copy / 1e9, color="0.5", linestyle="--", linewidth=1, label="copy")
        ax.plot(x, [r.bandwidth / 1e9 for _, r in points], "o-", color="#0072b2", label="jm.einsum")
        jnp_bandwidth = [r.least_bytes / r.jnp.median / 1e9 for _, r in points]
        ax.plot(x, jnp_bandwidth, "s-", color="#d55e00", label="jnp.einsum")
        for at, r in points:
            ax.annotate(
                f"{r.speedup:.0f}x" if r.speedup >= 9.95 else f"{r.speedup:.1f}x",
                (at, r.bandwidth / 1e9),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
        by_degree = points[0][1].case.split("/")[1][0] == "p"
        if not by_degree:
            ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_ylim(lowest / 1.5, ceilings.copy / 1e9 * 2)
        ax.set_xticks(x, [str(size) for size in x])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ax.set_title(PANELS[family], fontsize=10)
        ax.set_xlabel("degree p" if by_degree else "size n")
        ax.grid(True, alpha=0.3)
    for row in axes:
        row[0].set_ylabel("effective GB/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
