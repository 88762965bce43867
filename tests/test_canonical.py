"""Spellings of one function are one program; those that memory tells apart differ in it alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmagma as jm
from benchmarks import programs
from jaxmagma import choices
from jaxmagma.programs.canonical import canonical_form
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import (
    Contract,
    ElementProgram,
    Map,
    Operation,
    Output,
    Place,
    View,
    contraction,
    renumbered,
)
from tests import jaxprs, test_normal
from tests.test_normal import SPELLINGS, arrays_last, by_sums, of_a_point, program_of


ELEMENTS, NODES, POINTS, ROWS = 3, 2, 4, 3
RANDOM = np.random.default_rng(0)
TABLES = RANDOM.normal(size=(2, POINTS, NODES))
U = RANDOM.normal(size=(ELEMENTS, NODES, NODES, ROWS, 2))
M = RANDOM.normal(size=(ELEMENTS, POINTS, POINTS, ROWS, ROWS))
# Those of the programs of a cube.
OF_CUBE, OF_SOLID = test_normal.TABLES, (test_normal.U, test_normal.J)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def key(program: ElementProgram) -> str:
    return choices.key(normal_form(program)[0])


# ---- Random functions, and random ways to write them ---------------------------------------------


class Spelling:
    """How each step of a function is written: ``choose`` among so many ways, the plain one first.

    Fields are ``(points, points, rows, columns)``. Sums and products have the same parentheses in
    all ways, for those are roundings.
    """

    def __init__(self, choose: Callable[[int], int], tables: np.ndarray = TABLES) -> None:
        self.choose = choose
        self.tables = tables

    def order(self, count: int) -> list[int]:
        left = list(range(count))
        return [left.pop(self.choose(len(left))) for _ in range(count)]

    def applied(self, table: np.ndarray, axis: int, u: jax.Array) -> jax.Array:
        """A matrix along one of the first two axes."""
        way = self.choose(4)
        if way == 0:
            return jnp.moveaxis(jnp.tensordot(table, u, (1, axis)), 0, axis)
        if way == 1:
            return jnp.einsum("ab...,xa->xb..." if axis == 0 else "ab...,yb->ay...", u, table)
        if way == 2:
            u = jnp.einsum("qa,a...->q...", table, jnp.moveaxis(u, axis, 0))
            return jnp.moveaxis(u, 0, axis)
        apply = jax.vmap(lambda x: table @ x, 1 - axis, 1 - axis)
        for _ in range(u.ndim - 2):
            apply = jax.vmap(apply, -1, -1)
        return apply(u)

    def interpolated(self, u: jax.Array, first: int) -> jax.Array:
        """From nodes to points, with one table along each axis."""
        for axis, table in enumerate((self.tables[first], self.tables[1 - first])):
            u = self.applied(table, axis, u)
        return u

    def tested(self, x: jax.Array) -> jax.Array:
        """Back from points to nodes: the transpose of that."""
        if self.choose(2):
            zeros = jnp.zeros((NODES, NODES, *x.shape[2:]))
            _, pullback = jax.vjp(lambda u: self.interpolated(u, 0), zeros)
            return pullback(x)[0]
        for axis, table in reversed(list(enumerate(self.tables))):
            x = self.applied(table.T, axis, x)
        return x

    def at_points(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of all points as one of a point, mapped."""
        if not self.choose(2):
            return function
        axis = self.choose(2)
        return jax.vmap(jax.vmap(function), axis, axis)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Of matrices at points."""
        way = self.choose(7)
        if way == 0:
            return a @ b
        if way == 1:
            return jnp.einsum("...jk,...ij->...ik", b, a)
        if way == 2:
            return jnp.sum(b[..., None, :, :] * a[..., :, :, None], -2)
        if way == 3:
            return self.at_points(jnp.matmul)(a, b)
        if way == 4:
            return jnp.swapaxes(jnp.swapaxes(b, -1, -2) @ jnp.swapaxes(a, -1, -2), -1, -2)
        if way == 5:
            # Components first, as others store them.
            a, b = (jnp.moveaxis(x, (-2, -1), (0, 1)) for x in (a, b))
            return jnp.moveaxis(jnp.einsum("ijxy,jkxy->ikxy", a, b), (0, 1), (-2, -1))
        rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        found = {}
        for n in self.order(rows * columns):
            i, k = divmod(n, columns)
            found[i, k] = self.times(a[..., i, 0], b[..., 0, k])
            for j in range(1, inner):
                found[i, k] = self.plus(found[i, k], self.times(a[..., i, j], b[..., j, k]))
        return self.joined([[found[i, k] for k in range(columns)] for i in range(rows)])

    def joined(self, entries: list[list[jax.Array]]) -> jax.Array:
        way = self.choose(3)
        if way == 0:
            return jnp.stack([jnp.stack(row, -1) for row in entries], -2)
        if way == 1:
            return jnp.stack([jnp.stack(x, -1) for x in zip(*entries, strict=True)], -1)
        shape = (*entries[0][0].shape, len(entries), len(entries[0]))
        made = jnp.zeros(shape)
        for n in self.order(shape[-2] * shape[-1]):
            i, k = divmod(n, shape[-1])
            made = made.at[..., i, k].set(entries[i][k])
        return made

    def rolled(self, x: jax.Array) -> jax.Array:
        """Each row in the place of the next one."""
        way = self.choose(3)
        if way == 0:
            return jnp.roll(x, 1, -2)
        if way == 1:
            return x[..., np.roll(range(ROWS), 1), :]
        return jnp.stack([x[..., (n - 1) % ROWS, :] for n in range(ROWS)], -2)

    def times(self, a: Any, b: Any) -> Any:
        return b * a if self.choose(2) else a * b

    def plus(self, a: Any, b: Any) -> Any:
        return b + a if self.choose(2) else a + b

    def scaled(self, a: jax.Array) -> jax.Array:
        return [lambda: 6 * a, lambda: 2 * (a * 3), lambda: (3 * a) * 2][self.choose(3)]()

    def squared(self, a: jax.Array) -> jax.Array:
        return [lambda: a**2, lambda: a * a, lambda: jnp.square(a)][self.choose(3)]()

    def sine(self, x: jax.Array) -> jax.Array:
        return self.at_points(jnp.sin)(x)

    def slope(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The gradient of an energy."""
        if self.choose(2):
            return jax.grad(lambda x: jnp.sum(self.times(jnp.sin(x), y)))(x)
        return self.times(y, jnp.cos(x))

    def function(self, steps: Sequence[str]) -> Callable[[Any, Any], Any]:
        def of_element(u: Any, m: Any) -> Any:
            fields: dict[int, Any] = {}
            for n in self.order(2):
                fields[n] = self.interpolated(u, n)
            x, y = fields[0], fields[1]
            for step in steps:
                if step == "product":
                    x = self.product(m, x)
                elif step == "sum":
                    x, y = self.plus(x, y), x
                elif step == "scale":
                    x = self.scaled(x)
                elif step == "square":
                    x = self.squared(x)
                elif step == "times":
                    x = self.times(x, y)
                elif step == "roll":
                    x = self.rolled(x)
                elif step == "slope":
                    x = self.slope(x, y)
                elif step == "test":
                    return self.tested(x)
                else:
                    x = self.sine(x)
            return x

        return of_element


class Magnitudes(Spelling):
    """The same of magnitudes: what errors are multiples of.

    A function whose derivative is at most one passes an error on, and has one of its own.
    """

    def __init__(self) -> None:
        super().__init__(lambda count: 0, np.abs(TABLES))

    def sine(self, x: jax.Array) -> jax.Array:
        return x + 1

    def slope(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return y * (x + 1)


def plain(steps: Sequence[str]) -> Callable[[Any, Any], Any]:
    return Spelling(lambda count: 0).function(steps)


def most_error(steps: Sequence[str]) -> np.ndarray:
    """How far results may be from the exact ones.

    Each is some magnitude times so many roundings: those of its operands, added up in a product,
    and a few for the sum itself.
    """
    magnitude = jax.vmap(Magnitudes().function(steps))(np.abs(U), np.abs(M))
    roundings = 2 * (NODES + 1)
    for step in steps:
        roundings = 2 * roundings + 2 * (POINTS + ROWS) if step != "sum" else roundings + 1
    return np.asarray(roundings * np.finfo(float).eps * magnitude)


STEPS = st.builds(
    lambda steps, test: [*steps, *["test"] * test],
    st.lists(
        st.sampled_from(["product", "sum", "scale", "square", "times", "sin", "slope", "roll"]),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), steps=STEPS)
def test_spellings_are_one_program(data: st.DataObject, steps: list[str]) -> None:
    other = Spelling(lambda count: data.draw(st.integers(0, count - 1))).function(steps)
    one, another = (program_of(f, U, M) for f in (plain(steps), other))
    assert normal_form(one)[0] == normal_form(another)[0]
    assert key(one) == key(another)
    expected, found = jm.fuse(plain(steps))(U, M), jm.fuse(other)(U, M)
    # One kernel has one result.
    np.testing.assert_array_equal(found, expected)
    reference = jax.vmap(plain(steps))(U, M)
    assert (np.abs(found - reference) <= 2 * most_error(steps)).all()


# ---- One program, written down in any way --------------------------------------------------------


def shuffled(program: ElementProgram, random: np.random.Generator) -> ElementProgram:
    """The same program: its operations in another order, their operands and axes as well."""
    first = len(program.inputs)
    everything = range(first + len(program.operations))
    fixed = {*range(first), *(out.value for out in program.outputs)}
    for number, operation in enumerate(program.operations, start=first):
        if not isinstance(operation, Contract | Map):
            fixed.update((number, *operation.operands))
    ranks = [len(tile) for tile in program.tiles]
    axes = [[*range(x)] if n in fixed else [*random.permutation(x)] for n, x in enumerate(ranks)]

    def rewritten(number: int) -> Operation:
        operation = program.operations[number - first]
        if not isinstance(operation, Contract | Map):
            return operation
        labels = [x for x, _ in operation.sizes]
        names = dict(zip(labels, random.permutation([*"pqrstuvwxyz"]), strict=False))
        terms = [(x, "".join(names[own[n]] for n in axes[x])) for x, own in operation.terms]
        if isinstance(operation, Contract) or operation.function in ("add", "mul"):
            terms = [terms[n] for n in random.permutation(len(terms))]
        output = "".join(names[operation.output[n]] for n in axes[number])
        sizes = {names[x]: extent for x, extent in operation.sizes}
        if isinstance(operation, Contract):
            return contraction(terms, output, sizes)
        return Map(operation.function, tuple(terms), output, tuple(sorted(sizes.items())))

    operations = {n: rewritten(n) for n in everything[first:]}
    arguments = [n for n in range(first) if program.inputs[n].constant is None]
    constants = [n for n in range(first) if program.inputs[n].constant is not None]
    order = [*arguments, *random.permutation(constants)] if constants else arguments
    done, left = {*order}, [*everything[first:]]
    while left:
        ready = [n for n in left if done.issuperset(operations[n].operands)]
        chosen = ready[random.integers(len(ready))]
        left.remove(chosen)
        order.append(chosen)
        done.add(chosen)
    numbers = {int(old): new for new, old in enumerate(order)}
    return ElementProgram(
        program.batch_rank,
        tuple(program.inputs[n] for n in order[:first]),
        tuple(renumbered(operations[n], numbers) for n in order[first:]),
        tuple(Output(numbers[x.value], x.batch) for x in program.outputs),
    )


def with_tables(*operands: Any) -> Any:
    return jm.einsum("xa,yb,zc,eabc->exyz", *operands)


def cases() -> dict[str, ElementProgram]:
    found = {name: program_of(f, *OF_SOLID) for name, f in SPELLINGS.items()}
    a, b, c = RANDOM.normal(size=(3, POINTS, NODES))
    cube = RANDOM.normal(size=(ELEMENTS, NODES, NODES, NODES))
    (found["tables"],) = jaxprs.programs(lambda u: with_tables(a, b, c, u), cube)
    gradient = jax.grad(lambda *x: jnp.sum(with_tables(*x) ** 3), (0, 1, 2, 3))
    found["gradient"] = jaxprs.programs(gradient, a, b, c, cube)[-1]
    return found


@pytest.mark.parametrize("case", [*SPELLINGS, "tables", "gradient"])
def test_no_order_of_writing_matters(case: str) -> None:
    program = normal_form(cases()[case])[0]
    for seed in range(5):
        found = canonical_form(shuffled(program, np.random.default_rng(seed)))[0]
        assert found == canonical_form(program)[0] == program


def gradient_of(function: Callable[[Any, Any], Any]) -> ElementProgram:
    """That of an energy, by both arguments."""

    def energy(u: Any, m: Any) -> Any:
        return jnp.sum(jm.fuse(function)(u, m) ** 2)

    return jaxprs.programs(jax.grad(energy, (0, 1)), U, M)[-1]


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, gradient=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_no_order_of_writing_matters_to_any_function(
    steps: list[str], gradient: bool, seed: int
) -> None:
    function = plain(steps)
    made = gradient_of(function) if gradient else program_of(function, U, M)
    program = normal_form(made)[0]
    found, order = canonical_form(shuffled(program, np.random.default_rng(seed)))
    assert found == program
    assert choices.key(found) == choices.key(program)
    assert order == tuple(range(len(program.arguments)))


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, gradient=st.booleans())
def test_arguments_are_read_in_their_order(steps: list[str], gradient: bool) -> None:
    """What one argument is enough for is contracted before what needs a later one, too."""
    function = plain(steps)
    made = gradient_of(function) if gradient else program_of(function, U, M)
    program = normal_form(made)[0]
    read: list[frozenset[int]] = [
        frozenset() if x.shared else frozenset((n,)) for n, x in enumerate(program.inputs)
    ]
    contracted = []
    for operation in program.operations:
        read.append(frozenset().union(*(read[x] for x in operation.operands)))
        if isinstance(operation, Contract):
            contracted.append(sorted(read[-1], reverse=True))
    assert contracted == sorted(contracted)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_programs_do_not_depend_on_the_values_of_tables(order: tuple[int, ...]) -> None:
    tables = RANDOM.normal(size=(3, POINTS, NODES))
    u = RANDOM.normal(size=(ELEMENTS, NODES, NODES, NODES))
    (one,) = jaxprs.programs(lambda u: with_tables(*tables, u), u)
    (other,) = jaxprs.programs(lambda u: with_tables(*tables[list(order)], u), u)
    (traced,) = jaxprs.programs(with_tables, *tables, u)
    assert key(one) == key(other) == choices.key(normal_form(traced)[0], constant=True)


# ---- Whole programs ------------------------------------------------------------------------------


def lists(u: Any, j: Any) -> Any:
    """Elasticity component by component, with the parentheses of the matrices."""
    axes = range(3)
    slopes = [[jnp.einsum("xa,yb,zc,abc->xyz", *t, u[..., v]) for t in OF_CUBE] for v in axes]

    def product(a: Any, b: Any, i: int, k: int) -> Any:
        return a[i][0] * b[0][k] + a[i][1] * b[1][k] + a[i][2] * b[2][k]

    inverse = [[j[..., d, f] for f in axes] for d in axes]
    g = [[product(slopes, inverse, v, f) for f in axes] for v in axes]
    trace = g[0][0] + g[1][1] + g[2][2]
    s = [[g[v][f] + g[f][v] + trace * float(v == f) for f in axes] for v in axes]
    other = [[inverse[d][f] for d in axes] for f in axes]
    k = [[product(s, other, v, d) for d in axes] for v in axes]
    return integrated(jnp.stack([jnp.stack(row, -1) for row in k], -2))


@pytest.mark.parametrize("spelling", [of_a_point, by_sums, lists])
def test_spellings_of_elasticity(spelling: Callable[..., Any]) -> None:
    """Of the gradient of an energy the sums are other ones, and so it is another program."""
    assert key(program_of(spelling, *OF_SOLID)) == key(program_of(arrays_last, *OF_SOLID))


def test_layouts_differ_in_loads_and_stores_alone() -> None:
    def first(u: Any, j: Any) -> Any:
        u, j = jnp.moveaxis(u, 0, -1), jnp.moveaxis(j, (0, 1), (-2, -1))
        return jnp.moveaxis(arrays_last(u, j), -1, 0)

    u, j = OF_SOLID
    moved = np.moveaxis(u, -1, 1), np.moveaxis(j, (-2, -1), (1, 2))
    one, other = (normal_form(program_of(*x))[0] for x in ((arrays_last, u, j), (first, *moved)))
    assert one != other
    for x, y in zip(one.operations, other.operations, strict=True):
        assert x == y or (type(x) is type(y) and isinstance(x, View | Place))


def of_matrices(u: Any, j: Any) -> Any:
    """The forces of a solid, by its first Piola-Kirchhoff stress."""
    f = jnp.stack([jnp.einsum("xa,yb,zc,abcv->xyzv", *t, u) for t in OF_CUBE], -1) @ j
    rows = [f[..., n, :] for n in range(3)]
    cofactor = jnp.stack([jnp.cross(rows[n - 2], rows[n - 1]) for n in range(3)], -2)
    det = jnp.sum(rows[0] * cofactor[..., 0, :], -1)
    p = f + ((jnp.log(det) - 1) / det)[..., None, None] * cofactor
    return integrated(p @ jnp.swapaxes(j, -1, -2))


def of_one_matrix(u: Any, j: Any) -> Any:
    def at_point(slope: jax.Array, j: jax.Array) -> jax.Array:
        f = jnp.einsum("vd,df->vf", slope, j)
        cofactor = jnp.stack([jnp.cross(f[n - 2], f[n - 1]) for n in range(3)])
        det = f[0] @ cofactor[0]
        return jnp.einsum("vf,df->vd", cofactor * ((jnp.log(det) - 1) / det) + f, j)

    slopes = [jnp.einsum("xa,yb,zc,abcv->vxyz", *t, u) for t in OF_CUBE]
    k = jax.vmap(jax.vmap(jax.vmap(at_point)))(jnp.moveaxis(jnp.stack(slopes), (0, 1), (4, 3)), j)
    return integrated(k)


def integrated(k: Any) -> Any:
    return sum(jnp.einsum("xa,yb,zc,xyzv->abcv", *t, k[..., d]) for d, t in enumerate(OF_CUBE))


def test_spellings_of_a_solid() -> None:
    assert key(program_of(of_matrices, *OF_SOLID)) == key(program_of(of_one_matrix, *OF_SOLID))


def squared(x: Any, y: Any) -> Any:
    return jax.vmap(jax.vmap(jax.grad(lambda x, y: 0.5 * x * x * y)))(x, y)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x, y: x + x, lambda x, y: 2 * x),
        (lambda x, y: x / 4 - y * 0.25, lambda x, y: (x - y) / 4),
        (lambda x, y: (0.5 * x) * (8 * y), lambda x, y: x * y * 4),
        (lambda x, y: 0.5 * (jnp.exp(x) + jnp.exp(x)), lambda x, y: jnp.exp(x)),
        (squared, lambda x, y: x * y),
    ],
    ids=["twice", "difference", "product", "half a sum", "gradient of a square"],
)
def test_powers_of_two_are_the_last_factors(one: Callable[..., Any], other: Any) -> None:
    a, b = TABLES

    def at_points(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda u: b.T @ function(a @ u @ a.T, b @ u @ b.T)

    u = U[..., 0, 0]
    assert key(program_of(at_points(one), u)) == key(program_of(at_points(other), u))
    found, expected = (jm.fuse(at_points(x))(u) for x in (one, other))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scale", [2.0**600, 2.0**-600, 2.0**1023, 2.0**-1074])
def test_large_powers_of_two_keep_values_in_range(scale: float) -> None:
    """A norm of values whose squares are none, and quotients whose reciprocals are none."""
    x = RANDOM.uniform(0.5, 1, (ELEMENTS, 2)) * (scale if abs(np.log2(scale)) < 1000 else 1)

    def norm(x: Any) -> Any:
        scaled = jnp.eye(2) @ x / scale
        return jnp.sqrt(scaled[0] * scaled[0] + scaled[1] * scaled[1]) * scale

    np.testing.assert_allclose(jm.fuse(norm)(x), jax.vmap(norm)(x), rtol=1e-15)
    zeros = np.zeros_like(x)
    np.testing.assert_array_equal(jm.fuse(norm)(zeros), jax.vmap(norm)(zeros))


def test_twice_a_complex_value_that_is_not_finite() -> None:
    """Two has no imaginary part that meets infinity."""
    x = np.array([[complex(np.inf, 1), complex(2, -np.inf)]])
    found = jm.fuse(lambda x: jnp.eye(2) @ (x + x))(x)
    np.testing.assert_array_equal(found, jax.vmap(lambda x: jnp.eye(2) @ (x + x))(x))


@pytest.mark.parametrize("p", [1, 2])
def test_spellings_of_the_benchmarks(p: int) -> None:
    plain, mapped = (
        jaxprs.programs(workload.functions()["jm"], *workload.arguments)
        for workload in programs.elasticity(p).workloads(1e5)
        if workload.family in ("elasticity", "elasticity:pointwise")
    )
    assert [key(x) for x in plain] == [key(x) for x in mapped]


def weighted(place: str) -> Callable[[Any], Any]:
    """Products of slopes and values, with weights at points that have an axis of one place."""
    rng = np.random.default_rng(11)
    (g, h), w = rng.uniform(-1, 1, (2, 7, 5)), rng.uniform(0.5, 1, 7)

    def matrix(u: Any) -> Any:
        one, other = g * u, h * u
        if place == "nowhere":
            return jnp.einsum("qa,qb,q->ab", one, other, w)
        if place == "weights":
            return one.T @ (w[:, None] * other)
        return jnp.einsum("qoa,qb,q->aob", one[:, None], other, w)[:, 0]

    return matrix


@pytest.mark.parametrize("place", ["weights", "factor and result"])
def test_axes_of_one_place_are_none(place: str) -> None:
    u = np.random.default_rng(13).uniform(-1, 1, (3, 5))
    one, other = (weighted(x) for x in ("nowhere", place))
    assert key(program_of(one, u)) == key(program_of(other, u))
    np.testing.assert_allclose(jm.fuse(other)(u), jax.vmap(one)(u), 1e-13)
