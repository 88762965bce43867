// Planes of tiles, of which a warp has all fibres: products along one axis, and then along the
// other.
//
// Tensor cores multiply a matrix with fibres in either order. As the first operand, fibres of a
// quad give fibres of the same quad (`gemm` in quad.cuh). As the second one they give a *turned*
// result: a quad then has values that had been in the same place of fibres of all quads, a fibre
// across them. So two products of a plane follow each other in registers, and nothing goes through
// shared memory between them.
#pragma once

#include "quad.cuh"

namespace jaxmagma {

// A lane of a quad, in a kernel with turned products. What was line i of a plane is value i of the
// fibres across it, so where lanes have values says which lines quads have: those next to each
// other 0, 6, 1, 7, 2, 4, 3, 5. Value i is in lane i % 4, but two lanes further in every second
// four: then the quads that are served together meet in no bank of shared memory if either axis of
// the plane has a stride of 4, 12, 20, ... values and the other one an odd stride.
template <int W>
struct TurningQuad : Quad<W> {
  __device__ __forceinline__ TurningQuad() {}
  __device__ __forceinline__ TurningQuad(const Quad<W>& quad) : Quad<W>(quad) {}
};

__device__ __forceinline__ int turned_lane(int lane, int slot) {
  return slot % 2 == 0 ? lane : lane ^ 2;
}

template <int N, int W>
__device__ __forceinline__ bool inside(const TurningQuad<W>& quad, int slot) {
  return slot < N / 4 || 4 * slot + turned_lane(quad.lane, slot) < N;
}

template <int N, int W>
__device__ __forceinline__ int position(const TurningQuad<W>& quad, int slot) {
  return inside<N>(quad, slot) ? 4 * slot + turned_lane(quad.lane, slot) : 0;
}

// Coordinates of a plane, the element's first.
template <int N>
struct Plane {
  int at[N];
};

// Calls body with a plane of any number of coordinates: not every compiler takes a lambda of them.
template <class Body>
struct Planes {
  const Body& body;

  template <class... At>
  __device__ __forceinline__ void operator()(At... at) const {
    body(Plane<sizeof...(At)>{{at...}});
  }
};

// Calls body(plane) for every plane of EXTENTS, each in one of the warps of THREADS threads.
template <int THREADS, int... EXTENTS, class Body>
__device__ __forceinline__ void planes(int thread, const Body& body) {
  static_assert(THREADS % 32 == 0, "warps are whole");
  constexpr unsigned count = Lines<EXTENTS...>::count;
  const Planes<Body> visit = {body};
#pragma unroll 1
  for (unsigned plane = thread / 32; plane < count; plane += THREADS / 32) {
    Lines<EXTENTS...>::visit(plane, visit);
  }
}

// The same coordinate for W lines.
template <int W>
__device__ __forceinline__ Pack<int, W> same(int x) {
  Pack<int, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = x;
  return y;
}

template <int W, int N, class Body, class... At>
__device__ __forceinline__ void with_lines(const TurningQuad<W>& quad, const Plane<N>& plane,
                                           const Pack<int, W>& lines, const Body& body,
                                           const At&... at) {
  if constexpr (sizeof...(At) == N) {
    body(quad, at..., lines);
  } else {
    with_lines(quad, plane, lines, body, at..., same<W>(plane.at[sizeof...(At)]));
  }
}

// Calls body(quad, e, i, ..., line) once, with all of LINES of a plane in the quads of a warp.
template <int LINES, int N, class Body>
__device__ __forceinline__ void across(int thread, const Plane<N>& plane, const Body& body) {
  constexpr int W = (LINES + 7) / 8;
  const int own = thread % 32 / 4, line = own % 2 * 4 + turned_lane(own / 2, own % 2);
  TurningQuad<W> quad;
  quad.lane = thread % 4;
  Pack<int, W> lines;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    quad.has[w] = LINES % 8 == 0 || 8 * w + line < LINES;
    lines.value[w] = quad.has[w] ? 8 * w + line : 0;
  }
  with_lines(quad, plane, lines, body);
}

// y[m] = sum_k matrix[m, k] x[k] of all LINES, as fibres across x: of quads that have the lines m.
template <int LINES, class T, int W, int V, int M, int K, bool TAILS>
__device__ __forceinline__ auto turn(const TurningQuad<V>& quad,
                                     const Matrix<T, M, K, TAILS>& matrix,
                                     QuadFibre<T, W, K, TurningQuad<W>> x) {
  using A = Matrix<T, M, K, TAILS>;
  static_assert(!TAILS && V == A::rows && W == (LINES + 7) / 8, "planes are whole");
  // What is beyond the end of the fibre meets zeros, and must not be NaN.
  if (!inside<K>(quad, x.slots - 1)) x[x.slots - 1] = {};
  Pack<T, V> sum[W][2] = {};
#pragma unroll
  for (int k = 0; k < A::columns; ++k) {
    Pack<T, V> rows;
#pragma unroll
    for (int m = 0; m < V; ++m) rows.value[m] = matrix.value[k][m];
#pragma unroll
    for (int w = 0; w < W; ++w) multiply_add(sum[w], rows, x[k].value[w]);
  }
  QuadFibre<T, V, LINES, TurningQuad<V>> y;
#pragma unroll
  for (int slot = 0; slot < y.slots; ++slot) y[slot] = sum[slot / 2][slot % 2];
  return y;  // (LINES)
}

}  // namespace jaxmagma
