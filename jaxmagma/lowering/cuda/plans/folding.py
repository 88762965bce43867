"""What depends on constants alone, computed when a kernel is made."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.plans.plan import Plan, Pointwise, Product, Step, renumbered
from jaxmagma.programs import functions
from jaxmagma.programs.program import Constant, ElementProgram, Gather, Input, Place, View
from jaxmagma.programs.strides import places


def constants_folded(plan: Plan) -> Plan:
    """Steps on constants alone are done now: their results become inputs of the plan."""
    program = plan.program
    first = len(program.inputs)
    known = {n: x.constant.array for n, x in enumerate(program.inputs) if x.constant is not None}
    for number, step in plan.numbered_steps():
        if all(x in known for x in step.operands):
            known[number] = evaluate(step, [known[x] for x in step.operands])
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
    return replace(
        plan,
        program=folded,
        tiles=tuple(plan.tiles[n] for n in order),
        steps=tuple(renumbered(plan.steps[n - first], numbers) for n in left),
        results=tuple(numbers[value] for value in plan.results),
    )


def evaluate(step: Step, operands: list[np.ndarray]) -> np.ndarray:
    if isinstance(step, Pointwise):
        return _pointwise(step, operands)
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


def _pointwise(step: Pointwise, operands: list[np.ndarray]) -> np.ndarray:
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
