"""What fits on a chip is seen without a plan, and no plan says otherwise."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmagma.plans.capacity import LARGEST_TILES, surely_fits, too_large
from jaxmagma.plans.plan import one_by_one, plan
from jaxmagma.programs.builder import Builder
from jaxmagma.programs.program import ElementProgram, Input, Output


def program(terms: list[str], output: str, sizes: dict[str, int]) -> ElementProgram:
    """One contraction of one element."""
    builder = Builder(0)
    tiles = [tuple(sizes[x] for x in labels) for labels in terms]
    values = [builder.input(Input((), tile, np.dtype(np.float64))) for tile in tiles]
    computed = [builder.map("sin", x) for x in values]
    result = builder.contract(list(zip(computed, terms, strict=True)), output, sizes)
    return builder.build([Output(result, ())]).program


@st.composite
def contractions(draw: Any) -> ElementProgram:
    sizes = {x: draw(st.integers(1, 40)) for x in "abcde"}
    labels = st.text("abcde", min_size=1, max_size=3)
    terms = draw(st.lists(labels, min_size=1, max_size=4))
    output = draw(st.lists(st.sampled_from("abcde"), max_size=3, unique=True))
    return program(terms, "".join(output), sizes)


@given(contractions())
@settings(max_examples=200)
def test_no_plan_of_what_surely_fits_is_too_large(found: ElementProgram) -> None:
    if surely_fits(found):
        assert too_large(one_by_one(found)) is None
        assert too_large(plan(found)) is None


@pytest.mark.parametrize(("size", "fits"), [(104, True), (105, False)])
def test_two_matrices_and_their_product(size: int, fits: bool) -> None:
    found = program(["ij", "jk"], "ik", dict.fromkeys("ijk", size))
    assert surely_fits(found) == fits == (3 * size**2 <= LARGEST_TILES)
    assert (too_large(plan(found)) is None) == fits


def test_what_some_order_makes_too_large_is_left_to_the_plan() -> None:
    found = program(["xa", "yb", "zc", "abc"], "xyz", dict.fromkeys("abcxyz", 8))
    assert not surely_fits(found)
    assert too_large(plan(found)) is None
