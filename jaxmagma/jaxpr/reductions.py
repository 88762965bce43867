"""Largest and smallest values, products, and order along an axis, value by value."""

from collections.abc import Callable

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles


_MOST_SORTED = 8


def reduction(function: str) -> Callable[..., Read]:
    def rule(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
        pieces = list(reader.pieces(x, equation.params["axes"]).reshape(-1))
        while len(pieces) > 1:
            pairs = zip(pieces[::2], pieces[1::2], strict=False)
            left = pieces[-1:] if len(pieces) % 2 else []
            pieces = [reader.emit(function, *pair) for pair in pairs] + left
        return pieces[0]

    return rule


def place_of(better: str) -> Callable[..., Read]:
    """The place of the first best value along an axis, as a number; NaN is best of all."""

    def rule(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
        if reader.dtype.kind == "c":
            raise Unsupported("complex numbers have no order")
        best, *others = reader.pieces(x, equation.params["axes"])
        place: Read = np.zeros(reader.shape(best))
        for n, piece in enumerate(others, start=1):
            wins = reader.emit(better, piece, best)
            if aval(equation.invars[0]).dtype != bool:
                first_nan = reader.emit(
                    "and", reader.emit("ne", piece, piece), reader.emit("eq", best, best)
                )
                wins = reader.emit("or", wins, first_nan)
            best = reader.emit("select", wins, best, piece)
            place = reader.emit("select", wins, place, float(n))
        return place

    return rule


def cumulative(function: str) -> Callable[..., Read]:
    def rule(reader: Tiles, equation: JaxprEqn, x: Tile) -> Read:
        axis = equation.params["axis"]
        pieces = list(reader.pieces(x, [axis]))
        if equation.params["reverse"]:
            pieces.reverse()
        for n in range(1, len(pieces)):
            pieces[n] = reader.emit(function, pieces[n - 1], pieces[n])
        if equation.params["reverse"]:
            pieces.reverse()
        return reader.stack(pieces, axis)

    return rule


def sort(reader: Tiles, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """A network that exchanges neighbours, and keeps the order of what is equal."""
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    count = reader.shape(operands[0])[axis]
    if count > _MOST_SORTED or reader.dtype.kind == "c":
        raise Unsupported(f"sort of {count} values")
    rows = [list(reader.pieces(x, [axis])) for x in operands]
    kinds = [np.dtype(aval(x).dtype).kind for x in equation.invars]

    def less(n: int, x: Read, y: Read) -> Read:
        """NaN is behind all others."""
        found = reader.emit("lt", x, y)
        if kinds[n] in "biu":
            return found
        only_y = reader.emit("and", reader.emit("eq", x, x), reader.emit("ne", y, y))
        return reader.emit("or", found, only_y)

    for last in range(count - 1, 0, -1):
        for k in range(last):
            swap = less(keys - 1, rows[keys - 1][k + 1], rows[keys - 1][k])
            for n in reversed(range(keys - 1)):
                before = less(n, rows[n][k + 1], rows[n][k])
                behind = less(n, rows[n][k], rows[n][k + 1])
                swap = reader.emit(
                    "or", before, reader.emit("and", reader.emit("not", behind), swap)
                )
            for row in rows:
                x, y = row[k], row[k + 1]
                row[k], row[k + 1] = (
                    reader.emit("select", swap, x, y),
                    reader.emit("select", swap, y, x),
                )
    return [reader.stack(row, axis) for row in rows]
