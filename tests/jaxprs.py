"""What a traced function holds, and what running it compiles."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.monitoring

from jaxmagma.primitives.primitive import program_p
from jaxmagma.programs.program import ElementProgram


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, nested ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def primitives(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The names of all primitives a function calls."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [equation.primitive.name for equation in equations(jaxpr)]


def programs(function: Callable[..., Any], *arguments: Any) -> list[ElementProgram]:
    """The programs a function applies."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [x.params["program"] for x in equations(jaxpr) if x.primitive is program_p]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that XLA compiles in the body."""
    found: list[str] = []

    def listener(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
