"""Products of sums of multiples are sums of multiples of fewer products.

The matrix of an element is ``B^T C B`` with strain matrices, of which each value is a slope of a
shape function or zero. Written so, every block is a sum of products of slopes with sums of them,
each times some of the moduli::

    sum_q g[q, a] (c g[q, b] + d h[q, b] + ...)  =  c sum_q g[q, a] g[q, b] + d ...

The products on the right side are the same for all blocks, which a tensor of moduli has had from
the beginning. Where these are fewer, and operations by a tenth, they are what is computed. The
moduli are numbers, or values of which there is one for an element, or for all of them.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.distribution import inputs_in, is_as_good
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Contract, ElementProgram, Map, Operation, Terms


# A sum of products of single values, each times a number.
_Factor = dict[tuple[int, ...], complex]
_ONE: _Factor = {(): 1.0}
# A sum of multiples: of values, each times a factor.
_Multiples = dict[int, _Factor]
# More products than of two sums of nine values, those of a tensor of two axes, are not looked at.
_MOST_PRODUCTS = 81


def with_fewer_products(program: ElementProgram) -> ElementProgram:
    """The program with products of multiples in place of those of sums, where that is less."""
    before = _products(program)
    if before < 2:
        return program
    found = _Sums(program).program()
    if found.arguments != program.arguments or _products(found) >= before:
        return program
    return program if is_as_good(program, found) else found


def _products(program: ElementProgram) -> int:
    return sum(_has_two_tiles(program, x) for x in program.operations)


def _has_two_tiles(program: ElementProgram, operation: Operation) -> bool:
    """Whether it adds up products of values that both differ between elements."""
    several = isinstance(operation, Contract) and len(operation.terms) == 2
    return several and _adds_up(operation) and all(program.batch[x] for x in operation.operands)


def _adds_up(operation: Operation) -> bool:
    return isinstance(operation, Contract) and len(operation.extents) > len(operation.output)


class _Sums:
    """Writes a program anew, value by value; what nobody needs is gone in the end.

    ``sums`` has those values that are sums of multiples, of numbers of the new program; ``alike``
    of some of these, which are the same along other axes, a value without these and its own axes.
    """

    def __init__(self, program: ElementProgram) -> None:
        self.old = program
        self.builder = Builder(program.batch_rank, program.precision, summing=False)
        self.numbers = inputs_in(program, self.builder)
        self.sums: dict[int, _Multiples] = {}
        self.alike: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.zeros = {
            n for n, x in enumerate(program.inputs) if x.constant and not x.constant.array.any()
        }

    def program(self) -> ElementProgram:
        for number, operation in enumerate(self.old.operations, start=len(self.old.inputs)):
            found = self._multiples(operation)
            # What strain matrices have as zeros, of all values of an element, is one value.
            zero = all(not any(x.values()) for x in found.values()) if found else False
            if found and (_adds_up(operation) or zero):
                self.numbers[number] = self._total(found, operation.tile)
            else:
                self.numbers[number] = self.builder.copy(operation, self.numbers)
            if found and sum(map(len, found.values())) <= _MOST_PRODUCTS:
                self.sums[number] = found
            if self._is_zero(operation):
                self.zeros.add(number)
        outputs = [replace(x, value=self.numbers[x.value]) for x in self.old.outputs]
        return self.builder.build(outputs).program

    def _multiples(self, operation: Operation) -> _Multiples | None:
        """What a value is a sum of, if it is one."""
        if isinstance(operation, Map):
            return self._of_map(operation)
        if isinstance(operation, Contract):
            return self._of_contraction(operation)
        return None

    def _of(self, value: int) -> _Multiples:
        return self.sums.get(value) or {self.numbers[value]: _ONE}

    def _of_map(self, operation: Map) -> _Multiples | None:
        name, output = operation.function, operation.output
        values = operation.operands
        if name == "mul" and output:
            for (value, labels), (other, own) in itertools.permutations(operation.terms, 2):
                if labels == output and not own:
                    factor = self._factor(other)
                    return {x: _times(factor, y) for x, y in self._of(value).items()}
                if value in self.sums and other not in self.sums and labels == output:
                    return self._weighted(operation, value, (self.numbers[other], own))
        elif name in ("add", "sub", "neg") and all(x == output for _, x in operation.terms):
            if not any(x in self.sums or x in self.zeros for x in values):
                return None  # a value like others
            signs = (1, -1) if name == "sub" else (-1,) if name == "neg" else (1, 1)
            found: _Multiples = {}
            for value, sign in zip(values, signs, strict=True):
                for x, y in self._of(value).items() if value not in self.zeros else ():
                    found[x] = _plus(found.get(x, {}), _times({(): sign}, y))
            return found
        return None

    def _factor(self, value: int) -> _Factor:
        number = self._number(value)
        return {(self.numbers[value],): 1.0} if number is None else {(): number}

    def _number(self, value: int) -> complex | None:
        """A number that is known, and finite."""
        known = self.old.inputs[value].constant if value < len(self.old.inputs) else None
        if known is None or known.array.size > 1 or not np.isfinite(known.array).all():
            return None
        number: complex = known.array.item()
        return number

    def _is_zero(self, operation: Operation) -> bool:
        """Whether a value is known to be zero: as a sum of zeros, or their product with numbers."""
        if not isinstance(operation, Contract | Map):
            return False
        zero = [x in self.zeros for x in operation.operands]
        if isinstance(operation, Map) and operation.function != "mul":
            return operation.function in ("add", "sub", "neg") and all(zero)
        rest = (self._number(x) for x in operation.operands if x not in self.zeros)
        return any(zero) and None not in rest

    def _weighted(self, operation: Map, value: int, weight: tuple[int, str]) -> _Multiples:
        """A sum times a value of fewer axes, or as many."""
        output, sizes = operation.output, operation.extents
        found: _Multiples = {}
        for x, y in self._of(value).items():
            made = self.builder.pointwise("mul", [(x, output), weight], output, sizes)
            if x in self.alike and not self.alike[x][1]:
                self.alike[made] = weight[0], tuple(map(output.index, weight[1]))
            found[made] = y
        return found

    def _of_contraction(self, operation: Contract) -> _Multiples | None:
        """Of products of two tiles, of sums of one, and of single values everywhere in a tile."""
        if operation.output and not any(labels for _, labels in operation.terms):
            one = self.builder.constant(np.ones((), self.old.dtype))
            ones = self.builder.contract([(one, "")], operation.output, operation.extents)
            self.alike[ones] = one, ()
            return {ones: functools.reduce(_times, map(self._factor, operation.operands))}
        if not _adds_up(operation):
            return None
        if len(operation.terms) > 1 and not _has_two_tiles(self.old, operation):
            return None
        if not any(x in self.sums for x in operation.operands):
            return None
        parts = [list(self._of(x).items()) for x in operation.operands]
        if math.prod(sum(len(y) for _, y in x) for x in parts) > _MOST_PRODUCTS:
            return None
        found: _Multiples = {}
        labels = [x for _, x in operation.terms]
        for factors in itertools.product(*parts):
            terms = list(zip([x for x, _ in factors], labels, strict=True))
            thin = [self._without_axes(*x) for x in terms]
            if set(operation.extents) <= {*operation.output, *(x for _, own in thin for x in own)}:
                terms = thin  # none is left out that is summed over
            made = self._contracted(operation, terms)
            factor = functools.reduce(_times, (y for _, y in factors))
            found[made] = _plus(found.get(made, {}), factor)
        return found

    def _contracted(self, operation: Contract, terms: Terms) -> int:
        """A product, which may be the same along some axes."""
        builder, output, extents = self.builder, operation.output, operation.extents
        own = "".join(x for x in output if any(x in labels for _, labels in terms))
        weight, value = min(terms, key=lambda x: len(x[1])), max(terms, key=lambda x: len(x[1]))
        if 0 < len(weight[1]) < len(value[1]) and set(weight[1]) < set(value[1]):
            # A weighted value may be there, and its sum.
            terms = [(builder.pointwise("mul", [value, weight], value[1], extents), value[1])]
        made = builder.contract(terms, own, extents)
        if own == output:
            return made
        whole = builder.contract([(made, own)], output, extents)
        self.alike[whole] = made, tuple(map(output.index, own))
        return whole

    def _without_axes(self, value: int, labels: str) -> tuple[int, str]:
        """A value without the axes along which it is the same."""
        found, axes = self.alike.get(value, (value, range(len(labels))))
        return found, "".join(labels[n] for n in axes)

    def _total(self, multiples: _Multiples, tile: tuple[int, ...]) -> int:
        """The sum as a value: values with the same axes and factor are added up before."""
        builder, labels = self.builder, letters(len(tile))
        groups: dict[tuple[str, frozenset[tuple[tuple[int, ...], complex]]], list[int]] = {}
        for value in sorted(multiples):
            thin, own = self._without_axes(value, labels)
            groups.setdefault((own, frozenset(multiples[value].items())), []).append(thin)
        sizes, total = dict(zip(labels, tile, strict=True)), None
        for (own, factor), values in sorted(groups.items(), key=lambda x: -len(x[0][0])):
            made = self._multiplied(builder.sum(values), dict(factor))
            if total is None:
                total = builder.relabel(made, own, labels, sizes)
            else:
                total = builder.pointwise("add", [(total, labels), (made, own)], labels, sizes)
        assert total is not None
        return total

    def _multiplied(self, value: int, factor: _Factor) -> int:
        if factor == _ONE:
            return value
        builder, tile = self.builder, self.builder.tile(value)
        made = []
        for scalars, number in sorted(factor.items()):
            known = [] if scalars and number == 1 else [np.asarray(number, self.old.dtype)]
            values = [*scalars, *map(builder.constant, known)]
            made.append(functools.reduce(lambda x, y: builder.map("mul", x, y), values))
        labels = letters(len(tile))
        terms = [(value, labels), (builder.sum(made), "")]
        return builder.pointwise("mul", terms, labels, dict(zip(labels, tile, strict=True)))


def _times(one: _Factor, other: _Factor) -> _Factor:
    found: _Factor = {}
    for (x, p), (y, q) in itertools.product(one.items(), other.items()):
        scalars = tuple(sorted((*x, *y)))
        found[scalars] = found.get(scalars, 0) + p * q
    return found


def _plus(one: _Factor, other: _Factor) -> _Factor:
    return {x: one.get(x, 0) + other.get(x, 0) for x in (*one, *other)}
