"""Which of two orders of a sum factorisation touches memory in longer rows.

Threads side by side own fibres side by side.  What lies along the slowest axis of a tile in global
memory they touch in whole rows, along any other axis in pieces as long as what is behind that axis.
So the slowest axis belongs to the sweep that has the most to do with memory: to the first and the
last one of an operator, which read and write its vectors, or to the one in the middle, which reads
what stands at the points.

If the copy engine brings that in rows (see ``transfers.streams``), the fastest axis belongs there,
and the slowest one to the first and the last sweep.
"""

from jaxmagma.plans import factoring
from jaxmagma.plans.plan import Plan, Pointwise, Product
from jaxmagma.programs.normal import with_blocks_apart
from jaxmagma.programs.program import ElementProgram, View
from jaxmagma.programs.strides import row_major


def planned(program: ElementProgram) -> Plan:
    """The plan whose threads touch the least memory in pieces."""
    program = with_blocks_apart(program)
    plain = factoring.planned(program)
    if not in_pieces(plain):
        return plain
    turned = factoring.planned(program, middle="slowest")
    return min(plain, turned, key=lambda x: (x.flops, in_pieces(x)))


def in_pieces(plan: Plan) -> int:
    """The values of an element that sweeps read or write along another axis than the slowest."""
    along: dict[int, int] = {}  # of tiles that sweeps make: the axis of their fibres
    touched: set[int] = set()

    def meets(tile: int, labels: str, label: str) -> None:
        """A sweep along ``label`` has a tile as an operand."""
        strides = _strides(plan, tile)
        if strides is not None and label in labels:
            if labels.index(label) != strides.index(max(strides)):
                touched.add(tile)

    for number, step in plan.numbered_steps():
        if not isinstance(step, Product | Pointwise):
            continue
        operands, labels = step.operands, _labels(step)
        batched = [x for x in operands if plan.tiles[x].batched]
        if isinstance(step, Product) and len(batched) == 1:
            matrix = step.left_labels if batched == [step.right] else step.right_labels
            new = [x for x in matrix if x in step.output_labels]
            lost = [x for x in matrix if x in step.contracted]
            if len(new) == len(lost) == 1:
                meets(batched[0], labels[operands.index(batched[0])], lost[0])
                along[number] = step.output_labels.index(new[0])
            continue
        owned = [own[along[x]] for x, own in zip(operands, labels, strict=True) if x in along]
        if owned and owned[0] in step.output_labels:
            for tile, own in zip(operands, labels, strict=True):
                meets(tile, own, owned[0])
            along[number] = step.output_labels.index(owned[0])
    touched.update(x for x in plan.results if along.get(x))
    return sum(plan.tiles[x].size for x in touched)


def _labels(step: Product | Pointwise) -> tuple[str, ...]:
    """Those of the operands."""
    return step.labels if isinstance(step, Pointwise) else (step.left_labels, step.right_labels)


def _strides(plan: Plan, tile: int) -> tuple[int, ...] | None:
    """Where the values of a batched operand, or of a part of one, lie in memory."""
    first = len(plan.program.inputs)
    if not plan.tiles[tile].batched or not plan.tiles[tile].shape:
        return None
    if tile < first:
        return row_major(plan.tiles[tile].shape)
    step = plan.steps[tile - first]
    return step.strides if isinstance(step, View) and step.operand < first else None
