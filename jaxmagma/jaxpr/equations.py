"""What an equation of a jaxpr is, and which of them a rule reads.

A rule that reads an equation *heeds* some of its parameters, and *knows* of others which values
change nothing.  An equation that has anything else, in this release of JAX or in the next, is
unsupported: plain JAX computes it.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmagma.internals import common_variance, varying


class Unsupported(Exception):
    """Why an equation is no operation of a program."""


class LongLoop(Unsupported):
    """A loop of which a program has some steps, and not all."""


@dataclass(frozen=True)
class Rule:
    """How equations are read, and which ones.

    ``read`` goes by the parameters that it ``heeds``, all of which an equation has.  ``knows`` says
    which values it knows of those of which there may come more, and of parameters that change
    nothing; other parameters an equation has not.
    ``truth`` says that truth values may be taken as the numbers 0 and 1, ``operands`` how many
    there are, if it is always as many.
    """

    read: Callable[..., Any]
    heeds: tuple[str, ...] = ()
    knows: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    operands: int | None = None
    truth: bool = True

    def check(self, equation: JaxprEqn) -> None:
        """Raises ``Unsupported`` for an equation that is not of this kind."""
        name, parameters = equation.primitive.name, equation.params
        for key, value in parameters.items():
            known = self.knows.get(key)
            if not (key in self.heeds if known is None else known(value)):
                raise Unsupported(f"{name} with {key}={reprlib.repr(value)}")
        for key in self.heeds:
            if key not in parameters:
                raise Unsupported(f"{name} without {key}")
        if self.operands is not None and len(equation.invars) != self.operands:
            raise Unsupported(f"{name} of {len(equation.invars)} operands")
        if not self.truth and any(aval(x).dtype == bool for x in equation.invars):
            raise Unsupported(f"{name} of truth values")


def anything(value: Any) -> bool:
    return True


def nothing(value: Any) -> bool:
    return value is None


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is x or value == x for x in values)


def aval(variable: Any) -> Any:
    """The shape and dtype of a variable of a jaxpr."""
    return variable.aval


def is_empty(own: Any) -> bool:
    """Whether an array has no values: then it is known."""
    return 0 in own.shape and not is_extended(own.dtype)


def is_extended(dtype: Any) -> bool:
    """Whether it is a dtype of JAX's own, such as that of random keys, unknown to NumPy."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def interpreted(
    closed: ClosedJaxpr,
    arguments: Sequence[Any],
    equation_rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of a jaxpr, whose equations ``equation_rule`` evaluates."""
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        if not isinstance(x, Literal):
            return known[x]
        return x.val if hasattr(x.val, "dtype") else np.asarray(x.val, aval(x).dtype)

    for equation in closed.jaxpr.eqns:
        results = equation_rule(equation, [read(x) for x in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in closed.jaxpr.outvars]


def inside(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the jaxprs among an equation's parameters."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            yield from getattr(inner, "eqns", ())


def nested(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr, or inside of an equation, those inside of others too."""
    for equation in jaxpr.eqns if hasattr(jaxpr, "eqns") else inside(jaxpr):
        yield equation
        yield from nested(equation)


def applied(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, by plain JAX."""
    if equation.primitive.name == "clamp":
        # Its derivative by a bound that is a scalar fails under vmap.
        shape = aval(equation.outvars[0]).shape
        low, x, high = (jnp.broadcast_to(x, shape) for x in operands)
        # So does a number that all elements share, between bounds that they do not.
        operands = [low, jax.lax.select_n(jnp.zeros(shape, np.int32), x, low, high), high]
    if equation.primitive.name == "pad" and is_empty(aval(equation.invars[0])):
        # Of an array that has no tangent, its derivative by what is around that fails.
        return [jnp.broadcast_to(operands[1], aval(equation.outvars[0]).shape)]
    parameters = equation.params
    if any(map(_has_jaxprs, parameters.values())):
        mesh = next((x for x in map(_explicit_mesh, operands) if x is not None), None)
        if mesh is not None:
            parameters = {key: _on_mesh(value, mesh) for key, value in parameters.items()}
    else:
        operands = common_variance(operands)
    bound = equation.primitive.get_bind_params(parameters)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    made = equation.primitive.bind(*functions, *operands, **parameters)
    return list(made) if equation.primitive.multiple_results else [made]


def plainly(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, by plain JAX."""
    if any(varying(x) or _explicit_mesh(x) is not None for x in operands):
        return interpreted(closed, operands, applied)
    return list(jaxpr_as_fun(closed)(*operands))


def _has_jaxprs(parameter: Any) -> bool:
    several = parameter if isinstance(parameter, tuple) else [parameter]
    return any(isinstance(x, ClosedJaxpr) for x in several)


def _explicit_mesh(x: Any) -> Any:
    """The mesh whose axes are in the type of an array; None if there are none."""
    if not isinstance(x, jax.Array):
        return None
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def _on_mesh(parameter: Any, mesh: Any) -> Any:
    """A parameter whose jaxprs are of values on a mesh, as those of a loop under ``vmap`` are.

    The function of an element was traced without one, of which no operation of a program tells.
    """
    if isinstance(parameter, ClosedJaxpr):
        replicated = NamedSharding(mesh, PartitionSpec())
        structs = [
            x
            if is_extended(x.dtype)
            else jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=replicated)
            for x in parameter.in_avals
        ]
        return jax.make_jaxpr(lambda *xs: interpreted(parameter, xs, applied))(*structs)
    if _has_jaxprs(parameter):
        parts = [_on_mesh(x, mesh) for x in parameter]
        return type(parameter)(*parts) if hasattr(parameter, "_fields") else tuple(parts)
    return parameter
