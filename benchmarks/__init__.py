"""Measured comparisons with ``jnp.einsum``: ``python -m benchmarks --help``."""
