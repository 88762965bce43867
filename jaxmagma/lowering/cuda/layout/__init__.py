"""Where tiles are in the shared memory of a group of threads, and matrices and streams behind them.

Tiles have the strides with the fewest bank conflicts (see ``conflicts``), and are beside all others
that are there at the same time; some take the place of others (see ``rooms``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.layout.banks import Strides
from jaxmagma.lowering.cuda.layout.conflicts import strides_of
from jaxmagma.lowering.cuda.layout.rooms import Room, rooms_of
from jaxmagma.lowering.cuda.matrices import GROUP, Matrices
from jaxmagma.lowering.cuda.ownership import Ownership
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES
from jaxmagma.lowering.cuda.transfers import Transfers


# Threads that a multiprocessor should have at a time.
ENOUGH_THREADS = 512


@dataclass(frozen=True)
class Placed:
    """A tile of each element of a group in shared memory, from value ``begin`` on."""

    strides: Strides
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The shared memory of a group."""

    tiles: Mapping[int, Placed]
    spreads: Mapping[int, int]  # of sweeps, by their positions: which lines neighbours have
    front: int  # values of tiles, and of sums that meet there
    matrices: Mapping[int, int]  # values of each, behind the tiles
    streams: Mapping[int, int]  # the same of the pieces of streamed operands
    itemsize: int

    def __repr__(self) -> str:
        tiles = (f"tile {n}: {x.strides.axes} at {x.begin}" for n, x in self.tiles.items())
        matrices = (f"matrix {n} at {x}" for n, x in self.places_of_matrices.items())
        streams = (f"rows of {n} at {x}" for n, x in self.places_of_streams.items())
        return "\n".join((*tiles, *matrices, *streams, f"{self.values} values"))

    @property
    def values(self) -> int:
        if not self.matrices and not self.streams:
            return self.front
        return self._behind + sum(self.matrices.values()) + sum(self.streams.values())

    @property
    def places_of_matrices(self) -> dict[int, int]:
        return _one_by_one(self.matrices, self._behind)

    @property
    def places_of_streams(self) -> dict[int, int]:
        return _one_by_one(self.streams, self._behind + sum(self.matrices.values()))

    @property
    def _behind(self) -> int:
        """Where others than tiles begin: at whole groups of values."""
        group = max(1, GROUP // self.itemsize)
        return -(-self.front // group) * group

    def overlap(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Whether tiles overlap."""
        placed = [self.tiles[x] for x in others]
        return any(
            x.begin < y.end and y.begin < x.end
            for x in map(self.tiles.__getitem__, some)
            for y in placed
        )


def layout_of(
    matrices: Matrices, transfers: Transfers, ownership: Ownership, limits: Limits, tight: bool
) -> Layout:
    """Without padding if ``tight``. Tiles take each other's place where there is little."""
    schedule = transfers.schedule
    near = {x: matrices.near_size(x) for x in matrices.near}
    streams = {
        x.operand: x.values(ownership.warps, ownership.fibres(x.sweep)) for x in transfers.streams
    }

    def placed(in_place: bool, late: bool = False) -> Layout:
        rooms = rooms_of(transfers, in_place)
        strides, spreads = strides_of(rooms, transfers, ownership, tight)
        claims = [_claim(*x, transfers, ownership, late) for x in zip(rooms, strides, strict=True)]
        tiles, front = _tiles(claims, ownership.elements)
        return Layout(tiles, spreads, front, near, streams, schedule.ends.dtype.itemsize)

    def groups(layout: Layout) -> int:
        return resident(layout, ownership, limits) * ownership.groups

    def has_room(layout: Layout) -> bool:
        """Whether shared memory leaves a multiprocessor enough threads to be busy."""
        return groups(layout) * ownership.threads >= ENOUGH_THREADS

    in_place = schedule.quads
    layout = placed(in_place)
    if not (in_place or has_room(layout)):
        in_place = True
        layout = placed(in_place)
    may_wait = transfers.ahead and not schedule.alone
    if may_wait and transfers.fetched and not has_room(layout):
        # Where more groups have room so, what comes ahead comes late.
        late = placed(in_place, late=True)
        layout = late if groups(late) != groups(layout) else layout
    # What warps have of a sum meets there.
    sums = map(schedule.ends.result_size, schedule.ends.accumulated)
    return replace(layout, front=max([layout.front, *sums]))


def resident(layout: Layout, ownership: Ownership, limits: Limits) -> int:
    """Blocks that a multiprocessor has shared memory for."""
    return limits.shared // (shared_bytes(layout, ownership) + RESERVED_BYTES)


def shared_bytes(layout: Layout, ownership: Ownership) -> int:
    """Of a block."""
    return layout.values * layout.itemsize * ownership.groups


@dataclass(frozen=True)
class _Claim:
    """What a room takes of shared memory."""

    room: Room
    strides: Strides
    size: int  # values, of all elements
    stages: frozenset[int]  # during which its tiles are there


def _claim(
    room: Room, strides: Strides, transfers: Transfers, ownership: Ownership, late: bool
) -> _Claim:
    """If ``late``, what comes ahead does so before the last stage.

    To where tiles were that the last stage does not need.
    """
    group = max(1, GROUP // transfers.schedule.ends.dtype.itemsize)
    size = strides.values(ownership.elements)
    if room.brought and transfers.together:
        size += group - 1  # the first tile may begin anywhere in a group
    stages, end = {*range(room.first, room.last + 1)}, len(transfers.schedule.stages)
    if room.brought and transfers.ahead:
        stages |= {*range(end - 1 if late else room.last, end + 1)}
    return _Claim(room, strides, -(-size // group) * group, frozenset(stages))


def _tiles(claims: Sequence[_Claim], elements: int) -> tuple[dict[int, Placed], int]:
    """Where tiles are, and how many values they take."""
    # Large ones leave gaps that others fit in; which order of the others is best depends.
    largest_first = sorted(claims, key=lambda x: -x.strides.values(elements))
    front, begins = min(map(_packed, (claims, largest_first)), key=lambda x: x[0])
    tiles = {}
    for claim, begin in begins:
        own, end = claim.strides, begin + claim.strides.values(elements)
        for tile, axes in claim.room.axes.items():
            at = replace(own, axes=tuple(own.axes[x] for x in axes))
            tiles[tile] = Placed(at, begin, end)
    return tiles, front


def _packed(claims: Sequence[_Claim]) -> tuple[int, list[tuple[_Claim, int]]]:
    """How many values claims take, each beside all others at the same time; and where they begin.

    One after the other they are where they fit first.
    """
    placed: list[tuple[_Claim, int, int]] = []  # with begin and end
    for claim in claims:
        begin = 0
        others = ((b, e) for x, b, e in placed if x.stages & claim.stages)
        for other_begin, end in sorted(others):
            if begin + claim.size <= other_begin:
                break
            begin = max(begin, end)
        placed.append((claim, begin, begin + claim.size))
    return max((end for *_, end in placed), default=0), [(x, begin) for x, begin, _ in placed]


def _one_by_one(sizes: Mapping[int, int], begin: int) -> dict[int, int]:
    """Where values begin that follow each other."""
    places = {}
    for number, size in sizes.items():
        places[number] = begin
        begin += size
    return places
