// Products of small matrices by the tensor cores' of 16 x 8 x 4 values, see quad.cuh. A warp owns
// 16 rows of a result, and all columns: what it reads of A no other warp reads.
#pragma once

#include "bgemm.h"
#include "quad.cuh"

namespace jaxmagma {

// An axis in pieces of eight values, one for each quad of a warp, two to a group where they are
// even. Where groups do not divide the axis evenly, the last two overlap: what they share is
// computed twice, alike. Within a group the bits of a value's number are rotated `by` so many, lest
// lanes that are served together read from one bank of shared memory.
template <int EXTENT>
struct TensorAxis {
  static constexpr int pieces = (EXTENT + 7) / 8;
  static constexpr int group = EXTENT >= 16 && pieces % 2 == 0 ? 16 : 8;
  static_assert(group <= EXTENT, "a group is part of its axis");

  static constexpr int rotate(int i, int by) {
    constexpr int bits = group == 16 ? 4 : 3;
    return (i << by | i >> (bits - by)) & (group - 1);
  }
  // What is added for piece `p` to the place of the same quad in the first.
  static constexpr int offset(int p, int by) {
    const int begin = 8 * p / group * group;
    return (begin < EXTENT - group ? begin : EXTENT - group) + rotate(8 * p % group, by);
  }
};

// How a chunk lies in shared memory, and which warps work on it.
template <class T, int N>
struct TensorShape {
  using Rows = TensorAxis<(N < 16 ? N : 16)>;  // of a warp
  using Columns = TensorAxis<N>;

  static constexpr int size = static_cast<int>(sizeof(T)), group = 16 / size;
  // Lines whose length is half a turn of the banks, or a whole one, lie a sector of 32 bytes apart.
  static constexpr int apart = N * size % 64 == 0 ? 2 : 0;  // groups
  static constexpr int line = N + apart * group;

  // Chunks are whole sectors of memory, unless few blocks would then have room.
  static constexpr int find_elements() {
    int whole = 1, sectors = 1;
    while (whole * N * N * size % 16 != 0) ++whole;
    while (sectors * N * N * size % 32 != 0) ++sectors;
    return 2 * sectors * N * N * size <= 60 << 10 ? sectors : whole;
  }
  static constexpr int elements = find_elements();
  static constexpr int each = (N + 15) / 16;  // warps of an element
  static constexpr int threads = 32 * each * elements;
  static constexpr int groups = elements * N * N / group;
  static constexpr int chunk = elements * N * line;  // values
  static constexpr int bytes = 2 * chunk * size;

  // Where group `n` of a chunk lies.
  static __device__ __forceinline__ int at(int n) {
    if constexpr (apart != 0) {
      n += static_cast<unsigned>(n) / static_cast<unsigned>(N / group) * apart;
    }
    return n * group;
  }

  // Where a lane reads the first piece of a factor, whose axis of the result runs `along` lines or
  // across them. Value `lane % 4` of the sum, for a quad.
  template <class Axis>
  static constexpr int place(int lane, int by, bool along) {
    const int i = Axis::rotate(lane / 4, by), k = lane % 4;
    return along ? k * line + i : i * line + k;
  }
  // In how many turns the banks serve a warp that reads so.
  template <class Axis>
  static constexpr int turns(int by, bool along) {
    constexpr int together = 128 / size;
    int total = 0;
    for (int begin = 0; begin < 32; begin += together) {
      int used[together] = {}, most = 0;
      for (int lane = begin; lane < begin + together; ++lane) {
        const int bank = place<Axis>(lane, by, along) % together;
        if (++used[bank] > most) most = used[bank];
      }
      total += most;
    }
    return total;
  }
  template <class Axis>
  static constexpr int find_rotation(bool along) {
    int found = 0;
    for (int by = 1; by < (Axis::group == 16 ? 4 : 3); ++by) {
      if (turns<Axis>(by, along) < turns<Axis>(found, along)) found = by;
    }
    return found;
  }
};

// ---- The product -----------------------------------------------------------------------------

// What a warp has of 16 rows: in each lane two, and two columns of each piece of eight.
template <class T, int PIECES>
struct TensorSum;
template <int PIECES>
struct TensorSum<double, PIECES> {
  Pack<double, 2> value[PIECES][2] = {};
  __device__ __forceinline__ double get(int p, int row, int column) const {
    return value[p][column].value[row];
  }
};
template <int PIECES>
struct TensorSum<Complex<double>, PIECES> {
  Pack<double, 2> real[PIECES][2] = {};
  Pack<double, 2> imag[PIECES][2] = {};
  __device__ __forceinline__ Complex<double> get(int p, int row, int column) const {
    return {real[p][column].value[row], imag[p][column].value[row]};
  }
};

template <int PIECES>
__device__ __forceinline__ void multiply_add(TensorSum<double, PIECES>& sum, const double (&a)[2],
                                             const double (&b)[PIECES]) {
  const Pack<double, 2> rows = {{a[0], a[1]}};
#pragma unroll
  for (int p = 0; p < PIECES; ++p) multiply_add(sum.value[p], rows, b[p]);
}

template <int PIECES>
__device__ __forceinline__ void multiply_add(TensorSum<Complex<double>, PIECES>& sum,
                                             const Complex<double> (&a)[2],
                                             const Complex<double> (&b)[PIECES]) {
  const Pack<double, 2> real = {{a[0].real, a[1].real}}, imag = {{a[0].imag, a[1].imag}};
  const Pack<double, 2> minus = {{-a[0].imag, -a[1].imag}};
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    multiply_add(sum.real[p], real, b[p].real);
    multiply_add(sum.imag[p], real, b[p].imag);
  }
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    multiply_add(sum.real[p], minus, b[p].imag);
    multiply_add(sum.imag[p], imag, b[p].real);
  }
}

// Four terms of the sum, of which a lane reads one; of the last, only those that are there.
template <class Rows, class Columns, int BY, int BY_COLUMN, int ROW, int COLUMN, class T,
          int PIECES>
__device__ __forceinline__ void multiply_four(TensorSum<T, PIECES>& sum, const T* a, const T* b,
                                              bool inside) {
  T x[2] = {}, y[PIECES] = {};
  if (inside) {
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = a[Rows::offset(h, BY) * ROW];
#pragma unroll
    for (int p = 0; p < PIECES; ++p) y[p] = b[Columns::offset(p, BY_COLUMN) * COLUMN];
  }
  multiply_add(sum, x, y);
}

// The warp's rows of op(A) op(B), put where A was. Where they lie depends on the transposes.
template <class T, int N, bool TA, bool TB>
__device__ __forceinline__ void multiply_rows(T* a, const T* b, int first_row) {
  using Shape = TensorShape<T, N>;
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  constexpr int line = Shape::line;
  constexpr int by = Shape::template find_rotation<Rows>(TA);
  constexpr int by_column = Shape::template find_rotation<Columns>(!TB);
  // From one row of op(A), or column of op(B), to the next; and from one term to the next.
  constexpr int row = TA ? 1 : line, column = TB ? line : 1, left = TA ? line : 1,
                right = TB ? 1 : line;
  const int lane = threadIdx.x % 32;

  TensorSum<T, Columns::pieces> sum;
  const T* x = a + first_row * row + Shape::template place<Rows>(lane, by, TA);
  const T* y = b + Shape::template place<Columns>(lane, by_column, !TB);
  // More at once would need registers that blocks have better use for.
#pragma unroll 1
  for (int k = 0; k < N / 4; ++k) {
    multiply_four<Rows, Columns, by, by_column, row, column>(sum, x, y, true);
    x += 4 * left;
    y += 4 * right;
  }
  if constexpr (N % 4 != 0) {
    multiply_four<Rows, Columns, by, by_column, row, column>(sum, x, y, lane % 4 < N % 4);
  }
  __syncthreads();

  const int m = first_row + Rows::rotate(lane / 4, by);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    T* const to = a + m * line + Columns::rotate(lane % 4 * 2 + e, by_column);
#pragma unroll
    for (int p = 0; p < Columns::pieces; ++p) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[Rows::offset(h, by) * line + Columns::offset(p, by_column)] = sum.get(p, h, e);
      }
    }
  }
}

// Puts the products of a chunk where A was.
template <class T, int N>
__device__ __forceinline__ void multiply_on_tensor_cores(T* a, const T* b, Transposed transposed) {
  using Shape = TensorShape<T, N>;
  constexpr int each = Shape::each;
  const int warp = threadIdx.x / 32;
  a += warp / each * N * Shape::line;
  b += warp / each * N * Shape::line;
  constexpr int last = N < 16 ? 0 : N - 16;
  const int row = warp % each * 16, first_row = row < last ? row : last;
  if (transposed.a) {
    if (transposed.b) {
      multiply_rows<T, N, true, true>(a, b, first_row);
    } else {
      multiply_rows<T, N, true, false>(a, b, first_row);
    }
  } else {
    if (transposed.b) {
      multiply_rows<T, N, false, true>(a, b, first_row);
    } else {
      multiply_rows<T, N, false, false>(a, b, first_row);
    }
  }
}

}  // namespace jaxmagma
