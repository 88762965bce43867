"""Complex arguments and results of a program of real numbers: their parts are along a last axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles
from jaxmagma.programs.labels import letters
from jaxmagma.programs.precisions import is_narrower
from jaxmagma.programs.strides import row_major


def complex_parts(tiles: Tiles, equation: JaxprEqn, operands: Sequence[Read]) -> Tile | None:
    """A part of a complex number, or one put together; None if the equation does neither.

    Whatever else is done with complex numbers no program of real ones does, but for another one
    inside of it.
    """
    name = equation.primitive.name
    numbers = [x for x in operands if isinstance(x, Tile) and x.is_complex]
    if name in ("real", "imag") and numbers:
        return _part(tiles, numbers[0], int(name == "imag"))
    if numbers and name != "element_program":
        given = ", ".join(str(aval(x).dtype) for x in equation.invars)
        raise Unsupported(f"{name} of {given} in a program of {tiles.dtype}")
    if name == "complex" and tiles.dtype.kind == "f":
        dtypes = {np.dtype(aval(x).dtype) for x in equation.invars}
        if all(x == tiles.dtype or is_narrower(x, tiles.dtype) for x in dtypes):
            return _number(tiles, operands)
    return None


def _part(tiles: Tiles, number: Tile, which: int) -> Tile:
    shape = tiles.shape(number)
    strides = row_major((*shape, 2))[:-1]
    return Tile(tiles.builder.view(number.value, which, strides, shape))


def _number(tiles: Tiles, parts: Sequence[Read]) -> Tile:
    shape = np.broadcast_shapes(*map(tiles.shape, parts))
    tile = (*shape, 2)
    labels, strides = letters(len(shape)), row_major(tile)[:-1]
    extents = dict(zip(labels, shape, strict=True))
    pieces: list[Any] = []
    for which, part in enumerate(parts):
        value = tiles.value(part)
        if tiles.builder.tile(value) != shape:
            value = tiles.builder.relabel(value, "", labels, extents)
        pieces.append((value, which, strides))
    return Tile(tiles.builder.place(pieces, tile), is_complex=True)
