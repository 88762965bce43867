"""Where the matrices of mode products stand, and other constants.

Those of threads are in the constant bank, from where they cost no register and no memory access;
beyond what is at hand of it, in shared memory. Those of quads are in registers, in pieces for
tensor cores: loaded once, or for each sweep.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxmagma.lowering.cuda.matrices.pieces import Pieces, every_piece
from jaxmagma.lowering.cuda.parameters import CONSTANT_BYTES
from jaxmagma.lowering.cuda.schedule import Schedule
from jaxmagma.lowering.cuda.schedule.sweeps import Move, Sweep
from jaxmagma.plans.parity import Halves


# Threads read several values of four bytes of a matrix at once, and from shared memory a group.
WORD = 8
GROUP = 16
# Fibres of a quad at a time: those of two lines, which sm_90 multiplies in the time of one.
QUAD_FIBRES = 2
# What threads have at hand of the constant bank. Each value beyond takes them ten cycles and more.
CONSTANT_CACHE_BYTES = 2048
# Matrices stay in registers, if they take no more than this.
HELD_REGISTERS = 130
# Of 252 bytes of registers that the threads of a warp share, matrices beside sums have so many:
# with 200 others would spill.
UNIFORM_BYTES = 192


@dataclass(frozen=True)
class Matrices:
    """Where matrices stand."""

    schedule: Schedule
    held: bool  # in registers, from one product to the next
    near: tuple[int, ...]  # in shared memory
    bank: tuple[int, ...]  # in the constant bank, in that order

    def __repr__(self) -> str:
        pieces = ["pieces stay in registers"] if self.held else []
        near = (f"m{n} in shared memory" for n in self.near)
        return "\n".join((*pieces, *near, *(f"m{n} in the constant bank" for n in self.bank)))

    @cached_property
    def pieces(self) -> list[Pieces]:
        """Those that tensor cores multiply with."""
        return every_piece(self.schedule)

    @property
    def rereads(self) -> bool:
        """Whether matrices in the constant bank are read anew for each product of a thread."""
        return self.schedule.quads or not self.held

    def bank_uses(self) -> int:
        """How often one of them is read anew, at most: several products may share it."""
        return self.rereads * sum(x in self.bank for x in _of_threads(self.schedule))

    def bank_size(self, matrix: int) -> int:
        return _bank_size(self.schedule, matrix)

    def bank_bytes(self, matrix: int) -> int:
        return _bank_bytes(self.schedule, matrix)

    def bank_values(self, matrix: int) -> np.ndarray:
        """What stands there when the kernel is loaded: zeros, if the values are not known yet."""
        ends, halves = self.schedule.ends, self.schedule.halves.get(matrix)
        if halves is not None:
            return np.stack([halves.even, halves.odd])
        array = ends.constant(matrix)
        return np.zeros(self.bank_size(matrix), ends.dtype) if array is None else array

    def outside_bank(self, sweep: Sweep) -> list[int]:
        """The matrices of a sweep of threads that are read from global memory."""
        moves = sweep.moves if sweep.lanes == 1 else ()
        return [m.matrix.tile for m in moves if m.matrix and m.matrix.tile not in self.bank]

    def near_stride(self, matrix: int) -> int:
        """From a row of a matrix in shared memory to the next one: whole groups of values."""
        group = max(1, GROUP // self.schedule.ends.dtype.itemsize)
        return -(-self.schedule.plan.tiles[matrix].shape[1] // group) * group

    def near_size(self, matrix: int) -> int:
        return self.schedule.plan.tiles[matrix].shape[0] * self.near_stride(matrix)

    def splits(self, move: Move) -> Halves | None:
        """The halves that threads multiply a fibre with, if not the whole matrix."""
        if move.matrix is None or move.matrix.tile not in self.bank:
            return None
        return self.schedule.halves.get(move.matrix.tile)

    def split_products(self) -> int:
        """How many products are done half by half."""
        threads = sum(self.splits(move) is not None for move in self.schedule.products_of_threads())
        sweeps = [x for x in self.schedule.sweeps if self.schedule.is_mirrored(x)]
        return threads + sum(move.matrix is not None for x in sweeps for move in x.moves)

    def tables(self) -> list[int]:
        """Constants that stand in global memory: read at places that differ between threads."""
        ends, tables = self.schedule.ends, []
        for stage in self.schedule.stages:
            tables += self.schedule.read(stage)
            tables += self.outside_bank(stage) if isinstance(stage, Sweep) else []
        tables += [ends.plan.results[out] for out in ends.summed]
        return [x for x in dict.fromkeys(tables) if ends.is_constant(x)]

    def arranged(self) -> list[np.ndarray]:
        """The values of constant matrices for tensor cores, in the order of ``pieces``."""
        found = []
        for x in self.pieces:
            array = self.schedule.ends.constant(x.tile)
            if x.half:
                array = getattr(self.schedule.halves[x.tile], x.half)
            if array is not None:
                found.append(x.arranged(array))
        return found


def matrices_of(schedule: Schedule) -> Matrices:
    near = () if schedule.quads else _near(schedule)
    bank: list[int] = []
    left = CONSTANT_BYTES - 4 * len(schedule.plan.steps)
    for matrix in _of_threads(schedule):
        size = _bank_bytes(schedule, matrix)
        if matrix not in bank and matrix not in near and size <= left:
            bank.append(matrix)
            left -= size
    return Matrices(schedule, are_held(schedule), near, tuple(bank))


def are_held(schedule: Schedule) -> bool:
    """Whether all matrices stay in registers: of every warp, or those that its threads share.

    Of the latter beside sums only, where it was faster.
    """
    if not schedule.quads:
        size = sum(_bank_bytes(schedule, x) for x in set(_of_threads(schedule)))
        return bool(schedule.ends.summed) and size <= UNIFORM_BYTES
    return held_registers(schedule) + schedule.kept_registers <= HELD_REGISTERS


def held_registers(schedule: Schedule) -> int:
    """Registers of a thread for all matrices that tensor cores multiply with."""
    return sum(x.values for x in every_piece(schedule)) * schedule.ends.dtype.itemsize // 4


def _near(schedule: Schedule) -> tuple[int, ...]:
    """The matrices beyond what is at hand of the bank.

    Not those of halves, which are multiplied from there.
    """
    near: list[int] = []
    most = CONSTANT_CACHE_BYTES
    for matrix in dict.fromkeys(_of_threads(schedule)):
        most -= _bank_bytes(schedule, matrix)
        whole = len(schedule.plan.tiles[matrix].shape) == 2 and matrix not in schedule.halves
        if most < 0 and whole:
            near.append(matrix)
    return tuple(near)


def _of_threads(schedule: Schedule) -> list[int]:
    """The matrices that threads multiply with, one for each product."""
    return [move.matrix.tile for move in schedule.products_of_threads() if move.matrix is not None]


def _bank_size(schedule: Schedule, matrix: int) -> int:
    """Values of a matrix in the constant bank: all of them, or those of its halves."""
    halves = schedule.halves.get(matrix)
    return schedule.plan.tiles[matrix].size if halves is None else 2 * halves.even.size


def _bank_bytes(schedule: Schedule, matrix: int) -> int:
    """What it takes there, where small values begin at multiples of a group of them."""
    itemsize = schedule.ends.dtype.itemsize
    size = _bank_size(schedule, matrix) * itemsize
    return size if itemsize >= WORD else -(-size // GROUP) * GROUP
