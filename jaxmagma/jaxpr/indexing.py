"""Windows and single values at places which are known, or of which each is looked at."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jaxmagma.jaxpr.equations import Unsupported, aval
from jaxmagma.jaxpr.tiles import MOST_COMPONENTS, MOST_PIECES, MOST_PLACES, Read, Tile, Tiles
from jaxmagma.programs.builder import MOST_MERGED
from jaxmagma.programs.integers import is_integer
from jaxmagma.programs.labels import letters


# Places among which a computed index chooses, and values along an axis that are sorted.
_MOST_PLACES = 16
# Values of a tile of which it is found out which ones are at places that are known.
_MOST_KNOWN = 4096
# Where a window begins along an axis, and the labels that has.
Start = tuple[Read, str]


def _window(
    reader: Tiles,
    x: Read,
    sizes: Sequence[int],
    starts: Mapping[int, Start],
    named: Sequence[str | None],
    output: str,
    tile: tuple[int, ...],
) -> Read:
    """A window that begins at places which are computed: one of all there may be, by selecting.

    A start is moved to where all of the window is inside. The axes are ``named`` as in ``output``;
    what is not named has one place.
    """
    shape = reader.shape(x)
    places: dict[int, range] = {}
    for axis, (start, _) in starts.items():
        last = shape[axis] - sizes[axis]
        low, high = reader.bounds(start, np.int32) or (0, last)
        places[axis] = range(min(max(low, 0), last), min(max(high, 0), last) + 1)
    count = math.prod(map(len, places.values()))
    if count > _MOST_PLACES:
        raise Unsupported(f"one of {count} places, which is computed")

    def reaches(axis: int, k: int) -> Read:
        start, labels = starts[axis]
        found = reader.emit("ge", start, k)
        return reader.relabel(found, labels, output, tile) if labels else found

    def chosen(x: Read, axes: Sequence[int]) -> Read:
        if not axes:
            return reader.relabel(x, "".join(y for y in named if y), output, tile)
        *others, axis = axes
        made: Read | None = None
        for k in places.get(axis, range(1)):
            if named[axis] is None:
                part = reader.index(x, axis, k)
            else:
                part = reader.slice(x, axis, k, sizes[axis])
            case = chosen(part, others)
            if made is None:
                made = case
            else:
                made = reader.emit("select", reaches(axis, k), made, case)
        assert made is not None
        return made

    return chosen(x, [n for n, size in enumerate(sizes) if size != shape[n] or named[n] is None])


def dynamic_slice(reader: Tiles, equation: JaxprEqn, x: Read, *starts: Read) -> Read:
    labels, sizes = letters(len(starts)), equation.params["slice_sizes"]
    if any(isinstance(start, Tile) for start in starts):
        where = {axis: (start, "") for axis, start in enumerate(starts)}
        return _window(reader, x, sizes, where, labels, labels, tuple(sizes))
    value = reader.value(x)
    for axis, (start, count) in enumerate(zip(starts, sizes, strict=True)):
        first = int(np.clip(np.asarray(start), 0, reader.builder.tile(value)[axis] - count))
        value = reader.builder.slice(value, axis, first, 1, count)
    return Tile(value)


def gather(reader: Tiles, equation: JaxprEqn, x: Read, where: Read) -> Read:
    if is_integer(aval(equation.outvars[0]).dtype) and _may_fill(equation):
        raise Unsupported("gather of integers that may not be there")
    if isinstance(where, Tile):
        return _gather_computed(reader, equation, x, where)
    return _gather_known(reader, equation, x, where)


def _may_fill(equation: JaxprEqn) -> bool:
    return bool(equation.params["mode"] == GatherScatterMode.FILL_OR_DROP)


def _gather_known(reader: Tiles, equation: JaxprEqn, x: Read, where: np.ndarray) -> Read:
    """At places that are known: told by what it does to the numbers of the values.

    Axes that windows have all of stay as they are.
    """
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    batching, shape = numbers.operand_batching_dims, reader.shape(x)
    gone = {*numbers.collapsed_slice_dims, *batching}
    windows = dict(
        zip((n for n in range(len(shape)) if n not in gone), numbers.offset_dims, strict=True)
    )
    indexed = _indexed(numbers.start_index_map, where, equation.params["mode"])
    whole = _whole_axes(windows, indexed, dict(enumerate(sizes)), shape)
    moved = [n for n in range(len(shape)) if n not in whole]
    small = [1 if n in whole else extent for n, extent in enumerate(shape)]
    parameters = dict(equation.params, fill_value=-1)
    parameters["slice_sizes"] = tuple(min(x, y) for x, y in zip(sizes, small, strict=True))
    promised = equation.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    if promised:
        parameters["mode"] = GatherScatterMode.FILL_OR_DROP
    count, out = math.prod(small), aval(equation.outvars[0]).shape
    kept = [windows[n] for n in whole]
    found_shape = [1 if n in kept else extent for n, extent in enumerate(out)]
    if max(count, math.prod(found_shape)) > _MOST_KNOWN:
        raise Unsupported(f"gather of {count} values")
    with jax.ensure_compile_time_eval():
        places = np.arange(count, dtype=np.int32).reshape(small)
        found = np.asarray(equation.primitive.bind(places, where, **parameters))
    if promised and (found < 0).any():
        raise Unsupported("gather at places that there are not")
    found = found.squeeze(tuple(kept))
    # The axes of places stand ahead.
    order = [n for n in range(len(out)) if n not in kept] + kept
    in_a_row = 1 < found.size == max(found.shape, default=1) and bool(moved)
    if isinstance(x, Tile) and in_a_row and (found >= 0).all():
        extents = [shape[n] for n in moved]
        run = _in_steps(np.stack(np.unravel_index(found.ravel(), extents), -1))
        if run is not None and run[1] > 0:
            along, step, first = run
            part = reader.builder.slice(x.value, moved[along], first[along], step, found.size)
            for n in reversed(range(len(moved))):
                if n != along:
                    part = reader.builder.index(part, moved[n], first[n])
            left = [n for n in range(len(shape)) if n in whole or n == moved[along]]
            axes = [left.index(n) for n in (moved[along], *whole)]
            tile = (*found.shape, *(shape[n] for n in whole))
            part = reader.builder.reshape(reader.builder.transpose(part, axes), tile)
            return reader.in_order(Tile(part), order)
    if max(count, found.size) > MOST_COMPONENTS:  # as of a diagonal
        raise Unsupported(f"gather of {count} values")
    parts = reader.pieces(x, moved, MOST_COMPONENTS).reshape(-1)
    filled = np.broadcast_to(_filled_in(equation), [shape[n] for n in whole])
    pieces = np.empty(found.shape, object)
    for at, number in np.ndenumerate(found):
        pieces[at] = filled if number < 0 else parts[number]
    return reader.in_order(reader.assembled(pieces), order)


def _in_steps(places: np.ndarray) -> tuple[int, int, list[int]] | None:
    """The axis along which some places lie in steps, how long these are, and the first place."""
    steps = np.diff(places, axis=0)
    if (steps != steps[0]).any() or np.count_nonzero(steps[0]) != 1:
        return None
    (axis,) = np.flatnonzero(steps[0]).tolist()
    return axis, int(steps[0, axis]), places[0].tolist()


def _indexed(axes: Sequence[int], where: np.ndarray, mode: Any) -> list[int]:
    """The axes along which a window with all of them need not begin at the first place."""
    if mode == GatherScatterMode.CLIP:
        return []
    return [axis for n, axis in enumerate(axes) if where[..., n].any()]


def _whole_axes(
    windows: Mapping[int, int],
    indexed: Sequence[int],
    sizes: Mapping[int, int],
    shape: Sequence[int],
) -> list[int]:
    """The axes of which every window has all, so that they stay as they are."""
    return [n for n in windows if n not in indexed and sizes[n] == shape[n]]


def _gather_computed(reader: Tiles, equation: JaxprEqn, x: Read, where: Tile) -> Read:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, tile = reader.shape(x), tuple(aval(equation.outvars[0]).shape)
    output, vector = letters(len(tile)), len(reader.shape(where)) - 1
    batch = "".join(y for n, y in enumerate(output) if n not in numbers.offset_dims)
    windows = iter([output[n] for n in numbers.offset_dims])
    named: list[str | None] = []
    for axis in range(len(shape)):
        if axis in numbers.operand_batching_dims:
            n = numbers.operand_batching_dims.index(axis)
            named.append(batch[numbers.start_indices_batching_dims[n]])
        else:
            named.append(None if axis in numbers.collapsed_slice_dims else next(windows))
    sizes = [shape[n] if n in numbers.operand_batching_dims else y for n, y in enumerate(sizes)]
    starts = {
        axis: (reader.known(reader.index(where, vector, n)), batch)
        for n, axis in enumerate(numbers.start_index_map)
    }
    made = _window(reader, x, sizes, starts, named, output, tile)
    for axis, (start, labels) in starts.items():
        last = shape[axis] - sizes[axis]
        low, high = reader.bounds(start, np.int32) or (-1, last)
        if _may_fill(equation) and (low < 0 or high > last):
            at = reader.relabel(start, labels, output, tile)
            is_inside = reader.emit(
                "and", reader.emit("ge", at, 0.0), reader.emit("le", at, float(last))
            )
            made = reader.emit("select", is_inside, _filled_in(equation), made)
    return made


def _filled_in(equation: JaxprEqn) -> np.ndarray:
    """What a gather has for places that there are not."""
    dtype, fill_value = aval(equation.outvars[0]).dtype, equation.params["fill_value"]
    if fill_value is None:
        fill_value = np.nan if jnp.issubdtype(dtype, np.inexact) else True
    return np.asarray(fill_value).astype(dtype)


def dynamic_update_slice(
    reader: Tiles, equation: JaxprEqn, x: Read, update: Read, *starts: Read
) -> Read:
    if any(isinstance(start, Tile) for start in starts):
        raise Unsupported("dynamic_update_slice at an index that is computed")
    shape, counts = reader.shape(x), reader.shape(update)
    if 0 in counts or counts == shape:
        return x if 0 in counts else update
    # Only the axes along which a part is replaced are taken apart.
    axes = [n for n, extent in enumerate(shape) if counts[n] != extent]
    firsts = [int(np.clip(np.asarray(starts[n]), 0, shape[n] - counts[n])) for n in axes]
    pieces = reader.pieces(x, axes)
    window = tuple(slice(k, k + counts[n]) for n, k in zip(axes, firsts, strict=True))
    pieces[window] = reader.pieces(update, axes)
    order = [*axes, *(n for n in range(len(shape)) if n not in axes)]
    whole = reader.value(reader.assembled(pieces))
    return Tile(reader.builder.transpose(whole, [order.index(n) for n in range(len(shape))]))


def scatter(function: str | None) -> Callable[..., Read]:
    """Puts values at known places, where ``function`` combines them with what is there, if any."""

    def rule(reader: Tiles, equation: JaxprEqn, x: Read, where: Read, updates: Read) -> Read:
        name = equation.primitive.name
        if isinstance(where, Tile):
            return _scatter_computed(reader, equation, function, x, where, updates)
        shape, given = reader.shape(x), reader.shape(updates)
        numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        left = (n for n in range(len(shape)) if n not in gone)
        windows = dict(zip(left, numbers.update_window_dims, strict=True))
        whole = _whole_axes(
            windows,
            _indexed(numbers.scatter_dims_to_operand_dims, where, mode),
            {n: given[w] for n, w in windows.items()},
            shape,
        )
        moved = [n for n in range(len(shape)) if n not in whole]
        kept = [windows[n] for n in whole]
        small = [1 if n in whole else extent for n, extent in enumerate(shape)]
        few = [1 if n in kept else extent for n, extent in enumerate(given)]
        count = math.prod(few)
        if 0 in given:
            return x
        if count > MOST_PIECES or math.prod(small) > MOST_PLACES:
            raise Unsupported(f"{name} of {count} values at {math.prod(small)} places")

        def placed(update: Any) -> jax.Array:
            zeros = jnp.zeros(small, update.dtype)
            return jax.lax.scatter_add(zeros, where, update, numbers, mode=mode)

        # Each value alone shows where it goes.
        each = np.eye(count, dtype=np.float32).reshape(count, *few)
        with jax.ensure_compile_time_eval():
            hits = np.asarray(jax.vmap(placed)(each))
        if mode == GatherScatterMode.PROMISE_IN_BOUNDS and hits.sum() != count:
            raise Unsupported(f"{name} at places that there are not")
        own = [n for n in range(len(given)) if n not in kept]
        hits = hits.squeeze(tuple(1 + n for n in whole))
        strided = _strided(hits, moved, shape)
        if strided is not None:
            axes = dict(zip(kept, whole, strict=True))
            return _put_in_steps(reader, function, x, updates, axes, strided)
        pieces = reader.pieces(x, moved, MOST_PLACES)
        parts = reader.pieces(updates, own).reshape(-1)
        for n, *at in np.argwhere(hits).tolist():
            old = pieces[tuple(at)]
            pieces[tuple(at)] = reader.emit(function, old, parts[n]) if function else parts[n]
        unknown = sum(isinstance(reader.known(piece), Tile) for piece in pieces.flat)
        if unknown > max(MOST_PIECES, pieces.size // 2):
            raise Unsupported(f"{name} that makes {unknown} values")
        return reader.in_order(reader.assembled(pieces), [*moved, *whole])

    return rule


def _strided(
    hits: np.ndarray, moved: Sequence[int], shape: Sequence[int]
) -> tuple[int, int, dict[int, int]] | None:
    """The axis along which values go to places in steps, how long these are, and the first place.

    So one component of a vector is put among the others, for all nodes.
    """
    places = np.argwhere(hits)[:, 1:]
    if not MOST_MERGED < len(places) == len(hits) or (run := _in_steps(places)) is None:
        return None
    at, step, first = moved[run[0]], run[1], dict(zip(moved, run[2], strict=True))
    is_whole = 1 < step and step * len(places) == shape[at] and first[at] < step
    return (at, step, first) if is_whole else None


def _put_in_steps(
    reader: Tiles,
    function: str | None,
    x: Read,
    updates: Read,
    axes: Mapping[int, int],
    where: tuple[int, int, Mapping[int, int]],
) -> Read:
    """A tile with values in steps along an axis, which becomes one of steps and one of the rest.

    ``axes`` are those of the tile along which axes of the updates run, and ``where`` that axis, how
    long a step is, and the place along all axes that are no others.
    """
    at, step, places = where
    shape, given = reader.shape(x), reader.shape(updates)
    count = shape[at] // step
    split = reader.reshaped(x, (*shape[:at], count, step, *shape[at + 1 :]))
    apart = [n + (n >= at) for n in sorted(places)]  # of the axis itself, what is not a step
    rest = [n for n in range(len(shape) + 1) if n not in apart]
    shown = [n for n, extent in enumerate(given) if n in axes or extent > 1]
    values = reader.reshaped(updates, tuple([given[n] for n in shown]))
    runs = [rest.index(y + (y > at)) for y in (axes.get(n, at) for n in shown)]
    values = reader.in_order(values, runs)
    pieces = reader.pieces(split, apart, MOST_PLACES)
    place = tuple(places[n] for n in sorted(places))
    pieces[place] = reader.emit(function, pieces[place], values) if function else values
    return reader.reshaped(reader.in_order(reader.assembled(pieces), [*apart, *rest]), shape)


def _scatter_computed(
    reader: Tiles, equation: JaxprEqn, function: str | None, x: Read, where: Tile, updates: Read
) -> Read:
    """Along one axis: each place has a value or not, as the index says, which is computed."""
    name, numbers = equation.primitive.name, equation.params["dimension_numbers"]
    shape, given = reader.shape(x), reader.shape(updates)
    labels, batching = letters(len(shape)), numbers.operand_batching_dims
    axis, *others = numbers.scatter_dims_to_operand_dims
    windows = [n for n in range(len(shape)) if n != axis and n not in batching]
    sizes = [given[n] for n in numbers.update_window_dims]
    if others or sizes != [shape[n] for n in windows]:
        raise Unsupported(f"{name} of windows at places that are computed")
    # The axes of the index, and what they are of the result; along the others there are several.
    named = dict(
        zip(numbers.scatter_indices_batching_dims, (labels[n] for n in batching), strict=True)
    )
    several = [n for n in range(len(reader.shape(where)) - 1) if n not in named]
    scattered = [n for n in range(len(given)) if n not in numbers.update_window_dims]
    names = {scattered[n]: label for n, label in named.items()}
    names |= dict(zip(numbers.update_window_dims, (labels[n] for n in windows), strict=True))
    index = reader.pieces(reader.index(where, len(reader.shape(where)) - 1, 0), several)
    values = reader.pieces(updates, [scattered[n] for n in several])
    if index.size * shape[axis] > MOST_PIECES:
        raise Unsupported(f"{name} at {index.size} of {shape[axis]} places, which are computed")
    pieces: list[Read] = list(reader.pieces(x, [axis]))
    output, tile = labels.replace(labels[axis], ""), (*shape[:axis], *shape[axis + 1 :])
    last = shape[axis] - 1
    low, high = reader.bounds(where, np.int32) or (-1, last + 1)
    for at in np.ndindex(*index.shape):
        own = "".join(named[n] for n in sorted(named))
        place = reader.relabel(index[at], own, output, tile)
        if equation.params["mode"] == GatherScatterMode.CLIP and not (0 <= low and high <= last):
            place = reader.emit("min", reader.emit("max", place, 0.0), float(last))
        own = "".join(names[n] for n in sorted(names))
        value = reader.relabel(values[at], own, output, tile)
        for k, old in enumerate(pieces):
            new = reader.emit(function, old, value) if function else value
            pieces[k] = reader.emit("select", reader.emit("eq", place, float(k)), old, new)
    return reader.stack(pieces, axis)
