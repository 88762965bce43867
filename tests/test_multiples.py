"""Products of sums of multiples: strain matrices, and what else is made of few products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmagma as jm
from jaxmagma.programs.multiples import with_fewer_products
from jaxmagma.programs.normal import normal_form
from jaxmagma.programs.program import Contract, ElementProgram
from tests import cuda_fused


POINTS, NODES = 4, 5
RANDOM = np.random.default_rng(17)
G: Any = RANDOM.uniform(-1, 1, (POINTS, NODES, 2))
LAME = 0.7
# Which strain is which derivative of which component, in two dimensions.
STRAINS = (((0, 0),), ((1, 1),), ((0, 1), (1, 0)))


@pytest.fixture(autouse=True)
def x64() -> Any:
    with jax.enable_x64(True):
        yield


def slopes(x: jax.Array) -> jax.Array:
    """Of the shape functions at all points, that differ between elements."""
    return G.astype(x.dtype) @ x


def moduli() -> np.ndarray[Any, Any]:
    """Most of them are zero."""
    found = np.diag([1.0, 1.0, 0.5])
    found[:2, :2] += LAME
    return found


def by_strains(x: jax.Array) -> jax.Array:
    """With strain matrices."""
    return of_material(x, jnp.asarray(moduli(), x.dtype))


def of_material(x: jax.Array, material: jax.Array) -> jax.Array:
    """The same with moduli that are given, or a number that they are multiplied by."""
    c = material if material.ndim else material * moduli().astype(x.dtype)
    total = jnp.zeros((2 * NODES, 2 * NODES), x.dtype)
    for table in G.astype(x.dtype):
        g = table @ x
        strains = jnp.zeros((3, 2 * NODES), x.dtype)
        for row, parts in enumerate(STRAINS):
            for axis, component in parts:
                strains = strains.at[row, component::2].set(g[:, axis])
        total += strains.T @ c @ strains * jnp.sum(g**2)
    return total


def by_moduli(x: jax.Array) -> jax.Array:
    """The same by one einsum."""
    g, one = slopes(x), np.eye(2)
    pairs = np.einsum("ik,jl->ijkl", one, one) + np.einsum("il,jk->ijkl", one, one)
    tensor = LAME * np.einsum("ij,kl->ijkl", one, one) + 0.5 * pairs
    weights = jnp.sum(g**2, (1, 2))
    made = jnp.einsum("qaj,ijkl,qbl,q->aibk", g, tensor.astype(x.dtype), g, weights)
    return made.reshape(2 * NODES, 2 * NODES)


def differences(x: jax.Array) -> jax.Array:
    """Products of sums and differences of two tiles, of which one is subtracted."""
    a, b = jnp.sin(slopes(x)[:, :, 0]), jnp.cos(slopes(x)[:, :, 1])
    return (2 * a + b).T @ (3 * a) - (a - 2 * b).T @ (2 * a) + (4 * b).T @ a


def rotated(x: jax.Array) -> jax.Array:
    """Complex multiples; none is conjugated."""
    a, b = jnp.sin(x.T).astype(np.complex128), jnp.cos(x).astype(np.complex128)
    two, turned, three = (np.complex128(y) for y in (2j, 1 + 1j, 3))
    return (two * a + b).T @ (turned * a) + (three * b).T @ a


PROGRAMS = (by_strains, by_moduli, differences, rotated)


def agree(ours: Any, theirs: Any, eps: float) -> None:
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, 64 * eps, 64 * eps * np.abs(right).max())


@pytest.mark.parametrize("element", PROGRAMS)
def test_values_and_derivatives(element: Callable[..., Any]) -> None:
    x, t = RANDOM.normal(size=(2, 9, 2, 2))
    fused, mapped, eps = jm.fuse(element), jax.vmap(element), float(np.finfo(float).eps)
    agree(jax.jit(fused)(x), mapped(x), eps)
    agree(jax.jvp(fused, (x,), (t,)), jax.jvp(mapped, (x,), (t,)), eps)
    (result, pull), (_, other) = jax.vjp(fused, x), jax.vjp(mapped, x)
    cotangent = jnp.asarray(RANDOM.normal(size=result.shape), result.dtype)
    agree(pull(cotangent), other(cotangent), eps)


def test_values_in_float32() -> None:
    x = jnp.asarray(RANDOM.normal(size=(9, 2, 2)), np.float32)
    wanted = jax.vmap(by_strains)(x.astype(np.float64))
    agree(jm.fuse(by_strains)(x), wanted, float(np.finfo(np.float32).eps))


def products(program: ElementProgram) -> int:
    """Of two tiles of an element."""
    found = [x for x in program.operations if isinstance(x, Contract) and len(x.terms) == 2]
    return sum(all(program.batch[y] for y in x.operands) for x in found)


def normal(element: Callable[..., Any]) -> ElementProgram:
    return normal_form(cuda_fused.program_of(element, (2, 2), dtype="float64"))[0]


def test_strain_matrices_take_the_products_of_a_tensor_of_moduli() -> None:
    assert products(normal(by_strains)) == products(normal(by_moduli)) == 4


# Moduli that all elements share, those of each element, and one number of each.
MATERIALS = (((3, 3), None), ((3, 3), 0), ((), 0))


@pytest.mark.parametrize(("shape", "axis"), MATERIALS)
def test_a_material_that_is_given(shape: tuple[int, ...], axis: int | None) -> None:
    x, eps = jnp.asarray(RANDOM.normal(size=(9, 2, 2))), float(np.finfo(float).eps)
    c = jnp.asarray(RANDOM.normal(size=shape if axis is None else (9, *shape)))
    fused, mapped = jm.fuse(of_material, (0, axis)), jax.vmap(of_material, (0, axis))
    agree(jax.jit(fused)(x, c), mapped(x, c), eps)
    (result, pull), (_, other) = jax.vjp(fused, x, c), jax.vjp(mapped, x, c)
    cotangent = RANDOM.normal(size=result.shape)
    agree(pull(cotangent), other(cotangent), 4 * eps)
    shared = [1] if axis is None else []
    program = cuda_fused.program_of(of_material, (2, 2), shape, dtype="float64", shared=shared)
    made = normal_form(program)[0]
    assert products(made) == 4
    assert with_fewer_products(made) is made


def test_products_that_are_multiples_of_each_other_are_one() -> None:
    assert products(normal(differences)) == 2


@pytest.mark.parametrize("element", [by_strains, by_moduli, differences])
def test_what_is_found_is_its_own_normal_form(element: Callable[..., Any]) -> None:
    program = normal(element)
    assert with_fewer_products(program) is program
    assert normal_form(program)[0] == program


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_nowhere_lost(value: float) -> None:
    """Zeros of the strain matrices are numbers, and times infinity they are not."""
    x = jnp.asarray(RANDOM.normal(size=(4, 2, 2))).at[1, 0, 1].set(value)
    wanted, got = np.asarray(jax.vmap(by_strains)(x)), np.asarray(jm.fuse(by_strains)(x))
    assert np.isnan(wanted[1]).any()
    np.testing.assert_array_equal(np.isnan(got[1]) | ~np.isnan(wanted[1]), True)
    np.testing.assert_allclose(got[[0, 2, 3]], wanted[[0, 2, 3]], 1e-13, 1e-13)
