// Which of the compiled instruction sets this machine runs.

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace jaxmagma {
namespace {

struct InstructionSet {
  const Kernels& kernels;
  bool supported;  // by this machine
};

const Kernels& Choose() {
  // The best first; every machine has the last.
  const InstructionSet sets[] = {
#if JAXMAGMA_HAVE_AVX512
      {avx512::kKernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma")},
#endif
#if JAXMAGMA_HAVE_AVX2
      {avx2::kKernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {baseline::kKernels, true},
  };
  const char* variable = std::getenv("JAXMAGMA_CPU_ISA");
  const std::string name = variable ? variable : "";
  std::string choices;
  bool known = false;
  for (const InstructionSet& set : sets) {
    known |= name == set.kernels.name;
    if (!set.supported) continue;
    if (name.empty() || name == set.kernels.name) return set.kernels;
    choices += (choices.empty() ? "" : ", ") + std::string(set.kernels.name);
  }
  throw std::invalid_argument(
      "JAXMAGMA_CPU_ISA is '" + name + "', which " +
      (known ? "this processor lacks" : "is no instruction set of kernels") +
      "; it may be: " + choices);
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels& best = Choose();
  return best;
}

}  // namespace jaxmagma
