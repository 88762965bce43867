"""Sweeps: loads of fibres, products with matrices, pointwise functions, stores."""

from collections.abc import Sequence
from dataclasses import replace

from jaxmagma.lowering.cuda.functors import FUNCTORS
from jaxmagma.lowering.cuda.schedule.sweeps import (
    Move,
    Outer,
    Sweep,
    Value,
    grouped,
    outers_after,
    slots,
)
from jaxmagma.lowering.cuda.source.matrices import Matrices
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.registers import POINT, Registers
from jaxmagma.lowering.cuda.source.streams import Streams
from jaxmagma.lowering.cuda.source.text import Text, listed, shape_of
from jaxmagma.plans.plan import Pointwise, Product, Rearrange


def print_sweep(
    text: Text, matrices: Matrices, places: Places, streams: Streams, sweep: Sweep
) -> None:
    registers = Registers(text, places, _with_lines_joined(places, sweep))
    streams.print_begin(places.position)
    with registers.each_fibre():
        if sweep.dots:
            _print_dots(text, matrices, registers, streams)
        else:
            _print_groups(text, matrices, registers, streams, 0)


def _with_lines_joined(places: Places, sweep: Sweep) -> Sweep:
    """A sweep of single values with one line in place of some that follow each other everywhere.

    Then threads need not divide by the extents of all of them to find their places.
    """
    if not (sweep.single and sweep.lines):
        return sweep
    walks: list[dict[str, int]] = []  # strides along lines
    for value in sweep.at_hand:
        reading = places.reading(value.tile) if value in sweep.loads else None
        strides = [x.strides for x in (reading, *places.writings(value.tile)) if x is not None]
        if reading is not None and reading.component is not None:
            strides.append(reading.component.strides)
        walks += [dict(zip(value.labels, x, strict=True)) for x in strides]
    lines, extents = sweep.lines[-1], dict(sweep.extents)
    for line in reversed(sweep.lines[:-1]):
        count, faster = extents[lines[0]], lines[0]
        if all(x.get(line, 0) == count * x.get(faster, 0) for x in walks):
            extents[faster] *= extents[line]
        else:
            lines = line + lines
    return replace(sweep, lines=lines, extents=extents)


def _print_dots(text: Text, matrices: Matrices, registers: Registers, streams: Streams) -> None:
    """Dots, which come first, at all places of a thread; and what is done at each of them."""
    sweep, dots = registers.sweep, [x for x in grouped(registers.sweep) if x[0].is_dot]
    for group in dots:
        _print_sums(text, registers, group)
    with registers.each_place(registers.lines_of(sweep.dots[0].result), past_end=False) as inner:
        for move in sweep.dots:
            inner.values[move.result] = inner.at_place(move.result)
            inner.store_value(move.result, inner.at_place(move.result))
        _print_groups(text, matrices, inner, streams, len(dots))


def _print_sums(text: Text, registers: Registers, group: Sequence[Move]) -> None:
    """Sums of products, term by term: what several of them read is read once."""
    type_ = registers.type_of_value
    text(f"{type_} {listed(registers.array(move.result) for move in group)};")
    text("#pragma unroll")
    with text.braces(f"for (int {POINT} = 0; {POINT} < {group[0].operands[0].length}; ++{POINT})"):
        inner = registers.inner()
        read = dict.fromkeys(x for move in group for x in move.operands)
        for value in read:
            if lines := registers.lines_of(value):
                text(f"{type_} {registers.array(value)};")
                with inner.each_place(lines, past_end=True) as own:
                    text(f"{own.at_place(value)} = {own.value(value)};")
                inner.values[value] = inner.at_place(value)
        for value in read:
            inner.value(value)
        with inner.each_number(inner.lines_of(group[0].result)):
            for move in group:
                made = inner.at_place(move.result)
                for number, pair in enumerate(move.pairs):
                    at = f"{POINT} + {number}" if number else POINT
                    text(f"{made} = with_term({at}, {listed(map(inner.value, pair))}, {made});")


def _print_groups(
    text: Text, matrices: Matrices, registers: Registers, streams: Streams, first: int
) -> None:
    """What is done with the fibres of a sweep, from a group on."""
    sweep, places = registers.sweep, registers.places
    groups, outers = grouped(sweep), outers_after(sweep)
    streamed = places.block.transfers.streamed(places.position)
    reading = [
        n for n, x in enumerate(groups) if streamed & {y.tile for m in x for y in m.operands}
    ]
    for number, group in list(enumerate(groups))[first:]:
        if number == min(reading, default=-1):
            streams.print_wait(places.position)
        later = {x for g in groups[number + 1 :] for m in g for x in m.operands}
        later.update(x for found in outers[number:] for y in found for x in y.operands)
        if group[0].pointwise:
            _print_points(text, registers, group, later)
        else:
            (move,) = group
            _print_fibre(text, matrices, registers, move, move.result not in later)
        _print_outers(text, registers, outers[number])
        if number == max(reading, default=-1):
            streams.print_next(places.position)
    if not groups:
        _print_outers(text, registers, sweep.outers)


def _print_outers(text: Text, registers: Registers, outers: Sequence[Outer]) -> None:
    """Outer products of fibres, which are added to what the thread has of a sum."""
    for outer in outers:
        fibres = listed(registers.fibre(x) for x in outer.operands)
        shape = shape_of(tuple(x.length for x in outer.operands))
        text(f"if (slice.has(e)) gemm(sum{outer.output}, {fibres});", shape)


def _print_fibre(
    text: Text, matrices: Matrices, registers: Registers, move: Move, last: bool
) -> None:
    """An operation on whole fibres: a product with a matrix, a sum, or a copy.

    Its result may be the ``last`` that is made of it: then it need not be in registers.
    """
    shape = shape_of((move.result.length,))
    near = matrices.near(move)
    source = registers.source(move.operands[0]) if near else None
    name = "" if source else registers.fibre(move.operands[0])
    target = registers.target(move.result) if near and last and not source else None
    if target:
        text(f"{target.guard}gemm_to<{target.step}>({near}, {name}, {target.arguments});", shape)
        return
    if move.step is not None:
        if source:
            made = f"gemm_from<{source.step}>({near}, {source.arguments})"
        elif move.matrix is not None:
            made = matrices.product(registers.sweep, move, name)
        else:
            assert isinstance(move.step, Rearrange)
            made = f"reduce({registers.quad}{name})"
        name = registers.named_fibre(move.result)
        text(f"const auto {name} = {made};", shape)
    tile, shared = move.result.tile, registers.block.layout
    if registers.places.to_shared(tile) and shared.overlap({tile}, registers.loaded):
        text("sync<32>();", "who shares a fibre has read it")
        registers.loaded.clear()
    registers.store_fibre(move.result, name)


def _print_points(text: Text, registers: Registers, group: list[Move], later: set[Value]) -> None:
    """Pointwise operations, all of them at one point of the fibre after the other."""
    sweep, length = registers.sweep, group[0].result.length
    if length == 1:
        _print_point(text, registers, group, {})
        return
    for value in dict.fromkeys(x for move in group for x in move.operands if x.length == 1):
        registers.value(value)
    kept = {x.result: registers.named_fibre(x.result) for x in group if x.result in later}
    if kept:
        text(f"{registers.type_of_fibre(length)} {listed(kept.values())};", shape_of((length,)))
    point = registers.point
    count = slots(length, sweep.lanes, registers.block.schedule.is_mirrored(sweep))
    text("#pragma unroll")
    with text.braces(f"for (int {point} = 0; {point} < {count}; ++{point})"):
        if sweep.lanes > 1:
            text(f"const int {POINT} = position<{length}>(quad, {point});")
        _print_point(text, registers.inner(), group, kept)


def _print_point(
    text: Text, registers: Registers, group: list[Move], kept: dict[Value, str]
) -> None:
    for move in group:
        operands = [registers.value(x) for x in move.operands]
        name = registers.named_value(move.result)
        text(f"const auto {name} = {_applied(move, operands)};")
        if move.result in kept:
            text(f"{kept[move.result]}[{registers.point}] = {name};")
        registers.store_value(move.result, name)


def _applied(move: Move, operands: list[str]) -> str:
    if isinstance(move.step, Rearrange):
        return operands[0]
    assert isinstance(move.step, Pointwise | Product)
    function = FUNCTORS[move.step.function] if isinstance(move.step, Pointwise) else "Multiply"
    return f"map({function}(), {listed(operands)})"
