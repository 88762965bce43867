"""From a program to a plan: pairwise steps, tile layouts.

Every n-ary ``Contract`` becomes a sequence of pairwise ``Product`` steps, in an order that is found
by :mod:`jaxmagma.plans.order`; equal steps are done once.  A plan is still independent of the
backend: each lowering turns it into buffers, loops and launches.

**Several contractions.**  Each has the order that is best for it alone, or, if the plan then has
fewer operations, the one that adds fewest to the steps that the others have made.
"""

import heapq
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxmagma.plans.fibres import turned
from jaxmagma.plans.order import Middle, contraction_order, widest_tile
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.labels import canonical, letters
from jaxmagma.programs.memo import remembered
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
)
from jaxmagma.programs.strides import row_major


# A contraction of more terms is not made of smaller ones.
_MOST_MERGED = 8
# So many terms are looked at in every order, where some are known already.
_FEW_TERMS = 4


@dataclass(frozen=True)
class Tile:
    """One value of a plan: its row-major shape, and whether it differs between elements."""

    shape: tuple[int, ...]
    dtype: np.dtype
    batched: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Labelled:
    """A step whose result has labels, one letter an axis, as have ``terms``: its operands."""

    output_labels: str
    sizes: tuple[tuple[str, int], ...]

    @cached_property
    def extents(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(self.extents.__getitem__, self.output_labels))


@dataclass(frozen=True)
class Product(_Labelled):
    """``out[output] = sum_k left[...] * right[...]``: one pairwise contraction.

    Labels are single letters.  Grouped as in a GEMM, a label is a row (left and output), a column
    (right and output), a batch label (all three) or contracted (left and right only); no label
    stands in one operand alone.
    """

    left: int
    right: int
    left_labels: str
    right_labels: str
    output_labels: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.left, self.right)

    @property
    def terms(self) -> tuple[tuple[int, str], ...]:
        return ((self.left, self.left_labels), (self.right, self.right_labels))

    @cached_property
    def rows(self) -> str:
        """M: labels of the left operand and the output."""
        return _keep(self.output_labels, in_=self.left_labels, not_in=self.right_labels)

    @cached_property
    def columns(self) -> str:
        """N: labels of the right operand and the output."""
        return _keep(self.output_labels, in_=self.right_labels, not_in=self.left_labels)

    @cached_property
    def contracted(self) -> str:
        """K: labels of both operands that are summed over."""
        return _keep(self.left_labels, in_=self.right_labels, not_in=self.output_labels)

    @cached_property
    def paired(self) -> str:
        """Labels of both operands and the output."""
        both = _keep(self.output_labels, in_=self.left_labels)
        return _keep(both, in_=self.right_labels)

    @property
    def flops(self) -> int:
        multiplies = math.prod(self.extents.values())
        return 2 * multiplies if self.contracted else multiplies


@dataclass(frozen=True)
class Rearrange(_Labelled):
    """``out[output] = sum operand[labels]``: transposition, sum over labels, or broadcast."""

    operand: int
    labels: str
    output_labels: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.operand,)

    @property
    def terms(self) -> tuple[tuple[int, str], ...]:
        return ((self.operand, self.labels),)

    @property
    def flops(self) -> int:
        summed = set(self.labels) - set(self.output_labels)
        return math.prod(self.extents.values()) if summed else 0


@dataclass(frozen=True)
class Pointwise(_Labelled):
    """``out[output] = function(operand[labels], ...)``.

    An operand broadcasts along the labels of the output that it does not have, and has no others.
    """

    function: str
    operands: tuple[int, ...]
    labels: tuple[str, ...]
    output_labels: str
    sizes: tuple[tuple[str, int], ...]

    @cached_property
    def terms(self) -> tuple[tuple[int, str], ...]:
        return tuple(zip(self.operands, self.labels, strict=True))

    @property
    def flops(self) -> int:
        return FUNCTIONS[self.function].flops * math.prod(self.shape)


# Movement needs no planning: these operations are steps as they are, of tiles in place of values.
Step = Product | Rearrange | Pointwise | View | Place | Gather


@dataclass(frozen=True)
class Plan:
    """A program with its contraction order: ``tiles`` are the inputs, then the result of each step.

    ``results`` gives the tile each output of the program returns, in the order of its values in
    memory, and ``shapes`` the shapes that these have there.
    """

    program: ElementProgram
    tiles: tuple[Tile, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        lines = (f"%{n}{_formula(x)}  ({_extents(x.shape)})" for n, x in self.numbered_steps())
        return "\n".join(lines)

    @property
    def flops(self) -> int:
        """Floating-point operations per element, not counting work done once for all elements."""
        alone = not self.program.batch_rank
        return sum(s.flops for n, s in self.numbered_steps() if alone or self.tiles[n].batched)

    @property
    def cost(self) -> int:
        """These operations, and loads of shared operands of which each value is multiplied once."""
        loads = 0
        for step in self.steps:
            if isinstance(step, Product) and step.paired:
                batched = [self.tiles[x].batched for x in step.operands]
                loads += math.prod(step.extents.values()) * (any(batched) and not all(batched))
        return self.flops + loads

    def numbered_steps(self) -> list[tuple[int, Step]]:
        """The steps with the number of the tile each one makes."""
        return list(enumerate(self.steps, start=len(self.program.inputs)))

    def without_dead_steps(self) -> "Plan":
        """The plan without the steps that no result needs."""
        first = len(self.program.inputs)
        needed = set(self.results)
        for number, step in reversed(self.numbered_steps()):
            if number in needed:
                needed.update(step.operands)
        live = [n for n in range(first, len(self.tiles)) if n in needed]
        if len(live) == len(self.steps):
            return self
        numbers = {old: new for new, old in enumerate([*range(first), *live])}
        return replace(
            self,
            tiles=tuple(self.tiles[n] for n in [*range(first), *live]),
            steps=tuple(renumbered(self.steps[n - first], numbers) for n in live),
            results=tuple(numbers[value] for value in self.results),
        )

    @property
    def is_wide(self) -> bool:
        """Whether some step makes a tile that is larger than all operands and results."""
        sizes = [x.size if x.batched else 0 for x in self.tiles]
        largest = max(sizes[x] for x in (*range(len(self.program.inputs)), *self.results))
        return max(sizes) > largest

    @property
    def has_larger_tables(self) -> bool:
        """Whether a product of what all elements share is larger than all that they share."""
        first = len(self.program.inputs)
        sizes = [0 if x.batched else x.size for x in self.tiles]
        return max(sizes[first:], default=0) > max(sizes[:first], default=0)


def _formula(step: Step) -> str:
    if isinstance(step, Product):
        over = f"sum_{step.contracted} " if step.contracted else ""
        factors = f"%{step.left}[{step.left_labels}] %{step.right}[{step.right_labels}]"
        return f"[{step.output_labels}] = {over}{factors}"
    if isinstance(step, Rearrange):
        return f"[{step.output_labels}] = %{step.operand}[{step.labels}]"
    if isinstance(step, Pointwise):
        operands = ", ".join(f"%{x}[{labels}]" for x, labels in step.terms)
        return f"[{step.output_labels}] = {step.function}({operands})"
    return f" = {step!r}"


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


@remembered
def plan(program: ElementProgram, middle: Middle = "second") -> Plan:
    """Chooses the order of every contraction of ``program``."""
    return min(candidates(program, middle), key=lambda x: x.cost)


@remembered
def alternatives(program: ElementProgram) -> tuple[Plan, ...]:
    """Other plans of a program, for where the tiles of the best one are too large for any kernel.

    They have different numbers of operations, fewest first.  If the best one makes tiles that are
    larger than all operands and results, there are some among them that do not.
    """
    best = plan(program)
    others = candidates(program, "second")
    if best.is_wide:
        others += candidates(program, "second", narrow=True)
    different = {x.flops: x for x in reversed(others) if x.flops != best.flops}
    return tuple(different[flops] for flops in sorted(different))


def candidates(program: ElementProgram, middle: Middle, narrow: bool = False) -> list[Plan]:
    """The plans of which the best is taken; without tiles that are wide, if ``narrow``."""
    merged = _merged(program)
    several = sum(isinstance(x, Contract) for x in merged) > 1

    def plans(ways: Iterable[tuple[Operation, ...]]) -> list[Plan]:
        reuses = (False, True)[: 1 + several]
        return [
            _Planner(program, x, reuse, middle, narrow).plan() for reuse in reuses for x in ways
        ]

    usual = dict.fromkeys(turned(program, x) for x in (merged, program.operations))
    found = plans(usual)
    products = _merged(program, multiplications=True)
    if products != merged and any(_has_squares(program, x) for x in products):
        found += [x for x in plans([turned(program, products)]) if not x.has_larger_tables]
    return found


def _has_squares(program: ElementProgram, operation: Operation) -> bool:
    """Whether a value of an element is multiplied with itself, as the Jacobian in a metric."""
    operands = [x for x in operation.operands if program.batch[x]]
    return isinstance(operation, Contract) and len(set(operands)) < len(operands)


def one_by_one(program: ElementProgram) -> Plan:
    """The plan in which every contraction has the order that is best for it alone."""
    operations = turned(program, program.operations)
    return _Planner(program, operations, reuse=False, middle="second").plan()


# ---- Contractions of contractions ----------------------------------------------------------------


def _merged(program: ElementProgram, multiplications: bool = False) -> tuple[Operation, ...]:
    """The operations, every contraction of contractions written as one.

    Of values that are multiplied point by point, too, if ``multiplications`` count as such.  The
    order is then ours to choose, and what several share is found again where it is the same step.
    Numbers of values stay; a contraction that nothing reads any more is a dead step.
    """
    first = len(program.inputs)
    operations = list(program.operations)
    uses = Counter(x for operation in operations for x in operation.operands)
    uses.update(out.value for out in program.outputs)
    products: dict[int, Contract] = {}
    for number, operation in enumerate(operations, start=first):
        product = operation
        if isinstance(operation, Contract) and _transposes(operation):
            # A product that is only read in another order is made in that order.
            (value,) = operation.operands
            inner = products.get(value)
            if inner is not None and uses[value] == 1 and _has_any_order(program, inner):
                product = _inlined(operation, value, inner)
        if multiplications and isinstance(operation, Map) and operation.function == "mul":
            if any(x in products for x in operation.operands):
                product = contraction(operation.terms, operation.output, operation.extents)
        if not isinstance(product, Contract) or len(product.terms) < 2:
            continue
        for value in product.operands:
            inner = products.get(value)
            if inner is not None and _is_product(inner):
                if product.operands.count(value) > 1:
                    continue
                if len(product.terms) + len(inner.terms) - 1 <= _MOST_MERGED:
                    product = _inlined(product, value, inner)
        products[number] = product
        if isinstance(operation, Contract):
            operations[number - first] = product
    return tuple(operations)


def _largest_first(program: ElementProgram, operations: Sequence[Operation]) -> list[int]:
    """The operations that outputs need; small contractions, and what is only summed, come last.

    What the others have made is then there for them to use.
    """
    first = len(program.inputs)
    everything = set(range(program.batch_rank))
    needed = {out.value for out in program.outputs}
    kept = {out.value for out in program.outputs if set(out.batch) == everything}
    for number in reversed(range(first, first + len(operations))):
        for values in (needed, kept):
            if number in values:
                values.update(operations[number - first].operands)
    numbers = [n for n in range(first, first + len(operations)) if n in needed]
    missing = {n: {x for x in operations[n - first].operands if x >= first} for n in numbers}
    readers: dict[int, list[int]] = {}
    for number in numbers:
        for operand in missing[number]:
            readers.setdefault(operand, []).append(number)

    def entry(number: int) -> tuple[bool, int, int]:
        operation = operations[number - first]
        if not isinstance(operation, Contract):
            return False, -sys.maxsize, number
        size = math.prod(operation.extents[x] for x in operation.output)
        return number not in kept, -size, number

    ready = [entry(n) for n in numbers if not missing[n]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        *_, number = heapq.heappop(ready)
        order.append(number)
        for reader in readers.get(number, []):
            missing[reader].discard(number)
            if not missing[reader]:
                heapq.heappush(ready, entry(reader))
    return order


def _transposes(operation: Contract) -> bool:
    """Whether a contraction is nothing but a transposition."""
    (_, labels), *others = operation.terms
    return not others and sorted(labels) == sorted(operation.output)


def _has_any_order(program: ElementProgram, inner: Contract) -> bool:
    """Whether a product is made as fast in another order: with a table, or of square matrices.

    Of others, threads have blocks of rows and columns, and would write them far apart.
    """
    table = not all(program.batch[x] for x in inner.operands)
    square = len({extent for _, extent in inner.sizes}) == 1
    return _is_product(inner) and (table or square)


def _is_product(inner: Contract) -> bool:
    """Whether a contraction is of several tiles, without diagonals and broadcasts."""
    carried = "".join(labels for _, labels in inner.terms)
    return (
        len(inner.terms) > 1
        and set(inner.output) <= set(carried)
        and all(len(set(labels)) == len(labels) for _, labels in inner.terms)
    )


def _inlined(outer: Contract, value: int, inner: Contract) -> Contract:
    """``outer`` with the terms of ``inner`` in place of its value."""
    extents = dict(outer.extents)
    (own,) = [labels for x, labels in outer.terms if x == value]
    names = dict(zip(inner.output, own, strict=True))
    spare = (x for n in range(1000) if (x := letters(n + 1)[-1]) not in extents)
    for label, extent in inner.sizes:
        if label not in names:
            names[label] = next(spare)
            extents[names[label]] = extent
    terms: list[tuple[int, str]] = []
    for term in outer.terms:
        if term[0] == value:
            terms += [(v, "".join(names[x] for x in labels)) for v, labels in inner.terms]
        else:
            terms.append(term)
    return contraction(terms, outer.output, extents)


# Tiles and their labels in a contraction.
Terms = list[tuple[int, str]]


class _Planner:
    """Plans operations one by one; with ``reuse``, contractions by what others have made, too."""

    def __init__(
        self,
        program: ElementProgram,
        operations: Sequence[Operation],
        reuse: bool,
        middle: Middle,
        narrow: bool = False,
    ) -> None:
        self.program = program
        self.dtype = program.dtype
        self.operations = operations
        self.reuse = reuse
        self.middle = middle
        self.narrow = narrow
        self.tiles = [Tile(x.tile, x.dtype, bool(x.batch)) for x in program.inputs]
        self.steps: list[Step] = []
        self.made: dict[Step, int] = {}

    def plan(self) -> Plan:
        first = len(self.program.inputs)
        values = {n: n for n in range(first)}
        order: Iterable[int] = range(first, first + len(self.operations))
        if self.reuse:
            order = _largest_first(self.program, self.operations)
        for number in order:
            operation = self.operations[number - first]
            if isinstance(operation, Contract):
                values[number] = self.contract(operation, values)
            elif isinstance(operation, Map):
                values[number] = self.add(_canonical_pointwise(operation, values))
            else:
                values[number] = self.add(renumbered(operation, values))
        results = tuple(self._in_memory(values[out.value]) for out in self.program.outputs)
        shapes = tuple(self.tiles[values[out.value]].shape for out in self.program.outputs)
        made = Plan(self.program, tuple(self.tiles), tuple(self.steps), results, shapes)
        return made.without_dead_steps()

    def _in_memory(self, tile: int) -> int:
        """The tile that a reshape of it is in memory: there they are the same."""
        first = len(self.program.inputs)
        step = self.steps[tile - first] if tile >= first else None
        if not isinstance(step, View) or self.tiles[step.operand].size != self.tiles[tile].size:
            return tile
        in_order = (step.offset, step.strides) == (0, row_major(step.tile))
        return self._in_memory(step.operand) if in_order else tile

    def add(self, step: Step) -> int:
        number = self.made.setdefault(step, len(self.tiles))
        if number == len(self.tiles):
            batched = any(self.tiles[x].batched for x in step.operands)
            self.tiles.append(Tile(step.shape, self.dtype, batched))
            self.steps.append(step)
        return number

    def contract(self, operation: Contract, values: Mapping[int, int]) -> int:
        terms = [(values[value], labels) for value, labels in operation.terms]
        terms = [self._own_labels_summed(n, terms, operation.output) for n in range(len(terms))]
        terms = self._with_numbers(operation, terms)
        fewer = self._with_made(operation, terms) if self.reuse else terms
        if len(fewer) == len(terms) or len(fewer) > _FEW_TERMS:
            return self._contract(operation, terms)
        saved = self._state
        self._contract(operation, terms)
        price = sum(step.flops for step in self.steps[len(saved[1]) :])
        self._state = saved
        (less, _), pairs = self._cheapest(operation, fewer)
        if less >= price:
            return self._contract(operation, terms)
        for left, right in pairs:
            fewer = self._multiplied(operation, fewer, left, right)
        return self._arranged(operation, *fewer[0])

    @property
    def _state(self) -> tuple[list[Tile], list[Step], dict[Step, int]]:
        """What a trial changes."""
        return [*self.tiles], [*self.steps], {**self.made}

    @_state.setter
    def _state(self, saved: tuple[list[Tile], list[Step], dict[Step, int]]) -> None:
        self.tiles, self.steps, self.made = saved

    def _with_made(self, operation: Contract, terms: Terms) -> Terms:
        """The terms, with products that are steps already in place of their factors."""
        while len(terms) > 2:
            found = []
            for left, right in itertools.permutations(range(len(terms)), 2):
                step, _ = self._pair(operation, terms, left, right)
                if step in self.made:
                    found.append((self.made[step], left, right))
            if not found:
                break
            terms = self._multiplied(operation, terms, *min(found)[1:])
        return terms

    def _cheapest(
        self, operation: Contract, terms: Terms
    ) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """The order of a few terms that adds the fewest flops, and what those are.

        Among equals, one that goes on from what was computed last: others do so, too.
        """
        if len(terms) == 1:
            return (0, 0), []
        best: tuple[tuple[int, int], list[tuple[int, int]]] | None = None
        widest = widest_tile((x for _, x in operation.terms), operation.output, operation.extents)
        every = list(itertools.permutations(range(len(terms)), 2))
        # As a rule those that share labels, of which one differs from element to element.
        likely = [
            (left, right)
            for left, right in every
            if set(terms[left][1]) & set(terms[right][1])
            and any(self.tiles[terms[n][0]].batched for n in (left, right))
        ]
        for left, right in likely or every:
            step, _ = self._pair(operation, terms, left, right)
            if self.narrow and math.prod(step.shape) > widest:
                continue
            new = step not in self.made
            saved = self._state
            (flops, age), pairs = self._cheapest(
                operation, self._multiplied(operation, terms, left, right)
            )
            self._state = saved
            price = flops + new * step.flops, age - new * max(step.operands)
            if best is None or price < best[0]:
                best = price, [(left, right), *pairs]
        # Where every order makes some larger tile, the operation is planned by itself.
        return best or ((sys.maxsize, 0), [])

    def _multiplied(self, operation: Contract, terms: Terms, left: int, right: int) -> Terms:
        """The terms with the product of two of them in their place."""
        step, labels = self._pair(operation, terms, left, right)
        rest = [x for n, x in enumerate(terms) if n not in (left, right)]
        return [*rest, (self.add(step), labels)]

    def _contract(self, operation: Contract, terms: Terms) -> int:
        """Adds the steps of a contraction in the order that is best for it alone."""
        batched = tuple(self.tiles[value].batched for value, _ in terms)
        labels = tuple(x for _, x in terms)
        computed = tuple(self._computed(value) for value, _ in terms)
        sizes, output = operation.sizes, operation.output
        order = contraction_order(
            labels, output, sizes, batched, computed, self.middle, self.narrow
        )
        alive = list(range(len(terms)))
        for number, pair in enumerate(order, start=len(terms)):
            left, right = map(alive.index, pair)
            terms = self._multiplied(operation, terms, left, right)
            alive = [*(x for x in alive if x not in pair), number]
        return self._arranged(operation, *terms[0])

    def _arranged(self, operation: Contract, value: int, labels: str) -> int:
        if labels == operation.output:
            return value
        return self.add(_canonical_rearrange(value, labels, operation.output, operation.extents))

    def _computed(self, value: int) -> bool:
        """Whether a tile is made by the program, not read."""
        first = len(self.program.inputs)
        while value >= first and isinstance(step := self.steps[value - first], View):
            value = step.operand
        return value >= first and not isinstance(self.steps[value - first], Gather)

    def _own_labels_summed(
        self, number: int, terms: list[tuple[int, str]], output: str
    ) -> tuple[int, str]:
        """Sums a term over the labels that nothing else has."""
        value, labels = terms[number]
        others = output + "".join(x for n, (_, x) in enumerate(terms) if n != number)
        kept = "".join(label for label in labels if label in others)
        if kept == labels:
            return terms[number]
        extents = dict(zip(labels, self.tiles[value].shape, strict=True))
        return self.add(_canonical_rearrange(value, labels, kept, extents)), kept

    def _with_numbers(self, operation: Contract, terms: Terms) -> Terms:
        """The terms, a number that all elements share multiplied with the least that they share."""
        while True:
            shared = [n for n, (value, _) in enumerate(terms) if not self.tiles[value].batched]
            number, *others = sorted(shared, key=lambda n: self.tiles[terms[n][0]].size) or [0]
            if not others or self.tiles[terms[number][0]].size > 1:
                return terms
            terms = self._multiplied(operation, terms, number, others[0])

    def _pair(
        self, operation: Contract, terms: Terms, first: int, second: int
    ) -> tuple[Product, str]:
        """The product of two terms, and the labels of its result."""
        left, right = terms[first], terms[second]
        rest = [x for n, x in enumerate(terms) if n not in (first, second)]
        # The shared operand stands on the left, as the matrix of a mode product does.
        if self.tiles[left[0]].batched and not self.tiles[right[0]].batched:
            left, right = right, left
        later = operation.output + "".join(labels for _, labels in rest)
        kept = [x for x in dict.fromkeys(left[1] + right[1]) if x in later]
        if not rest and set(kept) == set(operation.output):
            labels = operation.output
        else:
            labels = _replace_in_place(left[1], right[1], kept)
        return _canonical_product(left, right, labels, operation.extents), labels


def _canonical_pointwise(operation: Map, values: Mapping[int, int]) -> Pointwise:
    (output, *labels), names = canonical(operation.output, *(x for _, x in operation.terms))
    return Pointwise(
        operation.function,
        tuple(values[value] for value in operation.operands),
        tuple(labels),
        output,
        tuple([(new, operation.extents[old]) for old, new in names]),
    )


def _canonical_product(
    left: tuple[int, str], right: tuple[int, str], output: str, extents: dict[str, int]
) -> Product:
    (left_labels, right_labels, output), names = canonical(left[1], right[1], output)
    sizes = tuple([(new, extents[old]) for old, new in names])
    return Product(left[0], right[0], left_labels, right_labels, output, sizes)


def _canonical_rearrange(
    operand: int, labels: str, output: str, extents: dict[str, int]
) -> Rearrange:
    (labels, output), names = canonical(labels, output)
    return Rearrange(operand, labels, output, tuple((new, extents[old]) for old, new in names))


def _replace_in_place(left: str, right: str, kept: Sequence[str]) -> str:
    """Labels of a product: the right operand's, the left's in place of the contracted ones."""
    new = [x for x in left if x in kept and x not in right]
    labels = []
    for label in right:
        if label in kept:
            labels.append(label)
        elif new:
            labels.append(new.pop(0))
    return "".join(new + labels)


def renumbered(step: Step, numbers: Sequence[int] | Mapping[int, int]) -> Step:
    """A step of other tiles."""
    if isinstance(step, Product):
        return replace(step, left=numbers[step.left], right=numbers[step.right])
    if isinstance(step, Rearrange):
        return replace(step, operand=numbers[step.operand])
    if isinstance(step, View | Place | Gather):
        return moved(step, numbers)
    return replace(step, operands=tuple(numbers[x] for x in step.operands))


def _keep(labels: str, in_: str, not_in: str = "") -> str:
    return "".join(x for x in labels if x in in_ and x not in not_in)
