"""Settings shared by all tests.

* The tests run on the *installed* package. Python may have put the checkout on ``sys.path``
  (``python -m pytest`` does), where the source tree would hide it; so the installed packages are
  imported first and the checkout is added afterwards, for ``tests`` and ``benchmarks``.
* The CPU is eight devices, for the sharding tests. They share one pool of threads, and neither
  compile nor run times change measurably.
* Where pytest-xdist is installed, each core runs a process with some of the tests; ``-n 0`` is one.
* XLA compiles without most optimisations, unless a GPU must be there: most tests wait for it. What
  it has compiled is kept for the run: its processes compile much that is the same.
* float64 is on, and both promotions are strict, so that jaxmagma never relies on implicit
  promotion itself. A test *of* promotion asks for the fixture ``standard_promotion``.
"""

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings
from jax.interpreters import mlir


ROOT = Path(__file__).resolve().parent.parent

# Each may take four gigabytes of memory.
MOST_PROCESSES = 8


def _import_installed() -> None:
    sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]
    if importlib.util.find_spec("jaxmagma") is None:
        raise pytest.UsageError('jaxmagma is not installed: run  pip install ".[test]"')
    import fem_demo  # noqa: F401
    import jaxmagma  # noqa: F401

    sys.path.insert(0, str(ROOT))


def _folder_of_the_run(variable: str) -> str:
    """A folder for all processes of this run alone; unless the user names one."""
    if variable not in os.environ:
        os.environ[variable] = tempfile.mkdtemp(prefix="jaxmagma-tests-")
        atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)
    return os.environ[variable]


_folder_of_the_run("JAXMAGMA_CACHE_DIR")  # kernels that the tests compile
_import_installed()

jax.config.update("jax_num_cpu_devices", 8)
if os.environ.get("JAXMAGMA_REQUIRE_GPU") != "1":
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", _folder_of_the_run("JAX_COMPILATION_CACHE_DIR"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling makes the first example slow; the same examples every time make a failure repeatable.
settings.register_profile("jaxmagma", deadline=None, derandomize=True)
settings.load_profile("jaxmagma")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    chosen = getattr(option, "numprocesses", 0) is not None
    if not (chosen or option.usepdb or hasattr(config, "workerinput")):
        option.numprocesses = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        option.dist = "worksteal"
        # They share the GPU, if there is one.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_gpu():
        if os.environ.get("JAXMAGMA_REQUIRE_GPU") == "1":
            pytest.fail("JAXMAGMA_REQUIRE_GPU=1, but JAX finds no GPU")
        pytest.skip("JAX finds no GPU")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled for the emulator; see ``pytest_collection_modifyitems``."""
    from tests import cuda_emulator

    if cuda_emulator.compiler() is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("emulated")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "emulated" in getattr(item, "fixturenames", ()):
            item.add_marker("emulated")


@pytest.fixture(autouse=True)
def programs_of_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that XLA's loops would do are programs, too, which most tests are of."""
    from jaxmagma.frontends import segments

    if "loops" not in request.fixturenames:
        for rule in ("are_loops", "are_loops_around_compared_products"):
            monkeypatch.setattr(segments, rule, lambda *_: False)


@pytest.fixture
def loops() -> None:
    """As users have it."""


@pytest.fixture
def sums_of_programs() -> Iterator[None]:
    """Values of elements are added up by programs, as on a GPU, and not as this CPU does."""
    from jaxmagma.primitives import primitive

    def lower(function: Callable[..., Any]) -> None:
        rule = mlir.lower_fun(function, multiple_results=False)
        mlir.register_lowering(primitive.assemble_p, rule, platform="cpu")

    lower(primitive._assemble_programs)
    yield
    lower(primitive._assemble_in_order)


@pytest.fixture(autouse=True)
def given_ceilings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``jm.explain`` takes many seconds to measure a machine whose speed most tests ignore."""
    if "measured_ceilings" not in request.fixturenames:
        # The package has a function of this name; the module is wanted.
        module = importlib.import_module("jaxmagma.faces.roofline")
        monkeypatch.setattr(module, "_copy_rate", lambda device: 1e10)
        monkeypatch.setattr(module, "_product_rate", lambda device, dtype: 1e11)


@pytest.fixture
def measured_ceilings() -> None:
    """As users have it."""


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """A function that returns a fresh random key at each call, the same ones in every run."""
    key = jax.random.key(zlib.crc32(request.node.nodeid.encode()))
    count = 0

    def next_key() -> jax.Array:
        nonlocal count
        count += 1
        return jax.random.fold_in(key, count)

    return next_key


@pytest.fixture
def optimised() -> Iterator[None]:
    """XLA compiles with all optimisations, as a user has it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """JAX's default promotion of dtypes and ranks, as a user has it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def cuda_lowering(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """CUDA kernels are generated even by a build that cannot run them."""
    from jaxmagma import lowering, native

    load = native.load
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(
            native, "load", lambda platform: native if platform == "cuda" else load(platform)
        )
    lowering._lower.cache_clear()
    yield
    lowering._lower.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _clear_caches() -> Iterator[None]:
    """Compiled programs are rarely shared between files; thousands of them fill the memory."""
    yield
    jax.clear_caches()
