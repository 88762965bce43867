"""Whole powers that are known, as products.

``x ** jnp.arange(n)`` are the monomials of a polynomial, each of which is a product of others. A
number to the power of another is fifty times the work.
"""

from collections.abc import Mapping
from typing import Protocol

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
    """By squares, so that powers share them; a negative one by one over the value."""
    one = builder.constant(np.ones((), builder.dtype(term[0]))), ""
    if k == 0:  # of every element that the value is one of
        return builder.pointwise("first", [one, term], output, sizes)
    if k < 0:
        return _power(
            builder,
            (builder.pointwise("div", [one, term], output, sizes), output),
            -k,
            output,
            sizes,
        )
    if k == 1:
        return builder.relabel(*term, output, sizes)
    factors = [(k // 2, k // 2), (k - 1, 1)][k % 2]
    made = [(_power(builder, term, x, output, sizes), output) for x in factors]
    return builder.pointwise("mul", made, output, sizes)
