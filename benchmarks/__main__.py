"""Time ``jm.einsum`` against ``jnp.einsum`` on this machine.

Effective GB/s is the least traffic of an operation (each input read once, each output written
once) over the median time of a call; "% copy" compares it with a copy measured in the same run,
"% roof" with the larger of traffic at copy speed and flops at the speed of a large matrix product.
"""

import argparse
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxmagma as jm
from benchmarks import cases, measure, report
from benchmarks.workloads import Workload


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=("cpu", "gpu", "all"), help="default: the platform's")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases that match")
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: the one JAX picks")
    parser.add_argument("--quick", action="store_true", help="small arrays, few rounds")
    parser.add_argument("--megabytes", type=float, help="size of a case (cpu: 48, gpu: 1500)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the inputs")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="start no case after this (gpu: 150)"
    )
    parser.add_argument("--check", action="store_true", help="compare with extended precision, too")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.platform:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda,cpu"}[args.platform])
    jax.config.update("jax_enable_x64", True)

    started = time.perf_counter()
    gpu = measure.on_gpu()
    suite = args.suite or ("gpu" if gpu else "cpu")
    # On CPU a case is small enough for the allocator to hand its memory out again (glibc does below
    # 32 MB); beyond that, every call also pays for the kernel's clearing of fresh pages.
    megabytes = args.megabytes or (1500 if gpu else 48) / (8 if args.quick else 1)
    workloads = cases.build(suite, megabytes * 1e6, args.cases)
    if args.list or not workloads:
        print("\n".join(w.name for w in workloads) or f"no case matches {args.cases!r}")
        return 0 if workloads else 2

    seconds = (0.2 if args.quick else 0.4) if gpu else (0.3 if args.quick else 2.0)
    effort = measure.Effort(seconds, least=3, most=5 if args.quick else 21)
    limit = args.limit or (150 if gpu and suite == "gpu" else math.inf)
    beyond_caches = 512e6 if gpu else 4 * report.last_level_cache()

    facts = report.machine()
    print(
        f"{facts['device']} ({facts['platform']}), {facts['cores']} CPU cores, "
        f"jax {facts['versions']['jax']}, jaxmagma {facts['versions']['jaxmagma']}"
    )
    pool = measure.Pool(megabytes * 1e6, args.seed)
    ceilings = measure.ceilings(2 * beyond_caches, effort)
    print(
        f"copy {ceilings.copy / 1e9:.1f} GB/s, float64 matrix product "
        f"{ceilings.flops / 1e9:.0f} GFLOP/s, {megabytes:.0f} MB a case\n\n{report.HEADER}"
    )

    results, wrong, left_out = [], [], []
    for workload in workloads:
        if time.perf_counter() - started > limit:
            left_out.append(workload.name)
            continue
        outcome = run_case(workload, pool, effort, beyond_caches, extended=args.check)
        results.append(outcome)
        print(report.line(outcome, ceilings), flush=True)
        if not outcome.error < measure.TOLERANCE[workload.dtype]:
            wrong.append(outcome.case)

    print(f"\n{len(results)} cases in {time.perf_counter() - started:.0f} s")
    if left_out:
        print(f"left out after {limit:.0f} s: {' '.join(left_out)}")
    if args.json:
        settings = {
            "suite": suite,
            "cases": args.cases,
            "megabytes": megabytes,
            "seed": args.seed,
            "effort": asdict(effort),
            "left_out": left_out,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(report.as_json(results, ceilings, settings))
    if args.plot and results:
        report.plot(args.plot, results, ceilings, f"{facts['device']}, float64")
    if wrong:
        print(f"WRONG RESULTS: {' '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


def run_case(
    workload: Workload,
    pool: measure.Pool,
    effort: measure.Effort,
    beyond_caches: float,
    *,
    extended: bool,
) -> report.Result:
    """Checks the two ways against each other, then times them."""
    ways: dict[str, Any] = (
        {"jnp": jax.vmap, "jm": jm.fuse} if workload.fused else {"jnp": jnp.einsum, "jm": jm.einsum}
    )
    fns = {name: jax.jit(workload.make(way)) for name, way in ways.items()}
    sets = pool.sets(workload, beyond_caches)
    started = time.perf_counter()
    compiles, values = {}, {}
    for name, fn in fns.items():
        values[name] = jax.block_until_ready(fn(*sets[0]))
        compiles[name] = time.perf_counter() - started
        started = time.perf_counter()
    if measure.on_gpu() and workload.dtype in ("float32", "complex64"):
        # By default XLA rounds the operands of a product to tf32 there; jaxmagma does not.
        with jax.default_matmul_precision("highest"):
            values["jnp"] = jax.block_until_ready(fns["jnp"](*sets[0]))
    error = measure.error(values["jm"], values["jnp"])
    exact = measure.extended(workload, sets[0]) if extended else None
    extended_error = exact is not None and {
        name: measure.error_against(exact, value) for name, value in values.items()
    }
    del values
    timings = measure.compare(fns, sets, effort)
    return report.Result(
        workload.name,
        workload.dtype,
        workload.shapes,
        workload.least_bytes,
        workload.flops,
        timings["jm"],
        timings["jnp"],
        compiles["jm"],
        compiles["jnp"],
        error,
        extended_error or None,
    )


if __name__ == "__main__":
    sys.exit(main())
