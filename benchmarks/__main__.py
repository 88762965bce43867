"""Time jaxmagma on this machine, against its ceilings and against plain JAX.

Effective GB/s is the least traffic of an operation (each input read once, each output written
once) over the median time of a call; "% copy" compares it with a copy measured in the same run,
"% roof" with the larger of traffic at copy speed and flops at the speed of a large matrix product
of the same dtype. "jnp" and "vmap" are how many times faster it is than jnp.einsum, and than
jax.vmap of a function of one element written by hand. "goal" is what this library sets out to
reach; the cases that fall short of it are listed at the end.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax

import jaxmagma as jm
from benchmarks import cases, first_call, goals, measure, report
from benchmarks.record import Result, Run, machine
from benchmarks.workloads import Workload
from jaxmagma.tune.device import cpu_cache_bytes


PEERS = ("jnp", "vmap")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    suites = "\n".join(
        f"  {name:<14}{(suite.__doc__ or '').splitlines()[0]}"
        for name, suite in cases.SUITES.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"suites:\n{suites}\n  first-call    A program's first call, cold and from disk.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--suite",
        nargs="+",
        choices=(*cases.SUITES, "first-call"),
        help="default: overview on a GPU, cpu on a CPU",
    )
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases that match")
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: the one JAX picks")
    parser.add_argument("--one-core", action="store_true", help="use one CPU core only")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=PEERS, help="what to compare with"
    )
    parser.add_argument(
        "--no-peer", dest="peers", action="store_const", const=(), help="compare with nothing"
    )
    parser.add_argument("--quick", action="store_true", help="small arrays, few rounds")
    parser.add_argument("--megabytes", type=float, help="size of a case (cpu: 48, gpu: 1500)")
    parser.add_argument(
        "--seconds", type=float, help="for each function of a case (cpu: 1, gpu: 0.1)"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the inputs")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="start no case after this"
    )
    parser.add_argument("--threads", type=int, help="that compile; default: one per core, 16")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.one_core:  # before JAX starts its threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.platform:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda,cpu"}[args.platform])
    jax.config.update("jax_enable_x64", True)

    started = time.perf_counter()
    gpu = measure.on_gpu()
    suites = args.suite or (["overview"] if gpu else ["cpu"])
    # On CPU a case is small enough for the allocator to hand its memory out again (glibc does below
    # 32 MB); beyond that, every call also pays for the kernel's clearing of fresh pages.
    megabytes = args.megabytes or (1500 if gpu else 48) / (8 if args.quick else 1)
    named = [s for s in suites if s != "first-call"]
    workloads = cases.build(named, megabytes * 1e6, args.cases)
    if args.list or not (workloads or "first-call" in suites):
        print("\n".join(w.name for w in workloads) or f"no case matches {args.cases!r}")
        return 0 if workloads else 2

    seconds = args.seconds or (0.1 if gpu else 1.0) / (4 if args.quick else 1)
    effort = measure.Effort(seconds, least=3, most=5 if args.quick else 15)
    run = Run(
        machine(),
        {
            "suites": suites,
            "cases": args.cases,
            "peers": list(args.peers),
            "megabytes": megabytes,
            "seed": args.seed,
            "effort": asdict(effort),
        },
    )
    facts = run.machine
    print(
        f"{facts['device']}" + (f", driver {facts['driver']}" if facts["driver"] else "") + ", "
        f"{facts['cores']} CPU cores, jax {facts['versions']['jax']}, "
        f"jaxmagma {facts['versions']['jaxmagma']} ({facts['commit'] or 'no commit'}), "
        f"{facts['date']}"
    )
    if workloads:
        _measure_cases(run, workloads, args, effort, megabytes, started)
    if "first-call" in suites:
        run.first_calls = first_call.measure()
    if args.json:
        run.save(args.json)
    print("\n".join(report.closing(run)))
    print(f"{len(run.results)} cases in {time.perf_counter() - started:.0f} s")
    if args.plot:
        report.plot(args.plot, run)
    return 1 if run.failures else 0


def _measure_cases(
    run: Run,
    workloads: list[Workload],
    args: argparse.Namespace,
    effort: measure.Effort,
    megabytes: float,
    started: float,
) -> None:
    beyond_caches = 512e6 if measure.on_gpu() else 4 * cpu_cache_bytes()
    ceilings = {dtype: jm.roofline(dtype) for dtype in dict.fromkeys(w.dtype for w in workloads)}
    for dtype, ceiling in ceilings.items():
        print(
            f"copy {ceiling.bytes_per_second / 1e9:.1f} GB/s, {dtype} matrix product "
            f"{ceiling.flops_per_second / 1e12:.4g} TFLOP/s"
        )
    pool = measure.Pool(megabytes * 1e6, args.seed)
    print(f"{megabytes:.0f} MB a case\n\n{report.HEADER}", flush=True)

    threads = args.threads or min(16, run.machine["cores"])
    batch = 4 * threads  # compiled side by side, then timed one by one
    for first in range(0, len(workloads), batch):
        if time.perf_counter() - started > args.limit:
            left_out = [w.name for w in workloads[first:]]
            print(f"left out after {args.limit:.0f} s: {' '.join(left_out)}")
            break
        some = workloads[first : first + batch]
        for workload, prepared in zip(
            some, measure.prepare_all(some, pool, args.peers, threads), strict=True
        ):
            try:
                if isinstance(prepared, Exception):
                    raise prepared
                result = run_case(prepared, pool, effort, beyond_caches, ceilings, run)
            except Exception as exception:  # the other cases are still worth measuring
                run.failures[workload.name] = measure.reason(exception)
                print(f"{workload.name:<32}FAILED: {run.failures[workload.name]}", flush=True)
                continue
            run.results[result.case] = result
            print(report.line(result, goals.judge(result, run.results)), flush=True)
        if args.json:  # so that a run that is cut short leaves what it has
            run.save(args.json)


class WrongResult(Exception):
    """What is timed does not compute what it should."""


def run_case(
    prepared: measure.Prepared,
    pool: measure.Pool,
    effort: measure.Effort,
    beyond_caches: float,
    ceilings: dict[str, jm.Roofline],
    run: Run,
) -> Result:
    """Checks the result, against extended precision and against each peer, then times all."""
    workload, fns = prepared.workload, dict(prepared.fns)
    sets = pool.sets(workload, prepared.cut, beyond_caches)
    value = fns["jm"](*sets[0])
    exact_error = error = None
    if prepared.first_rows:
        rows, of_value = prepared.first_rows(list(sets[0]), value)
        exact_error = measure.error_against(measure.extended(workload, rows), of_value)
        if not exact_error < measure.TOLERANCE[workload.dtype]:
            raise WrongResult(f"error {exact_error:.0e} against extended precision")
    for peer in [name for name in fns if name != "jm"]:
        try:
            wanted = jax.block_until_ready(fns[peer](*sets[0]))
        except Exception as exception:  # out of memory, say
            print(f"{workload.name}: {peer} left out, {measure.reason(exception)}", flush=True)
            del fns[peer]
            continue
        assert prepared.difference is not None
        error = max(error or 0.0, float(prepared.difference(value, wanted)))
        del wanted
        if not error < measure.tolerance(workload.dtype):
            raise WrongResult(f"error {error:.0e} against {peer}")
    del value
    ceiling = ceilings[workload.dtype]
    return Result(
        workload.name,
        workload.dtype,
        tuple(x.shape for x in jax.tree.leaves(workload.arguments)),
        workload.least_bytes,
        workload.real_flops,
        ceiling.bytes_per_second,
        ceiling.flops_per_second,
        measure.compare(fns, sets, effort),
        error,
        exact_error,
        run.machine["platform"],
        run.machine["device"],
        run.machine["cores"],
    )


if __name__ == "__main__":
    sys.exit(main())
