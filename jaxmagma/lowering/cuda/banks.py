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


BYTES_AT_A_TIME = 128


@dataclass(frozen=True)
class Access:
    """How a stage goes through a tile: its line labels, the slowest first.

    Each has an extent and the axis of the tile it walks, -1 if the tile has no such axis.
    """

    lines: tuple[tuple[int, int], ...]
    threads: int


@dataclass(frozen=True)
class Layout:
    """Strides of the axes of a tile, and of the elements that lie side by side, in values."""

    strides: tuple[int, ...]
    element: int


def row_major(shape: tuple[int, ...], padding: tuple[int, ...] | None = None) -> Layout:
    """``padding[0]`` values follow each element unused, ``padding[i]`` each step on axis i - 1."""
    padding = padding or (0,) * max(1, len(shape))
    strides, size = [], 1
    for axis in reversed(range(len(shape))):
        strides.append(size)
        size = size * shape[axis] + padding[axis]
    return Layout(tuple(reversed(strides)), size)


@functools.lru_cache(maxsize=4096)
def choose(
    shape: tuple[int, ...],
    itemsize: int,
    elements: int,
    accesses: tuple[Access, ...],
    inner_padding: bool,
    most: int,
    price: float,
) -> Layout:
    """The layout with the fewest conflicts and, among equals, the smallest.

    After a step on an axis ``most`` values may be left unused; inside a tile only if
    ``inner_padding``. A value of an element costs ``price`` conflicts: little, where there is room
    for many elements.
    """
    banks = max(1, BYTES_AT_A_TIME // itemsize)
    paddings = _paddings(len(shape), banks, inner_padding, elements > 1, most)
    strides = _strides(shape, np.array(paddings))
    # A conflict costs a cycle each time; memory costs occupancy only now and then.
    cost = price * strides[:, 0]
    for access in accesses:
        cost += _conflicts(strides @ _coordinates(access, len(shape), elements).T, banks)
    return row_major(shape, paddings[int(np.argmin(cost))])


def _paddings(
    rank: int, banks: int, inner: bool, several: bool, most: int
) -> list[tuple[int, ...]]:
    if rank == 0:
        return [(0,)]
    # Where axes have many paddings, those of elements matter less, and all would be too many.
    element = range(0, banks if several else 1, 1 if most < 6 else 4)
    if not inner or rank == 1:
        return [(e, *(0,) * (rank - 1)) for e in element]
    steps = range(min(banks, most + 1))
    free = min(rank - 1, 2)
    return [
        (e, *pads, *(0,) * (rank - 1 - free))
        for pads in itertools.product(steps, repeat=free)
        for e in element
    ]


def _strides(shape: tuple[int, ...], paddings: np.ndarray) -> np.ndarray:
    """(layouts, 1 + rank + 1): those of ``row_major`` for each padding, of elements and axes.

    They are floating-point numbers, whose products NumPy does much sooner than those of integers.
    """
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
    where = np.zeros((count, 1 + rank + 1))
    for extent, axis in reversed(access.lines):
        where[:, 1 + axis if axis >= 0 else -1] = line % extent
        line = line // extent
    where[:, 0] = line
    return where


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
