"""Sums of element values into a global vector, as gathers: the same bits every time.

Adding element values at places that several elements share is a race, unless somebody decides the
order.  Here every entry of the vector gathers its contributions, in the order in which the elements
have them, through the transposed index: so the sum is a program like any other.

That index is a table, and reading it is most of the work: where a few entries have many
contributions and most have one or two, a row as wide as the widest is mostly empty.  So the table
has room for the first ``w`` contributions of an entry.  What the others add up to, in runs of at
most sixteen, is a small vector of its own, made first; the entries it belongs to find it by a link:

    out[i] = sum_w values[table[i, w]] + sum_k rest[link[i, k]]

All of these tables are made of two arrays: the *order* that sorts the contributions by entry, and
where in that each entry *begins*.  Tables of a known index are made once, by numpy or on its GPU.
Of an index that is only traced the order is all there is: contributions are sorted and summed in
runs, as above, in one go.

Tables are operands of compiled programs, so that their shapes, which depend on what is in the
index, are part of those.  Their widths are few, and rows of partial sums are rounded up by at most
an eighth: most indices of the same shape have tables of the same shapes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.programs.builder import Builder
from jaxmagma.programs.labels import letters
from jaxmagma.programs.program import ElementProgram, Input, Output


# No row of a table is longer: an entry with more contributions sums them in several steps.
_WIDEST = 16

# What rows are rounded up to.
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, _WIDEST)

# What a GPU reads while it launches a kernel, in bytes: three microseconds of four terabytes a
# second.  A table gets narrower than its widest entry where that saves more than this.
_LAUNCH = 12_000_000

# So many contributions are sorted on the host in the time for which a GPU's programs are compiled
# (benchmarks/results/compiling-epyc.txt).
_FEW = 1 << 24

# Bytes of an entry of a table, of a value, and of the least that a GPU reads at once.
_INDEX, _VALUE, _SECTOR = 4, 8, 32

_INT = np.dtype(np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Assembly:
    """How the values at ``count`` places become a vector.

    ``tables`` are read in this order: those of partial sums, one after another, the table of the
    vector, and the link, if there are partial sums.  Each says for a row which values it sums,
    -1 where it has no more of them, and has the shape ``(rows, width)``, or ``(rows,)``.
    """

    tables: tuple[jax.Array, ...]
    count: int = field(metadata={"static": True})


def assembly(index: jax.Array, size: int) -> Assembly:
    """The tables of a known index for a vector of ``size`` entries; others get nothing."""
    # Not `ensure_compile_time_eval`: that would make constants of what compiled functions count.
    with jax.core.eval_context():
        devices = index.devices()
        alone = len(devices) == 1
        if all(x.platform == "cpu" for x in devices) or (alone and index.size <= _FEW):
            made = _tables(np, *_surveyed_on_host(np.asarray(index), size))
        else:
            made = _tables(jnp, *_surveyed(index, size))
        where = index.sharding if alone and index.committed else None
        return Assembly(tuple(jax.device_put(x, where) for x in made), index.size)


def _tables(xp: Any, order: Any, start: Any, valence: Any, wider: Any, sectors: Any) -> list[Any]:
    width = _width(valence.size, np.asarray(wider), np.asarray(sectors))
    table = _call(xp, _rows, start, xp.minimum(valence, width), order, width=width)
    if not wider[width]:
        return [table]
    partial = []
    start, count = start + width, xp.maximum(valence - width, 0)
    while True:
        # Every run of contributions to one entry makes a partial sum of its own.
        runs = -(-count // _WIDEST)
        rows = _rounded(int(runs.sum()))
        longest = _rounded_width(min(_WIDEST, int(count.max())))
        of_runs = _call(xp, _runs, start, count, rows=rows)
        partial.append(_call(xp, _rows, *of_runs, order, width=longest))
        # They stand one after another; another round makes them fewer.
        order, start, count = None, xp.cumsum(runs, dtype=_INT) - runs, runs
        most = int(runs.max())
        # The link has a column for each, in a row of every entry.
        if most <= _WIDEST and valence.size * (most - 1) * _INDEX <= _LAUNCH:
            link = _call(xp, _rows, start, count, order, width=_rounded_width(most))
            return [*partial, table, link]


def _width(size: int, wider: np.ndarray, sectors: np.ndarray) -> int:
    """The width of the table with which the fewest bytes are read."""

    def bytes_read(width: int) -> int:
        table = size * width * _INDEX
        if not wider[width]:
            return table
        link = size * _INDEX
        row = min(widest - width, _WIDEST) * _INDEX
        wide = int(wider[width]) * (row + 2 * _VALUE)
        return table + link + wide + int(sectors[width]) * _SECTOR + _LAUNCH

    # That of the widest entry, if it is no wider than any row may be.
    widest = int(np.count_nonzero(wider))
    full = _rounded_width(min(widest, _WIDEST))
    return min((x for x in _WIDTHS if x <= full), key=bytes_read)


def _rounded_width(width: int) -> int:
    return next(x for x in _WIDTHS if x >= width)


def _rounded(rows: int) -> int:
    """At most an eighth more, so that indices that differ a little have tables of one shape."""
    step = max(8, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def of_several(index: jax.Array, *tables: jax.Array, size: int) -> list[jax.Array]:
    """An index and its tables for vectors that stand one after another.

    Each has one axis more in front, for vectors of ``size`` entries; they end up without it.
    """
    count = index.shape[1]
    lengths = [count, *(x.shape[1] for x in tables[:-2])]  # of what is read, one after another
    made = [_shifted(index, size)]
    made += [_shifted(x, n) for x, n in zip(tables[:-2], lengths, strict=False)]
    for table, length in zip(tables[-2:], (count, lengths[-1]), strict=False):
        # A row for each entry, so that those of the next vector follow.
        missing = max(0, size - table.shape[1])
        rows = [(0, 0), (0, missing)] + [(0, 0)] * (table.ndim - 2)
        whole = jnp.pad(table[:, :size], rows, constant_values=-1)
        made.append(_shifted(whole, length))
    return made


def _shifted(places: jax.Array, length: int) -> jax.Array:
    """Places in vectors of that length as places in all of them, one after another."""
    several, *shape = places.shape
    if several * length > np.iinfo(_INT).max:
        raise ValueError(f"{several} vectors of {length} values have indices of more than 31 bits")
    first = length * jnp.arange(several, dtype=_INT).reshape(-1, *(1 for _ in shape))
    inside = (places >= 0) & (places < length)
    return jnp.where(inside, places + first, -1).reshape(several * shape[0], *shape[1:])


# ---- Made of the order: by numpy, or compiled for a device -------------------------------------


def _call(xp: Any, function: Callable[..., Any], *arrays: Any, **static: int) -> Any:
    if xp is np:
        return function(np, *arrays, **static)
    compiled = jax.jit(function, static_argnums=0, static_argnames=tuple(static))
    return compiled(jnp, *arrays, **static)


def _surveyed_on_host(index: np.ndarray, size: int) -> tuple[Any, ...]:
    """The places of all contributions, sorted by entry, where those of each entry start, and how
    many they are; how many entries are wider than each width, and how many sectors hold what is
    beyond it.
    """
    from scipy import sparse  # JAX needs it, too

    # The transposition of a sparse matrix is a counting sort: linear, and stable.
    at = index.reshape(-1)
    at = np.where((at >= 0) & (at < size), at, size).astype(_INT, copy=False)
    rows = np.arange(at.size + 1, dtype=_INT)
    shape = (at.size, size + 1)
    columns = sparse.csr_matrix((np.ones(at.size, np.int8), at, rows), shape).tocsc()
    order, begin = columns.indices, columns.indptr[: size + 1]
    return order, begin[:-1], begin[1:] - begin[:-1], *_counts(np, order, begin)


# All that is known before there is a table is compiled together: a program of its own for each step
# would take longer to compile than to run.
@functools.partial(jax.jit, static_argnums=1)
def _surveyed(index: jax.Array, size: int) -> tuple[jax.Array, ...]:
    """The same, on a device."""
    order, begin = _sorted(index, size)
    return order, begin[:-1], begin[1:] - begin[:-1], *_counts(jnp, order, begin)


@functools.partial(jax.jit, static_argnums=1)
def _sorted(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    at = index.reshape(-1)
    at = jnp.where((at >= 0) & (at < size), at, size)
    ordered, order = jax.lax.sort((at, jnp.arange(at.size, dtype=_INT)), num_keys=1, is_stable=True)
    entries = jnp.arange(size + 1, dtype=_INT)
    return order, _below(jnp, ordered, entries)


def _rows(xp: Any, start: Any, count: Any, order: Any, width: int) -> Any:
    """For each row the contributions from ``start`` on, ``count`` of them: ``(rows, width)``."""
    columns = xp.arange(width, dtype=_INT)[None]
    at = start[:, None] + columns
    present = columns < count[:, None]
    if order is not None and order.size:
        at = order.take(at, mode="clip")
    table = xp.where(present, at, _INT.type(-1))
    return table if width > 1 else table[:, 0]


def _runs(xp: Any, start: Any, count: Any, rows: int) -> tuple[Any, Any]:
    """Where runs of at most sixteen contributions to one entry start, and how long they are."""
    runs = -(-count // _WIDEST)
    end = xp.cumsum(runs, dtype=_INT)
    run = xp.arange(rows, dtype=_INT)
    entry = xp.minimum(_below(xp, end, run + 1), runs.size - 1)
    before = _WIDEST * (run - (end - runs)[entry])
    own = xp.clip(count[entry] - before, 0, _WIDEST)
    return start[entry] + before, xp.where(run < end[-1], own, 0)


def _counts(xp: Any, order: Any, begin: Any) -> tuple[Any, Any]:
    """How many entries have more than ``w`` contributions, and how many sectors have such."""
    count, valence = order.size, begin[1:] - begin[:-1]
    place = xp.arange(count, dtype=_INT)
    if xp is np:
        entry = np.repeat(np.arange(valence.size, dtype=_INT), valence)
        entry = np.append(entry, np.zeros(count - entry.size, _INT))
    else:
        entry = _below(jnp, begin, place + 1) - 1
    # How many contributions to the same entry stand before each one, in their own order.
    sorted_ranks = xp.where(place < begin[-1], place - begin[entry], _INT.type(-1))
    if xp is np:
        ranks = np.empty_like(sorted_ranks)
        ranks[order] = sorted_ranks
    else:
        ranks = jnp.zeros_like(sorted_ranks).at[order].set(sorted_ranks, unique_indices=True)
    # What stands in one sector is read as a whole, for the table and once more for the rest.
    together = _SECTOR // _VALUE
    ranks = xp.pad(ranks, (0, -count % together), constant_values=-1)
    last = functools.reduce(xp.maximum, (ranks[n::together] for n in range(together)))
    return _at_least(xp, valence - 1), _at_least(xp, last)


def _at_least(xp: Any, values: Any) -> Any:
    """How many of the values are at least as large as each width."""
    if xp is np:
        found = np.bincount(np.clip(values, -1, _WIDEST) + 1, minlength=_WIDEST + 2)
        return np.cumsum(found[::-1])[-2::-1]
    return jnp.stack([(values >= w).sum() for w in range(_WIDEST + 1)])


def _below(xp: Any, ordered: Any, values: Any) -> Any:
    """How many of some ordered integers are smaller than each value."""
    if xp is np:
        return np.searchsorted(ordered, values).astype(_INT)
    below = jnp.zeros_like(values)
    for bit in reversed(range(ordered.size.bit_length())):
        more = below + (1 << bit)
        last = ordered[jnp.minimum(more, ordered.size) - 1]
        below = jnp.where((more <= ordered.size) & (last < values), more, below)
    return below


# ---- Sums without tables -----------------------------------------------------------------------


def added(values: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """The sum as a device likes: a CPU adds one after another, a GPU in any order."""
    zeros = jnp.zeros((size, *values.shape[1:]), values.dtype)
    return zeros.at[index].add(values, mode="drop", wrap_negative_indices=False)


def sorted_sum(values: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """The sum in an order that depends on the index alone, of contributions sorted by entry."""
    order, begin = _sorted(index, size)
    valence = begin[1:] - begin[:-1]
    total = _gathered(values, _rows(jnp, begin[:-1], valence, order, _WIDEST))
    most = order.size // _WIDEST  # runs beyond the first, however the entries share them
    if most == 0:
        return total

    def with_rest(total: jax.Array) -> jax.Array:
        count = jnp.maximum(valence - _WIDEST, 0)
        of_runs = _runs(jnp, begin[:-1] + _WIDEST, count, most)
        partial = _gathered(values, _rows(jnp, *of_runs, order, _WIDEST))

        def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            partial, runs = state
            of_runs = _runs(jnp, jnp.cumsum(runs, dtype=_INT) - runs, runs, most)
            return _gathered(partial, _rows(jnp, *of_runs, None, _WIDEST)), -(-runs // _WIDEST)

        partial, runs = jax.lax.while_loop(
            lambda state: jnp.max(state[1]) > 1, again, (partial, -(-count // _WIDEST))
        )
        link = _rows(jnp, jnp.cumsum(runs, dtype=_INT) - runs, runs, None, 1)
        return total + _gathered(partial, link[:, None])

    return jax.lax.cond(jnp.max(valence) > _WIDEST, with_rest, lambda total: total, total)


def _gathered(vector: jax.Array, table: jax.Array) -> jax.Array:
    """``sum_w vector[table[i, w]]``"""
    found = vector.at[table].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.sum(found, 1, dtype=vector.dtype)


# ---- Programs ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def summing(
    widths: tuple[tuple[int, ...], ...],
    tiles: tuple[tuple[int, ...], ...],
    axes: int,
    dtype: np.dtype,
) -> ElementProgram:
    """The sum over tables of ``sum_w values[table[i, w]]``.

    Each table, of rows of a shape in ``widths``, has a vector of values of its own, of the shape in
    ``tiles``; these have ``axes`` batch axes that the tables do not have.
    """
    builder = Builder(1 + axes)
    own = tuple(range(1, 1 + axes))
    totals = []
    for width, (size, *components) in zip(widths, tiles, strict=True):
        vector = builder.input(Input(own, (size, *components), dtype))
        found = builder.gather(vector, builder.input(Input((0,), width, _INT)))
        labels = letters(len(width) + len(components))
        sizes = dict(zip(labels, (*width, *components), strict=True))
        totals.append(builder.contract([(found, labels)], labels[len(width) :], sizes))
    total = builder.sum(totals)
    return builder.build([Output(total, (*own, 0))]).program


@functools.lru_cache(maxsize=256)
def gathering(
    tile: tuple[int, ...], tables: tuple[tuple[int, ...], ...], axes: int, dtype: np.dtype
) -> ElementProgram:
    """The transpose of all of that: a value's cotangent is that of the entry it was added to.

    Its arguments are the vector, an index and the tables of that, which have the shapes given.
    """
    builder = Builder(1 + axes)
    own = tuple(range(1, 1 + axes))
    vector = builder.input(Input(own, tile, dtype))
    index = builder.input(Input((0,), (), _INT))
    made = [builder.input(Input((), shape, _INT)) for shape in tables]
    found = builder.gather(vector, index, made)
    return builder.build([Output(found, (*own, 0))]).program
