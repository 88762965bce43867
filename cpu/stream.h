// Results written by whole lines of the cache, or past the caches: memory is not read for lines
// that are overwritten as a whole.
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
  StoreN<kLanes<T>>(p, x);
#endif
}

// Sends the first lines. What they hold is not integers, so that only what may alias will do.
JAXMAGMA_INLINE void Send(Lines& lines, int64_t count) {
  using T = int64_t;
  lines.count -= count;
  for (; count > 0; --count, lines.from += kCacheLine, lines.to += kCacheLine) {
#pragma GCC unroll 4
    for (int64_t byte = 0; byte < kCacheLine; byte += kVectorBytes) {
      StreamLanes(reinterpret_cast<T*>(lines.to + byte),
                  LoadN<kLanes<T>>(reinterpret_cast<const T*>(lines.from + byte)));
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

#if defined(__AVX512F__)
// Whether as many rows as there are lanes begin with a line of the cache.
inline bool AreLines(const double* const* rows) {
  uintptr_t bits = 0;
  for (int j = 0; j < kLanes<double>; ++j) bits |= reinterpret_cast<uintptr_t>(rows[j]);
  return bits % kVectorBytes == 0;
}

// All of `count` columns, at least as many as there are lanes, of as many rows; column c is at
// `from + c * plane`.
//
// A store across two lines of the cache takes as long as several. Rows that do not begin with a
// line, those of tiles with odd sizes, get whole lines but for their ends: what a block of columns
// leaves of a line goes together with the next block.
template <bool kPastCaches>
inline void StoreLines(double* const* rows, const double* from, int64_t plane, int64_t count) {
  constexpr int N = kLanes<double>;
  using Places = Vector<int64_t, N>;
  constexpr Places kEach{0, 1, 2, 3, 4, 5, 6, 7};
  int64_t first[N];  // the column with which the next line begins
  Lanes<double> before[N], now[N];
  const auto load = [&](int64_t column) {
#pragma GCC unroll 16
    for (int c = 0; c < N; ++c) {
      now[c] = column + c < count ? LoadLanes(from + (column + c) * plane) : Lanes<double>{};
    }
    Transpose<double, N, N>(now);
  };
  const auto line = [&](int j) {
    const Places places = kEach + first[j];
    const auto both = _mm512_permutex2var_pd(before[j], reinterpret_cast<__m512i>(places), now[j]);
    return reinterpret_cast<Lanes<double>>(both);
  };
  const auto store_some = [](double* to, int64_t values, Lanes<double> x) {
    const int all = values >= N ? 255 : 0;
    const int some = values > 0 ? (1 << (values & (N - 1))) - 1 : 0;
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(all | some), x);
  };
  load(0);
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) {
    first[j] = -reinterpret_cast<uintptr_t>(rows[j]) / sizeof(double) % N;
    store_some(rows[j], first[j], now[j]);
    before[j] = now[j];
  }
  int64_t column = N;
  for (; column + N <= count; column += N) {
    load(column);
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      double* const to = rows[j] + first[j] + column - N;
      if constexpr (kPastCaches) {
        StreamLanes(to, line(j));
      } else {
        StoreLanes(to, line(j));
      }
      before[j] = now[j];
    }
  }
  load(column);
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) {
    double* const to = rows[j] + first[j] + column - N;
    const int64_t left = count - (first[j] + column - N);
    store_some(to, left, line(j));
    before[j] = now[j];
    store_some(to + N, left - N, line(j));
  }
}
#endif

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
