"""Which order of a sum factorisation suits the memory of a GPU."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.faces.explain import applications
from jaxmagma.lowering.cuda.plans.locality import in_pieces, planned
from jaxmagma.plans import factoring
from jaxmagma.plans.order import Middle
from jaxmagma.programs.program import ElementProgram
from tests.cuda_programs import chain, contraction, gradient, interpolation, mass


ELEMENTS = 7


def program_of(fn: Any, *shapes: tuple[int, ...]) -> ElementProgram:
    jaxpr = jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes))
    ((program, _),) = applications(jaxpr.jaxpr)
    return program


def both(program: ElementProgram) -> tuple[int, int]:
    """Values touched in pieces: slowest axis at both ends, and in the middle."""
    return (
        in_pieces(factoring.planned(program)),
        in_pieces(factoring.planned(program, middle="slowest")),
    )


@pytest.mark.parametrize(("p", "inside"), [(1, True), (2, True), (3, False), (8, False)])
def test_the_larger_part_of_a_mass_matrix_is_touched_in_rows(p: int, inside: bool) -> None:
    """The weights of all points, or the vector that is read and the one that is written."""
    n, q = p + 1, p + 2
    program = mass(p)
    assert both(program) == (q**3, 2 * n**3)
    assert in_pieces(planned(program)) == (2 * n**3 if inside else q**3)
    assert (planned(program) == factoring.planned(program)) == (not inside)


def test_an_interpolation_writes_in_rows() -> None:
    program = interpolation(3)
    n, q = 4, 5
    assert both(program) == (q**3, n**3)
    assert in_pieces(planned(program)) == n**3


@pytest.mark.parametrize("program", [chain(5), gradient(chain(4))], ids=["chain", "gradient"])
def test_of_equals_the_plain_order(program: ElementProgram) -> None:
    plain, turned = both(program)
    assert plain <= turned
    assert planned(program) == factoring.planned(program)


@pytest.mark.parametrize("last", [False, True])
def test_parts_of_an_operand(last: bool) -> None:
    """Six values of a symmetric matrix at each point, side by side or field by field."""
    rng = np.random.default_rng(4)
    b, g = rng.normal(size=(2, 4, 3))

    def gradients(u: Any) -> list[Any]:
        tables = ((g, b, b), (b, g, b), (b, b, g))
        return [jnp.einsum("xa,yb,zc,abc->xyz", *t, u) for t in tables]

    def diffusion(u: Any, d: Any) -> Any:
        x, y, z = gradients(u)
        d = jnp.moveaxis(d, -1, 0) if last else d
        flux = (
            d[0] * x + d[1] * y + d[2] * z,
            d[1] * x + d[3] * y + d[4] * z,
            d[2] * x + d[4] * y + d[5] * z,
        )
        return jax.linear_transpose(gradients, u)(list(flux))[0]

    d = (ELEMENTS, 4, 4, 4, 6) if last else (ELEMENTS, 6, 4, 4, 4)
    program = program_of(jm.fuse(diffusion), (ELEMENTS, 3, 3, 3), d)
    plain, _ = both(program)
    assert plain == 6 * 4**3
    assert in_pieces(planned(program)) <= 2 * 3**3 < plain
    assert planned(program).flops == factoring.planned(program).flops


def test_no_order_takes_more_operations() -> None:
    """Whatever the sizes of the matrices."""
    sizes = dict(zip("xaybzc", (9, 2, 2, 7, 5, 3), strict=True))
    program = contraction("xa,yb,zc,eabc->exyz", sizes)
    plan = planned(program)
    for middle in get_args(Middle):
        assert factoring.planned(program, middle).flops == plan.flops


def test_nothing_without_sweeps() -> None:
    program = program_of(jm.fuse(lambda x, y: jnp.sin(x) * y), (ELEMENTS, 3), (ELEMENTS, 3))
    assert in_pieces(planned(program)) == 0
