"""Numbers that the scheme has to reproduce: short runs, and rows of the verification table."""

import numpy as np
import pytest

from fem_demo.simulation import Configuration, Observation, Simulation
from fem_demo.verify import run_row


SQUARE, CUBE = "square01_quad", "cube01_hex"

# |e| after step 5, and after a late step: coarse mesh, tight solves, t_final = 0.6.
EARLY = {
    ("taylor-green", SQUARE): 6.546538624534384e00,
    ("sedov", SQUARE): 3.508254945225794e00,
    ("sod", SQUARE): 1.020745795651244e01,
    ("triple-point", SQUARE): 8.000000000000000e00,
    ("gresho", SQUARE): 3.446324942352448e01,
    ("riemann-12", SQUARE): 1.030899557252528e01,
    ("riemann-6", SQUARE): 8.039707010835693e00,
    ("rayleigh-taylor", SQUARE): 1.514929259650760e01,
    ("taylor-green", CUBE): 1.198510951452527e03,
    ("sedov", CUBE): 6.695818592962833e00,
    ("sod", CUBE): 2.041491591302486e01,
    ("triple-point", CUBE): 1.600000000000000e01,
    ("gresho", CUBE): 6.892649884704898e01,
    ("riemann-12", CUBE): 2.061984481890964e01,
    ("riemann-6", CUBE): 1.607988713996459e01,
    ("rayleigh-taylor", CUBE): 3.029858112572883e01,
}
LATE = {
    ("taylor-green", SQUARE): (27, 7.588576357792927e00),
    ("sedov", SQUARE): (15, 2.756444596823211e00),
    ("sod", SQUARE): (59, 1.721590205901898e01),
    ("triple-point", SQUARE): (16, 8.000000000000000e00),
    ("gresho", SQUARE): (18, 3.446844033767240e01),
    ("riemann-12", SQUARE): (36, 1.057362418574309e01),
    ("riemann-6", SQUARE): (36, 8.316970976817373e00),
    ("rayleigh-taylor", SQUARE): (25, 1.514931278155159e01),
    ("taylor-green", CUBE): (188, 1.199384410059154e03),
    ("sedov", CUBE): (20, 4.267902387082487e00),
    ("sod", CUBE): (59, 3.443180411803796e01),
    ("triple-point", CUBE): (16, 1.600000000000000e01),
    ("gresho", CUBE): (18, 6.893688067534482e01),
    ("riemann-12", CUBE): (36, 2.114519664792607e01),
    ("riemann-6", CUBE): (36, 1.662736010353023e01),
    ("rayleigh-taylor", CUBE): (24, 3.029858832743707e01),
}


def _tight(problem: str, **settings: object) -> Configuration:
    return Configuration(problem, cg_tol=1e-14, cg_max_iter=1000, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("problem", "mesh"), EARLY)
def test_short_runs(problem: str, mesh: str) -> None:
    late, e_norm = LATE[problem, mesh]
    simulation = Simulation(_tight(problem, mesh=mesh, refine=0, t_final=0.6, max_steps=late))
    norms = {}

    def note(now: Observation) -> None:
        norms[now.step] = now.e_norm

    simulation.run(note, attempts_between_reports=1)
    np.testing.assert_allclose(norms[5], EARLY[problem, mesh], rtol=1e-12)
    np.testing.assert_allclose(norms[late], e_norm, rtol=1e-12)


# step 5 of the traces: t, dt, |e|, internal energy, kinetic energy, |x|, |v|, repeats.
TRACES = [
    (
        _tight("taylor-green", max_steps=5),
        0.041947255486944376, 0.0083894510973888756, 49.514949491884153, 1.4999999098746981,
        0.24999854423377227, 27.154646420225124, 23.320690593740959, 1,
    ),
    (
        _tight("taylor-green", dim=3, max_steps=5),
        0.020544427811109836, 0.0041088855622219674, 3389.874617476225, 149.81252026374386,
        0.12469024209169906, 27.831167513381597, 14.184259788468177, 1,
    ),
    (
        _tight("sedov", max_steps=5),
        0.003166205049727143, 0.00063573408478773347, 224.51995484396932, 0.23857260504841676,
        0.011430929419685159, 27.154135131330698, 6.039746602298262, 0,
    ),
    (
        _tight("sedov", dim=3, e0=2.0, max_steps=5),
        0.003282199264321323, 0.00065902426173380902, 857.02199098649419, 0.23856846490054323,
        0.011436682309291893, 71.179782904526235, 15.331821103396271, 0,
    ),
    (
        _tight("triple-point", max_steps=5),
        0.04756455719340677, 0.0085539247223986037, 47.76485217925643, 10.028432882074087,
        0.021648549459674146, 166.87650403105255, 2.7335613590738972, 6,
    ),
    (
        _tight("triple-point", dim=3, max_steps=5),
        0.089575496590705767, 0.018273401304503976, 47.936188645650297, 30.057044184660516,
        0.09311974565198286, 171.42602207678081, 3.6590243638205275, 4,
    ),
    (
        _tight("gresho", order=3, integrator="rk2avg", max_steps=5, t_final=0.62831853),
        0.014272691143456237, 0.0028545382286912476,
        409.80590637778647, 8.5332200311607487, 0.083802846732615552, 20.423332198684431,
        19.665580779239423, 1,
    ),
    (
        _tight("rayleigh-taylor", order=4, refine=1, max_steps=5),
        0.017286423673536555, 0.0034572847347073108, 118.39765168295058, 8.6250011967310005,
        3.6303251869884352e-05, 11.500193323590127, 0.12353309042034546, 1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("trace", TRACES, ids=lambda t: f"{t[0].problem}-{t[0].dim or 2}")
def test_first_five_steps(trace: tuple) -> None:
    configuration, *expected = trace
    o = Simulation(configuration).run()
    result = [
        o.t, o.dt, o.e_norm, o.internal_energy, o.kinetic_energy, o.x_norm, o.v_norm, o.repeats,
    ]  # fmt: skip
    assert o.step == 5
    np.testing.assert_allclose(result, expected, rtol=1e-12)


# Both tolerances, one to three dimensions, and orders two and four.
ROWS = [(1, False), (3, True), (5, False), (13, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "tight"), ROWS)
def test_verification_rows(row: int, tight: bool) -> None:
    outcome = run_row(row, tight)
    assert outcome.passed, outcome.line()


@pytest.mark.parametrize("problem", ["sedov", "rayleigh-taylor"])
def test_short_runs_with_full_assembly(problem: str) -> None:
    """The published numbers are those of both assemblies."""
    configuration = _tight(
        problem, mesh=SQUARE, refine=0, t_final=0.6, max_steps=5, assembly="full"
    )
    o = Simulation(configuration).run()
    np.testing.assert_allclose(o.e_norm, EARLY[problem, SQUARE], rtol=1e-12)
