"""Which values of which elements a lane has.

A *quad* of lanes has elements whole where tables are applied along long axes: fields are fibres of
it, and tensor cores multiply them. Where no axis is long, each lane has an element of its own.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.panels.fields import Apply, Field, Fields, Load, Multiply
from jaxmagma.lowering.cuda.panels.schedule import Loop, Schedule, listed, most_values
from jaxmagma.lowering.cuda.parameters import WARP, WIDE_REGISTERS
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.functions import FUNCTIONS


# Registers of a lane for addresses, and for values on their way.
_ADDRESSES = 40
# Those that it can do without, rather than have no room at all: they are in local memory then, a
# kilobyte of each lane (benchmarks/results/rules-h200.txt).
_SPILLED = 256


@dataclass(frozen=True)
class Ownership:
    """Who has which elements.

    Attributes:
      lanes: that have elements together: four or one.
      elements: of those lanes, side by side.
      registers: of a lane, roughly.
      spilled: those that it does not have, and keeps in local memory.
      reread: loaded fields that stay in shared memory, where loops read them for each tile.
    """

    lanes: int
    elements: int
    registers: int
    spilled: int
    reread: frozenset[int]

    def __repr__(self) -> str:
        lanes = "a lane" if self.lanes == 1 else f"{self.lanes} lanes"
        spilled = f", {self.spilled} in local memory" if self.spilled else ""
        again = f"; loops read {listed(sorted(self.reread))} again" if self.reread else ""
        return f"{self.elements} elements on {lanes}, {self.registers} registers{spilled}{again}"

    @property
    def panel(self) -> int:
        """The elements of a warp."""
        return WARP // self.lanes * self.elements


def ownerships(plan: Plan, schedule: Schedule, limits: Limits) -> Iterator[Ownership]:
    """All there is room for.

    Tensor cores multiply the fields of two elements in the time of one: in float64, fast ones do.
    """
    dtype = plan.program.dtype
    lanes = 4 if schedule.fields.extents else 1
    two = lanes > 1 and (dtype == np.float32 or limits.tensor_rate > 1)
    nowhere: frozenset[int] = frozenset()
    places = dict.fromkeys((nowhere, _used_in_loops(plan, schedule)))
    for elements, reread in itertools.product((2, 1) if two else (1,), places):
        values = most_values(schedule, elements, reread)
        registers = dtype.itemsize // 4 * values + _ADDRESSES
        room = limits.thread_registers + (_SPILLED if elements == 1 else 0)
        if registers <= room:
            least = WIDE_REGISTERS if lanes > 1 and dtype == np.float64 else 0
            spilled = max(0, registers - limits.thread_registers)
            registers = max(registers - spilled, least)
            yield Ownership(lanes, elements, registers, spilled, reread)


def operations(plan: Plan, fields: Fields, limits: Limits) -> float:
    """Of the lanes that have an element, all of its rows, those of tensor cores among them.

    What is no field along an axis each lane of a quad computes for itself. In float32 tensor cores
    have three products for one, of values that are first taken apart: they save nothing.
    """
    lanes = 4 if fields.extents else 1
    rate = limits.tensor_rate if plan.program.dtype == np.float64 else 1.0

    def of(field: Field) -> float:
        if isinstance(field, Multiply):
            rows = _whole(fields.extents[field.axis], 8)
            columns = _whole(fields.extents[fields.fields[field.operands[0]].axis or 0], 4)
            return 2 * len(field.tables) * rows * columns / rate
        if isinstance(field, Apply):
            places = lanes if field.axis is None else _whole(fields.extents[field.axis], 8)
            return FUNCTIONS[field.function].flops * places
        return 0

    return fields.count * sum(map(of, fields.fields))


def _whole(extent: int, piece: int) -> int:
    """In pieces of tensor cores."""
    return -(-extent // piece) * piece


def _used_in_loops(plan: Plan, schedule: Schedule) -> frozenset[int]:
    """What is loaded for loops over several tiles alone."""
    if schedule.tiles < 2:
        return frozenset()
    fields = schedule.fields
    loops = [x for scope in schedule.scopes for x in scope.parts if isinstance(x, Loop)]
    inside = {x for loop in loops for x in (*loop.multiplied, *loop.points)}
    used = {x for n in inside for x in fields.fields[n].operands} - inside
    others = (x for n, x in enumerate(fields.fields) if n not in inside)
    used -= {x for field in others for x in field.operands} | {x.field for x in fields.stores}
    return frozenset(x for x in used if is_staged(fields.fields[x], plan))


def is_staged(field: Field, plan: Plan) -> TypeGuard[Load]:
    """Whether it can come through shared memory: an element's, and not gathered."""
    return isinstance(field, Load) and field.index is None and plan.tiles[field.operand].batched
