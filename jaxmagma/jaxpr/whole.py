"""Integers: numbers without fractions, of which it is known how large they may be.

What overflows in JAX wraps around here, too, where all of it is exact before that.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma import internals
from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles
from jaxmagma.programs import integers
from jaxmagma.programs.integers import Bounds, are_exact, are_in, is_integer, of_dtype


# What gives the same modulo powers of two when its operands are the same.
_WRAPS = frozenset({"add", "sub", "mul", "neg", "abs", "div", "shift_left"})
# What may make a zero with a sign, which no integer has.
_SIGNS_ZEROS = frozenset({"neg", "mul", "rem"})


def limits_of(reader: Tiles, equation: JaxprEqn, operands: Sequence[Read]) -> Bounds | None:
    """How large the integers are that an equation makes; None if they are none of the program's."""
    name = equation.primitive.name
    made = [aval(x).dtype for x in equation.outvars if is_integer(aval(x).dtype)]
    own = of_dtype(made[0])
    if name == "convert_element_type" and jnp.issubdtype(
        aval(equation.invars[0]).dtype, np.inexact
    ):
        # Beyond the largest number of a narrow dtype there is none to stop at.
        stops = reader.dtype.kind == "f" and own[1] <= float(jnp.finfo(reader.dtype).max)
        return own if stops else None
    given = _given(reader, equation, operands)
    if given is None:
        return None
    shape = reader.shape(operands[0])
    if name == "call_hi_primitive":
        return (0, shape[0]) if internals.search_of(equation.params["_prim"]) else None
    found = integers.bounds(name, equation.params, shape, given)
    if found is None:
        return None
    if name == "convert_element_type":
        return found if are_in(found, own) else own if _can_wrap(reader, made[0]) else None
    exact = all(are_exact(x, reader.dtype) for x in given if x is not None)
    if integers.takes_any(name):
        return found if exact or all(are_in(found, of_dtype(x)) for x in made) else None
    if not exact or not are_exact(found, reader.dtype):
        return None
    if all(are_in(found, of_dtype(x)) for x in made):
        return found
    return own if name in _WRAPS and _can_wrap(reader, made[0]) else None


def _given(
    reader: Tiles, equation: JaxprEqn, operands: Sequence[Read]
) -> list[Bounds | None] | None:
    """The bounds of operands, None of those that are no integers; None if some are not known."""
    found: list[Bounds | None] = []
    for x, read in zip(equation.invars, operands, strict=True):
        own = reader.bounds(read, aval(x).dtype)
        if own is None and is_integer(aval(x).dtype):
            return None
        found.append(own)
    return found


def _can_wrap(reader: Tiles, dtype: np.dtype) -> bool:
    return bool(jnp.iinfo(dtype).bits <= jnp.finfo(reader.dtype).nmant)


def whole_numbers(reader: Tiles, equation: JaxprEqn, operands: Sequence[Read]) -> Read | None:
    """What makes integers otherwise than the function of numbers does; None if that does."""
    name, dtype = equation.primitive.name, aval(equation.outvars[0]).dtype
    given = [aval(x).dtype for x in equation.invars]
    if name == "convert_element_type":
        (x,) = operands
        if jnp.issubdtype(given[0], np.inexact):
            return _truncated(reader, x, dtype)
        known = reader.bounds(x, given[0])
        return (
            x if known and are_in(known, of_dtype(dtype)) else _converted(reader, x, known, dtype)
        )
    if name not in _WRAPS and name not in _SIGNS_ZEROS and name not in _RULES:
        return None
    if not all(map(is_integer, given)) or not is_integer(dtype):
        return None
    rule = _RULES.get(name)
    if rule is not None:
        made = rule(reader, equation, *operands)
    else:
        made = reader.emit(name, *operands)
    bounds = _given(reader, equation, operands) or []
    found = integers.bounds(name, equation.params, reader.shape(operands[0]), bounds)
    if found is not None and not are_in(found, of_dtype(dtype)):
        made = _wrapped(reader, made, dtype)
    elif name in _SIGNS_ZEROS and (name == "neg" or any(x and x[0] < 0 for x in bounds)):
        made = reader.emit("select", reader.emit("eq", made, 0.0), made, 0.0)
    return made


# ---- Conversions ---------------------------------------------------------------------------------


def _truncated(reader: Tiles, x: Read, dtype: np.dtype) -> Read:
    """A number without its fraction; as XLA has it, the next integer that there is, of NaN zero."""
    low, high = of_dtype(dtype)
    x = reader.emit("select", reader.emit("ne", x, x), x, 0.0)
    down = reader.emit("floor", x)
    up = reader.emit("sub", 0.0, reader.emit("floor", reader.emit("neg", x)))  # no negative zero
    whole = reader.emit("select", reader.emit("gt", x, 0.0), up, down)
    return reader.emit("min", reader.emit("max", whole, float(low)), float(high))


def _converted(reader: Tiles, x: Read, known: Bounds | None, dtype: np.dtype) -> Read:
    """An integer of another dtype, by its lowest bits."""
    made = _wrapped(reader, x, dtype)
    if known is not None and not are_exact((known[1], known[1]), reader.dtype):
        # The largest integer of its dtype has all bits; the number in its place is one more.
        last = float(-1 if jnp.issubdtype(dtype, np.signedinteger) else of_dtype(dtype)[1])
        made = reader.emit("select", reader.emit("ge", x, float(known[1])), made, last)
    return made


def _wrapped(reader: Tiles, x: Read, dtype: np.dtype) -> Read:
    """The integer of a dtype that is the same modulo a power of two."""
    count = 2.0 ** jnp.iinfo(dtype).bits
    turns = reader.emit("mul", x, 1 / count)
    if jnp.issubdtype(dtype, np.signedinteger):
        turns = reader.emit("add", turns, 0.5)
    return reader.emit("sub", x, reader.emit("mul", reader.emit("floor", turns), count))


# ---- Arithmetic ----------------------------------------------------------------------------------


def _known(read: Read) -> int:
    """The one integer that an operand is known to be."""
    if isinstance(read, Tile) or not read.size or (read != read.flat[0]).any():
        raise Unsupported("bits of integers that are computed")
    return int(read.flat[0])


def _div(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    """A half more is divided, so that no rounding makes a quotient too small."""
    for x, variable in zip((a, b), equation.invars, strict=True):
        low, high = reader.bounds(x, aval(variable).dtype) or (0, 0)
        if not are_exact((4 * low, 4 * high), reader.dtype):
            raise Unsupported(f"div of {aval(variable).dtype}")
    more = reader.emit("add", reader.emit("abs", a), 0.5)
    size = reader.emit("floor", reader.emit("div", more, reader.emit("abs", b)))
    is_negative = reader.emit("lt", reader.emit("mul", a, reader.emit("sign", b)), 0.0)
    return reader.emit("select", is_negative, size, reader.emit("sub", 0.0, size))


def _and(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    if isinstance(b, Tile):
        a, b = b, a
    count = _known(b) + 1
    if count <= 0 or count & (count - 1):
        raise Unsupported("bits of integers that are not the lowest ones")
    turns = reader.emit("floor", reader.emit("mul", a, 1 / count))
    return reader.emit("sub", a, reader.emit("mul", turns, float(count)))


def _shift_left(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    return reader.emit("mul", a, 2.0 ** _bits(equation, b))


def _shift_right(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    return reader.emit("floor", reader.emit("mul", a, 2.0 ** -_bits(equation, b)))


def _shift_right_logical(reader: Tiles, equation: JaxprEqn, a: Read, b: Read) -> Read:
    known = reader.bounds(a, aval(equation.invars[0]).dtype)
    if known is None or known[0] < 0:
        raise Unsupported("bits of integers that may be negative")
    return _shift_right(reader, equation, a, b)


def _bits(equation: JaxprEqn, b: Read) -> int:
    bits = _known(b)
    if not 0 <= bits < jnp.iinfo(aval(equation.invars[0]).dtype).bits:
        raise Unsupported("a shift by all bits")
    return bits


_RULES: dict[str, Callable[..., Read]] = {
    "div": _div,
    "and": _and,
    "shift_left": _shift_left,
    "shift_right_arithmetic": _shift_right,
    "shift_right_logical": _shift_right_logical,
}
