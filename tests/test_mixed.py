"""Values of narrower dtypes and integers in a program: what JAX has of them, in one kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.fallback import plain_calls
from tests.einsums import assert_close, normal
from tests.jaxprs import programs


Function = Callable[..., Any]
GetKey = Callable[[], jax.Array]

ELEMENTS, PLACES = 8, 16
SINGLE, HALF, BRAIN = np.float32, np.float16, jnp.bfloat16
PAIRS = [(SINGLE, np.float64), (BRAIN, SINGLE), (HALF, SINGLE), (BRAIN, np.float64)]

pytestmark = pytest.mark.usefixtures("standard_promotion")


def matrices(dtype: Any, count: int = ELEMENTS) -> Any:
    """Of which a product has a kernel on a CPU, and most of its values."""
    return np.ones((count, PLACES, PLACES), dtype)


def is_one_program(function: Function, *xs: Any, **options: Any) -> bool:
    with plain_calls() as calls:
        jax.eval_shape(jm.fuse(function, **options), *xs)
    return len(programs(jm.fuse(function, **options), *xs)) == 1 and not calls


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        np.testing.assert_array_equal(np.asarray(one, float), np.asarray(other, float))


# ---- Rounding ------------------------------------------------------------------------------------


def numbers(narrow: Any, seed: int) -> Any:
    """Of every binade that there is, with what is special; as subnormal numbers XLA has zeros."""
    info, random = jnp.finfo(narrow), np.random.default_rng(seed)
    exponents = random.uniform(int(info.minexp), int(info.maxexp), ELEMENTS * PLACES - 8)
    values = random.choice([-1, 1], exponents.size) * 2.0**exponents
    largest = float(info.max)
    values[::3] = random.normal(size=values[::3].size)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest, 1.0]
    both = np.concatenate([special, values])
    return random.permutation(both).astype(narrow).reshape(ELEMENTS, PLACES)


OPERATIONS: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "sqrt": lambda x, y: jnp.sqrt(x),
}
# Where NumPy calls it otherwise.
OF_NUMPY: dict[str, Function] = {"sqrt": lambda x, y: np.sqrt(x)}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("narrow", "wide"), PAIRS)
def test_arithmetic_has_the_bits_of_the_narrower_dtype(name: str, narrow: Any, wide: Any) -> None:
    operation = OPERATIONS[name]
    x, y = numbers(narrow, 0), numbers(narrow, 1)

    def function(x: Any, y: Any, a: Any) -> Any:
        return operation(x, y), a @ a

    assert is_one_program(function, x, y, matrices(wide))
    found, _ = jax.jit(jm.fuse(function))(x, y, matrices(wide))
    with np.errstate(all="ignore"):
        expected = np.asarray(OF_NUMPY.get(name, operation)(x, y))
    assert found.dtype == expected.dtype == narrow
    # XLA's threads take what is subnormal in 32 bits for zeros.
    is_kept = ~(np.abs(expected.astype(np.float64)) < float(jnp.finfo(narrow).tiny))
    exact = np.asarray(found).astype(np.float64)
    np.testing.assert_array_equal(exact[is_kept], expected[is_kept].astype(np.float64))
    assert (np.abs(found[~is_kept]) <= jnp.finfo(narrow).tiny).all()


@pytest.mark.parametrize(("narrow", "wide"), [*PAIRS, (HALF, np.float64)])
def test_conversions_are_those_of_xla(narrow: Any, wide: Any) -> None:
    """Of NaN, infinities, what is halfway between two numbers, subnormal or too large."""
    info = jnp.finfo(narrow)
    exact = numbers(narrow, 2).astype(wide)
    with np.errstate(over="ignore"):
        between = exact * wide(1 + 2.0 ** -(int(info.nmant) + 1))
    near = np.nextafter(between, wide(0))
    small = np.random.default_rng(3).uniform(-2, 2, exact.shape) * float(info.tiny)
    x = np.concatenate([exact, between, near, small.astype(wide)])

    def function(x: Any, a: Any) -> Any:
        return x.astype(narrow), x.astype(narrow).astype(wide), a @ a

    a = matrices(wide, len(x))
    assert is_one_program(function, x, a)
    found, expected = (jax.jit(f(function))(x, a)[:2] for f in (jm.fuse, jax.vmap))
    assert_equal(found, expected)
    np.testing.assert_array_equal(*(np.signbit(x[1]) for x in (found, expected)))


def wide(a: Any) -> Any:
    for _ in range(6):
        a = a @ a / jnp.sum(a * a)
    return a


# Functions of a matrix of float64, in which there are other dtypes, but fewer values of these.
INSIDE: dict[str, tuple[Function, float]] = {
    "single": (lambda a: (a @ a).astype(SINGLE).astype(a.dtype) @ a, 1e-6),
    "single functions": (
        lambda a: (jnp.sin(a[0].astype(SINGLE)) / jnp.exp(a[1].astype(SINGLE))) * (a @ a), 1e-5
    ),
    "half": (lambda a: (a @ a).astype(HALF).astype(a.dtype) @ a, 1e-2),
    "brain": (lambda a: jnp.tanh(a.astype(BRAIN)).astype(a.dtype) @ a, 1e-1),
    "single product": (lambda a: (a.astype(SINGLE) @ a.astype(SINGLE)).astype(a.dtype) @ a, 1e-5),
    "both narrower": (
        lambda a: (a.astype(BRAIN).astype(SINGLE) * a.astype(SINGLE)).astype(a.dtype) @ a, 1e-1
    ),
    "determinant": (lambda a: jnp.linalg.det(a.astype(SINGLE)) * wide(a), 1e-4),
    "inverse": (lambda a: jnp.linalg.inv((a + 3 * jnp.eye(3)).astype(SINGLE)) @ wide(a), 1e-4),
    "maximum": (lambda a: jnp.max(a.astype(SINGLE)).astype(a.dtype) * a @ a, 1e-5),
    "mean of truth values": (lambda a: jnp.mean(a > 0) * a @ a, 1e-10),
    "narrower result": (lambda a: (jnp.sin(a @ a).astype(SINGLE), a @ a), 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_is_one_program_with_the_results_and_gradients_of_vmap(name: str, getkey: GetKey) -> None:
    function, tolerance = INSIDE[name]
    a = normal(getkey(), (ELEMENTS, 3, 3))
    assert is_one_program(function, a)

    def everything(transform: Function) -> list[jax.Array]:
        def energy(a: Any) -> Any:
            return sum(jnp.sum(jnp.sin(x.astype(float))) for x in jax.tree.leaves(f(a)))

        def values_and_slopes(a: jax.Array) -> Any:
            return f(a), jax.grad(energy)(a), jax.jvp(energy, (a,), (jnp.cos(a),))[1]

        f = transform(function)
        return jax.tree.leaves(jax.jit(values_and_slopes)(a))

    for x, y in zip(everything(jm.fuse), everything(jax.vmap), strict=True):
        assert x.dtype == y.dtype
        assert_close(x.astype(float), y.astype(float), tolerance)


def test_derivatives_by_operands_of_a_narrower_dtype(getkey: GetKey) -> None:
    a, b = normal(getkey(), (ELEMENTS, 3, 3)), normal(getkey(), (ELEMENTS, 3), SINGLE)
    function = lambda a, b: (wide(a) @ b, jnp.sin(b) * b[0])  # noqa: E731
    assert is_one_program(function, a, b)

    def slopes(transform: Function) -> Any:
        def energy(a: Any, b: Any) -> Any:
            return sum(jnp.sum(x**2) for x in transform(function)(a, b))

        return jax.jit(jax.grad(energy, (0, 1)))(a, b)

    for x, y in zip(slopes(jm.fuse), slopes(jax.vmap), strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 1e-5)


def test_complex_numbers_of_single_precision(getkey: GetKey) -> None:
    a = normal(getkey(), (ELEMENTS, 3, 3), np.complex128)
    function = lambda a: (a @ a).astype(np.complex64).astype(a.dtype) @ a  # noqa: E731
    assert is_one_program(function, a)
    found, expected = (jax.jit(f(function))(a) for f in (jm.fuse, jax.vmap))
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("at", ["operand", "result", "one of two results"])
def test_what_is_wider_at_an_edge_splits_nothing(at: str) -> None:
    """The kernel stays one of float32."""
    functions: dict[str, Function] = {
        "operand": lambda a, b: a @ a + b.astype(SINGLE) @ a,
        "result": lambda a, b: (a @ a).astype(np.float64),
        "one of two results": lambda a, b: ((a @ a).astype(np.float64), jnp.sin(a @ a) @ a),
    }
    a, b = matrices(SINGLE), matrices(np.float64)
    (program,) = programs(jm.fuse(functions[at]), a, b)
    assert program.dtype == SINGLE
    found, expected = (jax.jit(f(functions[at]))(a, b) for f in (jm.fuse, jax.vmap))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 1e-5)


# What is done with numbers of double precision that single precision has as well.
WIDER: dict[str, Function] = {
    "choices": lambda a: jnp.where(a > 0, 1.0, 0.0) * a,
    "a result": lambda a: jnp.where(a > 0, 0.0, -jnp.inf),
    "movement": lambda a: jnp.maximum(a.astype(np.float64), 0.5).T,
    "and back": lambda a: jnp.abs(a).astype(np.float64).astype(SINGLE) @ a,
    "a sort": lambda a: jnp.sort(a[0].astype(np.float64)),
}


def _random_matrices() -> Any:
    random = np.random.default_rng(0)
    return random.normal(size=(ELEMENTS, PLACES, PLACES)).astype(SINGLE)


@pytest.mark.parametrize("name", WIDER)
def test_exact_numbers_of_a_wider_dtype_split_nothing(name: str) -> None:
    a, power = _random_matrices(), lambda a: a @ a @ a @ a
    function = lambda a: (WIDER[name](power(a)), power(a))  # noqa: E731
    (program,) = programs(jm.fuse(function), a)
    assert program.dtype == SINGLE
    assert is_one_program(function, a)
    found, expected = (f(function)(a) for f in (jm.fuse, jax.vmap))
    assert found[0].dtype == expected[0].dtype
    scale = np.max(np.abs(expected[1]))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6 * scale)

    def energy(transform: Function, a: Any) -> Any:
        return sum(jnp.sum(x, where=jnp.isfinite(x)) for x in transform(function)(a))

    slope, expected = (jax.grad(functools.partial(energy, f))(a) for f in (jm.fuse, jax.vmap))
    assert_close(slope, expected, 1e-5)


def test_numbers_that_single_precision_lacks_are_of_the_wider_dtype() -> None:
    a = _random_matrices()
    function = lambda a: (jnp.where(a @ a > 0, 0.1, 1e300), a @ a)  # noqa: E731
    assert not is_one_program(function, a)
    found, expected = (f(function)(a)[0] for f in (jm.fuse, jax.vmap))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


def test_numbers_of_pythons_make_nothing_wider() -> None:
    a = matrices(SINGLE)
    (program,) = programs(jm.fuse(lambda a: jnp.sqrt(2.0) * (a @ a) + 1.5), a)
    assert program.dtype == SINGLE


def test_explain_has_the_rounding(getkey: GetKey) -> None:
    a = normal(getkey(), (ELEMENTS, 3, 3))
    (found,) = jm.explain(jm.fuse(INSIDE["single"][0]), a, quiet=True, every_step=True)
    assert any("round_to_float32" in x for x in found.order)


# ---- Integers ------------------------------------------------------------------------------------

NUMBERS = np.array(
    [[np.nan, np.inf, -np.inf, 0.0, -0.0, -0.5, 0.5, 1.5, -1.5, 2.5, 99.9, -99.9, 127.5, -128.5,
      1e4],
     [255.9, 256.0, -1.0, 65535.9, -32769.0, 2.0**31 - 0.5, 2.0**31, -(2.0**31) - 1, 2.0**32, 1e30,
      -1e30, 3e9, 2.0**40 + 7, -(2.0**40) - 9, 7.0]]
)  # fmt: skip


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"]
)
@pytest.mark.parametrize("own", [np.float64, SINGLE])
def test_numbers_become_integers(dtype: str, own: Any) -> None:
    """Without fractions, and the nearest that there is; of NaN zero."""
    x = NUMBERS.astype(own)

    def function(x: Any, a: Any) -> Any:
        whole = x.astype(dtype)
        return whole, whole.astype(own), 1 / whole.astype(own), a @ a

    assert is_one_program(function, x, matrices(own, len(x)))
    found, expected = (jax.jit(f(function))(x, matrices(own, len(x))) for f in (jm.fuse, jax.vmap))
    assert_equal(found, expected)


# Of two integers, and the largest of their bits that they overflow at.
ARITHMETIC: dict[str, Function] = {
    "add": lambda i, j: i + j,
    "sub": lambda i, j: i - j - 1,
    "neg": lambda i, j: -i,
    "abs": lambda i, j: abs(i),
    "floor_divide": lambda i, j: i // 7 + j // -3,
    "divide": lambda i, j: jax.lax.div(i, jnp.full_like(i, 5)),
    "remainder": lambda i, j: i % 7 - j % -5,
    "rem": lambda i, j: jax.lax.rem(i, jnp.full_like(i, -6)),
    "last bits": lambda i, j: (i & 7) + (15 & j),
    "shifts": lambda i, j: (i << 3) + (j >> 2),
    "times": lambda i, j: i * 3 - j * 5,
    "comparisons": lambda i, j: jnp.where((i < j) | (i == j + 1), i, jnp.maximum(j, i - 3)),
    "sum": lambda i, j: jnp.sum(jnp.minimum(i, 9)) + jnp.clip(j, -5, 6),
    "other dtypes": lambda i, j: i.astype(np.int16).astype(i.dtype) + j.astype(np.uint8),
}


# These JAX has of integers of less than a byte, and all numbers in them are such.
SMALL = ("add", "sub", "neg", "times")
# Of these one operand is negative.
SIGNED = ("floor_divide", "remainder", "rem", "sum")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ARITHMETIC
        for dtype in ("int32", "int16", "uint32", "int8", "int4")
        if name in SMALL or (dtype != "int4" and (dtype != "uint32" or name not in SIGNED))
    ],
)
def test_arithmetic_of_integers(name: str, dtype: str) -> None:
    """In a program of float64, also where it overflows."""
    function = ARITHMETIC[name]
    random, info = np.random.default_rng(0), jnp.iinfo(dtype)
    least, most = int(info.min), int(info.max)
    i, j = (random.integers(least, most, (ELEMENTS, 5), endpoint=True) for _ in "ij")
    i[0, :3], j[0, :3] = (least, most, 0), (most, most, 0)
    x, y = i + 0.25, j.astype(float)

    def element(x: Any, y: Any, a: Any) -> Any:
        return function(x.astype(dtype), y.astype(dtype)), a @ a

    assert is_one_program(element, x, y, matrices(np.float64))
    found, expected = (jax.jit(f(element))(x, y, matrices(np.float64)) for f in (jm.fuse, jax.vmap))
    assert_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint16", "int32", "int64"])
def test_integer_operands_choose(dtype: str, getkey: GetKey) -> None:
    a, k = normal(getkey(), (ELEMENTS, 3, 3)), jnp.asarray(np.arange(ELEMENTS) % 5, dtype)
    function = lambda a, k: (a @ a)[k] + k.astype(a.dtype)  # noqa: E731
    assert is_one_program(function, a, k)
    found, expected = (jax.jit(f(function))(a, k) for f in (jm.fuse, jax.vmap))
    assert_close(found, expected)


def test_places_beyond_all_tiles(getkey: GetKey) -> None:
    a = normal(getkey(), (ELEMENTS, 3, 3), SINGLE)
    k = np.array([0, 2, 3, -3, -4, 2**62, -(2**62), 1])
    for mode in ("fill", "clip"):
        function = lambda a, k, mode=mode: (a @ a).at[k].get(mode=mode)  # noqa: E731
        assert is_one_program(function, a, k)
        found, expected = (jax.jit(f(function))(a, k) for f in (jm.fuse, jax.vmap))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_integers_meet_integers_of_operands(getkey: GetKey) -> None:
    a, k = normal(getkey(), (ELEMENTS, 3, 3)), np.arange(ELEMENTS, dtype=np.int32) % 3

    def function(a: Any, k: Any) -> Any:
        at = jnp.argmax(a[0]).astype(np.int32)
        return jnp.where(at + k == 2, a @ a, -a), jnp.maximum(at, k)

    assert is_one_program(function, a, k)
    found, expected = (jax.jit(f(function))(a, k) for f in (jm.fuse, jax.vmap))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y)


def test_a_cell_and_what_is_left(getkey: GetKey) -> None:
    """As in a method of particles: the whole part is a place, the rest a weight."""
    x, table = normal(getkey(), (ELEMENTS,)), normal(getkey(), (ELEMENTS, 6, 3))

    def function(x: Any, table: Any) -> Any:
        cell = jnp.floor(x).astype(np.int32)
        rest = x - cell
        return (1 - rest) * (table @ table.T)[cell + 2] + rest * (table @ table.T)[cell + 3], cell

    assert is_one_program(function, x, table)

    def energy(transform: Function) -> Any:
        return jax.value_and_grad(
            lambda x: jnp.sum(jnp.sin(transform(function)(x, table)[0])), allow_int=True
        )(x)

    for one, other in zip(energy(jm.fuse), energy(jax.vmap), strict=True):
        assert_close(one, other)
