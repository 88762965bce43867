"""What a thread has in registers during a sweep: how it is loaded, and how it is stored.

``r7`` is a fibre of tile 7, ``v7`` a single value.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from jaxmagma.lowering.cuda.layout.spreads import ACROSS
from jaxmagma.lowering.cuda.schedule.sweeps import ALONG, Sweep, Value
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.text import LETTERS, Text, linear, listed, shape_of


# The place along a fibre, where values are made one by one; and a lane's number of it.
POINT = "at"
SLOT = "slot"
# Before a line's name: the first place that a thread has of several.
FIRST = "first_"


@dataclass(frozen=True)
class Along:
    """Where a fibre is in memory: the stride, and the arguments that say where it begins."""

    step: int
    arguments: str
    guard: str = ""


class Registers:
    """Names of fibres and values, loaded when they are first asked for."""

    def __init__(
        self, text: Text, places: Places, sweep: Sweep, outer: "Registers | None" = None
    ) -> None:
        self.text = text
        self.places = places
        self.block = places.block
        self.sweep = sweep
        self.fibres: dict[Value, str] = dict(outer.fibres) if outer else {}
        self.values: dict[Value, str] = dict(outer.values) if outer else {}
        # Tiles of which lanes may still be reading what others of their quad will replace.
        self.loaded: set[int] = outer.loaded if outer else set()

    def inner(self) -> "Registers":
        """The same in a loop, where more is defined."""
        return Registers(self.text, self.places, self.sweep, self)

    # ---- Names -----------------------------------------------------------------------------------

    def _name_of(self, value: Value, kind: str) -> str:
        return f"{kind}{value.tile}{self._suffix(value)}"

    def named_fibre(self, value: Value) -> str:
        self.fibres[value] = self._name_of(value, "r")
        return self.fibres[value]

    def named_value(self, value: Value) -> str:
        self.values[value] = self._name_of(value, "v")
        return self.values[value]

    def _suffix(self, value: Value) -> str:
        """A letter, if the same tile is read along several labels."""
        same = list(dict.fromkeys(x for x in self.sweep.loads if x.tile == value.tile))
        position = same.index(value) if value in same else 0
        return LETTERS[position] if position else ""

    @property
    def point(self) -> str:
        """The place along a fibre, as its owner counts."""
        return SLOT if self.quad else POINT

    def _slot(self, value: Value) -> str:
        return self.point if value.length > 1 else "0"

    # ---- Owners of fibres ------------------------------------------------------------------------

    @property
    def quad(self) -> str:
        """The argument that says which part of a fibre a lane has."""
        return "quad, " if self.sweep.lanes > 1 else ""

    @property
    def owner(self) -> str:
        """The argument that says what a thread has of which fibres, if not the whole of one."""
        return self.quad or ("own, " if self.block.ownership.packs(self.sweep) else "")

    @property
    def type_of_owner(self) -> str:
        name = self._places_in_quads + "Quad" if self.quad else "Own"
        return f"{name}<{self.block.ownership.fibres(self.sweep)}>"

    @property
    def _places_in_quads(self) -> str:
        """What kind of quad of ``cuda/quad.cuh`` has the values: empty for the plain one."""
        return "Mirrored" if self.block.schedule.is_mirrored(self.sweep) else ""

    def type_of_fibre(self, length: int) -> str:
        if self.quad:
            type_, fibres = self.block.type, self.block.ownership.fibres(self.sweep)
            owner = f", {self.type_of_owner}" if self._places_in_quads else ""
            return f"QuadFibre<{type_}, {fibres}, {length}{owner}>"
        return f"Fibre<{self.type_of_value}, {length}>"

    @property
    def type_of_value(self) -> str:
        """Of one value for each of the fibres that a thread has at a time."""
        fibres = self.block.ownership.fibres(self.sweep)
        return f"Pack<{self.block.type}, {fibres}>" if self.owner else self.block.type

    def each_fibre(self) -> AbstractContextManager[None]:
        """What is printed meanwhile is done for every fibre."""
        extents = list(map(self.sweep.threads, self.sweep.lines))
        across = self.block.layout.spreads.get(self.places.position) == ACROSS
        verb = "values" if self.sweep.light else "across" if across else "lines"
        type_, parameters = "int", []
        sizes = ["kThreads", "kElements", *extents]
        if self.block.ownership.packs(self.sweep):
            fibres = self.block.ownership.fibres(self.sweep)
            verb = "quads" if self.quad else "packs"
            type_ = f"const Pack<int, {fibres}>&"
            parameters.append(f"const {self.type_of_owner}& {self.owner.rstrip(', ')}")
            sizes.insert(1, fibres)
            if self.quad:
                sizes.insert(2, self.block.layout.spreads[self.places.position])
        firsts = (f"{FIRST}{x}" if x in self.sweep.places else x for x in self.sweep.lines)
        parameters += [f"{type_} {x}" for x in ("e", *firsts)]
        shape = shape_of((self.block.ownership.elements, *extents))
        return self.text.function(f"{verb}<{listed(sizes)}>(thread", parameters, shape)

    # ---- Several places of a line ----------------------------------------------------------------

    def lines_of(self, value: Value) -> str:
        """The lines along which a thread has several places, and a value of its own at each."""
        places = self.sweep.places
        return "".join(x for x in self.sweep.lines if x in places and x in value.labels)

    def array(self, value: Value) -> str:
        """What values at these places are, as it is declared."""
        sizes = (self.sweep.places[x] for x in self.lines_of(value))
        return self._name_of(value, "a") + "".join(f"[{n}]" for n in sizes)

    def at_place(self, value: Value) -> str:
        numbers = map(self._number, self.lines_of(value))
        return self._name_of(value, "a") + "".join(f"[{x}]" for x in numbers)

    @contextmanager
    def each_number(self, lines: str) -> Iterator[None]:
        """What is printed meanwhile is done for every place along these lines, by its number."""
        with ExitStack() as loops:
            for x in map(self._number, lines):
                self.text("#pragma unroll")
                count = self.sweep.places[x[0]]
                loops.enter_context(self.text.braces(f"for (int {x} = 0; {x} < {count}; ++{x})"))
            yield

    @contextmanager
    def each_place(self, lines: str, past_end: bool) -> Iterator["Registers"]:
        """The same; what is ``past_end`` is done at the last place of a line, else not at all."""
        with self.each_number(lines):
            for x in lines:
                extent, threads = self.sweep.extents[x], self.sweep.threads(x)
                count = self.sweep.places[x]
                place = f"{FIRST}{x}{linear([(self._number(x), threads, count)])}"
                over = threads * count > extent
                last = f"{place} < {extent} ? {place} : {extent - 1}"
                self.text(f"const int {x} = {last if over and past_end else place};")
                if over and not past_end:
                    self.text(f"if ({x} >= {extent}) continue;")
            yield self.inner()

    def _number(self, line: str) -> str:
        """Which of the places along a line."""
        return f"{line}{line}"

    # ---- Loads -----------------------------------------------------------------------------------

    def fibre(self, value: Value) -> str:
        if value in self.fibres:
            return self.fibres[value]
        if value in self.values:
            return f"{self.type_of_fibre(1)}{{{{{self.values[value]}}}}}"
        name = self.named_fibre(value)
        if self.quad and self.places.from_shared(value.tile):
            self.loaded.add(value.tile)
        self.text(f"const auto {name} = {self._loaded_fibre(value)};", shape_of((value.length,)))
        return name

    def _loaded_fibre(self, value: Value) -> str:
        """A fibre as it comes from memory."""
        reading = self.places.reading(value.tile)
        place = reading.place + self.line(value, reading.strides)
        step = self._step(value, reading.strides)
        if reading.component is not None:
            own = self._step(value, reading.component.strides)
            at = f"{reading.component.offset}{self.line(value, reading.component.strides)}"
            load = f"load_gathered<{value.length}, {step}, {own}, {reading.components}>"
            return f"{load}({self.owner}{reading.vector}, {reading.length}, {place}, {at})"
        stride = f", {step}" if value.length > 1 or self.quad else ""
        return f"load<{value.length}{stride}>({self.owner}{place})"

    def source(self, value: Value) -> "Along | None":
        """Where a fibre is in shared memory that only one product reads: it may come in parts."""
        users = [x for x in self.sweep.moves if value in x.operands]
        outers = [x for x in self.sweep.outers if value in x.operands]
        known = value in self.fibres or value in self.values or not value.labels.count(ALONG)
        if known or len(users) > 1 or outers or not self.places.from_shared(value.tile):
            return None
        strides = self.places.reading(value.tile).strides
        place = self.places.reading(value.tile).place + self.line(value, strides)
        return self._along(value, place, strides)

    def target(self, value: Value) -> "Along | None":
        """Where a fibre is stored, if at one place: it may go there in parts."""
        writings = self.places.writings(value.tile)
        if len(writings) != 1 or ALONG not in value.labels:
            return None
        (x,) = writings
        return self._along(value, x.place + self.line(value, x.strides), x.strides, x.guard)

    def _along(
        self, value: Value, place: str, strides: tuple[int, ...], guard: str = ""
    ) -> "Along":
        own = f", {self.owner.rstrip(', ')}" if self.owner else ""
        return Along(self._step(value, strides), place + own, guard)

    def value(self, value: Value) -> str:
        """One value of a fibre."""
        if value in self.values:
            return self.values[value]
        if value in self.fibres:
            return f"{self.fibres[value]}[{self._slot(value)}]"
        literal = self._literal(value.tile)
        if literal:
            self.values[value] = literal
            return literal
        name = self.named_value(value)
        reading = self.places.reading(value.tile)
        place = reading.place + self._point(value, reading.strides)
        made = f"get({place})"
        if reading.component is not None:
            at = f"{reading.component.offset}{self._point(value, reading.component.strides)}"
            where = f"{reading.vector}, {reading.length}, {place}, {at}"
            made = f"gathered<{reading.components}>({where})"
        self.text(f"const auto {name} = {made};")
        return name

    def _literal(self, tile: int) -> str:
        """A finite real constant of one value, to the last bit."""
        constant = self.block.ends.constant(tile)
        if constant is None or constant.size > 1:
            return ""
        value = constant.reshape(-1)[0]
        if value.dtype.kind != "f" or not np.isfinite(value):
            return ""
        return f"{self.block.type}({float(value).hex()})"

    # ---- Stores ----------------------------------------------------------------------------------

    def store_fibre(self, value: Value, name: str) -> None:
        for x in self.places.writings(value.tile):
            step = self._step(value, x.strides)
            stride = f"<{step}>" if value.length > 1 or self.quad else ""
            place = x.place + self.line(value, x.strides)
            self.text(
                f"{x.guard}store{stride}({self.owner}{place}, {name});", shape_of((value.length,))
            )

    def store_value(self, value: Value, name: str) -> None:
        """One value of a fibre."""
        put = f"put({self.owner}"
        if self.quad:
            put = f"put<{value.length}>({self.quad}{self._slot(value)}, "
        for x in self.places.writings(value.tile):
            place = x.place + self._point(value, x.strides)
            self.text(f"{x.guard}{put}{place}, {name});")

    # ---- Places of values in a tile --------------------------------------------------------------

    def line(self, value: Value, strides: tuple[int, ...]) -> str:
        """Where a fibre starts."""
        return linear(
            (x, strides[value.labels.index(x)], self.sweep.extents[x])
            for x in self.sweep.lines
            if x in value.labels
        )

    def _step(self, value: Value, strides: tuple[int, ...]) -> int:
        """The stride along a fibre."""
        return strides[value.labels.index(ALONG)] if ALONG in value.labels else 0

    def _point(self, value: Value, strides: tuple[int, ...]) -> str:
        along = [(POINT, self._step(value, strides), value.length)]
        return self.line(value, strides) + linear(along)
