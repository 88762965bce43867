// The kernels behind bgemm.h, to be instantiated for one type in each compilation unit.
//
// Tiles are read in the order of memory, whole elements at a time, and put where the product wants
// them: transposition costs nothing more. Each thread owns a block of at most 4 x 4 of the result.
#pragma once

#include <utility>

#include "batch.cuh"
#include "bgemm.h"
#include "gemm.cuh"
#include "tile.cuh"

namespace jaxmagma {

template <class T, int N>
struct BgemmShape {
  static constexpr int most = sizeof(T) > 8 ? 3 : 4;
  // Threads side by side write columns side by side, if none has many of a short row.
  static constexpr int most_columns = N <= 5 ? 1 : N == 7 ? 2 : most;
  static constexpr int row_pieces = (N + most - 1) / most;
  static constexpr int column_pieces = (N + most_columns - 1) / most_columns;
  static constexpr int rows = (N + row_pieces - 1) / row_pieces;
  static constexpr int columns = (N + column_pieces - 1) / column_pieces;
  // A row is an odd number of values, and an element as far from the next, counted in banks, as one
  // block of rows from the next: then the rows that threads read at one time are in banks apart.
  static constexpr int row = N % 2 == 0 ? N + 1 : N;
  static constexpr int banks = 128 / static_cast<int>(sizeof(T));
  static constexpr int element = N * row + ((row_pieces - N) * row % banks + banks) % banks;
  static constexpr int bytes = 2 * element * static_cast<int>(sizeof(T));
  static constexpr int by_threads = 192 / (row_pieces * column_pieces);
  static constexpr int by_memory = (40 << 10) / bytes;
  static constexpr int fit = by_threads < by_memory ? by_threads : by_memory;
  static constexpr int elements = fit > 0 ? fit : 1;
  static constexpr int threads = (elements * row_pieces * column_pieces + 31) / 32 * 32;
  static_assert(elements * bytes <= 48 << 10, "the tiles fit in static shared memory");
};

template <class T, int N>
__global__ void __launch_bounds__(BgemmShape<T, N>::threads)
    BgemmKernel(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c,
                long long count, Transposed transposed) {
  using Shape = BgemmShape<T, N>;
  constexpr int E = Shape::elements, M = Shape::rows, K = Shape::columns;
  constexpr int R = Shape::row, S = Shape::element, size = N * N;
  __shared__ T left[E * S];
  __shared__ T right[E * S];
  const int thread = threadIdx.x;
  const auto slice = jaxmagma::slice<E>(blockIdx.x * static_cast<long long>(E), count);
  const T* const from_a = a + slice.first * size;
  const T* const from_b = b + slice.first * size;
#pragma unroll 4
  for (int at = thread; at < (slice.last + 1) * size; at += Shape::threads) {
    const int e = at / size, i = at / N % N, j = at % N;
    left[e * S + (transposed.a ? j * R + i : i * R + j)] = from_a[at];   // (E, N, N)
    right[e * S + (transposed.b ? j * R + i : i * R + j)] = from_b[at];  // (E, N, N)
  }
  __syncthreads();
  lines<Shape::threads, E, Shape::row_pieces, Shape::column_pieces>(
      thread, [&](int e, int i, int k) {
        if (!slice.has(e)) return;
        Block<T, M, K> sum;
        zero(sum);
#pragma unroll(N <= 8 ? N : 4)
        for (int j = 0; j < N; ++j) {
          gemm(sum, load_piece<N, M, R>(left + e * S + j, i),
               load_piece<N, K, 1>(right + e * S + j * R, k));  // (M, K)
        }
        T* const to = c + (slice.first + e) * size;
        if (transposed.c) {
          store<N, N, 1, N>(to, sum, i, k);  // (M, K)
        } else {
          store<N, N, N, 1>(to, sum, i, k);  // (M, K)
        }
      });
}

template <class T, int... SIZES>
const Bgemm& BgemmOf(int size, std::integer_sequence<int, SIZES...>) {
  static const Bgemm table[] = {{reinterpret_cast<const void*>(&BgemmKernel<T, SIZES + 1>),
                                 BgemmShape<T, SIZES + 1>::threads,
                                 BgemmShape<T, SIZES + 1>::elements}...};
  return table[size - 1];
}

template <class T>
const Bgemm& GetBgemm(int size) {
  return BgemmOf<T>(size, std::make_integer_sequence<int, kMostBgemm>());
}

}  // namespace jaxmagma
