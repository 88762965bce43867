"""How stages go through tiles: what layouts, and lines of neighbouring quads, are chosen for."""

from collections.abc import Iterator

from jaxmagma.lowering.cuda import banks, spreads
from jaxmagma.lowering.cuda.accumulations import PIECE
from jaxmagma.lowering.cuda.banks import Access
from jaxmagma.lowering.cuda.gemms import blocking_of
from jaxmagma.lowering.cuda.ownership import Ownership
from jaxmagma.lowering.cuda.sweeps import ALONG, QUAD, Accumulation, Assembly, Gemm, Sweep, Value
from jaxmagma.lowering.cuda.transfers import BEFORE, Transfers
from jaxmagma.plan import Rearrange
from jaxmagma.strides import row_major


def accesses_to(transfers: Transfers, tile: int, threads: int) -> Iterator[tuple[int, Access]]:
    """Those to a tile in shared memory, by the positions of stages; of quads with lines side by
    side.
    """
    stages = transfers.schedule.stages
    for position in (transfers.maker[tile], *transfers.readers[tile]):
        if position in (BEFORE, len(stages)):
            continue
        stage, makes = stages[position], position == transfers.maker[tile]
        if isinstance(stage, Assembly):
            continue
        if isinstance(stage, Sweep):
            read = [x for x in stage.loads if x.tile == tile]
            for value in [stage.tiles[tile]] if makes else read:
                yield position, Access(_lines(stage, value), threads)
        elif isinstance(stage, Accumulation):
            for lines in _of_sum(stage, tile):
                yield position, Access(lines, threads)
        else:
            blocking = blocking_of(stage.step, transfers.schedule.ends.dtype.itemsize)
            for labels in _labels_of(stage, tile):
                own = tuple((n, labels.find(x)) for x, n in blocking.lines)
                yield position, Access(own, threads)


def _lines(sweep: Sweep, value: Value) -> tuple[tuple[int, int], ...]:
    """The lines of a sweep and which axes of a value they walk; of quads their lanes, too."""
    lines = tuple((sweep.extents[x], value.labels.find(x)) for x in sweep.lines)
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


def _labels_of(stage: Gemm, tile: int) -> list[str]:
    step = stage.step
    if isinstance(step, Rearrange):
        pairs = [(step.operand, step.labels)]
    else:
        pairs = [(step.left, step.left_labels), (step.right, step.right_labels)]
    return [x for n, x in [*pairs, (stage.number, step.output_labels)] if n == tile]


def cost_elsewhere(transfers: Transfers, ownership: Ownership, position: int, spread: int) -> float:
    """What a sweep of quads meets in global memory, and in parts of tiles in shared memory."""
    schedule = transfers.schedule
    ends, sweep = schedule.ends, schedule.stages[position]
    assert isinstance(sweep, Sweep)
    itemsize = ends.dtype.itemsize
    warps = min(sweep.lanes * sweep.count * ownership.elements, ownership.threads) / 32
    streamed = transfers.streamed(position)
    cost = 0.0

    def pieces(value: Value, strides: tuple[int, ...], stores: bool) -> float:
        """Of global memory, for each warp."""
        step = {x: strides[n] for n, x in enumerate(value.labels)}
        lines = tuple((sweep.extents[x], step.get(x, 0)) for x in sweep.lines)
        return spreads.pieces(lines, step.get(ALONG, 0), itemsize, stores, spread) / 2

    for value in sweep.loads:
        if transfers.from_shared(value.tile, position):
            continue
        at = ends.origin(value.tile)
        view = at.view.strides if at.view else row_major(schedule.plan.tiles[value.tile].shape)
        shared = at.index is None and transfers.from_shared(at.tile, position)
        if shared or value.tile in streamed:
            access = Access(_lines(sweep, value), ownership.threads, spread)
            cost += banks.conflicts_at(access, view, 0, itemsize)
        else:
            cost += warps * pieces(value, view, False)
    for tile, value in sweep.tiles.items():
        for _, to in ends.written.get(tile, ()):
            cost += warps * pieces(value, to.strides, True)
    return cost
