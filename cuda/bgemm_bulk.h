// Products of small matrices whose chunks the copy engine moves, or whose results threads put to
// memory themselves: for sizes where memory waits for the kernel of bgemm_kernels.h.
//
// Blocks of the result divide their matrix as evenly as they can. A chunk has any number of
// elements, so it may begin within a group of 16 bytes: groups come whole, with what is beside the
// chunk, and go whole where all of them is its own. Where there is no copy engine, threads copy.
#pragma once

#include "bgemm_kernels.h"
#include "fetch.cuh"

namespace jaxmagma {

// ---- The copy engine -------------------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

constexpr bool kHasEngine = false;

__device__ __forceinline__ void start(Arrival*) {}
__device__ __forceinline__ void expect(Arrival*, int) {}
__device__ __forceinline__ void bring_bulk(void*, const void*, int, Arrival*) {}
__device__ __forceinline__ void await_bulk(Arrival*) {}
__device__ __forceinline__ void publish() {}
__device__ __forceinline__ void send_bulk(void*, const void*, int) {}
__device__ __forceinline__ void await_sent() {}

#elif defined(__CUDA_ARCH__)

constexpr bool kHasEngine = true;

// One thread arrives, and then so many bytes.
__device__ __forceinline__ void start(Arrival* arrived) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;" ::"r"(in_shared(arrived))
      : "memory");
}

__device__ __forceinline__ void expect(Arrival* arrived, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(arrived)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bring_bulk(void* to, const void* from, int bytes,
                                           Arrival* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(in_shared(to)),
      "l"(from), "r"(bytes), "r"(in_shared(arrived))
      : "memory");
}

__device__ __forceinline__ void await_bulk(Arrival* arrived) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t"
      "}" ::"r"(in_shared(arrived)),
      "r"(0)
      : "memory");
}

// What threads have written in shared memory is for the engine, after the next barrier.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void send_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(in_shared(from)), "r"(bytes)
               : "memory");
}

// Until it has been read: shared memory ends with its block.
__device__ __forceinline__ void await_sent() {
  asm volatile(
      "cp.async.bulk.commit_group;\n\t"
      "cp.async.bulk.wait_group.read 0;" ::
          : "memory");
}

#else  // the CPU, where tests run kernels: a thread copies

#ifdef JAXMAGMA_WITHOUT_ENGINE
constexpr bool kHasEngine = false;
#else
constexpr bool kHasEngine = true;
#endif

__device__ __forceinline__ void start(Arrival*) {}
__device__ __forceinline__ void expect(Arrival*, int) {}
__device__ __forceinline__ void bring_bulk(void* to, const void* from, int bytes, Arrival*) {
  memcpy(to, from, bytes);
}
__device__ __forceinline__ void await_bulk(Arrival*) {
  __syncthreads();
}
__device__ __forceinline__ void publish() {}
__device__ __forceinline__ void send_bulk(void* to, const void* from, int bytes) {
  memcpy(to, from, bytes);
}
__device__ __forceinline__ void await_sent() {}

#endif

// ---- Shapes ----------------------------------------------------------------------------------

// The block of the result that a thread owns, elements of a block of threads, and steps of the sum
// that are unrolled.
struct BulkChoice {
  int rows;
  int columns;
  int elements;
  int steps;
  bool dealt;   // see Cut
  bool quads;   // four threads side by side own two pieces of the rows and two of the columns
  bool direct;  // threads put results to memory from registers
  bool bulk;    // the copy engine moves chunks, where there is one
};

// The fastest of up to 20 for each size on an H200 (benchmarks/results/bgemm-h200.txt). Neighbours
// read the same values, which are served once. No elements: none was faster, or none was tried.
template <class T>
constexpr BulkChoice choose_bulk(int n) {
  constexpr bool dealt = true, quads = true, direct = true, bulk = true;
  if (sizeof(T) == 4 && n == 31) return {8, 4, 2, 4, !dealt, !quads, !direct, bulk};
  if (sizeof(T) != 8 || !is_complex<T>) return {};
  if (n == 25) return {9, 5, 2, 3, dealt, !quads, !direct, bulk};
  if (n == 26 || n == 28) return {7, 7, 2, 1, dealt, quads, direct, bulk};
  if (n == 27) return {9, 4, 3, 3, dealt, !quads, !direct, bulk};
  if (n == 29) return {6, 5, 2, 4, !dealt, !quads, !direct, bulk};
  if (n == 30) return {6, 5, 1, 2, dealt, quads, direct, !bulk};
  if (n == 31) return {8, 4, 1, 4, dealt, quads, direct, bulk};
  return {};
}

template <class T, int N>
constexpr bool has_bulk = choose_bulk<T>(N).elements > 0;

template <class T, int N>
struct BulkShape {
  static constexpr BulkChoice choice = choose_bulk<T>(N);
  static constexpr int group = 16 / static_cast<int>(sizeof(T));  // values
  static constexpr int V = common_divisor(N, group);              // values of a vector
  static constexpr int vectors = N / V;

  // Pieces of an axis of the result: of whole vectors, or of single values if these divide it
  // better. Along the sum whole vectors are read for either.
  template <int VALUES>
  struct Axis : Cut<N / (VALUES % V ? 1 : V), VALUES / (VALUES % V ? 1 : V)> {
    static constexpr int unit = VALUES % V ? 1 : V, values = VALUES;
  };
  using Rows = Axis<choice.rows>;
  using Columns = Axis<choice.columns>;

  static constexpr int elements = choice.elements;
  static constexpr int each = Rows::count * Columns::count;  // threads of an element
  static constexpr int work = elements * each;
  static constexpr int threads = ceiling(work, 32) * 32;
  static constexpr int values = elements * N * N;
  static constexpr bool even = values % group == 0;  // all chunks begin with a group
  static_assert(even || V == 1, "vectors are aligned");
  static_assert(!choice.quads || Columns::count % 2 == 0, "two columns for each quad");
  static constexpr int chunk = (ceiling(values, group) + (even ? 0 : 1)) * group;  // values
  static constexpr int bytes = 2 * chunk * static_cast<int>(sizeof(T));

  struct Place {
    int element, row, column;  // units
  };
  static constexpr Place place(int thread) {
    const int piece = thread % each;
    int row = piece / Columns::count, column = piece % Columns::count;
    if (choice.quads) {
      // Two lines of pieces are dealt out together, except for the last of an odd number.
      const int pair = piece / (2 * Columns::count) * 2, rest = piece % (2 * Columns::count);
      const bool both = pair + 1 < Rows::count;
      row = both ? pair + rest / 2 % 2 : pair;
      column = both ? rest / 4 * 2 + rest % 2 : rest;
    }
    return {thread / each, Rows::first(row, choice.dealt), Columns::first(column, choice.dealt)};
  }
};

// ---- The product -----------------------------------------------------------------------------

// V columns, from `from` on, of the rows of a piece; or V rows of the columns of one.
template <class Shape, class Axis, bool ROWS, int N, class T>
__device__ __forceinline__ Block<T, Axis::values, Shape::V> load_piece_of(const T* from) {
  constexpr int V = Shape::V, unit = Axis::unit, stride = ROWS ? unit * N : unit;
  Block<T, Axis::values, V> x;
#pragma unroll
  for (int i = 0; i < Axis::size; ++i) {
    const int at = Axis::offset(i, Shape::choice.dealt) * stride;
#pragma unroll
    for (int u = 0; u < (ROWS ? unit : V); ++u) {
      const auto y = load_vector<(ROWS ? V : unit)>(from + at + u * N);
#pragma unroll
      for (int w = 0; w < (ROWS ? V : unit); ++w) {
        if (ROWS) {
          x.value[i * unit + u][w] = y.value[w];
        } else {
          x.value[i * unit + w][u] = y.value[w];
        }
      }
    }
  }
  return x;  // (values, V)
}

template <class T, class Shape>
using BlockOf = Block<T, Shape::Rows::values, Shape::Columns::values>;

// The block at `place` of op(A) op(B).
template <class T, int N, class Shape, bool TA, bool TB>
__device__ __forceinline__ void multiply_block(BlockOf<T, Shape>& sum, const T* a, const T* b,
                                               typename Shape::Place place) {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  constexpr int V = Shape::V;
  a += place.element * (N * N) + place.row * (TA ? Rows::unit : Rows::unit * N);
  b += place.element * (N * N) + place.column * (TB ? Columns::unit * N : Columns::unit);
#pragma unroll(Shape::choice.steps)
  for (int j = 0; j < Shape::vectors; ++j) {
    const auto x = load_piece_of<Shape, Rows, !TA, N>(a + j * (TA ? V * N : V));
    const auto y = load_piece_of<Shape, Columns, TB, N>(b + j * (TB ? V : V * N));
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int m = 0; m < Rows::values; ++m) {
#pragma unroll
        for (int k = 0; k < Columns::values; ++k) {
          sum.value[m][k] = multiply_add(x.value[m][v], y.value[k][v], sum.value[m][k]);
        }
      }
    }
  }
}

template <class T, int N, class Shape>
__device__ __forceinline__ BlockOf<T, Shape> multiply_blocks(const T* left, const T* right,
                                                             typename Shape::Place place,
                                                             Transposed transposed) {
  BlockOf<T, Shape> sum;
  zero(sum);
  if (static_cast<int>(threadIdx.x) < Shape::work) {
    if (transposed.a) {
      if (transposed.b) {
        multiply_block<T, N, Shape, true, true>(sum, left, right, place);
      } else {
        multiply_block<T, N, Shape, true, false>(sum, left, right, place);
      }
    } else {
      if (transposed.b) {
        multiply_block<T, N, Shape, false, true>(sum, left, right, place);
      } else {
        multiply_block<T, N, Shape, false, false>(sum, left, right, place);
      }
    }
  }
  return sum;
}

// Puts a block where its element begins, in vectors of at most MOST values.
template <class T, int N, class Shape, int MOST>
__device__ __forceinline__ void put_block(T* to, const BlockOf<T, Shape>& x,
                                          typename Shape::Place place) {
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  constexpr int row = Rows::unit * N, unit = Columns::unit, W = least(unit, MOST);
  to += place.row * row + place.column * unit;
#pragma unroll
  for (int m = 0; m < Rows::values; ++m) {
#pragma unroll
    for (int k = 0; k < Columns::values; k += W) {
      Vector<T, W> y;
#pragma unroll
      for (int w = 0; w < W; ++w) y.value[w] = x.value[m][k + w];
      const int at = Rows::offset(m / Rows::unit, Shape::choice.dealt) * row + m % Rows::unit * N;
      const int column = Columns::offset(k / unit, Shape::choice.dealt) * unit + k % unit;
      *reinterpret_cast<Vector<T, W>*>(to + at + column) = y;
    }
  }
}

// Puts it to memory, where there are `count` elements; in vectors if groups are whole there.
template <class T, int N, class Shape>
__device__ __forceinline__ void put_direct(T* c, long long count, bool whole,
                                           const BlockOf<T, Shape>& x,
                                           typename Shape::Place place) {
  if (static_cast<int>(threadIdx.x) >= Shape::work || place.element >= count) return;
  c += place.element * (N * N);
  if (whole) {
    put_block<T, N, Shape, Shape::V>(c, x, place);
  } else {
    put_block<T, N, Shape, 1>(c, x, place);
  }
}

// ---- The kernel ------------------------------------------------------------------------------

template <class T, int N>
__global__ void __launch_bounds__(BulkShape<T, N>::threads, 0)
    BgemmKernelBulk(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c,
                    long long count, Transposed transposed) {
  using Shape = BulkShape<T, N>;
  constexpr int E = Shape::elements, group = Shape::group;
  constexpr bool bulk = kHasEngine && Shape::choice.bulk;
  extern __shared__ __align__(16) unsigned char memory[];
  T* left = reinterpret_cast<T*>(memory);
  T* right = left + Shape::chunk;
  const int thread = threadIdx.x;
  const long long first = blockIdx.x * static_cast<long long>(E);
  a += first * (N * N);
  b += first * (N * N);
  c += first * (N * N);
  bool whole = first + E <= count;
  const int values = static_cast<int>(whole ? E : count - first) * (N * N);
  // Values of others in the first group, and groups that have any of the chunk.
  int before = 0, groups = ceiling(Shape::values, group);
  if constexpr (!Shape::even) {
    before = static_cast<int>(first * (N * N) % group);
    groups = (before + Shape::values + group - 1) / group;
    a -= before;
    b -= before;
    c -= before;
    whole = whole && first * (N * N) - before + groups * group <= count * (N * N);
  }
  whole = whole && is_aligned(a) && is_aligned(b) && is_aligned(c);
  if (bulk && whole) {
    __shared__ Arrival arrived;
    if (thread == 0) start(&arrived);
    __syncthreads();
    const int bytes = groups * 16;
    if (thread == 0) expect(&arrived, 2 * bytes);
    // Thread 0. As a loop ptxas leaves addresses out of the registers that a warp shares, and so it
    // is what was timed.
    for (int n = thread; n < 1; n += Shape::threads) {
      bring_bulk(left, a + n * (Shape::V * N), bytes, &arrived);
      bring_bulk(right, b + n * (Shape::V * N), bytes, &arrived);
    }
    await_bulk(&arrived);
  } else if (whole) {
#pragma unroll 4
    for (int n = thread; n < groups; n += Shape::threads) {
      bring(left + n * group, a + n * group);
      bring(right + n * group, b + n * group);
    }
    await_groups();
  } else {
    // This is n + before. So written, ptxas makes of all of the kernel what was timed.
    for (int n = thread; n < values; n += Shape::threads) {
      const int at = n / group * group + n % group + before;
      left[at] = a[n + before];
      right[at] = b[n + before];
    }
  }
  if (!bulk || !whole) __syncthreads();

  const auto place = Shape::place(thread);
  const auto sum = multiply_blocks<T, N, Shape>(left + before, right + before, place, transposed);
  if constexpr (Shape::choice.direct) {
    put_direct<T, N, Shape>(c + before, count - first, whole, sum, place);
    return;
  }
  __syncthreads();
  if (thread < Shape::work) {
    put_block<T, N, Shape, Shape::V>(left + before + place.element * (N * N), sum, place);
  }
  if constexpr (bulk) publish();
  __syncthreads();

  if (bulk && whole) {
    // Groups that are of this chunk alone; threads put what is beside them.
    const int begin = Shape::even ? 0 : (before + group - 1) / group;
    const int end = Shape::even ? groups : (before + Shape::values) / group;
    const int bytes = (end - begin) * 16;
    for (int n = thread; n < 1; n += Shape::threads) {
      send_bulk(c + begin * group + n * (Shape::V * N), left + begin * group, bytes);
    }
    if constexpr (!Shape::even) {
      const int n = thread < group ? thread : end * group + thread - group;
      if (thread < 2 * group && n >= before && n < before + Shape::values &&
          (n < begin * group || n >= end * group)) {
        c[n] = left[n];
      }
    }
    if (thread < 1) await_sent();
  } else if (whole && Shape::even) {
#pragma unroll 4
    for (int n = thread; n < groups; n += Shape::threads) {
      *reinterpret_cast<Group*>(c + n * group) = *reinterpret_cast<const Group*>(left + n * group);
    }
  } else {
    for (int n = thread; n < values; n += Shape::threads) {
      c[n + before] = left[n / group * group + n % group + before];
    }
  }
}

}  // namespace jaxmagma
