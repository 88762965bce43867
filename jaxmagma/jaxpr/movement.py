"""What puts values in other places, all of which are known, and computes nothing."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import Unsupported, aval, is_empty
from jaxmagma.jaxpr.tiles import MOST_PIECES, Read, Tile, Tiles
from jaxmagma.programs.builder import MOST_COMPONENTS
from jaxmagma.programs.labels import letters
from jaxmagma.programs.strides import row_major


def broadcast_in_dim(reader: Tiles, equation: JaxprEqn, x: Tile, *_: Any) -> Read:
    shape = equation.params["shape"]
    axes = equation.params["broadcast_dimensions"]
    labels = letters(len(shape))
    own, value = "", x.value
    for axis, extent in reversed(list(zip(axes, reader.shape(x), strict=True))):
        if extent == 1 and shape[axis] != 1:
            value = reader.builder.index(value, axes.index(axis), 0)
        else:
            own = labels[axis] + own
    sizes = dict(zip(labels, shape, strict=True))
    return Tile(reader.builder.relabel(value, own, labels, sizes))


def reshape(reader: Tiles, equation: JaxprEqn, x: Tile, *_: Any) -> Read:
    return Tile(reader.builder.reshape(x.value, tuple(aval(equation.outvars[0]).shape)))


def reshape_in_order(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    """The same of a tile with its axes in another order, if there is one."""
    order = equation.params["dimensions"]
    ordered = x if order is None else Tile(reader.builder.transpose(x.value, order))
    return reshape(reader, equation, ordered)


def transpose(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    return Tile(reader.builder.transpose(x.value, equation.params["permutation"]))


def rev(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    value = x.value
    for axis in equation.params["dimensions"]:
        count = reader.builder.tile(value)[axis]
        value = reader.builder.slice(value, axis, count - 1, -1, count)
    return Tile(value)


def sliced(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)
    made: Read = x
    for axis, count in enumerate(aval(equation.outvars[0]).shape):
        if count == 1 or steps[axis] == 1:
            made = reader.slice(made, axis, starts[axis], count)
        else:
            value = reader.value(made)
            made = Tile(reader.builder.slice(value, axis, starts[axis], steps[axis], count))
    return made


def concatenate(reader: Tiles, equation: JaxprEqn, *operands: Read) -> Read:
    axis = equation.params["dimension"]
    parts = [part for x in operands for part in reader.pieces(x, [axis])]
    if len(parts) > MOST_PIECES:
        raise Unsupported(f"it concatenates {len(parts)} pieces")
    return reader.stack(parts, axis)


def stack(reader: Tiles, equation: JaxprEqn, *operands: Read) -> Read:
    return reader.stack(operands, equation.params["axis"])


def unstack(reader: Tiles, equation: JaxprEqn, x: Tile) -> list[Read]:
    return list(reader.pieces(x, [equation.params["axis"]]))


def split(reader: Tiles, equation: JaxprEqn, x: Tile) -> list[Read]:
    axis, first = equation.params["axis"], 0
    found: list[Read] = []
    for own, size in zip(equation.outvars, equation.params["sizes"], strict=True):
        if is_empty(aval(own)):
            found.append(np.zeros(aval(own).shape, aval(own).dtype))
            continue
        found.append(Tile(reader.builder.slice(x.value, axis, first, 1, size)))
        first += size
    return found


def pad(reader: Tiles, equation: JaxprEqn, x: Read, padding: Read) -> Read:
    shape = tuple(aval(equation.outvars[0]).shape)
    shown = _without_hidden(reader, x, equation.params["padding_config"], shape)
    if shown is None:
        return reader.spread(padding, shape)
    x, config = shown
    # Along long axes all at once; then what is short is put together piece by piece.
    x = _padded_at_once(
        reader,
        x,
        [y if n > MOST_COMPONENTS else (0, 0, 0) for y, n in zip(config, shape, strict=True)],
        padding,
    )
    for axis, (low, _, gap) in enumerate(config):
        own = reader.shape(x)[axis]
        if own == shape[axis]:
            continue
        parts = iter([reader.index(x, axis, k) for k in range(own)])
        nothing = reader.spread(padding, (*reader.shape(x)[:axis], *reader.shape(x)[axis + 1 :]))
        last = low + (own - 1) * (gap + 1)
        x = reader.stack(
            [
                next(parts) if low <= k <= last and not (k - low) % (gap + 1) else nothing
                for k in range(shape[axis])
            ],
            axis,
        )
    return x


_Padding = tuple[int, int, int]  # before and behind, and between two places


def _without_hidden(
    reader: Tiles, x: Read, config: Sequence[_Padding], shape: Sequence[int]
) -> tuple[Read, list[_Padding]] | None:
    """The part of a tile that is seen where it is padded by less than nothing, and what that is
    padded by; None if nothing of it is seen.
    """
    left: list[_Padding] = []
    for axis, ((low, _, gap), size) in enumerate(zip(config, shape, strict=True)):
        own, step = reader.shape(x)[axis], gap + 1
        first, end = max(0, -(low // step)), min(own, (size - 1 - low) // step + 1)
        if first >= end:
            return None
        if end - first < own:
            x = reader.slice(x, axis, first, end - first)
        before = low + first * step
        left.append((before, size - 1 - before - (end - first - 1) * step, gap))
    return x, left


def _padded_at_once(reader: Tiles, x: Read, config: Sequence[_Padding], padding: Read) -> Read:
    """The tile put into one of zeros, with what it is padded with around it."""
    if not any(map(any, config)):
        return x
    own = reader.shape(x)
    last = [low + (n - 1) * (gap + 1) for n, (low, _, gap) in zip(own, config, strict=True)]
    shape = tuple(k + 1 + high for k, (_, high, _) in zip(last, config, strict=True))
    strides = row_major(shape)
    offset = sum(low * stride for (low, _, _), stride in zip(config, strides, strict=True))
    steps = tuple((gap + 1) * s for (_, _, gap), s in zip(config, strides, strict=True))
    placed = Tile(reader.builder.place([(reader.value(x), offset, steps)], shape))
    zips = zip(last, config, strict=True)
    inside = tuple([slice(low, k + 1, gap + 1) for k, (low, _, gap) in zips])
    if isinstance(padding, Tile):
        is_around = np.ones(shape, reader.dtype)
        is_around[inside] = 0
        return reader.emit("select", is_around, placed, reader.spread(padding, shape))
    if not np.any(padding):
        return placed
    around = np.full(shape, padding)
    around[inside] = 0
    return reader.emit("add", placed, around)


def tile(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    shape, times = reader.shape(x), equation.params["reps"]
    labels = letters(2 * len(shape))
    extents = [n for pair in zip(times, shape, strict=True) for n in pair]
    sizes = dict(zip(labels, extents, strict=True))
    value = reader.builder.relabel(x.value, labels[1::2], labels, sizes)
    tile = tuple(n * extent for n, extent in zip(times, shape, strict=True))
    return Tile(reader.builder.reshape(value, tile))


def convert(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    if aval(equation.outvars[0]).dtype == bool and aval(equation.invars[0]).dtype != bool:
        return reader.emit("ne", x, 0.0)
    return x


def unchanged(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    return list(operands)


def reduce_precision(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
    """To the digits and exponents that a number has already, as a policy of ``checkpoint`` does."""
    info = jnp.finfo(aval(equation.invars[0]).dtype)
    exponents, digits = (equation.params[x] for x in ("exponent_bits", "mantissa_bits"))
    if exponents < info.nexp or digits < info.nmant:
        raise Unsupported(f"reduce_precision to {exponents} and {digits} bits")
    return x
