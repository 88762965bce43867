"""Products of two tiles of an element: of each element, or added up in registers for all; sums."""

import itertools
from contextlib import ExitStack

from jaxmagma.lowering.cuda.schedule.gemms import blocking_of
from jaxmagma.lowering.cuda.schedule.sweeps import Accumulation, Gemm, Total
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.text import Text, linear, listed, loop_names, shape_of


def print_gemm(text: Text, places: Places, stage: Gemm) -> None:
    """Each thread has a block of the result, and adds to it along what is contracted."""
    block, step = places.block, stage.step
    extents, names = step.extents, loop_names(step.extents)
    blocking = blocking_of(step, block.ends.dtype.itemsize)

    def piece(tile: int, labels: str, label: str, length: int) -> str:
        """The part of a tile that a block has along ``label``, if any."""
        reading = places.reading(tile)
        strides = dict(zip(labels, reading.strides, strict=True))
        at = linear((names[x], s, extents[x]) for x, s in strides.items() if x != label)
        if not label:
            return f"load<1>({reading.place}{at})"
        return (
            f"load_piece<{extents[label]}, {length}, {strides[label]}>"
            f"({reading.place}{at}, {names[label]})"
        )

    sizes = listed(("kThreads", "kElements", *(n for _, n in blocking.lines)))
    parameters = ["int e", *(f"int {names[x]}" for x, _ in blocking.lines)]
    lines = shape_of((block.ownership.elements, *(n for _, n in blocking.lines)))
    with text.function(f"lines<{sizes}>(thread", parameters, lines):
        r, shape = f"r{stage.number}", shape_of((blocking.rows, blocking.columns))
        text(f"Block<{block.type}, {blocking.rows}, {blocking.columns}> {r};", shape)
        text(f"zero({r});")
        with ExitStack() as loops:
            contracted = [x for x in extents if x not in step.output_labels]
            for label in contracted:
                if label == contracted[-1]:
                    text(f"#pragma unroll {min(4, extents[label])}")
                x = names[label]
                loops.enter_context(
                    text.braces(f"for (int {x} = 0; {x} < {extents[label]}; ++{x})")
                )
            left = piece(step.left, step.left_labels, blocking.row, blocking.rows)
            right = piece(step.right, step.right_labels, blocking.column, blocking.columns)
            text(f"const auto left = {left};", shape_of((blocking.rows,)))
            text(f"const auto right = {right};", shape_of((blocking.columns,)))
            text(f"gemm({r}, left, right);", shape)
        cut = (blocking.row, blocking.column)
        where = listed(names.get(x, 0) for x in cut)
        for writing in places.writings(stage.number):
            strides = dict(zip(step.output_labels, writing.strides, strict=True))
            at = linear((names[x], s, extents[x]) for x, s in strides.items() if x not in cut)
            sizes = listed([extents.get(x, 1) for x in cut] + [strides.get(x, 0) for x in cut])
            text(f"{writing.guard}store<{sizes}>({writing.place}{at}, {r}, {where});", shape)


def print_total(text: Text, places: Places, stage: Total) -> None:
    """Lanes of a warp have some of the terms each, and one of them stores the sum."""
    step = stage.step
    extents, names = step.extents, loop_names(step.extents)
    reading = places.reading(step.operand)
    strides = dict(zip(step.labels, reading.strides, strict=True))
    at = linear((names[x], strides[x], n) for x, n in stage.lines if x in strides)
    summed = [(extents[x], strides[x]) for x in stage.summed]
    if all(x == n * y for (_, x), (n, y) in itertools.pairwise(summed)):
        at += linear([("term", summed[-1][1], stage.terms)])  # they follow each other
    else:
        inner = stage.terms
        for n, stride in summed:
            inner //= n
            at += linear([(f"(term / {inner} % {n})", stride, n)])
    sizes = listed(("kThreads", stage.lanes, stage.terms, "kElements", *dict(stage.lines).values()))
    own = ["int e", *(f"int {names[x]}" for x, _ in stage.lines)]
    r, value = f"r{stage.number}", f"get({reading.place}{at})"
    text(f"const auto terms{stage.number} = [&](int term, {listed(own)}) {{ return {value}; }};")
    with text.function(
        f"totals<{sizes}>(thread, terms{stage.number}",
        (f"{places.block.type} {r}", *own),
        shape_of((places.block.ownership.elements, *(n for _, n in stage.lines))),
    ):
        for writing in places.writings(stage.number):
            to = dict(zip(step.output_labels, writing.strides, strict=True))
            where = linear((names[x], to[x], n) for x, n in stage.lines)
            text(f"{writing.guard}put({writing.place}{where}, {r});")


def print_accumulation(text: Text, places: Places, stage: Accumulation) -> None:
    """Each warp has pieces of the sum, and goes through the elements with tensor cores."""
    step = stage.step
    extents, names = step.extents, loop_names(step.extents)
    outer, inner = stage.contracted[:-1], stage.contracted[-1]
    along: list[int] = []
    steps: list[int] = []
    operands: list[str] = []
    for tile, labels, own in (
        (step.left, step.left_labels, step.rows),
        (step.right, step.right_labels, step.columns),
    ):
        reading = places.reading(tile)
        strides = dict(zip(labels, reading.strides, strict=True))
        along.append(strides[own])
        steps.append(strides[inner])
        operands.append(reading.place + linear((names[x], strides[x], extents[x]) for x in outer))
    terms = listed((*along, *steps, extents[inner]))
    sizes = listed((f"Terms<{terms}>", "kThreads", *(extents[x] for x in outer)))
    with text.function(
        f"accumulate<{sizes}>(sum{stage.output}, thread, slice",
        ("int e", *(f"int {names[x]}" for x in outer)),
        shape_of((extents[step.rows], extents[step.columns])),
    ):
        text(f"return operands<{places.block.type}>({listed(operands)});")
