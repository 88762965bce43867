// Tiles that the copy engine brings to shared memory, while threads do other work.
//
// It moves whole groups of 16 bytes between places that are multiples of 16. A tile of values of 8
// bytes may begin in the middle of one: then it lies in shared memory as it does in global memory,
// one value later, and threads bring what is at its ends. Where there is no such engine they bring
// all of it. A tile comes as a whole, or in parts of an even size that are apart in shared memory.
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
  static_assert(sizeof(T) == 8 || sizeof(T) == 16, "two values are a group, or one");
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

// Before the first fetch, for tiles of all elements that come in PARTS each.
template <int THREADS, int ELEMENTS, int... PARTS>
__device__ __forceinline__ void prepare(int thread, Arrival* arrived) {
  if (thread == 0) {
    const auto init = [&](int parts) {
      // As many threads as there are parts bring them, or all.
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(in_shared(arrived++)),
                   "r"(parts < THREADS ? parts : THREADS)
                   : "memory");
    };
    (init(ELEMENTS * PARTS), ...);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sync<THREADS>();
}

// Brings the tiles from(e) to to(e), for all elements: PARTS of SIZE values, STRIDE apart there.
template <int THREADS, int ELEMENTS, int PARTS, int SIZE, int STRIDE, class To, class From>
__device__ __forceinline__ void fetch(int thread, Arrival& arrived, const To& to,
                                      const From& from) {
  if (thread >= ELEMENTS * PARTS) return;
  const unsigned barrier = in_shared(&arrived);
  // What threads have done there before comes first.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll 1
  for (int n = thread; n < ELEMENTS * PARTS; n += THREADS) {
    const int e = n / PARTS, part = n % PARTS;
    const auto* const source = from(e) + part * SIZE;
    auto* const target = to(e) + part * STRIDE;
    constexpr int kValue = sizeof(*source), kGroup = 16 / kValue;
    static_assert(PARTS == 1 || (SIZE % kGroup == 0 && STRIDE % kGroup == 0),
                  "all parts begin in the same half of a group");
    const int head = in_group(source), tail = (SIZE - head) % kGroup;
    const int bytes = (SIZE - head - tail) * kValue;
    if (bytes > 0) {
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(in_shared(target + head)),
          "l"(source + head), "r"(bytes), "r"(barrier)
          : "memory");
    }
    if (head) target[0] = source[0];
    if (tail) target[SIZE - 1] = source[SIZE - 1];
  }
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

template <int THREADS, int ELEMENTS, int... PARTS>
__device__ __forceinline__ void prepare(int, Arrival*) {}

template <int THREADS, int ELEMENTS, int PARTS, int SIZE, int STRIDE, class To, class From>
__device__ __forceinline__ void fetch(int thread, Arrival&, const To& to, const From& from) {
  values<THREADS, ELEMENTS, PARTS * SIZE>(
      thread, [&](int e, int i) { to(e)[i / SIZE * STRIDE + i % SIZE] = from(e)[i]; });
}

template <int THREADS>
__device__ __forceinline__ void wait(Arrival&, unsigned) {
  sync<THREADS>();
}

#endif

}  // namespace jaxmagma
