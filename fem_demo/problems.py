"""The eight test problems, one table entry each.

The fields of a problem are functions of the initial position ``X``, a NumPy array whose first axis
are the coordinates, and return an array over the remaining axes (``velocity``: the first axis are
the components).  ``velocity`` may return fewer components than the dimension; the missing ones
are zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np


Field = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Setting:
    """Where a problem is run when the user does not say otherwise."""

    mesh: str
    refine: int
    t_final: float


@dataclass(frozen=True)
class Physics:
    """Which terms the equations have; a static argument of the compiled functions.

    ``smooth_viscosity`` replaces what is almost or quite discontinuous in the viscosity, for
    derivatives; it is not part of any test problem.
    ``vorticity_factor`` reduces the viscosity where the flow turns rather than compresses.
    ``planar_heat_source`` is added to the energy equation in two dimensions, per volume; it is
    evaluated on the moving mesh.
    """

    viscous: bool = True
    smooth_viscosity: bool = False
    vorticity_factor: bool = False
    planar_heat_source: Callable[[jax.Array], jax.Array] | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Initial fields and physics of one test problem.

    ``energy`` is the specific internal energy; a problem without one deposits the ``--e0`` energy
    as a point blast at the origin.  Of a ``vortex`` the velocity is steady, in two dimensions and
    on its own mesh, so its errors can be measured.
    """

    name: str
    title: str
    settings: Mapping[int, Setting]
    gamma: Field
    density: Field
    velocity: Field
    energy: Field | None
    physics: Physics = Physics()
    gravity: tuple[float, ...] = ()
    vortex: bool = False

    def velocity_at(self, X: np.ndarray) -> np.ndarray:
        """The initial velocity, with as many components as ``X`` has coordinates."""
        given = self.velocity(X)[: len(X)]
        missing = np.zeros((len(X) - len(given), *X.shape[1:]))
        return np.concatenate([given, missing])


def _constant(value: float) -> Field:
    return lambda X: np.full(X.shape[1:], value)


def _at_rest(X: np.ndarray) -> np.ndarray:
    return np.zeros_like(X)


def _settings(**settings: Setting) -> Mapping[int, Setting]:
    """``_settings(d2=..., d3=...)``: keyed by dimension."""
    return MappingProxyType({int(key[1:]): setting for key, setting in settings.items()})


# -- Taylor-Green: a smooth steady vortex, kept steady in 2D by a heat source --------------------


def _taylor_green_velocity(X: np.ndarray) -> np.ndarray:
    u = np.sin(np.pi * X[0]) * np.cos(np.pi * X[1])
    v = -np.cos(np.pi * X[0]) * np.sin(np.pi * X[1])
    return np.stack([u, v]) * (np.cos(np.pi * X[2]) if len(X) == 3 else 1.0)


def _taylor_green_energy(X: np.ndarray) -> np.ndarray:
    waves = np.cos(2 * np.pi * X[0]) + np.cos(2 * np.pi * X[1])
    if len(X) == 2:
        pressure = 1 + waves / 4
    else:
        pressure = 100 + ((np.cos(2 * np.pi * X[2]) + 2) * waves - 2) / 16
    return pressure / (2 / 3)


def _taylor_green_heat(x: jax.Array) -> jax.Array:
    def wave(a: int, b: int) -> jax.Array:
        return jnp.cos(a * np.pi * x[0]) * jnp.cos(b * np.pi * x[1])

    return 3 * np.pi / 8 * (wave(3, 1) - wave(1, 3))


# -- Sod: a shock tube ---------------------------------------------------------------------------


def _sod_density(X: np.ndarray) -> np.ndarray:
    return np.where(X[0] < 0.5, 1.0, 0.1)


def _sod_energy(X: np.ndarray) -> np.ndarray:
    return np.where(X[0] < 0.5, 1.0, 0.1) / _sod_density(X) / 0.4


# -- Triple point: a shock runs through two materials and rolls up their interface ---------------


def _triple_point_gamma(X: np.ndarray) -> np.ndarray:
    if len(X) == 1:
        return np.where(X[0] > 0.5, 1.4, 1.5)
    return np.where((X[0] > 1) & (X[1] <= 1.5), 1.4, 1.5)


def _triple_point_density(X: np.ndarray) -> np.ndarray:
    if len(X) == 2:
        light = X[1] > 1.5
    else:
        light = ((X[1] < 1.5) & (X[2] < 1.5)) | ((X[1] > 1.5) & (X[2] > 1.5))
    return np.where((X[0] > 1) & light, 0.125, 1.0)


def _triple_point_energy(X: np.ndarray) -> np.ndarray:
    pressure = np.where(X[0] > 1, 0.1, 1.0)
    return pressure / _triple_point_density(X) / (_triple_point_gamma(X) - 1)


# -- Gresho: a vortex whose pressure balances its centrifugal force ------------------------------


def _gresho_velocity(X: np.ndarray) -> np.ndarray:
    r = np.hypot(X[0], X[1])
    safe = np.where(r > 0, r, 1.0)
    speed_over_r = np.where(r < 0.2, 5.0, np.where(r < 0.4, 2 / safe - 5, 0.0))
    return np.stack([speed_over_r * X[1], -speed_over_r * X[0]])


def _gresho_energy(X: np.ndarray) -> np.ndarray:
    r = np.hypot(X[0], X[1])
    safe = np.where(r > 0, r, 1.0)
    inner = 5 + 12.5 * r**2
    ring = 9 - 4 * np.log(0.2) + 12.5 * r**2 - 20 * r + 4 * np.log(safe)
    outer = 3 + 4 * np.log(2.0)
    return np.where(r < 0.2, inner, np.where(r < 0.4, ring, outer)) / (2 / 3)


# -- Two-dimensional Riemann problems, configurations 12 and 6 -----------------------------------


def _bump(X: np.ndarray) -> np.ndarray:
    """Makes the velocity vanish on the walls."""
    return np.maximum(X[0] * (1 - X[0]) * 4 * X[1] * (1 - X[1]) * 4, 0.0) ** 0.4


def _quadrants(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return X[0] >= 0.5, X[1] >= 0.5


def _riemann_12_density(X: np.ndarray) -> np.ndarray:
    right, upper = _quadrants(X)
    return np.where(right & upper, 0.5313, np.where(~right & ~upper, 0.8, 1.0))


def _riemann_12_velocity(X: np.ndarray) -> np.ndarray:
    right, upper = _quadrants(X)
    speed = 0.7276 * _bump(X)
    return np.stack([np.where(~right & upper, speed, 0.0), np.where(right & ~upper, speed, 0.0)])


def _riemann_12_energy(X: np.ndarray) -> np.ndarray:
    right, upper = _quadrants(X)
    return np.where(right & upper, 0.4, 1.0) / _riemann_12_density(X) / 0.4


def _riemann_6_density(X: np.ndarray) -> np.ndarray:
    right, upper = _quadrants(X)
    return np.where(~right & upper, 2.0, np.where(right & ~upper, 3.0, 1.0))


def _riemann_6_velocity(X: np.ndarray) -> np.ndarray:
    right, upper = _quadrants(X)
    bump = _bump(X)
    return np.stack([np.where(upper, 0.75, -0.75) * bump, np.where(right, -0.5, 0.5) * bump])


def _riemann_6_energy(X: np.ndarray) -> np.ndarray:
    return 1 / _riemann_6_density(X) / 0.4


# -- Rayleigh-Taylor: heavy over light under gravity ---------------------------------------------


def _rayleigh_taylor_density(X: np.ndarray) -> np.ndarray:
    return np.where(X[1] >= 0, 2.0, 1.0)


def _rayleigh_taylor_velocity(X: np.ndarray) -> np.ndarray:
    v = 0.02 * np.exp(-2 * np.pi * X[1] ** 2) * np.cos(2 * np.pi * X[0])
    return np.stack([np.zeros_like(v), v])


def _rayleigh_taylor_energy(X: np.ndarray) -> np.ndarray:
    density = _rayleigh_taylor_density(X)
    return (6 - density * X[1]) / (2 / 3) / density


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            name="taylor-green",
            title="Taylor–Green vortex",
            settings=_settings(
                d2=Setting("square01_quad", 3, 0.75), d3=Setting("cube01_hex", 1, 0.75)
            ),
            gamma=_constant(5 / 3),
            density=_constant(1.0),
            velocity=_taylor_green_velocity,
            energy=_taylor_green_energy,
            physics=Physics(viscous=False, planar_heat_source=_taylor_green_heat),
            vortex=True,
        ),
        Problem(
            name="sedov",
            title="Sedov blast",
            settings=_settings(
                d1=Setting("segment01", 5, 0.6),
                d2=Setting("square01_quad", 3, 0.8),
                d3=Setting("cube01_hex", 2, 0.6),
            ),
            gamma=_constant(1.4),
            density=_constant(1.0),
            velocity=_at_rest,
            energy=None,
        ),
        Problem(
            name="sod",
            title="Sod shock tube",
            settings=_settings(
                d1=Setting("segment01", 5, 0.2),
                d2=Setting("square01_quad", 3, 0.2),
                d3=Setting("cube01_hex", 2, 0.2),
            ),
            gamma=_constant(1.4),
            density=_sod_density,
            velocity=_at_rest,
            energy=_sod_energy,
        ),
        Problem(
            name="triple-point",
            title="Triple point",
            settings=_settings(
                d2=Setting("rectangle01_quad", 2, 3.0), d3=Setting("box01_hex", 1, 5.0)
            ),
            gamma=_triple_point_gamma,
            density=_triple_point_density,
            velocity=_at_rest,
            energy=_triple_point_energy,
        ),
        Problem(
            name="gresho",
            title="Gresho vortex",
            settings=_settings(
                d2=Setting("square_gresho", 3, 0.62831853), d3=Setting("cube01_hex", 2, 0.6)
            ),
            gamma=_constant(5 / 3),
            density=_constant(1.0),
            velocity=_gresho_velocity,
            energy=_gresho_energy,
            physics=Physics(viscous=False),
            vortex=True,
        ),
        Problem(
            name="riemann-12",
            title="Riemann problem, configuration 12",
            settings=_settings(
                d2=Setting("square01_quad", 3, 0.25), d3=Setting("cube01_hex", 2, 0.25)
            ),
            gamma=_constant(1.4),
            density=_riemann_12_density,
            velocity=_riemann_12_velocity,
            energy=_riemann_12_energy,
        ),
        Problem(
            name="riemann-6",
            title="Riemann problem, configuration 6",
            settings=_settings(
                d2=Setting("square01_quad", 3, 0.3), d3=Setting("cube01_hex", 2, 0.3)
            ),
            gamma=_constant(1.4),
            density=_riemann_6_density,
            velocity=_riemann_6_velocity,
            energy=_riemann_6_energy,
        ),
        Problem(
            name="rayleigh-taylor",
            title="Rayleigh–Taylor instability",
            settings=_settings(d2=Setting("rt2D", 2, 4.0), d3=Setting("cube01_hex", 2, 0.6)),
            gamma=_constant(5 / 3),
            density=_rayleigh_taylor_density,
            velocity=_rayleigh_taylor_velocity,
            energy=_rayleigh_taylor_energy,
            physics=Physics(vorticity_factor=True),
            gravity=(0.0, -1.0),
        ),
    )
}


def find_problem(name: str) -> Problem:
    problem = PROBLEMS.get(name)
    if problem is None:
        raise ValueError(f"unknown problem {name!r}; the problems are {', '.join(PROBLEMS)}")
    return problem
