"""Both right-hand sides from one kernel, against one kernel each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fem_demo.hydrodynamics import both_rhs, energy_rhs, momentum_rhs
from fem_demo.simulation import Configuration, Simulation


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration("sod", dim=1, order=3, refine=3),
        Configuration("taylor-green", order=2, refine=2),  # with a heat source
        Configuration("rayleigh-taylor", order=4, refine=0),  # with gravity
        Configuration("sedov", dim=3, order=3, refine=1),
    ],
    ids=lambda c: c.problem,
)
def test_both_right_hand_sides_are_those_of_the_separate_kernels(
    configuration: Configuration,
) -> None:
    simulation = Simulation(configuration)
    hydro, points = simulation.hydro, simulation.progress.points
    rng = np.random.default_rng(0)
    stress = jnp.asarray(rng.standard_normal(points.stress.shape))
    velocity = jnp.asarray(rng.standard_normal(simulation.progress.state.v.shape))
    points = points._replace(stress=stress)
    momentum, energy = jax.jit(both_rhs)(hydro, points, velocity)
    assert (points.heat is not None) == (configuration.problem == "taylor-green")
    for both, alone in (
        (momentum, momentum_rhs(hydro, points)),
        (energy, energy_rhs(hydro, points, velocity)),
    ):
        scale = float(jnp.abs(alone).max())
        np.testing.assert_allclose(both, alone, rtol=1e-13, atol=1e-14 * scale)
