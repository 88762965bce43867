// Function objects of the pointwise functions of a program. A truth value is 1 or 0.
#pragma once

#include "complex.cuh"

namespace jaxmagma {

// ---- The mathematical library ----------------------------------------------------------------

#define JAXMAGMA_FUNCTION(NAME, FUNCTION)                                                   \
  struct NAME {                                                                             \
    __device__ __forceinline__ double operator()(double a) const { return ::FUNCTION(a); }  \
    __device__ __forceinline__ float operator()(float a) const { return ::FUNCTION##f(a); } \
  };
JAXMAGMA_FUNCTION(Abs, fabs)
JAXMAGMA_FUNCTION(Floor, floor)
JAXMAGMA_FUNCTION(Ceil, ceil)
JAXMAGMA_FUNCTION(RoundAway, round)
JAXMAGMA_FUNCTION(RoundEven, rint)
JAXMAGMA_FUNCTION(Sqrt, sqrt)
JAXMAGMA_FUNCTION(Cbrt, cbrt)
JAXMAGMA_FUNCTION(Exp, exp)
JAXMAGMA_FUNCTION(Exp2, exp2)
JAXMAGMA_FUNCTION(Expm1, expm1)
JAXMAGMA_FUNCTION(Log, log)
JAXMAGMA_FUNCTION(Log1p, log1p)
JAXMAGMA_FUNCTION(Sin, sin)
JAXMAGMA_FUNCTION(Cos, cos)
JAXMAGMA_FUNCTION(Tan, tan)
JAXMAGMA_FUNCTION(Asin, asin)
JAXMAGMA_FUNCTION(Acos, acos)
JAXMAGMA_FUNCTION(Atan, atan)
JAXMAGMA_FUNCTION(Sinh, sinh)
JAXMAGMA_FUNCTION(Cosh, cosh)
JAXMAGMA_FUNCTION(Tanh, tanh)
JAXMAGMA_FUNCTION(Asinh, asinh)
JAXMAGMA_FUNCTION(Acosh, acosh)
JAXMAGMA_FUNCTION(Atanh, atanh)
JAXMAGMA_FUNCTION(Erf, erf)
JAXMAGMA_FUNCTION(Erfc, erfc)
#undef JAXMAGMA_FUNCTION

#define JAXMAGMA_FUNCTION(NAME, FUNCTION)                                    \
  struct NAME {                                                              \
    __device__ __forceinline__ double operator()(double a, double b) const { \
      return ::FUNCTION(a, b);                                               \
    }                                                                        \
    __device__ __forceinline__ float operator()(float a, float b) const {    \
      return ::FUNCTION##f(a, b);                                            \
    }                                                                        \
  };
JAXMAGMA_FUNCTION(Remainder, fmod)
JAXMAGMA_FUNCTION(Power, pow)
JAXMAGMA_FUNCTION(Atan2, atan2)
JAXMAGMA_FUNCTION(CopySign, copysign)
#undef JAXMAGMA_FUNCTION

// ---- Powers ----------------------------------------------------------------------------------

// a^b where b is count / 2 or, but for a few roundings, count / 3. With |count| = whole * order +
// left it is a^whole root^left, or the same of 1 / a and 1 / root: all factors are on one side of
// one, and none is zero or infinity unless the power nearly is. The roundings add a factor of 1 +
// log(root) rest, for which the exponent of the root and the bits that follow are enough of a
// logarithm. The compiler knows b, and what is made of it but for numbers of other types.
struct PowerOfRoot {
  __device__ __forceinline__ double operator()(double a, double b) const {
    const double round = 0x1.8p52, halves = 2 * b + round - round;
    return halves == 2 * b ? OfOrder<2>(a, halves, 0) : OfThirds(a, b, 3 * b + round - round);
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return ::powf(a, b); }

  // Three times b is rounded: what is lost of it is added.
  __device__ __forceinline__ static double OfThirds(double a, double b, double count) {
    const double thrice = 2 * b + b;
    return OfOrder<3>(a, count, thrice - count + (2 * b - thrice + b));
  }

  template <int Order>
  __device__ __forceinline__ static double OfOrder(double a, double count, double rest) {
    const double size = ::fabs(a), base = count < 0 ? 1 / size : size;
    double root;
    if (Order == 2) root = count < 0 ? ::rsqrt(size) : ::sqrt(size);
    if (Order == 3) root = count < 0 ? ::rcbrt(size) : ::cbrt(size);
    double power = root, left = count < 0 ? -count : count;
    for (; left > Order; left -= Order) power *= base;
    if (left > 1) power *= root;
    const double log2 = 0x1p-20 * (__double2hiint(root) - 0x3ff00000);
    power *= ::fma((count < 0 ? -rest : rest) * 0.6931471805599453, log2, 1.0);
    const double infinity = __hiloint2double(0x7ff00000, 0);
    return a < 0 && size < infinity ? infinity - infinity : power;
  }
};

// ---- Expressions -----------------------------------------------------------------------------

#define JAXMAGMA_FUNCTION(NAME, EXPRESSION)              \
  struct NAME {                                          \
    template <class T>                                   \
    __device__ __forceinline__ T operator()(T a) const { \
      return EXPRESSION;                                 \
    }                                                    \
  };
JAXMAGMA_FUNCTION(Negate, -a)
JAXMAGMA_FUNCTION(Sign, a > T(0) ? T(1) : a < T(0) ? T(-1) : a)  // of NaN: NaN
JAXMAGMA_FUNCTION(Reciprocal, T(1) / a)
JAXMAGMA_FUNCTION(Rsqrt, T(1) / Sqrt()(a))
JAXMAGMA_FUNCTION(Logistic, T(1) / (T(1) + Exp()(-a)))
JAXMAGMA_FUNCTION(IsFinite, T(a - a == T(0)))
JAXMAGMA_FUNCTION(Not, T(a == T(0)))
#undef JAXMAGMA_FUNCTION

#define JAXMAGMA_FUNCTION(NAME, EXPRESSION)                   \
  struct NAME {                                               \
    template <class T>                                        \
    __device__ __forceinline__ T operator()(T a, T b) const { \
      return EXPRESSION;                                      \
    }                                                         \
  };
JAXMAGMA_FUNCTION(Add, a + b)
JAXMAGMA_FUNCTION(Subtract, a - b)
JAXMAGMA_FUNCTION(Multiply, a* b)
JAXMAGMA_FUNCTION(Divide, a / b)
JAXMAGMA_FUNCTION(Max, a > b || a != a ? a : b)  // NaN if either is
JAXMAGMA_FUNCTION(Min, a < b || a != a ? a : b)
JAXMAGMA_FUNCTION(Less, T(a < b))
JAXMAGMA_FUNCTION(LessEqual, T(a <= b))
JAXMAGMA_FUNCTION(Greater, T(a > b))
JAXMAGMA_FUNCTION(GreaterEqual, T(a >= b))
JAXMAGMA_FUNCTION(Equal, T(a == b))
JAXMAGMA_FUNCTION(NotEqual, T(a != b))
JAXMAGMA_FUNCTION(And, T(a != T(0) && b != T(0)))
JAXMAGMA_FUNCTION(Or, T(a != T(0) || b != T(0)))
JAXMAGMA_FUNCTION(Xor, T((a != T(0)) != (b != T(0))))
JAXMAGMA_FUNCTION(First, a)
#undef JAXMAGMA_FUNCTION

// ---- Exact arithmetic ------------------------------------------------------------------------

struct FusedMultiplyAdd {
  __device__ __forceinline__ double operator()(double a, double b, double c) const {
    return ::fma(a, b, c);
  }
  __device__ __forceinline__ float operator()(float a, float b, float c) const {
    return ::fmaf(a, b, c);
  }
};

struct ProductError {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return FusedMultiplyAdd()(a, b, -(a * b));
  }
};

// a / b of which 1 / b is known. The product with that is at most one bit off; what it leaves of a
// is exact, and corrects it, but at the ends of the range. The product has the sign of a zero, and
// is the quotient where something overflows, or is not finite.
struct Quotient {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b, T inverse) const {
    const T near = a * inverse;
    const T left = FusedMultiplyAdd()(-near, b, a);
    const T found = CopySign()(FusedMultiplyAdd()(left, inverse, near), near);
    return IsOrdinary(found) ? found : near;
  }

  // The upper half of a number beyond 2^1016, or of NaN, is no finite number of single precision.
  __device__ __forceinline__ static bool IsOrdinary(double a) {
    return IsOrdinary(__int_as_float(__double2hiint(a)));
  }
  __device__ __forceinline__ static bool IsOrdinary(float a) {
    return ::fabsf(a) < __int_as_float(0x7f800000);
  }
};

// By the bits of the exponent, which become those of a power of two of the opposite exponent.
struct InverseBinade {
  __device__ __forceinline__ double operator()(double a) const {
    const int high = 0x7fe00000 - (__double2hiint(a) & 0x7ff00000);
    return __hiloint2double(high > 0x00100000 ? high : 0x00100000, 0);
  }
  __device__ __forceinline__ float operator()(float a) const {
    const int bits = 0x7f000000 - (__float_as_int(a) & 0x7f800000);
    return __int_as_float(bits > 0x00800000 ? bits : 0x00800000);
  }
};

// Sign and exponent stay; of the digits, those that are ones of both.
struct CommonDigits {
  __device__ __forceinline__ double operator()(double a, double b) const {
    return __hiloint2double(__double2hiint(a) & (__double2hiint(b) | 0xfff00000),
                            __double2loint(a) & __double2loint(b));
  }
  __device__ __forceinline__ float operator()(float a, float b) const {
    return __int_as_float(__float_as_int(a) & (__float_as_int(b) | 0xff800000));
  }
};

// ---- Rounding --------------------------------------------------------------------------------
// To the nearest number of a narrower type; ties go to even ones. Doubles become floats first, the
// odd one of both neighbours unless they are floats: so nothing is rounded twice.

struct RoundToFloat32 {
  __device__ __forceinline__ double operator()(double a) const { return float(a); }
  __device__ __forceinline__ float operator()(float a) const { return a; }
  template <class T>
  __device__ __forceinline__ Complex<T> operator()(Complex<T> a) const {
    return {(*this)(a.real), (*this)(a.imag)};
  }
};

__device__ __forceinline__ float RoundToOdd(double a) {
  const float nearest = float(a);
  if (nearest == a || a != a) return nearest;
  const int beyond = ::fabs(double(nearest)) > ::fabs(a);
  return __int_as_float((__float_as_int(nearest) - beyond) | 1);
}

struct RoundToBFloat16 {
  __device__ __forceinline__ double operator()(double a) const { return (*this)(RoundToOdd(a)); }
  __device__ __forceinline__ float operator()(float a) const {
    const unsigned bits = __float_as_int(a);
    return a != a ? a : __int_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  }
};

struct RoundToFloat16 {
  __device__ __forceinline__ double operator()(double a) const { return (*this)(RoundToOdd(a)); }
  __device__ __forceinline__ float operator()(float a) const {
    // Adding and subtracting what has 13 binades more leaves 10 binary digits, fewer of subnormals.
    const int bits = __float_as_int(a);
    const unsigned exponent = bits & 0x7f800000, least = (127u - 14u) << 23;
    const float magnitude = ::fabsf(a);
    const float big = __int_as_float((exponent > least ? exponent : least) + (13 << 23));
    const float sum = magnitude + big;
    const int rounded = magnitude < 65520.0f ? __float_as_int(sum - big) : 0x7f800000;
    return a != a ? a : __int_as_float(rounded | (bits ^ __float_as_int(magnitude)));
  }
};

struct Select {
  template <class T>
  __device__ __forceinline__ T operator()(T which, T if_zero, T if_not) const {
    return which != T(0) ? if_not : if_zero;
  }
};

}  // namespace jaxmagma
