"""Sums of products as one product.

Contractions are planned one by one, and a sum of them is pointwise.  With one matrix they are a
product with the sum: ``A x + A y = A (x + y)``.  The transpose of a gradient multiplies two of its
three terms by the same matrix last: one product of eight is saved.  Of outer products the sum is a
product of matrices: ``a b^T + c d^T = [a c] [b d]^T``, which goes once through the result; a matrix
is taken apart into its columns where their maximum is asked for.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxmagma.plans.order import Middle
from jaxmagma.plans.plan import Plan, Pointwise, Product, Step, Tile, candidates, renumbered
from jaxmagma.plans.plan import alternatives as plan_alternatives
from jaxmagma.programs.labels import letters
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import ElementProgram, Place, View
from jaxmagma.programs.strides import row_major


@remembered
def planned(program: ElementProgram, middle: Middle = "second") -> Plan:
    """The plan of a program that is the best when it is factored."""
    return min(map(factored, candidates(program, middle)), key=lambda x: x.cost)


def alternatives(program: ElementProgram) -> tuple[Plan, ...]:
    """Other plans, for where the tiles of that one are too large."""
    return tuple(map(factored, plan_alternatives(program)))


def factored(plan: Plan) -> Plan:
    """The plan with products of sums in place of sums of products, where those are fewer flops.

    Args:
      plan: any plan; its program, and the shapes of its results, stay.

    Example: of ``A x + A y`` with a matrix ``A``, three steps become an addition and a product.
    """
    while (fewer := _Sums(plan).factored()) and fewer.flops < plan.flops:
        plan = fewer
    return plan


def stacked(plan: Plan) -> Plan:
    """The plan with products of matrices in place of sums of outer products."""
    while fewer := _Sums(plan).stacked():
        plan = fewer
    return plan


# So many outer products are worth being one of matrices, for which their factors are put together.
_LEAST_STACKED = 3


class _Steps:
    """Steps of a new plan; equal ones are one."""

    def __init__(self, plan: Plan) -> None:
        self.dtype = plan.program.dtype
        self.tiles: list[Tile] = list(plan.tiles[: len(plan.program.inputs)])
        self.steps: dict[Step, int] = {}  # and the tile of each
        self.parts: dict[int, View] = {}  # tiles that are parts of others

    def add(self, step: Step, shape: tuple[int, ...]) -> int:
        if step not in self.steps:
            if isinstance(step, View):
                self.parts[len(self.tiles)] = step
            self.steps[step] = len(self.tiles)
            batched = any(self.tiles[x].batched for x in step.operands)
            self.tiles.append(Tile(shape, self.dtype, batched))
        return self.steps[step]

    def total(self, values: Sequence[int]) -> int:
        shape = self.tiles[values[0]].shape
        labels = letters(len(shape))
        sizes = tuple(zip(labels, shape, strict=True))
        sum_ = values[0]
        for value in values[1:]:
            addition = Pointwise("add", (sum_, value), (labels, labels), labels, sizes)
            sum_ = self.add(addition, shape)
        return sum_

    def stack(self, values: Sequence[int]) -> int:
        """Values along a new first axis: a view, if they are parts that follow each other."""
        shape = self.tiles[values[0]].shape
        tile = len(values), *shape
        view = _row([self.parts[x] for x in values if x in self.parts])
        if view is not None and view.tile == tile:
            return self.add(view, tile)
        size, strides = math.prod(shape), row_major(shape)
        pieces = tuple((value, n * size, strides) for n, value in enumerate(values))
        return self.add(Place(pieces, tile), tile)


def _row(parts: Sequence[View]) -> View | None:
    """Two or more parts of one tile as one, if they are equally far apart."""
    if len(parts) < 2 or len({replace(x, offset=0) for x in parts}) > 1:
        return None
    first, apart = parts[0], parts[1].offset - parts[0].offset
    if any(x.offset != first.offset + n * apart for n, x in enumerate(parts)):
        return None
    return View(first.operand, first.offset, (apart, *first.strides), (len(parts), *first.tile))


# One product of what some multiply.
_Joined = Callable[[_Steps, Sequence[Product]], int]


class _Sums:
    """The sums of a plan, and their terms."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first = len(plan.program.inputs)
        self.reads = [0] * len(plan.tiles)
        for step in plan.steps:
            for operand in step.operands:
                self.reads[operand] += 1
        for value in plan.results:
            self.reads[value] += 2  # it must be there

    def factored(self) -> Plan | None:
        """The plan with some equal matrices of the last sum that has any taken out of it."""
        for number, step in reversed(self.plan.numbered_steps()):
            if _is_sum(step):
                terms, inside = self._terms(number)
                equal = self._with_one_matrix(terms)
                if equal:
                    return self._rewritten(number, inside, terms, equal, _with_the_sum)
        return None

    def stacked(self) -> Plan | None:
        """The plan with the last sum of some outer products as one product."""
        for number, step in reversed(self.plan.numbered_steps()):
            if _is_sum(step):
                terms, inside = self._terms(number)
                outer = self._outer(terms)
                if outer:
                    plan = self._rewritten(number, inside, terms, outer, _of_matrices)
                    return plan.without_dead_steps()
        return None

    def _step(self, number: int) -> Step | None:
        return None if number < self.first else self.plan.steps[number - self.first]

    def _terms(self, number: int) -> tuple[list[int], list[int]]:
        """What a sum of sums adds up, and the numbers of all its additions."""
        terms, additions = [], [number]
        step = self._step(number)
        assert step is not None
        for operand in step.operands:
            if self.reads[operand] == 1 and _is_sum(self._step(operand)):
                more, inner = self._terms(operand)
                terms += more
                additions += inner
            else:
                terms.append(operand)
        return terms, additions

    def _with_one_matrix(self, terms: Sequence[int]) -> list[int]:
        """The first terms, two or more, that only differ in what one matrix is multiplied by."""
        alike: dict[Product, list[int]] = {}
        for term in terms:
            step = self._step(term)
            if isinstance(step, Product) and step.contracted and self.reads[term] == 1:
                alike.setdefault(replace(step, right=-1), []).append(term)
        return next((x for x in alike.values() if len(x) > 1), [])

    def _outer(self, terms: Sequence[int]) -> list[int]:
        """The first terms, enough of them, that are outer products of tiles of the same kinds."""
        alike: dict[object, list[int]] = {}
        for term in terms:
            step = self._step(term)
            if isinstance(step, Product) and self.reads[term] == 1:
                if step.rows and step.columns and not step.contracted and not step.paired:
                    batched = [self.plan.tiles[x].batched for x in step.operands]
                    key = *batched, replace(step, left=-1, right=-1)
                    alike.setdefault(key, []).append(term)
        return next((x for x in alike.values() if len(x) >= _LEAST_STACKED), [])

    def _rewritten(
        self, number: int, additions: list[int], terms: list[int], some: list[int], joined: _Joined
    ) -> Plan:
        """The plan with the sum ``number`` as the other terms and one product instead of some."""
        plan = self.plan
        made: dict[int, int] = {n: n for n in range(self.first)}
        new = _Steps(plan)
        for n, step in plan.numbered_steps():
            if n == number:
                products = [x for x in map(self._step, some) if isinstance(x, Product)]
                rest = [made[x] for x in terms if x not in some]
                moved = [replace(x, left=made[x.left], right=made[x.right]) for x in products]
                value = joined(new, moved)
                made[n] = new.total([*rest, value])
            elif n not in additions and n not in some:
                made[n] = new.add(renumbered(step, made), plan.tiles[n].shape)
        results = tuple(made[x] for x in plan.results)
        return replace(plan, tiles=tuple(new.tiles), steps=tuple(new.steps), results=results)


def _with_the_sum(new: _Steps, products: Sequence[Product]) -> int:
    """Of a matrix that all have, and the sum of what they multiply it with."""
    right = new.total([x.right for x in products])
    return new.add(replace(products[0], right=right), products[0].shape)


def _of_matrices(new: _Steps, products: Sequence[Product]) -> int:
    """Of the left factors and the right ones, summed over which of them."""

    def place(product: Product) -> list[int]:
        return [new.parts[x].offset if x in new.parts else 0 for x in product.operands]

    products = sorted(products, key=place)
    one = products[0]
    label = next(x for x in letters(len(one.extents) + 1) if x not in one.extents)
    left, right = (new.stack(x) for x in zip(*(x.operands for x in products), strict=True))
    sizes = tuple(sorted({**one.extents, label: len(products)}.items()))
    labels = label + one.left_labels, label + one.right_labels
    product = Product(left, right, *labels, one.output_labels, sizes)
    return new.add(product, one.shape)


def _is_sum(step: Step | None) -> bool:
    """Whether a step adds two tiles value by value."""
    return (
        isinstance(step, Pointwise)
        and step.function == "add"
        and all(labels == step.output_labels for labels in step.labels)
    )
