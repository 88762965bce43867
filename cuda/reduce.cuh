// Sums, in an order that depends on the sizes and the device alone: the same bits in every run.
#pragma once

#include "batch.cuh"
#include "complex.cuh"
#include "tile.cuh"

namespace jaxmagma {

// sum_i x[i]
template <class T, int N>
__device__ __forceinline__ Fibre<T, 1> reduce(const Fibre<T, N>& x) {
  Fibre<T, 1> y{{x[0]}};
#pragma unroll
  for (int i = 1; i < N; ++i) y[0] += x[i];
  return y;  // (1)
}

// What the lane has whose number differs from this one's in the bits of `other`.
template <class T>
__device__ __forceinline__ T from_lane(T x, int other) {
  return __shfl_xor_sync(0xffffffffu, x, other);
}
template <class T>
__device__ __forceinline__ Complex<T> from_lane(Complex<T> x, int other) {
  return {from_lane(x.real, other), from_lane(x.imag, other)};
}

// The sums of TERMS terms for all lines of EXTENTS. Of a line, LANES lanes of a warp have some
// terms each, those side by side at a time, and add up what they have in pairs; one of them stores
// it.
template <int THREADS, int LANES, int TERMS, int... EXTENTS, class Term, class Store>
__device__ __forceinline__ void totals(int thread, const Term& term, const Store& store) {
  using Every = Lines<EXTENTS...>;
  constexpr unsigned warp = 32 / LANES;
  const int lane = thread % LANES, own = thread % 32 / LANES;
#pragma unroll 1
  for (unsigned first = thread / 32 * warp; first < Every::count; first += THREADS / LANES) {
    const bool has = first + own < Every::count;  // lanes without a line have the last one as well
    const unsigned line = has ? first + own : Every::count - 1;
    auto sum = Every::visit(line, term, lane);
#pragma unroll 4
    for (int i = lane + LANES; i < TERMS; i += LANES) sum = sum + Every::visit(line, term, i);
#pragma unroll
    for (int other = LANES / 2; other; other /= 2) sum = sum + from_lane(sum, other);
    if (has && lane == 0) Every::visit(line, store, sum);
  }
}

// A tile of SIZE values summed over elements, spread over the registers of THREADS threads.
template <class T, int SIZE, int THREADS>
struct Sum {
  static constexpr int held = (SIZE + THREADS - 1) / THREADS;
  Fibre<T, held> value;
};

// sum += the tiles of all elements of `slice`; tile(e) points to the tile of element e.
template <class T, int SIZE, int THREADS, int ELEMENTS, class Tile>
__device__ __forceinline__ void reduce(Sum<T, SIZE, THREADS>& sum, int thread,
                                       const Slice<ELEMENTS>& slice, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < Sum<T, SIZE, THREADS>::held; ++i) {
    const int at = thread + i * THREADS;
    if (at < SIZE) {
#pragma unroll 4
      for (int e = 0; e <= slice.last; ++e) sum.value[i] += tile(e)[at];
    }
  }
}

template <class T, int SIZE, int THREADS>
__device__ __forceinline__ void store(T* to, const Sum<T, SIZE, THREADS>& sum, int thread) {
#pragma unroll
  for (int i = 0; i < Sum<T, SIZE, THREADS>::held; ++i) {
    const int at = thread + i * THREADS;
    if (at < SIZE) to[at] = sum.value[i];
  }
}

// A block of so many threads makes so many totals, neighbours in memory; as in ffi.cc.
constexpr int kTotalThreads = 512, kTotals = 4;

// total[outer, i] = sum_chunk partial[outer, chunk, i]
template <class T>
__device__ __forceinline__ void total(const T* partial, T* total, long long values,
                                      long long chunks, long long size) {
  constexpr int kShares = kTotalThreads / kTotals;
  __shared__ T sums[kShares][kTotals];
  const int share = threadIdx.x / kTotals, own = threadIdx.x % kTotals;
  const long long value = blockIdx.x * static_cast<long long>(kTotals) + own;
  const long long outer = value / size, i = value % size;
  T sum{};
  if (value < values) {
#pragma unroll 8
    for (long long c = share; c < chunks; c += kShares) {
      sum += partial[(outer * chunks + c) * size + i];
    }
  }
  sums[share][own] = sum;
#pragma unroll
  for (int half = kShares / 2; half > 0; half /= 2) {
    sync<kTotalThreads>();
    if (share < half) sums[share][own] += sums[share + half][own];
  }
  if (share == 0 && value < values) total[value] = sums[0][own];
}

}  // namespace jaxmagma
