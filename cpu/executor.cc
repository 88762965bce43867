#include "executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jaxmagma {
namespace {

// A block should leave room in the first-level cache, but is at least one vector of elements wide.
constexpr int64_t kBlockBytes = 24 << 10;
constexpr int64_t kMostVectors = 8;
// A chunk is what a thread takes at a time: long enough to be worth an atomic increment, short
// enough for all threads to finish together. Work shorter than two is not worth waking anyone.
constexpr double kChunkNanoseconds = 20e3;
// More partial sums than this would cost more memory than the error they avoid is worth.
constexpr int64_t kMostSummedChunks = 256;
constexpr int64_t kAlignment = 64;

// An array this large has just been mapped for this call (malloc keeps none of that size), and none
// of its pages exists yet.
constexpr int64_t kFreshBytes = 32 << 20;

// Making pages of 4 KiB one by one can take several times longer than computing what goes into them.
void AskForLargePages([[maybe_unused]] std::byte* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 12;
  if (bytes < kFreshBytes) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t DivideUp(int64_t x, int64_t by) { return (x + by - 1) / by; }

// A rough time for one element on one thread.
double Nanoseconds(const Plan& plan) {
  int64_t values = 0;
  for (const Input& input : plan.inputs) values += input.kind == Input::kBatched ? input.size : 0;
  for (const Output& output : plan.outputs) values += output.size;
  return static_cast<double>(plan.flops * plan.planes() * plan.planes()) / 20 +
         static_cast<double>(values * plan.value_bytes()) / 10;
}

int64_t BlockElements(const Plan& plan, int64_t lanes) {
  const int64_t vector_bytes = std::max<int64_t>(plan.scratch_size, 1) * plan.value_bytes() * lanes;
  const int64_t most = std::clamp<int64_t>(kBlockBytes / vector_bytes, 1, kMostVectors);
  int64_t vectors = 1;
  while (2 * vectors <= most) vectors *= 2;
  return vectors * lanes;
}

}  // namespace

void FreeAligned::operator()(std::byte* p) const { std::free(p); }

AlignedBytes AllocateAligned(size_t bytes) {
  const size_t size = RoundUp(std::max<size_t>(bytes, 1), kAlignment);
  void* p = std::aligned_alloc(kAlignment, size);
  if (!p) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(p));
}

// ---- batch axes ------------------------------------------------------------------------------

namespace {

// What an output does with a batch axis. It ignores one that its value does not depend on.
enum class Use : char { kKept, kSummed, kIgnored };

// One axis of the element index space, with the stride of every operand in tiles.
struct Axis {
  int64_t extent;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;  // 0 where not kept
  std::vector<Use> use;          // by each output
};

std::string ShapeText(const int64_t* dims, size_t rank) {
  std::string text = "(";
  for (size_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

// The extents of the batch axes, or -1 where no argument carries an axis.
std::string BatchExtents(const Plan& plan, const std::vector<Array>& arguments,
                         const std::vector<Array>& results, std::vector<int64_t>& extents) {
  extents.assign(plan.batch_rank, -1);
  auto check = [&](const char* what, size_t number, const Array& array,
                   const std::vector<int64_t>& batch, const std::vector<int64_t>& tile) {
    bool good = array.rank == batch.size() + tile.size();
    for (size_t i = 0; good && i < batch.size(); ++i) {
      int64_t& extent = extents[batch[i]];
      if (extent < 0) extent = array.dims[i];
      good = extent == array.dims[i];
    }
    for (size_t i = 0; good && i < tile.size(); ++i) good = tile[i] == array.dims[batch.size() + i];
    if (good) return std::string();
    return std::string(what) + " " + std::to_string(number) + " of shape " +
           ShapeText(array.dims, array.rank) + " does not fit the plan";
  };
  size_t number = 0;
  for (const Input& input : plan.inputs) {
    if (input.kind == Input::kConstant) continue;
    if (number == arguments.size()) return "too few operands";
    std::string error = check("operand", number, arguments[number], input.batch, input.tile);
    if (!error.empty()) return error;
    ++number;
  }
  if (number != arguments.size()) return "too many operands";
  if (results.size() != plan.outputs.size()) return "wrong number of results";
  for (size_t o = 0; o < results.size(); ++o) {
    const Output& output = plan.outputs[o];
    std::string error = check("result", o, results[o], output.batch, output.tile);
    if (!error.empty()) return error;
  }
  for (int64_t extent : extents) {
    if (extent < 0) return "no operand has all batch axes";
  }
  return "";
}

// Strides in tiles of an array whose batch axes are `batch`, by axis of the program.
std::vector<int64_t> TileStrides(const std::vector<int64_t>& batch,
                                 const std::vector<int64_t>& extents) {
  std::vector<int64_t> strides(extents.size(), 0);
  int64_t stride = 1;
  for (size_t i = batch.size(); i-- > 0;) {
    strides[batch[i]] = stride;
    stride *= extents[batch[i]];
  }
  return strides;
}

std::vector<Axis> MakeAxes(const Plan& plan, const std::vector<int64_t>& extents) {
  std::vector<Axis> axes(extents.size());
  for (size_t a = 0; a < axes.size(); ++a) axes[a].extent = extents[a];
  for (const Input& input : plan.inputs) {
    const std::vector<int64_t> strides = TileStrides(input.batch, extents);
    for (size_t a = 0; a < axes.size(); ++a) axes[a].inputs.push_back(strides[a]);
  }
  for (const Output& output : plan.outputs) {
    const std::vector<int64_t> strides = TileStrides(output.batch, extents);
    for (size_t a = 0; a < axes.size(); ++a) {
      const auto has = [a](const std::vector<int64_t>& list) {
        return std::count(list.begin(), list.end(), static_cast<int64_t>(a)) > 0;
      };
      axes[a].outputs.push_back(strides[a]);
      axes[a].use.push_back(has(output.batch)    ? Use::kKept
                            : has(output.summed) ? Use::kSummed
                                                 : Use::kIgnored);
    }
  }
  // An axis of extent one is no axis.
  axes.erase(std::remove_if(axes.begin(), axes.end(), [](const Axis& x) { return x.extent == 1; }),
             axes.end());
  return axes;
}

// The order in which the largest operand lies in memory, slowest first. What it does not carry goes
// last, so that it stays in the cache meanwhile.
void OrderByMemory(const Plan& plan, std::vector<Axis>& axes) {
  size_t largest = 0;
  double most = -1;
  for (size_t i = 0; i < plan.inputs.size(); ++i) {
    double size = static_cast<double>(plan.inputs[i].size);
    for (const Axis& axis : axes) size *= axis.inputs[i] ? static_cast<double>(axis.extent) : 1;
    if (size > most) largest = i, most = size;
  }
  std::stable_sort(axes.begin(), axes.end(), [&](const Axis& a, const Axis& b) {
    return a.inputs[largest] > b.inputs[largest];
  });
}

// Neighbours that every operand walks like one axis become one.
std::vector<Axis> Collapse(const std::vector<Axis>& axes) {
  std::vector<Axis> collapsed;
  for (const Axis& axis : axes) {
    if (!collapsed.empty()) {
      Axis& outer = collapsed.back();
      bool same = outer.use == axis.use;
      for (size_t i = 0; same && i < axis.inputs.size(); ++i) {
        same = outer.inputs[i] == axis.inputs[i] * axis.extent;
      }
      for (size_t o = 0; same && o < axis.outputs.size(); ++o) {
        same = outer.outputs[o] == axis.outputs[o] * axis.extent;
      }
      if (same) {
        const int64_t extent = outer.extent * axis.extent;
        outer = axis;
        outer.extent = extent;
        continue;
      }
    }
    collapsed.push_back(axis);
  }
  return collapsed;
}

// ---- sums over elements ----------------------------------------------------------------------

// How a pass treats an output.
struct Target {
  enum Mode { kSkip, kStore, kSum } mode;
  int64_t segment;  // kSum: this many consecutive elements have one sum
  int64_t axes;     // kSum: axes the output keeps, all of them slower than the others
};

template <typename T>
void AddRow(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// The sum over the lanes of [n][lanes], pairwise, added to `to`.
template <typename T>
void AddLanes(T* to, T* from, int64_t n, int64_t lanes) {
  for (int64_t i = 0; i < n; ++i, from += lanes) {
    for (int64_t half = lanes / 2; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) from[l] += from[l + half];
    }
    to[i] += from[0];
  }
}

}  // namespace

// One sweep over all elements. Sums need their elements next to each other; outputs whose sums need
// different orders are made by different passes.
class Pass {
 public:
  Pass(const Program& program, std::vector<Axis> axes, std::vector<Target> targets,
       std::vector<const std::byte*> inputs, std::vector<std::byte*> outputs,
       const std::byte* shared)
      : program_(program),
        plan_(program.plan),
        axes_(std::move(axes)),
        targets_(std::move(targets)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        shared_(shared),
        panels_(shared + program.panels()),
        whole_(program.whole.block_elements),
        rest_(program.rest.block_elements) {
    elements_ = 1;
    for (const Axis& axis : axes_) elements_ *= axis.extent;
    // The same chunks whatever the number of threads, so that sums have the same bits.
    const double wanted = kChunkNanoseconds / std::max(Nanoseconds(plan_), 1.0);
    chunk_ = std::max<int64_t>(1, static_cast<int64_t>(wanted));
    const bool sums = std::any_of(targets_.begin(), targets_.end(),
                                  [](const Target& t) { return t.mode == Target::kSum; });
    if (sums) chunk_ = std::max(chunk_, DivideUp(elements_, kMostSummedChunks));
    chunk_ = RoundUp(chunk_, whole_);
    chunks_ = DivideUp(elements_, chunk_);
    partial_.resize(targets_.size());
    for (size_t o = 0; o < targets_.size(); ++o) {
      if (targets_[o].mode == Target::kSum) {
        partial_[o] = AllocateAligned(chunks_ * 2 * OutputBytes(o));
      }
    }
  }

  void Run(Helpers& helpers);

 private:
  class Worker;

  int64_t OutputReals(size_t o) const { return plan_.outputs[o].size * plan_.planes(); }
  int64_t OutputBytes(size_t o) const { return plan_.outputs[o].size * plan_.value_bytes(); }

  // Whether all elements of group `g` of output `o` are in the chunk [begin, end).
  bool Inside(size_t o, int64_t g, int64_t begin, int64_t end) const {
    return g * targets_[o].segment >= begin && (g + 1) * targets_[o].segment <= end;
  }

  // Where the sum of a group is in the result.
  std::byte* Result(size_t o, int64_t group) const {
    int64_t offset = 0;
    for (int64_t a = targets_[o].axes; a-- > 0;) {
      offset += group % axes_[a].extent * axes_[a].outputs[o];
      group /= axes_[a].extent;
    }
    return outputs_[o] + offset * OutputBytes(o);
  }

  // Where a chunk adds up the elements of a group: in the result if they are all its own, else in
  // one of its two partial sums, for its first group and its last.
  std::byte* Destination(size_t o, int64_t g, int64_t begin, int64_t end) const {
    if (Inside(o, g, begin, end)) return Result(o, g);
    const int64_t slot = begin / chunk_ * 2 + (g != begin / targets_[o].segment);
    return partial_[o].get() + slot * OutputBytes(o);
  }

  template <typename T>
  void CombinePartialSums(size_t o);

  const Program& program_;
  const Plan& plan_;
  const std::vector<Axis> axes_;
  const std::vector<Target> targets_;
  const std::vector<const std::byte*> inputs_;
  const std::vector<std::byte*> outputs_;
  const std::byte* const shared_;
  const std::byte* const panels_;
  const int64_t whole_, rest_;  // elements of a block
  int64_t elements_, chunk_, chunks_;
  std::vector<AlignedBytes> partial_;  // of each summed output, two tiles a chunk
};

// What one thread needs to run chunks.
class Pass::Worker {
 public:
  explicit Worker(const Pass& pass) : pass_(pass), plan_(pass.plan_) {
    const int64_t real = plan_.real_bytes();
    int64_t bytes = 0;
    auto reserve = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += RoundUp(size, kAlignment);
      return at;
    };
    const int64_t scratch = reserve(plan_.scratch_size * pass.whole_ * plan_.value_bytes());
    std::vector<int64_t> sums, rows;
    int64_t longest = 0;
    for (size_t o = 0; o < pass.targets_.size(); ++o) {
      const bool sum = pass.targets_[o].mode == Target::kSum;
      sums.push_back(sum ? reserve(pass.OutputReals(o) * real * pass.whole_) : 0);
      rows.push_back(sum ? reserve(pass.OutputReals(o) * real * pass.whole_) : 0);
      longest = std::max(longest, pass.OutputBytes(o));
    }
    const int64_t discarded = reserve(longest);

    std::byte* memory = Memory(bytes);
    scratch_ = memory + scratch;
    discarded_ = memory + discarded;
    for (size_t o = 0; o < pass.targets_.size(); ++o) {
      const bool sum = pass.targets_[o].mode == Target::kSum;
      sums_.push_back(sum ? memory + sums[o] : nullptr);
      rows_.push_back(sum ? memory + rows[o] : nullptr);
    }
    const size_t arrays = pass.inputs_.size() + pass.outputs_.size();
    pointers_.resize(arrays * pass.whole_);
    auto* pointers = pointers_.data();
    for (size_t i = 0; i < pass.inputs_.size(); ++i, pointers += pass.whole_) {
      input_rows_.push_back(pointers);
    }
    for (size_t o = 0; o < pass.outputs_.size(); ++o, pointers += pass.whole_) {
      output_rows_.push_back(pointers);
    }
    output_rows_now_ = output_rows_;
    summed_group_.resize(pass.outputs_.size());
    index_.resize(pass.axes_.size());
  }

  void RunChunk(int64_t chunk) {
    const int64_t begin = chunk * pass_.chunk_;
    const int64_t end = std::min(begin + pass_.chunk_, pass_.elements_);
    for (size_t o = 0; o < pass_.targets_.size(); ++o) {
      if (pass_.targets_[o].mode != Target::kSum) continue;
      const int64_t segment = pass_.targets_[o].segment;
      for (int64_t g = begin / segment; g <= (end - 1) / segment; ++g) {
        std::memset(pass_.Destination(o, g, begin, end), 0, pass_.OutputBytes(o));
      }
      summed_group_[o] = -1;
    }
    int64_t element = begin;
    for (; element + pass_.whole_ <= end; element += pass_.whole_) {
      RunBlock(pass_.program_.whole, element, pass_.whole_, begin, end);
    }
    for (; element < end; element += pass_.rest_) {
      RunBlock(pass_.program_.rest, element, std::min(pass_.rest_, end - element), begin, end);
    }
    for (size_t o = 0; o < pass_.targets_.size(); ++o) {
      if (pass_.targets_[o].mode == Target::kSum) Flush(o, begin, end);
    }
  }

 private:
  // Scratch is kept from call to call: it is small, and fresh memory is slow.
  static std::byte* Memory(int64_t bytes) {
    thread_local AlignedBytes memory;
    thread_local int64_t size = 0;
    if (size < bytes) {
      size = 0;
      memory = AllocateAligned(bytes);
      size = bytes;
    }
    return memory.get();
  }

  // Elements `first` to `first + count` of the chunk [begin, end).
  void RunBlock(const Schedule& schedule, int64_t first, int64_t count, int64_t begin,
                int64_t end) {
    FindRows(first, count, schedule.block_elements);
    for (size_t o = 0; o < pass_.targets_.size(); ++o) {
      const Target& target = pass_.targets_[o];
      if (target.mode == Target::kStore) continue;
      if (target.mode == Target::kSkip) {
        output_rows_now_[o] = nullptr;
        continue;
      }
      // A whole block of one group is added up in lanes, any other row by row.
      const int64_t group = first / target.segment;
      const bool lanes = count == pass_.whole_ && group == (first + count - 1) / target.segment;
      if (lanes && summed_group_[o] != group) {
        Flush(o, begin, end);
        summed_group_[o] = group;
        std::memset(sums_[o], 0, pass_.OutputBytes(o) * pass_.whole_);
      }
      output_rows_now_[o] = lanes ? nullptr : output_rows_[o];
    }
    const Block block{scratch_,
                      pass_.shared_,
                      pass_.panels_,
                      reinterpret_cast<const void* const* const*>(input_rows_.data()),
                      reinterpret_cast<void* const* const*>(output_rows_now_.data()),
                      reinterpret_cast<void* const*>(sums_.data())};
    pass_.program_.kernels.run[static_cast<int64_t>(plan_.dtype)](
        schedule.steps.data(), static_cast<int64_t>(schedule.steps.size()),
        schedule.block_elements, block);
    for (size_t o = 0; o < pass_.targets_.size(); ++o) {
      if (pass_.targets_[o].mode != Target::kSum || !output_rows_now_[o]) continue;
      for (int64_t lane = 0; lane < count; ++lane) {
        const int64_t group = (first + lane) / pass_.targets_[o].segment;
        std::byte* to = pass_.Destination(o, group, begin, end);
        const std::byte* from = rows_[o] + lane * pass_.OutputBytes(o);
        if (IsDouble(plan_.dtype)) {
          AddRow(reinterpret_cast<double*>(to), reinterpret_cast<const double*>(from),
                 pass_.OutputReals(o));
        } else {
          AddRow(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from),
                 pass_.OutputReals(o));
        }
      }
    }
  }

  // Adds what the lanes hold to the group they belong to.
  void Flush(size_t o, int64_t begin, int64_t end) {
    if (summed_group_[o] < 0) return;
    std::byte* to = pass_.Destination(o, summed_group_[o], begin, end);
    if (IsDouble(plan_.dtype)) {
      AddLanes(reinterpret_cast<double*>(to), reinterpret_cast<double*>(sums_[o]),
               pass_.OutputReals(o), pass_.whole_);
    } else {
      AddLanes(reinterpret_cast<float*>(to), reinterpret_cast<float*>(sums_[o]),
               pass_.OutputReals(o), pass_.whole_);
    }
    summed_group_[o] = -1;
  }

  // Points every lane at its element's tiles. Lanes past the last element read that element once
  // more, and what they compute is discarded.
  void FindRows(int64_t first, int64_t count, int64_t block) {
    const std::vector<Axis>& axes = pass_.axes_;
    int64_t rest = first;
    for (size_t a = axes.size(); a-- > 0;) {
      index_[a] = rest % axes[a].extent;
      rest /= axes[a].extent;
    }
    for (int64_t lane = 0; lane < count;) {
      int64_t run = count - lane;
      if (!axes.empty()) run = std::min(run, axes.back().extent - index_.back());
      for (size_t i = 0; i < pass_.inputs_.size(); ++i) {
        if (!pass_.inputs_[i]) continue;
        const int64_t bytes = plan_.inputs[i].size * plan_.value_bytes();
        int64_t offset = 0;
        for (size_t a = 0; a < axes.size(); ++a) offset += index_[a] * axes[a].inputs[i];
        const std::byte* row = pass_.inputs_[i] + offset * bytes;
        const int64_t step = axes.empty() ? 0 : axes.back().inputs[i] * bytes;
        for (int64_t l = 0; l < run; ++l) {
          input_rows_[i][lane + l] = const_cast<std::byte*>(row + l * step);
        }
      }
      for (size_t o = 0; o < pass_.outputs_.size(); ++o) {
        if (pass_.targets_[o].mode != Target::kStore) continue;
        const int64_t bytes = pass_.OutputBytes(o);
        int64_t offset = 0;
        for (size_t a = 0; a < axes.size(); ++a) offset += index_[a] * axes[a].outputs[o];
        std::byte* row = pass_.outputs_[o] + offset * bytes;
        const int64_t step = axes.empty() ? 0 : axes.back().outputs[o] * bytes;
        for (int64_t l = 0; l < run; ++l) output_rows_[o][lane + l] = row + l * step;
      }
      lane += run;
      if (!axes.empty()) index_.back() += run;
      for (size_t a = axes.size(); a-- > 1 && index_[a] == axes[a].extent;) {
        index_[a] = 0;
        ++index_[a - 1];
      }
    }
    for (int64_t lane = count; lane < block; ++lane) {
      for (size_t i = 0; i < pass_.inputs_.size(); ++i) {
        if (pass_.inputs_[i]) input_rows_[i][lane] = input_rows_[i][count - 1];
      }
    }
    for (size_t o = 0; o < pass_.outputs_.size(); ++o) {
      if (pass_.targets_[o].mode == Target::kSum) {
        for (int64_t lane = 0; lane < count; ++lane) {
          output_rows_[o][lane] = rows_[o] + lane * pass_.OutputBytes(o);
        }
      }
      for (int64_t lane = count; lane < block; ++lane) output_rows_[o][lane] = discarded_;
    }
  }

  const Pass& pass_;
  const Plan& plan_;
  std::byte* scratch_;
  std::byte* discarded_;
  std::vector<std::byte*> sums_;  // of each summed output, [real][lane]
  std::vector<std::byte*> rows_;             // of each summed output, [lane][real]
  std::vector<std::byte*> pointers_;
  std::vector<std::byte**> input_rows_, output_rows_, output_rows_now_;
  std::vector<int64_t> summed_group_;  // of each summed output: the group its lanes hold, or -1
  std::vector<int64_t> index_;
};

void Pass::Run(Helpers& helpers) {
  // Shared with helpers that start late, perhaps when this call is over: they find no chunk left
  // and touch nothing else.
  struct Progress {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable finished;
    int64_t done = 0;
    bool failed = false;
  };
  auto progress = std::make_shared<Progress>();
  const int64_t chunks = chunks_;
  auto work = [progress, chunks](Worker& worker, int64_t chunk) {
    int64_t done = 0;
    for (; chunk < chunks; chunk = progress->next.fetch_add(1)) {
      worker.RunChunk(chunk);
      ++done;
    }
    const std::lock_guard<std::mutex> lock(progress->mutex);
    progress->done += done;
    if (progress->done == chunks) progress->finished.notify_all();
  };

  Worker worker(*this);
  const int64_t threads = std::min(chunks, helpers.count());
  for (int64_t i = 1; i < threads; ++i) {
    helpers.Schedule([this, progress, chunks, work] {
      const int64_t chunk = progress->next.fetch_add(1);
      if (chunk >= chunks) return;
      try {
        Worker helper(*this);
        work(helper, chunk);
      } catch (const std::bad_alloc&) {
        const std::lock_guard<std::mutex> lock(progress->mutex);
        progress->failed = true;
        if (++progress->done == chunks) progress->finished.notify_all();
      }
    });
  }
  work(worker, progress->next.fetch_add(1));
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->finished.wait(lock, [&] { return progress->done == chunks; });
  if (progress->failed) throw std::bad_alloc();
  lock.unlock();

  for (size_t o = 0; o < targets_.size(); ++o) {
    if (targets_[o].mode != Target::kSum) continue;
    if (IsDouble(plan_.dtype)) {
      CombinePartialSums<double>(o);
    } else {
      CombinePartialSums<float>(o);
    }
  }
}

// Adds the partial sums of every group that lies in several chunks, pairwise.
template <typename T>
void Pass::CombinePartialSums(size_t o) {
  const int64_t n = OutputReals(o);
  std::vector<T*> parts;
  int64_t group = -1;
  auto finish = [&] {
    for (size_t step = 1; step < parts.size(); step *= 2) {
      for (size_t i = 0; i + step < parts.size(); i += 2 * step) AddRow(parts[i], parts[i + step], n);
    }
    if (!parts.empty()) std::memcpy(Result(o, group), parts[0], n * sizeof(T));
    parts.clear();
  };
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    const int64_t begin = chunk * chunk_, end = std::min(begin + chunk_, elements_);
    const int64_t first = begin / targets_[o].segment, last = (end - 1) / targets_[o].segment;
    for (int64_t g = first; g <= last; g += std::max<int64_t>(last - first, 1)) {
      if (g != group) finish();
      group = g;
      if (Inside(o, g, begin, end)) continue;
      parts.push_back(reinterpret_cast<T*>(Destination(o, g, begin, end)));
    }
  }
  finish();
}

// ---- passes ----------------------------------------------------------------------------------

namespace {

// Which of the outputs that are not done yet one pass can make. They must ignore the same axes, and
// the sets of axes they keep must form a chain: then one order of the axes suits all their sums.
std::vector<size_t> ChoosePass(const std::vector<Axis>& axes, const std::vector<bool>& done) {
  auto compatible = [&](size_t a, size_t b) {
    bool less = true, more = true;
    for (const Axis& axis : axes) {
      if ((axis.use[a] == Use::kIgnored) != (axis.use[b] == Use::kIgnored)) return false;
      less &= axis.use[a] != Use::kKept || axis.use[b] == Use::kKept;
      more &= axis.use[b] != Use::kKept || axis.use[a] == Use::kKept;
    }
    return less || more;
  };
  std::vector<size_t> chosen;
  for (size_t o = 0; o < done.size(); ++o) {
    if (!done[o] && std::all_of(chosen.begin(), chosen.end(),
                                [&](size_t other) { return compatible(o, other); })) {
      chosen.push_back(o);
    }
  }
  return chosen;
}

int64_t Values(const Array& array) {
  int64_t values = 1;
  for (size_t i = 0; i < array.rank; ++i) values *= array.dims[i];
  return values;
}

void RunPass(const Program& program, std::vector<Axis> axes, const std::vector<size_t>& chosen,
             const std::vector<Array>& arguments, const std::vector<Array>& results,
             const std::byte* shared, Helpers& helpers) {
  const Plan& plan = program.plan;
  // All chosen outputs ignore the same axes: one element along each is enough.
  axes.erase(std::remove_if(axes.begin(), axes.end(),
                            [&](const Axis& x) { return x.use[chosen[0]] == Use::kIgnored; }),
             axes.end());
  if (std::any_of(axes.begin(), axes.end(), [](const Axis& x) { return x.extent == 0; })) {
    // No elements: what keeps all axes is empty, what does not is an empty sum.
    for (size_t o : chosen) {
      std::memset(results[o].data, 0, Values(results[o]) * plan.value_bytes());
    }
    return;
  }

  std::vector<AlignedBytes> zeros;
  std::vector<const std::byte*> inputs(plan.inputs.size(), nullptr);
  size_t argument = 0;
  for (size_t i = 0; i < plan.inputs.size(); ++i) {
    if (plan.inputs[i].kind == Input::kConstant) continue;
    const Array& array = arguments[argument++];
    if (plan.inputs[i].kind == Input::kShared) continue;
    inputs[i] = array.data;
    if (Values(array) == 0) {
      // It is empty along an ignored axis; what is read in its place is not used.
      const int64_t bytes = plan.inputs[i].size * plan.value_bytes();
      zeros.push_back(AllocateAligned(bytes));
      std::memset(zeros.back().get(), 0, bytes);
      inputs[i] = zeros.back().get();
      for (Axis& axis : axes) axis.inputs[i] = 0;
    }
  }

  // The axes that more outputs keep are slower, so that the elements of every sum are neighbours.
  OrderByMemory(plan, axes);
  auto keepers = [&](const Axis& axis) {
    return std::count_if(chosen.begin(), chosen.end(),
                         [&](size_t o) { return axis.use[o] == Use::kKept; });
  };
  std::stable_sort(axes.begin(), axes.end(),
                   [&](const Axis& a, const Axis& b) { return keepers(a) > keepers(b); });
  axes = Collapse(axes);

  std::vector<std::byte*> outputs(plan.outputs.size(), nullptr);
  std::vector<Target> targets(plan.outputs.size(), {Target::kSkip, 1, 0});
  for (size_t o : chosen) {
    outputs[o] = results[o].data;
    targets[o].mode = Target::kStore;
    for (const Axis& axis : axes) {
      if (axis.use[o] == Use::kKept) {
        ++targets[o].axes;
      } else {
        targets[o].mode = Target::kSum;
        targets[o].segment *= axis.extent;
      }
    }
  }
  Pass(program, std::move(axes), std::move(targets), std::move(inputs), std::move(outputs), shared)
      .Run(helpers);
}

}  // namespace

// ---- programs --------------------------------------------------------------------------------

Program::Program(Plan decoded)
    : plan(std::move(decoded)),
      kernels(BestKernels()),
      whole(MakeSchedule(plan, kernels,
                         BlockElements(plan, kernels.lanes[IsDouble(plan.dtype)]))),
      rest(MakeSchedule(plan, kernels, kernels.lanes[IsDouble(plan.dtype)])) {
  const bool traced = std::any_of(plan.inputs.begin(), plan.inputs.end(),
                                  [](const Input& x) { return x.kind == Input::kShared; });
  if (!traced) constant_shared = MakeShared({});
}

int64_t Program::panels() const {
  return RoundUp(plan.shared_size * plan.value_bytes(), kAlignment);
}

AlignedBytes Program::MakeShared(const std::vector<Array>& arguments) const {
  AlignedBytes shared = AllocateAligned(panels() + whole.panel_values * plan.value_bytes());
  const std::byte* constant = plan.constants.data();
  size_t argument = 0;
  for (const Input& input : plan.inputs) {
    const int64_t bytes = input.size * plan.value_bytes();
    std::byte* to = shared.get() + input.place * plan.value_bytes();
    if (input.kind == Input::kConstant) {
      std::memcpy(to, constant, bytes);
      constant += bytes;
    } else {
      if (input.kind == Input::kShared) std::memcpy(to, arguments[argument].data, bytes);
      ++argument;
    }
  }
  RunSharedSteps(plan, shared.get());
  PackPanels(plan, whole, shared.get(), shared.get() + panels());
  return shared;
}

std::string Program::Run(const std::vector<Array>& arguments, const std::vector<Array>& results,
                         Helpers& helpers) const {
  std::vector<int64_t> extents;
  std::string error = BatchExtents(plan, arguments, results, extents);
  if (!error.empty()) return error;

  for (const Array& result : results) {
    AskForLargePages(result.data, Values(result) * plan.value_bytes());
  }
  AlignedBytes made;
  if (!constant_shared) made = MakeShared(arguments);
  const std::byte* shared = constant_shared ? constant_shared.get() : made.get();

  const std::vector<Axis> axes = MakeAxes(plan, extents);
  std::vector<bool> done(plan.outputs.size(), false);
  while (std::count(done.begin(), done.end(), false)) {
    const std::vector<size_t> chosen = ChoosePass(axes, done);
    RunPass(*this, axes, chosen, arguments, results, shared, helpers);
    for (size_t o : chosen) done[o] = true;
  }
  return "";
}

}  // namespace jaxmagma
