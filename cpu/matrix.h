// A matrix that all elements share times a tile of each: the heart of a sum factorisation.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "value.h"

namespace jaxmagma::JAXMAGMA_ISA {

// Each factor of the matrix is broadcast once for kColumns vectors, each vector of the tile loaded
// once for up to kRows rows of the matrix.
template <typename T, bool kComplex>
struct MatrixProduct {
  using V = Value<T, kComplex>;
  static constexpr int kPlanes = kComplex ? 2 : 1;
  static constexpr int kRows =
      kComplex ? (kBroadcasts ? 6 : 4) : (kManyRegisters && !kBroadcasts ? 5 : 6);
  static constexpr int kColumns = (kManyRegisters ? 4 : 2) / kPlanes;

  // R rows of the output at all of `columns` columns, C columns at a time.
  template <int R, int C, bool kAccumulate>
  static JAXMAGMA_INLINE void RegisterBlock(const Step& s, const T* panel, const T* right, T* out,
                                            const int32_t* out_row, int64_t first, int64_t last,
                                            int64_t plane) {
    const int32_t* inner = s.right_inner;
    const int64_t k_end = s.inner;
    for (int64_t column = first; column < last; column += C) {
      const T* in[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) in[c] = right + s.right_column[column + c];
      V sum[R][C];
      const T* left = panel;
      {
        V x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = V::At(in[c], plane);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const V a = V::Same(left + r * kPlanes);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c] = V::Product(a, x[c]);
        }
      }
      for (int64_t k = 1; k < k_end; ++k) {
        left += R * kPlanes;
        const int64_t offset = inner[k];
        V x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] = V::At(in[c] + offset, plane);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const V a = V::Same(left + r * kPlanes);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sum[r][c].AddProduct(a, x[c]);
        }
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        T* to = out + s.out_column[column + c];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          T* p = to + out_row[r];
          if constexpr (kAccumulate) sum[r][c].Add(V::At(p, plane));
          sum[r][c].To(p, plane);
        }
      }
    }
  }

  template <int R, bool kAccumulate, int C = kColumns>
  static JAXMAGMA_INLINE void Rest(const Step& s, const T* panel, const T* right, T* out,
                                   const int32_t* out_row, int64_t first, int64_t last,
                                   int64_t plane) {
    const int64_t whole = first + (last - first) / C * C;
    if (whole > first) {
      RegisterBlock<R, C, kAccumulate>(s, panel, right, out, out_row, first, whole, plane);
    }
    if constexpr (C > 1) {
      if (whole < last) {
        Rest<R, kAccumulate, C / 2>(s, panel, right, out, out_row, whole, last, plane);
      }
    }
  }

  template <int R>
  static void RowBlock(const Step& s, const T* panel, const T* right, T* out,
                       const int32_t* out_row, int64_t first, int64_t last, int64_t plane) {
    if (s.accumulate) {
      Rest<R, true>(s, panel, right, out, out_row, first, last, plane);
    } else {
      Rest<R, false>(s, panel, right, out, out_row, first, last, plane);
    }
  }

  // Calls `between(work)` after each share of the step's work.
  template <typename Between>
  static void Run(const Step& s, const T* panels, T* scratch, int64_t plane,
                  const Between& between) {
    const int64_t value_work = s.work / (int64_t{s.pairs} * s.rows * s.columns);
    for (int64_t pair = 0; pair < s.pairs; ++pair) {
      const T* panel = panels + s.left + s.left_pair[pair];
      const T* right = scratch + s.right + s.right_pair[pair];
      T* out = scratch + s.out + s.out_pair[pair];
      for (int64_t first = 0; first < s.columns; first += s.chunk) {
        const int64_t last = first + s.chunk < s.columns ? first + s.chunk : s.columns;
        const T* left = panel;
        const int32_t* out_row = s.out_row;
        for (int64_t block = 0; block < s.blocks; ++block) {
          const int64_t rows = s.block_rows - (block >= s.full_blocks);
          WithConstant<kRows>(rows, [&](auto constant) {
            RowBlock<constant>(s, left, right, out, out_row, first, last, plane);
          });
          between(value_work * rows * (last - first));
          left += rows * s.inner * kPlanes;
          out_row += rows;
        }
      }
    }
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
