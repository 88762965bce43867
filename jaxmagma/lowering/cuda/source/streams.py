"""Operands whose rows come to each warp as it needs them."""

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.source.text import Text, listed
from jaxmagma.lowering.cuda.source.tiles import Tiles
from jaxmagma.lowering.cuda.transfers.streams import Stream


class Streams:
    """Prints ``rows7`` of operand 7: where they come to, when, and when the next ones may."""

    def __init__(self, text: Text, block: Block, tiles: Tiles) -> None:
        self.text = text
        self.block = block
        self.tiles = tiles

    def print_rooms(self) -> None:
        """Before all work."""
        places = self.block.layout.places_of_streams
        for stream in self.block.transfers.streams:
            name = stream.operand
            sizes = (
                self.block.type,
                "kThreads",
                self.block.ownership.fibres(stream.sweep),
                self.block.layout.spreads[stream.position],
                stream.sweep.count,
                stream.length,
                *(offset for _, offset in stream.parts),
            )
            self.text(f"__shared__ Arrival pieces{name}[kThreads / 32];")
            room = f"shared + {places[name]}"
            self.text(f"Stream<{listed(sizes)}> rows{name}({room}, pieces{name}, thread);")

    def print_first(self) -> None:
        """The first pieces come, of the first element if there are several."""
        for stream in self.block.transfers.streams:
            if not self.block.loops:
                self.text(f"rows{stream.operand}.start(g{stream.operand}(0));")
                continue
            with self.text.braces("if (run.first < run.end)"):
                self.text(f"rows{stream.operand}.start({self._tile(stream, 'run.first')}(0));")

    def print_others(self) -> None:
        """Where the rows of the next element are."""
        for stream in self.block.transfers.streams:
            other = "nullptr"
            if self.block.loops:
                first = f"first + {self.tiles.step}"
                other = f"{first} < run.end ? {self._tile(stream, first)}(0) : nullptr"
            type_ = f"const {self.block.type}* const"
            self.text(f"{type_} other{stream.operand} = {other};")

    def print_begin(self, position: int) -> None:
        for stream in self._of(position):
            self.text(f"rows{stream.operand}.begin();")

    def print_wait(self, position: int) -> None:
        for stream in self._of(position):
            self.text(f"rows{stream.operand}.wait();")

    def print_next(self, position: int) -> None:
        for stream in self._of(position):
            name = stream.operand
            self.text(f"rows{name}.next(g{name}(0), other{name});")

    def _of(self, position: int) -> list[Stream]:
        return [x for x in self.block.transfers.streams if x.position == position]

    def _tile(self, stream: Stream, first: str) -> str:
        """A function of the element, for those of the slice that begins there."""
        slice_ = f"jaxmagma::slice<kElements>({first}, run.end)"
        return self.tiles.of_slice(stream.operand, slice_)
