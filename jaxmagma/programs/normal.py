"""The normal form of a program: what every spelling of the same mathematics comes to.

The axes of a program's values are of two kinds.  Along *mode axes* a matrix that all elements share
is applied; the points that it makes are mode axes, too.  *Component axes* are the small rest: three
components of a vector, nine of a Jacobian, five fields of a fluid.  Labels say which axes of which
values are one; what some operation takes apart, or multiplies point by point, is components.

At the points everything is scalar: values are taken apart along component axes wherever they came
from, a field of several components on its way through the matrices of its axes as well: it is
several fields.  Where there is one matrix for all axes, a dense table, a field goes through it with
all of its components at once.  What results is straight-line code on values at a point, in which
equal operations are one and what is zero by structure is gone (see
:mod:`jaxmagma.programs.builder`), in the order that no spelling has a part in (see
:mod:`jaxmagma.programs.canonical`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from jaxmagma.programs.axes import Axis, JoinedAxes
from jaxmagma.programs.builder import MOST_COMPONENTS, Builder
from jaxmagma.programs.canonical import canonical_form
from jaxmagma.programs.distribution import distributed, is_as_good, with_matrices_apart
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.multiples import with_fewer_products
from jaxmagma.programs.program import (
    Contract,
    ElementProgram,
    Gather,
    Map,
    Operation,
    Place,
    Terms,
    View,
    contraction,
)
from jaxmagma.programs.pruning import without_tables
from jaxmagma.programs.reshapes import with_axes_split
from jaxmagma.programs.strides import box_of, row_major
from jaxmagma.programs.weights import has_weighted_sums, with_weights_inside


# Of small matrices at a point, and of how many values at a point there may be.
_LARGEST_MATRIX = 4
_MOST_PIECES = 64
# More operations are those of many points: windows of a few values had better stay what they are.
_MANY_OPERATIONS = 3000
# Extents of axes of which some operation takes a part, and of matrices that are multiplied at each
# point, that are components; and those of what else were so many operations.
_Sizes = tuple[int, int]
_COMPONENTS: _Sizes = (MOST_COMPONENTS, _LARGEST_MATRIX)
_FEW_COMPONENTS: _Sizes = (_LARGEST_MATRIX, 3)
# A tensor of moduli, of four axes, has so many.
_MOST_MODULI = 81
# Of so many values at a point, those of a tensor of two axes, all elements may share a matrix.
_MOST_APPLIED = 9


@remembered
def normal_form(program: ElementProgram) -> tuple[ElementProgram, tuple[int, ...]]:
    """The same function of the same arrays; and which arguments are left."""
    program, kept = without_tables(program)
    program, kept = _with_weights_inside(with_axes_split(program), kept)
    spread = distributed(program)
    rewritten, arguments = _rewritten(spread)
    if len(rewritten.operations) > _MANY_OPERATIONS:
        whole, left = _rewritten(spread, _Axes(spread, sizes=_FEW_COMPONENTS))
        if len(whole.operations) * 2 < len(rewritten.operations):
            rewritten, arguments = whole, left
    apart = with_matrices_apart(program)
    if apart is not program and (other := distributed(apart)) is not apart:
        made, left = _rewritten(other)
        if is_as_good(made, rewritten):
            rewritten, arguments = made, left
    written, order = canonical_form(with_fewer_products(rewritten))
    return written, tuple(kept[arguments[n]] for n in order)


@remembered
def with_blocks_apart(program: ElementProgram) -> ElementProgram:
    """A normal form with the blocks of matrices apart that moduli are multiplied to.

    Where threads have places of a matrix, they have all of its blocks there in registers; a CPU
    makes all blocks by a product with the moduli.
    """
    axes = _Axes(program, moduli=True)
    if not axes.has_moduli:
        return program
    found, kept = _rewritten(program, axes)
    return found if len(kept) == len(program.arguments) else program


def _with_weights_inside(
    program: ElementProgram, kept: tuple[int, ...]
) -> tuple[ElementProgram, tuple[int, ...]]:
    """The program, and which arguments are left; components may have to be apart to see a sum."""
    found = with_weights_inside(program)
    if found is program and has_weighted_sums(program):
        apart, arguments = _rewritten(program)
        inside = with_weights_inside(apart)
        if inside is not apart:
            return inside, tuple(kept[n] for n in arguments)
    return found, kept


# ---- Kinds of axes -------------------------------------------------------------------------------


class _Axes(JoinedAxes):
    """Axes of values, those that are one joined, and which are component axes."""

    def __init__(
        self, program: ElementProgram, moduli: bool = False, sizes: _Sizes = _COMPONENTS
    ) -> None:
        super().__init__()
        self.program = program
        self._largest_part, self._largest_matrix = sizes
        self._apart: set[Axis] = set()
        numbered = list(enumerate(program.operations, start=len(program.inputs)))
        for number, operation in numbered:
            self._join_axes(number, operation)
        self._apart = set(map(self.root, self._apart))  # from here on no axes are joined
        products = [_product(program, x) for x in program.operations if isinstance(x, Contract)]
        modes = {x for product in products for x in self._modes(product)}
        self._apart -= modes
        applied = {
            axis
            for number, x in numbered
            if isinstance(x, Contract)
            for axis in self._applied(number, x)
        }
        for product in products:
            self._apart.update(set(self._small_at_points(product)) - modes)
            self._apart.update(set(self._small_sums(product)) - applied)
        while any([self._small_of_elements(product) for product in products]):
            pass
        self.has_moduli = False
        while moduli and any([self._of_moduli(product, modes) for product in products]):
            self.has_moduli = True

    def components(self, value: int) -> list[int]:
        """The component axes of a value, the last one first."""
        tile = self.program.tiles[value]
        found = [n for n in range(len(tile)) if self.root((value, n)) in self._apart]
        count = math.prod(tile[n] for n in found)
        are_moduli = len(tile) == 4 and not self.program.batch[value]
        most = _MOST_MODULI if are_moduli else _MOST_PIECES
        return list(reversed(found)) if count <= most else []

    # Axes of several values that are one, and axes along which some operation takes a part.

    def _join_axes(self, number: int, operation: Operation) -> None:
        tiles = self.program.tiles
        if isinstance(operation, Contract | Map):
            self.join_labelled([*operation.terms, (number, operation.output)])
        elif isinstance(operation, View):
            whole, where = operation.operand, (operation.offset, operation.strides)
            self._boxed(whole, number, box_of(tiles[whole], *where, operation.tile))
        elif isinstance(operation, Place):
            for value, offset, strides in operation.pieces:
                self._boxed(number, value, box_of(operation.tile, offset, strides, tiles[value]))
        else:
            rank = len(tiles[operation.index])
            for axis in range(1, len(tiles[operation.vector])):
                self.join((operation.vector, axis), (number, rank + axis - 1))

    def _boxed(
        self, whole: int, part: int, box: Iterable[tuple[int, int, int, int | None]] | None
    ) -> None:
        for axis, (start, step, count, position) in enumerate(box or ()):
            extent = self.program.tiles[whole][axis]
            if (start, step, count) == (0, 1, extent) and position is not None:
                self.join((whole, axis), (part, position))
            elif 1 < extent <= self._largest_part:
                self._apart.add((whole, axis))
                if position is not None:
                    self._apart.add((part, position))

    def _modes(self, product: Contract) -> Iterator[Axis]:
        """Axes along which a shared matrix is applied, and too many values were components.

        So the faces of an element, which are a part of it, leave the rest of it a field.
        """
        matrices = [labels for x, labels in product.terms if not self.program.batch[x]]
        applied = {x for labels in matrices for x in labels if x not in product.output}
        for value, labels in _batched(self.program, product):
            roots = [self.root((value, axis)) for axis in range(len(labels))]
            for root in {roots[axis] for axis, label in enumerate(labels) if label in applied}:
                own = (n for n, x in enumerate(roots) if x == root)
                if math.prod(self.program.tiles[value][n] for n in own) > _MOST_APPLIED:
                    yield root

    def _applied(self, number: int, product: Contract) -> Iterator[Axis]:
        """Axes along which a shared matrix is applied, or which it makes, however many values."""
        output = set(product.output)
        matrices = [set(labels) for x, labels in product.terms if not self.program.batch[x]]
        applied = {label for labels in matrices if labels - output for label in labels}
        for value, labels in (*_batched(self.program, product), (number, product.output)):
            yield from (self.root((value, n)) for n, x in enumerate(labels) if x in applied)

    # Small matrices.

    def _small_at_points(self, product: Contract) -> Iterator[Axis]:
        """Matrices that are multiplied point by point are, component by component."""
        batched = _batched(self.program, product)
        points = _points(product, batched)
        if points:
            for value, labels in batched:
                for axis, label in enumerate(labels):
                    if (
                        self.program.tiles[value][axis] <= self._largest_matrix
                        and label not in points
                    ):
                        yield self.root((value, axis))

    def _small_sums(self, product: Contract) -> Iterator[Axis]:
        """The axes of a sum at each point, without a matrix."""
        if len(product.terms) == 1 and product.output:
            ((value, labels),) = product.terms
            for axis, label in enumerate(labels):
                small = self.program.tiles[value][axis] <= self._largest_matrix
                if small and label not in product.output:
                    yield self.root((value, axis))

    def _of_moduli(self, product: Contract, modes: Set[Axis]) -> bool:
        """What a small tensor that all elements share makes of others of components, or alone.

        Blocks of an element's matrix are sums of products, each times some of the moduli. What a
        matrix makes, of one axis, may be points.
        """
        batched, before = _batched(self.program, product), len(self._apart)
        others = {label for _, labels in batched for label in labels}
        for value, labels in product.terms:
            own = {label: self.root((value, axis)) for axis, label in enumerate(labels)}
            made = {x: own[x] for x in set(product.output) & own.keys() - others}
            extents = [product.extents[x] for x in made]
            small = min(extents, default=1) > 1 and math.prod(extents) <= _MOST_APPLIED
            used = own.keys() - made.keys()
            table = used and min(len(used), len(made)) == 1
            if self.program.batch[value] or not batched or not small or table:
                continue
            if all(own[x] in self._apart for x in used):
                self._apart.update(set(made.values()) - modes)
        return len(self._apart) > before

    def _small_of_elements(self, product: Contract) -> bool:
        """A matrix of the element, applied at every point, has no other axes than components."""
        batched = _batched(self.program, product)
        points, before = _points(product, batched), len(self._apart)
        for position, (value, labels) in enumerate(batched):
            others = set("".join(x for n, (_, x) in enumerate(batched) if n != position))
            small = max(self.program.tiles[value], default=1) <= self._largest_matrix
            if small and self.components(value) and others & set(product.output) - set(labels):
                own = (n for n, label in enumerate(labels) if label not in points)
                self._apart.update(self.root((value, n)) for n in own)
        return len(self._apart) > before


def _product(program: ElementProgram, product: Contract) -> Contract:
    """A sum of products, written as one of the factors; any other contraction as it is."""
    value = product.operands[0] - len(program.inputs)
    factors = program.operations[value] if value >= 0 else None
    if len(product.terms) > 1 or not isinstance(factors, Map) or factors.function != "mul":
        return product
    names = dict(zip(factors.output, product.terms[0][1], strict=True))
    terms = [(x, "".join(names[label] for label in labels)) for x, labels in factors.terms]
    return contraction(terms, product.output, product.extents)


def _batched(program: ElementProgram, product: Contract) -> Terms:
    """The operands of a product that differ from element to element."""
    return [(value, labels) for value, labels in product.terms if program.batch[value]]


def _points(product: Contract, batched: Terms) -> set[str]:
    """The labels of a product that all of its operands have that differ from element to element."""
    if len(batched) < 2:
        return set()
    return set.intersection(*(set(labels) for _, labels in batched)) & set(product.output)


# ---- Rewriting -----------------------------------------------------------------------------------


def _rewritten(
    program: ElementProgram, axes: _Axes | None = None
) -> tuple[ElementProgram, tuple[int, ...]]:
    """The program with components taken apart, and which arguments are left."""
    axes = axes or _Axes(program)
    builder = Builder(program.batch_rank, program.precision, summing=False)
    whole: dict[int, int] = {}  # inputs, what is gathered, and what came through dense tables
    numbers: dict[int, int] = {}
    arguments: dict[int, int] = {}
    tables = _tables(program, axes)
    for number, operand in enumerate(program.inputs):
        known = operand.constant
        if known is None:
            whole[number] = builder.input(operand)
            arguments[whole[number]] = len(arguments)
        elif number in tables:
            whole[number] = _table(builder, known.array)
        else:
            whole[number] = builder.constant(known.array)
        numbers[number] = _components(builder, whole[number], axes.components(number))
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Gather):
            whole[number] = builder.copy(operation, whole)
            numbers[number] = _components(builder, whole[number], axes.components(number))
        elif isinstance(operation, Contract) and _stays_whole(program, operation, axes, whole):
            terms = [
                (whole[x] if x in whole else builder.joined(numbers[x]), labels)
                for x, labels in operation.terms
            ]
            whole[number] = builder.contract(terms, operation.output, operation.extents)
            numbers[number] = _components(builder, whole[number], axes.components(number))
        else:
            numbers[number] = builder.of_parts(operation, numbers)
    results = [
        whole[x.value] if x.value in whole else builder.joined(numbers[x.value])
        for x in program.outputs
    ]
    outputs = [replace(x, value=n) for x, n in zip(program.outputs, results, strict=True)]
    built = builder.build(outputs)
    if built.program.batch_rank != program.batch_rank or any(
        not program.batch[out.value] <= builder.batch(number) | set(out.batch)
        for out, number in zip(program.outputs, results, strict=True)
    ):
        # Some value does not depend on all elements any more, and results count them.
        return program, tuple(range(len(arguments)))
    kept = tuple(arguments[n] for n in built.inputs if n in arguments)
    return built.program, kept


def _stays_whole(
    program: ElementProgram, operation: Contract, axes: _Axes, whole: Mapping[int, int]
) -> bool:
    """Whether a field goes through a table that has all of its axes, or sums its components.

    Where each component has a matrix of its own along one of several axes, it is a field by itself.
    What has come through one is also put in another order as it is.
    """
    batched = _batched(program, operation)
    if len(batched) != 1:
        return False
    ((value, labels),) = batched
    if len(operation.terms) == 1:
        return value in whole and set(labels) == set(operation.output)
    components = axes.components(value)
    modes = [label for axis, label in enumerate(labels) if axis not in components]
    summed = any(label not in operation.output for label in modes)
    tabled = any(
        _has_components(operation, own, axes.components(x))
        for x, own in operation.terms
        if x != value
    )
    return summed and (len(modes) == 1 or tabled)


def _has_components(operation: Contract, labels: str, components: Sequence[int]) -> bool:
    """Whether a table with these component axes is more than a matrix for each of what it makes."""
    own = {labels[axis] for axis in components}
    made = set(labels) & set(operation.output) - own
    return bool(own) and (not own <= set(operation.output) or not made)


def _tables(program: ElementProgram, axes: _Axes) -> set[int]:
    """Constant matrices that nothing but contractions reads, and that are not taken apart."""
    others = {x for y in program.operations if not isinstance(y, Contract) for x in y.operands}
    others.update(out.value for out in program.outputs)
    return {
        number
        for number, operand in enumerate(program.inputs)
        if operand.constant is not None and len(operand.tile) == 2
        if number not in others and not axes.components(number)
    }


def _table(builder: Builder, array: np.ndarray) -> int:
    """The matrix with its longer axis first: so a transposed one is no other."""
    if array.shape[0] >= array.shape[1]:
        return builder.constant(array)
    return builder.transpose(builder.constant(array.T), (1, 0))


def _components(builder: Builder, value: int, axes: Sequence[int]) -> int:
    """The value as a stack of its components along these axes, the last first: views of it."""
    tile = builder.tile(value)
    strides = row_major(tile)
    kept = [n for n in range(len(tile)) if n not in axes]
    below, steps = tuple(tile[n] for n in kept), tuple(strides[n] for n in kept)

    def stacked(offset: int, left: Sequence[int]) -> int:
        if not left:
            return builder.view(value, offset, steps, below)
        axis, *others = left
        parts = [stacked(offset + k * strides[axis], others) for k in range(tile[axis])]
        return builder.stack(parts, axis)

    return stacked(0, axes)
