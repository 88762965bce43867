"""Which functions XLA's own loops do as fast as a kernel, or faster: limiters, soft maxima, fluxes.

On a CPU a kernel has elements in the lanes of vectors, and each operation loads and stores its
values. XLA compiles loops over the values of a result that keep all others in registers. It is
slower than a kernel where many components are put together or are taken apart again, and where it
makes several loops: on a CPU around many short sums, on a GPU around any short one. On a GPU it is
slower, too, where a result has few values for those that it is made of, or transposes operands: its
threads read far apart (``benchmarks/results/rules-h200.txt``).

For some functions a CPU calls a library, value by value (``benchmarks/results/loops-xeon.txt``), so
that few of them among many operations are XLA's all the same.
What is looked up in a table that all elements share, as a material, XLA finds at once, where a
kernel selects among all there is. Steps of a loop that are arithmetic alone it does in less time
than a kernel, even where each goes through memory (``benchmarks/results/spellings-epyc.txt``).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from jax.extend.core import JaxprEqn

from jaxmagma import internals
from jaxmagma.frontends import conditions
from jaxmagma.frontends.conditions import Kind
from jaxmagma.frontends.lines import Line, Lines, Variable, inlined, variables
from jaxmagma.jaxpr import POINTWISE, aval, inner_jaxpr, inside, nested
from jaxmagma.lowering.cpu import FUSED_VALUES_OF_XLA, LEAST_SIDE_OF_XLA
from jaxmagma.programs.functions import VALUE_BY_VALUE


# So many components at most are put together, and on a GPU; none there, if it takes long to compute
# what they have in common, which XLA does for each of them.
MOST_PIECES = 8
MOST_PIECES_ON_GPU = 3
_LONG = {"div", "exp", "log", "pow", "rsqrt", "sqrt", "tanh"}
# On a CPU there are so many sums at most of fewer than so many values, on a GPU none.
MOST_SUMS = 2
SHORT = 16
# On a GPU so many values at most for each of the result, where they are components.
MOST_READ = 2
# So many values are put at a place that is computed, at most; or any number, at one of places that
# have so many bytes at least, for a kernel looks at each place.
MOST_UPDATES = 4
LEAST_PLACES = 32

# Functions that are a hundred operations for each value and more. Of so many values a kernel of a
# GPU would be thousands, one after the other, where XLA has a loop.
_SPECIAL = {"digamma", "erf_inv", "lgamma", "polygamma"}
MANY_SPECIAL = 32

_UNCHANGED = {"copy", "convert_element_type", "optimization_barrier", "stop_gradient"}
_RANDOM = {"bitcast_convert_type", "random_bits"}
_POINTWISE = POINTWISE.keys() | _UNCHANGED
# Those that kernels do not know: there would be some before and behind them.
_POINTWISE_ON_CPU = _POINTWISE | {"bessel_i0e", "bessel_i1e"}
_COMPUTED_ON_CPU = _POINTWISE_ON_CPU - _UNCHANGED
_MOVES = {"broadcast_in_dim", "pad", "reshape", "rev", "squeeze", "transpose"}
_PARTS = {"slice", "split", "unstack"}
_JOINS = {"concatenate", "stack"}
# At places that are computed. A kernel looks at each there is; these go to the one, but for updates
# on a GPU, which wait for each other.
_LOOKUPS = {"gather", "dynamic_slice"}
_UPDATES = {
    *("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"),
    *("scatter-max", "scatter_max", "scatter-min", "scatter_min"),
}
_PLACES = {"argmax", "argmin"}
_COMPOSITE = "call_hi_primitive"
_SUMS = _PLACES | {f"reduce_{x}" for x in ("and", "max", "min", "or", "prod", "sum")}


def begins_loop(equation: JaxprEqn) -> bool:
    """Whether a GPU has a loop over values for it, and for what is computed of these alone.

    Of random numbers, whose bits kernels do not have, and of functions that are better there.
    """
    return equation.primitive.name in _RANDOM or is_better_loop(equation)


def is_better_loop(equation: JaxprEqn) -> bool:
    """Whether a kernel would have it as thousands of operations, one after the other."""
    if equation.primitive.name not in _SPECIAL:
        return False
    return math.prod(aval(equation.outvars[0]).shape) >= MANY_SPECIAL


def is_step(equation: JaxprEqn) -> bool:
    """Whether a loop over values goes on with it for each of them."""
    return equation.primitive.name in _POINTWISE


def are_loops_and_products(lines: Iterable[Line]) -> bool:
    """Whether plain JAX has loops and products of matrices for each of some lines on a CPU.

    Others, such as a sort, are often faster in the components that a program has.
    """
    known = _POINTWISE | _MOVES | _PARTS | _JOINS | _SUMS | {"dot_general", _COMPOSITE}

    def is_known(line: Line) -> bool:
        equation = line.equation
        if equation.primitive.name in _LOOKUPS:
            whole, *where = line.kinds
            return whole != Kind.MAPPED or max(where) in (Kind.KNOWN, Kind.MAPPED)
        steps = equation.primitive.name == "scan"
        inside = [equation] if inner_jaxpr(equation) is None and not steps else _inside(equation)
        return all(x.primitive.name in known for x in inside)

    return all(map(is_known, lines))


def are_loops(lines: Lines, platform: str) -> bool:
    """Whether XLA has such loops for a function of an element on a platform of JAX."""
    if platform != "cpu" and _is_slow_by_values(lines):
        return False
    sums = _sums(lines, platform == "cpu", set(lines.parameters))
    if sums is None or sums > (MOST_SUMS if platform == "cpu" else 0):
        return False
    return platform != "cpu" or not _calls_take_longer(lines)


def _calls_take_longer(lines: Lines) -> bool:
    """Whether XLA loses more time by calling a library than a kernel does by other operations.

    What several pieces of a result need it computes for each of them.
    """
    calls, operations = _calls(x.equation for x in lines.lines)
    pieces = sum(_pieces(lines).get(x, 1) for x in variables(lines.results))
    return calls * pieces > operations


def _calls(equations: Iterable[JaxprEqn]) -> tuple[int, int]:
    """What calls of a library are worth in equations, in operations, and these."""
    calls = operations = 0
    for equation in equations:
        steps = list(inside(equation))
        if steps:
            more = _calls(steps)
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            calls, operations = calls + times * more[0], operations + times * more[1]
        elif equation.primitive.name in _COMPUTED_ON_CPU:
            made = aval(equation.outvars[0])
            values = math.prod(made.shape)
            worth = VALUE_BY_VALUE.get(made.dtype.name, {}).get(equation.primitive.name, 0)
            calls, operations = calls + worth * values, operations + values
    return calls, operations


def _pieces(lines: Lines) -> dict[Variable, int]:
    """Of how many pieces values are put together, where they are some."""
    pieces: dict[Variable, int] = {}
    for line in lines.lines:
        counts = [pieces.get(x, 1) if isinstance(x, Variable) else 1 for x in line.operands]
        if line.equation.primitive.name in _JOINS:
            pieces.update(dict.fromkeys(line.results, sum(counts)))
        elif line.equation.primitive.name in _MOVES | _PARTS:
            pieces.update(dict.fromkeys(line.results, max(counts, default=1)))
    return pieces


def _is_slow_by_values(lines: Lines) -> bool:
    """Whether threads of a GPU that have a value of the result each read what is far apart.

    Or compute what others do as well.
    """
    names = {x.equation.primitive.name for x in lines.lines}
    if "transpose" in names and not names.isdisjoint(_POINTWISE):
        return True
    if not names.isdisjoint(_LONG) and any(map(_is_stack, lines.lines)):
        return True
    read, written = (
        sum(math.prod(x.aval.shape) for x in variables(ends) if x.kind == Kind.MAPPED)
        for ends in (lines.parameters, lines.results)
    )
    return not names.isdisjoint(_PARTS) and read > MOST_READ * written


def _is_stack(line: Line) -> bool:
    """Whether single components are put together."""
    equation = line.equation
    if equation.primitive.name == "concatenate":
        axis = equation.params["dimension"]
        return all(aval(x).shape[axis] == 1 for x in equation.invars)
    return equation.primitive.name == "stack"


def are_loops_around_compared_products(lines: Lines, platform: str) -> bool:
    """Whether they are such loops but for products of vectors with tables, which are compared.

    A kernel makes what is compared component by component, and XLA has products for all elements.
    """
    if platform != "cpu":
        return False
    products = [x for x in lines.lines if _is_product_with_table(x)]
    made = lines.depending(y for x in products for y in x.results)
    compared = (x for x in lines.lines if x.is_comparison or x.equation.primitive.name in _PLACES)
    if all(made.isdisjoint(variables(x.operands)) for x in compared):
        return False
    rest = [x for x in lines.lines if not _is_product_with_table(x)]
    moved = set(lines.parameters)
    sums = _sums(replace(lines, lines=rest), True, moved)
    given = all(moved.issuperset(variables(x.operands)) for x in products)
    few = sums is not None and sums <= MOST_SUMS
    return given and few and not _calls_take_longer(replace(lines, lines=rest))


def _sums(lines: Lines, cpu: bool, moved: set[Variable]) -> int | None:
    """How many sums there are that count; None if some line is in none of XLA's loops.

    ``moved`` is what is an argument, or a part of one.
    """
    pointwise = _POINTWISE_ON_CPU if cpu else _POINTWISE
    sums = 0
    pieces = _pieces(lines)
    for line in lines.lines:
        name = line.equation.primitive.name
        operands = {x for x in variables(line.operands) if x.kind == Kind.MAPPED}
        inner = inner_jaxpr(line.equation)
        if inner is not None:  # with a rule of its own, as `relu` has
            inside = inlined(inner, line.kinds)
            own = set(inside.parameters) if operands <= moved else set()
            more = _sums(inside, cpu, own)
            if more is None:
                return None
            sums += more
        elif cpu and (name == "scan" or _is_counting(line)):
            # Each step is one of XLA's loops over all elements.
            steps = list(_inside(line.equation))
            known = pointwise | _MOVES | _PARTS | _JOINS
            if not all(x.primitive.name in known and _is_of_few_pieces(x) for x in steps):
                return None
        elif name in _MOVES or name in _PARTS:
            if operands <= moved:
                moved.update(line.results)
            elif name in _PARTS:
                return None
        elif name in _JOINS:
            if pieces[line.results[0]] > (MOST_PIECES if cpu else MOST_PIECES_ON_GPU):
                return None
        elif name in _SUMS:
            shape = aval(line.equation.invars[0]).shape
            axes = line.equation.params["axes"]
            in_rows = cpu or len(shape) - 1 in axes
            sums += math.prod(shape[x] for x in axes) < SHORT or not in_rows
        elif name in (_LOOKUPS | _UPDATES if cpu else _LOOKUPS):
            if not _is_at_few_places(line):
                return None
            if cpu and name in _LOOKUPS:
                moved.update(line.results)
        elif name == "dot_general":
            fused = _is_fused_product(line) if cpu else _is_long_product(line)
            if not (operands <= moved and fused):
                return None
            sums += cpu
        elif name not in pointwise and not (cpu and _is_search(line)):
            return None
    return sums


def _is_counting(line: Line) -> bool:
    """Whether it is a loop that ends for all elements at once."""
    if line.equation.primitive.name != "while":
        return False
    goes_on, _ = conditions.of_loop(line.equation, line.kinds)
    return goes_on != Kind.MAPPED


def _is_search(line: Line) -> bool:
    """Whether a value's place is looked up in a table that all elements share."""
    if line.equation.primitive.name != _COMPOSITE:
        return False
    found = internals.search_of(line.equation.params["_prim"]) is not None
    return found and line.kinds[0] != Kind.MAPPED


def _inside(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """The operations inside of an equation, but for calls of others."""
    return (x for x in nested(equation) if inner_jaxpr(x) is None)


def _is_of_few_pieces(equation: JaxprEqn) -> bool:
    return equation.primitive.name not in _JOINS or len(equation.invars) <= MOST_PIECES


def _is_fused_product(line: Line) -> bool:
    """Whether it is a product with a vector, small enough for one of XLA's loops."""
    shapes = [aval(x).shape for x in line.equation.invars]
    return (
        min(map(len, shapes)) == 1
        and max(map(math.prod, shapes)) < FUSED_VALUES_OF_XLA
        and all(x == Kind.MAPPED for x in line.kinds)
    )


def _is_long_product(line: Line) -> bool:
    """Whether it is one of two long vectors of an element, which is a sum in one of XLA's loops."""
    shapes = [aval(x).shape for x in line.equation.invars]
    mapped = all(x == Kind.MAPPED for x in line.kinds)
    return mapped and all(len(x) == 1 and x[0] >= SHORT for x in shapes)


def _is_product_with_table(line: Line) -> bool:
    """Whether it is that of a vector with a matrix of all elements which is not small."""
    if line.equation.primitive.name != "dot_general":
        return False
    tables = [
        aval(x).shape
        for x, kind in zip(line.equation.invars, line.kinds, strict=True)
        if kind != Kind.MAPPED
    ]
    vectors = [len(aval(x).shape) for x in line.equation.invars].count(1)
    return (
        vectors == len(tables) == 1 and len(tables[0]) == 2 and min(tables[0]) >= LEAST_SIDE_OF_XLA
    )


def _is_at_few_places(line: Line) -> bool:
    """Whether values are looked up, or put, at places that are computed.

    If they are put, these are few values, or many places.
    """
    whole, *where = line.kinds
    if line.equation.primitive.name in _UPDATES:
        given, _, updates = (aval(x) for x in line.equation.invars)
        numbers = line.equation.params["dimension_numbers"]
        places = math.prod(given.shape[n] for n in numbers.scatter_dims_to_operand_dims)
        are_many = places * given.dtype.itemsize >= LEAST_PLACES
        few = math.prod(updates.shape) <= MOST_UPDATES
        return (few or are_many) and where[0] == Kind.MAPPED
    return whole != Kind.MAPPED and max(where) != Kind.KNOWN
