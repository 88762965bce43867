"""An animated picture (GIF) of the density: what the gas did, at equal intervals of time.

A run records one frame at the first step that ends at or after each of these times.  No step is cut
for that, so a run that is filmed is the same run.
"""

from pathlib import Path

from fem_demo.picture import (
    QUANTITIES,
    Patch,
    Plane,
    caption,
    draw,
    dress,
    limits,
    new_figure,
    page_aspect,
    patches,
)
from fem_demo.simulation import Observation, Simulation, Stop


FRAMES = 60
FRAMES_PER_SECOND = 12
MAX_TRIANGLES = 40_000  # per frame


class Film:
    """Collects frames during a run; ``film.stop`` is to be given to it."""

    def __init__(self, simulation: Simulation, plane: Plane | None = None) -> None:
        if simulation.mesh.dim == 1:
            raise ValueError("--animate needs two or three dimensions")
        self.simulation = simulation
        self.plane = plane
        self.frames: list[tuple[Observation, list[Patch]]] = []
        self.record()

    @property
    def stop(self) -> Stop:
        return Stop(self.record, every_time=max(self.simulation.t_final, 1e-300) / FRAMES)

    def record(self) -> None:
        now = self.simulation.observation()
        if not self.frames or now.t > self.frames[-1][0].t:
            surfaces = patches(self.simulation, self.plane, MAX_TRIANGLES)
            self.frames.append((now, surfaces))

    def save(self, path: Path) -> None:
        """Draws the frames, all with the colours of one range."""
        from matplotlib.animation import PillowWriter

        self.record()
        quantity = QUANTITIES[0]
        surfaces = [patch for _, frame in self.frames for patch in frame]
        colour_limits = limits([patch.fields[quantity.name] for patch in surfaces])
        aspect = page_aspect(self.simulation, self.plane)
        width = 7.0 if aspect < 0.7 else 5.6 if aspect < 1.5 else 3.6
        figure = new_figure(width, (width - 1.2) * aspect + 0.9)
        gap = 0.09 if self.simulation.mesh.dim == 3 and self.plane is None else 0.03
        writer = PillowWriter(fps=FRAMES_PER_SECOND)
        with writer.saving(figure, str(path), dpi=100):
            for now, frame in self.frames:
                figure.clear()
                axes = figure.add_subplot()
                draw(axes, frame, quantity, colour_limits, gap)
                dress(axes, self.simulation, self.plane)
                title, detail = caption(self.simulation, now, self.plane)
                axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=18)
                axes.annotate(
                    f"{quantity.label}; {detail}",
                    (0, 1), (0, 6), "axes fraction", "offset points",
                    fontsize=7.5, color="0.4",
                )  # fmt: skip
                writer.grab_frame()
