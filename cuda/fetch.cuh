// Tiles that the copy engine brings to shared memory while threads do other work.
//
// It moves whole groups of 16 bytes between places that are multiples of 16. A tile of values of 8
// bytes may begin in the middle of one: then it lies in shared memory as it does in global memory,
// one value later, and the values beside it come along. Where an array ends, threads bring what is
// less than a group; where there is no such engine, all. Each tile comes by itself, or those of all
// elements come together.
#pragma once

#include "batch.cuh"
#include "tile.cuh"

namespace jaxmagma {

// That a tile has arrived.
using Arrival = unsigned long long;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Which value of its group that is.
template <class T>
__device__ __forceinline__ int in_group(const T* from) {
  static_assert(16 % sizeof(T) == 0, "a group has whole values");
  return static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / sizeof(T));
}

// Where in shared memory the tile is that is `from` there in global memory.
template <class T>
__device__ __forceinline__ T* fetched(T* to, const T* from) {
  return to + in_group(from);
}

__device__ __forceinline__ unsigned in_shared(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Before the first fetch, for COUNT operands of all elements.
template <int THREADS, int ELEMENTS, int COUNT>
__device__ __forceinline__ void prepare(int thread, Arrival* arrived) {
  if (thread == 0) {
    // As many threads as there are elements bring their tiles, or all.
    constexpr int kBringing = ELEMENTS < THREADS ? ELEMENTS : THREADS;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(arrived + n)),
                   "r"(kBringing)
                   : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sync<THREADS>();
}

// Has the engine bring `size` values. It brings whole groups: those that they begin and end in
// with what is beside them `inside` an array, else those between, and the thread brings the rest.
template <class T>
__device__ __forceinline__ void bring(unsigned barrier, T* to, const T* from, int size,
                                      bool inside) {
  constexpr int kGroup = 16 / sizeof(T);
  const int before = in_group(from);
  int begin = -before, end = (before + size + kGroup - 1) / kGroup * kGroup - before;
  if (!inside) {
    if (before) begin += kGroup;
    if (end > size) end -= kGroup;
    if (begin >= end) begin = end = size;
  }
  const int bytes = (end - begin) * static_cast<int>(sizeof(T));
  if (bytes > 0) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(in_shared(to + begin)),
        "l"(from + begin), "r"(bytes), "r"(barrier)
        : "memory");
  }
  for (int i = 0; i < begin; ++i) to[i] = from[i];
  for (int i = end; i < size; ++i) to[i] = from[i];
}

// Brings the tiles from(e) to to(e), SIZE values each, for all elements.
template <int THREADS, int ELEMENTS, int SIZE, class To, class From>
__device__ __forceinline__ void fetch(int thread, Arrival& arrived, const To& to, const From& from,
                                      bool inside) {
  constexpr int kGroup = 16 / sizeof(*from(0));
  constexpr bool kRagged = SIZE % kGroup != 0;  // else only what begins between groups is
  static_assert(kGroup <= 2, "two values are a group, or one");
  if (thread >= ELEMENTS) return;
  const unsigned barrier = in_shared(&arrived);
  // What threads have done there before comes first.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll 1
  for (int e = thread; e < ELEMENTS; e += THREADS) {
    bring(barrier, to(e), from(e), SIZE, kRagged && inside);
  }
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Brings the tiles of a slice, SIZE values each, which follow each other: one thread does.
template <int THREADS, int SIZE, class T, class Slice>
__device__ __forceinline__ void fetch_slice(int thread, Arrival& arrived, T* to, const T* from,
                                            const Slice& slice, bool inside) {
  if (thread != 0) return;
  const unsigned barrier = in_shared(&arrived);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  // Inside of an array slices have all their elements.
  bring(barrier, to, from, (inside ? Slice::elements : slice.last + 1) * SIZE, inside);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Until the fetch number `phase`, even or odd, has arrived.
template <int THREADS>
__device__ __forceinline__ void wait(Arrival& arrived, unsigned phase) {
  unsigned done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(in_shared(&arrived)), "r"(phase)
        : "memory");
  }
}

#else

template <class T>
__device__ __forceinline__ T* fetched(T* to, const T*) {
  return to;
}

template <int THREADS, int ELEMENTS, int COUNT>
__device__ __forceinline__ void prepare(int, Arrival*) {}

template <int THREADS, int ELEMENTS, int SIZE, class To, class From>
__device__ __forceinline__ void fetch(int thread, Arrival&, const To& to, const From& from, bool) {
  values<THREADS, ELEMENTS, SIZE>(thread, [&](int e, int i) { to(e)[i] = from(e)[i]; });
}

template <int THREADS, int SIZE, class T, class Slice>
__device__ __forceinline__ void fetch_slice(int thread, Arrival&, T* to, const T* from,
                                            const Slice& slice, bool) {
  values<THREADS, Slice::elements, SIZE>(thread, [&](int e, int i) {
    if (slice.has(e)) to[e * SIZE + i] = from[e * SIZE + i];
  });
}

template <int THREADS>
__device__ __forceinline__ void wait(Arrival&, unsigned) {
  sync<THREADS>();
}

#endif

}  // namespace jaxmagma
