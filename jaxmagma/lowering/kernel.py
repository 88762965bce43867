"""What a backend makes of a plan: one native kernel, or the reason why not."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxmagma.choices import MODEL, Choice


@dataclass(frozen=True)
class Kernel:
    """One custom call: its target, its attributes, and the scratch arrays it wants as results.

    The call's operands are the program's arguments, its results the program's outputs followed by
    one array for each ``workspace`` entry.
    """

    target: str
    attributes: dict[str, Any]
    workspace: tuple[tuple[tuple[int, ...], np.dtype], ...] = ()
    description: str = ""
    source: str = field(default="", repr=False)
    busy: float = 1.0  # the part of a block's threads that its widest stage has work for
    plan: int = 0  # which of the plans of the program it was made of
    choice: Choice = field(default=MODEL, compare=False)


@dataclass(frozen=True)
class Excess:
    """What a program has too much of for one kernel: less of a program might have one.

    ``of`` is "room", "steps" or "sums" (outputs summed over different batch axes), and ``times`` is
    how many times as much as a kernel may have.
    """

    of: str
    times: float


@dataclass(frozen=True)
class Declined:
    """Why a backend leaves a program to plain JAX.

    Where the program has no ``excess``, its parts would be declined, too.
    """

    reason: str
    excess: Excess | None = None
    choice: Choice = field(default=MODEL, compare=False)

    @property
    def lacks_room(self) -> bool:
        return self.excess is not None and self.excess.of == "room"
