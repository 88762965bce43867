"""Loads the compiled modules and registers their handlers with XLA, when first needed.

Registration waits for the first lowering, so that importing the package touches no backend and a
broken build cannot take JAX's own backends down with it.
"""

import functools
import importlib
from types import ModuleType

import jax


# JAX's platform name: the module that serves it, and what XLA calls the platform.
_MODULES = {"cpu": ("jaxmagma._cpu", "cpu"), "cuda": ("jaxmagma._cuda", "CUDA")}


@functools.cache
def load(platform: str) -> ModuleType | str:
    """The native module for a platform, its handlers registered, or why there is none."""
    name, target_platform = _MODULES[platform]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"this build of jaxmagma has no {platform} backend ({error})"
    for target, handlers in module.registrations().items():
        jax.ffi.register_ffi_target(target, handlers, platform=target_platform)
    return module
