"""From the steps of a plan to the stages of a kernel (see ``sweeps``).

Steps are grouped by list scheduling: the first step that is ready opens a sweep, and every ready
step that fits joins it. So equal branches of a program (the interpolations of two functions, the
three derivatives of one) go through their sweeps together and read what they share once.

**Pointwise operations** join in groups that belong together, all or none, as far as the fibres that
are then alive at once fit in registers. Where they do not, fibres are handed on through shared
memory to a sweep of single values: one thread for each point, everything in registers. That is also
what a program of pointwise operations alone becomes, however many they are.
"""

import copy
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from jaxmagma.lowering.cuda.origins import Origin, origin
from jaxmagma.lowering.cuda.sweeps import (
    ALONG,
    FIBRE_REGISTERS,
    LABELS,
    QUAD,
    Assembly,
    Gemm,
    Matrix,
    Mode,
    Move,
    Stage,
    Sweep,
    Value,
    as_mode,
    live_registers,
    words,
)
from jaxmagma.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.program import Gather, Place, View


# All fibres of a sweep that are alive at once must fit in a thread's registers; the rest of 255 is
# for addresses and for what the compiler loads ahead.
LIVE_REGISTERS = 176
# Pointwise steps that read more tiles than this do so value by value, with many threads, rather
# than fibre by fibre to hand on to a mode product.
MOST_LOADS = 6


Operation = Product | Rearrange | Pointwise


class Scheduler:
    """Groups the steps of ``plan`` into stages; tiles of ``skipped`` nobody needs on chip.

    With ``quads``, fibres are owned by quads wherever matrices multiply them. Matrices in ``split``
    are better multiplied half by half. ``registers`` of a thread are taken by what is no part of a
    sweep.
    """

    def __init__(
        self,
        plan: Plan,
        skipped: Iterable[int] = (),
        quads: bool = False,
        split: Collection[int] = (),
        registers: int = 0,
    ) -> None:
        self.plan = plan
        self.most = LIVE_REGISTERS - registers
        self.quads = quads
        self.split = split
        self.skipped = set(skipped)
        self.ready = set(range(len(plan.program.inputs)))  # tiles in memory
        self.origins: dict[int, Origin] = {}
        self.todo: dict[int, Operation | Place] = {}
        self.consumers: dict[int, list[int]] = {n: [] for n in range(len(plan.tiles))}
        for number, step in plan.numbered_steps():
            if number in self.skipped:
                continue
            if isinstance(step, View | Gather):
                self.origins[number] = origin(plan, number)
                continue
            self.todo[number] = step
            for operand in step.operands:
                self.consumers[operand].append(number)
        self.steps = {n: s for n, s in self.todo.items() if not isinstance(s, Place)}
        # What each step is, found once: a mode product, a sum over some labels, or pointwise.
        self.modes = {n: x for n, s in self.steps.items() if (x := as_mode(plan, s)) is not None}
        self.summed = {n: _summed(s) for n, s in self.steps.items()}
        self.pointwise = {n for n, x in self.summed.items() if not x and n not in self.modes}
        self.trying = False  # for who asks whether to wait: then nobody waits

    def stages(self) -> list[Stage]:
        stages: list[Stage] = []
        while self.todo:
            number = self._first()
            step = self.todo.pop(number)
            sweep = self._open(number) if number in self.steps else None
            if sweep is not None:
                sweep = self._filled(sweep)
                stages.append(sweep)
                self.ready |= sweep.tiles.keys()
                continue
            if isinstance(step, Place):
                stages.append(Assembly(number, step))
            else:
                assert not isinstance(step, Pointwise)
                stages.append(Gemm(number, step))
            self.ready.add(number)
        return stages

    def _first(self) -> int:
        """The step to open a stage with: mode products first, for pointwise steps may join them.

        Of pointwise steps the smallest, for those on larger tiles may need it.
        """
        found = [n for n, s in self.todo.items() if all(self._known(x) for x in s.operands)]
        modes = [n for n in found if n in self.modes]
        if modes:
            # The one along the fastest axis waits for nobody.
            return next(n for n in modes if not self._waits(n))
        return min(found, key=lambda n: math.prod(self.todo[n].shape))

    def _known(self, tile: int) -> bool:
        """Whether a tile can be read from memory."""
        if tile in self.origins:
            at = self.origins[tile]
            return at.tile in self.ready and (at.index is None or at.index in self.ready)
        return tile in self.ready

    # ---- Waiting ---------------------------------------------------------------------------------

    def _waits(self, number: int, coming: Collection[int] = ()) -> bool:
        """Whether a mode product is left for the sweep that needs it: when the others are there.

        Derivatives along several axes of a tile meet at its points. One of them is made where they
        meet, on the same fibres, and need not go through shared memory. It is the one along the
        slowest axis: that sweep touches memory in rows. Tiles that are ``coming`` are made in the
        sweep that would have it now.
        """
        if self.trying or number not in self.modes:
            return False
        group = self._meeting(number)
        needed = {x for n in group for x in self.todo[n].operands if x not in group}
        others = {x for x in needed if x != number and (x in self.todo or x in coming)}
        if not others or not all(self._may_come_first(x, number) for x in others):
            return False
        trial = self._trial()
        trial.trying = True
        trial.ready |= others
        for other in others & trial.todo.keys():
            del trial.todo[other]
        del trial.todo[number]
        sweep = trial._open(number)
        assert sweep is not None
        return group <= trial._filled(sweep).tiles.keys()

    def _trial(self) -> "Scheduler":
        """The same, whose steps are still to be done here."""
        trial = copy.copy(self)
        trial.todo, trial.ready = dict(self.todo), set(self.ready)
        return trial

    def _meeting(self, number: int) -> set[int]:
        """The pointwise steps that a tile leads to, and those they need; none if others take it."""
        group: set[int] = set()
        waiting = list(self.consumers[number])
        if not set(waiting) <= self.pointwise:
            return group
        while waiting:
            step = waiting.pop()
            if step in group or step not in self.pointwise or step not in self.todo:
                continue
            group.add(step)
            waiting += [*self.todo[step].operands, *self.consumers[step]]
        return group

    def _may_come_first(self, other: int, number: int) -> bool:
        """Whether a step is a product along a faster axis than this one, and done or ready."""
        if other not in self.modes:
            return False
        if other in self.todo and not all(self._known(x) for x in self.todo[other].operands):
            return False
        own, its = self.modes[number], self.modes[other]
        if not own.contracted or not its.contracted:
            return False
        return own.tile_labels.index(own.contracted) < its.tile_labels.index(its.contracted)

    # ---- Opening a sweep -------------------------------------------------------------------------

    def _open(self, number: int) -> Sweep | None:
        step, mode, summed = self.steps[number], self.modes.get(number), self.summed[number]
        if mode is not None:
            lanes = QUAD if self.quads and _for_quads(mode, step.extents) else 1
            sweep, names = _empty(mode.tile_labels, mode.contracted, step.extents, lanes)
            return self._with_mode(sweep, number, names)
        if len(summed) > (1 if isinstance(step, Rearrange) else 0):
            return None
        best: Sweep | None = None
        for along in [summed] if summed else self._fibres(number):
            lanes = QUAD if self.quads and along and not summed else 1
            empty, names = _empty(step.output_labels, along, step.extents, lanes)
            opened = self._with_pointwise(empty, number, names)
            if opened is not None:
                if not along or summed or self._reaches_mode(opened):
                    return opened
                best = best or opened
        return best

    def _reaches_mode(self, sweep: Sweep) -> bool:
        """Whether a mode product joins the sweep, if it is filled."""
        filled = self._trial()._filled(sweep)
        if len(filled.loads) > MOST_LOADS:
            return False
        return any(move.matrix is not None for move in filled.moves)

    def _fibres(self, number: int) -> list[str]:
        """Labels along which a pointwise operation may go, the best first; "" is single values."""
        return list(dict.fromkeys((*self._later_modes(number), "")))

    def _later_modes(self, number: int) -> Iterator[str]:
        """Labels of a tile that mode products of pointwise functions of it contract."""
        places, seen = [(number, self.steps[number].output_labels)], {number}
        while places:
            (tile, labels), *places = places
            for consumer in self.consumers[tile]:
                if consumer not in self.todo or consumer not in self.steps:
                    continue
                step, mode = self.steps[consumer], self.modes.get(consumer)
                if mode is not None:
                    if mode.tile == tile and mode.contracted:
                        label = labels[mode.tile_labels.index(mode.contracted)]
                        if label != " ":
                            yield label
                    continue
                if self.summed[consumer] or consumer in seen:
                    continue
                seen.add(consumer)
                own = next(x for value, x in step.terms if value == tile)
                names = dict(zip(own, labels, strict=True))
                places.append((consumer, "".join(names.get(x, " ") for x in step.output_labels)))

    # ---- Filling it ------------------------------------------------------------------------------

    def _filled(self, sweep: Sweep) -> Sweep:
        """The sweep that every step has joined that fits."""
        while True:
            before = len(sweep.moves)
            for number, step in list(self.todo.items()):
                if isinstance(step, Place) or number in self.pointwise:
                    continue
                if not all(x in sweep.tiles or self._known(x) for x in step.operands):
                    continue
                here = any(x in sweep.tiles for x in step.operands)
                if here or not self._waits(number, sweep.tiles):
                    sweep = self._taken(self._joined(sweep, [number])) or sweep
            sweep = self._with_points(sweep)
            if len(sweep.moves) == before:
                another = self._with_neighbour if sweep.single else self._with_branch
                sweep = self._taken(another(sweep)) or sweep
            if len(sweep.moves) == before:
                return sweep

    def _taken(self, sweep: Sweep | None) -> Sweep | None:
        """The sweep, if any, whose steps are then done."""
        for number in sweep.tiles if sweep else ():
            self.todo.pop(number, None)
        return sweep

    def _with_points(self, sweep: Sweep) -> Sweep:
        """The sweep with pointwise steps, groups that belong together all or none."""
        group = self._closure(sweep)
        # A step whose pointwise consumers are left behind would hand on more than it takes.
        whole = set(group)
        behind = [n for n in self.todo if isinstance(self.todo[n], Pointwise) and n not in whole]
        while behind:
            left = whole.intersection(self.todo[behind.pop()].operands)
            whole -= left
            behind += [n for n in left if isinstance(self.todo[n], Pointwise)]
        chosen = [n for n in group if n in whole]
        if chosen and (joined := self._taken(self._joined(sweep, chosen))):
            return joined
        for part in self._parts(chosen):
            if len(part) < len(chosen):
                sweep = self._taken(self._joined(sweep, part)) or sweep
        rest = [n for n in group if n in self.todo]
        joined = self._joined(sweep, rest) if len(rest) > len(chosen) else None
        if joined and len(self._handed_on(joined)) <= len(self._handed_on(sweep)):
            return self._taken(joined) or sweep
        return sweep

    def _with_neighbour(self, sweep: Sweep) -> Sweep | None:
        """A sweep of single values with an operation on other tiles of the same shape."""
        shape = [sweep.extents[x] for x in sweep.lines]
        for number in (n for n in self.todo if n in self.pointwise):
            step = self.steps[number]
            if list(step.shape) != shape or not all(self._known(x) for x in step.operands):
                continue
            names = dict(zip(step.output_labels, sweep.lines, strict=True))
            if joined := self._with_pointwise(sweep, number, names):
                return joined
        return None

    def _with_branch(self, sweep: Sweep) -> Sweep | None:
        """The sweep with a product along the same lines, and the functions its operand is of."""
        lines = [sweep.extents[x] for x in sweep.lines]
        for number, mode in self.modes.items():
            step = self.todo.get(mode.tile)
            if number not in self.todo or not isinstance(step, Pointwise):
                continue
            labels = dict(zip(mode.tile_labels, step.output_labels, strict=True))
            own = [labels[x] for x in mode.tile_labels if x != mode.contracted]
            if [step.extents[x] for x in own] != lines or not (group := self._made_of(mode.tile)):
                continue
            names = dict(zip(own, sweep.lines, strict=True))
            drawn = self._drawn_in(sweep, mode.tile, group, names)
            if drawn and (joined := self._joined(drawn, [number])):
                return joined
        return None

    def _made_of(self, number: int) -> set[int]:
        """The pointwise steps that lead from what can be read to this one; none if others do."""
        group, waiting = {number}, [number]
        while waiting:
            for operand in self.todo[waiting.pop()].operands:
                if self._known(operand) or operand in group:
                    continue
                if operand not in self.pointwise or operand not in self.todo:
                    return set()
                group.add(operand)
                waiting.append(operand)
        return group

    def _closure(self, sweep: Sweep) -> list[int]:
        """Pointwise steps that could be done in the sweep, and lead from it or to what does."""
        made = sweep.tiles.keys()
        possible: dict[int, bool] = {}  # and whether it comes from the sweep
        for number, step in self.todo.items():
            if number not in self.pointwise:
                continue
            known = (self._known(x) or x in made or x in possible for x in step.operands)
            if all(known):
                possible[number] = any(x in made or possible.get(x) for x in step.operands)
        for number in reversed(list(possible)):
            # What comes from memory alone is drawn in by those who need it.
            possible[number] |= any(possible.get(c) for c in self.consumers[number])
        return [n for n in possible if possible[n]]

    def _parts(self, group: list[int]) -> list[list[int]]:
        """The connected parts of a group of steps."""
        part = {n: n for n in group}

        def root(n: int) -> int:
            while part[n] != n:
                n = part[n]
            return n

        for number in group:
            for operand in self.todo[number].operands:
                if operand in part:
                    part[root(number)] = root(operand)
        parts: dict[int, list[int]] = {}
        for number in group:
            parts.setdefault(root(number), []).append(number)
        return list(parts.values())

    def _handed_on(self, sweep: Sweep) -> list[int]:
        made = sweep.tiles.keys()
        return [n for n in made if any(c not in made for c in self.consumers[n])]

    def _joined(self, sweep: Sweep, group: list[int]) -> Sweep | None:
        """The sweep with these steps, if all of them fit."""
        inside = set(group)
        # Those that touch the sweep come first: they say what labels are called.
        touching = [
            n
            for n in group
            if n in self.modes or any(x in sweep.tiles for x in self.todo[n].operands)
        ]
        while touching:
            before = len(sweep.moves)
            drawn = self._drawn_in(sweep, heapq.heappop(touching), inside)
            if drawn is None:
                return None
            sweep = drawn
            for move in sweep.moves[before:]:
                for consumer in self.consumers[move.result.tile]:
                    if consumer in inside:
                        heapq.heappush(touching, consumer)
        if not inside <= sweep.tiles.keys():
            return None
        fits = sweep.single or live_registers(self.plan, sweep, self.split) <= self.most
        return sweep if fits else None

    def _drawn_in(
        self, sweep: Sweep, number: int, inside: set[int], wanted: Mapping[str, str] | None = None
    ) -> Sweep | None:
        """The sweep with a step, after those of ``inside`` that it needs, if they fit.

        Labels of its result may have names that are ``wanted``.
        """
        # Steps that wait for their operands, with names for labels of their results.
        waiting: list[tuple[int, Mapping[str, str]]] = [(number, wanted or {})]
        while waiting:
            number, names = waiting[-1]
            if number in sweep.tiles:
                waiting.pop()
                continue
            step, mode = self.steps[number], self.modes.get(number)
            if mode is not None:
                if not (mode.tile in sweep.tiles or self._known(mode.tile)):
                    return None
                lines = self._mode_names(sweep, number)
                if lines is None:
                    return None
                sweep = self._with_mode(sweep, number, lines)
                continue
            names = dict(names)
            missing = []
            for operand, labels in step.terms:
                if operand in sweep.tiles:
                    for label, name in zip(labels, sweep.tiles[operand].labels, strict=True):
                        if names.setdefault(label, name) != name:
                            return None
                elif operand in inside:
                    missing.append((operand, labels))
                elif not self._known(operand):
                    return None
            if missing:
                operand, labels = missing[0]
                of = zip(self.steps[operand].output_labels, labels, strict=True)
                given = {own: names[label] for own, label in of if label in names}
                # Without a line to go by, the order of the steps decides.
                if not given and labels:
                    return None
                waiting.append((operand, given))
                continue
            added = self._with_pointwise(sweep, number, names)
            if added is None or (not names and sweep.lines):
                return None
            sweep = added
        return sweep

    def _mode_names(self, sweep: Sweep, number: int) -> dict[str, str] | None:
        """The lines of a mode product as lines of the sweep, if they can be the same."""
        mode, extents = self.modes[number], self.steps[number].extents
        if sweep.lanes == QUAD and not _for_quads(mode, extents):
            return None
        if mode.tile in sweep.tiles:
            names = dict(zip(mode.tile_labels, sweep.tiles[mode.tile].labels, strict=True))
            along = next((x for x in names if names[x] == ALONG), "")
            return names if along == mode.contracted else None
        # A branch of its own, or another product of a tile that is read anyway.
        lines = [x for x in mode.tile_labels if x != mode.contracted]
        if [extents[x] for x in lines] != [sweep.extents[x] for x in sweep.lines]:
            return None
        return dict(zip(lines, sweep.lines, strict=True))

    # ---- Adding an operation ---------------------------------------------------------------------

    def _with_mode(self, sweep: Sweep, number: int, lines: Mapping[str, str]) -> Sweep:
        """With a mode product whose lines have these names."""
        step, mode = self.steps[number], self.modes[number]
        extents = step.extents

        def labels(of: str) -> str:
            return "".join(ALONG if x in (mode.contracted, mode.new) else lines[x] for x in of)

        def axis(label: str) -> int | None:
            return mode.matrix_labels.index(label) if label else None

        length = extents.get(mode.contracted, 1)
        operand = sweep.operand(mode.tile, labels(mode.tile_labels), length)
        result = Value(number, labels(step.output_labels), extents.get(mode.new, 1))
        matrix = Matrix(mode.matrix, axis(mode.new), axis(mode.contracted))
        return sweep.with_move(Move(step, result, (operand,), matrix))

    def _with_pointwise(self, sweep: Sweep, number: int, names: dict[str, str]) -> Sweep | None:
        """With an operation that acts value by value, or sums along the fibre, if it fits.

        ``names`` says which lines some of its labels are; one other label may be the fibre's.
        """
        step, summed = self.steps[number], self.summed[number]
        output, operands = step.output_labels, step.terms
        every = dict.fromkeys("".join(labels for _, labels in operands) + output)
        names = names | {x: ALONG for x in every if x not in names}
        if len(set(names.values())) < len(names):
            return None  # two labels would run along the fibre, or be the same line
        along = next((x for x in names if names[x] == ALONG), "")
        if summed and (summed != along or not isinstance(step, Rearrange)):
            return None
        if not set(sweep.lines) <= {names[x] for x in output}:
            return None  # several threads would make the same value
        length = step.extents.get(along, 1)
        if length * words(self.plan, number) * 2 > FIBRE_REGISTERS:
            return None

        def labels(of: str) -> str:
            return "".join(names[x] for x in of)

        # What was made in this sweep is in registers alone, with the labels that it has there.
        for operand, own in operands:
            if operand in sweep.tiles and sweep.tiles[operand].labels != labels(own):
                return None
        values = tuple(sweep.operand(operand, labels(own), length) for operand, own in operands)
        result = Value(number, labels(output), length if along in output and along else 1)
        return sweep.with_move(Move(step, result, values))


def _empty(
    labels: str, along: str, extents: Mapping[str, int], lanes: int
) -> tuple[Sweep, dict[str, str]]:
    """A sweep over all ``labels`` but one, and what they are called there."""
    names = dict(zip((x for x in labels if x != along), LABELS, strict=False))
    return Sweep("".join(names.values()), {names[x]: extents[x] for x in names}, lanes), names


def _summed(step: Operation) -> str:
    labels = dict.fromkeys("".join(labels for _, labels in step.terms))
    return "".join(x for x in labels if x not in step.output_labels)


def _for_quads(mode: Mode, extents: dict[str, int]) -> bool:
    """Whether tensor cores can do a mode product: fibres on both sides."""
    return min(extents.get(mode.contracted, 1), extents.get(mode.new, 1)) > 1
