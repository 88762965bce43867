"""The stages of a kernel one after the other, and the barriers between them."""

from collections.abc import Sequence
from contextlib import nullcontext

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.pieces import Pieces
from jaxmagma.lowering.cuda.source.assemblies import print_assembly
from jaxmagma.lowering.cuda.source.barriers import Barriers
from jaxmagma.lowering.cuda.source.matrices import Matrices
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.preloads import Preloads
from jaxmagma.lowering.cuda.source.products import print_accumulation, print_gemm
from jaxmagma.lowering.cuda.source.streams import Streams
from jaxmagma.lowering.cuda.source.sweeps import print_planes, print_sweep
from jaxmagma.lowering.cuda.source.text import Text
from jaxmagma.lowering.cuda.source.tiles import Tiles
from jaxmagma.lowering.cuda.sweeps import Accumulation, Gemm, Stage, Sweep, follows


def print_stages(
    text: Text,
    block: Block,
    tiles: Tiles,
    matrices: Matrices,
    streams: Streams,
    preloads: Preloads,
) -> None:
    barriers = Barriers(text, block, tiles)
    for group in _together(block.stages):
        text()
        position, stage = group[0], block.stages[group[0]]
        preloads.print_next(position)
        places = Places(block, position)
        # Where an element is one plane, sweeps that follow others load matrices for themselves.
        at_first = group[:1] if isinstance(stage, Sweep) and len(stage.lines) == 1 else group
        pieces = list(dict.fromkeys(x for n in at_first for x in _pieces(block, block.stages[n])))
        with text.braces() if pieces else nullcontext():
            # Matrices come while others are still at work on what the stage reads.
            matrices.print_loads(pieces)
            barriers.print_before([Places(block, n) for n in group])
            barriers.print_waits(group[:1] if block.has_one_plane(stage) else group)
            if isinstance(stage, Sweep) and stage.across:
                stages = ((Places(block, n), block.stages[n]) for n in group)
                sweeps = [(own, x) for own, x in stages if isinstance(x, Sweep)]
                print_planes(text, matrices, streams, sweeps, set(pieces), barriers, preloads)
            elif (
                isinstance(stage, Sweep)
                and block.copies(stage)
                and stage.loads[0].tile in block.sent
            ):
                tiles.print_send(stage.loads[0].tile)
            elif isinstance(stage, Sweep):
                print_sweep(text, matrices, places, streams, stage, preloads)
            elif isinstance(stage, Gemm):
                print_gemm(text, places, stage)
            elif isinstance(stage, Accumulation):
                print_accumulation(text, places, stage)
            else:
                print_assembly(text, places, stage)
    preloads.print_next(len(block.stages))
    if block.fetched and block.loops:
        text("++done;" if block.twice else "phase ^= 1;")
    if block.summed:
        _print_sums(text, block, barriers)
    elif block.loops and block.shared.values:
        awaited = bool(tiles.brought) and not barriers.waiting  # by a barrier, too
        if not awaited:
            barriers.print_last(len(block.stages))


def _together(stages: Sequence[Stage]) -> list[list[int]]:
    """Positions of stages, with those that follow others in the same warps."""
    found: list[list[int]] = []
    for position in range(len(stages)):
        if follows(stages, position):
            found[-1].append(position)
        else:
            found.append([position])
    return found


def _pieces(block: Block, stage: Stage) -> list[Pieces]:
    """The matrices for tensor cores that are loaded for this stage alone."""
    return [] if not isinstance(stage, Sweep) or block.holds else block.pieces_in(stage)


def _print_sums(text: Text, block: Block, barriers: Barriers) -> None:
    """Adds the tiles that are summed over elements to what the threads have of them."""
    text()
    sums = {block.plan.results[out] for out in block.summed}
    if block.shared.overlap(sums & block.uses.tiles, barriers.writes):
        text("sync<kThreads>();")
    barriers.reads |= sums & block.uses.tiles
    places = Places(block, len(block.stages))
    for out in block.summed:
        if out not in block.accumulated:
            pointer = places.pointer(block.plan.results[out])
            text(f"reduce(sum{out}, thread, slice, {pointer});")
    if block.shared.offsets:
        barriers.print_last(len(block.stages) + 1)
