"""``jm.einsum``: from a subscript string and arrays to a program and its arguments.

The frontend brings the call into the form a program wants (no ellipsis, no repeated labels, no
extent-1 broadcasting), decides which labels run over elements, contracts shared operands with
each other once, and hands over.  What should not become a program, ``jnp.einsum`` computes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma import primitive
from jaxmagma.plan import contraction_order, plan
from jaxmagma.program import Builder, Constant, ElementProgram, Input, Output
from jaxmagma.subscripts import label_extents, parse


# A tile program with more values than this per element does not stay on any chip.
_LARGEST_TILES = 1 << 15
# Labels longer than this run over elements rather than inside a tile, if they can.
_LONGEST_TILE_AXIS = 64
# Constants larger than this stay arguments: constant memory holds 64 KiB.
_LARGEST_CONSTANT = 8192


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: Any = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Evaluates Einstein's summation convention on the operands, as one kernel where that gains.

    A drop-in for :func:`jax.numpy.einsum`: same arguments, result, dtype and promotion.  If the
    contraction repeats the same small product over many elements (over a long output label such as
    ``e`` below), all of it becomes one native kernel, however many operands it has.

    Args:
      subscripts: explicit (``"ij,jk->ik"``) or implicit (``"ij,jk"``) subscripts with optional
        ellipsis, or the first operand of the interleaved form ``einsum(a, [0, 1], b, [1, 2])``.
      *operands: arrays, numpy arrays or scalars.  An operand without element label is shared by
        all elements, and part of the kernel if it is concrete while the caller is traced.
      out: not supported, as in ``jnp.einsum``.
      optimize: the contraction order of the plain JAX path; a fused kernel chooses its own.
      precision: as in ``jnp.einsum``; kernels always compute in full precision.
      preferred_element_type: dtype of the result; anything but the promoted dtype of the operands
        is left to ``jnp.einsum``.
      out_sharding: as in ``jnp.einsum``, which then computes the result.

    Returns:
      The array ``jnp.einsum`` returns, up to rounding.

    Raises:
      ValueError: malformed subscripts, a wrong number of operands, an unknown or repeated output
        label, or extents that do not match.
      TypeError: an operand that is not an array.

    Example: a mass matrix in three dimensions, applied to every element at once.

    >>> import jaxmagma as jm, numpy as np
    >>> B = np.random.rand(4, 3)                   # values of 3 basis functions at 4 points
    >>> u = np.random.rand(100, 3, 3, 3)           # one tile of coefficients an element
    >>> D = np.random.rand(100, 4, 4, 4)           # weights at the points
    >>> v = jm.einsum("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", B, B, B, D, B, B, B, u)
    >>> v.shape
    (100, 3, 3, 3)
    """
    options = dict(optimize=optimize, precision=precision)
    call = capture(
        subscripts,
        *operands,
        out=out,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        **options,
    )
    if isinstance(call, FusedCall):
        return call()
    if (listener := _plain_calls.get()) is not None:
        listener.append(call)
    return jnp.einsum(
        subscripts,
        *operands,
        out=out,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        **options,
    )


@dataclass(frozen=True)
class FusedCall:
    """A program, its arguments, and how its output becomes the result."""

    program: ElementProgram
    arguments: tuple[Any, ...]
    finish: Callable[[jax.Array], jax.Array]
    element_labels: str

    def __call__(self) -> jax.Array:
        (result,) = primitive.apply(self.program, *self.arguments)
        return self.finish(result)


@dataclass(frozen=True)
class PlainCall:
    """Why plain JAX computes a call."""

    reason: str


_plain_calls: ContextVar[list[PlainCall] | None] = ContextVar("plain_calls", default=None)


@contextlib.contextmanager
def plain_calls() -> Iterator[list[PlainCall]]:
    """Collects the calls in its body that are left to plain JAX."""
    found: list[PlainCall] = []
    token = _plain_calls.set(found)
    try:
        yield found
    finally:
        _plain_calls.reset(token)


def capture(
    spec: Any,
    /,
    *operands: Any,
    out: Any = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> FusedCall | PlainCall:
    """The program of an einsum, or the reason why it is not one; raises if the call is wrong."""
    terms, output, arrays = parse(spec, operands)
    del optimize
    if out is not None or out_sharding is not None:
        return PlainCall("out= or out_sharding= is given")
    dtype = np.dtype(jnp.result_type(*arrays))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return PlainCall(f"{dtype} is not a floating-point dtype")
    if preferred_element_type is not None and np.dtype(preferred_element_type) != dtype:
        return PlainCall(f"preferred_element_type is {np.dtype(preferred_element_type)}")
    if all(getattr(x, "weak_type", isinstance(x, (int, float, complex))) for x in arrays):
        return PlainCall("all operands are weakly typed")
    extents = label_extents(terms, [np.shape(x) for x in arrays])
    if 0 in extents.values():
        return PlainCall("an operand is empty")

    baked = any(isinstance(x, jax.core.Tracer) for x in arrays)
    values = _Operands(arrays, dtype, baked)
    factors = [values.factor(n, labels, extents) for n, labels in enumerate(terms)]
    extents = {label: extent for label, extent in extents.items() if extent > 1}
    kept = "".join(label for label in output if label in extents)
    elements = element_labels([labels for _, labels in factors], kept, extents)
    if not elements:
        return PlainCall("no label runs over elements")
    factors = _shared_contracted(factors, kept, extents, elements, values)
    return _build(factors, output, kept, extents, elements, values, precision)


def element_labels(terms: Sequence[str], output: str, extents: Mapping[str, int]) -> str:
    """The labels that run over elements, in the order of the output.

    A label of every operand and the output does, as ``e`` in ``eij,ejk->eik``; without one, the
    longest label does.  Then all that accompany it: output labels of every batched and no shared
    operand, and long ones of no shared operand.
    """
    everywhere = [x for x in output if all(x in labels for labels in terms)]
    if everywhere:
        chosen = set(everywhere)
    else:
        longest = max(extents, key=lambda x: (extents[x], x in output), default=None)
        if longest is None or (longest not in output and len(terms) < 3):
            return ""
        chosen = {longest}
    while True:
        batched = [labels for labels in terms if chosen & set(labels)]
        shared = set("".join(labels for labels in terms if not chosen & set(labels)))
        more = {
            x
            for x in output
            if x not in chosen
            and x not in shared
            and (all(x in labels for labels in batched) or extents[x] > _LONGEST_TILE_AXIS)
        }
        if not more:
            break
        chosen |= more
    return "".join([x for x in output if x in chosen] + [x for x in chosen if x not in output])


class _Operands:
    """The distinct arrays of a call; one that is passed twice is one operand."""

    def __init__(self, arrays: Sequence[Any], dtype: np.dtype, baked: bool) -> None:
        self.dtype = dtype
        self.baked = baked
        self._arrays = arrays
        self._distinct: dict[tuple[int, str], int] = {}
        self.found: list[Any] = []

    def factor(self, number: int, labels: str, extents: Mapping[str, int]) -> tuple[int, str]:
        """An operand without repeated labels and extent-1 axes: its number and labels."""
        array = self._arrays[number]
        shape = np.shape(array)
        dropped = tuple(n for n, extent in enumerate(shape) if extent == 1)
        kept = "".join(x for n, x in enumerate(labels) if n not in dropped)
        unique = "".join(dict.fromkeys(kept))
        pattern = "".join(chr(ord("a") + unique.index(x)) for x in kept)
        key = (id(array), pattern)
        if key not in self._distinct:
            array = self._cast(array)
            numerics: Any = np if isinstance(array, np.ndarray) else jnp
            if dropped:
                array = numerics.squeeze(array, dropped)
            if unique != kept:
                target = "".join(dict.fromkeys(pattern))
                array = numerics.einsum(f"{pattern}->{target}", array)
            self._distinct[key] = self.add(array)
        return self._distinct[key], unique

    def add(self, array: Any) -> int:
        self.found.append(array)
        return len(self.found) - 1

    def _cast(self, array: Any) -> Any:
        """The operand in the common dtype; numpy when it is to be a constant."""
        small = np.size(array) <= _LARGEST_CONSTANT
        known = not isinstance(array, jax.core.Tracer)
        if isinstance(array, jax.Array) and known:
            known = array.is_fully_addressable
        if self.baked and known and small:
            return np.asarray(array).astype(self.dtype)
        return jnp.asarray(array, self.dtype)


def _shared_contracted(
    factors: list[tuple[int, str]],
    output: str,
    extents: Mapping[str, int],
    elements: str,
    values: _Operands,
) -> list[tuple[int, str]]:
    """Contracts operands without elements with each other first, once for all elements."""
    while len(factors) > 1:
        terms = [labels for _, labels in factors]
        shared = [not set(labels) & set(elements) for labels in terms]
        order = contraction_order(
            tuple(_tile(labels, elements) for labels in terms),
            _tile(output, elements),
            tuple(extents.items()),
            tuple(not x for x in shared),
        )
        count = len(factors)
        pair = next(
            ((a, b) for a, b in order if max(a, b) < count and shared[a] and shared[b]), None
        )
        if pair is None:
            return factors
        rest = [factor for n, factor in enumerate(factors) if n not in pair]
        later = output + "".join(labels for _, labels in rest)
        kept = "".join(x for x in dict.fromkeys(terms[pair[0]] + terms[pair[1]]) if x in later)
        arrays = [values.found[factors[n][0]] for n in pair]
        numerics: Any = np if all(isinstance(x, np.ndarray) for x in arrays) else jnp
        spec = f"{terms[pair[0]]},{terms[pair[1]]}->{kept}"
        factors = [(values.add(numerics.einsum(spec, *arrays)), kept), *rest]
    return factors


def _build(
    factors: list[tuple[int, str]],
    output: str,
    kept: str,
    extents: Mapping[str, int],
    elements: str,
    values: _Operands,
    precision: Any,
) -> FusedCall | PlainCall:
    program_terms: list[tuple[int, str]] = []
    inputs: dict[tuple[int, str], int] = {}
    found: list[Input] = []
    arguments: list[Any] = []
    for number, labels in factors:
        array = values.found[number]
        batch = [x for x in labels if x in elements]
        tile = _tile(labels, elements)
        # One array used with different element labels is as many operands of the program.
        key = (number, "".join(batch) + "|" + str([labels.index(x) for x in tile]))
        if key not in inputs:
            inputs[key] = len(found)
            order = [labels.index(x) for x in [*batch, *tile]]
            constant = isinstance(array, np.ndarray) and not batch
            if order != sorted(order):
                array = (np if constant else jnp).transpose(array, order)
            found.append(
                Input(
                    tuple(elements.index(x) for x in batch),
                    tuple(extents[x] for x in tile),
                    values.dtype,
                    Constant(array) if constant else None,
                )
            )
            if not constant:
                arguments.append(jnp.asarray(array))
        program_terms.append((inputs[key], tile))

    program = _program(
        tuple(found),
        tuple(program_terms),
        _tile(kept, elements),
        tuple((x, extents[x]) for x in sorted(extents)),
        tuple(n for n, x in enumerate(elements) if x in output),
        len(elements),
        precision,
    )
    reason = _no_gain(program)
    if reason:
        return PlainCall(reason)

    made = "".join(x for x in elements if x in output) + _tile(kept, elements)
    permutation = tuple(made.index(x) for x in kept)
    shape = tuple(extents.get(x, 1) for x in output)

    def finish(result: jax.Array) -> jax.Array:
        if permutation != tuple(range(len(permutation))):
            result = jnp.transpose(result, permutation)
        return result if result.shape == shape else jnp.reshape(result, shape)

    return FusedCall(program, tuple(arguments), finish, elements)


@functools.lru_cache(maxsize=1024)
def _program(
    inputs: tuple[Input, ...],
    terms: tuple[tuple[int, str], ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    kept_axes: tuple[int, ...],
    batch_rank: int,
    precision: Any,
) -> ElementProgram:
    builder = Builder(batch_rank, precision)
    for operand in inputs:
        builder.input(operand)
    value = builder.contract(terms, output, dict(sizes))
    return builder.build([Output(value, kept_axes)]).program


def _no_gain(program: ElementProgram) -> str | None:
    """Why a program is not worth a kernel on any platform, if it is not."""
    planned = plan(program)
    if planned.on_chip > _LARGEST_TILES:
        return f"one element has {planned.on_chip} values, too many to stay on chip"
    largest = max((math.prod(x.tile) for x in program.inputs if x.shared), default=0)
    if largest > _LARGEST_TILES:
        return f"a shared operand has {largest} values, too many to stay on chip"
    if not any(getattr(step, "contracted", "") for step in planned.steps):
        return "nothing is contracted inside an element"
    return None


def _tile(labels: str, elements: str) -> str:
    return "".join(x for x in labels if x not in elements)
