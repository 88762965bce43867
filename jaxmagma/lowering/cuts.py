"""Where a program may be cut into parts that follow each other, and what then goes through memory.

The contractions of a program stand in a row.  Between any two of them it may be cut: those before
belong to earlier parts, those after to later ones.  Pointwise functions belong to either side, or
to both: then they are computed twice.  Many sets of values can be written between the sides; the
best is a minimum cut of the graph of values.  No later contraction may be reached from an earlier
one, or from an operand, but through a value that is written, or an operand that is read again.

A pointwise function of many tiles needs all of them at once.  So there is a second cut at the same
place, the results of the earlier contractions as they are, which leaves all that to later parts.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.programs.program import Contract, ElementProgram, Map, Operation, View


# Places between contractions that are looked at.
_MOST_PLACES = 24
# The capacity of what cannot be written: beyond that of all that can.
_UNBOUNDED = 1 << 28


def as_program(plan: Plan) -> ElementProgram:
    """A plan as a program again, whose operations are the steps."""
    outputs = zip(plan.program.outputs, plan.results, strict=True)
    return ElementProgram(
        plan.program.batch_rank,
        plan.program.inputs,
        tuple(map(_operation, plan.steps)),
        tuple(replace(out, value=value) for out, value in outputs),
        plan.program.precision,
    )


def _operation(step: Step) -> Operation:
    if isinstance(step, Product | Rearrange):
        return Contract(step.terms, step.output_labels, step.sizes)
    if isinstance(step, Pointwise):
        return Map(step.function, step.terms, step.output_labels, step.sizes)
    return step


def in_depth(program: ElementProgram, targets: Sequence[int]) -> list[int]:
    """The values that targets need, target by target, each after what it is made of."""
    first = len(program.inputs)
    order: list[int] = []
    seen: set[int] = set()
    for target in targets:
        stack = [(target, False)]
        while stack:
            value, ready = stack.pop()
            if ready:
                order.append(value)
            elif value not in seen:
                seen.add(value)
                stack.append((value, True))
                if value >= first:
                    operands = program.operations[value - first].operands
                    stack += [(x, False) for x in reversed(operands)]
    return order


@dataclass(frozen=True)
class Cut:
    """A place between two parts: targets that are made before it, and values that are written."""

    early: frozenset[int]
    written: frozenset[int]


class Weights:
    """The sum of what the values of a set weigh, a byte of the set at a time."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.tables: list[list[int]] = []
        for first in range(0, len(weights), 8):
            table = [0]
            for weight in weights[first : first + 8]:
                table += [weight + x for x in table]
            self.tables.append(table)

    def __call__(self, values: int) -> int:
        places = values.to_bytes(len(self.tables), "little")
        return sum(map(list.__getitem__, self.tables, places))


class Row:
    """The values that some targets need, in an order in which they can be computed.

    Those of the targets that are ``kept`` are in memory afterwards anyway.  Sets of values are
    integers, with a bit for each place in the order.
    """

    def __init__(
        self,
        program: ElementProgram,
        order: Sequence[int],
        targets: Sequence[int],
        kept: frozenset[int],
    ) -> None:
        self.program = program
        self.first = len(program.inputs)
        self.targets = targets
        self.kept = kept
        self.sizes = [math.prod(tile) for tile in program.tiles]
        everything = frozenset(range(program.batch_rank))
        # Values that do not depend on all batch axes are few: as soon made again as read.
        self.whole = [axes == everything for axes in program.batch]
        self.contractions = [x for x in order if self.whole[x] and self._contracts(x)]
        self._contracted = set(self.contractions)
        self._modes = {x for x in self.contractions if len(self._batched(x)) == 1}
        self.after = self._last_contractions(order)
        # Pointwise functions come as soon as they can: kernels make those of equal tiles together.
        self.order = sorted(order, key=lambda x: (self.after[x], x not in self._contracted))
        self.place = {value: n for n, value in enumerate(self.order)}
        self.readers = self._readers()
        self._inputs = self.set_of(x for x in self.order if x < self.first)
        self._with_all_axes = self.set_of(x for x in self.order if self.whole[x])
        self._tiles = self.set_of(self._held())
        self.flops = Weights([self._flops_of(x) for x in self.order])
        # What is read of values that do not depend on all batch axes is little.
        self.read_size = Weights([self.sizes[x] * self.whole[x] for x in self.order])

    def operation(self, value: int) -> Operation | None:
        return None if value < self.first else self.program.operations[value - self.first]

    def operands(self, value: int) -> tuple[int, ...]:
        operation = self.operation(value)
        return () if operation is None else operation.operands

    def _batched(self, value: int) -> list[int]:
        """The operands of a value that differ from element to element."""
        return [x for x in self.operands(value) if self.program.batch[x]]

    def _contracts(self, value: int) -> bool:
        operation = self.operation(value)
        if not isinstance(operation, Contract):
            return False
        return len(operation.terms) > 1 or len(operation.extents) > len(operation.output)

    def _last_contractions(self, order: Sequence[int]) -> dict[int, int]:
        """For every value, after how many of the contractions it can be made."""
        number = {value: n for n, value in enumerate(self.contractions, start=1)}
        after: dict[int, int] = {}
        for value in order:
            least = max((after[x] for x in self.operands(value)), default=0)
            after[value] = max(least, number.get(value, 0))
        return after

    def _held(self) -> set[int]:
        """Values that a kernel holds as tiles: made by a contraction, or for one."""
        contractions = [x for x in self.order if self._contracts(x)]
        held = {*contractions, *(x for n in contractions for x in self.operands(n))}
        return {
            x
            for x in held
            if x >= self.first and self.program.batch[x] and not isinstance(self.operation(x), View)
        }

    def _flops_of(self, value: int) -> int:
        operation = self.operation(value)
        if not isinstance(operation, Contract) or not self.program.batch[value]:
            return 0
        return 2 * math.prod(operation.extents.values())

    def _readers(self) -> dict[int, int]:
        """What reads a value, itself or what pointwise functions make of it."""
        readers = dict.fromkeys(self.order, 0)
        for value in reversed(self.order):
            found = 1 << self.place[value]
            if value not in self._contracted:
                found |= readers[value]
            for operand in self.operands(value):
                readers[operand] |= found
        return readers

    # ---- Parts -----------------------------------------------------------------------------------

    def needed(self, known: frozenset[int]) -> dict[int, int]:
        """For every value, what it is made of, back to operands and what is known."""
        needed: dict[int, int] = {}
        for value in self.order:
            found = 1 << self.place[value]
            if value not in known:
                for operand in self.operands(value):
                    found |= needed[operand]
            needed[value] = found
        return needed

    def values(self, part: int) -> list[int]:
        """The values of a set, in order."""
        return list(itertools.compress(self.order, map(int, f"{part:b}"[::-1])))

    def made(self, part: int, known: frozenset[int]) -> int:
        """What a part computes."""
        return part & ~self._inputs & ~self.set_of(known)

    def room(self, made: int) -> int:
        """About how many values of an element a kernel holds at once that computes such a set."""
        alive: list[tuple[int, int]] = []
        now = most = 0
        for value in self.values(made & self._tiles):
            readers = self.readers[value] & made
            if not readers and value not in self._contracted:
                continue  # it is but written
            # The result of a product with a matrix takes the place of its operand.
            freed = self._time(value) - (value not in self._modes)
            while alive and alive[0][0] <= freed:
                now -= heapq.heappop(alive)[1]
            last = self._time(self.order[readers.bit_length() - 1] if readers else value)
            heapq.heappush(alive, (last, self.sizes[value]))
            now += self.sizes[value]
            most = max(most, now)
        return most

    def _time(self, value: int) -> int:
        """When a value is made: contractions one by one, pointwise functions between them."""
        return 2 * self.after[value] + (value not in self._contracted)

    def has_all_axes(self, values: int) -> bool:
        """Whether values have all batch axes together, as the operands of a program must."""
        if values & self._with_all_axes:
            return True
        axes = (self.program.batch[x] for x in self.values(values))
        return len(frozenset[int]().union(*axes)) == self.program.batch_rank

    def set_of(self, values: Iterable[int]) -> int:
        return functools.reduce(int.__or__, (1 << self.place[x] for x in values), 0)

    # ---- Cuts ------------------------------------------------------------------------------------

    def cuts(self) -> list[Cut]:
        """The cuts of the row, in order."""
        ends = [n for n, x in enumerate(self.contractions, start=1) if self._is_end(x)]
        others = [n for n in range(len(self.contractions) + 1) if n not in ends]
        places = _some(ends, _MOST_PLACES)
        places = sorted([*places, *_some(others, _MOST_PLACES - len(places))])
        found = (cut(done) for done in places for cut in (self._as_they_are, self._least))
        return list(dict.fromkeys(found))

    def _is_end(self, value: int) -> bool:
        """Whether a tile has gone through all of its bases: next it meets others, or is wanted."""
        readers = [x for x in self.order if value in self.operands(x)]
        return value in self.targets or not self._modes.issuperset(readers)

    def _as_they_are(self, done: int) -> Cut:
        """The cut at which results of contractions are written."""
        early = frozenset(
            x
            for x in self.targets
            if self.after[x] < done or (self.after[x] == done and x in self._contracted)
        )
        written = set()
        seen: set[int] = set()
        left = self._reached(done, early)
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self._contracted:
                written.add(value)
            else:
                left += self.operands(value)
        return Cut(early, frozenset(written))

    def _reached(self, done: int, early: frozenset[int]) -> list[int]:
        """Values that can be made before a cut, and are read by what comes after."""
        found = {x for x in self.targets if x not in early and self.after[x] <= done}
        for value in self.order:
            if self.after[value] > done:
                found.update(x for x in self.operands(value) if self.after[x] <= done)
        return list(found)

    def _least(self, done: int) -> Cut:
        """The cut at which the fewest values are written and read."""
        early = frozenset(x for x in self.targets if self.after[x] <= done)
        sinks = self._reached(done, early)
        numbers: dict[int, int] = {}
        left = list(sinks)
        while left:
            value = left.pop()
            if value not in numbers:
                numbers[value] = len(numbers)
                if value not in self._contracted:
                    left += self.operands(value)
        source, sink = 2 * len(numbers), 2 * len(numbers) + 1
        edges: dict[tuple[int, int], int] = {}
        for value, n in numbers.items():
            edges[2 * n, 2 * n + 1] = self._price(value)
            if value in self._contracted or (
                value < self.first and self.program.inputs[value].constant is None
            ):
                edges[source, 2 * n] = _UNBOUNDED
            else:
                for operand in self.operands(value):
                    edges[2 * numbers[operand] + 1, 2 * n] = _UNBOUNDED
        for value in sinks:
            edges[2 * numbers[value] + 1, sink] = _UNBOUNDED
        near = _near_the_sink(edges, source, sink)
        cut = {x for x, n in numbers.items() if 2 * n + 1 in near and 2 * n not in near}
        return Cut(early, frozenset(x for x in cut if x >= self.first))

    def _price(self, value: int) -> int:
        """What it costs to have a value on both sides of a cut."""
        if value < self.first:
            return self.sizes[value] if self.whole[value] else 1
        operation = self.operation(value)
        copied = isinstance(operation, View) and operation.operand < self.first
        if copied or not self.whole[value]:
            return _UNBOUNDED
        return self.sizes[value] * (1 if value in self.kept else 2)


def _near_the_sink(edges: dict[tuple[int, int], int], source: int, sink: int) -> set[int]:
    """The nodes behind a minimum cut, as near to the sink as it can be."""
    # Comes with JAX, which requires it. Not needed by programs that fit, and slow to import.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    rows, columns = np.array(list(edges), np.int32).reshape(-1, 2).T
    capacities = np.array(list(edges.values()), np.int32)
    shape = (sink + 1, sink + 1)
    graph = csr_array((capacities, (rows, columns)), shape=shape)
    left = csr_array(graph - maximum_flow(graph, source, sink).flow)
    left.eliminate_zeros()
    backward = csr_array(left.T)
    return set(breadth_first_order(backward, sink, return_predecessors=False).tolist())


def _some(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly spread, the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[-1 - n * len(numbers) // most] for n in range(most)]
