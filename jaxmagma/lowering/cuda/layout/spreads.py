"""Which lines of a sweep neighbouring quads have: side by side, or some apart.

Shared memory serves half a warp at a time: four quads, whose lanes have neighbouring values of a
fibre. Where fibres run along an axis of odd stride, four lines side by side meet in banks, and four
that are 4 apart never do. So tiles need no padding but for what makes a
stride odd. In global memory lines side by side are better: they are part of the same pieces.

Lines are spread inside groups of sixteen, which two octets of quads have: the same warp if its
quads have two fibres at a time.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxmagma.lowering.cuda.schedule.sweeps import QUAD


# From the line of a quad to that of the next one; the fourth is followed by one next to the first.
SPREADS = (1, 2, 4)
# Threads side by side have the same line of different elements.
ACROSS = 0
OCTET = 8
# Lines of two octets.
GROUP = 2 * OCTET
# Bytes of global memory that a load asks for at once, and a store writes at once.
LOADED_BYTES = 128
STORED_BYTES = 32
# Threads that one load serves at a time, if values have 8 bytes.
HALF_WARP = 16


def line(quad: np.ndarray, spread: int) -> np.ndarray:
    """The line that each quad of a block has, as in ``cuda/quad.cuh``."""
    octet, own = quad // OCTET, quad % OCTET
    if spread == 4:
        return octet // 2 * GROUP + own % 4 * 4 + own // 4 + octet % 2 * 2
    if spread == 2:
        return octet * OCTET + own % 4 * 2 + own // 4
    return quad


def possible(lines: int, fibres: int) -> tuple[int, ...]:
    """The spreads of so many lines that take no octet more, with so many fibres of a quad."""
    whole = fibres % 2 == 0 or not 0 < lines % GROUP <= OCTET
    return SPREADS if whole else SPREADS[:2]


@functools.lru_cache(maxsize=4096)
def pieces(
    lines: tuple[tuple[int, int], ...], step: int, itemsize: int, stores: bool, spread: int
) -> int:
    """The pieces of global memory that two warps touch, those of each load or store by itself.

    ``lines`` are extents and strides, the slowest first; ``step`` is the stride along fibres.
    """
    quads = np.arange(GROUP)
    number = line(quads, spread)
    place = np.zeros(GROUP, int)
    for extent, stride in reversed(lines):
        place += number % extent * stride
        number = number // extent
    values = place[:, None] + np.arange(QUAD) * step
    if stores:
        return _distinct(values.reshape(2, -1) * itemsize // STORED_BYTES)
    return _distinct(values.reshape(-1, HALF_WARP) * itemsize // LOADED_BYTES)


def _distinct(places: np.ndarray) -> int:
    return sum(len(set(row)) for row in places.tolist())


def choose(
    options: Mapping[int, Sequence[int]], cost: Callable[[Mapping[int, int]], float]
) -> dict[int, int]:
    """The spread of each sweep that costs least: of one after the other, from several beginnings.

    What tiles cost depends on all sweeps that touch them, so that several must change together.
    """
    found: list[tuple[float, dict[int, int]]] = []
    beginnings = (
        tuple(x if x in some else some[0] for some in options.values()) for x in (*SPREADS, ACROSS)
    )
    for beginning in dict.fromkeys(beginnings):
        spreads = dict(zip(options, beginning, strict=True))
        best, before = cost(spreads), float("inf")
        while best < before:
            before = best
            for sweep, some in options.items():
                for spread in some:
                    trial = {**spreads, sweep: spread}
                    if spread != spreads[sweep] and (price := cost(trial)) < best:
                        best, spreads = price, trial
        found.append((best, spreads))
    return min(found, key=lambda x: x[0])[1]
