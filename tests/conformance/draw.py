"""Draws what a line of a function is made of: values, arguments, constants, parameters."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


Shape = tuple[int, ...]

# By kind: floating, complex, signed, unsigned, boolean; the more frequent ones first.
DTYPES: dict[str, Sequence[str]] = {
    "f": (*("float32", "float64") * 3, "bfloat16", "float16"),
    "c": ("complex64", "complex128"),
    "i": ("int32", "int32", "int64", "int8", "int16"),
    "u": ("uint8", "uint32", "uint16"),
    "b": ("bool",),
}
_EXTENTS = (3, 3, 3, 2, 2, 2, 1, 1, 4, 0)
_RANKS = (0, 1, 1, 2, 2, 2, 3)


class Impossible(Exception):
    """No such line can follow those that there are."""


class Value(str):
    """The name of an array of the function, which knows its shape and dtype."""

    shape: Shape
    dtype: np.dtype

    def __new__(cls, name: str, shape: Sequence[int], dtype: Any) -> "Value":
        made = super().__new__(cls, name)
        made.shape, made.dtype = tuple(shape), np.dtype(dtype)
        return made

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        return kind(self.dtype)


def kind(dtype: Any) -> str:
    dtype = np.dtype(dtype)
    return "f" if dtype in (ml_dtypes.bfloat16,) else dtype.kind


@dataclass(frozen=True)
class Argument:
    """An argument of the function: an array of each element, or, without a dtype, what it is."""

    name: str
    shape: Shape = ()
    dtype: str = ""
    axis: int | None = None
    literal: str = ""
    seed: int = 0

    def array(self, elements: int) -> np.ndarray:
        """The argument of all elements."""
        random = np.random.default_rng(self.seed)
        shape = list(self.shape)
        if self.axis is not None:
            shape.insert(self.axis if self.axis >= 0 else len(shape) + 1 + self.axis, elements)
        return drawn_array(random, tuple(shape), np.dtype(self.dtype))


def drawn_array(random: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Values in general position; or few small ones, so that many are equal; or special ones."""
    dtype, how = np.dtype(dtype), random.random()
    if kind(dtype) == "b":
        return random.random(shape) < 0.5
    if kind(dtype) in "iu":
        low = -4 if kind(dtype) == "i" else 0
        return random.integers(low, 5, shape).astype(dtype)

    def real() -> np.ndarray:
        if how < 0.5:
            return random.normal(size=shape)
        values = random.integers(-3, 4, shape) / 2
        if how > 0.9:
            special = random.choice([np.nan, np.inf, -np.inf, -0.0, 1e30], shape)
            values = np.where(random.random(shape) < 0.3, special, values)
        return values

    if kind(dtype) == "c":
        return np.asarray(real() + 1j * np.nan_to_num(real()), dtype)
    with np.errstate(over="ignore"):
        return np.asarray(real()).astype(dtype)


def source(array: np.ndarray) -> str:
    """An array as source text."""
    name = f"jnp.{array.dtype}" if array.dtype.name == "bfloat16" else f"np.{array.dtype}"
    if not array.size:
        return f"np.zeros({array.shape}, {name})"
    values = array.astype(np.float32) if kind(array.dtype) == "f" else array
    return f"np.array({values.tolist()}, {name})".replace("np.bool)", "bool)")


class Draw:
    """What the strategies of the operations ask.

    ``alone``: of the options of each parameter, those drawn least so far come first, and ``counts``
    tells which have been drawn.
    """

    def __init__(self, random: np.random.Generator, alone: Counter[Any] | None = None) -> None:
        self.random = random
        self.values: list[Value] = []
        self.arguments: list[Argument] = []
        self.elements = int(
            random.choice([3, 3, 3, 2, 1, 4, 0], p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.07, 0.03])
        )
        self.counts = alone
        self.operation = ""
        self._names = 0

    # ---- Parameters ------------------------------------------------------------------------------

    def pick(self, label: str, options: Sequence[Any]) -> Any:
        """The value of a parameter that is named; those of each "primitive" are its own."""
        if not options:
            raise Impossible(label)
        if self.counts is None:
            return options[int(self.random.integers(len(options)))]
        found = self._least(label, len(options))
        if label == "primitive":
            self.operation = f"{self.operation} {options[found]}"
        return options[found]

    def _least(self, label: str, count: int) -> int:
        assert self.counts is not None
        keys = [(self.operation, label, n) for n in range(count)]
        for key in keys:
            self.counts.setdefault(key, 0)
        least = min(self.counts[key] for key in keys)
        found = int(self.random.choice([n for n, k in enumerate(keys) if self.counts[k] == least]))
        self.counts[keys[found]] += 1
        return found

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Both bounds are included."""
        if low > high:
            raise Impossible
        return int(self.random.integers(low, high + 1))

    def axis(self, x: Value, label: str = "axis") -> int:
        if not x.ndim:
            raise Impossible(label)
        return self.integer(-x.ndim, x.ndim - 1)

    def positive_axis(self, x: Value) -> int:
        return self.axis(x) % x.ndim

    def axes(self, x: Value, none: bool = True) -> Any:
        """For a reduction: None, an axis or some."""
        how = self.pick("axes", ["all", "one", "some"] if none else ["one", "some"])
        if how == "all" or not x.ndim:
            return None if none else ()
        if how == "one":
            return self.axis(x) if none else (self.positive_axis(x),)
        return tuple(k for k in range(x.ndim) if self.chance(0.5))

    def static(self, literal: Any) -> str:
        """What is known in Python; sometimes it comes as an argument, which is not mapped."""
        if self.chance(0.1):
            argument = Argument(self._name(), literal=str(literal))
            self.arguments.append(argument)
            return argument.name
        return str(literal)

    # ---- Arrays ----------------------------------------------------------------------------------

    def _name(self) -> str:
        self._names += 1
        return f"a{self._names - 1}"

    def shape(self, rank: tuple[int, int] = (0, 3), least: int = 0) -> Shape:
        ranks = [x for x in _RANKS if rank[0] <= x <= rank[1]] or [rank[0]]
        extents = [x for x in _EXTENTS if x >= least] or [least]
        return tuple(
            int(self.random.choice(extents)) for _ in range(int(self.random.choice(ranks)))
        )

    def dtype(self, kinds: str = "fciub") -> str:
        weights = np.array([{"f": 10, "c": 2, "i": 3, "u": 1, "b": 1}[k] for k in kinds])
        if self.counts is not None:
            k = self.pick("kind", list(kinds))
        else:
            k = self.random.choice(list(kinds), p=weights / weights.sum())
        return str(self.random.choice(DTYPES[k]))

    def argument(self, shape: Shape, dtype: str) -> Value:
        """A new argument of the function."""
        axis = None
        if not self.chance(0.15) or not any(x.axis is not None for x in self.arguments):
            axis = 0 if self.chance(0.7) else self.integer(-len(shape) - 1, len(shape))
        made = Argument(self._name(), shape, dtype, axis, seed=self.integer(0, 10**6))
        self.arguments.append(made)
        value = Value(made.name, shape, dtype)
        self.values.append(value)
        return value

    def value(
        self,
        kinds: str = "fciub",
        rank: tuple[int, int] = (0, 3),
        least: int = 0,
        where: Callable[[Value], bool] = lambda x: True,
    ) -> Value:
        """A value that there is, the latest most likely, or a new argument."""
        found = [
            x
            for x in self.values
            if x.kind in kinds
            and rank[0] <= x.ndim <= rank[1]
            and all(n >= least for n in x.shape)
            and x.size <= 64
            and where(x)
        ]
        if found and not self.chance(0.1):
            weights = np.arange(1, len(found) + 1) ** 2
            return found[self.random.choice(len(found), p=weights / weights.sum())]
        for _ in range(30):
            shape, dtype = self.shape(rank, least), self.dtype(kinds)
            if where(Value("", shape, dtype)):
                return self.argument(shape, dtype)
        raise Impossible

    def like(self, x: Value, kinds: str = "", shape: Shape | None = None) -> Value:
        """A value of the same shape, and dtype unless kinds are given."""
        wanted = x.shape if shape is None else shape
        fits = [
            y
            for y in self.values
            if y.shape == wanted and (y.kind in kinds if kinds else y.dtype == x.dtype)
        ]
        if fits and self.chance(0.6):
            return fits[self.random.integers(len(fits))]
        return self.argument(wanted, self.dtype(kinds) if kinds else str(x.dtype))

    def constant(self, shape: Shape, dtype: str) -> str:
        return source(drawn_array(self.random, shape, dtype))

    def scalar(self, kinds: str = "fciub") -> str:
        """A Python number."""
        options = {"f": ["0.5", "-1.5", "2.0", "0.0"], "c": ["(0.5+1j)"], "i": ["2", "-1", "0"]}
        options |= {"u": ["3"], "b": ["True"]}
        return str(self.random.choice(options[kinds[self.random.integers(len(kinds))]]))

    def operand(self, x: Value, kinds: str = "") -> str:
        """What broadcasts against ``x``: a value, a constant or a number."""
        kinds = kinds or x.kind
        how = self.pick("operand", ["value", "value", "constant", "scalar"])
        if how == "scalar":
            return self.scalar(kinds)
        shape = x.shape[self.integer(0, x.ndim) :] if self.chance(0.4) else x.shape
        shape = tuple(1 if self.chance(0.1) else n for n in shape)
        if how == "constant":
            return self.constant(shape, self.dtype(kinds))
        fits = [
            y
            for y in self.values
            if y.kind in kinds
            and y.ndim <= x.ndim
            and all(n in (1, m) for n, m in zip(y.shape[::-1], x.shape[::-1], strict=False))
        ]
        if fits and self.chance(0.7):
            return fits[self.random.integers(len(fits))]
        return self.argument(shape, self.dtype(kinds))
