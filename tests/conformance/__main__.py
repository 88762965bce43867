"""``python -m tests.conformance SEED...``: the functions of some seeds, and what came of them.

``--count N`` takes seeds from the one given on, ``--seconds S`` stops after that time.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import jax


def checked(seeds: Iterable[int], until: float, compiled: bool) -> tuple[int, list[str]]:
    """How many of the seeds were tried, in order, and the reports of those that are wrong."""
    from tests.conformance.comparison import failure, shrunk
    from tests.conformance.composition import drawn

    jax.config.update("jax_enable_x64", True)
    reports, done = [], 0
    for seed in seeds:
        if time.time() > until:
            break
        done += 1
        composition = replace(drawn(seed), compiled=compiled)
        try:
            found = failure(composition)
            if found is not None:
                small, why = shrunk(composition, found)
                reports.append(f"---- seed {seed}: {why}\n{small}\n")
        except Exception:
            reports.append(
                f"---- seed {seed}: HARNESS {traceback.format_exc()[-1500:]}\n{composition}"
            )
        if done % 200 == 0:
            jax.clear_caches()
    return done, reports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--count", type=int, default=0, help="from the first seed on")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="under jit")
    parser.add_argument("--no-print", action="store_true", help="failures only")
    options = parser.parse_args()
    first = options.seeds[0]
    seeds = range(first, first + options.count) if options.count else options.seeds
    until, begin = time.time() + options.seconds, time.time()
    if not options.count and not options.no_print:
        from tests.conformance.composition import drawn

        jax.config.update("jax_enable_x64", True)
        for seed in seeds:
            print(drawn(seed), "\n")
    size = 50 if options.count else 1
    chunks = [seeds[k : k + size] for k in range(0, len(seeds), size)]
    total, wrong, last = 0, 0, first - 1

    def tell(chunk: Iterable[int], found: tuple[int, list[str]]) -> None:
        nonlocal total, wrong, last
        done, reports = found
        total, wrong = total + done, wrong + len(reports)
        if done:
            last = max(last, list(chunk)[done - 1])
        for report in reports:
            print(report, flush=True)

    if options.processes == 1:
        for chunk in chunks:
            tell(chunk, checked(chunk, until, options.compiled))
    else:
        context = get_context("spawn")
        with ProcessPoolExecutor(options.processes, context, max_tasks_per_child=40) as pool:
            jobs = [pool.submit(checked, chunk, until, options.compiled) for chunk in chunks]
            for chunk, job in zip(chunks, jobs, strict=True):
                tell(chunk, job.result())
    time_taken = time.time() - begin
    print(f"{total} compositions, seeds {first}..{last}, {wrong} wrong, {time_taken:.0f} s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
