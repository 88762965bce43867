// ForEachChunk of cpu/threads.h: every chunk once, and no failure of anyone, anywhere, hangs it, is
// lost, or leaves a helper with what its caller has freed. Sanitizers see what an assertion cannot.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_pool.h"
#include "threads.h"

namespace jaxmagma {
namespace {

// Helpers that are busy until all is over.
struct Late : Helpers {
  std::vector<std::function<void()>> tasks;
  int64_t count() const override { return 5; }
  void Schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }
};

// A pool whose queue is full: who schedules has to work.
struct Inline : Helpers {
  int64_t count() const override { return 3; }
  void Schedule(std::function<void()> task) override { task(); }
};

// Fails to schedule the last of its tasks.
struct Failing : Helpers {
  Pool& pool;
  int64_t scheduled = 0;
  explicit Failing(Pool& pool) : pool(pool) {}
  int64_t count() const override { return pool.count(); }
  void Schedule(std::function<void()> task) override {
    if (++scheduled == count() - 1) throw std::bad_alloc();
    pool.Schedule(std::move(task));
  }
};

// Which call of `make` or of a worker throws, and what.
struct Failure {
  enum Where { kNowhere, kMake, kWorker } where = kNowhere;
  int64_t at = 0;
  int what = 0;

  [[noreturn]] void Throw() const {
    if (what == 0) throw std::bad_alloc();
    if (what == 1) throw std::runtime_error("injected");
    throw 17;  // not an exception of the library
  }
};

// Runs chunks that write to memory which is freed as soon as ForEachChunk is left. Returns what it
// threw: 0 to 2 as in Failure, or -1.
int Run(Helpers& helpers, int64_t chunks, const Failure& failure) {
  struct State {
    std::vector<int> done;
    std::atomic<int64_t> made{0}, worked{0};
  };
  const auto state = std::make_unique<State>();
  state->done.resize(chunks);
  const auto make = [state = state.get(), &failure] {
    if (failure.where == Failure::kMake && state->made++ == failure.at) failure.Throw();
    return [state, &failure](int64_t chunk, int64_t next) {
      Check(next > chunk, "chunks come in order");
      if (failure.where == Failure::kWorker && state->worked++ == failure.at) failure.Throw();
      if (chunk % 3 == 0) std::this_thread::yield();
      ++state->done[chunk];
    };
  };
  try {
    ForEachChunk(chunks, helpers, make);
  } catch (const std::bad_alloc&) {
    return 0;
  } catch (const std::runtime_error& e) {
    Check(std::string(e.what()) == "injected", "the exception is the one that was thrown");
    return 1;
  } catch (int x) {
    Check(x == 17, "the exception is the one that was thrown");
    return 2;
  }
  for (int64_t i = 0; i < chunks; ++i) Check(state->done[i] == 1, "every chunk is done once");
  return -1;
}

void Failures(Helpers& helpers, const char* name) {
  constexpr int64_t kChunks = 24;
  for (int64_t chunks : {0, 1, 2, 3, 24}) {
    Check(Run(helpers, chunks, {}) == -1, std::string(name) + ": nothing fails");
  }
  for (int what = 0; what < 3; ++what) {
    for (int64_t at = 0; at < kChunks; ++at) {
      const int thrown = Run(helpers, kChunks, {Failure::kWorker, at, what});
      Check(thrown == what, std::string(name) + ": chunk " + std::to_string(at));
    }
    for (int64_t at = 0; at < helpers.count(); ++at) {
      const int thrown = Run(helpers, kChunks, {Failure::kMake, at, what});
      // Helpers that find nothing left make no worker.
      const bool certain = at == 0;
      Check(thrown == what || (!certain && thrown == -1), std::string(name) + ": make");
    }
  }
}

void RunAll() {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Pool pool(4);
    Failures(pool, "pool");
    Failing failing(pool);
    Check(Run(failing, 24, {}) == 0, "a task that cannot be scheduled");
    Check(Run(pool, 24, {}) == -1, "the pool still works");
    // Callers that share it.
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([&pool, caller] {
        for (int64_t i = 0; i < 20; ++i) {
          const Failure failure{i % 2 ? Failure::kWorker : Failure::kNowhere, i, caller};
          Check(Run(pool, 24, failure) == (i % 2 ? caller : -1), "callers that share a pool");
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  Late late;
  for (int64_t at = 0; at < 24; ++at) {
    Check(Run(late, 24, {Failure::kWorker, at, 1}) == 1, "busy helpers");
    Check(Run(late, 24, {}) == -1, "busy helpers");
  }
  for (const auto& task : late.tasks) task();  // long after the callers have gone
  Inline full;
  Failures(full, "inline");
}

}  // namespace
}  // namespace jaxmagma

int main() {
  jaxmagma::RunAll();
  std::puts("ok");
}
