"""Which parameters a program runs with: its name, the files that know, and who is asked first."""

import dataclasses
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices, lowering
from jaxmagma.choices import MODEL, PLAIN, Book, Choice
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import Input, Output
from jaxmagma.tune import suite, tuner
from tests import cuda_fused
from tests.cuda_programs import chain, contraction, gradient, mass, product


ARCH = "sm_90"
EXTENTS = (100_000,)
TUNED = Choice.of({"elements": 2, "threads": 256}, "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_lowering: None) -> Path:
    """A user's cache of this test's own, on a machine that has an H200."""
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(choices, "_unsaved", choices._Unsaved())
    monkeypatch.setattr(choices, "architecture", lambda platform: ARCH)
    return tmp_path


def remember(choice: Choice, program: Any = None, extents: tuple[int, ...] = EXTENTS) -> Any:
    name = choices.entry_name(program or mass(3), extents)
    return choices.remember(ARCH, name, choices.encoded(choice))


def chosen(program: Any = None, extents: tuple[int, ...] = EXTENTS) -> Choice:
    return choices.choose(program or mass(3), extents, "cuda")


# ---- Names -----------------------------------------------------------------------------------


def test_values_of_constants_do_not_matter() -> None:
    b = np.random.default_rng(1).uniform(size=(2, 4, 3))
    programs = [
        jax.make_jaxpr(lambda u, b=b: jm.einsum("xa,yb,eab->exy", b, b, u))(np.ones((50, 3, 3)))
        .eqns[0]
        .params["program"]
        for b in b
    ]
    assert programs[0] != programs[1]
    assert choices.key(programs[0]) == choices.key(programs[1])


def test_everything_else_does() -> None:
    programs = [
        mass(2),
        mass(3),
        mass(3, dtype="float32"),
        mass(3, constant=False),
        chain(4),
        product(4, 4, 4),
        contraction("eij,ekj->eik", dict.fromkeys("ijk", 4)),
        contraction("xa,yb,efab->fexy", dict.fromkeys("xyab", 4), "ef"),
        contraction("xa,yb,efab->fexy", dict.fromkeys("xyab", 4), "fe"),
    ]
    assert len({choices.key(x) for x in programs}) == len(programs)


def test_the_length_of_a_gathered_vector_does_not_matter() -> None:
    short, long = cuda_fused.gathering(1, 50), cuda_fused.gathering(1, 70)
    assert choices.key(short) == choices.key(long) != choices.key(cuda_fused.gathering(2, 50))


def test_names_are_the_same_in_every_process() -> None:
    code = (
        "from tests.cuda_programs import chain, gradient, mass, product;"
        "from jaxmagma import choices;"
        "programs = mass(3), chain(4), product(4, 4, 4), gradient(mass(2, constant=False));"
        "print(*map(choices.key, programs))"
    )
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    programs = mass(3), chain(4), product(4, 4, 4), gradient(mass(2, constant=False))
    assert done.stdout.split() == [*map(choices.key, programs)]


def test_a_traced_basis_takes_the_choice_of_a_constant_one(folder: Path) -> None:
    remember(TUNED)
    traced = mass(3, constant=False)
    assert chosen(traced) == TUNED
    other = Choice.of({"elements": 3}, "test")
    remember(other, traced)
    assert (chosen(traced), chosen()) == (other, TUNED)
    assert chosen(mass(2, constant=False)) == MODEL
    # A vector that is gathered from may be as large as memory.
    vector = cuda_fused.gathering(1, 50)
    huge = tuple(
        dataclasses.replace(x, tile=(1 << 45,)) if x.tile == (50,) else x for x in vector.inputs
    )
    assert choices.key(dataclasses.replace(vector, inputs=huge), constant=True)


def test_small_and_large_calls_are_tuned_apart(folder: Path) -> None:
    remember(TUNED)
    assert chosen() == TUNED
    assert chosen(extents=(200_000,)) == TUNED
    assert chosen(extents=(10,)) == MODEL


# ---- Who is asked ----------------------------------------------------------------------------


def shipped(choice: Choice, **entry: Any) -> None:
    name = choices.entry_name(mass(3), EXTENTS)
    Book(choices.TABLES / f"{ARCH}.json", "").add(
        ARCH, {name: {**choices.encoded(choice), **entry}}
    )


def test_the_model_is_asked_last(folder: Path) -> None:
    assert chosen().origin == "model"
    shipped(Choice.of({"elements": 3}, "test"))
    assert (chosen().origin, dict(chosen().parameters or ())) == ("shipped table", {"elements": 3})
    path = remember(TUNED)
    assert [*(folder / "cache").iterdir()] == [path]
    assert (chosen().origin, chosen()) == ("user cache", TUNED)
    with choices.using(Choice.of({"fibres": 2}, "test")):
        assert (chosen().origin, dict(chosen().parameters or ())) == ("caller", {"fibres": 2})
    remember(MODEL)
    assert (chosen().origin, chosen()) == ("user cache", MODEL)
    assert chosen(mass(2)).origin == "model"


def test_another_architecture_knows_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(TUNED)
    monkeypatch.setattr(choices, "architecture", lambda platform: "sm_80")
    assert chosen() == MODEL
    monkeypatch.setattr(choices, "architecture", lambda platform: "")
    assert chosen() == MODEL


def test_lowering_uses_what_is_known(folder: Path) -> None:
    model = lowering.lower(mass(3), EXTENTS, "cuda")
    assert isinstance(model, Kernel) and model.choice.origin == "model"
    remember(TUNED)
    tuned = lowering.lower(mass(3), EXTENTS, "cuda")
    assert isinstance(tuned, Kernel)
    assert tuned.choice.origin == "user cache"
    assert (tuned.attributes["threads"], tuned.attributes["elements"]) == (256, 2)
    assert model.attributes["elements"] != 2
    remember(PLAIN)
    plain = lowering.lower(mass(3), EXTENTS, "cuda")
    assert isinstance(plain, Declined) and "faster" in plain.reason


@pytest.mark.parametrize(
    "parameters",
    [
        {"elements": 10_000},
        {"no_such_parameter": 1},
        {"groups": 2},
        {"threads": "many"},
        {"fibres": 0},
    ],
    ids=str,
)
def test_what_no_longer_lowers_is_left_to_the_model(
    folder: Path, parameters: dict[str, Any]
) -> None:
    model = lowering.lower(mass(3), EXTENTS, "cuda")
    choice = Choice.of(parameters, "test")
    remember(choice)
    found = lowering.lower(mass(3), EXTENTS, "cuda")
    assert isinstance(model, Kernel) and isinstance(found, Kernel)
    assert found.source == model.source
    assert found.choice.origin == "model"
    with choices.using(choice):
        assert isinstance(lowering.lower(mass(3), EXTENTS, "cuda"), Declined)


# ---- Files -----------------------------------------------------------------------------------


CONTENTS = (
    "",
    "{",
    "[]",
    "null",
    '{"format": 1}',
    '{"format": 999, "choices": {}}',
    '{"format": 1, "choices": []}',
    '{"format": 1, "choices": {"sm_90": 3}}',
    '{"format": 1, "choices": {"sm_90": {"x": 3}}}',
    "[" * 100_000,
)


@pytest.mark.parametrize("content", CONTENTS, ids=lambda x: x[:40])
def test_a_damaged_table_is_ignored(folder: Path, content: str) -> None:
    file = choices.TABLES / f"{ARCH}.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert chosen() == MODEL
        assert chosen() == MODEL
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shipped(TUNED)
        assert chosen() == TUNED


@pytest.mark.parametrize("content", CONTENTS, ids=lambda x: x[:40])
def test_a_damaged_choice_is_ignored(folder: Path, content: str) -> None:
    path = remember(TUNED)
    path.write_text(content)
    assert chosen() == MODEL
    remember(TUNED)
    assert chosen() == TUNED


@pytest.mark.parametrize(
    "entry", [{"parameters": 3}, {"parameters": None}, {"plain": False}, {"other": 1}], ids=str
)
def test_an_odd_entry_is_the_models_choice(folder: Path, entry: dict[str, Any]) -> None:
    choices.remember(ARCH, choices.entry_name(mass(3), EXTENTS), entry)
    assert chosen() == MODEL


def test_another_version_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(TUNED)
    shipped(PLAIN)
    monkeypatch.setattr(jm, "__version__", "0.0.0")
    # A table belongs to the package that it ships with.
    assert chosen() == PLAIN


def test_writers_do_not_lose_each_others_entries(folder: Path) -> None:
    code = (
        "import sys; from jaxmagma import choices\n"
        "for n in range(20): choices.remember('sm_90', f'{sys.argv[1]}-{n}', {'plain': True})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-P", "-c", code, str(number)]) for number in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0] * 3
    user = choices.UserChoices()
    assert all(user.find(ARCH, f"{w}-{n}") for w in range(3) for n in range(20))
    assert len([*(folder / "cache").iterdir()]) == 60


# ---- Several processes -----------------------------------------------------------------------


def test_processes_of_one_program_make_one_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of them has tuned is nothing to the others, which do not know."""
    remember(TUNED)
    mine = lowering.lower(mass(3), EXTENTS, "cuda")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    ours = lowering.lower(mass(3), EXTENTS, "cuda")
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(folder / "of another host"))
    theirs = lowering.lower(mass(3), EXTENTS, "cuda")
    assert isinstance(mine, Kernel) and isinstance(ours, Kernel) and isinstance(theirs, Kernel)
    assert mine.choice.origin == "user cache" and mine.source != ours.source
    assert ours.choice.origin == "model" and ours.source == theirs.source
    shipped(TUNED)
    assert (chosen().origin, chosen()) == ("shipped table", TUNED)
    assert choices.choose(mass(3), EXTENTS, "cpu") == MODEL


class Gpu:
    """A device as JAX describes it."""

    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [(["9.0"], "sm_90"), (["9.0"] * 4, "sm_90"), (["8.6", "9.0"], ""), (["10.0", "12.0"], "")],
)
def test_devices_of_several_architectures_are_any(
    capabilities: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them runs a program is not known when it is lowered."""
    gpus = [Gpu(x) for x in capabilities]
    monkeypatch.setattr(jax, "devices", lambda backend: gpus)
    assert choices.architecture.__wrapped__("cuda") == found


# ---- Where nothing can be kept ---------------------------------------------------------------


def test_without_a_cache_this_process_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    assert remember(TUNED) is None
    assert (chosen(), chosen().origin) == (TUNED, "this process")


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(folder / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert remember(TUNED) is None
    assert chosen() == TUNED


SHIPPED = sorted((Path(jm.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda x: x.stem)
def test_shipped_tables_serve_the_suite(file: Path, cuda_lowering: None) -> None:
    """Its keys are those of today's programs, and its parameters those of today's kernels."""
    platform = "cuda" if file.stem.startswith("sm_") else "cpu"
    entries = Book(file, "").entries(file.stem)
    served = 0
    for case in (suite.bk1(15), suite.chain(7), suite.chain(9), suite.bk3(7)):
        ((program, extents),) = tuner.programs(case.function, *case.arguments(1e9))
        entry = entries.get(choices.entry_name(program, extents))
        if entry is not None:
            served += 1
            assert entry["name"].removesuffix(".0") == case.name
            with choices.using(choices.decoded(entry, "")):
                assert isinstance(lowering.lower(program, extents, platform), Kernel)
    assert served


# ---- On this machine -------------------------------------------------------------------------


@pytest.fixture
def cpu_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path))
    return choices.architecture("cpu")


TABLE = np.random.default_rng(0).random((4, 3))


def interpolate(u: jax.Array) -> jax.Array:
    return jm.einsum("xa,yb,eab->exy", TABLE, TABLE, u)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="looks at the CPU's kernel")
def test_later_calls_and_explain(cpu_cache: str) -> None:
    u = jax.random.uniform(jax.random.key(0), (1000, 3, 3), np.float64)
    (before,) = jm.explain(interpolate, u, quiet=True)
    assert before.choice == "chosen by the model"
    wanted = jax.jit(interpolate)(u)
    text = jax.jit(interpolate).lower(u).as_text()
    assert before.program is not None
    name = choices.entry_name(before.program, (1000,))
    choices.remember(cpu_cache, name, {"parameters": {"block": 4}})
    jax.clear_caches()
    (after,) = jm.explain(interpolate, u, quiet=True)
    assert after.choice == "block=4 (user cache)"
    assert after.choice in str(after)
    assert jax.jit(interpolate).lower(u).as_text() != text
    np.testing.assert_array_equal(jax.jit(interpolate)(u), wanted)
    choices.remember(cpu_cache, name, {"plain": True})
    (plain,) = jm.explain(interpolate, u, quiet=True)
    assert not plain.fused and plain.choice == "plain JAX (user cache)"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="looks at the CPU's kernel")
def test_using_makes_jit_compile_anew() -> None:
    u = jax.random.uniform(jax.random.key(0), (1000, 3, 3), np.float64)
    fn = jax.jit(interpolate)
    text = fn.lower(u).as_text()
    with choices.using(Choice.of({"block": 2}, "")):
        assert fn.lower(u).as_text() != text
        np.testing.assert_array_equal(fn(u), interpolate(u))
    with choices.using(PLAIN):
        assert "jaxmagma_cpu" not in fn.lower(u).as_text()
    assert fn.lower(u).as_text() == text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs the CPU's kernel")
@pytest.mark.parametrize(
    ("spec", "shapes", "most"),
    [
        ("xa,yb,eab->exy", ((4, 3), (4, 3), (1003, 3, 3)), 64),
        ("xi,exy,xk,ekl->eil", ((4, 3), (203, 4, 2), (4, 3), (203, 3, 2)), 64),
        ("xa,yb,eab,exy->x", ((4, 3), (4, 3), (1003, 3, 3), (1003, 4, 4)), 64),
        ("eij,ejk->eik", ((1003, 5, 6), (1003, 6, 7)), 64),
    ],
)
def test_results_do_not_depend_on_the_block(
    spec: str, shapes: tuple[tuple[int, ...], ...], most: int
) -> None:
    rng = np.random.default_rng(0)
    arrays = [jax.numpy.asarray(rng.uniform(-1, 1, shape)) for shape in shapes]
    function = jax.jit(lambda *arrays: jm.einsum(spec, *arrays))
    texts = set()
    for block in (1, 2, 4, 8, 16, 64, 128):
        with choices.using(Choice.of({"block": block}, "")):
            text = function.lower(*arrays).as_text()
            assert ("jaxmagma_cpu" in text) == (block <= most)
            texts.add(text)
            np.testing.assert_allclose(
                function(*arrays), np.einsum(spec, *arrays), rtol=1e-12, atol=1e-12
            )
    assert len(texts) >= 5


def test_numpy_integers_are_in_names_as_integers() -> None:
    """JAX has sizes of parts as such, and what its callers give it."""

    def name(integer: Callable[[int], Any]) -> str:
        zero, one, two = map(integer, range(3))
        builder = Builder(1)
        x = builder.input(Input((0,), (3, 2), np.dtype(np.float32)))
        part = builder.slice(x, 0, one, one, two)
        placed = builder.place([(part, zero, (two, one))], (two, two))
        copies = builder.relabel(placed, "ab", "cab", {"a": two, "b": two, "c": two})
        return choices.key(builder.build([Output(copies, (0,))]).program)

    made = name(np.int64)
    gc.collect()  # an equal program that lives would have its name from the first
    assert made == name(int)
