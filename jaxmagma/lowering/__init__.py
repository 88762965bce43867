"""From a program to a native kernel: plans it and asks the platform's backend."""

import functools
import importlib

from jaxmagma import native
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.plan import plan
from jaxmagma.program import ElementProgram


@functools.lru_cache(maxsize=4096)
def lower(program: ElementProgram, extents: tuple[int, ...], platform: str) -> Kernel | Declined:
    """The kernel that runs ``program`` over batch axes of these extents, or why there is none."""
    for out in program.outputs:
        everywhere = program.batch[out.value] | set(out.batch)
        if len(everywhere) < program.batch_rank:
            return Declined("an output sums over a batch axis that its value does not depend on")
    module = native.load(platform)
    if isinstance(module, str):
        return Declined(module)
    backend = importlib.import_module(f"jaxmagma.lowering.{platform}")
    kernel: Kernel | Declined = backend.lower(plan(program), extents)
    return kernel
