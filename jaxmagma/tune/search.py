"""Finds the fastest of the ways to run a program.

The search climbs. From the best point so far it looks at all that differ in one dimension, removes
what a rule removes, races the rest against each other and goes on from the winner, until none of
the neighbours is faster. Then it tries two changes at a time, of those that alone cost little: what
makes room is of no use before something fills it. Then it leaps: to points that differ in several
dimensions, drawn at random. It ends where none of these is faster either, or when time is up. What
did best on the way runs a last race with what the model chooses.
"""

import concurrent.futures
import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxmagma.choices import MODEL, PLAIN, Choice
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.rules import Candidate, Rules, broken
from jaxmagma.lowering.space import Point, Space
from jaxmagma.tune import rules
from jaxmagma.tune.race import Effort, pick, race


# Who runs the last race, beside the model's choice; and the part of the time kept for it.
FINALISTS = 4
LAST_RACE = 0.2

# Of changes that alone cost no more than this part of the best time pairs may gain; so many pairs
# are tried.
COSTS_LITTLE = 0.2
PAIRS = 64
# A leap draws so many parameters anew, some of which may stay; so many leaps are a round.
CHANGES = (3, 4, 5, 6)
LEAPS = 64

SEARCHING = Effort(least=3, most=6)
DECIDING = Effort(least=7, most=15, beaten=(0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.07))


class Machine(Protocol):
    """What the search asks of a device; see ``device.Device``."""

    rules: Rules

    def lower(self, choice: Choice) -> Kernel | Declined: ...
    def stage(self, choice: Choice) -> Any: ...
    def resources(self, kernel: Kernel) -> Mapping[str, int] | None: ...
    def compile(self, staged: Any) -> Any: ...
    def outputs(self, executable: Any) -> Any: ...
    def same(self, executable: Any, wanted: Any) -> bool: ...
    def timer(self, executable: Any) -> Callable[[], float]: ...


@dataclass
class Found:
    """What a search found: every candidate that was timed, and what was not and why."""

    winner: Choice
    seconds: dict[Choice, list[float]]  # of the last race a candidate ran
    candidates: dict[Choice, Candidate]
    size: int  # of the space
    visited: int  # points of it that were looked at
    on_paper: Counter[str]  # removed from the whole space by rules on parameters alone
    removed: Counter[str]  # of those that were looked at
    out_of_time: int
    reasons: tuple[str, ...]  # for which candidates may be removed


@dataclass
class Search:
    """One search: for one program on one machine."""

    machine: Machine
    space: Space
    parameters_of: Callable[..., Any]  # the backend's class
    seconds: float = 60.0
    incumbent: Choice | None = None  # of an earlier search
    clock: Callable[[], float] = time.perf_counter
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)

    def run(self) -> Found:
        """Searches.

        Raises:
          Exception: what the model chooses does not compile or run.
        """
        self.deadline = self.clock() + self.seconds
        self.timers: dict[Choice, Callable[[], float]] = {}
        self.times: dict[Choice, list[float]] = {}
        self.candidates: dict[Choice, Candidate] = {}
        self.kernels: dict[Any, Choice] = {}
        self.choices: dict[Point, Choice | None] = {}  # None: removed
        self.removed: Counter[str] = Counter()
        self.out_of_time = 0
        self.random = random.Random(0)  # so that the same search looks the same
        with concurrent.futures.ThreadPoolExecutor(self.workers) as self.pool:
            self._start()
            self._climb()
            winner = self._decide()
        return Found(
            winner,
            self.times,
            self.candidates,
            self.space.size,
            len(self.choices),
            self._on_paper(),
            self.removed,
            self.out_of_time,
            rules.names_of(self.machine.rules),
        )

    # ---- The climb -------------------------------------------------------------------------------

    def _start(self) -> None:
        """Times the model's choice, plain JAX, the defaults and the incumbent."""
        model = Candidate(MODEL)
        lowered = self.machine.lower(MODEL)
        executable = self.machine.compile(self.machine.stage(MODEL))
        if isinstance(lowered, Kernel):
            model.kernel = lowered
            model.resources = self.machine.resources(lowered)
            self.kernels[_signature(lowered)] = MODEL
        self.wanted = self.machine.outputs(executable)
        self.candidates[MODEL] = model
        self.timers[MODEL] = self.machine.timer(executable)
        if self.space.plain and isinstance(lowered, Kernel):
            executable = self.machine.compile(self.machine.stage(PLAIN))
            self.candidates[PLAIN] = Candidate(PLAIN)
            self.timers[PLAIN] = self.machine.timer(executable)
        first = [self.space.origin]
        if self.incumbent is not None and self.incumbent.parameters:
            point = self.space.point(dict(self.incumbent.parameters))
            first += [] if point is None else [point]
        self._visit(first)
        self._race(self.timers, SEARCHING, MODEL)
        self.base = first[-1] if self.choices[first[-1]] is not None else first[0]

    def _climb(self) -> None:
        climbed = {self.base}
        while (
            self._moved(list(self.space.neighbours(self.base)), climbed)
            or self._moved(self._pairs(), climbed)
            or self._moved(self._leaps(), climbed)
        ):
            climbed.add(self.base)

    def _moved(self, around: Sequence[Point], climbed: Set[Point]) -> bool:
        """Whether one of these points is faster than the best so far; it is the best then."""
        if self._left() <= LAST_RACE * self.seconds:
            return False
        self._visit(p for p in around if p not in self.choices)
        points: dict[Choice, Point] = {}
        for point in (self.base, *around):
            choice = self.choices.get(point)
            if choice in self.timers:
                points.setdefault(choice, point)
        here = self.choices[self.base]
        # What lost clearly in an earlier race need not run again.
        best = min(map(statistics.median, self.times.values()), default=0.0)
        running = {
            x: self.timers[x]
            for x in points
            if x == here or x not in self.times or min(self.times[x]) < 1.1 * best
        }
        if len(running) < 2:
            return False
        favourite = here if here in running else next(iter(running))
        seconds = self._race(running, SEARCHING, favourite)
        winner = points[pick(seconds, favourite)]
        if winner in climbed:
            return False
        self.base = winner
        return True

    def _pairs(self) -> list[Point]:
        """Points that differ from the best by two changes that alone cost little, those first."""
        here = self.choices[self.base]
        if here not in self.times:
            return []
        most = (1 + COSTS_LITTLE) * statistics.median(self.times[here])
        found: dict[Choice, tuple[float, Point]] = {}
        for point in self.space.neighbours(self.base):
            choice = self.choices.get(point)
            if choice is not None and choice in self.times and choice != here:
                found.setdefault(choice, (statistics.median(self.times[choice]), point))
        little = sorted(x for x in found.values() if x[0] <= most)
        pairs: dict[Point, float] = {}
        for (one, first), (other, second) in itertools.combinations(little, 2):
            both = tuple(
                y if x == base else x for x, y, base in zip(first, second, self.base, strict=True)
            )
            if both not in (first, second):
                pairs.setdefault(both, one + other)
        return sorted(pairs, key=lambda x: pairs[x])[:PAIRS]

    def _leaps(self) -> list[Point]:
        """Points that differ by several changes from the best, or from the defaults."""
        found: dict[Point, None] = {}
        for number in range(LEAPS):
            point = list(self.base if number % 2 else self.space.origin)
            changes = min(self.random.choice(CHANGES), len(point))
            for n in self.random.sample(range(len(point)), changes):
                point[n] = self.random.randrange(len(self.space.dimensions[n].values))
            found[tuple(point)] = None
        return [x for x in found if x not in self.choices]

    def _decide(self) -> Choice:
        """The last race."""
        by_time = sorted(self.times, key=lambda x: statistics.median(self.times[x]))
        # Among equals the first wins: what won before, then what changes least.
        known = [MODEL]
        if self.incumbent in self.timers and self.incumbent is not None:
            known.append(self.incumbent)
        fastest = [x for x in by_time[:FINALISTS] if x not in known]
        finalists = known + sorted(fastest, key=lambda x: len(x.parameters or ()))
        seconds = self._race({x: self.timers[x] for x in finalists}, DECIDING, MODEL)
        return pick(seconds, MODEL)

    def _race(
        self, timers: Mapping[Choice, Callable[[], float]], effort: Effort, favourite: Choice
    ) -> dict[Choice, list[float]]:
        left = max(0.0, self._left())
        limited = Effort(effort.least, effort.most, left, effort.beaten)
        seconds = race(timers, limited, favourite, self.clock)
        self.times.update(seconds)
        return seconds

    def _left(self) -> float:
        return self.deadline - self.clock()

    # ---- Candidates ------------------------------------------------------------------------------

    def _visit(self, points: Iterable[Point]) -> None:
        """Looks at points: each gets a timer, or is removed by a rule."""
        compiling: dict[concurrent.futures.Future[Any], tuple[Point, Candidate]] = {}
        for point in points:
            self.choices[point] = None
            if self._late():
                self.out_of_time += 1
                continue
            found = self._candidate(point)
            if isinstance(found, str):
                self.removed[found] += 1
                continue
            if found.kernel is not None:
                known = self.kernels.setdefault(_signature(found.kernel), found.choice)
                if known != found.choice:
                    # The defaults are the model's kernel, as a rule: that is no candidate removed.
                    if point != self.space.origin:
                        self.removed[rules.SAME] += 1
                    else:
                        self.choices[point] = known
                    continue
            if reason := broken(self.machine.rules.kernel, found):
                self.removed[reason] += 1
                continue
            staged = self.machine.stage(found.choice)
            compiling[self.pool.submit(self._build, found, staged)] = (point, found)
        left = max(0.0, self._left() - LAST_RACE * self.seconds)
        done, pending = concurrent.futures.wait(compiling, left)
        for future in pending:
            if future.cancel():
                self.out_of_time += 1
            else:
                done.add(future)
        for future in compiling:  # in order, so that the same search looks the same
            if future in done:
                self._admit(*compiling[future], future)

    def _late(self) -> bool:
        return self._left() < LAST_RACE * self.seconds and len(self.choices) > 1

    def _candidate(self, point: Point) -> Candidate | str:
        """What a point stands for, or the rule that removes it."""
        parameters = self.space.parameters(point)
        candidate = Candidate(Choice.of(parameters, "search"))
        try:
            candidate.parameters = self.parameters_of(**parameters)
        except (TypeError, ValueError):
            return rules.INVALID
        if reason := broken(self.machine.rules.parameters, candidate):
            return reason
        lowered = self.machine.lower(candidate.choice)
        if isinstance(lowered, Declined):
            return rules.DECLINED
        candidate.kernel = lowered
        return candidate

    def _build(self, candidate: Candidate, staged: Any) -> Any:
        """Compiles a candidate, on any thread: what runs it, or the rule that removes it."""
        assert candidate.kernel is not None
        candidate.resources = self.machine.resources(candidate.kernel)
        model = self.candidates[MODEL]
        reason = broken(self.machine.rules.code, candidate)
        # A program that spills whatever one does may spill as much as the model's kernel.
        if reason is not None and broken(self.machine.rules.code, model) != reason:
            return reason
        return self.machine.compile(staged)

    def _admit(self, point: Point, candidate: Candidate, future: Any) -> None:
        try:
            built = future.result()
            if not isinstance(built, str):
                if self.machine.same(built, self.wanted):
                    self.timers[candidate.choice] = self.machine.timer(built)
                    self.candidates[candidate.choice] = candidate
                    self.choices[point] = candidate.choice
                    return
                built = rules.WRONG
        except Exception:  # of the compiler, the driver or XLA: all that matters is that it failed
            built = rules.FAILED
        self.removed[built] += 1

    def _on_paper(self) -> Counter[str]:
        """What rules on parameters alone remove from the whole space.

        Only what they look at is gone through: the space may have millions of points.
        """
        read = {name for rule in self.machine.rules.parameters for name in rule.reads}
        some = Space(tuple(x for x in self.space.dimensions if read & set(x.names)))
        each = self.space.size // some.size
        counts: Counter[str] = Counter()
        for point in some.points():
            try:
                parameters = self.parameters_of(**some.parameters(point))
            except (TypeError, ValueError):
                counts[rules.INVALID] += each
                continue
            candidate = Candidate(MODEL, parameters)
            if reason := broken(self.machine.rules.parameters, candidate):
                counts[reason] += each
        return counts


def _signature(kernel: Kernel) -> Any:
    """Equal for kernels that do the same."""

    def comparable(x: Any) -> Any:
        return x.tobytes() if isinstance(x, np.ndarray) else x

    return kernel.target, tuple((k, comparable(v)) for k, v in sorted(kernel.attributes.items()))
