"""Which functions XLA's own loops do as fast as a kernel, or faster: limiters, soft maxima, fluxes.

On a CPU a kernel has elements in the lanes of vectors, and each operation loads and stores its
values; on a GPU threads have elements, which are far apart in memory. XLA compiles loops over the
values of a result that keep all others in registers. It is slower than a kernel where many
components are put together or are taken apart again, and where it makes several loops: on a CPU
around many short sums, on a GPU around any. For some functions a CPU calls a library, value by
value (``benchmarks/results/loops-xeon.txt``). What is looked up in a table that all elements share,
as a material, it finds at once, where a kernel selects among all there is.
"""

import math

from jaxmagma.frontends.conditions import Kind
from jaxmagma.frontends.lines import Line, Lines, variables
from jaxmagma.jaxpr import POINTWISE, aval, inner_jaxpr, nested
from jaxmagma.programs.functions import VALUE_BY_VALUE


# So many components at most are put together.
MOST_PIECES = 8
# On a CPU there are so many sums at most, of fewer than so many values.
MOST_SUMS = 2
SHORT = 16
# So many values are put at a place that is computed, at most.
MOST_UPDATES = 4

_POINTWISE = POINTWISE.keys() | {"copy", "convert_element_type", "stop_gradient"}
_POINTWISE_ON_CPU = _POINTWISE - VALUE_BY_VALUE
_MOVES = {"broadcast_in_dim", "pad", "reshape", "rev", "squeeze", "transpose"}
_PARTS = {"slice", "split", "unstack"}
_JOINS = {"concatenate", "stack"}
# At places that are computed. A kernel looks at each there is; a CPU goes to the one.
_LOOKUPS = {"gather", "dynamic_slice"}
_UPDATES = {"scatter", "scatter-add", "scatter_add"}
_SUMS = {"argmax", "argmin"}
_SUMS |= {f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum")}


def are_loops(lines: Lines, platform: str) -> bool:
    """Whether XLA has such loops for a function of an element on a platform of JAX."""
    cpu = platform == "cpu"
    pointwise = _POINTWISE_ON_CPU if cpu else _POINTWISE
    moved = set(lines.parameters)  # what is an argument, or a part of one
    sums = 0
    for line in lines.lines:
        name = line.equation.primitive.name
        operands = {x for x in variables(line.operands) if x.kind == Kind.MAPPED}
        if inner_jaxpr(line.equation) is not None:  # with a rule of its own, as `relu` has
            inside = [x for x in nested(line.equation) if inner_jaxpr(x) is None]
            if not all(x.primitive.name in pointwise | _MOVES for x in inside):
                return False
        elif name in _MOVES or name in _PARTS:
            if operands <= moved:
                moved.update(line.results)
            elif name in _PARTS:
                return False
        elif name in _JOINS:
            if len(line.operands) > MOST_PIECES:
                return False
        elif name in _SUMS:
            shape = aval(line.equation.invars[0]).shape
            count = math.prod(shape[x] for x in line.equation.params["axes"])
            sums += count < SHORT or not cpu
        elif cpu and name in _LOOKUPS | _UPDATES:
            if not _is_at_few_places(line):
                return False
        elif name not in pointwise:
            return False
    return sums <= (MOST_SUMS if cpu else 0)


def _is_at_few_places(line: Line) -> bool:
    """Whether values are looked up, or put, at places that are computed: few, if they are put."""
    whole, *where = line.kinds
    if line.equation.primitive.name in _UPDATES:
        few = math.prod(aval(line.equation.invars[2]).shape) <= MOST_UPDATES
        return few and where[0] == Kind.MAPPED
    return whole != Kind.MAPPED and max(where) == Kind.MAPPED
