"""Programs from elsewhere than finite elements of high order: what must not lose by ``jm.fuse``.

Faces of elements, particles, filters, reactions, materials, small networks: as their authors write
them. Least traffic and flops are counted as in ``programs``; factorisations of small matrices
and Jacobi's iterations as the operations of the usual algorithm.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs import Program
from benchmarks.workloads import Array, Function


def every() -> Iterator[Program]:
    """All of them."""
    yield from map(acoustics, (3, 4, 6))
    yield _program("kalman/n6", kalman, ((6,), (6, 6), (3,)), 42, 1400)
    yield _program("particle-weights/n3", weights, ((3,), (3, 3), (3,)), 81, 640)
    yield _program("kinetics/n9", kinetics, ((9,), ()), 9, 1600)
    yield _program("network-laplacian/n16", laplacian, ((3,),), 1, 4000)
    yield _program("polar/n3", polar, ((3, 3),), 9, 500)
    yield _program("attention/n8", attention, ((8, 4),) * 3, 32, 1800)
    yield _program("rotation/n8", rotated, ((4,), (8, 3)), 24, 8 * 30 + 12)
    yield _program("least-squares/n8", fitted, ((8, 3), (8,)), 3, 280)
    yield _program("runge-kutta/n6", integrated, ((6,),), 6, 8 * (72 + 72))
    yield _program("weno/n20", weno, ((20,),), 16, 16 * 62)
    yield _program("limiter/n20", limited, ((20,),), 18, 18 * 10)
    yield _program("softmax/n10", jax.nn.softmax, ((10,),), 10, 50)
    yield _program("flux/n4", flux, ((4,),), 8, 18)
    yield _program("newton/n4", newton, ((4,), (4,)), 4, 4 * 72)
    yield _program("material/n3", material, ((), (3,)), 3, 20)
    yield _program("equation-of-state/n12", equation_of_state, ((),), 1, 8)
    yield _program("layer/n8", layer, ((8,),), 8, 8 * 17)
    yield _program("network-force/n16", jax.grad(network), ((16,),), 16, 4 * (16 * 32 + 32 * 32))
    yield _program("residual-layer/n64", residual_layer, ((64,),), 64, 2 * 64 * 64 + 64 * 25)
    yield _program("element-matrix/n4", element_matrix, ((4, 4), (8, 4)), 32, 8 * 32)
    yield _program("condensation/n12", condensed, ((12, 12), (12,)), 42, 4600)
    yield _program("return-mapping/n7", returned, ((6,), (6,)), 7, 3 * 800)
    yield _program("sigma-points/n9", through_sigma_points, ((9,), (9, 9)), 12, 2300)
    yield _program("converged/n7", converged, ((6,), (6,)), 8, 4 * 800)
    yield _program("square-root/n3", square_root, ((3, 3),), 9, 5 * 130)
    yield _program("orbits/n18", orbits, ((3, 3), (3, 3)), 18 + 200, 200 * 2 * 150)
    yield _program("oscillators/n6", oscillators, ((6,),), 6, 200 * 4 * 180)
    yield _program("table/n10", interpolated, ((),), 1, 10)
    yield _program("place/n10", found, ((),), 1, 4)
    yield _program("counted/n3", counted, ((3,),), 3, 20 * 80)
    yield _program("discounts/n8", discounts, ((8,),), 8, 8 * 12)
    yield _program("lattice-boltzmann/n9", collided, ((9,),), 9, 2 * 2 * 81 + 40)
    yield _program("option/n5", jax.jacfwd(jax.jacfwd(option)), ((5,),), 25, 300)
    yield _program("quantile/n2", quantile, ((2,),), 1, 40)
    # The field is complex: of two numbers at each of its nodes, and the results are.
    oscillating = _program("helmholtz/tet2", helmholtz, ((10, 3), (10,), (10,)), 30, 2900)
    yield replace(oscillating, given=lambda x, u, c: (x, jax.lax.complex(u, c), c))
    yield _program("reflection/n8", reflected, ((8,), (8,)), 2, 8 * (80 + 4 * 16) + 40)
    for n in (2, 3, 4, 5):
        yield _program(f"solve/n{n}", solved, ((n, n), (n,)), n, 2 * n**3 // 3 + 2 * n**2)


def _program(
    name: str, element: Function, shapes: tuple[tuple[int, ...], ...], results: int, flops: int
) -> Program:
    """Of so many results."""
    values = sum(map(math.prod, shapes)) + results
    return Program(name, element, shapes, values, flops, others={})


def _table(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).uniform(-1, 1, shape)


def acoustics(n: int) -> Program:
    """Discontinuous Galerkin on hexahedra: derivatives, and jumps at two faces of an axis."""
    D, lift = _table(n, n), _table(n)

    def element(q: Array, c: Array, left: Array, right: Array) -> Array:
        p, v = q[..., 0], q[..., 1:]

        def along(u: Array, axis: int) -> Array:
            return jnp.moveaxis(jnp.tensordot(D, u, (1, axis)), 0, axis)

        gradient = jnp.stack([along(p, a) for a in range(3)], -1)
        divergence = along(v[..., 0], 0) + along(v[..., 1], 1) + along(v[..., 2], 2)
        jumps = lift[:, None, None] * (left - q[0])[None, ..., 0]
        jumps += lift[::-1, None, None] * (right - q[-1])[None, ..., 0]
        return jnp.concatenate([(jumps - c**2 * divergence)[..., None], -gradient], -1)

    shapes = ((n, n, n, 4), (n, n, n), (n, n, 4), (n, n, 4))
    flops = 6 * 2 * n**4 + 10 * n**3
    return _program(f"acoustics/n{n}", element, shapes, 4 * n**3, flops)


def kalman(x: Array, root: Array, z: Array) -> Array:
    """A step of a filter of six states of which three are measured."""
    A, H = _table(6, 6), np.eye(3, 6)
    P = A @ (root @ root.T) @ A.T + 0.1 * np.eye(6)
    K = jnp.linalg.solve(H @ P @ H.T + np.eye(3), H @ P).T
    x = A @ x
    return jnp.concatenate([x + K @ (z - H @ x), ((np.eye(6) - K @ H) @ P).reshape(-1)])


def weights(x: Array, C: Array, v: Array) -> Array:
    """What a particle gives to the 27 points around it, with quadratic splines."""
    f = 10 * x - jnp.floor(10 * x - 0.5)
    w = jnp.stack([0.5 * (1.5 - f) ** 2, 0.75 - (f - 1) ** 2, 0.5 * (f - 0.5) ** 2])
    products = w[:, None, None, 0] * w[None, :, None, 1] * w[None, None, :, 2]
    points = np.stack(np.meshgrid(*[np.arange(3.0)] * 3, indexing="ij"), -1)
    return products[..., None] * (v + jnp.einsum("ij,abcj->abci", C, points - f))


def kinetics(y: Array, T: Array) -> Array:
    """An implicit step of twelve reactions of nine species."""
    orders = np.round(np.abs(_table(12, 9)))

    def rate(y: Array) -> Array:
        speeds = jnp.exp(-1 / (1.5 + T)) * jnp.exp(orders @ jnp.log(1.5 + y))
        return (orders - 0.3).T @ speeds

    return y + jnp.linalg.solve(np.eye(9) - 1e-3 * jax.jacfwd(rate)(y), 1e-3 * rate(y))


def laplacian(x: Array) -> Array:
    """Of a small network."""
    W = [_table(16, 3), _table(16, 16), _table(1, 16)]

    def network(x: Array) -> Array:
        return (W[2] @ jnp.tanh(W[1] @ jnp.tanh(W[0] @ x)))[0]

    return jnp.trace(jax.hessian(network)(x))


def polar(F: Array) -> Array:
    """The rotation of a deformation."""
    U, _, V = jnp.linalg.svd(np.eye(3) + 0.3 * F)
    return U @ V


def attention(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.softmax(q @ k.T / 2, axis=-1) @ v


def rotated(q: Array, v: Array) -> Array:
    """Vectors by a quaternion."""
    q = q / jnp.linalg.norm(q)
    return jax.vmap(lambda v: v + 2 * jnp.cross(q[1:], jnp.cross(q[1:], v) + q[0] * v))(v)


def fitted(A: Array, b: Array) -> Array:
    return jnp.linalg.solve(A.T @ A + np.eye(3), A.T @ b)


def solved(A: Array, b: Array) -> Array:
    return jnp.linalg.solve(A + 4 * np.eye(len(b)), b)


def integrated(x: Array) -> Array:
    """Eight steps of a nonlinear system."""
    A = _table(6, 6)
    return jax.lax.scan(lambda x, _: (x + 0.1 * jnp.tanh(A @ x), None), x, None, length=8)[0]


def weno(u: Array) -> Array:
    """Values at interfaces by the scheme of Jiang and Shu (1996) of fifth order."""
    a, b, c, d, e = u[:-4], u[1:-3], u[2:-2], u[3:-1], u[4:]
    curved = (a - 2 * b + c, b - 2 * c + d, c - 2 * d + e)
    slopes = (a - 4 * b + 3 * c, b - d, 3 * c - 4 * d + e)
    smooth = [13 / 12 * x**2 + 0.25 * y**2 for x, y in zip(curved, slopes, strict=True)]
    w = [n / (1e-6 + x) ** 2 for n, x in zip((0.1, 0.6, 0.3), smooth, strict=True)]
    values = (2 * a - 7 * b + 11 * c, -b + 5 * c + 2 * d, 2 * c + 5 * d - e)
    return (w[0] * values[0] + w[1] * values[1] + w[2] * values[2]) / (6 * (w[0] + w[1] + w[2]))


def limited(u: Array) -> Array:
    """The smaller of two slopes, and none at an extremum."""
    a, b = u[1:-1] - u[:-2], u[2:] - u[1:-1]
    return jnp.where(a * b > 0, jnp.sign(a) * jnp.minimum(jnp.abs(a), jnp.abs(b)), 0.0)


def flux(u: Array) -> Array:
    """Of an ideal gas in two dimensions."""
    rho, m, n, energy = 1 + u[0] ** 2, u[1], u[2], u[3]
    p = 0.4 * (energy - 0.5 * (m * m + n * n) / rho)
    x = jnp.stack([m, m * m / rho + p, m * n / rho, (energy + p) * m / rho])
    return jnp.stack([x, jnp.stack([n, m * n / rho, n * n / rho + p, (energy + p) * n / rho])])


def newton(a: Array, b: Array) -> Array:
    """Eight steps towards the roots of cubic equations."""
    x, b = a, 1 + b**2
    for _ in range(8):
        x = x - (x**3 + b * x - a) / (3 * x**2 + b)
    return x


def material(kind: Array, x: Array) -> Array:
    """The stiffness of one of five, by a number in [-1, 1]."""
    return _from_table(_table(5, 3, 3), 2.5 * (kind + 1)) @ x


def equation_of_state(x: Array) -> Array:
    """Tabulated, and linear between its values."""
    place = 5.5 * (x + 1)
    part = place - jnp.floor(place)
    values = _table(12)
    return _from_table(values, place) * (1 - part) + _from_table(values, place + 1) * part


def _from_table(values: Array, place: Array) -> Array:
    """The value at a place, rounded down."""
    last = len(values) - 1
    return jnp.asarray(values)[jnp.clip(jnp.floor(place), 0, last).astype(int)]


def layer(x: Array) -> Array:
    """Of a network, around which there is a connection."""
    return jnp.tanh(_table(8, 8) @ x) + x


def network(x: Array) -> Array:
    """An energy that was learned; its derivatives are forces."""
    inner = jnp.tanh(_table(16, 32).T @ x)
    return _table(32, 1)[:, 0] @ jnp.tanh(_table(32, 32).T @ inner)


def residual_layer(x: Array) -> Array:
    normal = (x - x.mean()) / jnp.sqrt(x.var() + 1e-5)
    return x + jax.nn.gelu(_table(64, 64) @ normal / 8)


def element_matrix(A: Array, u: Array) -> Array:
    """Times eight vectors."""
    return jax.vmap(lambda u: A @ u)(u)


def condensed(K: Array, f: Array) -> tuple[Array, Array]:
    """A stiffness and a load without the last six unknowns."""
    K = K @ K.T + np.eye(12)
    factor = jax.scipy.linalg.cho_factor(K[6:, 6:])
    within = jax.scipy.linalg.cho_solve(factor, K[6:, :6])
    return K[:6, :6] - K[:6, 6:] @ within, f[:6] - f[6:] @ within


def _residual(strain: Array, stress: Array) -> Function:
    """Of a stress and a multiplier, by a material's law."""
    C = 0.2 * np.eye(6) + 0.1

    def residual(x: Array) -> Array:
        part = x[:6] - np.array([1, 1, 1, 0, 0, 0]) * jnp.sum(x[:3]) / 3
        size = jnp.sqrt(part @ part + 1)
        return jnp.append(x[:6] - stress - C @ (strain - x[6] * part / size), size - 0.5 - x[6])

    return residual


def returned(strain: Array, stress: Array) -> Array:
    """Three steps of Newton's method towards a stress and a multiplier."""
    residual, x = _residual(strain, stress), jnp.append(stress, 0.0)
    for _ in range(3):
        x = x - jnp.linalg.solve(jax.jacfwd(residual)(x), residual(x))
    return x


def converged(strain: Array, stress: Array) -> tuple[Array, Array]:
    """The same until the residual is small, and after how many steps; counted as four."""
    residual, x = _residual(strain, stress), jnp.append(stress, 0.0)

    def step(state: tuple[Array, Array, int]) -> tuple[Array, Array, int]:
        x, rest, count = state
        x = x - jnp.linalg.solve(jax.jacfwd(residual)(x), rest)
        return x, residual(x), count + 1

    def goes_on(state: tuple[Array, Array, int]) -> Array:
        return (jnp.linalg.norm(state[1]) > 1e-10) & (state[2] < 20)

    x, _, count = jax.lax.while_loop(goes_on, step, (x, residual(x), 0))
    return x, jnp.asarray(count, x.dtype)


def square_root(A: Array) -> Array:
    """Of a matrix with positive eigenvalues, by the iteration of Denman and Beavers (1976).

    With a step after the last one, so that nobody sees which of two steps was the last where the
    residual is as large as the bound, but for rounding.
    """
    A = A @ A.T + np.eye(3)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        y, z = state
        return (y + jnp.linalg.inv(z)) / 2, (z + jnp.linalg.inv(y)) / 2

    def goes_on(state: tuple[Array, Array]) -> Array:
        return jnp.max(jnp.abs(state[0] @ state[0] - A)) > 1e-9

    return step(jax.lax.while_loop(goes_on, step, (A, jnp.eye(3, dtype=A.dtype))))[0]


def orbits(q: Array, v: Array) -> tuple[Array, Array, Array]:
    """Two hundred steps of three bodies, and the energy of motion at each."""
    masses = np.array([1.0, 0.5, 0.25])

    def pull(q: Array) -> Array:
        d = q[None] - q[:, None]
        r = jnp.sqrt(jnp.sum(d * d, -1) + 0.1)
        return jnp.einsum("j,ijk->ik", masses, d / (r * r * r)[..., None])

    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        q, v = state
        v = v + 0.005 * pull(q)
        q = q + 0.01 * v
        v = v + 0.005 * pull(q)
        return (q, v), jnp.sum(masses * jnp.sum(v * v, -1)) / 2

    (q, v), energies = jax.lax.scan(step, (q, v), None, length=200)
    return q, v, energies


def oscillators(x: Array) -> Array:
    """Two hundred steps of a nonlinear system, by the method of Runge and Kutta."""
    A = _table(6, 6)

    def step(_: int, x: Array) -> Array:
        a = jnp.tanh(A @ x)
        b = jnp.tanh(A @ (x + 0.01 * a))
        c = jnp.tanh(A @ (x + 0.01 * b))
        d = jnp.tanh(A @ (x + 0.02 * c))
        return x + 0.02 / 6 * (a + 2 * b + 2 * c + d)

    return jax.lax.fori_loop(0, 200, step, x)


def through_sigma_points(mean: Array, root: Array) -> tuple[Array, Array]:
    """Mean and covariance of a distance, an angle and a product of Gaussian variables."""
    columns = 1.7 * jnp.linalg.cholesky(root @ root.T + np.eye(9)).T
    points = jnp.concatenate([mean[None], mean + columns, mean - columns])

    def measured(x: Array) -> Array:
        return jnp.array([jnp.hypot(x[0], x[1]), jnp.arctan2(x[1], x[0]), x[2] * x[3]])

    values = jax.vmap(measured)(points)
    rest = values - values.mean(0)
    return values.mean(0), rest.T @ rest / len(points)


def interpolated(x: Array) -> Array:
    """Between ten values of a table."""
    return jnp.interp(x, np.linspace(-1, 1, 10), _table(10))


def found(x: Array) -> Array:
    """Which of ten intervals a value is in."""
    return jnp.asarray(_table(11))[jnp.searchsorted(np.linspace(-1, 1, 10), x)]


def counted(x: Array) -> Array:
    """Twenty steps of Lorenz's system by the method of Runge and Kutta, in a loop that counts."""

    def rate(x: Array) -> Array:
        return jnp.stack(
            [10 * (x[1] - x[0]), x[0] * (28 - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]]
        )

    def step(state: tuple[int, Array]) -> tuple[int, Array]:
        count, x = state
        a = rate(x)
        b = rate(x + 0.005 * a)
        c = rate(x + 0.005 * b)
        d = rate(x + 0.01 * c)
        return count + 1, x + 0.01 / 6 * (a + 2 * b + 2 * c + d)

    return jax.lax.while_loop(lambda state: state[0] < 20, step, (0, x))[1]


def discounts(rates: Array) -> Array:
    """From the first period to the end of each."""
    return jnp.cumsum(jnp.exp(-rates))


def collided(f: Array) -> Array:
    """Populations on nine velocities, which relax to equilibrium at the rates of their moments."""
    velocities = np.array([(i, j) for i in (0, 1, -1) for j in (0, 1, -1)])
    i, j = velocities.T
    norm, both = i * i + j * j, i * i * j * j
    moments = np.stack(
        [i * 0 + 1, i, j, norm, i * i - j * j, i * j, i * j * j, i * i * j, both]
    ).astype(float)
    rates = np.array([0, 0, 0, 1.2, 1.4, 1.4, 1.6, 1.6, 1.7])
    m = moments @ (f + 2)
    density, u, v = m[0], m[1] / m[0], m[2] / m[0]
    square = density * (u * u + v * v)
    equilibrium = jnp.stack(
        [
            *(density, m[1], m[2], 2 / 3 * density + square, density * (u * u - v * v)),
            *(density * u * v, m[1] / 3, m[2] / 3, density / 9 + square / 3),
        ]
    )
    return f + 2 - np.linalg.inv(moments) @ (rates * (m - equilibrium))


def option(x: Array) -> Array:
    """The price of a European call option by the formula of Black and Scholes (1973)."""
    price, strike, time, rate, volatility = 1.5 + x
    spread = volatility * jnp.sqrt(time)
    first = jnp.log(price / strike) / spread + rate * time / spread + spread / 2
    normal = jax.scipy.stats.norm.cdf
    return price * normal(first) - strike * jnp.exp(-rate * time) * normal(first - spread)


def quantile(x: Array) -> Array:
    """Of a normal distribution."""
    return x[1] + 2 * jax.scipy.special.ndtri(0.5 + 0.49 * x[0])


def helmholtz(x: Array, u: Array, c: Array) -> Array:
    """A wave in a medium that damps it, on a tetrahedron whose nodes are anywhere."""
    B, G, w = _table(4, 10), _table(4, 10, 3), np.abs(_table(4))
    jacobian = 4 * np.eye(3) + jnp.einsum("qid,ic->qcd", G, x) / 4
    volume = w * jnp.linalg.det(jacobian)
    gradients = jnp.einsum("qid,qdc->qic", G, jnp.linalg.inv(jacobian))
    stiff = jnp.einsum("qic,qc,q->i", gradients, jnp.einsum("qic,i->qc", gradients, u), volume)
    return stiff - (2 + 0.3j) * B.T @ (volume * (2 + B @ c) * (B @ u))


def reflected(index: Array, thickness: Array) -> Array:
    """What layers of glass reflect and let through, by their transfer matrices."""
    n = 1.5 + 0.4 * index + 0.01j
    phase = 6 * n * (1 + thickness)
    sine, cosine = jnp.sin(phase), jnp.cos(phase)
    layers = jnp.stack([jnp.stack([cosine, 1j * sine / n]), jnp.stack([1j * n * sine, cosine])])

    def through(whole: Array, layer: Array) -> tuple[Array, None]:
        return whole @ layer, None

    (a, b), (c, d) = jax.lax.scan(through, jnp.eye(2) + 0j, jnp.moveaxis(layers, -1, 0))[0]
    both = a + 1.5 * b + c + 1.5 * d
    sizes = jnp.abs(jnp.stack([a + 1.5 * b - c - 1.5 * d, 2 + 0j * a]) / both)
    return sizes**2
