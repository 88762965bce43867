"""What no kernel can do: the result is vmap's, and who asks hears what it was and where."""

import functools
import inspect
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


GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]

ELEMENTS = 5
MATRIX = np.random.default_rng(0).uniform(-1, 1, (3, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def while_loop(a: jax.Array) -> jax.Array:
    def body(c: jax.Array) -> jax.Array:
        return c @ MATRIX * 0.5

    return jax.lax.while_loop(lambda c: jnp.sum(c * c) > 0.1, body, a)


def large(a: jax.Array) -> jax.Array:
    return jnp.pad(a @ a, ((0, 10), (0, 10)))


def positive(a: jax.Array) -> jax.Array:
    return large(a) @ large(a).T + jnp.diag(jnp.arange(3.0, 16.0))


# Functions of a matrix, one line each, what their reason names, and whether they have a gradient.
UNSUPPORTED: dict[str, tuple[Function, str, bool]] = {
    "sort": (lambda a: 2 * jnp.sort(jnp.tile(a @ a, 4).reshape(-1)), "sort", True),
    "argsort": (lambda a: large(a)[0][jnp.argsort(jnp.tile(a, 2).reshape(-1)) % 7], "sort", True),
    "while": (lambda a: while_loop(a), "while", False),
    "lu": (lambda a: jnp.linalg.inv(positive(a)), "lu", True),
    "cholesky": (lambda a: jnp.linalg.cholesky(positive(a)), "cholesky", True),
    "solve": (lambda a: jnp.linalg.solve(positive(a), large(a)[0]) * 2, "lu", True),
    "eigenvalues": (lambda a: jnp.linalg.eigvalsh(positive(a)) + a[0, 0], "eigh", True),
    "at an argmax": (lambda a: large(a).reshape(-1)[jnp.argmax(large(a))] * a, "169 pieces", True),
    "fft": (lambda a: jnp.abs(jnp.fft.fft(a @ a)) + 1.0, "complex128", True),
    "random": (lambda a: a * jax.random.uniform(jax.random.key(a[0, 0].astype(int))), "key", True),
    "integers": (lambda a: a * (jnp.floor(a).astype(int) % 2).astype(a.dtype), "int64", True),
    "bits": (lambda a: a * jax.lax.population_count(a.astype(int)).astype(a.dtype), "int64", True),
    "dynamic slice": (
        lambda a: jax.lax.dynamic_slice(a @ a, (a[0, 0].astype(int), 0), (1, 3)), "int|slice", True
    ),
    "dynamic update": (lambda a: (a @ a).at[a[0, 0].astype(int)].set(1.0) @ a, "int|scatter", True),
    "long scan": (
        lambda a: jax.lax.scan(lambda c, _: (jnp.sin(c @ a) / 3, None), a, None, 99)[0], "99", True
    ),
    "incomplete gamma": (lambda a: jax.lax.igamma(2 + a * a, 1 + a * a) @ a, "igamma", True),
    "log-sum-exp so far": (lambda a: jax.lax.cumlogsumexp(a @ a), "cumlogsumexp", True),
    "convolution": (lambda a: jnp.convolve(a[0], a[1]) * a[0, 0], "convolution of", True),
    "top k": (lambda a: jax.lax.top_k(jnp.tile(a @ a, 20), 9)[0] * 2, "9 largest of 60", True),
    "arc sine of complex": (lambda a: jnp.arcsin(1j * a).real @ a, "complex128", True),
    "large pieces": (lambda a: jnp.max(jnp.outer(jnp.ones(30), a).reshape(-1)), "270", True),
    "singular values": (lambda a: jnp.linalg.svd(positive(a))[1], "svd", True),
    "qr": (lambda a: jnp.linalg.qr(positive(a))[1], "qr", True),
    "triangular solve": (
        lambda a: jax.scipy.linalg.solve_triangular(positive(a), large(a)[0]),
        "triangular_solve",
        True,
    ),
    "table": (lambda a: jnp.interp(a, np.arange(40.0), np.ones(40)), "place|int|scan|search", True),
    "median": (lambda a: jnp.median(jnp.tile(a @ a, 4)), "sort", True),
    "sign bit": (lambda a: jnp.copysign(a @ a, a), "bitcast", True),
    "Bessel function": (lambda a: jnp.i0(a) @ a, "bessel", True),
    "window": (
        lambda a: jax.lax.reduce_window(a, 0.0, jax.lax.add, (2, 2), (1, 1), "SAME"), "window", True
    ),
    "many places": (lambda a: jnp.zeros((30, 20)).at[:3, :3].set(a) * 2, "600 places", True),
    "wider": (lambda a: jnp.arctan((a @ a).astype(np.complex128)).real @ a, "complex128", True),
    "callback": (
        lambda a: jax.pure_callback(np.sin, a, a, vmap_method="expand_dims") @ a, "callback", False
    ),
}  # fmt: skip


@pytest.fixture
def matrices(getkey: GetKey) -> jax.Array:
    return normal(getkey(), (ELEMENTS, 3, 3))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_result_and_gradient_are_those_of_vmap(name: str, matrices: jax.Array) -> None:
    function, _, differentiable = UNSUPPORTED[name]

    def everything(transform: Callable[..., Any]) -> Any:
        mapped = transform(function)
        gradient = jax.grad(lambda a: jnp.sum(jnp.sin(mapped(a))))
        return jax.jit(lambda a: [mapped(a), *([gradient(a)] if differentiable else [])])(matrices)

    assert_close(everything(jm.fuse), everything(jax.vmap), 1e-10)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_reason_names_the_operation_and_the_line(name: str, matrices: jax.Array) -> None:
    function, names, _ = UNSUPPORTED[name]
    with plain_calls() as calls:
        jax.eval_shape(jm.fuse(function), matrices)
    assert calls
    first = calls[0].reason
    assert any(x in first for x in names.split("|")), first
    lines, start = inspect.getsourcelines(function)
    places = {f"{__file__}:{start + n}" for n in range(len(lines))}
    if name == "while":
        places = {f"{__file__}:{n}" for n in range(20, 40)}
    elif "positive" in "".join(lines) and name in ("lu", "cholesky", "solve", "eigenvalues"):
        places |= {f"{__file__}:{positive.__code__.co_firstlineno + 1}"}
    assert any(place in first for place in places), (first, places)


def test_what_is_before_and_behind_stays_fused(matrices: jax.Array) -> None:
    function = jm.fuse(lambda a: jnp.tanh(jax.lax.bessel_i0e(jnp.sin(a @ a))) @ a)
    assert len(programs(function, matrices)) == 2
    with plain_calls() as calls:
        jax.eval_shape(function, matrices)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_small_convolutions_of_float32_are_operations(mode: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ELEMENTS, 12)), np.float32)
    filter_ = np.asarray([1.0, -2.0, 0.5], np.float32)

    def smoothed(x: jax.Array) -> jax.Array:
        return jnp.convolve(jnp.tanh(x), filter_, mode=mode) ** 2

    with plain_calls() as calls:
        found = jax.jit(jm.fuse(smoothed))(x)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(jm.fuse(smoothed)(x))))(x)
    assert calls == []
    np.testing.assert_allclose(found, jax.vmap(smoothed)(x), rtol=1e-5, atol=1e-5)
    wanted = jax.grad(lambda x: jnp.sum(jax.vmap(smoothed)(x)))(x)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_fused_tells_nothing(matrices: jax.Array) -> None:
    with plain_calls() as calls:
        jax.eval_shape(jm.fuse(lambda a: jnp.sin(a @ a)), matrices)
    assert calls == []


def test_a_function_of_integers_alone() -> None:
    k = jnp.arange(ELEMENTS)
    with plain_calls() as calls:
        found = jm.fuse(lambda k: 2 * k + 1)(k)
    np.testing.assert_array_equal(found, 2 * k + 1)
    assert "floating-point" in calls[0].reason


def test_integer_arguments(matrices: jax.Array) -> None:
    k = jnp.arange(ELEMENTS) % 3
    function = lambda a, k: a[k] * k.astype(a.dtype) + a[:, k]  # noqa: E731
    found, expected = (jax.jit(f(function))(matrices, k) for f in (jm.fuse, jax.vmap))
    assert_close(found, expected)
    gradients = (
        jax.grad(lambda a, f=f: jnp.sum(jnp.sin(f(function)(a, k))))(matrices)
        for f in (jm.fuse, jax.vmap)
    )
    assert_close(*gradients)


def _walk(noise: jax.Array) -> jax.Array:
    def step(x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + 0.1 * (MATRIX @ jnp.sin(x) + noise)
        return x, x

    return jax.lax.scan(step, jnp.zeros(3), noise)[1]


@pytest.mark.parametrize("given", ["keys", "uniform numbers"])
def test_random_numbers_stay_in_the_loop_that_makes_them(
    given: str, getkey: GetKey, monkeypatch: pytest.MonkeyPatch, loops: None
) -> None:
    """A GPU has them in memory as what they are distributed like, and as nothing else."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    functions: dict[str, Function] = {
        "keys": lambda x: _walk(jax.random.normal(x, (12, 3))),
        "uniform numbers": lambda x: _walk(np.sqrt(2) * jax.lax.erf_inv(2 * x - 1)),
    }
    function, x = functions[given], jax.random.split(getkey(), ELEMENTS)
    if given == "uniform numbers":
        x = jax.random.uniform(getkey(), (ELEMENTS, 12, 3))
    (program,) = programs(jm.fuse(function), x)
    (argument,) = program.arguments
    assert argument.tile == (12, 3)
    # The inverse of erf alone is more for each of them.
    assert len(program.operations) < 40 * 12 * 3
    assert_close(jm.fuse(function)(x), jax.vmap(function)(x), 1e-12)

    def energy(transform: Function, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(transform(function)(x)))

    if given == "uniform numbers":
        found, expected = (jax.grad(functools.partial(energy, f))(x) for f in (jm.fuse, jax.vmap))
        assert_close(found, expected, 1e-12)


def test_random_keys(matrices: jax.Array) -> None:
    """As arguments, in closures and made on the spot: arrays whose dtype NumPy does not know."""
    keys = jax.random.split(jax.random.key(0), ELEMENTS)

    def function(a: jax.Array, key: jax.Array) -> jax.Array:
        noise = [jax.random.normal(k, (3,)) for k in (key, keys[1], jax.random.key(7))]
        return jnp.sin(a) @ jnp.stack(noise)

    for jit in (jax.jit, lambda f: f):
        found, expected = (jit(f(function))(matrices, keys) for f in (jm.fuse, jax.vmap))
        assert_close(found, expected)


def test_a_switch_by_an_argument(matrices: jax.Array) -> None:
    k = jnp.arange(ELEMENTS) % 3
    branches = [jnp.sin, lambda a: a @ a, lambda a: 2 * a]
    function = lambda a, k: jax.lax.switch(k, branches, a) @ a  # noqa: E731
    found, expected = (jax.jit(f(function))(matrices, k) for f in (jm.fuse, jax.vmap))
    assert_close(found, expected)


def test_tiles_too_large_for_any_chip() -> None:
    a = normal(jax.random.key(0), (2, 200, 200))
    function = lambda a: jnp.sin(a) @ a  # noqa: E731
    with plain_calls() as calls:
        found = jax.jit(jm.fuse(function))(a)
    assert "too many" in calls[0].reason
    assert_close(found, jax.vmap(function)(a), 1e-12)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.complex64, np.complex128])
def test_other_dtypes(dtype: Any, getkey: GetKey) -> None:
    a = normal(getkey(), (ELEMENTS, 3, 3), dtype)
    function = lambda a: (a @ a).T * 2 - a[::-1]  # noqa: E731
    found, expected = (jax.jit(f(function))(a) for f in (jm.fuse, jax.vmap))
    assert_close(found, expected, 20 * float(jnp.finfo(dtype).eps))


def test_several_derivatives_across_what_is_not_fused(matrices: jax.Array) -> None:
    function = lambda a: jnp.sum(jnp.sin(jnp.linalg.cholesky(positive(a)) @ large(a)))  # noqa: E731

    def product(transform: Function) -> Any:
        energy = lambda a: jnp.sum(transform(function)(a) ** 2)  # noqa: E731
        return jax.jit(lambda a: jax.jvp(jax.grad(energy), (a,), (jnp.cos(a),))[1])(matrices)

    assert_close(product(jm.fuse), product(jax.vmap), 1e-9)


def test_a_number_that_all_elements_share_between_bounds_of_their_own() -> None:
    def element(flags: jax.Array, high: jax.Array) -> Any:
        first = jnp.argmax(flags, -1)  # of one flag: zero, whatever it is
        return jax.nn.log_softmax(flags.astype(jnp.float32)), jax.lax.clamp(first, first, high)

    flags, high = jnp.array([[True], [False]]), jnp.array([-2, 3])
    got, want = jm.fuse(element)(flags, high), jax.vmap(element)(flags, high)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("function", [jnp.sin, lambda x: x[:0]])
def test_gradient_by_what_nothing_is_padded_with(function: Function) -> None:
    def gradient(transform: Function) -> Any:
        element = lambda x, y: jax.lax.pad(function(x), y, [(1, 0, 2)])  # noqa: E731
        over = transform(element, in_axes=(0, None))
        energy = lambda y, x: jnp.sum(over(x, y) ** 2)  # noqa: E731
        return jax.grad(energy, (0, 1))(3.0, jnp.zeros((ELEMENTS, 0)))[0]

    assert gradient(jm.fuse) == gradient(jax.vmap) == 6.0 * ELEMENTS


def test_zeros_keep_their_sign_where_values_are_put_together() -> None:
    def element(x: jax.Array) -> Any:
        wide = jnp.concatenate([x, x[:1]])
        return wide, x[jnp.array([2, 0])], jnp.pad(x, 1), jnp.stack([x, -x]), jnp.tile(wide, 2)

    x = jnp.array([[0.0, -0.0, 1.0], [-0.0, -1.0, -0.0]])
    found, expected = jm.fuse(element)(x), jax.vmap(element)(x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other))
