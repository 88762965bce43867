// Chunks of work that the calling thread and any helpers take one by one.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>

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
template <typename Make>
void ForEachChunk(int64_t chunks, Helpers& helpers, const Make& make) {
  // Outlives the call: a helper that comes too late finds no chunk here and touches nothing else.
  struct Progress {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable finished;
    int64_t done = 0;
    bool failed = false;
  };
  const auto progress = std::make_shared<Progress>();
  const auto report = [progress, chunks](int64_t done, bool failed) {
    const std::lock_guard<std::mutex> lock(progress->mutex);
    progress->done += done;
    progress->failed |= failed;
    if (progress->done == chunks) progress->finished.notify_all();
  };
  const auto work = [progress, chunks, report](auto&& worker, int64_t chunk) {
    int64_t done = 0;
    while (chunk < chunks) {
      const int64_t next = progress->next.fetch_add(1);
      worker(chunk, next);
      chunk = next;
      ++done;
    }
    report(done, false);
  };

  auto&& worker = make();
  const int64_t threads = std::min(chunks, helpers.count());
  for (int64_t i = 1; i < threads; ++i) {
    helpers.Schedule([progress, chunks, report, work, &make] {
      const int64_t chunk = progress->next.fetch_add(1);
      if (chunk >= chunks) return;
      try {
        work(make(), chunk);
      } catch (const std::bad_alloc&) {
        report(1, true);
      }
    });
  }
  work(worker, progress->next.fetch_add(1));
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->finished.wait(lock, [&] { return progress->done == chunks; });
  if (progress->failed) throw std::bad_alloc();
}

}  // namespace jaxmagma
