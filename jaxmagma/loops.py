"""Which functions a CPU does as fast in XLA's loops as in a kernel, or faster.

A kernel has elements in the lanes of vectors, and each operation loads and stores its values. XLA
compiles loops in which they stay in registers, if each goes over a tile from one end to the other:
limiters, soft maxima, fluxes. It is slower than a kernel where many components are put together or
are taken apart again, where short sums follow each other, and where functions are calls of a
library (``benchmarks/results/loops-epyc.txt``).
"""

import math

from jaxmagma.conditions import Kind
from jaxmagma.jaxpr import POINTWISE, aval, inner_jaxpr, nested
from jaxmagma.lines import Lines, variables


# So many components at most are put together, and so many sums of fewer than so many values follow
# each other.
MOST_PIECES = 8
MOST_SUMS = 2
SHORT = 16

# XLA calls a library for each value of these.
_LIBRARY = {"acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "cos", "erf", "log1p"}
_LIBRARY |= {"pow", "sin", "tan"}
_POINTWISE = (POINTWISE.keys() | {"copy", "convert_element_type", "stop_gradient"}) - _LIBRARY
_MOVES = {"broadcast_in_dim", "pad", "reshape", "rev", "squeeze", "transpose"}
_PARTS = {"slice", "split", "unstack"}
_JOINS = {"concatenate", "stack"}
_SUMS = {"argmax", "argmin"}
_SUMS |= {f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum")}


def are_loops(lines: Lines) -> bool:
    """Whether XLA has such loops for a function of an element."""
    moved = set(lines.parameters)  # what is an argument, or a part of one
    sums = 0
    for line in lines.lines:
        name = line.equation.primitive.name
        operands = {x for x in variables(line.operands) if x.kind == Kind.MAPPED}
        if inner_jaxpr(line.equation) is not None:  # with a rule of its own, as `relu` has
            inside = [x for x in nested(line.equation) if inner_jaxpr(x) is None]
            if not all(x.primitive.name in _POINTWISE | _MOVES for x in inside):
                return False
        elif name in _PARTS | _MOVES:
            if operands <= moved:
                moved.update(line.results)
            elif name in _PARTS:
                return False
        elif name in _JOINS:
            if len(line.operands) > MOST_PIECES:
                return False
        elif name in _SUMS:
            shape = aval(line.equation.invars[0]).shape
            sums += math.prod(shape[x] for x in line.equation.params["axes"]) < SHORT
        elif name not in _POINTWISE:
            return False
    return sums <= MOST_SUMS
