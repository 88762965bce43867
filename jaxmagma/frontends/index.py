"""Where the values of elements are in a global vector: ``jm.gather`` and ``jm.scatter_add``.

What they return are pytrees.  Their leaves are the index and the tables of its transpose (see
:mod:`jaxmagma.primitives.assembly`), so that a compiled function takes a mesh like any other
argument; what the function is compiled for, such as a size, is static.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.primitives import primitive
from jaxmagma.primitives.assembly import Assembly, assembly
from jaxmagma.programs.fallback import is_symbolic


_LARGEST = int(np.iinfo(np.int32).max)

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class GatherAxis:
    """What :func:`gather` returns: an entry of ``in_axes``."""

    index: jax.Array  # (elements, ...)
    assembly: Assembly | None  # of the transpose; None if it is made without tables
    bound: int | None = field(metadata=_STATIC)  # all indices are below it, as far as is known
    mode: str | None = field(metadata=_STATIC)  # what becomes of other ones; None: there are none
    deterministic: bool = field(metadata=_STATIC)

    def check(self, vector: Any) -> None:
        """Raises if the vector is none, or too short."""
        if jnp.ndim(vector) == 0:
            raise ValueError(f"gather: an argument has rows to read, and {vector!r} is a scalar")
        if jnp.issubdtype(jax.typeof(vector).dtype, jax.dtypes.extended):
            raise TypeError(
                f"gather: an argument has numbers to read, and is {jax.typeof(vector)}; gather "
                "jax.random.key_data of it"
            )
        least = 0 if self.bound is None or self.mode is not None else self.bound
        if least > jnp.shape(vector)[0]:
            raise IndexError(
                f"gather: index {(self.bound or 0) - 1} is out of range for a vector of shape "
                f"{jnp.shape(vector)}"
            )

    def within(self, length: int) -> jax.Array:
        """The index, in 32 bits, for a vector of that length: outside of it where that reads 0."""
        return _within("gather", self.index, length, self.mode)

    def read(self, vector: Any) -> jax.Array:
        """The values of all elements, by plain JAX."""
        at = jnp.asarray(vector).at[self.within(jnp.shape(vector)[0])]
        return at.get(mode="fill", fill_value=0, wrap_negative_indices=False)

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """Those of the index; none if it is a part of what they were made for."""
        return _tables(self.index, self.assembly)

    def __repr__(self) -> str:
        return f"gather({_described(self.index)})"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class ScatterAxis:
    """What :func:`scatter_add` returns: an entry of ``out_axes``."""

    index: jax.Array  # (elements, ...)
    assembly: Assembly | None  # None if the sum is made without tables
    size: int = field(metadata=_STATIC)
    mode: str | None = field(metadata=_STATIC)  # as that of GatherAxis
    deterministic: bool = field(metadata=_STATIC)

    @property
    def bound(self) -> int:
        return self.size

    def __call__(self, values: jax.Array) -> jax.Array:
        """Adds the values of all elements up."""
        own = self.index.shape
        if values.dtype == bool:
            raise TypeError("scatter_add: the elements have truth values, which are not added up")
        if values.shape[: len(own)] != own:
            raise ValueError(
                f"scatter_add: the elements have values of shape {values.shape[1:]} each, "
                f"{values.shape[0]} elements in all; its indices have the shape {own}"
            )
        index = _within("scatter_add", self.index, self.size, self.mode)
        tables = _tables(self.index, self.assembly)
        return primitive.assemble(values, index, tables, 0, self.size, not self.deterministic)

    def __repr__(self) -> str:
        return f"scatter_add({_described(self.index)}, {self.size})"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Gathered:
    """The part of a vector that an element reads; ``tables`` are those of all elements."""

    vector: jax.Array
    index: jax.Array
    tables: tuple[jax.Array, ...]
    atomic: bool = field(metadata=_STATIC)

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        shape = self.index.shape + jnp.shape(self.vector)[1:]
        return jax.ShapeDtypeStruct(shape, jnp.result_type(self.vector))


def gather(
    dofs: Any, size: int | None = None, *, mode: str | None = None, deterministic: bool = True
) -> GatherAxis:
    """An entry of ``in_axes``: each element reads its own values of a global vector.

    Args:
      dofs: integers of shape ``(elements, ...)``: where in the vector each element's values are, on
        the axes they shall have in the element.  Or what :func:`scatter_add` returned, whose index
        and tables then serve both.
      size: the length of the vector; if it is not given, indices are checked against it when the
        function is called.
      mode: ``"fill"``: what is outside of the vector is zero; ``"clip"``: it is the nearest entry.
        That is for traced indices, ``"fill"`` if nothing is said: they cannot be checked.  For
        known ones nothing may be outside, unless a mode says otherwise; then ``size`` is needed
        for tables.  Negative indices are outside; none counts from the end.
      deterministic: the gradient with respect to the vector sums in a fixed order.  Otherwise the
        device adds atomically, in any order, and no tables are made.

    The argument itself is the global vector, of shape ``(size, ...)``; the function of one element
    sees it with the shape ``dofs.shape[1:] + (...)``.

    Returns:
      A pytree: pass it, or the mesh that has it, to compiled functions as an argument.  Closed
      over, it is a constant of the compiled program, as any array is.  Of known indices, its leaves
      are an int32 copy and the tables for gradients.  Of traced ones it has no tables: a gradient
      sorts them each time.

    Raises:
      TypeError: ``dofs`` are not integers, ``size`` is none, or ``deterministic`` no truth value.
      IndexError: a known index is negative, or not below ``size``; or, when the function is called,
        beyond the vector's end.
      ValueError: an unknown mode, a negative ``size``, or elements with different numbers of
        indices; or, when the function is called, a scalar.

    >>> import jax, jaxmagma as jm, jax.numpy as jnp
    >>> mine = jm.gather([[0, 1, 2], [2, 3, 4]])            # two elements share entry 2
    >>> @jax.jit
    ... def total(mine, u):
    ...     return jm.fuse(lambda u: u.sum(), in_axes=mine)(u)
    >>> total(mine, jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])).tolist()
    [6.0, 12.0]
    """
    size = None if size is None else _size("gather", size)
    deterministic = _flag("gather", deterministic)
    made, bound, mode = _made("gather", dofs, size, mode, deterministic)
    return GatherAxis(*made, bound, mode, deterministic)


def scatter_add(
    dofs: Any, size: int, *, mode: str | None = None, deterministic: bool = True
) -> ScatterAxis:
    """An entry of ``out_axes``: each element adds its values to a global vector.

    Args:
      dofs: integers of shape ``(elements, ...)``: where in the vector each of an element's values
        belongs; or what :func:`gather` returned, whose index and tables then serve both.
      size: the length of the vector.
      mode: ``"drop"``: values that belong outside of the vector are dropped; ``"clip"``: the
        nearest entry gets them.  For traced indices, as in :func:`gather`; ``"drop"`` if nothing is
        said.
      deterministic: sum in a fixed order: the same bits every time.  For traced indices a GPU then
        sorts them each time.  Otherwise the device adds atomically, in any order.

    The result has the shape ``(size, ...)``, with those axes of an element's result behind that
    ``dofs`` does not have.

    Returns:
      A pytree, as :func:`gather` does.

    Raises:
      TypeError: ``dofs`` are not integers, ``size`` is none, or ``deterministic`` no truth value;
        or, when the function is called, what it returns are truth values.
      IndexError: a known index is not in ``range(size)``.
      ValueError: an unknown mode, a negative ``size``, or elements with different numbers of
        indices.

    >>> import jax, jaxmagma as jm, jax.numpy as jnp
    >>> add = jm.scatter_add([[0, 1, 2], [2, 3, 4]], 5)
    >>> @jax.jit
    ... def assembled(add, x):
    ...     return jm.fuse(lambda x: x, out_axes=add)(x)
    >>> assembled(add, jnp.ones((2, 3))).tolist()
    [1.0, 1.0, 2.0, 1.0, 1.0]
    """
    size, deterministic = _size("scatter_add", size), _flag("scatter_add", deterministic)
    made, _, mode = _made("scatter_add", dofs, size, mode, deterministic)
    return ScatterAxis(*made, size, mode, deterministic)


def _size(name: str, size: Any) -> int:
    try:
        found = operator.index(size)
    except TypeError as error:
        raise TypeError(f"{name}: size is an integer, not {size!r}") from error
    if found < 0:
        raise ValueError(f"{name}: size is at least 0, not {found}")
    return found


def _flag(name: str, deterministic: Any) -> bool:
    if not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"{name}: deterministic is True or False, not {deterministic!r}")
    return bool(deterministic)


# ---- What is known of an index -------------------------------------------------------------------


def _made(
    name: str, dofs: Any, size: int | None, mode: str | None, deterministic: bool
) -> tuple[tuple[jax.Array, Assembly | None], int | None, str | None]:
    """The index and its tables, what all indices are below, and the mode that is left to heed."""
    if mode not in (None, "clip", "drop", "fill"):
        raise ValueError(f"{name}: the mode is 'clip', 'drop' or 'fill', not {mode!r}")
    if isinstance(dofs, GatherAxis | ScatterAxis):
        fits = dofs.mode is None and (size is None or size >= (dofs.bound or 0))
        if fits and (dofs.assembly is not None or not deterministic):
            made = dofs.assembly if deterministic else None
            return (dofs.index, made), dofs.bound if size is None else size, None
        dofs, mode = dofs.index, mode or dofs.mode
    try:
        array: Any = dofs if isinstance(dofs, jax.Array) else np.asarray(dofs)
    except ValueError as error:
        raise ValueError(f"{name}: not all elements have as many indices: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim == 0:
        raise TypeError(
            f"{name}: the indices are integers of shape (elements, ...), not "
            f"{array.dtype} of shape {array.shape}"
        )
    traced = isinstance(array, jax.core.Tracer)
    if traced or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return (array, None), size, mode or "fill"
    with jax.core.eval_context():  # also while a function that closes over the index is traced
        if mode is None:
            _check(name, array, size)
        else:
            array = _within(name, array, _LARGEST if size is None else size, mode)
            mode = mode if size is None else None
        # A copy: what becomes of the caller's array later is no business of ours.
        index = jax.device_put(array.astype(np.int32))
        if mode is not None:
            return (index, None), size, mode
        bound = _range(index)[1] + 1 if size is None else size
        return (index, assembly(index, bound) if deterministic else None), bound, None


def _check(name: str, array: Any, size: int | None) -> None:
    least, largest = _range(array)
    if least < 0:
        raise IndexError(f"{name}: index {least} is negative")
    if max(largest, array.size) > _LARGEST:
        raise IndexError(f"{name}: index {max(largest, array.size)} has more than 31 bits")
    if size is not None and largest >= size:
        raise IndexError(f"{name}: index {largest} is out of range for size {size}")


def _range(array: Any) -> tuple[int, int]:
    return (int(array.min()), int(array.max())) if array.size else (0, -1)


def _within(name: str, index: Any, length: int, mode: str | None) -> Any:
    """The index for a vector of that length, in 32 bits; -1, or beyond the end, is nowhere in it.

    Wider ones are cut to size; others are what they are, which costs nothing.
    """
    if mode is None:
        return index
    if not is_symbolic([length]) and length > _LARGEST:
        raise IndexError(f"{name}: a vector of {length} entries has indices of more than 31 bits")
    if index.dtype.itemsize < 4:
        index = index.astype(np.int32)
    xp = jnp if isinstance(index, jax.Array) else np
    if mode == "clip":
        index = xp.clip(index, 0, max(length - 1, 0))
    elif index.dtype != np.int32:
        index = xp.where((index >= 0) & (index < length), index, index.dtype.type(_LARGEST))
    return index.astype(np.int32)


def _tables(index: jax.Array, made: Assembly | None) -> tuple[jax.Array, ...]:
    return made.tables if made is not None and made.count == index.size else ()


def _described(index: Any) -> str:
    shape = getattr(index, "shape", ())
    return f"{shape[0]} elements of shape {shape[1:]}" if shape else str(index)
