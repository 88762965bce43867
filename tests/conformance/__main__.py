"""``python -m tests.conformance SEED...``: the functions of some seeds, and what came of them.

``--count N`` takes the N seeds from the first one on, of which only failures are printed, shrunk.
Functions are run in NumPy, operation after operation; ``--run kernels`` runs their programs as
kernels of the platform, ``--run jit`` compiles the whole, of ``fuse`` and of ``vmap``.
``JAX_ENABLE_X64=0`` has JAX as it is installed, without numbers of 64 bits.
"""

import argparse
import os
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import (
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context

from tests.conformance.composition import drawn
from tests.conformance.search import checked, configure


# Seeds of a task; and tasks of a process, whose memory grows with what it has compiled.
CHUNK, TASKS = 100, 10


class Checker:
    """A process that checks seeds, and is another one after some tasks.

    Not ``max_tasks_per_child``: when a process has done its tasks, the pool takes it for one that
    waits for work, starts no other, and waits forever (python/cpython#115634).
    """

    def __init__(self) -> None:
        self.pool: Executor | None = None
        self.tasks = 0

    def __call__(self, seeds: Sequence[int], until: float, run: str) -> tuple[int, list[str]]:
        if self.pool is None or self.tasks == TASKS:
            self.close()
            self.pool, self.tasks = ProcessPoolExecutor(1, get_context("spawn")), 0
        self.tasks += 1
        try:
            return self.pool.submit(checked, seeds, until, run).result()
        except BrokenProcessPool:
            self.close()
            return 0, [f"---- seeds {seeds[0]}..{seeds[-1]}: the process ended\n"]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new function after these")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--run", choices=("NumPy", "kernels", "jit"), default="NumPy")
    options = parser.parse_args()
    first = options.seeds[0]
    seeds = range(first, first + options.count) if options.count else options.seeds
    until, begin = time.time() + options.seconds, time.time()
    if not options.count:
        configure()
        for seed in seeds:
            print(replace(drawn(seed), run=options.run), "\n")
    # Many processes share the GPU, if there is one, and the cores.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    chunks = [seeds[k : k + CHUNK] for k in range(0, len(seeds), CHUNK)]
    total, wrong, left = 0, 0, set(seeds)
    checkers: queue.SimpleQueue[Checker] = queue.SimpleQueue()
    for _ in range(options.processes):
        checkers.put(Checker())

    def check(chunk: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """The seeds that were tried, and reports."""
        if time.time() > until:
            return [], []
        checker = checkers.get()
        try:
            done, reports = checker(chunk, until, options.run)
        finally:
            checkers.put(checker)
        return chunk[:done], reports

    with ThreadPoolExecutor(options.processes) as threads:
        for job in as_completed([threads.submit(check, chunk) for chunk in chunks]):
            done, reports = job.result()
            total, wrong = total + len(done), wrong + len(reports)
            left -= set(done)
            for report in reports:
                print(report, flush=True)
    while not checkers.empty():
        checkers.get().close()
    last = min(left, default=max(seeds) + 1) - 1
    missing = "" if last == max(seeds) or not total else f", and others beyond {last}"
    taken = f"{time.time() - begin:.0f} s"
    print(f"{total} compositions, seeds {first}..{last}{missing}, {wrong} wrong, {taken}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
