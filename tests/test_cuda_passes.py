"""What the passes of a block of threads make of a plan: values that nobody changes."""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from jaxmagma.lowering.cuda import planned
from jaxmagma.lowering.cuda.architectures import limits_of
from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.model import choose
from jaxmagma.lowering.cuda.parameters import Parameters
from jaxmagma.program import ElementProgram
from tests import cuda_fused
from tests.cuda_programs import gradient, mass


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
