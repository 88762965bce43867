"""Kernels whose warps have panels of elements, whole, in registers.

What a product or a function makes is there where the next one expects it, so nothing is exchanged
between threads. Where dense tables are applied, to many elements that is a product of matrices:
elements are rows of the fragments that tensor cores multiply. From a plan to the kernel there are
passes, each a function from frozen values to the next::

    association  of products of an element's values, so that tables come last
    axes         which are long, and which are over rows of an element
    fields       the plan as scalar fields along one long axis each
    schedule     which axis is tiled, and what is computed whole, and in loops over tiles
    ownership    which values of which elements a lane has
    layout       where tables stand in shared memory
    transfers    how operands get to lanes, and results to memory
    source       the text

The device functions are those of ``cuda/panel.cuh`` and ``cuda/stage.cuh``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.blocks import described
from jaxmagma.lowering.cuda.panels.association import associations
from jaxmagma.lowering.cuda.panels.axes import Axes
from jaxmagma.lowering.cuda.panels.fields import Fields, Unsuitable, fields_of, made_late
from jaxmagma.lowering.cuda.panels.layout import Layout, layout_of
from jaxmagma.lowering.cuda.panels.ownership import Ownership, operations, ownerships
from jaxmagma.lowering.cuda.panels.schedule import Schedule, schedules
from jaxmagma.lowering.cuda.panels.source import pointers_of, source_of, tables_of
from jaxmagma.lowering.cuda.panels.transfers import ENOUGH_WARPS, Transfers, transfers_of
from jaxmagma.lowering.cuda.source.tiles import Pointer
from jaxmagma.plans.plan import Plan


@dataclass(frozen=True)
class Panels:
    """What the passes make of a plan."""

    plan: Plan
    schedule: Schedule
    ownership: Ownership
    layout: Layout
    transfers: Transfers

    def __repr__(self) -> str:
        passes = ("schedule", "ownership", "layout", "transfers")
        return described({x: getattr(self, x) for x in passes}, self.describe())

    @property
    def source(self) -> str:
        return source_of(self.plan, self.schedule, self.ownership, self.layout, self.transfers)

    @property
    def has_rows(self) -> bool:
        """Whether elements are rows of what the program calls an element."""
        return self.schedule.fields.count > 1

    @property
    def axes(self) -> int:
        """Over elements, their rows among them."""
        return self.plan.program.batch_rank + len(self.schedule.fields.rows)

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        return pointers_of(self.plan, self.schedule)

    @property
    def tables(self) -> list[np.ndarray]:
        """The constants that the kernel reads from memory."""
        inputs = self.plan.program.inputs
        used = [inputs[x].constant for x in tables_of(self.plan, self.schedule)]
        return [x.array for x in used if x is not None]

    @property
    def shared_bytes(self) -> int:
        itemsize = self.plan.program.dtype.itemsize
        own = itemsize * self.transfers.warps * self.transfers.of_warp
        return self.layout.bytes(itemsize) + own

    @property
    def elements(self) -> int:
        """Of a block."""
        return self.ownership.panel * self.transfers.warps

    def describe(self) -> str:
        owner = "a lane" if self.ownership.lanes == 1 else f"{self.ownership.lanes} lanes"
        return (
            f"{self.ownership.elements} elements on {owner}, {self.transfers.warps} warps, "
            f"{self.transfers.stages} stages, {self.shared_bytes} bytes of shared memory"
        )


# So many warps of a multiprocessor hide the latency of what lanes do that have an element each; of
# quads, which tensor cores work for, fewer do.
_ENOUGH_LANES = 12


def panels_of(plan: Plan, limits: Limits) -> Panels | str:
    """The panel kernel of a plan, or why there is none."""
    program = plan.program
    if program.dtype not in (np.float32, np.float64):
        return f"no panels of {program.dtype}"
    if any(len(out.batch) < program.batch_rank for out in program.outputs):
        return "an output is summed over elements"
    why = "a lane has no room for an element"
    found: list[Panels | None] = []
    # All rows of an element read again what they have in common: rather, it is whole.
    for common in (False, True) if Axes(plan, apart=True).common else (True,):
        try:
            fields = fields_of(plan, apart=True, common=common)
        except Unsuitable as reason:
            why = str(reason)
            continue
        found.append(_best(plan, (fields, made_late(fields)), limits))
        if found[-1] is not None and not found[-1].ownership.spilled:
            break
    if Axes(plan, apart=False).extents:
        try:
            found.append(_of_quads(plan, limits))
        except Unsuitable as reason:
            why = str(reason)
    kernels = [x for x in found if x is not None]
    return min(kernels, key=lambda x: _time(x, limits), default=why)


def _of_quads(plan: Plan, limits: Limits) -> Panels | None:
    """Of lanes that have elements together, and tables that tensor cores apply, if there are."""
    why = Unsuitable("no table is applied")
    found = []
    for associated in associations(plan):
        try:
            found.append((associated, fields_of(associated)))
        except Unsuitable as reason:
            why = reason
    if not found:
        raise why
    # An element's matrix can be stored by its rows or by its columns.
    plan, fields = min(
        found, key=lambda x: (sum(store.stride for store in x[1].stores), len(x[1].fields))
    )
    return _best(plan, (fields,), limits) if fields.has_products else None


def _time(panels: Panels, limits: Limits) -> tuple[bool, float]:
    """Of a multiprocessor for an element, roughly, where it does not wait for memory.

    Local memory takes more than any of it.
    """
    owner = panels.ownership
    enough = ENOUGH_WARPS if owner.lanes > 1 else _ENOUGH_LANES
    waiting = max(1.0, enough / panels.transfers.resident)
    work = operations(panels.plan, panels.schedule.fields, limits)
    return owner.spilled > 0, work * waiting


def _best(plan: Plan, orders: Sequence[Fields], limits: Limits) -> Panels | None:
    """The one with the most elements side by side, and points that are whole, if there is room.

    Of the same fields in some ``orders``.
    """
    found = [
        Panels(plan, schedule, ownership, layout, transfers)
        for fields in orders
        for layout in [layout_of(plan, fields)]
        for schedule in schedules(fields)
        for ownership in ownerships(plan, schedule, limits)
        if (transfers := transfers_of(plan, schedule, ownership, layout, limits)) is not None
    ]
    # Of more elements a lane has more values, but work on them takes less time.
    return min(
        found,
        key=lambda x: (
            -x.ownership.elements,
            not x.schedule.has_whole_points,
            -min(x.transfers.resident, ENOUGH_WARPS),
            x.ownership.registers,
        ),
        default=None,
    )
