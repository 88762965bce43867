// Fibres that four neighbouring lanes of a warp, a quad, own together: how tensor cores see them.
//
// A warp has eight quads. Value i of a fibre is in lane i % 4. A product with a matrix takes fibres
// so and gives them so: nothing moves between lanes from one product to the next, and a lane has a
// quarter of the registers of a thread that owns a fibre alone. A quad has W fibres at a time: the
// tensor cores of sm_90 take two in the time of one.
#pragma once

#include "pack.cuh"
#include "reduce.cuh"

namespace jaxmagma {

// A lane, and whether its quad has so many fibres of its own. If not, it goes along with the first
// of the warp, for products need all lanes, and writes nothing.
template <int W>
struct Quad {
  int lane;
  bool has[W];
  __device__ static constexpr int slots(int n) { return (n + 3) / 4; }
};

// The same with other places of values: i of the first half of a fibre in lane i % 4, as before,
// and the one opposite to it, n - 1 - i, in the same lane, after those of the first half. So a
// product with even and odd halves moves nothing between lanes either.
template <int W>
struct MirroredQuad : Quad<W> {
  __device__ __forceinline__ MirroredQuad(const Quad<W>& quad) : Quad<W>(quad) {}
  __device__ static constexpr int first(int n) { return Quad<W>::slots((n + 1) / 2); }
  __device__ static constexpr int slots(int n) { return first(n) + Quad<W>::slots(n / 2); }
};

// W fibres of N values each, in the places of Q.
template <class T, int W, int N, class Q = Quad<W>>
struct QuadFibre {
  static constexpr int slots = Q::slots(N);
  Pack<T, W> value[slots];
  __device__ __forceinline__ Pack<T, W>& operator[](int slot) { return value[slot]; }
  __device__ __forceinline__ const Pack<T, W>& operator[](int slot) const { return value[slot]; }
};

// Whether a lane's value number `slot` is one of the N of a fibre, and for this lane to write.
template <int N, int W>
__device__ __forceinline__ bool inside(const Quad<W>& quad, int slot) {
  return slot < N / 4 || 4 * slot + quad.lane < N;
}

// Which value of the fibre that is; beyond the end, one of the first once more.
template <int N, int W>
__device__ __forceinline__ int position(const Quad<W>& quad, int slot) {
  const int first = inside<N>(quad, 0) ? quad.lane : 0;
  return first + (inside<N>(quad, slot) ? 4 * slot : 0);
}

template <int N, int W>
__device__ __forceinline__ bool inside(const MirroredQuad<W>& quad, int slot) {
  constexpr int kFirst = MirroredQuad<W>::first(N);
  const Quad<W>& half = quad;
  return slot < kFirst ? inside<(N + 1) / 2>(half, slot) : inside<N / 2>(half, slot - kFirst);
}

template <int N, int W>
__device__ __forceinline__ int position(const MirroredQuad<W>& quad, int slot) {
  constexpr int kFirst = MirroredQuad<W>::first(N);
  const Quad<W>& half = quad;
  return slot < kFirst ? position<(N + 1) / 2>(half, slot)
                       : N - 1 - position<N / 2>(half, slot - kFirst);
}

template <int N, int STRIDE, class Q, class T, int W>
__device__ __forceinline__ auto load(const Q& quad, const Place<T, W>& from) {
  QuadFibre<typename Mutable<T>::type, W, N, Q> x;
#pragma unroll
  for (int slot = 0; slot < x.slots; ++slot) {
    x[slot] = get(from + position<N>(quad, slot) * STRIDE);
  }
  return x;  // (N), W times
}

template <int N, int STRIDE, int COMPONENT, int COMPONENTS, class Q, class T, int W,
          class Component>
__device__ __forceinline__ auto load_gathered(const Q& quad, const Place<T, W>& vector, int length,
                                              const Place<const int, W>& index,
                                              const Component& component) {
  QuadFibre<typename Mutable<T>::type, W, N, Q> x;
#pragma unroll
  for (int slot = 0; slot < x.slots; ++slot) {
    const int i = position<N>(quad, slot);
    x[slot] = gathered<COMPONENTS>(vector, length, index + i * STRIDE, component + i * COMPONENT);
  }
  return x;  // (N), W times
}

// Writes value number `slot` of fibres of N values.
template <int N, class Q, class T, int W>
__device__ __forceinline__ void put(const Q& quad, int slot, const Place<T, W>& to,
                                    const Pack<T, W>& x) {
#pragma unroll
  for (int w = 0; w < W; ++w) {
    if (quad.has[w] && to.has[w] && inside<N>(quad, slot)) *to.at[w] = x.value[w];
  }
}

template <int STRIDE, class Q, class T, int W, int N>
__device__ __forceinline__ void store(const Q& quad, const Place<T, W>& to,
                                      const QuadFibre<T, W, N, Q>& x) {
#pragma unroll
  for (int slot = 0; slot < x.slots; ++slot) {
    put<N>(quad, slot, to + position<N>(quad, slot) * STRIDE, x[slot]);  // (N), W times
  }
}

// The same of several fibres.
template <class T, int W>
__device__ __forceinline__ Pack<T, W> from_lane(Pack<T, W> x, int other) {
#pragma unroll
  for (int w = 0; w < W; ++w) x.value[w] = from_lane(x.value[w], other);
  return x;
}

// sum_i x[i], in all lanes of the quad
template <class T, int W, int N, class Q>
__device__ __forceinline__ QuadFibre<T, W, 1, Q> reduce(const Q& quad,
                                                        const QuadFibre<T, W, N, Q>& x) {
  Pack<T, W> sum{};
#pragma unroll
  for (int slot = 0; slot < x.slots; ++slot) {
    if (inside<N>(quad, slot)) sum += x[slot];
  }
#pragma unroll
  for (int other = 1; other < 4; other *= 2) sum += from_lane(sum, other);
  return {{sum}};
}

// ---- Products --------------------------------------------------------------------------------

// c += a b for eight fibres, of which a lane has value number `lane` of its own; b is a piece of a
// matrix for four of its columns and eight of its rows, see Matrix below.
__device__ __forceinline__ void multiply_add(double (&c)[2], double a, double b) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
#else
  emulator::MultiplyAdd(c, a, b);
#endif
}

// The same for W times eight fibres.
template <int W>
__device__ __forceinline__ void multiply_add(Pack<double, W> (&c)[2], const Pack<double, W>& a,
                                             double b) {
#pragma unroll
  for (int w = 0; w < W; w += 2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (w + 1 < W) {
      asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 "
          "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
          : "+d"(c[0].value[w]), "+d"(c[1].value[w]), "+d"(c[0].value[w + 1]),
            "+d"(c[1].value[w + 1])
          : "d"(a.value[w]), "d"(a.value[w + 1]), "d"(b));
      continue;
    }
#endif
#pragma unroll
    for (int one = w; one < W && one < w + 2; ++one) {
      double sum[2] = {c[0].value[one], c[1].value[one]};
      multiply_add(sum, a.value[one], b);
      c[0].value[one] = sum[0];
      c[1].value[one] = sum[1];
    }
  }
}

// The same of complex numbers: four products of real ones.
template <int W>
__device__ __forceinline__ void multiply_add(Pack<Complex<double>, W> (&c)[2],
                                             const Pack<Complex<double>, W>& a, Complex<double> b) {
  Pack<double, W> real[2], imag[2], a_real, a_imag, minus_imag;
#pragma unroll
  for (int w = 0; w < W; ++w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      real[i].value[w] = c[i].value[w].real;
      imag[i].value[w] = c[i].value[w].imag;
    }
    a_real.value[w] = a.value[w].real;
    a_imag.value[w] = a.value[w].imag;
    minus_imag.value[w] = -a.value[w].imag;
  }
  multiply_add(real, a_real, b.real);
  multiply_add(imag, a_real, b.imag);
  multiply_add(real, minus_imag, b.imag);
  multiply_add(imag, a_imag, b.real);
#pragma unroll
  for (int w = 0; w < W; ++w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) c[i].value[w] = {real[i].value[w], imag[i].value[w]};
  }
}

// sum over the lanes of a quad, in all of them. Times one: tensor cores have less to do than the
// units that would move values from lane to lane; those of tf32 would round them.
template <int W>
__device__ __forceinline__ Pack<double, W> of_quad(const Pack<double, W>& x) {
  Pack<double, W> sum[2] = {};
  multiply_add(sum, x, 1.0);
  return sum[0];
}
template <int W>
__device__ __forceinline__ Pack<float, W> of_quad(Pack<float, W> x) {
#pragma unroll
  for (int other = 1; other < 4; other *= 2) x += from_lane(x, other);
  return x;
}
template <int W>
__device__ __forceinline__ Pack<Complex<double>, W> of_quad(const Pack<Complex<double>, W>& x) {
  Pack<double, W> real, imag;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    real.value[w] = x.value[w].real;
    imag.value[w] = x.value[w].imag;
  }
  real = of_quad(real);
  imag = of_quad(imag);
  Pack<Complex<double>, W> sum;
#pragma unroll
  for (int w = 0; w < W; ++w) sum.value[w] = {real.value[w], imag.value[w]};
  return sum;
}

// A matrix of M rows and K columns, cut into pieces of 8 x 4 whose values the lanes of a warp share
// out. The rows of a piece are in such an order that results are where operands are expected.
template <class T, int M, int K>
struct Matrix {
  static constexpr int rows = (M + 7) / 8, columns = (K + 3) / 4;
  T value[columns][rows];
};

// What is at(n, i, j): value number n of a lane, in row i and column j; zero beyond the last ones.
template <class T, int M, int K, class At>
__device__ __forceinline__ auto matrix_of(int thread, const At& at) {
  using A = Matrix<T, M, K>;
  A a;
  const int lane = thread % 32, row = lane / 8 + lane / 4 % 2 * 4, own = lane % 4;
  int n = 0;
#pragma unroll
  for (int k = 0; k < A::columns; ++k) {
#pragma unroll
    for (int m = 0; m < A::rows; ++m) a.value[k][m] = at(n++, 8 * m + row, 4 * k + own);
  }
  return a;  // (M, K)
}

// Read from values number 0, 1, ... with those of the lanes side by side.
template <int M, int K, class T>
__device__ __forceinline__ auto load_matrix(const T* from, int thread) {
  using Value = typename Mutable<T>::type;
  return matrix_of<Value, M, K>(thread,
                                [&](int n, int, int) { return from[n * 32 + thread % 32]; });
}

// Read from a matrix in memory.
template <int M, int K, int ROW, int COLUMN, class T>
__device__ __forceinline__ auto load_matrix(const T* from, int thread) {
  using Value = typename Mutable<T>::type;
  return matrix_of<Value, M, K>(thread, [&](int, int i, int j) {
    return i < M && j < K ? from[i * ROW + j * COLUMN] : Value{};
  });
}

// y[m] = sum_k matrix[m, k] x[k]
template <class Q, class S, class T, int W, int M, int K>
__device__ __forceinline__ QuadFibre<T, W, M, Q> gemm(const Q& quad, const Matrix<S, M, K>& matrix,
                                                      QuadFibre<T, W, K, Q> x) {
  using A = Matrix<S, M, K>;
  // What is beyond the end of the fibre meets zeros, and must not be NaN.
  if (!inside<K>(quad, x.slots - 1)) x[x.slots - 1] = {};
  Pack<T, W> sum[A::rows][2] = {};
#pragma unroll
  for (int k = 0; k < A::columns; ++k) {
#pragma unroll
    for (int m = 0; m < A::rows; ++m) multiply_add(sum[m], x[k], matrix.value[k][m]);
  }
  QuadFibre<T, W, M, Q> y;
#pragma unroll
  for (int slot = 0; slot < y.slots; ++slot) y[slot] = sum[slot / 2][slot % 2];
  return y;  // (M)
}

// y[m] = same[m] + opposite[m], y[M - 1 - m] = same[m] - opposite[m]
template <int M, class T, int W, int MS, int MO>
__device__ __forceinline__ auto unfold(const QuadFibre<T, W, MS>& same,
                                       const QuadFibre<T, W, MO>& opposite) {
  static_assert(MS == (M + 1) / 2 && MO == M / 2, "the middle has no opposite");
  QuadFibre<T, W, M, MirroredQuad<W>> y;
#pragma unroll
  for (int slot = 0; slot < same.slots; ++slot) {
    y[slot] = same[slot];
    if (slot < opposite.slots) {
      y[slot] = same[slot] + opposite[slot];
      y[same.slots + slot] = same[slot] - opposite[slot];
    }
  }
  return y;  // (M)
}

// The same with half the work, for matrix[M - 1 - m, K - 1 - k] = SIGN matrix[m, k]: of what it is
// to sums and to differences of opposite values, see split_gemm in gemm.cuh.
template <int SIGN, int M, int K, class S, int MS, int KS, int MD, int KD, class T, int W>
__device__ __forceinline__ auto split_gemm(const MirroredQuad<W>& quad,
                                           const Matrix<S, MS, KS>& even,
                                           const Matrix<S, MD, KD>& odd,
                                           const QuadFibre<T, W, K, MirroredQuad<W>>& x) {
  const Quad<W>& half = quad;
  QuadFibre<T, W, KS> sum;
  QuadFibre<T, W, KD> difference;
  constexpr int kPaired = Quad<W>::slots(K / 2);
  static_assert(KS == (K + 1) / 2 && (KD == K / 2 || KD == KS), "differences may have the middle");
#pragma unroll
  for (int slot = 0; slot < sum.slots; ++slot) {
    const bool paired = inside<K / 2>(half, slot);
    const Pack<T, W> first = x[slot], last = x[slot < kPaired ? sum.slots + slot : slot];
    sum[slot] = paired ? first + last : first;
    // The middle of the matrix is zero, but zero times infinity or NaN is not.
    if (slot < difference.slots) difference[slot] = paired ? first - last : first;
  }
  const auto from_even = gemm(half, even, sum);
  const auto from_odd = gemm(half, odd, difference);
  if constexpr (SIGN > 0) {
    return unfold<M>(from_even, from_odd);
  } else {
    return unfold<M>(from_odd, from_even);
  }
}

// ---- Threads ---------------------------------------------------------------------------------

// The line that a quad of an octet has, of those that the octets of a block have: neighbouring
// quads have lines side by side, or SPREAD apart. Two octets have sixteen of them together.
template <int SPREAD>
__device__ __forceinline__ int line_of(int octet, int quad) {
  static_assert(SPREAD == 1 || SPREAD == 2 || SPREAD == 4, "four quads are served at a time");
  if constexpr (SPREAD == 4) return octet / 2 * 16 + quad % 4 * 4 + quad / 4 + octet % 2 * 2;
  if constexpr (SPREAD == 2) return octet * 8 + quad % 4 * 2 + quad / 4;
  return octet * 8 + quad;
}

// The octets that have any of so many lines: the second of a pair may begin with line 2.
template <int SPREAD>
__device__ constexpr int octets_of(int count) {
  if (SPREAD == 4) return count / 16 * 2 + (count % 16 > 2 ? 2 : count % 16 > 0);
  return (count + 7) / 8;
}

// Calls body(quad, i, j, ...) for every line of EXTENTS, W at a time, spread over the quads of
// THREADS threads. All lanes of a warp make each call together.
template <int THREADS, int W, int SPREAD, int... EXTENTS, class Body>
__device__ __forceinline__ void quads(int thread, const Body& body) {
  static_assert(THREADS % 32 == 0, "warps are whole");
  constexpr int count = Lines<EXTENTS...>::count, octets = octets_of<SPREAD>(count);
  constexpr bool whole = count % 8 == 0 && octets % W == 0 && (SPREAD < 4 || count % 16 == 0);
#pragma unroll 1
  for (int octet = thread / 32 * W; octet < octets; octet += THREADS / 32 * W) {
    Quad<W> quad = {thread % 4};
    Pack<unsigned, W> line;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const int own = line_of<SPREAD>(octet + w, thread % 32 / 4);
      quad.has[w] = whole || own < count;
      line.value[w] = quad.has[w] ? own : line_of<SPREAD>(octet, 0);
    }
    Lines<EXTENTS...>::visit(line, body, quad);
  }
}

}  // namespace jaxmagma
