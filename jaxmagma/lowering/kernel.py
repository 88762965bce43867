"""What a backend makes of a plan: one native kernel, or the reason why not."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


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


@dataclass(frozen=True)
class Declined:
    """Why a backend leaves a program to plain JAX."""

    reason: str
