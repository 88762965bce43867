// Runs a generated CUDA kernel on the CPU: a block's threads are coroutines that change over at
// barriers. Shared memory starts as NaNs, so that what is read must have been written.
// What no template needs is in cuda_emulator.cc, so that it is compiled once for all kernels.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __constant__
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;
alignas(16) extern unsigned char memory[256 << 10];

// ---- Numbers by their bits -------------------------------------------------------------------

template <class To, class From>
To SameBits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of equal size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline int __float_as_int(float x) {
  return SameBits<int>(x);
}
inline float __int_as_float(int x) {
  return SameBits<float>(x);
}
inline int __double2hiint(double x) {
  return static_cast<int>(SameBits<uint64_t>(x) >> 32);
}
inline int __double2loint(double x) {
  return static_cast<int>(SameBits<uint64_t>(x));
}
inline double __hiloint2double(int high, int low) {
  return SameBits<double>((uint64_t{static_cast<unsigned>(high)} << 32) |
                          static_cast<unsigned>(low));
}
// Roots that the library of the C language lacks.
inline double rsqrt(double x) {
  return 1 / sqrt(x);
}
inline double rcbrt(double x) {
  return 1 / cbrt(x);
}

namespace emulator {

// Waits for all of the `count` threads that this one is among.
void Meet(size_t count);
void MeetAll();

// What all lanes of this thread's warp give; they must meet again before they give something else.
template <class T>
T* Exchange(T value) {
  static T values[32][32];
  T* const own = values[threadIdx.x / 32];
  own[threadIdx.x % 32] = value;
  Meet(32);
  return own;
}

// Asynchronous copies, each as late as it may arrive: when its thread awaits it.
constexpr size_t kMostCopied = 16;
void CopyLater(void* to, const void* value, size_t size);
void CommitCopies();
void AwaitCopies(size_t later);  // until all committed ones but the last `later` have arrived

template <class T>
void CopyLater(T* to, T value) {
  static_assert(sizeof(T) <= kMostCopied, "no copy is larger");
  CopyLater(to, &value, sizeof(T));
}

// The tensor cores' product of 8 x 4 and 4 x 8 values, see cuda/quad.cuh; that of float32 is one of
// values of tf32.
void MultiplyAdd(double (&c)[2], double a, double b);
void MultiplyAdd(float (&c)[2], float a, float b);

// Runs `kernel` on every thread of `blocks` blocks, in turns from barrier to barrier.
void Launch(int64_t blocks, int64_t count, std::function<void()> kernel);

}  // namespace emulator

inline void __syncthreads() {
  emulator::MeetAll();
}
inline void __syncwarp() {
  emulator::Meet(32);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned other) {
  T* const values = emulator::Exchange(value);
  const T found = values[(threadIdx.x ^ other) % 32];
  __syncwarp();
  return found;
}
