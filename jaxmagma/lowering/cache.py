"""Kernels on disk, for processes to come: what a plan became, without planning and printing again.

A kernel's file has a name made of all that the kernel was made of, the package's own sources among
it, and stands beside the machine code.  That a program is too large for one is kept there, too, and
which parts it was divided into.  What is damaged, or cannot be read or written, is as good as not
there.
"""

import base64
import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmagma import choices, parity
from jaxmagma.choices import Choice
from jaxmagma.lowering.kernel import Declined, Excess, Kernel
from jaxmagma.program import ElementProgram


def file_of(
    program: ElementProgram,
    extents: Sequence[int],
    platform: str,
    choice: Choice,
    kind: str = "kernel",
) -> Path | None:
    """Where the kernel of a program, or its parts, is kept; None if the user wants no cache."""
    folder = choices.cache_folder()
    if folder is None:
        return None
    # The number of elements sizes what is between them and their sum, and nothing else.
    sums = any(len(out.batch) < program.batch_rank for out in program.outputs)
    made_of = (
        _sources(),
        platform,
        choices.architecture(platform),
        choices.key(program, constant=False),
        [x.tile for x in program.inputs],
        extents if sums else None,
        choice.parameters,
        parity.is_wanted(),
    )
    digest = hashlib.sha256(json.dumps(made_of).encode())
    for operand in program.inputs:
        if operand.constant is not None:
            digest.update(operand.constant.array.tobytes())
    return folder / f"{digest.hexdigest()}.{kind}"


@functools.cache
def _sources() -> str:
    """A digest of the package: another one makes other kernels."""
    digest = hashlib.sha256()
    for file in sorted(Path(choices.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read(file: Path) -> Kernel | Declined | None:
    """The kernel in a file, or why there is none, if the file says."""
    found = read_numbers(file)
    return None if found is None else _decoded(found)


def write(file: Path, made: Kernel | Declined) -> None:
    """Keeps a kernel, if it can, or that a program is too large for one."""
    if isinstance(made, Kernel) or made.excess is not None:
        write_numbers(file, _encoded(made))


def read_numbers(file: Path) -> Any:
    """The numbers, names and lists in a file; None if there are none."""
    try:
        checksum, text = file.read_text().split("\n", 1)
    except (OSError, ValueError):
        return None
    return json.loads(text) if checksum == _checksum(text) else None


def write_numbers(file: Path, kept: Any) -> None:
    """Keeps numbers, names and lists of them, if it can."""
    text = json.dumps(kept)
    with contextlib.suppress(OSError):
        choices.write(file, f"{_checksum(text)}\n{text}")


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encoded(made: Kernel | Declined) -> dict[str, Any]:
    if isinstance(made, Kernel):
        return _encoded_kernel(made)
    assert made.excess is not None
    return {"reason": made.reason, "excess": [made.excess.of, made.excess.times]}


def _decoded(found: dict[str, Any]) -> Kernel | Declined:
    if "reason" in found:
        return Declined(found["reason"], Excess(*found["excess"]))
    return _decoded_kernel(found)


def _encoded_kernel(kernel: Kernel) -> dict[str, Any]:
    def attribute(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return [value.dtype.name, base64.b64encode(value.tobytes()).decode()]

    return {
        "target": kernel.target,
        "attributes": {name: attribute(x) for name, x in kernel.attributes.items()},
        "workspace": [(shape, dtype.name) for shape, dtype in kernel.workspace],
        "description": kernel.description,
        "source": kernel.source,
        "busy": kernel.busy,
        "plan": kernel.plan,
    }


def _decoded_kernel(found: dict[str, Any]) -> Kernel:
    def attribute(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        dtype, values = value
        return np.frombuffer(base64.b64decode(values), dtype)

    return Kernel(
        found["target"],
        {name: attribute(x) for name, x in found["attributes"].items()},
        tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in found["workspace"]),
        found["description"],
        found["source"],
        found["busy"],
        found["plan"],
    )
