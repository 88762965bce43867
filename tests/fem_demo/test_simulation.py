import jax
import numpy as np
import pytest

from fem_demo.errors import velocity_errors
from fem_demo.simulation import Configuration, Simulation, Stop


def test_rk2avg_conserves_energy_and_rk4_does_not() -> None:
    settings = {"refine": 2, "t_final": 0.05, "cg_tol": 1e-15, "cg_max_iter": 1000}
    changes = {}
    for name in ("rk4", "rk2avg"):
        simulation = Simulation(Configuration("sedov", integrator=name, **settings))  # type: ignore[arg-type]
        o = simulation.run()
        assert o.kinetic_energy > 0.01
        changes[name] = simulation.energy_change() / simulation.start.energy
    assert changes["rk2avg"] < 1e-13
    assert changes["rk4"] > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("assembly", ["partial", "full"])
def test_rk2avg_conserves_energy_to_twelve_digits_over_a_whole_run(assembly: str) -> None:
    configuration = Configuration(
        "sedov", refine=2, integrator="rk2avg", assembly=assembly, cg_tol=1e-14, cg_max_iter=1000
    )
    simulation = Simulation(configuration)
    o = simulation.run()
    assert o.t == 0.8
    assert o.kinetic_energy > 0.04
    assert simulation.energy_change() < 1e-12 * simulation.start.energy


def test_mass_and_momentum_balance_at_order_three() -> None:
    """The mass that the points carry fills the box; symmetric gas stays symmetric."""
    simulation = Simulation(Configuration("sedov", order=3, refine=1, t_final=0.1))
    simulation.run()
    mass = np.asarray(simulation.hydro.material.mass)
    assert mass.sum() == pytest.approx(1, rel=1e-14)
    # The blast is symmetric about the diagonal: u(x, y) = v(y, x).
    n = simulation.mesh.cells[0] * 3 + 1
    u, v = np.asarray(simulation.progress.state.v).reshape(2, n, n)
    np.testing.assert_allclose(u, v.T, atol=1e-6 * np.abs(u).max())


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_orders_converge_on_the_steady_vortex(order: int) -> None:
    """The Taylor-Green velocity is steady: its error on the moved mesh falls with the order."""
    simulation = Simulation(Configuration("taylor-green", order=order, refine=2, t_final=0.1))
    simulation.run()
    errors = velocity_errors(simulation)
    assert errors.l_inf < {1: 1e-1, 2: 5e-3, 3: 5e-4, 4: 1e-4}[order]
    assert errors.l_1 < errors.l_2 < errors.l_inf  # the square has the area 1


def test_a_run_in_pieces_is_the_same_run() -> None:
    whole = Simulation(Configuration("sedov", refine=1, t_final=0.1))
    pieces = Simulation(Configuration("sedov", refine=1, t_final=0.1))
    reports: list[int] = []
    a = whole.run()
    b = pieces.run(lambda now: reports.append(now.step), attempts_between_reports=1)
    assert a == b
    assert len(reports) == b.step + b.repeats


def test_stops_change_nothing_and_come_when_they_are_due() -> None:
    whole = Simulation(Configuration("sedov", refine=1, t_final=0.1)).run()
    simulation = Simulation(Configuration("sedov", refine=1, t_final=0.1))
    steps: list[int] = []
    times: list[float] = []
    stops = [
        Stop(lambda: steps.append(simulation.observation().step), every_steps=7),
        Stop(lambda: times.append(simulation.observation().t), every_time=0.02),
    ]
    assert simulation.run(stops=stops) == whole
    assert steps == list(range(7, whole.step + 1, 7))
    assert [int(t / 0.02 + 1e-9) for t in times] == [1, 2, 3, 4, 5]


def test_t_final_zero_makes_no_step() -> None:
    o = Simulation(Configuration("sedov", refine=1, t_final=0.0)).run()
    assert (o.step, o.t) == (0, 0.0)


def test_an_impossible_run_ends_with_an_error() -> None:
    """One CG iteration is not enough: the mesh tangles and dt shrinks to nothing."""
    simulation = Simulation(Configuration("sedov", refine=2, cfl=1e6, t_final=10.0))
    with pytest.raises(FloatingPointError, match="dt vanished"):
        simulation.run()


def test_float64_is_required() -> None:
    with jax.enable_x64(False), pytest.raises(RuntimeError, match="jax_enable_x64"):
        Simulation(Configuration())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"problem": "kelvin"}, "unknown problem 'kelvin'"),
        ({"mesh": "torus"}, "unknown mesh 'torus'"),
        ({"integrator": "rk5"}, "unknown integrator 'rk5'"),
        ({"assembly": "none"}, "unknown assembly 'none'; there are partial and full"),
        ({"t_final": -1.0}, "t-final must not be negative"),
        ({"t_final": float("nan")}, "t-final must not be negative"),
        ({"order": 0}, "order must be at least 1"),
        ({"order": 40}, "order must be at most"),
        ({"refine": -1}, "refine must not be negative"),
        ({"cfl": 0.0}, "cfl must be positive"),
        ({"cg_tol": float("inf")}, "cg-tol must be positive"),
        ({"cg_max_iter": 0}, "cg-max-iter must be at least 1"),
        ({"max_steps": -1}, "max-steps must not be negative"),
        ({"dim": 2, "mesh": "cube01_hex"}, "mesh cube01_hex has dimension 3, not 2"),
        ({"problem": "triple-point", "dim": 1}, "problem triple-point has dimension 2 or 3, not 1"),
        ({"dim": 4}, "not 4"),
    ],
)
def test_bad_configurations(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration(**settings).resolved()
