"""``jm.fuse`` is ``jax.vmap``: every operation with its parameters, and random compositions."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxmagma import jaxpr
from jaxmagma.functions import FUNCTIONS
from tests.conformance.comparison import element_alone, failure, shrunk, whole
from tests.conformance.composition import Composition, alone, drawn
from tests.conformance.operations import OPERATIONS
from tests.jaxprs import equations


TOGETHER, FUNCTIONS_DRAWN = 10, 200


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
    "one_minus_square": "in the derivative of tanh, of newer releases",
    "expand_dims": "no primitive of the releases from the oldest to the newest",
}
# Parameters that have one value wherever a function of an element is traced, or that no rule reads.
UNVARIED = """sharding out_sharding name jaxpr call_jaxpr inline ctx_mesh keep_unused donated_invars
in_shardings out_shardings in_layouts out_layouts compiler_options_kvs jvp_jaxpr_fun jvp_jaxpr_thunk
num_consts symbolic_zeros fwd_jaxpr_thunk bwd out_trees fun_jaxpr policy prevent_cse differentiated
concrete split_transpose _split_transpose linear ft_in ft_out memory_spaces aliases dst_sharding
update_jaxpr update_consts mul_impl dst_type new_sharding program unreduced
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
