"""Partial and full assembly: the same equations, solved in two ways."""

import jax.numpy as jnp
import numpy as np

from fem_demo.hydrodynamics import energy_mass, solve_energy, solve_velocity, velocity_mass
from fem_demo.simulation import Configuration, Observation, Simulation


def _simulation(assembly: str, **settings: object) -> Simulation:
    settings = {"cg_tol": 1e-14, "cg_max_iter": 1000, **settings}
    return Simulation(Configuration("sedov", assembly=assembly, **settings))  # type: ignore[arg-type]


def test_solves_are_inverses_of_the_mass_matrices() -> None:
    for assembly in ("partial", "full"):
        hydro = _simulation(assembly, order=3, refine=1).hydro
        rng = np.random.default_rng(0)
        e = jnp.asarray(rng.random((len(hydro.velocity_mass), *(hydro.element.order,) * hydro.dim)))
        found = solve_energy(hydro, energy_mass(hydro, e))
        np.testing.assert_allclose(found.x, e, rtol=1e-9)
        assert (found.iterations == 1) == (assembly == "full")

        v = hydro.numbering.free * jnp.asarray(rng.random(hydro.numbering.free.shape))
        found = solve_velocity(hydro, velocity_mass(hydro, v))
        np.testing.assert_allclose(found.x, v, atol=1e-10)
        assert found.iterations.shape == (hydro.dim,)


def test_full_assembly_has_one_stopping_test_for_all_components() -> None:
    """A component whose right-hand side is zero takes part in every iteration."""
    for assembly, same in (("partial", False), ("full", True)):
        hydro = _simulation(assembly, refine=1).hydro
        rhs = jnp.stack(
            [jnp.ones(hydro.numbering.node_count), jnp.zeros(hydro.numbering.node_count)]
        )
        x, y = solve_velocity(hydro, rhs).iterations.tolist()
        assert (x == y) == same


def test_both_make_the_same_run_in_three_dimensions() -> None:
    runs: list[Observation] = []
    for assembly in ("partial", "full"):
        runs.append(_simulation(assembly, dim=3, refine=0, t_final=0.6, max_steps=3).run())
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-11)


def test_one_dimension_is_always_fully_assembled() -> None:
    for assembly in ("partial", "full"):
        simulation = Simulation(Configuration("sod", dim=1, assembly=assembly))
        assert simulation.configuration.assembly == "full"
        assert simulation.hydro.energy_inverse is not None
