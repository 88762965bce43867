"""Runs the jaxpr of one element: as one program, or as several with plain JAX between them.

Equations are read into a program as long as they are operations of one.  At one that is not, the
program ends: its results are computed, plain JAX evaluates the equation, and a new program begins.
A condition that is the same for all elements is such an equation, with a program in each branch.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p

from jaxmagma import conditions, primitive
from jaxmagma.builder import Builder
from jaxmagma.capacity import can_be_constant, surely_fits, too_large, traced_once
from jaxmagma.conditions import Kind
from jaxmagma.fallback import PlainCall, tell
from jaxmagma.jaxpr import (
    Reader,
    Tile,
    Unsupported,
    applied,
    evaluated,
    has_own_rule,
    inner_jaxpr,
    interpreted,
    is_empty,
    is_extended,
    nested,
)
from jaxmagma.plan import one_by_one, plan
from jaxmagma.program import Input, Output


# The folders whose lines are not the user's.
_LIBRARIES = tuple(str(Path(x).parent) + "/" for x in (jax.__file__, __file__))
# Equations with a derivative that is not that of the operations they are read as: rules of the
# user's own, reductions that share a derivative among equal values, bounds that have none, and
# factorisations by iteration or of matrices of which one triangle is read.
_REVERSE_ONLY = {"custom_vjp_call", "custom_vjp_call_jaxpr"}
_OWN_DERIVATIVE = _REVERSE_ONLY | {
    "custom_jvp_call",
    "stop_gradient",
    "reduce_max",
    "reduce_min",
    "cummax",
    "cummin",
    "clamp",
    "scatter-mul",
    "scatter_mul",
    "cholesky",
    "custom_linear_solve",
    "eigh",
    "qr",
    "svd",
}


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


# ---- Rules of differentiation that the function brings along -----------------------------------


def _names(equation: JaxprEqn) -> set[str]:
    return {equation.primitive.name, *(x.primitive.name for x in nested(equation))}


def _differentiated_plainly(
    fused: Callable[..., Any],
    plain: Callable[..., Any],
    arrays: Sequence[jax.Array],
    reverse_only: bool,
) -> list[jax.Array]:
    """A function as programs, and its derivatives, of every order, as JAX has them."""
    if reverse_only:
        # A function with a reverse rule has no derivative in forward mode.
        function: Any = jax.custom_vjp(fused)
        function.defvjp(
            lambda *arrays: jax.vjp(plain, *arrays), lambda pull, cotangents: pull(list(cotangents))
        )
        return list(function(*arrays))
    function = jax.custom_jvp(fused)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        # What has no tangent has none in the function, either: zero times infinity is no zero.
        moving = [n for n, x in enumerate(tangents) if not isinstance(x, SymbolicZero)]

        def of_moving(*values: Any) -> list[jax.Array]:
            arrays = list(primals)
            for n, value in zip(moving, values, strict=True):
                arrays[n] = value
            return plain(*arrays)

        return jax.jvp(of_moving, [primals[n] for n in moving], [tangents[n] for n in moving])

    function.defjvp(derivative, symbolic_zeros=True)
    return list(function(*arrays))


def _with_own_rule(
    line: "_Line", operands: Sequence[jax.Array], inner: ClosedJaxpr
) -> list[jax.Array]:
    """The results of a call with a rule of its own, of which parts are programs."""
    arrays = [n for n, x in enumerate(operands) if isinstance(x, jax.Array)]

    def whole(values: Sequence[Any]) -> list[Any]:
        found = list(operands)
        for n, value in zip(arrays, values, strict=True):
            found[n] = value
        return found

    return _differentiated_plainly(
        lambda *xs: run(inner, whole(xs), line.kinds),
        lambda *xs: applied(line.equation, whole(xs)),
        [operands[n] for n in arrays],
        reverse_only=not _names(line.equation).isdisjoint(_REVERSE_ONLY),
    )


# ---- Segments ------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """An equation of a jaxpr whose calls are inlined: numbers of variables, or known values."""

    equation: JaxprEqn
    site: JaxprEqn  # the outermost call it stands in
    operands: list[Any]
    results: list["_Variable"]

    @property
    def kinds(self) -> list[Kind]:
        return [_kind(x) for x in self.operands]


@dataclass(frozen=True, eq=False)
class _Variable:
    aval: Any
    kind: Kind


def _kind(x: Any) -> Kind:
    if isinstance(x, _Variable):
        return x.kind
    return Kind.UNSURE if isinstance(x, jax.Array) else Kind.KNOWN


def _inlined(
    closed: ClosedJaxpr, arguments: Sequence[Any], site: JaxprEqn | None = None
) -> tuple[list[_Line], list[Any]]:
    """The lines of a jaxpr and its results, which are variables or known values."""
    lines: list[_Line] = []

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
                _Variable(x.aval, kind) for x, kind in zip(equation.outvars, kinds, strict=True)
            ]
            lines.append(_Line(equation, site or equation, operands, results))
        return results

    return lines, interpreted(closed, arguments, inline)


class _Segment:
    """A program in the making, the lines it is made of, and the arrays that are its arguments."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.lines: list[tuple[_Line, list[Any]]] = []  # and what their operands are
        self._inputs: dict[int, tuple[int, jax.Array]] = {}  # by the identity of the array

    def input(self, array: jax.Array, index: bool = False) -> Tile:
        if is_extended(array.dtype):
            raise Unsupported(f"an array of {array.dtype} in a program of {self.reader.dtype}")
        if id(array) not in self._inputs:
            dtype = np.dtype(array.dtype)
            own = self.reader.dtype if dtype.kind == "b" else dtype
            if own != (np.int32 if index else self.reader.dtype):
                raise Unsupported(f"an array of {dtype} in a program of {self.reader.dtype}")
            number = self.reader.builder.input(Input((), jnp.shape(array), own))
            self._inputs[id(array)] = number, array
        return Tile(self._inputs[id(array)][0])

    def gather(self, x: Gathered) -> Tile:
        vector, index = self.input(x.vector), self.input(x.index, index=True)
        tables = [self.input(table, index=True).value for table in x.tables]
        return Tile(self.reader.builder.gather(vector.value, index.value, tables, x.atomic))

    def run(
        self, results: Sequence[Tile], variables: Sequence["_Variable"] = ()
    ) -> list[jax.Array]:
        """The values of some tiles, those of ``variables`` of the lines; raises ``TooLarge``."""
        if not results:
            return []
        values = list(dict.fromkeys(x.value for x in results))
        built = self.reader.builder.build([Output(x, ()) for x in values])
        if not surely_fits(built.program):
            # What fits one contraction after the other, which is soon found, is not too large.
            reason = too_large(one_by_one(built.program)) and too_large(plan(built.program))
            if reason:
                raise TooLarge(reason)
        arrays = {number: array for number, array in self._inputs.values()}
        wanted = [n for n in built.inputs if n in arrays]

        def fused(*arguments: jax.Array) -> list[jax.Array]:
            typed = (x.astype(self.reader.dtype) if x.dtype == bool else x for x in arguments)
            found = dict(zip(values, primitive.apply(built.program, *typed), strict=True))
            return [found[x.value] for x in results]

        arguments = [arrays[n] for n in wanted]
        names = set().union(*(_names(line.equation) for line, _ in self.lines))
        if names.isdisjoint(_OWN_DERIVATIVE):
            return fused(*arguments)
        # The derivative is JAX's, of all that the lines compute with.
        others = [array for number, array in arrays.items() if number not in wanted]
        count = len(arguments)

        def plain(*arrays: jax.Array) -> list[jax.Array]:
            known = {id(old): new for old, new in zip([*arguments, *others], arrays, strict=True)}
            found = self.plain(known)
            return [jnp.asarray(found[x], self.reader.dtype) for x in variables]

        return _differentiated_plainly(
            lambda *arrays: fused(*arrays[:count]),
            plain,
            [*arguments, *others],
            reverse_only=not names.isdisjoint(_REVERSE_ONLY),
        )

    def plain(self, arrays: Mapping[int, jax.Array]) -> dict["_Variable", jax.Array]:
        """What the lines compute, in plain JAX, of ``arrays`` in place of those they are named by.

        An array's name is its identity.
        """
        found: dict[_Variable, jax.Array] = {}

        def replaced(x: Any) -> Any:
            return arrays.get(id(x), x)

        def array(x: Any, own: Any) -> Any:
            if isinstance(own, Tile):
                return found[x]
            if isinstance(own, Gathered):
                tables = tuple(map(replaced, own.tables))
                vector, index = replaced(own.vector), replaced(own.index)
                return replace(own, vector=vector, index=index, tables=tables).read()
            return replaced(own)

        for line, operands in self.lines:
            values = [array(*x) for x in zip(line.operands, operands, strict=True)]
            found.update(zip(line.results, applied(line.equation, values), strict=True))
        return found


class TooLarge(Exception):
    """Why a program is none."""


def _arrays(operands: Sequence[Operand]) -> list[jax.Array]:
    return [x.read() if isinstance(x, Gathered) else x for x in operands]


def _plain(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    results = jaxpr_as_fun(closed)(*_arrays(operands))
    return [_typed(x, own) for x, own in zip(results, closed.out_avals, strict=True)]


def run(closed: ClosedJaxpr, operands: Sequence[Operand], kinds: Sequence[Kind]) -> list[jax.Array]:
    """The results of a jaxpr of one element; ``kinds`` are those of the operands."""
    parameters = [_Variable(*x) for x in zip(closed.in_avals, kinds, strict=True)]
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
    constants: set[_Variable] = set()  # that programs have computed of constants alone
    mapped = next((x for x, kind in zip(operands, kinds, strict=True) if kind == Kind.MAPPED), None)
    baked = traced_once()

    def value(x: Any) -> Any:
        found = values[x] if _is_variable(x) else x
        if isinstance(found, Tile | Gathered):
            return found
        if not isinstance(found, jax.Array):
            return np.asarray(found) if found is x else found
        if is_empty(found):
            return np.zeros(found.shape, found.dtype)
        constant = found is x and baked and can_be_constant(x) and not is_extended(x.dtype)
        return np.asarray(x) if constant else found

    def of_each(x: Any, array: Any) -> Any:
        """An array as one of each element, if vmap has it so; it may be known all the same."""
        if not _is_variable(x) or x.kind != Kind.MAPPED or mapped is None:
            return array
        known = not isinstance(array, jax.Array) or x in constants
        return _as_mapped(array, *_arrays([mapped])) if known else array

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
        try:
            arrays = segment.run([tile for _, tile in live], [x for x, _ in live])
        except TooLarge as reason:
            tell(PlainCall(str(reason)))
            values.update(segment.plain({}))
        else:
            for (x, tile), array in zip(live, arrays, strict=True):
                values[x] = _as_dtype(array, x.aval.dtype)
                if segment.reader.builder.is_known(tile.value):
                    constants.add(x)
        segment = _Segment(Reader(Builder(0), dtype))

    for number, line in enumerate(lines):
        found = [value(x) for x in line.operands]
        try:
            if any(isinstance(x, unknown) for x in found):
                made: Sequence[Any] = segment.reader.equation(
                    line.equation, [read(x) for x in found]
                )
                segment.lines.append((line, found))
            else:
                made = evaluated(line.equation, found)
        except Unsupported as reason:
            moves = all(_is_integer(x) for x in found)
            if not moves:
                tell(PlainCall(f"{_place(line)}: {reason}"))
            if any(isinstance(x, Tile) for x in found):
                finish(number)
            arrays = _arrays([value(x) for x in line.operands])
            if line.equation.effects:  # they happen once for each element
                arrays = [of_each(*x) for x in zip(line.operands, arrays, strict=True)]
            made = _applied(line, arrays)
        values.update(zip(line.results, made, strict=True))

    finish(len(lines))
    arrays = _arrays([value(x) for x in results])
    arrays = [of_each(*x) for x in zip(results, arrays, strict=True)]
    avals = [
        x.aval if _is_variable(x) else own for x, own in zip(results, closed.out_avals, strict=True)
    ]
    return [_typed(x, own) for x, own in zip(arrays, avals, strict=True)]


# ---- What is no operation of a program -----------------------------------------------------------


def _applied(line: _Line, operands: Sequence[Any]) -> list[jax.Array]:
    """The results of a line by plain JAX, with programs in the branches and calls in it."""
    equation = line.equation
    if equation.primitive.name == "cond" and set(equation.params) == {"branches"}:
        return _branched(line, *operands)
    inner = inner_jaxpr(equation)
    if inner is not None and not equation.effects:
        return _with_own_rule(line, operands, inner)
    return applied(equation, operands)


def _branched(line: _Line, which: Any, *operands: Any) -> list[jax.Array]:
    branches = [
        functools.partial(run, branch, kinds=line.kinds[1:])
        for branch in line.equation.params["branches"]
    ]
    if not isinstance(which, jax.core.Tracer):
        return branches[int(np.clip(which, 0, len(branches) - 1))](operands)
    return list(jax.lax.switch(which, [lambda *xs, f=f: f(xs) for f in branches], *operands))


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
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, np.complexfloating):
        array = array.real
    return array != 0 if np.dtype(dtype).kind == "b" else array.astype(dtype)


def _typed(array: Any, own: Any) -> jax.Array:
    """A result as an array of the dtype it has in JAX, weak where it is."""
    if is_extended(own.dtype):
        return array
    array = jnp.asarray(array, own.dtype)
    if bool(own.weak_type) == bool(jax.typeof(array).weak_type):
        return array
    return convert_element_type_p.bind(
        array, new_dtype=np.dtype(own.dtype), weak_type=bool(own.weak_type), sharding=None
    )


def _as_mapped(known: Any, mapped: jax.Array) -> jax.Array:
    """A known value, as one of each element: vmap takes it for a result that differs."""
    if is_extended(mapped.dtype):
        mapped = jax.random.key_data(mapped)
    return jax.lax.select(jnp.any(mapped != 0), jnp.asarray(known), jnp.asarray(known))


def _place(line: _Line) -> str:
    """Where in the user's source an equation comes from."""
    traceback: Any = line.site.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "unknown line"
