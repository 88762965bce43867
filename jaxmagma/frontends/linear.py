"""A linear map that comes with its transpose, as that of a system of equations does.

JAX would transpose a program operation by operation, and a function with derivatives of its own not
at all.  Both the map and its transpose are functions whose other derivatives are their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxmagma import internals


# Of operands, and of what it is linear in.
Map = Callable[[Sequence[Any], Sequence[Any]], list[jax.Array]]


def linear_map(
    function: Map, transpose: Map, operands: Sequence[jax.Array], along: Sequence[jax.Array]
) -> list[jax.Array]:
    """``function(operands, along)``, of which ``transpose(operands, cotangents)`` is the transpose.

    A cotangent that is None is zero.  Neither function holds a traced array.
    """
    count = len(operands)
    values = internals.common_variance([*operands, *along])

    def whole(*values: jax.Array) -> list[jax.Array]:
        return function(values[:count], values[count:])

    jaxpr = jax.make_jaxpr(whole)(*values)
    return list(linear_map_p.bind(*values, jaxpr=jaxpr, transpose=transpose, count=count))


linear_map_p = Primitive("custom_linear_map")
linear_map_p.multiple_results = True


def _function(jaxpr: ClosedJaxpr) -> Map:
    evaluate = jaxpr_as_fun(jaxpr)
    return lambda operands, along: list(evaluate(*operands, *along))


def _abstract_eval(*operands: Any, jaxpr: ClosedJaxpr, **parameters: Any) -> tuple[Any, Any]:
    return list(jaxpr.out_avals), jaxpr.effects


def _evaluate(*operands: Any, jaxpr: ClosedJaxpr, **parameters: Any) -> list[Any]:
    return list(jaxpr_as_fun(jaxpr)(*operands))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, **parameters: Any
) -> tuple[list[Any], list[Any]]:
    moving = [n for n, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def function(*xs: Any) -> list[Any]:
        found = dict(enumerate(primals)) | dict(zip(moving, xs, strict=True))
        return _evaluate(*found.values(), jaxpr=jaxpr)

    where, directions = ([x[n] for n in moving] for x in (primals, tangents))
    _, dots = jax.jvp(function, where, directions)
    return linear_map_p.bind(*primals, jaxpr=jaxpr, **parameters), dots


def _transpose(
    cotangents: Sequence[Any], *values: Any, jaxpr: ClosedJaxpr, transpose: Map, count: int
) -> list[Any]:
    unknown = [n for n, x in enumerate(values) if ad.is_undefined_primal(x)]
    if min(unknown) < count:
        # As the derivative of another map it is linear in operands: JAX transposes what it does.
        def function(*xs: Any) -> list[Any]:
            known = dict(enumerate(values)) | dict(zip(unknown, xs, strict=True))
            return _evaluate(*known.values(), jaxpr=jaxpr)

        transposed = jax.linear_transpose(function, *(values[n].aval for n in unknown))
        found = iter(transposed([*map(ad.instantiate_zeros, cotangents)]))
        return [next(found) if n in unknown else None for n in range(len(values))]
    # What has no cotangent has none in the transpose, either: zero times infinity is no zero.
    given = [n for n, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]
    if not given:
        return [None] * len(values)

    def forward(operands: Sequence[Any], along: Sequence[Any]) -> list[jax.Array]:
        made = _function(jaxpr)(operands, along)
        return [made[n] for n in given]

    def backward(operands: Sequence[Any], some: Sequence[Any]) -> list[jax.Array]:
        whole: list[Any] = [None] * len(cotangents)
        for n, x in zip(given, some, strict=True):
            whole[n] = x
        return transpose(operands, whole)

    found = linear_map(backward, forward, values[:count], [cotangents[n] for n in given])
    return [*[None] * count, *found]


def _batch(
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    transpose: Map,
    count: int,
) -> tuple[list[Any], list[int | None]]:
    """What it is linear in is repeated where it is not mapped: its cotangents are added up."""
    if all(dim is None for dim in dims):
        made = linear_map_p.bind(*values, jaxpr=jaxpr, transpose=transpose, count=count)
        return made, [None] * len(made)
    along = [
        batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis)
        for x, dim in zip(values[count:], dims[count:], strict=True)
    ]

    def mapped(function: Map) -> Map:
        each = internals.vmapped(function, axis, (tuple(dims[:count]), 0))
        return lambda operands, along: each(tuple(operands), list(along))

    made = linear_map(mapped(_function(jaxpr)), mapped(transpose), values[:count], along)
    return made, [0] * len(made)


linear_map_p.def_effectful_abstract_eval(_abstract_eval)
linear_map_p.def_impl(_evaluate)
ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.fancy_primitive_batchers[linear_map_p] = _batch
mlir.register_lowering(linear_map_p, mlir.lower_fun(_evaluate, multiple_results=True))
internals.checks_as(
    linear_map_p,
    lambda jaxpr, **parameters: len(jaxpr.in_avals),
    lambda jaxpr, **parameters: jaxpr_as_fun(jaxpr),
)
