// Runs a generated CUDA kernel on the CPU: a block's threads are coroutines that change over at
// barriers. Shared memory starts as NaNs, so that what is read must have been written.
#pragma once

#include <math.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
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
static Index threadIdx, blockIdx;
alignas(16) static unsigned char memory[256 << 10];

namespace emulator {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
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

// Runs `kernel` on every thread of `blocks` blocks, in turns from barrier to barrier.
inline void Launch(int64_t blocks, int64_t count, std::function<void()> kernel) {
  body = kernel;
  threads.resize(count);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::memset(memory, 0xff, sizeof(memory));
    for (Thread& thread : threads) {
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
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
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::Barrier();
}
inline void __syncwarp() {
  emulator::Barrier();
}
