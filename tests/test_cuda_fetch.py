"""What the copy engine brings: element by element, or all in one copy."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmagma.lowering.cuda import lower, planned
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.programs.program import ElementProgram
from tests import cuda_fused
from tests.cuda_programs import chain, contraction, gradient, mass
from tests.test_cuda_compile import emulate, lowered
from tests.test_cuda_quads import emulate_fused


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


# ---- Two places --------------------------------------------------------------------------------


# ---- All elements in one copy ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetch", "options"), [(1, {}), (4, {}), (1, {"ahead": True}), (4, {"ahead": True})], ids=str
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
    emulate_fused(program, 5, emulated, owner="threads", fetch=4, ahead=True)


def test_one_copy_for_all_elements() -> None:
    """They follow each other there as in memory, behind what the first may be away from a group."""
    source = lowered(
        gradient(chain(5, constant=False)), owner="threads", fetch=3, elements=8, ahead=True
    ).source
    assert source.count("fetch_slice<kThreads, 25>(thread") == 6  # the first ones and the next
    places = re.findall(r"fetched\(shared \+ (\d+), g\d\(0\)\) \+ (\d+) \* e", source)
    begins = sorted({int(begin) for begin, _ in places})
    assert {int(size) for _, size in places} == {25} and len(begins) == 3
    assert all(y - x >= 8 * 25 + 1 for x, y in pairwise(begins))
    apart = lowered(
        gradient(chain(9, constant=False)), owner="quads", fetch=1, elements=2, threads=64
    ).source
    assert " fetch<" in apart and "fetch_slice<" not in apart


def test_tiles_that_do_not_follow_each_other() -> None:
    """Threads read them where they are."""
    program = contraction("xa,efab->efxb", {"x": 3, "a": 4, "b": 5}, batch="ef")
    assert "fetch" not in lowered(program, (3, 4), owner="threads", fetch=4, ahead=True).source
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


@pytest.mark.parametrize("options", [{}, {"fetch": 4, "ahead": True}], ids=str)
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
