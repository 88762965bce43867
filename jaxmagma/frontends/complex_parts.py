"""Functions of complex and of real numbers, as functions of real ones.

A program has one dtype.  Where a function has complex numbers alone, and adds and multiplies them,
that is theirs.  Where they meet real ones, as a field that oscillates meets the geometry of its
element, or where parts, magnitudes, quotients or functions of them are wanted, each number is two
real ones from here on: what is linear is done to both parts, a product is four, or two where one
factor is real, and the rest is what the field's handbooks say.  Nothing is computed of a part that
is zero because a number is real.

Arguments and results remain arrays of complex numbers: of an argument a program reads both parts,
and puts those of a result together.  What has no rule here is of complex numbers to plain JAX.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxmagma.frontends.conditions import struct
from jaxmagma.internals import at_line_of
from jaxmagma.jaxpr import (
    applied,
    aval,
    has_own_rule,
    inner_jaxpr,
    interpreted,
    nested,
    scan_counts,
)
from jaxmagma.programs.powers import integer_power


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Complex:
    """A number in two parts, one of which is None if it is zero by what the number is."""

    real: Any
    imag: Any


Number = Any  # a _Complex, or an array that is not complex


def in_parts(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function, computed in real numbers if it mixes complex ones with these."""
    if not _mixes(closed.jaxpr):
        return closed

    def function(*arguments: Any) -> list[Any]:
        return list(map(_whole, interpreted(closed, arguments, _line)))

    return jax.make_jaxpr(function)(*map(struct, closed.in_avals))


def _mixes(jaxpr: Any) -> bool:
    """Whether complex numbers meet real ones, or functions that a program has of real ones."""
    for equation in nested(jaxpr):
        operands = {_kind(x) for x in equation.invars if isinstance(x, Var)}
        results = {_kind(x) for x in equation.outvars}
        if "c" in operands | results and ("f" in operands or equation.primitive.name in _FUNCTIONS):
            return True
    return False


def _kind(x: Any) -> str:
    dtype = aval(x).dtype
    return dtype.kind if isinstance(dtype, np.dtype) else ""


def _line(equation: JaxprEqn, operands: Sequence[Any]) -> list[Number]:
    """The results of an equation of the function; those inside of it are at its line, too."""
    with at_line_of(equation):
        return _equation(equation, operands)


def _equation(equation: JaxprEqn, operands: Sequence[Any]) -> list[Number]:
    inner = inner_jaxpr(equation)
    if inner is not None and not has_own_rule(equation):
        return interpreted(inner, operands, _equation)
    name, given = equation.primitive.name, list(map(_apart, operands))
    rule = _RULES.get(name) or _FUNCTIONS.get(name)
    is_complex = any(_kind(x) == "c" for x in (*equation.invars, *equation.outvars))
    if rule is not None and is_complex:
        made = rule(equation, *given)
        results = made if isinstance(made, list) else [made]
        return list(map(_of_shape, results, map(aval, equation.outvars)))
    return list(map(_apart, applied(equation, list(map(_whole, given)))))


# ---- Numbers and their parts ---------------------------------------------------------------------


def _apart(x: Any) -> Number:
    """An array of complex numbers in its parts; anything else as it is."""
    if isinstance(x, _Complex) or not jnp.iscomplexobj(x):
        return x
    if isinstance(x, jax.Array):
        return _Complex(lax.real(x), lax.imag(x))
    real, imag = np.real(x), np.imag(x)
    return _Complex(
        real if np.any(real) or not np.any(imag) else None, imag if np.any(imag) else None
    )


def _part_dtype(dtype: Any) -> np.dtype:
    """The dtype of the parts of complex numbers."""
    return np.zeros((), dtype).real.dtype


def _of_shape(x: Number, own: Any) -> Number:
    """A number whose parts have the shape of an array; one that is a literal has none."""
    dtype = _part_dtype(own.dtype)

    def shaped(part: Any) -> Any:
        array = jnp.asarray(part, dtype) if isinstance(part, float) else part
        return array if np.shape(array) == own.shape else jnp.broadcast_to(array, own.shape)

    return _of_parts(shaped, x) if isinstance(x, _Complex) else x


def _full(x: Number) -> _Complex:
    """A number with both parts."""
    if not isinstance(x, _Complex):
        return _Complex(x, jnp.zeros_like(x))
    if x.real is None:
        return _Complex(jnp.zeros_like(x.imag), x.imag)
    return _Complex(x.real, jnp.zeros_like(x.real) if x.imag is None else x.imag)


def _whole(x: Number) -> Any:
    """A number as JAX has it."""
    if not isinstance(x, _Complex):
        return x
    full = _full(x)
    return lax.complex(full.real, full.imag)


def _number(x: Number) -> _Complex:
    return x if isinstance(x, _Complex) else _Complex(x, None)


def _sum(x: Any, y: Any, combine: Any = operator.add) -> Any:
    """Of two parts; with ``operator.sub``, their difference."""
    if x is None or y is None:
        return x if y is None else y if combine is operator.add else -y
    return combine(x, y)


def _product(x: _Complex, y: _Complex, times: Callable[[Any, Any], Any]) -> _Complex:
    def part(a: Any, b: Any) -> Any:
        return None if a is None or b is None else times(a, b)

    return _Complex(
        _sum(part(x.real, y.real), part(x.imag, y.imag), operator.sub),
        _sum(part(x.real, y.imag), part(x.imag, y.real)),
    )


def _times(x: _Complex, y: _Complex) -> _Complex:
    return _product(x, y, operator.mul)


# ---- What programs of complex numbers have, too --------------------------------------------------


def _add(equation: JaxprEqn, x: Number, y: Number) -> _Complex:
    a, b = _number(x), _number(y)
    return _Complex(_sum(a.real, b.real), _sum(a.imag, b.imag))


def _sub(equation: JaxprEqn, x: Number, y: Number) -> _Complex:
    return _add(equation, x, _neg(equation, y))


def _neg(equation: JaxprEqn, x: Number) -> _Complex:
    return _of_parts(operator.neg, _number(x))


def _mul(equation: JaxprEqn, x: Number, y: Number) -> _Complex:
    return _times(_number(x), _number(y))


def _bilinear(equation: JaxprEqn, x: Number, y: Number) -> _Complex:
    dtype = equation.params.get("preferred_element_type")
    changed = {} if dtype is None else {"preferred_element_type": _part_dtype(dtype)}
    own = equation.replace(params=equation.params | changed)
    return _product(_number(x), _number(y), lambda a, b: applied(own, [a, b])[0])


_SCATTERS = {
    "scatter": lax.scatter,
    **dict.fromkeys(("scatter-add", "scatter_add"), lax.scatter_add),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), lax.scatter_sub),
}
_OF_SCATTERS = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def _linear(equation: JaxprEqn, *operands: Number) -> list[Number]:
    """Both parts of what moves numbers, chooses among them or adds them up."""
    around = equation.params.get("fill_value")
    scattered = _SCATTERS.get(equation.primitive.name)

    def made(part: str, operands: Sequence[Number]) -> list[Any]:
        parts = [getattr(x, part) if isinstance(x, _Complex) else x for x in operands]
        if scattered is not None:  # whose jaxpr of an update is one of complex numbers
            return [scattered(*parts, **{key: equation.params[key] for key in _OF_SCATTERS})]
        changed = {} if around is None else {"fill_value": getattr(np.asarray(around), part).item()}
        own = equation.replace(params=equation.params | changed)
        return applied(own, parts)

    is_real = not jnp.iscomplexobj(around) and all(
        x.imag is None for x in operands if isinstance(x, _Complex)
    )
    full = operands if is_real else _filled(operands)
    reals = made("real", full)
    imags = [None] * len(reals) if is_real else made("imag", full)
    return [
        _Complex(real, imag) if _kind(x) == "c" else real
        for x, real, imag in zip(equation.outvars, reals, imags, strict=True)
    ]


def _of_parts(function: Callable[[Any], Any], x: _Complex) -> _Complex:
    return _Complex(*(None if part is None else function(part) for part in (x.real, x.imag)))


def _convert(equation: JaxprEqn, x: Number) -> Number:
    dtype = np.dtype(equation.params["new_dtype"])
    own = _part_dtype(dtype)

    def converted(part: Any) -> Any:
        return lax.convert_element_type(part, own)

    return _of_parts(converted, _number(x)) if dtype.kind == "c" else converted(_full(x).real)


def _integer_power(equation: JaxprEqn, x: Number) -> _Complex:
    def emit(function: str, a: Number, b: Number) -> _Complex:
        return {"mul": _times, "div": _quotient}[function](_number(a), _number(b))

    return _number(integer_power(emit, _number(x), equation.params["y"]))


def _along(x: Number, axis: int) -> list[_Complex]:
    """What a number has along an axis, one after the other."""
    real, imag = (jnp.unstack(part, axis=axis) for part in _both(x))
    return list(map(_Complex, real, imag))


def _product_along(equation: JaxprEqn, x: Number) -> Number:
    for axis in sorted(equation.params["axes"], reverse=True):
        x = functools.reduce(_times, _along(x, axis))
    return x


def _products_along(equation: JaxprEqn, x: Number) -> _Complex:
    axis, backwards = equation.params["axis"], equation.params["reverse"]
    made = list(itertools.accumulate(_along(x, axis)[:: -1 if backwards else 1], _times))
    parts = zip(*map(_both, made[:: -1 if backwards else 1]), strict=True)
    return _Complex(*(jnp.stack(part, axis) for part in parts))


def _equal(equation: JaxprEqn, x: Number, y: Number) -> Any:
    a, b = _full(x), _full(y)
    both = (a.real == b.real) & (a.imag == b.imag)
    return both if equation.primitive.name == "eq" else jnp.logical_not(both)


def _scan(equation: JaxprEqn, *operands: Number) -> list[Number]:
    parameters = equation.params
    counts = scan_counts(parameters)
    if counts is None:
        return list(map(_apart, applied(equation, list(map(_whole, operands)))))
    constants, carried = counts
    full = _filled(operands)
    first, state = full[:constants], full[constants : constants + carried]

    def step(state: Any, values: Any) -> tuple[Any, Any]:
        made = _filled(interpreted(parameters["jaxpr"], [*first, *state, *values], _equation))
        return made[:carried], made[carried:]

    rest, length, reverse = full[constants + carried :], parameters["length"], parameters["reverse"]
    last, results = lax.scan(step, state, rest, length=length, reverse=reverse)
    return [*last, *results]


def _while(equation: JaxprEqn, *operands: Number) -> list[Number]:
    parameters, full = equation.params, _filled(operands)
    first = parameters["cond_nconsts"]
    begin = first + parameters["body_nconsts"]

    def goes_on(state: Any) -> Any:
        return interpreted(parameters["cond_jaxpr"], [*full[:first], *state], _equation)[0]

    def step(state: Any) -> Any:
        constants = full[first:begin]
        return _filled(interpreted(parameters["body_jaxpr"], [*constants, *state], _equation))

    return list(lax.while_loop(goes_on, step, full[begin:]))


def _switch(equation: JaxprEqn, which: Any, *operands: Number) -> list[Number]:
    def taken(branch: ClosedJaxpr) -> Callable[..., Any]:
        return lambda *values: _filled(interpreted(branch, values, _equation))

    return list(lax.switch(which, [taken(x) for x in equation.params["branches"]], *operands))


def _filled(values: Sequence[Number]) -> list[Number]:
    return [_full(x) if isinstance(x, _Complex) else x for x in values]


_LINEAR = (
    *("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "dynamic_slice"),
    *("concatenate", "stack", "unstack", "split", "pad", "tile", "gather", "dynamic_update_slice"),
    *("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "reduce_sum"),
    *("cumsum", "copy", "copy_p", "stop_gradient", "optimization_barrier", "select_n"),
)
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_LINEAR, _linear),
    **{"add": _add, "add_any": _add, "sub": _sub, "neg": _neg, "mul": _mul},
    **{"dot_general": _bilinear, "conv_general_dilated": _bilinear},
    **{"square": lambda equation, x: _times(_number(x), _number(x))},
    **{"convert_element_type": _convert, "integer_pow": _integer_power},
    **{"reduce_prod": _product_along, "cumprod": _products_along},
    **{"eq": _equal, "ne": _equal},
    **{"scan": _scan, "while": _while, "cond": _switch},
}


# ---- What they have not --------------------------------------------------------------------------
# W. Kahan, "Branch cuts for complex elementary functions", 1987; R. Smith, "Algorithm 116: complex
# division", 1962.


def _of_number(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The rule of a function of both parts."""

    return lambda equation, x: function(*_both(x))


def _both(x: Number) -> tuple[Any, Any]:
    full = _full(x)
    return full.real, full.imag


def _magnitude(x: Any, y: Any) -> Any:
    """``sqrt(x x + y y)``, by way of no number that is larger."""
    larger, smaller = _by_size(x, y)
    is_plain = (larger > 0) & (larger < np.inf)
    size, other = jnp.where(is_plain, larger, 1), jnp.where(is_plain, smaller, 0)
    ratio = other / size
    rest = jnp.where(larger == 0, 0, larger + abs(smaller))  # of zero it has no slope
    return jnp.where(is_plain, size * jnp.sqrt(1 + ratio * ratio), rest)


def _by_size(x: Any, y: Any) -> tuple[Any, Any]:
    """The absolute value of the larger part, and the smaller one, with its sign.

    By a choice: of parts of one size a maximum would have half of the derivative of each.
    """
    larger, smaller = _ordered(abs(x) >= abs(y), x, y)
    return abs(larger), smaller


def _ordered(is_first: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return jnp.where(is_first, x, y), jnp.where(is_first, y, x)


def _quotient(x: _Complex, y: _Complex) -> _Complex:
    if y.imag is None:
        return _of_parts(lambda part: part / y.real, x)
    a, b = _both(x)
    c, d = _both(y)
    is_first = abs(c) >= abs(d)
    (larger, smaller), (p, q) = _ordered(is_first, c, d), _ordered(is_first, a, b)
    ratio = smaller / larger
    reciprocal = 1 / (larger + smaller * ratio)
    imag = (q - p * ratio) * reciprocal
    return _Complex((p + q * ratio) * reciprocal, jnp.where(is_first, imag, -imag))


def _exponential(equation: JaxprEqn, x: Number) -> _Complex:
    number = _number(x)
    turned = _Complex(1, None) if number.imag is None else _turned(number.imag)
    return turned if number.real is None else _times(_Complex(jnp.exp(number.real), None), turned)


def _turned(angle: Any) -> _Complex:
    return _Complex(jnp.cos(angle), jnp.sin(angle))


def _logarithm(x: Any, y: Any) -> _Complex:
    larger, smaller = _by_size(x, y)
    # Near one the digits are in what the square lacks of that.
    is_near = (larger > 0.5) & (larger < 2)
    near = jnp.where(is_near, larger, 1)
    lack = (near - 1) * (near + 1) + jnp.where(is_near, smaller * smaller, 0)
    size = jnp.where(is_near, 0.5 * jnp.log1p(lack), jnp.log(_magnitude(x, y)))
    return _Complex(size, jnp.arctan2(y, x))


def _root(x: Any, y: Any) -> _Complex:
    own, sign = (jnp.where(part < 0, -1, 1).astype(part.dtype) for part in (x, y))
    half = jnp.sqrt((own * x + _magnitude(x, y)) / 2)
    other = jnp.where(half > 0, sign * y / jnp.where(half > 0, 2 * half, 1), 0)
    return _Complex(jnp.where(x >= 0, half, other), sign * jnp.where(x >= 0, other, half))


def _hyperbolic_tangent(x: Any, y: Any) -> _Complex:
    """By a sum of squares, which loses no digits near poles; further out it is one or minus one."""
    x = jnp.clip(x, -40, 40)
    sine, cosine = jnp.sinh(x), jnp.cos(y)
    size = sine * sine + cosine * cosine
    return _Complex(sine * jnp.cosh(x) / size, jnp.sin(y) * cosine / size)


def _tangent(x: Any, y: Any) -> _Complex:
    turned = _hyperbolic_tangent(y, x)
    return _Complex(turned.imag, turned.real)


def _sign(x: Any, y: Any) -> _Complex:
    size = _magnitude(x, y)
    divisor = jnp.where(size > 0, size, 1)
    # At zero it is zero, whose slope is zero.
    parts = (jnp.where(size == 0, lax.stop_gradient(part), part / divisor) for part in (x, y))
    made = _Complex(*parts)
    return made if _sign_has_slope() else _of_parts(lax.stop_gradient, made)


@functools.cache
def _sign_has_slope() -> bool:
    """Whether it has to JAX; to older releases signs of complex numbers are constants, too."""
    with jax.ensure_compile_time_eval():
        _, slope = jax.jvp(lax.sign, (np.complex64(1),), (np.complex64(1j),))
        return bool(slope != 0)


def _power(equation: JaxprEqn, x: Number, y: Number) -> _Complex:
    (a, b), (c, d) = _both(x), _both(y)
    is_zero = (a == 0) & (b == 0)
    made = _exponential(equation, _times(_logarithm(jnp.where(is_zero, 1, a), b), _number(y)))
    # Of zero, it is one, zero, or no number: as in JAX, whose power is real where it is one.
    none = jnp.where((c >= 0) & (d == 0), jnp.where(c == 0, 1, 0), np.nan).astype(a.dtype)
    return _Complex(
        jnp.where(is_zero, none, made.real), jnp.where(is_zero, jnp.minimum(none, 0), made.imag)
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "real": lambda equation, x: _full(x).real,
    "imag": lambda equation, x: _full(x).imag,
    "complex": lambda equation, x, y: _Complex(x, y),
    "conj": lambda equation, x: _Complex(_number(x).real, _of_parts(operator.neg, _number(x)).imag),
    "abs": _of_number(_magnitude),
    "sign": _of_number(_sign),
    "div": lambda equation, x, y: _quotient(_number(x), _number(y)),
    "exp": _exponential,
    "log": _of_number(_logarithm),
    "sqrt": _of_number(_root),
    "rsqrt": lambda equation, x: _quotient(_Complex(1, None), _root(*_both(x))),
    "pow": _power,
    "sin": _of_number(lambda x, y: _Complex(jnp.sin(x) * jnp.cosh(y), jnp.cos(x) * jnp.sinh(y))),
    "cos": _of_number(lambda x, y: _Complex(jnp.cos(x) * jnp.cosh(y), -jnp.sin(x) * jnp.sinh(y))),
    "sinh": _of_number(lambda x, y: _Complex(jnp.sinh(x) * jnp.cos(y), jnp.cosh(x) * jnp.sin(y))),
    "cosh": _of_number(lambda x, y: _Complex(jnp.cosh(x) * jnp.cos(y), jnp.sinh(x) * jnp.sin(y))),
    "tan": _of_number(_tangent),
    "tanh": _of_number(_hyperbolic_tangent),
    "is_finite": _of_number(lambda x, y: jnp.isfinite(x) & jnp.isfinite(y)),
}
