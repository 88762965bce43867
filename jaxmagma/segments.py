"""Runs the jaxpr of one element: as one program, or as several with plain JAX between them.

Equations are read into a program as long as they are operations of one.  At one that is not, the
program ends: its results are computed, plain JAX evaluates the equation, and a new program begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from jaxmagma import primitive
from jaxmagma.builder import Builder
from jaxmagma.capacity import can_be_constant, surely_fits, too_large, traced_once
from jaxmagma.fallback import PlainCall, tell
from jaxmagma.jaxpr import (
    Reader,
    Tile,
    Unsupported,
    applied,
    evaluated,
    inner_jaxpr,
    interpreted,
    is_extended,
    nested,
)
from jaxmagma.plan import one_by_one, plan
from jaxmagma.program import Input, Output


# The folders whose lines are not the user's.
_LIBRARIES = tuple(str(Path(x).parent) + "/" for x in (jax.__file__, __file__))
# Equations with a derivative that is not that of the operations they are read as: rules of the
# user's own, and reductions that share a derivative among equal values.
_OWN_JVP = {
    "custom_jvp_call",
    "stop_gradient",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
}
_OWN_VJP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}


@dataclass(frozen=True)
class Gathered:
    """The part of a vector that an element reads; ``tables`` are those of all elements."""

    vector: jax.Array
    index: jax.Array
    tables: tuple[jax.Array, ...]
    atomic: bool

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        shape = self.index.shape + jnp.shape(self.vector)[1:]
        return jax.ShapeDtypeStruct(shape, jnp.result_type(self.vector))

    def read(self) -> jax.Array:
        """It alone, as a program."""
        reader = Reader(Builder(0), np.dtype(self.vector.dtype))
        segment = _Segment(reader)
        (result,) = segment.run([segment.gather(self)])
        return result


Operand = Any  # an array, or Gathered


def run(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    """The results of a jaxpr, with its own rules of differentiation."""
    names = {equation.primitive.name for equation in nested(closed.jaxpr)}
    if names & (_OWN_JVP | _OWN_VJP):
        return _differentiated_plainly(closed, operands, forward=not names & _OWN_VJP)
    return _run(closed, operands)


# ---- Rules of differentiation that the function brings along -----------------------------------


def _differentiated_plainly(
    closed: ClosedJaxpr, operands: Sequence[Operand], forward: bool
) -> list[jax.Array]:
    """The function as programs, and its derivatives, of every order, as JAX has them.

    A function with a reverse rule has no derivative in forward mode.
    """
    arrays, whole = _apart([*closed.consts, *operands])
    inner = ClosedJaxpr(_closed_by_arguments(closed), [])

    def fused(*arrays: jax.Array) -> list[jax.Array]:
        return _run(inner, whole(arrays))

    def plain(*arrays: jax.Array) -> list[jax.Array]:
        return _plain(inner, whole(arrays))

    if forward:
        function: Any = jax.custom_jvp(fused)
        function.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    else:
        function = jax.custom_vjp(fused)
        function.defvjp(
            lambda *arrays: (function(*arrays), arrays),
            lambda arrays, cotangents: jax.vjp(plain, *arrays)[1](list(cotangents)),
        )
    return list(function(*arrays))


def _closed_by_arguments(closed: ClosedJaxpr) -> Any:
    """The jaxpr with its constants as leading arguments."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info
    )


def _apart(operands: Sequence[Operand]) -> Any:
    """The arrays of the operands, and the function that puts them together again."""
    arrays = [
        array
        for x in operands
        for array in ((x.vector, x.index, *x.tables) if isinstance(x, Gathered) else (x,))
    ]

    def whole(arrays: Sequence[Any]) -> list[Operand]:
        remaining = iter(arrays)
        return [
            Gathered(
                next(remaining),
                next(remaining),
                tuple(next(remaining) for _ in x.tables),
                x.atomic,
            )
            if isinstance(x, Gathered)
            else next(remaining)
            for x in operands
        ]

    return arrays, whole


# ---- Segments ------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """An equation of a jaxpr whose calls are inlined: numbers of variables, or known values."""

    equation: JaxprEqn
    site: JaxprEqn  # the outermost call it stands in
    operands: list[Any]
    results: list["_Variable"]


@dataclass(frozen=True, eq=False)
class _Variable:
    aval: Any


def _inlined(
    closed: ClosedJaxpr, arguments: Sequence[Any], site: JaxprEqn | None = None
) -> tuple[list[_Line], list[Any]]:
    """The lines of a jaxpr and its results, which are variables or known values."""
    lines: list[_Line] = []

    def inline(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        inner = inner_jaxpr(equation)
        if inner is not None:
            more, results = _inlined(inner, operands, site or equation)
            lines.extend(more)
        else:
            results = [_Variable(x.aval) for x in equation.outvars]
            lines.append(_Line(equation, site or equation, operands, results))
        return results

    return lines, interpreted(closed, arguments, inline)


class _Segment:
    """A program in the making, and the arrays that are its arguments."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.arguments: dict[int, jax.Array] = {}  # by input
        self._inputs: dict[int, tuple[int, jax.Array]] = {}  # by the identity of the array

    def input(self, array: jax.Array, index: bool = False) -> Tile:
        if is_extended(array.dtype):
            raise Unsupported(f"an array of {array.dtype} in a program of {self.reader.dtype}")
        if id(array) not in self._inputs:
            dtype = np.dtype(array.dtype)
            value = array if dtype.kind != "b" else array.astype(self.reader.dtype)
            if value.dtype != (np.int32 if index else self.reader.dtype):
                raise Unsupported(f"an array of {dtype} in a program of {self.reader.dtype}")
            number = self.reader.builder.input(Input((), jnp.shape(array), np.dtype(value.dtype)))
            self._inputs[id(array)] = number, array
            self.arguments[number] = value
        return Tile(self._inputs[id(array)][0])

    def gather(self, x: Gathered) -> Tile:
        vector, index = self.input(x.vector), self.input(x.index, index=True)
        tables = [self.input(table, index=True).value for table in x.tables]
        return Tile(self.reader.builder.gather(vector.value, index.value, tables, x.atomic))

    def run(self, results: Sequence[Tile]) -> list[jax.Array]:
        """The values of some tiles."""
        if not results:
            return []
        values = list(dict.fromkeys(x.value for x in results))
        built = self.reader.builder.build([Output(x, ()) for x in values])
        if not surely_fits(built.program):
            # What fits one contraction after the other, which is soon found, is not too large.
            reason = too_large(one_by_one(built.program)) and too_large(plan(built.program))
            if reason:
                raise TooLarge(reason)
        arguments = [self.arguments[n] for n in built.inputs if n in self.arguments]
        found = dict(zip(values, primitive.apply(built.program, *arguments), strict=True))
        return [found[x.value] for x in results]


class TooLarge(Exception):
    """Why a program is none."""


def _run(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    try:
        return _run_in_segments(closed, operands)
    except TooLarge as reason:
        tell(PlainCall(str(reason)))
        return _plain(closed, operands)


def _arrays(operands: Sequence[Operand]) -> list[jax.Array]:
    return [x.read() if isinstance(x, Gathered) else x for x in operands]


def _plain(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    return list(jaxpr_as_fun(closed)(*_arrays(operands)))


def _run_in_segments(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    parameters = [_Variable(x) for x in closed.in_avals]
    lines, results = _inlined(closed, parameters)
    dtype = _dtype(lines, closed)
    if dtype is None:
        tell(PlainCall("it computes with no floating-point numbers"))
        return _plain(closed, operands)
    last_use = {x: n for n, line in enumerate(lines) for x in line.operands if _is_variable(x)}
    last_use.update((x, len(lines)) for x in results if _is_variable(x))
    # What is known of each variable: a tile of the segment, an array, a known array, or Gathered.
    values: dict[_Variable, Any] = dict(zip(parameters, operands, strict=True))
    unknown = (Tile, Gathered, jax.Array)
    segment = _Segment(Reader(Builder(0), dtype))
    baked = traced_once()

    def value(x: Any) -> Any:
        if _is_variable(x):
            return values[x]
        if isinstance(x, jax.Array):
            constant = baked and can_be_constant(x) and not is_extended(x.dtype)
            return np.asarray(x) if constant else x
        return np.asarray(x)

    def read(x: Any) -> Any:
        """An operand as the reader wants it."""
        if isinstance(x, Tile):
            return x
        if isinstance(x, Gathered):
            return segment.gather(x)
        return segment.input(x) if isinstance(x, jax.Array) else x

    def finish(line: int) -> None:
        """Ends the segment before a line: what is needed from there on becomes arrays."""
        nonlocal segment
        live = [
            (x, tile)
            for x, tile in values.items()
            if isinstance(tile, Tile) and last_use.get(x, -1) >= line
        ]
        arrays = segment.run([tile for _, tile in live])
        for (x, _), array in zip(live, arrays, strict=True):
            values[x] = _as_dtype(array, x.aval.dtype)
        segment = _Segment(Reader(Builder(0), dtype))

    for number, line in enumerate(lines):
        found = [value(x) for x in line.operands]
        if not any(isinstance(x, unknown) for x in found):
            made: Sequence[Any] = evaluated(line.equation, found)
        else:
            try:
                made = segment.reader.equation(line.equation, [read(x) for x in found])
            except Unsupported as reason:
                moves = all(_is_integer(x) for x in found)
                if not moves:
                    tell(PlainCall(f"{_place(line)}: {reason}"))
                if any(isinstance(x, Tile) for x in found):
                    finish(number)
                made = applied(line.equation, _arrays([value(x) for x in line.operands]))
        values.update(zip(line.results, made, strict=True))

    finish(len(lines))
    arrays = _arrays([value(x) for x in results])
    return [jnp.asarray(x, aval.dtype) for x, aval in zip(arrays, closed.out_avals, strict=True)]


def _is_variable(x: Any) -> bool:
    return isinstance(x, _Variable)


def _is_integer(x: Any) -> bool:
    known = isinstance(x, jax.Array | np.ndarray)
    return known and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer))


def _dtype(lines: Sequence[_Line], closed: ClosedJaxpr) -> np.dtype | None:
    """The dtype that most results have."""
    avals = [x.aval for line in lines for x in line.results] + [*closed.in_avals]
    counts: dict[np.dtype, int] = {}
    for aval in avals:
        dtype = getattr(aval, "dtype", np.int32)
        if jnp.issubdtype(dtype, jnp.inexact):
            dtype = np.dtype(dtype)
            counts[dtype] = counts.get(dtype, 0) + 1
    return max(counts, key=lambda x: counts[x], default=None)


def _as_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """A value of a program as what it is to JAX: truth values are numbers in a program."""
    if array.dtype == dtype:
        return array
    return array != 0 if np.dtype(dtype).kind == "b" else array.astype(dtype)


def _place(line: _Line) -> str:
    """Where in the user's source an equation comes from."""
    traceback: Any = line.site.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "unknown line"
