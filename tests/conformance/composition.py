"""A function of an element as lines of source, how it is called, and how it is drawn by a seed."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.conformance.draw import Argument, Draw, Impossible, Value, source
from tests.conformance.operations import NAMESPACE, OPERATIONS, RARE


_NAME = re.compile(r"\b[av]\d+\b")
Array = Any
Transform = Callable[..., Any]


@dataclass(frozen=True)
class Line:
    targets: tuple[str, ...]
    expression: str
    avals: tuple[Value, ...]
    operation: str

    @property
    def reads(self) -> set[str]:
        return set(_NAME.findall(self.expression))

    def __str__(self) -> str:
        targets = "".join(f"{x}, " for x in self.targets)
        if len(self.targets) == 1 and not self.several:
            targets = self.targets[0]
        return f"{targets.rstrip(' ')} = {self.expression}" if targets else self.expression

    several: bool = False


@dataclass(frozen=True)
class Composition:
    """A function of an element and a call of it.

    ``style`` is how the arguments come: one by one, as keywords or as a tree.  ``run`` is how the
    function is run: operation after operation in NumPy, with programs as kernels, or under jit.
    """

    elements: int
    arguments: tuple[Argument, ...]
    lines: tuple[Line, ...]
    outputs: tuple[tuple[str, int | None], ...]
    style: str = "flat"
    derivative: str = "vjp"
    run: str = "NumPy"
    seed: int = 0

    # ---- The function ----------------------------------------------------------------------------

    def source(self) -> str:
        """The function of one element."""
        names = [x.name for x in self.arguments]
        if self.style == "tree":
            head = [
                "def element(tree):",
                f"    {', '.join(names)}, = tree['first'], *tree['others']",
            ]
        else:
            head = [f"def element({', '.join(names)}):"]
        results = ", ".join(name for name, _ in self.outputs)
        body = [f"    {line}" for line in self.lines]
        return "\n".join([*head, *body, f"    return {results},"])

    def function(self) -> Callable[..., Any]:
        namespace = dict(NAMESPACE)
        exec(compile(self.source(), f"<seed {self.seed}>", "exec"), namespace)
        found: Callable[..., Any] = namespace["element"]
        return found

    def applied(self, transform: Transform, arrays: dict[str, Array]) -> Any:
        """The results of all elements; ``arrays`` are the arguments that are arrays."""
        values = [
            arrays[x.name] if x.dtype else eval(x.literal, dict(NAMESPACE)) for x in self.arguments
        ]
        axes = [x.axis for x in self.arguments]
        out_axes = tuple(axis for _, axis in self.outputs)
        if self.style == "tree":
            first, *others = values
            in_axes: Any = ({"first": axes[0], "others": axes[1:]},)
            call = transform(self.function(), in_axes=in_axes, out_axes=out_axes)
            return call({"first": first, "others": others})
        if self.style == "keywords":
            (first, *others), names = values, [x.name for x in self.arguments]
            call = transform(self.function(), in_axes=(axes[0],), out_axes=out_axes)
            return call(first, **dict(zip(names[1:], others, strict=True)))
        call = transform(self.function(), in_axes=tuple(axes), out_axes=out_axes)
        return call(*values)

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {x.name: x.array(self.elements) for x in self.arguments if x.dtype}
        return {k: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) for k, x in arrays.items()}

    def __str__(self) -> str:
        """A program that shows it."""
        text = [self.source()]
        for x in self.arguments:
            text.append(f"{x.name} = {source(x.array(self.elements)) if x.dtype else x.literal}")
        axes = [x.axis for x in self.arguments]
        out_axes = tuple(axis for _, axis in self.outputs)
        names = [x.name for x in self.arguments]
        if self.style == "tree":
            in_axes = f"({{'first': {axes[0]}, 'others': {axes[1:]}}},)"
            call = f"({{'first': {names[0]}, 'others': [{', '.join(names[1:])}]}})"
        elif self.style == "keywords":
            in_axes = f"({axes[0]},)"
            call = f"({', '.join([names[0], *(f'{x}={x}' for x in names[1:])])})"
        else:
            in_axes, call = str(tuple(axes)), f"({', '.join(names)})"
        text.append("for transform in (jm.fuse, jax.vmap):")
        text.append(f"    print(transform(element, in_axes={in_axes}, out_axes={out_axes}){call})")
        return "\n".join([*text, f"# run: {self.run}, with {self.derivative}"])

    # ---- Smaller ones ----------------------------------------------------------------------------

    def live(self) -> "Composition":
        """Without the lines and arguments that no result needs."""
        needed = {name for name, _ in self.outputs}
        lines: list[Line] = []
        for line in reversed(self.lines):
            if needed & set(line.targets) or not line.targets:
                needed |= line.reads
                lines.insert(0, line)
        arguments = tuple(x for x in self.arguments if x.name in needed)
        return replace(self, lines=tuple(lines), arguments=arguments)

    def smaller(self) -> Iterator["Composition"]:
        """Compositions that are a step simpler, the greatest steps first."""
        if len(self.outputs) > 1:
            for output in self.outputs:
                yield replace(self, outputs=(output,)).live()
        for n, line in enumerate(self.lines):
            if not line.targets:
                yield replace(self, lines=self.lines[:n] + self.lines[n + 1 :]).live()
        # What a line makes comes as an argument.
        for n, line in reversed(list(enumerate(self.lines))):
            if not line.targets or {x for x, _ in self.outputs} & set(line.targets):
                continue
            made = tuple(Argument(x, x.shape, str(x.dtype), 0, seed=n) for x in line.avals)
            rest = self.lines[:n] + self.lines[n + 1 :]
            yield replace(self, lines=rest, arguments=(*self.arguments, *made)).live()
        # The result of an earlier line alone.
        for line in self.lines[:-1]:
            if line.targets and line.targets[0] not in {x for x, _ in self.outputs}:
                yield replace(self, outputs=((line.targets[0], 0),)).live()
        if self.run != "NumPy":
            yield replace(self, run="NumPy")
        if self.derivative != "value":
            yield replace(self, derivative="value")
        if self.style != "flat":
            yield replace(self, style="flat")
        for n, x in enumerate(self.arguments):
            if x.dtype and x.axis not in (0, None):
                simpler = replace(x, axis=0)
                yield replace(
                    self, arguments=(*self.arguments[:n], simpler, *self.arguments[n + 1 :])
                )
        if any(axis != 0 for _, axis in self.outputs):
            yield replace(self, outputs=tuple((name, 0) for name, _ in self.outputs))
        if self.elements > 2:
            yield replace(self, elements=2)


# ---- Drawing -------------------------------------------------------------------------------------


def _abstract(expression: str, d: Draw) -> tuple[tuple[Value, ...], Any]:
    """Shapes and dtypes of what an expression makes, and whether it is several."""
    literals = {x.name: eval(x.literal, dict(NAMESPACE)) for x in d.arguments if not x.dtype}
    used = set(_NAME.findall(expression))
    structs = {str(v): jax.ShapeDtypeStruct(v.shape, v.dtype) for v in d.values if v in used}

    def made(arrays: dict[str, Array]) -> Any:
        return eval(expression, dict(NAMESPACE) | literals | arrays)

    found = jax.eval_shape(made, structs)
    leaves = jax.tree.leaves(found)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves):
        raise Impossible("extended")
    return found, leaves


def _line(d: Draw, name: str, count: int) -> Line:
    """One line more; what it makes becomes values."""
    d.operation = name
    arguments, values, names = list(d.arguments), list(d.values), d._names
    try:
        expression = OPERATIONS[name](d)
        found, leaves = _abstract(expression, d)
        if any(x.size > 200 for x in leaves):
            raise Impossible("large")
        several = isinstance(found, tuple | list)
        if several and not all(hasattr(x, "shape") for x in found):
            expression, several = f"jax.tree.leaves({expression})", True
    except Exception:
        d.arguments, d.values, d._names = arguments, values, names
        raise
    targets = tuple(f"v{count + n}" for n in range(len(leaves)))
    made = tuple(Value(t, x.shape, x.dtype) for t, x in zip(targets, leaves, strict=True))
    d.values.extend(made)
    return Line(targets, expression, made, name, several=several)


def _finished(d: Draw, lines: Sequence[Line], outputs: Sequence[Value], **how: Any) -> Composition:
    def axis(x: Value) -> int | None:
        if d.chance(0.75):
            return 0
        return d.integer(-x.ndim - 1, x.ndim) if d.chance(0.95) else None

    made = Composition(
        d.elements,
        tuple(d.arguments),
        tuple(lines),
        tuple((str(x), axis(x)) for x in outputs),
        **how,
    ).live()
    if len(made.arguments) > 1 and d.chance(0.15):
        made = replace(made, style="tree")
    elif d.chance(0.1) and all(x.axis == 0 for x in made.arguments[1:]):
        made = replace(made, style="keywords")
    return made


DERIVATIVES = ("vjp", "vjp", "vjp", "jvp", "jvp", "second", "value")


def drawn(seed: int, lines: int = 6) -> Composition:
    """The composition of a seed."""
    random = np.random.default_rng(seed)
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("ignore")
        d = Draw(random)
        names = list(OPERATIONS)
        weights = np.array([0.25 if n in RARE else 1.0 for n in names])
        made: list[Line] = []
        wanted = int(random.integers(1, lines + 1))
        while len(made) < wanted:
            name = str(random.choice(names, p=weights / weights.sum()))
            try:
                made.append(_line(d, name, sum(len(x.targets) for x in made)))
            except Exception:
                continue
        used = set().union(*(x.reads for x in made))
        results = [x for line in made for x in line.avals]
        outputs = [x for x in results if x not in used or d.chance(0.2)][-4:]
        if not outputs:
            outputs = [d.values[0]]
        how = {"derivative": str(random.choice(DERIVATIVES)), "seed": seed}
        return _finished(d, made, outputs, **how)


def alone(name: str, seed: int = 0, together: int = 3, most: int = 40) -> Iterator[Composition]:
    """An operation with every value of every parameter, some calls to a function."""
    counts: Counter = Counter()
    random = np.random.default_rng([seed, list(OPERATIONS).index(name)])
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.simplefilter("ignore")
        for number in range(most):
            d = Draw(random, counts)
            made: list[Line] = []
            for _ in range(12):
                # Of arguments, not of one another.
                d.values = [x for x in d.values if str(x).startswith("a")]
                try:
                    made.append(_line(d, name, sum(len(x.targets) for x in made)))
                except Exception:
                    continue
                if len(made) == together:
                    break
            outputs = [x for line in made for x in line.avals]
            if outputs or made:
                how = {"derivative": DERIVATIVES[number % 7], "seed": seed}
                yield _finished(d, made, outputs or d.values[:1], **how)
            if counts and min(counts.values()) > 0:
                return
