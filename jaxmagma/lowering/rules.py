"""What is removed of the kernels that a backend's space has, before anything is timed, and why.

Rules see ever more of a candidate: its parameters, the kernel they make, its machine code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmagma.choices import Choice
from jaxmagma.lowering.kernel import Kernel


@dataclass
class Candidate:
    """One way to run a program, and what is known of it so far."""

    choice: Choice
    parameters: Any = None  # of the backend's own class
    kernel: Kernel | None = None
    resources: Mapping[str, int] | None = None  # registers and spilled bytes of a thread

    @property
    def registers(self) -> int:
        return self.resources["registers"] if self.resources else 0

    @property
    def spilled(self) -> int:
        return self.resources["local"] if self.resources else 0


@dataclass(frozen=True)
class Rule:
    """A name for the report, whether a candidate is removed, and the parameters it looks at."""

    name: str
    removes: Callable[[Candidate], bool]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rules:
    """Those of a backend, by what they look at."""

    parameters: tuple[Rule, ...] = ()
    kernel: tuple[Rule, ...] = ()
    code: tuple[Rule, ...] = ()


def broken(rules: tuple[Rule, ...], candidate: Candidate) -> str | None:
    """The name of the first rule that removes a candidate."""
    return next((rule.name for rule in rules if rule.removes(candidate)), None)
