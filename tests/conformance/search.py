"""Looks for compositions that are wrong."""

import os
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace

import jax

from tests.conformance.comparison import failure, shrunk
from tests.conformance.composition import drawn


def configure() -> None:
    jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64") != "0")
    if jax.default_backend() == "gpu":  # where plain JAX would round products to TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    warnings.simplefilter("ignore")


def checked(seeds: Sequence[int], until: float, run: str) -> tuple[int, list[str]]:
    """How many of the seeds were tried, in order, and the reports of those that are wrong."""
    configure()
    reports: list[str] = []
    for done, seed in enumerate(seeds):
        if time.time() > until:
            return done, reports
        try:
            composition = replace(drawn(seed), run=run)
            found = failure(composition)
            if found is not None:
                small, why = shrunk(composition, found)
                reports.append(f"---- seed {seed}: {why}\n{small}\n")
        except Exception:
            reports.append(
                f"---- seed {seed}: the suite failed\n{traceback.format_exc()[-1500:]}\n"
            )
    jax.clear_caches()
    return len(seeds), reports
