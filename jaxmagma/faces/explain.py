"""``jm.explain``: what would run, and why."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.choices import MODEL, Choice
from jaxmagma.faces.roofline import roofline
from jaxmagma.frontends.einsum import einsum
from jaxmagma.jaxpr import nested
from jaxmagma.lowering import lower, planned, plans
from jaxmagma.lowering.division import divide
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.parts import Division, Source
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange, plan
from jaxmagma.primitives.primitive import program_p
from jaxmagma.programs.fallback import plain_calls
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram, View


# Why there is nothing to explain of a function, or to tune.
NOTHING = "it calls neither jm.einsum nor jm.fuse, or they compute nothing"


@dataclass(frozen=True)
class Explanation:
    """What would run for one contraction.

    Attributes:
      platform: the device's platform.
      reason: why plain JAX computes it; None if native kernels do.
      kernel: the kernel in words, or each of several; empty if there is none.
      elements: how often the program is repeated.
      order: the steps, in the order in which they are done.
      summary: the same with long runs of operations at the points folded to their counts, which is
        what ``print`` shows.
      tiles: the shape of every tile: operands first, then the result of every step.
      flops: floating-point operations, all elements together; a complex one counts as four.
      least_bytes: memory traffic if every operand is read and every result written once.
      roofline_seconds: the least time for those on this device, by ceilings measured on it.
      choice: the parameters of the kernel, and where they are from: the model, the user's cache
        that ``jm.tune`` writes, or the table that the package ships.
      source: the source text of the kernel, where a kernel is compiled for this program.
      program: the program, None if there is none.
      parts: one for each kernel of a program that is too large for one, in the order in which they
        run; its own steps, tiles, flops and source text are those of all of them.
      divided: why there are several kernels; None if there are not.
      moved_bytes: memory traffic if every kernel reads each of its operands and writes each of its
        results once: ``least_bytes``, and what goes from kernel to kernel.
      between: the arrays that go from kernel to kernel, in words.
    """

    platform: str
    reason: str | None
    kernel: str = ""
    elements: int = 0
    order: tuple[str, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    least_bytes: int = 0
    roofline_seconds: float = 0.0
    choice: str = ""
    source: str = field(default="", repr=False)
    program: ElementProgram | None = field(default=None, repr=False)
    parts: tuple["Explanation", ...] = ()
    divided: str | None = None
    moved_bytes: int = 0
    between: tuple[str, ...] = ()
    summary: tuple[str, ...] = field(default=(), repr=False)

    @property
    def fused(self) -> bool:
        """Whether native kernels compute it."""
        return self.reason is None

    def __str__(self) -> str:
        if self.program is None:
            return f"plain JAX on {self.platform}: {self.reason}"
        lines = self._several() if self.parts else self._one()
        per_element = self.flops // max(self.elements, 1)
        lines += [
            f"  {self.flops:.4g} flops ({per_element:,} per element), "
            f"{self.least_bytes:.4g} bytes at least",
            f"  {self.roofline_seconds * 1e3:.4g} ms at this device's roofline",
        ]
        return "\n".join(lines)

    def _one(self) -> list[str]:
        runs = f"one kernel: {self.kernel}" if self.fused else f"plain JAX: {self.reason}"
        lines = [f"on {self.platform}, {runs}", f"  {self.choice}"]
        lines += [f"  {self.elements:,} elements; each one"]
        return lines + [f"    {step}" for step in self.summary]

    def _several(self) -> list[str]:
        lines = [f"on {self.platform}, {len(self.parts)} kernels: {self.divided}"]
        lines += [f"  {self.elements:,} elements; each one"]
        for number, part in enumerate(self.parts, start=1):
            runs = part.kernel if part.fused else f"plain JAX: {part.reason}"
            lines += [f"  {number}. {runs}", f"    {part.choice}"]
            lines += [f"    {step}" for step in part.summary]
        lines += [f"  {x}" for x in self.between]
        return [*lines, f"  {self.moved_bytes:.4g} bytes for all kernels"]


@overload
def explain(
    target: str,
    /,
    *args: Any,
    source: bool = ...,
    every_step: bool = ...,
    quiet: bool = ...,
    **options: Any,
) -> Explanation: ...
@overload
def explain(
    target: Callable[..., Any],
    /,
    *args: Any,
    source: bool = ...,
    every_step: bool = ...,
    quiet: bool = ...,
    **options: Any,
) -> tuple[Explanation, ...]: ...
def explain(
    target: Any,
    /,
    *args: Any,
    source: bool = False,
    every_step: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Explanation | tuple[Explanation, ...]:
    """Prints what ``jm.einsum`` or ``jm.fuse`` would run, and why; runs nothing of it.

    Args:
      target: einsum subscripts, or a function that calls ``jm.einsum``, or is or calls a fused
        function (or its gradient, ...).
      *args: the operands, or the function's arguments; ``jax.ShapeDtypeStruct`` stands for an
        array.  Numpy operands of a subscript are constants of the kernel, as they are when a jitted
        function closes over them.
      source: also print the source of a kernel that is compiled for this program.
      every_step: print all operations at the points, not their counts.
      quiet: print nothing.
      **options: keyword arguments of the einsum or the function.

    Returns:
      For subscripts the :class:`Explanation`; for a function one for every program in it, and one
      for every part of it that is left to plain JAX, whose reason names the line of its source.

    Raises:
      What the call itself raises while it is traced.

    >>> import jax, jaxmagma as jm, numpy as np
    >>> B = np.random.rand(4, 3)
    >>> u = jax.ShapeDtypeStruct((1000, 3, 3), "float32")
    >>> e = jm.explain("xa,yb,eab->exy", B.astype("float32"), B.astype("float32"), u, quiet=True)
    >>> e.elements, e.tiles[-1], e.flops
    (1000, (4, 4), 168000)
    """
    with jax.ensure_compile_time_eval():
        device = min(jnp.zeros(()).devices(), key=lambda x: x.id)
    found = _explain_function(*as_function(target, args, options), device)
    if every_step:
        found = tuple(map(_with_every_step, found))
    result: Any = found if callable(target) else found[0]
    if not quiet:
        told = [str(x) + (f"\n\n{x.source}" if source else "") for x in found]
        print("\n\n".join(told) or f"plain JAX runs all of it: {NOTHING}")
    return result


def as_function(
    target: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A function and its arguments; of an einsum those are the operands that are no constants."""
    if callable(target):
        return functools.partial(target, **options), args
    if not isinstance(target, str) and not args:
        raise TypeError(f"neither subscripts nor a function: {target!r}")
    call = (target, *args)
    known = {n: x for n, x in enumerate(call) if not _traced(x)}

    def function(*values: Any) -> Any:
        remaining = iter(values)
        whole = [known[n] if n in known else next(remaining) for n in range(len(call))]
        return einsum(*whole, **options)

    return function, [x for x in call if _traced(x)]


def _traced(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def _explain_function(
    function: Callable[..., Any], args: Any, device: jax.Device
) -> tuple[Explanation, ...]:
    with plain_calls() as plain:
        jaxpr = jax.make_jaxpr(function)(*args)
    found = [
        _explain_program(program, shapes, device) for program, shapes in applications(jaxpr.jaxpr)
    ]
    found += [Explanation(device.platform, call.reason) for call in plain]
    return tuple(found)


def applications(jaxpr: Any) -> Iterator[tuple[ElementProgram, list[tuple[int, ...]]]]:
    """Every program that is applied, in nested jaxprs too, and the shapes of its arguments."""
    for equation in nested(jaxpr):
        if equation.primitive is program_p:
            program, kept = normal_form(equation.params["program"])
            avals: list[Any] = [x.aval for x in equation.invars]
            yield program, [avals[n].shape for n in kept]


def _explain_program(program: ElementProgram, shapes: Any, device: jax.Device) -> Explanation:
    extents = program.batch_extents(shapes)
    platform = "cuda" if device.platform == "gpu" else device.platform
    if platform not in ("cpu", "cuda"):
        declined = Declined(f"no backend for {platform}")
        return _explain_kernel(program, extents, device, platform, declined, plan(program))
    kernel = lower(program, extents, platform)
    if isinstance(kernel, Declined):
        division = divide(program, extents, platform)
        if division is not None:
            return _explain_parts(program, extents, device, kernel, division)
        return _explain_kernel(
            program, extents, device, platform, kernel, planned(program, platform)
        )
    done = plans(program, platform)[kernel.plan] if kernel.plan else planned(program, platform)
    return _explain_kernel(program, extents, device, platform, kernel, done)


def _explain_kernel(
    program: ElementProgram,
    extents: tuple[int, ...],
    device: jax.Device,
    platform: str,
    kernel: Kernel | Declined,
    done: Plan,
) -> Explanation:
    elements = math.prod(extents)
    real = 4 if np.issubdtype(program.dtype, np.complexfloating) else 1
    flops, least_bytes = real * elements * done.flops, program.least_bytes(extents)
    return Explanation(
        platform,
        kernel.reason if isinstance(kernel, Declined) else None,
        "" if isinstance(kernel, Declined) else kernel.description,
        elements,
        tuple(sentence for _, sentence in _sentences(done)),
        tuple(tile.shape for tile in done.tiles),
        flops,
        least_bytes,
        roofline(program.dtype, device).seconds(least_bytes, flops),
        _chosen(kernel.choice),
        "" if isinstance(kernel, Declined) else kernel.source,
        program,
        moved_bytes=least_bytes,
        summary=tuple(_folded(done)),
    )


def _explain_parts(
    program: ElementProgram,
    extents: tuple[int, ...],
    device: jax.Device,
    declined: Declined,
    division: Division,
) -> Explanation:
    parts = []
    for part in division.parts:
        shapes = [(*(extents[axis] for axis in x.batch), *x.tile) for x in part.program.arguments]
        parts.append(_explain_program(part.program, shapes, device))
    flops, least_bytes = sum(x.flops for x in parts), program.least_bytes(extents)
    return Explanation(
        parts[0].platform,
        None,
        "; ".join(x.kernel or f"plain JAX: {x.reason}" for x in parts),
        parts[0].elements,
        tuple(step for x in parts for step in x.order),
        tuple(tile for x in parts for tile in x.tiles),
        flops,
        least_bytes,
        roofline(program.dtype, device).seconds(least_bytes, flops),
        "; ".join(x.choice for x in parts),
        "\n".join(x.source for x in parts if x.source),
        program,
        tuple(parts),
        declined.reason,
        division.least_bytes(extents),
        tuple(_passed(division, source) for source in division.between),
    )


def _passed(division: Division, source: Source) -> str:
    """An array that goes from one kernel to others."""
    number, position = source
    made = division.parts[number].program
    tile = list(made.tiles[made.outputs[position].value])
    readers = [n for n, part in enumerate(division.parts, start=1) if source in part.arguments]
    return f"{made.dtype}{tile} from kernel {number + 1} to {', '.join(map(str, readers))}"


def _chosen(choice: Choice) -> str:
    if choice.origin == MODEL.origin:
        return "chosen by the model"
    return f"{choice} ({choice.origin})"


# A run of fewer operations at the points is told one by one.
_FEW_OPERATIONS = 8


def _with_every_step(explanation: Explanation) -> Explanation:
    parts = tuple(map(_with_every_step, explanation.parts))
    return replace(explanation, summary=explanation.order, parts=parts)


def _folded(planned: Plan) -> Iterator[str]:
    """The plan with runs of operations at the points as their counts."""
    for at_points, run in itertools.groupby(_sentences(planned), lambda x: isinstance(x[0], str)):
        lines = list(run)
        if not at_points or len(lines) < _FEW_OPERATIONS:
            yield from (sentence for _, sentence in lines)
            continue
        counts = Counter(name for name, _ in lines if name)
        told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        each = f"{counts.total()} operations at each point: {told}"
        yield each if counts else f"{len(lines)} components are taken"


def _sentences(planned: Plan) -> Iterator[tuple[str | None, str]]:
    """The plan in lines such as ``t3[5,4,4] = B0[5,4] t2[4,4,4], contracting 4``.

    With each the function that it applies point by point, "" where it takes a part of a value.
    """

    def name(number: int) -> str:
        if number >= len(planned.program.inputs):
            letter = "t"
        else:
            operand = planned.program.inputs[number]
            kind = "constant" if operand.constant else "shared" if operand.shared else "operand"
            letter = kind + " "
        return f"{letter}{number}{list(planned.tiles[number].shape)}"

    for number, step in planned.numbered_steps():
        operands = ", ".join(name(x) for x in step.operands)
        function = None
        if isinstance(step, Product):
            summed = math.prod(step.extents[x] for x in step.contracted)
            verb = f"contract over {summed}" if step.contracted else "multiply"
        elif isinstance(step, Rearrange):
            verb = "sum" if step.flops else "rearrange"
        elif isinstance(step, Pointwise):
            verb = function = step.function
        else:
            verb = type(step).__name__.lower()
            function = "" if isinstance(step, View) else None
        yield function, f"{name(number)} = {verb}: {operands}"
    for number in planned.results:
        yield None, f"store {name(number)}"
