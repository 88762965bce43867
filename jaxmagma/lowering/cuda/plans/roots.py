"""Powers of halves and thirds are powers of a root.

The energy of a nearly incompressible solid has ``J ** (-2 / 3)``, its gradient ``J ** (-5 / 3)``.
In double precision a power is a call, with four times the arithmetic of that
(``benchmarks/results/elements-h200.txt``). See ``PowerOfRoot`` in ``cuda/functions.cuh``.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from jaxmagma.plans.plan import Plan, Pointwise, Step


# Beyond these there are more products, and so more roundings.
MOST = 4
# The exponent of a derivative is a difference, rounded, of what was rounded before.
ROUNDINGS = 8


def powers_of_roots(plan: Plan) -> Plan:
    """The plan with powers that are known to be of roots."""
    if plan.program.dtype != np.float64:
        return plan
    constants = {n: x.constant.array for n, x in enumerate(plan.program.inputs) if x.constant}

    def taken(step: Step) -> Step:
        if not isinstance(step, Pointwise) or step.function != "pow":
            return step
        exponent = constants.get(step.operands[1])
        of_root = (
            exponent is not None and exponent.size == 1 and _is_of_root(float(exponent.item()))
        )
        return replace(step, function="power_of_root") if of_root else step

    return replace(plan, steps=tuple(map(taken, plan.steps)))


def _is_of_root(exponent: float) -> bool:
    """Whether it is halves, or thirds but for some roundings, and no whole number but for some."""
    if not abs(exponent) < MOST:
        return False
    thirds = round(3 * exponent)
    rest = abs(Fraction(exponent) - Fraction(thirds, 3))
    is_third = thirds % 3 != 0 and rest <= ROUNDINGS * np.spacing(abs(exponent))
    return is_third or (2 * exponent) % 2 == 1
