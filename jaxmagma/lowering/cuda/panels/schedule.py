"""In which order a lane computes fields: those of one long axis a few positions at a time.

Fields along one axis, the *tiled* one, are computed in loops over tiles of eight positions, in
which they are made from whole fields by tables, go through the functions at the points, and are
added to whole fields by tables again. Whole fields, those along other axes, and single values stay
in registers. What a later loop needs along the tiled axis it computes again, from what is whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmagma.lowering.cuda.panels.fields import (
    Apply,
    Fields,
    Load,
    Multiply,
    Number,
    Store,
    Sum,
)


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
class Schedule:
    """The parts of a kernel, one after the other; straight ones stand around loops."""

    fields: Fields
    tiled: int
    parts: tuple[Straight | Loop, ...]

    def __repr__(self) -> str:
        lines = [repr(self.fields)]
        for part in self.parts:
            if isinstance(part, Straight):
                lines.append(f"straight: {_listed(part.fields)}{_stored(part.stores)}")
            else:
                lines.append(
                    f"for tiles of {self.fields.extents[self.tiled]}: "
                    f"multiply {_listed(part.multiplied)}; apply {_listed(part.points)}; "
                    f"accumulate {_listed(part.accumulated)}{_stored(part.stores)}"
                )
        return "\n".join(lines)


def _listed(fields: tuple[int, ...]) -> str:
    return " ".join(f"%{x}" for x in fields) or "nothing"


def _stored(stores: tuple[Store, ...]) -> str:
    return f"; store {_listed(tuple(x.field for x in stores))}" if stores else ""


def schedules(fields: Fields) -> Iterator[Schedule]:
    """All schedules there are, one for each axis that can be the tiled one."""
    for tiled in range(max(1, len(fields.extents))):  # with no long axis, all is straight
        levels = _levels(fields, tiled)
        if levels is not None:
            yield Schedule(fields, tiled, _parts(fields, tiled, levels))


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


def _parts(fields: Fields, tiled: int, levels: list[int]) -> tuple[Straight | Loop, ...]:
    parts: list[Straight | Loop] = []
    ends = [n for n in range(len(fields.fields)) if _accumulates(fields, tiled, n)]
    for level in range(max(levels) + 1):
        here = [x for x in fields.stores if levels[x.field] == level]
        whole = tuple(
            n
            for n, field in enumerate(fields.fields)
            if field.axis != tiled and levels[n] == level and n not in ends
        )
        stores = tuple(x for x in here if fields.fields[x.field].axis != tiled)
        if whole or stores:
            parts.append(Straight(whole, stores))
        accumulated = tuple(n for n in ends if levels[n] == level + 1)
        stores = tuple(x for x in here if fields.fields[x.field].axis == tiled)
        if accumulated or stores:
            parts.append(_loop(fields, tiled, accumulated, stores))
    return tuple(parts)


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


# ---- Registers -----------------------------------------------------------------------------------


def most_values(schedule: Schedule, elements: int) -> int:
    """How many values a lane has at a time, at most; roughly.

    Points are computed element by element.
    """
    events = list(_events(schedule))
    last: dict[int, int] = {}  # the event that uses a field last
    for number, (_, used, _) in enumerate(events):
        last.update(dict.fromkeys(used, number))
    most = 0
    alive: dict[int, int] = {}
    for number, (made, _, loop) in enumerate(events):
        alive.update((x, _values_of(schedule, x)) for x in made)
        tiles = 0 if loop is None else 2 * len(loop.multiplied)
        points = 0 if loop is None else _peak(schedule, loop)
        most = max(most, elements * (sum(alive.values()) + tiles) + points)
        alive = {x: count for x, count in alive.items() if last.get(x, -1) > number}
    return most


def _events(schedule: Schedule) -> Iterator[tuple[tuple[int, ...], set[int], Loop | None]]:
    """What is made, and what is used, one after the other: whole fields singly, a loop at once."""
    fields = schedule.fields.fields
    for part in schedule.parts:
        if isinstance(part, Straight):
            yield from (((x,), set(fields[x].operands), None) for x in part.fields)
            yield (), {x.field for x in part.stores}, None
        else:
            inside = (*part.multiplied, *part.points, *part.accumulated)
            used = {y for x in inside for y in fields[x].operands}
            yield part.accumulated, used, part


def _values_of(schedule: Schedule, number: int) -> int:
    """How many values of a whole field, or of a single value, a lane has of an element."""
    field, fields = schedule.fields.fields[number], schedule.fields
    if isinstance(field, Number):
        return 0
    if field.axis is None:
        return 1
    extent = fields.extents[field.axis]
    accumulates = _accumulates(fields, schedule.tiled, number)
    return 2 * -(-extent // 8) if accumulates else -(-extent // 4)


def _peak(schedule: Schedule, loop: Loop) -> int:
    """How many values at one point are there at a time, beyond those that tables made."""
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
        alive.add(x)
        most = max(most, len(alive))
        alive = {x for x in alive if last.get(x, -1) > number}
    return most
