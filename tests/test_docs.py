"""The documentation is true: its code runs and prints what it says, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

RUN_DOCTESTS = """
import doctest, importlib, pkgutil, sys
import jax, jax.numpy as jnp, numpy as np
import jaxmagma as jm

known = {"jax": jax, "jnp": jnp, "np": np, "jm": jm}
names = [m.name for m in pkgutil.walk_packages(jm.__path__, "jaxmagma.")]
native = ("jaxmagma._cpu", "jaxmagma._cuda")
modules = [importlib.import_module(n) for n in names if n not in native]
options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
results = [doctest.testmod(m, extraglobs=known, optionflags=options) for m in [jm, *modules]]
print(sum(r.attempted for r in results), "examples")
sys.exit(any(r.failed for r in results))
"""


def blocks(page: str, language: str) -> list[str]:
    """What stands between fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def code_of(page: str) -> str:
    """The ``python`` blocks of a page, on the same lines, so that errors name them."""
    inside, lines = False, []
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line.strip() == "```python" and not inside
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines)


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if code_of(p.read_text()).strip()], ids=name)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(code_of(page.read_text()))
    printed = run(str(script), cwd=tmp_path)
    assert [x for x in blocks(page.read_text(), "text") if x not in printed] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [t for t in targets if "://" not in t]
    assert [t for t in local if not (page.parent / t).exists()] == []


def test_docstring_examples(tmp_path: Path) -> None:
    run("-c", RUN_DOCTESTS, cwd=tmp_path)


def test_code_of() -> None:
    page = "a\n```python\nx = 1\n```\nb\n```sh\nls\n```\n```python\ny = 2\n```"
    assert blocks(page, "python") == ["x = 1\n", "y = 2\n"]
    assert code_of(page).splitlines() == ["", "", "x = 1", "", "", "", "", "", "", "y = 2"]
