"""The package as installed: what it holds, what importing it costs, and what it does not load."""

import ast
import graphlib
import importlib.metadata
import importlib.resources
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import jaxmagma._cpu
import pytest

import jaxmagma


ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(jaxmagma._cpu.__file__).parent
HAS_CUDA = any(INSTALLED.glob("_cuda.*.so"))


def run_python(code: str, *, cwd: Path | None = None, **env: str) -> str:
    """What a fresh interpreter prints; in ``cwd`` the interpreter also imports from there."""
    command = [sys.executable, "-c", code] if cwd else [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tests_run_on_the_installed_package() -> None:
    """Or on the source tree, if that is how it is installed: `pip install -e`."""
    origin = importlib.metadata.distribution("jaxmagma").read_text("direct_url.json") or "{}"
    editable = json.loads(origin).get("dir_info", {}).get("editable", False)
    assert editable or Path(jaxmagma.__file__).parent == INSTALLED


def test_version() -> None:
    assert jaxmagma.__version__ == importlib.metadata.version("jaxmagma")
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxmagma.__version__)


def test_typed() -> None:
    assert importlib.resources.files("jaxmagma").joinpath("py.typed").is_file()


def test_run_time_dependencies() -> None:
    """The four it names, and SciPy, which every release of JAX brings along."""

    def required_by(package: str) -> set[str]:
        needs = importlib.metadata.requires(package) or []
        return {re.split(r"[^\w-]", n)[0] for n in needs if "extra ==" not in n}

    assert required_by("jaxmagma") == {"jax", "jaxlib", "numpy", "opt_einsum"}
    assert "scipy" in required_by("jax") & required_by("jaxlib")


def imported() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (ROOT / "jaxmagma").rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        nodes = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.ImportFrom)]
        own = {f"{x.module}.{y.name}" for x in nodes for y in x.names}
        found[name] = {x if x in files else x.rpartition(".")[0] for x in own} & files.keys()
    return found


# The lowest first.
FLOORS = (
    *("native", "cache", "programs", "internals", "plans", "choices", "jaxpr"),
    *("lowering", "primitives", "frontends", "faces", "tune"),
)


def test_no_module_imports_from_a_floor_above() -> None:
    modules = imported()
    graphlib.TopologicalSorter(modules).prepare()  # an error, if any import each other
    above = [
        (module, other)
        for module, others in modules.items()
        for other in others
        if module != "jaxmagma" and _floor(module) < _floor(other)
    ]
    assert above == []


def _floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def test_checkout_finds_the_installed_native_module() -> None:
    """From the checkout, `python` imports the source tree, where nothing has been compiled."""
    out = run_python(
        "import jaxmagma, jaxmagma._cpu as c; print(jaxmagma.__file__); print(c.__file__)", cwd=ROOT
    )
    source, native = map(Path, out.splitlines())
    assert source.parent == ROOT / "jaxmagma"
    assert native.parent == INSTALLED


def test_import_is_cheap() -> None:
    """Importing jaxmagma after jax takes less than a third of a second."""
    code = (
        "import time; t = time.perf_counter(); import jax, numpy; u = time.perf_counter()\n"
        "import jaxmagma; print(u - t, time.perf_counter() - u)"
    )
    jax_cost, cost = zip(*(map(float, run_python(code).split()) for _ in range(3)), strict=True)
    # A machine ten times slower than a laptop takes seconds to import jax, too.
    assert min(cost) < max(0.3, 0.5 * statistics.median(jax_cost))


def test_import_starts_no_backend() -> None:
    code = "import jaxmagma; from jax._src import xla_bridge; print(xla_bridge._backends)"
    assert run_python(code) == "{}"


@pytest.mark.parametrize("module", ["_cache", "_cpu", "_cuda"])
def test_native_module_loads_no_cuda(module: str) -> None:
    """Either can be imported on a machine without a GPU and without CUDA."""
    if module == "_cuda" and not HAS_CUDA:
        pytest.skip("built without CUDA")
    code = (
        "import jax, jax.numpy as jnp, jaxmagma as jm, numpy as np\n"
        f"import jaxmagma.{module}\n"
        "b = np.ones((3, 2))\n"
        "f = jax.jit(lambda u: jm.einsum('xa,yb,eab->exy', b, b, u))\n"
        "f(jnp.ones((64, 2, 2))).block_until_ready()\n"
        "print(open('/proc/self/maps').read())"
    )
    maps = run_python(code, JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
    assert "jaxmagma/_cpu" in maps
    assert not re.findall(r"\S*lib(?:cuda|cudart|nvrtc|nvidia)[\w.-]*\.so\S*", maps)
