"""Whether ``jm.fuse`` gives what ``jax.vmap`` gives: values, types, derivatives, effects, errors.

Rounding is told from mistakes by vmap's own program: run again with random errors of rounding in
every equation (Monte Carlo arithmetic), it shows how far its results are determined.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

import jaxmagma as jm
from tests.conformance.composition import Composition, Transform
from tests.conformance.draw import kind
from tests.conformance.interpreter import Rounding, evaluated, kernels
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


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or its error; and what it did besides."""

    results: tuple[Array, ...] = ()
    error: Exception | None = None
    effects: tuple[str, ...] = ()
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
    return Outcome(made, error, tuple(sorted(map(repr, SEEN))), told)


# ---- Comparing -----------------------------------------------------------------------------------


def failure(composition: Composition) -> Failure | None:
    """What ``fuse`` does otherwise than ``vmap``."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, expected = (outcome(composition, t) for t in (jm.fuse, jax.vmap))
        if expected.error is not None and composition.derivative != "value":
            if type(found.error) is type(expected.error):
                return failure(replace(composition, derivative="value"))
        return _different(composition, found, expected)


# Where vmap itself fails, and fuse need not: lax.clamp by one bound that is mapped, and derivatives
# of it by a scalar bound, of products of integers, and, in some releases, of a selection among one.
FAULTS_OF_VMAP = (
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
    "Differentiation rule for 'nextafter' not implemented",
    "does not accept dtype complex",
    "callbacks do not support JVP",
    "Reverse-mode differentiation does not work for lax.while_loop",
)


def _different(composition: Composition, found: Outcome, expected: Outcome) -> Failure | None:
    if found.error is None:
        known = FAULTS_OF_VMAP + (OF_NO_VALUES if _has_empty(composition) else ())
        if any(x in str(expected.error) for x in known):
            return None
    if type(found.error) is not type(expected.error):

        def told(x: Exception | None) -> str:
            return "no error" if x is None else f"{type(x).__name__}: {str(x)[:400]}"

        return Failure("error", f"{told(found.error)}\n  vmap: {told(expected.error)}")
    if found.effects != expected.effects:
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
            return Failure(
                "weak type", f"{x.label} of {x.type}: {x.weak_type}, vmap: {y.weak_type}"
            )
    if all(_close(x.value, y.value) for x, y in pairs):
        return None
    for (x, y), spread in zip(pairs, _determined(composition, expected), strict=True):
        if not _close(x.value, y.value, spread, "value" not in x.label):
            text = f"{x.label}: {x.value.tolist()}\n  vmap: {y.value.tolist()}"
            return Failure(x.label.split("'")[1], text)
    return None


def _has_empty(composition: Composition) -> bool:
    """Whether some argument, or a literal of the function, has no values."""
    empty = any(0 in x.shape for x in composition.arguments)
    return empty or "np.array([]" in composition.source()


def _close(x: Any, y: Any, spread: np.ndarray | float = 0.0, derived: bool = False) -> bool:
    """Equal bit for bit, but for few errors of rounding and ``spread``.

    A derivative by what a result does not read is no zero times infinity: that, which is NaN, vmap
    may add where it does not see so much.  And which of NaN and infinity comes of products with
    infinities, their order decides.
    """
    dtype = y.dtype
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    undetermined = ~np.isfinite(spread)
    if kind(dtype) not in "fc":
        same = (np.asarray(x) == np.asarray(y)) | (np.asarray(spread) > 0)
        return bool(np.all(same | undetermined))
    a, b = (np.asarray(v).astype(np.complex128) for v in (x, y))
    epsilon, tiny = float(jnp.finfo(dtype).eps), 1e3 * float(jnp.finfo(dtype).tiny)
    with np.errstate(all="ignore"):
        allowed = 8 * epsilon * np.abs(b) + 64 * spread + tiny
        allowed = np.where(np.isfinite(allowed), allowed, 0)

        def alike(p: np.ndarray, q: np.ndarray) -> np.ndarray:
            if derived:
                undefined = (q != q) | (~np.isfinite(q) & ~np.isfinite(p))
            else:
                undefined = (q != q) & (p != p)
            return (p == q) | undefined | (np.abs(p - q) <= allowed)

        same = alike(a.real, b.real) & alike(a.imag, b.imag)
        if kind(dtype) == "c":  # which part is NaN and which infinite, no two products agree upon
            same |= ~np.isfinite(a) & ~np.isfinite(b)
    return bool(np.all(same | undetermined))


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


def _determined(composition: Composition, expected: Outcome) -> Sequence[Any]:
    """How far each result of vmap moves under random errors of rounding."""
    arrays = composition.arrays()
    closed = jax.make_jaxpr(whole(composition, jax.vmap))(arrays)
    leaves = jax.tree.leaves(arrays)
    exact = [np.asarray(x) for x in evaluated(closed, leaves)]
    spreads: list[Any] = [0.0] * len(exact)
    with np.errstate(all="ignore"):
        for seed in range(_RUNS):
            found = evaluated(closed, leaves, _roundings(np.random.default_rng(seed)))
            for n, (x, y) in enumerate(zip(found, exact, strict=True)):
                if y.dtype == jax.dtypes.float0:
                    continue
                wide = np.complex128 if kind(y.dtype) in "fc" else np.float64
                a, b = np.asarray(x).astype(wide), y.astype(wide)
                moved = np.where((a == b) | ((a != a) & (b != b)), 0, np.abs(a - b))
                spreads[n] = np.maximum(spreads[n], np.where(np.isnan(moved), np.inf, moved))
    return spreads


def _roundings(random: np.random.Generator) -> Rounding:
    """An error in every result; and, where sums are made inside, in every operand."""

    def rounding(equation: JaxprEqn, values: Sequence[Any], results: bool) -> Sequence[Any]:
        name = equation.primitive.name
        if name in _EXACT or (not results and name in _ONE_OPERATION):
            return values
        return [_noisy(x, random) for x in values]

    return rounding


def _noisy(x: Any, random: np.random.Generator) -> Any:
    """A value with an error of rounding, where it is not a short number, which would be exact."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or kind(dtype) not in "fc":
        return x
    epsilon = float(jnp.finfo(dtype).eps)
    values = np.asarray(x).astype(np.complex128 if kind(dtype) == "c" else np.float64)

    def error() -> np.ndarray:
        return np.where(random.random(values.shape) < 0.5, -1, 1) * epsilon

    with np.errstate(all="ignore"):
        noisy = values + np.abs(values) * error()
        if kind(dtype) == "c":
            noisy = noisy + 1j * np.abs(values) * error()
        bits = 6 if epsilon < 1e-4 else 2
        short = (np.abs(values) < 2**bits) & (values * 2**bits == np.round(values * 2**bits))
        return np.where(short | ~np.isfinite(values), values, noisy).astype(dtype)


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
