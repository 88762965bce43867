"""``jm.explain``: what it tells, that it is true, and that it runs nothing."""

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmagma as jm
from jaxmagma import lowering
from jaxmagma.faces.roofline import Roofline
from jaxmagma.lowering.kernel import Declined, Kernel
from tests.jaxprs import compilations


# The package has functions of these names; the modules are wanted.
explain_module = importlib.import_module("jaxmagma.faces.explain")

ELEMENTS = 1000
INTERPOLATE = "xa,yb,eab->exy"
TABLE = np.random.default_rng(0).random((4, 3))
U = jax.ShapeDtypeStruct((ELEMENTS, 3, 3), np.float64)


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that make times easy to predict: a byte a second, and two operations."""
    monkeypatch.setattr(explain_module, "roofline", lambda dtype, device: Roofline(1.0, 2.0))


def explain(target: Any, *arguments: Any, **options: Any) -> Any:
    return jm.explain(target, *arguments, quiet=True, **options)


def interpolate(u: jax.Array) -> jax.Array:
    return jm.einsum(INTERPOLATE, TABLE, TABLE, u)


# ---- Fields ----------------------------------------------------------------------------------


def test_fields() -> None:
    found = explain(INTERPOLATE, TABLE, TABLE, U)
    assert isinstance(found, jm.Explanation)
    assert found.platform == jax.default_backend().replace("gpu", "cuda")
    assert found.elements == ELEMENTS
    assert found.tiles == ((3, 3), (4, 3), (4, 3), (4, 4))
    assert found.flops == ELEMENTS * 2 * (4 * 3 * 3 + 4 * 3 * 4)
    assert found.least_bytes == 8 * ELEMENTS * (3 * 3 + 4 * 4)
    assert found.roofline_seconds == max(found.least_bytes / 1.0, found.flops / 2.0)
    assert found.program is not None
    assert found.program.batch_extents([U.shape]) == (ELEMENTS,)


def test_runs_at_the_points_are_counted() -> None:
    def function(u: jax.Array) -> Any:
        v = TABLE @ u
        for n in range(20):
            v = v * jnp.sin(v + float(n + 2))
        return v

    u = jax.ShapeDtypeStruct((ELEMENTS, 3), np.float64)
    (told,) = explain(jm.fuse(function), u)
    assert len(told.order) == 62 and len(told.summary) == 3
    assert all(f"20 {x}" in str(told) for x in ("add", "mul", "sin")) and "60" in str(told)
    (every,) = explain(jm.fuse(function), u, every_step=True)
    assert every.summary == every.order == told.order and str(every).count("sin") == 20


def test_order_is_that_of_the_plan() -> None:
    assert explain(INTERPOLATE, TABLE, TABLE, U).order == (
        "t2[4, 3] = contract over 3: constant 1[4, 3], operand 0[3, 3]",
        "t3[4, 4] = contract over 3: constant 1[4, 3], t2[4, 3]",
        "store t3[4, 4]",
    )
    traced = jax.ShapeDtypeStruct((4, 3), np.float64)
    order = explain(
        "xa,yb,exy,eab->e", traced, TABLE, jnp.ones((9, 4, 4)), U.update(shape=(9, 3, 3))
    )
    assert any("shared" in step for step in order.order)
    assert order.order[-1].startswith("store")


def test_a_traced_basis_is_read_and_a_constant_is_not() -> None:
    traced = jax.ShapeDtypeStruct((4, 3), np.float64)
    constant = explain(INTERPOLATE, TABLE, TABLE, U)
    shared = explain(lambda b, u: jm.einsum(INTERPOLATE, b, b, u), traced, U)[0]
    assert shared.least_bytes == constant.least_bytes + 8 * 4 * 3


def test_whether_a_kernel_runs_it_is_what_the_lowering_says() -> None:
    found = explain(INTERPOLATE, TABLE, TABLE, U)
    assert found.program is not None
    kernel = lowering.lower(found.program, (ELEMENTS,), found.platform)
    if isinstance(kernel, Declined):
        assert not found.fused
        assert found.reason == kernel.reason
        assert found.kernel == ""
    else:
        assert found.fused
        assert found.reason is None
        assert found.kernel == kernel.description != ""


@pytest.mark.parametrize(
    ("spec", "shapes", "dtype", "reason"),
    [
        ("ij,jk->ik", ((90, 3), (3, 4)), np.float64, "it is one matrix product"),
        ("eij,eij->eij", ((90, 3, 3), (90, 3, 3)), np.float64, "nothing is contracted"),
        ("ii->", ((9, 9),), np.float64, "no label runs over elements"),
        ("eij,ejk->eik", ((90, 3, 3), (90, 3, 3)), np.int32, "int32 is not a floating-point"),
        ("eij,ejk->eik", ((0, 3, 3), (0, 3, 3)), np.float64, "an operand is empty"),
        ("eij,ejk->eik", ((3, 200, 200),) * 2, np.float64, "120000 values, too many"),
    ],
)
def test_reasons_for_plain_jax(
    spec: str, shapes: tuple[tuple[int, ...], ...], dtype: Any, reason: str
) -> None:
    found = explain(spec, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    assert not found.fused
    assert reason in found.reason
    assert found.program is None
    assert (found.elements, found.order, found.tiles, found.flops) == (0, (), (), 0)


# ---- Targets ---------------------------------------------------------------------------------


def test_interleaved_form() -> None:
    found = explain(TABLE, [0, 1], TABLE, [2, 3], U, [4, 1, 3], [4, 0, 2])
    assert str(found) == str(explain(INTERPOLATE, TABLE, TABLE, U))
    found = explain(U, [4, 1, 3], TABLE, [0, 1], TABLE, [2, 3], [4, 0, 2])
    assert found.elements == ELEMENTS


def test_arrays_and_scalars_as_operands() -> None:
    found = explain(INTERPOLATE, TABLE, TABLE, jnp.ones(U.shape))
    assert found == explain(INTERPOLATE, TABLE, TABLE, U)
    assert explain(INTERPOLATE, TABLE, TABLE, np.ones(U.shape)).elements == ELEMENTS
    assert explain(",xa,eab->xeb", 2.0, TABLE, U).elements == ELEMENTS


def test_mass_matrix_in_three_dimensions() -> None:
    n, q = 4, 5
    table = np.ones((q, n))
    weights, u = (jax.ShapeDtypeStruct((ELEMENTS, k, k, k), np.float64) for k in (q, n))
    spec = "xi,yj,zk,exyz,xa,yb,zc,eabc->eijk"
    found = explain(spec, table, table, table, weights, table, table, table, u)
    assert found.elements == ELEMENTS
    assert found.flops == ELEMENTS * (4 * (q * n**3 + q**2 * n**2 + q**3 * n) + q**3)
    assert found.least_bytes == 8 * ELEMENTS * (2 * n**3 + q**3)
    assert len(found.order) == 8


def test_options_of_the_einsum() -> None:
    assert explain(INTERPOLATE, TABLE, TABLE, U, precision="highest").program.precision == "highest"
    found = explain(INTERPOLATE, TABLE, TABLE, U, preferred_element_type=np.float32)
    assert found.reason == "preferred_element_type is float32"


def test_function() -> None:
    (found,) = explain(interpolate, U)
    assert found == explain(INTERPOLATE, TABLE, TABLE, U)


def test_function_without_einsums() -> None:
    assert explain(lambda u: u + 1, U) == ()


def test_function_of_trees_and_keywords() -> None:
    function = lambda tree, *, factor: factor * interpolate(tree["u"])  # noqa: E731
    assert len(explain(function, {"u": U}, factor=2.0)) == 1


def test_gradient_has_one_program_more_than_the_value() -> None:
    (value,) = explain(interpolate, U)
    found = explain(jax.grad(lambda u: jnp.sum(interpolate(u) ** 2)), U)
    assert len(found) == 2
    assert found[0].program == value.program
    # The transpose does as much as the function.
    assert found[1].flops == value.flops
    assert found[1].tiles[-1] == (3, 3)


@pytest.mark.parametrize(
    "transformed",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda u: jax.lax.scan(lambda c, _: (f(c)[:, :3, :3], None), u, None, length=3),
        lambda f: (
            lambda u: jax.lax.cond(u[0, 0, 0] > 0, f, lambda u: jnp.ones((ELEMENTS, 4, 4)), u)
        ),
        lambda f: jax.jit(lambda u: jax.jit(f)(u)),
    ],
)
def test_programs_inside_other_transformations(transformed: Callable[..., Any]) -> None:
    (found,) = explain(transformed(interpolate), U)
    assert found == explain(INTERPOLATE, TABLE, TABLE, U)


def test_vmap_multiplies_the_elements() -> None:
    (found,) = explain(jax.vmap(interpolate), jax.ShapeDtypeStruct((7, *U.shape), U.dtype))
    assert found.elements == 7 * ELEMENTS
    one = jax.vmap(lambda u: jm.einsum("xa,yb,ab->xy", TABLE, TABLE, u))
    (found,) = explain(one, U)
    (whole,) = explain(interpolate, U)
    assert (found.elements, found.order, found.flops) == (ELEMENTS, whole.order, whole.flops)


def test_one_element_alone() -> None:
    found = explain("xa,yb,ab->xy", TABLE, TABLE, jax.ShapeDtypeStruct((3, 3), np.float64))
    assert found.elements == 1
    assert found.flops == 2 * (4 * 3 * 3 + 4 * 3 * 4)


def test_several_einsums_of_both_kinds() -> None:
    def function(u: jax.Array) -> jax.Array:
        v = interpolate(u)
        return jm.einsum("ij,jk->ik", v[:, 0], v[0]) + jm.einsum("eii->e", v)[:, None]

    reasons = [x.reason for x in explain(function, U) if x.program is None]
    assert reasons == ["it is one matrix product", "nothing is contracted inside an element"]
    assert len(explain(function, U)) == 3


def test_plain_calls_of_a_function_that_jit_has_traced_before() -> None:
    """They leave no trace in its jaxpr, so it must be traced anew."""
    function = jax.jit(lambda a: jm.einsum("ij,jk->ik", a, a))
    a = jnp.ones((3, 3))
    for _ in range(2):
        function(a)
        (found,) = explain(function, a)
        assert found.reason == "no label runs over elements"
        (found,) = explain(lambda a: 2 * function(a), a)
        assert found.program is None


def test_explain_inside_a_traced_function() -> None:
    """As one would call it to look into a program; its own calls are not collected."""
    inner = []

    def function(u: jax.Array) -> jax.Array:
        inner.append(explain(INTERPOLATE, TABLE, TABLE, u))
        explain("ii->", u[0])
        return interpolate(u)

    (found,) = explain(function, U)
    assert inner == [found]
    jax.jit(jax.vmap(function))(jnp.ones((2, *U.shape)))
    assert inner[1] == found


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_explain_with_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        (found,) = explain(interpolate, jnp.ones(U.shape))
    assert found == explain(interpolate, U)[0]


# ---- Errors ----------------------------------------------------------------------------------


def test_errors_are_those_of_the_call() -> None:
    with pytest.raises(ValueError, match="output label 'q'"):
        explain("xa,yb,eab->exq", TABLE, TABLE, U)
    with pytest.raises(ValueError, match="'a' is 3"):
        explain(INTERPOLATE, TABLE, TABLE, jax.ShapeDtypeStruct((9, 5, 3), np.float64))
    with pytest.raises(TypeError, match="neither subscripts nor a function: 3"):
        explain(3)
    with pytest.raises(TypeError, match="operand 1"):
        explain(INTERPOLATE, TABLE, "x", U)
    with pytest.raises(ZeroDivisionError):
        explain(lambda u: 1 / 0, U)


# ---- Printing --------------------------------------------------------------------------------


def test_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    found = jm.explain(INTERPOLATE, TABLE, TABLE, U)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    for words in (f"{ELEMENTS:,} elements", *found.order, "168 per element", "roofline"):
        assert words in printed


def test_prints_every_contraction_of_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    found = jm.explain(jax.grad(lambda u: jnp.sum(interpolate(u))), U)
    assert capsys.readouterr().out == "\n\n".join(map(str, found)) + "\n"


def test_prints_the_reason_for_plain_jax(capsys: pytest.CaptureFixture[str]) -> None:
    found = jm.explain("ii->", jnp.ones((3, 3)))
    expected = f"plain JAX on {found.platform}: no label runs over elements\n"
    assert capsys.readouterr().out == expected


def test_prints_the_source_when_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("target", {}, description="a kernel", source="the source text")
    monkeypatch.setattr(explain_module, "lower", lambda *_: kernel)
    found = jm.explain(INTERPOLATE, TABLE, TABLE, U, source=True)
    assert found.source == "the source text"
    assert capsys.readouterr().out == f"{found}\n\nthe source text\n"
    jm.explain(INTERPOLATE, TABLE, TABLE, U)
    assert "the source text" not in capsys.readouterr().out


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    jm.explain(INTERPOLATE, TABLE, TABLE, U, quiet=True)
    assert capsys.readouterr().out == ""


# ---- Running nothing -------------------------------------------------------------------------


@pytest.mark.parametrize("function", [jnp.sin, jm.fuse(lambda u: u)])
def test_nothing_to_explain(
    function: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert jm.explain(function, U) == ()
    assert "it calls neither jm.einsum nor jm.fuse" in capsys.readouterr().out
    assert explain(function, U) == () and not capsys.readouterr().out


def test_runs_and_compiles_nothing() -> None:
    """Not even with arrays; and for far more elements than memory holds."""
    explain(INTERPOLATE, TABLE, TABLE, U)
    with compilations() as compiled:
        explain(INTERPOLATE, TABLE, TABLE, U)
        explain(jax.grad(lambda u: jnp.sum(interpolate(u))), U)
    assert compiled == []
    elements = 1 << 40
    found = explain(INTERPOLATE, TABLE, TABLE, jax.ShapeDtypeStruct((elements, 3, 3), np.float64))
    assert found.elements == elements
    assert found.least_bytes == 8 * elements * (9 + 16)


def test_does_not_change_what_jit_has_compiled() -> None:
    function = jax.jit(interpolate)
    u = jnp.ones(U.shape)
    function(u)
    explain(function, u)
    with compilations() as compiled:
        function(u)
    assert compiled == []


def test_examples_in_its_documentation() -> None:
    results = doctest.testmod(explain_module)
    assert results.attempted >= 4
    assert results.failed == 0


# ---- The ceilings ----------------------------------------------------------------------------


def test_roofline_is_the_larger_of_two_times() -> None:
    ceilings = Roofline(bytes_per_second=10.0, flops_per_second=100.0)
    assert ceilings.seconds(20, 100) == 2.0
    assert ceilings.seconds(20, 300) == 3.0


def test_ceilings_are_measured_once(measured_ceilings: None) -> None:
    inside: list[Roofline] = []
    # The first time in the middle of tracing a function.
    jax.make_jaxpr(lambda: inside.append(jm.roofline(np.float32, jax.devices()[0])))()
    assert inside[0].bytes_per_second > 1e6
    assert inside[0].flops_per_second > 1e6
    assert jm.roofline("float32") == inside[0]


def test_ceilings_of_integers() -> None:
    with pytest.raises(TypeError, match="dtype int32"):
        jm.roofline("int32")


def test_complex_operations_are_several_real_ones() -> None:
    real, other = (
        explain("eij,ejk->eik", *[jax.ShapeDtypeStruct((ELEMENTS, 3, 3), dtype)] * 2)
        for dtype in (np.float64, np.complex128)
    )
    assert other.flops == 4 * real.flops
