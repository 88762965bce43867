"""The function object, in ``cuda/functions.cuh``, of each pointwise function of a program."""

from collections.abc import Sequence


FUNCTORS = {
    "neg": "Negate",
    "abs": "Abs",
    "sign": "Sign",
    "floor": "Floor",
    "ceil": "Ceil",
    "round_away": "RoundAway",
    "round_even": "RoundEven",
    "sqrt": "Sqrt",
    "rsqrt": "Rsqrt",
    "cbrt": "Cbrt",
    "exp": "Exp",
    "exp2": "Exp2",
    "expm1": "Expm1",
    "log": "Log",
    "log1p": "Log1p",
    "logistic": "Logistic",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "tanh": "Tanh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "erf": "Erf",
    "erfc": "Erfc",
    "add": "Add",
    "sub": "Subtract",
    "mul": "Multiply",
    "div": "Divide",
    "reciprocal": "Reciprocal",
    "quotient": "Quotient",
    "rem": "Remainder",
    "pow": "Power",
    "power_of_root": "PowerOfRoot",
    "atan2": "Atan2",
    "max": "Max",
    "min": "Min",
    "lt": "Less",
    "le": "LessEqual",
    "gt": "Greater",
    "ge": "GreaterEqual",
    "eq": "Equal",
    "ne": "NotEqual",
    "is_finite": "IsFinite",
    "not": "Not",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
    "fused_multiply_add": "FusedMultiplyAdd",
    "product_error": "ProductError",
    "inverse_binade": "InverseBinade",
    "common_digits": "CommonDigits",
    "round_to_float32": "RoundToFloat32",
    "round_to_bfloat16": "RoundToBFloat16",
    "round_to_float16": "RoundToFloat16",
    "first": "First",
    "select": "Select",
}

# Compilers read these in less time than function objects (benchmarks/results/first-calls-h200.txt).
_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


def applied(function: str, operands: Sequence[str]) -> str:
    """The text of a function of single values."""
    if function in _OPERATORS:
        return f" {_OPERATORS[function]} ".join(operands)
    return f"{FUNCTORS[function]}()({', '.join(operands)})"
