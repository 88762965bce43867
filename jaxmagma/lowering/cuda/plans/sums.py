"""Spreads long sums over threads.

A contraction with a small result and many terms, ``sum_abc u[abc] v[abc]``, has work for one thread
where there should be some for many. It becomes steps that a GPU can share:

* A product without rows and columns is a pointwise product and then a sum. If fibres run along a
  label when the product is made, that one is summed on its own: in registers. Lanes share the rest.
* A product with few blocks of rows and columns keeps one of the labels it sums over, for other
  threads, and sums over it afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxmagma.lowering.cuda.schedule.accumulations import accumulations
from jaxmagma.plans.plan import Plan, Product, Rearrange, Step, Tile, renumbered


# Blocks of the result of one element that are enough threads for a gemm.
_ENOUGH_BLOCKS = 8


def spread(plan: Plan, block: int) -> Plan:
    """The plan with its long sums divided; ``block`` rows or columns are for one thread.

    Not those of products that are accumulated over elements: they are spread over threads already
    (see ``schedule.accumulations``).
    """
    return _Spreader(plan, block, accumulations(plan)[1]).plan()


class _Spreader:
    def __init__(self, plan: Plan, block: int, accumulated: set[int]) -> None:
        self.old = plan
        self.block = block
        self.tiles: list[Tile] = list(plan.tiles[: len(plan.program.inputs)])
        self.steps: list[Step] = []
        self.numbers = {n: n for n in range(len(self.tiles))}
        self.accumulated = accumulated

    def plan(self) -> Plan:
        for number, step in self.old.numbered_steps():
            if number in self.accumulated:
                self.numbers[number] = self.add(renumbered(step, self.numbers))
            else:
                self.numbers[number] = self.step(step)
        results = tuple(self.numbers[value] for value in self.old.results)
        tiles, steps = tuple(self.tiles), tuple(self.steps)
        return replace(self.old, tiles=tiles, steps=steps, results=results)

    def step(self, step: Step) -> int:
        if not isinstance(step, Product | Rearrange):
            return self.add(renumbered(step, self.numbers))
        if isinstance(step, Rearrange):
            step = replace(step, operand=self.numbers[step.operand])
            summed = [x for x in step.labels if x not in step.output_labels]
            new = [x for x in step.output_labels if x not in step.labels]
            if len(summed) < 2 or new:
                return self.add(step)
            return self.sums(step.operand, step.labels, step.output_labels, step.extents)
        step = replace(step, left=self.numbers[step.left], right=self.numbers[step.right])
        batched = all(self.tiles[x].batched for x in step.operands)
        if not step.contracted or (not batched and len(step.contracted) == 1):
            return self.add(step)
        if not step.rows and not step.columns:
            labels = step.left_labels
            every = self.add(replace(step, output_labels=labels))
            return self.sums(every, labels, step.output_labels, step.extents)
        blocks = math.prod(
            -(-step.extents[x] // self.block) for x in step.rows + step.columns
        ) * math.prod(step.extents[x] for x in step.paired)
        if batched and len(step.contracted) > 1 and blocks < _ENOUGH_BLOCKS:
            kept = max(step.contracted, key=lambda x: step.extents[x])
            labels = step.output_labels + kept
            partial = self.add(replace(step, output_labels=labels))
            return self.sums(partial, labels, step.output_labels, step.extents)
        return self.add(step)

    def sums(self, tile: int, labels: str, output: str, extents: dict[str, int]) -> int:
        """Sums a tile over some of its labels."""
        summed = [x for x in labels if x not in output]
        fibre = self.fibre(tile, labels)
        if fibre in summed and len(summed) > 1:
            left = labels.replace(fibre, "")
            sizes = tuple((x, extents[x]) for x in sorted(labels))
            tile = self.add(Rearrange(tile, labels, left, sizes))
            labels = left
        sizes = tuple((x, extents[x]) for x in sorted(labels))
        return self.add(Rearrange(tile, labels, output, sizes))

    def fibre(self, tile: int, labels: str) -> str:
        """The label along which fibres run when a mode product makes the tile; or none."""
        first = len(self.old.program.inputs)
        places: Sequence[tuple[int, str]] = [(tile, labels)]
        while places:
            (tile, labels), *places = places
            if tile < first:
                continue
            step = self.steps[tile - first]
            if not isinstance(step, Product):
                continue
            names = dict(zip(step.output_labels, labels, strict=True))
            if step.contracted and not self.tiles[step.left].batched and len(step.rows) == 1:
                return names[step.rows]
            if not step.contracted:
                for operand, own in (
                    (step.left, step.left_labels),
                    (step.right, step.right_labels),
                ):
                    places = [*places, (operand, "".join(names[x] for x in own))]
        return ""

    def add(self, step: Step) -> int:
        batched = any(self.tiles[x].batched for x in step.operands)
        self.tiles.append(Tile(step.shape, self.old.program.dtype, batched))
        self.steps.append(step)
        return len(self.tiles) - 1
