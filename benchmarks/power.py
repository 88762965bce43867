"""What a GPU does at its power limit: bandwidths, clocks and watts while it works without a pause.

python -m benchmarks.power
"""

import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm


QUERY = "clocks.sm,power.draw,temperature.gpu,temperature.memory,clocks_event_reasons.active"

Call = Callable[[], jax.Array]


def mass(p: int, total_bytes: float = 1.5e9) -> tuple[Call, int]:
    """A mass operator on random data, and its least traffic."""
    n, q = p + 1, p + 2
    basis = np.random.default_rng(p).uniform(-1, 1, (q, n))
    one = 8 * (2 * n**3 + q**3)
    count = int(total_bytes / one)
    u = jax.random.uniform(jax.random.key(0), (count, n, n, n))
    d = jax.random.uniform(jax.random.key(1), (count, q, q, q))

    @jax.jit
    def apply(u: jax.Array, d: jax.Array) -> jax.Array:
        b = (basis, basis, basis)
        return jm.einsum("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", *b, d, *b, u)

    return lambda: apply(u, d), count * one


def seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        last = call()
    last.block_until_ready()
    return (time.perf_counter() - start) / calls


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    x = jax.random.uniform(jax.random.key(2), (100_000_000,))
    negate = jax.jit(jnp.negative)
    measured = {"copy": (lambda: negate(x), 2 * x.nbytes), "bk1/p3": mass(3), "bk1/p8": mass(8)}
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
