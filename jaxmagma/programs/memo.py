"""Results that are remembered for as long as the programs live that they are of.

A program is a key by its contents, the values of its constants among them.  ``functools.lru_cache``
would keep programs, plans and kernels long after the functions they were traced from are gone, up
to thousands of each.  Here what is known of a program is part of it, and equal programs share it.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from jaxmagma.programs.program import ElementProgram


# Of one program: numbers of elements that it has been lowered for, mostly.
MOST_RESULTS = 256

P = ParamSpec("P")
R = TypeVar("R")


class _Memory(dict[Any, Any]):
    """Results by function and further arguments, the oldest first.

    All equal programs have it, and it has the first of them: while one of them lives, that one is
    the key under which others find it.
    """

    __slots__ = ("__weakref__", "program")

    def __init__(self, program: ElementProgram) -> None:
        super().__init__()
        self.program = program


_memories: weakref.WeakKeyDictionary[ElementProgram, weakref.ref[_Memory]]
_memories = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _memory(program: ElementProgram) -> _Memory:
    found: _Memory | None = program.__dict__.get("_memory")
    if found is None:
        with _lock:
            known = _memories.get(program)
            found = None if known is None else known()
            if found is None:
                found = _Memory(program)
                _memories[program] = weakref.ref(found)
        program.__dict__["_memory"] = found
    return found


class Remembered(Generic[P, R]):
    """A function of a program, and of more, that is computed once."""

    def __init__(self, function: Callable[Concatenate[ElementProgram, P], R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, program: ElementProgram, /, *args: P.args, **options: P.kwargs) -> R:
        memory = _memory(program)
        key = (self._function, args, *options.items())
        try:
            found: R = memory[key]
        except KeyError:
            found = self._function(program, *args, **options)
            while len(memory) >= MOST_RESULTS:
                memory.pop(next(iter(memory)), None)
            memory[key] = found
        return found

    def cache_clear(self) -> None:
        """Forgets all results, as if no program had been seen."""
        for known in list(_memories.values()):
            memory = known()
            if memory is not None:
                for key in [x for x in memory if x[0] is self._function]:
                    memory.pop(key, None)


def remembered(function: Callable[Concatenate[ElementProgram, P], R]) -> Remembered[P, R]:
    """Remembers the results of a function, whose first argument is a program, on the program."""
    return Remembered(function)


Make = TypeVar("Make", bound=Callable[..., ElementProgram])


def interned(make: Make) -> Make:
    """Remembers the programs that a function makes, while they live, by its arguments."""
    made: weakref.WeakValueDictionary[Any, ElementProgram] = weakref.WeakValueDictionary()

    @functools.wraps(make)
    def wrapper(*args: Any) -> ElementProgram:
        found = made.get(args)
        if found is None:
            found = made[args] = make(*args)
        return found

    return wrapper  # type: ignore[return-value]
