// Tiles of a warp's panel on their way between global and shared memory, in whole rows of memory:
// those of elements to come while lanes work on others.
#pragma once

#include "gather.cuh"

namespace jaxmagma {

// Calls body(own, others, i) for what a lane moves of those of PANEL elements, SIZE values each,
// that a slice has: value i of element own + others. A warp moves as many whole elements at a time
// as it has lanes for; `own` is which one of these, so that the next ones are a constant distance
// further.
template <int PANEL, int SIZE, class Slice, class Body>
__device__ __forceinline__ void moved(int thread, const Slice& slice, const Body& body) {
  constexpr int kTogether = SIZE < 32 ? 32 / SIZE : 1;
  const int lane = thread % 32, own = SIZE < 32 ? lane / SIZE : 0, first = lane - own * SIZE;
  if (own >= kTogether) return;
  const int last = slice.last - own;
#pragma unroll
  for (int others = 0; others < PANEL; others += kTogether) {
    if (others > last) continue;
#pragma unroll
    for (int i = 0; i < SIZE; i += 32) {
      if (i + 32 <= SIZE || first + i < SIZE) body(own, others, first + i);
    }
  }
}

// The tile of an element: of tiles that follow each other, or of those that a function finds.
template <int SIZE, class T>
__device__ __forceinline__ T* tile_of(T* tiles, int own, int others) {
  return tiles + own * SIZE + others * SIZE;
}
template <int SIZE, class Tile>
__device__ __forceinline__ auto tile_of(const Tile& tile, int own, int others) {
  return tile(own + others);
}

// Brings tiles to where elements are STRIDE values apart.
template <int PANEL, int SIZE, int STRIDE, class T, class Tiles, class Slice>
__device__ __forceinline__ void bring(int thread, T* to, const Tiles& tiles, const Slice& slice) {
  moved<PANEL, SIZE>(thread, slice, [&](int own, int others, int i) {
    copy(tile_of<STRIDE>(to, own, others) + i, tile_of<SIZE>(tiles, own, others) + i, true);
  });
}

// The other way round.
template <int PANEL, int SIZE, int STRIDE, class T, class Tiles, class Slice>
__device__ __forceinline__ void send(int thread, const T* from, const Tiles& tiles,
                                     const Slice& slice) {
  moved<PANEL, SIZE>(thread, slice, [&](int own, int others, int i) {
    tile_of<SIZE>(tiles, own, others)[i] = tile_of<STRIDE>(from, own, others)[i];
  });
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
