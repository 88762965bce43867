"""What a kernel does, stage by stage (see ``sweeps``).

``grouping`` makes them of the steps of a plan. Around them come copies: what gemms read many times
is *staged*, and results that would be written far apart leave through shared memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxmagma.lowering.cuda.schedule.accumulations import WHOLE_REGISTERS, whole_registers
from jaxmagma.lowering.cuda.schedule.ends import Ends
from jaxmagma.lowering.cuda.schedule.grouping import stages_of
from jaxmagma.lowering.cuda.schedule.origins import Origin
from jaxmagma.lowering.cuda.schedule.outers import with_outers
from jaxmagma.lowering.cuda.schedule.steps import steps_of
from jaxmagma.lowering.cuda.schedule.sweeps import (
    ALONG,
    Gemm,
    Move,
    Stage,
    Sweep,
    Total,
    copies,
    copy_sweep,
    described,
    is_mirrored,
    live_registers,
    made_by,
)
from jaxmagma.plans.parity import Halves
from jaxmagma.plans.plan import Plan


# A warp that has fibres eight at a time does all of an element, if it need not do so more often.
FEW_OCTETS = 4
# Rows of an output that are so long go through shared memory, to be written side by side.
LONG_ROW = 4


@dataclass(frozen=True)
class Schedule:
    """The stages of a kernel, one after the other."""

    ends: Ends
    stages: tuple[Stage, ...]
    quads: bool  # own the fibres that matrices multiply
    halves: Mapping[int, Halves]  # of matrices that are multiplied half by half
    whole: frozenset[int]  # the sums over elements that every thread has whole
    staged: frozenset[int]  # operands that are copied to shared memory for gemms and sums
    rewritten: frozenset[int]  # tiles that go to outputs from shared memory

    def __repr__(self) -> str:
        return "\n".join(map(described, self.stages))

    @property
    def plan(self) -> Plan:
        return self.ends.plan

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        return tuple(x for x in self.stages if isinstance(x, Sweep))

    @cached_property
    def wholes(self) -> frozenset[int]:
        """The tiles that some sweep makes all parts of."""
        return frozenset(x for sweep in self.sweeps for x in sweep.wholes)

    @cached_property
    def octets(self) -> int:
        """How often one warp would take eight fibres of an element, in the largest sweep."""
        return -(-max((x.count for x in self.sweeps if x.lanes > 1), default=0) // 8)

    @property
    def alone(self) -> bool:
        """Whether one warp has all fibres of an element."""
        return 0 < self.octets <= FEW_OCTETS

    def read(self, stage: Stage) -> list[int]:
        """The tiles that a stage reads where they are in memory."""
        if isinstance(stage, Sweep):
            tiles = [value.tile for value in stage.loads]
        else:
            tiles = list(stage.step.operands)
        found: dict[int, None] = {}
        for tile in tiles:
            staged = tile in self.staged and not copies(stage)
            at = Origin(tile) if staged else self.ends.origin(tile)
            found[at.tile] = None
            if at.index is not None:
                found[at.index] = None
        return list(found)

    @cached_property
    def everything_read(self) -> frozenset[int]:
        return frozenset(x for stage in self.stages for x in self.read(stage))

    def products_of_threads(self) -> list[Move]:
        """The mode products whose fibres threads own."""
        sweeps = (x for x in self.sweeps if x.lanes == 1)
        return [move for sweep in sweeps for move in sweep.moves if move.matrix is not None]

    def is_mirrored(self, sweep: Sweep) -> bool:
        """Whether quads have opposite values of fibres in one lane, and multiply halves."""
        return is_mirrored(sweep, self.halves)

    def live_registers(self, sweep: Sweep) -> int:
        return live_registers(self.plan, sweep, self.halves)

    @cached_property
    def most_registers(self) -> int:
        """Of a thread, for the fibres of any sweep."""
        return max(map(self.live_registers, self.sweeps), default=0)

    @property
    def sums_registers(self) -> int:
        return self.ends.sums_registers(self.whole)

    @property
    def kept_registers(self) -> int:
        return self.ends.kept_registers(self.whole)


def schedules_of(
    ends: Ends, quads: bool, halves: Mapping[int, Halves], kept: int = 0
) -> list[Schedule]:
    """With all operands of gemms staged; and with no more of them than need be, if that is less.

    Threads keep so many registers, and those of sums, all the time.
    """
    whole = _whole_sums(ends, quads)
    kept += ends.kept_registers(whole)
    stages = stages_of(steps_of(ends.plan, ends.skipped, quads, halves, kept))
    made = {tile for x in stages if isinstance(x, Sweep | Gemm | Total) for tile in made_by(x)}

    def schedule(staging: bool) -> Schedule:
        some, staged = _with_staging(ends, stages, staging)
        own, some = _with_wholes(ends, some)
        rewritten = {x for x in own.written if x in made and _in_fibres(own, x, some)}
        copied = [x for x in own.written if x not in made or x in rewritten]
        every = _with_ends(own, some, whole, copied)
        made_whole = {x for y in some if isinstance(y, Sweep) for x in y.wholes}
        facts = map(frozenset, (staged, rewritten | made_whole))
        return Schedule(own, tuple(every), quads, halves, whole, *facts)

    first = schedule(staging=True)
    avoidable = any(ends.origin(x).index is None for x in first.staged)
    return [first, schedule(staging=False)] if avoidable else [first]


def _with_staging(
    ends: Ends, stages: Sequence[Stage], staging: bool
) -> tuple[list[Stage], set[int]]:
    """The stages with copies of the operands of gemms, and of sums if others read them, too.

    And what is copied. Gathered ones are in any case. Gemms one beside the other wait once.
    """
    found: list[Stage] = []
    first = 0  # of gemms beside each other
    staged: set[int] = set()
    uses = [x for step in ends.plan.steps for x in step.operands]
    for stage in stages:
        if not (isinstance(stage, Gemm) and found and isinstance(found[-1], Gemm)):
            first = len(found)
        for operand in _read_often(stage):
            again = not isinstance(stage, Total) or uses.count(operand) > 1
            needed = (staging and again) or ends.origin(operand).index is not None
            if ends.is_outside(operand) and needed and operand not in staged:
                staged.add(operand)
                found.insert(first, copy_sweep(ends.plan, operand))
                first += 1
        found.append(stage)
    return found, staged


def _read_often(stage: Stage) -> list[int]:
    """The operands of products of two tiles of an element, and of sums."""
    if isinstance(stage, Sweep):
        return [x.tile for move in stage.dots for x in move.operands]
    return list(stage.step.operands) if isinstance(stage, Gemm | Total) else []


def _with_wholes(ends: Ends, stages: Sequence[Stage]) -> tuple[Ends, list[Stage]]:
    """With matrices of elements put together in shared memory, whose parts are made by dots.

    There is little else in memory. If every part were written to its places in the output, which
    are apart, memory would be asked for each sector as often as there are parts in it.
    """
    found = list(stages)
    sweeps = {n: x for n, x in enumerate(stages) if isinstance(x, Sweep) and x.dots}
    for output in ends.stored:
        tile = ends.plan.results[output]
        parts = {n for n, places in ends.written.items() if output in (out for out, _ in places)}
        maker = next((n for n, x in sweeps.items() if parts <= x.tiles.keys()), None)
        if maker is not None and len(parts) > 1 and tile in ends.skipped:
            ends = ends.with_whole(tile, output)
            found[maker] = sweeps[maker] = _with_whole(sweeps[maker], tile, ends, min(parts))
    return ends, found


def _with_whole(sweep: Sweep, tile: int, ends: Ends, part: int) -> Sweep:
    """The sweep that makes all parts of a tile: threads side by side have what is so in a part."""
    _, at = ends.parts[part][0]
    strides = dict(zip(sweep.tiles[part].labels, at.strides, strict=True))
    lines = "".join(sorted(sweep.lines, key=lambda x: -strides[x]))
    return replace(sweep, lines=lines, wholes=(*sweep.wholes, tile))


def _in_fibres(ends: Ends, tile: int, stages: Sequence[Stage]) -> bool:
    """Whether threads have fibres of an output, and would write it far apart.

    Memory would be asked for rows many times, and for parts of sectors.
    """
    for stage in (x for x in stages if isinstance(x, Sweep)):
        made = stage.tiles.get(tile)
        if made is not None and ALONG in made.labels:
            axis = made.labels.index(ALONG)
            rows = any(at.strides[axis] == 1 for _, at in ends.written[tile])
            return rows and made.length >= LONG_ROW and stage.lanes == 1
    return False


def _with_ends(
    ends: Ends, stages: Sequence[Stage], whole: frozenset[int], copied: Sequence[int]
) -> list[Stage]:
    """The stages with copies to outputs; with accumulations, if any, each as soon as can be.

    Tiles then leave shared memory early, and what reads them waits for no barrier of its own.
    """
    if not ends.accumulations:
        return [*stages, *(copy_sweep(ends.plan, tile) for tile in copied)]
    outers = (x for x in ends.accumulations if x.output in whole)
    stages = with_outers(stages, outers, ends.origins)
    known = set(range(ends.inputs))
    left = list(copied)
    waiting = [x for x in ends.accumulations if x.output not in whole]
    found: list[Stage] = []

    def follow() -> None:
        for tile in [x for x in left if ends.origin(x).tile in known]:
            left.remove(tile)
            found.append(copy_sweep(ends.plan, tile))
        for sum_ in [*waiting]:
            if {ends.origin(x).tile for x in sum_.step.operands} <= known:
                waiting.remove(sum_)
                found.append(sum_)

    follow()
    for stage in stages:
        found.append(stage)
        known.update(made_by(stage))
        follow()
    return found


def _whole_sums(ends: Ends, quads: bool) -> frozenset[int]:
    """The sums that every thread has whole: small ones, of fibres that threads own."""
    found: set[int] = set()
    left = 0 if quads else WHOLE_REGISTERS
    for output in sorted(ends.accumulated):
        registers = whole_registers(ends.plan, ends.plan.results[output])
        if registers <= left:
            found.add(output)
            left -= registers
    return frozenset(found)
