// NVIDIA's run-time compiler, found where JAX's own packages or the system have it.
#pragma once

#include <string>
#include <string_view>

namespace jaxmagma {

struct Compiled {
  std::string code;  // a cubin; PTX if this compiler is older than the GPU. Empty after an error.
  std::string log;   // what the compiler said, or why there is none
};

// Identifies the compiler, for cache keys; empty, with `why`, if there is none.
std::string NvrtcVersion(std::string* why);

// Compiles a kernel for compute capability `arch`, 90 for sm_90.
Compiled Compile(std::string_view source, int arch);

}  // namespace jaxmagma
