"""Why a candidate is removed: by the rules of its backend, or because of what comes of it.

The kernel that the model chooses is never removed: it is what the others are compared with.
"""

from jaxmagma.lowering.rules import Rules


INVALID = "not a combination of parameters"
DECLINED = "no such kernel"
SAME = "the same kernel as another"
FAILED = "does not compile or run"
WRONG = "other results than the model's kernel"


def names_of(rules: Rules) -> tuple[str, ...]:
    """All reasons that there are, in the order in which they are looked at."""
    paper = [x.name for x in rules.parameters]
    later = [x.name for x in (*rules.kernel, *rules.code)]
    return tuple(dict.fromkeys([INVALID, *paper, DECLINED, SAME, *later, FAILED, WRONG]))
