"""``jm.fuse`` is ``jax.vmap``: every operation with its parameters, and random compositions."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma import jaxpr
from jaxmagma.programs.functions import FUNCTIONS, ROUNDINGS
from tests.conformance.comparison import element_alone, failure, shrunk, whole
from tests.conformance.composition import Composition, Line, alone, drawn
from tests.conformance.draw import Argument
from tests.conformance.interpreter import evaluated, wide_range
from tests.conformance.operations import OPERATIONS
from tests.jaxprs import equations


TOGETHER, FUNCTIONS_DRAWN = 10, 60
HUGE = 1e30  # its square is none in float32


def check(composition: Composition) -> None:
    found = failure(composition)
    if found is not None:
        small, why = shrunk(composition, found)
        pytest.fail(f"seed {composition.seed}: {why}\n{small}", pytrace=False)


@functools.cache
def cases(name: str) -> list[Composition]:
    return list(alone(name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    for composition in cases(name):
        check(composition)


@pytest.mark.parametrize("first", range(0, FUNCTIONS_DRAWN, TOGETHER))
def test_compositions(first: int) -> None:
    for seed in range(first, first + TOGETHER):
        check(drawn(seed))


def test_compositions_as_jax_is_installed() -> None:
    """Without numbers of 64 bits: constants and arguments that have them are narrowed."""
    with jax.enable_x64(False):
        for seed in range(200_000, 200_020):
            check(drawn(seed))


@pytest.mark.parametrize("run", ["kernels", "jit"])
@pytest.mark.parametrize("seed", range(100_000, 100_006))
def test_compiled_compositions(seed: int, run: str) -> None:
    check(replace(drawn(seed, lines=3), run=run))


# ---- Nothing is left out -------------------------------------------------------------------------

# Made by no function of an element: by other rules, or under another name in this release of JAX.
INNER = {
    "first": "of two operands the first, in derivatives of programs",
    "select": "the function of select_n",
    "round_away": "the function of round",
    "round_even": "the function of round",
    "element_program": "a program inside of one",
    "fused_multiply_add": "in determinants and inverses",
    "product_error": "in determinants and inverses",
    "inverse_binade": "in inverses",
    "common_digits": "of bits that are masked",
    "keep_digits": "of bits that are masked",
    "reciprocal": "of divisors, in plans",
    "quotient": "of several values by one, in plans",
    "power_of_root": "of halves and thirds, in plans",
    **dict.fromkeys(ROUNDINGS.values(), "of what is of a narrower dtype"),
    "one_minus_square": "in the derivative of tanh, of newer releases",
    "call_hi_primitive": "of newer releases",
    "log2": "of newer releases",
    "polynomial": "of newer releases",
    **dict.fromkeys(("lt_to", "le_to"), "in searches, of older releases"),
    "expand_dims": "no primitive of the releases from the oldest to the newest",
}
# Parameters that have one value wherever a function of an element is traced, or that no rule reads.
UNVARIED = """sharding out_sharding name jaxpr call_jaxpr inline ctx_mesh keep_unused donated_invars
in_shardings out_shardings in_layouts out_layouts compiler_options_kvs jvp_jaxpr_fun jvp_jaxpr_thunk
num_consts symbolic_zeros fwd_jaxpr_thunk bwd out_trees fun_jaxpr policy prevent_cse differentiated
concrete split_transpose _split_transpose linear ft_in ft_out memory_spaces aliases dst_sharding
update_jaxpr update_consts mul_impl dst_type new_sharding program unreduced is_stable
branches_platforms subset_by_index algorithm sort_eigenvalues use_magma pivoting
const_lengths jaxprs permutation_size conjugate_a""".split()


def observed() -> Iterator[Any]:
    """Every equation that the cases trace."""
    for name in OPERATIONS:
        for composition in cases(name):
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                try:
                    run = whole(replace(composition, derivative="value"), element_alone)
                    closed = jax.make_jaxpr(run)(composition.arrays())
                except Exception:
                    continue
                yield from equations(closed.jaxpr)


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, set[str]]]:
    """The values of every parameter, by primitive."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for equation in observed():
        parameters = found[equation.primitive.name]
        for key, value in equation.params.items():
            parameters[key].add(str(value)[:200])
    return found


def test_every_rule_has_a_case(seen: dict[str, dict[str, set[str]]]) -> None:
    rules = {*jaxpr.RULES, *jaxpr.POINTWISE, *FUNCTIONS} - {*INNER}
    known = {name.replace("-", "_") for name in seen}
    aliases = {"copy_p": "copy", "copy": "copy_p"}
    missing = {
        name
        for name in rules
        if name.replace("-", "_") not in known and aliases.get(name, name) not in known
    }
    assert not missing


def test_every_parameter_of_a_rule_is_varied(seen: dict[str, dict[str, set[str]]]) -> None:
    rules = {*jaxpr.RULES, *jaxpr.POINTWISE, *FUNCTIONS}
    constant = {
        f"{name}.{key}={next(iter(values))}"
        for name, parameters in seen.items()
        for key, values in parameters.items()
        if name in rules and len(values) < 2 and key not in UNVARIED
    }
    assert not constant, sorted(constant)


def test_a_mistake_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite sees a rule that forgets a parameter."""
    rule = jaxpr.RULES["cumsum"]

    def forward(reader: Any, equation: Any, x: Any) -> Any:
        parameters = {**equation.params, "reverse": False}
        return rule.read(reader, equation.replace(params=parameters), x)

    monkeypatch.setitem(jaxpr.RULES, "cumsum", replace(rule, read=forward))
    drawn_alone = itertools.chain.from_iterable(alone("cumulative", seed) for seed in range(9))
    found = ((c, failure(c)) for c in drawn_alone)
    small, why = next(shrunk(c, why) for c, why in found if why is not None)
    assert why.kind in ("value", "tangent", "gradient", "second derivative")
    assert len(small.lines) == 1 and "cumsum" in small.source()


# ---- What is no mistake --------------------------------------------------------------------------


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A transform that maps this function, whatever it is given."""

    def transform(given: Any, in_axes: Any, out_axes: Any) -> Any:
        return jax.vmap(lambda x: (function(x),), in_axes, out_axes)

    return transform


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: (x * HUGE) * (HUGE / HUGE), None),
        (lambda x: x * HUGE * 1.001, "value"),
        (lambda x: x * HUGE * HUGE, None),  # as vmap has it
        (lambda x: -(x * HUGE * HUGE), "value"),
        (lambda x: x * 0, "value"),
    ],
)
def test_what_overflows_in_one_order_alone_is_no_difference(
    function: Callable[..., Any], kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(("v0",), f"a0 * {HUGE!r} * {HUGE!r} / {HUGE!r}", (), "a product")
    argument = Argument("a0", (2,), "float32", 0, seed=1)
    composition = Composition(3, (argument,), (line,), (("v0", 0),), derivative="value")
    monkeypatch.setattr(jm, "fuse", replaced(function))
    found = failure(composition)
    assert (found and found.kind) == kind


def test_a_wider_range_has_the_same_precision() -> None:
    def function(x: Any) -> Any:
        return x * np.float32(HUGE) * np.float32(HUGE) / np.float32(HUGE), x + 1

    x = np.array([0.1, 1e-9], np.float32)
    closed = jax.make_jaxpr(function)(x)
    with np.errstate(over="ignore"):
        wanted = x * np.float32(HUGE), x + np.float32(1)
    with wide_range():
        found = evaluated(closed, [x])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-7)
    assert found[1][1] == 1
    assert np.isinf(evaluated(closed, [x])[0]).all()
