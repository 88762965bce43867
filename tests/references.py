"""What plain JAX says of the same function."""

from collections.abc import Callable
from typing import Any

import jax

import jaxmagma as jm


Function = Callable[..., Any]


def both(made: Callable[[Function], Function], *arguments: Any) -> tuple[Any, Any]:
    """The results of ``made(jm.fuse)``, compiled as a whole, and of ``made(jax.vmap)``.

    Plain JAX computes operation by operation: those of what is written out are few and used often,
    where XLA would compile each large function for longer than some elements take.
    """
    return jax.jit(made(jm.fuse))(*arguments), made(jax.vmap)(*arguments)
