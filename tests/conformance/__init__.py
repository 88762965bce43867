"""``jm.fuse`` against ``jax.vmap``, on functions of an element that are generated.

A function is a list of lines of source; each is drawn by one entry of the table of operations.
``python -m tests.conformance SEED...`` prints the function of a seed and what came of it.
"""
