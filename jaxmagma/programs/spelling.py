"""How the user's function spells a program, for where plain JAX computes it on a CPU.

Values of a program are taken apart into components, for kernels have these in registers.  XLA makes
slower loops of that than of the reductions, the products and the loops that a function is written
with.  A derivative of the program is another program, which nobody has spelled.
"""

from collections.abc import Callable, Sequence

import jax

from jaxmagma.programs.program import ElementProgram


# Of the arguments of a program; the outputs, of the program's dtype.
Spelling = Callable[..., Sequence[jax.Array]]

_KEY = "_spelling"


def spell(program: ElementProgram, spelling: Spelling) -> None:
    """Says what computes the same; equal programs may each have a spelling, or none."""
    program.__dict__[_KEY] = spelling


def spelling_of(program: ElementProgram) -> Spelling | None:
    found: Spelling | None = program.__dict__.get(_KEY)
    return found


def spell_batched(
    batched: ElementProgram, program: ElementProgram, positions: Sequence[int | None]
) -> None:
    """Says the same of a program with one more batch axis, the first one of all outputs."""
    spelling = spelling_of(program)
    if spelling is not None:
        spell(batched, jax.vmap(spelling, tuple(positions), 0))
