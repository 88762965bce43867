"""Where tiles are in the shared memory of a group of threads, and matrices and streams behind them.

The layout of a tile is the one in which the stages that touch it meet the fewest bank conflicts
(see ``banks``), and which lines neighbouring quads have is chosen with it (see ``spreads``).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmagma.lowering.cuda import banks, spreads
from jaxmagma.lowering.cuda.accesses import accesses_to, cost_elsewhere
from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.banks import Access, Candidates, Strides
from jaxmagma.lowering.cuda.matrices import GROUP, Matrices
from jaxmagma.lowering.cuda.ownership import Ownership
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES
from jaxmagma.lowering.cuda.rooms import Room, rooms_of
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.sweeps import Accumulation, Sweep
from jaxmagma.lowering.cuda.transfers import BEFORE, Transfers


# Threads that a multiprocessor should have at a time.
ENOUGH_THREADS = 512
# The most padding of an axis in shared memory. Four lanes along fibres and lines side by side may
# need strides that are far from those of a tile.
NARROW = 5
WIDE = 15
# Bank conflicts that a value of an element is worth, where there is room for many elements, and
# where there is not.
CHEAP, DEAR = 1e-3, 0.03


@dataclass(frozen=True)
class Placed:
    """A tile of each element of a group in shared memory, from value ``begin`` on."""

    strides: Strides
    begin: int
    end: int
    second: int  # from there to the other place of a tile that has two, else 0


@dataclass(frozen=True)
class Layout:
    """The shared memory of a group."""

    tiles: Mapping[int, Placed]
    spreads: Mapping[int, int]  # of sweeps of quads, by their positions: the lines of neighbours
    front: int  # values of tiles, and of sums that meet there
    matrices: Mapping[int, int]  # values of each, behind the tiles
    streams: Mapping[int, int]  # the same of the pieces of streamed operands
    itemsize: int

    def __repr__(self) -> str:
        tiles = (f"tile {n}: {x.strides} at {x.begin}" for n, x in self.tiles.items())
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

    def placed(in_place: bool, late: bool = False) -> Layout:
        rooms = rooms_of(transfers, in_place)
        return _Placement(transfers, ownership, tight, late).layout(rooms, matrices)

    def has_room(layout: Layout) -> bool:
        """Whether shared memory leaves a multiprocessor enough threads to be busy."""
        threads = ownership.threads * ownership.groups
        return resident(layout, ownership, limits) * threads >= ENOUGH_THREADS

    in_place = schedule.quads
    layout = placed(in_place)
    if not (in_place or has_room(layout)):
        in_place = True
        layout = placed(in_place)
    may_wait = transfers.ahead and not transfers.twice and not schedule.alone
    if may_wait and transfers.fetched and not has_room(layout):
        # Where more groups have room so, what comes ahead comes late.
        late = placed(in_place, late=True)
        if resident(late, ownership, limits) != resident(layout, ownership, limits):
            layout = late
    # What warps have of a sum meets there.
    sums = map(schedule.ends.result_size, schedule.ends.accumulated)
    return replace(layout, front=max([layout.front, *sums]))


def resident(layout: Layout, ownership: Ownership, limits: Limits) -> int:
    """Blocks that a multiprocessor has shared memory for."""
    return limits.shared // (shared_bytes(layout, ownership) + RESERVED_BYTES)


def shared_bytes(layout: Layout, ownership: Ownership) -> int:
    """Of a block."""
    return layout.values * layout.itemsize * ownership.groups


def _one_by_one(sizes: Mapping[int, int], begin: int) -> dict[int, int]:
    """Where values begin that follow each other."""
    places = {}
    for number, size in sizes.items():
        places[number] = begin
        begin += size
    return places


def _is_crowded(schedule: Schedule) -> bool:
    """Whether tiles leave shared memory room for few elements.

    Those do that wait for what they are multiplied with, and those of quads, of which an element
    has many. Complex values need theirs.
    """
    if any(isinstance(stage, Accumulation) for stage in schedule.stages):
        return True
    return schedule.quads and not schedule.alone and schedule.ends.dtype.kind == "f"


def _possible_spreads(transfers: Transfers, ownership: Ownership) -> dict[int, tuple[int, ...]]:
    """Of each sweep of quads, by its position: which lines neighbours may have."""
    found: dict[int, tuple[int, ...]] = {}
    for position, stage in enumerate(transfers.schedule.stages):
        if isinstance(stage, Sweep) and stage.lanes > 1:
            fibres, most = ownership.fibres(stage), max(spreads.SPREADS)
            if transfers.schedule.ends.dtype.kind != "f":
                most = 1  # shared memory serves two quads of complex values at a time
            elif transfers.streamed(position) and fibres % 2:
                most = 2  # a piece of a stream has the lines of one octet
            possible = spreads.possible(ownership.elements * stage.count, fibres)
            found[position] = tuple(x for x in possible if x <= most)
    return found


# What touches a room: positions of stages, and how they go there with each spread.
Accesses = list[tuple[int, dict[int, Access]]]


def _chosen(accesses: Accesses, spread_of: Mapping[int, int]) -> list[Access]:
    return [access[spread_of.get(position, 1)] for position, access in accesses]


@dataclass(frozen=True)
class _Placement:
    """What places of rooms are chosen by.

    If ``late``, what comes ahead does so before the last stage, to where tiles were that it does
    not need.
    """

    transfers: Transfers
    ownership: Ownership
    tight: bool
    late: bool

    @property
    def itemsize(self) -> int:
        return self.transfers.schedule.ends.dtype.itemsize

    def layout(self, rooms: Sequence[Room], matrices: Matrices) -> Layout:
        """Finds room for the tiles: beside all others that are there at the same time."""
        possible = _possible_spreads(self.transfers, self.ownership)
        accesses = [self._accesses(room, possible) for room in rooms]
        chosen = spreads.choose(possible, self._costs(rooms, accesses, possible))
        given = [
            (room, self._strides(room, _chosen(own, chosen))[0])
            for room, own in zip(rooms, accesses, strict=True)
        ]
        # Large ones leave gaps that others fit in; which order of the others is best depends.
        largest_first = sorted(given, key=lambda x: -x[1].element)
        front, places = min(map(self._places, (given, largest_first)), key=lambda x: x[0])
        tiles = {}
        for (room, strides), begin in places:
            second = self._size(room, strides) if self._has_two(room) else 0
            end = begin + strides.element * self.ownership.elements
            for tile, axes in room.axes.items():
                own = Strides(tuple(strides.axes[x] for x in axes), strides.element)
                tiles[tile] = Placed(own, begin, end, second)
        near = {x: matrices.near_size(x) for x in matrices.near}
        streams = {
            x.operand: x.values(self.ownership.warps, self.ownership.fibres(sweep))
            for x in self.transfers.streams
            if isinstance(sweep := self.transfers.schedule.stages[x.position], Sweep)
        }
        return Layout(tiles, chosen, front, near, streams, self.itemsize)

    def _places(
        self, rooms: Sequence[tuple[Room, Strides]]
    ) -> tuple[int, list[tuple[tuple[Room, Strides], int]]]:
        """How many values rooms take one after the other, each where it fits first; and where."""
        placed: list[tuple[set[int], int, int]] = []  # the stages, begin and end
        found = []
        for room, strides in rooms:
            alive = self._alive(room)
            size = self._size(room, strides)
            size *= 2 if self._has_two(room) else 1
            begin = 0
            for other_begin, end in sorted((b, e) for stages, b, e in placed if stages & alive):
                if begin + size <= other_begin:
                    break
                begin = max(begin, end)
            placed.append((alive, begin, begin + size))
            found.append(((room, strides), begin))
        return max((end for *_, end in placed), default=0), found

    def _size(self, room: Room, strides: Strides) -> int:
        """Values that a room takes, of all elements."""
        whole = max(1, 16 // self.itemsize)
        size = strides.element * self.ownership.elements
        if self._follow(room):
            size += whole - 1  # the first tile may begin anywhere in a group
        return -(-size // whole) * whole

    def _is_brought(self, room: Room) -> bool:
        return bool(self.transfers.brought & room.axes.keys())

    def _follow(self, room: Room) -> bool:
        """Whether the tiles of its elements follow each other as in memory."""
        return self.transfers.together and self._is_brought(room)

    def _has_two(self, room: Room) -> bool:
        """Whether there are two of a room."""
        return self.transfers.twice and self._is_brought(room)

    def _alive(self, room: Room) -> set[int]:
        """The stages during which its tiles are there."""
        end = len(self.transfers.schedule.stages)
        if self._has_two(room):
            return set(range(BEFORE, end + 1))
        first = min(self.transfers.maker[tile] for tile in room.axes)
        last = max(max(self.transfers.readers[tile]) for tile in room.axes)
        if not (self.transfers.ahead and self._is_brought(room)):
            return set(range(first, last + 1))
        again = end - 1 if self.late else last
        return {*range(first, last + 1), *range(again, end + 1)}

    def _costs(
        self,
        rooms: Sequence[Room],
        accesses: Sequence[Accesses],
        possible: Mapping[int, Sequence[int]],
    ) -> Callable[[Mapping[int, int]], float]:
        """A function of the spreads of sweeps: cycles beyond the least that they mean."""
        elsewhere = {
            (n, spread): cost_elsewhere(self.transfers, self.ownership, n, spread)
            for n, x in possible.items()
            for spread in x
        }
        touched = [sorted({n for n, _ in x} & possible.keys()) for x in accesses]
        known: dict[tuple[int, ...], float] = {}

        def cost(chosen: Mapping[int, int]) -> float:
            total = sum(elsewhere[x] for x in chosen.items())
            for number, room in enumerate(rooms):
                question = number, *(chosen[n] for n in touched[number])
                if question not in known:
                    own = _chosen(accesses[number], chosen)
                    known[question] = self._strides(room, own)[1]
                total += known[question]
            return total

        return cost

    def _strides(self, room: Room, accesses: Iterable[Access]) -> tuple[Strides, float]:
        """Those of a room, and what accesses to it cost."""
        if self._is_brought(room):
            # The copy engine takes pairs of values: a tile begins in either half of the first.
            behind = 0 if self._follow(room) else 2 - math.prod(room.shape) % 2
            rest = (0,) * (len(room.shape) - 1)
            strides = banks.row_major(room.shape, (behind, *rest))
            conflicts = (
                banks.conflicts_at(x, strides.axes, strides.element, self.itemsize)
                for x in accesses
            )
            return strides, float(sum(conflicts))
        if self.tight:
            return banks.row_major(room.shape), 0.0
        schedule = self.transfers.schedule
        candidates = Candidates(
            room.shape,
            self.itemsize,
            self.ownership.elements,
            not self.transfers.plain & room.axes.keys(),
            WIDE if schedule.quads else NARROW,
        )
        price = DEAR if _is_crowded(schedule) else CHEAP
        return banks.choose(candidates, tuple(dict.fromkeys(accesses)), price)

    def _accesses(self, room: Room, possible: Mapping[int, Sequence[int]]) -> Accesses:
        found: Accesses = []
        for tile, axes in room.axes.items():
            for position, access in accesses_to(self.transfers, tile, self.ownership.threads):
                lines = tuple((extent, axes[at] if at >= 0 else -1) for extent, at in access.lines)
                some = possible.get(position, (1,))
                found.append((position, {x: replace(access, lines=lines, spread=x) for x in some}))
        return found
