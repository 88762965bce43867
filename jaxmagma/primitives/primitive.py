"""The one JAX primitive: applies a program to arrays.

Two layers.  ``program_p`` carries the calculus: JVP, transpose and batching each make another
program (see :mod:`jaxmagma.primitives.calculus`).  Its lowering asks the platform's backend for a
kernel.  Where it declines, there are several, if they can be found, or the program in plain JAX.
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

from jaxmagma import internals
from jaxmagma.lowering import lower
from jaxmagma.lowering.division import divide
from jaxmagma.lowering.kept import name_of
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.parts import ARGUMENT, Division
from jaxmagma.lowering.target import Target
from jaxmagma.primitives import ahead, assembly, calculus, partition
from jaxmagma.programs import reference
from jaxmagma.programs.fallback import is_symbolic
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram
from jaxmagma.programs.pruning import without_tables
from jaxmagma.programs.spelling import spell_batched, spelling_of


def apply(program: ElementProgram, *arguments: jax.Array) -> list[jax.Array]:
    """The outputs of ``program`` for arrays with the shapes of its arguments."""
    return program_p.bind(*internals.common_variance(arguments), program=program)


def assemble(
    values: jax.Array,
    index: jax.Array,
    tables: Sequence[jax.Array],
    axes: int,
    size: int,
    atomic: bool = False,
) -> jax.Array:
    """The vector of ``size`` entries, with ``axes`` batch axes, that element values add up to.

    The values have the shape ``(*batch, *index.shape, *components)``; what is outside of the vector
    is dropped.  Without the tables of the index a GPU sorts it, or, if ``atomic``, adds in any
    order, as plain JAX does where an extent is symbolic.
    """
    batch, components = values.shape[:axes], values.shape[axes + index.ndim :]
    if 0 in values.shape or size == 0:
        return jnp.zeros((*batch, size, *components), values.dtype)
    values, index = values.reshape(*batch, index.size, *components), index.reshape(-1)
    if not atomic and not is_symbolic(values.shape):
        return _assemble(values, index, tables, axes, size)
    return _each(axes, functools.partial(assembly.added, size=size))(values, index)


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
        dtypes = (dtype for _, dtype in program.stored_outputs)
        return list(map(jax.core.ShapedArray, shapes, dtypes))
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
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    extents = program.batch_extents([jnp.shape(x) for x in primals])
    shapes = [jnp.shape(x) for x in results]
    dots = _apply_derived(program, derived, [*primals, *tangents], shapes, extents)
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
        return [None] * len(arguments)
    whole = [x.aval.shape if ad.is_undefined_primal(x) else jnp.shape(x) for x in arguments]
    extents = program.batch_extents(whole)
    arrays = [*arguments, *cotangents]
    found = iter(_apply_derived(program, derived, arrays, shapes, extents))
    return [next(found) if is_linear else None for is_linear in linear]


ad.primitive_transposes[program_p] = _transpose


def _apply_derived(
    program: ElementProgram,
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
                value = _scatter(program, part.scattered, value, arrays, shape, extents)
            total = value if total is None else total + value
        results.append(total)
    return results


def _scatter(
    program: ElementProgram,
    where: calculus.Scattered,
    value: jax.Array,
    arrays: Sequence[Any],
    shape: tuple[int, ...],
    extents: Sequence[int],
) -> jax.Array:
    """The cotangent, of the given shape, of a gathered vector."""
    tile = value.shape[len(where.batch) :]
    value = jnp.broadcast_to(value, (*(extents[axis] for axis in where.batch), *tile))
    operands, mapped = [value], [where.mapped]
    for position in (where.index, *where.tables):
        own = program.arguments[position].batch
        first = [own.index(axis) for axis in where.mapped if axis in own]
        operands.append(jnp.moveaxis(arrays[position], first, range(len(first))))
        mapped.append(tuple(own[n] for n in first))
    axes, size = len(where.others), shape[len(where.own)]

    def add(value: jax.Array, index: jax.Array, *tables: jax.Array) -> jax.Array:
        return assemble(value, index, tables, axes, size, where.atomic)

    for axis in reversed(where.mapped):
        add = jax.vmap(add, [0 if axis in own else None for own in mapped])
    total, batch = add(*operands), where.mapped + where.others
    summed = tuple(n for n, axis in enumerate(batch) if axis not in where.own)
    left = [axis for axis in batch if axis in where.own]
    total = jnp.sum(total, summed) if summed else total
    return jnp.moveaxis(total, range(len(left)), [where.own.index(axis) for axis in left])


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
    astray = calculus.astray(program, [x is not None for x in positions])
    program, kept = without_tables(program, astray)
    batched, results = calculus.batch(program, [positions[n] for n in kept])
    if len(kept) == len(arguments) and all(x == 0 for x in results):
        spell_batched(batched, program, positions)
    return apply(batched, *(moved[n] for n in kept)), list(results)


batching.primitive_batchers[program_p] = _batch


# ---- Assembly --------------------------------------------------------------------------------
# A few programs, one after the other, that each read a part of the values.  Their transposes would
# each write all of them, most as zeros, for somebody to add up; together they are one gather.


def _assemble(
    values: jax.Array, index: jax.Array, tables: Sequence[jax.Array], axes: int, size: int
) -> jax.Array:
    """The same of values with one axis for all elements: ``(*batch, index.size, ...)``."""
    operands = internals.common_variance([values, index, *tables])
    avals = tuple(jax.typeof(x) for x in operands)
    programs = _programs(axes, size, avals, jax.sharding.get_abstract_mesh())
    return assemble_p.bind(*operands, programs=programs, axes=axes, size=size)


@functools.lru_cache(maxsize=4096)
def _programs(axes: int, size: int, avals: tuple[Any, ...], mesh: Any) -> Any:
    """The jaxpr of an assembly: all of its programs, each applied to what it reads."""
    function = _sum_by_tables if len(avals) > 2 else _sum_without_tables
    return jax.make_jaxpr(functools.partial(function, axes, size))(*avals)


def _sum_by_tables(
    axes: int, size: int, values: jax.Array, index: jax.Array, *tables: jax.Array
) -> jax.Array:
    rest = values
    for table in tables[:-2]:
        rest = _summed([(rest, table)], axes)
    vectors = [values] if len(tables) == 1 else [values, rest]
    total = _summed(list(zip(vectors, tables[-2:], strict=True)), axes)
    # The tables may be for a longer vector, or for one that ends with the last index.
    total = jax.lax.slice_in_dim(total, 0, min(size, total.shape[axes]), axis=axes)
    missing = size - total.shape[axes]
    return jnp.pad(total, [(0, missing if n == axes else 0) for n in range(total.ndim)])


def _summed(terms: Sequence[tuple[jax.Array, jax.Array]], axes: int) -> jax.Array:
    """The sum over vectors, each with a table, of what the table's rows gather."""
    widths = tuple(table.shape[1:] for _, table in terms)
    tiles = tuple(vector.shape[axes:] for vector, _ in terms)
    program = assembly.summing(widths, tiles, axes, np.dtype(terms[0][0].dtype))
    (total,) = apply(program, *(x for term in terms for x in term))
    return total


def _sum_without_tables(axes: int, size: int, values: jax.Array, index: jax.Array) -> jax.Array:
    return _each(axes, functools.partial(assembly.sorted_sum, size=size))(values, index)


def _each(axes: int, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of values and their index, for values with batch axes of their own."""
    for _ in range(axes):
        function = jax.vmap(function, (0, None))
    return function


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
    cotangent: Any, values: Any, index: Any, *tables: Any, axes: int, **parameters: Any
) -> list[Any]:
    none = [None] * (1 + len(tables))
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(values.aval), *none]
    shapes = tuple(x.shape for x in tables)
    tile, dtype = cotangent.shape[axes:], np.dtype(cotangent.dtype)
    program = assembly.gathering(tile, shapes, axes, dtype)
    return [*apply(program, cotangent, index, *tables), *none]


def _assemble_batch(
    arguments: Sequence[Any],
    dims: Sequence[Any],
    *,
    axes: int,
    size: int,
    **parameters: Any,
) -> tuple[Any, int | None]:
    (values, index, *tables), (dim, *others) = arguments, dims
    if all(x is None for x in others):
        if dim > axes:
            values, dim = jnp.moveaxis(values, dim, 0), 0
        return _assemble(values, index, tables, axes + 1, size), dim
    # Several indices are one, of a vector that is as many times as long.
    (several,) = {x.shape[d] for x, d in zip(arguments, dims, strict=True) if d is not None}
    if None in others:
        tables = []  # they do not follow the index, which counts
    whole = [_with_axis(x, d, 0, several) for x, d in zip([index, *tables], others, strict=False)]
    values = _with_axis(values, dim, axes, several)
    index, *tables = assembly.of_several(*whole, size=size)
    values = values.reshape(*values.shape[:axes], index.size, *values.shape[axes + 2 :])
    total = _assemble(values, index, tables, axes, several * size)
    return total.reshape(*total.shape[:axes], several, size, *total.shape[axes + 1 :]), axes


def _with_axis(x: jax.Array, dim: int | None, axis: int, count: int) -> jax.Array:
    """An array with its mapped axis there, or with so many copies of it."""
    if dim is not None:
        return jnp.moveaxis(x, dim, axis)
    shape = (*x.shape[:axis], count, *x.shape[axis:])
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


def _assemble_programs(*arguments: Any, programs: Any, **parameters: Any) -> Any:
    (total,) = jaxpr_as_fun(programs)(*arguments)
    return total


assemble_p.def_abstract_eval(_assemble_abstractly)
ad.primitive_jvps[assemble_p] = _assemble_jvp
ad.primitive_transposes[assemble_p] = _assemble_transpose
batching.primitive_batchers[assemble_p] = _assemble_batch


def _assemble_in_order(
    values: jax.Array, index: jax.Array, *tables: jax.Array, axes: int, size: int, programs: Any
) -> jax.Array:
    # A CPU adds one value after another, as the elements have them: tables would be more to read.
    return _each(axes, functools.partial(assembly.added, size=size))(values, index)


mlir.register_lowering(assemble_p, mlir.lower_fun(_assemble_programs, multiple_results=False))
mlir.register_lowering(
    assemble_p, mlir.lower_fun(_assemble_in_order, multiple_results=False), platform="cpu"
)
internals.lowers_with_devices(assemble_p)


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
        if partition.needs_partitioning(ctx) and internals.is_exported(ctx):
            # How devices share the elements is known to this process alone.
            return _plain(ctx, *operands, program=program)
        spelling, spelled = spelling_of(program), (ctx, *operands)
        program, kept = normal_form(program)
        operands = tuple(operands[n] for n in kept)
        ctx = ctx.replace(avals_in=[ctx.avals_in[n] for n in kept])
        extents = program.batch_extents(_shapes(ctx.avals_in))
        kernel = lower(program, extents, platform)
        if isinstance(kernel, Declined):
            division = divide(program, extents, platform)
            one_shard = not partition.needs_partitioning(ctx)
            if division is None and spelling is not None and one_shard and platform == "cpu":
                return partition.lower_without_mesh(spelling, multiple_results=True)(*spelled)
            if division is None:
                return _plain(ctx, *operands, program=program)
            in_parts = functools.partial(_in_parts, division)
            return partition.lower_without_mesh(in_parts, multiple_results=True)(ctx, *operands)
        if partition.needs_partitioning(ctx):
            target = Target.here(platform)
            name = name_of(program, extents, target, kernel.choice, "partitioned")
            function = partition.named(name, functools.partial(_partitioned_kernel, program))
            return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
        return _call(kernel, platform, ctx, operands)

    return rule


def _call(
    kernel: Kernel, platform: str, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """The results of a kernel on one device."""
    ahead.begin(kernel, platform)
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
        return _call(kernel, platform, ctx, operands)

    return rule


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(program_p, _lower_program(_platform), platform=_platform)
    mlir.register_lowering(kernel_p, _lower_kernel(_platform), platform=_platform)
mlir.register_lowering(program_p, _plain)
mlir.register_lowering(kernel_p, _plain)
internals.lowers_with_devices(program_p)
internals.checks_as(
    program_p,
    lambda program: len(program.arguments),
    lambda program: functools.partial(reference.evaluate, program),
)
