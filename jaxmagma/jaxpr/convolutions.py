"""Small convolutions: sums of shifted tiles, a term for each place of the kernel."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import Read, Tiles


# Places of a kernel; and values of it, for libraries are made for more features.
_MOST_PLACES = 32
_MOST_VALUES = 128


def convolution(reader: Tiles, equation: JaxprEqn, x: Read, kernel: Read) -> list[Read]:
    parameters, (made,) = equation.params, equation.outvars
    of_x, of_kernel, of_result = parameters["dimension_numbers"]
    sizes = [reader.shape(kernel)[axis] for axis in of_kernel[2:]]
    groups = parameters["feature_group_count"] * parameters.get("batch_group_count", 1)
    places, values = math.prod(sizes), math.prod(reader.shape(kernel))
    if groups > 1 or places > _MOST_PLACES or values > _MOST_VALUES:
        raise Unsupported(f"a convolution with {values} values at {places} places, {groups} groups")
    if reader.dtype != np.float32 and jax.default_backend() == "cpu":
        # XLA has loops for them there, and of float32 a library that is slow for small ones.
        raise Unsupported(f"a convolution of {reader.dtype}")
    counts = [aval(made).shape[axis] for axis in of_result[2:]]
    strides, apart = parameters["window_strides"], parameters["rhs_dilation"]
    pads = [(0, 0, 0)] * 2
    for (low, high), dilation in zip(
        parameters["padding"], parameters["lhs_dilation"], strict=True
    ):
        pads.append((low, high, dilation - 1))

    def shifted(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = jnp.transpose(x, of_x), jnp.transpose(kernel, of_kernel)  # features second
        x = lax.pad(x, jnp.zeros((), x.dtype), pads)
        total: jax.Array | None = None
        for at in np.ndindex(*sizes):
            first = [k * step for k, step in zip(at, apart, strict=True)]
            last = [
                begin + (count - 1) * stride + 1
                for begin, count, stride in zip(first, counts, strides, strict=True)
            ]
            window = lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *strides))
            term = jnp.einsum("nc...,oc->no...", window, kernel[(..., *at)])
            total = term if total is None else total + term
        assert total is not None
        return jnp.transpose(total, [of_result.index(axis) for axis in range(len(of_result))])

    structs = [jax.ShapeDtypeStruct(reader.shape(y), reader.dtype) for y in (x, kernel)]
    return reader.jaxpr(jax.make_jaxpr(shifted)(*structs), [x, kernel])
