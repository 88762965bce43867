"""The stages of a kernel one after the other, and the barriers between them."""

from contextlib import nullcontext

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.matrices.pieces import Pieces, pieces_in
from jaxmagma.lowering.cuda.schedule.sweeps import Accumulation, Gemm, Stage, Sweep, Total
from jaxmagma.lowering.cuda.source.assemblies import print_assembly
from jaxmagma.lowering.cuda.source.barriers import Barriers
from jaxmagma.lowering.cuda.source.matrices import Matrices
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.products import print_accumulation, print_gemm, print_total
from jaxmagma.lowering.cuda.source.streams import Streams
from jaxmagma.lowering.cuda.source.sweeps import print_sweep
from jaxmagma.lowering.cuda.source.text import Text
from jaxmagma.lowering.cuda.source.tiles import Tiles


def print_stages(
    text: Text, block: Block, tiles: Tiles, matrices: Matrices, streams: Streams
) -> None:
    barriers = Barriers(text, block, tiles)
    for position, stage in enumerate(block.schedule.stages):
        text()
        places = Places(block, position)
        pieces = _pieces(block, stage)
        with text.braces() if pieces else nullcontext():
            # Matrices come while others are still at work on what the stage reads.
            matrices.print_loads(pieces)
            barriers.print_before(places)
            barriers.print_waits(position)
            if isinstance(stage, Sweep):
                print_sweep(text, matrices, places, streams, stage)
            elif isinstance(stage, Gemm):
                print_gemm(text, places, stage)
            elif isinstance(stage, Total):
                print_total(text, places, stage)
            elif isinstance(stage, Accumulation):
                print_accumulation(text, places, stage)
            else:
                print_assembly(text, places, stage)
    if block.transfers.fetched and block.loops:
        text("phase ^= 1;")
    if block.ends.summed:
        _print_sums(text, block, barriers)
    elif block.loops and block.layout.tiles:
        awaited = bool(block.transfers.gathers) and not barriers.waiting  # by a barrier, too
        if not awaited:
            barriers.print(len(block.schedule.stages))


def _pieces(block: Block, stage: Stage) -> list[Pieces]:
    """The matrices for tensor cores that are loaded for this stage alone."""
    if not isinstance(stage, Sweep) or block.matrices.held:
        return []
    return pieces_in(block.schedule, stage)


def _print_sums(text: Text, block: Block, barriers: Barriers) -> None:
    """Adds the tiles that are summed over elements to what the threads have of them."""
    text()
    sums = {block.plan.results[out] for out in block.ends.summed}
    if block.layout.overlap(sums & block.transfers.tiles, barriers.writes):
        text("sync<kThreads>();")
    places = Places(block, len(block.schedule.stages))
    for out in block.ends.summed:
        if out not in block.ends.accumulated:
            pointer = places.pointer(block.plan.results[out])
            text(f"reduce(sum{out}, thread, slice, {pointer});")
    if block.layout.tiles:
        barriers.print(len(block.schedule.stages) + 1)
