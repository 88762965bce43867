"""The table of rules: by which function equations of each primitive are read."""

from collections.abc import Callable
from typing import Any

from jax.lax import GatherScatterMode, Precision

from jaxmagma.jaxpr import (
    contractions,
    control,
    convolutions,
    indexing,
    matrices,
    movement,
    reductions,
)
from jaxmagma.jaxpr.equations import Rule, anything, nothing, one_of


# Their equations are checked one by one.
NESTED = {"scan", "while", "cond", "custom_linear_solve"}
# The choice of an operation's own implementation inside of Pallas kernels, which ours are not.
ELSEWHERE = (("mosaic",), None)
# As gathers and scatters may treat places beyond the end, and what they may promise of places.
_PLACES = {
    "mode": one_of(
        GatherScatterMode.CLIP,
        GatherScatterMode.FILL_OR_DROP,
        GatherScatterMode.PROMISE_IN_BOUNDS,
    ),
    "unique_indices": anything,
    "indices_are_sorted": anything,
}


# Products are as precise as any of these asks for; other algorithms may round otherwise.
_is_precision = one_of(None, *Precision)


def _known_precision(value: Any) -> bool:
    return all(map(_is_precision, value)) if isinstance(value, tuple) else _is_precision(value)


def _does(name: str) -> Callable[[Any], bool]:
    """Whether a jaxpr of two scalars is that function of them."""

    def does(jaxpr: Any) -> bool:
        equations = getattr(jaxpr, "eqns", ())
        return [x.primitive.name for x in equations] == [name]

    return does


def _scattering(function: str | None) -> Rule:
    truth = function in (None, "max", "min")
    knows = _PLACES | {
        "update_jaxpr": _does(function) if function else nothing,
        "update_consts": one_of(()),
    }
    return Rule(indexing.scatter(function), ("dimension_numbers", "mode"), knows, 3, truth)


_MOVE = {"sharding": nothing}
_SUM = {"out_sharding": nothing}
_STEPS = dict.fromkeys(
    ("num_consts", "num_carry", "ft_in", "ft_out", "unroll", "linear", "_split_transpose"), anything
)


# ``read`` gets the reader, the equation and its operands.
RULES: dict[str, Rule] = {
    "dot_general": Rule(
        contractions.dot_general,
        ("dimension_numbers",),
        # The dtypes of operands and result are all that of the program.
        {
            "precision": _known_precision,
            "preferred_element_type": anything,
            "out_sharding": nothing,
        },
        operands=2,
        truth=False,
    ),
    "conv_general_dilated": Rule(
        convolutions.convolution,
        (
            *("dimension_numbers", "window_strides", "padding", "lhs_dilation", "rhs_dilation"),
            "feature_group_count",
        ),
        {
            "batch_group_count": anything,  # heeded where it is given
            "precision": _known_precision,
            "preferred_element_type": anything,
            "out_sharding": nothing,
        },
        operands=2,
        truth=False,
    ),
    "broadcast_in_dim": Rule(
        movement.broadcast_in_dim, ("shape", "broadcast_dimensions"), _MOVE, operands=1
    ),
    "reshape": Rule(movement.reshape_in_order, ("new_sizes", "dimensions"), _MOVE, operands=1),
    "squeeze": Rule(movement.reshape, ("dimensions",), operands=1),
    "transpose": Rule(movement.transpose, ("permutation",), operands=1),
    "rev": Rule(movement.rev, ("dimensions",), operands=1),
    "slice": Rule(movement.sliced, ("start_indices", "limit_indices", "strides"), operands=1),
    "dynamic_slice": Rule(indexing.dynamic_slice, ("slice_sizes",)),
    "concatenate": Rule(movement.concatenate, ("dimension",)),
    "stack": Rule(movement.stack, ("axis",)),
    "unstack": Rule(movement.unstack, ("axis",), operands=1),
    "split": Rule(movement.split, ("sizes", "axis"), operands=1),
    "pad": Rule(movement.pad, ("padding_config",), operands=2),
    "tile": Rule(movement.tile, ("reps",), operands=1),
    "gather": Rule(
        indexing.gather,
        ("dimension_numbers", "slice_sizes", "mode", "fill_value"),
        _PLACES,
        operands=2,
    ),
    "dynamic_update_slice": Rule(indexing.dynamic_update_slice),
    "scatter": _scattering(None),
    "scatter-add": _scattering("add"),
    "scatter_add": _scattering("add"),
    "scatter-sub": _scattering("sub"),
    "scatter_sub": _scattering("sub"),
    "scatter-mul": _scattering("mul"),
    "scatter_mul": _scattering("mul"),
    "scatter-max": _scattering("max"),
    "scatter_max": _scattering("max"),
    "scatter-min": _scattering("min"),
    "scatter_min": _scattering("min"),
    "reduce_sum": Rule(contractions.reduce_sum, ("axes",), _SUM, operands=1),
    "reduce_max": Rule(reductions.reduction("max"), ("axes",), _SUM, operands=1),
    "reduce_min": Rule(reductions.reduction("min"), ("axes",), _SUM, operands=1),
    "reduce_prod": Rule(reductions.reduction("mul"), ("axes",), _SUM, operands=1),
    "reduce_and": Rule(reductions.reduction("and"), ("axes",), _SUM, operands=1),
    "reduce_or": Rule(reductions.reduction("or"), ("axes",), _SUM, operands=1),
    "argmax": Rule(reductions.place_of("gt"), ("axes", "index_dtype"), operands=1),
    "argmin": Rule(reductions.place_of("lt"), ("axes", "index_dtype"), operands=1),
    "cumsum": Rule(reductions.cumulative("add"), ("axis", "reverse"), operands=1),
    "cumprod": Rule(reductions.cumulative("mul"), ("axis", "reverse"), operands=1),
    "cummax": Rule(reductions.cumulative("max"), ("axis", "reverse"), operands=1),
    "cummin": Rule(reductions.cumulative("min"), ("axis", "reverse"), operands=1),
    "convert_element_type": Rule(
        movement.convert, ("new_dtype",), _MOVE | {"weak_type": anything}, operands=1
    ),
    "reduce_precision": Rule(
        movement.reduce_precision, ("exponent_bits", "mantissa_bits"), operands=1, truth=False
    ),
    "copy": Rule(movement.unchanged, operands=1),
    "copy_p": Rule(movement.unchanged, operands=1),
    "stop_gradient": Rule(movement.unchanged, operands=1),
    "optimization_barrier": Rule(movement.unchanged),
    "scan": Rule(control.scan, ("reverse", "length", "jaxpr"), _STEPS),
    "while": Rule(control.while_loop, ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")),
    "cond": Rule(control.cond, ("branches",), {"branches_platforms": one_of(ELSEWHERE)}),
    "element_program": Rule(control.program, ("program",)),
    "lu": Rule(matrices.lu, operands=1),
    "lu_pivots_to_permutation": Rule(matrices.permutation, ("permutation_size",), operands=1),
    "triangular_solve": Rule(
        matrices.triangular_solve,
        ("left_side", "lower", "transpose_a", "unit_diagonal"),
        {"conjugate_a": anything},  # of real numbers
        operands=2,
    ),
    "cholesky": Rule(matrices.cholesky, operands=1),
    "qr": Rule(
        matrices.qr, ("full_matrices",), {"pivoting": one_of(False), "use_magma": anything}, 1
    ),
    "eigh": Rule(
        matrices.eigh,
        ("lower",),
        {"sort_eigenvalues": anything, "subset_by_index": nothing, "algorithm": nothing},
        operands=1,
    ),
    "svd": Rule(
        matrices.svd,
        ("compute_uv", "full_matrices"),
        {"subset_by_index": nothing, "algorithm": nothing},
        operands=1,
    ),
    "custom_linear_solve": Rule(control.linear_solve, ("const_lengths", "jaxprs")),
    "call_hi_primitive": Rule(reductions.search, ("_prim",)),
    "lt_to": Rule(reductions.in_order(strictly=True)),
    "le_to": Rule(reductions.in_order(strictly=False)),
    "top_k": Rule(reductions.largest, ("axis", "k"), {"is_stable": anything}, operands=1),
    "sort": Rule(reductions.sort, ("dimension", "num_keys"), {"is_stable": anything}),
}
