"""The two ceilings of a device, measured: how fast it copies memory, and how fast it multiplies."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Roofline:
    """Ceilings of one device: bytes moved (read plus written) and operations, per second."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time for that much memory traffic and arithmetic."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


@functools.cache
def measure(device: jax.Device, dtype: np.dtype) -> Roofline:
    """Times a large copy and a large matrix product; takes well under a second."""
    on_cpu = device.platform == "cpu"
    count = (1 << 27 if on_cpu else 1 << 30) // np.dtype(dtype).itemsize
    order = 1024 if on_cpu else 4096
    real = jnp.zeros((), dtype).real.dtype
    # The caller may be in the middle of tracing a function.
    with jax.default_device(device), jax.ensure_compile_time_eval():
        values = jnp.linspace(0, 1, count, dtype=real).astype(dtype)
        matrix = jnp.linspace(-1, 1, order * order, dtype=real).astype(dtype)
        matrix = matrix.reshape(order, order)
        # Negation moves what a copy moves, and XLA does not optimise it away.
        copy = _time(jax.jit(jnp.negative), values)
        product = _time(jax.jit(lambda x: jnp.matmul(x, x, precision="highest")), matrix)
    complex_factor = 4 if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    return Roofline(2 * values.nbytes / copy, complex_factor * 2 * order**3 / product)


def _time(function: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    """Median seconds of a call, of several."""
    function(argument).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(argument).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
