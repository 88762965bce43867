"""The ElementProgram: what one element computes, and over which batch axes it is repeated.

A program is a straight-line sequence of operations on *tiles* (one element's piece of an array).
It knows tile extents and dtypes but not how many elements there are: the extents of its batch axes
are read off the arrays it is applied to.  So one program, and one native kernel, serves every
element count and every shard of a partitioned array.

Values are numbered in single-assignment order: first the inputs, then one value per operation.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np


# Values, and labels of their axes.
Terms = Sequence[tuple[int, str]]


@dataclass(frozen=True, eq=False)
class Constant:
    """An immutable array, compared and hashed by its contents: programs are cache keys."""

    array: np.ndarray

    def __post_init__(self) -> None:
        array = np.array(self.array, order="C")
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.array.shape, self.array.dtype.str, self.array.tobytes())

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Constant) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Constant({self.array.dtype}{list(self.array.shape)})"


def stored(
    tile: tuple[int, ...], dtype: np.dtype, is_complex: bool
) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a tile in an array, which may be of complex numbers."""
    return (tile[:-1], np.result_type(dtype, np.complex64)) if is_complex else (tile, dtype)


@dataclass(frozen=True)
class Input:
    """One operand.  Its array has the axes ``batch + tile``, batch axes slowest.

    ``batch`` names the program's batch axes in the order in which they stand in memory; an operand
    without batch axes is *shared* by all elements, and *constant* when its value is known.

    One that ``is_complex`` is an array of complex numbers in a program of real ones: real and
    imaginary parts are the last axis of the tile, and ``dtype`` is theirs.
    """

    batch: tuple[int, ...]
    tile: tuple[int, ...]
    dtype: np.dtype
    constant: Constant | None = None
    is_complex: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.constant is not None and (self.batch or self.constant.array.shape != self.tile):
            raise ValueError(f"a constant is a shared tile {self.tile}, not {self.constant}")

    @property
    def operands(self) -> tuple[int, ...]:
        return ()

    @property
    def shared(self) -> bool:
        return not self.batch

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of one element's part of the array."""
        return stored(self.tile, self.dtype, self.is_complex)


class _Labelled:
    """An operation whose axes have labels: ``out[output]`` of ``value[labels]`` for each term."""

    terms: tuple[tuple[int, str], ...]
    output: str
    sizes: tuple[tuple[str, int], ...]

    @cached_property
    def operands(self) -> tuple[int, ...]:
        return tuple([value for value, _ in self.terms])

    @cached_property
    def extents(self) -> dict[str, int]:
        return dict(self.sizes)

    @cached_property
    def tile(self) -> tuple[int, ...]:
        return tuple(map(self.extents.__getitem__, self.output))


class _Movement:
    """An operation that computes nothing: a step of a plan as it is."""

    tile: tuple[int, ...]
    flops = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tile


@dataclass(frozen=True)
class Contract(_Labelled):
    """A tile-level einsum of any number of values: a product, summed over what ``output`` omits.

    ``terms`` holds ``(value, labels)`` pairs, one letter a label.  A label of ``output`` that no
    term carries broadcasts; ``sizes`` gives the extent of every label.
    """

    terms: tuple[tuple[int, str], ...]
    output: str
    sizes: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        operands = " * ".join(f"%{value}[{labels}]" for value, labels in self.terms)
        return f"contract {operands} -> [{self.output}]"


@dataclass(frozen=True)
class Map(_Labelled):
    """A pointwise function, a key of ``FUNCTIONS``: ``out[output] = function(value[labels], ...)``.

    Terms are as those of a ``Contract``; a term broadcasts along the labels of ``output`` that it
    does not have, and it has no others.
    """

    function: str
    terms: tuple[tuple[int, str], ...]
    output: str
    sizes: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        operands = ", ".join(f"%{value}[{labels}]" for value, labels in self.terms)
        return f"{self.function} {operands} -> [{self.output}]"


@dataclass(frozen=True)
class View(_Movement):
    """Some values of a tile: ``out[i, j] = operand.flat[offset + strides[0] i + strides[1] j]``."""

    operand: int
    offset: int
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.operand,)

    def __repr__(self) -> str:
        return f"view %{self.operand}[{self.offset} + {list(self.strides)}]"


@dataclass(frozen=True)
class Place(_Movement):
    """Tiles as parts of a larger one, zero elsewhere; the transpose of ``View``.

    ``pieces`` are ``(value, offset, strides)``: ``out.flat[offset + strides[0] i + ...] +=
    value[i, ...]``.
    """

    pieces: tuple[tuple[int, int, tuple[int, ...]], ...]
    tile: tuple[int, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        return tuple(value for value, _, _ in self.pieces)

    def __repr__(self) -> str:
        pieces = (f"%{value} at {offset} + {list(s)}" for value, offset, s in self.pieces)
        return "place " + ", ".join(pieces)


@dataclass(frozen=True)
class Gather(_Movement):
    """``out[i.., c..] = vector[index[i..], c..]``, and zero where the index is outside the vector.

    ``vector`` and ``index`` are inputs; the vector, which may be as large as memory, is read where
    the index points and nowhere else.  ``tables`` are inputs, too: those of an
    :class:`jaxmagma.primitives.assembly.Assembly` for the index of all elements, if there is one.
    The operation does not read them; its transpose does, which is ``atomic`` where the order of the
    additions is left to the device.
    """

    vector: int
    index: int
    tile: tuple[int, ...]
    tables: tuple[int, ...] = ()
    atomic: bool = False

    @property
    def operands(self) -> tuple[int, ...]:
        return (self.vector, self.index, *self.tables)

    def __repr__(self) -> str:
        return f"gather %{self.vector}[%{self.index}]"


Operation = Contract | Map | View | Place | Gather


def contraction(terms: Terms, output: str, sizes: Mapping[str, int]) -> Contract:
    """A product of tiles, with the extents of those labels that it has."""
    used = sorted(set(output).union(*(labels for _, labels in terms)))
    return Contract(tuple(terms), output, tuple((x, sizes[x]) for x in used))


def moved(
    operation: View | Place | Gather, numbers: Sequence[int] | Mapping[int, int]
) -> View | Place | Gather:
    """The same movement of other values."""
    if isinstance(operation, View):
        return replace(operation, operand=numbers[operation.operand])
    if isinstance(operation, Gather):
        return replace(
            operation,
            vector=numbers[operation.vector],
            index=numbers[operation.index],
            tables=tuple(numbers[x] for x in operation.tables),
        )
    pieces = tuple((numbers[value], offset, s) for value, offset, s in operation.pieces)
    return replace(operation, pieces=pieces)


def renumbered(operation: Operation, numbers: Sequence[int] | Mapping[int, int]) -> Operation:
    """The same operation of other values."""
    if isinstance(operation, View | Place | Gather):
        return moved(operation, numbers)
    terms = tuple([(numbers[value], labels) for value, labels in operation.terms])
    if terms == operation.terms:
        return operation
    if isinstance(operation, Map):
        return Map(operation.function, terms, operation.output, operation.sizes)
    return Contract(terms, operation.output, operation.sizes)


@dataclass(frozen=True)
class Output:
    """A value the program returns, as an array with the axes ``batch + tile``.

    Batch axes that the value depends on and ``batch`` does not name are summed over; one that
    ``batch`` names and the value does not depend on broadcasts.  One that ``is_complex`` has the
    last axis of the tile as real and imaginary parts.
    """

    value: int
    batch: tuple[int, ...]
    is_complex: bool = False


@dataclass(frozen=True)
class ElementProgram:
    """Inputs, operations and outputs of one element, and the number of batch axes."""

    batch_rank: int
    inputs: tuple[Input, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Output, ...]
    precision: str | None = field(default=None)

    def __post_init__(self) -> None:
        carried = {axis for operand in self.inputs for axis in operand.batch}
        if carried != set(range(self.batch_rank)):
            raise ValueError(f"batch axes {sorted(carried)} are not 0..{self.batch_rank - 1}")
        for number, operation in enumerate(self.operations, start=len(self.inputs)):
            if max(operation.operands, default=-1) >= number:
                raise ValueError(f"operation {number} uses a later value: {operation}")

    @cached_property
    def _hash(self) -> int:
        fields = (self.batch_rank, self.inputs, self.operations, self.outputs, self.precision)
        return hash(fields)

    def __hash__(self) -> int:
        return self._hash

    # What every value is.

    @cached_property
    def tiles(self) -> tuple[tuple[int, ...], ...]:
        """The tile shape of every value."""
        return tuple(x.tile for x in self.inputs) + tuple(x.tile for x in self.operations)

    @cached_property
    def batch(self) -> tuple[frozenset[int], ...]:
        """The batch axes every value depends on."""
        axes = [frozenset(operand.batch) for operand in self.inputs]
        for operation in self.operations:
            axes.append(frozenset().union(*(axes[value] for value in operation.operands)))
        return tuple(axes)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all values but indices."""
        return next((x.dtype for x in self.inputs if x.dtype.kind != "i"), self.inputs[0].dtype)

    @property
    def arguments(self) -> tuple[Input, ...]:
        """The inputs that arrive as arrays: all but the constants."""
        return tuple(operand for operand in self.inputs if operand.constant is None)

    # What it does to arrays.

    def batch_extents(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The extent of every batch axis, from the shapes of the arguments."""
        extents: dict[int, int] = {}
        for operand, shape in zip(self.arguments, shapes, strict=True):
            for axis, extent in zip(operand.batch, shape, strict=False):
                if extents.setdefault(axis, extent) != extent:
                    raise ValueError(f"batch axis {axis} is {extents[axis]} and {extent}")
        return tuple(extents[axis] for axis in range(self.batch_rank))

    def output_shapes(self, extents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(extents[axis] for axis in out.batch) + own
            for out, (own, _) in zip(self.outputs, self.stored_outputs, strict=True)
        )

    @property
    def stored_outputs(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each output of one element."""
        return [stored(self.tiles[x.value], self.dtype, x.is_complex) for x in self.outputs]

    def least_bytes(self, extents: Sequence[int]) -> int:
        """The least memory traffic: every input read once, every output written once."""

        def nbytes(batch: Iterable[int], tile: Iterable[int], dtype: np.dtype) -> int:
            return math.prod(extents[axis] for axis in batch) * math.prod(tile) * dtype.itemsize

        read = sum(nbytes(x.batch, x.tile, x.dtype) for x in self.arguments)
        written = sum(nbytes(x.batch, self.tiles[x.value], self.dtype) for x in self.outputs)
        return read + written

    def __str__(self) -> str:
        lines = []
        for number, operand in enumerate(self.inputs):
            kind = "constant" if operand.constant else "shared" if operand.shared else "batched"
            lines.append(f"%{number} = {kind} {operand.dtype}{list(operand.tile)}")
            if operand.batch:
                lines[-1] += f" over batch axes {list(operand.batch)}"
        for number, operation in enumerate(self.operations, start=len(self.inputs)):
            lines.append(f"%{number} = {operation!r} {list(operation.tile)}")
        for out in self.outputs:
            lines.append(f"return %{out.value} over batch axes {list(out.batch)}")
        return "\n".join(lines)
