"""``jm.fuse``: from a function of one element to a program of all of them.

The function is traced once, on the tiles of one element, and its jaxpr read into a program (see
:mod:`jaxmagma.jaxpr`).  ``jax.vmap`` then repeats that program over the elements, by adding a batch
axis to it: so ``fuse`` has the meaning, the arguments and the errors of ``vmap``.

What no kernel can do splits the function; see :mod:`jaxmagma.frontends.segments`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.frontends.closed import closed_forms
from jaxmagma.frontends.index import GatherAxis, Gathered, ScatterAxis
from jaxmagma.frontends.reshapes import without_reshapes
from jaxmagma.frontends.segments import read, run_function
from jaxmagma.programs.fallback import PlainCall, is_symbolic, tell


def fuse(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    sum_match: bool = False,
) -> Callable[..., Any]:
    """Runs a function of one element over all elements, as one kernel where that is possible.

    ``jm.fuse(fn)`` means ``jax.vmap(fn)``: same arguments, same results up to rounding, same
    errors.  Contractions, pointwise functions, reductions and the movement of values inside a tile
    become one native kernel, which reads each element once and writes each result once; so do the
    derivatives of the fused function, which recompute on chip what they need.  Whatever else the
    function does, and what XLA's own loops do as fast, plain JAX computes:
    :func:`jaxmagma.explain` says what, and why.

    Args:
      fun: a function of arrays (or trees of arrays), written for one element.  Arrays that it
        closes over are constants of the kernel, as far as they are known when it is traced.
      in_axes: as in ``jax.vmap``: the axis that runs over elements, an integer or None for each
        argument or each leaf of it; or :func:`jaxmagma.gather`, for a global vector of which every
        element reads its own values.
      out_axes: as in ``jax.vmap``; or :func:`jaxmagma.scatter_add`, for a global vector to which
        every element adds its values.
      axis_name: as in ``jax.vmap``: a name for the axis that runs over elements, for collectives
        such as ``jax.lax.psum``, which plain JAX computes between kernels.
      axis_size: as in ``jax.vmap``: the number of elements, where no argument has it.
      spmd_axis_name: as in ``jax.vmap``: the mesh axis that elements are sharded over.
      sum_match: as in ``jax.vmap``.

    Returns:
      The function of all elements.  Under ``jax.jit`` it is traced and compiled once.

    Raises:
      What ``jax.vmap`` raises, when the function is called.

    Example: diffusion in two dimensions, with the metric ``D`` at the quadrature points.

    >>> import jax, jaxmagma as jm, jax.numpy as jnp, numpy as np
    >>> B, G = np.random.rand(4, 3), np.random.rand(4, 3)     # values and slopes of the basis
    >>> def diffusion(u, D):                                   # (3, 3) and (4, 4, 2, 2)
    ...     gradient = jnp.stack([G @ u @ B.T, B @ u @ G.T], -1)
    ...     flux = jnp.einsum("xyij,xyj->xyi", D, gradient)
    ...     return G.T @ flux[..., 0] @ B + B.T @ flux[..., 1] @ G
    >>> u, D = np.random.rand(100, 3, 3), np.random.rand(100, 4, 4, 2, 2)
    >>> v = jax.jit(jm.fuse(diffusion))(u, D)
    >>> np.allclose(v, jax.vmap(diffusion)(u, D), rtol=1e-5, atol=1e-5)
    True
    """
    gathers = any(map(_is_index, jax.tree.leaves(in_axes, is_leaf=_is_index)))
    scatters = any(map(_is_index, jax.tree.leaves(out_axes, is_leaf=_is_index)))
    for name, axes, kind in (("in_axes", in_axes, GatherAxis), ("out_axes", out_axes, ScatterAxis)):
        for x in jax.tree.leaves(axes, is_leaf=_is_index):
            if _is_index(x) and not isinstance(x, kind):
                raise TypeError(f"fuse: {x} is no entry of {name}")
    options = dict(
        axis_name=axis_name, axis_size=axis_size, spmd_axis_name=spmd_axis_name, sum_match=sum_match
    )
    # What vmap does not accept it rejects now.
    jax.vmap(fun, 0 if gathers else in_axes, 0 if scatters else out_axes, **options)

    @functools.wraps(fun)
    def fused(*args: Any, **kwargs: Any) -> Any:
        axes = (in_axes,) * len(args) if _is_index(in_axes) else in_axes
        plain_out_axes = _replaced(out_axes, 0) if scatters else out_axes
        if gathers:
            axes = tuple(axes)
            result = _gathering(fun, args, kwargs, axes, plain_out_axes, options)
        else:

            @functools.wraps(fun)  # vmap's messages name the arguments
            def element(*element_args: Any, **element_kwargs: Any) -> Any:
                return _element(fun, element_args, element_kwargs, (args, kwargs))

            result = jax.vmap(element, axes, plain_out_axes, **options)(*args, **kwargs)
        if scatters:
            spread = _broadcast(out_axes, result)
            leaves, tree = jax.tree.flatten(result)
            result = jax.tree.unflatten(
                tree,
                [x(leaf) if _is_index(x) else leaf for x, leaf in zip(spread, leaves, strict=True)],
            )
        return result

    return fused


def _is_index(x: Any) -> bool:
    return isinstance(x, GatherAxis | ScatterAxis)


def _replaced(axes: Any, by: int | None) -> Any:
    return jax.tree.map(lambda x: by if _is_index(x) else x, axes, is_leaf=_is_index)


def _broadcast(axes: Any, tree: Any) -> list[Any]:
    """The entry of ``axes`` for each leaf of ``tree``."""
    found: list[Any] = []

    def spread(axis: Any, part: Any) -> None:
        found.extend([axis] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(spread, axes, tree, is_leaf=lambda x: x is None or _is_index(x))
    except ValueError as error:
        reason = str(error).replace("tree_map tree", "in_axes")
        raise ValueError(
            f"fuse: in_axes must be a tree prefix of the arguments; {reason}"
        ) from None
    return found


def _gathering(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    in_axes: tuple[Any, ...],
    out_axes: Any,
    options: Any,
) -> Any:
    """The function of all elements, some arguments being vectors of which each reads its part."""
    spread = [x if _is_index(x) else None for x in _broadcast(in_axes, args)]
    vectors, tree = jax.tree.flatten(args)
    for n, (axis, vector) in enumerate(zip(spread, vectors, strict=True)):
        if axis is not None:
            axis.check(vector)
            rows, *components = jnp.shape(vector)
            shape = [*axis.index.shape, *components]
            if is_symbolic([rows, *shape]) or 0 in shape:  # a program has no tiles without values
                spread[n], vectors[n] = None, axis.read(vector)
    given = jax.tree.unflatten(tree, vectors), kwargs
    mapped = [
        vector if axis is None else axis.within(len(vector))
        for axis, vector in zip(spread, vectors, strict=True)
    ]

    @functools.wraps(fn)  # vmap's messages name the arguments
    def element(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves(args)
        indices = {}
        for n, (axis, vector) in enumerate(zip(spread, vectors, strict=True)):
            if axis is not None:
                indices[axis, len(vector)], leaves[n] = leaves[n], vector
        return _element(fn, jax.tree.unflatten(tree, leaves), kwargs, given, spread, indices)

    over = jax.vmap(element, _replaced(in_axes, 0), out_axes, **options)
    try:
        return over(*jax.tree.unflatten(tree, mapped), **kwargs)
    except ValueError as error:
        if "inconsistent sizes" in str(error):
            error.add_note("Of an argument that is gathered it is the type of the indices.")
        raise


# ---- One element ---------------------------------------------------------------------------------

# What a function raises that wants to know a value while it is traced.
_WANTS_TO_KNOW = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


# What vmap returns as it is, or repeats; of other types it has ways of its own.
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _is_traceable(leaf: Any, given: Any) -> bool:
    """Whether a function can be traced on an argument; types of their own vmap maps its own way."""
    return leaf is given or isinstance(leaf, jax.Array)


# Stands for a result that is traced: one that is kept JAX takes for a leak.
_TRACED = object()

# And what an operation is of which JAX would know more if it were not traced.
_LESS_KNOWN = {"reduce", "reduce_window"}


def _element(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    given: Any,
    gathers: Sequence[Any] = (),
    indices: Any = (),
) -> Any:
    """The results of one element, by a program.

    ``given`` are the arguments of all elements.  Those that vmap does not map it leaves as they
    are, and so does the function get them: Python's numbers, strings and functions as well.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    if not gathers and not all(map(_is_traceable, leaves, jax.tree.leaves(given))):
        return fn(*args, **kwargs)
    gathers = [*gathers, *[None] * (len(leaves) - len(gathers))]
    own = [
        axis is not None or leaf is not x
        for axis, leaf, x in zip(gathers, leaves, jax.tree.leaves(given), strict=True)
    ]
    operands = [
        leaf
        if axis is None
        else Gathered(leaf, indices[axis, len(leaf)], axis.tables, not axis.deterministic)
        for axis, leaf, mapped in zip(gathers, leaves, own, strict=True)
        if mapped
    ]
    avals = [x.aval if isinstance(x, Gathered) else jax.typeof(x) for x in operands]
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
        for x in avals
    ]

    def whole(values: Sequence[Any], others: Sequence[Any] = leaves) -> tuple[Any, Any]:
        """The arguments, with ``values`` for those that differ from element to element."""
        remaining = iter(values)
        found = [next(remaining) if mapped else x for mapped, x in zip(own, others, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, found)
        return args, kwargs

    results: list[Any] = []

    @functools.wraps(fn)  # JAX's messages about what goes wrong in it name it and its arguments
    def traced(*args: Any, **kwargs: Any) -> list[Any]:
        args, kwargs = whole(jax.tree.leaves((args, kwargs)))
        found, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        kept = [_TRACED if isinstance(x, jax.core.Tracer) else x for x in found]
        results[:] = [out_tree, kept]
        return [x for x, own in zip(found, kept, strict=True) if own is _TRACED]

    args, kwargs = whole(structs, [None] * len(leaves))  # None is a tree without leaves
    try:
        with closed_forms():
            closed = jax.make_jaxpr(traced)(*args, **kwargs)
        reason: Exception | None = None
    except _WANTS_TO_KNOW as error:
        reason = error
    if (
        reason is not None
        or any(x.primitive.name in _LESS_KNOWN for x in closed.jaxpr.eqns)
        or not all(x is _TRACED or isinstance(x, _ARRAYS) for x in results[1])
    ):
        # What is the same for all elements is known under vmap, which does not trace it.
        tell(PlainCall("it wants to know values while it is traced"))
        args, kwargs = whole([read(x) if isinstance(x, Gathered) else x for x in operands])
        try:
            return fn(*args, **kwargs)
        except _WANTS_TO_KNOW as error:
            raise reason or error from None
    out_tree, found = results
    reshaped, operands, shapes = without_reshapes(closed, operands)
    made = map(jnp.reshape, run_function(reshaped, operands), shapes)
    return jax.tree.unflatten(out_tree, [next(made) if x is _TRACED else x for x in found])
