"""Where the tiles of a plan live, so that movement costs nothing.

A view of a tile is other strides into the same place.  A tile that becomes part of a larger one is
made there.  A product whose only use is a sum is added to the other summand where that is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmagma.plans.plan import Plan, Pointwise, Product
from jaxmagma.programs.program import Gather, Place, View
from jaxmagma.programs.strides import places, row_major


@dataclass(frozen=True)
class Location:
    """A tile within another one, its root: value ``i`` at ``offset + strides . i``."""

    root: int
    offset: int
    strides: tuple[int, ...]


class Locations:
    """The location of every tile, and how each step that is not merely one does its work."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first = len(plan.program.inputs)
        self.of = [Location(n, 0, row_major(tile.shape)) for n, tile in enumerate(plan.tiles)]
        self.done: set[int] = set()  # steps that need no instruction
        self.accumulates: set[int] = set()  # products that are added to what is at their place
        self.disjoint: dict[int, bool] = {}  # of each Place, whether no two pieces overlap
        self.covered: dict[int, bool] = {}  # of each Place, whether the pieces leave no gaps
        self._uses = [0] * len(plan.tiles)
        for step in plan.steps:
            for operand in step.operands:
                self._uses[operand] += 1
        for value in plan.results:
            self._uses[value] += 2  # it must be whole, and where it is
        for number, step in plan.numbered_steps():
            if isinstance(step, View):
                self._view(number, step)
            elif isinstance(step, Pointwise):
                self._sum(number, step)
            elif isinstance(step, Place):
                self._place(number, step)

    def step(self, number: int) -> object:
        return None if number < self.first else self.plan.steps[number - self.first]

    def is_own(self, number: int) -> bool:
        """Whether a tile is its own root, in the order of memory."""
        return self.of[number].root == number

    def _view(self, number: int, step: View) -> None:
        base = self.of[step.operand]
        stride = flat_stride(base.strides, self.plan.tiles[step.operand].shape)
        if stride is not None:
            strides = tuple(stride * x for x in step.strides)
            self.of[number] = Location(base.root, base.offset + stride * step.offset, strides)
            self.done.add(number)

    def _sum(self, number: int, step: Pointwise) -> None:
        tiles = self.plan.tiles
        if step.function != "add" or any(x != step.output_labels for x in step.labels):
            return
        for product, other in (step.operands, step.operands[::-1]):
            if (
                product > other
                and isinstance(self.step(product), Product)
                and tiles[product].batched
                and tiles[other].batched
                and self._uses[product] == self._uses[other] == 1
                and self.is_own(product)
                and (self.is_own(other) or other in self.done)
                and not isinstance(self.step(other), View)
                and product not in self.accumulates
            ):
                self.of[number] = self.of[product] = self.of[other]
                self.accumulates.add(product)
                self.done.add(number)
                return

    def _place(self, number: int, step: Place) -> None:
        tiles = self.plan.tiles
        found = [
            places(offset, strides, tiles[x].shape).reshape(-1)
            for x, offset, strides in step.pieces
        ]
        at = np.concatenate(found) if found else np.zeros(0, int)
        distinct = len(np.unique(at))
        self.disjoint[number] = distinct == at.size
        self.covered[number] = distinct == tiles[number].size
        if not self.disjoint[number]:
            return
        for x, offset, strides in step.pieces:
            maker = self.step(x)
            direct = isinstance(maker, Product) or (
                isinstance(maker, Pointwise)
                and (flat_stride(strides, tiles[x].shape) or 0) > 0
                and all(s > 0 for s, n in zip(strides, tiles[x].shape, strict=True) if n > 1)
            )
            if (
                direct
                and self._uses[x] == 1
                and self.is_own(x)
                and x not in self.done
                and tiles[x].batched == tiles[number].batched
                and all(s > 0 for s, n in zip(strides, tiles[x].shape, strict=True) if n > 1)
            ):
                self.of[x] = Location(number, offset, strides)


def flat_stride(strides: Sequence[int], shape: Sequence[int]) -> int | None:
    """How far a step through a tile in the order of memory goes, if always equally far."""
    found: int | None = None
    for stride, extent, below in zip(strides, shape, row_major(shape), strict=True):
        if extent == 1:
            continue
        if found is None:
            if stride % below:
                return None
            found = stride // below
        if stride != found * below:
            return None
    return 1 if found is None else found


def loops_of(*strides: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """``(extent, stride...)`` of every axis of a tile; extent one is no loop."""
    return [
        (extent, *(x[axis] for x in strides)) for axis, extent in enumerate(shape) if extent > 1
    ]


def gathered(plan: Plan) -> tuple[set[int], set[int]]:
    """The inputs that are gathered from, and those that say where."""
    steps = [step for step in plan.steps if isinstance(step, Gather)]
    return {x.vector for x in steps}, {x.index for x in steps}
