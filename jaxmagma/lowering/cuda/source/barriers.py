"""Barriers between stages, and what may come once they are passed."""

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.schedule.sweeps import made_by
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.text import Text
from jaxmagma.lowering.cuda.source.tiles import Tiles


class Barriers:
    """Prints barriers where a stage touches what others have touched since the last one.

    And where a stage waits for what the copy engine brings.
    """

    def __init__(self, text: Text, block: Block, tiles: Tiles) -> None:
        self.text = text
        self.block = block
        self.transfers = block.transfers
        self.tiles = tiles
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        # Tiles whose place waits for those of the next elements.
        ahead = self.transfers.ahead
        self.waiting = [*self.transfers.fetched, *self.transfers.gathers] if ahead else []

    def print_before(self, places: Places) -> None:
        """What a stage waits for before it reads and writes shared memory."""
        overlap, schedule = self.block.layout.overlap, self.block.schedule
        stage = schedule.stages[places.position]
        reads = set(filter(places.from_shared, schedule.read(stage)))
        writes = set(filter(places.to_shared, made_by(stage)))
        if overlap(reads, self.writes) or overlap(writes, self.reads | self.writes):
            self.print(places.position)
            self.reads, self.writes = set(), set()
        self.reads |= reads
        self.writes |= writes

    def print_waits(self, position: int) -> None:
        """Waits for the operands that are first read there."""
        phase = "phase" if self.block.loops else "0"
        for tile in self.transfers.fetched:
            if min(self.transfers.readers[tile]) == position:
                self.text(f"wait<kThreads>({self.tiles.arrival(tile)}, {phase});")

    def print(self, position: int) -> None:
        """What has been read before ``position`` may be replaced by what comes next."""
        self.text("sync<kThreads>();")
        gone = [x for x in self.waiting if self._last_reader(x) < position]
        fetched = [x for x in gone if x in self.transfers.fetched]
        if fetched:
            self.tiles.print_fetches(fetched, f"first + {self.tiles.step}")
        self.tiles.print_gathers(x for x in gone if x in self.transfers.gathers)
        self.waiting = [x for x in self.waiting if x not in gone]

    def _last_reader(self, tile: int) -> int:
        """The last stage that reads what is where a tile is, or will be."""
        overlap, readers = self.block.layout.overlap, self.transfers.readers
        return max(max(x) for other, x in readers.items() if overlap({tile}, {other}))
