// The executor on plans that Python has written (tests/cpu_programs.py) and on what chance makes of
// them: whatever the numbers, an error or a result, with the memory of nobody else read or written,
// on several threads at once, and with memory that runs out anywhere. For sanitizers to watch.
//
// cpu_plans FILE MUTATIONS SEED

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_pool.h"
#include "executor.h"
#include "plan.h"

// So many allocations more succeed, on all threads together; negative: all.
static std::atomic<int64_t> allocations_left{-1};

static void* Allocate(size_t bytes, size_t alignment) {
  if (allocations_left >= 0 && allocations_left.fetch_sub(1) <= 0) {
    allocations_left = 0;
    throw std::bad_alloc();
  }
  void* const p = alignment ? std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment)
                            : std::malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}
// Not inlined: GCC would take free() for the wrong end of what `new` made.
[[gnu::noinline]] void* operator new(size_t bytes) {
  return Allocate(bytes, 0);
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return Allocate(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace jaxmagma {
namespace {

using Integers = std::vector<int64_t>;
using Random = std::mt19937_64;

// More work or memory than this is not a matter of safety.
constexpr double kMostWork = 3e7;
constexpr int64_t kMostBytes = 64 << 20;

struct Program {
  Integers plan;
  std::vector<uint8_t> constants;
};

// Of each program, the length of the plan and the plan, the same of the constants.
std::vector<Program> Read(const char* name) {
  std::ifstream file(name, std::ios::binary);
  const auto integer = [&file] {
    int64_t x = 0;
    file.read(reinterpret_cast<char*>(&x), sizeof x);
    return x;
  };
  std::vector<Program> programs;
  while (file.peek() != std::ifstream::traits_type::eof()) {
    Program program;
    program.plan.resize(integer());
    for (int64_t& x : program.plan) x = integer();
    program.constants.resize(integer());
    for (uint8_t& x : program.constants) x = static_cast<uint8_t>(integer());
    Check(file.good(), "the file is whole");
    programs.push_back(std::move(program));
  }
  return programs;
}

// One array, exactly as long as it has to be.
struct Buffer {
  Integers dims;
  std::vector<uint8_t> bytes;

  Array array() { return {reinterpret_cast<std::byte*>(bytes.data()), dims.data(), dims.size()}; }
};

// The arrays of a call for a plan, random; empty if they would be too long.
struct Call {
  std::vector<Buffer> arguments, results;

  std::vector<Array> Arrays(std::vector<Buffer>& buffers) {
    std::vector<Array> arrays;
    for (Buffer& buffer : buffers) arrays.push_back(buffer.array());
    return arrays;
  }
  std::string Run(const Executor& executor, Helpers& helpers) {
    return executor.Run(Arrays(arguments), Arrays(results), helpers);
  }
};

bool Add(const Integers& batch, const Integers& tile, const Integers& extents, int64_t value_bytes,
         std::vector<Buffer>& buffers) {
  Buffer buffer;
  int64_t bytes = value_bytes;
  const auto append = [&](int64_t extent) {
    buffer.dims.push_back(extent);
    bytes = extent && bytes > kMostBytes / extent ? kMostBytes + 1 : bytes * extent;
    return bytes <= kMostBytes;
  };
  for (int64_t axis : batch) {
    if (!append(extents[axis])) return false;
  }
  for (int64_t extent : tile) {
    if (!append(extent)) return false;
  }
  buffer.bytes.resize(bytes);
  buffers.push_back(std::move(buffer));
  return true;
}

bool Make(const Plan& plan, const Integers& extents, Random& random, Call& call) {
  for (const Input& input : plan.inputs) {
    if (input.kind == Input::kConstant) continue;
    const bool index = input.kind == Input::kIndex;
    const int64_t bytes = index ? 4 : plan.stored_bytes();
    if (!Add(input.batch, input.tile, extents, bytes, call.arguments)) return false;
    std::vector<uint8_t>& made = call.arguments.back().bytes;
    for (size_t at = 0; at < made.size(); at += 8) {
      const uint64_t x = random();
      std::memcpy(made.data() + at, &x, std::min<size_t>(8, made.size() - at));
    }
    // Some of the indices into the vector, others anywhere.
    for (size_t at = 0; index && at < made.size(); at += 4) {
      const int32_t x = static_cast<int32_t>(random() % 8) - 2;
      if (random() % 4) std::memcpy(made.data() + at, &x, 4);
    }
  }
  for (const Output& output : plan.outputs) {
    if (!Add(output.batch, output.tile, extents, plan.stored_bytes(), call.results)) return false;
  }
  return true;
}

Integers AnyExtents(const Plan& plan, Random& random) {
  Integers extents(plan.batch_rank);
  for (int64_t& extent : extents) extent = random() % 8 ? 1 + random() % 40 : random() % 2;
  return extents;
}

double Work(const Plan& plan, const Integers& extents) {
  double elements = 128;  // a block may be computed for one element
  for (int64_t extent : extents) elements *= static_cast<double>(extent);
  double work = static_cast<double>(plan.scratch_size + plan.shared_size);
  for (const auto* steps : {&plan.steps, &plan.shared_steps}) {
    for (const Instruction& step : *steps) {
      double points = static_cast<double>(step.count * (1 + step.third));
      points *= static_cast<double>(1 + step.micros.size());
      double products = 1;
      for (const Loop& loop : step.loops) products *= static_cast<double>(loop.extent);
      const Gemm& g = step.gemm;
      work += points + products + static_cast<double>(g.rows) * g.columns * g.inner;
    }
  }
  return work * elements;
}

// Returns whether the plan was accepted and run.
bool RunAnything(const Program& program, Random& random, Helpers& helpers) {
  Plan plan;
  std::string error;
  if (!DecodePlan(program.plan.data(), program.plan.size(), program.constants.data(),
                  program.constants.size(), plan, error)) {
    Check(!error.empty(), "a plan that is declined has a reason");
    return false;
  }
  const Integers extents = AnyExtents(plan, random);
  Call call;
  if (!Make(plan, extents, random, call) || Work(plan, extents) > kMostWork) return false;
  call.Run(Executor(std::move(plan)), helpers);
  return true;
}

// Changes some of the numbers: a little, to another of them, to an extreme one, to any.
Program Mutated(const Program& program, Random& random) {
  static constexpr int64_t kExtremes[] = {-1,
                                          0,
                                          1,
                                          2,
                                          1 << 16,
                                          1 << 20,
                                          (1 << 20) + 1,
                                          int64_t{1} << 32,
                                          int64_t{1} << 48,
                                          INT64_MAX,
                                          INT64_MIN};
  Program mutated = program;
  Integers& plan = mutated.plan;
  for (uint64_t changes = 1 + random() % 3; changes > 0 && !plan.empty(); --changes) {
    int64_t& x = plan[random() % plan.size()];
    switch (random() % 8) {
      case 0:
        x = kExtremes[random() % std::size(kExtremes)];
        break;
      case 1:
        x = plan[random() % plan.size()];
        break;
      case 2:
        x = static_cast<int64_t>(random());
        break;
      case 3:
        plan.erase(plan.begin() + static_cast<ptrdiff_t>(random() % plan.size()));
        break;
      case 4:
        plan.insert(plan.begin() + static_cast<ptrdiff_t>(random() % plan.size()), random() % 4);
        break;
      default:
        x = static_cast<int64_t>(static_cast<uint64_t>(x) + random() % 9 - 4);
    }
  }
  return mutated;
}

// Enough elements for several chunks and a remainder.
Integers Extents(const Plan& plan) {
  return Integers(plan.batch_rank, plan.batch_rank > 1 ? 45 : 2003);
}

std::unique_ptr<const Executor> MakeExecutor(const Program& program) {
  Plan plan;
  std::string error;
  Check(DecodePlan(program.plan.data(), program.plan.size(), program.constants.data(),
                   program.constants.size(), plan, error),
        "a plan that Python writes is accepted");
  return std::make_unique<const Executor>(std::move(plan));
}

// Several threads run one executor on arrays of their own, and share a pool: the same bits as
// alone.
void RunAtOnce(const Executor& executor, Random& random, Helpers& pool) {
  constexpr int kThreads = 3;
  const Integers extents = Extents(executor.plan());
  Pool none(0);
  std::vector<Call> calls(kThreads), alone(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    if (!Make(executor.plan(), extents, random, calls[t])) return;
    alone[t] = calls[t];
    Check(alone[t].Run(executor, none).empty(), "it runs alone");
  }
  std::vector<std::thread> threads;
  for (Call& call : calls) {
    threads.emplace_back([&] { Check(call.Run(executor, pool).empty(), "it runs beside others"); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) {
    for (size_t o = 0; o < calls[t].results.size(); ++o) {
      Check(calls[t].results[o].bytes == alone[t].results[o].bytes, "the bits are the same");
    }
  }
}

// The first allocation that fails is each of the first ones in turn, then each but a few.
void RunOutOfMemory(const Program& program, Random& random, Pool& pool) {
  Call call;
  {
    const auto executor = MakeExecutor(program);
    if (!Make(executor->plan(), Extents(executor->plan()), random, call)) return;
  }
  bool failed = true;
  for (int64_t left = 0; failed; left += 1 + left / 20) {
    failed = false;
    allocations_left = left;
    try {
      Check(call.Run(*MakeExecutor(program), pool).empty(), "it runs");
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
  }
}

int Main(const char* file, int64_t mutations, uint64_t seed) {
  Random random(seed);
  Pool pool(3);
  const std::vector<Program> programs = Read(file);
  for (const Program& program : programs) {
    RunAtOnce(*MakeExecutor(program), random, pool);
    RunOutOfMemory(program, random, pool);
  }
  int64_t accepted = 0;
  for (int64_t i = 0; i < mutations; ++i) {
    accepted += RunAnything(Mutated(programs[i % programs.size()], random), random, pool);
  }
  std::printf("%zu plans, %lld mutations, %lld of them accepted and run\n", programs.size(),
              static_cast<long long>(mutations), static_cast<long long>(accepted));
  return 0;
}

}  // namespace
}  // namespace jaxmagma

int main(int argc, char** argv) {
  jaxmagma::Check(argc == 4, "cpu_plans FILE MUTATIONS SEED");
  return jaxmagma::Main(argv[1], std::atoll(argv[2]), std::strtoull(argv[3], nullptr, 10));
}
