"""Loops whose steps do not need each other, as one step of all of them at once.

A quadrature as a loop over its points adds what it makes of each, and counts: what it carries is no
part of what it adds (:mod:`jaxmagma.jaxpr.sums`). So points are an axis, as under ``vmap``, and the
program has the operations of one of them. ``lax.map`` carries nothing at all.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmagma.jaxpr.equations import Unsupported, aval, interpreted
from jaxmagma.jaxpr.kept import kept
from jaxmagma.jaxpr.sums import Sum, with_sums
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles
from jaxmagma.jaxpr.written import Written, put


# Where no kernel has room for what all steps make, plain JAX has it in memory.
_MOST_AT_ONCE = 256


def at_once(
    reader: Tiles, equation: JaxprEqn, operands: Sequence[Read], consts: int, carry: int
) -> list[Read] | None:
    """The results of a scan without its steps one after the other, if they need not be.

    Raises ``Unsupported`` if what all of them compute together has no operation.
    """
    p = equation.params
    closed: ClosedJaxpr = p["jaxpr"]
    length = p["length"]
    if closed.effects or not 1 < length <= _MOST_AT_ONCE:
        return None
    inside = closed.jaxpr.invars[consts : consts + carry]
    first = operands[consts : consts + carry]
    same = kept(closed, consts, carry)
    counted = {
        n: by
        for n, x in enumerate(first)
        if n not in same
        and not isinstance(x, Tile)
        and (by := _counted_by(closed.jaxpr, inside[n], closed.jaxpr.outvars[n])) is not None
    }
    numbers = np.arange(length)[:: -1 if p["reverse"] else 1]
    given = [*operands]
    axes: list[int | None] = [*[None] * (consts + carry), *[0] * (len(operands) - consts - carry)]
    for n, by in counted.items():
        given[consts + n] = _counts(np.asarray(first[n]), by, numbers)
        axes[consts + n] = 0
    summed = [n for n in range(carry) if n not in same and n not in counted]

    writes: dict[int, tuple[Written, list[JaxprEqn]]] = {}

    def one(*arguments: jax.Array) -> tuple[list[Any], dict[int, Any]]:
        """What a step makes, and where it writes and reads."""
        before = {n: Sum.before(n, arguments[consts + n]) for n in summed}
        own = [before.get(n, x) for n, x in enumerate(arguments, -consts)]
        made = interpreted(closed, own, with_sums)
        places: dict[int, Any] = {}
        for n, x in enumerate(made):
            read = before[n].reading.found if n in before else []
            if n in before and isinstance(x, Written) and x.carried == n:
                writes[n] = x, [equation for equation, _ in read]
                made[n], places[n] = x.updates, (x.where, [where for _, where in read])
            elif n in before and isinstance(x, Sum) and x.carried == n and not read:
                made[n] = x.term(aval(inside[n]))
            elif n in before or isinstance(x, Sum | Written):
                raise Unsupported("a loop whose steps need what others have made")
        return made, places

    steps = jax.vmap(one, axes, axis_size=length)
    structs = [
        jax.ShapeDtypeStruct(x.shape if isinstance(x, np.ndarray) else reader.shape(x), own.dtype)
        for x, own in zip(given, map(aval, equation.invars), strict=True)
    ]
    shapes, places = jax.eval_shape(steps, *structs)
    puts = {}
    known = _known_places(reader, steps, structs, given, places) if writes else {}
    for n, (step, readers) in writes.items():
        where, reads = known[n]
        pairs = list(zip(readers, reads, strict=True))
        puts[n] = put(step, aval(inside[n]), where, shapes[n].shape, numbers, pairs)

    def every(*arguments: jax.Array) -> list[Any]:
        made, _ = steps(*arguments)
        for n in range(carry):
            before = arguments[consts + n]
            if n in same:
                made[n] = before
            elif n in puts:
                made[n] = puts[n](before, made[n])
            elif n in summed:
                made[n] = jnp.sum(made[n], 0, made[n].dtype)
                if not _is_zero(first[n]):
                    made[n] = before + made[n]
        return made

    results = reader.jaxpr(jax.make_jaxpr(every)(*structs), given)
    for n, by in counted.items():
        results[n] = _counts(np.asarray(first[n]), by, np.asarray(length))
    return results


def _known_places(
    reader: Tiles,
    steps: Callable[..., Any],
    structs: Sequence[Any],
    given: Sequence[Read],
    places: Mapping[int, Any],
) -> Mapping[int, Any]:
    """Where all steps write and read, which values of an element must not tell."""
    traced = jax.make_jaxpr(lambda *x: steps(*x)[1])(*structs)
    alone, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))
    read = reader.jaxpr(ClosedJaxpr(alone, traced.consts), list(itertools.compress(given, used)))
    if any(isinstance(x, Tile) for x in read):
        raise Unsupported("a loop that writes where its values tell")
    return dict(jax.tree.unflatten(jax.tree.structure(places), read))


def _counted_by(jaxpr: Any, carried: Any, result: Any) -> int | None:
    """By how much each step lets a number grow; None if it is none that counts."""
    if isinstance(result, Literal) or not np.issubdtype(aval(carried).dtype, np.integer):
        return None
    carried = _renamed(jaxpr, carried)
    counting = next((x for x in jaxpr.eqns if result in x.outvars), None)
    name = None if counting is None else counting.primitive.name
    if counting is None or name not in ("add", "add_any", "sub") or carried not in counting.invars:
        return None
    position = counting.invars.index(carried)
    by = counting.invars[1 - position]
    if not isinstance(by, Literal) or (name == "sub" and position):
        return None
    return -int(by.val) if name == "sub" else int(by.val)


def _counts(start: np.ndarray, by: int, steps: np.ndarray) -> np.ndarray:
    """What a number is that has grown in so many steps, which wraps around as integers do."""
    grown = np.asarray(by % 2**64, np.uint64) * steps.astype(np.uint64)
    return np.asarray(start.astype(np.uint64) + grown).astype(start.dtype)


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
