"""Loops that Python has written out, as loops: sums whose terms are one function of other numbers.

A quadrature is often a loop of Python's over the points, and so is its derivative a sum over them,
last point first. A jaxpr has each point anew: as many times the operations, and nothing that says
that the points are an axis. The terms of a sum, or the parts of a stack, are compared from their
ends on: what all have in common is outside of the loop; where they differ by known arrays, or by
places in an argument, those are what it runs over. The rule for loops then makes an axis of it
(:mod:`jaxmagma.jaxpr.at_once`), as it does of those that are written as loops, and plain JAX does
one step after the other, as before.

That is how compilers find vectors in straight-line code (Larsen and Amarasinghe, *Exploiting
superword level parallelism with multimedia instruction sets*, PLDI 2000).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxmagma.frontends.lines import OWN_DERIVATIVE
from jaxmagma.jaxpr import (
    POINTWISE,
    RULES,
    applied,
    aval,
    inner_jaxpr,
    is_extended,
    is_pure,
    nested,
)


# So many terms are a loop, of so many equations each: components of a vector are fewer.
_FEWEST_TERMS = 4
_LEAST_EQUATIONS = 8
# Of more steps a loop is not read one after the other, where no axis can be made of it.
_MOST_TERMS = 64

_ADDS = {"add", "add_any"}
_STACKS = {"stack", "concatenate"}
_CONTROL = {"cond", "while", "scan"}
# What is alike but for the places that its parameters name.
_AT_PLACES = {"slice", "pad"}


def rolled(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, with loops in the place of what was written out."""
    while (found := next(_Terms(closed).loops(), None)) is not None:
        closed = found
    return closed


@dataclass(frozen=True, eq=False)
class _Number:
    """A literal. JAX's own cannot be looked up."""

    literal: Literal

    @property
    def aval(self) -> Any:
        return self.literal.aval

    @property
    def value(self) -> np.ndarray:
        return np.asarray(self.literal.val, self.aval.dtype)


_Value = Var | _Number
_Values = tuple[_Value, ...]  # one of each term


@dataclass(frozen=True)
class _Whole:
    """A stack of ``parts`` along an axis, or a sum of them; others are added to it."""

    parts: Sequence[_Value]
    others: Sequence[_Value]
    axis: int | None


@dataclass(frozen=True)
class _Equation:
    """One of the first term's, which stands for those of all, and their operands and results."""

    first: JaxprEqn
    operands: list[_Values]
    results: list[_Values]


@dataclass(frozen=True)
class _Places:
    """What lies along an axis of an array, or of a part of it, a place for each term."""

    whole: _Value
    axis: int
    part: tuple[slice, ...]


@dataclass(frozen=True)
class _Loop:
    """Terms that are one function of the ``inputs``, and of what all have in common."""

    terms: _Values
    equations: list[_Equation]
    inputs: dict[_Values, _Places | np.ndarray | None]  # where they are, if together


class _Terms:
    """Which values of a jaxpr are made alike."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.closed = closed
        consts = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        self._consts: dict[_Value, Any] = {
            x: value
            for x, value in consts
            if not isinstance(value, jax.core.Tracer) and not is_extended(aval(x).dtype)
        }
        self._operands: list[list[_Value]] = []  # of each equation
        self._makers: dict[_Value, tuple[int, int]] = {}  # equations, and which result it is
        self._readers: dict[_Value, list[JaxprEqn]] = {}
        self._kinds: dict[Any, int] = {}
        self._alike: dict[_Value, int] = {}
        # What depends on known arrays or on places, without which there is no loop.
        self._runs: set[_Value] = {x for x in self._consts if aval(x).shape}
        for number, equation in enumerate(closed.jaxpr.eqns):
            operands = [_Number(x) if isinstance(x, Literal) else x for x in equation.invars]
            self._operands.append(operands)
            for x in operands:
                self._readers.setdefault(x, []).append(equation)
            kind = self._numbered(_kind_of(equation), *map(self._kind, operands))
            for position, x in enumerate(equation.outvars):
                self._makers[x] = number, position
                self._alike[x] = self._numbered(kind, position)
            if equation.primitive.name == "slice" or not self._runs.isdisjoint(operands):
                self._runs.update(equation.outvars)

    def loops(self) -> Iterator[ClosedJaxpr]:
        """The function with one of its loops, for each of them, the last one first."""
        for number in reversed(range(len(self.closed.jaxpr.eqns))):
            for whole in self._wholes(number):
                parts = whole.parts
                several = _FEWEST_TERMS <= len(parts) == len(set(parts)) <= _MOST_TERMS
                alike = len({self._kind(x) for x in parts}) == 1
                if several and alike and self._runs.issuperset(parts):
                    loop = self._loop(self._in_order(parts))
                    if loop is not None:
                        yield self._with(number, whole, loop)

    def _name(self, number: int) -> str:
        return str(self.closed.jaxpr.eqns[number].primitive.name)

    def _kind(self, value: _Value) -> int:
        """What values have in common that are made by the same equations of other ones."""
        if value in self._alike:
            return self._alike[value]
        return self._numbered("given", aval(value).shape, aval(value).dtype)

    def _numbered(self, *key: Any) -> int:
        return self._kinds.setdefault(key, len(self._kinds))

    # ---- Terms -----------------------------------------------------------------------------------

    def _wholes(self, number: int) -> Iterator[_Whole]:
        """What an equation makes of values that may be alike."""
        equation, operands = self.closed.jaxpr.eqns[number], self._operands[number]
        if self._name(number) in _STACKS:
            axis = equation.params.get("dimension")
            if axis is None or all(aval(x).shape[axis] == 1 for x in operands):
                yield _Whole(operands, [], equation.params["axis"] if axis is None else axis)
        elif self._name(number) in _ADDS and not self._is_added(equation.outvars[0]):
            terms = self._terms(number)
            kinds: dict[int, list[_Value]] = {}
            for term in terms:
                kinds.setdefault(self._kind(term), []).append(term)
            for some in kinds.values():
                yield self._padded(some, terms) or _Whole(some, _without(terms, some), None)

    def _terms(self, number: int) -> list[_Value]:
        """Those of a sum, and of the sums that are terms of it."""
        terms, waiting = [], self._operands[number][::-1]
        while waiting:
            x = waiting.pop()
            made, _ = self._makers.get(x, (None, 0))
            if made is not None and self._name(made) in _ADDS and self._is_added(x):
                waiting += self._operands[made][::-1]
            else:
                terms.append(x)
        return terms

    def _padded(self, some: Sequence[_Value], terms: Sequence[_Value]) -> _Whole | None:
        """The stack that a sum is of values with zeros around them, as derivatives have it."""
        made = [self._makers.get(x, (None, 0))[0] for x in some]
        numbers = [n for n in made if n is not None and self._name(n) == "pad"]
        if len(numbers) < len(some):
            return None
        own = [self._operands[n][0] for n in numbers]
        around = [self._known(self._operands[n][1]) for n in numbers]
        before = np.array(
            [
                [low for low, _, _ in self.closed.jaxpr.eqns[n].params["padding_config"]]
                for n in numbers
            ]
        )
        moved = np.flatnonzero(before.any(0)).tolist()
        if len(moved) != 1 or any(x is None or x.any() for x in around):
            return None
        (axis,), shape = moved, list(aval(some[0]).shape)
        places = before[:, axis].tolist()
        shape[axis] = 1
        if (
            sorted(places) != [*range(aval(some[0]).shape[axis])]
            or list(aval(own[0]).shape) != shape
        ):
            return None
        return _Whole([own[places.index(n)] for n in range(len(own))], _without(terms, some), axis)

    def _is_added(self, value: _Value) -> bool:
        """Whether all that is done with a value is to add something."""
        readers = self._readers.get(value, [])
        alone = len(readers) == 1 and value not in self.closed.jaxpr.outvars
        return alone and readers[0].primitive.name in _ADDS

    def _in_order(self, values: Sequence[_Value]) -> _Values:
        """As they were written: by the first equation that each of them has alone."""
        needed = [self._needed(x) for x in values]
        shared = set.intersection(*needed)
        first = [min(x - shared, default=0) for x in needed]
        return tuple(values[n] for n in sorted(range(len(values)), key=first.__getitem__))

    def _needed(self, value: _Value) -> set[int]:
        """The equations that a value needs."""
        found: set[int] = set()
        waiting = [value]
        while waiting:
            made, _ = self._makers.get(waiting.pop(), (None, 0))
            if made is not None and made not in found:
                found.add(made)
                waiting += self._operands[made]
        return found

    # ---- What they have in common ----------------------------------------------------------------

    def _loop(self, terms: _Values) -> _Loop | None:
        """The function that terms are, if it is worth a loop."""
        found: dict[tuple[int, ...], _Equation] = {}
        inputs: dict[_Values, _Places | np.ndarray | None] = {}
        waiting, seen = [terms], {terms}
        while waiting:
            values = waiting.pop()
            numbers = self._made_alike(values)
            if numbers is None:
                inputs[values] = self._together(values)
            elif numbers not in found:
                equations = [self.closed.jaxpr.eqns[n] for n in numbers]
                operands = list(zip(*(self._operands[n] for n in numbers), strict=True))
                results = list(zip(*(x.outvars for x in equations), strict=True))
                found[numbers] = _Equation(equations[0], operands, results)
                for x in operands:
                    if x not in seen and not self._is_one(x):
                        seen.add(x)
                        waiting.append(x)
        # Of operands that all have in common so is the result.
        same: set[_Values] = set()
        different = []
        for numbers in sorted(found):
            equation = found[numbers]
            if all(x in same or self._is_one(x) for x in equation.operands):
                same.update(equation.results)
            else:
                different.append(equation)
        work = sum(1 + sum(1 for _ in nested(x.first)) for x in different)
        runs = any(x is not None and aval(values[0]).shape for values, x in inputs.items())
        if not runs or work < _LEAST_EQUATIONS:
            return None
        if not all(_may_be_in_a_loop(x.first) for x in different):
            return None
        return _Loop(terms, different, inputs)

    def _made_alike(self, values: _Values) -> tuple[int, ...] | None:
        """The equations that make values, if they are of one kind."""
        made = [self._makers.get(x) for x in values]
        if any(x is None for x in made) or len({self._kind(x) for x in values}) > 1:
            return None
        numbers = tuple(x[0] for x in made if x is not None)
        if self._name(numbers[0]) in _AT_PLACES:
            parameters = [self.closed.jaxpr.eqns[n].params for n in numbers]
            return numbers if all(x == parameters[0] for x in parameters) else None
        return numbers

    def _is_one(self, values: _Values) -> bool:
        """Whether values are one, or known to be equal."""
        first, *others = values
        if all(x is first for x in others):
            return True
        array, *arrays = map(self._known, values)
        return array is not None and all(x is not None and np.array_equal(array, x) for x in arrays)

    def _known(self, value: _Value) -> np.ndarray | None:
        if isinstance(value, _Number):
            return value.value
        return np.asarray(self._consts[value]) if value in self._consts else None

    def _together(self, values: _Values) -> _Places | np.ndarray | None:
        """Where values are that are known, or lie along an axis of an array in their order."""
        arrays = [x for x in map(self._known, values) if x is not None]
        if len(arrays) == len(values):
            return np.stack(arrays)
        made = [self._makers.get(x) for x in values]
        if any(x is None or self._name(x[0]) != "slice" for x in made):
            return None
        numbers = [x[0] for x in made if x is not None]
        whole = self._operands[numbers[0]][0]
        cuts = [self.closed.jaxpr.eqns[n].params for n in numbers]
        starts = np.array([x["start_indices"] for x in cuts])
        moved = np.flatnonzero((starts != starts[0]).any(0)).tolist()
        if len(moved) != 1 or any(self._operands[n][0] is not whole for n in numbers):
            return None
        (axis,) = moved
        steps = set(np.diff(starts[:, axis]).tolist())
        if aval(values[0]).shape[axis] != 1 or len(steps) > 1 or min(steps) < 0:
            return None
        first = cuts[0]
        within = first["strides"] or [1] * len(starts[0])
        part = list(map(slice, first["start_indices"], first["limit_indices"], within))
        part[axis] = slice(int(starts[0, axis]), None, steps.pop())
        alike = all(x["strides"] == first["strides"] for x in cuts)
        return _Places(whole, axis, tuple(part)) if alike else None

    # ---- The loop in their place -----------------------------------------------------------------

    def _with(self, number: int, whole: _Whole, loop: _Loop) -> ClosedJaxpr:
        """The function in which a loop makes what an equation makes."""
        jaxpr, equation = self.closed.jaxpr, self.closed.jaxpr.eqns[number]
        made = {*loop.inputs, *(x for y in loop.equations for x in y.results)}
        every = dict.fromkeys(x for y in loop.equations for x in y.operands)
        common = [x for x in every if x not in made]
        read = [x[0] for x in common]
        for values, at in loop.inputs.items():
            read += [at.whole] if isinstance(at, _Places) else values if at is None else ()
        operands = list(dict.fromkeys([*read, *whole.others]))
        tables = [x for x in loop.inputs.values() if isinstance(x, np.ndarray)]

        def looped(tables: Sequence[Any], *arrays: Any) -> jax.Array:
            given = dict(zip(operands, arrays, strict=True))
            known: dict[_Values, Any] = {x: given[x[0]] for x in common}
            remaining = iter(tables)
            over = [
                next(remaining) if isinstance(at, np.ndarray) else _stacked(values, at, given)
                for values, at in loop.inputs.items()
            ]

            def term(own: Sequence[Any]) -> Any:
                values = known | dict(zip(loop.inputs, own, strict=True))
                for x in loop.equations:
                    results = applied(x.first, [values[y] for y in x.operands])
                    values.update(zip(x.results, results, strict=True))
                return values[loop.terms]

            result = aval(equation.outvars[0])
            first = jnp.zeros(result.shape, result.dtype)
            for x in whole.others:
                first = first + given[x]
            if whole.axis is None:
                return _summed(term, over, first)
            order = [loop.terms.index(x) for x in whole.parts]
            made = _stack(term, over, order, whole.axis).reshape(result.shape)
            return first + made if whole.others else made

        structs = [jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype) for x in operands]
        with jax.disable_jit(disable=False):
            traced = jax.make_jaxpr(jax.jit(looped))(tables, *structs)
        (call,), own = traced.jaxpr.eqns, traced.jaxpr.invars[: len(tables)]
        call = call.replace(
            invars=[*own, *(x.literal if isinstance(x, _Number) else x for x in operands)],
            outvars=equation.outvars,
            source_info=equation.source_info,
        )
        consts = [
            *zip(jaxpr.constvars, self.closed.consts, strict=True),
            *zip(own, tables, strict=True),
        ]
        equations = [*jaxpr.eqns[:number], call, *jaxpr.eqns[number + 1 :]]
        return _without_unused(jaxpr, equations, consts)


def _stacked(values: _Values, at: _Places | None, given: dict[_Value, Any]) -> jax.Array:
    """What the terms have of an array, or of several."""
    if at is None:
        return jnp.stack([given[x] for x in values])
    part = given[at.whole][at.part]
    return jnp.expand_dims(jnp.moveaxis(part, at.axis, 0)[: len(values)], 1 + at.axis)


def _summed(term: Callable[..., Any], every: Any, first: jax.Array) -> jax.Array:
    last, _ = jax.lax.scan(lambda sum_, own: (sum_ + term(own), None), first, every, unroll=True)
    return last


def _stack(term: Callable[..., Any], every: Any, order: Sequence[int], axis: int) -> jax.Array:
    _, made = jax.lax.scan(lambda _, own: (None, term(own)), None, every, unroll=True)
    if list(order) != sorted(order):
        made = made[np.array(order)]
    return jnp.moveaxis(made, 0, axis)


def _without(values: Sequence[_Value], some: Sequence[_Value]) -> list[_Value]:
    return [x for x in values if x not in some]


def _without_unused(
    jaxpr: Any, equations: Sequence[JaxprEqn], consts: Sequence[tuple[Var, Any]]
) -> ClosedJaxpr:
    """A jaxpr of those of these equations that its results need, and of these constants."""
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    kept = []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if isinstance(x, Var))
            kept.append(equation)
    known = [(x, array) for x, array in consts if x in needed]
    jaxpr = jaxpr.replace(constvars=[x for x, _ in known], eqns=kept[::-1])
    return ClosedJaxpr(jaxpr, [array for _, array in known])


# ---- Equations -----------------------------------------------------------------------------------


def _may_be_in_a_loop(equation: JaxprEqn) -> bool:
    """Whether an equation is read there as it is alone, and has no derivative of its own."""
    if not is_pure(equation) or any(is_extended(aval(x).dtype) for x in equation.outvars):
        return False
    every = [equation, *nested(equation)]
    names = {x.primitive.name for x in every if inner_jaxpr(x) is None}
    return names <= RULES.keys() | POINTWISE.keys() and names.isdisjoint(OWN_DERIVATIVE | _CONTROL)


def _kind_of(equation: JaxprEqn) -> Any:
    """What equations have in common that do the same to other operands, or at other places."""
    if equation.primitive.name in _AT_PLACES:
        return equation.primitive, aval(equation.outvars[0]).shape
    return equation.primitive, *((key, _hashable(x)) for key, x in sorted(equation.params.items()))


def _hashable(parameter: Any) -> Any:
    try:
        hash(parameter)
    except TypeError:
        return repr(parameter)
    return parameter
