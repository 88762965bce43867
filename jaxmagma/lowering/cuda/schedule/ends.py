"""Where the values of tiles come from and go to, beside what a kernel computes.

Operands are in global memory. A tile that shows part of another one, or what is gathered, is read
where its values are (``origins``); a part of a result is written to its place there
(``destinations``). Products that are only summed over elements need no tile (``accumulations``).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxmagma.lowering.cuda.schedule.accumulations import (
    accumulations,
    registers_of,
    whole_registers,
)
from jaxmagma.lowering.cuda.schedule.destinations import Destination, find_destinations
from jaxmagma.lowering.cuda.schedule.origins import Origin, Strided, origin
from jaxmagma.lowering.cuda.schedule.sweeps import Accumulation
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.program import Gather, View
from jaxmagma.programs.strides import row_major


@dataclass(frozen=True)
class Ends:
    """Both ends of a plan."""

    plan: Plan
    summed: tuple[int, ...]  # outputs that are summed over elements
    stored: tuple[int, ...]  # the others
    brought: Mapping[int, Gather]  # gathered tiles that threads bring ahead of their use
    origins: Mapping[int, Origin]  # of tiles whose values are part of others
    written: Mapping[int, Sequence[Destination]]  # where in outputs tiles go
    parts: Mapping[int, Sequence[Destination]]  # where in tiles in shared memory others go
    accumulations: tuple[Accumulation, ...]  # products that are only summed over elements
    skipped: frozenset[int]  # tiles that nobody needs on chip

    def __repr__(self) -> str:
        brought = (f"%{n} is gathered for the next elements" for n in self.brought)
        parts = tuple(f"%{n} is part of %{x.tile}" for n, x in self.origins.items())
        parts += tuple(f"%{n} is part of %{x}" for n, y in self.parts.items() for x, _ in y)
        written = (f"%{n} is out{out}" for n, places in self.written.items() for out, _ in places)
        summed = (f"out{n} is a sum over elements" for n in self.summed)
        return "\n".join((*brought, *parts, *written, *summed))

    @property
    def dtype(self) -> np.dtype:
        return self.plan.program.dtype

    @property
    def inputs(self) -> int:
        return len(self.plan.program.inputs)

    @cached_property
    def accumulated(self) -> frozenset[int]:
        """The outputs that are sums of products."""
        return frozenset(x.output for x in self.accumulations)

    @cached_property
    def gathered(self) -> frozenset[int]:
        """The vectors that are gathered from."""
        return frozenset(x.vector for x in self.plan.steps if isinstance(x, Gather))

    def with_whole(self, tile: int, output: int) -> "Ends":
        """The same with an output that is put together in shared memory, as a tile."""
        plain = Strided(0, row_major(self.plan.tiles[tile].shape))
        written, parts = {tile: [(output, plain)]}, dict(self.parts)
        for part, places in self.written.items():
            left = [(out, at) for out, at in places if out != output]
            own = [(tile, at) for out, at in places if out == output]
            written |= {part: left} if left else {}
            parts |= {part: [*parts.get(part, ()), *own]} if own else {}
        return replace(self, written=written, parts=parts)

    def origin(self, tile: int) -> Origin:
        return self.origins.get(tile) or Origin(tile)

    def is_outside(self, tile: int) -> bool:
        """Whether a batched tile is in global memory."""
        return self.origin(tile).tile < self.inputs and self.plan.tiles[tile].batched

    def constant(self, tile: int) -> np.ndarray | None:
        """The values of a tile that is known before the kernel runs."""
        return _constant(self.plan, tile)

    def is_constant(self, tile: int) -> bool:
        return self.constant(tile) is not None

    def result_size(self, output: int) -> int:
        return self.plan.tiles[self.plan.results[output]].size

    def sums_registers(self, whole: Set[int]) -> int:
        """Registers of a thread that hold pieces of sums from one element to the next.

        Not of ``whole`` ones.
        """
        sums = (self.plan.tiles[self.plan.results[x]].shape for x in self.accumulated - whole)
        return sum(registers_of(rows, columns, self.dtype) for rows, columns in sums)

    def kept_registers(self, whole: Set[int]) -> int:
        """The same, and those for whole sums."""
        every = (whole_registers(self.plan, self.plan.results[x]) for x in whole)
        return self.sums_registers(whole) + sum(every)


def ends_of(plan: Plan, ahead: bool) -> Ends:
    """Those of a plan; whether gathered tiles come ``ahead``."""
    everything = set(range(plan.program.batch_rank))
    outputs = list(enumerate(plan.program.outputs))
    summed = tuple(n for n, x in outputs if set(x.batch) != everything)
    stored = tuple(n for n, _ in outputs if n not in summed)
    brought = {
        n: x
        for n, x in plan.numbered_steps()
        if ahead and isinstance(x, Gather) and plan.tiles[x.index].batched
        if _constant(plan, x.index) is None
    }
    origins = {
        n: origin(plan, n, brought)
        for n, x in plan.numbered_steps()
        if isinstance(x, View | Gather) and n not in brought
    }
    written, by_parts = find_destinations(plan, stored)
    products, gone = accumulations(plan)
    skipped = frozenset(by_parts | gone)
    return Ends(plan, summed, stored, brought, origins, written, {}, tuple(products), skipped)


def _constant(plan: Plan, tile: int) -> np.ndarray | None:
    inputs = plan.program.inputs
    constant = inputs[tile].constant if tile < len(inputs) else None
    return None if constant is None else constant.array
