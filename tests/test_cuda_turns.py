"""Products along both axes of a plane, one after the other in the registers of a warp."""

import re
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

from jaxmagma.lowering.cuda import spreads
from jaxmagma.lowering.cuda.banks import Access, conflicts_at
from jaxmagma.plan import Middle
from jaxmagma.program import ElementProgram
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import arguments, assert_close, chain, contraction, gradient, mass
from tests.test_cuda_compile import emulate, lowered
from tests.test_cuda_quads import emulate_fused


TURN: dict[str, Any] = {"quads": True, "turn": True}


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def barriers(source: str) -> int:
    return source.count("sync<kThreads>()")


# ---- Lines -----------------------------------------------------------------------------------


def test_every_line_has_one_quad() -> None:
    lines = spreads.line(np.arange(48), spreads.ACROSS)
    assert (np.sort(lines.reshape(6, 8)) == np.arange(48).reshape(6, 8)).all()


@pytest.mark.parametrize("stride", [4, 12, 20, 28])
@pytest.mark.parametrize("along", [0, 1])
def test_rows_four_apart_meet_in_no_bank(stride: int, along: int) -> None:
    """Neither along the rows nor across them."""
    plane = ((1, -1), (16, 1 - along), (4, along))
    assert conflicts_at(Access(plane, 32, spreads.ACROSS), (stride, 1), 0, 8) == 0


# ---- What is turned --------------------------------------------------------------------------


def test_an_element_that_is_a_plane_needs_no_shared_memory() -> None:
    apart, turned = (lowered(chain(10), quads=True, turn=x) for x in (False, True))
    assert turned.attributes["shared_bytes"] == 0 < apart.attributes["shared_bytes"]
    assert barriers(turned.source) == 0 and turned.source.count("turn<") == 2
    assert "2 products turned" in turned.description


def test_a_mass_operator_has_two_barriers() -> None:
    """Of four: two axes are one stage, on the way in and on the way out."""
    apart, turned = (lowered(mass(11), quads=True, turn=x).source for x in (False, True))
    assert (barriers(apart), barriers(turned)) == (4, 2)
    assert turned.count("turn<") == 2
    stores = re.compile(r"store<\d+>")
    assert len(stores.findall(turned)) < len(stores.findall(apart))


@pytest.mark.parametrize(
    "program",
    [
        mass(11),
        mass(15),
        mass(13, sign=1),
        chain(16),
        gradient(mass(13)),
        mass(13, dtype="complex128"),
    ],
    ids=["small", "large", "symmetric", "one plane", "gradient", "complex"],
)
def test_what_the_model_leaves_as_it_is(program: ElementProgram) -> None:
    assert "turn<" not in lowered(program).source


@pytest.mark.parametrize("p", [12, 13, 14])
def test_the_model_turns_products_in_a_row(p: int) -> None:
    assert lowered(mass(p)).source == lowered(mass(p), quads=True, turn=True).source
    assert "turn<" in lowered(mass(p)).source and "turn<" not in lowered(mass(p), turn=False).source


def test_where_nothing_can_be_turned_all_is_as_before() -> None:
    program = contraction("xa,eab->exb", {"x": 14, "a": 13, "b": 15})
    assert lowered(program, **TURN).source == lowered(program, quads=True).source
    assert lowered(mass(11), quads=False, turn=True).source == lowered(mass(11), quads=False).source


def test_streamed_operands_keep_their_sweep() -> None:
    kernel = lowered(cuda_fused.diffusion(9, planes=True), **TURN, stream=True)
    assert "turn<" in kernel.source and "rows as they are needed" in kernel.description


# ---- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8, 9, 13, 16, 17, 25, 32])
def test_numbers_of_planes(n: int, emulated: Path) -> None:
    emulate(chain(n), (3,), emulated, **TURN)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (mass(9), {"fetch": 0}),
        (mass(6), {"elements": 3, "threads": 64, "fetch": 2}),
        (gradient(chain(11)), {"elements": 2, "threads": 96, "in_place": True}),
        (mass(9), {"ahead": True, "fetch": 2}),
        (gradient(chain(11)), {"ahead": True, "fetch": 3, "twice": True}),
        (mass(6), {"padding": 0, "in_place": False}),
        (mass(9), {"apart": True, "hold": False}),
    ],
    ids=str,
)
def test_numbers_do_not_depend_on_parameters(
    program: ElementProgram, options: dict[str, Any], emulated: Path
) -> None:
    emulate(program, (5,), emulated, **TURN, **options)


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("middle", get_args(Middle))
def test_numbers_do_not_depend_on_the_order(middle: Any, turn: bool, emulated: Path) -> None:
    emulate(mass(8), (3,), emulated, quads=True, turn=turn, middle=middle)


def test_every_order_is_another_kernel() -> None:
    program = cuda_fused.diffusion(9, planes=True)
    orders = get_args(Middle)
    assert len({lowered(program, middle=x, stream=False).source for x in orders}) == len(orders)


def test_numbers_of_rectangular_planes(emulated: Path) -> None:
    """Every axis of another size, and of another number of points."""
    sizes = dict(zip("xiaykbzlc", (12, 9, 9, 7, 14, 14, 10, 3, 3), strict=True))
    program = contraction("xi,yk,zl,exyz,xa,yb,zc,eabc->eikl", sizes)
    emulate(program, (4,), emulated, **TURN)


@pytest.mark.parametrize("options", [{}, {"padding": 0}, {"threads": 64, "fetch": 0}], ids=str)
def test_numbers_of_gradients_of_all_operands(options: dict[str, Any], emulated: Path) -> None:
    for program in (chain(12, constant=False), mass(5, constant=False)):
        emulate(gradient(program), (5,), emulated, **TURN, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_of_fused_planes(stream: bool, emulated: Path) -> None:
    emulate_fused(cuda_fused.diffusion(6, planes=True), 3, emulated, **TURN, stream=stream)
    emulate_fused(cuda_fused.diffusion(9), 2, emulated, **TURN, stream=stream)


def test_nan_stays_where_it_comes_to(emulated: Path) -> None:
    """What is beyond the end of a fibre or of a plane meets zeros, and must not be NaN."""
    program = mass(9)
    kernel = lowered(program, (3,), **TURN)
    arrays = arguments(program, (3,))
    arrays[-1][1, 0, 0, 0] = np.nan
    (got,) = cuda_emulator.run(kernel, program, arrays, emulated)
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()
    rest = [x[[0, 2]] for x in arrays]
    assert_close(program, rest, [np.asarray(got)[[0, 2]]])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("n", [9, 12])
def test_operands_come_as_soon_as_these_are_in_registers(
    n: int, groups: int, emulated: Path
) -> None:
    """Of an element that is one plane: before the next product, not after the last one."""
    options: dict[str, Any] = {**TURN, "ahead": True, "elements": 1, "threads": 32, "fetch": 3}
    source = lowered(chain(n), **options, groups=groups).source
    loop = source[source.index("for (long long first") :]
    assert loop.index("fetch<kThreads") < loop.index("turn<") < loop.rindex("fetch<kThreads")
    for program in (chain(n), gradient(chain(n))):
        emulate(program, (11,), emulated, **options, groups=groups)
