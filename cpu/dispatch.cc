// Which of the compiled instruction sets this machine runs.

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace jaxmagma {

const Kernels& BestKernels() {
  static const Kernels& best = [&]() -> const Kernels& {
    // The best first; one that is asked for by name is used only if the machine has it.
    const char* name = std::getenv("JAXMAGMA_CPU_ISA");
    auto wanted = [&](const Kernels& set) {
      return !name || !*name || !std::strcmp(name, set.name);
    };
#if JAXMAGMA_HAVE_AVX512
    if (wanted(avx512::kKernels) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma")) {
      return avx512::kKernels;
    }
#endif
#if JAXMAGMA_HAVE_AVX2
    if (wanted(avx2::kKernels) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return avx2::kKernels;
    }
#endif
    return baseline::kKernels;
  }();
  return best;
}

}  // namespace jaxmagma
