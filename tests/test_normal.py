"""The normal form computes the same, and no more, whatever the spelling."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmagma as jm
from jaxmagma.plans.plan import plan
from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram, Input, Map, Output, Place, View
from jaxmagma.programs.strides import box_of, places
from tests.jaxprs import equations


ELEMENTS, NODES, POINTS = 3, 3, 4
RANDOM = np.random.default_rng(0)
B, G = RANDOM.normal(size=(2, POINTS, NODES))
TABLES = (G, B, B), (B, G, B), (B, B, G)
U = RANDOM.normal(size=(ELEMENTS, NODES, NODES, NODES, 3))
J = RANDOM.normal(size=(ELEMENTS, POINTS, POINTS, POINTS, 3, 3))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def program_of(function: Callable[..., Any], *arrays: Any) -> ElementProgram:
    """The one program of a fused function."""
    closed = jax.make_jaxpr(jm.fuse(function))(*arrays)
    (equation,) = (x for x in equations(closed) if x.primitive.name == "element_program")
    program: ElementProgram = equation.params["program"]
    return program


def operations(program: ElementProgram) -> int:
    return len(normal_form(program)[0].operations)


def moves(program: ElementProgram) -> int:
    """How many tiles of several components are put together."""
    normal, _ = normal_form(program)
    results = {out.value for out in normal.outputs}
    made = enumerate(normal.operations, start=len(normal.inputs))
    return sum(isinstance(x, Place) and number not in results for number, x in made)


def check(program: ElementProgram, arrays: Any) -> None:
    normal, kept = normal_form(program)
    found = reference.evaluate(normal, *(arrays[n] for n in kept))
    for x, y in zip(found, reference.evaluate(program, *arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12 * float(jnp.max(jnp.abs(y))))


# ---- One mathematics, several spellings ----------------------------------------------------------


def gradient(u: jax.Array) -> jax.Array:
    return jnp.stack([jnp.einsum("xa,yb,zc,abcv->xyzv", *t, u) for t in TABLES], -1)


def transposed(flux: Any) -> Any:
    return sum(jnp.einsum("xa,yb,zc,xyzv->abcv", *t, flux[d]) for d, t in enumerate(TABLES))


def arrays_last(u: Any, j: Any) -> Any:
    g = gradient(u) @ j
    s = g + jnp.swapaxes(g, -1, -2) + jnp.trace(g, axis1=-2, axis2=-1)[..., None, None] * jnp.eye(3)
    k = s @ jnp.swapaxes(j, -1, -2)
    return transposed([k[..., d] for d in range(3)])


def of_a_point(u: Any, j: Any) -> Any:
    def at_point(g: jax.Array, j: jax.Array) -> jax.Array:
        g = g @ j
        return (g + g.T + jnp.trace(g) * jnp.eye(3)) @ j.T

    k = jax.vmap(jax.vmap(jax.vmap(at_point)))(gradient(u), j)
    return transposed([k[..., d] for d in range(3)])


def by_sums(u: Any, j: Any) -> Any:
    g = jnp.sum(gradient(u)[..., :, :, None] * j[..., None, :, :], -2)
    trace = jnp.einsum("...ii->...", g)
    s = jnp.einsum("...ij->...ji", g) + g + jnp.einsum("...,ij->...ij", trace, jnp.eye(3))
    k = jnp.einsum("...vf,...df->...vd", s, j)
    return transposed([k[..., d] for d in range(3)])


def energy(u: jax.Array, j: jax.Array) -> jax.Array:
    g = jnp.einsum("...vd,...df->...vf", gradient(u), j)
    strain = 0.5 * (g + jnp.swapaxes(g, -1, -2))
    trace = jnp.trace(g, axis1=-2, axis2=-1)
    return jnp.sum(strain**2) + 0.5 * jnp.sum(trace**2)


SPELLINGS = {
    "arrays": arrays_last,
    "function of a point": of_a_point,
    "sums": by_sums,
    "gradient of an energy": jax.grad(energy),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_have_the_operations_of_the_best(spelling: str) -> None:
    program = program_of(SPELLINGS[spelling], U, J)
    check(program, (U, J))
    assert operations(program) <= 1.15 * operations(program_of(arrays_last, U, J))
    assert moves(program) == 0


@pytest.mark.parametrize(("n", "q", "dimension"), [(4, 4, 3), (4, 5, 3), (5, 6, 3), (4, 5, 2)])
def test_one_product_of_all_factors(n: int, q: int, dimension: int) -> None:
    """However JAX multiplies them two at a time, no matrix is made for pairs of nodes."""
    B = np.random.default_rng(n).uniform(-1, 1, (q, n))
    tables, points = [B] * dimension, "xyz"[:dimension]
    there = ",".join(["xa", "yb", "zc"][:dimension])
    back = ",".join(["xi", "yj", "zk"][:dimension])
    nodes, result = "abc"[:dimension], "ijk"[:dimension]

    def at_once(u: Any, w: Any) -> Any:
        spec = f"{back},{points},{there},{nodes}->{result}"
        return jnp.einsum(spec, *tables, w, *tables, u)

    def one_by_one(u: Any, w: Any) -> Any:
        v = w * jnp.einsum(f"{there},{nodes}->{points}", *tables, u)
        return jnp.einsum(f"{back},{points}->{result}", *tables, v)

    rng = np.random.default_rng(q)
    u, w = (rng.uniform(0, 1, (ELEMENTS, *(m,) * dimension)) for m in (n, q))
    program = program_of(at_once, u, w)
    check(program, (u, w))
    normal, other = (normal_form(program_of(x, u, w))[0] for x in (at_once, one_by_one))
    assert plan(normal).flops <= plan(other).flops


def determinant(f: jax.Array) -> jax.Array:
    return jnp.einsum("...i,...i->...", f[..., 0, :], jnp.cross(f[..., 1, :], f[..., 2, :]))


def neo_hookean(u: jax.Array, j: jax.Array) -> jax.Array:
    f = 0.05 * gradient(u) @ j + jnp.eye(3)
    log = jnp.log(determinant(f) ** 2)
    return jnp.sum(0.5 * jnp.sum(f * f, (-1, -2)) - log + 0.5 * log**2)


@pytest.mark.parametrize("order", ["residual", "tangent"])
def test_derivatives_are_code_at_the_points(order: str) -> None:
    """What a slice is differentiated to is no tile of zeros with a part that is not."""
    residual = jax.grad(neo_hookean)
    if order == "tangent":
        program = program_of(
            lambda u, v, j: jax.jvp(lambda u: residual(u, j), (u,), (v,))[1], U, U, J
        )
        check(program, (U, U, J))
    else:
        program = program_of(residual, U, J)
        check(program, (U, J))
    assert moves(program) == 0


AXES = st.permutations(range(3))


@settings(max_examples=8, deadline=None)
@given(permutation=AXES, stack=st.booleans(), pieces=st.sampled_from(["list", "at", "concatenate"]))
def test_random_rewrites(permutation: list[int], stack: bool, pieces: str) -> None:
    """Components in any order in memory, put together in any way, are the same operations."""
    rows = [permutation.index(n) for n in range(3)]

    def rewritten(u: Any, j: Any) -> Any:
        u = jnp.stack([u[..., n] for n in rows], -1) if stack else u[..., np.array(rows)]
        g = gradient(u) @ j
        parts = [[g[..., a, b] + g[..., b, a] for b in range(3)] for a in range(3)]
        if pieces == "list":
            s = jnp.stack([jnp.stack(row, -1) for row in parts], -2)
        elif pieces == "concatenate":
            s = jnp.concatenate([jnp.stack(row, -1)[..., None, :] for row in parts], -2)
        else:
            s = jnp.zeros_like(g)
            for a in range(3):
                for b in range(3):
                    s = s.at[..., a, b].set(parts[a][b])
        s = s + jnp.trace(g, axis1=-2, axis2=-1)[..., None, None] * jnp.eye(3)
        k = s @ jnp.swapaxes(j, -1, -2)
        return transposed([k[..., d] for d in range(3)])

    u = U[..., permutation]
    program = program_of(rewritten, u, J)
    check(program, (u, J))
    np.testing.assert_allclose(
        jm.fuse(rewritten)(u, J), jm.fuse(arrays_last)(U, J), rtol=1e-11, atol=1e-11
    )
    assert operations(program) <= operations(program_of(arrays_last, U, J)) + 3
    assert moves(program) == 0


def test_a_matrix_that_makes_strains_is_part_of_a_program() -> None:
    """Put together at each point, from derivatives of four nodes, as textbooks have it."""
    slopes = RANDOM.normal(size=(5, 4, 3))

    def force(u: Any, X: Any) -> Any:
        def at_point(slope: Any) -> Any:
            dx = X.T @ slope
            g = slope @ jnp.linalg.inv(dx)
            strain = jnp.zeros((6, 12))
            for n in range(3):
                m = (n + 1) % 3
                strain = strain.at[n, n::3].set(g[:, n])
                strain = strain.at[3 + n, n::3].set(g[:, m]).at[3 + n, m::3].set(g[:, n])
            return strain.T @ (strain @ u.reshape(-1)) * jnp.linalg.det(dx)

        return jax.vmap(at_point)(slopes).sum(0).reshape(4, 3)

    u, X = RANDOM.normal(size=(2, ELEMENTS, 4, 3))
    program_of(force, u, X)  # is one
    for function in (force, jax.grad(lambda u, X: jnp.sum(jnp.sin(force(u, X))), (0, 1))):
        found, expected = (jax.jit(f(function))(u, X) for f in (jm.fuse, jax.vmap))
        for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11 * np.abs(wanted).max())


@pytest.mark.parametrize(("n", "dimension"), [(3, 2), (5, 2), (4, 3)])
def test_faces_of_an_element_leave_the_rest_a_field(n: int, dimension: int) -> None:
    """What is taken of a field along an axis with a matrix is no reason to take it all apart."""
    rng = np.random.default_rng(n)
    D, lift = rng.uniform(-1, 1, (n, n)), rng.uniform(-1, 1, n)
    q = rng.uniform(-1, 1, (6, *[n] * dimension, 2))
    outside = rng.uniform(-1, 1, (6, *[n] * (dimension - 1), 2))

    def flux(q: Any, outside: Any) -> Any:
        along: Any = [jnp.moveaxis(jnp.tensordot(D, q, (1, a)), 0, a) for a in range(dimension)]
        jump = lift.reshape(-1, *[1] * dimension) * (outside - q[0] + q[-1])[None]
        return (
            jnp.stack([along[0][..., 0] + q[..., 1] ** 2, sum(along[1:], along[0])[..., 1]], -1)
            + jump
        )

    program = program_of(flux, q, outside)
    check(program, (q, outside))
    normal, _ = normal_form(program)
    if n**dimension > 9:
        assert len(normal.operations) <= 40
    got, want = jm.fuse(flux)(q, outside), jax.vmap(flux)(q, outside)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


# ---- What it is made of --------------------------------------------------------------------------


def flat(tile: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(tile))).reshape(tile)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_boxes_are_parts(data: st.DataObject) -> None:
    tile = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    part, dropped = flat(tile), []
    for axis, extent in enumerate(tile):
        first = data.draw(st.integers(0, extent - 1))
        step = data.draw(st.sampled_from([1, 2, -1]))
        count = data.draw(st.integers(1, len(range(first, extent if step > 0 else -1, step))))
        part = np.take(part, [first + n * step for n in range(count)], axis)
        if count == 1 and data.draw(st.booleans()):
            dropped.append(axis)
    part = part.squeeze(tuple(dropped))
    part = part.transpose(data.draw(st.permutations(range(part.ndim))))
    strides = tuple(
        int(np.diff(part, axis=n).flat[0]) if extent > 1 else 0
        for n, extent in enumerate(part.shape)
    )
    offset = int(part.flat[0])
    np.testing.assert_array_equal(places(offset, strides, part.shape), part)
    box = box_of(tile, offset, strides, part.shape)
    assert box is not None
    shown = flat(tile)[np.ix_(*([a + n * b for n in range(c)] for a, b, c, _ in box))]
    order = [position for *_, position in box if position is not None]
    kept = [n for n, (*_, position) in enumerate(box) if position is not None]
    shown = shown.reshape([shown.shape[n] for n in kept]).transpose(np.argsort(order))
    np.testing.assert_array_equal(shown.squeeze(), part.squeeze())


def test_zeros_of_structure_go_and_zeros_among_values_stay() -> None:
    builder = Builder(1)
    x = builder.input(Input((0,), (3,), np.dtype(float)))
    y = builder.input(Input((0,), (), np.dtype(float)))
    padded = builder.place([(y, 1, ())], (3,))
    product = builder.map("mul", padded, x)
    program = builder.build([Output(product, (0,))]).program
    assert operations(program) < len(program.operations) + 2
    arrays = np.array([[np.inf, 2.0, np.nan]]), np.array([3.0])
    normal, kept = normal_form(program)
    (found,) = reference.evaluate(normal, *(arrays[n] for n in kept))
    np.testing.assert_array_equal(found, [[0.0, 6.0, 0.0]])
    # In a function of the user's zeros are values: infinities go through them.
    f = lambda x, y: jnp.pad(y[None], (1, 1)) * x  # noqa: E731
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(jm.fuse(f)(*arrays), jax.vmap(f)(*arrays))


def test_results_that_no_element_has_a_part_in_keep_their_axis() -> None:
    function = lambda x: jnp.pad(x[:0], (0, 3))  # noqa: E731
    np.testing.assert_array_equal(jm.fuse(function)(U[..., 0, 0, 0]), np.zeros((ELEMENTS, 3)))


def test_is_its_own_normal_form() -> None:
    for spelling in SPELLINGS.values():
        normal, _ = normal_form(program_of(spelling, U, J))
        again, kept = normal_form(normal)
        assert again == normal and kept == tuple(range(len(normal.arguments)))


def test_views_of_arguments_are_loads() -> None:
    normal, _ = normal_form(program_of(arrays_last, U, J))
    viewed = [x.operand for x in normal.operations if isinstance(x, View)]
    assert viewed and not any(isinstance(normal.operations[0], Map) for _ in viewed[:1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_constant_factors_of_every_dtype(dtype: str) -> None:
    x = jnp.asarray(RANDOM.normal(size=(ELEMENTS, 4)), dtype)
    got = jm.fuse(lambda x: 2 * (3 * x))(x)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(
        got.astype("float64"), 6 * x.astype("float64"), rtol=4 * float(jnp.finfo(dtype).eps)
    )
