"""The demo computes in float64; its own entry functions turn it on, library calls need it on.

Unlike in other tests, its programs run for longer than they are compiled.
"""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def float64(optimised: None) -> Iterator[None]:
    with jax.enable_x64(True):
        yield
