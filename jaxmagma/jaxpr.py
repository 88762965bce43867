"""Reads a JAX function of one element's tiles into a program.

Every equation of the jaxpr becomes operations of a :class:`Builder`, or is *unsupported*, with a
reason.  What depends on constants alone is computed while reading.

A rule that reads an equation *heeds* some of its parameters, and *knows* of others which values
change nothing.  An equation that has anything else, in this release of JAX or in the next, is
unsupported: plain JAX computes it.
"""

import itertools
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.lax import GatherScatterMode, Precision, RoundingMethod

from jaxmagma import integers, linalg
from jaxmagma.builder import MOST_COMPONENTS, Builder, letters, repeated, row_major
from jaxmagma.functions import COMPLEX_FUNCTIONS, FUNCTIONS, evaluate
from jaxmagma.program import Contract, ElementProgram, Map, Place, View


# A loop of more steps than this stays one.
_MOST_STEPS = 64
# Values taken apart, or small matrices multiplied, one by one.
_MOST_PIECES = 64
_LARGEST_COMPONENT = 4
# Places among which a computed index chooses, and values along an axis that are sorted.
_MOST_PLACES = 16
_MOST_SORTED = 8


class Unsupported(Exception):
    """Why an equation is no operation of a program."""


@dataclass(frozen=True)
class Tile:
    """A value of the builder, as a variable of the jaxpr; it has values, at least one."""

    value: int


Read = Tile | np.ndarray  # of a variable: in the program, or known
Emit = Callable[..., Any]  # (function, operands...) -> value


@dataclass(frozen=True)
class Rule:
    """How equations are read, and which ones.

    ``read`` goes by the parameters that it ``heeds``, all of which an equation has.  ``knows`` says
    which values it knows of those of which there may come more, and of parameters that change
    nothing; other parameters an equation has not.
    ``truth`` says that truth values may be taken as the numbers 0 and 1, ``operands`` how many
    there are, if it is always as many.
    """

    read: Callable[..., Any]
    heeds: tuple[str, ...] = ()
    knows: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    operands: int | None = None
    truth: bool = True

    def check(self, equation: JaxprEqn) -> None:
        """Raises ``Unsupported`` for an equation that is not of this kind."""
        name, parameters = equation.primitive.name, equation.params
        for key, value in parameters.items():
            known = self.knows.get(key)
            if not (key in self.heeds if known is None else known(value)):
                raise Unsupported(f"{name} with {key}={reprlib.repr(value)}")
        for key in self.heeds:
            if key not in parameters:
                raise Unsupported(f"{name} without {key}")
        if self.operands is not None and len(equation.invars) != self.operands:
            raise Unsupported(f"{name} of {len(equation.invars)} operands")
        if not self.truth and any(aval(x).dtype == bool for x in equation.invars):
            raise Unsupported(f"{name} of truth values")


def _any(value: Any) -> bool:
    return True


def _none(value: Any) -> bool:
    return value is None


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is x or value == x for x in values)


def interpreted(
    closed: ClosedJaxpr,
    arguments: Sequence[Any],
    equation_rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of a jaxpr, whose equations ``equation_rule`` evaluates."""
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        if not isinstance(x, Literal):
            return known[x]
        return x.val if hasattr(x.val, "dtype") else np.asarray(x.val, aval(x).dtype)

    for equation in closed.jaxpr.eqns:
        results = equation_rule(equation, [read(x) for x in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in closed.jaxpr.outvars]


# ---- Pointwise equations -------------------------------------------------------------------------


def _integer_power(emit: Emit, base: Any, y: int) -> Any:
    if y < 0:
        # Not one over the power, whose derivative at zero is infinity times zero.
        return _integer_power(emit, emit("div", 1.0, base), -y)
    result = None
    while y:
        if y & 1:
            result = base if result is None else emit("mul", result, base)
        y >>= 1
        if y:
            base = emit("mul", base, base)
    return 1.0 if result is None else result


def _round(emit: Emit, x: Any, rounding_method: Any) -> Any:
    away = rounding_method == RoundingMethod.AWAY_FROM_ZERO
    return emit("round_away" if away else "round_even", x)


def _select(emit: Emit, which: Any, *cases: Any) -> Any:
    made = cases[0]
    for n, case in enumerate(cases[1:], start=1):
        beyond = emit("ge", which, float(n)) if len(cases) > 2 else which
        made = emit("select", beyond, made, case)
    return made


def _function(name: str, operands: int) -> Rule:
    # How accurate a function is to be: ours are as accurate as they get by default.
    knows = {"accuracy": _none, "out_dtype": _none, "accumulation_dtype": _none}
    return Rule(lambda emit, *xs: emit(name, *xs), (), knows, operands)


# By the name of the primitive; ``read`` gets ``emit``, the operands and what it heeds.
POINTWISE: dict[str, Rule] = {
    **{name: _function(name, x.operands) for name, x in FUNCTIONS.items()},
    "integer_pow": Rule(_integer_power, ("y",), {"mul_impl": _none}),
    "square": Rule(lambda emit, x: emit("mul", x, x)),
    "add_any": Rule(lambda emit, a, b: emit("add", a, b)),
    "one_minus_square": Rule(lambda emit, x: emit("sub", 1.0, emit("mul", x, x))),
    "clamp": Rule(lambda emit, low, x, high: emit("min", emit("max", x, low), high)),
    "select_n": Rule(_select),
    "round": Rule(_round, ("rounding_method",)),
}


def pointwise(equation: JaxprEqn, emit: Emit, operands: Sequence[Any]) -> Any | None:
    """The result of a pointwise equation through ``emit``, or None if it is none."""
    rule = POINTWISE.get(equation.primitive.name)
    if rule is None:
        return None
    rule.check(equation)
    return rule.read(emit, *operands, **{key: equation.params[key] for key in rule.heeds})


def pointwise_rule(closed: ClosedJaxpr, dtype: np.dtype) -> Callable[..., Any]:
    """A jaxpr of scalars as a function ``(emit, operands, constant) -> value``.

    ``emit`` makes the value of a pointwise function, ``constant`` that of a known scalar; None is a
    result that is known to be zero.
    """

    def rule(emit: Emit, operands: Sequence[Any], constant: Callable[[np.ndarray], Any]) -> Any:
        def made(x: Any) -> Any:
            known = isinstance(x, float | np.ndarray | np.generic)
            return constant(np.asarray(x, dtype)) if known else x

        def emit_made(function: str, *values: Any) -> Any:
            return emit(function, *map(made, values))

        def scalar(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            inner = inner_jaxpr(equation)
            if all(isinstance(x, float | int | np.ndarray | np.generic) for x in inputs):
                return evaluated(equation, inputs)
            if (found := pointwise(equation, emit_made, inputs)) is not None:
                return [found]
            if inner is not None:
                return interpreted(inner, inputs, scalar)
            if equation.primitive.name in _NO_CHANGE:
                return inputs[:1]
            raise AssertionError(f"{equation.primitive.name} of scalars")

        (result,) = interpreted(closed, operands, scalar)
        if isinstance(result, float | int | np.ndarray | np.generic):
            return None if not np.any(result) else constant(np.asarray(result, dtype))
        return result

    return rule


# ---- Reading -------------------------------------------------------------------------------------

# Of values that are all one dtype these change nothing.
_NO_CHANGE = {"convert_element_type", "broadcast_in_dim", "copy", "stop_gradient"}


def _call(jaxpr: str, *others: str) -> Rule:
    """A call of a jaxpr; where it is compiled and what of it is kept do not change its values."""
    return Rule(lambda equation: equation.params[jaxpr], (jaxpr,), dict.fromkeys(others, _any))


_JIT = _call(
    "jaxpr",
    *("in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh"),
    *("name", "keep_unused", "inline", "compiler_options_kvs"),
)
_REMAT = _call("jaxpr", "prevent_cse", "differentiated", "policy", "name", "concrete")
_CALL = _call("call_jaxpr", "name")
# Whoever differentiates a program knows the rules that came along: see `derivatives`.
_CUSTOM_VJP = ("fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees", "symbolic_zeros")
_CALLS: dict[str, Rule] = {
    "jit": _JIT,
    "pjit": _JIT,
    "closed_call": _CALL,
    "core_call": _CALL,
    "remat": _REMAT,
    "remat2": _REMAT,
    "checkpoint": _REMAT,
    "custom_jvp_call": _call("call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros"),
    "custom_vjp_call": _call("call_jaxpr", *_CUSTOM_VJP),
    "custom_vjp_call_jaxpr": _call("fun_jaxpr", "fwd_jaxpr_thunk", *_CUSTOM_VJP),
}


def has_own_rule(equation: JaxprEqn) -> bool:
    """Whether it is a call with a rule of differentiation of the user's own."""
    return equation.primitive.name.startswith("custom_")


def inner_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation calls, if it does nothing else."""
    rule = _CALLS.get(equation.primitive.name)
    if rule is None:
        return None
    try:
        rule.check(equation)
    except Unsupported:
        return None
    found = rule.read(equation)
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, [])


def inside(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            yield from getattr(inner, "eqns", ())


def nested(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr, or inside of an equation, those inside of others too."""
    for equation in jaxpr.eqns if hasattr(jaxpr, "eqns") else inside(jaxpr):
        yield equation
        yield from nested(equation)


# What may be computed as soon as its operands are known, beside what has a rule: it depends on
# nothing else, such as the platform or the place along a named axis, and is no effect.
_PURE = frozenset(
    """
    acos acosh asin asinh atan atanh approx_top_k bessel_i0e bessel_i1e bitcast_convert_type clz
    complex conj conv_general_dilated copy cumlogsumexp digamma eig erf_inv fft geqrf
    householder_product igamma igammac igamma_grad_a imag iota lgamma nextafter not platform_index
    population_count polygamma random_bits random_clone random_fold_in random_gamma random_seed
    random_unwrap random_wrap real reduce reduce_precision reduce_window reduce_window_max
    reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta rng_bit_generator
    scatter-max scatter-min scatter-sub scatter_max scatter_min scatter_sub schur
    select_and_gather_add select_and_scatter_add shift_left shift_right_arithmetic
    shift_right_logical threefry2x32 top_k tridiagonal tridiagonal_solve while zeta
    """.split()
)


# The choice of an operation's own implementation inside of Pallas kernels, which ours are not.
_ELSEWHERE = (("mosaic",), None)


def is_pure(equation: JaxprEqn) -> bool:
    """Whether its results depend on its operands alone, and nothing else happens."""
    name, parameters = equation.primitive.name, equation.params
    if name in POINTWISE or (name in RULES and name not in _NESTED):
        return not equation.effects
    known = name in _PURE or name in _NESTED or name in _CALLS
    for key in ("platforms", "branches_platforms"):
        known = known and parameters.get(key, _ELSEWHERE) == _ELSEWHERE
    return known and not equation.effects and all(map(is_pure, inside(equation)))


def evaluated(equation: JaxprEqn, operands: Sequence[Any]) -> list[np.ndarray]:
    """The results of an equation of known operands; raises ``Unsupported``."""
    if not is_pure(equation):
        raise Unsupported(f"{equation.primitive.name} is not an operation of a kernel")
    made = [aval(x) for x in equation.outvars]
    if made and all(map(is_empty, made)):
        return [np.zeros(x.shape, x.dtype) for x in made]
    inner = inner_jaxpr(equation)
    if inner is not None:
        return interpreted(inner, operands, evaluated)
    with jax.ensure_compile_time_eval():
        found = applied(equation, operands)
        return [x if is_extended(x.dtype) else np.asarray(x) for x in found]


def aval(variable: Any) -> Any:
    """The shape and dtype of a variable of a jaxpr."""
    return variable.aval


def is_empty(own: Any) -> bool:
    """Whether an array has no values: then it is known."""
    return 0 in own.shape and not is_extended(own.dtype)


def is_extended(dtype: Any) -> bool:
    """Whether it is a dtype of JAX's own, such as that of random keys, unknown to NumPy."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def applied(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, by plain JAX."""
    if equation.primitive.name == "clamp":
        # Its derivative by a bound that is a scalar fails under vmap.
        shape = aval(equation.outvars[0]).shape
        low, x, high = (jnp.broadcast_to(x, shape) for x in operands)
        # So does a number that all elements share, between bounds that they do not.
        operands = [low, jax.lax.select_n(jnp.zeros(shape, np.int32), x, low, high), high]
    if equation.primitive.name == "pad" and is_empty(aval(equation.invars[0])):
        # Of an array that has no tangent, its derivative by what is around that fails.
        return [jnp.broadcast_to(operands[1], aval(equation.outvars[0]).shape)]
    bound = equation.primitive.get_bind_params(equation.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    made = equation.primitive.bind(*functions, *operands, **parameters)
    return list(made) if equation.primitive.multiple_results else [made]


def _uniform(read: np.ndarray) -> np.ndarray:
    """A known array as one number, if all of its numbers are that."""
    flat = np.ravel(read)
    return flat[0] if flat.size and (flat == flat[0]).all() else read


class Reader:
    """Reads equations into ``builder``; all values but indices are of ``dtype``."""

    def __init__(self, builder: Builder, dtype: np.dtype) -> None:
        self.builder = builder
        self.dtype = dtype
        self._bounds: dict[int, integers.Bounds] = {}  # of the values that are integers

    def value(self, read: Read) -> int:
        if isinstance(read, Tile):
            return read.value
        array = np.asarray(read)
        if array.dtype.kind == "c" != self.dtype.kind:
            raise Unsupported(f"a number of {array.dtype} in a program of {self.dtype}")
        made = array.astype(self.dtype, copy=False)
        if array.dtype.kind in "iu" and not np.array_equal(made.real.astype(array.dtype), array):
            raise Unsupported(f"an integer that is no number of {self.dtype}")
        return self.builder.constant(made)

    def shape(self, read: Read) -> tuple[int, ...]:
        return self.builder.tile(read.value) if isinstance(read, Tile) else np.shape(read)

    def emit(self, function: str, *operands: Any) -> Read:
        """A pointwise function of tiles of equal shape, constants and scalars."""
        if not any(isinstance(x, Tile) for x in operands):
            with jax.ensure_compile_time_eval():
                return np.asarray(
                    evaluate(function, *(np.asarray(x, self.dtype) for x in operands))
                )
        if self.dtype.kind == "c" and function not in COMPLEX_FUNCTIONS:
            raise Unsupported(f"{function} of complex numbers is not an operation of a kernel")
        # Ranks are equal, but for scalars; an extent may be one where others are larger.
        shapes = [self.shape(x) for x in operands]
        alike = all(x == shapes[0] for x in shapes)
        tile = shapes[0] if alike else np.broadcast_shapes(*shapes)
        operands = tuple(x if isinstance(x, Tile) else _uniform(x) for x in operands)
        axis = self._taken_apart(function, operands, tile)
        if axis is not None:
            parts = []
            for k in range(tile[axis]):
                shapes = [self.shape(x) for x in operands]
                at = [min(k, shape[axis] - 1) if shape else 0 for shape in shapes]
                pairs = zip(operands, at, strict=True)
                own = [self.index(x, axis, n) if self.shape(x) else x for x, n in pairs]
                parts.append(self.emit(function, *own))
            return self.stack(parts, axis)
        chosen = self._chosen(function, operands)
        if chosen is not None:
            return self.spread(chosen, tile)
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        terms = [self._labelled(x, tile, labels) for x in operands]
        return Tile(self.builder.pointwise(function, terms, labels, sizes))

    def _labelled(self, x: Read, tile: Sequence[int], labels: str) -> tuple[int, str]:
        """A value that broadcasts to a tile, without axes of one place there, and its labels."""
        shape, own = self.shape(x), labels if self.shape(x) else ""
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1 != tile[axis]:
                x, own = self.index(x, axis, 0), own[:axis] + own[axis + 1 :]
        return self.value(x), own

    def spread(self, x: Read, tile: tuple[int, ...]) -> Read:
        """A value that broadcasts to a tile, as one of that shape."""
        if not isinstance(x, Tile):
            return np.broadcast_to(x, tile)
        labels = letters(len(tile))
        sizes = dict(zip(labels, tile, strict=True))
        return Tile(self.builder.relabel(*self._labelled(x, tile, labels), labels, sizes))

    def _taken_apart(
        self, function: str, operands: Sequence[Read], tile: tuple[int, ...]
    ) -> int | None:
        """An axis along which a function is one of components, because of what is known.

        A table beside a stack of components is one number for each; a mask, as that of a triangle,
        says which components there are.
        """
        tables = [x for x in operands if not isinstance(x, Tile) and np.ndim(x)]
        if not tables:
            return None
        for x in operands:
            axis = self.builder.stacked(x.value) if isinstance(x, Tile) else None
            if axis is not None and tile[axis] == self.shape(x)[axis]:
                return axis
        if function == "select" and not isinstance(operands[0], Tile):
            mask = np.asarray(operands[0])
            for axis, extent in enumerate(mask.shape):
                if 1 < extent <= _LARGEST_COMPONENT and (mask != mask.take([0], axis)).any():
                    return axis
        return None

    def _chosen(self, function: str, operands: Sequence[Read]) -> Read | None:
        """The operand that is the result whatever the others are, if it is known to be."""
        known = [not isinstance(x, Tile) and np.ndim(x) == 0 for x in operands]
        if function in ("and", "or") and any(known):
            n = known.index(True)
            decides = bool(operands[n]) == (function == "or")
            return operands[n if decides else 1 - n]
        if function != "select":
            return None
        which, *cases = operands
        if known[0]:
            return cases[int(which != 0)]
        alike = (
            len({np.asarray(x, self.dtype).tobytes() for x in cases}) == 1 if all(known[1:]) else 0
        )
        return cases[0] if alike else None

    def equation(self, equation: JaxprEqn, operands: Sequence[Any]) -> list[Read]:
        """The results of one equation; raises ``Unsupported``."""
        operands = [x if isinstance(x, Tile) else np.asarray(x) for x in operands]
        name, made = equation.primitive.name, [aval(x) for x in equation.outvars]
        if equation.effects:
            raise Unsupported(f"{name} has effects")
        inner = inner_jaxpr(equation)
        if inner is not None:
            return self.jaxpr(inner, operands)
        if not any(isinstance(x, Tile) for x in operands):
            return list(evaluated(equation, operands))
        if made and all(map(is_empty, made)):
            return [np.zeros(x.shape, x.dtype) for x in made]
        limits = None if name in _NESTED else self.check_dtypes(equation, operands)
        decided = self._decided(equation, operands)
        if decided is not None:
            return [np.full(made[0].shape, decided)]
        found = pointwise(equation, self.emit, operands)
        if found is None:
            rule = RULES.get(name)
            if rule is None:
                raise Unsupported(f"{name} is not an operation of a kernel")
            rule.check(equation)
            found = rule.read(self, equation, *operands)
        results = found if isinstance(found, list) else [found]
        checked = [self._checked(name, x, own) for x, own in zip(results, made, strict=True)]
        for read, own in zip(checked, made, strict=True):
            if isinstance(read, Tile) and limits and jnp.issubdtype(own.dtype, jnp.integer):
                self._bounds[read.value] = limits
        return checked

    def _checked(self, name: str, read: Any, own: Any) -> Read:
        """A result, if it has the shape that it has in JAX; what is known has its dtype, too."""
        if isinstance(read, Tile):
            if self.shape(read) != own.shape:
                raise Unsupported(f"{name} of shape {own.shape}")
            return read
        return np.broadcast_to(np.asarray(read).astype(own.dtype), own.shape)

    def jaxpr(self, closed: ClosedJaxpr, arguments: Sequence[Read]) -> list[Read]:
        results = interpreted(closed, arguments, self.equation)
        return [x if isinstance(x, Tile) else np.asarray(x) for x in results]

    def check_dtypes(self, equation: JaxprEqn, operands: Sequence[Read]) -> integers.Bounds | None:
        """Whether it computes in the program's dtype; the bounds of the integers that it makes."""
        name, variables = equation.primitive.name, [*equation.invars, *equation.outvars]
        if all(aval(x).dtype == self.dtype for x in variables):
            return None
        for x in variables:
            if is_extended(aval(x).dtype):
                raise Unsupported(f"{name} computes with {aval(x).dtype}")
            dtype = np.dtype(aval(x).dtype)
            if jnp.issubdtype(dtype, np.inexact) and dtype != self.dtype:
                raise Unsupported(f"{name} mixes {dtype} with {self.dtype}")
        made = {np.dtype(aval(x).dtype) for x in equation.outvars}
        whole = [x for x in made if x.kind in "iu"]
        if not whole:
            return None
        found = self.bounds_of(equation, operands)
        if found is None or not all(integers.are_exact(found, x, self.dtype) for x in whole):
            raise Unsupported(f"{name} computes with {whole[0]}")
        return found

    def _decided(self, equation: JaxprEqn, operands: Sequence[Read]) -> bool | None:
        """What a comparison of integers gives, if their bounds tell, as of places that wrap."""
        if len(operands) != 2 or not jnp.issubdtype(aval(equation.invars[0]).dtype, jnp.integer):
            return None
        left, right = (
            self.bounds(x, aval(y).dtype) for x, y in zip(operands, equation.invars, strict=True)
        )
        if left is None or right is None:
            return None
        return integers.decided(equation.primitive.name, left, right)

    def bounds_of(self, equation: JaxprEqn, operands: Sequence[Read]) -> integers.Bounds | None:
        """How large the integers are that an equation makes, if that is known."""
        given: list[integers.Bounds | None] = []
        for x, read in zip(equation.invars, operands, strict=True):
            own = self.bounds(read, aval(x).dtype)
            if own is None and jnp.issubdtype(aval(x).dtype, jnp.integer):
                return None
            given.append(own)
        shape = self.shape(operands[0])
        return integers.bounds(equation.primitive.name, equation.params, shape, given)

    def bounds(self, read: Read, dtype: Any) -> integers.Bounds | None:
        """The least and the largest of some integers or truth values."""
        if np.dtype(dtype).kind == "b":
            return 0, 1
        if isinstance(read, Tile):
            return self._bounds.get(read.value)
        return integers.of_known(read) if read.dtype.kind in "iu" else None

    # ---- Taking tiles apart ----------------------------------------------------------------------

    def index(self, read: Read, axis: int, k: int) -> Read:
        if not isinstance(read, Tile):
            return np.take(read, k, axis)
        made = Tile(self.builder.index(read.value, axis, k))
        if read.value in self._bounds:
            self._bounds[made.value] = self._bounds[read.value]
        return made

    def slice(self, read: Read, axis: int, start: int, count: int) -> Read:
        if not isinstance(read, Tile):
            return np.take(read, range(start, start + count), axis)
        tile = self.shape(read)
        if not count == 1 < tile[axis]:
            return Tile(self.builder.slice(read.value, axis, start, 1, count))
        # One place along an axis is a component.
        part = self.builder.index(read.value, axis, start)
        return Tile(self.builder.reshape(part, (*tile[:axis], 1, *tile[axis + 1 :])))

    def known(self, read: Read) -> Read:
        """What a value is, if it is known."""
        constant = self.builder.known(read.value) if isinstance(read, Tile) else None
        return read if constant is None else constant

    def relabel(self, read: Read, labels: str, output: str, tile: Sequence[int]) -> Read:
        """A value with axes ``labels``, transposed and repeated as a tile with axes ``output``."""
        sizes = dict(zip(output, tile, strict=True))
        if isinstance(read, Tile):
            return Tile(self.builder.relabel(read.value, labels, output, sizes))
        return repeated(read, labels, output, tile)

    def components(self, read: Read, axis: int) -> Read:
        """The same value, stacked of its components along an axis."""
        count = self.shape(read)[axis]
        if not isinstance(read, Tile) or count == 1:
            return read
        parts = [self.builder.index(read.value, axis, k) for k in range(count)]
        return Tile(self.builder.stack(parts, axis))

    def stack(self, reads: Sequence[Read], axis: int) -> Read:
        if not any(isinstance(x, Tile) for x in reads):
            return np.stack([np.asarray(x) for x in reads], axis)
        return Tile(self.builder.stack([self._repeated(x) for x in reads], axis))

    def _repeated(self, read: Read) -> int:
        """The value, in which a number that is the same everywhere is one constant."""
        if isinstance(read, Tile) or not np.ndim(number := _uniform(read)) == 0 != np.ndim(read):
            return self.value(read)
        labels = letters(np.ndim(read))
        sizes = dict(zip(labels, np.shape(read), strict=True))
        return self.builder.relabel(self.value(number), "", labels, sizes)

    def pieces(self, read: Read, axes: Sequence[int]) -> np.ndarray:
        """The value at every place along some axes, an array of objects."""
        shape = self.shape(read)
        count = math.prod(shape[axis] for axis in axes)
        if count > _MOST_PIECES:
            raise Unsupported(f"it takes a value apart into {count} pieces")
        found = np.empty([shape[axis] for axis in axes], object)
        for at in np.ndindex(*found.shape):
            piece = read
            for axis, k in sorted(zip(axes, at, strict=True), reverse=True):
                piece = self.index(piece, axis, k)
            found[at] = piece
        return found

    def in_order(self, read: Read, axes: Sequence[int]) -> Read:
        """A value whose axes are ``axes`` of what is wanted, with its axes in order."""
        order = [axes.index(n) for n in range(len(axes))]
        if not isinstance(read, Tile):
            return np.transpose(read, order)
        return Tile(self.builder.transpose(read.value, order))

    def assembled(self, pieces: np.ndarray) -> Read:
        """Equal tiles as one, whose leading axes are those of the array they are in."""
        if pieces.ndim == 0:
            piece: Read = pieces.item()
            return piece
        return self.stack([self.assembled(np.asarray(x, object)) for x in pieces], 0)


# ---- Rules ---------------------------------------------------------------------------------------
# Each one makes the results of an equation that has at least one operand in the program.


def _dot_general(reader: Reader, equation: JaxprEqn, left: Read, right: Read) -> Read:
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    if left_batch and isinstance(left, Tile) and isinstance(right, Tile):
        # Small matrices at every point: products of their components, point by point.
        small = {
            axis
            for axis, extent in enumerate(reader.shape(left))
            if axis not in left_batch and extent <= _LARGEST_COMPONENT
        }
        for axis in small:
            left = reader.components(left, axis)
        for axis, extent in enumerate(reader.shape(right)):
            if axis not in right_batch and extent <= _LARGEST_COMPONENT:
                right = reader.components(right, axis)
    left_shape, right_shape = reader.shape(left), reader.shape(right)
    labels = letters(len(left_shape) + len(right_shape))
    left_labels, names = labels[: len(left_shape)], iter(labels[len(left_shape) :])
    shared = dict(zip((*right_summed, *right_batch), (*left_summed, *left_batch), strict=True))
    right_labels = "".join(
        left_labels[shared[axis]] if axis in shared else next(names)
        for axis in range(len(right_shape))
    )
    output = "".join(left_labels[axis] for axis in left_batch)
    output += "".join(
        x for n, x in enumerate(left_labels) if n not in left_summed and n not in left_batch
    )
    output += "".join(x for n, x in enumerate(right_labels) if n not in shared)
    sizes = dict(zip(left_labels + right_labels, left_shape + right_shape, strict=True))
    terms = [(reader.value(left), left_labels), (reader.value(right), right_labels)]
    return Tile(reader.builder.contract(terms, output, sizes))


def _broadcast_in_dim(reader: Reader, equation: JaxprEqn, x: Tile, *_: Any) -> Read:
    shape = equation.params["shape"]
    axes = equation.params["broadcast_dimensions"]
    labels = letters(len(shape))
    own, value = "", x.value
    for axis, extent in reversed(list(zip(axes, reader.shape(x), strict=True))):
        if extent == 1 and shape[axis] != 1:
            value = reader.builder.index(value, axes.index(axis), 0)
        else:
            own = labels[axis] + own
    sizes = dict(zip(labels, shape, strict=True))
    return Tile(reader.builder.relabel(value, own, labels, sizes))


def _reshape(reader: Reader, equation: JaxprEqn, x: Tile, *_: Any) -> Read:
    return Tile(reader.builder.reshape(x.value, tuple(aval(equation.outvars[0]).shape)))


def _transpose(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    return Tile(reader.builder.transpose(x.value, equation.params["permutation"]))


def _rev(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    value = x.value
    for axis in equation.params["dimensions"]:
        count = reader.builder.tile(value)[axis]
        value = reader.builder.slice(value, axis, count - 1, -1, count)
    return Tile(value)


def _slice(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)
    made: Read = x
    for axis, count in enumerate(aval(equation.outvars[0]).shape):
        if count == 1 or steps[axis] == 1:
            made = reader.slice(made, axis, starts[axis], count)
        else:
            value = reader.value(made)
            made = Tile(reader.builder.slice(value, axis, starts[axis], steps[axis], count))
    return made


# Where a window begins along an axis, and the labels that has.
Start = tuple[Read, str]


def _window(
    reader: Reader,
    x: Read,
    sizes: Sequence[int],
    starts: Mapping[int, Start],
    named: Sequence[str | None],
    output: str,
    tile: tuple[int, ...],
) -> Read:
    """A window that begins at places which are computed: one of all there may be, by selecting.

    A start is moved to where all of the window is inside. The axes are ``named`` as in ``output``;
    what is not named has one place.
    """
    shape = reader.shape(x)
    places: dict[int, range] = {}
    beginnings: dict[int, Read] = {}
    for axis, (start, labels) in starts.items():
        last = shape[axis] - sizes[axis]
        low, high = reader.bounds(start, np.int32) or (0, last)
        places[axis] = range(min(max(low, 0), last), min(max(high, 0), last) + 1)
        beginnings[axis] = reader.relabel(start, labels, output, tile)
    count = math.prod(map(len, places.values()))
    if count > _MOST_PLACES:
        raise Unsupported(f"one of {count} places, which is computed")

    def chosen(x: Read, axes: Sequence[int]) -> Read:
        if not axes:
            return reader.relabel(x, "".join(y for y in named if y), output, tile)
        *others, axis = axes
        made: Read | None = None
        for k in places.get(axis, range(1)):
            if named[axis] is None:
                part = reader.index(x, axis, k)
            else:
                part = reader.slice(x, axis, k, sizes[axis])
            case = chosen(part, others)
            if made is None:
                made = case
            else:
                made = reader.emit("select", reader.emit("ge", beginnings[axis], k), made, case)
        assert made is not None
        return made

    return chosen(x, [n for n, size in enumerate(sizes) if size != shape[n] or named[n] is None])


def _dynamic_slice(reader: Reader, equation: JaxprEqn, x: Read, *starts: Read) -> Read:
    labels, sizes = letters(len(starts)), equation.params["slice_sizes"]
    if any(isinstance(start, Tile) for start in starts):
        where = {axis: (start, "") for axis, start in enumerate(starts)}
        return _window(reader, x, sizes, where, labels, labels, tuple(sizes))
    value = reader.value(x)
    for axis, (start, count) in enumerate(zip(starts, sizes, strict=True)):
        first = int(np.clip(np.asarray(start), 0, reader.builder.tile(value)[axis] - count))
        value = reader.builder.slice(value, axis, first, 1, count)
    return Tile(value)


def _concatenate(reader: Reader, equation: JaxprEqn, *operands: Read) -> Read:
    axis = equation.params["dimension"]
    parts = [part for x in operands for part in reader.pieces(x, [axis])]
    if len(parts) > _MOST_PIECES:
        raise Unsupported(f"it concatenates {len(parts)} pieces")
    return reader.stack(parts, axis)


def _stack(reader: Reader, equation: JaxprEqn, *operands: Read) -> Read:
    return reader.stack(operands, equation.params["axis"])


def _unstack(reader: Reader, equation: JaxprEqn, x: Tile) -> list[Read]:
    return list(reader.pieces(x, [equation.params["axis"]]))


def _split(reader: Reader, equation: JaxprEqn, x: Tile) -> list[Read]:
    axis, first = equation.params["axis"], 0
    found: list[Read] = []
    for own, size in zip(equation.outvars, equation.params["sizes"], strict=True):
        if is_empty(aval(own)):
            found.append(np.zeros(aval(own).shape, aval(own).dtype))
            continue
        found.append(Tile(reader.builder.slice(x.value, axis, first, 1, size)))
        first += size
    return found


def _pad(reader: Reader, equation: JaxprEqn, x: Read, padding: Read) -> Read:
    config = equation.params["padding_config"]
    if isinstance(padding, Tile) or any(min(x) < 0 for x in config):
        raise Unsupported("pad with what is computed, or by less than nothing")
    shape, fill = tuple(aval(equation.outvars[0]).shape), np.asarray(padding)
    # Along long axes all at once; then what is short is put together piece by piece.
    x = _padded_at_once(
        reader,
        x,
        [y if n > MOST_COMPONENTS else (0, 0, 0) for y, n in zip(config, shape, strict=True)],
        fill,
    )
    for axis, (low, _, gap) in enumerate(config):
        own = reader.shape(x)[axis]
        if own == shape[axis]:
            continue
        parts = iter([reader.index(x, axis, k) for k in range(own)])
        nothing = np.broadcast_to(fill, [*reader.shape(x)[:axis], *reader.shape(x)[axis + 1 :]])
        last = low + (own - 1) * (gap + 1)
        x = reader.stack(
            [
                next(parts) if low <= k <= last and not (k - low) % (gap + 1) else nothing
                for k in range(shape[axis])
            ],
            axis,
        )
    return x


def _padded_at_once(
    reader: Reader, x: Read, config: Sequence[tuple[int, int, int]], fill: np.ndarray
) -> Read:
    """The tile put into one of zeros, to which what it is padded with is added around it."""
    if not any(map(any, config)):
        return x
    own = reader.shape(x)
    last = [low + (n - 1) * (gap + 1) for n, (low, _, gap) in zip(own, config, strict=True)]
    shape = tuple(k + 1 + high for k, (_, high, _) in zip(last, config, strict=True))
    strides = row_major(shape)
    offset = sum(low * stride for (low, _, _), stride in zip(config, strides, strict=True))
    steps = tuple((gap + 1) * s for (_, _, gap), s in zip(config, strides, strict=True))
    placed = Tile(reader.builder.place([(reader.value(x), offset, steps)], shape))
    if not np.any(fill):
        return placed
    around = np.full(shape, fill)
    inside = zip(last, config, strict=True)
    around[tuple(slice(low, k + 1, gap + 1) for k, (low, _, gap) in inside)] = 0
    return reader.emit("add", placed, around)


def _gather(reader: Reader, equation: JaxprEqn, x: Read, where: Read) -> Read:
    if aval(equation.outvars[0]).dtype.kind in "iu" and _may_fill(equation):
        raise Unsupported("gather of integers that may not be there")
    if isinstance(where, Tile):
        return _gather_computed(reader, equation, x, where)
    return _gather_known(reader, equation, x, where)


def _may_fill(equation: JaxprEqn) -> bool:
    return bool(equation.params["mode"] == GatherScatterMode.FILL_OR_DROP)


def _gather_known(reader: Reader, equation: JaxprEqn, x: Read, where: Read) -> Read:
    """At places that are known: told by what it does to the numbers of the values.

    Axes that windows have all of stay as they are.
    """
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    batching, shape = numbers.operand_batching_dims, reader.shape(x)
    gone = {*numbers.collapsed_slice_dims, *batching}
    windows = dict(
        zip((n for n in range(len(shape)) if n not in gone), numbers.offset_dims, strict=True)
    )
    whole = _whole_axes(windows, numbers.start_index_map, dict(enumerate(sizes)), shape)
    moved = [n for n in range(len(shape)) if n not in whole]
    small = [1 if n in whole else extent for n, extent in enumerate(shape)]
    parameters = dict(equation.params, fill_value=-1)
    parameters["slice_sizes"] = tuple(min(x, y) for x, y in zip(sizes, small, strict=True))
    promised = equation.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    if promised:
        parameters["mode"] = GatherScatterMode.FILL_OR_DROP
    count, out = math.prod(small), aval(equation.outvars[0]).shape
    kept = [windows[n] for n in whole]
    found_shape = [1 if n in kept else extent for n, extent in enumerate(out)]
    if max(count, math.prod(found_shape)) > _MOST_PIECES:
        raise Unsupported(f"gather of {count} values")
    with jax.ensure_compile_time_eval():
        places = np.arange(count, dtype=np.int32).reshape(small)
        found = np.asarray(equation.primitive.bind(places, where, **parameters))
    if promised and (found < 0).any():
        raise Unsupported("gather at places that there are not")
    found = found.squeeze(tuple(kept))
    parts = reader.pieces(x, moved).reshape(-1)
    filled = np.broadcast_to(_filled_in(equation), [shape[n] for n in whole])
    pieces = np.empty(found.shape, object)
    for at, number in np.ndenumerate(found):
        pieces[at] = filled if number < 0 else parts[number]
    # The axes of places stand ahead.
    order = [n for n in range(len(out)) if n not in kept] + kept
    return reader.in_order(reader.assembled(pieces), order)


def _whole_axes(
    windows: Mapping[int, int],
    indexed: Sequence[int],
    sizes: Mapping[int, int],
    shape: Sequence[int],
) -> list[int]:
    """The axes of which every window has all, so that they stay as they are."""
    return [n for n in windows if n not in indexed and sizes[n] == shape[n]]


def _gather_computed(reader: Reader, equation: JaxprEqn, x: Read, where: Tile) -> Read:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, tile = reader.shape(x), tuple(aval(equation.outvars[0]).shape)
    output, vector = letters(len(tile)), len(reader.shape(where)) - 1
    batch = "".join(y for n, y in enumerate(output) if n not in numbers.offset_dims)
    windows = iter([output[n] for n in numbers.offset_dims])
    named: list[str | None] = []
    for axis in range(len(shape)):
        if axis in numbers.operand_batching_dims:
            n = numbers.operand_batching_dims.index(axis)
            named.append(batch[numbers.start_indices_batching_dims[n]])
        else:
            named.append(None if axis in numbers.collapsed_slice_dims else next(windows))
    sizes = [shape[n] if n in numbers.operand_batching_dims else y for n, y in enumerate(sizes)]
    starts = {
        axis: (reader.known(reader.index(where, vector, n)), batch)
        for n, axis in enumerate(numbers.start_index_map)
    }
    made = _window(reader, x, sizes, starts, named, output, tile)
    for axis, (start, labels) in starts.items():
        last = shape[axis] - sizes[axis]
        low, high = reader.bounds(start, np.int32) or (-1, last)
        if _may_fill(equation) and (low < 0 or high > last):
            at = reader.relabel(start, labels, output, tile)
            is_inside = reader.emit(
                "and", reader.emit("ge", at, 0.0), reader.emit("le", at, float(last))
            )
            made = reader.emit("select", is_inside, _filled_in(equation), made)
    return made


def _filled_in(equation: JaxprEqn) -> np.ndarray:
    """What a gather has for places that there are not."""
    dtype, fill_value = aval(equation.outvars[0]).dtype, equation.params["fill_value"]
    if fill_value is None:
        fill_value = np.nan if jnp.issubdtype(dtype, np.inexact) else True
    return np.asarray(fill_value).astype(dtype)


def _tile(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    shape, times = reader.shape(x), equation.params["reps"]
    labels = letters(2 * len(shape))
    extents = [n for pair in zip(times, shape, strict=True) for n in pair]
    sizes = dict(zip(labels, extents, strict=True))
    value = reader.builder.relabel(x.value, labels[1::2], labels, sizes)
    tile = tuple(n * extent for n, extent in zip(times, shape, strict=True))
    return Tile(reader.builder.reshape(value, tile))


def _dynamic_update_slice(
    reader: Reader, equation: JaxprEqn, x: Read, update: Read, *starts: Read
) -> Read:
    if any(isinstance(start, Tile) for start in starts):
        raise Unsupported("dynamic_update_slice at an index that is computed")
    shape, counts = reader.shape(x), reader.shape(update)
    if 0 in counts or counts == shape:
        return x if 0 in counts else update
    # Only the axes along which a part is replaced are taken apart.
    axes = [n for n, extent in enumerate(shape) if counts[n] != extent]
    firsts = [int(np.clip(np.asarray(starts[n]), 0, shape[n] - counts[n])) for n in axes]
    pieces = reader.pieces(x, axes)
    window = tuple(slice(k, k + counts[n]) for n, k in zip(axes, firsts, strict=True))
    pieces[window] = reader.pieces(update, axes)
    order = [*axes, *(n for n in range(len(shape)) if n not in axes)]
    whole = reader.value(reader.assembled(pieces))
    return Tile(reader.builder.transpose(whole, [order.index(n) for n in range(len(shape))]))


def _scatter(function: str | None) -> Callable[..., Read]:
    """Puts values at known places, where ``function`` combines them with what is there, if any."""

    def rule(reader: Reader, equation: JaxprEqn, x: Read, where: Read, updates: Read) -> Read:
        name = equation.primitive.name
        if isinstance(where, Tile):
            return _scatter_computed(reader, equation, function, x, where, updates)
        shape, given = reader.shape(x), reader.shape(updates)
        numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        left = (n for n in range(len(shape)) if n not in gone)
        windows = dict(zip(left, numbers.update_window_dims, strict=True))
        whole = _whole_axes(
            windows,
            numbers.scatter_dims_to_operand_dims,
            {n: given[w] for n, w in windows.items()},
            shape,
        )
        moved = [n for n in range(len(shape)) if n not in whole]
        kept = [windows[n] for n in whole]
        small = [1 if n in whole else extent for n, extent in enumerate(shape)]
        few = [1 if n in kept else extent for n, extent in enumerate(given)]
        count = math.prod(few)
        if 0 in given:
            return x
        if max(math.prod(small), count) > _MOST_PIECES:
            raise Unsupported(f"{name} of {max(math.prod(small), count)} values")

        def placed(update: Any) -> jax.Array:
            zeros = jnp.zeros(small, update.dtype)
            return jax.lax.scatter_add(zeros, where, update, numbers, mode=mode)

        # Each value alone shows where it goes.
        each = np.eye(count, dtype=np.float32).reshape(count, *few)
        with jax.ensure_compile_time_eval():
            hits = np.asarray(jax.vmap(placed)(each))
        if mode == GatherScatterMode.PROMISE_IN_BOUNDS and hits.sum() != count:
            raise Unsupported(f"{name} at places that there are not")
        pieces = reader.pieces(x, moved)
        own = [n for n in range(len(given)) if n not in kept]
        parts = reader.pieces(updates, own).reshape(-1)
        for n, *at in np.argwhere(hits.squeeze(tuple(1 + n for n in whole))).tolist():
            old = pieces[tuple(at)]
            pieces[tuple(at)] = reader.emit(function, old, parts[n]) if function else parts[n]
        return reader.in_order(reader.assembled(pieces), [*moved, *whole])

    return rule


def _scatter_computed(
    reader: Reader, equation: JaxprEqn, function: str | None, x: Read, where: Tile, updates: Read
) -> Read:
    """Along one axis: each place has a value or not, as the index says, which is computed."""
    name, numbers = equation.primitive.name, equation.params["dimension_numbers"]
    shape, given = reader.shape(x), reader.shape(updates)
    labels, batching = letters(len(shape)), numbers.operand_batching_dims
    axis, *others = numbers.scatter_dims_to_operand_dims
    windows = [n for n in range(len(shape)) if n != axis and n not in batching]
    sizes = [given[n] for n in numbers.update_window_dims]
    if others or sizes != [shape[n] for n in windows]:
        raise Unsupported(f"{name} of windows at places that are computed")
    # The axes of the index, and what they are of the result; along the others there are several.
    named = dict(
        zip(numbers.scatter_indices_batching_dims, (labels[n] for n in batching), strict=True)
    )
    several = [n for n in range(len(reader.shape(where)) - 1) if n not in named]
    scattered = [n for n in range(len(given)) if n not in numbers.update_window_dims]
    names = {scattered[n]: label for n, label in named.items()}
    names |= dict(zip(numbers.update_window_dims, (labels[n] for n in windows), strict=True))
    index = reader.pieces(reader.index(where, len(reader.shape(where)) - 1, 0), several)
    values = reader.pieces(updates, [scattered[n] for n in several])
    if index.size * shape[axis] > _MOST_PIECES:
        raise Unsupported(f"{name} at {index.size} of {shape[axis]} places, which are computed")
    pieces: list[Read] = list(reader.pieces(x, [axis]))
    output, tile = labels.replace(labels[axis], ""), (*shape[:axis], *shape[axis + 1 :])
    for at in np.ndindex(*index.shape):
        own = "".join(named[n] for n in sorted(named))
        place = reader.relabel(index[at], own, output, tile)
        if equation.params["mode"] == GatherScatterMode.CLIP:
            place = reader.emit("min", reader.emit("max", place, 0.0), float(shape[axis] - 1))
        own = "".join(names[n] for n in sorted(names))
        value = reader.relabel(values[at], own, output, tile)
        for k, old in enumerate(pieces):
            new = reader.emit(function, old, value) if function else value
            pieces[k] = reader.emit("select", reader.emit("eq", place, float(k)), old, new)
    return reader.stack(pieces, axis)


def _reduce_sum(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    value = x.value
    for axis in equation.params["axes"]:
        # Components are added point by point, as they are made.
        if reader.shape(x)[axis] <= _LARGEST_COMPONENT and reader.builder.is_map(value):
            value = reader.value(reader.components(Tile(value), axis))
    labels = letters(len(reader.shape(x)))
    output = "".join(y for n, y in enumerate(labels) if n not in equation.params["axes"])
    sizes = dict(zip(labels, reader.shape(x), strict=True))
    return Tile(reader.builder.contract([(value, labels)], output, sizes))


def _reduction(function: str) -> Callable[..., Read]:
    def rule(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
        pieces = list(reader.pieces(x, equation.params["axes"]).reshape(-1))
        while len(pieces) > 1:
            pairs = zip(pieces[::2], pieces[1::2], strict=False)
            left = pieces[-1:] if len(pieces) % 2 else []
            pieces = [reader.emit(function, *pair) for pair in pairs] + left
        return pieces[0]

    return rule


def _place_of(better: str) -> Callable[..., Read]:
    """The place of the first best value along an axis, as a number; NaN is best of all."""

    def rule(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
        if reader.dtype.kind == "c":
            raise Unsupported("complex numbers have no order")
        best, *others = reader.pieces(x, equation.params["axes"])
        place: Read = np.zeros(reader.shape(best))
        for n, piece in enumerate(others, start=1):
            wins = reader.emit(better, piece, best)
            if aval(equation.invars[0]).dtype != bool:
                first_nan = reader.emit(
                    "and", reader.emit("ne", piece, piece), reader.emit("eq", best, best)
                )
                wins = reader.emit("or", wins, first_nan)
            best = reader.emit("select", wins, best, piece)
            place = reader.emit("select", wins, place, float(n))
        return place

    return rule


def _cumulative(function: str) -> Callable[..., Read]:
    def rule(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
        axis = equation.params["axis"]
        pieces = list(reader.pieces(x, [axis]))
        if equation.params["reverse"]:
            pieces.reverse()
        for n in range(1, len(pieces)):
            pieces[n] = reader.emit(function, pieces[n - 1], pieces[n])
        if equation.params["reverse"]:
            pieces.reverse()
        return reader.stack(pieces, axis)

    return rule


def _convert(reader: Reader, equation: JaxprEqn, x: Tile) -> Read:
    if aval(equation.outvars[0]).dtype == bool and aval(equation.invars[0]).dtype != bool:
        return reader.emit("ne", x, 0.0)
    return x


def _unchanged(reader: Reader, equation: JaxprEqn, *operands: Read) -> list[Read]:
    return list(operands)


def scan_counts(parameters: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many operands of a scan are constants and how many are carried, if that is known."""
    if "num_consts" in parameters and "num_carry" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    if "ft_in" not in parameters:
        return None
    # From JAX 0.12 on it has trees of what is constant, carried and scanned.
    consts, carry, _ = (len(x) for x in parameters["ft_in"].unpack())
    return consts, carry


def _scan(reader: Reader, equation: JaxprEqn, *operands: Read) -> list[Read]:
    p = equation.params
    if p["length"] > _MOST_STEPS:
        raise Unsupported(f"a loop of {p['length']} steps")
    counts = scan_counts(p)
    if counts is None:
        raise Unsupported("a scan of an unknown kind")
    consts, carry = counts
    state = list(operands[consts : consts + carry])
    steps = range(p["length"])
    made: list[list[Read]] = []
    if not p["length"]:
        return [*state, *(np.zeros(aval(x).shape, aval(x).dtype) for x in equation.outvars[carry:])]
    for step in reversed(steps) if p["reverse"] else steps:
        slices = [reader.index(x, 0, step) for x in operands[consts + carry :]]
        results = reader.jaxpr(p["jaxpr"], [*operands[:consts], *state, *slices])
        state = results[:carry]
        made.append(results[carry:])
    if p["reverse"]:
        made.reverse()
    return [*state, *(reader.stack(list(x), 0) for x in zip(*made, strict=True))]


def _cond(reader: Reader, equation: JaxprEqn, which: Read, *operands: Read) -> list[Read]:
    if isinstance(which, Tile):
        raise Unsupported("a condition that may be the same for all elements")
    branches = equation.params["branches"]
    return reader.jaxpr(branches[int(np.clip(which, 0, len(branches) - 1))], operands)


def _program(reader: Reader, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """A program inside of one: its batch axes are axes of tiles here."""
    program: ElementProgram = equation.params["program"]
    builder, remaining = reader.builder, iter(operands)
    extents = program.batch_extents([reader.shape(x) for x in operands])
    # A program that came of one inside of another has such labels itself.
    used = set().union(*(x.extents for x in program.operations if isinstance(x, Contract | Map)))
    spare = (x for n in itertools.count(0x5000) if (x := chr(n)) not in used)
    axis_label = list(itertools.islice(spare, program.batch_rank))
    sizes = dict(zip(axis_label, extents, strict=True))
    # Every value as one of this builder, and its labels of batch axes, which stand ahead.
    values: list[tuple[int, str]] = []

    def term(value: int, labels: str) -> tuple[int, str]:
        number, batch = values[value]
        return number, batch + labels

    for operand in program.inputs:
        read = next(remaining) if operand.constant is None else operand.constant.array
        batch = "".join(axis_label[axis] for axis in operand.batch)
        values.append((reader.value(read), batch))
    for number, operation in enumerate(program.operations, start=len(program.inputs)):
        batch = "".join(axis_label[axis] for axis in sorted(program.batch[number]))
        if isinstance(operation, Contract | Map):
            terms = [term(value, labels) for value, labels in operation.terms]
            output, both = batch + operation.output, operation.extents | sizes
            if isinstance(operation, Map):
                made = builder.pointwise(operation.function, terms, output, both)
            else:
                made = builder.contract(terms, output, both)
        elif batch:
            raise Unsupported("a program of several elements, with views of their tiles")
        elif isinstance(operation, View):
            value = values[operation.operand][0]
            made = builder.view(value, operation.offset, operation.strides, operation.tile)
        elif isinstance(operation, Place):
            pieces = [(values[value][0], *where) for value, *where in operation.pieces]
            made = builder.place(pieces, operation.tile)  # type: ignore[arg-type]
        else:
            raise Unsupported("a program that gathers")
        values.append((made, batch))
    results: list[Read] = []
    for out in program.outputs:
        labels = letters(len(program.tiles[out.value]))
        own = dict(zip(labels, program.tiles[out.value], strict=True)) | sizes
        output = "".join(axis_label[axis] for axis in out.batch) + labels
        results.append(Tile(builder.contract([term(out.value, labels)], output, own)))
    return results


# ---- Small matrices ------------------------------------------------------------------------------


def _matrix(reader: Reader, x: Read, name: str) -> linalg.Matrix:
    """The components along the last two axes."""
    *lead, rows, columns = reader.shape(x)
    if max(rows, columns) > _LARGEST_COMPONENT:
        raise Unsupported(f"{name} of {rows} x {columns} matrices")
    return _numbers(reader, x, (len(lead), len(lead) + 1))


def _numbers(reader: Reader, x: Read, axes: Sequence[int]) -> linalg.Matrix:
    pieces = reader.pieces(x, axes)
    found = np.empty(pieces.shape, object)
    for at, piece in np.ndenumerate(pieces):
        known = reader.known(piece)
        value = known if isinstance(known, Tile) else _uniform(known)
        found[at] = linalg.Number(reader.emit, value)
    return found


def _joined(reader: Reader, numbers: np.ndarray, lead: tuple[int, ...]) -> Read:
    """Numbers as one value, with their axes behind those ahead of the components."""
    if numbers.ndim:
        return reader.stack([_joined(reader, np.asarray(x), lead) for x in numbers], len(lead))
    return reader.spread(numbers.item().value, lead)


def _lu(reader: Reader, equation: JaxprEqn, x: Read) -> list[Read]:
    lead = reader.shape(x)[:-2]
    return [_joined(reader, y, lead) for y in linalg.lu(_matrix(reader, x, "lu"))]


def _permutation(reader: Reader, equation: JaxprEqn, pivots: Read) -> Read:
    lead, size = reader.shape(pivots)[:-1], equation.params["permutation_size"]
    if size > _LARGEST_COMPONENT:
        raise Unsupported(f"a permutation of {size} rows")
    numbers = _numbers(reader, pivots, (len(lead),))
    return _joined(reader, linalg.permutation(numbers, size), lead)


def _triangular_solve(reader: Reader, equation: JaxprEqn, a: Read, b: Read) -> Read:
    p = equation.params
    if reader.dtype.kind == "c":
        raise Unsupported("triangular_solve of complex numbers")
    matrix, lower, lead = _matrix(reader, a, "triangular_solve"), p["lower"], reader.shape(b)[:-2]
    if p["transpose_a"] == p["left_side"]:  # X A = B is the same as Aᵀ Xᵀ = Bᵀ
        matrix, lower = matrix.T, not lower
    axis = len(lead) if p["left_side"] else len(lead) + 1
    other = 2 * len(lead) + 1 - axis
    many = reader.shape(b)[other]
    if many <= _LARGEST_COMPONENT:
        right = _numbers(reader, b, (axis, other) if axis < other else (other, axis))
        right = right if p["left_side"] else right.T
        x = linalg.triangular_solve(matrix, right, lower, p["unit_diagonal"])
        return _joined(reader, x if p["left_side"] else x.T, lead)
    # Of many right sides all are solved at once.
    for at, number in np.ndenumerate(matrix):
        value = reader.spread(number.value, lead)
        labels = letters(len(lead) + 1)
        value = reader.relabel(value, labels[:-1], labels, (*lead, many))
        matrix[at] = linalg.Number(reader.emit, value)
    right = _numbers(reader, b, (axis,))[:, None]
    x = linalg.triangular_solve(matrix, right, lower, p["unit_diagonal"])[:, 0]
    values = [reader.spread(y.value, (*lead, many)) for y in x]
    return reader.stack(values, axis)


def _cholesky(reader: Reader, equation: JaxprEqn, x: Read) -> Read:
    made = linalg.cholesky(_matrix(reader, x, "cholesky"))
    return _joined(reader, made, reader.shape(x)[:-2])


def _qr(reader: Reader, equation: JaxprEqn, x: Read) -> list[Read]:
    matrix, full = _matrix(reader, x, "qr"), equation.params["full_matrices"]
    made = linalg.qr(matrix, full, reader.dtype)
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in made]


def _eigh(reader: Reader, equation: JaxprEqn, x: Read) -> list[Read]:
    made = linalg.eigh(_matrix(reader, x, "eigh"), equation.params["lower"], reader.dtype)
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in made]


def _svd(reader: Reader, equation: JaxprEqn, x: Read) -> list[Read]:
    vectors, full = equation.params["compute_uv"], equation.params["full_matrices"]
    u, values, vt = linalg.svd(_matrix(reader, x, "svd"), vectors, full, reader.dtype)
    wanted = [values, u, vt] if vectors else [values]
    return [_joined(reader, y, reader.shape(x)[:-2]) for y in wanted]


def _linear_solve(reader: Reader, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """As what solves; the function whose inverse that is serves derivatives alone."""
    counts = equation.params["const_lengths"]
    first = counts.matvec + counts.vecmat
    consts = operands[first : first + counts.solve]
    return reader.jaxpr(equation.params["jaxprs"].solve, [*consts, *operands[sum(counts) :]])


def _sort(reader: Reader, equation: JaxprEqn, *operands: Read) -> list[Read]:
    """A network that exchanges neighbours, and keeps the order of what is equal."""
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    count = reader.shape(operands[0])[axis]
    if count > _MOST_SORTED or reader.dtype.kind == "c":
        raise Unsupported(f"sort of {count} values")
    rows = [list(reader.pieces(x, [axis])) for x in operands]
    kinds = [np.dtype(aval(x).dtype).kind for x in equation.invars]

    def less(n: int, x: Read, y: Read) -> Read:
        """NaN is behind all others."""
        found = reader.emit("lt", x, y)
        if kinds[n] in "biu":
            return found
        only_y = reader.emit("and", reader.emit("eq", x, x), reader.emit("ne", y, y))
        return reader.emit("or", found, only_y)

    for last in range(count - 1, 0, -1):
        for k in range(last):
            swap = less(keys - 1, rows[keys - 1][k + 1], rows[keys - 1][k])
            for n in reversed(range(keys - 1)):
                before = less(n, rows[n][k + 1], rows[n][k])
                behind = less(n, rows[n][k], rows[n][k + 1])
                swap = reader.emit(
                    "or", before, reader.emit("and", reader.emit("not", behind), swap)
                )
            for row in rows:
                x, y = row[k], row[k + 1]
                row[k], row[k + 1] = (
                    reader.emit("select", swap, x, y),
                    reader.emit("select", swap, y, x),
                )
    return [reader.stack(row, axis) for row in rows]


# Their equations are checked one by one.
_NESTED = {"scan", "cond", "custom_linear_solve"}
# What moves values and does not compute.
_MOVING = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "copy"}

# As gathers and scatters may treat places beyond the end, and what they may promise of places.
_PLACES = {
    "mode": _one_of(
        GatherScatterMode.CLIP,
        GatherScatterMode.FILL_OR_DROP,
        GatherScatterMode.PROMISE_IN_BOUNDS,
    ),
    "unique_indices": _any,
    "indices_are_sorted": _any,
}
# Products are as precise as any of these asks for; other algorithms may round otherwise.
_is_precision = _one_of(None, *Precision)


def _known_precision(value: Any) -> bool:
    return all(map(_is_precision, value)) if isinstance(value, tuple) else _is_precision(value)


def _does(name: str) -> Callable[[Any], bool]:
    """Whether a jaxpr of two scalars is that function of them."""

    def does(jaxpr: Any) -> bool:
        equations = getattr(jaxpr, "eqns", ())
        return [x.primitive.name for x in equations] == [name]

    return does


def _scattering(function: str | None) -> Rule:
    knows = _PLACES | {
        "update_jaxpr": _does(function) if function else _none,
        "update_consts": _one_of(()),
    }
    return Rule(_scatter(function), ("dimension_numbers", "mode"), knows, 3, truth=function is None)


_MOVE = {"sharding": _none}
_SUM = {"out_sharding": _none}
_STEPS = dict.fromkeys(
    ("num_consts", "num_carry", "ft_in", "ft_out", "unroll", "linear", "_split_transpose"), _any
)

# ``read`` gets the reader, the equation and its operands.
RULES: dict[str, Rule] = {
    "dot_general": Rule(
        _dot_general,
        ("dimension_numbers",),
        # The dtypes of operands and result are all that of the program.
        {"precision": _known_precision, "preferred_element_type": _any, "out_sharding": _none},
        operands=2,
        truth=False,
    ),
    "broadcast_in_dim": Rule(
        _broadcast_in_dim, ("shape", "broadcast_dimensions"), _MOVE, operands=1
    ),
    "reshape": Rule(_reshape, ("new_sizes",), _MOVE | {"dimensions": _none}, operands=1),
    "squeeze": Rule(_reshape, ("dimensions",), operands=1),
    "transpose": Rule(_transpose, ("permutation",), operands=1),
    "rev": Rule(_rev, ("dimensions",), operands=1),
    "slice": Rule(_slice, ("start_indices", "limit_indices", "strides"), operands=1),
    "dynamic_slice": Rule(_dynamic_slice, ("slice_sizes",)),
    "concatenate": Rule(_concatenate, ("dimension",)),
    "stack": Rule(_stack, ("axis",)),
    "unstack": Rule(_unstack, ("axis",), operands=1),
    "split": Rule(_split, ("sizes", "axis"), operands=1),
    "pad": Rule(_pad, ("padding_config",), operands=2),
    "tile": Rule(_tile, ("reps",), operands=1),
    "gather": Rule(
        _gather,
        ("dimension_numbers", "slice_sizes", "mode", "fill_value"),
        _PLACES,
        operands=2,
    ),
    "dynamic_update_slice": Rule(_dynamic_update_slice),
    "scatter": _scattering(None),
    "scatter-add": _scattering("add"),
    "scatter_add": _scattering("add"),
    "scatter-mul": _scattering("mul"),
    "scatter_mul": _scattering("mul"),
    "reduce_sum": Rule(_reduce_sum, ("axes",), _SUM, operands=1),
    "reduce_max": Rule(_reduction("max"), ("axes",), _SUM, operands=1),
    "reduce_min": Rule(_reduction("min"), ("axes",), _SUM, operands=1),
    "reduce_prod": Rule(_reduction("mul"), ("axes",), _SUM, operands=1),
    "reduce_and": Rule(_reduction("and"), ("axes",), _SUM, operands=1),
    "reduce_or": Rule(_reduction("or"), ("axes",), _SUM, operands=1),
    "argmax": Rule(_place_of("gt"), ("axes", "index_dtype"), operands=1),
    "argmin": Rule(_place_of("lt"), ("axes", "index_dtype"), operands=1),
    "cumsum": Rule(_cumulative("add"), ("axis", "reverse"), operands=1),
    "cumprod": Rule(_cumulative("mul"), ("axis", "reverse"), operands=1),
    "cummax": Rule(_cumulative("max"), ("axis", "reverse"), operands=1),
    "cummin": Rule(_cumulative("min"), ("axis", "reverse"), operands=1),
    "convert_element_type": Rule(_convert, ("new_dtype",), _MOVE | {"weak_type": _any}, operands=1),
    "copy": Rule(_unchanged, operands=1),
    "copy_p": Rule(_unchanged, operands=1),
    "stop_gradient": Rule(_unchanged, operands=1),
    "optimization_barrier": Rule(_unchanged),
    "scan": Rule(_scan, ("reverse", "length", "jaxpr"), _STEPS),
    "cond": Rule(_cond, ("branches",), {"branches_platforms": _one_of(_ELSEWHERE)}),
    "element_program": Rule(_program, ("program",)),
    "lu": Rule(_lu, operands=1),
    "lu_pivots_to_permutation": Rule(_permutation, ("permutation_size",), operands=1),
    "triangular_solve": Rule(
        _triangular_solve,
        ("left_side", "lower", "transpose_a", "unit_diagonal"),
        {"conjugate_a": _any},  # of real numbers
        operands=2,
    ),
    "cholesky": Rule(_cholesky, operands=1),
    "qr": Rule(_qr, ("full_matrices",), {"pivoting": _one_of(False), "use_magma": _any}, 1),
    "eigh": Rule(
        _eigh,
        ("lower",),
        {"sort_eigenvalues": _any, "subset_by_index": _none, "algorithm": _none},
        operands=1,
    ),
    "svd": Rule(
        _svd,
        ("compute_uv", "full_matrices"),
        {"subset_by_index": _none, "algorithm": _none},
        operands=1,
    ),
    "custom_linear_solve": Rule(_linear_solve, ("const_lengths", "jaxprs")),
    "sort": Rule(_sort, ("dimension", "num_keys"), {"is_stable": _any}),
}
