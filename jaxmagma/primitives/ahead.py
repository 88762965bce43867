"""Kernels are compiled from the moment they are lowered, side by side.

XLA asks for them one after the other, when all else of an executable is done.  What it asks for is
on disk by then, or it waits for who is compiling it.
"""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

from jaxmagma import cache, choices, native
from jaxmagma.lowering.kernel import Kernel


def begin(kernel: Kernel, platform: str) -> None:
    """Has a thread compile a kernel for the devices of this process, if it is compiled at all.

    Who asks for the kernel hears of errors.
    """
    if not kernel.source:
        return
    architecture = choices.architecture(platform)
    if architecture and cache.is_kept():
        _begin(kernel.source, architecture, platform)


@functools.lru_cache(maxsize=256)  # an executable may have a kernel many times
def _begin(source: str, architecture: str, platform: str) -> None:
    module = native.load(platform)
    if not isinstance(module, str):
        # When the process ends no thread is to be had.
        with contextlib.suppress(RuntimeError):
            _threads().submit(module.specialise, source, architecture)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="jaxmagma")
