"""The error norms against integrals that are known, on meshes at rest and moved."""

import jax.numpy as jnp
import numpy as np
import pytest

from fem_demo.errors import velocity_errors
from fem_demo.simulation import Configuration, Simulation


def _at_rest_on_a_moved_mesh(configuration: Configuration) -> Simulation:
    """The fluid stands still, so the error is the vortex itself; the walls stay where they are."""
    simulation = Simulation(configuration)
    p = simulation.progress
    waves = jnp.sin(jnp.pi * p.state.x)  # zero on the walls
    moved = p.state.x + 0.05 * waves * waves[::-1]
    state = p.state._replace(x=moved, v=jnp.zeros_like(p.state.v))
    simulation.progress = p._replace(state=state)
    return simulation


def test_norms_of_a_known_field_on_a_moved_mesh() -> None:
    """|v0|^2 of the Taylor-Green vortex integrates to 1/2 over the square; its maximum is 1."""
    errors = velocity_errors(_at_rest_on_a_moved_mesh(Configuration("taylor-green", order=4)))
    line = (np.arange(2000) + 0.5) / 2000
    x, y = np.pi * line[:, None], np.pi * line
    speed = np.hypot(np.sin(x) * np.cos(y), np.cos(x) * np.sin(y))
    assert errors.l_2 == pytest.approx(0.5**0.5, rel=1e-9)
    assert errors.l_1 == pytest.approx(speed.mean(), rel=1e-5)  # |v0| has kinks where it is zero
    assert errors.l_inf == pytest.approx(1, rel=1e-2)  # the points are inside of elements
    assert errors.l_inf <= 1


def test_norms_in_three_dimensions() -> None:
    """The third component is zero, the other two fall off as a cosine: 1/2 of 1/2."""
    errors = velocity_errors(
        _at_rest_on_a_moved_mesh(Configuration("taylor-green", dim=3, order=3))
    )
    assert errors.l_2 == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_interpolation_errors_fall_with_the_order(order: int) -> None:
    coarse, fine = (
        np.array(
            velocity_errors(Simulation(Configuration("taylor-green", order=order, refine=refine)))
        )
        for refine in (2, 3)
    )
    np.testing.assert_allclose(np.log2(coarse / fine), order + 1, atol=0.3)
