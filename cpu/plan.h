// The plan as the attributes describe it: what one element computes and where its tiles live.
//
// jaxmagma/lowering/cpu writes the format and documents it. Nothing here depends on the number
// of elements, on the instruction set, or on the arrays of one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jaxmagma {

enum class DType : int64_t { kF32, kF64, kC64, kC128, kF16, kBF16 };
constexpr int kDTypes = 6;

constexpr bool IsComplex(DType t) {
  return t == DType::kC64 || t == DType::kC128;
}
// 16-bit reals are computed with in 32 bits.
constexpr bool IsHalf(DType t) {
  return t == DType::kF16 || t == DType::kBF16;
}
constexpr bool IsDouble(DType t) {
  return t == DType::kF64 || t == DType::kC128;
}

struct Input {
  // A vector is gathered from, where 32-bit indices say; neither is loaded as a tile.
  enum Kind : int64_t { kBatched, kShared, kConstant, kVector, kIndex } kind;
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
  int64_t third = 0;
};

enum class Opcode : int64_t {
  kLoad,
  kMultiply,
  kStore,
  kSpread,
  kProduct,
  kRearrange,
  kZero,
  kGather,
  kMap,
  kExpression,
  kGemm,
  kPointMatrix
};

// One matrix product per element, from and to memory. The columns of the result stand next to each
// other; a right operand for which that is not so is put in order first, in scratch.
struct Gemm {
  int64_t left, right;  // numbers of inputs, or places in shared memory
  bool left_shared, right_shared;
  int64_t rows, columns, inner;
  int64_t left_row, left_inner, right_inner, right_column, out_row;  // strides
};

// Where the points of a value of an expression are.
struct Address {
  bool in_scratch;
  int64_t place;   // in scratch, or the number of a slot
  int64_t offset;  // from the start of the slot
  int64_t stride;
};

// One operation of an expression.
struct MicroOperation {
  enum Kind : int64_t { kFunction, kFill, kCollect, kWindow, kWhere } kind;
  int64_t function = 0;
  Address addresses[4]{};  // of the result, and the operands
  Address where{};         // of the value that says where the function is needed
  bool nonzero = false;    // namely where it is not zero
  int64_t slot = 0;        // of what is filled, collected or loaded
  bool shared = false;
  int64_t place = 0;
  int64_t input = 0;
  int64_t width = 0;
  std::vector<Loop> loops;
};

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
  int64_t third = 0;  // kMap: the last operand's place. kGather: values of a row
  std::vector<Loop> loops;
  Gemm gemm{};
  // kPointMatrix: places of the results, of the vector, and, row by row, in the input.
  std::vector<int64_t> outs, rights, entries;
  // kExpression, kPointMatrix: `count` points.
  int64_t slots = 0;
  std::vector<MicroOperation> micros;
};

struct Plan {
  DType dtype;
  int64_t batch_rank;
  int64_t flops;         // per element
  int64_t shared_size;   // values
  int64_t scratch_size;  // values per element
  int64_t block;         // vectors of elements (direct: elements) in a block; 0: as seems best
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<Instruction> shared_steps;
  std::vector<Instruction> steps;
  std::vector<std::byte> constants;

  // Whether it works on elements one by one, without lanes or scratch.
  bool direct() const { return !steps.empty() && steps[0].opcode == Opcode::kGemm; }

  // Whether an input is walked from element to element.
  bool moves(size_t i) const {
    return inputs[i].kind == Input::kBatched || inputs[i].kind == Input::kVector ||
           inputs[i].kind == Input::kIndex;
  }
  // Bytes of a tile of an input, as it is in memory.
  int64_t tile_bytes(size_t i) const {
    return inputs[i].size * (inputs[i].kind == Input::kIndex ? 4 : stored_bytes());
  }

  // Reals per value.
  int64_t planes() const { return IsComplex(dtype) ? 2 : 1; }
  int64_t real_bytes() const { return IsDouble(dtype) ? 8 : 4; }
  int64_t value_bytes() const { return planes() * real_bytes(); }
  // Bytes of a value in the arrays of a call.
  int64_t stored_bytes() const { return IsHalf(dtype) ? 2 : value_bytes(); }
};

// Reads the attributes. On failure returns false and says why in `error`: no attribute, however
// wrong, makes the executor touch memory that is not its own.
bool DecodePlan(const int64_t* code, size_t size, const uint8_t* constants, size_t constants_size,
                Plan& plan, std::string& error);

}  // namespace jaxmagma
