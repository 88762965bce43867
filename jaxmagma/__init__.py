"""Small tensor contractions over very many elements, one native kernel each."""

from jaxmagma.einsum import einsum as einsum
