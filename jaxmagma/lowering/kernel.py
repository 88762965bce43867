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
    choice: Choice = field(default=MODEL, compare=False)


@dataclass(frozen=True)
class Declined:
    """Why a backend leaves a program to plain JAX."""

    reason: str
    choice: Choice = field(default=MODEL, compare=False)
