// Pointwise functions of single values; of several fibres side by side, of each of them.
#pragma once

#include "functions.cuh"
#include "pack.cuh"

namespace jaxmagma {

// The number of values side by side, 0 if there is one alone.
template <class T>
struct Width {
  static constexpr int value = 0;
};
template <class T, int W>
struct Width<Pack<T, W>> {
  static constexpr int value = W;
};

template <class Function, class... Operands>
__device__ __forceinline__ auto map(Function function, const Operands&... a) {
  constexpr int W = (0 | ... | Width<Operands>::value);
  if constexpr (W == 0) {
    return function(a...);
  } else {
    Pack<decltype(function(of_fibre(a, 0)...)), W> y;
    unrolled<W>([&](int w) { y.value[w] = function(of_fibre(a, w)...); });
    return y;
  }
}

}  // namespace jaxmagma
