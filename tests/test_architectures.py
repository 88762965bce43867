"""Kernels fit the GPUs that they are made for, or there are none."""

from dataclasses import replace

import pytest

from jaxmagma import choices, lowering
from jaxmagma.lowering import division
from jaxmagma.lowering.cuda import ANY_GPU
from jaxmagma.lowering.cuda.architectures import LIMITS, UNKNOWN, Limits, limits_of
from jaxmagma.lowering.cuda.model import choose
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES, Parameters
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.programs.program import ElementProgram
from tests import cuda_fused
from tests.cuda_programs import chain, gradient, mass, mass_gradient_b
from tests.test_cuda_compile import native


PROGRAMS: dict[str, ElementProgram] = {
    **{f"bk1 p={p}": mass(p) for p in (1, 4, 7, 10)},
    **{f"bk3 p={p}": cuda_fused.diffusion(p) for p in (2, 5, 8, 10)},
    **{f"gradient of bk1 p={p}": gradient(mass(p, constant=False)) for p in (1, 5, 8, 10)},
    "gradient by B p=6": mass_gradient_b(6),
    "bk3 p=5, float32": cuda_fused.diffusion(5, dtype="float32"),
    "bk1 p=9, float32": mass(9, dtype="float32"),
    "bk1 p=7, complex64": mass(7, dtype="complex64"),
    "bk1 p=8, complex128": mass(8, dtype="complex128"),
    "chain n=24, complex128": chain(24, dtype="complex128"),
    "chain n=32": chain(32),
    "gradient of chain n=32": gradient(chain(32, constant=False)),
    "hyperelastic p=6": cuda_fused.hyperelastic(6),
}
# One of each that the lowering tells apart, and a GPU that is yet to be built.
ARCHITECTURES = ["sm_80", "sm_86", "sm_87", "sm_90", "sm_100", "sm_120", "sm_130"]


@pytest.fixture(autouse=True)
def _without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMAGMA_CACHE_DIR", "off")


def made(program: ElementProgram, architecture: str) -> Kernel | Declined:
    extents = (1000,) * program.batch_rank
    return lowering.lower_for(program, extents, Target("cuda", architecture))


def by_quads(program: ElementProgram, limits: Limits) -> bool:
    block = choose(lowering.planned(program, "cuda"), Parameters(), limits)
    assert not isinstance(block, Declined)
    return block.schedule.quads


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_fit(architecture: str) -> None:
    limits = limits_of(architecture)
    kernels = 0
    for name, program in PROGRAMS.items():
        found = made(program, architecture)
        if isinstance(found, Declined):
            assert found.lacks_room, (name, found.reason)
            continue
        kernels += 1
        assert 0 < found.attributes["threads"] <= limits.threads, name
        assert found.attributes["shared_bytes"] <= limits.shared_of_block, name
        assert found.attributes["bank"].nbytes - 1 <= limits.constant, name
    assert kernels >= len(PROGRAMS) - 1


@pytest.mark.parametrize("architecture", ["sm_86", "sm_120", ""])
def test_what_does_not_fit_is_done_in_parts(
    architecture: str, cuda_lowering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PROGRAMS["gradient of bk1 p=10"]
    assert isinstance(made(program, "sm_90"), Kernel)
    declined = made(program, architecture)
    assert isinstance(declined, Declined) and declined.lacks_room
    monkeypatch.setattr(choices, "architecture", lambda platform: architecture)
    divided = division.divide(program, (1000,), "cuda")
    assert divided is not None and len(divided.parts) > 1
    for part in divided.parts:
        found = made(part.program, architecture)
        if isinstance(found, Kernel) and "shared_bytes" in found.attributes:
            assert found.attributes["shared_bytes"] <= limits_of(architecture).shared_of_block


def test_a_caller_gets_no_more_than_there_is() -> None:
    asked = choices.Choice.of({"owner": "quads"}, choices.CALLER)
    program = cuda_fused.diffusion(15)
    large = lowering.lower_for(program, (1000,), Target("cuda", "sm_90"), asked)
    assert isinstance(large, Kernel) and large.attributes["shared_bytes"] > 99 << 10
    for architecture in ("sm_86", "sm_120", ""):
        found = lowering.lower_for(program, (1000,), Target("cuda", architecture), asked)
        if isinstance(found, Kernel):
            assert found.attributes["shared_bytes"] <= 99 << 10


def test_the_table() -> None:
    """A block can have all of a multiprocessor but what the system takes."""
    for name, row in LIMITS.items():
        assert row.shared == row.shared_of_block + RESERVED_BYTES, name
        assert row.shared_of_block >= UNKNOWN.shared_of_block, name
        assert row.bulk_copies == (int(name.removeprefix("sm_")) >= 90), name
    assert limits_of("sm_130") == limits_of("") == UNKNOWN
    assert ANY_GPU == Target("cuda")


def test_rates_of_tensor_cores_count() -> None:
    """Where they are no faster than multiply-adds, fewer fibres are theirs."""
    fast = LIMITS["sm_90"]
    slow = replace(fast, tensor_rate=1.0)
    programs = [chain(n, dtype="complex128") for n in range(7, 13)]
    assert sum(by_quads(x, slow) for x in programs) < sum(by_quads(x, fast) for x in programs)


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", ["sm_86", "sm_120"])
def test_machine_code_fits(architecture: str) -> None:
    """Registers and shared memory, what a kernel declares of its own included."""
    cuda = native()
    limits = limits_of(architecture)
    for name in ("bk3 p=5", "gradient of bk1 p=8", "chain n=32"):
        kernel = made(PROGRAMS[name], architecture)
        assert isinstance(kernel, Kernel), name
        code = cuda.compile(kernel.source, architecture)
        resources = cuda.resources(code)
        assert resources["shared"] + kernel.attributes["shared_bytes"] <= limits.shared_of_block
        assert 0 < resources["registers"] <= limits.thread_registers
        assert resources["registers"] * kernel.attributes["threads"] <= limits.registers
