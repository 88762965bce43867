"""Where the values of elements are in a global vector: ``jm.gather`` and ``jm.scatter_add``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma import primitive
from jaxmagma.program import Constant


class GatherAxis:
    """What :func:`gather` returns: an entry of ``in_axes``."""

    def __init__(self, dofs: Any) -> None:
        self.places = _places("gather", dofs)
        with jax.ensure_compile_time_eval():
            self.index = jnp.asarray(self.places.array)

    @functools.cached_property
    def largest(self) -> int:
        return int(self.places.array.max(initial=-1))

    def check(self, vector: Any) -> None:
        """Raises if the vector is too short."""
        if jnp.ndim(vector) == 0 or self.largest >= jnp.shape(vector)[0]:
            raise IndexError(
                f"gather: index {self.largest} is out of range for a vector of shape "
                f"{jnp.shape(vector)}"
            )

    def __repr__(self) -> str:
        return f"gather({_described(self.places)})"


class ScatterAxis:
    """What :func:`scatter_add` returns: an entry of ``out_axes``."""

    def __init__(self, dofs: Any, size: int, deterministic: bool) -> None:
        self.places = _places("scatter_add", dofs)
        self.size = int(size)
        self.deterministic = deterministic
        largest = int(self.places.array.max(initial=-1))
        if largest >= self.size:
            raise IndexError(f"scatter_add: index {largest} is out of range for size {self.size}")

    def __call__(self, values: jax.Array) -> jax.Array:
        """Adds the values of all elements up."""
        own = self.places.array.shape
        if values.shape[: len(own)] != own:
            raise ValueError(
                f"scatter_add: the elements have values of shape {values.shape[1:]} each, "
                f"{values.shape[0]} elements in all; its indices have the shape {own}"
            )
        shape = (self.size, *values.shape[len(own) :])
        if self.deterministic:
            return primitive.assemble(values, self.places, 0, shape)
        return jnp.zeros(shape, values.dtype).at[self.places.array].add(values)

    def __repr__(self) -> str:
        return f"scatter_add({_described(self.places)}, {self.size})"


def gather(dofs: Any) -> GatherAxis:
    """An entry of ``in_axes``: each element reads its own values of a global vector.

    Args:
      dofs: integers of shape ``(elements, ...)``: where in the vector each element's values are, on
        the axes they shall have in the element.  Known before any array is: a numpy array or a
        concrete JAX array, not a traced one.

    The argument itself is the global vector, of shape ``(size, ...)``; the function of one element
    sees it with the shape ``dofs.shape[1:] + (...)``.

    Raises:
      TypeError: ``dofs`` are not integers.
      IndexError: a negative index; and, when the function is called, one beyond the vector's end.

    >>> import jaxmagma as jm, jax.numpy as jnp
    >>> dofs = [[0, 1, 2], [2, 3, 4]]                       # two elements share entry 2
    >>> total = jm.fuse(lambda u: u.sum(), in_axes=jm.gather(dofs))
    >>> total(jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()
    [6.0, 12.0]
    """
    return GatherAxis(dofs)


def scatter_add(dofs: Any, size: int, *, deterministic: bool = True) -> ScatterAxis:
    """An entry of ``out_axes``: each element adds its values to a global vector.

    Args:
      dofs: integers of shape ``(elements, ...)``: where in the vector each of an element's values
        belongs; see :func:`gather`.
      size: the length of the vector.
      deterministic: sum in an order that is fixed here, once: the same bits every time.  Otherwise
        the device adds atomically, in any order.

    The result has the shape ``(size, ...)``, with those axes of an element's result behind that
    ``dofs`` does not have.

    Raises:
      TypeError: ``dofs`` are not integers.
      IndexError: an index is not in ``range(size)``.

    >>> import jaxmagma as jm, jax.numpy as jnp
    >>> dofs = [[0, 1, 2], [2, 3, 4]]
    >>> add = jm.fuse(lambda x: x, out_axes=jm.scatter_add(dofs, 5))
    >>> add(jnp.ones((2, 3))).tolist()
    [1.0, 1.0, 2.0, 1.0, 1.0]
    """
    return ScatterAxis(dofs, size, deterministic)


def _places(name: str, dofs: Any) -> Constant:
    if isinstance(dofs, jax.core.Tracer):
        raise TypeError(f"{name}: the indices must be known before tracing, not {dofs}")
    array = np.asarray(dofs)
    if array.dtype.kind not in "iu" or array.ndim == 0:
        raise TypeError(
            f"{name}: the indices are integers of shape (elements, ...), not "
            f"{array.dtype} of shape {array.shape}"
        )
    if array.size and array.min() < 0:
        raise IndexError(f"{name}: index {array.min()} is negative")
    if array.max(initial=0) > np.iinfo(np.int32).max:
        raise IndexError(f"{name}: index {array.max()} has more than 31 bits")
    return Constant(array.astype(np.int32))


def _described(places: Constant) -> str:
    return f"{places.array.shape[0]} elements of shape {places.array.shape[1:]}"
