"""What a program means, in plain JAX: the fallback of every backend, and the shape rule of all."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum

from jaxmagma.program import FUNCTIONS, Contract, ElementProgram


def evaluate(program: ElementProgram, *arguments: Any) -> list[jax.Array]:
    """The program's outputs, one ``jnp.einsum`` or pointwise function for each operation."""
    extents = program.batch_extents([jnp.shape(x) for x in arguments])
    remaining = iter(arguments)
    # Every value is kept with the batch axes it stands with, in order.
    values = [
        (jnp.asarray(x.constant.array) if x.constant else next(remaining), x.batch)
        for x in program.inputs
    ]
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Contract):
            values.append(_contract(program, number, operation, values))
        else:
            axes = tuple(sorted(program.batch[number]))
            operands = [
                _with_batch(*values[value], axes, (1,) * program.batch_rank)
                for value in operation.operands
            ]
            values.append((FUNCTIONS[operation.function][0](*operands), axes))
    results = []
    for out in program.outputs:
        array, axes = values[out.value]
        summed = tuple(n for n, axis in enumerate(axes) if axis not in out.batch)
        if summed:
            array = jnp.sum(array, axis=summed)
            axes = tuple(axis for axis in axes if axis in out.batch)
        results.append(_with_batch(array, axes, out.batch, extents))
    return results


def _contract(
    program: ElementProgram,
    number: int,
    operation: Contract,
    values: Sequence[tuple[jax.Array, tuple[int, ...]]],
) -> tuple[jax.Array, tuple[int, ...]]:
    symbols = {label: opt_einsum.get_symbol(n) for n, (label, _) in enumerate(operation.sizes)}
    first = len(symbols)
    carried = "".join(labels for _, labels in operation.terms)

    def subscript(batch: Sequence[int], labels: str) -> str:
        letters = [opt_einsum.get_symbol(first + axis) for axis in batch]
        return "".join(letters + [symbols[label] for label in labels])

    # A sum over elements is part of the contraction where the value is only ever summed.
    axes = tuple(sorted(program.batch[number]))
    uses = [out for out in program.outputs if out.value == number]
    if len(uses) == 1 and not any(number in op.operands for op in program.operations):
        axes = tuple(axis for axis in uses[0].batch if axis in axes)
    present = "".join(label for label in operation.output if label in carried)
    terms = [subscript(values[value][1], labels) for value, labels in operation.terms]
    array = jnp.einsum(
        ",".join(terms) + "->" + subscript(axes, present),
        *(values[value][0] for value in operation.operands),
        precision=program.precision,
    )
    if present != operation.output:
        missing = [
            n + len(axes) for n, label in enumerate(operation.output) if label not in present
        ]
        array = jnp.expand_dims(array, missing)
        array = jnp.broadcast_to(array, array.shape[: len(axes)] + operation.tile)
    return array, axes


def _with_batch(
    array: jax.Array, axes: Sequence[int], target: Sequence[int], extents: Sequence[int]
) -> jax.Array:
    """Brings the leading batch axes into the order ``target``, broadcasting the missing ones."""
    order = [axes.index(axis) for axis in target if axis in axes]
    rank = len(axes)
    array = jnp.transpose(array, [*order, *range(rank, array.ndim)])
    missing = [n for n, axis in enumerate(target) if axis not in axes]
    if not missing:
        return array
    array = jnp.expand_dims(array, missing)
    shape = list(array.shape)
    for n in missing:
        shape[n] = extents[target[n]]
    return jnp.broadcast_to(array, shape)
