"""An interrupted run goes on to the same bits, and no wrong file is taken for its state."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from fem_demo.__main__ import main
from fem_demo.checkpoint import load_checkpoint, save_checkpoint
from fem_demo.simulation import Configuration, Progress, Simulation


WHOLE = Configuration("sedov", refine=1, t_final=0.1)
OPTIONS = ["sedov", "--refine", "1", "--t-final", "0.1", "--no-plot"]


def _assert_same_bits(a: Progress, b: Progress) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    "configuration",
    [
        WHOLE,
        Configuration("taylor-green", refine=1, t_final=0.3, integrator="rk2avg", assembly="full"),
    ],
    ids=lambda c: c.problem,
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    configuration: Configuration, tmp_path: Path
) -> None:
    whole = Simulation(configuration)
    expected = whole.run()
    file = tmp_path / "state.npz"
    first = Simulation(replace(configuration, max_steps=expected.step // 2))
    first.run()
    save_checkpoint(first, file)
    second = Simulation(configuration)
    load_checkpoint(second, file)
    _assert_same_bits(first.progress, second.progress)
    assert second.observation().step == expected.step // 2
    assert second.run() == expected
    _assert_same_bits(whole.progress, second.progress)
    assert second.energy_change() == whole.energy_change()


def test_the_command_line_writes_and_reads_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "new" / "a.npz", tmp_path / "b.npz"
    assert (
        main([*OPTIONS, "--max-steps", "9", "--checkpoint", str(a), "--checkpoint-every", "4"]) == 0
    )
    assert list(a.parent.iterdir()) == [a]  # nothing temporary stays
    assert main([*OPTIONS, "--restart", str(a), "--checkpoint", str(b)]) == 0
    assert f"checkpoint: {b}" in capsys.readouterr().out
    whole, resumed = Simulation(WHOLE), Simulation(WHOLE)
    whole.run()
    load_checkpoint(resumed, b)
    _assert_same_bits(whole.progress, resumed.progress)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.npz"
    simulation = Simulation(WHOLE)
    save_checkpoint(simulation, file)
    before = file.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(simulation, file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("checkpoint") / "state.npz"
    with jax.enable_x64(True):
        save_checkpoint(Simulation(WHOLE), file)
    return file.read_bytes()


def _refusal(options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(options)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "array", "archive"])
def test_damaged_and_foreign_files_are_refused(
    damage: str, checkpoint: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state.npz"
    if damage == "array":
        with file.open("wb") as f:
            np.save(f, np.arange(3))
    elif damage == "archive":
        np.savez(file, x=np.arange(3))
    else:
        middle = len(checkpoint) // 2
        flipped = bytes([checkpoint[middle] ^ 1])
        contents = {
            "truncated": checkpoint[:middle],
            "flipped": checkpoint[:middle] + flipped + checkpoint[middle + 1 :],
            "empty": b"",
            "text": b"not a checkpoint at all\n",
        }
        file.write_bytes(contents[damage])
    assert f"{file} is not a checkpoint" in _refusal([*OPTIONS, "--restart", str(file)], capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--order", "3"], "order is 2, not 3"),
        (["--t-final", "0.2"], "t-final is 0.1, not 0.2"),
        (["--integrator", "rk6"], "integrator is rk4, not rk6"),
        (["--cg-tol", "1e-9"], "cg-tol is 1e-08, not 1e-09"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    change: list[str],
    message: str,
    checkpoint: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "state.npz"
    file.write_bytes(checkpoint)
    assert message in _refusal([*OPTIONS, *change, "--restart", str(file)], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restart", "{directory}/none.npz"], "cannot read checkpoint"),
        (["--restart", "{directory}"], "cannot read checkpoint"),
        (["--checkpoint", "{directory}"], "it is a directory"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint FILE"),
        (["--checkpoint", "{directory}/a", "--checkpoint-every", "0"], "must be at least 1, got 0"),
    ],
)
def test_bad_options(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [o.format(directory=tmp_path) for o in options]
    assert message in _refusal([*OPTIONS, *options], capsys)
