// 16-bit floats, which are computed with in 32 bits: conversions that vectorise.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace jaxmagma::JAXMAGMA_ISA {

template <typename To, typename From>
JAXMAGMA_INLINE To Bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

struct BFloat16 {
  uint16_t bits;

  JAXMAGMA_INLINE float Widen() const { return Bits<float>(static_cast<uint32_t>(bits) << 16); }

  // To nearest, ties to even. A NaN stays one.
  static JAXMAGMA_INLINE BFloat16 Narrow(float x) {
    const uint32_t b = Bits<uint32_t>(x);
    const uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>((b & 0x7fffffff) > 0x7f800000 ? (b >> 16) | 0x40 : rounded)};
  }
};

struct Float16 {
  uint16_t bits;

  JAXMAGMA_INLINE float Widen() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    // Exponents move by 112; those of infinity and NaN to the top. Subnormals are integers.
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000;
    const uint32_t small = Bits<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) *
                                          5.9604644775390625e-8f);
    return Bits<float>(sign | (magnitude >= 0x7c00 ? special : magnitude < 0x400 ? small : normal));
  }

  // To nearest, ties to even. A NaN stays one.
  static JAXMAGMA_INLINE Float16 Narrow(float x) {
    const uint32_t b = Bits<uint32_t>(x);
    const uint32_t sign = (b >> 16) & 0x8000;
    const uint32_t magnitude = b & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding one half moves the bits of a subnormal result to the end, rounding them.
    const uint32_t small = Bits<uint32_t>(Bits<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000  ? special
                                          : magnitude < 0x38800000 ? small
                                                                   : normal))};
  }
};

template <typename S>
void WidenAll(const void* from, float* to, int64_t count) {
  const S* s = static_cast<const S*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = s[i].Widen();
}

template <typename S>
void NarrowAll(const float* from, void* to, int64_t count) {
  S* s = static_cast<S*>(to);
  for (int64_t i = 0; i < count; ++i) s[i] = S::Narrow(from[i]);
}

}  // namespace jaxmagma::JAXMAGMA_ISA
