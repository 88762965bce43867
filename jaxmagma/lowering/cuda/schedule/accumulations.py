"""Sums over elements of products of two tiles: the gradient of a matrix that all elements share.

``sum_e sum_k left[e, m, k] right[e, k, n]``, and a sum of several such terms, is one long product.
Its result stays in registers while a block of threads goes through its elements. No element has a
result of its own, and nothing is added up but in the end.

* A small sum every thread has *whole*. It adds outer products of fibres along m and n where a sweep
  has them in registers, or one of them and reads the other (``cuda/outer.cuh``).
* Others are spread over warps in the pieces that tensor cores compute (``cuda/accumulate.cuh``).
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from jaxmagma.lowering.cuda.schedule.sweeps import QUAD, Accumulation
from jaxmagma.plans.plan import Plan, Pointwise, Product


# Rows, and columns, of a piece.
PIECE = 8
# Registers of a thread, of four bytes each, that all sums may take.
MOST_REGISTERS = 64
# The same for sums that every thread has whole.
WHOLE_REGISTERS = 80


def accumulations(plan: Plan) -> tuple[list[Accumulation], set[int]]:
    """The products that are only summed over elements, and the tiles that are then not needed.

    Those that registers have room for, and that gain by it.
    """
    everything = set(range(plan.program.batch_rank))
    uses = Counter(plan.results)
    for step in plan.steps:
        uses.update(step.operands)
    found: list[Accumulation] = []
    gone: set[int] = set()
    left = MOST_REGISTERS
    for output, (out, tile) in enumerate(zip(plan.program.outputs, plan.results, strict=True)):
        terms = None if set(out.batch) == everything else _terms(plan, uses, tile, False)
        if terms is None:
            continue
        rows, columns = plan.tiles[tile].shape
        registers = registers_of(rows, columns, plan.program.dtype)
        if registers <= left:
            left -= registers
            found += [Accumulation(output, x, _contracted(plan, x)) for x in terms[0]]
            gone |= terms[1]
    return found, gone


def registers_of(rows: int, columns: int, dtype: np.dtype) -> int:
    """Registers of a thread for a sum: two values of each piece."""
    return 2 * math.ceil(rows / PIECE) * math.ceil(columns / PIECE) * max(1, dtype.itemsize // 4)


def whole_registers(plan: Plan, tile: int) -> int:
    """Registers of a thread for a whole sum."""
    return plan.tiles[tile].size * max(1, plan.program.dtype.itemsize // 4)


def _terms(
    plan: Plan, uses: Counter[int], tile: int, flipped: bool
) -> tuple[list[Product], set[int]] | None:
    """The products that add up to a tile, and all tiles on the way; None if it is no such sum.

    Their rows are the rows of the sum, its columns if ``flipped``.
    """
    first = len(plan.program.inputs)
    step = plan.steps[tile - first] if tile >= first else None
    if uses[tile] > 1:
        return None
    if isinstance(step, Product):
        if len(step.rows) != 1 or len(step.columns) != 1 or step.paired or not step.contracted:
            return None
        if not all(plan.tiles[x].batched for x in step.operands):
            return None
        output = step.output_labels[::-1] if flipped else step.output_labels
        step = replace(step, output_labels=output)
        if output[0] not in step.left_labels:
            step = replace(
                step,
                left=step.right,
                right=step.left,
                left_labels=step.right_labels,
                right_labels=step.left_labels,
            )
        return [step], {tile}
    if not isinstance(step, Pointwise) or step.function != "add" or len(step.shape) != 2:
        return None
    products: list[Product] = []
    tiles = {tile}
    for operand, labels in zip(step.operands, step.labels, strict=True):
        if sorted(labels) != sorted(step.output_labels):
            return None
        found = _terms(plan, uses, operand, flipped != (labels != step.output_labels))
        if found is None:
            return None
        products += found[0]
        tiles |= found[1]
    return products, tiles


def _contracted(plan: Plan, step: Product) -> str:
    """The labels that are summed over; of the last one, tensor cores take four values at a time.

    That is one that leaves few of the four unused, and among equals the fastest in memory.
    """
    first = len(plan.program.inputs)
    outside = step.right_labels if step.right < first <= step.left else step.left_labels
    labels = [x for x in outside if x in step.contracted]
    filled = {x: step.extents[x] / (-(-step.extents[x] // QUAD) * QUAD) for x in labels}
    inner = max(reversed(labels), key=filled.__getitem__)
    return "".join(x for x in labels if x != inner) + inner
