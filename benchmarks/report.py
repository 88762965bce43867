"""Tables and plots of results.

``python -m benchmarks.report FILE... --plot FOLDER`` prints and draws what some JSON files say, and
``--update PAGE...`` renders anew the tables of Markdown pages. Such a table stands between

    <!-- table NAME FILE... -->
    <!-- end -->

where NAME is one of those in ``TABLES``, and FILE a pattern such as ``h200*.json``, relative to
``benchmarks/results``; of a case that several files have, the last one counts. The table
``choices sm_90.json`` is of what tuning found for an architecture, and ships with the package.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cases, goals
from benchmarks.goals import Verdict
from benchmarks.record import Result, Run, geometric_mean, together


RESULTS = Path(__file__).parent / "results"
SHIPPED = Path(__file__).parent.parent / "jaxmagma" / "tables"


# ---- Terminal --------------------------------------------------------------------------------

HEADER = (
    f"{'case':<32}{'ms':>9}{'GB/s':>8}{'TFLOP/s':>9}{'% copy':>8}{'% roof':>8}{'jnp':>8}{'vmap':>8}"
    f"{'error':>8}  goal"
)


def line(r: Result, verdict: Verdict | None) -> str:
    def faster(peer: str) -> str:
        ratio = r.speedup(peer)
        return "" if ratio is None else f"{ratio:.2f}x"

    worst = max((e for e in (r.error, r.exact_error) if e is not None), default=None)
    goal = "" if verdict is None else verdict.goal + ("" if verdict.met else "  <- short")
    return (
        f"{r.case:<32}{r.seconds * 1e3:>9.3f}{r.bandwidth / 1e9:>8.1f}"
        f"{r.flops_per_second / 1e12:>9.3g}{r.of_copy:>8.1%}{r.of_roofline:>8.1%}"
        f"{faster('jnp'):>8}{faster('vmap'):>8}{'' if worst is None else f'{worst:.0e}':>8}  {goal}"
    )


def closing(run: Run) -> Iterator[str]:
    """What all cases together come to, and which ones fall short."""
    yield ""
    judged = list(_judged(run))
    short = [(r, v) for r, v in judged if not v.met]
    if judged:
        yield f"{len(judged) - len(short)} of {len(judged)} cases with a goal reach it"
    for r, verdict in short:
        yield f"  {r.case:<32}{verdict.reached:>14}, goal {verdict.goal}"
    yield from goals.overall(run.results)
    for call in run.first_calls:
        yield (
            f"first call of {call.case}: {call.cold:.2f} s cold, {call.cached * 1e3:.0f} ms "
            f"with its kernel on disk (goal {goals.FIRST_CALL_SECONDS['cold']:g} s and "
            f"{goals.FIRST_CALL_SECONDS['cached'] * 1e3:.0f} ms); jnp.einsum {call.jnp:.2f} s"
        )
    for case, reason in run.failures.items():
        yield f"FAILED: {case}: {reason}"


def _judged(run: Run) -> Iterator[tuple[Result, Verdict]]:
    for r in run.results.values():
        verdict = goals.judge(r, run.results)
        if verdict is not None:
            yield r, verdict


# ---- Tables ----------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine_table(run: Run) -> str:
    m = run.machine
    known = next(iter(run.results.values()), None)
    rows = [
        ("device", f"{m['device']}" + (f", driver {m['driver']}" if m["driver"] else "")),
        ("host", f"{m['cores']} cores, {m['cpu']}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in m["versions"].items())),
        ("latest run", m["date"][:10] + (f", commit {m['commit']}" if m["commit"] else "")),
    ]
    if known is not None:
        rows.append(("copy", f"{known.copy / 1e9:.0f} GB/s"))
    for dtype in dict.fromkeys(r.dtype for r in run.results.values()):
        peak = next(r.peak for r in run.results.values() if r.dtype == dtype)
        rows.append((f"{dtype} product", f"{peak / 1e12:.3g} TFLOP/s"))
    return _table(("", ""), rows)


def goals_table(run: Run) -> str:
    """For each goal how many cases reach it, and the lowest one."""
    groups: dict[tuple[str, str], list[tuple[Result, Verdict]]] = {}
    for r, verdict in _judged(run):
        groups.setdefault((_family(r), verdict.goal), []).append((r, verdict))
    rows = []
    for (family, goal), members in groups.items():
        lowest, verdict = min(members, key=lambda m: float(re.sub("[^0-9.]", "", m[1].reached)))
        met = sum(v.met for _, v in members)
        rows.append(
            (family, goal, f"{met} of {len(members)}", f"{verdict.reached}, {_size(lowest)}")
        )
    return _table(("case", "goal", "reached by", "lowest"), rows)


def short_table(run: Run) -> str:
    """The cases that do not reach their goal."""
    rows = []
    for r, v in _judged(run):
        if not v.met:
            x = run.counters.get(r.case)
            busy = [f"{y:.0%}" for y in (x.memory, x.l1, x.double, x.issued)] if x else [""] * 4
            warps = f"{x.warps:.0f}" if x else ""
            rows.append((r.case, v.reached, v.goal, f"{r.bandwidth / 1e9:.0f}", *busy, warps))
    header = ("case", "reached", "goal", "GB/s", "memory", "L1", "double", "issued", "warps")
    return _table(header, rows)


def speed_table(run: Run) -> str:
    """The range of each family's bandwidth, and how many times faster than plain JAX."""
    return _ranges(_families(run))


def headline_table(run: Run) -> str:
    """The same of some families, in words."""
    families = _families(run)
    return _ranges({words: families[f] for f, words in HEADLINES.items() if f in families})


def _ranges(families: dict[str, list[Result]]) -> str:
    rows = []
    for name, members in families.items():
        sizes = [_size(r) for r in members]
        whole = f"{sizes[0]} … {sizes[-1].split(' ')[-1]}" if len(sizes) > 1 else sizes[0]
        rows.append(
            (
                f"{name}, {whole}" if re.match("[pnkc] = ", whole) else name,
                _range([r.bandwidth / 1e9 for r in members], ".0f"),
                _range([100 * r.of_roofline for r in members], ".0f"),
                *(
                    _range([s for r in members if (s := r.speedup(peer))], ".2g")
                    for peer in ("jnp", "vmap")
                ),
            )
        )
    return _table(("case", "GB/s", "% of roofline", "× jnp.einsum", "× jax.vmap"), rows)


def precisions_table(run: Run) -> str:
    """Of each family in another dtype than float64: the share of the roofline at every size.

    Of whole programs, those that are array code.
    """
    rows = []
    for name, members in _families(run).items():
        if members[0].dtype == "float64" or name.startswith("bgemm") or ":" in name:
            continue
        letter = members[0].case.split("/")[1][0]
        shares = (
            f"{r.case.split('/')[1].lstrip(letter)}: {100 * r.of_roofline:.0f}" for r in members
        )
        rows.append((name, f"{letter} = {', '.join(shares)}"))
    return _table(("case", "% of roofline"), sorted(rows, key=lambda x: x[0].split("-")[-1]))


def programs_table(run: Run) -> str:
    """Of whole programs the share of the roofline, of plain array code and of every spelling."""
    families = {w.family for w in cases.build(["programs"], 1)}
    rows: dict[str, dict[str, Result]] = {}  # by program and size, then by spelling
    for r in run.results.values():
        if _family(r) in families:
            program, _, spelling = _family(r).partition(":")
            rows.setdefault(f"{program}, {_size(r)}", {})[spelling] = r
    others = dict.fromkeys(spelling for row in rows.values() for spelling in row if spelling)

    def cells(row: dict[str, Result]) -> Iterator[str]:
        plain = row.get("")
        faster = None if plain is None else plain.speedup("vmap")
        yield "" if plain is None else f"{100 * plain.of_roofline:.0f}"
        yield "" if faster is None else f"{faster:.1f}×"
        for name in others:
            yield f"{100 * row[name].of_roofline:.0f}" if name in row else ""

    return _table(
        ("program", "% of roofline", "× jax.vmap", *others),
        [(program, *cells(row)) for program, row in rows.items()],
    )


def mean_table(run: Run) -> str:
    """Geometric means of the speed-ups, and the least, of each family."""
    rows = []
    for family, members in _families(run).items():
        faster = {r.case: s for r in members if (s := r.speedup("jnp")) is not None}
        if faster:
            least = min(faster, key=faster.__getitem__)
            rows.append(
                (
                    family,
                    f"{geometric_mean(faster.values()):.1f}×",
                    f"{faster[least]:.1f}×, {least.split('/')[1]}",
                )
            )
    return _table(("case", "geometric mean over jnp.einsum", "least"), rows)


def libceed_table(run: Run) -> str:
    ratios = goals.over_libceed(run.results)
    rows = [
        (
            case,
            f"{run.results[case].bandwidth / 1e9:.0f}",
            f"{run.results[case].bandwidth / 1e9 / ratio:.0f}",
            f"{ratio:.2f}×",
        )
        for case, ratio in ratios.items()
    ]
    if ratios:
        rows.append(("geometric mean", "", "", f"{geometric_mean(ratios.values()):.2f}×"))
    return _table(("case", "jaxmagma GB/s", "libCEED GB/s", "ratio"), rows)


def first_call_table(run: Run) -> str:
    rows = [
        (c.case, f"{c.cold:.2f} s", f"{c.cached * 1e3:.0f} ms", f"{c.jnp:.2f} s")
        for c in run.first_calls
    ]
    return _table(("case", "cold", "kernel on disk", "jnp.einsum"), rows)


def case_table(run: Run) -> str:
    """Every case."""
    rows = []
    for r in run.results.values():
        speedups = [r.speedup(peer) for peer in ("jnp", "vmap")]
        rows.append(
            (
                r.case,
                f"{r.bandwidth / 1e9:.0f}",
                f"{r.flops_per_second / 1e12:.3g}",
                f"{r.of_copy:.0%}",
                f"{r.of_roofline:.0%}",
                *("" if s is None else f"{s:.1f}×" for s in speedups),
            )
        )
    header = ("case", "GB/s", "TFLOP/s", "of copy", "of roofline", "× jnp.einsum", "× jax.vmap")
    return _table(header, rows)


def choices_table(path: Path) -> str:
    """What tuning found for the programs of a table that ships with the package."""
    (entries,) = json.loads(path.read_text())["choices"].values()
    of_element = {w.name: w.least_bytes for w in cases.build(["all"], 1)}
    rows = []
    for x in sorted(entries.values(), key=lambda x: _natural(x["name"])):
        ratio = x["model_seconds"] / x["seconds"]
        chosen = ", ".join(f"{k} = {v}" for k, v in x.get("parameters", {}).items())
        times = (f"{1e3 * x[key]:.3f}" for key in ("model_seconds", "seconds"))
        bytes_ = of_element.get(x["name"], 0) * x["elements"]
        rate = f"{bytes_ / x['seconds'] / 1e9:.0f}" if bytes_ else ""
        rows.append((x["name"], f"{x['elements']:,}", *times, f"{ratio:.2f}", rate, chosen))
    mean = geometric_mean(x["model_seconds"] / x["seconds"] for x in entries.values())
    rows.append(("geometric mean", "", "", "", f"{mean:.2f}", "", ""))
    header = ("program", "elements", "model, ms", "tuned, ms", "ratio", "tuned, GB/s", "parameters")
    return _table(header, rows)


def _natural(name: str) -> list[str | int]:
    """A key that sorts p2 before p10."""
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


TABLES: dict[str, Callable[[Run], str]] = {
    "machine": machine_table,
    "goals": goals_table,
    "short": short_table,
    "headline": headline_table,
    "speed": speed_table,
    "precisions": precisions_table,
    "programs": programs_table,
    "mean": mean_table,
    "libceed": libceed_table,
    "first-call": first_call_table,
    "cases": case_table,
}


def updated(page: str) -> str:
    """A Markdown page with its tables rendered from the files that they name."""

    def render(found: re.Match[str]) -> str:
        name, *files = found["what"].split()
        if name == "choices":
            table = choices_table(SHIPPED / files[0])
        else:
            paths = [path for pattern in files for path in sorted(RESULTS.glob(pattern))]
            table = TABLES[name](together([Run.load(path) for path in paths]))
        return f"<!-- table {found['what']} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table (?P<what>[^>]*?) -->\n.*?<!-- end -->", render, page, flags=re.S)


def _family(r: Result) -> str:
    return r.case.split("/")[0]


def _size(r: Result) -> str:
    size = r.case.split("/")[1]
    return re.sub(r"^([pnkc])(\d+)$", r"\1 = \2", size)


def _families(run: Run) -> dict[str, list[Result]]:
    """By size in each family."""
    found: dict[str, list[Result]] = {}
    for r in run.results.values():
        found.setdefault(_family(r), []).append(r)
    for members in found.values():
        members.sort(key=lambda r: [int(x) for x in re.findall(r"\d+", r.case.split("/")[1])])
    return found


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    low, high = (f"{float(format(x, form)):g}" for x in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


# ---- Plots -----------------------------------------------------------------------------------

PANELS = {
    "bk1": "mass operator, bk1",
    "bk3": "diffusion, bk3",
    "bk5": "collocated diffusion, bk5",
    "bk1-grad": "gradient of bk1",
    "bk3-grad": "gradient of bk3",
    "interp3d": "interpolation, interp3d",
    "chain": "two-dimensional mass, chain",
    "chain-grad": "gradient of chain",
    "bgemm": "batched matrix product, bgemm",
}
HEADLINES = {k: v for k, v in PANELS.items() if k != "bgemm"} | {
    "bk3-global": "diffusion of a global vector",
    "corner-force": "hydrodynamic force",
}
COLOURS = {"jm": "#0072b2", "jnp": "#d55e00", "vmap": "#999999"}
NAMES = {"jm": "jaxmagma", "jnp": "jnp.einsum", "vmap": "jax.vmap by hand"}


def plot(folder: Path, run: Run) -> None:
    """Draws ``speed.png`` and ``roofline.png``, of the float64 cases."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families: dict[str, list[tuple[int, Result]]] = {}
    for r in run.results.values():
        size = re.fullmatch(r"[pn](\d+)", r.case.split("/")[1])
        if _family(r) in PANELS and size:
            families.setdefault(_family(r), []).append((int(size[1]), r))
    if not families:
        raise ValueError("no case of this run belongs in a plot")
    shown = {f: sorted(families[f], key=lambda at: at[0]) for f in PANELS if f in families}
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{run.machine['device']}, float64"
    for name, draw in (("speed", _draw_speed), ("roofline", _draw_roofline)):
        figure = draw(plt, shown)
        figure.suptitle(title, fontsize=11)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def _draw_speed(plt: Any, families: dict[str, list[tuple[int, Result]]]) -> Any:
    """Effective bandwidth over the size, with the speed-ups over the fastest plain JAX."""
    from matplotlib.ticker import FuncFormatter

    drawn = [r for points in families.values() for _, r in points]
    copy = drawn[0].copy / 1e9
    timings = [(r, t) for r in drawn for name in NAMES if (t := r.known(name)) is not None]
    lowest = min(r.least_bytes / t.median for r, t in timings) / 1e9
    columns = min(3, len(families))
    rows = -(-len(families) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(max(5, 4 * columns), 2.8 * rows + 0.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for ax in axes.flat[len(families) :]:
        ax.axis("off")
    for ax, (family, points) in zip(axes.flat, families.items(), strict=False):
        ax.axhline(copy, color="0.5", linestyle="--", linewidth=1, label="copy")
        for name in ("vmap", "jnp", "jm"):
            line_of = [(x, r, t) for x, r in points if (t := r.known(name)) is not None]
            if line_of:
                ax.plot(
                    [x for x, _, _ in line_of],
                    [r.least_bytes / t.median / 1e9 for _, r, t in line_of],
                    "o-",
                    markersize=3,
                    color=COLOURS[name],
                    label=NAMES[name],
                )
        apart, last = (points[-1][0] - points[0][0]) / 9, -1.0
        for x, r in points:
            known = [s for peer in ("jnp", "vmap") if (s := r.speedup(peer)) is not None]
            if known and x - last >= apart:
                ratio, last = min(known), x
                ax.annotate(
                    f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x",
                    (x, r.bandwidth / 1e9),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        ax.set_yscale("log")
        ax.set_ylim(lowest / 1.5, copy * 2.2)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        ax.set_title(PANELS[family], fontsize=10)
        ax.set_xlabel("degree p" if "/p" in points[0][1].case else "size n")
        ax.grid(True, alpha=0.3)
    for row in axes:
        row[0].set_ylabel("effective GB/s")
    entries = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _draw_roofline(plt: Any, families: dict[str, list[tuple[int, Result]]]) -> Any:
    """Operations per second over operations per byte, under the two ceilings."""
    figure, ax = plt.subplots(figsize=(9, 4.6), layout="constrained")
    drawn = [r for points in families.values() for _, r in points]
    intensity = [r.flops / r.least_bytes for r in drawn]
    roof = drawn[0]
    ridge = roof.peak / roof.copy
    ends = [min(intensity) / 1.5, ridge, max(*intensity, ridge) * 1.5]
    ax.plot(ends, [min(x * roof.copy, roof.peak) / 1e12 for x in ends], color="0.3", linewidth=1.5)
    ax.annotate(
        f"copy {roof.copy / 1e9:.0f} GB/s",
        (ends[0] * 1.2, ends[0] * 1.2 * roof.copy / 1e12),
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=8,
        ha="left",
        rotation=35,
        rotation_mode="anchor",
    )
    ax.annotate(
        f"matrix product {roof.peak / 1e12:.3g} TFLOP/s",
        (ends[-1], roof.peak / 1e12),
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=8,
        ha="right",
    )
    colours = plt.get_cmap("tab10")
    for k, (family, points) in enumerate(families.items()):
        for name, marker, alpha in (("jm", "o", 1.0), ("jnp", "x", 0.6)):
            of = [(r, t) for _, r in points if (t := r.known(name)) is not None]
            ax.scatter(
                [r.flops / r.least_bytes for r, _ in of],
                [r.flops / t.median / 1e12 for r, t in of],
                s=14,
                marker=marker,
                color=colours(k),
                alpha=alpha,
                linewidths=1,
                label=PANELS[family] if name == "jm" else None,
            )
    ax.scatter([], [], s=14, marker="x", color="0.4", label="jnp.einsum on the same")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("operations per byte of least traffic")
    ax.set_ylabel("TFLOP/s")
    ax.grid(True, alpha=0.3)
    figure.legend(fontsize=8, loc="outside right center")
    return figure


# ---- Command line ----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results, as JSON")
    parser.add_argument("--table", choices=TABLES, help="print this table only")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the results")
    parser.add_argument("--update", nargs="+", type=Path, default=[], metavar="PAGE")
    args = parser.parse_args(argv)
    if not (args.files or args.update):
        parser.error("neither results nor pages")
    if args.files:
        run = together([Run.load(path) for path in args.files])
        print(TABLES[args.table or "cases"](run))
        if not args.table:
            print("\n".join(closing(run)))
        if args.plot:
            plot(args.plot, run)
    for page in args.update:
        page.write_text(updated(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
