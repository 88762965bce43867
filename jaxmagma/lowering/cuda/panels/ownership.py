"""Which values of which elements a lane has.

A *quad* of lanes has elements whole where tables are applied along long axes: fields are fibres of
it, and tensor cores multiply them. Where no axis is long, each lane has an element of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.panels.schedule import (
    Schedule,
    for_loops,
    most_values,
    multiplies_single_fields,
)
from jaxmagma.lowering.cuda.parameters import WARP, WIDE_REGISTERS


# Registers of a lane for addresses, and for values on their way.
_ADDRESSES = 36
# Those that it can do without, rather than have no room at all: they are in local memory then.
_SPILLED = 32


@dataclass(frozen=True)
class Ownership:
    """Who has which elements.

    Attributes:
      lanes: that have elements together: four or one.
      elements: of those lanes, side by side.
      registers: of a lane, roughly.
      reloaded: fields that lanes read from shared memory for each tile anew.
    """

    lanes: int
    elements: int
    registers: int
    reloaded: frozenset[int] = frozenset()

    @property
    def panel(self) -> int:
        """The elements of a warp."""
        return WARP // self.lanes * self.elements


def ownerships(schedule: Schedule, itemsize: int, limits: Limits) -> Iterator[Ownership]:
    """All there is room for.

    Fast tensor cores multiply two fields by a table in the time of one: of an element, if it has
    several, else of two elements.
    """
    lanes = 4 if schedule.fields.extents else 1
    two = limits.tensor_rate > 1 and lanes > 1 and multiplies_single_fields(schedule)
    for elements in (2, 1) if two else (1,):
        for reloaded in dict.fromkeys((frozenset[int](), for_loops(schedule))):
            values = most_values(schedule, elements, reloaded)
            registers = itemsize // 4 * values + _ADDRESSES
            room = limits.thread_registers + (_SPILLED if elements == 1 else 0)
            if registers <= room:
                registers = min(registers, limits.thread_registers)
                least = WIDE_REGISTERS if lanes > 1 else 0
                yield Ownership(lanes, elements, max(registers, least), reloaded)
