"""Calls of jaxprs, which are read as what they call."""

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmagma.jaxpr.equations import Rule, Unsupported, anything


def _call(jaxpr: str, *others: str) -> Rule:
    """A call of a jaxpr; where it is compiled and what of it is kept do not change its values."""
    return Rule(lambda equation: equation.params[jaxpr], (jaxpr,), dict.fromkeys(others, anything))


_JIT = _call(
    "jaxpr",
    *("in_shardings", "out_shardings", "in_layouts", "out_layouts", "donated_invars", "ctx_mesh"),
    *("name", "keep_unused", "inline", "compiler_options_kvs"),
)


_REMAT = _call("jaxpr", "prevent_cse", "differentiated", "policy", "name", "concrete")
_CALL = _call("call_jaxpr", "name")
# Whoever differentiates a program knows the rules that came along: see `derivatives`.
_CUSTOM_VJP = ("fwd_jaxpr_thunk", "bwd", "num_consts", "out_trees", "symbolic_zeros")
CALLS: dict[str, Rule] = {
    "jit": _JIT,
    "pjit": _JIT,
    "closed_call": _CALL,
    "core_call": _CALL,
    "remat": _REMAT,
    "remat2": _REMAT,
    "checkpoint": _REMAT,
    "custom_linear_map": _call("jaxpr", "transpose", "count"),
    "custom_jvp_call": _call("call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros"),
    "custom_vjp_call": _call("call_jaxpr", *_CUSTOM_VJP),
    "custom_vjp_call_jaxpr": _call("fun_jaxpr", "fwd_jaxpr_thunk", *_CUSTOM_VJP),
}


def has_own_rule(equation: JaxprEqn) -> bool:
    """Whether it is a call with a rule of differentiation of the user's own."""
    return equation.primitive.name.startswith("custom_")


def inner_jaxpr(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation calls, if it does nothing else."""
    rule = CALLS.get(equation.primitive.name)
    if rule is None:
        return None
    try:
        rule.check(equation)
    except Unsupported:
        return None
    found = rule.read(equation)
    return found if isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, [])
