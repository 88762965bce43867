"""The one way to write a program down: in an order that no spelling of it has a part in.

Values are ranked: inputs, then what is computed from those, then what is computed from that, and
among equals by what they are made of.  Inputs stand by rank, and so do operands that may change
places.  All else follows memory.  Axes of what is computed stand as those of the arguments that
they come from; an axis that a table makes stands for the one that the table is applied along.
Contractions come in the order in which arguments are read: first all that the first one is enough
for, at last what needs the last one.  That is how programs and their derivatives are written, and
what plans are made for.  Labels have names by order of appearance.

Sums and products stay as the user put their parentheses: to change those is to change roundings.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from jaxmagma.programs.functions import COMMUTATIVE
from jaxmagma.programs.labels import canonical
from jaxmagma.programs.program import (
    Contract,
    ElementProgram,
    Gather,
    Map,
    Operation,
    Place,
    View,
    contraction,
    moved,
    renumbered,
)
from jaxmagma.programs.strides import box_of, row_major


# An argument, and an axis of it; and for axes of a value, which of those they come from.
Where = tuple[int, int]
Origins = dict[int, Where]


def canonical_form(program: ElementProgram) -> tuple[ElementProgram, tuple[int, ...]]:
    """The same function, and where each of its arguments was."""
    first = len(program.inputs)
    written = _Written(program)
    order = _as_needed(written)
    inputs = sorted((n for n in order if n < first), key=written.rank.__getitem__)
    done = [n for n in order if n >= first]
    numbers = {old: new for new, old in enumerate([*inputs, *done])}
    arguments = [n for n, x in enumerate(program.inputs) if x.constant is None]
    return replace(
        program,
        inputs=tuple(program.inputs[n] for n in inputs),
        operations=tuple(renumbered(written.operations[n], numbers) for n in done),
        outputs=tuple(replace(x, value=numbers[written.same[x.value]]) for x in program.outputs),
    ), tuple(arguments.index(n) for n in inputs if n in arguments)


# ---- Ranks ---------------------------------------------------------------------------------------


class _Written:
    """A program's operations, as they are written down.

    ``operations`` has them by the numbers of their values, of which equal ones are the ``same``
    one; ``height`` is the length of the longest way from an input.
    """

    def __init__(self, program: ElementProgram) -> None:
        self.program = program
        self.operations: dict[int, Operation] = {}
        self.same: dict[int, int] = {}
        self.rank: dict[int, int] = {}
        self.height = _heights(program)
        self._axes: dict[int, Sequence[int]] = {}  # where each axis was
        self._in_memory = _in_memory(program)
        self._origins = _origins(program)
        self._as_results = _as_results(program)
        levels: dict[int, list[int]] = {}
        for number, height in enumerate(self.height):
            levels.setdefault(height, []).append(number)
        keys: dict[int, Any] = dict(enumerate(_input_keys(program, self.height, self._origins)))
        for height in sorted(levels):
            for number in levels[height]:
                if number not in keys:
                    self.operations[number] = self._ordered(number)
                    keys[number] = self._key(self.operations[number])
            self._rank(levels[height], keys)

    def _rank(self, level: Sequence[int], keys: Mapping[int, Any]) -> None:
        before, known = len(self.rank), dict[Any, int]()
        for number in sorted(level, key=keys.__getitem__):
            self.same[number] = known.setdefault(keys[number], self._unmoved(number))
            self.rank[number] = self.rank.get(self.same[number], before + len(known))

    def _key(self, operation: Operation) -> tuple[Any, ...]:
        """What a value is made of, other values by their ranks."""
        if isinstance(operation, View):
            parts = operation.offset, operation.strides, operation.tile
            return "view", self.rank[operation.operand], *parts
        if isinstance(operation, Place):
            pieces = tuple([(self.rank[x], at, strides) for x, at, strides in operation.pieces])
            return "place", pieces, operation.tile
        ranks = tuple([self.rank[x] for x in operation.operands])
        if isinstance(operation, Gather):
            return "gather", ranks, operation.tile, operation.atomic
        labels = tuple([own for _, own in operation.terms])
        if isinstance(operation, Contract):
            return "", "", ranks, labels, operation.output, operation.sizes
        if isinstance(operation, Map):
            return "", operation.function, ranks, labels, operation.output, operation.sizes
        assert_never(operation)

    def _unmoved(self, number: int) -> int:
        """The value itself, or the one that it is with its axes in another order."""
        operation = self.operations.get(number)
        if isinstance(operation, Contract) and len(operation.terms) == 1:
            ((operand, labels),) = operation.terms
            return operand if labels == operation.output else number
        return number

    def _ordered(self, number: int) -> Operation:
        """The operation with its operands and axes in order."""
        operation = self.program.operations[number - len(self.program.inputs)]
        if isinstance(operation, Contract | Map):
            return self._labelled(operation, number)
        if isinstance(operation, Place):
            pieces = [
                (self.same[x], offset, tuple(self._in_order(x, strides)))
                for x, offset, strides in operation.pieces
            ]
            pieces.sort(key=lambda piece: (*piece[1:], self.rank[piece[0]]))
            return Place(tuple(pieces), operation.tile)
        if isinstance(operation, View):
            return self._viewed(operation, number)
        return moved(operation, self.same)

    def _viewed(self, view: View, number: int) -> View:
        """The view with its axes as those that they run along, and where those are now."""
        offset, strides, tile = view.offset, view.strides, view.tile
        whole = self.program.tiles[view.operand]
        order = self._axes.get(view.operand)
        if order is not None:
            box = box_of(whole, offset, strides, tile)
            assert box is not None, "only boxes leave the axes of what they show free"
            steps = dict(zip(order, row_major([whole[n] for n in order]), strict=True))
            offset = sum([first * steps[n] for n, (first, *_) in enumerate(box)])
            along = {x: step * steps[n] for n, (_, step, _, x) in enumerate(box) if x is not None}
            strides = tuple([along.get(n, 0) for n in range(len(tile))])
        if number not in self._in_memory:
            axes = sorted(range(len(tile)), key=lambda n: (-abs(strides[n]), tile[n]))
            self._axes[number] = axes
            strides, tile = tuple([strides[n] for n in axes]), tuple([tile[n] for n in axes])
        return View(self.same[view.operand], offset, strides, tile)

    def _in_order(self, value: int, along: Sequence[Any]) -> list[Any]:
        """What there is for each axis of a value, in the order of its axes now."""
        return [along[n] for n in self._axes.get(value, range(len(along)))]

    def _labelled(self, operation: Contract | Map, number: int) -> Contract | Map:
        terms = [(self.same[x], "".join(self._in_order(x, own))) for x, own in operation.terms]
        may_swap = isinstance(operation, Contract) or operation.function in COMMUTATIVE
        # What differs from element to element first: then axes that a table makes stand behind.
        kinds = _numbered(
            [
                (0 if may_swap else slot, not self.program.batch[x], self.rank[x])
                for slot, (x, _) in enumerate(terms)
            ]
        )
        colours = self._coloured(operation, number, kinds, [own for _, own in terms])
        if may_swap and len(terms) > 1:
            # By the last axes first: so tables that are applied to one value stand side by side,
            # and a plan finds the partial results that two products share.
            order = [
                (kind, [colours[x] for x in reversed(own)])
                for kind, (_, own) in zip(kinds, terms, strict=True)
            ]
            terms = [terms[n] for n in sorted(range(len(terms)), key=order.__getitem__)]
        output = operation.output
        if number not in self._in_memory:
            axes = sorted(range(len(output)), key=lambda n: colours[output[n]])
            self._axes[number], output = axes, "".join([output[n] for n in axes])
        (*found, output), names = canonical(*(own for _, own in terms), output)
        renamed = tuple([(x, own) for (x, _), own in zip(terms, found, strict=True)])
        sizes = {new: operation.extents[old] for old, new in names}
        if isinstance(operation, Contract):
            return contraction(renamed, output, sizes)
        return Map(operation.function, renamed, output, tuple(sorted(sizes.items())))

    def _coloured(
        self, operation: Contract | Map, number: int, kinds: tuple[int, ...], terms: Sequence[str]
    ) -> Mapping[str, int]:
        """The order of the labels of an operation, whose operands are of these kinds."""
        output = operation.output
        carried = dict.fromkeys("".join(terms))
        origins = self._origins[number]
        if number in self._as_results:
            origins = dict(enumerate(self._as_results[number]))
        order = _numbered(
            [
                (n not in origins, origins.get(n, ()), 0 if x in carried else operation.extents[x])
                for n, x in enumerate(output)
            ]
        )
        labels = output + "".join([x for x in carried if x not in output])
        return _colours(labels, order, kinds, tuple(terms))


def _heights(program: ElementProgram) -> list[int]:
    found = [0] * len(program.inputs)
    for operation in program.operations:
        found.append(1 + max([found[x] for x in operation.operands]))
    return found


def _in_memory(program: ElementProgram) -> set[int]:
    """The values whose axes have an order: that of memory, or that in which some are one axis."""
    found = {*range(len(program.inputs)), *(out.value for out in program.outputs)}
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Gather | Place):
            found.add(number)
        if isinstance(operation, View):
            where = operation.offset, operation.strides, operation.tile
            if box_of(program.tiles[operation.operand], *where) is None:
                found.add(operation.operand)
    return found


def _as_results(program: ElementProgram) -> dict[int, list[Where]]:
    """Where axes of results stand, and of what becomes one point by point."""
    found: dict[int, list[Where]] = {}
    for which, out in enumerate(program.outputs):
        found.setdefault(out.value, [(which, n) for n in range(len(program.tiles[out.value]))])
    results = {*found}
    first = len(program.inputs)
    for number in reversed(range(first, first + len(program.operations))):
        operation = program.operations[number - first]
        if number in found and isinstance(operation, Map):
            spots = dict(zip(operation.output, found[number], strict=True))
            for value, labels in operation.terms:
                if value not in results:
                    own = [spots[x] for x in labels]
                    found[value] = min(found.get(value, own), own)
    return found


def _origins(program: ElementProgram) -> list[Origins]:
    """For each value where its axes stand in the memory that it comes from, as far as they do.

    An axis that a table makes stands for the one that the table is applied along.
    """
    vectors = {x.vector for x in program.operations if isinstance(x, Gather)}
    found: list[Origins] = [
        {} if x.shared and n not in vectors else {axis: (n, axis) for axis in range(len(x.tile))}
        for n, x in enumerate(program.inputs)
    ]
    for operation in program.operations:
        if isinstance(operation, Contract | Map):
            known = _origins_of_labels(operation, found)
            own = {n: known[x] for n, x in enumerate(operation.output) if x in known}
        elif isinstance(operation, Gather):
            own = {axis: (operation.vector, axis) for axis in range(len(operation.tile))}
        else:
            own = {}
            for value, axis, position in _shown(program, operation):
                whole = isinstance(operation, Place)
                old, new = (position, axis) if whole else (axis, position)
                if old in found[value]:
                    own[new] = min(own.get(new, found[value][old]), found[value][old])
        found.append(own)
    return found


def _origins_of_labels(operation: Contract | Map, found: Sequence[Origins]) -> dict[str, Where]:
    """Those of the axes that the labels of an operation stand for."""
    known: dict[str, Where] = {}
    for value, labels in operation.terms:
        for axis, label in enumerate(labels):
            if axis in found[value]:
                known[label] = min(known.get(label, found[value][axis]), found[value][axis])
    made: dict[str, Where] = {}
    for value, labels in operation.terms:
        if len(labels) == 2 and not found[value]:
            for one, other in ([*labels], [*labels[::-1]]):
                if one not in known and other in known:
                    made[one] = min(made.get(one, known[other]), known[other])
    return known | made


def _shown(program: ElementProgram, operation: View | Place) -> Iterator[tuple[int, int, int]]:
    """Operands, and axes of a whole tile and of its part which run along each other."""
    whole = program.tiles[operation.operand] if isinstance(operation, View) else operation.tile
    parts = (
        [(operation.operand, operation.offset, operation.strides, operation.tile)]
        if isinstance(operation, View)
        else [(x, offset, strides, program.tiles[x]) for x, offset, strides in operation.pieces]
    )
    for value, offset, strides, tile in parts:
        for axis, (*_, position) in enumerate(box_of(whole, offset, strides, tile) or ()):
            if position is not None:
                yield value, axis, position


# ---- Inputs --------------------------------------------------------------------------------------


def _input_keys(
    program: ElementProgram, height: Sequence[int], origins: Sequence[Origins]
) -> Iterator[tuple[Any, ...]]:
    """An argument by its place; a table by what it is used for, and only then by its values.

    So a program is the same for other tables, and where they are arguments.
    """
    uses: dict[int, list[Any]] = {}
    vectors: set[int] = set()
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Gather):
            vectors.update(operation.operands)
        if not isinstance(operation, Contract | Map):
            continue
        read = [x for x in operation.operands if x < len(program.inputs)]
        if not any(program.inputs[x].shared for x in read):
            continue
        function = operation.function if isinstance(operation, Map) else ""
        where = _origins_of_labels(operation, origins)
        for value, labels in operation.terms:
            if value in read and program.inputs[value].shared:
                along = tuple([(where.get(x, ()), x in operation.output) for x in labels])
                uses.setdefault(value, []).append((height[number], function, along))
    for number, operand in enumerate(program.inputs):
        if not operand.shared or number in vectors:
            yield False, number
            continue
        known = operand.constant
        which = number if known is None else known.array.tobytes()
        used = tuple(sorted(uses.get(number, [])))
        yield True, operand.tile, operand.dtype.str, used, known is not None, which


# ---- Labels --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _colours(
    labels: str, order: tuple[int, ...], kinds: tuple[int, ...], terms: tuple[str, ...]
) -> Mapping[str, int]:
    """A number for each label, by which terms have it where.

    Labels of the output come first, in their ``order`` as far as they have one.  Where several
    could change places without a difference, it does not matter which is which.
    """
    colours = {x: order[n] if n < len(order) else len(order) for n, x in enumerate(labels)}
    colours = _refined(colours, kinds, terms)
    while len(set(colours.values())) < len(labels):
        values = list(colours.values())
        tied = next(x for x in labels if values.count(colours[x]) > 1)
        colours = {x: 2 * colour + (x != tied) for x, colour in colours.items()}
        colours = _refined(colours, kinds, terms)
    return colours


def _refined(
    colours: Mapping[str, int], kinds: tuple[int, ...], terms: tuple[str, ...]
) -> dict[str, int]:
    """Labels that differ in where they stand beside which others have different colours, too."""
    while True:
        found: dict[str, list[Any]] = {label: [] for label in colours}
        for kind, own in zip(kinds, terms, strict=True):
            beside = [colours[x] for x in own]
            for axis, label in enumerate(own):
                found[label].append((kind, beside, axis))
        keys = [(colours[x], sorted(places)) for x, places in found.items()]
        refined = dict(zip(found, _numbered(keys), strict=True))
        if refined == colours:
            return refined
        colours = refined


def _numbered(keys: Sequence[Any]) -> tuple[int, ...]:
    """Numbers in the order of the keys, equal for equal ones."""
    found, number, last = [0] * len(keys), -1, None
    for n in sorted(range(len(keys)), key=keys.__getitem__):
        number += keys[n] != last
        found[n], last = number, keys[n]
    return tuple(found)


# ---- The order of operations ---------------------------------------------------------------------


def _as_needed(written: _Written) -> list[int]:
    """The values that results need, each where it is first needed.

    Contractions and results come by the arguments that they need.  Among equals, those of what is
    computed point by point wait for all others, as if all points came at once: so a program that is
    too large falls into parts there.
    """
    results = [written.same[x.value] for x in written.program.outputs]
    order = _in_depth(written, results)
    phase = dict.fromkeys(order, 0)
    contractions = []
    for number in order:
        operation = written.operations.get(number)
        if operation is None:
            continue
        phase[number] = max([phase[x] for x in operation.operands])
        if isinstance(operation, Contract):
            contractions.append(number)
            made = (x for x in operation.operands if isinstance(written.operations.get(x), Map))
            phase[number] = max([phase[number], *(phase[x] + 1 for x in made)])
    read = _read(written)
    targets = sorted([*contractions, *results], key=lambda n: (read[n], phase[n]))
    return _in_depth(written, targets)


def _read(written: _Written) -> dict[int, int]:
    """Of each value the set of arguments that it needs, of which the last one counts most."""
    found = {n: (0 if x.shared else 1 << n) for n, x in enumerate(written.program.inputs)}
    for number, operation in sorted(written.operations.items()):
        found[number] = 0
        for x in operation.operands:
            found[number] |= found[x]
    return found


def _in_depth(written: _Written, targets: Iterable[int]) -> list[int]:
    """What targets need, target by target, each after what it is made of."""
    order: dict[int, None] = {}
    left = [*targets][::-1]
    while left:
        number = left[-1]
        operation = written.operations.get(number)
        operands = () if operation is None else operation.operands
        missing = [x for x in dict.fromkeys(operands) if x not in order]
        if not missing:
            order[left.pop()] = None
        # What takes long to make comes first: less is there that waits for it.
        left += sorted(reversed(missing), key=written.height.__getitem__)
    return list(order)
