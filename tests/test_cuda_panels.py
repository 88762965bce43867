"""Kernels whose warps have panels of elements: dense tables, and elements that a lane has alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices
from jaxmagma.choices import Choice
from jaxmagma.lowering import cuda
from jaxmagma.lowering.cuda.architectures import limits_of
from jaxmagma.lowering.cuda.panels.fields import fields_of
from jaxmagma.lowering.cuda.panels.ownership import operations
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.plans.folding import constants_folded
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram
from tests import cuda_emulator, cuda_fused, jaxprs
from tests.cuda_programs import arguments
from tests.test_cuda_compile import native


Array = np.ndarray[Any, Any]
# A function of an element, and the shapes of its arguments.
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def table(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).uniform(-1, 1, shape)


# ---- Functions of an element ---------------------------------------------------------------------


def diffusion(points: int, nodes: int) -> Case:
    D = table(3, points, nodes)

    def function(u: Any, J: Any, c: Any) -> Any:
        g = jnp.einsum("dqi,i->qd", D, u) @ J * c[:, None]
        return jnp.einsum("dqi,qd->i", D, g @ J.T)

    return function, ((nodes,), (3, 3), (points,))


def elasticity(points: int, nodes: int) -> Case:
    """The gradient of an energy of a vector field, its components last."""
    D = table(3, points, nodes)
    w = table(points) ** 2

    def energy(u: Any, J: Any) -> Any:
        g = jnp.einsum("dqi,iv->qvd", D, u) @ J
        s = 0.5 * (g + jnp.swapaxes(g, -1, -2))
        trace = jnp.trace(s, axis1=-2, axis2=-1)
        return jnp.einsum("q,qij,qij->", w, s, s) + 0.5 * jnp.sum(w * trace**2)

    return jax.grad(energy), ((nodes, 3), (3, 3))


def interpolation(points: int, nodes: int) -> Case:
    """Values at the points, and a function of them; one result has its components first."""
    B = table(points, nodes)

    def function(u: Any) -> Any:
        v = B @ u
        return v, jnp.tanh(v[:, 0]), jnp.stack([jnp.exp(v[:, 1]), v[:, 0] * v[:, 1]])

    return function, ((nodes, 2),)


def twice(points: int, nodes: int) -> Case:
    """To the points and back, and once more, with what is known at both times."""
    B = table(points, nodes)

    def function(u: Any, c: Any) -> Any:
        v = c * jnp.sin(B @ u)
        return B.T @ (jnp.cos(B @ (B.T @ v)) * v) + u

    return function, ((nodes,), (points,))


def integrals(points: int, nodes: int) -> Case:
    """Sums over points and over nodes, and a field that they scale."""
    B = table(points, nodes)
    w = table(points)

    def function(u: Any, scale: Any) -> Any:
        v = B @ u
        total = jnp.sum(w * v**2) + scale
        return total, B.T @ (w * v / (1 + total**2)), jnp.sum(u)

    return function, ((nodes,), ())


def residual(values: int) -> Case:
    """What a square table makes of normalised values is added to them: there is one long axis."""
    B = table(values, values)

    def function(u: Any) -> Any:
        v = (u - u.mean()) / jnp.sqrt(u.var() + 0.1)
        return u + jnp.tanh(B @ v), B.T @ (B @ u)

    return function, ((values,),)


def stiffness(points: int, nodes: int) -> Case:
    """An element's matrix, whose two axes are one of the table."""
    D = table(3, points, nodes)

    def function(J: Any, c: Any) -> Any:
        return jnp.einsum("dqi,df,q,gf,gqj->ij", D, J, c, J, D)

    return function, ((3, 3), (points,))


def tangent(points: int, nodes: int) -> Case:
    """The matrix of a vector field, as a Hessian; and another one of its energy."""
    D = table(3, points, nodes)

    def energy(u: Any, J: Any, c: Any) -> Any:
        g = jnp.einsum("dqi,iv->qvd", D, u) @ J
        return jnp.sum(c * jnp.einsum("qvd,qdv->q", g, g)) + 0.5 * jnp.sum(g**2)

    def function(J: Any, c: Any) -> Any:
        first = jax.hessian(energy)(jnp.zeros((nodes, 2)), J, c)
        return first, jnp.einsum("dqi,q,gqj,dg->ij", D, c**2, D, J @ J.T)

    return function, ((3, 2), (points,))


def gradients_first(points: int, nodes: int) -> Case:
    """Gradients of shape functions as values of the element, which two results are made of."""
    G, B = table(points, nodes, 3), table(points, 4)

    def function(u: Any, J: Any, p: Any) -> Any:
        g = jnp.einsum("qnd,de->qne", G, jnp.linalg.inv(J + 3 * jnp.eye(3)))
        h = jnp.einsum("qne,na->qae", g, u) - jnp.einsum("q,ab->qab", B @ p, jnp.eye(3))
        return jnp.einsum("qae,qne->na", h, g), B.T @ jnp.trace(h, axis1=1, axis2=2)

    return function, ((nodes, 3), (3, 3), (4,))


def with_a_matrix(points: int, nodes: int) -> Case:
    """The same, with a matrix that is an argument."""
    G = table(points, nodes, 3)

    def function(u: Any, J: Any, c: Any) -> Any:
        g = G @ J
        h = jnp.einsum("q,qne,na->qae", c, g, u)
        return jnp.einsum("qae,qne->na", h, g), jnp.trace(h, axis1=1, axis2=2)

    return function, ((nodes, 3), (3, 3), (points,))


def flat() -> Case:
    """Three components of four nodes, one after the other, on both sides of what is taken apart."""
    G = table(4, 3)

    def function(u: Any, J: Any) -> Any:
        g = G @ jnp.linalg.inv(J + 3 * jnp.eye(3))
        h = u.reshape(4, 3).T @ g
        return (g @ (h + h.T)).reshape(12)

    return function, ((12,), (3, 3))


def small_matrices() -> Case:
    """No table at all: an inverse and some products for each element."""

    def function(A: Any, b: Any) -> Any:
        inverse = jnp.linalg.inv(A + 3 * jnp.eye(3))
        return inverse @ b, jnp.linalg.det(A), inverse * b[0]

    return function, ((3, 3), (3,))


def by_strains(points: int, nodes: int) -> Case:
    """Forces with three components of each node side by side, as strain matrices have them."""
    G = table(points, nodes, 3)

    def function(x: Any, u: Any) -> Any:
        forces = jnp.zeros(3 * nodes)
        for slopes in G:
            g = slopes @ jnp.linalg.inv(slopes.T @ x + 12 * jnp.eye(3))
            strains = jnp.zeros((6, 3 * nodes))
            for row, (one, other) in enumerate(((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (0, 2))):
                strains = strains.at[row, one::3].set(g[:, other])
                strains = strains.at[row, other::3].set(g[:, one])
            forces += strains.T @ jnp.sin(strains @ u)
        return forces

    return function, ((nodes, 3), (3 * nodes,))


def system(rows: int) -> Case:
    def function(A: Any, b: Any) -> Any:
        return jnp.linalg.solve(A + rows * jnp.eye(rows), b)

    return function, ((rows, rows), (rows,))


def symmetric_systems(rows: int) -> Case:
    """With the factor, so that an element has values for which few lanes have room."""

    def function(A: Any, b: Any) -> Any:
        L = jnp.linalg.cholesky(A @ A.T + jnp.eye(rows))
        return L, jax.scipy.linalg.cho_solve((L, True), b)

    return function, ((rows, rows), (rows,))


def channels(count: int, dtype: str) -> Case:
    """A product of representations, the same for each of several channels."""
    T = (table(5, 4, 3) * (table(5, 4, 3) > 0)).astype(dtype)

    def function(x: Any, y: Any) -> Any:
        z = jnp.einsum("ijk,ui,uj->uk", T, x, y, precision="highest")
        return z, z[:, 0] + y[:, 3]

    return function, ((count, 5), (count, 4))


def metric_at_points(*points: int, weights: tuple[int, ...] = ()) -> Case:
    """A metric and a flux at all points, where nothing meets: weights differ along some axes."""
    w = table(*weights, *(1 for _ in range(len(points) - len(weights)))) + 2

    def at_point(J: Any, w: Any) -> Any:
        inverse = jnp.linalg.inv(J + 3 * jnp.eye(3))
        return w * jnp.linalg.det(J) * inverse @ inverse.T, jnp.cumsum(J[0] * w)

    def function(J: Any) -> Any:
        mapped: Any = at_point
        for _ in points:
            mapped = jax.vmap(mapped)
        return mapped(J, jnp.broadcast_to(w, points))

    return function, ((*points, 3, 3),)


def stresses(*points: int) -> Case:
    """With material parameters of an element, of which something is made once."""

    def at_point(F: Any, material: Any) -> Any:
        F = F + 3 * jnp.eye(3)
        return jnp.exp(-material[0]) * F + material[1] * jnp.linalg.inv(F).T

    def function(F: Any, material: Any) -> Any:
        mapped: Any = at_point
        for _ in points:
            mapped = jax.vmap(mapped, in_axes=(0, None))
        return mapped(F, material)

    return function, ((*points, 3, 3), (2,))


CASES = {
    "diffusion of four nodes": diffusion(4, 4),
    "diffusion of ten nodes": diffusion(11, 10),
    "diffusion of twenty nodes": diffusion(24, 20),
    "diffusion of whole tiles": diffusion(8, 16),
    "diffusion with a point beyond tiles": diffusion(17, 5),
    "elasticity of four nodes": elasticity(4, 4),
    "elasticity of ten nodes": elasticity(11, 10),
    "interpolation": interpolation(13, 7),
    "interpolation of few": interpolation(3, 3),
    "twice": twice(19, 14),
    "integrals": integrals(18, 21),
    "integrals of few": integrals(5, 4),
    "a residual of twelve values": residual(12),
    "a residual of twenty-one values": residual(21),
    "matrices of ten nodes": stiffness(4, 10),
    "matrices of twenty nodes": stiffness(11, 20),
    "matrices of few nodes": stiffness(5, 3),
    "matrices of a vector field": tangent(6, 5),
    "gradients first": gradients_first(4, 10),
    "flat": flat(),
    "small matrices": small_matrices(),
    "channels": channels(7, "float64"),
    "channels in float32": channels(6, "float32"),
    "gradients with a matrix": with_a_matrix(4, 10),
    "a metric at points": metric_at_points(27, weights=(27,)),
    "a metric on three axes of points": metric_at_points(2, 3, 4, weights=(2, 3, 4)),
    "a metric with equal weights": metric_at_points(2, 3),
    "stresses at points": stresses(8),
    "stresses on two axes of points": stresses(3, 5),
    "systems of ten equations": symmetric_systems(10),
    "a system of seven equations": system(7),
    "forces by strain matrices": by_strains(6, 12),
}


def program_of(case: Case, dtype: str = "float64") -> ElementProgram:
    function, shapes = case
    with jax.enable_x64(dtype == "float64"):  # whether tables are of float64
        arrays = [jnp.zeros((2, *x), dtype) for x in shapes]
        (program,) = jaxprs.programs(jm.fuse(function), *arrays)
        return normal_form(program)[0]


def panels(program: ElementProgram, extents: tuple[int, ...], architecture: str) -> Kernel:
    target = Target("cuda", architecture)
    made = cuda.lower(cuda.planned(program), extents, Parameters(owner="panels"), target)
    assert isinstance(made, Kernel), made
    return made


def emulate(
    program: ElementProgram, arrays: list[Array], folder: Path, architecture: str = "sm_90"
) -> list[Array]:
    extents = program.batch_extents([x.shape for x in arrays])
    kernel = panels(program, extents, architecture)
    return cuda_emulator.run(kernel, program, arrays, folder)


# ---- Values --------------------------------------------------------------------------------------


# By turns: a lane has rows of more elements where tensor cores are fast.
@pytest.mark.parametrize(
    ("name", "architecture"), [(x, ("sm_86", "sm_90")[n % 2]) for n, x in enumerate(CASES)]
)
def test_values(name: str, architecture: str, emulated: Path) -> None:
    program = program_of(CASES[name], "float32" if "float32" in name else "float64")
    for elements in (1, 37, 150):
        arrays = arguments(program, (elements,))
        found = emulate(program, arrays, emulated, architecture)
        cuda_fused.assert_same(program, arrays, found)


WITH_TABLES_OF_FLOAT32 = [
    "diffusion of twenty nodes",
    "elasticity of ten nodes",
    "interpolation",
    "twice",
    "integrals",
    "a residual of twelve values",
    "matrices of twenty nodes",
]


@pytest.mark.parametrize("name", WITH_TABLES_OF_FLOAT32)
def test_values_of_float32(name: str, emulated: Path) -> None:
    """Tables of float32, and elements that tensor cores multiply in two parts."""
    program = program_of(CASES[name], "float32")
    assert program.dtype == np.float32
    for elements in (1, 45):
        arrays = arguments(program, (elements,))
        cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_elements_do_not_mix(dtype: str, emulated: Path) -> None:
    """What is no number in one element is none in any other, nor beyond the last node."""
    program = program_of(CASES["diffusion of ten nodes"], dtype)
    arrays = arguments(program, (40,))
    (clean,) = emulate(program, arrays, emulated)
    for x, bad in zip(arrays, (np.nan, np.inf, np.nan), strict=True):
        x[11] = bad
    (found,) = emulate(program, arrays, emulated)
    assert np.isnan(found[11]).all()
    np.testing.assert_array_equal(np.delete(found, 11, 0), np.delete(clean, 11, 0))


def assert_exact_products(B: Array, u: Array, found: Array) -> None:
    """Errors of ``B @ u`` are those of a sum of as many products of float32."""
    exact, size = (
        np.einsum("qi,ei->eq", f(B), f(u), dtype=np.float64) for f in (np.asarray, np.abs)
    )
    assert np.all(np.abs(found - exact) <= (B.shape[1] + 4) * 2.0**-24 * size)


def of_all_sizes(*shape: int) -> Array:
    """Values of float32 that differ much in size, from element to element and in each."""
    rng = np.random.default_rng(7)
    u = rng.uniform(-1, 1, shape) * 10.0 ** rng.integers(-30, 30, (shape[0], 1))
    return np.asarray(u * 10.0 ** rng.integers(-4, 1, shape), np.float32)


def interpolated(u: Array, emulated: Path) -> tuple[Array, Array]:
    """A table of float32, and the panels' ``table @ u`` of each row of u."""
    B = table(13, u.shape[1]).astype(u.dtype)
    program = program_of((lambda u: B @ u, (u.shape[1:],)), "float32")
    return B, emulate(program, [u], emulated)[0]


def test_products_of_float32_are_exact_to_its_digits(emulated: Path) -> None:
    u = of_all_sizes(50, 35)
    B, found = interpolated(u, emulated)
    assert_exact_products(B, u, found)


def test_what_is_not_finite_or_huge_in_float32(emulated: Path) -> None:
    """Goes through a table as in float32 itself, whatever the bits of NaN are."""
    largest = float(np.finfo(np.float32).max)
    u = np.random.default_rng(8).uniform(-1, 1, (8, 9)).astype(np.float32)
    u[np.arange(7), np.arange(7)] = [np.inf, -np.inf, np.nan, largest, -largest, 1e-42, 0]
    u[7, [2, 5]] = np.inf, -np.inf
    u.view(np.uint32)[2, 2] = 0x7FFFFFFF
    B, found = interpolated(u, emulated)
    with np.errstate(invalid="ignore"):
        wanted = np.einsum("qi,ei->eq", B.astype(np.float64), u)
    np.testing.assert_allclose(found, wanted, 1e-3, 1e-6)
    np.testing.assert_allclose(found[[5, 6]], wanted[[5, 6]], 1e-6, 1e-6)


def test_functions_of_what_is_beyond_the_last_point(emulated: Path) -> None:
    """There is nothing there, so its logarithm must not count, nor what is divided by it."""
    B = table(11, 9) + 2

    def function(u: Any) -> Any:
        v = B @ u
        return B.T @ (jnp.log(v) + 1 / v), jnp.sum(1 / v)

    program = program_of((function, ((9,),)))
    arrays = [np.random.default_rng(1).uniform(1, 2, (21, 9))]
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


def test_zeros_of_constants_have_signs(emulated: Path) -> None:
    signs = np.array([0.0, -0.0, 1.0])
    program = program_of((lambda u: signs * u, ((3,),)))
    (found,) = emulate(program, [np.ones((5, 3))], emulated)
    np.testing.assert_array_equal(np.signbit(found), np.broadcast_to(np.signbit(signs), (5, 3)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_zeros_of_tables_times_what_is_not_finite(bad: float, emulated: Path) -> None:
    """Such a product is NaN, wherever one value of an element is not finite."""
    T = table(5, 4, 3) * (table(4, 5, 3).reshape(5, 4, 3) > 0.6)
    T[2, :, 1] = T[:, 3, 2] = 1.5  # where there is none
    assert np.sum(T == 0) > T.size / 2

    def function(x: Any, y: Any) -> Any:
        return jnp.einsum("ijk,i,j->k", T, x, -y), jnp.einsum("ijk,i,j->k", T, x + 1, y)

    program = program_of((function, ((5,), (4,))))
    arrays = arguments(program, (19,))
    for element in range(9):
        x, y = sorted(arrays, key=lambda x: -x.shape[1])
        (x if element < 5 else y)[element, element % 5] = bad
    x, y = x[:, :, None], y[:, :, None]
    found = emulate(program, arrays, emulated)
    for have, (left, right) in zip(found, ((x, -y), (x + 1, y)), strict=True):
        with np.errstate(invalid="ignore"):
            want = np.sum(T * (left * right.swapaxes(1, 2))[..., None], (1, 2))
        np.testing.assert_allclose(have, want, 1e-13, 1e-13)


def test_zeros_of_a_table_and_long_products(emulated: Path) -> None:
    """What a sparse table is applied to is looked at once, however often it is a factor."""
    T = np.diag(np.arange(1.0, 9.0))

    def function(x: Any) -> Any:
        for _ in range(40):
            x = x * x + x
        return T @ x

    program = program_of((function, ((8,),)))
    arrays = [np.random.default_rng(5).uniform(-1e-3, 1e-3, (13, 8))]
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


def test_tables_that_are_traced(emulated: Path) -> None:
    def function(B: Any, u: Any) -> Any:
        return jnp.einsum("qi,q->i", B, jnp.tanh(jnp.einsum("qi,i->q", B, u)))

    fused = jm.fuse(function, in_axes=(None, 0))
    (program,) = jaxprs.programs(fused, jnp.zeros((11, 6)), jnp.zeros((2, 6)))
    program, _ = normal_form(program)
    arrays = arguments(program, (37,))
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


def test_what_rows_have_apart_but_elements_share(emulated: Path) -> None:
    def function(w: Any, x: Any) -> Any:
        return jnp.cumsum(jnp.exp(x * w[:, None]), axis=1)

    fused = jm.fuse(function, in_axes=(None, 0))
    (program,) = jaxprs.programs(fused, jnp.zeros(6), jnp.zeros((2, 6, 5)))
    program, _ = normal_form(program)
    arrays = arguments(program, (37,))
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


def test_results_with_axes_that_are_one(emulated: Path) -> None:
    program = program_of((lambda x: jnp.kron(x, table(3)), ((3,),)))
    arrays = arguments(program, (37,))
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


@pytest.mark.parametrize("in_axes", [(0, None, 0), (None, 0, 0), (1, 0, None)])
def test_two_batch_axes(in_axes: tuple[int | None, ...], emulated: Path) -> None:
    """Operands have both of them, one, or the other one."""
    function, shapes = CASES["diffusion of ten nodes"]
    fused = jax.vmap(jm.fuse(function), in_axes=in_axes)
    given = [
        jnp.zeros((3, *x) if axis is None else (5, 3, *x) if axis == 0 else (3, 5, *x))
        for x, axis in zip(shapes, in_axes, strict=True)
    ]
    (program,) = jaxprs.programs(fused, *given)
    program, _ = normal_form(program)
    arrays = arguments(program, (5, 13))
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gathered_operands(dtype: str, emulated: Path) -> None:
    """From a vector of values, or of vectors, by an index that says no place here and there."""
    D = table(3, 11, 10).astype(dtype)

    def function(u: Any, x: Any) -> Any:
        J = jnp.einsum("dqi,ix->qdx", D, x)
        return jnp.einsum("dqi,qdx->ix", D, J) * u[:, None]

    index = np.random.default_rng(2).integers(0, 50, (29, 10))
    mesh = jm.gather(index)
    fused = jm.fuse(function, in_axes=(mesh, mesh))
    programs = jaxprs.programs(fused, jnp.zeros(50, dtype), jnp.zeros((50, 3), dtype))
    program, _ = normal_form(programs[0])
    rng = np.random.default_rng(3)
    arrays: list[Array] = []
    for operand in program.arguments:
        if operand.dtype.kind == "i":
            arrays.append(np.where(index == 7, 50, index).astype(operand.dtype))
        else:
            arrays.append(rng.uniform(-1, 1, operand.tile).astype(dtype))
    cuda_fused.assert_same(program, arrays, emulate(program, arrays, emulated))


# ---- What has none -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "shape", "lanes"),
    [
        (lambda x: jnp.cumsum(x, axis=1), (8, 8), True),
        (lambda x: jax.vmap(jax.vmap(jnp.linalg.inv))(x), (4, 5, 3, 3), True),
        (lambda x: x - jnp.linalg.norm(x, axis=-1, keepdims=True), (16, 3), True),
        # Rows meet in their mean.
        (lambda x: jnp.cumsum(x, axis=1) - jnp.mean(x, axis=0)[None], (16, 16), False),
        # Threads with columns are side by side in memory.
        (lambda x: jnp.cumsum(x, axis=0), (8, 8), False),
    ],
)
def test_lanes_have_rows_where_these_do_not_meet(
    function: Any, shape: tuple[int, ...], lanes: bool
) -> None:
    program = program_of((function, (shape,)))
    kernel = cuda.lower(cuda.planned(program), (1000,), target=Target("cuda", "sm_90"))
    assert isinstance(kernel, Kernel)
    assert ("on a lane" in kernel.description) == lanes


def test_what_has_no_panels() -> None:
    """A reason is given, and the usual lowering is asked."""
    B = table(16, 16)
    planes: Case = (lambda u: jnp.einsum("qi,rj,ij->qr", B, B, u), ((16, 16),))
    numbers: Case = (lambda u: B.astype("complex128") @ u, ((16,),))
    for program in (program_of(planes), program_of(numbers, "complex128")):
        target = Target("cuda", "sm_90")
        made = cuda.lower(cuda.planned(program), (10,), Parameters(owner="panels"), target)
        assert isinstance(made, Declined) and made.reason


def test_operations_of_lanes_and_of_quads() -> None:
    """A lane does what there is; a quad whole pieces of tables, and single values four times."""
    B = table(11, 10)

    def function(u: Any, c: Any, s: Any) -> Any:
        return B.T @ (c * (B @ u)) * (s + 1)

    program = program_of((function, ((10,), (11,), ())))
    plan = constants_folded(cuda.planned(program))
    lanes, quads = (fields_of(plan, apart=apart) for apart in (True, False))
    # Two tables; functions at points and nodes; one at neither.
    tables = 2 * (2 * 11 * 10)
    assert operations(plan, lanes, limits_of("sm_90")) == tables - 11 - 10 + 11 + 10 + 1
    pieces = 2 * (16 * 12) + 2 * (16 * 12)
    for architecture, rate in (("sm_90", 2), ("sm_89", 1)):
        found = operations(plan, quads, limits_of(architecture))
        assert found == pieces / rate + 16 + 16 + 4


# ---- Machine code --------------------------------------------------------------------------------


# What of a lane's registers may be in local memory: more than that, and it is known to do without.
MOST_LOCAL_BYTES = 64
# Where a lane stores a hundred values and more.
MOST_OF_MATRICES = 256


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "name", [x for x in CASES if "diffusion" in x or "elasticity" in x or "nodes" in x]
)
def test_registers(name: str) -> None:
    kernel = panels(program_of(CASES[name]), (1000,), "sm_90")
    module = native()
    resources = module.resources(module.compile(kernel.source, "sm_90"))
    assert 0 < resources["registers"] * kernel.attributes["threads"] <= 65536
    most = MOST_OF_MATRICES if "matrices" in name else MOST_LOCAL_BYTES
    assert resources["local"] <= most


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [1, 2000, 20011])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, elements: int) -> None:
    function, shapes = CASES[name]
    rng = np.random.default_rng(elements)
    dtype = "float32" if "float32" in name else "float64"
    arrays = [rng.uniform(0.5, 1, (elements, *x)).astype(dtype) for x in shapes]
    with choices.using(Choice.of({"owner": "panels"}, choices.CALLER)):
        found = jax.jit(jm.fuse(function))(*arrays)
    with jax.default_matmul_precision("highest"):  # XLA may round products of float32 to tf32
        wanted = jax.jit(jax.vmap(function))(*arrays)
    assert_near(found, wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [1, 20011])
@pytest.mark.parametrize("name", WITH_TABLES_OF_FLOAT32)
def test_float32_on_a_gpu(name: str, elements: int) -> None:
    function, shapes = CASES[name]
    rng = np.random.default_rng(elements)
    arrays = [rng.uniform(0.5, 1, (elements, *x)).astype("float32") for x in shapes]
    with jax.enable_x64(False), choices.using(Choice.of({"owner": "panels"}, choices.CALLER)):
        found = jax.jit(jm.fuse(function))(*arrays)
    jax.clear_caches()  # JAX takes a derivative for another precision's: constants are arrays of it
    wanted = jax.jit(jax.vmap(function))(*(x.astype("float64") for x in arrays))
    jax.clear_caches()
    assert_near(found, wanted, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [5, 35, 84])
def test_products_of_float32_on_a_gpu(nodes: int) -> None:
    u, B = of_all_sizes(20011, nodes), table(31, nodes).astype(np.float32)
    with choices.using(Choice.of({"owner": "panels"}, choices.CALLER)):
        found = jax.jit(jm.fuse(lambda u: B @ u))(u)
    assert_exact_products(B, u, np.asarray(found))


def assert_near(found: Any, wanted: Any, dtype: str) -> None:
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale, eps = float(jnp.max(jnp.abs(want))), float(np.finfo(dtype).eps)
        np.testing.assert_allclose(have, want, 1e4 * eps, 1e3 * eps * scale)
