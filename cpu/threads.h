// Chunks of work that the calling thread and any helpers take one by one.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxmagma {

// Threads that may help. A task may run at any later time, after the call that scheduled it too.
class Helpers {
 public:
  virtual ~Helpers() = default;
  virtual int64_t count() const = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

// Every thread that takes part calls `make()` once and what it returns with the numbers of chunks,
// and of the one that will be its next, until all are done. The caller takes part and can do all
// the work by itself, so that this returns even if the helpers are busy for ever.
//
// Whatever throws, on whichever thread, no further chunk is handed out, and the first exception
// leaves this function. It returns, in either way, only when no helper is at work.
template <typename Make>
void ForEachChunk(int64_t chunks, Helpers& helpers, const Make& make) {
  // Outlives the call: a helper that comes too late finds it closed and touches nothing else.
  struct Progress {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable left;
    int64_t at_work = 0;  // helpers
    bool closed = false;
    std::exception_ptr failure;
  };
  const auto progress = std::make_shared<Progress>();
  // Exceptions do not leave it.
  const auto guard = [chunks](Progress& progress, const auto& body) {
    try {
      body();
    } catch (...) {
      progress.next = chunks;
      const std::lock_guard<std::mutex> lock(progress.mutex);
      if (!progress.failure) progress.failure = std::current_exception();
    }
  };
  const auto work = [chunks](Progress& progress, auto&& worker, int64_t chunk) {
    while (chunk < chunks) {
      const int64_t next = progress.next.fetch_add(1);
      worker(chunk, next);
      chunk = next;
    }
  };

  guard(*progress, [&] {
    auto&& worker = make();
    const int64_t threads = std::min(chunks, helpers.count());
    for (int64_t i = 1; i < threads; ++i) {
      helpers.Schedule([progress, chunks, guard, work, &make] {
        {
          const std::lock_guard<std::mutex> lock(progress->mutex);
          if (progress->closed) return;
          ++progress->at_work;  // from here on the caller waits, and with it what it owns
        }
        guard(*progress, [&] {
          const int64_t chunk = progress->next.fetch_add(1);
          if (chunk < chunks) work(*progress, make(), chunk);
        });
        const std::lock_guard<std::mutex> lock(progress->mutex);
        if (--progress->at_work == 0) progress->left.notify_all();
      });
    }
    work(*progress, worker, progress->next.fetch_add(1));
  });
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->closed = true;
  progress->left.wait(lock, [&] { return progress->at_work == 0; });
  if (progress->failure) std::rethrow_exception(std::exchange(progress->failure, nullptr));
}

}  // namespace jaxmagma
