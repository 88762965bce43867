// The plan as the attributes describe it: what one element computes and where its tiles live.
//
// jaxmagma/lowering/cpu.py writes the format and documents it. Nothing here depends on the number
// of elements, on the instruction set, or on the arrays of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jaxmagma {

enum class DType : int64_t { kF32, kF64, kC64, kC128 };

constexpr bool IsComplex(DType t) { return t == DType::kC64 || t == DType::kC128; }
constexpr bool IsDouble(DType t) { return t == DType::kF64 || t == DType::kC128; }

struct Input {
  enum Kind : int64_t { kBatched, kShared, kConstant } kind;
  int64_t place;  // of a shared one, in the memory all elements share
  std::vector<int64_t> tile;
  std::vector<int64_t> batch;
  int64_t size;  // values of a tile
};

struct Output {
  std::vector<int64_t> tile;
  std::vector<int64_t> batch;
  std::vector<int64_t> summed;  // batch axes the result is summed over
  int64_t size;
};

struct Loop {
  int64_t extent;
  int64_t out;
  int64_t left;
  int64_t right;
};

enum class Opcode : int64_t { kLoad, kMultiply, kStore, kSpread, kProduct, kRearrange, kAdd };

struct Instruction {
  Opcode opcode;
  int64_t array = 0;  // number of an input or output
  int64_t out = 0;    // places
  int64_t left = 0;
  int64_t right = 0;
  int64_t count = 0;
  bool accumulate = false;
  bool left_shared = false;
  bool right_shared = false;
  std::vector<Loop> loops;
};

struct Plan {
  DType dtype;
  int64_t batch_rank;
  int64_t flops;         // per element
  int64_t shared_size;   // values
  int64_t scratch_size;  // values per element
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<Instruction> shared_steps;
  std::vector<Instruction> steps;
  std::vector<std::byte> constants;

  // Reals per value.
  int64_t planes() const { return IsComplex(dtype) ? 2 : 1; }
  int64_t real_bytes() const { return IsDouble(dtype) ? 8 : 4; }
  int64_t value_bytes() const { return planes() * real_bytes(); }
};

// Reads the attributes. On failure returns false and says why in `error`: no attribute, however
// wrong, makes the executor touch memory that is not its own.
bool DecodePlan(const int64_t* code, size_t size, const uint8_t* constants, size_t constants_size,
                Plan& plan, std::string& error);

}  // namespace jaxmagma
