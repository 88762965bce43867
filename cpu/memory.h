// Aligned memory, and the odd number that goes with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace jaxmagma {

// A line of the cache, and the widest vector.
constexpr int64_t kAlignment = 64;

constexpr int64_t DivideUp(int64_t x, int64_t by) {
  return (x + by - 1) / by;
}
constexpr int64_t RoundUp(int64_t x, int64_t to) {
  return DivideUp(x, to) * to;
}

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<std::byte[], Free>;

inline AlignedBytes AllocateAligned(int64_t bytes) {
  void* p = std::aligned_alloc(kAlignment, RoundUp(bytes > 0 ? bytes : 1, kAlignment));
  if (!p) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(p));
}

}  // namespace jaxmagma
