"""The CUDA backend where there is no GPU: generated kernels, their machine code, and their cache.

Kernels are compiled by NVRTC for sm_90, and run on the CPU by the emulator.
JAXMAGMA_REQUIRE_NVRTC=1 makes a missing compiler an error.
"""

import importlib
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from fem_demo import basis
from jaxmagma import choices
from jaxmagma.lowering.cuda import lower, planned
from jaxmagma.lowering.cuda.kernels import MOST_STEPS
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.primitives.calculus import transpose
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Constant, ElementProgram, Input, Output
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import (
    arguments,
    assert_close,
    chain,
    contraction,
    gradient,
    interpolation,
    mass,
    mass_gradient_b,
    mass_gradient_d,
    product,
    several_outputs,
)
from tests.test_multiples import of_material


SIZES = {"a": 2, "b": 3, "c": 4, "i": 3, "j": 4, "k": 5, "l": 3, "x": 5, "y": 4, "z": 3}

# Tensor cores have pieces of 8 and of 4.
CHAINS = (*range(2, 10), 11, 12, 13, 16, 17, 20, 21, 24, 25, 28, 31, 32)
# Kernels of sweeps alone: every value of a fibre has a register of its own.
UNSPILLED: dict[str, ElementProgram] = {
    **{f"mass p={p}": mass(p) for p in range(1, 16)},
    **{f"chain n={n}": chain(n) for n in CHAINS},
    **{f"interpolation p={p}": interpolation(p) for p in (1, 4, 8)},
    **{f"gradient by D p={p}": mass_gradient_d(p) for p in (1, 3, 5, 8)},
    "mass p=3, traced basis": mass(3, constant=False),
    "mass p=3, float32": mass(3, dtype="float32"),
    "mass p=3, complex64": mass(3, dtype="complex64"),
    "mass p=3, complex128": mass(3, dtype="complex128"),
    "interpolation, two batch axes": contraction("xa,yb,efab->fexy", SIZES, "ef"),
    "gradient by B p=1": mass_gradient_b(1),
    **{f"gradient of chain n={n}": gradient(chain(n, constant=False)) for n in CHAINS if n < 25},
    **{f"gradient of mass p={p}": gradient(mass(p, constant=False)) for p in range(1, 9)},
    "rectangular product": product(7, 9, 13),
    "product, float32": product(12, 12, 12, dtype="float32"),
    "assembly": cuda_fused.assembling(3, (16, 3)),
    "narrow assembly": cuda_fused.assembling(1, (2, 1)),
}
SYMMETRIC: dict[str, ElementProgram] = {
    **{f"mass p={p}": mass(p, sign=1) for p in (4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15)},
    **{f"chain n={n}": chain(n, sign=1) for n in (5, 8, 9, 15, 16, 17, 21, 24, 27, 32)},
    "antisymmetric mass p=8": mass(8, sign=-1),
    "mass p=8, float32": mass(8, sign=1, dtype="float32"),
    "mass p=5, complex128": mass(5, sign=1, dtype="complex128"),
}

# Spec, batch axes and their extents.
EMULATED: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "mass": ("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", "e", (37,)),
    "transposed": ("xa,yb,zc,eabc->ezyx", "e", (37,)),
    "gradient by B": ("yj,zk,exyz,xa,yb,zc,eabc,eijk->xi", "e", (37,)),
    "rows": ("eij,ejk->eik", "e", (9,)),
    "both transposed": ("eji,ekj->eki", "e", (9,)),
    "dot": ("eij,eij->e", "e", (300,)),
    "matrix and vector": ("eij,ej->ei", "e", (70,)),
    "outer product": ("ei,ej->eij", "e", (70,)),
    "transposition": ("eijk->ekji", "e", (70,)),
    "sum of tiles": ("eij->ij", "e", (301,)),
    "sum of everything": ("eijk,eijk->", "e", (37,)),
    "shared weights": ("ijk,eijk->eijk", "e", (37,)),
    "two contracted": ("eabc,ebcx->eax", "e", (37,)),
    "many batch axes": ("gefij,fjk->egik", "efg", (3, 4, 5)),
    "broadcast operand": ("xa,yb,eab,fxy->efxy", "ef", (5, 7)),
    "kept and summed": ("xa,yb,eab,efxy->fxy", "ef", (5, 7)),
    "no elements": ("xa,yb,eab->exy", "e", (0,)),
    "sum of no elements": ("exy,exy->x", "e", (0,)),
    "one element": ("xa,yb,eab->exy", "e", (1,)),
}


def native() -> Any:
    """The compiled module, with a run-time compiler."""
    try:
        module = importlib.import_module("jaxmagma._cuda")
        module.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        if os.environ.get("JAXMAGMA_REQUIRE_NVRTC") == "1":
            pytest.fail(f"JAXMAGMA_REQUIRE_NVRTC=1, but {error}")
        pytest.skip(str(error))
    return module


def lowered(
    program: ElementProgram,
    extents: tuple[int, ...] = (1000,),
    even_odd: bool | None = None,
    **options: Any,
) -> Kernel:
    target = Target("cuda", "sm_90", even_odd)
    found = lower(planned(program), extents, Parameters(**options), target)
    assert isinstance(found, Kernel), found
    return found


# ---- Machine code ----------------------------------------------------------------------------


def check_registers(kernel: Kernel) -> None:
    cuda = native()
    resources = cuda.resources(cuda.compile(kernel.source, "sm_90"))
    assert resources["registers"] > 0
    assert resources["local"] == 0
    assert resources["registers"] * kernel.attributes["threads"] <= 65536


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", UNSPILLED)
def test_compiles_without_spills(name: str) -> None:
    program = UNSPILLED[name]
    extents = (100,) * program.batch_rank
    check_registers(lowered(program, extents))


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", SYMMETRIC)
def test_halves_compile_without_spills(name: str) -> None:
    kernel = lowered(SYMMETRIC[name], even_odd=True)
    assert "split_gemm" in kernel.source
    check_registers(kernel)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compiles_for_every_generation(arch: str) -> None:
    cuda = native()
    for program in (mass(2), mass_gradient_b(2), several_outputs()):
        code = cuda.compile(lowered(program).source, arch)
        assert code.startswith(b"\x7fELF") or b".target" in code


@pytest.mark.nvrtc
def test_reads_resources() -> None:
    """A kernel that must spill is seen to."""
    cuda = native()
    source = """
    extern "C" __global__ void __launch_bounds__(1024) kernel(double* x, int n) {
      double a[80];
      #pragma unroll
      for (int i = 0; i < 80; ++i) a[i] = x[i * n];
      for (int s = 0; s < n; ++s) {
        #pragma unroll
        for (int i = 0; i < 80; ++i) a[i] = a[i] * a[(i + 7) % 80] + s;
      }
      #pragma unroll
      for (int i = 0; i < 80; ++i) x[i * n] = a[i];
    }"""
    resources = cuda.resources(cuda.compile(source, "sm_90"))
    assert 16 <= resources["registers"] <= 64
    assert resources["local"] > 0


@pytest.mark.nvrtc
def test_compiler_errors_are_shown() -> None:
    cuda = native()
    with pytest.raises(RuntimeError, match="undefined_name"):
        cuda.compile('extern "C" __global__ void kernel() { undefined_name(); }', "sm_90")
    with pytest.raises(ValueError, match="sm_90"):
        cuda.compile("", "90")


@pytest.mark.nvrtc
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "full"])
@pytest.mark.parametrize("p", range(1, 9))
def test_diffusion_stays_in_registers(
    p: int, symmetric: bool, record_property: Any, x64: None
) -> None:
    """The derivatives, their product with D and the first way back are one sweep."""
    cuda = native()
    kernel = lowered(cuda_fused.diffusion(p, symmetric))
    resources = cuda.resources(cuda.compile(kernel.source, "sm_90"))
    for name in ("registers", "local"):
        record_property(name, resources[name])
    assert resources["local"] == 0
    assert resources["registers"] * kernel.attributes["threads"] <= 65536
    assert "5 sweeps" in kernel.description


@pytest.mark.nvrtc
@pytest.mark.parametrize("p", [*range(1, 9), 12])
def test_collocated_diffusion_stays_in_registers(p: int, x64: None) -> None:
    check_registers(lowered(cuda_fused.collocated_diffusion(p)))


@pytest.mark.nvrtc
@pytest.mark.parametrize("p", [*range(4, 9), 12])
def test_symmetric_diffusion_stays_in_registers(p: int, x64: None) -> None:
    program = cuda_fused.diffusion(p, tables=cuda_fused.lagrange_tables)
    check_registers(lowered(program, even_odd=True))


# ---- Source ----------------------------------------------------------------------------------


def test_source_holds_no_values() -> None:
    """Another basis of the same shape needs no other kernel; nor does a traced one."""
    sources = set()
    for constant in (True, False):
        kernel = lowered(mass(3, constant=constant))
        sources.add(kernel.source)
    other = contraction(
        "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk",
        {**dict.fromkeys("abcijk", 4), **dict.fromkeys("xyz", 5)},
    )
    sources.add(lowered(other).source)
    assert len(sources) == 1


def test_attributes_do_not_depend_on_the_number_of_elements() -> None:
    for program in (mass(2), mass_gradient_b(2)):
        some, many = (lowered(program, (n,)).attributes for n in (100, 1 << 33))
        assert some.keys() == many.keys()
        assert all(np.array_equal(some[x], many[x]) for x in some)


def test_square_products_are_compiled_ahead() -> None:
    found = lower(planned(product(8, 8, 8)), (1000,))
    assert isinstance(found, Kernel)
    assert found.target == "jaxmagma_cuda_bgemm"
    assert found.attributes == {"size": 8, "transposed": 0}
    for spec in ("eij,ekj->eik", "eji,ejk->eki"):
        found = lower(planned(contraction(spec, dict.fromkeys("ijk", 5))), (1000,))
        assert isinstance(found, Kernel) and found.attributes["transposed"] > 0
    rectangular = lower(planned(product(8, 8, 7)), (1000,))
    assert isinstance(rectangular, Kernel) and rectangular.target == "jaxmagma_cuda"


def test_declines() -> None:
    def reason(program: ElementProgram) -> str:
        found = lower(planned(program), (10,) * program.batch_rank)
        assert isinstance(found, Declined)
        return found.reason

    assert "int64" in reason(contraction("eij->eji", SIZES, dtype="int64"))
    huge = contraction("xa,yb,eab->exy", {"a": 200, "b": 200, "x": 200, "y": 200})
    assert "shared memory" in reason(huge)
    for m, n, k in ((49, 49, 49), (64, 50, 130)):
        assert "library" in reason(product(m, n, k))
    builder = Builder(2)
    u = builder.input(Input((0, 1), (3,), np.dtype("float64")))
    mixed = builder.build([Output(u, (0,)), Output(u, (1,))]).program
    assert "different batch axes" in reason(mixed)
    builder = Builder(1)
    u = builder.input(Input((0,), (3,), np.dtype("float64")))
    for _ in range(MOST_STEPS + 1):
        u = builder.map("sin", u)
    assert f"{MOST_STEPS + 1} steps" in reason(builder.build([Output(u, (0,))]).program)


def test_groups_of_threads_are_warps() -> None:
    with pytest.raises(ValueError, match="32"):
        Parameters(threads=64, groups=2)


@pytest.mark.parametrize("name", ["threads", "elements", "fetch", "ahead"])
def test_parameters_that_make_no_sense(name: str) -> None:
    options: dict[str, Any] = {name: -1}
    with pytest.raises(ValueError, match=f"{name}=-1"):
        Parameters(**options)


def test_an_owner_that_is_none() -> None:
    options: dict[str, Any] = {"owner": "warps"}
    with pytest.raises(ValueError, match="owner='warps' is none of threads, quads, panels"):
        Parameters(**options)


# ---- Numbers ---------------------------------------------------------------------------------


def emulate(
    program: ElementProgram, extents: tuple[int, ...], emulated: Path, **options: Any
) -> Kernel:
    kernel = lowered(program, extents, **options)
    arrays = arguments(program, extents)
    assert_close(program, arrays, cuda_emulator.run(kernel, program, arrays, emulated))
    return kernel


# Odd and even numbers of rows and of columns, in two directions each.
SPLIT = {
    "even from odd": {"a": 13, "x": 14, "b": 15, "y": 16},
    "odd from even": {"a": 14, "x": 13, "b": 16, "y": 17},
    "odd from odd": {"a": 13, "x": 17, "b": 17, "y": 15},
    "even from even": {"a": 14, "x": 16, "b": 16, "y": 14},
}


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", SPLIT)
def test_numbers_of_split_products(name: str, sign: int, owner: str, emulated: Path) -> None:
    """Of even and odd halves; and of the derivative, whose matrices are transposed."""
    program = contraction("xa,yb,eab->exy", SPLIT[name], sign=sign)
    transposed = transpose(program, [True], [True])
    assert transposed is not None
    for each in (program, transposed.program):
        emulate(each, (3,), emulated, owner=owner, even_odd=True)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_numbers_of_split_products_of_other_dtypes(dtype: str, sign: int, emulated: Path) -> None:
    program = mass(4, sign=sign, dtype=dtype)
    emulate(program, (5,), emulated, even_odd=True)


@pytest.mark.parametrize(
    "options",
    [
        {"owner": "quads"},
        {"owner": "quads", "fibres": 1},
        {"owner": "quads", "fibres": 3, "elements": 2, "threads": 64},
    ],
    ids=str,
)
def test_numbers_of_symmetric_matrices(options: dict[str, Any], emulated: Path) -> None:
    emulate(mass(5, sign=1), (5,), emulated, even_odd=True, **options)
    emulate(chain(17, sign=-1), (5,), emulated, even_odd=True, **options)


@pytest.mark.parametrize(("p", "owner"), [(4, "threads"), (7, "quads")])
def test_numbers_of_split_fused_products(p: int, owner: str, emulated: Path, x64: None) -> None:
    """Values and derivatives of one fibre share its even and odd parts."""
    program = cuda_fused.diffusion(p, tables=cuda_fused.lagrange_tables)
    kernel = lowered(program, owner=owner, even_odd=True)
    arrays = arguments(program, (3,))
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_split_gathered_products(
    sign: int, owner: str, emulated: Path, x64: None
) -> None:
    program = cuda_fused.gathered_symmetric(sign, 50)
    kernel = lowered(program, (5,), owner=owner, even_odd=True)
    arrays = cuda_fused.indexed(program, 5)
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("name", ["values", "slopes", "Bernstein"])
def test_rounding_of_split_products(name: str, owner: str, emulated: Path) -> None:
    """Within the bound of ``parity``, whatever the sizes of the values of a fibre."""
    n, q = 14, 15
    points = basis.gauss_legendre(q)[0]
    values, slopes = basis.lagrange(basis.gauss_lobatto(n), points)
    table = {"values": values, "slopes": slopes, "Bernstein": basis.bernstein(n - 1, points)}[name]
    builder = Builder(1)
    matrix = builder.input(Input((), (q, n), table.dtype, Constant(table)))
    u = builder.input(Input((0,), (n,), table.dtype))
    result = builder.contract([(matrix, "xa"), (u, "a")], "x", {"x": q, "a": n})
    program = builder.build([Output(result, (0,))]).program
    kernel = lowered(program, owner=owner, even_odd=True)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(200, n)) * 10.0 ** rng.integers(-8, 9, (200, n))
    (got,) = cuda_emulator.run(kernel, program, [x], emulated)
    want = np.einsum("xa,ea->ex", table.astype(np.longdouble), x)
    size = np.abs(table)
    size = np.maximum(size, np.flip(size))
    rows, columns = (np.maximum(a, np.flip(a)) for a in (size.max(1), size.max(0)))
    largest = np.minimum(rows[:, None], columns)
    bound = (n / 2 + 4 + n + q) * np.finfo(float).eps * np.abs(x) @ largest.T
    assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["odd from odd", "even from even"])
def test_what_is_not_finite_stays_so(name: str, sign: int, owner: str, emulated: Path) -> None:
    """At every place of a fibre, and in all of the result; not in other elements."""
    sizes = SPLIT[name]
    program = contraction("xa,ea->ex", sizes, sign=sign)
    kernel = lowered(program, owner=owner, even_odd=True)
    n = sizes["a"]
    for value in (np.inf, -np.inf, np.nan):
        (u,) = arguments(program, (2 * n + 1,))
        for k in range(n):
            u[k, k] = value
            u[n + k, [k, n - 1 - k]] = value, -value
        (got,) = cuda_emulator.run(kernel, program, [u], emulated)
        assert not np.isfinite(got[: 2 * n]).any()
        assert np.isfinite(got[2 * n]).all()


def test_what_is_split() -> None:
    """Constants that are symmetric, if there is much to multiply; another has another kernel."""
    plain = lowered(mass(6)).source
    split = lowered(mass(6, sign=1)).source
    assert "split_gemm" in split
    assert lowered(mass(6, sign=1), even_odd=True).source == split
    # Few operations for each value; and tensor cores, with halves that are no pieces of 8.
    for program, owner in ((chain(6, sign=1), None), (mass(11, sign=1), "quads")):
        whole = lowered(program, owner=owner, even_odd=False).source
        assert lowered(program, owner=owner).source == whole
        assert lowered(program, owner=owner, even_odd=True).source != whole
    assert lowered(mass(6, sign=-1), even_odd=True).source not in (plain, split)
    assert lowered(mass(6), even_odd=True).source == plain
    assert lowered(mass(6, sign=1, constant=False), even_odd=True).source == plain
    assert lowered(mass(6, sign=1), even_odd=False).source == plain
    off, on = (Target("cuda", "sm_90", even_odd=x) for x in (False, True))
    made = lower(planned(mass(6, sign=1)), (1000,), Parameters(), off)
    assert isinstance(made, Kernel) and made.source == plain
    made = lower(planned(chain(6, sign=1)), (1000,), Parameters(), on)
    assert isinstance(made, Kernel) and "split_gemm" in made.source


def has_shared_operand(name: str) -> bool:
    spec, batch, _ = EMULATED[name]
    return not all(set(term) & set(batch) for term in spec.split("->")[0].split(","))


@pytest.mark.parametrize("name", EMULATED)
def test_numbers(name: str, emulated: Path) -> None:
    spec, batch, extents = EMULATED[name]
    emulate(contraction(spec, SIZES, batch), extents, emulated)


@pytest.mark.parametrize("name", [x for x in EMULATED if has_shared_operand(x)])
def test_numbers_of_traced_operands(name: str, emulated: Path) -> None:
    spec, batch, extents = EMULATED[name]
    emulate(contraction(spec, SIZES, batch, constant=False), extents, emulated)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_numbers_of_other_dtypes(dtype: str, emulated: Path) -> None:
    emulate(mass(2, dtype=dtype), (13,), emulated)
    emulate(product(5, 6, 7, dtype=dtype), (13,), emulated)


def test_numbers_of_several_outputs(emulated: Path) -> None:
    emulate(several_outputs(), (29,), emulated)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 64},
        {"threads": 32, "groups": 4},
        {"threads": 32, "groups": 2, "elements": 3},
        {"owner": "quads", "fetch": 0},
        {"owner": "quads", "fetch": 1, "elements": 3, "threads": 64},
        {"min_blocks": 2},
        {"elements": 3, "threads": 32},
        {"owner": "quads"},
        {"owner": "quads", "threads": 96},
        {"owner": "quads", "threads": 32, "groups": 2},
        {"owner": "quads", "fibres": 1},
        {"owner": "quads", "fibres": 3, "elements": 2, "threads": 64},
        {"owner": "quads", "ahead": True, "fetch": 2},
        {"owner": "quads", "ahead": True, "fetch": 1, "threads": 32, "groups": 2, "elements": 3},
        {"owner": "quads", "fetch": 2},
        {"owner": "quads", "fetch": 2, "elements": 3, "threads": 64},
    ],
    ids=str,
)
def test_numbers_do_not_depend_on_parameters(options: dict[str, Any], emulated: Path) -> None:
    for extents in ((1,), (23,)):
        emulate(mass(2), extents, emulated, **options)
        emulate(chain(4), extents, emulated, **options)


# Many elements of one warp, which leave no room for tiles beside those that they are made from.
CROWDED: dict[str, Any] = {"owner": "threads", "threads": 32, "elements": 48}


def test_numbers_of_tiles_in_place(emulated: Path) -> None:
    """Several of them, and of packs of fibres; a multiprocessor would have few warps otherwise."""
    for program in (mass(2), chain(4)):
        few, many = (
            lowered(program, **{**CROWDED, "elements": n}).attributes["shared_bytes"]
            for n in (8, 48)
        )
        assert many < 4 * few
        for options in ({}, {"fibres": 4}):
            emulate(program, (61,), emulated, **CROWDED, **options)


def test_numbers_of_tiles_without_padding(emulated: Path) -> None:
    """So many elements have no other room."""
    program, options = mass(2), {**CROWDED, "elements": 230}
    tile = 4 * 4 * 3
    assert lowered(program, **options).attributes["shared_bytes"] == 230 * tile * 8
    emulate(program, (241,), emulated, **options)


@pytest.mark.parametrize("program", [chain(9), gradient(chain(5))], ids=str)
def test_operands_come_ahead(program: ElementProgram, emulated: Path) -> None:
    """Of slices that are whole, ragged or none, fetched for one element or for several."""
    for options in ({"elements": 1}, {"elements": 3, "threads": 64}):
        for elements in (0, 1, 23):
            emulate(program, (elements,), emulated, owner="quads", ahead=True, fetch=2, **options)


# Rows, columns and terms of a product that is summed over elements: none, some or all are whole
# pieces of what tensor cores multiply.
SUMMED_PRODUCTS = [
    ("ekm,enk->nm", 1, 1, 1),
    ("emk,ekn->mn", 7, 9, 5),
    ("ekm,enk->nm", 8, 8, 4),
    ("emk,ekn->mn", 17, 1, 3),
    ("ekm,enk->nm", 9, 17, 7),
    ("emk,ekn->mn", 16, 24, 1),
]


@pytest.mark.parametrize(("spec", "rows", "columns", "terms"), SUMMED_PRODUCTS)
def test_numbers_of_products_summed_over_elements(
    spec: str, rows: int, columns: int, terms: int, emulated: Path
) -> None:
    program = contraction(spec, {"m": rows, "n": columns, "k": terms})
    assert "ProductSum<" in lowered(program, owner="quads").source
    for elements in (0, 1, 23):
        emulate(program, (elements,), emulated, owner="quads")
    for options in ({"threads": 64, "elements": 3}, {"threads": 96, "elements": 5}):
        emulate(program, (23,), emulated, owner="quads", **options)


def test_numbers_of_sums_that_registers_have_no_room_for(emulated: Path) -> None:
    program = contraction("emk,ekn->mn", {"m": 40, "n": 33, "k": 3})
    assert "products summed" not in lowered(program).description
    for elements in (1, 13):
        emulate(program, (elements,), emulated)


@pytest.mark.parametrize(
    ("rows", "columns", "terms", "dtype"),
    [
        (1, 1, 1, "float64"),
        (5, 8, 5, "float64"),
        (8, 3, 4, "float32"),
        (7, 3, 5, "complex64"),
        (4, 5, 33, "complex128"),
    ],
)
def test_numbers_of_whole_sums_of_products(
    rows: int, columns: int, terms: int, dtype: str, emulated: Path
) -> None:
    program = contraction("emk,ekn->mn", {"m": rows, "n": columns, "k": terms}, dtype=dtype)
    assert "ProductSum<" not in lowered(program).source
    assert "products summed" in lowered(program).description
    for elements in (0, 1, 23):
        emulate(program, (elements,), emulated)
    for options in ({"threads": 32, "elements": 3}, {"threads": 96, "elements": 5}):
        emulate(program, (23,), emulated, **options)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_numbers_of_products_of_other_dtypes_summed_over_elements(
    dtype: str, emulated: Path
) -> None:
    program = contraction(
        "emkl,elkn->mn", dict(zip("mnkl", (9, 17, 3, 2), strict=True), e=1), dtype=dtype
    )
    assert "ProductSum<" in emulate(program, (13,), emulated).source


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("program", [chain(2), chain(9), mass(2)], ids=str)
def test_numbers_of_gradients(program: ElementProgram, owner: str, emulated: Path) -> None:
    for elements in (1, 13):
        emulate(gradient(program), (elements,), emulated, owner=owner)


@pytest.mark.parametrize("n", [25, 26])
def test_wide_sums(n: int, emulated: Path) -> None:
    program = gradient(chain(n, constant=False))
    assert f"ProductSum<double, {n}, {n}>" in emulate(program, (3,), emulated).source


@pytest.mark.parametrize("sizes", [{"m": 3, "n": 2, "k": 5}, {"m": 9, "n": 17, "k": 5}], ids=str)
def test_only_terms_that_are_there_are_summed(sizes: dict[str, int], emulated: Path) -> None:
    """Lanes without a term read one of another element, which may be infinite, and add nothing."""
    program = contraction("emk,ekn->mn", sizes)
    for element in (0, 6):
        left, right = arguments(program, (7,))
        left[element, 1, 2] = np.inf
        right[element, 3, 1] = np.nan
        want = np.einsum("emk,ekn->mn", left, right)
        for owner in ("threads", "quads"):
            kernel = lowered(program, (7,), elements=4, owner=owner)
            (got,) = cuda_emulator.run(kernel, program, [left, right], emulated)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def test_numbers_of_sums_of_different_kinds(emulated: Path) -> None:
    """Of products and of tiles, in one kernel; a product that is needed for itself is a tile."""
    builder = Builder(1)
    u, v = (builder.input(Input((0,), (5, 6), np.dtype("float64"))) for _ in range(2))
    sizes = {"m": 5, "n": 5, "k": 6}
    one = builder.contract([(u, "mk"), (v, "nk")], "mn", sizes)
    other = builder.contract([(u, "nk"), (u, "mk")], "mn", sizes)
    third = builder.contract([(v, "mk"), (v, "nk")], "mn", sizes)
    both = builder.pointwise("add", [(one, "mn"), (other, "nm")], "mn", {"m": 5, "n": 5})
    outputs = [Output(both, ()), Output(u, ()), Output(third, ()), Output(third, (0,))]
    program = builder.build(outputs).program
    for owner in ("threads", "quads"):
        for elements in (1, 31):
            emulate(program, (elements,), emulated, owner=owner)


def inverse(x: Any) -> Any:
    """With a power that a step makes, of constants that are no arrays."""
    return jax.grad(lambda y: jnp.sum(jax.grad(lambda z: jnp.sum(z**-1.0))(y)))(x)


FUSED: dict[str, Any] = {
    "known scalars": lambda: cuda_fused.program_of(inverse, (3, 4), dtype="float64"),
    "diffusion": lambda: cuda_fused.diffusion(2),
    "diffusion, all of D": lambda: cuda_fused.diffusion(1, symmetric=False),
    "diffusion, float32": lambda: cuda_fused.diffusion(2, dtype="float32"),
    "diffusion with points at the nodes": lambda: cuda_fused.collocated_diffusion(3),
    "the same, complex": lambda: cuda_fused.collocated_diffusion(2, "complex64"),
    "energy gradient": lambda: cuda_fused.hyperelastic(1),
    "components of vectors": lambda: normal_form(cuda_fused.stretches(2))[0],
    "algebra at points": lambda: cuda_fused.pointwise_algebra(3),
    "movement": cuda_fused.moving,
    "movement, float32": lambda: cuda_fused.moving("float32"),
    "sums": cuda_fused.sums,
    "sums, complex": lambda: cuda_fused.sums("complex64"),
    "matrices": lambda: cuda_fused.matrices(4, 5, 3),
    "matrices with other rows, float32": lambda: cuda_fused.matrices(5, 3, 2, "float32", rows=6),
    "matrices by strain matrices": lambda: normal_form(
        cuda_fused.program_of(of_material, (2, 2), (3, 3), dtype="float64")
    )[0],
    "matrices of many nodes": lambda: cuda_fused.matrices(3, 9, 2),
    "matrices of many nodes, float32": lambda: cuda_fused.matrices(3, 9, 2, "float32", rows=11),
    "products of tiles": lambda: cuda_fused.products_of_tiles(5, 5),
    "products of larger tiles": lambda: cuda_fused.products_of_tiles(3, 13),
    "products of larger tiles, float32": lambda: cuda_fused.products_of_tiles(5, 9, "float32"),
    "products of tiles, complex": lambda: cuda_fused.products_of_tiles(5, 5, "complex64"),
}


@pytest.fixture
def x64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "options",
    [{**CROWDED, "elements": 24}, {"owner": "threads"}, {"owner": "quads"}],
    ids=["in place", "threads", "quads"],
)
@pytest.mark.parametrize("name", FUSED)
def test_numbers_of_fused_functions(
    name: str, options: dict[str, Any], emulated: Path, x64: None
) -> None:
    program = FUSED[name]()
    arrays = arguments(program, (11,))
    kernel = lowered(program, (11,), **options)
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize(
    "options", [{**CROWDED, "elements": 8}, {"owner": "quads"}], ids=["threads", "quads"]
)
def test_numbers_of_the_gradient_of_a_collocated_operator(
    options: dict[str, Any], emulated: Path, x64: None
) -> None:
    """Sums over elements read tiles that others take the place of."""
    program = gradient(cuda_fused.collocated_diffusion(2, constant=False))
    arrays = arguments(program, (7,))
    kernel = lowered(program, (7,), **options)
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("components", [1, 3])
def test_numbers_of_gathered_vectors(
    components: int, owner: str, emulated: Path, x64: None
) -> None:
    program = cuda_fused.gathering(components, 50)
    arrays = cuda_fused.indexed(program, 13)
    kernel = lowered(program, (13,), owner=owner)
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("elements", [1, 13])
@pytest.mark.parametrize(
    ("components", "options"),
    [
        (3, {"threads": 32, "elements": 2}),
        (3, {"threads": 32, "groups": 2, "elements": 1}),
        (1, {"owner": "quads", "elements": 3}),
    ],
    ids=str,
)
def test_gathered_vectors_come_ahead(
    components: int, options: dict[str, Any], elements: int, emulated: Path, x64: None
) -> None:
    """Two blocks share the slices: what is there of one is replaced by what is after the next."""
    program = cuda_fused.gathering(components, 50)
    arrays = cuda_fused.indexed(program, elements)
    kernel = lowered(program, (elements,), ahead=True, **options)
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("options", [{}, {"owner": "quads"}, {"ahead": True}], ids=str)
def test_gathers_stay_in_their_vectors(options: dict[str, Any], emulated: Path, x64: None) -> None:
    """An index that is none of the vector's finds zeros, as a negative one does."""
    program = cuda_fused.gathering(3, 10)
    kernel = lowered(program, (13,), **options)
    vector, index = cuda_fused.indexed(program, 13)
    beyond = np.random.default_rng(0).choice([-7, 10, 11, 2**31 - 1, -(2**31)], index.shape)
    chosen = np.random.default_rng(1).uniform(size=index.shape) < 0.3
    got, wanted = (
        cuda_emulator.run(kernel, program, [vector, places.astype(np.int32)], emulated)
        for places in (np.where(chosen, beyond, index), np.where(chosen, -1, index))
    )
    for one, another in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("elements", [1, 7])
def test_what_meets_gathered_values_comes_ahead(elements: int, emulated: Path, x64: None) -> None:
    program = cuda_fused.gathered_mass(200)
    kernel = lowered(program, (elements,), owner="quads", threads=64, fetch=1)
    rng = np.random.default_rng(elements)
    places = rng.integers(-1, 200, (elements, 9, 9)).astype(np.int32)
    weights = rng.uniform(-1, 1, (elements, 17, 17))
    arrays: list[np.ndarray[Any, Any]] = [rng.uniform(-1, 1, 200), places, weights]
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("widths", [(8,), (1,), (2, 1), (1, 1), (16, 3)])
@pytest.mark.parametrize("components", [1, 3])
def test_numbers_of_assembly(
    components: int, widths: tuple[int, ...], emulated: Path, x64: None
) -> None:
    program = cuda_fused.assembling(components, widths)
    arrays = cuda_fused.indexed(program, 143)
    kernel = lowered(program, (143,))
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("size", [13, 16, 17, 25, 32])
def test_numbers_of_tensor_cores(size: int, constant: bool, emulated: Path) -> None:
    """Odd sizes have pieces of matrices that are not full."""
    program = chain(size, constant=constant)
    emulate(program, (5,), emulated, owner="quads")


def test_infinity_stays_in_its_line(emulated: Path) -> None:
    """What pads a fibre meets zeros of the matrix, and must not make a NaN of an infinity."""
    program = interpolation(4)
    (u,) = arguments(program, (3,))
    u[1, 2, 3, 4] = np.inf
    kernel = lowered(program, (3,), owner="quads")
    (got,) = cuda_emulator.run(kernel, program, [u], emulated)
    assert np.isfinite(got[[0, 2]]).all()
    (b,) = [x.constant.array for x in program.inputs if x.constant is not None]
    want = np.einsum("xa,yb,zc,abc->xyz", b, b, b, u[1], optimize=False)
    with np.errstate(invalid="ignore"):
        steps = np.einsum("xa,abc->xbc", b, u[1])
        steps = np.einsum("yb,xbc->xyc", b, steps)
        steps = np.einsum("zc,xyc->xyz", b, steps)
    assert not np.isfinite(want).any()
    np.testing.assert_array_equal(got[1], steps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_of_every_function(dtype: str, emulated: Path, x64: None) -> None:
    program = cuda_fused.every_function(dtype)
    kernel = lowered(program, (21,))
    arrays = cuda_fused.special(program, (21,))
    got = cuda_emulator.run(kernel, program, arrays, emulated)
    cuda_fused.assert_same(program, arrays, got)


# ---- The cache -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.mark.nvrtc
def test_cache_keeps_machine_code(cache: Path) -> None:
    cuda = native()
    source = lowered(mass(1)).source
    code = cuda.specialise(source, "sm_90")
    (file,) = cache.iterdir()
    assert file.name == cuda.cache_key(source, "sm_90") + ".cubin"
    assert file.read_bytes().endswith(code)
    before = file.stat()
    assert cuda.specialise(source, "sm_90") == code
    assert file.stat().st_ino == before.st_ino
    cuda.specialise(source, "sm_80")
    cuda.specialise(source + "\n", "sm_90")
    assert len(list(cache.iterdir())) == 3


@pytest.mark.nvrtc
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not ours"])
def test_cache_rebuilds_damaged_entries(cache: Path, damage: str) -> None:
    cuda = native()
    source = lowered(mass(1)).source
    code = cuda.specialise(source, "sm_90")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(
        {
            "truncated": whole[:-1],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
            "not ours": code,
        }[damage]
    )
    assert cuda.specialise(source, "sm_90") == code
    assert file.read_bytes() == whole


@pytest.mark.nvrtc
def test_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = native()
    source = lowered(mass(1)).source
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    (tmp_path / "file").write_text("")
    for folder in (closed / "kernels", tmp_path / "file" / "kernels", Path("/proc/nowhere")):
        monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(folder))
        assert cuda.specialise(source, "sm_90").startswith(b"\x7fELF")
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    assert cuda.specialise(source, "sm_90").startswith(b"\x7fELF")


@pytest.mark.nvrtc
def test_cache_shared_by_threads_and_processes(cache: Path) -> None:
    cuda = native()
    source = lowered(mass(1)).source
    code = (
        "import sys\nfrom jaxmagma import _cuda\n"
        "code = [_cuda.specialise(sys.argv[1], 'sm_90') for _ in range(3)]\n"
        "assert len(set(code)) == 1"
    )
    command = [sys.executable, "-P", "-c", code, source]
    processes = [subprocess.Popen(command) for _ in range(4)]
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(cuda.specialise(source, "sm_90")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in processes] == [0] * 4
    assert len(set(results)) == 1
    (file,) = cache.iterdir()
    assert file.read_bytes().endswith(results[0])


@pytest.mark.nvrtc
def test_threads_that_want_one_kernel_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = native()
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    source = lowered(mass(3)).source

    def seconds(threads: int) -> float:
        """Of processors, for as many threads that begin together."""
        barrier = threading.Barrier(threads)
        found: list[bytes] = []

        def work() -> None:
            barrier.wait()
            found.append(cuda.specialise(source, "sm_90"))

        start = time.process_time()
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(set(found)) == 1 and len(found) == threads
        return time.process_time() - start

    seconds(1)  # the compiler is loaded
    assert seconds(8) < 4 * seconds(1)


@pytest.mark.nvrtc
def test_kernels_are_compiled_when_they_are_lowered(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native()
    monkeypatch.setattr(choices, "architecture", lambda platform: "sm_90")

    def lower_another(folder: str) -> None:
        monkeypatch.setenv("JAXMAGMA_CACHE_DIR", folder)
        function = jax.jit(lambda b, u: jm.einsum("xa,yb,eab->exy", b, b, u))
        arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 3), (1000, 3, 3))]
        function.trace(*arrays).lower(lowering_platforms=("cuda",))

    lower_another("off")  # nobody would find what is compiled
    lower_another(str(cache))
    began = time.monotonic()
    while not list(cache.glob("*.cubin")):
        assert time.monotonic() < began + 60, "nobody compiles it"
        time.sleep(0.1)
