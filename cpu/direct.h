// One matrix product per element, from memory to memory, with the columns of its own matrices in
// the lanes: nothing is transposed, but vectors must not be wider than a row.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "lanes.h"
#include "stream.h"
#include "value.h"

namespace jaxmagma::JAXMAGMA_ISA {

template <typename T>
struct DirectProduct {
  static constexpr int W = kLanes<T>;
  static constexpr int kColumns = 4;

  // Accumulators of R x C vectors, a vector for each column and one for a factor fill the
  // registers.
  static constexpr int MostRows(int c) {
    if (kManyRegisters && kBroadcasts) return c < 4 ? 8 : 6;
    if (kManyRegisters) return c < 3 ? 8 : c == 3 ? 6 : 5;
    return c == 1 ? 8 : c == 2 ? 6 : c == 3 ? 4 : 2;
  }

  // R rows and C vectors of N columns; the last of all vectors ends with the row.
  // Those that are whole lines of the cache may go past it.
  template <int R, int C, int N, bool kStream>
  static void RegisterBlock(const Step& s, const T* left, const T* right, int64_t right_stride,
                            T* out, int64_t column) {
    using Columns = Vector<T, N>;
    int64_t at[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      at[c] = column + c * N < s.columns - N ? column + c * N : s.columns - N;
    }
    Columns sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = Columns{};
    }
    for (int64_t k = 0; k < s.inner; ++k) {
      Columns y[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) y[c] = LoadN<N>(right + at[c]);
      const T* x = left;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r, x += s.left_row_stride) {
        const Columns a = *x - Columns{};
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[r][c] += a * y[c];
      }
      left += s.left_inner_stride;
      right += right_stride;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, out += s.out_row_stride) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        if constexpr (kStream) {
          StreamLanes(out + at[c], sum[r][c]);
        } else {
          StoreN<N>(out + at[c], sum[r][c]);
        }
      }
    }
  }

  template <int N, bool kStream = false>
  static void Product(const Step& s, const T* left, const T* right, int64_t right_stride, T* out) {
    if constexpr (N > 2 && !kStream) {
      if (s.columns < N) return Product<N / 2>(s, left, right, right_stride, out);
    }
    EvenParts<kColumns>((s.columns + N - 1) / N, [&](int64_t first, int64_t vectors) {
      WithConstant<kColumns>(vectors, [&](auto c) {
        EvenParts<MostRows(c)>(s.rows, [&](int64_t row, int64_t rows) {
          WithConstant<MostRows(c)>(rows, [&](auto r) {
            RegisterBlock<r, c, N, kStream>(s, left + row * s.left_row_stride, right, right_stride,
                                            out + row * s.out_row_stride, first * N);
          });
        });
      });
    });
  }

  // The right operand with its columns next to each other: to[k][column].
  static void InOrder(const Step& s, const T* right, T* to) {
    if (s.right_inner_stride != 1 || s.columns < W) {
      for (int64_t k = 0; k < s.inner; ++k) {
        for (int64_t column = 0; column < s.columns; ++column) {
          *to++ = right[k * s.right_inner_stride + column * s.right_column_stride];
        }
      }
      return;
    }
    for (int64_t first = 0; first < s.columns; first += W) {
      const int64_t column = first < s.columns - W ? first : s.columns - W;
      const T* row[W];
      for (int j = 0; j < W; ++j) row[j] = right + (column + j) * s.right_column_stride;
      ForPieces<kPiece<T>>(0, s.inner, [&](auto piece, int64_t k) {
        constexpr int C = piece;
        Lanes<T> x[C];
        LoadColumns<T, C>(row, k, x);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) StoreN<W>(to + (k + c) * s.columns + column, x[c]);
      });
    }
  }

  static void Run(const Step& s, const Block& block) {
    const T* shared = static_cast<const T*>(block.shared);
    const auto tile = [&](bool is_shared, int64_t operand, int64_t element) {
      if (is_shared) return shared + operand;
      const Rows& rows = block.inputs[operand];
      return reinterpret_cast<const T*>(rows.base + rows.offsets[element]);
    };
    const Rows& out = block.outputs[s.array];
    T* scratch = static_cast<T*>(block.scratch);
    constexpr int64_t kLine = kCacheLine / sizeof(T);
    const bool whole_lines = s.columns % kLine == 0 && s.out_row_stride % kLine == 0;
    for (int64_t element = 0; element < block.count; ++element) {
      const T* right = tile(s.right_shared, s.right, element);
      int64_t right_stride = s.right_inner_stride;
      if (s.right_column_stride != 1) {
        InOrder(s, right, scratch);
        right = scratch;
        right_stride = s.columns;
      }
      const T* left = tile(s.left_shared, s.left, element);
      T* to = reinterpret_cast<T*>(out.base + out.offsets[element]);
      if (block.stream && whole_lines && IsLine(to)) {
        Product<W, true>(s, left, right, right_stride, to);
      } else {
        Product<W>(s, left, right, right_stride, to);
      }
    }
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
