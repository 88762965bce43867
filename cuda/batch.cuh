// Which elements a group of threads works on, and where their tiles are.
//
// Elements are numbered by the batch axes, the last one fastest. An operand that does not carry an
// axis has stride 0 along it. The host fills a Batch from the extents of the arrays: all its fields
// are 64-bit integers.
#pragma once

namespace jaxmagma {

template <int RANK, int OPERANDS>
struct Batch {
  static_assert(RANK > 1, "one batch axis has a Batch of its own");
  long long outer;   // sums are kept apart over the outer elements
  long long inner;   // and run over the inner ones
  long long chunks;  // blocks that share the work on one outer element
  long long rank;    // axes left after merging those that are contiguous in every operand
  long long extent[RANK];
  long long stride[OPERANDS][RANK];

  // Offset of the tile of `element`, SIZE values, in operand OPERAND.
  template <int OPERAND, int SIZE>
  __device__ __forceinline__ long long offset(long long element) const {
    long long at = 0;
#pragma unroll
    for (int axis = RANK - 1; axis > 0; --axis) {
      if (axis < rank) {
        const long long rest = element / extent[axis];
        at += (element - rest * extent[axis]) * stride[OPERAND][axis];
        element = rest;
      }
    }
    return at + element * stride[OPERAND][0];
  }

  // Whether tiles of operands come before those of a slice, and others follow: unknown here.
  template <class Slice>
  __device__ __forceinline__ bool inside(const Slice&) const {
    return false;
  }
};

// One batch axis, which every batched operand carries: tiles follow each other.
template <int OPERANDS>
struct Batch<1, OPERANDS> {
  long long outer;
  long long inner;
  long long chunks;
  long long rank;

  template <int OPERAND, int SIZE>
  __device__ __forceinline__ long long offset(long long element) const {
    return element * SIZE;
  }

  // Of the first outer element: to ask for all takes registers.
  template <class Slice>
  __device__ __forceinline__ bool inside(const Slice& slice) const {
    return slice.first > 0 && slice.first + Slice::elements < inner;
  }
};

// Up to ELEMENTS consecutive elements. Where fewer are left, or none, the last one is read again.
template <int ELEMENTS>
struct Slice {
  static constexpr int elements = ELEMENTS;
  long long first;
  int last;  // of the elements there are, counted from `first`; negative if there are none

  __device__ __forceinline__ long long element(int e) const {
    return first + (e <= last ? e : last);
  }
  __device__ __forceinline__ bool has(int e) const { return e <= last; }
};

// The elements from `first` on, of those before `end`.
template <int ELEMENTS>
__device__ __forceinline__ Slice<ELEMENTS> slice(long long first, long long end) {
  const long long left = end - first;
  return {first, static_cast<int>(left < ELEMENTS ? left - 1 : ELEMENTS - 1)};
}

// Asks for values that will be needed soon, so that they come from the cache by then. Only a hint.
template <class T>
__device__ __forceinline__ void prefetch(const T* from, long long values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The copy engine takes whole groups of 16 bytes.
  const unsigned long long begin = (reinterpret_cast<unsigned long long>(from) + 15) / 16 * 16;
  const unsigned long long end = reinterpret_cast<unsigned long long>(from + values) / 16 * 16;
  if (begin < end) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin),
                 "r"(static_cast<unsigned>(end - begin)));
  }
#endif
}

// The tiles of a slice in operand OPERAND, where they follow each other.
template <int OPERAND, int SIZE, class T, class Batch, int ELEMENTS>
__device__ __forceinline__ void prefetch(const T* tiles, const Batch& batch,
                                         const Slice<ELEMENTS>& slice) {
  if (batch.rank == 1 && slice.last >= 0) {
    prefetch(tiles + batch.template offset<OPERAND, SIZE>(slice.first),
             static_cast<long long>(slice.last + 1) * SIZE);
  }
}

// ---- Who works on what -----------------------------------------------------------------------

// The elements [first, end) that a group of threads works through, slice by slice.
struct Run {
  long long first;
  long long end;
};

// Run number `group` of SPAN elements.
template <int SPAN, class Batch>
__device__ __forceinline__ Run run(const Batch& batch, long long group) {
  const long long first = group * SPAN;
  return {first, first + SPAN < batch.inner ? first + SPAN : batch.inner};
}

// The elements that a block sums: its share, in whole slices, of one outer element.
template <int ELEMENTS, class Batch>
__device__ __forceinline__ Run share(const Batch& batch, long long block) {
  const long long slices = (batch.inner + ELEMENTS - 1) / ELEMENTS;
  const long long outer = block / batch.chunks, chunk = block % batch.chunks;
  const long long begin = slices * chunk / batch.chunks * ELEMENTS;
  const long long end = slices * (chunk + 1) / batch.chunks * ELEMENTS;
  return {outer * batch.inner + begin,
          outer * batch.inner + (end < batch.inner ? end : batch.inner)};
}

}  // namespace jaxmagma
