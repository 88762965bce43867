"""Whole powers that are known, as products.

``x ** jnp.arange(n)`` are the monomials of a polynomial, each of which is a product of others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxmagma.programs.program import Terms


# Larger powers have more roundings than ``pow``, and more of them are no components.
_LARGEST_POWER = 12
_MOST_POWERS = 32


class Builder(Protocol):
    """What puts a program together."""

    def known(self, value: int) -> np.ndarray | None: ...
    def dtype(self, value: int) -> np.dtype: ...
    def constant(self, array: np.ndarray) -> int: ...
    def index(self, value: int, axis: int, k: int) -> int: ...
    def stack(self, values: list[int], axis: int) -> int: ...
    def relabel(self, value: int, labels: str, output: str, sizes: Mapping[str, int]) -> int: ...
    def pointwise(
        self, function: str, terms: Terms, output: str, sizes: Mapping[str, int]
    ) -> int: ...


def whole_power(
    builder: Builder, terms: Terms, output: str, sizes: Mapping[str, int]
) -> int | None:
    """``pow`` of these, if the exponents are a few small whole numbers; None otherwise."""
    (base, labels), (exponent, own) = terms
    known = builder.known(exponent)
    if known is None or known.dtype.kind != "f" or known.size > _MOST_POWERS:
        return None
    if not (np.abs(known) <= _LARGEST_POWER).all() or (known != np.rint(known)).any():
        return None
    if not own:
        return _power(builder, (base, labels), int(known), output, sizes)
    # Component by component, along one axis after the other.
    along = own[0]
    axis, rest = labels.find(along), output.replace(along, "")
    parts = []
    for k in range(sizes[along]):
        part = (
            (base, labels)
            if axis < 0
            else (builder.index(base, axis, k), labels.replace(along, ""))
        )
        exponents = builder.index(exponent, 0, k), own[1:]
        parts.append(builder.pointwise("pow", [part, exponents], rest, sizes))
    return builder.stack(parts, output.index(along))


def _power(
    builder: Builder, term: tuple[int, str], k: int, output: str, sizes: Mapping[str, int]
) -> int:
    def emit(function: str, *operands: Any) -> tuple[int, str]:
        dtype = builder.dtype(term[0])
        terms = [
            (builder.constant(np.asarray(x, dtype)), "") if isinstance(x, float) else x
            for x in operands
        ]
        return builder.pointwise(function, terms, output, sizes), output

    if k == 0:  # of every element that the value is one of
        return emit("first", 1.0, term)[0]
    made, labels = integer_power(emit, term, k)
    return builder.relabel(made, labels, output, sizes)


def integer_power(emit: Callable[..., Any], base: Any, y: int) -> Any:
    """By squares, which powers share; operations and their operands go through ``emit``."""
    if y < 0:
        # Not one over the power, whose derivative at zero is infinity times zero.
        return integer_power(emit, emit("div", 1.0, base), -y)
    result = None
    while y:
        if y & 1:
            result = base if result is None else emit("mul", result, base)
        y >>= 1
        if y:
            base = emit("mul", base, base)
    return 1.0 if result is None else result


def polynomial(emit: Callable[..., Any], x: Any, coefficients: Sequence[Any]) -> Any:
    """By Horner's rule, the constant coefficient first."""
    *others, made = coefficients
    for coefficient in reversed(others):
        made = emit("add", emit("mul", made, x), coefficient)
    return made
