"""Evaluates a jaxpr in NumPy, as far as it knows the primitives, and compiles nothing.

Almost all the time of a small function goes into compiling it.  Programs of jaxmagma are evaluated
from what their operations say, unless their kernels are asked for; what is not in the table is
bound to JAX.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxmagma.jaxpr import aval, inner_jaxpr
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.program import Contract, ElementProgram, Map, Place, View
from jaxmagma.programs.strides import places
from tests.conformance.draw import kind


Array = Any
Rule = Callable[..., Any]
Rounding = Callable[[JaxprEqn, Sequence[Array], bool], Sequence[Array]]


# Of an element: more are not all in memory at once.
_MOST_PRODUCTS = 4096

# Whether programs run as kernels; and whether values have a wider range than their dtypes.
_kernels: ContextVar[bool] = ContextVar("kernels", default=False)
_wide: ContextVar[bool] = ContextVar("wide", default=False)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Programs run as kernels of the platform in the body."""
    token = _kernels.set(True)
    try:
        yield
    finally:
        _kernels.reset(token)


@contextlib.contextmanager
def wide_range() -> Iterator[None]:
    """In the body exponents are wider than those of a value's dtype; precision is as it was.

    Where JAX itself is to evaluate an equation, they are what they are.
    """
    token = _wide.set(True)
    try:
        yield
    finally:
        _wide.reset(token)


_WIDER: dict[str, Any] = {
    "float16": np.dtype(np.float64),
    "bfloat16": np.dtype(np.float64),
    "float32": np.dtype(np.float64),
    "float64": np.dtype(np.longdouble),
    "complex64": np.dtype(np.complex128),
    "complex128": np.dtype(np.clongdouble),
}


def held(x: Array, dtype: Any) -> Array:
    """A value of this dtype as it is held: of its precision, and perhaps of a wider range."""
    wider = _WIDER.get(str(dtype)) if _wide.get() else None
    if wider is None:
        return x
    made = np.asarray(x).astype(wider)
    bits = jnp.finfo(dtype).nmant + 1

    def rounded(part: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(part)
        return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)

    with np.errstate(all="ignore"):
        if made.dtype.kind != "c":
            return rounded(made)
        made.real, made.imag = rounded(made.real), rounded(made.imag)
        return made


def narrowed(x: Array, dtype: Any) -> Array:
    """A value in its dtype, too large ones infinite."""
    if not _wide.get() or str(dtype) not in _WIDER:
        return x
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


class Unknown(Exception):
    """JAX is to evaluate this equation."""


def evaluated(
    closed: ClosedJaxpr, arguments: Sequence[Array], rounding: Rounding | None = None
) -> list[Array]:
    """The results; ``rounding`` may change operands (its last argument is false) and results."""
    known: dict[Any, Any] = {
        x: held(value, _own_dtype(x))
        for x, value in zip(
            (*closed.jaxpr.constvars, *closed.jaxpr.invars),
            (*closed.consts, *arguments),
            strict=True,
        )
    }

    def read(x: Any) -> Any:
        return held(x.val, _own_dtype(x)) if isinstance(x, Literal) else known[x]

    for equation in closed.jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        if rounding is not None:
            operands = list(rounding(equation, operands, False))
        results = _equation(equation, operands, rounding)
        if rounding is not None:
            results = list(rounding(equation, results, True))
        known.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in closed.jaxpr.outvars]


def _equation(equation: JaxprEqn, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    inner = inner_jaxpr(equation)
    if inner is not None:
        return evaluated(inner, operands, rounding)
    name, p = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(p, operands, rounding)
    if name == "while":
        return _while(p, operands, rounding)
    if name == "cond":
        which = int(np.clip(np.asarray(operands[0]).astype(int), 0, len(p["branches"]) - 1))
        return evaluated(p["branches"][which], operands[1:], rounding)
    if name == "element_program" and not _kernels.get() and not _wide.get():
        return program(p["program"], *map(np.asarray, operands))
    rule = _RULES.get(name)
    if rule is not None and _plain(operands):
        try:
            with np.errstate(all="ignore"):
                found = rule(equation, *map(np.asarray, operands))
            found = found if equation.primitive.multiple_results else [found]
            return [
                held(np.asarray(x).astype(_dtype(v), copy=False), _own_dtype(v))
                for x, v in zip(found, equation.outvars, strict=True)
            ]
        except Unknown:
            pass
    operands = [narrowed(x, _own_dtype(v)) for x, v in zip(operands, equation.invars, strict=True)]
    bound = equation.primitive.get_bind_params(p)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    made = equation.primitive.bind(*functions, *operands, **parameters)
    made = list(made) if equation.primitive.multiple_results else [made]
    return [held(x, _own_dtype(v)) for x, v in zip(made, equation.outvars, strict=True)]


def _own_dtype(variable: Any) -> Any:
    return getattr(aval(variable), "dtype", None)


def _dtype(variable: Any) -> Any:
    """What a value of the jaxpr is held in."""
    dtype = _own_dtype(variable)
    return _WIDER.get(str(dtype), dtype) if _wide.get() else dtype


def _plain(operands: Sequence[Any]) -> bool:
    return not any(
        jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended) for x in operands
    )


# ---- Loops ---------------------------------------------------------------------------------------


def _scan(p: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    if "num_consts" in p:
        consts, carry = p["num_consts"], p["num_carry"]
    else:
        consts, carry, _ = (len(x) for x in p["ft_in"].unpack())
    state, made = operands[consts : consts + carry], []
    steps = range(p["length"])
    for step in reversed(steps) if p["reverse"] else steps:
        slices = [
            np.asarray(x)[step] if _plain([x]) else x[step] for x in operands[consts + carry :]
        ]
        results = evaluated(p["jaxpr"], [*operands[:consts], *state, *slices], rounding)
        state = results[:carry]
        made.append(results[carry:])
    if p["reverse"]:
        made.reverse()
    if not made:
        avals = p["jaxpr"].out_avals[carry:]
        return [*state, *(np.zeros((0, *x.shape), x.dtype) for x in avals)]
    stack = [
        np.stack([np.asarray(x) for x in xs]) if _plain(xs) else jnp.stack(xs)
        for xs in zip(*made, strict=True)
    ]
    return [*state, *stack]


def _while(p: Any, operands: list[Any], rounding: Rounding | None) -> list[Any]:
    first, second = p["cond_nconsts"], p["body_nconsts"]
    test, body = operands[:first], operands[first : first + second]
    state = operands[first + second :]

    def goes_on(state: list[Any]) -> Any:
        return np.asarray(evaluated(p["cond_jaxpr"], [*test, *state], rounding)[0])

    # As long as any element goes on. Those that do not keep what they have, which vmap leaves to
    # the lowering.
    while np.any(runs := goes_on(state)):
        made = evaluated(p["body_jaxpr"], [*body, *state], rounding)
        state = [_kept(runs, *x) for x in zip(made, state, strict=True)] if runs.ndim else made
    return state


def _kept(runs: np.ndarray, new: Any, old: Any) -> Any:
    where = runs.reshape(runs.shape + (1,) * (np.ndim(new) - runs.ndim))
    return np.where(where, new, old) if _plain([new, old]) else jnp.where(where, new, old)


# ---- Programs ------------------------------------------------------------------------------------


def program(program: ElementProgram, *arguments: Array) -> list[Array]:
    """Every value has all batch axes ahead, of extent one where it does not depend on them."""
    extents = program.batch_extents([x.shape for x in arguments])
    rank, remaining = program.batch_rank, iter(arguments)
    values: list[Array] = []
    for x in program.inputs:
        array = x.constant.array if x.constant is not None else next(remaining)
        order = sorted(range(len(x.batch)), key=lambda n: x.batch[n])
        array = np.transpose(array, [*order, *range(len(order), array.ndim)])
        if x.is_complex:
            array = np.stack([array.real, array.imag], -1)
        ahead = [extents[axis] if axis in x.batch else 1 for axis in range(rank)]
        values.append(array.reshape((*ahead, *x.tile)))

    def wide(value: int, labels: str, output: str) -> Array:
        """Axes in the order of ``output``, of extent one where they are not there."""
        order = [labels.index(x) for x in output if x in labels]
        array = np.transpose(values[value], [*range(rank), *(rank + n for n in order)])
        missing = [rank + n for n, x in enumerate(output) if x not in labels]
        return np.expand_dims(array, tuple(missing))

    with np.errstate(all="ignore"):
        for operation in program.operations:
            if isinstance(operation, Contract):
                sizes = dict(operation.sizes)
                labels = list(sizes)
                terms = []
                for value, own in operation.terms:
                    if len(set(own)) != len(own):
                        # Compositions make none: terms are then values at its places.
                        raise NotImplementedError("a diagonal")
                    terms.append(wide(value, own, "".join(labels)))
                if math.prod(sizes.values()) > _MOST_PRODUCTS and len(terms) > 2:
                    made = _contracted(terms, labels, operation.output, rank)
                    made = np.broadcast_to(made, (*made.shape[:rank], *operation.tile))
                else:
                    product: Any = functools.reduce(np.multiply, terms)
                    summed = [n for n, x in enumerate(labels) if x not in operation.output]
                    batch = product.shape[:rank]
                    product = np.broadcast_to(product, (*batch, *(sizes[x] for x in labels)))
                    if summed:  # NumPy's sum of one value adds that to zero, which has a sign
                        axes = tuple(rank + n for n in summed)
                        product = product.sum(axis=axes, dtype=product.dtype)
                    present = [x for x in labels if x in operation.output]
                    order = [rank + present.index(x) for x in operation.output]
                    made = np.transpose(product, [*range(rank), *order])
            elif isinstance(operation, Map):
                terms = [wide(v, own, operation.output) for v, own in operation.terms]
                made = _function(operation.function, *terms)
                made = np.broadcast_to(made, (*made.shape[:rank], *operation.tile))
            elif isinstance(operation, View):
                array = values[operation.operand]
                flat = array.reshape((*array.shape[:rank], math.prod(array.shape[rank:])))
                made = flat[..., places(operation.offset, operation.strides, operation.tile)]
            elif isinstance(operation, Place):
                pieces = [values[value] for value, *_ in operation.pieces]
                common = np.broadcast_shapes(*(x.shape[:rank] for x in pieces))
                # These zeros change no value, not even the sign of a zero.
                flat = -np.zeros((*common, math.prod(operation.tile)), pieces[0].dtype)
                free = np.ones(math.prod(operation.tile), bool)
                for (_, offset, strides), x in zip(operation.pieces, pieces, strict=True):
                    where = places(offset, strides, x.shape[rank:])
                    flat[..., where] += x
                    free[where] = False
                flat[..., free] = 0
                made = flat.reshape((*common, *operation.tile))
            else:
                # Of vectors that all elements share, which no composition has.
                raise NotImplementedError(operation)
            values.append(made.astype(program.dtype, copy=False))
    results = []
    for out in program.outputs:
        array = values[out.value]
        depends = program.batch[out.value]
        left_out = tuple(n for n in range(rank) if n not in out.batch)
        lost = tuple(n for n in left_out if n in depends)
        if lost:
            ahead = [extents[n] if n in lost else array.shape[n] for n in range(rank)]
            array = np.broadcast_to(array, (*ahead, *array.shape[rank:]))
            with np.errstate(all="ignore"):
                array = array.sum(axis=lost, keepdims=True, dtype=array.dtype)
        array = np.squeeze(array, axis=left_out)
        kept = [n for n in range(rank) if n in out.batch]
        order = [kept.index(n) for n in out.batch]
        array = np.transpose(array, [*order, *range(len(order), array.ndim)])
        tile = array.shape[len(order) :]
        array = np.broadcast_to(array, (*(extents[n] for n in out.batch), *tile))
        results.append(_complex(array) if out.is_complex else array)
    return results


def _complex(parts: Array) -> Array:
    """Numbers whose parts are along the last axis; not by a sum, in which infinities meet zeros."""
    made = np.empty(parts.shape[:-1], np.result_type(parts.dtype, np.complex64))
    made.real, made.imag = parts[..., 0], parts[..., 1]
    return made


def _contracted(terms: Sequence[Array], labels: Sequence[str], output: str, rank: int) -> Array:
    """The sum of a product of many terms, two at a time."""
    axes = [*range(rank), *(rank + n for n in range(len(labels)))]
    names = [opt_einsum.get_symbol(n) for n in axes]
    operands, inputs = [], []
    for term in terms:
        kept = [n for n in axes if term.shape[n] > 1]
        operands.append(np.squeeze(term, tuple(n for n in axes if n not in kept)))
        inputs.append("".join(names[n] for n in kept))
    carried = set().union(*inputs)
    results = [*names[:rank], *(names[rank + labels.index(x)] for x in output)]
    present = [x for x in results if x in carried]
    made = opt_einsum.contract(f"{','.join(inputs)}->{''.join(present)}", *operands)
    return np.expand_dims(made, tuple(n for n, x in enumerate(results) if x not in carried))


def _function(name: str, *operands: Array) -> Array:
    """A pointwise function of a program."""
    dtype = operands[0].dtype
    if name == "first":
        return np.broadcast_to(operands[0], np.broadcast_shapes(*(x.shape for x in operands)))
    if name == "select":
        return np.where(operands[0] != 0, operands[2], operands[1])
    if name in ("and", "or", "xor"):
        return getattr(np, f"logical_{name}")(*operands).astype(dtype)
    if name == "not":
        return (operands[0] == 0).astype(dtype)
    if name in ("round_away", "round_even"):
        (x,) = operands
        away = np.copysign(np.floor(np.abs(x) + dtype.type(0.5)), x)
        return away.astype(dtype) if name == "round_away" else np.round(x)
    if name in _POINTWISE:
        return _POINTWISE[name](*operands).astype(dtype)
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    wide = [jnp.broadcast_to(x, shape) for x in operands]
    return np.asarray(FUNCTIONS[name].evaluate(*wide)).astype(dtype)


# ---- Rules ---------------------------------------------------------------------------------------


def _power(x: Array, y: Array) -> Array:
    """Not as NumPy has one exponent for all, broadcast or not: of one half, a square root."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    return np.power(x, np.array(np.broadcast_to(y, shape or (1,)))).reshape(shape)


_POINTWISE: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "sign": np.sign,
    "logistic": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype),
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "atan2": np.arctan2,
    "rem": np.fmod,
    "pow": _power,
    "is_finite": np.isfinite,
}
_OF_INTEGERS = set("neg abs add sub mul max min lt le gt ge eq ne".split())
_OF_COMPLEX = set("neg add sub mul eq ne".split())


def _pointwise(function: Callable[..., Any], name: str) -> Rule:
    def rule(equation: JaxprEqn, *operands: Array) -> Array:
        k = kind(operands[0].dtype)
        if k in "iub" and (name not in _OF_INTEGERS or (k == "b" and name not in ("eq", "ne"))):
            raise Unknown
        if k == "c" and name not in _OF_COMPLEX:
            raise Unknown
        return function(*operands)

    return rule


def _bits(function: Callable[..., Any]) -> Rule:
    return lambda equation, *xs: function(*xs)


def _select_n(equation: JaxprEqn, which: Array, *cases: Array) -> Array:
    made = cases[0]
    for n, case in enumerate(cases[1:], start=1):
        made = np.where(which >= n if which.dtype != bool else which, case, made)
    return made


def _convert(equation: JaxprEqn, x: Array) -> Array:
    new = _dtype(equation.outvars[0])
    if kind(x.dtype) in "fc" and kind(new) not in "fc":
        raise Unknown
    if kind(x.dtype) == "c" != kind(new):
        raise Unknown
    return x.astype(new)


def _broadcast_in_dim(equation: JaxprEqn, x: Array, *_: Array) -> Array:
    shape, axes = aval(equation.outvars[0]).shape, equation.params["broadcast_dimensions"]
    expanded = [1] * len(shape)
    for axis, n in zip(axes, x.shape, strict=True):
        expanded[axis] = n
    return np.broadcast_to(x.reshape(expanded), shape)


def _reshape(equation: JaxprEqn, x: Array, *_: Array) -> Array:
    dimensions = equation.params.get("dimensions")
    x = (
        x
        if dimensions is None or equation.primitive.name != "reshape"
        else np.transpose(x, dimensions)
    )
    return x.reshape(aval(equation.outvars[0]).shape)


def _slice(equation: JaxprEqn, x: Array) -> Array:
    p = equation.params
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _window(x: Array, starts: Sequence[Array], sizes: Sequence[int]) -> tuple[slice, ...]:
    firsts = [
        int(np.clip(int(s), 0, n - m)) for s, n, m in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(k, k + m) for k, m in zip(firsts, sizes, strict=True))


def _dynamic_slice(equation: JaxprEqn, x: Array, *starts: Array) -> Array:
    return x[_window(x, starts, aval(equation.outvars[0]).shape)]


def _dynamic_update_slice(equation: JaxprEqn, x: Array, update: Array, *starts: Array) -> Array:
    made = np.array(x)
    made[_window(x, starts, update.shape)] = update
    return made


def _pad(equation: JaxprEqn, x: Array, value: Array) -> Array:
    config = equation.params["padding_config"]
    shape = [n + max(n - 1, 0) * gap for n, (_, _, gap) in zip(x.shape, config, strict=True)]
    spread = np.full(shape, value, x.dtype)
    spread[tuple(slice(None, None, gap + 1) for _, _, gap in config)] = x
    widths = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    made = np.pad(spread, widths, constant_values=value) if x.ndim else spread
    cut = [
        slice(max(-low, 0), n - max(-high, 0))
        for n, (low, high, _) in zip(made.shape, config, strict=True)
    ]
    return made[tuple(cut)]


def _split(equation: JaxprEqn, x: Array) -> list[Array]:
    at = list(itertools.accumulate(equation.params["sizes"]))[:-1]
    return np.split(x, at, equation.params["axis"])


def _reduction(function: Callable[..., Any], name: str) -> Rule:
    def rule(equation: JaxprEqn, x: Array) -> Array:
        if (kind(x.dtype) == "c" and name not in ("add", "mul")) or x.dtype.itemsize < 4:
            raise Unknown
        axes = tuple(equation.params["axes"])
        if name in ("max", "min") and not x.size:
            raise Unknown
        return (
            function(x, axis=axes)
            if name in ("max", "min")
            else function(x, axis=axes, dtype=x.dtype)
        )

    return rule


def _logic(function: Callable[..., Any]) -> Rule:
    def rule(equation: JaxprEqn, x: Array) -> Array:
        if x.dtype != bool:
            raise Unknown
        return function(x, axis=tuple(equation.params["axes"]))

    return rule


def _best(function: Callable[..., Any]) -> Rule:
    def rule(equation: JaxprEqn, x: Array) -> Array:
        if kind(x.dtype) == "c" or (x.dtype.itemsize < 4 and x.dtype != bool):
            raise Unknown
        return function(x, axis=equation.params["axes"][0])

    return rule


def _cumulative(function: Any) -> Rule:
    def rule(equation: JaxprEqn, x: Array) -> Array:
        if kind(x.dtype) == "c" or x.dtype.itemsize < 4:
            raise Unknown
        axis = equation.params["axis"]
        turned = np.flip(x, axis) if equation.params["reverse"] else x
        made = function.accumulate(turned, axis=axis, dtype=x.dtype)
        return np.flip(made, axis) if equation.params["reverse"] else made

    return rule


def _dot_general(equation: JaxprEqn, x: Array, y: Array) -> Array:
    p = equation.params
    if x.dtype != y.dtype or x.dtype != _dtype(equation.outvars[0]) or x.dtype.itemsize < 4:
        raise Unknown
    (xs, ys), (xb, yb) = p["dimension_numbers"]
    labels, names = {}, iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(names) for _ in x.shape]
    for a, b in zip((*xs, *xb), (*ys, *yb), strict=True):
        labels[b] = left[a]
    right = [labels.get(b) or next(names) for b in range(y.ndim)]
    output = [left[a] for a in xb]
    output += [c for a, c in enumerate(left) if a not in xs and a not in xb]
    output += [c for b, c in enumerate(right) if b not in ys and b not in yb]
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(output)}", x, y)


def _iota(equation: JaxprEqn, *_: Array) -> Array:
    made, axis = aval(equation.outvars[0]), equation.params["dimension"]
    shape = [n if k == axis else 1 for k, n in enumerate(made.shape)]
    return np.broadcast_to(np.arange(made.shape[axis]).reshape(shape), made.shape)


def _integer_pow(equation: JaxprEqn, x: Array) -> Array:
    if kind(x.dtype) != "f":
        raise Unknown
    return x ** np.asarray(equation.params["y"], x.dtype)


def _pow(equation: JaxprEqn, x: Array, y: Array) -> Array:
    if kind(x.dtype) != "f" or x.dtype != y.dtype:
        raise Unknown
    return _power(x, y)


def _unstack(equation: JaxprEqn, x: Array) -> list[Array]:
    return list(np.moveaxis(x, equation.params["axis"], 0))


def _same(equation: JaxprEqn, *xs: Array) -> Any:
    return list(xs) if equation.primitive.multiple_results else xs[0]


# A gather and a scatter move windows of the operand: where each begins, from the index.


def _windows(
    indices: Array,
    axes: Sequence[int],
    operand_batch: Sequence[int],
    index_batch: Sequence[int],
    rank: int,
) -> list[tuple[tuple[int, ...], list[int]]]:
    """For each place of the batch of indices, the first corner of its window."""
    batch = indices.shape[:-1]
    found = []
    for at in np.ndindex(*batch):
        corner = [0] * rank
        for k, axis in enumerate(axes):
            corner[axis] = int(indices[at][k])
        for a, b in zip(operand_batch, index_batch, strict=True):
            corner[a] = at[b]
        found.append((at, corner))
    return found


def _inside(
    corner: Sequence[int], sizes: Sequence[int], shape: Sequence[int], mode: Any
) -> list[int] | None:
    text = str(mode)
    if "CLIP" in text or text == "0":
        return [min(max(c, 0), n - s) for c, s, n in zip(corner, sizes, shape, strict=True)]
    whole = all(0 <= c <= n - s for c, s, n in zip(corner, sizes, shape, strict=True))
    if not whole and "FILL" not in text and text != "1":
        raise Unknown
    return list(corner) if whole else None


def _gather(equation: JaxprEqn, x: Array, indices: Array) -> Array:
    p = equation.params
    numbers, sizes, out = p["dimension_numbers"], p["slice_sizes"], aval(equation.outvars[0])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    fill = p["fill_value"]
    if fill is None:
        fill = {"f": np.nan, "c": np.nan, "b": True, "u": None, "i": None}[kind(x.dtype)]
        if fill is None:
            info = np.iinfo(x.dtype)
            fill = info.max if kind(x.dtype) == "u" else info.min
    batch_axes = [k for k in range(len(out.shape)) if k not in numbers.offset_dims]
    made = np.full(out.shape, fill, x.dtype)
    for at, corner in _windows(
        indices,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        x.ndim,
    ):
        place: list[Any] = [slice(None)] * len(out.shape)
        for axis, k in zip(batch_axes, at, strict=True):
            place[axis] = k
        inside = _inside(corner, sizes, x.shape, p["mode"])
        if inside is not None:
            window = x[tuple(slice(c, c + s) for c, s in zip(inside, sizes, strict=True))]
            kept = [s for axis, s in enumerate(sizes) if axis not in gone]
            made[tuple(place)] = window.reshape(kept)
    return made


def _scatter(function: Callable[..., Any] | None) -> Rule:
    def rule(equation: JaxprEqn, x: Array, indices: Array, updates: Array) -> Array:
        p = equation.params
        if kind(x.dtype) == "b" and function is not None:
            raise Unknown
        if function is None and p["update_jaxpr"] is not None:  # it applies another function
            raise Unknown
        numbers, made = p["dimension_numbers"], np.array(x)
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window_axes = numbers.update_window_dims
        batch_axes = [k for k in range(updates.ndim) if k not in window_axes]
        kept = iter(updates.shape[k] for k in window_axes)
        sizes = [1 if axis in gone else next(kept) for axis in range(x.ndim)]
        for at, corner in _windows(
            indices,
            numbers.scatter_dims_to_operand_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
            x.ndim,
        ):
            place: list[Any] = [slice(None)] * updates.ndim
            for axis, k in zip(batch_axes, at, strict=True):
                place[axis] = k
            inside = _inside(corner, sizes, x.shape, p["mode"])
            if inside is not None:
                window = tuple(slice(c, c + s) for c, s in zip(inside, sizes, strict=True))
                update = updates[tuple(place)].reshape(sizes)
                made[window] = update if function is None else function(made[window], update)
        return made

    return rule


def _sum(equation: JaxprEqn, *xs: Array) -> Array:
    return xs[0] + xs[1]


_RULES: dict[str, Rule] = {
    **{name: _pointwise(function, name) for name, function in _POINTWISE.items() if name != "sign"},
    "clamp": lambda equation, low, x, high: np.minimum(np.maximum(low, x), high),
    "stack": lambda equation, *xs: np.stack(xs, equation.params["axis"]),
    "unstack": _unstack,
    "tile": lambda equation, x: np.tile(x, equation.params["reps"]),
    "pow": _pow,
    "one_minus_square": lambda equation, x: 1 - x * x,
    "log2": lambda equation, x: np.log2(x),
    "polynomial": lambda equation, x, *xs: functools.reduce(lambda y, c: y * x + c, xs[::-1]),
    "and": _bits(np.bitwise_and),
    "or": _bits(np.bitwise_or),
    "xor": _bits(np.bitwise_xor),
    "not": _bits(np.invert),
    "add_any": _sum,
    "square": lambda equation, x: x * x,
    "integer_pow": _integer_pow,
    "select_n": _select_n,
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": lambda equation, x: np.transpose(x, equation.params["permutation"]),
    "rev": lambda equation, x: np.flip(x, equation.params["dimensions"]),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": lambda e, *xs: np.concatenate(xs, e.params["dimension"]),
    "pad": _pad,
    "split": _split,
    "reduce_sum": _reduction(np.sum, "add"),
    "reduce_prod": _reduction(np.prod, "mul"),
    "reduce_max": _reduction(np.max, "max"),
    "reduce_min": _reduction(np.min, "min"),
    "reduce_and": _logic(np.all),
    "reduce_or": _logic(np.any),
    "argmax": _best(np.argmax),
    "argmin": _best(np.argmin),
    "cumsum": _cumulative(np.add),
    "cumprod": _cumulative(np.multiply),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "dot_general": _dot_general,
    "iota": _iota,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "optimization_barrier": _same,
    "gather": _gather,
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter_add": _scatter(np.add),
    "scatter-mul": _scatter(np.multiply),
    "scatter_mul": _scatter(np.multiply),
    "real": lambda equation, x: x.real,
    "imag": lambda equation, x: x.imag,
    "complex": lambda equation, x, y: x + 1j * y,
}
