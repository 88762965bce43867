"""Tiles stand in another order, and all is as before."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmagma.plans.fibres import turned
from jaxmagma.programs.program import (
    Contract,
    ElementProgram,
    Input,
    Map,
    Operation,
    Output,
    View,
    contraction,
)
from jaxmagma.programs.reference import evaluate
from jaxmagma.programs.strides import row_major


ELEMENTS = 3
LETTERS = "abc"
DTYPE = np.dtype(float)


class Drawn:
    """Random operations on tiles, with as many values along every axis as its matrix makes."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        tile = tuple(data.draw(st.permutations([2, 3, 4])))
        square = [Input((), (n, n), DTYPE) for n in (2, 3, 4)]
        self.inputs = [Input((0,), tile, DTYPE), *square]
        self.operations: list[Operation] = []
        # Values, and their extents, which tell their axes apart.
        self.values = [(0, tile)]
        for _ in range(data.draw(st.integers(1, 12))):
            self.add()

    def tile(self) -> tuple[int, tuple[int, ...]]:
        return self.data.draw(st.sampled_from(self.values))

    def output(self, tile: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.data.draw(st.permutations(tile)))

    def add(self) -> None:
        kind = self.data.draw(st.sampled_from(["matrix", "sum", "view"]))
        value, tile = self.tile()
        made = self.output(tile)
        labels = dict(zip(sorted(tile), LETTERS, strict=True))
        own, result = ("".join(labels[n] for n in x) for x in (tile, made))
        sizes = {label: n for n, label in labels.items()}
        if kind == "matrix":
            along = self.data.draw(st.sampled_from(tile))
            matrix = sorted((2, 3, 4)).index(along) + 1
            result = result.replace(labels[along], "x")
            terms = [(value, own), (matrix, "x" + labels[along])]
            self.append(contraction(terms, result, {**sizes, "x": along}), made)
        elif kind == "sum":
            other, shape = self.tile()
            beside = "".join(labels[n] for n in shape)
            self.append(
                Map("add", ((value, own), (other, beside)), result, tuple(sorted(sizes.items()))),
                made,
            )
        else:
            self.append(View(value, 0, row_major(tile), tile), tile)

    def append(self, operation: Operation, tile: tuple[int, ...]) -> None:
        self.operations.append(operation)
        self.values.append((len(self.inputs) + len(self.operations) - 1, tile))

    def program(self) -> ElementProgram:
        results = self.data.draw(
            st.lists(st.sampled_from(self.values[1:]), min_size=1, max_size=2, unique=True)
        )
        outputs = tuple(Output(value, (0,)) for value, _ in results)
        return ElementProgram(1, tuple(self.inputs), tuple(self.operations), outputs)


def with_operations(program: ElementProgram, operations: Sequence[Operation]) -> ElementProgram:
    return ElementProgram(program.batch_rank, program.inputs, tuple(operations), program.outputs)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_results_are_the_same(data: st.DataObject, seed: int) -> None:
    program = Drawn(data).program()
    found = with_operations(program, turned(program, program.operations))
    random = np.random.default_rng(seed)
    # All sums of such numbers are exact.
    arrays = [
        random.integers(-3, 4, ((ELEMENTS, *x.tile) if x.batch else x.tile)).astype(float)
        for x in program.inputs
    ]
    for one, other in zip(evaluate(program, *arrays), evaluate(found, *arrays), strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_once_turned_they_stay(data: st.DataObject) -> None:
    program = Drawn(data).program()
    found = with_operations(program, turned(program, program.operations))
    assert turned(found, found.operations) == found.operations


def chain(axes: Sequence[int]) -> ElementProgram:
    """A matrix along each of these axes of a cube, one after the other."""
    inputs = (Input((0,), (3, 3, 3), DTYPE), Input((), (4, 3), DTYPE))
    operations: list[Contract] = []
    sizes = dict.fromkeys("abc", 3)
    for axis in axes:
        label, last = "abc"[axis], len(operations)
        sizes[label] = 4
        terms = [(last + 1 if last else 0, "abc".replace(label, "x")), (1, label + "x")]
        operations.append(contraction(terms, "abc", {**sizes, "x": 3}))
    return ElementProgram(1, inputs, tuple(operations), (Output(len(operations) + 1, (0,)),))


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0)])
def test_every_matrix_has_its_turn_at_the_same_end(axes: Sequence[int]) -> None:
    program = chain(axes)
    found = turned(program, program.operations)
    for operation in found[:-1]:
        assert isinstance(operation, Contract)
        (_, tile), (_, matrix) = operation.terms
        (new,) = set(matrix) - set(tile)
        (old,) = set(matrix) & set(tile)
        ends = [tile.index(old) == 0, operation.output.index(new) == 0]
        assert ends == [axes[0] == 0, axes[0] != 0]
    assert found[-1].tile == program.operations[-1].tile


def test_results_and_what_is_moved_stay() -> None:
    program = chain((0, 1, 2))
    # %3 has had two of the matrices.
    assert program.tiles[3] == (4, 4, 3)
    view = View(3, 0, (12, 3, 1), (4, 4, 3))
    moved = ElementProgram(
        1, program.inputs, (*program.operations, view), (*program.outputs, Output(5, (0,)))
    )
    found = turned(moved, moved.operations)
    assert found[1].tile == (4, 4, 3)
    assert found[0].tile == (3, 3, 4)
    assert [found[n].tile for n in (2, 3)] == [(4, 4, 4), (4, 4, 3)]
