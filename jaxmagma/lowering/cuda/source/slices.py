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
    """Prints what is done for each slice, and asks for what later stages read."""

    def __init__(self, text: Text, block: Block, tiles: Tiles, streams: Streams) -> None:
        self.text = text
        self.block = block
        self.transfers = block.transfers
        self.tiles = tiles
        self.streams = streams

    def print_first(self) -> None:
        """The elements of a group, and what it asks for before it works on any."""
        text, tiles = self.text, self.tiles
        self._print_run()
        if not self.block.loops:
            text(f"const auto slice = {_slice('run.first')};")
            if self.block.prefetch:
                self._print_prefetch()
            return
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
            if self.block.ends.accumulations:
                text("const int again = static_cast<int>(first >> 62);", f"zero: {UNKNOWN_ZERO}")
            text(f"const auto slice = {_slice('first')};")
            if self.transfers.gathers:
                text(f"const auto next = {_slice(f'first + {step}')};")
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

    def _print_prefetch(self) -> None:
        """Asks for operands of later stages, but for those that are on their way."""
        schedule, transfers = self.block.schedule, self.transfers
        first = (x for stage in schedule.stages[:1] for x in schedule.read(stage))
        streamed = (x.operand for x in transfers.streams)
        known = {
            f"g{x}" for x in (*self.block.ends.gathered, *streamed, *transfers.fetched, *first)
        }
        wanted = [
            f"prefetch<{slot}, {x.size}>({x.name}_, batch, slice);"
            for slot, x in enumerate(self.tiles.batched)
            if not x.written and x.name not in known
        ]
        if wanted:
            with self.text.braces("if (thread == 0)"):
                for line in wanted:
                    self.text(line)


def _slice(first: str) -> str:
    return f"jaxmagma::slice<kElements>({first}, run.end)"
