"""Kernels kept on disk: they are those that would be made, and what is damaged is made again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxmagma import choices, lowering
from jaxmagma.choices import MODEL, Choice
from jaxmagma.lowering import kept
from jaxmagma.lowering.cuda import ANY_GPU
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.programs.program import Constant, ElementProgram
from tests.cuda_programs import chain, gradient, mass, mass_gradient_b, product


EXTENTS = (1000,)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_lowering: None) -> Path:
    """A user's cache of this test's own."""
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lowered(program: ElementProgram, extents: tuple[int, ...] = EXTENTS) -> Kernel:
    """As in a process that has made no kernel yet."""
    lowering._lower.cache_clear()
    found = lowering.lower(program, extents, "cuda")
    assert isinstance(found, Kernel)
    return found


def assert_same(one: Kernel, other: Kernel) -> None:
    assert [*one.attributes] == [*other.attributes]
    for name, value in one.attributes.items():
        again = other.attributes[name]
        assert type(again) is type(value), name
        if isinstance(value, np.ndarray):
            assert again.dtype == value.dtype, name
        np.testing.assert_array_equal(again, value, name)
    assert replace(one, attributes={}) == replace(other, attributes={})


def no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no kernel is made."""

    def made(*arguments: object) -> Kernel:
        raise AssertionError("a kernel is made, where there is one on disk")

    monkeypatch.setattr(lowering, "_made", made)


@pytest.mark.parametrize(
    "program",
    [mass(2), mass(2, constant=False), mass(6, sign=1), mass_gradient_b(2), product(4, 4, 4)],
    ids=["constant", "traced", "halves", "sum", "compiled"],
)
def test_a_kept_kernel_is_the_one_that_was_made(
    program: ElementProgram, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lowered(program)
    no_more(monkeypatch)
    assert_same(made, lowered(program))


def test_one_kernel_serves_all_element_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered(mass(2))
    summed = lowered(mass_gradient_b(2))
    other = lowered(mass_gradient_b(2), (7,))
    assert summed.workspace != other.workspace
    no_more(monkeypatch)
    lowered(mass(2), (7,))
    assert lowered(mass_gradient_b(2)).workspace == summed.workspace


def test_names_say_all_that_a_kernel_is_made_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = mass(2)

    def name(
        program: ElementProgram = usual, choice: Choice = MODEL, target: Target = ANY_GPU
    ) -> str:
        return kept.name_of(program, EXTENTS, target, choice)

    others = (
        replace(x, constant=Constant(x.constant.array + 1)) if x.constant else x
        for x in usual.inputs
    )
    other_values = replace(usual, inputs=tuple(others))
    other_choice = Choice.of({"threads": 64}, "test")
    names = {name(), name(mass(3)), name(other_values), name(choice=other_choice)}
    targets = (Target("cuda", even_odd=x) for x in (False, True))
    names.update(name(target=x) for x in (*targets, Target("cuda", "sm_90")))
    monkeypatch.setattr(kept, "_sources", lambda: "another release")
    names.add(name())
    assert len(names) == 8


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not ours", "not text"])
def test_damaged_kernels_are_made_again(folder: Path, damage: str) -> None:
    made = lowered(chain(3))
    (file,) = folder.glob("*.kernel")
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(
        {
            "truncated": whole[:-1],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
            "not ours": b"{}",
            "not text": b"\xff\n\xff",
        }[damage]
    )
    assert_same(made, lowered(chain(3)))
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / "cache", Path("/proc/nowhere")):
        monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(where))
        lowered(chain(3))
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    lowered(chain(3))
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_dtypes_that_no_kernel_has(folder: Path) -> None:
    # NumPy has no buffers of them.
    found = lowering.lower(chain(3, dtype="bfloat16"), EXTENTS, "cuda")
    assert isinstance(found, Declined)
    assert not folder.exists()


def test_what_a_tuner_tries_and_what_runs_on_a_cpu_is_not_kept(folder: Path) -> None:
    with choices.using(Choice.of({"threads": 64}, "test")):
        lowered(chain(3))
    assert isinstance(lowering.lower(chain(3), EXTENTS, "cpu"), Kernel | Declined)
    assert not folder.exists()


# ---- Nothing else decides --------------------------------------------------------------------


def test_what_lowering_reads_is_part_of_what_it_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment and the devices may change in a process, and between processes."""
    program = gradient(mass(10, constant=False))
    symmetric = mass(9, sign=1)
    for where in (str(folder), "off"):
        monkeypatch.setenv("JAXMAGMA_CACHE_DIR", where)
        for _ in range(2):
            found = []
            for value in ("on", "off"):
                monkeypatch.setenv("JAXMAGMA_EVEN_ODD", value)
                made = lowering.lower(symmetric, EXTENTS, "cuda")
                assert isinstance(made, Kernel)
                found.append("halves" in made.description)
            assert found == [True, False]
            monkeypatch.delenv("JAXMAGMA_EVEN_ODD")
            kinds = []
            for architecture in ("sm_90", "sm_86"):
                monkeypatch.setattr(choices, "architecture", lambda platform, a=architecture: a)
                kinds.append(type(lowering.lower(program, EXTENTS, "cuda")))
            assert kinds == [Kernel, Declined]


def test_a_target_decides_and_not_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So another process, on another machine, makes the same kernel for it."""
    targets = [Target("cuda", x, y) for x in ("sm_80", "sm_90", "sm_120") for y in (None, True)]
    program = mass(9, sign=1)

    def made() -> list[Kernel | Declined]:
        lowering._lower.cache_clear()
        return [lowering.lower_for(program, EXTENTS, x) for x in targets]

    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    here = made()
    monkeypatch.setenv("JAXMAGMA_EVEN_ODD", "off")
    monkeypatch.setattr(choices, "architecture", lambda platform: "sm_86")
    for one, other in zip(here, made(), strict=True):
        assert isinstance(one, Kernel) and isinstance(other, Kernel)
        assert_same(one, other)
