"""Products of two tiles of an element: of each element, or added up in registers for all."""

from contextlib import ExitStack

from jaxmagma.lowering.cuda.schedule.gemms import blocking_of
from jaxmagma.lowering.cuda.schedule.sweeps import Accumulation, Gemm
from jaxmagma.lowering.cuda.source.places import Places
from jaxmagma.lowering.cuda.source.text import Text, linear, listed, loop_names, shape_of
from jaxmagma.plans.plan import Rearrange


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
            if isinstance(step, Rearrange):
                left = piece(step.operand, step.labels, "", 1)
                right = f"Fibre<{block.type}, 1>{{{{{block.type}{{1}}}}}}"
            else:
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
