// Products of two tiles of an element whose results are only summed over elements: one long
// product, whose result stays in registers from the first element of a block to the last.
//
// Every warp has the result in pieces of 8 x 8, as tensor cores give it: lane l has the values of
// row l / 4 in columns 2 (l % 4) and 2 (l % 4) + 1. Warps take turns with the terms of the sum, so
// what they have differs, and is added up in the end. Other types than double are multiplied by the
// lanes themselves, which have the same values.
#pragma once

#include "batch.cuh"
#include "complex.cuh"
#include "pack.cuh"
#include "quad.cuh"
#include "tile.cuh"

namespace jaxmagma {

// What a warp has of an (M, N) sum of products.
template <class T, int M, int N>
struct ProductSum {
  static constexpr int rows = (M + 7) / 8, columns = (N + 7) / 8;  // of pieces
  Pack<T, rows> value[columns][2] = {};
};

// Where the products of one term begin: row 0 of the left operand, column 0 of the right one.
template <class T>
struct Operands {
  const T* left;
  const T* right;
};

template <class T>
__device__ __forceinline__ Operands<T> operands(const T* left, const T* right) {
  return {left, right};
}

// Row or column `at` of piece `piece`; beyond the end, the last one once more.
template <int EXTENT>
__device__ __forceinline__ int within(int piece, int at) {
  const int i = 8 * piece + at;
  return 8 * piece + 7 < EXTENT || i < EXTENT ? i : EXTENT - 1;
}

// How the terms of a product are read: strides of the rows of the left operand and of the columns
// of the right one, and of both from one term to the next, of which there are TERMS in a row.
template <int ROW, int COLUMN, int LEFT, int RIGHT, int TERMS>
struct Terms {
  static constexpr int row = ROW, column = COLUMN, left = LEFT, right = RIGHT, count = TERMS;
};

// Adds four terms, from number `first` on. Lane l has term l % 4 of row l / 4 and of column l / 4.
// Beyond the end it reads a term once more, which may be NaN, and adds zero.
template <class Terms, int M, int N>
__device__ __forceinline__ void add(ProductSum<double, M, N>& sum, int lane,
                                    const Operands<double>& from, int first) {
  using Sum = ProductSum<double, M, N>;
  const bool has = Terms::count % 4 == 0 || first + lane % 4 < Terms::count;
  const int term = first + (has ? lane % 4 : 0);
  const auto left_of = [&](int row) {
    const double x = from.left[row * Terms::row + term * Terms::left];
    return has ? x : 0.0;
  };
  const auto right_of = [&](int column) {
    const double x = from.right[column * Terms::column + term * Terms::right];
    return has ? x : 0.0;
  };
  Pack<double, Sum::rows> left;
  double right[Sum::columns];
#pragma unroll
  for (int i = 0; i < Sum::rows; ++i) left.value[i] = left_of(within<M>(i, lane / 4));
#pragma unroll
  for (int j = 0; j < Sum::columns; ++j) right[j] = right_of(within<N>(j, lane / 4));
#pragma unroll
  for (int j = 0; j < Sum::columns; ++j) multiply_add(sum.value[j], left, right[j]);
}

template <class Terms, class T, int M, int N>
__device__ __forceinline__ void add(ProductSum<T, M, N>& sum, int lane, const Operands<T>& from,
                                    int first) {
  using Sum = ProductSum<T, M, N>;
#pragma unroll
  for (int term = first; term < first + 4; ++term) {
    if (Terms::count % 4 != 0 && term >= Terms::count) break;
    T right[Sum::columns][2];
#pragma unroll
    for (int j = 0; j < Sum::columns; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = within<N>(j, 2 * (lane % 4) + h);
        right[j][h] = from.right[column * Terms::column + term * Terms::right];
      }
    }
#pragma unroll
    for (int i = 0; i < Sum::rows; ++i) {
      const T left = from.left[within<M>(i, lane / 4) * Terms::row + term * Terms::left];
#pragma unroll
      for (int j = 0; j < Sum::columns; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          T& total = sum.value[j][h].value[i];
          total = multiply_add(left, right[j][h], total);
        }
      }
    }
  }
}

// Adds SHARE steps of four terms each of a row of terms, the share `number` of it. An object, since
// not every compiler takes a lambda of any number of coordinates for device code.
template <class Terms, int SHARE, class Sum, class Slice, class Places>
struct Share {
  Sum& sum;
  const Slice& slice;
  const Places& places;
  int lane;

  template <class... At>
  __device__ __forceinline__ void operator()(int number, int e, At... at) const {
    constexpr int kSteps = (Terms::count + 3) / 4;
    // Large sums leave registers for the operands of few steps at a time.
    constexpr int kAhead = Sum::rows * Sum::columns < 8 ? SHARE : 2;
    if (!slice.has(e)) return;
    const auto from = places(e, at...);
#pragma unroll kAhead
    for (int step = 0; step < SHARE; ++step) {
      const int first = 4 * (number * SHARE + step);
      if (kSteps % SHARE == 0 || first < Terms::count) add<Terms>(sum, lane, from, first);
    }
  }
};

// sum[m, n] += sum_k left[m, k] right[k, n] of all elements of `slice`. Warps take turns with the
// rows of terms, of which an element has one for each of K..., and share each where there are few.
// places(e, k...) says where a row of terms has row 0 and column 0.
template <class Terms, int THREADS, int... K, class T, int M, int N, int ELEMENTS, class Places>
__device__ __forceinline__ void accumulate(ProductSum<T, M, N>& sum, int thread,
                                           const Slice<ELEMENTS>& slice, const Places& places) {
  using Sum = ProductSum<T, M, N>;
  constexpr int kWarps = THREADS / 32;
  constexpr int kSteps = (Terms::count + 3) / 4, kRows = Lines<ELEMENTS, K...>::count;
  constexpr int kWanted = (kWarps + kRows - 1) / kRows;  // shares of a row
  constexpr int kShare = kWanted < kSteps ? (kSteps + kWanted - 1) / kWanted : 1;
  using Shares = Lines<(kSteps + kShare - 1) / kShare, ELEMENTS, K...>;
  constexpr int kTurns = (Shares::count + kWarps - 1) / kWarps;
  constexpr int kLoads = kShare * (Sum::rows + Sum::columns);
  constexpr int kTogether = kLoads < 16 ? 16 / kLoads : 1;
  const int warp = thread / 32;
  const Share<Terms, kShare, Sum, Slice<ELEMENTS>, Places> add_share = {sum, slice, places,
                                                                        thread % 32};
#pragma unroll kTogether
  for (int turn = 0; turn < kTurns; ++turn) {
    const int share = turn * kWarps + warp;
    if (Shares::count % kWarps == 0 || share < Shares::count) Shares::visit(share, add_share);
  }
}

// Adds up what the warps have, one after the other, and stores it, row by row.
template <int THREADS, class T, int M, int N>
__device__ __forceinline__ void store(T* to, const ProductSum<T, M, N>& sum, T* shared,
                                      int thread) {
  using Sum = ProductSum<T, M, N>;
  const int lane = thread % 32;
#pragma unroll 1
  for (int warp = 0; warp < THREADS / 32; ++warp) {
    if (thread / 32 == warp) {
#pragma unroll
      for (int i = 0; i < Sum::rows; ++i) {
#pragma unroll
        for (int j = 0; j < Sum::columns; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = 8 * i + lane / 4, column = 8 * j + 2 * (lane % 4) + h;
            if (row < M && column < N) {
              T& total = shared[row * N + column];
              const T own = sum.value[j][h].value[i];
              total = warp == 0 ? own : total + own;
            }
          }
        }
      }
    }
    sync<THREADS>();
  }
  for (int at = thread; at < M * N; at += THREADS) to[at] = shared[at];
  sync<THREADS>();
}

}  // namespace jaxmagma
