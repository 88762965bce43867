"""Functions of complex and of real numbers are programs of real ones, with JAX's derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.fallback import plain_calls
from tests.jaxprs import programs


Function = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("standard_promotion")

ELEMENTS, NODES, POINTS = 7, 5, 6
TABLE = np.random.default_rng(0).standard_normal((POINTS, NODES))


def real(*shape: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal((ELEMENTS, *shape)).astype(dtype)


def complex_(*shape: int, dtype: Any = np.complex128, seed: int = 0) -> np.ndarray:
    return (real(*shape, seed=seed) + 1j * real(*shape, seed=seed + 1)).astype(dtype)


def close(found: Any, wanted: Any, units: float = 64) -> None:
    """Equal but for so many units in the last place of the largest of each array."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        sizes = np.abs(np.asarray(other))
        scale = float(np.max(sizes, initial=0, where=np.isfinite(sizes)))
        eps = float(jnp.finfo(other.dtype).eps)
        np.testing.assert_allclose(one, other, rtol=0, atol=units * eps * scale)


def is_one_program(function: Function, *xs: Any, **options: Any) -> bool:
    fused = jm.fuse(function, **options)
    with plain_calls() as calls:
        jax.eval_shape(fused, *xs)
    return len(programs(fused, *xs)) == 1 and not calls


def impedance(u: Any, x: Any) -> Any:
    """A field that oscillates, in a medium that does not."""
    table = TABLE.astype(x.dtype)
    return table.T @ ((table @ u) * x) + (2 - 1j) * u


def power(u: Any, x: Any) -> Any:
    at_points = TABLE @ u
    return jnp.sum(x * jnp.abs(at_points) ** 2), TABLE.T @ (x * jnp.real(at_points))


def scattered(s: Any, u: Any) -> Any:
    return jnp.vdot(s @ u, s @ u).real - jnp.vdot(u, u).real


def turned(u: Any, x: Any) -> Any:
    return TABLE @ (u * jnp.exp(1j * x)) / (1 + jnp.abs(TABLE @ u))


def compressed(stretch: Any, u: Any) -> Any:
    """A layer that absorbs: its coordinates are complex."""
    jacobian = jnp.eye(len(u)) + 0.1 * stretch
    inverse = jnp.linalg.inv(jacobian)
    return jnp.linalg.det(jacobian) * (inverse @ inverse.T @ u)


def stretched(u: Any, x: Any) -> Any:
    stretch = 1 + 1j * x**2
    return TABLE @ (jnp.prod(stretch) / stretch * u)


def solved(a: Any, b: Any) -> Any:
    return jnp.linalg.solve(a + 4 * jnp.eye(len(a)), b)


def moved(u: Any, x: Any) -> Any:
    padded = jnp.pad(u.at[1:3].add(x[:2]), (1, 2))[::-1]
    padded = padded.at[np.array([7, 1, 9, 2, 3])].get(mode="fill", fill_value=2)
    chosen = jnp.where(x[:3] > 0, padded[1:4], x[:3])
    return TABLE @ jnp.concatenate([chosen, jnp.stack([x[0], u[0]])])


def stepped(u: Any, x: Any) -> Any:
    return TABLE @ jax.lax.fori_loop(0, 3, lambda _, z: 0.1 * z * z + u * x, u)


def chosen(u: Any, x: Any) -> Any:
    return TABLE @ jax.lax.cond(x[0] > 0, lambda: u * x, lambda: jnp.conj(u))


def gradient(u: Any, x: Any) -> Any:
    return jax.grad(lambda u: jnp.sum(x * jnp.abs(TABLE @ u) ** 4))(u)


PROGRAMS: dict[str, tuple[Function, tuple[np.ndarray, ...]]] = {
    "impedance": (impedance, (complex_(NODES), real(POINTS))),
    "power": (power, (complex_(NODES), real(POINTS))),
    "scattered": (scattered, (complex_(4, 4), complex_(4))),
    "turned": (turned, (complex_(NODES), real(NODES))),
    "compressed": (compressed, (complex_(2, 2), real(2))),
    "stretched": (stretched, (complex_(NODES), real(NODES))),
    "solved": (solved, (complex_(2, 2), complex_(2))),
    "moved": (moved, (complex_(NODES), real(NODES))),
    "stepped": (stepped, (complex_(NODES), real(NODES))),
    "chosen": (chosen, (complex_(NODES), real(NODES))),
    "gradient": (gradient, (complex_(NODES), real(POINTS))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives_are_those_of_vmap(name: str) -> None:
    function, xs = PROGRAMS[name]
    assert is_one_program(function, *xs)

    def derived(over: Callable[[Function], Function]) -> Any:
        def all_of_it(*xs: Any) -> Any:
            values, pushed = jax.jvp(over(function), xs, tangents)
            _, pull = jax.vjp(over(function), *xs)
            # Cotangents that are complex where values are, and depend on these.
            back = pull(jax.tree.map(lambda x: x * (0.5 + 0.25 * jnp.conj(x)), values))
            return values, pushed, back

        return jax.jit(all_of_it)(*xs)

    def tangent(n: int, x: np.ndarray) -> np.ndarray:
        make = complex_ if np.iscomplexobj(x) else real
        return make(*x.shape[1:], seed=10 + n)

    tangents = tuple(tangent(n, x) for n, x in enumerate(xs))
    close(derived(jm.fuse), derived(jax.vmap), units=1000)


@pytest.mark.parametrize(
    ("function", "xs"),
    [
        (solved, (complex_(4, 4), complex_(4, 2))),
        (solved, (complex_(3, 3), complex_(3))),
        (compressed, (complex_(3, 3), real(3))),
        (lambda a: jnp.linalg.inv(a) @ a.T, (complex_(1, 1),)),
    ],
)
def test_systems_of_more_rows(function: Function, xs: tuple[np.ndarray, ...]) -> None:
    assert is_one_program(function, *xs)
    close(jax.jit(jm.fuse(function))(*xs), jax.vmap(function)(*xs), units=1000)


@pytest.mark.parametrize("name", ["power", "turned"])
def test_second_derivatives_are_those_of_vmap(name: str) -> None:
    function, (u, x) = PROGRAMS[name]

    def total(over: Callable[[Function], Function], x: Any) -> Any:
        leaves = jax.tree.leaves(over(function)(u, x))
        return sum(jnp.sum(jnp.abs(y) ** 2) for y in leaves)

    def twice(over: Callable[[Function], Function]) -> Any:
        return jax.jit(lambda x: jax.jvp(jax.grad(lambda x: total(over, x)), (x,), (x,))[1])(x)

    close(twice(jm.fuse), twice(jax.vmap), units=1000)


# ---- Functions of numbers ------------------------------------------------------------------------

EXTENDED = {
    "reciprocal": lambda z: 1 / z,
    "abs": np.abs,
    "angle": np.angle,
    "conj": np.conj,
    **{name: getattr(np, name) for name in ("exp", "log", "sqrt", "sin", "cos", "sinh", "cosh")},
    **{"tan": np.tan, "tanh": np.tanh, "sign": lambda z: z / np.abs(z)},
    "all": lambda z: np.cumprod(z, -1)[:, ::-1] * np.prod(z, -1, keepdims=True),
    **{"cube": lambda z: z * z * z, "inverse-square": lambda z: 1 / (z * z)},
    "power": lambda z: np.exp(np.log(z) * np.clongdouble(0.3 + 0.2j)),
}
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(jnp, name) for name in EXTENDED if hasattr(jnp, name)},
    **{"reciprocal": lambda z: 1 / z, "cube": lambda z: z**3, "inverse-square": lambda z: z**-2},
    "power": lambda z: z ** (0.3 + 0.2j),
    "all": lambda z: jnp.cumprod(z)[::-1] * jnp.prod(z),
}


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_functions_are_as_accurate_as_their_parts(dtype: Any) -> None:
    random = np.random.default_rng(3)
    angles = random.uniform(-np.pi, np.pi, (400, 4))
    numbers = np.exp(random.uniform(-3, 2, angles.shape) + 1j * angles)
    near_one = np.exp(1j * angles) * (1 + random.uniform(-1e-3, 1e-3, angles.shape))
    axes = np.exp(1j * np.pi / 2 * random.integers(0, 4, angles.shape))
    z = np.stack([numbers, near_one, axes * np.abs(numbers)]).reshape(-1, 4).astype(dtype)

    def every(z: Any) -> dict[str, Any]:
        return {name: function(z) for name, function in FUNCTIONS.items()}

    found = {name: np.asarray(x) for name, x in jax.jit(jm.fuse(every))(z).items()}
    wide = z.astype(np.clongdouble)
    eps = float(jnp.finfo(dtype).eps)
    for name, function in EXTENDED.items():
        wanted = function(wide)
        # To be a result that is so near zero, an argument or half of it has lost digits.
        lost = np.abs(wide) + 1 if name in ("sin", "cos", "tan", "sinh", "cosh", "tanh") else 0
        bound = 16 * eps * (np.abs(wanted) + lost * (1 + np.abs(wanted) ** 2))
        assert np.all(np.abs(found[name] - wanted) <= bound), name


def test_powers_of_zero_and_quotients_by_infinity() -> None:
    z = np.array([[0, 0, 0, 0.5, 1j]], complex)
    w = np.array([[0, 2, 0.5 - 1j, 0, 2]], complex)

    def function(z: Any, w: Any) -> Any:
        return z**w, (1 + z) / (w + complex(1, np.inf)), (1 + z) / (w - np.inf)

    close(jm.fuse(function)(z, w), jax.vmap(function)(z, w))


@pytest.mark.parametrize("name", ["abs", "log", "sqrt", "reciprocal", "sign"])
def test_second_derivatives_where_parts_are_zero_or_of_one_size(name: str) -> None:
    z = np.array([[1 + 1j, -2 + 2j, 3, -0.5j, 1, 1j]]).repeat(3, 0)

    def twice(over: Callable[[Function], Function]) -> Any:
        def total(z: Any) -> Any:
            return jnp.sum(jnp.abs(over(FUNCTIONS[name])(z) + (1 + 0.5j)) ** 2)

        slope = jax.grad(total)
        return jax.jit(lambda z: (slope(z), jax.jvp(slope, (z,), (z * (0.3 + 1j),))[1]))(z)

    close(twice(jm.fuse), twice(jax.vmap))


@pytest.mark.parametrize("exponent", [-300, 300])
def test_quotients_and_magnitudes_of_extreme_numbers(exponent: int) -> None:
    scale = 10.0**exponent
    u, v = complex_(NODES), complex_(NODES, seed=5)

    def function(u: Any, v: Any) -> Any:
        return u / v, jnp.abs(u), jnp.sqrt(u)

    quotient, size, root = jax.jit(jm.fuse(function))(u * scale, v * scale)
    close(quotient, u / v)
    close(size, np.abs(u) * scale)
    close(root, np.sqrt(u) * np.sqrt(scale))


def test_a_loop_that_ends_by_values() -> None:
    def root(z: Any) -> Any:
        """Newton's method for ``z**3 = 1``."""
        return jax.lax.while_loop(
            lambda z: jnp.abs(z**3 - 1) > 1e-12, lambda z: z - (z**3 - 1) / (3 * z**2), z
        )

    z = np.random.default_rng(2).standard_normal((ELEMENTS, 2)) @ np.array([1, 1j])
    found = jax.jit(jm.fuse(root))(z)
    assert {x.dtype for x in programs(jm.fuse(root), z)} == {np.dtype(np.float64)}
    close(found, jax.vmap(root)(z))
    assert np.all(np.abs(np.asarray(found) ** 3 - 1) < 2e-12)


def test_zero_has_a_magnitude_with_a_gradient() -> None:
    zero = np.zeros((3, 2), np.complex128)

    def total(over: Callable[[Function], Function]) -> Any:
        return jax.grad(lambda u: jnp.sum(over(lambda u: jnp.abs(u) + jnp.abs(u) ** 2)(u)))(zero)

    np.testing.assert_array_equal(total(jm.fuse), 0)
    close(total(jm.fuse), total(jax.vmap))


PLACES = np.random.default_rng(9).integers(0, 4, 4)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize(
    "function",
    [
        lambda z, x: jnp.zeros(4, complex).at[PLACES].add(z * x),
        lambda z, x: jnp.sort(z.real).astype(complex).at[PLACES].subtract(x * 1j),
        lambda z, x: (z**0).at[PLACES].multiply(x) + z,
        lambda z, x: jnp.round(z**0, 1) * x,
    ],
    ids=["added", "subtracted", "multiplied", "rounded"],
)
def test_numbers_of_two_precisions(function: Function, dtype: Any) -> None:
    z = complex_(4, dtype=dtype)
    x = z.real + 1
    close(*(jax.jit(f(function))(z, x) for f in (jm.fuse, jax.vmap)))


def test_zero_has_a_sign_without_slope() -> None:
    z, tangent = complex_(4), complex_(4, seed=2)
    z[0], z[1, 2], z[2, 1] = 0, complex(-0.0, 0.0), complex(2, 0)
    found, expected = (jax.jvp(f(jax.lax.sign), (z,), (tangent,)) for f in (jm.fuse, jax.vmap))
    close(found, expected)
    assert np.all(np.asarray(found[1])[z == 0] == 0)


# ---- Arrays of complex numbers -------------------------------------------------------------------


def test_arguments_and_results_stay_as_they_are() -> None:
    u, x = complex_(NODES), real(NODES)

    def function(u: Any, x: Any) -> Any:
        return u, x, u * x, jax.lax.complex(x, -x), jnp.stack([u.real, u.imag], -1)

    close(jm.fuse(function)(u, x), jax.vmap(function)(u, x))


@pytest.mark.parametrize(
    ("whole", "part"),
    [(np.complex64, np.float32), (np.complex64, np.float64), (np.complex128, np.float32)],
)
def test_other_precisions(whole: Any, part: Any) -> None:
    u, x = complex_(NODES, dtype=whole), real(POINTS, dtype=part)
    close(jm.fuse(impedance)(u, x), jax.vmap(impedance)(u, x))


def test_complex_numbers_alone_are_a_program_of_these() -> None:
    u, v = complex_(NODES), complex_(POINTS)

    def function(u: Any, v: Any) -> Any:
        return TABLE.astype(complex) @ u + v

    (program,) = programs(jm.fuse(function), u, v)
    assert program.dtype == np.complex128


def test_nested_and_mapped_along_other_axes() -> None:
    u = np.moveaxis(np.stack([complex_(NODES, seed=n) for n in range(3)]), 0, 1)
    x = real(POINTS)
    inner = jm.fuse(impedance, in_axes=(0, None))
    found = jm.fuse(inner)(u, x)
    assert is_one_program(inner, u, x)
    close(found, jax.vmap(jax.vmap(impedance, (0, None)))(u, x))
    columns, own = (1, None), (u[0].T, x[0])
    close(jm.fuse(impedance, columns)(*own), jax.vmap(impedance, columns)(*own))


def test_gradients_of_what_elements_share() -> None:
    shared, x = complex_(NODES)[0], real(POINTS)

    def total(over: Callable[..., Function], u: Any, x: Any) -> Any:
        return jnp.sum(jnp.abs(over(impedance, in_axes=(None, 0))(u, x)) ** 2)

    def gradients(over: Callable[..., Function]) -> Any:
        return jax.jit(jax.grad(lambda *xs: total(over, *xs), (0, 1)))(shared, x)

    close(gradients(jm.fuse), gradients(jax.vmap), units=1000)


def test_a_linear_function_has_jaxs_transpose() -> None:
    u, x = complex_(NODES), real(POINTS)
    v = jax.vmap(impedance)(u, x)
    one, other = (
        jax.linear_transpose(lambda u, over=over: over(impedance)(u, x), u)(v)
        for over in (jm.fuse, jax.vmap)
    )
    close(one, other)


def test_global_vectors() -> None:
    random = np.random.default_rng(7)
    index = random.integers(0, 11, (ELEMENTS, NODES))
    vector = random.standard_normal(11) + 1j * random.standard_normal(11)
    x = real(POINTS)

    def assembled(u: Any, x: Any) -> Any:
        gathered = jm.gather(jnp.asarray(index))
        added = jm.scatter_add(jnp.asarray(index), 11)
        return jm.fuse(impedance, in_axes=(gathered, 0), out_axes=added)(u, x)

    def plain(u: Any, x: Any) -> Any:
        return jnp.zeros(11, complex).at[index].add(jax.vmap(impedance)(u[index], x))

    def with_gradients(function: Function) -> Any:
        def total(*xs: Any) -> Any:
            return jnp.sum(jnp.abs(function(*xs)) ** 2)

        return jax.jit(lambda *xs: (function(*xs), jax.grad(total, (0, 1))(*xs)))(vector, x)

    close(with_gradients(assembled), with_gradients(plain), units=1000)


def test_what_no_program_computes_is_in_between() -> None:
    def function(u: Any, x: Any) -> Any:
        spectrum = jnp.fft.fft(u * x)
        return TABLE @ (jnp.abs(spectrum) * jnp.conj(u))

    u, x = complex_(NODES), real(NODES)
    close(jm.fuse(function)(u, x), jax.vmap(function)(u, x))


def test_no_elements() -> None:
    u, x = complex_(NODES)[:0], real(POINTS)[:0]
    close(jm.fuse(impedance)(u, x), jax.vmap(impedance)(u, x))
