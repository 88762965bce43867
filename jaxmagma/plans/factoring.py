"""Sums of products with one matrix, as one product with the sum: ``A x + A y = A (x + y)``.

Contractions are planned one by one, and a sum of them is pointwise.  The transpose of a gradient
multiplies two of its three terms by the same matrix last: one product of eight is saved.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxmagma.plans.order import Middle
from jaxmagma.plans.plan import Plan, Pointwise, Product, Step, Tile, candidates, renumbered
from jaxmagma.plans.plan import alternatives as plan_alternatives
from jaxmagma.programs.labels import letters
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import ElementProgram


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
                    rest = [x for x in terms if x not in equal]
                    return self._rewritten(number, inside, equal, rest)
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

    def _rewritten(
        self, number: int, additions: list[int], equal: list[int], rest: list[int]
    ) -> Plan:
        """The plan with the sum ``number`` as the ``rest`` and one product instead of the equal."""
        plan = self.plan
        made: dict[int, int] = {n: n for n in range(self.first)}
        tiles: list[Tile] = list(plan.tiles[: self.first])
        steps: dict[Step, int] = {}  # and the tile of each

        def add(step: Step, tile: Tile) -> int:
            if step not in steps:
                steps[step] = len(tiles)
                tiles.append(tile)
            return steps[step]

        def total(values: list[int]) -> int:
            tile = tiles[values[0]]
            labels = letters(len(tile.shape))
            sizes = tuple(zip(labels, tile.shape, strict=True))
            sum_ = values[0]
            for value in values[1:]:
                addition = Pointwise("add", (sum_, value), (labels, labels), labels, sizes)
                batched = tiles[sum_].batched or tiles[value].batched
                sum_ = add(addition, Tile(tile.shape, tile.dtype, batched))
            return sum_

        for n, step in plan.numbered_steps():
            if n == number:
                products = [x for x in map(self._step, equal) if isinstance(x, Product)]
                right = total([made[x.right] for x in products])
                product = replace(products[0], left=made[products[0].left], right=right)
                batched = tiles[product.left].batched or tiles[right].batched
                tile = plan.tiles[equal[0]]
                value = add(product, Tile(tile.shape, tile.dtype, batched))
                made[n] = total([*(made[x] for x in rest), value])
            elif n not in additions and n not in equal:
                made[n] = add(renumbered(step, made), plan.tiles[n])
        results = tuple(made[x] for x in plan.results)
        return Plan(plan.program, tuple(tiles), tuple(steps), results)


def _is_sum(step: Step | None) -> bool:
    """Whether a step adds two tiles value by value."""
    return (
        isinstance(step, Pointwise)
        and step.function == "add"
        and all(labels == step.output_labels for labels in step.labels)
    )
