// libm's functions on vectors: those of libmvec, or where it has none, of one value after the
// other.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>
#include <limits>

#include "lanes.h"
#include "vector_functions.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jaxmagma::JAXMAGMA_ISA {

// The letter of this instruction set in the vector function ABI, and how it calls functions.
#if defined(__AVX512F__)
constexpr char kVectorAbi = 'e';
#elif defined(__AVX2__)
constexpr char kVectorAbi = 'd';
#elif defined(__SSE2__)
constexpr char kVectorAbi = 'b';
#elif defined(__aarch64__)
constexpr char kVectorAbi = 'n';
#else
constexpr char kVectorAbi = '?';  // none
#endif
#if defined(__aarch64__)
#define JAXMAGMA_VECTOR_CALL __attribute__((aarch64_vector_pcs))
#else
#define JAXMAGMA_VECTOR_CALL
#endif

template <typename T, int kOperands>
struct VectorFunction {
  using Pointer = JAXMAGMA_VECTOR_CALL Lanes<T> (*)(Lanes<T>) noexcept;
};
template <typename T>
struct VectorFunction<T, 2> {
  using Pointer = JAXMAGMA_VECTOR_CALL Lanes<T> (*)(Lanes<T>, Lanes<T>) noexcept;
};

// XLA's threads take subnormal numbers for zeros. While one of these lives, its thread does not:
// libmvec's logarithm of a subnormal number would be neither its own nor that of zero.
class KeepSubnormals {
 public:
#if defined(__SSE2__)
  KeepSubnormals() { _mm_setcsr(saved_ & ~kFlush); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  KeepSubnormals() { Set(saved_ & ~kFlush); }
  ~KeepSubnormals() { Set(saved_); }
#else
  KeepSubnormals() {}
  ~KeepSubnormals() {}
#endif
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  static constexpr unsigned kFlush = 0x8040;  // results, operands
  const unsigned saved_ = _mm_getcsr();
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = 1 << 24;
  static uint64_t Get() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits)::"memory");
    return bits;
  }
  static void Set(uint64_t bits) { asm volatile("msr fpcr, %0" ::"r"(bits) : "memory"); }
  const uint64_t saved_ = Get();
#endif
};

// Calls a function of single values lane by lane.
template <typename T, typename Scalar, typename... Operands>
JAXMAGMA_INLINE Lanes<T> Each(const Scalar& scalar, Operands... operands) {
  Lanes<T> result{};
  for (int i = 0; i < kLanes<T>; ++i) result[i] = scalar(operands[i]...);
  return result;
}

// Where functions have special values, with either sign; they fill whole vectors.
// clang-format off
template <typename T, typename Limits = std::numeric_limits<T>>
constexpr T kSpecial[] = {
    0, Limits::denorm_min(), Limits::min(), Limits::epsilon(), T(0.5), 1, 2, 3,
    10, 100, 1000, T(1e5), T(1e30), Limits::max(), Limits::infinity(), Limits::quiet_NaN()};
// clang-format on

// Whether two results are the same but for rounding.
template <typename T>
bool Agree(T a, T b) {
  using Limits = std::numeric_limits<T>;
  constexpr T kRelative = 8 * Limits::epsilon(), kAbsolute = 4 * Limits::denorm_min();
  if (a != a || b != b) return a != a && b != b;
  if (a == b) return __builtin_signbit(a) == __builtin_signbit(b);
  const T difference = a < b ? b - a : a - b;
  return difference <= kAbsolute || difference < kRelative * (b < 0 ? -b : b);
}

// Whether a vector function has the special values of the scalar one, its first operands being
// `first`.
template <typename T, typename Vector, typename Scalar, typename... First>
bool HasSpecialValues(Vector vector, const Scalar& scalar, First... first) {
  bool agree = true;
  constexpr int kValues = sizeof(kSpecial<T>) / sizeof(T);
  for (int i = 0; i < kValues; i += kLanes<T>) {
    for (const T sign : {T(1), T(-1)}) {
      const Lanes<T> last = sign * LoadN<kLanes<T>>(kSpecial<T> + i);
      const Lanes<T> result = vector(Splat(first)..., last);
      for (int j = 0; j < kLanes<T>; ++j) agree &= Agree<T>(result[j], scalar(first..., last[j]));
    }
  }
  return agree;
}

// The vector function that stands for a scalar one, or null. Versions of libmvec differ in what
// they make of zeros, infinities and subnormal numbers, so one that is wrong there is not used.
template <typename T, int kOperands, typename Scalar>
typename VectorFunction<T, kOperands>::Pointer FindLibm(const char* name,
                                                        const Scalar& scalar) noexcept {
  const auto found = reinterpret_cast<typename VectorFunction<T, kOperands>::Pointer>(
      FindVectorFunction(kVectorAbi, kLanes<T>, kOperands, name));
  if (!found) return nullptr;
  bool right = true;
  if constexpr (kOperands == 1) {
    right = HasSpecialValues<T>(found, scalar);
  } else {
    for (const T first : kSpecial<T>) {
      right &= HasSpecialValues<T>(found, scalar, first);
      right &= HasSpecialValues<T>(found, scalar, -first);
    }
  }
  return right ? found : nullptr;
}

// libm's function `name`, which `scalar` calls. Each has a type of its own, and so is looked up
// once.
template <typename T, typename Scalar, typename... Operands>
JAXMAGMA_INLINE Lanes<T> Libm(const char* name, const Scalar& scalar, Operands... operands) {
  static const auto vector = FindLibm<T, sizeof...(Operands)>(name, scalar);
  return vector ? vector(operands...) : Each<T>(scalar, operands...);
}

}  // namespace jaxmagma::JAXMAGMA_ISA
