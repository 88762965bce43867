"""Einsums to test with: chosen and random ones, and what their results must be."""

import functools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxmagma.frontends.einsum import FusedCall, capture


Einsum = Callable[..., jax.Array]

# Elements enough for a native kernel, and no multiple of a vector's length.
ELEMENTS = 67

# Named contractions over elements, each of them one program: subscripts and shapes.
PROGRAMS: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "interpolation": ("xa,yb,eab->exy", ((4, 3), (4, 3), (ELEMENTS, 3, 3))),
    "mass": (
        "xi,yj,exy,xa,yb,eab->eij",
        ((4, 3), (4, 2), (ELEMENTS, 4, 4), (4, 3), (4, 2), (ELEMENTS, 3, 2)),
    ),
    "products": ("eij,ejk->eik", ((ELEMENTS, 2, 3), (ELEMENTS, 3, 4))),
    "energy": ("ei,eij,ej->", ((ELEMENTS, 3), (ELEMENTS, 3, 2), (ELEMENTS, 2))),
    "two batch axes": ("feij,ejk->feki", ((66, 3, 2, 3), (3, 3, 2))),
    "sum over elements": ("eia,eaj,ja->ij", ((ELEMENTS, 2, 3), (ELEMENTS, 3, 2), (2, 3))),
}


def normal(key: jax.Array, shape: Sequence[int], dtype: Any = np.float64) -> jax.Array:
    """Normally distributed values of a floating-point or complex dtype, or small integers."""
    # Those of JAX would be compiled for every shape.
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(random.integers(0, 4, shape), dtype)
    values = random.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = (values + 1j * random.normal(size=shape)) / np.sqrt(2)
    return jnp.asarray(values, dtype)


def operands_of(
    name: str, getkey: Callable[[], jax.Array], dtype: Any = np.float64
) -> tuple[str, list[jax.Array]]:
    """The subscripts of a named contraction, and random operands."""
    spec, shapes = PROGRAMS[name]
    return spec, [normal(getkey(), shape, dtype) for shape in shapes]


# ---- What a result must be -------------------------------------------------------------------


def _wide(x: Any) -> np.ndarray:
    """In numpy's highest precision."""
    x = np.asarray(x)
    return x.astype(np.clongdouble if jnp.iscomplexobj(x) else np.longdouble)


def exact(spec: str, *operands: Any) -> np.ndarray:
    return np.asarray(np.einsum(spec, *map(_wide, operands), optimize=True))


def products_per_value(spec: str, *operands: Any) -> int:
    """How many products one value of the result adds up."""
    ones = [np.ones(np.shape(x)) for x in operands]
    return int(np.max(np.einsum(spec, *ones, optimize=True), initial=1))


def assert_within(error: Any, additions: int, scale: Any, dtype: Any) -> None:
    """Asserts the first-order bound of an evaluation in any order: 2 K eps sum |products|."""
    finfo = jnp.finfo(dtype)
    factor = 4 if jnp.issubdtype(dtype, jnp.complexfloating) else 2
    bound = factor * additions * float(finfo.eps) * np.asarray(scale) + float(finfo.tiny)
    error = np.asarray(error)
    worst = np.max(error / bound, initial=0)
    assert np.all(error <= bound), f"{worst:.3g} times the error bound"


def assert_accurate(result: Any, spec: str, *operands: Any) -> None:
    """Asserts shape and values of an einsum, to the accuracy of the result's dtype."""
    expected = exact(spec, *operands)
    assert np.shape(result) == expected.shape
    additions = products_per_value(spec, *operands) + len(operands)
    scale = exact(spec, *(np.abs(_wide(x)) for x in operands))
    assert_within(np.abs(_wide(result) - expected), additions, scale, result.dtype)


def assert_close(result: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Asserts that two trees of arrays are equal up to a part of each array's largest value."""
    results, expecteds = jax.tree.leaves(result), jax.tree.leaves(expected)
    assert str(jax.tree.structure(result)) == str(jax.tree.structure(expected))
    for x, y in zip(results, expecteds, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        scale = np.max(np.abs(y), initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * (scale + 1e-3))


# ---- Random einsums --------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """An einsum and its operands; ``sources[n]`` is the first operand that is operand ``n``."""

    spec: str
    operands: tuple[np.ndarray, ...]
    sources: tuple[int, ...]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.operands)
        return f"Call({self.spec!r}, {shapes}, sources={self.sources})"

    @property
    def fused(self) -> bool:
        with jax.numpy_dtype_promotion("standard"):
            return isinstance(capture(self.spec, *self.operands), FusedCall)

    @property
    def distinct(self) -> tuple[np.ndarray, ...]:
        return tuple(self.operands[n] for n in sorted(set(self.sources)))

    def function(self, einsum: Einsum) -> Einsum:
        """The einsum as a function of its distinct operands."""
        position = {n: k for k, n in enumerate(sorted(set(self.sources)))}

        def evaluate(*distinct: Any) -> jax.Array:
            return einsum(self.spec, *(distinct[position[n]] for n in self.sources))

        return functools.wraps(einsum)(evaluate)


def _values(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    random = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = random.standard_normal(shape) + 1j * random.standard_normal(shape)
    elif jnp.issubdtype(dtype, jnp.inexact):
        values = random.standard_normal(shape)
    else:
        values = random.integers(0, 3, shape)
    return np.asarray(values).astype(dtype)


@st.composite
def calls(
    draw: st.DrawFn,
    dtypes: Sequence[Any] = (np.float64,),
    least_operands: int = 1,
    broadcasting: bool = True,
) -> Call:
    """Any valid einsum, most of them over the long label ``e``.

    With repeated labels, labels in one operand only, permuted and implicit outputs, operands that
    are passed twice and, if ``broadcasting``, ellipsis and axes of extent 1 and 0.
    """
    extents = {label: draw(st.integers(2, 4)) for label in "abc"}
    extents["e"] = draw(st.sampled_from([64, ELEMENTS, 5]))
    extents["h"] = draw(st.sampled_from([2, 66]))
    if broadcasting and draw(st.integers(0, 30)) == 30:
        extents[draw(st.sampled_from("ae"))] = 0
    ellipsis: tuple[int, ...] = ()
    if broadcasting and draw(st.integers(0, 4)) == 4:
        ellipsis = draw(st.sampled_from([(2,), (3, 2), (64,)]))

    terms: list[str] = []
    shapes: list[tuple[int, ...]] = []
    dotted = False
    counts = [n for n in (2, 3, 3, 4, 4, 5, 1) if n >= least_operands]
    for _ in range(draw(st.sampled_from(counts))):
        labels = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
        if draw(st.integers(0, 9)) == 9:
            labels = []
        if draw(st.integers(0, 3)) < 3:
            labels.insert(draw(st.integers(0, len(labels))), "e")
        if draw(st.integers(0, 7)) == 7:
            labels.insert(draw(st.integers(0, len(labels))), "h")
        sizes = [extents[x] for x in labels]
        if broadcasting and labels and draw(st.integers(0, 5)) == 5:
            at = draw(st.integers(0, len(labels) - 1))
            sizes[at] = 1 if labels.count(labels[at]) == 1 else sizes[at]
        if len(ellipsis) > 0 and draw(st.booleans()):
            at = draw(st.integers(0, len(labels)))
            sizes[at:at] = ellipsis[draw(st.integers(0, len(ellipsis))) :]
            labels.insert(at, "...")
            dotted = True
        terms.append("".join(labels))
        shapes.append(tuple(sizes))

    spec = ",".join(terms)
    if draw(st.integers(0, 5)):
        present = sorted(set(spec) & set(string.ascii_letters))
        # Most results keep the elements, and most contract something inside one.
        out = [x for x in present if draw(st.integers(0, 6)) < (6 if x == "e" else 3)]
        out = draw(st.permutations(out))
        if dotted:
            out.insert(draw(st.integers(0, len(out))), "...")
        spec += "->" + "".join(out)

    seed = draw(st.integers(0, 1 << 30))
    operands: list[np.ndarray] = []
    sources: list[int] = []
    for number, shape in enumerate(shapes):
        equal = [n for n in range(number) if shapes[n] == shape]
        if len(equal) > 0 and draw(st.booleans()):
            sources.append(sources[equal[0]])
            operands.append(operands[equal[0]])
        else:
            sources.append(number)
            operands.append(_values(seed + number, shape, draw(st.sampled_from(dtypes))))
    return Call(spec, tuple(operands), tuple(sources))


def fused_calls(**options: Any) -> st.SearchStrategy[Call]:
    """Those of the above that are one program."""
    return calls(least_operands=2, **options).filter(lambda call: call.fused)
