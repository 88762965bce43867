// Products of fibres with matrices in shared memory: those that are too large for the cache of the
// constant bank.
//
// All threads read the same values of a matrix at a time, a group of them at once, for all fibres
// that they have. A product takes its fibres from memory, or gives them there, some values after
// the other: then only one of both is in registers, and the code is short. Unrolled, products of
// large matrices would not fit in the instruction cache either.
#pragma once

#include "complex.cuh"
#include "pack.cuh"
#include "tile.cuh"

namespace jaxmagma {

// Values of a matrix that stand side by side.
template <class S>
struct alignas(16) Group {
  static constexpr int size = sizeof(S) < 16 ? 16 / sizeof(S) : 1;
  S value[size];
};

// Read each time anew: else compilers would keep the values of one product for the next, in more
// registers than there are.
template <class S>
__device__ __forceinline__ Group<S> load_group(const S* from) {
#ifdef __CUDACC__
  union {
    unsigned word[4];
    Group<S> group;
  } x;
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))));
  return x.group;
#else
  return *reinterpret_cast<const Group<S>*>(from);
#endif
}

// Copies a matrix to where its rows are STRIDE values apart, a multiple of a group.
template <int THREADS, int M, int K, int STRIDE, class S>
__device__ __forceinline__ void copy_matrix(S* to, const S* from, int thread) {
  for (int i = thread; i < M * K; i += THREADS) to[i / K * STRIDE + i % K] = from[i];  // (M, K)
}

// A matrix in shared memory, one of whose strides is 1; groups that begin inside may be read.
template <int M, int K, int ROW, int COLUMN, class S>
struct Near {
  static_assert(ROW == 1 || COLUMN == 1, "some values lie side by side");
  // Rows and columns of a group; and how many of a product are done at a time.
  static constexpr int rows = COLUMN == 1 ? 1 : Group<S>::size;
  static constexpr int columns = COLUMN == 1 ? Group<S>::size : 1;
  static constexpr int step = sizeof(S) == 4 ? 8 : 4;
  const S* at;
};

template <int M, int K, int ROW, int COLUMN, class S>
__device__ __forceinline__ Near<M, K, ROW, COLUMN, S> near(const S* matrix) {
  return {matrix};
}

// y[m] += sum_k matrix[m, k] x[k], for a part of a matrix that begins with whole groups
template <class Matrix, int ROW, int COLUMN, class S, class T, int M, int K>
__device__ __forceinline__ void add_part(const S* part, const Fibre<T, K>& x, Fibre<T, M>& y) {
#pragma unroll
  for (int k = 0; k < K; k += Matrix::columns) {
#pragma unroll
    for (int m = 0; m < M; m += Matrix::rows) {
      const auto group = load_group(part + m * ROW + k * COLUMN);
#pragma unroll
      for (int i = 0; i < Group<S>::size; ++i) {
        const int row = Matrix::rows == 1 ? m : m + i, column = Matrix::rows == 1 ? k + i : k;
        if (row < M && column < K) y[row] = multiply_add(group.value[i], x[column], y[row]);
      }
    }
  }
}

// y[m] = sum_k matrix[m, k] x[k]
template <int M, int K, int ROW, int COLUMN, class S, class T>
__device__ __forceinline__ Fibre<T, M> gemm(Near<M, K, ROW, COLUMN, S> matrix,
                                            const Fibre<T, K>& x) {
  Fibre<T, M> y;
  zero(y);
  add_part<decltype(matrix), ROW, COLUMN>(matrix.at, x, y);
  return y;  // (M)
}

// The same of a fibre in memory, some of its values after the other. `own` says which fibres a
// thread has, if several.
template <int STRIDE, int M, int K, int ROW, int COLUMN, class S, class From, class... Own>
__device__ __forceinline__ auto gemm_from(Near<M, K, ROW, COLUMN, S> matrix, const From& from,
                                          const Own&... own) {
  constexpr int kStep = decltype(matrix)::step, kWhole = K / kStep * kStep;
  Fibre<typename decltype(load<1, STRIDE>(own..., from))::Value, M> y;
  zero(y);
#pragma unroll 1
  for (int k = 0; k < kWhole; k += kStep) {
    const auto x = load<kStep, STRIDE>(own..., from + k * STRIDE);
    add_part<decltype(matrix), ROW, COLUMN>(matrix.at + k * COLUMN, x, y);
  }
  if constexpr (kWhole < K) {
    const auto x = load<K - kWhole, STRIDE>(own..., from + kWhole * STRIDE);
    add_part<decltype(matrix), ROW, COLUMN>(matrix.at + kWhole * COLUMN, x, y);
  }
  return y;  // (M)
}

// The same to a fibre in memory.
template <int STRIDE, int M, int K, int ROW, int COLUMN, class S, class T, class To, class... Own>
__device__ __forceinline__ void gemm_to(Near<M, K, ROW, COLUMN, S> matrix, const Fibre<T, K>& x,
                                        const To& to, const Own&... own) {
  constexpr int kStep = decltype(matrix)::step, kWhole = M / kStep * kStep;
#pragma unroll 1
  for (int m = 0; m < kWhole; m += kStep) {
    Fibre<T, kStep> y;
    zero(y);
    add_part<decltype(matrix), ROW, COLUMN>(matrix.at + m * ROW, x, y);
    store<STRIDE>(own..., to + m * STRIDE, y);  // (step)
  }
  if constexpr (kWhole < M) {
    Fibre<T, M - kWhole> y;
    zero(y);
    add_part<decltype(matrix), ROW, COLUMN>(matrix.at + kWhole * ROW, x, y);
    store<STRIDE>(own..., to + kWhole * STRIDE, y);  // (the rest)
  }
}

}  // namespace jaxmagma
