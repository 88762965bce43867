"""Arguments and results in the shapes in which a function computes with them.

Functions reshape what they are given, and what they return: an element's nodes come as a cube, and
tables have one axis for all of them. In memory nothing changes, so that may as well be done before
and after the function, for all elements at once. The program is then the same as that of a function
which is given such shapes.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from jaxmagma.frontends.index import Gathered


def without_reshapes(
    closed: ClosedJaxpr, operands: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any], list[tuple[int, ...]]]:
    """The function without them, its operands, and the shapes that its results are to have."""
    shapes = [x.aval.shape for x in closed.jaxpr.outvars]
    arrays, changed = list(operands), True
    while changed:  # of several, one after the other, the outermost is taken off each time
        closed, arrays, changed = _without_outermost(closed, arrays)
    return closed, arrays, shapes


def _without_outermost(
    closed: ClosedJaxpr, operands: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any], bool]:
    jaxpr = closed.jaxpr
    readers: dict[Var, list[Any]] = {}
    makers: dict[Var, Any] = {}
    for equation in jaxpr.eqns:
        for x in filter(_is_variable, equation.invars):
            readers.setdefault(x, []).append(equation)
        makers.update(dict.fromkeys(equation.outvars, equation))

    given, arrays = list(jaxpr.invars), list(operands)
    now: dict[Var, Var] = {}  # what reshaped arguments are
    for n, (x, array) in enumerate(zip(jaxpr.invars, operands, strict=True)):
        reshaped = [y.outvars[0] for y in readers.get(x, ()) if _is_reshape(y)]
        alone = len(reshaped) == len(readers.get(x, ())) and x not in jaxpr.outvars
        shapes = {y.aval.shape for y in reshaped}
        if alone and len(shapes) == 1 and not isinstance(array, Gathered):
            given[n], arrays[n] = reshaped[0], jnp.reshape(array, shapes.pop())
            now.update(dict.fromkeys(reshaped, reshaped[0]))

    def made(result: Any) -> Any:
        """A result before its reshape, if it has one and is no argument."""
        maker = makers.get(result) if _is_variable(result) else None
        if maker is not None and _is_reshape(maker) and maker.invars[0] in makers:
            result = maker.invars[0]
        return now.get(result, result) if _is_variable(result) else result

    results = list(map(made, jaxpr.outvars))
    if not now and results == jaxpr.outvars:
        return closed, arrays, False
    read = {*filter(_is_variable, results), *readers}
    equations = [
        equation.replace(invars=[now.get(x, x) if _is_variable(x) else x for x in equation.invars])
        for equation in jaxpr.eqns
        if not _is_reshape(equation)
        or (equation.outvars[0] in read and equation.outvars[0] not in now)
    ]
    rewritten = jaxpr.replace(invars=given, eqns=equations, outvars=results)
    return ClosedJaxpr(rewritten, closed.consts), arrays, True


def _is_variable(x: Any) -> bool:
    return isinstance(x, Var)


def _is_reshape(equation: Any) -> bool:
    """Whether it is one in the order of memory."""
    others = ("dimensions", "sharding")
    plain = all(equation.params.get(x) is None for x in others)
    return equation.primitive.name == "reshape" and plain
