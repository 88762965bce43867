// One sweep over all elements: blocks, chunks, threads, and sums over elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "axes.h"
#include "kernels.h"
#include "memory.h"
#include "plan.h"
#include "rows.h"
#include "schedule.h"
#include "threads.h"

namespace jaxmagma {

// What a pass does with an output.
struct Target {
  enum Mode { kSkip, kStore, kSum } mode = kSkip;
  int64_t segment = 1;  // kSum: this many consecutive elements have one sum
  size_t axes = 0;      // kSum: that many axes, the slowest ones, are kept
};

class Pass {
 public:
  // `inputs` and `outputs` point to the data of all inputs and outputs of the plan, null where the
  // pass does not use one.
  Pass(const Plan& plan, const Kernels& kernels, const Schedule& whole, const Schedule& rest,
       const std::byte* shared, const std::byte* panels, std::vector<Axis> axes,
       std::vector<Target> targets, const std::vector<std::byte*>& inputs,
       std::vector<std::byte*> outputs);

  void Run(Helpers& helpers);

 private:
  template <typename T>
  class Worker;

  template <typename T>
  void RunIn(Helpers& helpers);
  template <typename T>
  void CombinePartialSums(size_t o);

  int64_t OutputReals(size_t o) const { return plan_.outputs[o].size * plan_.planes(); }
  int64_t SumBytes(size_t o) const { return OutputReals(o) * plan_.real_bytes(); }

  // Whether all elements of group `g` of output `o` are in the chunk [begin, end).
  bool Inside(size_t o, int64_t g, int64_t begin, int64_t end) const {
    return g * targets_[o].segment >= begin && (g + 1) * targets_[o].segment <= end;
  }
  void StoreSum(size_t o, int64_t group, const void* sum) const;

  const Plan& plan_;
  const Kernels& kernels_;
  const Schedule& whole_;
  const Schedule& rest_;
  const std::byte* const shared_;
  const std::byte* const panels_;
  const std::vector<Axis> axes_;
  const std::vector<Target> targets_;
  const std::vector<std::byte*> outputs_;
  const RowFinder finder_;
  int64_t elements_, chunk_, chunks_;
  bool read_ahead_, stream_;
  // Of the operands of a block, the part that is asked for while the block itself is computed.
  double late_reads_ = 0;
  std::vector<AlignedBytes> partial_;  // of each summed output, two tiles a chunk
};

}  // namespace jaxmagma
