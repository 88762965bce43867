"""Where in a tile the values of a part of it are: strides, in values, and boxes along its axes."""

import math
from collections.abc import Sequence

import numpy as np


def row_major(tile: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tile in memory, in values."""
    strides, step = [], 1
    for extent in reversed(tile):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def in_order(strides: Sequence[int], tile: Sequence[int]) -> bool:
    """Whether strides are those of a tile in memory, but along axes of one value."""
    own = zip(strides, row_major(tile), tile, strict=True)
    return all(x == y for x, y, extent in own if extent != 1)


def places(offset: int, strides: Sequence[int], tile: Sequence[int]) -> np.ndarray:
    """The positions of a view's values in the flat tile, an array of shape ``tile``."""
    at = np.full((), offset)
    for stride, extent in zip(strides, tile, strict=True):
        at = at[..., None] + stride * np.arange(extent)
    return at


# Along every axis of a tile the first place, the step and the number of those that belong to a part
# of it, and which axis of the part runs along it, if any.
Box = list[tuple[int, int, int, int | None]]


def box_of(
    whole: tuple[int, ...], offset: int, strides: Sequence[int], tile: tuple[int, ...]
) -> Box | None:
    """The part of a tile that a view with such strides shows, if its axes run along the tile's."""
    if 0 in whole or 0 in tile:
        return None
    box: Box = []
    for extent, stride in zip(whole, row_major(whole), strict=True):
        first = offset // stride % extent
        along = [
            n
            for n, (count, step) in enumerate(zip(tile, strides, strict=True))
            if count > 1 and stride <= abs(step) < stride * extent
        ]
        if not along or extent == 1:
            box.append((first, 1, 1, None))
            continue
        if len(along) > 1 or strides[along[0]] % stride:
            return None
        (position,) = along
        step, count = strides[position] // stride, tile[position]
        if not 0 <= first + step * (count - 1) < extent:
            return None
        box.append((first, step, count, position))
    shown = [position for *_, position in box if position is not None]
    complete = sorted(shown) == [n for n, count in enumerate(tile) if count > 1]
    return box if complete and offset < math.prod(whole) else None


def composed_view(
    view: tuple[int, tuple[int, ...], tuple[int, ...]],
    offset: int,
    strides: tuple[int, ...],
    tile: tuple[int, ...],
) -> tuple[int, tuple[int, ...]] | None:
    """The offset and strides in what a view shows of a view of it, if that is one.

    A view is its offset, strides and tile.
    """
    start, steps_of, tile_of = view
    shown = [(x, stride) for x, stride in zip(tile_of, steps_of, strict=True) if x != 1]
    whole = offset == 0 and strides == row_major(tile) and 0 not in tile
    if whole and [x for x in tile if x != 1] == [x for x, _ in shown]:
        # All of it, with other axes of one value.
        steps = (stride for _, stride in shown)
        return start, tuple(0 if x == 1 else next(steps) for x in tile)
    flat = places(start, steps_of, tile_of).reshape(-1)
    at = flat[places(offset, strides, tile)]
    first = int(at.flat[0]) if at.size else 0
    found = tuple(
        int(np.take(at, 1, axis).flat[0]) - first if extent > 1 else 0
        for axis, extent in enumerate(tile)
    )
    if not np.array_equal(places(first, found, tile), at):
        return None
    return first, found


def matching_axes(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Matches axes of ``old`` with the extents of ``new`` that have the same product."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = ([i] if i < len(old) else []), ([new[j]] if j < len(new) else [])
        i, j = i + len(before), j + len(after)
        while math.prod(old[n] for n in before) != math.prod(after):
            if math.prod(old[n] for n in before) < math.prod(after):
                before.append(i)
                i += 1
            else:
                after.append(new[j])
                j += 1
        groups.append((before, after))
    return groups
