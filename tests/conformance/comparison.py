"""Whether ``jm.fuse`` gives what ``jax.vmap`` gives: values, types, derivatives, effects, errors.

Rounding is told from mistakes by vmap's own program: run again with random errors of rounding in
every equation (Monte Carlo arithmetic), it shows how far its results are determined.  Three more
references tell where vmap's result is another because something overflowed on the way, in one order
of operations and not in another, because XLA simplifies what it compiles, or because an index that
was promised to be in bounds is not: the same program with a wider range of exponents, compiled as a
whole, and with such an index moved inside.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

import jaxmagma as jm
from jaxmagma.jaxpr import aval, is_empty, nested
from tests.conformance.composition import Composition, Transform
from tests.conformance.draw import kind
from tests.conformance.interpreter import Rounding, evaluated, held, kernels, narrowed, wide_range
from tests.conformance.operations import SEEN


@dataclass(frozen=True)
class Failure:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Array:
    """A result, and what it is called."""

    label: str
    value: np.ndarray
    weak_type: bool

    @property
    def type(self) -> str:
        return f"{self.value.dtype}{list(self.value.shape)}"


# What a callback was called with, and which one.
Effect = tuple[str, list[np.ndarray]]


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or its error; and what it did besides."""

    results: tuple[Array, ...] = ()
    error: Exception | None = None
    effects: tuple[Effect, ...] = ()
    warned: frozenset[str] = frozenset()


# ---- Running -------------------------------------------------------------------------------------


def _direction(seed: int, x: Any) -> np.ndarray:
    random = np.random.default_rng(seed)
    made = random.normal(size=jnp.shape(x))
    if kind(x.dtype) == "c":
        made = made + 1j * random.normal(size=jnp.shape(x))
    return np.asarray(made).astype(x.dtype)


def whole(composition: Composition, transform: Transform) -> Callable[..., Any]:
    """Values and derivatives as a function of the arrays."""

    def run(arrays: dict[str, Any]) -> dict[str, Any]:
        active = {k: x for k, x in arrays.items() if kind(x.dtype) in "fc"}

        def values(active: dict[str, Any]) -> tuple[Any, Any]:
            found = composition.applied(transform, arrays | active)
            floats = [x for x in jax.tree.leaves(found) if kind(x.dtype) in "fc"]
            return floats, found

        if composition.derivative == "value" or not active:
            return {"value": values(active)[1]}
        tangents = {k: _direction(n, x) for n, (k, x) in enumerate(active.items())}
        if composition.derivative == "jvp":
            _, dots, found = jax.jvp(values, (active,), (tangents,), has_aux=True)
            return {"value": found, "tangent": dots}

        def gradient(active: dict[str, Any]) -> tuple[Any, Any]:
            floats, pull, found = jax.vjp(values, active, has_aux=True)
            return pull([_direction(n, x) for n, x in enumerate(floats)])[0], found

        if composition.derivative == "vjp":
            gradients, found = gradient(active)
            return {"value": found, "gradient": gradients}
        gradients, seconds, found = jax.jvp(gradient, (active,), (tangents,), has_aux=True)
        return {"value": found, "gradient": gradients, "second derivative": seconds}

    return run


def _labelled(results: Any) -> tuple[tuple[str, Any], ...]:
    paths, _ = jax.tree_util.tree_flatten_with_path(results)
    return tuple((jax.tree_util.keystr(path), x) for path, x in paths)


def _evaluated(run: Callable[..., Any], arrays: dict[str, Any], how: str) -> tuple[Array, ...]:
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(arrays)
    if how == "jit":
        results = jax.tree.leaves(jax.block_until_ready(jax.jit(run)(arrays)))
    else:
        with kernels() if how == "kernels" else contextlib.nullcontext():
            results = evaluated(closed, jax.tree.leaves(arrays))
    labels = [label for label, _ in _labelled(shapes)]
    return tuple(
        Array(label, np.asarray(x), aval.weak_type)
        for label, x, aval in zip(labels, results, closed.out_avals, strict=True)
    )


def outcome(composition: Composition, transform: Transform) -> Outcome:
    arrays = composition.arrays()
    SEEN.clear()
    run = whole(composition, transform)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            made = _evaluated(run, arrays, composition.run)
            jax.effects_barrier()
            error = None
        except Exception as caught:
            made, error = (), caught
    told = frozenset(f"{x.category.__name__}: {str(x.message)[:60]}" for x in warned)
    return Outcome(made, error, tuple(SEEN), told)


def element_alone(function: Any, in_axes: Any, out_axes: Any) -> Any:
    """The function of one element, of all elements' first."""

    def of_first(*args: Any, **kwargs: Any) -> Any:
        def first(axis: Any, x: Any) -> Any:
            return x if axis is None else jax.lax.index_in_dim(x, 0, axis, keepdims=False)

        axes = list(in_axes)
        if axes and isinstance(axes[0], dict):
            (tree,) = args
            return function(
                {
                    "first": first(axes[0]["first"], tree["first"]),
                    "others": [
                        first(a, x) for a, x in zip(axes[0]["others"], tree["others"], strict=True)
                    ],
                }
            )
        args = tuple(first(a, x) for a, x in zip(axes, args, strict=True))
        return function(*args, **{k: first(0, x) for k, x in kwargs.items()})

    return of_first


def _of_one(composition: Composition) -> Composition:
    """The same with an element to look at, without derivatives."""
    return replace(composition, derivative="value", elements=max(composition.elements, 1))


def _equations(composition: Composition) -> list[JaxprEqn]:
    """Those of the function of one element, with those inside of others."""
    one = _of_one(composition)
    return list(nested(jax.make_jaxpr(whole(one, element_alone))(one.arrays()).jaxpr))


# ---- Comparing -----------------------------------------------------------------------------------


def failure(composition: Composition) -> Failure | None:
    """What ``fuse`` does otherwise than ``vmap``."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, expected = (outcome(composition, t) for t in (jm.fuse, jax.vmap))
        if found.warned - expected.warned:
            jax.clear_caches()  # JAX warns when it traces, and what fuse has traced it does not
            expected = outcome(composition, jax.vmap)
        derived = composition.derivative != "value"
        if expected.error is not None and derived:
            if type(found.error) is type(expected.error):
                return failure(replace(composition, derivative="value"))
        different = _different(composition, found, expected)
        if different is not None and derived and _has_tangents_of_integers(composition):
            return failure(replace(composition, derivative="value"))
        return different


# Where vmap itself fails, and fuse need not: lax.clamp by one bound that is mapped, and derivatives
# of it by a scalar bound, of products of integers, and, in some releases, of a selection among one.
# And of a custom_vjp some results of which all elements share: fuse takes them for one of each
# element, whose cotangents count once each, as they do when elements come one after the other.
FAULTS_OF_VMAP = (
    "has a primal output that is shared across the batch",
    "clamp requires",
    "select cases must have the same shapes",
    "jax._src.ad_util.Zero",
    "tuple index out of range",
)
# What vmap rejects although there is no value that it could be about: of no values fuse knows all.
OF_NO_VALUES = (
    "but output was batched on axis",
    "can't apply forward-mode autodiff (jvp) to a custom_vjp function",
    "scatter_mul gradients are only implemented",
    "Differentiation rule for",
    "does not accept dtype complex",
    "callbacks do not support JVP",
    "Reverse-mode differentiation does not work for lax.while_loop",
    "scatter_apply JVP not implemented",
    "Slice size at index",
)


def _different(composition: Composition, found: Outcome, expected: Outcome) -> Failure | None:
    text = str(expected.error)
    # A result that differs from element to element has no place for all, which vmap does not reach.
    reached = found.error is None or "got axis spec None" in str(found.error)
    if reached and any(x in text for x in FAULTS_OF_VMAP):
        return None
    if found.error is None and any(x in text for x in OF_NO_VALUES) and _has_empty(composition):
        return None
    if type(found.error) is not type(expected.error):

        def told(x: Exception | None) -> str:
            return "no error" if x is None else f"{type(x).__name__}: {str(x)[:400]}"

        return Failure("error", f"{told(found.error)}\n  vmap: {told(expected.error)}")
    if not _same_effects(found.effects, expected.effects):
        _, effects, moved = _determined(composition)
        if not _same_effects(found.effects, effects, moved):
            return Failure("effects", f"{found.effects}\n  vmap: {expected.effects}")
    if extra := found.warned - expected.warned:
        return Failure("warning", "; ".join(extra))
    labels = [[x.label for x in outcome.results] for outcome in (found, expected)]
    if labels[0] != labels[1]:
        return Failure("tree", f"{labels[0]}\n  vmap: {labels[1]}")
    pairs = list(zip(found.results, expected.results, strict=True))
    for x, y in pairs:
        if x.type != y.type:
            return Failure("type", f"{x.label}: {x.type}\n  vmap: {y.type}")
        if "value" in x.label and x.weak_type != y.weak_type:
            if x.weak_type == _weak_types(composition).get(x.label):
                continue
            return Failure(
                "weak type", f"{x.label} of {x.type}: {x.weak_type}, vmap: {y.weak_type}"
            )
    if all(_close(x.value, y.value) for x, y in pairs):
        return None
    spreads = _determined(composition)[0]
    others: list[list[Reference]] | None = None
    solves = _factorises(composition)
    for n, (x, y) in enumerate(pairs):
        loose = solves or "value" not in x.label
        same = _alike(x.value, y.value, spreads[n], loose)
        if np.all(same):
            continue
        if others is None:
            others = [made(composition) for made in (_of_wide_range, _compiled, _clipped)]
        for reference in (made[n] for made in others):
            value = reference.value
            close = _alike(x.value, value, reference.spread, loose)
            same = same | (close & reference.counts)
        if not np.all(same):
            text = f"{x.label}: {x.value.tolist()}\n  vmap: {y.value.tolist()}"
            return Failure(x.label.split("'")[1], text)
    return None


@dataclass(frozen=True)
class Reference:
    """Another result that vmap may have, how far it moves, and which of its values count."""

    value: np.ndarray
    spread: Any
    counts: Any


def _of_wide_range(composition: Composition) -> list[Reference]:
    """As if nothing overflowed on the way; what is finite so, whatever the errors of rounding."""
    dtypes = [x.value.dtype for x in outcome(composition, jax.vmap).results]
    with wide_range():
        results, spreads, _ = _moved(composition)
        return [
            Reference(narrowed(x, dtype), spread, _is_finite(x) & np.isfinite(spread))
            for x, dtype, spread in zip(results, dtypes, spreads, strict=False)
        ]


def _is_finite(x: np.ndarray) -> Any:
    return np.isfinite(x) if x.dtype.kind in "fc" else np.True_


def _compiled(composition: Composition) -> list[Reference]:
    """As XLA compiles it: some of a value's operations are left out then, such as times one."""
    found = outcome(replace(composition, run="jit"), jax.vmap)
    spreads = _determined(composition)[0]
    return [
        Reference(x.value, spread, np.isfinite(spread))
        for x, spread in zip(found.results, spreads, strict=False)
    ]


def _clipped(composition: Composition) -> list[Reference]:
    """As if indices that are promised to be in bounds were moved there.

    JAX says that derivatives mean nothing where the promise is not kept.
    """
    from_any = GatherScatterMode.from_any

    def clipped(mode: Any) -> GatherScatterMode:
        promised = from_any(mode) == GatherScatterMode.PROMISE_IN_BOUNDS
        return GatherScatterMode.CLIP if promised else from_any(mode)

    jax.clear_caches()
    with mock.patch.object(GatherScatterMode, "from_any", clipped):
        found = outcome(composition, jax.vmap)
        spreads = _determined(composition)[0]
    jax.clear_caches()
    return [
        Reference(x.value, spread, "value" not in x.label)
        for x, spread in zip(found.results, spreads, strict=False)
    ]


def _factorises(composition: Composition) -> bool:
    """Whether matrices are factorised: their solutions are finite where all of them are."""
    names = {equation.primitive.name for equation in _equations(composition)}
    return not names.isdisjoint({"lu", "triangular_solve", "cholesky", "eigh", "svd", "qr"})


def _has_empty(composition: Composition) -> bool:
    """Whether something that the function computes with has no values."""
    return any(
        is_empty(aval(x))
        for equation in _equations(composition)
        for x in (*equation.invars, *equation.outvars)
        if hasattr(aval(x), "shape")
    )


def _has_tangents_of_integers(composition: Composition) -> bool:
    """Whether JAX derives integers: a product of floating-point numbers, if it is to be one.

    What becomes of these tangents depends on what they go through, and is no derivative.
    """
    return any(
        equation.params.get("out_dtype") is not None
        and kind(equation.params["out_dtype"]) in "iu"
        and any(kind(aval(x).dtype) in "fc" for x in equation.invars)
        for equation in _equations(composition)
    )


def _weak_types(composition: Composition) -> dict[str, bool]:
    """Those of the results of one element.

    JAX batches some operations as others, which have the weak types of other operands.
    """
    one = _of_one(composition)
    closed, shapes = jax.make_jaxpr(whole(one, element_alone), return_shape=True)(one.arrays())
    labels = [label for label, _ in _labelled(shapes)]
    return {k: x.weak_type for k, x in zip(labels, closed.out_avals, strict=True)}


def _same_effects(
    found: Sequence[Effect], expected: Sequence[Effect], moved: Sequence[Any] | None = None
) -> bool:
    """Whether as many callbacks of each kind saw the same, in whatever order."""
    left = list(zip(expected, moved or [[0.0] * len(xs) for _, xs in expected], strict=True))
    for name, values in found:
        for n, ((other, own), spreads) in enumerate(left):
            types = [[(x.shape, x.dtype) for x in xs] for xs in (values, own)]
            if (name, types[0]) == (other, types[1]) and all(map(_close, values, own, spreads)):
                del left[n]
                break
        else:
            return False
    return not left


def _close(x: Any, y: Any, spread: np.ndarray | float = 0.0) -> bool:
    return bool(np.all(_alike(x, y, spread)))


def _alike(x: Any, y: Any, spread: np.ndarray | float = 0.0, loose: bool = False) -> Any:
    """Which values are equal bit for bit, but for few errors of rounding and ``spread``.

    If ``loose``, for derivatives and solutions of linear systems: what does not depend on an
    infinite value is no zero times infinity, which is NaN, and which vmap may add where it does not
    see so much.  And which of NaN and infinity comes of products with infinities, their order
    decides.
    """
    dtype = y.dtype
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return np.True_
    undetermined = ~np.isfinite(spread)
    if kind(dtype) not in "fc":
        same = (np.asarray(x) == np.asarray(y)) | (np.asarray(spread) > 0)
        return same | undetermined
    a, b = (np.asarray(v).astype(np.complex128) for v in (x, y))
    epsilon, tiny = float(jnp.finfo(dtype).eps), 1e3 * float(jnp.finfo(dtype).tiny)
    with np.errstate(all="ignore"):
        allowed = 8 * epsilon * np.abs(b) + 64 * spread + tiny
        allowed = np.where(np.isfinite(allowed), allowed, 0)

        def alike(p: np.ndarray, q: np.ndarray) -> np.ndarray:
            if loose:
                undefined = (q != q) | (~np.isfinite(q) & ~np.isfinite(p))
            else:
                undefined = (q != q) & (p != p)
            return (p == q) | undefined | (np.abs(p - q) <= allowed)

        same = alike(a.real, b.real) & alike(a.imag, b.imag)
        if kind(dtype) == "c":  # which part is NaN and which infinite, no two products agree upon
            same |= ~np.isfinite(a) & ~np.isfinite(b)
    return same | undetermined


# ---- How far results are determined --------------------------------------------------------------

# Their results are exact, whatever their operands.
_EXACT = set(
    """broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice gather
    concatenate stack unstack split pad tile dynamic_update_slice scatter copy copy_p neg abs sign
    max min select_n clamp stop_gradient optimization_barrier reduce_max reduce_min cummax cummin
    argmax argmin sort eq ne lt le gt ge floor ceil round is_finite real imag conj complex iota
    top_k eq_to lt_to le_to device_put and or not xor pvary""".split()
)
# Their results have one error of rounding; there is none inside.
_ONE_OPERATION = {"add", "sub", "mul", "div", "add_any"}
_RUNS = 6


def _determined(composition: Composition) -> tuple[list[Any], list[Effect], list[list[Any]]]:
    """How far each result of vmap moves under random errors of rounding.

    And what callbacks see, and how far that moves.
    """
    results, spreads, effects = _moved(composition)
    seen = iter(spreads[len(results) :])
    return spreads, effects, [[next(seen) for _ in values] for _, values in effects]


def _moved(composition: Composition) -> tuple[list[np.ndarray], list[Any], list[Effect]]:
    """The results of vmap, how far they and what callbacks see move, and what these see."""
    arrays = composition.arrays()
    closed = jax.make_jaxpr(whole(composition, jax.vmap))(arrays)
    leaves = jax.tree.leaves(arrays)
    dtypes = [x.dtype for x in closed.out_avals]

    def run(rounding: Rounding | None = None) -> list[np.ndarray]:
        SEEN.clear()
        made = [np.asarray(x) for x in evaluated(closed, leaves, rounding)]
        jax.effects_barrier()
        return made + [x for _, values in SEEN for x in values]

    def own(found: Sequence[np.ndarray]) -> list[np.ndarray]:
        made = [narrowed(x, dtype) for x, dtype in zip(found, dtypes, strict=False)]
        return [*made, *found[len(dtypes) :]]

    results, effects = run(), list(SEEN)
    exact = own(results)
    spreads: list[Any] = [0.0] * len(exact)
    with np.errstate(all="ignore"):
        for seed in range(_RUNS):
            found = own(run(_roundings(np.random.default_rng(seed))))
            for n, (x, y) in enumerate(zip(found, exact, strict=False)):
                if y.dtype == jax.dtypes.float0 or x.shape != y.shape:
                    continue
                wide = np.complex128 if kind(y.dtype) in "fc" else np.float64
                a, b = x.astype(wide), y.astype(wide)
                moved = np.where((a == b) | ((a != a) & (b != b)), 0, np.abs(a - b))
                spreads[n] = np.maximum(spreads[n], np.where(np.isnan(moved), np.inf, moved))
    return results[: len(dtypes)], spreads, effects


def _roundings(random: np.random.Generator) -> Rounding:
    """An error in every result; and, where sums are made inside, in every operand.

    Sums and products of many values are made in some order, on which it depends what overflows.
    And XLA leaves out zeros that are added, which would take the sign of others.
    """

    def rounding(equation: JaxprEqn, values: Sequence[Any], results: bool) -> Sequence[Any]:
        name = equation.primitive.name
        if name in ("reduce_sum", "reduce_prod") and not results:
            values = [np.asarray(x) for x in values]
            for axis in equation.params["axes"]:
                values = [random.permutation(x, axis) for x in values]
        if name in ("add", "add_any") and not results and random.random() < 0.5:
            return [np.where(x == 0, -np.abs(x), x) for x in map(np.asarray, values)]
        if name in _EXACT or (not results and name in _ONE_OPERATION):
            return values
        variables = equation.outvars if results else equation.invars
        return [
            _noisy(x, getattr(aval(v), "dtype", None), random)
            for x, v in zip(values, variables, strict=True)
        ]

    return rounding


def _noisy(x: Any, dtype: Any, random: np.random.Generator) -> Any:
    """A value with an error of rounding, where it is not a short number, which would be exact."""
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or kind(dtype) not in "fc":
        return x
    epsilon = float(jnp.finfo(dtype).eps)
    values = np.asarray(held(x, dtype))
    if values.dtype.kind != "c" and values.dtype != np.longdouble:
        values = values.astype(np.float64)
    elif values.dtype == np.complex64:
        values = values.astype(np.complex128)

    def error() -> np.ndarray:
        return np.where(random.random(values.shape) < 0.5, -1, 1) * epsilon

    with np.errstate(all="ignore"):
        noisy = values + np.abs(values) * error()
        if kind(dtype) == "c":
            noisy = noisy + 1j * np.abs(values) * error()
        bits = 6 if epsilon < 1e-4 else 2
        short = (np.abs(values) < 2**bits) & (values * 2**bits == np.round(values * 2**bits))
        made = np.where(short | ~np.isfinite(values), values, noisy)
        return made.astype(np.asarray(held(x, dtype)).dtype)


# ---- Shrinking -----------------------------------------------------------------------------------


def shrunk(composition: Composition, found: Failure, most: int = 60) -> tuple[Composition, Failure]:
    """A simple composition that fails in the same way."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in composition.smaller():
            tries += 1
            if tries > most:
                return composition, found
            try:
                again = failure(smaller)
            except Exception:
                continue
            if again is not None and again.kind == found.kind:
                composition, found, progress = smaller, again, True
                break
    return composition, found
