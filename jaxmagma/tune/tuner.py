"""``jm.tune``: measures the ways to run a program, and keeps the best."""

import datetime
import math
import numbers
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from jaxmagma import choices
from jaxmagma.choices import MODEL, Choice
from jaxmagma.faces.explain import NOTHING, applications, as_function
from jaxmagma.lowering.backends import BACKENDS
from jaxmagma.lowering.division import divide
from jaxmagma.plans.plan import plan
from jaxmagma.programs.fallback import plain_calls
from jaxmagma.programs.program import ElementProgram
from jaxmagma.tune.device import Device, platform_of
from jaxmagma.tune.search import Found, Search


@dataclass(frozen=True)
class Variant:
    """One way to run a program, timed.

    Attributes:
      choice: its parameters.
      seconds: of one call, the median of ``rounds`` rounds.
      gbytes: effective GB/s: the least traffic over the time.
      gdofs: values written per second, in units of 1e9.
      gflops: operations per second, in units of 1e9.
      registers: of a thread; 0 where no kernel is compiled for the program.
      kernel: the kernel in words; empty for plain JAX.
    """

    choice: Choice
    seconds: float
    rounds: int
    gbytes: float
    gdofs: float
    gflops: float
    registers: int = 0
    kernel: str = ""

    def __str__(self) -> str:
        registers = f"{self.registers:4}" if self.registers else "    "
        return (
            f"{self.gdofs:8.3f} GDOF/s {self.gbytes:8.1f} GB/s {self.gflops:9.1f} GFLOP/s "
            f"{self.seconds * 1e3:9.4f} ms {registers} {self.choice}"
        )


@dataclass(frozen=True)
class Tuning:
    """What was measured for one program.

    Attributes:
      architecture: of the device, such as ``sm_90``.
      elements: how often the program was repeated.
      variants: all that were timed, the fastest first.
      winner: the one that later calls use.
      model: the one that the model chooses without measurements.
      combinations: size of the search space.
      visited: points of the space that were looked at.
      on_paper: points of the whole space that rules on parameters alone remove, by rule.
      removed: of the points looked at, how many each rule removed.
      out_of_time: points that were to be looked at when time was up.
      seconds: that it took.
      stored: the file that has the winner; None if only this process knows, or nobody.
      program: what was tuned.
    """

    architecture: str
    elements: int
    variants: tuple[Variant, ...]
    winner: Variant
    model: Variant
    combinations: int
    visited: int
    on_paper: dict[str, int]
    removed: dict[str, int]
    out_of_time: int
    seconds: float
    stored: Path | None
    program: ElementProgram = field(repr=False)

    @property
    def regret(self) -> float:
        """Time of the model's choice over that of the winner: 1 if the model was right."""
        return self.model.seconds / self.winner.seconds

    def __str__(self) -> str:
        some = ", ".join(f"{count} {rule}" for rule, count in self.removed.items() if count)
        paper = ", ".join(f"{count:,} {rule}" for rule, count in self.on_paper.items() if count)
        lines = [
            f"on {self.architecture}, {self.elements:,} elements: {self.visited} of "
            f"{self.combinations:,} combinations looked at, {len(self.variants)} timed, in "
            f"{self.seconds:.1f} s",
        ]
        lines += [f"  impossible in the whole space: {paper}"] if paper else []
        lines += [f"  removed: {some}"] if some else []
        lines += [f"  out of time: {self.out_of_time}"] if self.out_of_time else []
        lines += [f"  {variant}" for variant in self.variants]
        where = f", kept in {self.stored}" if self.stored else ""
        lines.append(
            f"  best: {self.winner.choice}, {self.regret:.2f} times as fast as the model's "
            f"choice{where}"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Numbers and names for a JSON file."""
        found = {
            name: getattr(self, name)
            for name in (
                "architecture",
                "elements",
                "combinations",
                "visited",
                "on_paper",
                "removed",
                "out_of_time",
                "seconds",
                "regret",
            )
        }
        variants = [{**asdict(x), "choice": choices.encoded(x.choice)} for x in self.variants]
        return {**found, "winner": choices.encoded(self.winner.choice), "variants": variants}


@overload
def tune(
    target: str,
    /,
    *args: Any,
    seconds: float = ...,
    store: bool = ...,
    quiet: bool = ...,
    **options: Any,
) -> Tuning: ...
@overload
def tune(
    target: Callable[..., Any],
    /,
    *args: Any,
    seconds: float = ...,
    store: bool = ...,
    quiet: bool = ...,
    **options: Any,
) -> tuple[Tuning, ...]: ...
def tune(
    target: Any,
    /,
    *args: Any,
    seconds: float = 60.0,
    store: bool = True,
    quiet: bool = False,
    **options: Any,
) -> Tuning | tuple[Tuning, ...]:
    """Measures the ways to run ``jm.einsum`` or ``jm.fuse`` on this device; keeps the best.

    Every program that the call would run is tuned on random data of the same shapes.  The winners
    are kept in the user's cache (see the environment variable ``JAXMAGMA_CACHE_DIR``), by the
    structure of the program: they hold for other values of its constants, for other numbers of
    elements of the same size class (see ``choices.size_class``), and in other processes, on devices
    of the same architecture and with the same version of this package.

    What JAX compiles from then on runs the winners.  Calls that it has compiled before keep their
    kernels; ``jax.clear_caches()`` has it compile them again.  Where several processes run one
    program, they all take choices from the table that ships with the package, and winners are for
    programs of one process.

    Args:
      target: einsum subscripts, or a function that calls ``jm.einsum``, or is or calls a fused
        function (or its gradient, ...), jitted or not.
      *args: the operands, or the function's arguments; ``jax.ShapeDtypeStruct`` stands for an
        array.  Numpy operands of subscripts are constants, as in ``jm.explain``.
      seconds: the time it may take, for all programs together.  What is started is finished.
      store: whether the winners are used by later calls.
      quiet: print nothing.
      **options: keyword arguments of the einsum or the function.

    Returns:
      For subscripts the :class:`Tuning`; for a function one for every different program in it.

    Raises:
      ValueError: plain JAX runs all of it, and would with any parameters; or the time is negative.
      Exception: what the call itself raises while it is traced.

    >>> import jax, jaxmagma as jm, numpy as np
    >>> B = np.random.rand(5, 4).astype("float32")
    >>> u = jax.ShapeDtypeStruct((2000, 4, 4, 4), "float32")
    >>> found = jm.tune("xa,yb,zc,eabc->exyz", B, B, B, u, seconds=2, store=False, quiet=True)
    >>> found.winner.seconds <= found.model.seconds
    True
    """
    given: Any = seconds
    if not isinstance(given, numbers.Real):
        raise TypeError(f"jm.tune: seconds is a number, not {seconds!r}")
    if not seconds >= 0:
        raise ValueError(f"jm.tune: seconds is at least 0, not {seconds}")
    function, arguments = as_function(target, args, options)
    tasks = list(programs(function, *arguments))
    deadline = time.perf_counter() + seconds
    found = []
    for left, (program, extents) in zip(range(len(tasks), 0, -1), tasks, strict=True):
        share = max(0.0, deadline - time.perf_counter()) / left
        found.append(tune_program(program, extents, seconds=share, store=store))
        if not quiet:
            print(found[-1])
    return tuple(found) if callable(target) else found[0]


def programs(
    function: Callable[..., Any], *args: Any
) -> Iterator[tuple[ElementProgram, tuple[int, ...]]]:
    """The different programs of a call, and the extents of their batch axes.

    Of a program that is too large for one kernel these are its parts.

    Raises:
      ValueError: there is none.
    """
    with plain_calls() as plain:
        jaxpr = jax.make_jaxpr(function)(*args)
    # XLA does not run what no result needs, such as the function in its own gradient.
    needed, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals))
    platform = platform_of(_device())
    found: dict[tuple[ElementProgram, tuple[int, ...]], None] = {}
    for program, shapes in applications(needed):
        extents = program.batch_extents(shapes)
        division = divide(program, extents, platform) if platform in BACKENDS else None
        parts = [program] if division is None else [part.program for part in division.parts]
        # What all elements share plain JAX computes.
        found.update(dict.fromkeys((part, extents) for part in parts if part.batch_rank))
    if not found:
        reasons = "; ".join(dict.fromkeys(call.reason for call in plain))
        raise ValueError(f"jm.tune: plain JAX runs all of it: {reasons or NOTHING}")
    yield from found


def tune_program(
    program: ElementProgram,
    extents: tuple[int, ...],
    *,
    seconds: float = 60.0,
    store: bool = True,
) -> Tuning:
    """Tunes one program with arrays of these extents; functions compiled before keep their kernels.

    Raises:
      ValueError: there is no backend, or nothing that could be different.
    """
    device = _device()
    platform = platform_of(device)
    if platform not in BACKENDS:
        raise ValueError(f"jm.tune: there is no backend for {platform}")
    machine = Device(program, extents, device)
    before = choices.choose(program, extents, platform)
    started = time.perf_counter()
    jax.block_until_ready(machine.inputs)
    incumbent = None if before.is_model else before
    backend = BACKENDS[platform]
    search = Search(machine, backend.SPACE, backend.Parameters, seconds, incumbent)
    found = search.run()
    tuning = as_tuning(found, program, extents, machine.arch, time.perf_counter() - started)
    if not store:
        return tuning
    kept = entry(tuning, device.device_kind)
    name = choices.entry_name(program, extents)
    return replace(tuning, stored=choices.remember(machine.arch, name, kept))


def _device() -> jax.Device:
    """Where calls run, here and now."""
    return min(jnp.zeros(()).devices(), key=lambda x: x.id)


def entry(tuning: Tuning, device: str, name: str = "") -> dict[str, Any]:
    """What a book keeps of a tuning."""
    winner, model = tuning.winner, tuning.model
    return entry_of(winner.choice, tuning.elements, winner.seconds, model.seconds, device, name)


def entry_of(
    choice: Choice,
    elements: int,
    seconds: float,
    model_seconds: float,
    device: str,
    name: str = "",
) -> dict[str, Any]:
    """What a book keeps of a choice, and what it and the model's took."""
    return {
        **choices.encoded(choice),
        **({"name": name} if name else {}),
        "elements": elements,
        "seconds": seconds,
        "model_seconds": model_seconds,
        "device": device,
        "date": datetime.date.today().isoformat(),
    }


def as_tuning(
    found: Found,
    program: ElementProgram,
    extents: tuple[int, ...],
    architecture: str,
    seconds: float,
) -> Tuning:
    elements = math.prod(extents)
    least_bytes = program.least_bytes(extents)
    flops = elements * plan(program).flops
    written = sum(math.prod(shape) for shape in program.output_shapes(extents))

    def variant(choice: Choice) -> Variant:
        candidate = found.candidates[choice]
        median = statistics.median(found.seconds[choice])
        return Variant(
            choice,
            median,
            len(found.seconds[choice]),
            least_bytes / median / 1e9,
            written / median / 1e9,
            flops / median / 1e9,
            candidate.registers,
            candidate.kernel.description if candidate.kernel else "",
        )

    variants = {choice: variant(choice) for choice in found.seconds}

    def counted(counts: Counter[str]) -> dict[str, int]:
        return {name: counts[name] for name in found.reasons}

    return Tuning(
        architecture,
        elements,
        tuple(sorted(variants.values(), key=lambda x: x.seconds)),
        variants[found.winner],
        variants[MODEL],
        found.size,
        found.visited,
        {name: count for name, count in counted(found.on_paper).items() if count},
        counted(found.removed),
        found.out_of_time,
        seconds,
        None,
        program,
    )
