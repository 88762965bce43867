"""What kernels take on other architectures than the one that is there; no GPU is needed.

``python -m benchmarks.architectures [REGEX]`` lowers cases for each of them, without a table, and
has NVRTC compile them. It prints registers of a thread, bytes that it spills, and kilobytes of
shared memory of a block; of programs with several kernels the most.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import cases
from benchmarks.workloads import Workload
from jaxmagma import native
from jaxmagma.lowering.cuda import lower, planned
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.tune.tuner import programs


ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120")
# Some of each kind.
CASES = (
    r"^(chain/n(8|24)|interp3d/p5|bk[13]/p[38]|bk5/p5|bk1-grad-all/p3|elasticity/p2|solid/p3|"
    r"euler/p3|convection/p3|tetrahedra/p2|tetrahedra-vector/p2|stiffness/p3|tensor-product/c32|"
    r"chain-f32/n8|bk3-c64/p3)$"
)


def taken(cuda: Any, workload: Workload, architecture: str) -> Iterator[tuple[int, int, int]]:
    """Registers, spilled bytes and kilobytes of shared memory of each kernel."""
    for program, extents in programs(workload.functions()["jm"], *workload.arguments):
        kernel = lower(planned(program), extents, target=Target("cuda", architecture))
        if isinstance(kernel, Kernel) and kernel.source:
            found = cuda.resources(cuda.compile(kernel.source, architecture))
            yield found["registers"], found["local"], kernel.attributes["shared_bytes"] >> 10


def main(pattern: str = CASES) -> None:
    jax.config.update("jax_enable_x64", True)
    cuda = native.load("cuda")
    if isinstance(cuda, str):
        raise SystemExit(cuda)
    print(f"{'':24}" + "".join(f"{x:>14}" for x in ARCHITECTURES))
    for workload in cases.build(["all"], 1e5, pattern):
        every = (list(taken(cuda, workload, x)) for x in ARCHITECTURES)
        most = (map(max, zip(*x, strict=True)) for x in every)
        columns = ("{:>5}{:>4}{:>4}K".format(*x) for x in most)
        print(f"{workload.name:24}" + "".join(columns), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
