// What a custom call says: its attributes, checked once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmagma {

// An operand that is copied to constant memory before each launch.
struct Copy {
  int64_t operand;
  int64_t offset;  // in the bank
  int64_t bytes;
};

struct Call {
  std::string name;
  std::string source;
  Signature signature;
  std::vector<Copy> copies;
  int64_t threads = 0;       // of a block
  int64_t shared_bytes = 0;  // of a block
  std::string bank;          // constant memory: the bytes of constants, zeros for what is copied
  std::string table;         // constants in global memory
};

// Returns what is wrong with the attributes, or nothing.
std::string Decode(const xla::ffi::Dictionary& attributes, Call& call);

}  // namespace jaxmagma
