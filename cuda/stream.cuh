// Rows of a tile that the copy engine brings to each warp just before its quads need them.
//
// Fibres along the fastest axis of a tile are rows that follow each other in memory: those that the
// quads of a warp have next are one piece of it, or of each of several parts of the tile. A warp
// has room for one. When it has taken its values from there, the next one comes, while it works on
// these. No warp waits for another. Where there is no copy engine, lanes copy what they need.
#pragma once

#include "fetch.cuh"
#include "quad.cuh"

namespace jaxmagma {

// Of LINES rows of N values, for quads that have W of them at a time; PARTS are where parts of the
// tile begin in it. Tiles have even sizes, so that they begin with whole groups of 16 bytes.
template <class T, int THREADS, int W, int SPREAD, int LINES, int N, int... PARTS>
struct Stream {
  static_assert(sizeof(T) == 8, "two values are a group");
  static_assert(SPREAD < 4 || W % 2 == 0, "a warp has whole pairs of octets");
  static constexpr int kRows = 8 * W, kPart = kRows * N + 2, kWarp = sizeof...(PARTS) * kPart;
  static constexpr int kOctets = octets_of<SPREAD>(LINES), kStep = THREADS / 32 * W;

  int thread;
  T* room;
  Arrival* arrived;
  unsigned phase;
  int octet;        // of the piece that is there, or comes
  const T* source;  // of this piece

  __device__ __forceinline__ Stream(T* shared, Arrival* arrivals, int thread)
      : thread(thread),
        room(shared + thread / 32 * kWarp),
        arrived(arrivals + thread / 32),
        phase(0),
        octet(0),
        source(nullptr) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (thread % 32 == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(arrived)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // Brings the first piece of a tile.
  __device__ __forceinline__ void start(const T* tile) { bring(tile, thread / 32 * W); }

  // Before the first lines of a tile.
  __device__ __forceinline__ void begin() { octet = thread / 32 * W; }

  // Until the piece is there.
  __device__ __forceinline__ void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    jaxmagma::wait<32>(*arrived, phase);
#else
    int number = 0;
    (copy(room + number++ * kPart + PARTS % 2, source + PARTS), ...);
    __syncwarp();
#endif
  }

  // The rows of the lane's quad, in a part of the piece.
  template <int NUMBER>
  __device__ __forceinline__ Place<const T, W> part() const {
    constexpr int begins[] = {PARTS...};
    Place<const T, W> place;
#pragma unroll
    for (int w = 0; w < W; ++w) {
      const int row = line_of<SPREAD>(w, thread % 32 / 4);
      place.at[w] = room + NUMBER * kPart + begins[NUMBER] % 2 + row * N;
      place.has[w] = true;
    }
    return place;
  }

  // Brings the piece after this one, or the first one of another tile, if there is one.
  __device__ __forceinline__ void next(const T* tile, const T* other) {
    __syncwarp();
    phase ^= 1;
    octet += kStep;
    if (octet < kOctets) {
      bring(tile, octet);
    } else if (other != nullptr) {
      start(other);
    }
  }

  __device__ __forceinline__ void bring(const T* tile, int first) {
    source = tile + first * (8 * N);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (thread % 32 == 0 && first < kOctets) {
      const int count = values(first);
      const unsigned barrier = in_shared(arrived);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"((0 + ... + bytes(count, PARTS % 2)))
                   : "memory");
      int number = 0;
      (bring_part(room + number++ * kPart, source + PARTS - PARTS % 2, bytes(count, PARTS % 2),
                  barrier),
       ...);
    }
#endif
  }

  // Values of each part in the piece that begins with an octet.
  __device__ static __forceinline__ int values(int first) {
    const int left = LINES - 8 * first;
    return (left < kRows ? left : kRows) * N;
  }

  // Whole groups: the value before those of a part may come along, and the one after them.
  __device__ static __forceinline__ int bytes(int count, int head) {
    return (count + head + 1) / 2 * 16;
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ static
      __forceinline__ void bring_part(T* to, const T* from, int size, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(in_shared(to)),
        "l"(from), "r"(size), "r"(barrier)
        : "memory");
  }
#else
  __device__ __forceinline__ void copy(T* to, const T* from) const {
    for (int i = thread % 32; i < values(octet); i += 32) to[i] = from[i];
  }
#endif
};

}  // namespace jaxmagma
