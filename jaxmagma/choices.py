"""Which kernel runs a program: what was measured to be best, or what the model thinks is.

A *choice* names parameters of a backend's kernels, or plain JAX, or nothing: then the model in the
backend chooses. It is looked up by the program's structure, the size class of its arrays and the
architecture:

1. what ``using`` says, within its body;
2. what ``jm.tune`` found for this user, which is kept beside the compiled kernels;
3. the table for the architecture that the package ships, ``jaxmagma/tables/sm_90.json``;
4. else the model.

Processes that run one program together must make one kernel: to them what one user's disk has is
nothing, and the shipped table is all.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform as machine
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxmagma import cache, native
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import Constant, ElementProgram, Gather, Input


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


@remembered
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
        if not fields.get("is_complex"):  # most are not: it is in few names
            fields.pop("is_complex", None)
        if constant and isinstance(x, Input) and x.shared:
            fields["constant"] = ["constant", x.dtype.name, list(x.tile)]
        return [type(x).__name__, *fields.values()]
    return x.name if isinstance(x, np.dtype) else str(x)


def size_class(program: ElementProgram, extents: Sequence[int]) -> str:
    """``large`` where a call takes much longer than its launch, else ``small``."""
    return "large" if program.least_bytes(extents) >= LARGE_BYTES else "small"


@functools.cache
def architecture(platform: str) -> str:
    """Devices for which the same choice is best, such as ``sm_90``.

    Empty if there is no device, or if there are different ones, those of other processes among
    them.
    """
    if platform == "cpu":
        module = native.load("cpu")
        found = module if isinstance(module, str) else module.instruction_set()
        return "" if isinstance(module, str) else f"{machine.machine()}_{found}"
    try:
        devices = jax.devices(backend=platform)
    except RuntimeError:
        return ""
    capabilities = {getattr(device, "compute_capability", None) for device in devices}
    capability = capabilities.pop() if len(capabilities) == 1 else None
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
    several = jax.process_count() > 1
    if not arch or (several and platform == "cpu"):  # no process knows the CPUs of the others
        return MODEL
    names = [entry_name(program, extents)]
    if any(x.shared and x.constant is None for x in program.inputs):
        # A kernel is the same whether a basis is a constant or an argument.
        names.append(entry_name(program, extents, constant=True))
    own: tuple[Source, ...] = () if several else (_unsaved, UserChoices())
    for source in (*own, Book(TABLES / f"{arch}.json", "shipped table")):
        for name in names:
            found = source.find(arch, name)
            if found is not None:
                return decoded(found, source.origin)
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

Entry = Mapping[str, Any]


class Source(Protocol):
    """Where entries are found, and what ``explain`` says of them."""

    @property
    def origin(self) -> str: ...
    def find(self, arch: str, name: str) -> Entry | None: ...


def remember(arch: str, name: str, entry: Entry) -> Path | None:
    """Keeps an entry for this user; returns the file, or None if only this process knows."""
    why = UserChoices().add(arch, name, entry)
    if why is None:
        _unsaved.forget(arch, name)
        return cache.path(UserChoices.entry(arch, name))
    if why:
        warnings.warn(f"jaxmagma: the choice cannot be written: {why}", stacklevel=2)
    _unsaved.add(arch, name, entry)
    return None


class UserChoices:
    """Those on disk, an entry of the cache each, of this version of the package."""

    origin = "user cache"

    @staticmethod
    def entry(arch: str, name: str) -> str:
        return f"{cache.digest(FORMAT, _version(), arch, name)}.choice"

    def find(self, arch: str, name: str) -> Entry | None:
        found = cache.read(self.entry(arch, name))
        return found if isinstance(found, dict) else None

    def add(self, arch: str, name: str, entry: Entry) -> str | None:
        """Keeps an entry; returns why not, empty if the user wants no cache."""
        if cache.path("") is None:
            return ""
        kept = {**entry, "architecture": arch, "program": name, "version": _version()}
        return cache.write(self.entry(arch, name), kept) or None


class _Unsaved:
    """Entries that could not be written, for as long as this process runs."""

    origin = "this process"

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def find(self, arch: str, name: str) -> Entry | None:
        return self._entries.get((arch, name))

    def add(self, arch: str, name: str, entry: Entry) -> None:
        self._entries[arch, name] = entry

    def forget(self, arch: str, name: str) -> None:
        self._entries.pop((arch, name), None)


_unsaved = _Unsaved()


def _version() -> str:
    import jaxmagma

    return jaxmagma.__version__


Content = Mapping[str, Mapping[str, Entry]]


@dataclass(frozen=True)
class Book:
    """A table to ship: a file with entries by name for each architecture."""

    path: Path
    origin: str

    def find(self, arch: str, name: str) -> Entry | None:
        return self.entries(arch).get(name)

    def entries(self, arch: str) -> Mapping[str, Entry]:
        """What is known of an architecture; nothing if the file is missing or damaged."""
        try:
            status = os.stat(self.path)
        except OSError:
            return {}
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        return _read(self.path, stamp).get(arch, {})

    def add(self, arch: str, entries: Mapping[str, Entry]) -> None:
        """Adds or replaces entries.  One process at a time may.

        Raises:
          OSError: the file cannot be written.
        """
        # One that is damaged is replaced.
        with warnings.catch_warnings(action="ignore"):
            content = {name: dict(found) for name, found in _parse(self.path).items()}
        mine = content.setdefault(arch, {})
        mine.update({name: {**x, "version": _version()} for name, x in entries.items()})
        ordered = {a: dict(sorted(found.items())) for a, found in sorted(content.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "choices": ordered}, indent=1)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        draft.write_text(text + "\n")
        os.replace(draft, self.path)


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
