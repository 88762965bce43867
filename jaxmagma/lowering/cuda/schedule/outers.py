"""Outer products of fibres join the sweeps that have them: terms of sums that threads have whole.

``output[m, n] += left[m, k..] right[n, k..]`` of an element wants, for each k.., two fibres in the
registers of one thread. Where a sweep along m has one of them, it has it for all of k.., its lines.
Often the other is there as well: the derivative of a mode product by its matrix is the product of
what goes into it and of what comes back, and both are on the same lines.
"""

from collections.abc import Iterable, Mapping, Sequence

from jaxmagma.lowering.cuda.schedule.origins import Origin
from jaxmagma.lowering.cuda.schedule.sweeps import (
    ALONG,
    LABELS,
    Accumulation,
    Outer,
    Stage,
    Sweep,
    Value,
    made_by,
)


# Before the first stage.
BEFORE = -1


def with_outers(
    stages: Sequence[Stage], terms: Iterable[Accumulation], origins: Mapping[int, Origin]
) -> list[Stage]:
    """The stages with each term where it takes the fewest loads: in a sweep, or in one of its own.

    ``origins`` are of tiles whose values are part of others.
    """
    stages = list(stages)
    made = {tile: n for n, stage in enumerate(stages) for tile in made_by(stage)}
    own: dict[int, list[Stage]] = {}  # sweeps that follow each stage
    for term in terms:
        # The stage after which each operand can be read from memory.
        ready = {
            x: made.get(origins[x].tile if x in origins else x, BEFORE) for x in term.step.operands
        }
        places = [
            (loads, position, outer)
            for position, sweep in enumerate(stages)
            if isinstance(sweep, Sweep) and sweep.lanes == 1
            for loads, outer in _ways(sweep, term, {x for x in ready if ready[x] < position})
        ]
        if places:
            _, position, outer = min(places, key=lambda x: x[:2])
            sweep = stages[position]
            assert isinstance(sweep, Sweep)
            stages[position] = sweep.with_outer(outer)
        else:
            sweep, outer = _alone(term)
            own.setdefault(max(ready.values()), []).append(sweep.with_outer(outer))
    found = own.get(BEFORE, [])
    for position, stage in enumerate(stages):
        found += [stage, *own.get(position, [])]
    return found


def _ways(sweep: Sweep, term: Accumulation, ready: set[int]) -> Iterable[tuple[int, Outer]]:
    """How a sweep can do a term, by each fibre that it has: how many values it loads for that."""
    step = term.step
    if sweep.dots:
        return  # its threads have several places at a time
    found = [
        dict(zip(labels, value.labels, strict=True))
        for value in sweep.at_hand
        for tile, labels in step.terms
        if value.tile == tile
    ]
    if sweep.moves and all(move.step is not None for move in sweep.moves):
        labels = _contracted(term)
        if [step.extents[x] for x in labels] == [sweep.extents[x] for x in sweep.lines]:
            found.append(dict(zip(labels, sweep.lines, strict=True)))
    for names in found:
        lines = {x: names[x] for x in term.contracted if x in names}
        if sorted(lines.values()) != sorted(sweep.lines) or len(lines) < len(term.contracted):
            continue
        outer = _outer(term, lines)
        loads = [x for x in outer.operands if x not in sweep.at_hand]
        if all(x.tile in ready for x in loads):
            yield sweep.count * sum(x.length for x in loads), outer


def _alone(term: Accumulation) -> tuple[Sweep, Outer]:
    """A sweep for one term."""
    lines = dict(zip(_contracted(term), LABELS, strict=False))
    extents = {lines[x]: term.step.extents[x] for x in lines}
    return Sweep("".join(extents), extents), _outer(term, lines)


def _contracted(term: Accumulation) -> str:
    """What a term sums over, the fastest in memory last."""
    return "".join(x for x in term.step.left_labels if x in term.contracted)


def _outer(term: Accumulation, lines: Mapping[str, str]) -> Outer:
    """A term in a sweep with these names for what it sums over."""
    step = term.step

    def fibre(tile: int, labels: str, along: str) -> Value:
        return Value(tile, "".join(lines.get(x, ALONG) for x in labels), step.extents[along])

    return Outer(
        term.output,
        fibre(step.left, step.left_labels, step.rows),
        fibre(step.right, step.right_labels, step.columns),
    )
