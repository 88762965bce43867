"""Where tiles are in the shared memory of a group of threads.

A tile is there from the stage that makes it until the last one that reads it.  Its layout is the
one in which the stages that touch it meet the fewest bank conflicts (see ``banks``).

A sweep that reads a fibre and writes another on the same lines may write it where the first one
was: nobody else reads or writes there.  Tiles that take each other's place share a *room*.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jaxmagma.lowering.cuda import banks, spreads
from jaxmagma.lowering.cuda.accumulations import PIECE
from jaxmagma.lowering.cuda.banks import Access, Candidates, Layout
from jaxmagma.lowering.cuda.gemms import blocking_of
from jaxmagma.lowering.cuda.origins import Origin
from jaxmagma.lowering.cuda.sweeps import (
    ALONG,
    QUAD,
    Accumulation,
    Assembly,
    Gemm,
    Stage,
    Sweep,
    Value,
    grouped,
)
from jaxmagma.plan import Plan, Rearrange


# The stage before the first one.
BEFORE = -1


@dataclass(frozen=True)
class Uses:
    """Which stage makes each tile, and which later ones read it from shared memory.

    ``origins`` are of tiles whose values are part of others; ``plain`` tiles are read value by
    value in the order of memory, so that their axes have no padding.  Tiles that are ``fetched``
    are copied as they are in memory, BEFORE the first stage; or, if ``ahead``, those of the next
    elements as soon as these have been read, so that their room is nobody else's; if ``twice``, all
    the time, to a second room.  Those of all elements come in one copy if ``together``.
    ``written`` says with which strides tiles go to outputs, from the sweeps that make them;
    ``streamed`` which tiles come to a sweep row by row.
    """

    plan: Plan
    stages: list[Stage]
    maker: dict[int, int]
    readers: dict[int, list[int]]
    origins: dict[int, Origin]
    plain: set[int]
    fetched: set[int]
    ahead: bool
    twice: bool
    together: bool
    written: dict[int, list[tuple[int, ...]]]
    streamed: dict[int, set[int]]

    @property
    def tiles(self) -> set[int]:
        """Those that are in shared memory."""
        return self.maker.keys() & self.readers.keys()

    def from_shared(self, tile: int, position: int) -> bool:
        """Whether a stage reads a tile from there."""
        return tile in self.tiles and self.maker[tile] < position

    def to_shared(self, tile: int, position: int) -> bool:
        """Whether a stage writes it there."""
        return tile in self.tiles and self.maker[tile] == position

    def shown(self, tile: int) -> int:
        """The tile that has its values."""
        return self.origins[tile].tile if tile in self.origins else tile


@dataclass
class Room:
    """A place in shared memory and the tiles that are there, one after the other.

    ``axes`` says which axis of the place each axis of a tile is.
    """

    shape: tuple[int, ...]
    axes: dict[int, tuple[int, ...]]

    def with_tile(self, tile: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> "Room":
        """The same with another tile after those it has."""
        extents = dict(zip(axes, shape, strict=True))
        whole = tuple(max(x, extents[n]) for n, x in enumerate(self.shape))
        return Room(whole, {**self.axes, tile: axes})


def rooms_of(uses: Uses, in_place: bool) -> list[Room]:
    """The tiles in shared memory, those together that take each other's place."""
    rooms: list[Room] = []
    room_of: dict[int, Room] = {}
    for tile in sorted(uses.tiles, key=lambda x: (uses.maker[x], x)):
        shape = uses.plan.tiles[tile].shape
        found = _replaced(uses, tile, room_of.keys() - uses.fetched) if in_place else None
        room = Room(shape, {tile: tuple(range(len(shape)))})
        if found is not None:
            before, order = found
            old = room_of[before]
            wider = old.with_tile(tile, tuple(old.axes[before][n] for n in order), shape)
            rooms[rooms.index(room_of.pop(before))] = room_of[tile] = wider
            continue
        rooms.append(room)
        room_of[tile] = room
    return rooms


def _replaced(uses: Uses, tile: int, candidates: Set[int]) -> tuple[int, list[int]] | None:
    """A tile whose place another one may take, and which of its axes are the other's.

    Every fibre is read by who writes the new one there, and by nobody after that.
    """
    if tile in uses.plain or tile in uses.fetched:
        return None
    stage = uses.stages[uses.maker[tile]]
    if not isinstance(stage, Sweep):
        return None
    made = stage.tiles[tile]
    when = [move.result for move in stage.moves].index(made)
    position = uses.maker[tile]
    for value in stage.loads:
        before = value.tile
        if before not in candidates or before in uses.plain:
            continue
        if not _on_same_lines(value, made):
            continue
        if uses.maker[before] >= position or max(uses.readers[before]) > position:
            continue
        if sum(uses.shown(x.tile) == before for x in stage.loads) > 1:
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
    together = next(x for x in grouped(sweep.moves) if sweep.moves[moves[0]] in x)
    alone = not any(value in outer.operands for outer in sweep.outers)
    return alone and together[0].pointwise and all(sweep.moves[n] in together for n in moves)


def _on_same_lines(value: Value, made: Value) -> bool:
    distinct = len(set(made.labels)) == len(made.labels)
    return distinct and sorted(value.labels) == sorted(made.labels)


def _lines(sweep: Sweep, value: Value) -> tuple[tuple[int, int], ...]:
    """The lines of a sweep and which axes of a value they walk; of quads their lanes, too."""
    lines = tuple((sweep.extents[x], value.labels.find(x)) for x in sweep.lines)
    return (*lines, (sweep.lanes, value.labels.find(ALONG))) if sweep.lanes > 1 else lines


# What touches a room: positions of stages, and how they go there with each spread.
Accesses = list[tuple[int, dict[int, Access]]]


def _chosen(accesses: Accesses, spread_of: Mapping[int, int]) -> list[Access]:
    return [access[spread_of.get(position, 1)] for position, access in accesses]


class Shared:
    """The layout and the place of every tile, for a group of threads."""

    def __init__(
        self,
        uses: Uses,
        threads: int,
        elements: int,
        padding: int,
        possible: Mapping[int, Sequence[int]],
        price: float,
        late: bool = False,
    ) -> None:
        self.uses = uses
        self.threads = threads
        self.elements = elements
        self.padding = padding  # the most after each step on an axis
        self.possible = possible  # of the sweeps of quads, by their positions, the spreads
        self.spreads: dict[int, int] = {}
        # What comes ahead does so before the last stage, to where tiles were that it does not need.
        self.late = late
        self.itemsize = uses.plan.program.dtype.itemsize
        self.price = price  # of a value of an element, in bank conflicts
        self.layouts: dict[int, Layout] = {}
        self.offsets: dict[int, int] = {}
        self.second: dict[int, int] = {}  # from there to the other place of tiles that have two
        self.values = 0  # of all elements of a group

    def place(self, rooms: Iterable[Room]) -> "Shared":
        """Finds room for the tiles: beside all others that are there at the same time."""
        rooms = list(rooms)
        accesses = [self._accesses(room) for room in rooms]
        self.spreads = spreads.choose(self.possible, self._costs(rooms, accesses))
        given = [
            (room, self._layout(room, _chosen(own, self.spreads))[0])
            for room, own in zip(rooms, accesses, strict=True)
        ]
        # Large ones leave gaps that others fit in; which order of the others is best depends.
        largest_first = sorted(given, key=lambda x: -x[1].element)
        places = min(map(self._places, (given, largest_first)), key=lambda x: x[0])
        self.values = places[0]
        for (room, layout), begin in places[1]:
            for tile, axes in room.axes.items():
                self.layouts[tile] = Layout(tuple(layout.strides[x] for x in axes), layout.element)
                self.offsets[tile] = begin
                if self._has_two(room):
                    self.second[tile] = self._size(room, layout)
        return self

    def _places(
        self, rooms: Sequence[tuple[Room, Layout]]
    ) -> tuple[int, list[tuple[tuple[Room, Layout], int]]]:
        """How many values rooms take one after the other, each where it fits first; and where."""
        placed: list[tuple[set[int], int, int]] = []  # the stages, begin and end
        found = []
        for room, layout in rooms:
            alive = self._alive(room)
            size = self._size(room, layout)
            size *= 2 if self._has_two(room) else 1
            begin = 0
            for other_begin, end in sorted((b, e) for stages, b, e in placed if stages & alive):
                if begin + size <= other_begin:
                    break
                begin = max(begin, end)
            placed.append((alive, begin, begin + size))
            found.append(((room, layout), begin))
        return max((end for *_, end in placed), default=0), found

    def _size(self, room: Room, layout: Layout) -> int:
        """Values that a room takes, of all elements."""
        whole = max(1, 16 // self.itemsize)
        size = layout.element * self.elements
        if self._follow(room):
            size += whole - 1  # the first tile may begin anywhere in a group
        return -(-size // whole) * whole

    def _follow(self, room: Room) -> bool:
        """Whether the tiles of its elements follow each other as in memory."""
        return self.uses.together and bool(self.uses.fetched & room.axes.keys())

    def _has_two(self, room: Room) -> bool:
        """Whether there are two of a room."""
        return self.uses.twice and bool(self.uses.fetched & room.axes.keys())

    def _alive(self, room: Room) -> set[int]:
        """The stages during which its tiles are there."""
        if self._has_two(room):
            return set(range(BEFORE, len(self.uses.stages) + 1))
        first = min(self.uses.maker[tile] for tile in room.axes)
        last = max(max(self.uses.readers[tile]) for tile in room.axes)
        end = len(self.uses.stages)
        if not (self.uses.ahead and self.uses.fetched & room.axes.keys()):
            return set(range(first, last + 1))
        again = end - 1 if self.late else last
        return {*range(first, last + 1), *range(again, end + 1)}

    def _costs(
        self, rooms: Sequence[Room], accesses: Sequence[Accesses]
    ) -> Callable[[Mapping[int, int]], float]:
        """A function of the spreads of sweeps: cycles beyond the least that they mean."""
        elsewhere = {
            (n, spread): self._elsewhere(n, spread)
            for n, x in self.possible.items()
            for spread in x
        }
        touched = [sorted({n for n, _ in x} & self.possible.keys()) for x in accesses]
        known: dict[tuple[int, ...], float] = {}

        def cost(chosen: Mapping[int, int]) -> float:
            total = sum(elsewhere[x] for x in chosen.items())
            for number, room in enumerate(rooms):
                question = number, *(chosen[n] for n in touched[number])
                if question not in known:
                    own = _chosen(accesses[number], chosen)
                    known[question] = self._layout(room, own)[1]
                total += known[question]
            return total

        return cost

    def _layout(self, room: Room, accesses: Iterable[Access]) -> tuple[Layout, float]:
        """The layout of a room, and what accesses to it cost."""
        if self.uses.fetched & room.axes.keys():
            # The copy engine takes pairs of values: a tile begins in either half of the first.
            behind = 0 if self._follow(room) else 2 - math.prod(room.shape) % 2
            rest = (0,) * (len(room.shape) - 1)
            layout = banks.row_major(room.shape, (behind, *rest))
            conflicts = (
                banks.conflicts_at(x, layout.strides, layout.element, self.itemsize)
                for x in accesses
            )
            return layout, float(sum(conflicts))
        if not self.padding:
            return banks.row_major(room.shape), 0.0
        candidates = Candidates(
            room.shape,
            self.itemsize,
            self.elements,
            not self.uses.plain & room.axes.keys(),
            self.padding,
        )
        return banks.choose(candidates, tuple(dict.fromkeys(accesses)), self.price)

    def _elsewhere(self, position: int, spread: int) -> float:
        """What a sweep meets in global memory, and in parts of tiles in shared memory."""
        sweep = self.uses.stages[position]
        assert isinstance(sweep, Sweep)
        warps = min(sweep.lanes * sweep.count * self.elements, self.threads) / 32
        cost = 0.0
        for value in sweep.loads:
            if self.uses.from_shared(value.tile, position):
                continue
            origin = self.uses.origins.get(value.tile, Origin(value.tile))
            view = origin.view.strides if origin.view else self._plain(value.tile)
            streamed = value.tile in self.uses.streamed[position]
            if streamed or (origin.index is None and self.uses.from_shared(origin.tile, position)):
                access = Access(_lines(sweep, value), self.threads, spread)
                cost += banks.conflicts_at(access, view, 0, self.itemsize)
            else:
                cost += warps * self._pieces(sweep, value, view, False, spread)
        for tile, value in sweep.tiles.items():
            for strides in self.uses.written.get(tile, ()):
                cost += warps * self._pieces(sweep, value, strides, True, spread)
        return cost

    def _plain(self, tile: int) -> tuple[int, ...]:
        return banks.row_major(self.uses.plan.tiles[tile].shape).strides

    def _pieces(
        self, sweep: Sweep, value: Value, strides: tuple[int, ...], stores: bool, spread: int
    ) -> float:
        """Pieces of global memory, for each warp."""
        step = {x: strides[n] for n, x in enumerate(value.labels)}
        lines = tuple((sweep.extents[x], step.get(x, 0)) for x in sweep.lines)
        return spreads.pieces(lines, step.get(ALONG, 0), self.itemsize, stores, spread) / 2

    def _accesses(self, room: Room) -> Accesses:
        found: Accesses = []
        for tile, axes in room.axes.items():
            for position, access in self._accesses_to(tile):
                lines = tuple((extent, axes[at] if at >= 0 else -1) for extent, at in access.lines)
                some = self.possible.get(position, (1,))
                found.append((position, {x: replace(access, lines=lines, spread=x) for x in some}))
        return found

    def _accesses_to(self, tile: int) -> Iterable[tuple[int, Access]]:
        """The same of one tile and its own axes, with lines side by side."""
        for position in (self.uses.maker[tile], *self.uses.readers[tile]):
            if position in (BEFORE, len(self.uses.stages)):
                continue
            stage = self.uses.stages[position]
            if isinstance(stage, Assembly):
                continue
            if isinstance(stage, Sweep):
                values = [
                    v for v in stage.loads if v.tile == tile and position != self.uses.maker[tile]
                ]
                made = stage.tiles.get(tile)
                if made is not None and position == self.uses.maker[tile]:
                    values.append(made)
                for value in values:
                    yield position, Access(_lines(stage, value), self.threads)
                continue
            if isinstance(stage, Accumulation):
                # Lanes have rows or columns, and next to each other the terms of one.
                step, fastest = stage.step, stage.contracted[-1]
                for operand, labels, along in (
                    (step.left, step.left_labels, step.rows),
                    (step.right, step.right_labels, step.columns),
                ):
                    if operand == tile:
                        rows = next(
                            n for n in (1, 2, 4, PIECE) if n >= min(step.extents[along], PIECE)
                        )
                        lines = ((rows, labels.index(along)), (QUAD, labels.index(fastest)))
                        yield position, Access(((PIECE // rows, -1), *lines), self.threads)
                continue
            blocking = blocking_of(stage.step, self.itemsize)
            for labels in self._labels_of(stage, tile):
                own = tuple((n, labels.find(x)) for x, n in blocking.lines)
                yield position, Access(own, self.threads)

    def _labels_of(self, stage: Gemm, tile: int) -> list[str]:
        step = stage.step
        if isinstance(step, Rearrange):
            pairs = [(step.operand, step.labels)]
        else:
            pairs = [(step.left, step.left_labels), (step.right, step.right_labels)]
        return [x for n, x in [*pairs, (stage.number, step.output_labels)] if n == tile]

    def last_reader(self, tile: int) -> int:
        """The last stage that reads what is where a tile is, or will be."""
        readers = self.uses.readers.items()
        return max(
            max(stages)
            for other, stages in readers
            if other == tile or self.overlap({tile}, {other})
        )

    def overlap(self, some: set[int], others: set[int]) -> bool:
        """Whether tiles overlap in shared memory."""

        def where(tile: int) -> tuple[int, int]:
            begin = self.offsets[tile]
            return begin, begin + self.layouts[tile].element * self.elements

        return any(
            where(x)[0] < where(y)[1] and where(y)[0] < where(x)[1] for x in some for y in others
        )
