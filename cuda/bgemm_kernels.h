// The kernels behind bgemm.h.
//
// A block multiplies a chunk of elements that follow each other. They come to shared memory and
// leave it in groups of 16 bytes, as memory is fastest for every size of matrix; transposition is a
// matter of which values a thread reads there. Each thread owns a block of the result; where
// multiply-adds in double precision would be the limit, a warp does, see bgemm_tensor.h. There are
// no stages: while some blocks of a multiprocessor wait for memory, others multiply.
#pragma once

#include <string.h>

#include <type_traits>
#include <utility>

#include "bgemm.h"
#include "bgemm_tensor.h"
#include "complex.cuh"
#include "tile.cuh"

namespace jaxmagma {

// ---- Groups of 16 bytes ----------------------------------------------------------------------

struct alignas(16) Group {
  unsigned word[4];
};

// Begins to bring a group to shared memory.
__device__ __forceinline__ void bring(void* to, const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
#else
  *static_cast<Group*>(to) = *static_cast<const Group*>(from);
#endif
}

// Until what this thread has begun to bring is there.
__device__ __forceinline__ void await_groups() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ bool is_aligned(const void* at) {
  return reinterpret_cast<unsigned long long>(at) % sizeof(Group) == 0;
}

// V values that are read or written at once.
template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  T value[V];
};

// Copied whole: value by value, the compiler would read some in parts.
template <int V, class T>
__device__ __forceinline__ Vector<T, V> load_vector(const T* from) {
  Vector<T, V> x;
  memcpy(&x, __builtin_assume_aligned(from, sizeof(x)), sizeof(x));
  return x;
}

// ---- Shapes ----------------------------------------------------------------------------------

constexpr int common_divisor(int a, int b) {
  return b == 0 ? a : common_divisor(b, a % b);
}

constexpr int least(int a, int b) {
  return a < b ? a : b;
}

constexpr int ceiling(int a, int b) {
  return (a + b - 1) / b;
}

template <class T>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<Complex<T>> = true;

// The block of the result that a thread owns, at most.
struct BgemmChoice {
  int rows;
  int columns;
};

// From timings on an H200 with sizes of 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31 and 32, and
// with complex64 from 18 on: large blocks where products are many, and blocks that leave few lanes
// idle.
template <class T>
constexpr BgemmChoice choose_bgemm(int n) {
  switch (sizeof(T)) {
    case 4:
      if (n == 28) return {8, 8};
      if (n % 4 == 0) return n < 24 ? BgemmChoice{4, 4} : BgemmChoice{8, 4};
      return n <= 24 ? BgemmChoice{6, 6} : BgemmChoice{8, 8};
    case 8:
      if (n == 4) return {2, 2};
      if (is_complex<T>) {
        if (n == 17) return {9, 3};
        if (n == 19) return {6, 5};
        if (n == 20) return {4, 4};
        if (n == 21) return {7, 5};
        if (n == 22) return {4, 6};
      }
      if (n % 16 == 0) return {4, 4};
      return n <= 24 ? BgemmChoice{6, 4} : BgemmChoice{8, 4};
    default:
      if (n <= 2) return {1, 2};
      if (n == 4) return {2, 2};
      if (n == 8 || n == 16) return {4, 2};
      return n <= 25 ? BgemmChoice{6, 3} : BgemmChoice{4, 4};
  }
}

// An axis in pieces of SIZE vectors, either neighbours or dealt out one by one. Where the axis does
// not divide evenly, the last pieces overlap: what they share is computed twice, alike.
template <int EXTENT, int SIZE>
struct Cut {
  static_assert(0 < SIZE && SIZE <= EXTENT, "a piece is part of its axis");
  static constexpr int size = SIZE;
  static constexpr int count = ceiling(EXTENT, SIZE);

  static constexpr int first(int piece, bool dealt) {
    return dealt ? piece : least(piece * SIZE, EXTENT - SIZE);
  }
  static constexpr int offset(int i, bool dealt) {
    return dealt ? least(i * count, EXTENT - count) : i;
  }
};

// How a chunk lies in shared memory, and who works on which part of it.
struct BgemmLayout {
  bool dealt;  // see Cut
  bool side;   // threads side by side work on elements side by side, not on one element
  bool apart;  // lines of V rows lie a group apart
};

template <class T, int N>
struct BgemmShape {
  static constexpr BgemmChoice choice = choose_bgemm<T>(N);
  static constexpr int group = 16 / static_cast<int>(sizeof(T));  // values
  static constexpr int V = common_divisor(N, group);              // values of a vector
  static constexpr int vectors = N / V;                           // of a row, and lines of a matrix

  // As even pieces as `most` values allow, in vectors.
  static constexpr int share(int most) {
    return ceiling(vectors, ceiling(vectors, most > V ? most / V : 1));
  }
  using Rows = Cut<vectors, share(choice.rows)>;
  using Columns = Cut<vectors, share(choice.columns)>;

  static constexpr int each = Rows::count * Columns::count;  // threads of an element

  // Elements whose lanes are the busiest. Chunks are whole groups; where they are not whole sectors
  // of 32 bytes, memory is about a sixteenth slower.
  static constexpr int find_elements() {
    constexpr int most_threads = 160, most_bytes = 40 << 10, least_bytes = 2 << 10;
    constexpr int size = N * N * static_cast<int>(sizeof(T));
    constexpr int step = 16 / common_divisor(16, size);
    int found = step, best = 0;
    for (int n = step; n == step || (n * each <= most_threads && 2 * n * size <= most_bytes);
         n += step) {
      const int lanes = ceiling(n * each, 32) * 32;
      const int busy = n * each * 4096 / lanes * (n * size % 32 == 0 ? 16 : 15);
      if (busy > best || (busy == best && 2 * found * size < least_bytes)) {
        found = n;
        best = busy;
      }
    }
    return found;
  }
  static constexpr int elements = find_elements();
  static constexpr int work = elements * each;
  static constexpr int threads = ceiling(work, 32) * 32;
  static constexpr int groups = elements * N * N / group;

  static constexpr int line(BgemmLayout layout) { return V * N + (layout.apart ? group : 0); }
  static constexpr int element(BgemmLayout layout) { return vectors * line(layout); }

  struct Place {
    int element, row, column;  // vectors
  };
  static constexpr Place place(int thread, BgemmLayout layout) {
    const int side = layout.side ? elements : 1, piece = thread / side % each;
    return {thread / (side * each) * side + thread % side,
            Rows::first(piece / Columns::count, layout.dealt),
            Columns::first(piece % Columns::count, layout.dealt)};
  }

  // In how many turns the banks of shared memory serve a warp, however A and B are transposed.
  static constexpr int turns(BgemmLayout layout) {
    constexpr int together = 128 / static_cast<int>(V * sizeof(T));  // vectors of a turn
    int total = 0;
    for (int begin = 0; begin < least(32, work); begin += together) {
      for (int pattern = 0; pattern < 4; ++pattern) {
        int at[32] = {}, used[32] = {}, most = 0;
        for (int n = 0; n < least(together, work - begin); ++n) {
          const Place p = place(begin + n, layout);
          const int vector = pattern < 2 ? p.row : p.column;
          at[n] = (p.element * element(layout) + vector * (pattern % 2 ? line(layout) : V)) / V;
          bool read = false;
          for (int other = 0; other < n; ++other) read = read || at[other] == at[n];
          if (!read && ++used[at[n] % together] > most) most = used[at[n] % together];
        }
        total += most * (pattern < 2 ? Rows::size : Columns::size);
      }
    }
    return total;
  }
  static constexpr BgemmLayout find_layout() {
    BgemmLayout found = {};
    for (int n = 1; n < 8; ++n) {
      const BgemmLayout layout = {n % 2 != 0, n / 2 % 2 != 0, n / 4 != 0};
      // Gaps split the sectors of memory, which costs more than conflicts between short lines do.
      if (layout.apart && (V * N % group != 0 || V * N < 8 * group)) continue;
      const bool gaps = layout.apart && !found.apart;
      if (turns(layout) * 6 < turns(found) * (gaps ? 5 : 6)) found = layout;
    }
    return found;
  }
  static constexpr BgemmLayout layout = find_layout();
  static constexpr int chunk = ceiling(elements * element(layout), group) * group;  // values
  static constexpr int bytes = 2 * chunk * static_cast<int>(sizeof(T));

  // Where group `n` of a chunk lies.
  static __device__ __forceinline__ int at(int n) {
    if constexpr (layout.apart) {
      n += static_cast<unsigned>(n) / static_cast<unsigned>(V * N / group);
    }
    return n * group;
  }
};

// ---- The product -----------------------------------------------------------------------------

// V columns, from `from` on, of SIZE lines of V rows; or V rows of as many values of SIZE columns.
template <class Shape, class Axis, bool ROWS, int N, class T>
__device__ __forceinline__ Block<T, Axis::size * Shape::V, Shape::V> load_panel(const T* from) {
  constexpr int V = Shape::V;
  Block<T, Axis::size * V, V> x;
#pragma unroll
  for (int i = 0; i < Axis::size; ++i) {
    const int at = Axis::offset(i, Shape::layout.dealt) * (ROWS ? Shape::line(Shape::layout) : V);
#pragma unroll
    for (int u = 0; u < V; ++u) {
      const auto y = load_vector<V>(from + at + u * N);
#pragma unroll
      for (int w = 0; w < V; ++w) {
        if (ROWS) {
          x.value[i * V + u][w] = y.value[w];
        } else {
          x.value[i * V + w][u] = y.value[w];
        }
      }
    }
  }
  return x;  // (SIZE V, V)
}

// The block at `place` of op(A) op(B).
template <class T, int N, bool TA, bool TB, int M, int K>
__device__ __forceinline__ void multiply(Block<T, M, K>& sum, const T* a, const T* b,
                                         typename BgemmShape<T, N>::Place place) {
  using Shape = BgemmShape<T, N>;
  constexpr int V = Shape::V, line = Shape::line(Shape::layout);
  a += place.element * Shape::element(Shape::layout) + place.row * (TA ? V : line);
  b += place.element * Shape::element(Shape::layout) + place.column * (TB ? line : V);
  // About as many instructions for every size; with more of them at once, ptxas spills on sm_80.
  constexpr int products = M * K * V * (is_complex<T> ? 4 : 1);
  constexpr int most = least(sizeof(T) == 16 ? 2 : 4, Shape::vectors);
  // Complex64 of 24, 28 and 32 has the registers, and gains by it.
  constexpr int fewest = sizeof(T) == 8 && is_complex<T> && N > 20 && N % 4 == 0 ? 2 : 1;
  constexpr int steps = products * fewest > 128 ? fewest : least(128 / products, most);
#pragma unroll(steps)
  for (int j = 0; j < Shape::vectors; ++j) {
    const auto x = load_panel<Shape, typename Shape::Rows, !TA, N>(a + j * (TA ? line : V));
    const auto y = load_panel<Shape, typename Shape::Columns, TB, N>(b + j * (TB ? V : line));
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          sum.value[m][k] = multiply_add(x.value[m][v], y.value[k][v], sum.value[m][k]);
        }
      }
    }
  }
}

// Puts the block at `place` where A was.
template <class T, int N, int M, int K>
__device__ __forceinline__ void store_block(T* to, const Block<T, M, K>& x,
                                            typename BgemmShape<T, N>::Place place) {
  using Shape = BgemmShape<T, N>;
  using Rows = typename Shape::Rows;
  using Columns = typename Shape::Columns;
  constexpr BgemmLayout layout = Shape::layout;
  constexpr int V = Shape::V, line = Shape::line(layout);
  to += place.element * Shape::element(layout) + place.row * line + place.column * V;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int k = 0; k < Columns::size; ++k) {
      Vector<T, V> y;
#pragma unroll
      for (int w = 0; w < V; ++w) y.value[w] = x.value[m][k * V + w];
      const int at = Rows::offset(m / V, layout.dealt) * line + m % V * N;
      *reinterpret_cast<Vector<T, V>*>(to + at + Columns::offset(k, layout.dealt) * V) = y;
    }
  }
}

// Puts the products of a chunk where A was.
template <class T, int N>
__device__ __forceinline__ void multiply_in_threads(T* left, const T* right,
                                                    Transposed transposed) {
  using Shape = BgemmShape<T, N>;
  const int thread = threadIdx.x;
  const bool works = thread < Shape::work;
  const auto place = Shape::place(thread, Shape::layout);
  Block<T, Shape::Rows::size * Shape::V, Shape::Columns::size * Shape::V> sum;
  zero(sum);
  if (works) {
    if (transposed.a) {
      if (transposed.b) {
        multiply<T, N, true, true>(sum, left, right, place);
      } else {
        multiply<T, N, true, false>(sum, left, right, place);
      }
    } else {
      if (transposed.b) {
        multiply<T, N, false, true>(sum, left, right, place);
      } else {
        multiply<T, N, false, false>(sum, left, right, place);
      }
    }
  }
  __syncthreads();
  if (works) store_block<T, N>(left, sum, place);
}

// ---- The kernel ------------------------------------------------------------------------------

// From timings on an H200: up to 12 values a side, or 18 real ones, threads are as fast.
template <class T, int N>
constexpr bool on_tensor_cores = (std::is_same<T, double>::value && N > 18) ||
                                 (std::is_same<T, Complex<double>>::value && N > 12);

template <class T, int N>
using KernelShape = std::conditional_t<on_tensor_cores<T, N>, TensorShape<T, N>, BgemmShape<T, N>>;

// Of the size 1, ptxas would spill values to have room for more blocks.
template <class T, int N>
__global__ void __launch_bounds__(KernelShape<T, N>::threads, N == 1 ? 1 : 0)
    BgemmKernel(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c,
                long long count, Transposed transposed) {
  using Shape = KernelShape<T, N>;
  constexpr int E = Shape::elements, group = Shape::group;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const left = reinterpret_cast<T*>(memory);
  T* const right = left + Shape::chunk;

  const int thread = threadIdx.x;
  const long long first = blockIdx.x * static_cast<long long>(E);
  a += first * (N * N);
  b += first * (N * N);
  c += first * (N * N);
  const bool whole = first + E <= count && is_aligned(a) && is_aligned(b) && is_aligned(c);
  const int values = static_cast<int>(first + E <= count ? E : count - first) * (N * N);
  if (whole) {
#pragma unroll 4
    for (int n = thread; n < Shape::groups; n += Shape::threads) {
      bring(left + Shape::at(n), a + n * group);
      bring(right + Shape::at(n), b + n * group);
    }
    await_groups();
  } else {
    for (int n = thread; n < values; n += Shape::threads) {
      const int at = Shape::at(n / group) + n % group;
      left[at] = a[n];
      right[at] = b[n];
    }
  }
  __syncthreads();

  if constexpr (on_tensor_cores<T, N>) {
    multiply_on_tensor_cores<T, N>(left, right, transposed);
  } else {
    multiply_in_threads<T, N>(left, right, transposed);
  }
  __syncthreads();

  if (whole) {
#pragma unroll 4
    for (int n = thread; n < Shape::groups; n += Shape::threads) {
      *reinterpret_cast<Group*>(c + n * group) =
          *reinterpret_cast<const Group*>(left + Shape::at(n));
    }
  } else {
    for (int n = thread; n < values; n += Shape::threads) {
      c[n] = left[Shape::at(n / group) + n % group];
    }
  }
}

}  // namespace jaxmagma
