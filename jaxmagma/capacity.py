"""What a kernel holds: tiles that stay on a chip, and known arrays that become part of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.plan import Plan


# A tile program with more values than this per element does not stay on any chip.
LARGEST_TILES = 1 << 15
# Constants larger than this stay arguments: constant memory holds 64 KiB.
_LARGEST_CONSTANT = 8192


def too_large(planned: Plan) -> str | None:
    """Why the tiles of one element do not stay on any chip, if they do not."""
    if planned.on_chip > LARGEST_TILES:
        return f"one element has {planned.on_chip} values, too many to stay on chip"
    return None


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
