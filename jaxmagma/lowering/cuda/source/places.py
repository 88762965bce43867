"""Where a stage reads the tiles of its elements, and where it stores them."""

from dataclasses import dataclass

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.schedule.origins import Origin, Strided
from jaxmagma.lowering.cuda.schedule.sweeps import Assembly, Sweep, made_by
from jaxmagma.lowering.cuda.source.text import offset
from jaxmagma.programs.strides import row_major


@dataclass(frozen=True)
class Reading:
    """Where a stage reads a tile: a pointer to its first value, and the strides of its axes.

    A gathered tile has, beyond that of the index, the place of a component in the vector, and the
    length of that.
    """

    place: str
    strides: tuple[int, ...]
    vector: str = ""
    length: str = ""
    component: Strided | None = None
    components: int = 1


@dataclass(frozen=True)
class Writing:
    """Where a stage stores a tile, and on which condition."""

    place: str
    strides: tuple[int, ...]
    guard: str = ""


class Places:
    """Of the tiles of one stage, by its position; after the last one, of sums over elements."""

    def __init__(self, block: Block, position: int) -> None:
        self.block = block
        self.position = position

    def from_shared(self, tile: int) -> bool:
        return self.block.transfers.from_shared(tile, self.position)

    def to_shared(self, tile: int) -> bool:
        return self.block.transfers.to_shared(tile, self.position)

    def pointer(self, tile: int) -> str:
        """A function of the element, for a tile that the stage reads."""
        if self.from_shared(tile):
            return f"s{tile}"
        return f"t{tile}" if self.block.ends.is_constant(tile) else f"g{tile}"

    def reading(self, tile: int) -> Reading:
        for stream in self.block.transfers.streams:
            if stream.position == self.position and tile in stream.tiles:
                rank = len(self.block.plan.tiles[tile].shape)
                part = f"rows{stream.operand}.part<{stream.tiles.index(tile)}>()"
                return Reading(part, (*(0,) * (rank - 1), 1))
        shared = self.from_shared(tile)
        at = Origin(tile) if shared else self.block.ends.origin(tile)
        place = self._element(self.pointer(at.tile))
        if at.view is None:
            if shared:
                return Reading(place, self.block.layout.tiles[tile].strides.axes)
            return Reading(place, row_major(self.block.plan.tiles[tile].shape))
        if at.index is None:
            return Reading(place + offset(at.view.offset), at.view.strides)
        index = self._element(self.pointer(at.index)) + offset(at.view.offset)
        length = f"length{at.tile}"
        return Reading(index, at.view.strides, place, length, at.component, at.components)

    def writings(self, tile: int) -> list[Writing]:
        found = []
        if self.to_shared(tile):
            strides = self.block.layout.tiles[tile].strides.axes
            found.append(Writing(self._element(f"s{tile}"), strides))
        for whole, at in self.block.ends.parts.get(tile, ()):
            found.append(Writing(self._element(f"s{whole}") + offset(at.offset), at.strides))
        if self._stores_output(tile):
            # A place of several fibres knows itself which of them are to be written.
            slice_, guard = (", slice", "") if self._packed else ("", "if (slice.has(e)) ")
            for out, at in self.block.ends.written.get(tile, []):
                place = self._element(f"out{out}", slice_) + offset(at.offset)
                found.append(Writing(place, at.strides, guard))
        return found

    def _stores_output(self, tile: int) -> bool:
        """Whether this stage is the first to have the tile in registers, or the one to copy it."""
        block = self.block
        having = [
            n
            for n, stage in enumerate(block.schedule.stages)
            if not isinstance(stage, Assembly) and tile in made_by(stage)
        ]
        last = tile in block.schedule.rewritten
        return bool(having) and self.position == having[-1 if last else 0]

    def _element(self, pointer: str, slice_: str = "") -> str:
        """The tile of the thread's element, or the tiles of those of its fibres."""
        return f"each({pointer}, e{slice_})" if self._packed else f"{pointer}(e)"

    @property
    def _packed(self) -> bool:
        """Whether the stage's values come in packs, one for each fibre that its owner has."""
        stage = self.block.schedule.stages[self.position]
        return isinstance(stage, Sweep) and self.block.ownership.packs(stage)
