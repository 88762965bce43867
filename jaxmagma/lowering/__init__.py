"""From a program to a native kernel: plans it and asks the platform's backend."""

import functools
import importlib
from dataclasses import replace

from jaxmagma import choices, native
from jaxmagma.choices import MODEL, Choice
from jaxmagma.lowering import cache
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.plan import Plan
from jaxmagma.program import ElementProgram


def lower(program: ElementProgram, extents: tuple[int, ...], platform: str) -> Kernel | Declined:
    """The kernel that runs ``program`` over batch axes of these extents, or why there is none.

    Its parameters are those that :mod:`jaxmagma.choices` has, or the model's.
    """
    choice = choices.choose(program, extents, platform)
    found = _lower(program, extents, platform, choice)
    if isinstance(found, Declined) and choice.parameters is not None:
        if choice.origin == choices.CALLER:
            return found
        # It was measured when kernels were other ones.
        choice = MODEL
        found = _lower(program, extents, platform, choice)
    return replace(found, choice=choice)


@functools.lru_cache(maxsize=1024)
def planned(program: ElementProgram, platform: str) -> Plan:
    """The plan that the platform's backend makes a kernel of."""
    made: Plan = importlib.import_module(f"jaxmagma.lowering.{platform}").planned(program)
    return made


@functools.lru_cache(maxsize=4096)
def _lower(
    program: ElementProgram, extents: tuple[int, ...], platform: str, choice: Choice
) -> Kernel | Declined:
    for out in program.outputs:
        everywhere = program.batch[out.value] | set(out.batch)
        if len(everywhere) < program.batch_rank:
            return Declined("an output sums over a batch axis that its value does not depend on")
    module = native.load(platform)
    if isinstance(module, str):
        return Declined(module)
    if choice.plain:
        return Declined("it was measured to be faster")
    # Of those made for the CPU the number of elements decides; a tuner tries most but once.
    kept = platform != "cpu" and choice.origin != choices.CALLER
    file = cache.file_of(program, extents, platform, choice) if kept else None
    found = None if file is None else cache.read(file)
    if found is not None:
        return found
    made = _made(program, extents, platform, choice)
    if file is not None and isinstance(made, Kernel):
        cache.write(file, made)
    return made


def _made(
    program: ElementProgram, extents: tuple[int, ...], platform: str, choice: Choice
) -> Kernel | Declined:
    backend = importlib.import_module(f"jaxmagma.lowering.{platform}")
    if choice.parameters is None:
        made: Kernel | Declined = backend.lower(planned(program, platform), extents)
        return made
    try:
        parameters = backend.Parameters(**dict(choice.parameters))
        made = backend.lower(planned(program, platform), extents, parameters)
    except (TypeError, ValueError, ArithmeticError) as error:
        # Files say what they like, and a parameter may mean something else by now.
        return Declined(f"no kernel has the parameters {choice}: {error}")
    return made
