"""Where the values of tiles come from and go to, beside what a kernel computes.

Operands are in global memory. A tile that shows part of another one, or what is gathered, is read
where its values are (``origins``); a part of a result is written to its place there
(``destinations``). Products that are only summed over elements need no tile (``accumulations``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxmagma.lowering.cuda.accumulations import accumulations
from jaxmagma.lowering.cuda.destinations import Destination, find_destinations
from jaxmagma.lowering.cuda.origins import Origin, origin
from jaxmagma.lowering.cuda.sweeps import Accumulation
from jaxmagma.plan import Plan
from jaxmagma.program import Gather, View


@dataclass(frozen=True)
class Ends:
    """Both ends of a plan.

    Attributes:
      brought: the gathered tiles that threads bring to shared memory ahead of their use.
      origins: of tiles whose values are part of others.
      written: where in outputs tiles go.
      accumulations: the products that are only summed over elements.
      skipped: tiles that nobody needs on chip.
    """

    plan: Plan
    brought: Mapping[int, Gather]
    origins: Mapping[int, Origin]
    written: Mapping[int, Sequence[Destination]]
    accumulations: tuple[Accumulation, ...]
    skipped: frozenset[int]

    @property
    def dtype(self) -> np.dtype:
        return self.plan.program.dtype

    @property
    def inputs(self) -> int:
        return len(self.plan.program.inputs)

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The outputs that are summed over elements."""
        return _summed(self.plan)

    @cached_property
    def accumulated(self) -> frozenset[int]:
        """Those of them that are sums of products."""
        return frozenset(x.output for x in self.accumulations)

    @property
    def stored(self) -> list[int]:
        """The other outputs."""
        return _stored(self.plan)

    @cached_property
    def gathered(self) -> frozenset[int]:
        """The vectors that are gathered from."""
        return frozenset(x.vector for x in self.plan.steps if isinstance(x, Gather))

    def origin(self, tile: int) -> Origin:
        return self.origins.get(tile) or Origin(tile)

    def is_outside(self, tile: int) -> bool:
        """Whether a batched tile is in global memory."""
        return self.origin(tile).tile < self.inputs and self.plan.tiles[tile].batched

    def is_constant(self, tile: int) -> bool:
        return self.constant(tile) is not None

    def constant(self, tile: int) -> np.ndarray | None:
        """The values of a tile that is known before the kernel runs."""
        return _constant(self.plan, tile)

    def result_size(self, output: int) -> int:
        return self.plan.tiles[self.plan.results[output]].size


def ends_of(plan: Plan, ahead: bool) -> Ends:
    """Those of a plan; whether gathered tiles come ``ahead``."""
    brought = {
        n: step
        for n, step in plan.numbered_steps()
        if ahead
        and isinstance(step, Gather)
        and plan.tiles[step.index].batched
        and _constant(plan, step.index) is None
    }
    origins = {
        n: origin(plan, n, brought)
        for n, step in plan.numbered_steps()
        if isinstance(step, View | Gather) and n not in brought
    }
    written, by_parts = find_destinations(plan, _stored(plan))
    products, gone = accumulations(plan)
    return Ends(plan, brought, origins, written, tuple(products), frozenset(by_parts | gone))


def _summed(plan: Plan) -> tuple[int, ...]:
    everything = set(range(plan.program.batch_rank))
    return tuple(n for n, x in enumerate(plan.program.outputs) if set(x.batch) != everything)


def _stored(plan: Plan) -> list[int]:
    summed = _summed(plan)
    return [n for n in range(len(plan.program.outputs)) if n not in summed]


def _constant(plan: Plan, tile: int) -> np.ndarray | None:
    inputs = plan.program.inputs
    constant = inputs[tile].constant if tile < len(inputs) else None
    return None if constant is None else constant.array
