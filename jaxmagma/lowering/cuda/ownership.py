"""Which threads have which elements, and how many fibres of them at a time.

A *group* of threads works on some elements together, on one slice of them after the other; a group
of one warp never waits for another one, so that several may be in a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmagma.lowering.cuda.matrices import QUAD_FIBRES, WORD, Matrices
from jaxmagma.lowering.cuda.parameters import MAX_THREADS, WARP, Parameters
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.gemms import blocking_of
from jaxmagma.lowering.cuda.schedule.sweeps import (
    Accumulation,
    Assembly,
    Gemm,
    Stage,
    Sweep,
    Total,
    copies,
    made_by,
)
from jaxmagma.lowering.cuda.transfers import Transfers, is_direct


# Threads of an element whose fibres are many. A quad has so many fibres one after the other, which
# share what it has of a matrix.
QUAD_THREADS = 128
QUAD_LINES = 4
# Threads that a group has best; fewer that have so many elements, where these are gathered and
# there are more stages than so many (benchmarks/results/meshes-h200.txt).
ENOUGH_THREADS = 128
FEW_THREADS = 64
FEW_ELEMENTS = 4
FEW_STAGES = 3
# Multiply-adds of an accumulation that are work for one thread.
ACCUMULATED_VALUES = 1024
# Where a fibre of four-byte values takes no more registers, a thread has so many at a time; two, if
# it is multiplied with matrices in shared memory, and not for several operations.
PACKED = ((10, 4), (18, 2))
NEAR_REGISTERS = 75
SEVERAL_MOVES = 8


@dataclass(frozen=True)
class Ownership:
    """Who has which elements."""

    threads: int  # of a group
    elements: int  # of a group, at a time
    groups: int  # of a block
    packed: int  # fibres that a thread has at a time
    paired: int  # fibres that a quad has at a time
    widest: int  # threads that one element keeps busy in the stage that has work for most

    def __repr__(self) -> str:
        groups = f", in each of {self.groups} groups" if self.groups > 1 else ""
        packed = f"; a thread has {self.packed} fibres at a time" if self.packed > 1 else ""
        busy = f"{self.elements} elements on {self.threads} threads{groups}"
        return f"{busy}; one keeps {self.widest} busy{packed}"

    @property
    def warps(self) -> int:
        """Of a group."""
        return self.threads // WARP

    @property
    def busy(self) -> float:
        """The part of the threads that the widest stage has work for."""
        work = self.elements * self.widest
        return work / _round_up(work, self.threads)

    def fibres(self, sweep: Sweep) -> int:
        """Fibres that a thread, or a quad, has at a time: as many as leave none without."""
        fibres = self.elements * sweep.count
        if sweep.lanes == 1:
            alone = sweep.single or sweep.places
            return 1 if alone else min(self.packed, -(-fibres // self.threads))
        octets = -(-fibres // 8)
        return min(self.paired, -(-octets // self.warps))

    def packs(self, sweep: Sweep) -> bool:
        """Whether values of a sweep come in packs, one for each fibre of their owner."""
        return sweep.lanes > 1 or self.fibres(sweep) > 1


def ownerships(matrices: Matrices, transfers: Transfers, given: Parameters) -> Iterator[Ownership]:
    """All with these parameters: the model's favourite, then those of ever fewer elements."""
    schedule = matrices.schedule
    packed = _packed(matrices, given)
    # What leaves shared memory as it is there is moved by however many threads there are.
    stages = [x for x in schedule.stages if not (copies(x) and schedule.wholes & {*made_by(x)})]
    busy = [_threads_of(schedule, x, packed) for x in stages]
    widest = max(busy, default=1)
    groups = _groups(schedule, given)
    paired = given.fibres or QUAD_FIBRES
    for elements, threads in _shapes(transfers, widest, given):
        # Barriers of several warps are barriers of the whole block.
        several = groups if threads <= WARP else 1
        yield Ownership(threads, elements, several, packed, paired, widest)


def _shapes(transfers: Transfers, most: int, given: Parameters) -> list[tuple[int, int]]:
    """(elements, threads) of a group, if an element keeps so many threads busy, at most."""
    schedule, in_rows = transfers.schedule, bool(transfers.streams)
    if given.elements is not None:
        threads = min(MAX_THREADS, _round_up(given.elements * most, WARP))
        return [(given.elements, given.threads or threads)]
    if schedule.alone:
        if schedule.ends.accumulations and schedule.octets > 2:
            return [(1, given.threads or WARP)]  # no registers for a second element beside sums
        # Eight fibres are multiplied in the time of sixteen.
        return [(1 + schedule.octets % 2, given.threads or WARP)]
    largest = given.threads or 256
    if schedule.quads and most >= QUAD_THREADS:
        return [(1, given.threads or QUAD_THREADS)]
    if most > largest:
        return [(1, given.threads or min(512, _round_up(most, WARP)))]
    # So many threads are enough to be several blocks on a multiprocessor, and few enough for their
    # barriers to cost little: fewer where all wait for what some gather, and then for each other,
    # unless elements would be so few that there are more bank conflicts.
    waits = bool(schedule.ends.gathered) and len(schedule.stages) > FEW_STAGES
    enough = FEW_THREADS if waits and FEW_ELEMENTS * most <= FEW_THREADS else ENOUGH_THREADS
    best, best_score = 1, 0.0
    for slots in range(1, 1 + (1 if in_rows else largest // most)):
        threads = given.threads or _round_up(slots * most, WARP)
        used = slots * most / threads
        far = math.log2(threads / enough)
        score = used * (1 - (0.3 * far if far > 0 else -0.6 * far))
        if score > best_score:
            best, best_score = slots, score
    return [(slots, given.threads or _round_up(slots * most, WARP)) for slots in range(best, 0, -1)]


def _threads_of(schedule: Schedule, stage: Stage, packed: int) -> int:
    """Threads that one element keeps busy."""
    if isinstance(stage, Gemm):
        return blocking_of(stage.step, schedule.ends.dtype.itemsize).count
    if isinstance(stage, Total):
        return stage.lanes * math.prod(stage.step.shape)
    if isinstance(stage, Accumulation):
        return -(-math.prod(stage.step.extents.values()) // ACCUMULATED_VALUES)
    if isinstance(stage, Assembly):
        return -(-schedule.plan.tiles[stage.number].size // 4)
    if stage.lanes > 1:
        return WARP * -(-schedule.octets // QUAD_LINES)
    if stage.light:
        # A thread takes several values, and more of them where a gemm comes after.
        copied = schedule.staged | schedule.rewritten
        staged = any(move.result.tile in copied for move in stage.moves)
        return -(-stage.count // (16 if staged else 4))
    if stage.single:
        # The threads that have fibres take several points, unless points are much of the work.
        fibres = sum(x.flops for x in schedule.sweeps if not x.single)
        return -(-stage.count // (4 if 2 * stage.flops <= fibres else 1))
    if stage.places:
        # They take many registers (benchmarks/results/elements-h200.txt).
        return min(stage.count, ENOUGH_THREADS)
    return -(-stage.count // packed)


def _packed(matrices: Matrices, given: Parameters) -> int:
    """Fibres that a thread has at a time: several short ones of small values.

    They share what it reads of matrices, and more of memory is on its way.
    """
    schedule = matrices.schedule
    if schedule.quads or schedule.whole:
        return 1
    if given.fibres is not None:
        return given.fibres
    if schedule.ends.dtype.itemsize >= WORD:
        return 1
    live = schedule.most_registers
    if matrices.near:
        few = all(len(x.moves) <= SEVERAL_MOVES for x in schedule.sweeps)
        return 2 if few and live <= NEAR_REGISTERS else 1
    return next((n for most, n in PACKED if live <= most), 1)


def _groups(schedule: Schedule, given: Parameters) -> int:
    if schedule.ends.summed:
        return 1
    if given.groups is not None:
        return given.groups
    return 2 if is_direct(schedule) and given.threads in (None, WARP) else 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
