"""Even and odd halves of matrices that are symmetric about their centre.

Tables of a basis on symmetric points are: ``B[q-1-x, n-1-a] = B[x, a]``, and the tables of its
derivatives are their own negatives in this way. Such a matrix takes the even part of a vector,
``u[a] + u[n-1-a]``, to an even one and the odd part, ``u[a] - u[n-1-a]``, to an odd one, or each to
the other: two products of half the rows and half the columns in place of one (A. Solomonoff, "A
fast algorithm for spectral differentiation", J. Comput. Phys. 98, 1992; D. A. Kopriva,
"Implementing Spectral Methods for Partial Differential Equations", 2009).

**Rounding.**  Both parts are as large as the larger one of the two values, and so are both halves
of the matrix. Let ``M[x, a]`` be the lesser of the largest magnitude in rows ``x`` and ``q-1-x``
and the largest in columns ``a`` and ``n-1-a``. Then the error is at most ``(n / 2 + 4) eps sum_a
M[x, a] |u[a]|`` to first order, that of the plain product ``n eps sum_a |B[x, a]| |u[a]|``. A
matrix that is not symmetric to the last bit is replaced by the one next to it that is, which adds
at most ``(n + q) eps sum_a M[x, a] |u[a]|``: computed tables have such errors.

**NaN and infinity.**  Every value of the result is made of all values of the vector, so one that is
not finite makes all of the result not finite, as in the plain product; but where that has
infinities this may have NaN. Sums of values above half the largest number overflow.
"""

import math
import os
from dataclasses import dataclass

import numpy as np


# Splitting is for products that it saves one operation in so many.
WORTH = 8


@dataclass(frozen=True)
class Halves:
    """What a matrix (rows, columns) is to even and to odd vectors, each half of it rounded up.

    ``matrix[x, a] = even[x, a] + odd[x, a]`` and ``matrix[x, columns-1-a] = even[x, a] - odd[x,
    a]``; the other rows are ``sign`` times these, backwards. In the middle of an odd number of
    columns, and of rows if the sign is positive, ``odd`` is zero.
    """

    even: np.ndarray
    odd: np.ndarray
    sign: int


def halves(matrix: np.ndarray) -> Halves | None:
    """Those of a matrix that is symmetric about its centre, or the negative of its mirror image.

    It need not be so to the last bit: opposite entries may differ a little, see above.

    >>> import numpy as np
    >>> found = halves(np.array([[3.0, 1.0], [1.0, 3.0]]))
    >>> found.even, found.odd, found.sign
    (array([[2.]]), array([[1.]]), 1)
    """
    if matrix.ndim != 2 or matrix.dtype.kind not in "fc" or not np.isfinite(matrix).all():
        return None
    rows, columns = matrix.shape
    wide = matrix.astype(np.clongdouble if matrix.dtype.kind == "c" else np.longdouble)
    mirrored = wide[::-1, ::-1]
    largest = np.minimum(_largest(abs(wide), 1), _largest(abs(wide), 0))
    allowed = 2 * (rows + columns) * np.finfo(matrix.dtype).eps * largest
    for sign in (1, -1):
        if (abs(wide - sign * mirrored) <= allowed).all():
            whole = (wide + sign * mirrored) / 2
            quarter = (slice(-(-rows // 2)), slice(-(-columns // 2)))
            even = (whole + whole[:, ::-1])[quarter] / 2
            odd = (whole - whole[:, ::-1])[quarter] / 2
            return Halves(even.astype(matrix.dtype, "C"), odd.astype(matrix.dtype, "C"), sign)
    return None


def is_wanted() -> bool | None:
    """Whether the user wants products to be split, wherever that is less work; else ``None``."""
    return {"on": True, "off": False}.get(os.environ.get("JAXMAGMA_EVEN_ODD", ""))


def _largest(matrix: np.ndarray, axis: int) -> np.ndarray:
    """Along an axis, of each line and its mirror image."""
    most = matrix.max(axis, keepdims=True, initial=0)
    found: np.ndarray = np.maximum(most, most[::-1, ::-1])
    return found


def is_worth(rows: int, columns: int, dtype: np.dtype) -> bool:
    """Whether two products of halves are enough fewer operations than the whole one."""
    multiply, add = (4, 2) if dtype.kind == "c" else (1, 1)
    whole = multiply * rows * columns
    products = math.prod(-(-x // 2) for x in (rows, columns)) + (rows // 2) * (columns // 2)
    split = multiply * products + 2 * add * (rows // 2 + columns // 2)
    return WORTH * (whole - split) >= whole
