// Pointwise functions of fibres. A fibre of one value stands for a fibre of equal ones.
#pragma once

#include "complex.cuh"
#include "tile.cuh"

namespace jaxmagma {

struct Multiply {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a * b;
  }
};

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

template <class Function, class T, int M, int N>
__device__ __forceinline__ auto map(Function function, const Fibre<T, M>& a, const Fibre<T, N>& b) {
  static_assert(M == N || M == 1 || N == 1, "fibres have equal length");
  constexpr int size = M > N ? M : N;
  Fibre<T, size> y;
#pragma unroll
  for (int i = 0; i < size; ++i) y[i] = function(a[M == 1 ? 0 : i], b[N == 1 ? 0 : i]);
  return y;  // (N)
}

}  // namespace jaxmagma
