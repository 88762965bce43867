"""From the steps of a plan to sweeps over fibres: what one thread does between two barriers.

A *fibre* is one line of a tile. In a ``Sweep`` every thread owns fibres along one label of each
value it touches; the other labels, the *lines*, are spread over the threads. All operations that
leave the lines alone can share a sweep and hand fibres on in registers:

* a mode product ``y[.., m, ..] = sum_k matrix[m, k] x[.., k, ..]`` with fibres along k, then m;
* a pointwise function, a product without contraction, a transposition, a sum along the fibre.

A fibre is owned by one thread, or by a quad: four lanes that have a quarter of it each, as tensor
cores take it.

What contracts two tiles of the same element is a ``Gemm``: every thread owns a block of the result.
If the result is only summed over elements, it is an ``Accumulation``: warps own pieces of the sum.

Steps are grouped by list scheduling: the first step that is ready opens a sweep, and every ready
step that fits joins it. So equal branches of a program (the interpolations of two functions, the
three derivatives of one) go through their sweeps together and read what they share once.

**Pointwise operations** join in groups that belong together, all or none, as far as the fibres that
are then alive at once fit in registers. Where they do not, fibres are handed on through shared
memory to a sweep of single values: one thread for each point, everything in registers. That is also
what a program of pointwise operations alone becomes, however many they are.
"""

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from jaxmagma.lowering.cuda.origins import Origin, origin
from jaxmagma.parity import WORTH
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.program import Gather, Place, View


# A fibre in and a fibre out must fit in a thread's registers, of four bytes each.
FIBRE_REGISTERS = 160
# So must all fibres of a sweep that are alive at once; the rest of 255 is for addresses and for
# what the compiler loads ahead.
LIVE_REGISTERS = 176
# Pointwise steps that read more tiles than this do so value by value, with many threads, rather
# than fibre by fibre to hand on to a mode product.
MOST_LOADS = 6
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

    @property
    def name(self) -> str:
        return f"r{self.tile}"


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


@dataclass
class Sweep:
    """Operations on fibres; ``lines`` are the labels spread over threads, the last one fastest.

    ``lanes`` of a warp own a fibre together: 1 or QUAD.
    """

    lines: str
    extents: dict[str, int]
    lanes: int = 1
    loads: list[Value] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    tiles: dict[int, Value] = field(default_factory=dict)  # what the sweep computes
    outers: list[Outer] = field(default_factory=list)

    def add(self, move: Move) -> None:
        self.moves.append(move)
        self.tiles[move.result.tile] = move.result

    @property
    def count(self) -> int:
        return math.prod(self.extents[label] for label in self.lines)

    @property
    def single(self) -> bool:
        """Whether all fibres are single values."""
        return all(value.length == 1 for value in [*self.loads, *self.tiles.values()])

    @property
    def light(self) -> bool:
        """Whether a thread had better be at several places at a time."""
        return self.single and len(self.moves) <= LIGHT_MOVES

    def copy(self) -> "Sweep":
        return replace(self, loads=[*self.loads], moves=[*self.moves], tiles={**self.tiles})


@dataclass
class Gemm:
    """``out = sum_k left right`` of two tiles of one element, or a sum of one tile (no right)."""

    number: int
    step: Product | Rearrange


@dataclass
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


Stage = Sweep | Gemm | Assembly | Accumulation


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
        if length * _words(plan, tile) > FIBRE_REGISTERS:
            continue
        return Mode(matrix, matrix_labels, tile, tile_labels, contracted, new)
    return None


def _words(plan: Plan, tile: int) -> int:
    """Registers for one value."""
    return max(1, plan.tiles[tile].dtype.itemsize // 4)


def _operands(step: Step) -> list[tuple[int, str]]:
    """The operands with their labels."""
    if isinstance(step, Product):
        return [(step.left, step.left_labels), (step.right, step.right_labels)]
    if isinstance(step, Rearrange):
        return [(step.operand, step.labels)]
    assert isinstance(step, Pointwise)
    return list(zip(step.operands, step.labels, strict=True))


def _summed(step: Product | Rearrange | Pointwise) -> str:
    labels = dict.fromkeys("".join(labels for _, labels in _operands(step)))
    return "".join(x for x in labels if x not in step.output_labels)


class Scheduler:
    """Groups the steps of ``plan`` into stages; tiles of ``skipped`` nobody needs on chip.

    With ``quads``, fibres are owned by quads wherever matrices multiply them. Matrices in ``split``
    are better multiplied half by half. ``registers`` of a thread are taken by what is no part of a
    sweep.
    """

    def __init__(
        self,
        plan: Plan,
        skipped: Iterable[int] = (),
        quads: bool = False,
        split: Collection[int] = (),
        registers: int = 0,
    ) -> None:
        self.plan = plan
        self.most = LIVE_REGISTERS - registers
        self.quads = quads
        self.split = split
        self.skipped = set(skipped)
        self.ready = set(range(len(plan.program.inputs)))  # tiles in memory
        self.origins: dict[int, Origin] = {}
        self.todo: dict[int, Product | Rearrange | Pointwise | Place] = {}
        self.consumers: dict[int, list[int]] = {}
        for number, step in plan.numbered_steps():
            if number in self.skipped:
                continue
            if isinstance(step, View | Gather):
                self.origins[number] = origin(plan, number)
                continue
            self.todo[number] = step
            for operand in step.operands:
                self.consumers.setdefault(operand, []).append(number)

    def stages(self) -> list[Stage]:
        stages: list[Stage] = []
        while self.todo:
            number = self._first()
            step = self.todo.pop(number)
            sweep = None if isinstance(step, Place) else self._open(number, step)
            if sweep is not None:
                self._fill(sweep)
                stages.append(sweep)
                self.ready |= sweep.tiles.keys()
                continue
            if isinstance(step, Place):
                stages.append(Assembly(number, step))
            else:
                assert not isinstance(step, Pointwise)
                stages.append(Gemm(number, step))
            self.ready.add(number)
        return stages

    def _first(self) -> int:
        """The step to open a stage with: mode products first, for pointwise steps may join them.

        Of pointwise steps the smallest, for those on larger tiles may need it.
        """
        found = [n for n, s in self.todo.items() if all(self._known(x) for x in s.operands)]
        modes = (n for n in found if as_mode(self.plan, self.todo[n]) is not None)
        return next(modes, min(found, key=lambda n: math.prod(self.todo[n].shape)))

    def _known(self, tile: int) -> bool:
        """Whether a tile can be read from memory."""
        if tile in self.origins:
            at = self.origins[tile]
            return at.tile in self.ready and (at.index is None or at.index in self.ready)
        return tile in self.ready

    # ---- Opening a sweep -------------------------------------------------------------------------

    def _open(self, number: int, step: Product | Rearrange | Pointwise) -> Sweep | None:
        extents = step.extents
        mode = as_mode(self.plan, step)
        if mode is not None:
            sweep, names = self._empty(mode.tile_labels, mode.contracted, extents)
            if self.quads and _for_quads(mode, extents):
                sweep.lanes = QUAD
            self._add_mode(sweep, number, step, mode, names)
            return sweep
        summed = _summed(step)
        if len(summed) > (1 if isinstance(step, Rearrange) else 0):
            return None
        best: Sweep | None = None
        for along in self._fibres(number, step, summed):
            sweep, names = self._empty(step.output_labels, along, extents)
            if self.quads and along and not summed:
                sweep.lanes = QUAD
            if self._add_pointwise(sweep, number, step, names):
                if not along or summed or self._reaches_mode(sweep):
                    return sweep
                best = best or sweep
        return best

    def _reaches_mode(self, sweep: Sweep) -> bool:
        """Whether a mode product joins the sweep, if it is filled."""
        todo = dict(self.todo)
        trial = sweep.copy()
        self._fill(trial)
        self.todo = todo
        if len(trial.loads) > MOST_LOADS:
            return False
        return any(move.matrix is not None for move in trial.moves)

    def _empty(
        self, labels: str, along: str, extents: dict[str, int]
    ) -> tuple[Sweep, dict[str, str]]:
        """A sweep over all ``labels`` but one, and what they are called there."""
        names = dict(zip((x for x in labels if x != along), LABELS, strict=False))
        sweep = Sweep("".join(names.values()), {names[x]: extents[x] for x in names})
        return sweep, names

    def _fibres(
        self, number: int, step: Product | Rearrange | Pointwise, summed: str
    ) -> Iterator[str]:
        """Labels along which a pointwise operation may go, the best first; "" is single values."""
        if summed:
            yield summed
            return
        seen = set()
        for other in self._later_modes(number, step.output_labels):
            if other not in seen:
                seen.add(other)
                yield other
        yield ""

    def _later_modes(self, number: int, labels: str) -> Iterator[str]:
        """Labels of a tile that mode products of pointwise functions of it contract."""
        places, seen = [(number, labels)], {number}
        while places:
            (tile, labels), *places = places
            for consumer in self.consumers.get(tile, []):
                step = self.todo.get(consumer)
                if step is None or isinstance(step, Place):
                    continue
                mode = as_mode(self.plan, step)
                if mode is not None:
                    if mode.tile == tile and mode.contracted:
                        label = labels[mode.tile_labels.index(mode.contracted)]
                        if label != " ":
                            yield label
                    continue
                if _summed(step) or consumer in seen:
                    continue
                seen.add(consumer)
                own = next(x for value, x in _operands(step) if value == tile)
                names = dict(zip(own, labels, strict=True))
                places.append((consumer, "".join(names.get(x, " ") for x in step.output_labels)))

    # ---- Filling it ------------------------------------------------------------------------------

    def _fill(self, sweep: Sweep) -> None:
        """Lets every step that fits join the sweep."""
        while True:
            before = len(sweep.moves)
            for number, step in list(self.todo.items()):
                mode = None if isinstance(step, Place) else as_mode(self.plan, step)
                if mode is not None or (not isinstance(step, Place) and _summed(step)):
                    self._join(sweep, [number])
            self._join_pointwise(sweep)
            if sweep.single and len(sweep.moves) == before:
                self._join_neighbour(sweep)
            if len(sweep.moves) == before:
                return

    def _join_pointwise(self, sweep: Sweep) -> None:
        """Lets pointwise steps join, groups that belong together all or none."""
        group = self._closure(sweep)
        # A step whose pointwise consumers are left behind would hand on more than it takes.
        whole = set(group)
        while True:
            left = {
                n
                for n in whole
                if any(
                    isinstance(self.todo.get(c), Pointwise) and c not in whole
                    for c in self.consumers.get(n, [])
                )
            }
            if not left:
                break
            whole -= left
        chosen = [n for n in group if n in whole]
        if chosen and self._join(sweep, chosen):
            return
        for part in self._parts(chosen):
            if len(part) < len(chosen):
                self._join(sweep, part)
        rest = [n for n in group if n in self.todo]
        if rest and len(rest) > len(chosen):
            handed = len(self._handed_on(sweep))
            trial = sweep.copy()
            if self._joined(trial, rest) and len(self._handed_on(trial)) <= handed:
                self._join(sweep, rest)

    def _join_neighbour(self, sweep: Sweep) -> None:
        """Lets an operation on other tiles of the same shape join a sweep of single values."""
        shape = [sweep.extents[x] for x in sweep.lines]
        for number, step in self.todo.items():
            if isinstance(step, Place) or as_mode(self.plan, step) is not None or _summed(step):
                continue
            if list(step.shape) != shape or not all(self._known(x) for x in step.operands):
                continue
            names = dict(zip(step.output_labels, sweep.lines, strict=True))
            if self._add_pointwise(sweep, number, step, names):
                del self.todo[number]
                return

    def _closure(self, sweep: Sweep) -> list[int]:
        """Pointwise steps that could be done in the sweep, and lead from it or to what does."""
        made = sweep.tiles.keys()
        possible: dict[int, bool] = {}  # and whether it comes from the sweep
        for number, step in self.todo.items():
            if isinstance(step, Place) or as_mode(self.plan, step) is not None or _summed(step):
                continue
            known = (self._known(x) or x in made or x in possible for x in step.operands)
            if all(known):
                possible[number] = any(x in made or possible.get(x) for x in step.operands)
        for number in reversed(list(possible)):
            # What comes from memory alone is drawn in by those who need it.
            if not possible[number] and any(
                possible.get(c) for c in self.consumers.get(number, [])
            ):
                possible[number] = True
        return [n for n in possible if possible[n]]

    def _parts(self, group: list[int]) -> list[list[int]]:
        """The connected parts of a group of steps."""
        part = {n: n for n in group}

        def root(n: int) -> int:
            while part[n] != n:
                n = part[n]
            return n

        for number in group:
            for operand in self.todo[number].operands:
                if operand in part:
                    part[root(number)] = root(operand)
        parts: dict[int, list[int]] = {}
        for number in group:
            parts.setdefault(root(number), []).append(number)
        return list(parts.values())

    def _handed_on(self, sweep: Sweep) -> list[int]:
        made = sweep.tiles.keys()
        return [n for n in made if any(c not in made for c in self.consumers.get(n, []))]

    def _join(self, sweep: Sweep, group: list[int]) -> bool:
        """Adds steps to the sweep, if all of them fit."""
        trial = sweep.copy()
        if not self._joined(trial, group):
            return False
        sweep.loads, sweep.moves, sweep.tiles = trial.loads, trial.moves, trial.tiles
        for number in group:
            self.todo.pop(number, None)
        return True

    def _joined(self, sweep: Sweep, group: list[int]) -> bool:
        """Adds steps to the sweep; it is of no use if one does not fit."""
        inside = set(group)
        # Those that touch the sweep come first: they say what labels are called.
        touching = [
            n
            for n in group
            if any(x in sweep.tiles for x in self.todo[n].operands)
            or as_mode(self.plan, self.todo[n]) is not None
        ]
        while touching:
            before = len(sweep.moves)
            if not self._drawn_in(sweep, heapq.heappop(touching), inside):
                return False
            for move in sweep.moves[before:]:
                for consumer in self.consumers.get(move.result.tile, ()):
                    if consumer in inside:
                        heapq.heappush(touching, consumer)
        if not inside <= sweep.tiles.keys():
            return False
        return sweep.single or live_registers(self.plan, sweep, self.split) <= self.most

    def _drawn_in(self, sweep: Sweep, number: int, inside: set[int]) -> bool:
        """Adds a step to the sweep, after those of ``inside`` that it needs."""
        # Steps that wait for their operands, with names for labels of their results.
        waiting: list[tuple[int, dict[str, str]]] = [(number, {})]
        while waiting:
            number, names = waiting[-1]
            if number in sweep.tiles:
                waiting.pop()
                continue
            step = self.todo[number]
            assert not isinstance(step, Place)
            mode = as_mode(self.plan, step)
            if mode is not None:
                if not (mode.tile in sweep.tiles or self._known(mode.tile)):
                    return False
                lines = self._mode_names(sweep, step, mode)
                if lines is None:
                    return False
                self._add_mode(sweep, number, step, mode, lines)
                continue
            names = dict(names)
            missing = []
            for operand, labels in _operands(step):
                if operand in sweep.tiles:
                    for label, name in zip(labels, sweep.tiles[operand].labels, strict=True):
                        if names.setdefault(label, name) != name:
                            return False
                elif operand in inside:
                    missing.append((operand, labels))
                elif not self._known(operand):
                    return False
            if missing:
                operand, labels = missing[0]
                below = self.todo[operand]
                assert not isinstance(below, Place)
                wanted = {
                    own: names[label]
                    for own, label in zip(below.output_labels, labels, strict=True)
                    if label in names
                }
                # Without a line to go by, the order of the steps decides.
                if not wanted and labels:
                    return False
                waiting.append((operand, wanted))
                continue
            if not names and sweep.lines:
                return False
            if not self._add_pointwise(sweep, number, step, names):
                return False
        return True

    def _mode_names(
        self, sweep: Sweep, step: Product | Rearrange | Pointwise, mode: Mode
    ) -> dict[str, str] | None:
        """The lines of a mode product as lines of the sweep, if they can be the same."""
        if sweep.lanes == QUAD and not _for_quads(mode, step.extents):
            return None
        if mode.tile in sweep.tiles:
            names = dict(zip(mode.tile_labels, sweep.tiles[mode.tile].labels, strict=True))
            along = next((x for x in names if names[x] == ALONG), "")
            return names if along == mode.contracted else None
        # A branch of its own, or another product of a tile that is read anyway.
        extents = step.extents
        lines = [x for x in mode.tile_labels if x != mode.contracted]
        if [extents[x] for x in lines] != [sweep.extents[x] for x in sweep.lines]:
            return None
        return dict(zip(lines, sweep.lines, strict=True))

    # ---- Adding an operation ---------------------------------------------------------------------

    def _operand(self, sweep: Sweep, tile: int, labels: str, length: int) -> Value:
        """A tile in registers: made in this sweep, or read."""
        if tile in sweep.tiles:
            return sweep.tiles[tile]
        value = Value(tile, labels, length if ALONG in labels else 1)
        if value not in sweep.loads:
            sweep.loads.append(value)
        return value

    def _add_mode(
        self,
        sweep: Sweep,
        number: int,
        step: Product | Rearrange | Pointwise,
        mode: Mode,
        lines: dict[str, str],
    ) -> None:
        extents = step.extents

        def labels(of: str) -> str:
            return "".join(
                ALONG if x in (mode.contracted, mode.new) and x else lines[x] for x in of
            )

        def axis(label: str) -> int | None:
            return mode.matrix_labels.index(label) if label else None

        length = extents.get(mode.contracted, 1)
        operand = self._operand(sweep, mode.tile, labels(mode.tile_labels), length)
        result = Value(number, labels(step.output_labels), extents.get(mode.new, 1))
        matrix = Matrix(mode.matrix, axis(mode.new), axis(mode.contracted))
        sweep.add(Move(step, result, (operand,), matrix))

    def _add_pointwise(
        self,
        sweep: Sweep,
        number: int,
        step: Product | Rearrange | Pointwise,
        names: dict[str, str],
    ) -> bool:
        """Adds an operation that acts value by value, or sums along the fibre, if it fits.

        ``names`` says which lines some of its labels are; one other label may be the fibre's.
        """
        extents = step.extents
        output, operands = step.output_labels, _operands(step)
        every = dict.fromkeys("".join(labels for _, labels in operands) + output)
        names = names | {x: ALONG for x in every if x not in names}
        if len(set(names.values())) < len(names):
            return False  # two labels would run along the fibre, or be the same line
        along = next((x for x in names if names[x] == ALONG), "")
        summed = _summed(step)
        if summed and (summed != along or not isinstance(step, Rearrange)):
            return False
        if not set(sweep.lines) <= {names[x] for x in output}:
            return False  # several threads would make the same value
        length = extents.get(along, 1)
        if length * _words(self.plan, number) * 2 > FIBRE_REGISTERS:
            return False

        def labels(of: str) -> str:
            return "".join(names[x] for x in of)

        # What was made in this sweep is in registers alone, with the labels that it has there.
        for operand, own in operands:
            if operand in sweep.tiles and sweep.tiles[operand].labels != labels(own):
                return False
        values = tuple(
            self._operand(sweep, operand, labels(own), length) for operand, own in operands
        )
        result = Value(number, labels(output), length if along in output and along else 1)
        sweep.add(Move(step, result, values))
        return True


def _for_quads(mode: Mode, extents: dict[str, int]) -> bool:
    """Whether tensor cores can do a mode product: fibres on both sides."""
    return min(extents.get(mode.contracted, 1), extents.get(mode.new, 1)) > 1


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
    sizes = [(m.result.length, m.operands[0].length) for m in products]
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

    def size(value: Value) -> int:
        return slots(value.length, sweep.lanes, mirrored)

    groups = grouped(sweep.moves)
    last: dict[Value, int] = {}
    for position, group in enumerate(groups):
        for move in group:
            for value in move.operands:
                last[value] = position
    outers = outers_after(sweep)
    for position, found in enumerate(outers):
        last.update((x, max(last.get(x, -1), position)) for y in found for x in y.operands)
    alive: set[Value] = set()
    most = 0
    for position, group in enumerate(groups):
        made = {move.result for move in group}
        if group[0].pointwise:
            # Each point needs some values more.
            extra = max(1, min(len(group), 8))
            now = {x for x in made if last.get(x, -1) > position}
            done = {x for x in alive if last[x] == position}
            # A fibre that ends here gives its registers to one that begins.
            inside = sum(map(size, alive - done))
            inside += max(sum(map(size, done)), sum(map(size, now))) + extra
        else:
            alive |= {x for move in group for x in move.operands}
            now = made
            inside = sum(map(size, alive | made))
        multiplied = {x for outer in outers[position] for x in outer.operands}
        most = max(most, inside, sum(map(size, alive | now | multiplied)) if multiplied else 0)
        alive = {x for x in alive | now if last.get(x, -1) > position}
    if sweep.lanes == QUAD:
        matrices = {
            m.matrix: (m.result.length, m.operands[0].length) for m in sweep.moves if m.matrix
        }
        most += sum(_pieces(*sizes, halves=mirrored) for sizes in matrices.values())
    words = max(_words(plan, value.tile) for value in [*sweep.loads, *sweep.tiles.values()])
    return most * words


def outers_after(sweep: Sweep) -> list[list[Outer]]:
    """The outer products that follow each group of moves: as soon as both fibres are there."""
    groups = grouped(sweep.moves)
    touched: dict[Value, int] = {}
    for position, group in enumerate(groups):
        for move in group:
            for value in (*move.operands, move.result):
                touched.setdefault(value, position)
    found: list[list[Outer]] = [[] for _ in groups] or [[]]
    for outer in sweep.outers:
        found[max(touched.get(x, 0) for x in outer.operands)].append(outer)
    return found


def grouped(moves: list[Move]) -> list[list[Move]]:
    """Runs of pointwise operations on fibres of one length; others alone."""
    groups: list[list[Move]] = []
    for move in moves:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and move.pointwise
            and last.pointwise
            and move.result.length == last.result.length
        ):
            groups[-1].append(move)
        else:
            groups.append([move])
    return groups


def copy_sweep(plan: Plan, tile: int) -> Sweep:
    """Reads a tile, one value a thread, for an output that is an input or for staging."""
    shape = plan.tiles[tile].shape
    labels = LABELS[: len(shape)]
    sweep = Sweep(labels, dict(zip(labels, shape, strict=True)))
    value = Value(tile, labels)
    sweep.loads.append(value)
    sweep.add(Move(None, value, (value,)))
    return sweep
