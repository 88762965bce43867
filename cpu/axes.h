// The elements of a call: the batch axes of its arrays, and in which order to walk them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "plan.h"

namespace jaxmagma {

// One array of a call, row-major.
struct Array {
  std::byte* data;
  const int64_t* dims;
  size_t rank;

  int64_t values() const {
    if (std::find(dims, dims + rank, 0) != dims + rank) return 0;
    return std::accumulate(dims, dims + rank, int64_t{1}, std::multiplies<>());
  }
};

// What an output does with a batch axis. It ignores one that its value does not depend on.
enum class Use : char { kKept, kSummed, kIgnored };

// One axis of the element index space, with the stride of every operand in tiles.
struct Axis {
  int64_t extent;
  std::vector<int64_t> inputs;
  std::vector<int64_t> outputs;  // 0 where not kept
  std::vector<Use> use;          // by each output
};

// Finds the axes from the shapes of the arguments (the inputs that are not constants) and checks
// all shapes against the plan. Returns what is wrong, or nothing. Axes of extent one are left out.
std::string FindAxes(const Plan& plan, const std::vector<Array>& arguments,
                     const std::vector<Array>& results, std::vector<Axis>& axes);

// The order in which the largest operand lies in memory, slowest first. What it does not carry goes
// last, so that it stays in the cache meanwhile.
void OrderByMemory(const Plan& plan, std::vector<Axis>& axes);

// Neighbours that every operand walks like one axis become one.
std::vector<Axis> Collapse(const std::vector<Axis>& axes);

}  // namespace jaxmagma
