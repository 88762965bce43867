"""Loops that stay loops, with programs in their steps.

``vmap`` goes on with a loop until it ends for all elements, and keeps what those have for which it
has ended. So does the one step of a loop that ends by values of an element, in one program: what
plain JAX would select goes through memory once more.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.frontends import conditions
from jaxmagma.frontends.conditions import Kind, Kinds
from jaxmagma.internals import common_variance
from jaxmagma.jaxpr import aval, plainly, scan_counts, steps_at_once


# Of what is scanned and stacked a program has so many values: all of them are on chip
# (benchmarks/results/spellings-epyc.txt).
MOST_VALUES = 64

# Of a loop that ends by values of an element a program has so many steps: what all carry goes
# through memory half as often, and when they have all ended there has been one step too many
# (benchmarks/results/spellings-epyc.txt).
STEPS_BEFORE_THE_END = 2

# The results of a jaxpr of an element, of operands of some kinds.
Run = Callable[[ClosedJaxpr, Sequence[Any], Kinds], list[jax.Array]]
# The results of a loop, given who runs a jaxpr.
Loop = Callable[[Run], list[jax.Array]]


def steps(
    equation: JaxprEqn, operands: Sequence[Any], kinds: Kinds, several: bool
) -> tuple[ClosedJaxpr, Kinds, Loop] | None:
    """One step of a loop, the kinds of what goes into it, and the loop; None if it is none.

    ``several`` steps may be in one program.
    """
    name, parameters = equation.primitive.name, equation.params
    if name == "scan" and scan_counts(parameters) is not None:
        return _scan(equation, common_variance(operands), kinds, several)
    if name == "while" and {"cond_nconsts", "body_nconsts"} <= parameters.keys():
        return _while_loop(equation, common_variance(operands), kinds)
    return None


def _scan(
    equation: JaxprEqn, operands: Sequence[Any], kinds: Kinds, several: bool
) -> tuple[ClosedJaxpr, Kinds, Loop]:
    parameters = equation.params
    body, length, reverse = (parameters[x] for x in ("jaxpr", "length", "reverse"))
    counts = scan_counts(parameters) or (0, 0)
    carry = counts[1]
    inside = conditions.into_steps(equation, kinds)
    given, first, scanned = _parted(operands, *counts)
    most = _steps_of_program(body, *counts) if several else 1
    # As many in one as in another, if there are any.
    together = -(-length // -(-length // most)) if length else 1

    def few(run: Run, count: int, state: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        """Some steps in one program."""
        closed = _unrolled(equation, counts, count)
        made = _alike(run(closed, [*given, *state, *slices], inside), state)
        return made[:carry], made[carry:]

    def loop(run: Run) -> list[jax.Array]:
        times, rest = divmod(length, together)
        many = slice(rest, None) if reverse else slice(length - rest)
        last = slice(rest) if reverse else slice(length - rest, None)
        state, stacked = jax.lax.scan(
            lambda *x: few(run, together, *x),
            list(first),
            [x[many].reshape(times, together, *x.shape[1:]) for x in scanned],
            times,
            reverse,
        )
        stacked = [x.reshape(times * together, *x.shape[2:]) for x in stacked]
        if rest:
            state, more = few(run, rest, state, [x[last] for x in scanned])
            pairs = zip(*((more, stacked) if reverse else (stacked, more)), strict=True)
            stacked = [jnp.concatenate(x) for x in pairs]
        return [*state, *stacked]

    return body, inside, loop


def _steps_of_program(body: ClosedJaxpr, consts: int, carry: int) -> int:
    """How many steps of a scan are in one program: what they keep is on chip."""
    kept = (*body.in_avals[consts + carry :], *body.out_avals[carry:])
    values = sum(math.prod(x.shape) for x in kept)
    return max(1, min(steps_at_once(body), MOST_VALUES // max(1, values)))


def _unrolled(equation: JaxprEqn, counts: tuple[int, int], count: int) -> ClosedJaxpr:
    """So many steps of a scan, one after the other."""
    body, reverse, carry = equation.params["jaxpr"], equation.params["reverse"], counts[1]

    def unrolled(*operands: Any) -> list[Any]:
        given, state, slices = _parted(operands, *counts)
        made: list[Any] = [()] * count
        for n in reversed(range(count)) if reverse else range(count):
            results = plainly(body, [*given, *state, *(x[n] for x in slices)])
            state, made[n] = results[:carry], results[carry:]
        return [*state, *map(jnp.stack, zip(*made, strict=True))]

    given, first, scanned = _parted([conditions.struct(aval(x)) for x in equation.invars], *counts)
    few = (x.update(shape=(count, *x.shape[1:])) for x in scanned)
    return jax.make_jaxpr(unrolled)(*given, *first, *few)


def _while_loop(
    equation: JaxprEqn, operands: Sequence[Any], kinds: Kinds
) -> tuple[ClosedJaxpr, Kinds, Loop]:
    goes_on, carried = conditions.of_loop(equation, kinds)
    if goes_on == Kind.MAPPED:
        return _ending_apart(equation, operands, kinds)
    ends, body, counts = _parts(equation)
    of_end, of_body, first = _parted(operands, *counts)
    inside = [*_parted(kinds, *counts)[1], *carried]

    def loop(run: Run) -> list[jax.Array]:
        return jax.lax.while_loop(
            lambda state: plainly(ends, [*of_end, *state])[0],
            lambda state: _alike(run(body, [*of_body, *state], inside), state),
            list(first),
        )

    return body, inside, loop


def _ending_apart(
    equation: JaxprEqn, operands: Sequence[Any], kinds: Kinds
) -> tuple[ClosedJaxpr, Kinds, Loop]:
    """A loop that ends sooner for one element than for another."""
    ends, body, counts = _parts(equation)
    of_end, of_body, first = _parted(operands, *counts)

    together = min(STEPS_BEFORE_THE_END, steps_at_once(body))

    def step(*operands: Any) -> list[Any]:
        """Whether an element goes on, and what it carries, after a step or some."""
        of_end, of_body, (runs, *state) = _parted(operands, *counts)
        for _ in range(together):
            made = plainly(body, [*of_body, *state])
            state = [jax.lax.select(runs, *x) for x in zip(made, state, strict=True)]
            (runs,) = plainly(ends, [*of_end, *state])
        return [runs, *state]

    structs = [conditions.struct(aval(x)) for x in equation.invars]
    structs.insert(sum(counts), jax.ShapeDtypeStruct((), bool))
    closed = jax.make_jaxpr(step)(*structs)
    carried = [Kind.MAPPED] * len(first)
    inside = [*kinds[: sum(counts)], Kind.MAPPED, *carried]

    def loop(run: Run) -> list[jax.Array]:
        (runs,) = run(ends, [*of_end, *first], [*kinds[: counts[0]], *carried])
        return jax.lax.while_loop(
            lambda state: _of_any(state[0]),
            lambda state: _alike(run(closed, [*of_end, *of_body, *state], inside), state),
            _alike([runs, *first], first),
        )[1:]

    return closed, inside, loop


def _parts(equation: JaxprEqn) -> tuple[ClosedJaxpr, ClosedJaxpr, tuple[int, int]]:
    """The end and a step of a loop, and how many operands are constants of either."""
    p = equation.params
    return p["cond_jaxpr"], p["body_jaxpr"], (p["cond_nconsts"], p["body_nconsts"])


def _parted(values: Sequence[Any], first: int, second: int) -> tuple[Any, Any, Any]:
    return values[:first], values[first : first + second], values[first + second :]


def _alike(results: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """Results that vary over the mesh axes of a ``shard_map`` that the state of a loop does."""
    return common_variance([*results, *state])[: len(results)]


@jax.custom_batching.custom_vmap
def _of_any(truth: jax.Array) -> jax.Array:
    """A truth value of an element, as one of all: whether it is true of any."""
    return truth


@_of_any.def_vmap
def _(size: int, batched: Sequence[bool], truth: jax.Array) -> tuple[jax.Array, bool]:
    return _of_any(jnp.any(truth, 0) if batched[0] else truth), False
