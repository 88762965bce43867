// Exponential functions in lanes, without calls: those of libmvec look values up in tables, one
// lane after the other, and a call keeps no constants in registers. At most 2 ulp off.
//
// Included by pointwise.h only, once per instruction set.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "lanes.h"

namespace jaxmagma::JAXMAGMA_ISA {

template <typename T>
struct Exponential {
  using V = Lanes<T>;
  static constexpr bool kDouble = sizeof(T) == 8;
  using Integers = Vector<std::conditional_t<kDouble, int64_t, int32_t>, kLanes<T>>;

  // x = n log(2) + r, and exp(r) - 1 = r + r * r * (a polynomial in r), which is the one of
  // Chebyshev points on |r| < log(2) / 2.
  struct Parts {
    V shifted;  // the last bits are n
    V n, r, tail;

    JAXMAGMA_INLINE V Less1() const { return r * r * tail + r; }
  };

  static JAXMAGMA_INLINE Parts Split(V x) {
    constexpr T kLog2E = T(1.4426950408889634);
    // The first has so few bits that a product with n is exact.
    constexpr T kHigh = kDouble ? T(0x1.62e42fefa3800p-1) : T(0x1.62ep-1);
    constexpr T kLow = kDouble ? T(0x1.ef35793c76730p-45) : T(0x1.0bfbe8e7bcd5ep-15);
    Parts parts;
    parts.shifted = x * Splat(kLog2E) + Splat(kShift);
    parts.n = parts.shifted - Splat(kShift);
    parts.r = (x - parts.n * Splat(kHigh)) - parts.n * Splat(kLow);
    if constexpr (kDouble) {
      parts.tail = Polynomial(parts.r, 0x1.af38a0d2d9620p-26, 0x1.28917e2c43a66p-22,
                              0x1.71de0db21e27fp-19, 0x1.a019b9133a48ap-16, 0x1.a01a01a7c327ap-13,
                              0x1.6c16c1788a49bp-10, 0x1.11111111109b4p-7, 0x1.5555555553d67p-5,
                              0x1.5555555555556p-3, 0x1.0000000000001p-1);
    } else {
      parts.tail =
          Polynomial(parts.r, 0x1.6d112cp-10, 0x1.120b9p-7, 0x1.55551ap-5, 0x1.5554dcp-3, 0x1p-1);
    }
    return parts;
  }

  static JAXMAGMA_INLINE V Exp(V x) {
    // Beyond these it is infinite, and zero.
    const Parts parts = Split(Within(x, kDouble ? T(-746) : T(-104.5), kDouble ? T(710) : T(89)));
    // 2^n need not be a number where the result is one.
    const V half = parts.n * Splat(T(0.5)) + Splat(kShift);
    const V first = PowerOf2(Bits(half));
    const V second = PowerOf2(Bits(parts.shifted) - Bits(half));
    return (first * parts.Less1() + first) * second;
  }

  // exp(x) - 1.
  static JAXMAGMA_INLINE V Expm1(V x) {
    const Parts parts = Split(Within(x, kDouble ? T(-40) : T(-20), kDouble ? T(710) : T(89)));
    // Half of it, for the same reason.
    const V power = PowerOf2(Bits(parts.n + Splat(kShift - 1)));
    const V half = power * parts.Less1() + (power - Splat(T(0.5)));
    return x == V{} ? x : half + half;
  }

  // The same of a number that is not positive.
  static JAXMAGMA_INLINE V Expm1OfNegative(V x) {
    const V least = Splat(kDouble ? T(-40) : T(-20));
    const Parts parts = Split(x < least ? least : x);
    const V power = PowerOf2(Bits(parts.shifted));
    return power * parts.Less1() + (power - Splat(T(1)));
  }

 private:
  static constexpr int kDigits = std::numeric_limits<T>::digits - 1;
  // Added to a number, it rounds that to an integer in the last bits of the sum.
  static constexpr T kShift = kDouble ? T(0x1.8p52) : T(0x1.8p23);

  static JAXMAGMA_INLINE Integers Bits(V x) { return reinterpret_cast<Integers>(x); }
  static JAXMAGMA_INLINE V PowerOf2(Integers n) {
    return reinterpret_cast<V>((n << kDigits) + Bits(Splat(T(1))));
  }
  // NaN stays.
  static JAXMAGMA_INLINE V Within(V x, T least, T most) {
    x = x < Splat(least) ? Splat(least) : x;
    return x > Splat(most) ? Splat(most) : x;
  }
  // The coefficient of the highest power first.
  template <typename... Others>
  static JAXMAGMA_INLINE V Polynomial(V x, double first, Others... others) {
    V sum = Splat(T(first));
    ((sum = sum * x + Splat(T(others))), ...);
    return sum;
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
