"""Tables are applied to values of an element, not to sums of tables that an element has made.

Gradients of shape functions in an element are sums of tables, each times a value of the element:
``g = G @ inv(J)``, computed once and used wherever a gradient is taken. As a value of its own ``g``
has all nodes at all points. Applied to what ``g`` is, a sum of products, the products are those of
tables that all elements share, each with as few values as the element has::

    (a A + b B) u = a (A u) + b (B u)         weights of points that the result has
    (a A + b B)^T v = A^T (a v) + B^T (b v)   weights of points that are summed over

A weight of the whole element may be multiplied before or after, as leaves fewer products: ``A u``
serves all directions in which a field is derived, and what is multiplied with ``A^T`` is added up
before. So ``g`` and what the einsum of ``G``, ``inv(J)`` and ``u`` would have been come to the same
few products.

An inverse is computed component by component, and so is the product of ``G`` with it. The product
with a matrix that is an argument, or comes from nodes, is a contraction, and a sum of tables once
the matrix is taken apart.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.labels import canonical, letters
from jaxmagma.programs.program import (
    Constant,
    Contract,
    ElementProgram,
    Gather,
    Map,
    Operation,
)
from jaxmagma.programs.strides import row_major


# How many more operations these may take, which are products of matrices with many elements.
_AS_GOOD = 1.1
# Functions of sums of tables that may be sums of tables.
_OF_SUMS = ("add", "mul", "neg", "sub")
# The rows and columns of a small matrix.
_LARGEST_MATRIX = 4


def distributed(program: ElementProgram) -> ElementProgram:
    """The program with products of tables, where that takes no more operations."""
    if not any(_has_weights(program, x) for x in program.operations):
        return program
    first = _Distribution(program)
    found = first.program()
    if not first.products:
        return program
    if first.has_choices:
        found = _Distribution(program, first.uses_of_pairs()).program()
    if is_as_good(found, program):
        return found
    # A matrix of the element needs ``g`` itself, but values at points need not wait for it. (What
    # shares products of tiles goes on to do so.)
    found = _Distribution(program, to_points=True).program()
    return found if _flops(found) <= _AS_GOOD * _flops(program) else program


def is_as_good(program: ElementProgram, other: ElementProgram) -> bool:
    """Whether a program with products of tables takes no more operations than another one.

    Products of one of an element's tiles with several share what they read, and are as good.
    """
    return _flops(program) <= (1 if _shares(other) else _AS_GOOD) * _flops(other)


def _shares(program: ElementProgram) -> bool:
    """Whether a tile of an element has products with more than two, each of which is a matrix."""
    uses = Counter(
        x
        for operation in program.operations
        if isinstance(operation, Contract) and len(operation.terms) == len(operation.output) == 2
        for x, _ in operation.terms
        if all(program.batch[y] and len(own) == 2 for y, own in operation.terms)
    )
    return max(uses.values(), default=0) > 2


def _has_weights(program: ElementProgram, operation: Operation) -> bool:
    """Whether a table is multiplied by a value of an element that has fewer axes."""
    if not isinstance(operation, Map) or operation.function != "mul":
        return False
    tables = [x for x, labels in operation.terms if not program.batch[x] and len(labels) > 1]
    sizes = {len(labels) for _, labels in operation.terms}
    return len(tables) == 1 and len(sizes) == 2


def _flops(program: ElementProgram) -> int:
    """Operations for each element."""
    first = len(program.inputs)
    return sum(_operations(x) for n, x in enumerate(program.operations, first) if program.batch[n])


def _operations(operation: Operation) -> int:
    if isinstance(operation, Map):
        return math.prod(operation.tile) * FUNCTIONS[operation.function].flops
    if isinstance(operation, Contract) and len(operation.terms) > 1:
        return 2 * math.prod(operation.extents.values())
    return 0


# ---- Matrices of an element ----------------------------------------------------------------------


def with_matrices_apart(program: ElementProgram) -> ElementProgram:
    """The program with small matrices taken apart that tables are multiplied by."""
    matrices = _matrices(program)
    if not matrices:
        return program
    builder = Builder(program.batch_rank, program.precision, summing=False)
    whole = inputs_in(program, builder)
    apart = dict(whole)
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if number in matrices:
            value, axes = matrices[number]
            apart[value] = builder.apart(apart[value], axes)
        gathers = isinstance(operation, Gather)
        whole[number] = builder.of_parts(operation, whole if gathers else apart)
        apart[number] = whole[number]
    outputs = [replace(x, value=builder.joined(whole[x.value])) for x in program.outputs]
    found = builder.build(outputs).program
    # Components that nobody needs may have been all that is needed of an argument.
    return found if found.arguments == program.arguments else program


def inputs_in(program: ElementProgram, builder: Builder) -> dict[int, int]:
    """The numbers that a program's inputs have in another one."""
    return {
        number: builder.input(x) if x.constant is None else builder.constant(x.constant.array)
        for number, x in enumerate(program.inputs)
    }


def _matrices(program: ElementProgram) -> dict[int, tuple[int, list[int]]]:
    """Products of tables and small matrices: of each the matrix, and its axes.

    Only products that are used more than once, and not as they are: what is used once is planned
    together with its use.
    """
    found: dict[int, tuple[int, list[int]]] = {}
    sums: set[int] = set()  # of tables, which are as good as tables
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Contract):
            matrix = _matrix(program, operation, sums)
            if matrix is not None:
                found[number] = matrix
                sums.add(number)
        elif isinstance(operation, Map):
            of_sums = operation.function in _OF_SUMS and not sums.isdisjoint(operation.operands)
            if of_sums or _has_weights(program, operation):
                sums.add(number)
    whole = {x.value for x in program.outputs}
    uses: Counter[int] = Counter()
    for number in reversed(range(len(program.inputs), len(program.tiles))):
        operation = program.operations[number - len(program.inputs)]
        if isinstance(operation, Contract) and len(operation.terms) > 1 and number not in found:
            uses.update(operation.operands)
            continue
        for value in operation.operands:
            uses[value] += min(2, uses[number])
        other = isinstance(operation, Map) and operation.function not in _OF_SUMS
        if number in whole or other:
            whole.update(operation.operands)
    return {x: y for x, y in found.items() if x not in whole and uses[x] > 1}


def _matrix(
    program: ElementProgram, operation: Contract, sums: Set[int]
) -> tuple[int, list[int]] | None:
    """The small matrix that a table is multiplied by, and its axes.

    The table has two axes or more left that are no shorter than those summed over. So it is not
    applied to values of nodes, which may be few, too.
    """
    if len(operation.terms) != 2:
        return None
    for (table, own), (value, labels) in (operation.terms, operation.terms[::-1]):
        left = {x for x in own if x in operation.output}
        axes = [n for n, x in enumerate(labels) if x not in left]
        small = 1 < max((program.tiles[value][n] for n in axes), default=1) <= _LARGEST_MATRIX
        summed = max((operation.extents[x] for x in own if x not in left), default=1)
        long = sum(operation.extents[x] >= summed for x in left)
        is_table = not program.batch[table] or table in sums
        if is_table and program.batch[value] and small and long > 1:
            return value, axes
    return None


# ---- Sums of tables and products with them -------------------------------------------------------


# A value and its labels.
_Term = tuple[int, str]
# A table and what it is applied to, which may be weights alone.
_Pair = tuple[int, int | None]
# A value that is added to products or taken from them, and the axes of the sum that it has.
_Addend = tuple[int, tuple[int, ...], bool]


@dataclass(frozen=True)
class _Weighted:
    """A table, all of whose axes a value has, and in another order maybe; times a weight.

    ``axes`` and ``along`` are axes of the value that those of the table and of the weight are.
    """

    table: int
    axes: tuple[int, ...]
    weight: int
    along: tuple[int, ...]

    def terms(self, labels: str) -> tuple[_Term, _Term]:
        """The table and the weight, where the value has these labels."""
        table, weight = ("".join(labels[n] for n in axes) for axes in (self.axes, self.along))
        return (self.table, table), (self.weight, weight)


@dataclass(frozen=True)
class _Product:
    """A table applied to a value, or to another table, but for the weights.

    Attributes:
      output: the labels of the result.
      table: what is applied.
      other: to what; to the weights alone, if None.
      weight: the labels of weights.
      sizes: of all labels.
    """

    output: str
    table: _Term
    other: _Term | None
    weight: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def may_be_before(self) -> bool:
        """Whether weights can be multiplied with what the table is applied to."""
        return self.other is None or set(self.weight) <= set(self.other[1])

    @property
    def may_be_after(self) -> bool:
        """Whether they can be multiplied with the result."""
        return self.other is not None and set(self.weight) <= set(self.output)

    @property
    def pair(self) -> _Pair:
        return self.table[0], None if self.other is None else self.other[0]

    @property
    def applied(self) -> str:
        """The labels of what the table is applied to."""
        return self.weight if self.other is None else self.other[1]


class _Distribution:
    """Writes a program anew, value by value.

    ``pairs`` says how many sums have a product of a table and a value, where that is known, and
    ``to_points`` that no products are wanted but of tables with values, with weights afterwards.
    Numbers of weights are those of the new program, all others of the old one.
    """

    def __init__(
        self,
        program: ElementProgram,
        pairs: Mapping[_Pair, int] | None = None,
        to_points: bool = False,
    ) -> None:
        self.old = program
        self.to_points = to_points
        self.wholes = _wholes(program) if to_points else {}
        self.builder = Builder(program.batch_rank, program.precision, summing=False)
        self.pairs = pairs or {}
        self.numbers: dict[int, int] = {}
        self.sums: dict[int, list[_Weighted]] = {}
        self.products: dict[int, dict[_Product, int]] = {}  # and the weights of each
        self.rest: dict[int, list[_Addend]] = {}  # of sums with products
        self.merged: set[int] = set()  # into the products of a sum
        uses = [x for operation in program.operations for x in operation.operands]
        self.uses = Counter([*uses, *(x.value for x in program.outputs)])

    def program(self) -> ElementProgram:
        builder = self.builder
        self.numbers = inputs_in(self.old, builder)
        for number, operation in enumerate(self.old.operations, start=len(self.old.inputs)):
            if isinstance(operation, Map):
                self._of_map(number, operation)
            elif isinstance(operation, Contract):
                products = self._of_contraction(operation)
                if products:
                    self.products[number] = products
            if number in self.products:
                self.numbers[number] = self._total(number)
            else:
                self.numbers[number] = self._copied(operation)
        outputs = [replace(x, value=self.numbers[x.value]) for x in self.old.outputs]
        return builder.build(outputs).program

    @property
    def has_choices(self) -> bool:
        """Whether weights may be on either side of some product."""
        return any(self._is_choice(x) for products in self.products.values() for x in products)

    def uses_of_pairs(self) -> Counter[_Pair]:
        """In how many sums each product of a table and a value is."""
        sums = (x for n, x in self.products.items() if n not in self.merged)
        return Counter(x.pair for products in sums for x in products)

    def _copied(self, operation: Operation) -> int:
        numbers = self.numbers
        if isinstance(operation, Contract | Map):
            terms = [(numbers[x], labels) for x, labels in operation.terms]
            return self.builder.again(operation, terms, operation.output)
        return self.builder.copy(operation, numbers)

    # ---- Sums of tables --------------------------------------------------------------------------

    def _of_map(self, number: int, operation: Map) -> None:
        """Notes what a pointwise function of sums is, if it is a sum."""
        name, terms = operation.function, operation.terms
        if name == "mul":
            for term, other in (terms, terms[::-1]):
                self._scaled(number, operation, term, other)
        elif name in ("add", "sub", "neg"):
            negative = [name == "neg"] if len(terms) == 1 else [False, name == "sub"]
            values = [x for x, _ in terms]
            tables = [x for x in values if not self.old.batch[x] and len(operation.output) > 1]
            whole = all(x == operation.output for _, x in terms)
            sums = len(tables) < len(values) and all(x in self.sums or x in tables for x in values)
            if whole and sums:
                self.sums[number] = self._added(zip(values, negative, strict=True))
            elif any(self._is_merged(x, operation.output) for x in terms):
                self._merge(number, operation.output, zip(terms, negative, strict=True))

    def _scaled(self, number: int, operation: Map, term: _Term, other: _Term) -> None:
        """Of a table, or a sum of some, times a weight that has fewer axes."""
        (value, labels), (weight, along) = term, other
        output = operation.output
        shared = not self.old.batch[value] and len(labels) > 1
        if sorted(labels) != sorted(output) or not set(along) < set(output):
            return
        if value not in self.sums and not (shared and self.old.batch[weight]):
            return
        by, moved = (self.numbers[weight], _places(along, output)), _places(labels, output)
        if value not in self.sums:
            self.sums[number] = [_Weighted(value, moved, *by)]
            return
        self.sums[number] = []
        for x in self.sums[value]:
            own, axes = (tuple(moved[n] for n in y) for y in (x.along, x.axes))
            made = self._combined("mul", number, (x.weight, own), by)
            self.sums[number].append(_Weighted(x.table, axes, *made))

    def _added(self, values: Iterable[tuple[int, bool]]) -> list[_Weighted]:
        """The sum of sums, some of them negative, with one weight for each table."""
        found: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        for value, negative in values:
            for x in self.sums.get(value) or [self._once(value)]:
                key, weight = (x.table, x.axes), (x.weight, x.along)
                if negative:
                    weight = self.builder.map("neg", x.weight), x.along
                if key in found:
                    weight = self._combined("add", value, found[key], weight)
                found[key] = weight
        return [_Weighted(*key, *weight) for key, weight in found.items()]

    def _once(self, table: int) -> _Weighted:
        one = self.builder.constant(np.ones((), self.old.dtype))
        return _Weighted(table, tuple(range(len(self.old.tiles[table]))), one, ())

    def _combined(
        self,
        function: str,
        value: int,
        left: tuple[int, tuple[int, ...]],
        right: tuple[int, tuple[int, ...]],
    ) -> tuple[int, tuple[int, ...]]:
        """A function of two weights along axes of a value."""
        tile = self.old.tiles[value]
        labels = letters(len(tile))
        first, second = ((x, "".join(labels[n] for n in own)) for x, own in (left, right))
        sizes = dict(zip(labels, tile, strict=True))
        made, output = self._of_weights(function, first, second, sizes)
        return made, tuple(map(labels.index, output))

    def _of_weights(
        self, function: str, left: _Term, right: _Term, sizes: Mapping[str, int]
    ) -> _Term:
        output = "".join(sorted({*left[1], *right[1]}))
        return self.builder.pointwise(function, [left, right], output, sizes), output

    # ---- Products with them ----------------------------------------------------------------------

    def _of_contraction(self, operation: Contract) -> dict[_Product, int] | None:
        """A product with a sum of tables as products with each, if it is one that can be."""
        if len(operation.terms) == 1:
            return self._added_up(operation, *operation.terms[0])
        if len(operation.terms) != 2:
            return None
        for term, other in (operation.terms, operation.terms[::-1]):
            repeated = any(len(set(labels)) < len(labels) for _, labels in (term, other))
            summed = set(term[1]) - set(operation.output)
            # What a table is applied to may as well be a sum of some.
            if term[0] in self.sums and self.old.batch[other[0]] and summed and not repeated:
                return self._multiplied(operation, term, other)
        return None

    def _multiplied(
        self, operation: Contract, term: _Term, other: _Term
    ) -> dict[_Product, int] | None:
        found: dict[_Product, int] = {}
        for left in self.sums[term[0]]:
            table, weight = left.terms(term[1])
            for right in self.sums.get(other[0], [None]):
                applied, by = other, weight
                if right is not None:
                    applied, more = right.terms(other[1])
                    by = self._of_weights("mul", weight, more, operation.extents)
                product, number = _product(operation, table, applied, by)
                if not (product.may_be_before or product.may_be_after):
                    return None
                if self.to_points and (product.may_be_before or right is not None):
                    return None
                self._add(found, product, number)
        return found

    def _added_up(self, operation: Contract, value: int, labels: str) -> dict[_Product, int] | None:
        """A sum of tables, added up along some axes, as products of these with their weights."""
        if value not in self.sums or not len(operation.output) < len(set(labels)) == len(labels):
            return None
        found: dict[_Product, int] = {}
        for x in self.sums[value]:
            table, weight = x.terms(labels)
            if not set(weight[1]) - set(operation.output):
                return None  # tables can be added up beforehand
            product, number = _product(operation, table, None, weight)
            self._add(found, product, number)
        return found

    def _is_merged(self, term: _Term, output: str) -> bool:
        """Whether what is added are products that are nothing else."""
        value, labels = term
        return value in self.products and self.uses[value] == 1 and labels == output

    def _merge(self, number: int, output: str, terms: Iterable[tuple[_Term, bool]]) -> None:
        """Notes the products of several sums of them, some negative, and what else is added."""
        found: dict[_Product, int] = {}
        rest: list[_Addend] = []
        for (value, labels), negative in terms:
            if not self._is_merged((value, labels), output):
                rest.append((value, _places(labels, output), negative))
                continue
            self.merged.add(value)
            for product, weight in self.products[value].items():
                own = self.builder.map("neg", weight) if negative else weight
                self._add(found, product, own)
            rest += [(x, axes, own != negative) for x, axes, own in self.rest.get(value, ())]
        self.products[number], self.rest[number] = found, rest

    def _add(self, found: dict[_Product, int], product: _Product, weight: int) -> None:
        before = found.get(product)
        found[product] = weight if before is None else self.builder.map("add", before, weight)

    def _total(self, number: int) -> int:
        """The sum of products; those with one table and weights before are one product."""
        builder, products = self.builder, self.products[number]
        alone: list[int] = []
        groups: dict[tuple[_Term, str], list[_Product]] = {}
        for product in products:
            groups.setdefault((product.table, product.applied), []).append(product)
        for group in groups.values():
            sizes, output = dict(group[0].sizes), group[0].output
            weighted = []
            before = self._are_before(group)
            (table, labels), applied = group[0].table, group[0].applied
            own = self.numbers[table], labels
            for product in group:
                weight = products[product], product.weight
                if product.other is None:
                    weighted.append(weight[0])
                    continue
                other = self.numbers[product.other[0]], applied
                if product.may_be_before and (before or not product.may_be_after):
                    weighted.append(builder.pointwise("mul", [other, weight], applied, sizes))
                else:
                    made = self._applied(table, labels, other, output, sizes)
                    terms = [(made, output), weight]
                    alone.append(builder.pointwise("mul", terms, output, sizes))
            if weighted:
                terms = [own, (builder.sum(weighted), applied)]
                alone.append(builder.contract(terms, output, sizes))
        return self._with_rest(number, builder.sum(alone))

    def _applied(
        self, table: int, labels: str, other: _Term, output: str, sizes: Mapping[str, int]
    ) -> int:
        """A table applied to a value; of one that is part of another, what that makes there."""
        if table not in self.wholes:
            return self.builder.contract([(self.numbers[table], labels), other], output, sizes)
        whole, axis, k = self.wholes[table]
        extent = self.old.tiles[whole][axis]
        label = next(x for x in letters(len(sizes) + 1) if x not in sizes)
        own = self.numbers[whole], labels[:axis] + label + labels[axis:]
        made = self.builder.contract([own, other], output + label, {**sizes, label: extent})
        tile = self.builder.tile(made)
        return self.builder.view(made, k, row_major(tile)[:-1], tile[:-1])

    def _with_rest(self, number: int, total: int) -> int:
        """The sum of products and all that is added to them."""
        tile = self.old.tiles[number]
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        for value, axes, negative in self.rest.get(number, ()):
            term = self.numbers[value], "".join(labels[n] for n in axes)
            function = "sub" if negative else "add"
            total = self.builder.pointwise(function, [(total, labels), term], labels, sizes)
        return total

    def _are_before(self, group: Iterable[_Product]) -> bool:
        """Whether one product with a sum is less than several, some of which others have, too.

        Products of tables are no work.
        """
        either = [x for x in group if self._is_choice(x)]
        return sum(1 / self.pairs.get(x.pair, 1) for x in either) > 1

    def _is_choice(self, product: _Product) -> bool:
        if product.other is None or not self.old.batch[product.other[0]]:
            return False
        return product.may_be_before and product.may_be_after


def _wholes(program: ElementProgram) -> dict[int, tuple[int, int, int]]:
    """Known tables that are parts of others: of which, along which axis, and where.

    Components of ``g`` are made of those of a table, which all of a value are applied to at once.
    """
    known = {x.constant: n for n, x in enumerate(program.inputs) if x.constant is not None}
    found: dict[int, tuple[int, int, int]] = {}
    for constant, number in known.items():
        shape = constant.array.shape
        for axis, extent in enumerate(shape if len(shape) == 3 else ()):
            if extent <= _LARGEST_MATRIX:
                parts = [Constant(constant.array.take(k, axis)) for k in range(extent)]
                if all(x in known for x in parts):
                    found |= {known[x]: (number, axis, k) for k, x in enumerate(parts)}
    return found


def _places(labels: str, output: str) -> tuple[int, ...]:
    return tuple(map(output.index, labels))


def _product(
    operation: Contract, table: _Term, other: _Term | None, weight: _Term
) -> tuple[_Product, int]:
    """A product, and its weights."""
    value, own = other or (None, "")
    labels, names = canonical(operation.output, table[1], own, weight[1])
    output, first, second, by = labels
    sizes = tuple((new, operation.extents[old]) for old, new in names)
    applied = None if value is None else (value, second)
    return _Product(output, (table[0], first), applied, by, sizes), weight[0]
