"""Loops and conditions that are known while reading, and programs inside of programs."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmagma.jaxpr.at_once import at_once
from jaxmagma.jaxpr.equations import LongLoop, Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles
from jaxmagma.jaxpr.work import steps_at_once
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Contract, ElementProgram, Map, Place, View
from jaxmagma.programs.strides import row_major


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many operands of a scan are constants and how many are carried, if that is known."""
    if "num_consts" in parameters and "num_carry" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    if "ft_in" not in parameters:
        return None
    # From JAX 0.12 on it has trees of what is constant, carried and scanned.
    consts, carry, _ = (len(x) for x in parameters["ft_in"].unpack())
    return consts, carry


def scan(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    p = equation.params
    counts = scan_counts(p)
    if counts is None:
        raise Unsupported("a scan of an unknown kind")
    consts, carry = counts
    with contextlib.suppress(Unsupported):
        made_at_once = at_once(reader, equation, operands, consts, carry)
        if made_at_once is not None:
            return made_at_once
    is_long = p["length"] > steps_at_once(p["jaxpr"])
    state = list(operands[consts : consts + carry])
    steps = range(p["length"])
    made: list[list[Read]] = []
    if not p["length"]:
        return [*state, *(np.zeros(aval(x).shape, aval(x).dtype) for x in equation.outvars[carry:])]
    for step in reversed(steps) if p["reverse"] else steps:
        slices = [reader.index(x, 0, step) for x in operands[consts + carry :]]
        results = reader.jaxpr(p["jaxpr"], [*operands[:consts], *state, *slices])
        if is_long:
            raise LongLoop(f"a loop of {p['length']} steps")
        state = results[:carry]
        made.append(results[carry:])
    if p["reverse"]:
        made.reverse()
    return [*state, *(reader.stack(list(x), 0) for x in zip(*made, strict=True))]


def while_loop(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    p = equation.params
    ends, steps = p["cond_nconsts"], p["body_nconsts"]
    consts, state = operands[ends : ends + steps], list(operands[ends + steps :])
    most = steps_at_once(p["body_jaxpr"])
    count = _counted(reader, p["cond_jaxpr"], p["body_jaxpr"], operands[:ends], consts, state, most)
    if count > most:
        raise Unsupported(f"a loop of more than {most} steps")
    for _ in range(count):
        state = reader.jaxpr(p["body_jaxpr"], [*consts, *state])
    return state


def _counted(
    reader: Tiles,
    cond: ClosedJaxpr,
    body: ClosedJaxpr,
    ends: Sequence[Read],
    consts: Sequence[Read],
    state: Sequence[Read],
    most: int,
) -> int:
    """The steps of a loop that ends by what is known, or one more than ``most``."""
    _, needed = dce_jaxpr(cond.jaxpr, [True])
    counts = needed[len(ends) :]  # what is carried that the end depends on
    while True:
        step, used = dce_jaxpr(body.jaxpr, counts)
        before = [x or y for x, y in zip(counts, used[len(consts) :], strict=True)]
        if before == counts:
            break
        counts = before
    left = list(state)
    for number in range(most + 1):
        (goes_on,) = reader.jaxpr(cond, [*ends, *left])
        if isinstance(goes_on, Tile):
            raise Unsupported("a loop that ends by values of an element")
        if not goes_on:
            return number
        operands = list(itertools.compress([*consts, *left], used))
        made = iter(reader.jaxpr(ClosedJaxpr(step, body.consts), operands))
        left = [next(made) if x else y for x, y in zip(counts, left, strict=True)]
    return most + 1


def cond(reader: Tiles, equation: JaxprEqn, which: Read, *operands: Read) -> list[Read]:
    if isinstance(which, Tile):
        raise Unsupported("a condition that may be the same for all elements")
    branches = equation.params["branches"]
    return reader.jaxpr(branches[int(np.clip(which, 0, len(branches) - 1))], operands)


def linear_solve(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """As what solves; the function whose inverse that is serves derivatives alone."""
    counts = equation.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    consts = operands[first : first + counts.solve]
    return reader.jaxpr(equation.params["jaxprs"].solve, [*consts, *operands[sum(counts) :]])


def program(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """A program inside of one: its batch axes are axes of tiles here."""
    program: ElementProgram = equation.params["program"]
    builder, remaining = reader.builder, iter(operands)
    extents = program.batch_extents([reader.shape(x) for x in operands])
    # A program that came of one inside of another has such labels itself.
    used = set().union(*(x.extents for x in program.operations if isinstance(x, Contract | Map)))
    spare = (x for n in itertools.count(0x5000) if (x := chr(n)) not in used)
    axis_label = list(itertools.islice(spare, program.batch_rank))
    sizes = dict(zip(axis_label, extents, strict=True))
    # Every value as one of this builder, and its labels of batch axes, which stand ahead.
    values: list[tuple[int, str]] = []

    def term(value: int, labels: str) -> tuple[int, str]:
        number, batch = values[value]
        return number, batch + labels

    def with_batch(value: int, batch: str) -> int:
        """A value with these batch axes, in this order."""
        number, _ = values[value]
        labels = letters(len(program.tiles[value]))
        own = dict(zip(labels, program.tiles[value], strict=True))
        return builder.relabel(number, term(value, labels)[1], batch + labels, own | sizes)

    for operand in program.inputs:
        read = next(remaining) if operand.constant is None else operand.constant.array
        if operand.is_complex != (isinstance(read, Tile) and read.is_complex):
            raise Unsupported("a program of other numbers")
        batch = "".join(axis_label[axis] for axis in operand.batch)
        values.append((reader.value(read), batch))
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        batch = "".join(axis_label[axis] for axis in sorted(program.batch[number]))
        if isinstance(operation, Contract | Map):
            terms = [term(value, labels) for value, labels in operation.terms]
            output, both = batch + operation.output, operation.extents | sizes
            if isinstance(operation, Map):
                made = builder.pointwise(operation.function, terms, output, both)
            else:
                made = builder.contract(terms, output, both)
        elif isinstance(operation, View):
            value, batch = values[operation.operand]
            whole, ahead = builder.tile(value), len(batch)
            strides = row_major(whole)[:ahead] + operation.strides
            made = builder.view(value, operation.offset, strides, whole[:ahead] + operation.tile)
        elif isinstance(operation, Place):
            whole = tuple(sizes[x] for x in batch) + operation.tile
            outer = row_major(whole)[: len(batch)]
            pieces = [(with_batch(x, batch), at, outer + own) for x, at, own in operation.pieces]
            made = builder.place(pieces, whole)
        else:
            raise Unsupported("a program that gathers")
        values.append((made, batch))
    results: list[Read] = []
    for out in program.outputs:
        labels = letters(len(program.tiles[out.value]))
        own = dict(zip(labels, program.tiles[out.value], strict=True)) | sizes
        output = "".join(axis_label[axis] for axis in out.batch) + labels
        made = builder.contract([term(out.value, labels)], output, own)
        results.append(Tile(made, out.is_complex))
    return results
