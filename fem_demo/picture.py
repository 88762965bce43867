"""A picture of the density on the curved mesh.

The fields are polynomials on curved elements.  So every element is sampled on a fine grid, the grid
is cut into triangles, and the colour is interpolated within each; neighbouring elements share no
samples, and jumps between them stay sharp.  Edges are drawn as the curves that they are.

In three dimensions one looks into the corner of the box at its three lower walls, the planes
x, y, z = least.  They stay plane, because a wall holds the nodes on it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fem_demo.sampling import Samples, sample
from fem_demo.simulation import Observation, Simulation


if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_TRIANGLES = 400_000
COLOURS = "magma"


class Patch(NamedTuple):
    """One surface of elements as it appears on the page, and its samples."""

    page: np.ndarray  # (2, e, p, p)
    density: np.ndarray  # (e, p, p)


def _points_per_axis(surface_elements: int) -> int:
    intervals = int((MAX_TRIANGLES / (2 * surface_elements)) ** 0.5)
    return 1 + min(max(intervals, 2), 48)


def _isometric(position: np.ndarray) -> np.ndarray:
    """``(3, ...)`` to the page: z upwards, x to the lower left, y to the lower right."""
    x, y, z = position
    return np.stack([(y - x) * 3**0.5 / 2, z - (x + y) / 2])


def _walls(simulation: Simulation) -> Iterator[tuple[np.ndarray, int]]:
    """The elements at each lower wall, and the axis that it is normal to."""
    mesh = simulation.mesh
    elements = np.arange(mesh.element_count).reshape(mesh.cells[::-1])  # (z, y, x)
    for direction in range(mesh.dim):
        yield elements.take(0, axis=mesh.dim - 1 - direction).ravel(), direction


def _patches(simulation: Simulation) -> list[Patch]:
    mesh = simulation.mesh
    if mesh.dim == 2:
        line = np.linspace(0.0, 1.0, _points_per_axis(mesh.element_count))
        samples = sample(simulation, [line, line])
        return [Patch(samples.position, samples.density)]
    patches = []
    for elements, direction in _walls(simulation):
        line = np.linspace(0.0, 1.0, _points_per_axis(3 * len(elements)))
        points = [line] * 3
        axis = 2 - direction
        points[axis] = np.zeros(1)
        samples = sample(simulation, points)
        position = samples.position[:, elements].squeeze(2 + axis)  # (3, e, p, p)
        density = samples.density[elements].squeeze(1 + axis)
        patches.append(Patch(_isometric(position), density))
    return patches


def _grid_triangles(elements: int, p: int) -> np.ndarray:
    """The triangles of ``elements`` separate p x p grids, ``(count, 3)``."""
    corner = (np.arange(p - 1)[:, None] * p + np.arange(p - 1)).ravel()
    lower = np.stack([corner, corner + 1, corner + p + 1], axis=1)
    upper = np.stack([corner, corner + p + 1, corner + p], axis=1)
    triangles = np.concatenate([lower, upper])
    return (np.arange(elements)[:, None, None] * p * p + triangles).reshape(-1, 3)


def _edges(page: np.ndarray) -> np.ndarray:
    """The four curved sides of every element, ``(4 e, p, 2)``."""
    sides = [page[:, :, 0, :], page[:, :, -1, :], page[:, :, :, 0], page[:, :, :, -1]]
    return np.concatenate([np.moveaxis(side, 0, -1) for side in sides])


def _draw(axes: "Axes", patches: list[Patch], label: str, gap: float) -> None:
    """``gap`` is the space left of the colour bar, as a part of the width of the axes."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize
    from matplotlib.tri import Triangulation

    values = [patch.density for patch in patches]
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    if high - low < 1e-9 * abs(high):  # a constant: keep round-off from being spread out
        low, high = low - 0.5 * abs(low), high + 0.5 * abs(high)
    norm = Normalize(low, high)
    for page, density in patches:
        elements, p = density.shape[:2]
        x, y = page.reshape(2, -1)
        triangles = Triangulation(x, y, _grid_triangles(elements, p))
        colours = axes.tripcolor(
            triangles, density.ravel(), shading="gouraud", cmap=COLOURS, norm=norm, rasterized=True
        )
        width = float(np.clip(8 / elements**0.5, 0.15, 0.5))
        edges = LineCollection(list(_edges(page)), colors="white", linewidths=width, alpha=0.5)
        axes.add_collection(edges)
    beside = axes.inset_axes((1 + gap, 0.0, 0.028, 1.0))
    bar = axes.figure.colorbar(colours, cax=beside, label=label)
    bar.outline.set_visible(False)


def _draw_line(axes: "Axes", samples: Samples) -> None:
    for x, density in zip(samples.position[0], samples.density, strict=True):
        axes.plot(x, density, color="#b5367a", linewidth=1.4)
    axes.set(xlabel="x", ylabel="density ρ")
    axes.grid(alpha=0.25)


def save_picture(simulation: Simulation, final: Observation, path: Path) -> None:
    """Writes the density on the curved mesh to ``path`` (any format that matplotlib knows)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mesh, order = simulation.mesh, simulation.element.order
    width, height = 7.4, 6.4
    if mesh.dim == 2:
        lengths = [plane[-1] - plane[0] for plane in mesh.planes]
        aspect = lengths[1] / lengths[0]
        if aspect < 0.8:
            width, height = 10.5, 10.0 * aspect + 1.2
        elif aspect > 1.5:
            width, height = 4.6, 9.4
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if mesh.dim == 1:
        _draw_line(axes, sample(simulation, [np.linspace(0.0, 1.0, 17)]))
    else:
        _draw(axes, _patches(simulation), "density ρ", gap=0.025 if mesh.dim == 2 else 0.09)
        axes.set_aspect("equal")
        axes.margins(0.0)
    if mesh.dim == 2:
        axes.set(xlabel="x", ylabel="y")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=3, color="0.6")
    elif mesh.dim == 3:
        axes.axis("off")
        _label_corner(axes, simulation)
    cells = " × ".join(map(str, mesh.cells))
    title = f"{simulation.problem.title}, t = {final.t:.4g}"
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=22)
    detail = f"Q{order}–Q{order - 1}, {cells} elements, {final.step} steps"
    axes.annotate(
        detail, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=8.5, color="0.4"
    )
    figure.savefig(path, dpi=200, bbox_inches="tight", pad_inches=0.15)


def _label_corner(axes: "Axes", simulation: Simulation) -> None:
    """The names of the three axes, at the far ends of the edges that meet in the corner."""
    low = np.array([plane[0] for plane in simulation.mesh.planes])
    high = np.array([plane[-1] for plane in simulation.mesh.planes])
    offset = 0.05 * (high - low).max()
    for axis, name in enumerate("xyz"):
        end = low.copy()
        end[axis] = high[axis] + offset
        page_x, page_y = _isometric(end)
        axes.text(page_x, page_y, name, ha="center", va="center", fontsize=11, color="0.3")
