"""Which values of which elements a lane has.

A *quad* of lanes has elements whole where tables are applied along long axes: fields are fibres of
it, and tensor cores multiply them. Where no axis is long, each lane has an element of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.panels.schedule import Schedule, most_values
from jaxmagma.lowering.cuda.parameters import WARP, WIDE_REGISTERS


# Registers of a lane for addresses, and for values on their way.
_ADDRESSES = 40
# Those that it can do without, rather than have no room at all: they are in local memory then.
_SPILLED = 32


@dataclass(frozen=True)
class Ownership:
    """Who has which elements.

    Attributes:
      lanes: that have elements together: four or one.
      elements: of those lanes, side by side.
      registers: of a lane, roughly.
    """

    lanes: int
    elements: int
    registers: int

    @property
    def panel(self) -> int:
        """The elements of a warp."""
        return WARP // self.lanes * self.elements


def ownerships(schedule: Schedule, dtype: np.dtype, limits: Limits) -> Iterator[Ownership]:
    """All there is room for, the best one first.

    Tensor cores multiply the fields of two elements in the time of one: in float64, fast ones do.
    """
    lanes = 4 if schedule.fields.extents else 1
    two = lanes > 1 and (dtype == np.float32 or limits.tensor_rate > 1)
    for elements in (2, 1) if two else (1,):
        registers = dtype.itemsize // 4 * most_values(schedule, elements) + _ADDRESSES
        room = limits.thread_registers + (_SPILLED if elements == 1 else 0)
        if registers <= room:
            least = WIDE_REGISTERS if lanes > 1 and dtype == np.float64 else 0
            yield Ownership(lanes, elements, min(max(registers, least), limits.thread_registers))
