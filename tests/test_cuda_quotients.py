"""Divisions by one value in CUDA kernels."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices
from jaxmagma.choices import Choice
from jaxmagma.lowering import cuda
from jaxmagma.lowering.cuda.kernels import chosen
from jaxmagma.lowering.cuda.panels import Panels
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import ElementProgram, Input, Output
from tests import cuda_emulator
from tests.test_cuda_compile import check_registers, lowered


VALUES = 11
DTYPES, OWNERS = ["float64", "float32"], ["threads", "panels"]


def by_one(dtype: str) -> ElementProgram:
    """The values of an element divided by one that it has, and by a constant."""
    builder, own = Builder(1), np.dtype(dtype)
    a, b = (builder.input(Input((0,), tile, own)) for tile in ((VALUES,), ()))
    third = builder.constant(np.array(3, own))
    found = [builder.pointwise("div", [(a, "i"), (x, "")], "i", {"i": VALUES}) for x in (b, third)]
    return builder.build([Output(x, (0,)) for x in found]).program


def operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Of nearly all magnitudes; many quotients next to a power of two, and what is not finite."""
    rng, kind = np.random.default_rng(0), np.finfo(dtype)

    def drawn(shape: tuple[int, ...], least: int) -> np.ndarray:
        exponents = rng.integers(least, kind.maxexp, shape)
        return np.ldexp(rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape), exponents)

    with np.errstate(over="ignore"):
        a = drawn((900, VALUES), kind.minexp).astype(dtype)
        b = drawn((900,), kind.minexp).astype(dtype)
    b[:9] = [0, -0.0, np.inf, -np.inf, np.nan, kind.max, kind.tiny, 1, 3]
    b[9:400] = np.nextafter(rng.choice([0.5, 1, 2, 1024], 391).astype(dtype), np.array(0, dtype))
    a[::4, :8] = [0, -0.0, np.inf, -np.inf, np.nan, kind.max, -kind.max, 1]
    a[1::4] = rng.uniform(0.5, 2, (225, VALUES)).astype(dtype)
    a[:, -1] = b
    return a, b


def assert_quotients(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """They are those of a division, to the last bit if no number is at the ends of the range."""
    kind = np.finfo(a.dtype)
    with np.errstate(all="ignore"):
        wanted, digits = a / b, 2.0**kind.nmant
        magnitudes = np.abs(np.broadcast_arrays(a, b, wanted))
    least = np.array([8 * digits * kind.tiny, kind.tiny, 4 * kind.tiny]).reshape(-1, 1, 1)
    within = ((magnitudes >= least) & (magnitudes <= kind.max / 2**9)).all(axis=0)
    special = ~np.isfinite(wanted) | (wanted == 0) & ((a == 0) | np.isinf(b))
    exact = within | special
    np.testing.assert_array_equal(found[exact], wanted[exact])
    signed = exact & ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[signed]), np.signbit(wanted[signed]))
    np.testing.assert_allclose(found, wanted, 2 * kind.eps, 2 * kind.smallest_subnormal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", OWNERS)
def test_bits_of_divisions(owner: str, dtype: str, emulated: Path) -> None:
    program, (a, b) = by_one(dtype), operands(dtype)
    kernel = lowered(program, (len(a),), owner=owner)
    found, third = cuda_emulator.run(kernel, program, [a, b], emulated)
    assert_quotients(found, a, b[:, None])
    assert_quotients(third, a, np.array([[3]], dtype))


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", OWNERS)
def test_compiles(owner: str, dtype: str) -> None:
    check_registers(lowered(by_one(dtype), owner=owner))


def test_constant_divisors_are_no_tables() -> None:
    """Of a constant the reciprocal is another: a table that is computed no panel has."""
    builder = Builder(1)
    table = builder.constant(np.random.default_rng(0).uniform(-1, 1, (11, 10)))
    u = builder.input(Input((0,), (10,), np.dtype("float64")))
    v = builder.contract([(table, "qi"), (u, "i")], "q", {"q": 11, "i": 10})
    third = builder.constant(np.array(3.0))
    w = builder.pointwise("div", [(v, "q"), (third, "")], "q", {"q": 11})
    out = builder.contract([(table, "qi"), (w, "q")], "i", {"q": 11, "i": 10})
    plan = cuda.planned(builder.build([Output(out, (0,))]).program)
    assert isinstance(chosen(plan, None, cuda.ANY_GPU), Panels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", OWNERS)
def test_on_a_gpu(owner: str, dtype: str) -> None:
    a, b = operands(dtype)
    with choices.using(Choice.of({"owner": owner}, choices.CALLER)):
        found, third = jax.jit(jm.fuse(lambda a, b: (a / b, a / 3)))(a, b)
    assert_quotients(np.asarray(found), a, b[:, None])
    assert_quotients(np.asarray(third), a, np.array([[3]], dtype))
