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
template <int THREADS, int SIZE, class To, class From>
__device__ __forceinline__ void repeat(int thread, To* to, const From* from) {
  for (int n = thread; n < SIZE; n += THREADS) to[n] = from[n];
}

// Puts from[i * row + j * column] into squares, and zero beyond the end.
template <int THREADS, int ROWS, int COLUMNS, class To, class From>
__device__ __forceinline__ void arrange(int thread, To* to, const From* from, int row, int column) {
  constexpr int kAcross = squares(COLUMNS);
  for (int n = thread; n < squares(ROWS) * kAcross * 64; n += THREADS) {
    const int i = n / (8 * kAcross), j = n % (8 * kAcross);
    const bool inside = i < ROWS && j < COLUMNS;
    to[(i / 8 * kAcross + j / 8) * 64 + in_square(i % 8, j % 8)] =
        inside ? from[i * row + j * column] : From{};
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

// c += a b for several fields, of W elements each, by one value of a table.
template <int W, int F>
__device__ __forceinline__ void multiply_add(Pack<double, W>* const (&c)[F],
                                             const Pack<double, W> (&a)[F], double b) {
  Pack<double, F * W> sum[2], factor;
  unrolled<F * W>([&](int n) {
    factor.value[n] = a[n / W].value[n % W];
    unrolled<2>([&](int slot) { sum[slot].value[n] = c[n / W][slot].value[n % W]; });
  });
  multiply_add(sum, factor, b);
  unrolled<F * W>([&](int n) {
    unrolled<2>([&](int slot) { c[n / W][slot].value[n % W] = sum[slot].value[n]; });
  });
}

// What a lane has of eight rows of a product.
template <int W>
struct Tile {
  Pack<double, W> value[2] = {};
  __device__ __forceinline__ const Pack<double, W>& operator[](int slot) const {
    return value[slot];
  }
};

// A field of N positions, whole: T for each of those that a lane has.
template <class T, int N>
struct Whole {
  static constexpr int slots = (N + 3) / 4;
  T value[slots];
  __device__ __forceinline__ T& operator[](int slot) { return value[slot]; }
  __device__ __forceinline__ const T& operator[](int slot) const { return value[slot]; }
};

// The same while tables add to it, tile by tile.
template <int W, int N>
struct Accumulator {
  static constexpr int tiles = (N + 7) / 8;
  Tile<W> tile[tiles];
  __device__ __forceinline__ Whole<Pack<double, W>, N> whole() const {
    Whole<Pack<double, W>, N> y;
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
template <int COUNT, int W, class T>
__device__ __forceinline__ Pack<double, W> padded(const Quad<W>& quad, int slot, const T& x) {
  return inside<COUNT>(quad, slot) ? spread<double, W>(x) : Pack<double, W>{};
}

// y += eight rows of a table times x, for several fields x of K positions. `at` is the first square
// of these rows; the next one is STEP further.
template <int K, int STEP, int W, class... X>
__device__ __forceinline__ void multiply(const Quad<W>& quad, const double* at,
                                         const int (&place)[2], Tile<W>* const (&y)[sizeof...(X)],
                                         const X&... x) {
  constexpr int F = sizeof...(X);
  Pack<double, W>* c[F];
  unrolled<F>([&](int f) { c[f] = y[f]->value; });
  unrolled<(K + 3) / 4>([&](int slot) {
    const Pack<double, W> a[F] = {padded<K>(quad, slot, x[slot])...};
    multiply_add<W, F>(c, a, at[slot / 2 * STEP + place[slot % 2]]);
  });
}

// y += a table of N rows times the values of several fields in one slot. `at` is the first square
// of the columns that they meet; that of the next rows is STEP further.
template <int N, int STEP, int W, int F>
__device__ __forceinline__ void accumulate(const double* at, int place,
                                           Accumulator<W, N>* const (&y)[F],
                                           const Pack<double, W> (&x)[F]) {
  unrolled<(N + 7) / 8>([&](int t) {
    Pack<double, W>* c[F];
    unrolled<F>([&](int f) { c[f] = y[f]->tile[t].value; });
    multiply_add<W, F>(c, x, at[t * STEP + place]);
  });
}

// ---- Fields ----------------------------------------------------------------------------------

// Calls body(slot, i) for those of COUNT positions from `first` on that a lane has.
template <int COUNT, int W, class Body>
__device__ __forceinline__ void positions(const Quad<W>& quad, int first, const Body& body) {
  unrolled<(COUNT + 3) / 4>([&](int slot) { body(slot, first + position<COUNT>(quad, slot)); });
}

// Of values in memory what lanes compute with.
template <class T, int W>
__device__ __forceinline__ Pack<double, W> doubles(const Pack<T, W>& x) {
  return spread<double, W>(x);
}
template <class T, int W, int N, class Q>
__device__ __forceinline__ Whole<Pack<double, W>, N> doubles(const QuadFibre<T, W, N, Q>& x) {
  Whole<Pack<double, W>, N> y;
  unrolled<y.slots>([&](int slot) { y[slot] = doubles(x[slot]); });
  return y;
}

// A whole field that all elements share.
template <int N, int STRIDE, int W, class T>
__device__ __forceinline__ Whole<double, N> load_shared(const Quad<W>& quad, const T* from) {
  Whole<double, N> x;
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
__device__ __forceinline__ double of_slot(double x, int) {
  return x;
}

// sum_i x[i], in all lanes of a quad
template <int N, int W, class X>
__device__ __forceinline__ Pack<double, W> sum_whole(const Quad<W>& quad, const X& x) {
  Pack<double, W> sum{};
  unrolled<(N + 3) / 4>([&](int slot) { sum += padded<N>(quad, slot, x[slot]); });
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
