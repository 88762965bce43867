// Sums over elements of outer products of fibres: each thread has a whole one of its own, a Block.
//
// They are as small as the registers of a thread, and the fibres are there for something else. What
// the threads of a group have is added up after its last element.
#pragma once

#include "complex.cuh"
#include "quad.cuh"
#include "tile.cuh"

namespace jaxmagma {

// What the lanes of a warp have together, in all of them.
template <class T>
__device__ __forceinline__ T of_warp(T x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += from_lane(x, other);
  return x;
}
template <class T>
__device__ __forceinline__ Complex<T> of_warp(Complex<T> x) {
  return {of_warp(x.real), of_warp(x.imag)};
}

// Adds up what the threads have, warp by warp, and stores it, row by row.
template <int THREADS, class T, int M, int N>
__device__ __forceinline__ void store(T* to, const Block<T, M, N>& sum, T* shared, int thread) {
  T own[(M * N + 31) / 32] = {};  // value number `lane`, and each 32nd from there
#pragma unroll
  for (int at = 0; at < M * N; ++at) {
    const T total = of_warp(sum.value[at / N][at % N]);
    if (thread % 32 == at % 32) own[at / 32] = total;
  }
#pragma unroll 1
  for (int warp = 0; warp < THREADS / 32; ++warp) {
    if (thread / 32 == warp) {
#pragma unroll
      for (int i = 0; i < (M * N + 31) / 32; ++i) {
        const int at = 32 * i + thread % 32;
        if (at < M * N) shared[at] = warp == 0 ? own[i] : shared[at] + own[i];
      }
    }
    sync<THREADS>();
  }
  for (int at = thread; at < M * N; at += THREADS) to[at] = shared[at];
  sync<THREADS>();
}

}  // namespace jaxmagma
