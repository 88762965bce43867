"""Which elements a group of threads works on: a slice of them, or one slice after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.source.streams import Streams
from jaxmagma.lowering.cuda.source.text import Text
from jaxmagma.lowering.cuda.source.tiles import Tiles


# Why matrices that are read anew for each slice of elements are at an unknown place.
UNKNOWN_ZERO = "else matrices would stay in registers, where sums are"


class Slices:
    """Prints what is done for each slice, and asks for what comes next."""

    def __init__(self, text: Text, block: Block, tiles: Tiles, streams: Streams) -> None:
        self.text = text
        self.block = block
        self.transfers = block.transfers
        self.tiles = tiles
        self.streams = streams
        self.fetched = {f"g{x}" for x in self.transfers.fetched}
        # Indices are read for the slice after each, so they are asked for one earlier.
        self.indices = {f"g{step.index}" for step in self.transfers.gathers.values()}
        # A warp that works alone reads soon what it would ask for now.
        waits = not block.schedule.alone or bool(block.ends.accumulations)
        self.asks = block.prefetch and bool(block.schedule.stages) and waits
        streamed = (x.operand for x in self.transfers.streams)
        unasked = {f"g{x}" for x in (*block.ends.gathered, *streamed)}
        if not block.ends.accumulations:
            unasked |= self.fetched
        self.reads = {
            x.name: f"{slot}, {x.size}"
            for slot, x in enumerate(tiles.batched)
            if not x.written and x.name not in unasked
        }

    def print_first(self) -> None:
        """The elements of a group, and what it asks for before it works on any."""
        text, tiles, step = self.text, self.tiles, self.tiles.step
        self._print_run()
        # These are on their way, or read right away.
        schedule = self.block.schedule
        first = (x for stage in schedule.stages[:1] for x in schedule.read(stage))
        soon = self.fetched | {f"g{x}" for x in first}
        if not self.block.loops:
            text(f"const auto slice = {_slice('run.first')};")
            self._print_prefetch(self.reads.keys() - soon, "slice")
            return
        self._print_prefetch(self.reads.keys() - soon - self.indices, _slice("run.first"))
        self._print_prefetch(self.indices, _slice(f"run.first + {step}"))
        if self.transfers.ahead and self.transfers.fetched:
            tiles.print_fetches(self.transfers.fetched, "run.first")
        if self.transfers.gathers:
            with text.braces():
                text(f"const auto next = {_slice('run.first')};")
                tiles.print_places()
                tiles.print_gathers(self.transfers.gathers)
        self.streams.print_first()

    @contextmanager
    def each(self) -> Iterator[None]:
        """What is printed meanwhile is done for each slice."""
        text, tiles, step = self.text, self.tiles, self.tiles.step
        if not self.block.loops:
            yield
            return
        with text.braces(f"for (long long first = run.first; first < run.end; first += {step})"):
            if self.block.ends.accumulations and self.block.matrices.rereads:
                text("const int again = static_cast<int>(first >> 62);", f"zero: {UNKNOWN_ZERO}")
            text(f"const auto slice = {_slice('first')};")
            later = self.fetched if self.transfers.ahead else set()
            names = self.reads.keys() - later - self.indices
            self._print_prefetch(names, _slice(f"first + {step}"))
            if self.transfers.gathers:
                text(f"const auto next = {_slice(f'first + {step}')};")
                self._print_prefetch(self.indices, _slice(f"first + 2 * {step}"))
                tiles.print_places()
                text("await_copies<kThreads>();")
            yield

    def _print_run(self) -> None:
        """The elements of a group."""
        group, groups = "blockIdx.x", "gridDim.x"
        if self.block.ownership.groups > 1:
            group, groups = "blockIdx.x * kGroups + group", "kGroups * gridDim.x"
        if self.block.ends.summed:
            self.text("const auto run = share<kElements>(batch, blockIdx.x);")
        elif self.block.strides:
            own = f"({group})" if self.block.ownership.groups > 1 else group
            elements = "static_cast<long long>(kElements)"
            self.text(f"const Run run = {{{elements} * {own}, batch.inner}};")
            self.text(f"const long long step = {elements} * {groups};")
        else:
            self.text(f"const auto run = jaxmagma::run<kElements>(batch, {group});")

    def _print_prefetch(self, names: set[str], slice_: str) -> None:
        wanted = [x for x in self.reads if x in names]
        if self.asks and wanted:
            with self.text.braces("if (thread == 0)"):
                for x in wanted:
                    self.text(f"prefetch<{self.reads[x]}>({x}_, batch, {slice_});")


def _slice(first: str) -> str:
    return f"jaxmagma::slice<kElements>({first}, run.end)"
