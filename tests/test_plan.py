"""Plans: what they compute, in which order, and at what cost."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmagma as jm
from jaxmagma.frontends.einsum import FusedCall, capture
from jaxmagma.plans.factoring import planned
from jaxmagma.plans.order import Middle, contraction_order
from jaxmagma.plans.plan import (
    Plan,
    Pointwise,
    Product,
    Rearrange,
    alternatives,
    plan,
)
from jaxmagma.primitives import calculus
from jaxmagma.programs import functions, reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import Contract, ElementProgram, Input, Output, Place, View
from jaxmagma.programs.strides import places
from jaxmagma.tune.tuner import programs
from tests.cuda_programs import gradient, mass
from tests.einsums import ELEMENTS, PROGRAMS, assert_close, fused_calls


F64 = np.dtype(np.float64)
BK1 = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"


def program_of(spec: str, *shapes: tuple[int, ...]) -> ElementProgram:
    call = capture(spec, *(np.ones(shape) for shape in shapes))
    assert isinstance(call, FusedCall), call
    return call.program


def plan_of(spec: str, *shapes: tuple[int, ...]) -> Plan:
    return plan(program_of(spec, *shapes))


def bk1(n: int, q: int) -> Plan:
    """The mass matrix of a hexahedron with ``n`` nodes and ``q`` points in each direction."""
    table = np.ones((q, n))
    weights, u = np.ones((ELEMENTS, q, q, q)), np.ones((ELEMENTS, n, n, n))
    call = capture(BK1, table, table, table, weights, table, table, table, u)
    assert isinstance(call, FusedCall)
    return plan(call.program)


# ---- Cost ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "q"), [(2, 3), (4, 5), (5, 5), (4, 3), (8, 10)])
def test_flops_of_a_mass_matrix(n: int, q: int) -> None:
    assert bk1(n, q).flops == 4 * (q * n**3 + q**2 * n**2 + q**3 * n) + q**3


@pytest.mark.parametrize(("n", "q"), [(2, 3), (5, 4)])
def test_flops_of_an_interpolation(n: int, q: int) -> None:
    planned = plan_of("xa,yb,zc,eabc->exyz", (q, n), (q, n), (q, n), (ELEMENTS, n, n, n))
    assert planned.flops == 2 * (q * n**3 + q**2 * n**2 + q**3 * n)


@pytest.mark.parametrize(
    ("spec", "shapes", "flops"),
    [
        ("eij,ejk->eik", ((9, 2, 3), (9, 3, 5)), 2 * 2 * 3 * 5),
        # A chain that ends in a vector is done from that end.
        ("eij,ejk,ek->ei", ((9, 2, 3), (9, 3, 5), (9, 5)), 2 * (3 * 5 + 2 * 3)),
        ("ei,eij,ejk->ek", ((9, 2), (9, 2, 3), (9, 3, 5)), 2 * (2 * 3 + 3 * 5)),
        # Summing first what only one operand has costs an addition each.
        ("eij,ekl,el->ei", ((9, 2, 3), (9, 4, 5), (9, 5)), 2 * 3 + 4 * 5 + 2 * 5 + 2),
        # Multiplying adds nothing up, contracting does.
        ("ei,ei,eij->ej", ((9, 4), (9, 4), (9, 4, 3)), 4 + 2 * 4 * 3),
        # Shared operands that are multiplied with each other first cost nothing per element.
        ("ij,jk,kl,el->ei", ((2, 3), (3, 4), (4, 5), (99, 5)), 2 * 2 * 5),
        # One element alone costs all there is.
        ("ij,jk,k->i", ((2, 3), (3, 4), (4,)), 2 * (3 * 4 + 2 * 3)),
    ],
)
def test_flops_of_known_contractions(
    spec: str, shapes: Sequence[tuple[int, ...]], flops: int
) -> None:
    assert plan_of(spec, *shapes).flops == flops


@pytest.mark.parametrize(
    ("nodes", "points"), [((2, 3, 4), (3, 3, 3)), ((4, 3, 2), (2, 5, 3)), ((2, 5, 3), (6, 2, 2))]
)
def test_anisotropic_tensor_products_go_the_cheapest_way(
    nodes: tuple[int, ...], points: tuple[int, ...]
) -> None:
    tables = [(q, n) for q, n in zip(points, nodes, strict=True)]

    def cost(order: tuple[int, ...]) -> int:
        extents, flops = list(nodes), 0
        for axis in order:
            flops += 2 * points[axis] * math.prod(extents)
            extents[axis] = points[axis]
        return flops

    planned = plan_of("xa,yb,zc,eabc->exyz", *tables, (ELEMENTS, *nodes))
    assert planned.flops == min(map(cost, itertools.permutations(range(3))))


def test_flops_count_what_is_done_for_every_element() -> None:
    """A product of shared operands alone is done once."""
    builder = Builder(1)
    left, right = (builder.input(Input((), (3, 3), F64)) for _ in range(2))
    u = builder.input(Input((0,), (3,), F64))
    sizes = dict.fromkeys("ijk", 3)
    table = builder.contract([(left, "ij"), (right, "jk")], "ik", sizes)
    result = builder.contract([(table, "ik"), (u, "k")], "i", sizes)
    planned = plan(builder.build([Output(result, (0,))]).program)
    assert [planned.tiles[n].batched for n, _ in planned.numbered_steps()] == [False, True]
    assert planned.flops == 2 * 3 * 3


@pytest.mark.parametrize("q", [5, 8, 12])
def test_operators_with_few_nodes_keep_to_fibres(q: int) -> None:
    """Where products of bases, of 4 q values, would be as cheap or a little cheaper."""
    b, shape = (q, 2), (ELEMENTS, 2, 2)
    planned = plan_of("xi,yj,exy,xa,yb,eab->eij", b, b, (ELEMENTS, q, q), b, b, shape)
    assert planned.flops == 4 * (q * 2 * 2 + q * q * 2) + q * q
    assert [bool(step.contracted) for step in products(planned)] == [True] * 2 + [False] + [
        True
    ] * 2


@pytest.mark.parametrize("n", [2, 3, 6])
def test_weights_at_points_are_part_of_no_basis(n: int) -> None:
    """A basis times weights would be one of its own for every line."""
    q = n + 1
    b, weights = (q, n), (q, q, q)
    shapes = (b, b, b, weights, (ELEMENTS, q, q, q))
    planned = plan_of("xa,yb,zc,xyz,exyz->eabc", *shapes)
    assert not any(step.contracted and step.paired for step in products(planned))
    assert planned.flops == q**3 + 2 * (q**3 * n + q * q * n * n + q * n**3)


def test_another_order_must_be_much_cheaper() -> None:
    """Weights at many points of one node each: their sums with products of bases come first."""
    b = (20, 1)
    shapes = (b, b, (ELEMENTS, 20, 20), b, b, (ELEMENTS, 1, 1))
    planned = plan_of("xi,yj,exy,xa,yb,eab->eij", *shapes)
    natural = 4 * (20 + 20 * 20) + 20 * 20
    assert planned.flops < natural / 1.1


# ---- Order -----------------------------------------------------------------------------------


def replaced_axes(planned: Plan, first: int) -> list[int]:
    """For each mode product, the axis of the tile on its right that it replaces."""
    axes = []
    for _, step in planned.numbered_steps():
        if isinstance(step, Product) and step.contracted:
            assert step.left < first <= step.right
            axes.append(step.right_labels.index(step.contracted))
    return axes


@pytest.mark.parametrize(("n", "q"), [(3, 4), (4, 4), (5, 4)])
def test_mass_matrix_starts_with_the_slowest_axis_and_comes_back_mirrored(n: int, q: int) -> None:
    planned = bk1(n, q)
    slowest, middle, fastest = 0, 1, 2
    # Only one table, used six times, comes before the batched operands.
    assert [operand.shared for operand in planned.program.inputs] == [True, False, False]
    assert replaced_axes(planned, first=1) == [slowest, fastest, middle, middle, fastest, slowest]
    kinds = ["contract" if step.contracted else "multiply" for step in products(planned)]
    assert kinds == ["contract"] * 3 + ["multiply"] + ["contract"] * 3


@pytest.mark.parametrize(("n", "q"), [(3, 4), (4, 4)])
def test_another_axis_is_in_the_middle(n: int, q: int) -> None:
    slowest, second, fastest = 0, 1, 2
    orders: dict[Middle, list[int]] = {
        "slowest": [second, fastest, slowest],
        "fastest": [slowest, second, fastest],
    }
    for middle, order in orders.items():
        planned = plan(bk1(n, q).program, middle=middle)
        assert replaced_axes(planned, first=1) == order + order[::-1]
        assert planned.flops == bk1(n, q).flops


@pytest.mark.parametrize("spec", ["xa,yb,zc,eabc->exyz", "zc,xa,yb,eabc->exyz"])
def test_order_does_not_depend_on_the_order_of_operands(spec: str) -> None:
    planned = plan_of(spec, (5, 4), (5, 4), (5, 4), (ELEMENTS, 4, 4, 4))
    assert planned.flops == 2 * (5 * 4**3 + 5**2 * 4**2 + 5**3 * 4)
    shapes = [planned.tiles[n].shape for n, _ in planned.numbered_steps()]
    assert shapes == [(5, 4, 4), (5, 4, 5), (5, 5, 5)]


def products(planned: Plan) -> list[Product]:
    return [step for step in planned.steps if isinstance(step, Product)]


def test_results_replace_labels_in_place() -> None:
    """No step of a tensor-product operator moves an axis that it does not contract."""
    for step in products(bk1(3, 4)):
        if step.contracted:
            expected = step.right_labels.replace(step.contracted, step.rows)
            assert step.output_labels == expected


@pytest.mark.parametrize(
    ("terms", "output", "batched"),
    [
        (("ab",), "ba", (True,)),
        (("", "ia"), "i", (True, False)),
        (("", "", ""), "", (False, True, True)),
        (("ij", "kl", "m"), "", (True, True, True)),
        (("i", "i", "i", "i"), "i", (True, False, True, False)),
        (("ij", "jk", "kl", "li"), "", (True, False, False, True)),
        (("ab", "cd"), "abcd", (True, True)),
    ],
)
def test_order_contracts_every_term_once(
    terms: tuple[str, ...], output: str, batched: tuple[bool, ...]
) -> None:
    sizes = tuple((x, 2) for x in sorted(set("".join(terms))))
    assert_contracts_every_term(contraction_order(terms, output, sizes, batched), len(terms))


def assert_contracts_every_term(order: Sequence[tuple[int, int]], count: int) -> None:
    """Every term and every result but the last goes into exactly one later pair."""
    assert len(order) == count - 1
    assert sorted(itertools.chain(*order)) == list(range(2 * count - 2))
    for number, pair in enumerate(order, start=count):
        assert max(pair) < number


@given(st.data())
def test_order_contracts_every_term_of_random_contractions(data: st.DataObject) -> None:
    label_sets = st.sets(st.sampled_from("abcdef"), max_size=3).map(sorted).map("".join)
    terms = tuple(data.draw(st.lists(label_sets, min_size=1, max_size=6)))
    labels = sorted(set("".join(terms)))
    output = "".join(x for x in labels if data.draw(st.booleans()))
    batched = tuple(data.draw(st.booleans()) for _ in terms)
    sizes = tuple((x, data.draw(st.integers(1, 5))) for x in labels)
    assert_contracts_every_term(contraction_order(terms, output, sizes, batched), len(terms))


def test_order_of_many_terms_is_found() -> None:
    """Looking at every subset of twenty-four mode products would take forever."""
    many = 24
    nodes, points = ([chr(start + n) for n in range(many)] for start in (0x100, 0x200))
    terms = (*map("".join, zip(points, nodes, strict=True)), "".join(nodes))
    sizes = tuple((x, 2) for x in [*nodes, *points])
    order = contraction_order(terms, "".join(points), sizes, (False,) * many + (True,))
    assert_contracts_every_term(order, many + 1)
    # Always a matrix with the tile, never two matrices.
    assert all(max(pair) >= many for pair in order)


# ---- Steps -----------------------------------------------------------------------------------


def three_gradients() -> ElementProgram:
    """The three components of a gradient at the points of a hexahedron."""
    builder = Builder(1)
    values, slopes = (builder.input(Input((), (4, 3), F64)) for _ in range(2))
    u = builder.input(Input((0,), (3, 3, 3), F64))
    sizes = dict.fromkeys("abc", 3) | dict.fromkeys("xyz", 4)
    outputs = []
    for direction in range(3):
        tables = [slopes if axis == direction else values for axis in range(3)]
        terms = [*zip(tables, ("xa", "yb", "zc"), strict=True), (u, "abc")]
        outputs.append(Output(builder.contract(terms, "xyz", sizes), (0,)))
    return builder.build(outputs).program


def test_equal_steps_of_several_contractions_are_done_once() -> None:
    """The derivatives along the second and third axis start with the same product."""
    planned = plan(three_gradients())
    assert len(planned.steps) == len(set(planned.steps)) == 8
    assert len(planned.results) == len(set(planned.results)) == 3


def test_gradients_use_what_others_have_made() -> None:
    """As reverse mode has it: forward and back through every step once, and a product for each."""
    call = "xi,yj,exy,xk,yl,ekl->eij"
    *_, gradient = derived_programs(
        program_of(call, *[(4, 4)] * 2, (9, 4, 4), *[(4, 4)] * 2, (9, 4, 4))
    )
    modes = (
        7  # of both arguments to the points, of one product all the way back and of the other half
    )
    products, points = 4, 3
    assert plan(gradient).flops == (modes + products) * 2 * 4**3 + points * 4**2


def test_the_hessian_of_an_energy_costs_what_its_matrix_does() -> None:
    """A product of the Jacobian with itself is seen across weights, numbers and parentheses."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(3, 11, 20)))

    def matrix(jacobian: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("dqi,df,q,gf,gqj->ij", table, jacobian, weights, jacobian, table)

    def hessian(jacobian: jax.Array, weights: jax.Array) -> jax.Array:
        def energy(u: jax.Array) -> jax.Array:
            gradient = jnp.einsum("dqi,i->qd", table, u) @ jacobian
            return 0.5 * jnp.einsum("q,qf->", weights, gradient**2)

        return jax.hessian(energy)(jnp.zeros(20))

    arguments = jnp.asarray(rng.normal(size=(5, 3, 3))), jnp.asarray(rng.normal(size=(5, 11)))
    flops = []
    for function in matrix, hessian:
        ((program, _),) = programs(jm.fuse(function), *arguments)
        flops.append(planned(program).flops)
    assert flops[0] == flops[1]


def test_a_product_is_made_in_the_order_in_which_it_is_read() -> None:
    """A transposition of what nobody else reads is no step; of what others read, it is one."""

    def steps(function: Any) -> list[type]:
        arrays = np.ones((ELEMENTS, 4, 4)), np.ones((ELEMENTS, 4, 4))
        ((program, _),) = programs(jm.fuse(function), *arrays)
        return [type(step) for step in plan(program).steps]

    assert steps(lambda A, B: (A @ B).T) == [Product]
    assert Rearrange in steps(lambda A, B: ((A @ B).T, A @ B))


def test_names_of_labels_make_no_difference() -> None:
    sizes = {"a": 3, "x": 4, "b": 2}, {"k": 3, "j": 4, "i": 2}
    first = Contract(((0, "xa"), (1, "ab")), "xb", tuple(sorted(sizes[0].items())))
    second = Contract(((0, "jk"), (1, "ki")), "ji", tuple(sorted(sizes[1].items())))
    assert first != second
    inputs = Input((), (4, 3), F64), Input((0,), (3, 2), F64)
    outputs = Output(2, (0,)), Output(3, (0,))
    planned = plan(ElementProgram(1, inputs, (first, second), outputs))
    assert len(planned.steps) == 1
    assert planned.results == (2, 2)


def derived_programs(program: ElementProgram) -> list[ElementProgram]:
    """The program, its tangent, and the gradient of that: with sums and several outputs."""
    tangent = calculus.jvp(program, [True] * len(program.arguments))
    assert tangent is not None
    return [program, tangent.program, gradient(program)]


def evaluate(planned: Plan, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a plan: each step is a ``np.einsum`` over all elements."""
    program, rank = planned.program, planned.program.batch_rank
    extents = program.batch_extents([x.shape for x in arguments])
    remaining = iter(arguments)
    tiles: list[np.ndarray] = []
    for operand in program.inputs:
        array = operand.constant.array if operand.constant else next(remaining)
        order = sorted(range(len(operand.batch)), key=operand.batch.__getitem__)
        array = np.transpose(array, [*order, *range(len(order), array.ndim)])
        shape = [extents[axis] if axis in operand.batch else 1 for axis in range(rank)]
        tiles.append(array.reshape(*shape, *operand.tile))
    for number, step in planned.numbered_steps():
        operands = [tiles[x] for x in step.operands]
        if isinstance(step, Product):
            labels = f"...{step.left_labels},...{step.right_labels}->...{step.output_labels}"
            tile = np.einsum(labels, *operands)
        elif isinstance(step, Rearrange):
            missing = "".join(x for x in step.output_labels if x not in step.labels)
            whole = np.ones([step.extents[x] for x in missing])
            labels = f"...{step.labels},{missing}->...{step.output_labels}"
            tile = np.einsum(labels, *operands, whole)
        elif isinstance(step, View):
            flat = operands[0].reshape(*operands[0].shape[:rank], -1)
            tile = flat[..., places(step.offset, step.strides, step.tile)]
        elif isinstance(step, Place):
            before = np.broadcast_shapes(*(x.shape[:rank] for x in operands))
            flat = np.zeros((*before, math.prod(step.tile)))
            for array, (_, offset, strides) in zip(operands, step.pieces, strict=True):
                flat[..., places(offset, strides, array.shape[rank:])] += array
            tile = flat.reshape(*before, *step.tile)
        else:
            assert isinstance(step, Pointwise)
            aligned = []
            for array, labels in zip(operands, step.labels, strict=True):
                ordered = "".join(x for x in step.output_labels if x in labels)
                array = np.einsum(f"...{labels}->...{ordered}", array)
                absent = [n for n, x in enumerate(step.output_labels) if x not in labels]
                aligned.append(np.expand_dims(array, [rank + n for n in absent]))
            tile = np.asarray(functions.evaluate(step.function, *aligned))
            tile = np.broadcast_to(tile, tile.shape[:rank] + step.shape)
        assert tile.shape[rank:] == planned.tiles[number].shape == step.shape
        tiles.append(tile)
    results = []
    for out, value in zip(program.outputs, planned.results, strict=True):
        tile, depends = tiles[value], program.batch[out.value]
        summed = tuple(axis for axis in depends if axis not in out.batch)
        tile = tile.sum(axis=summed, keepdims=True)
        gone = tuple(axis for axis in range(rank) if axis not in out.batch)
        kept = [axis for axis in range(rank) if axis in out.batch]
        tile = np.squeeze(tile, gone)
        order = [kept.index(axis) for axis in out.batch]
        tile = np.transpose(tile, [*order, *range(len(order), tile.ndim)])
        shape = [extents[axis] for axis in out.batch]
        results.append(np.broadcast_to(tile, (*shape, *tile.shape[len(shape) :])))
    return results


def random_arguments(program: ElementProgram, extents: Sequence[int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [
        random.standard_normal([*(extents[axis] for axis in x.batch), *x.tile])
        for x in program.arguments
    ]


def assert_well_formed(planned: Plan) -> None:
    """The promises on which every backend relies."""
    program = planned.program
    assert len(set(planned.steps)) == len(planned.steps)
    first = len(program.inputs)
    for number, operand in enumerate(program.inputs):
        assert planned.tiles[number].shape == operand.tile
        assert planned.tiles[number].batched == (not operand.shared)
    for number, step in planned.numbered_steps():
        tile = planned.tiles[number]
        assert all(operand < number for operand in step.operands)
        assert tile.shape == step.shape
        assert tile.batched == any(planned.tiles[x].batched for x in step.operands)
        if isinstance(step, Pointwise):
            for x, labels in zip(step.operands, step.labels, strict=True):
                assert set(labels) <= set(step.output_labels)
                assert planned.tiles[x].shape == tuple(step.extents[y] for y in labels)
            continue
        if isinstance(step, Product):
            left, right, out = map(set, (step.left_labels, step.right_labels, step.output_labels))
            lengths = [len(x) for x in (step.left_labels, step.right_labels, step.output_labels)]
            assert lengths == [len(left), len(right), len(out)]
            groups = (step.rows, step.columns, step.contracted, step.paired)
            assert sorted("".join(groups)) == sorted(left | right | out)
            assert out <= left | right
            left_shape, right_shape = (
                tuple(step.extents[x] for x in labels)
                for labels in (step.left_labels, step.right_labels)
            )
            assert planned.tiles[step.left].shape == left_shape
            assert planned.tiles[step.right].shape == right_shape
            # A shared operand stands on the left.
            assert not (planned.tiles[step.left].batched and not planned.tiles[step.right].batched)
        elif isinstance(step, Rearrange):
            shape = tuple(step.extents[x] for x in step.labels)
            assert planned.tiles[step.operand].shape == shape
    reads = [x for _, step in planned.numbered_steps() for x in step.operands]
    for number in range(first, len(planned.tiles)):
        assert number in reads or number in planned.results


@given(fused_calls(broadcasting=False))
@settings(max_examples=8)
def test_plans_of_random_programs_compute_what_the_programs_mean(call: Any) -> None:
    captured = capture(call.spec, *call.operands)
    assert isinstance(captured, FusedCall)
    hypothesis.event(f"{captured.program.batch_rank} batch axes")
    for program in derived_programs(captured.program):
        planned = plan(program)
        assert_well_formed(planned)
        arguments = random_arguments(program, [3, 2, 2, 2][: program.batch_rank])
        expected = reference.evaluate(program, *arguments)
        for x, y in zip(evaluate(planned, arguments), expected, strict=True):
            assert_close(x, np.asarray(y))


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_of_named_programs_are_well_formed(name: str) -> None:
    spec, shapes = PROGRAMS[name]
    for program in derived_programs(program_of(spec, *shapes)):
        assert_well_formed(plan(program))


def test_plans_of_narrow_tiles_come_behind_a_wide_one() -> None:
    """The gradient of a mass operator by one of its tables, whose best plan makes four axes."""
    whole = gradient(mass(3, constant=False))
    program = replace(whole, outputs=whole.outputs[:1])
    best, others = plan(program), alternatives(program)
    assert best.is_wide and not all(x.is_wide for x in others)
    assert len({x.flops for x in (best, *others)}) == 1 + len(others)
    arguments = random_arguments(program, [3])
    expected = reference.evaluate(program, *arguments)
    for one in (best, *others):
        assert_well_formed(one)
        for x, y in zip(evaluate(one, arguments), expected, strict=True):
            assert_close(x / float(np.abs(y).max()), np.asarray(y) / float(np.abs(y).max()))


def test_equal_programs_have_one_plan() -> None:
    shapes = ((4, 3), (4, 3), (ELEMENTS, 3, 3))
    assert plan_of("xa,yb,eab->exy", *shapes) is plan_of("xa,yb,eab->exy", *shapes)
