"""Products of all components of a field as one product of the field."""

import numpy as np
import pytest

from jaxmagma.lowering.cuda import planned
from jaxmagma.lowering.cuda.plans.folding import constants_folded, evaluate
from jaxmagma.lowering.cuda.plans.vectors import with_vectors
from jaxmagma.plans.plan import Plan, Product
from jaxmagma.programs.normal import normal_form
from tests import cuda_fused


def run(plan: Plan, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """The results of a plan for one element, step by step."""
    given = iter(arguments)
    tiles = [next(given) if x.constant is None else x.constant.array for x in plan.program.inputs]
    for step in plan.steps:
        tiles.append(evaluate(step, [tiles[x] for x in step.operands]))
    return [tiles[x] for x in plan.results]


def products(plan: Plan) -> int:
    return sum(isinstance(x, Product) for x in plan.steps)


@pytest.mark.parametrize("last", [True, False], ids=["components last", "components first"])
def test_fields_of_vectors(last: bool) -> None:
    """Wherever components are in memory: eight products rather than three times as many."""
    program, _ = normal_form(cuda_fused.stretches(2, components_last=last))
    apart = constants_folded(planned(program))
    joined = with_vectors(apart)
    assert products(apart) == 3 * products(joined) == 24
    assert joined.flops == apart.flops
    (x,) = [x for x in apart.program.inputs if x.constant is None]
    u = np.random.default_rng(5).uniform(-1, 1, x.tile)
    for one, other in zip(run(apart, [u]), run(joined, [u]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
