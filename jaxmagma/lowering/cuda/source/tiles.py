"""The arrays of a call, and the tiles of an element: where they are, and how they get there.

``g7(e)`` is tile 7 of element e in global memory, ``s7(e)`` in shared memory.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxmagma.lowering.cuda.blocks import Block
from jaxmagma.lowering.cuda.source.text import Text, shape_of
from jaxmagma.plans.plan import Plan


@dataclass(frozen=True)
class Pointer:
    """A parameter of the kernel: an array of the call with its batch axes and tile size.

    Of a vector that is ``gathered`` from, the kernel has the length as well.
    """

    name: str
    buffer: int
    axes: tuple[int, ...]
    size: int
    itemsize: int
    written: bool
    type: str
    gathered: bool = False


def pointers_of(block: Block) -> list[Pointer]:
    """Of the arrays that a kernel reads, and of those that it writes."""
    plan, program = block.plan, block.plan.program
    read = set(block.schedule.everything_read)
    read |= {plan.results[out] for out in block.ends.summed}
    read |= {x for sweep in block.schedule.sweeps for x in block.matrices.outside_bank(sweep)}
    read |= {x.tile for x in block.matrices.pieces}
    read |= {x for step in block.transfers.gathers.values() for x in step.operands}
    pointers = operands_of(plan, read, block.ends.gathered, block.type)
    arguments = len(program.arguments)
    sums = arguments + len(program.outputs)
    for number, out in enumerate(program.outputs):
        size = plan.tiles[plan.results[number]].size
        name, buffer, axes = f"out{number}", arguments + number, out.batch
        if number in block.ends.summed:
            name, buffer, axes = f"partial{number}", sums + block.ends.summed.index(number), ()
        pointers.append(
            Pointer(name, buffer, axes, size, block.ends.dtype.itemsize, True, block.type)
        )
    return pointers


def operands_of(
    plan: Plan, read: Collection[int | None], gathered: Collection[int], type_: str
) -> list[Pointer]:
    """Of those operands that are ``read``, if they are arguments of the call."""
    pointers: list[Pointer] = []
    arguments = 0
    for tile, operand in enumerate(plan.program.inputs):
        if operand.constant is not None:
            continue
        if tile in read:
            own = "int" if operand.dtype.kind == "i" else type_
            where = (operand.batch, plan.tiles[tile].size, operand.dtype.itemsize)
            pointers.append(Pointer(f"g{tile}", arguments, *where, False, own, tile in gathered))
        arguments += 1
    return pointers


class Tiles:
    """Prints where tiles are, and brings them to shared memory."""

    def __init__(self, text: Text, block: Block) -> None:
        self.text = text
        self.block = block
        self.transfers = block.transfers
        self.pointers = pointers_of(block)
        self.batched = [x for x in self.pointers if x.axes]

    @property
    def step(self) -> str:
        """From a slice of elements to the next one."""
        return "step" if self.block.strides else "kElements"

    # ---- Where tiles are -------------------------------------------------------------------------

    def print_global(self, x: Pointer) -> None:
        self.text(f"const auto {x.name} = {self._global(x, 'slice')};")

    def print_shared(self, tile: int) -> None:
        shape = shape_of(self.block.plan.tiles[tile].shape)
        self.text(f"const auto s{tile} = {self._shared(tile)};", shape)

    def of_slice(self, operand: int, slice_: str) -> str:
        """A function of the element of a slice: where its tile of an operand is."""
        return f"({self._global(self._operand(operand), slice_)})"

    def _global(self, x: Pointer, slice_: str) -> str:
        """A function of the element: where its tile of an array is."""
        if not x.axes:
            return f"[&](int) {{ return {x.name}_; }}"
        return (
            f"[&](int e) {{ return {x.name}_ + "
            f"batch.offset<{self.batched.index(x)}, {x.size}>({slice_}.element(e)); }}"
        )

    def _shared(self, tile: int) -> str:
        """The same, in shared memory."""
        at = self.block.layout.tiles[tile]
        begin, own = f"shared + {at.begin}", f" + {at.strides.element} * e"
        if tile not in self.transfers.fetched:
            place = begin + own
        elif self.transfers.together:
            place = f"fetched({begin}, g{tile}(0)){own}"
        else:
            place = f"fetched({begin}{own}, g{tile}(e))"
        return f"[&](int e) {{ return {place}; }}"

    def _operand(self, tile: int) -> Pointer:
        return next(x for x in self.pointers if x.name == f"g{tile}")

    # ---- How they get there ----------------------------------------------------------------------

    def print_fetch(self, tile: int) -> None:
        """Has the copy engine bring an operand."""
        size = self.block.plan.tiles[tile].size
        called, where = f"fetch<kThreads, kElements, {size}>", f"s{tile}, g{tile}"
        if self.transfers.together:
            called, where = f"fetch_slice<kThreads, {size}>", f"s{tile}(0), g{tile}(0), slice"
        where += ", batch.inside(slice)"
        self.text(f"{called}(thread, {self.arrival(tile)}, {where});")

    def arrival(self, tile: int) -> str:
        """Which of the arrivals is that of an operand."""
        return f"arrived[{self.transfers.fetched.index(tile)}]"

    def print_fetches(self, tiles: Iterable[int], first: str) -> None:
        """Brings operands of the elements from ``first`` on, if there are any."""
        with self.text.braces(f"if ({first} < run.end)"):
            self.text(f"const auto slice = jaxmagma::slice<kElements>({first}, run.end);")
            for tile in tiles:
                self.print_global(self._operand(tile))
                self.print_shared(tile)
                self.print_fetch(tile)

    def print_places(self) -> None:
        """Reads where gathered tiles of the next elements are in their vectors."""
        for tile, step in self.transfers.gathers.items():
            size = self.block.plan.tiles[step.index].size
            index = self._global(self._operand(step.index), "next")
            self.text(
                f"const auto places{tile} = places<kThreads, kElements, {size}>(thread, {index});"
            )

    def print_gathers(self, tiles: Iterable[int]) -> None:
        """Has threads bring gathered tiles of the next elements."""
        for tile in tiles:
            step = self.transfers.gathers[tile]
            components = self.block.plan.tiles[tile].size // self.block.plan.tiles[step.index].size
            vector = self._global(self._operand(step.vector), "next")
            self.text(
                f"gather<{components}>(thread, {self._shared(tile)}, {vector}, "
                f"length{step.vector}, places{tile});"
            )
