#include "launch.h"

#include <algorithm>

namespace jaxmagma {
namespace {

// Strides of one operand along the element axes, in values; 0 along those it does not carry.
std::vector<int64_t> Strides(const Signature& signature, const Signature::Pointer& pointer,
                             const Array& array) {
  std::vector<int64_t> strides(signature.order.size(), 0);
  int64_t stride = 1;
  for (size_t axis = array.rank; axis-- > 0;) {
    if (axis < pointer.axes.size()) {
      for (size_t n = 0; n < strides.size(); ++n) {
        if (signature.order[n] == pointer.axes[axis]) strides[n] = stride;
      }
    }
    stride *= array.dims[axis];
  }
  return strides;
}

// Merges neighbouring axes along which every operand just continues.
void Merge(std::vector<int64_t>& extents, std::vector<std::vector<int64_t>>& strides) {
  for (size_t axis = extents.size(); axis-- > 1;) {
    bool continues = true;
    for (const auto& stride : strides) {
      continues = continues && stride[axis - 1] == stride[axis] * extents[axis];
    }
    if (!continues) continue;
    extents[axis - 1] *= extents[axis];
    extents.erase(extents.begin() + axis);
    for (auto& stride : strides) stride.erase(stride.begin() + axis - 1);
  }
}

// Blocks of a sum follow each other on a device in so many rounds at most: the more of them, the
// more there is to add up in the end.
constexpr int64_t kMostRounds = 2;

// So many chunks of each sum, or fewer, that the device is full from the first block to the last:
// what is left after whole rounds would take as long as another one.
int64_t WholeRounds(int64_t chunks, int64_t sums, int64_t most_blocks) {
  if (sums == 0 || chunks <= most_blocks / sums) return chunks;
  const int64_t rounds = std::min(kMostRounds, chunks * sums / most_blocks);
  return std::max<int64_t>(1, rounds * most_blocks / sums);
}

}  // namespace

std::string Prepare(const Signature& signature, const std::vector<Array>& arrays,
                    int64_t most_blocks, Launch& launch) {
  const size_t rank = signature.order.size();
  std::vector<int64_t> extents(rank, -1);
  for (const auto& pointer : signature.pointers) {
    if (pointer.buffer < 0 || static_cast<size_t>(pointer.buffer) >= arrays.size()) {
      return "the call has too few buffers";
    }
    const Array& array = arrays[pointer.buffer];
    if (array.rank < pointer.axes.size()) return "an array has too few axes";
    for (size_t n = 0; n < pointer.axes.size(); ++n) {
      for (size_t axis = 0; axis < rank; ++axis) {
        if (signature.order[axis] != pointer.axes[n]) continue;
        if (extents[axis] >= 0 && extents[axis] != array.dims[n]) {
          return "arrays disagree on the extent of a batch axis";
        }
        extents[axis] = array.dims[n];
      }
    }
  }
  int64_t inner = 1;
  launch.outer = 1;
  for (size_t axis = 0; axis < rank; ++axis) {
    if (extents[axis] < 0) return "no array has one of the batch axes";
    (static_cast<int64_t>(axis) < signature.kept ? launch.outer : inner) *= extents[axis];
  }
  launch.chunks = 1;
  if (signature.sums.empty()) {
    launch.blocks = inner / signature.elements + (inner % signature.elements != 0);
    if (signature.resident) launch.blocks = std::min(launch.blocks, most_blocks);
  } else {
    const int64_t workspace = signature.sums[0].workspace;
    if (workspace < 0 || static_cast<size_t>(workspace) >= arrays.size() ||
        arrays[workspace].rank != 3 || arrays[workspace].dims[0] != launch.outer) {
      return "the workspace has the wrong shape";
    }
    launch.chunks = WholeRounds(arrays[workspace].dims[1], launch.outer, most_blocks);
    launch.blocks = launch.outer * launch.chunks;
  }

  std::vector<std::vector<int64_t>> strides;
  for (const auto& pointer : signature.pointers) {
    launch.pointers.push_back(arrays[pointer.buffer].data);
    if (!pointer.axes.empty()) {
      strides.push_back(Strides(signature, pointer, arrays[pointer.buffer]));
    }
  }
  // One batch axis has no strides to pass: tiles follow each other.
  Merge(extents, strides);
  launch.batch = {launch.outer, inner, launch.chunks, static_cast<int64_t>(extents.size())};
  if (rank > 1) {
    extents.resize(rank, 1);
    launch.batch.insert(launch.batch.end(), extents.begin(), extents.end());
    for (auto& stride : strides) {
      stride.resize(rank, 0);
      launch.batch.insert(launch.batch.end(), stride.begin(), stride.end());
    }
  }
  return "";
}

}  // namespace jaxmagma
