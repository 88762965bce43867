"""What a jaxpr becomes: the operations of a program, and nothing that costs more than it should."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.jaxpr import POINTWISE, RULES, Reader, Tile, Unsupported, inner_jaxpr
from jaxmagma.plans.plan import plan
from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import ElementProgram, Input, Map, Output
from tests.einsums import assert_close
from tests.jaxprs import equations, programs


F64 = np.dtype(np.float64)
GetKey = Callable[[], jax.Array]


def read(function: Callable[..., Any], *tiles: tuple[int, ...]) -> ElementProgram:
    """The program of a function of one element's tiles, with one result."""
    reader = Reader(Builder(1), F64)
    inputs = [Tile(reader.builder.input(Input((0,), tile, F64))) for tile in tiles]
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(tile, F64) for tile in tiles))
    (result,) = reader.jaxpr(closed, inputs)
    return reader.builder.build([Output(reader.value(result), (0,))]).program


def operations(function: Callable[..., Any], *tiles: tuple[int, ...]) -> list[str]:
    found = read(function, *tiles).operations
    return [x.function if isinstance(x, Map) else type(x).__name__ for x in found]


@pytest.mark.parametrize(
    ("function", "tiles", "expected"),
    [
        (lambda x: x.T.T + x[None][0], [(2, 3)], ["mul"]),
        (lambda x: jnp.sin(x)[0, 1], [(2, 3)], ["View", "sin"]),
        (lambda x: (x * 2.0).reshape(1, 3, 1, 2).reshape(3, 2), [(3, 2)], ["mul"]),
        (lambda x, y: jnp.einsum("ij,kj->ki", x, y), [(2, 3), (4, 3)], ["Contract"]),
        (lambda x: x**4, [(3,)], ["mul", "mul"]),
        (lambda x: jnp.stack([jnp.sin(x), jnp.cos(x)])[1], [(3,)], ["cos"]),
        (lambda x: x + np.zeros(3), [(3,)], []),
        (lambda x: jax.jit(jnp.sin)(jax.checkpoint(jnp.cos)(x)), [(3,)], ["cos", "sin"]),
    ],
)
def test_what_costs_nothing_is_no_operation(
    function: Callable[..., Any], tiles: list[tuple[int, ...]], expected: list[str]
) -> None:
    assert operations(function, *tiles) == expected


def test_what_nobody_asks_for_is_not_computed() -> None:
    """One column of a product of matrices is a product with one column."""
    table = np.random.default_rng(0).uniform(size=(3, 4))
    program = read(lambda x: jnp.sin(x @ table)[:, 2], (2, 3))
    assert [x.tile for x in program.operations] == [(2,), (2,)]


def test_small_matrices_at_every_point_are_components() -> None:
    """Point by point, so that each step is one of long vectors."""
    function = lambda d, g: jnp.einsum("xij,xj->xi", d, g)  # noqa: E731
    kinds = operations(function, (9, 2, 2), (9, 2))
    assert "Contract" not in kinds
    assert kinds.count("mul") == 4 and kinds.count("add") == 2


def test_a_table_of_a_tensor_product_is_applied_axis_by_axis() -> None:
    """Also where the function has multiplied the bases of its axes, with weights, before."""
    rng = np.random.default_rng(0)
    b, weights = rng.uniform(size=(6, 4)), rng.uniform(size=(6, 6, 6))

    def mass(u: jax.Array) -> jax.Array:
        table = jnp.einsum("xa,yb,zc->xyzabc", b, b, b)
        return jnp.einsum("xyzabc,xyz,xyz->abc", table, weights, table_times(table, u))

    def table_times(table: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.einsum("xyzabc,abc->xyz", table, u)

    program = read(mass, (4, 4, 4))
    sweeps = 6 * 4**3 + 6 * 6 * 4 * 4 + 6**3 * 4
    assert plan(program).flops == 2 * 2 * sweeps + 6**3
    u = jnp.asarray(rng.uniform(size=(3, 4, 4, 4)))
    assert_close(jax.jit(jm.fuse(mass))(u), jax.vmap(mass)(u))


@pytest.mark.parametrize(
    "function",
    [
        lambda table: jnp.sort(table, axis=0),
        lambda table: table / jnp.max(jnp.abs(table)),
        lambda table: jnp.linalg.solve(table.T @ table, table.T).T,
        lambda table: table[jnp.argsort(table[:, 0])],
    ],
    ids=["sorted", "of norm one", "inverse", "in order"],
)
def test_a_function_of_a_table_of_a_tensor_product_is_known(
    function: Callable[[jax.Array], jax.Array],
) -> None:
    b = np.random.default_rng(0).uniform(size=(6, 4))

    def evaluated(u: jax.Array) -> jax.Array:
        table = jnp.einsum("xa,yb->xyab", b, b).reshape(36, 16)
        return jnp.tanh(function(table) @ u)

    assert len(operations(evaluated, (16,))) < 7  # a table is one value, however it is made
    u = jnp.asarray(np.random.default_rng(1).uniform(size=(3, 16)))
    (program,) = programs(jm.fuse(evaluated), u)
    assert_close(reference.evaluate(program, u)[0], jax.vmap(evaluated)(u))


def test_weights_of_a_tensor_product_are_known() -> None:
    weights = np.random.default_rng(0).uniform(size=5)
    program = read(lambda u: u * jnp.einsum("x,y,z->xyz", weights, weights, weights), (5, 5, 5))
    assert [type(x) for x in program.operations] == [Map]


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "dot with batch": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(5, 2, 3), (5, 3, 6)]),
    "outer": (lambda a, b: jnp.outer(a, b), [(2,), (3,)]),
    "trace": (lambda a: jnp.trace(a) * a, [(3, 3)]),
    "diagonal": (lambda a: jnp.diag(a)[:, None] + jnp.diag(jnp.diag(a)), [(3, 3)]),
    "determinant": (lambda a: (a[0] * jnp.cross(a[1], a[2])).sum() * a, [(3, 3)]),
    "cross": (lambda a, b: jnp.cross(a, b), [(3,), (3,)]),
    "kron": (lambda a, b: jnp.kron(a, b), [(2, 2), (2, 3)]),
    "split": (lambda a: sum(jnp.split(a, 3, 1)), [(2, 6)]),
    "pad inside": (lambda a: jax.lax.pad(a, 0.0, ((1, 2, 1), (0, 1, 0))), [(3, 2)]),
    "pad by less than nothing": (
        lambda a: jax.lax.pad(a, 1.0, ((-1, 2, 1), (1, -2, 2))) * 2,
        [(3, 2)],
    ),
    "pad with what is computed": (
        lambda a: jax.lax.pad(a * 2, jnp.sin(a[0, 0]), ((1, 0, 1), (-1, 2, 0))),
        [(3, 2)],
    ),
    "subtract at places": (lambda a: a.at[np.array([0, 0, 2])].subtract(2 * a), [(3, 2)]),
    "precision that there is": (lambda a: jax.lax.reduce_precision(a, 11, 52) * 2, [(3,)]),
    "roll": (lambda a: jnp.roll(a, 1, 1) * a, [(2, 4)]),
    "repeat": (lambda a: jnp.repeat(a, 2, 0), [(3, 2)]),
    "take": (lambda a: a[np.array([2, 0, 0]), np.array([1, 1, 0])], [(3, 2)]),
    "triangle": (lambda a: jnp.tril(a) @ jnp.triu(a), [(3, 3)]),
    "variance": (lambda a: jnp.var(a, 0) / jnp.linalg.norm(a), [(4, 2)]),
    "any and all": (lambda a: jnp.where((a > 0).any(0) & (a < 1).all(0), a, -a), [(2, 3)]),
    "reversed scan": (
        lambda a: jax.lax.scan(lambda c, x: (c + x, c * x), a[0], a, reverse=True)[1],
        [(3, 2)],
    ),
    "associative scan": (lambda a: jax.lax.associative_scan(jnp.multiply, a), [(5,)]),
    "cond on a counter": (
        lambda a: jax.lax.fori_loop(
            0, 3, lambda n, c: jax.lax.cond(n == 1, jnp.sin, jnp.cos, c + n), a
        ),
        [(3,)],
    ),
    "tile": (lambda a: jnp.tile(a, (2, 1, 3)) * 2, [(2, 3)]),
    "tile of components": (lambda a: jnp.tile(jnp.stack([a[0], a[1] * 2]), 2), [(2, 3)]),
    "resize": (lambda a: jnp.resize(a, (4, 4)) * 2, [(2, 3)]),
    "set a row": (lambda a: a.at[1].set(a[0] * 2) @ a, [(3, 3)]),
    "set beyond the end": (lambda a: a.at[7].set(1.0).at[-1].set(2.0), [(3,)]),
    "set a part": (lambda a: a.at[:2, 1].set(a[1:, 0]), [(3, 3)]),
    "add at places": (lambda a: a.at[np.array([0, 0, 2])].add(a), [(3, 2)]),
    "maximum at places": (lambda a: a.at[np.array([0, 0, 9, -1])].max(2 * a), [(4, 2)]),
    "minimum at clipped places": (
        lambda a: (3 * a).at[np.array([0, 0, 9])].min(a, mode="clip"),
        [(3, 2)],
    ),
    "maximum of truth values": (
        lambda a: jnp.where((a > 0).at[np.array([2, 2])].max(a[:2] < 1), a, 2 * a),
        [(3,)],
    ),
    "maximum in steps": (lambda a: jnp.zeros(36).at[1::3].max(a), [(12,)]),
    "largest integers": (
        lambda a: a[jnp.zeros(2, int).at[np.array([0, 0, 1])].max(jnp.argsort(a))],
        [(3,)],
    ),
    "multiply at a place": (lambda a: a.at[1, 0].multiply(a[0, 0]), [(2, 2)]),
    "set in what is known": (lambda a: jnp.eye(3).at[:2, :2].set(a), [(2, 2)]),
    "diagonal set": (lambda a: jnp.fill_diagonal(a, 2.0, inplace=False), [(3, 3)]),
    "update a slice": (
        lambda a: jax.lax.dynamic_update_slice(a, a[:, :1] * 2, (0, 2)) @ a.T,
        [(30, 3)],
    ),
    "argmax": (lambda a: a * jnp.argmax(a, 1).astype(a.dtype)[:, None], [(3, 4)]),
    "argmin": (lambda a: jnp.where(jnp.argmin(a) == 2, a, -a), [(5,)]),
    "count": (lambda a: jnp.sum(a > 0, 1).astype(a.dtype) * a[:, 0], [(3, 4)]),
    "select": (lambda a: jnp.select([a > 1, a > 0, a > -1], [a, 2 * a, a * a], -a), [(3, 4)]),
    "loop with a counter": (
        lambda a: jax.lax.fori_loop(0, 3, lambda n, c: jnp.sin(c).at[n].add(a[n] * n), a),
        [(3, 2)],
    ),
    "pad with a number": (lambda a: jnp.pad(a, ((1, 2), (0, 1)), constant_values=np.pi), [(3, 2)]),
    "matrix power": (lambda a: jnp.linalg.matrix_power(a, 3), [(2, 2)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_program_means_the_function(name: str) -> None:
    function, tiles = FUNCTIONS[name]
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal((4, *tile))) for tile in tiles]
    program = read(function, *tiles)

    def both(*arrays: jax.Array) -> Any:
        return reference.evaluate(program, *arrays), [jax.vmap(function)(*arrays)]

    assert_close(*jax.jit(both)(*arrays))


@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_the_first_of_the_best_and_of_what_is_not_a_number(function: Callable[..., Any]) -> None:
    rows = [[1, 2, 2, 0], [0, 0, 0, 0], [1, np.nan, 5, np.nan], [np.inf, 1, np.nan, 3]]
    array = jnp.asarray(rows, float)
    (found,) = reference.evaluate(read(function, (4,)), array)
    np.testing.assert_array_equal(found, jax.vmap(function)(array))


TABLE = np.random.default_rng(0).uniform(-1, 1, (4, 6))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda y: y == jnp.max(y), 1),
        (lambda y: y < jnp.max(y), 3),
        (lambda y: jnp.outer(y, y) == jnp.min(jnp.outer(y, y), axis=0)[None], 4),
        (jax.grad(jnp.max), 1),
    ],
)
def test_a_value_equals_its_components(
    function: Callable[..., Any], count: int, getkey: GetKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of additions: here all sums of products are rounded otherwise."""
    program = read(lambda x: jnp.sum(function(TABLE @ x).astype(x.dtype)), (6,))
    einsum, calls = jnp.einsum, itertools.count(1)

    def rounded(*arguments: Any, **parameters: Any) -> jax.Array:
        return einsum(*arguments, **parameters) * (1 + 1e-9 * next(calls))

    monkeypatch.setattr(jnp, "einsum", rounded)
    (found,) = reference.evaluate(program, jax.random.normal(getkey(), (50, 6), F64))
    np.testing.assert_allclose(found, count, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "tile", "reason"),
    [
        (lambda x: jnp.sort(x), (33,), "sort of 33"),
        (lambda x: x[jnp.argsort(x)], (17,), "sort of 17"),
        (lambda x: jnp.convolve(x, np.ones(33)), (40,), "33 values at 33 places"),
        (
            lambda x: jax.lax.conv(x[None], jnp.ones((8, 8, 2, 2)), (1, 1), "SAME"),
            (8, 4, 4),
            "256 values at 4 places",
        ),
        (lambda x: jax.lax.top_k(x, 20)[0], (40,), "the 20 largest of 40"),
        (lambda x: x.astype(np.complex128), (3,), "mixes complex128 with float64"),
        (lambda x: jnp.argmax(x) | 2, (3,), "or computes with int"),
        (lambda x: x.astype(np.int64) + 1, (3,), "add computes with int64"),
        (lambda x: x.at[jnp.argmax(x), jnp.argmax(x)].set(0.0), (3, 3), "scatter of windows at"),
        (lambda x: jnp.max(x), (65,), "65 pieces"),
        (lambda x: jax.lax.scan(lambda c, y: (c * y, None), x[0], x)[0], (5000,), "5000 steps"),
        (lambda x: jax.lax.reduce_precision(x, 8, 23), (3,), "reduce_precision to 8 and 23 bits"),
        (lambda x: jnp.zeros(513).at[:3].set(x), (3,), "3 values at 513 places"),
        (lambda x: x.at[0, 0].set(0.0), (13, 10), "129 values"),
        (lambda x: jax.lax.bessel_i0e(x), (3,), "bessel_i0e"),
        (lambda x: jax.lax.polygamma(x, x), (3,), "polygamma of an order"),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), (3,), "condition"),
    ],
)
def test_what_is_no_operation_says_so(
    function: Callable[..., Any], tile: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        read(function, tile)


# ---- What rules heed -----------------------------------------------------------------------------


def equations_of(function: Callable[..., Any], tiles: list[tuple[int, ...]]) -> list[Any]:
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(tile, F64) for tile in tiles))
    return list(equations(closed.jaxpr))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_parameter_that_no_rule_heeds_is_left_to_jax(name: str) -> None:
    """As one that a later release of JAX gives to an operation."""
    for equation in equations_of(*FUNCTIONS[name]):
        other = equation.replace(params={**equation.params, "of_a_later_release": 1})
        if inner_jaxpr(equation) is not None:
            assert inner_jaxpr(other) is None
        for rule in (POINTWISE.get(equation.primitive.name), RULES.get(equation.primitive.name)):
            if rule is not None:
                with pytest.raises(Unsupported, match="of_a_later_release"):
                    rule.check(other)
        for key in equation.params:
            less = equation.replace(params={k: v for k, v in equation.params.items() if k != key})
            rule = RULES.get(equation.primitive.name)
            if rule is not None and key in rule.heeds:
                with pytest.raises(Unsupported, match=f"without {key}"):
                    rule.check(less)


@pytest.mark.parametrize(
    ("function", "tile", "reason"),
    [
        (lambda x: jax.lax.dot(x, x, precision="F64_F64_F64"), (3, 3), "precision"),
        (lambda x: jax.lax.dot(x, x, preferred_element_type=np.float32), (3, 3), None),
        (lambda x: jax.lax.reshape(x, (9,), (1, 0)), (3, 3), None),
        (lambda x: jnp.exp(x), (3,), None),
        (lambda x: jax.lax.exp(x, accuracy=jax.lax.AccuracyMode.HIGHEST), (3,), None),
        (lambda x: jax.lax.exp(x, accuracy=jax.lax.Tolerance(1e-7, 0.0, 0)), (3,), "accuracy"),
        (lambda x: x.at[1].apply(jnp.sin), (3,), "update_jaxpr"),
        (lambda x: x.at[np.array([0, 1])].get(mode="promise_in_bounds"), (3,), None),
        (lambda x: x.at[np.array([0, 9])].get(mode="promise_in_bounds"), (3,), "are not"),
        (lambda x: x.at[np.array([0, 1])].get(mode="one_hot"), (3,), "gather with mode"),
        (lambda x: x.at[np.array([0, 1])].add(1.0, mode="one_hot"), (3,), "scatter-add with mode"),
        (lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (3,), "platform"),
        (lambda x: (x > 0) @ (x > 1), (3, 3), "truth"),
        (lambda x: jnp.where(jnp.argmax(x) == 2**60 + 1, x, -x), (3,), None),
        (lambda x: jnp.where(jnp.argmax(x) + 2**60 == 1, x, -x), (3,), "int"),
        (lambda x: jax.pure_callback(np.sin, jnp.zeros(()), 1.0) * x, (3,), "pure_callback"),
    ],
)
def test_values_of_parameters_that_rules_know(
    function: Callable[..., Any], tile: tuple[int, ...], reason: str | None
) -> None:
    if reason is None:
        read(function, tile)
    else:
        with pytest.raises(Unsupported, match=reason):
            read(function, tile)


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("method", ["set", "add", "mul", "max", "min"])
def test_values_are_put_at_computed_places(mode: str, method: str) -> None:
    def function(x: Any, y: Any) -> Any:
        place = jnp.argmax(x, axis=-1)
        rows = getattr(x.at[..., place[0], :], method)(y, mode=mode)
        return jax.vmap(lambda row, k: getattr(row.at[k], method)(7.0, mode=mode))(rows, place)

    x, y = np.random.default_rng(0).normal(size=(2, 6, 3, 3))
    assert_close(jm.fuse(function)(x, y[:, 0]), jax.vmap(function)(x, y[:, 0]))
    assert len(read(function, (3, 3), (3,)).outputs) == 1


@pytest.mark.parametrize("method", ["max", "min"])
def test_the_best_of_several_values_at_one_place(method: str) -> None:
    """At places that may be anywhere; a value that is no number stays where it is put."""

    def function(x: Any, y: Any) -> Any:
        return getattr((TABLE @ y)[:4].at[jnp.floor(x).astype(np.int32)], method)(x)

    x, y = 2 * np.random.default_rng(0).normal(size=(2, 50, 6))
    x[:9, 0], x[3, 1] = np.nan, np.inf
    np.testing.assert_allclose(jm.fuse(function)(x, y), jax.vmap(function)(x, y), rtol=1e-12)
    assert len(read(function, (6,), (6,)).outputs) == 1


@pytest.mark.parametrize("fill", [0.0, 2.5, np.inf])
def test_short_and_long_axes_are_padded(fill: float) -> None:
    function = lambda x: jax.lax.pad(x, fill, ((1, 2, 1), (2, 0, 0), (0, 3, 2))) * 2  # noqa: E731
    x = np.random.default_rng(0).normal(size=(4, 2, 12, 3))
    np.testing.assert_array_equal(jm.fuse(function)(x), jax.vmap(function)(x))
    assert len(read(function, (2, 12, 3)).outputs) == 1


@pytest.mark.parametrize("fill", [0.0, 2.5, None])
@pytest.mark.parametrize("gap", range(3))
@pytest.mark.parametrize("size", [1, 2, 4, 13])
def test_axes_are_padded_by_less_than_nothing(size: int, gap: int, fill: float | None) -> None:
    whole = size + (size - 1) * gap
    widths = itertools.product((-whole - 1, -3, -2, -1, 0, 2), repeat=2)
    configs = [(low, high, gap) for low, high in widths if low + whole + high > 0]

    def function(x: Any, y: Any) -> Any:
        x = jnp.einsum("pq,q->p", np.eye(size), x)  # what only moves values XLA does
        return [jax.lax.pad(x, y if fill is None else fill, [config]) for config in configs]

    x, y = np.random.default_rng(0).normal(size=(3, size)), np.array([np.inf, 1.0, np.nan])
    for found, expected in zip(jm.fuse(function)(x, y), jax.vmap(function)(x, y), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert len(programs(jm.fuse(function), x, y)) == 1
