"""What a tuner may vary in a kernel, and what GPUs allow."""

from dataclasses import dataclass
from typing import get_args

from jaxmagma.plan import Middle


# A block takes no more shared memory than every GPU since sm_80 has, unless one element needs more:
# then what its GPU has.
SHARED_BYTES = 99 << 10
# What the system takes of shared memory for each block.
RESERVED_BYTES = 1 << 10
CONSTANT_BYTES = 64 << 10
MAX_THREADS = 1024
WARP = 32
# From compute capability 9.0 on tensor cores multiply 16 fibres at a time (``mma.m16n8k4`` in
# ``cuda/quad.cuh``). ptxas compiles that only if a thread may have so many registers, whether it
# needs them or not.
WIDE_REGISTERS = 64


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the model in this module."""

    threads: int | None = None  # of a group: threads that work together on some elements
    elements: int | None = None  # of a group
    groups: int | None = None  # in a block; groups of one warp never wait for another
    slices: int | None = None  # that a group works through, one after the other
    prefetch: bool | None = None  # asks for tiles some time before they are read
    min_blocks: int | None = None  # on a multiprocessor, for the compiler's choice of registers
    quads: bool | None = None  # fibres are owned by four lanes, and tensor cores multiply them
    fibres: int | None = None  # of a thread, or of four lanes, at a time
    near_bytes: int | None = None  # of matrices in the constant bank; others in shared memory
    hold: bool | None = None  # matrices stay in registers from one product to the next
    fetch: int | None = None  # operands that the copy engine brings to shared memory
    together: bool | None = None  # those of all elements in one copy
    middle: Middle | None = None  # axis that has its turn last on the way in, first on the way out
    stream: bool | None = None  # rows of others, for each warp as it needs them
    ahead: bool | None = None  # while there is work on the elements before
    twice: bool | None = None  # what comes ahead has two places, and all of that time
    padding: int | None = None  # at most, of axes in shared memory, against bank conflicts
    spread: int | None = None  # at most, of the lines that neighbouring quads have
    rewrite: bool | None = None  # outputs of fibres are stored in order, from shared memory
    in_place: bool | None = None  # tiles take the place of those that they are made from
    shared_bytes: int = SHARED_BYTES  # most shared memory for one block
    # Of matrices that are symmetric about their centre, even and odd halves are multiplied.
    even_odd: bool | None = None
    accumulate: bool | None = None  # products only summed over elements stay in registers
    panels: bool | None = None  # tensor cores apply dense tables to many elements at a time
    whole_sums: bool | None = None  # every thread has such a sum of products of its own fibres

    def __post_init__(self) -> None:
        for name in ("threads", "elements", "groups", "slices", "fibres", "spread"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name}={given} is none at all")
        if self.fetch is not None and self.fetch < 0:
            raise ValueError(f"fetch={self.fetch} is less than none")
        if self.middle is not None and self.middle not in get_args(Middle):
            raise ValueError(f"middle={self.middle!r} is none of {', '.join(get_args(Middle))}")
        if self.groups is not None and self.groups > 1 and self.threads != WARP:
            raise ValueError(f"groups of {self.threads} threads: several in a block have 32 each")
