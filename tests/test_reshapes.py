"""Axes that are merged and split by reshapes, anywhere in an element's function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, Map
from tests import cuda_fused


# Along each axis another number of points.
POINTS = (4, 3, 2)
TABLES = np.random.default_rng(7).uniform(-1, 1, (2, max(POINTS), 3))
(B_X, G_X), (B_Y, G_Y), (B_Z, G_Z) = (TABLES[:, :points] for points in POINTS)


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def gradients(x: jax.Array) -> jax.Array:
    """Of three components, at all points: ``(3, 3, *POINTS)``."""
    spec = "xa,yb,zc,abcm->mxyz"
    tables = (G_X, B_Y, B_Z), (B_X, G_Y, B_Z), (B_X, B_Y, G_Z)
    return jnp.stack([jnp.einsum(spec, *own, x) for own in tables])


def at_point(f: jax.Array) -> jax.Array:
    return jnp.sqrt(1 + jnp.sum(f * f)) + f[0, 1] * jnp.trace(f @ f)


def axis_by_axis(x: jax.Array) -> jax.Array:
    mapped: Callable[..., jax.Array] = at_point
    for axis in (1, 2, 3):
        mapped = jax.vmap(mapped, in_axes=-axis, out_axes=-axis)
    return mapped(gradients(x))


def points_first(x: jax.Array) -> jax.Array:
    f = jnp.moveaxis(gradients(x), (0, 1), (-2, -1)).reshape(-1, 3, 3)
    return jax.vmap(at_point)(f).reshape(POINTS)


def points_last(x: jax.Array) -> jax.Array:
    return jax.vmap(at_point, in_axes=2)(gradients(x).reshape(3, 3, -1)).reshape(POINTS)


def in_two_steps(x: jax.Array) -> jax.Array:
    f = gradients(x).reshape(3, 3, 12, 2).reshape(9, 24)
    return jax.vmap(lambda f: at_point(f.reshape(3, 3)), in_axes=1)(f).reshape(12, 2)


def results_flat(x: jax.Array) -> jax.Array:
    return jax.vmap(at_point, in_axes=2)(gradients(x).reshape(3, 3, -1))


def arguments_flat(x: jax.Array) -> jax.Array:
    return axis_by_axis(x.reshape(27, 3).reshape(3, 3, 3, 3))


SPELLINGS = (points_first, points_last, in_two_steps, results_flat, arguments_flat)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_points_may_be_on_one_axis(spelling: Callable[[jax.Array], jax.Array]) -> None:
    """It is the same program, and not one of 64 points by themselves."""

    def work(function: Callable[[jax.Array], jax.Array]) -> list[int]:
        program = cuda_fused.program_of(function, (3, 3, 3, 3), dtype="float64")
        normal, _ = normal_form(program)
        return [sum(isinstance(y, x) for y in normal.operations) for x in (Contract, Map)]

    assert work(spelling) == work(axis_by_axis)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_so_is_the_gradient_inside_of_an_element(
    spelling: Callable[[jax.Array], jax.Array],
) -> None:
    def operations(function: Callable[[jax.Array], jax.Array]) -> int:
        energy = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
        program = cuda_fused.program_of(energy, (3, 3, 3, 3), dtype="float64")
        normal, _ = normal_form(program)
        return sum(isinstance(x, Contract | Map) for x in normal.operations)

    assert operations(spelling) == pytest.approx(operations(axis_by_axis), rel=0.1)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values_and_gradients(spelling: Callable[[jax.Array], jax.Array]) -> None:
    u = jnp.array(np.random.default_rng(3).uniform(-1, 1, (7, 3, 3, 3, 3)))

    def both(mapped: Callable[..., Any]) -> list[jax.Array]:
        energy = jax.grad(lambda x: jnp.sum(jnp.sin(spelling(x))))
        return [mapped(spelling)(u), mapped(energy)(u)]

    for got, wanted in zip(both(jm.fuse), both(jax.vmap), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


def test_a_table_of_all_points_stays_one() -> None:
    """A table of a basis that is no product is one matrix, whatever its points were before."""
    rng = np.random.default_rng(8)
    table = jnp.array(rng.uniform(-1, 1, (64, 27)))

    def function(x: jax.Array) -> jax.Array:
        values = (table @ x.reshape(27, 3)).reshape(4, 4, 4, 3)
        return table.T @ jnp.sin(values).reshape(64, 3)

    program = cuda_fused.program_of(function, (3, 3, 3, 3), dtype="float64")
    normal, _ = normal_form(program)
    constants = [x.constant.array for x in normal.inputs if x.constant is not None]
    assert {x.size for x in constants} == {table.size}
    u = jnp.array(rng.uniform(-1, 1, (5, 3, 3, 3, 3)))
    np.testing.assert_allclose(jm.fuse(function)(u), jax.vmap(function)(u), rtol=1e-11, atol=1e-11)


TABLE: Any = np.random.default_rng(9).uniform(-1, 1, (12, 8))


def by_a_table(x: jax.Array, scale: jax.Array) -> jax.Array:
    values = TABLE @ x
    return TABLE.T @ (scale[:, None] * values**2)


def test_arguments_and_results_may_have_other_shapes() -> None:
    """The program is that of a function to which they are given as it computes with them."""
    wanted = cuda_fused.program_of(by_a_table, (8, 3), (12,), dtype="float64")

    def cubes(x: jax.Array, scale: jax.Array) -> jax.Array:
        return by_a_table(x.reshape(8, 3), scale.reshape(-1)).reshape(2, 2, 2, 3)

    def energy(x: jax.Array, scale: jax.Array) -> jax.Array:
        values = TABLE @ x.reshape(8, 3)
        return jnp.sum(scale.reshape(12, 1) * values**3) / 3

    shapes = (2, 2, 2, 3), (2, 3, 2)
    found = cuda_fused.program_of(cubes, *shapes, dtype="float64")
    assert normal_form(found) == normal_form(wanted)
    found = cuda_fused.program_of(jax.grad(energy), *shapes, dtype="float64")
    tiles = [x.tile for x in found.inputs if x.constant is None]
    assert sorted(tiles) == sorted([(8, 3), (12, 1)])
    assert found.tiles[found.outputs[0].value] == (8, 3)


def twice(x: jax.Array) -> jax.Array:
    return x.reshape(6, 4) + x.reshape(6, 4)[::-1]


def in_two_shapes(x: jax.Array) -> jax.Array:
    return x.reshape(6, 4) @ x.reshape(4, 6)


def as_it_is_too(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.exp(x.reshape(-1))


def used_and_returned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.exp(x)
    return y.reshape(12, 2), y.reshape(12, 2).sum(0)


def nothing_else(x: jax.Array) -> jax.Array:
    return x.reshape(24)


def there_and_back(x: jax.Array) -> jax.Array:
    return jnp.sin(x.reshape(24).reshape(4, 6)).reshape(2, 12).reshape(3, 8)


@pytest.mark.parametrize(
    "function",
    [twice, in_two_shapes, as_it_is_too, used_and_returned, nothing_else, there_and_back],
)
def test_reshapes_at_the_ends(function: Callable[[jax.Array], Any]) -> None:
    u = jnp.array(np.random.default_rng(5).uniform(-1, 1, (7, 4, 6)))

    def total(mapped: Callable[..., Any]) -> Callable[[jax.Array], Any]:
        return lambda u: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(mapped(function)(u)))

    for of in (lambda mapped: mapped(function), lambda mapped: jax.grad(total(mapped))):
        got, wanted = of(jm.fuse)(u), of(jax.vmap)(u)
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, wanted)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-13), got, wanted)


@pytest.mark.parametrize(
    ("tile", "shapes"),
    [
        ((4, 6), [(6, 4), (3, 8), (24,)]),
        ((2, 1, 6), [(12, 1), (3, 1, 4), (2, 6)]),
        ((8,), [(2, 4), (4, 2), (8, 1)]),
        ((0, 3), [(3, 0), (0,), (0, 5)]),
    ],
)
def test_axes_that_do_not_meet(tile: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    def function(x: jax.Array) -> jax.Array:
        for shape in shapes:
            x = jnp.cos(x.reshape(shape)) + jnp.arange(float(shape[0])).reshape(
                -1, *[1] * len(shape[1:])
            )
        return x

    u = jnp.array(np.random.default_rng(4).uniform(-1, 1, (9, *tile)))
    np.testing.assert_allclose(jm.fuse(function)(u), jax.vmap(function)(u), rtol=1e-14)


def test_parts_of_axes_that_were_merged() -> None:
    def function(x: jax.Array) -> jax.Array:
        flat = (x * x).reshape(-1)
        return jnp.concatenate([flat[3:9].reshape(2, 3) * 2, flat[::-1][:6].reshape(2, 3)])

    u = jnp.array(np.random.default_rng(4).uniform(-1, 1, (9, 4, 3)))
    np.testing.assert_array_equal(jm.fuse(function)(u), jax.vmap(function)(u))
