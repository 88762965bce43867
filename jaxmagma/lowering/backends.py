"""The backends: what makes kernels of plans, for the platforms that there are."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from jaxmagma.lowering import cpu, cuda
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.rules import Rules
from jaxmagma.lowering.space import Space
from jaxmagma.lowering.target import Target
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.program import ElementProgram


class Backend(Protocol):
    """What a module must have to be a backend."""

    @property
    def Parameters(self) -> Callable[..., Any]:
        """What may be chosen of a kernel, by name; without names all is the model's choice."""

    @property
    def SPACE(self) -> Space:
        """Of these, the ones that a tuner varies, and the values that it tries."""

    @property
    def rules_of(self) -> Callable[[str], Rules]:
        """What removes some of them before they are timed, on an architecture."""

    @property
    def planned(self) -> Callable[[ElementProgram], Plan]:
        """The plan of a program that its kernels are best made of."""

    @property
    def alternatives(self) -> Callable[[ElementProgram], Iterable[Plan]]:
        """Others, whose tiles may have room where those of the first have none."""

    def lower(
        self,
        plan: Plan,
        extents: tuple[int, ...],
        parameters: Any = None,
        target: Target = ...,
    ) -> Kernel | Declined:
        """The kernel of a plan over batch axes of these extents, or why there is none."""


BACKENDS: Mapping[str, Backend] = {"cpu": cpu, "cuda": cuda}
