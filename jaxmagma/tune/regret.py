"""How much the model's choices cost: its time over that of the tuned winner, program by program."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmagma.choices import MODEL, Choice
from jaxmagma.tune.device import Device
from jaxmagma.tune.race import Effort, race
from jaxmagma.tune.search import DECIDING


def compare(machine: Device, tuned: Choice, effort: Effort = DECIDING) -> dict[Choice, list[float]]:
    """Seconds of the model's choice and of a tuned one, raced against each other."""
    choices = [MODEL] if tuned.is_model else [MODEL, tuned]
    timers = {x: machine.timer(machine.compile(machine.stage(x))) for x in choices}
    return race(timers, Effort(effort.least, effort.most, effort.seconds, (math.inf,)))


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of no ratios, 1."""
    logarithms = [math.log(x) for x in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0


def as_json(ratios: Mapping[str, float], facts: Mapping[str, Any]) -> dict[str, Any]:
    worst = max(ratios, key=lambda name: ratios[name], default="")
    return {
        **facts,
        "geometric_mean": geometric_mean(ratios.values()),
        "worst": worst,
        "model_over_tuned": dict(ratios),
    }
