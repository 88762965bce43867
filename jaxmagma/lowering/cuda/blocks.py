"""How a plan is done by blocks of threads. From it to the kernel there are passes, each a function
from frozen values to the next::

    ends        where the values of tiles come from and go to
    schedule    the stages, and who owns fibres in them: threads or quads
    matrices    where matrices stand
    transfers   how operands and tiles get to the stages that need them
    ownership   how many threads have how many elements
    layout      where tiles are in shared memory

``model`` makes candidates of them and chooses one, ``source`` prints it.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.architectures import Limits
from jaxmagma.lowering.cuda.layout import Layout, resident, shared_bytes
from jaxmagma.lowering.cuda.matrices import Matrices
from jaxmagma.lowering.cuda.ownership import Ownership
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.ends import Ends
from jaxmagma.lowering.cuda.schedule.sweeps import Accumulation, Total
from jaxmagma.lowering.cuda.transfers import Transfers
from jaxmagma.plans.plan import Plan


def described(passes: Mapping[str, object], end: str) -> str:
    """What each of these passes has made, under its name."""
    made = (f"{name}:\n{textwrap.indent(repr(x), '  ')}" for name, x in passes.items() if repr(x))
    return "\n".join((*made, end))


TYPES = {
    np.dtype("float64"): "double",
    np.dtype("float32"): "float",
    np.dtype("complex128"): "Complex<double>",
    np.dtype("complex64"): "Complex<float>",
}


@dataclass(frozen=True)
class Block:
    """What the passes make of a plan."""

    schedule: Schedule
    matrices: Matrices
    transfers: Transfers
    ownership: Ownership
    layout: Layout
    limits: Limits
    min_blocks: int = 0  # that the compiler must leave registers for; 0 if it may say
    prefetch: bool = True  # what later stages or slices read is asked for

    def __repr__(self) -> str:
        passes = ("ends", "schedule", "matrices", "transfers", "ownership", "layout")
        return described({x: getattr(self, x) for x in passes}, self.describe())

    @property
    def ends(self) -> Ends:
        return self.schedule.ends

    @property
    def plan(self) -> Plan:
        return self.schedule.plan

    @property
    def type(self) -> str:
        return TYPES[self.ends.dtype]

    @property
    def threads(self) -> int:
        return self.ownership.threads * self.ownership.groups

    @property
    def elements(self) -> int:
        """At a time."""
        return self.ownership.elements * self.ownership.groups

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.layout, self.ownership)

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has shared memory for."""
        return resident(self.layout, self.ownership, self.limits)

    @property
    def loops(self) -> bool:
        """Whether a group of threads works through several slices."""
        return bool(self.ends.summed) or self.transfers.ahead

    @property
    def strides(self) -> bool:
        """Whether there are as many groups as a GPU has room for, and take turns with elements."""
        return self.transfers.ahead and not self.ends.summed

    def describe(self) -> str:
        sweeps, every = self.schedule.sweeps, self.schedule.stages
        stages = [f"{len(sweeps)} sweeps"] if sweeps else []
        totals, sums = (sum(isinstance(x, kind) for x in every) for kind in (Total, Accumulation))
        outers = sum(len(stage.outers) for stage in sweeps)
        if gemms := len(every) - len(sweeps) - totals - sums:
            stages.append(f"{gemms} gemms")
        if totals:
            stages.append(f"{totals} sums")
        if sums + outers:
            stages.append(f"{sums + outers} products summed over elements")
        split = self.matrices.split_products()
        halves = f", {split} products by even and odd halves" if split else ""
        return (
            f"{' and '.join(stages) or 'a sum'}, {self.elements} elements on "
            f"{self.threads} threads, {self.shared_bytes} bytes of shared memory"
            f"{halves}{', operands ahead' if self.transfers.ahead else ''}"
            f"{', rows as they are needed' if self.transfers.streams else ''}"
        )
