"""A linear map that is known by its transpose alone, as that of a function with a reverse rule.

Whoever asks for its values hears what JAX says: there is no forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmagma import internals


Transpose = Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]


def transposed_only(
    transpose: Transpose,
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    results: Sequence[jax.Array],
) -> list[jax.Array]:
    """The tangents of some results, of which ``transpose(primals, cotangents)`` makes cotangents.

    Those are of the ``tangents``.  It holds no traced array but its arguments.
    """
    counts = len(primals), len(tangents)
    operands = internals.common_variance([*primals, *tangents, *results])
    return list(transposed_only_p.bind(*operands, transpose=transpose, counts=counts))


transposed_only_p = Primitive("transposed_only")
transposed_only_p.multiple_results = True


def _split(operands: Sequence[Any], counts: tuple[int, int]) -> tuple[Any, Any, Any]:
    first, second = counts[0], sum(counts)
    return tuple(operands[:first]), tuple(operands[first:second]), tuple(operands[second:])


def _abstract_eval(*operands: Any, counts: tuple[int, int], **parameters: Any) -> list[Any]:
    return [x.to_tangent_aval() for x in _split(operands, counts)[2]]


def _no_forward_mode(*operands: Any, **parameters: Any) -> NoReturn:
    raise TypeError("can't apply forward-mode autodiff (jvp) to a custom_vjp function.")


def _transpose(
    cotangents: Sequence[Any], *operands: Any, transpose: Transpose, counts: tuple[int, int]
) -> list[Any]:
    primals, _, results = _split(operands, counts)
    found = transpose(primals, tuple(map(ad.instantiate_zeros, cotangents)))
    return [*[None] * len(primals), *found, *[None] * len(results)]


def _batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    transpose: Transpose,
    counts: tuple[int, int],
) -> tuple[list[Any], list[int]]:
    """What is not mapped is repeated, so that its cotangents are added up."""

    def mapped(x: Any, dim: int | None) -> Any:
        return batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis)

    primals, tangents, results = _split(operands, counts)
    of_primals, *others = _split(dims, counts)
    moved = [
        [mapped(*x) for x in zip(*pair, strict=True)]
        for pair in zip((tangents, results), others, strict=True)
    ]
    each = internals.vmapped(transpose, axis, (tuple(of_primals), 0))
    made = transposed_only(each, primals, *moved)
    return made, [0] * len(made)


transposed_only_p.def_abstract_eval(_abstract_eval)
transposed_only_p.def_impl(_no_forward_mode)
ad.primitive_jvps[transposed_only_p] = _no_forward_mode
ad.primitive_transposes[transposed_only_p] = _transpose
batching.fancy_primitive_batchers[transposed_only_p] = _batch
mlir.register_lowering(transposed_only_p, _no_forward_mode)
