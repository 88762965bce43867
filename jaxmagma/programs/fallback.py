"""Why plain JAX computes a call, or a part of it, and how to hear of it."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class PlainCall:
    """Why plain JAX computes a call."""

    reason: str


SYMBOLIC = "an extent is symbolic"


def is_symbolic(extents: Iterable[Any]) -> bool:
    """Whether one is a variable of ``jax.export``, by which nothing can be decided."""
    return not all(isinstance(x, int) for x in extents)


class _Listener:
    def __init__(self) -> None:
        self.calls: list[PlainCall] = []


# A new listener makes `jit` trace anew; what it traced before, it would not call again.
_listener = jax.make_user_context(None)


@contextlib.contextmanager
def plain_calls() -> Iterator[list[PlainCall]]:
    """Collects the calls in its body that are left to plain JAX."""
    listener = _Listener()
    with _listener(listener):
        yield listener.calls


def tell(call: PlainCall) -> None:
    """Tells who listens of a call that is left to plain JAX."""
    if (listener := _listener.value) is not None:
        listener.calls.append(call)
