"""Products of sums of multiples are sums of multiples of fewer products.

The matrix of an element is ``B^T C B`` with strain matrices, of which each value is a slope of a
shape function or zero. Written so, every block is a sum of products of slopes with sums of them,
each times some of the moduli::

    sum_q g[q, a] (c g[q, b] + d h[q, b] + ...)  =  c sum_q g[q, a] g[q, b] + d ...

The products on the right side are the same for all blocks, which a tensor of moduli has had from
the beginning. Where there are fewer of them, and fewer operations, they are what is computed.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.distribution import flops_of, inputs_in
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Contract, ElementProgram, Map, Operation


# A sum of multiples: of values, each times a number.
_Multiples = dict[int, complex]
# More products than of two sums of nine values, those of a tensor of two axes, are not looked at.
_MOST_PRODUCTS = 81


def with_fewer_products(program: ElementProgram) -> ElementProgram:
    """The program with products of multiples in place of those of sums, where that is less."""
    if sum(_has_two_tiles(program, x) for x in program.operations) < 2:
        return program
    found = _Sums(program).program()
    same = found.arguments == program.arguments
    return found if same and flops_of(found) < flops_of(program) else program


def _has_two_tiles(program: ElementProgram, operation: Operation) -> bool:
    """Whether it adds up products of values that both differ between elements."""
    several = isinstance(operation, Contract) and len(operation.terms) == 2
    return several and _adds_up(operation) and all(program.batch[x] for x in operation.operands)


def _adds_up(operation: Operation) -> bool:
    return isinstance(operation, Contract) and len(operation.extents) > len(operation.output)


class _Sums:
    """Writes a program anew, value by value; what nobody needs is gone in the end.

    ``sums`` has those values that are sums of multiples, of numbers of the new program.
    """

    def __init__(self, program: ElementProgram) -> None:
        self.old = program
        self.builder = Builder(program.batch_rank, program.precision, summing=False)
        self.numbers = inputs_in(program, self.builder)
        self.sums: dict[int, _Multiples] = {}
        self.zeros = {
            n for n, x in enumerate(program.inputs) if x.constant and not x.constant.array.any()
        }

    def program(self) -> ElementProgram:
        for number, operation in enumerate(self.old.operations, start=len(self.old.inputs)):
            found = self._multiples(operation)
            # What strain matrices have as zeros, of all values of an element, is one value.
            zero = not any(found.values()) if found else False
            if found and (isinstance(operation, Contract) or zero):
                self.numbers[number] = self._total(found)
            else:
                self.numbers[number] = self.builder.copy(operation, self.numbers)
            if found and len(found) <= _MOST_PRODUCTS:
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
        return self.sums.get(value) or {self.numbers[value]: 1.0}

    def _of_map(self, operation: Map) -> _Multiples | None:
        name, output = operation.function, operation.output
        values = operation.operands
        if name == "mul":
            for (value, labels), (factor, own) in itertools.permutations(operation.terms, 2):
                number = self._number(factor)
                if number is not None and labels == output:
                    return {x: number * y for x, y in self._of(value).items()}
                if value in self.sums and factor not in self.sums and labels == output:
                    return self._weighted(operation, value, (self.numbers[factor], own))
        elif name in ("add", "sub", "neg") and all(x == output for _, x in operation.terms):
            if not any(x in self.sums or x in self.zeros for x in values):
                return None  # a value like others
            signs = (1, -1) if name == "sub" else (-1,) if name == "neg" else (1, 1)
            found: _Multiples = {}
            for value, sign in zip(values, signs, strict=True):
                for x, y in self._of(value).items() if value not in self.zeros else ():
                    found[x] = found.get(x, 0) + sign * y
            return found
        return None

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

        def times(x: int) -> int:
            return self.builder.pointwise("mul", [(x, output), weight], output, sizes)

        return {times(x): y for x, y in self._of(value).items()}

    def _of_contraction(self, operation: Contract) -> _Multiples | None:
        """Of products of two tiles, and of sums of one."""
        if not _adds_up(operation):
            return None
        if len(operation.terms) > 1 and not _has_two_tiles(self.old, operation):
            return None
        if not any(x in self.sums for x in operation.operands):
            return None
        parts = [list(self._of(x).items()) for x in operation.operands]
        if math.prod(map(len, parts)) > _MOST_PRODUCTS:
            return None
        found: _Multiples = {}
        labels = [x for _, x in operation.terms]
        for factors in itertools.product(*parts):
            terms = list(zip([x for x, _ in factors], labels, strict=True))
            made = self.builder.contract(terms, operation.output, operation.extents)
            found[made] = found.get(made, 0) + math.prod(y for _, y in factors)
        return found

    def _total(self, multiples: _Multiples) -> int:
        """The sum as a value: of values with the same number this is multiplied once."""
        alike: dict[complex, list[int]] = {}
        for value, number in sorted(multiples.items()):
            alike.setdefault(number, []).append(value)
        sums = ((self.builder.sum(values), number) for number, values in alike.items())
        return self.builder.sum([x if y == 1 else self._times(x, y) for x, y in sums])

    def _times(self, value: int, number: complex) -> int:
        tile, by = self.builder.tile(value), np.asarray(number, self.old.dtype)
        labels = letters(len(tile))
        terms = [(value, labels), (self.builder.constant(by), "")]
        return self.builder.pointwise("mul", terms, labels, dict(zip(labels, tile, strict=True)))
