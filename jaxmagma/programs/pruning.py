"""Programs without the values that nobody reads."""

from collections.abc import Sequence
from dataclasses import replace

from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import ElementProgram, Gather, Input, Operation, renumbered


def needed(values: Sequence[Input | Operation], results: set[int]) -> list[int]:
    """The values that results are made of, themselves among them, in order."""
    needed = set(results)
    for number in reversed(range(len(values))):
        if number in needed:
            needed.update(values[number].operands)
    return sorted(needed)


@remembered
def without_tables(
    program: ElementProgram, gathers: frozenset[int] | None = None
) -> tuple[ElementProgram, tuple[int, ...]]:
    """The same values without the tables of gathers, which only their transposes read.

    Of all gathers, or of those that make the given values.  Also says which arguments are left.
    """
    first, count = len(program.inputs), len(program.arguments)
    changed = [
        replace(x, tables=(), atomic=False)
        if isinstance(x, Gather) and (gathers is None or n in gathers)
        else x
        for n, x in enumerate(program.operations, start=first)
    ]
    read = {x for operation in changed for x in operation.operands}
    read.update(out.value for out in program.outputs)
    tables = {x for y in program.operations if isinstance(y, Gather) for x in y.tables}
    kept = [n for n in range(first) if n not in tables or n in read]
    if changed == list(program.operations) and len(kept) == first:
        return program, tuple(range(count))
    numbers = {old: new for new, old in enumerate([*kept, *range(first, first + len(changed))])}
    stripped = replace(
        program,
        inputs=tuple(program.inputs[n] for n in kept),
        operations=tuple(renumbered(x, numbers) for x in changed),
        outputs=tuple(replace(x, value=numbers[x.value]) for x in program.outputs),
    )
    arguments = [n for n, operand in enumerate(program.inputs) if operand.constant is None]
    return stripped, tuple(position for position, n in enumerate(arguments) if n in kept)
