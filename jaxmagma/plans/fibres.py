"""How tiles stand between the matrices that are applied to them.

A matrix is applied to fibres.  What is read along the slowest axis of a tile and written along the
fastest one, neighbouring threads read side by side, and each writes a row of.  So the axis that a
matrix makes at one end of a tile stands at the other end: the next one has its turn where that was,
and after the last one all are in order again.

What meets a tile in memory point by point stands as that does; but the fibres that a matrix makes
in the middle are rows there, too.
"""

from collections.abc import Sequence

from jaxmagma.programs.program import Contract, ElementProgram, Map, Operation, contraction


def turned(program: ElementProgram, operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a program with their values standing so."""
    first = len(program.inputs)
    memory = _in_memory(program, operations)
    meeting = _meeting(program, operations, memory)
    order: dict[int, list[int]] = {}  # of values that may stand otherwise: where each axis was
    found: list[Operation] = []
    for number, operation in enumerate(operations, start=first):
        if not isinstance(operation, Contract | Map):
            found.append(operation)
            continue
        terms = [
            (x, "".join([own[n] for n in order[x]]) if x in order else own)
            for x, own in operation.terms
        ]
        output = operation.output
        if number not in memory:
            labels = [own for _, own in terms]
            if isinstance(operation, Contract):
                output = _of_matrix(program, operation, labels, number in meeting)
            elif number not in meeting:
                output = next((x for x in labels if set(x) == set(output)), output)
            order[number] = [operation.output.index(x) for x in output]
        if isinstance(operation, Contract):
            found.append(contraction(terms, output, operation.extents))
        else:
            found.append(Map(operation.function, tuple(terms), output, operation.sizes))
    return tuple(found)


def _in_memory(program: ElementProgram, operations: Sequence[Operation]) -> set[int]:
    """Operands, results, and what is moved: their axes have an order."""
    first = len(program.inputs)
    found = {*range(first), *(out.value for out in program.outputs)}
    for number, operation in enumerate(operations, start=first):
        if not isinstance(operation, Contract | Map):
            found.update((number, *operation.operands))
    return found


def _meeting(
    program: ElementProgram, operations: Sequence[Operation], memory: set[int]
) -> set[int]:
    """What a pointwise function has together with a tile in memory, or with what does."""
    groups = [
        {x for x in (number, *operation.operands) if len(program.tiles[x]) > 1}
        for number, operation in enumerate(operations, start=len(program.inputs))
        if isinstance(operation, Map)
    ]
    found, before = {*memory}, 0
    while before < len(found):
        before = len(found)
        for group in groups:
            if not found.isdisjoint(group):
                found |= group
    return found


def _of_matrix(
    program: ElementProgram, product: Contract, terms: Sequence[str], meeting: bool
) -> str:
    """The labels of a matrix's result in their order; of any other contraction as they are."""
    batched = [n for n, x in enumerate(product.operands) if program.batch[x]]
    if len(terms) != 2 or len(batched) != 1:
        return product.output
    tile, matrix = terms[batched[0]], terms[1 - batched[0]]
    lost, made = set(tile).difference(product.output), set(product.output).difference(tile)
    if len(lost) != 1 or len(made) != 1 or lost | made != set(matrix):
        return product.output
    kept = [x for x in tile if x not in lost]
    at, last = tile.index("".join(lost)), len(kept)
    if meeting:
        at = last if at else 0
    elif at in (0, last):
        at = last - at
    return "".join([*kept[:at], *made, *kept[at:]])
