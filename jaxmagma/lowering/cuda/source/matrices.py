"""Matrices and other constants of a kernel: where they stand, and products of fibres with them.

``bank.m7`` is tile 7 in the constant bank, ``table.t7`` in global memory, and ``m7`` in the
registers of a warp, for tensor cores.
"""

from collections.abc import Iterable

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.matrices import GROUP, WORD
from jaxmagma.lowering.cuda.matrices.pieces import Pieces, pieces_of, whole_of
from jaxmagma.lowering.cuda.schedule.sweeps import Move, Sweep
from jaxmagma.lowering.cuda.source.text import Text, listed, shape_of
from jaxmagma.plans.parity import Halves
from jaxmagma.programs.strides import row_major


# Why the constant bank ends in zeros.
UNKNOWN_ZEROS = "added to each use: else values would stay in registers from one to the next"


class Matrices:
    """Prints what a kernel has of constants, and their uses."""

    def __init__(self, text: Text, block: Block) -> None:
        self.text = text
        self.block = block
        self.uses = 0  # of the constant bank so far
        # The zero of ``slices``: matrices are read anew for each slice.
        self.again = " + again" if block.ends.accumulations and block.matrices.rereads else ""

    def print_structs(self) -> None:
        """What is filled when the kernel is loaded, or just before it is launched."""
        text, block = self.text, self.block
        shapes = [shape_of(x.shape) for x in block.plan.tiles]
        bank, table = [], []
        for tile in block.matrices.bank:
            halves = " in even and odd halves" if tile in block.schedule.halves else ""
            aligned = f"alignas({GROUP}) " if block.ends.dtype.itemsize < WORD else ""
            declared = f"{aligned}{block.type} m{tile}[{block.matrices.bank_size(tile)}]"
            bank.append((declared, shapes[tile] + halves))
        if bank and block.matrices.rereads:
            aligned = f"alignas({GROUP}) " if block.ends.dtype.itemsize < WORD else ""
            bank.append((f"{aligned}int zero[{block.matrices.bank_uses()}]", UNKNOWN_ZEROS))
        for tile in block.matrices.tables():
            table.append((f"{block.type} t{tile}[{block.plan.tiles[tile].size}]", shapes[tile]))
        for x in block.matrices.pieces:
            if block.ends.is_constant(x.tile):
                shape = f"{shape_of((x.rows, x.columns))} in pieces"
                table.append((f"{block.type} {x.name}[{x.values} * 32]", shape))
        for name, space, members in (
            ("bank", "__constant__", bank),
            ("table", "__device__", table),
        ):
            if members:
                with text.braces(f"struct {name.capitalize()}", closing="};"):
                    for declaration, comment in members:
                        text(f"{declaration};", comment)
                text(f'extern "C" {{ {space} {name.capitalize()} {name}; }}')
                text()

    def print_copies(self) -> None:
        """Brings matrices for threads to shared memory."""
        text, block = self.text, self.block
        for tile, begin in block.layout.places_of_matrices.items():
            rows, columns = block.plan.tiles[tile].shape
            place = f"table.t{tile}" if block.ends.is_constant(tile) else f"g{tile}_"
            sizes = listed(("kThreads", rows, columns, block.matrices.near_stride(tile)))
            text(f"{block.type}* const m{tile} = shared + {begin};")
            text(f"copy_matrix<{sizes}>(m{tile}, {place}, thread);", shape_of((rows, columns)))
        if block.matrices.near:
            text("sync<kThreads>();")

    def print_loads(self, pieces: Iterable[Pieces]) -> None:
        """Brings matrices for tensor cores to the registers of each warp."""
        for x in pieces:
            sizes, place = [x.rows, x.columns], f"table.{x.name}"
            if not self.block.ends.is_constant(x.tile):
                sizes, place = [*sizes, x.row, x.column], f"g{x.tile}_"
            again = "" if self.block.matrices.held else self.again
            self.text(
                f"const auto {x.name} = load_matrix<{listed(sizes)}>({place}{again}, thread);",
                shape_of((x.rows, x.columns)),
            )

    def product(self, sweep: Sweep, move: Move, fibre: str) -> str:
        """Of the matrix of a mode product and a fibre."""
        assert move.matrix is not None
        tile, rows, columns = move.matrix.tile, move.result.length, move.operands[0].length
        if sweep.lanes > 1:
            names = listed(x.name for x in pieces_of(self.block.schedule, sweep, move))
            if not self.block.schedule.is_mirrored(sweep):
                return f"gemm(quad, {names}, {fibre})"
            sign = self.block.schedule.halves[tile].sign
            return f"split_gemm<{sign}, {rows}, {columns}>(quad, {names}, {fibre})"
        halves = self.block.matrices.splits(move)
        if halves is not None:
            sizes = (halves.sign, rows, columns, *_places(halves, transposed=move.matrix.row == 1))
            return f"split_gemm<{listed(sizes)}>({self._use(tile)}, {fibre})"
        x = whole_of(self.block.plan, move)
        if near := self.near(move):
            return f"gemm({near}, {fibre})"
        sizes = (rows, columns, x.row, x.column)
        return f"gemm<{listed(sizes)}>({self._use(tile)}, {fibre})"

    def near(self, move: Move) -> str:
        """The matrix in shared memory that an operation multiplies with, if any."""
        if move.matrix is None or move.matrix.tile not in self.block.matrices.near:
            return ""
        tile, stride = move.matrix.tile, self.block.matrices.near_stride(move.matrix.tile)
        strides = (stride, 1) if move.matrix.row == 0 else (1, stride)
        sizes = (move.result.length, move.operands[0].length, *strides)
        return f"near<{listed(sizes)}>(m{tile})"

    def _use(self, tile: int) -> str:
        """Where a matrix is, for one more use of it."""
        if tile in self.block.matrices.bank and not self.block.matrices.rereads:
            return f"bank.m{tile}"
        if tile in self.block.matrices.bank:
            self.uses += 1
            # Zeros that leave groups of values where they begin.
            itemsize = self.block.ends.dtype.itemsize
            times = f"{GROUP // itemsize} * " if itemsize < WORD else ""
            return f"constant(bank.m{tile} + {times}bank.zero[{self.uses - 1}]{self.again})"
        place = f"table.t{tile}" if self.block.ends.is_constant(tile) else f"g{tile}_"
        return place + self.again


def _places(halves: Halves, transposed: bool) -> tuple[int, ...]:
    """Strides of the rows and columns of both halves, and where the even and the odd one start."""
    (row, column), even, odd = row_major(halves.even.shape), 0, halves.even.size
    if transposed:
        # What takes even to odd vectors takes, transposed, odd ones to even ones.
        row, column = column, row
        even, odd = (even, odd) if halves.sign > 0 else (odd, even)
    return row, column, even, odd
