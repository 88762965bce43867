"""Pointwise functions of zeros, ones and known numbers, as what they are without computing.

A zero counts only where it is one by structure, because nothing was ever put there, or added:
infinity times a zero among values is no zero.

Small powers of two are the last factors: to multiply by one is exact, wherever that is done, but
for values at the ends of their range. So they meet, and most of them go: the gradient of a square
is twice a value, a strain half of a sum. Large ones stay: they keep values in their range.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxmagma.programs.functions import COMPARISONS, ROUNDINGS
from jaxmagma.programs.program import Input, Map, Operation, Terms


class Simpler(NamedTuple):
    """What an operation is instead: a function, or none, of these operands, times a number."""

    function: str | None
    terms: Terms
    factor: float = 1


ZERO = Simpler("zero", ())


class Values(Protocol):
    """What is known of the values of a program."""

    def known(self, value: int) -> np.ndarray | None: ...
    def is_zero(self, value: int) -> bool: ...
    def dtype(self, value: int) -> np.dtype: ...
    def operation(self, value: int) -> Input | Operation: ...
    def constant(self, array: np.ndarray) -> int: ...


def simpler(values: Values, function: str, terms: Terms) -> Simpler | None:
    """What a function of such operands is, if no operation or a simpler one is enough."""
    rule = _RULES.get(function)
    return None if rule is None else rule(values, terms)


def is_all(values: Values, value: int, number: int) -> bool:
    """Whether a value is a constant, all of whose entries are that number."""
    known = values.known(value)
    return known is not None and bool((known == number).all())


def one_number(array: np.ndarray) -> np.ndarray | None:
    """The number that every entry of an array is, to the last bit: zeros have signs."""
    flat = np.ravel(array)
    alike = flat.size and flat.tobytes() == flat.size * flat[:1].tobytes()
    return np.asarray(flat[0]) if alike else None


def _factor(values: Values, term: tuple[int, str]) -> tuple[np.ndarray, tuple[int, str]] | None:
    """The factor and the rest, if a value is something times a known number."""
    value, labels = term
    operation = values.operation(value)
    if not isinstance(operation, Map) or operation.function != "mul":
        return None
    for (number, _), (x, own) in (operation.terms, operation.terms[::-1]):
        factor = values.known(number)
        if factor is not None and not factor.shape and len(own) == len(labels):
            names = dict(zip(operation.output, labels, strict=True))
            return factor, (x, "".join(names[y] for y in own))
    return None


def _scaled(values: Values, term: tuple[int, str]) -> tuple[float, tuple[int, str]]:
    """A small power of two and the rest; one, if a value is no multiple of another one."""
    factor, rest = _factor(values, term) or (np.ones(()), term)
    return (float(factor), rest) if _is_power_of_two(factor) else (1.0, term)


# From there on a power of two is no small one.
_LARGE = 32


def _is_power_of_two(number: np.ndarray) -> bool:
    """Whether it is a small one; of complex numbers none is, for they multiply both parts."""
    if number.dtype.kind != "f":
        return False
    return 1 / _LARGE < float(number) < _LARGE and math.frexp(number)[0] == 0.5


# ---- A rule for each function --------------------------------------------------------------------


def _sum(values: Values, terms: Terms) -> Simpler | None:
    left, right = terms
    if values.is_zero(left[0]) and values.is_zero(right[0]):
        return ZERO
    if is_all(values, right[0], 0):
        return Simpler(None, [left])
    if is_all(values, left[0], 0):
        return Simpler(None, [right])
    if left == right and values.dtype(left[0]).kind == "f":
        return Simpler(None, [left], 2)
    return _of_scaled(values, "add", terms)


def _difference(values: Values, terms: Terms) -> Simpler | None:
    left, right = terms
    if values.is_zero(left[0]):
        return ZERO if values.is_zero(right[0]) else Simpler("neg", [right])
    if is_all(values, right[0], 0):
        return Simpler(None, [left])
    return _of_scaled(values, "sub", terms)


def _of_scaled(values: Values, function: str, terms: Terms) -> Simpler | None:
    """A sum or a difference of values with one factor."""
    (first, left), (second, right) = (_scaled(values, x) for x in terms)
    return Simpler(function, [left, right], first) if first == second != 1 else None


def _negative(values: Values, terms: Terms) -> Simpler | None:
    if values.is_zero(terms[0][0]):
        return ZERO
    negated = _operand_of("neg", values, terms[0])
    return None if negated is None else Simpler(None, [negated])


def _operand_of(function: str, values: Values, term: tuple[int, str]) -> tuple[int, str] | None:
    """What a value is this function of."""
    value, labels = term
    operation = values.operation(value)
    if not isinstance(operation, Map) or operation.function != function:
        return None
    ((operand, own),) = operation.terms
    names = dict(zip(operation.output, labels, strict=True))
    return operand, "".join(names[x] for x in own)


def _product(values: Values, terms: Terms) -> Simpler | None:
    if any(values.is_zero(x) for x, _ in terms):
        return ZERO
    for one, other in (terms, terms[::-1]):
        number = values.known(one[0])
        if number is None or number.shape:
            continue
        if number == 1:
            return Simpler(None, [other])
        scaled = _factor(values, other)
        if scaled is not None:
            factor, rest = scaled
            with np.errstate(all="ignore"):
                product = np.asarray(number * factor)
            if np.isfinite(product) and np.abs(product) >= jnp.finfo(product.dtype).tiny:
                return Simpler("mul", [(values.constant(product), ""), rest])
        return None
    (first, left), (second, right) = (_scaled(values, x) for x in terms)
    if first == second == 1 or not 1 / _LARGE < first * second < _LARGE:
        return None
    return Simpler("mul", [left, right], first * second)


def _quotient(values: Values, terms: Terms) -> Simpler | None:
    left, right = terms
    if values.is_zero(left[0]):
        return ZERO
    if is_all(values, right[0], 1):
        return Simpler(None, [left])
    divisor = values.known(right[0])
    if divisor is None or divisor.shape or not _is_power_of_two(divisor):
        return None
    return Simpler(None, [left], 1 / float(divisor))


def _choice(values: Values, terms: Terms) -> Simpler | None:
    condition, if_zero, if_not = terms
    which = values.known(condition[0])
    if if_zero == if_not:  # as what goes into a branch and has no derivative where it is not taken
        return Simpler(None, [if_zero])
    if which is not None and not which.shape:
        return Simpler(None, [if_not if which else if_zero])
    opposite = _operand_of("not", values, condition)
    return None if opposite is None else Simpler("select", [opposite, if_not, if_zero])


_TRUTHS = COMPARISONS | {"and", "or", "xor", "not", "is_finite"}


def _comparison_with(truth: int) -> Callable[[Values, Terms], Simpler | None]:
    """Of what is 1 or 0 already, as the number of a branch that a condition has become."""

    def rule(values: Values, terms: Terms) -> Simpler | None:
        for term, (number, _) in (terms, terms[::-1]):
            operation, known = values.operation(term[0]), values.known(number)
            if isinstance(operation, Map) and operation.function in _TRUTHS:
                if known is not None and not known.shape and known in (0, 1):
                    return Simpler(None if known == truth else "not", [term])
        return None

    return rule


def _rounding(function: str) -> Callable[[Values, Terms], Simpler | None]:
    def rule(values: Values, terms: Terms) -> Simpler | None:
        if values.is_zero(terms[0][0]):
            return ZERO
        operation = values.operation(terms[0][0])
        done = isinstance(operation, Map) and operation.function == function
        return Simpler(None, terms) if done else None

    return rule


_RULES: dict[str, Callable[[Values, Terms], Simpler | None]] = {
    "add": _sum,
    "sub": _difference,
    "neg": _negative,
    "mul": _product,
    "div": _quotient,
    "select": _choice,
    "eq": _comparison_with(1),
    "ne": _comparison_with(0),
    **{x: _rounding(x) for x in ROUNDINGS.values()},
}
