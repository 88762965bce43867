"""The builder's rewritings: each gives the same values, in the form that it promises."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Input, Map, Operation, Output, Place, View
from jaxmagma.programs.strides import places, row_major


F64 = np.dtype(np.float64)
ELEMENTS = 3


class Tiles:
    """A builder, its batched inputs, and random arrays for them."""

    def __init__(self, *tiles: tuple[int, ...]) -> None:
        random = np.random.default_rng(0)
        self.builder = Builder(1)
        self.numbers = [self.builder.input(Input((0,), tile, F64)) for tile in tiles]
        self.arrays = [random.standard_normal((ELEMENTS, *tile)) for tile in tiles]

    def operations(self, value: int) -> tuple[Operation, ...]:
        """Those of the program of one value."""
        return self.builder.build([Output(value, (0,))]).program.operations

    def kinds(self, value: int) -> list[str]:
        operations = self.operations(value)
        return [x.function if isinstance(x, Map) else type(x).__name__ for x in operations]

    def assert_is(self, value: int, expected: np.ndarray) -> None:
        """Asserts what a value is for all elements."""
        assert self.builder.tile(value) == expected.shape[1:]
        built = self.builder.build([Output(value, (0,))])
        arguments = [self.arrays[self.numbers.index(n)] for n in built.inputs if n in self.numbers]
        (found,) = reference.evaluate(built.program, *arguments)
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


# ---- Labels --------------------------------------------------------------------------------------


def test_letters_differ() -> None:
    assert letters(3) == "abc"
    assert len(set(letters(60))) == 60


def test_places_are_what_strides_say() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    assert row_major((2, 3, 4)) == (12, 4, 1)
    np.testing.assert_array_equal(places(0, (12, 4, 1), (2, 3, 4)), array)
    np.testing.assert_array_equal(places(23, (-12, -4), (2, 2)), array[::-1, ::-1, 3][:, :2])
    assert places(5, (), ()) == 5


def test_a_transposed_operand_becomes_labels() -> None:
    t = Tiles((2, 3), (3, 4))
    a, b = t.numbers
    turned = t.builder.transpose(a, (1, 0))
    value = t.builder.contract([(turned, "ji"), (b, "jk")], "ik", {"i": 2, "j": 3, "k": 4})
    assert value == t.builder.contract([(a, "ij"), (b, "jk")], "ik", {"i": 2, "j": 3, "k": 4})
    assert t.kinds(value) == ["Contract"]
    t.assert_is(value, t.arrays[0] @ t.arrays[1])


def test_a_broadcast_operand_becomes_labels() -> None:
    t = Tiles((2, 3), (3,))
    a, b = t.numbers
    wide = t.builder.relabel(b, "j", "ij", {"i": 2, "j": 3})
    value = t.builder.map("add", a, wide)
    assert t.kinds(value) == ["add"]
    t.assert_is(value, t.arrays[0] + t.arrays[1][:, None])


def test_a_sum_over_a_broadcast_axis_keeps_its_extent() -> None:
    """Without the axis nothing would know how often to add."""
    t = Tiles((3,))
    wide = t.builder.relabel(t.numbers[0], "j", "ij", {"i": 5, "j": 3})
    value = t.builder.contract([(wide, "ij")], "j", {"i": 5, "j": 3})
    t.assert_is(value, 5 * t.arrays[0])


def test_transposing_twice_is_nothing() -> None:
    t = Tiles((2, 3, 4))
    turned = t.builder.transpose(t.numbers[0], (1, 2, 0))
    assert t.builder.transpose(turned, (2, 0, 1)) == t.numbers[0]
    assert t.builder.transpose(t.numbers[0], (0, 1, 2)) == t.numbers[0]


def test_a_product_without_a_sum_is_pointwise() -> None:
    t = Tiles((2, 3), (3, 2))
    a, b = t.numbers
    value = t.builder.contract([(a, "ij"), (b, "ji")], "ij", {"i": 2, "j": 3})
    assert t.kinds(value) == ["mul"]
    t.assert_is(value, t.arrays[0] * np.swapaxes(t.arrays[1], 1, 2))


def test_a_factor_of_one_is_none() -> None:
    """If nothing else has to be there; a table of ones is a table."""
    tiles = Tiles((2, 1))
    (u,), (x,), sizes = tiles.numbers, tiles.arrays, {"a": 2, "b": 1, "c": 4}
    ones = [tiles.builder.constant(np.ones(shape)) for shape in ((), (1,), (4,))]
    summed = tiles.builder.contract([(u, "ab"), (ones[0], ""), (ones[1], "b")], "a", sizes)
    assert summed == tiles.builder.contract([(u, "ab")], "a", sizes)
    tiles.assert_is(summed, x.sum(2))
    scaled = tiles.builder.contract([(u, "ab"), (ones[2], "c")], "a", sizes)
    tiles.assert_is(scaled, 4 * x.sum(2))
    for terms in ([(ones[0], "")], [(ones[0], ""), (ones[1], "b"), (ones[2], "c")]):
        spread = tiles.builder.contract(terms, "c", sizes)
        outer = tiles.builder.contract([(u, "ab"), (spread, "c")], "abc", sizes)
        tiles.assert_is(outer, np.repeat(x[..., None], 4, axis=-1))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_one_divides_nothing(dtype: type) -> None:
    builder = Builder(1)
    x = builder.input(Input((0,), (3, 1), np.dtype(dtype)))
    for shape, labels in (((), ""), ((1,), "b"), ((3,), "a"), ((3, 1), "ab")):
        one = builder.constant(np.ones(shape, dtype))
        sizes = {"a": 3, "b": 1}
        assert builder.pointwise("div", [(x, "ab"), (one, labels)], "ab", sizes) == x


def test_conditions_on_conditions() -> None:
    """What a branch makes of a condition, by its number, is the condition."""
    builder = Builder(1)
    x, y, z = (builder.input(Input((0,), (2,), F64)) for _ in range(3))
    one, zero = (builder.constant(np.full((), number)) for number in (1.0, 0.0))
    labels, sizes = "a", {"a": 2}

    def of(function: str, *terms: tuple[int, str]) -> int:
        return builder.pointwise(function, list(terms), labels, sizes)

    truth = builder.map("lt", x, y)
    assert of("eq", (truth, "a"), (one, "")) == truth == of("ne", (zero, ""), (truth, "a"))
    opposite = of("eq", (truth, "a"), (zero, ""))
    assert opposite == of("ne", (truth, "a"), (one, "")) == builder.map("not", truth)
    assert builder.map("select", opposite, y, z) == builder.map("select", truth, z, y)
    assert builder.map("select", truth, y, y) == y
    assert of("eq", (x, "a"), (one, "")) not in (x, truth)  # no condition


def test_a_diagonal_and_an_outer_product() -> None:
    t = Tiles((3, 3), (2,))
    a, b = t.numbers
    value = t.builder.contract([(a, "ii"), (b, "k")], "ik", {"i": 3, "k": 2})
    t.assert_is(value, np.einsum("eii,ek->eik", *t.arrays))


def test_operations_that_differ_in_names_alone_are_one() -> None:
    t = Tiles((2, 3), (3,))
    a, b = t.numbers
    first = t.builder.pointwise("mul", [(a, "ij"), (b, "j")], "ij", {"i": 2, "j": 3})
    assert t.builder.pointwise("mul", [(a, "xy"), (b, "y")], "xy", {"x": 2, "y": 3}) == first
    assert t.builder.pointwise("add", [(a, "xy"), (b, "y")], "xy", {"x": 2, "y": 3}) != first


# ---- Components ----------------------------------------------------------------------------------


def test_a_component_of_a_function_is_a_function_of_components() -> None:
    t = Tiles((2, 3), (3,))
    a, b = t.numbers
    whole = t.builder.pointwise("mul", [(a, "ij"), (b, "j")], "ij", {"i": 2, "j": 3})
    value = t.builder.index(t.builder.map("sin", whole), 1, 2)
    operations = t.operations(value)
    # Two values are multiplied, not six, and then the sine is of two.
    assert [x.tile for x in operations if isinstance(x, Map)] == [(2,), (2,)]
    t.assert_is(value, np.sin(t.arrays[0] * t.arrays[1][:, None])[:, :, 2])


def test_a_component_of_a_contraction_with_a_table_needs_a_row_of_the_table() -> None:
    t = Tiles((2, 3))
    table = np.random.default_rng(1).standard_normal((3, 4))
    terms = [(t.numbers[0], "ij"), (t.builder.constant(table), "jk")]
    product = t.builder.contract(terms, "ik", {"i": 2, "j": 3, "k": 4})
    value = t.builder.index(product, 1, 3)
    assert [x.tile for x in t.operations(value)] == [(2,)]
    t.assert_is(value, (t.arrays[0] @ table)[:, :, 3])


@pytest.mark.parametrize(("axis", "k"), [(0, 1), (1, 3)])
def test_a_component_of_any_contraction(axis: int, k: int) -> None:
    t = Tiles((2, 3), (3, 4))
    a, b = t.numbers
    product = t.builder.contract([(a, "ij"), (b, "jk")], "ik", {"i": 2, "j": 3, "k": 4})
    value = t.builder.index(product, axis, k)
    t.assert_is(value, np.take(t.arrays[0] @ t.arrays[1], k, axis + 1))
    t.assert_is(t.builder.index(value, 0, 1), np.take(t.arrays[0] @ t.arrays[1], k, axis + 1)[:, 1])


@pytest.mark.parametrize(("start", "step", "count"), [(0, 1, 4), (1, 2, 2), (3, -1, 4), (2, -2, 2)])
def test_a_slice_of_a_function_is_a_function_of_slices(start: int, step: int, count: int) -> None:
    t = Tiles((3, 4), (4,))
    a, b = t.numbers
    whole = t.builder.pointwise("sub", [(a, "ij"), (b, "j")], "ij", {"i": 3, "j": 4})
    value = t.builder.slice(whole, 1, start, step, count)
    assert t.kinds(value)[-1] == "sub"
    at = start + step * np.arange(count)
    t.assert_is(value, (t.arrays[0] - t.arrays[1][:, None])[:, :, at])


def test_a_view_of_a_constant_is_a_constant() -> None:
    builder = Builder(0)
    array = np.arange(6.0).reshape(2, 3)
    assert builder.index(builder.constant(array), 0, 1) == builder.constant(array[1])
    assert builder.slice(builder.constant(array), 1, 2, -1, 3) == builder.constant(array[:, ::-1])


# ---- Views ---------------------------------------------------------------------------------------


def test_views_of_views_are_one() -> None:
    t = Tiles((4, 3, 2))
    value = t.builder.slice(t.numbers[0], 0, 3, -1, 4)
    value = t.builder.index(t.builder.slice(value, 0, 1, 2, 2), 1, 2)
    assert t.kinds(value) == ["View"]
    t.assert_is(value, t.arrays[0][:, ::-1][:, 1:4:2, 2])


def test_a_view_of_everything_is_nothing() -> None:
    t = Tiles((4, 3))
    assert t.builder.view(t.numbers[0], 0, (3, 1), (4, 3)) == t.numbers[0]


@pytest.mark.parametrize("tile", [(1, 4, 2), (4, 1, 2, 1), (4, 2)])
def test_axes_of_one_value_of_a_view_may_be_anywhere(tile: tuple[int, ...]) -> None:
    t = Tiles((4, 3, 2))
    part = t.builder.index(t.numbers[0], 1, 2)
    value = t.builder.reshape(t.builder.reshape(part, (4, 1, 2)), tile)
    assert t.kinds(value) == ["View"]
    t.assert_is(value, t.arrays[0][:, :, 2].reshape(ELEMENTS, *tile))


def test_a_view_that_no_strides_describe_stays_two() -> None:
    """Every other value of a reversed half, flattened across its rows."""
    t = Tiles((4, 3))
    columns = t.builder.slice(t.numbers[0], 1, 0, 1, 2)
    value = t.builder.view(columns, 1, (3,), (3,))
    assert t.kinds(value) == ["View", "View"]
    t.assert_is(value, t.arrays[0][:, :, :2].reshape(ELEMENTS, -1)[:, [1, 4, 7]])


# ---- Stacks --------------------------------------------------------------------------------------


def test_a_component_of_a_stack_is_what_was_stacked() -> None:
    t = Tiles((2, 3), (2, 3))
    for axis in range(3):
        stack = t.builder.stack(t.numbers, axis)
        assert [t.builder.index(stack, axis, k) for k in range(2)] == t.numbers
        t.assert_is(stack, np.stack(t.arrays, axis + 1))


def test_a_function_of_stacks_is_a_stack_of_functions() -> None:
    t = Tiles((2, 3), (2, 3), (3,))
    a, b, c = t.numbers
    stack = t.builder.stack([a, b], 1)
    sizes = {"i": 2, "k": 2, "j": 3}
    value = t.builder.pointwise("mul", [(stack, "ikj"), (c, "j")], "ikj", sizes)
    assert t.kinds(value) == ["mul", "mul", "Place"]
    t.assert_is(value, np.stack(t.arrays[:2], 2) * t.arrays[2][:, None, None])


def test_a_contraction_over_a_stack_is_a_sum() -> None:
    t = Tiles((3,), (3,), (2, 4))
    a, b, c = t.numbers
    stack = t.builder.stack([a, b], 0)
    value = t.builder.contract([(stack, "ki"), (c, "kj")], "ij", {"k": 2, "i": 3, "j": 4})
    assert "Place" not in t.kinds(value)
    t.assert_is(value, np.einsum("eki,ekj->eij", np.stack(t.arrays[:2], 1), t.arrays[2]))


def test_a_slice_of_a_stack_stacks_slices() -> None:
    t = Tiles((3, 4), (3, 4), (3, 4))
    stack = t.builder.stack(t.numbers, 0)
    array = np.stack(t.arrays, 1)
    t.assert_is(t.builder.slice(stack, 0, 2, -1, 3), array[:, ::-1])
    t.assert_is(t.builder.slice(stack, 2, 3, -2, 2), array[..., ::-2])
    assert t.kinds(t.builder.index(stack, 1, 1)) == ["View", "View", "View", "Place"]


@given(st.data())
@settings(max_examples=40)
def test_functions_of_stacks_of_stacks_at_any_axes(data: st.DataObject) -> None:
    t = Tiles((2,), (2,), (2,), (2,))
    inner, outer = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    pairs = [t.builder.stack(t.numbers[k : k + 2], inner) for k in (0, 2)]
    value = t.builder.map("neg", t.builder.stack(pairs, outer))
    arrays = [np.stack(t.arrays[k : k + 2], inner + 1) for k in (0, 2)]
    expected = -np.stack(arrays, outer + 1)
    t.assert_is(value, expected)
    axes = data.draw(st.permutations(range(3)))
    t.assert_is(t.builder.transpose(value, axes), expected.transpose(0, *(1 + a for a in axes)))
    axis, k = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    t.assert_is(t.builder.index(value, axis, k), np.take(expected, k, axis + 1))
    shape = data.draw(st.sampled_from([(8,), (2, 4), (4, 2), (1, 2, 1, 4), (2, 2, 2, 1)]))
    t.assert_is(t.builder.reshape(value, shape), expected.reshape(ELEMENTS, *shape))


# ---- Reshaping -----------------------------------------------------------------------------------

RESHAPED = [
    ((6,), (2, 3)),
    ((2, 3), (6,)),
    ((4, 6), (2, 2, 3, 2)),
    ((4, 6), (8, 3)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((3, 1, 4), (1, 3, 2, 2)),
    ((1, 1), ()),
    ((), (1, 1, 1)),
    ((1, 6, 1), (3, 1, 2)),
]


@pytest.mark.parametrize(("old", "new"), RESHAPED)
@pytest.mark.parametrize("kind", ["input", "map", "contract", "stack", "placed", "constant"])
def test_reshape_of_everything(kind: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    t = Tiles(old, old)
    a, b = t.numbers
    value, expected = a, t.arrays[0]
    labels = letters(len(old))
    sizes = dict(zip(labels, old, strict=True)) | {"z": 2}
    if kind == "map":
        value, expected = t.builder.map("mul", a, b), t.arrays[0] * t.arrays[1]
    elif kind == "contract":
        pair = t.builder.stack([a, b], 0)
        table = t.builder.input(Input((0,), (2,), F64))
        t.numbers.append(table)
        t.arrays.append(np.random.default_rng(1).standard_normal((ELEMENTS, 2)))
        value = t.builder.contract([(pair, "z" + labels), (table, "z")], labels, sizes)
        expected = np.einsum(
            f"eZ{labels},eZ->e{labels}".replace("e", "E"), np.stack(t.arrays[:2], 1), t.arrays[2]
        )
    elif kind == "stack" and old:
        parts = [t.builder.index(a, len(old) - 1, k) for k in range(old[-1])]
        value = t.builder.stack(parts, len(old) - 1)
    elif kind == "placed":
        size = int(np.prod(old))
        first = t.builder.reshape(a, (size,))
        value = t.builder.place([(first, size - 1, (-1,))], old)
        expected = t.arrays[0].reshape(ELEMENTS, -1)[:, ::-1].reshape(t.arrays[0].shape)
    elif kind == "constant":
        value, expected = t.builder.constant(expected[0]), np.stack([expected[0]] * ELEMENTS)
        # A program needs something that says how many elements there are.
        value = t.builder.map("first", value, a)
    value = t.builder.reshape(value, new)
    t.assert_is(value, expected.reshape(ELEMENTS, *new))


# ---- Axes that several have become ---------------------------------------------------------------


def of_nodes_and_components(t: Tiles) -> tuple[int, np.ndarray]:
    """Vectors at six nodes as one axis: values and arrays (2, 6 * 3)."""
    value = t.builder.reshape(t.builder.stack(t.numbers[:3], 2), (2, 18))
    return value, np.stack(t.arrays[:3], 3).reshape(ELEMENTS, 2, 18)


def test_what_was_merged_is_apart_where_it_is_used() -> None:
    t = Tiles((2, 6), (2, 6), (2, 6), (18,))
    value, array = of_nodes_and_components(t)
    t.assert_is(value, array)
    labels = {"a": 2, "b": 18, "c": 18}
    product = t.builder.contract([(value, "ab"), (t.numbers[3], "b")], "a", labels)
    t.assert_is(product, np.einsum("eab,eb->ea", array, t.arrays[3]))
    assert not any(18 in getattr(x, "tile", ()) for x in t.operations(product))
    matrix = t.builder.contract([(value, "ab"), (value, "ac")], "bc", labels)
    t.assert_is(matrix, np.einsum("eab,eac->ebc", array, array))
    t.assert_is(t.builder.sum([matrix, matrix]), 2 * np.einsum("eab,eac->ebc", array, array))
    function = t.builder.pointwise("mul", [(value, "ab"), (t.numbers[3], "b")], "ab", labels)
    t.assert_is(function, array * t.arrays[3][:, None])
    again = t.builder.map("sub", function, value)
    t.assert_is(again, array * t.arrays[3][:, None] - array)


@given(st.data())
@settings(max_examples=60)
def test_parts_of_what_was_merged(data: st.DataObject) -> None:
    t = Tiles((2, 6), (2, 6), (2, 6))
    value, array = of_nodes_and_components(t)
    if data.draw(st.booleans()):
        value, array = t.builder.map("neg", value), -array
    if data.draw(st.booleans()):
        value, array = t.builder.transpose(value, (1, 0)), array.swapaxes(1, 2)
    axis = data.draw(st.integers(0, 1))
    extent = array.shape[1 + axis]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, extent - 1)] * 2)))
    step = data.draw(st.sampled_from([1, 2, 3, 6]))
    where = range(start, stop + 1, step)
    part = t.builder.slice(value, axis, start, step, len(where))
    t.assert_is(part, np.take(array, list(where), axis + 1))
    t.assert_is(t.builder.index(value, axis, start), np.take(array, start, axis + 1))
    shape = data.draw(st.sampled_from([(36,), (2, 6, 3), (2, 3, 6), (4, 9), (2, 2, 9), (12, 3)]))
    t.assert_is(t.builder.reshape(value, shape), array.reshape(ELEMENTS, *shape))


def test_axes_that_were_merged_of_others_do_not_meet() -> None:
    """Three components of six nodes, and two of nine: along one axis they are no components."""
    t = Tiles(*[(6,)] * 3, *[(9,)] * 2)
    one = t.builder.reshape(t.builder.stack(t.numbers[:3], 1), (18,))
    other = t.builder.reshape(t.builder.stack(t.numbers[3:], 1), (18,))
    arrays = [np.stack(x, 2).reshape(ELEMENTS, 18) for x in (t.arrays[:3], t.arrays[3:])]
    t.assert_is(t.builder.map("mul", one, other), arrays[0] * arrays[1])
    dot = t.builder.contract([(one, "a"), (other, "a")], "", {"a": 18})
    t.assert_is(dot, np.einsum("ea,ea->e", *arrays))


# ---- Places --------------------------------------------------------------------------------------


def test_parts_of_one_tile_are_added_by_placing_them() -> None:
    t = Tiles((2,), (3,))
    a, b = t.numbers
    first = t.builder.place([(a, 0, (1,))], (4,))
    second = t.builder.place([(b, 1, (1,))], (4,))
    value = t.builder.sum([first, second])
    assert t.kinds(value) == ["Place"]
    expected = np.zeros((ELEMENTS, 4))
    expected[:, :2] += t.arrays[0]
    expected[:, 1:] += t.arrays[1]
    t.assert_is(value, expected)


def test_stacks_are_added_part_by_part() -> None:
    t = Tiles((2,), (2,), (2,), (2,))
    pairs = [t.builder.stack(t.numbers[k : k + 2], 0) for k in (0, 2)]
    value = t.builder.sum(pairs)
    assert t.kinds(value) == ["add", "add", "Place"]
    t.assert_is(value, np.stack(t.arrays[:2], 1) + np.stack(t.arrays[2:], 1))


@pytest.mark.parametrize("offset, strides", [(0, (3, 1)), (5, (-3, -1)), (1, (1, 1)), (0, (0, 0))])
def test_placing_and_viewing_are_each_others_transpose(
    offset: int, strides: tuple[int, int]
) -> None:
    """``<view u, v> = <u, place v>``, repeated places included."""
    t = Tiles((2, 3), (2, 3))
    if strides == (1, 1):
        offset = 0
    a, b = t.numbers
    view = t.builder.view(a, offset, strides, (2, 3))
    place = t.builder.place([(b, offset, strides)], (2, 3))
    at = places(offset, strides, (2, 3))
    u, v = (x.reshape(ELEMENTS, -1) for x in t.arrays)
    t.assert_is(view, u[:, at])
    expected = np.zeros((ELEMENTS, 6))
    for i, j in itertools.product(range(2), range(3)):
        expected[:, at[i, j]] += v.reshape(ELEMENTS, 2, 3)[:, i, j]
    t.assert_is(place, expected.reshape(ELEMENTS, 2, 3))


def test_what_was_taken_apart_and_put_together_again_is_recognised_by_its_parts() -> None:
    t = Tiles((3, 2))
    (a,) = t.numbers
    parts: Sequence[int] = [t.builder.index(a, 0, k) for k in range(3)]
    stack = t.builder.stack(parts, 0)
    assert [t.builder.index(stack, 0, k) for k in range(3)] == parts
    assert all(isinstance(x, View | Place) for x in t.operations(stack))
    t.assert_is(stack, t.arrays[0])


# ---- Long chains of operations -------------------------------------------------------------------

PARTS: dict[str, Callable[[Builder, int], int]] = {
    "component": lambda b, x: b.index(x, 0, 1),
    "slice": lambda b, x: b.slice(x, 0, 3, -1, 2),
    "reshaped": lambda b, x: b.reshape(x, (2, 2)),
    "product with a stack": lambda b, x: b.map("mul", b.stack([b.index(x, 0, 0)] * 4, 0), x),
}


def chain(t: Tiles, links: int) -> int:
    """``x -> x² + x``, so often: every value is used thrice."""
    (x,) = t.numbers
    for _ in range(links):
        x = t.builder.map("add", t.builder.map("mul", x, x), x)
    return x


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_chain_takes_work_in_proportion_to_its_length(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    append = Builder._append

    def counting(self: Builder, operation: Operation) -> int:
        nonlocal count
        count += 1
        return append(self, operation)

    def work(links: int) -> int:
        nonlocal count
        t = Tiles((4,))
        x = chain(t, links)
        count = 0
        PARTS[part](t.builder, x)
        return count

    monkeypatch.setattr(Builder, "_append", counting)
    assert work(8) - work(6) == work(4) - work(2)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_chain_is_what_it_is_of_its_value(part: str) -> None:
    t = Tiles((4,))
    t.arrays[0] *= 0.1
    x = chain(t, 3)
    expected = t.arrays[0]
    for _ in range(3):
        expected = expected**2 + expected
    whole = {
        "component": expected[:, 1],
        "slice": expected[:, 3:1:-1],
        "reshaped": expected.reshape(-1, 2, 2),
        "product with a stack": expected[:, :1] * expected,
    }
    t.assert_is(PARTS[part](t.builder, x), whole[part])


@pytest.mark.parametrize("part", PARTS)
def test_a_chain_may_be_longer_than_the_stack_is_deep(part: str) -> None:
    t = Tiles((4,))
    value = PARTS[part](t.builder, chain(t, 2000))
    assert len(t.operations(value)) >= 4000
    assert t.builder.dtype(value) == F64 and t.builder.batch(value) == {0}
