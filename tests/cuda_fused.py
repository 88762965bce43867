"""Functions of one element to test fused kernels with, and the programs that they become."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmagma as jm
from fem_demo import basis
from jaxmagma.primitives import assembly
from jaxmagma.programs import reference
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.functions import FUNCTIONS
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import ElementProgram, Input, Output
from tests.conformance import interpreter


# Which of six components of a symmetric matrix each entry is.
SYMMETRIC = ((0, 1, 2), (1, 3, 4), (2, 4, 5))


def program_of(
    fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any, shared: Sequence[int] = ()
) -> ElementProgram:
    """The one program of ``jm.fuse(fn)``, of elements with arguments of these shapes.

    All elements have the arguments in common whose numbers are ``shared``.
    """
    axes = tuple(None if n in shared else 0 for n in range(len(shapes)))
    arguments = [
        jax.ShapeDtypeStruct(shape if axis is None else (3, *shape), dtype)
        for axis, shape in zip(axes, shapes, strict=True)
    ]
    found: list[ElementProgram] = []

    def search(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for value in equation.params.values():
                if isinstance(value, ElementProgram):
                    found.append(value)
                elif hasattr(value, "jaxpr"):
                    search(value.jaxpr)

    search(jax.make_jaxpr(jm.fuse(fn, in_axes=axes))(*arguments).jaxpr)
    (program,) = found
    return program


def bases(p: int, dtype: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    b, g = (rng.uniform(-1, 1, (p + 2, p + 1)).astype(dtype) for _ in range(2))
    return b, g


def _gradient(b: Any, g: Any, u: Any) -> list[Any]:
    spec = "xa,yb,zc,abc->xyz"
    return [jnp.einsum(spec, *x, u) for x in ((g, b, b), (b, g, b), (b, b, g))]


def _divergence(b: Any, g: Any, flux: list[Any]) -> Any:
    spec = "xi,yj,zk,xyz->ijk"
    terms = zip(((g, b, b), (b, g, b), (b, b, g)), flux, strict=True)
    return sum(jnp.einsum(spec, *x, w) for x, w in terms)


def lagrange_tables(p: int, dtype: Any) -> tuple[Any, Any]:
    """Of values and derivatives, from p + 1 Gauss-Lobatto points to p + 2 Gauss-Legendre ones."""
    b, g = basis.lagrange(basis.gauss_lobatto(p + 1), basis.gauss_legendre(p + 2)[0])
    return b.astype(dtype), g.astype(dtype)


def diffusion(
    p: int,
    symmetric: bool = True,
    dtype: Any = "float64",
    tables: Callable[[int, Any], tuple[Any, Any]] = bases,
    planes: bool = False,
) -> ElementProgram:
    """``grad^T (D grad u)``, with 6 or 9 components of D at every point, or in ``planes``."""
    b, g = tables(p, dtype)
    components = (6,) if symmetric else (3, 3)

    def element(u: Any, d: Any) -> Any:
        du = _gradient(b, g, u)
        if planes:
            rank = len(components)
            d = jnp.moveaxis(d, range(rank), range(-rank, 0))
        rows = [
            [d[..., SYMMETRIC[i][j]] if symmetric else d[..., i, j] for j in range(3)]
            for i in range(3)
        ]
        flux = [sum(x * y for x, y in zip(row, du, strict=True)) for row in rows]
        return _divergence(b, g, flux)

    q = p + 2
    shape = (*components, q, q, q) if planes else (q, q, q, *components)
    return program_of(element, (p + 1,) * 3, shape, dtype=dtype)


def collocated_diffusion(p: int, dtype: Any = "float64", constant: bool = True) -> ElementProgram:
    """The same with the points at the nodes: derivatives along one axis each."""
    table = bases(p, dtype)[1][:-1]
    along = ("xa,ajk->xjk", "xa,iak->ixk", "xa,ija->ijx")
    back = ("xa,xjk->ajk", "xa,ixk->iak", "xa,ijx->ija")

    def element(u: Any, d: Any, g: Any = table) -> Any:
        du = [jnp.einsum(spec, g, u) for spec in along]
        flux = [sum(d[n] * x for n, x in zip(row, du, strict=True)) for row in SYMMETRIC]
        return sum(jnp.einsum(spec, g, w) for spec, w in zip(back, flux, strict=True))

    n = p + 1
    shapes = ((n, n, n), (6, n, n, n), (n, n))
    return program_of(element, *shapes[: 2 if constant else 3], dtype=dtype, shared=[2])


def hyperelastic(p: int, dtype: Any = "float64") -> ElementProgram:
    """The gradient of a compressible neo-Hookean energy by the displacement of an element."""
    b, g = bases(p, dtype)

    def energy(u: Any, w: Any) -> Any:
        du = [_gradient(b, g, u[..., i]) for i in range(3)]
        f = [[0.1 * du[i][j] + (1.0 if i == j else 0.0) for j in range(3)] for i in range(3)]
        det = (
            f[0][0] * (f[1][1] * f[2][2] - f[1][2] * f[2][1])
            - f[0][1] * (f[1][0] * f[2][2] - f[1][2] * f[2][0])
            + f[0][2] * (f[1][0] * f[2][1] - f[1][1] * f[2][0])
        )
        squares = sum(f[i][j] * f[i][j] for i in range(3) for j in range(3))
        return jnp.sum(w * (0.5 * squares + jnp.sqrt(1.0 + det * det)))

    return program_of(jax.grad(energy), (p + 1, p + 1, p + 1, 3), (p + 2,) * 3, dtype=dtype)


def stretches(p: int, components_last: bool = True, dtype: Any = "float64") -> ElementProgram:
    """The largest stretch at every point of a deformation, and its energy: a long function."""
    b, g = bases(p, dtype)

    def of_point(f: Any) -> Any:
        values = jnp.linalg.eigvalsh(f.T @ f)
        return jnp.sqrt(values[..., -1]), jnp.sum(values**2)

    def of_element(x: Any) -> Any:
        components = [x[..., i] if components_last else x[i] for i in range(3)]
        f = jnp.array([_gradient(b, g, x) for x in components])
        return jax.vmap(of_point, in_axes=2)(f.reshape(3, 3, -1))

    nodes = (p + 1,) * 3
    return program_of(of_element, (*nodes, 3) if components_last else (3, *nodes), dtype=dtype)


def pointwise_algebra(q: int, dtype: Any = "float64") -> ElementProgram:
    """Invariants of 3x3 matrices at points: roots, angles and choices."""

    def element(a: Any, b: Any) -> Any:
        m = [
            [sum(a[..., i, k] * b[..., k, j] for k in range(3)) for j in range(3)] for i in range(3)
        ]
        trace = (m[0][0] + m[1][1] + m[2][2]) / 3.0
        off = m[0][1] ** 2 + m[0][2] ** 2 + m[1][2] ** 2
        radius = jnp.sqrt(sum((m[i][i] - trace) ** 2 for i in range(3)) + 2 * off + 1e-3)
        angle = jnp.arctan2(radius, trace) / 3.0
        scale = jnp.where(trace > 0, jnp.cos(angle), jnp.minimum(jnp.exp(-radius), 0.5))
        rows = [jnp.stack([scale * m[i][j] for j in range(3)], -1) for i in range(3)]
        return jnp.stack(rows, -2)

    return program_of(element, (q, q, q, 3, 3), (q, q, q, 3, 3), dtype=dtype)


def special(program: ElementProgram, extents: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Arguments with NaN, infinities, zeros and numbers of any size among them."""
    rng = np.random.default_rng(9)
    found = []
    for operand in program.arguments:
        shape = (*(extents[axis] for axis in operand.batch), *operand.tile)
        x = rng.normal(size=shape) * rng.choice([0.1, 1.0, 30.0], shape)
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.5], shape)
        found.append(np.where(rng.random(shape) < 0.2, odd, x).astype(operand.dtype))
    return found


def indexed(program: ElementProgram, elements: int, seed: int = 3) -> list[np.ndarray[Any, Any]]:
    """Arguments of ``gathering`` and ``assembling``: vectors, each with its indices."""
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray[Any, Any]] = []
    for vector, index in zip(program.arguments[::2], program.arguments[1::2], strict=True):
        places = rng.integers(-1, vector.tile[0], (elements, *index.tile)).astype(np.int32)
        arrays += [rng.uniform(-1, 1, vector.tile).astype(vector.dtype), places]
    return arrays


def assert_same(
    program: ElementProgram,
    arrays: Sequence[Any],
    got: Sequence[Any],
    tolerance: float = 64,
) -> None:
    """As plain JAX has it, up to rounding: ``tolerance`` in units of the last place."""
    try:
        wanted = interpreter.program(program, *map(np.asarray, arrays))
    except NotImplementedError:
        # By default XLA rounds the operands of float32 products to tf32 on a GPU.
        with jax.default_matmul_precision("highest"):
            wanted = reference.evaluate(program, *arrays)
    eps = float(np.finfo(program.dtype).eps)
    for number, (want, have) in enumerate(zip(map(np.asarray, wanted), got, strict=True)):
        finite = np.abs(want[np.isfinite(want)])
        scale = max(1.0, float(finite.max(initial=0))) if tolerance >= 64 else 1.0
        np.testing.assert_allclose(
            np.asarray(have), want, tolerance * eps, tolerance * eps * scale, err_msg=str(number)
        )


# ---- Written as programs -------------------------------------------------------------------------


def every_function(dtype: Any = "float64") -> ElementProgram:
    """Every pointwise function of tiles of 8 values, an output each."""
    builder = Builder(1)
    x, y, z = (builder.input(Input((0,), (8,), np.dtype(dtype))) for _ in range(3))
    powers = builder.constant(np.array([1, -1, 4, -8, 1.5, -1.5, 4.5, -7.5], dtype) / 3)
    outputs = []
    for name, function in FUNCTIONS.items():
        third = builder.map("reciprocal", y) if name == "quotient" else z
        second = powers if name == "power_of_root" else y
        made = builder.map(name, *(x, second, third)[: function.operands])
        outputs.append(Output(made, (0,)))
    return builder.build(outputs).program


def gathering(components: int, size: int, dtype: Any = "float64") -> ElementProgram:
    """A contraction of gathered dofs, a component of them, and all that is there."""
    builder = Builder(1)
    rng = np.random.default_rng(5)
    vector = builder.input(Input((), (size, components), np.dtype(dtype)))
    index = builder.input(Input((0,), (3, 4), np.dtype("int32")))
    basis = builder.constant(rng.uniform(-1, 1, (5, 3)).astype(dtype))
    u = builder.gather(vector, index)
    sizes = {"x": 5, "a": 3, "b": 4, "c": components}
    made = builder.contract([(basis, "xa"), (u, "abc")], "xbc", sizes)
    one = builder.index(u, 2, components - 1)
    twice = builder.map("mul", one, one)
    return builder.build([Output(made, (0,)), Output(twice, (0,)), Output(u, (0,))]).program


def assembling(components: int, widths: Sequence[int], dtype: Any = "float64") -> ElementProgram:
    """One step of an assembly: sums over the rows of one table or two."""
    rows = tuple((width,) if width > 1 else () for width in widths)
    tiles = tuple((size, *[components][: components > 1]) for size in (500, 50)[: len(widths)])
    return assembly.summing(rows, tiles, 0, np.dtype(dtype))


def gathered_symmetric(sign: int, size: int) -> ElementProgram:
    """Gathered dofs times a symmetric matrix, the squares of that, their sum, and the way back."""
    builder = Builder(1)
    rng = np.random.default_rng(7)
    vector = builder.input(Input((), (size, 2), np.dtype("float64")))
    index = builder.input(Input((0,), (14, 3), np.dtype("int32")))
    table = rng.uniform(-1, 1, (17, 14))
    basis = builder.constant(table + sign * np.flip(table))
    u = builder.gather(vector, index)
    sizes = {"x": 17, "a": 14, "b": 3, "c": 2}
    made = builder.contract([(basis, "xa"), (u, "abc")], "xbc", sizes)
    squares = builder.map("mul", made, made)
    total = builder.contract([(squares, "xbc")], "bc", sizes)
    back = builder.contract([(basis, "xa"), (squares, "xbc")], "abc", sizes)
    return builder.build([Output(x, (0,)) for x in (made, total, back)]).program


def gathered_mass(size: int) -> ElementProgram:
    """The mass matrix of gathered dofs in two dimensions, with weights of each element."""
    builder = Builder(1)
    rng = np.random.default_rng(9)
    vector = builder.input(Input((), (size,), np.dtype("float64")))
    index = builder.input(Input((0,), (9, 9), np.dtype("int32")))
    weights = builder.input(Input((0,), (17, 17), np.dtype("float64")))
    basis = builder.constant(rng.uniform(-1, 1, (17, 9)))
    u = builder.gather(vector, index)
    sizes = {"x": 17, "y": 17, "a": 9, "b": 9}
    at_points = builder.contract([(basis, "xa"), (basis, "yb"), (u, "ab")], "xy", sizes)
    weighted = builder.map("mul", at_points, weights)
    back = builder.contract([(basis, "xa"), (basis, "yb"), (weighted, "xy")], "ab", sizes)
    return builder.build([Output(back, (0,))]).program


def moving(dtype: Any = "float64") -> ElementProgram:
    """Views of what is computed, broadcasts, transposed operands, and parts put together."""
    builder = Builder(1)
    u = builder.input(Input((0,), (4, 4), np.dtype(dtype)))
    w = builder.input(Input((0,), (4,), np.dtype(dtype)))
    rng = np.random.default_rng(6)
    basis = builder.constant(rng.uniform(-1, 1, (4, 4)).astype(dtype))
    sizes = dict.fromkeys("abx", 4)
    v = builder.contract([(basis, "xa"), (u, "ab")], "xb", sizes)
    diagonal = builder.view(v, 0, (5,), (4,))
    reverse = builder.view(v, 15, (-1,), (16,))
    both = builder.pointwise("sub", [(v, "ab"), (u, "ba")], "ab", sizes)
    scaled = builder.pointwise("div", [(both, "ab"), (w, "b")], "ab", sizes)
    half = builder.constant(np.asarray(0.5, dtype))
    third = builder.pointwise("mul", [(diagonal, "a"), (half, "")], "a", sizes)
    parts = builder.place([(third, 1, (2,)), (w, 0, (1,))], (9,))
    stacked = builder.stack([diagonal, third, w], 1)
    outputs = [reverse, scaled, parts, stacked, diagonal]
    return builder.build([Output(x, (0,)) for x in outputs] + [Output(parts, ())]).program


def matrices(
    points: int, nodes: int, components: int, dtype: Any = "float64", rows: int = 0
) -> ElementProgram:
    """A stiffness matrix by a tensor of moduli, of slopes that differ between elements.

    Test functions may be as many ``rows``, of other tables.
    """
    rng = np.random.default_rng(13)
    tables = [rng.uniform(-1, 1, (points, x, components)) for x in (nodes, rows or nodes)]
    moduli = rng.uniform(-1, 1, 4 * (components,)).astype(dtype)
    trial, test = (x.astype(dtype) for x in tables)

    def element(x: jax.Array) -> jax.Array:
        jacobian = jnp.einsum("ni,qnd->qid", x, trial)
        weight = jnp.sum(jacobian**2, (1, 2))
        g = jnp.einsum("qnd,qid->qni", trial, jacobian)
        h = g if rows == 0 else jnp.einsum("qnd,qdi->qni", test, jnp.tanh(jacobian))
        made = jnp.einsum("qaj,ijkl,qbl,q->aibk", h, moduli, g, weight)
        return made.reshape((rows or nodes) * components, nodes * components)

    return normal_form(program_of(element, (nodes, components), dtype=dtype))[0]


def products_of_tiles(points: int, size: int, dtype: Any = "float64") -> ElementProgram:
    """Of few tiles many, which go to outputs, to functions and to a product with a vector."""

    def element(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        factors = [x, x * x, x * x * x]
        m = [[jnp.einsum("qa,qb->ab", f, g) for g in factors] for f in factors]
        paired = jnp.einsum("qa,qb,a->ab", factors[0], factors[1], y)
        blocks = jnp.stack([m[0][1], m[2][1], m[2][1], m[0][1].T]).reshape(2, 2, size, size)
        return (
            m[0][1] * m[0][2] - m[1][2],
            m[1][1],
            (m[2][0] * m[2][2]) @ y,
            paired,
            blocks.transpose(2, 0, 3, 1).reshape(2 * size, 2 * size),
        )

    return normal_form(program_of(element, (points, size), (size,), dtype=dtype))[0]


def sums(dtype: Any = "float64") -> ElementProgram:
    """Of many terms and of few, along all axes or some, of operands and of what is computed."""
    builder = Builder(1)
    u = builder.input(Input((0,), (5, 6, 7), np.dtype(dtype)))
    w = builder.input(Input((0,), (67,), np.dtype(dtype)))
    sizes = {"a": 5, "b": 6, "c": 7, "i": 67}
    every = builder.contract([(u, "abc")], "", sizes)
    first = builder.contract([(u, "abc")], "c", sizes)
    middle = builder.contract([(u, "abc")], "ca", sizes)
    scaled = builder.pointwise("mul", [(u, "abc"), (every, "")], "abc", sizes)
    rows = builder.contract([(scaled, "abc")], "a", sizes)
    long = builder.contract([(w, "i")], "", sizes)
    product = builder.contract([(w, "i"), (w, "i")], "", sizes)
    shares = builder.pointwise("mul", [(w, "i"), (product, "")], "i", sizes)
    total = builder.contract([(shares, "i")], "", sizes)
    both = builder.pointwise("add", [(total, ""), (long, "")], "", sizes)
    outputs = [every, first, middle, rows, both, shares]
    return builder.build([Output(x, (0,)) for x in outputs] + [Output(first, ())]).program
