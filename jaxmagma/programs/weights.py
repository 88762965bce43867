"""Sums over points of a weight times products: the weight goes into each of the products.

Matrices of elements are often summed point by point, ``K += g @ g.T * det``. Then a program has a
matrix of all nodes and nodes at every point, to multiply it by a number and to add it up::

    sum_q w[q] (a[q, i] b[q, j] + ...)  =  sum_q (w a)[q, i] b[q, j] + ...

The right side is products of matrices. It is what an einsum of all factors has been from the
beginning, so that both are one program. Numbers that factors are multiplied by come after the sum,
and so do tables of other axes: the blocks of a stiffness matrix are sums of the same few products,
each times one of its moduli, or times a tensor of them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.distribution import inputs_in
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import Contract, ElementProgram, Map, Terms


@dataclass(frozen=True)
class _Product:
    """Factors that have fewer axes than their product, weights and numbers; extents of labels.

    It is taken from the others if it is ``negative``.
    """

    factors: Terms
    sizes: Mapping[str, int]
    weights: tuple[tuple[int, str], ...] = ()
    numbers: tuple[int, ...] = ()
    negative: bool = False


def with_weights_inside(program: ElementProgram) -> ElementProgram:
    """The same program, with no products at points that are weighted and added up."""
    found = _Sums(program).products
    if not found:
        return program
    builder = Builder(program.batch_rank, program.precision, summing=False)
    numbers = inputs_in(program, builder)
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if number not in found or not isinstance(operation, Contract):
            numbers[number] = builder.copy(operation, numbers)
            continue
        total = None
        for product in found[number]:
            made = _summed(builder, product, operation, numbers)
            total = made if total is None else builder.map("add", total, made)
        assert total is not None
        numbers[number] = total
    outputs = [replace(x, value=numbers[x.value]) for x in program.outputs]
    return builder.build(outputs).program


def has_weighted_sums(program: ElementProgram) -> bool:
    """Whether there may be such sums, once components are apart."""
    for operation in program.operations:
        if isinstance(operation, Contract) and len(operation.terms) == 1:
            ((value, labels),) = operation.terms
            number = value - len(program.inputs)
            summed = program.operations[number] if number >= 0 else None
            if isinstance(summed, Map) and 0 < len(operation.output) < len(labels):
                fewer = len({len(own) for _, own in summed.terms}) > 1
                if summed.function in ("add", "sub") or (summed.function == "mul" and fewer):
                    return True
    return False


def _is_outer(product: _Product, labels: str) -> bool:
    """Whether it has more axes than what is multiplied."""
    return not any(set(labels) <= set(own) for _, own in product.factors)


def _has_all(product: _Product, labels: set[str]) -> bool:
    """Whether some factor or weight differs along each of these axes."""
    return labels <= {x for _, own in (*product.factors, *product.weights) for x in own}


def _summed(
    builder: Builder, product: _Product, operation: Contract, numbers: Mapping[int, int]
) -> int:
    """What a product adds to a sum: the first factor that has their axes has the weights."""
    output = operation.output
    factors = [(numbers[x], labels) for x, labels in product.factors]
    for value, labels in product.weights:
        weight = numbers[value], labels
        n = next((n for n, (_, x) in enumerate(factors) if set(labels) <= set(x)), None)
        if n is None:
            factors.append(weight)
        else:
            own = factors[n][1]
            factors[n] = builder.pointwise("mul", [weight, factors[n]], own, product.sizes), own
    tables = [x for x in factors if _is_apart(builder, x, factors)]
    rest = [x for x in factors if x not in tables]
    carried = "".join(x for x in output if any(x in labels for _, labels in rest))
    made = builder.contract(rest, carried, product.sizes)
    if tables:
        every = [(made, carried), *tables]
        carried = "".join(x for x in output if any(x in labels for _, labels in every))
        made = builder.contract(every, carried, product.sizes)
    for x in product.numbers:
        terms = (numbers[x], ""), (made, carried)
        made = builder.pointwise("mul", terms, carried, product.sizes)
    made = builder.map("neg", made) if product.negative else made
    return builder.relabel(made, carried, output, operation.extents)


def _is_apart(builder: Builder, factor: tuple[int, str], factors: Terms) -> bool:
    """Whether a factor is a table along axes that no other one has."""
    value, labels = factor
    others = "".join(own for x, own in factors if (x, own) != factor)
    return bool(labels) and not builder.batch(value) and set(labels).isdisjoint(others)


def _is_taken(operation: Map, position: int) -> bool:
    """Whether a term of a sum or a difference is taken from the others."""
    return operation.function == "neg" or (operation.function == "sub" and position > 0)


class _Sums:
    """Of a program, sums over points, and the products that they are sums of."""

    def __init__(self, program: ElementProgram) -> None:
        self.program = program
        self._operations = dict(enumerate(program.operations, start=len(program.inputs)))
        self._uses = Counter(x for y in program.operations for x in y.operands)
        self._uses.update(x.value for x in program.outputs)
        self.products: dict[int, list[_Product]] = {}
        for number, operation in self._operations.items():
            if isinstance(operation, Contract) and len(operation.terms) == 1:
                ((value, labels),) = operation.terms
                if set(operation.output) < set(labels) and len(set(labels)) == len(labels):
                    products = self._of(value, labels, operation.extents)
                    is_sum = isinstance(self._operations.get(value), Map)
                    if products is None or not is_sum:
                        continue
                    whole = all(_has_all(x, set(labels) - set(operation.output)) for x in products)
                    if whole and any(_is_outer(x, labels) for x in products):
                        self.products[number] = products

    def _of(self, value: int, labels: str, sizes: Mapping[str, int]) -> list[_Product] | None:
        """What a value is the sum of, if that is products that have more axes than their factors.

        Sums that are used again are left as they are.
        """
        operation = self._operations.get(value)
        if isinstance(operation, Contract):
            return self._products(operation, labels, sizes)
        if not isinstance(operation, Map):
            return None
        again = self._uses[value] > 1
        names = dict(zip(operation.output, labels, strict=True))
        terms = [(x, "".join(names[y] for y in own)) for x, own in operation.terms]
        if operation.function == "mul":
            if not any(set(own) == set(labels) for _, own in terms):
                return [_Product(terms, sizes)]
            for (weight, own), (x, others) in (terms, terms[::-1]):
                if set(own) < set(labels) and set(others) == set(labels):
                    products = self._of(x, others, sizes)
                    if products is None or (again and len(products) > 1):
                        return [_Product([(x, others), (weight, own)], sizes)]
                    return [replace(y, weights=((weight, own), *y.weights)) for y in products]
            return None
        if operation.function not in ("add", "sub", "neg") or again:
            return None
        found: list[_Product] = []
        for position, (x, own) in enumerate(terms):
            fewer = set(own) < set(labels) and self.program.batch[x]
            products = [_Product([(x, own)], sizes)] if fewer else self._of(x, own, sizes)
            if products is None:
                return None
            turned = _is_taken(operation, position)
            found += [replace(y, negative=y.negative != turned) for y in products]
        return found

    def _products(
        self, operation: Contract, labels: str, sizes: Mapping[str, int]
    ) -> list[_Product] | None:
        """A product that has more axes than each of what is multiplied.

        Or several, if one factor is a sum of products with tables, which come after all others.
        """
        if any(set(operation.output) <= set(own) for _, own in operation.terms):
            return None
        spare = (x for x in letters(len(sizes) + len(operation.extents)) if x not in sizes)
        names = dict(zip(operation.output, labels, strict=True))
        names = {x: names.get(x) or next(spare) for x in operation.extents}
        every = {**sizes, **{names[x]: n for x, n in operation.extents.items()}}
        found, several = [_Product([], every)], False
        for x, own in operation.terms:
            numbers = list[int]()
            while (scaled := self._scaled(x, own)) is not None:
                number, x, own = scaled
                numbers.append(number)
            renamed = "".join(names[y] for y in own)
            parts: list[tuple[Terms, bool]] = [([(x, renamed)], False)]
            if not own and not self.program.batch[x]:
                numbers.append(x)
                parts = [([], False)]
            elif len(found) == 1:
                parts = self._with_tables(x, renamed) or parts
            several = several or bool(self.program.batch[x])
            found = [
                replace(
                    y,
                    factors=[*y.factors, *factors],
                    numbers=(*y.numbers, *numbers),
                    negative=y.negative != negative,
                )
                for y in found
                for factors, negative in parts
            ]
        return found if several else None

    def _with_tables(self, value: int, labels: str) -> list[tuple[Terms, bool]] | None:
        """The products of a value with a table of other axes that another value is the sum of.

        And which of them are taken from the others. What is used again is left as it is.
        """
        operation = self._operations.get(value)
        if not isinstance(operation, Contract | Map) or self._uses[value] > 1:
            return None
        names = dict(zip(operation.output, labels, strict=True))
        if not operation.extents.keys() <= names.keys():
            return None
        terms = [(x, "".join(names[y] for y in own)) for x, own in operation.terms]
        if isinstance(operation, Contract):
            batched = [bool(self.program.batch[x]) for x, _ in terms]
            every = "".join(own for _, own in terms)
            is_outer = len(terms) == 2 and len(set(every)) == len(every)
            with_table = is_outer and sum(batched) == 1 and all(own for _, own in terms)
            return [(terms, False)] if with_table else None
        if operation.function not in ("add", "sub", "neg"):
            return None
        found: list[tuple[Terms, bool]] = []
        for position, (x, own) in enumerate(terms):
            parts = self._with_tables(x, own)
            if parts is None:
                return None
            turned = _is_taken(operation, position)
            found += [(factors, negative != turned) for factors, negative in parts]
        return found

    def _scaled(self, value: int, labels: str) -> tuple[int, int, str] | None:
        """The number that all elements share by which a value is multiplied, and the rest."""
        operation = self._operations.get(value)
        if not isinstance(operation, Map) or operation.function != "mul":
            return None
        for (number, own), (x, others) in (operation.terms, operation.terms[::-1]):
            if not own and not self.program.batch[number] and len(others) == len(labels):
                names = dict(zip(operation.output, labels, strict=True))
                return number, x, "".join(names[y] for y in others)
        return None
