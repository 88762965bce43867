"""The section of a three-dimensional curved mesh with a plane, for pictures.

Every element is sampled on a grid of points, each cell of the grid is divided into six tetrahedra
around its diagonal (Kuhn's division, which fits together across the faces of cells), and the field
"coordinate minus position of the plane" is linear in each.  So the plane cuts a tetrahedron in a
triangle or in a quadrilateral.  The edges of elements appear where it cuts the triangles of their
faces.
"""

from itertools import permutations
from typing import NamedTuple

import numpy as np


class Section(NamedTuple):
    page: np.ndarray  # (2, n), the two coordinates within the plane
    triangles: np.ndarray  # (t, 3) into n
    fields: dict[str, np.ndarray]  # (n,) each
    edges: np.ndarray  # (segments, 2 ends, 2 coordinates)


def _tetrahedra(p: int) -> np.ndarray:
    """Of a p x p x p grid with x fastest, ``(count, 4)``."""
    line = np.arange(p - 1)
    corner = (line[:, None, None] * p * p + line[:, None] * p + line).ravel()
    # From the lowest corner of a cell to the highest, one axis after the other, in any order.
    orders = np.array(list(permutations((1, p, p * p))))  # (6, 3), the strides of the axes
    paths = np.insert(np.cumsum(orders, axis=1), 0, 0, axis=1)  # (6, 4)
    return (corner[:, None, None] + paths).reshape(-1, 4)


def _face_triangles(p: int) -> np.ndarray:
    """Of the six faces of a p x p x p grid, ``(count, 3)``."""
    points = np.arange(p**3).reshape(p, p, p)
    triangles = []
    for axis in range(3):
        for face in np.moveaxis(points, axis, 0)[[0, -1]]:
            a, b, c, d = face[:-1, :-1], face[:-1, 1:], face[1:, 1:], face[1:, :-1]
            triangles += [np.stack([a, b, c], -1), np.stack([a, c, d], -1)]
    return np.concatenate([t.reshape(-1, 3) for t in triangles])


def _crossing(height: np.ndarray, inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Where the height passes through zero on the way from ``inside`` to ``outside``, in [0, 1]."""
    return height[inside] / (height[inside] - height[outside])


def _split(height: np.ndarray, simplices: np.ndarray, below: int) -> tuple[np.ndarray, np.ndarray]:
    """The vertices below and above the plane of the simplices with ``below`` vertices below it."""
    under = height[simplices] < 0
    chosen = under.sum(axis=1) == below
    order = np.argsort(~under[chosen], axis=1, kind="stable")
    sorted_ = np.take_along_axis(simplices[chosen], order, axis=1)
    return sorted_[:, :below], sorted_[:, below:]


def cut(position: np.ndarray, fields: dict[str, np.ndarray], normal: int, value: float) -> Section:
    """Cuts with the plane on which coordinate ``normal`` is ``value``.

    ``position`` is ``(3, e, p, p, p)`` and each field ``(e, p, p, p)``, points as (z, y, x).
    """
    # A plane that faces of elements lie in, but for the noise of the solves, is moved off them.
    low, high = position[normal].min(), position[normal].max()
    margin = 1e-6 * (high - low)
    if np.abs(position[normal] - value).min() < margin:
        value += 2 * margin
    value = float(np.clip(value, low + margin, high - margin))
    heights = position[normal] - value  # (e, p, p, p)
    flat = heights.reshape(len(heights), -1)
    hit = (flat.min(axis=1) < 0) & (flat.max(axis=1) >= 0)
    p = position.shape[-1]
    height = flat[hit].ravel()
    offsets = (np.arange(hit.sum()) * p**3)[:, None, None]
    tetrahedra = (offsets + _tetrahedra(p)).reshape(-1, 4)
    faces = (offsets + _face_triangles(p)).reshape(-1, 3)
    axes = [axis for axis in range(3) if axis != normal]
    plane = np.stack([position[axis, hit].ravel() for axis in axes])
    values = {name: field[hit].ravel() for name, field in fields.items()}

    # Each row of ``starts`` and ``ends`` lists the edges that make one triangle of the section.
    starts, ends = [], []
    one, three = _split(height, tetrahedra, 1)
    starts.append(np.repeat(one, 3, axis=1))
    ends.append(three)
    three, one = _split(height, tetrahedra, 3)
    starts.append(three)
    ends.append(np.repeat(one, 3, axis=1))
    (a, b), (c, d) = (pair.T for pair in _split(height, tetrahedra, 2))
    starts += [np.stack([a, a, b], axis=1), np.stack([a, b, b], axis=1)]
    ends += [np.stack([c, d, d], axis=1), np.stack([c, d, c], axis=1)]
    start, end = np.concatenate(starts).ravel(), np.concatenate(ends).ravel()
    t = _crossing(height, start, end)

    segments = []
    for below in (1, 2):
        under, over = _split(height, faces, below)
        s, e = np.repeat(under, 3 - below, axis=1), np.repeat(over, below, axis=1)
        along = _crossing(height, s, e)
        segments.append((1 - along) * plane[:, s] + along * plane[:, e])  # (2, count, 2 ends)
    return Section(
        page=(1 - t) * plane[:, start] + t * plane[:, end],
        triangles=np.arange(len(start)).reshape(-1, 3),
        fields={name: (1 - t) * f[start] + t * f[end] for name, f in values.items()},
        edges=np.moveaxis(np.concatenate(segments, axis=1), 0, -1),
    )
