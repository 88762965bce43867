// The kernel of every size, to be instantiated for one type in each compilation unit.
#pragma once

#include "bgemm_kernels.h"

namespace jaxmagma {

template <class T, int N>
Bgemm MakeBgemm() {
  using Shape = KernelShape<T, N>;
  return {reinterpret_cast<const void*>(&BgemmKernel<T, N>), Shape::threads, Shape::elements,
          Shape::bytes};
}

template <class T, int... SIZES>
const Bgemm& BgemmOf(int size, std::integer_sequence<int, SIZES...>) {
  static const Bgemm table[] = {MakeBgemm<T, SIZES + 1>()...};
  return table[size - 1];
}

template <class T>
const Bgemm& GetBgemm(int size) {
  return BgemmOf<T>(size, std::make_integer_sequence<int, kMostBgemm>());
}

}  // namespace jaxmagma
