"""Operands whose rows each warp has brought just before it needs them (see ``cuda/stream.cuh``).

Quads that read fibres along the slowest axis of an operand ask for pieces of many rows at once, and
wait for them. Along the fastest axis, what a warp needs next lies side by side, and the copy engine
brings it while the warp is still at work.
"""

from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.origins import Origin
from jaxmagma.lowering.cuda.schedule.sweeps import ALONG, QUAD, Sweep, Value
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.strides import row_major


# Rows of a multiple of so many values meet in banks, whichever lines quads have.
MEETING = 8
# Values of one group of the copy engine.
GROUP = 2


@dataclass(frozen=True)
class Stream:
    """An operand that a sweep of quads reads row by row: tiles that are parts of it, and where."""

    operand: int
    position: int  # of the sweep
    sweep: Sweep
    length: int
    parts: tuple[tuple[int, int], ...]  # tile and offset

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(tile for tile, _ in self.parts)

    def values(self, warps: int, fibres: int) -> int:
        """The room that warps need whose quads have so many fibres."""
        return warps * len(self.parts) * (8 * fibres * self.length + GROUP)


def streams_of(schedule: Schedule, parameters: Parameters) -> tuple[Stream, ...]:
    """The operands that quads read row by row, in their first sweep.

    Several warps then have one element at a time.
    """
    one = parameters.groups in (None, 1) and parameters.elements in (None, 1)
    known = schedule.ends.dtype == np.dtype("float64")
    if not (schedule.quads and one and known) or schedule.alone:
        return ()
    ends, plan = schedule.ends, schedule.plan
    found: dict[int, Stream] = {}
    for position, sweep in enumerate(schedule.stages):
        if not isinstance(sweep, Sweep) or sweep.lanes != QUAD:
            continue
        parts: dict[int, list[tuple[int, int]]] = {}
        for value in sweep.loads:
            at = ends.origin(value.tile)
            possible = ends.is_outside(at.tile) and at.tile not in schedule.staged
            whole = possible and at.index is None and at.tile not in found
            if whole and plan.tiles[at.tile].size % GROUP == 0 and _in_rows(plan, sweep, value, at):
                parts.setdefault(at.tile, []).append((value.tile, at.view.offset if at.view else 0))
        for operand, some in parts.items():
            length = plan.tiles[some[0][0]].shape[-1]
            found[operand] = Stream(operand, position, sweep, length, tuple(some))
    return tuple(found.values())


def _in_rows(plan: Plan, sweep: Sweep, value: Value, at: Origin) -> bool:
    """Whether fibres are rows that follow each other in the order of the lines."""
    if value.length % MEETING == 0 or not set(sweep.lines) <= set(value.labels):
        return False
    strides = at.view.strides if at.view else row_major(plan.tiles[value.tile].shape)
    of = dict(zip(value.labels, strides, strict=True))
    extents = (*(sweep.extents[x] for x in sweep.lines), value.length)
    return tuple(of.get(x) for x in (*sweep.lines, ALONG)) == row_major(extents)
