"""Every name of JAX's internals that the project uses."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import (
    checkify,  # error_checks
    dispatch,  # prim_requires_devices_during_lowering
    source_info_util,  # user_context
)
from jax._src.lax import linalg as lax_linalg  # _solve
from jax._src.numpy import linalg as numpy_linalg  # _det, _det_2x2, _det_3x3
from jax.extend.core import Primitive
from jax.interpreters import mlir


_SEARCHES: tuple[Any, ...] = ()
with contextlib.suppress(ImportError):  # in older releases a search is made of other primitives
    from jax._src.numpy.hijax import SearchSorted

    _SEARCHES = (SearchSorted,)


def lowers_with_devices(primitive: Primitive) -> None:
    """Declares that a primitive's lowering contains a partitioned call."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether what is being lowered is to be serialised."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def checks_as(
    primitive: Primitive,
    operands: Callable[..., int],
    evaluate: Callable[..., Callable[..., Any]],
) -> None:
    """Declares what ``jax.experimental.checkify`` runs where it looks at every operation.

    By the parameters of an equation: of so many ``operands``, what ``evaluate`` returns.
    """

    def rule(*arguments: Any, **parameters: Any) -> Any:
        # Ahead stand the error so far and which ones are asked for; in newer JAX a context, too.
        first = len(arguments) - operands(**parameters)
        ahead, values = arguments[:first], arguments[first:]
        if not set(ahead[-1]) - checkify.user_checks:
            return ahead[-2], primitive.bind(*values, **parameters)
        (call,) = jax.make_jaxpr(jax.jit(evaluate(**parameters)))(*values).eqns
        return checkify.error_checks[call.primitive](*ahead, *values, **call.params)

    checkify.error_checks[primitive] = rule


@contextlib.contextmanager
def at_line_of(equation: Any) -> Iterator[None]:
    """In its body, what is traced comes from where an equation comes from."""
    source = equation.source_info
    with source_info_util.user_context(source.traceback, name_stack=source.name_stack):
        yield


def search_of(primitive: Any) -> str | None:
    """The side of one of JAX's composite primitives if that is a search in one sorted vector."""
    if not isinstance(primitive, _SEARCHES) or primitive.batch_dims or primitive.dimension:
        return None
    sorted_values, _ = primitive.in_avals_flat
    return primitive.side if sorted_values.ndim == 1 else None


def of_small_matrices(
    det: Callable[..., Any], inv: Callable[..., Any], solve: Callable[..., Any]
) -> None:
    """Has ``jnp.linalg`` ask these first, which may return None.

    They are asked with what its own functions are called with.
    """

    def asking(own: Callable[..., Any], first: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def function(*operands: Any) -> Any:
            found = first(*operands)
            return own(*operands) if found is None else found

        return function

    asked = (
        (numpy_linalg, "_det", det),
        (numpy_linalg, "_det_2x2", det),
        (numpy_linalg, "_det_3x3", det),
        (lax_linalg, "_solve", solve),
    )
    for module, name, first in asked:
        own = getattr(module, name, None)
        if own is not None:  # in other releases, which do it in another way, all goes on as there
            setattr(module, name, asking(own, first))

    # This one is public, and compiled: what asks is compiled as well.
    inverse = jax.jit(asking(getattr(jnp.linalg.inv, "__wrapped__", jnp.linalg.inv), inv))
    for module in (numpy_linalg, jnp.linalg):
        module.inv = inverse  # type: ignore[attr-defined]


def vmapped(function: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    """``jax.vmap`` along the axis that a primitive is asked to be repeated along."""
    return jax.vmap(
        function,
        in_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def common_variance(arguments: Sequence[Any]) -> list[Any]:
    """Under ``shard_map``, casts all arguments to vary over the same mesh axes.

    A primitive with operands of mixed variance would hand a replicated operand (a basis, say) a
    cotangent that still differs from device to device; the transpose of this cast is the sum that
    it needs.
    """
    axes = [varying(x) for x in arguments]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arguments, axes, strict=True)
    ]


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which an array differs from device to device, under ``shard_map``."""
    # `.mat` is where every supported release keeps it.
    kind = getattr(jax.typeof(x), "mat", None)
    return frozenset(getattr(kind, "varying", ()) or ())
