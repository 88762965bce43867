"""What a GPU has for a block of threads, and in a multiprocessor, by its compute capability.

Sizes are from the table of technical specifications in NVIDIA's CUDA Programming Guide, "Compute
Capabilities" (https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/
compute-capabilities.html), as are bulk copies (the tensor memory accelerator, from 9.0 on).

Rates of tensor cores in float64, whose pieces are 8 x 8 x 4 from 8.0 on (PTX ISA, ``mma.m8n8k4``),
are from the peaks in data sheets, that of tensor cores over that of multiply-adds: A100 19.5 over
9.7 TFLOP/s, H100 67 over 34, B200 40 over 40, B300 1.3 over 1.3. Others claim none for tensor cores
and have two units for multiply-adds in a multiprocessor, which do the work of both.
"""

from dataclasses import dataclass

from jaxmagma.lowering.cuda.parameters import CONSTANT_BYTES, MAX_THREADS, SHARED_BYTES


@dataclass(frozen=True)
class Limits:
    """What one architecture has.  The defaults are what every one has since 8.0.

    Attributes:
      shared_of_block: bytes of shared memory that a block may ask for.
      shared: bytes of shared memory of a multiprocessor.
      warps: of a multiprocessor.
      blocks: of a multiprocessor.
      tensor_rate: of tensor cores in float64, over that of multiply-adds.
      bulk_copies: whether an engine copies between global and shared memory.
      registers: of a multiprocessor.
      thread_registers: of a thread.
      threads: of a block.
      constant: bytes of constant memory of a kernel.
    """

    shared_of_block: int = SHARED_BYTES
    shared: int = 100 << 10
    warps: int = 48
    blocks: int = 16
    tensor_rate: float = 1.0
    bulk_copies: bool = False
    registers: int = 1 << 16
    thread_registers: int = 255
    threads: int = MAX_THREADS
    constant: int = CONSTANT_BYTES


_KB = 1 << 10

# Shared memory of a block and of a multiprocessor, warps, blocks, rate of tensor cores.
LIMITS = {
    "sm_80": Limits(163 * _KB, 164 * _KB, 64, 32, 2.0),
    "sm_86": Limits(99 * _KB, 100 * _KB, 48, 16, 1.0),
    "sm_87": Limits(163 * _KB, 164 * _KB, 48, 16, 1.0),
    "sm_89": Limits(99 * _KB, 100 * _KB, 48, 24, 1.0),
    "sm_90": Limits(227 * _KB, 228 * _KB, 64, 32, 2.0, bulk_copies=True),
    "sm_100": Limits(227 * _KB, 228 * _KB, 64, 32, 1.0, bulk_copies=True),
    "sm_103": Limits(227 * _KB, 228 * _KB, 64, 32, 1.0, bulk_copies=True),
    "sm_110": Limits(227 * _KB, 228 * _KB, 48, 24, 1.0, bulk_copies=True),
    "sm_120": Limits(99 * _KB, 100 * _KB, 48, 24, 1.0, bulk_copies=True),
    "sm_121": Limits(99 * _KB, 100 * _KB, 48, 24, 1.0, bulk_copies=True),
}
# Of a GPU that is not known, a block takes no more than any has. What helps some, and is done in
# another way where it is not, is as on the one that the model was measured on.
UNKNOWN = Limits(SHARED_BYTES, 228 * _KB, 64, 32, 2.0, bulk_copies=True)


def limits_of(architecture: str) -> Limits:
    """Those of an architecture such as ``sm_90``."""
    return LIMITS.get(architecture, UNKNOWN)
