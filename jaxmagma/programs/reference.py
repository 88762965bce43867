"""What a program means, in plain JAX: the fallback of every backend, and the shape rule of all."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax

from jaxmagma.programs import functions
from jaxmagma.programs.program import Contract, ElementProgram, Gather, Map, Place, View
from jaxmagma.programs.strides import box_of, places


Value = tuple[jax.Array, tuple[int, ...]]  # an array, and the batch axes that stand ahead in it


def evaluate(program: ElementProgram, *arguments: Any) -> list[jax.Array]:
    """The program's outputs, one ``jnp.einsum`` or pointwise function for each operation."""
    extents = program.batch_extents([jnp.shape(x) for x in arguments])
    remaining = iter(arguments)
    values: list[Value] = [
        (_parts(array) if x.is_complex else array, x.batch)
        for x in program.inputs
        for array in [jnp.asarray(x.constant.array if x.constant else next(remaining))]
    ]
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        if isinstance(operation, Contract):
            values.append(_contract(program, number, operation, values))
        elif isinstance(operation, Map):
            values.append(_map(program, number, operation, values))
        elif isinstance(operation, View):
            values.append(_view(operation, *values[operation.operand]))
        elif isinstance(operation, Place):
            values.append(_place(program, number, operation, values))
        else:
            values.append(_gather(program, number, operation, values))
    results = []
    for out in program.outputs:
        array, axes = values[out.value]
        summed = tuple(n for n, axis in enumerate(axes) if axis not in out.batch)
        if summed:
            array = jnp.sum(array, axis=summed)
            axes = tuple(axis for axis in axes if axis in out.batch)
        array = _with_batch(array, axes, out.batch, extents)
        results.append(lax.complex(array[..., 0], array[..., 1]) if out.is_complex else array)
    return results


def _parts(array: jax.Array) -> jax.Array:
    """Real and imaginary parts along a last axis."""
    return jnp.stack([array.real, array.imag], -1)


def _map(program: ElementProgram, number: int, operation: Map, values: Sequence[Value]) -> Value:
    axes = tuple(sorted(program.batch[number]))
    operands = []
    for value, labels in operation.terms:
        array = _with_batch(*values[value], axes, (1,) * program.batch_rank)
        order = [labels.index(x) for x in operation.output if x in labels]
        missing = [len(axes) + n for n, x in enumerate(operation.output) if x not in labels]
        order = [*range(len(axes)), *(len(axes) + n for n in order)]
        operands.append(_arranged(array, order, missing))
    array = functions.evaluate(operation.function, *operands)
    return _broadcast(array, array.shape[: len(axes)] + operation.tile), axes


def _view(operation: View, array: jax.Array, axes: tuple[int, ...]) -> Value:
    batch, whole = array.shape[: len(axes)], array.shape[len(axes) :]
    box = box_of(whole, operation.offset, operation.strides, operation.tile)
    if box is None:
        flat = array.reshape(*batch, math.prod(whole))
        return flat[..., places(operation.offset, operation.strides, operation.tile)], axes
    # Slices, of which XLA makes better loops than of a gather.
    ends = [first + step * count for first, step, count, _ in box]
    parts = [
        slice(first, end if end >= 0 else None, step)
        for (first, step, *_), end in zip(box, ends, strict=True)
    ]
    shown = {position: n for n, (*_, position) in enumerate(box) if position is not None}
    along = [shown[position] for position in sorted(shown)]
    along += [n for n in range(len(box)) if n not in along]
    order = [*range(len(axes)), *(len(axes) + n for n in along)]
    return jnp.transpose(array[(..., *parts)], order).reshape(*batch, *operation.tile), axes


def _place(
    program: ElementProgram, number: int, operation: Place, values: Sequence[Value]
) -> Value:
    axes = tuple(sorted(program.batch[number]))
    pieces = [
        _with_batch(*values[value], axes, (1,) * program.batch_rank) for value in operation.operands
    ]
    # Added to what is at a place already, this zero changes nothing: other ones have a sign.
    nothing: Any = -np.zeros((), program.dtype)[()]
    total, free = None, np.ones(math.prod(operation.tile), bool)
    for (_, offset, strides), piece in zip(operation.pieces, pieces, strict=True):
        tile = piece.shape[len(axes) :]
        # Read by places of the result, not written to those: that keeps the sharding of a batch.
        sources = _sources(places(offset, strides, tile).reshape(-1), math.prod(operation.tile))
        free &= sources[:, 0] == math.prod(tile)
        flat = piece.reshape((*piece.shape[: len(axes)], math.prod(tile)))
        found = flat.at[..., sources].get(mode="fill", fill_value=nothing)
        part = jnp.sum(found, -1) if sources.shape[-1] > 1 else found[..., 0]
        part = part.reshape((*part.shape[:-1], *operation.tile))
        total = part if total is None else total + part
    assert total is not None, "a place has pieces"
    if free.any():
        total = total + np.where(free, 0, nothing).reshape((1,) * len(axes) + operation.tile)
    return total, axes


def _sources(where: np.ndarray, size: int) -> np.ndarray:
    """For every place those of the values that are put there, and one beyond all for none."""
    order = np.argsort(where, kind="stable")
    counts = np.bincount(where, minlength=size)
    table = np.full((size, max(1, int(counts.max(initial=0)))), len(where))
    first = np.cumsum(counts) - counts
    sorted_places = where[order]
    table[sorted_places, np.arange(len(where)) - first[sorted_places]] = order
    return table


def _gather(
    program: ElementProgram, number: int, operation: Gather, values: Sequence[Value]
) -> Value:
    axes = tuple(sorted(program.batch[number]))
    vector, index = values[operation.vector], values[operation.index]

    def gather(vector: jax.Array, index: jax.Array) -> jax.Array:
        if vector.shape[0] == 0:
            return jnp.zeros(index.shape + vector.shape[1:], vector.dtype)
        at = vector.at[index]
        return at.get(mode="fill", fill_value=0, wrap_negative_indices=False)

    for axis in reversed(axes):
        mapped = tuple(0 if axis in own else None for _, own in (vector, index))
        gather = jax.vmap(gather, in_axes=mapped)
    arrays = [
        _with_batch(array, own, tuple(x for x in axes if x in own), ())
        for array, own in (vector, index)
    ]
    return gather(*arrays), axes


def _contract(
    program: ElementProgram,
    number: int,
    operation: Contract,
    values: Sequence[Value],
) -> Value:
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
    operands = [values[value][0] for value in operation.operands]
    array = jnp.einsum(
        # It multiplies from the last one on. Which one XLA has first makes up to twice the speed,
        # and it is the first that ``jax.vmap`` has.
        ",".join(reversed(terms)) + "->" + subscript(axes, present),
        *reversed(operands),
        # Kernels compute in full precision, and so does what stands for them.
        precision=program.precision or jax.lax.Precision.HIGHEST,
    )
    if present != operation.output:
        missing = [
            n + len(axes) for n, label in enumerate(operation.output) if label not in present
        ]
        array = lax.expand_dims(array, missing)
        array = _broadcast(array, array.shape[: len(axes)] + operation.tile)
    return array, axes


def _with_batch(
    array: jax.Array, axes: Sequence[int], target: Sequence[int], extents: Sequence[int]
) -> jax.Array:
    """Brings the leading batch axes into the order ``target``, broadcasting the missing ones."""
    order = [axes.index(axis) for axis in target if axis in axes]
    missing = [n for n, axis in enumerate(target) if axis not in axes]
    array = _arranged(array, [*order, *range(len(axes), array.ndim)], missing)
    shape = list(array.shape)
    for n in missing:
        shape[n] = extents[target[n]]
    return _broadcast(array, shape)


# There are thousands of values in some programs, and most are as they are to be.


def _arranged(array: jax.Array, order: Sequence[int], missing: Sequence[int]) -> jax.Array:
    """With its axes in this order, and then new ones there."""
    if list(order) != list(range(array.ndim)):
        array = lax.transpose(array, order)
    return lax.expand_dims(array, missing) if missing else array


def _broadcast(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    return array if array.shape == tuple(shape) else jnp.broadcast_to(array, shape)
