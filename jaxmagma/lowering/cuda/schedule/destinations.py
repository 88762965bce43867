"""Where results are written: what ``Place`` means to whoever makes a part of a tile.

A tile made of parts need not be put together to become an output: each part is written to its place
there.  ``origins`` has the other end, where values are read.
"""

import math
from collections.abc import Collection

import numpy as np

from jaxmagma.lowering.cuda.schedule.origins import Strided
from jaxmagma.plans.plan import Plan, Tile
from jaxmagma.programs.program import Place
from jaxmagma.programs.strides import composed_view, places, row_major


Destination = tuple[int, Strided]  # an output, or a tile, and where in it


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
        whole = at.offset, at.strides, step.tile
        part = composed_view(whole, offset, strides, plan.tiles[value].shape)
        if part is None:
            return None
        found.append((value, Strided(*part)))
    return found or None


def placed_once(place: Place, tiles: tuple[Tile, ...]) -> bool:
    """Whether the pieces cover the tile, each value once."""
    every = [places(offset, strides, tiles[x].shape).ravel() for x, offset, strides in place.pieces]
    return np.array_equal(np.sort(np.concatenate(every)), np.arange(math.prod(place.tile)))
