"""From a plan to one CUDA kernel, as readable source.

The kernel is a sequence of *stages* (sweeps of fibre operations, gemms and sums; see ``sweeps``),
each handing tiles on to the next through shared memory. It is compiled for its exact sizes when XLA
builds the executable. The device functions it calls are the headers in ``cuda/``.

* One thread owns one fibre of a tile: inputs in registers, outputs by unrolled multiply-adds.
* Their matrix stands in the constant bank, from where it costs no register and no memory access.
  Its values are no part of the source: a constant is written there when the kernel is loaded, a
  traced array is copied there before each launch, which has a loaded copy of the kernel to itself
  meanwhile (``cuda/instances.h``). Both run the same kernel.
* A block of threads works on several elements. Global memory is read by the first stage that needs
  a tile and written by the one that makes it.
* An output summed over elements: each block sums a fixed share of the elements, and a second kernel
  adds the partial sums in a fixed order. A sum of products of two tiles is one long product (see
  ``accumulations``).

What stages are is in ``sweeps``, the passes from a plan to the kernel in ``blocks``; ``panels`` has
those of another kind of kernel.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma import factoring, functions
from jaxmagma.factoring import alternatives as alternatives
from jaxmagma.functions import COMPLEX_FUNCTIONS
from jaxmagma.lowering.cuda.architectures import Limits, limits_of
from jaxmagma.lowering.cuda.blocks import TYPES, Block
from jaxmagma.lowering.cuda.destinations import with_joined_places
from jaxmagma.lowering.cuda.functors import FUNCTORS
from jaxmagma.lowering.cuda.gemms import LARGEST_BLOCK
from jaxmagma.lowering.cuda.locality import planned as planned
from jaxmagma.lowering.cuda.matrices import Matrices
from jaxmagma.lowering.cuda.model import (
    choose,
    comes_in_rows,
    keeps_more_busy,
    wants_panels,
    wants_rows,
)
from jaxmagma.lowering.cuda.origins import resolvable
from jaxmagma.lowering.cuda.panels import Panels, panels_of
from jaxmagma.lowering.cuda.parameters import FREED
from jaxmagma.lowering.cuda.parameters import SPACE as SPACE
from jaxmagma.lowering.cuda.parameters import Parameters as Parameters
from jaxmagma.lowering.cuda.source import Source
from jaxmagma.lowering.cuda.source.tiles import Pointer
from jaxmagma.lowering.cuda.sums import spread
from jaxmagma.lowering.cuda.vectors import with_vectors
from jaxmagma.lowering.kernel import Declined, Excess, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plan import Plan, Pointwise, Product, Step, renumbered
from jaxmagma.program import Constant, ElementProgram, Gather, Input, Place, View
from jaxmagma.strides import places


TARGET = "jaxmagma_cuda"
BGEMM_TARGET = "jaxmagma_cuda_bgemm"
LARGEST_BGEMM = 32  # as in cuda/bgemm.h

ANY_GPU = Target("cuda")

# A kernel of more steps takes minutes to schedule and to compile.
MOST_STEPS = 2000

# Blocks that share a sum, at most: sixteen for each multiprocessor of an H200.
SUM_BLOCKS = 2112


def lower(
    plan: Plan,
    extents: tuple[int, ...],
    parameters: Parameters | None = None,
    target: Target = ANY_GPU,
) -> Kernel | Declined:
    """The CUDA kernel for ``plan``, with these parameters or the model's, or why there is none.

    ``extents`` of the batch axes only size the workspace.
    """
    declined = _declined(plan)
    if declined is not None:
        return declined
    compiled = _bgemm(plan) if parameters is None else None
    if compiled is not None:
        return compiled
    given = parameters or Parameters()
    limits = limits_of(target.architecture)
    if given.owner == "panels":
        panels = panels_of(_constants_folded(plan), limits)
        return Declined(panels) if isinstance(panels, str) else _panel_kernel(panels)
    block = _block(plan, given, limits, target.even_odd)
    if isinstance(block, Block) and wants_rows(block):
        # The fastest axis then has its turn at the points, and nobody waits for the next element.
        turned = factoring.planned(plan.program, middle="fastest")
        asked = replace(given, ahead=FREED) if given.ahead is None else given
        rows = _block(turned, asked, limits, target.even_odd, in_rows=True)
        if isinstance(rows, Block) and rows.transfers.streams and comes_in_rows(rows):
            block = rows
    # Other parameters are those of a block.
    if parameters in (None, Parameters()) and wants_panels(block):
        panels = panels_of(_constants_folded(plan), limits)
        if isinstance(panels, Panels):
            return _panel_kernel(panels)
    if isinstance(block, Declined):
        return block
    source = Source(block)
    return Kernel(
        TARGET,
        _attributes(source),
        _workspace(block, extents),
        block.describe(),
        source.text,
        block.ownership.busy,
    )


def _block(
    plan: Plan,
    parameters: Parameters,
    limits: Limits,
    even_odd: bool | None,
    in_rows: bool = False,
) -> Block | Declined:
    """Of components as fields by themselves, or as fields of vectors."""
    apart = _constants_folded(plan)
    block = choose(_resolved(apart), parameters, limits, even_odd, in_rows)
    vectors = with_vectors(apart)
    if vectors is apart:
        return block
    joined = choose(_resolved(vectors), parameters, limits, even_odd, in_rows)
    if isinstance(block, Block) and isinstance(joined, Block):
        return joined if keeps_more_busy(joined, block) else block
    return joined if isinstance(joined, Block) else block


def _resolved(plan: Plan) -> Plan:
    """The plan as blocks of threads do it."""
    return resolvable(spread(with_joined_places(plan), LARGEST_BLOCK))


def _declined(plan: Plan) -> Declined | None:
    """Why a plan has no kernel, as far as that is known without making one."""
    reason = _unsupported(plan)
    if reason is not None:
        return Declined(reason)
    if len(plan.steps) > MOST_STEPS:
        return Declined(
            f"{len(plan.steps)} steps are more than the {MOST_STEPS} of one kernel",
            Excess("steps", len(plan.steps) / MOST_STEPS),
        )
    everything = frozenset(range(plan.program.batch_rank))
    sums = {out.batch for out in plan.program.outputs if set(out.batch) != everything}
    if len(sums) > 1:
        return Declined("outputs are summed over different batch axes", Excess("sums", len(sums)))
    return None


def _unsupported(plan: Plan) -> str | None:
    program = plan.program
    if program.batch_rank == 0:
        return "no operand has a batch axis"
    indices = {step.index for step in plan.steps if isinstance(step, Gather)}
    values = {tile.dtype for n, tile in enumerate(plan.tiles) if n not in indices}
    for dtype in values:
        if dtype not in TYPES:
            return f"{dtype} has no CUDA kernel"
    if len(values) > 1:
        return "operands of different dtypes"
    for step in plan.steps:
        if isinstance(step, Gather):
            inputs = range(len(program.inputs))
            if step.vector not in inputs or step.index not in inputs:
                return "what is gathered from, or the index, is no operand"
            if plan.tiles[step.index].dtype != np.int32:
                return f"an index of {plan.tiles[step.index].dtype}"
        if isinstance(step, Pointwise):
            if step.function not in FUNCTORS:
                return f"the function {step.function!r} has no CUDA kernel"
            if program.dtype.kind == "c" and step.function not in COMPLEX_FUNCTIONS:
                return f"the function {step.function!r} of complex numbers"
    if any(0 in tile.shape for tile in plan.tiles):
        return "a tile is empty"
    return None


def _bgemm(plan: Plan) -> Kernel | None:
    """The kernel from the compiled family, if the plan is one product of square matrices."""
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if not isinstance(step, Product):
        return None
    program = plan.program
    sizes = set(step.extents.values())
    plain = len(step.rows) == len(step.columns) == len(step.contracted) == 1 and not step.paired
    if not plain or len(sizes) > 1 or max(sizes) > LARGEST_BGEMM:
        return None
    if sorted(step.operands) != [0, 1] or len(program.inputs) > 2 or len(program.outputs) > 1:
        return None
    axes = program.outputs[0].batch
    if len(axes) < program.batch_rank or any(x.batch != axes for x in program.inputs):
        return None
    left = step.left_labels[0] == step.contracted
    right = step.right_labels[0] == step.columns
    out = step.output_labels[0] == step.columns
    if step.left == 1:
        # C = B A is the transpose of A' B'.
        left, right, out = not right, not left, not out
    (size,) = sizes
    return Kernel(
        BGEMM_TARGET,
        {"size": size, "transposed": left + 2 * right + 4 * out},
        description=f"compiled product of {size} x {size} matrices",
    )


def _constants_folded(plan: Plan) -> Plan:
    """Steps on constants alone are done now: their results become inputs of the plan."""
    program = plan.program
    first = len(program.inputs)
    known = {n: x.constant.array for n, x in enumerate(program.inputs) if x.constant is not None}
    for number, step in plan.numbered_steps():
        if all(x in known for x in step.operands):
            known[number] = _evaluate(step, [known[x] for x in step.operands])
    done = [n for n in sorted(known) if n >= first]
    if not done:
        return plan
    left = [n for n in range(first, len(plan.tiles)) if n not in known]
    order = [*range(first), *done, *left]
    numbers = {old: new for new, old in enumerate(order)}

    constants = tuple(Input((), known[n].shape, known[n].dtype, Constant(known[n])) for n in done)
    # The operations go: from here on the steps of the plan are all that is read.
    folded = ElementProgram(
        program.batch_rank,
        program.inputs + constants,
        (),
        tuple(
            replace(out, value=numbers[value])
            for out, value in zip(program.outputs, plan.results, strict=True)
        ),
    )
    return Plan(
        folded,
        tuple(plan.tiles[n] for n in order),
        tuple(renumbered(plan.steps[n - first], numbers) for n in left),
        tuple(numbers[value] for value in plan.results),
    )


def _evaluate(step: Step, operands: list[np.ndarray]) -> np.ndarray:
    if isinstance(step, Pointwise):
        return _evaluate_pointwise(step, operands)
    if isinstance(step, View):
        return operands[0].reshape(-1)[places(step.offset, step.strides, step.tile)]
    if isinstance(step, Place):
        flat = np.zeros(math.prod(step.tile), operands[0].dtype)
        for (_, offset, strides), piece in zip(step.pieces, operands, strict=True):
            np.add.at(flat, places(offset, strides, piece.shape), piece)
        return flat.reshape(step.tile)
    if isinstance(step, Gather):
        vector, index = operands
        inside = (index >= 0) & (index < len(vector))
        found = vector[np.where(inside, index, 0)]
        present = inside.reshape(index.shape + (1,) * (vector.ndim - 1))
        return np.where(present, found, np.zeros((), vector.dtype))
    if isinstance(step, Product):
        terms = f"{step.left_labels},{step.right_labels}"
    else:
        terms = step.labels
        new = [x for x in step.output_labels if x not in step.labels]
        operands = [*operands, *(np.ones(step.extents[x], operands[0].dtype) for x in new)]
        terms = ",".join([terms, *new])
    made = np.einsum(f"{terms}->{step.output_labels}", *operands)
    return np.array(made, operands[0].dtype, order="C")  # of a scalar another function makes a list


def _evaluate_pointwise(step: Pointwise, operands: list[np.ndarray]) -> np.ndarray:
    aligned = []
    for array, labels in zip(operands, step.labels, strict=True):
        order = [labels.index(x) for x in step.output_labels if x in labels]
        missing = tuple(n for n, x in enumerate(step.output_labels) if x not in labels)
        aligned.append(np.expand_dims(np.transpose(array, order), missing))
    with jax.ensure_compile_time_eval():
        made = np.asarray(functions.evaluate(step.function, *map(jnp.asarray, aligned)))
    if made.dtype != operands[0].dtype:
        raise TypeError(f"a constant of {operands[0].dtype} where JAX has no such numbers")
    return np.array(np.broadcast_to(made, step.shape), order="C")


# ---- The call --------------------------------------------------------------------------------


def _element_order(block: Block) -> tuple[tuple[int, ...], int]:
    """Batch axes in the order in which elements are numbered, and how many of them are kept."""
    program, summed = block.plan.program, block.ends.summed
    kept = program.outputs[summed[0]].batch if summed else ()
    return _numbering(program, kept), len(kept)


def _numbering(program: ElementProgram, first: tuple[int, ...] = ()) -> tuple[int, ...]:
    """All batch axes: after these, those of the largest operand, as they lie in memory."""
    largest = max(program.inputs, key=lambda x: (len(x.batch), math.prod(x.tile)))
    return tuple(dict.fromkeys((*first, *largest.batch, *range(program.batch_rank))))


def _chunks(block: Block, extents: tuple[int, ...]) -> tuple[int, int]:
    order, kept = _element_order(block)
    outer = math.prod(extents[x] for x in order[:kept])
    inner = math.prod(extents[x] for x in order[kept:])
    slices = -(-inner // block.ownership.elements)
    return outer, max(1, min(slices, SUM_BLOCKS // max(1, outer)))


def _workspace(
    block: Block, extents: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    outer, chunks = _chunks(block, extents)
    sizes = map(block.ends.result_size, block.ends.summed)
    return tuple(((outer, chunks, size), block.ends.dtype) for size in sizes)


def _attributes(source: Source) -> dict[str, Any]:
    block = source.block
    ends, matrices, program = block.ends, block.matrices, block.plan.program
    order, kept = _element_order(block)
    arguments: dict[int, int] = {}
    for tile, operand in enumerate(program.inputs):
        if operand.constant is None:
            arguments[tile] = len(arguments)
    copies: list[int] = []  # argument, offset in the bank, bytes
    offset = 0
    for tile in matrices.bank:
        if tile in arguments:
            copies += [arguments[tile], offset, matrices.bank_size(tile) * ends.dtype.itemsize]
        offset += matrices.bank_bytes(tile)
    sums: list[int] = []  # result, workspace, values of a tile
    first = len(arguments)
    for number, out in enumerate(ends.summed):
        sums += [first + out, first + len(program.outputs) + number, ends.result_size(out)]

    bank = [x for tile in matrices.bank for x in _filled(matrices, tile)]
    tables = [array for x in matrices.tables() if (array := ends.constant(x)) is not None]
    return {
        "name": _name(source.text),
        "source": source.text,
        "threads": block.threads,
        "elements": block.elements * block.ownership.slices,
        "shared_bytes": block.shared_bytes,
        "resident": block.strides,
        "order": _integers([kept, *order]),
        "pointers": _pointers(source.pointers),
        "copies": _integers(copies),
        "sums": _integers(sums),
        "bank": _bytes([*bank, np.zeros(matrices.bank_uses(), np.int32)]),
        "table": _bytes([*tables, *matrices.arranged()]),
    }


def _panel_kernel(panels: Panels) -> Kernel:
    text = panels.source
    order = _numbering(panels.plan.program)
    attributes = {
        "name": _name(text),
        "source": text,
        "threads": panels.transfers.threads,
        "elements": panels.elements,
        "shared_bytes": panels.shared_bytes,
        "resident": True,
        "order": _integers([0, *order, *range(len(order), panels.axes)]),
        "pointers": _pointers(panels.pointers),
        "copies": _integers([]),
        "sums": _integers([]),
        "bank": _bytes([]),
        "table": _bytes(panels.tables),
    }
    return Kernel(TARGET, attributes, description=panels.describe(), source=text)


def _name(text: str) -> str:
    return "jaxmagma_" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _pointers(pointers: Iterable[Pointer]) -> np.ndarray:
    """As in cuda/launch.h: of each, its batch axes behind their number."""
    fields: list[int] = []
    for x in pointers:
        fields += [x.buffer, x.size, x.itemsize, x.gathered, len(x.axes), *x.axes]
    return _integers(fields)


def _filled(matrices: Matrices, tile: int) -> list[np.ndarray]:
    """The values of a matrix in the constant bank, and what is left free behind them."""
    values = matrices.bank_values(tile)
    return [values, np.zeros(matrices.bank_bytes(tile) - values.nbytes, np.uint8)]


def _bytes(arrays: list[np.ndarray]) -> np.ndarray:
    """One after the other, preceded by a byte, since an attribute may not be empty."""
    return np.frombuffer(b"\0" + b"".join(x.tobytes() for x in arrays), np.uint8)


def _integers(values: list[int]) -> np.ndarray:
    """Preceded by their number, since an attribute may not be empty."""
    return np.array([len(values), *values], np.int64)
