"""A run: configuration, the time loop with its accept/reject rule, and the summary.

The loop is compiled as a whole.  Python hands it a number of attempts to make, sized to a fraction
of a second, and looks at the result in between to draw the progress bar, or to write a file.  Where
it looks changes nothing in the run: no step is cut for it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fem_demo.basis import ReferenceElement
from fem_demo.hydrodynamics import Controls, Hydrodynamics, PointData, State, energies, point_data
from fem_demo.initial import discretise
from fem_demo.integrators import Integrator, Work, find_integrator, step
from fem_demo.mesh import BoxMesh, coarse_mesh
from fem_demo.problems import Setting, find_problem


ASSEMBLIES = ("partial", "full")
MAX_ORDER = 8
MAX_UNKNOWNS = 2**31 - 1  # their numbers have 32 bits
SECONDS_PER_CHUNK = 0.5  # starting the compiled loop costs some milliseconds
SHRINK = 0.85  # of dt, when a step turns out to be longer than a stable one
GROW = 1.02  # of dt, when the stable one is longer by more than MARGIN
MARGIN = 1.25


@dataclass(frozen=True)
class Configuration:
    """What to run.  None means the problem's own setting."""

    problem: str = "sedov"
    dim: int | None = None
    order: int = 2
    refine: int | None = None
    mesh: str | None = None
    t_final: float | None = None
    integrator: str = "rk4"
    assembly: str = "partial"
    cfl: float = 0.5
    e0: float = 1.0
    cg_tol: float = 1e-8
    cg_max_iter: int = 300
    max_steps: int | None = None

    def resolved(self) -> "Configuration":
        """The same with every None but ``max_steps`` filled in; raises ValueError on bad input.

        In one dimension the assembly is always full.
        """
        problem = find_problem(self.problem)
        find_integrator(self.integrator)
        if self.assembly not in ASSEMBLIES:
            known = " and ".join(ASSEMBLIES)
            raise ValueError(f"unknown assembly {self.assembly!r}; there are {known}")
        for name, value, least in (("order", self.order, 1), ("cg-max-iter", self.cg_max_iter, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.order > MAX_ORDER:
            raise ValueError(f"order must be at most {MAX_ORDER}, got {self.order}")
        if self.refine is not None and self.refine < 0:
            raise ValueError(f"refine must not be negative, got {self.refine}")
        if self.max_steps is not None and self.max_steps < 0:
            raise ValueError(f"max-steps must not be negative, got {self.max_steps}")
        for label, number in (("cfl", self.cfl), ("e0", self.e0), ("cg-tol", self.cg_tol)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{label} must be positive, got {number}")
        if self.t_final is not None and not (math.isfinite(self.t_final) and self.t_final >= 0):
            raise ValueError(f"t-final must not be negative, got {self.t_final}")

        mesh = None if self.mesh is None else coarse_mesh(self.mesh)
        dim = self.dim or (mesh.dim if mesh else 2)
        if mesh is not None and mesh.dim != dim:
            raise ValueError(f"mesh {mesh.name} has dimension {mesh.dim}, not {dim}")
        if dim not in problem.settings:
            known = " or ".join(map(str, problem.settings))
            raise ValueError(f"problem {problem.name} has dimension {known}, not {dim}")
        setting: Setting = problem.settings[dim]
        mesh = mesh or coarse_mesh(setting.mesh)
        refine = setting.refine if self.refine is None else self.refine
        per_cell = 2 ** min(refine, 31) * self.order
        if dim * prod(cells * per_cell + 1 for cells in mesh.cells) > MAX_UNKNOWNS:
            raise ValueError(
                f"refine {refine} makes more than {MAX_UNKNOWNS:,} velocity unknowns "
                f"on mesh {mesh.name}"
            )
        return replace(
            self,
            dim=dim,
            mesh=mesh.name,
            assembly="full" if dim == 1 else self.assembly,
            refine=refine,
            t_final=setting.t_final if self.t_final is None else self.t_final,
        )


class Progress(NamedTuple):
    """The carry of the time loop."""

    t: jax.Array
    dt: jax.Array
    state: State
    points: PointData  # of ``state``
    repeating: jax.Array  # bool: the last attempt from this state was rejected
    finished: jax.Array  # bool
    steps: jax.Array  # accepted
    repeats: jax.Array  # rejected
    work: Work


@jax.jit
def begin(hydro: Hydrodynamics, state: State) -> Progress:
    points = point_data(hydro, state)
    zero = jnp.zeros((), jnp.int64)
    no = jnp.zeros((), bool)
    t = jnp.zeros_like(points.time_step)
    work = Work.none()._replace(updates=zero + 1)
    return Progress(t, points.time_step, state, points, no, no, zero, zero, work)


def attempt(
    hydro: Hydrodynamics, integrator: Integrator, t_final: jax.Array, before: Progress
) -> Progress:
    """One step, kept only if no state on the way asked for a smaller dt.

    The smallest stable dt is taken over the states after the first; the first one joins in only
    when the step is a repetition.  The last step is cut to end at ``t_final``.
    """
    last = before.t + before.dt >= t_final
    dt = jnp.where(last, t_final - before.t, before.dt)
    new = step(hydro, integrator, before.state, before.points, dt, before.work)
    stable = jnp.minimum(
        new.time_step, jnp.where(before.repeating, before.points.time_step, jnp.inf)
    )
    accepted = stable >= dt  # false also when the step produced NaN

    def choose(after: Any, otherwise: Any) -> Any:
        return jax.tree.map(partial(jnp.where, accepted), after, otherwise)

    growth = jnp.where(stable > MARGIN * dt, GROW, 1.0)
    return Progress(
        t=before.t + choose(dt, jnp.zeros_like(dt)),
        dt=dt * choose(growth, jnp.full_like(dt, SHRINK)),
        state=choose(new.state, before.state),
        points=choose(new.points, before.points),
        repeating=~accepted,
        finished=accepted & last,
        steps=before.steps + accepted.astype(before.steps.dtype),
        repeats=before.repeats + (~accepted).astype(before.repeats.dtype),
        work=new.work,
    )


@partial(jax.jit, static_argnames="integrator")
def advance(
    hydro: Hydrodynamics,
    progress: Progress,
    integrator: Integrator,
    t_final: jax.Array,
    until_step: jax.Array,
    until_t: jax.Array,
    attempts: jax.Array,
) -> Progress:
    """Makes some attempts, fewer if dt vanishes or the run gets to ``t_final`` or one of ``until``.

    Only ``t_final`` cuts a step; the step that passes ``until_t`` is made in full.
    """

    def going(carry: tuple[jax.Array, Progress]) -> jax.Array:
        made, now = carry
        alive = now.dt > jnp.finfo(now.dt.dtype).eps
        wanted = (now.steps < until_step) & (now.t < until_t) & ~now.finished
        return (made < attempts) & wanted & alive

    def body(carry: tuple[jax.Array, Progress]) -> tuple[jax.Array, Progress]:
        made, now = carry
        return made + 1, attempt(hydro, integrator, t_final, now)

    return lax.while_loop(going, body, (jnp.zeros_like(attempts), progress))[1]


@jax.jit
def observe(hydro: Hydrodynamics, state: State) -> tuple[jax.Array, ...]:
    """Internal and kinetic energy, and the Euclidean norms of the coefficients of x, v, e."""
    norms = (jnp.sqrt(jnp.sum(field * field)) for field in state)
    return (*energies(hydro, state), *norms)


class Observation(NamedTuple):
    """What the progress bar and the summary show, as Python numbers."""

    step: int
    repeats: int
    t: float
    dt: float
    internal_energy: float
    kinetic_energy: float
    x_norm: float
    v_norm: float
    e_norm: float

    @property
    def energy(self) -> float:
        return self.internal_energy + self.kinetic_energy


@dataclass(frozen=True)
class Stop:
    """Something to do on the way: at every so many steps, or whenever so much time has passed."""

    action: Callable[[], None]
    every_steps: int | None = None
    every_time: float | None = None

    def next(self, step: int, t: float) -> tuple[float, float]:
        """The first step and the first time after the present ones to stop at."""
        step_due = t_due = math.inf
        if self.every_steps is not None:
            step_due = (step // self.every_steps + 1) * self.every_steps
        if self.every_time is not None:
            t_due = (math.floor(t / self.every_time) + 1) * self.every_time
        return step_due, t_due


class Simulation:
    """Sets a configuration up and runs it.  Needs float64 (``jax_enable_x64``).

    ``wall_s`` is the time of the loop, ``compile_s`` that of the set-up and of the compilations.
    """

    def __init__(self, configuration: Configuration) -> None:
        if jnp.zeros(()).dtype != np.float64:
            raise RuntimeError("the hydrodynamics needs float64: set jax_enable_x64")
        began = time.perf_counter()
        c = self.configuration = configuration.resolved()
        assert c.mesh is not None and c.refine is not None and c.t_final is not None
        self.problem = find_problem(c.problem)
        self.integrator = find_integrator(c.integrator)
        self.mesh: BoxMesh = coarse_mesh(c.mesh).refined(c.refine)
        self.t_final: float = c.t_final
        controls = Controls(
            jnp.asarray(c.cfl, jnp.float64),
            jnp.asarray(c.cg_tol, jnp.float64),
            jnp.asarray(c.cg_max_iter, jnp.int64),
        )
        self.hydro, initial = discretise(
            self.problem, self.mesh, c.order, c.e0, controls, c.assembly == "full"
        )
        self.initial_positions = initial.x
        self.progress = begin(self.hydro, initial)
        self.start = self.observation()
        self.wall_s = 0.0
        self.compile_s = time.perf_counter() - began
        if self.t_final == 0:
            self.progress = self.progress._replace(finished=jnp.ones((), bool))

    @property
    def element(self) -> ReferenceElement:
        return self.hydro.element

    @property
    def dofs_h1(self) -> int:
        return self.mesh.dim * self.hydro.numbering.node_count

    @property
    def dofs_l2(self) -> int:
        return int(self.progress.state.e.size)

    def observation(self) -> Observation:
        p = self.progress
        values = jax.device_get((p.steps, p.repeats, p.t, p.dt, observe(self.hydro, p.state)))
        steps, repeats, t, dt, observed = values
        return Observation(int(steps), int(repeats), float(t), float(dt), *map(float, observed))

    def compile(self) -> None:
        """Compiles the time loop without making a step, so that ``wall_s`` is run time only."""
        began = time.perf_counter()
        jax.block_until_ready(self._advance(0, math.inf, math.inf))
        self.compile_s += time.perf_counter() - began

    def _advance(self, attempts: int, until_step: float, until_t: float) -> Progress:
        limit = self.configuration.max_steps
        until_step = min(until_step, np.iinfo(np.int64).max if limit is None else limit)
        return advance(
            self.hydro,
            self.progress,
            self.integrator,
            jnp.asarray(self.t_final, jnp.float64),
            jnp.asarray(until_step, jnp.int64),
            jnp.asarray(until_t, jnp.float64),
            jnp.asarray(attempts, jnp.int64),
        )

    @property
    def done(self) -> bool:
        p = jax.device_get((self.progress.finished, self.progress.steps))
        limit = self.configuration.max_steps
        return bool(p[0]) or (limit is not None and int(p[1]) >= limit)

    def run(
        self,
        report: Callable[[Observation], None] | None = None,
        attempts_between_reports: int | None = None,
        stops: Sequence[Stop] = (),
    ) -> Observation:
        """Runs to the end and returns the last observation; ``report`` sees those on the way.

        Without a number of attempts between them, the reports come twice per second.
        ``wall_s`` is the time of the loop, without compilation, reports and stops.
        """
        self.compile()
        attempts = attempts_between_reports or 1
        now = self.observation()
        due = [stop.next(now.step, now.t) for stop in stops]
        while not self.done:
            began = time.perf_counter()
            until_step = min((step for step, _ in due), default=math.inf)
            until_t = min((t for _, t in due), default=math.inf)
            self.progress = jax.block_until_ready(self._advance(attempts, until_step, until_t))
            seconds = time.perf_counter() - began
            self.wall_s += seconds
            made = now.step + now.repeats
            now = self.observation()
            made = now.step + now.repeats - made
            if not (self.done or now.dt > np.finfo(np.float64).eps):
                raise FloatingPointError(f"dt vanished at step {now.step}, t = {now.t:g}")
            if report is not None:
                report(now)
            for i, stop in enumerate(stops):
                if now.step >= due[i][0] or now.t >= due[i][1]:
                    stop.action()
                    due[i] = stop.next(now.step, now.t)
            if attempts_between_reports is None:
                attempts = max(1, int(SECONDS_PER_CHUNK * made / max(seconds, 1e-9)))
        return now

    def energy_change(self) -> float:
        return abs(self.observation().energy - self.start.energy)
