"""The gamma function's logarithm, its derivatives, and the inverse of erf: exact, and vmap's."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmagma as jm
from jaxmagma import native
from jaxmagma.programs.reference import evaluate
from tests.jaxprs import programs


Function = Callable[..., Any]
DTYPES = [np.float64, np.float32]
RNG = np.random.default_rng(0)
EULER = 0.57721566490153286061
ANYWHERE = np.concatenate(
    [
        *(RNG.uniform(-10, 10, 500), RNG.uniform(0.5, 6, 300), RNG.uniform(-200, 200, 100)),
        *(10.0 ** RNG.uniform(-30, 30, 100), -(10.0 ** RNG.uniform(-30, 3, 100))),
    ]
)
SPECIAL = np.array([1, 2, 0.5, 1.5, 2.5, 4, 0, -0.0, -1, -2, -300, 1e38, -1e38, *[np.inf] * 2])
SPECIAL = np.array([*SPECIAL[:-1], -np.inf, np.nan])


def fused(function: Function, x: np.ndarray) -> np.ndarray:
    """By a kernel, of enough elements that they are worth one, or as its program says."""
    many, mapped = np.tile(x, (64, 1)), jm.fuse(function)
    (program,) = programs(mapped, many)
    (explained,) = jm.explain(mapped, many, quiet=True)
    run = mapped if explained.fused else lambda x: evaluate(program, x)[0]
    return np.asarray(jax.jit(run)(many))[-1]


def anywhere(dtype: Any) -> np.ndarray:
    x = ANYWHERE.astype(dtype)
    return x[(x > 0) | (x != np.floor(x))]  # no poles


def polygamma(order: int) -> Function:
    return lambda x: lax.polygamma(jnp.full_like(x, order), x)


# ---- Values --------------------------------------------------------------------------------------


def lgamma_near(zero: int, z: np.ndarray) -> np.ndarray:
    """The logarithm of the gamma function a small ``z`` away from one or two, by its series."""
    zeta = [math.pi**2 / 6, 1.2020569031595942, math.pi**4 / 90, 1.0369277551433699]
    zeta += [math.pi**6 / 945, 1.0083492773819228]
    made = z * ((1 - EULER) if zero == 2 else -EULER)
    for k, x in enumerate(zeta, start=2):
        made = made + (-z) ** k * (x - (zero == 2)) / k
    return np.asarray(made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lgamma(dtype: Any) -> None:
    x = anywhere(dtype)
    eps = np.finfo(dtype).eps
    exact = np.array([math.lgamma(y) for y in x.tolist()])
    # Below a half, it is the difference of larger numbers.
    larger = np.array([math.lgamma(1 - y) if y < 0.5 else 0 for y in x.tolist()])
    scale = 1 + np.abs(exact) + np.abs(larger)
    # XLA is in the place of kernels that there are not; in older releases its log1p is worse.
    ulps = 128 if isinstance(native.load("cpu"), str) else 8
    assert (np.abs(fused(lax.lgamma, x) - exact) <= ulps * eps * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [1, 2])
def test_lgamma_beside_its_zeros(dtype: Any, zero: int) -> None:
    """There is no absolute error: the logarithm of a number close to one has its digits."""
    steps = np.array([10.0**-k for k in range(2, 7)])
    x = (zero + np.concatenate([steps, -steps])).astype(dtype)
    z = x.astype(float) - zero
    rtol = 16 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(fused(lax.lgamma, x), lgamma_near(zero, z), rtol=rtol)
    assert fused(lax.lgamma, np.full(3, zero, dtype)).tolist() == [0, 0, 0]


def exact_digamma(x: np.ndarray) -> np.ndarray:
    """By the recurrence, and the asymptotic series of large arguments."""
    x = x.astype(np.longdouble)
    y, shift = np.where(x < 0.5, 1 - x, x), np.zeros_like(x)
    for _ in range(20):
        small = y < 20
        shift = shift - np.where(small, 1 / y, 0)
        y = np.where(small, y + 1, y)
    made = shift + np.log(y) - 1 / (2 * y)
    numbers = [(1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6)]
    for k, (a, b) in enumerate(numbers, start=1):
        made -= np.longdouble(a) / b / (2 * k) * y ** (-2 * k)
    pi = np.arctan(np.longdouble(1)) * 4
    below = x < 0.5
    made[below] -= pi / np.tan(pi * (x - np.round(x))[below])
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_digamma(dtype: Any) -> None:
    x = anywhere(dtype)
    exact = exact_digamma(x)
    error = np.abs(fused(lax.digamma, x) - exact)
    # Absolute beside its zeros, as JAX's is.
    assert (error <= 8 * np.finfo(dtype).eps * (1 + np.abs(exact))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_erf_inv(dtype: Any) -> None:
    info = np.finfo(dtype)
    close = 1 - 10.0 ** RNG.uniform(math.log10(info.eps), -1, 300)
    tiny = 10.0 ** RNG.uniform(math.log10(info.tiny) + 1, 0, 300)
    x = np.concatenate([RNG.uniform(-1, 1, 500), close, -close, tiny]).astype(dtype)
    x = x[np.abs(x) < 1]
    found = fused(lax.erf_inv, x).astype(float)
    for given, y in zip(np.abs(x).astype(float).tolist(), np.abs(found).tolist(), strict=True):
        # One step of Newton's from there is how far it is off.
        slope = 2 / math.sqrt(math.pi) * math.exp(-y * y)
        off = math.erf(y) - given if given < 0.5 else (1 - given) - math.erfc(y)
        assert abs(off) <= 6 * float(info.eps) * slope * y
    assert (np.sign(found) == np.sign(x)).all()
    outside = np.array([1, -1, 1.5, -2, np.inf, np.nan, 0], dtype)
    expected = [np.inf, -np.inf, *[np.nan] * 4, 0]
    np.testing.assert_array_equal(fused(lax.erf_inv, outside), np.array(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [lax.lgamma, lax.digamma, lax.erf_inv, polygamma(1)])
def test_poles_and_what_is_infinite(function: Function, dtype: Any) -> None:
    x = SPECIAL.astype(dtype)
    expected = np.array(jax.vmap(function)(x))
    if function is lax.digamma:  # NaN in older releases
        expected[x == 0] = -np.inf
    if function not in (lax.lgamma, lax.digamma, lax.erf_inv):
        expected[x == np.inf] = 0  # NaN in JAX
        # A term that is no number of float32 is left out there.
        expected = np.where(x > 1e30, expected.dtype.type(0), expected)
        x = np.where(x == 1e38, np.inf, x).astype(dtype)
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(fused(function, x), expected, rtol=16 * eps, atol=8 * eps)


@pytest.mark.parametrize("order", [1, 4])
def test_polygamma(order: int) -> None:
    x = np.concatenate([RNG.uniform(-8, 10, 300), 10.0 ** RNG.uniform(-8, 8, 50)])
    expected = jax.vmap(polygamma(order))(x)
    atol = 1e-13 * math.factorial(order)
    np.testing.assert_allclose(fused(polygamma(order), x), expected, rtol=1e-13, atol=atol)


def test_an_order_that_is_computed_is_left_to_jax() -> None:
    def function(n: Any, x: Any) -> Any:
        return x @ lax.polygamma(n, x)

    n, x = np.tile([1.0, 2.0], (3, 1)), RNG.uniform(1, 2, (3, 2))
    np.testing.assert_allclose(jm.fuse(function)(n, x), jax.vmap(function)(n, x), rtol=1e-13)


def test_values_of_narrower_dtypes() -> None:
    def function(x: Any) -> Any:
        y = x.astype(jnp.bfloat16)
        return [f(y).astype(x.dtype) * x for f in (lax.lgamma, lax.digamma, lax.erf_inv)]

    x = RNG.uniform(0.1, 0.9, (5, 4)).astype(np.float32)
    for found, expected in zip(jm.fuse(function)(x), jax.vmap(function)(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2**-7)


# ---- Derivatives ---------------------------------------------------------------------------------

TABLE = RNG.normal(size=(4, 3))
CASES: dict[str, tuple[Function, Sequence[float]]] = {
    "lgamma": (lax.lgamma, [1, 2, 0.5, 0.4999, 1e-3, 3.7, 60, -0.5, -1.3, -2.7, -8.1, 0, -1]),
    "digamma": (lax.digamma, [1, 2, 0.5, 0.4999, 1e-3, 3.7, 60, -0.5, -1.3, -2.7, -8.1, 0, -1]),
    "erf_inv": (lax.erf_inv, [0, 1e-9, 0.5, -0.7, 1 - 2.0**-20, 2.0**-26 - 1, 0.25, 1, -1]),
    "quantile": (jax.scipy.special.ndtri, [0.5, 1e-9, 0.1, 0.02, 0.999, 0.9]),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_jax(name: str) -> None:
    """At zeros, beside poles, and on both sides of where one branch becomes another."""
    function, points = CASES[name]
    x = np.array(points)

    def everything(transform: Function) -> Any:
        def value(x: jax.Array) -> jax.Array:
            return transform(function)(x)

        def slopes(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(value(x)))(x)

        return jax.jit(
            lambda x: (
                slopes(x),
                jax.grad(lambda x: jnp.sum(slopes(x)))(x),
                jax.jvp(slopes, (x,), (jnp.ones_like(x),))[1],
            )
        )(x)

    for found, expected in zip(everything(jm.fuse), everything(jax.vmap), strict=True):
        finite = np.isfinite(expected)
        assert finite[: len(x) - 2].all()
        np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-11, atol=1e-13)


def test_derivatives_beside_products() -> None:
    """All of it is in kernels: no plain JAX is between them."""

    def function(x: Any) -> Any:
        y = lax.lgamma(TABLE @ x) + lax.digamma(1 + jnp.cosh(TABLE @ x))
        return TABLE.T @ (y * lax.erf_inv(jnp.tanh(y) / 2))

    def everything(transform: Function) -> Any:
        def value(x: Any) -> Any:
            return jnp.sum(jnp.sin(transform(function)(x)))

        return jax.jit(lambda x: jax.value_and_grad(value)(x))

    x = RNG.uniform(0.3, 0.6, (7, 3))
    for found, expected in zip(everything(jm.fuse)(x), everything(jax.vmap)(x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert len(programs(everything(jm.fuse), x)) == 2
    names = {y.primitive.name for y in jax.make_jaxpr(everything(jm.fuse))(x).jaxpr.eqns}
    assert names.isdisjoint({"lgamma", "digamma", "polygamma", "erf_inv"})
