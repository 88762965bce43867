"""From a plan to one CUDA kernel, as readable source.

The kernel is a sequence of *stages* (sweeps of fibre operations, gemms and sums; see ``schedule``),
each handing tiles on to the next through shared memory. It is compiled for its exact sizes when XLA
builds the executable. The device functions it calls are the headers in ``cuda/``.

* One thread owns one fibre of a tile: inputs in registers, outputs by unrolled multiply-adds.
* Their matrix stands in the constant bank, from where it costs no register and no memory access.
  Its values are no part of the source: a constant is written there when the kernel is loaded, a
  traced array is copied there before each launch, which has a loaded copy of the kernel to itself
  meanwhile (``cuda/instances.h``). Both run the same kernel.
* A block of threads works on several elements. Global memory is read by the first stage that needs
  a tile and written by the one that makes it.
* An output summed over elements: each block sums a fixed share of the elements, and a second kernel
  adds the partial sums in a fixed order. A sum of products of two tiles is one long product (see
  ``schedule.accumulations``).

What stages are is in ``schedule.sweeps``, the passes from a plan to the kernel in ``blocks``;
``panels`` has those of another kind of kernel.
"""

from jaxmagma.lowering.cuda.parameters import SPACE as SPACE
from jaxmagma.lowering.cuda.parameters import Parameters as Parameters
from jaxmagma.lowering.cuda.plans.locality import planned as planned
from jaxmagma.lowering.cuda.rules import rules_of as rules_of
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans.factoring import alternatives as alternatives
from jaxmagma.plans.plan import Plan


ANY_GPU = Target("cuda")


def lower(
    plan: Plan,
    extents: tuple[int, ...],
    parameters: Parameters | None = None,
    target: Target = ANY_GPU,
) -> Kernel | Declined:
    """The CUDA kernel for ``plan``, with these parameters or the model's, or why there is none.

    ``extents`` of the batch axes only size the workspace.
    """
    # Where there is no GPU nobody waits for these modules.
    from jaxmagma.lowering.cuda.kernels import kernel_of

    return kernel_of(plan, extents, parameters, target)
