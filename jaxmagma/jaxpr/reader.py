"""Reads equations into a builder, each by its rule."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.jaxpr.calls import inner_jaxpr
from jaxmagma.jaxpr.complex_parts import complex_parts
from jaxmagma.jaxpr.contractions import OF_TABLES, makes_table
from jaxmagma.jaxpr.digits import with_digits
from jaxmagma.jaxpr.equations import Unsupported, aval, interpreted, is_empty, is_extended
from jaxmagma.jaxpr.known import evaluated
from jaxmagma.jaxpr.narrow import is_exact, is_rounded, narrower
from jaxmagma.jaxpr.pointwise import pointwise
from jaxmagma.jaxpr.rules import NESTED, RULES
from jaxmagma.jaxpr.tiles import Read, Tile, Tiles
from jaxmagma.jaxpr.whole import limits_of, whole_numbers
from jaxmagma.programs import integers
from jaxmagma.programs.functions import ROUNDINGS
from jaxmagma.programs.identities import identity
from jaxmagma.programs.precisions import is_narrower
from jaxmagma.programs.program import Input


class Reader(Tiles):
    """Reads equations into ``builder``; all values but indices are of ``dtype``."""

    def equation(self, equation: JaxprEqn, operands: Sequence[Any]) -> list[Read]:
        """The results of one equation; raises ``Unsupported``."""
        operands = [x if isinstance(x, Tile) else np.asarray(x) for x in operands]
        name, made = equation.primitive.name, [aval(x) for x in equation.outvars]
        if equation.effects:
            raise Unsupported(f"{name} has effects")
        inner = inner_jaxpr(equation)
        if inner is not None:
            return self.jaxpr(inner, operands)
        if self._is_known(equation, operands):
            given = zip(operands, equation.invars, strict=True)
            return list(evaluated(equation, [self.array(x, aval(y).dtype) for x, y in given]))
        if made and all(map(is_empty, made)):
            return [np.zeros(x.shape, x.dtype) for x in made]
        parts = complex_parts(self, equation, operands)
        if parts is not None:
            return [parts]
        limits = None if name in NESTED else self.check_dtypes(equation, operands)
        product = name == "dot_general" and any(map(self._is_computed, operands))
        operands = [self._structured(x, matrix=product) for x in operands]
        decided = self._decided(equation, operands)
        if decided is not None:
            return [np.full(made[0].shape, decided)]
        found = None if limits is None else whole_numbers(self, equation, operands)
        if found is None:
            found = narrower(self, equation, operands)
        if found is None:
            found = pointwise(equation, self.emit, operands)
        if found is None:
            rule = RULES.get(name)
            if rule is None:
                raise Unsupported(f"{name} is not an operation of a kernel")
            rule.check(equation)
            found = rule.read(self, equation, *operands)
        results = found if isinstance(found, list) else [found]
        checked = [self._checked(name, x, own) for x, own in zip(results, made, strict=True)]
        for n, (read, own) in enumerate(zip(checked, made, strict=True)):
            if not isinstance(read, Tile):
                continue
            if limits and integers.is_integer(own.dtype):
                checked[n] = self.bounded(read, limits)
            elif name not in NESTED and is_rounded(self, equation, operands, own.dtype):
                checked[n] = self.emit(ROUNDINGS[np.dtype(own.dtype)], read)
        return checked

    def _structured(self, read: Read, matrix: bool) -> Read:
        """A known array that is an identity of several axes as one whose zeros are none.

        And a ``matrix``, which may be a table where it is not multiplied with what is computed.
        """
        if isinstance(read, Tile) or read.dtype != self.dtype:
            return read
        made = identity(self.builder, read, matrix)
        return read if made is None else Tile(made)

    def _is_computed(self, read: Read) -> bool:
        return isinstance(read, Tile) and not isinstance(self.builder.operation(read.value), Input)

    def _is_known(self, equation: JaxprEqn, operands: Sequence[Read]) -> bool:
        """Whether its results are known arrays, as those of all are that know their operands.

        But a table that is a product stays one, and may be applied factor by factor.
        """
        tiles = [x.value for x in operands if isinstance(x, Tile)]
        if not tiles:
            return not makes_table(equation, self.dtype)
        return equation.primitive.name not in OF_TABLES and all(map(self.builder.is_known, tiles))

    def _checked(self, name: str, read: Any, own: Any) -> Read:
        """A result, if it has the shape that it has in JAX; what is known has its dtype, too."""
        if isinstance(read, Tile):
            if self.shape(read) != own.shape:
                raise Unsupported(f"{name} of shape {own.shape}")
            return read
        return np.broadcast_to(np.asarray(read).astype(own.dtype), own.shape)

    def jaxpr(self, closed: ClosedJaxpr, arguments: Sequence[Read]) -> list[Read]:
        results = interpreted(with_digits(closed), arguments, self.equation)
        return [x if isinstance(x, Tile) else np.asarray(x) for x in results]

    def check_dtypes(self, equation: JaxprEqn, operands: Sequence[Read]) -> integers.Bounds | None:
        """Whether it computes in the program's dtype; the bounds of the integers that it makes."""
        name, variables = equation.primitive.name, [*equation.invars, *equation.outvars]
        if name == "element_program" and equation.params["program"].dtype == self.dtype:
            return None
        if all(aval(x).dtype == self.dtype for x in variables):
            return None
        for x in variables:
            if is_extended(aval(x).dtype):
                raise Unsupported(f"{name} computes with {aval(x).dtype}")
            dtype = np.dtype(aval(x).dtype)
            own = jnp.issubdtype(dtype, np.inexact)
            if not own or dtype == self.dtype or is_narrower(dtype, self.dtype):
                continue
            wider = is_narrower(self.dtype, dtype)
            if not wider or not is_exact(self, equation, operands):
                raise Unsupported(f"{name} mixes {dtype} with {self.dtype}")
        made = {np.dtype(aval(x).dtype) for x in equation.outvars}
        whole = [x for x in made if integers.is_integer(x)]
        if not whole:
            return None
        found = limits_of(self, equation, operands)
        if found is None:
            raise Unsupported(f"{name} computes with {whole[0]}")
        return found

    def _decided(self, equation: JaxprEqn, operands: Sequence[Read]) -> bool | None:
        """What a comparison of integers gives, if their bounds tell, as of places that wrap."""
        if len(operands) != 2 or not integers.is_integer(aval(equation.invars[0]).dtype):
            return None
        left, right = (
            self.bounds(x, aval(y).dtype) for x, y in zip(operands, equation.invars, strict=True)
        )
        if left is None or right is None:
            return None
        return integers.decided(equation.primitive.name, left, right)
