"""Where results are written: what ``Place`` means to whoever makes a part of a tile.

A tile made of parts need not be put together to become an output: each part is written to its place
there.  ``origins`` has the other end, where values are read.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxmagma.lowering.cuda.origins import Strided
from jaxmagma.plan import Plan, Pointwise, Rearrange, Tile
from jaxmagma.program import Place
from jaxmagma.strides import places, row_major


Destination = tuple[int, Strided]  # an output, and where in it


def find_destinations(
    plan: Plan, stored: Collection[int]
) -> tuple[dict[int, list[Destination]], set[int]]:
    """Where tiles are written, for the ``stored`` outputs; and tiles that are never put together.

    The latter are written by their parts, and nobody reads them.
    """
    found: dict[int, list[Destination]] = {}
    by_parts: set[int] = set()

    def write(tile: int, out: int, at: Strided) -> None:
        parts = _parts(plan, tile, at)
        if parts is None:
            found.setdefault(tile, []).append((out, at))
            return
        for value, part in parts:
            write(value, out, part)
        by_parts.add(tile)

    for out in stored:
        tile = plan.results[out]
        write(tile, out, Strided(0, row_major(plan.tiles[tile].shape)))
    summed = {tile for out, tile in enumerate(plan.results) if out not in stored}
    skipped: set[int] = set()
    for tile in sorted(by_parts - summed - found.keys(), reverse=True):
        users = {n for n, step in plan.numbered_steps() if tile in step.operands}
        if users <= skipped:
            skipped.add(tile)
    return found, skipped


def _parts(plan: Plan, tile: int, at: Strided) -> list[tuple[int, Strided]] | None:
    """The parts of a tile and where they are, if each can be written to its own place."""
    first = len(plan.program.inputs)
    step = plan.steps[tile - first] if tile >= first else None
    if not isinstance(step, Place) or not placed_once(step, plan.tiles):
        return None
    found = []
    for value, offset, strides in step.pieces:
        part = composed(at, step.tile, Strided(offset, strides), plan.tiles[value].shape)
        if part is None:
            return None
        found.append((value, part))
    return found or None


def composed(
    outer: Strided, tile: Sequence[int], inner: Strided, shown: Sequence[int]
) -> Strided | None:
    """Where the values of a part of ``tile`` are, if those of the tile are at ``outer``."""
    whole = places(outer.offset, outer.strides, tile).reshape(-1)
    at = whole[places(inner.offset, inner.strides, shown)]
    first = int(at.flat[0])
    strides = tuple(
        int(np.take(at, 1, axis).flat[0]) - first if extent > 1 else 0
        for axis, extent in enumerate(shown)
    )
    found = Strided(first, strides)
    return found if np.array_equal(places(first, strides, shown), at) else None


def placed_once(place: Place, tiles: tuple[Tile, ...]) -> bool:
    """Whether the pieces cover the tile, each value once."""
    count = [0] * Tile(place.tile, tiles[0].dtype, True).size
    for value, offset, strides in place.pieces:
        at = [offset]
        for stride, extent in zip(strides, tiles[value].shape, strict=True):
            at = [x + stride * n for x in at for n in range(extent)]
        for x in at:
            count[x] += 1
    return all(n == 1 for n in count)


def with_joined_places(plan: Plan) -> Plan:
    """The plan with sums of tiles made of parts as one tile made of all their parts."""
    first = len(plan.program.inputs)
    steps = list(plan.steps)

    def place(tile: int) -> Place | None:
        step = steps[tile - first] if tile >= first else None
        return step if isinstance(step, Place) else None

    def piece_of_operand(piece: tuple[int, int, tuple[int, ...]]) -> Any:
        """A transposed piece as what it was, placed along its own axes."""
        tile, offset, strides = piece
        step = steps[tile - first] if tile >= first else None
        if not isinstance(step, Rearrange):
            return piece
        new = [x for x in step.output_labels if x not in step.labels]
        if set(step.labels) - set(step.output_labels) or any(step.extents[x] > 1 for x in new):
            return piece
        own = tuple(strides[step.output_labels.index(x)] for x in step.labels)
        return piece_of_operand((step.operand, offset, own))

    for position, step in enumerate(steps):
        if isinstance(step, Place):
            steps[position] = replace(step, pieces=tuple(map(piece_of_operand, step.pieces)))
        if not isinstance(step, Pointwise) or step.function != "add":
            continue
        parts = [place(x) for x in step.operands]
        if set(step.labels) != {step.output_labels} or not all(parts):
            continue
        pieces = tuple(piece for part in parts if part is not None for piece in part.pieces)
        steps[position] = Place(pieces, step.shape)
    return replace(plan, steps=tuple(steps)).without_dead_steps()
