"""Differentiation and batching of programs: each is a program again, so each is one kernel again.

A contraction is multilinear.  For ``c = sum_k a b ...`` with tangents ``a', b', ...``

    c' = sum_k a' b ... + sum_k a b' ... + ...

and for a cotangent ``C`` of ``c``, the cotangent of a factor is the contraction in which the factor
and the result have changed places:

    A = sum over the labels a does not have of  C b ...

A label that ``a`` shared with nothing becomes a broadcast label of ``A``.  Views are transposed by
placing, and placing by views.  The tangent of a pointwise function is what JAX says it is for
scalars; those that are linear have a transpose below.

Sums over *batch* axes that a factor does not have are left to the program's outputs: every value
below is one element's.  An output sums over the batch axes its value depends on, so a tangent must
depend on the same ones as its primal; where it would not, ``first(tangent, primal)`` says it does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import jax
import numpy as np

from jaxmagma.jaxpr import Emit, pointwise_rule
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS, ROUNDINGS
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import (
    Contract,
    ElementProgram,
    Gather,
    Input,
    Map,
    Operation,
    Output,
    Place,
    View,
)


@dataclass(frozen=True)
class Scattered:
    """The cotangent of a gathered vector: values that belong where an index says.

    ``index`` and ``tables`` are arguments of the original, by position.  Batch axes are the
    original's, too: the vector has its ``own``; those of the values stand in the order ``mapped``,
    along which the index differs, ``others`` of the vector, and ``elements``.
    """

    index: int
    tables: tuple[int, ...]
    own: tuple[int, ...]
    mapped: tuple[int, ...]
    others: tuple[int, ...]
    elements: tuple[int, ...]
    atomic: bool

    @property
    def batch(self) -> tuple[int, ...]:
        return self.mapped + self.others + self.elements


@dataclass(frozen=True)
class Part:
    """One output of a derived program: its position, and where it is added to, if not as it is.

    It counts once for every element along the batch axes ``times``, which are the original's: the
    derived program may not have them.
    """

    position: int
    scattered: Scattered | None = None
    times: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Derived:
    """A program made from another one.

    ``arguments`` are positions in the list of the original's arguments followed by its tangents or
    cotangents; ``results`` gives for each output of the rule the parts it is the sum of, none where
    it is zero; ``lost`` is that of :class:`jaxmagma.programs.builder.Built`.
    """

    program: ElementProgram
    arguments: tuple[int, ...]
    results: tuple[tuple[Part, ...], ...]
    lost: tuple[tuple[int, ...], ...]


# ---- Tangents ------------------------------------------------------------------------------------


def jvp(program: ElementProgram, active: Sequence[bool]) -> Derived | None:
    """The tangents of all outputs, given which arguments have tangents.

    The derived program takes arguments and tangents; None if all tangents are zero.
    """
    builder, numbers, arguments = _with_primals(program, [True] * len(active))
    tangents: dict[int, int] = {}
    names = _argument_numbers(program)
    for position, (number, is_active) in enumerate(zip(names, active, strict=True)):
        if is_active and program.inputs[number].dtype.kind != "i":
            tangents[number] = builder.input(program.inputs[number])
            arguments[tangents[number]] = len(active) + position
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        numbers[number] = builder.copy(operation, numbers)
        if not any(value in tangents for value in operation.operands):
            continue
        tangent = _tangent(builder, operation, numbers, tangents)
        if tangent is not None:
            tangents[number] = _depending(builder, tangent, numbers[number])
    results = [
        [(replace(out, value=tangents[out.value]), Part(0))] if out.value in tangents else []
        for out in program.outputs
    ]
    return _derived(builder, results, arguments)


def _tangent(
    builder: Builder,
    operation: Operation,
    numbers: Mapping[int, int],
    tangents: Mapping[int, int],
) -> int | None:
    if isinstance(operation, Contract):
        parts = []
        for moved, (value, _) in enumerate(operation.terms):
            if value in tangents:
                terms = [(numbers[v], labels) for v, labels in operation.terms]
                terms[moved] = (tangents[value], terms[moved][1])
                parts.append(builder.contract(terms, operation.output, operation.extents))
        return builder.sum(parts)
    if isinstance(operation, Map):
        return _map_tangent(builder, operation, numbers, tangents)
    if isinstance(operation, View):
        value = tangents[operation.operand]
        return builder.view(value, operation.offset, operation.strides, operation.tile)
    if isinstance(operation, Gather):
        tables = [numbers[x] for x in operation.tables]
        index = numbers[operation.index]
        return builder.gather(tangents[operation.vector], index, tables, operation.atomic)
    pieces = [(tangents[value], *where) for value, *where in operation.pieces if value in tangents]
    return builder.place(pieces, operation.tile)  # type: ignore[arg-type]


def _map_tangent(
    builder: Builder,
    operation: Map,
    numbers: Mapping[int, int],
    tangents: Mapping[int, int],
) -> int | None:
    active = tuple(value in tangents for value in operation.operands)
    dtype = builder.dtype(numbers[operation.operands[0]])
    rule = scalar_jvp(operation.function, active, dtype)
    values = [(numbers[value], labels) for value, labels in operation.terms]
    values += [(tangents[value], labels) for value, labels in operation.terms if value in tangents]

    def emit(function: str, *operands: tuple[int, str]) -> tuple[int, str]:
        carried = "".join(labels for _, labels in operands)
        output = "".join(x for x in operation.output if x in carried)
        return builder.pointwise(function, operands, output, operation.extents), output

    found = rule(emit, values, lambda x: (builder.constant(x), ""))
    if found is None:
        return None
    value, labels = found
    return builder.relabel(value, labels, operation.output, operation.extents)


def _of_sum(emit: Emit, active: tuple[bool, ...], operands: Sequence[Any]) -> Any:
    _, _, *tangents = operands
    return emit("add", *tangents) if all(active) else tangents[0]


def _of_product(emit: Emit, active: tuple[bool, ...], operands: Sequence[Any]) -> Any:
    left, right, *tangents = operands
    parts = []
    if active[0]:
        parts.append(emit("mul", tangents[0], right))
    if active[1]:
        parts.append(emit("mul", left, tangents[-1]))
    return emit("add", *parts) if all(active) else parts[0]


def _of_rounding(function: str) -> Callable[..., Any]:
    def rule(emit: Emit, active: tuple[bool, ...], operands: Sequence[Any]) -> Any:
        return emit(function, operands[1])

    return rule


# Of functions that nearly every program has: what JAX would say, after milliseconds of tracing.
# The tangent of a number of a narrower dtype is one itself.
KNOWN_JVPS: dict[str, Callable[..., Any]] = {
    "add": _of_sum,
    "mul": _of_product,
    **{x: _of_rounding(x) for x in ROUNDINGS.values()},
}


@functools.lru_cache(maxsize=1024)
def scalar_jvp(function: str, active: tuple[bool, ...], dtype: np.dtype) -> Callable[..., Any]:
    """A rule ``(emit, operands and tangents) -> tangent`` for a function of scalars."""
    if function in KNOWN_JVPS:
        known = KNOWN_JVPS[function]
        return lambda emit, operands, constant: known(emit, active, operands)
    return scalar_jvp_of_jax(function, active, dtype)


def scalar_jvp_of_jax(
    function: str, active: tuple[bool, ...], dtype: np.dtype
) -> Callable[..., Any]:
    """The same as JAX has it, whatever the function."""
    evaluate = FUNCTIONS[function].evaluate
    scalar = jax.ShapeDtypeStruct((), dtype)

    def tangent(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> jax.Array:
        def active_only(*values: jax.Array) -> jax.Array:
            remaining = iter(values)
            chosen = zip(primals, active, strict=True)
            return evaluate(*(next(remaining) if is_active else x for x, is_active in chosen))

        chosen = zip(primals, active, strict=True)
        moving = tuple(x for x, is_active in chosen if is_active)
        return jax.jvp(active_only, moving, tuple(tangents))[1]

    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), ())
    ):  # a scalar has no shards
        jaxpr = jax.make_jaxpr(tangent)([scalar] * len(active), [scalar] * sum(active))
    return pointwise_rule(jaxpr, dtype)


def _depending(builder: Builder, value: int, like: int) -> int:
    """The value, as one that depends on every batch axis that ``like`` depends on."""
    if builder.batch(value) >= builder.batch(like):
        return value
    return builder.map("first", value, like)


# ---- Cotangents ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cotangent:
    """A value that counts once for every element along the batch axes ``times``."""

    value: int
    times: frozenset[int] = frozenset()


def transpose(
    program: ElementProgram, linear: Sequence[bool], cotangents: Sequence[bool]
) -> Derived | None:
    """The cotangents of the linear arguments, given which outputs have one.

    The program must be linear in those arguments jointly.  The derived program takes the other
    arguments and the cotangents and has one result for each linear argument; None if all of them
    are zero.
    """
    builder, numbers, arguments = _with_primals(program, [not x for x in linear])
    names = _argument_numbers(program)
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if all(value in numbers for value in operation.operands):
            numbers[number] = builder.copy(operation, numbers)

    pending: dict[int, list[_Cotangent]] = {}
    for position, (out, has_cotangent) in enumerate(zip(program.outputs, cotangents, strict=True)):
        if has_cotangent:
            tile = program.tiles[out.value]
            given = builder.input(Input(out.batch, tile, program.dtype, is_complex=out.is_complex))
            arguments[given] = len(linear) + position
            value = _conjugate(builder, given) if out.is_complex else given
            pending.setdefault(out.value, []).append(_Cotangent(value))

    gathered: dict[int, list[tuple[_Cotangent, Gather]]] = {}
    first = len(program.inputs)
    for number in reversed(range(first, first + len(program.operations))):
        if number in numbers or number not in pending:
            continue
        operation = program.operations[number - first]
        for cotangent in _sums(builder, pending.pop(number), program.batch[number]):
            if isinstance(operation, Gather):
                if operation.vector not in numbers:
                    gathered.setdefault(operation.vector, []).append((cotangent, operation))
                continue
            found = _cotangents(builder, operation, cotangent.value, numbers, program.tiles)
            for value, part in found:
                times = cotangent.times
                if isinstance(operation, Map | Place):
                    # Terms with different batch axes are added: each counts once per element.
                    missing = program.batch[number] - program.batch[value]
                    times |= missing - builder.batch(part)
                pending.setdefault(value, []).append(_Cotangent(part, times))
    results: list[list[tuple[Output, Part]]] = []
    for number, is_linear in zip(names, linear, strict=True):
        if not is_linear:
            continue
        parts: list[tuple[Output, Part]] = []
        operand = program.inputs[number]
        for total in _sums(builder, pending.get(number, ()), frozenset(operand.batch)):
            out = _result(builder, operand, total.value, operand.batch)
            parts.append((out, Part(0, None, total.times)))
        for cotangent, gather in gathered.get(number, ()):
            where = _scattered(program, gather)
            out = _result(builder, operand, cotangent.value, where.batch)
            parts.append((out, Part(0, where, cotangent.times)))
        results.append(parts)
    return _derived(builder, results, arguments)


def _result(builder: Builder, operand: Input, value: int, batch: tuple[int, ...]) -> Output:
    """The cotangent of an operand."""
    value = _conjugate(builder, value) if operand.is_complex else value
    return Output(value, batch, operand.is_complex)


def _conjugate(builder: Builder, value: int) -> int:
    """Parts of complex numbers as those of their cotangents, or the other way.

    To JAX the product of a number and its cotangent is one of complex numbers, whose real part is
    the sum of the products of the parts, of which one of the imaginary ones has its sign changed.
    """
    labels = letters(len(builder.tile(value)))
    signs = builder.constant(np.array([1, -1], builder.dtype(value)))
    extents = dict(zip(labels, builder.tile(value), strict=True))
    return builder.contract([(value, labels), (signs, labels[-1])], labels, extents)


def _scattered(program: ElementProgram, gather: Gather) -> Scattered:
    """Where the cotangent of a gathered vector belongs."""
    own = program.inputs[gather.vector].batch
    batch = program.inputs[gather.index].batch
    tables = gather.tables
    mapped = {axis for x in tables for axis in program.inputs[x].batch}
    if not mapped >= set(own) & set(batch):
        tables, mapped = (), set()
    mapped |= set(own) & set(batch)
    names = _argument_numbers(program)
    return Scattered(
        names.index(gather.index),
        tuple(names.index(x) for x in tables),
        own,
        tuple(sorted(mapped)),
        tuple(axis for axis in own if axis not in mapped),
        tuple(axis for axis in batch if axis not in mapped),
        gather.atomic,
    )


def _sums(builder: Builder, parts: Sequence[_Cotangent], own: frozenset[int]) -> list[_Cotangent]:
    """The sums of those parts that are to be summed over the same batch axes.

    A part that does not depend on the elements, added to one that does, would count once for each.
    """
    found: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for part in parts:
        key = builder.batch(part.value) - own, part.times
        found.setdefault(key, []).append(part.value)
    return [_Cotangent(builder.sum(x), times) for (_, times), x in found.items()]


def _cotangents(
    builder: Builder,
    operation: Contract | Map | View | Place,
    cotangent: int,
    numbers: Mapping[int, int],
    tiles: Sequence[tuple[int, ...]],
) -> list[tuple[int, int]]:
    """What each linear operand of an operation gets; ``tiles`` are those of all values."""
    found = []
    if isinstance(operation, Contract):
        for moved, (value, labels) in enumerate(operation.terms):
            if value not in numbers:
                others = [(v, x) for n, (v, x) in enumerate(operation.terms) if n != moved]
                terms = [(numbers[v], x) for v, x in others]
                terms.append((cotangent, operation.output))
                found.append((value, builder.contract(terms, labels, operation.extents)))
    elif isinstance(operation, Map):
        for moved, (value, labels) in enumerate(operation.terms):
            if value not in numbers:
                part = _map_cotangent(builder, operation, moved, cotangent, numbers)
                if labels != operation.output:
                    terms = [(part, operation.output)]
                    part = builder.contract(terms, labels, operation.extents)
                found.append((value, part))
    elif isinstance(operation, View):
        piece = (cotangent, operation.offset, operation.strides)
        found.append((operation.operand, builder.place([piece], tiles[operation.operand])))
    elif isinstance(operation, Place):
        for value, offset, strides in operation.pieces:
            if value not in numbers:
                found.append((value, builder.view(cotangent, offset, strides, tiles[value])))
    else:
        assert_never(operation)
    return found


def _map_cotangent(
    builder: Builder, operation: Map, moved: int, cotangent: int, numbers: Mapping[int, int]
) -> int:
    """The cotangent of one operand, with the labels of the result."""
    function, output = operation.function, operation.output

    def other(position: int) -> tuple[int, str]:
        value, labels = operation.terms[position]
        return numbers[value], labels

    def made(function: str, *terms: tuple[int, str]) -> int:
        return builder.pointwise(function, terms, output, operation.extents)

    own = (cotangent, output)
    if function in ("add", "first") or (function == "sub" and moved == 0):
        return cotangent
    if function in ("sub", "neg"):
        return made("neg", own)
    if function in ROUNDINGS.values():
        return made(function, own)
    if function == "mul":
        return made("mul", own, other(1 - moved))
    if function == "div" and moved == 0:
        return made("div", own, other(1))
    if function == "select" and moved > 0:
        zero = (builder.constant(np.zeros((), builder.dtype(cotangent))), "")
        return made("select", other(0), *((own, zero) if moved == 1 else (zero, own)))
    raise ValueError(f"{function} is not linear in operand {moved}")


# ---- Batching ------------------------------------------------------------------------------------


def batch(
    program: ElementProgram, positions: Sequence[int | None]
) -> tuple[ElementProgram, tuple[int | None, ...]]:
    """Adds a batch axis: ``positions`` says where among its batch axes each argument has it.

    Returns the program and where each result has it.
    """
    axis = program.batch_rank
    inputs = list(program.inputs)
    depending: set[int] = set()
    for number, position in zip(_argument_numbers(program), positions, strict=True):
        if position is not None:
            old = inputs[number].batch
            inputs[number] = replace(inputs[number], batch=(*old[:position], axis, *old[position:]))
            depending.add(number)
    for number, operation in enumerate(program.operations, start=len(inputs)):
        if not depending.isdisjoint(operation.operands):
            depending.add(number)
    outputs = tuple(
        replace(out, batch=(axis, *out.batch)) if out.value in depending else out
        for out in program.outputs
    )
    batched = replace(program, batch_rank=axis + 1, inputs=tuple(inputs), outputs=outputs)
    return batched, tuple(0 if out.value in depending else None for out in program.outputs)


def astray(program: ElementProgram, mapped: Sequence[bool]) -> frozenset[int]:
    """The gathers whose tables are no longer those of their index, if ``mapped`` arguments differ.

    The first batch axis of an index is that of the elements, for all of which the tables are.
    Along another one both differ, or neither.
    """
    names = dict(zip(_argument_numbers(program), mapped, strict=True))
    found = set()
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Gather) and operation.tables:
            elements = names[operation.index] and not program.inputs[operation.index].batch
            follow = names[operation.index] and not elements
            if any(names[x] != follow for x in operation.tables):
                found.add(number)
    return frozenset(found)


def _argument_numbers(program: ElementProgram) -> list[int]:
    """The value number of every argument."""
    return [n for n, operand in enumerate(program.inputs) if operand.constant is None]


def _with_primals(
    program: ElementProgram, present: Sequence[bool]
) -> tuple[Builder, dict[int, int], dict[int, int]]:
    """A builder with the program's inputs, their numbers in it, and which argument each one is."""
    builder = Builder(program.batch_rank, program.precision)
    positions = {number: p for p, number in enumerate(_argument_numbers(program))}
    numbers: dict[int, int] = {}
    arguments: dict[int, int] = {}
    for number, operand in enumerate(program.inputs):
        position = positions.get(number)
        if position is None or present[position]:
            numbers[number] = builder.input(operand)
            if position is not None:
                arguments[numbers[number]] = position
    return builder, numbers, arguments


def _derived(
    builder: Builder,
    results: Sequence[Sequence[tuple[Output, Part]]],
    arguments: dict[int, int],
) -> Derived | None:
    present = [out for parts in results for out, _ in parts]
    if not present:
        return None
    built = builder.build(present)
    order = iter(range(len(present)))
    return Derived(
        built.program,
        tuple(arguments[n] for n in built.inputs if n in arguments),
        tuple(tuple(replace(part, position=next(order)) for _, part in parts) for parts in results),
        built.lost,
    )
