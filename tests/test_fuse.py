"""``jm.fuse`` means ``jax.vmap``: values, all derivatives, errors, under every transformation.

What runs natively and what plain JAX runs makes no difference to any test here.
"""

import functools
import importlib.util
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.fallback import plain_calls
from tests.einsums import assert_close, normal
from tests.jaxprs import programs


GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]

ELEMENTS = 6


# ---- Random functions of one element -------------------------------------------------------------
# A function is a list of steps; each one makes a value of some of those before it.  Steps keep
# values of the size of one, so that errors of rounding are not amplified, and no step has a kink
# or a pole where random values are.

Shape = tuple[int, ...]
Step = tuple[str, Callable[[Sequence[jax.Array]], jax.Array]]  # what it is, and of all values so far
Draw = st.DrawFn

_LARGEST = 48  # values of a tile: what is taken apart must have few pieces


@dataclass(frozen=True)
class Element:
    """A function of one element, and how it is called."""

    shapes: tuple[Shape, ...]
    steps: tuple[Step, ...]
    in_axes: tuple[int | None, ...]
    out_axes: int
    dtype: Any

    def __repr__(self) -> str:
        steps = "; ".join(name for name, _ in self.steps)
        axes = f"in_axes={self.in_axes}, out_axes={self.out_axes}"
        return f"Element({np.dtype(self.dtype)}, {self.shapes}, {axes}: {steps})"

    def __call__(self, arguments: dict[str, Any]) -> Any:
        values = [arguments["first"], *arguments["others"]]
        for _, step in self.steps:
            values.append(step(values))
        return {"last": values[-1], "sum": (sum(jnp.sum(jnp.sin(x)) for x in values),)}

    def applied(self, transform: Function) -> Function:
        first, *others = self.in_axes
        axes = ({"first": first, "others": others},)
        return transform(self, in_axes=axes, out_axes={"last": self.out_axes, "sum": 0})

    def arguments(self, seed: int) -> tuple[dict[str, Any]]:
        random = np.random.default_rng(seed)
        first, *others = (
            jnp.asarray(random.uniform(0.2, 1.4, _with_elements(shape, axis)), self.dtype)
            for shape, axis in zip(self.shapes, self.in_axes, strict=True)
        )
        return ({"first": first, "others": others},)


def _with_elements(shape: Shape, axis: int | None) -> Shape:
    if axis is None:
        return shape
    position = axis if axis >= 0 else len(shape) + 1 + axis
    return (*shape[:position], ELEMENTS, *shape[position:])


def _constant(draw: Draw, shape: Shape) -> np.ndarray:
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return random.uniform(-1, 1, shape)


def _axis(draw: Draw, shape: Shape) -> int | None:
    return draw(st.integers(0, len(shape) - 1)) if shape else None


def _table(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    """A contraction with a constant matrix, the result in the axis's place."""
    axis = _axis(draw, shapes[n])
    if axis is None:
        return None
    table = _constant(draw, (draw(st.integers(1, 4)), shapes[n][axis]))

    def step(values: Sequence[jax.Array]) -> jax.Array:
        x = values[n]
        made = jnp.tensordot(jnp.asarray(table, x.dtype), x, ((1,), (axis,)))
        return jnp.moveaxis(made, 0, axis)

    return f"table {table.shape} on axis {axis} of {n}", step


def _contracted(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    """A contraction of two tiles over axes of equal extent."""
    other = draw(st.integers(0, len(shapes) - 1))
    pairs = [(a, b) for a, x in enumerate(shapes[n]) for b, y in enumerate(shapes[other]) if x == y]
    if not pairs or len(shapes[n]) + len(shapes[other]) > 5:
        return None
    a, b = draw(st.sampled_from(pairs))
    return f"{n} . {other} over {a}, {b}", lambda values: (
        jnp.tensordot(values[n], values[other], ((a,), (b,))) / shapes[n][a]
    )


def _matmul(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    """A product of matrices, at every point if there are leading axes."""
    if len(shapes[n]) < 2:
        return None
    extent = shapes[n][-1]
    return f"{n} @ {n}.mT", lambda values: values[n] @ jnp.matrix_transpose(values[n]) / extent


_UNARY: dict[str, Function] = {
    "sin": jnp.sin,
    "exp(-x²)": lambda x: jnp.exp(-x * x),
    "tanh": jnp.tanh,
    "log1p": lambda x: jnp.log1p(x * x),
    "sqrt": lambda x: jnp.sqrt(x * x + 0.5),
    "x³/(1+x²)": lambda x: x**3 / (1 + x**2),
    "atan2": lambda x: jnp.arctan2(x, 2 + x * x),
    "pow": lambda x: jnp.power(1.5 + jnp.cos(x), 0.7),
    "erf": lambda x: jax.scipy.special.erf(x),
    "logistic": jax.nn.sigmoid,
    "where": lambda x: jnp.where((x > 0.31) & ~(x > 2.2), x * jnp.cos(x), 0.3 - x),
    "clip": lambda x: jnp.clip(x, 0.313, 0.877) + 0.1 * x,
    "softplus": jax.nn.softplus,
}
_BINARY: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 0.5 * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (1.5 + y * y),
    "max": lambda x, y: jnp.maximum(x, 0.71 * y + 0.011),
    "select": lambda x, y: jnp.where(x < 0.71 * y + 0.011, jnp.sin(y), x),
    "hypot": lambda x, y: jnp.sqrt(x * x + y * y + 0.1),
}
_REDUCE: dict[str, Function] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "logsumexp": jax.nn.logsumexp,
}
_ALONG: dict[str, Function] = {
    "cumsum": lambda x, axis: jnp.cumsum(x, axis) / x.shape[axis],
    "cumprod": jnp.cumprod,
    "softmax": jax.nn.softmax,
    "flip": jnp.flip,
}


def _unary(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    name = draw(st.sampled_from(sorted(_UNARY)))
    return f"{name} of {n}", lambda values: _UNARY[name](values[n])


def _binary(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    """With a value that broadcasts to the shape of the first."""
    fits = [
        k
        for k, other in enumerate(shapes)
        if len(other) <= len(shapes[n])
        and all(x in (1, y) for x, y in zip(other[::-1], shapes[n][::-1], strict=False))
    ]
    name, other = draw(st.sampled_from(sorted(_BINARY))), draw(st.sampled_from(fits))
    return f"{name} of {n}, {other}", lambda values: _BINARY[name](values[n], values[other])


def _reduced(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    axes = tuple(k for k in range(len(shapes[n])) if draw(st.booleans()))
    if not axes:
        return None
    name, keepdims = draw(st.sampled_from(sorted(_REDUCE))), draw(st.booleans())
    return f"{name} of {n} over {axes}", lambda values: _REDUCE[name](
        values[n], axis=axes, keepdims=keepdims
    )


def _along(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    axis = _axis(draw, shapes[n])
    if axis is None:
        return None
    name = draw(st.sampled_from(sorted(_ALONG)))
    return f"{name} of {n} along {axis}", lambda values: _ALONG[name](values[n], axis=axis)


def _broadcast(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    extent, axis = draw(st.integers(1, 3)), draw(st.integers(0, len(shapes[n])))
    shape = (*shapes[n][:axis], extent, *shapes[n][axis:])
    return f"{n} broadcast to {shape}", lambda values: jnp.broadcast_to(
        jnp.expand_dims(values[n], axis), shape
    )


def _transposed(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    axes = draw(st.permutations(range(len(shapes[n]))))
    return f"{n} transposed {axes}", lambda values: jnp.transpose(values[n], axes)


def _reshaped(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    size = int(np.prod(shapes[n]))
    first = draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0]))
    shape = draw(st.sampled_from([(size,), (first, size // first), (1, first, size // first, 1)]))
    return f"{n} reshaped to {shape}", lambda values: values[n].reshape(shape)


def _sliced(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    def along(extent: int) -> slice:
        first = draw(st.integers(0, extent - 1))
        last = draw(st.integers(first, extent - 1))
        step = draw(st.integers(1, 2))
        if draw(st.booleans()):
            return slice(last, first - 1 if first else None, -step)
        return slice(first, last + 1, step)

    where = tuple(map(along, shapes[n]))
    return f"{n}[{where}]", lambda values: values[n][where]


def _indexed(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    axis = _axis(draw, shapes[n])
    if axis is None:
        return None
    places = draw(st.lists(st.integers(-shapes[n][axis], shapes[n][axis] - 1), max_size=4))
    which: Any = np.asarray(places) if places else 0
    where = (slice(None),) * axis + (which,)
    return f"{n} at {which} along {axis}", lambda values: values[n][where]


def _joined(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    alike = draw(st.lists(st.sampled_from([k for k, x in enumerate(shapes) if x == shapes[n]])))
    parts = [n, *alike[:2]]
    axis = _axis(draw, shapes[n])
    if axis is None or draw(st.booleans()):
        where = axis or 0
        return f"stack {parts} at {where}", lambda values: jnp.stack(
            [values[k] for k in parts], where
        )
    return f"concatenate {parts} along {axis}", lambda values: jnp.concatenate(
        [values[k] for k in parts], axis
    )


def _padded(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    widths = [(draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in shapes[n]]
    return f"{n} padded {widths}", lambda values: jnp.pad(values[n], widths)


def _scanned(draw: Draw, shapes: Sequence[Shape], n: int) -> Step | None:
    if not shapes[n]:
        return None
    reverse = draw(st.booleans())

    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.sin(carry + x)
        return carry, carry * x

    def step(values: Sequence[jax.Array]) -> jax.Array:
        carry, made = jax.lax.scan(
            body, jnp.ones_like(values[n][0]), values[n], reverse=reverse
        )
        return made + carry

    return f"scan of {n}", step


_STEPS = [
    _table,
    _contracted,
    _matmul,
    _unary,
    _binary,
    _reduced,
    _along,
    _broadcast,
    _transposed,
    _reshaped,
    _sliced,
    _indexed,
    _joined,
    _padded,
    _scanned,
]


@st.composite
def elements(draw: st.DrawFn, most_steps: int = 6) -> Element:
    """Any function of one element, of one to three arguments."""
    dtype = draw(st.sampled_from([np.float64, np.float64, np.float32]))
    extent = st.sampled_from([2, 3, 4, 1])
    shape = st.lists(extent, max_size=3).map(tuple)
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    arguments = tuple(shapes)
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, most_steps))):
        # The last values more often than others, so that functions become deep.
        n = max(draw(st.integers(0, len(shapes) - 1)), draw(st.integers(0, len(shapes) - 1)))
        step = draw(st.sampled_from(_STEPS))(draw, shapes, n)
        if step is None:
            continue
        name, function = step
        structs = [jax.ShapeDtypeStruct(x, dtype) for x in shapes]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            made = jax.eval_shape(lambda *xs, f=function: f(xs), *structs)
        assert made.dtype == dtype, name
        if 0 < made.size <= _LARGEST and len(made.shape) <= 4:
            steps.append(step)
            shapes.append(made.shape)
    axes = st.sampled_from([0, 0, -1, 1, None])
    in_axes = [axis if x or axis != 1 else 0 for x, axis in ((x, draw(axes)) for x in arguments)]
    if all(axis is None for axis in in_axes):
        in_axes[0] = 0
    out_axes = draw(st.sampled_from([0, -1, 1] if shapes[-1] else [0, -1]))
    return Element(arguments, tuple(steps), tuple(in_axes), out_axes, dtype)


def assert_rounding(found: Any, expected: Any, steps: int) -> None:
    """Equal but for rounding: each step adds few of its values up, and amplifies errors little."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        bound = 100 * (steps + 1) * float(jnp.finfo(y.dtype).eps)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound * (1 + np.max(np.abs(y), initial=0)))


def like(tree: Any, seed: int) -> Any:
    """Random arrays of the same shapes and dtypes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(-1, 1, x.shape), x.dtype), tree)


@given(elements())
@settings(max_examples=10)
def test_values_and_first_derivatives_of_random_functions(element: Element) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        arguments = element.arguments(0)
        event("float32" if element.dtype is np.float32 else "float64")

        def everything(transform: Function) -> Any:
            def function(arguments: Any, tangents: Any) -> Any:
                applied = element.applied(transform)
                values, pull = jax.vjp(applied, *arguments)
                _, dots = jax.jvp(applied, arguments, tangents)
                return values, dots, pull(like(values, 2))

            return jax.jit(function)(arguments, like(arguments, 1))

        expected = everything(jax.vmap)
        assert_rounding(everything(jm.fuse), expected, len(element.steps))


@given(elements(most_steps=4))
@settings(max_examples=3)
def test_second_derivatives_of_random_functions(element: Element) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        arguments = element.arguments(0)

        def product(transform: Function) -> Any:
            applied = element.applied(transform)

            def energy(*arguments: Any) -> jax.Array:
                values = applied(*arguments)
                weights = like(values, 2)
                parts = jax.tree.map(lambda w, x: jnp.sum(w * jnp.sin(x)), weights, values)
                return sum(jax.tree.leaves(parts))

            forward = lambda *xs: jax.jvp(jax.grad(energy), xs, like(arguments, 1))[1]  # noqa: E731
            return jax.jit(forward)(*arguments)

        assert_rounding(product(jm.fuse), product(jax.vmap), 10 * len(element.steps))


@given(elements(most_steps=3))
@settings(max_examples=4)
def test_random_functions_eagerly(element: Element) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        arguments = element.arguments(0)
        found, expected = (element.applied(f)(*arguments) for f in (jm.fuse, jax.vmap))
        assert_rounding(found, expected, len(element.steps))
