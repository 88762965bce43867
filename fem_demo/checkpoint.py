"""Checkpoints: a run that was interrupted goes on as if nothing had happened, to the last bit.

A checkpoint is a NumPy archive (.npz) of everything that the time loop carries, the data at the
quadrature points included (made anew by another compiled program, they might differ in the last
bit), with the configuration that it belongs to.  It is written beside its final place and then
moved there, so that the file is at every instant a whole one, the old or the new.
"""

import json
import os
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile

import jax
import jax.numpy as jnp
import numpy as np

from fem_demo.simulation import Configuration, Progress, Simulation


FORMAT = "fem_demo checkpoint 1"
MAY_CHANGE = ("max_steps",)  # it says where to stop and leaves the steps before as they are


def _named_leaves(progress: Progress) -> dict[str, jax.Array]:
    """``{"state.x": ..., ...}``"""
    leaves = jax.tree_util.tree_leaves_with_path(progress)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def save_checkpoint(simulation: Simulation, path: Path) -> None:
    arrays = {name: np.asarray(leaf) for name, leaf in _named_leaves(simulation.progress).items()}
    arrays["wall_s"] = np.asarray(simulation.wall_s)
    arrays["format"] = np.asarray(FORMAT)
    arrays["configuration"] = np.asarray(json.dumps(asdict(simulation.configuration)))
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError(f"{path} is not a checkpoint")
            return dict(archive)  # reads everything, and checks the checksums
    except OSError as error:
        raise ValueError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a checkpoint, or it is damaged") from error


def _check_configuration(path: Path, saved: str, mine: Configuration) -> None:
    theirs = json.loads(saved)
    for name, value in asdict(mine).items():
        if name not in MAY_CHANGE and theirs.get(name) != value:
            label = name.replace("_", "-")
            raise ValueError(
                f"checkpoint {path} is of another run: {label} is {theirs.get(name)}, not {value}"
            )


def load_checkpoint(simulation: Simulation, path: Path) -> None:
    """Sets a new simulation to where the checkpoint's run stood; ValueError if it does not fit."""
    arrays = _read(path)
    if "format" not in arrays or str(arrays["format"]) != FORMAT:
        raise ValueError(f"{path} is not a checkpoint")
    _check_configuration(path, str(arrays["configuration"]), simulation.configuration)
    leaves = []
    for name, present in _named_leaves(simulation.progress).items():
        saved = arrays.get(name)
        if saved is None or saved.shape != present.shape or saved.dtype != present.dtype:
            raise ValueError(f"checkpoint {path} does not fit: {name} is missing or different")
        leaves.append(jnp.asarray(saved))
    structure = jax.tree.structure(simulation.progress)
    simulation.progress = jax.tree.unflatten(structure, leaves)
    simulation.wall_s = float(arrays["wall_s"])
