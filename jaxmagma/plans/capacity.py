"""What a kernel holds: tiles that stay on a chip, and known arrays that become part of it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.plans.plan import Plan, Product, Rearrange
from jaxmagma.programs.program import Contract, ElementProgram


# An operation on tiles with more values than this does not stay on any chip.
LARGEST_TILES = 1 << 15
# Constants larger than this stay arguments: constant memory holds 64 KiB.
_LARGEST_CONSTANT = 8192


def too_large(planned: Plan) -> str | None:
    """Why the tiles of one element do not stay on any chip, if they do not.

    An operation has its operands and its result there at once.  Where all operations together have
    too many values, they can be several kernels; but libraries are better at large matrices.
    """
    most, first = 0, len(planned.program.inputs)
    for number, step in planned.numbered_steps():
        if isinstance(step, Product | Rearrange):
            # Without batch axes it is not known which operands are shared.
            made = {x for x in step.operands if planned.tiles[x].batched or x >= first}
            most = max(most, sum(planned.tiles[x].size for x in {number, *made}))
    if most > LARGEST_TILES:
        return f"one operation of an element has {most} values, too many to stay on chip"
    return None


def surely_fits(program: ElementProgram) -> bool:
    """Whether its contractions, each planned alone, have no tiles that are too large in any order.

    Of most programs that is seen without planning: a contraction of two tiles has none but these
    and its result, and those of a longer one have no more values than there are places of all of
    its labels. Three tiles are there at once.
    """
    first = len(program.inputs)
    for number, operation in enumerate(program.operations, start=first):
        if isinstance(operation, Contract):
            largest = max(math.prod(program.tiles[x]) for x in (number, *operation.operands))
            if len(operation.terms) > 2:
                largest = max(largest, math.prod(operation.extents.values()))
            if 3 * largest > LARGEST_TILES:
                return False
    return True


def traced_once() -> bool:
    """Whether the call is traced once and run often.

    ``grad`` and ``vmap`` alone trace at each call, and new constants would compile each time.
    """
    return isinstance(jnp.asarray(0.0), jax.core.Tracer)


def can_be_constant(array: Any) -> bool:
    """Whether an array is known, and small enough for the constants of a kernel."""
    if isinstance(array, jax.core.Tracer) or np.size(array) > _LARGEST_CONSTANT:
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable
