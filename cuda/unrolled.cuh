// Loops that are unrolled before the compiler begins.
//
// Every pass over a kernel looks at its loops, and unrolls them late: kernels with thousands of
// short ones took it several times as long as the same kernels without any.
#pragma once

namespace jaxmagma {

// body(0), body(1), ..., body(N - 1)
template <int N, int FIRST = 0, class Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (FIRST < N) {
    body(FIRST);
    unrolled<N, FIRST + 1>(body);
  }
}

}  // namespace jaxmagma
