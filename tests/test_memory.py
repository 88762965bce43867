"""What is remembered of a program lives as long as the program, and no longer."""

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import choices, lowering
from jaxmagma.lowering.cuda.architectures import LIMITS
from jaxmagma.lowering.kernel import Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans.plan import plan
from jaxmagma.programs import memo
from jaxmagma.programs.program import Constant, ElementProgram
from tests.cuda_programs import chain, mass


def another(program: ElementProgram, seed: int) -> ElementProgram:
    """The same with other constants."""
    rng = np.random.default_rng(seed)
    inputs = (
        replace(x, constant=Constant(rng.random(x.tile).astype(x.dtype))) if x.constant else x
        for x in program.inputs
    )
    return replace(program, inputs=tuple(inputs))


def objects() -> int:
    jax.clear_caches()
    gc.collect()
    return len(gc.get_objects())


def growth(call: Callable[[int], object], before: int, count: int) -> float:
    """Objects that stay of each call, after as many as fill what is bounded."""
    for n in range(before):
        call(n)
    start = objects()
    for n in range(before, before + count):
        call(n)
    return (objects() - start) / count


# ---- Memory is flat --------------------------------------------------------------------------


def test_a_thousand_constants_leave_nothing() -> None:
    usual = mass(2)

    def call(seed: int) -> None:
        program = another(usual, seed)
        lowering.lower(program, (1000,), "cpu")
        lowering.planned(program, "cuda")
        choices.key(program)

    assert growth(call, before=10, count=1000) < 0.1


def test_functions_and_their_gradients_leave_nothing() -> None:
    u = jax.ShapeDtypeStruct((1000, 4, 4), np.float64)

    def call(seed: int) -> None:
        table = np.random.default_rng(seed).random((5, 4))
        total = jax.jit(lambda u: jm.einsum("xa,yb,eab->exy", table, table, u).sum())
        fused = jax.jit(lambda u: jm.fuse(lambda x: jax.numpy.sin(table @ x @ table.T))(u).sum())
        for function in (total, fused):
            jax.jit(jax.grad(function)).lower(u)

    assert growth(call, before=3, count=20) < 1


def test_bytes_of_constants_come_back() -> None:
    program = another(mass(2), 0)
    (table, *_) = (x.constant for x in program.inputs if x.constant is not None)
    assert isinstance(lowering.lower(program, (1000,), "cpu"), Kernel)
    alive = weakref.ref(table)
    del table, program
    gc.collect()
    assert alive() is None


# ---- What is remembered ----------------------------------------------------------------------


def test_equal_programs_share_what_is_known() -> None:
    one, other = mass(2), mass(2)
    assert one is not other and plan(one) is plan(other)
    assert plan(one, middle="slowest") is not plan(one)
    # The other one still knows.
    known = plan(one)
    del one
    gc.collect()
    assert plan(other) is known and plan(mass(2)) is known
    assert plan(another(mass(2), 1)) is not known


def test_targets_and_extents_are_told_apart(cuda_lowering: None) -> None:
    program = chain(20)
    targets = [Target("cuda", x, y) for x in ("", *LIMITS) for y in (None, False, True)]
    made = {x: lowering.lower_for(program, (1000,), x) for x in targets}
    assert len({id(lowering._lower(program, (1000,), x, choices.MODEL)) for x in made}) == len(made)


def test_a_program_remembers_so_much() -> None:
    calls: list[int] = []

    @memo.remembered
    def double(program: ElementProgram, number: int) -> int:
        calls.append(number)
        return 2 * number

    program = mass(2)
    for number in range(2 * memo.MOST_RESULTS):
        assert double(program, number) == double(program, number) == 2 * number
    assert len(calls) == 2 * memo.MOST_RESULTS
    assert len(memo._memory(program)) <= memo.MOST_RESULTS
    double.cache_clear()
    double(program, calls[-1])
    assert len(calls) == 2 * memo.MOST_RESULTS + 1


def test_an_error_is_not_remembered() -> None:
    answers: list[str | ValueError] = [ValueError("once"), "found"]

    @memo.remembered
    def find(program: ElementProgram) -> str:
        answer = answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    with pytest.raises(ValueError, match="once"):
        find(mass(2))
    program = mass(2)
    assert find(program) == find(program) == "found"


def test_threads_and_collected_programs() -> None:
    """Programs come and go while others ask for equal ones."""
    usual = mass(1)
    wanted = [lowering.planned(another(usual, seed), "cpu").flops for seed in range(4)]
    wrong: list[int] = []

    def work(first: int) -> None:
        for n in range(60):
            seed = (first + n) % 4
            found = lowering.planned(another(usual, seed), "cpu").flops
            wrong.extend([] if found == wanted[seed] else [seed])
            if n % 20 == 0:
                gc.collect()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_made_programs_are_one_while_they_live() -> None:
    @memo.interned
    def make(p: int) -> ElementProgram:
        return mass(p)

    program = make(2)
    assert make(2) is program and make(1) is not program
    alive = weakref.ref(program)
    del program
    gc.collect()
    assert alive() is None
