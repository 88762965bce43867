"""Numbers of narrower dtypes in CUDA kernels."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import ROUNDINGS
from jaxmagma.programs.program import ElementProgram, Input, Output
from tests import cuda_emulator
from tests.test_cuda_compile import check_registers, lowered


NAMES = sorted(set(ROUNDINGS.values()))
CASES = [("float64", False), ("float64", True), ("float32", False)]


def rounded(dtype: str, name: str) -> ElementProgram:
    """What is rounded to a narrower dtype, and a matrix times that."""
    builder, own = Builder(1), np.dtype(dtype)
    u = builder.input(Input((0,), (6, 5), own))
    matrix = builder.constant(np.random.default_rng(0).uniform(-1, 1, (7, 6)).astype(own))
    v = builder.map(name, u)
    w = builder.contract([(matrix, "xa"), (v, "ab")], "xb", {"x": 7, "a": 6, "b": 5})
    return builder.build([Output(v, (0,)), Output(w, (0,))]).program


def options(panels: bool) -> dict[str, Any]:
    return {"owner": "panels"} if panels else {}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "panels"), [*CASES, ("complex128", False)])
def test_compiles(name: str, dtype: str, panels: bool) -> None:
    if dtype != "complex128" or name == "round_to_float32":
        check_registers(lowered(rounded(dtype, name), **options(panels)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "panels"), CASES)
def test_numbers(name: str, dtype: str, panels: bool, emulated: Path) -> None:
    """Also NaN, infinities, what is halfway between two, and of float16 subnormal numbers."""
    random = np.random.default_rng(1)
    u = random.normal(size=(9, 6, 5)) * 2.0 ** random.integers(-30, 20, (9, 6, 5))
    u[0] = 1 + random.integers(0, 1 << 12, (6, 5)) / 2**11
    u[1, :, :3] = [65504, 65519.9, 65520]
    u[2, 0] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    u = u.astype(dtype)
    program = rounded(dtype, name)
    got, product = cuda_emulator.run(
        lowered(program, (9,), **options(panels)), program, [u], emulated
    )
    expected, other = reference.evaluate(program, jnp.asarray(u))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))
    np.testing.assert_allclose(product[3:], other[3:], rtol=1e-4, atol=1e-4 * np.abs(u[3:]).max())
