"""From the steps of a plan to sweeps over fibres: what one thread does between two barriers.

A *fibre* is one line of a tile. In a ``Sweep`` every thread owns fibres along one label of each
value it touches; the other labels, the *lines*, are spread over the threads. All operations that
leave the lines alone can share a sweep and hand fibres on in registers:

* a mode product ``y[.., m, ..] = sum_k matrix[m, k] x[.., k, ..]`` with fibres along k, then m;
* a pointwise function, a product without contraction, a transposition, a sum along the fibre.

What contracts two tiles of the same element is a ``Gemm``: every thread owns a block of the result.

Steps are grouped by list scheduling: the first step that is ready opens a sweep, and every ready
step that fits joins it. So equal branches of a program (the interpolations of two functions, the
three derivatives of one) go through their sweeps together and read what they share once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxmagma.plan import Plan, Pointwise, Product, Rearrange, Step


# A fibre in and a fibre out must fit in a thread's registers, of four bytes each.
FIBRE_REGISTERS = 160

LABELS = "abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ"


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


@dataclass
class Sweep:
    """Operations on fibres; ``lines`` are the labels spread over threads, the last one fastest."""

    lines: str
    extents: dict[str, int]
    loads: list[Value] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def tiles(self) -> dict[int, Value]:
        """What the sweep computes."""
        return {move.result.tile: move.result for move in self.moves}

    @property
    def count(self) -> int:
        return math.prod(self.extents[label] for label in self.lines)

    @property
    def single(self) -> bool:
        """Whether all fibres are single values."""
        return all(value.length == 1 for value in [*self.loads, *self.tiles.values()])


@dataclass
class Gemm:
    """``out = sum_k left right`` of two tiles of one element, or a sum of one tile (no right)."""

    number: int
    step: Product | Rearrange


Stage = Sweep | Gemm


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
    """The operands with their labels; a pointwise function's labels are those of its result."""
    if isinstance(step, Product):
        return [(step.left, step.left_labels), (step.right, step.right_labels)]
    if isinstance(step, Rearrange):
        return [(step.operand, step.labels)]
    labels = LABELS[: len(step.shape)]
    return [(operand, labels) for operand in step.operands]


def _output_labels(step: Step) -> str:
    return LABELS[: len(step.shape)] if isinstance(step, Pointwise) else step.output_labels


def _step_extents(step: Step) -> dict[str, int]:
    if isinstance(step, Pointwise):
        return dict(zip(LABELS, step.shape, strict=False))
    return step.extents


def _summed(step: Step) -> str:
    labels = dict.fromkeys("".join(labels for _, labels in _operands(step)))
    return "".join(x for x in labels if x not in _output_labels(step))


class Scheduler:
    """Groups the steps of ``plan`` into sweeps and gemms."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ready = set(range(len(plan.program.inputs)))  # tiles in memory

    def stages(self) -> list[Stage]:
        todo = dict(self.plan.numbered_steps())
        stages: list[Stage] = []
        while todo:
            number, step = next(
                (n, s) for n, s in todo.items() if all(x in self.ready for x in s.operands)
            )
            del todo[number]
            sweep = self._open(number, step)
            if sweep is None:
                stages.append(Gemm(number, step))  # type: ignore[arg-type]
                self.ready.add(number)
                continue
            for later, other in list(todo.items()):
                known = self.ready | sweep.tiles.keys()
                if all(x in known for x in other.operands) and self._join(sweep, later, other):
                    del todo[later]
            stages.append(sweep)
            self.ready |= sweep.tiles.keys()
        return stages

    # ---- Opening a sweep -------------------------------------------------------------------------

    def _open(self, number: int, step: Step) -> Sweep | None:
        extents = _step_extents(step)
        mode = as_mode(self.plan, step)
        if mode is not None:
            sweep, names = self._empty(mode.tile_labels, mode.contracted, extents)
            self._add_mode(sweep, number, step, mode, names)
            return sweep
        summed = _summed(step)
        if len(summed) > (1 if isinstance(step, Rearrange) else 0):
            return None
        for along in self._fibres(number, step, summed):
            sweep, names = self._empty(_output_labels(step), along, extents)
            if self._add_pointwise(sweep, number, step, names):
                return sweep
        return None

    def _empty(
        self, labels: str, along: str, extents: dict[str, int]
    ) -> tuple[Sweep, dict[str, str]]:
        """A sweep over all ``labels`` but one, and what they are called there."""
        names = dict(zip((x for x in labels if x != along), LABELS, strict=False))
        sweep = Sweep("".join(names.values()), {names[x]: extents[x] for x in names})
        return sweep, names

    def _fibres(self, number: int, step: Step, summed: str) -> Iterator[str]:
        """Labels along which a pointwise operation may go, the best first; "" is single values."""
        if summed:
            yield summed
            return
        for _, other in self.plan.numbered_steps():
            mode = as_mode(self.plan, other)
            if mode is not None and mode.tile == number and mode.contracted:
                yield _output_labels(step)[mode.tile_labels.index(mode.contracted)]
        yield ""

    # ---- Joining one -----------------------------------------------------------------------------

    def _join(self, sweep: Sweep, number: int, step: Step) -> bool:
        mode = as_mode(self.plan, step)
        if mode is not None:
            names = self._mode_names(sweep, step, mode)
            if names is not None:
                self._add_mode(sweep, number, step, mode, names)
            return names is not None
        names = {}
        for operand, labels in _operands(step):
            if operand in sweep.tiles:
                for label, name in zip(labels, sweep.tiles[operand].labels, strict=True):
                    if names.setdefault(label, name) != name:
                        return False
        return bool(names) and self._add_pointwise(sweep, number, step, names)

    def _mode_names(self, sweep: Sweep, step: Step, mode: Mode) -> dict[str, str] | None:
        """The lines of a mode product as lines of the sweep, if they can be the same."""
        if mode.tile in sweep.tiles:
            names = dict(zip(mode.tile_labels, sweep.tiles[mode.tile].labels, strict=True))
            along = next((x for x in names if names[x] == ALONG), "")
            return names if along == mode.contracted else None
        # A branch of its own, or another product of a tile that is read anyway.
        extents = _step_extents(step)
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
        self, sweep: Sweep, number: int, step: Step, mode: Mode, lines: dict[str, str]
    ) -> None:
        extents = _step_extents(step)

        def labels(of: str) -> str:
            return "".join(
                ALONG if x in (mode.contracted, mode.new) and x else lines[x] for x in of
            )

        def axis(label: str) -> int | None:
            return mode.matrix_labels.index(label) if label else None

        length = extents.get(mode.contracted, 1)
        operand = self._operand(sweep, mode.tile, labels(mode.tile_labels), length)
        result = Value(number, labels(_output_labels(step)), extents.get(mode.new, 1))
        matrix = Matrix(mode.matrix, axis(mode.new), axis(mode.contracted))
        sweep.moves.append(Move(step, result, (operand,), matrix))

    def _add_pointwise(self, sweep: Sweep, number: int, step: Step, names: dict[str, str]) -> bool:
        """Adds an operation that acts value by value, or sums along the fibre, if it fits.

        ``names`` says which lines some of its labels are; one other label may be the fibre's.
        """
        extents = _step_extents(step)
        output, operands = _output_labels(step), _operands(step)
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
        sweep.moves.append(Move(step, result, values))
        return True


def copy_sweep(plan: Plan, tile: int) -> Sweep:
    """Reads a tile, one value a thread, for an output that is an input or for staging."""
    shape = plan.tiles[tile].shape
    labels = LABELS[: len(shape)]
    sweep = Sweep(labels, dict(zip(labels, shape, strict=True)))
    value = Value(tile, labels)
    sweep.loads.append(value)
    sweep.moves.append(Move(None, value, (value,)))
    return sweep
