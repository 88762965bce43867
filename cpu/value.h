// Values in lanes, real or complex, and how a block of them fills the registers.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lanes.h"

namespace jaxmagma::JAXMAGMA_ISA {

constexpr bool kManyRegisters = kRegisters >= 32;
// Whether a multiply-add reads a factor for all lanes from memory. Where it does not, factors are
// in registers, too, and compilers load several of them ahead.
constexpr bool kBroadcasts = kVectorBytes == 64;

// A value in lanes: real, or real and imaginary parts apart.
template <typename T, bool kComplex>
struct Value {
  Lanes<T> re;

  static JAXMAGMA_INLINE Value At(const T* p, int64_t) { return {LoadLanes(p)}; }
  static JAXMAGMA_INLINE Value Same(const T* p) { return {Splat(*p)}; }
  JAXMAGMA_INLINE void To(T* p, int64_t) const { StoreLanes(p, re); }
  JAXMAGMA_INLINE void Add(Value x) { re += x.re; }
  JAXMAGMA_INLINE void AddProduct(Value a, Value b) { re += a.re * b.re; }
  static JAXMAGMA_INLINE Value Product(Value a, Value b) { return {a.re * b.re}; }
};

template <typename T>
struct Value<T, true> {
  Lanes<T> re, im;

  // The imaginary parts stand one plane of lanes behind the real ones.
  static JAXMAGMA_INLINE Value At(const T* p, int64_t plane) {
    return {LoadLanes(p), LoadLanes(p + plane)};
  }
  static JAXMAGMA_INLINE Value Same(const T* p) { return {Splat(p[0]), Splat(p[1])}; }
  JAXMAGMA_INLINE void To(T* p, int64_t plane) const {
    StoreLanes(p, re);
    StoreLanes(p + plane, im);
  }
  JAXMAGMA_INLINE void Add(Value x) {
    re += x.re;
    im += x.im;
  }
  JAXMAGMA_INLINE void AddProduct(Value a, Value b) {
    re += a.re * b.re;
    im += a.re * b.im;
    re -= a.im * b.im;
    im += a.im * b.re;
  }
  static JAXMAGMA_INLINE Value Product(Value a, Value b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

// Calls `body` with the run-time number `n`, from 1 to kMost, as a constant.
template <int kMost, typename Body>
JAXMAGMA_INLINE void WithConstant(int64_t n, const Body& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return WithConstant<kMost - 1>(n, body);
  }
  body(std::integral_constant<int, kMost>());
}

// Calls `body(first, size)` for parts of at most kMost that make up `total`, as few and as even as
// possible: five are three and two, not four and one.
template <int kMost, typename Body>
JAXMAGMA_INLINE void EvenParts(int64_t total, const Body& body) {
  const int64_t parts = (total + kMost - 1) / kMost;
  for (int64_t first = 0, part = 0; part < parts; ++part) {
    const int64_t size = (total - first + parts - part - 1) / (parts - part);
    body(first, size);
    first += size;
  }
}

}  // namespace jaxmagma::JAXMAGMA_ISA
