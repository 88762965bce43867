"""What is computed while reading: equations of known operands."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.calls import CALLS, inner_jaxpr
from jaxmagma.jaxpr.contractions import labels_of
from jaxmagma.jaxpr.equations import (
    Rule,
    Unsupported,
    anything,
    applied,
    aval,
    inside,
    interpreted,
    is_empty,
    is_extended,
    nothing,
)
from jaxmagma.jaxpr.pointwise import POINTWISE
from jaxmagma.jaxpr.rules import ELSEWHERE, NESTED, RULES


# What may be computed as soon as its operands are known, beside what has a rule: it depends on
# nothing else, such as the platform or the place along a named axis, and is no effect.
_PURE = frozenset(
    """
    acos acosh asin asinh atan atanh approx_top_k bessel_i0e bessel_i1e bitcast_convert_type clz
    complex conj conv_general_dilated copy cumlogsumexp eig fft geqrf householder_product igamma
    igammac igamma_grad_a imag iota nextafter not platform_index population_count random_bits
    random_clone random_fold_in random_gamma random_seed random_unwrap random_wrap real reduce
    reduce_window reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    regularized_incomplete_beta rng_bit_generator schur select_and_gather_add
    select_and_scatter_add shift_left shift_right_arithmetic shift_right_logical threefry2x32
    top_k tridiagonal tridiagonal_solve zeta
    """.split()
)


def is_pure(equation: JaxprEqn) -> bool:
    """Whether its results depend on its operands alone, and nothing else happens."""
    name, parameters = equation.primitive.name, equation.params
    if name in POINTWISE or (name in RULES and name not in NESTED):
        return not equation.effects
    known = name in _PURE or name in NESTED or name in CALLS
    for key in ("platforms", "branches_platforms"):
        known = known and parameters.get(key, ELSEWHERE) == ELSEWHERE
    return known and not equation.effects and all(map(is_pure, inside(equation)))


def _ordered(x: np.ndarray, dimensions: Sequence[int] | None) -> np.ndarray:
    return x if dimensions is None else x.transpose(dimensions)


def _broadcast(x: np.ndarray, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Any:
    own = [1] * len(shape)
    for axis, extent in zip(broadcast_dimensions, x.shape, strict=True):
        own[axis] = extent
    return np.broadcast_to(x.reshape(own), shape)


def _iota(dtype: Any, shape: Sequence[int], dimension: int) -> Any:
    return _broadcast(np.arange(shape[dimension]).astype(dtype), shape, (dimension,))


def _converted(x: np.ndarray, new_dtype: Any) -> np.ndarray:
    """What is converted without being rounded, or is rounded to the nearest number."""
    if x.dtype.kind not in "biuf" or np.dtype(new_dtype).kind not in "fc":
        raise Unsupported(f"{x.dtype} to {new_dtype}")
    return x.astype(new_dtype)


def _product(
    left: np.ndarray, right: np.ndarray, dimension_numbers: Any, preferred_element_type: Any
) -> np.ndarray:
    if not left.dtype == right.dtype == preferred_element_type or left.dtype.kind not in "fc":
        raise Unsupported("a product of several dtypes")
    one, other, output = labels_of(dimension_numbers, left.ndim, right.ndim)
    if not (one + other).isascii():
        raise Unsupported("a product of more axes than NumPy has letters for")
    return np.asarray(np.einsum(f"{one},{other}->{output}", left, right))


_USUAL = {"sharding": nothing}
_ARITHMETIC = {"out_dtype": nothing}
# What NumPy does as JAX does, which compiles a program for each operation and shape.
_SIMPLE: dict[str, Rule] = {
    "add": Rule(np.add, (), _ARITHMETIC, operands=2),
    "sub": Rule(np.subtract, (), _ARITHMETIC, operands=2),
    "mul": Rule(np.multiply, (), _ARITHMETIC, operands=2),
    "neg": Rule(np.negative, operands=1),
    "eq": Rule(np.equal, operands=2),
    "ne": Rule(np.not_equal, operands=2),
    "convert_element_type": Rule(
        _converted, ("new_dtype",), _USUAL | {"weak_type": anything}, operands=1
    ),
    "dot_general": Rule(
        _product,
        ("dimension_numbers", "preferred_element_type"),
        {"precision": anything, "out_sharding": nothing},
        operands=2,
    ),
    "broadcast_in_dim": Rule(_broadcast, ("shape", "broadcast_dimensions"), _USUAL, operands=1),
    "iota": Rule(_iota, ("dtype", "shape", "dimension"), _USUAL, operands=0),
    "reshape": Rule(
        lambda x, new_sizes, dimensions: _ordered(x, dimensions).reshape(new_sizes),
        ("new_sizes", "dimensions"),
        _USUAL,
        operands=1,
    ),
    "squeeze": Rule(lambda x, dimensions: x.squeeze(tuple(dimensions)), ("dimensions",)),
    "transpose": Rule(lambda x, permutation: x.transpose(permutation), ("permutation",)),
}


def _by_numpy(equation: JaxprEqn, operands: Sequence[Any]) -> np.ndarray | None:
    """The result of an equation, if NumPy has the same."""
    rule = _SIMPLE.get(equation.primitive.name)
    if rule is None or any(is_extended(jax.typeof(x).dtype) for x in operands):
        return None
    try:
        rule.check(equation)
        parameters = {key: equation.params[key] for key in rule.heeds}
        with np.errstate(all="ignore"):
            return np.asarray(rule.read(*map(np.asarray, operands), **parameters))
    except Unsupported:
        return None


def evaluated(equation: JaxprEqn, operands: Sequence[Any]) -> list[np.ndarray]:
    """The results of an equation of known operands; raises ``Unsupported``."""
    if not is_pure(equation):
        raise Unsupported(f"{equation.primitive.name} is not an operation of a kernel")
    own = [aval(x) for x in equation.outvars]
    if own and all(map(is_empty, own)):
        return [np.zeros(x.shape, x.dtype) for x in own]
    inner = inner_jaxpr(equation)
    if inner is not None:
        return interpreted(inner, operands, evaluated)
    found = _by_numpy(equation, operands)
    if found is not None:
        return [found]
    with jax.ensure_compile_time_eval():
        made = applied(equation, operands)
        return [x if is_extended(x.dtype) else np.asarray(x) for x in made]
