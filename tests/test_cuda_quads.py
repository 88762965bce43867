"""Which lines neighbouring quads have, and what that means for tiles in shared memory."""

import re
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from jaxmagma.lowering.cuda import spreads
from jaxmagma.lowering.cuda.banks import Access, Candidates, choose, conflicts_at
from jaxmagma.plan import Middle
from jaxmagma.program import ElementProgram
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import arguments, chain, contraction, gradient, mass
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
    candidates = Candidates((size, size, size), 8, 1, True, 15)
    access = Access(((1, 0), (size, 2), along), 64, 4)
    layout, _ = choose(candidates, (access,), price=0.03)
    assert layout.strides == (size * size, size, 1)


@pytest.mark.parametrize("p", [11, 13, 15])
def test_tiles_of_high_order_are_hardly_padded(p: int) -> None:
    kernel = lowered(cuda_fused.diffusion(p), quads=True)
    assert 4 in spreads_of(kernel.source)
    # At most a value after each row and another after each plane make strides odd.
    tile = (p + 1) * ((p + 2) * (p + 3) + 1)
    assert kernel.attributes["shared_bytes"] <= 3 * 8 * (tile + 2)


@pytest.mark.parametrize("most", spreads.SPREADS)
def test_spreads_are_limited(most: int) -> None:
    found = [
        spreads_of(lowered(cuda_fused.diffusion(p), quads=True, spread=most).source)
        for p in (11, 12)
    ]
    assert max(set().union(*found)) == most


def test_blocks_are_no_larger_than_allowed() -> None:
    assert lowered(mass(12), quads=True, elements=3).attributes["threads"] <= 1024


# ---- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fibres", [1, 2, 3])
@pytest.mark.parametrize("size", [12, 15])
def test_numbers_of_spread_lines(size: int, fibres: int, emulated: Path) -> None:
    program = contraction(
        "xa,yb,zc,eabc->exyz", {**dict.fromkeys("abc", size), **dict.fromkeys("xyz", size + 2)}
    )
    found: set[int] = set()
    for most in spreads.SPREADS:
        options: dict[str, Any] = {
            "quads": True,
            "fibres": fibres,
            "spread": most,
            "threads": 64,
        }
        emulate(program, (3,), emulated, **options)
        found |= spreads_of(lowered(program, **options).source)
    assert len(found) > 1


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
        emulate(program, (5,), emulated, quads=True, fibres=fibres)


@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (9, 6), (10, 13)])
def test_nan_stays_in_its_fibre(rows: int, columns: int, emulated: Path) -> None:
    program = contraction("xa,eab->exb", {"x": rows, "a": columns, "b": 3})
    kernel = lowered(program, (5,), quads=True)
    for place in (0, columns - 1):
        (field,) = arguments(program, (5,))
        field[1, place, 2], field[3, place, 0] = np.nan, np.inf
        (got,) = cuda_emulator.run(kernel, program, [field], emulated)
        want = np.zeros_like(got, bool)
        want[1, :, 2] = want[3, :, 0] = True
        np.testing.assert_array_equal(~np.isfinite(got), want)
        assert not np.isnan(got[3]).any()


def test_numbers_of_gradients_of_spread_lines(emulated: Path) -> None:
    emulate(gradient(chain(9)), (13,), emulated, quads=True)


def test_numbers_of_fused_spread_lines(emulated: Path) -> None:
    emulate_fused(cuda_fused.diffusion(7), 5, emulated, quads=True, threads=64)


# ---- What comes ahead ------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 4])
def test_late_operands_need_no_room_of_their_own(elements: int, emulated: Path) -> None:
    program = cuda_fused.diffusion(9)
    options: dict[str, Any] = {"quads": True, "fetch": 1, "prefetch": False, "threads": 64}
    kernel = lowered(program, **options, ahead=True)
    assert "operands ahead" in kernel.description
    once = lowered(program, **options, ahead=False)
    assert kernel.attributes["shared_bytes"] == once.attributes["shared_bytes"]
    # The next one comes when the place is free, before the last sweep.
    *_, before, last = kernel.source.split("sync<kThreads>();")[:-1]
    assert "fetch<" in last and "fetch<" not in before
    emulate_fused(program, elements, emulated, **options, ahead=True)


# ---- What comes in rows ----------------------------------------------------------------------


ROWS: dict[str, Any] = {"quads": True, "stream": True, "threads": 64}


@pytest.mark.parametrize(
    ("p", "options"),
    [
        (3, {}),
        (5, {}),
        (8, {}),
        (3, {"fibres": 1}),
        (5, {"fibres": 3}),
        (8, {"ahead": False}),
        (3, {"ahead": False, "slices": 2}),
        (5, {"ahead": False, "fetch": 0, "spread": 1}),
    ],
    ids=str,
)
def test_numbers_of_streamed_operands(p: int, options: dict[str, Any], emulated: Path) -> None:
    program = cuda_fused.diffusion(p, planes=True)
    for elements in (1, 5):
        emulate_fused(program, elements, emulated, **ROWS, **options)


def test_numbers_of_streamed_weights_and_vectors(emulated: Path) -> None:
    emulate(mass(4), (5,), emulated, **ROWS)
    emulate(gradient(chain(10)), (5,), emulated, **ROWS, elements=1)


def test_numbers_of_streams_beside_sums_over_elements(emulated: Path) -> None:
    """Blocks go through many elements, and add up products of two of their tiles."""
    program = gradient(mass(4, constant=False))
    for ahead in (True, False):
        options: dict[str, Any] = {"quads": True, "stream": True, "ahead": ahead}
        assert "Stream<" in lowered(program, **options).source
        emulate(program, (5,), emulated, **options)


@pytest.mark.parametrize("size", [18, 22])
def test_streams_are_of_one_element(size: int, emulated: Path) -> None:
    """Also where a warp would have two elements, whose fibres are an odd number of octets."""
    kernel = lowered(chain(size), quads=True, stream=True)
    assert "Stream<" in kernel.source and "1 elements" in kernel.description
    emulate(chain(size), (5,), emulated, quads=True, stream=True)


def test_what_is_streamed() -> None:
    program = cuda_fused.diffusion(10, planes=True)
    kernel = lowered(program, **ROWS)
    parts = ", ".join(str(n * 12**3) for n in range(6))
    # In the middle, along the fastest axis, all of D: sixteen rows at a time.
    assert f"Stream<double, kThreads, 2, 1, 144, 12, {parts}> rows3(" in kernel.source
    assert kernel.source.count("rows3.next(") == 1 and "get(each(g3" not in kernel.source
    # Rows of eight values meet in banks; what has an odd size does not begin with a group.
    for declined in (cuda_fused.diffusion(6, planes=True), mass(3)):
        assert "Stream<" not in lowered(declined, **ROWS).source
    assert "Stream<" not in lowered(program, quads=True, stream=False).source
    assert "Stream<" not in lowered(program, **ROWS, elements=2).source


@pytest.mark.nvrtc
@pytest.mark.parametrize("p", [10, 12])
def test_streams_compile_without_spills(p: int) -> None:
    check_registers(lowered(cuda_fused.diffusion(p, planes=True), quads=True, stream=True))


# ---- Orders ----------------------------------------------------------------------------------


@pytest.mark.parametrize("middle", get_args(Middle))
def test_numbers_do_not_depend_on_the_order(middle: Any, emulated: Path) -> None:
    emulate(mass(8), (3,), emulated, quads=True, middle=middle)


def test_every_order_is_another_kernel() -> None:
    program = cuda_fused.diffusion(9, planes=True)
    orders = get_args(Middle)
    assert len({lowered(program, middle=x, stream=False).source for x in orders}) == len(orders)


def test_numbers_of_axes_of_different_sizes(emulated: Path) -> None:
    """Every axis of another size, and of another number of points."""
    sizes = dict(zip("xiaykbzlc", (12, 9, 9, 7, 14, 14, 10, 3, 3), strict=True))
    program = contraction("xi,yk,zl,exyz,xa,yb,zc,eabc->eikl", sizes)
    emulate(program, (4,), emulated, quads=True)
