"""The one JAX primitive: applies a program to arrays.

Two layers.  ``program_p`` carries the calculus: JVP, transpose and batching each make another
program (see :mod:`jaxmagma.calculus`).  Its lowering asks the platform's backend for a kernel.
Where it declines, there are several, if they can be found, or the program in plain JAX.
``kernel_p`` stands for a kernel on one device, below the partitioning; nothing differentiates or
batches it.  ``assemble_p`` stands for a few programs that have one transpose together.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla

from jaxmagma import assembly, calculus, partition, reference
from jaxmagma.lowering import lower
from jaxmagma.lowering.division import divide
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.parts import ARGUMENT, Division
from jaxmagma.memo import remembered
from jaxmagma.program import Constant, ElementProgram


def apply(program: ElementProgram, *arguments: jax.Array) -> list[jax.Array]:
    """The outputs of ``program`` for arrays with the shapes of its arguments."""
    return program_p.bind(*partition.common_variance(arguments), program=program)


def assemble(values: jax.Array, places: Constant, axes: int, shape: tuple[int, ...]) -> jax.Array:
    """The vector of the given shape, with ``axes`` batch axes, that element values add up to."""
    batch, (size, *components) = shape[:axes], shape[axes:]
    values = jnp.broadcast_to(values, (*batch, *places.array.shape, *components))
    if 0 in values.shape or 0 in shape:
        return jnp.zeros(shape, values.dtype)
    return _assemble(values.reshape(*batch, places.array.size, *components), places, axes, size)


program_p = Primitive("element_program")
program_p.multiple_results = True
program_p.def_impl(functools.partial(xla.apply_primitive, program_p))

assemble_p = Primitive("assemble")
assemble_p.def_impl(functools.partial(xla.apply_primitive, assemble_p))

kernel_p = Primitive("element_kernel")
kernel_p.multiple_results = True


# ---- Shapes ----------------------------------------------------------------------------------
# What plain JAX says of the same computation, which gets shardings and device variance right.


@remembered
def _abstract(program: ElementProgram, avals: tuple[Any, ...], mesh: Any) -> list[Any]:
    return list(jax.make_jaxpr(functools.partial(reference.evaluate, program))(*avals).out_avals)


def _abstract_eval(*avals: Any, program: ElementProgram) -> list[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # they are nothing but shapes, which are known sooner
        shapes = program.output_shapes(program.batch_extents(_shapes(avals)))
        return [jax.core.ShapedArray(shape, program.dtype) for shape in shapes]
    return _abstract(program, avals, mesh)


program_p.def_abstract_eval(_abstract_eval)
kernel_p.def_abstract_eval(_abstract_eval)


# ---- Calculus --------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: ElementProgram
) -> tuple[list[Any], list[Any]]:
    results = program_p.bind(*primals, program=program)
    active = [not isinstance(t, ad.Zero) for t in tangents]
    derived = calculus.jvp(program, active)
    if derived is None:
        whole = [ad.instantiate_zeros(t) for t in tangents]
        function = functools.partial(reference.evaluate, program)
        _, dots = jax.jvp(lambda *xs: tuple(function(*xs)), tuple(primals), tuple(whole))
        return results, list(dots)
    extents = program.batch_extents([jnp.shape(x) for x in primals])
    shapes = [jnp.shape(x) for x in results]
    dots = _apply_derived(derived, [*primals, *tangents], shapes, extents)
    return results, [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if dot is None else dot
        for x, dot in zip(results, dots, strict=True)
    ]


ad.primitive_jvps[program_p] = _jvp


def _transpose(
    cotangents: Sequence[Any], *arguments: Any, program: ElementProgram
) -> list[Any | None]:
    linear = [ad.is_undefined_primal(x) for x in arguments]
    present = [not isinstance(ct, ad.Zero) for ct in cotangents]
    shapes = [x.aval.shape for x in arguments if ad.is_undefined_primal(x)]
    derived = calculus.transpose(program, linear, present)
    if derived is None:
        found = iter(_transpose_plainly(program, arguments, cotangents))
    else:
        whole = [x.aval.shape if ad.is_undefined_primal(x) else jnp.shape(x) for x in arguments]
        extents = program.batch_extents(whole)
        found = iter(_apply_derived(derived, [*arguments, *cotangents], shapes, extents))
    return [next(found) if is_linear else None for is_linear in linear]


ad.primitive_transposes[program_p] = _transpose


def _transpose_plainly(
    program: ElementProgram, arguments: Sequence[Any], cotangents: Sequence[Any]
) -> Sequence[Any]:
    linear = [n for n, x in enumerate(arguments) if ad.is_undefined_primal(x)]

    def function(*values: Any) -> tuple[jax.Array, ...]:
        whole = list(arguments)
        for n, value in zip(linear, values, strict=True):
            whole[n] = value
        return tuple(reference.evaluate(program, *whole))

    transposed = jax.linear_transpose(function, *(arguments[n].aval for n in linear))
    return transposed(tuple(ad.instantiate_zeros(ct) for ct in cotangents))


def _apply_derived(
    derived: calculus.Derived,
    arrays: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    extents: Sequence[int],
) -> list[Any | None]:
    """Applies a derived program, and broadcasts or counts along batch axes it no longer has."""
    values = apply(derived.program, *(arrays[n] for n in derived.arguments))
    results: list[Any | None] = []
    for parts, shape in zip(derived.results, shapes, strict=True):
        total = None
        for part in parts:
            value, lost = values[part.position], derived.lost[part.position]
            if lost:
                value = jnp.expand_dims(value, lost)
            if part.times:
                value = value * math.prod(extents[axis] for axis in part.times)
            if part.scattered is None:
                value = value if value.shape == shape else jnp.broadcast_to(value, shape)
            else:
                value = assemble(value, part.scattered.places, part.scattered.axes, shape)
            total = value if total is None else total + value
        results.append(total)
    return results


def _batch(
    arguments: Sequence[Any], dims: Sequence[int | None], *, program: ElementProgram
) -> tuple[list[Any], list[int | None]]:
    # A mapped axis among an operand's batch axes stays where it is; one inside the tile moves out.
    moved: list[Any] = []
    positions: list[int | None] = []
    for x, dim, operand in zip(arguments, dims, program.arguments, strict=True):
        if dim is None:
            positions.append(None)
        elif dim <= len(operand.batch):
            positions.append(dim)
        else:
            x, dim = jnp.moveaxis(x, dim, 0), 0
            positions.append(0)
        moved.append(x)
    batched, results = calculus.batch(program, positions)
    return apply(batched, *moved), list(results)


batching.primitive_batchers[program_p] = _batch


# ---- Assembly --------------------------------------------------------------------------------
# A few programs, one after the other, that each read a part of the values.  Their transposes would
# each write all of them, most as zeros, for somebody to add up; together they are one gather.


def _assemble(values: jax.Array, places: Constant, axes: int, size: int) -> jax.Array:
    """The same of values with one axis for all elements: ``(*batch, places.array.size, ...)``."""
    indices = [table.index for table in assembly.assembly(places, size).tables]
    operands = partition.common_variance([values, *indices])
    avals = tuple(jax.typeof(x) for x in operands)
    programs = _programs(places, axes, size, avals, jax.sharding.get_abstract_mesh())
    return assemble_p.bind(*operands, programs=programs, places=places, axes=axes, size=size)


@functools.lru_cache(maxsize=4096)
def _programs(places: Constant, axes: int, size: int, avals: tuple[Any, ...], mesh: Any) -> Any:
    """The jaxpr of an assembly: all of its programs, each applied to what it reads."""
    made = assembly.assembly(places, size)

    def add(values: jax.Array, *indices: jax.Array) -> jax.Array:
        reading = list(zip(made.tables, indices, strict=True))
        rest = values
        for table, index in reading[: len(made.partial)]:
            rest = _gathered_sum([(rest, table, index)], axes)
        vectors = [values] if made.link is None else [values, rest]
        last = zip(vectors, reading[len(made.partial) :], strict=True)
        return _gathered_sum([(vector, *read) for vector, read in last], axes)

    return jax.make_jaxpr(add)(*avals)


def _gathered_sum(
    terms: Sequence[tuple[jax.Array, assembly.Table, jax.Array]], axes: int
) -> jax.Array:
    """The sum over vectors, each with a table and its index, of what the table's rows gather."""
    program = assembly.program(
        tuple(table.places for _, table, _ in terms),
        tuple(vector.shape[axes:] for vector, _, _ in terms),
        axes,
        np.dtype(terms[0][0].dtype),
    )
    (total,) = apply(program, *(x for vector, _, index in terms for x in (vector, index)))
    return total


def _assemble_abstractly(*avals: Any, programs: Any, **parameters: Any) -> Any:
    return programs.out_avals[0]


def _assemble_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any
) -> tuple[Any, Any]:
    total = assemble_p.bind(*primals, **parameters)
    if isinstance(tangents[0], ad.Zero):
        return total, ad.Zero(jax.typeof(total).to_tangent_aval())
    return total, assemble_p.bind(tangents[0], *primals[1:], **parameters)


def _assemble_transpose(
    cotangent: Any, values: Any, *indices: Any, places: Constant, axes: int, **parameters: Any
) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(values.aval), *(None for _ in indices)]
    table = assembly.flat(places)
    return [_gathered_sum([(cotangent, table, table.index)], axes), *(None for _ in indices)]


def _assemble_batch(
    arguments: Sequence[Any],
    dims: Sequence[int | None],
    *,
    places: Constant,
    axes: int,
    size: int,
    **parameters: Any,
) -> tuple[Any, int | None]:
    # The indices are what they are for every vector, even where a branch has made copies of them.
    values, dim = arguments[0], dims[0]
    if dim is None:
        return _assemble(values, places, axes, size), None
    if dim > axes:
        values, dim = jnp.moveaxis(values, dim, 0), 0
    return _assemble(values, places, axes + 1, size), dim


def _assemble_programs(*arguments: Any, programs: Any, **parameters: Any) -> Any:
    (total,) = jaxpr_as_fun(programs)(*arguments)
    return total


assemble_p.def_abstract_eval(_assemble_abstractly)
ad.primitive_jvps[assemble_p] = _assemble_jvp
ad.primitive_transposes[assemble_p] = _assemble_transpose
batching.primitive_batchers[assemble_p] = _assemble_batch
mlir.register_lowering(assemble_p, mlir.lower_fun(_assemble_programs, multiple_results=False))
partition.lowers_with_devices(assemble_p)


# ---- Lowering --------------------------------------------------------------------------------


def _plain(ctx: mlir.LoweringRuleContext, *operands: Any, program: ElementProgram) -> Any:
    function = functools.partial(reference.evaluate, program)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _in_parts(division: Division, *arguments: Any) -> list[Any]:
    """The outputs of a program, by programs that are parts of it."""
    made: list[list[Any]] = []
    for part in division.parts:
        operands = (arguments[n] if k == ARGUMENT else made[k][n] for k, n in part.arguments)
        made.append(apply(part.program, *operands))
    terms = ([made[k][n] for k, n in sources] for sources in division.results)
    return [functools.reduce(operator.add, x) for x in terms]


def _shapes(avals: Sequence[Any]) -> list[tuple[int, ...]]:
    return [x.shape for x in avals]


def _kernel(program: ElementProgram, *arguments: jax.Array) -> list[jax.Array]:
    return kernel_p.bind(*arguments, program=program)


_partitioned_kernel = partition.partitioned(_kernel)


def _lower_program(platform: str) -> Callable[..., Any]:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, program: ElementProgram) -> Any:
        extents = program.batch_extents(_shapes(ctx.avals_in))
        kernel = lower(program, extents, platform)
        if isinstance(kernel, Declined):
            division = divide(program, extents, platform)
            if division is None:
                return _plain(ctx, *operands, program=program)
            in_parts = functools.partial(_in_parts, division)
            return partition.lower_without_mesh(in_parts, multiple_results=True)(ctx, *operands)
        if partition.needs_partitioning(ctx):
            function = functools.partial(_partitioned_kernel, program)
            return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
        return _call(kernel, ctx, operands)

    return rule


def _call(kernel: Kernel, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """The results of a kernel on one device."""
    scratch = [jax.core.ShapedArray(shape, dtype) for shape, dtype in kernel.workspace]
    call = jax.ffi.ffi_lowering(kernel.target)
    with_scratch = ctx.replace(avals_out=[*ctx.avals_out, *scratch])
    return call(with_scratch, *operands, **kernel.attributes)[: len(ctx.avals_out)]


def _lower_kernel(platform: str) -> Callable[..., Any]:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, program: ElementProgram) -> Any:
        extents = program.batch_extents(_shapes(ctx.avals_in))
        kernel = lower(program, extents, platform)
        if isinstance(kernel, Declined):
            # The whole batch gained from a kernel, but this device's share is too small for one.
            function = functools.partial(reference.evaluate, program)
            return partition.lower_without_mesh(function, multiple_results=True)(ctx, *operands)
        return _call(kernel, ctx, operands)

    return rule


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(program_p, _lower_program(_platform), platform=_platform)
    mlir.register_lowering(kernel_p, _lower_kernel(_platform), platform=_platform)
mlir.register_lowering(program_p, _plain)
mlir.register_lowering(kernel_p, _plain)
partition.lowers_with_devices(program_p)
