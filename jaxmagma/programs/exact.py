"""Functions that are exact where products and sums round, as primitives of JAX.

T. J. Dekker, "A floating-point technique for extending the available precision", Numer. Math. 18,
1971; J.-M. Muller et al., "Handbook of Floating-Point Arithmetic", 2018, sections 4.3 and 4.4.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a b + c``, rounded once."""
    return _fused_multiply_add_p.bind(a, b, c)


def product_error(a: jax.Array, b: jax.Array) -> jax.Array:
    """What ``a b`` loses when it is rounded; no number that is a result of others' changes."""
    return _product_error_p.bind(a, b)


def inverse_binade(a: jax.Array) -> jax.Array:
    """The power of two ``s`` with ``1 <= s |a| < 2``; one that is finite where there is none."""
    return _inverse_binade_p.bind(a)


def common_digits(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a`` without those binary digits of its mantissa that are zeros in ``b``."""
    return _common_digits_p.bind(a, b)


def difference_of_products(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
    """``a b - c d`` with an error of at most two units in the last place (W. Kahan)."""
    return fused_multiply_add(a, b, -(c * d)) - product_error(c, d)


# ---- What they are without a kernel --------------------------------------------------------------


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers whose sum it is, with so few digits that products of such are exact."""
    info = jnp.finfo(a.dtype)
    high = lax.reduce_precision(a, info.nexp, (info.nmant - 1) // 2)
    return high, a - high


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Rounded: compilers fuse a product with a sum that it is a term of, but not a choice.

    Nor do they know that this is none. A barrier would end the loop, and values go through memory.
    """
    made: jax.Array = lax.select(lax.eq(a, a), a * b, a)
    return made


def _product_error(a: jax.Array, b: jax.Array) -> jax.Array:
    (high, low), (b_high, b_low) = _halves(a), _halves(b)
    rest = high * b_high - _product(a, b)
    return ((rest + high * b_low) + low * b_high) + low * b_low


def _fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    product = _product(a, b)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part) + _product_error(a, b)
    return lax.select(lax.is_finite(lost), total + lost, total)


def _inverse_binade(a: jax.Array) -> jax.Array:
    info = jnp.finfo(a.dtype)
    integer = np.dtype(f"int{info.bits}")
    bits = lax.bitcast_convert_type(a, integer)
    exponent = lax.bitwise_and(bits, lax.full_like(bits, (2**info.nexp - 1) << info.nmant))
    inverse = lax.full_like(bits, (2**info.nexp - 2) << info.nmant) - exponent
    return lax.bitcast_convert_type(lax.max(inverse, lax.full_like(bits, 1 << info.nmant)), a.dtype)


def _common_digits(a: jax.Array, b: jax.Array) -> jax.Array:
    info = jnp.finfo(a.dtype)
    own, other = (lax.bitcast_convert_type(x, np.dtype(f"uint{info.bits}")) for x in (a, b))
    others = lax.full_like(other, 2**info.bits - 2**info.nmant)  # than digits: sign and exponent
    both = lax.bitwise_and(own, lax.bitwise_or(other, others))
    return lax.bitcast_convert_type(both, a.dtype)


# ---- The primitives ------------------------------------------------------------------------------


def _primitive(name: str, function: Callable[..., jax.Array]) -> Primitive:
    """One of arrays of equal shape and dtype."""
    made = Primitive(name)

    def batched(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, int]:
        size = next(x.shape[n] for x, n in zip(operands, axes, strict=True) if n is not None)
        spread = [
            jnp.broadcast_to(x, (size, *jnp.shape(x))) if n is None else jnp.moveaxis(x, n, 0)
            for x, n in zip(operands, axes, strict=True)
        ]
        return made.bind(*spread), 0

    made.def_impl(jax.jit(function))
    made.def_abstract_eval(lambda a, *others: a.update(weak_type=False))
    batching.primitive_batchers[made] = batched
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def _without_tangent(primitive: Primitive, operands: Any, _: Any) -> tuple[jax.Array, ad.Zero]:
    made = primitive.bind(*operands)
    return made, ad.Zero(jax.typeof(made).to_tangent_aval())


_fused_multiply_add_p = _primitive("fused_multiply_add", _fused_multiply_add)
_product_error_p = _primitive("product_error", _product_error)
_inverse_binade_p = _primitive("inverse_binade", _inverse_binade)
_common_digits_p = _primitive("common_digits", _common_digits)
ad.defjvp(
    _fused_multiply_add_p,
    lambda t, a, b, c: t * b,
    lambda t, a, b, c: a * t,
    lambda t, a, b, c: t,
)
for _constant_p in (_product_error_p, _inverse_binade_p, _common_digits_p):
    ad.primitive_jvps[_constant_p] = functools.partial(_without_tangent, _constant_p)
