"""What the steps of a loop write at places of their own, all of them at once.

A step may write what it makes of a point into an array that is carried, and read there before what
was given. If no step reads or writes where another one has written, the array is what was given,
with all that the steps make put into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode, ScatterDimensionNumbers

from jaxmagma.jaxpr.equations import Unsupported, applied


# So many values of what is carried, and of what is written, are looked at.
_MOST_VALUES = 4096


@dataclass(frozen=True, eq=False)
class Reading:
    """What a step reads of an array as it is given, by which equations, and where."""

    given: Any
    found: list[tuple[JaxprEqn, Sequence[Any]]]

    def read(self, equation: JaxprEqn, where: Sequence[Any]) -> list[Any]:
        self.found.append((equation, where))
        return applied(equation, [self.given, *where])


@dataclass(frozen=True, eq=False)
class Written:
    """An array that is carried, into which a step has put something.

    Attributes:
      carried: which of the values that the loop carries it is.
      numbers, mode: how ``where`` tells the places, as for a scatter.
    """

    carried: int
    numbers: ScatterDimensionNumbers
    mode: Any
    where: Any
    updates: Any


def written(equation: JaxprEqn, carried: int, operands: Sequence[Any]) -> Written:
    """What an equation makes of an array that is carried, and of its other operands."""
    p = equation.params
    if equation.primitive.name == "scatter":
        where, updates = operands
        return Written(carried, p["dimension_numbers"], p["mode"], where, updates)
    updates, *starts = operands
    axes = tuple(range(len(starts)))
    where = jnp.stack([jnp.asarray(x, np.int32) for x in starts])
    return Written(
        carried, ScatterDimensionNumbers(axes, (), axes), GatherScatterMode.CLIP, where, updates
    )


def put(
    one: Written,
    own: Any,
    where: np.ndarray,
    updates: tuple[int, ...],
    order: np.ndarray,
    reads: Sequence[tuple[JaxprEqn, Sequence[np.ndarray]]],
) -> Callable[[Any, Any], Any]:
    """How what was given and what all steps write are the array after the last step.

    Args:
      one: what a step writes.
      own: the shape and dtype of the array.
      where: the places, those of each step along the first axis.
      updates: the shape of what is written, with the steps along the first axis.
      order: when each of the steps is done.
      reads: the equations that read the array as it was before the step, and where.

    Raises ``Unsupported`` if one of them is where another step has written before.
    """
    if max(own.size, int(np.prod(updates))) > _MOST_VALUES:
        raise Unsupported("a loop that writes many values")
    numbers = one.numbers._replace(
        update_window_dims=_after_steps(one.numbers.update_window_dims),
        scatter_indices_batching_dims=_after_steps(one.numbers.scatter_indices_batching_dims),
    )
    when = order.astype(np.int32)
    with jax.ensure_compile_time_eval():
        nowhere, ones = np.zeros(own.shape, np.int32), np.ones(updates, np.int32)
        times = jax.lax.scatter_add(nowhere, where, ones, numbers, mode=one.mode)
        last = nowhere + len(order)
        each = ones * when.reshape(-1, *[1] * (len(updates) - 1))
        writers = jax.lax.scatter(last, where, each, numbers, mode=one.mode)
        places = np.arange(each.size, dtype=np.int32).reshape(updates)
        moved = jax.lax.scatter(nowhere - 1, where, places, numbers, mode=one.mode)
        if np.max(times, initial=0) > 1:
            raise Unsupported("a loop whose steps write at the same places")
        for equation, at in reads:
            found = np.asarray(jax.vmap(lambda *x, by=equation: applied(by, [writers, *x])[0])(*at))
            if (found < when.reshape(-1, *[1] * (found.ndim - 1))).any():
                raise Unsupported("a loop that reads what another step has written")
    for axis, extent in enumerate(own.shape):
        rest = own.shape[:axis] + own.shape[axis + 1 :]
        if extent == len(order) and places.size == own.size:
            stack = np.moveaxis(places.reshape(extent, *rest), 0, axis)
            if np.array_equal(moved, stack):
                return lambda given, made: jnp.moveaxis(made.reshape(extent, *rest), 0, axis)
    return lambda given, made: jax.lax.scatter(given, where, made, numbers, mode=one.mode)


def _after_steps(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 + n for n in axes)
