"""Plans with every kind of instruction, for ``cpu_plans.cc``:  python -m tests.cpu_plans FILE"""

import sys
from collections.abc import Iterator

import numpy as np

from jaxmagma.builder import Builder
from jaxmagma.lowering.cpu import encode, planned
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.program import Constant, ElementProgram, Input, Output
from tests.test_cpu import einsum_program, point_matrix_program


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
    index = np.array([[0, 2], [1, -1], [2, 2]], np.int32)
    builder = Builder(1)
    vector = builder.input(Input((), (3, 2), kind))
    at = builder.input(Input((0,), (2,), whole))
    a = builder.input(Input((0,), (2, 3), kind))
    s = builder.map("mul", *(builder.input(Input((), (2,), kind)) for _ in range(2)))
    found = builder.index(builder.gather(vector, at, Constant(index)), 1, 1)
    sizes = {"i": 2, "j": 3}
    part = builder.index(a, 1, 2)
    total = builder.map("add", builder.map("mul", found, part), builder.index(a, 1, 0))
    total = builder.map("sub", total, s)
    wide = builder.pointwise("sub", [(total, "i"), (a, "ij")], "ij", sizes)
    outputs = [Output(x, (0,)) for x in (builder.stack([total, part], 1), wide, s)]
    return builder.build([*outputs, Output(builder.contract([(wide, "ij")], "j", sizes), ())]).program


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
