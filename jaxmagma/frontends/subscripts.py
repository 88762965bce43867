"""The grammar of einsum: parses and checks a call, and says what is wrong with it.

The checks are those of ``jnp.einsum``, and raise the same exceptions; the messages name the operand
and the label.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import opt_einsum


def parse(spec: Any, operands: Sequence[Any]) -> tuple[list[str], str, list[Any]]:
    """The labels of every operand and of the output, without ellipsis, and the operands."""
    if isinstance(spec, str):
        text, arrays = spec, list(operands)
    else:
        text, arrays = _interleaved(spec, operands)
    arrays = [_as_array(number, x) for number, x in enumerate(arrays)]
    inputs, arrow, output = text.replace(" ", "").partition("->")
    terms = inputs.split(",")
    for term in [*terms, output]:
        _check_characters(term, text)
    if len(terms) != len(arrays):
        raise ValueError(
            f"einsum: {text!r} has {len(terms)} operand(s), but {len(arrays)} array(s) were given"
        )
    shapes = [np.shape(x) for x in arrays]
    terms, dots = _without_ellipsis(terms, shapes, text)
    if not arrow:
        labels = "".join(terms)
        output = dots + "".join(
            sorted(x for x in set(labels) if labels.count(x) == 1 and x not in dots)
        )
    else:
        output = output.replace("...", dots)
    for label in output:
        if output.count(label) > 1:
            raise ValueError(f"einsum: output label {label!r} of {text!r} appears more than once")
        if not any(label in term for term in terms):
            raise ValueError(f"einsum: output label {label!r} of {text!r} is not in any operand")
    label_extents(terms, shapes)
    return terms, output, arrays


def label_extents(terms: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The extent of every label; an axis of extent 1 goes with any other extent."""
    found: dict[str, tuple[int, int]] = {}
    for number, (labels, shape) in enumerate(zip(terms, shapes, strict=True)):
        own: dict[str, int] = {}
        for label, extent in zip(labels, shape, strict=True):
            if own.setdefault(label, extent) != extent:
                raise ValueError(
                    f"einsum: label {label!r} is {own[label]} and {extent} in operand {number}, "
                    f"{labels!r} with shape {shape}"
                )
            before, where = found.get(label, (1, number))
            if before == 1:
                found[label] = (extent, number)
            elif extent not in (1, before):
                raise ValueError(
                    f"einsum: label {label!r} is {before} in operand {where} "
                    f"({terms[where]!r}, shape {shapes[where]}) and {extent} in operand {number} "
                    f"({labels!r}, shape {shape})"
                )
    return {label: extent for label, (extent, _) in found.items()}


def _interleaved(first: Any, rest: Sequence[Any]) -> tuple[str, list[Any]]:
    """``einsum(a, [0, 1], b, [1, 2], [0, 2])`` as a string."""
    try:
        text, arrays = opt_einsum.parser.convert_interleaved_input([first, *rest])
    except TypeError as error:
        raise TypeError(
            f"einsum: the first argument is a string of subscripts, not {type(first).__name__}; or "
            "each operand is followed by the list of its labels, as in einsum(a, [0, 1], b, [1, 2])"
        ) from error
    return text, list(arrays)


def _as_array(number: int, x: Any) -> Any:
    convert = getattr(x, "__jax_array__", None)
    x = x if convert is None else convert()
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"einsum: operand {number} must be an array or a scalar, not {type(x).__name__}"
        )
    return x


def _check_characters(term: str, text: str) -> None:
    plain = term.replace("...", "", 1)
    if "." in plain:
        raise ValueError(f"einsum: {text!r} has a '.' that is not part of an ellipsis '...'")
    for label in plain:
        if label in "->":
            raise ValueError(f"einsum: {text!r} has a {label!r} that is not part of one arrow '->'")


def _without_ellipsis(
    terms: Sequence[str], shapes: Sequence[tuple[int, ...]], text: str
) -> tuple[list[str], str]:
    """Gives the axes under ``...`` labels of their own, aligned at the right."""
    ranks = []
    for number, (labels, shape) in enumerate(zip(terms, shapes, strict=True)):
        rank = len(shape) - len(labels.replace("...", ""))
        if rank < 0 or (rank > 0 and "..." not in labels):
            raise ValueError(
                f"einsum: operand {number} has shape {shape}, but its subscript {labels!r} in "
                f"{text!r} names {len(labels.replace('...', ''))} axes"
            )
        ranks.append(rank if "..." in labels else 0)
    fresh: list[str] = []
    symbol = 0
    while len(fresh) < max(ranks, default=0):
        candidate = opt_einsum.get_symbol(symbol)
        symbol += 1
        if candidate not in text:
            fresh.append(candidate)
    dots = "".join(fresh)
    expanded = [
        labels.replace("...", dots[len(dots) - rank :])
        for labels, rank in zip(terms, ranks, strict=True)
    ]
    return expanded, dots
