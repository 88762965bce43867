// Gathered values that come to shared memory while threads do other work.
#pragma once

#include "tile.cuh"

namespace jaxmagma {

// What a thread knows of the next tiles of SIZE places in a vector: every THREADS-th of them.
template <int THREADS, int ELEMENTS, int SIZE>
struct Places {
  static constexpr int all = ELEMENTS * SIZE;
  static constexpr int count = (all + THREADS - 1) / THREADS;
  int at[count];
};

template <int THREADS, int ELEMENTS, int SIZE, class Index>
__device__ __forceinline__ Places<THREADS, ELEMENTS, SIZE> places(int thread, const Index& index) {
  using Some = Places<THREADS, ELEMENTS, SIZE>;
  Some x;
#pragma unroll
  for (int n = 0; n < Some::count; ++n) {
    const int i = thread + n * THREADS < Some::all ? thread + n * THREADS : Some::all - 1;
    x.at[n] = index(i / SIZE)[i % SIZE];
  }
  return x;
}

// One value, or zero if it is not `present`. Until `await_copies` nobody may read it.
template <class T>
__device__ __forceinline__ void copy(T* to, const T* from, bool present) {
#ifdef __CUDACC__
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "n"(sizeof(T)), "r"(present ? static_cast<int>(sizeof(T)) : 0)
               : "memory");
#else
  emulator::CopyLater(to, present ? *from : T{});
#endif
}

// Brings what vectors of COMPONENTS for each place have there to the tiles.
template <int COMPONENTS, int THREADS, int ELEMENTS, int SIZE, class To, class From>
__device__ __forceinline__ void gather(int thread, const To& to, const From& from, int length,
                                       const Places<THREADS, ELEMENTS, SIZE>& places) {
  using Some = Places<THREADS, ELEMENTS, SIZE>;
#pragma unroll
  for (int n = 0; n < Some::count; ++n) {
    const int i = thread + n * THREADS;
    if (i < Some::all) {
      const bool present = inside(places.at[n], length);
      const long long at = present ? places.at[n] : 0;
      const auto* const source = from(i / SIZE) + at * COMPONENTS;
      auto* const target = to(i / SIZE) + i % SIZE * COMPONENTS;
#pragma unroll
      for (int c = 0; c < COMPONENTS; ++c) copy(target + c, source + c, present);
    }
  }
}

// Until everything that threads copy has arrived.
template <int THREADS>
__device__ __forceinline__ void await_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  emulator::CommitCopies();
  emulator::AwaitCopies(0);
#endif
  sync<THREADS>();
}

}  // namespace jaxmagma
