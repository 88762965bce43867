"""Functions that XLA's loops do as fast as a kernel are plain JAX, and others are not."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from benchmarks import users
from jaxmagma.faces.explain import applications
from jaxmagma.frontends.conditions import Kind
from jaxmagma.frontends.lines import inlined
from jaxmagma.frontends.loops import are_loops, are_loops_and_products


pytestmark = pytest.mark.usefixtures("loops")

B = np.random.default_rng(0).uniform(-1, 1, (6, 5))

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def places(x: jax.Array) -> jax.Array:
    return jnp.clip((4 * x).astype(int), 0, 3)


LOOPS: dict[str, Case] = {
    "weno": (users.weno, ((20,),)),
    "limiter": (users.limited, ((20,),)),
    "softmax": (jax.nn.softmax, ((10,),)),
    "flux": (users.flux, ((4,),)),
    "newton": (users.newton, ((4,), (4,))),
    "argmax": (jnp.argmax, ((20,),)),
    "concatenation": (lambda x, y: jnp.concatenate([x, y]), ((20,), (7,))),
    "a relu": (lambda x: jax.nn.relu(x) - 1.0, ((3,),)),
    "a lookup": (lambda x: jnp.asarray(B)[jnp.floor(4.0 * x[0] - 2.0).astype(int)] * x, ((5,),)),
    "a matrix of a table": (users.material, ((), (3,))),
    "a small product": (lambda a, x: a @ x - 1.0, ((3, 3), (3,))),
    "an update": (lambda x: x.at[jnp.argmax(x)].set(0.0), ((20,),)),
    "a histogram": (lambda x: jnp.zeros(4).at[places(x)].add(x), ((10,),)),
    "second differences": (lambda x: jnp.pad(x, 1)[2:] - 2.0 * x + jnp.pad(x, 1)[:-2], ((8,),)),
}
LOOPS |= {
    "an interpolation": (users.interpolated, ((),)),
    "a search in a table": (users.found, ((),)),
    "steps that are counted": (users.counted, ((3,),)),
    "a quantile": (lambda x: jax.scipy.special.ndtri(x / 2), ((3,),)),
    "functions that kernels do not know": (
        lambda x: x * jax.lax.bessel_i0e(x) - jax.lax.bessel_i1e(x / 2),
        ((3,),),
    ),
    "a function of a library among others": (
        lambda x: functools.reduce(lambda y, n: y * x + 1 / n, range(1, 40), jnp.sin(x)),
        ((3,),),
    ),
}
LOOPS["steps of a loop"] = (
    lambda x: jax.lax.fori_loop(
        0,
        9,
        lambda _, y: jax.lax.cond(y[0] > 1.0, lambda y: 0.5 * y, lambda y: 3.0 * y + 1.0, y),
        x,
    ),
    ((3,),),
)
LOOPS["steps of three equations"] = (
    lambda x: jax.lax.fori_loop(
        0, 5, lambda _, y: y + 0.1 * jnp.stack([y[1], -y[0] * y[2], y[0] * y[1]]), x
    ),
    ((3,),),
)
KERNELS: dict[str, Case] = {
    "a product": (lambda x: B @ jnp.tanh(x), ((5,),)),
    "many components": (
        lambda x: jnp.stack([x[i] * x[j] for i in range(3) for j in range(3)]),
        ((3,),),
    ),
    "rows of many components": (
        lambda x: jnp.stack([jnp.stack([x[i] * x[j] for j in range(3)]) for i in range(3)]),
        ((3,),),
    ),
    "taken apart again": (lambda x, y: jnp.cross(x, jnp.cross(x, y)), ((3,), (3,))),
    "a histogram of functions of a library": (
        lambda x: jnp.zeros(4).at[places(x)].add(jnp.sin(x)),
        ((10,),),
    ),
    "a histogram of few places": (
        lambda x: jnp.zeros(2).at[jnp.clip(places(x), 0, 1)].add(x),
        ((10,),),
    ),
    "several short sums": (lambda x: x / x.sum() + (x * x).sum() * x - x.max(), ((9,),)),
    "a lookup in itself": (lambda x: x[jnp.floor(4.0 * x[0] - 2.0).astype(int)] * x, ((5,),)),
    "updates at places that are known": (lambda x: x.at[np.arange(0, 9, 2)].set(0.0), ((20,),)),
    "a function of a library": (lambda x: jnp.arctan2(x, 2.0) + jnp.cbrt(x), ((4,),)),
    "one that several pieces need": (
        lambda x: jnp.stack(
            [
                functools.reduce(lambda y, n: y * x[0] + n * k, range(7), jnp.sin(x[0]))
                for k in range(8)
            ]
        ),
        ((1,),),
    ),
    "a search in a table of its own": (
        lambda x: jnp.searchsorted(x[:5], x[5]).astype(x.dtype) * x[0],
        ((6,),),
    ),
    "a sort": (jnp.sort, ((5,),)),
    "steps with sums": (
        lambda x: jax.lax.fori_loop(0, 9, lambda _, y: y / (y * y).sum(), x),
        ((3,),),
    ),
    "steps of functions of a library": (
        lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y) + 0.1, x),
        ((3,),),
    ),
}
search = jax.make_jaxpr(lambda x: jnp.searchsorted(np.arange(3.0), x))(0.5)
if "SearchSorted" not in str(search):  # in older releases it is made of other operations
    for name in ("an interpolation", "a search in a table"):
        del LOOPS[name]
    del KERNELS["a search in a table of its own"]


def made(shapes: tuple[tuple[int, ...], ...]) -> Iterator[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    for shape in shapes:
        yield rng.uniform(0.5, 1.5, (13, *shape))


def programs(function: Callable[..., Any], arrays: list[Any]) -> int:
    return len(list(applications(jax.make_jaxpr(function)(*arrays).jaxpr)))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_plain(name: str) -> None:
    function, shapes = LOOPS[name]
    arrays = list(made(shapes))
    fused, plain = jax.jit(jm.fuse(function)), jax.jit(jax.vmap(function))
    assert programs(jm.fuse(function), arrays) == 0
    # It is the same program of XLA.
    np.testing.assert_array_equal(fused(*arrays), plain(*arrays))
    text = jm.explain(jm.fuse(function), *arrays, quiet=True)
    assert any("XLA's loops" in (x.reason or "") for x in text)


@pytest.mark.parametrize(
    "name",
    [
        "weno",
        "softmax",
        "flux",
        "newton",
        "a relu",
        "a matrix of a table",
        "steps of three equations",
    ],
)
def test_so_are_their_derivatives(name: str) -> None:
    function, shapes = LOOPS[name]
    arrays = list(made(shapes))

    def gradient(mapped: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(mapped(*xs)))))

    assert programs(gradient(jm.fuse(function)), arrays) == 0
    np.testing.assert_array_equal(
        gradient(jm.fuse(function))(*arrays), gradient(jax.vmap(function))(*arrays)
    )


@pytest.mark.parametrize("name", KERNELS)
def test_others_are_programs(name: str) -> None:
    function, shapes = KERNELS[name]
    arrays = list(made(shapes))
    assert programs(jm.fuse(function), arrays) > 0
    np.testing.assert_allclose(
        jax.jit(jm.fuse(function))(*arrays), jax.vmap(function)(*arrays), rtol=1e-13, atol=1e-13
    )


def test_a_part_of_a_function_makes_it_no_loop() -> None:
    """What goes with products is part of their kernel."""
    assert programs(jm.fuse(lambda x: jax.nn.softmax(B @ x)), list(made(((5,),)))) == 1


W = np.random.default_rng(3).uniform(-1, 1, (8, 8))
DECLINED: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: jax.nn.softmax(W @ x),
    "argmax": lambda x: jnp.argmax(W @ x),
    "normalisation": lambda x: (W @ x) / jnp.sqrt(jnp.var(W @ x) + 1e-5),
    "one of each": lambda x: jax.nn.one_hot(jnp.argmax(W @ x), 8),
    "the largest": lambda x: jnp.where(W @ x == jnp.max(W @ x), x, 0.0),
    "signs": lambda x: jnp.where((W @ x) * (W @ x)[::-1] > 0.0, W @ x, 0.0),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_no_kernel_gains_from_is_as_it_was_written(name: str) -> None:
    """Not in components, of which XLA makes slower loops."""
    function = DECLINED[name]
    x = jnp.asarray(next(made(((8,),))))
    fused = jm.fuse(function)
    explained = jm.explain(fused, x, quiet=True)
    assert explained and all(part.reason for part in explained)
    np.testing.assert_array_equal(jax.jit(fused)(x), jax.jit(jax.vmap(function))(x))
    twice = jax.jit(jax.vmap(fused, 1, 1))(x[:, None])
    np.testing.assert_allclose(twice[:, 0], jax.vmap(function)(x), rtol=1e-14)


def test_lookups_that_no_kernel_gains_from_are_as_they_were_written() -> None:
    """At a place that is an argument, an integer; and in values of the element itself."""
    rng = np.random.default_rng(6)
    table = jnp.asarray(rng.uniform(-1, 1, (16, 16)))
    k = jnp.asarray(rng.integers(-20, 20, 13), jnp.int32)
    x, y = jnp.asarray(rng.uniform(-1, 1, (2, 13, 16)))
    functions = lambda k, x: table[k] @ x, lambda x, y: y[jnp.argmin(x)]
    for function, arguments in zip(functions, ((k, x), (x, y)), strict=True):
        fused = jax.jit(jm.fuse(function)).lower(*arguments)
        assert "gather" in fused.as_text()
        np.testing.assert_array_equal(
            fused.compile()(*arguments), jax.jit(jax.vmap(function))(*arguments)
        )


@pytest.mark.parametrize("name", [x for x in DECLINED if x not in ("argmax", "one of each")])
def test_derivatives_of_what_no_kernel_gains_from(name: str) -> None:
    function = DECLINED[name]
    x = jnp.asarray(next(made(((8,),))))

    def derivatives(mapped: Callable[..., Any]) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(mapped(x)))

        along = jnp.cos(x)
        return (
            jax.value_and_grad(loss)(x),
            jax.jvp(mapped, (x,), (along,)),
            jax.jvp(jax.grad(loss), (x,), (along,)),
        )

    found = jax.jit(lambda: derivatives(jm.fuse(function)))()
    for own, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(derivatives(jax.vmap(function))), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-12)


def test_tables_that_are_differentiated() -> None:
    x = jnp.asarray(next(made(((8,),))))
    k = jnp.arange(len(x))

    def loss(table: jax.Array, mapped: Any) -> jax.Array:
        largest = mapped(lambda x: jnp.where(table @ x == jnp.max(table @ x), x, table @ x))(x)
        found = mapped(lambda x, k: jnp.sin(table[k % 8]) * x)(x, k)
        return (largest + found).sum()

    got, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, mapped=f)))(jnp.asarray(W))
        for f in (jm.fuse, jax.vmap)
    )
    for own, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("mode", [None, "clip", "fill", "wrap"])
def test_places_and_dtypes_are_those_of_jax(dtype: Any, mode: str | None) -> None:
    """Beyond a table, from its end, of numbers that are none, and of infinite ones."""
    table = np.random.default_rng(4).uniform(-1, 1, (5, 3, 3)).astype(np.float32)

    def function(k: jax.Array, x: jax.Array) -> Any:
        at = jnp.floor(k).astype(jnp.int32)
        a = jnp.take(table, at, 0, mode=mode) if mode else jnp.asarray(table)[at]
        place = k.astype(jnp.float32)
        values = jnp.interp(place, np.arange(5, dtype=np.float32), table[0, 0, 0] * table[:, 0, 0])
        return a @ x, jnp.argmax(a @ x), at, values * x

    k = np.array([0.0, 4.0, 5.0, 9.0, -1.0, -5.0, -6.0, -7.0, 2.0, 3.0])
    if dtype != np.int32:
        k = np.concatenate([k + 0.25, [np.nan, np.inf, -np.inf]])
    k = k.astype(dtype)
    x = np.random.default_rng(5).uniform(-1, 1, (len(k), 3)).astype(np.float32)
    x[1] = np.nan, 1.0, np.inf
    found = jax.jit(jm.fuse(function))(k, x)
    for own, other in zip(found, jax.jit(jax.vmap(function))(k, x), strict=True):
        assert own.dtype == other.dtype and own.weak_type == other.weak_type
        np.testing.assert_array_equal(own, other)


def test_gathered_arguments_are_read_on_the_way() -> None:
    index = jm.gather(np.array([[0, 1], [1, 2]]), 3)
    fused = jm.fuse(lambda u: u[1] - u[0], in_axes=index)
    assert programs(fused, [np.arange(3.0) ** 2]) == 1
    np.testing.assert_array_equal(fused(jnp.arange(3.0) ** 2), [1.0, 3.0])


def test_a_cpu_adds_as_plain_jax_does() -> None:
    """One value after another, as the elements have them, to the same bits."""
    dofs = np.random.default_rng(2).integers(0, 9, (50, 3))
    mine, add = jm.gather(dofs, 9), jm.scatter_add(dofs, 9)

    def flux(u: Any) -> Any:
        return u - u[:1]

    def plain(v: Any) -> Any:
        return jnp.zeros_like(v).at[dofs].add(jax.vmap(flux)(v[dofs]))

    fused = jm.fuse(flux, mine, add)
    v = jnp.asarray(next(made(((9,),))))
    np.testing.assert_array_equal(jax.jit(fused)(v[0]), jax.jit(plain)(v[0]))
    np.testing.assert_array_equal(jax.jit(jax.vmap(fused))(v), jax.jit(jax.vmap(plain))(v))


def test_closures_and_batches_of_batches() -> None:
    x = jnp.asarray(next(made(((4, 6),))))

    def loss(k: jax.Array, mapped: Any) -> jax.Array:
        return mapped(mapped(lambda row: jnp.exp(-k * row) / row))(x).sum()

    for k in (0.5, np.float64(2.0)):
        got, wanted = (jax.value_and_grad(loss)(jnp.asarray(k), f) for f in (jm.fuse, jax.vmap))
        np.testing.assert_array_equal(got, wanted)


def test_what_is_a_loop_on_a_cpu_and_on_a_gpu() -> None:
    """There it has several around short sums, and reads at once what is side by side in memory."""

    def loops(function: Any, *shape: int) -> tuple[bool, bool]:
        lines = inlined(jax.make_jaxpr(function)(jnp.ones(shape)), [Kind.MAPPED])
        return are_loops(lines, "cpu"), are_loops(lines, "gpu")

    assert loops(jax.nn.softmax, 10) == (True, False)
    assert loops(jax.nn.softmax, 100) == (True, True)
    assert loops(lambda x: jnp.sum(x, 0), 100, 3) == (True, False)
    assert loops(lambda x: jnp.sin(x) / x, 10) == (False, True)
    assert loops(lambda x: x[0] * x[4] - x[1] * x[3], 9) == (True, False)
    assert loops(lambda x: x[1:] * x[:-1], 9) == (True, True)
    assert loops(lambda x: jnp.stack([x[0] * x[1], x[1] + x[0]]), 2) == (True, True)
    assert loops(lambda x: jnp.stack([x[0] / x[1], x[1] / x[0]]), 2) == (True, False)
    assert loops(lambda x: x + x.T, 3, 3) == (True, False)
    assert loops(lambda x: x.T, 3, 3) == (True, True)


def test_functions_that_a_library_has_are_others_in_single_precision() -> None:
    """XLA computes many values of logarithms and of the error function at a time, not of arcs."""

    def loops(function: Any, dtype: Any) -> bool:
        closed = jax.make_jaxpr(function)(jnp.ones(3, dtype))
        return are_loops(inlined(closed, [Kind.MAPPED]), "cpu")

    for function in (jnp.log1p, jax.lax.erf, jnp.arctanh):
        assert loops(function, np.float32) and not loops(function, np.float64)
    assert not loops(jnp.arcsin, np.float32) and not loops(jnp.arcsin, np.float64)


def test_values_at_known_places_run_as_they_are_written() -> None:
    """In the components that a program has they are sixteen pieces, between which XLA decides."""
    places = np.random.default_rng(1).permutation(16)
    for function, written in ((lambda x: x[places], True), (lambda x: jnp.sort(x)[places], False)):
        lines = inlined(jax.make_jaxpr(function)(jnp.ones(16)), [Kind.MAPPED])
        assert are_loops_and_products(lines.lines) == written


def test_looking_up_in_a_table_is_a_loop_everywhere() -> None:
    """A kernel would select among all values of the table."""
    values = jnp.arange(12.0)

    def material(x: jax.Array, table: jax.Array) -> jax.Array:
        place = jnp.floor(12 * x)
        return table[jnp.clip(place, 0, 11).astype(int)] * (12 * x - place)

    closed = jax.make_jaxpr(material)(jnp.ones(()), values)
    lines = inlined(closed, [Kind.MAPPED, Kind.UNSURE])
    assert are_loops(lines, "cpu") and are_loops(lines, "gpu")


def test_loops_beside_plain_jax() -> None:
    """They are one with what is before and behind; products are programs all the same."""

    def loops(x: jax.Array) -> jax.Array:
        return 2 * jax.lax.bessel_i0e(1 + x**2) - x

    (x,) = made(((5,),))
    assert programs(jm.fuse(loops), [x]) == 0
    np.testing.assert_array_equal(jax.jit(jm.fuse(loops))(x), jax.jit(jax.vmap(loops))(x))
    assert programs(jm.fuse(lambda x: B @ loops(jnp.sin(B.T @ (B @ x)))), [x]) == 2
