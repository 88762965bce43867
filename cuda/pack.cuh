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
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a.value[w] + b.value[w];
  return y;
}

template <class T, int W>
__device__ __forceinline__ Pack<T, W> operator-(const Pack<T, W>& a, const Pack<T, W>& b) {
  Pack<T, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a.value[w] - b.value[w];
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
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a + b.value[w];
  return y;
}

template <int W>
__device__ __forceinline__ Pack<int, W> operator+(const Pack<int, W>& a, int b) {
  return b + a;
}

template <int W>
__device__ __forceinline__ Pack<int, W> operator*(int a, const Pack<int, W>& b) {
  Pack<int, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a * b.value[w];
  return y;
}

template <int W>
__device__ __forceinline__ Pack<unsigned, W> operator/(const Pack<unsigned, W>& a, unsigned b) {
  Pack<unsigned, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a.value[w] / b;
  return y;
}

template <int W>
__device__ __forceinline__ Pack<unsigned, W> operator%(const Pack<unsigned, W>& a, unsigned b) {
  Pack<unsigned, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = a.value[w] % b;
  return y;
}

template <int W>
__device__ __forceinline__ Pack<int, W> coordinate(const Pack<unsigned, W>& x) {
  Pack<int, W> y;
#pragma unroll
  for (int w = 0; w < W; ++w) y.value[w] = coordinate(x.value[w]);
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
#pragma unroll
  for (int w = 0; w < W; ++w) place.at[w] += of_fibre(offset, w);
  return place;
}

// The tiles of elements `e`; tile(e) points to the tile of element e.
template <class Tile, int W>
__device__ __forceinline__ auto each(const Tile& tile, const Pack<int, W>& e) {
  Place<typename Pointee<decltype(tile(0))>::type, W> place;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    place.at[w] = tile(e.value[w]);
    place.has[w] = true;
  }
  return place;
}

// The same, of those elements that there are.
template <class Tile, int W, class Slice>
__device__ __forceinline__ auto each(const Tile& tile, const Pack<int, W>& e, const Slice& slice) {
  auto place = each(tile, e);
#pragma unroll
  for (int w = 0; w < W; ++w) place.has[w] = slice.has(e.value[w]);
  return place;
}

template <class T, int W>
__device__ __forceinline__ auto get(const Place<T, W>& from) {
  Pack<typename Mutable<T>::type, W> x;
#pragma unroll
  for (int w = 0; w < W; ++w) x.value[w] = *from.at[w];
  return x;
}

template <int COMPONENTS, class T, int W, class Component>
__device__ __forceinline__ auto gathered(const Place<T, W>& vector,
                                         const Place<const int, W>& index,
                                         const Component& component) {
  Pack<typename Mutable<T>::type, W> x;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    x.value[w] = gathered<COMPONENTS>(vector.at[w], index.at[w], of_fibre(component, w));
  }
  return x;
}

}  // namespace jaxmagma
