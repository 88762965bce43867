"""A program as several smaller ones that follow each other.

A part reads operands of the whole and what earlier parts have written, and writes outputs of the
whole and what later parts read.  Of an output that is summed over elements a part may have some of
the terms alone: their sum is small, and those of all parts are added afterwards.
"""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import ElementProgram, Input, Map, Output, renumbered


# An array: output n of a part, or argument n of the whole.
Source = tuple[int, int]
ARGUMENT = -1


@dataclass(frozen=True)
class Part:
    """One of the programs, and where its arguments come from."""

    program: ElementProgram
    arguments: tuple[Source, ...]


@dataclass(frozen=True)
class Division:
    """The parts of a program in order.  Each of its outputs is the sum of some of theirs."""

    parts: tuple[Part, ...]
    results: tuple[tuple[Source, ...], ...]

    def least_bytes(self, extents: Sequence[int]) -> int:
        """The memory traffic if every part reads its arguments and writes its outputs once."""
        return sum(part.program.least_bytes(extents) for part in self.parts)

    @property
    def between(self) -> tuple[Source, ...]:
        """The arrays that one part writes and another one reads."""
        read = itertools.chain.from_iterable(part.arguments for part in self.parts)
        return tuple(sorted({source for source in read if source[0] != ARGUMENT}))

    def refined(self, inner: "Sequence[Division | None]") -> "Division":
        """The division in which parts that read arguments alone are divided themselves."""
        parts: list[Part] = []
        results: list[list[tuple[Source, ...]]] = []
        for part, division in zip(self.parts, inner, strict=True):
            first = len(parts)
            if division is None:
                parts.append(part)
                results.append([((first, n),) for n in range(len(part.program.outputs))])
                continue
            for x in division.parts:
                sources = (
                    part.arguments[n] if k == ARGUMENT else (first + k, n) for k, n in x.arguments
                )
                parts.append(Part(x.program, tuple(sources)))
            results.append([tuple((first + k, n) for k, n in x) for x in division.results])
        totals = (
            tuple(source for k, n in sources for source in results[k][n])
            for sources in self.results
        )
        return Division(tuple(parts), tuple(totals))


def by_sums(program: ElementProgram) -> Division | None:
    """A part for each set of batch axes that outputs are summed over; the first has the others.

    None if one of them had not all batch axes.
    """
    rank = program.batch_rank
    kinds = list(dict.fromkeys(out.batch for out in program.outputs if len(out.batch) < rank))
    results: list[tuple[Source, ...]] = [()] * len(program.outputs)
    parts = []
    for number in range(max(1, len(kinds))):
        wanted: list[_Sum] = []
        for n, out in enumerate(program.outputs):
            if number == (kinds.index(out.batch) if out.batch in kinds else 0):
                results[n] = ((number, len(wanted)),)
                wanted.append(([out.value], out))
        read = needed(program, (value for (value,), _ in wanted))
        if len(frozenset[int]().union(*(program.batch[x] for x in read))) < rank:
            return None
        parts.append(_part(program, {}, wanted))
    return Division(tuple(parts), tuple(results))


def by_elements(program: ElementProgram) -> Division | None:
    """A part for the outputs of all elements, and one, without batch axes, for what they share.

    None if there are no such two kinds, or the first part had not all batch axes.
    """
    rank = program.batch_rank
    results: list[tuple[Source, ...]] = []
    wanted: tuple[list[_Sum], list[_Sum]] = [], []
    for out in program.outputs:
        is_shared = not out.batch and not program.batch[out.value]
        results.append(((int(is_shared), len(wanted[is_shared])),))
        wanted[is_shared].append(([out.value], out))
    own = needed(program, (value for (value,), _ in wanted[0]))
    everywhere = frozenset[int]().union(*(program.batch[x] for x in own))
    if not rank or not all(wanted) or len(everywhere) < rank:
        return None
    parts = _part(program, {}, wanted[0]), _part(program, {}, wanted[1], batch_rank=0)
    return Division(parts, tuple(results))


@dataclass(frozen=True)
class Piece:
    """A part in values of the whole: what it makes for outputs, writes for others, and reads."""

    targets: tuple[int, ...]
    written: tuple[int, ...]
    known: tuple[int, ...]


class Whole:
    """A program that is to be divided.

    ``terms`` has the values that each output is the sum of, and ``targets`` all of them.
    """

    def __init__(self, program: ElementProgram) -> None:
        self.program = program
        self.first = len(program.inputs)
        self._axes = tuple(range(program.batch_rank))
        read = itertools.chain.from_iterable(x.operands for x in program.operations)
        self._reads = [0] * len(program.tiles)
        for value in itertools.chain(read, (out.value for out in program.outputs)):
            self._reads[value] += 1
        self.terms = [
            [out.value] if self.is_kept(out) else self._terms(out.value) for out in program.outputs
        ]
        self.targets = tuple(dict.fromkeys(itertools.chain.from_iterable(self.terms)))

    def is_kept(self, out: Output) -> bool:
        """Whether an output has all batch axes."""
        return len(out.batch) == len(self._axes)

    def _terms(self, total: int) -> list[int]:
        """The values that a sum adds up, if nothing but the sum reads them together."""
        operation = None if total < self.first else self.program.operations[total - self.first]
        if not isinstance(operation, Map) or operation.function != "add" or self._reads[total] > 1:
            return [total]
        if any(labels != operation.output for _, labels in operation.terms):
            return [total]
        return [x for value in operation.operands for x in self._terms(value)]

    def divided(self, pieces: Iterable[Piece]) -> Division:
        """The division whose parts make these pieces."""
        parts: list[Part] = []
        results: list[list[Source]] = [[] for _ in self.program.outputs]
        memory: dict[int, _Array] = {}  # what earlier parts have written
        for number, piece in enumerate(pieces):
            known = {x: memory[x] for x in piece.known}
            wanted: list[_Sum] = []
            for out, every, result in zip(self.program.outputs, self.terms, results, strict=True):
                terms = [x for x in every if x in piece.targets]
                if terms:
                    source = number, len(wanted)
                    result.append(source)
                    wanted.append((terms, out))
                    if self.is_kept(out):
                        memory.setdefault(out.value, (source, self._operand(out)))
            for value in piece.written:
                if value not in memory:
                    out = Output(value, self._axes)
                    memory[value] = (number, len(wanted)), self._operand(out)
                    wanted.append(([value], out))
            parts.append(_part(self.program, known, wanted))
        return Division(tuple(parts), tuple(map(tuple, results)))

    def _operand(self, out: Output) -> Input:
        """What is written, for those that read it."""
        tile, dtype = self.program.tiles[out.value], self.program.dtype
        return Input(out.batch, tile, dtype, is_complex=out.is_complex)


# A value in memory: where it comes from, and as an operand.
_Array = tuple[Source, Input]
# What an output of a part is: values that are added up, and the output that it is one of.
_Sum = tuple[Sequence[int], Output]


def needed(program: ElementProgram, wanted: Iterable[int], known: Container[int] = ()) -> list[int]:
    """What some values are made of, in order, back to operands and what is known."""
    found: set[int] = set()
    left = list(wanted)
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            if value >= len(program.inputs) and value not in known:
                left += program.operations[value - len(program.inputs)].operands
    return sorted(found)


def _part(
    program: ElementProgram,
    known: Mapping[int, _Array],
    wanted: Sequence[_Sum],
    batch_rank: int | None = None,
) -> Part:
    """The part that makes some values, and reads those that are known."""
    first = len(program.inputs)
    values = needed(program, itertools.chain.from_iterable(x for x, _ in wanted), known)
    reads = [x for x in values if x < first or x in known]
    made = [x for x in values if x >= first and x not in known]
    numbers = {value: n for n, value in enumerate([*reads, *made])}
    arguments = (x for x in range(first) if program.inputs[x].constant is None)
    sources = {x: (ARGUMENT, n) for n, x in enumerate(arguments)}
    sources.update((x, source) for x, (source, _) in known.items())
    operations = [renumbered(program.operations[x - first], numbers) for x in made]
    outputs = []
    for terms, out in wanted:
        total, *others = (numbers[x] for x in terms)
        labels = letters(len(program.tiles[terms[0]]))
        sizes = tuple(zip(labels, program.tiles[terms[0]], strict=True))
        for other in others:
            operations.append(Map("add", ((total, labels), (other, labels)), labels, sizes))
            total = len(reads) + len(operations) - 1
        outputs.append(replace(out, value=total))
    inputs = tuple(known[x][1] if x in known else program.inputs[x] for x in reads)
    rank = program.batch_rank if batch_rank is None else batch_rank
    part = ElementProgram(rank, inputs, tuple(operations), tuple(outputs), program.precision)
    return Part(part, tuple(sources[x] for x in reads if x in sources))
