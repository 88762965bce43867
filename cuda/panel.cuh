// Panels: elements as rows of the matrices that tensor cores multiply.
//
// A quad has W elements, whole: value i of a field is in lane i % 4, number i / 4 there, as that of
// a fibre is (see quad.cuh). A table that is applied to all elements is in shared memory, where a
// warp reads it for all of its 8 W elements, and what it makes is where the next product expects
// it: no value of an element moves between lanes. Fields that are whole stay in registers. Those
// along the tiled axis come in tiles of eight positions, of which a lane has up to two, in two
// slots.
#pragma once

#include "map.cuh"
#include "quad.cuh"
#include "tf32.cuh"

namespace jaxmagma {

// ---- Tables ----------------------------------------------------------------------------------

// Where row i and column j of a square of 8 x 8 values are in it. Sixteen lanes read at a time:
// four rows and four columns, of either all in a half or two in each half. That must be sixteen
// different values of the lowest four bits, which are a pair of banks each.
__device__ constexpr int in_square(int i, int j) {
  const int different = i ^ j;
  return (j & 1) | (i & 1) << 1 | (different & 2) << 1 | (different & 4) << 1 | (j & 2) << 3 |
         (j & 4) << 3;
}

// The squares that a table of so many columns has side by side.
__device__ constexpr int squares(int columns) {
  return (columns + 7) / 8;
}

// Repeats SIZE values in shared memory.
template <int THREADS, int SIZE, class T>
__device__ __forceinline__ void repeat(int thread, T* to, const T* from) {
  for (int n = thread; n < SIZE; n += THREADS) to[n] = from[n];
}

// A square, with its values in the places above. Tensor cores take those of float32 in two parts.
template <class T>
struct Square;
template <>
struct Square<double> {
  double value[64];
};
template <>
struct Square<float> {
  float high[64], low[64];
};
__device__ __forceinline__ void put(Square<double>& square, int at, double x) {
  square.value[at] = x;
}
__device__ __forceinline__ void put(Square<float>& square, int at, float x) {
  square.high[at] = high_part(x);
  square.low[at] = low_part_of_table(x);
}

// Puts from[i * row + j * column] into squares, and zero beyond the end.
template <int THREADS, int ROWS, int COLUMNS, class T>
__device__ __forceinline__ void arrange(int thread, Square<T>* to, const T* from, int row,
                                        int column) {
  constexpr int kAcross = squares(COLUMNS);
  for (int n = thread; n < squares(ROWS) * kAcross * 64; n += THREADS) {
    const int i = n / (8 * kAcross), j = n % (8 * kAcross);
    const bool inside = i < ROWS && j < COLUMNS;
    put(to[i / 8 * kAcross + j / 8], in_square(i % 8, j % 8),
        inside ? from[i * row + j * column] : T{});
  }
}

// A lane, and where it reads in a square: a table by its rows, or as the transposed one. Of a
// product's eight rows the order is such that results are where operands are expected; of four
// columns at a time, those of the first half of a square or of the second one.
template <int W>
struct PanelLane : Quad<W> {
  int by_rows[2], by_columns[2];
};

template <int W, int LANES>
__device__ __forceinline__ PanelLane<W> panel_lane(int thread) {
  PanelLane<W> lane;
  lane.lane = thread % LANES;
  const int own = thread % 32 / 4, row = own % 2 * 4 + own / 2;
  unrolled<W>([&](int w) { lane.has[w] = true; });
  unrolled<2>([&](int half) {
    lane.by_rows[half] = in_square(row, thread % 4 + 4 * half);
    lane.by_columns[half] = in_square(thread % 4 + 4 * half, row);
  });
  return lane;
}

// The elements of a lane's rows, of those of a warp.
template <int W, int LANES>
__device__ __forceinline__ Pack<int, W> panel_rows(int thread) {
  Pack<int, W> e;
  unrolled<W>([&](int w) { e.value[w] = thread % 32 / LANES + 32 / LANES * w; });
  return e;
}

// ---- Products --------------------------------------------------------------------------------

// What a lane has of eight rows of a product, or of eight columns.
template <class T, int W>
struct Tile {
  Pack<T, W> value[2] = {};
  __device__ __forceinline__ Pack<T, W>& operator[](int slot) { return value[slot]; }
  __device__ __forceinline__ const Pack<T, W>& operator[](int slot) const { return value[slot]; }
};

// What tensor cores take of W times eight fibres: of all of a tile's columns, or with one slot, of
// the first four.
template <int SLOTS, class T, int W>
struct Factor {
  const Pack<T, W> (&slot)[2];
};
template <int SLOTS, int W>
struct Factor<SLOTS, float, W> : PartsOfFibres<SLOTS, W> {
  using PartsOfFibres<SLOTS, W>::PartsOfFibres;
};

// c += a b, by what a lane has of a square.
template <int SLOTS, int W>
__device__ __forceinline__ void multiply_add(Pack<double, W> (&c)[2],
                                             const Factor<SLOTS, double, W>& a,
                                             const Square<double>& b, const int (&place)[2]) {
  unrolled<SLOTS>([&](int slot) { multiply_add(c, a.slot[slot], b.value[place[slot]]); });
}
template <int SLOTS, int W>
__device__ __forceinline__ void multiply_add(Pack<float, W> (&c)[2],
                                             const Factor<SLOTS, float, W>& a,
                                             const Square<float>& b, const int (&place)[2]) {
  PartsOfTable<SLOTS> parts;
  unrolled<SLOTS>([&](int slot) {
    parts.high[slot] = b.high[place[slot]];
    parts.low[slot] = b.low[place[slot]];
  });
  multiply_add(c, a, parts);
}

// The same for tiles of several fields, of W elements each, in pairs of one or of two fields, and
// for several squares: c[m][f] += a[f] b[m].
template <int SLOTS, class T, int W, int F, int M>
__device__ __forceinline__ void multiply_add(Tile<T, W>* const (&c)[M][F], const Tile<T, W> (&a)[F],
                                             const Square<T>* const (&b)[M],
                                             const int (&place)[2]) {
  if constexpr (W % 2 == 0) {
    unrolled<F>([&](int f) {
      const Factor<SLOTS, T, W> factor{a[f].value};
      unrolled<M>([&](int m) { multiply_add(c[m][f]->value, factor, *b[m], place); });
    });
  } else {
    Pack<T, F * W> joined[2];
    unrolled<F * W>([&](int n) {
      unrolled<2>([&](int slot) { joined[slot].value[n] = a[n / W][slot].value[n % W]; });
    });
    const Factor<SLOTS, T, F * W> factor{joined};
    unrolled<M>([&](int m) {
      Pack<T, F * W> sum[2];
      unrolled<F * W>([&](int n) {
        unrolled<2>([&](int slot) { sum[slot].value[n] = (*c[m][n / W])[slot].value[n % W]; });
      });
      multiply_add(sum, factor, *b[m], place);
      unrolled<F * W>([&](int n) {
        unrolled<2>([&](int slot) { (*c[m][n / W])[slot].value[n % W] = sum[slot].value[n]; });
      });
    });
  }
}

// A field of N positions, whole: T for each of those that a lane has.
template <class T, int N>
struct Whole {
  static constexpr int slots = (N + 3) / 4;
  T value[slots];
  __device__ __forceinline__ T& operator[](int slot) { return value[slot]; }
  __device__ __forceinline__ const T& operator[](int slot) const { return value[slot]; }
};

// The same while tables add to it, tile by tile.
template <class T, int W, int N>
struct Accumulator {
  Tile<T, W> tile[squares(N)];
  __device__ __forceinline__ Whole<Pack<T, W>, N> whole() const {
    Whole<Pack<T, W>, N> y;
    unrolled<y.slots>([&](int slot) { y[slot] = tile[slot / 2][slot % 2]; });
    return y;
  }
};

// A value of each of W elements; what is no pack is the same for all.
template <class T, int W, class X>
__device__ __forceinline__ Pack<T, W> spread(const X& x) {
  Pack<T, W> y;
  unrolled<W>([&](int w) { y.value[w] = of_fibre(x, w); });
  return y;
}

// Zero in place of what is beyond the last of COUNT positions: that meets zeros of the table, and
// must not be NaN.
template <int COUNT, class T, int W, class X>
__device__ __forceinline__ Pack<T, W> padded(const Quad<W>& quad, int slot, const X& x) {
  return inside<COUNT>(quad, slot) ? spread<T, W>(x) : Pack<T, W>{};
}

// Eight of the COUNT positions of a field, from slot `first` on.
template <int COUNT, class T, int W, class X>
__device__ __forceinline__ Tile<T, W> tile(const Quad<W>& quad, const X& x, int first = 0) {
  Tile<T, W> y;
  unrolled<2>([&](int slot) {
    if (first + slot < (COUNT + 3) / 4) {
      y[slot] = padded<COUNT, T>(quad, first + slot, x[first + slot]);
    }
  });
  return y;
}

// y[m] += eight rows of table m times x, for several fields x of K positions. `at` are the first
// squares of these rows; the next ones are STEP further.
template <int K, int STEP, class T, int W, int M, class... X>
__device__ __forceinline__ void multiply(const Quad<W>& quad, const Square<T>* const (&at)[M],
                                         const int (&place)[2],
                                         Tile<T, W>* const (&y)[M][sizeof...(X)], const X&... x) {
  constexpr int F = sizeof...(X), kLast = squares(K) - 1;
  const Square<T>* square[M];
  unrolled<kLast>([&](int n) {
    unrolled<M>([&](int m) { square[m] = at[m] + n * STEP; });
    multiply_add<2, T, W, F, M>(y, {tile<K, T>(quad, x, 2 * n)...}, square, place);
  });
  constexpr int kSlots = K - 8 * kLast > 4 ? 2 : 1;
  unrolled<M>([&](int m) { square[m] = at[m] + kLast * STEP; });
  multiply_add<kSlots, T, W, F, M>(y, {tile<K, T>(quad, x, 2 * kLast)...}, square, place);
}

// y += a table of N rows times several fields at COUNT positions, a column of squares. `at` is the
// first one; that of the next rows is STEP further.
template <int N, int COUNT, int STEP, class T, int W, int F>
__device__ __forceinline__ void accumulate(const Square<T>* at, const int (&place)[2],
                                           Accumulator<T, W, N>* const (&y)[F],
                                           const Tile<T, W> (&x)[F]) {
  constexpr int M = squares(N);
  Tile<T, W>* c[M][F];
  const Square<T>* square[M];
  unrolled<M>([&](int m) {
    square[m] = at + m * STEP;
    unrolled<F>([&](int f) { c[m][f] = &y[f]->tile[m]; });
  });
  multiply_add<COUNT <= 4 ? 1 : 2, T, W, F, M>(c, x, square, place);
}

// The same of a whole field of K positions. The next columns of the table are ALONG further.
template <int N, int K, int STEP, int ALONG, class T, int W, class X>
__device__ __forceinline__ void accumulate_whole(const Quad<W>& quad, const Square<T>* at,
                                                 const int (&place)[2], Accumulator<T, W, N>& y,
                                                 const X& x) {
  constexpr int kLast = squares(K) - 1;
  unrolled<kLast>([&](int n) {
    accumulate<N, 8, STEP, T, W, 1>(at + n * ALONG, place, {&y}, {tile<K, T>(quad, x, 2 * n)});
  });
  accumulate<N, K - 8 * kLast, STEP, T, W, 1>(at + kLast * ALONG, place, {&y},
                                              {tile<K, T>(quad, x, 2 * kLast)});
}

// ---- Fields ----------------------------------------------------------------------------------

// Calls body(slot, i) for those of COUNT positions from `first` on that a lane has.
template <int COUNT, int W, class Body>
__device__ __forceinline__ void positions(const Quad<W>& quad, int first, const Body& body) {
  unrolled<(COUNT + 3) / 4>([&](int slot) { body(slot, first + position<COUNT>(quad, slot)); });
}

// A value that stays in shared memory: no compiler keeps it in a register instead.
template <class T>
__device__ __forceinline__ T reread(const T* from) {
  return *static_cast<const volatile T*>(from);
}

// A field of N positions that does.
template <class T, int W, int N, int STRIDE>
struct Reread {
  const Quad<W>& quad;
  const Place<T, W> from;
  __device__ __forceinline__ Pack<T, W> operator[](int slot) const {
    const auto at = from + position<N>(quad, slot) * STRIDE;
    Pack<T, W> x;
    unrolled<W>([&](int w) { x.value[w] = reread(at.at[w]); });
    return x;
  }
};

// A whole field that all elements share.
template <int N, int STRIDE, int W, class T>
__device__ __forceinline__ Whole<T, N> load_shared(const Quad<W>& quad, const T* from) {
  Whole<T, N> x;
  positions<N>(quad, 0, [&](int slot, int i) { x[slot] = from[i * STRIDE]; });
  return x;
}

template <class T, int W, int N, class Q>
__device__ __forceinline__ const Pack<T, W>& of_slot(const QuadFibre<T, W, N, Q>& x, int slot) {
  return x[slot];
}
template <class T, int N>
__device__ __forceinline__ const T& of_slot(const Whole<T, N>& x, int slot) {
  return x[slot];
}
template <class T, int W>
__device__ __forceinline__ const Pack<T, W>& of_slot(const Pack<T, W>& x, int) {
  return x;
}
template <class T>
__device__ __forceinline__ T of_slot(T x, int) {
  return x;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> sum(const Tile<T, W>& x) {
  return x[0] + x[1];
}

// sum_i x[i], in all lanes of a quad
template <int N, class T, int W, class X>
__device__ __forceinline__ Pack<T, W> sum_whole(const Quad<W>& quad, const X& x) {
  Pack<T, W> sum{};
  unrolled<(N + 3) / 4>([&](int slot) { sum += padded<N, T>(quad, slot, x[slot]); });
  return of_quad(sum);
}

template <class T, int W, class X>
__device__ __forceinline__ void store_one(const Quad<W>& quad, const Place<T, W>& to, const X& x) {
  put<1>(quad, 0, to, spread<T, W>(x));
}

template <int N, int STRIDE, class T, int W, class X>
__device__ __forceinline__ void store_whole(const Quad<W>& quad, const Place<T, W>& to,
                                            const X& x) {
  unrolled<(N + 3) / 4>([&](int slot) {
    put<N>(quad, slot, to + position<N>(quad, slot) * STRIDE, spread<T, W>(of_slot(x, slot)));
  });
}

}  // namespace jaxmagma
