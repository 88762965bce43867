// Where the elements of a block are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "axes.h"
#include "kernels.h"

namespace jaxmagma {

// One operand of a pass: an array of tiles, walked along the axes of the pass.
struct Operand {
  std::byte* data;  // null: not used
  int64_t tile_bytes;
  std::vector<int64_t> strides;  // by axis, in bytes
  bool ahead = true;             // whether its tiles are read or written as a whole
  double first_read = 0;         // of an input: how much of a block's work comes before
};

// The rows of all operands for the elements [first, first + count).
struct BlockRows {
  int64_t first = 0;
  int64_t count = 0;
  int64_t lanes = 0;                          // of the block, which repeat the last element
  std::vector<Rows> operands;                 // by operand
  std::vector<std::vector<int64_t>> offsets;  // by operand, where lanes are not evenly apart
  std::vector<Range> reads;
  std::vector<Range> writes;
  int64_t lines = 0;           // of the cache, in all reads
  std::vector<int64_t> index;  // of the element that is being found
};

class RowFinder {
 public:
  // Of the operands, the first `inputs` are read. Ranges of a block come in the order of reading.
  RowFinder(std::vector<int64_t> extents, std::vector<Operand> operands, size_t inputs,
            int64_t lanes);

  // Lanes past the last element, up to `lanes`, repeat it.
  void Find(int64_t first, int64_t count, int64_t lanes, BlockRows& rows) const;

  const std::vector<Operand>& operands() const { return operands_; }

 private:
  std::vector<int64_t> extents_;
  std::vector<Operand> operands_;
  size_t inputs_;
  std::vector<size_t> order_;
  std::vector<std::vector<int64_t>> even_;  // by operand: offsets of lanes along the fastest axis
};

}  // namespace jaxmagma
