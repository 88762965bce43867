// The pointwise functions on vectors.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "exponential.h"
#include "functions.h"
#include "half.h"
#include "lanes.h"
#include "libm.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jaxmagma::JAXMAGMA_ISA {

template <typename T>
using Integer = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
template <typename T>
using IntegerLanes = Vector<Integer<T>, kLanes<T>>;

// A mask of lanes, as comparisons make it, and truth as a number.
template <typename T>
using Mask = IntegerLanes<T>;

template <typename T>
JAXMAGMA_INLINE Lanes<T> AsLanes(IntegerLanes<T> x) {
  return reinterpret_cast<Lanes<T>>(x);
}
template <typename T>
JAXMAGMA_INLINE IntegerLanes<T> AsIntegers(Lanes<T> x) {
  return reinterpret_cast<IntegerLanes<T>>(x);
}
template <typename T>
constexpr Integer<T> kSignBit = static_cast<Integer<T>>(Integer<T>{1} << (8 * sizeof(T) - 1));

// Whether a mask has any lane.
template <typename T>
JAXMAGMA_INLINE bool Any(Mask<T> m) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask(reinterpret_cast<__m512i>(m), reinterpret_cast<__m512i>(m)) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256(reinterpret_cast<__m256i>(m), reinterpret_cast<__m256i>(m));
#else
  Integer<T> any = 0;
  for (int i = 0; i < kLanes<T>; ++i) any |= m[i];
  return any != 0;
#endif
}

template <typename T>
struct Of {
  using V = Lanes<T>;
  using M = Mask<T>;

  static JAXMAGMA_INLINE V Truth(M m) { return AsLanes<T>(m & AsIntegers<T>(Splat(T{1}))); }
  static JAXMAGMA_INLINE V Pick(M m, V if_set, V if_not) {
    return AsLanes<T>((m & AsIntegers<T>(if_set)) | (~m & AsIntegers<T>(if_not)));
  }
  static JAXMAGMA_INLINE M IsTrue(V x) { return x != V{}; }

  static JAXMAGMA_INLINE V Add(V a, V b) { return a + b; }
  static JAXMAGMA_INLINE V Sub(V a, V b) { return a - b; }
  static JAXMAGMA_INLINE V Mul(V a, V b) { return a * b; }
  static JAXMAGMA_INLINE V Div(V a, V b) { return a / b; }
  static JAXMAGMA_INLINE V Fma(V a, V b, V c) { return a * b + c; }
  static JAXMAGMA_INLINE V Fms(V a, V b, V c) { return a * b - c; }
  static JAXMAGMA_INLINE V Fnma(V a, V b, V c) { return c - a * b; }
  static JAXMAGMA_INLINE V FusedMultiplyAdd(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm512_fmadd_pd(reinterpret_cast<__m512d>(a),
                                                 reinterpret_cast<__m512d>(b),
                                                 reinterpret_cast<__m512d>(c)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm512_fmadd_ps(
          reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm256_fmadd_pd(reinterpret_cast<__m256d>(a),
                                                 reinterpret_cast<__m256d>(b),
                                                 reinterpret_cast<__m256d>(c)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm256_fmadd_ps(
          reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
    const auto fma = [](T x, T y, T z) {
      if constexpr (sizeof(T) == 8)
        return __builtin_fma(x, y, z);
      else
        return __builtin_fmaf(x, y, z);
    };
    return Each<T>(fma, a, b, c);
#endif
  }
  static JAXMAGMA_INLINE V ProductError(V a, V b) { return FusedMultiplyAdd(a, b, Neg(a * b)); }
  // By the bits of the exponent, which become those of a power of two of the opposite exponent.
  static JAXMAGMA_INLINE V InverseBinade(V a) {
    constexpr int kDigits = sizeof(T) == 8 ? 52 : 23;
    constexpr Integer<T> kExponents = sizeof(T) == 8 ? 2047 : 255;
    const IntegerLanes<T> exponent =
        AsIntegers<T>(a) & (IntegerLanes<T>{} + (kExponents << kDigits));
    const IntegerLanes<T> inverse = ((kExponents - 1) << kDigits) - exponent;
    const IntegerLanes<T> least = IntegerLanes<T>{} + (Integer<T>{1} << kDigits);
    return Pick(inverse > least, AsLanes<T>(inverse), AsLanes<T>(least));
  }
  // Sign and exponent stay; of the digits, those that are ones of both.
  static JAXMAGMA_INLINE V CommonDigits(V a, V b) {
    constexpr Integer<T> kDigits = (Integer<T>{1} << (sizeof(T) == 8 ? 52 : 23)) - 1;
    return AsLanes<T>(AsIntegers<T>(a) & (AsIntegers<T>(b) | (IntegerLanes<T>{} + ~kDigits)));
  }
  static JAXMAGMA_INLINE V Reciprocal(V a) { return Splat(T{1}) / a; }
  // A reciprocal that is at hand saves no time here.
  static JAXMAGMA_INLINE V Quotient(V a, V b, V) { return a / b; }
  static JAXMAGMA_INLINE V Neg(V a) {
    return AsLanes<T>(AsIntegers<T>(a) ^ (IntegerLanes<T>{} + kSignBit<T>));
  }
  static JAXMAGMA_INLINE V Abs(V a) {
    return AsLanes<T>(AsIntegers<T>(a) & (IntegerLanes<T>{} + ~kSignBit<T>));
  }
  static JAXMAGMA_INLINE V CopySign(V magnitude, V sign) {
    const IntegerLanes<T> bit = IntegerLanes<T>{} + kSignBit<T>;
    return AsLanes<T>((AsIntegers<T>(magnitude) & ~bit) | (AsIntegers<T>(sign) & bit));
  }
  // Zero and NaN stay.
  static JAXMAGMA_INLINE V Sign(V a) {
    const M nonzero = (a > V{}) | (a < V{});
    return Pick(nonzero, CopySign(Splat(T{1}), a), a);
  }

  static JAXMAGMA_INLINE V Floor(V a) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm512_floor_pd(reinterpret_cast<__m512d>(a)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm512_floor_ps(reinterpret_cast<__m512>(a)));
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm256_floor_pd(reinterpret_cast<__m256d>(a)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm256_floor_ps(reinterpret_cast<__m256>(a)));
#else
    const auto floor = [](T x) {
      if constexpr (sizeof(T) == 8)
        return __builtin_floor(x);
      else
        return __builtin_floorf(x);
    };
    return Each<T>(floor, a);
#endif
  }
  static JAXMAGMA_INLINE V Ceil(V a) { return Neg(Floor(Neg(a))); }
  static JAXMAGMA_INLINE V RoundEven(V a) {
    // Adding and subtracting 2^(digits) rounds what is smaller.
    constexpr T kBig = sizeof(T) == 8 ? T(4503599627370496.0) : T(8388608.0);
    const V magnitude = Abs(a);
    V big = magnitude + Splat(kBig);
    asm("" : "+m"(big));  // not to be simplified
    const V rounded = CopySign(big - Splat(kBig), a);
    return Pick(magnitude < Splat(kBig), rounded, a);
  }
  static JAXMAGMA_INLINE V RoundAway(V a) {
    const V magnitude = Abs(a);
    const V whole = Floor(magnitude);
    const V up = whole + Truth(magnitude - whole >= Splat(T(0.5)));
    return CopySign(up, a);
  }

  // The nearest numbers of narrower dtypes; ties go to even ones. As in XLA, doubles become floats
  // first, which changes nothing of what is computed of such numbers, and a float that is subnormal
  // is zero to its threads.
  using Singles = Vector<float, kLanes<T>>;
  using Words = Vector<int32_t, kLanes<T>>;
  using UnsignedWords = Vector<uint32_t, kLanes<T>>;

  static JAXMAGMA_INLINE Singles AsSingles(Words x) { return reinterpret_cast<Singles>(x); }
  static JAXMAGMA_INLINE V RoundToFloat32(V a) {
    if constexpr (sizeof(T) == 4) return a;
    return __builtin_convertvector(__builtin_convertvector(a, Singles), V);
  }
  static JAXMAGMA_INLINE V RoundToBFloat16(V a) {
    const Singles single = __builtin_convertvector(a, Singles);
    const UnsignedWords bits = reinterpret_cast<UnsignedWords>(single);
    const UnsignedWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    return Pick(a != a, a, __builtin_convertvector(reinterpret_cast<Singles>(rounded), V));
  }
  static JAXMAGMA_INLINE V RoundToFloat16(V a) {
    // Adding and subtracting what has 13 binades more leaves 10 binary digits, fewer of subnormals.
    constexpr int32_t kLeast = (127 - 14) << 23;
    const Words bits = reinterpret_cast<Words>(__builtin_convertvector(a, Singles));
    const Words sign = bits & (Words{} + static_cast<int32_t>(0x80000000u));
    const Singles magnitude = AsSingles(bits & (Words{} + 0x7fffffff));
    const Words exponent = bits & (Words{} + 0x7f800000);
    const Words is_normal = exponent > Words{} + kLeast;
    const Words own = (is_normal & exponent) | (~is_normal & (Words{} + kLeast));
    const UnsignedWords more = reinterpret_cast<UnsignedWords>(own) + (13u << 23);
    const Singles big = AsSingles(reinterpret_cast<Words>(more));
    Singles sum = magnitude + big;
    asm("" : "+m"(sum));  // not to be simplified
    const Words rounded = reinterpret_cast<Words>(sum - big);
    const Words is_finite = magnitude < Singles{} + 65520.0f;
    const Words made = (is_finite & rounded) | (~is_finite & (Words{} + 0x7f800000));
    return Pick(a != a, a, __builtin_convertvector(AsSingles(made | sign), V));
  }
  static JAXMAGMA_INLINE V Sqrt(V a) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm512_sqrt_pd(reinterpret_cast<__m512d>(a)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm512_sqrt_ps(reinterpret_cast<__m512>(a)));
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm256_sqrt_pd(reinterpret_cast<__m256d>(a)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm256_sqrt_ps(reinterpret_cast<__m256>(a)));
#elif defined(__SSE2__)
    if constexpr (sizeof(T) == 8)
      return reinterpret_cast<V>(_mm_sqrt_pd(reinterpret_cast<__m128d>(a)));
    if constexpr (sizeof(T) == 4)
      return reinterpret_cast<V>(_mm_sqrt_ps(reinterpret_cast<__m128>(a)));
#else
    const auto sqrt = [](T x) {
      if constexpr (sizeof(T) == 8)
        return __builtin_sqrt(x);
      else
        return __builtin_sqrtf(x);
    };
    return Each<T>(sqrt, a);
#endif
  }
  static JAXMAGMA_INLINE V Rsqrt(V a) { return Splat(T{1}) / Sqrt(a); }

  // A NaN in either operand is the result.
  static JAXMAGMA_INLINE V Max(V a, V b) { return Pick((a > b) | (a != a), a, b); }
  static JAXMAGMA_INLINE V Min(V a, V b) { return Pick((a < b) | (a != a), a, b); }
  static JAXMAGMA_INLINE V Lt(V a, V b) { return Truth(a < b); }
  static JAXMAGMA_INLINE V Le(V a, V b) { return Truth(a <= b); }
  static JAXMAGMA_INLINE V Gt(V a, V b) { return Truth(a > b); }
  static JAXMAGMA_INLINE V Ge(V a, V b) { return Truth(a >= b); }
  static JAXMAGMA_INLINE V Eq(V a, V b) { return Truth(a == b); }
  static JAXMAGMA_INLINE V Ne(V a, V b) { return Truth(a != b); }
  static JAXMAGMA_INLINE V IsFinite(V a) {
    return Truth(Abs(a) <= Splat(sizeof(T) == 8 ? T(__DBL_MAX__) : T(__FLT_MAX__)));
  }
  static JAXMAGMA_INLINE V Not(V a) { return Truth(a == V{}); }
  static JAXMAGMA_INLINE V And(V a, V b) { return Truth(IsTrue(a) & IsTrue(b)); }
  static JAXMAGMA_INLINE V Or(V a, V b) { return Truth(IsTrue(a) | IsTrue(b)); }
  static JAXMAGMA_INLINE V Xor(V a, V b) { return Truth(IsTrue(a) ^ IsTrue(b)); }
  static JAXMAGMA_INLINE V Select(V which, V if_zero, V if_nonzero) {
    return Pick(IsTrue(which), if_nonzero, if_zero);
  }
  static JAXMAGMA_INLINE V First(V a) { return a; }

#define JAXMAGMA_LIBM1(Name, name)                                 \
  static JAXMAGMA_INLINE V Name(V a) {                             \
    const auto scalar = [](T x) -> T {                             \
      if constexpr (sizeof(T) == 8)                                \
        return __builtin_##name(x);                                \
      else                                                         \
        return __builtin_##name##f(x);                             \
    };                                                             \
    return Libm<T>(sizeof(T) == 8 ? #name : #name "f", scalar, a); \
  }
#define JAXMAGMA_LIBM2(Name, name)                                    \
  static JAXMAGMA_INLINE V Name(V a, V b) {                           \
    const auto scalar = [](T x, T y) -> T {                           \
      if constexpr (sizeof(T) == 8)                                   \
        return __builtin_##name(x, y);                                \
      else                                                            \
        return __builtin_##name##f(x, y);                             \
    };                                                                \
    return Libm<T>(sizeof(T) == 8 ? #name : #name "f", scalar, a, b); \
  }
  JAXMAGMA_LIBM1(Cbrt, cbrt)
  JAXMAGMA_LIBM1(Exp2, exp2)
  JAXMAGMA_LIBM1(Log, log)
  JAXMAGMA_LIBM1(Log1p, log1p)
  JAXMAGMA_LIBM1(Sin, sin)
  JAXMAGMA_LIBM1(Cos, cos)
  JAXMAGMA_LIBM1(Tan, tan)
  JAXMAGMA_LIBM1(Asin, asin)
  JAXMAGMA_LIBM1(Acos, acos)
  JAXMAGMA_LIBM1(Atan, atan)
  JAXMAGMA_LIBM1(Sinh, sinh)
  JAXMAGMA_LIBM1(Cosh, cosh)
  JAXMAGMA_LIBM1(Asinh, asinh)
  JAXMAGMA_LIBM1(Acosh, acosh)
  JAXMAGMA_LIBM1(Atanh, atanh)
  JAXMAGMA_LIBM1(Erf, erf)
  JAXMAGMA_LIBM1(Erfc, erfc)
  JAXMAGMA_LIBM2(Rem, fmod)
  JAXMAGMA_LIBM2(Pow, pow)
  JAXMAGMA_LIBM2(Atan2, atan2)
#undef JAXMAGMA_LIBM1
#undef JAXMAGMA_LIBM2

  static JAXMAGMA_INLINE V Exp(V a) { return Exponential<T>::Exp(a); }
  static JAXMAGMA_INLINE V Expm1(V a) { return Exponential<T>::Expm1(a); }
  static JAXMAGMA_INLINE V Tanh(V a) {
    const V e = Exponential<T>::Expm1OfNegative(Splat(T{-2}) * Abs(a));
    return CopySign(e / (e + Splat(T{2})), a);
  }
  // Of a negative number it is `e - e * small`, which rounds less than `e / (1 + e)`.
  static JAXMAGMA_INLINE V Logistic(V a) {
    const V e = Exp(Neg(Abs(a)));
    const V small = e / (Splat(T{1}) + e);
    return Pick(a < V{}, e - e * small, Splat(T{1}) - small);
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
