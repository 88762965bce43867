"""Which kernel runs a program: what was measured to be best, or what the model thinks is.

A *choice* names parameters of a backend's kernels, or plain JAX, or nothing: then the model in the
backend chooses. It is looked up by the program's structure, the size class of its arrays and the
architecture:

1. what ``using`` says, within its body;
2. the user's cache, where ``jm.tune`` keeps winners: ``choices.json`` beside the compiled kernels;
3. the table for the architecture that the package ships, ``jaxmagma/tables/sm_90.json``;
4. else the model.

Both files have one format. They are caches: what cannot be read is ignored.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import platform as machine
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmagma import native
from jaxmagma.program import Constant, ElementProgram, Gather, Input


FORMAT = 1
TABLES = Path(__file__).parent / "tables"

# Below this much traffic a call is mostly its launch: what is best there says little of large ones.
LARGE_BYTES = 16 << 20

Value = int | float | bool | str | None


@dataclass(frozen=True)
class Choice:
    """Parameters of a kernel by name, in order, and who chose them.

    ``parameters`` that are None leave everything to the model; ``plain`` asks for plain JAX.
    """

    parameters: tuple[tuple[str, Value], ...] | None = None
    plain: bool = False
    origin: str = field(default="model", compare=False)

    @staticmethod
    def of(parameters: Mapping[str, Value], origin: str) -> "Choice":
        return Choice(tuple(sorted(parameters.items())), origin=origin)

    @property
    def is_model(self) -> bool:
        return self.parameters is None and not self.plain

    def __str__(self) -> str:
        if self.plain:
            return "plain JAX"
        if self.parameters is None:
            return "the model's choice"
        return " ".join(f"{name}={value}" for name, value in self.parameters) or "defaults"


CALLER = "caller"
MODEL = Choice()
PLAIN = Choice(plain=True)


# ---- Names of programs and devices -------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def key(program: ElementProgram, *, constant: bool = False) -> str:
    """A stable name for the program's structure: the same for other values of its constants.

    If ``constant``, the name it would have if all of its shared operands were constants.

    A new field of a program or of an operation changes all names: what is known by the old ones is
    not found any more.
    """
    text = json.dumps(
        _of_any_length(program),
        separators=(",", ":"),
        check_circular=False,
        default=functools.partial(_structure, constant=constant),
    )
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _of_any_length(program: ElementProgram) -> ElementProgram:
    """The program without the lengths of the vectors it gathers from: as long as they like."""
    vectors = {x.vector for x in program.operations if isinstance(x, Gather)}
    if not vectors:
        return program
    inputs = (
        dataclasses.replace(x, tile=(0, *x.tile[1:])) if n in vectors else x
        for n, x in enumerate(program.inputs)
    )
    return dataclasses.replace(program, inputs=tuple(inputs))


def _structure(x: Any, constant: bool) -> Any:
    """What stands in a name for what is no number, string or tuple."""
    if isinstance(x, Constant):
        return ["constant", x.array.dtype.name, list(x.array.shape)]
    if isinstance(x, Gather):
        # What its transpose reads is no part of it. Names have a place for that, which is empty.
        return ["Gather", x.vector, x.index, x.tile, ["constant", "int32", [0]]]
    if dataclasses.is_dataclass(x):
        fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        if constant and isinstance(x, Input) and x.shared:
            fields["constant"] = ["constant", x.dtype.name, list(x.tile)]
        return [type(x).__name__, *fields.values()]
    return x.name if isinstance(x, np.dtype) else str(x)


def size_class(program: ElementProgram, extents: Sequence[int]) -> str:
    """``large`` where a call takes much longer than its launch, else ``small``."""
    return "large" if program.least_bytes(extents) >= LARGE_BYTES else "small"


@functools.cache
def architecture(platform: str) -> str:
    """Devices for which the same choice is best, such as ``sm_90``; empty if there is no device."""
    if platform == "cpu":
        module = native.load("cpu")
        found = module if isinstance(module, str) else module.instruction_set()
        return "" if isinstance(module, str) else f"{machine.machine()}_{found}"
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        return ""
    capability = getattr(device, "compute_capability", None)
    return f"sm_{capability.replace('.', '')}" if capability else ""


# ---- Looking up --------------------------------------------------------------------------------


# A new value makes `jit` trace and compile anew.
_forced = jax.make_user_context(None)


@contextlib.contextmanager
def using(choice: Choice) -> Iterator[None]:
    """In its body, programs are lowered with this choice, where the backend can."""
    with _forced(dataclasses.replace(choice, origin=CALLER)):
        yield


def choose(program: ElementProgram, extents: Sequence[int], platform: str) -> Choice:
    """What to run a program with."""
    forced: Choice | None = _forced.value
    if forced is not None:
        return forced
    arch = architecture(platform)
    if not arch:
        return MODEL
    names = [entry_name(program, extents)]
    if any(x.shared and x.constant is None for x in program.inputs):
        # A kernel is the same whether a basis is a constant or an argument.
        names.append(entry_name(program, extents, constant=True))
    for book in (_unsaved, user_cache(), Book(TABLES / f"{arch}.json", "shipped table")):
        known = {} if book is None else book.entries(arch)
        for name in names:
            if book is not None and name in known:
                return decoded(known[name], book.origin)
    return MODEL


def entry_name(program: ElementProgram, extents: Sequence[int], *, constant: bool = False) -> str:
    return f"{key(program, constant=constant)}-{size_class(program, extents)}"


def encoded(choice: Choice) -> dict[str, Any]:
    """As an entry of a book."""
    if choice.plain:
        return {"plain": True}
    return {} if choice.parameters is None else {"parameters": dict(choice.parameters)}


def decoded(entry: Mapping[str, Any], origin: str) -> Choice:
    if entry.get("plain"):
        return Choice(plain=True, origin=origin)
    found = entry.get("parameters")
    if not isinstance(found, dict):
        return Choice(origin=origin)
    return Choice.of(found, origin)


# ---- Where they are kept -----------------------------------------------------------------------


def cache_folder() -> Path | None:
    """The folder of compiled kernels; None if the user wants no cache. As in ``cuda/cache.cc``."""
    folder = os.environ.get("JAXMAGMA_CACHE_DIR")
    if folder is not None:
        return None if folder in ("", "off") else Path(folder)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "jaxmagma"
    if home := os.environ.get("HOME"):
        return Path(home) / ".cache" / "jaxmagma"
    return None


def user_cache() -> "Book | None":
    folder = cache_folder()
    return None if folder is None else Book(folder / "choices.json", "user cache", _version())


def remember(arch: str, name: str, entry: Mapping[str, Any]) -> Path | None:
    """Keeps an entry in the user's cache; returns the file, or None if only this process knows."""
    book = user_cache()
    if book is not None:
        try:
            book.add(arch, {name: entry})
            _unsaved.forget(arch, name)
            return book.path
        except OSError as error:
            warnings.warn(f"jaxmagma: {book.path} cannot be written: {error}", stacklevel=2)
    _unsaved.add(arch, {name: entry})
    return None


def _version() -> str:
    import jaxmagma

    return jaxmagma.__version__


@dataclass(frozen=True)
class Book:
    """A file of choices: for each architecture, entries by name.

    Entries of another version of the package than ``version`` are not seen; None sees all of them.
    """

    path: Path
    origin: str
    version: str | None = None

    def entries(self, arch: str) -> Mapping[str, Mapping[str, Any]]:
        """What is known of an architecture; nothing if the file is missing or damaged."""
        try:
            status = os.stat(self.path)
        except OSError:
            return {}
        content = _read(self.path, (status.st_mtime_ns, status.st_size, status.st_ino))
        found = content.get(arch, {})
        if self.version is None:
            return found
        return {name: x for name, x in found.items() if x.get("version") == self.version}

    def add(self, arch: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds or replaces entries. Of processes that write at once, none loses another's.

        Raises:
          OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(self.path.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # One that is damaged is replaced.
            with warnings.catch_warnings(action="ignore"):
                content = {name: dict(found) for name, found in _parse(self.path).items()}
            version = self.version or _version()
            mine = content.setdefault(arch, {})
            mine.update({name: {**x, "version": version} for name, x in entries.items()})
            ordered = {a: dict(sorted(found.items())) for a, found in sorted(content.items())}
            text = json.dumps({"format": FORMAT, "choices": ordered}, indent=1)
            write(self.path, text + "\n")


def write(path: Path, text: str) -> None:
    """Replaces a file. Readers do not lock: they see the old one or the new one.

    Raises:
      OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


class _Unsaved:
    """Entries that could not be written, for as long as this process runs."""

    origin = "this process"

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Mapping[str, Any]]] = {}

    def entries(self, arch: str) -> Mapping[str, Mapping[str, Any]]:
        return self._entries.get(arch, {})

    def add(self, arch: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._entries.setdefault(arch, {}).update(entries)

    def forget(self, arch: str, name: str) -> None:
        self._entries.get(arch, {}).pop(name, None)


_unsaved = _Unsaved()

Content = Mapping[str, Mapping[str, Mapping[str, Any]]]


@functools.lru_cache(maxsize=16)
def _read(path: Path, stamp: tuple[int, ...]) -> Content:
    """The content of a file as of a time; so a file that is damaged is complained of once."""
    return _parse(path)


def _parse(path: Path) -> Content:
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, not {FORMAT}")
        found = content["choices"]
        if not all(isinstance(x, dict) for y in found.values() for x in (y, *y.values())):
            raise ValueError("an entry is no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"jaxmagma: ignores {path}, which is damaged: {error!r}", stacklevel=2)
        return {}
    return found
