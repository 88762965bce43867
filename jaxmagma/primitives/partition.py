"""Sharding of programs.

A program is independent along its batch axes, so XLA may cut them as it likes: each device runs the
same kernel on its own elements, and only outputs that sum over a cut axis are added across devices.
The rule that tells XLA so is read off the program.

``custom_partitioning`` wants to be told three times: the sharding rule (what may be cut), the
shardings it ends up with, and the function to run on one shard, which must itself add over the
devices that share a sum.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxmagma.programs.program import ElementProgram


def needs_partitioning(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA, not the user, splits the arrays of the computation being lowered.

    Inside ``shard_map`` arrays are one shard already.  With some axes manual and others not,
    partitioned calls abort XLA; the plain call is right there too, and gathers the other axes.
    """
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext) and axes.manual_axes:
        return False
    return getattr(axes, "num_devices", 1) != 1


def sharding_rule(program: ElementProgram) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The program's rule in Shardy's notation: batch axes may be cut, tiles may not."""
    tile_factors: list[str] = []

    def dimensions(batch: Sequence[int], tile: Sequence[int]) -> str:
        factors = [f"b{axis}" for axis in batch]
        for _ in tile:
            tile_factors.append(f"t{len(tile_factors)}")
            factors.append(tile_factors[-1])
        return " ".join(factors)

    operands = [dimensions(x.batch, x.stored[0]) for x in program.arguments]
    outputs = zip(program.outputs, program.stored_outputs, strict=True)
    results = [dimensions(out.batch, shape) for out, (shape, _) in outputs]
    # A factor that some outputs keep and others sum over is none of Shardy's reductions; the sum
    # over devices is ours either way.
    kept = {axis for out in program.outputs for axis in out.batch}
    summed = [f"b{axis}" for axis in range(program.batch_rank) if axis not in kept]
    factors: dict[str, tuple[str, ...]] = {}
    if summed:
        factors["reduction_factors"] = tuple(summed)
    if tile_factors:
        factors["need_replication_factors"] = tuple(tile_factors)
    return ", ".join(operands) + " -> " + ", ".join(results), factors


def partitioned(
    kernel: Callable[..., Sequence[jax.Array]],
) -> Callable[..., Sequence[jax.Array]]:
    """``kernel(program, *arguments)`` as a call that XLA may split along the batch axes."""

    @functools.partial(custom_partitioning, static_argnums=(0,))
    def call(program: ElementProgram, *arguments: Any) -> tuple[Any, ...]:
        return tuple(kernel(program, *arguments))

    def rule(
        program: ElementProgram, mesh: Any, operands: Any, results: Any
    ) -> tuple[str, dict[str, Any]]:
        return sharding_rule(program)

    def partition(
        program: ElementProgram, mesh: Any, arguments: Any, results: Any
    ) -> tuple[Any, Any, Any, Any]:
        cut = _cut_axes(program, [x.sharding for x in arguments])
        shardings = [getattr(x, "sharding", None) for x in arguments]
        named = next((s for s in shardings if isinstance(s, NamedSharding)), None)
        if named is None:
            # Without a mesh to speak of, everything is replicated.
            whole = [_replicated(s) for s in shardings]
            outs = tuple(whole[0] for _ in program.outputs)
            return mesh, functools.partial(_run, kernel, program, {}), outs, tuple(whole)

        def spec(batch: Sequence[int]) -> NamedSharding:
            return NamedSharding(named.mesh, PartitionSpec(*(cut.get(axis) for axis in batch)))

        argument_shardings = tuple(spec(x.batch) for x in program.arguments)
        result_shardings = tuple(spec(out.batch) for out in program.outputs)
        shard = functools.partial(_run, kernel, program, cut)
        return mesh, shard, result_shardings, argument_shardings

    call.def_partition(partition=partition, sharding_rule=rule)
    return call


def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A partitioned call with a name for what it computes.

    Until XLA cuts it, its only other name is an address.  Another program may have that later, or
    in another process, and JAX's persistent cache would take the executable of one for the other's.
    """

    def function(*arguments: Any) -> Any:
        with set_xla_metadata(jaxmagma=name):
            return call(*arguments)

    return function


def _cut_axes(program: ElementProgram, shardings: Sequence[Any]) -> dict[int, Any]:
    """Which mesh axes cut each batch axis; no mesh axis is used twice."""
    cut: dict[int, Any] = {}
    used: set[str] = set()
    for operand, sharding in zip(program.arguments, shardings, strict=True):
        if not isinstance(sharding, NamedSharding):
            continue
        for axis, names in zip(operand.batch, sharding.spec, strict=False):
            group = _group(names)
            if group and axis not in cut and not used & set(group):
                cut[axis] = names
                used |= set(group)
    return cut


def _group(names: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return names if isinstance(names, tuple) else (names,) if names else ()


def _replicated(sharding: Any) -> Any:
    """A replicated sharding of the same kind; some callbacks get shardings without a mesh."""
    return type(sharding).get_replicated(sharding._device_assignment)


def _run(
    kernel: Callable[..., Sequence[jax.Array]],
    program: ElementProgram,
    cut: dict[int, Any],
    *shards: jax.Array,
) -> tuple[jax.Array, ...]:
    """One device's part: its own elements, and the sums over the elements of all devices."""
    results = []
    for out, result in zip(program.outputs, kernel(program, *shards), strict=True):
        summed = program.batch[out.value] - set(out.batch)
        names = tuple(name for axis in sorted(summed) for name in _group(cut.get(axis)))
        results.append(_sum_p.bind(result, names=names) if names else result)
    return tuple(results)


_sum_p = Primitive("jaxmagma_sum_over_devices")
_sum_p.def_abstract_eval(lambda x, *, names: jax.core.ShapedArray(x.shape, x.dtype))


def lower_without_mesh(function: Callable[..., Any], multiple_results: bool) -> Callable[..., Any]:
    """A lowering rule for code that does not see the ambient mesh, if that is an explicit one.

    Into code that runs on one device's shard JAX would put sharding constraints, even into the
    reducer of a sum over devices, and XLA implements neither. Of code for all devices it would ask
    how every intermediate is sharded.
    """
    rule = mlir.lower_fun(function, multiple_results=multiple_results)

    def lowering(ctx: mlir.LoweringRuleContext, *operands: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return rule(ctx.replace(avals_in=[_local(x) for x in ctx.avals_in]), *operands)

    return lowering


def _local(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _lower_sum(ctx: mlir.LoweringRuleContext, x: Any, *, names: tuple[str, ...]) -> Any:
    sum_over_devices = functools.partial(jax.lax.psum, axis_name=names)
    return lower_without_mesh(sum_over_devices, multiple_results=False)(ctx, x)


mlir.register_lowering(_sum_p, _lower_sum)
