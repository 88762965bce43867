"""Runs of pointwise steps as one instruction: micro-operations over chunks of points.

A *point* is one value of the output tiles, which all have the same shape.  The executor works on a
few points at a time, so that intermediate values stay in *slots*, a small register file in the
nearest cache; it fetches operations once a chunk.  Slots are shared by values that are not alive at
the same time.

An *address* is ``(space, place, offset, stride)``: point ``p`` is at ``place + p * stride`` of the
scratch (``offset`` is 0), or at ``offset + p * stride`` values from the start of a slot.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from jaxmagma.lowering.cpu.places import Location, Locations, flat_stride
from jaxmagma.plans.plan import Plan, Pointwise
from jaxmagma.programs.functions import LONG


SLOT, SCRATCH = range(2)
Address = tuple[int, int, int, int]

# The functions, by number: those of a program, and what the executor does besides.
FUNCTION_NAMES = (
    "add sub mul div neg abs sign floor ceil round_away round_even sqrt rsqrt max min "
    "lt le gt ge eq ne is_finite not and or xor select first fma fms fnma "
    "fused_multiply_add product_error inverse_binade common_digits reciprocal quotient "
    "cbrt exp exp2 expm1 log log1p logistic sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc rem pow atan2 "
    "round_to_float32 round_to_bfloat16 round_to_float16"
).split()
NUMBERS = {name: n for n, name in enumerate(FUNCTION_NAMES)}


# ---- Which steps make one expression -------------------------------------------------------------


def units(plan: Plan, locations: Locations) -> tuple[list[list[int]], list[int]]:
    """The batched steps in the order of execution, pointwise ones of equal shape together.

    Also, for every tile, the number of the unit that completes it; -1 if none needs to.
    """
    found: list[list[int]] = []
    shapes: list[tuple[int, ...] | None] = []
    last: dict[tuple[int, ...], int] = {}  # the last unit of a shape
    position = [-1] * len(plan.tiles)
    sums = {
        x: step
        for number, step in plan.numbered_steps()
        if number in locations.done
        for x in step.operands
        if x in locations.accumulates
    }
    for number, step in plan.numbered_steps():
        if not plan.tiles[number].batched:
            continue
        after = max(position[x] for x in step.operands)
        if number in locations.accumulates:
            # What it is added to must be there before.
            after = max(after, *(position[x] for x in sums[number].operands))
        if number in locations.done:
            position[number] = after
            continue
        if isinstance(step, Pointwise):
            ready = 0
            together: dict[int, int] = {}
            for x, labels in zip(step.operands, step.labels, strict=True):
                unit = position[x]
                if (
                    unit >= 0
                    and x not in locations.done
                    and shapes[unit] == step.shape
                    and labels == step.output_labels
                ):
                    ready = max(ready, unit)
                    together[unit] = together.get(unit, 0) + 1
                else:
                    ready = max(ready, unit + 1)
            if last.get(step.shape, -1) >= ready:
                later = [x for x in together.items() if x[0] >= ready]
                unit = max(later, key=lambda x: x[::-1], default=(last[step.shape], 0))[0]
                found[unit].append(number)
                position[number] = unit
                continue
        position[number] = len(found)
        found.append([number])
        shapes.append(step.shape if isinstance(step, Pointwise) else None)
        if isinstance(step, Pointwise):
            last[step.shape] = position[number]
    return found, position


# ---- One expression ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A tile that an expression reads, and how its points lie there."""

    root: int
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stride(self) -> int | None:
        return flat_stride(self.strides, self.shape)

    @property
    def is_scalar(self) -> bool:
        return all(s == 0 for s, n in zip(self.strides, self.shape, strict=True) if n > 1)


Value = int | Source  # a tile that the expression makes, or one that it reads


@dataclass
class Micro:
    """One micro-operation on values."""

    function: str
    result: int
    operands: list[Value]
    needed: tuple[Value, bool] | None = None  # where alone: where a value is zero, or is not

    @property
    def reads(self) -> list[Value]:
        return self.operands if self.needed is None else [self.needed[0], *self.operands]


@dataclass
class Expression:
    """The micro-operations of a unit, products fused into the sums that alone use them."""

    shape: tuple[int, ...]
    micros: list[Micro] = field(default_factory=list)
    last: dict[Value, int] = field(default_factory=dict)  # the last micro that reads it

    @property
    def sources(self) -> list[Source]:
        found = [x for m in self.micros for x in m.reads if isinstance(x, Source)]
        return list(dict.fromkeys(found))


def expression(plan: Plan, locations: Locations, unit: Sequence[int], kept: Set[int]) -> Expression:
    """The expression of a unit; ``kept`` are the tiles that are used outside of it."""
    first = locations.first
    made: dict[int, Micro] = {}
    shape = plan.tiles[unit[0]].shape
    inside = set(unit)
    uses: dict[int, int] = {}
    for number in unit:
        step = plan.steps[number - first]
        assert isinstance(step, Pointwise)
        operands: list[Value] = []
        for x, labels in zip(step.operands, step.labels, strict=True):
            if x in inside and labels == step.output_labels:
                operands.append(x)
                uses[x] = uses.get(x, 0) + 1
            else:
                operands.append(_source(step, locations.of[x], labels))
        function = step.function
        if function == "first":
            operands = operands[:1]
        made[number] = Micro(function, number, operands)
    real = plan.program.dtype.kind != "c"
    for number in unit:
        micro = made[number]
        if micro.function not in ("add", "sub"):
            continue
        for position in (1, 0):
            factor = micro.operands[position]
            if (
                isinstance(factor, int)
                and made[factor].function == "mul"
                and uses[factor] == 1
                and factor not in kept
                and (real or micro.function == "add")
            ):
                function = "fma" if micro.function == "add" else ("fms", "fnma")[position]
                operands = [*made[factor].operands, micro.operands[1 - position]]
                made[number] = Micro(function, number, operands)
                del made[factor]
                break
    found = Expression(shape, _where_needed({n: made[n] for n in unit if n in made}, kept))
    for n, micro in enumerate(found.micros):
        for operand in micro.reads:
            found.last[operand] = n
    return found


def _where_needed(made: Mapping[int, Micro], kept: Set[int]) -> list[Micro]:
    """The operations in an order in which those of a branch come behind what chooses it.

    XLA's loops compute a long function that only one branch needs where that is taken.
    """
    if not any(x.function == "select" for x in made.values()):
        return list(made.values())
    uses = Counter(x for micro in made.values() for x in micro.operands if isinstance(x, int))
    for choice in made.values():
        if choice.function != "select" or len(set(choice.operands)) < 3:
            continue
        which, *branches = choice.operands
        for taken, branch in enumerate(branches):
            reads, left, seen = Counter([branch]), [branch], set[int]()
            while left:
                x = left.pop()
                if not isinstance(x, int) or x not in made or x in kept or x in seen:
                    continue
                # What something else reads, too, is needed everywhere.
                if reads[x] < uses[x]:
                    continue
                seen.add(x)
                # It takes so long that it is worth asking first whether any lane needs it.
                if made[x].function in LONG and made[x].needed is None:
                    made[x].needed = which, bool(taken)
                reads.update(made[x].operands)
                left += dict.fromkeys(made[x].operands)
    if all(x.needed is None for x in made.values()):
        return list(made.values())
    ordered: dict[int, Micro] = {}
    for number in made:
        waiting = [number]
        while waiting:
            before = [x for x in made[waiting[-1]].reads if isinstance(x, int) and x in made]
            missing = [x for x in before if x not in ordered]
            waiting += missing
            if not missing:
                done = waiting.pop()
                ordered[done] = made[done]
    return list(ordered.values())


def _source(step: Pointwise, at: Location, labels: str) -> Source:
    strides = [
        sum(s for s, y in zip(at.strides, labels, strict=True) if y == x)
        for x in step.output_labels
    ]
    return Source(at.root, at.offset, tuple(strides), step.shape)


# ---- A matrix at every point ---------------------------------------------------------------------


@dataclass(frozen=True)
class PointMatrix:
    """Results that are, at every point, the product of its own matrix with a vector."""

    results: list[int]
    matrix: list[list[Source]]  # by result, by component of the vector
    vector: list[Source]

    @property
    def root(self) -> int:
        """The tile of which all entries of the matrix are parts."""
        return self.matrix[0][0].root


def point_matrix(made: Expression, kept: Set[int]) -> PointMatrix | None:
    """The expression as a square matrix times a vector at every point, if it is one."""
    terms: dict[int, list[tuple[Value, Value]]] = {}
    for micro in made.micros:
        match micro.function, micro.operands:
            case "mul", [a, b]:
                terms[micro.result] = [(a, b)]
            case "fma", [a, b, int(before)] if before in terms and before not in kept:
                terms[micro.result] = [*terms.pop(before), (a, b)]
            case _:
                return None
    if set(terms) != kept:
        return None
    for root in {x.root for x in next(iter(terms.values()))[0] if isinstance(x, Source)}:
        rows = [[_split(x, root) for x in products] for products in terms.values()]
        matrix = [[x[0] for x in row if x] for row in rows]
        vectors = [[x[1] for x in row if x] for row in rows]
        square = all(None not in row and len(row) == len(rows) for row in rows)
        if square and all(x == vectors[0] for x in vectors):
            return PointMatrix(list(terms), matrix, vectors[0])
    return None


def _split(product: tuple[Value, Value], root: int) -> tuple[Source, Source] | None:
    """The factor that is part of the tile ``root``, and the other one, which is not."""
    for a, b in (product, product[::-1]):
        if isinstance(a, Source) and isinstance(b, Source) and a.root == root != b.root:
            return a, b
    return None
