"""The table of operations: how the expression of a line is drawn, by name.

A new rule of :mod:`jaxmagma.jaxpr` needs an entry here that makes its primitive, with every
parameter that the primitive has: a test compares the two.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmagma as jm
from tests.conformance.draw import Draw, Impossible, Value


# ---- What the lines may call ---------------------------------------------------------------------

# What callbacks have seen, in the order in which they were called.
SEEN: list[tuple[str, list[np.ndarray]]] = []


def seen(*values: Any) -> None:
    SEEN.append(("seen", [np.array(x) for x in values]))


def counted(x: Any) -> Any:
    SEEN.append(("counted", [np.array(x)]))
    return np.asarray(x)


@jax.custom_jvp
def own_jvp(x: Any) -> Any:
    """A function whose derivative is not that of what it computes."""
    return x * x


own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), 3 * tangents[0] * jnp.cos(primals[0])))


@jax.custom_vjp
def own_vjp(x: Any, y: Any) -> Any:
    return x * y, jnp.sin(x)


own_vjp.defvjp(
    lambda x, y: (own_vjp(x, y), (x, y)),
    lambda saved, ct: (ct[0] * saved[1] + 2 * ct[1], ct[0] * saved[0] * 5),
)

NAMESPACE: dict[str, Any] = {
    "itertools": itertools,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "jm": jm,
    "seen": seen,
    "counted": counted,
    "own_jvp": own_jvp,
    "own_vjp": own_vjp,
}

Strategy = Callable[[Draw], str]
OPERATIONS: dict[str, Strategy] = {}


def operation(strategy: Strategy) -> Strategy:
    OPERATIONS[strategy.__name__] = strategy
    return strategy


def _keywords(d: Draw, **options: Any) -> str:
    """Parameters, each one given or left out; ``options`` are the source texts of their values."""
    found = ""
    for name, values in options.items():
        value = d.pick(name, ["", *values])
        found += f", {name}={value}" if value else ""
    return found


# ---- Pointwise -----------------------------------------------------------------------------------

_FLOAT_UNARY = """sqrt rsqrt cbrt exp exp2 expm1 log log2 log1p logistic sin cos tan asin acos atan
sinh cosh tanh asinh acosh atanh floor ceil erf erfc erf_inv lgamma digamma""".split()
_FLOAT_UNARY = [name for name in _FLOAT_UNARY if hasattr(lax, name)]  # not all in each release
_PARAMETERS = {
    n: set(inspect.signature(getattr(lax, n)).parameters) for n in (*_FLOAT_UNARY, "mul")
}
_ACCURATE = [name for name in _FLOAT_UNARY if "accuracy" in _PARAMETERS[name]]
_COMPLEX_UNARY = "neg abs sign sqrt exp log sin cos tanh square conj real imag".split()
_INTEGER_UNARY = "neg abs sign bitwise_not square population_count clz".split()


@operation
def float_unary(d: Draw) -> str:
    x, name = d.value("f"), d.pick("function", [*_FLOAT_UNARY, "neg", "abs", "sign", "square"])
    return f"lax.{name}({x})"


@operation
def accurate_unary(d: Draw) -> str:
    x, name = d.value("f"), d.pick("primitive", _ACCURATE)
    accuracy = d.pick("accuracy", ["DEFAULT", "HIGHEST"])
    return f"lax.{name}({x}, accuracy=lax.AccuracyMode.{accuracy})"


@operation
def complex_unary(d: Draw) -> str:
    return f"lax.{d.pick('function', _COMPLEX_UNARY)}({d.value('c')})"


@operation
def integer_unary(d: Draw) -> str:
    return f"lax.{d.pick('function', _INTEGER_UNARY)}({d.value('i')})"


@operation
def numpy_unary(d: Draw) -> str:
    names = """isnan isinf isfinite sign fabs cbrt trunc rint logical_not invert signbit reciprocal
    angle real imag conjugate sinc nan_to_num positive deg2rad i0 exp2 log2""".split()
    return f"jnp.{d.pick('function', names)}({d.value()})"


@operation
def polynomial(d: Draw) -> str:
    x = d.value("f")
    numbers = [d.integer(-8, 8) / 4 for _ in range(d.integer(1, 12))]
    known = f"jnp.asarray({numbers}, {x}.dtype)"
    coefficients = [known, f"jnp.stack([{d.like(x)}, {x}, {d.like(x)}])"]
    return f"jnp.polyval({d.pick('coefficients', coefficients)}, {x})"


@operation
def several_results(d: Draw) -> str:
    name = d.pick("function", ["frexp", "modf"])
    return f"jnp.{name}({d.value('f')})"


@operation
def activation(d: Draw) -> str:
    names = "relu relu6 gelu softplus silu elu leaky_relu hard_tanh softmax log_softmax logsumexp"
    name = d.pick("function", names.split())
    x = d.value("f", rank=(1, 3), least=1) if "soft" in name or "log" in name else d.value("f")
    return f"jax.nn.{name}({x})"


@operation
def float_binary(d: Draw) -> str:
    names = "add sub mul div rem pow atan2 max min nextafter lt le gt ge eq ne eq_to le_to".split()
    x = d.value("f")
    name = d.pick("function", [n for n in names if hasattr(lax, n)])
    return f"lax.{name}({x}, {d.like(x)})"


@operation
def product_of_dtype(d: Draw) -> str:
    x = d.value("fi")
    types = ["np.float32", "np.float64", "np.int32", "None"]
    given = f", out_dtype={d.pick('out_dtype', types)}" if "out_dtype" in _PARAMETERS["mul"] else ""
    return f"lax.mul({x}, {d.like(x)}{given})"


@operation
def complex_binary(d: Draw) -> str:
    x = d.value("c")
    return f"lax.{d.pick('function', 'add sub mul div pow eq ne'.split())}({x}, {d.like(x)})"


@operation
def integer_binary(d: Draw) -> str:
    x = d.value("iu")
    names = """add sub mul div rem max min lt le gt ge eq ne bitwise_and bitwise_or bitwise_xor
    shift_left shift_right_logical shift_right_arithmetic""".split()
    return f"lax.{d.pick('function', names)}({x}, {d.like(x)})"


@operation
def boolean(d: Draw) -> str:
    x = d.value("b")
    name = d.pick("function", "and or xor eq ne max min not lt".split())
    if name == "not":
        return f"lax.bitwise_not({x})"
    name = f"bitwise_{name}" if name in ("and", "or", "xor") else name
    return f"lax.{name}({x}, {d.like(x)})"


@operation
def numpy_binary(d: Draw) -> str:
    names = """add subtract multiply true_divide floor_divide remainder mod fmod power float_power
    arctan2 maximum minimum fmax fmin hypot logaddexp heaviside copysign less less_equal greater
    equal not_equal logical_and logical_or logical_xor bitwise_and left_shift gcd divmod isclose
    ldexp""".split()
    x = d.value()
    name = d.pick("function", names)
    other = d.operand(x, d.pick("kinds", ["", "fi", "fciub"]))
    pair = (x, other) if d.pick("order", [True, True, False]) else (other, x)
    return f"jnp.{name}({pair[0]}, {pair[1]})"


@operation
def operator(d: Draw) -> str:
    x, name = d.value("fci"), d.pick("operator", ["+", "-", "*", "/", "//", "%", "<", ">=", "=="])
    other = d.operand(x, d.pick("kinds", ["", "fi"]))
    return f"{x} {name} {other}" if d.chance(0.5) else f"{other} {name} {x}"


@operation
def integer_pow(d: Draw) -> str:
    return f"lax.integer_pow({d.value('fci')}, {d.pick('y', [0, 1, 2, 3, 4, 5, 8, -1, -2, -3])})"


@operation
def power(d: Draw) -> str:
    return f"{d.value('fci')} ** {d.pick('y', ['2', '3', '0.5', '-1.0', '2.0', '0', '1j'])}"


@operation
def round_(d: Draw) -> str:
    method = d.pick("rounding_method", ["AWAY_FROM_ZERO", "TO_NEAREST_EVEN"])
    return f"lax.round(4 * {d.value('f')}, lax.RoundingMethod.{method})"


@operation
def round_decimals(d: Draw) -> str:
    return f"jnp.round({d.value('fci')}, {d.static(d.pick('decimals', [0, 1, -1]))})"


@operation
def clamp(d: Draw) -> str:
    x = d.value("fi")
    bound = d.pick("bounds", ["scalars", "arrays", "low array"])
    low = d.like(x) if bound != "scalars" else d.like(x, shape=())
    high = d.like(x) if bound == "arrays" else d.like(x, shape=())
    return f"lax.clamp({low}, {x}, {high})"


@operation
def clip(d: Draw) -> str:
    x = d.value("fi")
    bounds = d.pick("bounds", ["min=-0.5, max=0.5", "min=0", "max=1", "min=1, max=0"])
    return f"jnp.clip({x}, {bounds})"


@operation
def select_n(d: Draw) -> str:
    x = d.value()
    kinds, count = d.pick("which", [("b", 2), ("b", 1), ("i", 1), ("i", 2), ("i", 3), ("i", 4)])
    shape = () if d.pick("scalar", [True, False]) else x.shape
    if kinds == "b":
        which: str = d.like(x, "b", shape)
    else:
        which = f"jnp.clip({d.like(x, 'i', shape)}, 0, {count - 1}).astype(np.int32)"
    return f"lax.select_n({which}, {', '.join([x, *(d.like(x) for _ in range(count - 1))])})"


@operation
def where(d: Draw) -> str:
    x = d.value()
    condition = d.operand(x, d.pick("condition", ["b", "fi"]))
    cases = [x, d.operand(x, d.pick("kinds", ["", "fiu"]))]
    first, second = cases if d.chance(0.5) else cases[::-1]
    return f"jnp.where({condition}, {first}, {second})"


@operation
def where_safe(d: Draw) -> str:
    """The branch that is not taken has no derivative there."""
    x = d.value("f")
    unsafe = d.pick("function", ["jnp.sqrt", "jnp.log", "jnp.arcsin", "jnp.reciprocal"])
    return f"jnp.where({x} > 0, {unsafe}({x}), {d.scalar('fi')})"


# ---- Types ---------------------------------------------------------------------------------------

_TYPES = "float32 float64 complex64 complex128 bfloat16 float16 int32 int8 uint8 int64 uint32 bool_"


@operation
def convert(d: Draw) -> str:
    new = d.pick("new_dtype", [f"jnp.{t}" for t in _TYPES.split()] + ["float", "int", "complex"])
    x = d.value()
    if d.pick("through", ["astype", "lax"]) == "astype":
        return f"{x}.astype({new})"
    return f"lax.convert_element_type({x}, {new})"


@operation
def bitcast(d: Draw) -> str:
    new = d.pick("dtype", ["int32", "float32", "uint8", "int64"])
    return f"lax.bitcast_convert_type({d.value('fiu')}, jnp.{new})"


@operation
def reduce_precision(d: Draw) -> str:
    bits = d.pick("exponent_bits", [5, 8, 11]), d.pick("mantissa_bits", [3, 7, 23])
    return f"lax.reduce_precision({d.value('f')}, {bits[0]}, {bits[1]})"


@operation
def complex_parts(d: Draw) -> str:
    x = d.value("f", where=lambda x: x.dtype in (np.float32, np.float64))
    return f"lax.complex({x}, {d.like(x)})"


@operation
def unchanged(d: Draw) -> str:
    x = d.value()
    how = d.pick("how", ["lax.stop_gradient", "lax.optimization_barrier", "jnp.copy", "jnp.array"])
    return f"{how}({x})"


@operation
def barrier_of_two(d: Draw) -> str:
    return f"lax.optimization_barrier(({d.value()}, {d.value()}))"


# ---- Shapes --------------------------------------------------------------------------------------


def _reshaped(d: Draw, size: int) -> tuple[int, ...]:
    if size == 0:
        return (0, *d.pick("zeros", [(), (2,), (0, 3)]))
    first = d.pick(f"factor of {size}", [k for k in range(1, size + 1) if size % k == 0])
    made = [first, size // first]
    for _ in range(d.integer(0, 1)):
        made.insert(d.integer(0, 2), 1)
    return tuple(made) if d.chance(0.7) else (size,)


@operation
def lax_reshape(d: Draw) -> str:
    x = d.value()
    dimensions = tuple(int(n) for n in d.random.permutation(x.ndim))
    how = d.pick("dimensions", ["", "permuted", "identity"])
    text = {"permuted": f", {dimensions}", "identity": f", {tuple(range(x.ndim))}", "": ""}[how]
    return f"lax.reshape({x}, {_reshaped(d, x.size)}{text})"


@operation
def numpy_reshape(d: Draw) -> str:
    x = d.value()
    shape: Any = _reshaped(d, x.size)
    how = d.pick("order", ["'C'", "'F'"])
    if x.size and d.chance(0.3):
        shape = (-1, *shape[1:])
    return d.pick("call", [f"jnp.reshape({x}, {shape}, order={how})", f"{x}.ravel(order={how})"])


@operation
def broadcast_in_dim(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    shape, dimensions = list(x.shape), []
    for k in range(x.ndim):
        if x.shape[k] == 1 and d.chance(0.5):
            shape[k] = d.integer(0, 3)
    new = d.integer(0, 2)
    places = sorted(d.random.choice(x.ndim + new, x.ndim, replace=False).tolist())
    dimensions, whole = places, [d.integer(1, 3) for _ in range(x.ndim + new)]
    for k, place in enumerate(places):
        whole[place] = shape[k]
    return f"lax.broadcast_in_dim({x}, {tuple(whole)}, {tuple(dimensions)})"


@operation
def broadcast(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    how = d.pick("call", ["jnp.broadcast_to", "lax.broadcast"])
    if how == "lax.broadcast":
        return f"lax.broadcast({x}, {(d.integer(0, 3),)})"
    shape = tuple(d.integer(0, 3) if n == 1 else n for n in x.shape)
    return f"jnp.broadcast_to({x}, {(d.integer(1, 3), *shape)})"


@operation
def axes_of_one(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    how = d.pick("call", ["expand_dims", "squeeze", "squeeze all", "atleast_2d", "newaxis"])
    if how == "expand_dims":
        return f"jnp.expand_dims({x}, {d.integer(-x.ndim - 1, x.ndim)})"
    if how == "squeeze":
        ones = [k for k, n in enumerate(x.shape) if n == 1]
        return f"jnp.squeeze({x}, {d.pick('axis of one', ones)})"
    if how == "newaxis":
        return f"{x}[None, ..., None]"
    return f"jnp.squeeze({x})" if how == "squeeze all" else f"jnp.atleast_2d({x})"


@operation
def transpose(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    order = tuple(int(n) for n in d.random.permutation(x.ndim))
    a, b = d.axis(x), d.axis(x)
    calls = [f"lax.transpose({x}, {order})", f"{x}.T", f"jnp.moveaxis({x}, {a}, {b})"]
    return d.pick("call", [*calls, f"jnp.swapaxes({x}, {a}, {b})"])


@operation
def rev(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    axes = d.axes(x, none=False)
    if d.pick("call", ["rev", "flip"]) == "rev":
        return f"lax.rev({x}, {axes})"
    return f"jnp.flip({x}, {d.axis(x)})"


@operation
def slice_(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    starts = [d.integer(0, n) for n in x.shape]
    limits = [d.integer(s, n) for s, n in zip(starts, x.shape, strict=True)]
    strides = d.pick("strides", [None, tuple(d.integer(1, 3) for _ in x.shape)])
    return f"lax.slice({x}, {tuple(starts)}, {tuple(limits)}, {strides})"


@operation
def dynamic_slice(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    sizes = tuple(d.integer(0, n) for n in x.shape)
    how = d.pick("indices", ["known", "values", "one value"])
    starts = [str(d.integer(-2, n + 1)) for n in x.shape]
    if how == "values":
        starts = [str(d.like(x, "i", ())) for _ in x.shape]
        starts = [starts[0]] * len(starts)
    elif how == "one value":
        starts = [f"jnp.int32({s})" for s in starts]
        starts[d.positive_axis(x)] = f"{d.like(x, 'i', ())}.astype(np.int32)"
    return f"lax.dynamic_slice({x}, ({', '.join(starts)},), {sizes})"


@operation
def dynamic_index(d: Draw) -> str:
    x = d.value(rank=(1, 3), least=1)
    index = d.pick("index", [d.static(d.integer(-2, 3)), d.like(x, "i", ())])
    keep = d.pick("keepdims", [True, False])
    return f"lax.dynamic_index_in_dim({x}, {index}, {d.axis(x)}, keepdims={keep})"


@operation
def dynamic_update_slice(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    sizes = tuple(d.integer(0, n) for n in x.shape)
    update = d.pick("update", [d.like(x, shape=sizes), d.constant(sizes, str(x.dtype))])
    starts: Any = ", ".join(str(d.integer(-2, n + 1)) for n in x.shape)
    if d.pick("starts", ["known", "value"]) == "value":
        starts = ", ".join([d.like(x, "i", ())] * x.ndim)
    return f"lax.dynamic_update_slice({x}, {update}, ({starts},))"


@operation
def concatenate(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    axis = d.positive_axis(x)
    shapes = [(*x.shape[:axis], d.pick("extent", [0, 1, 2]), *x.shape[axis + 1 :])]
    if d.pick("call", ["lax", "jnp"]) == "lax":
        parts = [x, *(d.like(x, shape=s) for s in shapes * d.integer(0, 2))]
        return f"lax.concatenate([{', '.join(parts)}], {axis})"
    parts = [x, *(d.like(x, "fic", s) for s in shapes), x]
    return f"jnp.concatenate([{', '.join(parts)}], axis={axis - d.pick('less', [0, x.ndim])})"


@operation
def stack(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    others = [d.like(x, d.pick("kinds", ["", "fi"])) for _ in range(d.integer(0, 2))]
    axis = d.integer(-x.ndim - 1, x.ndim)
    call = d.pick("call", [f"stack([{{}}], axis={axis})", "hstack([{}])", "vstack([{}])"])
    return "jnp." + call.format(", ".join([x, *others]))


@operation
def unstack(d: Draw) -> str:
    x = d.value(rank=(1, 3), least=1)
    return f"jnp.unstack({x}, axis={d.axis(x)})"


@operation
def split(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    axis = d.positive_axis(x)
    at = sorted(d.integer(0, x.shape[axis]) for _ in range(d.integer(1, 2)))
    if d.pick("call", ["lax", "jnp"]) == "lax":
        sizes = tuple(b - a for a, b in zip([0, *at], [*at, x.shape[axis]], strict=True))
        return f"lax.split({x}, {sizes}, {axis})"
    return f"jnp.split({x}, {at}, axis={axis})"


@operation
def pad(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    low = d.pick("low", [0, 1, -1])
    config = [(low, d.integer(-1, 2), d.pick("interior", [0, 1, 2])) for _ in x.shape]
    values = [d.constant((), str(x.dtype)), d.like(x, shape=())]
    if x.kind == "f":
        values += [f"jnp.{x.dtype}(jnp.nan)", f"jnp.{x.dtype}(-jnp.inf)"]
    return f"lax.pad({x}, {d.pick('padding_value', values)}, {config})"


@operation
def numpy_pad(d: Draw) -> str:
    x = d.value(rank=(1, 2), least=1)
    widths = [(d.integer(0, 1), d.integer(0, 2)) for _ in x.shape]
    mode = d.pick("mode", ["constant", "edge", "wrap", "reflect", "symmetric", "linear_ramp"])
    extra = f", constant_values={d.scalar('fi')}" if mode == "constant" else ""
    return f"jnp.pad({x}, {widths}, mode='{mode}'{extra})"


@operation
def tile(d: Draw) -> str:
    x = d.value(rank=(0, 2))
    times = tuple(d.pick("reps", [1, 2, 0]) for _ in range(x.ndim + d.integer(0, 1)))
    return f"jnp.tile({x}, {times})"


@operation
def repeat(d: Draw) -> str:
    x = d.value(rank=(1, 2))
    axis = d.axis(x)
    n = x.shape[axis]
    times = d.pick("repeats", ["2", "0", f"np.array({[d.integer(0, 2) for _ in range(n)]}, int)"])
    return f"jnp.repeat({x}, {times}, axis={axis})"


@operation
def roll(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    by = d.pick("shift", [d.static(d.integer(-4, 4)), d.like(x, "i", ())])
    if d.pick("axes", ["one", "all", "two"]) == "one":
        return f"jnp.roll({x}, {by}, axis={d.static(d.axis(x))})"
    return f"jnp.roll({x}, {by})"


@operation
def rearranged(d: Draw) -> str:
    x = d.value(rank=(2, 3), least=1)
    k = d.integer(-1, 1)
    calls = ["rot90({}, {})", "tril({}, {})", "triu({}, {})", "diagonal({}, {})", "trace({}, {})"]
    return "jnp." + d.pick("call", [*calls, "diff({0}, axis=0)", "gradient({0}[:0])"]).format(x, k)


@operation
def made_of_nothing(d: Draw) -> str:
    x = d.value("fi", rank=(1, 2))
    n = x.shape[-1]
    calls = [
        f"{x} + jnp.arange({n})",
        f"{x} * jnp.eye({n}, dtype={x}.dtype)[0]",
        f"jnp.full_like({x}, 2) - {x}",
        f"jnp.zeros_like({x})",
        f"{x} - jnp.linspace(0, 1, {n})",
        f"{x} * lax.broadcasted_iota({x}.dtype, {x.shape}, 0)",
    ]
    if not n:
        calls.pop(1)
    return d.pick("call", calls)


# ---- Indexing ------------------------------------------------------------------------------------


def _slice_text(d: Draw, extent: int) -> str:
    step = d.pick("step", [1, 1, 2, -1, -2])
    ends = [d.pick("end", ["", str(d.integer(-extent - 1, extent + 1))]) for _ in range(2)]
    return f"{ends[0]}:{ends[1]}:{step}"


def _index(d: Draw, x: Value, traced: bool = True, extents: bool = True) -> str:
    """An index of any kind, as text."""
    kinds = ["slice", "integer", "list", "pair", "mask", "whole mask", "newaxis", "ellipsis"]
    kinds += ["value", "values", "empty", "unsigned"] if traced else []
    how = d.pick("index", kinds)
    if how == "whole mask":
        return d.constant(x.shape, "bool")
    if how == "ellipsis":
        return f"..., {d.integer(-x.shape[-1], x.shape[-1] - 1)}" if x.shape[-1] else "..."
    if how == "newaxis":
        return f"None, {_slice_text(d, x.shape[0])}"
    entries = []
    axis = d.positive_axis(x)
    for k, n in enumerate(x.shape[: axis + 1]):
        far = n + 1 if d.chance(0.2) else n - 1
        if how == "slice" or (k != axis and how != "pair"):
            entries.append(_slice_text(d, n) if d.chance(0.6) else ":")
        elif how == "integer":
            if n == 0:
                raise Impossible
            entries.append(d.static(d.integer(-n, n - 1)))
        elif how in ("list", "pair", "unsigned"):
            count = 2 if how == "pair" else d.integer(1, 3)
            low = 0 if how == "unsigned" or n == 0 else -n
            places = [d.integer(low, max(far, low)) for _ in range(count)]
            dtype = "np.uint8" if how == "unsigned" else d.pick("index dtype", ["int", "np.int8"])
            shape = ", (1, -1)" if d.chance(0.2) else ""
            text = f"np.array({places}, {dtype})"
            entries.append(f"np.reshape({text}{shape})" if shape else text)
        elif how == "mask":
            entries.append(d.constant((n,), "bool"))
        elif how == "value":
            entries.append(d.like(x, "iu", ()))
        elif how == "values":
            entries.append(d.like(x, "iu", (d.integer(0, 3),)))
        else:
            entries.append("np.zeros((0,), int)")
    return ", ".join(entries)


def _modes(d: Draw) -> str:
    modes = ["'clip'", "'drop'", "'fill'", "'wrap'", "'promise_in_bounds'"]
    return _keywords(
        d,
        mode=["'clip'", "'drop'", "'fill'", "'wrap'"] if d.chance(0.9) else modes[:4],
        indices_are_sorted=["False"],
        wrap_negative_indices=["False"],
    )


@operation
def indexed(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    return f"{x}[{_index(d, x)}]"


@operation
def at_get(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    fill = {
        "f": ["7", "jnp.nan", "-jnp.inf", "0.5"],
        "c": ["(2+3j)", "1j", "jnp.nan"],
        "i": ["7", "-1"],
        "u": ["7"],
        "b": ["True"],
    }[x.kind]
    return f"{x}.at[{_index(d, x)}].get({(_modes(d) + _keywords(d, fill_value=fill))[2:]})"


_UPDATES = "set add subtract mul multiply divide power min max apply".split()


@operation
def at_update(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    how, index = d.pick("method", _UPDATES), _index(d, x)
    modes = _modes(d)
    if how == "apply":
        functions = ["jnp.sin", "jnp.square", "lambda x: 2 * x + 1", "jnp.negative"]
        return f"{x}.at[{index}].apply({d.pick('function', functions)}{modes})"
    value = d.pick("value", ["scalar", "part", "constant"])
    if how == "power":
        update = d.pick("exponent", ["2", "-1", "0.5"])
    elif value == "scalar":
        update = d.scalar({"f": "fi", "c": "fci"}.get(x.kind, x.kind))
    elif value == "part":
        update = f"jnp.cos({x})[{index}]" if x.kind in "fc" else f"{x}[{index}]"
    else:
        update = f"jnp.arange(1, 4).astype({x}.dtype)[:{x}.at[{index}].get(mode='clip').ndim]"
        update += ".sum()"
    return f"{x}.at[{index}].{how}({update}{modes})"


@operation
def take(d: Draw) -> str:
    x = d.value(rank=(1, 3), least=1)
    keywords = _keywords(d, mode=["'clip'", "'fill'", "'wrap'"], indices_are_sorted=["False"])
    count = d.integer(0, 3)
    places = [f"np.array({[d.integer(-4, 4) for _ in range(count)]}, int)", d.like(x, "i")]
    axis = d.pick("axis", ["", f", axis={d.axis(x)}"])
    if "fill" in keywords and x.kind in "fc":
        keywords += _keywords(d, fill_value=["7", "jnp.inf"])
    return f"jnp.take({x}, {d.pick('indices', places)}{axis}{keywords})"


@operation
def take_along_axis(d: Draw) -> str:
    x = d.value(rank=(1, 3), least=1)
    keywords = _keywords(d, mode=["'clip'", "'fill'"])
    axis = d.axis(x)
    places = [d.like(x, "i"), f"jnp.argsort({x}, axis={axis})", d.constant(x.shape, "int32")]
    return f"jnp.take_along_axis({x}, {d.pick('indices', places)}, axis={axis}{keywords})"


@operation
def lax_gather(d: Draw) -> str:
    x = d.value(rank=(2, 2), least=1)
    n, m = x.shape
    rows, flags = _rows(d, n)
    sizes = (1, d.integer(0, m))
    numbers = (
        "lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,),"
        " start_index_map=(0,))"
    )
    modes = ["CLIP", "FILL_OR_DROP"]
    mode = d.pick("mode", ["None", *(f"lax.GatherScatterMode.{mode}" for mode in modes)])
    keywords = _keywords(d, fill_value=["1", "0"]) if "FILL" in mode else ""
    return f"lax.gather({x}, {rows}, {numbers}, {sizes}, mode={mode}{flags}{keywords})"


def _rows(d: Draw, extent: int) -> tuple[str, str]:
    """Indices of rows, of which what is said of them is true."""
    count = d.integer(0, 3)
    unique = d.pick("unique_indices", [True, False])
    first = d.integer(0, 1)
    rows = [first + k if unique else d.integer(-1, extent) for k in range(count)]
    if unique:  # clipped, two of them might be one
        rows = [row for row in rows if row < extent]
    ordered = d.pick("indices_are_sorted", [True, False])
    rows = sorted(rows) if ordered else rows
    text = f"np.array({[[r] for r in rows]}, np.int32).reshape(-1, 1)"
    return text, f", unique_indices={unique}, indices_are_sorted={ordered}"


@operation
def lax_scatter(d: Draw) -> str:
    x = d.value("fci", rank=(2, 2), least=1)
    how = d.pick("primitive", ["scatter", "scatter_add", "scatter_mul", "scatter_min"])
    how = "scatter_add" if x.kind == "c" and how == "scatter_min" else how
    rows, flags = _rows(d, x.shape[0])
    modes = ["CLIP", "FILL_OR_DROP"]
    mode = d.pick("mode", ["None", *(f"lax.GatherScatterMode.{mode}" for mode in modes)])
    numbers = (
        "lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,),"
        " scatter_dims_to_operand_dims=(0,))"
    )
    updates = d.like(x, shape=(rows.count("], [") + (rows.count("[") > 1), x.shape[1]))
    return f"lax.{how}({x}, {rows}, {updates}, {numbers}{flags}, mode={mode})"


@operation
def scatter_apply(d: Draw) -> str:
    x = d.value("f", rank=(1, 1), least=1)
    n = x.shape[0]
    places = [[d.integer(0, n)] for _ in range(d.integer(1, 2))]
    numbers = (
        "lax.ScatterDimensionNumbers(update_window_dims=(), inserted_window_dims=(0,),"
        " scatter_dims_to_operand_dims=(0,))"
    )
    function = d.pick("function", ["jnp.sin", "lambda x: x + 1"])
    return f"lax.scatter_apply({x}, np.array({places}, np.int32), {function}, {numbers})"


@operation
def chosen(d: Draw) -> str:
    x = d.value("f", rank=(1, 2), least=1)
    others = d.like(x)
    which = d.like(x, "i")
    calls = [
        f"jnp.choose(jnp.clip({which}, 0, 1), [{x}, {others}])",
        f"jnp.select([{x} > 0, {others} > 0], [{x}, {others}], default=2)",
        f"jnp.compress({d.constant((x.shape[0],), 'bool')}, {x}, axis=0)",
        f"jnp.nonzero({x} > 0, size=2)[0]",
        f"jnp.searchsorted(np.array([-1.0, 0.0, 1.0]), {x})",
        f"jnp.interp({x}.ravel(), np.array([-1.0, 0.0, 1.0]), np.array([2.0, 0.0, 1.0]))",
        f"jax.nn.one_hot({which}, 3)",
        f"jnp.bincount(jnp.clip({which}.ravel(), 0, 3), length=3)",
        f"jax.ops.segment_sum({x}, np.array({[d.integer(0, 2) for _ in range(x.shape[0])]}), 3)",
    ]
    return d.pick("call", calls)


# ---- Contractions --------------------------------------------------------------------------------

_PRECISIONS = [
    "lax.Precision.HIGHEST",
    "lax.Precision.DEFAULT",
    "'float32'",
    "('default', 'highest')",
    "lax.DotAlgorithmPreset.F32_F32_F32",
]


@operation
def dot_general(d: Draw) -> str:
    x = d.value("fci", rank=(1, 3))
    y = (
        d.like(x)
        if d.chance(0.4)
        else d.value("fci", rank=(1, 3), where=lambda y: y.dtype == x.dtype)
    )
    pairs = [(a, b) for a in range(x.ndim) for b in range(y.ndim) if x.shape[a] == y.shape[b]]
    summed: list[tuple[int, int]] = []
    batch: list[tuple[int, int]] = []
    for n in d.random.permutation(len(pairs)):
        a, b = pairs[n]
        if any(a == p or b == q for p, q in summed + batch) or d.chance(0.3):
            continue
        (batch if d.chance(0.35) else summed).append((a, b))
    if x.ndim + y.ndim - 2 * len(summed) - len(batch) > 4:
        raise Impossible

    def side(pairs: list[tuple[int, int]], k: int) -> tuple[int, ...]:
        return tuple(p[k] for p in pairs)

    numbers = ((side(summed, 0), side(summed, 1)), (side(batch, 0), side(batch, 1)))
    types = {
        "f": ["np.float32", "np.float64"],
        "c": ["np.complex128"],
        "i": ["np.int32", "np.float32"],
    }
    keywords = _keywords(
        d,
        precision=_PRECISIONS if x.dtype == np.float32 else _PRECISIONS[:2],
        preferred_element_type=types[x.kind],
    )
    return f"lax.dot_general({x}, {y}, {numbers}{keywords})"


@operation
def mixed_dot(d: Draw) -> str:
    x = d.value("fi", rank=(1, 2), least=1)
    y = d.like(x, "fi", (x.shape[-1], d.integer(0, 3)))
    kept = d.pick("preferred_element_type", ["np.float32", "np.float64", "None"])
    return f"lax.dot({x}, {y}, preferred_element_type={kept})"


@operation
def products(d: Draw) -> str:
    x = d.value("fci", rank=(1, 2))
    constant = d.constant(x.shape, d.dtype("fi"))
    y = d.pick("other", [d.like(x), d.like(x, "fi"), constant])
    t = f"jnp.asarray({y}).T"
    calls = [f"{x} @ {t}", f"jnp.dot({x}, {t})", f"jnp.tensordot({x}, {y}, {x.ndim})"]
    calls += [f"jnp.inner({x}, {y})", f"jnp.vdot({x}, {y})", f"jnp.outer({x}, {y})"]
    calls += [f"jnp.kron({x}, {y})", f"jnp.matmul({x}, {t}, precision='highest')"]
    calls += [f"jnp.cross({x}.ravel()[:3], {y}.ravel()[:3])"] if x.size >= 3 else []
    calls += [f"jnp.matvec({x}, {x}[0])"] if x.ndim == 2 and x.shape[0] else []
    return d.pick("call", calls)


@operation
def einsum(d: Draw) -> str:
    x = d.value("fci", rank=(1, 3))
    y = d.pick("second", [None, d.value("fci", rank=(1, 2))])
    extents: dict[str, int] = {}

    def subscripts(v: Value) -> str:
        made = ""
        for n in v.shape:
            fits = [c for c in "abcdefgh" if extents.get(c, n) == n]
            c = fits[d.integer(0, min(2, len(fits) - 1))]
            extents[c] = n
            made += c
        return made

    terms = [subscripts(x)] + ([subscripts(y)] if y is not None else [])
    used = sorted(set("".join(terms)))
    output = "".join(c for c in d.random.permutation(used) if d.chance(0.5))[:4]
    module = d.pick("module", ["jnp", "jm"])
    operands = ", ".join([x] + ([y] if y is not None else []))
    keywords = ""
    if module == "jnp":
        keywords = _keywords(d, precision=["'highest'"], preferred_element_type=["np.complex128"])
    return f"{module}.einsum('{','.join(terms)}->{output}', {operands}{keywords})"


# ---- Reductions ----------------------------------------------------------------------------------


@operation
def reduced(d: Draw) -> str:
    names = "sum prod max min mean any all var std argmax argmin nansum ptp count_nonzero".split()
    x, name = d.value(), d.pick("function", names)
    axis: Any = d.axes(x)
    if name.startswith("arg"):
        axis = d.pick("axis of best", [None, d.axis(x)] if x.ndim else [None])
        return f"jnp.{name}({x}, axis={axis}, keepdims={d.pick('keepdims', [True, False])})"
    keywords = _keywords(d, keepdims=["True"])
    if name in ("sum", "prod", "max", "min"):
        need = name in ("max", "min")
        mask = d.constant(x.shape, "bool") if d.chance(0.5) else d.like(x, "b")
        how = d.pick("where", ["", "where", "initial"] if x.size or not need else ["where"])
        if how:
            keywords += f", initial={d.scalar({'f': 'fi', 'c': 'fc'}.get(x.kind, 'i'))}"
        if how == "where":
            keywords += f", where={mask}"
        if name in ("sum", "prod"):
            keywords += _keywords(d, dtype=["np.float64", "np.float32", "np.int32"])
            keywords += _keywords(d, promote_integers=["False"])
    elif name in ("mean", "any", "all") and d.pick("where", ["", "where"]):
        keywords += f", where={d.like(x, 'b')}"
    return f"jnp.{name}({x}, axis={axis}{keywords})"


@operation
def lax_reduced(d: Draw) -> str:
    names = "reduce_sum reduce_prod reduce_max reduce_min".split()
    x, name = d.value("fi"), d.pick("primitive", names)
    axes = d.axes(x, none=False)
    return f"lax.{name}({x}, {axes})"


@operation
def lax_logic(d: Draw) -> str:
    x = d.value(d.pick("kinds", ["b", "iu"]), rank=(1, 3))
    name = d.pick("primitive", ["reduce_and", "reduce_or", "reduce_xor"])
    return f"lax.{name}({x}, {d.axes(x, none=False)})"


@operation
def lax_reduce(d: Draw) -> str:
    x = d.value("f", rank=(1, 2))
    function = d.pick("computation", ["lax.add", "lax.max", "lambda a, b: a + b * b", "lax.mul"])
    start = (
        f"np.zeros((), jnp.{x.dtype})" if function != "lax.mul" else f"np.ones((), jnp.{x.dtype})"
    )
    return f"lax.reduce({x}, {start}, {function}, {d.axes(x, none=False)})"


@operation
def lax_best(d: Draw) -> str:
    x, name = d.value("fi", rank=(1, 3), least=1), d.pick("primitive", ["argmax", "argmin"])
    dtype = d.pick("index_dtype", ["np.int32", "np.int64", "np.uint8"])
    return f"lax.{name}({x}, {d.positive_axis(x)}, {dtype})"


@operation
def best_of_booleans(d: Draw) -> str:
    x = d.value("b", rank=(1, 3), least=1)
    return f"jnp.{d.pick('function', ['argmax', 'argmin'])}({x}, {d.axis(x)})"


@operation
def cumulative(d: Draw) -> str:
    x = d.value("fi", rank=(1, 3))
    name = d.pick("primitive", "cumsum cumprod cummax cummin cumlogsumexp".split())
    x = d.value("f", rank=(1, 3)) if name == "cumlogsumexp" else x
    return f"lax.{name}({x}, {d.positive_axis(x)}, reverse={d.pick('reverse', [True, False])})"


@operation
def numpy_cumulative(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    name = d.pick("function", "cumsum cumprod nancumsum".split())
    axis = d.pick("axis", [None, d.axis(x)])
    return f"jnp.{name}({x}, axis={axis}{_keywords(d, dtype=['np.float64', 'np.int32'])})"


@operation
def associative_scan(d: Draw) -> str:
    x = d.value("f", rank=(1, 2), least=1)
    function = d.pick("function", ["jnp.add", "jnp.multiply", "jnp.maximum"])
    reverse = d.pick("reverse", [True, False])
    return f"lax.associative_scan({function}, {x}, reverse={reverse}, axis={d.positive_axis(x)})"


@operation
def windows(d: Draw) -> str:
    x = d.value("f", rank=(1, 2), least=1)
    size = tuple(min(2, n) for n in x.shape)
    start, function = d.pick("computation", [("0.0", "lax.add"), ("-jnp.inf", "lax.max")])
    padding = d.pick("padding", ["'VALID'", "'SAME'"])
    strides = d.pick("strides", [(1,) * x.ndim, (2,) * x.ndim])
    first = f"jnp.asarray({start}, {x}.dtype)"
    return f"lax.reduce_window({x}, {first}, {function}, {size}, {strides}, {padding})"


@operation
def convolution(d: Draw) -> str:
    x = d.value("f", rank=(1, 1), least=1)
    return f"jnp.convolve({x}, {d.like(x)}, mode='{d.pick('mode', ['full', 'same', 'valid'])}')"


# ---- Order ---------------------------------------------------------------------------------------


@operation
def sort(d: Draw) -> str:
    x = d.value(rank=(1, 3))
    axis = d.positive_axis(x)
    calls = [
        f"jnp.sort({x}, axis={axis}, descending={d.pick('descending', [True, False])})",
        f"jnp.argsort({x}, axis={axis}, stable=True, descending={d.chance(0.5)})",
        f"lax.sort(({x}, {d.like(x, 'fi')}), dimension={axis}, num_keys=1, is_stable=True)",
        f"lax.sort({x}, dimension={axis}, is_stable=False)",
        f"lax.sort(({x}, {d.like(x, 'fi')}), dimension={axis}, num_keys=2)",
    ]
    return d.pick("call", calls)


@operation
def ranked(d: Draw) -> str:
    x = d.value("fi", rank=(1, 2), least=1)
    k = d.integer(0, x.shape[-1])
    calls = [f"lax.top_k({x}, {k})", f"jnp.median({x}.astype(np.float32), axis={d.axis(x)})"]
    calls += [f"jnp.unique({x}, size=2, fill_value=0)", f"jnp.quantile({x}.astype(float), 0.3)"]
    return d.pick("call", calls)


# ---- Control -------------------------------------------------------------------------------------


def _body(d: Draw, *names: str) -> str:
    """An expression of scalars, or arrays of equal shape."""
    first, second = names[0], names[-1]
    bodies = [
        "jnp.sin({0}) + {1}",
        "0.5 * {0} + jnp.tanh({1})",
        "jnp.where({0} > {1}, {0}, 0.5 * {1})",
        "jnp.maximum({0}, {1})",
        "{0} - {1} * {1}",
        "jnp.abs({0}) * jnp.cos({1})",
        "{1}",
        "{0}",
    ]
    return str(d.random.choice(bodies)).format(first, second)


@operation
def scan(d: Draw) -> str:
    xs = d.value("f", rank=(1, 2))
    xs_given = d.pick("xs", [True, True, False])
    carry = d.like(xs, shape=xs.shape[1:])
    reverse, unroll = d.pick("reverse", [True, False]), d.pick("unroll", [1, 2, "True"])
    keywords = f", reverse={reverse}, unroll={unroll}"
    outside = d.pick("closed over", ["", "value"])
    closed = f" + {d.like(xs, shape=xs.shape[1:])}" if outside else ""
    new, made = _body(d, "c", "x"), _body(d, "x", "c")
    cast = ".astype(c.dtype)"
    if not xs_given:
        new = _body(d, "c", "c")
        keywords += f", length={d.pick('length', [0, 1, 3])}"
        return f"lax.scan(lambda c, x: (({new}{closed}){cast}, c), {carry}, None{keywords})"
    if d.pick("counter", [False, True]):
        counted = f"((s[1] + x{closed}).astype(s[1].dtype), s[0] + 1)[::-1], (s[0], s[1] * x)"
        return f"lax.scan(lambda s, x: ({counted}), (0, {carry}), {xs}, reverse={reverse})"
    return f"lax.scan(lambda c, x: (({new}{closed}){cast}, {made}), {carry}, {xs}{keywords})"


@operation
def fori_loop(d: Draw) -> str:
    x = d.value("f", rank=(0, 2))
    upper = d.pick("upper", ["3", "0", "traced"])
    if upper == "traced":
        upper = f"jnp.clip({d.like(x, 'i', ())}, 0, 3)"
    body = d.pick("body", ["x + i", "jnp.sin(x)", "jnp.where(i > 1, x, 2 * x)", "x * (i < 2)"])
    return f"lax.fori_loop(0, {upper}, lambda i, x: ({body}).astype(x.dtype), {x})"


@operation
def while_loop(d: Draw) -> str:
    x = d.value("f", rank=(0, 1))
    total = "jnp.sum(jnp.abs(s[1]))"
    test = d.pick("test", [f"(s[0] < 4) & ({total} < 5)", "s[0] < 3", "s[0] < end"])
    end = f"jnp.clip({d.like(x, 'i', ())}, 0, 3)" if test == "s[0] < end" else ""
    body = d.pick("body", ["2 * s[1]", "s[1] + more"])
    more = d.like(x, "f", ()) if body == "s[1] + more" else ""
    step = f"(s[0] + 1, ({body.replace('more', more)}).astype(s[1].dtype))"
    return f"lax.while_loop(lambda s: {test.replace('end', end)}, lambda s: {step}, (0, {x}))"


@operation
def lax_map(d: Draw) -> str:
    x = d.value("f", rank=(1, 2))
    batch = _keywords(d, batch_size=["2"])
    return f"lax.map(lambda x: {_body(d, 'x', 'x')}, {x}{batch})"


def _predicate(d: Draw, x: Value) -> str:
    how = d.pick("predicate", ["value", "boolean", "known", "number"])
    if how == "known":
        return d.static(d.pick("known predicate", [True, False]))
    if how == "boolean":
        return d.like(x, "b", ())
    if how == "number":
        return d.like(x, "fi", ())
    return f"jnp.sum({x}) > 0"


@operation
def cond(d: Draw) -> str:
    x = d.value("f")
    y = d.like(x)
    first, second = _body(d, "x", "y"), _body(d, "y", "x")
    how = d.pick("branches", ["same", "two results", "constants", "singular", "closed"])
    if how == "two results":
        first, second = f"({first}, jnp.sum(x))", f"({second}, jnp.sum(y))"
    elif how == "constants":
        first, second = "jnp.zeros_like(x)", "y"
    elif how == "singular":
        first, second = "jnp.sqrt(x)", "x * x"
    elif how == "closed":
        first, second = f"x * {y}", f"{y} - 1"
    return f"lax.cond({_predicate(d, x)}, lambda x, y: {first}, lambda x, y: {second}, {x}, {y})"


@operation
def switch(d: Draw) -> str:
    x = d.value("f")
    count = d.pick("count", [1, 2, 3, 4])
    branches = ["lambda x: x", "jnp.sin", "lambda x: x * x", "lambda x: 0.5 * x"][:count]
    known = d.static(d.integer(-1, 4))
    index = d.pick("index", [known, d.like(x, "i", ()), f"jnp.argmax({x})" if x.size else known])
    return f"lax.switch({index}, [{', '.join(branches)}], {x})"


# ---- Derivatives and calls -----------------------------------------------------------------------


@operation
def own_derivative(d: Draw) -> str:
    x = d.value("f")
    calls = [f"own_jvp({x})", f"own_vjp({x}, {d.like(x)})", f"own_jvp(jnp.sin({x}))"]
    return d.pick("call", calls)


@operation
def called(d: Draw) -> str:
    x = d.value("f")
    body = _body(d, "x", "y")
    y = d.like(x)
    calls = ["jax.jit", "jax.checkpoint", "jm.fuse(jax.vmap", "jax.named_call"]
    how = d.pick("call", calls)
    if how.startswith("jm.fuse"):
        if not x.ndim or not x.shape[0]:
            raise Impossible
        inner = d.pick("inner", ["jm.fuse", "jax.vmap"])
        return f"{inner}(lambda x, y: {body}, (0, None))({x}, {y}[0])"
    return f"{how}(lambda x, y: {body})({x}, {y})"


@operation
def differentiated(d: Draw) -> str:
    x = d.value("f", where=lambda x: x.dtype in (np.float32, np.float64))
    y = d.like(x)
    body = _body(d, "x", f"{y}")
    calls = [
        f"jax.grad(lambda x: jnp.sum({body} * x))({x})",
        f"jax.value_and_grad(lambda x: jnp.sum(x * x * {y}))({x})",
        f"jax.jvp(lambda x: {body}, ({x},), ({y},))",
        f"jax.vjp(lambda x: jnp.tanh({body}), {x})[1](jnp.ones_like({x}))[0]",
    ]
    return d.pick("call", calls)


@operation
def random_numbers(d: Draw) -> str:
    key = f"jax.random.key({d.integer(0, 9)})"
    x = d.value("f", rank=(0, 1))
    folded = f"jax.random.fold_in({key}, {d.like(x, 'i', ())})"
    shape = x.shape
    which = d.pick("key", [key, folded])
    name = d.pick("function", ["normal", "uniform", "bernoulli"])
    extra = f"shape={shape}"
    return f"{x} * jax.random.{name}({which}, {extra})"


def _matrices(d: Draw) -> tuple[Value, str, str]:
    """A square matrix, and two made of it: one that is not singular, and a positive one."""
    x = d.value(
        "f",
        rank=(2, 2),
        least=1,
        where=lambda x: x.shape[0] == x.shape[1] and x.dtype in (np.float32, np.float64),
    )
    # What LAPACK makes of a matrix with a NaN is not the same everywhere.
    safe = f"(jnp.tanh(jnp.nan_to_num({x})) + 3 * jnp.eye({x.shape[0]}, dtype={x}.dtype))"
    return x, safe, f"({safe} @ {safe}.T)"


@operation
def linear_algebra(d: Draw) -> str:
    x, safe, spd = _matrices(d)
    calls = [
        f"jnp.linalg.inv({safe})",
        f"jnp.linalg.det({safe})",
        f"jnp.linalg.solve({safe}, {d.like(x)})",
        f"jnp.linalg.cholesky({spd})",
        f"jnp.linalg.eigvalsh({spd})",
        f"jnp.linalg.norm({x})",
        f"jnp.linalg.slogdet({safe})[1]",
        f"jax.scipy.linalg.solve_triangular({safe}, {x}, lower=True)",
        f"jnp.linalg.qr({safe})[1]",
        f"jnp.linalg.matrix_power({x}, 2)",
    ]
    return d.pick("call", calls)


@operation
def factorisations(d: Draw) -> str:
    x, safe, spd = _matrices(d)
    flags = ", left_side=False, transpose_a=True, conjugate_a=True, unit_diagonal=True"
    calls = [
        f"jax.lax.linalg.triangular_solve({safe}, {x}{flags})",
        f"jax.lax.linalg.triangular_solve({safe}, jnp.sin({x}){flags})",
        f"jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor({safe}), {x}, trans=1)",
        f"jnp.linalg.qr({safe}, mode='complete')[1]",
        f"jax.lax.linalg.eigh({spd}, lower=False)[1]",
        f"jnp.linalg.svd({safe}, compute_uv=False)",
        f"jnp.square(jnp.linalg.svd({safe}, full_matrices=False)[0])",
    ]
    return d.pick("call", calls)


@operation
def fourier(d: Draw) -> str:
    x = d.value("fc", rank=(1, 1), least=1, where=lambda x: x.dtype.itemsize >= 4)
    return f"jnp.fft.{d.pick('call', ['fft', 'ifft'])}({x})"


@operation
def general_convolution(d: Draw) -> str:
    x = d.value("f", rank=(3, 4), least=2)
    space = "HW"[: x.ndim - 2]
    last = d.pick("dimension_numbers", [False, True])  # where features are
    features = x.shape[-1 if last else 1]
    groups, batches = d.pick("groups", [(1, 1), (features, 1), (1, x.shape[0])])
    made, sides = groups * batches * d.integer(1, 2), [d.integer(1, 3) for _ in space]
    own = features // groups
    shape = (*sides, own, made) if last else (made, own, *sides)
    numbers = f"{space}IO" if last else f"OI{space}", f"N{space}C" if last else f"NC{space}"
    kernel = f"jnp.asarray(np.cos(np.arange({math.prod(shape)}.0)).reshape({shape}), {x}.dtype)"
    names = "window_strides", "lhs_dilation", "rhs_dilation"
    strides, dilation, apart = ([d.pick(name, [1, 2]) for _ in space] for name in names)
    padding = [d.pick("padding", [(1, 1), (0, 0), (2, -1)]) for _ in space]
    return (
        f"lax.conv_general_dilated({x}, {kernel}, {strides}, {padding}, {dilation}, {apart}, "
        f"{(numbers[1], *numbers)}, {groups}, {batches}"
        + _keywords(
            d,
            precision=["lax.Precision.HIGHEST"],
            preferred_element_type=[f"{x}.dtype"],
        )
        + ")"
    )


# ---- Effects -------------------------------------------------------------------------------------


@operation
def callback(d: Draw) -> str:
    x = d.value(where=lambda x: x.dtype.name not in ("bfloat16", "float16"))
    struct = f"jax.ShapeDtypeStruct({x.shape}, {x}.dtype)"
    method = d.pick("vmap_method", ["sequential", "expand_dims", "broadcast_all"])
    calls = [
        f"jax.debug.callback(seen, {x})",
        "jax.debug.callback(seen, 1)",
        f"jax.experimental.io_callback(counted, {struct}, {x})",
        f"jax.pure_callback(counted, {struct}, {x}, vmap_method='{method}')",
    ]
    return d.pick("call", calls)


# ---- Loops and axes that are written out ---------------------------------------------------------


@operation
def written_out(d: Draw) -> str:
    """A loop of Python's, over rows of a table and places in an argument."""
    x = d.value("f", rank=(1, 2))
    count = d.pick("count", [4, 5, 3])
    size = x.shape[-1]
    table = f"np.linspace(-1, 1, {count * size}).reshape({count}, {size})"
    first, second, third = (_body(d, *names) for names in (("x", "t"), ("t", "x"), ("x", "u")))
    made = f"(lambda t, x, u: ({first}) * jnp.sin({second}) + jnp.cos({third}))"
    table = d.pick("dtype", [f"{table}.astype({x}.dtype)", table])
    calls = f"{made}(t, {x}, jnp.tanh({x}) * t) for t in {table}"
    how = d.pick("how", ["sum", "stack", "backwards", "steps", "whole and half"])
    if how == "stack":
        return f"jnp.stack([{calls}], {d.axis(x)})"
    if how == "backwards":
        return f"sum([{calls}][::-1]) + {d.like(x)}"
    if how == "steps":
        return f"jnp.stack(list(itertools.accumulate({calls})))"
    if how == "whole and half":
        return f"(lambda f: (sum(f), jnp.stack(f[::2])))([{calls}])"
    return f"sum({calls})"


@operation
def side_by_side(d: Draw) -> str:
    """Components of nodes in one axis, put there in steps or made of several."""
    count, step = d.pick("count", [5, 6, 2]), d.pick("step", [2, 3])
    x = d.like(d.value("f"), shape=(count,))
    y = d.like(x)
    how = d.pick("how", ["set", "add", "stack", "again"])
    whole = f"jnp.zeros((2, {count * step}), {x}.dtype)"
    made = f"{whole}.at[0, 1::{step}].set({x})"
    if how == "add":
        made = f"({whole} + 1).at[1, ::{step}].add({y})"
    elif how == "stack":
        parts = f"[{x}, {y}, {x} * {y}][:{step}]"
        made = f"jnp.stack([jnp.stack({parts}, -1).ravel(), jnp.stack({parts}[::-1], -1).ravel()])"
    elif how == "again":
        made = f"{made}.at[1, {step - 1}::{step}].set({y}).at[0, 1::{step}].multiply({y})"
    uses = ["{0}", "{0} @ {0}.T", "{0}.T @ {0}", "{0}[:, 1:4]", "{0}[1, ::{1}]"]
    used = d.pick("function", ["{0}", "jnp.sin({0})"]).format(d.pick("used", uses))
    return f"(lambda b: {used.format('b', step)})({made})"


# ---- Loops that stay loops -----------------------------------------------------------------------


@operation
def long_loop(d: Draw) -> str:
    """Of so many steps that no kernel has them all, or ending by values of an element."""
    x = d.value("f", rank=(0, 1))
    y = d.like(x)
    new = d.pick("step", ["jnp.sin(x) / 2", "(x + y) / 3", "jnp.where(x > y, y, x) / 2"])
    if x.ndim:
        new = d.pick("sum", ["{}", "({}) + 0.1 * jnp.sum(x * y) / (1 + jnp.sum(x * x))"]).format(
            new
        )
    step = f"(lambda x, y: ({new}).astype(x.dtype))"
    how = d.pick("loop", ["fori", "scan", "reverse", "until", "inside"])
    if how == "fori":
        return f"lax.fori_loop(0, 300, lambda i, x: {step}(x, {y}), {x})"
    if how in ("scan", "reverse"):
        xs = f"(jnp.arange(301) / 300).astype({x}.dtype)"
        made = d.pick("made", ["(c, x)", "jnp.sum(c)", "()"])
        keywords = f"reverse={how == 'reverse'}"
        return f"lax.scan(lambda c, x: ({step}(c, x), {made}), {x}, {xs}, {keywords})"
    until = d.pick("test", ["jnp.max(s[0]) > 0.1", "jnp.sum(jnp.abs(s[0])) > 0.3 * s[2]"])
    state = f"({step}(s[0], {y} / 9), s[1] + 1, s[2])"
    end = f"lambda s: (s[1] < 8) & ({until})"
    loop = f"lax.while_loop({end}, lambda s: {state}, (CARRIED, 0, {d.like(x, 'f', ())}))"
    if how == "until":
        return loop.replace("CARRIED", str(x))
    inner = loop.replace("CARRIED", "c")
    return f"lax.scan(lambda c, _: ({inner}[0], ()), {x}, None, length=2)[0]"


# ---- Bits, and what takes away -------------------------------------------------------------------


@operation
def masked_digits(d: Draw) -> str:
    """A number without its last digits, as JAX squares it exactly, or of other digits."""
    x = d.value("f")
    bits = 8 * x.dtype.itemsize
    digits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[x.dtype.name]
    whole = 2**bits - 1
    masks = [whole - 2 ** (digits // 2) + 1, whole - 1, whole - 2, whole - 2**digits + 1]
    mask = f"jnp.uint{bits}({d.pick('mask', masks)})"
    number = f"lax.bitcast_convert_type({x}, jnp.uint{bits})"
    masked = d.pick("order", ["{0} & {1}", "{1} & {0}"]).format(number, mask)
    return f"lax.bitcast_convert_type({masked}, {x}.dtype)"


@operation
def of_the_normal_distribution(d: Draw) -> str:
    """Functions of whose derivatives newer releases square numbers by their digits."""
    x = d.value("f", where=lambda x: x.dtype.itemsize >= 4)
    functions = ["lax.erf", "lax.erfc", "jax.scipy.stats.norm.cdf"]
    return f"jax.grad(lambda x: jnp.sum({d.pick('function', functions)}(x)))({x})"


@operation
def scatter_sub(d: Draw) -> str:
    x = d.value("fci", rank=(2, 2), least=1)
    rows, flags = _rows(d, x.shape[0])
    mode = d.pick("mode", ["CLIP", "FILL_OR_DROP"])
    numbers = (
        "lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,),"
        " scatter_dims_to_operand_dims=(0,))"
    )
    updates = d.like(x, shape=(rows.count("], [") + (rows.count("[") > 1), x.shape[1]))
    mode = f"lax.GatherScatterMode.{mode}"
    return f"lax.scatter_sub({x}, {rows}, {updates}, {numbers}{flags}, mode={mode})"


@operation
def checkpointed(d: Draw) -> str:
    """What a policy keeps is rounded to the precision that it has."""
    x = d.value("f")
    function = d.pick("function", ["jnp.sin(jnp.cos(x)) * x", "jnp.tanh(x * x)"])
    policy = d.pick("policy", ["everything_saveable", "dots_saveable"])
    made = f"jax.checkpoint(lambda x: {function}, policy=jax.checkpoint_policies.{policy})"
    return f"jax.grad(lambda x: jnp.sum({made}(x)))({x})"


@operation
def kept_precision(d: Draw) -> str:
    """Rounded to as many digits as there are, to more, or to fewer."""
    x = d.value("f", least=1)
    dtype = d.pick("dtype", ["float64", "float32"])
    bits = d.pick("exponent_bits", [11, 8]), d.pick("mantissa_bits", [52, 23, 10])
    return f"lax.reduce_precision({x}.astype(jnp.{dtype}), {bits[0]}, {bits[1]})"


@operation
def of_the_gamma_function(d: Draw) -> str:
    """Away from poles, where what is infinite differs from release to release."""
    x = d.value("f")
    functions = ["lax.lgamma", "lax.digamma", "lambda x: lax.polygamma(jnp.full_like(x, 1), x)"]
    arguments = ["0.6 + abs(jnp.sin({}))", "-1.5 + jnp.sin({}) / 4"]
    argument = d.pick("argument", arguments).format(x)
    return f"({d.pick('function', functions)})({argument})"


@operation
def inverse_of_erf(d: Draw) -> str:
    x = d.value("f")
    functions = ["lax.erf_inv(jnp.sin({}) * 0.9)", "jax.scipy.special.ndtri(0.5 + jnp.sin({}) / 4)"]
    return d.pick("function", functions).format(x)


@operation
def best_at_places(d: Draw) -> str:
    x = d.value("fib", rank=(1, 2), least=1)
    count = d.integer(1, 3)
    updates = d.like(x, shape=(count, *x.shape[1:]))
    known = f"np.array({[d.integer(-2, x.shape[0]) for _ in range(count)]})"
    mapped = d.like(x, "i", (count,))
    places = d.pick("places", [known, mapped])
    method, mode = d.pick("method", ["max", "min"]), d.pick("mode", ["drop", "clip"])
    return f"{x}.at[{places}].{method}({updates}, mode={mode!r})"


@operation
def clipped_places(d: Draw) -> str:
    """Integers made of numbers, between bounds that make some of the making needless."""
    x = d.value("f", least=1)
    dtype = d.pick("dtype", ["np.int32", "np.int8", "np.uint8", "int"])
    low = d.integer(-2, 2) if "u" not in dtype else d.integer(0, 2)
    clips = [
        f"jnp.clip(k, {low}, {low + 3})",
        f"jnp.maximum(jnp.minimum(k, {low + 3}), {low})",
        f"jnp.minimum(k, {low + 3})",
        f"lax.clamp(k.dtype.type({low}), k, k.dtype.type({low + 2}))",
    ]
    clipped = f"(lambda k: {d.pick('clip', clips)})(jnp.nan_to_num(3 * {x}).astype({dtype}))"
    uses = [
        "{}",
        "jnp.arange(9.0)[{}]",
        "(lambda k: jnp.zeros(4).at[k.ravel()].add(k.ravel() + 1.0))({})",
    ]
    return d.pick("used", uses).format(clipped)


@operation
def spread_steps(d: Draw) -> str:
    """Steps that have what they carry along another axis, with a table, and come back."""
    x = d.value("f", least=1)
    count = min(x.size, 4)
    table = f"np.linspace(-1, 1, {count**2}).reshape({count}, {count}).astype(c.dtype)"
    way, axis = d.pick("way", ["max", "min", "sum", "prod"]), d.integer(0, 1)
    met = d.pick("met", [f"c[:, None] - {table}", f"{table} + c", f"{table} * c[:, None]"])
    step = f"lambda c, e: (jnp.{way}({met}, {axis}) / 2 + e, c[:1] * e)"
    steps = f"jnp.asarray(np.linspace(-1, 1, 3), {x}.dtype)"
    begin = f"jnp.ravel({x})[:{count}]"
    if d.chance(0.5):
        return f"lax.scan({step}, {begin}, {steps})"
    return f"lax.fori_loop(0, {d.integer(1, 3)}, lambda k, c: ({step})(c, c[:1])[0], {begin})"


RARE = {"callback", "random_numbers", "linear_algebra", "fourier", "convolution", "bitcast"}
