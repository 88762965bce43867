"""From a plan to the CPU executor: instructions over lanes.

The executor (``cpu/``) puts a block of elements side by side in the lanes of vectors: every value
of a tile is a row of lanes in a scratch memory that stays in the core's caches.  This module
decides where each tile lives there, when operands are loaded and results stored, and encodes that
as one array of integers; the native side only reads it.  A plan that is a single matrix product
needs no lanes of elements: the rows of its own matrices fill vectors, straight from memory.

Nothing in the code depends on how many elements there are; whether it gains does.

**Format** of the attribute ``plan``, all int64; ``count: x...`` is a length and its items::

    version, dtype, batch_rank, flops, shared_size, scratch_size
    count: inputs        kind, place, count: tile..., count: batch...
    count: outputs       count: tile..., count: batch..., count: summed batch axes...
    count: shared steps  instruction...
    count: steps         instruction...

A *place* is where a tile starts, counted in values, in the scratch of a block of elements (batched
tiles) or in the memory all elements share (shared tiles).  An instruction is its opcode and fields:

    LOAD       input, place, count                   scratch[place..] = operand
    MULTIPLY   input, out, right, accumulate, count  scratch[out..] = operand * scratch[right..]
    STORE      output, place, count                  result = scratch[place..]
    SPREAD     shared place, place, count            scratch[place..] = shared[..]
    PRODUCT    accumulate, out, left, right, left is shared, right is shared,
               count: (extent, out stride, left stride, right stride)...
    REARRANGE  out, in, count: (extent, out stride, in stride)...
    ADD        out, left, right, count
    GEMM       output, left, right (numbers of inputs, or places of shared tiles),
               left is shared, right is shared, rows, columns, inner,
               strides: left row, left inner, right inner, right column, out row

``accumulate`` adds to what is there.  Strides are in values; a loop whose stride is zero does not
move in that operand, so that a loop with output stride zero is summed over.  Shared steps use
PRODUCT, REARRANGE and ADD with every place shared.  ``constants`` holds the bytes of the constant
inputs one after the other.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.program import Gather, Place, View


TARGET = "jaxmagma_cpu"

_VERSION = 1
_LOAD, _MULTIPLY, _STORE, _SPREAD, _PRODUCT, _REARRANGE, _ADD, _GEMM = range(8)
_BATCHED, _SHARED, _CONSTANT = range(3)
_DTYPES = {"float32": 0, "float64": 1, "complex64": 2, "complex128": 3, "float16": 4, "bfloat16": 5}

# Lanes of one block of elements at their narrowest fill a vector of 64 bytes.  The tiles of that
# many elements that are alive at once, and the shared operands, must stay in the nearer caches.
_VECTOR_BYTES = 64
_SCRATCH_BYTES = 4 << 20
_SHARED_BYTES = 256 << 10
# A single matrix product whose rows are shorter than this is faster with elements in the lanes.
_LEAST_COLUMNS = 5

# Measured on two AVX-512 cores under jit: less work than this is faster inside XLA's fused loops,
# and XLA's own product is faster if it is one for all elements and both its sides are this long.
_LEAST_OPERATIONS = 1000
_LEAST_SIDE_OF_XLA = 4
# XLA fuses a product of two matrices per element into one loop if both have fewer values than this,
# and is 1.3 to 3 times as fast; from there on it calls a routine per element, and is slower.
_FUSED_VALUES_OF_XLA = 16


def lower(plan: Plan, extents: tuple[int, ...]) -> Kernel | Declined:
    """The custom call that runs ``plan`` on CPU, or why plain JAX should."""
    kernel = encode(plan)
    reason = _no_gain(plan, math.prod(extents))
    if isinstance(kernel, Kernel) and reason:
        return Declined(reason)
    return kernel


def encode(plan: Plan) -> Kernel | Declined:
    """The custom call that runs ``plan`` on CPU, whether it gains or not, or why there is none."""
    program = plan.program
    dtype = program.dtype
    if dtype.name not in _DTYPES:
        return Declined(f"the CPU kernel does not compute in {dtype}")
    if any(x.dtype != dtype for x in program.inputs):
        found = ", ".join(sorted({x.dtype.name for x in program.inputs}))
        return Declined(f"the CPU kernel needs operands of one dtype, not {found}")
    for _, step in plan.numbered_steps():
        if isinstance(step, Pointwise) and (
            step.function != "add" or any(x != step.output_labels for x in step.labels)
        ):
            return Declined(f"the CPU kernel does not know the function {step.function!r}")
        if isinstance(step, View | Place | Gather):
            return Declined(f"the CPU kernel does not know the step {step}")
    if any(tile.size == 0 for tile in plan.tiles):
        return Declined("a tile is empty")
    code = _Encoder(plan)
    planes = 2 if dtype.kind == "c" else 1
    limit = _SCRATCH_BYTES // _VECTOR_BYTES // planes
    if code.scratch.size > limit:
        return Declined(
            f"the tiles of one element ({code.scratch.size} values) exceed the on-chip limit of "
            f"{limit} values"
        )
    limit = _SHARED_BYTES // dtype.itemsize
    if code.shared_size > limit:
        return Declined(
            f"the shared operands ({code.shared_size} values) exceed the on-chip limit of "
            f"{limit} values"
        )
    if code.steps and code.steps[0][0] == _GEMM:
        description = "one matrix product per element, its rows in vector lanes"
    else:
        description = (
            f"elements in vector lanes, {code.scratch.size} values each on chip, "
            f"{len(code.steps)} instructions"
        )
    attributes = {"plan": code.attribute(), "constants": code.constants()}
    return Kernel(TARGET, attributes, description=description)


# ---- The gain ------------------------------------------------------------------------------------


def _no_gain(plan: Plan, elements: int) -> str | None:
    """Why XLA is as fast, or None."""
    steps = [step for number, step in plan.numbered_steps() if plan.tiles[number].batched]
    products = [step for step in steps if isinstance(step, Product)]
    if not any(_is_matrix_product(plan, step) for step in products):
        return "without a product of matrices it is bound by memory, and XLA's loops are as fast"
    if len(steps) == 1 and _is_one_for_all_elements(plan, products[0]):
        return "it is one matrix product for all elements, and XLA's is as fast"
    if len(steps) == 1 and _is_fused(plan, products[0]):
        return (
            "its matrices are so small that XLA multiplies them in fused loops, which are as fast"
        )
    if plan.flops * elements < _LEAST_OPERATIONS:
        return (
            f"{plan.flops * elements} operations are less than the {_LEAST_OPERATIONS} that are "
            "worth a call of their own"
        )
    return None


def _is_matrix_product(plan: Plan, step: Product) -> bool:
    """Whether operands are used more than once: not so for vectors and pointwise products."""
    many = [any(step.extents[x] > 1 for x in y) for y in (step.rows, step.columns, step.contracted)]
    return many[0] and many[2] and (many[1] or not plan.tiles[step.left].batched)


def _is_fused(plan: Plan, step: Product) -> bool:
    """Whether XLA makes one loop of a product of two small matrices of each element."""
    tiles = [plan.tiles[x] for x in step.operands]
    return plan.program.dtype.name in ("float32", "float64") and all(
        tile.batched and tile.size < _FUSED_VALUES_OF_XLA for tile in tiles
    )


def _is_one_for_all_elements(plan: Plan, step: Product) -> bool:
    """Whether ``out[element, column, row] = sum_k left[row, k] right[element, column, k]``."""
    inner = step.right_labels[len(step.right_labels) - len(step.contracted) :]
    outer = step.right_labels[: len(step.right_labels) - len(step.contracted)]
    sides = (math.prod(step.extents[x] for x in y) for y in (step.rows, step.contracted))
    return (
        not plan.tiles[step.left].batched
        and set(inner) == set(step.contracted)
        and step.output_labels == outer + step.rows
        and min(sides) >= _LEAST_SIDE_OF_XLA
    )


# ---- The code ------------------------------------------------------------------------------------


class _Scratch:
    """First-fit allocation of the scratch of one block of elements."""

    def __init__(self) -> None:
        self.size = 0
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int:
        place = 0
        for start, end in sorted(self._taken.items()):
            if start - place >= size:
                break
            place = end
        self._taken[place] = place + size
        self.size = max(self.size, place + size)
        return place

    def free(self, place: int) -> None:
        del self._taken[place]


class _Encoder:
    """Assigns places and writes instructions, in the order of the plan's steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.program = plan.program
        self.scratch = _Scratch()
        self.shared_size = 0
        self.shared_steps: list[list[int]] = []
        self.steps: list[list[int]] = []
        self._shared_place: dict[int, int] = {}
        self._place: dict[int, int] = {}  # batched tiles that are in scratch now
        self._done: set[int] = set()  # steps that a product before them has done
        self._uses = [0] * len(plan.tiles)  # how many reads of each tile are still to come
        self._reader: dict[int, int] = {}  # of each tile, the last step that reads it
        for number, step in plan.numbered_steps():
            for operand in step.operands:
                self._uses[operand] += 1
                self._reader[operand] = number
        for value in plan.results:
            self._uses[value] += 1

        for number, tile in enumerate(plan.tiles):
            if not tile.batched:
                self._shared_place[number] = self.shared_size
                self.shared_size += tile.size
        gemm = self._gemm()
        if gemm:
            self.steps.append(gemm)
            return
        for number in range(len(self.program.inputs)):
            self._store_results(number)
        for number, step in plan.numbered_steps():
            if plan.tiles[number].batched:
                if number not in self._done:
                    self._step(number, step)
            else:
                self._shared_step(number, step)
            self._store_results(number)

    # ---- steps -----------------------------------------------------------------------------

    def _step(self, number: int, step: Product | Rearrange | Pointwise) -> None:
        if isinstance(step, Product):
            if not self._multiply_while_loading(number, step):
                self._product(number, step)
        elif isinstance(step, Rearrange):
            source = self._in_scratch(step.operand)
            place = self._take(number)
            loops = _loops(step.extents, step.output_labels, step.labels)
            self.steps.append([_REARRANGE, place, source, len(loops), *_flat(loops)])
            self._used(step.operand)
        else:
            left, right = (self._in_scratch(x) for x in step.operands)
            for operand in step.operands:
                self._used(operand, keep=True)
            place = self._take_over(number, step.operands)
            self.steps.append([_ADD, place, left, right, self.plan.tiles[number].size])
            self._release(step.operands)

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
        return [_GEMM, 0, *places, *map(int, shared), *extents, *strides]

    def _product(self, number: int, step: Product) -> None:
        places = []
        shared = []
        for operand in step.operands:
            shared.append(int(not self.plan.tiles[operand].batched))
            places.append(self._shared_place[operand] if shared[-1] else self._in_scratch(operand))
        accumulate, place = self._destination(number)
        loops = _loops(step.extents, step.output_labels, step.left_labels, step.right_labels)
        self.steps.append(
            [_PRODUCT, accumulate, place, *places, *shared, len(loops), *_flat(loops)]
        )
        for operand in step.operands:
            self._used(operand)

    def _multiply_while_loading(self, number: int, step: Product) -> bool:
        """Pointwise products with an operand that nothing else reads need no room for it."""
        if not step.left_labels == step.right_labels == step.output_labels:
            return False
        for operand, other in (step.operands, step.operands[::-1]):
            loaded_once = (
                operand < len(self.program.inputs)
                and self.plan.tiles[operand].batched
                and self._uses[operand] == 1
                and operand not in self._place
            )
            if loaded_once and self.plan.tiles[other].batched:
                right = self._in_scratch(other)
                self._used(operand)
                self._used(other, keep=True)
                accumulate, place = self._destination(number, take_over=[other])
                size = self.plan.tiles[number].size
                self.steps.append([_MULTIPLY, operand, place, right, accumulate, size])
                self._release([other])
                return True
        return False

    def _destination(self, number: int, take_over: Sequence[int] = ()) -> tuple[int, int]:
        """Whether a product is added to what is at its place, and that place.

        It is if all that becomes of it is a sum with a tile that nothing else reads: that tile's
        place then holds the sum, and the step that adds is done.
        """
        reader = self._reader.get(number)
        step = None if reader is None else self.plan.steps[reader - len(self.program.inputs)]
        if reader is not None and isinstance(step, Pointwise) and self._uses[number] == 1:
            (other,) = {*step.operands} - {number}
            ready = other in self._place or other < len(self.program.inputs)
            if ready and self.plan.tiles[other].batched and self._uses[other] == 1:
                place = self._in_scratch(other)
                self._uses[number] = self._uses[other] = 0
                self._place[reader] = self._place.pop(other)
                self._done.add(reader)
                return 1, place
        return 0, self._take_over(number, take_over)

    def _shared_step(self, number: int, step: Product | Rearrange | Pointwise) -> None:
        place = self._shared_place[number]
        places = [self._shared_place[x] for x in step.operands]
        if isinstance(step, Product):
            loops = _loops(step.extents, step.output_labels, step.left_labels, step.right_labels)
            code = [_PRODUCT, 0, place, *places, 1, 1, len(loops), *_flat(loops)]
        elif isinstance(step, Rearrange):
            loops = _loops(step.extents, step.output_labels, step.labels)
            code = [_REARRANGE, place, *places, len(loops), *_flat(loops)]
        else:
            code = [_ADD, place, *places, self.plan.tiles[number].size]
        self.shared_steps.append(code)
        for operand in step.operands:
            self._used(operand)

    def _store_results(self, number: int) -> None:
        """Results leave as soon as they are made, while they are in the nearest cache."""
        for output, value in enumerate(self.plan.results):
            if value == number:
                place = self._in_scratch(number)
                self.steps.append([_STORE, output, place, self.plan.tiles[number].size])
                self._used(number)

    # ---- places ----------------------------------------------------------------------------

    def _take(self, number: int) -> int:
        self._place[number] = self.scratch.take(self.plan.tiles[number].size)
        return self._place[number]

    def _take_over(self, number: int, operands: Sequence[int]) -> int:
        """The place of an operand that is dead and as large, or a new one."""
        for operand in operands:
            if self._uses[operand] == 0 and operand in self._place:
                self._place[number] = self._place.pop(operand)
                return self._place[number]
        return self._take(number)

    def _in_scratch(self, number: int) -> int:
        """The place of a tile, which is brought into scratch if it is not there."""
        if number not in self._place:
            size = self.plan.tiles[number].size
            place = self._take(number)
            if self.plan.tiles[number].batched:
                self.steps.append([_LOAD, number, place, size])
            else:
                self.steps.append([_SPREAD, self._shared_place[number], place, size])
        return self._place[number]

    def _used(self, number: int, keep: bool = False) -> None:
        self._uses[number] -= 1
        if not keep:
            self._release([number])

    def _release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._uses[number] == 0 and number in self._place:
                self.scratch.free(self._place.pop(number))

    # ---- encoding --------------------------------------------------------------------------

    def attribute(self) -> np.ndarray:
        program = self.program
        code = [_VERSION, _DTYPES[program.dtype.name], program.batch_rank]
        code += [self.plan.flops, self.shared_size, self.scratch.size]
        code.append(len(program.inputs))
        for number, operand in enumerate(program.inputs):
            kind = _BATCHED if operand.batch else _CONSTANT if operand.constant else _SHARED
            code += [kind, self._shared_place.get(number, 0)]
            code += [len(operand.tile), *operand.tile, len(operand.batch), *operand.batch]
        code.append(len(program.outputs))
        for output, value in zip(program.outputs, self.plan.results, strict=True):
            shape = self.plan.tiles[value].shape
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


def _loops(extents: dict[str, int], *labels: str) -> list[tuple[int, ...]]:
    """``(extent, stride...)`` of every label, in the order of the output; extent one is no loop."""
    order = dict.fromkeys("".join(labels))
    strides = [_strides(x, extents) for x in labels]
    return [
        (extents[label], *(s.get(label, 0) for s in strides))
        for label in order
        if extents[label] > 1
    ]


def _strides(labels: str, extents: dict[str, int]) -> dict[str, int]:
    """Row-major strides; a label that stands twice walks the diagonal."""
    strides: dict[str, int] = {}
    for position, label in enumerate(labels):
        below = math.prod(extents[x] for x in labels[position + 1 :])
        strides[label] = strides.get(label, 0) + below
    return strides


def _flat(rows: Iterable[Iterable[int]]) -> list[int]:
    return [x for row in rows for x in row]
