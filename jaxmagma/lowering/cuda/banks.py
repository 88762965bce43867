"""Layouts of tiles in shared memory that threads can read and write without bank conflicts.

Shared memory serves 128 bytes of distinct banks at a time: 16 threads if a value has 8 bytes. A
thread's place in a sweep gives the coordinates of its line, and so the address of its first value;
the others are at the same distance from it in all threads. A layout is row-major, with a few unused
values after each axis, chosen by counting the conflicts of every sweep that touches the tile.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda import spreads


BYTES_AT_A_TIME = 128
# The most padding of an axis.
MOST_PADDING = 5


@dataclass(frozen=True)
class Access:
    """How a stage goes through a tile: its line labels, the slowest first.

    Each has an extent and the axis of the tile it walks, -1 if the tile has no such axis. Of quads,
    whose lanes come last, neighbours have lines that are ``spread`` apart.
    """

    lines: tuple[tuple[int, int], ...]
    threads: int
    spread: int = 1


@dataclass(frozen=True)
class Strides:
    """Strides of the axes of a tile, and of the elements that lie side by side, in values."""

    axes: tuple[int, ...]
    element: int


def row_major(shape: tuple[int, ...], padding: tuple[int, ...] | None = None) -> Strides:
    """``padding[0]`` values follow each element unused, ``padding[i]`` each step on axis i - 1."""
    padding = padding or (0,) * max(1, len(shape))
    strides, size = [], 1
    for axis in reversed(range(len(shape))):
        strides.append(size)
        size = size * shape[axis] + padding[axis]
    return Strides(tuple(reversed(strides)), size)


@dataclass(frozen=True)
class Candidates:
    """The layouts that a tile may have.

    After a step on an axis some values may be left unused; inside a tile only if ``inner_padding``.
    """

    shape: tuple[int, ...]
    itemsize: int
    elements: int
    inner_padding: bool

    @property
    def paddings(self) -> list[tuple[int, ...]]:
        return _paddings(len(self.shape), self.banks, self.inner_padding, self.elements > 1)

    @property
    def banks(self) -> int:
        return max(1, BYTES_AT_A_TIME // self.itemsize)


@functools.lru_cache(maxsize=4096)
def choose(
    candidates: Candidates, accesses: tuple[Access, ...], price: float
) -> tuple[Strides, float]:
    """The layout with the fewest conflicts and, among equals, the smallest; and what it costs.

    A value of an element costs ``price`` conflicts: little, where there is room for many elements.
    """
    # A conflict costs a cycle each time; memory costs occupancy only now and then.
    cost = price * _strides(candidates)[:, 0]
    for access in accesses:
        cost = cost + conflicts(candidates, access)
    best = int(np.argmin(cost))
    return row_major(candidates.shape, candidates.paddings[best]), float(cost[best])


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
    return int(_conflicts(addresses, max(1, BYTES_AT_A_TIME // itemsize))[0])


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
def _strides(candidates: Candidates) -> np.ndarray:
    """(layouts, 1 + rank + 1): those of ``row_major`` for each padding, of elements and axes.

    They are floating-point numbers, whose products NumPy does much sooner than those of integers.
    """
    shape, paddings = candidates.shape, np.array(candidates.paddings)
    strides = np.zeros((len(paddings), 1 + len(shape) + 1))
    size = np.ones(len(paddings))
    for axis in reversed(range(len(shape))):
        strides[:, 1 + axis] = size
        size = size * shape[axis] + paddings[:, axis]
    strides[:, 0] = size
    return strides


def _coordinates(access: Access, rank: int, elements: int) -> np.ndarray:
    """(threads, 1 + rank + 1): element and axis coordinates of the line of each thread."""
    count = min(elements * math.prod(x[0] for x in access.lines), access.threads)
    line = np.arange(count)
    if access.spread != 1:
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
