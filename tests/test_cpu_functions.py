"""The elementary functions of the CPU backend: at most 4 ulp off, on every instruction set.

float32 is compared with float64, float64 with numpy's long double.  ``python
tests/test_cpu_functions.py STRIDE`` prints the largest error of every function over every STRIDE-th
float32; with 1, over all of them.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special

from jaxmagma import native
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.program import Input, Output
from tests.test_cpu import call, instruction_sets, run_elsewhere


Array = np.ndarray[Any, Any]

MOST_ULPS = 4.0
# Those that numpy has a longer type for.
DTYPES = [x for x in ("float32", "float64") if np.finfo(np.longdouble).nmant > np.finfo(x).nmant]


# ---- References --------------------------------------------------------------------------------


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def erf(x: Array) -> Array:
    if x.dtype == np.float64:
        return scipy.special.erf(x)
    # Abramowitz and Stegun 7.1.6, whose terms are all positive.
    near = np.clip(x, -6, 6)
    term = total = 2 * near / np.sqrt(np.arctan(np.ones_like(x)) * 4)
    for n in range(1, 160):
        term = term * (2 * near**2 / (2 * n + 1))
        total = total + term
    return np.where(near == 0, x, np.exp(-(near**2)) * total)


def erfc(x: Array) -> Array:
    if x.dtype == np.float64:
        return scipy.special.erfc(x)
    # Abramowitz and Stegun 7.1.14, a continued fraction.
    far = np.clip(x, 2, 40)
    fraction = far
    for n in range(100, 0, -1):
        fraction = far + n / 2 / fraction
    tail = np.exp(-(far**2)) / (fraction * np.sqrt(np.arctan(np.ones_like(x)) * 4))
    return np.where(x > 2, tail, 1 - erf(x))


REFERENCES: dict[str, Callable[..., Array]] = {
    "cbrt": np.cbrt,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": logistic,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": erf,
    "erfc": erfc,
    "pow": np.power,
    "atan2": np.arctan2,
}
OF_ONE = [name for name in REFERENCES if FUNCTIONS[name].operands == 1]


# ---- Errors ------------------------------------------------------------------------------------


def applied(name: str, *operands: Array) -> Array:
    """A function of the backend, of arrays of one axis."""
    (size,) = operands[0].shape
    rows = -(-size // 64)
    builder = Builder(1)
    inputs = [builder.input(Input((0,), (64,), x.dtype)) for x in operands]
    program = builder.build([Output(builder.map(name, *inputs), (0,))]).program
    (result,) = call(program, *(np.resize(x, (rows, 64)) for x in operands))
    return np.asarray(result).reshape(-1)[:size]


def ulps(name: str, *operands: Array) -> Array:
    """How far the results are from the reference; infinitely, if they are of another kind."""
    dtype = operands[0].dtype
    wide = np.float64 if dtype == np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        got = applied(name, *operands)
        want = REFERENCES[name](*(x.astype(wide) for x in operands))
        rounded = want.astype(dtype)
        limits = np.finfo(dtype)
        # What overflows is as if there were one more exponent.
        beyond = np.copysign(np.ldexp(wide(1), limits.maxexp), got.astype(wide))
        value = np.where(np.isinf(got), beyond, got.astype(wide))
        unit = np.spacing(np.minimum(abs(rounded), limits.max))
        off = abs(value - want) / unit
        same = (got == rounded) & ((got != 0) | (np.signbit(got) == np.signbit(rounded)))
        same |= np.isnan(got) & np.isnan(rounded)
        other = np.isnan(got) | np.isnan(rounded) | (got == rounded)
        return np.where(same, abs(np.where(np.isfinite(off), off, 0)), np.where(other, np.inf, off))


def worst(name: str, *operands: Array) -> tuple[float, str]:
    """The largest error, and where it is."""
    found = ulps(name, *operands)
    n = int(np.argmax(found))
    return float(found[n]), f"{name}({', '.join(repr(x[n]) for x in operands)})"


# ---- Operands ----------------------------------------------------------------------------------


def special(dtype: str) -> Array:
    limits = np.finfo(dtype)
    found = [0, limits.smallest_subnormal, limits.tiny / 3, limits.tiny, limits.eps, 1e-4, 0.5, 1]
    found += [np.nextafter(limits.dtype.type(1), 0), np.nextafter(limits.dtype.type(1), 2)]
    found += [1.5, 2, np.pi / 2, 3, np.pi, 10, 27, 88.7, 89, 104, 709.7, 710, 745.2, 1e5, 1e22]
    found += [1e30, limits.max / 2, limits.max, np.inf, np.nan]
    if dtype == "float64":
        found += [1e-310, 1e300]
    positive = np.array(found, dtype)
    return np.concatenate([positive, -positive])


def patterns(dtype: str, count: int) -> Array:
    """Values with bits that are far from each other, most of them tiny or huge."""
    bits = 8 * np.dtype(dtype).itemsize
    step = int(2**bits / count) | 1
    return (np.arange(count, dtype=np.uint64) * np.uint64(step)).astype(f"uint{bits}").view(dtype)


def of_one(dtype: str) -> Array:
    grids = [np.linspace(-x, x, 20_001) for x in (0.02, 1.2, 12, 120, 800)]
    grids.append(1 + np.linspace(-0.02, 0.02, 10_001))
    return np.concatenate(
        [special(dtype), patterns(dtype, 50_000), *(x.astype(dtype) for x in grids)]
    )


def of_two(dtype: str) -> tuple[Array, Array]:
    pairs = np.array(list(itertools.product(special(dtype), repeat=2)), dtype)
    rng = np.random.default_rng(0)
    a, b = (rng.permutation(patterns(dtype, 30_000)) for _ in range(2))
    near = rng.normal(size=(2, 30_000)).astype(dtype)
    # Powers that are neither 0 nor infinite, mostly.
    limits = np.finfo(dtype)
    base = np.exp(rng.uniform(-1, 1, 30_000) * np.log(limits.max)).astype(dtype)
    most = limits.maxexp * np.log(2) * 1.1 / abs(np.log(base.astype(np.float64)))
    exponent = (rng.uniform(-1, 1, 30_000) * most).astype(dtype)
    return (
        np.concatenate([pairs[:, 0], a, near[0], abs(near[0]), base]),
        np.concatenate([pairs[:, 1], b, near[1], near[1], exponent]),
    )


# ---- Tests -------------------------------------------------------------------------------------


def check(name: str, dtype: str) -> None:
    operands = (of_one(dtype),) if name in OF_ONE else of_two(dtype)
    off, where = worst(name, *operands)
    assert off <= MOST_ULPS, f"{where} is {off} ulp off"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_functions_are_accurate(name: str, dtype: str) -> None:
    check(name, dtype)


def test_functions_are_accurate_on_other_instruction_sets() -> None:
    _, *others = instruction_sets("none").split("it may be: ")[1].split(", ")
    for isa in others:
        assert run_elsewhere(__file__, JAXMAGMA_CPU_ISA=isa) == isa


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ONE)
def test_functions_of_float32_are_accurate(name: str) -> None:
    off, where = worst_of_float32(name, 509)
    assert off <= MOST_ULPS, f"{where} is {off} ulp off"


def worst_of_float32(name: str, stride: int) -> tuple[float, str]:
    """The largest error over every ``stride``-th number."""
    chunk = stride << 22
    found = []
    for first in range(0, 2**32, chunk):
        numbers = np.arange(first, min(first + chunk, 2**32), stride, dtype=np.uint32)
        found.append(worst(name, numbers.view(np.float32)))
    return max(found)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if len(sys.argv) > 1:
        for name in OF_ONE:
            print(name, *worst_of_float32(name, int(sys.argv[1])), flush=True)
    else:
        for name, dtype in itertools.product(REFERENCES, DTYPES):
            check(name, dtype)
        backend = native.load("cpu")
        assert not isinstance(backend, str), backend
        print(backend.instruction_set())
