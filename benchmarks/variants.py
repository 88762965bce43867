"""Time a case with several choices of parameters of its kernel, such as ``quads=True,fetch=0``.

An empty one leaves all to the model. The parameters are those of ``Parameters`` in the
backend's lowering.
"""

import argparse
import ast
from concurrent.futures import ThreadPoolExecutor

import jax

from benchmarks import cases, measure
from benchmarks.workloads import Function, Workload
from jaxmagma import choices
from jaxmagma.choices import Choice
from jaxmagma.tune.device import cpu_cache_bytes


def choice(text: str) -> Choice:
    """What ``name=value,...`` asks for."""
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair)
    return Choice.of({name: ast.literal_eval(value) for name, value in pairs}, "variants")


def build(workload: Workload, text: str) -> Function:
    """A workload's function, compiled with the choice."""
    shapes = [jax.ShapeDtypeStruct(s, workload.dtype) for s in workload.shapes]
    with choices.using(choice(text)):
        compiled: Function = jax.jit(workload.functions()["jm"]).lower(*shapes).compile()
    return compiled


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("cases", metavar="REGEX", help="cases of all suites")
    parser.add_argument("choices", metavar="NAME=VALUE,...", nargs="*", default=[""])
    parser.add_argument("--megabytes", type=float, default=1000.0, help="size of a case")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each choice")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    pool = measure.Pool(args.megabytes * 1e6, seed=0)
    beyond_caches = 512e6 if measure.on_gpu() else 4 * cpu_cache_bytes()
    workloads = cases.build(["all"], args.megabytes * 1e6, args.cases)
    with ThreadPoolExecutor() as executor:
        compiled = [
            {text: executor.submit(build, workload, text) for text in args.choices}
            for workload in workloads
        ]
    for workload, waiting in zip(workloads, compiled, strict=True):
        fns = {text: one.result() for text, one in waiting.items() if one.exception() is None}
        sets = pool.sets(workload, jax.jit(pool.cutter(workload)), beyond_caches)
        timings = measure.compare(fns, sets, measure.Effort(args.seconds, 3, 15))
        for text, one in waiting.items():
            if text in timings:
                seconds = timings[text].median
                rate = workload.least_bytes / seconds / 1e9
                said = f"{rate:7.0f} GB/s {seconds * 1e3:9.4f} ms"
            else:
                said = repr(one.exception())
            print(f"{workload.name:<20} {said}  {text}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
