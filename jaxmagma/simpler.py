"""Pointwise functions of zeros, ones and known numbers, as what they are without computing.

A zero counts only where it is one by structure, because nothing was ever put there, or added:
infinity times a zero among values is no zero.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxmagma.program import Map, Terms


if TYPE_CHECKING:
    from jaxmagma.builder import Builder

# What an operation is instead: a function, or none, of these operands; None if nothing is simpler.
Simpler = tuple[str | None, Terms] | None
ZERO: Simpler = ("zero", ())


def simpler(
    builder: "Builder",
    function: str,
    terms: list[tuple[int, str]],
    output: str,
    sizes: Mapping[str, int],
) -> int | None:
    """What a function of such operands is, if no operation or a simpler one is enough.

    An operand all of whose entries are one number becomes that number among the terms.
    """
    for position, (value, labels) in enumerate(terms):
        known = builder.known(value)
        if known is not None and known.size > 1 and (known == known.flat[0]).all():
            terms[position] = builder.constant(known.flat[0]), labels[:0]
    chosen = _RULES[function](builder, terms) if function in _RULES else None
    if chosen is None:
        return None
    if chosen is ZERO:
        return builder.zero(tuple([sizes[x] for x in output]), builder.dtype(terms[0][0]))
    name, operands = chosen
    if builder.summing and not _batches(builder, terms) <= _batches(builder, operands):
        return None
    if name is not None:
        return builder.pointwise(name, operands, output, sizes)
    ((value, labels),) = operands
    return builder.relabel(value, labels, output, sizes)


def _batches(builder: "Builder", terms: Terms) -> frozenset[int]:
    return frozenset().union(*(builder.batch(x) for x, _ in terms))


def _is_all(builder: "Builder", value: int, number: int) -> bool:
    """Whether a value is a constant, all of whose entries are that number."""
    known = builder.known(value)
    return known is not None and bool((known == number).all())


def _factor(builder: "Builder", term: tuple[int, str]) -> tuple[np.ndarray, tuple[int, str]] | None:
    """The factor and the rest, if a value is something times a known number."""
    value, labels = term
    operation = builder.operation(value)
    if not isinstance(operation, Map) or operation.function != "mul":
        return None
    for (number, _), (x, own) in (operation.terms, operation.terms[::-1]):
        factor = builder.known(number)
        if factor is not None and not factor.shape and len(own) == len(labels):
            names = dict(zip(operation.output, labels, strict=True))
            return factor, (x, "".join(names[y] for y in own))
    return None


# ---- A rule for each function --------------------------------------------------------------------


def _sum(builder: "Builder", terms: Terms) -> Simpler:
    left, right = terms
    if builder.is_zero(left[0]) and builder.is_zero(right[0]):
        return ZERO
    if _is_all(builder, right[0], 0):
        return None, [left]
    return (None, [right]) if _is_all(builder, left[0], 0) else None


def _difference(builder: "Builder", terms: Terms) -> Simpler:
    left, right = terms
    if builder.is_zero(left[0]):
        return ZERO if builder.is_zero(right[0]) else ("neg", [right])
    return (None, [left]) if _is_all(builder, right[0], 0) else None


def _negative(builder: "Builder", terms: Terms) -> Simpler:
    ((value, labels),) = terms
    if builder.is_zero(value):
        return ZERO
    operation = builder.operation(value)
    if not isinstance(operation, Map) or operation.function != "neg":
        return None
    ((negated, own),) = operation.terms
    names = dict(zip(operation.output, labels, strict=True))
    return None, [(negated, "".join(names[x] for x in own))]


def _product(builder: "Builder", terms: Terms) -> Simpler:
    for one, other in (terms, terms[::-1]):
        number = builder.known(one[0])
        if builder.is_zero(one[0]):
            return ZERO
        if number is None or number.shape:
            continue
        if number == 1:
            return None, [other]
        scaled = _factor(builder, other)
        if scaled is not None:
            factor, rest = scaled
            with np.errstate(all="ignore"):
                product = np.asarray(number * factor)
            if np.isfinite(product) and np.abs(product) >= jnp.finfo(product.dtype).tiny:
                return "mul", [(builder.constant(product), ""), rest]
    return None


def _quotient(builder: "Builder", terms: Terms) -> Simpler:
    left, right = terms
    if builder.is_zero(left[0]):
        return ZERO
    return (None, [left]) if _is_all(builder, right[0], 1) else None


def _choice(builder: "Builder", terms: Terms) -> Simpler:
    which = builder.known(terms[0][0])
    if which is None or which.shape:
        return None
    return None, [terms[2] if which else terms[1]]


_RULES: dict[str, Callable[["Builder", Terms], Simpler]] = {
    "add": _sum,
    "sub": _difference,
    "neg": _negative,
    "mul": _product,
    "div": _quotient,
    "select": _choice,
}
