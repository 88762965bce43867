"""Products of tiles, and sums along their axes."""

from collections.abc import Sequence
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


def _is_small(reader: Tiles, x: Read, points: Sequence[int]) -> bool:
    """Whether a tile is a small matrix of the element at every point, or a tensor of values.

    Where a table made one of three axes, those are the element's own: a product of several factors,
    two at a time, comes by what is made for all pairs of its nodes.
    """
    if not isinstance(x, Tile) or reader.builder.is_known(x.value):
        return False
    shape = reader.shape(x)
    own = [n for n in range(len(shape)) if n not in points]
    tensor = len(own) > 2 and any(reader.builder.is_of_table(x.value, n) for n in own)
    return not tensor and all(shape[n] <= LARGEST_COMPONENT for n in own)


def _apart(reader: Tiles, x: Read, points: Sequence[int]) -> Read:
    for axis in range(len(reader.shape(x))):
        if axis not in points:
            x = reader.components(x, axis)
    return x


def dot_general(reader: Tiles, equation: JaxprEqn, left: Read, right: Read) -> Read:
    _, batch = equation.params["dimension_numbers"]
    if batch[0] and all(
        _is_small(reader, x, axes) for x, axes in zip((left, right), batch, strict=True)
    ):
        # Products of components, point by point.
        left, right = (
            _apart(reader, x, axes) for x, axes in zip((left, right), batch, strict=True)
        )
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
