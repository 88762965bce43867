"""Products of tiles, and sums along their axes."""

from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.tiles import LARGEST_COMPONENT, Read, Tile, Tiles
from jaxmagma.labels import letters


def dot_general(reader: Tiles, equation: JaxprEqn, left: Read, right: Read) -> Read:
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    if left_batch and isinstance(left, Tile) and isinstance(right, Tile):
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
    labels = letters(len(left_shape) + len(right_shape))
    left_labels, names = labels[: len(left_shape)], iter(labels[len(left_shape) :])
    shared = dict(zip((*right_summed, *right_batch), (*left_summed, *left_batch), strict=True))
    right_labels = "".join(
        left_labels[shared[axis]] if axis in shared else next(names)
        for axis in range(len(right_shape))
    )
    output = "".join(left_labels[axis] for axis in left_batch)
    output += "".join(
        x for n, x in enumerate(left_labels) if n not in left_summed and n not in left_batch
    )
    output += "".join(x for n, x in enumerate(right_labels) if n not in shared)
    sizes = dict(zip(left_labels + right_labels, left_shape + right_shape, strict=True))
    terms = [(reader.value(left), left_labels), (reader.value(right), right_labels)]
    return Tile(reader.builder.contract(terms, output, sizes))


def reduce_sum(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    labels = letters(len(reader.shape(x)))
    output = "".join(y for n, y in enumerate(labels) if n not in equation.params["axes"])
    sizes = dict(zip(labels, reader.shape(x), strict=True))
    return Tile(reader.builder.contract([(x.value, labels)], output, sizes))
