// A tile times a tile, each lane its own two.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "value.h"

namespace jaxmagma::JAXMAGMA_ISA {

template <typename T, bool kComplex>
struct TileProduct {
  using V = Value<T, kComplex>;
  static constexpr int kSide = (kManyRegisters ? 4 : 3) - kComplex;

  // R x C values of the output for every pair: each lane multiplies its own two tiles.
  template <int R, int C>
  static void RegisterBlock(const Step& s, const T* left, const T* right, T* out,
                            const int32_t* left_row, const int32_t* right_column,
                            const int32_t* out_row, const int32_t* out_column, int64_t plane) {
    for (int64_t pair = 0; pair < s.pairs; ++pair) {
      const T* a[R];
      const T* b[C];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) a[r] = left + s.left_pair[pair] + left_row[r];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) b[c] = right + s.right_pair[pair] + right_column[c];
      V sum[R][C];
      {
        V y[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) y[c] = V::At(b[c], plane);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V x = V::At(a[r], plane);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sum[r][c] = V::Product(x, y[c]);
        }
      }
      for (int64_t k = 1; k < s.inner; ++k) {
        V y[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) y[c] = V::At(b[c] + s.right_inner[k], plane);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V x = V::At(a[r] + s.left_inner[k], plane);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) sum[r][c].AddProduct(x, y[c]);
        }
      }
      T* to = out + s.out_pair[pair];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
          T* p = to + out_row[r] + out_column[c];
          if (s.accumulate) sum[r][c].Add(V::At(p, plane));
          sum[r][c].To(p, plane);
        }
      }
    }
  }

  // Calls `between(work)` after each share of the step's work.
  template <typename Between>
  static void Run(const Step& s, T* scratch, int64_t plane, const Between& between) {
    const int64_t value_work = s.work / (int64_t{s.rows} * s.columns);
    EvenParts<kSide>(s.rows, [&](int64_t row, int64_t rows) {
      EvenParts<kSide>(s.columns, [&](int64_t column, int64_t columns) {
        WithConstant<kSide>(rows, [&](auto r) {
          WithConstant<kSide>(columns, [&](auto c) {
            RegisterBlock<r, c>(s, scratch + s.left, scratch + s.right, scratch + s.out,
                                s.left_row + row, s.right_column + column, s.out_row + row,
                                s.out_column + column, plane);
          });
        });
        between(value_work * rows * columns);
      });
    });
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
