// The pointwise functions by number, in the order in which jaxmagma/lowering/cpu/expressions.py has
// their names, and how many operands each has.
//
// Plain data, which every instruction set may share.
#pragma once

#include <cstdint>

// clang-format off
#define JAXMAGMA_ARITHMETIC(F) \
  F(Add, 2) F(Sub, 2) F(Mul, 2) F(Div, 2) F(Neg, 1) F(Abs, 1) \
  F(Sign, 1) F(Floor, 1) F(Ceil, 1) F(RoundAway, 1) F(RoundEven, 1) F(Sqrt, 1) \
  F(Rsqrt, 1) F(Max, 2) F(Min, 2) F(Lt, 2) F(Le, 2) F(Gt, 2) \
  F(Ge, 2) F(Eq, 2) F(Ne, 2) F(IsFinite, 1) F(Not, 1) F(And, 2) \
  F(Or, 2) F(Xor, 2) F(Select, 3) F(First, 1) F(Fma, 3) F(Fms, 3) \
  F(Fnma, 3) F(FusedMultiplyAdd, 3) F(ProductError, 2) F(InverseBinade, 1) \
  F(CommonDigits, 2) F(Reciprocal, 1) F(Quotient, 3)
// Those that libm computes.
#define JAXMAGMA_ELEMENTARY(F) \
  F(Cbrt, 1) F(Exp, 1) F(Exp2, 1) F(Expm1, 1) F(Log, 1) F(Log1p, 1) \
  F(Logistic, 1) F(Sin, 1) F(Cos, 1) F(Tan, 1) F(Asin, 1) F(Acos, 1) \
  F(Atan, 1) F(Sinh, 1) F(Cosh, 1) F(Tanh, 1) F(Asinh, 1) F(Acosh, 1) \
  F(Atanh, 1) F(Erf, 1) F(Erfc, 1) F(Rem, 2) F(Pow, 2) F(Atan2, 2)
// To the nearest number of a narrower dtype.
#define JAXMAGMA_ROUNDING(F) F(RoundToFloat32, 1) F(RoundToBFloat16, 1) F(RoundToFloat16, 1)
#define JAXMAGMA_FUNCTIONS(F) JAXMAGMA_ARITHMETIC(F) JAXMAGMA_ELEMENTARY(F) JAXMAGMA_ROUNDING(F)
// clang-format on

namespace jaxmagma {

enum class Function : int32_t {
#define JAXMAGMA_ENTRY(name, operands) k##name,
  JAXMAGMA_FUNCTIONS(JAXMAGMA_ENTRY)
#undef JAXMAGMA_ENTRY
};

constexpr int kOperands[] = {
#define JAXMAGMA_ENTRY(name, operands) operands,
    JAXMAGMA_FUNCTIONS(JAXMAGMA_ENTRY)
#undef JAXMAGMA_ENTRY
};
constexpr int64_t kFunctions = sizeof(kOperands) / sizeof(kOperands[0]);

}  // namespace jaxmagma
