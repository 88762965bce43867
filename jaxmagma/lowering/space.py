"""What may vary of the kernels of a backend, and the values it may have.

A dimension is one parameter of the backend's ``Parameters``, or several that only make sense
together. Its first value is the default, and the others stand in the order in which they are tried,
which matters where time is short.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxmagma.choices import Value


Point = tuple[int, ...]  # for each dimension the number of its value


@dataclass(frozen=True)
class Dimension:
    """Parameters that vary together, and the values they may have together."""

    names: tuple[str, ...]
    values: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        if any(len(value) != len(self.names) for value in self.values):
            raise ValueError(f"{', '.join(self.names)}: a value of each is needed")


@dataclass(frozen=True)
class Space:
    """All combinations of the values of some dimensions, and plain JAX if that is worth a try."""

    dimensions: tuple[Dimension, ...]
    plain: bool = False

    @property
    def size(self) -> int:
        return math.prod(len(dimension.values) for dimension in self.dimensions)

    @property
    def origin(self) -> Point:
        """Every parameter at its default."""
        return (0,) * len(self.dimensions)

    def points(self) -> Iterator[Point]:
        return itertools.product(*(range(len(x.values)) for x in self.dimensions))

    def neighbours(self, point: Point) -> Iterator[Point]:
        """The points that differ in one dimension: first values of all dimensions come first."""
        for value in range(max(len(dimension.values) for dimension in self.dimensions)):
            for n, dimension in enumerate(self.dimensions):
                if value < len(dimension.values) and value != point[n]:
                    yield (*point[:n], value, *point[n + 1 :])

    def point(self, parameters: Mapping[str, Value]) -> Point | None:
        """Where given parameters are, those that are missing at their defaults."""
        found: list[int] = []
        known = {name for dimension in self.dimensions for name in dimension.names}
        if not parameters.keys() <= known:
            return None
        for x in self.dimensions:
            value = tuple(
                parameters.get(name, default)
                for name, default in zip(x.names, x.values[0], strict=True)
            )
            if value not in x.values:
                return None
            found.append(x.values.index(value))
        return tuple(found)

    def parameters(self, point: Point) -> dict[str, Value]:
        """Those that are not at their defaults."""
        return {
            name: value
            for n, dimension in zip(point, self.dimensions, strict=True)
            for name, value, default in zip(
                dimension.names, dimension.values[n], dimension.values[0], strict=True
            )
            if value != default
        }


def one(name: str, *values: Value) -> Dimension:
    """A parameter that varies by itself."""
    return Dimension((name,), tuple((value,) for value in values))


def together(*names: str, values: tuple[tuple[Value, ...], ...]) -> Dimension:
    """Parameters of which not every combination makes sense."""
    return Dimension(names, values)
