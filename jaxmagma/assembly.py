"""Sums of element values into a global vector, as gathers: the same bits every time.

Adding element values at places that several elements share is a race, unless somebody decides the
order.  Here every entry of the vector gathers its contributions, in the order in which the elements
have them, through the transposed index: so the sum is a program like any other.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.builder import Builder
from jaxmagma.program import Constant, ElementProgram, Input, Output


# An entry with more contributions than this sums them in stages.
_WIDEST = 16


@dataclass(frozen=True)
class Stage:
    """``out[i] = sum_w values[table[i, w]]``, negative entries left out."""

    table: Constant
    index: jax.Array  # the same, on the device


@functools.lru_cache(maxsize=256)
def stages(places: Constant, size: int) -> tuple[Stage, ...]:
    """How values that belong at ``places`` become a vector of ``size`` entries."""
    at = places.array.reshape(-1)
    found = []
    while True:
        valence = np.bincount(at[at >= 0], minlength=size)
        if valence.max(initial=0) <= _WIDEST:
            found.append(_stage(_table(at, size)))
            return tuple(found)
        # Every run of contributions to one entry makes a partial sum of its own.
        runs = -(-valence // _WIDEST)
        first = np.cumsum(runs) - runs
        run = np.where(at >= 0, first[at] + _ranks(at) // _WIDEST, -1)
        found.append(_stage(_table(run, int(runs.sum()))))
        at = np.repeat(np.arange(size), runs)


def _stage(table: np.ndarray) -> Stage:
    with jax.ensure_compile_time_eval():
        return Stage(Constant(table), jnp.asarray(table))


def _ranks(at: np.ndarray) -> np.ndarray:
    """How many contributions to the same entry stand before each one."""
    order = np.argsort(at, kind="stable")
    ordered = at[order]
    begin = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ranks = np.empty(at.size, np.int64)
    ranks[order] = np.arange(at.size) - np.repeat(begin, np.diff(np.r_[begin, at.size]))
    return ranks


def _table(at: np.ndarray, size: int) -> np.ndarray:
    """For every entry the positions that hold its number, and -1 to fill up."""
    present = np.flatnonzero(at >= 0)
    ranks = _ranks(at[present])
    table = np.full((size, int(ranks.max(initial=0)) + 1), -1, np.int32)
    table[at[present], ranks] = present
    return table


@functools.lru_cache(maxsize=256)
def program(stage: Constant, values: tuple[int, ...], axes: int, dtype: np.dtype) -> ElementProgram:
    """One stage for a vector of the shape ``values``, with ``axes`` batch axes of its own."""
    width = stage.array.shape[1]
    builder = Builder(1 + axes)
    own = tuple(range(1, 1 + axes))
    vector = builder.input(Input(own, values, dtype))
    index = builder.input(Input((0,), (width,), np.dtype(np.int32)))
    found = builder.gather(vector, index, stage)
    labels = "w" + "".join(chr(ord("a") + n) for n in range(len(values) - 1))
    sizes = dict(zip(labels, (width, *values[1:]), strict=True))
    total = builder.contract([(found, labels)], labels[1:], sizes)
    return builder.build([Output(total, (*own, 0))]).program
