"""Timing of several functions on the same random inputs, and the ceilings of the machine.

Inputs are slices of one pool of random numbers, made on the device. A function runs on several
sets of inputs in turn, enough of them that none is still in a cache when its turn comes again.
Functions that are compared run alternately, and the medians are compared.
"""

import concurrent.futures
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import Workload


Function = Callable[..., Any]
Inputs = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds for each case, and the least and most rounds."""

    seconds: float
    least: int
    most: int


@dataclass(frozen=True)
class Timing:
    """Seconds for one call, over the rounds measured."""

    median: float
    best: float
    quartiles: tuple[float, float]
    calls: int


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run: bytes and float64 operations in a second."""

    copies: dict[str, float]
    flops: float

    @property
    def copy(self) -> float:
        return max(self.copies.values())

    def seconds(self, least_bytes: float, flops: float) -> float:
        return max(least_bytes / self.copy, flops / self.flops)


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

    def cut(self, shape: Sequence[int], dtype: str) -> jax.Array:
        real = np.dtype(dtype).kind != "c"
        count = math.prod(shape) * (1 if real else 2)

        @jax.jit
        def take(values: jax.Array, offset: jax.Array) -> jax.Array:
            # An argument larger than the pool repeats it.
            chunk = min(count, self.size)
            part = jax.lax.dynamic_slice_in_dim(values, offset, chunk)
            part = jnp.resize(part, (count,)) if count > chunk else part
            if not real:
                part = jax.lax.complex(*jnp.split(part, 2))
            return part.astype(dtype).reshape(tuple(shape))

        room = max(1, self.size - count)
        offset, self._offset = self._offset % room, self._offset + 1_000_003
        return take(self.values, jnp.asarray(offset))

    def inputs(self, workload: Workload) -> Inputs:
        return tuple(self.cut(shape, workload.dtype) for shape in workload.shapes)

    def sets(self, workload: Workload, beyond_caches: float) -> list[Inputs]:
        """As many sets of inputs as exceed every cache together."""
        one = max(1, workload.input_bytes)
        count = max(1, min(32, math.ceil(beyond_caches / one)))
        return [self.inputs(workload) for _ in range(count)]


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
    """Times jitted functions alternately; each has been compiled for these inputs."""
    inputs = {name: itertools.cycle(sets) for name in fns}
    calls = {}
    # Many calls make the time of one dispatch, and of waiting at the end, disappear.
    enough = 0.02 if on_gpu() else 0.002
    for name, fn in fns.items():
        once = min(_run(fn, inputs[name], 1) for _ in range(2))
        calls[name] = max(1, min(1000, math.ceil(enough / once)))
        if on_gpu():  # The first estimate held one dispatch and one wait per call.
            once = _run(fn, inputs[name], calls[name])
            calls[name] = max(1, min(1000, math.ceil(enough / once)))

    seconds: dict[str, list[float]] = {name: [] for name in fns}
    deadline = time.perf_counter() + effort.seconds
    for done in range(effort.most):
        if done >= effort.least and time.perf_counter() > deadline:
            break
        # Each goes first in half of the rounds.
        for name in list(fns)[:: 1 if done % 2 else -1]:
            seconds[name].append(_run(fns[name], inputs[name], calls[name]))
    return {name: _timing(seconds[name], calls[name]) for name in fns}


def _timing(seconds: list[float], calls: int) -> Timing:
    low, median, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    )
    return Timing(median, min(seconds), (low, high), calls * len(seconds))


# ---- Correctness -----------------------------------------------------------------------------

TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "complex128": 1e-12, "complex64": 1e-4}


@jax.jit
def _error(got: Any, wanted: Any) -> jax.Array:
    """The largest difference, relative to the largest value."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(b), initial=0.0)
        gap = jnp.max(jnp.abs(a - b), initial=0.0) / jnp.where(scale == 0, 1, scale)
        return jnp.where(jnp.all(jnp.isfinite(a)), gap, jnp.inf)

    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return jnp.max(jnp.stack([one(a, b) for a, b in leaves]))


def error(got: Any, wanted: Any) -> float:
    shapes = [[(a.shape, a.dtype) for a in jax.tree.leaves(x)] for x in (got, wanted)]
    return math.inf if shapes[0] != shapes[1] else float(_error(got, wanted))


def extended(workload: Workload, args: Inputs, rows: int = 16) -> np.ndarray | None:
    """The first rows of the result, in extended precision; None where they need all inputs."""
    if not workload.leading:
        return None

    def einsum(spec: str, *operands: np.ndarray) -> np.ndarray:
        path = "optimal" if len(operands) > 2 else False
        return np.asarray(np.einsum(spec, *operands, optimize=path))

    wide = np.clongdouble if np.dtype(workload.dtype).kind == "c" else np.longdouble
    cut = [
        np.asarray(a if shared else a[:rows]).astype(wide)
        for a, shared in zip(args, workload.shared, strict=True)
    ]
    return np.asarray(workload.make(einsum)(*cut))


def error_against(exact: np.ndarray, got: jax.Array) -> float:
    """Of the first rows, relative to their largest value."""
    gap = np.abs(np.asarray(got[: len(exact)]).astype(exact.dtype) - exact)
    return float(np.max(gap) / np.max(np.abs(exact)))


# ---- Ceilings --------------------------------------------------------------------------------


def ceilings(beyond_caches: float, effort: Effort) -> Ceilings:
    x = jnp.arange(int(beyond_caches) // 8, dtype=jnp.float64)
    copies = {"copy": jax.jit(jnp.copy), "negate": jax.jit(jnp.negative)}
    seconds = {name: t.median for name, t in compare(copies, [(x,)], effort).items()}
    if not on_gpu():
        # XLA's results are new pages of memory at each call; a loop in C would reuse them.
        seconds["memcpy"] = _threaded_copy(np.asarray(x))
    n = 4096 if on_gpu() else 1024
    square = jnp.full((n, n), 1.0) + x[:n]
    gemm = compare({"gemm": jax.jit(jnp.matmul)}, [(square, square)], effort)["gemm"].best
    return Ceilings({name: 2 * x.nbytes / t for name, t in seconds.items()}, 2 * n**3 / gemm)


def _threaded_copy(source: np.ndarray) -> float:
    """Seconds of memcpy, on as many of one to eight threads as are best."""
    target, best = np.empty_like(source), math.inf
    for threads in (1, 2, 4, 8):
        parts = list(zip(*(np.array_split(a, threads) for a in (target, source)), strict=True))
        with concurrent.futures.ThreadPoolExecutor(threads) as executor:
            for _ in range(5):
                start = time.perf_counter()
                list(executor.map(lambda pair: np.copyto(*pair), parts))
                best = min(best, time.perf_counter() - start)
    return best
