"""Operands of the next elements, which come to registers while a block adds up these.

Sums of products keep few registers besides those of the sums, and what the next elements begin
with is long on its way. So the first sweeps, if each thread has fibres in them once at most, find
theirs loaded: ``next7`` is a fibre of tile 7 of the elements to come.
"""

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.parameters import WARP
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.registers import Registers
from jaxmagma.lowering.cuda.source.text import Text, shape_of
from jaxmagma.lowering.cuda.source.tiles import Tiles
from jaxmagma.lowering.cuda.sweeps import Accumulation, Sweep, Value


class Preloads:
    """Prints what brings these fibres, and knows the names that sweeps find them under."""

    def __init__(self, text: Text, block: Block, tiles: Tiles) -> None:
        self.text = text
        self.block = block
        self.tiles = tiles
        self.values = _find(block)
        # The stage before which they are asked for: the first of the sums at the end.
        self.position = max((n + 1 for n in range(len(block.stages)) if self._works(n)), default=0)

    def _works(self, position: int) -> bool:
        """Whether a stage needs registers for more than sums and copies, or what comes so."""
        stage = self.block.stages[position]
        adds = isinstance(stage, Accumulation) or self.block.copies(stage)
        return position in self.values or not adds

    def named(self, registers: Registers) -> None:
        """Tells a sweep which fibres are there already."""
        for value in self.values.get(registers.places.position, ()):
            registers.fibres[value] = registers.name_of(value, "next")

    def print_first(self) -> None:
        """Those of the first elements, before the loop."""
        for position, values in self.values.items():
            registers = self._registers(position)
            for value in values:
                name = registers.name_of(value, "next")
                shape = shape_of((value.length,))
                self.text(f"{registers.type_of_fibre(value.length)} {name};", shape)
        self._print("run.first")

    def print_next(self, position: int) -> None:
        """Those of the next ones, before the stage where that is due."""
        if position == self.position:
            self._print(f"first + {self.tiles.step}")

    def _print(self, first: str) -> None:
        if not self.values:
            return
        with self.text.braces(f"if ({first} < run.end)"):
            self.text(f"const auto slice = jaxmagma::slice<kElements>({first}, run.end);")
            origins = {self.block.origin(x.tile).tile for own in self.values.values() for x in own}
            for tile in sorted(origins):
                self.tiles.print_operand(tile)
            for position, values in self.values.items():
                registers = self._registers(position)
                with registers.each_fibre():
                    for value in values:
                        name = registers.name_of(value, "next")
                        self.text(f"{name} = {registers.loaded_fibre(value)};")

    def _registers(self, position: int) -> Registers:
        sweep = self.block.stages[position]
        assert isinstance(sweep, Sweep)
        return Registers(self.text, Places(self.block, position), sweep)


def _find(block: Block) -> dict[int, list[Value]]:
    """The fibres that come so, by the positions of their sweeps."""
    found: dict[int, list[Value]] = {}
    wanted = block.parameters.preload if block.accumulations else None
    for position, sweep in enumerate(block.stages):
        if not isinstance(sweep, Sweep) or not _is_done_once(block, sweep):
            continue
        values = [
            x
            for x in sweep.loads
            if x.length > 1 and block.is_outside(x.tile) and block.origin(x.tile).index is None
            if not block.uses.from_shared(x.tile, position)
            if x.tile not in block.streamed(position)
        ]
        if values and len(found) < (wanted or 0):
            found[position] = values
    return found


def _is_done_once(block: Block, sweep: Sweep) -> bool:
    """Whether no thread has fibres in a sweep more than once."""
    warps, fibres = block.threads // WARP, block.fibres(sweep)
    count = block.elements * sweep.count
    return -(-count // 8) <= warps * fibres if sweep.lanes > 1 else count <= block.threads * fibres
