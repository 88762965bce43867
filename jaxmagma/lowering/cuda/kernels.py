"""Which of the kinds of kernels a plan has."""

from dataclasses import replace

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits, limits_of
from jaxmagma.lowering.cuda.blocks import TYPES, Block
from jaxmagma.lowering.cuda.calls import kernel_of_block, kernel_of_panels
from jaxmagma.lowering.cuda.functors import FUNCTORS
from jaxmagma.lowering.cuda.model import (
    choose,
    comes_in_rows,
    keeps_more_busy,
    may_have_panels,
    wants_panels,
    wants_rows,
)
from jaxmagma.lowering.cuda.panels import Panels, panels_of
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.plans.folding import constants_folded
from jaxmagma.lowering.cuda.plans.quotients import reciprocals_shared
from jaxmagma.lowering.cuda.plans.roots import powers_of_roots
from jaxmagma.lowering.cuda.plans.sums import spread
from jaxmagma.lowering.cuda.plans.vectors import with_vectors
from jaxmagma.lowering.cuda.schedule.gemms import LARGEST_BLOCK
from jaxmagma.lowering.cuda.schedule.origins import resolvable
from jaxmagma.lowering.kernel import Declined, Excess, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans import factoring
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.programs.functions import COMPLEX_FUNCTIONS
from jaxmagma.programs.program import Gather, Place, View


BGEMM_TARGET = "jaxmagma_cuda_bgemm"
# As in cuda/bgemm.h. Of odd sizes from 55 on some devices have no shared memory for whole groups of
# 16 bytes; the library that XLA calls is faster than kernels for products among others are, in
# float64 and, but for a few cases, in float32 (benchmarks/results/bgemm-h100.txt).
LARGEST_BGEMM = 48

# A kernel of more steps takes too long to schedule and to compile.
MOST_STEPS = 5000


def kernel_of(
    plan: Plan, extents: tuple[int, ...], parameters: Parameters | None, target: Target
) -> Kernel | Declined:
    """The kernel for a plan, with these parameters or the model's, or why there is none."""
    made = chosen(plan, parameters, target)
    if isinstance(made, Block):
        return kernel_of_block(made, extents)
    return kernel_of_panels(made) if isinstance(made, Panels) else made


def chosen(
    plan: Plan, parameters: Parameters | None, target: Target
) -> Block | Panels | Kernel | Declined:
    """What passes make of a plan, or the kernel that was compiled beforehand."""
    declined = _declined(plan)
    if declined is not None:
        return declined
    product = _product_of_elements(plan) if parameters is None else None
    if product is not None:
        sizes = set(product.extents.values())
        if len(sizes) == 1 and max(sizes) <= LARGEST_BGEMM:
            return _bgemm(product, *sizes)
        if min(sizes) > LARGEST_BGEMM:
            return Declined("one product of matrices so large is the library's that XLA calls")
    if parameters is None and _moves_alone(plan):
        return Declined("XLA's loops move values as fast")
    if parameters is None and _reads_matrices_once(plan):
        return Declined("XLA multiplies as it reads matrices of four-byte values, as fast")
    given = parameters or Parameters()
    limits = limits_of(target.architecture)
    ready = _ready(plan)
    if given.owner == "panels":
        panels = panels_of(ready, limits)
        return Declined(panels) if isinstance(panels, str) else panels
    block = _block(ready, given, limits, target.even_odd)
    if isinstance(block, Block) and wants_rows(block):
        # The fastest axis then has its turn at the points, and nobody waits for the next element.
        turned = _ready(factoring.planned(plan.program, middle="fastest"))
        asked = replace(given, ahead=True) if given.ahead is None else given
        rows = _block(turned, asked, limits, target.even_odd, in_rows=True)
        if isinstance(rows, Block) and rows.transfers.streams and comes_in_rows(rows):
            block = rows
    # Other parameters are those of a block.
    if parameters in (None, Parameters()) and may_have_panels(block):
        panels = panels_of(ready, limits)
        if isinstance(panels, Panels) and wants_panels(block, panels):
            return panels
    return block


def _block(
    plan: Plan,
    parameters: Parameters,
    limits: Limits,
    even_odd: bool | None,
    in_rows: bool = False,
) -> Block | Declined:
    """Of components as fields by themselves, or as fields of vectors."""
    block = choose(_resolved(plan), parameters, limits, even_odd, in_rows)
    vectors = with_vectors(plan)
    if vectors is plan:
        return block
    joined = choose(_resolved(vectors), parameters, limits, even_odd, in_rows)
    if isinstance(block, Block) and isinstance(joined, Block):
        return joined if keeps_more_busy(joined, block) else block
    return joined if isinstance(joined, Block) else block


def _ready(plan: Plan) -> Plan:
    """The plan as all kernels do it."""
    return constants_folded(reciprocals_shared(powers_of_roots(plan)))


def _resolved(plan: Plan) -> Plan:
    """The plan as blocks of threads do it."""
    return resolvable(spread(plan, LARGEST_BLOCK))


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


def _product_of_elements(plan: Plan) -> Product | None:
    """The product of two matrices that every element has, if a plan is nothing else."""
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if not isinstance(step, Product):
        return None
    program = plan.program
    if step.paired or not len(step.rows) == len(step.columns) == len(step.contracted) == 1:
        return None
    if sorted(step.operands) != [0, 1] or len(program.inputs) > 2 or len(program.outputs) > 1:
        return None
    axes = program.outputs[0].batch
    if len(axes) < program.batch_rank or any(x.batch != axes for x in program.inputs):
        return None
    return step


# Of all that a program reads and writes, matrices that are multiplied by vectors, where vectors are
# little: of more, what is computed with them is worth a kernel.
MATRICES_ALONE = 0.8


def _reads_matrices_once(plan: Plan) -> bool:
    """Whether elements do little else than to multiply matrices of their own by vectors.

    XLA's loops are faster for values of four bytes, not for those of eight
    (``benchmarks/results/rules-h200.txt``).
    """
    program = plan.program
    products = [step for step in plan.steps if isinstance(step, Product)]
    if program.dtype != np.float32 or any(isinstance(step, Gather) for step in plan.steps):
        return False
    matrices = []
    for step in products:
        if not all(plan.tiles[x].batched for x in step.operands) or (step.rows and step.columns):
            return False
        matrix = max(step.operands, key=lambda x: plan.tiles[x].size)
        matrices += [matrix] if len(plan.tiles[matrix].shape) > 1 else []
    uses = [x for step in plan.steps for x in step.operands]
    if any(x >= len(program.inputs) or uses.count(x) > 1 for x in matrices):
        return False
    ends = [x for x in (*range(len(program.inputs)), *plan.results) if plan.tiles[x].batched]
    every = sum(plan.tiles[x].size for x in ends)
    return sum(plan.tiles[x].size for x in matrices) > MATRICES_ALONE * every


def _moves_alone(plan: Plan) -> bool:
    """Whether nothing is computed, nor summed over elements."""
    return all(len(out.batch) == plan.program.batch_rank for out in plan.program.outputs) and all(
        isinstance(x, View | Place) or (isinstance(x, Rearrange) and not x.flops)
        for x in plan.steps
    )


def _bgemm(product: Product, size: int) -> Kernel:
    """The kernel of square matrices from the compiled family."""
    left = product.left_labels[0] == product.contracted
    right = product.right_labels[0] == product.columns
    out = product.output_labels[0] == product.columns
    if product.left == 1:
        # C = B A is the transpose of A' B'.
        left, right, out = not right, not left, not out
    return Kernel(
        BGEMM_TARGET,
        {"size": size, "transposed": left + 2 * right + 4 * out},
        description=f"compiled product of {size} x {size} matrices",
    )
