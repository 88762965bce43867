// The steps of a schedule on one block of elements, compiled once per instruction set.
//
// Nothing here knows how many elements there are or which thread it runs on.

#include "kernels.h"

#include "half.h"
#include "lanes.h"

namespace jaxmagma::JAXMAGMA_ISA {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr bool kManyRegisters = kRegisters >= 32;

// Register blocks of the products. A complex value is two vectors.
constexpr int kMatrixRows = 6;
constexpr int kMatrixRowsComplex = kManyRegisters ? 6 : 4;
constexpr int kMatrixColumns = kManyRegisters ? 4 : 2;
constexpr int kMatrixColumnsComplex = kManyRegisters ? 2 : 1;
constexpr int kGemmSide = kManyRegisters ? 4 : 3;
constexpr int kGemmSideComplex = kManyRegisters ? 3 : 2;

// A value in lanes: real, or real and imaginary parts apart.
template <typename T, bool kComplex>
struct Value {
  Lanes<T> re;

  static JAXMAGMA_INLINE Value At(const T* p, int64_t) { return {LoadLanes(p)}; }
  static JAXMAGMA_INLINE Value Same(const T* p) { return {Splat(*p)}; }
  JAXMAGMA_INLINE void To(T* p, int64_t) const { StoreLanes(p, re); }
  JAXMAGMA_INLINE void Add(Value x) { re += x.re; }
  JAXMAGMA_INLINE void AddProduct(Value a, Value b) { re += a.re * b.re; }
  static JAXMAGMA_INLINE Value Product(Value a, Value b) { return {a.re * b.re}; }
};

template <typename T>
struct Value<T, true> {
  Lanes<T> re, im;

  // The imaginary parts stand one plane of lanes behind the real ones.
  static JAXMAGMA_INLINE Value At(const T* p, int64_t plane) {
    return {LoadLanes(p), LoadLanes(p + plane)};
  }
  static JAXMAGMA_INLINE Value Same(const T* p) { return {Splat(p[0]), Splat(p[1])}; }
  JAXMAGMA_INLINE void To(T* p, int64_t plane) const {
    StoreLanes(p, re);
    StoreLanes(p + plane, im);
  }
  JAXMAGMA_INLINE void Add(Value x) {
    re += x.re;
    im += x.im;
  }
  JAXMAGMA_INLINE void AddProduct(Value a, Value b) {
    re += a.re * b.re;
    im += a.re * b.im;
    re -= a.im * b.im;
    im += a.im * b.re;
  }
  static JAXMAGMA_INLINE Value Product(Value a, Value b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

JAXMAGMA_INLINE int64_t At(const int32_t* table, int64_t i) {
  return table ? table[i] : 0;
}

// `T` is the real type of the arithmetic, `Stored` that of the arrays.
template <typename T, bool kComplex, typename Stored = T>
struct Machine {
  static constexpr bool kConverts = !std::is_same_v<T, Stored>;
  using V = Value<T, kComplex>;
  static constexpr int W = kLanes<T>;
  static constexpr int kPlanes = kComplex ? 2 : 1;
  static constexpr int kColumns = kComplex ? kMatrixColumnsComplex : kMatrixColumns;
  static constexpr int kRows = kComplex ? kMatrixRowsComplex : kMatrixRows;
  static constexpr int kSide = kComplex ? kGemmSideComplex : kGemmSide;

  // ---- memory <-> lanes ----------------------------------------------------------------------

  // Calls `body(C, column)` for pieces of C columns that make up `count`, C a constant.
  template <int C, typename Body>
  static JAXMAGMA_INLINE void Pieces(int64_t column, int64_t count, Body body) {
    for (; count - column >= C; column += C) body(std::integral_constant<int, C>(), column);
    if constexpr (C > kPlanes) Pieces<C / 2>(column, count, body);
  }

  // Half a vector of columns at a time: what is loaded in halves need not be exchanged.
  static constexpr int kPiece = W / 2 > kPlanes ? W / 2 : kPlanes;

  // The rows of one vector of elements.
  template <typename P>
  static JAXMAGMA_INLINE void RowPointers(const Rows& rows, int64_t lane, P** pointers) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      pointers[j] = reinterpret_cast<P*>(rows.base + rows.offsets[lane + j]);
    }
  }

  template <bool kMultiply>
  static void LoadRows(const Step& s, Rows rows, T* staged, T* out, int64_t plane) {
    for (int64_t lane = 0; lane < plane; lane += W, out += W) {
      const T* row[W];
      if constexpr (kConverts) {
        const Stored* stored[W];
        RowPointers(rows, lane, stored);
        for (int j = 0; j < W; ++j) {
          T* to = staged + j * s.count;
          WidenAll<Stored>(stored[j], to, s.count);
          row[j] = to;
        }
      } else {
        RowPointers(rows, lane, row);
      }
      Pieces<kPiece>(0, s.count, [&](auto piece, int64_t column) {
        constexpr int C = piece;
        Lanes<T> x[C];
        LoadColumns<T, C>(row, column, x);
        T* to = out + column * plane;
        if constexpr (kMultiply) {
#pragma GCC unroll 16
          for (int c = 0; c < C; c += kPlanes) {
            V loaded;
            loaded.re = x[c];
            if constexpr (kComplex) loaded.im = x[c + 1];
            V::Product(V::At(to + c * plane, plane), loaded).To(to + c * plane, plane);
          }
        } else {
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) StoreLanes(to + c * plane, x[c]);
        }
      });
    }
  }

  // Rows of sums over elements stay in the type of the arithmetic.
  template <bool kNarrow>
  static void StoreRows(const Step& s, const T* from, Rows rows, T* staged, int64_t plane) {
    for (int64_t lane = 0; lane < plane; lane += W, from += W) {
      T* row[W];
      if constexpr (kNarrow) {
        for (int j = 0; j < W; ++j) row[j] = staged + j * s.count;
      } else {
        RowPointers(rows, lane, row);
      }
      Pieces<kPiece>(0, s.count, [&](auto piece, int64_t column) {
        constexpr int C = piece;
        Lanes<T> x[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) x[c] = LoadLanes(from + (column + c) * plane);
        StoreColumns<T, C>(row, column, x);
      });
      if constexpr (kNarrow) {
        Stored* stored[W];
        RowPointers(rows, lane, stored);
        for (int j = 0; j < W; ++j) NarrowAll<Stored>(row[j], stored[j], s.count);
      }
    }
  }

  static void StoreOutput(const Step& s, const T* from, const Block& block, int64_t plane) {
    const Rows& rows = block.outputs[s.array];
    T* sum = static_cast<T*>(block.sums[s.array]);
    T* staged = static_cast<T*>(block.staged);
    if (rows.offsets && (sum || !kConverts)) {
      StoreRows<false>(s, from, rows, staged, plane);
    } else if (rows.offsets) {
      StoreRows<kConverts>(s, from, rows, staged, plane);
    } else if (sum) {
      AddTo(from, s.count * (plane / W), sum);
    }
  }

  static void AddTo(const T* from, int64_t vectors, T* sum) {
    for (int64_t i = 0; i < vectors * W; i += W) {
      StoreLanes(sum + i, LoadLanes(sum + i) + LoadLanes(from + i));
    }
  }

  static void Spread(const Step& s, const T* from, T* out, int64_t plane) {
    for (int64_t i = 0; i < s.count * kPlanes; ++i, out += plane) {
      for (int64_t lane = 0; lane < plane; lane += W) {
        StoreLanes(out + lane, Splat(from[i]));
      }
    }
  }

  // ---- shared matrix times tile --------------------------------------------------------------

  // R rows of the output at all of `columns` columns, C columns at a time.
  template <int R, int C, bool kAccumulate>
  static JAXMAGMA_INLINE void MatrixBlock(const Step& s, const T* panel, const T* right, T* out,
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
  static JAXMAGMA_INLINE void MatrixRest(const Step& s, const T* panel, const T* right, T* out,
                                         const int32_t* out_row, int64_t first, int64_t last,
                                         int64_t plane) {
    const int64_t whole = first + (last - first) / C * C;
    if (whole > first) {
      MatrixBlock<R, C, kAccumulate>(s, panel, right, out, out_row, first, whole, plane);
    }
    if constexpr (C > 1) {
      if (whole < last) {
        MatrixRest<R, kAccumulate, C / 2>(s, panel, right, out, out_row, whole, last, plane);
      }
    }
  }

  template <int R>
  static void MatrixRows(const Step& s, const T* panel, const T* right, T* out,
                         const int32_t* out_row, int64_t first, int64_t last, int64_t plane) {
    if (s.accumulate) {
      MatrixRest<R, true>(s, panel, right, out, out_row, first, last, plane);
    } else {
      MatrixRest<R, false>(s, panel, right, out, out_row, first, last, plane);
    }
  }

  using MatrixFunction = void (*)(const Step&, const T*, const T*, T*, const int32_t*, int64_t,
                                  int64_t, int64_t);
  static constexpr MatrixFunction kMatrixFunctions[6] = {
      MatrixRows<1>,
      MatrixRows<2>,
      MatrixRows<3>,
      MatrixRows<4>,
      MatrixRows < kRows < 5 ? 1 : 5 >,
      MatrixRows < kRows < 6 ? 1 : 6 >,
  };

  static void Matrix(const Step& s, const T* panels, T* scratch, int64_t plane) {
    for (int64_t pair = 0; pair < s.pairs; ++pair) {
      const T* panel = panels + s.left + At(s.left_pair, pair);
      const T* right = scratch + s.right + At(s.right_pair, pair);
      T* out = scratch + s.out + At(s.out_pair, pair);
      for (int64_t first = 0; first < s.columns; first += s.chunk) {
        const int64_t last = first + s.chunk < s.columns ? first + s.chunk : s.columns;
        const T* left = panel;
        const int32_t* out_row = s.out_row;
        for (int64_t block = 0; block < s.blocks; ++block) {
          const int64_t rows = s.block_rows - (block >= s.full_blocks);
          kMatrixFunctions[rows - 1](s, left, right, out, out_row, first, last, plane);
          left += rows * s.inner * kPlanes;
          out_row += rows;
        }
      }
    }
  }

  // ---- tile times tile -------------------------------------------------------------------------

  // R x C values of the output for every pair: each lane multiplies its own two tiles.
  template <int R, int C>
  static void GemmBlock(const Step& s, const T* left, const T* right, T* out,
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

  using GemmFunction = void (*)(const Step&, const T*, const T*, T*, const int32_t*, const int32_t*,
                                const int32_t*, const int32_t*, int64_t);
  template <int R>
  static constexpr GemmFunction kGemmRow[4] = {GemmBlock<R, 1>, GemmBlock<R, 2>,
                                               GemmBlock < R,   kSide < 3 ? 1 : 3 >,
                                               GemmBlock < R,   kSide < 4 ? 1 : 4 > };
  static constexpr const GemmFunction* kGemmFunctions[4] = {
      kGemmRow<1>, kGemmRow<2>, kGemmRow < kSide < 3 ? 1 : 3 >, kGemmRow < kSide < 4 ? 1 : 4 > };

  static void Gemm(const Step& s, T* scratch, int64_t plane) {
    // As even as possible: five rows are three and two, not four and one.
    const int64_t row_blocks = (s.rows + kSide - 1) / kSide;
    const int64_t column_blocks = (s.columns + kSide - 1) / kSide;
    for (int64_t i = 0, row = 0; i < row_blocks; ++i) {
      const int64_t rows = (s.rows - row + row_blocks - i - 1) / (row_blocks - i);
      for (int64_t j = 0, column = 0; j < column_blocks; ++j) {
        const int64_t columns = (s.columns - column + column_blocks - j - 1) / (column_blocks - j);
        kGemmFunctions[rows - 1][columns - 1](
            s, scratch + s.left, scratch + s.right, scratch + s.out, s.left_row + row,
            s.right_column + column, s.out_row + row, s.out_column + column, plane);
        column += columns;
      }
      row += rows;
    }
  }

  // ---- memory times memory -----------------------------------------------------------------

  // One product per element, with the columns of its own matrices in the lanes: nothing to
  // transpose, but vectors must not be wider than a row.

  // R rows and C vectors of N columns; the last of all vectors ends with the row.
  template <int R, int C, int N>
  static void DirectBlock(const Step& s, const T* left, const T* right, int64_t right_stride,
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
      for (int c = 0; c < C; ++c) StoreN<N>(out + at[c], sum[r][c]);
    }
  }

  // Accumulators of R x C vectors, with a vector for each column and one for a factor, fill the
  // registers.
  static constexpr int DirectRows(int c) {
    return kManyRegisters ? (c < 4 ? 8 : 6) : (c == 1 ? 8 : c == 2 ? 6 : c == 3 ? 4 : 2);
  }

  template <int C, int N, int R = DirectRows(C)>
  static JAXMAGMA_INLINE void DirectRow(int64_t rows, const Step& s, const T* left, const T* right,
                                        int64_t right_stride, T* out, int64_t column) {
    if constexpr (R > 1) {
      if (rows < R) return DirectRow<C, N, R - 1>(rows, s, left, right, right_stride, out, column);
    }
    DirectBlock<R, C, N>(s, left, right, right_stride, out, column);
  }

  template <int N, int C = 4>
  static JAXMAGMA_INLINE void DirectColumns(int64_t vectors, const Step& s, const T* left,
                                            const T* right, int64_t right_stride, T* out,
                                            int64_t column) {
    if constexpr (C > 1) {
      if (vectors < C) {
        return DirectColumns<N, C - 1>(vectors, s, left, right, right_stride, out, column);
      }
    }
    constexpr int kMost = DirectRows(C);
    const int64_t blocks = (s.rows + kMost - 1) / kMost;
    int64_t row = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t rows = (s.rows - row + blocks - i - 1) / (blocks - i);
      DirectRow<C, N>(rows, s, left + row * s.left_row_stride, right, right_stride,
                      out + row * s.out_row_stride, column);
      row += rows;
    }
  }

  template <int N>
  static void Direct(const Step& s, const T* left, const T* right, int64_t right_stride, T* out) {
    if constexpr (N > 2) {
      if (s.columns < N) return Direct<N / 2>(s, left, right, right_stride, out);
    }
    const int64_t vectors = (s.columns + N - 1) / N;
    const int64_t blocks = (vectors + 3) / 4;
    int64_t done = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t now = (vectors - done + blocks - i - 1) / (blocks - i);
      DirectColumns<N>(now, s, left, right, right_stride, out, done * N);
      done += now;
    }
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
      Pieces<kPiece>(0, s.inner, [&](auto piece, int64_t k) {
        constexpr int C = piece;
        Lanes<T> x[C];
        LoadColumns<T, C>(row, k, x);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) StoreN<W>(to + (k + c) * s.columns + column, x[c]);
      });
    }
  }

  static void DirectElements(const Step& s, const Block& block) {
    const T* shared = static_cast<const T*>(block.shared);
    const auto tile = [&](bool is_shared, int64_t operand, int64_t element) {
      if (is_shared) return shared + operand;
      const Rows& rows = block.inputs[operand];
      return reinterpret_cast<const T*>(rows.base + rows.offsets[element]);
    };
    const Rows& out = block.outputs[s.array];
    T* scratch = static_cast<T*>(block.scratch);
    for (int64_t element = 0; element < block.count; ++element) {
      const T* right = tile(s.right_shared, s.right, element);
      int64_t right_stride = s.right_inner_stride;
      if (s.right_column_stride != 1) {
        InOrder(s, right, scratch);
        right = scratch;
        right_stride = s.columns;
      }
      Direct<W>(s, tile(s.left_shared, s.left, element), right, right_stride,
                reinterpret_cast<T*>(out.base + out.offsets[element]));
    }
  }

  // ---- pointwise -------------------------------------------------------------------------------

  template <bool kShared>
  static void Times(const Step& s, const T* left, T* scratch, int64_t plane) {
    const T* right = scratch + s.right;
    T* out = scratch + s.out;
    for (int64_t pair = 0; pair < s.pairs; ++pair) {
      V a;
      if constexpr (kShared) {
        a = V::Same(left + s.left_pair[pair]);
      } else {
        a = V::At(left + s.left_pair[pair], plane);
      }
      V x = V::Product(a, V::At(right + s.right_pair[pair], plane));
      T* p = out + s.out_pair[pair];
      if (s.accumulate) x.Add(V::At(p, plane));
      x.To(p, plane);
    }
  }

  static void Sum(const Step& s, T* scratch) {
    for (int64_t column = 0; column < s.columns; ++column) {
      const T* in = scratch + s.left + s.right_column[column];
      Lanes<T> sum = LoadLanes(in);
      for (int64_t k = 1; k < s.inner; ++k) sum += LoadLanes(in + s.right_inner[k]);
      StoreLanes(scratch + s.out + s.out_column[column], sum);
    }
  }

  static void Add(const Step& s, T* scratch) {
    const T* left = scratch + s.left;
    const T* right = scratch + s.right;
    T* out = scratch + s.out;
    for (int64_t i = 0; i < s.count * W; i += W) {
      StoreLanes(out + i, LoadLanes(left + i) + LoadLanes(right + i));
    }
  }

  // ---- the next block ----------------------------------------------------------------------

  // Asks for what the next block reads a little at a time, between the steps of this one, so that
  // memory works while the arithmetic does. Hardware prefetchers do not see that far.
  struct Ahead {
    const Range* range;
    const Range* last;
    const char* p;
    int64_t share;  // lines

    JAXMAGMA_INLINE void Ask() {
      for (int64_t n = share; n > 0; --n) {
        if (p >= range->end) {
          if (range == last) return;
          p = (++range)->begin;
        }
        __builtin_prefetch(p, 0, 2);
        p += kCacheLine;
      }
    }
  };

  // ---- the interpreter -------------------------------------------------------------------------

  static void Run(const Step* steps, int64_t count, int64_t plane, const Block& block) {
    T* scratch = static_cast<T*>(block.scratch);
    const T* shared = static_cast<const T*>(block.shared);
    const T* panels = static_cast<const T*>(block.panels);
    T* staged = static_cast<T*>(block.staged);
    Ahead ahead{block.ahead, block.ahead + block.ahead_count - 1,
                block.ahead_count ? block.ahead->begin : nullptr,
                (block.ahead_lines + count - 1) / count};
    for (const Step* s = steps; s != steps + count; ++s) {
      ahead.Ask();
      switch (s->kind) {
        case Step::kLoad:
          LoadRows<false>(*s, block.inputs[s->array], staged, scratch + s->out, plane);
          break;
        case Step::kMultiply:
          LoadRows<true>(*s, block.inputs[s->array], staged, scratch + s->out, plane);
          break;
        case Step::kStore:
          StoreOutput(*s, scratch + s->left, block, plane);
          break;
        case Step::kSpread:
          Spread(*s, shared + s->left, scratch + s->out, plane);
          break;
        case Step::kMatrix:
          Matrix(*s, panels, scratch, plane);
          break;
        case Step::kScale:
          Times<true>(*s, shared + s->left, scratch, plane);
          break;
        case Step::kGemm:
          Gemm(*s, scratch, plane);
          break;
        case Step::kTimes:
          Times<false>(*s, scratch + s->left, scratch, plane);
          break;
        case Step::kSum:
          Sum(*s, scratch);
          break;
        case Step::kAdd:
          Add(*s, scratch);
          break;
        case Step::kDirect:
          if constexpr (!kComplex && !kConverts) DirectElements(*s, block);
          break;
      }
    }
  }
};

}  // namespace

#define JAXMAGMA_STRING(x) #x
#define JAXMAGMA_NAME(x) JAXMAGMA_STRING(x)

extern const Kernels kKernels = {
    JAXMAGMA_NAME(JAXMAGMA_ISA),
    {kLanes<float>, kLanes<double>},
    kMatrixRows,
    kMatrixRowsComplex,
    {Machine<float, false>::Run, Machine<double, false>::Run, Machine<float, true>::Run,
     Machine<double, true>::Run, Machine<float, false, Float16>::Run,
     Machine<float, false, BFloat16>::Run},
    {nullptr, nullptr, nullptr, nullptr, WidenAll<Float16>, WidenAll<BFloat16>},
    {nullptr, nullptr, nullptr, nullptr, NarrowAll<Float16>, NarrowAll<BFloat16>},
};

}  // namespace jaxmagma::JAXMAGMA_ISA
