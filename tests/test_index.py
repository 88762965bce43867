"""Global vectors: ``jm.gather`` and ``jm.scatter_add``, and how contributions are added up."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.primitives import assembly
from jaxmagma.programs.program import Gather
from tests.einsums import assert_close, normal
from tests.jaxprs import programs


pytestmark = pytest.mark.usefixtures("sums_of_programs")

GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]
Array = np.ndarray[Any, Any]

# Seven line elements of three dofs; neighbours share one.
DOFS = 2 * np.arange(7)[:, None] + np.arange(3)
SIZE = 15
MATRIX = np.random.default_rng(0).uniform(-1, 1, (3, 3))


# Each of 30 entries has from none to five contributions; entry 3 has 40 more, and entry 7 has 300.
RANDOM = np.random.default_rng(0)
UNEVEN = np.r_[RANDOM.integers(0, 30, 60), np.full(40, 3), np.full(300, 7)]
UNEVEN = RANDOM.permutation(np.where(UNEVEN == 11, 12, UNEVEN)).reshape(100, 4)


def force(u: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.tanh(MATRIX @ u) * scale


def fused(function: Function = force, *in_axes: Any, **options: Any) -> Function:
    axes = (jm.gather(DOFS), *(in_axes or (0,)))
    return jm.fuse(function, axes, jm.scatter_add(DOFS, SIZE, **options))


def plain(v: jax.Array, scale: jax.Array) -> jax.Array:
    values = jax.vmap(force)(v[DOFS], scale)
    return jnp.zeros((SIZE, *v.shape[1:])).at[DOFS].add(values)


@pytest.fixture
def vector(getkey: GetKey) -> jax.Array:
    return normal(getkey(), (SIZE,))


@pytest.fixture
def scale(getkey: GetKey) -> jax.Array:
    return normal(getkey(), (len(DOFS),))


# ---- Values and derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_values(jit: Function, deterministic: bool, vector: jax.Array, scale: jax.Array) -> None:
    found = jit(fused(deterministic=deterministic))(vector, scale)
    assert_close(found, plain(vector, scale), 1e-14)


@pytest.mark.parametrize("deterministic", [True, False])
def test_derivatives(deterministic: bool, vector: jax.Array, scale: jax.Array) -> None:
    def derivatives(function: Function) -> Any:
        def energy(v: jax.Array, scale: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(function(v, scale)))

        gradient = jax.grad(energy, (0, 1))
        tangent = jnp.cos(vector), jnp.sin(scale)
        return gradient(vector, scale), jax.jvp(gradient, (vector, scale), tangent)[1]

    found = jax.jit(lambda: derivatives(fused(deterministic=deterministic)))()
    assert_close(found, jax.jit(lambda: derivatives(plain))())


def test_hessian(vector: jax.Array, scale: jax.Array) -> None:
    energies = [lambda v, f=f: jnp.sum(f(v, scale) ** 2) for f in (fused(), plain)]
    found, expected = (jax.jit(jax.hessian(f))(vector) for f in energies)
    assert_close(found, expected)


def test_components(getkey: GetKey, scale: jax.Array) -> None:
    """What follows the first axis of a vector are components of each of its entries."""
    v = normal(getkey(), (SIZE, 2))

    def function(u: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.tanh(MATRIX @ u) * scale

    def reference(v: jax.Array) -> jax.Array:
        return jnp.zeros((SIZE, 2)).at[DOFS].add(jax.vmap(function)(v[DOFS], scale))

    found = jax.value_and_grad(lambda v: jnp.sum(fused(function)(v, scale) ** 2))
    expected = jax.value_and_grad(lambda v: jnp.sum(reference(v) ** 2))
    assert_close(jax.jit(found)(v), jax.jit(expected)(v))


def test_several_vectors_at_once(getkey: GetKey, scale: jax.Array) -> None:
    vectors = normal(getkey(), (4, SIZE))

    def gradient(function: Function) -> Function:
        return jax.grad(lambda v, s: jnp.sum(function(v, s) ** 2))

    for transform in (lambda f: f, gradient):
        for axes in ((0, None), (1, None)):
            arrays = vectors if axes[0] == 0 else vectors.T
            found, expected = (
                jax.jit(jax.vmap(transform(f), axes))(arrays, scale) for f in (fused(), plain)
            )
            assert_close(found, expected)


def test_vmap_over_what_is_not_gathered(vector: jax.Array, getkey: GetKey) -> None:
    scales = normal(getkey(), (4, len(DOFS)))
    found, expected = (jax.vmap(f, (None, 0))(vector, scales) for f in (fused(), plain))
    assert_close(found, expected)


def test_one_vector_by_two_indices(vector: jax.Array) -> None:
    """The cotangent adds what comes back by either one."""
    other = DOFS[::-1, ::-1]
    function = jm.fuse(lambda a, b: a @ b, (jm.gather(DOFS), jm.gather(other)))
    found = jax.value_and_grad(lambda v: jnp.sum(jnp.sin(function(v, v))))
    expected = jax.value_and_grad(lambda v: jnp.sum(jnp.sin(jnp.sum(v[DOFS] * v[other], -1))))
    assert_close(jax.jit(found)(vector), expected(vector))


def test_indices_of_any_rank(vector: jax.Array) -> None:
    dofs = np.stack([DOFS, DOFS + 1], 1) % SIZE
    function = jm.fuse(lambda u: (u, u.sum(0)), jm.gather(dofs), (jm.scatter_add(dofs, SIZE), 0))
    found = function(vector)
    assert_close(found[0], jnp.zeros(SIZE).at[dofs].add(vector[dofs]), 1e-14)
    assert_close(found[1], vector[dofs].sum(1), 1e-14)


def test_trees(vector: jax.Array, scale: jax.Array) -> None:
    axes = {"u": jm.gather(DOFS), "s": 0, "unused": None}
    function = jm.fuse(
        lambda d: {"f": force(d["u"], d["s"]), "u": d["u"]},
        in_axes=(axes,),
        out_axes={"f": jm.scatter_add(DOFS, SIZE), "u": -1},
    )
    found = function({"u": vector, "s": scale, "unused": None})
    assert_close(found["f"], plain(vector, scale), 1e-14)
    assert_close(found["u"], vector[DOFS].T, 1e-14)


def test_custom_rules_of_differentiation(vector: jax.Array) -> None:
    """JAX differentiates the function, and what it gathers stays gathered."""
    function = jm.fuse(lambda u: jax.nn.silu(MATRIX @ u), jm.gather(DOFS))
    found = jax.value_and_grad(lambda v: jnp.sum(function(v) ** 2))
    expected = jax.value_and_grad(
        lambda v: jnp.sum(jax.vmap(lambda u: jax.nn.silu(MATRIX @ u))(v[DOFS]) ** 2)
    )
    assert_close(jax.jit(found)(vector), expected(vector))


def test_float32(vector: jax.Array, scale: jax.Array) -> None:
    single = vector.astype(np.float32), scale.astype(np.float32)
    found = jax.jit(jm.fuse(
        lambda u, s: u * s, (jm.gather(DOFS), 0), jm.scatter_add(DOFS, SIZE)
    ))(*single)  # fmt: skip
    assert found.dtype == np.float32
    expected = jnp.zeros(SIZE, np.float32).at[DOFS].add(single[0][DOFS] * single[1][:, None])
    assert_close(found, expected, 1e-6)


# ---- Many contributions to one entry -------------------------------------------------------------


@pytest.mark.parametrize("valence", [1, 16, 17, 300])
def test_entries_that_very_many_elements_share(valence: int, getkey: GetKey) -> None:
    dofs = np.stack([np.zeros(valence, int), 2 + np.arange(valence)], 1)
    size = valence + 3  # entry 1 and the last one get nothing
    values = normal(getkey(), (valence, 2))
    add = jax.jit(jm.fuse(lambda x: x, out_axes=jm.scatter_add(dofs, size)))
    assert_close(add(values), jnp.zeros(size).at[dofs].add(values), 1e-14)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(add(x) ** 2)))(values)
    assert_close(gradient, 2 * add(values)[dofs], 1e-14)


def test_bits_are_the_same_every_time(getkey: GetKey) -> None:
    random = np.random.default_rng(0)
    dofs = random.integers(0, 50, (400, 5))
    values = normal(getkey(), (400, 5)) * 10.0 ** random.integers(-8, 8, (400, 5))
    add = jax.jit(jm.fuse(lambda x: 1 / x, out_axes=jm.scatter_add(dofs, 50)))
    first = np.asarray(add(values))
    assert all(np.array_equal(add(values), first) for _ in range(5))
    # Compiled anew, and as a part of something else.
    other = jax.jit(lambda x: (add(x), jnp.sum(x)))(values)[0]
    np.testing.assert_array_equal(other, first)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as narrow as those of the longest vectors."""
    monkeypatch.setattr(assembly, "_LAUNCH", 0)


@pytest.mark.parametrize("launch", [0, 200, 12_000_000])
@given(data=st.data())
@settings(max_examples=30)
def test_each_value_is_added_once(launch: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, 600))
    share = data.draw(st.floats(0, 1))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    at = np.where(random.random(count) < share, 0, random.integers(-1, size + 1, count))
    at = at.astype(np.int32)
    values = random.integers(0, 2**40, count)

    def summed(vector: Any, table: Any) -> Any:
        places = np.reshape(table, (len(table), -1))
        assert places.shape[1] <= 16
        return np.where(places >= 0, vector[places], 0).sum(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "_LAUNCH", launch)
        made = assembly.assembly(jnp.asarray(at), size).tables
    *partial, table, link = (*made, None) if len(made) == 1 else made
    found = summed(values, table)
    if link is not None:
        found = found + summed(functools.reduce(summed, partial, values), link)
    expected = np.zeros(size + 2, int)
    np.add.at(expected, at + 1, values)
    np.testing.assert_array_equal(found, expected[1:-1])


def box(p: int, cells: int) -> Array:
    """The nodes of hexahedra of order ``p``, ``cells`` along each edge of a cube."""
    along = np.arange(cells)[:, None] * p + np.arange(p + 1)
    x, y, z = (along[c.ravel()] for c in np.meshgrid(*[np.arange(cells)] * 3, indexing="ij"))
    nodes = cells * p + 1
    return (x[:, :, None, None] * nodes + y[:, None, :, None]) * nodes + z[:, None, None, :]


def tables(dofs: Any, size: int) -> tuple[jax.Array, ...]:
    return assembly.assembly(jnp.asarray(dofs, np.int32), size).tables


@pytest.mark.parametrize("launch", [0, 12_000_000])
def test_tables_are_the_same_wherever_they_are_made(
    launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By numpy, or on a device, which this CPU stands in for."""
    monkeypatch.setattr(assembly, "_LAUNCH", launch)
    at = jnp.asarray(np.where(UNEVEN == 5, -1, UNEVEN), np.int32)
    made = assembly._tables(jnp, *assembly._surveyed(at, 29))
    for x, y in zip(made, tables(at, 29), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("p", "width"), [(1, 8), (2, 8), (3, 4), (4, 4), (5, 2), (6, 2), (8, 2)])
def test_widths_of_hexahedra(p: int, width: int, narrow: None) -> None:
    dofs = box(p, 48 // p)
    *partial, table = tables(dofs, int(dofs.max()) + 1)[: 2 if width < 8 else 1]
    assert table.shape[1] == width
    assert [x.shape[1] for x in partial] == [8 - width] * (width < 8)


def test_short_vectors_have_one_table() -> None:
    (table,) = tables(box(6, 3), 19**3)
    assert table.shape == (19**3, 8)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "complex64", "int32"])
@pytest.mark.parametrize("components", [(), (2,), (3, 2)])
def test_uneven_sums(components: tuple[int, ...], dtype: str, narrow: None, getkey: GetKey) -> None:
    values = normal(getkey(), (*UNEVEN.shape, *components), dtype)
    assert len(tables(UNEVEN, 30)) == 5  # three for partial sums
    add = jm.fuse(lambda x: 2 * x, out_axes=jm.scatter_add(UNEVEN, 30))
    wide = "int64" if dtype == "int32" else np.result_type(dtype, np.longdouble)
    expected = np.zeros((30, *components), wide)
    np.add.at(expected, UNEVEN, 2 * np.asarray(values).astype(wide))
    found = jax.jit(add)(values)
    assert found.dtype == values.dtype
    assert not np.any(found[11])
    bound = 0.0 if dtype == "int32" else 30 * np.finfo(dtype).eps
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())
    np.testing.assert_array_equal(jax.jit(lambda x: (add(x), jnp.sum(x)))(values)[0], found)


def energy(function: Function) -> Function:
    return lambda v, s: jnp.sum(jnp.sin(function(v, s)))


def gradient(function: Function) -> Function:
    return jax.grad(energy(function), (0, 1))


def tangent(function: Function) -> Function:
    return lambda v, s: jax.jvp(function, (v, s), (jnp.cos(v), jnp.sin(s)))


DERIVED: dict[str, Function] = {
    "jvp": tangent,
    "gradient": gradient,
    "jvp of gradient": lambda f: tangent(gradient(f)),
    "gradient of jvp": lambda f: gradient(lambda v, s: tangent(f)(v, s)[1]),
    "hessian": lambda f: jax.hessian(energy(f), (0, 1)),
    "vmap": lambda f: lambda v, s: jax.vmap(f, (None, 1), 2)(v, jnp.stack([s, 2 * s, s * s], 1)),
    "vmap of gradient": lambda f: (
        lambda v, s: jax.vmap(gradient(f), (0, None))(jnp.stack([v, 2 * v]), s)
    ),
    "gradient of vmap": lambda f: gradient(jax.vmap(f, (0, None))),
    "vmap of a branch": lambda f: (
        lambda v, s: jax.vmap(lambda x: jax.lax.cond(x[0] > 0, lambda: f(v * x[0], s), lambda: v))(
            v
        )
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_uneven_sums(name: str, narrow: None, getkey: GetKey) -> None:
    def element(u: jax.Array, s: jax.Array) -> jax.Array:
        return jnp.sin(u) * s

    def plain(v: jax.Array, s: jax.Array) -> jax.Array:
        values = jax.vmap(element)(v[UNEVEN], s)
        return jnp.zeros((30, 2)).at[UNEVEN].add(values)

    fused = jm.fuse(element, (jm.gather(UNEVEN), 0), jm.scatter_add(UNEVEN, 30))
    v, s = normal(getkey(), (30, 2)), normal(getkey(), (100, 4, 2))
    if name == "gradient of vmap":
        v = jnp.stack([v, 2 * v])
    found, expected = (jax.jit(DERIVED[name](f))(v, s) for f in (fused, plain))
    assert_close(found, expected)


def test_the_way_back_is_one_gather(narrow: None, getkey: GetKey) -> None:
    add = jm.scatter_add(UNEVEN, 30)
    _, transpose = jax.vjp(add, normal(getkey(), (*UNEVEN.shape, 2)))
    (program,) = programs(transpose, jnp.ones((30, 2)))
    assert [type(x) for x in program.operations] == [Gather]


def test_uneven_sums_on_several_devices(narrow: None, getkey: GetKey) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    fused = jm.fuse(lambda u, s: jnp.sin(u) * s, (jm.gather(UNEVEN), 0), jm.scatter_add(UNEVEN, 30))
    v, s = normal(getkey(), (4, 30)), normal(getkey(), (100, 4))
    expected = jax.jit(gradient(fused))(v[0], s)
    cut = jax.device_put(s, NamedSharding(mesh, P("d")))
    assert_close(jax.jit(gradient(fused))(v[0], cut), expected)

    several = jax.vmap(fused, (0, None))
    mapped = jax.shard_map(several, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    assert_close(jax.jit(gradient(mapped))(v, s), jax.jit(gradient(several))(v, s))


def test_no_elements() -> None:
    dofs = np.zeros((0, 3), int)
    function = jm.fuse(lambda u: 2 * u, jm.gather(dofs), jm.scatter_add(dofs, 4))
    assert function(jnp.ones(4)).tolist() == [0, 0, 0, 0]
    assert assembly._tables(jnp, *assembly._surveyed(jnp.zeros(0, np.int32), 4))
    add = jax.jit(lambda dofs, x: jm.scatter_add(dofs, 4)(x))
    assert add(jnp.asarray(dofs), jnp.ones((0, 3))).tolist() == [0, 0, 0, 0]


def test_elements_without_values() -> None:
    """As those that touch no boundary have of it; and vectors of nothing, or of no components."""
    none, dofs = np.zeros((3, 0), int), np.zeros((3, 2), int)
    u, no_components = jnp.arange(4.0), jnp.zeros((4, 0))

    def function(on_boundary: Any, own: Any) -> Any:
        return 2 * on_boundary, jnp.sum(on_boundary) + own

    out_axes = (jm.scatter_add(none, 4), jm.scatter_add(dofs, 4))
    fused = jm.fuse(function, (jm.gather(none), jm.gather(dofs)), out_axes)
    for boundary in (u, u[:0]):
        empty, found = jax.jit(fused)(boundary, u + 1)
        assert empty.tolist() == [0, 0, 0, 0] and found.tolist() == [6, 0, 0, 0]
        slopes = jax.grad(lambda *us: jnp.sum(fused(*us)[1]), (0, 1))(boundary, u)
        assert slopes[0].tolist() == [0] * len(boundary) and slopes[1].tolist() == [6, 0, 0, 0]
    assert jm.fuse(lambda x: x + 1, jm.gather(dofs))(no_components).shape == (3, 2, 0)
    assert jm.fuse(jnp.sum, jm.gather(dofs))(no_components).tolist() == [0, 0, 0]
    missing = jm.gather(dofs, mode="fill")
    assert jm.fuse(lambda x: x + 1, missing)(u[:0]).tolist() == [[1, 1]] * 3


def test_vectors_of_integers_and_truth_values() -> None:
    """Alone, which no kernel computes with, and beside floating-point numbers."""
    dofs = np.array([[0, 1], [1, 2]])
    count, mask = jnp.arange(3), jnp.array([True, False, True])
    double = jm.fuse(lambda k: 2 * k, jm.gather(dofs), jm.scatter_add(dofs, 3))
    assert jax.jit(double)(count).tolist() == [0, 4, 4]
    inverted = jm.fuse(lambda m: ~m, jm.gather(dofs))(mask)
    np.testing.assert_array_equal(inverted, ~mask[dofs])
    scaled = jm.fuse(lambda k, u: jnp.sin(u) * k.astype(u.dtype), (jm.gather(dofs), 0))
    u = jnp.linspace(0.0, 1.0, 4).reshape(2, 2)
    assert_close(scaled(count, u), jnp.sin(u) * count[dofs].astype(u.dtype))


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [jm.gather, lambda dofs: jm.scatter_add(dofs, SIZE)])
def test_indices_must_be_integers_that_are_inside(make: Function) -> None:
    with pytest.raises(TypeError, match="integers"):
        make(DOFS * 1.0)
    with pytest.raises(TypeError, match="integers"):
        make(3)
    with pytest.raises(IndexError, match="index -1 is negative"):
        make(DOFS - 1)
    with pytest.raises(IndexError, match="31 bits"):
        make(DOFS + 2**31)


def test_index_beyond_the_end(vector: jax.Array, scale: jax.Array) -> None:
    with pytest.raises(IndexError, match=r"gather: index 14 is out of range .*\(14,\)"):
        fused()(vector[:-1], scale)
    with pytest.raises(IndexError, match="scatter_add: index 14 is out of range for size 14"):
        jm.scatter_add(DOFS, SIZE - 1)


@pytest.mark.parametrize("make", [jm.gather, jm.scatter_add])
def test_sizes_and_flags_of_the_wrong_kind(make: Function) -> None:
    for size in (15.0, "15", jnp.array(15.0)):
        with pytest.raises(TypeError, match=f"{make.__name__}: size is an integer"):
            make(DOFS, size)
    with pytest.raises(ValueError, match=f"{make.__name__}: size is at least 0, not -1"):
        make(DOFS, -1)
    for flag in ("no", None, 1):
        with pytest.raises(TypeError, match=f"{make.__name__}: deterministic is True or False"):
            make(DOFS, SIZE, deterministic=flag)
    for integer in (np.int64(SIZE), jnp.array(SIZE)):
        axis = make(DOFS, integer, deterministic=np.False_)
        assert axis.bound == SIZE and axis.deterministic is False


def test_axes_in_the_wrong_place(vector: jax.Array) -> None:
    with pytest.raises(TypeError, match="no entry of out_axes"):
        jm.fuse(lambda u: u, out_axes=jm.gather(DOFS))
    with pytest.raises(TypeError, match="no entry of in_axes"):
        jm.fuse(lambda u: u, in_axes=(jm.scatter_add(DOFS, SIZE),))
    with pytest.raises(ValueError, match=r"in_axes must be a tree prefix(?s:.*)length 1"):
        jm.fuse(lambda u, s: u, in_axes=(jm.gather(DOFS),))(vector, vector)


def test_keys_are_no_numbers() -> None:
    with pytest.raises(TypeError, match=r"gather: .*key<fry>\[15\].*key_data"):
        jm.fuse(lambda k: k, jm.gather(DOFS))(jax.random.split(jax.random.key(0), SIZE))


def test_wrong_shapes(vector: jax.Array, scale: jax.Array) -> None:
    with pytest.raises(ValueError, match=r"values of shape \(2,\) each.*\(7, 3\)"):
        fused(lambda u, s: u[:2] * s)(vector, scale)
    with pytest.raises(ValueError, match="inconsistent sizes") as raised:
        fused()(vector, scale[:-1])
    for told in ("argument u of type int32[7,3]", "argument scale of type float64[6]"):
        assert told in str(raised.value)
    assert "the indices" in "".join(raised.value.__notes__)


def test_description() -> None:
    assert repr(jm.gather(DOFS)) == "gather(7 elements of shape (3,))"
    assert repr(jm.scatter_add(DOFS, SIZE)) == "scatter_add(7 elements of shape (3,), 15)"
