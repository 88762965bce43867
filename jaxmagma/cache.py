"""What is kept on disk for processes to come: generated and compiled kernels, and choices.

An entry is a file, named by a digest of all that its content was made of and by its kind.  What the
format is, and whose folder may be used, stands in ``cache/cache.h``: kernels are compiled without
Python, and that keeps the same entries.  Those made here are JSON.  What is damaged, or cannot be
read or written, is as good as not there.
"""

import functools
import hashlib
import importlib
import json
import warnings
from pathlib import Path
from typing import Any


def digest(*parts: Any) -> str:
    """Of numbers, names, lists of them, and bytes."""
    made = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part).encode()
        made.update(b"%d:" % len(data))
        made.update(data)
    return made.hexdigest()


def read(name: str) -> Any:
    """What an entry holds; None if there is none."""
    module = _module()
    found = None if module is None else module.read(name)
    return None if found is None else json.loads(found)


def write(name: str, content: Any) -> str:
    """Keeps numbers, names, lists and dictionaries of them; returns why not, if it cannot."""
    module = _module()
    if module is None:
        return "this build of jaxmagma has no cache"
    why: str = module.write(name, json.dumps(content).encode())
    return why


def path(name: str) -> Path | None:
    """The file of an entry; None if the user wants no cache."""
    module = _module()
    folder = "" if module is None else module.folder()
    return Path(folder) / name if folder else None


def is_kept() -> bool:
    """Whether entries are kept at all."""
    module = _module()
    return module is not None and bool(module.folder()) and not module.refusal()


def _module() -> Any:
    """The native module, if there is one.  Of a folder that is not used the user hears once."""
    module = _loaded()
    if module is not None:
        _complain_of(module.folder())
    return module


@functools.cache
def _loaded() -> Any:
    try:
        return importlib.import_module("jaxmagma._cache")
    except ImportError:
        return None


@functools.lru_cache(maxsize=16)
def _complain_of(folder: str) -> None:
    why = _loaded().refusal()
    if why:
        warnings.warn(f"jaxmagma: nothing is kept in {folder}: {why}", stacklevel=2)
