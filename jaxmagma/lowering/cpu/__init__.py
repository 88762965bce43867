"""From a plan to the CPU executor: instructions over lanes.

The executor (``cpu/``) puts a block of elements side by side in the lanes of vectors: every value
of a tile is a row of lanes in a scratch memory that stays in the core's caches.  This module
decides where each tile lives there, when operands are loaded and results stored, and encodes that
as one array of integers; the native side only reads it.  A plan that is a single matrix product
needs no lanes of elements: the rows of its own matrices fill vectors, straight from memory.

Nothing in the code depends on how many elements there are; whether it gains does.

**Format** of the attribute ``plan``, all int64; ``count: x...`` is a length and its items::

    version, dtype, batch_rank, flops, shared_size, scratch_size, block
    count: inputs        kind, place, count: tile..., count: batch...
    count: outputs       count: tile..., count: batch..., count: summed batch axes...
    count: shared steps  instruction...
    count: steps         instruction...

``block`` is how many vectors of elements go through all instructions together (elements, for a
GEMM), zero if the executor is to choose.

A *place* is where a tile starts, counted in values, in the scratch of a block of elements (batched
tiles) or in the memory all elements share (shared tiles).  An instruction is its opcode and fields:

    LOAD       input, place, count                   scratch[place..] = operand
    MULTIPLY   input, out, right, accumulate, count  scratch[out..] = operand * scratch[right..]
    STORE      output, place, count                  result = scratch[place..]
    SPREAD     shared place, place, count            scratch[place..] = shared[..]
    PRODUCT    accumulate, out, left, right, left is shared, right is shared,
               count: (extent, out stride, left stride, right stride)...
    REARRANGE  accumulate, out, in, count: (extent, out stride, in stride)...
    ZERO       out, count
    GATHER     vector, index (inputs), out, count of indices, values of a row
    MAP        function, out, a, b, c, count: (extent, out stride, a stride, b stride, c stride)...
    EXPRESSION points, slots, count: operation...
    GEMM       output, left, right (numbers of inputs, or places of shared tiles),
               left is shared, right is shared, rows, columns, inner,
               strides: left row, left inner, right inner, right column, out row
    POINT_MATRIX input, points, rows, place out..., place right..., entry...
               scratch[out[i]..] = sum_k operand[entry[i, k]..] * scratch[right[k]..]

``accumulate`` adds to what is there.  Strides are in values; a loop whose stride is zero does not
move in that operand, so that a loop with output stride zero is summed over.  Shared steps use
PRODUCT, REARRANGE, ZERO and MAP with every place shared.  ``constants`` holds the bytes of the
constant inputs one after the other.

An operation of an expression works on a chunk of its points; see
:mod:`jaxmagma.lowering.cpu.expressions` for slots and addresses:

    FUNCTION   function, address of the result, address of every operand
    FILL       slot, is shared, place                slot[..] = one value, once for all chunks
    COLLECT    slot, is shared, place, count: (extent, stride)...
    WINDOW     input, slot, width, start             so many values of an input for each point
    WHERE      function, nonzero, address of a value, address of the result, of every operand
               in those vectors, at least, in which the value is not zero, or is, in some lane
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmagma.lowering.cpu.expressions import NUMBERS
from jaxmagma.lowering.cpu.lanes import DTYPES, GEMM, Encoder
from jaxmagma.lowering.cpu.places import gathered
from jaxmagma.lowering.kernel import Declined, Excess, Kernel
from jaxmagma.lowering.rules import Rules
from jaxmagma.lowering.space import Space, one
from jaxmagma.lowering.target import Target
from jaxmagma.plans import factoring
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, Step
from jaxmagma.programs.functions import CHOICES, COMPLEX_FUNCTIONS, LONG, VALUE_BY_VALUE
from jaxmagma.programs.program import ElementProgram, Gather, Place


TARGET = "jaxmagma_cpu"
ANY_CPU = Target("cpu")

# Lanes of one block of elements at their narrowest fill a vector of 64 bytes.  The tiles of that
# many elements that are alive at once, and the shared operands, must stay in the nearer caches.
_VECTOR_BYTES = 64
_SCRATCH_BYTES = 4 << 20
_SHARED_BYTES = 256 << 10
# The largest blocks, as in cpu/executor.cc.
_MOST_VECTORS = 64
_MOST_DIRECT_ELEMENTS = 64

# Measured on two AVX-512 cores under jit: less work than this is faster inside XLA's fused loops,
# and XLA's own product is faster if it is one for all elements and both its sides are this long.
_LEAST_OPERATIONS = 1000
LEAST_SIDE_OF_XLA = 4
# Without matrix products, a kernel is faster from so many operations for each value that is read or
# written: eigenvalues of a matrix are (2 to 3 times), a determinant or a norm is not.
_LEAST_FLOPS_PER_VALUE = 4
# XLA puts more of them together in a loop that is slower than a kernel
# (benchmarks/results/spellings-epyc.txt).
_MOST_PIECES_OF_XLA = 12
# Or more than so few, where there are so many operations for each value, choices counted: the
# unknowns of a system that is solved by elimination with pivots (there, too).
_FEW_PIECES = 3
_MANY_OPERATIONS_PER_VALUE = 5
# Or if for each value it computes so many operations anew that another piece needs, too, a function
# such as ``exp`` counted as ten: sums of the first values, of each number of them.
_MOST_REPEATED_PER_VALUE = 2
_LONG_FUNCTION = 10
# XLA fuses a product of two matrices per element into one loop if both have fewer values than this,
# and is 1.3 to 3 times as fast; from there on it calls a routine per element, and is slower.
FUSED_VALUES_OF_XLA = 16


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the model in the executor."""

    # Elements that go through all instructions together, counted in vectors of elements; where one
    # matrix product does not need such vectors, in elements.
    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"a block of {self.block}")


# What is tried of them.
SPACE = Space((one("block", None, 1, 2, 4, 8, 16, 32, 64),), plain=True)


def planned(program: ElementProgram) -> Plan:
    """The plan of fewest operations, in which a result is gone through once for all terms of it."""
    return factoring.stacked(factoring.planned(program))


def alternatives(program: ElementProgram) -> tuple[Plan, ...]:
    """Other plans, for where the tiles of that one are too large."""
    return tuple(map(factoring.stacked, factoring.alternatives(program)))


def rules_of(_: str) -> Rules:
    """What removes kernels before they are timed: nothing."""
    return Rules()


def lower(
    plan: Plan,
    extents: tuple[int, ...],
    parameters: Parameters | None = None,
    target: Target = ANY_CPU,
) -> Kernel | Declined:
    """The custom call that runs ``plan`` on CPU, or why plain JAX should.

    With given parameters a kernel runs it, whether it gains or not.  It is the same on every CPU.
    """
    kernel = encode(plan, parameters or Parameters())
    if parameters is not None:
        return kernel
    reason = _no_gain(plan, math.prod(extents))
    if isinstance(kernel, Kernel) and reason:
        return Declined(reason)
    return kernel


def encode(plan: Plan, parameters: Parameters = Parameters()) -> Kernel | Declined:
    """The custom call that runs ``plan`` on CPU, whether it gains or not, or why there is none."""
    program = plan.program
    if all(x.dtype.kind == "i" for x in program.inputs):
        return Declined(f"the CPU kernel does not compute in {program.inputs[0].dtype}")
    dtype = program.dtype
    if dtype.name not in DTYPES:
        return Declined(f"the CPU kernel does not compute in {dtype}")
    reason = _unknown(plan)
    if reason:
        return Declined(reason)
    code = Encoder(plan)
    planes = 2 if dtype.kind == "c" else 1
    limit = _SCRATCH_BYTES // _VECTOR_BYTES // planes
    if code.scratch.size > limit:
        return Declined(
            f"the tiles of one element ({code.scratch.size} values) exceed the on-chip limit of "
            f"{limit} values",
            Excess("room", code.scratch.size / limit),
        )
    limit = _SHARED_BYTES // dtype.itemsize
    if code.shared_size > limit:
        return Declined(
            f"the shared operands ({code.shared_size} values) exceed the on-chip limit of "
            f"{limit} values"
        )
    direct = bool(code.steps) and code.steps[0][0] == GEMM
    if direct:
        description = "one matrix product per element, its rows in vector lanes"
    else:
        description = (
            f"elements in vector lanes, {code.scratch.size} values each on chip, "
            f"{len(code.steps)} instructions"
        )
    most = _MOST_DIRECT_ELEMENTS if direct else _MOST_VECTORS
    if parameters.block is not None and parameters.block > most:
        return Declined(f"a block of {parameters.block}: {most} are the most")
    attributes = {"plan": code.attribute(parameters.block or 0), "constants": code.constants()}
    return Kernel(TARGET, attributes, description=description)


def _unknown(plan: Plan) -> str | None:
    """What the executor cannot do, if it is so."""
    program = plan.program
    vectors, indices = gathered(plan)
    for number, operand in enumerate(program.inputs):
        if number in indices:
            if operand.dtype.name != "int32" or not operand.batch:
                return "the CPU kernel gathers by int32 indices that differ between elements"
        elif operand.dtype != program.dtype:
            found = ", ".join(sorted({x.dtype.name for x in program.inputs}))
            return f"the CPU kernel needs operands of one dtype, not {found}"
        if number in vectors and operand.constant is not None:
            return "the CPU kernel gathers from an argument, not from a constant"
    for _, step in plan.numbered_steps():
        if isinstance(step, Pointwise):
            known = step.function in NUMBERS and (
                program.dtype.kind != "c" or step.function in {*COMPLEX_FUNCTIONS, "first"}
            )
            if not known:
                kind = "complex " if program.dtype.kind == "c" else ""
                return f"the CPU kernel does not know the {kind}function {step.function!r}"
        elif not isinstance(step, Gather) and (vectors | indices) & {*step.operands}:
            return "an input that is gathered from is also used as a tile"
        if isinstance(step, Pointwise) and (vectors | indices) & {*step.operands}:
            return "an input that is gathered from is also used as a tile"
    if (vectors | indices) & {*plan.results} or vectors & indices:
        return "an input that is gathered from is also used as a tile"
    if any(tile.size == 0 for tile in plan.tiles):
        return "a tile is empty"
    return None


# ---- The gain ------------------------------------------------------------------------------------


def _no_gain(plan: Plan, elements: int) -> str | None:
    """Why XLA is as fast, or None."""
    steps = [step for number, step in plan.numbered_steps() if plan.tiles[number].batched]
    products = [step for step in steps if isinstance(step, Product)]
    has_products = any(_is_matrix_product(plan, step) for step in products)
    if not (has_products or _computes_much(plan) or _has_many_pieces(plan)):
        return "without a product of matrices it is bound by memory, and XLA's loops are as fast"
    # A kernel keeps on chip what one product makes for the next; of others XLA's are as fast.
    in_a_row = _are_in_a_row(plan)
    rows = Counter[int]()  # of all that one tile is multiplied by: rows of one matrix, maybe
    for x in products:
        rows[x.right] += math.prod(x.extents[y] for y in x.rows)
    one_for_all = all(_is_one_for_all_elements(plan, x, rows[x.right]) for x in products)
    rest = [step for step in steps if not isinstance(step, Product)]
    if products and one_for_all and not in_a_row and _are_loops(plan, rest):
        if len(products) == 1:
            return "it is one matrix product for all elements, and XLA's is as fast"
        return "they are matrix products for all elements, and XLA's are as fast"
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


def _computes_much(plan: Plan) -> bool:
    """Whether XLA's several loops, which leave values in memory, cost more than one kernel.

    It chooses between values as fast as a kernel.
    """
    steps = [step for number, step in plan.numbered_steps() if plan.tiles[number].batched]
    return _computed(steps) >= _LEAST_FLOPS_PER_VALUE * _values(plan)


def _computed(steps: Sequence[Step]) -> int:
    """The operations of some steps that are no choices."""
    choices = (x.flops for x in steps if isinstance(x, Pointwise) and x.function in CHOICES)
    return sum(x.flops for x in steps) - sum(choices)


def _are_loops(plan: Plan, steps: Sequence[Step]) -> bool:
    """Whether XLA makes of some steps one loop, or of few operations several."""
    pointwise = [x for x in steps if isinstance(x, Pointwise)]
    slow = VALUE_BY_VALUE.get(plan.program.dtype.name, {})
    if any(x.function in slow for x in pointwise):
        return False
    few = _computed(steps) < _LEAST_FLOPS_PER_VALUE * _values(plan)
    return len(pointwise) == len(steps) or few


def _values(plan: Plan) -> int:
    """That an element reads and writes."""
    inputs = plan.tiles[: len(plan.program.inputs)]
    return sum(x.size for x in [*inputs, *map(plan.tiles.__getitem__, plan.results)] if x.batched)


def _has_many_pieces(plan: Plan) -> bool:
    """Whether a result is put together of so many that XLA's loop for it is slow.

    So the weights of the 27 points around a particle are a kernel. So are fewer pieces of several
    values each, as the sums along rows of a matrix: at every place XLA decides which one is there,
    and computes it from its operands anew (``benchmarks/results/spellings-epyc.txt``).
    """
    first = len(plan.program.inputs)
    work = sum(x.flops for n, x in plan.numbered_steps() if plan.tiles[n].batched)
    long = work >= _MANY_OPERATIONS_PER_VALUE * _values(plan)
    repeated = _MOST_REPEATED_PER_VALUE * _values(plan)

    def step(tile: int) -> Step | None:
        return plan.steps[tile - first] if tile >= first else None

    def pieces(tile: int) -> list[int]:
        made = step(tile)
        return [y for x in made.operands for y in pieces(x)] if isinstance(made, Place) else [tile]

    def is_slow(result: int) -> bool:
        found = pieces(result)
        computed = [x for x in found if isinstance(step(x), Pointwise | Rearrange)]
        large = len(found) > 1 and any(plan.tiles[x].size > 1 for x in computed)
        most = _FEW_PIECES if long and len(computed) == len(found) else _MOST_PIECES_OF_XLA
        return len(found) > most or large or _repeated(plan, computed) > repeated

    return any(map(is_slow, plan.results))


def _repeated(plan: Plan, pieces: Sequence[int]) -> int:
    """The operations that XLA does more than once where it computes each of some tiles alone."""
    first, times = len(plan.program.inputs), Counter[int]()
    for piece in pieces:
        waiting, needed = [piece], set[int]()
        while waiting:
            tile = waiting.pop()
            if tile >= first and tile not in needed:
                needed.add(tile)
                waiting += plan.steps[tile - first].operands
        times.update(needed)
    return sum((n - 1) * _operations(plan.steps[tile - first]) for tile, n in times.items())


def _operations(step: Step) -> int:
    long = isinstance(step, Pointwise) and step.function in LONG
    return step.flops * (_LONG_FUNCTION if long else 1)


def _is_matrix_product(plan: Plan, step: Product) -> bool:
    """Whether operands are used more than once: not so for vectors and pointwise products."""
    many = [any(step.extents[x] > 1 for x in y) for y in (step.rows, step.columns, step.contracted)]
    return many[0] and many[2] and (many[1] or not plan.tiles[step.left].batched)


def _is_fused(plan: Plan, step: Product) -> bool:
    """Whether XLA makes one loop of a product of two small matrices of each element."""
    tiles = [plan.tiles[x] for x in step.operands]
    return plan.program.dtype.name in ("float32", "float64") and all(
        tile.batched and tile.size < FUSED_VALUES_OF_XLA for tile in tiles
    )


def _are_in_a_row(plan: Plan) -> bool:
    """Whether a product has a factor that another one is needed for."""
    made = set[int]()  # of products
    for number, step in plan.numbered_steps():
        needs = not made.isdisjoint(step.operands)
        if isinstance(step, Product) and plan.tiles[number].batched:
            if needs:
                return True
            needs = True
        if needs:
            made.add(number)
    return False


def _is_one_for_all_elements(plan: Plan, step: Product, rows: int) -> bool:
    """Whether ``out[element, column, row] = sum_k left[row, k] right[element, column, k]``.

    It may be some of so many ``rows``.
    """
    inner = step.right_labels[len(step.right_labels) - len(step.contracted) :]
    outer = step.right_labels[: len(step.right_labels) - len(step.contracted)]
    sides = rows, math.prod(step.extents[x] for x in step.contracted)
    return (
        not plan.tiles[step.left].batched
        and set(inner) == set(step.contracted)
        and step.output_labels == outer + step.rows
        and min(sides) >= LEAST_SIDE_OF_XLA
    )
