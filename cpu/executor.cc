#include "executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "pass.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jaxmagma {
namespace {

// The scratch of a block. A step goes through it in the order of memory, so that it need not all
// stay in the first-level cache; with more elements, more can be on its way to and from memory.
constexpr int64_t kScratchBytes = 48 << 10;
// The elements of a direct block should leave room in the first-level cache.
constexpr int64_t kDirectBytes = 24 << 10;
constexpr int64_t kMostVectors = 64;
// An instruction is called for so many bytes of each value, at most: a function of single values
// takes as long to call as a dozen vectors take to compute.
constexpr int64_t kValueBytes = 2 << 10;
// Where there are such instructions, scratch and slots are in the second-level cache.
constexpr int64_t kScratchBytesOfValues = 320 << 10;
constexpr int64_t kMostDirectElements = 64;

// The elements that share a vector.
int64_t Lanes(const Plan& plan, const Kernels& kernels) {
  return plan.direct() ? 1 : kernels.lanes[IsDouble(plan.dtype)];
}

// The slots of functions of single values of an element.
int64_t SlotsOfValues(const Plan& plan) {
  int64_t slots = 0;
  for (const Instruction& x : plan.steps) {
    if (x.opcode == Opcode::kExpression && x.count == 1) slots = std::max(slots, x.slots + 1);
  }
  return slots;
}

int64_t BlockElements(const Plan& plan, const Kernels& kernels) {
  const int64_t lanes = Lanes(plan, kernels);
  if (plan.block > 0) {
    return lanes * std::min(plan.block, plan.direct() ? kMostDirectElements : kMostVectors);
  }
  if (plan.direct()) {
    int64_t values = 0;
    for (const Input& input : plan.inputs) values += input.kind == Input::kBatched ? input.size : 0;
    for (const Output& output : plan.outputs) values += output.size;
    const int64_t elements = kDirectBytes / (std::max<int64_t>(values, 1) * plan.value_bytes());
    return std::clamp<int64_t>(elements, 1, kMostDirectElements);
  }
  const int64_t vector_bytes = plan.value_bytes() * lanes;
  const int64_t slots = SlotsOfValues(plan);
  const int64_t values = std::max<int64_t>(plan.scratch_size + slots, 1);
  const int64_t room = slots ? kScratchBytesOfValues : kScratchBytes;
  const int64_t most = std::min(room / (values * vector_bytes), kValueBytes / vector_bytes);
  int64_t vectors = 1;
  while (2 * vectors <= std::min(most, kMostVectors)) vectors *= 2;
  return vectors * lanes;
}

// An array this large has just been mapped for this call (malloc keeps none of that size), and none
// of its pages exists yet.
constexpr int64_t kFreshBytes = 32 << 20;

// Making pages of 4 KiB one by one can take several times longer than computing what goes into
// them.
void AskForLargePages([[maybe_unused]] std::byte* data, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 12;
  if (bytes < kFreshBytes) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Which of the outputs that are not done yet one pass can make. They must ignore the same axes, and
// the sets of axes they keep must form a chain: then one order of the axes suits all their sums.
std::vector<size_t> ChoosePass(const std::vector<Axis>& axes, const std::vector<bool>& done) {
  const auto compatible = [&](size_t a, size_t b) {
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

}  // namespace

Executor::Executor(Plan plan)
    : plan_(std::move(plan)),
      kernels_(BestKernels()),
      whole_(MakeSchedule(plan_, kernels_, BlockElements(plan_, kernels_))),
      rest_(MakeSchedule(plan_, kernels_, Lanes(plan_, kernels_))) {
  const bool traced = std::any_of(plan_.inputs.begin(), plan_.inputs.end(),
                                  [](const Input& x) { return x.kind == Input::kShared; });
  if (!traced) constant_shared_ = MakeShared({});
}

int64_t Executor::panels() const {
  return RoundUp(plan_.shared_size * plan_.value_bytes(), kAlignment);
}

AlignedBytes Executor::MakeShared(const std::vector<Array>& arguments) const {
  AlignedBytes shared = AllocateAligned(panels() + whole_.panel_values * plan_.value_bytes());
  const auto widen = kernels_.widen[static_cast<int64_t>(plan_.dtype)];
  const std::byte* constant = plan_.constants.data();
  size_t argument = 0;
  for (const Input& input : plan_.inputs) {
    const int64_t bytes = input.size * plan_.stored_bytes();
    const std::byte* from = nullptr;
    if (input.kind == Input::kConstant) {
      from = std::exchange(constant, constant + bytes);
    } else if (input.kind == Input::kShared) {
      from = arguments[argument++].data;
    } else {
      ++argument;
      continue;
    }
    std::byte* to = shared.get() + input.place * plan_.value_bytes();
    if (widen) {
      widen(from, reinterpret_cast<float*>(to), input.size);
    } else {
      std::memcpy(to, from, bytes);
    }
  }
  RunSharedSteps(plan_, kernels_, shared.get());
  PackPanels(plan_, whole_, shared.get(), shared.get() + panels());
  return shared;
}

std::string Executor::Run(const std::vector<Array>& arguments, const std::vector<Array>& results,
                          Helpers& helpers) const {
  std::vector<Axis> axes;
  std::string error = FindAxes(plan_, arguments, results, axes);
  if (!error.empty()) return error;

  for (const Array& result : results) {
    AskForLargePages(result.data, result.values() * plan_.stored_bytes());
  }
  AlignedBytes made;
  if (!constant_shared_) made = MakeShared(arguments);
  const std::byte* shared = constant_shared_ ? constant_shared_.get() : made.get();

  std::vector<bool> done(plan_.outputs.size(), false);
  while (std::count(done.begin(), done.end(), false)) {
    const std::vector<size_t> chosen = ChoosePass(axes, done);
    RunPass(axes, chosen, arguments, results, shared, helpers);
    for (size_t o : chosen) done[o] = true;
  }
  return "";
}

void Executor::RunPass(std::vector<Axis> axes, const std::vector<size_t>& chosen,
                       const std::vector<Array>& arguments, const std::vector<Array>& results,
                       const std::byte* shared, Helpers& helpers) const {
  // All chosen outputs ignore the same axes: one element along each is enough.
  axes.erase(std::remove_if(axes.begin(), axes.end(),
                            [&](const Axis& x) { return x.use[chosen[0]] == Use::kIgnored; }),
             axes.end());
  if (std::any_of(axes.begin(), axes.end(), [](const Axis& x) { return x.extent == 0; })) {
    // No elements: what keeps all axes is empty, what does not is an empty sum.
    for (size_t o : chosen) {
      const int64_t bytes = results[o].values() * plan_.stored_bytes();
      if (bytes) std::memset(results[o].data, 0, bytes);
    }
    return;
  }

  std::vector<AlignedBytes> zeros;
  std::vector<std::byte*> inputs(plan_.inputs.size(), nullptr);
  size_t argument = 0;
  for (size_t i = 0; i < plan_.inputs.size(); ++i) {
    if (plan_.inputs[i].kind == Input::kConstant) continue;
    const Array& array = arguments[argument++];
    if (!plan_.moves(i)) continue;
    inputs[i] = array.data;
    if (array.values() == 0) {
      // It is empty along an ignored axis; what is read in its place is not used.
      const int64_t bytes = plan_.tile_bytes(i);
      zeros.push_back(AllocateAligned(bytes));
      std::memset(zeros.back().get(), 0, bytes);
      inputs[i] = zeros.back().get();
      for (Axis& axis : axes) axis.inputs[i] = 0;
    }
  }

  // The axes that more outputs keep are slower, so that the elements of every sum are neighbours.
  OrderByMemory(plan_, axes);
  const auto keepers = [&](const Axis& axis) {
    return std::count_if(chosen.begin(), chosen.end(),
                         [&](size_t o) { return axis.use[o] == Use::kKept; });
  };
  std::stable_sort(axes.begin(), axes.end(),
                   [&](const Axis& a, const Axis& b) { return keepers(a) > keepers(b); });
  axes = Collapse(axes);

  std::vector<std::byte*> outputs(plan_.outputs.size(), nullptr);
  std::vector<Target> targets(plan_.outputs.size());
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
  Pass(plan_, kernels_, whole_, rest_, shared, shared + panels(), std::move(axes),
       std::move(targets), inputs, std::move(outputs))
      .Run(helpers);
}

}  // namespace jaxmagma
