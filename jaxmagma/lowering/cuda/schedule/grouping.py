"""From the steps of a plan to the stages of a kernel (see ``sweeps``).

Steps are grouped by list scheduling: the first step that is ready opens a sweep, and every ready
step that fits joins it. So equal branches of a program (the interpolations of two functions, the
three derivatives of one) go through their sweeps together and read what they share once.

**Pointwise operations** join in groups that belong together, all or none, as far as the fibres that
are then alive at once fit in registers. Where they do not, fibres are handed on through shared
memory to a sweep of single values: one thread for each point, everything in registers. That is also
what a program of pointwise operations alone becomes, however many they are.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from jaxmagma.lowering.cuda.schedule.dots import reads_for_each, together
from jaxmagma.lowering.cuda.schedule.joining import Names, joined, opened, with_step
from jaxmagma.lowering.cuda.schedule.steps import Progress, Steps
from jaxmagma.lowering.cuda.schedule.sweeps import (
    Assembly,
    Gemm,
    Stage,
    Sweep,
    Total,
    made_by,
)
from jaxmagma.plans.plan import Pointwise, Product, Rearrange
from jaxmagma.programs.program import Place


# Pointwise steps that read more tiles than this do so value by value, with many threads, rather
# than fibre by fibre to hand on to a mode product.
MOST_LOADS = 6
# More operations of a fibre are those of many threads, which there are where an element's tiles are
# multiplied (benchmarks/results/elements-h200.txt).
MOST_OF_FIBRE = 4000
MOST_BESIDE_DOTS = 1000
# Fewer dots are products that a thread has blocks of.
FEWEST_DOTS = 2


def stages_of(steps: Steps) -> list[Stage]:
    """The stages that do all steps, one after the other."""
    stages = _stages(steps)
    if any(isinstance(x, Sweep) and _is_long(steps, x) for x in stages):
        return _stages(replace(steps, joins_fibres=False))
    return stages


def _is_long(steps: Steps, sweep: Sweep) -> bool:
    """Whether fibres of a sweep without products are more work than a thread should have."""
    if sweep.single or any(x.matrix is not None for x in sweep.moves):
        return False
    return sweep.flops > sweep.count * (MOST_BESIDE_DOTS if steps.dots else MOST_OF_FIBRE)


def _stages(steps: Steps) -> list[Stage]:
    inputs = range(len(steps.plan.program.inputs))
    progress = Progress(steps, frozenset(steps.every), frozenset()).after(inputs)
    stages: list[Stage] = []
    while progress.todo:
        stages.append(_stage(progress, _first(progress)))
        progress = progress.after(made_by(stages[-1]))
    return [together(steps, x) if isinstance(x, Sweep) and x.dots else x for x in stages]


def _first(progress: Progress) -> int:
    """The step to open a stage with: mode products first, for pointwise steps may join them.

    Then products of what is in memory, one beside the other, and of pointwise steps the smallest,
    for those on larger tiles may need it.
    """
    steps, ready = progress.steps, progress.ready
    found = [n for n in sorted(progress.todo) if ready.issuperset(steps.operands[n])]
    modes = [n for n in found if n in steps.modes]
    if modes:
        # The one along the fastest axis waits for nobody.
        return next(n for n in modes if not _waits(progress, n))
    inputs = range(len(steps.plan.program.inputs))
    products = (n for n in found if isinstance(steps.every[n], Product))
    first = [n for n in products if all(x in inputs for x in steps.operands[n])]
    return min(first or found, key=lambda n: steps.plan.tiles[n].size)


def _stage(progress: Progress, number: int) -> Stage:
    """What a step opens: of sweeps the first that a mode product joins, or one of single values."""
    steps = progress.steps
    step = steps.every[number]
    if isinstance(step, Place):
        return Assembly(number, step)
    if isinstance(step, Product) and number in steps.dots:
        return _of_dots(progress, number) or Gemm(number, step)
    if number in steps.pointwise:
        fibres = [*dict.fromkeys(_later_modes(progress, number)), ""]
    else:
        fibres = [steps.summed[number]]  # by a mode product, too
    best: Sweep | None = None
    for along in fibres:
        sweep = opened(steps, number, along)
        if sweep is not None:
            sweep = _filled(progress, sweep)
            has_mode = any(x.matrix is not None for x in sweep.moves)
            if not along or (has_mode and len(sweep.loads) <= MOST_LOADS):
                return sweep
            best = best or sweep
    if best is None:
        assert not isinstance(step, Pointwise)
        return Total(number, step) if isinstance(step, Rearrange) else Gemm(number, step)
    return best


def _of_dots(progress: Progress, number: int) -> Sweep | None:
    """Dots that read no more values than they multiply, and what is done with what they make."""
    steps = progress.steps
    sweep = opened(steps, number, "")
    if sweep is None:
        return None
    sweep = _with_products(progress.without(sweep.tiles), sweep, patient=True)
    if len(sweep.moves) < FEWEST_DOTS:
        return None
    sweep = _filled(progress.without(sweep.tiles), sweep)
    return sweep if reads_for_each(together(steps, sweep)) <= 1 else None


def _later_modes(progress: Progress, number: int) -> Iterator[str]:
    """Labels of a tile that mode products of pointwise functions of it contract."""
    steps = progress.steps
    places, seen = [(number, steps.operations[number].output_labels)], {number}
    for tile, labels in places:  # more are found on the way
        for consumer in steps.consumers[tile]:
            if consumer in progress.todo and consumer in steps.modes:
                axis = steps.axis(consumer)
                if axis >= 0 and labels[axis] != " ":
                    yield labels[axis]
            elif consumer in progress.points and consumer not in seen:
                seen.add(consumer)
                step = steps.operations[consumer]
                own = next(x for value, x in step.terms if value == tile)
                names = dict(zip(own, labels, strict=True))
                places.append((consumer, "".join([names.get(x, " ") for x in step.output_labels])))


# ---- Filling a sweep -----------------------------------------------------------------------------


def _filled(progress: Progress, sweep: Sweep, patient: bool = True) -> Sweep:
    """The sweep that every step has joined that fits; unless ``patient``, none of them waits."""
    before = None
    while sweep is not before:
        before = sweep
        sweep = _with_products(progress.without(sweep.tiles), sweep, patient)
        progress = progress.without(sweep.tiles)
        sweep = _with_points(progress, sweep)
        if sweep is before and sweep.single:
            sweep = _with_neighbour(progress, sweep) or sweep
    return sweep


def _with_products(progress: Progress, sweep: Sweep, patient: bool) -> Sweep:
    """The sweep with products and sums, one by one."""
    steps = progress.steps
    for number in sorted(progress.todo - steps.pointwise):
        outside = [x for x in steps.operands[number] if x not in sweep.tiles]
        if number not in steps.operations or not progress.ready.issuperset(outside):
            continue
        if len(outside) < len(steps.operands[number]):
            names: Names | None = {}  # it is of what the sweep makes
        else:
            names = _names_beside(progress, sweep, number, patient)
        added = None if names is None else with_step(steps, sweep, number, names)
        if added and steps.fit(added):
            sweep, progress = added, progress.without([number])
    return sweep


def _names_beside(progress: Progress, sweep: Sweep, number: int, patient: bool) -> Names | None:
    """What labels of a step are called that joins others; None if it had better not.

    Mode products do, dots join dots, and sums join sums along lines of the same lengths.
    """
    steps = progress.steps
    step = steps.operations[number]
    if number in steps.modes:
        return None if patient and _waits(progress, number) else {}
    if number in steps.dots:
        return {} if sweep.dots else None
    lines = [sweep.extents[x] for x in sweep.lines]
    if isinstance(step, Rearrange) and sweep.lanes == 1 and lines == [*step.shape]:
        if any(isinstance(x.step, Rearrange) and not x.pointwise for x in sweep.moves):
            return dict(zip(step.output_labels, sweep.lines, strict=True))
    return None


def _with_points(progress: Progress, sweep: Sweep) -> Sweep:
    """The sweep with pointwise steps, groups that belong together all or none."""
    steps = progress.steps
    group = _closure(progress, sweep)
    inside = set(group)
    # A step whose pointwise consumers are left behind would hand on more than it takes.
    for number in sorted(progress.points, reverse=True):
        if number not in inside and isinstance(steps.operations[number], Pointwise):
            inside.difference_update(steps.operands[number])
    chosen = [n for n in group if n in inside]
    if chosen and (whole := joined(progress, sweep, chosen)):
        return whole
    if sweep.single:
        alike = _of_shape(progress, sweep, group)
        sweep = joined(progress, sweep, alike) or sweep if alike else sweep
    for part in _parts(steps, chosen):
        if len(part) < len(chosen):
            sweep = joined(progress, sweep, part) or sweep
    rest = [n for n in group if n not in sweep.tiles]
    whole = joined(progress, sweep, rest) if len(rest) > len(chosen) else None
    if whole and _handed_on(steps, whole) <= _handed_on(steps, sweep):
        return whole
    # Single values of an element, of which something larger is made.
    for number in rest if not sweep.lines else ():
        if not _hands_on_more(steps, sweep, number):
            sweep = joined(progress, sweep, [number]) or sweep
    return sweep


def _closure(progress: Progress, sweep: Sweep) -> list[int]:
    """Pointwise steps that could be done in the sweep, and lead from it or to what does."""
    steps, ready, made = progress.steps, progress.ready, sweep.tiles
    possible: dict[int, bool] = {}  # and whether it comes from the sweep
    for number in sorted(progress.points):
        operands = steps.operands[number]
        if all(x in made or x in possible or x in ready for x in operands):
            possible[number] = any(x in made or possible.get(x) for x in operands)
    for number in reversed(possible):
        # What comes from memory alone is drawn in by those who need it.
        possible[number] |= any(possible.get(x) for x in steps.consumers[number])
    return [n for n in possible if possible[n]]


def _of_shape(progress: Progress, sweep: Sweep, group: Iterable[int]) -> list[int]:
    """Those steps of a group that make as many values as the sweep, of others that do."""
    steps = progress.steps
    shape = sorted(map(sweep.extents.__getitem__, sweep.lines))
    found: dict[int, None] = {}
    for n in group:
        there = (x in found or x in sweep.tiles or x in progress.ready for x in steps.operands[n])
        if sorted(steps.operations[n].shape) == shape and all(there):
            found[n] = None
    return list(found)


def _parts(steps: Steps, group: Collection[int]) -> Iterator[list[int]]:
    """The connected parts of a group of steps."""
    left = set(group)
    for number in group:
        if number in left:
            part = _reached([number], steps.neighbours, left)
            left -= part
            yield sorted(part)


def _handed_on(steps: Steps, sweep: Sweep) -> int:
    """How many tiles of a sweep are needed elsewhere."""
    return sum(not sweep.tiles.keys() >= {*steps.consumers[n]} for n in sweep.tiles)


def _hands_on_more(steps: Steps, sweep: Sweep, number: int) -> bool:
    """Whether more tiles are needed elsewhere with one step more, for which others are not."""

    def stays(tile: int) -> bool:
        return all(x == number or x in sweep.tiles for x in steps.consumers[tile])

    taken = {x for x in steps.operands[number] if x in sweep.tiles}
    return not stays(number) and not any(map(stays, taken))


def _with_neighbour(progress: Progress, sweep: Sweep) -> Sweep | None:
    """A sweep of single values with an operation on other tiles of the same shape."""
    steps = progress.steps
    shape = tuple(sweep.extents[x] for x in sweep.lines)
    for number in sorted(progress.points):
        step = steps.operations[number]
        if step.shape == shape and progress.ready.issuperset(step.operands):
            names = dict(zip(step.output_labels, sweep.lines, strict=True))
            if added := with_step(steps, sweep, number, names):
                return added
    return None


# ---- Waiting -------------------------------------------------------------------------------------


def _waits(progress: Progress, number: int) -> bool:
    """Whether a mode product is left for the sweep that needs it: when the others are there.

    Derivatives along several axes of a tile meet at its points. One of them is made where they
    meet, on the same fibres, and need not go through shared memory. It is the one along the
    slowest axis: that sweep touches memory in rows.
    """
    steps = progress.steps
    if not steps.pointwise.issuperset(steps.consumers[number]):
        return False  # others take its result, too
    # The pointwise steps that it leads to, and those they need.
    group = _reached(steps.consumers[number], steps.neighbours, progress.points)
    others = (steps.needed(group) - progress.ready - {number}) & steps.every.keys()
    # These are products along faster axes, and done in this sweep or ready.
    first = all(
        -1 < steps.axis(number) < steps.axis(x)
        and (x not in progress.todo or progress.ready.issuperset(steps.operands[x]))
        for x in others
    )
    sweep = opened(steps, number, steps.summed[number]) if others and first else None
    if sweep is None:
        return False
    return group <= _filled(progress.after(others), sweep, patient=False).tiles.keys()


def _reached(
    first: Iterable[int], following: Mapping[int, Iterable[int]], within: Container[int]
) -> set[int]:
    """These steps, those that follow one of them, and so on, as far as they are ``within``."""
    found: set[int] = set()
    new = {x for x in first if x in within}
    while new:
        found |= new
        new = {x for n in new for x in following[n] if x in within} - found
    return found
