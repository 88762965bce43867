"""Whole powers that are known."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Map
from tests.jaxprs import programs


pytestmark = pytest.mark.usefixtures("standard_promotion")
B = np.random.default_rng(1).uniform(-1, 1, (6, 6))


def table(like: Any, *shape: int) -> Any:
    return jnp.asarray(B[tuple(map(slice, shape))], like.dtype)


def to(x: Any, exponents: Any) -> Any:
    return x ** jnp.asarray(exponents, x.dtype)


POWERS: dict[str, Callable[[Any], Any]] = {
    "monomials": lambda x: table(x, 6, 6) @ x[0] ** jnp.arange(6),
    "of a tile": lambda x: table(x, 6, 6) @ jnp.sum(to(x[:, None], range(6)), 0),
    "of two axes": lambda x: table(x, 2, 2) @ to(x[0], [[2, 1], [0, 3]]),
    "negative": lambda x: table(x, 4, 4) @ to(x, [-1, -2, 3, 0]),
    "of a number": lambda x: table(x, 4, 4) @ (x**3.0 + x**-2.0),
    "and others": lambda x: table(x, 2, 4) @ to(abs(x), [2, 1.5, 1, 40]),
    "large": lambda x: table(x, 2, 4) @ x**13.0,
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", POWERS)
def test_powers(case: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = (rng.uniform(0.3, 1.5, (7, 4)) * rng.choice([-1, 1], (7, 4))).astype(dtype)
    wide = x.astype(np.float64)
    for function in (POWERS[case], jax.jacfwd(POWERS[case])):
        found, want = jm.fuse(function)(x), jax.vmap(function)(wide)
        assert found.dtype == dtype
        scale = np.abs(want).max()
        np.testing.assert_allclose(found, want, 0, 40 * np.finfo(dtype).eps * scale)


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e200, -1e-200])
def test_powers_of_what_is_special(value: float) -> None:
    exponents = np.array([0.0, 1.0, 2.0, 3.0, -1.0, -2.0])
    got = jm.fuse(lambda x: jnp.sum(x, 0) ** exponents)(np.full((3, 1), value))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, np.broadcast_to(value**exponents, (3, 6)))


def test_they_are_products() -> None:
    x = np.ones((5, 4))

    def written_out(x: Any) -> Any:
        y = x[0]
        return B[:3, :3] @ jnp.stack([y, y * y, y * y * y])

    found = [
        normal_form(*programs(jm.fuse(f), x))[0]
        for f in (written_out, lambda x: B[:3, :3] @ x[0] ** np.array([1.0, 2.0, 3.0]))
    ]
    assert not any(isinstance(x, Map) and x.function == "pow" for x in found[1].operations)
    assert choices.key(found[0]) == choices.key(found[1])


def test_a_whole_power_is_that_of_an_integer() -> None:
    x = np.ones((5, 4))
    found = [
        normal_form(*programs(jm.fuse(lambda x, k=k: B[:4, :4] @ x**k), x))[0] for k in (6, 6.0)
    ]
    assert choices.key(found[0]) == choices.key(found[1])
