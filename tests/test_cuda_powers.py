"""Powers of halves and thirds in CUDA kernels."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices
from jaxmagma.choices import Choice
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import ElementProgram, Input, Output
from tests import cuda_emulator
from tests.test_cuda_compile import lowered


# Of what an energy has, and its derivatives, each one less than the one before.
EXPONENTS = [1 / 3, 1 / 3 - 1, 2 / 3, -2 / 3, -2 / 3 - 1, -2 / 3 - 2, -4 / 3, 7 / 3, 10 / 3]
EXPONENTS += [0.5, -0.5, 1.5, -2.5, 3.5]
OTHERS = [0.3333, 0.66666667, 1.4, -4 / 3 - 3, 12.5, 3.0]
OTHERS += [1.4 - 0.4, 1 + 2.0**-52, 1.1 - 0.6, 1.5 - 2.0**-52, -2 + 2.0**-51]
OWNERS = ["threads", "panels"]


def powers(dtype: str) -> ElementProgram:
    """The values of an element to the power of each."""
    builder, own = Builder(1), np.dtype(dtype)
    x = builder.input(Input((0,), (3,), own))
    outputs = []
    for exponent in EXPONENTS + OTHERS:
        b = builder.constant(np.array(exponent, own))
        outputs.append(builder.pointwise("pow", [(x, "i"), (b, "")], "i", {"i": 3}))
    return builder.build([Output(x, (0,)) for x in outputs]).program


def operand(dtype: str) -> np.ndarray:
    """Of all magnitudes, near one, and what is special."""
    rng, kind = np.random.default_rng(0), np.finfo(dtype)
    special = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -2, -8, kind.max, kind.tiny, -kind.tiny]
    near, all_ = rng.uniform(0.01, 5, 300), np.exp2(rng.uniform(kind.minexp, kind.maxexp, 300))
    return np.array([*special, *near, *all_]).astype(dtype).reshape(-1, 3)


def assert_powers(found: list[np.ndarray], x: np.ndarray) -> None:
    """Within some units in the last place of the power with just that exponent."""
    kind = np.finfo(x.dtype)
    for exponent, got in zip(EXPONENTS + OTHERS, found, strict=True):
        exact = np.asarray(exponent, x.dtype).astype(np.longdouble)
        with np.errstate(all="ignore"):
            want = np.power(x.astype(np.longdouble), exact).astype(x.dtype)
        np.testing.assert_allclose(
            got, want, 8 * kind.eps, 8 * kind.smallest_subnormal, err_msg=str(exponent)
        )
        # To the bit where there is but one answer, signs of zeros included.
        only = ~np.isfinite(want) | (want == 0) | (x == 1)
        np.testing.assert_array_equal(np.asarray(got)[only], want[only], str(exponent))
        signed = only & ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got)[signed], np.signbit(want)[signed])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("owner", OWNERS)
def test_powers(owner: str, dtype: str, emulated: Path) -> None:
    program, x = powers(dtype), operand(dtype)
    kernel = lowered(program, (len(x),), owner=owner)
    assert_powers(cuda_emulator.run(kernel, program, [x], emulated), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("owner", OWNERS)
def test_on_a_gpu(owner: str, dtype: str) -> None:
    x = operand(dtype)

    def every(x: jax.Array) -> list[jax.Array]:
        return [x ** jnp.asarray(b, x.dtype) for b in EXPONENTS + OTHERS]

    with choices.using(Choice.of({"owner": owner}, choices.CALLER)):
        assert_powers([np.asarray(y) for y in jax.jit(jm.fuse(every))(x)], x)
