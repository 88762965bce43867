"""Launches that are under way at the same time, on a GPU: none sees what another one has traced.

A traced basis is written to constant memory just before its kernel runs.  Threads that call one
function, executables with equal kernels, recorded graphs and devices each bring their own.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.lowering.cuda import lower, planned
from jaxmagma.lowering.cuda.parameters import Owner, Parameters
from jaxmagma.lowering.kernel import Kernel
from tests import cuda_fused
from tests.cuda_programs import arguments, mass
from tests.test_cuda import call


pytestmark = pytest.mark.gpu

THREADS = 4
# Of each thread: as many as find what happens rarely, or a few of them.
CALLS = int(os.environ.get("JAXMAGMA_THREAD_CALLS", "300"))
# XLA records five operations or more in a row as a CUDA graph.
RECORDED = 6

Operator = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def apply(b: jax.Array, d: jax.Array, u: jax.Array) -> jax.Array:
    return jm.einsum("xi,yj,zk,exyz,xa,yb,zc,eabc->eijk", b, b, b, d, b, b, b, u)


def recorded(b: jax.Array, d: jax.Array, u: jax.Array) -> jax.Array:
    """Several launches of equal kernels, each with a basis of its own."""
    for n in range(RECORDED):
        u = u + apply((0.25 + 0.125 * n) * b, d, u)
    return u


def operands(elements: int, seed: int, device: Any = None) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    shapes = (5, 4), (elements, 5, 5, 5), (elements, 4, 4, 4)
    return tuple(jax.device_put(rng.uniform(-0.5, 0.5, shape), device) for shape in shapes)


def wrong_of_threads(
    function: Callable[[int], Operator], given: Sequence[tuple[jax.Array, ...]], calls: int
) -> int:
    """How many calls of threads had another result than the same call alone."""
    wanted = [function(n)(*x).block_until_ready() for n, x in enumerate(given)]
    differs = jax.jit(lambda count, x, y: count + jnp.any(x != y).astype(count.dtype))
    counts: list[Any] = [None] * len(given)
    start = threading.Barrier(len(given))

    def work(number: int) -> None:
        mine, own = function(number), given[number]
        count = jax.device_put(np.int64(0), wanted[number].device)
        start.wait()
        for n in range(calls):
            count = differs(count, mine(*own), wanted[number])
            if n % 100 == 99:
                count.block_until_ready()
        counts[number] = int(count)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


@pytest.mark.parametrize("elements", [50, 2_000, 20_000])
@pytest.mark.parametrize("function", [apply, recorded], ids=["launches", "graphs"])
def test_threads_have_a_basis_each(function: Operator, elements: int) -> None:
    jitted = jax.jit(function)
    given = [operands(elements, seed) for seed in range(THREADS)]
    assert wrong_of_threads(lambda _: jitted, given, CALLS) == 0


def test_executables_share_a_kernel_and_no_basis() -> None:
    """The kernel does not depend on the number of elements: its executables do."""
    jitted = jax.jit(apply)
    given = [operands(elements, elements) for elements in (2_000, 2_001, 2_002, 2_003)]
    assert wrong_of_threads(lambda _: jitted, given, CALLS) == 0


def test_graphs_and_launches_at_the_same_time() -> None:
    functions = [jax.jit(f) for f in (apply, recorded, apply, recorded)]
    given = [operands(2_000, seed) for seed in range(len(functions))]
    assert wrong_of_threads(lambda n: functions[n], given, CALLS) == 0


def test_devices_have_a_basis_each() -> None:
    devices = jax.local_devices()
    if len(devices) < 2:
        pytest.skip("one device")
    jitted = jax.jit(apply)
    given = [operands(2_000, n, devices[n % 2]) for n in range(THREADS)]
    assert wrong_of_threads(lambda _: jitted, given, CALLS) == 0


def test_graphs_of_changing_arrays_keep_no_memory() -> None:
    """XLA records a graph again for other addresses; what the last one had is used again."""
    jitted = jax.jit(recorded)
    given = [operands(500, seed) for seed in range(40)]
    wanted = [jitted(*x) for x in given]
    for _ in range(3):
        for x, y in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(jitted(*x), y)


# ---- What is wrong is an error ----------------------------------------------------------------


def attributes_of(constant: bool) -> tuple[Any, Kernel]:
    program = mass(2, constant=constant)
    kernel = lower(planned(program), (10,))
    assert isinstance(kernel, Kernel)
    return program, kernel


def _changed(values: np.ndarray, at: int, to: int) -> np.ndarray:
    changed = values.copy()
    changed[at] = to
    return changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("threads", lambda x: 0),
        ("threads", lambda x: 1 << 20),
        ("threads", lambda x: -32),
        ("elements", lambda x: 0),
        ("elements", lambda x: 1 << 40),
        ("shared_bytes", lambda x: -1),
        ("shared_bytes", lambda x: 1 << 40),
        ("order", lambda x: _changed(x, 0, 7)),
        ("order", lambda x: _changed(x, 1, 5)),
        ("order", lambda x: _changed(x, 2, 3)),
        ("pointers", lambda x: _changed(x, 1, -1)),
        ("pointers", lambda x: _changed(x, 1, 100)),
        ("pointers", lambda x: _changed(x, 2, 1 << 40)),
        ("pointers", lambda x: _changed(x, 3, 4)),
        ("pointers", lambda x: _changed(x, 5, 1 << 40)),
        ("pointers", lambda x: x[:3]),
        ("copies", lambda x: _changed(x, 1, 100)),
        ("copies", lambda x: _changed(x, 1, -1)),
        ("copies", lambda x: _changed(x, 2, -8)),
        ("copies", lambda x: _changed(x, 2, 1 << 62)),
        ("copies", lambda x: _changed(x, 3, 1 << 62)),
        ("copies", lambda x: _changed(x, 3, 8)),
        ("sums", lambda x: np.array([3, 0, 0, 5])),
        ("sums", lambda x: np.array([3, -1, 0, 5])),
        ("sums", lambda x: np.array([1, 0])),
        ("bank", lambda x: np.zeros(1 << 17, np.uint8)),
        ("bank", lambda x: np.zeros(1, np.uint8)),
    ],
)
def test_attributes_are_checked(name: str, change: Callable[[Any], Any]) -> None:
    """Each is an error that names the kernel, before anything is launched."""
    program, kernel = attributes_of(constant=False)
    hostile = {**kernel.attributes, name: change(kernel.attributes[name])}
    function = call(Kernel(kernel.target, hostile), program, (10,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=kernel.attributes["name"]):
        jax.block_until_ready(function(*arguments(program, (10,))))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("owner", ["threads", "quads"])
@pytest.mark.parametrize("components", [1, 3])
def test_gathers_stay_in_their_vectors(components: int, owner: Owner, ahead: bool) -> None:
    """An index that is none of the vector's finds zeros."""
    program = cuda_fused.gathering(components, 10)
    kernel = lower(planned(program), (64,), Parameters(owner=owner, ahead=ahead))
    assert isinstance(kernel, Kernel)
    vector, index = cuda_fused.indexed(program, 64)
    beyond = np.random.default_rng(0).choice([-7, 10, 11, 2**31 - 1, -(2**31)], index.shape)
    chosen = np.random.default_rng(1).uniform(size=index.shape) < 0.3
    function = call(kernel, program, (64,))
    got = function(vector, np.where(chosen, beyond, index).astype(np.int32))
    wanted = function(vector, np.where(chosen, -1, index).astype(np.int32))
    for one, another in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, another)
