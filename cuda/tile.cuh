// Where a tile lives and how it moves.
//
// A tile in memory, global or shared, is a pointer and compile-time strides. In registers it is a
// Fibre, one line of a tile owned by one thread, or a Block, a small rectangle owned by one thread.
// Their subscripts are compile-time constants after unrolling, else they would not stay in
// registers.
#pragma once

#include "complex.cuh"
#include "unrolled.cuh"

namespace jaxmagma {

// ---- Types -----------------------------------------------------------------------------------

template <class T>
struct Mutable {
  using type = T;
};
template <class T>
struct Mutable<const T> {
  using type = T;
};

template <class T>
struct Pointee;
template <class T>
struct Pointee<T*> {
  using type = T;
};

// ---- Registers -------------------------------------------------------------------------------

template <class T, int N>
struct Fibre {
  static_assert(N > 0, "a fibre has at least one value");
  using Value = T;
  T value[N];
  __device__ __forceinline__ T& operator[](int i) { return value[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return value[i]; }
};

template <class T, int M, int N>
struct Block {
  static_assert(M > 0 && N > 0, "a block has at least one value");
  T value[M][N];
};

template <class T, int N>
__device__ __forceinline__ void zero(Fibre<T, N>& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = T{};  // (N)
}

template <class T, int M, int N>
__device__ __forceinline__ void zero(Block<T, M, N>& x) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) x.value[i][j] = T{};  // (M, N)
  }
}

// ---- Between memory and registers ------------------------------------------------------------

template <int N, int STRIDE = 0, class T>
__device__ __forceinline__ Fibre<T, N> load(const T* from) {
  static_assert(N == 1 || STRIDE > 0, "values of a fibre lie apart");
  Fibre<T, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = from[i * STRIDE];
  return x;  // (N)
}

template <int STRIDE = 0, class T, int N>
__device__ __forceinline__ void store(T* to, const Fibre<T, N>& x) {
  static_assert(N == 1 || STRIDE > 0, "values of a fibre lie apart");
#pragma unroll
  for (int i = 0; i < N; ++i) to[i * STRIDE] = x[i];  // (N)
}

// One value.
template <class T>
__device__ __forceinline__ T get(const T* from) {
  return *from;
}

template <class T>
__device__ __forceinline__ void put(T* to, T x) {
  *to = x;
}

// Whether an index is one of a vector of `length`: neither negative nor beyond its end.
__device__ __forceinline__ bool inside(int at, int length) {
  return static_cast<unsigned>(at) < static_cast<unsigned>(length);
}

// A component of what a vector of COMPONENTS each has at `index`; zero if there is nothing.
template <int COMPONENTS, class T>
__device__ __forceinline__ T gathered(const T* vector, int length, const int* index,
                                      int component) {
  const int at = *index;
  return inside(at, length) ? vector[static_cast<long long>(at) * COMPONENTS + component] : T{};
}

template <int N, int STRIDE, int COMPONENT, int COMPONENTS, class T>
__device__ __forceinline__ Fibre<T, N> load_gathered(const T* vector, int length, const int* index,
                                                     int component) {
  Fibre<T, N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = gathered<COMPONENTS>(vector, length, index + i * STRIDE, component + i * COMPONENT);
  }
  return x;  // (N)
}

// ---- Pieces ----------------------------------------------------------------------------------

// An axis divided among `count` pieces of at most SIZE values, which are dealt out one by one, so
// that pieces side by side touch values side by side. If some pieces have fewer values than others,
// they read the last value of the axis once more.
template <int EXTENT, int SIZE>
struct Pieces {
  static_assert(0 < SIZE && SIZE <= EXTENT, "a piece is part of its axis");
  static constexpr int count = (EXTENT + SIZE - 1) / SIZE;
  static constexpr bool even = count * SIZE == EXTENT;

  static __device__ __forceinline__ bool has(int piece, int i) {
    return even || i < SIZE - 1 || piece + i * count < EXTENT;
  }
  static __device__ __forceinline__ int at(int piece, int i) {
    return has(piece, i) ? piece + i * count : EXTENT - 1;
  }
};

// The values of a piece of an axis with stride STRIDE.
template <int EXTENT, int SIZE, int STRIDE, class T>
__device__ __forceinline__ Fibre<T, SIZE> load_piece(const T* from, int piece) {
  using Axis = Pieces<EXTENT, SIZE>;
  Fibre<T, SIZE> x;
#pragma unroll
  for (int i = 0; i < SIZE; ++i) x[i] = from[Axis::at(piece, i) * STRIDE];
  return x;  // (SIZE)
}

// Stores a piece of the rows and of the columns of a matrix.
template <int ROWS, int COLUMNS, int ROW, int COLUMN, class T, int M, int N>
__device__ __forceinline__ void store(T* to, const Block<T, M, N>& x, int row, int column) {
  using Row = Pieces<ROWS, M>;
  using Column = Pieces<COLUMNS, N>;
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (Row::has(row, i) && Column::has(column, j)) {
        to[Row::at(row, i) * ROW + Column::at(column, j) * COLUMN] = x.value[i][j];  // (M, N)
      }
    }
  }
}

// ---- Threads ---------------------------------------------------------------------------------

__device__ __forceinline__ int coordinate(unsigned x) {
  return static_cast<int>(x);
}

// Coordinates of line number `line`, the last extent fastest.
template <int... EXTENTS>
struct Lines {
  static constexpr int count = 1;

  template <class Line, class Body, class... At>
  static __device__ __forceinline__ auto visit(Line, const Body& body, At... at) {
    return body(at...);
  }
};

template <int FIRST, int... REST>
struct Lines<FIRST, REST...> {
  static constexpr int count = FIRST * Lines<REST...>::count;

  template <class Line, class Body, class... At>
  static __device__ __forceinline__ auto visit(Line line, const Body& body, At... at) {
    constexpr unsigned rest = Lines<REST...>::count;
    if constexpr (FIRST == 1) {
      return Lines<REST...>::visit(line, body, at..., coordinate(Line{}));
    } else {
      return Lines<REST...>::visit(line % rest, body, at..., coordinate(line / rest));
    }
  }
};

// Calls body(i, j, ...) for every line of EXTENTS, spread over THREADS threads.
template <int THREADS, int... EXTENTS, class Body>
__device__ __forceinline__ void lines(int thread, const Body& body) {
  constexpr int count = Lines<EXTENTS...>::count;
  if constexpr (count <= THREADS) {
    if (count == THREADS || thread < count)
      Lines<EXTENTS...>::visit(static_cast<unsigned>(thread), body);
  } else {
#pragma unroll 1
    for (unsigned line = thread; line < count; line += THREADS)
      Lines<EXTENTS...>::visit(line, body);
  }
}

// The same for every line of each of ELEMENTS: threads side by side have the same line of several.
template <int THREADS, int ELEMENTS, int... EXTENTS, class Body>
__device__ __forceinline__ void across(int thread, const Body& body) {
  lines<THREADS, Lines<EXTENTS...>::count, ELEMENTS>(thread, [&](int line, int e) {
    Lines<EXTENTS...>::visit(static_cast<unsigned>(line), body, e);
  });
}

// The same for bodies so short that a thread had better be at several of them at a time: of one
// element after the other, if each has enough, so that no thread need divide to know which.
template <int THREADS, int ELEMENTS, int... EXTENTS, class Body>
__device__ __forceinline__ void values(int thread, const Body& body) {
  constexpr int own = Lines<EXTENTS...>::count, count = ELEMENTS * own;
  if constexpr (own >= 4 * THREADS) {
    for (int e = 0; e < ELEMENTS; ++e) {
#pragma unroll 4
      for (unsigned line = thread; line < own; line += THREADS)
        Lines<EXTENTS...>::visit(line, body, e);
    }
  } else {
#pragma unroll 4
    for (unsigned line = thread; line < count; line += THREADS)
      Lines<ELEMENTS, EXTENTS...>::visit(line, body);
  }
}

// Makes what a group of THREADS threads wrote to shared memory visible to all of it.
template <int THREADS>
__device__ __forceinline__ void sync() {
  if constexpr (THREADS == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

}  // namespace jaxmagma
