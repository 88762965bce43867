"""What rules make values with: tiles of a builder, or arrays that are known."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmagma.jaxpr.equations import Unsupported
from jaxmagma.programs import integers, reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import COMPARISONS, COMPLEX_FUNCTIONS, evaluate
from jaxmagma.programs.labels import letters, repeated
from jaxmagma.programs.program import Output
from jaxmagma.programs.simpler import one_number


# Values taken apart, or small matrices multiplied, one by one.
MOST_PIECES = 64
# Of a matrix, which is taken apart to be factorised.
MOST_COMPONENTS = 144
# Places of an array that values are put into; beyond the above, if half of it is known: a matrix
# that makes strains of displacements has zeros there.
MOST_PLACES = 512
LARGEST_COMPONENT = 4


@dataclass(frozen=True)
class Tile:
    """A value of the builder, as a variable of the jaxpr; it has values, at least one.

    In a program of real numbers, of one that ``is_complex`` the parts are along a last axis.
    """

    value: int
    is_complex: bool = False


Read = Tile | np.ndarray  # of a variable: in the program, or known


def uniform(read: np.ndarray) -> np.ndarray:
    """A known array as one number, if all of its numbers are that."""
    number = one_number(read)
    return read if number is None else number


class Tiles(ABC):
    """Values in ``builder``, or known; all in it but indices are of ``dtype``."""

    def __init__(self, builder: Builder, dtype: np.dtype) -> None:
        self.builder = builder
        self.dtype = dtype
        self._bounds: dict[int, integers.Bounds] = {}  # of the values that are integers

    def value(self, read: Read) -> int:
        if isinstance(read, Tile):
            return read.value
        array = np.asarray(read)
        if array.dtype.kind == "c" != self.dtype.kind:
            raise Unsupported(f"a number of {array.dtype} in a program of {self.dtype}")
        made = array.astype(self.dtype, copy=False)
        if integers.is_integer(array.dtype) and not np.array_equal(
            made.real.astype(array.dtype), array
        ):
            raise Unsupported(f"an integer that is no number of {self.dtype}")
        return self.builder.constant(made)

    def shape(self, read: Read) -> tuple[int, ...]:
        if not isinstance(read, Tile):
            return np.shape(read)
        tile = self.builder.tile(read.value)
        return tile[:-1] if read.is_complex else tile

    def emit(self, function: str, *operands: Any) -> Read:
        """A pointwise function of tiles of equal shape, constants and scalars."""
        if not any(isinstance(x, Tile) for x in operands):
            with jax.ensure_compile_time_eval():
                return np.asarray(
                    evaluate(function, *(np.asarray(x, self.dtype) for x in operands))
                )
        if self.dtype.kind == "c" and function not in COMPLEX_FUNCTIONS:
            raise Unsupported(f"{function} of complex numbers is not an operation of a kernel")
        if function in COMPARISONS:
            values = iter(self.builder.compared([x.value for x in operands if isinstance(x, Tile)]))
            operands = tuple(Tile(next(values)) if isinstance(x, Tile) else x for x in operands)
        # Ranks are equal, but for scalars; an extent may be one where others are larger.
        shapes = [self.shape(x) for x in operands]
        alike = all(x == shapes[0] for x in shapes)
        tile = shapes[0] if alike else np.broadcast_shapes(*shapes)
        operands = tuple(x if isinstance(x, Tile) else uniform(x) for x in operands)
        axis = self._taken_apart(function, operands, tile)
        if axis is not None:
            parts = []
            for k in range(tile[axis]):
                shapes = [self.shape(x) for x in operands]
                at = [min(k, shape[axis] - 1) if shape else 0 for shape in shapes]
                pairs = zip(operands, at, strict=True)
                own = [self.index(x, axis, n) if self.shape(x) else x for x, n in pairs]
                parts.append(self.emit(function, *own))
            return self.stack(parts, axis)
        chosen = self._chosen(function, operands)
        if chosen is not None:
            return self.spread(chosen, tile)
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        terms = [self._labelled(x, tile, labels) for x in operands]
        return Tile(self.builder.pointwise(function, terms, labels, sizes))

    def _labelled(self, x: Read, tile: Sequence[int], labels: str) -> tuple[int, str]:
        """A value that broadcasts to a tile, without axes of one place there, and its labels."""
        shape, own = self.shape(x), labels if self.shape(x) else ""
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1 != tile[axis]:
                x, own = self.index(x, axis, 0), own[:axis] + own[axis + 1 :]
        return self.value(x), own

    def spread(self, x: Read, tile: tuple[int, ...]) -> Read:
        """A value that broadcasts to a tile, as one of that shape."""
        if not isinstance(x, Tile):
            return np.broadcast_to(x, tile)
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        return Tile(self.builder.relabel(*self._labelled(x, tile, labels), labels, sizes))

    def _taken_apart(
        self, function: str, operands: Sequence[Read], tile: tuple[int, ...]
    ) -> int | None:
        """An axis along which a function is one of components, because of what is known.

        A table beside a stack of components is one number for each; a mask, as that of a triangle,
        says which components there are.
        """
        tables = [x for x in operands if not isinstance(x, Tile) and np.ndim(x)]
        if not tables:
            return None
        for x in operands:
            axis = self.builder.stacked(x.value) if isinstance(x, Tile) else None
            if axis is not None and tile[axis] == self.shape(x)[axis]:
                return axis
        if function == "select" and not isinstance(operands[0], Tile):
            mask = np.asarray(operands[0])
            for axis, extent in enumerate(mask.shape):
                if 1 < extent <= LARGEST_COMPONENT and (mask != mask.take([0], axis)).any():
                    return axis
        return None

    def _masked(self, chosen: Read) -> Read:
        """What a known mask says is there: where it leaves zeros, nothing, as in a triangle."""
        number = not isinstance(chosen, Tile) and np.ndim(chosen) == 0
        if number and np.asarray(chosen).dtype.kind == "f" and chosen == 0:
            return Tile(self.builder.zero((), self.dtype))
        return chosen

    def _chosen(self, function: str, operands: Sequence[Read]) -> Read | None:
        """The operand that is the result whatever the others are, if it is known to be."""
        known = [not isinstance(x, Tile) and np.ndim(x) == 0 for x in operands]
        if function in ("and", "or") and any(known):
            n = known.index(True)
            decides = bool(operands[n]) == (function == "or")
            return operands[n if decides else 1 - n]
        if function != "select":
            return None
        which, *cases = operands
        if known[0]:
            return self._masked(cases[int(which != 0)])
        alike = (
            len({np.asarray(x, self.dtype).tobytes() for x in cases}) == 1 if all(known[1:]) else 0
        )
        return cases[0] if alike else None

    @abstractmethod
    def jaxpr(self, closed: ClosedJaxpr, arguments: Sequence[Read]) -> list[Read]:
        """The results of a jaxpr inside of an equation."""

    def bounds(self, read: Read, dtype: Any) -> integers.Bounds | None:
        """The least and the largest of some integers or truth values."""
        if np.dtype(dtype).kind == "b":
            return 0, 1
        if isinstance(read, Tile):
            return self._bounds.get(read.value)
        return integers.of_known(read) if integers.is_integer(read.dtype) else None

    def bounded(self, tile: Tile, bounds: integers.Bounds) -> Tile:
        """A tile of integers, of which that is known."""
        known = self._bounds.get(tile.value)
        if known is not None:  # the same value, of which another line may know less
            bounds = max(known[0], bounds[0]), min(known[1], bounds[1])
        self._bounds[tile.value] = bounds
        return tile

    # ---- Taking tiles apart ----------------------------------------------------------------------

    def index(self, read: Read, axis: int, k: int) -> Read:
        if not isinstance(read, Tile):
            return np.take(read, k, axis)
        made = Tile(self.builder.index(read.value, axis, k))
        if read.value in self._bounds:
            self._bounds[made.value] = self._bounds[read.value]
        return made

    def slice(self, read: Read, axis: int, start: int, count: int) -> Read:
        if not isinstance(read, Tile):
            return np.take(read, range(start, start + count), axis)
        tile = self.shape(read)
        if not count == 1 < tile[axis]:
            return Tile(self.builder.slice(read.value, axis, start, 1, count))
        # One place along an axis is a component.
        part = self.builder.index(read.value, axis, start)
        return Tile(self.builder.reshape(part, (*tile[:axis], 1, *tile[axis + 1 :])))

    def known(self, read: Read) -> Read:
        """What a value is, if it is known."""
        constant = self.builder.known(read.value) if isinstance(read, Tile) else None
        return read if constant is None else constant

    def array(self, read: Read, dtype: np.dtype) -> np.ndarray:
        """The array that a value is in JAX which depends on constants alone."""
        if not isinstance(read, Tile):
            return np.asarray(read)
        program = self.builder.build([Output(read.value, ())]).program
        # Numbers as arrays: of those of NumPy JAX makes values that it traces, in a derivative.
        known = [x.constant.array for x in program.inputs if x.constant is not None]
        inputs = tuple(replace(x, constant=None) for x in program.inputs)
        with jax.ensure_compile_time_eval():
            arrays = map(jax.device_put, known)
            (array,) = reference.evaluate(replace(program, inputs=inputs), *arrays)
            return np.asarray(array).astype(dtype)

    def relabel(self, read: Read, labels: str, output: str, tile: Sequence[int]) -> Read:
        """A value with axes ``labels``, transposed and repeated as a tile with axes ``output``."""
        sizes = dict(zip(output, tile, strict=True))
        if isinstance(read, Tile):
            return Tile(self.builder.relabel(read.value, labels, output, sizes))
        return repeated(read, labels, output, tile)

    def components(self, read: Read, axis: int) -> Read:
        """The same value, stacked of its components along an axis."""
        count = self.shape(read)[axis]
        if not isinstance(read, Tile) or count == 1:
            return read
        parts = [self.builder.index(read.value, axis, k) for k in range(count)]
        return Tile(self.builder.stack(parts, axis))

    def stack(self, reads: Sequence[Read], axis: int) -> Read:
        if not any(isinstance(x, Tile) for x in reads):
            return np.stack([np.asarray(x) for x in reads], axis)
        return Tile(self.builder.stack([self._repeated(x) for x in reads], axis))

    def _repeated(self, read: Read) -> int:
        """The value, in which a number that is the same everywhere is one constant."""
        if isinstance(read, Tile) or not np.ndim(number := uniform(read)) == 0 != np.ndim(read):
            return self.value(read)
        labels = letters(np.ndim(read))
        sizes = dict(zip(labels, np.shape(read), strict=True))
        return self.builder.relabel(self.value(number), "", labels, sizes)

    def pieces(self, read: Read, axes: Sequence[int], most: int = MOST_PIECES) -> np.ndarray:
        """The value at every place along some axes, an array of objects."""
        shape = self.shape(read)
        count = math.prod(shape[axis] for axis in axes)
        if count > most:
            raise Unsupported(f"it takes a value apart into {count} pieces")
        order = sorted(range(len(axes)), key=lambda n: axes[n])
        pieces: dict[tuple[int, ...], Read] = {(): read}
        for done, n in enumerate(order):
            pieces = {
                (*at, k): self.index(piece, axes[n] - done, k)
                for at, piece in pieces.items()
                for k in range(shape[axes[n]])
            }
        found = np.empty([shape[axes[n]] for n in order], object)
        for at, piece in pieces.items():
            found[at] = piece
        return found.transpose(np.argsort(order))

    def in_order(self, read: Read, axes: Sequence[int]) -> Read:
        """A value whose axes are ``axes`` of what is wanted, with its axes in order."""
        order = [axes.index(n) for n in range(len(axes))]
        if not isinstance(read, Tile):
            return np.transpose(read, order)
        return Tile(self.builder.transpose(read.value, order))

    def reshaped(self, read: Read, shape: tuple[int, ...]) -> Read:
        if not isinstance(read, Tile):
            return np.reshape(read, shape)
        return Tile(self.builder.reshape(read.value, shape))

    def assembled(self, pieces: np.ndarray) -> Read:
        """Equal tiles as one, whose leading axes are those of the array they are in."""
        if pieces.ndim == 0:
            piece: Read = pieces.item()
            return piece
        return self.stack([self.assembled(np.asarray(x, object)) for x in pieces], 0)
