// Runs a plan on the arrays of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "axes.h"
#include "kernels.h"
#include "memory.h"
#include "plan.h"
#include "schedule.h"
#include "threads.h"

namespace jaxmagma {

// A plan and everything about it that does not depend on the arrays of one call. Immutable, so that
// any number of calls may run it at once.
class Executor {
 public:
  explicit Executor(Plan plan);

  const Plan& plan() const { return plan_; }

  // `arguments` are the inputs that are not constants, in order. Returns what is wrong, or nothing.
  std::string Run(const std::vector<Array>& arguments, const std::vector<Array>& results,
                  Helpers& helpers) const;

 private:
  void RunPass(std::vector<Axis> axes, const std::vector<size_t>& chosen,
               const std::vector<Array>& arguments, const std::vector<Array>& results,
               const std::byte* shared, Helpers& helpers) const;

  // The memory all elements share: the shared tiles, and behind them the panels.
  AlignedBytes MakeShared(const std::vector<Array>& arguments) const;
  int64_t panels() const;  // where the panels start, in bytes

  const Plan plan_;
  const Kernels& kernels_;
  const Schedule whole_;          // for whole blocks
  const Schedule rest_;           // for the elements left over, one vector of them at a time
  AlignedBytes constant_shared_;  // if no shared operand is an argument
};

}  // namespace jaxmagma
