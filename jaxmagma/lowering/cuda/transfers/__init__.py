"""How tiles get from one stage to the next through shared memory, and operands to the first ones.

A tile is in shared memory from the stage that makes it until the last one that reads it. Operands
may be brought there before the first stage: whole ones that the copy engine has *fetched*, and
gathered ones by threads. Those of the next elements may come *ahead*, as soon as these have been
read. Others come in rows (see ``streams``), or are read from global memory by the stages that need
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.sweeps import Assembly, made_by
from jaxmagma.lowering.cuda.transfers.streams import Stream
from jaxmagma.programs.program import Gather


# The stage before the first one.
BEFORE = -1
# The copy engine brings operands, unless a warp reads them in so few steps.
DIRECT_OCTETS = 2
# For threads it does that if so many values stand between those at points side by side.
MANY_COMPONENTS = 4


@dataclass(frozen=True)
class Transfers:
    """Which stage makes each tile, and which later ones read it from shared memory.

    Stages are their positions; one is ``BEFORE`` the first, and sums over elements are behind the
    last.
    """

    schedule: Schedule
    fetched: tuple[int, ...]  # operands that the copy engine brings, as they are in memory
    streams: tuple[Stream, ...]  # operands that come in rows
    ahead: bool  # operands of the next elements are brought during the work on these
    maker: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]

    def __repr__(self) -> str:
        fetched = (f"%{n} comes by the copy engine" for n in self.fetched)
        streams = (f"%{x.operand} comes in rows for stage {x.position}" for x in self.streams)
        ahead = ["operands of the next elements come ahead"] if self.ahead else []
        made = ((n, self.maker[n], self.readers[n]) for n in sorted(self.tiles))
        return "\n".join((*fetched, *streams, *ahead, *(_passed_on(*x) for x in made)))

    @cached_property
    def tiles(self) -> frozenset[int]:
        """Those that are in shared memory."""
        return frozenset(self.maker.keys() & self.readers.keys())

    @cached_property
    def gathers(self) -> dict[int, Gather]:
        """Gathered tiles that threads bring."""
        return {n: x for n, x in self.schedule.ends.brought.items() if n in self.tiles}

    @cached_property
    def brought(self) -> frozenset[int]:
        """All that come before the first stage."""
        return frozenset((*self.fetched, *self.schedule.ends.brought))

    @cached_property
    def plain(self) -> frozenset[int]:
        """Tiles that are read in the order of memory, so that their axes have no padding."""
        ends = self.schedule.ends
        sums = (ends.plan.results[out] for out in ends.summed)
        viewed = (x.tile for x in ends.origins.values() if x.index is None)
        assembled = (x.number for x in self.schedule.stages if isinstance(x, Assembly))
        return frozenset((*sums, *viewed, *assembled, *self.schedule.wholes, *ends.brought))

    @property
    def together(self) -> bool:
        return come_together(self.schedule)

    def from_shared(self, tile: int, position: int) -> bool:
        """Whether a stage reads a tile from there."""
        return tile in self.tiles and self.maker[tile] < position

    def to_shared(self, tile: int, position: int) -> bool:
        """Whether a stage writes it there."""
        return tile in self.tiles and self.maker[tile] == position

    def streamed(self, position: int) -> set[int]:
        """The tiles that a sweep reads row by row."""
        return {x for stream in self.streams if stream.position == position for x in stream.tiles}


def come_together(schedule: Schedule) -> bool:
    """Whether the fetched tiles of all elements come in one copy, as they follow each other.

    Those of threads, whose tiles are small: a copy for each would cost more than it brings.
    """
    return schedule.plan.program.batch_rank == 1 and not schedule.quads


def _passed_on(tile: int, maker: int, readers: Sequence[int]) -> str:
    made = f"from stage {maker}" if maker > BEFORE else "from before all stages"
    return f"%{tile} {made} to {', '.join(map(str, readers))}"


def transfers_of(
    schedule: Schedule, streams: tuple[Stream, ...], parameters: Parameters, limits: Limits
) -> Iterator[Transfers]:
    """With ever fewer operands that the copy engine brings, the model's favourite first."""
    whole = _read_whole(schedule, streams)
    if parameters.fetch is not None:
        choices = [whole[: parameters.fetch]]
    elif is_direct(schedule) or not limits.bulk_copies:
        choices = [[]]
    elif schedule.quads:
        choices = [whole[:count] for count in range(len(whole), -1, -1)]
    else:
        # What threads find in memory far apart, if there is time until they need it.
        late = [x for x in whole if _read_late(schedule, x)]
        choices = [late, []] if late else [[]]
    for fetched in choices:
        yield _transfers(schedule, streams, fetched, bool(parameters.ahead))


def is_direct(schedule: Schedule) -> bool:
    """Whether a warp reads an element in so few steps that no copy engine pays."""
    return 0 < schedule.octets <= DIRECT_OCTETS


def _read_whole(schedule: Schedule, streams: Sequence[Stream]) -> list[int]:
    """The operands that sweeps read all of, in the order in which they need them.

    Those of quads; or of threads where there are no quads, and one copy brings all elements.
    """
    if not schedule.quads and not come_together(schedule):
        return []
    ends, tiles = schedule.ends, schedule.plan.tiles
    streamed = {tile for stream in streams for tile in stream.tiles}
    read: dict[int, set[int]] = {}  # of each operand the parts that are read
    for sweep in schedule.sweeps:
        for value in sweep.loads if (sweep.lanes > 1) == schedule.quads else ():
            at = ends.origin(value.tile)
            known = value.tile in streamed or at.index is not None or at.tile in schedule.staged
            if ends.is_outside(value.tile) and not known:
                read.setdefault(at.tile, set()).add(value.tile)
    return [
        tile
        for tile, parts in read.items()
        if sum(tiles[x].size for x in parts) >= tiles[tile].size
    ]


def _read_late(schedule: Schedule, operand: int) -> bool:
    """Whether threads read an operand at points of fibres, others in between, after a first stage.

    As components of a field at points: one load after the other asks memory for the same pieces.
    """
    ends = schedule.ends
    for position, sweep in enumerate(schedule.sweeps):
        views = (
            ends.origin(x.tile).view for x in sweep.loads if ends.origin(x.tile).tile == operand
        )
        for view in views:
            apart = view is not None and min(view.strides, default=1) >= MANY_COMPONENTS
            if position == 0 or sweep.single or not apart:
                return False
    return True


def _transfers(
    schedule: Schedule, streams: tuple[Stream, ...], fetched: Sequence[int], ahead: bool
) -> Transfers:
    ends, stages = schedule.ends, schedule.stages
    maker = dict.fromkeys((*fetched, *ends.brought), BEFORE)
    readers: dict[int, list[int]] = {}
    for position, stage in enumerate(stages):
        for tile in made_by(stage):
            outside = tile in ends.origins or tile < ends.inputs
            if not outside or tile in schedule.staged:
                maker.setdefault(tile, position)
    for position, stage in enumerate(stages):
        for tile in schedule.read(stage):
            if tile in maker and maker[tile] < position:
                readers.setdefault(tile, []).append(position)
    for tile in {ends.plan.results[out] for out in ends.summed} & maker.keys():
        readers.setdefault(tile, []).append(len(stages))
    comes = ahead and bool(fetched or ends.brought)
    return Transfers(schedule, tuple(fetched), streams, comes, maker, readers)
