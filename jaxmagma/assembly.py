"""Sums of element values into a global vector, as gathers: the same bits every time.

Adding element values at places that several elements share is a race, unless somebody decides the
order.  Here every entry of the vector gathers its contributions, in the order in which the elements
have them, through the transposed index: so the sum is a program like any other.

That index is a table, and reading it is most of the work: where a few entries have many
contributions and most have one or two, a row as wide as the widest is mostly empty.  So the table
has room for the first ``w`` contributions of an entry.  What the others add up to, in runs of at
most sixteen, is a small vector of its own, made first; the entries it belongs to find it by a link:

    out[i] = sum_w values[table[i, w]] + sum_k rest[link[i, k]]
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.builder import Builder, letters
from jaxmagma.program import Constant, ElementProgram, Input, Output


# No row of a table is longer: an entry with more contributions sums them in several steps.
_WIDEST = 16

# What a GPU reads while it launches a kernel, in bytes: three microseconds of four terabytes a
# second.  A table gets narrower than its widest entry where that saves more than this.
_LAUNCH = 12_000_000

# Bytes of an entry of a table, of a value, and of the least that a GPU reads at once.
_INDEX, _VALUE, _SECTOR = 4, 8, 32


@dataclass(frozen=True)
class Table:
    """Where each entry finds its contributions, negative where it has no more of them."""

    places: Constant  # (entries, width), or (entries,) if none has more than one
    index: jax.Array  # the same, on the device


@dataclass(frozen=True)
class Assembly:
    """How values become a vector, as above; ``partial`` sums, one after another, make the rest."""

    table: Table
    partial: tuple[Table, ...] = ()
    link: Table | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """All of them, in the order in which they are read."""
        last = (self.table,) if self.link is None else (self.table, self.link)
        return self.partial + last


@functools.lru_cache(maxsize=256)
def assembly(places: Constant, size: int) -> Assembly:
    """How values that belong at ``places`` become a vector of ``size`` entries."""
    at = places.array.reshape(-1)
    valence, ranks = _valence(at, size), _ranks(at)
    width = _width(valence, ranks)
    first = ranks < width
    table = _table(np.where(first, at, -1), ranks, size)
    if width >= valence.max():
        return Assembly(table)
    rest = np.where(first, -1, at)
    partial = []
    while True:
        # Every run of contributions to one entry makes a partial sum of its own.
        runs = -(-_valence(rest, size) // _WIDEST)
        ranks = _ranks(rest)
        run = np.where(rest >= 0, (np.cumsum(runs) - runs)[rest] + ranks // _WIDEST, -1)
        partial.append(_table(run, ranks % _WIDEST, int(runs.sum())))
        rest = np.repeat(np.arange(size), runs)
        most = int(runs.max())
        # Another round makes them fewer: the link has a column for each, in a row of every entry.
        if most <= _WIDEST and size * (most - 1) * _INDEX <= _LAUNCH:
            return Assembly(table, tuple(partial), _table(rest, _ranks(rest), size))


@functools.lru_cache(maxsize=256)
def flat(places: Constant) -> Table:
    """The table of the transpose: a value's cotangent is that of the entry it was added to."""
    return _on_device(places.array.reshape(-1))


def _width(valence: np.ndarray, ranks: np.ndarray) -> int:
    """The width of the table with which the fewest bytes are read."""
    widest = int(valence.max())
    # What stands in one sector is read as a whole, for the table and once more for the rest.
    sectors = np.maximum.reduceat(ranks, np.arange(0, ranks.size, _SECTOR // _VALUE))

    def bytes_read(width: int) -> int:
        table = valence.size * width * _INDEX
        if width >= widest:
            return table
        link = valence.size * _INDEX
        row = min(widest - width, _WIDEST) * _INDEX
        wide = int(np.sum(valence > width)) * (row + 2 * _VALUE)
        return table + link + wide + int(np.sum(sectors >= width)) * _SECTOR + _LAUNCH

    return min(range(1, min(widest, _WIDEST) + 1), key=bytes_read)


def _valence(at: np.ndarray, size: int) -> np.ndarray:
    """How many contributions each entry has."""
    return np.bincount(at[at >= 0], minlength=size)


def _ranks(at: np.ndarray) -> np.ndarray:
    """How many contributions to the same entry stand before each one."""
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    begin = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ranks = np.empty(at.size, np.int64)
    ranks[order] = np.arange(at.size) - np.repeat(begin, np.diff(np.r_[begin, at.size]))
    return ranks


def _table(at: np.ndarray, ranks: np.ndarray, size: int) -> Table:
    """For every entry the positions that hold its number, in the columns ``ranks``."""
    present = np.flatnonzero(at >= 0)
    columns = ranks[present]
    table = np.full((size, int(columns.max(initial=0)) + 1), -1, np.int32)
    table[at[present], columns] = present
    return _on_device(table if table.shape[1] > 1 else table[:, 0])


def _on_device(table: np.ndarray) -> Table:
    with jax.ensure_compile_time_eval():
        return Table(Constant(table), jnp.asarray(table))


@functools.lru_cache(maxsize=256)
def program(
    tables: tuple[Constant, ...],
    tiles: tuple[tuple[int, ...], ...],
    axes: int,
    dtype: np.dtype,
) -> ElementProgram:
    """The sum over tables of ``sum_w values[table[i, w]]``.

    Each has a vector of values of its own, of the shape in ``tiles``; these have ``axes`` batch
    axes that the tables do not have.
    """
    builder = Builder(1 + axes)
    own = tuple(range(1, 1 + axes))
    totals = []
    for table, (size, *components) in zip(tables, tiles, strict=True):
        width = table.array.shape[1:]
        vector = builder.input(Input(own, (size, *components), dtype))
        index = builder.input(Input((0,), width, np.dtype(np.int32)))
        found = builder.gather(vector, index, table)
        labels = letters(len(width) + len(components))
        sizes = dict(zip(labels, (*width, *components), strict=True))
        totals.append(builder.contract([(found, labels)], labels[len(width) :], sizes))
    total = builder.sum(totals)
    return builder.build([Output(total, (*own, 0))]).program
