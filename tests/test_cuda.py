"""The CUDA backend on a GPU: every kind of program, odd sizes, sums, CUDA graphs, the cache.

Programs are lowered and called here directly, whatever the gain; the last section goes through
``jm.einsum``.  The reference is numpy in extended precision.
"""

import functools
import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import native
from jaxmagma.lowering import cuda as backend
from jaxmagma.lowering.cuda import planned
from jaxmagma.lowering.cuda.parameters import Owner, Parameters
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans import factoring
from jaxmagma.plans.order import Middle
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram
from tests import cuda_fused
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


pytestmark = pytest.mark.gpu

SIZES = {"a": 2, "b": 3, "c": 4, "i": 3, "j": 4, "k": 5, "l": 3, "x": 5, "y": 4, "z": 3}

# Neither a multiple of the elements of a block, nor less than one block.
ELEMENTS = 1013

SPECS = [
    "xa,yb,zc,eabc->ezyx",
    "eij,ejk->eik",
    "eji,ekj->eki",
    "eij,eij->e",
    "eij,ej->ei",
    "ei,ej->eij",
    "eijk->ekji",
    "eij->e",
    "eij->ij",
    "ei,ei->",
    "eijk,ejkl->il",
    "ijk,eijk->eijk",
    "ijk,eijk->e",
    "eabc,ebcx->eax",
    "xa,eabc,exbc->e",
    "i,ej->eij",
    "xa,yb,zc,eabc,exyz->xa",
]

# Of these there are kernels, but XLA is as fast.
MOVES = ["eijk->ekji"]

SEVERAL_BATCH_AXES = [
    ("xa,yb,efab->efxy", (50, 41)),
    ("xa,yb,feab->efxy", (50, 41)),
    ("xa,yb,eab,fxy->efxy", (50, 41)),
    ("xa,yb,eab,efxy->fxy", (50, 41)),
    ("xa,yb,eab,efxy->exy", (50, 41)),
    ("xa,eab,fb->efx", (50, 41)),
    ("eab,fb->ef", (50, 41)),
    ("efij,fgjk->egik", (20, 7, 31)),
    ("gefij,fjk->egik", (20, 7, 31)),
]


def lower(
    plan: Plan,
    extents: tuple[int, ...],
    parameters: Parameters | None = None,
    even_odd: bool | None = None,
) -> Kernel | Declined:
    """The kernel for this machine's GPU."""
    target = Target.here("cuda")
    if even_odd is not None:
        target = replace(target, even_odd=even_odd)
    return backend.lower(plan, extents, parameters, target)


def call(kernel: Kernel, program: ElementProgram, extents: Sequence[int]) -> Any:
    """A jitted function of the program's arguments."""
    native.load("cuda")
    shapes = program.output_shapes(tuple(extents))
    results = [jax.ShapeDtypeStruct(shape, program.dtype) for shape in shapes]
    scratch = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kernel.workspace]
    function = jax.ffi.ffi_call(kernel.target, [*results, *scratch])
    return jax.jit(lambda *x: function(*x, **kernel.attributes)[: len(results)])


def run(
    program: ElementProgram,
    extents: Sequence[int],
    arrays: Sequence[Any],
    parameters: Parameters | None = None,
    even_odd: bool | None = None,
) -> list[jax.Array]:
    kernel = lower(planned(program), tuple(extents), parameters, even_odd)
    assert isinstance(kernel, Kernel), kernel
    results: list[jax.Array] = call(kernel, program, extents)(*arrays)
    return results


def check(
    program: ElementProgram,
    *extents: int,
    parameters: Parameters | None = None,
    even_odd: bool | None = None,
) -> list[jax.Array]:
    arrays = arguments(program, extents)
    got = run(program, extents, arrays, parameters, even_odd)
    assert_close(program, arrays, got)
    return got


# ---- Numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [*range(1, 9), 11, 15])
def test_mass(p: int) -> None:
    check(mass(p), 101)
    check(mass(p, constant=False), 101)


@pytest.mark.parametrize("n", [*range(1, 17), 20, 27, 32])
def test_chain(n: int) -> None:
    check(chain(n), ELEMENTS)


@pytest.mark.parametrize("owner", [None, "quads", "threads"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("p", [4, 7, 8, 11, 14, 15])
def test_symmetric_mass(p: int, sign: int, owner: Owner | None) -> None:
    check(mass(p, sign=sign), 101, parameters=Parameters(owner=owner), even_odd=True)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n", [5, 8, 13, 16, 17, 24, 31, 32])
def test_symmetric_chain(n: int, sign: int) -> None:
    for options in ({}, {"owner": "quads"}, {"owner": "quads", "fibres": 1}):
        parameters = Parameters(**options)
        check(chain(n, sign=sign), ELEMENTS, parameters=parameters, even_odd=True)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_symmetric_dtypes(dtype: str) -> None:
    check(mass(7, sign=1, dtype=dtype), 101, even_odd=True)
    check(chain(9, sign=-1, dtype=dtype), ELEMENTS, even_odd=True)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_parts_of_gradients(p: int) -> None:
    check(interpolation(p), 101)
    check(mass_gradient_d(p), 101)
    check(mass_gradient_b(p), 101)


@pytest.mark.parametrize(
    ("n", "elements"),
    [
        *itertools.product((2, 3, 5, 8, 9, 16, 17, 24, 25, 31, 32), (1, ELEMENTS)),
        *itertools.product((2, 5, 8), [20_011]),
    ],
)
def test_gradient_of_chain(n: int, elements: int) -> None:
    check(gradient(chain(n, constant=False)), elements)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 7, 9, 11])
def test_gradient_of_mass(p: int) -> None:
    check(gradient(mass(p, constant=False)), 1013)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("elements", [0, 1, ELEMENTS])
def test_contractions(spec: str, elements: int) -> None:
    parameters = Parameters() if spec in MOVES else None
    check(contraction(spec, SIZES), elements, parameters=parameters)
    check(contraction(spec, SIZES, constant=False), elements, parameters=parameters)


@pytest.mark.parametrize(("spec", "extents"), SEVERAL_BATCH_AXES)
def test_several_batch_axes(spec: str, extents: tuple[int, ...]) -> None:
    batch = "efg"[: len(extents)]
    check(contraction(spec, SIZES, batch), *extents)
    check(contraction(spec, SIZES, batch), *(1 for _ in extents))
    check(contraction(spec, SIZES, batch), *(0 for _ in extents))


def test_several_outputs() -> None:
    check(several_outputs(), ELEMENTS)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_dtypes(dtype: str) -> None:
    check(mass(3, dtype=dtype), 101)
    check(mass_gradient_b(2, dtype=dtype), 101)
    check(chain(7, dtype=dtype), ELEMENTS)
    check(product(5, 6, 7, dtype=dtype), ELEMENTS)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "traced"])
def test_chains_of_other_dtypes(dtype: str, constant: bool) -> None:
    """Fibres side by side, matrices in shared memory, complex numbers by tensor cores."""
    for n in (2, 5, 8, 9, 12, 17, 23, 32):
        check(chain(n, dtype=dtype, constant=constant), ELEMENTS)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
def test_mass_of_other_dtypes(dtype: str) -> None:
    for p in (1, 2, 4, 6, 7, 11, 15):
        check(mass(p, dtype=dtype), 101)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("elements", [1, ELEMENTS])
@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(fibres=2, threads=64, elements=5),
        Parameters(owner="quads", fibres=1, fetch=0),
        Parameters(owner="quads", fibres=3),
        Parameters(owner="quads", ahead=True, fetch=2, elements=3, threads=64),
    ],
    ids=str,
)
def test_parameters_of_other_dtypes(parameters: Parameters, elements: int, dtype: str) -> None:
    spec, sizes = "xa,yb,ecab->ecxy", {"a": 5, "b": 7, "x": 6, "y": 11, "c": 2}
    for program in (mass(2, dtype=dtype), contraction(spec, sizes, dtype=dtype)):
        check(program, elements, parameters=parameters)


@pytest.mark.parametrize("elements", [1, ELEMENTS])
@pytest.mark.parametrize("options", [{}, {"elements": 3}, {"threads": 32, "groups": 4}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "n"), [("float64", 17), ("float32", 23), ("complex64", 17), ("complex128", 13)]
)
def test_matrices_in_shared_memory(
    dtype: str, n: int, options: dict[str, Any], elements: int
) -> None:
    """Larger ones than threads have at hand of the constant bank."""
    sizes = {"a": n, "b": n + 2, "x": n + 1, "y": n + 4, "c": 2}
    given = Parameters(owner="threads", **options)
    for program in (
        chain(n, dtype=dtype),
        contraction("xa,yb,ecab->ecxy", sizes, dtype=dtype),
    ):
        kernel = lower(planned(program), (elements,), given)
        assert isinstance(kernel, Kernel) and "near<" in kernel.source
        check(program, elements, parameters=given)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("n", range(1, 49))
def test_square_products(n: int, dtype: str) -> None:
    check(product(n, n, n, dtype=dtype), 67)


@pytest.mark.parametrize("left", ["eij", "eji"])
@pytest.mark.parametrize("right", ["ejk", "ekj"])
@pytest.mark.parametrize("out", ["eik", "eki"])
def test_transposed_square_products(left: str, right: str, out: str) -> None:
    for spec in (f"{left},{right}->{out}", f"{right},{left}->{out}"):
        program = contraction(spec, dict.fromkeys("ijk", 6))
        kernel = lower(planned(program), (ELEMENTS,))
        assert isinstance(kernel, Kernel) and kernel.target == "jaxmagma_cuda_bgemm"
        check(program, ELEMENTS)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 9), (17, 2, 5), (3, 31, 8), (40, 24, 33), (64, 64, 64), (130, 9, 70)]
)
def test_rectangular_products(m: int, n: int, k: int) -> None:
    check(product(m, n, k), 67, parameters=Parameters())  # XLA has the largest one else


@pytest.mark.parametrize("elements", [1, 31, 32, 33, ELEMENTS])
@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(threads=64),
        Parameters(threads=384, min_blocks=2),
        Parameters(owner="quads", fetch=0),
        Parameters(owner="quads", fetch=1, elements=3, threads=64),
        Parameters(threads=32, groups=4),
        Parameters(threads=32, groups=2, elements=3),
        Parameters(elements=3, threads=32),
        Parameters(elements=48, threads=32),  # where tiles take each other's place
        Parameters(elements=230, threads=32),  # and those of mass have no padding
        Parameters(owner="quads"),
        Parameters(owner="quads", threads=96),
        Parameters(owner="quads", fibres=1, threads=64),
        Parameters(owner="quads", fibres=4, elements=3, threads=32),
        Parameters(owner="quads", threads=32, groups=2),
        Parameters(owner="quads", ahead=True, fetch=2),
        Parameters(owner="quads", ahead=True, fetch=1, threads=32, groups=2, elements=3),
    ],
    ids=str,
)
def test_parameters(parameters: Parameters, elements: int) -> None:
    check(mass(2), elements, parameters=parameters)
    check(chain(4), elements, parameters=parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "elements"),
    [(mass(2), 20_011), (mass(9), 1013), (chain(24), 4001), (gradient(chain(9)), 20_011)],
    ids=str,
)
def test_operands_come_ahead(program: ElementProgram, elements: int) -> None:
    """Blocks work through more elements than a GPU has room for at a time."""
    for fetch in (1, 2):
        check(program, elements, parameters=Parameters(owner="quads", ahead=True, fetch=fetch))


@pytest.mark.parametrize("n", [9, 17, 21, 32])
@pytest.mark.parametrize("elements", [1, ELEMENTS])
def test_all_operands_are_fetched(n: int, elements: int) -> None:
    """Every other element of odd size begins in the middle of what the copy engine moves."""
    check(gradient(chain(n)), elements, parameters=Parameters(owner="quads", fetch=3))


@pytest.mark.parametrize("n", [9, 17, 25])
def test_sums_that_fill_no_pieces(n: int) -> None:
    check(gradient(chain(n, constant=False)), ELEMENTS)
    check(contraction("emk,ekn->mn", {"m": n, "n": 17, "k": 6}), ELEMENTS)


def test_all_shared_memory_that_need_not_be_asked_for() -> None:
    """48 KB, of which the kernel has some for itself."""
    groups = 15
    program, parameters = chain(8), Parameters(owner="quads", threads=32, groups=groups, fetch=2)
    kernel = lower(planned(program), (ELEMENTS,), parameters)
    assert isinstance(kernel, Kernel)
    arrivals = 8 * 2 * groups
    assert 0 <= (48 << 10) - kernel.attributes["shared_bytes"] < arrivals, "layouts changed"
    check(program, ELEMENTS, parameters=parameters)


def test_more_values_than_31_bits_count() -> None:
    program = contraction("eij->eji", {"i": 2, "j": 4}, dtype="float32")
    elements = (1 << 28) + 3
    (x,) = program.arguments
    u = jax.random.uniform(jax.random.key(0), (elements, *x.tile), jnp.float32)
    (got,) = run(program, (elements,), [u], Parameters())  # XLA moves values as fast
    assert got.size > 1 << 31
    for part in (slice(0, 1000), slice(elements - 1000, elements)):
        np.testing.assert_array_equal(got[part], np.swapaxes(u[part], 1, 2))
    different = jnp.zeros((), jnp.int64)
    for chunk in range(0, elements, 1 << 26):
        part = slice(chunk, chunk + (1 << 26))
        different += jnp.sum(got[part] != jnp.swapaxes(u[part], 1, 2), dtype=jnp.int64)
    assert different == 0


# ---- Fused functions -------------------------------------------------------------------------


def check_fused(
    program: ElementProgram,
    elements: int,
    tolerance: float = 256,
    parameters: Parameters | None = None,
    even_odd: bool | None = None,
) -> None:
    arrays = arguments(program, (elements,))
    got = run(program, (elements,), arrays, parameters, even_odd)
    cuda_fused.assert_same(program, arrays, got, tolerance)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "full"])
@pytest.mark.parametrize("p", [*range(1, 9), 11])
def test_diffusion(p: int, symmetric: bool) -> None:
    check_fused(cuda_fused.diffusion(p, symmetric), 101)


@pytest.mark.parametrize("owner", [None, "quads", "threads"])
@pytest.mark.parametrize("p", [1, 2, 4, 7, 9, 12])
def test_diffusion_with_points_at_the_nodes(p: int, owner: Owner | None) -> None:
    check_fused(cuda_fused.collocated_diffusion(p), 101, parameters=Parameters(owner=owner))


@pytest.mark.parametrize(("p", "elements"), [(1, 75), (2, 22), (4, 4), (12, None)])
def test_tiles_in_place(p: int, elements: int | None) -> None:
    """Those of many elements of one warp, or of large ones."""
    given = Parameters(owner="threads", threads=32 if elements else None, elements=elements)
    check_fused(cuda_fused.collocated_diffusion(p), 101, parameters=given)


@pytest.mark.parametrize("elements", [1, 401])
@pytest.mark.parametrize("p", [9, 10, 11, 12, 13, 15])
def test_rows_come_as_they_are_needed(p: int, elements: int) -> None:
    """More elements than a GPU has room for at a time, and fewer."""
    program = cuda_fused.diffusion(p, planes=True)
    for options in ({}, {"ahead": False}, {"threads": 64, "fibres": 1}, {"threads": 96}):
        parameters = Parameters(owner="quads", **options)
        kernel = lower(planned(program), (elements,), parameters)
        assert isinstance(kernel, Kernel) and "rows as they are needed" in kernel.description
        check_fused(program, elements, parameters=parameters)


@pytest.mark.parametrize("middle", get_args(Middle))
@pytest.mark.parametrize("p", [4, 9])
def test_each_axis_in_the_middle(p: int, middle: Any) -> None:
    for program, same in (
        (mass(p), assert_close),
        (cuda_fused.diffusion(p, planes=True), cuda_fused.assert_same),
    ):
        kernel = lower(factoring.planned(program, middle), (101,))
        assert isinstance(kernel, Kernel)
        arrays = arguments(program, (101,))
        same(program, arrays, call(kernel, program, (101,))(*arrays))


@pytest.mark.parametrize("owner", ["threads", "quads"])
def test_sums_of_products(owner: Owner) -> None:
    parameters = Parameters(owner=owner)
    for n in (4, 12, 16):
        program = gradient(chain(n, constant=False))
        for elements in (1, 5001):
            check(program, elements, parameters=parameters)
    check(gradient(mass(3, constant=False)), 2001, parameters=parameters)
    # Registers have no room for all of this sum.
    check(contraction("emk,ekn->mn", {"m": 40, "n": 33, "k": 3}), 5001, parameters=parameters)


@pytest.mark.parametrize("elements", [None, 3])
@pytest.mark.parametrize("fetch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"ahead": True}], ids=str)
def test_one_copy_for_all_elements(
    options: dict[str, Any], fetch: int, elements: int | None
) -> None:
    """Slices begin anywhere in a group of 16 bytes: three tiles of an odd number of values."""
    given = Parameters(owner="threads", fetch=fetch, elements=elements, **options)
    for count in (1, 20_011):
        check(gradient(chain(5, constant=False)), count, parameters=given)
        check(chain(5), count, parameters=given)
    for dtype in ("float32", "complex64", "complex128"):
        check(mass(1, dtype=dtype), 20_011, parameters=given)
    check_fused(cuda_fused.diffusion(3), 2001, parameters=given)


@pytest.mark.parametrize("elements", [None, 3])
@pytest.mark.parametrize("options", [{}, {"fetch": 4}, {"fetch": 4, "ahead": True}], ids=str)
def test_rows_of_results(options: dict[str, Any], elements: int | None) -> None:
    """They leave through shared memory; the last slice has fewer elements than the others."""
    given = Parameters(owner="threads", elements=elements, **options)
    for dtype in ("float64", "float32", "complex64", "complex128"):
        for program in (
            gradient(chain(5, constant=False, dtype=dtype)),
            contraction("xa,eba->ebx", {"x": 5, "a": 4, "b": 3}, dtype=dtype),
            contraction("xa,ea->ex", {"x": 5, "a": 4}, dtype=dtype),
        ):
            for count in (1, 2, 20_011):
                check(program, count, parameters=given)


@pytest.mark.parametrize("n", [2, 4, 6])
def test_matrices_in_registers_of_threads(n: int) -> None:
    """Beside sums: small ones, and not the last."""
    given = Parameters(owner="threads")
    check(gradient(chain(n, constant=False)), ELEMENTS, parameters=given)


@pytest.mark.parametrize(("p", "threads"), [(9, 64), (13, None)])
def test_late_operands(p: int, threads: int | None) -> None:
    parameters = Parameters(owner="quads", ahead=True, fetch=1, threads=threads)
    check_fused(cuda_fused.diffusion(p), 601, parameters=parameters)


@pytest.mark.parametrize("p", [5, 8, 11, 15])
def test_diffusion_with_tables_of_finite_elements(p: int) -> None:
    program = cuda_fused.diffusion(p, tables=cuda_fused.lagrange_tables)
    check_fused(program, 101)
    check_fused(program, 101, even_odd=True)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_hyperelastic_gradient(p: int) -> None:
    check_fused(cuda_fused.hyperelastic(p), 101)


@pytest.mark.parametrize("last", [True, False], ids=["components last", "components first"])
@pytest.mark.parametrize("p", [1, 3, 4])
def test_a_long_function_of_vectors(p: int, last: bool) -> None:
    program, _ = normal_form(cuda_fused.stretches(p, last))
    check_fused(program, 101, tolerance=4096)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("elements", [0, 1, ELEMENTS])
def test_algebra_and_movement(elements: int, dtype: str) -> None:
    check_fused(cuda_fused.pointwise_algebra(3, dtype), elements)
    check_fused(cuda_fused.moving(dtype), elements)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("elements", [1, ELEMENTS])
def test_sums_of_values_of_an_element(elements: int, dtype: str) -> None:
    check_fused(cuda_fused.sums(dtype), elements)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("elements", [0, 1, ELEMENTS])
def test_matrices_of_elements(elements: int, dtype: str) -> None:
    """Products of an element's own tiles, and what is made of several of them."""
    check_fused(cuda_fused.matrices(8, 8, 3, dtype), elements)
    check_fused(cuda_fused.matrices(5, 3, 2, dtype, rows=7), elements)
    check_fused(cuda_fused.products_of_tiles(7, 9, dtype), elements)
    check_fused(cuda_fused.matrices(4, 11, 3, dtype), elements)
    check_fused(cuda_fused.products_of_tiles(5, 16, dtype), elements)


@pytest.mark.parametrize("count", [31, 128, 600, 2049])
def test_long_vectors(count: int) -> None:
    """Sums of so many values, what is made of them, and the vector once more."""

    def normalised(x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x)
        return centred / jnp.sqrt(1e-3 + jnp.mean(centred**2))

    program = cuda_fused.program_of(normalised, (count,), dtype="float64")
    check_fused(program, 101, tolerance=64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_function(dtype: str) -> None:
    """On numbers of either sign and any size, NaN and infinities."""
    program = cuda_fused.every_function(dtype)
    arrays = cuda_fused.special(program, (ELEMENTS,))
    cuda_fused.assert_same(program, arrays, run(program, (ELEMENTS,), arrays))


@pytest.mark.parametrize("parameters", [None, Parameters(ahead=True)], ids=str)
@pytest.mark.parametrize("components", [1, 3])
def test_gather(components: int, parameters: Parameters | None) -> None:
    program = cuda_fused.gathering(components, 5000)
    arrays = cuda_fused.indexed(program, ELEMENTS)
    cuda_fused.assert_same(program, arrays, run(program, (ELEMENTS,), arrays, parameters))


@pytest.mark.parametrize("widths", [(8,), (1,), (2, 1), (1, 1), (16, 3)])
@pytest.mark.parametrize("components", [1, 3])
def test_assembly(components: int, widths: tuple[int, ...]) -> None:
    program = cuda_fused.assembling(components, widths)
    arrays = cuda_fused.indexed(program, ELEMENTS)
    cuda_fused.assert_same(program, arrays, run(program, (ELEMENTS,), arrays))


# ---- NaN and infinity ------------------------------------------------------------------------


def test_nan_stays_in_its_element() -> None:
    program = mass(2)
    arrays = arguments(program, (ELEMENTS,))
    arrays[1][500, 1, 1, 1] = np.nan
    (got,) = run(program, (ELEMENTS,), arrays)
    assert np.isnan(got[500]).all()
    assert np.isfinite(np.delete(np.asarray(got), 500, axis=0)).all()


def test_nan_of_the_last_element_is_summed_once() -> None:
    """The last element is read several times, to fill the last block."""
    program = contraction("eij,eij->ij", SIZES)
    arrays = arguments(program, (ELEMENTS,))
    arrays[0][-1, 1, 2] = np.inf
    (got,) = run(program, (ELEMENTS,), arrays)
    infinite = np.zeros(got.shape, bool)
    infinite[1, 2] = True
    np.testing.assert_array_equal(np.isinf(got), infinite)
    assert not np.isnan(got).any()


def test_zero_times_infinity_is_nan() -> None:
    builder_input = arguments(product(3, 3, 3), (5,))
    left, right = builder_input
    left[2, 0, :] = 0.0
    right[2, 1, 1] = np.inf
    (got,) = run(product(3, 3, 3), (5,), [left, right])
    want = np.einsum("eij,ejk->eik", left, right)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


# ---- Determinism -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        mass_gradient_b(3),
        gradient(mass(2, constant=False)),
        contraction("eij->ij", SIZES),
        mass(3),
    ],
    ids=["B", "gradient", "sum", "u"],
)
def test_same_bits_every_time(program: ElementProgram) -> None:
    elements = 50_021
    arrays = [jnp.asarray(x) for x in arguments(program, (elements,))]
    kernel = lower(planned(program), (elements,))
    assert isinstance(kernel, Kernel)
    function = call(kernel, program, (elements,))
    first = function(*arrays)
    for _ in range(5):
        for one, another in zip(first, function(*arrays), strict=True):
            np.testing.assert_array_equal(one, another)


# ---- Traced bases, loops and graphs ----------------------------------------------------------


def test_traced_basis_changes_between_calls() -> None:
    program = mass(2, constant=False)
    kernel = lower(planned(program), (ELEMENTS,))
    assert isinstance(kernel, Kernel)
    function = call(kernel, program, (ELEMENTS,))
    pending = []
    for seed in range(8):
        arrays = arguments(program, (ELEMENTS,), seed)
        pending.append((arrays, function(*arrays)))
    for arrays, got in pending:
        assert_close(program, arrays, got)


def test_two_calls_have_a_basis_each() -> None:
    program = chain(4, constant=False)
    kernel = lower(planned(program), (ELEMENTS,))
    assert isinstance(kernel, Kernel)
    function = call(kernel, program, (ELEMENTS,))
    first, second = (arguments(program, (ELEMENTS,), seed) for seed in (1, 2))
    both = jax.jit(lambda x, y: (function(*x), function(*y)))
    for _ in range(3):
        for arrays, got in zip((first, second), both(first, second), strict=True):
            assert_close(program, arrays, got)


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "traced"])
def test_loops_on_the_device(constant: bool) -> None:
    """Loops become CUDA graphs; ten calls in a row, too."""
    program = chain(3, constant=constant)
    elements = 257
    kernel = lower(planned(program), (elements,))
    assert isinstance(kernel, Kernel)
    function = call(kernel, program, (elements,))
    *basis, d, a = (jnp.asarray(x) for x in arguments(program, (elements,)))

    def step(a: jax.Array) -> jax.Array:
        (c,) = function(*basis, d, a)
        return a + 0.125 * c

    @jax.jit
    def looped(a: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 20, lambda _, a: step(a), a)

    @jax.jit
    def unrolled(a: jax.Array) -> jax.Array:
        for _ in range(20):
            a = step(a)
        return a

    expected = a
    for _ in range(20):
        expected = step(expected)
    for function_of_a in (looped, unrolled):
        for _ in range(3):
            np.testing.assert_allclose(function_of_a(a), expected, rtol=1e-12, atol=1e-14)


# ---- Errors and the cache --------------------------------------------------------------------


def test_compiler_errors_reach_the_user() -> None:
    program = chain(2)
    kernel = lower(planned(program), (10,))
    assert isinstance(kernel, Kernel)
    broken = {**kernel.attributes, "source": "not a kernel", "name": "jaxmagma_broken"}
    function = call(Kernel(kernel.target, broken), program, (10,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"jaxmagma_broken(.|\n)*kernel.cu"):
        jax.block_until_ready(function(*arguments(program, (10,))))


def test_missing_attributes_are_named() -> None:
    program = chain(2)
    function = call(Kernel("jaxmagma_cuda", {"name": "jaxmagma_empty"}), program, (10,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="attribute"):
        jax.block_until_ready(function(*arguments(program, (10,))))


def test_cache_is_used_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path))
    # No other test may have loaded its kernel.
    program = contraction("xi,yj,ekxy->ekij", {"i": 3, "j": 3, "k": 2, "x": 5, "y": 5})
    kernel = lower(planned(program), (ELEMENTS,))
    assert isinstance(kernel, Kernel)
    arrays = arguments(program, (ELEMENTS,))

    def fresh() -> None:
        """Equal kernels of a process are loaded once: so none may be left of the last time."""
        assert_close(program, arrays, call(kernel, program, (ELEMENTS,))(*arrays))
        jax.clear_caches()
        gc.collect()

    fresh()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    fresh()
    assert file.read_bytes() == whole
    file.write_bytes(whole[:1000])
    fresh()
    assert file.read_bytes() == whole
    # A cubin that is whole but not for this GPU does not load, and is built again.
    cuda = native.load("cuda")
    assert not isinstance(cuda, str)
    other = cuda.specialise(kernel.source, "sm_80")
    (other_file,) = (f for f in tmp_path.iterdir() if f != file)
    assert other_file.read_bytes().endswith(other)
    os.replace(other_file, file)
    fresh()


def test_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "/proc/nowhere")
    check(chain(6), 11)
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")
    check(chain(7), 11)


# ---- Through the public interface ------------------------------------------------------------

MASS = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"


def _mass_operands(elements: int, p: int = 3) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    n, q = p + 1, p + 2
    b = jax.random.normal(keys[0], (q, n), jnp.float64)
    d = jax.random.normal(keys[1], (elements, q, q, q), jnp.float64)
    u = jax.random.normal(keys[2], (elements, n, n, n), jnp.float64)
    return b, d, u


def _apply(einsum: Any, b: Any, d: jax.Array, u: jax.Array) -> jax.Array:
    result: jax.Array = einsum(MASS, b, b, b, d, b, b, b, u)
    return result


def test_einsum_runs_one_kernel() -> None:
    b, d, u = _mass_operands(10_000)
    text = jax.jit(functools.partial(_apply, jm.einsum)).lower(b, d, u).as_text()
    assert text.count("jaxmagma_cuda") == 1
    assert "dot_general" not in text


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "traced"])
def test_einsum_and_its_gradients(constant: bool) -> None:
    b, d, u = _mass_operands(5_003)

    def value(einsum: Any, b: Any, d: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(_apply(einsum, b, d, u)))

    def gradients(einsum: Any) -> Any:
        if constant:
            fixed = np.asarray(b)
            return jax.jit(jax.grad(lambda d, u: value(einsum, fixed, d, u), (0, 1)))(d, u)
        return jax.jit(jax.grad(functools.partial(value, einsum), (0, 1, 2)))(b, d, u)

    for got, want in zip(gradients(jm.einsum), gradients(jnp.einsum), strict=True):
        scale = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12 * scale)


def test_vmap_adds_a_batch_axis() -> None:
    b, d, u = _mass_operands(2_001)
    us = jnp.stack([u, 2 * u, -u])
    fixed = np.asarray(b)
    mapped = jax.jit(jax.vmap(lambda u: _apply(jm.einsum, fixed, d, u)))
    assert mapped.lower(us).as_text().count("jaxmagma_cuda") == 1
    want = _apply(jnp.einsum, b, d, u)
    for got, factor in zip(mapped(us), (1.0, 2.0, -1.0), strict=True):
        np.testing.assert_allclose(got, factor * want, rtol=1e-10, atol=1e-9)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_complex_arrays_of_a_program_of_real_numbers(dtype: Any) -> None:
    """Batched, shared and gathered operands, results of elements, and sums over these."""
    random, table = np.random.default_rng(0), np.random.default_rng(1).standard_normal((6, 5))

    def numbers(*shape: int) -> np.ndarray:
        parts = random.standard_normal((2, *shape)).astype(dtype)
        return parts[0] + np.asarray(1j, np.result_type(dtype, np.complex64)) * parts[1]

    def function(u: Any, shared: Any, x: Any, v: Any) -> Any:
        at_points = table.astype(dtype) @ (u + shared * x) / (2 + jnp.abs(v))
        return table.T.astype(dtype) @ (at_points * jnp.abs(at_points)), jnp.conj(at_points)

    elements, rows = 5_003, 211
    index = random.integers(0, rows, (elements, 6))
    operands = numbers(elements, 5), numbers(5), numbers(elements, 5).real, numbers(rows)

    def fused(u: Any, shared: Any, x: Any, v: Any) -> Any:
        in_axes = (0, None, 0, jm.gather(jnp.asarray(index)))
        return jm.fuse(function, in_axes)(u, shared, x, v)

    def plain(u: Any, shared: Any, x: Any, v: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jax.vmap(function, (0, None, 0, 0))(u, shared, x, v[index])

    def with_gradients(f: Any) -> Any:
        def total(*xs: Any) -> Any:
            return sum(jnp.mean(jnp.abs(y) ** 2) for y in f(*xs))

        return jax.jit(lambda *xs: (f(*xs), jax.grad(total, (0, 1, 2, 3))(*xs)))(*operands)

    assert jax.jit(fused).lower(*operands).as_text().count("jaxmagma_cuda") == 1
    results = zip(*map(jax.tree.leaves, map(with_gradients, (fused, plain))), strict=True)
    for got, want in results:
        assert got.dtype == want.dtype
        scale = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e3 * np.finfo(dtype).eps * scale)
