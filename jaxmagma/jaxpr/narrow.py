"""Values of another dtype than the program's.

Those of a narrower one are rounded after every operation that may need it.  Those of a wider one
are numbers of the program as long as nothing is computed with them: ``where(a < b, 1.0, 0.0)``.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import aval
from jaxmagma.jaxpr.tiles import Read, Tiles
from jaxmagma.programs import precisions
from jaxmagma.programs.functions import ROUNDINGS
from jaxmagma.programs.precisions import is_narrower


# What makes numbers of the dtype of its operands out of such, whatever dtype it computes in.
_EXACT = frozenset(
    """
    neg abs sign floor ceil round max min rem clamp select_n inverse_binade keep_digits
    broadcast_in_dim reshape squeeze transpose rev slice dynamic_slice concatenate stack unstack
    split pad tile gather dynamic_update_slice scatter scatter-max scatter_max scatter-min
    scatter_min reduce_max reduce_min cummax cummin sort copy copy_p stop_gradient
    optimization_barrier
    """.split()
)


# Those that go by the digits of a dtype, or put a number there that is no operand.
_OF_ITS_DTYPE = frozenset({"inverse_binade", "keep_digits", "gather"})


def is_rounded(reader: Tiles, equation: JaxprEqn, operands: Sequence[Read], dtype: Any) -> bool:
    """Whether what an equation makes in the program's dtype is to be rounded to a narrower one."""
    name = equation.primitive.name
    if not is_narrower(dtype, reader.dtype) or name in _EXACT:
        return False
    if name != "convert_element_type":
        return True
    given = aval(equation.invars[0]).dtype
    if jnp.issubdtype(given, np.inexact):
        return given != dtype and not is_narrower(given, dtype)
    bounds = reader.bounds(operands[0], given)
    return bounds is None or not precisions.has(np.dtype(dtype), bounds)


def is_exact(reader: Tiles, equation: JaxprEqn, operands: Sequence[Read]) -> bool:
    """Whether an equation of a wider dtype makes numbers of the program's out of such."""
    name, dtypes = equation.primitive.name, [aval(x).dtype for x in equation.outvars]
    if name == "convert_element_type":
        return all(jnp.issubdtype(x, np.inexact) for x in dtypes)
    known = [x for x in operands if isinstance(x, np.ndarray)]
    with np.errstate(over="ignore"):
        narrowed = [x.astype(reader.dtype).astype(x.dtype) for x in known]
    return name in _EXACT - _OF_ITS_DTYPE and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(known, narrowed, strict=True)
    )


def narrower(reader: Tiles, equation: JaxprEqn, operands: Sequence[Read]) -> Read | None:
    """What goes by the digits or the exponents of its operands' own dtype, if it is narrower."""
    dtype = np.dtype(aval(equation.outvars[0]).dtype) if equation.outvars else reader.dtype
    if not is_narrower(dtype, reader.dtype):
        return None
    match equation.primitive.name:
        case "product_error":
            product = reader.emit("mul", *operands)  # which is exact
            return reader.emit("sub", product, reader.emit(ROUNDINGS[dtype], product))
        case "inverse_binade":
            info = jnp.finfo(dtype)
            made = reader.emit("max", reader.emit("inverse_binade", *operands), float(info.tiny))
            return reader.emit("min", made, 2.0**info.maxexp / 2)
        case "keep_digits":
            (x,) = operands
            return _kept(reader, x, equation.params["like"], dtype)
    return None


def _kept(reader: Tiles, x: Read, like: float, dtype: np.dtype) -> Read:
    """Digits of a number of a narrower dtype: subnormal ones have more leading zeros there."""
    made, info = reader.emit("common_digits", x, like), jnp.finfo(dtype)
    if info.minexp == jnp.finfo(reader.dtype).minexp:
        return made
    least, size = float(info.tiny), reader.emit("abs", x)
    # With the least number added that is none of them, it has its digits where they are there.
    small = reader.emit("common_digits", reader.emit("add", size, least), like)
    small = reader.emit("mul", reader.emit("sub", small, least), reader.emit("sign", x))
    return reader.emit("select", reader.emit("lt", size, least), made, small)
