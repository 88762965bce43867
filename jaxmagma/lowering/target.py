"""What a program is lowered for."""

from dataclasses import dataclass

from jaxmagma import choices
from jaxmagma.plans import parity


@dataclass(frozen=True)
class Target:
    """All that the lowering of a program knows of the machine and of the user's options.

    Attributes:
      platform: ``cpu`` or ``cuda``.
      architecture: of its devices, such as ``sm_90``; empty if it may be any.
      even_odd: whether products by symmetric matrices are split, where that is less work; None
        leaves it to the backend.
    """

    platform: str
    architecture: str = ""
    even_odd: bool | None = None

    @staticmethod
    def here(platform: str) -> "Target":
        """The devices of this process, and what its environment asks for."""
        return Target(platform, choices.architecture(platform), parity.is_wanted())
