// Results written past the caches: memory is not read for lines that are overwritten as a whole.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jaxmagma::JAXMAGMA_ISA {

constexpr int64_t kCacheLine = 64;

template <typename T>
JAXMAGMA_INLINE void StreamLanes(T* p, Lanes<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), reinterpret_cast<__m512i>(x));
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(x));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), reinterpret_cast<__m128i>(x));
#else
  StoreLanes(p, x);
#endif
}

// Sends the first lines.
JAXMAGMA_INLINE void Send(Lines& lines, int64_t count) {
  using T = int64_t;
  lines.count -= count;
  for (; count > 0; --count, lines.from += kCacheLine, lines.to += kCacheLine) {
#pragma GCC unroll 4
    for (int64_t byte = 0; byte < kCacheLine; byte += kVectorBytes) {
      StreamLanes(reinterpret_cast<T*>(lines.to + byte),
                  LoadLanes(reinterpret_cast<const T*>(lines.from + byte)));
    }
  }
}

// Such stores are ordered with no others: this comes before another thread may read them.
inline void FinishStreams(Lines& late) {
  Send(late, late.count);
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

JAXMAGMA_INLINE bool IsLine(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % kCacheLine == 0;
}

// Where to put what goes to `to`, in a buffer of whole lines: lines of the one are lines of the
// other.
template <typename T>
JAXMAGMA_INLINE T* LikeInLine(T* buffer, const T* to) {
  return buffer + reinterpret_cast<uintptr_t>(to) % kCacheLine / sizeof(T);
}

// Copies values from a buffer where they are as LikeInLine says, and leaves the whole lines to
// send.
template <typename T>
Lines CopyEnds(const T* from, T* to, int64_t count) {
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  int64_t first = 0;
  for (; first < count && !IsLine(to + first); ++first) to[first] = from[first];
  const int64_t lines = (count - first) / kLine;
  for (int64_t i = first + lines * kLine; i < count; ++i) to[i] = from[i];
  return {reinterpret_cast<const char*>(from + first), reinterpret_cast<char*>(to + first), lines};
}

}  // namespace jaxmagma::JAXMAGMA_ISA
