"""Factorisations of small matrices, of which :mod:`jaxmagma.programs.linalg` has the algorithms."""

import operator
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import Unsupported
from jaxmagma.jaxpr.tiles import LARGEST_COMPONENT, MOST_COMPONENTS, Read, Tile, Tiles, uniform
from jaxmagma.programs import linalg
from jaxmagma.programs.labels import letters


# Values that a factorisation keeps: what a thread has registers for, of nine rows, or twelve of a
# triangle.
_MOST_VALUES = 81
# Right sides that are solved one by one, as the columns of an inverse are.
_FEW_SIDES = 6


def _matrix(
    reader: Tiles, x: Read, name: str, kept: Callable[[int, int], int] = operator.mul
) -> linalg.Matrix:
    """The components along the last two axes; so many are ``kept`` of so many rows and columns."""
    *lead, rows, columns = reader.shape(x)
    if kept(rows, columns) > _MOST_VALUES:
        raise Unsupported(f"{name} of {rows} x {columns} matrices")
    return _numbers(reader, x, (len(lead), len(lead) + 1))


def _triangle(reader: Tiles, x: Read, name: str) -> linalg.Matrix:
    return _matrix(reader, x, name, lambda rows, _: rows * (rows + 1) // 2)


def _iterated(reader: Tiles, x: Read, name: str) -> linalg.Matrix:
    """All pairs of rows are rotated, several times."""
    *_, rows, columns = reader.shape(x)
    if max(rows, columns) > LARGEST_COMPONENT:
        raise Unsupported(f"{name} of {rows} x {columns} matrices")
    return _matrix(reader, x, name)


def _numbers(reader: Tiles, x: Read, axes: Sequence[int]) -> linalg.Matrix:
    pieces = reader.pieces(x, axes, MOST_COMPONENTS)
    found = np.empty(pieces.shape, object)
    for at, piece in np.ndenumerate(pieces):
        known = reader.known(piece)
        value = known if isinstance(known, Tile) else uniform(known)
        found[at] = linalg.Number(reader.emit, value)
    return found


def _joined(reader: Tiles, numbers: np.ndarray, lead: tuple[int, ...]) -> Read:
    """Numbers as one value, with their axes behind those ahead of the components."""
    if numbers.ndim:
        return reader.stack([_joined(reader, np.asarray(x), lead) for x in numbers], len(lead))
    return reader.spread(numbers.item().value, lead)


def lu(reader: Tiles, equation: JaxprEqn, x: Read) -> list[Read]:
    lead = reader.shape(x)[:-2]
    return [_joined(reader, y, lead) for y in linalg.lu(_matrix(reader, x, "lu"))]


def permutation(reader: Tiles, equation: JaxprEqn, pivots: Read) -> Read:
    lead, size = reader.shape(pivots)[:-1], equation.params["permutation_size"]
    if size * size > _MOST_VALUES:
        raise Unsupported(f"a permutation of {size} rows")
    numbers = _numbers(reader, pivots, (len(lead),))
    return _joined(reader, linalg.permutation(numbers, size), lead)


def triangular_solve(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    p = equation.params
    if reader.dtype.kind == "c":
        raise Unsupported("triangular_solve of complex numbers")
    matrix, lower, lead = _triangle(reader, a, "triangular_solve"), p["lower"], reader.shape(b)[:-2]
    if p["transpose_a"] == p["left_side"]:  # X A = B is the same as Aᵀ Xᵀ = Bᵀ
        matrix, lower = matrix.T, not lower
    # So does BLAS's reference: of a singular matrix the rest is what NumPy has.
    without_zeros = p["left_side"] and not p["transpose_a"]
    axis = len(lead) if p["left_side"] else len(lead) + 1
    other = 2 * len(lead) + 1 - axis
    many = reader.shape(b)[other]
    if many <= max(_FEW_SIDES, len(matrix)):
        right = _numbers(reader, b, (axis, other) if axis < other else (other, axis))
        right = right if p["left_side"] else right.T
        x = linalg.triangular_solve(matrix, right, lower, p["unit_diagonal"], without_zeros)
        return _joined(reader, x if p["left_side"] else x.T, lead)
    # Of many right sides all are solved at once.
    for at, number in np.ndenumerate(matrix):
        value = reader.spread(number.value, lead)
        labels = letters(len(lead) + 1)
        value = reader.relabel(value, labels[:-1], labels, (*lead, many))
        matrix[at] = linalg.Number(reader.emit, value)
    right = _numbers(reader, b, (axis,))[:, None]
    x = linalg.triangular_solve(matrix, right, lower, p["unit_diagonal"], without_zeros)[:, 0]
    values = [reader.spread(y.value, (*lead, many)) for y in x]
    return reader.stack(values, axis)


def cholesky(reader: Tiles, equation: JaxprEqn, x: Read) -> Read:
    made = linalg.cholesky(_triangle(reader, x, "cholesky"))
    return _joined(reader, made, reader.shape(x)[:-2])


def qr(reader: Tiles, equation: JaxprEqn, x: Read) -> list[Read]:
    full = equation.params["full_matrices"]

    def kept(rows: int, columns: int) -> int:
        return rows * (columns + (rows if full else min(rows, columns)))

    made = linalg.qr(_matrix(reader, x, "qr", kept), full, reader.dtype)
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in made]


def eigh(reader: Tiles, equation: JaxprEqn, x: Read) -> list[Read]:
    made = linalg.eigh(_iterated(reader, x, "eigh"), equation.params["lower"], reader.dtype)
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in made]


def svd(reader: Tiles, equation: JaxprEqn, x: Read) -> list[Read]:
    vectors, full = equation.params["compute_uv"], equation.params["full_matrices"]
    u, values, vt = linalg.svd(_iterated(reader, x, "svd"), vectors, full, reader.dtype)
    wanted = [values, u, vt] if vectors else [values]
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in wanted]
