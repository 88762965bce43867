"""How much a jaxpr computes, which decides how many steps of a loop are parts of one kernel.

A kernel has the text of each step, so the time that it takes to compile grows with their number;
and the more a step computes, the less it matters that its values go through memory.
"""

import math

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.jaxpr.calls import inner_jaxpr
from jaxmagma.jaxpr.equations import aval, is_extended, nested
from jaxmagma.jaxpr.pointwise import POINTWISE, SPECIAL
from jaxmagma.programs.functions import LONG


# Multiplications, as it were, in one kernel: it compiles in a second or two
# (benchmarks/results/spellings-epyc.txt).
MOST_WORK = 4096
# What one value takes of a function that is tens of operations and more, of a long one, of a
# quotient or a root, and of anything else.
_SPECIAL, _LONG, _QUOTIENT, _USUAL = 128, 16, 8, 1
_QUOTIENTS = {"div", "rsqrt", "sqrt"}
_FACTORISATIONS = {"cholesky", "householder_product", "lu", "qr", "triangular_solve"}
_ITERATIONS = {"eigh", "svd"}


def steps_at_once(body: ClosedJaxpr) -> int:
    """How many steps of a loop one kernel has, which is one at least."""
    return max(1, MOST_WORK // max(1, _work(body)))


def _work(jaxpr: ClosedJaxpr) -> int:
    return sum(map(_of_equation, jaxpr.jaxpr.eqns))


def _of_equation(equation: JaxprEqn) -> int:
    name, parameters = equation.primitive.name, equation.params
    if (inner := inner_jaxpr(equation)) is not None:
        return _work(inner)
    if name == "scan":
        return int(parameters["length"]) * _work(parameters["jaxpr"])
    if name == "custom_linear_solve":
        return _work(parameters["jaxprs"].solve)
    if inside := list(nested(equation)):
        return sum(map(_of_equation, inside))
    made = [aval(x) for x in equation.outvars]
    values = sum(math.prod(x.shape) for x in made if not is_extended(x.dtype))
    if name == "dot_general":
        (summed, _), _ = parameters["dimension_numbers"]
        return values * math.prod(aval(equation.invars[0]).shape[x] for x in summed)
    if name in _FACTORISATIONS | _ITERATIONS:
        rows = aval(equation.invars[0]).shape[-1]
        return values * rows * (_LONG if name in _ITERATIONS else _USUAL)
    if name.startswith(("reduce_", "cum", "argm")):
        return sum(math.prod(aval(x).shape) for x in equation.invars)
    if name not in POINTWISE:  # it moves values, and is read all the same
        return 1
    if name in SPECIAL:
        return values * _SPECIAL
    return values * (_LONG if name in LONG else _QUOTIENT if name in _QUOTIENTS else _USUAL)
