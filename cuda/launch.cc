#include "launch.h"

#include <algorithm>
#include <limits>

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

std::string Named(int64_t buffer) {
  return "buffer " + std::to_string(buffer);
}

// The extents of the batch axes, on which all arrays agree.
std::string FindExtents(const Signature& signature, const std::vector<Array>& arrays,
                        std::vector<int64_t>& extents) {
  for (const auto& pointer : signature.pointers) {
    if (static_cast<size_t>(pointer.buffer) >= arrays.size()) return "the call has too few buffers";
    const Array& array = arrays[pointer.buffer];
    if (array.rank < pointer.axes.size()) return Named(pointer.buffer) + " has too few axes";
    if (array.itemsize != pointer.itemsize) {
      return Named(pointer.buffer) + " has values of " + std::to_string(array.itemsize) +
             " bytes, not " + std::to_string(pointer.itemsize);
    }
    for (size_t n = 0; n < pointer.axes.size(); ++n) {
      for (size_t axis = 0; axis < extents.size(); ++axis) {
        if (signature.order[axis] != pointer.axes[n]) continue;
        if (extents[axis] >= 0 && extents[axis] != array.dims[n]) {
          return "arrays disagree on the extent of a batch axis";
        }
        extents[axis] = array.dims[n];
      }
    }
  }
  const auto unknown = [](int64_t extent) { return extent < 0; };
  return std::any_of(extents.begin(), extents.end(), unknown) ? "no array has one of the batch axes"
                                                              : "";
}

// The arrays that sums are made in and go to are as large as the kernels think.
std::string CheckSums(const Signature& signature, const std::vector<Array>& arrays, int64_t outer) {
  const size_t count = arrays.size();
  for (const auto& sum : signature.sums) {
    if (static_cast<size_t>(sum.workspace) >= count || static_cast<size_t>(sum.result) >= count) {
      return "the call has too few buffers";
    }
    const Array& workspace = arrays[sum.workspace];
    const Array& first = arrays[signature.sums[0].workspace];
    if (workspace.rank != 3 || workspace.dims[0] != outer || workspace.dims[1] < 1 ||
        workspace.dims[1] != first.dims[1] || workspace.dims[2] != sum.size ||
        workspace.values() < 0) {
      return "the workspace has the wrong shape";
    }
    if (arrays[sum.result].values() != outer * sum.size ||
        arrays[sum.result].itemsize != workspace.itemsize) {
      return Named(sum.result) + " is not as large as its sums";
    }
  }
  return "";
}

}  // namespace

int64_t Array::values(size_t first) const {
  int64_t product = 1;
  for (size_t axis = first; axis < rank; ++axis) {
    if (dims[axis] < 0 || __builtin_mul_overflow(product, dims[axis], &product)) return -1;
  }
  return product;
}

std::string Prepare(const Signature& signature, const std::vector<Array>& arrays,
                    int64_t most_blocks, Launch& launch) {
  const size_t rank = signature.order.size();
  std::vector<int64_t> extents(rank, -1);
  std::string error = FindExtents(signature, arrays, extents);
  if (!error.empty()) return error;
  int64_t inner = 1;
  launch.outer = 1;
  for (size_t axis = 0; axis < rank; ++axis) {
    int64_t& product = static_cast<int64_t>(axis) < signature.kept ? launch.outer : inner;
    if (__builtin_mul_overflow(product, extents[axis], &product)) return "too many elements";
  }
  error = CheckSums(signature, arrays, launch.outer);
  if (!error.empty()) return error;
  for (const auto& pointer : signature.pointers) {
    const int64_t values = arrays[pointer.buffer].values(pointer.axes.size());
    const bool sum = std::any_of(signature.sums.begin(), signature.sums.end(),
                                 [&](const auto& x) { return x.workspace == pointer.buffer; });
    if (!sum && values != pointer.size) {
      return Named(pointer.buffer) + " has tiles of " + std::to_string(values) + " values, not " +
             std::to_string(pointer.size);
    }
  }
  launch.chunks = 1;
  if (signature.sums.empty()) {
    launch.blocks = inner / signature.elements + (inner % signature.elements != 0);
    if (signature.resident) launch.blocks = std::min(launch.blocks, most_blocks);
  } else {
    const Array& workspace = arrays[signature.sums[0].workspace];
    launch.chunks = WholeRounds(workspace.dims[1], launch.outer, most_blocks);
    launch.blocks = launch.outer * launch.chunks;
  }

  std::vector<std::vector<int64_t>> strides;
  for (const auto& pointer : signature.pointers) {
    const Array& array = arrays[pointer.buffer];
    launch.pointers.push_back(array.data);
    if (pointer.gathered) {
      if (array.rank <= pointer.axes.size()) return "a gathered vector has no axis";
      const int64_t length = array.dims[pointer.axes.size()];
      if (length > std::numeric_limits<int32_t>::max()) return "a gathered vector is too long";
      launch.lengths.push_back(static_cast<int>(length));
    }
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
