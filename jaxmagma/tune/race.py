"""Times several ways to run the same thing against each other, and picks one.

In every round each of them runs once or more, so that what slows the machine down for a while slows
all of them down. Those that are clearly beaten leave the race.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar


Name = TypeVar("Name", bound=Hashable)
# Runs something and returns the seconds it took.
Run = Callable[[], float]

# The favourite is kept unless another is faster by more than this part of its time.
TIE = 0.02


@dataclass(frozen=True)
class Effort:
    """How long to race: rounds at least and at most, and seconds after which no round starts.

    Who is slower than the best by ``beaten[n]`` after ``n + 1`` rounds leaves; the last one counts
    for all later rounds.
    """

    least: int = 4
    most: int = 12
    seconds: float = math.inf
    beaten: tuple[float, ...] = (1.0, 0.3, 0.15, 0.1, 0.07)


def race(
    runs: Mapping[Name, Run],
    effort: Effort,
    favourite: Name | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """The seconds of every round of each; the favourite stays until the end."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    alive = list(runs)
    deadline = clock() + effort.seconds
    for done in range(effort.most):
        late = clock() > deadline
        if (late and done >= min(2, effort.least)) or (len(alive) == 1 and done >= effort.least):
            break
        # Each goes first in half of the rounds.
        for name in alive[:: 1 if done % 2 == 0 else -1]:
            seconds[name].append(runs[name]())
        best = min(statistics.median(seconds[name]) for name in alive)
        margin = effort.beaten[min(done, len(effort.beaten) - 1)]
        # The fastest round counts: noise only adds to it.
        alive = [x for x in alive if x == favourite or min(seconds[x]) <= best * (1 + margin)]
    return seconds


def pick(seconds: Mapping[Name, Sequence[float]], favourite: Name, tie: float = TIE) -> Name:
    """The fastest by median; the favourite unless beaten by more than ``tie``.

    Among others within half of that of the fastest, the first in order.
    """
    medians = {name: statistics.median(x) for name, x in seconds.items()}
    # Who left early was timed in fewer rounds, and lost.
    most = max(len(x) for x in seconds.values())
    finished = [name for name, x in seconds.items() if len(x) == most]
    best = min(medians[name] for name in finished)
    if best > medians[favourite] * (1 - tie):
        return favourite
    return next(name for name in finished if medians[name] <= best * (1 + tie / 2))
