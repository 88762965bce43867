// Looks libmvec up.

#include "vector_functions.h"

#include <dlfcn.h>

#include <cstddef>
#include <string>

namespace jaxmagma {

void* FindVectorFunction(char isa, int lanes, int operands, const char* name) noexcept {
  static void* const library = dlopen("libmvec.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  const std::string symbol = std::string("_ZGV") + isa + "N" + std::to_string(lanes) +
                             std::string(static_cast<size_t>(operands), 'v') + "_" + name;
  return dlsym(library, symbol.c_str());
}

}  // namespace jaxmagma
