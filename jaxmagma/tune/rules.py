"""What is removed before anything is timed, and why.

Rules see ever more of a candidate: its parameters, the kernel they make, its machine code. The
kernel that the model chooses is never removed: it is what the others are compared with.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmagma.choices import Choice
from jaxmagma.lowering.cuda.architectures import UNKNOWN, Limits
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES, WARP, WIDE_REGISTERS
from jaxmagma.lowering.kernel import Kernel


# Fewer warps on a multiprocessor do not hide the latency of memory.
LEAST_WARPS = 8
# Of the threads of a block.
LEAST_BUSY = 0.5
# Quads of several fibres are multiplied so, and sums of several pieces in a column.
_WIDE = re.compile(r"Quad<(?!1>)|ProductSum<double, \d\d")


@dataclass
class Candidate:
    """One way to run a program, and what is known of it so far."""

    choice: Choice
    limits: Limits = UNKNOWN
    parameters: Any = None  # of the backend's own class
    kernel: Kernel | None = None
    resources: Mapping[str, int] | None = None  # registers and spilled bytes of a thread

    @property
    def threads(self) -> int:
        return int(self.kernel.attributes.get("threads", 0)) if self.kernel else 0

    @property
    def shared_bytes(self) -> int:
        return int(self.kernel.attributes.get("shared_bytes", 0)) if self.kernel else 0

    @property
    def constant_bytes(self) -> int:
        bank = self.kernel.attributes.get("bank") if self.kernel else None
        return 0 if bank is None else len(bank) - 1

    @property
    def registers(self) -> int:
        return self.resources["registers"] if self.resources else 0

    @property
    def allowed_registers(self) -> int:
        """What the compiler may give a thread, so that as many blocks as asked for have room."""
        limits, blocks = self.limits, _min_blocks(self)
        threads = self.threads * blocks
        # More than a multiprocessor has at once the compiler ignores.
        if not 0 < threads <= WARP * limits.warps or blocks > limits.blocks:
            return limits.thread_registers
        return limits.registers // threads // 8 * 8  # they come in eights

    @property
    def is_wide(self) -> bool:
        """Whether tensor cores multiply 16 fibres at a time: where there are bulk copies, too."""
        source = self.kernel.source if self.kernel else ""
        return self.limits.bulk_copies and _WIDE.search(source) is not None

    @property
    def spilled(self) -> int:
        return self.resources["local"] if self.resources else 0

    @property
    def warps(self) -> int:
        """Warps that a multiprocessor has at once."""
        limits = self.limits
        of_block = -(-self.threads // WARP)
        if not of_block:
            return limits.warps
        blocks = min(limits.blocks, limits.warps // of_block)
        blocks = min(blocks, limits.shared // (self.shared_bytes + RESERVED_BYTES))
        if self.registers:
            of_warp = -(-self.registers // 8) * 8 * WARP
            blocks = min(blocks, limits.registers // (of_warp * of_block))
        return blocks * of_block


@dataclass(frozen=True)
class Rule:
    """A name for the report, whether a candidate is removed, and the parameters it looks at."""

    name: str
    removes: Callable[[Candidate], bool]
    reads: tuple[str, ...] = ()


def _given(name: str) -> Callable[[Candidate], int]:
    """A parameter, zero where it is absent or left to the model."""
    return lambda x: getattr(x.parameters, name, None) or 0


_threads, _groups, _min_blocks = map(_given, ("threads", "groups", "min_blocks"))

INVALID = "not a combination of parameters"
ON_PARAMETERS = (
    Rule(
        "more threads than a block has",
        lambda x: _threads(x) * max(1, _groups(x)) > x.limits.threads,
        reads=("threads", "groups"),
    ),
    Rule("threads are not whole warps", lambda x: _threads(x) % WARP != 0, reads=("threads",)),
)

DECLINED = "no such kernel"
SAME = "the same kernel as another"
ON_KERNEL = (
    Rule("more threads than a block has", lambda x: x.threads > x.limits.threads),
    Rule(
        "more shared memory than a block has", lambda x: x.shared_bytes > x.limits.shared_of_block
    ),
    Rule("more constants than the bank holds", lambda x: x.constant_bytes > x.limits.constant),
    Rule(
        "too few registers for tensor cores",
        lambda x: x.is_wide and x.allowed_registers < WIDE_REGISTERS,
    ),
    Rule("most threads idle", lambda x: x.kernel is not None and x.kernel.busy < LEAST_BUSY),
    Rule("too few warps at once", lambda x: x.warps < LEAST_WARPS),
)

FAILED = "does not compile or run"
ON_CODE = (
    Rule("registers spill", lambda x: x.spilled > 0),
    Rule(
        "more registers than a multiprocessor has",
        lambda x: x.registers * x.threads > x.limits.registers,
    ),
    Rule("too few warps at once", lambda x: x.warps < LEAST_WARPS),
)

WRONG = "other results than the model's kernel"

NAMES = tuple(
    dict.fromkeys(
        [
            INVALID,
            *(rule.name for rule in ON_PARAMETERS),
            DECLINED,
            SAME,
            *(rule.name for rule in (*ON_KERNEL, *ON_CODE)),
            FAILED,
            WRONG,
        ]
    )
)


def broken(rules: tuple[Rule, ...], candidate: Candidate) -> str | None:
    """The name of the first rule that removes a candidate."""
    return next((rule.name for rule in rules if rule.removes(candidate)), None)
