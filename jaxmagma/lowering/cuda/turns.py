"""Sweeps along two axes of a plane, one after the other in registers (see ``cuda/turn.cuh``).

Where a sweep of quads makes tiles by products along one axis, and the next one takes them along
another, a warp may do both for one plane after the other: the product turns the tile, so that quads
have fibres along the second axis. Then it neither goes through shared memory, nor does anybody wait
for others.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from jaxmagma.lowering.cuda.sweeps import ALONG, QUAD, Stage, Sweep, Value


# Values of a plane that a lane may have of a tile: more leave no registers for a second one.
LANE_VALUES = 32


def with_turns(
    stages: Sequence[Stage],
    streamed: Collection[int],
    shown: Callable[[int], int],
    is_outside: Callable[[int], bool],
) -> list[Stage]:
    """The stages with turns from one sweep to the next, as many as there can be.

    Not at the positions of sweeps whose operands are ``streamed``, which have rows of their own.
    Of tiles that are parts of others, ``shown`` has the values. A sweep that reads much ``outside``
    had better have lines side by side, those of all planes.
    """
    steps = [n for n in range(len(stages) - 1) if not {n, n + 1} & set(streamed)]
    found = [_joined(stages, order, shown) for order in (steps, steps[::-1])]

    def cost(groups: list[list[Stage]]) -> tuple[int, int]:
        sweeps = [x for group in groups for x in group if isinstance(x, Sweep) and x.across]
        read = (x.count * v.length for x in sweeps for v in x.loads if is_outside(v.tile))
        return len(groups), sum(read)

    return [stage for group in min(found, key=cost) for stage in group]


def _joined(
    stages: Sequence[Stage], order: Iterable[int], shown: Callable[[int], int]
) -> list[list[Stage]]:
    """Groups of stages that a warp does one after the other; each stage joins the next in turn."""
    groups = [[stage] for stage in stages]
    for position in order:
        ends = [sum(map(len, groups[: n + 1])) for n in range(len(groups))]
        number = ends.index(position + 1) if position + 1 in ends else -1
        before, after = groups[number : number + 2]
        pair = _turned(before[-1], after[0])
        group = [*before[:-1], *pair, *after[1:]] if pair else []
        if pair and _is_apart(group, shown):
            groups[number : number + 2] = [group]
    return groups


def _is_apart(group: Sequence[Stage], shown: Callable[[int], int]) -> bool:
    """Whether sweeps read nothing that those before them make, other than what these turn."""
    made: set[int] = set()
    for sweep in group:
        assert isinstance(sweep, Sweep)
        if not made.isdisjoint(shown(x.tile) for x in sweep.loads):
            return False
        made |= sweep.tiles.keys()
    return True


def _turned(first: Stage, second: Stage) -> tuple[Sweep, Sweep] | None:
    """Two sweeps on the same planes, if what the second has of the first can be turned."""
    if not isinstance(first, Sweep) or not isinstance(second, Sweep):
        return None
    if first.lanes != QUAD or second.lanes != QUAD or first.outers or second.outers:
        return None
    handed = [x for x in second.loads if x.tile in first.tiles]
    names: dict[str, str] = {}  # of the lines in the second sweep
    for value in handed:
        made = first.tiles[value.tile]
        if len(made.labels) != len(first.lines) + 1 or not _is_turnable(first, made):
            return None
        for own, its in zip(made.labels, value.labels, strict=True):
            if names.setdefault(own, its) != its:
                return None
    line = next((x for x in names if names[x] == ALONG), ALONG)
    if line == ALONG or len({x.tile for x in handed}) < len(handed):
        return None
    new = names[ALONG]
    if len(set(names.values())) < len(names) or set(second.lines) != {*names.values()} - {ALONG}:
        return None
    if (first.across and first.lines[-1] != line) or (second.across and second.lines[-1] != new):
        return None
    if any(first.tiles[x.tile].length != second.extents[new] for x in handed):
        return None
    if -(-second.extents[new] // 8) * -(-first.extents[line] // 4) > LANE_VALUES:
        return None
    return _pair(first, second, handed, names)


def _is_turnable(sweep: Sweep, value: Value) -> bool:
    """Whether a fibre is made by a product, and used no more in that sweep."""
    products = [x for x in sweep.moves if x.result == value and x.matrix is not None]
    used = any(value in x.operands for x in sweep.moves)
    return bool(products) and not used and not products[0].turns


def _pair(
    first: Sweep, second: Sweep, handed: Sequence[Value], names: dict[str, str]
) -> tuple[Sweep, Sweep]:
    """Two sweeps whose planes are in the same order, with products that turn what is handed on."""
    line, new = next(x for x in names if names[x] == ALONG), names[ALONG]
    planes = [x for x in first.lines if x != line]
    if second.across:
        planes.sort(key=lambda x: second.lines.index(names[x]))
    tiles = {x.tile: x for x in handed}
    turning = [x for x in first.moves if x.result.tile in tiles]
    before = replace(
        first,
        lines="".join(planes) + line,
        moves=[x for x in first.moves if x not in turning],
        tiles={tile: x for tile, x in first.tiles.items() if tile not in tiles},
        across=True,
    )
    turned = [replace(x, result=tiles[x.result.tile], turns=second.extents[new]) for x in turning]
    after = replace(
        second,
        lines="".join(names[x] for x in planes) + new,
        loads=[x for x in second.loads if x not in handed],
        moves=[*turned, *second.moves],
        tiles={**tiles, **second.tiles},
        across=True,
        follows=True,
    )
    return before, after
