"""What a step of a loop adds to what it carries, however it is written.

A step that adds, subtracts, adds to a part, or chooses whether it adds makes of what is carried
that, and a term that does not depend on it. So the step is computed with a sum in the place of each
such value: what is carried as it is, and what has been added to it so far. An operation that is
more than that is none of a sum. Before anything is added, a step may read some of it, and write
there (:mod:`jaxmagma.jaxpr.written`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.calls import inner_jaxpr
from jaxmagma.jaxpr.equations import Unsupported, applied, aval, interpreted
from jaxmagma.jaxpr.written import Reading, Written, written


# What puts values elsewhere, whatever they are.
_MOVES = frozenset(
    """
    broadcast_in_dim concatenate copy reshape rev slice split squeeze stack transpose unstack
    """.split()
)


_READS = frozenset({"dynamic_slice", "gather"})
_WRITES = frozenset({"dynamic_update_slice", "scatter"})


@dataclass(frozen=True, eq=False)
class Sum:
    """Numbers that are carried, and what has been added to them.

    Attributes:
      carried: which of the values that the loop carries they are of.
      places: where each of them is there.
      reading: what a step has read of them.
      added: an array; None before anything is.
    """

    carried: int
    places: np.ndarray
    reading: Reading
    added: jax.Array | None = None

    @classmethod
    def before(cls, carried: int, given: Any) -> "Sum":
        """What a step begins with."""
        return cls(carried, np.arange(given.size).reshape(given.shape), Reading(given, []))

    @property
    def is_untouched(self) -> bool:
        given = self.reading.given
        places = np.arange(given.size).reshape(given.shape)
        return self.added is None and np.array_equal(self.places, places)

    def term(self, own: Any) -> jax.Array:
        """What a step adds to the whole of what is carried, if that is all it does."""
        places = np.arange(own.size).reshape(own.shape)
        if not np.array_equal(self.places, places):
            raise Unsupported("a loop that moves what it adds to")
        return self.added_or_zeros(own.dtype)

    def added_or_zeros(self, dtype: Any) -> jax.Array:
        return jnp.zeros(self.places.shape, dtype) if self.added is None else self.added

    def plus(self, term: jax.Array) -> "Sum":
        shape = np.broadcast_shapes(self.places.shape, term.shape)
        added = jnp.broadcast_to(term if self.added is None else self.added + term, shape)
        return replace(self, places=np.broadcast_to(self.places, shape), added=added)


def with_sums(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation some of whose operands may be sums, by plain JAX.

    Raises ``Unsupported`` if it does more with one of them than adding something.
    """
    if not any(isinstance(x, Sum | Written) for x in operands):
        return applied(equation, operands)
    inner = inner_jaxpr(equation)
    if inner is not None:
        return interpreted(inner, operands, with_sums)
    name = equation.primitive.name
    if name in _READS | _WRITES and _is_untouched_alone(operands):
        first, *others = operands
        if name in _READS:
            return first.reading.read(equation, others)
        return [written(equation, first.carried, others)]
    if name in _MOVES:
        return _moved(equation, operands)
    rule = _RULES.get(name)
    if rule is None:
        raise Unsupported(f"{name} of what a loop carries")
    return [rule(equation, *operands)]


def _is_untouched_alone(operands: Sequence[Any]) -> bool:
    first, *others = operands
    return (
        isinstance(first, Sum)
        and first.is_untouched
        and not any(isinstance(x, Sum | Written) for x in others)
    )


def _plus(equation: JaxprEqn, left: Any, right: Any) -> Sum:
    total, term = (left, right) if isinstance(left, Sum) else (right, left)
    return _sum(total).plus(_term(term))


def _minus(equation: JaxprEqn, total: Any, term: Any) -> Sum:
    return _sum(total).plus(-_term(term))


def _scattered(equation: JaxprEqn, total: Any, where: Any, updates: Any) -> Sum:
    total, where, updates = _sum(total), _term(where), _term(updates)
    # To zeros, so that what goes elsewhere and what is not there at all is none of it.
    zeros = jnp.zeros(total.places.shape, updates.dtype)
    (term,) = applied(equation, [zeros, where, updates])
    return total.plus(term)


def _selected(equation: JaxprEqn, which: Any, *cases: Any) -> Sum:
    """A choice between sums of the same: of what has not been added nothing counts."""
    own = aval(equation.outvars[0])
    first, *others = map(_sum, cases)
    for x in others:
        if x.carried != first.carried or not np.array_equal(x.places, first.places):
            raise Unsupported("a choice between what a loop carries")
    added = [x.added_or_zeros(own.dtype) for x in (first, *others)]
    (chosen,) = applied(equation, [_term(which), *added])
    return replace(first, added=chosen)


def _converted(equation: JaxprEqn, total: Any) -> Sum:
    """Only its weak type may change."""
    (operand,), (made,) = equation.invars, equation.outvars
    if aval(operand).dtype != aval(made).dtype:
        raise Unsupported("a loop that rounds its sum")
    return _sum(total)


def _moved(equation: JaxprEqn, operands: Sequence[Any]) -> list[Sum]:
    totals = [_sum(x) for x in operands]
    if len({x.carried for x in totals}) > 1:
        raise Unsupported("a loop that puts together what it carries")
    dtype = aval(equation.outvars[0]).dtype
    with jax.ensure_compile_time_eval():
        places = map(np.asarray, applied(equation, [x.places for x in totals]))
    if all(x.added is None for x in totals):
        return [replace(totals[0], places=x) for x in places]
    added = applied(equation, [x.added_or_zeros(dtype) for x in totals])
    pairs = zip(places, added, strict=True)
    return [replace(totals[0], places=x, added=y) for x, y in pairs]


def _sum(operand: Any) -> Sum:
    if not isinstance(operand, Sum):
        raise Unsupported("something else in the place of what a loop carries")
    return operand


def _term(operand: Any) -> Any:
    if isinstance(operand, Sum | Written):
        raise Unsupported("a term that depends on the sum")
    return operand


_RULES: dict[str, Callable[..., Sum]] = {
    "add": _plus,
    "add_any": _plus,
    "sub": _minus,
    "scatter-add": _scattered,
    "scatter_add": _scattered,
    "scatter-sub": _scattered,
    "scatter_sub": _scattered,
    "select_n": _selected,
    "convert_element_type": _converted,
}
