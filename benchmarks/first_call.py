"""How long the first call of a program takes, in a new process: cold, and with its kernel on disk.

``python -m benchmarks.first_call CASE...`` measures one process, and prints JSON. One call takes
half as long again as another at times, so what counts is the median of several processes.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jaxmagma as jm
from benchmarks import cases
from benchmarks.record import FirstCall
from benchmarks.workloads import Workload


CACHED_PROCESSES = 5
CASES = ("chain/n8", "chain/n24", "interp3d/p3", "bk1/p3", "bk1/p8", "bk3/p3", "bk3-grad/p3")


def measure(names: Sequence[str] = CASES) -> list[FirstCall]:
    """Runs one process with an empty cache, and others with the cache that it left."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAXMAGMA_CACHE_DIR": cache,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has most of the memory
            "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda,cpu"}[jax.default_backend()],
        }
        command = [sys.executable, "-m", "benchmarks.first_call", *names]
        cold, *cached = (
            json.loads(
                subprocess.run(
                    command,
                    env=environment,
                    cwd=Path(__file__).parent.parent,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            for _ in range(1 + CACHED_PROCESSES)
        )
    medians = {n: statistics.median(x[n]["jm"] for x in cached) for n in names}
    return [FirstCall(n, cold[n]["jm"], medians[n], cold[n]["jnp"]) for n in names]


def main(names: Sequence[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    # What only the very first call of all pays for is not what a new program costs.
    other = np.random.default_rng(0).normal(size=(100, 3, 3))
    jax.block_until_ready(jax.jit(lambda a: jm.einsum("eij,ejk->eik", a, a))(other))
    suites = ["bk", "chain", "interp", "gradients", "programs"]
    found = {w.name: w for w in cases.build(suites, 1e6)}
    print(json.dumps({name: _first_calls(found[name]) for name in names}))


def _first_calls(workload: Workload) -> dict[str, float]:
    rng = np.random.default_rng(0)
    args = [rng.uniform(-1, 1, shape).astype(workload.dtype) for shape in workload.shapes]
    if workload.given:
        args = [np.asarray(x) for x in workload.given(*args)]
    args = jax.block_until_ready(jax.device_put(args))
    seconds: dict[str, float] = {}
    functions = workload.functions()
    for name in [x for x in ("jm", "jnp") if x in functions]:
        gc.collect()  # what others have left behind is not what this one costs
        start = time.perf_counter()
        jax.block_until_ready(jax.jit(functions[name])(*args))
        seconds[name] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
