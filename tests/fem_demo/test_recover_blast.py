"""The derivative of a whole run, and what it finds."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fem_demo.integrators import Integrator
from fem_demo.recover_blast import (
    Blast,
    descend,
    final_density,
    main,
    make_blast,
    misfit_and_slope,
    recover,
)
from fem_demo.simulation import Configuration


Case = tuple[Blast, Integrator, jax.Array]


@pytest.fixture(scope="module")
def case() -> Case:
    """A tiny blast, a guess of 1.5, and the density of the energy 1."""
    with jax.enable_x64(True):
        configuration = Configuration(
            "sedov", refine=0, t_final=0.2, integrator="rk2avg", cg_tol=1e-14, cg_max_iter=1000,
        )  # fmt: skip
        blast, integrator = make_blast(configuration, 1.5)
        observe = jax.jit(final_density, static_argnames="integrator")
        return blast, integrator, observe(blast, integrator, jnp.asarray(1.0))


def test_the_gradient_matches_finite_differences(case: Case) -> None:
    blast, integrator, observed = case
    at, h = np.log(1.3), 1e-4

    def value_and_slope(log_e0: float) -> tuple[float, float]:
        value, slope = misfit_and_slope(jnp.asarray(log_e0), blast, integrator, observed)
        return float(value), float(slope)

    def value(log_e0: float) -> float:
        return value_and_slope(log_e0)[0]

    near, far = ((value(at + n * h) - value(at - n * h)) / (2 * n * h) for n in (1, 2))
    difference = (4 * near - far) / 3  # of fourth order
    assert value_and_slope(at)[1] == pytest.approx(difference, rel=1e-6)


def test_the_energy_is_recovered(case: Case) -> None:
    iterates = list(recover(*case, guess=1.5))
    assert iterates[-1].e0 == pytest.approx(1, rel=1e-6)
    misfits = [i.misfit for i in iterates]
    assert misfits == sorted(misfits, reverse=True)


def test_descent_halves_steps_that_are_too_long() -> None:
    """On a narrow valley, from far away, with a first step across it."""

    def valley(x: float) -> tuple[float, float]:
        return float(np.log1p(100 * x * x)), float(200 * x / (1 + 100 * x * x))

    *_, last = descend(valley, start=0.3, iterations=40, tolerance=1e-12, first_step=5.0)
    assert abs(last.log_e0) < 1e-9


def test_the_command_draws_the_convergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--refine", "0", "--t-final", "0.05", "--iterations", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "relative error of E0" in capsys.readouterr().out
    assert (tmp_path / "recover_blast.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--guess", "-1"], "e0 must be positive, got -1.0"),
        (["--truth", "0"], "e0 must be positive, got 0.0"),
        (["--integrator", "rk5"], "unknown integrator 'rk5'"),
        (["--iterations", "many"], "invalid int value"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
