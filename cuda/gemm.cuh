// Products of tiles.
//
// A matrix is a pointer and two strides, so the four transposition modes NN, NT, TN and TT are one
// function. If it points to constant memory, every value is an operand of the multiply-add itself:
// no register and no load is spent on it.
#pragma once

#include "complex.cuh"
#include "tile.cuh"

namespace jaxmagma {

// y[m] = sum_k matrix[m, k] x[k]
template <int M, int K, int ROW, int COLUMN, class S, class T>
__device__ __forceinline__ Fibre<T, M> gemm(const S* matrix, const Fibre<T, K>& x) {
  static_assert(M == 1 || ROW > 0, "rows lie apart");
  static_assert(K == 1 || COLUMN > 0, "columns lie apart");
  Fibre<T, M> y;
#pragma unroll
  for (int m = 0; m < M; ++m) y[m] = matrix[m * ROW] * x[0];
#pragma unroll
  for (int k = 1; k < K; ++k) {
#pragma unroll
    for (int m = 0; m < M; ++m) y[m] = multiply_add(matrix[m * ROW + k * COLUMN], x[k], y[m]);
  }
  return y;  // (M)
}

// y[m, n] += a[m] b[n]
template <class T, int M, int N>
__device__ __forceinline__ void gemm(Block<T, M, N>& y, const Fibre<T, M>& a,
                                     const Fibre<T, N>& b) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) y.value[m][n] = multiply_add(a[m], b[n], y.value[m][n]);
  }
}

}  // namespace jaxmagma
