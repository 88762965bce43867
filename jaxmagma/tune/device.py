"""Runs candidates on a device: what the search asks, answered by JAX and the backend."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma import choices, lowering, native
from jaxmagma.choices import Choice
from jaxmagma.lowering.backends import BACKENDS
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.primitives.primitive import program_p
from jaxmagma.programs.program import ElementProgram, Gather


# Inputs are taken in turn from sets that together exceed every cache so many times.
TIMES_CACHE = 4
GPU_CACHE_BYTES = 64 << 20
CPU_CACHE_BYTES = 32 << 20
MOST_SETS = 64
POOL = 1 << 22  # random numbers, from which all arrays are cut
# A round of calls takes so many seconds, or one call.
ROUND_SECONDS = {"cuda": 0.005, "cpu": 0.02}
MOST_CALLS = 200

Executable = Callable[..., Any]


class Device:
    """One program with arrays of given extents on one device, and random data for it."""

    def __init__(
        self, program: ElementProgram, extents: tuple[int, ...], device: jax.Device
    ) -> None:
        self.program = program
        self.extents = extents
        self.device = device
        self.platform = platform_of(device)
        self.arch = choices.architecture(self.platform)
        self.rules = BACKENDS[self.platform].rules_of(self.arch)

    # ---- Building --------------------------------------------------------------------------------

    def lower(self, choice: Choice) -> Kernel | Declined:
        with choices.using(choice):
            return lowering.lower(self.program, self.extents, self.platform)

    def stage(self, choice: Choice) -> Any:
        """The call in XLA's terms, to be compiled on any thread."""

        def call(*arguments: jax.Array) -> list[jax.Array]:
            return program_p.bind(*arguments, program=self.program)

        # Later calls are those of `using` no more: the choice is part of what is staged.
        with choices.using(choice), jax.default_device(self.device):
            return jax.jit(call).lower(*self._shapes)

    def compile(self, staged: Any) -> Executable:
        return staged.compile()

    def resources(self, kernel: Kernel) -> Mapping[str, int] | None:
        """Registers and spilled bytes of a thread, where a kernel is compiled for the program."""
        if self.platform != "cuda" or not kernel.source:
            return None
        module: Any = native.load("cuda")
        found: Mapping[str, int] = module.resources(module.specialise(kernel.source, self.arch))
        return found

    # ---- Running ---------------------------------------------------------------------------------

    @functools.cached_property
    def _shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((*(self.extents[axis] for axis in x.batch), *shape), dtype)
            for x in self.program.arguments
            for shape, dtype in [x.stored]
        ]

    @functools.cached_property
    def inputs(self) -> list[list[jax.Array]]:
        """Sets of random arguments, more than fit in any cache."""
        one = sum(math.prod(x.shape) * x.dtype.itemsize for x in self._shapes)
        cache = cpu_cache_bytes() if self.platform == "cpu" else GPU_CACHE_BYTES
        count = max(1, min(MOST_SETS, math.ceil(TIMES_CACHE * cache / max(1, one))))
        with jax.default_device(self.device):
            return [self._random(number) for number in range(count)]

    def _random(self, number: int) -> list[jax.Array]:
        lengths = {
            x.index: self.program.inputs[x.vector].tile[0]
            for x in self.program.operations
            if isinstance(x, Gather)
        }
        numbers = [n for n, x in enumerate(self.program.inputs) if x.constant is None]
        made = []
        for n, shape in zip(numbers, self._shapes, strict=True):
            offset = 1_000_003 * (number * len(numbers) + n)
            if shape.dtype.kind == "i":
                # Neighbours are near each other in the vector, as those of a mesh are.
                count, length = math.prod(shape.shape), lengths.get(n, 1)
                own = count // max(1, shape.shape[0])
                near = np.random.default_rng(offset).integers(-own, own + 1, count)
                at = np.clip(np.arange(count) * length // max(1, count) + near, 0, length - 1)
                made.append(jnp.asarray(at.reshape(shape.shape).astype(shape.dtype)))
            else:
                made.append(_cut(self._pool, offset % POOL, shape.shape, shape.dtype))
        return made

    @functools.cached_property
    def _pool(self) -> jax.Array:
        """Random numbers between 1/2 and 3/2, where logarithms, roots and quotients are numbers."""
        numbers = np.random.default_rng(0).uniform(0.5, 1.5, POOL)
        found = numbers.astype(jax.dtypes.canonicalize_dtype(np.float64))
        return jax.device_put(found, self.device)

    def outputs(self, executable: Executable) -> list[jax.Array]:
        return jax.block_until_ready(list(executable(*self.inputs[0])))

    def same(self, executable: Executable, wanted: list[jax.Array]) -> bool:
        """Whether it computes the same as another, but for rounding."""
        found = self.outputs(executable)
        return all(
            float(_gap(a, b)) <= _tolerance(b.dtype) for a, b in zip(found, wanted, strict=True)
        )

    def timer(self, executable: Executable) -> Callable[[], float]:
        """A function that runs it some times, and returns the seconds of one call."""
        sets = itertools.cycle(self.inputs)
        wait_each = self.platform == "cpu"

        def run(calls: int) -> float:
            last = None
            start = time.perf_counter()
            for arguments in itertools.islice(sets, calls):
                last = executable(*arguments)
                if wait_each:
                    jax.block_until_ready(last)
            jax.block_until_ready(last)
            return (time.perf_counter() - start) / calls

        run(2)
        once = min(run(1), run(2))
        calls = max(1, min(MOST_CALLS, math.ceil(ROUND_SECONDS[self.platform] / once)))
        return functools.partial(run, calls)


def platform_of(device: jax.Device) -> str:
    return "cuda" if device.platform == "gpu" else device.platform


@functools.cache
def cpu_cache_bytes() -> int:
    """Of the last-level cache."""
    sizes = [CPU_CACHE_BYTES]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(pool: jax.Array, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """An array of numbers from the pool, from an offset on."""
    pool = jnp.roll(pool, -offset)
    if np.dtype(dtype).kind == "c":
        return jax.lax.complex(*jnp.resize(pool, (2, *shape))).astype(dtype)
    return jnp.resize(pool, shape).astype(dtype)


@jax.jit
def _gap(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest difference, relative to the largest value."""
    agree = (found == wanted) | (jnp.isnan(found) & jnp.isnan(wanted))
    gap = jnp.where(agree, 0, jnp.abs(found - wanted))
    scale = jnp.max(jnp.where(jnp.isnan(wanted), 0, jnp.abs(wanted)), initial=0)
    largest = jnp.max(gap, initial=0)
    return jnp.where(largest == 0, 0, largest / scale)


def _tolerance(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) ** 0.5
