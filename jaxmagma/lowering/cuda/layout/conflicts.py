"""How tiles lie in shared memory, and which lines neighbours have: with few bank conflicts.

What a tile costs depends on the lines that threads or quads have in all sweeps that touch it, and
what a sweep costs elsewhere on its own (see ``banks`` and ``spreads``).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxmagma.lowering.cuda.layout import banks, spreads
from jaxmagma.lowering.cuda.layout.banks import Access, Candidates, Strides
from jaxmagma.lowering.cuda.layout.rooms import Room
from jaxmagma.lowering.cuda.ownership import Ownership
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.accumulations import PIECE
from jaxmagma.lowering.cuda.schedule.gemms import blocking_of
from jaxmagma.lowering.cuda.schedule.sweeps import (
    ALONG,
    QUAD,
    Accumulation,
    Assembly,
    Gemm,
    Sweep,
    Total,
    Value,
)
from jaxmagma.lowering.cuda.transfers import BEFORE, Transfers
from jaxmagma.programs.strides import row_major


# Bank conflicts that a value of an element is worth, where there is room for many elements, and
# where there is not.
CHEAP, DEAR = 1e-3, 0.03


def strides_of(
    rooms: Sequence[Room], transfers: Transfers, ownership: Ownership, tight: bool
) -> tuple[list[Strides], dict[int, int]]:
    """Those of each room, without padding if ``tight``; and the spreads of sweeps."""
    possible = _possible_spreads(transfers, ownership)
    accesses = [_accesses(room, transfers, ownership, possible) for room in rooms]
    touched = [sorted({n for n, _ in x} & possible.keys()) for x in accesses]
    elsewhere = {
        (n, spread): _cost_elsewhere(transfers, ownership, n, spread)
        for n, some in possible.items()
        for spread in some
    }
    known: dict[tuple[int, ...], tuple[Strides, float]] = {}

    def best(number: int, chosen: Mapping[int, int]) -> tuple[Strides, float]:
        """The strides of a room with these spreads, and what accesses to it cost."""
        question = number, *(chosen[n] for n in touched[number])
        if question not in known:
            own = (access[chosen.get(position, 1)] for position, access in accesses[number])
            known[question] = _strides(rooms[number], own, transfers, ownership, tight)
        return known[question]

    def cost(chosen: Mapping[int, int]) -> float:
        """Cycles beyond the least."""
        total = sum(elsewhere[x] for x in chosen.items())
        for number in range(len(rooms)):
            total += best(number, chosen)[1]
        return total

    chosen = spreads.choose(possible, cost)
    return [best(n, chosen)[0] for n in range(len(rooms))], chosen


def _possible_spreads(transfers: Transfers, ownership: Ownership) -> dict[int, tuple[int, ...]]:
    """Of sweeps, by their positions: which lines neighbours may have, where there is a choice."""
    found: dict[int, tuple[int, ...]] = {}
    for position, stage in enumerate(transfers.schedule.stages):
        if not isinstance(stage, Sweep):
            continue
        if ownership.elements > 1 and not (stage.light or ownership.packs(stage)):
            found[position] = (1, spreads.ACROSS)
        if stage.lanes > 1:
            fibres, most = ownership.fibres(stage), max(spreads.SPREADS)
            if transfers.schedule.ends.dtype.kind != "f":
                most = 1  # shared memory serves two quads of complex values at a time
            elif transfers.streamed(position) and fibres % 2:
                most = 2  # a piece of a stream has the lines of one octet
            possible = spreads.possible(ownership.elements * stage.count, fibres)
            found[position] = tuple(x for x in possible if x <= most)
    return found


def _strides(
    room: Room, accesses: Iterable[Access], transfers: Transfers, ownership: Ownership, tight: bool
) -> tuple[Strides, float]:
    schedule = transfers.schedule
    itemsize = schedule.ends.dtype.itemsize
    if room.brought:
        # The copy engine takes pairs of values: a tile begins in either half of the first.
        behind = 0 if transfers.together else 2 - math.prod(room.shape) % 2
        strides = banks.row_major(room.shape, (behind, *(0,) * (len(room.shape) - 1)))
        conflicts = (
            banks.conflicts_at(x, strides.axes, strides.element, itemsize) for x in accesses
        )
        return strides, float(sum(conflicts))
    if tight:
        return banks.row_major(room.shape), 0.0
    inner = not transfers.plain & room.axes.keys()
    candidates = Candidates(room.shape, itemsize, ownership.elements, inner)
    price = DEAR if _is_crowded(schedule) else CHEAP
    every = tuple(accesses)
    # Those of quads were timed with each kind of access counted once.
    return banks.choose(candidates, tuple(dict.fromkeys(every)) if schedule.quads else every, price)


def _is_crowded(schedule: Schedule) -> bool:
    """Whether tiles leave shared memory room for few elements.

    Those do that wait for what they are multiplied with, and those of quads, of which an element
    has many. Complex values need theirs.
    """
    if any(isinstance(stage, Accumulation) for stage in schedule.stages):
        return True
    return schedule.quads and not schedule.alone and schedule.ends.dtype.kind == "f"


# ---- How stages go through tiles -----------------------------------------------------------------


def _accesses(
    room: Room,
    transfers: Transfers,
    ownership: Ownership,
    possible: Mapping[int, Sequence[int]],
) -> list[tuple[int, dict[int, Access]]]:
    """Positions of the stages that touch a room, and how they go there with each spread."""
    found = []
    for tile, axes in room.axes.items():
        for position, access in _accesses_to(transfers, tile, ownership.threads):
            lines = tuple((extent, axes[at] if at >= 0 else -1) for extent, at in access.lines)
            some = possible.get(position, (1,))
            found.append((position, {x: replace(access, lines=lines, spread=x) for x in some}))
    return found


def _accesses_to(transfers: Transfers, tile: int, threads: int) -> Iterator[tuple[int, Access]]:
    """The same of one tile and its own axes, with lines side by side."""
    stages = transfers.schedule.stages
    for position in (transfers.maker[tile], *transfers.readers[tile]):
        if position in (BEFORE, len(stages)):
            continue
        stage, makes = stages[position], position == transfers.maker[tile]
        if isinstance(stage, Assembly):
            continue
        if isinstance(stage, Sweep):
            read = [x for x in stage.loads if x.tile == tile]
            made = [stage.tiles[tile]] if tile in stage.tiles else []
            for value in made if makes else read:
                yield position, Access(_lines(stage, value), threads)
        elif isinstance(stage, Accumulation):
            for lines in _of_sum(stage, tile):
                yield position, Access(lines, threads)
        elif isinstance(stage, Total):
            for lines in _of_total(stage, tile):
                yield position, Access(lines, threads)
        else:
            blocking = blocking_of(stage.step, transfers.schedule.ends.dtype.itemsize)
            for labels in _labels_of(stage, tile):
                own = tuple((n, labels.find(x)) for x, n in blocking.lines)
                yield position, Access(own, threads)


def _lines(sweep: Sweep, value: Value) -> tuple[tuple[int, int], ...]:
    """The lines of a sweep and which axes of a value they walk; of quads their lanes, too."""
    lines = tuple((sweep.threads(x), value.labels.find(x)) for x in sweep.lines)
    return (*lines, (sweep.lanes, value.labels.find(ALONG))) if sweep.lanes > 1 else lines


def _of_sum(stage: Accumulation, tile: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Lanes have rows or columns, and next to each other the terms of one."""
    step, fastest = stage.step, stage.contracted[-1]
    for operand, labels, along in (
        (step.left, step.left_labels, step.rows),
        (step.right, step.right_labels, step.columns),
    ):
        if operand == tile:
            rows = next(n for n in (1, 2, 4, PIECE) if n >= min(step.extents[along], PIECE))
            own = (rows, labels.index(along)), (QUAD, labels.index(fastest))
            yield ((PIECE // rows, -1), *own)


def _of_total(stage: Total, tile: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Lanes have terms next to each other."""
    step = stage.step
    if tile == step.operand:
        own = tuple((n, step.labels.find(x)) for x, n in stage.lines)
        yield (*own, (stage.lanes, step.labels.index(stage.summed[-1])))
    if tile == stage.number:
        yield (*((n, axis) for axis, (_, n) in enumerate(stage.lines)), (stage.lanes, -1))


def _labels_of(stage: Gemm, tile: int) -> list[str]:
    step = stage.step
    pairs = [(step.left, step.left_labels), (step.right, step.right_labels)]
    return [x for n, x in [*pairs, (stage.number, step.output_labels)] if n == tile]


def _cost_elsewhere(
    transfers: Transfers, ownership: Ownership, position: int, spread: int
) -> float:
    """What a sweep meets in global memory, and in parts of tiles in shared memory."""
    schedule = transfers.schedule
    ends, tiles, sweep = schedule.ends, schedule.plan.tiles, schedule.stages[position]
    assert isinstance(sweep, Sweep)
    itemsize = ends.dtype.itemsize
    warps = min(sweep.lanes * sweep.count * ownership.elements, ownership.threads) / 32
    streamed = transfers.streamed(position)
    cost = 0.0

    def pieces(value: Value, strides: tuple[int, ...], size: int, stores: bool) -> float:
        """Of global memory, where elements have so many values."""
        if sweep.lanes == 1:
            access = Access(_lines(sweep, value), ownership.threads, spread)
            return banks.pieces(access, Strides(strides, size), ownership.elements, itemsize)
        step = {x: strides[n] for n, x in enumerate(value.labels)}
        lines = tuple((sweep.extents[x], step.get(x, 0)) for x in sweep.lines)
        return warps * spreads.pieces(lines, step.get(ALONG, 0), itemsize, stores, spread) / 2

    for value in sweep.loads:
        if transfers.from_shared(value.tile, position):
            continue
        at = ends.origin(value.tile)
        view = at.view.strides if at.view else row_major(schedule.plan.tiles[value.tile].shape)
        shared = at.index is None and transfers.from_shared(at.tile, position)
        if shared or value.tile in streamed:
            access = Access(_lines(sweep, value), ownership.threads, spread)
            cost += banks.conflicts_at(access, view, 0, itemsize)
        elif sweep.lanes > 1 or at.index is None:
            # Gathered values lie wherever an index points, whichever thread has them.
            own = tiles[at.tile]
            cost += pieces(value, view, own.size if own.batched else 0, False)
    for tile, value in sweep.tiles.items():
        if tile in schedule.rewritten:
            continue
        for output, to in ends.written.get(tile, ()):
            cost += pieces(value, to.strides, ends.result_size(output), True)
    return cost
