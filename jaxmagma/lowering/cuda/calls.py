"""The custom call of a kernel: its attributes, as read in ``cuda/call.cc``, and its workspace."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.matrices import Matrices
from jaxmagma.lowering.cuda.panels import Panels
from jaxmagma.lowering.cuda.source import Source
from jaxmagma.lowering.cuda.source.tiles import Pointer
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.programs.program import ElementProgram


TARGET = "jaxmagma_cuda"
# Blocks that share a sum, at most: sixteen for each multiprocessor of an H200.
SUM_BLOCKS = 2112


def kernel_of_block(block: Block, extents: tuple[int, ...]) -> Kernel:
    source = Source(block)
    return Kernel(
        TARGET,
        _attributes(source),
        _workspace(block, extents),
        block.describe(),
        source.text,
        block.ownership.busy,
    )


def kernel_of_panels(panels: Panels) -> Kernel:
    text = panels.source
    order = _numbering(panels.plan.program)
    attributes = {
        "name": _name(text),
        "source": text,
        "threads": panels.transfers.threads,
        "elements": panels.elements,
        "shared_bytes": panels.shared_bytes,
        "resident": True,
        "order": _integers([0, *order, *range(len(order), panels.axes)]),
        "pointers": _pointers(panels.pointers),
        "copies": _integers([]),
        "sums": _integers([]),
        "bank": _bytes([]),
        "table": _bytes(panels.tables),
    }
    return Kernel(TARGET, attributes, description=panels.describe(), source=text)


def _element_order(block: Block) -> tuple[tuple[int, ...], int]:
    """Batch axes in the order in which elements are numbered, and how many of them are kept."""
    program, summed = block.plan.program, block.ends.summed
    kept = program.outputs[summed[0]].batch if summed else ()
    return _numbering(program, kept), len(kept)


def _numbering(program: ElementProgram, first: tuple[int, ...] = ()) -> tuple[int, ...]:
    """All batch axes: after these, those of the largest operand, as they lie in memory."""
    largest = max(program.inputs, key=lambda x: (len(x.batch), math.prod(x.tile)))
    return tuple(dict.fromkeys((*first, *largest.batch, *range(program.batch_rank))))


def _chunks(block: Block, extents: tuple[int, ...]) -> tuple[int, int]:
    order, kept = _element_order(block)
    outer = math.prod(extents[x] for x in order[:kept])
    inner = math.prod(extents[x] for x in order[kept:])
    slices = -(-inner // block.ownership.elements)
    return outer, max(1, min(slices, SUM_BLOCKS // max(1, outer)))


def _workspace(
    block: Block, extents: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    outer, chunks = _chunks(block, extents)
    sizes = map(block.ends.result_size, block.ends.summed)
    return tuple(((outer, chunks, size), block.ends.dtype) for size in sizes)


def _attributes(source: Source) -> dict[str, Any]:
    block = source.block
    ends, matrices, program = block.ends, block.matrices, block.plan.program
    order, kept = _element_order(block)
    arguments: dict[int, int] = {}
    for tile, operand in enumerate(program.inputs):
        if operand.constant is None:
            arguments[tile] = len(arguments)
    copies: list[int] = []  # argument, offset in the bank, bytes
    offset = 0
    for tile in matrices.bank:
        if tile in arguments:
            copies += [arguments[tile], offset, matrices.bank_size(tile) * ends.dtype.itemsize]
        offset += matrices.bank_bytes(tile)
    sums: list[int] = []  # result, workspace, values of a tile
    first = len(arguments)
    for number, out in enumerate(ends.summed):
        sums += [first + out, first + len(program.outputs) + number, ends.result_size(out)]

    bank = [x for tile in matrices.bank for x in _filled(matrices, tile)]
    tables = [array for x in matrices.tables() if (array := ends.constant(x)) is not None]
    return {
        "name": _name(source.text),
        "source": source.text,
        "threads": block.threads,
        "elements": block.elements,
        "shared_bytes": block.shared_bytes,
        "resident": block.strides,
        "order": _integers([kept, *order]),
        "pointers": _pointers(source.pointers),
        "copies": _integers(copies),
        "sums": _integers(sums),
        "bank": _bytes([*bank, np.zeros(matrices.bank_uses(), np.int32)]),
        "table": _bytes([*tables, *matrices.arranged()]),
    }


def _name(text: str) -> str:
    return "jaxmagma_" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _pointers(pointers: Iterable[Pointer]) -> np.ndarray:
    """As in cuda/launch.h: of each, its batch axes behind their number."""
    fields: list[int] = []
    for x in pointers:
        fields += [x.buffer, x.size, x.itemsize, x.gathered, len(x.axes), *x.axes]
    return _integers(fields)


def _filled(matrices: Matrices, tile: int) -> list[np.ndarray]:
    """The values of a matrix in the constant bank, and what is left free behind them."""
    values = matrices.bank_values(tile)
    return [values, np.zeros(matrices.bank_bytes(tile) - values.nbytes, np.uint8)]


def _bytes(arrays: list[np.ndarray]) -> np.ndarray:
    """One after the other, preceded by a byte, since an attribute may not be empty."""
    return np.frombuffer(b"\0" + b"".join(x.tobytes() for x in arrays), np.uint8)


def _integers(values: list[int]) -> np.ndarray:
    """Preceded by their number, since an attribute may not be empty."""
    return np.array([len(values), *values], np.int64)
