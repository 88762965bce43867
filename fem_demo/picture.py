"""Pictures of density, speed and specific internal energy on the curved mesh.

The fields are polynomials on curved elements.  So every element is sampled on a fine grid, the grid
is cut into triangles, and the colour is interpolated within each; neighbouring elements share no
samples, and jumps between them stay sharp.  Edges are drawn as the curves that they are.

In three dimensions one looks into the corner of the box at its three lower walls, the planes
x, y, z = least, which stay plane because a wall holds the nodes on it; or at the section with any
plane normal to an axis.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fem_demo.cut import cut
from fem_demo.mesh import BoxMesh
from fem_demo.sampling import Samples, sample
from fem_demo.simulation import Observation, Simulation


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_TRIANGLES = 200_000
MAX_SAMPLES_TO_CUT = 1_500_000


class Quantity(NamedTuple):
    name: str
    label: str
    colours: str


QUANTITIES = (
    Quantity("density", "density ρ", "viridis"),
    Quantity("speed", "speed |v|", "magma"),
    Quantity("energy", "specific internal energy e", "inferno"),
)


class Plane(NamedTuple):
    """The plane on which the coordinate ``axis`` has the given value."""

    axis: int
    value: float

    @staticmethod
    def parse(text: str) -> "Plane":
        """``"z=0.5"``"""
        name, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = np.nan
        if name not in ("x", "y", "z") or not equals or not np.isfinite(value):
            raise ValueError(f"a cut is an axis and a number, as in z=0.5, not {text!r}")
        return Plane("xyz".index(name), value)

    def check(self, mesh: BoxMesh) -> None:
        """The walls do not move, so a plane that misses the box at first misses it at any time."""
        low, high = mesh.planes[self.axis][0], mesh.planes[self.axis][-1]
        if not low <= self.value <= high:
            raise ValueError(f"the cut {self} misses mesh {mesh.name}, from {low:g} to {high:g}")

    def __str__(self) -> str:
        return f"{'xyz'[self.axis]} = {self.value:g}"


class Patch(NamedTuple):
    """A piece of surface as it appears on the page."""

    page: np.ndarray  # (2, n)
    triangles: np.ndarray  # (t, 3) into n
    fields: dict[str, np.ndarray]  # (n,) each
    edges: Sequence[np.ndarray]  # curves (points, 2)
    elements: int


def _points_per_axis(surface_elements: int, triangles: int) -> int:
    intervals = int((triangles / (2 * surface_elements)) ** 0.5)
    return 1 + min(max(intervals, 2), 32)


def _isometric(position: np.ndarray) -> np.ndarray:
    """``(3, ...)`` to the page: z upwards, x to the lower left, y to the lower right."""
    x, y, z = position
    return np.stack([(y - x) * 3**0.5 / 2, z - (x + y) / 2])


def _fields(samples: Samples) -> dict[str, np.ndarray]:
    return {q.name: getattr(samples, q.name) for q in QUANTITIES}


def _grid_triangles(elements: int, p: int) -> np.ndarray:
    """The triangles of ``elements`` separate p x p grids, ``(count, 3)``."""
    corner = (np.arange(p - 1)[:, None] * p + np.arange(p - 1)).ravel()
    lower = np.stack([corner, corner + 1, corner + p + 1], axis=1)
    upper = np.stack([corner, corner + p + 1, corner + p], axis=1)
    triangles = np.concatenate([lower, upper])
    return (np.arange(elements)[:, None, None] * p * p + triangles).reshape(-1, 3)


def _grid_patch(page: np.ndarray, fields: dict[str, np.ndarray]) -> Patch:
    """Of separate grids: ``page`` is ``(2, e, p, p)``, the fields are ``(e, p, p)``."""
    elements, p = page.shape[1:3]
    sides = [page[:, :, 0, :], page[:, :, -1, :], page[:, :, :, 0], page[:, :, :, -1]]
    return Patch(
        page.reshape(2, -1),
        _grid_triangles(elements, p),
        {name: field.ravel() for name, field in fields.items()},
        list(np.concatenate([np.moveaxis(side, 0, -1) for side in sides])),
        elements,
    )


def _walls(simulation: Simulation) -> Iterator[tuple[np.ndarray, int]]:
    """The elements at each lower wall, and the axis that it is normal to."""
    mesh = simulation.mesh
    elements = np.arange(mesh.element_count).reshape(mesh.cells[::-1])  # (z, y, x)
    for direction in range(mesh.dim):
        yield elements.take(0, axis=mesh.dim - 1 - direction).ravel(), direction


def _section(simulation: Simulation, plane: Plane) -> Patch:
    count = simulation.mesh.element_count
    p = 1 + min(max(int((MAX_SAMPLES_TO_CUT / count) ** (1 / 3)) - 1, 2), 20)
    samples = sample(simulation, [np.linspace(0.0, 1.0, p)] * 3)
    section = cut(samples.position, _fields(samples), plane.axis, plane.value)
    surface = round(count ** (2 / 3))
    return Patch(section.page, section.triangles, section.fields, list(section.edges), surface)


def patches(
    simulation: Simulation, plane: Plane | None = None, triangles: int = MAX_TRIANGLES
) -> list[Patch]:
    """What there is to see at the present time, of about so many triangles."""
    mesh = simulation.mesh
    if mesh.dim == 2:
        line = np.linspace(0.0, 1.0, _points_per_axis(mesh.element_count, triangles))
        samples = sample(simulation, [line, line])
        return [_grid_patch(samples.position, _fields(samples))]
    if plane is not None:
        return [_section(simulation, plane)]
    walls = []
    for elements, direction in _walls(simulation):
        line = np.linspace(0.0, 1.0, _points_per_axis(3 * len(elements), triangles))
        points = [line] * 3
        axis = 2 - direction
        points[axis] = np.zeros(1)
        samples = sample(simulation, points)
        position = samples.position[:, elements].squeeze(2 + axis)  # (3, e, p, p)
        fields = {n: f[elements].squeeze(1 + axis) for n, f in _fields(samples).items()}
        walls.append(_grid_patch(_isometric(position), fields))
    return walls


def limits(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """The range of the colours."""
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    if high - low < 1e-9 * abs(high):  # a constant: keep round-off from being spread out
        low, high = low - 0.5 * abs(low), high + 0.5 * abs(high)
    return low, high


def draw(
    axes: "Axes",
    surfaces: Sequence[Patch],
    quantity: Quantity,
    colour_limits: tuple[float, float],
    gap: float,
) -> None:
    """One quantity on the mesh; ``gap`` is the space left of the colour bar, in axes widths."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize
    from matplotlib.tri import Triangulation

    norm = Normalize(*colour_limits)
    for patch in surfaces:
        colours = axes.tripcolor(
            Triangulation(patch.page[0], patch.page[1], patch.triangles),
            patch.fields[quantity.name],
            shading="gouraud",
            cmap=quantity.colours,
            norm=norm,
            rasterized=True,
        )
        width = float(np.clip(6 / patch.elements**0.5, 0.12, 0.45))
        axes.add_collection(
            LineCollection(patch.edges, colors="white", linewidths=width, alpha=0.45)
        )
    beside = axes.inset_axes((1 + gap, 0.0, 0.03, 1.0))
    bar = axes.figure.colorbar(colours, cax=beside)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, color="0.6", labelsize=8)
    axes.set_aspect("equal")
    axes.margins(0.0)


def dress(axes: "Axes", simulation: Simulation, plane: Plane | None) -> None:
    """Names of the axes, and no frame."""
    if simulation.mesh.dim == 3 and plane is None:
        axes.axis("off")
        _label_corner(axes, simulation)
        return
    across, up = [name for i, name in enumerate("xyz") if plane is None or i != plane.axis][:2]
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9, rotation=0, labelpad=8)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2, color="0.6", labelsize=8)


def _label_corner(axes: "Axes", simulation: Simulation) -> None:
    """The names of the three axes, at the far ends of the edges that meet in the corner."""
    low = np.array([plane[0] for plane in simulation.mesh.planes])
    high = np.array([plane[-1] for plane in simulation.mesh.planes])
    offset = 0.05 * (high - low).max()
    for axis, name in enumerate("xyz"):
        end = low.copy()
        end[axis] = high[axis] + offset
        page_x, page_y = _isometric(end)
        axes.text(page_x, page_y, name, ha="center", va="center", fontsize=10, color="0.3")


def _draw_line(axes: "Axes", samples: Samples, quantity: Quantity) -> None:
    values = getattr(samples, quantity.name)
    for x, value in zip(samples.position[0], values, strict=True):
        axes.plot(x, value, color="#b5367a", linewidth=1.4)
    axes.set_xlabel("x", fontsize=9)
    axes.tick_params(length=2, color="0.6", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)


def caption(simulation: Simulation, now: Observation, plane: Plane | None) -> tuple[str, str]:
    """The title, and a line of detail."""
    order = simulation.element.order
    cells = " × ".join(map(str, simulation.mesh.cells))
    where = "" if plane is None else f", section {plane}"
    title = f"{simulation.problem.title}, t = {now.t:.4g}"
    detail = f"Q{order}–Q{order - 1}, {cells} elements, {now.step} steps{where}"
    return title, detail


def page_aspect(simulation: Simulation, plane: Plane | None) -> float:
    """Height over width of the box as it is drawn."""
    lengths = [p[-1] - p[0] for p in simulation.mesh.planes]
    if simulation.mesh.dim == 1:
        return 0.8
    if simulation.mesh.dim == 3:
        if plane is None:
            x, y, z = lengths
            return (z + (x + y) / 2) / ((x + y) * 3**0.5 / 2)
        del lengths[plane.axis]
    return lengths[1] / lengths[0]


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(
    simulation: Simulation, final: Observation, path: Path, plane: Plane | None = None
) -> None:
    """Writes the three quantities side by side to ``path`` (any format that matplotlib knows).

    Panels of a long box stand one above the other.
    """
    aspect = page_aspect(simulation, plane)
    stacked = aspect < 0.6
    if stacked:
        figure = new_figure(8.2, 3 * (6.6 * aspect + 0.5) + 0.6)
    else:
        panel = 4.0 if aspect < 1.5 else 2.4
        figure = new_figure(3 * (panel + 0.7), (panel - 0.35) * aspect + 1.0)
    rows, columns = (3, 1) if stacked else (1, 3)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    if simulation.mesh.dim == 1:
        samples = sample(simulation, [np.linspace(0.0, 1.0, 17)])
        for axes, quantity in zip(panels, QUANTITIES, strict=True):
            _draw_line(axes, samples, quantity)
    else:
        surfaces = patches(simulation, plane)
        gap = 0.09 if simulation.mesh.dim == 3 and plane is None else 0.03
        for axes, quantity in zip(panels, QUANTITIES, strict=True):
            colour_limits = limits([patch.fields[quantity.name] for patch in surfaces])
            draw(axes, surfaces, quantity, colour_limits, gap)
            dress(axes, simulation, plane)
    pad = 14 if simulation.mesh.dim == 3 and plane is None else 6
    for axes, quantity in zip(panels, QUANTITIES, strict=True):
        axes.set_title(quantity.label, loc="left", fontsize=10, color="0.25", pad=pad)
    title, detail = caption(simulation, final, plane)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.text(0.99, 0.99, detail, ha="right", va="top", fontsize=8.5, color="0.4")
    figure.savefig(path, dpi=170, bbox_inches="tight", pad_inches=0.15)
