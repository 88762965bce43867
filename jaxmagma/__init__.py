"""Small tensor contractions over very many elements, one native kernel each."""

import importlib.metadata
import pkgutil

from jaxmagma.faces.explain import Explanation as Explanation
from jaxmagma.faces.explain import explain as explain
from jaxmagma.faces.roofline import Roofline as Roofline
from jaxmagma.faces.roofline import roofline as roofline
from jaxmagma.frontends.einsum import einsum as einsum
from jaxmagma.frontends.fuse import fuse as fuse
from jaxmagma.frontends.index import GatherAxis as GatherAxis
from jaxmagma.frontends.index import ScatterAxis as ScatterAxis
from jaxmagma.frontends.index import gather as gather
from jaxmagma.frontends.index import scatter_add as scatter_add
from jaxmagma.tune import Tuning as Tuning
from jaxmagma.tune import tune as tune


try:
    __version__ = importlib.metadata.version("jaxmagma")
except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+source"

# A source tree has no compiled modules: there, those of the installed package are used.
__path__ = pkgutil.extend_path(__path__, __name__)
