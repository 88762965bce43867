"""Jaxprs of scalars, such as the derivatives of pointwise functions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.jaxpr.calls import inner_jaxpr
from jaxmagma.jaxpr.equations import aval, interpreted
from jaxmagma.jaxpr.known import evaluated
from jaxmagma.jaxpr.pointwise import Emit, pointwise
from jaxmagma.programs.functions import ROUNDINGS
from jaxmagma.programs.precisions import is_narrower


# Of values that are all one dtype these change nothing.
_NO_CHANGE = {"convert_element_type", "broadcast_in_dim", "copy", "stop_gradient"}


def pointwise_rule(closed: ClosedJaxpr, dtype: np.dtype) -> Callable[..., Any]:
    """A jaxpr of scalars as a function ``(emit, operands, constant) -> value``.

    ``emit`` makes the value of a pointwise function, ``constant`` that of a known scalar; None is a
    result that is known to be zero.
    """

    def rule(emit: Emit, operands: Sequence[Any], constant: Callable[[np.ndarray], Any]) -> Any:
        def made(x: Any) -> Any:
            known = isinstance(x, float | np.ndarray | np.generic)
            return constant(np.asarray(x, dtype)) if known else x

        def emit_made(function: str, *values: Any) -> Any:
            return emit(function, *map(made, values))

        def scalar(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            inner = inner_jaxpr(equation)
            if all(isinstance(x, float | int | np.ndarray | np.generic) for x in inputs):
                return evaluated(equation, inputs)
            if (found := pointwise(equation, emit_made, inputs)) is not None:
                return [found]
            if inner is not None:
                return interpreted(inner, inputs, scalar)
            made = aval(equation.outvars[0]).dtype
            if is_narrower(made, dtype):  # a conversion, as that of a rounded number's tangent
                return [emit_made(ROUNDINGS[np.dtype(made)], inputs[0])]
            if equation.primitive.name in _NO_CHANGE:
                return inputs[:1]
            raise AssertionError(f"{equation.primitive.name} of scalars")

        (result,) = interpreted(closed, operands, scalar)
        if isinstance(result, float | int | np.ndarray | np.generic):
            return None if not np.any(result) else constant(np.asarray(result, dtype))
        return result

    return rule
