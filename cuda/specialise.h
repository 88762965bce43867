// A kernel for its exact sizes: compiled once, then found on disk.
#pragma once

#include <string>
#include <string_view>

#include "nvrtc.h"

namespace jaxmagma {

// The name in the cache of the kernel `source` for compute capability `arch`; empty if there is no
// compiler.
std::string CacheKey(std::string_view source, int arch);

// Machine code, from the cache unless `rebuild`. Any number of threads may ask at once: of those
// that ask for one kernel the first compiles it, and the others wait for what it got.
Compiled Specialise(std::string_view source, int arch, bool rebuild = false);

// What the machine code of one kernel needs of a multiprocessor.
struct Resources {
  int registers = 0;  // for one thread
  int shared = 0;     // bytes of one block, without those asked for at launch
  int local = 0;      // bytes of one thread that are not in registers: spills
};

// Reads them from the ELF file that a cubin is; all zero if `kernel` is not in it.
Resources ReadResources(std::string_view cubin, std::string_view kernel);

}  // namespace jaxmagma
