"""Names of axes: letters, one for each, in the order in which the axes stand."""

import functools
from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np


def letters(count: int) -> str:
    """So many labels."""
    if count <= len(ascii_lowercase):
        return ascii_lowercase[:count]
    return ascii_lowercase + "".join(chr(0x370 + n) for n in range(len(ascii_lowercase), count))


def repeated(array: np.ndarray, labels: str, output: str, tile: Sequence[int]) -> np.ndarray:
    """An array with axes ``labels``, transposed and repeated as a tile with axes ``output``."""
    order = [labels.index(x) for x in output if x in labels]
    missing = [n for n, x in enumerate(output) if x not in labels]
    return np.broadcast_to(np.expand_dims(np.transpose(array, order), missing), tile)


@functools.lru_cache(maxsize=4096)
def canonical(*labels: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The labels as letters by order of appearance, and which letter each one has become."""
    names = {x: chr(ord("a") + n) for n, x in enumerate(dict.fromkeys("".join(labels)))}
    return tuple("".join(names[x] for x in own) for own in labels), tuple(names.items())
