"""The gamma function's logarithm and its derivatives, and the inverse of erf, as straight lines.

They are made of operations that kernels have, by methods that XLA has, too:

- C. Lanczos, "A precision approximation of the gamma function", SIAM J. Numer. Anal. B 1 (1964),
  with g = 7 and nine terms, and Euler's reflection for arguments below a half;
- the Hurwitz zeta function by the formula of Euler and Maclaurin, for derivatives of digamma;
- M. Giles, "Approximating the erfinv function", GPU Computing Gems, Jade Edition (2011).

``emit`` makes the value of a pointwise function.  Derivatives are JAX's own, which no select among
these branches is in.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxmagma.jaxpr.equations import Unsupported
from jaxmagma.programs.powers import integer_power, polynomial


Emit = Callable[..., Any]  # (function, operands...) -> value

# ---- The gamma function --------------------------------------------------------------------------

# Gamma(z + 1) = sqrt(2 pi) t^(z + 1/2) e^-t A(z) with t = z + g + 1/2, and A(z) a constant and the
# sum of c / (z + k) over these c, with k from one.
_G = 7.0
_SHIFT = _G + 0.5
_CONSTANT = 0.99999999999980993227684700473478
_LANCZOS = (
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)
_AT_ZERO = math.fsum([_CONSTANT, *(c / k for k, c in enumerate(_LANCZOS, start=1))])


def lgamma(emit: Emit, x: Any) -> Any:
    """The logarithm of the absolute value of the gamma function.

    Up to four it is computed as the product of the distance from the nearest of its zeros, one and
    two, and something: with A(z) / A(0) = 1 - z S(z), lgamma(1 + z) has no terms but multiples of
    z, and lgamma(2 + z) is that and log(1 + z).
    """
    below = emit("lt", x, 0.5)
    y = emit("select", below, x, emit("sub", 1.0, x))
    is_near, is_second = emit("lt", y, 4.0), emit("gt", y, 1.5)
    zero = emit("select", emit("and", is_near, is_second), 1.0, 2.0)
    z = emit("sub", y, zero)
    inverses = _inverses(emit, z)
    s = _weighted(emit, [c / (k * _AT_ZERO) for k, c in enumerate(_LANCZOS, start=1)], inverses)
    first, second = emit("neg", s), emit("sub", 1.0, emit("mul", s, emit("add", z, 1.0)))
    near = emit("mul", z, emit("select", is_second, first, second))
    far = emit("add", _weighted(emit, _LANCZOS, inverses), _CONSTANT - 1)
    growth = emit("mul", emit("add", z, 0.5), emit("log1p", emit("mul", z, 1 / _SHIFT)))
    growth = emit("add", growth, emit("mul", z, math.log(_SHIFT) - 1))
    rest = emit("log1p", emit("select", is_near, far, near))
    made = emit("add", growth, emit("sub", rest, emit("select", is_near, math.log(_AT_ZERO), 0.0)))
    # |sin(pi x)| of the distance from the nearest integer.
    size = emit("abs", x)
    whole = emit("floor", size)
    part = emit("sub", size, whole)
    sine = emit("sin", emit("mul", emit("min", part, emit("sub", 1.0, part)), math.pi))
    reflected = emit("sub", emit("sub", math.log(math.pi), emit("log", sine)), made)
    reflected = emit("select", emit("eq", size, whole), reflected, math.inf)  # a pole
    return emit("select", below, made, reflected)


def digamma(emit: Emit, x: Any) -> Any:
    """The derivative of lgamma."""
    below = emit("lt", x, 0.5)
    z = emit("select", below, emit("sub", x, 1.0), emit("neg", x))
    inverses = _inverses(emit, z)
    a = emit("add", _weighted(emit, _LANCZOS, inverses), _CONSTANT)
    slope = _weighted(emit, _LANCZOS, [emit("mul", x, x) for x in inverses])
    t = emit("add", z, _SHIFT)
    made = emit("sub", emit("log", t), emit("div", slope, a))
    made = emit("sub", made, emit("div", _G, t))
    part = emit("sub", x, emit("round_even", x))
    cotangent = emit("div", math.pi, emit("tan", emit("mul", part, math.pi)))
    made = emit("select", below, made, emit("sub", made, cotangent))
    pole = emit("select", emit("eq", x, 0.0), math.nan, -math.inf)
    return emit("select", _is_pole(emit, x), made, pole)


def _inverses(emit: Emit, z: Any) -> list[Any]:
    return [emit("div", 1.0, emit("add", z, float(k))) for k in range(1, len(_LANCZOS) + 1)]


def _weighted(emit: Emit, weights: Sequence[float], values: Sequence[Any]) -> Any:
    """The sum, smallest terms first."""
    products = [emit("mul", x, c) for x, c in zip(values, weights, strict=True)]
    made = products.pop()
    while products:
        made = emit("add", made, products.pop())
    return made


def _is_pole(emit: Emit, x: Any) -> Any:
    return emit("and", emit("le", x, 0.0), emit("eq", x, emit("floor", x)))


# ---- Derivatives of digamma ----------------------------------------------------------------------

# Terms that are added up before those of the formula, and of the formula, as XLA has them.
_DIRECT = 10
_BERNOULLI = [
    Fraction(x)
    for x in (
        *("1/6", "-1/30", "1/42", "-1/30", "5/66", "-691/2730", "7/6", "-3617/510", "43867/798"),
        *("-174611/330", "854513/138", "-236364091/2730"),
    )
]
_HIGHEST_ORDER = 8


def polygamma(emit: Emit, order: Any, x: Any) -> Any:
    """A derivative of digamma whose order is known.

    As XLA's, it means something above -9 alone, and at poles.
    """
    known = isinstance(order, float | np.ndarray | np.generic)
    if not known or not np.size(order) or np.any(order != np.ravel(order)[0]):
        raise Unsupported("polygamma of an order that is computed")
    n = float(np.ravel(order)[0])
    if n not in range(_HIGHEST_ORDER + 1):
        raise Unsupported(f"polygamma of order {n:g}")
    if n == 0:
        return digamma(emit, x)
    s = int(n) + 1
    inverses = [emit("div", 1.0, emit("add", x, float(k)) if k else x) for k in range(_DIRECT + 1)]
    *direct, last = [integer_power(emit, y, s) for y in inverses]
    made = direct.pop()
    while direct:
        made = emit("add", made, direct.pop())
    inverse = inverses[-1]
    tail = emit("mul", integer_power(emit, inverse, s - 1), 1 / (s - 1))
    terms = [
        float(number * math.prod(range(s, s + 2 * j - 1)) / math.factorial(2 * j))
        for j, number in enumerate(_BERNOULLI, start=1)
    ]
    more = polynomial(emit, emit("mul", inverse, inverse), terms)
    tail = emit("add", tail, emit("mul", last, emit("add", emit("mul", inverse, more), 0.5)))
    made = emit("mul", emit("add", made, tail), float((-1) ** s * math.factorial(s - 1)))
    return emit("select", _is_pole(emit, x), made, math.nan if s % 2 else math.inf)


# ---- The inverse of erf --------------------------------------------------------------------------

# Of w = -log(1 - x^2) below a number, or of its square root above, around a number: the factor of
# x. The constant coefficient comes first.
_Piece = tuple[float, float, Sequence[float]]  # up to where, around what, coefficients
_SINGLE: Sequence[_Piece] = (
    (
        5.0,
        2.5,
        (
            *(1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087),
            *(-4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08),
        ),
    ),
    (
        math.inf,
        3.0,
        (
            *(2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773),
            *(-0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257),
        ),
    ),
)
_DOUBLE: Sequence[_Piece] = (
    (
        6.25,
        3.125,
        (
            *(1.6536545626831027356, 0.24015818242558961693, -0.0060336708714301490533),
            *(-0.00074070253416626697512, 0.0001867342080340571352, -1.3882523362786468719e-05),
            *(-1.3654692000834678645e-06, 4.2347877827932403518e-07, -2.9070369957882005086e-08),
            *(-4.1126339803469836976e-09, 1.051212273321532285e-09, -5.4154120542946279317e-11),
            *(-1.2975133253453532498e-11, 2.6335093153082322977e-12, -8.1519341976054721522e-14),
            *(-4.0545662729752068639e-14, 6.6376381343583238325e-15, 2.0972767875968561637e-17),
            *(-1.333171662854620906e-16, 1.115787767802518096e-17, 1.2858480715256400167e-18),
            *(-1.685059138182016589e-19, -3.6444120640178196996e-21),
        ),
    ),
    (
        16.0,
        3.25,
        (
            *(3.0838856104922207635, 1.0052589676941592334, 0.005370914553590063617),
            *(-0.0037512085075692412107, 0.0024914420961078508066, -0.0016882755560235047313),
            *(0.00095328937973738049703, -0.0003550375203628474796, 2.4031110387097893999e-05),
            *(6.8284851459573175448e-05, -4.7318229009055733981e-05, 1.2475304481671778723e-05),
            *(2.9234449089955446044e-06, -4.013867526981545969e-06, 1.5027403968909827627e-06),
            *(1.8239629214389227755e-08, -2.7517406297064545428e-07, 9.0756561938885390979e-08),
            2.2137376921775787049e-09,
        ),
    ),
    (
        math.inf,
        5.0,
        (
            *(4.8499064014085844221, 1.0103004648645343977, -0.00013871931833623122026),
            *(-0.00021503011930044477347, 7.5995277030017761139e-05, -1.9681778105531670567e-05),
            *(4.5260625972231537039e-06, -9.9298272942317002539e-07, 2.2900482228026654717e-07),
            *(-6.7711997758452339498e-08, 2.9147953450901080826e-08, -1.4960026627149240478e-08),
            *(7.6157012080783393804e-09, -3.7894654401267369937e-09, 1.5076572693500548083e-09),
            *(-2.5556418169965252055e-10, -2.7109920616438573243e-11),
        ),
    ),
)


def erf_inv(emit: Emit, x: Any, dtype: np.dtype) -> Any:
    """The inverse of erf, to the precision of a dtype."""
    pieces = _DOUBLE if dtype == np.float64 else _SINGLE
    size = emit("abs", x)
    # Of a square close to one, the difference would be rounded.
    w = emit("neg", emit("log", emit("mul", emit("sub", 1.0, size), emit("add", 1.0, size))))
    root = emit("sqrt", w)
    made = None
    for (end, centre, coefficients), argument in zip(
        reversed(pieces), [*itertools.repeat(root, len(pieces) - 1), w], strict=True
    ):
        piece = polynomial(emit, emit("sub", argument, centre), coefficients)
        made = piece if made is None else emit("select", emit("lt", w, end), made, piece)
    is_one = emit("eq", size, 1.0)
    return emit("mul", x, emit("select", is_one, made, math.inf))
