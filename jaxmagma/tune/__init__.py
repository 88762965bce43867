"""``jm.tune``: finds the fastest of many kernels for a program, by measuring them.

A declared space of parameters (``space``) is pruned by rules (``rules``); what is left races on the
device (``search``, ``race``, ``device``), and the winner is kept (``jaxmagma.choices``).
``python -m jaxmagma.tune`` does so for a suite of programs (``suite``).
"""

from jaxmagma.tune.tuner import Tuning as Tuning
from jaxmagma.tune.tuner import Variant as Variant
from jaxmagma.tune.tuner import tune as tune
