"""The pointwise functions of a program: what each one is in plain JAX, and what it costs.

Most have the name and the meaning of a primitive of ``jax.lax``.  Every value of a program has the
program's dtype; a truth value is 1 or 0 in it, as a comparison makes and ``select`` reads it, and
what is of a narrower dtype in JAX is a number that this has, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmagma.programs import exact


@dataclass(frozen=True)
class Function:
    """``evaluate`` takes arrays of equal dtype; ``flops`` are counted per value."""

    evaluate: Callable[..., Any]
    flops: int
    operands: int


def _truth(predicate: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns booleans, as numbers."""
    return lambda a, *rest: predicate(a, *rest).astype(a.dtype)


def _select(which: Any, if_false: Any, if_true: Any) -> Any:
    return lax.select(which != 0, if_true, if_false)


# The derivative as a function there is; newer JAX computes it by the bits of its argument.
@jax.custom_jvp
def _erf(a: Any) -> Any:
    return lax.erf(a)


@jax.custom_jvp
def _erfc(a: Any) -> Any:
    return lax.erfc(a)


def _gaussian(a: Any) -> Any:
    # Beyond these bounds it is zero, and so is its derivative, no infinity times zero.
    a = lax.clamp(jnp.asarray(-40, a.dtype), a, jnp.asarray(40, a.dtype))
    return (2 / math.pi**0.5) * lax.exp(-a * a)


_erf.defjvp(lambda primals, tangents: (_erf(*primals), _gaussian(*primals) * tangents[0]))
_erfc.defjvp(lambda primals, tangents: (_erfc(*primals), -_gaussian(*primals) * tangents[0]))


def _rounding(dtype: Any) -> Callable[..., Any]:
    """To the nearest number of a narrower dtype, or of complex numbers made of such."""

    def rounded(a: Any) -> Any:
        if dtype == jnp.bfloat16 and a.dtype == np.float32:
            # A conversion there and back may be taken for none.
            return lax.reduce_precision(a, 8, 7)
        narrow = np.complex64 if jnp.iscomplexobj(a) else dtype
        return a.astype(narrow).astype(a.dtype)

    return rounded


FUNCTIONS: dict[str, Function] = {
    "neg": Function(lax.neg, 1, 1),
    "abs": Function(lax.abs, 1, 1),
    "sign": Function(lax.sign, 1, 1),
    "floor": Function(lax.floor, 1, 1),
    "ceil": Function(lax.ceil, 1, 1),
    "round_away": Function(lambda a: lax.round(a, lax.RoundingMethod.AWAY_FROM_ZERO), 1, 1),
    "round_even": Function(lambda a: lax.round(a, lax.RoundingMethod.TO_NEAREST_EVEN), 1, 1),
    "sqrt": Function(lax.sqrt, 1, 1),
    "rsqrt": Function(lax.rsqrt, 2, 1),
    "cbrt": Function(lax.cbrt, 1, 1),
    "exp": Function(lax.exp, 1, 1),
    "exp2": Function(lax.exp2, 1, 1),
    "expm1": Function(lax.expm1, 1, 1),
    "log": Function(lax.log, 1, 1),
    "log1p": Function(lax.log1p, 1, 1),
    "logistic": Function(lax.logistic, 1, 1),
    "sin": Function(lax.sin, 1, 1),
    "cos": Function(lax.cos, 1, 1),
    "tan": Function(lax.tan, 1, 1),
    "asin": Function(lax.asin, 1, 1),
    "acos": Function(lax.acos, 1, 1),
    "atan": Function(lax.atan, 1, 1),
    "sinh": Function(lax.sinh, 1, 1),
    "cosh": Function(lax.cosh, 1, 1),
    "tanh": Function(lax.tanh, 1, 1),
    "asinh": Function(lax.asinh, 1, 1),
    "acosh": Function(lax.acosh, 1, 1),
    "atanh": Function(lax.atanh, 1, 1),
    "erf": Function(_erf, 1, 1),
    "erfc": Function(_erfc, 1, 1),
    "add": Function(lax.add, 1, 2),
    "sub": Function(lax.sub, 1, 2),
    "mul": Function(lax.mul, 1, 2),
    "div": Function(lax.div, 1, 2),
    "reciprocal": Function(lambda a: lax.div(lax.full_like(a, 1), a), 1, 1),
    # Of the first two; the third is the reciprocal of the second, for those who gain by it.
    "quotient": Function(lambda a, b, inverse: lax.div(a, b), 3, 3),
    "rem": Function(lax.rem, 1, 2),
    "pow": Function(lax.pow, 1, 2),
    # Where the exponent is known to be halves or thirds, for those who gain by it.
    "power_of_root": Function(lax.pow, 1, 2),
    "atan2": Function(lax.atan2, 1, 2),
    "max": Function(lax.max, 1, 2),
    "min": Function(lax.min, 1, 2),
    "lt": Function(_truth(lax.lt), 1, 2),
    "le": Function(_truth(lax.le), 1, 2),
    "gt": Function(_truth(lax.gt), 1, 2),
    "ge": Function(_truth(lax.ge), 1, 2),
    "eq": Function(_truth(lax.eq), 1, 2),
    "ne": Function(_truth(lax.ne), 1, 2),
    "is_finite": Function(_truth(lax.is_finite), 1, 1),
    "not": Function(_truth(lambda a: a == 0), 1, 1),
    "and": Function(_truth(lambda a, b: (a != 0) & (b != 0)), 1, 2),
    "or": Function(_truth(lambda a, b: (a != 0) | (b != 0)), 1, 2),
    "xor": Function(_truth(lambda a, b: (a != 0) ^ (b != 0)), 1, 2),
    # The first operand, as a value of every element that the second is one of.
    "first": Function(lambda a, b: a, 0, 2),
    "fused_multiply_add": Function(exact.fused_multiply_add, 2, 3),
    "product_error": Function(exact.product_error, 2, 2),
    "inverse_binade": Function(exact.inverse_binade, 1, 1),
    "common_digits": Function(exact.common_digits, 1, 2),
    "select": Function(_select, 1, 3),  # which, if it is 0, if it is not
    "round_to_float32": Function(_rounding(np.float32), 1, 1),
    "round_to_bfloat16": Function(_rounding(jnp.bfloat16), 1, 1),
    "round_to_float16": Function(_rounding(np.float16), 1, 1),
}

# Those whose operands may change places without changing a bit of the result.
COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "and", "or", "xor"})
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# What decides between values, and what follows the decision.
TRUTHS = COMPARISONS | {"and", "or", "xor", "not"}
CHOICES = TRUTHS | {"select"}
# Those that take tens of operations for each value.
LONG = frozenset(
    {"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf"}
    | {"erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "power_of_root", "rem"}
    | {"sin", "sinh", "tan", "tanh"}
)
# Where XLA compiles a function for a CPU, it calls a library for each value of these. That takes as
# much longer as a kernel takes longer for so many operations of other functions: suite `functions`
# of the benchmarks, on an EPYC with AVX2. Of single precision it computes more of them in vectors.
# The last ones are many operations, among which it calls a library or does what takes as long.
VALUE_BY_VALUE: dict[str, dict[str, int]] = {
    "float64": {
        **{"acos": 90, "acosh": 50, "asin": 90, "asinh": 50, "atan2": 60, "atanh": 50, "cbrt": 90},
        **{"cos": 60, "erf": 120, "log1p": 30, "pow": 50, "sin": 60, "tan": 80},
        **{"lgamma": 250, "digamma": 200, "polygamma": 500},
    },
    "float32": {
        **{"acos": 120, "asin": 120, "atan2": 100, "cbrt": 130, "cos": 60, "sin": 50},
        "tan": 110,
        **{"lgamma": 250, "digamma": 250, "polygamma": 500, "erf_inv": 150},
    },
}
# Of complex numbers, the backends and the rules of differentiation know these alone.
COMPLEX_FUNCTIONS = frozenset({"add", "sub", "neg", "mul", "round_to_float32"})
# By the dtype whose numbers they round to.  What they round they leave alone the second time, and
# their derivative is rounded as they are.
ROUNDINGS: dict[np.dtype, str] = {
    np.dtype(np.complex64): "round_to_float32",
    np.dtype(np.float32): "round_to_float32",
    np.dtype(jnp.bfloat16): "round_to_bfloat16",
    np.dtype(np.float16): "round_to_float16",
}


def evaluate(function: str, *operands: Any) -> Any:
    """The function of arrays that broadcast against each other."""
    shapes = {jnp.shape(x) for x in operands}
    if len(shapes) == 1:
        return FUNCTIONS[function].evaluate(*operands)
    shape = jnp.broadcast_shapes(*shapes)
    whole = next((x for x in operands if jnp.shape(x) == shape), None)

    def spread(x: Any) -> Any:
        if jnp.shape(x) == shape:
            return x
        if jnp.size(x) == 1 and whole is not None:  # sharded as the others are
            return lax.full_like(whole, jnp.reshape(x, ()), jnp.result_type(x))
        return jnp.broadcast_to(x, shape)

    return FUNCTIONS[function].evaluate(*map(spread, operands))
