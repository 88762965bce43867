"""The CUDA source of a kernel, written to be read.

Names in the source: ``g7`` is tile 7 of the plan in global memory, ``s7`` in shared memory, ``r7``
in registers, ``bank.m7`` in the constant bank; ``out0`` is output 0.  The comment at the end of a
line is the shape of what it moves.

This module prints what stands around the work: parameters, definitions, and the sums that a block
keeps. Each of the others prints one part of it, from the outside to the inside::

    slices      which elements a group works on, and the loop over them
    tiles       where tiles of arrays are, and how operands get to shared memory
    streams     operands whose rows come to each warp as it needs them
    stages      the stages;  barriers: what stands between them
    sweeps      operations on fibres: a stage;  products, assemblies: the others
    matrices    products of fibres with matrices, and where these stand
    registers   fibres and values that a thread has, loaded and stored
    places      where a stage reads and stores tiles
    text        lines, and numbers in them
"""

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.source.matrices import Matrices
from jaxmagma.lowering.cuda.source.slices import Slices
from jaxmagma.lowering.cuda.source.stages import print_stages
from jaxmagma.lowering.cuda.source.streams import Streams
from jaxmagma.lowering.cuda.source.text import Text, listed, shape_of
from jaxmagma.lowering.cuda.source.tiles import Tiles


class Source:
    """Prints the kernel of a ``Block``."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._text = Text()
        self._tiles = Tiles(self._text, block)
        self._matrices = Matrices(self._text, block)
        self._streams = Streams(self._text, block, self._tiles)
        self.pointers = self._tiles.pointers
        self._print_head()
        self._print_kernel()
        if block.ends.summed:
            self._print_finish()
        self.text = self._text.source

    def _print_head(self) -> None:
        text, block = self._text, self.block
        for line in repr(block.plan).splitlines():
            text(f"// {line}")
        text("//")
        text(f"// {block.describe()}")
        text('#include "kernel.cuh"')
        text()
        text("using namespace jaxmagma;")
        text()
        group = "a group of threads" if block.ownership.groups > 1 else "a block"
        text(f"constexpr int kThreads = {block.ownership.threads};")
        text(f"constexpr int kElements = {block.ownership.elements};  // of {group}")
        if block.ownership.groups > 1:
            text(f"constexpr int kGroups = {block.ownership.groups};  // in a block")
        text()
        self._matrices.print_structs()

    def _print_kernel(self) -> None:
        text, block, tiles = self._text, self.block, self._tiles
        batch = f"Batch<{max(1, block.plan.program.batch_rank)}, {len(tiles.batched)}>"
        parameters = [f"const {batch} batch"]
        for x in self.pointers:
            constant = "" if x.written else "const "
            parameters.append(f"{constant}{x.type}* __restrict__ {x.name}_")
        lengths = (x.name.removeprefix("g") for x in self.pointers if x.gathered)
        parameters += [f"const int length{tile}" for tile in lengths]
        bounds = "kThreads * kGroups" if block.ownership.groups > 1 else "kThreads"
        if block.min_blocks:
            bounds += f", {block.min_blocks}"
        text(f'extern "C" __global__ void __launch_bounds__({bounds})')
        separator = ",\n" + " " * len("kernel(")
        with text.braces(f"kernel({separator.join(parameters)})"):
            self._print_group()
            self._print_zero_sums()
            self._matrices.print_copies()
            if block.matrices.held:
                self._matrices.print_loads(block.matrices.pieces)
            slices = Slices(text, block, tiles, self._streams)
            slices.print_first()
            with slices.each():
                self._print_tiles()
                print_stages(text, block, tiles, self._matrices, self._streams)
            self._print_partial_sums()

    def _print_group(self) -> None:
        """What belongs to a group of threads."""
        text, block = self._text, self.block
        several = block.ownership.groups > 1
        if block.shared_bytes:
            text("extern __shared__ __align__(16) unsigned char memory[];")
        if several:
            text("const int thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;")
        else:
            text("const int thread = threadIdx.x;")
        if block.shared_bytes:
            own = f" + {block.layout.values} * group" if several else ""
            text(f"{block.type}* const shared = reinterpret_cast<{block.type}*>(memory){own};")
        if block.transfers.fetched:
            count = len(block.transfers.fetched)
            groups, own = ("[kGroups]", "[group]") if several else ("", "")
            text(f"__shared__ Arrival arrivals{groups}[{count}];")
            text(f"Arrival* const arrived = arrivals{own};")
            elements = 1 if block.transfers.together else "kElements"
            text(f"prepare<kThreads, {elements}, {count}>(thread, arrived);")
            if block.loops:
                text("unsigned phase = 0;")
        self._streams.print_rooms()

    def _print_tiles(self) -> None:
        """Where the tiles of an element are."""
        text, block = self._text, self.block
        for x in self.pointers:
            if not x.name.startswith("partial"):
                self._tiles.print_global(x)
        read = set(block.schedule.everything_read)
        read |= {block.plan.results[out] for out in block.ends.summed}
        for tile in sorted(read.intersection(block.matrices.tables())):
            text(f"const auto t{tile} = [&](int) {{ return table.t{tile}; }};")
        for tile in block.layout.tiles:
            self._tiles.print_shared(tile)
        if not block.transfers.ahead:
            for tile in block.transfers.fetched:
                self._tiles.print_fetch(tile)
        if not block.loops:
            self._streams.print_first()
        self._streams.print_others()

    # ---- Sums over elements ----------------------------------------------------------------------

    def _print_zero_sums(self) -> None:
        text, block = self._text, self.block
        for out in block.ends.summed:
            shape = block.plan.tiles[block.plan.results[out]].shape
            if out in block.schedule.whole:
                text(f"Block<{block.type}, {listed(shape)}> sum{out};", shape_of(shape))
                text(f"zero(sum{out});")
            elif out in block.ends.accumulated:
                text(f"ProductSum<{block.type}, {listed(shape)}> sum{out};", shape_of(shape))
            else:
                text(f"Sum<{block.type}, {block.ends.result_size(out)}, kThreads> sum{out};")
                text(f"zero(sum{out}.value);")

    def _print_partial_sums(self) -> None:
        for out in self.block.ends.summed:
            size = self.block.ends.result_size(out)
            own = f"partial{out}_ + blockIdx.x * static_cast<long long>({size})"
            if out in self.block.ends.accumulated:
                self._text(f"store<kThreads>({own}, sum{out}, shared, thread);")
            else:
                self._text(f"store({own}, sum{out}, thread);")

    def _print_finish(self) -> None:
        """The second kernel, which adds up what the blocks have."""
        text, type_ = self._text, self.block.type
        text()
        text('extern "C" __global__ void __launch_bounds__(kTotalThreads)')
        text(f"finish(const {type_}* partial, {type_}* sum, long long values,")
        with text.braces("       long long chunks, long long size)"):
            text("total(partial, sum, values, chunks, size);")
