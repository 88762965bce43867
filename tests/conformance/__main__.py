"""``python -m tests.conformance SEED...``: the functions of some seeds, and what came of them.

``--count N`` takes the N seeds from the first one on, of which only failures are printed, shrunk.
Functions are run in NumPy, operation after operation; ``--run kernels`` runs their programs as
kernels of the platform, ``--run jit`` compiles the whole, of ``fuse`` and of ``vmap``.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from tests.conformance.composition import drawn
from tests.conformance.search import checked, configure


# Seeds of a task; and tasks of a process, whose memory grows with what it has compiled.
CHUNK, TASKS = 100, 10


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
    with ProcessPoolExecutor(
        options.processes, get_context("spawn"), max_tasks_per_child=TASKS
    ) as pool:
        jobs = {pool.submit(checked, chunk, until, options.run): chunk for chunk in chunks}
        for job in as_completed(jobs):
            if time.time() > until:
                for waiting in jobs:
                    waiting.cancel()
            if job.cancelled():
                continue
            done, reports = job.result()
            total, wrong = total + done, wrong + len(reports)
            left -= set(jobs[job][:done])
            for report in reports:
                print(report, flush=True)
    last = min(left, default=max(seeds) + 1) - 1
    missing = "" if last == max(seeds) or not total else f", and others beyond {last}"
    taken = f"{time.time() - begin:.0f} s"
    print(f"{total} compositions, seeds {first}..{last}{missing}, {wrong} wrong, {taken}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
