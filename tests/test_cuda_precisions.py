"""Kernels of single precision and of complex numbers: fibres side by side, matrices near by."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmagma.programs.program import ElementProgram
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import arguments, chain, contraction, gradient, mass
from tests.test_cuda_compile import check_registers, emulate, lowered


# Two matrices, whose values do not fill groups of four.
TWO_MATRICES = ("xa,yb,ecab->ecxy", {"a": 5, "b": 7, "x": 6, "y": 11, "c": 2})


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# ---- Machine code ----------------------------------------------------------------------------

UNSPILLED: dict[str, ElementProgram] = {
    **{f"{dtype} chain n={n}": chain(n, dtype=dtype)
       for dtype in ("float32", "complex64", "complex128") for n in (4, 9, 16, 17, 24, 31, 32)},
    **{f"{dtype} mass p={p}": mass(p, dtype=dtype)
       for dtype in ("float32", "complex64", "complex128") for p in (2, 6, 8)},
}  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", UNSPILLED)
def test_compiles_without_spills(name: str) -> None:
    check_registers(lowered(UNSPILLED[name]))


# ---- Fibres side by side ---------------------------------------------------------------------


def test_short_fibres_of_small_values_come_in_packs() -> None:
    assert "packs<kThreads, 4," in lowered(mass(2, dtype="float32")).source
    assert "packs<kThreads, 2," in lowered(chain(9, dtype="float32")).source
    for program in (chain(16, dtype="float32"), mass(2), mass(2, dtype="complex64")):
        assert "packs<" not in lowered(program).source


@pytest.mark.parametrize(
    "options",
    [
        {"fibres": 2},
        {"fibres": 3, "threads": 32, "elements": 5},
        {"fibres": 4, "threads": 32, "elements": 48},  # tiles take each other's place
    ],
    ids=str,
)
def test_numbers_of_packs(options: dict[str, Any], emulated: Path) -> None:
    """Some threads have fewer fibres than others."""
    emulate(mass(2, dtype="float32"), (23,), emulated, **options)
    emulate(contraction(*TWO_MATRICES), (1,), emulated, owner="threads", **options)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_numbers_of_packs_of_split_products(dtype: str, emulated: Path) -> None:
    sign = 1 if dtype == "float32" else -1
    emulate(mass(5, sign=sign, dtype=dtype), (7,), emulated, fibres=2, even_odd=True)


def test_sums_of_every_thread_have_no_packs(emulated: Path) -> None:
    for size, whole in ((3, True), (9, False)):
        program = gradient(chain(size, dtype="float32", constant=False))
        kernel = emulate(program, (13,), emulated, fibres=2)
        assert ("ProductSum<" not in kernel.source) == ("packs<" not in kernel.source) == whole


def test_numbers_of_fused_packs(emulated: Path, x64: None) -> None:
    program = cuda_fused.diffusion(2)
    arrays = arguments(program, (11,))
    got = cuda_emulator.run(lowered(program, (11,), fibres=2), program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("components", [1, 3])
def test_numbers_of_gathered_packs(components: int, emulated: Path, x64: None) -> None:
    program = cuda_fused.gathering(components, 50)
    arrays = cuda_fused.indexed(program, 13)
    kernel = lowered(program, (13,), fibres=2, owner="threads")
    assert "packs<" in kernel.source
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_matrices_in_the_bank_begin_with_groups(dtype: str, emulated: Path) -> None:
    """What is written there at run time, too."""
    for constant in (True, False):
        program = contraction(*TWO_MATRICES, dtype=dtype, constant=constant)
        kernel = lowered(program, owner="threads")
        assert ("alignas(16)" in kernel.source) == (dtype == "float32")
        emulate(program, (5,), emulated, owner="threads")


# ---- Matrices in shared memory ---------------------------------------------------------------


def test_large_matrices_are_in_shared_memory() -> None:
    """Beyond what threads have at hand of the constant bank: 2048 bytes."""
    for n, dtype, near in ((22, "float32", False), (23, "float32", True), (16, "complex64", False),
                           (17, "complex64", True), (32, "float64", False)):  # fmt: skip
        assert ("near<" in lowered(chain(n, dtype=dtype)).source) == near, (n, dtype)


def test_products_take_and_give_parts_of_fibres() -> None:
    source = lowered(chain(24, dtype="complex64")).source
    assert source.count("gemm_from<") == source.count("gemm_to<") == 2
    assert source.count("= load<24") == 1  # from memory, all at once


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", {"fibres": 3, "threads": 64}),
        ("float32", {"elements": 3}),
        ("float64", {"fibres": 2}),
        ("float64", {"threads": 32, "groups": 2}),
        ("complex64", {}),
        ("complex128", {}),
    ],
    ids=str,
)
def test_numbers_of_near_matrices(dtype: str, options: dict[str, Any], emulated: Path) -> None:
    """Sizes that are no multiples of parts or groups."""
    n = {4: 23, 8: 17, 16: 13}[np.dtype(dtype).itemsize]
    sizes = {"a": n, "b": n + 2, "x": n + 1, "y": n + 4, "c": 2}
    spec = "xa,yb,ecab->ecxy"
    both = contraction(spec, sizes, dtype=dtype, constant=bool(options))
    for program, elements in ((both, 7), (chain(n, dtype=dtype), 5)):
        kernel = emulate(program, (elements,), emulated, owner="threads", **options)
        assert "near<" in kernel.source


def test_a_fibre_for_two_products_comes_whole(emulated: Path, x64: None) -> None:
    """One of their results may take its place, before the other product has read all of it."""
    program = cuda_fused.diffusion(10)
    kernel = lowered(program, (3,), owner="threads")
    assert "near<" in kernel.source
    arrays = arguments(program, (3,))
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


# ---- Tensor cores multiply complex numbers ---------------------------------------------------


def test_where_tensor_cores_multiply_complex_numbers() -> None:
    """Where they take less time, or threads had no registers."""
    wanted = {4: False, 7: False, 8: True, 9: False, 12: True, 16: True, 17: True, 32: True}
    for n, quads in wanted.items():
        assert ("quads<" in lowered(chain(n, dtype="complex128")).source) == quads, n
    assert "quads<" not in lowered(chain(16, dtype="complex64")).source
    assert "quads<" not in lowered(chain(16, dtype="complex64"), owner="quads").source


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fibres": 1, "fetch": 0},
        {"fibres": 3},  # and so matrices are loaded for each product
        {"fetch": 2, "ahead": True, "elements": 3, "threads": 64},
    ],
    ids=str,
)
def test_numbers_of_complex_tensor_cores(options: dict[str, Any], emulated: Path) -> None:
    program = mass(2, dtype="complex128", constant=bool(options))
    emulate(program, (7,), emulated, owner="quads", **options)
    emulate(chain(17, dtype="complex128"), (5,), emulated, owner="quads", **options)


def test_numbers_of_complex_halves_by_tensor_cores(emulated: Path) -> None:
    program = chain(13, sign=-1, dtype="complex128")
    assert "split_gemm" in lowered(program, owner="quads", even_odd=True).source
    emulate(program, (5,), emulated, owner="quads", even_odd=True)


def test_what_is_not_finite_stays_in_its_line(emulated: Path) -> None:
    """A product of complex numbers with an infinity has NaNs, but only in lines that it is in."""
    program = contraction("xa,eab->exb", {"a": 5, "b": 3, "x": 9}, dtype="complex128")
    (u,) = arguments(program, (3,))
    u[1, 2, 1] = np.inf
    kernel = lowered(program, (3,), owner="quads")
    (got,) = cuda_emulator.run(kernel, program, [u], emulated)
    bad = ~np.isfinite(got)
    assert bad[1, :, 1].all()
    bad[1, :, 1] = False
    assert not bad.any()
