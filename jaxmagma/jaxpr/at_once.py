"""Loops whose steps do not need each other, as one step of all of them at once.

A quadrature as a loop over its points adds what it makes of each, and counts: what it carries is no
part of what it adds. So points are an axis, as under ``vmap``, and the program has the operations
of one of them. ``lax.map`` carries nothing at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxmagma.jaxpr.equations import applied, aval, interpreted
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles


# Where no kernel has room for what all steps make, plain JAX has it in memory.
_MOST_AT_ONCE = 256


@dataclass(frozen=True)
class _Steps:
    """What becomes of the values that a loop carries, by their positions.

    Attributes:
      added: the equation that adds something, and which operand that is.
      counted: by how much the number grows.
    """

    added: dict[int, tuple[JaxprEqn, int]]
    counted: dict[int, int]


def at_once(
    reader: Tiles, equation: JaxprEqn, operands: Sequence[Read], consts: int, carry: int
) -> list[Read] | None:
    """The results of a scan without its steps one after the other, if they need not be.

    Raises ``Unsupported`` if what all of them compute together has no operation.
    """
    p = equation.params
    closed: ClosedJaxpr = p["jaxpr"]
    steps = _steps_of(closed, consts, carry)
    first = operands[consts : consts + carry]
    if steps is None or closed.effects or any(isinstance(first[n], Tile) for n in steps.counted):
        return None
    length = p["length"]
    if not 1 < length <= _MOST_AT_ONCE:
        return None
    numbers = np.arange(length)[:: -1 if p["reverse"] else 1]
    given = [*operands]
    axes: list[int | None] = [*[None] * (consts + carry), *[0] * (len(operands) - consts - carry)]
    for n, by in steps.counted.items():
        start = np.asarray(first[n])
        given[consts + n] = (start + by * numbers).astype(start.dtype)
        axes[consts + n] = 0

    def one(*arguments: jax.Array) -> list[Any]:
        def rule(inner: JaxprEqn, own: Sequence[Any]) -> Sequence[Any]:
            for n, (adding, position) in steps.added.items():
                if inner is adding:
                    return [jnp.broadcast_to(own[position], aval(closed.jaxpr.outvars[n]).shape)]
            return applied(inner, own)

        return interpreted(closed, arguments, rule)

    def every(*arguments: jax.Array) -> list[Any]:
        made = jax.vmap(one, axes, axis_size=length)(*arguments)
        for n in range(carry):
            if n in steps.added:
                made[n] = jnp.sum(made[n], 0, made[n].dtype)
                if not _is_zero(first[n]):
                    made[n] = arguments[consts + n] + made[n]
            elif n not in steps.counted:
                made[n] = arguments[consts + n]
        return made

    structs = [
        jax.ShapeDtypeStruct(x.shape if isinstance(x, np.ndarray) else reader.shape(x), own.dtype)
        for x, own in zip(given, map(aval, equation.invars), strict=True)
    ]
    results = reader.jaxpr(jax.make_jaxpr(every)(*structs), given)
    for n, by in steps.counted.items():
        start = np.asarray(first[n])
        results[n] = (start + by * length).astype(start.dtype)
    return results


def _steps_of(closed: ClosedJaxpr, consts: int, carry: int) -> _Steps | None:
    """None if a step needs what another one has made."""
    jaxpr = closed.jaxpr
    added: dict[int, tuple[JaxprEqn, int]] = {}
    counted: dict[int, int] = {}
    for n in range(carry):
        carried, result = _renamed(jaxpr, jaxpr.invars[consts + n]), jaxpr.outvars[n]
        if result is jaxpr.invars[consts + n]:
            continue
        adding = next((x for x in jaxpr.eqns if result in x.outvars), None)
        if adding is None or adding.primitive.name not in ("add", "add_any"):
            return None
        if isinstance(result, Literal) or carried not in adding.invars:
            return None
        position = 1 - adding.invars.index(carried)
        other = adding.invars[position]
        if isinstance(other, Literal) and np.issubdtype(aval(carried).dtype, np.integer):
            counted[n] = int(other.val)
        elif _uses(jaxpr, carried) == 1 and _uses(jaxpr, result) == 1:
            added[n] = adding, position
        else:
            return None
    return _Steps(added, counted)


def _renamed(jaxpr: Any, variable: Any) -> Any:
    """What a value is called where it is used: a conversion may change its weak type alone."""
    if _uses(jaxpr, variable) == 1:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "convert_element_type":
                (operand,), (made,) = equation.invars, equation.outvars
                if operand is variable and aval(made).dtype == aval(variable).dtype:
                    return made
    return variable


def _uses(jaxpr: Any, variable: Any) -> int:
    every = [x for equation in jaxpr.eqns for x in equation.invars] + list(jaxpr.outvars)
    return sum(x is variable for x in every)


def _is_zero(read: Read) -> bool:
    return isinstance(read, np.ndarray) and not read.any()
