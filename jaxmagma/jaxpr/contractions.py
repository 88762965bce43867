"""Products of tiles, and sums along their axes."""

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import aval
from jaxmagma.jaxpr.tiles import LARGEST_COMPONENT, Read, Tile, Tiles
from jaxmagma.programs.labels import letters


# What a product of tables goes through, and is one still.
OF_TABLES = frozenset(
    "dot_general mul div neg transpose reshape squeeze expand_dims broadcast_in_dim concatenate "
    "slice convert_element_type copy".split()
)


def labels_of(dimension_numbers: Any, left_rank: int, right_rank: int) -> tuple[str, str, str]:
    """The labels of two factors of so many axes, and of their product."""
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    labels = letters(left_rank + right_rank)
    left, names = labels[:left_rank], iter(labels[left_rank:])
    shared = dict(zip((*right_summed, *right_batch), (*left_summed, *left_batch), strict=True))
    right = "".join(
        left[shared[axis]] if axis in shared else next(names) for axis in range(right_rank)
    )
    output = "".join(left[axis] for axis in left_batch)
    output += "".join(x for n, x in enumerate(left) if n not in left_summed and n not in left_batch)
    output += "".join(x for n, x in enumerate(right) if n not in shared)
    return left, right, output


def makes_table(equation: JaxprEqn, dtype: np.dtype) -> bool:
    """Whether known arrays are multiplied to a larger one, as a basis and weights are.

    That is none of the known ones: the plan may apply one after the other to an element. Products
    of vectors are weights themselves.
    """
    if equation.primitive.name != "dot_general":
        return False
    made, *given = [aval(x) for x in (*equation.outvars, *equation.invars)]
    if any(x.dtype != dtype for x in (made, *given)):
        return False
    return made.size > max(x.size for x in given) and min(len(x.shape) for x in given) > 1


def dot_general(reader: Tiles, equation: JaxprEqn, left: Read, right: Read) -> Read:
    _, (left_batch, right_batch) = equation.params["dimension_numbers"]
    if left_batch and all(
        isinstance(x, Tile) and not reader.builder.is_known(x.value) for x in (left, right)
    ):
        # Small matrices at every point: products of their components, point by point.
        small = {
            axis
            for axis, extent in enumerate(reader.shape(left))
            if axis not in left_batch and extent <= LARGEST_COMPONENT
        }
        for axis in small:
            left = reader.components(left, axis)
        for axis, extent in enumerate(reader.shape(right)):
            if axis not in right_batch and extent <= LARGEST_COMPONENT:
                right = reader.components(right, axis)
    left_shape, right_shape = reader.shape(left), reader.shape(right)
    left_labels, right_labels, output = labels_of(
        equation.params["dimension_numbers"], len(left_shape), len(right_shape)
    )
    sizes = dict(zip(left_labels + right_labels, left_shape + right_shape, strict=True))
    terms = [(reader.value(left), left_labels), (reader.value(right), right_labels)]
    return Tile(reader.builder.contract(terms, output, sizes))


def reduce_sum(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    labels = letters(len(reader.shape(x)))
    output = "".join(y for n, y in enumerate(labels) if n not in equation.params["axes"])
    sizes = dict(zip(labels, reader.shape(x), strict=True))
    return Tile(reader.builder.contract([(x.value, labels)], output, sizes))
