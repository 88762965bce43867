"""Which lines neighbouring quads have, and what that means for tiles in shared memory."""

import re
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from jaxmagma.lowering.cuda import lower
from jaxmagma.lowering.cuda.layout import spreads
from jaxmagma.lowering.cuda.layout.banks import Access, Candidates, choose, conflicts_at
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans import factoring
from jaxmagma.plans.order import Middle
from jaxmagma.programs.program import ElementProgram
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import arguments, assert_close, chain, contraction, gradient, mass
from tests.test_cuda_compile import check_registers, emulate, lowered


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def emulate_fused(program: ElementProgram, elements: int, emulated: Path, **options: Any) -> None:
    kernel = lowered(program, (elements,), **options)
    arrays = arguments(program, (elements,))
    cuda_fused.assert_same(program, arrays, cuda_emulator.run(kernel, program, arrays, emulated))


def spreads_of(source: str) -> set[int]:
    return {int(x) for x in re.findall(r"quads<kThreads, \d+, (\d+), ", source)}


# ---- Lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", spreads.SPREADS)
def test_every_line_has_one_quad(spread: int) -> None:
    lines = spreads.line(np.arange(48), spread)
    assert sorted(lines) == list(range(48))
    # Those of four quads that are served together are so far apart.
    assert (np.diff(lines.reshape(-1, 4)) == spread).all()
    # Two octets have sixteen lines together.
    assert (np.sort(lines.reshape(3, 16)) == np.arange(48).reshape(3, 16)).all()


def test_no_octet_is_taken_more() -> None:
    assert spreads.possible(16, 1) == spreads.possible(25, 1) == spreads.SPREADS
    assert spreads.possible(17, 1) == spreads.possible(24, 1) == (1, 2)
    assert spreads.possible(17, 2) == spreads.SPREADS


def test_global_memory_likes_lines_side_by_side() -> None:
    rows, columns = ((16, 1),), ((16, 20),)
    for stores in (False, True):
        side_by_side, apart = (spreads.pieces(rows, 400, 8, stores, x) for x in (1, 4))
        assert side_by_side < apart if stores else side_by_side <= apart
        # Fibres that are rows are apart anyway.
        assert len({spreads.pieces(columns, 1, 8, stores, x) for x in spreads.SPREADS}) == 1


# ---- Tiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [9, 11, 13, 15, 17, 31])
def test_fibres_of_odd_stride_need_no_padding(size: int) -> None:
    along = (4, 1)  # lanes of a quad, along the middle axis
    for spread, met in ((1, True), (4, False)):
        access = Access(((1, 0), (16, 2), along), 64, spread)
        assert bool(conflicts_at(access, (size * size, size, 1), size**3, 8)) == met
    candidates = Candidates((size, size, size), 8, 1, True)
    access = Access(((1, 0), (size, 2), along), 64, 4)
    layout, _ = choose(candidates, (access,), price=0.03)
    assert layout.axes == (size * size, size, 1)


@pytest.mark.parametrize("p", [11, 13, 15])
def test_tiles_of_high_order_are_hardly_padded(p: int) -> None:
    kernel = lowered(cuda_fused.diffusion(p), owner="quads")
    assert 4 in spreads_of(kernel.source)
    # At most a value after each row and another after each plane make strides odd.
    tile = (p + 1) * ((p + 2) * (p + 3) + 1)
    assert kernel.attributes["shared_bytes"] <= 3 * 8 * (tile + 2)


def test_blocks_are_no_larger_than_allowed() -> None:
    assert lowered(mass(12), owner="quads", elements=3).attributes["threads"] <= 1024


# ---- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fibres", [1, 2, 3])
@pytest.mark.parametrize(("size", "spread"), [(12, 2), (15, 4)])
def test_numbers_of_spread_lines(size: int, spread: int, fibres: int, emulated: Path) -> None:
    program = contraction(
        "xa,yb,zc,eabc->exyz", {**dict.fromkeys("abc", size), **dict.fromkeys("xyz", size + 2)}
    )
    kernel = emulate(program, (3,), emulated, owner="quads", fibres=fibres, threads=64)
    assert {1, spread} <= spreads_of(kernel.source)


@pytest.mark.parametrize(
    ("rows", "columns", "constant", "fibres", "dtype"),
    [
        (1, 1, True, 1, "float64"),
        (1, 6, False, 2, "complex128"),
        (9, 1, True, 3, "float64"),
        (5, 9, False, 1, "complex128"),
        (9, 5, False, 2, "float64"),
        (9, 9, True, 2, "complex128"),
        (9, 9, False, 3, "float64"),
        (10, 13, True, 2, "float64"),
        (17, 10, False, 1, "float64"),
    ],
)
def test_numbers_of_pieces_that_are_not_full(
    rows: int, columns: int, constant: bool, fibres: int, dtype: str, emulated: Path
) -> None:
    """Also from one product to the next, and of what is added up along a fibre."""
    sizes = {**dict.fromkeys("abij", columns), **dict.fromkeys("xy", rows)}
    for subscripts in ("xa,yb,eab->exy", "xa,eab->ex", "xi,yj,exy,xa,yb,eab->eij"):
        program = contraction(subscripts, sizes, dtype=dtype, constant=constant)
        emulate(program, (5,), emulated, owner="quads", fibres=fibres)


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (9, 6), (10, 13)])
def test_nan_stays_in_its_fibre(rows: int, columns: int, emulated: Path) -> None:
    program = contraction("xa,eab->exb", {"x": rows, "a": columns, "b": 3})
    kernel = lowered(program, (5,), owner="quads")
    for place in (0, columns - 1):
        (field,) = arguments(program, (5,))
        field[1, place, 2], field[3, place, 0] = np.nan, np.inf
        (got,) = cuda_emulator.run(kernel, program, [field], emulated)
        want = np.zeros_like(got, bool)
        want[1, :, 2] = want[3, :, 0] = True
        np.testing.assert_array_equal(~np.isfinite(got), want)
        assert not np.isnan(got[3]).any()


def test_numbers_of_gradients_of_spread_lines(emulated: Path) -> None:
    emulate(gradient(chain(9)), (13,), emulated, owner="quads")


def test_numbers_of_fused_spread_lines(emulated: Path) -> None:
    emulate_fused(cuda_fused.diffusion(7), 5, emulated, owner="quads", threads=64)


# ---- What comes ahead ------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 4])
def test_late_operands_need_no_room_of_their_own(elements: int, emulated: Path) -> None:
    program = cuda_fused.diffusion(9)
    options: dict[str, Any] = {"owner": "quads", "fetch": 1, "threads": 64}
    kernel = lowered(program, **options, ahead=True)
    assert "operands ahead" in kernel.description
    once = lowered(program, **options, ahead=False)
    assert kernel.attributes["shared_bytes"] == once.attributes["shared_bytes"]
    # The next one comes when the place is free, before the last sweep.
    *_, before, last = kernel.source.split("sync<kThreads>();")[:-1]
    assert " fetch<" in last and " fetch<" not in before
    emulate_fused(program, elements, emulated, **options, ahead=True)


# ---- What comes in rows ----------------------------------------------------------------------


ROWS: dict[str, Any] = {"owner": "quads", "threads": 64}


@pytest.mark.parametrize(
    ("p", "options"),
    [
        (9, {}),
        (10, {}),
        (12, {}),
        (9, {"fibres": 1}),
        (10, {"fibres": 3}),
        (9, {"ahead": False}),
        (9, {"ahead": False, "fetch": 0}),
        (10, {"ahead": True}),
    ],
    ids=str,
)
def test_numbers_of_streamed_operands(p: int, options: dict[str, Any], emulated: Path) -> None:
    program = cuda_fused.diffusion(p, planes=True)
    assert "Stream<" in lowered(program, **ROWS, **options).source
    for elements in (1, 5):
        emulate_fused(program, elements, emulated, **ROWS, **options)


def test_what_is_streamed() -> None:
    program = cuda_fused.diffusion(10, planes=True)
    kernel = lowered(program, **ROWS)
    parts = ", ".join(str(n * 12**3) for n in range(6))
    # In the middle, along the fastest axis, all of D: sixteen rows at a time.
    assert f"Stream<double, kThreads, 2, 1, 144, 12, {parts}> rows3(" in kernel.source
    assert kernel.source.count("rows3.next(") == 1 and "get(each(g3" not in kernel.source
    # Rows of sixteen values meet in banks; what has an odd size does not begin with a group;
    # weights are less than half of what is moved, other rows too short; and sums are none.
    for declined in (
        cuda_fused.diffusion(14, planes=True),
        cuda_fused.diffusion(9, symmetric=False, planes=True),
        mass(11),
        cuda_fused.diffusion(7, planes=True),
        gradient(mass(9, constant=False)),
    ):
        assert "Stream<" not in lowered(declined, **ROWS).source
    assert "Stream<" not in lowered(program, **ROWS, elements=2).source


@pytest.mark.nvrtc
@pytest.mark.parametrize("p", [10, 12])
def test_streams_compile_without_spills(p: int) -> None:
    kernel = lowered(cuda_fused.diffusion(p, planes=True), owner="quads")
    assert "Stream<" in kernel.source
    check_registers(kernel)


# ---- Orders ----------------------------------------------------------------------------------


def in_order(program: ElementProgram, middle: Middle) -> Kernel:
    """The kernel of a plan with another axis in the middle than the model might have there."""
    plan = factoring.planned(program, middle)
    kernel = lower(plan, (3,), Parameters(owner="quads"), Target("cuda", "sm_90"))
    assert isinstance(kernel, Kernel)
    return kernel


@pytest.mark.parametrize("middle", get_args(Middle))
def test_numbers_do_not_depend_on_the_order(middle: Any, emulated: Path) -> None:
    program = mass(8)
    kernel = in_order(program, middle)
    arrays = arguments(program, (3,))
    assert_close(program, arrays, cuda_emulator.run(kernel, program, arrays, emulated))


def test_every_order_is_another_kernel() -> None:
    program = cuda_fused.diffusion(8, planes=True)
    orders = get_args(Middle)
    assert len({in_order(program, x).source for x in orders}) == len(orders)


def test_numbers_of_axes_of_different_sizes(emulated: Path) -> None:
    """Every axis of another size, and of another number of points."""
    sizes = dict(zip("xiaykbzlc", (12, 9, 9, 7, 14, 14, 10, 3, 3), strict=True))
    program = contraction("xi,yk,zl,exyz,xa,yb,zc,eabc->eikl", sizes)
    emulate(program, (4,), emulated, owner="quads")
