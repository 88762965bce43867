// Runs a generated CUDA kernel on the CPU: a block's threads are coroutines that change over at
// barriers. Shared memory starts as NaNs, so that what is read must have been written.
#pragma once

#include <math.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

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
static Index threadIdx, blockIdx, gridDim;
alignas(16) static unsigned char memory[256 << 10];

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
inline double __hiloint2double(int high, int low) {
  return SameBits<double>((uint64_t{static_cast<unsigned>(high)} << 32) |
                          static_cast<unsigned>(low));
}

namespace emulator {

constexpr size_t kStackBytes = 256 << 10;

struct Thread {
  ucontext_t context;
  // Not initialised: what no call reaches takes no memory.
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
};

static ucontext_t scheduler;
static std::vector<Thread> threads;
static std::function<void()> body;

inline void Start() {
  body();
  threads[threadIdx.x].done = true;
}

inline void Barrier() {
  const unsigned self = threadIdx.x;
  swapcontext(&threads[self].context, &scheduler);
  threadIdx.x = self;
}

// Waits for all of the `count` threads that this one is among.
inline void Meet(size_t count) {
  static std::vector<size_t> arrived(1 << 11), met(1 << 11);
  const size_t group = count == threads.size() && count != 32 ? 1 << 10 : threadIdx.x / 32;
  const size_t before = met[group];
  if (++arrived[group] == count) {
    arrived[group] = 0;
    ++met[group];
  } else {
    while (met[group] == before) Barrier();
  }
}

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
struct Copies {
  struct One {
    void* to;
    unsigned char value[16];
    size_t size;
  };
  std::vector<std::vector<One>> committed;
  std::vector<One> open;
};
static Copies copies[1 << 10];  // of the threads of a block

template <class T>
void CopyLater(T* to, T value) {
  Copies::One one{to, {}, sizeof(T)};
  static_assert(sizeof(T) <= sizeof(one.value), "no copy is larger");
  std::memcpy(one.value, &value, sizeof(T));
  copies[threadIdx.x].open.push_back(one);
}

inline void CommitCopies() {
  Copies& own = copies[threadIdx.x];
  own.committed.push_back(std::move(own.open));
  own.open.clear();
}

// Until all committed ones but the last `later` have arrived.
inline void AwaitCopies(size_t later) {
  auto& committed = copies[threadIdx.x].committed;
  while (committed.size() > later) {
    for (const Copies::One& x : committed.front()) std::memcpy(x.to, x.value, x.size);
    committed.erase(committed.begin());
  }
}

// The tensor cores' product of 8 x 4 and 4 x 8 values, see cuda/quad.cuh.
inline void MultiplyAdd(double (&c)[2], double a, double b) {
  struct Pair {
    double a, b;
  };
  const Pair* const given = Exchange(Pair{a, b});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned k = 0; k < 4; ++k) {
    for (unsigned j = 0; j < 2; ++j) {
      c[j] += given[lane / 4 * 4 + k].a * given[(2 * (lane % 4) + j) * 4 + k].b;
    }
  }
  Meet(32);
}

// Runs `kernel` on every thread of `blocks` blocks, in turns from barrier to barrier.
inline void Launch(int64_t blocks, int64_t count, std::function<void()> kernel) {
  body = kernel;
  threads.resize(count);
  gridDim.x = static_cast<unsigned>(blocks);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::memset(memory, 0xff, sizeof(memory));
    for (Thread& thread : threads) {
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &scheduler;
      thread.done = false;
      makecontext(&thread.context, Start, 0);
    }
    for (int64_t left = count; left > 0;) {
      for (int64_t n = 0; n < count; ++n) {
        if (threads[n].done) continue;
        threadIdx.x = static_cast<unsigned>(n);
        swapcontext(&scheduler, &threads[n].context);
        left -= threads[n].done;
      }
    }
  }
  threads.clear();  // every kernel is a library that stays loaded
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::Meet(emulator::threads.size());
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
