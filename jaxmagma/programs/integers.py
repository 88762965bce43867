"""How large integers may be: a program holds them as floating-point numbers, exact up to a size.

They come from numbers of things, from places in a tile and from operands, or are numbers without
their fractions; all of these have bounds, and what is made of them has bounds by interval
arithmetic.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


Bounds = tuple[int, int]  # the least and the largest value
Parameters = Mapping[str, Any]
Shape = Sequence[int]
# Of an equation's parameters, the shape of its first operand, and its operands: their bounds if
# they are integers or truth values, None if they are not.
Rule = Callable[[Parameters, Shape, Sequence[Bounds | None]], Bounds | None]


def union(bounds: Sequence[Bounds]) -> Bounds:
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def of_known(array: np.ndarray) -> Bounds:
    """The bounds of a known array of integers or truth values."""
    return (int(array.min()), int(array.max())) if array.size else (0, 0)


def is_integer(dtype: Any) -> bool:
    """Whether it is a dtype of integers, those of less than a byte among them, unknown to NumPy."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


def of_dtype(integer: Any) -> Bounds:
    """The bounds of all integers of a dtype."""
    info = jnp.iinfo(integer)
    return int(info.min), int(info.max)


def are_in(bounds: Bounds, others: Bounds) -> bool:
    return others[0] <= bounds[0] and bounds[1] <= others[1]


def largest(dtype: np.dtype) -> int:
    """An integer up to which all are numbers of ``dtype``, with room for a half more."""
    return 2 ** int(jnp.finfo(dtype).nmant)


def are_exact(bounds: Bounds, dtype: np.dtype) -> bool:
    """Whether such integers are exact as numbers of ``dtype``."""
    return are_in(bounds, (-largest(dtype), largest(dtype)))


def _corners(function: Callable[..., int]) -> Rule:
    """Of a function that is monotonic in each operand, or a product."""

    def rule(
        parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
    ) -> Bounds | None:
        known = [x for x in operands if x is not None]
        if len(known) < len(operands):
            return None  # of numbers that are no integers
        found = [function(*x) for x in itertools.product(*known)]
        return min(found), max(found)

    return rule


def _absolute(parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]) -> Bounds:
    low, high = operands[0] or (0, 0)
    return max(low, -high, 0), max(-low, high)


def _remainder(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    (low, high), (least, most) = (x or (0, 0) for x in operands)
    if least <= 0 <= most:
        return None  # by zero, JAX has something else than NaN
    largest = max(-least, most) - 1
    return max(-largest, min(low, 0)), min(largest, max(high, 0))


def _quotient(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    left, right = operands
    if left is None or right is None or right[0] <= 0 <= right[1]:
        return None  # by zero, JAX has minus one
    found = [abs(a) // abs(b) * (1 if a * b > 0 else -1) for a in left for b in right]
    return min(found), max(found)


def _masked(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    """Of an integer and one that is known and not negative."""
    for x in operands:
        if x is not None and x[0] == x[1] >= 0:
            return 0, x[1]
    return None


def _shifted_right(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    left, right = operands
    if left is None or right is None or right[0] < 0:
        return None
    found = [a >> b for a in left for b in right]
    return min(found), max(found)


def _shifted_left(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    left, right = operands
    if left is None or right is None or right[0] < 0 or right[1] >= 64:
        return None
    found = [a << b for a in left for b in right]
    return min(found), max(found)


def _total(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    if operands[0] is None:
        return None
    axes = parameters["axes"] if "axes" in parameters else (parameters["axis"],)
    count = math.prod(shape[axis] for axis in axes)
    low, high = operands[0]
    return min(count * low, low), max(count * high, high)


def _places(parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]) -> Bounds:
    return 0, max(math.prod(shape[axis] for axis in parameters["axes"]) - 1, 0)


def _ranked(
    parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    places = 0, max(shape[parameters["axis"]] - 1, 0)
    return union([x for x in (operands[0], places) if x is not None])


def _rows(parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]) -> Bounds:
    return 0, max(parameters.get("permutation_size", shape[-2:][0]) - 1, 0)


def _among(*positions: int | slice) -> Rule:
    """The result is made of values of some operands."""

    def rule(
        parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
    ) -> Bounds | None:
        found: list[Bounds | None] = []
        for x in positions:
            found += operands[x] if isinstance(x, slice) else operands[x : x + 1]
        known = [x for x in found if x is not None]
        return union(known) if known else None

    return rule


_FIRST, _ANY = _among(0), _among(slice(None))
# Of operations whose integers are those of operands.
_MOVES: dict[str, Rule] = {
    "select_n": _among(slice(1, None)),
    "dynamic_update_slice": _among(0, 1),
    **dict.fromkeys(
        ("scatter", "scatter-max", "scatter_max", "scatter-min", "scatter_min"), _among(0, 2)
    ),
    **dict.fromkeys(("clamp", "concatenate", "stack", "pad", "sort", "optimization_barrier"), _ANY),
    **dict.fromkeys(
        """
        broadcast_in_dim reshape squeeze transpose rev slice dynamic_slice gather tile split unstack
        copy copy_p stop_gradient convert_element_type reduce_max reduce_min cummax cummin
        """.split(),
        _FIRST,
    ),
}
_RULES: dict[str, Rule] = {
    "add": _corners(operator.add),
    "sub": _corners(operator.sub),
    "mul": _corners(operator.mul),
    "neg": _corners(operator.neg),
    "max": _corners(max),
    "min": _corners(min),
    "sign": _corners(lambda x: (x > 0) - (x < 0)),
    "abs": _absolute,
    "rem": _remainder,
    "div": _quotient,
    "and": _masked,
    "shift_left": _shifted_left,
    "shift_right_arithmetic": _shifted_right,
    "shift_right_logical": _shifted_right,
    "reduce_sum": _total,
    "cumsum": _total,
    "argmax": _places,
    "argmin": _places,
    "top_k": _ranked,
    "lu": _rows,
    "lu_pivots_to_permutation": _rows,
    **_MOVES,
}
# What is right of integers that are numbers of a program, however large they are.
_OF_ANY = frozenset(_MOVES) | {"max", "min", "sign", "argmax", "argmin", "top_k"}


def takes_any(name: str) -> bool:
    """Whether an operation is right of integers whose neighbours are no numbers of a program."""
    return name in _OF_ANY


def bounds(
    name: str, parameters: Parameters, shape: Shape, operands: Sequence[Bounds | None]
) -> Bounds | None:
    """The bounds of the integers that an operation makes, or None if none are known."""
    rule = _RULES.get(name)
    return None if rule is None else rule(parameters, shape, operands)


def decided(name: str, left: Bounds, right: Bounds) -> bool | None:
    """What a comparison gives whatever the integers are, or None if that depends on them."""
    if name in ("gt", "le"):
        # The other way round.
        found = decided("lt" if name == "gt" else "ge", right, left)
        return found
    if name in ("eq", "ne"):
        apart = left[1] < right[0] or right[1] < left[0]
        return name == "ne" if apart else None
    if name not in ("lt", "ge") or (right[0] <= left[1] and left[0] < right[1]):
        return None
    return (left[1] < right[0]) == (name == "lt")
