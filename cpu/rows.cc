#include "rows.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memory.h"

namespace jaxmagma {

RowFinder::RowFinder(std::vector<int64_t> extents, std::vector<Operand> operands, size_t inputs,
                     int64_t lanes)
    : extents_(std::move(extents)), operands_(std::move(operands)), inputs_(inputs) {
  // A single element is an axis, too.
  if (extents_.empty()) {
    extents_.push_back(1);
    for (Operand& operand : operands_) operand.strides.push_back(0);
  }
  order_.resize(operands_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [this](size_t a, size_t b) {
    return operands_[a].first_read < operands_[b].first_read;
  });
  for (const Operand& operand : operands_) {
    even_.emplace_back(lanes);
    for (int64_t lane = 0; lane < lanes; ++lane) even_.back()[lane] = lane * operand.strides.back();
  }
}

void RowFinder::Find(int64_t first, int64_t count, int64_t lanes, BlockRows& rows) const {
  rows.first = first;
  rows.count = count;
  rows.lanes = lanes;
  rows.operands.resize(operands_.size());
  rows.offsets.resize(operands_.size());
  rows.reads.clear();
  rows.writes.clear();
  rows.lines = 0;
  if (count == 0) return;

  const size_t rank = extents_.size();
  std::vector<int64_t>& index = rows.index;
  index.resize(rank);
  for (size_t a = rank; a-- > 0;) {
    index[a] = first % extents_[a];
    first /= extents_[a];
  }
  const bool even = count == lanes && index.back() + count <= extents_.back();
  for (int64_t lane = 0; lane < count;) {
    // Along the fastest axis, elements are evenly apart.
    const int64_t run = std::min(count - lane, extents_.back() - index.back());
    for (size_t i : order_) {
      const Operand& operand = operands_[i];
      if (!operand.data) continue;
      int64_t offset = 0;
      for (size_t a = 0; a < rank; ++a) offset += index[a] * operand.strides[a];
      const int64_t step = operand.strides.back();
      if (even) {
        rows.operands[i] = {reinterpret_cast<uintptr_t>(operand.data) + offset, even_[i].data()};
      } else {
        rows.offsets[i].resize(lanes);
        for (int64_t l = 0; l < run; ++l) rows.offsets[i][lane + l] = offset + l * step;
      }
      if (operand.ahead) {
        std::vector<Range>& ranges = i < inputs_ ? rows.reads : rows.writes;
        const char* row = reinterpret_cast<const char*>(operand.data) + offset;
        const bool dense = step <= operand.tile_bytes;
        for (int64_t l = 0; l < (dense ? 1 : run); ++l, row += step) {
          ranges.push_back({row, row + (dense ? (run - 1) * step : 0) + operand.tile_bytes});
          if (i < inputs_) rows.lines += DivideUp(ranges.back().end - row, kAlignment);
        }
      }
    }
    lane += run;
    index.back() += run;
    for (size_t a = rank; a-- > 1 && index[a] == extents_[a];) {
      index[a] = 0;
      ++index[a - 1];
    }
  }
  if (even) return;
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (!operands_[i].data) continue;
    std::fill(rows.offsets[i].begin() + count, rows.offsets[i].end(), rows.offsets[i][count - 1]);
    rows.operands[i] = {reinterpret_cast<uintptr_t>(operands_[i].data), rows.offsets[i].data()};
  }
}

}  // namespace jaxmagma
