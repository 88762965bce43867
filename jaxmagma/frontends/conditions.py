"""Which values differ from element to element, and conditions on these, as ``vmap`` has both.

Of a condition that is the same for all elements one branch runs, and its derivative is its own.  Of
others all branches do, and ``vmap`` selects; before, it selects what goes into each, so that a
branch that is not taken has no derivative at all, be it infinite.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxmagma.jaxpr import (
    applied,
    aval,
    has_own_rule,
    inner_jaxpr,
    interpreted,
    is_pure,
    scan_counts,
)


class Kind(IntEnum):
    """What is known of a value; of an operation's operands the largest is that of its results."""

    KNOWN = 0  # when the function is read
    UNSURE = 1  # the same for all elements, for all we know
    MAPPED = 2


Kinds = Sequence[Kind]


def results(equation: JaxprEqn, operands: Kinds) -> list[Kind]:
    """What the results of an equation are."""
    name, largest = equation.primitive.name, max(operands, default=Kind.KNOWN)
    if not is_pure(equation) or (name == "scan" and scan_counts(equation.params) is None):
        # Along a named axis a sum is the same for all elements, and a place is not.
        return [Kind.UNSURE] * len(equation.outvars)
    if (inner := inner_jaxpr(equation)) is not None:
        return _followed(inner, operands)
    if name == "cond":
        branches = [_followed(x, operands[1:]) for x in equation.params["branches"]]
        return [max(operands[0], *kinds) for kinds in zip(*branches, strict=True)]
    if name == "scan":
        body = into_steps(equation, operands)
        consts, carry = scan_counts(equation.params) or (0, 0)
        made = _followed(equation.params["jaxpr"], body)
        return [*body[consts : consts + carry], *made[carry:]]
    if name == "while" and {"cond_nconsts", "body_nconsts"} <= equation.params.keys():
        goes_on, carried = of_loop(equation, operands)
        # All of it differs if it ends sooner for one element than for another.
        return [Kind.MAPPED if goes_on == Kind.MAPPED else x for x in carried]
    if name in ("while", "element_program"):
        largest = min(largest, Kind.UNSURE)
    return [largest] * len(equation.outvars)


def of_loop(equation: JaxprEqn, operands: Kinds) -> tuple[Kind, list[Kind]]:
    """Whether a ``while`` loop goes on, and what it carries from step to step."""
    ends, steps = (equation.params[x] for x in ("cond_nconsts", "body_nconsts"))
    body, count = equation.params["body_jaxpr"], len(equation.outvars)
    carried = _carried(body, operands[ends:], steps, count)[steps:]
    (goes_on,) = _followed(equation.params["cond_jaxpr"], [*operands[:ends], *carried])
    return goes_on, carried


def into_steps(equation: JaxprEqn, operands: Kinds) -> list[Kind]:
    """What goes into the steps of a scan."""
    consts, carry = scan_counts(equation.params) or (0, 0)
    return _carried(equation.params["jaxpr"], operands, consts, carry)


def _carried(body: ClosedJaxpr, operands: Kinds, consts: int, carry: int) -> list[Kind]:
    """What goes into the steps of a loop: what one step carries into the next is of one kind."""
    kinds = list(operands)
    while True:
        made = _followed(body, kinds)[:carry]
        joined = [max(pair) for pair in zip(kinds[consts:], made, strict=False)]
        if joined == kinds[consts : consts + carry]:
            return kinds
        kinds[consts : consts + carry] = joined


def _kinds(closed: ClosedJaxpr, arguments: Kinds) -> Callable[[Sequence[Any]], list[Kind]]:
    """A function of variables of a jaxpr: their kinds."""
    kinds = dict.fromkeys(closed.jaxpr.constvars, Kind.UNSURE)
    kinds.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def of(variables: Sequence[Any]) -> list[Kind]:
        return [Kind.KNOWN if isinstance(x, Literal) else kinds[x] for x in variables]

    for equation in closed.jaxpr.eqns:
        kinds.update(zip(equation.outvars, results(equation, of(equation.invars)), strict=True))
    return of


def _followed(closed: ClosedJaxpr, arguments: Kinds) -> list[Kind]:
    """The kinds of a jaxpr's results."""
    return _kinds(closed, arguments)(closed.jaxpr.outvars)


# ---- Selections ----------------------------------------------------------------------------------


def selected(equation: JaxprEqn, operands: Kinds) -> ClosedJaxpr | None:
    """The same with selections for conditions that differ; None if there are none in it."""
    name, parameters = equation.primitive.name, equation.params
    inner = inner_jaxpr(equation)
    if (inner is None and name not in ("cond", "scan")) or not is_pure(equation):
        return None
    if inner is not None:
        # A rule of its own is that of the whole.
        return None if has_own_rule(equation) else _rewritten(inner, operands)
    if name == "cond" and operands[0] == Kind.MAPPED:
        return _traced(_selection, equation)
    if name == "scan" and scan_counts(parameters) is not None:
        body = _rewritten(parameters["jaxpr"], into_steps(equation, operands))
        if body is not None:
            return _traced(lambda equation, *xs: _bound(equation, xs, {"jaxpr": body}), equation)
    if name == "cond":
        branches = [_rewritten(x, operands[1:]) for x in parameters["branches"]]
        if any(x is not None for x in branches):
            pairs = zip(branches, parameters["branches"], strict=True)
            new = {"branches": tuple(x or old for x, old in pairs)}
            return _traced(lambda equation, *xs: _bound(equation, xs, new), equation)
    return None


def _traced(function: Any, equation: JaxprEqn) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda *xs: function(equation, *xs))(
        *map(struct, map(aval, equation.invars))
    )


def struct(own: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(own.shape, own.dtype, weak_type=own.weak_type)


def _bound(equation: JaxprEqn, operands: Sequence[Any], changed: dict[str, Any]) -> Any:
    return equation.primitive.bind(*operands, **(equation.params | changed))


def _selection(equation: JaxprEqn, which: Any, *operands: Any) -> list[Any]:
    """The results of a condition as ``vmap`` computes them."""
    made: list[Any] = []
    for n, branch in enumerate(equation.params["branches"]):
        taken = jax.lax.eq(which, jax.lax.full_like(which, n))
        into = [_select(taken, x, jax.lax.stop_gradient(x)) for x in operands]
        found = _evaluated(branch, into, [Kind.MAPPED] * len(into))
        made = [_select(taken, *pair) for pair in zip(found, made, strict=True)] if n else found
    return made


def _select(which: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    return jax.lax.select_n(which, no, yes)


def _evaluated(closed: ClosedJaxpr, arguments: Sequence[Any], kinds: Kinds) -> list[Any]:
    return interpreted(_rewritten(closed, kinds) or closed, arguments, applied)


def _rewritten(closed: ClosedJaxpr, arguments: Kinds) -> ClosedJaxpr | None:
    """A jaxpr with selections for conditions that differ; None if there are none."""
    kinds = _kinds(closed, arguments)
    instead: dict[int, ClosedJaxpr] = {}  # by the identity of the equation
    for equation in closed.jaxpr.eqns:
        new = selected(equation, kinds(equation.invars))
        if new is not None:
            instead[id(equation)] = new
    if not instead:
        return None

    def rule(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        new = instead.get(id(equation))
        if new is None:
            return applied(equation, operands)
        return interpreted(new, operands, applied)

    return jax.make_jaxpr(lambda *xs: interpreted(closed, xs, rule))(*map(struct, closed.in_avals))
