"""Pointwise equations, read through a function that makes one value of a few."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import AccuracyMode, RoundingMethod

from jaxmagma.jaxpr import special
from jaxmagma.jaxpr.equations import Rule, Unsupported, anything, aval, nothing, one_of
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.powers import integer_power, polynomial


Emit = Callable[..., Any]  # (function, operands...) -> value


def _round(emit: Emit, x: Any, rounding_method: Any) -> Any:
    away = rounding_method == RoundingMethod.AWAY_FROM_ZERO
    return emit("round_away" if away else "round_even", x)


def _select(emit: Emit, which: Any, *cases: Any) -> Any:
    made = cases[0]
    for n, case in enumerate(cases[1:], start=1):
        beyond = emit("ge", which, float(n)) if len(cases) > 2 else which
        made = emit("select", beyond, made, case)
    return made


# How accurate a function is to be. Ours are as accurate as they get, to a few units in the last
# place; a tolerance may ask for more.
_ACCURACY = {"accuracy": one_of(None, AccuracyMode.DEFAULT, AccuracyMode.HIGHEST)}


def _function(name: str, operands: int) -> Rule:
    knows = _ACCURACY | {"out_dtype": nothing, "accumulation_dtype": nothing}
    return Rule(lambda emit, *xs: emit(name, *xs), (), knows, operands)


SPECIAL: dict[str, Rule] = {
    "lgamma": Rule(special.lgamma, operands=1),
    "digamma": Rule(special.digamma, operands=1),
    "polygamma": Rule(special.polygamma, operands=2),
    "erf_inv": Rule(special.erf_inv, operands=1),
}
# By the name of the primitive; ``read`` gets ``emit``, the operands and what it heeds.
POINTWISE: dict[str, Rule] = {
    **{name: _function(name, x.operands) for name, x in FUNCTIONS.items()},
    "integer_pow": Rule(integer_power, ("y",), {"mul_impl": nothing}),
    "log2": Rule(lambda emit, x: emit("mul", emit("log", x), math.log2(math.e)), (), _ACCURACY),
    "polynomial": Rule(lambda emit, x, *ks: polynomial(emit, x, ks), (), {"unroll": anything}),
    "keep_digits": Rule(
        lambda emit, x, like: emit("common_digits", x, like), ("like",), operands=1
    ),
    "square": Rule(lambda emit, x: emit("mul", x, x)),
    "add_any": Rule(lambda emit, a, b: emit("add", a, b)),
    "one_minus_square": Rule(lambda emit, x: emit("sub", 1.0, emit("mul", x, x))),
    "clamp": Rule(lambda emit, low, x, high: emit("min", emit("max", x, low), high)),
    "select_n": Rule(_select),
    "round": Rule(_round, ("rounding_method",)),
    **SPECIAL,
}
# What is read by the dtype of the result, too.
_OF_A_DTYPE = {"erf_inv"}


def pointwise(equation: JaxprEqn, emit: Emit, operands: Sequence[Any]) -> Any | None:
    """The result of a pointwise equation through ``emit``, or None if it is none."""
    rule = POINTWISE.get(equation.primitive.name)
    if rule is None:
        return None
    rule.check(equation)
    dtype = np.dtype(aval(equation.outvars[0]).dtype)
    if equation.primitive.name in SPECIAL and dtype not in (np.float32, np.float64):
        raise Unsupported(f"{equation.primitive.name} of {dtype}")
    heeded = {key: equation.params[key] for key in rule.heeds}
    if equation.primitive.name in _OF_A_DTYPE:
        heeded["dtype"] = dtype
    return rule.read(emit, *operands, **heeded)
