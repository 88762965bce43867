"""Functions whose derivatives are not those of their operations, but JAX's: programs all the same.

The derivative of such a function is JAX's own, which heeds every rule, read as lines: those that
are linear in the tangents, and others that they need, of the arguments alone.  Together they are a
program, which computes the latter anew on chip.  It is differentiated as any other, so it must not
compute what has a rule of its own, unless no derivative reaches that: such values are results of a
first program, beside those of the function, to which all of this applies again.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p

from jaxmagma.frontends.conditions import Kind
from jaxmagma.frontends.index import Gathered
from jaxmagma.frontends.linear import linear_map
from jaxmagma.frontends.lines import Line, Lines, Variable, differentiated, inlined, variables
from jaxmagma.frontends.reverse import transposed_only
from jaxmagma.jaxpr import Unsupported, evaluated, is_extended


Function = Callable[..., list[jax.Array]]
# Evaluates lines of some operands; ``single``: as one program, or it raises ``Unsupported``.
Evaluate = Callable[..., list[jax.Array]]


def with_rules(
    fused: Function,
    plain: Function,
    operands: Sequence[Any],
    kinds: Sequence[Kind],
    evaluate: Evaluate,
) -> list[jax.Array]:
    """``fused`` of some operands; its derivatives, of every order, are those of ``plain``.

    That is a function of their values.  Neither holds a traced array.
    """
    function: Any = jax.custom_jvp(fused)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        # What has no tangent has none in the function, either: zero times infinity is no zero.
        along = {
            n: _canonical(replace(x, vector=t.vector) if isinstance(x, Gathered) else t)
            for n, (x, t) in enumerate(zip(primals, tangents, strict=True))
            if not isinstance(t.vector if isinstance(x, Gathered) else t, SymbolicZero)
        }
        derivative = _Derivative(plain, tuple(kinds), tuple(along), evaluate)
        results, dots = derivative(primals, list(along.values()))
        moved = iter(dots)

        def tangent(x: jax.Array) -> Any:
            if not _moves(x):
                return np.zeros(jnp.shape(x), jax.dtypes.float0)
            dot = next(moved)
            return SymbolicZero(jax.typeof(x).to_tangent_aval()) if dot is None else dot

        return results, list(map(tangent, results))

    function.defjvp(rule, symbolic_zeros=True)
    return list(function(*map(_canonical, operands)))


def _canonical(operand: Any) -> Any:
    """The same as arrays of JAX: no custom_jvp takes mapped ones of NumPy while it is traced."""

    def canonical(x: jax.Array) -> jax.Array:
        if is_extended(x.dtype) or not isinstance(x, jax.core.Tracer):
            return x
        weak_type = bool(jax.typeof(x).weak_type)
        return convert_element_type_p.bind(
            x, new_dtype=np.dtype(x.dtype), weak_type=weak_type, sharding=None
        )

    return jax.tree.map(canonical, operand)


def _moves(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.inexact))


def _struct(operand: Any) -> jax.ShapeDtypeStruct:
    """What the value of an operand is."""
    own = operand.aval if isinstance(operand, Gathered | Variable) else operand
    return jax.ShapeDtypeStruct(jnp.shape(own), own.dtype)


def _read(lines: Sequence[Line], results: Sequence[Any]) -> list[Variable]:
    """The variables that lines and results read."""
    read = [*(x for line in lines for x in line.operands), *results]
    return list(dict.fromkeys(variables(read)))


def _is_zero(lines: Lines, result: Any) -> bool:
    """Whether a result of lines is zero whatever their parameters are."""
    known: dict[Any, Any] = {}

    def value(x: Any) -> Any:
        return known.get(x) if isinstance(x, Variable) else x

    if isinstance(result, Variable) and result.kind != Kind.KNOWN:
        return False
    for line in lines.computing([result]):
        try:
            known.update(
                zip(
                    line.results,
                    evaluated(line.equation, [*map(value, line.operands)]),
                    strict=True,
                )
            )
        except Unsupported:
            return False
    return not np.any(value(result))


@dataclass(frozen=True)
class _Derivative:
    """The tangents of ``plain`` where the operands at ``moving`` have some."""

    plain: Function
    kinds: tuple[Kind, ...]
    moving: tuple[int, ...]
    evaluate: Evaluate

    def __call__(
        self, primals: Sequence[Any], along: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array | None]]:
        """The results, and the tangents of those that can have any; None is known to be zero."""
        structs = [_struct(x) for x in primals], [_struct(x) for x in along]
        closed, (made, _) = jax.make_jaxpr(self._linearized, return_shape=True)(*structs)
        lines = inlined(closed, [*self.kinds, *(self.kinds[n] for n in self.moving)])
        results, dots = lines.results[: len(made)], lines.results[len(made) :]
        own, directions = lines.parameters[: len(primals)], lines.parameters[len(primals) :]
        linear = lines.depending(directions)
        zero = [_is_zero(lines, x) for x in dots]
        dots = [x for x, vanishes in zip(dots, zero, strict=True) if not vanishes]
        needed = lines.computing(dots)
        if any(line.is_reverse_only for line in needed if not linear.isdisjoint(line.results)):
            values, found = self._in_reverse(lines.part(own, results), primals, along)
            pairs = zip(found, zero, strict=True)
            return values, [None if vanishes else x for x, vanishes in pairs]
        # The linear part is given what has a rule; or, if that makes no program, all that it needs.
        ruled = [x for x in differentiated(needed, dots) if x.has_own_derivative]
        last = [x for x in needed if not linear.isdisjoint(x.results)]
        # A program would lose the rule of a solver when it is transposed, and that a loop has none.
        solves = any(x.has_own_transpose for x in ruled if not linear.isdisjoint(x.results))
        if solves:  # what is gathered is read, for a linear map is one of arrays
            along = self.evaluate(Lines(directions, [], directions), along)
        cuts = [x for line in ruled for x in line.results], _read(last, [])
        for some in cuts:
            known = {*some, *variables(dots)}.difference(linear, own)
            left = Lines(lines.parameters, lines.lines, dots).given(known)
            given = [x for x in _read(left, dots) if x in known]
            rest = Lines([*own, *given, *directions], left, dots)
            single = self._as_single(rest, [*primals, *given, *along])
            if single is not None:
                break
        # What is but an argument without its tangent is no result of a program.
        stopped = {
            line.results[0]: jax.tree.map(jax.lax.stop_gradient, primals[own.index(x)])
            for line in ruled
            if line.stops_gradient
            for x in variables(line.operands)
            if x in own
        }
        wanted = [*results, *(x for x in given if x not in stopped)]
        values = self.evaluate(lines.part(own, wanted), primals)
        others = iter(values[len(results) :])
        first = [stopped[x] if x in stopped else next(others) for x in given]
        tangents = single or functools.partial(self.evaluate, rest)
        operands = [*primals, *first]
        if solves:
            made = self._with_transpose(tangents, rest, operands, along)
        else:
            made = tangents([*operands, *along]) if dots else []
        moved = iter(made)
        return values[: len(results)], [None if vanishes else next(moved) for vanishes in zero]

    def _at(self, values: Sequence[Any]) -> Function:
        """The function of what moves."""

        def function(*xs: Any) -> list[jax.Array]:
            whole = dict(enumerate(values)) | dict(zip(self.moving, xs, strict=True))
            return self.plain(*whole.values())

        return function

    def _linearized(self, values: Sequence[Any], along: Sequence[Any]) -> Any:
        results, push = jax.linearize(self._at(values), *(values[n] for n in self.moving))
        return results, [x for x in push(*along) if x.dtype != jax.dtypes.float0]

    def _as_single(self, lines: Lines, operands: Sequence[Any]) -> Function | None:
        """A function of operands like these, if lines are one program."""
        structs = [
            jax.tree.map(lambda y: jax.ShapeDtypeStruct(jnp.shape(y), y.dtype), x)
            if isinstance(x, Gathered)
            else _struct(x)
            for x in operands
        ]
        try:
            closed = jax.make_jaxpr(lambda xs: self.evaluate(lines, xs, single=True))(structs)
        except Unsupported:
            return None
        return lambda operands: jaxpr_as_fun(closed)(*jax.tree.leaves(operands))

    # ---- Solvers ---------------------------------------------------------------------------------

    def _with_transpose(
        self, tangents: Function, lines: Lines, operands: Sequence[Any], along: Sequence[Any]
    ) -> list[jax.Array]:
        """What ``tangents`` makes as ``lines`` do, of which JAX transposes each by its own rule."""
        leaves, tree = jax.tree.flatten(list(operands))

        def function(leaves: Sequence[Any], along: Sequence[Any]) -> list[jax.Array]:
            return tangents([*jax.tree.unflatten(tree, leaves), *along])

        def transpose(leaves: Sequence[Any], cotangents: Sequence[Any]) -> list[jax.Array]:
            return self._transposed(lines, jax.tree.unflatten(tree, leaves), cotangents)

        return linear_map(function, transpose, leaves, along)

    def _transposed(
        self, lines: Lines, operands: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[jax.Array]:
        own, directions = lines.parameters[: len(operands)], lines.parameters[len(operands) :]
        pairs = zip(lines.results, cotangents, strict=True)
        wanted = lines.part(
            lines.parameters, [x for x, cotangent in pairs if cotangent is not None]
        )
        given = [x for x in cotangents if x is not None]

        def pulled(values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            def function(*xs: Any) -> list[jax.Array]:
                return wanted.plainly([*values, *xs])

            return jax.linear_transpose(function, *map(_struct, directions))(list(cotangents))

        closed = jax.make_jaxpr(pulled)(list(map(_struct, operands)), list(map(_struct, given)))
        kinds = [*(x.kind for x in own), *(Kind.MAPPED for _ in given)]
        return self.evaluate(inlined(closed, kinds), [*operands, *given])

    # ---- Reverse mode alone ----------------------------------------------------------------------

    def _in_reverse(
        self, results: Lines, primals: Sequence[Any], along: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        values = self.evaluate(results, primals)
        directions = [Variable(_struct(x), Kind.MAPPED) for x in along]
        along = self.evaluate(Lines(directions, [], directions), along)
        leaves, tree = jax.tree.flatten(list(primals))
        transpose = functools.partial(self._transpose, tree)
        return values, transposed_only(transpose, leaves, along, list(filter(_moves, values)))

    def _transpose(
        self, tree: Any, leaves: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> list[jax.Array]:
        primals = jax.tree.unflatten(tree, leaves)
        structs = [_struct(x) for x in primals], [_struct(x) for x in cotangents]
        closed = jax.make_jaxpr(self._pulled)(*structs)
        lines = inlined(closed, [*self.kinds, *(Kind.MAPPED for _ in cotangents)])
        return self.evaluate(lines.part(lines.parameters, lines.results), [*primals, *cotangents])

    def _pulled(self, values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def function(*xs: Any) -> list[jax.Array]:
            return list(filter(_moves, self._at(values)(*xs)))

        return jax.vjp(function, *(values[n] for n in self.moving))[1](list(cotangents))
