"""The digits of a number that another one has, too, as a primitive of JAX."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmagma.programs.exact import common_digits


def _keep_digits(a: jax.Array, like: float) -> jax.Array:
    return common_digits(a, lax.full_like(a, like))


def _without_tangent(operands: Sequence[Any], _: Any, like: float) -> tuple[jax.Array, ad.Zero]:
    made = keep_digits_p.bind(*operands, like=like)
    return made, ad.Zero(jax.typeof(made).to_tangent_aval())


# Of any number, the digits of its mantissa that are ones in ``like``.
keep_digits_p = Primitive("keep_digits")
keep_digits_p.def_impl(jax.jit(_keep_digits, static_argnames="like"))
keep_digits_p.def_abstract_eval(lambda a, like: a.update(weak_type=False))
ad.primitive_jvps[keep_digits_p] = _without_tangent
batching.primitive_batchers[keep_digits_p] = lambda operands, axes, like: (
    keep_digits_p.bind(*operands, like=like),
    axes[0],
)
mlir.register_lowering(keep_digits_p, mlir.lower_fun(_keep_digits, multiple_results=False))
