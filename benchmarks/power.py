"""What a GPU does at its power limit: bandwidths, clocks and watts while it works without a pause.

python -m benchmarks.power
"""

import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks import measure, workloads


QUERY = "clocks.sm,power.draw,temperature.gpu,temperature.memory,clocks_event_reasons.active"

TOTAL_BYTES = 1.5e9

Call = Callable[[], jax.Array]


def mass(p: int, pool: measure.Pool) -> tuple[Call, int]:
    """A mass operator on random data, and its least traffic."""
    workload = workloads.constant(workloads.bk1(p, TOTAL_BYTES))
    apply = jax.jit(workload.functions()["jm"])
    (inputs,) = pool.sets(workload, jax.jit(pool.cutter(workload)), 0)
    return lambda: apply(*inputs), workload.least_bytes


def seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        last = call()
    last.block_until_ready()
    return (time.perf_counter() - start) / calls


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    pool = measure.Pool(TOTAL_BYTES, seed=0)
    x = jax.random.uniform(jax.random.key(2), (100_000_000,))
    negate = jax.jit(jnp.negative)
    measured = {"copy": (lambda: negate(x), 2 * x.nbytes)}
    measured |= {f"bk1/p{p}": mass(p, pool) for p in (3, 8)}
    for call, _ in measured.values():
        call().block_until_ready()
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < 14:
        rates = (f"{n} {b / seconds(f, 30) / 1e9:.0f} GB/s" for n, (f, b) in measured.items())
        line = ", ".join(rates)
        query = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
        state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        print(f"{now:5.1f} s  {line}  {state}", flush=True)
        until = time.perf_counter() + 1
        while time.perf_counter() < until:
            seconds(measured["bk1/p8"][0], 50)


if __name__ == "__main__":
    main()
