"""Timing of several functions on the same random inputs.

Inputs are slices of one pool of random numbers, made on the device. A function runs on several
sets of inputs in turn, enough of them that none is still in a cache when its turn comes again.
Functions that are compared run alternately, and the medians are compared.

Everything that a case runs is compiled beforehand, so that the cases ahead can be compiled side by
side while nothing is timed.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import Timing
from benchmarks.workloads import Function, Workload


Inputs = tuple[jax.Array, ...]

# A GPU that works without a pause reaches its power limit in seconds, and lowers its clocks. After
# each round it rests for so many times as long.
REST = 2


@dataclass(frozen=True)
class Effort:
    """How long to time each function: seconds, and the least and most rounds."""

    seconds: float
    least: int
    most: int


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


# ---- Inputs ----------------------------------------------------------------------------------


class Pool:
    """Random numbers in (-1, 1), from which inputs are cut."""

    def __init__(self, total_bytes: float, seed: int) -> None:
        self.size = int(total_bytes * 1.1) // 8
        draw = jax.jit(
            lambda key: jax.random.uniform(key, (self.size,), jnp.float64, minval=-1.0, maxval=1.0)
        )
        self.values = draw(jax.random.key(seed)).block_until_ready()
        self._offset = 0

    def cutter(self, workload: Workload) -> Function:
        """Makes a workload's inputs of the pool, from an offset on."""

        def cut(values: jax.Array, offset: jax.Array) -> Inputs:
            numbers = tuple(
                self._cut(values, offset + 1_000_003 * k, shape, workload.dtype)
                for k, shape in enumerate(workload.shapes)
            )
            return workload.given(*numbers) if workload.given else numbers

        return cut

    def _cut(
        self, values: jax.Array, offset: jax.Array, shape: Sequence[int], dtype: str
    ) -> jax.Array:
        real = np.dtype(dtype).kind != "c"
        count = math.prod(shape) * (1 if real else 2)
        # An argument larger than the pool repeats it.
        chunk = min(count, self.size)
        part = jax.lax.dynamic_slice_in_dim(values, offset % max(1, self.size - count), chunk)
        part = jnp.resize(part, (count,)) if count > chunk else part
        if not real:
            part = jax.lax.complex(*jnp.split(part, 2))
        return part.astype(dtype).reshape(tuple(shape))

    def sets(self, workload: Workload, cut: Function, beyond_caches: float) -> list[Inputs]:
        """As many sets of inputs as exceed every cache together."""
        one = max(1, workload.input_bytes)
        count = 1 if workload.in_cache else max(1, min(32, math.ceil(beyond_caches / one)))
        found = []
        for _ in range(count):
            self._offset += 7_000_003
            found.append(cut(self.values, jnp.asarray(self._offset)))
        return found


# ---- Compiling -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A workload with everything compiled that measuring it needs."""

    workload: Workload
    cut: Function
    fns: dict[str, Function]  # "jm", and those of its peers that compile
    first_rows: Function | None  # of inputs and result; None where numpy cannot compute them
    difference: Function | None  # None where there are no peers


ROWS = 2  # compared with extended precision


def prepare(workload: Workload, pool: Pool, peers: Sequence[str]) -> Prepared | Exception:
    """Compiles jaxmagma's function, the peers', and what surrounds them."""
    inputs = workload.arguments
    try:
        functions = workload.functions()
        cut = _compile(pool.cutter(workload), pool.values, jnp.asarray(0))
        lowered = jax.jit(functions["jm"]).lower(*inputs)
        result = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)
        fns: dict[str, Function] = {"jm": lowered.compile()}
        numpy_can = workload.leading and workload.batched is not None
        rows = functools.partial(_first_rows, workload.shared)
        first_rows = _compile(rows, inputs, result) if numpy_can else None
        difference = _compile(_difference, result, result) if peers else None
    except Exception as exception:
        return exception
    for name in peers:
        if name in functions:
            try:
                fns[name] = _compile(functions[name], *inputs)
            except Exception as exception:
                print(f"{workload.name}: {name} left out, {reason(exception)}", flush=True)
    return Prepared(workload, cut, fns, first_rows, difference)


def _first_rows(shared: Sequence[bool], inputs: Any, result: Any) -> Any:
    cut = [x if whole else x[:ROWS] for x, whole in zip(inputs, shared, strict=True)]
    return cut, result[:ROWS]


def prepare_all(
    workloads: Sequence[Workload], pool: Pool, peers: Sequence[str], threads: int
) -> list[Prepared | Exception]:
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(lambda w: prepare(w, pool, peers), workloads))


def _compile(fn: Function, *args: Any) -> Function:
    compiled: Function = jax.jit(fn).lower(*args).compile()
    return compiled


def reason(exception: Exception) -> str:
    return f"{type(exception).__name__}: {str(exception).splitlines()[0] if str(exception) else ''}"


# ---- Timing ----------------------------------------------------------------------------------


def _run(fn: Function, inputs: Iterator[Inputs], calls: int) -> float:
    """Seconds for one call. A GPU is given all calls at once, a CPU one after the other."""
    wait_each, last = not on_gpu(), None
    start = time.perf_counter()
    for args in itertools.islice(inputs, calls):
        last = fn(*args)
        if wait_each:
            jax.block_until_ready(last)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls


def compare(fns: Mapping[str, Function], sets: list[Inputs], effort: Effort) -> dict[str, Timing]:
    """Times compiled functions alternately; each gets the seconds of ``effort``."""
    inputs = {name: itertools.cycle(sets) for name in fns}
    calls = {}
    # Many calls make the time of one dispatch, and of waiting at the end, disappear.
    enough = 0.015 if on_gpu() else 0.002
    for name, fn in fns.items():
        once = min(_run(fn, inputs[name], 1) for _ in range(2))
        calls[name] = max(1, min(1000, math.ceil(enough / once)))
        if on_gpu() and calls[name] > 1:  # The first estimate held a dispatch and a wait per call.
            once = _run(fn, inputs[name], calls[name])
            calls[name] = max(1, min(1000, math.ceil(enough / once)))

    seconds: dict[str, list[float]] = {name: [] for name in fns}

    def wanted(name: str) -> bool:
        spent = sum(seconds[name]) * calls[name]
        rounds = len(seconds[name])
        return rounds < effort.least or (rounds < effort.most and spent < effort.seconds)

    for done in range(effort.most):
        # Each goes first in half of the rounds.
        for name in [n for n in fns if wanted(n)][:: 1 if done % 2 else -1]:
            seconds[name].append(_run(fns[name], inputs[name], calls[name]))
            if on_gpu():
                time.sleep(REST * seconds[name][-1] * calls[name])
    return {name: _timing(seconds[name], calls[name]) for name in fns}


def _timing(seconds: list[float], calls: int) -> Timing:
    low, median, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    )
    return Timing(median, min(seconds), (low, high), calls * len(seconds))


# ---- Correctness -----------------------------------------------------------------------------

TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "complex128": 1e-12, "complex64": 1e-4}
# By default XLA rounds the operands of a product to tf32 on a GPU; jaxmagma does not.
TF32_TOLERANCE = 2e-2


def tolerance(dtype: str) -> float:
    """Of jaxmagma against what plain JAX computes with its default precision."""
    rounded = on_gpu() and dtype in ("float32", "complex64")
    return TF32_TOLERANCE if rounded else TOLERANCE[dtype]


def _difference(got: Any, wanted: Any) -> jax.Array:
    """The largest difference, relative to the largest value."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(b), initial=0.0)
        gap = jnp.max(jnp.abs(a - b), initial=0.0) / jnp.where(scale == 0, 1, scale)
        return jnp.where(jnp.all(jnp.isfinite(a)), gap, jnp.inf)

    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return jnp.max(jnp.stack([one(a, b) for a, b in leaves]))


def error(got: Any, wanted: Any) -> float:
    shapes = [[(a.shape, a.dtype) for a in jax.tree.leaves(x)] for x in (got, wanted)]
    return math.inf if shapes[0] != shapes[1] else float(jax.jit(_difference)(got, wanted))


def extended(workload: Workload, first_rows: Sequence[jax.Array]) -> np.ndarray:
    """The result for the first elements alone, in extended precision."""
    assert workload.leading and workload.batched is not None
    wide = np.clongdouble if np.dtype(workload.dtype).kind == "c" else np.longdouble
    function = workload.batched(numpy_einsum)
    return np.asarray(function(*(np.asarray(x).astype(wide) for x in first_rows)))


def numpy_einsum(spec: str, *operands: np.ndarray) -> np.ndarray:
    path = "greedy" if len(operands) > 2 else False
    return np.asarray(np.einsum(spec, *operands, optimize=path))


def error_against(exact: np.ndarray, got: jax.Array) -> float:
    """Relative to the largest value."""
    gap = np.abs(np.asarray(got).astype(exact.dtype) - exact)
    return float(np.max(gap) / np.max(np.abs(exact)))
