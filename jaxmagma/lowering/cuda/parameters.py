"""What a tuner may vary in a kernel, and what GPUs allow."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxmagma.lowering.space import Space, one, together


# A block takes no more shared memory than every GPU since sm_80 has, unless one element needs more:
# then what its GPU has.
SHARED_BYTES = 99 << 10
# What the system takes of shared memory for each block.
RESERVED_BYTES = 1 << 10
CONSTANT_BYTES = 64 << 10
MAX_THREADS = 1024
WARP = 32
SCHEDULERS = 4
# From compute capability 9.0 on tensor cores multiply 16 fibres at a time (``mma.m16n8k4`` in
# ``cuda/quad.cuh``). ptxas compiles that only if a thread may have so many registers, whether it
# needs them or not.
WIDE_REGISTERS = 64

# Who owns values: threads whole fibres, four lanes fibres that tensor cores multiply, or a warp
# some elements, whole.
Owner = Literal["threads", "quads", "panels"]


@dataclass(frozen=True)
class Parameters:
    """What a tuner may vary. ``None`` leaves a choice to the ``model``."""

    threads: int | None = None  # of a group: threads that work together on some elements
    elements: int | None = None  # of a group
    groups: int | None = None  # in a block; groups of one warp never wait for another
    min_blocks: int | None = None  # on a multiprocessor, for the compiler's choice of registers
    owner: Owner | None = None  # of values: threads, four lanes, or a warp
    fibres: int | None = None  # of a thread, or of four lanes, at a time
    fetch: int | None = None  # operands that the copy engine brings to shared memory
    ahead: bool | None = None  # those of the next elements come as soon as their place is free

    def __post_init__(self) -> None:
        for name in ("threads", "elements", "groups", "fibres"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name}={given} is none at all")
        if self.fetch is not None and self.fetch < 0:
            raise ValueError(f"fetch={self.fetch} is less than none")
        if self.owner is not None and self.owner not in get_args(Owner):
            raise ValueError(f"owner={self.owner!r} is none of {', '.join(get_args(Owner))}")
        if self.ahead not in (None, False, True):
            raise ValueError(f"ahead={self.ahead!r} is neither True nor False")
        if self.groups is not None and self.groups > 1 and self.threads != WARP:
            raise ValueError(f"groups of {self.threads} threads: several in a block have 32 each")


# What is tried of them.
SPACE = Space(
    (
        # Threads of a group, and groups in a block: several if each is one warp.
        together(
            "threads",
            "groups",
            values=(
                (None, None),
                *((threads, 1) for threads in (256, 64, 128, 192, 96, 384, 512, 32)),
                *((32, groups) for groups in (4, 8, 2)),
            ),
        ),
        one("elements", None, 2, 4, 1, 8, 3, 6, 16, 12, 32),
        one("min_blocks", None, 2, 4, 1, 3, 6, 8),
        one("owner", None, "quads", "threads", "panels"),
        one("fibres", None, 1, 2, 4),
        one("fetch", None, 0, 1, 2, 4),
        one("ahead", None, True, False),
    )
)
