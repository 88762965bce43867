"""Layouts of tiles in shared memory that threads can read and write without bank conflicts.

Shared memory serves 128 bytes of distinct banks at a time: 16 threads if a value has 8 bytes. A
thread's place in a sweep gives the coordinates of its line, and so the address of its first value;
the others are at the same distance from it in all threads. A layout is row-major, with a few unused
values after each axis, or has the elements side by side; it is chosen by counting the conflicts of
every sweep that touches the tile.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.layout import spreads


BYTES_AT_A_TIME = 128
# The most padding of an axis.
MOST_PADDING = 5


@dataclass(frozen=True)
class Access:
    """How a stage goes through a tile: its line labels, the slowest first.

    Each has an extent and the axis of the tile it walks, -1 if the tile has no such axis. Of quads,
    whose lanes come last, neighbours have lines that are ``spread`` apart. Threads side by side
    have lines of an element side by side, or the same line of several, if that is ``ACROSS``.
    """

    lines: tuple[tuple[int, int], ...]
    threads: int
    spread: int = 1


@dataclass(frozen=True)
class Strides:
    """Strides of the axes of a tile, and of the elements, in values.

    Elements that lie side by side with one value each take so many values ``together``.
    """

    axes: tuple[int, ...]
    element: int
    together: int = 0

    def values(self, elements: int) -> int:
        """Of so many elements."""
        return self.together or self.element * elements


def row_major(shape: tuple[int, ...], padding: tuple[int, ...] | None = None) -> Strides:
    """``padding[0]`` values follow each element unused, ``padding[i]`` each step on axis i - 1."""
    padding = padding or (0,) * max(1, len(shape))
    strides, size = [], 1
    for axis in reversed(range(len(shape))):
        strides.append(size)
        size = size * shape[axis] + padding[axis]
    return Strides(tuple(reversed(strides)), size)


def elements_fastest(shape: tuple[int, ...], elements: int) -> Strides:
    """With room for so many elements behind each value."""
    own = row_major(shape)
    return Strides(tuple(x * elements for x in own.axes), 1, own.element * elements)


@dataclass(frozen=True)
class Candidates:
    """The layouts that a tile may have.

    After a step on an axis some values may be left unused; inside a tile, where those of other
    elements may be, too, only if ``inner_padding``.
    """

    shape: tuple[int, ...]
    itemsize: int
    elements: int
    inner_padding: bool

    @property
    def banks(self) -> int:
        return _served_together(self.itemsize)


@functools.lru_cache(maxsize=4096)
def choose(
    candidates: Candidates, accesses: tuple[Access, ...], price: float
) -> tuple[Strides, float]:
    """The layout with the fewest conflicts and, among equals, the smallest; and what it costs.

    A value of an element costs ``price`` conflicts of each kind of access: little, where there is
    room for many elements.
    """
    # A conflict costs a cycle each time; memory costs occupancy only now and then.
    times = Counter(accesses)
    cost = price * len(accesses) / max(1, len(times)) * _sizes(candidates)
    for access, count in times.items():
        cost = cost + count * conflicts(candidates, access)
    best = int(np.argmin(cost))
    return _layouts(candidates)[best], float(cost[best])


@functools.lru_cache(maxsize=1024)
def conflicts(candidates: Candidates, access: Access) -> np.ndarray:
    """Those that a stage meets in each layout."""
    where = _coordinates(access, len(candidates.shape), candidates.elements)
    return _conflicts(_strides(candidates) @ where.T, candidates.banks)


@functools.lru_cache(maxsize=4096)
def conflicts_at(access: Access, strides: tuple[int, ...], element: int, itemsize: int) -> int:
    """Those that a stage meets in a tile of such strides."""
    where = _coordinates(access, len(strides), 1)
    addresses = np.array([[element, *strides, 0.0]]) @ where.T
    return int(_conflicts(addresses, _served_together(itemsize))[0])


def _served_together(itemsize: int) -> int:
    """Threads, by the bytes of a value."""
    return max(1, BYTES_AT_A_TIME // itemsize)


@functools.lru_cache(maxsize=4096)
def pieces(access: Access, strides: Strides, elements: int, itemsize: int) -> int:
    """The pieces of global memory that groups of threads, served together, touch in a tile."""
    where = _coordinates(access, len(strides.axes), elements)
    places = where @ np.array([strides.element, *strides.axes, 0.0])
    found = places * itemsize // BYTES_AT_A_TIME
    group = _served_together(itemsize)
    return sum(len(set(found[n : n + group].tolist())) for n in range(0, len(found), group))


def _paddings(rank: int, banks: int, inner: bool, several: bool) -> list[tuple[int, ...]]:
    if rank == 0:
        return [(0,)]
    element = range(banks if several else 1)
    if not inner or rank == 1:
        return [(e, *(0,) * (rank - 1)) for e in element]
    steps = range(min(banks, MOST_PADDING + 1))
    free = min(rank - 1, 2)
    return [
        (e, *pads, *(0,) * (rank - 1 - free))
        for pads in itertools.product(steps, repeat=free)
        for e in element
    ]


@functools.lru_cache(maxsize=128)
def _layouts(candidates: Candidates) -> list[Strides]:
    shape, elements = candidates.shape, candidates.elements
    paddings = _paddings(len(shape), candidates.banks, candidates.inner_padding, elements > 1)
    found = [row_major(shape, x) for x in paddings]
    if elements > 1 and shape and candidates.inner_padding:
        found += [elements_fastest(shape, elements + n) for n in range(MOST_PADDING + 1)]
    return found


@functools.lru_cache(maxsize=128)
def _sizes(candidates: Candidates) -> np.ndarray:
    """The values that an element takes in each layout."""
    elements = candidates.elements
    return np.array([x.values(elements) / elements for x in _layouts(candidates)])


@functools.lru_cache(maxsize=128)
def _strides(candidates: Candidates) -> np.ndarray:
    """(layouts, 1 + rank + 1): of elements and axes.

    They are floating-point numbers, whose products NumPy does much sooner than those of integers.
    """
    return np.array([[float(x.element), *x.axes, 0.0] for x in _layouts(candidates)])


def _coordinates(access: Access, rank: int, elements: int) -> np.ndarray:
    """(threads, 1 + rank + 1): element and axis coordinates of the line of each thread."""
    lines = math.prod(x[0] for x in access.lines)
    count = min(elements * lines, access.threads)
    line = np.arange(count)
    if access.spread == spreads.ACROSS:
        line = line % elements * lines + line // elements
    elif access.spread != 1:
        line = _spread(access, elements)
        count = len(line)
    where = np.zeros((count, 1 + rank + 1))
    for extent, axis in reversed(access.lines):
        where[:, 1 + axis if axis >= 0 else -1] = line % extent
        line = line // extent
    where[:, 0] = line
    return where


def _spread(access: Access, elements: int) -> np.ndarray:
    """The number each lane would have if quads had lines side by side; or that of another line."""
    *lines, (lanes, _) = access.lines
    count = elements * math.prod(extent for extent, _ in lines)
    whole = -(-count // spreads.GROUP) * spreads.GROUP
    thread = np.arange(min(whole * lanes, access.threads))
    line = spreads.line(thread // lanes, access.spread)
    return (
        np.where(line < count, line, line // spreads.GROUP * spreads.GROUP) * lanes + thread % lanes
    )


def _conflicts(addresses: np.ndarray, banks: int) -> np.ndarray:
    """Cycles beyond the first of each group of threads that is served together, for each layout.

    ``addresses`` are (layouts, threads); the number of banks is a power of two.
    """
    layouts, threads = addresses.shape
    count = -(-threads // banks)
    groups = np.full((layouts, count * banks), -1, np.int32)
    groups[:, :threads] = addresses
    groups = groups.reshape(layouts * count, banks)
    groups.sort(axis=1)
    # Equal addresses are one access.
    distinct = groups >= 0
    distinct[:, 1:] &= groups[:, 1:] != groups[:, :-1]
    row = np.arange(layouts * count, dtype=np.int32)[:, None]
    flat = ((groups & (banks - 1)) * (layouts * count) + row)[distinct]
    used = np.bincount(flat, minlength=banks * layouts * count).reshape(banks, layouts, count)
    return np.maximum(used.max(axis=0) - 1, 0).sum(axis=1)
