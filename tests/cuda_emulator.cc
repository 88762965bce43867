// The threads, barriers and copies of the emulator, and a call of a generated kernel.
#include "cuda_emulator.h"

#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "launch.h"
#include "reduce.cuh"

Index threadIdx, blockIdx, gridDim;
alignas(16) unsigned char memory[256 << 10];

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

static void Start() {
  body();
  threads[threadIdx.x].done = true;
}

static void Barrier() {
  const unsigned self = threadIdx.x;
  swapcontext(&threads[self].context, &scheduler);
  threadIdx.x = self;
}

void Meet(size_t count) {
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

void MeetAll() {
  Meet(threads.size());
}

struct Copies {
  struct One {
    void* to;
    unsigned char value[kMostCopied];
    size_t size;
  };
  std::vector<std::vector<One>> committed;
  std::vector<One> open;
};
static Copies copies[1 << 10];  // of the threads of a block

void CopyLater(void* to, const void* value, size_t size) {
  Copies::One one{to, {}, size};
  std::memcpy(one.value, value, size);
  copies[threadIdx.x].open.push_back(one);
}

void CommitCopies() {
  Copies& own = copies[threadIdx.x];
  own.committed.push_back(std::move(own.open));
  own.open.clear();
}

void AwaitCopies(size_t later) {
  auto& committed = copies[threadIdx.x].committed;
  while (committed.size() > later) {
    for (const Copies::One& x : committed.front()) std::memcpy(x.to, x.value, x.size);
    committed.erase(committed.begin());
  }
}

template <class T>
void MultiplyAddOfWarp(T (&c)[2], T a, T b) {
  struct Pair {
    T a, b;
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

void MultiplyAdd(double (&c)[2], double a, double b) {
  MultiplyAddOfWarp(c, a, b);
}

void MultiplyAdd(float (&c)[2], float a, float b) {
  const auto cut = [](float x) { return __int_as_float(__float_as_int(x) & ~0x1fff); };
  MultiplyAddOfWarp(c, cut(a), cut(b));
}

void Launch(int64_t blocks, int64_t count, std::function<void()> kernel) {
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

// Those of a generated kernel, which cuda_emulator.py writes. Other libraries have none.
extern "C" {
__attribute__((weak)) void call_kernel(const int64_t* batch, void* const* p, const int* lengths);
__attribute__((weak)) void call_finish(void* partial, void* sum, int64_t values, int64_t chunks,
                                       int64_t size);
}

// As if a device had room for two blocks at a time.
extern "C" const char* run_kernel(const int64_t* order, const int64_t* pointers,
                                  const int64_t* sums, int64_t elements, int64_t threads,
                                  int64_t resident, void* const* data, const int64_t* const* dims,
                                  const int64_t* ranks, const int64_t* itemsizes, int64_t count) {
  using namespace jaxmagma;
  Signature signature;
  signature.elements = elements;
  signature.kept = order[1];
  signature.order.assign(order + 2, order + 1 + order[0]);
  for (int64_t at = 1; at <= pointers[0]; at += 5 + pointers[at + 4]) {
    const int64_t* p = pointers + at;
    signature.pointers.push_back({p[0], p[1], p[2], p[3] != 0, {p + 5, p + 5 + p[4]}});
  }
  for (int64_t at = 1; at <= sums[0]; at += 3) {
    signature.sums.push_back({sums[at], sums[at + 1], sums[at + 2]});
  }
  std::vector<Array> arrays;
  for (int64_t n = 0; n < count; ++n) {
    arrays.push_back({data[n], dims[n], static_cast<size_t>(ranks[n]), itemsizes[n]});
  }
  Launch launch;
  static std::string error;
  signature.resident = resident;
  error = Prepare(signature, arrays, 2, launch);
  if (!error.empty()) return error.c_str();
  emulator::Launch(launch.blocks, threads, [&] {
    call_kernel(launch.batch.data(), launch.pointers.data(), launch.lengths.data());
  });
  for (const auto& sum : signature.sums) {
    const int64_t values = launch.outer * sum.size;
    emulator::Launch((values + kTotals - 1) / kTotals, kTotalThreads, [&] {
      call_finish(data[sum.workspace], data[sum.result], values, launch.chunks, sum.size);
    });
  }
  return nullptr;
}
