// Pointwise functions of single values; of several elements side by side, of each of them.
#pragma once

#include "functions.cuh"
#include "tile.cuh"

namespace jaxmagma {

// The number of elements side by side, 0 if there is one alone.
template <class T>
struct Width {
  static constexpr int value = 0;
};
template <class T, int W>
struct Width<Pack<T, W>> {
  static constexpr int value = W;
};

template <class T>
__device__ __forceinline__ T of_element(const T& a, int) {
  return a;
}
template <class T, int W>
__device__ __forceinline__ T of_element(const Pack<T, W>& a, int w) {
  return a.value[w];
}

template <class Function, class... Operands>
__device__ __forceinline__ auto map(Function function, const Operands&... a) {
  constexpr int W = (0 | ... | Width<Operands>::value);
  if constexpr (W == 0) {
    return function(a...);
  } else {
    Pack<decltype(function(of_element(a, 0)...)), W> y;
#pragma unroll
    for (int w = 0; w < W; ++w) y.value[w] = function(of_element(a, w)...);
    return y;
  }
}

}  // namespace jaxmagma
