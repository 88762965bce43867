"""``jm.einsum``: from a subscript string and arrays to a program and its arguments.

The frontend brings the call into the form a program wants (no ellipsis, no repeated labels, no
extent-1 broadcasting), decides which labels run over elements, contracts shared operands with
each other once, and hands over.  What should not become a program, ``jnp.einsum`` computes.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum

from jaxmagma.frontends.subscripts import label_extents, parse
from jaxmagma.plans.capacity import (
    LARGEST_TILES,
    can_be_constant,
    surely_fits,
    too_large,
    traced_once,
)
from jaxmagma.plans.order import contraction_order
from jaxmagma.plans.plan import plan
from jaxmagma.primitives import primitive
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.fallback import SYMBOLIC, PlainCall, is_symbolic, tell
from jaxmagma.programs.memo import interned
from jaxmagma.programs.program import Constant, ElementProgram, Input, Output


# Labels longer than this run over elements rather than inside a tile, if they can.
_LONGEST_TILE_AXIS = 64
# Elements may share operands; beyond this many reads of the average value a library does better.
_MOST_READS = 16


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
      As ``jnp.einsum`` raises: of an ``optimize`` or a ``precision`` that it does not know.

    Example: a mass matrix in three dimensions, applied to every element at once.

    >>> import jaxmagma as jm, numpy as np
    >>> B = np.random.rand(4, 3)                   # values of 3 basis functions at 4 points
    >>> u = np.random.rand(100, 3, 3, 3)           # one tile of coefficients an element
    >>> D = np.random.rand(100, 4, 4, 4)           # weights at the points
    >>> v = jm.einsum("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", B, B, B, D, B, B, B, u)
    >>> v.shape
    (100, 3, 3, 3)
    """
    options = dict(
        out=out,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    call = capture(subscripts, *operands, **options)
    if isinstance(call, FusedCall):
        return call()
    tell(call)
    return jnp.einsum(subscripts, *operands, **options)


def _check_options(
    terms: Sequence[str], output: str, arrays: Sequence[Any], optimize: Any, precision: Any
) -> None:
    """Raises what ``jnp.einsum`` does of options that no kernel reads."""
    spec = f"{','.join(terms)}->{output}"
    call = functools.partial(jnp.einsum, spec, optimize=optimize, precision=precision)
    jax.eval_shape(call, *arrays)


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
    if precision is not None or optimize != "auto":
        _check_options(terms, output, arrays, optimize, precision)
    if out is not None or out_sharding is not None:
        return PlainCall("out= or out_sharding= is given")
    if any(is_symbolic(np.shape(x)) for x in arrays):
        return PlainCall(SYMBOLIC)
    dtype = np.dtype(jnp.result_type(*arrays))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return PlainCall(f"{dtype} is not a floating-point dtype")
    if preferred_element_type is not None and np.dtype(preferred_element_type) != dtype:
        return PlainCall(f"preferred_element_type is {np.dtype(preferred_element_type)}")
    if not any(_decides_dtype(x) for x in arrays):
        return PlainCall("the result is weakly typed")
    extents = label_extents(terms, [np.shape(x) for x in arrays])
    if 0 in extents.values():
        return PlainCall("an operand is empty")

    extents = {label: extent for label, extent in extents.items() if extent > 1}
    kept = "".join(label for label in output if label in extents)
    labels = [_unique_labels(term, np.shape(x)) for term, x in zip(terms, arrays, strict=True)]
    elements = element_labels(labels, kept, extents)
    # Of more operands it may be the program of one element, which `vmap` will repeat.
    if not elements and len(terms) < 3:
        return PlainCall("no label runs over elements")
    if not _contracted(labels, kept, elements):
        return PlainCall("nothing is contracted inside an element")
    if _is_matrix_product(labels, kept):
        return PlainCall("it is one matrix product")

    baked = any(isinstance(x, jax.core.Tracer) for x in arrays) and traced_once()
    values = _Operands(arrays, dtype, baked)
    numbers = [values.number(position, term) for position, term in enumerate(terms)]
    factors = list(zip(numbers, labels, strict=True))
    factors = _shared_contracted(factors, kept, extents, elements, values, precision)
    return _build(factors, output, kept, extents, elements, values, precision)


def _decides_dtype(x: Any) -> bool:
    """Whether the dtype is that of the result; integers and Python's scalars only follow."""
    weak = getattr(x, "weak_type", type(x) in (int, float, complex))
    return not weak and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _unique_labels(term: str, shape: tuple[int, ...]) -> str:
    """The labels of an operand without repetitions and without axes of extent 1."""
    return "".join(dict.fromkeys(x for x, extent in zip(term, shape, strict=True) if extent > 1))


def _contracted(terms: Sequence[str], output: str, elements: str) -> bool:
    """Whether operands share a label inside an element that the output does not have."""
    labels = "".join(terms)
    return any(labels.count(x) > 1 for x in set(labels) - set(output) - set(elements))


def _is_matrix_product(terms: Sequence[str], output: str) -> bool:
    """Whether one library call does it all: two matrices, after merging axes side by side."""
    if len(terms) != 2:
        return False
    left, right = terms
    summed = "".join(x for x in left if x in right and x not in output)
    rows = "".join(x for x in left if x in output)
    columns = "".join(x for x in right if x in output)
    return (
        left in (rows + summed, summed + rows)
        and right in (columns + summed, summed + columns)
        and output in (rows + columns, columns + rows)
    )


def element_labels(terms: Sequence[str], output: str, extents: Mapping[str, int]) -> str:
    """The labels that run over elements, in the order of the output.

    A label of every operand and the output does, as ``e`` in ``eij,ejk->eik``; without one, the
    longest label does, if no tile has an axis so long, or if all operands of the highest rank
    have it: tables are matrices, elements are not.  Then those output labels of no shared operand
    accompany it that stand with it ahead of the tiles in memory, where an axis over elements costs
    nothing and a transposition does.
    """
    everywhere = {x for x in output if all(x in labels for labels in terms)}
    chosen = _ahead_of_tiles(everywhere, set(), [*terms, output])
    if not chosen:
        longest = max(everywhere, key=lambda x: (extents[x], x), default=None)
        chosen = {longest} if longest else _element_label(terms, output, extents)
    while chosen:
        batched = [labels for labels in terms if chosen & set(labels)]
        shared = set("".join(labels for labels in terms if not chosen & set(labels)))
        free = {x for x in output if x not in chosen and x not in shared}
        arrays = [*batched, output]
        more = _ahead_of_tiles({x for x in free if all(x in y for y in batched)}, chosen, arrays)
        between = {
            y for t in arrays for n, x in enumerate(t) if x in chosen for y in t[:n]
        } - chosen
        if between <= free:
            more |= between
        if not more:
            break
        chosen |= more
    return "".join([x for x in output if x in chosen] + [x for x in chosen if x not in output])


def _ahead_of_tiles(labels: set[str], chosen: set[str], terms: Sequence[str]) -> set[str]:
    """The labels in every term that stand there behind ``chosen`` ones and each other alone."""
    found = set(labels)
    while True:
        batch = chosen | found
        behind = {x for x in found if any(not set(t[: t.index(x)]) <= batch for t in terms)}
        if not behind:
            return found
        found -= behind


def _element_label(terms: Sequence[str], output: str, extents: Mapping[str, int]) -> set[str]:
    candidates = list(extents)
    if max(extents.values(), default=0) <= _LONGEST_TILE_AXIS:
        rank = max(map(len, terms))
        largest = [labels for labels in terms if len(labels) == rank]
        candidates = [x for x in extents if all(x in labels for labels in largest)]
        candidates = [x for x in candidates if x in output or all(x in y for y in terms)]
    longest = max(candidates, key=lambda x: (extents[x], x in output), default=None)
    if longest is None or (longest not in output and len(terms) < 3):
        return set()
    return {longest}


class _Operands:
    """The distinct arrays of a call; one that is passed twice is one operand."""

    def __init__(self, arrays: Sequence[Any], dtype: np.dtype, baked: bool) -> None:
        self.dtype = dtype
        self.baked = baked
        self._arrays = arrays
        self._distinct: dict[tuple[int, str], int] = {}
        self.found: list[Any] = []

    def number(self, position: int, term: str) -> int:
        """The number of an operand, without repeated labels and axes of extent 1."""
        array = self._arrays[position]
        shape = np.shape(array)
        dropped = tuple(n for n, extent in enumerate(shape) if extent == 1)
        kept = "".join(x for n, x in enumerate(term) if n not in dropped)
        unique = "".join(dict.fromkeys(kept))
        pattern = "".join(opt_einsum.get_symbol(unique.index(x)) for x in kept)
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
        return self._distinct[key]

    def add(self, array: Any) -> int:
        self.found.append(array)
        return len(self.found) - 1

    def _cast(self, array: Any) -> Any:
        """The operand in the common dtype; numpy when it is to be a constant."""
        if self.baked and can_be_constant(array):
            return np.asarray(array).astype(self.dtype)
        return jnp.asarray(array, self.dtype)


def _shared_contracted(
    factors: list[tuple[int, str]],
    output: str,
    extents: Mapping[str, int],
    elements: str,
    values: _Operands,
    precision: Any,
) -> list[tuple[int, str]]:
    """Contracts operands without elements with each other first, once for all elements."""
    while elements and len(factors) > 1:
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
        spec = f"{terms[pair[0]]},{terms[pair[1]]}->{kept}"
        if all(isinstance(x, np.ndarray) for x in arrays):
            # Numpy's einsum knows its own dtypes only, not bfloat16.
            wide = np.promote_types(values.dtype, np.float32)
            product = np.einsum(spec, *(x.astype(wide) for x in arrays)).astype(values.dtype)
        else:
            # A kernel would compute it in full precision.
            product = jnp.einsum(spec, *arrays, precision=precision or jax.lax.Precision.HIGHEST)
        factors = [(values.add(product), kept), *rest]
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
    arguments: list[tuple[Any, list[int]]] = []
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
            found.append(
                Input(
                    tuple(elements.index(x) for x in batch),
                    tuple(extents[x] for x in tile),
                    values.dtype,
                    Constant(np.transpose(array, order)) if constant else None,
                )
            )
            if not constant:
                arguments.append((array, order))
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
    reason = _no_gain(program, [extents[x] for x in elements])
    if reason:
        return PlainCall(reason)

    made = "".join(x for x in elements if x in output) + _tile(kept, elements)
    permutation = tuple(made.index(x) for x in kept)
    shape = tuple(extents.get(x, 1) for x in output)

    def finish(result: jax.Array) -> jax.Array:
        if permutation != tuple(range(len(permutation))):
            result = jnp.transpose(result, permutation)
        return result if result.shape == shape else jnp.reshape(result, shape)

    arrays = tuple(_transposed(array, order) for array, order in arguments)
    return FusedCall(program, arrays, finish, elements)


def _transposed(array: Any, order: list[int]) -> jax.Array:
    array = jnp.asarray(array)
    return array if order == sorted(order) else jnp.transpose(array, order)


@interned
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


def _no_gain(program: ElementProgram, extents: Sequence[int]) -> str | None:
    """Why a program is not worth a kernel on any platform, if it is not."""
    reason = None if surely_fits(program) else too_large(plan(program))
    if reason:
        return reason
    largest = max((math.prod(x.tile) for x in program.inputs if x.shared), default=0)
    if largest > LARGEST_TILES:
        return f"a shared operand has {largest} values, too many to stay on chip"
    batched = [(x, math.prod(x.tile)) for x in program.inputs if x.batch]
    read = math.prod(extents) * sum(size for _, size in batched)
    stored = sum(math.prod(extents[axis] for axis in x.batch) * size for x, size in batched)
    if read > _MOST_READS * stored:
        return f"elements share so much that all would be read {read // stored} times"
    return None


def _tile(labels: str, elements: str) -> str:
    return "".join(x for x in labels if x not in elements)
