"""Sums of products become one product."""

import numpy as np
import pytest

from jaxmagma.plans.factoring import factored, stacked
from jaxmagma.plans.plan import Plan, Product, plan
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import ElementProgram, Input, Output
from tests.test_plan import assert_well_formed, evaluate


F64 = np.dtype(np.float64)
ELEMENTS = 3
EXTENTS = dict.fromkeys("abc", 3) | dict.fromkeys("xyz", 4)


def divergence() -> ElementProgram:
    """The transpose of the three derivatives at the points of a hexahedron, added up."""
    builder = Builder(1)
    values, slopes = (builder.input(Input((), (4, 3), F64)) for _ in range(2))
    terms = []
    for direction in range(3):
        flux = builder.input(Input((0,), (4, 4, 4), F64))
        tables = [slopes if axis == direction else values for axis in range(3)]
        factors = [*zip(tables, ("xa", "yb", "zc"), strict=True), (flux, "xyz")]
        terms.append(builder.contract(factors, "abc", EXTENTS))
    total = builder.map("add", builder.map("add", *terms[:2]), terms[2])
    return builder.build([Output(total, (0,))]).program


def sum_of_products(times: int) -> ElementProgram:
    """``A x0 + z + A x1 + ...`` with a shared matrix."""
    builder = Builder(1)
    matrix = builder.input(Input((), (4, 3), F64))
    total = builder.input(Input((0,), (4,), F64))
    for _ in range(times):
        x = builder.input(Input((0,), (3,), F64))
        product = builder.contract([(matrix, "xa"), (x, "a")], "x", EXTENTS)
        total = builder.map("add", total, product)
    return builder.build([Output(total, (0,))]).program


def product_read_twice() -> ElementProgram:
    """``A x + A y``, and ``A x`` itself."""
    builder = Builder(1)
    matrix = builder.input(Input((), (4, 3), F64))
    vectors = [builder.input(Input((0,), (3,), F64)) for _ in range(2)]
    left, right = (builder.contract([(matrix, "xa"), (x, "a")], "x", EXTENTS) for x in vectors)
    total = builder.map("add", left, right)
    return builder.build([Output(total, (0,)), Output(left, (0,))]).program


def products(planned: Plan) -> int:
    return sum(isinstance(step, Product) for step in planned.steps)


@pytest.mark.parametrize(
    ("program", "before", "after"),
    [
        (divergence(), 9, 8),
        (sum_of_products(1), 1, 1),
        (sum_of_products(2), 2, 1),
        (sum_of_products(4), 4, 1),
        (product_read_twice(), 2, 2),
    ],
)
def test_products_with_one_matrix_are_one(program: ElementProgram, before: int, after: int) -> None:
    planned = plan(program)
    fewer = factored(planned)
    assert_well_formed(fewer)
    assert (products(planned), products(fewer)) == (before, after)
    assert (fewer is planned) == (before == after)
    assert before == after or fewer.flops < planned.flops

    draw = np.random.default_rng(0).standard_normal
    arguments = [draw((ELEMENTS,) * len(x.batch) + x.tile) for x in program.inputs]
    for found, expected in zip(
        evaluate(fewer, arguments), evaluate(planned, arguments), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_a_sum_that_is_a_result_of_its_own_stays() -> None:
    """The additions inside a sum go only if nothing else reads them."""
    builder = Builder(1)
    matrix = builder.input(Input((), (4, 3), F64))
    vectors = [builder.input(Input((0,), (3,), F64)) for _ in range(3)]
    terms = [builder.contract([(matrix, "xa"), (x, "a")], "x", EXTENTS) for x in vectors]
    inner = builder.map("add", *terms[:2])
    total = builder.map("add", inner, terms[2])
    program = builder.build([Output(inner, (0,)), Output(total, (0,))]).program
    fewer = factored(plan(program))
    assert_well_formed(fewer)
    assert products(fewer) == 2
    draw = np.random.default_rng(1).standard_normal
    arguments = [draw((ELEMENTS,) * len(x.batch) + x.tile) for x in program.inputs]
    a, x, y, z = arguments
    np.testing.assert_allclose(evaluate(fewer, arguments)[0], (x + y) @ a.T, atol=1e-13)
    np.testing.assert_allclose(evaluate(fewer, arguments)[1], (x + y + z) @ a.T, atol=1e-13)


def sum_of_outer_products(order: list[int], rest: bool, taken: bool) -> ElementProgram:
    """``z + a0 b0^T + a1 b1^T + ...``, of rows of a matrix and of vectors or other functions."""
    builder = Builder(1)
    rows = builder.input(Input((0,), (len(order), 3), F64))
    terms = [builder.input(Input((0,), (3, 4), F64))] if rest else []
    for k in order:
        a = builder.index(rows, 0, k)
        b = builder.map("exp", builder.input(Input((0,), (4,), F64)))
        terms.append(builder.contract([(a, "a"), (b, "x")], "ax", EXTENTS))
    total = terms[0]
    for term in terms[1:]:
        total = builder.map("add", total, term)
    outputs = [total, terms[-1]] if taken else [total]
    return builder.build([Output(x, (0,)) for x in outputs]).program


@pytest.mark.parametrize(
    ("order", "rest", "taken", "after"),
    [
        ([0, 1], False, False, 2),
        ([0, 1, 2], False, False, 1),
        ([2, 0, 1, 3], True, False, 1),
        ([0, 1, 2], True, True, 3),
        ([3, 1, 0, 2], False, True, 2),
    ],
)
def test_outer_products_are_one_of_matrices(
    order: list[int], rest: bool, taken: bool, after: int
) -> None:
    """Unless there are few, or one of them is asked for."""
    program = sum_of_outer_products(order, rest, taken)
    planned = plan(program)
    joined = stacked(planned)
    assert_well_formed(joined)
    assert (products(planned), products(joined)) == (len(order), after)
    draw = np.random.default_rng(2).standard_normal
    arguments = [draw((ELEMENTS,) * len(x.batch) + x.tile) for x in program.inputs]
    for found, expected in zip(
        evaluate(joined, arguments), evaluate(planned, arguments), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_two_outer_products_of_one_kind_hide_no_three_of_another() -> None:
    builder = Builder(1)
    terms = []
    for shared in (True, True, False, False, False):
        a = builder.input(Input(() if shared else (0,), (3,), F64))
        b = builder.input(Input((0,), (4,), F64))
        terms.append(builder.contract([(a, "a"), (b, "x")], "ax", EXTENTS))
    total = terms[0]
    for term in terms[1:]:
        total = builder.map("add", total, term)
    planned = plan(builder.build([Output(total, (0,))]).program)
    joined = stacked(planned)
    assert_well_formed(joined)
    assert (products(planned), products(joined)) == (5, 3)
