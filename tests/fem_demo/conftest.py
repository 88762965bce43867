"""The demo computes in float64; its own entry functions turn it on, library calls need it on."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def optimised() -> Iterator[None]:
    """Unlike in other tests, programs run for longer than they are compiled."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
