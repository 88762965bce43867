"""Programs: what they say of their tiles, batch axes and memory, and how they are built."""

import math

import numpy as np
import pytest

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import Constant, Contract, ElementProgram, Input, Map, Output


F64 = np.dtype(np.float64)


def contract(*terms: tuple[int, str], output: str, **sizes: int) -> Contract:
    return Contract(terms, output, tuple(sorted(sizes.items())))


def interpolation() -> ElementProgram:
    """``ra,eab->erb`` and ``sb,erb->ers`` over elements ``e``, with one traced basis."""
    return ElementProgram(
        batch_rank=1,
        inputs=(
            Input((), (4, 3), F64),
            Input((), (2, 3), F64, Constant(np.ones((2, 3)))),
            Input((0,), (3, 3), F64),
        ),
        operations=(
            contract((0, "ra"), (2, "ab"), output="rb", a=3, b=3, r=4),
            contract((1, "sb"), (3, "rb"), output="rs", b=3, r=4, s=2),
        ),
        outputs=(Output(4, (0,)),),
    )


# ---- Constants -------------------------------------------------------------------------------


def test_constants_are_compared_by_contents() -> None:
    values = np.arange(6.0).reshape(2, 3)
    same = Constant(values.copy())
    assert Constant(values) == same
    assert hash(Constant(values)) == hash(same)
    assert Constant(values) != Constant(values + 1)
    assert Constant(values) != Constant(values.reshape(3, 2))
    assert Constant(values) != Constant(values.astype(np.float32))
    assert Constant(values) != Constant(values.view(np.int64))
    assert Constant(values) != "constant"


def test_constants_tell_nan_and_signed_zero_by_their_bits() -> None:
    assert Constant(np.array([np.nan])) == Constant(np.array([np.nan]))
    assert Constant(np.array([0.0])) != Constant(np.array([-0.0]))


def test_constant_of_any_layout_is_contiguous_and_keeps_its_shape() -> None:
    transposed = Constant(np.arange(6.0).reshape(2, 3).T)
    assert transposed.array.flags.c_contiguous
    assert transposed.array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert Constant(np.array(2.0)).array.shape == ()


def test_constant_is_immutable_and_its_source_is_not() -> None:
    values = np.ones(3)
    constant = Constant(values)
    assert not constant.array.flags.writeable
    values[0] = 7
    assert constant == Constant(np.ones(3))


def test_constant_prints_its_type_not_its_values() -> None:
    assert repr(Constant(np.ones((2, 3), np.float32))) == "Constant(float32[2, 3])"


# ---- Inputs and operations -------------------------------------------------------------------


def test_input_without_batch_axes_is_shared() -> None:
    assert Input((), (3,), F64).shared
    assert not Input((0,), (3,), F64).shared


def test_constant_input_must_be_a_shared_tile_of_its_shape() -> None:
    with pytest.raises(ValueError, match="constant"):
        Input((0,), (3,), F64, Constant(np.ones(3)))
    with pytest.raises(ValueError, match="constant"):
        Input((), (4,), F64, Constant(np.ones(3)))


def test_contraction_knows_its_operands_extents_and_tile() -> None:
    operation = contract((0, "ra"), (2, "ab"), output="br", a=3, b=5, r=4)
    assert operation.operands == (0, 2)
    assert operation.extents == {"a": 3, "b": 5, "r": 4}
    assert operation.tile == (5, 4)
    assert repr(operation) == "contract %0[ra] * %2[ab] -> [br]"


def test_map_prints_as_a_call() -> None:
    operation = Map("add", ((3, "ij"), (4, "j")), "ij", (("i", 2), ("j", 5)))
    assert repr(operation) == "add %3[ij], %4[j] -> [ij]"
    assert operation.operands == (3, 4)
    assert operation.tile == (2, 5)


# ---- Programs --------------------------------------------------------------------------------


def test_tiles_and_batch_axes_of_values() -> None:
    program = interpolation()
    assert program.tiles == ((4, 3), (2, 3), (3, 3), (4, 3), (4, 2))
    assert [sorted(axes) for axes in program.batch] == [[], [], [0], [0], [0]]
    assert program.dtype == F64


def test_constants_are_no_arguments() -> None:
    program = interpolation()
    assert program.arguments == (program.inputs[0], program.inputs[2])


def test_batch_extents_are_read_off_the_arguments() -> None:
    program = interpolation()
    assert program.batch_extents([(4, 3), (11, 3, 3)]) == (11,)
    assert program.output_shapes((11,)) == ((11, 4, 2),)


def test_batch_extents_in_any_order_of_axes() -> None:
    program = ElementProgram(
        2,
        (Input((1, 0), (3,), F64), Input((0,), (3,), F64)),
        (contract((0, "i"), (1, "i"), output="", i=3),),
        (Output(2, (0, 1)), Output(2, (1,))),
    )
    assert program.batch_extents([(5, 7, 3), (7, 3)]) == (7, 5)
    assert program.output_shapes((7, 5)) == ((7, 5), (5,))
    with pytest.raises(ValueError, match="batch axis 0 is 7 and 8"):
        program.batch_extents([(5, 7, 3), (8, 3)])


def test_least_bytes_reads_every_argument_and_writes_every_output_once() -> None:
    elements, itemsize = 11, 8
    basis, tiles, results = 4 * 3, elements * 3 * 3, elements * 4 * 2
    assert interpolation().least_bytes((elements,)) == itemsize * (basis + tiles + results)


def test_least_bytes_of_a_sum_over_elements_writes_one_tile() -> None:
    program = ElementProgram(
        2,
        (Input((0,), (3,), F64), Input((1, 0), (3,), np.dtype(np.float32))),
        (contract((0, "i"), (1, "i"), output="i", i=3),),
        (Output(2, (1,)), Output(2, ())),
    )
    read = 5 * 3 * 8 + 7 * 5 * 3 * 4
    written = 7 * 3 * 8 + 3 * 8
    assert program.least_bytes((5, 7)) == read + written


def test_batch_axes_must_be_numbered_without_gaps() -> None:
    with pytest.raises(ValueError, match="batch axes"):
        ElementProgram(2, (Input((1,), (3,), F64),), (), (Output(0, (1,)),))
    with pytest.raises(ValueError, match="batch axes"):
        ElementProgram(0, (Input((0,), (3,), F64),), (), (Output(0, (0,)),))


def test_operations_must_use_earlier_values() -> None:
    with pytest.raises(ValueError, match="operation 1 uses a later value"):
        ElementProgram(
            1,
            (Input((0,), (3,), F64),),
            (contract((1, "i"), output="i", i=3),),
            (Output(1, (0,)),),
        )


def test_equal_programs_are_one_cache_key() -> None:
    assert interpolation() == interpolation()
    assert hash(interpolation()) == hash(interpolation())
    assert len({interpolation(), interpolation()}) == 1


def test_program_prints_what_it_does() -> None:
    assert str(interpolation()).splitlines() == [
        "%0 = shared float64[4, 3]",
        "%1 = constant float64[2, 3]",
        "%2 = batched float64[3, 3] over batch axes [0]",
        "%3 = contract %0[ra] * %2[ab] -> [rb] [4, 3]",
        "%4 = contract %1[sb] * %3[rb] -> [rs] [4, 2]",
        "return %4 over batch axes [0]",
    ]


# ---- Building --------------------------------------------------------------------------------


def test_equal_operations_become_one_value() -> None:
    builder = Builder(1)
    u = builder.input(Input((0,), (3,), F64))
    sizes = {"i": 3, "unused": 9}
    first = builder.contract([(u, "i")], "", sizes)
    assert builder.contract([(u, "i")], "", sizes) == first
    assert builder.contract([(u, "i")], "i", sizes) != first
    assert builder.map("add", first, first) == builder.map("add", first, first)


def test_equal_inputs_stay_two() -> None:
    builder = Builder(1)
    operand = Input((0,), (3,), F64)
    assert builder.input(operand) != builder.input(operand)


def test_sum_of_values_is_a_chain_of_additions() -> None:
    builder = Builder(1)
    values = [builder.input(Input((0,), (3,), F64)) for _ in range(3)]
    assert builder.sum(values[:1]) == values[0]
    total = builder.sum(values)
    operations = builder.build([Output(total, (0,))]).program.operations
    assert [repr(x) for x in operations] == ["add %0[a], %1[a] -> [a]", "add %2[a], %3[a] -> [a]"]


def test_what_no_output_needs_is_left_out() -> None:
    builder = Builder(2)
    unused = builder.input(Input((0,), (5,), F64))
    u = builder.input(Input((1,), (3,), F64))
    builder.contract([(unused, "i"), (u, "j")], "ij", {"i": 5, "j": 3})
    used = builder.contract([(u, "j")], "", {"j": 3})
    built = builder.build([Output(used, (0, 1)), Output(used, (1, 0)), Output(used, (1,))])
    assert built.inputs == (u,)
    assert built.program.batch_rank == 1
    assert built.program.inputs == (Input((0,), (3,), F64),)
    assert built.program.operations == (contract((0, "j"), output="", j=3),)
    # The axis that went was the first, the second and no axis of the outputs.
    assert built.lost == ((0,), (1,), ())
    assert [out.batch for out in built.program.outputs] == [(0,), (0,), (0,)]


def test_precision_goes_into_the_program() -> None:
    builder = Builder(1, "highest")
    u = builder.input(Input((0,), (3,), F64))
    assert builder.build([Output(u, (0,))]).program.precision == "highest"


def test_copy_of_a_programs_operations_computes_the_same() -> None:
    program = interpolation()
    builder = Builder(program.batch_rank)
    numbers = {n: builder.input(x) for n, x in enumerate(program.inputs)}
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        numbers[number] = builder.copy(operation, numbers)
    assert builder.build(program.outputs).program == program


def test_flops_and_bytes_use_exact_integers() -> None:
    """Element counts times tile sizes beyond 64 bits do not wrap."""
    extents = (1 << 62,)
    tiles = math.prod(extents) * (9 + 8)
    assert interpolation().least_bytes(extents) == 8 * (tiles + 12)
