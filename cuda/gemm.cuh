// Products of tiles.
//
// A matrix is a pointer, or what is used like one, and two strides, so the four transposition modes
// NN, NT, TN and TT are one function. If it points to constant memory, the threads of a warp read
// each value together, to a register that they share.
#pragma once

#include "complex.cuh"
#include "constant.cuh"
#include "tile.cuh"

namespace jaxmagma {

// y[m] = sum_k matrix[m, k] x[k]
template <int M, int K, int ROW, int COLUMN, class Matrix, class T>
__device__ __forceinline__ Fibre<T, M> gemm(Matrix matrix, const Fibre<T, K>& x) {
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

// The same with half the multiplications, for matrix[M - 1 - m, K - 1 - k] = SIGN matrix[m, k]: of
// even and odd halves, with matrix[m, k] = even[m, k] + odd[m, k] in its first rows and columns and
// matrix[m, K - 1 - k] = even[m, k] - odd[m, k]. They stand at `halves` + EVEN and + ODD.
template <int SIGN, int M, int K, int ROW, int COLUMN, int EVEN, int ODD, class Matrix, class T>
__device__ __forceinline__ Fibre<T, M> split_gemm(Matrix halves, const Fibre<T, K>& x) {
  static_assert(M > 1 && K > 1 && (SIGN == 1 || SIGN == -1), "both halves have values");
  constexpr int kRows = (M + 1) / 2, kColumns = (K + 1) / 2;
  Fibre<T, kColumns> sum;
  Fibre<T, K / 2> difference;
#pragma unroll
  for (int k = 0; k < K / 2; ++k) {
    sum[k] = x[k] + x[K - 1 - k];
    difference[k] = x[k] - x[K - 1 - k];
  }
  if constexpr (K % 2 == 1) sum[K / 2] = x[K / 2];
  Fibre<T, kRows> same;      // of both ends of y
  Fibre<T, M / 2> opposite;  // of y, and its negative at the other end
  if constexpr (SIGN > 0) {
    same = gemm<kRows, kColumns, ROW, COLUMN>(halves + EVEN, sum);
    opposite = gemm<M / 2, K / 2, ROW, COLUMN>(halves + ODD, difference);
  } else {
    same = gemm<kRows, K / 2, ROW, COLUMN>(halves + ODD, difference);
    opposite = gemm<M / 2, kColumns, ROW, COLUMN>(halves + EVEN, sum);
  }
  Fibre<T, M> y;
#pragma unroll
  for (int m = 0; m < M / 2; ++m) {
    y[m] = same[m] + opposite[m];
    y[M - 1 - m] = same[m] - opposite[m];
  }
  if constexpr (M % 2 == 1) y[M / 2] = same[M / 2];
  // The middle of the matrix is zero, but zero times infinity or NaN is not.
  if constexpr (SIGN < 0 && M % 2 == 1 && K % 2 == 1) {
    const auto middle = halves[EVEN + M / 2 * ROW + K / 2 * COLUMN];
    y[M / 2] = multiply_add(middle, x[K / 2], y[M / 2]);
  }
  return y;  // (M)
}

// sum + a b; of the term at 0, where a sum begins, a b.
template <class T>
__device__ __forceinline__ T with_term(int at, const T& a, const T& b, const T& sum) {
  return at == 0 ? a * b : multiply_add(a, b, sum);
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
