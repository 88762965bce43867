"""Runs the jaxpr of one element: as one program, or as several with plain JAX between them.

Equations are read into a program as long as they are operations of one.  At one that is not, the
program ends: its results are computed, plain JAX evaluates the equation, and a new program begins.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxmagma import primitive
from jaxmagma.builder import Builder
from jaxmagma.fallback import PlainCall, tell
from jaxmagma.jaxpr import Reader, Tile, Unsupported, applied, evaluated, inner_jaxpr
from jaxmagma.plan import plan
from jaxmagma.program import Constant, ElementProgram, Input, Output


# A program with more values than this per element does not stay on any chip.
_LARGEST_TILES = 1 << 15
# Constants larger than this stay arguments: constant memory holds 64 KiB.
_LARGEST_CONSTANT = 8192
# Equations whose derivative is not that of what they call.
_CUSTOM_JVP = ("custom_jvp_call", "stop_gradient")
_CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True)
class Gathered:
    """The part of a vector that an element reads; ``places`` are those of all elements."""

    vector: jax.Array
    index: jax.Array
    places: Constant

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        shape = self.index.shape + jnp.shape(self.vector)[1:]
        return jax.ShapeDtypeStruct(shape, jnp.result_type(self.vector))

    def read(self) -> jax.Array:
        """It alone, as a program."""
        reader = Reader(Builder(0), np.dtype(self.vector.dtype))
        segment = _Segment(reader, _Tangents())
        (result,) = segment.run([segment.gather(self)])
        return result


Operand = Any  # an array, or Gathered


def run(
    closed: ClosedJaxpr, operands: Sequence[Operand], tangents: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """The results of a jaxpr, with its own rules of differentiation.

    ``tangents`` are the arrays among the operands in which the results are linear.
    """
    names = {eqn.primitive.name for eqn in _nested(closed)}
    if names & set(_CUSTOM_VJP):
        return _with_custom_vjp(closed, operands)
    if names & set(_CUSTOM_JVP):
        return _with_custom_jvp(closed, operands, tangents)
    return _run(closed, operands, tangents)


# ---- Rules of differentiation that the function brings along -----------------------------------


def _nested(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    for equation in closed.jaxpr.eqns:
        yield equation
        inner = inner_jaxpr(equation)
        if inner is not None:
            yield from _nested(inner)


def _with_custom_jvp(
    closed: ClosedJaxpr, operands: Sequence[Operand], tangents: Sequence[jax.Array]
) -> list[jax.Array]:
    """JAX differentiates the function, and the derivative is fused."""
    arrays, whole = _apart([*closed.consts, *operands])
    inner = ClosedJaxpr(_closed_by_arguments(closed), [])
    linear = [any(x is y for y in tangents) for x in arrays]

    @jax.custom_jvp
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return _run(inner, whole(arrays), list(itertools.compress(arrays, linear)))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        values, moving = whole(primals), whole(tangents)
        active = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inner.in_avals]
        results = _run(inner, values)

        def tangents_of(*leaves: Any) -> Any:
            given, dots = leaves[: len(active)], iter(leaves[len(active) :])
            dots = [
                next(dots) if is_active else np.zeros(np.shape(x), jax.dtypes.float0)
                for x, is_active in zip(given, active, strict=True)
            ]
            return jax.jvp(jaxpr_as_fun(inner), given, tuple(dots))[1]

        moving = [
            Gathered(t.vector, v.index, v.places) if isinstance(v, Gathered) else t
            for v, t, is_active in zip(values, moving, active, strict=True)
            if is_active
        ]
        operands = [*values, *moving]
        derivative = jax.make_jaxpr(tangents_of)(*map(_aval, operands))
        dots = [x.vector if isinstance(x, Gathered) else x for x in moving]
        return results, run(derivative, operands, dots)

    return list(function(*arrays))


def _with_custom_vjp(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    inner = ClosedJaxpr(_closed_by_arguments(closed), [])
    active = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inner.in_avals]

    @jax.custom_vjp
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return _run(inner, arrays)

    def forward(*arrays: jax.Array) -> Any:
        return _run(inner, arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> Any:
        def cotangents_of(*leaves: Any) -> Any:
            given, results = leaves[: len(active)], leaves[len(active) :]

            def of_active(*moving: Any) -> Any:
                remaining = iter(moving)
                chosen = zip(given, active, strict=True)
                return jaxpr_as_fun(inner)(*(next(remaining) if y else x for x, y in chosen))

            moving = [x for x, is_active in zip(given, active, strict=True) if is_active]
            return jax.vjp(of_active, *moving)[1](list(results))

        avals = [_aval(x) for x in [*arrays, *cotangents]]
        found = iter(run(jax.make_jaxpr(cotangents_of)(*avals), [*arrays, *cotangents]))
        return tuple(
            next(found) if is_active else np.zeros(np.shape(x), jax.dtypes.float0)
            for x, is_active in zip(arrays, active, strict=True)
        )

    function.defvjp(forward, backward)
    read = [x.read() if isinstance(x, Gathered) else x for x in operands]
    return list(function(*closed.consts, *read))


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
        for array in ((x.vector, x.index) if isinstance(x, Gathered) else (x,))
    ]

    def whole(arrays: Sequence[Any]) -> list[Operand]:
        remaining = iter(arrays)
        return [
            Gathered(next(remaining), next(remaining), x.places)
            if isinstance(x, Gathered)
            else next(remaining)
            for x in operands
        ]

    return arrays, whole


def _aval(x: Operand) -> jax.ShapeDtypeStruct:
    if isinstance(x, Gathered):
        return x.aval
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


# ---- Segments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
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
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, arguments, strict=True))
    lines: list[_Line] = []

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for equation in closed.jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        inner = inner_jaxpr(equation)
        if inner is not None:
            more, results = _inlined(inner, operands, site or equation)
            lines += more
        else:
            results = [_Variable(x.aval) for x in equation.outvars]
            lines.append(_Line(equation, site or equation, operands, results))
        known.update(zip(equation.outvars, results, strict=True))
    return lines, [read(x) for x in closed.jaxpr.outvars]


class _Segment:
    """A program in the making, and the arrays that are its arguments."""

    def __init__(self, reader: Reader, tangents: "_Tangents") -> None:
        self.reader = reader
        self.tangents = tangents
        self.arguments: dict[int, jax.Array] = {}  # by input
        self._inputs: dict[int, tuple[int, jax.Array]] = {}  # by the identity of the array

    def input(self, array: jax.Array, index: bool = False) -> Tile:
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
        return Tile(self.reader.builder.gather(vector.value, index.value, x.places))

    def run(self, results: Sequence[Tile]) -> list[jax.Array]:
        """The values of some tiles.

        Those that depend on tangents are a program of their own: linear in what it is given, and
        the others are known before any tangent is.
        """
        found: dict[int, jax.Array] = {}
        for moving in (False, True):
            chosen = [
                x for x in dict.fromkeys(x.value for x in results) if self._moves(x) == moving
            ]
            arrays = self._apply(chosen)
            found.update(zip(chosen, arrays, strict=True))
            if moving:
                self.tangents.add(arrays)
        return [found[x.value] for x in results]

    def _moves(self, value: int) -> bool:
        inputs = self.reader.builder.inputs(value)
        return any(self.arguments[n] in self.tangents for n in inputs if n in self.arguments)

    def _apply(self, values: Sequence[int]) -> list[jax.Array]:
        if not values:
            return []
        built = self.reader.builder.build([Output(x, ()) for x in values])
        reason = _too_large(built.program)
        if reason:
            raise TooLarge(reason)
        arguments = [self.arguments[n] for n in built.inputs if n in self.arguments]
        return primitive.apply(built.program, *arguments)


class _Tangents:
    """The arrays that are tangents, or depend on one."""

    def __init__(self, arrays: Sequence[jax.Array] = ()) -> None:
        self._arrays: dict[int, jax.Array] = {}
        self.add(arrays)

    def add(self, arrays: Sequence[Any]) -> None:
        self._arrays.update((id(x), x) for x in arrays)

    def __contains__(self, array: Any) -> bool:
        return id(array) in self._arrays


class TooLarge(Exception):
    """Why a program is none."""


def _too_large(program: ElementProgram) -> str | None:
    planned = plan(program)
    if planned.on_chip > _LARGEST_TILES:
        return f"one element has {planned.on_chip} values, too many to stay on chip"
    return None


def _run(
    closed: ClosedJaxpr, operands: Sequence[Operand], tangents: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    try:
        return _run_in_segments(closed, operands, _Tangents(tangents))
    except TooLarge as reason:
        tell(PlainCall(str(reason)))
        read = [x.read() if isinstance(x, Gathered) else x for x in operands]
        return list(jaxpr_as_fun(closed)(*read))


def _run_in_segments(
    closed: ClosedJaxpr, operands: Sequence[Operand], tangents: _Tangents
) -> list[jax.Array]:
    parameters = [_Variable(x) for x in closed.in_avals]
    lines, results = _inlined(closed, parameters)
    dtype = _dtype(lines, closed)
    if dtype is None:
        tell(PlainCall("it computes with no floating-point numbers"))
        return list(jaxpr_as_fun(closed)(*operands))
    last_use = {x: n for n, line in enumerate(lines) for x in line.operands if _is_variable(x)}
    last_use.update((x, len(lines)) for x in results if _is_variable(x))
    # What is known of each variable: a tile of the segment, an array, a known array, or Gathered.
    values: dict[_Variable, Any] = dict(zip(parameters, operands, strict=True))
    segment = _Segment(Reader(Builder(0), dtype), tangents)
    baked = _baked()

    def value(x: Any) -> Any:
        if _is_variable(x):
            return values[x]
        small = np.size(x) <= _LARGEST_CONSTANT
        known = not isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array):
            return np.asarray(x) if known and small and baked and x.is_fully_addressable else x
        return np.asarray(x)

    def read(x: Any, keep: bool) -> Any:
        """An operand as the reader wants it."""
        x = value(x)
        if isinstance(x, Gathered):
            return segment.gather(x)
        return segment.input(x) if isinstance(x, jax.Array) and not keep else x

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
        segment = _Segment(Reader(Builder(0), dtype), tangents)

    for number, line in enumerate(lines):
        found = [value(x) for x in line.operands]
        if not any(isinstance(x, Tile | Gathered | jax.Array) for x in found):
            made: Sequence[Any] = evaluated(line.equation, found)
        else:
            try:
                made = segment.reader.equation(
                    line.equation, [read(x, keep=False) for x in line.operands]
                )
            except Unsupported as reason:
                moves = all(_is_integer(x) for x in found)
                if not moves:
                    tell(PlainCall(f"{_place(line)}: {reason}"))
                if any(isinstance(x, Tile) for x in found):
                    finish(number)
                arrays = [value(x) for x in line.operands]
                arrays = [x.read() if isinstance(x, Gathered) else x for x in arrays]
                made = applied(line.equation, arrays)
                if any(x in tangents for x in arrays):
                    tangents.add(made)
        values.update(zip(line.results, made, strict=True))

    finish(len(lines))
    arrays = [value(x) for x in results]
    arrays = [x.read() if isinstance(x, Gathered) else x for x in arrays]
    return [jnp.asarray(x, aval.dtype) for x, aval in zip(arrays, closed.out_avals, strict=True)]


def _is_variable(x: Any) -> bool:
    return isinstance(x, _Variable)


def _is_integer(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and x.dtype.kind in "iub"


def _baked() -> bool:
    """Whether known arrays become constants: where the call is traced once and run often."""
    return isinstance(jnp.asarray(0.0), jax.core.Tracer)


def _dtype(lines: Sequence[_Line], closed: ClosedJaxpr) -> np.dtype | None:
    """The dtype that most results have."""
    avals = [x.aval for line in lines for x in line.results] + [*closed.in_avals]
    counts: dict[np.dtype, int] = {}
    for aval in avals:
        dtype = np.dtype(getattr(aval, "dtype", np.int32))
        if jnp.issubdtype(dtype, jnp.inexact):
            counts[dtype] = counts.get(dtype, 0) + 1
    return max(counts, key=lambda x: counts[x], default=None)


def _as_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """A value of a program as what it is to JAX: truth values are numbers in a program."""
    if array.dtype == dtype:
        return array
    return array != 0 if np.dtype(dtype).kind == "b" else array.astype(dtype)


def _place(line: _Line) -> str:
    """Where in the user's source an equation comes from."""
    traceback = line.site.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not any(f"/{package}/" in frame.file_name for package in ("jax", "jaxmagma")):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "unknown line"
