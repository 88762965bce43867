"""Which axes of tiles are one, and which of them are long, or over rows of an element.

Long axes are those that tables shared by all elements are applied along, or make. Where nothing is
summed, taken apart or put together along the first axes of operands and results, such as channels
or points, those are more axes over elements: an element has so many *rows*, which are computed
alike. What all elements share, or what an element has one of, may have no such axes.
"""

import itertools

from jaxmagma.lowering.cuda.panels.association import SHORTEST
from jaxmagma.plans.plan import Plan, Pointwise, Product, Rearrange
from jaxmagma.programs.axes import Axis, JoinedAxes
from jaxmagma.programs.program import Gather, Place, View
from jaxmagma.programs.strides import box_of


class Axes(JoinedAxes):
    """Which axes of tiles are one, and long.

    Those of a table are of one kind wherever it is used, if they are ``joined``. The axis with the
    number ``short`` would be long and is none. If elements have ``rows``, operands are ``common``
    that have no axis over them.
    """

    def __init__(
        self,
        plan: Plan,
        apart: bool,
        joined: bool = True,
        short: int | None = None,
        rows: bool = True,
    ) -> None:
        super().__init__()
        candidates = self._join_axes(plan, joined)
        long = [x for x in candidates if plan.tiles[x[0]].shape[x[1]] >= SHORTEST and not apart]
        roots = dict.fromkeys(map(self.root, long))
        if short is not None:
            del roots[list(roots)[short]]
        self._numbers = {root: n for n, root in enumerate(roots)}
        self.extents = tuple(plan.tiles[x[0]].shape[x[1]] for x in roots)
        self._rows = self._of_rows(plan) if rows else []
        operands = range(len(plan.program.inputs) if self._rows else 0)
        batched = (n for n in operands if plan.tiles[n].batched)
        self.common = frozenset(n for n in batched if not self._has_rows(plan, n))
        self.rows = tuple(plan.tiles[x].shape[n] for x, n in self._rows)

    def _join_axes(self, plan: Plan, joined: bool) -> list[Axis]:
        """Joins what is one axis of several tiles; axes that may be long."""
        candidates: list[Axis] = []
        for number, step in plan.numbered_steps():
            if isinstance(step, Product | Rearrange | Pointwise):
                first: dict[str, Axis] = {}
                for tile, labels in (*step.terms, (number, step.output_labels)):
                    # An axis of a table, and the step that reads it if each has its own.
                    own = () if joined or plan.tiles[tile].batched else (number,)
                    for axis, label in enumerate(labels):
                        one = (tile, axis, *own)
                        self.join(first.setdefault(label, one), one)
                if isinstance(step, Product):
                    candidates += [first[x] for x in _of_tables(plan, step)]
            elif isinstance(step, Gather):
                rank = len(plan.tiles[step.index].shape)
                for axis in range(rank):
                    self.join((step.index, axis), (number, axis))
                for axis in range(1, len(plan.tiles[step.vector].shape)):
                    self.join((step.vector, axis), (number, rank + axis - 1))
            else:
                for whole, part, offset, strides in _parts(number, step):
                    shapes = plan.tiles[whole].shape, plan.tiles[part].shape
                    box = box_of(shapes[0], offset, strides, shapes[1])
                    for axis, (start, by, count, position) in enumerate(box or ()):
                        if (start, by, count) == (0, 1, shapes[0][axis]) and position is not None:
                            self.join((whole, axis), (part, position))
        return candidates

    def of(self, tile: int, axis: int) -> int | None:
        """The number of the long axis that an axis of a tile is, if it is one."""
        return self._numbers.get(self.root((tile, axis)))

    def is_of_rows(self, tile: int, axis: int) -> bool:
        """Whether an axis of a tile is over rows of an element."""
        return self.root((tile, axis)) in self._rows

    def _has_rows(self, plan: Plan, tile: int) -> bool:
        return any(self.is_of_rows(tile, axis) for axis in range(len(plan.tiles[tile].shape)))

    def _of_rows(self, plan: Plan) -> list[Axis]:
        """The axes over rows: the first ones of every operand and result."""
        result, shapes = plan.results[0], tuple(plan.tiles[x].shape for x in plan.results)
        if plan.program.batch_rank != 1 or any(isinstance(x, Gather) for x in plan.steps):
            return []
        if shapes != plan.shapes:
            return []  # arrays have other axes
        found = (self.root((result, axis)) for axis in range(len(plan.tiles[result].shape)))
        rows = list(itertools.takewhile(lambda x: self._is_over_rows(plan, x), found))
        follow = (self._follow_each_other(plan, n, rows) for n in range(len(plan.tiles)))
        return rows if all(follow) else []

    def _is_over_rows(self, plan: Plan, root: Axis) -> bool:
        """Whether all results have an axis at one place, and so have some operands, if not all."""
        if root in self._numbers:
            return False
        where = [
            [n for n in range(len(tile.shape)) if self.root((number, n)) == root]
            for number, tile in enumerate(plan.tiles)
        ]
        # Nothing is summed along it, or put together.
        for number, step in plan.numbered_steps():
            if bool(where[number]) != any(where[x] for x in step.operands):
                return False
        operands = [n for n in range(len(plan.program.inputs)) if plan.tiles[n].batched]
        having = [tuple(where[n]) for n in operands if where[n]]
        ends = {*having, *(tuple(where[n]) for n in plan.results)}
        return bool(having) and len(ends) == 1 and all(len(x) < 2 for x in where)

    def _follow_each_other(self, plan: Plan, tile: int, rows: list[Axis]) -> bool:
        """Whether a tile is the same for all rows, or has one after the other.

        Where tables are applied, several lanes have a row: what differs by rows alone is nowhere.
        """
        own = [self.root((tile, n)) for n in range(len(plan.tiles[tile].shape))]
        axes = [n for n, x in enumerate(own) if x in rows]
        batched = plan.tiles[tile].batched
        if not axes:
            return not (batched and self.extents)
        if batched and tile >= len(plan.program.inputs) and tile not in plan.results:
            return len(axes) == len(rows)
        first = axes[0]
        follow = own[first : first + len(rows)] == rows == [own[n] for n in axes]
        return follow and (batched or not self.extents)


def _parts(number: int, step: View | Place) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """The tile that is whole, the one that is part of it, and where."""
    if isinstance(step, View):
        return [(step.operand, number, step.offset, step.strides)]
    return [(number, part, offset, strides) for part, offset, strides in step.pieces]


def _of_tables(plan: Plan, step: Product) -> list[str]:
    """Labels of axes that a table is applied along, or makes."""
    tables = [(x, labels) for x, labels in step.terms if not plan.tiles[x].batched]
    if len(tables) != 1:
        return []
    ((_, labels),) = tables
    return [x for x in labels if x not in step.paired]
