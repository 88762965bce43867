"""The stages of a kernel: sweeps over fibres, and what is none. ``grouping`` finds them.

A *fibre* is one line of a tile. In a ``Sweep`` every thread owns fibres along one label of each
value it touches; the other labels, the *lines*, are spread over the threads. All operations that
leave the lines alone can share a sweep and hand fibres on in registers:

* a mode product ``y[.., m, ..] = sum_k matrix[m, k] x[.., k, ..]`` with fibres along k, then m;
* a pointwise function, a product without contraction, a transposition, a sum along the fibre;
* a *dot* ``y[..] = sum_k left[.., k] right[.., k]`` of two tiles that are read.

A fibre is owned by one thread, or by a quad: four lanes that have a quarter of it each, as tensor
cores take it.

What contracts two tiles of the same element is a ``Gemm``: every thread owns a block of the result.
Several such products of few tiles are dots of one sweep: what one thread reads serves all of them,
and functions of what they make need no shared memory.
If the result is only summed over elements, it is an ``Accumulation``: warps own pieces of the sum.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jaxmagma.lowering.cuda.parameters import WARP
from jaxmagma.plans.parity import WORTH
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.programs.program import Place


# A fibre in and a fibre out must fit in a thread's registers, of four bytes each; or in those of
# four lanes, which share so many values.
FIBRE_REGISTERS = 160
QUAD_VALUES = 64
# What tensor cores multiply in full precision.
BY_TENSOR_CORES = (np.dtype("float64"), np.dtype("complex128"))
# A sweep of single values with more operations than this gives each thread one place at a time.
LIGHT_MOVES = 8

LABELS = "abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ"


# Lanes that own a fibre together where tensor cores multiply it.
QUAD = 4
# How many additions of a value of its fibres take a quad as long as a product with a piece of a
# matrix: sm_90 has two fibres of each quad multiplied in 4 cycles, and added in half a cycle each.
PIECE = 4


# The label of the axis along which a fibre runs; the lines of a sweep have letters.
ALONG = "*"


@dataclass(frozen=True)
class Value:
    """A fibre in registers, ``length`` values: the tile's axes are lines of the sweep or ALONG."""

    tile: int
    labels: str
    length: int = 1


@dataclass(frozen=True)
class Matrix:
    """The matrix of a mode product, and where its rows (m) and columns (k) are among its axes."""

    tile: int
    row: int | None
    column: int | None


@dataclass(frozen=True)
class Move:
    """One operation of a sweep: its result, its operands in registers, and its matrix if any.

    Without a step it reads a tile, and nothing else.
    """

    step: Step | None
    result: Value
    operands: tuple[Value, ...]
    matrix: Matrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its matrix."""
        return self.result.length, self.operands[0].length

    @cached_property
    def is_dot(self) -> bool:
        """Whether it is a sum of products of two fibres."""
        return isinstance(self.step, Product) and bool(self.step.contracted) and not self.matrix

    @property
    def pairs(self) -> list[tuple[Value, Value]]:
        """What a dot multiplies: two fibres, or several of the same lengths, for a sum of dots."""
        return list(zip(self.operands[::2], self.operands[1::2], strict=True))

    @cached_property
    def pointwise(self) -> bool:
        """Whether each value of the result comes from one value of each operand."""
        if self.matrix is not None or self.step is None:
            return False
        if ALONG in self.operands[0].labels and ALONG not in self.result.labels:
            return False  # a sum
        return all(x.length in (1, self.result.length) for x in self.operands)


@dataclass(frozen=True)
class Outer:
    """``output += left right^T`` of two fibres of a thread; the output sums over elements."""

    output: int
    left: Value
    right: Value

    @property
    def operands(self) -> tuple[Value, Value]:
        return self.left, self.right


@dataclass(frozen=True)
class Sweep:
    """Operations on fibres; ``lines`` are the labels spread over threads, the last one fastest.

    ``lanes`` of a warp own a fibre together: 1 or QUAD. Of some tiles in shared memory, the
    ``wholes``, it makes all parts. Of a sweep of dots a thread has several ``places`` along some
    lines at a time, as far apart as there are threads along the line: what it reads serves all of
    them.
    """

    lines: str
    extents: Mapping[str, int]
    lanes: int = 1
    loads: tuple[Value, ...] = ()
    moves: tuple[Move, ...] = ()
    outers: tuple[Outer, ...] = ()
    tiles: Mapping[int, Value] = field(default_factory=dict)  # what the sweep computes
    wholes: tuple[int, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)

    def operand(self, tile: int, labels: str, length: int) -> Value:
        """A tile in registers: made in this sweep, or read."""
        return self.tiles.get(tile) or Value(tile, labels, length if ALONG in labels else 1)

    def with_move(self, move: Move) -> "Sweep":
        """The same with one more operation."""
        loads, moves = self.loads, (*self.moves, move)
        for value in move.operands:
            if value.tile not in self.tiles and value not in loads:
                loads = (*loads, value)
        tiles = {**self.tiles, move.result.tile: move.result}
        return replace(self, loads=loads, moves=moves, tiles=tiles)

    @property
    def dots(self) -> list[Move]:
        return [x for x in self.moves if x.is_dot]

    def with_outer(self, outer: Outer) -> "Sweep":
        """The same with one more outer product."""
        loads = (x for x in outer.operands if x not in self.at_hand)
        return replace(self, loads=(*self.loads, *loads), outers=(*self.outers, outer))

    @property
    def at_hand(self) -> list[Value]:
        """What is in registers."""
        return [*self.loads, *self.tiles.values()]

    @property
    def count(self) -> int:
        """Of fibres, or of places that a thread has at a time."""
        return math.prod(map(self.threads, self.lines))

    def threads(self, line: str) -> int:
        """So many are side by side along a line."""
        return -(-self.extents[line] // self.places.get(line, 1))

    def size(self, value: Value) -> int:
        """How many of its values a thread has at a time, if it is a dot or an operand of one."""
        return math.prod(self.places.get(x, 1) for x in value.labels)

    @property
    def flops(self) -> int:
        """Of one element."""
        steps = (x.step for x in self.moves)
        return sum(x.flops for x in steps if isinstance(x, Product | Rearrange | Pointwise))

    @cached_property
    def single(self) -> bool:
        """Whether all fibres are single values."""
        return all(value.length == 1 for value in self.at_hand)

    @property
    def light(self) -> bool:
        """Whether a thread had better be at several places at a time."""
        return self.single and len(self.moves) <= LIGHT_MOVES


@dataclass(frozen=True)
class Gemm:
    """``out = sum_k left right`` of two tiles of one element."""

    number: int
    step: Product


@dataclass(frozen=True)
class Total:
    """``out = sum_k operand``; lanes of a warp have some terms each, and add up what they have."""

    number: int
    step: Rearrange

    @property
    def terms(self) -> int:
        return math.prod(self.step.extents[x] for x in self.summed)

    @property
    def summed(self) -> str:
        return "".join(x for x in self.step.labels if x not in self.step.output_labels)

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """The labels of the result with the number of places along each."""
        return tuple((x, self.step.extents[x]) for x in self.step.output_labels)

    @property
    def lanes(self) -> int:
        """So many have a sum together: a power of two, with more than one term each."""
        lanes, lines = 1, math.prod(self.step.shape)
        while 2 * lanes * lines <= WARP and 4 * lanes <= self.terms:
            lanes *= 2
        return lanes


@dataclass(frozen=True)
class Assembly:
    """Parts of a tile put together in shared memory."""

    number: int
    step: Place


@dataclass(frozen=True)
class Accumulation:
    """``output += sum_k left right`` of two tiles of an element; the output sums over elements.

    Rows are labels of the left operand; of those summed over, ``contracted``, the last is fastest.
    """

    output: int
    step: Product
    contracted: str


Stage = Sweep | Gemm | Total | Assembly | Accumulation


def copies(stage: Stage) -> bool:
    """Whether a stage moves a tile, and does nothing else."""
    return isinstance(stage, Sweep) and any(move.step is None for move in stage.moves)


def made_by(stage: Stage) -> list[int]:
    """The tiles that a stage makes."""
    if isinstance(stage, Sweep):
        return [*stage.tiles, *stage.wholes]
    return [] if isinstance(stage, Accumulation) else [stage.number]


@dataclass(frozen=True)
class Mode:
    """A product with a matrix known before the kernel starts, as an operation on fibres."""

    matrix: int
    matrix_labels: str
    tile: int
    tile_labels: str
    contracted: str  # "" or one label
    new: str  # "" or one label


def as_mode(plan: Plan, step: Step) -> Mode | None:
    """``step`` as a mode product, if it is one whose fibres fit in registers."""
    if not isinstance(step, Product):
        return None
    for matrix, tile in ((step.left, step.right), (step.right, step.left)):
        if plan.tiles[matrix].batched or matrix >= len(plan.program.inputs):
            continue
        if not plan.tiles[tile].batched and tile < len(plan.program.inputs):
            continue
        left = matrix == step.left
        matrix_labels = step.left_labels if left else step.right_labels
        tile_labels = step.right_labels if left else step.left_labels
        contracted = "".join(x for x in matrix_labels if x in tile_labels)
        new = "".join(x for x in matrix_labels if x not in tile_labels)
        if len(contracted) > 1 or len(new) > 1 or not matrix_labels:
            continue
        if contracted and contracted in step.output_labels:
            continue
        length = step.extents.get(contracted, 1) + step.extents.get(new, 1)
        most = FIBRE_REGISTERS // words(plan, tile)
        if plan.tiles[tile].dtype in BY_TENSOR_CORES:
            most = max(most, QUAD_VALUES)
        if length > most:
            continue
        return Mode(matrix, matrix_labels, tile, tile_labels, contracted, new)
    return None


def words(plan: Plan, tile: int) -> int:
    """Registers for one value."""
    return max(1, plan.tiles[tile].dtype.itemsize // 4)


def is_mirrored(sweep: Sweep, split: Collection[int]) -> bool:
    """Whether quads have opposite values of fibres in one lane, to multiply halves of matrices.

    All fibres of a sweep have their values in the same lanes, so all of its products or none are of
    halves; and the sums and differences of a fibre serve all products with it.
    """
    if sweep.lanes == 1 or not split:
        return False
    products = [move for move in sweep.moves if move.matrix is not None]
    if any(m.matrix and m.matrix.tile not in split for m in products):
        return False
    sizes = [m.shape for m in products]
    whole = sum(_pieces(rows, columns) for rows, columns in sizes)
    halves = sum(_pieces(rows, columns, halves=True) for rows, columns in sizes)
    fibres = [m.result for m in products] + list({m.operands[0] for m in products})
    additions = sum(2 * slots(x.length // 2, sweep.lanes) for x in fibres)
    return bool(products) and WORTH * (PIECE * (whole - halves) - additions) >= PIECE * whole


def _pieces(rows: int, columns: int, halves: bool = False) -> int:
    """What tensor cores take of a matrix, or of its halves, one at a time."""
    if halves:
        return _pieces(-(-rows // 2), -(-columns // 2)) + _pieces(rows // 2, columns // 2)
    return -(-rows // 8) * -(-columns // 4)


def slots(length: int, lanes: int, mirrored: bool = False) -> int:
    """Values of a fibre that a lane has."""
    if mirrored:
        return slots(-(-length // 2), lanes) + slots(length // 2, lanes)
    return -(-length // lanes)


def live_registers(plan: Plan, sweep: Sweep, split: Collection[int]) -> int:
    """The most registers that whole fibres of a sweep take at once.

    Of pointwise operations in a row only fibres that come in or go on count: they are done point by
    point, so that what is in between is alive for one point only. A thread that multiplies halves
    has sums and differences where it had the values of a fibre.
    """
    mirrored = is_mirrored(sweep, split)
    groups = grouped(sweep)
    numbers: dict[Value, int] = {}  # which take less time than the values

    def numbered(values: Iterable[Value]) -> set[int]:
        return {numbers.setdefault(x, len(numbers)) for x in values}

    results = [numbered(move.result for move in group) for group in groups]
    operands = [numbered(x for move in group for x in move.operands) for group in groups]
    multiplied = [numbered(x for y in found for x in y.operands) for found in outers_after(sweep)]
    dots = {x.result for x in sweep.dots}
    sizes = [
        sweep.size(x) if x in dots else slots(x.length, sweep.lanes, mirrored) for x in numbers
    ]
    last: dict[int, int] = {}
    for position, used in enumerate(operands):
        last.update(dict.fromkeys(used, position))
    for position, used in enumerate(multiplied):
        last.update((x, max(last.get(x, -1), position)) for x in used)

    def size(values: Iterable[int]) -> int:
        return sum(map(sizes.__getitem__, values))

    alive: set[int] = set()
    most = 0
    for position, group in enumerate(groups):
        made = results[position]
        if group[0].pointwise:
            # Each point needs some values more.
            extra = max(1, min(len(group), 8))
            now = {x for x in made if last.get(x, -1) > position}
            done = {x for x in alive if last[x] == position}
            # A fibre that ends here gives its registers to one that begins.
            inside = size(alive - done) + max(size(done), size(now)) + extra
        elif group[0].is_dot:
            # Of what is read there is one value at a time, at each place.
            now = made
            read = {x for y in group for x in y.operands}
            inside = size(alive | made) + sum(map(sweep.size, read))
        else:
            alive |= operands[position]
            now = made
            inside = size(alive | made)
        most = max(most, inside)
        if multiplied[position]:
            most = max(most, size(alive | now | multiplied[position]))
        alive = {x for x in alive | now if last.get(x, -1) > position}
    if sweep.lanes == QUAD:
        matrices = {m.matrix: m.shape for m in sweep.moves if m.matrix}
        most += sum(_pieces(*sizes, halves=mirrored) for sizes in matrices.values())
    registers = max(words(plan, value.tile) for value in sweep.at_hand)
    return most * registers


def outers_after(sweep: Sweep) -> list[list[Outer]]:
    """The outer products that follow each group of moves: as soon as both fibres are there."""
    groups = grouped(sweep)
    found: list[list[Outer]] = [[] for _ in groups] or [[]]
    if not sweep.outers:
        return found
    touched: dict[Value, int] = {}
    for position, group in enumerate(groups):
        for move in group:
            for value in (*move.operands, move.result):
                touched.setdefault(value, position)
    for outer in sweep.outers:
        found[max(touched.get(x, 0) for x in outer.operands)].append(outer)
    return found


def grouped(sweep: Sweep) -> list[list[Move]]:
    """Runs of operations: pointwise ones on fibres of one length, dots, and all others singly."""
    groups: list[list[Move]] = []
    for move in sweep.moves:
        if groups and _belongs(groups[-1][-1], move):
            groups[-1].append(move)
        else:
            groups.append([move])
    return groups


def _belongs(last: Move, move: Move) -> bool:
    """Whether an operation is of the same run as the last one before it."""
    if move.pointwise or last.pointwise:
        return move.pointwise and last.pointwise and move.result.length == last.result.length
    lengths = {x.operands[0].length for x in (move, last)}
    return move.is_dot and last.is_dot and len(lengths) == 1


def described(stage: Stage) -> str:
    """A stage in a line."""
    if isinstance(stage, Accumulation):
        left, right = stage.step.operands
        return f"out{stage.output} += %{left} %{right}"
    if not isinstance(stage, Sweep):
        return f"{type(stage).__name__.lower()}: %{stage.number}"
    owners = "quads" if stage.lanes > 1 else "threads"
    done = []
    for move in stage.moves:
        plain = "dot" if move.is_dot else "mul" if len(move.operands) > 1 else "copy"
        how = f"m{move.matrix.tile}" if move.matrix else getattr(move.step, "function", plain)
        operands = " ".join(f"%{x.tile}[{x.labels}]" for x in move.operands)
        done.append(f"%{move.result.tile}[{move.result.labels}] = {how} {operands}")
    done += [f"out{x.output} += %{x.left.tile} %{x.right.tile}" for x in stage.outers]
    lines = ", ".join(f"{x} < {stage.extents[x]}" for x in stage.lines)
    return f"{owners} on {lines}: {'; '.join(done)}"


def copy_sweep(plan: Plan, tile: int) -> Sweep:
    """Reads a tile, one value a thread, for an output that is an input or for staging."""
    shape = plan.tiles[tile].shape
    labels = LABELS[: len(shape)]
    value = Value(tile, labels)
    sweep = Sweep(labels, dict(zip(labels, shape, strict=True)))
    return sweep.with_move(Move(None, value, (value,)))
