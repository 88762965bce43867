"""Which numbers of one dtype are numbers of another.

A program has one dtype.  A value of a narrower one is a number of it that is rounded after every
operation: of a sum, a product, a quotient or a root that is the very number that the narrower dtype
has, if the wider one has more than twice its digits (S. A. Figueroa, "When is double rounding
innocuous?", SIGNUM Newsletter 30, 1995), and of all else it is at least as accurate.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmagma.programs import integers
from jaxmagma.programs.functions import ROUNDINGS


def is_narrower(dtype: Any, than: Any) -> bool:
    """Whether a program of a dtype can have values of another one, which is not the same."""
    own, wide = np.dtype(dtype), np.dtype(than)
    if own == wide or own not in ROUNDINGS or not jnp.issubdtype(wide, np.inexact):
        return False
    if jnp.issubdtype(own, np.complexfloating) != jnp.issubdtype(wide, np.complexfloating):
        return False
    one, other = jnp.finfo(own), jnp.finfo(wide)
    return one.nmant < other.nmant and one.nexp <= other.nexp


def has(dtype: np.dtype, bounds: integers.Bounds) -> bool:
    """Whether a floating-point dtype has all integers between some bounds."""
    largest = 2 * integers.largest(dtype)
    return integers.are_in(bounds, (-largest, largest))
