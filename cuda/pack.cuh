// Values side by side in one thread, one for each of W fibres that it has at a time.
#pragma once

#include "tile.cuh"

namespace jaxmagma {

template <class T, int W>
struct Pack {
  T value[W];
};

// Value number `w`; what is no pack is the same for all.
template <class T>
__device__ __forceinline__ T of_fibre(const T& a, int) {
  return a;
}
template <class T, int W>
__device__ __forceinline__ T of_fibre(const Pack<T, W>& a, int w) {
  return a.value[w];
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> operator+(const Pack<T, W>& a, const Pack<T, W>& b) {
  Pack<T, W> y;
  unrolled<W>([&](int w) { y.value[w] = a.value[w] + b.value[w]; });
  return y;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> operator-(const Pack<T, W>& a, const Pack<T, W>& b) {
  Pack<T, W> y;
  unrolled<W>([&](int w) { y.value[w] = a.value[w] - b.value[w]; });
  return y;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W>& operator+=(Pack<T, W>& a, const Pack<T, W>& b) {
  return a = a + b;
}

// ---- Where they are --------------------------------------------------------------------------

template <int W>
__device__ __forceinline__ Pack<int, W> operator+(int a, const Pack<int, W>& b) {
  Pack<int, W> y;
  unrolled<W>([&](int w) { y.value[w] = a + b.value[w]; });
  return y;
}

template <int W>
__device__ __forceinline__ Pack<int, W> operator+(const Pack<int, W>& a, int b) {
  return b + a;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> operator*(T a, const Pack<T, W>& b) {
  Pack<T, W> y;
  unrolled<W>([&](int w) { y.value[w] = a * b.value[w]; });
  return y;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> operator*(const Pack<T, W>& a, const Pack<T, W>& b) {
  Pack<T, W> y;
  unrolled<W>([&](int w) { y.value[w] = a.value[w] * b.value[w]; });
  return y;
}

// sum + a * b
template <class T, int W>
__device__ __forceinline__ Pack<T, W> multiply_add(const Pack<T, W>& a, const Pack<T, W>& b,
                                                   Pack<T, W> sum) {
  unrolled<W>([&](int w) { sum.value[w] = multiply_add(a.value[w], b.value[w], sum.value[w]); });
  return sum;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> multiply_add(T a, const Pack<T, W>& b, Pack<T, W> sum) {
  unrolled<W>([&](int w) { sum.value[w] = multiply_add(a, b.value[w], sum.value[w]); });
  return sum;
}

template <int W>
__device__ __forceinline__ Pack<unsigned, W> operator/(const Pack<unsigned, W>& a, unsigned b) {
  Pack<unsigned, W> y;
  unrolled<W>([&](int w) { y.value[w] = a.value[w] / b; });
  return y;
}

template <int W>
__device__ __forceinline__ Pack<unsigned, W> operator%(const Pack<unsigned, W>& a, unsigned b) {
  Pack<unsigned, W> y;
  unrolled<W>([&](int w) { y.value[w] = a.value[w] % b; });
  return y;
}

template <int W>
__device__ __forceinline__ Pack<int, W> coordinate(const Pack<unsigned, W>& x) {
  Pack<int, W> y;
  unrolled<W>([&](int w) { y.value[w] = coordinate(x.value[w]); });
  return y;
}

// A place for each of W fibres, and whether it is to be written.
template <class T, int W>
struct Place {
  T* at[W];
  bool has[W];
};

template <class T, int W, class Offset>
__device__ __forceinline__ Place<T, W> operator+(Place<T, W> place, const Offset& offset) {
  unrolled<W>([&](int w) { place.at[w] += of_fibre(offset, w); });
  return place;
}

// The tiles of elements `e`; tile(e) points to the tile of element e.
template <class Tile, int W>
__device__ __forceinline__ auto each(const Tile& tile, const Pack<int, W>& e) {
  Place<typename Pointee<decltype(tile(0))>::type, W> place;
  unrolled<W>([&](int w) {
    place.at[w] = tile(e.value[w]);
    place.has[w] = true;
  });
  return place;
}

// The same, of those elements that there are.
template <class Tile, int W, class Slice>
__device__ __forceinline__ auto each(const Tile& tile, const Pack<int, W>& e, const Slice& slice) {
  auto place = each(tile, e);
  unrolled<W>([&](int w) { place.has[w] = slice.has(e.value[w]); });
  return place;
}

template <class T, int W>
__device__ __forceinline__ auto get(const Place<T, W>& from) {
  Pack<typename Mutable<T>::type, W> x;
  unrolled<W>([&](int w) { x.value[w] = *from.at[w]; });
  return x;
}

template <int COMPONENTS, class T, int W, class Component>
__device__ __forceinline__ auto gathered(const Place<T, W>& vector, int length,
                                         const Place<const int, W>& index,
                                         const Component& component) {
  Pack<typename Mutable<T>::type, W> x;
  unrolled<W>([&](int w) {
    x.value[w] = gathered<COMPONENTS>(vector.at[w], length, index.at[w], of_fibre(component, w));
  });
  return x;
}

// ---- Fibres of a thread ----------------------------------------------------------------------

// Which of W fibres a thread has of its own. In place of the others it goes along with the first,
// and writes nothing.
template <int W>
struct Own {
  bool has[W];
};

template <int N, int STRIDE = 0, class T, int W>
__device__ __forceinline__ auto load(const Own<W>&, const Place<T, W>& from) {
  Fibre<Pack<typename Mutable<T>::type, W>, N> x;
  unrolled<N>([&](int i) { x[i] = get(from + i * STRIDE); });
  return x;  // (N), W times
}

template <int N, int STRIDE, int COMPONENT, int COMPONENTS, class T, int W, class Component>
__device__ __forceinline__ auto load_gathered(const Own<W>&, const Place<T, W>& vector, int length,
                                              const Place<const int, W>& index,
                                              const Component& component) {
  Fibre<Pack<typename Mutable<T>::type, W>, N> x;
  unrolled<N>([&](int i) {
    x[i] = gathered<COMPONENTS>(vector, length, index + i * STRIDE, component + i * COMPONENT);
  });
  return x;  // (N), W times
}

template <class T, int W>
__device__ __forceinline__ void put(const Own<W>& own, const Place<T, W>& to, const Pack<T, W>& x) {
  unrolled<W>([&](int w) {
    if (own.has[w] && to.has[w]) *to.at[w] = x.value[w];
  });
}

template <int STRIDE = 0, class T, int W, int N>
__device__ __forceinline__ void store(const Own<W>& own, const Place<T, W>& to,
                                      const Fibre<Pack<T, W>, N>& x) {
  unrolled<W>([&](int w) {
    if (own.has[w] && to.has[w]) {
      unrolled<N>([&](int i) { to.at[w][i * STRIDE] = x[i].value[w]; });  // (N)
    }
  });
}

// Calls body(own, i, j, ...) for every line of EXTENTS, W at a time, spread over THREADS threads.
// Those of neighbours lie side by side, as if each had one.
template <int THREADS, int W, int... EXTENTS, class Body>
__device__ __forceinline__ void packs(int thread, const Body& body) {
  constexpr int count = Lines<EXTENTS...>::count;
  const auto visit = [&](unsigned first) {
    Own<W> own;
    Pack<unsigned, W> line;
    unrolled<W>([&](int w) {
      const unsigned at = first + w * THREADS;
      own.has[w] = count % (THREADS * W) == 0 || at < count;
      line.value[w] = own.has[w] ? at : first;
    });
    Lines<EXTENTS...>::visit(line, body, own);
  };
  if constexpr (count <= THREADS * W) {
    if (count >= THREADS || thread < count) visit(thread);
  } else {
#pragma unroll 1
    for (unsigned first = thread; first < count; first += THREADS * W) visit(first);
  }
}

}  // namespace jaxmagma
