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
