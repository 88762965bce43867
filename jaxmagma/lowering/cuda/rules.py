"""Which kernels a GPU cannot run, or not well: they are not timed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmagma.lowering.cuda.architectures import Limits, limits_of
from jaxmagma.lowering.cuda.parameters import RESERVED_BYTES, WARP, WIDE_REGISTERS
from jaxmagma.lowering.rules import Candidate, Rule, Rules


# Fewer warps on a multiprocessor do not hide the latency of memory.
LEAST_WARPS = 8
# Of the threads of a block.
LEAST_BUSY = 0.5
# Quads of several fibres are multiplied so, and sums of several pieces in a column.
_WIDE = re.compile(r"Quad<(?!1>)|ProductSum<double, \d\d")


@dataclass(frozen=True)
class Measured:
    """What a candidate takes of a GPU."""

    candidate: Candidate
    limits: Limits

    def given(self, name: str) -> int:
        """A parameter, zero where it is absent or left to the model."""
        return getattr(self.candidate.parameters, name, None) or 0

    def _attribute(self, name: str) -> Any:
        kernel = self.candidate.kernel
        return kernel.attributes.get(name) if kernel else None

    @property
    def threads(self) -> int:
        return int(self._attribute("threads") or 0)

    @property
    def shared_bytes(self) -> int:
        return int(self._attribute("shared_bytes") or 0)

    @property
    def constant_bytes(self) -> int:
        bank = self._attribute("bank")
        return 0 if bank is None else len(bank) - 1

    @property
    def busy(self) -> float:
        return self.candidate.kernel.busy if self.candidate.kernel else 1.0

    @property
    def registers(self) -> int:
        return self.candidate.registers

    @property
    def allowed_registers(self) -> int:
        """What the compiler may give a thread, so that as many blocks as asked for have room."""
        limits, blocks = self.limits, self.given("min_blocks")
        threads = self.threads * blocks
        # More than a multiprocessor has at once the compiler ignores.
        if not 0 < threads <= WARP * limits.warps or blocks > limits.blocks:
            return limits.thread_registers
        return limits.registers // threads // 8 * 8  # they come in eights

    @property
    def is_wide(self) -> bool:
        """Whether tensor cores multiply 16 fibres at a time: where there are bulk copies, too."""
        source = self.candidate.kernel.source if self.candidate.kernel else ""
        return self.limits.bulk_copies and _WIDE.search(source) is not None

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


def rules_of(architecture: str) -> Rules:
    """What removes kernels for GPUs of an architecture."""
    return rules_for(limits_of(architecture))


def rules_for(limits: Limits) -> Rules:
    def rule(name: str, removes: Callable[[Measured], bool], *reads: str) -> Rule:
        return Rule(name, lambda x: removes(Measured(x, limits)), reads)

    many = "more threads than a block has"
    few = rule("too few warps at once", lambda x: x.warps < LEAST_WARPS)
    return Rules(
        parameters=(
            rule(
                many,
                lambda x: x.given("threads") * max(1, x.given("groups")) > limits.threads,
                "threads",
                "groups",
            ),
            rule(
                "threads are not whole warps", lambda x: bool(x.given("threads") % WARP), "threads"
            ),
        ),
        kernel=(
            rule(many, lambda x: x.threads > limits.threads),
            rule(
                "more shared memory than a block has",
                lambda x: x.shared_bytes > limits.shared_of_block,
            ),
            rule(
                "more constants than the bank holds",
                lambda x: x.constant_bytes > limits.constant,
            ),
            rule(
                "too few registers for tensor cores",
                lambda x: x.is_wide and x.allowed_registers < WIDE_REGISTERS,
            ),
            rule("most threads idle", lambda x: x.busy < LEAST_BUSY),
            few,
        ),
        code=(
            rule("registers spill", lambda x: x.candidate.spilled > 0),
            rule(
                "more registers than a multiprocessor has",
                lambda x: x.registers * x.threads > limits.registers,
            ),
            few,
        ),
    )
