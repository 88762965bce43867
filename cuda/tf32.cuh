// Products of float32 by tensor cores, which multiply values of tf32. These have eleven digits of
// the 24 that float32 has: a value of the latter is split in a high and a low part (S. Markidis et
// al., "NVIDIA Tensor Core Programmability, Performance & Precision", IPDPSW 2018).
#pragma once

#include "pack.cuh"

namespace jaxmagma {

// Tensor cores do not look at the lowest 13 bits; to add this is to round.
constexpr int kLowBits = (1 << 13) - 1, kHalfOfLowBits = 1 << 12;

__device__ __forceinline__ float high_part(float x) {
  return __int_as_float(__float_as_int(x) & ~kLowBits);
}
__device__ __forceinline__ float rounded_part(float x) {
  return __int_as_float(__float_as_int(x) + kHalfOfLowBits);
}

// The low part of a value of a table. It has the sign of the value, and is not zero if that is not:
// infinity times each part is what infinity times the value is.
__device__ __forceinline__ float low_part_of_table(float x) {
  const float low = x - high_part(x);
  return low == 0 ? 0x1p-60f * x : rounded_part(low);
}

// c += a b for two times eight fibres, of which a lane has value number `lane` of its own; b is a
// piece of a matrix for four of its columns and eight of its rows.
__device__ __forceinline__ void multiply_add(float (&c)[2][2], const float (&a)[1][2],
                                             const float (&b)[1]) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(__float_as_int(a[0][0])), "r"(__float_as_int(a[0][1])), "r"(__float_as_int(b[0])));
#else
  for (int w = 0; w < 2; ++w) emulator::MultiplyAdd(c[w], a[0][w], b[0]);
#endif
}

// The same for eight columns, and values number `lane` and 4 + `lane`.
__device__ __forceinline__ void multiply_add(float (&c)[2][2], const float (&a)[2][2],
                                             const float (&b)[2]) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(__float_as_int(a[0][0])), "r"(__float_as_int(a[0][1])), "r"(__float_as_int(a[1][0])),
        "r"(__float_as_int(a[1][1])), "r"(__float_as_int(b[0])), "r"(__float_as_int(b[1])));
#else
  for (int n = 0; n < 4; ++n) emulator::MultiplyAdd(c[n % 2], a[n / 2][n % 2], b[n / 2]);
#endif
}

// The same of float32, for W times eight fibres. The product of the low parts is too little to
// count; what it is on average is added by rounding. Infinity has no low part, and as little as any
// value has in place of NaN. Tensor cores round sums towards zero, so they begin with none (H.
// Ootomo and R. Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing
// the FP32 theoretical peak performance", IJHPCA 2022).
template <int W, int SLOTS>
__device__ __forceinline__ void multiply_add(Pack<float, W> (&c)[2],
                                             const Pack<float, W> (&a)[SLOTS],
                                             const float (&b_high)[SLOTS],
                                             const float (&b_low)[SLOTS]) {
#pragma unroll
  for (int w = 0; w < W; w += 2) {
    float sum[2][2] = {}, high[SLOTS][2] = {}, rounded[SLOTS][2] = {}, low[SLOTS][2] = {};
#pragma unroll
    for (int one = 0; one < 2 && w + one < W; ++one) {
      unrolled<SLOTS>([&](int slot) {
        const float x = high[slot][one] = a[slot].value[w + one];
        rounded[slot][one] = rounded_part(x);
        low[slot][one] = ::fminf(x - high_part(x), 0x1p117f);
      });
    }
    multiply_add(sum, rounded, b_low);
    multiply_add(sum, low, b_high);
    multiply_add(sum, high, b_high);
#pragma unroll
    for (int one = 0; one < 2 && w + one < W; ++one) {
      unrolled<2>([&](int i) { c[i].value[w + one] += sum[one][i]; });
    }
  }
}

}  // namespace jaxmagma
