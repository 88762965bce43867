// Tiles of a warp's panel on their way between global and shared memory, in whole rows of memory:
// those of elements to come while lanes work on others.
#pragma once

#include "gather.cuh"

namespace jaxmagma {

// Brings the tiles of PANEL elements, SIZE values each, to where elements are STRIDE values apart.
template <int PANEL, int SIZE, int STRIDE, class T, class Tile>
__device__ __forceinline__ void bring(int thread, T* to, const Tile& tile) {
#pragma unroll 4
  for (int n = thread % 32; n < PANEL * SIZE; n += 32) {
    const int e = n / SIZE, i = n % SIZE;
    copy(to + e * STRIDE + i, tile(e) + i, true);
  }
}

// The other way round, for those elements of a slice that there are.
template <int PANEL, int SIZE, int STRIDE, class T, class Tile, class Slice>
__device__ __forceinline__ void send(int thread, const T* from, const Tile& tile,
                                     const Slice& slice) {
#pragma unroll 4
  for (int n = thread % 32; n < PANEL * SIZE; n += 32) {
    const int e = n / SIZE, i = n % SIZE;
    if (slice.has(e)) tile(e)[i] = from[e * STRIDE + i];
  }
}

// What a lane has brought since the last time is a stage.
__device__ __forceinline__ void commit_stage() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulator::CommitCopies();
#endif
}

// Until all stages of the warp but the last LATER ones have arrived.
template <int LATER>
__device__ __forceinline__ void await_stages() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#else
  emulator::AwaitCopies(LATER);
#endif
  __syncwarp();
}

}  // namespace jaxmagma
