"""What a step of a loop leaves as it was, though its jaxpr may make it anew.

The reverse derivative of a choice takes what is carried apart, into what is there where the choice
is one and where it is another, with zeros elsewhere, and adds that up again; that of a sum in
another shape has it in that shape and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.jaxpr.calls import inner_jaxpr
from jaxmagma.jaxpr.equations import aval, interpreted


@dataclass(frozen=True, eq=False)
class _Value:
    """One of which nothing is known but which one it is."""


@dataclass(frozen=True)
class _Repeated:
    """A value along other axes, too: the same one wherever that is done."""

    value: Any
    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class _Reshaped:
    """A value in another shape than its own."""

    value: Any
    own: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """A value where ``which`` is one of some cases, of so many, and zero where it is another."""

    value: Any
    which: Any
    cases: frozenset[int]
    count: int


_ZERO = _Value()


def kept(closed: ClosedJaxpr, consts: int, carry: int) -> set[int]:
    """Which of the values that a loop carries are the same after each step."""
    own = [_Value() for _ in closed.jaxpr.invars]
    results = interpreted(closed, own, _made)
    return {n for n in range(carry) if results[n] is own[consts + n]}


def _made(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    inner = inner_jaxpr(equation)
    if inner is not None:
        return interpreted(inner, operands, _made)
    rule = _RULES.get(equation.primitive.name)
    found = None if rule is None else rule(equation, [_known(x) for x in operands])
    return [_Value() for _ in equation.outvars] if found is None else [found]


def _known(operand: Any) -> Any:
    if isinstance(operand, _Value | _Repeated | _Reshaped | _Part):
        return operand
    is_number = isinstance(operand, int | float | np.generic | np.ndarray)
    return _ZERO if is_number and np.ndim(operand) == 0 and operand == 0 else _Value()


def _unchanged(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """At most its weak type changes."""
    (operand,), (made,) = equation.invars, equation.outvars
    return operands[0] if aval(operand).dtype == aval(made).dtype else None


def _repeated(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    if operands[0] is _ZERO:
        return _ZERO
    return _Repeated(operands[0], aval(equation.outvars[0]).shape, _axes(equation))


def _reshaped(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    if equation.params["dimensions"] is not None:
        return None
    (operand,), own = operands, aval(equation.invars[0]).shape
    if isinstance(operand, _Reshaped):
        operand, own = operand.value, operand.own
    return operand if own == aval(equation.outvars[0]).shape else _Reshaped(operand, own)


def _axes(equation: JaxprEqn) -> tuple[int, ...]:
    return tuple(int(x) for x in equation.params["broadcast_dimensions"])


def _selected(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    which, *cases = operands
    chosen = {x for x in cases if x is not _ZERO}
    if len(chosen) != 1:
        return None
    (value,) = chosen
    places = frozenset(n for n, x in enumerate(cases) if x is not _ZERO)
    return value if len(places) == len(cases) else _Part(value, which, places, len(cases))


def _added(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    left, right = operands
    if not (isinstance(left, _Part) and isinstance(right, _Part)) or left.cases & right.cases:
        return None
    cases = left.cases | right.cases
    both = _Part(left.value, left.which, cases, left.count)
    if _Part(right.value, right.which, cases, right.count) != both:
        return None
    return both.value if len(cases) == both.count else both


_RULES = {
    "add": _added,
    "add_any": _added,
    "broadcast_in_dim": _repeated,
    "convert_element_type": _unchanged,
    "copy": _unchanged,
    "reshape": _reshaped,
    "select_n": _selected,
}
