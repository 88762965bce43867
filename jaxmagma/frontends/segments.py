"""Runs the jaxpr of one element: as one program, or as several with plain JAX between them.

Equations are read into a program as long as they are operations of one.  At one that is not, the
program ends: its results are computed, plain JAX evaluates the equation, and a new program begins.
A condition that is the same for all elements is such an equation, with a program in each branch.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from jaxmagma.frontends import iterations
from jaxmagma.frontends.complex_parts import in_parts
from jaxmagma.frontends.conditions import Kind
from jaxmagma.frontends.derivatives import with_rules
from jaxmagma.frontends.index import Gathered
from jaxmagma.frontends.lines import Line, Lines, Variable, differentiated, inlined, variables
from jaxmagma.frontends.loops import (
    are_loops,
    are_loops_and_products,
    are_loops_around_compared_products,
    begins_loop,
    is_better_loop,
    is_step,
)
from jaxmagma.frontends.written_out import rolled
from jaxmagma.internals import varying
from jaxmagma.jaxpr import (
    LongLoop,
    Reader,
    Tile,
    Unsupported,
    applied,
    evaluated,
    inner_jaxpr,
    is_empty,
    is_extended,
    is_pure,
    makes_table,
    plainly,
)
from jaxmagma.plans.capacity import can_be_constant, surely_fits, too_large, traced_once
from jaxmagma.plans.plan import one_by_one, plan
from jaxmagma.primitives import primitive
from jaxmagma.programs import integers
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.fallback import SYMBOLIC, PlainCall, is_symbolic, tell
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.precisions import is_narrower
from jaxmagma.programs.program import Input, Output, stored
from jaxmagma.programs.spelling import spell


# The folders whose lines are not the user's.
_LIBRARIES = tuple(f"{x}/" for x in (Path(jax.__file__).parent, Path(__file__).parent.parent))

Operand = Any  # an array, or Gathered

_LOOPS = "XLA's loops for it are as fast as a kernel"


# ---- Segments ------------------------------------------------------------------------------------


class _Use(Enum):
    """What an array is to a program."""

    VALUE = "a tile"
    PLACE = "places in a tile"
    INDEX = "what a global vector is gathered by"


@dataclass(frozen=True, eq=False)
class _Argument:
    """An array that is an argument of a program, and as what."""

    number: int
    array: jax.Array
    dtype: np.dtype
    limits: integers.Bounds | None  # of integers

    @property
    def converted(self) -> Callable[[jax.Array], jax.Array]:
        """The conversion of such arrays by plain JAX; it keeps none of them."""
        return functools.partial(_as_number, dtype=self.dtype, limits=self.limits)


def _as_number(x: jax.Array, dtype: np.dtype, limits: integers.Bounds | None) -> jax.Array:
    if x.dtype == dtype:
        return x
    if limits is not None and not integers.are_in(integers.of_dtype(x.dtype), limits):
        x = jnp.clip(x, *limits)
    return x.astype(dtype)


def _places(equation: JaxprEqn) -> range:
    """Which operands of an equation are places in tiles, those beyond which are all alike."""
    name, count = equation.primitive.name, len(equation.invars)
    if name in ("dynamic_slice", "dynamic_update_slice"):
        return range(1 if name == "dynamic_slice" else 2, count)
    return range(1, 2) if name == "gather" or name.startswith("scatter") else range(0)


class _Segment:
    """A program in the making, the lines it is made of, and the arrays that are its arguments."""

    def __init__(self, dtype: np.dtype) -> None:
        self.reader = Reader(Builder(0), dtype)
        self._lines: list[tuple[Line, list[Any]]] = []  # and operands: known, or their numbers
        self._operands: list[Operand] = []
        self._kinds: list[Kind] = []
        self._numbers: dict[int, int] = {}  # of the operands, by identity
        self._inputs: dict[tuple[int, _Use], _Argument] = {}  # by identity, and what they are to be

    def add(self, line: Line, operands: Sequence[Any]) -> list[Any]:
        """The results of a line in the program; raises ``Unsupported``."""
        places = _places(line.equation)
        read = [
            self.tile(x, _Use.PLACE if n in places else _Use.VALUE) for n, x in enumerate(operands)
        ]
        results = self.reader.equation(line.equation, read)
        if not any(isinstance(x, Tile) for x in results):
            return list(results)  # known, so no line of the program
        numbers = [
            self._number(x, kind) if isinstance(x, jax.Array | Gathered) else x
            for x, kind in zip(operands, line.kinds, strict=True)
        ]
        self._lines.append((line, numbers))
        return list(results)

    def are_loops(self, results: Sequence[Variable]) -> bool:
        """Whether XLA has loops for some results of the lines."""
        own = [line for line, _ in self._lines]
        made = {x for line in own for x in line.results}
        read = [x for line in own for x in variables(line.operands) if x not in made]
        lines = Lines(list(dict.fromkeys(read)), own, results)
        return _has_arrays(self._operands) and are_loops(lines, jax.default_backend())

    def tile(self, x: Any, use: _Use = _Use.VALUE) -> Any:
        """An operand as the reader wants it."""
        if isinstance(x, Gathered):
            vector, index = self._input(x.vector), self._input(x.index, _Use.INDEX)
            tables = [self._input(table, _Use.INDEX) for table in x.tables]
            found = self.reader.builder.gather(vector, index, tables, x.atomic)
            return Tile(found, self._is_in_parts(x.vector))
        if not isinstance(x, jax.Array):
            return x
        return Tile(self._input(x, use), self._is_in_parts(x))

    def _is_in_parts(self, array: jax.Array) -> bool:
        """Whether an array has complex numbers whose parts are numbers of the program."""
        own = self.reader.dtype
        whole = {np.dtype(np.float32): np.complex64, np.dtype(np.float64): np.complex128}.get(own)
        return whole is not None and array.dtype in (np.complex64, whole)

    def _number(self, operand: Operand, kind: Kind) -> "_Number":
        number = self._numbers.setdefault(id(operand), len(self._operands))
        if number == len(self._operands):
            self._operands.append(operand)
            self._kinds.append(kind)
        self._kinds[number] = max(kind, self._kinds[number])
        return _Number(number)

    def _input(self, array: jax.Array, use: _Use = _Use.VALUE) -> int:
        """The number of an array in the program; raises ``Unsupported``."""
        own = self.reader.dtype
        if is_extended(array.dtype):
            raise Unsupported(f"an array of {array.dtype} in a program of {own}")
        dtype, limits = np.dtype(array.dtype), None
        shape, is_complex = jnp.shape(array), self._is_in_parts(array)
        if is_complex:
            shape = (*shape, 2)
        elif integers.is_integer(dtype) and dtype != own and use != _Use.INDEX:
            limits = integers.of_dtype(dtype)
            exact = integers.are_exact(limits, own)
            if use == _Use.PLACE and not exact:
                # What is beyond all tiles is so when it is nearer.
                most = integers.largest(own)
                limits = max(limits[0], -most), min(limits[1], most)
            elif not exact:
                raise Unsupported(f"an array of {dtype} in a program of {own}")
            else:
                use = _Use.VALUE
        elif dtype.kind != "b" and dtype != (np.int32 if use == _Use.INDEX else own):
            if not is_narrower(dtype, own):
                raise Unsupported(f"an array of {dtype} in a program of {own}")
        key = id(array), use
        if key not in self._inputs:
            made = np.dtype(np.int32) if use == _Use.INDEX else own
            operand = Input((), shape, made, is_complex=is_complex)
            number, (_, made) = self.reader.builder.input(operand), operand.stored
            self._inputs[key] = _Argument(number, array, made, limits)
            if limits is not None:
                self.reader.bounded(Tile(number), limits)
        return self._inputs[key].number

    def run(self, results: Sequence[Tile], variables: Sequence[Variable] = ()) -> list[jax.Array]:
        """The values of some tiles, those of ``variables`` of the lines; raises ``NoProgram``."""
        if not results:
            return []
        tiles = list(dict.fromkeys(results))
        outputs = [Output(x.value, (), x.is_complex) for x in tiles]
        built = self.reader.builder.build(outputs)
        if not surely_fits(built.program):
            # What fits one contraction after the other, which is soon found, is not too large.
            normal, _ = normal_form(built.program)
            reason = too_large(one_by_one(normal)) and too_large(plan(normal))
            if reason:
                raise NoProgram(reason)
        given = {x.number: x for x in self._inputs.values()}
        inputs = [given[n] for n in built.inputs if n in given]
        arguments = [x.array for x in inputs]
        conversions = [x.converted for x in inputs]
        dtypes = [stored((), self.reader.dtype, x.is_complex)[1] for x in results]
        plain = self._plain(variables)
        numbers = {id(x): n for n, x in enumerate(jax.tree.leaves(self._operands))}
        wanted = [numbers.get(id(x), -1) for x in arguments]
        same = {*wanted} == {*range(len(self._operands))}
        known = variables and are_loops_and_products(line for line, _ in self._lines)
        if same and known and not any(isinstance(x, Gathered) for x in self._operands):
            where = list(map(results.index, tiles))
            order = [wanted.index(n) for n in range(len(wanted))]
            own = [x.array.dtype for x in inputs]  # whose values are the same as numbers

            def spelled(*arguments: jax.Array) -> list[jax.Array]:
                made = plain(*(arguments[n].astype(own[n]) for n in order))
                return [jnp.asarray(made[n], dtypes[n]) for n in where]

            spell(built.program, spelled)

        def fused(*arguments: jax.Array) -> list[jax.Array]:
            typed = (convert(x) for convert, x in zip(conversions, arguments, strict=True))
            found = dict(zip(tiles, primitive.apply(built.program, *typed), strict=True))
            return [found[x] for x in results]

        ruled = differentiated([line for line, _ in self._lines], variables)
        if not any(line.has_own_derivative for line in ruled):
            return fused(*arguments)

        def fused_of(*operands: Operand) -> list[jax.Array]:
            leaves = jax.tree.leaves(operands)
            return fused(*(leaves[n] for n in wanted))

        return with_rules(
            fused_of,
            lambda *values: list(map(jnp.asarray, plain(*values), dtypes)),
            self._operands,
            self._kinds,
            evaluate,
        )

    def plain(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """The values of variables of the lines, by plain JAX."""
        return self._plain(variables)(*_arrays(self._operands))

    def _plain(self, variables: Sequence[Variable]) -> Callable[..., list[jax.Array]]:
        """The same as a function of the values of the operands, of which it keeps none."""
        steps = [
            (
                line.equation,
                [x if isinstance(y, Tile) else y for x, y in zip(line.operands, own, strict=True)],
                line.results,
            )
            for line, own in self._lines
        ]

        def function(*values: jax.Array) -> list[jax.Array]:
            found: dict[Any, jax.Array] = {}

            def given(x: Any) -> Any:
                if isinstance(x, _Number):
                    return values[x.number]
                return found[x] if isinstance(x, Variable) else x

            for equation, operands, results in steps:
                made = applied(equation, list(map(given, operands)))
                found.update(zip(results, made, strict=True))
            return [found[x] for x in variables]

        return function


@dataclass(frozen=True)
class _Number:
    """Of an operand of a segment."""

    number: int


class NoProgram(Exception):
    """Why lines are none."""


def read(x: Gathered) -> jax.Array:
    """What an element gathers, by a program of its own."""
    segment = _Segment(np.dtype(x.vector.dtype))
    (result,) = segment.run([segment.tile(x)])
    return result


def _has_arrays(operands: Sequence[Operand]) -> bool:
    """Whether a kernel reads arrays: on a GPU it gathers for itself, a CPU gathers first."""
    gathers = any(isinstance(x, Gathered) for x in operands)
    return not gathers or jax.default_backend() == "cpu"


def _arrays(operands: Sequence[Operand]) -> list[jax.Array]:
    return [read(x) if isinstance(x, Gathered) else x for x in operands]


def run_function(closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    """The results of the function of an element, in XLA's own loops where these are as fast."""
    kinds, whole = [Kind.MAPPED] * len(operands), closed
    closed = in_parts(whole)
    lines, platform = inlined(closed, kinds), jax.default_backend()
    arrays = _has_arrays(operands)
    if arrays and are_loops(lines, platform):
        tell(PlainCall(_LOOPS))
        return plainly(whole, _arrays(operands))
    if arrays and are_loops_around_compared_products(lines, platform):
        tell(PlainCall("it compares products for all elements, and XLA's are as fast"))
        return _with_programs_for_derivatives(closed, operands, kinds)
    loops = rolled(closed)
    results = _run(lines if loops is closed else inlined(loops, kinds), loops, operands)
    return results if closed is whole else list(map(_typed, results, whole.out_avals))


def _with_programs_for_derivatives(
    closed: ClosedJaxpr, operands: Sequence[Operand], kinds: Sequence[Kind]
) -> list[jax.Array]:
    """The results of plain JAX; derivatives are of programs where these have some."""
    if not any(jnp.issubdtype(x.dtype, np.inexact) for x in closed.out_avals):
        return plainly(closed, _arrays(operands))
    # What is traced around the function is an operand, too: a rule may hold none of it.
    traced = [n for n, x in enumerate(closed.consts) if isinstance(x, jax.core.Tracer)]
    given = [closed.consts[n] for n in traced]
    known = {n: x for n, x in enumerate(closed.consts) if n not in traced}
    jaxpr = closed.jaxpr

    def plain(*operands: Any) -> list[jax.Array]:
        values = _arrays(operands)
        consts = known | dict(zip(traced, values, strict=False))
        own = ClosedJaxpr(jaxpr, [consts[n] for n in range(len(consts))])
        return plainly(own, values[len(traced) :])

    kinds = [*(Kind.UNSURE for _ in traced), *kinds]
    return with_rules(plain, plain, [*given, *operands], kinds, evaluate)


def run(closed: ClosedJaxpr, operands: Sequence[Operand], kinds: Sequence[Kind]) -> list[jax.Array]:
    """The results of a jaxpr of one element; ``kinds`` are those of the operands."""
    return _run(inlined(closed, kinds), closed, operands)


def _run(lines: Lines, closed: ClosedJaxpr, operands: Sequence[Operand]) -> list[jax.Array]:
    symbolic = any(map(is_symbolic, _shapes(lines)))
    if symbolic or _dtype(lines) is None:
        tell(PlainCall(SYMBOLIC if symbolic else "it computes with no floating-point numbers"))
        results = plainly(closed, _arrays(operands))
        return [_typed(x, own) for x, own in zip(results, closed.out_avals, strict=True)]
    results = evaluate(lines, operands)
    return [
        array if isinstance(x, Variable) else _typed(array, own)
        for x, array, own in zip(lines.results, results, closed.out_avals, strict=True)
    ]


def evaluate(lines: Lines, operands: Sequence[Operand], single: bool = False) -> list[jax.Array]:
    """The results of lines, as one program if ``single``; where that is none, ``Unsupported``."""
    dtype = _dtype(lines)
    lines = _in_turns(lines, dtype)
    last_use = {
        x: n for n, line in enumerate(lines.lines) for x in line.operands if isinstance(x, Variable)
    }
    last_use.update((x, len(lines.lines)) for x in lines.results if isinstance(x, Variable))
    # What is known of each variable: a tile of the segment, an array, a known array, or Gathered.
    values: dict[Variable, Any] = dict(zip(lines.parameters, operands, strict=True))
    unknown = (Tile, Gathered, jax.Array)
    segment = _Segment(dtype)
    divided = False  # by what plain JAX computes
    constants: set[Variable] = set()  # that programs have computed of constants alone
    looped: set[Variable] = set()  # that one of XLA's loops has made, which may go on
    mapped = [values[x] for x in lines.parameters if x.kind == Kind.MAPPED][:1]
    baked = traced_once()
    on_gpu = jax.default_backend() != "cpu"

    def value(x: Any) -> Any:
        found = values[x] if isinstance(x, Variable) else x
        if isinstance(found, Tile | Gathered):
            return found
        if not isinstance(found, jax.Array):
            return np.asarray(found) if found is x else found
        if is_empty(found):
            return np.zeros(found.shape, found.dtype)
        constant = found is x and baked and can_be_constant(x) and not is_extended(x.dtype)
        return np.asarray(x) if constant else found

    def given(x: Any) -> Any:
        """The same for plain JAX, to which an array without values is mapped, and has tangents."""
        found = values[x] if isinstance(x, Variable) else x
        return found if isinstance(found, jax.Array) and is_empty(found) else value(x)

    def of_each(x: Any, array: Any) -> Any:
        """An array as one of each element, if vmap has it so; it may be known all the same."""
        if not isinstance(x, Variable) or x.kind != Kind.MAPPED or not mapped:
            return array
        known = not isinstance(array, jax.Array) or x in constants
        return _as_mapped(array, *_arrays(mapped)) if known else array

    def goes_on(line: Line, found: Sequence[Any]) -> bool:
        """Whether it is a step of a loop of XLA's that has made all of its operands."""
        pairs = zip(line.operands, found, strict=True)
        arrays = [x for x, array in pairs if isinstance(array, unknown)]
        all_looped = all(isinstance(x, Variable) and x in looped for x in arrays)
        return is_step(line.equation) and bool(arrays) and all_looped

    def finish(line: int) -> None:
        """Ends the segment before a line: what is needed from there on becomes arrays.

        Beside what plain JAX computes XLA's loops are better than a kernel that is no faster: they
        are one with loops before and after them.
        """
        nonlocal segment
        tiles = {
            x: tile
            for x, tile in values.items()
            if isinstance(tile, Tile) and last_use.get(x, -1) >= line
        }
        try:
            if divided and tiles and segment.are_loops(list(tiles)):
                raise NoProgram(_LOOPS)
            arrays = segment.run(list(tiles.values()), list(tiles))
        except NoProgram as reason:
            if single:
                raise Unsupported(str(reason)) from None
            tell(PlainCall(str(reason)))
            values.update(zip(tiles, segment.plain(list(tiles)), strict=True))
        else:
            for (x, tile), array in zip(tiles.items(), arrays, strict=True):
                values[x] = _as_dtype(array, x.aval.dtype)
                if segment.reader.builder.is_known(tile.value):
                    constants.add(x)
        segment = _Segment(dtype)

    for number, line in enumerate(lines.lines):
        found = [value(x) for x in line.operands]
        if goes_on(line, found):
            more = applied(line.equation, [given(x) for x in line.operands])
            values.update(zip(line.results, more, strict=True))
            looped.update(line.results)
            continue
        try:
            if _is_outside(found):
                raise Unsupported("arithmetic of integers that operands are")
            depends = any(isinstance(x, unknown) for x in found)
            if depends and on_gpu and is_better_loop(line.equation):
                raise Unsupported(_LOOPS)
            if depends or makes_table(line.equation, dtype):
                made: Sequence[Any] = segment.add(line, found)
            else:
                made = evaluated(line.equation, found)
        except Unsupported as reason:
            moves, ends = all(map(_is_integer, found)), any(isinstance(x, Tile) for x in found)
            if single and (ends or not moves):
                raise
            if not moves:
                tell(PlainCall(f"{_place(line)}: {reason}"))
                divided = True
            if on_gpu and begins_loop(line.equation):
                looped.update(line.results)
            if ends:
                finish(number)
            arrays = _arrays([given(x) for x in line.operands])
            if not is_pure(line.equation):  # what happens does so once for each element
                arrays = [of_each(*x) for x in zip(line.operands, arrays, strict=True)]
            made = _applied(line, arrays, isinstance(reason, LongLoop))
        values.update(zip(line.results, made, strict=True))

    finish(len(lines.lines))
    arrays = _arrays([value(x) for x in lines.results])
    arrays = [of_each(*x) for x in zip(lines.results, arrays, strict=True)]
    return [
        _typed(array, x.aval) if isinstance(x, Variable) else jnp.asarray(array)
        for x, array in zip(lines.results, arrays, strict=True)
    ]


# ---- What is no operation of a program -----------------------------------------------------------


def _applied(line: Line, operands: Sequence[Any], is_long: bool) -> list[jax.Array]:
    """The results of a line by plain JAX, with programs in the branches and calls in it.

    A loop that ``is_long`` has several steps in a program.
    """
    equation = line.equation
    if equation.primitive.name == "cond" and set(equation.params) == {"branches"}:
        return _branched(line, *operands)
    inner = inner_jaxpr(equation)
    if inner is not None and not equation.effects:
        return _with_own_rule(line, operands, inner)
    repeated = iterations.steps(equation, operands, line.kinds, is_long)
    if repeated is not None and is_pure(equation):
        step, kinds, loop = repeated
        # Under `shard_map`, the jaxpr of a step does not say what differs from device to device.
        differs = any(map(varying, operands))
        if differs or not are_loops(inlined(step, kinds), jax.default_backend()):
            return loop(run)
    return applied(equation, operands)


def _with_own_rule(line: Line, operands: Sequence[Any], inner: ClosedJaxpr) -> list[jax.Array]:
    """The results of a call with a rule of its own, of which parts are programs."""
    arrays = [n for n, x in enumerate(operands) if isinstance(x, jax.Array)]
    others = {n: x for n, x in enumerate(operands) if n not in arrays}

    def whole(values: Sequence[Any]) -> list[Any]:
        found = others | dict(zip(arrays, values, strict=True))
        return [found[n] for n in range(len(operands))]

    return with_rules(
        lambda *xs: run(inner, whole(xs), line.kinds),
        lambda *xs: applied(line.equation, whole(xs)),
        [operands[n] for n in arrays],
        [line.kinds[n] for n in arrays],
        evaluate,
    )


def _branched(line: Line, which: Any, *operands: Any) -> list[jax.Array]:
    branches = [
        functools.partial(run, branch, kinds=line.kinds[1:])
        for branch in line.equation.params["branches"]
    ]
    if not isinstance(which, jax.core.Tracer):
        return branches[int(np.clip(which, 0, len(branches) - 1))](operands)
    return list(jax.lax.switch(which, [lambda *xs, f=f: f(xs) for f in branches], *operands))


def _is_outside(operands: Sequence[Any]) -> bool:
    """Whether a line is of integers that depend on none of the program's values.

    What JAX makes of these is an operand, and splits no program, whatever it is.
    """
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    return all(map(_is_integer, operands)) and any(x.dtype != bool for x in arrays)


def _is_integer(x: Any) -> bool:
    known = isinstance(x, jax.Array | np.ndarray)
    return known and (x.dtype == bool or integers.is_integer(x.dtype))


def _shapes(lines: Lines) -> Iterator[tuple[Any, ...]]:
    values = [x for line in lines.lines for x in [*line.operands, *line.results]]
    for x in [*lines.parameters, *values]:
        yield getattr(x.aval, "shape", ()) if isinstance(x, Variable) else np.shape(x)


def _dtype(lines: Lines) -> Any:
    """The dtype that most values are computed in; None if there are no floating-point numbers.

    It is no wider one for the sake of a few values: those of a narrower dtype are rounded, but what
    is wider is left to plain JAX.  Complex numbers that meet real ones are two of these.
    """
    unknown = lines.depending(lines.parameters)
    results = [x for line in lines.lines for x in line.results]
    moved = {
        x
        for line in lines.lines
        if line.equation.primitive.name == "convert_element_type"
        for x in line.results
    }
    moving = [x for x in [*results, *lines.parameters] if x in unknown]
    # A number of Python's has the dtype of what it meets.
    strong = [x for x in moving if not getattr(x.aval, "weak_type", False)]
    made = set(strong).difference(lines.parameters, moved)
    computed = [x for x in results if x in made]
    has_real = any(jnp.issubdtype(x.aval.dtype, np.floating) for x in moving)
    for some in (computed, strong, moving, results):
        counts: dict[np.dtype, int] = {}
        for x in some:
            dtype = getattr(x.aval, "dtype", np.int32)
            if jnp.issubdtype(dtype, np.floating if has_real else np.inexact):
                own = np.dtype(dtype)
                counts[own] = counts.get(own, 0) + math.prod(x.aval.shape)
        if counts:
            return max(counts, key=lambda x: (counts[x], x.itemsize))
    return None


def _in_turns(lines: Lines, dtype: Any) -> Lines:
    """The same with what is of a dtype that the program has not done together.

    So a program does not end where a value is converted that is needed no more, or later.
    """
    if dtype is None or not all(is_pure(x.equation) for x in lines.lines):
        return lines
    turns: dict[Variable, int] = {}  # even ones are those of programs

    def is_other(x: Any) -> bool:
        own = x.aval.dtype if isinstance(x, Variable) else x.dtype
        other = jnp.issubdtype(own, np.inexact) and own != dtype
        return bool(other and not is_narrower(own, dtype))

    def turn(line: Line) -> int:
        last = max((turns.get(x, -1) for x in variables(line.operands)), default=-1)
        other = any(map(is_other, [*variables(line.operands), *line.results]))
        found = last + (last % 2 != other)
        turns.update(dict.fromkeys(line.results, found))
        return found

    keys = [turn(line) for line in lines.lines]
    if all(before <= after for before, after in itertools.pairwise(keys)):
        return lines
    order = sorted(range(len(keys)), key=lambda n: keys[n])
    return replace(lines, lines=[lines.lines[n] for n in order])


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


def _place(line: Line) -> str:
    """Where in the user's source an equation comes from."""
    traceback: Any = line.site.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "unknown line"
