"""How steps join a sweep: which of its lines their labels are, and whether they fit there."""

import heapq
import itertools
from collections.abc import Collection, Mapping

from jaxmagma.lowering.cuda.schedule.steps import Progress, Steps
from jaxmagma.lowering.cuda.schedule.sweeps import (
    ALONG,
    FIBRE_REGISTERS,
    LABELS,
    QUAD,
    Matrix,
    Move,
    Sweep,
    Value,
    words,
)
from jaxmagma.plans.plan import Rearrange


Names = Mapping[str, str]  # of labels of a step in a sweep: lines, or ALONG


def opened(steps: Steps, number: int, along: str) -> Sweep | None:
    """A sweep of one step, with fibres along one of its labels; "" is single values."""
    step, mode = steps.operations[number], steps.modes.get(number)
    labels = mode.tile_labels if mode else step.output_labels
    by_quads = steps.for_quads(number) if mode else along and not steps.summed[number]
    names = dict(zip([x for x in labels if x != along], LABELS, strict=False))
    extents = {name: step.extents[x] for x, name in names.items()}
    sweep = Sweep("".join(extents), extents, QUAD if steps.quads and by_quads else 1)
    return with_step(steps, sweep, number, names)


def joined(progress: Progress, sweep: Sweep, group: Collection[int]) -> Sweep | None:
    """The sweep with these pointwise steps, in order, if all of them fit."""
    steps, inside = progress.steps, set(group)
    # Those that touch the sweep come first: they say what labels are called.
    touching = [n for n in group if any(x in sweep.tiles for x in steps.operands[n])]
    while touching:
        drawn = drawn_in(progress, sweep, heapq.heappop(touching), inside, {})
        if drawn is None:
            return None
        for move in drawn.moves[len(sweep.moves) :]:
            for consumer in inside.intersection(steps.consumers[move.result.tile]):
                heapq.heappush(touching, consumer)
        sweep = drawn
    return sweep if inside <= sweep.tiles.keys() and steps.fit(sweep) else None


def drawn_in(
    progress: Progress, sweep: Sweep, number: int, inside: Collection[int], wanted: Names
) -> Sweep | None:
    """The sweep with a pointwise step, after those of ``inside`` that it needs, if they fit.

    Labels of its result may have names that are ``wanted``.
    """
    steps = progress.steps
    # Steps that wait for their operands, with names for labels of their results.
    waiting = [] if number in sweep.tiles else [(number, wanted)]
    while waiting:
        number, wanted = waiting.pop()
        terms = steps.operations[number].terms
        missing = [x for x in terms if x[0] not in sweep.tiles and x[0] not in progress.ready]
        if missing:
            operand, labels = missing[0]
            names = _names(steps, sweep, number, wanted)
            if names is None or operand not in inside:
                return None
            of = zip(steps.operations[operand].output_labels, labels, strict=True)
            given = {own: names[label] for own, label in of if label in names}
            # Without a line to go by, the order of the steps decides.
            if labels and not given:
                return None
            waiting += [(number, wanted), (operand, given)]
        elif added := with_step(steps, sweep, number, wanted):
            sweep = added
        else:
            return None
    return sweep


def with_step(steps: Steps, sweep: Sweep, number: int, wanted: Names) -> Sweep | None:
    """The sweep with a step whose operands are there, if it fits."""
    if number in steps.modes:
        move = _mode(steps, sweep, number)
    elif number in steps.dots:
        move = _dot(steps, sweep, number)
    else:
        move = _pointwise(steps, sweep, number, wanted)
    return sweep.with_move(move) if move else None


def _mode(steps: Steps, sweep: Sweep, number: int) -> Move | None:
    """A mode product whose lines are those of the sweep, if they can be the same."""
    step, mode = steps.operations[number], steps.modes[number]
    extents = step.extents
    if sweep.lanes == QUAD and not steps.for_quads(number):
        return None
    if mode.tile in sweep.tiles:
        own = sweep.tiles[mode.tile].labels
        if own.find(ALONG) != steps.axis(number):
            return None
        names = dict(zip(mode.tile_labels, own, strict=True))
    else:
        # A branch of its own, or another product of a tile that is read anyway.
        lines = [x for x in mode.tile_labels if x != mode.contracted]
        if [extents[x] for x in lines] != [sweep.extents[x] for x in sweep.lines]:
            return None
        names = dict(zip(lines, sweep.lines, strict=True))
    names |= {mode.contracted: ALONG, mode.new: ALONG}

    def index(label: str) -> int | None:
        return mode.matrix_labels.index(label) if label else None

    own = _renamed(mode.tile_labels, names)
    operand = sweep.operand(mode.tile, own, extents.get(mode.contracted, 1))
    result = Value(number, _renamed(step.output_labels, names), extents.get(mode.new, 1))
    matrix = Matrix(mode.matrix, index(mode.new), index(mode.contracted))
    return Move(step, result, (operand,), matrix)


def _dot(steps: Steps, sweep: Sweep, number: int) -> Move | None:
    """A sum of products whose lines are those of the sweep, if they can be the same.

    In the order in which it reads most that others read, too.
    """
    step = steps.operations[number]
    output, found = step.output_labels, list[Move]()
    if not sweep.tiles.keys().isdisjoint(step.operands):
        return None
    for lines in itertools.permutations(sweep.lines):
        names = dict(zip(output, lines, strict=False))
        if [step.extents[x] for x in output] != [sweep.extents[x] for x in lines]:
            continue
        names[steps.summed[number]] = ALONG
        length = step.extents[steps.summed[number]]
        own = (Value(x, _renamed(labels, names), length) for x, labels in step.terms)
        found.append(Move(step, Value(number, _renamed(output, names)), tuple(own)))
    return max(found, key=lambda x: sum(y in sweep.loads for y in x.operands), default=None)


def _names(steps: Steps, sweep: Sweep, number: int, wanted: Names) -> Names | None:
    """The names that operands in the sweep give to labels, if they agree with what is wanted."""
    names = dict(wanted)
    for operand, labels in steps.operations[number].terms:
        if operand in sweep.tiles:
            for label, name in zip(labels, sweep.tiles[operand].labels, strict=True):
                if names.setdefault(label, name) != name:
                    return None
    return names


def _pointwise(steps: Steps, sweep: Sweep, number: int, wanted: Names) -> Move | None:
    """An operation that acts value by value, or sums along the fibre, if it fits.

    One label may be the fibre's, if operands in the sweep and what is wanted name all others.
    """
    step, summed = steps.operations[number], steps.summed[number]
    if (named := _names(steps, sweep, number, wanted)) is None:
        return None
    every = "".join([labels for _, labels in step.terms]) + step.output_labels
    names = {**dict.fromkeys(every, ALONG), **named}
    if len(set(names.values())) < len(names):
        return None  # two labels would run along the fibre, or be the same line
    along = next((x for x in names if names[x] == ALONG), "")
    if summed and (summed != along or not isinstance(step, Rearrange)):
        return None
    if along and not summed and sweep.moves and sweep.single and not steps.joins_fibres:
        return None
    output = _renamed(step.output_labels, names)
    if not set(sweep.lines) <= set(output):
        return None  # several threads would make the same value
    length = step.extents.get(along, 1)
    if length * words(steps.plan, number) * 2 > FIBRE_REGISTERS:
        return None
    own = [_renamed(labels, names) for _, labels in step.terms]
    values = tuple(map(sweep.operand, step.operands, own, [length] * len(own)))
    # What was made in this sweep is in registers alone, with the labels that it has there.
    if [x.labels for x in values] != own:
        return None
    return Move(step, Value(number, output, length if ALONG in output else 1), values)


def _renamed(labels: str, names: Names) -> str:
    return "".join([names[x] for x in labels])
