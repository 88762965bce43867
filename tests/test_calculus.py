"""The calculus of programs against JAX's own differentiation of what the programs mean."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmagma.frontends.einsum import FusedCall, capture
from jaxmagma.primitives import calculus
from jaxmagma.primitives.calculus import Derived, Part, Scattered
from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.program import ElementProgram, Input, Map, Output
from tests.einsums import PROGRAMS, Call, assert_close, fused_calls, normal


F64 = np.dtype(np.float64)
# Extents of batch axes; all differ, so that axes in the wrong order do not go unnoticed.
EXTENTS = (5, 3, 2, 4)

GetKey = Callable[[], jax.Array]


def meaning(program: ElementProgram) -> Callable[..., tuple[jax.Array, ...]]:
    return lambda *arguments: tuple(reference.evaluate(program, *arguments))


def values(program: ElementProgram, getkey: GetKey) -> list[jax.Array]:
    return [
        normal(getkey(), [*(EXTENTS[axis] for axis in x.batch), *x.tile], x.dtype)
        for x in program.arguments
    ]


def scattered(
    values: jax.Array, where: Scattered, arrays: Sequence[Any], shape: tuple[int, ...]
) -> jax.Array:
    """Values added up at their places, behind the vector's own batch axes."""
    assert not where.mapped
    at = (slice(None),) * len(where.others) + (arrays[where.index],)
    return jnp.zeros(shape).at[at].add(values)


def results_of(
    derived: Derived, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> tuple[jax.Array, ...]:
    """What a derived program stands for: zeros and lost batch axes put back, elements counted."""

    def evaluate(*arrays: Any) -> tuple[jax.Array, ...]:
        found = reference.evaluate(derived.program, *(arrays[n] for n in derived.arguments))
        results = []
        for parts, shape in zip(derived.results, shapes, strict=True):
            total = jnp.zeros(shape)
            for part in parts:
                value = jnp.expand_dims(found[part.position], derived.lost[part.position])
                value = value * math.prod(EXTENTS[axis] for axis in part.times)
                if part.scattered is not None:
                    value = scattered(value, part.scattered, arrays, shape)
                total = total + jnp.broadcast_to(value, shape)
            results.append(total)
        return tuple(results)

    return jax.jit(evaluate)(*arrays)


def program_of(spec: str, *operands: Any) -> ElementProgram:
    call = capture(spec, *operands)
    assert isinstance(call, FusedCall), call
    return call.program


def named_program(name: str) -> ElementProgram:
    spec, shapes = PROGRAMS[name]
    return program_of(spec, *(np.ones(shape) for shape in shapes))


def tangent_of(program: ElementProgram) -> tuple[ElementProgram, list[bool]]:
    """The tangent program in all arguments, and which of its arguments are tangents."""
    count = len(program.arguments)
    derived = calculus.jvp(program, [True] * count)
    assert derived is not None
    return derived.program, [position >= count for position in derived.arguments]


def two_outputs() -> ElementProgram:
    """``e i j, j k -> e i k`` and its sum with something, the second one also over elements."""
    builder = Builder(1)
    a = builder.input(Input((0,), (2, 3), F64))
    b = builder.input(Input((), (3, 4), F64))
    c = builder.input(Input((0,), (2, 4), F64))
    product = builder.contract([(a, "ij"), (b, "jk")], "ik", {"i": 2, "j": 3, "k": 4})
    total = builder.map("add", product, c)
    return builder.build([Output(product, (0,)), Output(total, ()), Output(a, (0,))]).program


def movement() -> ElementProgram:
    """Views, parts of a larger tile, and functions that broadcast."""
    builder = Builder(1)
    u = builder.input(Input((0,), (3, 4), F64))
    w = builder.input(Input((), (4,), F64))
    diagonal = builder.view(u, 0, (5,), (3,))
    flipped = builder.slice(u, 1, 3, -1, 4)
    placed = builder.place([(diagonal, 1, (4,)), (w, 8, (1,))], (3, 4))
    sizes = {"i": 3, "j": 4}
    product = builder.pointwise("mul", [(placed, "ij"), (diagonal, "i")], "ij", sizes)
    wave = builder.map("sin", builder.pointwise("add", [(product, "ij"), (w, "j")], "ij", sizes))
    which = builder.map("lt", wave, flipped)
    chosen = builder.map("select", which, wave, flipped)
    return builder.build([Output(chosen, (0,)), Output(diagonal, ()), Output(placed, (0,))]).program


PLAIN = [pytest.param(named_program(name), id=name) for name in PROGRAMS]
PLAIN.append(pytest.param(two_outputs(), id="two outputs"))
PLAIN.append(pytest.param(movement(), id="movement"))


# ---- Tangents --------------------------------------------------------------------------------


def assert_jvp_is_right(program: ElementProgram, active: Sequence[bool], getkey: GetKey) -> None:
    primals, tangents = values(program, getkey), values(program, getkey)
    derived = calculus.jvp(program, active)
    assert derived is not None
    whole = [t if on else jnp.zeros_like(t) for t, on in zip(tangents, active, strict=True)]
    function = jax.jit(lambda p, t: jax.jvp(meaning(program), p, t)[1])
    expected = function(tuple(primals), tuple(whole))
    shapes = [x.shape for x in expected]
    assert_close(results_of(derived, [*primals, *tangents], shapes), expected)


@pytest.mark.parametrize("program", PLAIN)
def test_jvp_in_all_arguments(program: ElementProgram, getkey: GetKey) -> None:
    assert_jvp_is_right(program, [True] * len(program.arguments), getkey)


@pytest.mark.parametrize("program", PLAIN)
def test_jvp_in_one_argument(program: ElementProgram, getkey: GetKey) -> None:
    last = len(program.arguments) - 1
    assert_jvp_is_right(program, [n == last for n in range(last + 1)], getkey)


def test_jvp_of_a_tangent_is_the_second_derivative(getkey: GetKey) -> None:
    tangent, _ = tangent_of(named_program("mass"))
    assert_jvp_is_right(tangent, [True] * len(tangent.arguments), getkey)


@pytest.mark.parametrize(
    ("function", "active"),
    [
        (x, active)
        for x in calculus.KNOWN_JVPS
        for active in itertools.product((True, False), repeat=FUNCTIONS[x].operands)
        if any(active)
    ],
)
def test_known_tangents_are_those_of_jax(function: str, active: tuple[bool, ...]) -> None:
    """The same operations in the same order: programs are known by their structure."""

    def emit(*operation: Any) -> tuple[Any, ...]:
        return operation

    names = "xy"[: len(active)]
    operands = [*names, *(f"d{x}" for x, on in zip(names, active, strict=True) if on)]
    rules = (
        calculus.scalar_jvp(function, active, F64),
        calculus.scalar_jvp_of_jax(function, active, F64),
    )
    ours, theirs = (rule(emit, operands, lambda x: x) for rule in rules)
    assert ours == theirs


def test_jvp_leaves_out_what_has_no_tangent() -> None:
    """Of two outputs of ``a b``, ``a b + c`` and ``a`` only one depends on ``c``."""
    derived = calculus.jvp(two_outputs(), [False, False, True])
    assert derived is not None
    assert derived.results == ((), (Part(0),), ())
    assert derived.arguments == (5,)
    assert not derived.program.operations


def test_jvp_without_tangents_is_no_program() -> None:
    assert calculus.jvp(two_outputs(), [False, False, False]) is None


def test_jvp_of_a_cube_has_three_terms(getkey: GetKey) -> None:
    """One operand in three places: the product rule, and the three terms are added."""
    builder = Builder(1)
    b, u = builder.input(Input((), (4, 3), F64)), builder.input(Input((0,), (3, 3, 3), F64))
    terms = [(b, "xa"), (b, "xb"), (b, "xc"), (u, "abc")]
    value = builder.contract(terms, "x", {"a": 3, "b": 3, "c": 3, "x": 4})
    program = builder.build([Output(value, (0,))]).program
    derived = calculus.jvp(program, [True, False])
    assert derived is not None
    assert [isinstance(x, Map) for x in derived.program.operations].count(False) == 3
    assert_jvp_is_right(program, [True, False], getkey)


# ---- Cotangents ------------------------------------------------------------------------------


def assert_transpose_is_right(
    program: ElementProgram,
    linear: Sequence[bool],
    getkey: GetKey,
    cotangents: Sequence[bool] | None = None,
) -> None:
    """Against ``jax.vjp``, which does not know that the program is linear."""
    arguments = values(program, getkey)
    positions = [n for n, on in enumerate(linear) if on]

    def restricted(*chosen: jax.Array) -> tuple[jax.Array, ...]:
        whole: list[jax.Array] = list(arguments)
        for n, x in zip(positions, chosen, strict=True):
            whole[n] = x
        return meaning(program)(*whole)

    chosen = [arguments[n] for n in positions]
    outputs = jax.eval_shape(restricted, *chosen)
    present = cotangents or [True] * len(outputs)
    given_ = [normal(getkey(), x.shape) for x in outputs]
    whole = tuple(ct if on else jnp.zeros_like(ct) for ct, on in zip(given_, present, strict=True))
    expected = jax.jit(lambda xs, ct: jax.vjp(restricted, *xs)[1](ct))(chosen, whole)

    derived = calculus.transpose(program, linear, present)
    assert derived is not None
    # The linear arguments are not among those of the derived program.
    assert not {n for n in derived.arguments if n < len(linear) and linear[n]}
    shapes = [x.shape for x in chosen]
    assert_close(results_of(derived, [*arguments, *given_], shapes), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_transpose_in_one_argument(name: str, getkey: GetKey) -> None:
    program = named_program(name)
    for position in range(len(program.arguments)):
        linear = [n == position for n in range(len(program.arguments))]
        assert_transpose_is_right(program, linear, getkey)


@pytest.mark.parametrize("name", PROGRAMS)
def test_transpose_of_a_tangent_is_linear_in_several_arguments(name: str, getkey: GetKey) -> None:
    tangent, linear = tangent_of(named_program(name))
    assert sum(linear) == len(linear) - sum(linear) == len(PROGRAMS[name][1])
    assert_transpose_is_right(tangent, linear, getkey)


@pytest.mark.parametrize("present", [(True, True, True), (True, False, False), (False, True, True)])
def test_transpose_with_some_cotangents(present: tuple[bool, ...], getkey: GetKey) -> None:
    assert_transpose_is_right(two_outputs(), [True, False, True], getkey, present)


def test_transpose_of_movement(getkey: GetKey) -> None:
    """Of the tangent of a program that is not linear."""
    tangent, linear = tangent_of(movement())
    assert_transpose_is_right(tangent, linear, getkey)
    assert_transpose_is_right(tangent, linear, getkey, [True, False, True])


def test_transpose_says_where_a_cotangent_is_zero() -> None:
    derived = calculus.transpose(two_outputs(), [False, True, True], [True, False, True])
    assert derived is not None
    assert derived.results == ((Part(0),), ())


def test_transpose_without_cotangents_is_no_program() -> None:
    assert calculus.transpose(two_outputs(), [True, False, True], [False] * 3) is None


def test_transpose_of_a_sum_over_elements_broadcasts(getkey: GetKey) -> None:
    """The cotangent of ``u`` in ``sum_e w_i u_ei`` has no element axis, so the program has none."""
    builder = Builder(1)
    w, u = builder.input(Input((), (3,), F64)), builder.input(Input((0,), (3,), F64))
    value = builder.contract([(w, "i"), (u, "i")], "", {"i": 3})
    program = builder.build([Output(value, ())]).program
    derived = calculus.transpose(program, [False, True], [True])
    assert derived is not None
    assert derived.program.batch_rank == 0
    assert derived.lost == ((0,),)
    assert_transpose_is_right(program, [False, True], getkey)
    # The shared operand's cotangent needs the elements of the other one.
    derived = calculus.transpose(program, [True, False], [True])
    assert derived is not None
    assert derived.program.outputs == (Output(2, ()),)


def test_transpose_twice_is_the_program_itself(getkey: GetKey) -> None:
    program = named_program("mass")
    u = len(program.arguments) - 1
    linear = [n == u for n in range(u + 1)]
    once = calculus.transpose(program, linear, [True])
    assert once is not None
    # The cotangent is the last argument, as the one it belongs to was.
    assert once.arguments[-1] == u + 1
    twice = calculus.transpose(once.program, linear, [True])
    assert twice is not None
    *others, last = values(program, getkey)
    expected = jax.jit(meaning(program))(*others, last)
    # In the place of the cotangent's cotangent; it does not need the cotangent.
    result = results_of(twice, [*others, None, last], [x.shape for x in expected])
    assert_close(result, expected)


# ---- Batching --------------------------------------------------------------------------------


def assert_batch_is_right(
    program: ElementProgram, positions: Sequence[int | None], getkey: GetKey
) -> None:
    size = 2
    arguments = []
    for x, position in zip(values(program, getkey), positions, strict=True):
        if position is not None:
            shape = (*x.shape[:position], size, *x.shape[position:])
            x = normal(getkey(), shape)
        arguments.append(x)
    batched, results = calculus.batch(program, positions)
    assert batched.batch_rank == program.batch_rank + 1
    expected = jax.jit(jax.vmap(meaning(program), in_axes=tuple(positions)))(*arguments)
    found = jax.jit(meaning(batched))(*arguments)
    for x, y, position in zip(found, expected, results, strict=True):
        if position is None:
            x = jnp.broadcast_to(x, (size, *x.shape))
        assert_close(x if position is None else jnp.moveaxis(x, position, 0), y)


@pytest.mark.parametrize("program", PLAIN)
def test_batch_of_every_argument(program: ElementProgram, getkey: GetKey) -> None:
    assert_batch_is_right(program, [0] * len(program.arguments), getkey)


@pytest.mark.parametrize("program", PLAIN)
def test_batch_of_one_argument_behind_its_other_batch_axes(
    program: ElementProgram, getkey: GetKey
) -> None:
    first, *others = program.arguments
    assert_batch_is_right(program, [len(first.batch), *[None] * len(others)], getkey)


def test_batch_leaves_alone_what_does_not_depend_on_it() -> None:
    batched, results = calculus.batch(two_outputs(), [None, None, 0])
    assert results == (None, 0, None)
    assert batched.outputs[0].batch == (0,)
    assert batched.outputs[1].batch == (1,)


# ---- Sums of terms with different batch axes -------------------------------------------------


def sum_across_batches() -> ElementProgram:
    """``a_i + sum_e c_ei``, as a ``vmap`` over one of two tangents makes it."""
    builder = Builder(1)
    a, c = builder.input(Input((), (3,), F64)), builder.input(Input((0,), (3,), F64))
    return builder.build([Output(builder.map("add", a, c), (0,))]).program


@pytest.mark.parametrize("active", [(True, True), (True, False), (False, True)])
def test_tangent_of_such_a_sum_counts_a_shared_term_for_every_element(
    active: tuple[bool, bool], getkey: GetKey
) -> None:
    assert_jvp_is_right(sum_across_batches(), active, getkey)


def test_transpose_of_such_a_sum(getkey: GetKey) -> None:
    assert_transpose_is_right(sum_across_batches(), [True, True], getkey)
    assert_transpose_is_right(sum_across_batches(), [True, False], getkey)


def test_transpose_of_such_a_sum_that_is_summed_counts_the_elements(getkey: GetKey) -> None:
    """Nothing says how many there are but what is transposed; the derived program has none."""
    builder = Builder(1)
    a, c = builder.input(Input((), (3,), F64)), builder.input(Input((0,), (3,), F64))
    value = builder.map("mul", builder.constant(np.arange(3.0)), builder.map("add", a, c))
    program = builder.build([Output(builder.map("sub", value, a), ())]).program
    derived = calculus.transpose(program, [True, True], [True])
    assert derived is not None and derived.program.batch_rank == 0
    assert_transpose_is_right(program, [True, True], getkey)
    assert_transpose_is_right(program, [True, False], getkey)


def test_transpose_of_sums_over_some_of_several_batch_axes(getkey: GetKey) -> None:
    builder = Builder(3)
    batches: list[tuple[int, ...]] = [(), (0,), (1, 2), (2, 0)]
    numbers = [builder.input(Input(batch, (2,), F64)) for batch in batches]
    for kept in ((), (1,), (0, 2), (2, 1, 0)):
        stack = builder.stack([builder.sum(numbers[:3]), builder.sum(numbers[1:])], 0)
        program = builder.build([Output(stack, kept), Output(numbers[2], (1,))]).program
        assert_transpose_is_right(program, [True] * 4, getkey)
        assert_transpose_is_right(program, [False, True, True, False], getkey)


def test_such_a_sum_means_a_broadcast(getkey: GetKey) -> None:
    a, c = values(sum_across_batches(), getkey)
    assert_close(reference.evaluate(sum_across_batches(), a, c), [a[None] + c])


# ---- Random programs -------------------------------------------------------------------------


@given(fused_calls(broadcasting=False), st.data())
@settings(max_examples=3)
def test_calculus_of_random_programs(call: Call, data: st.DataObject) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 100))
    getkey = keys.__next__
    program = program_of(call.spec, *call.operands)
    if program.batch_rank > len(EXTENTS):
        return
    count = len(program.arguments)
    active = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    assert_jvp_is_right(program, active, getkey)
    tangent, linear = tangent_of(program)
    assert_transpose_is_right(tangent, linear, getkey)
    positions = [
        data.draw(st.sampled_from([None, *range(len(x.batch) + 1)])) for x in tangent.arguments
    ]
    if any(position is not None for position in positions):
        assert_batch_is_right(tangent, positions, getkey)
