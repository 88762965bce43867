"""Programs to test the CPU backend with, among them some of every kind of instruction.

``python -m tests.cpu_programs FILE`` writes the plans of the latter for ``cpu_plans.cc``.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmagma.lowering.cpu import encode, planned
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import Constant, ElementProgram, Input, Output


Array = np.ndarray[Any, Any]


def einsum_program(
    spec: str, batch: str, operands: Sequence[Array], constants: Sequence[int] = ()
) -> tuple[ElementProgram, tuple[Array, ...]]:
    """The program of an einsum whose batch axes are the labels ``batch``, and its arguments.

    Operands that are the same array, and have no batch axes, become one input.  Batch labels come
    first in every term.
    """
    terms, output = spec.split("->")
    builder = Builder(len(batch))
    sizes: dict[str, int] = {}
    numbers: dict[int, int] = {}
    values: list[tuple[int, str]] = []
    arguments: list[Array] = []
    for position, (labels, x) in enumerate(zip(terms.split(","), operands, strict=True)):
        sizes |= dict(zip(labels, x.shape, strict=True))
        axes = tuple(batch.index(label) for label in labels if label in batch)
        tile = "".join(label for label in labels if label not in batch)
        if axes or id(x) not in numbers:
            constant = Constant(x) if position in constants else None
            numbers[id(x)] = builder.input(Input(axes, x.shape[len(axes) :], x.dtype, constant))
            if constant is None:
                arguments.append(x)
        values.append((numbers[id(x)], tile))
    tile = "".join(label for label in output if label not in batch)
    kept = tuple(batch.index(label) for label in output if label in batch)
    value = builder.contract(values, tile, sizes)
    return builder.build([Output(value, kept)]).program, tuple(arguments)


def point_matrix_program(
    rows: int, points: int, symmetric: bool, dtype: str
) -> tuple[ElementProgram, np.ndarray]:
    """From ``d`` (entries, points), ``b`` (rows, points, 2) and ``u`` (2,) to ``b^T D b u``.

    Also, for every row and column of D, which entry of ``d`` it is.
    """
    number = np.arange(rows * rows).reshape(rows, rows)
    if symmetric:
        number = np.unique(np.minimum(number, number.T), return_inverse=True)[1]
        number = number.reshape(rows, rows)
    builder = Builder(1)
    count = int(np.max(number)) + 1
    d = builder.input(Input((0,), (count, points), np.dtype(dtype)))
    b = [builder.input(Input((), (points, 2), np.dtype(dtype))) for _ in range(rows)]
    u = builder.input(Input((0,), (2,), np.dtype(dtype)))
    sizes = {"x": points, "a": 2}
    vector = [builder.contract([(x, "xa"), (u, "a")], "x", sizes) for x in b]
    entries = [builder.index(d, 0, n) for n in range(count)]
    flux = []
    for row in number:
        terms = [builder.map("mul", entries[n], x) for n, x in zip(row, vector, strict=True)]
        flux.append(functools.reduce(lambda x, y: builder.map("add", x, y), terms))
    parts = [
        builder.contract([(x, "xa"), (y, "x")], "a", sizes) for x, y in zip(b, flux, strict=True)
    ]
    return builder.build([Output(builder.sum(parts), (0,))]).program, number


_SIZES = dict.fromkeys("ijk", 5) | dict.fromkeys("xyab", 3) | {"e": 2, "f": 2}


def _einsum(
    spec: str, batch: str, dtype: str, constants: tuple[int, ...] = (), **sizes: int
) -> ElementProgram:
    terms = spec.split("->")[0].split(",")
    lengths = _SIZES | sizes
    operands = [np.ones([lengths[label] for label in term], dtype) for term in terms]
    return einsum_program(spec, batch, operands, constants)[0]


def _expression(dtype: str) -> ElementProgram:
    """Windows, collected operands, fills, gathers, and functions of what all elements share."""
    kind, whole = np.dtype(dtype), np.dtype(np.int32)
    builder = Builder(1)
    vector = builder.input(Input((), (3, 2), kind))
    at = builder.input(Input((0,), (2,), whole))
    a = builder.input(Input((0,), (2, 3), kind))
    s = builder.map("mul", *(builder.input(Input((), (2,), kind)) for _ in range(2)))
    found = builder.index(builder.gather(vector, at), 1, 1)
    sizes = {"i": 2, "j": 3}
    part = builder.index(a, 1, 2)
    total = builder.map("add", builder.map("mul", found, part), builder.index(a, 1, 0))
    total = builder.map("sub", total, s)
    wide = builder.pointwise("sub", [(total, "i"), (a, "ij")], "ij", sizes)
    outputs = [Output(x, (0,)) for x in (builder.stack([total, part], 1), wide, s)]
    return builder.build(
        [*outputs, Output(builder.contract([(wide, "ij")], "j", sizes), ())]
    ).program


def programs() -> Iterator[ElementProgram]:
    for dtype in ("float32", "float64", "complex64", "complex128", "float16"):
        yield _einsum("xi,exi,eij->exj", "e", dtype)
        yield _einsum("xa,yb,eab->exy", "e", dtype, (0, 1))
        yield _einsum("exi,exi,exi->xi", "e", dtype)
        yield _einsum("efij,fjk->eik", "ef", dtype)
        yield _einsum("eij->ji", "e", dtype)
        yield _expression(dtype)
        if dtype != "float16":
            yield point_matrix_program(2, 3, True, dtype)[0]
            yield point_matrix_program(3, 5, False, dtype)[0]
    for dtype in ("float32", "float64"):
        yield _einsum("eij,ekj->eik", "e", dtype)
        yield _einsum("eij,ejk->eik", "e", dtype, k=19)
        yield _einsum("ij,ejk->eik", "e", dtype, i=8, j=8, k=8)


def write(name: str) -> None:
    with open(name, "wb") as file:
        for program in programs():
            found = encode(planned(program))
            assert isinstance(found, Kernel), found
            for part in (found.attributes["plan"], found.attributes["constants"]):
                np.array([part.size, *part], np.int64).tofile(file)


if __name__ == "__main__":
    write(sys.argv[1])
