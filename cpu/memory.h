// Aligned memory, and the odd number that goes with it.
#pragma once

#include <cstddef>
#include <cstdint>
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
  void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], Free>;

inline AlignedBytes AllocateAligned(int64_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      ::operator new(static_cast<size_t>(bytes), std::align_val_t{kAlignment})));
}

}  // namespace jaxmagma
