"""The benchmarks measure what they say: right results, right counts, complete records."""

import functools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from benchmarks import __main__ as cli
from benchmarks import (
    cases,
    counters,
    first_call,
    goals,
    measure,
    record,
    report,
    tables,
    variants,
    workloads,
)
from benchmarks.programs import FAMILIES as FAMILIES_OF_PROGRAMS
from benchmarks.programs import Program
from benchmarks.record import Counters, Result, Run, Timing
from benchmarks.workloads import Workload
from jaxmagma import choices
from jaxmagma.choices import Book
from jaxmagma.tune.tuner import programs


ROOT = Path(__file__).resolve().parent.parent
SMALL = cases.build(["all"], 1e4)
# One of each family (of transposes in other dtypes, one for each), and all of what falls back.
FAMILIES = {
    w.family: w
    for w in reversed(SMALL)
    if not re.match("bgemm-.*-(f32|c)", w.name) or re.match("bgemm-(nt-c128|tn-c64|tt-f32)", w.name)
}
# The smallest of whole programs, in every spelling.
PROGRAMS = {w.family: w for w in reversed(cases.build(["programs"], 1e4))}
IN_FLOAT32 = {w.family: w for w in reversed(cases.build(["programs-f32"], 1e4))}
# Functions of a number stand in one place in each precision: neither asks for the other.
SAMPLE = {
    w.name: w
    for w in SMALL
    if (w is FAMILIES.get(w.family) or w.family == "library")
    and w.family not in {*PROGRAMS, *IN_FLOAT32}
    and not re.search("-(alone|among-f32)/", w.name)
}

pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def pool() -> measure.Pool:
    return measure.Pool(1e6, seed=0)


def inputs(workload: Workload) -> list[jax.Array]:
    return list(jax.jit(pool().cutter(workload))(pool().values, jnp.asarray(0)))


# ---- What is computed ------------------------------------------------------------------------


@pytest.mark.parametrize("workload", SAMPLE.values(), ids=lambda w: w.name)
def test_result(workload: Workload) -> None:
    """Against extended precision, or where only JAX can compute it, against plain JAX in double."""
    args = inputs(workload)
    functions = workload.functions()
    got = jax.tree.leaves(jax.jit(functions["jm"])(*args))
    if workload.wrt and np.dtype(workload.dtype).kind == "c":
        double = [x.astype("complex128") for x in args]
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(functions["jnp"])(*double))]
    elif workload.wrt:
        exact = exact_gradient(workload, args)
    elif workload.leading and workload.batched:
        exact = [measure.extended(workload, args)]
    elif workload.batched:
        wide = [np.asarray(x, np.longdouble) for x in args]
        exact = [np.asarray(workload.batched(measure.numpy_einsum)(*wide))]
    else:
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(functions["vmap"])(*args))]
    assert len(got) == len(exact)
    for a, b in zip(got, exact, strict=True):
        assert a.real.dtype == np.zeros((), workload.dtype).real.dtype
        assert np.iscomplexobj(a) == np.iscomplexobj(b)
        assert measure.error_against(b, a) < measure.TOLERANCE[workload.dtype] / 5


@pytest.mark.parametrize("workload", IN_FLOAT32.values(), ids=lambda w: w.name)
def test_programs_in_float32_have_no_other_arrays(workload: Workload) -> None:
    args = inputs(workload)
    results = jax.tree.leaves(jax.eval_shape(workload.functions()["vmap"], *args))
    assert {x.dtype for x in (*args, *results)} == {np.dtype(np.float32)}


def exact_gradient(workload: Workload, args: Sequence[jax.Array]) -> list[np.ndarray]:
    """By complex steps: the imaginary part of f(x + ih) is h f'(x) without any cancellation."""
    assert workload.batched is not None
    function, step = workload.batched(measure.numpy_einsum), 1e-30
    *primals, cotangent = (np.asarray(x, np.clongdouble) for x in args)
    gradients = []
    for i in workload.wrt:
        shared = workload.shared[i]
        found = np.zeros(primals[i].shape, np.longdouble)
        # All elements can be perturbed together: none depends on another one's values.
        for place in np.ndindex(found.shape if shared else found.shape[1:]):
            where = place if shared else (slice(None), *place)
            moved = [x.copy() for x in primals]
            moved[i][where] += step * 1j
            change = (cotangent * function(*moved)).imag / step
            found[where] = change.sum() if shared else change.sum(tuple(range(1, change.ndim)))
        gradients.append(found)
    return gradients


@pytest.mark.parametrize(
    "workload",
    [
        w
        for w in SAMPLE.values()
        if w.element and w.leading and w.dtype == "float64" and "traced" not in w.name
    ],
    ids=lambda w: w.name,
)
def test_by_hand(workload: Workload) -> None:
    """What is written for one element is what the einsum says."""
    args = inputs(workload)
    by_hand = jax.jit(workload.functions()["vmap"])(*args)
    assert measure.error_against(measure.extended(workload, args), by_hand) < 1e-13


@pytest.mark.parametrize("workload", [*SAMPLE.values(), *PROGRAMS.values()], ids=lambda w: w.name)
def test_counts_least_traffic(workload: Workload) -> None:
    """Inputs once and outputs once; tables shared by all elements are not counted."""
    args, wide = workload.arguments, np.dtype(workload.dtype).itemsize

    def numbers(x: Any) -> int:
        return int(x.size * np.dtype(x.dtype).itemsize // wide)

    functions = workload.functions()
    outputs = jax.tree.leaves(jax.eval_shape(functions.get("jnp") or functions["vmap"], *args))
    if workload.wrt:
        outputs = [x for i, x in zip(workload.wrt, outputs, strict=True) if not workload.shared[i]]
    traffic = sum(map(numbers, outputs))
    if "-of-mesh" in workload.family:  # both indices, and what elements add up, written and read
        u, x, mesh = args
        index = mesh.mine.index
        summed = index.size * (u.size // u.shape[0])
        assert workload.least_bytes == 8 * (u.size + x.size + traffic + 2 * summed + index.size)
        return
    own = (x for x, shared in zip(args, workload.shared, strict=True) if not shared)
    traffic += sum(map(numbers, own))
    if workload.family in ("library", "gemv"):
        return  # counted as written, shared or not
    if workload.in_cache:
        traffic *= 50
    if workload.family == "bk3-global":  # a vector, read and written, and 4 bytes an index
        (size,), (e, _, q, *_) = workload.shapes
        n = q - 1
        assert workload.least_bytes == 8 * (2 * size + 6 * e * q**3) + 4 * e * n**3
        return
    assert workload.least_bytes == traffic * np.dtype(workload.dtype).itemsize


@pytest.mark.parametrize(
    "name", ["chain/n5", "chain-rectangular/3x7", "interp3d/p3", "interp2d/p2", "bk1/p3", "bk5/p3"]
)
def test_counts_flops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan of the library does them."""
    explain = sys.modules["jaxmagma.faces.explain"]
    monkeypatch.setattr(explain, "roofline", lambda dtype, device: jm.Roofline(1.0, 1.0))
    (workload,) = cases.build(["all"], 1e5, f"^{name}$")
    args = [jax.ShapeDtypeStruct(s, workload.dtype) for s in workload.shapes]
    (found,) = jm.explain(workload.functions()["jm"], *args, quiet=True)
    assert workload.flops == pytest.approx(found.flops, rel=0.05)


def smallest_programs() -> list[Program]:
    return [family(min(sizes)) for family, sizes in FAMILIES_OF_PROGRAMS.items()]


@pytest.mark.parametrize("program", smallest_programs(), ids=lambda p: p.name)
def test_spellings_of_a_program_compute_the_same(program: Program) -> None:
    """On the arguments that each one is given, which are the same numbers."""
    program = replace(program, dtype="float64")
    found = [
        jax.vmap(spelling.restored)(jax.jit(workload.functions()["vmap"])(*inputs(workload)))
        for spelling, workload in zip(
            program.spellings.values(), program.workloads(3e4), strict=True
        )
    ]
    for other in found:
        assert other.dtype == "float64"
        assert measure.error(other, found[0]) < 1e-9


def test_arguments_lie_as_a_spelling_wants_them() -> None:
    plain, other = cases.build(["programs"], 1e4, "^elasticity(:components)?/p1$")
    (u, _), (first, _) = inputs(plain), inputs(other)
    assert u.shape[1:] == (2, 2, 2, 3) and first.shape[1:] == (3, 2, 2, 2)
    assert jnp.array_equal(first, jnp.moveaxis(u, -1, 1))
    assert float(jnp.max(jnp.abs(u))) < 0.1  # a small displacement
    assert [x.shape for x in other.arguments] == [x.shape for x in inputs(other)]
    assert plain.input_bytes == other.input_bytes == sum(x.nbytes for x in inputs(other))


# ---- Which cases -----------------------------------------------------------------------------


def test_names_are_unique_and_suites_parts_of_the_whole() -> None:
    everything = {w.name for w in SMALL}
    for name, suite in cases.SUITES.items():
        names = [w.name for w in suite(1e4)] if name != "all" else []
        assert set(names) <= everything | {f"gemv/{s}" for s in ("64x65536", "16384x64")}
        assert len(names) - len(set(names)) == 0 or name == "overview"


def test_pattern_and_suite() -> None:
    assert [w.name for w in cases.build(["bk"], 1e6, r"^bk1/p[12]$")] == ["bk1/p1", "bk1/p2"]
    assert len(cases.build(["bk", "bk"], 1e6)) == 45
    with pytest.raises(ValueError, match="suite 'tpu'"):
        cases.build(["tpu"], 1e6)


def test_every_size_of_the_goals_is_measured() -> None:
    names = {w.name for w in cases.build(["ceiling", "bgemm", "programs"], 1e4)}
    assert all(any(goal.covers(n) for n in names) for goal in goals.ON_GPU)
    assert {f"chain/n{n}" for n in range(2, 33)} <= names
    assert sum(n.startswith("chain-rectangular/") for n in names) == 55
    assert sum(n.startswith("bgemm") for n in names) == 31 * 4 * 4


# ---- How it is judged ------------------------------------------------------------------------


def result(case: str, seconds: float = 1.0, **changes: Any) -> Result:
    """On a device that copies 100 bytes and does 1000 operations in a second."""
    timing = Timing(seconds, seconds, (seconds, seconds), 1)
    known = Result(
        case,
        "float64",
        ((1,),),
        90,
        100,
        100.0,
        1000.0,
        {"jm": timing},
        None,
        0.0,
        "gpu",
        "H200",
        2,
    )
    return replace(known, **changes)


def test_goals() -> None:
    def met(r: Result, *others: Result) -> bool | None:
        verdict = goals.judge(r, {x.case: x for x in others})
        return None if verdict is None else verdict.met

    assert met(result("chain/n8")) is False  # 90 % of copy; 95 % are wanted
    assert met(result("chain/n8", 0.94)) is True
    assert met(result("chain/n17")) is True  # 90 % of the roofline
    assert met(result("chain/n17", 1.2)) is False
    assert met(result("bk3/p8")) is True
    assert met(result("bk3/p9", flops=800, least_bytes=1)) is True
    assert met(result("bgemm-tt-c64/n31", 1.01)) is False
    assert met(result("bk1-traced/p3")) is None  # not without its twin
    assert met(result("bk1-traced/p3"), result("bk1/p3", 0.96)) is True
    assert met(result("bk1-traced/p3"), result("bk1/p3", 0.94)) is False
    assert met(result("library/dot")) is None
    assert met(result("elasticity/p4", 2.1)) is False  # 43 % of the roofline
    assert met(result("elasticity:components/p4", 1.9)) is True
    assert met(result("solid-tangent/p3", 2.1)) is True
    assert met(result("euler/p5")) is None
    slow = Timing(2.5, 2.5, (2.5, 2.5), 1)
    on_cpu = result("bk1/p3", platform="cpu")
    assert met(on_cpu) is None
    assert met(replace(on_cpu, timings={**on_cpu.timings, "jnp": slow})) is False
    in_cache = result("bk1-in-cache/p3", platform="cpu", cores=1, flops=31_000_000_000)
    assert met(in_cache) is True
    assert met(replace(in_cache, cores=2)) is None


def test_libceed() -> None:
    mine = {"bk1/p1": result("bk1/p1", least_bytes=2 * 1249 * 10**9)}
    assert goals.over_libceed(mine) == {"bk1/p1": 2.0}
    assert goals.over_libceed({"bk1/p1": replace(mine["bk1/p1"], device="A100")}) == {}
    assert "2.00x libCEED" in goals.overall(mine)[0]


def test_wrong_results_are_seen() -> None:
    right = jnp.ones(4)
    assert measure.error(right, right) == 0
    assert measure.error(right.at[2].set(1.5), right) == 0.5
    assert measure.error(right.at[2].set(jnp.nan), right) == np.inf
    assert measure.error(right[:3], right) == np.inf


@pytest.mark.parametrize("peers", [(), ("jnp",)])
def test_wrong_kernels_are_seen(peers: tuple[str, ...]) -> None:
    (workload,) = cases.build(["chain"], 1e4, "n2$")
    pool = measure.Pool(1e4, seed=0)
    prepared = measure.prepare(workload, pool, peers)
    assert isinstance(prepared, measure.Prepared)
    right = prepared.fns["jm"]
    if peers:
        prepared = replace(prepared, first_rows=None)
    wrong = replace(prepared, fns={**prepared.fns, "jm": lambda *args: 1.001 * right(*args)})
    ceilings = {"float64": jm.Roofline(1.0, 1.0)}
    run = Run({"platform": "cpu", "device": "some", "cores": 1}, {})
    effort = measure.Effort(0.0, 1, 1)
    assert cli.run_case(prepared, pool, effort, 1.0, ceilings, run).case == "chain/n2"
    with pytest.raises(cli.WrongResult, match="against"):
        cli.run_case(wrong, pool, effort, 1.0, ceilings, run)


# ---- What is left behind ---------------------------------------------------------------------


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cpu_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(jm, "roofline", lambda dtype: jm.Roofline(1e10, 1e11))


@pytest.mark.usefixtures("small_ceilings")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "run.json"
    wanted = r"^(bk1/p2|bk1-grad/p2|chain/n4|corner-force/k2)$"
    options = ["--suite", "all", "--quick", "--megabytes", "0.1", "--cases", wanted]
    assert cli.main([*options, "--json", str(file), "--plot", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "bk1/p2" in printed
    assert "geometric mean of 2 cases" in printed
    run = Run.load(file)
    assert set(run.results) == {"bk1/p2", "bk1-grad/p2", "chain/n4", "corner-force/k2"}
    assert run.machine["versions"]["jax"] == jax.__version__
    for r in run.results.values():
        assert set(r.timings) == {"jm", "vmap"} | ({"jnp"} if "force" not in r.case else set())
        assert r.error is not None
        assert r.error < 1e-12
    assert (run.results["chain/n4"].exact_error or 1) < 1e-14
    assert json.loads(file.read_text())["cases"][0]["of_copy"] > 0
    for picture in ("speed.png", "roofline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small_ceilings")
def test_failures_do_not_stop_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    build = cases.build
    monkeypatch.setattr(
        cases,
        "build",
        lambda *args: [
            replace(w, batched=lambda einsum: broken) if w.name == "chain/n2" else w
            for w in build(*args)
        ],
    )
    options = ["--suite", "chain", "--quick", "--megabytes", "0.01", "--cases", "n[23]$"]
    assert cli.main([*options, "--no-peer", "--json", str(tmp_path / "run.json")]) == 1
    assert "FAILED: chain/n2: RuntimeError: no such kernel" in capsys.readouterr().out
    run = Run.load(tmp_path / "run.json")
    assert set(run.results) == {"chain/n3"}
    assert set(run.results["chain/n3"].timings) == {"jm"}
    assert set(run.failures) == {"chain/n2"}


def test_no_case_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cases", "nothing"]) == 2
    assert "no case matches" in capsys.readouterr().out


def test_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    first_call.main(["chain/n8", "bk3-grad/p3"])
    seconds = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(seconds) == {"chain/n8", "bk3-grad/p3"}
    assert all(0 < s < 60 for of in seconds.values() for s in of.values())


@pytest.fixture
def some_run(tmp_path: Path) -> Path:
    machine = record.machine() | {"platform": "gpu", "device": "H200", "driver": "1"}
    names = ["chain/n8", "chain/n9", "bk1/p3", "bk1/p4", "bgemm/n4"]
    run = Run(machine, {}, {n: result(n) for n in names}, [record.FirstCall("a", 1.0, 0.1, 2.0)])
    peer = {"jnp": Timing(3.0, 3.0, (3.0, 3.0), 1)}
    run.results["bk1/p4"] = result("bk1/p4", timings={**result("").timings, **peer})
    run.results["bk1-f32/p4"] = result("bk1-f32/p4", dtype="float32")
    for name in ("tetrahedra/p2", "tetrahedra:metric-first/p2"):
        run.results[name] = result(name)
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").results["bk1/p4"].speedup("jnp") == 3.0
    return tmp_path / "run.json"


@pytest.mark.parametrize("table", report.TABLES)
def test_tables(table: str, some_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(some_run), "--table", table]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) >= 3
    assert len({re.sub(r"[^|]", "", row) for row in rows}) == 1


def test_report(some_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = some_run.parent / "plots"
    assert report.main([str(some_run), str(some_run), "--plot", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 5 cases with a goal reach it" in printed
    assert (folder / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_later_run_counts_and_speedups_stay_those_of_one_run() -> None:
    timings = {name: Timing(s, s, (s, s), 1) for name, s in (("jm", 2.0), ("jnp", 6.0))}
    both = Run({"device": "A", "date": "1"}, {}, {"bk1/p3": result("bk1/p3", timings=timings)})
    alone = [Run({"device": "A", "date": d}, {}, {"bk1/p3": result("bk1/p3")}) for d in "23"]
    for runs in ([both, *alone], [*alone[::-1], both]):
        found = record.together(runs).results["bk1/p3"]
        assert (found.seconds, found.speedup("jnp"), found.speedup("vmap")) == (1.0, 3.0, None)
        assert found.known("jnp") == timings["jnp"] and found.known("jm") != timings["jm"]
    assert (
        record.together([*alone, replace(both, machine={"device": "A", "date": "4"})]).results[
            "bk1/p3"
        ]
        == both.results["bk1/p3"]
    )


def test_what_is_outdated_does_not_count(tmp_path: Path) -> None:
    cases = {name: result(name) for name in ("bk1/p3", "bk1/p4")}
    before = Run({"device": "A", "date": "1"}, {}, cases)
    after = Run({"device": "A", "date": "2"}, {}, {"bk1/p5": result("bk1/p5")})
    after.outdated = ["bk1/p3"]
    after.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["outdated"] == ["bk1/p3"]
    assert list(record.together([after, before]).results) == ["bk1/p4", "bk1/p5"]


def test_runs_on_different_devices_do_not_mix() -> None:
    with pytest.raises(ValueError, match="A, B"):
        record.together([Run({"device": "B"}, {}), Run({"device": "A"}, {})])


def test_counters() -> None:
    """Of a case with two kernels, one of which takes three times as long."""
    busy, warps = list(counters.SHARES.values()), counters.WARPS
    header = ["ID", "Kernel Name", counters.TIME, *busy, warps]
    units = ["", "", "us", "%", "%", "%", "%", "warp"]
    rows = [["0", "kernel", "100", "80", "20", "4", "8", "16"]]
    rows += [["1", "kernel", "300", "40", "60", "4", "8", "8"]]
    printed = "\n".join(",".join(f'"{x}"' for x in row) for row in (header, units, *rows))
    found = counters.mean("bk1/p3", counters.read(f"==PROF== Connected\n{printed}\n"))
    want = {"memory": 0.5, "l1": 0.5, "double": 0.04, "issued": 0.08, "warps": 10.0}
    assert asdict(found) == {"case": "bk1/p3", "seconds": pytest.approx(4e-4)} | {
        name: pytest.approx(x) for name, x in want.items()
    }


def test_counters_stand_beside_what_falls_short(tmp_path: Path) -> None:
    timed = Run({"device": "A", "date": "1"}, {}, {"chain/n8": result("chain/n8")})
    assert goals.short(timed.results) == ["chain/n8"]
    machine = {"device": "A", "date": "2", "platform": "gpu", "cores": 2}
    counted = Run(machine, {})
    counted.counters["chain/n8"] = Counters("chain/n8", 1e-4, 0.5, 0.83, 0.4, 0.2, 7.6)
    counted.save(tmp_path / "counters.json")
    whole = record.together([timed, Run.load(tmp_path / "counters.json")])
    assert whole.machine["date"] == "1"
    assert report.short_table(whole).endswith("| 50% | 83% | 40% | 20% | 8 |")


def test_update(some_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table short run.json -->\nold\n<!-- end -->\nb\n")
    assert report.main(["--update", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert "| chain/n8 | 90.0% | 95% of copy |" in text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert report.updated(text) == text


@pytest.mark.parametrize(
    "page", ["README.md", "docs/performance.md", "benchmarks/results/README.md"]
)
def test_pages_show_what_was_measured(page: str) -> None:
    text = (ROOT / page).read_text()
    assert report.updated(text) == text


def test_sweep() -> None:
    assert workloads.sweep(2, 3, 2) == 2 * (3 * 2 * 2 + 3 * 3 * 2)
    assert workloads.sweep(2, 3, 3) == 2 * (3 * 8 + 9 * 4 + 27 * 2)


def test_what_programs_do_is_counted() -> None:
    u = jax.ShapeDtypeStruct((5, 3, 3), "float64")
    fn = jm.fuse(lambda x: x / jnp.sqrt(x + x))
    ((program, extents),) = programs(fn, u)
    assert tables.counted(program, extents) == (
        "5 elements, least traffic 0 MB; of an element 27 flops, 27 of them on single values, "
        "9 divisions and 9 roots"
    )


SHORT = ["--megabytes", "0.1", "--seconds", "0.001"]


def test_variants_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["block=2", "", "block=none", "known,block=1"]
    assert variants.main(["^interp3d/p2$", *texts, *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"interp3d/p2.0"}
    assert [line.split()[-1] for line in lines] == [x or "ms" for x in texts]
    assert ["GB/s" in line for line in lines] == [True, True, False, True]


def test_a_case_of_plain_jax_has_no_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert variants.main(["^library/trace$", *SHORT]) == 0
    assert "library/trace: jm.tune: plain JAX runs all of it" in capsys.readouterr().out


def test_the_fastest_variant_goes_into_a_table(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    # Nothing is a hundred times as fast, and all are faster than what is eleven times as slow.
    wanted = ["^interp3d/p2$", "block=2", "--table", str(table), *SHORT]
    assert variants.main([*wanted, "--margin", "0.99"]) == 0
    assert not table.exists()
    assert variants.main([*wanted, "--margin", "-10"]) == 0
    (found,) = Book(table, "table").entries(choices.architecture("cpu")).values()
    assert found["name"] == "interp3d/p2.0"
    assert found.get("parameters") in (None, {}, {"block": 2})
    assert found["seconds"] <= found["model_seconds"]
