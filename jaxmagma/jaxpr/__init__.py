"""Reads a JAX function of one element's tiles into a program.

Every equation of the jaxpr becomes operations of a :class:`Builder`, or is *unsupported*, with a
reason.  What depends on constants alone is computed while reading.

The table of rules is in ``rules.py``, the rules are in files of their own for each kind of
equation, and ``reader.py`` goes by the table.
"""

from jaxmagma.jaxpr.calls import has_own_rule, inner_jaxpr
from jaxmagma.jaxpr.contractions import makes_table
from jaxmagma.jaxpr.control import scan_counts
from jaxmagma.jaxpr.digits import with_digits
from jaxmagma.jaxpr.equations import (
    LongLoop,
    Unsupported,
    applied,
    aval,
    inside,
    interpreted,
    is_empty,
    is_extended,
    nested,
    plainly,
)
from jaxmagma.jaxpr.known import evaluated, is_pure
from jaxmagma.jaxpr.pointwise import POINTWISE, Emit
from jaxmagma.jaxpr.reader import Reader
from jaxmagma.jaxpr.rules import RULES
from jaxmagma.jaxpr.scalars import pointwise_rule
from jaxmagma.jaxpr.tiles import Tile
from jaxmagma.jaxpr.work import steps_at_once


__all__ = [
    "POINTWISE",
    "RULES",
    "Emit",
    "LongLoop",
    "Reader",
    "Tile",
    "Unsupported",
    "applied",
    "aval",
    "evaluated",
    "has_own_rule",
    "inner_jaxpr",
    "inside",
    "interpreted",
    "is_empty",
    "is_extended",
    "is_pure",
    "makes_table",
    "nested",
    "plainly",
    "pointwise_rule",
    "scan_counts",
    "steps_at_once",
    "with_digits",
]
