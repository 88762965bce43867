"""Functions of a number, alone and among multiplications and additions.

Where a kernel calls a library for each value of a function and XLA has a polynomial for many, or
has no kernel of it at all, the smallest programs show it. Flops are counted as one for a function.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.scipy import special

from benchmarks.programs import Program, in_float32
from benchmarks.workloads import Array, Function


# By the interval that the arguments are in.
_FUNCTIONS: dict[tuple[float, float], dict[str, Callable[[Array], Array]]] = {
    (-0.9, 0.9): {
        **{x: getattr(jnp, x) for x in ("arcsin", "arccos", "arctanh")},
        "erf_inv": jax.lax.erf_inv,
    },
    (-3, 3): {
        **{x: getattr(jnp, x) for x in ("abs", "sign", "floor", "round", "exp", "exp2", "expm1")},
        **{x: getattr(jnp, x) for x in ("sin", "cos", "tan", "arctan", "sinh", "cosh", "tanh")},
        **{x: getattr(jnp, x) for x in ("arcsinh", "cbrt", "sinc", "i0")},
        **{x: getattr(jax.nn, x) for x in ("sigmoid", "softplus", "gelu", "silu", "elu", "mish")},
        "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
        **{x: getattr(special, x) for x in ("erf", "erfc", "i0e", "i1e", "ndtr", "log_ndtr")},
        "expi": special.expi,
        "arctan2": lambda x: jnp.arctan2(x, 1.5),
        "remainder": lambda x: jnp.remainder(x, 0.7),
        "power_of": lambda x: jnp.power(1.3, x),
    },
    (0.1, 0.9): {
        "logit": special.logit,
        "ndtri": special.ndtri,
        "entr": special.entr,
        "betainc": lambda x: special.betainc(1.5, 2.5, x),
    },
    (1.1, 9): {
        **{x: getattr(jnp, x) for x in ("sqrt", "reciprocal", "log", "log1p", "log2", "arccosh")},
        **{x: getattr(special, x) for x in ("gammaln", "gamma", "digamma", "factorial")},
        "rsqrt": jax.lax.rsqrt,
        "expn": lambda x: special.expn(2, x),
        "power": lambda x: jnp.power(x, 1.7),
        "betaln": lambda x: special.betaln(x, 2.5),
        "trigamma": lambda x: special.polygamma(1, x),
        "zeta": lambda x: special.zeta(x, 1.5),
        "gammainc": lambda x: special.gammainc(2.5, x),
        "xlogy": lambda x: special.xlogy(x, x),
        "poisson": lambda x: jax.scipy.stats.poisson.logpmf(jnp.floor(x), 3.0),
    },
}


def every() -> Iterator[Program]:
    """Each of them in both places and both precisions."""
    for (least, most), functions in _FUNCTIONS.items():
        for name, function in functions.items():
            for place, element in (("alone", _alone), ("among", _among)):
                program = Program(
                    f"{name}-{place}/n2",
                    element(function, least, most),
                    ((2,),),
                    values=3,
                    flops=2 if place == "alone" else 22,
                    others={},
                    given=lambda x, a=least, b=most: (a + (b - a) * (x + 1) / 2,),
                )
                yield program
                yield in_float32(program)


def _alone(function: Callable[[Array], Array], least: float, most: float) -> Function:
    return lambda x: function(x[0]) * x[1]


def _among(function: Callable[[Array], Array], least: float, most: float) -> Function:
    """Ten multiplications and additions before or behind it."""

    def element(x: Array) -> Array:
        part = (x[0] - least) / (most - least)
        for _ in range(5):
            part = part + (part * 0.25 - part) * part
        y = function(least + (most - least) * part)
        for n in range(5):
            y = y * x[1] + (0.5 + n) * x[0]
        return y

    return element
