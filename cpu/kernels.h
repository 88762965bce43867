// What the executor asks of one instruction set: run a schedule on one block of elements.
//
// kernels.cc implements this once per instruction set. It must not share inline functions with the
// rest of the program (the linker would keep one copy, perhaps one with instructions the machine
// lacks), so everything in this file is plain data.
#pragma once

#include <cstdint>

namespace jaxmagma {

// The result, up to three operands, and what says where it is needed.
constexpr int kMicroOperands = 5;

// One operation of an expression, on the values of a chunk of points: `out = function(a, b, c)`.
// Places and strides count reals.
struct Micro {
  enum Kind : int32_t {
    kFunction,
    kFill,     // out = one value at place[1], once for all chunks
    kCollect,  // out = values at place[1] + table
    kWindow,   // out = `width` values of an input a point, from value place[1] on
    kWhere,    // as kFunction, where operand 4 is not zero, or where it is
  } kind;
  int32_t function;  // a Function
  bool flat;         // all operands are next to each other
  bool shared;       // kFill, kCollect: from the memory all elements share
  bool nonzero;      // kWhere
  bool in_scratch[kMicroOperands];
  int64_t place[kMicroOperands];   // in scratch or the slots
  int64_t stride[kMicroOperands];  // from point to point
  const int32_t* table;
  int32_t input;
  int32_t width;
};

// One instruction of a plan, made ready for a block of `EB` elements. All offsets count reals. A
// *column* is one vector of one value: EB / lanes columns make up a value.
struct Step {
  enum Kind : int32_t {
    kLoad,      // out = input
    kMultiply,  // out = input * right
    kStore,     // output = left, a row for each element
    kSpread,    // out = a shared tile
    kMatrix,    // out[row, column] = sum_k shared[row, k] * right[k, column]
    kScale,     // out[pair] = shared[pair] * right[pair]
    kGemm,      // out[pair, row, column] = sum_k left[pair, row, k] * right[pair, k, column]
    kTimes,     // out[pair] = left[pair] * right[pair]
    kSum,       // out[column] = sum_k left[column, k]
    kZero,      // out = 0
    kGather,    // out = rows of input `left` that input `array` points to
    kExpression,
    // out_row[i] = sum_k input[left_inner[i, k]] * right_inner[k], `rows` by `rows`, at each point
    kPointMatrix,
    kDirect,  // output[row, column] = sum_k input[row, k] * input[k, column], without lanes
  } kind;
  int64_t work;   // roughly, the cycles it takes
  int32_t array;  // number of an input or output
  int32_t accumulate;
  // kLoad, kMultiply, kStore: reals of a row. kSpread: values. kZero: reals. kPointMatrix: reals of
  // an entry at all points
  int64_t count;
  int64_t out;
  int64_t left;  // of a shared operand, in the panels
  int64_t right;

  int32_t rows, columns, inner, pairs;
  // kMatrix: rows are worked on in `blocks` of `block_rows`, the last `blocks - full_blocks` of
  // which have one row less; a block's panel is [inner][row].
  int32_t blocks, full_blocks, block_rows;
  int32_t chunk;  // columns that go through all blocks of rows before the next ones do
  // Tables of offsets, null where all are zero.
  const int32_t* left_row;
  const int32_t* left_inner;
  const int32_t* left_pair;
  const int32_t* right_column;
  const int32_t* right_inner;
  const int32_t* right_pair;
  const int32_t* out_row;
  const int32_t* out_column;
  const int32_t* out_pair;
  // kDirect: `left` and `right` are numbers of inputs, or offsets in shared memory. Strides;
  // columns are next to each other.
  bool left_shared, right_shared;
  int64_t left_row_stride, left_inner_stride, right_inner_stride, right_column_stride;
  int64_t out_row_stride;
  // kExpression: `chunk` points at a time.
  int64_t points;
  const Micro* micros;
  int64_t micro_count;
  // kGather: `rows` indices below `limit`, `columns` reals each.
  int64_t limit;
};

// A stretch of memory that the next block reads.
struct Range {
  const char* begin;
  const char* end;
};

// The rows of a block in one array: lane l's is at `base + offsets[l]`, in bytes.
struct Rows {
  uintptr_t base;
  const int64_t* offsets;
};

// Whole lines of the cache on their way to memory.
struct Lines {
  const char* from;
  char* to;
  int64_t count;
};

// One block of elements. Null offsets of an output mean that its lanes are added to `sums`,
// [real][lane], instead.
struct Block {
  int64_t count;  // elements; lanes from there on are copies of the last one
  void* scratch;
  void* staged;        // rows of 16-bit operands in 32 bits, or results that go past the caches
  void* slots;         // of expressions
  const void* shared;  // the memory all elements share
  const void* panels;  // shared left operands, packed
  const Rows* inputs;
  const Rows* outputs;
  void* const* sums;
  bool stream;       // results go past the caches
  int64_t straight;  // rows of so many reals do so from registers, shorter ones are staged
  Lines* late;       // those that are still staged; the next block sends them
  const Range* ahead;
  int64_t ahead_count;
  int64_t ahead_lines;  // in all ranges together
};

struct Kernels {
  const char* name;
  int64_t lanes[2];    // of float, double
  int64_t block_rows;  // most rows of a kMatrix block, of a real and of a complex product
  int64_t block_rows_complex;
  // By DType. `lanes` is the number of elements of the block; the steps were made for as many.
  void (*run[6])(const Step* steps, int64_t count, int64_t lanes, const Block& block);
  // Between an array and the type of the arithmetic; null where they are the same.
  void (*widen[6])(const void* from, float* to, int64_t count);
  void (*narrow[6])(const float* from, void* to, int64_t count);
  // One value of a pointwise function, by DType.
  void (*map[6])(int32_t function, const void* a, const void* b, const void* c, void* out);
  // Follows the last block with `stream` before another thread may read results. It is too slow to
  // follow each.
  void (*finish_streams)(Lines& late);
};

#define JAXMAGMA_DECLARE_KERNELS(isa) \
  namespace isa {                     \
  extern const Kernels kKernels;      \
  }
JAXMAGMA_DECLARE_KERNELS(baseline)
JAXMAGMA_DECLARE_KERNELS(avx2)
JAXMAGMA_DECLARE_KERNELS(avx512)
#undef JAXMAGMA_DECLARE_KERNELS

// The best set this machine has, or the one JAXMAGMA_CPU_ISA names. Throws std::invalid_argument,
// with the choices, if there is no such set here.
const Kernels& BestKernels();

}  // namespace jaxmagma
