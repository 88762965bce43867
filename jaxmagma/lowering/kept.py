"""Kernels on disk, for processes to come: what a plan became, without planning and printing again.

An entry has a name made of all that the kernel was made of, the package's own sources among it.
That a program is too large for one is kept there, too, and which parts it was divided into.
"""

import base64
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmagma import cache, choices
from jaxmagma.choices import Choice
from jaxmagma.lowering.kernel import Declined, Excess, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.programs.program import ElementProgram


def name_of(
    program: ElementProgram,
    extents: Sequence[int],
    target: Target,
    choice: Choice,
    kind: str = "kernel",
) -> str:
    """The entry of a program's kernel, or of its parts."""
    # The number of elements sizes what is between them and their sum, and nothing else.
    sums = any(len(out.batch) < program.batch_rank for out in program.outputs)
    made_of = (
        _sources(),
        target.platform,
        target.architecture,
        target.even_odd,
        choices.key(program, constant=False),
        [x.tile for x in program.inputs],
        extents if sums else None,
        choice.parameters,
    )
    constants = (x.constant.array.tobytes() for x in program.inputs if x.constant is not None)
    return f"{cache.digest(made_of, *constants)}.{kind}"


@functools.cache
def _sources() -> str:
    """A digest of the package: another one makes other kernels."""
    files = sorted(Path(choices.__file__).parent.rglob("*.py"))
    return cache.digest(*(file.read_bytes() for file in files))


def read(name: str) -> Kernel | Declined | None:
    """The kernel of an entry, or why there is none, if the entry says."""
    found = cache.read(name)
    return None if found is None else _decoded(found)


def write(name: str, made: Kernel | Declined) -> None:
    """Keeps a kernel, if it can, or that a program is too large for one."""
    if isinstance(made, Kernel) or made.excess is not None:
        cache.write(name, _encoded(made))


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
