"""The normal form of a program: what every spelling of the same mathematics comes to.

The axes of a program's values are of two kinds.  Along *mode axes* a matrix that all elements share
is applied; the points that it makes are mode axes, too.  *Component axes* are the small rest: three
components of a vector, nine of a Jacobian, five fields of a fluid.  Labels say which axes of which
values are one; what some operation takes apart, or multiplies point by point, is components.

At the points everything is scalar: values are taken apart along component axes wherever they came
from, and what results is straight-line code on values at a point, in which equal operations are one
and what is zero by structure is gone (see :mod:`jaxmagma.builder`).  A field of several components
that goes through matrices stays one until somebody computes with its components.
"""

from collections.abc import Iterable, Sequence

from jaxmagma.builder import MOST_COMPONENTS, Builder, box_of, without_tables
from jaxmagma.memo import remembered
from jaxmagma.program import Contract, ElementProgram, Gather, Map, Output, Place, View


# Of small matrices at a point, and of how many values at a point there may be.
_LARGEST_MATRIX = 4
_MOST_PIECES = 64


@remembered
def normal_form(program: ElementProgram) -> tuple[ElementProgram, tuple[int, ...]]:
    """The same function of the same arrays; and which arguments are left."""
    program, kept = without_tables(program)
    rewritten, arguments = _rewritten(program)
    return rewritten, tuple(kept[n] for n in arguments)


# ---- Kinds of axes -------------------------------------------------------------------------------


class _Axes:
    """Axes of values, those that are one joined, and which are component axes."""

    def __init__(self, program: ElementProgram) -> None:
        self.tiles = program.tiles
        self._parent: dict[tuple[int, int], tuple[int, int]] = {}
        self._apart: set[tuple[int, int]] = set()
        for number, operation in enumerate(program.operations, start=len(program.inputs)):
            if isinstance(operation, Contract | Map):
                self._labelled(operation, number, program.batch)
            elif isinstance(operation, View):
                whole, where = operation.operand, (operation.offset, operation.strides)
                self._boxed(whole, number, box_of(self.tiles[whole], *where, operation.tile))
            elif isinstance(operation, Place):
                for value, offset, strides in operation.pieces:
                    box = box_of(operation.tile, offset, strides, self.tiles[value])
                    self._boxed(number, value, box)
            elif isinstance(operation, Gather):
                rank = len(self.tiles[operation.index])
                for axis in range(1, len(self.tiles[operation.vector])):
                    self._join((operation.vector, axis), (number, rank + axis - 1))

    def components(self, value: int) -> list[int]:
        """The component axes of a value, the last one first."""
        tile = self.tiles[value]
        apart = {self._root(x) for x in self._apart}
        found = [n for n in range(len(tile)) if self._root((value, n)) in apart]
        count = 1
        for axis in found:
            count *= tile[axis]
        return list(reversed(found)) if count <= _MOST_PIECES else []

    def _labelled(self, operation: Contract | Map, number: int, batch: Sequence[object]) -> None:
        first: dict[str, tuple[int, int]] = {}
        for value, labels in (*operation.terms, (number, operation.output)):
            for axis, label in enumerate(labels):
                self._join(first.setdefault(label, (value, axis)), (value, axis))
        differing = [(x, labels) for x, labels in operation.terms if batch[x]]
        if isinstance(operation, Map) or len(differing) < 2:
            return
        shared = set.intersection(*(set(labels) for _, labels in differing))
        if shared & set(operation.output):
            # Point by point: small matrices are multiplied component by component.
            for value, labels in differing:
                for axis, label in enumerate(labels):
                    small = self.tiles[value][axis] <= _LARGEST_MATRIX
                    if small and label not in shared & set(operation.output):
                        self._apart.add((value, axis))

    def _boxed(
        self, whole: int, part: int, box: Iterable[tuple[int, int, int, int | None]] | None
    ) -> None:
        for axis, (start, step, count, position) in enumerate(box or ()):
            extent = self.tiles[whole][axis]
            if (start, step, count) == (0, 1, extent) and position is not None:
                self._join((whole, axis), (part, position))
            elif 1 < extent <= MOST_COMPONENTS:
                self._apart.add((whole, axis))
                if position is not None:
                    self._apart.add((part, position))

    def _root(self, x: tuple[int, int]) -> tuple[int, int]:
        while x in self._parent:
            x = self._parent[x]
        return x

    def _join(self, x: tuple[int, int], y: tuple[int, int]) -> None:
        x, y = self._root(x), self._root(y)
        if x != y:
            self._parent[y] = x


# ---- Rewriting -----------------------------------------------------------------------------------


def _rewritten(program: ElementProgram) -> tuple[ElementProgram, tuple[int, ...]]:
    """The program with components taken apart, and which arguments are left."""
    axes = _Axes(program)
    builder = Builder(program.batch_rank, program.precision)
    whole: dict[int, int] = {}  # values as they are
    apart: dict[int, int] = {}  # and stacked of their components
    names: dict[int, int] = {}

    def components(number: int) -> int:
        value = whole[number]
        for axis in axes.components(number):
            count = builder.tile(value)[axis]
            value = builder.stack([builder.index(value, axis, k) for k in range(count)], axis)
        return value

    for number, operand in enumerate(program.inputs):
        known = operand.constant
        whole[number] = builder.input(operand) if known is None else builder.constant(known.array)
        if known is None:
            names[whole[number]] = len(names)
        apart[number] = components(number)
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Contract):
            terms = [value for value, _ in operation.terms]
            if all(x in whole for x in terms) and _through_matrices(program, operation, axes):
                own = [(whole[x], labels) for x, labels in operation.terms]
                whole[number] = builder.contract(own, operation.output, operation.extents)
                apart[number] = components(number)
                continue
        made = _copied(builder, operation, whole, apart)
        apart[number] = made
        if not axes.components(number):
            whole[number] = made
    outputs = [Output(whole.get(x.value, apart[x.value]), x.batch) for x in program.outputs]
    built = builder.build(outputs)
    if any(built.lost) or built.program.batch_rank != program.batch_rank:
        # No value depends on the elements along some axis any more, and results are to have it.
        return program, tuple(range(len(names)))
    return built.program, tuple(names[n] for n in built.inputs if n in names)


def _through_matrices(program: ElementProgram, operation: Contract, axes: _Axes) -> bool:
    """Whether a field of several components goes through matrices that all elements share."""
    batched = [(value, labels) for value, labels in operation.terms if program.batch[value]]
    if len(batched) != 1:
        return False
    ((value, labels),) = batched
    summed = {axis for axis, label in enumerate(labels) if label not in operation.output}
    return summed.isdisjoint(axes.components(value))


def _copied(
    builder: Builder,
    operation: Contract | Map | View | Place | Gather,
    whole: dict[int, int],
    apart: dict[int, int],
) -> int:
    if isinstance(operation, Contract):
        terms = [(apart[x], labels) for x, labels in operation.terms]
        return builder.contract(terms, operation.output, operation.extents)
    if isinstance(operation, Map):
        terms = [(apart[x], labels) for x, labels in operation.terms]
        function, output = operation.function, operation.output
        return builder.pointwise(function, terms, output, operation.extents)
    if isinstance(operation, View):
        where = operation.offset, operation.strides, operation.tile
        return builder.part(apart[operation.operand], *where)
    if isinstance(operation, Place):
        return builder.whole([(apart[x], *where) for x, *where in operation.pieces], operation.tile)  # type: ignore[misc]
    return builder.copy(operation, whole)
