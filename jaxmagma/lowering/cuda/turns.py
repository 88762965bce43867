"""Sweeps along two axes of a plane, one after the other in registers (see ``cuda/turn.cuh``).

Where a sweep of quads makes tiles by products along one axis, and the next one takes them along
another, a warp may do both for one plane after the other: the product turns the tile, so that quads
have fibres along the second axis. Then it neither goes through shared memory, nor does anybody wait
for others.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from jaxmagma.lowering.cuda.sweeps import ALONG, QUAD, Stage, Sweep, Value


# Values of a plane that a lane may have: what is more leaves no registers for several of them.
LANE_VALUES = 32


def with_turns(stages: Iterable[Stage], streamed: Collection[int]) -> list[Stage]:
    """The stages with turns from one sweep to the next, wherever there can be.

    Not at the positions of sweeps whose operands are ``streamed``: these have rows of their own.
    """
    found: list[Stage] = []
    for position, stage in enumerate(stages):
        last = found[-1] if found else None
        pair = None
        alone = position in streamed or position - 1 in streamed
        if isinstance(last, Sweep) and isinstance(stage, Sweep) and not alone:
            pair = _turned(last, stage)
        if pair is None:
            found.append(stage)
        else:
            found[-1:] = pair
    return found


def _turned(first: Sweep, second: Sweep) -> tuple[Sweep, Sweep] | None:
    """Two sweeps on the same planes, if all that the second has of the first can be turned."""
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
    line = next((x for x in names if names[x] == ALONG), "")
    new = names.get(ALONG, "")
    if not handed or len({x.tile for x in handed}) < len(handed) or line in ("", ALONG):
        return None
    if len(set(names.values())) < len(names) or set(second.lines) != {*names.values()} - {ALONG}:
        return None
    if first.across and first.lines[-1] != line:
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
    first: Sweep, second: Sweep, handed: list[Value], names: dict[str, str]
) -> tuple[Sweep, Sweep]:
    line, new = next(x for x in names if names[x] == ALONG), names[ALONG]
    planes = [x for x in first.lines if x != line]
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
