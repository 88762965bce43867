"""``jm.roofline``: the two ceilings of a device, measured."""

import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Roofline:
    """The ceilings of one device.

    Attributes:
      bytes_per_second: memory traffic of a large copy, bytes read plus bytes written.
      flops_per_second: operations of a large matrix product, a complex multiplication and addition
        counted as the eight real operations it is.
    """

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time for that much memory traffic and arithmetic."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


def roofline(dtype: DTypeLike = float, device: jax.Device | None = None) -> Roofline:
    """Measures how fast a device copies memory, and how fast it multiplies matrices.

    No kernel that moves ``nbytes`` and computes ``flops`` is expected to take less than
    ``roofline().seconds(nbytes, flops)``.  The copy is of 1.6 GB on a GPU and of 128 MB on a CPU,
    less where that much memory is not free; the product is of two matrices of order 8192 or 1024,
    in full precision (never tf32).

    Both are measured when first asked for, which takes a second or two, and remembered for the rest
    of the process.

    Args:
      dtype: of the matrices, floating or complex.  As everywhere in JAX, ``float`` is float64 if
        ``jax_enable_x64`` is set, else float32.
      device: by default the one on which JAX would compute.

    Returns:
      The :class:`Roofline`.

    Raises:
      TypeError: if ``dtype`` is not floating or complex.

    >>> import jaxmagma as jm
    >>> ceilings = jm.roofline("float32")
    >>> ceilings.seconds(nbytes=1e9, flops=0) == 1e9 / ceilings.bytes_per_second
    True
    """
    known = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(known, jnp.inexact):
        raise TypeError(f"roofline: dtype {known} is neither floating nor complex")
    # The caller may be in the middle of tracing a function.
    with jax.ensure_compile_time_eval():
        device = device or min(jnp.zeros(()).devices(), key=lambda x: x.id)
        with jax.default_device(device):
            return Roofline(_copy_rate(device), _product_rate(device, known))


@functools.cache
def _copy_rate(device: jax.Device) -> float:
    on_cpu = device.platform == "cpu"
    nbytes = 1 << 27 if on_cpu else 1_600_000_000
    memory = device.memory_stats() or {}
    if "bytes_limit" in memory:
        nbytes = min(nbytes, (memory["bytes_limit"] - memory["bytes_in_use"]) // 4)
    key = jax.random.key(0, impl="rbg")  # the fast one
    values = jax.random.bits(key, (max(1, nbytes // 4),), jnp.uint32)
    # Which of the two is faster depends on the device: one is its driver's, the other XLA's.
    seconds = [_time(jax.jit(copy), values) for copy in (jnp.copy, jnp.negative)]
    if on_cpu:  # XLA's results are new pages of memory at each call; a loop in C would reuse them.
        seconds.append(_threaded_copy(np.asarray(values)))
    return 2 * values.nbytes / min(seconds)


@functools.cache
def _product_rate(device: jax.Device, dtype: np.dtype) -> float:
    order = 1024 if device.platform == "cpu" else 8192
    # Random numbers: a GPU multiplies simple ones with less power, hence at a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (order, order), dtype)
    seconds = _time(jax.jit(functools.partial(jnp.matmul, precision="highest")), matrix, matrix)
    return (8 if jnp.issubdtype(dtype, jnp.complexfloating) else 2) * order**3 / seconds


def _time(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Median seconds of a call; a round has so many of them that waiting for it is free."""

    def one_round(calls: int) -> float:
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    jax.block_until_ready((arguments, function(*arguments)))
    calls = max(1, min(16, round(0.02 / one_round(1))))
    return statistics.median(one_round(calls) for _ in range(5))


def _threaded_copy(source: np.ndarray) -> float:
    """Seconds of memcpy, on as many of one to eight threads as are best."""
    target, best = np.empty_like(source), float("inf")
    for threads in (1, 2, 4, 8):
        parts = list(zip(*(np.array_split(a, threads) for a in (target, source)), strict=True))
        with concurrent.futures.ThreadPoolExecutor(threads) as executor:
            for _ in range(3):
                start = time.perf_counter()
                list(executor.map(lambda pair: np.copyto(*pair), parts))
                best = min(best, time.perf_counter() - start)
    return best
