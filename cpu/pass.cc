#include "pass.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace jaxmagma {
namespace {

// A chunk is what a thread takes at a time: long enough to be worth an atomic increment, short
// enough for all threads to finish together. Work shorter than two is not worth waking anyone.
constexpr double kChunkNanoseconds = 20e3;
// More partial sums than this would cost more memory than the error they avoid is worth.
constexpr int64_t kMostSummedChunks = 256;
// Operands smaller than this are taken to be in the cache already.
constexpr int64_t kCachedBytes = 512 << 10;
// A pass over more than this leaves nothing in the last cache for who reads the results next, so
// they need not go there. It is a common size; what the system says is wrong on virtual machines.
constexpr int64_t kLastCacheBytes = 32 << 20;
// The operands of two blocks this large and what is computed of them push each other out of the
// second cache.
constexpr double kHeldBytes = 256 << 10;
// Rows of so many reals go past the caches from registers, where that is known to be faster.
// Shorter ones, with parts of lines at both ends, leave by way of a buffer.
constexpr int64_t kLongRow = 256;
// What is asked for comes this much later, as a part of the time for a block.
constexpr double kLeadTime = 0.1;
// The smallest pages there are.
constexpr int64_t kPageBytes = 4 << 10;
// So many vectors of elements take as long as a block of any size, one by one.
constexpr int64_t kVectorsOfBlock = 8;

// A rough time for one element on one thread.
double Nanoseconds(const Plan& plan) {
  int64_t values = 0;
  for (const Input& input : plan.inputs) values += input.kind == Input::kBatched ? input.size : 0;
  for (const Output& output : plan.outputs) values += output.size;
  return static_cast<double>(plan.flops) * static_cast<double>(plan.planes() * plan.planes()) / 20 +
         static_cast<double>(values * plan.value_bytes()) / 10;
}

int64_t StraightRow() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return kLongRow;
#endif
  return std::numeric_limits<int64_t>::max();
}

template <typename T>
void AddRow(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}

// Adds to `to` the sum over the lanes of [n][lanes], pairwise.
template <typename T>
void AddLanes(T* to, T* from, int64_t n, int64_t lanes) {
  for (int64_t i = 0; i < n; ++i, from += lanes) {
    for (int64_t half = lanes / 2; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) from[l] += from[l + half];
    }
    to[i] += from[0];
  }
}

// The memory an operand takes; an axis that does not move in it repeats it.
int64_t Bytes(const Operand& operand, const std::vector<Axis>& axes) {
  int64_t bytes = operand.data ? operand.tile_bytes : 0;
  for (size_t a = 0; a < axes.size(); ++a) bytes *= operand.strides[a] ? axes[a].extent : 1;
  return bytes;
}

// Asks for a line of every page that the block behind these ranges comes to. It takes long to find
// out where a page is, and a result on its way to memory holds up all stores behind it meanwhile.
void AskForPages(const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(range.end);
    const uintptr_t end = begin + (range.end - range.begin);
    for (uintptr_t page = RoundUp(begin, kPageBytes); page < end; page += kPageBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(page));
    }
  }
}

// How much of what a block reads is asked for while it is computed already, not before: nothing, or
// as much as still comes in time, at an even pace and in the order of reading.
double LateReads(std::vector<Operand> operands, size_t inputs, int64_t block_elements) {
  operands.resize(inputs);
  std::stable_sort(operands.begin(), operands.end(),
                   [](const Operand& a, const Operand& b) { return a.first_read < b.first_read; });
  double all = 0, asked = 0, late = 1;
  const auto bytes = [](const Operand& x) {
    return static_cast<double>(x.data && x.ahead ? x.tile_bytes : 0);
  };
  for (const Operand& operand : operands) all += bytes(operand);
  if (all * static_cast<double>(block_elements) < kHeldBytes) return 0;
  for (const Operand& operand : operands) {
    asked += bytes(operand);
    if (bytes(operand) > 0) late = std::min(late, 1 + operand.first_read - asked / all);
  }
  return std::max(late - kLeadTime, 0.0);
}

// The lines of some ranges from number `first` to number `last`.
void Cut(const std::vector<Range>& ranges, int64_t first, int64_t last, std::vector<Range>& cut) {
  for (const Range& range : ranges) {
    const int64_t lines = DivideUp(range.end - range.begin, kAlignment);
    const char* begin = range.begin + std::max<int64_t>(first, 0) * kAlignment;
    const char* end = std::min(range.end, range.begin + last * kAlignment);
    if (begin < end) cut.push_back({begin, end});
    first -= lines;
    last -= lines;
  }
}

std::vector<int64_t> Extents(const std::vector<Axis>& axes) {
  std::vector<int64_t> extents;
  for (const Axis& axis : axes) extents.push_back(axis.extent);
  return extents;
}

// The inputs and the outputs that are stored element by element.
std::vector<Operand> Operands(const Plan& plan, const std::vector<Axis>& axes,
                              const std::vector<Target>& targets,
                              const std::vector<std::byte*>& inputs,
                              const std::vector<std::byte*>& outputs,
                              const std::vector<double>& first_reads) {
  std::vector<Operand> operands;
  for (size_t i = 0; i < inputs.size(); ++i) {
    operands.push_back({inputs[i], plan.tile_bytes(i), {}});
    operands.back().ahead = plan.inputs[i].kind != Input::kVector;
    operands.back().first_read = first_reads[i];
    for (const Axis& axis : axes) {
      operands.back().strides.push_back(axis.inputs[i] * operands.back().tile_bytes);
    }
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    std::byte* data = targets[o].mode == Target::kStore ? outputs[o] : nullptr;
    operands.push_back({data, plan.outputs[o].size * plan.stored_bytes(), {}});
    for (const Axis& axis : axes) {
      operands.back().strides.push_back(axis.outputs[o] * operands.back().tile_bytes);
    }
  }
  return operands;
}

}  // namespace

Pass::Pass(const Plan& plan, const Kernels& kernels, const Schedule& whole, const Schedule& rest,
           const std::byte* shared, const std::byte* panels, std::vector<Axis> axes,
           std::vector<Target> targets, const std::vector<std::byte*>& inputs,
           std::vector<std::byte*> outputs)
    : plan_(plan),
      kernels_(kernels),
      whole_(whole),
      rest_(rest),
      shared_(shared),
      panels_(panels),
      axes_(std::move(axes)),
      targets_(std::move(targets)),
      outputs_(std::move(outputs)),
      finder_(Extents(axes_), Operands(plan, axes_, targets_, inputs, outputs_, whole.first_reads),
              inputs.size(), whole.block_elements),
      elements_(1),
      partial_(targets_.size()) {
  for (const Axis& axis : axes_) elements_ *= axis.extent;
  // The same chunks whatever the number of threads, so that sums have the same bits.
  chunk_ = static_cast<int64_t>(kChunkNanoseconds / std::max(Nanoseconds(plan_), 1.0));
  const bool sums = std::any_of(targets_.begin(), targets_.end(),
                                [](const Target& t) { return t.mode == Target::kSum; });
  if (sums) chunk_ = std::max(chunk_, DivideUp(elements_, kMostSummedChunks));
  chunk_ = RoundUp(std::max<int64_t>(chunk_, 1), whole_.block_elements);
  chunks_ = DivideUp(elements_, chunk_);
  for (size_t o = 0; o < targets_.size(); ++o) {
    if (targets_[o].mode == Target::kSum) partial_[o] = AllocateAligned(2 * chunks_ * SumBytes(o));
  }
  int64_t bytes = 0, all_bytes = 0;
  for (const Operand& operand : finder_.operands()) {
    if (!operand.ahead) continue;
    bytes += operand.tile_bytes;
    all_bytes += Bytes(operand, axes_);
  }
  stream_ = all_bytes > kLastCacheBytes;
  // Hardware prefetchers see what elements that are read one by one will read next.
  read_ahead_ = !plan_.direct() && elements_ > kCachedBytes / std::max<int64_t>(bytes, 1);
  if (read_ahead_) {
    late_reads_ = LateReads(finder_.operands(), inputs.size(), whole_.block_elements);
  }
}

// Writes the sum of a group to the result.
void Pass::StoreSum(size_t o, int64_t group, const void* sum) const {
  int64_t tile = 0;
  for (size_t a = targets_[o].axes; a-- > 0;) {
    tile += group % axes_[a].extent * axes_[a].outputs[o];
    group /= axes_[a].extent;
  }
  std::byte* to = outputs_[o] + tile * plan_.outputs[o].size * plan_.stored_bytes();
  const auto narrow = kernels_.narrow[static_cast<int64_t>(plan_.dtype)];
  if (narrow) {
    narrow(static_cast<const float*>(sum), to, plan_.outputs[o].size);
  } else {
    std::memcpy(to, sum, SumBytes(o));
  }
}

// What one thread needs to run chunks. T is the real type of the arithmetic.
template <typename T>
class Pass::Worker {
 public:
  explicit Worker(const Pass& pass) : pass_(pass), plan_(pass.plan_) {
    const int64_t lanes = pass.whole_.block_elements;
    int64_t bytes = 0;
    const auto reserve = [&bytes](int64_t size) {
      const int64_t at = bytes;
      bytes += RoundUp(size, kAlignment);
      return at;
    };
    const int64_t scratch = reserve(plan_.scratch_size * lanes * plan_.value_bytes());
    const int64_t slot_reals = std::max(pass.whole_.slot_reals, pass.rest_.slot_reals);
    const int64_t slots = reserve(slot_reals * plan_.real_bytes());
    int64_t longest = 0;
    for (const Operand& operand : pass.finder_.operands()) {
      if (!operand.ahead) continue;
      longest = std::max(longest, operand.tile_bytes / plan_.stored_bytes());
    }
    const bool converts = plan_.stored_bytes() != plan_.value_bytes();
    const int64_t staged =
        reserve(converts || pass.stream_ ? longest * lanes * plan_.value_bytes() + kAlignment : 0);
    std::vector<int64_t> places;
    for (size_t o = 0; o < pass.targets_.size(); ++o) {
      // A tile for the sum, and one for each lane.
      const bool sum = pass.targets_[o].mode == Target::kSum;
      places.push_back(
          reserve(sum ? RoundUp(pass.SumBytes(o), kAlignment) + lanes * pass.SumBytes(o) : 0));
    }
    std::byte* memory = Memory(bytes);
    scratch_ = memory + scratch;
    slots_ = memory + slots;
    staged_ = memory + staged;
    for (size_t o = 0; o < pass.targets_.size(); ++o) {
      std::byte* total = memory + places[o];
      std::byte* lane_sums = total + RoundUp(pass.SumBytes(o), kAlignment);
      sums_.push_back(
          {-1, false, reinterpret_cast<T*>(total), reinterpret_cast<T*>(lane_sums), {}});
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sums_.back().offsets.push_back(lane * pass.SumBytes(o));
      }
      lane_sums_.push_back(pass.targets_[o].mode == Target::kSum ? sums_.back().lanes : nullptr);
    }
  }

  // `next` is the chunk that will follow, if there is one.
  void operator()(int64_t chunk, int64_t next) {
    begin_ = chunk * pass_.chunk_;
    end_ = std::min(begin_ + pass_.chunk_, pass_.elements_);
    if (chunk != found_) Find(begin_, end_, now_);
    found_ = next;
    for (bool last = false; !last;) {
      const int64_t after = now_.first + now_.count;
      last = after == end_;
      if (last) {
        const int64_t begin = std::min(next * pass_.chunk_, pass_.elements_);
        Find(begin, std::min(begin + pass_.chunk_, pass_.elements_), next_);
      } else {
        Find(after, end_, next_);
      }
      RunBlock();
      std::swap(now_, next_);
    }
    for (size_t o = 0; o < sums_.size(); ++o) FinishSum(o);
    if (pass_.stream_ && next >= pass_.chunks_) pass_.kernels_.finish_streams(late_);
  }

 private:
  // The sum of one output over the elements of the group that is worked on.
  struct Sum {
    int64_t group;                 // -1: none
    bool in_lanes;                 // some of it is still in `lanes`
    T* total;                      // [real]
    T* lanes;                      // [real][lane], or the rows of a block, [lane][real]
    std::vector<int64_t> offsets;  // of the rows
  };

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

  // The block at `first`: a whole one if the chunk has enough elements left, else one vector.
  void Find(int64_t first, int64_t end, BlockRows& rows) const {
    const int64_t left = end - first;
    const int64_t whole = pass_.whole_.block_elements, vector = pass_.rest_.block_elements;
    const int64_t lanes = left >= std::min(whole, kVectorsOfBlock * vector) ? whole : vector;
    pass_.finder_.Find(first, std::min(left, lanes), lanes, rows);
  }

  int64_t LateLines(const BlockRows& rows) const {
    return static_cast<int64_t>(pass_.late_reads_ * static_cast<double>(rows.lines));
  }

  void RunBlock() {
    const Schedule& schedule =
        now_.lanes == pass_.whole_.block_elements ? pass_.whole_ : pass_.rest_;
    Rows* outputs = now_.operands.data() + plan_.inputs.size();
    for (size_t o = 0; o < sums_.size(); ++o) {
      if (pass_.targets_[o].mode == Target::kSum) outputs[o] = StartSum(o, schedule);
    }
    Block block{};
    block.count = now_.count;
    block.scratch = scratch_;
    block.slots = slots_;
    block.staged = staged_;
    block.shared = pass_.shared_;
    block.panels = pass_.panels_;
    block.inputs = now_.operands.data();
    block.outputs = outputs;
    block.sums = lane_sums_.data();
    block.stream = pass_.stream_;
    block.straight = StraightRow();
    block.late = &late_;
    if (pass_.read_ahead_) {
      AskForPages(next_.reads);
      AskForPages(next_.writes);
      const int64_t now = LateLines(now_), next = next_.lines - LateLines(next_);
      ahead_.clear();
      Cut(now_.reads, now_.lines - now, now_.lines, ahead_);
      Cut(next_.reads, 0, next, ahead_);
      block.ahead = ahead_.data();
      block.ahead_count = static_cast<int64_t>(ahead_.size());
      block.ahead_lines = now + next;
    }
    pass_.kernels_.run[static_cast<int64_t>(plan_.dtype)](
        schedule.steps.data(), static_cast<int64_t>(schedule.steps.size()), schedule.block_elements,
        block);
    for (size_t o = 0; o < sums_.size(); ++o) {
      if (pass_.targets_[o].mode == Target::kSum && outputs[o].offsets) AddRows(o);
    }
  }

  // A whole block of one group is added up in lanes; any other comes in rows.
  Rows StartSum(size_t o, const Schedule& schedule) {
    Sum& sum = sums_[o];
    const int64_t segment = pass_.targets_[o].segment;
    const int64_t group = now_.first / segment;
    const bool lanes = &schedule == &pass_.whole_ && now_.count == now_.lanes &&
                       group == (now_.first + now_.count - 1) / segment;
    if (!lanes) {
      CollectLanes(o);
      return {reinterpret_cast<uintptr_t>(sum.lanes), sum.offsets.data()};
    }
    Enter(o, group);
    if (!sum.in_lanes) {
      sum.in_lanes = true;
      std::memset(sum.lanes, 0, pass_.SumBytes(o) * pass_.whole_.block_elements);
    }
    return {0, nullptr};
  }

  void AddRows(size_t o) {
    const int64_t reals = pass_.OutputReals(o);
    for (int64_t lane = 0; lane < now_.count; ++lane) {
      Enter(o, (now_.first + lane) / pass_.targets_[o].segment);
      AddRow(sums_[o].total, sums_[o].lanes + lane * reals, reals);
    }
  }

  void Enter(size_t o, int64_t group) {
    if (sums_[o].group == group) return;
    FinishSum(o);
    sums_[o].group = group;
    std::memset(sums_[o].total, 0, pass_.SumBytes(o));
  }

  void CollectLanes(size_t o) {
    Sum& sum = sums_[o];
    if (sum.in_lanes) {
      AddLanes(sum.total, sum.lanes, pass_.OutputReals(o), pass_.whole_.block_elements);
    }
    sum.in_lanes = false;
  }

  // The sum goes to the result if the chunk has all elements of the group, else to one of the
  // chunk's two partial sums, for its first group and its last.
  void FinishSum(size_t o) {
    Sum& sum = sums_[o];
    if (sum.group < 0) return;
    CollectLanes(o);
    if (pass_.Inside(o, sum.group, begin_, end_)) {
      pass_.StoreSum(o, sum.group, sum.total);
    } else {
      const bool last = sum.group != begin_ / pass_.targets_[o].segment;
      const int64_t slot = begin_ / pass_.chunk_ * 2 + last;
      std::memcpy(pass_.partial_[o].get() + slot * pass_.SumBytes(o), sum.total, pass_.SumBytes(o));
    }
    sum.group = -1;
  }

  const Pass& pass_;
  const Plan& plan_;
  std::byte* scratch_;
  std::byte* slots_;
  std::byte* staged_;
  std::vector<Sum> sums_;
  std::vector<void*> lane_sums_;
  int64_t begin_ = 0, end_ = 0;  // of the chunk
  int64_t found_ = -1;           // the chunk whose first block is in `now_`
  BlockRows now_, next_;
  std::vector<Range> ahead_;
  Lines late_{};
};

void Pass::Run(Helpers& helpers) {
  if (IsDouble(plan_.dtype)) {
    RunIn<double>(helpers);
  } else {
    RunIn<float>(helpers);
  }
}

template <typename T>
void Pass::RunIn(Helpers& helpers) {
  ForEachChunk(chunks_, helpers, [this] { return Worker<T>(*this); });
  for (size_t o = 0; o < targets_.size(); ++o) {
    if (targets_[o].mode == Target::kSum) CombinePartialSums<T>(o);
  }
}

// Adds the partial sums of every group that lies in several chunks, pairwise.
template <typename T>
void Pass::CombinePartialSums(size_t o) {
  const int64_t reals = OutputReals(o), segment = targets_[o].segment;
  T* const partial = reinterpret_cast<T*>(partial_[o].get());
  std::vector<T*> parts;
  int64_t group = 0;
  const auto finish = [&] {
    for (size_t step = 1; step < parts.size(); step *= 2) {
      for (size_t i = 0; i + step < parts.size(); i += 2 * step) {
        AddRow(parts[i], parts[i + step], reals);
      }
    }
    if (!parts.empty()) StoreSum(o, group, parts[0]);
    parts.clear();
  };
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
    const int64_t begin = chunk * chunk_, end = std::min(begin + chunk_, elements_);
    const int64_t first = begin / segment, last = (end - 1) / segment;
    for (int64_t slot = 0; slot < (first == last ? 1 : 2); ++slot) {
      const int64_t g = slot ? last : first;
      if (g != group) finish();
      group = g;
      if (!Inside(o, g, begin, end)) parts.push_back(partial + (2 * chunk + slot) * reals);
    }
  }
  finish();
}

}  // namespace jaxmagma
