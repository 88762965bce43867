"""Quadrature rules and polynomial bases on the reference interval [0, 1].

Everything on a box element is a tensor product of these one-dimensional tables:

* H1, degree k: Lagrange polynomials on the k+1 Gauss-Lobatto points (continuous fields: x and v),
* L2, degree k-1: Bernstein polynomials b_i(t) = C(n,i) t^i (1-t)^(n-i) (discontinuous: e),
* quadrature: the 2k-point Gauss-Legendre rule, for every integral.

A basis table has one row per evaluation point and one column per basis function, so that
``table @ coefficients`` evaluates.
"""

from dataclasses import dataclass
from functools import cached_property, reduce
from math import comb

import numpy as np
from numpy.polynomial import legendre


def gauss_legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights on [0, 1]; exact for polynomials of degree 2 count - 1."""
    points, weights = legendre.leggauss(count)
    return (points + 1) / 2, weights / 2  # (count,), (count,)


def gauss_lobatto(count: int) -> np.ndarray:
    """The Gauss-Lobatto points on [0, 1]: both ends and the roots of P'_{count - 1}."""
    slope = legendre.Legendre.basis(count - 1).deriv()
    interior = np.sort(slope.roots().real)
    if interior.size:
        interior -= slope(interior) / slope.deriv()(interior)  # one Newton step, to full precision
    points = np.concatenate([[-1.0], interior, [1.0]])
    return (points - points[::-1] + 2) / 4  # symmetric to the last bit, as the exact points are


def lagrange(nodes: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and derivatives at ``points`` of the Lagrange polynomials on ``nodes``.

    l_i(t) = prod_{m != i} (t - t_m) / (t_i - t_m), and l_i' is the sum over n of the same product
    without its n-th factor.
    """
    count = len(nodes)
    values = np.ones((len(points), count))
    slopes = np.zeros((len(points), count))
    for i in range(count):
        others = [m for m in range(count) if m != i]
        scale = np.prod([nodes[i] - nodes[m] for m in others])
        factors = {m: points - nodes[m] for m in others}
        values[:, i] = np.prod([factors[m] for m in others], axis=0) / scale
        for n in others:
            rest = [factors[m] for m in others if m != n]
            slopes[:, i] += np.prod(rest, axis=0) / scale
    return values, slopes  # (points, nodes), (points, nodes)


def bernstein(degree: int, points: np.ndarray) -> np.ndarray:
    """Values at ``points`` of the degree + 1 Bernstein polynomials."""
    t = np.asarray(points)[:, None]
    i = np.arange(degree + 1)[None, :]
    binomial = np.array([[float(comb(degree, n)) for n in range(degree + 1)]])
    return binomial * t**i * (1 - t) ** (degree - i)  # (points, degree + 1)


@dataclass(frozen=True)
class ReferenceElement:
    """The unit interval, square or cube with the pair of spaces Q_k (H1) and Q_{k-1} (L2).

    Hashable and comparable by (dim, order), so it can be a static argument under ``jax.jit``; its
    tables are NumPy arrays and therefore constants of the compiled contractions.
    """

    dim: int
    order: int

    def __post_init__(self) -> None:
        if self.dim not in (1, 2, 3):
            raise ValueError(f"the dimension must be 1, 2 or 3, got {self.dim}")
        if self.order < 1:
            raise ValueError(f"the order must be at least 1, got {self.order}")

    @property
    def nodes_per_axis(self) -> int:
        return self.order + 1

    @property
    def energies_per_axis(self) -> int:
        return self.order

    @property
    def points_per_axis(self) -> int:
        return 2 * self.order

    @cached_property
    def nodes(self) -> np.ndarray:
        return gauss_lobatto(self.nodes_per_axis)  # (k+1,)

    @cached_property
    def points(self) -> np.ndarray:
        return gauss_legendre(self.points_per_axis)[0]  # (q,)

    @cached_property
    def weights(self) -> np.ndarray:
        """Tensor quadrature weights; they sum to 1."""
        line = gauss_legendre(self.points_per_axis)[1]
        return reduce(np.multiply.outer, [line] * self.dim)  # (q,) * dim

    @cached_property
    def values(self) -> np.ndarray:
        return lagrange(self.nodes, self.points)[0]  # (q, k+1)

    @cached_property
    def slopes(self) -> np.ndarray:
        return lagrange(self.nodes, self.points)[1]  # (q, k+1)

    @cached_property
    def energy_values(self) -> np.ndarray:
        return bernstein(self.order - 1, self.points)  # (q, k)
