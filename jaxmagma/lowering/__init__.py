"""From a program to a native kernel: plans it and asks the platform's backend.

``lower`` looks at the world: the devices, the environment, what was tuned.  All below it are
functions of their arguments.
"""

from dataclasses import replace

from jaxmagma import choices, native
from jaxmagma.choices import MODEL, Choice
from jaxmagma.lowering import kept
from jaxmagma.lowering.backends import BACKENDS
from jaxmagma.lowering.kernel import Declined, Kernel
from jaxmagma.lowering.target import Target
from jaxmagma.plans.plan import Plan
from jaxmagma.programs.fallback import SYMBOLIC, is_symbolic
from jaxmagma.programs.memo import remembered
from jaxmagma.programs.program import ElementProgram


def lower(program: ElementProgram, extents: tuple[int, ...], platform: str) -> Kernel | Declined:
    """The kernel that runs ``program`` over batch axes of these extents, or why there is none.

    Its parameters are those that :mod:`jaxmagma.choices` has, or the model's.
    """
    module = native.load(platform)
    if isinstance(module, str):
        return Declined(module)
    if is_symbolic(extents):
        return Declined(SYMBOLIC)
    return lower_for(
        program, extents, Target.here(platform), choices.choose(program, extents, platform)
    )


def lower_for(
    program: ElementProgram, extents: tuple[int, ...], target: Target, choice: Choice = MODEL
) -> Kernel | Declined:
    """The same for any machine, where another process may run it."""
    found = _lower(program, extents, target, choice)
    if isinstance(found, Declined) and choice.parameters is not None:
        if choice.origin == choices.CALLER:
            # These parameters are asked for, and not those of parts.
            return replace(found, excess=None)
        # It was measured when kernels were other ones.
        choice = MODEL
        found = _lower(program, extents, target, choice)
    return replace(found, choice=choice)


@remembered
def planned(program: ElementProgram, platform: str) -> Plan:
    """The plan that the platform's backend makes a kernel of, if it can."""
    return BACKENDS[platform].planned(program)


@remembered
def plans(program: ElementProgram, platform: str) -> tuple[Plan, ...]:
    """That plan, and others for where its tiles are too large; ``Kernel.plan`` says which one."""
    return (planned(program, platform), *BACKENDS[platform].alternatives(program))


@remembered
def _lower(
    program: ElementProgram, extents: tuple[int, ...], target: Target, choice: Choice
) -> Kernel | Declined:
    for out in program.outputs:
        everywhere = program.batch[out.value] | set(out.batch)
        if len(everywhere) < program.batch_rank:
            return Declined("along a batch axis, an output is the same for all elements")
    if choice.plain:
        return Declined("it was measured to be faster")
    # Of those made for the CPU the number of elements decides; a tuner tries most but once.
    if target.platform == "cpu" or choice.origin == choices.CALLER:
        return _made(program, extents, target, choice)
    name = kept.name_of(program, extents, target, choice)
    made = kept.read(name)
    if made is None:
        made = _made(program, extents, target, choice)
        kept.write(name, made)
    return made


def _made(
    program: ElementProgram, extents: tuple[int, ...], target: Target, choice: Choice
) -> Kernel | Declined:
    if choice.parameters is None:
        return _first_with_room(program, extents, target)
    platform = target.platform
    backend = BACKENDS[platform]
    try:
        parameters = backend.Parameters(**dict(choice.parameters))
        made = backend.lower(planned(program, platform), extents, parameters, target)
        if isinstance(made, Declined) and made.lacks_room:
            usual = _lower(program, extents, target, MODEL)
            if isinstance(usual, Kernel) and usual.plan:
                plan = plans(program, platform)[usual.plan]
                again = backend.lower(plan, extents, parameters, target)
                made = replace(again, plan=usual.plan) if isinstance(again, Kernel) else again
    except (TypeError, ValueError, ArithmeticError) as error:
        # Files say what they like, and a parameter may mean something else by now.
        return Declined(f"no kernel has the parameters {choice}: {error}")
    return made


def _first_with_room(
    program: ElementProgram, extents: tuple[int, ...], target: Target
) -> Kernel | Declined:
    """The kernel of the favourite plan, or of the next one, if that makes tiles too large."""
    platform = target.platform
    backend = BACKENDS[platform]
    made = backend.lower(planned(program, platform), extents, target=target)
    if isinstance(made, Kernel) or not made.lacks_room:
        return made
    declined = [made]
    for number, plan in enumerate(plans(program, platform)[1:], start=1):
        made = backend.lower(plan, extents, target=target)
        if isinstance(made, Kernel):
            return replace(made, plan=number)
        declined.append(made)
    return min(declined, key=lambda x: 0.0 if x.excess is None else x.excess.times)
