"""Finds the parts of a program that is too large for one kernel.

Plain JAX in place of a kernel is 10 to 200 times as slow, and that for want of some shared memory.
So such a program becomes a few kernels, with as little between them as can be.

The contractions of the planned program stand in a row (see :mod:`jaxmagma.lowering.cuts`).  A part
has those between two cuts.  What is written at the cut before it, it reads; or nothing is written
there, and it computes again what it needs: so parts for different outputs may have nothing to tell
each other.  Of all parts between two cuts that seem to fit, the shortest path through the row has
those that move the fewest bytes.  The estimate of what fits is a rough one.  Where the backend
declines a part, it says how much too large that is, and the search is repeated with less room.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxmagma import cache
from jaxmagma.choices import MODEL
from jaxmagma.lowering import kept, lower, lower_for, plans
from jaxmagma.lowering.cuts import Cut, Row, as_program, in_depth
from jaxmagma.lowering.kernel import Declined
from jaxmagma.lowering.parts import Division, Piece, Whole, by_elements, by_sums, needed
from jaxmagma.lowering.target import Target
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import ElementProgram


# Bytes of memory traffic that take the time of an operation.
_BYTES_OF_FLOP = 0.1
# What part of the least traffic another kernel must save.
_ANOTHER_KERNEL = 0.02
# How often a search is repeated, and how much more room than it seems there is for the first.
_MOST_TRIALS = 24
_HOPE = 1.2
# What is left of it, at most, where a part that should have had so much of it has too little.
_LESS = 0.9
_NEAR = 0.75


def divide(program: ElementProgram, extents: tuple[int, ...], platform: str) -> Division | None:
    """The parts of a program that is too large for a kernel, if they have kernels.

    Or that has outputs which all elements share, beside others: plain JAX computes them once.
    """
    declined = lower(program, extents, platform)
    if not isinstance(declined, Declined):
        return None
    target = Target.here(platform)
    if declined.excess is not None:
        return _divided(program, extents, target)
    groups = by_elements(program)
    if groups is None:
        return None
    own = groups.parts[0].program
    made = lower(own, extents, platform)
    if not isinstance(made, Declined):
        return groups
    inner = None if made.excess is None else _divided(own, extents, target)
    return None if inner is None else groups.refined([inner, None])


@remembered
def _divided(program: ElementProgram, extents: tuple[int, ...], target: Target) -> Division | None:
    groups = by_sums(program)
    if groups is None:
        return None
    if len(groups.parts) == 1:
        return _cut(program, extents, target)
    inner: list[Division | None] = []
    for part in groups.parts:
        made = lower_for(part.program, extents, target)
        inner.append(None)
        if isinstance(made, Declined) and made.excess is not None:
            inner[-1] = _divided(part.program, extents, target)
            if inner[-1] is None:
                return None
    return groups.refined(inner)


def _cut(program: ElementProgram, extents: tuple[int, ...], target: Target) -> Division | None:
    """The parts of a program that are found by cutting it, or were in another process."""
    wholes = [Whole(as_program(plan)) for plan in plans(program, target.platform)]
    # Of kernels for the CPU the number of elements decides.
    name = None
    if target.platform != "cpu":
        name = kept.name_of(program, extents, target, MODEL, "parts")
        found = cache.read(name)
        if found is not None:
            route = [Piece(*map(tuple, x)) for x in found["pieces"]]
            return wholes[found["plan"]].divided(route) if route else None
    best = _Search(program, wholes, extents, target).run()
    if name is not None:
        pieces = [] if best is None else [(x.targets, x.written, x.known) for x in best.pieces]
        cache.write(name, {"plan": 0 if best is None else best.plan, "pieces": pieces})
    return None if best is None else wholes[best.plan].divided(best.pieces)


class _Search:
    """Looks for the parts of a program; ``room`` and ``steps`` are what one may have."""

    def __init__(
        self,
        program: ElementProgram,
        wholes: Sequence[Whole],
        extents: tuple[int, ...],
        target: Target,
    ) -> None:
        self.wholes = wholes
        self.extents = extents
        self.target = target
        # While these live, what is known of one is known of an equal part of another route.
        self.parts: list[ElementProgram] = []
        self.lanes = [_Lane(n, row) for n, whole in enumerate(wholes) for row in _rows(whole)]
        self.room: float = max(lane.room for lane in self.lanes)
        self.steps = math.inf
        declined = lower_for(program, extents, target)
        assert isinstance(declined, Declined) and declined.excess is not None
        if declined.lacks_room:
            least = min(lane.room for lane in self.lanes)
            self.room = least * min(_HOPE / declined.excess.times, _LESS)
        else:
            self.steps = len(wholes[0].program.operations) / declined.excess.times

    def run(self) -> "_Route | None":
        """The best parts that all have kernels, if there are any."""
        before = self.room
        for _ in range(_MOST_TRIALS):
            best: _Route | None = None
            for lane in self.lanes:
                best = lane.shortest(self.room, self.steps, best) or best
            if best is not None:
                before = self.room
                if self.fits(best):
                    return best
            elif self.room < _LESS * before:
                self.room = math.sqrt(self.room * before)  # it was too little
            else:
                return None
        return None

    def fits(self, route: "_Route") -> bool:
        """Whether no part is too large; else there is less room than was thought."""
        division = self.wholes[route.plan].divided(route.pieces)
        pairs = zip(route.stages, division.parts, strict=True)
        for stage, part in sorted(pairs, key=lambda x: -x[0].room):
            self.parts.append(part.program)
            made = lower_for(part.program, self.extents, self.target)
            # One that is declined for another reason is one that plain JAX does as fast.
            if isinstance(made, Declined) and made.excess is not None:
                values = route.lane.row.values(stage.makes)
                for lane in self.lanes:
                    if lane.plan == route.plan:
                        lane.declined.append(lane.row.set_of(values))
                if made.lacks_room and stage.room > _NEAR * self.room:
                    # The estimate may be wrong for this one alone: less room, but not by as much.
                    self.room *= min(made.excess.times**-0.5, _LESS)
                elif not made.lacks_room:
                    self.steps = min(self.steps, stage.steps / made.excess.times)
                return False
        return True


def _rows(whole: Whole) -> Iterator[Row]:
    """Orders in which the values of a program may be computed."""
    program = whole.program
    kept = frozenset(out.value for out in program.outputs if whole.is_kept(out))
    kept_first = sorted(whole.targets, key=lambda x: x not in kept)
    orders = [needed(program, whole.targets)]
    orders += [in_depth(program, x) for x in (whole.targets, kept_first, kept_first[::-1])]
    rows = (Row(program, order, whole.targets, kept) for order in orders)
    yield from {tuple(row.order): row for row in rows}.values()


@dataclass(frozen=True)
class _Stage:
    """A part of a route, the set of values that it makes in a row, and what it takes."""

    row: Row
    piece: Piece
    makes: int
    price: float

    @functools.cached_property
    def room(self) -> int:
        return self.row.room(self.makes)

    @functools.cached_property
    def steps(self) -> int:
        return self.makes.bit_count()


@dataclass(frozen=True)
class _Route:
    """Parts that follow each other in one of the rows."""

    lane: "_Lane"
    stages: tuple[_Stage, ...]
    price: float

    @property
    def plan(self) -> int:
        return self.lane.plan

    @property
    def pieces(self) -> list[Piece]:
        return [stage.piece for stage in self.stages]


class _Lane:
    """A row of values, its cuts, and the parts between them."""

    def __init__(self, plan: int, row: Row) -> None:
        self.plan = plan
        self.row = row
        start, end = frozenset[int](), frozenset(row.targets)
        self.cuts = [Cut(start, start), *row.cuts(), Cut(end, start)]
        operands = [x for x in row.order if x < row.first and row.whole[x]]
        least = sum(row.sizes[x] for x in [*operands, *row.kept])
        self.kernel = _ANOTHER_KERNEL * least * row.program.dtype.itemsize
        self.declined: list[int] = []
        self._stages: dict[tuple[int, int, bool, bool], _Stage | None] = {}
        self._needed: dict[frozenset[int], dict[int, int]] = {}

    @functools.cached_property
    def room(self) -> int:
        """About how many values a kernel of everything would hold."""
        return self.row.room(self.row.set_of(self.row.order))

    def needed(self, known: frozenset[int]) -> dict[int, int]:
        if known not in self._needed:
            self._needed[known] = self.row.needed(known)
        return self._needed[known]

    def shortest(self, room: float, steps: float, other: _Route | None = None) -> _Route | None:
        """The parts from one end to the other that take the least and have no more than this.

        None if there are none, or none that take less than another route.
        """
        most = math.inf if other is None else other.price
        best: dict[tuple[int, bool], _Route] = {(0, False): _Route(self, (), 0.0)}
        for begin in range(len(self.cuts)):
            for reads in (False, True):
                route = best.get((begin, reads))
                if route is None:
                    continue
                ends = {False, True}  # whether what is behind a part is written
                for end in range(begin + 1, len(self.cuts)):
                    for writes in sorted(ends):
                        stage = self.stage(begin, end, reads, writes)
                        if stage is None:
                            continue
                        price = route.price + stage.price
                        before = best.get((end, writes))
                        if price >= (most if before is None else before.price):
                            continue
                        # What does all of a part that is too large is so, too.
                        declined = any(x & stage.makes == x for x in self.declined)
                        if declined or stage.room > room or stage.steps > steps:
                            ends.remove(writes)
                            continue
                        best[end, writes] = _Route(self, (*route.stages, stage), price)
        return best.get((len(self.cuts) - 1, False))

    def stage(self, begin: int, end: int, reads: bool, writes: bool) -> _Stage | None:
        key = begin, end, reads, writes
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        return self._stages[key]

    def _stage(self, begin: int, end: int, reads: bool, writes: bool) -> _Stage | None:
        """The part between two cuts; None if it has nothing to do, or no kernel could do it."""
        row, before, behind = self.row, self.cuts[begin], self.cuts[end]
        if (reads and not before.written) or (writes and not behind.written):
            return None
        if (begin, end) == (0, len(self.cuts) - 1):
            return None  # it is the program
        known = before.written if reads else frozenset[int]()
        targets = behind.early - before.early
        written = behind.written - known - (row.kept & behind.early)
        wanted = targets | written if writes else targets
        if not wanted:
            return None
        needed = self.needed(known)
        part = functools.reduce(int.__or__, (needed[x] for x in wanted))
        makes = row.made(part, known)
        read = part & ~makes
        if not row.has_all_axes(read):
            return None
        stored = [*(wanted - targets), *(targets & row.kept)]
        moved = row.read_size(read) + sum(row.sizes[x] for x in stored)
        nbytes = moved * row.program.dtype.itemsize
        price = nbytes + row.flops(makes) * _BYTES_OF_FLOP + self.kernel
        reused = known and known.intersection(row.values(read))
        ordered = (tuple(sorted(x)) for x in (targets, wanted - targets, reused))
        return _Stage(row, Piece(*ordered), makes, price)
