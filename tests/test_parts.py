"""Programs that are too large for one kernel: their parts have kernels, and are the program.

Small programs are too large for backends with little room; so everything about them can be run.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmagma as jm
from benchmarks import cases, fused
from jaxmagma import choices, lowering
from jaxmagma.choices import Choice
from jaxmagma.faces.explain import applications
from jaxmagma.frontends.einsum import FusedCall, capture
from jaxmagma.lowering import cpu, cuda, division
from jaxmagma.lowering.cuda import kernels, model
from jaxmagma.lowering.cuts import as_program
from jaxmagma.lowering.division import divide
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.parts import ARGUMENT, Division, Whole, by_sums
from jaxmagma.plans.plan import alternatives, plan
from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.fallback import plain_calls
from jaxmagma.programs.program import ElementProgram, Input, Output
from jaxmagma.tune.tuner import programs
from tests import cuda_emulator, cuda_fused
from tests.cuda_programs import arguments, gradient, mass, several_outputs
from tests.einsums import Call, assert_close, fused_calls, normal


F64 = np.dtype(np.float64)
EXTENTS = (1000,)
GetKey = Callable[[], jax.Array]
Limit = Callable[[int], None]


def evaluated(found: Division, arrays: Sequence[Any]) -> list[Any]:
    """What the parts of a program compute together."""
    made: list[Any] = []
    for part in found.parts:
        operands = (arrays[n] if k == ARGUMENT else made[k][n] for k, n in part.arguments)
        made.append(reference.evaluate(part.program, *operands))
    return [sum(made[k][n] for k, n in sources) for sources in found.results]


def assert_is(found: Division, program: ElementProgram, extents: Sequence[int] = (3,)) -> None:
    """The parts compute what the program means."""
    arrays = arguments(program, extents)
    wanted = reference.evaluate(program, *arrays)
    for got, want in zip(evaluated(found, arrays), wanted, strict=True):
        assert got.shape == want.shape
        scale = float(jnp.max(jnp.abs(want), initial=1.0))
        assert_close(got / scale, want / scale, 1e-11)


# ---- Backends with little room -------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch, cuda_lowering: None) -> Iterator[Limit]:
    """A function that says how many bytes of shared memory a block of threads has."""
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")

    def limit(nbytes: int) -> None:
        def choose(plan: Any, given: Any, limits: Any, *options: Any) -> Any:
            return model.choose(plan, given, replace(limits, shared_of_block=nbytes), *options)

        monkeypatch.setattr(kernels, "choose", choose)
        forget()

    yield limit
    division._divided.cache_clear()


@pytest.fixture
def little_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """A function that says how many values of an element a CPU has caches for."""

    def limit(values: int) -> None:
        monkeypatch.setattr(cpu, "_SCRATCH_BYTES", values * cpu._VECTOR_BYTES)
        forget()

    yield limit
    forget()


def forget() -> None:
    lowering._lower.cache_clear()
    division._divided.cache_clear()


def room_of(lower: Callable[[], Any], limit: Limit) -> int:
    """How much room something needs: so many times too much is it for a room of one."""
    limit(1)
    declined = lower()
    assert isinstance(declined, Declined) and declined.excess is not None
    return round(declined.excess.times)


def shared_bytes(program: ElementProgram, limit: Limit) -> int:
    return room_of(lambda: lowering.lower(program, EXTENTS, "cuda"), limit)


def divided(program: ElementProgram, extents: tuple[int, ...] = EXTENTS) -> Division:
    """The parts of a program that is too large for a CUDA kernel."""
    assert isinstance(lowering.lower(program, extents, "cuda"), Declined)
    found = divide(program, extents, "cuda")
    assert found is not None
    for part in found.parts:
        assert isinstance(lowering.lower(part.program, extents, "cuda"), Kernel)
    return found


# ---- Parts of any size ---------------------------------------------------------------------------


def every_route(program: ElementProgram) -> Iterator[Division]:
    """Divisions of a program into parts of ever less room."""
    for n, made in enumerate((plan(program), *alternatives(program))):
        whole = Whole(as_program(made))
        for row in division._rows(whole):
            lane = division._Lane(n, row)
            room: float = max(lane.room, 1)
            while (route := lane.shortest(room, 10_000)) is not None:
                yield whole.divided(route.pieces)
                room = 0.7 * max(stage.room for stage in route.stages)
                if room < 1:
                    break


@given(fused_calls(broadcasting=False))
@settings(max_examples=6)
def test_parts_of_random_programs(call: Call) -> None:
    captured = capture(call.spec, *call.operands)
    assert isinstance(captured, FusedCall)
    program = captured.program
    extents = (3, 2, 2, 2)[: program.batch_rank]
    for one in (program, gradient(program)):
        groups = by_sums(one)
        assert groups is not None
        assert_is(groups, one, extents)
        for part in groups.parts:
            for found in itertools.islice(every_route(part.program), 3):
                assert_is(found, part.program, extents)


@pytest.mark.parametrize(
    "program",
    [
        gradient(mass(2, constant=False)),
        cuda_fused.diffusion(1),
        cuda_fused.hyperelastic(1),
        several_outputs(),
    ],
    ids=["gradient", "diffusion", "hyperelastic", "several outputs"],
)
def test_parts_of_named_programs(program: ElementProgram) -> None:
    found = list(itertools.islice(every_route(program), 5))
    assert max(len(x.parts) for x in found) > 2
    for one in found:
        assert_is(one, program)


def test_a_gathered_vector_is_read_by_every_part() -> None:
    program = cuda_fused.gathering(2, 50)
    arrays = cuda_fused.indexed(program, 3)
    for found in every_route(program):
        for got, want in zip(
            evaluated(found, arrays), reference.evaluate(program, *arrays), strict=True
        ):
            assert_close(got, want, 1e-12)


# ---- The ways to divide one ----------------------------------------------------------------------


SIZES = dict.fromkeys("xijyz", 5) | dict.fromkeys("abc", 3)
MODES = "xa", "yb", "zc"


class Small:
    """A program with a table and operands of 3^3 values, or of another size."""

    def __init__(self, operands: int, size: int = 3) -> None:
        self.builder = Builder(1)
        table = np.random.default_rng(0).uniform(-1, 1, (5, 3))
        self.table = self.builder.constant(table)
        self.operands = [self.builder.input(Input((0,), (size,) * 3, F64)) for _ in range(operands)]

    def at_points(self, value: int) -> int:
        terms = [*((self.table, x) for x in MODES), (value, "abc")]
        return self.builder.contract(terms, "xyz", SIZES)

    def at_nodes(self, value: int) -> int:
        terms = [*((self.table, x) for x in MODES), (value, "xyz")]
        return self.builder.contract(terms, "abc", SIZES)

    def outer(self, left: int, right: int) -> int:
        return self.builder.contract([(left, "iyz"), (right, "jyz")], "ij", SIZES)

    def build(self, *outputs: Output) -> ElementProgram:
        return self.builder.build(outputs).program


def three_products() -> ElementProgram:
    small = Small(2)
    u, v = map(small.at_points, small.operands)
    pairs = ((u, v), (u, u), (v, v))
    products = [small.builder.map("sin", small.builder.map("mul", *pair)) for pair in pairs]
    return small.build(*(Output(small.at_nodes(x), (0,)) for x in products))


def two_terms() -> ElementProgram:
    """Outer products, each of two tiles of its own."""
    small = Small(4, 5)
    u, v, w, z = (small.builder.map("sin", x) for x in small.operands)
    return small.build(Output(small.builder.map("add", small.outer(u, v), small.outer(w, z)), ()))


def one_chain() -> ElementProgram:
    small = Small(3)
    u, v, w = map(small.at_points, small.operands)
    flux = small.builder.map("mul", small.builder.map("sin", small.builder.map("mul", u, v)), w)
    return small.build(Output(small.at_nodes(flux), (0,)))


def test_outputs_that_have_nothing_to_tell_each_other(little_room: Limit) -> None:
    program = three_products()
    little_room(shared_bytes(program, little_room) * 4 // 5)
    found = divided(program)
    assert len(found.parts) == 2
    assert not found.between
    assert_is(found, program)


def test_terms_of_a_sum_over_elements(little_room: Limit) -> None:
    program = two_terms()
    little_room(shared_bytes(program, little_room) * 4 // 5)
    found = divided(program)
    assert len(found.parts) == len(found.results[0]) == 2
    assert not found.between
    assert_is(found, program)


def test_a_cut_writes_the_least(little_room: Limit) -> None:
    program = one_chain()
    little_room(shared_bytes(program, little_room) - 1)
    found = divided(program)
    assert len(found.parts) == 2
    ((number, output),) = found.between
    made = found.parts[number].program
    assert made.tiles[made.outputs[output].value] == (5, 5, 5)
    assert_is(found, program)


def test_another_plan_comes_before_parts(little_room: Limit) -> None:
    """The best plan of the gradient by a table makes larger tiles than others."""
    whole = gradient(mass(2, constant=False))
    program = replace(whole, outputs=whole.outputs[:1])
    best, *others = lowering.plans(program, "cuda")
    lowerings = [functools.partial(cuda.lower, x, EXTENTS) for x in (best, *others)]
    rooms = [room_of(x, little_room) for x in lowerings]
    assert min(rooms) < rooms[0]
    little_room(min(rooms))
    made = lowering.lower(program, EXTENTS, "cuda")
    assert isinstance(made, Kernel)
    assert rooms[made.plan] == min(rooms)
    assert divide(program, EXTENTS, "cuda") is None


def test_too_many_steps(little_room: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    program = three_products()
    steps = len(lowering.planned(program, "cuda").steps)
    monkeypatch.setattr(kernels, "MOST_STEPS", steps - 1)
    forget()
    found = divided(program)
    assert len(found.parts) == 2
    assert_is(found, program)


def test_sums_over_different_batch_axes(cuda_lowering: None) -> None:
    """Of one value, and of others that are kept."""
    builder = Builder(2)
    a = builder.input(Input((0, 1), (3, 4), F64))
    b = builder.input(Input((1,), (4, 2), F64))
    product = builder.contract([(a, "ij"), (b, "jk")], "ik", {"i": 3, "j": 4, "k": 2})
    outputs = [Output(product, x) for x in ((0,), (1, 0), (1,), ())]
    program = builder.build(outputs).program
    found = divided(program, (100, 50))
    assert [len(x.program.outputs) for x in found.parts] == [2, 1, 1]
    assert_is(found, program, (5, 3))


def shared_outputs() -> ElementProgram:
    """Of all elements a product, and between its outputs two that all of them share."""
    builder = Builder(1)
    u, w = builder.input(Input((0,), (5, 5, 5), F64)), builder.input(Input((), (5, 5), F64))
    product = builder.contract([(w, "ai"), (u, "ijk")], "ajk", dict.fromkeys("aijk", 5))
    outputs = [(builder.map("sin", w), ()), (product, (0,)), (w, ()), (product, ())]
    return builder.build([Output(*x) for x in outputs]).program


def test_what_all_elements_share_is_apart(cuda_lowering: None) -> None:
    program = shared_outputs()
    found = divide(program, EXTENTS, "cuda")
    assert found is not None
    assert [x.program.batch_rank for x in found.parts] == [1, 0]
    assert [len(x.program.outputs) for x in found.parts] == [2, 2]
    assert isinstance(lowering.lower(found.parts[0].program, EXTENTS, "cuda"), Kernel)
    assert_is(found, program)


def test_what_all_elements_share_does_not_count_once_for_each(getkey: GetKey) -> None:
    """And costs nothing else its kernel."""
    table = np.random.default_rng(0).uniform(-1, 1, (6, 5))
    u, s = jax.random.normal(getkey(), (500, 5, 5, 5), F64), jnp.arange(9.0).reshape(3, 3)

    def function(u: jax.Array, s: jax.Array) -> Any:
        return jnp.einsum("xa,yb,zc,abc->xyz", table, table, table, u) * s[1, 1], 2 * s

    def values(transform: Any) -> Any:
        mapped = transform(function, in_axes=(0, None), out_axes=(0, None))

        def energy(u: jax.Array, s: jax.Array) -> jax.Array:
            return sum((jnp.sum(jnp.sin(x)) for x in mapped(u, s)), jnp.zeros(()))

        return lambda u, s: (mapped(u, s), jax.grad(energy, (0, 1))(u, s))

    (explained,) = jm.explain(jm.fuse(function, (0, None), (0, None)), u, s, quiet=True)
    assert explained.fused and len(explained.parts) == 2 and explained.parts[0].fused
    found, expected = (jax.jit(values(x))(u, s) for x in (jm.fuse, jax.vmap))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_parts_of_several_sums_are_divided_themselves(little_room: Limit) -> None:
    builder = Builder(2)
    u, v = (builder.input(Input((0, 1), (5, 5, 5), F64)) for _ in range(2))
    w = builder.input(Input((1,), (5, 5, 5), F64))
    tiles = [builder.map("sin", builder.map("mul", x, w)) for x in (u, v)]
    products = [builder.contract([(x, "iyz"), (x, "jyz")], "ij", SIZES) for x in tiles]
    total = builder.map("add", *products)
    program = builder.build([Output(total, (1,)), Output(total, (0,))]).program
    one = replace(program, outputs=program.outputs[:1])
    extents = (100, 50)
    room = room_of(lambda: lowering.lower(one, extents, "cuda"), little_room)
    little_room(room * 4 // 5)
    found = divided(program, extents)
    assert [len(x) for x in found.results] == [2, 2]
    assert_is(found, program, (5, 3))


def test_nothing_is_divided_in_vain(little_room: Limit) -> None:
    """Not for another dtype, nor if parameters are asked for, nor if plain JAX was faster."""
    program = mass(2, dtype="bfloat16")
    declined = lowering.lower(program, EXTENTS, "cuda")
    assert isinstance(declined, Declined) and declined.excess is None
    assert divide(program, EXTENTS, "cuda") is None
    program = one_chain()
    little_room(shared_bytes(program, little_room) - 1)
    for choice in (Choice.of({"threads": 64}, "test"), choices.PLAIN):
        with choices.using(choice):
            declined = lowering.lower(program, EXTENTS, "cuda")
            assert isinstance(declined, Declined) and declined.excess is None
            assert divide(program, EXTENTS, "cuda") is None
    little_room(8)
    assert divide(program, EXTENTS, "cuda") is None


# ---- Real cases ----------------------------------------------------------------------------------


def programs_of(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The programs of a function of float64 arrays."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x, F64) for x in shapes))
    return [program for program, _ in applications(jaxpr.jaxpr)]


def test_a_hydrodynamic_force(cuda_lowering: None) -> None:
    """More values than any chip holds are no reason not to fuse a function."""
    force = fused.corner_force(6, 1e6)
    assert force.element is not None
    (program,) = programs_of(jm.fuse(force.element), force.shapes)
    found = divided(program)
    assert found.least_bytes(EXTENTS) < 5 * program.least_bytes(EXTENTS)
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1.0, (2, *x.tile)) for x in program.arguments]
    (got,), (want,) = evaluated(found, arrays), reference.evaluate(program, *arrays)
    assert_close(got / jnp.max(jnp.abs(want)), want / jnp.max(jnp.abs(want)), 1e-11)


@pytest.mark.parametrize("name, most", [("bk1-grad-all/p14", 2), ("bk3-grad-all/p13", 4)])
def test_gradients_of_all_operands(
    name: str, most: int, cuda_lowering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "architecture", lambda platform: "sm_90")
    (case,) = cases.build(["gradients"], 1e6, f"^{name}$")
    program = programs_of(case.functions()["jm"], case.shapes)[-1]
    found = divided(program)
    assert len(found.parts) <= most
    assert found.least_bytes(EXTENTS) < (most + 1) * program.least_bytes(EXTENTS)
    assert_is(found, program, (2,))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("applications", "corner-force/k7"),
        ("gradients", "bk1-grad-all/p14"),
        ("gradients", "bk3-grad-all/p11"),
    ],
)
def test_parts_on_a_gpu(suite: str, name: str, getkey: GetKey) -> None:
    """Through JAX, compiled: the results of plain JAX, by kernels alone."""
    case = fused.corner_force(7, 1e7) if suite == "applications" else None
    if case is None:
        (case,) = cases.build([suite], 1e7, f"^{name}$")
    ways = case.functions()
    shapes = [jax.ShapeDtypeStruct(x, F64) for x in case.shapes]
    explained = jm.explain(ways["jm"], *shapes, quiet=True)
    assert all(x.fused for x in explained)
    assert any(len(x.parts) > 1 for x in explained)
    arrays = [jax.random.uniform(getkey(), x, F64, 0.5, 1.0) for x in case.shapes]
    plain = ways.get("vmap") or ways["jnp"]
    got, want = (jax.tree.leaves(jax.jit(way)(*arrays)) for way in (ways["jm"], plain))
    for x, y in zip(got, want, strict=True):
        scale = jnp.max(jnp.abs(y))
        assert_close(x / scale, y / scale, 1e-10)


def test_what_was_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_lowering: None
) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", str(tmp_path))
    (case,) = cases.build(["gradients"], 1e6, "^bk1-grad-all/p14$")
    program = programs_of(case.functions()["jm"], case.shapes)[-1]
    forget()
    found = divided(program)
    (file,) = tmp_path.glob("*.parts")
    assert divided(program) is found
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "_made", None)
        patch.setattr(division, "_Search", None)
        forget()
        assert divided(program) == found
    file.write_text("damaged")
    forget()
    assert divided(program) == found
    assert file.read_text() != "damaged"


# ---- Numbers of kernels --------------------------------------------------------------------------


@pytest.mark.skipif(cuda_emulator.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("make", [one_chain, two_terms])
def test_emulated_kernels_of_parts(
    make: Callable[[], ElementProgram], little_room: Limit, tmp_path: Path
) -> None:
    program = make()
    little_room(shared_bytes(program, little_room) * 4 // 5)
    extents = (5,)
    found = divided(program, extents)
    arrays = arguments(program, extents)
    made: list[Any] = []
    for part in found.parts:
        kernel = lowering.lower(part.program, extents, "cuda")
        assert isinstance(kernel, Kernel)
        operands = [arrays[n] if k == ARGUMENT else made[k][n] for k, n in part.arguments]
        made.append(cuda_emulator.run(kernel, part.program, operands, tmp_path))
    got = [sum(made[k][n] for k, n in sources) for sources in found.results]
    for x, y in zip(got, reference.evaluate(program, *arrays), strict=True):
        assert_close(x, y, 1e-12)


# ---- Transformations, where kernels run ----------------------------------------------------------


ELEMENTS = 8 * 64
TABLES = np.random.default_rng(1).uniform(-1, 1, (2, 6, 5))
SHAPES = (ELEMENTS, 5, 5), (ELEMENTS, 6, 6)


def operator(b: Any, u: Any, d: Any) -> Any:
    """Diffusion in two dimensions, with a table that may be traced."""
    g = TABLES[1]
    du = [jnp.sin(d * (g @ u @ b.T)), jnp.sin(d * (b @ u @ g.T))]
    return g.T @ du[0] @ b + b.T @ du[1] @ g


def fused_operator(vectorised: Callable[..., Any]) -> Callable[..., Any]:
    return vectorised(operator, (None, 0, 0))


@pytest.fixture
def operands(getkey: GetKey) -> list[jax.Array]:
    return [jnp.asarray(TABLES[0]), *(normal(getkey(), shape) for shape in SHAPES)]


def of_energy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of an energy by everything: a sum over elements among its results."""
    return jax.grad(lambda *xs: jnp.sum(jnp.cos(function(*xs))), (0, 1, 2))


def divide_on_cpu(function: Callable[..., Any], operands: Sequence[Any], limit: Limit) -> Division:
    """Leaves so little room that the last program of a function is several kernels."""
    jaxpr = jax.make_jaxpr(function)(*operands)
    *_, (program, shapes) = applications(jaxpr.jaxpr)
    extents = program.batch_extents(shapes)
    room = room_of(lambda: lowering.lower(program, extents, "cpu"), limit)
    limit(room * 4 // 5)
    found = divide(program, extents, "cpu")
    assert found is not None
    made = [lowering.lower(part.program, extents, "cpu") for part in found.parts]
    assert sum(isinstance(x, Kernel) for x in made) > 1
    return found


def assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        assert_close(np.asarray(x) / scale, np.asarray(y) / scale, 1e-11)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_values(jit: Any, operands: list[jax.Array], little_scratch: Limit) -> None:
    function = fused_operator(jm.fuse)
    divide_on_cpu(function, operands, little_scratch)
    assert_equal(jit(function)(*operands), fused_operator(jax.vmap)(*operands))


def test_gradients(operands: list[jax.Array], little_scratch: Limit) -> None:
    function = of_energy(fused_operator(jm.fuse))
    found = divide_on_cpu(function, operands, little_scratch)
    assert any(len(sources) > 1 for sources in found.results)
    want = of_energy(fused_operator(jax.vmap))(*operands)
    assert_equal(jax.jit(function)(*operands), want)


def test_batches(operands: list[jax.Array], little_scratch: Limit) -> None:
    b, u, d = operands
    many = b, jnp.stack([u, jnp.cos(u)], 1), d
    function, want = (jax.vmap(fused_operator(f), (None, 1, None)) for f in (jm.fuse, jax.vmap))
    divide_on_cpu(function, many, little_scratch)
    assert_equal(jax.jit(function)(*many), want(*many))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards(kind: AxisType, operands: list[jax.Array], little_scratch: Limit) -> None:
    function = of_energy(fused_operator(jm.fuse))
    divide_on_cpu(function, operands, little_scratch)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    specs = P(), P("d"), P("d")
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*sharded).compile()
        got = compiled(*sharded)
    assert "all-gather" not in (compiled.as_text() or "")
    assert got[1].sharding.spec[0] == "d"
    assert_equal(got, of_energy(fused_operator(jax.vmap))(*operands))


def test_shards_of_the_users_own(operands: list[jax.Array], little_scratch: Limit) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = P(), P("d"), P("d")
    function = of_energy(fused_operator(jm.fuse))
    shards = [operands[0], *(x[: ELEMENTS // 8] for x in operands[1:])]
    divide_on_cpu(function, shards, little_scratch)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs)
    assert_equal(jax.jit(mapped)(*operands), of_energy(fused_operator(jax.vmap))(*operands))


def test_explanations(operands: list[jax.Array], little_scratch: Limit) -> None:
    function = fused_operator(jm.fuse)
    found = divide_on_cpu(function, operands, little_scratch)
    (whole,) = jm.explain(function, *operands, quiet=True)
    assert whole.fused and whole.reason is None
    assert len(whole.parts) == len(found.parts)
    assert whole.flops == sum(part.flops for part in whole.parts)
    assert whole.order == tuple(step for part in whole.parts for step in part.order)
    assert whole.moved_bytes == sum(part.least_bytes for part in whole.parts) > whole.least_bytes
    assert len(whole.between) == len(found.between)
    text = str(whole)
    assert f"{len(found.parts)} kernels: the tiles of one element" in text
    assert all(part.kernel in text for part in whole.parts)
    assert all(line in text for line in whole.between)
    little_scratch(1 << 16)
    (one,) = jm.explain(function, *operands, quiet=True)
    assert one.parts == () and one.divided is None and one.moved_bytes == one.least_bytes


def test_parts_are_what_is_tuned(operands: list[jax.Array], little_scratch: Limit) -> None:
    function = fused_operator(jm.fuse)
    found = divide_on_cpu(function, operands, little_scratch)
    tasks = [(part.program, (ELEMENTS,)) for part in found.parts]
    assert list(programs(function, *operands)) == tasks
    tunings = jm.tune(function, *operands, seconds=0.1, store=False, quiet=True)
    assert [x.program for x in tunings] == [part.program for part in found.parts]


# ---- The frontend --------------------------------------------------------------------------------


def test_many_tiles_together_are_fused() -> None:
    """Each of the products has room; all of their operands together have not."""
    function = lambda *xs: sum(jnp.sin(x) @ x for x in xs)  # noqa: E731
    shapes = [(2, 64, 64)] * 12
    with plain_calls() as calls:
        (program,) = programs_of(jm.fuse(function), shapes)
    assert not calls
    assert sum(64 * 64 for _ in program.arguments) > 1 << 15


def test_an_einsum_of_many_tiles_is_fused() -> None:
    shapes = [(1000, 80, 80)] * 6
    operands = [jax.ShapeDtypeStruct(x, F64) for x in shapes]
    found = jm.explain("eab,ebc,ecd,edf,efg,egh->eah", *operands, quiet=True)
    assert found.program is not None
