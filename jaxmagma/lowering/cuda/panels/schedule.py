"""In which order a lane computes fields: those of one long axis a few positions at a time.

Fields along one axis, the *tiled* one, are computed in loops over tiles of eight positions, in
which they are made from whole fields by tables, go through the functions at the points, and are
added to whole fields by tables again. Whole fields, those along other axes, and single values stay
in registers, or, if they are loaded for loops alone, may stay in memory. What a later loop needs
along the tiled axis it computes again, from what is whole.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jaxmagma.lowering.cuda.panels.fields import (
    Apply,
    Field,
    Fields,
    Load,
    Multiply,
    Number,
    Store,
    Sum,
)
from jaxmagma.programs.functions import TRUTHS


@dataclass(frozen=True)
class Straight:
    """Fields that are computed whole, in this order, and stored."""

    fields: tuple[int, ...]
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Loop:
    """What is done for each tile of the tiled axis, in this order.

    Attributes:
      multiplied: fields that tables make of whole ones.
      points: functions of these, and loads.
      accumulated: whole fields to which tables add these; and sums.
      stores: of fields along the tiled axis.
    """

    multiplied: tuple[int, ...]
    points: tuple[int, ...]
    accumulated: tuple[int, ...]
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Scope:
    """Parts, one after the other; straight ones stand around loops.

    Attributes:
      count: so often they are done.
      steps: of loads, by their number, and of stores: how much further they are each time.
    """

    parts: tuple[Straight | Loop, ...]
    count: int = 1
    steps: Mapping[int | Store, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """The scopes of a kernel, one after the other.

    What the first one computes whole, all know; what another computes is forgotten after it.
    ``tiled`` is the number of an axis, or of axes: then none is.
    """

    fields: Fields
    tiled: int
    scopes: tuple[Scope, ...]

    @property
    def tiles(self) -> int:
        """Of the tiled axis, if one is."""
        return sum(-(-x // 8) for x in self.fields.extents[self.tiled : self.tiled + 1])

    @property
    def has_whole_points(self) -> bool:
        """Whether functions are computed once, at all points: their chains run side by side."""
        loops = [x for scope in self.scopes for x in scope.parts if isinstance(x, Loop)]
        applied = (x for loop in loops for x in loop.points)
        whole = not any(isinstance(self.fields.fields[x], Apply) for x in applied)
        return whole and len(self.scopes) == 1

    def __repr__(self) -> str:
        lines = [repr(self.fields)]
        for number, scope in enumerate(self.scopes):
            times = f"{scope.count} times: " if scope.count > 1 else ""
            lines += [f"{'  ' * (number > 0)}{times}{self._described(x)}" for x in scope.parts]
        return "\n".join(lines)

    def _described(self, part: Straight | Loop) -> str:
        if isinstance(part, Straight):
            return f"straight: {listed(part.fields)}{_stored(part.stores)}"
        return (
            f"for tiles of {self.fields.extents[self.tiled]}: "
            f"multiply {listed(part.multiplied)}; apply {listed(part.points)}; "
            f"accumulate {listed(part.accumulated)}{_stored(part.stores)}"
        )


def listed(fields: Iterable[int]) -> str:
    """Their numbers; those that follow each other by the first and the last."""
    runs: list[list[int]] = []
    for x in fields:
        if runs and x == runs[-1][-1] + 1:
            runs[-1].append(x)
        else:
            runs.append([x])
    return " ".join(f"%{x[0]}" + f"-%{x[-1]}" * (len(x) > 1) for x in runs) or "nothing"


def _stored(stores: tuple[Store, ...]) -> str:
    return f"; store {listed(tuple(x.field for x in stores))}" if stores else ""


def schedules(fields: Fields) -> Iterator[Schedule]:
    """All schedules there are, one for each axis that can be the tiled one; or all is straight."""
    axes = range(len(fields.extents) + 1)  # the last one for no axis
    found = [(x, levels) for x in axes if (levels := _levels(fields, x)) is not None]
    for tiled, levels in found[:-1] or found:
        groups = _groups(fields, tiled)
        if len(groups) == 1:
            scopes = [Scope(tuple(_parts(fields, tiled, levels, fields.stores)))]
        else:
            common = _common(fields, tiled, groups)
            own = [tuple(_parts(fields, tiled, levels, x, (), common)) for x in groups]
            first = Scope(tuple(_parts(fields, tiled, levels, (), common)))
            scopes = [first, *_rolled(fields, own)]
        yield Schedule(fields, tiled, tuple(scopes))


def _groups(fields: Fields, tiled: int) -> list[list[Store]]:
    """Stores that are done with one group after the other, as the rows of a matrix.

    So what only one group needs is in registers for that time. Stores that share what few need are
    in one; and all of them are, where two need the same along the tiled axis, which would be
    computed twice.
    """
    groups: dict[int, list[Store]] = {}
    for store in fields.stores:
        groups.setdefault(store.field, []).append(store)
    users: dict[int, list[int]] = {}
    for group in groups:
        for x in fields.needed([group]):
            if fields.fields[x].axis is not None and _is_worth_keeping(fields.fields[x]):
                users.setdefault(x, []).append(group)
    for x, (first, *others) in users.items():
        if others and fields.fields[x].axis == tiled:
            return [list(fields.stores)]
        if 2 * len(others) < len(groups):
            one = groups[first]
            for other in others:
                if groups[other] is not one:
                    one += groups[other]
                    for store in groups[other]:
                        groups[store.field] = one
    return list({id(x): x for x in groups.values()}.values())


def _is_worth_keeping(field: Field) -> bool:
    """Whether it is more to make than a load, or a number."""
    return not isinstance(field, Load | Number)


def _common(fields: Fields, tiled: int, groups: list[list[Store]]) -> frozenset[int]:
    """What several groups need; loads, if most do and a lane has an element by itself.

    Those would wait for what is stored before, which may be in the same place for all a compiler
    knows.
    """
    counts = Counter(x for stores in groups for x in fields.needed(_fields_of(stores)))

    def is_common(field: Field, count: int) -> bool:
        if isinstance(field, Load) and not fields.extents:
            return 2 * count > len(groups)
        return count > 1 and _is_worth_keeping(field) and field.axis != tiled

    return frozenset(x for x, count in counts.items() if is_common(fields.fields[x], count))


def _fields_of(stores: Iterable[Store]) -> list[int]:
    return [x.field for x in stores]


def _levels(fields: Fields, tiled: int) -> list[int] | None:
    """How many loops have to be over before a field can be computed, or be used.

    None if a table is applied to a field along the tiled axis to make one along the same.
    """
    levels: list[int] = []
    for field in fields.fields:
        level = max((levels[x] for x in field.operands), default=0)
        along = {fields.fields[x].axis for x in field.operands}
        if isinstance(field, Multiply | Sum) and tiled in along:
            if field.axis == tiled or len(along) > 1:
                return None
            level += 1
        levels.append(level)
    return levels


def _parts(
    fields: Fields,
    tiled: int,
    levels: list[int],
    stored: Sequence[Store],
    more: Iterable[int] = (),
    given: Set[int] = frozenset(),
) -> Iterator[Straight | Loop]:
    """What makes some stores, and ``more`` fields that are whole, where some are ``given``."""
    wanted = [*_fields_of(stored), *more]
    left = fields.needed(wanted, given)
    ends = [n for n in left if _accumulates(fields, tiled, n)]
    for level in range(max(map(levels.__getitem__, wanted), default=-1) + 1):
        here = [x for x in stored if levels[x.field] == level]
        whole = tuple(
            n
            for n in left
            if fields.fields[n].axis != tiled and levels[n] == level and n not in ends
        )
        stores = tuple(x for x in here if fields.fields[x.field].axis != tiled)
        if whole or stores:
            yield Straight(whole, stores)
        accumulated = tuple(n for n in ends if levels[n] == level + 1)
        stores = tuple(x for x in here if fields.fields[x.field].axis == tiled)
        if accumulated or stores:
            yield _loop(fields, tiled, accumulated, stores)


def _accumulates(fields: Fields, tiled: int, number: int) -> bool:
    """Whether a field is made in a loop, for use after it."""
    field = fields.fields[number]
    return isinstance(field, Multiply | Sum) and fields.fields[field.operands[0]].axis == tiled


def _loop(
    fields: Fields, tiled: int, accumulated: tuple[int, ...], stores: tuple[Store, ...]
) -> Loop:
    needed = {x for n in accumulated for x in fields.fields[n].operands}
    needed |= {x.field for x in stores}
    for number in reversed(range(len(fields.fields))):
        field = fields.fields[number]
        if number in needed and isinstance(field, Apply):
            needed |= {x for x in field.operands if fields.fields[x].axis == tiled}
    multiplied = [n for n in sorted(needed) if isinstance(fields.fields[n], Multiply)]
    points = [n for n in sorted(needed) if isinstance(fields.fields[n], Apply | Load)]
    return Loop(tuple(multiplied), tuple(points), accumulated, stores)


# ---- Scopes that repeat each other ---------------------------------------------------------------


def _rolled(fields: Fields, scopes: Sequence[tuple[Straight | Loop, ...]]) -> Iterator[Scope]:
    """The scopes; as one those that do the same a constant distance further each time.

    As the rows of a matrix do: a compiler would need its time for each of them.
    """
    forms = [_form(fields, scope) for scope in scopes]
    first = 0
    while first < len(scopes):
        form, places = forms[first]
        last, steps = first, [0] * len(places)
        while last + 1 < len(scopes) and forms[last + 1][0] == form:
            further = list(forms[last + 1][1].values())
            apart = [y - x for x, y in zip(forms[last][1].values(), further, strict=True)]
            if last > first and apart != steps:
                break
            last, steps = last + 1, apart
        yield Scope(scopes[first], last - first + 1, dict(zip(places, steps, strict=True)))
        first = last + 1


def _form(
    fields: Fields, scope: tuple[Straight | Loop, ...]
) -> tuple[tuple[object, ...], dict[int | Store, int]]:
    """What a scope does, wherever its fields are in memory; and where they are."""
    made: dict[int, int] = {}  # how its own fields are numbered
    places: dict[int | Store, int] = {}
    form: list[object] = []

    def told(number: int) -> object:
        field = fields.fields[number]
        if isinstance(field, Number):
            return field
        return made.get(number, field)

    for part in scope:
        if isinstance(part, Straight):
            kinds: tuple[tuple[int, ...], ...] = (part.fields,)
        else:
            kinds = (part.multiplied, part.points, part.accumulated)
        form.append(tuple(map(len, kinds)))
        for number in itertools.chain(*kinds):
            field = fields.fields[number]
            made[number] = len(made)
            if isinstance(field, Load):
                places[number] = field.offset
                form.append(replace(field, offset=0))
            else:
                own = field if isinstance(field, Number) else replace(field, operands=())
                form.append((own, tuple(map(told, field.operands))))
        for store in part.stores:
            places[store] = store.offset
            form.append((replace(store, offset=0, field=0), told(store.field)))
    return tuple(form), places


# ---- Registers -----------------------------------------------------------------------------------


def most_values(schedule: Schedule, elements: int, elsewhere: Set[int] = frozenset()) -> int:
    """How many values a lane has at a time, at most; roughly. Those ``elsewhere`` do not count.

    Points are computed element by element.
    """
    events = list(_events(schedule))
    last: dict[int, int] = {}  # the event that uses a field last
    for number, (made, used, _) in enumerate(events):
        last.update(dict.fromkeys(used if made is not None else (), number))
    ends: dict[int, list[int]] = {}
    for x, number in last.items():
        ends.setdefault(number, []).append(x)
    most = held = 0
    alive: dict[int, int] = {}
    for number, (made, used, loop) in enumerate(events):
        if made is None:  # a scope ends, and has its own fields no more
            alive = {x: count for x, count in alive.items() if x in used}
            held = sum(alive.values())
            continue
        for x in made:
            if x not in elsewhere:
                held -= alive.get(x, 0)
                alive[x] = _values_of(schedule, x)
                held += alive[x]
        tiles = 0 if loop is None else 2 * len(_before_points(schedule, loop))
        points = 0 if loop is None else _peak(schedule, loop)
        most = max(most, elements * (held + tiles) + points)
        unused = [x for x in made if last.get(x, -1) <= number]
        for x in (*ends.get(number, ()), *unused):
            held -= alive.pop(x, 0)
    return most


# What is made, and what is used; and in which loop, if any. Where it is not said what is made, a
# scope ends, and what the first one has made is left.
_Event = tuple[tuple[int, ...] | None, set[int], Loop | None]


def _events(schedule: Schedule) -> Iterator[_Event]:
    """One after the other: whole fields singly, a loop at once."""
    fields = schedule.fields.fields
    outer = {x for part in schedule.scopes[0].parts for x in _made(part)}
    for scope in schedule.scopes:
        for part in scope.parts:
            if isinstance(part, Straight):
                yield from (((x,), set(fields[x].operands), None) for x in part.fields)
                yield (), {x.field for x in part.stores}, None
            else:
                inside = (*part.multiplied, *part.points, *part.accumulated)
                used = {y for x in inside for y in fields[x].operands}
                yield part.accumulated, used, part
        yield None, outer, None


def _made(part: Straight | Loop) -> tuple[int, ...]:
    return part.fields if isinstance(part, Straight) else part.accumulated


def _values_of(schedule: Schedule, number: int) -> int:
    """How many values of a whole field, or of a single value, a lane has of an element."""
    field, fields = schedule.fields.fields[number], schedule.fields
    if isinstance(field, Number):
        return 0
    if field.axis is None:
        # Whether something is so is a predicate, and takes no register of numbers.
        return 0 if isinstance(field, Apply) and field.function in TRUTHS else 1
    extent = fields.extents[field.axis]
    accumulates = _accumulates(fields, schedule.tiled, number)
    return 2 * -(-extent // 8) if accumulates else -(-extent // 4)


def _before_points(schedule: Schedule, loop: Loop) -> list[int]:
    """What is there for all points of a tile: what tables make, and what is loaded."""
    loads = [x for x in loop.points if isinstance(schedule.fields.fields[x], Load)]
    return [*loop.multiplied, *loads]


def _peak(schedule: Schedule, loop: Loop) -> int:
    """How many values at one point are there at a time, beyond those."""
    last = {}
    for number, x in enumerate(loop.points):
        for operand in schedule.fields.fields[x].operands:
            last[operand] = number
    for x in loop.accumulated:
        for operand in schedule.fields.fields[x].operands:
            last[operand] = len(loop.points)
    alive: set[int] = set()
    most = 0
    for number, x in enumerate(loop.points):
        if isinstance(schedule.fields.fields[x], Load):
            continue
        alive.add(x)
        most = max(most, len(alive))
        alive = {x for x in alive if last.get(x, -1) > number}
    return most
