"""What the passes of a block of threads make of a plan: values that nobody changes."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.lowering.cuda import planned
from jaxmagma.lowering.cuda.architectures import limits_of
from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.layout.banks import Access, Strides, pieces
from jaxmagma.lowering.cuda.layout.spreads import ACROSS
from jaxmagma.lowering.cuda.model import choose
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.lowering.cuda.schedule.sweeps import Gemm, grouped
from jaxmagma.programs.program import ElementProgram
from tests import cuda_fused
from tests.cuda_programs import gradient, mass
from tests.jaxprs import programs


def block_of(program: ElementProgram, parameters: Parameters) -> Block:
    block = choose(planned(program), parameters, limits_of("sm_90"))
    assert isinstance(block, Block)
    return block


def test_a_schedule_is_readable() -> None:
    block = block_of(mass(3), Parameters())
    assert repr(block.schedule).splitlines() == [
        "threads on a < 4, b < 4: %3[*ab] = m0 %2[*ab]",
        "threads on a < 5, b < 4: %4[ab*] = m0 %3[ab*]",
        "threads on a < 5, b < 5: %5[a*b] = m0 %4[a*b]; %6[a*b] = mul %1[a*b] %5[a*b]; "
        "%7[a*b] = m0 %6[a*b]",
        "threads on a < 5, b < 4: %8[ab*] = m0 %7[ab*]",
        "threads on a < 4, b < 4: %9[*ab] = m0 %8[*ab]",
    ]
    assert repr(block).endswith(block.describe())


@pytest.mark.parametrize("parameters", [Parameters(), Parameters(owner="quads", ahead=True)])
@pytest.mark.parametrize(
    "program", [mass(4), gradient(mass(4, constant=False)), cuda_fused.diffusion(8)]
)
def test_passes_make_frozen_values(program: ElementProgram, parameters: Parameters) -> None:
    block = block_of(program, parameters)
    made = [block, *(getattr(block, x.name) for x in fields(block)), block.ends]
    made += block.schedule.stages
    for value in made:
        for field in fields(value) if is_dataclass(value) else ():
            with pytest.raises(FrozenInstanceError):
                setattr(value, field.name, None)


@pytest.mark.parametrize("parameters", [Parameters(), Parameters(owner="quads")])
def test_tiles_of_one_stage_have_places_of_their_own(parameters: Parameters) -> None:
    """Two tiles may only be at one place if one is made of the other, value by value."""
    block = block_of(cuda_fused.diffusion(5), parameters)
    transfers = block.transfers
    for position in range(len(block.schedule.stages)):
        read = {x for x in transfers.tiles if position in transfers.readers[x]}
        later = {x for x in transfers.tiles if transfers.maker[x] < position} - read
        later = {x for x in later if max(transfers.readers[x]) > position}
        made = {x for x in transfers.tiles if transfers.maker[x] == position}
        for tile in made:
            assert not block.layout.overlap({tile}, (made | later) - {tile})
        for tile in read:
            assert not block.layout.overlap({tile}, (read | later) - {tile})


@pytest.mark.parametrize("p", [1, 2, 3])
def test_values_of_tiles_have_places_of_their_own(p: int) -> None:
    """Of all elements of a group, however these stand: one after the other, or side by side."""
    block = block_of(cuda_fused.stretches(p), Parameters())
    apart = range(block.ownership.elements)
    for tile, placed in block.layout.tiles.items():
        places = np.array(placed.begin)
        strides = (placed.strides.element, *placed.strides.axes)
        shape = block.plan.tiles[tile].shape
        for count, stride in zip((len(apart), *shape), strides, strict=True):
            places = np.add.outer(places, stride * np.arange(count))
        assert len(np.unique(places)) == places.size
        assert placed.begin <= places.min() and places.max() < placed.end


def test_elements_stand_side_by_side_where_that_has_fewer_conflicts() -> None:
    block = block_of(cuda_fused.hyperelastic(2), Parameters())
    assert ACROSS in block.layout.spreads.values()
    # Operands and results are touched in the order in which they are in memory.
    assert {0, len(block.schedule.stages) - 1}.isdisjoint(
        n for n, x in block.layout.spreads.items() if x == ACROSS
    )


def test_rows_of_global_memory_like_threads_of_one_element() -> None:
    """Half a warp reads 128 bytes at once; columns are as many pieces in any order."""
    for stride, side_by_side, across in ((1, 8, 64), (16, 128, 128)):
        strides = Strides((stride,), 16 * stride)
        found = [pieces(Access(((16, 0),), 128, x), strides, 8, 8) for x in (1, ACROSS)]
        assert found == [side_by_side, across]


@pytest.mark.parametrize("components", [2, 3])
def test_products_of_tiles_are_dots_of_one_sweep(components: int) -> None:
    """All blocks of an element's matrix, which leaves shared memory as it is in memory."""
    block = block_of(cuda_fused.matrices(8, 8, components), Parameters())
    (sweep,) = (x for x in block.schedule.sweeps if x.dots)
    assert len(sweep.dots) == components**2
    assert len(sweep.wholes) == 1 and {*sweep.wholes} == block.schedule.rewritten
    # Coordinates of nodes times a table are the only product that is none of them.
    assert sum(isinstance(x, Gemm) for x in block.schedule.stages) == 1


def test_fibres_are_there_before_they_are_multiplied() -> None:
    block = block_of(cuda_fused.hyperelastic(2), Parameters())
    for sweep in block.schedule.sweeps:
        known = set(sweep.loads)
        for group in grouped(sweep):
            assert {x for move in group for x in move.operands} <= known or group[0].pointwise
            assert len({(move.matrix, move.shape) for move in group if move.matrix}) <= 1
            known.update(move.result for move in group)


@pytest.mark.usefixtures("standard_promotion")
def test_many_threads_make_what_tiles_are_multiplied_with() -> None:
    """The tangents at the points are for each point and node, not for each point."""
    shapes = (5, 8, 3), (5, 8, 8, 3)

    def energy(u: Any, g: Any) -> Any:
        f = jnp.eye(3) + jnp.einsum("qne,na->qae", g, u)
        log = jnp.log(jnp.linalg.det(f))
        return jnp.sum(f * f) / 2 - jnp.sum(log) + jnp.sum(log**2)

    (program,) = programs(jm.fuse(jax.hessian(energy)), *map(np.zeros, shapes))
    block = block_of(program, Parameters())
    most = max(block.schedule.sweeps, key=lambda x: x.flops / x.count)
    assert most.flops / most.count < 1000
