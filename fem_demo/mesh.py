"""Structured box meshes: the coarse meshes by name, and their uniform refinement.

A mesh is the tensor product of its vertex planes.  Elements, and the vertices and nodes inside
each of them, are numbered lexicographically with **x fastest**; arrays are C-ordered, so their axes
read (z, y, x) from left to right while vector components read (x, y, z).
"""

from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True)
class BoxMesh:
    """``planes[0]`` are the x of the vertex planes, ``planes[1]`` the y, ``planes[2]`` the z."""

    name: str
    planes: tuple[tuple[float, ...], ...]

    @property
    def dim(self) -> int:
        return len(self.planes)

    @property
    def cells(self) -> tuple[int, ...]:
        """Number of elements along x, y, z."""
        return tuple(len(plane) - 1 for plane in self.planes)

    @property
    def element_count(self) -> int:
        return prod(self.cells)

    @property
    def volume(self) -> float:
        return prod(plane[-1] - plane[0] for plane in self.planes)

    def refined(self, levels: int) -> "BoxMesh":
        """Every interval halved ``levels`` times: 2^(dim levels) times as many elements."""
        planes = [np.array(plane, dtype=np.float64) for plane in self.planes]
        for _ in range(levels):
            planes = [
                np.insert(plane, np.arange(1, len(plane)), (plane[:-1] + plane[1:]) / 2)
                for plane in planes
            ]
        return BoxMesh(self.name, tuple(tuple(plane.tolist()) for plane in planes))

    def positions(self, points: np.ndarray) -> np.ndarray:
        """Positions of the tensor grid of reference ``points`` in every element.

        Returns ``(dim, elements, p, ..., p)``, the last ``dim`` axes in the order (z, y, x).
        """
        p = len(points)
        per_axis = []  # x of each point of each cell of an axis
        for plane in self.planes:
            left, right = np.array(plane[:-1]), np.array(plane[1:])
            per_axis.append(left[:, None] * (1 - points) + right[:, None] * points)  # (cells, p)
        shape = tuple(reversed(self.cells)) + (p,) * self.dim  # cells z, y, x, points z, y, x
        out = np.empty((self.dim, *shape))
        for axis, values in enumerate(per_axis):
            position = self.dim - 1 - axis
            spread = [1] * (2 * self.dim)
            spread[position], spread[self.dim + position] = values.shape
            out[axis] = values.reshape(spread)
        return out.reshape((self.dim, self.element_count) + (p,) * self.dim)


def _uniform(start: float, stop: float, cells: int) -> tuple[float, ...]:
    return tuple(np.linspace(start, stop, cells + 1).tolist())


COARSE_MESHES = {
    mesh.name: mesh
    for mesh in (
        BoxMesh("segment01", (_uniform(0, 1, 2),)),
        BoxMesh("square01_quad", (_uniform(0, 1, 2),) * 2),
        BoxMesh("cube01_hex", (_uniform(0, 1, 2),) * 3),
        BoxMesh("rectangle01_quad", (_uniform(0, 7, 7), _uniform(0, 3, 3))),
        BoxMesh("box01_hex", ((0.0, 1.0, 3.0, 5.0, 7.0), (0.0, 1.5, 3.0), (0.0, 1.5, 3.0))),
        BoxMesh("square_gresho", (_uniform(-0.5, 0.5, 2),) * 2),
        BoxMesh("rt2D", (_uniform(0, 0.5, 1), _uniform(-1, 1, 4))),
    )
}


def coarse_mesh(name: str) -> BoxMesh:
    """The mesh of that name, with or without the suffix ``.mesh``."""
    mesh = COARSE_MESHES.get(name.removesuffix(".mesh"))
    if mesh is None:
        raise ValueError(f"unknown mesh {name!r}; the meshes are {', '.join(COARSE_MESHES)}")
    return mesh
