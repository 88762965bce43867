"""Axes that a reshape makes one, or several, as the smaller ones that both sides are made of.

``f.reshape(3, 3, -1)`` makes one axis of all axes of points, so that a function of a point can be
mapped along it. In memory nothing changes: an axis of 64 places is one of 4 × 4 × 4 places. Where
axes are followed by labels, as by the normal form, they had better have one name on both sides.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxmagma.programs.axes import Axis, JoinedAxes
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Contract, ElementProgram, Gather, Map, View
from jaxmagma.programs.strides import row_major


def with_axes_split(program: ElementProgram) -> ElementProgram:
    """The same program, its values between inputs and outputs with as many axes as are needed."""
    split = _Axes(program).split()
    return _rewritten(program, split) if split else program


# ---- Where axes are cut --------------------------------------------------------------------------


class _Axes(JoinedAxes):
    """Axes of values, those that are one joined, and the places at which they are cut.

    A cut is the number of places along an axis that are on its inner side.
    """

    def __init__(self, program: ElementProgram) -> None:
        super().__init__()
        self.program = program
        self._cuts: dict[Axis, set[int]] = {}
        self._whole: set[Axis] = set()  # axes that stay as they are
        # Of each reshape, axes of either side with their strides in memory.
        self._reshapes: list[list[tuple[Axis, int]]] = []
        for number, operation in enumerate(program.operations, start=len(program.inputs)):
            if isinstance(operation, Contract | Map):
                self._labelled(number, operation)
            elif isinstance(operation, Gather):
                self._whole.update((number, n) for n in range(len(operation.tile)))
            elif isinstance(operation, View):
                self._moved(operation.operand, number, operation.offset, operation.strides)
            else:
                for value, offset, strides in operation.pieces:
                    self._moved(number, value, offset, strides)

    def split(self) -> dict[Axis, tuple[int, ...]]:
        """The extents of all axes that are cut, the slowest first."""
        changed = bool(self._reshapes)
        while changed:
            changed = any([self._meet(reshape) for reshape in self._reshapes])
        whole = {self.root(x) for x in self._whole}
        found: dict[Axis, tuple[int, ...]] = {}
        for number, tile in enumerate(self.program.tiles):
            for axis, extent in enumerate(tile):
                root = self.root((number, axis))
                cuts = [1, *sorted(self._cuts.get(root, ())), extent]
                if len(cuts) > 2 and root not in whole:
                    if all(y % x == 0 for x, y in itertools.pairwise(cuts)):
                        extents = [y // x for x, y in itertools.pairwise(cuts)]
                        found[number, axis] = tuple(reversed(extents))
        return found

    def _labelled(self, number: int, operation: Contract | Map) -> None:
        self.join_labelled([*operation.terms, (number, operation.output)])
        for value, labels in operation.terms:
            # Along the axes of a matrix that is applied, a table of all of them is one product.
            if not self.program.batch[value] and len(labels) > 1:
                if not set(labels) <= set(operation.output):
                    self._whole.update((value, n) for n in range(len(labels)))

    def _moved(self, whole: int, part: int, offset: int, strides: Sequence[int]) -> None:
        """Notes a reshape of all places along some axes; others of ``whole`` may be taken apart."""
        tiles = self.program.tiles
        outer = [((whole, n), x) for n, x in enumerate(row_major(tiles[whole]))]
        inner = sorted((((part, n), x) for n, x in enumerate(strides)), key=lambda x: x[1])
        outer = [x for x in outer if self._extent(x[0]) > 1]
        inner = [x for x in inner if self._extent(x[0]) > 1]
        runs: list[list[tuple[Axis, int]]] = []
        for axis, stride in inner:
            if runs and stride == self._end(*runs[-1][-1]):
                runs[-1].append((axis, stride))
            elif stride > 0:
                runs.append([(axis, stride)])
        for run in runs:
            begin, end = run[0][1], self._end(*run[-1])
            covered = [x for x in outer if x[1] >= begin and self._end(*x) <= end]
            at_first = all(offset // x % self._extent(axis) == 0 for axis, x in covered)
            if not covered or not at_first:
                continue
            begin, end = covered[-1][1], self._end(*covered[0])
            own = [x for x in run if x[1] >= begin and self._end(*x) <= end]
            if own and (own[0][1], self._end(*own[-1])) == (begin, end):
                self._reshapes.append([*covered, *own])

    def _meet(self, reshape: Sequence[tuple[Axis, int]]) -> bool:
        """Cuts axes where others end or are cut; says whether there was one to cut."""
        places = {x for axis, stride in reshape for x in self._places(axis, stride)}
        changed = False
        for axis, stride in reshape:
            for place in places:
                if stride < place < self._end(axis, stride):
                    cut, rest = divmod(place, stride)
                    cuts = self._cuts.setdefault(self.root(axis), set())
                    if not rest and self._extent(axis) % cut == 0 and cut not in cuts:
                        cuts.add(cut)
                        changed = True
        return changed

    def _places(self, axis: Axis, stride: int) -> Iterator[int]:
        cuts = self._cuts.get(self.root(axis), ())
        yield from (stride, self._end(axis, stride), *(cut * stride for cut in cuts))

    def _extent(self, axis: Axis) -> int:
        return self.program.tiles[axis[0]][axis[1]]

    def _end(self, axis: Axis, stride: int) -> int:
        return stride * self._extent(axis)


# ---- Rewriting -----------------------------------------------------------------------------------


def _rewritten(program: ElementProgram, split: dict[Axis, tuple[int, ...]]) -> ElementProgram:
    builder = Builder(program.batch_rank, program.precision, summing=False)

    def factors(value: int) -> list[tuple[int, ...]]:
        tile = program.tiles[value]
        return [split.get((value, n), (extent,)) for n, extent in enumerate(tile)]

    def tile_of(value: int) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(factors(value)))

    def steps(value: int, strides: Iterable[int]) -> tuple[int, ...]:
        """The strides of the axes that axes of these strides are split into."""
        found = zip(factors(value), strides, strict=True)
        return tuple(stride * x for own, stride in found for x in row_major(own))

    def reshaped(value: int, tile: tuple[int, ...]) -> int:
        return builder.view(value, 0, row_major(tile), tile)

    numbers: dict[int, int] = {}
    given: list[int] = []
    for number, operand in enumerate(program.inputs):
        given.append(builder.input(operand))
        numbers[number] = reshaped(given[-1], tile_of(number))
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Contract | Map):
            axes = {
                label: own
                for value, labels in (*operation.terms, (number, operation.output))
                for label, own in zip(labels, factors(value), strict=True)
            }
            new = iter(letters(sum(map(len, axes.values()))))
            names = {label: "".join(next(new) for _ in own) for label, own in axes.items()}
            sizes = {
                x: n for old, own in axes.items() for x, n in zip(names[old], own, strict=True)
            }
            terms = [
                (numbers[value], "".join(map(names.__getitem__, labels)))
                for value, labels in operation.terms
            ]
            output = "".join(map(names.__getitem__, operation.output))
            numbers[number] = builder.again(operation, terms, output, sizes)
        elif isinstance(operation, Gather):
            numbers[number] = builder.copy(operation, dict(enumerate(given)))
        elif isinstance(operation, View):
            strides, tile = steps(number, operation.strides), tile_of(number)
            numbers[number] = builder.view(
                numbers[operation.operand], operation.offset, strides, tile
            )
        else:
            pieces = [(numbers[x], at, steps(x, strides)) for x, at, strides in operation.pieces]
            numbers[number] = builder.place(pieces, tile_of(number))
    outputs = [
        replace(x, value=reshaped(numbers[x.value], program.tiles[x.value]))
        for x in program.outputs
    ]
    return builder.build(outputs).program
