"""Index tables as data: arguments of compiled functions, traced indices, and what is freed."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from jaxmagma.primitives import assembly
from tests.einsums import assert_close, normal
from tests.jaxprs import compilations


pytestmark = pytest.mark.usefixtures("sums_of_programs")

GetKey = Callable[[], jax.Array]
Function = Callable[..., Any]
Array = np.ndarray[Any, Any]

COUNT, WIDTH, SIZE = 40, 3, 29


class Space(NamedTuple):
    """What a user's mesh has, among other things."""

    gather: jm.GatherAxis
    scatter: jm.ScatterAxis


def random_dofs(seed: int) -> Array:
    """Neighbours share entries; the last one is used, and the first one often."""
    dofs = np.random.default_rng(seed).integers(0, SIZE, (COUNT, WIDTH))
    dofs[:30, 0], dofs[-1, -1] = 0, SIZE - 1
    return dofs


def space(seed: int = 0, **options: Any) -> Space:
    dofs = random_dofs(seed)
    return Space(jm.gather(dofs, **options), jm.scatter_add(dofs, SIZE, **options))


def element(u: jax.Array, s: jax.Array) -> jax.Array:
    return jnp.sin(u) * s + u[::-1]


def operator(space: Space, v: jax.Array, s: jax.Array) -> jax.Array:
    return jm.fuse(element, (space.gather, 0), space.scatter)(v, s)


def from_indices(dofs: Any, v: jax.Array, s: jax.Array, **options: Any) -> jax.Array:
    made = Space(jm.gather(dofs, **options), jm.scatter_add(dofs, SIZE, **options))
    return operator(made, v, s)


def plain(dofs: Any, v: jax.Array, s: jax.Array) -> jax.Array:
    values = jax.vmap(element)(v[dofs], s)
    return jnp.zeros((SIZE, *v.shape[1:])).at[dofs].add(values)


def energy(function: Function) -> Function:
    return lambda x, v, s: jnp.sum(jnp.sin(function(x, v, s)))


def gradient(function: Function) -> Function:
    return jax.grad(energy(function), (1, 2))


def tangent(function: Function) -> Function:
    return lambda x, v, s: jax.jvp(lambda v, s: function(x, v, s), (v, s), (jnp.cos(v), jnp.sin(s)))


DERIVED: dict[str, Function] = {
    "value": lambda f: f,
    "jvp": tangent,
    "gradient": gradient,
    "jvp of gradient": lambda f: tangent(gradient(f)),
    "hessian": lambda f: jax.hessian(energy(f), 1),
    "vmap": lambda f: lambda x, v, s: jax.vmap(f, (None, None, 0))(x, v, jnp.stack([s, 2 * s])),
    "vmap of gradient": lambda f: (
        lambda x, v, s: jax.vmap(gradient(f), (None, 0, None))(x, jnp.stack([v, 2 * v]), s)
    ),
    "vmap of a branch": lambda f: (
        lambda x, v, s: jax.vmap(
            lambda c: jax.lax.cond(c > 0, lambda: f(x, v * c, s), lambda: f(x, v, s))
        )(jnp.array([-1.0, 2.0]))
    ),
    "scan": lambda f: (
        lambda x, v, s: jax.lax.scan(lambda v, c: (f(x, v, c * s), None), v, jnp.array([0.1, 0.2]))
    ),
    "gradient of scan": lambda f: gradient(
        lambda x, v, s: jax.lax.scan(lambda v, c: (f(x, v, c * s), None), v, jnp.array([0.1, 0.2]))[
            0
        ]
    ),
    "checkpoint": lambda f: gradient(jax.checkpoint(f)),
}


@pytest.fixture
def arrays(getkey: GetKey) -> tuple[jax.Array, jax.Array]:
    return normal(getkey(), (SIZE, 2)), normal(getkey(), (COUNT, WIDTH, 2))


# ---- As arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 16, 17, 300])
def test_tables_made_on_a_device(most: int) -> None:
    rng = np.random.default_rng(most)
    index = rng.integers(-1, 61, 900).astype(np.int32)
    index[rng.permutation(900)[:most]] = 5  # an entry with so many contributions, and more
    on_host = assembly._tables(np, *assembly._surveyed_on_host(index, 60))
    on_device = assembly._tables(jnp, *assembly._surveyed(jnp.asarray(index), 60))
    for ours, others in zip(on_host, on_device, strict=True):
        np.testing.assert_array_equal(ours, others)


@pytest.mark.parametrize("name", DERIVED)
def test_a_mesh_as_an_argument_or_of_traced_indices(
    name: str, arrays: tuple[jax.Array, jax.Array]
) -> None:
    derive = DERIVED[name]

    def all_of_them(mesh: Space, dofs: jax.Array, *arrays: jax.Array) -> list[Any]:
        return [
            derive(operator)(mesh, *arrays),
            derive(from_indices)(dofs, *arrays),
            derive(plain)(dofs, *arrays),
        ]

    *found, expected = jax.jit(all_of_them)(space(), random_dofs(0), *arrays)
    for each in found:
        assert_close(each, expected)


def test_meshes_of_equal_shapes_are_compiled_once(arrays: tuple[jax.Array, jax.Array]) -> None:
    function = jax.jit(gradient(operator))
    meshes = [space(seed) for seed in range(4)]
    expected = [jax.jit(gradient(plain))(random_dofs(seed), *arrays) for seed in range(4)]
    function(meshes[0], *arrays)
    with compilations() as compiled:
        found = [function(mesh, *arrays) for mesh in meshes]
    assert not compiled
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("as_argument", [True, False])
def test_size_of_the_program_text(as_argument: bool) -> None:
    dofs = np.arange(100_000)[:, None] + np.arange(8)
    size = 100_007
    mesh = Space(jm.gather(dofs, size), jm.scatter_add(dofs, size))

    def function(mesh: Space, v: jax.Array) -> jax.Array:
        return jm.fuse(jnp.sin, mesh.gather, mesh.scatter)(v)

    v = jnp.ones(size)
    for f in (function, jax.grad(lambda mesh, v: jnp.sum(function(mesh, v) ** 2), 1)):
        if as_argument:
            assert len(jax.jit(f).lower(mesh, v).as_text()) < 100_000
        else:
            # Each array once: eight digits for each of the 800 000 indices and their table.
            text = jax.jit(lambda v, f=f: f(mesh, v)).lower(v).as_text()
            arrays = {id(x): x.nbytes for x in jax.tree.leaves(mesh)}
            assert len(text) < 2.1 * sum(arrays.values()) + 100_000


@pytest.mark.parametrize("make", [lambda g: jm.scatter_add(g, SIZE), lambda g: jm.gather(
    jm.scatter_add(random_dofs(0), SIZE))])  # fmt: skip
def test_one_index_serves_both(make: Function) -> None:
    known = jm.gather(random_dofs(0))
    other = make(known)
    assert other.deterministic and other.mode is None
    np.testing.assert_array_equal(other.index, known.index)
    for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(known), strict=True):
        np.testing.assert_array_equal(x, y)
    if isinstance(other, jm.ScatterAxis):
        assert other.index is known.index and other.assembly is known.assembly


def test_one_index_for_vectors_of_other_lengths(arrays: tuple[jax.Array, jax.Array]) -> None:
    v, s = arrays
    known = jm.gather(random_dofs(0))
    longer = jax.jit(lambda a, s: a(s))(jm.scatter_add(known, SIZE + 5), s)
    assert_close(longer, jnp.zeros((SIZE + 5, 2)).at[random_dofs(0)].add(s))
    with pytest.raises(IndexError, match="out of range for size 5"):
        jm.scatter_add(known, 5)
    dropped = jm.scatter_add(known, 5, mode="drop")(s)
    assert_close(dropped, jnp.zeros((5, 2)).at[random_dofs(0)].add(s))
    # A gradient for a vector that is longer than the indices go.
    more = jnp.concatenate([v, jnp.ones((5, 2))])
    found = jax.grad(lambda v: jnp.sum(jm.fuse(jnp.sin, known)(v)))(more)
    assert_close(found, jax.grad(lambda v: jnp.sum(jnp.sin(v[random_dofs(0)])))(more))


def test_meshes_stacked(arrays: tuple[jax.Array, jax.Array]) -> None:
    """A batch of meshes: values, and gradients with their tables, by ``vmap`` over the leaves."""
    v, s = arrays
    meshes = [space(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *meshes)
    dofs = jnp.stack([random_dofs(seed) for seed in range(3)])
    vectors = jnp.stack([v, 2 * v, -v])
    for derive, axes, fields in (
        (lambda f: f, (0, 0, None), vectors),
        (gradient, (0, None, None), v),
        (lambda f: tangent(gradient(f)), (0, 0, None), vectors),
    ):
        found = jax.jit(jax.vmap(derive(operator), axes))(stacked, fields, s)
        expected = jax.jit(jax.vmap(derive(plain), axes))(dofs, fields, s)
        assert_close(found, expected)

    # One vector for all of them.
    def of_all(function: Function) -> Function:
        def total(x: Any, v: jax.Array, s: jax.Array) -> jax.Array:
            return jnp.sum(jax.vmap(function, (0, None, None))(x, v, s) ** 2)

        return jax.jit(jax.grad(total, 1))

    assert_close(of_all(operator)(stacked, v, s), of_all(plain)(dofs, v, s))


def with_index(space: Space, index: jax.Array) -> Space:
    return Space(replace(space.gather, index=index), replace(space.scatter, index=index))


def test_tables_that_do_not_follow_the_index(arrays: tuple[jax.Array, jax.Array]) -> None:
    """Of a part of the elements, or of several indices, tables of one index say nothing."""
    v, s = arrays
    mesh, half = space(), COUNT // 2
    first = with_index(mesh, mesh.gather.index[:half])
    expected = jax.jit(gradient(plain))(random_dofs(0)[:half], v, s[:half])
    assert_close(jax.jit(gradient(operator))(first, v, s[:half]), expected)

    def of_index(index: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        return operator(with_index(mesh, index), v, s)

    several = jnp.stack([random_dofs(seed) for seed in range(3)]).astype(np.int32)
    found, expected = (
        jax.jit(jax.vmap(gradient(f), (0, None, None)))(several, v, s) for f in (of_index, plain)
    )
    assert_close(found, expected)


# ---- Traced indices ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jvp of gradient", "vmap"])
def test_traced_indices_in_any_order(name: str, arrays: tuple[jax.Array, jax.Array]) -> None:
    def function(dofs: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        return from_indices(dofs, v, s, deterministic=False)

    dofs = jnp.asarray(random_dofs(0))
    found = jax.jit(DERIVED[name](function))(dofs, *arrays)
    assert_close(found, jax.jit(DERIVED[name](plain))(dofs, *arrays))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_any_width(dtype: str, arrays: tuple[jax.Array, jax.Array]) -> None:
    dofs = random_dofs(0).astype(dtype)
    expected = plain(random_dofs(0), *arrays)

    def traced_and_known(traced: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        return [from_indices(traced, *arrays), from_indices(dofs, *arrays)]

    for found in jax.jit(traced_and_known)(dofs, *arrays):
        assert_close(found, expected)


def test_several_traced_indices(arrays: tuple[jax.Array, jax.Array]) -> None:
    v, s = arrays
    dofs = jnp.stack([random_dofs(seed) for seed in range(3)])
    for derive, axes, fields in (
        (lambda f: f, (0, None, None), v),
        (gradient, (0, 0, None), jnp.stack([v, 2 * v, -v])),
    ):
        found, expected = (
            jax.jit(jax.vmap(derive(f), axes))(dofs, fields, s) for f in (from_indices, plain)
        )
        assert_close(found, expected)


def test_a_mesh_that_changes_in_a_loop(arrays: tuple[jax.Array, jax.Array]) -> None:
    v, s = arrays
    several = jnp.stack([random_dofs(seed) for seed in range(3)])

    def run(function: Function, v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda v, dofs: (function(dofs, v, s), None), v, several)[0]

    for derive in (lambda f: f, lambda f: jax.grad(lambda v: jnp.sum(f(v)))):
        found, expected = (
            jax.jit(derive(lambda v, f=f: run(f, v)))(v) for f in (from_indices, plain)
        )
        assert_close(found, expected)


OUTSIDE = np.array([[0, 1, 2], [2, 3, 4], [4, 5, -1], [2**31 - 1, -(2**31), 3], [1, 1, 900]])


@pytest.mark.parametrize("wide", ["int32", "int64"])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("mode", ["clip", "drop", None])
def test_modes(mode: str | None, traced: bool, wide: str, getkey: GetKey) -> None:
    dofs = OUTSIDE.astype(wide)
    if wide == "int64":
        dofs[4] = 2**32 + 1, -(2**32) + 2, -(2**40)
    v, s = normal(getkey(), (5,)), normal(getkey(), (5, 3))
    inside = (dofs >= 0) & (dofs < 5)
    near = np.clip(dofs, 0, 4)

    def function(dofs: Any, v: jax.Array, s: jax.Array) -> jax.Array:
        add = jm.scatter_add(dofs, 5, mode=mode)
        return jm.fuse(lambda u, s: jnp.cos(u) * s, (jm.gather(dofs, mode=mode), 0), add)(v, s)

    def expected(dofs: Any, v: jax.Array, s: jax.Array) -> jax.Array:
        there = True if mode == "clip" else inside
        values = jnp.cos(jnp.where(there, v[near], 0)) * s
        return jnp.zeros(5).at[near].add(jnp.where(there, values, 0))

    if mode is None and not traced:
        with pytest.raises(IndexError):
            function(dofs, v, s)
        return
    for derive in (lambda f: f, gradient):
        f = derive(function)
        found = jax.jit(f)(dofs, v, s) if traced else jax.jit(lambda *x, f=f: f(dofs, *x))(v, s)
        assert_close(found, derive(expected)(dofs, v, s))


def test_modes_of_empty_vectors() -> None:
    dofs = jnp.asarray(OUTSIDE)
    for mode in ("fill", "clip"):
        found = jax.jit(lambda d, v, m=mode: jm.fuse(lambda u: u, jm.gather(d, mode=m))(v))(
            dofs, jnp.zeros(0)
        )
        assert found.shape == (5, 3) and not np.any(found)
    total = jax.jit(lambda d, x: jm.scatter_add(d, 0)(x))(dofs, jnp.ones((5, 3)))
    assert total.shape == (0,)


def test_errors_of_traced_indices() -> None:
    with pytest.raises(ValueError, match="mode is 'clip', 'drop' or 'fill', not 'wrap'"):
        jm.gather([[0]], mode="wrap")
    with pytest.raises(TypeError, match="integers of shape"):
        jax.jit(lambda d: jm.gather(d).index)(jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="integers of shape"):
        jax.jit(lambda d: jm.scatter_add(d, 3).index)(1)
    with pytest.raises(IndexError, match=r"gather: .* out of range for a vector of shape \(3,\)"):
        mine = jm.gather([[0, 4]])
        jax.jit(lambda mine, v: jm.fuse(lambda u: u, mine)(v))(mine, jnp.ones(3))
    with pytest.raises(IndexError, match="out of range for size 4"):
        jm.gather([[0, 4]], 4)


def test_errors_of_what_is_no_vector() -> None:
    with pytest.raises(ValueError, match="gather: not all elements have as many indices"):
        jm.gather([[0, 4], [1]])
    with pytest.raises(ValueError, match=r"gather: .* 1\.0 is a scalar"):
        jm.fuse(lambda u: u, jm.gather([[0, 1]]))([1.0, 2.0])
    with pytest.raises(TypeError, match=r"scatter_add: .* truth values"):
        jm.fuse(lambda u: u > 0, jm.gather([[0, 1]]), jm.scatter_add([[0, 1]], 2))(jnp.ones(2))


# ---- The sum of sorted values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        *((count, "float64") for count in (1, 15, 16, 17, 5000)),
        *((5000, dtype) for dtype in ("float32", "complex64", "int32")),
    ],
)
def test_sorted_sums(count: int, dtype: str, getkey: GetKey) -> None:
    """What a GPU does, on a CPU: entries with none, some and thousands of contributions."""
    random = np.random.default_rng(count)
    at = np.where(random.random(count) < 0.5, 3, random.integers(-2, 25, count)).astype(np.int32)
    values = normal(getkey(), (count, 2), dtype)
    expected = np.zeros((27, 2), np.result_type(dtype, np.float64))
    np.add.at(expected, at + 2, np.asarray(values))
    found = jax.jit(assembly.sorted_sum, static_argnums=2)(values, at, 20)
    assert found.dtype == values.dtype
    assert_close(found, expected[2:22].astype(dtype), 1e-13 if dtype == "float64" else 1e-5)
    other = jax.jit(lambda x, at: (assembly.sorted_sum(x, at, 20), jnp.sum(x)))(values, at)[0]
    np.testing.assert_array_equal(other, found)


def test_traced_sums_have_the_same_bits_every_time(getkey: GetKey) -> None:
    dofs = random_dofs(1)
    values = 1 / normal(getkey(), (COUNT, WIDTH))
    add = jax.jit(lambda dofs, x: jm.scatter_add(dofs, SIZE)(x))
    first = np.asarray(add(dofs, values))
    assert all(np.array_equal(add(dofs, values), first) for _ in range(5))


# ---- What is freed -------------------------------------------------------------------------------


def test_a_deleted_mesh_is_gone(arrays: tuple[jax.Array, jax.Array]) -> None:
    def used(function: Function) -> list[Any]:
        mesh = space(7)
        jax.block_until_ready(function(mesh, *arrays))
        return [weakref.ref(x) for x in (mesh.gather, mesh.scatter, *jax.tree.leaves(mesh))]

    compiled = jax.jit(gradient(operator))
    for function in (compiled, gradient(operator), operator):
        used(function)  # what is made once for all
        gc.collect()
        before = len(jax.live_arrays())
        references = used(function)
        gc.collect()
        assert not [x() for x in references if x() is not None]
        assert len(jax.live_arrays()) == before
    closed = space(8)
    references = [weakref.ref(x) for x in jax.tree.leaves(closed)]
    jax.jit(lambda v, s, closed=closed: operator(closed, v, s))(*arrays)
    del closed
    jax.clear_caches()  # a compiled function has what it closes over
    gc.collect()
    assert not [x() for x in references if x() is not None]


def test_memory_is_flat_over_many_meshes(arrays: tuple[jax.Array, jax.Array]) -> None:
    compiled = jax.jit(operator)

    def some(count: int) -> int:
        for seed in range(count):
            mesh = space(seed % 10)
            compiled(mesh, *arrays)
        del mesh
        gc.collect()
        return len(jax.live_arrays())

    assert some(10) == some(1000)


# ---- On several devices --------------------------------------------------------------------------


@pytest.mark.parametrize("derive", [lambda f: f, gradient], ids=["value", "gradient"])
@pytest.mark.parametrize("cut", ["index", "everything"])
def test_tables_on_several_devices(
    cut: str, derive: Function, arrays: tuple[jax.Array, jax.Array]
) -> None:
    """Cut along the elements, and the tables along the entries that their rows are of."""
    devices = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def placed(x: jax.Array) -> jax.Array:
        whole = x.shape != (COUNT, WIDTH) if cut == "index" else x.shape[0] % 4 != 0
        return jax.device_put(x, NamedSharding(devices, P() if whole else P("d")))

    mesh = jax.tree.map(placed, space())
    v, s = jax.device_put(arrays, NamedSharding(devices, P()))
    s = jax.device_put(s, NamedSharding(devices, P("d")))
    found = jax.jit(derive(operator))(mesh, v, s)
    assert_close(found, jax.jit(derive(plain))(random_dofs(0), *arrays))


def test_a_part_of_the_elements_on_each_device(arrays: tuple[jax.Array, jax.Array]) -> None:
    devices = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def of_part(dofs: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
        return jax.lax.psum(from_indices(dofs, v, s), "d")

    specs = P("d"), P(), P("d")
    mapped = jax.shard_map(of_part, mesh=devices, in_specs=specs, out_specs=P())
    dofs = jnp.asarray(random_dofs(0))
    for derive in (lambda f: f, gradient):
        found = jax.jit(derive(mapped))(dofs, *arrays)
        assert_close(found, jax.jit(derive(plain))(dofs, *arrays))


# ---- Many ----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_ten_million_elements() -> None:
    elements, corners = 10_000_000, 8
    random = np.random.default_rng(0)
    dofs = np.arange(elements, dtype=np.int32)[:, None] + random.integers(0, 500, corners)
    dofs = dofs.astype(np.int32)
    size = int(dofs.max()) + 1
    jax.block_until_ready(jnp.asarray(dofs))
    gc.collect()
    before = len(jax.live_arrays())

    mine = jm.gather(dofs, size)
    mesh = Space(mine, jm.scatter_add(mine, size))
    function = jax.jit(lambda mesh, v: jm.fuse(jnp.sin, mesh.gather, mesh.scatter)(v))
    v = jnp.linspace(0.0, 1.0, size, dtype=np.float32)
    found = function(mesh, v)
    assert len(function.lower(mesh, v).as_text()) < 1_000_000
    expected = jnp.zeros_like(v).at[dofs].add(jnp.sin(v[dofs]))
    assert_close(found, expected, 1e-5)
    del mine, mesh, v, found, expected
    gc.collect()
    assert len(jax.live_arrays()) == before
