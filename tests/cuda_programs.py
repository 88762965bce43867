"""Programs to test the CUDA backend with, and what their results must be."""

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import opt_einsum

from jaxmagma.primitives import calculus
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import Constant, Contract, ElementProgram, Input, Map, Output


Array = np.ndarray[Any, Any]


def random(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
    x = rng.uniform(-1, 1, tuple(shape))
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.uniform(-1, 1, tuple(shape))
    return np.asarray(x, dtype)


def contraction(
    spec: str,
    sizes: dict[str, int],
    batch: str = "e",
    dtype: str = "float64",
    constant: bool = True,
    sign: int = 0,
) -> ElementProgram:
    """An einsum; operands without batch axes are constants, equal ones if their shapes are.

    With a ``sign`` they are so many times their own mirror images.
    """
    terms, output = spec.split("->")
    builder = Builder(len(batch))
    rng = np.random.default_rng(0)
    shared: dict[tuple[int, ...], int] = {}
    values = []
    for labels in terms.split(","):
        axes = tuple(batch.index(x) for x in labels if x in batch)
        tile = "".join(x for x in labels if x not in batch)
        shape = tuple(sizes[x] for x in tile)
        if axes:
            number = builder.input(Input(axes, shape, np.dtype(dtype)))
        elif shape in shared:
            number = shared[shape]
        else:
            table = random(rng, shape, dtype)
            table = table + sign * np.flip(table) if sign else table
            known = Constant(table) if constant else None
            number = shared[shape] = builder.input(Input((), shape, np.dtype(dtype), known))
        values.append((number, tile))
    result = builder.contract(values, "".join(x for x in output if x not in batch), sizes)
    kept = tuple(batch.index(x) for x in output if x in batch)
    return builder.build([Output(result, kept)]).program


def _cube(n: int, q: int) -> dict[str, int]:
    return {**dict.fromkeys("abcijk", n), **dict.fromkeys("xyz", q)}


def interpolation(p: int, **options: Any) -> ElementProgram:
    return contraction("xa,yb,zc,eabc->exyz", _cube(p + 1, p + 2), **options)


def mass(p: int, **options: Any) -> ElementProgram:
    """Also its gradient with respect to u, but for the names."""
    spec = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
    return contraction(spec, _cube(p + 1, p + 2), **options)


def mass_gradient_d(p: int, **options: Any) -> ElementProgram:
    spec = "xa,yb,zc,eabc,xi,yj,zk,eijk->exyz"
    return contraction(spec, _cube(p + 1, p + 2), **options)


def mass_gradient_b(p: int, **options: Any) -> ElementProgram:
    """One of its six terms."""
    spec = "yj,zk,exyz,xa,yb,zc,eabc,eijk->xi"
    return contraction(spec, _cube(p + 1, p + 2), **options)


def gradient(program: ElementProgram) -> ElementProgram:
    """The gradient of a program of one output with respect to all of its arguments."""
    count = len(program.arguments)
    tangent = calculus.jvp(program, [True] * count)
    assert tangent is not None
    linear = [position >= count for position in tangent.arguments]
    derived = calculus.transpose(tangent.program, linear, [True])
    assert derived is not None
    return derived.program


def chain(n: int, **options: Any) -> ElementProgram:
    spec = "xi,yj,exy,xk,yl,ekl->eij"
    return contraction(spec, dict.fromkeys("ijklxy", n), **options)


def product(m: int, n: int, k: int, **options: Any) -> ElementProgram:
    return contraction("eij,ejk->eik", {"i": m, "j": k, "k": n}, **options)


def several_outputs() -> ElementProgram:
    """A sum of products of one interpolation: an energy, its terms, and their sum over elements."""
    builder = Builder(1)
    dtype = np.dtype("float64")
    b = Constant(random(np.random.default_rng(3), (4, 3), dtype))
    basis = builder.input(Input((), (4, 3), dtype, b))
    u, v = (builder.input(Input((0,), (3, 3), dtype)) for _ in range(2))
    sizes = dict.fromkeys("xy", 4) | dict.fromkeys("ab", 3)
    at_points = [
        builder.contract([(basis, "xa"), (basis, "yb"), (w, "ab")], "xy", sizes) for w in (u, v)
    ]
    both = builder.map("add", *at_points)
    energy = builder.contract([(both, "xy"), (both, "xy")], "", sizes)
    outputs = [Output(both, (0,)), Output(energy, (0,)), Output(both, ()), Output(u, (0,))]
    return builder.build(outputs).program


def arguments(program: ElementProgram, extents: Sequence[int], seed: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [
        random(rng, (*(extents[axis] for axis in x.batch), *x.tile), x.dtype)
        for x in program.arguments
    ]


def evaluate(program: ElementProgram, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """The outputs in extended precision, and the same sums of absolute values: the error scale."""
    wide: Any = np.clongdouble if program.dtype.kind == "c" else np.longdouble
    results = _outputs(program, [np.asarray(x, wide) for x in arrays], False)
    scales = _outputs(program, [abs(np.asarray(x, wide)) for x in arrays], True)
    return results, scales


def _outputs(program: ElementProgram, arrays: list[Array], absolute: bool) -> list[Array]:
    letters = string.ascii_uppercase
    extents = program.batch_extents([x.shape for x in arrays])
    left = iter(arrays)
    values: list[tuple[str, Array]] = []
    for operand in program.inputs:
        if operand.constant is None:
            x = next(left)
        else:
            x = operand.constant.array
            x = abs(x) if absolute else x
        values.append(("".join(letters[axis] for axis in operand.batch), x))
    for operation in program.operations:
        batch = "".join(sorted({x for n in operation.operands for x in values[n][0]}))
        if isinstance(operation, Contract):
            terms = [values[n][0] + labels for n, labels in operation.terms]
            output = batch + operation.output
            operands = [values[n][1] for n in operation.operands]
        else:
            assert isinstance(operation, Map)
            labels = operation.output
            parts = [(values[n][0] + own, values[n][1]) for n, own in operation.terms]
            shape = [extents[letters.index(x)] for x in batch] + list(operation.tile)
            aligned = [np.broadcast_to(_aligned(x, own, batch + labels), shape) for own, x in parts]
            functions: dict[str, Any] = {"add": sum, "mul": math.prod}
            made = functions[operation.function](aligned)
            values.append((batch, np.asarray(made)))
            continue
        spec = f"{','.join(terms)}->{output}"
        path = opt_einsum.contract_path(spec, *operands, optimize="dp")[0]
        made = np.einsum(spec, *operands, optimize=["einsum_path", *path])
        values.append((batch, made))
    results = []
    for out in program.outputs:
        batch, x = values[out.value]
        labels = string.ascii_lowercase[: x.ndim - len(batch)]
        kept = "".join(letters[axis] for axis in out.batch)
        inside = "".join(b for b in kept if b in batch)
        summed = np.einsum(f"{batch}{labels}->{inside}{labels}", x)
        shape = [extents[axis] for axis in out.batch] + list(summed.shape[len(inside) :])
        results.append(np.broadcast_to(_aligned(summed, inside + labels, kept + labels), shape))
    return results


def _aligned(x: Array, labels: str, wanted: str) -> Array:
    """``x`` with axes of extent 1 for the labels it lacks."""
    ordered = np.einsum(f"{labels}->{''.join(a for a in wanted if a in labels)}", x)
    shape = iter(ordered.shape)
    return ordered.reshape([next(shape) if a in labels else 1 for a in wanted])


def assert_close(program: ElementProgram, arrays: Sequence[Array], got: Sequence[Any]) -> None:
    """Within the error bound of sums of products, each rounded."""
    wanted, scales = evaluate(program, arrays)
    eps = np.finfo(program.dtype).eps
    for want, scale, have in zip(wanted, scales, got, strict=True):
        found = np.asarray(have)
        assert found.shape == want.shape and found.dtype == program.dtype
        # Rounding errors of a sum grow like the square root of its length, as a rule.
        error = abs(np.asarray(found, want.dtype) - want)
        bound = 32 * eps * scale
        assert not np.any(error > bound), float((error / np.maximum(bound, 1e-300)).max())
