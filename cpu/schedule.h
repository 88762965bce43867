// A plan made ready for blocks of a certain number of elements and one instruction set: every loop
// nest of an instruction becomes tables of offsets, every shared matrix a panel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "plan.h"

namespace jaxmagma {

// Copies one shared operand into the order in which the kernel reads it.
struct Packing {
  int64_t from;                  // place in shared memory
  int64_t to;                    // place in the panels
  std::vector<int32_t> offsets;  // of panel[i] in the operand, in values
};

struct Schedule {
  int64_t block_elements;
  std::vector<Step> steps;
  std::vector<std::unique_ptr<std::vector<int32_t>>> tables;
  std::vector<std::unique_ptr<std::vector<Micro>>> expressions;
  int64_t slot_reals = 0;  // the most that an expression needs
  std::vector<Packing> packings;
  int64_t panel_values = 0;
  // Of each input, how much of the work is done before it is read for the first time.
  std::vector<double> first_reads;
};

Schedule MakeSchedule(const Plan& plan, const Kernels& kernels, int64_t block_elements);

// Computes the shared steps of a plan in `shared`, where the shared inputs are already.
void RunSharedSteps(const Plan& plan, const Kernels& kernels, void* shared);

void PackPanels(const Plan& plan, const Schedule& schedule, const void* shared, void* panels);

}  // namespace jaxmagma
