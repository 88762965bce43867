"""What the copy engine brings: to one place or two, element by element or all in one copy."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmagma.lowering.cuda import lower, planned
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.program import ElementProgram
from tests import cuda_fused
from tests.cuda_programs import chain, contraction, gradient, mass
from tests.test_cuda_compile import emulate, lowered
from tests.test_cuda_quads import emulate_fused


AHEAD: dict[str, Any] = {"ahead": 2}


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


# ---- Two places --------------------------------------------------------------------------------


@pytest.mark.parametrize("fetch", [1, 3])
def test_numbers_of_operands_with_two_places(fetch: int, emulated: Path) -> None:
    """Of even and odd numbers of elements, for each group of threads."""
    program = gradient(chain(9, constant=False))
    options: dict[str, Any] = {"owner": "quads", "ahead": 2, "fetch": fetch}
    for elements in (0, 1, 2, 3, 7, 8):
        emulate(program, (elements,), emulated, **options)
        emulate(mass(6), (elements,), emulated, **options)


def test_two_places_of_an_operand() -> None:
    """They are no other tile's, and next to each other."""
    options: dict[str, Any] = {
        "owner": "quads",
        "elements": 1,
        "threads": 64,
        "fetch": 2,
    }
    program = gradient(chain(12, constant=False))
    once, twice = (lowered(program, **options, ahead=x) for x in (1, 2))
    assert "operands ahead, twice" in twice.description and "twice" not in once.description
    offsets = re.findall(r"s\d+ = .*shared \+ (\d+) \+ (\d+) \* half \+ (\d+) \* e", twice.source)
    assert len(set(offsets)) == 2
    for begin, second, element in offsets:
        assert int(second) >= int(element) >= 144
        inside = range(int(begin), int(begin) + int(second) + int(element))
        others = re.findall(r"const auto s\d+ = .* shared \+ (\d+) \+ \d+ \* e; }", twice.source)
        assert not any(int(x) in inside for x in others)


# ---- All elements in one copy ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetch", "options"), [(1, {}), (4, {}), (4, {"ahead": 1}), (1, AHEAD), (4, AHEAD)], ids=str
)
def test_numbers_of_threads(fetch: int, options: dict[str, Any], emulated: Path) -> None:
    """The last slice has fewer elements than the others."""
    given = {"owner": "threads", "fetch": fetch, "elements": 3, **options}
    for elements in (1, 7, 301):
        emulate(gradient(chain(3, constant=False)), (elements,), emulated, **given)
        emulate(mass(3), (elements,), emulated, **given)
        emulate(mass(2, dtype="float32"), (elements,), emulated, **given)


def test_numbers_of_fused_functions(emulated: Path) -> None:
    program = cuda_fused.diffusion(3)
    emulate_fused(program, 5, emulated, owner="threads", fetch=4, **AHEAD)


def test_one_copy_for_all_elements() -> None:
    """They follow each other there as in memory, behind what the first may be away from a group."""
    source = lowered(
        gradient(chain(5, constant=False)), owner="threads", fetch=3, elements=8, **AHEAD
    ).source
    assert source.count("fetch_slice<kThreads, 25>(thread") == 6  # two for each
    places = re.findall(
        r"fetched\(shared \+ \d+ \+ (\d+) \* half, g\d\(0\)\) \+ (\d+) \* e", source
    )
    assert {(int(second), int(size)) for second, size in places} == {(8 * 25 + 2, 25)}
    apart = lowered(
        gradient(chain(9, constant=False)), owner="quads", fetch=1, elements=2, threads=64
    ).source
    assert " fetch<" in apart and "fetch_slice<" not in apart


def test_tiles_that_do_not_follow_each_other() -> None:
    """Threads read them where they are."""
    program = contraction("xa,efab->efxb", {"x": 3, "a": 4, "b": 5}, batch="ef")
    assert "fetch" not in lowered(program, (3, 4), owner="threads", fetch=4, ahead=1).source
    assert lowered(program, (3, 4), fetch=1).source == lowered(program, (3, 4)).source


def fetches(program: ElementProgram, architecture: str = "sm_90") -> bool:
    kernel = lower(planned(program), (1000,), target=Target("cuda", architecture))
    assert isinstance(kernel, Kernel)
    return "fetch_slice<" in kernel.source


def test_threads_fetch_what_is_far_apart_at_points() -> None:
    """Components, where there is a copy engine, and room for all blocks that have registers."""
    assert fetches(cuda_fused.diffusion(3)) and fetches(cuda_fused.diffusion(4, symmetric=False))
    assert not fetches(cuda_fused.diffusion(3), "sm_86")
    assert not fetches(cuda_fused.diffusion(3, planes=True)) and not fetches(mass(3))


@pytest.mark.parametrize("elements", [1, 29])
def test_numbers_of_components_that_threads_fetch(elements: int, emulated: Path) -> None:
    emulate_fused(cuda_fused.diffusion(3), elements, emulated)


# ---- Rows of results ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fetch": 4, "ahead": 1}, {"fetch": 4, **AHEAD}], ids=str)
def test_numbers_that_leave_in_rows(options: dict[str, Any], emulated: Path) -> None:
    """Also where the last slice has fewer elements, and where results come before other stages."""
    given = {"owner": "threads", "elements": 3, **options}
    programs = (
        gradient(chain(5, constant=False)),
        contraction("xa,eba->ebx", {"x": 5, "a": 4, "b": 3}),
        contraction("xa,ea->ex", {"x": 5, "a": 4}),
    )
    for program in programs:
        # One more sweep, which copies what is complete.
        assert re.search(r"store\(out\d\(e\)", lowered(program, **given).source), "layouts changed"
        for elements in (0, 1, 7, 301):
            emulate(program, (elements,), emulated, **given)
