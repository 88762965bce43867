"""The jaxpr of one element as lines, one for each equation, with what it calls inlined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.frontends import conditions
from jaxmagma.frontends.conditions import Kind
from jaxmagma.jaxpr import applied, has_own_rule, inner_jaxpr, interpreted, nested, with_digits
from jaxmagma.programs.functions import COMPARISONS


# Equations with a derivative that is not that of the operations they are read as: rules of the
# user's own, reductions that share a derivative among equal values, bounds that have none, what is
# approximated piece by piece, factorisations by iteration or of matrices of which one triangle is
# read, and loops that have no reverse one.
OWN_DERIVATIVE = {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "stop_gradient",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "clamp",
    "scatter-mul",
    "scatter_mul",
    "scatter-max",
    "scatter_max",
    "scatter-min",
    "scatter_min",
    "lgamma",
    "digamma",
    "erf_inv",
    "cholesky",
    "custom_linear_map",
    "custom_linear_solve",
    "eigh",
    "qr",
    "svd",
    "while",
}
_COMPARISONS = {*COMPARISONS, "eq_to", "le_to", "lt_to"}
# What JAX makes of tangents that reach a function with a reverse rule.
_REVERSE_ONLY = "custom_lin"


@dataclass(frozen=True, eq=False)
class Variable:
    aval: Any
    kind: Kind

    @property
    def moves(self) -> bool:
        """Whether it can have a tangent."""
        return bool(jnp.issubdtype(self.aval.dtype, np.inexact))


class Line(NamedTuple):
    """An equation of a jaxpr whose calls are inlined."""

    equation: JaxprEqn
    site: JaxprEqn  # the outermost call it stands in
    operands: list[Any]  # variables, or known values
    results: list[Variable]

    @property
    def kinds(self) -> list[Kind]:
        return [_kind(x) for x in self.operands]

    @property
    def _names(self) -> set[str]:
        return {self.equation.primitive.name, *(x.primitive.name for x in nested(self.equation))}

    @property
    def has_own_derivative(self) -> bool:
        return not self._names.isdisjoint(OWN_DERIVATIVE)

    @property
    def stops_gradient(self) -> bool:
        return self.equation.primitive.name == "stop_gradient"

    @property
    def has_own_transpose(self) -> bool:
        """Whether it is a solver, which goes by the map it solves with, or has no transpose."""
        return not self._names.isdisjoint({"custom_linear_map", "custom_linear_solve", "while"})

    @property
    def is_comparison(self) -> bool:
        return self.equation.primitive.name in _COMPARISONS

    @property
    def is_reverse_only(self) -> bool:
        return _REVERSE_ONLY in self._names


@dataclass(frozen=True)
class Lines:
    """Straight-line code: ``results`` are variables, or known values."""

    parameters: Sequence[Variable]
    lines: Sequence[Line]
    results: Sequence[Any]

    def plainly(self, operands: Sequence[Any]) -> list[Any]:
        """The results by plain JAX."""
        known: dict[Any, Any] = dict(zip(self.parameters, operands, strict=True))

        def value(x: Any) -> Any:
            return known[x] if isinstance(x, Variable) else x

        for line in self.lines:
            made = applied(line.equation, list(map(value, line.operands)))
            known.update(zip(line.results, made, strict=True))
        return list(map(value, self.results))

    def computing(self, results: Iterable[Any], given: Iterable[Variable] = ()) -> list[Line]:
        """The lines that some results need, where some variables are given."""
        needed, known, found = set(variables(results)), set(given), []
        for line in reversed(self.lines):
            if any(x in needed and x not in known for x in line.results):
                needed.update(variables(line.operands))
                found.append(line)
        return found[::-1]

    def part(self, parameters: Sequence[Variable], results: Sequence[Any]) -> "Lines":
        """Those lines alone that compute some results of some variables."""
        return Lines(parameters, self.computing(results, parameters), results)

    def given(self, values: Iterable[Variable]) -> list[Line]:
        """The lines that compute the results where some values are given besides the parameters.

        What is compared is computed, too: a maximum that another program has made, by sums in
        another order, might equal none of the values that it is the maximum of.
        """
        values = set(values)
        left = self.computing(self.results, [*self.parameters, *values])
        astray = Lines([], left, []).depending(values.difference(self.parameters))
        compared = [x for line in left if line.is_comparison for x in variables(line.operands)]
        if astray.isdisjoint(compared):
            return left
        again = self.computing(compared, self.parameters)
        fresh = {x: replace(x) for line in again for x in line.results}

        def anew(line: Line) -> Line:
            operands = [fresh.get(x, x) if isinstance(x, Variable) else x for x in line.operands]
            return line._replace(operands=operands)

        copies = [anew(x)._replace(results=[fresh[y] for y in x.results]) for x in again]
        return copies + [anew(x) if x.is_comparison else x for x in left]

    def depending(self, on: Iterable[Variable]) -> set[Variable]:
        """The variables that depend on some."""
        found = set(on)
        for line in self.lines:
            if not found.isdisjoint(variables(line.operands)):
                found.update(line.results)
        return found


def differentiated(lines: Sequence[Line], results: Iterable[Any]) -> list[Line]:
    """The lines whose derivative is a part of that of some results.

    A comparison has none, and so need what it compares not have one.
    """
    moving, found = {x for x in variables(results) if x.moves}, []
    for line in reversed(lines):
        if not moving.isdisjoint(line.results):
            moving.update(x for x in variables(line.operands) if x.moves)
            found.append(line)
    return found[::-1]


def variables(values: Iterable[Any]) -> list[Variable]:
    return [x for x in values if isinstance(x, Variable)]


def inlined(closed: ClosedJaxpr, kinds: Sequence[Kind]) -> Lines:
    """The lines of a jaxpr, whose arguments are of some kinds."""
    parameters = [Variable(*x) for x in zip(closed.in_avals, kinds, strict=True)]
    return Lines(parameters, *_inlined(closed, parameters))


def _inlined(
    closed: ClosedJaxpr, arguments: Sequence[Any], site: JaxprEqn | None = None
) -> tuple[list[Line], list[Any]]:
    lines: list[Line] = []

    def inline(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        kinds = [_kind(x) for x in operands]
        inner = None if has_own_rule(equation) else inner_jaxpr(equation)
        if inner is None:
            inner = conditions.selected(equation, kinds)
        if inner is not None:
            more, results = _inlined(inner, operands, site or equation)
            lines.extend(more)
        else:
            kinds = conditions.results(equation, kinds)
            results = [
                Variable(x.aval, kind) for x, kind in zip(equation.outvars, kinds, strict=True)
            ]
            lines.append(Line(equation, site or equation, operands, results))
        return results

    return lines, interpreted(with_digits(closed), arguments, inline)


def _kind(x: Any) -> Kind:
    if isinstance(x, Variable):
        return x.kind
    return Kind.UNSURE if isinstance(x, jax.Array) else Kind.KNOWN
