"""The order in which the factors of a contraction are multiplied, two at a time.

``opt_einsum``'s dynamic programming finds it under our cost model.

**Cost model.**  A step costs its multiply-adds *per element*.  Work on shared operands alone is
done once for all elements, so it is as good as free, but it is not free of consequences:
multiplying two bases makes a larger one.  Both follow from giving the batch a symbolic label with
a large extent.

The natural order of an operator is that tiles go through their bases one by one, meet at the
points, each other and weights there, and go back: fibre by fibre, in registers.  Another one has to
be cheaper by more than a tenth, where a shared operand counts as loads if each of its values is
multiplied once, as those of a basis times weights are.  (``opt_einsum`` counts no loads, and a
multiplication alone like one with an addition.)

**Order of a sum factorisation.**  The mode products of a tensor-product operator,
``B_x B_y B_z u``, commute and usually cost the same in any order.  On the way in, the slowest axis
of the tile goes first and the one after it last, and on the way out the other way round: the first
contraction then reads memory along its fastest axes, the last one writes along them, and the two
in the middle work on the same fibres, which never leave the registers of a fused kernel.  It is the
axis after the slowest one that has its turn in the ``middle``, or the slowest or the fastest one.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import opt_einsum


# The extent the cost model gives to the batch: any number much larger than a tile.
_MANY_ELEMENTS = 1 << 20
# How much more the natural order may cost.
_NATURAL = 1.1
# Dynamic programming looks at up to 2**n subsets of n terms: a tenth of a second for this many.
_MANY_TERMS = 10

# The axis on which the two sweeps in the middle of an operator work.
Middle = Literal["second", "slowest", "fastest"]


@functools.lru_cache(maxsize=1024)
def contraction_order(
    terms: tuple[str, ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    batched: tuple[bool, ...],
    computed: tuple[bool, ...] = (),
    middle: Middle = "second",
    narrow: bool = False,
) -> tuple[tuple[int, int], ...]:
    """The pairwise order of an n-ary contraction under the cost model.

    If ``narrow``, one in which no step makes a tile larger than all terms and the result, if any.

    ``sizes`` are the extents of the labels and ``batched`` says which terms differ from element to
    element, ``computed`` which are made by the program: what starts from one is on its way out.
    Pair ``p`` makes number ``len(terms) + p``.
    """
    extents = dict(sizes)
    pairs = list(_cheapest_pairs(terms, output, sizes, batched, narrow))
    return _modes_in_order(terms, output, extents, batched, computed, pairs, middle)


@functools.lru_cache(maxsize=1024)
def _cheapest_pairs(
    terms: tuple[str, ...],
    output: str,
    sizes: tuple[tuple[str, int], ...],
    batched: tuple[bool, ...],
    narrow: bool,
) -> tuple[tuple[int, int], ...]:
    """The same, runs of commuting mode products in any order."""
    extents = dict(sizes)
    batch = opt_einsum.get_symbol(max((ord(x) for x in "".join(terms) + output), default=0) + 1)
    inputs = [
        frozenset(labels + batch if many else labels)
        for labels, many in zip(terms, batched, strict=True)
    ]
    result = frozenset(output + batch if any(batched) else output)
    optimizer = opt_einsum.DynamicProgramming(minimize="flops")
    if len(terms) > _MANY_TERMS:
        optimizer = opt_einsum.paths.greedy
    widest = widest_tile(terms, output, extents)
    every = {**extents, batch: _MANY_ELEMENTS}
    try:
        path = optimizer(inputs, result, every, widest * _MANY_ELEMENTS if narrow else None)
    except RuntimeError:  # no order is so narrow
        path = optimizer(inputs, result, every)
    alive = list(range(len(terms)))
    pairs: list[tuple[int, int]] = []
    for positions in path:
        # A step of a path may also be one term alone, or more than two.
        made, *others = [alive[position] for position in positions]
        alive = [n for n in alive if n not in (made, *others)]
        for other in others:
            pairs.append((made, other))
            made = len(terms) + len(pairs) - 1
        alive.append(made)
    natural = _by_modes(terms, output, batched)
    if natural is not None:
        (found, _), (usual, tile) = (
            _cost(terms, output, extents, batched, x) for x in (pairs, natural)
        )
        if usual <= _NATURAL * found and not (narrow and tile > widest):
            pairs = natural
    return tuple(pairs)


def _by_modes(
    terms: tuple[str, ...], output: str, batched: tuple[bool, ...]
) -> list[tuple[int, int]] | None:
    """The order in which no tile but one meets another before all of its bases have been applied.

    None, if the shared terms are no bases, or some of them cannot be applied so.
    """
    alive = {n: set(x) for n, x in enumerate(terms)}
    pairs: list[tuple[int, int]] = []

    def multiply(left: int, right: int, made: set[str]) -> None:
        alive[len(terms) + len(pairs)] = made
        pairs.append((left, right))
        del alive[left], alive[right]

    def apply_basis() -> bool:
        for matrix, tile in itertools.product(alive, alive):
            if matrix >= len(terms) or batched[matrix] or (tile < len(terms) and not batched[tile]):
                continue
            lost, new = alive[matrix] & alive[tile], alive[matrix] - alive[tile]
            others = set(output).union(*(x for n, x in alive.items() if n not in (matrix, tile)))
            if len(lost) == len(new) == 1 and not lost & others:
                multiply(matrix, tile, alive[tile] - lost | new)
                return True
        return False

    while len(alive) > 1:
        if apply_basis():
            continue
        tiles = [n for n in alive if n >= len(terms) or batched[n]]
        if len(tiles) == 1:
            weights = (n for n in alive if n not in tiles and alive[n] <= alive[tiles[0]])
            tiles = [*weights, *tiles]
        if len(tiles) < 2:
            return None
        left, right = tiles[-2:]
        later = set(output).union(*(x for n, x in alive.items() if n not in (left, right)))
        multiply(left, right, (alive[left] | alive[right]) & later)
    return pairs if next(iter(alive.values())) == set(output) else None


def widest_tile(terms: Iterable[str], output: str, extents: Mapping[str, int]) -> int:
    """The values of the largest tile that a contraction has to do with."""
    return max(math.prod(extents[x] for x in labels) for labels in (*terms, output))


def _cost(
    terms: tuple[str, ...],
    output: str,
    extents: Mapping[str, int],
    batched: tuple[bool, ...],
    pairs: Sequence[tuple[int, int]],
) -> tuple[int, int]:
    """The operations of an order for each element, and the values of the largest tile it makes.

    A value of a shared operand is loaded for each of its multiplications, unless it is multiplied
    with a whole fibre or more of an element.
    """
    alive = {n: (set(x), batched[n]) for n, x in enumerate(terms)}
    total = largest = 0
    for number, pair in enumerate(pairs, start=len(terms)):
        (left, many), (right, more) = (alive.pop(x) for x in pair)
        later = set(output).union(*(x for x, _ in alive.values()))
        made = (left | right) & later
        if many or more:
            adds = bool((left | right) - made)
            loads = not (many and more) and bool(left & right & made)
            total += (1 + adds + loads) * math.prod(extents[x] for x in left | right)
            largest = max(largest, math.prod(extents[x] for x in made))
        alive[number] = made, many or more
    return total, largest


def _modes_in_order(
    terms: Sequence[str],
    output: str,
    extents: dict[str, int],
    batched: Sequence[bool],
    computed: Sequence[bool],
    pairs: list[tuple[int, int]],
    middle: Middle,
) -> tuple[tuple[int, int], ...]:
    """Reorders runs of commuting mode products; see the module's docstring."""
    count = len(terms)
    labels: list[str] = list(terms)
    for position, (left, right) in enumerate(pairs):
        consumed = {x for pair in pairs[: position + 1] for x in pair}
        later = output + "".join(x for n, x in enumerate(labels) if n not in consumed)
        kept = dict.fromkeys(labels[left] + labels[right])
        labels.append("".join(x for x in kept if x in later))

    def mode(position: int) -> tuple[int, int] | None:
        """The (matrix, tile) of a mode product: a shared matrix that replaces one label."""
        for matrix, tile in (pairs[position], pairs[position][::-1]):
            if matrix < count and not batched[matrix] and len(set(terms[matrix])) == 2:
                made = labels[count + position]
                lost = [x for x in terms[matrix] if x in labels[tile] and x not in made]
                new = [x for x in terms[matrix] if x in made and x not in labels[tile]]
                if len(lost) == len(new) == 1:
                    return matrix, tile
        return None

    def unweighted(number: int) -> int:
        """The tile that one is, before it was multiplied by weights."""
        if number >= count:
            for weights, tile in (pairs[number - count], pairs[number - count][::-1]):
                if weights < count and not batched[weights] and labels[tile] == labels[number]:
                    return unweighted(tile)
        return number

    ordered = list(pairs)
    position = 0
    while position < len(pairs):
        run, links = [], []
        found, link = mode(position), position
        start = found[1] if found else 0
        while found is not None:
            run.append(found[0])
            links.append(link)
            link = next((n for n, pair in enumerate(pairs) if count + link in pair), len(pairs))
            found = mode(link) if link < len(pairs) else None
            if found is not None and found[1] != count + links[-1]:
                found = None
            # Modes that act on a label made earlier in the run do not commute with it.
            if found is not None and not set(terms[found[0]]) & set(labels[start]):
                found = None
        if len(run) > 1:
            made = output if links[-1] == len(pairs) - 1 else labels[count + links[-1]]
            origin = unweighted(start)
            way_in = start < count and not (computed and computed[start])
            # What is computed has its own order of axes; what is asked for may have any.
            way_out = labels[start] if origin < count else made
            matrices = [terms[m] for m in run]
            best = _best_run(matrices, labels[start], way_out, extents, way_in, middle)
            tile = start
            for link, choice in zip(links, best, strict=True):
                ordered[link] = (run[choice], tile)
                tile = count + link
        position = max([position, *links]) + 1
    return tuple(ordered)


def _best_run(
    matrices: list[str],
    start: str,
    made: str,
    extents: dict[str, int],
    way_in: bool,
    middle: Middle,
) -> tuple[int, ...]:
    """The cheapest order of commuting mode products; among equals, the one memory likes best."""
    tile = start if way_in else made
    axis = [next(tile.index(x) for x in m if x in tile) for m in matrices]
    slowest_first = sorted(range(len(matrices)), key=axis.__getitem__)
    slowest, *others = slowest_first
    favourite = {
        "second": [slowest, *reversed(others)],
        "slowest": [*others, slowest],
        "fastest": [slowest, *others],
    }[middle]
    if not way_in:
        favourite.reverse()

    def cost(order: tuple[int, ...]) -> tuple[int, list[int]]:
        flops, alive = 0, set(start)
        for choice in order:
            alive |= set(matrices[choice])
            flops += math.prod(extents[x] for x in alive)
            alive -= set(matrices[choice]) & set(start)
        return flops, [favourite.index(choice) for choice in order]

    # Beyond five modes the order that opt_einsum found is kept: 6! permutations cost more.
    if len(matrices) > 5:
        return tuple(range(len(matrices)))
    return min(itertools.permutations(range(len(matrices))), key=cost)
