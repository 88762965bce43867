// From the arrays of a call to the parameters of a launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmagma {

struct Array {
  void* data;
  const int64_t* dims;
  size_t rank;
  int64_t itemsize;  // bytes of a value

  // Those of the axes from one on; -1 if they are more than there can be.
  int64_t values(size_t first = 0) const;
};

// How a kernel reads its call. The call's buffers are its operands, then its results.
struct Signature {
  struct Pointer {
    int64_t buffer = 0;
    int64_t size = 0;           // values of a tile
    int64_t itemsize = 0;       // bytes of a value
    bool gathered = false;      // a vector, read where an index says: the kernel is told its length
    std::vector<int64_t> axes;  // the batch axes of the array, slowest first
  };
  struct Sum {
    int64_t result;
    int64_t workspace;
    int64_t size;  // of a tile
  };
  int64_t kept = 0;            // batch axes that sums keep: the first ones of `order`
  std::vector<int64_t> order;  // batch axes in the order in which elements are numbered
  std::vector<Pointer> pointers;
  std::vector<Sum> sums;
  int64_t elements = 1;   // of a block
  bool resident = false;  // no more blocks than a device has room for: they take turns
};

// The kernel's parameters: a Batch (see batch.cuh), pointers, and the lengths of gathered vectors;
// and the number of blocks.
struct Launch {
  std::vector<int64_t> batch;
  std::vector<void*> pointers;
  std::vector<int> lengths;
  int64_t blocks = 0;
  int64_t outer = 1;
  int64_t chunks = 1;
};

// Returns what is wrong with the arrays, or nothing. A device has room for `most_blocks` at a time.
std::string Prepare(const Signature& signature, const std::vector<Array>& arrays,
                    int64_t most_blocks, Launch& launch);

}  // namespace jaxmagma
