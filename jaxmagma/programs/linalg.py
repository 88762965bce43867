"""Factorisations of small matrices, unrolled on their components.

A matrix is an array of :class:`Number`, each of which stands for one component at every point, so
its loops and tests must not depend on values: rows are exchanged by selecting, and iterations have
as many steps as the worst matrix needs.  What is wanted is what LAPACK computes: the same pivots,
the same signs where it defines them, NaN where it reports a failure, and errors as small.  NaN and
infinite numbers spread at least as far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


Matrix = np.ndarray  # of numbers
Vector = np.ndarray


@dataclass(frozen=True, eq=False)
class Number:
    """A value that Python's operators compute with: what ``emit`` makes, or one that is known."""

    emit: Callable[..., Any]
    value: Any

    def _made(self, function: str, *operands: Any) -> "Number":
        return Number(self.emit, self.emit(function, *operands))

    def _by(self, function: str, other: Any, swapped: bool = False) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented  # NumPy goes through its numbers, one by one
        pair = (self.value, other.value if isinstance(other, Number) else other)
        return self._made(function, *(reversed(pair) if swapped else pair))

    def __add__(self, other: Any) -> Any:
        return self._by("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._by("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._by("mul", other)

    def __truediv__(self, other: Any) -> Any:
        return self._by("div", other)

    def __radd__(self, other: Any) -> Any:
        return self._by("add", other, True)

    def __rsub__(self, other: Any) -> Any:
        return self._by("sub", other, True)

    def __rmul__(self, other: Any) -> Any:
        return self._by("mul", other, True)

    def __rtruediv__(self, other: Any) -> Any:
        return self._by("div", other, True)

    def __neg__(self) -> "Number":
        return self._made("neg", self.value)

    def __abs__(self) -> "Number":
        return self._made("abs", self.value)

    def __lt__(self, other: Any) -> Any:
        return self._by("lt", other)

    def __gt__(self, other: Any) -> Any:
        return self._by("gt", other)

    def equals(self, other: Any) -> "Number":
        made: Number = self._by("eq", other)
        return made

    def both(self, other: "Number") -> "Number":
        made: Number = self._by("and", other)
        return made

    def either(self, other: "Number") -> "Number":
        made: Number = self._by("or", other)
        return made

    def sqrt(self) -> "Number":
        return self._made("sqrt", self.value)

    def choose(self, if_true: Any, if_false: Any) -> "Number":
        """One of two numbers, as this is true or false."""
        cases = [x.value if isinstance(x, Number) else x for x in (if_false, if_true)]
        return self._made("select", self.value, *cases)

    @property
    def is_zero(self) -> bool:
        """Whether it is known to be zero at every point."""
        return isinstance(self.value, np.ndarray | float) and not np.any(self.value)


def _chosen(which: Number, if_true: Vector, if_false: Vector) -> Vector:
    """One of two arrays of numbers."""
    found = np.empty(if_true.shape, object)
    for at in np.ndindex(*found.shape):
        found[at] = which.choose(if_true[at], if_false[at])
    return found


def _known(like: Number, array: Any) -> Matrix:
    """An array of known numbers."""
    found = np.empty(np.shape(array), object)
    for at, x in np.ndenumerate(np.asarray(array, float)):
        found[at] = Number(like.emit, np.asarray(x))
    return found


def _total(numbers: Sequence[Number]) -> Number:
    total = numbers[0]
    for x in numbers[1:]:
        total = total + x
    return total


def _largest(numbers: Sequence[Number]) -> Number:
    largest = numbers[0]
    for x in numbers[1:]:
        largest = (x > largest).choose(x, largest)
    return largest


# ---- Elimination ---------------------------------------------------------------------------------


def lu(a: Matrix) -> tuple[Matrix, Vector, Vector]:
    """Of m x n: L below U, the row each pivot came from, and the order of the rows.

    Golub & Van Loan 3.4.1, LAPACK's ``getrf``: the pivot is the first of the largest, and a column
    of zeros is left as it is.
    """
    rows, columns = a.shape
    # The numbers of the rows go along with them.
    a = np.concatenate([a, _known(a[0, 0], np.arange(rows))[:, None]], 1)
    pivots = []
    for k in range(min(rows, columns)):
        best, pivot = abs(a[k, k]), _known(a[0, 0], k).item()
        larger = None
        for i in range(k + 1, rows):
            size = abs(a[i, k])
            larger = size > best
            best, pivot = larger.choose(size, best), larger.choose(float(i), pivot)
        pivots.append(pivot)
        old = a[k].copy()
        for i in range(k + 1, rows):
            here = pivot.equals(float(i)) if larger is None or i < rows - 1 else larger
            a[k] = _chosen(here, a[i], a[k])
            a[i] = _chosen(here, old, a[i])
        divisor = a[k, k].equals(0.0).choose(1.0, a[k, k])
        for i in range(k + 1, rows):
            a[i, k] = a[i, k] / divisor
            a[i, k + 1 : columns] -= a[i, k] * a[k, k + 1 : columns]
    return a[:, :columns], np.array(pivots, object), a[:, columns]


def permutation(pivots: Vector, size: int) -> Vector:
    """The order of rows after exchanging each one with its pivot."""
    order = _known(pivots[0], np.arange(size))
    for k, pivot in enumerate(pivots):
        old = order[k]
        for i in range(size):
            if i != k:
                here = pivot.equals(float(i))
                order[k], order[i] = here.choose(order[i], order[k]), here.choose(old, order[i])
    return order


def triangular_solve(
    a: Matrix, b: Matrix, lower: bool, unit_diagonal: bool, without_zeros: bool
) -> Matrix:
    """X of A X = B, where A has one triangle that is read (Golub & Van Loan 3.1).

    ``without_zeros``: nothing is done with known zeros of B, whatever A is.
    """
    x = b.copy()
    count = len(a)

    def is_left_out(value: Number) -> bool:
        return without_zeros and value.is_zero

    order = range(count) if lower else range(count - 1, -1, -1)
    for done, i in enumerate(order):
        for column in range(b.shape[1]):
            for j in order[:done]:
                if not is_left_out(x[j, column]):
                    x[i, column] = x[i, column] - a[i, j] * x[j, column]
            if not unit_diagonal and not is_left_out(x[i, column]):
                x[i, column] = x[i, column] / a[i, i]
    return x


def cholesky(a: Matrix) -> Matrix:
    """L of L Lᵀ = A, of which the lower triangle is read; NaN where A is not positive definite.

    Golub & Van Loan 4.2.5, LAPACK's ``potrf``.
    """
    count = len(a)
    made = _known(a[0, 0], np.zeros((count, count)))
    positive = None
    for j in range(count):
        rest = a[j, j]
        for k in range(j):
            rest = rest - made[j, k] * made[j, k]
        own = rest > 0.0
        positive = own if positive is None else positive.both(own)
        made[j, j] = rest.sqrt()
        for i in range(j + 1, count):
            rest = a[i, j]
            for k in range(j):
                rest = rest - made[i, k] * made[j, k]
            made[i, j] = rest / made[j, j]
    assert positive is not None
    below = np.tril_indices(count)
    made[below] = [positive.choose(x, np.nan) for x in made[below]]
    return made


# ---- Reflections ---------------------------------------------------------------------------------


def _scale(largest: Number, dtype: np.dtype) -> tuple[Number, Number]:
    """A power of two with which squares of numbers up to ``largest`` are in range, and its inverse.

    Those of numbers that matter beside the largest do not vanish, either.
    """
    high = int(np.finfo(dtype).maxexp) * 9 // 20
    low = int(np.finfo(dtype).nmant) + 6 - high
    up, down = 2.0 ** (high - low), 2.0 ** -(high * 5 // 4)
    is_large, is_small = largest > 2.0**high, largest < 2.0**low
    scale = is_large.choose(down, is_small.choose(up, 1.0))
    return scale, is_large.choose(1 / down, is_small.choose(1 / up, 1.0))


def _norm(vector: Sequence[Number], dtype: np.dtype) -> Number:
    """The Euclidean norm, as BLAS's ``nrm2`` without needless overflow."""
    if len(vector) == 1:
        return abs(vector[0])
    scale, back = _scale(_largest([abs(x) for x in vector]), dtype)
    scaled = [x * scale for x in vector]
    return _total([x * x for x in scaled]).sqrt() * back


def qr(a: Matrix, full: bool, dtype: np.dtype) -> tuple[Matrix, Matrix]:
    """Q and R, or the first columns and rows of them (Golub & Van Loan 5.2.2, ``geqrf``)."""
    rows, columns = a.shape
    r = a.copy()
    zero = _known(a[0, 0], 0.0).item()
    reflections: list[tuple[Vector, Number]] = []
    for k in range(min(rows - 1, columns)):
        first, below = r[k, k], r[k + 1 :, k]
        nothing = _largest([abs(x) for x in below]).equals(0.0)
        norm = _norm([first, *below], dtype)
        beta = nothing.choose(first, (first < 0.0).choose(norm, -norm))
        tau = nothing.choose(0.0, (beta - first) / nothing.choose(1.0, beta))
        v = below / nothing.choose(1.0, first - beta)
        r[k, k], r[k + 1 :, k] = beta, zero
        for column in range(k + 1, columns):
            w = tau * (r[k, column] + _total(v * r[k + 1 :, column]))
            r[k, column] = r[k, column] - w
            r[k + 1 :, column] -= v * w
        reflections.append((v, tau))
    count = rows if full else min(rows, columns)
    q = _known(a[0, 0], np.eye(rows, count))
    for k, (v, tau) in reversed(list(enumerate(reflections))):
        # What the later ones made is in the lower right corner; the rest is the identity.
        for column in range(k + 1, count):
            w = tau * _total(v * q[k + 1 :, column])
            q[k, column] = -w
            q[k + 1 :, column] -= v * w
        q[k, k], q[k + 1 :, k] = 1.0 - tau, -(v * tau)
    return q, r[:count]


# ---- Rotations -----------------------------------------------------------------------------------


def _rounds(count: int) -> list[tuple[int, int]]:
    """Every pair once; those that follow each other share nothing if they can."""
    pairs = (
        [(0, 1), (0, 2), (1, 2)] if count < 4 else [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
    )
    return [(p, q) for p, q in pairs if q < count]


def _sweeps(count: int, dtype: np.dtype) -> int:
    """So many that the off-diagonal part of any matrix is as small as rounding, and one more.

    Found by trying, with matrices that are graded, singular, or have equal eigenvalues; convergence
    is quadratic in the end (Golub & Van Loan 8.5.3).
    """
    return count + (2 if np.finfo(dtype).nmant > 23 else 1)


def _rotation(left: Number, middle: Number, right: Number) -> tuple[Number, Number, Number]:
    """Tangent, cosine and sine that make a symmetric matrix diagonal (Golub & Van Loan 8.5.1)."""
    done = middle.equals(0.0)
    cotangent = (right - left) / (middle + middle)
    size = abs(cotangent)
    root = (cotangent * cotangent + 1.0).sqrt()
    tangent = done.choose(0.0, (cotangent < 0.0).choose(-1.0, 1.0) / (size + root))
    cosine = 1.0 / (tangent * tangent + 1.0).sqrt()
    return tangent, cosine, tangent * cosine


def _rotated(matrix: Matrix, p: int, q: int, cosine: Number, sine: Number) -> None:
    """Two columns are turned."""
    x, y = matrix[:, p].copy(), matrix[:, q].copy()
    matrix[:, p] = x * cosine - y * sine
    matrix[:, q] = x * sine + y * cosine


def _sorted(keys: Vector, columns: Sequence[Matrix], descending: bool) -> None:
    """Puts keys in order, and columns of matrices along with them."""
    count = len(keys)
    for last in range(count - 1, 0, -1):
        for k in range(last):
            swap = keys[k] < keys[k + 1] if descending else keys[k + 1] < keys[k]
            for rows in (keys, *(x.T for x in columns)):
                x, y = rows[k : k + 1].copy(), rows[k + 1 : k + 2].copy()
                rows[k : k + 1], rows[k + 1 : k + 2] = _chosen(swap, y, x), _chosen(swap, x, y)


def eigh(a: Matrix, lower: bool, dtype: np.dtype) -> tuple[Matrix, Vector]:
    """Vectors and ascending values of a symmetric matrix, of which one triangle is read.

    Jacobi's method, by rows (Golub & Van Loan 8.5): each rotation is found from ratios, so no
    number needs to be scaled.
    """
    count = len(a)
    a = a.copy() if lower else a.T.copy()
    if count > 1:
        # Rotations would turn some infinite numbers away: all become NaN where one is infinite.
        read = np.tril_indices(count)
        a[read] = a[read] + _total([x * 0.0 for x in a[read]])
    v = _known(a[0, 0], np.eye(count))
    for sweep in range(_sweeps(count, dtype) if count > 2 else 1):
        for number, (p, q) in enumerate(_rounds(count)):
            tangent, cosine, sine = _rotation(a[p, p], a[q, p], a[q, q])
            change = tangent * a[q, p]
            a[p, p], a[q, q] = a[p, p] - change, a[q, q] + change
            a[q, p] = _known(a[q, p], 0.0).item()
            for k in range(count):
                if k not in (p, q):
                    # Of each pair the place below the diagonal.
                    (i, j), (m, n) = (max(k, p), min(k, p)), (max(k, q), min(k, q))
                    x, y = a[i, j], a[m, n]
                    a[i, j], a[m, n] = x * cosine - y * sine, x * sine + y * cosine
            if sweep == number == 0:
                v[p, p], v[p, q], v[q, p], v[q, q] = cosine, sine, -sine, cosine
            else:
                _rotated(v, p, q, cosine, sine)
    values = np.array([a[n, n] for n in range(count)], object)
    _sorted(values, [v], descending=False)
    return v, values


def svd(a: Matrix, vectors: bool, full: bool, dtype: np.dtype) -> tuple[Matrix, Vector, Matrix]:
    """U, descending values and Vᵀ; ``vectors`` says whether U and V are wanted.

    One-sided Jacobi (Golub & Van Loan 8.6.3): the columns of A V become orthogonal, without AᵀA,
    in which small values would be lost.  Their QR factorisation has an orthogonal U also where
    values are zero.
    """
    rows, columns = a.shape
    if rows < columns:
        v, values, ut = svd(a.T, vectors, full, dtype)
        return ut.T, values, v.T
    scale, back = _scale(_largest([abs(x) for x in a.reshape(-1)]), dtype)
    w = a * scale
    v = _known(a[0, 0], np.eye(columns))
    for sweep in range(_sweeps(columns, dtype) if columns > 1 else 0):
        for number, (p, q) in enumerate(_rounds(columns)):
            left, right = _total(w[:, p] * w[:, p]), _total(w[:, q] * w[:, q])
            _, cosine, sine = _rotation(left, _total(w[:, p] * w[:, q]), right)
            _rotated(w, p, q, cosine, sine)
            if sweep == number == 0:
                v[p, p], v[p, q], v[q, p], v[q, q] = cosine, sine, -sine, cosine
            else:
                _rotated(v, p, q, cosine, sine)
    squares = np.array([_total(w[:, n] * w[:, n]) for n in range(columns)], object)
    if not vectors:
        _sorted(squares, [], descending=True)
        values = np.array([x.sqrt() * back for x in squares], object)
        return a, values, a
    _sorted(squares, [w, v], descending=True)
    u, r = qr(w, full, dtype)
    values = np.array([r[n, n] for n in range(columns)], object)
    for n in range(columns):
        u[:, n] = _chosen(values[n] < 0.0, -u[:, n], u[:, n])
        values[n] = abs(values[n]) * back
    # Equal values may differ by rounding now.
    for n in range(1, columns):
        values[n] = (values[n] > values[n - 1]).choose(values[n - 1], values[n])
    return u, values, v.T
