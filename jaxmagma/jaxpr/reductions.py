"""Largest and smallest values, products, and order along an axis, value by value."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma import internals
from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles


# Values along an axis that are sorted alone, or with others; and exchanges for the largest ones.
_MOST_SORTED = 32
_MOST_SORTED_TOGETHER = 16
_MOST_EXCHANGES = _MOST_SORTED * (_MOST_SORTED - 1) // 2


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
    count, alone = reader.shape(operands[0])[axis], len(operands) == 1
    most = _MOST_SORTED if alone else _MOST_SORTED_TOGETHER
    if count > most or reader.dtype.kind == "c":
        raise Unsupported(f"sort of {count} values")
    rows = [list(reader.pieces(x, [axis])) for x in operands]
    are_numbers = [_are_numbers(x) for x in equation.invars]
    if alone and are_numbers[0]:
        return [reader.stack(_sorted_numbers(reader, rows[0]), axis)]

    def less(n: int, x: Read, y: Read) -> Read:
        return _less(reader, x, y, are_numbers[n])

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
                _exchange(reader, swap, row, k)
    return [reader.stack(row, axis) for row in rows]


def _sorted_numbers(reader: Tiles, row: list[Read]) -> list[Read]:
    """The same of numbers alone: infinity stands for NaN, and that is put at the end."""
    are_nan = [reader.emit("ne", x, x) for x in row]
    row = [reader.emit("select", nan, x, np.inf) for nan, x in zip(are_nan, row, strict=True)]
    for last in range(len(row) - 1, 0, -1):
        for k in range(last):
            _exchange(reader, reader.emit("lt", row[k + 1], row[k]), row, k)
    first: Read = np.asarray(float(len(row)))  # of them
    for nan in are_nan:
        first = reader.emit("sub", first, reader.emit("select", nan, 0.0, 1.0))
    places = (reader.emit("le", first, float(n)) for n in range(len(row)))
    return [reader.emit("select", nan, x, np.nan) for nan, x in zip(places, row, strict=True)]


def largest(reader: Tiles, equation: JaxprEqn, x: Tile) -> list[Read]:
    """The largest values, and their places: one after the other comes to the front.

    As in a sort, NaN is larger than all numbers, whatever its sign, and zeros are equal.
    """
    axis, most = equation.params["axis"], equation.params["k"]
    row = list(reader.pieces(x, [axis]))
    if not 0 < most * len(row) <= _MOST_EXCHANGES or reader.dtype.kind == "c":
        raise Unsupported(f"the {most} largest of {len(row)} values")
    places: list[Read] = [np.full(reader.shape(row[0]), float(n)) for n in range(len(row))]
    are_numbers = _are_numbers(equation.invars[0])
    for first in range(most):
        for k in reversed(range(first, len(row) - 1)):
            swap = _less(reader, row[k], row[k + 1], are_numbers)
            _exchange(reader, swap, row, k)
            _exchange(reader, swap, places, k)
    return [reader.stack(row[:most], axis), reader.stack(places[:most], axis)]


def search(reader: Tiles, equation: JaxprEqn, ordered: Read, x: Read) -> Read:
    """How many of some ordered values are less than others, or as large; a composite primitive."""
    primitive = equation.params["_prim"]
    side = internals.search_of(primitive)
    if side is None:
        raise Unsupported(f"{type(primitive).__name__} is not an operation of a kernel")
    values = reader.pieces(ordered, [0])
    if len(values) > _MOST_SORTED:
        raise Unsupported(f"a search in {len(values)} values")
    are_numbers = _are_numbers(equation.invars[0])
    count: Read = np.zeros(())
    for value in values:
        if side == "left":
            one = reader.emit("select", _less(reader, value, x, are_numbers), 0.0, 1.0)
        else:
            one = reader.emit("select", _less(reader, x, value, are_numbers), 1.0, 0.0)
        count = reader.emit("add", count, one)
    return count


def in_order(strictly: bool) -> Callable[..., Read]:
    """A rule of whether one value stands before another where they are sorted, as a search asks."""

    def rule(reader: Tiles, equation: JaxprEqn, x: Read, y: Read) -> Read:
        are_numbers = _are_numbers(equation.invars[0])
        if strictly:
            return _less(reader, x, y, are_numbers)
        return reader.emit("not", _less(reader, y, x, are_numbers))

    return rule


def _are_numbers(variable: Any) -> bool:
    """Not integers or truth values, which are never NaN."""
    return np.dtype(aval(variable).dtype).kind not in "biu"


def _less(reader: Tiles, x: Read, y: Read, are_numbers: bool) -> Read:
    """NaN is behind all others."""
    found = reader.emit("lt", x, y)
    if not are_numbers:
        return found
    only_y = reader.emit("and", reader.emit("eq", x, x), reader.emit("ne", y, y))
    return reader.emit("or", found, only_y)


def _exchange(reader: Tiles, swap: Read, row: list[Read], k: int) -> None:
    x, y = row[k], row[k + 1]
    row[k], row[k + 1] = reader.emit("select", swap, x, y), reader.emit("select", swap, y, x)
