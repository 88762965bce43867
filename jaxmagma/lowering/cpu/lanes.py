"""The instructions of a plan for the CPU executor, and the places of its tiles.

See :mod:`jaxmagma.lowering.cpu` for the format.
"""

import bisect
import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmagma.lowering.cpu.expressions import (
    NUMBERS,
    SCRATCH,
    SLOT,
    Address,
    Expression,
    Source,
    Value,
    expression,
    point_matrix,
    units,
)
from jaxmagma.lowering.cpu.places import Location, Locations, flat_stride, gathered, loops_of
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.programs.program import Gather, Place, View
from jaxmagma.programs.strides import places, row_major


VERSION = 5
(
    LOAD,
    MULTIPLY,
    STORE,
    SPREAD,
    PRODUCT,
    REARRANGE,
    ZERO,
    GATHER,
    MAP,
    EXPRESSION,
    GEMM,
    POINT_MATRIX,
) = range(12)
_FUNCTION, _FILL, _COLLECT, _WINDOW, _WHERE = range(5)
_BATCHED, _SHARED, _CONSTANT, _VECTOR, _INDEX = range(5)
DTYPES = {"float32": 0, "float64": 1, "complex64": 2, "complex128": 3, "float16": 4, "bfloat16": 5}

# A single matrix product whose rows are shorter than this is faster with elements in the lanes.
_LEAST_COLUMNS = 5
# Of an input with more values a point, no chunk is loaded by itself.
_WIDEST_WINDOW = 32
# Matrices at points with as many rows have an instruction of their own.
_POINT_MATRIX_ROWS = (2, 3)


class _Room:
    """First-fit allocation."""

    def __init__(self) -> None:
        self.size = 0
        self._ends: dict[int, int] = {}  # of what is taken, by its start
        self._gaps: list[tuple[int, int]] = [(0, sys.maxsize)]

    def take(self, size: int) -> int:
        at = next(n for n, (start, end) in enumerate(self._gaps) if end - start >= size)
        start, end = self._gaps[at]
        self._gaps[at : at + 1] = [(start + size, end)] if start + size < end else []
        self._ends[start] = start + size
        self.size = max(self.size, start + size)
        return start

    def free(self, place: int) -> None:
        start, end = place, self._ends.pop(place)
        at = last = bisect.bisect(self._gaps, (start, end))
        if at > 0 and self._gaps[at - 1][1] == start:
            at, start = at - 1, self._gaps[at - 1][0]
        if self._gaps[last][0] == end:
            last, end = last + 1, self._gaps[last][1]
        self._gaps[at:last] = [(start, end)]


class Encoder:
    """Assigns places and writes instructions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.program = plan.program
        self.scratch = _Room()
        self.shared_size = 0
        self.shared_steps: list[list[int]] = []
        self.steps: list[list[int]] = []
        self._shared_place: dict[int, int] = {}
        self._place: dict[int, int] = {}  # batched tiles that are in scratch now
        self._touched: set[int] = set()  # shared tiles that steps have written to
        self._vectors, self._indices = gathered(plan)
        self._readers: dict[int, list[int]] = {}
        for number, step in plan.numbered_steps():
            for operand in step.operands:
                self._readers.setdefault(operand, []).append(number)

        for number, tile in enumerate(plan.tiles):
            if not tile.batched and number not in self._vectors:
                self._shared_place[number] = self.shared_size
                self.shared_size += tile.size
        gemm = self._gemm()
        if gemm:
            self.steps.append(gemm)
            return
        self._locations = Locations(plan)
        self._units, self._position = units(plan, self._locations)
        self._uses = self._count_uses()
        for number, step in plan.numbered_steps():
            if not plan.tiles[number].batched:
                self._shared_step(number, step)
        self._store_results(-1)
        for position, unit in enumerate(self._units):
            self._unit(unit)
            self._store_results(position)

    # ---- steps -----------------------------------------------------------------------------

    def _unit(self, unit: list[int]) -> None:
        step = self._locations.step(unit[0])
        if isinstance(step, Pointwise):
            if len(unit) > 1 or not self._multiply_while_loading(unit[0], step):
                self._expression(unit)
        else:
            (number,) = unit
            if isinstance(step, Product):
                if not self._multiply_while_loading(number, step):
                    self._product(number, step)
            elif isinstance(step, Gather):
                self._gather(number, step)
            elif isinstance(step, Place):
                self._place_pieces(number, step)
            else:
                assert isinstance(step, Rearrange | View)
                source = self._in_scratch(self._locations.of[step.operand].root)
                self._rearrange(self.steps, number, self._touch(number), step, source)
        for number in unit:
            for operand in self._reads(number):
                self._used(self._locations.of[operand].root)

    def _rearrange(
        self, steps: list[list[int]], number: int, out: int, step: Rearrange | View, source: int
    ) -> None:
        """A sum, a transposition or a copy of a tile whose root is at ``source``."""
        at = self._locations.of[step.operand]
        if isinstance(step, Rearrange):
            loops = _loops(
                step.extents,
                (step.output_labels, self._locations.of[number].strides),
                (step.labels, at.strides),
            )
            steps.append([REARRANGE, 0, out, source + at.offset, len(loops), *_flat(loops)])
            return
        # A view of a tile that is not in the order of memory: its values one by one.
        where = places(0, at.strides, self.plan.tiles[step.operand].shape).reshape(-1)
        seen = where[places(step.offset, step.strides, step.tile)].reshape(-1)
        for to, origin in enumerate(seen.tolist()):
            steps.append([REARRANGE, 0, out + to, source + at.offset + origin, 0])

    def _gemm(self) -> list[int] | None:
        """The GEMM instruction, if the plan is one matrix product with long rows."""
        plan, program = self.plan, self.program
        if len(plan.steps) != 1 or plan.results != (len(program.inputs),):
            return None
        (step,) = plan.steps
        (out,) = program.outputs
        if not isinstance(step, Product) or program.dtype.name not in ("float32", "float64"):
            return None
        if program.batch[out.value] - set(out.batch) or not plan.tiles[step.right].batched:
            return None
        left, right = (step.left, step.left_labels), (step.right, step.right_labels)
        output = step.output_labels
        if output and output[-1] in step.rows:
            left, right = right, left
        rows, columns, inner = (
            _merged(labels, (left[1], right[1], output), step.extents)
            for labels in (
                [x for x in output if x not in right[1]],
                [x for x in output if x not in left[1]],
                step.contracted,
            )
        )
        if step.paired or not (rows and columns and inner):
            return None
        if columns[0] < _LEAST_COLUMNS or columns[3] != 1:
            return None
        operands = [left[0], right[0]]
        shared = [not plan.tiles[x].batched for x in operands]
        places = [self._shared_place[x] if s else x for x, s in zip(operands, shared, strict=True)]
        extents = [rows[0], columns[0], inner[0]]
        strides = [rows[1], inner[1], inner[2], columns[2], rows[3]]
        if columns[2] != 1:
            self.scratch.take(columns[0] * inner[0])
        return [GEMM, 0, *places, *map(int, shared), *extents, *strides]

    def _product(self, number: int, step: Product) -> None:
        starts, shared, layouts = [], [], []
        for operand, labels in (
            (step.left, step.left_labels),
            (step.right, step.right_labels),
        ):
            at = self._locations.of[operand]
            shared.append(int(not self.plan.tiles[operand].batched))
            root = self._shared_place[at.root] if shared[-1] else self._in_scratch(at.root)
            starts.append(root + at.offset)
            layouts.append((labels, at.strides))
        out = self._touch(number)
        layout = (step.output_labels, self._locations.of[number].strides)
        loops = _loops(step.extents, layout, *layouts)
        accumulate = int(number in self._locations.accumulates)
        self.steps.append([PRODUCT, accumulate, out, *starts, *shared, len(loops), *_flat(loops)])

    def _multiply_while_loading(self, number: int, step: Product | Pointwise) -> bool:
        """Pointwise products with an operand that nothing else reads need no room for it."""
        if isinstance(step, Pointwise):
            equal = step.function == "mul" and all(x == step.output_labels for x in step.labels)
        else:
            equal = step.left_labels == step.right_labels == step.output_labels
        if not equal or self._locations.of[number].strides != row_major(step.shape):
            return False
        whole = {Location(x, 0, row_major(self.plan.tiles[x].shape)) for x in step.operands}
        if any(self._locations.of[x] not in whole for x in step.operands):
            return False
        for operand, other in (step.operands, step.operands[::-1]):
            loaded_once = (
                operand < self._locations.first
                and self.plan.tiles[operand].batched
                and self._uses[operand] == 1
                and operand not in self._place
            )
            if loaded_once and self.plan.tiles[other].batched:
                right = self._in_scratch(other)
                accumulate = int(number in self._locations.accumulates)
                if not accumulate and self._locations.is_own(number) and self._uses[other] == 1:
                    self._place[number] = self._place.pop(other)
                out = self._touch(number)
                size = self.plan.tiles[number].size
                self.steps.append([MULTIPLY, operand, out, right, accumulate, size])
                return True
        return False

    def _gather(self, number: int, step: Gather) -> None:
        _, *components = self.plan.tiles[step.vector].shape
        count = self.plan.tiles[step.index].size
        self.steps.append(
            [GATHER, step.vector, step.index, self._touch(number), count, math.prod(components)]
        )

    def _place_pieces(self, number: int, step: Place) -> None:
        """Puts the pieces where they belong that were not made there."""
        out = self._touch(number)
        accumulate = int(not self._locations.disjoint[number])
        for x, offset, strides in step.pieces:
            at = self._locations.of[x]
            if at.root == number:
                continue
            source = self._in_scratch(at.root) + at.offset
            loops = loops_of(strides, at.strides, shape=self.plan.tiles[x].shape)
            self.steps.append(
                [REARRANGE, accumulate, out + offset, source, len(loops), *_flat(loops)]
            )

    # ---- what is the same for all elements -------------------------------------------------

    def _shared_step(self, number: int, step: Step) -> None:
        if number in self._locations.done:
            return
        locations = self._locations
        here = locations.of[number]
        out = self._touch_shared(here.root) + here.offset

        def start(x: int) -> int:
            return self._shared_place[locations.of[x].root] + locations.of[x].offset

        if isinstance(step, Product):
            loops = _loops(
                step.extents,
                (step.output_labels, here.strides),
                (step.left_labels, locations.of[step.left].strides),
                (step.right_labels, locations.of[step.right].strides),
            )
            operands = [start(step.left), start(step.right)]
            self.shared_steps.append([PRODUCT, 0, out, *operands, 1, 1, len(loops), *_flat(loops)])
        elif isinstance(step, Rearrange | View):
            root = self._shared_place[locations.of[step.operand].root]
            self._rearrange(self.shared_steps, number, out, step, root)
        elif isinstance(step, Place):
            for x, offset, strides in step.pieces:
                if locations.of[x].root != number:
                    loops = loops_of(
                        strides, locations.of[x].strides, shape=self.plan.tiles[x].shape
                    )
                    accumulate = int(not locations.disjoint[number])
                    self.shared_steps.append(
                        [REARRANGE, accumulate, out + offset, start(x), len(loops), *_flat(loops)]
                    )
        else:
            assert isinstance(step, Pointwise)
            layouts = [
                (labels, locations.of[x].strides)
                for x, labels in zip(step.operands, step.labels, strict=True)
            ]
            operands = [start(x) for x in step.operands]
            layouts += [("", ())] * (3 - len(layouts))
            operands += [0] * (3 - len(operands))
            loops = _loops(step.extents, (step.output_labels, here.strides), *layouts)
            function = NUMBERS[step.function]
            self.shared_steps.append([MAP, function, out, *operands, len(loops), *_flat(loops)])

    def _touch_shared(self, root: int) -> int:
        place = self._shared_place[root]
        if root not in self._touched and self._needs_zeros(root):
            self.shared_steps.append([ZERO, place, self.plan.tiles[root].size])
        self._touched.add(root)
        return place

    def _needs_zeros(self, root: int) -> bool:
        if not isinstance(self._locations.step(root), Place):
            return False
        return not (self._locations.disjoint[root] and self._locations.covered[root])

    # ---- expressions -----------------------------------------------------------------------

    def _expression(self, unit: list[int]) -> None:
        inside = set(unit)
        kept = {
            x
            for x in unit
            if x in self.plan.results or any(n not in inside for n in self._readers.get(x, ()))
        }
        made = expression(self.plan, self._locations, unit, kept)
        if self._point_matrix(unit, made, kept):
            return
        code = _ExpressionCode(self, made, unit, kept)
        self.steps.append(code.encode())

    def _point_matrix(self, unit: Sequence[int], made: Expression, kept: set[int]) -> bool:
        """An input that is a matrix at every point is multiplied while it is loaded."""
        found = point_matrix(made, kept)
        if found is None or len(found.results) not in _POINT_MATRIX_ROWS:
            return False
        tiles, points, reads = self.plan.tiles, math.prod(made.shape), self._reads_of(unit)
        entries = [x for row in found.matrix for x in row]
        flat = [flat_stride(self._locations.of[x].strides, made.shape) for x in found.results]
        if (
            found.root >= self._locations.first
            or found.root in self._place
            or self._uses[found.root] != reads[found.root]
            or not all(tiles[x.root].batched for x in [*entries, *found.vector])
            or any(x.stride != 1 for x in [*entries, *found.vector])
            or any(stride != 1 for stride in flat)
            or self.program.dtype.itemsize == 2
        ):
            return False
        right = [self._in_scratch(x.root) + x.offset for x in found.vector]
        out = []
        for number, x in zip(found.results, found.vector, strict=True):
            # The whole vector is read at a point before a result is written there.
            free = self._uses[x.root] == reads[x.root] and tiles[x.root].size == points
            if free and self._locations.is_own(number) and x.root in self._place:
                self._place[number] = self._place.pop(x.root)
            out.append(self._touch(number))
        self.steps.append(
            [POINT_MATRIX, found.root, points, len(out), *out, *right, *(x.offset for x in entries)]
        )
        return True

    # ---- results ---------------------------------------------------------------------------

    def _store_results(self, position: int) -> None:
        """Results leave as soon as they are made, while they are in the nearest cache."""
        for output, value in enumerate(self.plan.results):
            if self._position[value] != position:
                continue
            tile = self.plan.tiles[value]
            at = self._locations.of[value]
            place = self._in_scratch(at.root) + at.offset
            if tile.size > 1 and at.strides != row_major(tile.shape):
                loops = loops_of(row_major(tile.shape), at.strides, shape=tile.shape)
                ordered = self.scratch.take(tile.size)
                self.steps.append([REARRANGE, 0, ordered, place, len(loops), *_flat(loops)])
                self.steps.append([STORE, output, ordered, tile.size])
                self.scratch.free(ordered)
            else:
                self.steps.append([STORE, output, place, tile.size])
            self._used(at.root)

    # ---- places ----------------------------------------------------------------------------

    def _count_uses(self) -> list[int]:
        """How many reads of each root are still to come."""
        uses = [0] * len(self.plan.tiles)
        for number, _ in self.plan.numbered_steps():
            if self.plan.tiles[number].batched and number not in self._locations.done:
                for operand in self._reads(number):
                    uses[self._locations.of[operand].root] += 1
        for value in self.plan.results:
            uses[self._locations.of[value].root] += 1
        return uses

    def _reads(self, number: int) -> list[int]:
        """The tiles that a step reads where they are."""
        step = self.plan.steps[number - self._locations.first]
        if isinstance(step, Place):
            return [x for x in step.operands if self._locations.of[x].root != number]
        if isinstance(step, Gather):
            return []
        return list(step.operands)

    def _reads_of(self, unit: Iterable[int]) -> dict[int, int]:
        """How often the steps of a unit read each root."""
        reads: dict[int, int] = {}
        for number in unit:
            for operand in self._reads(number):
                root = self._locations.of[operand].root
                reads[root] = reads.get(root, 0) + 1
        return reads

    def _touch(self, number: int) -> int:
        """Where a step writes its tile."""
        at = self._locations.of[number]
        if at.root not in self._place:
            if number in self._locations.accumulates:
                self._in_scratch(at.root)
            else:
                size = self.plan.tiles[at.root].size
                self._place[at.root] = self.scratch.take(size)
                if self._needs_zeros(at.root):
                    self.steps.append([ZERO, self._place[at.root], size])
        return self._place[at.root] + at.offset

    def _in_scratch(self, root: int) -> int:
        """The place of a root, which is brought into scratch if it is not there."""
        if root not in self._place:
            size = self.plan.tiles[root].size
            place = self._place[root] = self.scratch.take(size)
            if self.plan.tiles[root].batched:
                assert root < self._locations.first, root
                self.steps.append([LOAD, root, place, size])
            else:
                self.steps.append([SPREAD, self._shared_place[root], place, size])
        return self._place[root]

    def _used(self, root: int) -> None:
        self._uses[root] -= 1
        if self._uses[root] <= 0 and root in self._place:
            self.scratch.free(self._place.pop(root))

    # ---- encoding --------------------------------------------------------------------------

    def attribute(self, block: int = 0) -> np.ndarray:
        program = self.program
        code = [VERSION, DTYPES[program.dtype.name], program.batch_rank]
        code += [self.plan.flops, self.shared_size, self.scratch.size, block]
        code.append(len(program.inputs))
        for number, operand in enumerate(program.inputs):
            kind = _BATCHED if operand.batch else _CONSTANT if operand.constant else _SHARED
            if number in self._vectors:
                kind = _VECTOR
            elif number in self._indices:
                kind = _INDEX
            code += [kind, self._shared_place.get(number, 0)]
            code += [len(operand.tile), *operand.tile, len(operand.batch), *operand.batch]
        code.append(len(program.outputs))
        for output in program.outputs:
            shape = program.tiles[output.value]
            summed = sorted(program.batch[output.value] - set(output.batch))
            code += [len(shape), *shape, len(output.batch), *output.batch, len(summed), *summed]
        for steps in (self.shared_steps, self.steps):
            code.append(len(steps))
            for step in steps:
                code += step
        return np.array(code, np.int64)

    def constants(self) -> np.ndarray:
        arrays = [x.constant.array for x in self.program.inputs if x.constant is not None]
        data = b"".join(array.tobytes() for array in arrays)
        return np.frombuffer(data, np.uint8)


class _ExpressionCode:
    """Writes one expression: addresses of values, slots, and the micro-operations."""

    def __init__(
        self, encoder: Encoder, made: Expression, unit: Sequence[int], kept: Iterable[int]
    ) -> None:
        self.encoder = encoder
        self.made = made
        self.unit = unit
        self.kept = set(kept)
        self.points = math.prod(made.shape)
        self.slots = _Room()
        self.code: list[list[int]] = []
        self.address: dict[Value, Address] = {}
        self.reads = encoder._reads_of(unit)
        self.by_root: dict[int, list[Source]] = {}
        for source in made.sources:
            self.by_root.setdefault(source.root, []).append(source)
        self.windows = {root: w for root in self.by_root if (w := self._window(root))}
        self.window_slot: dict[tuple[int, int], int] = {}

    def _is_input(self, root: int) -> bool:
        encoder = self.encoder
        return root < encoder._locations.first and encoder.plan.tiles[root].batched

    def _window(self, root: int) -> int:
        """How many values of an input stand together for each point, if a chunk of points can be
        loaded at a time.

        There may be several such runs over all points one after the other, as for the components of
        a field.
        """
        sources = self.by_root[root]
        stride = sources[0].stride
        encoder = self.encoder
        if (
            stride is None
            or not 0 < stride <= _WIDEST_WINDOW
            or self.points == 1
            or not self._is_input(root)
            or root in encoder._place
            or encoder._uses[root] != self.reads[root]
            or encoder.plan.tiles[root].size % (stride * self.points)
            or any(
                x.stride != stride or x.offset % (stride * self.points) >= stride for x in sources
            )
        ):
            return 0
        return stride

    def _start(self, x: Source) -> int:
        """Where the run of windows starts to which a source belongs."""
        run = self.windows[x.root] * self.points
        return x.offset // run * run

    def encode(self) -> list[int]:
        for source in self.made.sources:
            if source.is_scalar and self.points > 1:
                self._fill(source)
        for n, micro in enumerate(self.made.micros):
            operands = [self._bring(x) for x in micro.reads]
            for x in dict.fromkeys(micro.reads):
                self._release(x, n)
            if micro.result in self.kept:
                result = self._write(micro.result, n)
            else:
                result = (SLOT, self.slots.take(1), 0, 1)
            self.address[micro.result] = result
            head = [_FUNCTION, NUMBERS[micro.function]]
            if micro.needed is not None:
                where, *operands = operands
                head = [_WHERE, NUMBERS[micro.function], int(micro.needed[1]), *where]
            self.code.append([*head, *result, *_flat(operands)])
            for window in list(self.window_slot):
                readers = [x for x in self.by_root[window[0]] if self._start(x) == window[1]]
                if all(self.made.last[x] <= n for x in readers):
                    self.slots.free(self.window_slot.pop(window))
        head = [EXPRESSION, self.points, self.slots.size, len(self.code)]
        return head + [x for words in self.code for x in words]

    def _fill(self, source: Source) -> None:
        """A scalar in every value of a slot, for all chunks."""
        encoder = self.encoder
        slot = self.slots.take(1)
        shared = not encoder.plan.tiles[source.root].batched
        place = (
            encoder._shared_place[source.root] if shared else encoder._in_scratch(source.root)
        ) + source.offset
        self.code.append([_FILL, slot, int(shared), place])
        self.address[source] = (SLOT, slot, 0, 1)
        self.made.last.pop(source)

    def _bring(self, x: Value) -> Address:
        if x in self.address:
            return self.address[x]
        assert isinstance(x, Source)
        encoder = self.encoder
        if x.root in self.windows:
            width, start = self.windows[x.root], self._start(x)
            window = x.root, start
            if window not in self.window_slot:
                slot = self.window_slot[window] = self.slots.take(width)
                self.code.append([_WINDOW, x.root, slot, width, start])
            self.address[x] = (SLOT, self.window_slot[window], x.offset - start, width)
            return self.address[x]
        shared = not encoder.plan.tiles[x.root].batched
        root = encoder._shared_place[x.root] if shared else encoder._in_scratch(x.root)
        stride = x.stride
        if not shared and stride is not None and (stride > 0 or self.points == 1):
            self.address[x] = (SCRATCH, root + x.offset, 0, max(stride, 0))
        else:
            slot = self.slots.take(1)
            loops = loops_of(x.strides, shape=x.shape)
            self.code.append(
                [_COLLECT, slot, int(shared), root + x.offset, len(loops), *_flat(loops)]
            )
            self.address[x] = (SLOT, slot, 0, 1)
        return self.address[x]

    def _release(self, x: Value, n: int) -> None:
        """The slot of a value that is not read any more is free."""
        space, slot, _, stride = self.address[x]
        windowed = isinstance(x, Source) and x.root in self.windows
        if space == SLOT and not windowed and stride == 1 and self.made.last.get(x) == n:
            self.slots.free(slot)

    def _write(self, number: int, n: int) -> Address:
        """Where a tile that is used later goes: over one that is not read any more, if possible."""
        encoder = self.encoder
        at = encoder._locations.of[number]
        if at.root == number:
            for root, sources in self.by_root.items():
                if (
                    root in encoder._place
                    and root not in self.kept
                    and encoder.plan.tiles[root].batched
                    and encoder.plan.tiles[root].size == self.points
                    and encoder._uses[root] == self.reads[root]
                    and all(
                        x.offset == 0
                        and x.stride == 1
                        and x in self.address
                        and self.made.last.get(x, len(self.made.micros)) <= n
                        for x in sources
                    )
                ):
                    encoder._place[number] = encoder._place.pop(root)
                    break
        place = encoder._touch(number)
        stride = flat_stride(at.strides, self.made.shape)
        assert stride is not None and stride > 0
        return (SCRATCH, place, 0, stride)


def _merged(
    labels: Sequence[str], terms: tuple[str, str, str], extents: dict[str, int]
) -> tuple[int, int, int, int] | None:
    """The extent of labels that all terms walk like one, and its stride in each; else None."""
    strides = [_strides(x, extents) for x in terms]
    extent = 1
    steps = (0, 0, 0)
    for label in reversed([x for x in labels if extents[x] > 1]):
        here = tuple(s.get(label, 0) for s in strides)
        if extent > 1 and here != tuple(extent * x for x in steps):
            return None
        steps = steps if extent > 1 else (here[0], here[1], here[2])
        extent *= extents[label]
    return (extent, *steps)


def _loops(extents: dict[str, int], *layouts: tuple[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """``(extent, stride...)`` of every label, in the order of the output; extent one is no loop.

    A label that stands twice walks the diagonal.
    """
    order = dict.fromkeys("".join(labels for labels, _ in layouts))
    return [
        (
            extents[label],
            *(
                sum(s for s, x in zip(strides, labels, strict=True) if x == label)
                for labels, strides in layouts
            ),
        )
        for label in order
        if extents[label] > 1
    ]


def _strides(labels: str, extents: dict[str, int]) -> dict[str, int]:
    """Row-major strides."""
    shape = [extents[x] for x in labels]
    return dict(zip(labels, row_major(shape), strict=True))


def _flat(rows: Iterable[Iterable[int]]) -> list[int]:
    return [x for row in rows for x in row]
