// Runs a plan on the arrays of one call: batch axes, blocks, sums over elements, threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "plan.h"
#include "schedule.h"

namespace jaxmagma {

struct FreeAligned {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeAligned>;
AlignedBytes AllocateAligned(size_t bytes);

// One array of a call, row-major.
struct Array {
  std::byte* data;
  const int64_t* dims;
  size_t rank;
};

// Threads that may help. `Schedule` may run the task at any later time, or never.
class Helpers {
 public:
  virtual ~Helpers() = default;
  virtual int64_t count() const = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

// A plan and everything about it that does not depend on the arrays of one call. Immutable, so that
// any number of calls may run it at once.
struct Program {
  explicit Program(Plan plan);

  // `arguments` are the inputs that are not constants, in order. Returns why not, or nothing.
  std::string Run(const std::vector<Array>& arguments, const std::vector<Array>& results,
                  Helpers& helpers) const;

  // The memory all elements share: the shared tiles, and behind them the panels.
  AlignedBytes MakeShared(const std::vector<Array>& arguments) const;
  int64_t panels() const;  // where the panels start, in bytes

  const Plan plan;
  const Kernels& kernels;
  const Schedule whole;  // for whole blocks
  const Schedule rest;   // for the elements left over, one vector of them at a time
  AlignedBytes constant_shared;  // if no shared operand is an argument
};

}  // namespace jaxmagma
