"""The steps of a plan as those see them who make stages of them, and how many are done."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from jaxmagma.lowering.cuda.schedule.origins import origin
from jaxmagma.lowering.cuda.schedule.sweeps import (
    Mode,
    Sweep,
    as_mode,
    live_registers,
)
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.programs.program import Gather, Place, View


# All fibres of a sweep that are alive at once must fit in a thread's registers; the rest of 255 is
# for addresses and for what the compiler loads ahead.
LIVE_REGISTERS = 176

Operation = Product | Rearrange | Pointwise


@dataclass(frozen=True)
class Steps:
    """What steps are, by the numbers of the tiles that they make; and how fibres are owned."""

    plan: Plan
    quads: bool  # own fibres wherever matrices multiply them
    split: Collection[int]  # matrices that are better multiplied half by half
    registers: int  # of a thread, for the fibres of a sweep
    every: Mapping[int, Operation | Place]
    operations: Mapping[int, Operation]
    modes: Mapping[int, Mode]  # the mode products
    summed: Mapping[int, str]  # the labels that an operation sums over
    pointwise: frozenset[int]  # operations that neither sum nor are mode products
    dots: frozenset[int]  # products of two tiles of an element, summed over one label
    operands: Mapping[int, Sequence[int]]
    consumers: Mapping[int, Sequence[int]]
    neighbours: Mapping[int, Sequence[int]]  # operands and consumers
    shown: Mapping[int, Sequence[int]]  # tiles that are read where another one is
    joins_fibres: bool = True  # to sweeps of single values

    def axis(self, number: int) -> int:
        """The axis that a mode product contracts; -1 if that is not what a step does."""
        mode = self.modes.get(number)
        return mode.tile_labels.index(mode.contracted) if mode and mode.contracted else -1

    def for_quads(self, number: int) -> bool:
        """Whether tensor cores can do a mode product: fibres on both sides."""
        mode, extents = self.modes[number], self.operations[number].extents
        return min(extents.get(mode.contracted, 1), extents.get(mode.new, 1)) > 1

    def needed(self, group: Set[int]) -> Set[int]:
        """What steps of a group need of others."""
        return {x for n in group for x in self.operands[n]} - group

    def fit(self, sweep: Sweep) -> bool:
        """Whether the fibres of a sweep fit in registers."""
        return sweep.single or live_registers(self.plan, sweep, self.split) <= self.registers


def steps_of(
    plan: Plan, skipped: Collection[int], quads: bool, split: Collection[int], registers: int
) -> Steps:
    """Those of a plan but for ``skipped`` tiles, which nobody needs on chip.

    ``registers`` of a thread are taken by what is no part of a sweep.
    """
    every: dict[int, Operation | Place] = {}
    shown: dict[int, list[int]] = {}
    for number, step in plan.numbered_steps():
        if number in skipped:
            continue
        if isinstance(step, View | Gather):
            shown.setdefault(origin(plan, number).tile, []).append(number)
        else:
            every[number] = step
    operations = {n: x for n, x in every.items() if not isinstance(x, Place)}
    modes = {n: mode for n, x in operations.items() if (mode := as_mode(plan, x)) is not None}
    terms = {n: "".join([labels for _, labels in x.terms]) for n, x in operations.items()}
    summed = {
        n: "".join(dict.fromkeys([x for x in terms[n] if x not in step.output_labels]))
        for n, step in operations.items()
    }
    pointwise = frozenset([n for n, x in summed.items() if not x and n not in modes])
    dots = frozenset([n for n, x in operations.items() if _is_dot(plan, x) and n not in modes])
    operands = {n: x.operands for n, x in every.items()}
    consumers: dict[int, list[int]] = {n: [] for n in range(len(plan.tiles))}
    for number, needed in operands.items():
        for operand in needed:
            consumers[operand].append(number)
    neighbours = {n: (*x, *consumers[n]) for n, x in operands.items()}
    facts = every, operations, modes, summed, pointwise, dots, operands, consumers, neighbours
    return Steps(plan, quads, split, LIVE_REGISTERS - registers, *facts, shown)


def _is_dot(plan: Plan, step: Operation) -> bool:
    """Whether it adds up products of lines of two tiles that differ between elements."""
    if not isinstance(step, Product):
        return False
    return len(step.contracted) == 1 and all(plan.tiles[x].batched for x in step.operands)


@dataclass(frozen=True)
class Progress:
    """The steps that are to be done, and the tiles that can be read from memory."""

    steps: Steps
    todo: frozenset[int]
    ready: frozenset[int]

    @cached_property
    def points(self) -> frozenset[int]:
        """The pointwise operations to be done."""
        return self.todo & self.steps.pointwise

    def without(self, tiles: Collection[int]) -> "Progress":
        """When a sweep makes these tiles."""
        return Progress(self.steps, self.todo.difference(tiles), self.ready)

    def after(self, tiles: Collection[int]) -> "Progress":
        """When these tiles are in memory."""
        shown = [x for tile in tiles for x in self.steps.shown.get(tile, ())]
        return Progress(self.steps, self.todo.difference(tiles), self.ready.union(tiles, shown))
