"""Masks of the bits of numbers, as functions of numbers.

Where JAX squares a number exactly, as in derivatives of ``erf``, it takes the bits of that for an
integer, clears the last of them, and has the number whose bits are left.  A program has no integers
of so many bits, but the digits of a number.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxmagma.jaxpr.equations import aval
from jaxmagma.programs.digits import keep_digits_p


_BITS = "bitcast_convert_type"


def with_digits(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr whose equations that mask digits are one each; the same, if it has none."""
    jaxpr = closed.jaxpr
    if not any(x.primitive.name == _BITS for x in jaxpr.eqns):
        return closed
    makers = {result: equation for equation in jaxpr.eqns for result in equation.outvars}
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    masked = [_masked(x, makers, known) for x in jaxpr.eqns]
    if not any(masked):
        return closed
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    kept: list[JaxprEqn] = []
    for equation, instead in reversed(list(zip(jaxpr.eqns, masked, strict=True))):
        if equation.primitive.name in (_BITS, "and") and needed.isdisjoint(equation.outvars):
            continue
        equation = instead or equation
        needed.update(x for x in equation.invars if not isinstance(x, Literal))
        kept.append(equation)
    return ClosedJaxpr(jaxpr.replace(eqns=kept[::-1]), closed.consts)


def _masked(
    equation: JaxprEqn, makers: Mapping[Any, JaxprEqn], known: Mapping[Any, Any]
) -> JaxprEqn | None:
    """The equation that makes the same number of another, if it is that with some digits masked."""
    masking = _maker(equation, 0, makers) if equation.primitive.name == _BITS else None
    if masking is None or masking.primitive.name != "and":
        return None
    own = aval(equation.outvars[0])
    for n in range(2):
        taking, mask = _maker(masking, n, makers), _number(masking.invars[1 - n], makers, known)
        if taking is None or taking.primitive.name != _BITS or mask is None:
            continue
        (x,) = taking.invars
        like = _like(mask, own.dtype)
        if aval(x).dtype == own.dtype and aval(x).shape == own.shape and like is not None:
            return equation.replace(primitive=keep_digits_p, invars=[x], params={"like": like})
    return None


def _maker(equation: JaxprEqn, n: int, makers: Mapping[Any, JaxprEqn]) -> JaxprEqn | None:
    """What makes an operand of an equation."""
    x = equation.invars[n]
    return None if isinstance(x, Literal) else makers.get(x)


def _number(x: Any, makers: Mapping[Any, JaxprEqn], known: Mapping[Any, Any]) -> int | None:
    """The integer that all values of a variable are, if that is known."""
    if isinstance(x, Literal):
        return int(x.val)
    maker = makers.get(x)
    if maker is not None and maker.primitive.name == "broadcast_in_dim":
        return _number(maker.invars[0], makers, known)
    if not isinstance(known.get(x), np.ndarray | np.generic):
        return None
    numbers = np.unique(known[x])
    return int(numbers[0]) if numbers.size == 1 else None


def _like(mask: int, dtype: Any) -> float | None:
    """The number from 1 to 2 with the digits of a mask, if that has sign and exponent, too."""
    if not jnp.issubdtype(dtype, np.floating):
        return None
    info = jnp.finfo(dtype)
    exponents, digits = divmod(mask % 2**info.bits, 2**info.nmant)
    whole = exponents == 2 ** (info.bits - info.nmant) - 1
    return 1 + digits / 2**info.nmant if whole else None
