"""Builds a program value by value, and simplifies it on the way.

Equal operations become one value.  Beyond that, data movement inside a tile costs registers and
on-chip memory, so it is moved to where it costs nothing:

* A transposition or broadcast becomes part of the labels of whatever uses it.
* A component of a value (``x[..., 0]``) is computed from components of its operands, down to a
  ``View`` of an input; what nobody asks for is never computed.
* A stack of tiles (a ``Place`` of equal tiles side by side) is one only where it leaves the
  program: functions of stacks become stacks of functions, contractions over a stack become sums.
* What is zero by structure, because no ``Place`` ever put a value there, is not computed with;
  see :mod:`jaxmagma.programs.simpler`.
"""

import functools
import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from jaxmagma.programs.functions import COMMUTATIVE
from jaxmagma.programs.labels import canonical, letters, repeated
from jaxmagma.programs.powers import whole_power
from jaxmagma.programs.program import (
    Constant,
    Contract,
    ElementProgram,
    Gather,
    Input,
    Map,
    Operation,
    Output,
    Place,
    Terms,
    View,
    contraction,
    renumbered,
)
from jaxmagma.programs.pruning import needed
from jaxmagma.programs.simpler import ZERO, is_all, one_number, simpler
from jaxmagma.programs.strides import (
    Box,
    box_of,
    composed_view,
    in_order,
    matching_axes,
    places,
    row_major,
)


# An axis along which values are taken apart has no more places than this.
MOST_COMPONENTS = 9
# And one that becomes part of another axis is not for that alone, if it has more than these.
MOST_MERGED = 3

# What is asked of a value: one of the builder's generators, and its arguments.  What the generator
# needs of the value's operands it yields, to be sent it.
Part = tuple[Any, ...]
Making = Generator[Part, Any, Any]


@dataclass(frozen=True)
class Built:
    """A program without the inputs and operations that none of its outputs needs.

    ``inputs`` are the numbers the remaining inputs had in the builder.  A batch axis that none of
    them carries has gone from the program; ``lost`` gives, for every output, the positions in its
    ``batch`` of the axes that went, over which the caller must broadcast.
    """

    program: ElementProgram
    inputs: tuple[int, ...]
    lost: tuple[tuple[int, ...], ...]


class _Known(NamedTuple):
    """What is known of a value.

    ``constant``: it depends on constants alone; ``stack`` is the axis and the tiles of one that is
    a stack.
    """

    batch: frozenset[int]
    dtype: np.dtype
    constant: bool
    stack: tuple[int, tuple[int, ...]] | None = None


class Builder:
    """Appends operations to a program of ``batch_rank`` batch axes; values are numbers.

    If outputs are ``summing`` over batch axes, values keep those that their operands depend on.
    """

    def __init__(self, batch_rank: int, precision: Any = None, summing: bool = True) -> None:
        self.batch_rank = batch_rank
        self.precision = precision
        self.summing = summing
        self._values: list[Input | Operation] = []
        self._known: list[_Known] = []
        self._numbers: dict[Any, int] = {}
        self._parts: dict[Part, Any] = {}
        self._zeros: set[int] = set()  # by structure
        self._identities: set[int] = set()  # tables that are one, as of nodes
        self._merged: dict[int, int] = {}  # values, and the same with axes that were merged apart

    def tile(self, value: int) -> tuple[int, ...]:
        return self._values[value].tile

    def batch(self, value: int) -> frozenset[int]:
        """The batch axes a value depends on."""
        return self._known[value].batch

    def dtype(self, value: int) -> np.dtype:
        return self._known[value].dtype

    def operation(self, value: int) -> Input | Operation:
        """What makes a value."""
        return self._values[value]

    def is_zero(self, value: int) -> bool:
        """Whether a value is zero by structure: nothing was ever put there."""
        return value in self._zeros

    def is_known(self, value: int) -> bool:
        """Whether a value depends on constants alone."""
        return self._known[value].constant

    def known(self, value: int) -> np.ndarray | None:
        """The array that a value is, if that is a constant, or one that is repeated."""
        operation = self._values[value]
        if isinstance(operation, Input):
            return None if operation.constant is None else operation.constant.array
        if not isinstance(operation, Contract) or not _only_relabels(operation):
            return None
        ((operand, labels),) = operation.terms
        array = self.known(operand)
        return None if array is None else repeated(array, labels, operation.output, operation.tile)

    def stacked(self, value: int) -> int | None:
        """The axis along which a value is a stack, if it is one."""
        stack = self._known[value].stack
        return None if stack is None else stack[0]

    # ---- Inputs ----------------------------------------------------------------------------------

    def input(self, operand: Input) -> int:
        self._values.append(operand)
        constant = operand.constant is not None
        self._known.append(_Known(frozenset(operand.batch), operand.dtype, constant))
        return len(self._values) - 1

    def constant(self, array: np.ndarray) -> int:
        constant = Constant(array)
        if constant not in self._numbers:
            shape = constant.array.shape
            self._numbers[constant] = self.input(Input((), shape, constant.array.dtype, constant))
        return self._numbers[constant]

    def zero(self, tile: tuple[int, ...], dtype: np.dtype) -> int:
        """A tile where nothing was put: zeros that are not computed with."""
        key = "zero", tile, dtype
        if key not in self._numbers:
            array = Constant(np.zeros(tile, dtype))
            self._numbers[key] = self.input(Input((), tile, dtype, array))
            self._zeros.add(self._numbers[key])
        return self._numbers[key]

    def identity(self, extent: int, dtype: np.dtype) -> int:
        """An identity, of which products are its other factors."""
        made = self.constant(np.eye(extent, dtype=dtype))
        self._identities.add(made)
        return made

    def gather(
        self, vector: int, index: int, tables: Sequence[int] = (), atomic: bool = False
    ) -> int:
        tile = self.tile(index) + self.tile(vector)[1:]
        return self._append(Gather(vector, index, tile, tuple(tables), atomic))

    # ---- Arithmetic ------------------------------------------------------------------------------

    def contract(self, terms: Terms, output: str, sizes: Mapping[str, int]) -> int:
        """A product of tiles, summed over the labels that ``output`` omits."""
        terms, extents = self._relabelled(terms, output), dict(sizes)
        if any(value in self._zeros for value, _ in terms):
            return self.zero(tuple([extents[x] for x in output]), self.dtype(terms[0][0]))
        if len(terms) == 1 and terms[0][1] == output:
            return terms[0][0]
        made = "".join(x for x in output if extents[x] > 1 or any(x in y for _, y in terms))
        if len(made) < len(output):
            if len(terms) > 1:
                return self.relabel(self.contract(terms, made, sizes), made, output, sizes)
            if terms[0][1] == made and isinstance(self._values[terms[0][0]], View):
                tile = tuple([extents[x] for x in output])  # perhaps that of what is viewed
                return self.view(terms[0][0], 0, row_major(tile), tile)
        if (apart := self._with_axes_apart(terms, output, extents)) is not None:
            return self.merged(self.contract(*apart), tuple([extents[x] for x in output]))
        for n, (value, labels) in enumerate(terms):
            if self._is_one(value):
                others = [*terms[:n], *terms[n + 1 :]]
                if others and set(labels) <= {x for _, own in others for x in own}:
                    return self.contract(others, output, extents)
        if (renamed := self._without_identity(terms, output)) is not None:
            return self.contract(*renamed, extents)
        own = [set(labels) for _, labels in terms]
        everywhere = all(len(x) == len(labels) for x, (_, labels) in zip(own, terms, strict=True))
        if len(terms) > 1 and everywhere and set(output) in own and set.union(*own) == set(output):
            # Nothing is summed: a product point by point.
            product, *others = sorted(terms, key=lambda term: -len(term[1]))
            for term in others:
                product = self.pointwise("mul", [product, term], output, extents), output
            return product[0]
        label = self._stacked_label(terms)
        if label is not None:
            rest = output.replace(label, "")
            parts = [
                self.contract(self._part(Builder._at, tuple(terms), label, k), rest, extents)
                for k in range(extents[label])
            ]
            return self.stack(parts, output.index(label)) if label in output else self.sum(parts)
        return self._append(contraction(terms, output, extents))

    def _without_identity(
        self, terms: Terms, output: str
    ) -> tuple[list[tuple[int, str]], str] | None:
        """The terms without an identity of theirs, one of whose axes is summed over."""
        for n, (value, labels) in enumerate(terms):
            if value not in self._identities:
                continue
            others = [*terms[:n], *terms[n + 1 :]]
            for old, new in itertools.permutations(labels):
                carried = [own for _, own in others if old in own]
                if old not in output and carried and not any(new in own for own in carried):
                    return [(x, own.replace(old, new)) for x, own in others], output
        return None

    def _is_one(self, value: int) -> bool:
        """Whether a value is the number one. (A table stays, for programs are those of others.)"""
        return math.prod(self.tile(value)) == 1 and is_all(self, value, 1)

    def map(self, function: str, *values: int) -> int:
        """A pointwise function of values with equal tiles."""
        tile = self.tile(values[0])
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        return self.pointwise(function, [(x, labels) for x in values], labels, sizes)

    def pointwise(self, function: str, terms: Terms, output: str, sizes: Mapping[str, int]) -> int:
        """A pointwise function whose operands broadcast to ``output``."""
        terms, extents = self._relabelled(terms, output), dict(sizes)
        carried = "".join(x for x in output if any(x in labels for _, labels in terms))
        if len(carried) < len(output):
            made = self.pointwise(function, terms, carried, sizes)
            return self.relabel(made, carried, output, sizes)
        if (apart := self._with_axes_apart(terms, output, extents)) is not None:
            made = self.pointwise(function, *apart)
            return self.merged(made, tuple([extents[x] for x in output]))
        found = self._simplified(function, terms, output, extents)
        if found is None and function == "pow":
            found = whole_power(self, terms, output, extents)
        if found is not None:
            return found
        label = self._stacked_label(terms)
        if label is not None:
            rest = output.replace(label, "")
            parts = [
                self.pointwise(
                    function, self._part(Builder._at, tuple(terms), label, k), rest, extents
                )
                for k in range(extents[label])
            ]
            return self.stack(parts, output.index(label))
        own = tuple((x, extents[x]) for x in sorted(output))
        if function in COMMUTATIVE:
            terms.sort()
        return self._append(Map(function, tuple(terms), output, own))

    def sum(self, values: Sequence[int]) -> int:
        places = [x for value in values if isinstance(x := self._values[value], Place)]
        whole = not any(self._known[x].stack or x in self._merged for x in values)
        if len(places) == len(values) > 1 and whole:
            # Parts of one tile: placed together they need no additions.
            pieces = [piece for place in places for piece in place.pieces]
            return self.place(pieces, places[0].tile)
        total = values[0]
        for value in values[1:]:
            total = self.map("add", total, value)
        return total

    # ---- Movement --------------------------------------------------------------------------------

    def relabel(self, value: int, labels: str, output: str, sizes: Mapping[str, int]) -> int:
        """Transposes and broadcasts."""
        if labels == output:
            return value
        return self.contract([(value, labels)], output, sizes)

    def transpose(self, value: int, axes: Sequence[int]) -> int:
        tile = self.tile(value)
        labels = letters(len(tile))
        output = "".join(labels[axis] for axis in axes)
        return self.relabel(value, labels, output, dict(zip(labels, tile, strict=True)))

    def index(self, value: int, axis: int, k: int) -> int:
        """``value[..., k, ...]``."""
        return int(self._part(Builder._index, value, axis, k))

    def compared(self, values: Sequence[int]) -> list[int]:
        """Values that a function compares: made of components where others are made of these.

        Sums in another order are rounded otherwise, and so a value that is made both ways is not
        equal to its own components.
        """
        found = list(values)
        for n, value in enumerate(values):
            parts = self._taken(value)
            if parts and self._depends({*values[:n], *values[n + 1 :]}, parts):
                found[n] = self._as_taken(value)
        return found

    def _taken(self, value: int) -> set[int]:
        """The components of a value that have been asked for, and theirs."""
        found = set()
        for axis, extent in enumerate(self.tile(value)):
            for k in range(extent):
                part = self._parts.get((Builder._index, value, axis, k))
                if part is not None:
                    found |= {part, *self._taken(part)}
        return found

    def _as_taken(self, value: int) -> int:
        """The same, stacked of its components where some of them have been asked for."""
        for axis, extent in enumerate(self.tile(value)):
            if any((Builder._index, value, axis, k) in self._parts for k in range(extent)):
                parts = [self._as_taken(self.index(value, axis, k)) for k in range(extent)]
                return self.stack(parts, axis)
        return value

    def _depends(self, values: set[int], others: set[int]) -> bool:
        """Whether some values are made of others."""
        seen, left, least = set(values), list(values), min(others)
        while left:
            value = left.pop()
            if value in others:
                return True
            more = {x for x in self._values[value].operands if x >= least} - seen
            seen |= more
            left += more
        return False

    def slice(self, value: int, axis: int, start: int, step: int, count: int) -> int:
        """``count`` steps along an axis, which may go backwards."""
        return int(self._part(Builder._slice, value, axis, start, step, count))

    def reshape(self, value: int, tile: tuple[int, ...]) -> int:
        """The same values in the same order."""
        return int(self._part(Builder._reshape, value, tile))

    def view(self, value: int, offset: int, strides: tuple[int, ...], tile: tuple[int, ...]) -> int:
        """Some values of a tile in memory; see :class:`View`."""
        while True:
            operation = self._values[value]
            if offset == 0 and tile == operation.tile and in_order(strides, tile):
                return value
            if self.is_zero(value):
                return self.zero(tile, self.dtype(value))
            if isinstance(operation, Input) and operation.constant is not None:
                flat = operation.constant.array.reshape(-1)
                return self.constant(flat[places(offset, strides, tile)])
            if not isinstance(operation, View):
                break
            shown = (operation.offset, operation.strides, operation.tile)
            composed = composed_view(shown, offset, strides, tile)
            if composed is None:
                break
            value, (offset, strides) = operation.operand, composed
        return self._append(View(value, offset, strides, tile))

    def stack(self, values: Sequence[int], axis: int) -> int:
        """Equal tiles side by side, along a new axis."""
        below = self.tile(values[0])
        tile = (*below[:axis], len(values), *below[axis:])
        strides = row_major(tile)
        rest = strides[:axis] + strides[axis + 1 :]
        return self.place([(x, n * strides[axis], rest) for n, x in enumerate(values)], tile)

    def place(
        self, pieces: Iterable[tuple[int, int, tuple[int, ...]]], tile: tuple[int, ...]
    ) -> int:
        return self._append(Place(tuple(pieces), tile))

    def apart(self, value: int, axes: Sequence[int]) -> int:
        """The value as a stack of its components along these axes, the first of them first."""
        if not axes:
            return value
        axis, others = axes[0], [n - 1 for n in axes[1:]]
        parts = [self.index(value, axis, k) for k in range(self.tile(value)[axis])]
        return self.stack([self.apart(x, others) for x in parts], axis)

    def joined(self, value: int) -> int:
        """The same as one tile, which is taken apart no more."""
        pieces = self._pieces(value)
        return value if pieces is None else self.joined_as(value, Place(pieces, self.tile(value)))

    def joined_as(self, value: int, place: Place) -> int:
        """What is known of a stack, as one tile that is no stack."""
        key = "joined", place
        if key not in self._numbers:
            self._values.append(place)
            self._known.append(self._known[value]._replace(stack=None))
            self._numbers[key] = len(self._values) - 1
        return self._numbers[key]

    def _pieces(self, value: int) -> tuple[tuple[int, int, tuple[int, ...]], ...] | None:
        """What a stack, or a stack of stacks, is made of; None if it is none."""
        operation, stack = self._values[value], self._known[value].stack
        if stack is None or not isinstance(operation, Place):
            return None
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for part, offset, strides in operation.pieces:
            inner = self._pieces(part)
            if inner is None:
                found.append((part, offset, strides))
                continue
            for piece, at, steps in inner:
                box = box_of(self.tile(part), at, steps, self.tile(piece))
                assert box is not None, "a part of a stack runs along its axes"
                first = sum(entry[0] * stride for entry, stride in zip(box, strides, strict=True))
                own = [0] * len(steps)
                for (_, step, _, position), stride in zip(box, strides, strict=True):
                    if position is not None:
                        own[position] = step * stride
                found.append((piece, offset + first, tuple(own)))
        return tuple(found)

    def part(self, value: int, offset: int, strides: tuple[int, ...], tile: tuple[int, ...]) -> int:
        """The same as a view, of which other operations take a part axis by axis."""
        box = box_of(self.tile(value), offset, strides, tile)
        if box is None or isinstance(self._values[value], Input | View):
            return self.view(value, offset, strides, tile)
        own = list(range(len(tile)))  # where the remaining axes of the value are in the result
        for axis, (first, step, count, position) in reversed(list(enumerate(box))):
            if position is None:
                value = self.index(value, axis, first)
            else:
                value = self.slice(value, axis, first, step, count)
        order = [position for *_, position in box if position is not None]
        labels = letters(len(own))
        shown = "".join(labels[n] for n in order)
        return self.relabel(value, shown, labels, dict(zip(labels, tile, strict=True)))

    def whole(
        self, pieces: Sequence[tuple[int, int, tuple[int, ...]]], tile: tuple[int, ...]
    ) -> int:
        """The same as a place of pieces, stacked along axes that have few places."""
        boxes = [(x, box_of(tile, at, s, self.tile(x))) for x, at, s in pieces]
        if not all(box for _, box in boxes) or 0 in tile:
            return self.place(pieces, tile)
        found = [(x, box) for x, box in boxes if box is not None]
        return self._whole(found, tile, self.dtype(pieces[0][0]))

    def _whole(
        self, pieces: Sequence[tuple[int, Box]], tile: tuple[int, ...], dtype: np.dtype
    ) -> int:
        for axis, extent in enumerate(tile):
            if extent > MOST_COMPONENTS or all(
                box[axis][:3] == (0, 1, extent) for _, box in pieces
            ):
                continue
            below = tile[:axis] + tile[axis + 1 :]
            parts = []
            for k in range(extent):
                found = [self._at_place(x, box, axis, k) for x, box in pieces]
                parts.append(self._whole([x for x in found if x is not None], below, dtype))
            return self.stack(parts, axis)
        total = None
        for value, box in pieces:
            value = self._spread(value, box, tile)
            total = value if total is None else self.sum([total, value])
        return self.zero(tile, dtype) if total is None else total

    def _at_place(self, value: int, box: Box, axis: int, k: int) -> tuple[int, Box] | None:
        """What of a piece is at one place along an axis."""
        first, step, count, position = box[axis]
        n, beside = divmod(k - first, step)
        if beside or not 0 <= n < count:
            return None
        if position is not None:
            value = self.index(value, position, n)
        rest = [
            (a, b, c, p - 1 if position is not None and p is not None and p > position else p)
            for m, (a, b, c, p) in enumerate(box)
            if m != axis
        ]
        return value, rest

    def _spread(self, value: int, box: Box, tile: tuple[int, ...]) -> int:
        """A piece as a value of the whole tile."""
        own = self.tile(value)
        strides = row_major(tile)
        offset, steps = 0, [0] * len(own)
        for (first, step, _, position), stride in zip(box, strides, strict=True):
            offset += first * stride
            if position is not None:
                steps[position] = step * stride
        labels = letters(len(tile))
        if all(entry[:3] == (0, 1, extent) for entry, extent in zip(box, tile, strict=True)):
            sizes = dict(zip(labels, tile, strict=True))
            shown = [""] * len(own)
            for label, (_, _, _, position) in zip(labels, box, strict=True):
                if position is not None:
                    shown[position] = label
            for n, label in reversed(list(enumerate(shown))):
                if not label:
                    value = self.index(value, n, 0)
            return self.relabel(value, "".join(shown), labels, sizes)
        return self.place([(value, offset, tuple(steps))], tile)

    # ---- Parts of values -------------------------------------------------------------------------

    def _part(self, *wanted: Any) -> Any:
        """A part of a value, made of parts of its operands: those first, and each of them once.

        Of a value that is used twice there are twice as many ways to each of its operands, and a
        chain of operations may be longer than Python's stack is deep.
        """
        if wanted in self._parts:
            return self._parts[wanted]
        making: list[tuple[Part, Making]] = [(wanted, wanted[0](self, *wanted[1:]))]
        made = None
        while making:
            part, steps = making[-1]
            try:
                needed = steps.send(made)
            except StopIteration as end:
                made = self._parts[part] = end.value
                making.pop()
                continue
            made = self._parts.get(needed)
            if made is None:
                making.append((needed, needed[0](self, *needed[1:])))
        return made

    def _index(self, value: int, axis: int, k: int) -> Making:
        tile = self.tile(value)
        if value in self._merged:
            part, axes = self._merged[value], self._merged_axes(value)[axis]
            at = np.unravel_index(k, [self.tile(part)[n] for n in axes])
            for n, own in reversed(list(zip(axes, at, strict=True))):
                part = yield Builder._index, part, n, int(own)
            return (yield Builder._reshape, part, tile[:axis] + tile[axis + 1 :])
        stack = self._known[value].stack
        if stack is not None:
            stacked, parts = stack
            if stacked == axis:
                return parts[k]
            below = axis - (axis > stacked)
            found = yield from _each((Builder._index, x, below, k) for x in parts)
            return self.stack(found, stacked - (axis < stacked))
        operation = self._values[value]
        if isinstance(operation, Contract | Map) and self._comes_apart(operation, axis):
            label = operation.output[axis]
            terms = yield from self._at(operation.terms, label, k)
            return self.again(operation, terms, operation.output.replace(label, ""))
        strides = row_major(tile)
        rest = tuple(n for n in range(len(tile)) if n != axis)
        return self.view(
            value,
            k * strides[axis],
            tuple(strides[n] for n in rest),
            tuple(tile[n] for n in rest),
        )

    def _comes_apart(self, operation: Contract | Map, axis: int) -> bool:
        """Whether a component of a result is best computed from components of the operands.

        A sum-factorised field of vectors is contracted for all components at once, as one large
        tile; components of a table, or of a product without sums, are operations of their own.
        """
        if isinstance(operation, Map):
            return True
        label = operation.output[axis]
        carried = "".join(labels for _, labels in operation.terms)
        if set(carried) <= set(operation.output):
            return True
        return all(
            isinstance(x := self._values[value], Input) and x.constant is not None
            for value, labels in operation.terms
            if label in labels
        )

    def _at(self, terms: Terms, label: str, k: int) -> Making:
        """The terms at one place along a label."""
        found = []
        for value, labels in terms:
            while label in labels:
                axis = labels.index(label)
                value = yield Builder._index, value, axis, k
                labels = labels[:axis] + labels[axis + 1 :]
            found.append((value, labels))
        return found

    def _slice(self, value: int, axis: int, start: int, step: int, count: int) -> Making:
        tile = self.tile(value)
        if (start, step, count) == (0, 1, tile[axis]):
            return value
        if value in self._merged:
            return (yield from self._slice_of_merged(value, axis, start, step, count))
        where = (start, step, count)
        stack = self._known[value].stack
        if stack is not None:
            stacked, parts = stack
            if stacked == axis:
                return self.stack([parts[start + n * step] for n in range(count)], axis)
            below = axis - (axis > stacked)
            found = yield from _each((Builder._slice, x, below, *where) for x in parts)
            return self.stack(found, stacked)
        operation = self._values[value]
        if isinstance(operation, Contract | Map):
            label = operation.output[axis]
            terms = []
            for operand, labels in operation.terms:
                for position, x in enumerate(labels):
                    if x == label:
                        operand = yield Builder._slice, operand, position, *where
                terms.append((operand, labels))
            sizes = {**operation.extents, label: count}
            return self.again(operation, terms, operation.output, sizes)
        strides = list(row_major(tile))
        offset = start * strides[axis]
        strides[axis] *= step
        shape = tuple(count if n == axis else x for n, x in enumerate(tile))
        return self.view(value, offset, tuple(strides), shape)

    def _reshape(self, value: int, tile: tuple[int, ...]) -> Making:
        old = self.tile(value)
        if old == tile:
            return value
        if value in self._merged:
            return (yield Builder._reshape, self._merged[value], tile)
        stack = self._known[value].stack
        operation = self._values[value]
        if stack is None and not isinstance(operation, Contract | Map):
            return self.view(value, 0, row_major(tile), tile)
        if 1 in old:
            part = yield Builder._index, value, old.index(1), 0
            return (yield Builder._reshape, part, tile)
        if 1 in tile:
            value = yield Builder._reshape, value, tuple(x for x in tile if x > 1)
            labels = letters(len(tile))
            own = "".join(x for x, extent in zip(labels, tile, strict=True) if extent > 1)
            return self.relabel(value, own, labels, dict(zip(labels, tile, strict=True)))
        groups = matching_axes(old, tile)
        if stack is not None:
            axis, tiles = stack
            with_it = next(before for before, _ in groups if axis in before)
            # Axes that change apart from that of the stack do so in its tiles.
            outer = [n for before, shape in groups if before < with_it for n in shape]
            inner = [n for before, shape in groups if before > with_it for n in shape]
            stacked = (*outer, *(old[n] for n in with_it), *inner)
            if stacked == old and any(self._is_long(value, n) for n in with_it):
                return self.merged(value, tile)
            split = [before[0] for before, shape in groups if len(before) < len(shape)]
            # What comes out of a table is components, as the columns of a Hessian.
            if stacked == old or any(self.is_of_table(value, n) for n in split):
                return (yield from self._restacked(value, tile, groups))
            at = len(outer) + axis - with_it[0]
            parts = []
            for x in tiles:
                parts.append((yield Builder._reshape, x, stacked[:at] + stacked[at + 1 :]))
            return (yield Builder._reshape, self.stack(parts, at), tile)
        if isinstance(operation, Contract | Map) and all(len(x) == 1 for x, _ in groups):
            return (yield from self._split(operation, groups))
        return self.view(value, 0, row_major(tile), tile)

    def _split(
        self, operation: Contract | Map, groups: Sequence[tuple[list[int], list[int]]]
    ) -> Making:
        """Axes of a result become several, and those of its operands as well."""
        shapes = {operation.output[n]: shape for (n,), shape in groups if len(shape) > 1}
        parts, extents = _apart(shapes, operation.extents)
        terms = []
        for value, labels in operation.terms:
            tile = tuple(extents[y] for x in labels for y in parts.get(x, x))
            value = yield Builder._reshape, value, tile
            terms.append((value, "".join(parts.get(x, x) for x in labels)))
        output = "".join(parts.get(x, x) for x in operation.output)
        return self.again(operation, terms, output, extents)

    def is_of_table(self, value: int, axis: int) -> bool:
        """Whether an axis comes out of a known table that is applied, and not of a reshape."""
        while True:
            operation, stack = self._values[value], self._known[value].stack
            if stack is not None:
                at, tiles = stack
                if axis == at:
                    return False
                value, axis = tiles[0], axis - (axis > at)
                continue
            if isinstance(operation, View):
                whole = self.tile(operation.operand)
                box = box_of(whole, operation.offset, operation.strides, operation.tile)
                along = [n for n, (*_, position) in enumerate(box or ()) if position == axis]
                if not along:
                    return False
                value, axis = operation.operand, along[0]
                continue
            if not isinstance(operation, Contract | Map):
                return False
            label = operation.output[axis]
            terms = [x for x in operation.terms if label in x[1]]
            if any(self.is_known(x) and not set(y) <= set(operation.output) for x, y in terms):
                return True
            own = [x for x in terms if not self.is_known(x[0])]
            if not own:
                return False
            value, labels = own[0]
            axis = labels.index(label)

    def _restacked(
        self, value: int, tile: tuple[int, ...], groups: Sequence[tuple[list[int], list[int]]]
    ) -> Making:
        """A reshaped stack: its axes that change are taken apart and stacked anew."""
        old = self.tile(value)
        changed = [n for before, after in groups for n in before if [old[n]] != after]
        parts = np.empty([old[n] for n in changed], object)
        for at in np.ndindex(*parts.shape):
            part = value
            for axis, k in reversed(list(zip(changed, at, strict=True))):
                part = yield Builder._index, part, axis, k
            parts[at] = part
        new_axes: list[int] = []
        shape: list[int] = []
        position = 0
        for before, after in groups:
            if [old[n] for n in before] != after:
                new_axes += range(position, position + len(after))
                shape += after
            position += len(after)
        parts = parts.reshape(shape)

        def build(parts: Any, axes: Sequence[int]) -> int:
            if not axes:
                return int(parts if not isinstance(parts, np.ndarray) else parts.item())
            # Axes are added from the last to the first: the outermost is the outermost stack.
            return self.stack([build(x, axes[1:]) for x in parts], axes[0])

        # Each inner stack lacks the axes outside of it, which stand before its own.
        made = build(parts, [axis - n for n, axis in enumerate(new_axes)])
        assert self.tile(made) == tile, (self.tile(made), tile)
        return made

    # ---- Axes that several have become -----------------------------------------------------------

    def merged(self, value: int, tile: tuple[int, ...]) -> int:
        """The value with some axes as one, which are several again wherever it is used.

        So an axis of nodes and components, ``x[3 * node + component]``, is both of them.
        """
        if self.tile(value) == tile:
            return value
        groups = matching_axes(self.tile(value), tile)
        merged = [n for before, _ in groups if len(before) > 1 for n in before]
        if not any(self._is_long(value, n) for n in merged):
            return self.reshape(value, tile)
        pieces = self._pieces(value)
        if pieces is None:
            made = self.view(value, 0, row_major(tile), tile)
        else:
            made = self.joined_as(value, Place(pieces, tile))
        self._merged[made] = value
        return made

    def _is_long(self, value: int, axis: int) -> bool:
        """Whether a value is no stack along an axis, and had better not be one."""
        if self.tile(value)[axis] <= MOST_MERGED:
            return False
        stack = self._known[value].stack
        while stack is not None:
            stacked, parts = stack
            if stacked == axis:
                return False
            value, axis = parts[0], axis - (axis > stacked)
            stack = self._known[value].stack
        return True

    def _merged_axes(self, value: int) -> list[list[int]]:
        """Of each axis of a value those that it is made of."""
        return [x for x, _ in matching_axes(self.tile(self._merged[value]), self.tile(value))]

    def _slice_of_merged(self, value: int, axis: int, start: int, step: int, count: int) -> Making:
        tile, whole, axes = self.tile(value), self._merged[value], self._merged_axes(value)[axis]
        shape = (*tile[:axis], count, *tile[axis + 1 :])
        outer, *others = axes
        inner = math.prod(self.tile(whole)[n] for n in others)
        part = None
        if not others:
            part = yield Builder._slice, whole, outer, start, step, count
        elif len(others) == 1 and (step, count) == (inner, self.tile(whole)[outer]):
            part = yield Builder._index, whole, others[0], start
        elif step == 1 and start % inner == count % inner == 0:
            part = yield Builder._slice, whole, outer, start // inner, 1, count // inner
        if part is not None:
            return (yield Builder._reshape, part, shape)
        parts = []
        for n in range(count):
            parts.append((yield Builder._index, value, axis, start + n * step))
        return self.stack(parts, axis)

    def _with_axes_apart(
        self, terms: Terms, output: str, extents: Mapping[str, int]
    ) -> tuple[list[tuple[int, str]], str, dict[str, int]] | None:
        """Terms, labels of the output and extents, with what was merged as several axes."""
        if not self._merged:
            return None
        shapes: dict[str, tuple[int, ...]] = {}
        for value, labels in terms:
            if value in self._merged:
                whole = self.tile(self._merged[value])
                for label, axes in zip(labels, self._merged_axes(value), strict=True):
                    shape = tuple(whole[n] for n in axes)
                    if len(axes) > 1 and shapes.setdefault(label, shape) != shape:
                        return None
        if not shapes:
            return None
        names, sizes = _apart(shapes, extents)
        found = []
        for value, labels in terms:
            own = "".join(names.get(x, x) for x in labels)
            found.append((self.reshape(value, tuple(sizes[x] for x in own)), own))
        return found, "".join(names.get(x, x) for x in output), sizes

    # ---- Operations on other operands ------------------------------------------------------------

    def _simplified(
        self, function: str, terms: list[tuple[int, str]], output: str, sizes: Mapping[str, int]
    ) -> int | None:
        """What a function of such operands is, if no operation or a simpler one is enough.

        An operand all of whose entries are one number becomes that number among the terms.
        """
        for position, (value, labels) in enumerate(terms):
            known = self.known(value)
            one = one_number(known) if known is not None and known.size > 1 else None
            if one is not None:
                zero = self.is_zero(value)
                number = self.zero((), one.dtype) if zero else self.constant(one)
                terms[position] = number, labels[:0]
        chosen = simpler(self, function, terms)
        if chosen is None:
            return None
        if chosen is ZERO:
            return self.zero(tuple([sizes[x] for x in output]), self.dtype(terms[0][0]))
        name, operands, factor = chosen
        if self.summing and not self._batches(terms) <= self._batches(operands):
            return None
        if name is not None:
            made = self.pointwise(name, operands, output, sizes)
        else:
            ((value, labels),) = operands
            made = self.relabel(value, labels, output, sizes)
        if factor == 1:
            return made
        number = self.constant(np.asarray(factor, self.dtype(made)))
        return self.pointwise("mul", [(number, ""), (made, output)], output, sizes)

    def _batches(self, terms: Terms) -> frozenset[int]:
        return frozenset().union(*(self.batch(x) for x, _ in terms))

    def _relabelled(self, terms: Terms, output: str) -> list[tuple[int, str]]:
        """The terms, with transpositions and broadcasts of operands moved into their labels.

        None has an axis of one place: it has none in a program that is the same otherwise. But
        what is gathered is read as it is, and so are products of what is in memory.
        """
        in_memory = all(isinstance(self._values[x], Input) for x, _ in terms)
        found = list(terms)
        for position in range(len(found)):
            while True:
                value, labels = found[position]
                inner = self._values[value]
                if 1 in self.tile(value) and not (in_memory or isinstance(inner, Gather)):
                    axis = self.tile(value).index(1)
                    part = self.index(value, axis, 0)
                    found[position] = part, labels[:axis] + labels[axis + 1 :]
                    continue
                if not isinstance(inner, Contract) or not _only_relabels(inner):
                    break
                names = dict(zip(inner.output, labels, strict=True))
                ((operand, own),) = inner.terms
                # A sum over a label that nothing carries would lose its extent.
                others = "".join(x for n, (_, x) in enumerate(found) if n != position)
                if any(names[x] not in output + others for x in inner.output if x not in own):
                    break
                found[position] = (operand, "".join(names[x] for x in own))
        return found

    def _stacked_label(self, terms: Terms) -> str | None:
        """A label along which an operand is a stack."""
        for value, labels in terms:
            stack = self._known[value].stack
            if stack is not None:
                return labels[stack[0]]
        return None

    def again(
        self,
        operation: Contract | Map,
        terms: Terms,
        output: str,
        sizes: Mapping[str, int] | None = None,
    ) -> int:
        """The same operation on other terms."""
        sizes = operation.extents if sizes is None else sizes
        if isinstance(operation, Map):
            return self.pointwise(operation.function, terms, output, sizes)
        return self.contract(terms, output, sizes)

    def _stack(self, place: Place) -> tuple[int, tuple[int, ...]] | None:
        """The axis and the tiles, if it is a stack."""
        strides = row_major(place.tile)
        for axis, extent in enumerate(place.tile):
            rest = strides[:axis] + strides[axis + 1 :]
            below = place.tile[:axis] + place.tile[axis + 1 :]
            if len(place.pieces) == extent and all(
                offset == n * strides[axis] and own == rest and self.tile(x) == below
                for n, (x, offset, own) in enumerate(place.pieces)
            ):
                return axis, place.operands
        return None

    def copy(self, operation: Operation, numbers: Mapping[int, int]) -> int:
        """Appends another program's operation, its operands renumbered."""
        return self._append(renumbered(operation, numbers))

    def of_parts(self, operation: Operation, numbers: Mapping[int, int]) -> int:
        """Another program's operation, taken apart where its operands are."""
        if isinstance(operation, Contract | Map):
            terms = [(numbers[x], labels) for x, labels in operation.terms]
            return self.again(operation, terms, operation.output)
        if isinstance(operation, View):
            value = numbers[operation.operand]
            return self.part(value, operation.offset, operation.strides, operation.tile)
        if isinstance(operation, Place):
            pieces = [(numbers[x], offset, strides) for x, offset, strides in operation.pieces]
            return self.whole(pieces, operation.tile)
        return self.copy(operation, numbers)

    def _append(self, operation: Operation) -> int:
        key = _canonical(operation)
        number = self._numbers.get(key)
        if number is None:
            operation = _exact(operation)
            operands = [self._known[x] for x in operation.operands]
            batch, dtype = operands[0].batch, operands[0].dtype
            for x in operands:
                if x.batch != batch:
                    batch |= x.batch
            stack = self._stack(operation) if isinstance(operation, Place) else None
            self._values.append(operation)
            constant = all(x.constant for x in operands)
            self._known.append(_Known(batch, dtype, constant, stack))
            number = self._numbers[key] = len(self._values) - 1
        return number

    def _without_zeros(self, place: Place) -> Place:
        """The same without the pieces that are zero by structure, if any is left."""
        pieces = tuple(x for x in place.pieces if x[0] not in self._zeros)
        return replace(place, pieces=pieces) if 0 < len(pieces) < len(place.pieces) else place

    # ---- The program -----------------------------------------------------------------------------

    def build(self, outputs: Sequence[Output]) -> Built:
        """The program that computes ``outputs`` and nothing else."""
        values = [self._without_zeros(x) if isinstance(x, Place) else x for x in self._values]
        read = needed(values, {out.value for out in outputs})
        kept = [n for n in read if isinstance(values[n], Input)]
        done = [n for n in read if not isinstance(values[n], Input)]
        numbers = {old: new for new, old in enumerate([*kept, *done])}

        inputs = [value for n in kept if isinstance(value := values[n], Input)]
        carried = sorted({axis for operand in inputs for axis in operand.batch})
        axes = {old: new for new, old in enumerate(carried)}
        operations = [
            renumbered(value, numbers) for n in done if not isinstance(value := values[n], Input)
        ]
        if any(old != new for old, new in axes.items()):
            inputs = [replace(x, batch=tuple(axes[a] for a in x.batch)) for x in inputs]
        program = ElementProgram(
            len(carried),
            tuple(inputs),
            tuple(operations),
            tuple(
                replace(
                    out,
                    value=numbers[out.value],
                    batch=tuple(axes[a] for a in out.batch if a in axes),
                )
                for out in outputs
            ),
            self.precision,
        )
        lost = tuple(tuple(n for n, a in enumerate(out.batch) if a not in axes) for out in outputs)
        return Built(program, tuple(kept), lost)


def _each(parts: Iterable[Part]) -> Generator[Part, Any, list[int]]:
    found = []
    for part in parts:
        found.append((yield part))
    return found


def _exact(operation: Operation) -> Operation:
    """The same in Python's integers: shapes and parameters of JAX may be NumPy's, which overflow
    and which JSON, in which programs have their names, does not know.
    """
    if isinstance(operation, Contract):
        return Contract(operation.terms, operation.output, _integers(operation.sizes))
    if isinstance(operation, Map):
        return Map(
            operation.function, operation.terms, operation.output, _integers(operation.sizes)
        )
    return type(operation)(*(_integers(getattr(operation, x.name)) for x in fields(operation)))


# NumPy's integers equal Python's: what has been asked for in one has an answer. So does a truth
# value, but for its type.
@functools.lru_cache(maxsize=1 << 16, typed=True)
def _integers(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple([_integers(y) for y in x])
    return int(x) if isinstance(x, np.integer) else x


def _apart(
    shapes: Mapping[str, Sequence[int]], extents: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, int]]:
    """Labels that some become which are several, and the extents of these and of all others."""
    spare = (x for n in range(1000) if (x := chr(0x4E00 + n)) not in extents)
    names = {x: "".join(next(spare) for _ in shape) for x, shape in shapes.items()}
    sizes = {x: n for x, n in extents.items() if x not in shapes}
    for label, shape in shapes.items():
        sizes |= dict(zip(names[label], shape, strict=True))
    return names, sizes


def _canonical(operation: Operation) -> Any:
    """A key that is equal for operations that differ in the names of their labels alone."""
    if not isinstance(operation, Contract | Map):
        return operation
    labels, names = canonical(*(own for _, own in operation.terms), operation.output)
    function = operation.function if isinstance(operation, Map) else None
    extents = tuple([operation.extents[old] for old, _ in names])
    return function, operation.operands, labels, extents


def _only_relabels(operation: Contract) -> bool:
    """Whether a contraction is a transposition or a broadcast."""
    if len(operation.terms) > 1:
        return False
    ((_, labels),) = operation.terms
    return len(set(labels)) == len(labels) and set(labels) <= set(operation.output)
