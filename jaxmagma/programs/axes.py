"""Axes of values that are one and the same: those that have one label, or a part of each other."""

from collections.abc import Iterable


Axis = tuple[int, ...]  # of a value, by its number; what else there is tells one from another


class JoinedAxes:
    """Axes that are joined two by two; the root of one is the same for all that it is joined with.

    Union-find without ranks: programs have few axes, and join most of them in their order.
    """

    def __init__(self) -> None:
        self._parent: dict[Axis, Axis] = {}

    def root(self, axis: Axis) -> Axis:
        while axis in self._parent:
            axis = self._parent[axis]
        return axis

    def join(self, x: Axis, y: Axis) -> None:
        x, y = self.root(x), self.root(y)
        if x != y:
            self._parent[y] = x

    def join_labelled(self, terms: Iterable[tuple[int, str]]) -> None:
        """Joins axes of values that have one label."""
        first: dict[str, Axis] = {}
        for value, labels in terms:
            for axis, label in enumerate(labels):
                self.join(first.setdefault(label, (value, axis)), (value, axis))
