"""How operands get to lanes, and results to memory; and how many warps that leaves room for.

A warp brings the tiles of its panel to shared memory in whole rows of memory, those of its next
panel while it works on this one. Results go back so, too. Where that leaves no room for enough
warps, the lanes of a quad, who have values side by side, access memory themselves.
"""

from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.panels.layout import Layout
from jaxmagma.lowering.cuda.panels.ownership import Ownership, is_staged
from jaxmagma.lowering.cuda.panels.schedule import Schedule
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES, SCHEDULERS, WARP
from jaxmagma.plans.plan import Plan


# Warps of a block: with fewer, tables would stand in shared memory more often than need be.
_WARPS = (4, 6, 8, 12, 16)
# Where none of these has room.
_FEW_WARPS = (2, 1)
# So many warps of a multiprocessor hide the latency of memory and of tensor cores.
ENOUGH_WARPS = 8
# That shared memory gives or takes at a time.
_BYTES = 128


@dataclass(frozen=True)
class Staged:
    """A tile of each of a panel's elements in shared memory, every ``stride`` values."""

    tile: int
    size: int
    stride: int
    offset: int


@dataclass(frozen=True)
class Transfers:
    """What goes through shared memory, and the warps of a block.

    Attributes:
      stages: panels that are there at a time, none if lanes read global memory.
      read: operands.
      written: results, by their number.
      panel: values of one stage of a warp.
      sent: values of its results.
      warps: of a block.
      blocks: of a multiprocessor, at least.
    """

    stages: int
    read: tuple[Staged, ...]
    written: tuple[Staged, ...]
    panel: int
    sent: int
    warps: int
    blocks: int

    def __repr__(self) -> str:
        staged = (
            *(f"operand {x.tile} comes for {self.stages} panels" for x in self.read),
            *(f"out{x.tile} leaves in whole rows" for x in self.written),
        )
        return "\n".join((*staged, f"{self.warps} warps, {self.blocks} blocks"))

    @property
    def of_warp(self) -> int:
        """Values in shared memory, tables aside."""
        return self.stages * self.panel + self.sent

    @property
    def resident(self) -> int:
        """Warps of a multiprocessor."""
        return self.warps * self.blocks

    @property
    def threads(self) -> int:
        return WARP * self.warps


def transfers_of(
    plan: Plan, schedule: Schedule, ownership: Ownership, layout: Layout, limits: Limits
) -> Transfers | None:
    """The first of these of which enough warps have room.

    All in two stages or in one, operands alone, nothing.
    """
    itemsize = plan.program.dtype.itemsize
    banks = _BYTES // itemsize  # as wide as a value
    tables = layout.bytes(itemsize)
    read = _staged(_reads(plan, schedule), ownership, banks)
    written = _staged(_writes(plan, schedule), ownership, banks)
    choices = [(2, read, written), (1, read, written)]
    if ownership.lanes > 1:  # which read and write whole sectors of memory
        choices.append((2, read, ()))
        if not ownership.reread:
            choices.append((0, (), ()))
    found = [
        x
        for some in choices
        if (x := _largest(*some, ownership, tables, itemsize, limits)) is not None
    ]
    most = max((x.resident for x in found), default=0)
    return next((x for x in found if x.resident >= min(most, ENOUGH_WARPS)), None)


def _largest(
    stages: int,
    read: tuple[Staged, ...],
    written: tuple[Staged, ...],
    ownership: Ownership,
    tables: int,
    itemsize: int,
    limits: Limits,
) -> Transfers | None:
    """With the most warps that a multiprocessor has room for, one for each scheduler at least."""
    panel, sent = (sum(ownership.panel * x.stride for x in tiles) for tiles in (read, written))

    def blocks(warps: int) -> int:
        own = tables + itemsize * warps * (stages * panel + sent)
        if own > limits.shared_of_block or WARP * warps > limits.threads:
            return 0
        # Of a block's warps each scheduler has every fourth one, and a quarter of all registers.
        of_scheduler = WARP * -(-warps // SCHEDULERS) * ownership.registers
        return min(
            limits.registers // SCHEDULERS // of_scheduler,
            limits.shared // (own + RESERVED_BYTES),
            limits.blocks,
            limits.warps // warps,
        )

    for some in (_WARPS, _FEW_WARPS):
        warps = max(some, key=lambda x: x * blocks(x))
        if warps * blocks(warps) >= SCHEDULERS:
            return Transfers(stages, read, written, panel, sent, warps, blocks(warps))
    return None


# ---- Tiles in shared memory ----------------------------------------------------------------------

# Of a tile its size, and the strides of all fields that lanes read or write there.
_Accesses = dict[int, tuple[int, list[int]]]


def _reads(plan: Plan, schedule: Schedule) -> _Accesses:
    """Of batched operands, but those of gathers."""
    found: _Accesses = {}
    for x in schedule.fields.fields:
        if is_staged(x, plan):
            rows = 1 if x.operand in schedule.fields.common else schedule.fields.count
            size = plan.tiles[x.operand].size // rows
            found.setdefault(x.operand, (size, []))[1].append(x.stride)
    return dict(sorted(found.items()))


def _writes(plan: Plan, schedule: Schedule) -> _Accesses:
    """Of results."""
    found: _Accesses = {}
    for x in schedule.fields.stores:
        size = plan.tiles[plan.results[x.output]].size // schedule.fields.count
        found.setdefault(x.output, (size, []))[1].append(x.stride)
    return dict(sorted(found.items()))


def _staged(tiles: _Accesses, ownership: Ownership, banks: int) -> tuple[Staged, ...]:
    """The tiles one after the other, elements so far apart that fewest lanes wait for a bank."""
    found: list[Staged] = []
    offset = 0
    for tile, (size, along) in tiles.items():
        strides = range(size, size + banks)
        turns = {x: sum(_turns(x, y, ownership, banks) for y in along) for x in strides}
        stride = min(turns, key=lambda x: turns[x])
        found.append(Staged(tile, size, stride, offset))
        offset += ownership.panel * stride
    return tuple(found)


def _turns(stride: int, along: int, ownership: Ownership, banks: int) -> int:
    """How often shared memory is asked for what as many lanes access as there are banks."""
    lane = np.arange(banks)
    at = lane // ownership.lanes * stride + lane % ownership.lanes * along
    return int(np.bincount(np.unique(at) % banks).max())  # lanes may have the same value
