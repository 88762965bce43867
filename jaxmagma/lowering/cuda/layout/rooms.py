"""Tiles that take each other's place in shared memory share a *room*.

A sweep that reads a fibre and writes another on the same lines may write it where the first one
was: nobody else reads or writes there.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from jaxmagma.lowering.cuda.schedule.sweeps import Sweep, Value, grouped
from jaxmagma.lowering.cuda.transfers import Transfers


@dataclass(frozen=True)
class Room:
    """A place in shared memory and the tiles that are there, one after the other."""

    shape: tuple[int, ...]
    axes: Mapping[int, tuple[int, ...]]  # which axis of the place each axis of a tile is
    brought: bool  # before the first stage
    first: int  # the stages during which the tiles are there
    last: int

    def with_tile(
        self, tile: int, axes: tuple[int, ...], shape: tuple[int, ...], last: int
    ) -> "Room":
        """The same with another tile after those it has."""
        extents = dict(zip(axes, shape, strict=True))
        whole = tuple(max(x, extents[n]) for n, x in enumerate(self.shape))
        return Room(whole, {**self.axes, tile: axes}, self.brought, self.first, last)


def rooms_of(transfers: Transfers, in_place: bool) -> list[Room]:
    """Those of the tiles in shared memory: as few as can be, or one for each tile."""
    rooms: list[Room] = []
    numbers: dict[int, int] = {}  # of rooms, by their latest tiles
    for tile in sorted(transfers.tiles, key=lambda x: (transfers.maker[x], x)):
        shape = transfers.schedule.plan.tiles[tile].shape
        first, last = transfers.maker[tile], max(transfers.readers[tile])
        found = _replaced(transfers, tile, numbers.keys()) if in_place else None
        if found is None:
            numbers[tile] = len(rooms)
            axes = tuple(range(len(shape)))
            rooms.append(Room(shape, {tile: axes}, tile in transfers.brought, first, last))
            continue
        before, order = found
        numbers[tile] = number = numbers.pop(before)
        axes = tuple(rooms[number].axes[before][n] for n in order)
        rooms[number] = rooms[number].with_tile(tile, axes, shape, last)
    return rooms


def _replaced(
    transfers: Transfers, tile: int, candidates: Set[int]
) -> tuple[int, list[int]] | None:
    """A tile whose place another one may take, and which of its axes are the other's.

    Every fibre is read by who writes the new one there, and by nobody after that.
    """
    fixed = transfers.plain | transfers.brought
    position = transfers.maker[tile]
    stage = None if tile in fixed else transfers.schedule.stages[position]
    if not isinstance(stage, Sweep):
        return None
    shown = [transfers.schedule.ends.origin(x.tile).tile for x in stage.loads]
    made = stage.tiles[tile]
    when = [move.result for move in stage.moves].index(made)
    for value in stage.loads:
        before = value.tile
        if before not in candidates or before in fixed:
            continue
        if not _on_same_lines(value, made):
            continue
        if transfers.maker[before] >= position or max(transfers.readers[before]) > position:
            continue
        if shown.count(before) > 1:
            continue
        users = [n for n, move in enumerate(stage.moves) if value in move.operands]
        if not users or users[0] > when:
            continue
        # By then its values must be in registers, to stay there: products take whole fibres, single
        # values are all kept, and so are those of a point until the next one.
        whole = stage.single or all(stage.moves[n].matrix is not None for n in users)
        if whole or _at_one_point(stage, value, [*users, when]):
            return before, [value.labels.index(x) for x in made.labels]
    return None


def _at_one_point(sweep: Sweep, value: Value, moves: list[int]) -> bool:
    """Whether a value is used at one point of the fibre after the other, by these operations alone,
    which are done together.
    """
    together = next(x for x in grouped(sweep) if sweep.moves[moves[0]] in x)
    alone = not any(value in outer.operands for outer in sweep.outers)
    return alone and together[0].pointwise and all(sweep.moves[n] in together for n in moves)


def _on_same_lines(value: Value, made: Value) -> bool:
    distinct = len(set(made.labels)) == len(made.labels)
    return distinct and sorted(value.labels) == sorted(made.labels)
