"""The benchmarks measure what they say: right results, right counts, complete records."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import cases, measure, report, workloads


SMALL = cases.build("all", 2e4)
# The smallest of each family, except of those that numpy cannot run.
FAMILIES = {w.name.split("/")[0]: w for w in reversed(SMALL) if w.leading and w.dtype == "float64"}
LIBRARY = [w for w in SMALL if w.leading and w.name.startswith("library/")]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "workload", {w.name: w for w in [*FAMILIES.values(), *LIBRARY]}.values(), ids=lambda w: w.name
)
def test_expression_and_cut(workload: workloads.Workload) -> None:
    """The first rows alone are the first rows of the result: what ``--check`` relies on."""
    pool = measure.Pool(8 * max(math.prod(s) for s in workload.shapes), seed=0)
    args = pool.inputs(workload)
    exact = measure.extended(workload, args, rows=3)
    assert exact is not None
    assert exact.dtype == np.longdouble
    assert measure.error_against(exact, workload.make(jnp.einsum)(*args)) < 1e-13


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_counts_least_traffic(workload: workloads.Workload) -> None:
    """Inputs once and outputs once; tables shared by all elements are not counted."""
    args = [jax.ShapeDtypeStruct(s, workload.dtype) for s in workload.shapes]
    way: Any = jax.vmap if workload.fused else jnp.einsum
    outputs = jax.tree.leaves(jax.eval_shape(workload.make(way), *args))
    traffic = sum(x.size for x in outputs)
    traffic += sum(x.size for x, shared in zip(args, workload.shared, strict=True) if not shared)
    family = workload.name.split("/")[0]
    if family in ("bk1-grad-u", "bk1-grad-d"):  # linear in the argument, which is not read
        e, n = outputs[0].shape[0], workload.shapes[-1][1]
        q = workload.shapes[0][1]
        traffic = e * (2 * n**3 + q**3)
    if family in ("library", "gemv"):
        return  # counted as written, shared or not
    if family == "fuse-diffusion":  # a global vector, read and written, and 4 bytes an index
        (size,), (e, _, q, *_) = workload.shapes
        n = q - 1
        assert workload.least_bytes == 8 * (2 * size + 6 * e * q**3) + 4 * e * n**3
        return
    assert workload.least_bytes == traffic * workload.itemsize


def test_names_are_unique() -> None:
    for suite in cases.SUITES:
        names = [w.name for w in cases.build(suite, 1e6)]
        assert len(set(names)) == len(names)


def test_pattern_and_suite() -> None:
    assert [w.name for w in cases.build("cpu", 1e6, r"^bk1/p[12]$")] == ["bk1/p1", "bk1/p2"]
    with pytest.raises(ValueError, match="suite 'tpu'"):
        cases.build("tpu", 1e6)


def test_wrong_results_are_seen() -> None:
    right = jnp.ones(4)
    assert measure.error(right, right) == 0
    assert measure.error(right.at[2].set(1.5), right) == 0.5
    assert measure.error(right.at[2].set(jnp.nan), right) == np.inf
    assert measure.error(right[:3], right) == np.inf


@pytest.mark.usefixtures("standard_promotion")
def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "last_level_cache", lambda: 1 << 20)
    record, picture = tmp_path / "deep" / "run.json", tmp_path / "run.png"
    wanted = r"^(bk1/p2|bk1-grad-ud/p3|chain/n4)$"
    options = ["--quick", "--suite", "all", "--megabytes", "0.1", "--check", "--cases", wanted]
    assert cli.main([*options, "--json", str(record), "--plot", str(picture)]) == 0
    assert "bk1/p2" in capsys.readouterr().out
    data = json.loads(record.read_text())
    assert {c["case"] for c in data["cases"]} == {"bk1/p2", "bk1-grad-ud/p3", "chain/n4"}
    assert all(c["error"] < 1e-12 for c in data["cases"])
    assert data["machine"]["versions"]["jax"] == jax.__version__
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_case_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cases", "nothing"]) == 2
    assert "no case matches" in capsys.readouterr().out
