"""The tables, and the order at which each of them converges on the equations of the demo."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fem_demo.hydrodynamics import State, point_data
from fem_demo.integrators import INTEGRATORS, Integrator, Work, step
from fem_demo.simulation import Configuration, Simulation


@pytest.mark.parametrize("integrator", INTEGRATORS.values(), ids=lambda i: i.name)
def test_tableaus_are_consistent(integrator: Integrator) -> None:
    """The weights of the result sum to one, and each stage uses only rates that exist by then."""
    assert sum(integrator.tableau[-1]) == pytest.approx(1, abs=1e-13)
    for i, row in enumerate(integrator.tableau):
        assert len(row) == i + 1


@pytest.mark.parametrize("integrator", INTEGRATORS.values(), ids=lambda i: i.name)
def test_quadrature_conditions(integrator: Integrator) -> None:
    """sum_i b_i c_i^(n-1) = 1/n up to the order: polynomials in time are integrated exactly."""
    *rows, weights = integrator.tableau
    times = np.array([0.0, *(sum(row) for row in rows)])
    for n in range(1, integrator.order + 1):
        moment = np.dot(weights, times ** (n - 1))
        assert moment == pytest.approx(1 / n, abs=1e-10)  # coefficients go up to 200


DURATION = 0.2
STEPS = {"euler": 16, "rk2": 8, "rk3": 8, "rk4": 8, "rk6": 4, "rk2avg": 8}
Run = Callable[[str, int], np.ndarray]


@pytest.fixture(scope="module")
def run() -> Run:
    """The final state of a smooth flow in so many equal steps, as one vector."""
    with jax.enable_x64(True):
        vortex = Simulation(
            Configuration("taylor-green", refine=0, cg_tol=1e-16, cg_max_iter=60, assembly="full")
        )

    @partial(jax.jit, static_argnames="name")
    def final(name: str, steps: jax.Array) -> State:
        def body(_: jax.Array, state: State) -> State:
            points = point_data(vortex.hydro, state)
            dt = DURATION / steps
            return step(vortex.hydro, INTEGRATORS[name], state, points, dt, Work.none()).state

        return lax.fori_loop(0, steps.astype(int), body, vortex.progress.state)

    def vector(name: str, steps: int) -> np.ndarray:
        state = final(name, jnp.asarray(float(steps)))
        return np.concatenate([np.asarray(field).ravel() for field in state])

    return vector


@pytest.mark.parametrize("name", INTEGRATORS)
def test_order_of_convergence(name: str, run: Run) -> None:
    """Twice as many steps divide the error by 2^order."""
    order, steps = INTEGRATORS[name].order, STEPS[name]
    exact = run("rk6", 64)
    coarse, fine = (np.abs(run(name, n) - exact).max() for n in (steps, 2 * steps))
    assert order - 0.2 < np.log2(coarse / fine) < order + 1
