"""Tiles put together in shared memory: zeros, and one part after the other added to them."""

from jaxmagma.lowering.cuda.schedule.sweeps import Assembly, Sweep, Value
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.registers import Registers
from jaxmagma.lowering.cuda.source.text import LETTERS, Text, listed, shape_of


def print_assembly(text: Text, places: Places, stage: Assembly) -> None:
    block, number = places.block, stage.number
    size = block.plan.tiles[number].size
    with text.function(f"values<kThreads, kElements, {size}>(thread", ("int e", "int a")):
        text(f"s{number}(e)[a] = {block.type}{{}};")
    for tile, offset, strides in stage.step.pieces:
        shape = block.plan.tiles[tile].shape
        labels = LETTERS[: len(shape)]
        value = Value(tile, labels)
        part = Registers(text, places, Sweep(labels, dict(zip(labels, shape, strict=True))))
        extents = listed(("kThreads", "kElements", *shape))
        text("sync<kThreads>();")
        with text.function(
            f"values<{extents}>(thread", (f"int {x}" for x in ("e", *labels)), shape_of(shape)
        ):
            name = part.value(value)
            text(f"s{number}(e)[{offset}{part.line(value, strides)}] += {name};")
