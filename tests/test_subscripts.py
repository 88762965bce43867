"""The grammar of einsum: what is read from a call, and what is said about a wrong one."""

import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmagma as jm
from jaxmagma.frontends.subscripts import label_extents, parse


def zeros(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.zeros(shape) for shape in shapes]


# ---- What is read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shapes", "terms", "output"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)], ["ij", "jk"], "ik"),
        (" i j , j k -> k i ", [(2, 3), (3, 4)], ["ij", "jk"], "ki"),
        ("ij,jk", [(2, 3), (3, 4)], ["ij", "jk"], "ik"),
        ("kj,ji", [(2, 3), (3, 4)], ["kj", "ji"], "ik"),
        ("ba", [(2, 3)], ["ba"], "ab"),
        ("bAa", [(2, 3, 4)], ["bAa"], "Aab"),
        ("ii", [(2, 2)], ["ii"], ""),
        ("iij", [(2, 2, 3)], ["iij"], "j"),
        ("i,i,i", [(2,), (2,), (2,)], ["i", "i", "i"], ""),
        ("ij->", [(2, 3)], ["ij"], ""),
        (",i,->i", [(), (3,), ()], ["", "i", ""], "i"),
        ("", [()], [""], ""),
        ("éij,jk->éik", [(2, 3, 4), (4, 5)], ["éij", "jk"], "éik"),
    ],
)
def test_labels(spec: str, shapes: list[tuple[int, ...]], terms: list[str], output: str) -> None:
    found = parse(spec, zeros(*shapes))
    assert (found[0], found[1]) == (terms, output)


@pytest.mark.parametrize(
    ("spec", "shapes", "output_shape"),
    [
        ("...ij,...jk->...ik", [(7, 2, 3), (7, 3, 4)], (7, 2, 4)),
        ("...ij,...jk", [(7, 2, 3), (7, 3, 4)], (7, 2, 4)),
        ("...ij,jk->ik...", [(7, 8, 2, 3), (3, 4)], (2, 4, 7, 8)),
        ("i...j,j->...i", [(2, 7, 8, 3), (3,)], (7, 8, 2)),
        ("...i,...i->...", [(7, 8, 2), (8, 2)], (7, 8)),
        ("...i,...i", [(7, 1, 2), (8, 2)], (7, 8)),
        ("...,...", [(7, 8), (8,)], (7, 8)),
        ("...,...->...", [(), (8,)], (8,)),
        ("...a->a...", [(7, 2)], (2, 7)),
        ("...a->a", [(7, 2)], (2,)),
        ("a...->...", [(7,)], ()),
    ],
)
def test_ellipsis(spec: str, shapes: list[tuple[int, ...]], output_shape: tuple[int, ...]) -> None:
    terms, output, _ = parse(spec, zeros(*shapes))
    extents = label_extents(terms, shapes)
    assert tuple(extents[label] for label in output) == output_shape
    assert jm.einsum(spec, *zeros(*shapes)).shape == output_shape
    assert jnp.einsum(spec, *zeros(*shapes)).shape == output_shape


def test_labels_under_an_ellipsis_are_new_ones() -> None:
    used = "abcdefghijklmnopqrst"
    terms, output, _ = parse(f"...{used}->{used}...", zeros((2, 3) + (1,) * len(used)))
    assert len(set(terms[0])) == len(terms[0]) == len(used) + 2
    assert set(output) == set(terms[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: (a, [0, 1, 2], b, [2, 3], [0, 1, 3]),
        lambda a, b: (a, [0, 1, 2], b, [2, 3]),
        lambda a, b: (a, (9, 1, 2), b, (2, 3), (3, 9)),
        lambda a, b: (a, [100, 101, 102], b, [102, 103], [103, 100, 101]),
        lambda a, b: (a, [Ellipsis, 2], b, [2, 3], [3, Ellipsis]),
        lambda a, b: (a, [Ellipsis, 1, 2], b, [2, 3]),
        lambda a, b: (a, ["e", "i", "j"], b, ["j", "k"], ["e", "k"]),
        lambda a, b: (2.0, [], a, [0, 1, 2], b, [2, 3], [0, 3]),
        lambda a, b: (a, [0, 1, 2], [0]),
    ],
)
def test_interleaved_form(call: Callable[..., tuple[Any, ...]]) -> None:
    random = np.random.default_rng(0)
    arguments = call(random.random((5, 2, 3)), random.random((3, 4)))
    result, expected = jm.einsum(*arguments), jnp.einsum(*arguments)
    np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_extents_of_labels() -> None:
    assert label_extents(["ij", "jk"], [(2, 3), (3, 4)]) == {"i": 2, "j": 3, "k": 4}
    assert label_extents(["ij", "jk"], [(2, 1), (3, 4)]) == {"i": 2, "j": 3, "k": 4}
    assert label_extents(["ij", "jk"], [(2, 3), (1, 4)]) == {"i": 2, "j": 3, "k": 4}
    assert label_extents(["ii", "i"], [(1, 1), (0,)]) == {"i": 0}
    assert label_extents(["", "i"], [(), (5,)]) == {"i": 5}


# ---- What is wrong ---------------------------------------------------------------------------

A, B = np.ones((5, 2, 3)), np.ones((3, 4))

WRONG_CALLS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "one operand too few": (("eij,jk->eik", A), ("2 operand", "1 array", "eij,jk->eik")),
    "one operand too many": (("eij,jk->eik", A, B, B), ("2 operand", "3 array")),
    "no operand": (("eij",), ("1 operand", "0 array")),
    "unknown output label": (("eij,jk->eiq", A, B), ("'q'", "not in any operand")),
    "an ellipsis hides no output label": (("...j->a", A), ("'a'", "not in any operand")),
    "repeated output label": (("eij,jk->eii", A, B), ("'i'", "more than once")),
    "extents of two operands": (
        ("eij,jk->eik", A, np.ones((7, 4))),
        ("'j'", "3", "7", "operand 0", "operand 1", "(5, 2, 3)", "(7, 4)"),
    ),
    "extents of one operand": (("eii->e", A), ("'i'", "2", "3", "operand 0", "(5, 2, 3)")),
    "extents under an ellipsis": (
        ("...i,...i->...", np.ones((5, 2)), np.ones((4, 2))),
        ("5", "4", "operand 0", "operand 1"),
    ),
    "rank too small": (("eij,jk->eik", A, A[0, 0]), ("operand 1", "'jk'", "(3,)", "2 axes")),
    "rank too large": (("eij,jk->eik", A, A), ("operand 1", "'jk'", "(5, 2, 3)")),
    "rank too small for an ellipsis": (("...eijk->e", A), ("operand 0", "(5, 2, 3)")),
    "rank of a scalar": ((",eij->e", A, A), ("operand 0", "''", "(5, 2, 3)")),
    "a dot": (("e.ij->e", A), ("'.'", "e.ij->e")),
    "two dots": (("e..ij->e", A), ("'.'", "e..ij->e")),
    "four dots": (("e....->e", A), ("'.'",)),
    "two ellipses": (("...i...->i", A), ("'.'",)),
    "two ellipses in the output": (("...j->...j...", A), ("'.'",)),
    "half an arrow": (("eij-ei", A), ("'-'",)),
    "the other half": (("eij>ei", A), ("'>'",)),
    "two arrows": (("eij->ei->e", A), ("'-'",)),
    "a list": (("ij,jk->ik", [[1.0, 2.0]], np.ones((2, 2))), ("operand 0", "list")),
    "a nested tuple": (("jk,j->k", B, (1.0, 2.0, 3.0)), ("operand 1", "tuple")),
    "a struct": (
        ("jk,j->k", B, jax.ShapeDtypeStruct((3,), np.float64)),
        ("operand 1", "ShapeDtypeStruct"),
    ),
    "text": ((",jk->k", "x", B), ("operand 0", "str")),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_call_raises_what_jnp_einsum_raises(name: str) -> None:
    arguments, words = WRONG_CALLS[name]
    with pytest.raises((ValueError, TypeError)) as expected:
        jnp.einsum(*arguments)
    with pytest.raises(expected.type) as raised:
        jm.einsum(*arguments)
    assert raised.type is expected.type
    assert str(raised.value).startswith("einsum: ")
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", [x for x in WRONG_CALLS if "struct" not in x])
def test_wrong_call_raises_while_it_is_traced(name: str) -> None:
    (spec, *operands), words = WRONG_CALLS[name]
    arrays = [n for n, x in enumerate(operands) if isinstance(x, np.ndarray)]

    def function(*traced: jax.Array) -> jax.Array:
        whole = list(operands)
        for n, x in zip(arrays, traced, strict=True):
            whole[n] = x
        return jm.einsum(spec, *whole)

    with pytest.raises((ValueError, TypeError), match="einsum: ") as raised:
        jax.make_jaxpr(function)(*(operands[n] for n in arrays))
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("operand", [None, {}, object(), {1.0}, len])
def test_what_is_no_array_is_a_type_error(operand: Any) -> None:
    with pytest.raises(TypeError, match=f"operand 1 must be .*not {type(operand).__name__}"):
        jm.einsum("eij,jk->eik", A, operand)


def test_extents_one_and_many_of_one_operand_are_an_error_as_in_numpy() -> None:
    """``jnp.einsum`` returns a value that is no broadcast; see ``np.einsum``'s message."""
    with pytest.raises(ValueError):
        np.einsum("ii->i", np.ones((1, 3)))
    with pytest.raises(ValueError, match="label 'i' is 1 and 3 in operand 0"):
        jm.einsum("ii->i", np.ones((1, 3)))


@pytest.mark.parametrize(
    "arguments",
    [
        (A, [0, 1, 2], B, [2, 3], [0, 9]),
        (A, [0, 1], B, [1, 2]),
        (A, [0, 1, 2], B),
        (A,),
        ([0, 1, 2], A),
        (A, [0, 1, 2], B, [1, 3]),
    ],
)
def test_wrong_interleaved_call(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Exception) as expected:
        jnp.einsum(*arguments)
    with pytest.raises(expected.type):
        jm.einsum(*arguments)


@pytest.mark.parametrize("arguments", [(A, B), (A,), (5, A), (A, [0, 1, 2], B)])
def test_no_subscripts(arguments: tuple[Any, ...]) -> None:
    first = type(arguments[0]).__name__
    with pytest.raises(TypeError, match=rf"einsum: .* not {first};.*followed by the list of its"):
        jm.einsum(*arguments)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """The shape of a result, or the type of the error."""
    try:
        return tuple(np.shape(function(*arguments)))
    except Exception as error:
        return type(error)


@st.composite
def nearly_valid_calls(draw: st.DrawFn) -> tuple[str, list[np.ndarray]]:
    tokens = [*"iijjkke,,,", "->", "...", *"-> .", "ij"]
    weights = {"-": 1, ">": 1, ".": 1}
    pool = [t for t in tokens for _ in range(weights.get(t, 3))]
    spec = "".join(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=9)))
    extents = dict(zip("ijke", (2, 3, 4, 5), strict=True))
    arrays = []
    for term in spec.replace(" ", "").split("->")[0].split(","):
        shape: list[int] = []
        for token in term.replace("...", "Z"):
            if token == "Z":
                shape += [6, 7][: draw(st.integers(0, 2))]
            elif token in string.ascii_letters:
                unusual = draw(st.integers(0, 19))
                shape.append({0: 1, 1: 9}.get(unusual, extents[token]))
        arrays.append(np.zeros(shape[: -1 if draw(st.integers(0, 29)) == 1 else None]))
    return spec, arrays


@given(nearly_valid_calls())
@settings(max_examples=400)
def test_any_text_is_accepted_or_refused_as_elsewhere(
    call: tuple[str, list[np.ndarray]],
) -> None:
    """Where ``jnp.einsum`` and ``np.einsum`` differ, one of them agrees."""
    spec, arrays = call
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    ours = outcome(lambda *xs: jax.eval_shape(lambda *ys: jm.einsum(spec, *ys), *xs), *structs)
    theirs = outcome(lambda *xs: jax.eval_shape(lambda *ys: jnp.einsum(spec, *ys), *xs), *structs)
    assert ours in (theirs, outcome(np.einsum, spec, *arrays))
