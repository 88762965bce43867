"""``jm.tune``: its space, the rules that prune it, the race, and what comes of it.

The CUDA backend is searched where there is no GPU: kernels are generated, and times are a function
of the parameters.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from benchmarks import workloads
from jaxmagma import choices, lowering
from jaxmagma.choices import MODEL, PLAIN, Choice
from jaxmagma.lowering.backends import BACKENDS
from jaxmagma.lowering.cuda.architectures import LIMITS, Limits
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.rules import Measured, rules_for, rules_of
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.rules import Candidate, broken
from jaxmagma.lowering.space import Space, one, together
from jaxmagma.programs.program import ElementProgram
from jaxmagma.tune import regret, rules, suite, tuner
from jaxmagma.tune import search as climbing
from jaxmagma.tune.__main__ import main
from jaxmagma.tune.device import Device
from jaxmagma.tune.race import TIE, Effort, pick, race
from jaxmagma.tune.search import Found, Search
from tests import test_cuda_compile
from tests.cuda_programs import chain, mass, product


pytestmark = pytest.mark.usefixtures("cuda_lowering")

Times = Callable[[Any], float]
EXTENTS = (100_000,)


class Pretended:
    """A GPU on which a kernel takes the time that a function of its parameters says."""

    def __init__(
        self,
        program: ElementProgram,
        times: Times = lambda parameters: 1.0,
        limits: Limits = LIMITS["sm_90"],
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.program = program
        self.times = times
        self.rules = rules_for(limits)
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.runs: list[Choice] = []

    def clock(self) -> float:
        return self.now

    def lower(self, choice: Choice) -> Kernel | Declined:
        with choices.using(choice):
            return lowering.lower(self.program, EXTENTS, "cuda")

    def stage(self, choice: Choice) -> Any:
        return choice

    def resources(self, kernel: Kernel) -> Mapping[str, int] | None:
        return {"registers": 32, "local": 0}

    def compile(self, staged: Any) -> Any:
        return staged

    def outputs(self, executable: Any) -> Any:
        return None

    def same(self, executable: Any, wanted: Any) -> bool:
        return True

    def timer(self, executable: Any) -> Callable[[], float]:
        def run() -> float:
            self.runs.append(executable)
            seconds = self.times(dict(executable.parameters or {}))
            seconds *= 1 + self.noise * self.rng.standard_exponential()
            self.now += seconds
            return seconds

        return run


def search(machine: Pretended, space: Space, **options: Any) -> Found:
    options = {"seconds": 1e9, "workers": 1, **options}
    return Search(machine, space, Parameters, clock=machine.clock, **options).run()


# ---- The space -------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", BACKENDS)
def test_spaces_start_at_the_defaults(platform: str) -> None:
    backend = BACKENDS[platform]
    space = backend.SPACE
    defaults = backend.Parameters()
    names = [name for dimension in space.dimensions for name in dimension.names]
    assert len(set(names)) == len(names)
    for dimension in space.dimensions:
        assert dimension.values[0] == tuple(getattr(defaults, name) for name in dimension.names)
        assert len(set(dimension.values)) == len(dimension.values)
    assert backend.Parameters(**space.parameters(space.origin)) == defaults
    assert space.parameters(space.origin) == {}


SMALL = Space((together("threads", "groups", values=((None, 1), (32, 2))), one("fetch", 1, 2, 4)))


def test_points() -> None:
    assert SMALL.size == len(list(SMALL.points())) == 6
    assert list(SMALL.neighbours((0, 0))) == [(1, 0), (0, 1), (0, 2)]
    assert SMALL.parameters((1, 2)) == {"threads": 32, "groups": 2, "fetch": 4}
    for point in SMALL.points():
        assert SMALL.point(SMALL.parameters(point)) == point
    assert SMALL.point({"fetch": 3}) is None
    assert SMALL.point({"elements": 3}) is None
    with pytest.raises(ValueError, match="threads, groups"):
        together("threads", "groups", values=((32,),))


# ---- Rules -----------------------------------------------------------------------------------


def one_changed(name: str, *values: Any) -> Space:
    defaults = Parameters()
    return Space((one(name, getattr(defaults, name), *values),))


def limited(**limits: Any) -> Limits:
    return dataclasses.replace(LIMITS["sm_90"], **limits)


@pytest.mark.parametrize(
    ("rule", "count", "program", "space", "limits"),
    [
        # groups are warps
        (rules.INVALID, 2, mass(2), one_changed("groups", 2, 4), limited()),
        (
            "more threads than a block has",
            2,
            mass(2),
            one_changed("threads", 1056, 2048),
            limited(),
        ),
        ("threads are not whole warps", 2, mass(2), one_changed("threads", 33, 100), limited()),
        # 100 elements of bk1 at p = 8 do not fit
        (rules.DECLINED, 1, mass(8), one_changed("elements", 2, 100), limited()),
        # the model asks for three blocks, and one slice
        (rules.SAME, 1, mass(3), one_changed("min_blocks", 3, 2), limited()),
        (
            "more shared memory than a block has",
            2,
            mass(3),
            one_changed("elements", 8, 10),
            limited(shared_of_block=20 << 10),
        ),
        (
            "more constants than the bank holds",
            1,
            mass(3),
            one_changed("threads", 256),
            limited(constant=100),
        ),
        # one element of bk1 at p = 1 keeps 9 threads of a warp busy
        ("most threads idle", 1, mass(1), one_changed("elements", 1), limited()),
        (
            "too few warps at once",
            1,
            mass(3),
            one_changed("elements", 8),
            limited(shared=30 << 10),
        ),
        # quads in blocks of one warp: 64 registers are left, or 56
        (
            "too few registers for tensor cores",
            1,
            chain(17),
            one_changed("min_blocks", 16, 17),
            limited(registers=1 << 15),
        ),
    ],
)
def test_what_a_rule_removes(
    rule: str, count: int, program: ElementProgram, space: Space, limits: Limits
) -> None:
    found = search(Pretended(program, limits=limits), space)
    assert {name: n for name, n in found.removed.items() if n} == {rule: count}
    assert len(found.seconds) == space.size - count
    assert MODEL in found.seconds


@pytest.mark.parametrize(
    ("rule", "resources"),
    [
        ("registers spill", {"registers": 64, "local": 8}),
        ("more registers than a multiprocessor has", {"registers": 520, "local": 0}),
    ],
)
def test_what_machine_code_shows(
    rule: str, resources: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Pretended(mass(3))
    monkeypatch.setattr(
        machine,
        "resources",
        lambda kernel: resources if kernel.choice.parameters else {"registers": 32, "local": 0},
    )
    found = search(machine, one_changed("fetch", 2))
    assert found.removed == {rule: 1}
    # A kernel that the model chooses may do all that, and then so may others.
    monkeypatch.setattr(machine, "resources", lambda kernel: resources)
    found = search(machine, one_changed("fetch", 2))
    assert not found.removed


def test_what_fails_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Pretended(mass(3))

    def compiled(staged: Choice) -> Choice:
        if dict(staged.parameters or {}).get("threads") == 256:
            raise RuntimeError("out of something")
        return staged

    monkeypatch.setattr(machine, "compile", compiled)
    monkeypatch.setattr(
        machine, "same", lambda choice, wanted: dict(choice.parameters or {}) != {"threads": 64}
    )
    found = search(machine, one_changed("threads", 64, 192, 256))
    assert found.removed == {rules.FAILED: 1, rules.WRONG: 1}
    assert {x.parameters for x in found.seconds} == {None, (("threads", 192),)}


def test_occupancy() -> None:
    def warps(threads: int, shared: int, registers: int) -> int:
        kernel = Kernel("", {"threads": threads, "shared_bytes": shared})
        resources = {"registers": registers, "local": 0}
        return Measured(Candidate(MODEL, None, kernel, resources), LIMITS["sm_90"]).warps

    assert warps(128, 0, 32) == 64
    assert warps(128, 0, 128) == 16
    assert warps(128, 100 << 10, 32) == 8
    assert warps(1024, 0, 255) == 0
    assert warps(32, 0, 16) == 32  # blocks
    assert warps(96, 0, 33) == 51  # registers come in eights


# Of kernels with 64 threads, and whether too few registers are left for tensor cores.
OF_64_THREADS: list[tuple[str, dict[str, Any], bool]] = [
    ("sm_90", {"min_blocks": 16}, False),
    ("sm_90", {"min_blocks": 17}, True),
    ("sm_90", {"min_blocks": 32}, True),
    ("sm_90", {"min_blocks": 33}, False),  # there is no room for so many, whatever they have
    ("sm_90", {"min_blocks": 32, "fibres": 1}, False),
    ("sm_90", {"min_blocks": 32, "owner": "threads"}, False),
    ("sm_120", {"min_blocks": 17}, True),
    ("sm_120", {"min_blocks": 24}, True),
    ("sm_120", {"min_blocks": 25}, False),
    ("sm_80", {"min_blocks": 32}, False),
]


def of_64_threads(parameters: Mapping[str, Any]) -> tuple[Parameters, Kernel]:
    given = Parameters(
        **{"owner": "quads", "fibres": 2, "threads": 64, "elements": 4, **parameters}
    )
    kernel = Pretended(chain(12)).lower(Choice.of(dataclasses.asdict(given), "search"))
    assert isinstance(kernel, Kernel)
    return given, kernel


@pytest.mark.parametrize(("architecture", "parameters", "removed"), OF_64_THREADS)
def test_registers_for_tensor_cores(
    architecture: str, parameters: Mapping[str, Any], removed: bool
) -> None:
    given, kernel = of_64_threads(parameters)
    candidate = Candidate(MODEL, given, kernel)
    reason = broken(rules_of(architecture).kernel, candidate)
    assert (reason == "too few registers for tensor cores") == removed


@pytest.mark.nvrtc
@pytest.mark.parametrize(("architecture", "parameters", "removed"), OF_64_THREADS)
def test_the_compiler_refuses_what_a_rule_removes(
    architecture: str, parameters: Mapping[str, Any], removed: bool
) -> None:
    cuda = test_cuda_compile.native()
    _, kernel = of_64_threads(parameters)
    with pytest.raises(Exception, match="register") if removed else contextlib.nullcontext():
        cuda.compile(kernel.source, architecture)


def test_every_rule_is_reported() -> None:
    found = search(Pretended(mass(3)), one_changed("min_blocks", 3))
    tuning = tuner.as_tuning(found, mass(3), EXTENTS, "sm_90", 1.0)
    assert list(tuning.removed) == list(rules.names_of(rules_of("sm_90")))
    assert tuning.removed[rules.SAME] == 1
    assert sum(tuning.removed.values()) == 1
    assert f"1 {rules.SAME}" in str(tuning)


# ---- The race --------------------------------------------------------------------------------


def test_the_beaten_leave_and_the_favourite_stays() -> None:
    order: list[str] = []

    def runner(name: str, seconds: float) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return seconds

        return run

    times = {"slow": 3.0, "good": 1.0, "near": 1.05, "half": 1.5}
    runs = {name: runner(name, seconds) for name, seconds in times.items()}
    seconds = race(runs, Effort(least=3, most=6), favourite="half")
    assert {name: len(x) for name, x in seconds.items()} == {
        "slow": 1,
        "good": 6,
        "near": 6,
        "half": 6,
    }
    assert order[:7] == ["slow", "good", "near", "half", "half", "near", "good"]


def test_a_race_ends_in_time() -> None:
    now = [0.0]

    def run() -> float:
        now[0] += 1.0
        return 1.0

    seconds = race({"a": run, "b": run}, Effort(4, 100, seconds=9.0), clock=lambda: now[0])
    assert [len(x) for x in seconds.values()] == [5, 5]


@pytest.mark.parametrize(("gain", "wins"), [(TIE * 0.9, False), (TIE * 1.2, True)])
def test_ties_are_the_favourites(gain: float, wins: bool) -> None:
    seconds = {"model": [1.0, 1.0], "other": [1.0 - gain] * 2}
    assert pick(seconds, "model") == ("other" if wins else "model")


def test_among_equals_the_first_wins() -> None:
    seconds = {"model": [1.0] * 3, "first": [0.9] * 3, "second": [0.899] * 3, "early": [0.1]}
    assert pick(seconds, "model") == "first"


# ---- The search ------------------------------------------------------------------------------

CLIMB = Space(
    (
        one("threads", None, 64, 128, 256),
        one("elements", None, 2, 4, 8),
        one("fetch", 1, 2),
        one("fibres", None, 2),
    )
)


def landscape(x: Mapping[str, Any]) -> float:
    """Best at threads=256 and fetch=2, each of which pays by itself."""
    gain = 0.1 * (x.get("threads") == 256) + 0.08 * (x.get("fetch") == 2)
    return 1.0 - gain + 0.03 * (x.get("fibres") == 2) + 0.05 * ("elements" in x)


def test_the_search_climbs() -> None:
    found = search(Pretended(mass(3), landscape), CLIMB)
    assert dict(found.winner.parameters or ()) == {"threads": 256, "fetch": 2}
    assert found.visited < found.size
    assert found.size == CLIMB.size


def test_changes_that_pay_together_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "LEAPS", 0)

    def together(x: Mapping[str, Any]) -> float:
        changed = {"threads": 256, "fetch": 2}
        found = sum(x.get(name) == value for name, value in changed.items())
        return {0: 1.0, 1: 1.05, 2: 0.9}[found] + 0.03 * (len(x) - found)

    found = search(Pretended(mass(3), together), CLIMB)
    assert dict(found.winner.parameters or ()) == {"threads": 256, "fetch": 2}
    # One that costs more by itself is no part of a pair.
    dear = search(Pretended(mass(3), lambda x: together(x) * (1 + 0.3 * (len(x) == 1))), CLIMB)
    assert dear.winner == MODEL


def test_leaps_find_what_no_few_changes_show() -> None:
    wanted = {"threads": 256, "fetch": 2, "fibres": 2}

    def hidden(x: Mapping[str, Any]) -> float:
        return 0.8 if all(x.get(name) == value for name, value in wanted.items()) else 1 + len(x)

    found = search(Pretended(mass(3), hidden), CLIMB)
    assert dict(found.winner.parameters or ()) == wanted


def test_tuning_twice_gives_the_same_choice() -> None:
    winners = {
        search(Pretended(mass(3), landscape, noise=0.01, seed=seed), CLIMB).winner
        for seed in range(5)
    }
    assert {dict(x.parameters or ()).get("threads") for x in winners} == {256}
    assert len(winners) == 1
    # Where nothing is to be gained, that is the model's.
    level = {
        search(Pretended(mass(3), lambda x: 1.0, noise=0.005, seed=seed), CLIMB).winner
        for seed in range(5)
    }
    assert level == {MODEL}


def test_the_search_starts_from_what_won_before() -> None:
    before = Choice.of({"threads": 256, "fetch": 2}, "user cache")
    found = search(Pretended(mass(3), landscape), CLIMB, incumbent=before)
    assert found.winner == before
    # One that is in the space no more is no obstacle.
    odd = Choice.of({"threads": 160}, "user cache")
    assert search(Pretended(mass(3), landscape), CLIMB, incumbent=odd).winner == before


def test_without_time_the_model_wins() -> None:
    found = search(Pretended(mass(3), landscape), CLIMB, seconds=0.0)
    assert found.winner == MODEL
    assert found.seconds[MODEL]


def test_a_budget_is_kept() -> None:
    machine = Pretended(mass(3), landscape)
    found = search(machine, CLIMB, seconds=40.0)
    # A round that has begun is finished.
    assert machine.now < 60.0
    assert MODEL in found.seconds


def test_a_compiled_family_is_the_models_choice() -> None:
    """Square products have kernels of their own, which generated ones must beat."""
    machine = Pretended(product(8, 8, 8), lambda x: 1.0)
    assert search(machine, CLIMB).winner == MODEL
    machine = Pretended(product(8, 8, 8), lambda x: 1.0 if x == {} else 0.5)
    found = search(machine, CLIMB)
    assert found.winner.parameters is not None


@pytest.mark.nvrtc
@pytest.mark.parametrize(("name", "program"), [("bk1 p=6", mass(6)), ("chain n=8", chain(8))])
def test_candidates_compile(
    name: str, program: ElementProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registers and spills are those of the machine code; what spills is not timed."""
    cuda = test_cuda_compile.native()
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path))
    # So many blocks leave a thread too few registers.
    machine = Pretended(program, lambda x: 0.9 if x.get("fetch") == 2 else 1.0)
    read: dict[str, Mapping[str, int]] = {}

    def resources(kernel: Kernel) -> Mapping[str, int]:
        found: Mapping[str, int] = cuda.resources(cuda.specialise(kernel.source, "sm_90"))
        read[kernel.source] = found
        return found

    monkeypatch.setattr(machine, "resources", resources)
    space = Space((one("min_blocks", None, 2, 8), one("fetch", 1, 2), one("threads", None, 256)))
    found = search(machine, space, workers=2)
    assert all(0 < x["registers"] <= 255 and x["local"] >= 0 for x in read.values())
    spilled = [x for x in read.values() if x["local"] > 0]
    assert found.removed["registers spill"] == len(spilled) > 0
    timed = [found.candidates[x] for x in found.seconds]
    assert all(x.spilled == 0 for x in timed)
    for x in timed:
        assert x.kernel is not None and x.registers * x.kernel.attributes["threads"] <= 65536
    assert len(timed) == len(read) - len(spilled)


# ---- Programs --------------------------------------------------------------------------------

TABLE = np.random.default_rng(0).random((4, 3))


def interpolate(u: jax.Array) -> jax.Array:
    return jm.einsum("xa,yb,eab->exy", TABLE, TABLE, u)


def test_programs_are_found_inside() -> None:
    u = jax.ShapeDtypeStruct((500, 3, 3), np.float64)
    c = jax.ShapeDtypeStruct((500, 4, 4), np.float64)
    (plain,) = tuner.programs(interpolate, u)
    assert plain[1] == (500,)

    def nested(u: jax.Array) -> Any:
        def body(carry: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
            return carry, interpolate(carry).sum()

        summed = jax.lax.scan(body, u, None, length=3)[1]
        branch = jax.lax.cond(u[0, 0, 0] > 0, interpolate, lambda u: 2 * interpolate(u), u)
        loop = jax.lax.while_loop(
            lambda x: x[1].sum() < 0, lambda x: (x[0], interpolate(x[0])), (u, branch)
        )
        return summed, loop, jax.jit(jax.jit(interpolate))(u)

    for function in (nested, jax.jit(nested), jax.checkpoint(nested)):
        assert list(tuner.programs(function, u)) == [plain]
    gradient = jax.grad(lambda u: (interpolate(u) ** 2).sum())
    assert len(list(tuner.programs(gradient, u))) == 2
    # A value that no result needs is not computed.
    assert len(list(tuner.programs(lambda u: jax.vjp(interpolate, u)[1](interpolate(u)), u))) == 2
    assert len(list(tuner.programs(lambda u, c: jax.vjp(interpolate, u)[1](c), u, c))) == 1
    with pytest.raises(ValueError, match=r"neither jm\.einsum nor jm\.fuse"):
        list(tuner.programs(jnp.sin, u))
    with pytest.raises(ValueError, match="nothing is contracted"):
        list(tuner.programs(lambda u: jm.einsum("eij,eij->eij", u, u), u))


def test_the_time_is_a_number() -> None:
    u = np.ones((9, 3, 3))
    no_numbers: list[Any] = ["60", None]
    for seconds in no_numbers:
        with pytest.raises(TypeError, match=f"seconds is a number, not {seconds!r}"):
            jm.tune("eij,ejk->eik", u, u, seconds=seconds)
    for no_time in (-1, np.nan):
        with pytest.raises(ValueError, match=f"seconds is at least 0, not {no_time}"):
            jm.tune("eij,ejk->eik", u, u, seconds=no_time)


@pytest.mark.parametrize("name", suite.SUITES)
def test_suites(name: str) -> None:
    cases = suite.build(name)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert [x.name for x in suite.build(name, "^bk1/p[12]$")] == ["bk1/p1", "bk1/p2"]
    with pytest.raises(ValueError, match="other"):
        suite.build("other")


def test_the_suite_tunes_what_is_benchmarked() -> None:
    """So that its table serves those programs."""

    def key(function: Any, shapes: Any, dtype: str = "float64") -> str:
        arguments = [jax.ShapeDtypeStruct(x, np.dtype(dtype)) for x in shapes]
        ((program, _),) = tuner.programs(function, *arguments)
        return choices.key(program)

    pairs: list[tuple[suite.Case, workloads.Workload]] = [
        (suite.bk1(3), workloads.constant(workloads.bk1(3, 1e6))),
        (suite.bk1(2, "float32"), workloads.constant(workloads.bk1(2, 1e6, "float32"))),
        (suite.chain(5), workloads.constant(workloads.chain(5, 5, 1e6))),
        (suite.chain(3, q=5), workloads.constant(workloads.chain(3, 5, 1e6))),
        (
            suite.interp3d(2, transposed=True),
            workloads.constant(workloads.interp(3, 2, 1e6, transposed=True)),
        ),
        (suite.interp3d(2), workloads.constant(workloads.interp(3, 2, 1e6))),
        (suite.product(4, 4, 4), workloads.bgemm(4, 4, 4, 1e6)),
        (suite.product(7, 9, 13), workloads.bgemm(7, 9, 13, 1e6)),
        (suite.gradient(suite.chain(4)), workloads.chain_grad(4, 1e6, bases=False)),
        (suite.gradient(suite.bk1(2)), workloads.bk1_grad(2, 1e6, bases=False)),
        (suite.bk3(2), workloads.constant(workloads.bk3(2, 1e6))),
        (suite.bk5(2), workloads.constant(workloads.bk5(2, 1e6))),
        (suite.gradient(suite.bk3(1)), workloads.bk3_grad(1, 1e6, bases=False)),
    ]
    for case, workload in pairs:
        mine = key(case.function, [x.shape for x in case.arguments(1e6)], case.dtype)
        assert mine == key(workload.functions()["jm"], workload.shapes, workload.dtype), case.name


def test_traced_bases_are_served_too() -> None:
    for case, workload in (
        (suite.bk1(3), workloads.bk1(3, 1e6)),
        (suite.chain(4), workloads.chain(4, 4, 1e6)),
        (suite.bk3(2), workloads.bk3(2, 1e6)),
    ):
        ((program, _),) = tuner.programs(case.function, *case.arguments(1e6))
        shapes = [jax.ShapeDtypeStruct(x, np.dtype(workload.dtype)) for x in workload.shapes]
        ((traced, _),) = tuner.programs(workload.functions()["jm"], *shapes)
        assert choices.key(traced, constant=True) == choices.key(program), case.name


def test_arguments_have_the_size_asked_for() -> None:
    for case in (suite.bk1(3), suite.bk3(2), suite.gradient(suite.chain(4))):
        ((program, extents),) = tuner.programs(case.function, *case.arguments(1e7))
        assert 0.95e7 < program.least_bytes(extents) <= 1e7


# ---- On this machine -------------------------------------------------------------------------

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="times the CPU's kernels")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    """Times of the CPU's kernels, which run all the same."""

    def timer(self: Device, executable: Any) -> Callable[[], float]:
        seconds = times(executable.choice)
        return lambda: seconds

    def stage(self: Device, choice: Choice) -> Any:
        staged = original(self, choice)
        return Staged(staged, choice)

    original = Device.stage
    monkeypatch.setattr(Device, "stage", stage)
    monkeypatch.setattr(Device, "timer", timer)


class Staged:
    """What is compiled, and what it was chosen from."""

    def __init__(self, staged: Any, choice: Choice) -> None:
        self.staged = staged
        self.choice: Any = "plain" if choice.plain else dict(choice.parameters or {})

    def compile(self) -> "Staged":
        self.compiled = self.staged.compile()
        return self

    def __call__(self, *arguments: Any) -> Any:
        return self.compiled(*arguments)


@on_cpu
def test_a_winner_is_used_by_later_calls(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda x: 0.5 if x == {"block": 2} else 1.0)
    u = jax.random.uniform(jax.random.key(0), (1000, 3, 3), np.float64)
    fn = jax.jit(interpolate)
    wanted, text = fn(u), fn.lower(u).as_text()
    before = fn.lower(u).compile().as_text()
    (tuning,) = jm.tune(fn, u, quiet=True)
    assert dict(tuning.winner.choice.parameters or ()) == {"block": 2}
    assert tuning.regret == 2.0
    assert tuning.stored is not None and [*cache.glob("*.choice")] == [tuning.stored]
    # What is compiled stays so, until it is compiled anew.
    assert fn.lower(u).compile().as_text() == before
    jax.clear_caches()
    assert fn.lower(u).as_text() != text
    np.testing.assert_array_equal(fn(u), wanted)
    (explanation,) = jm.explain(fn, u, quiet=True)
    assert explanation.choice == "block=2 (user cache)"
    # Tuned again, it is the one to beat; unless the model is as good.
    assert jm.tune(fn, u, quiet=True)[0].winner.choice == tuning.winner.choice
    pretend(monkeypatch, lambda x: 1.0)
    assert jm.tune(fn, u, quiet=True)[0].winner.choice == MODEL
    assert jm.explain(fn, u, quiet=True)[0].choice == "the model's choice (user cache)"
    jax.clear_caches()
    assert fn.lower(u).as_text() == text


@on_cpu
def test_plain_jax_may_win(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda x: 0.5 if x == "plain" else 1.0)
    u = jax.ShapeDtypeStruct((1000, 3, 3), np.float64)
    tuning = jm.tune("xa,yb,eab->exy", TABLE, TABLE, u, quiet=True)
    assert tuning.winner.choice == PLAIN
    assert not jm.explain("xa,yb,eab->exy", TABLE, TABLE, u, quiet=True).fused


@on_cpu
def test_nothing_is_kept_unless_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda x: 0.5 if x == {"block": 2} else 1.0)
    u = jax.ShapeDtypeStruct((1000, 3, 3), np.float64)
    (tuning,) = jm.tune(interpolate, u, store=False, quiet=True)
    assert tuning.stored is None and not cache.exists()
    assert jm.explain(interpolate, u, quiet=True)[0].choice == "chosen by the model"


@on_cpu
def test_real_times(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    u = jax.ShapeDtypeStruct((300, 3, 3), np.float64)
    tuning = jm.tune("xa,yb,eab->exy", TABLE, TABLE, u, seconds=3.0)
    printed = capsys.readouterr().out
    assert printed.count("GDOF/s") == len(tuning.variants) > 1
    assert [x.seconds for x in tuning.variants] == sorted(x.seconds for x in tuning.variants)
    best = tuning.winner
    assert best.gbytes == pytest.approx(8 * 300 * (9 + 16) / best.seconds / 1e9)
    assert best.gdofs == pytest.approx(300 * 16 / best.seconds / 1e9)
    assert best.gflops == pytest.approx(300 * 168 / best.seconds / 1e9)
    assert json.loads(json.dumps(tuning.as_json()))["elements"] == 300


@on_cpu
def test_random_data() -> None:
    index = jnp.asarray(np.random.default_rng(0).integers(0, 50, (40, 3)), np.int32)
    fused_sum = jm.fuse(lambda u: TABLE[:3] @ u, (jm.gather(np.asarray(index)),))
    ((program, extents),) = tuner.programs(fused_sum, jnp.ones(50))
    machine = Device(program, extents, jax.devices()[0])
    sets = machine.inputs
    assert len(sets) > 1
    for arguments in sets:
        floats = [np.asarray(x) for x in arguments if x.dtype.kind == "f"]
        assert all((0.5 <= x).all() and (x <= 1.5).all() and x.std() > 0.1 for x in floats)
        (found,) = [x for x in arguments if x.dtype.kind == "i"]
        assert found.shape == index.shape and 0 <= found.min() and found.max() < 50
        assert np.ptp(found, axis=1).max() <= 10  # as near each other as the nodes of an element
    assert not np.array_equal(sets[0][0], sets[1][0])


@pytest.mark.gpu
def test_on_a_gpu(cache: Path) -> None:
    b = np.random.default_rng(0).random((5, 4))

    @jax.jit
    def interpolation(u: jax.Array) -> jax.Array:
        return jm.einsum("xa,yb,zc,eabc->exyz", b, b, b, u)

    u = jax.random.uniform(jax.random.key(0), (20_000, 4, 4, 4), np.float64)
    wanted = interpolation(u)
    (tuning,) = jm.tune(interpolation, u, seconds=8.0, quiet=True)
    assert tuning.architecture.startswith("sm_")
    assert len(tuning.variants) > 1
    assert all(x.registers > 0 for x in tuning.variants)
    assert not tuning.removed[rules.FAILED] and not tuning.removed[rules.WRONG]
    assert jm.explain(interpolation, u, quiet=True)[0].choice.endswith("(user cache)")
    np.testing.assert_allclose(interpolation(u), wanted, rtol=1e-13)


# ---- The command -----------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


@on_cpu
def test_command(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pretend(monkeypatch, lambda x: 0.5 if x == {"block": 2} else 1.0)
    table, results, ratios = (tmp_path / f"{x}.json" for x in ("table", "results", "ratios"))
    some = ("--cases", "chain/n[36]$", "--megabytes", 1)
    assert run(*some, "--table", table, "--json", results, "--verbose") == 0
    printed = capsys.readouterr().out
    assert "block=2" in printed and "geometric mean" in printed and "GDOF/s" in printed
    (entries,) = json.loads(table.read_text())["choices"].values()
    assert {x["name"]: x["parameters"] for x in entries.values()} == {
        "chain/n3": {"block": 2},
        "chain/n6": {"block": 2},
    }
    found = json.loads(results.read_text())
    assert found["geometric_mean"] == pytest.approx(2.0)
    assert found["model_over_tuned"] == {"chain/n3": 2.0, "chain/n6": 2.0}
    assert set(found["programs"]) == {"chain/n3", "chain/n6"}
    assert len([*cache.glob("*.choice")]) == 2

    before = table.read_text()
    assert run(*some, "--table", table, "--missing") == 0
    assert "0 programs" in capsys.readouterr().out
    assert table.read_text() == before

    # What the table says is measured anew; what it lacks is left out.
    pretend(monkeypatch, lambda x: 0.8 if x == {"block": 2} else 1.0)
    more = ("--cases", "chain/n[346]$", "--megabytes", 1)
    assert run(*more, "--table", table, "--regret", ratios) == 0
    found = json.loads(ratios.read_text())
    assert found["model_over_tuned"] == {"chain/n3": 1.25, "chain/n6": 1.25}
    assert found["geometric_mean"] == pytest.approx(1.25)
    assert found["left_out"] == ["chain/n4"]
    # Without a table, what calls use.
    assert run(*some, "--regret", ratios) == 0
    assert json.loads(ratios.read_text())["geometric_mean"] == pytest.approx(1.25)


@on_cpu
def test_command_without_time(cache: Path, capsys: Any) -> None:
    assert run("--cases", "chain/n3$", "--budget", 0) == 0
    assert "left out: chain/n3" in capsys.readouterr().out
    assert run("--cases", "no such case") == 2


@on_cpu
def test_a_case_that_fails_does_not_stop_the_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pretend(monkeypatch, lambda x: 1.0)
    original = suite.Case.arguments

    def arguments(case: suite.Case, total_bytes: float) -> Any:
        if case.name == "chain/n3":
            raise RuntimeError("no memory")
        return original(case, total_bytes)

    monkeypatch.setattr(suite.Case, "arguments", arguments)
    assert run("--cases", "chain/n[34]$", "--megabytes", 1) == 0
    printed = capsys.readouterr().out
    assert "failed: chain/n3: RuntimeError: no memory" in printed
    assert "1 programs" in printed


def test_module_runs() -> None:
    command = [sys.executable, "-P", "-m", "jaxmagma.tune", "--list", "--cases", "bk1/p[12]$"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bk1/p1", "bk1/p2"]
    assert "Warning" not in done.stderr


def test_geometric_mean() -> None:
    assert regret.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert regret.geometric_mean([]) == 1.0
