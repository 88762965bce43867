"""Differentiation and batching of programs: each is a program again, so each is one kernel again.

A program's contractions are multilinear, and the only pointwise function so far is a sum, so the
rules are those of polynomials.  For ``c = sum_k a b ...`` with tangents ``a', b', ...``

    c' = sum_k a' b ... + sum_k a b' ... + ...

and for a cotangent ``C`` of ``c``, the cotangent of a factor is the contraction in which the factor
and the result have changed places:

    A = sum over the labels a does not have of  C b ...

A label that ``a`` shared with nothing becomes a broadcast label of ``A``.  Sums over *batch* axes
that a factor does not have are left to the program's outputs: every value below is one element's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxmagma.program import Builder, Contract, ElementProgram, Input, Output


@dataclass(frozen=True)
class Derived:
    """A program made from another one.

    ``arguments`` are positions in the list of the original's arguments followed by its tangents or
    cotangents; ``results`` gives for each output of the rule the position of its program output, or
    None where it is zero; ``lost`` is that of :class:`jaxmagma.program.Built`.
    """

    program: ElementProgram
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]
    lost: tuple[tuple[int, ...], ...]


def jvp(program: ElementProgram, active: Sequence[bool]) -> Derived | None:
    """The tangents of all outputs, given which arguments have tangents.

    The derived program takes arguments and tangents; None if it is not a program.
    """
    if _adds_across_batches(program):
        return None
    builder, numbers, arguments = _with_primals(program, [True] * len(active))
    tangents: dict[int, int] = {}
    names = _argument_numbers(program)
    for position, (number, is_active) in enumerate(zip(names, active, strict=True)):
        if is_active:
            tangents[number] = builder.input(program.inputs[number])
            arguments[tangents[number]] = len(active) + position
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        numbers[number] = builder.copy(operation, numbers)
        if isinstance(operation, Contract):
            parts = []
            for moved, (value, _) in enumerate(operation.terms):
                if value in tangents:
                    terms = [(numbers[v], labels) for v, labels in operation.terms]
                    terms[moved] = (tangents[value], terms[moved][1])
                    parts.append(builder.contract(terms, operation.output, operation.extents))
        else:
            parts = [tangents[value] for value in operation.operands if value in tangents]
        if parts:
            tangents[number] = builder.sum(parts)
    outputs = [
        replace(out, value=tangents[out.value]) if out.value in tangents else None
        for out in program.outputs
    ]
    return _derived(builder, outputs, arguments)


def transpose(
    program: ElementProgram, linear: Sequence[bool], cotangents: Sequence[bool]
) -> Derived | None:
    """The cotangents of the linear arguments, given which outputs have one.

    The program must be linear in those arguments jointly.  The derived program takes the other
    arguments and the cotangents and has one result for each linear argument; None if it is not a
    program.
    """
    if _adds_across_batches(program):
        return None
    builder, numbers, arguments = _with_primals(program, [not x for x in linear])
    names = _argument_numbers(program)
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if all(value in numbers for value in operation.operands):
            numbers[number] = builder.copy(operation, numbers)

    pending: dict[int, list[int]] = {}
    for position, (out, has_cotangent) in enumerate(zip(program.outputs, cotangents, strict=True)):
        if has_cotangent:
            cotangent = builder.input(Input(out.batch, program.tiles[out.value], program.dtype))
            arguments[cotangent] = len(linear) + position
            pending.setdefault(out.value, []).append(cotangent)

    first = len(program.inputs)
    for number in reversed(range(first, first + len(program.operations))):
        if number in numbers or number not in pending:
            continue
        operation, cotangent = program.operations[number - first], builder.sum(pending.pop(number))
        if not isinstance(operation, Contract):
            for value in operation.operands:
                if value not in numbers:
                    pending.setdefault(value, []).append(cotangent)
            continue
        for moved, (value, labels) in enumerate(operation.terms):
            if value not in numbers:
                others = [(v, x) for n, (v, x) in enumerate(operation.terms) if n != moved]
                terms = [(numbers[v], x) for v, x in others]
                part = builder.contract(
                    [*terms, (cotangent, operation.output)], labels, operation.extents
                )
                pending.setdefault(value, []).append(part)
    outputs = [
        Output(builder.sum(pending[number]), program.inputs[number].batch)
        if number in pending
        else None
        for number, is_linear in zip(names, linear, strict=True)
        if is_linear
    ]
    return _derived(builder, outputs, arguments)


def batch(
    program: ElementProgram, positions: Sequence[int | None]
) -> tuple[ElementProgram, tuple[int | None, ...]]:
    """Adds a batch axis: ``positions`` says where among its batch axes each argument has it.

    Returns the program and where each result has it.
    """
    axis = program.batch_rank
    inputs = list(program.inputs)
    for number, position in zip(_argument_numbers(program), positions, strict=True):
        if position is not None:
            old = inputs[number].batch
            inputs[number] = replace(inputs[number], batch=(*old[:position], axis, *old[position:]))
    batched = replace(program, batch_rank=axis + 1, inputs=tuple(inputs))
    outputs, results = [], []
    for out in program.outputs:
        depends = axis in batched.batch[out.value]
        outputs.append(replace(out, batch=(axis, *out.batch)) if depends else out)
        results.append(0 if depends else None)
    return replace(batched, outputs=tuple(outputs)), tuple(results)


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
    builder: Builder, outputs: Sequence[Output | None], arguments: dict[int, int]
) -> Derived | None:
    present = [out for out in outputs if out is not None]
    if not present:
        return None
    built = builder.build(present)
    order = iter(range(len(present)))
    return Derived(
        built.program,
        tuple(arguments[n] for n in built.inputs if n in arguments),
        tuple(None if out is None else next(order) for out in outputs),
        built.lost,
    )


def _adds_across_batches(program: ElementProgram) -> bool:
    """Whether terms with different batch axes are added.

    Summing such a value over a batch axis counts the poorer term once per element, which the
    deferred sums of these rules would not see.  Only a vmap over the tangents alone makes one.
    """
    return any(
        len({program.batch[value] for value in operation.operands}) > 1
        for operation in program.operations
        if not isinstance(operation, Contract)
    )
