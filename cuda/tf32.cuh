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

// What a lane has of a product for two times eight fibres: parts of values number `lane` of its own
// and, of eight columns, 4 + `lane`; and of a piece of a matrix of four or eight columns, eight
// rows.
template <int SLOTS>
struct Parts {
  float high[SLOTS][2], low[SLOTS][2], rounded[SLOTS][2];
};
template <int SLOTS>
struct PartsOfTable {
  float high[SLOTS], low[SLOTS];
};

// high b.high + low b.high + rounded b.low. The product of the low parts is too little to count;
// what it is on average is added by rounding. Tensor cores round sums towards zero, so they begin
// with none (H. Ootomo and R. Yokota, "Recovering single precision accuracy from Tensor Cores while
// surpassing the FP32 theoretical peak performance", IJHPCA 2022). It is one statement because a
// compiler takes its time for each.
#ifdef __CUDACC__
__device__
__forceinline__ void multiply(float (&sum)[2][2], const Parts<1>& a, const PartsOfTable<1>& b) {
#define JAXMAGMA_MMA "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
  asm(JAXMAGMA_MMA "{%4, %5}, {%11}, {%12, %12, %12, %12};\n" JAXMAGMA_MMA
                   "{%6, %7}, {%10}, {%0, %1, %2, %3};\n" JAXMAGMA_MMA
                   "{%8, %9}, {%10}, {%0, %1, %2, %3};"
      : "=&f"(sum[0][0]), "=&f"(sum[0][1]), "=&f"(sum[1][0]), "=&f"(sum[1][1])
      : "r"(__float_as_int(a.rounded[0][0])), "r"(__float_as_int(a.rounded[0][1])),
        "r"(__float_as_int(a.low[0][0])), "r"(__float_as_int(a.low[0][1])),
        "r"(__float_as_int(a.high[0][0])), "r"(__float_as_int(a.high[0][1])),
        "r"(__float_as_int(b.high[0])), "r"(__float_as_int(b.low[0])), "f"(0.0f));
#undef JAXMAGMA_MMA
}
__device__ __forceinline__ void multiply(float (&sum)[2][2], const Parts<2>& a,
                                         const PartsOfTable<2>& b) {
#define JAXMAGMA_MMA "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
  asm(JAXMAGMA_MMA "{%4, %5, %6, %7}, {%18, %19}, {%20, %20, %20, %20};\n" JAXMAGMA_MMA
                   "{%8, %9, %10, %11}, {%16, %17}, {%0, %1, %2, %3};\n" JAXMAGMA_MMA
                   "{%12, %13, %14, %15}, {%16, %17}, {%0, %1, %2, %3};"
      : "=&f"(sum[0][0]), "=&f"(sum[0][1]), "=&f"(sum[1][0]), "=&f"(sum[1][1])
      : "r"(__float_as_int(a.rounded[0][0])), "r"(__float_as_int(a.rounded[0][1])),
        "r"(__float_as_int(a.rounded[1][0])), "r"(__float_as_int(a.rounded[1][1])),
        "r"(__float_as_int(a.low[0][0])), "r"(__float_as_int(a.low[0][1])),
        "r"(__float_as_int(a.low[1][0])), "r"(__float_as_int(a.low[1][1])),
        "r"(__float_as_int(a.high[0][0])), "r"(__float_as_int(a.high[0][1])),
        "r"(__float_as_int(a.high[1][0])), "r"(__float_as_int(a.high[1][1])),
        "r"(__float_as_int(b.high[0])), "r"(__float_as_int(b.high[1])),
        "r"(__float_as_int(b.low[0])), "r"(__float_as_int(b.low[1])), "f"(0.0f));
#undef JAXMAGMA_MMA
}
#else
template <int SLOTS>
void multiply(float (&sum)[2][2], const Parts<SLOTS>& a, const PartsOfTable<SLOTS>& b) {
  for (int w = 0; w < 2; ++w) {
    sum[w][0] = sum[w][1] = 0;
    for (int slot = 0; slot < SLOTS; ++slot) {
      emulator::MultiplyAdd(sum[w], a.rounded[slot][w], b.low[slot]);
      emulator::MultiplyAdd(sum[w], a.low[slot][w], b.high[slot]);
      emulator::MultiplyAdd(sum[w], a.high[slot][w], b.high[slot]);
    }
  }
}
#endif

// Parts of values of W times eight fibres, of two at a time. Infinity has no low part, and as
// little as any value has in place of NaN.
template <int SLOTS, int W>
struct PartsOfFibres {
  Parts<SLOTS> pair[(W + 1) / 2] = {};
  __device__ __forceinline__ explicit PartsOfFibres(const Pack<float, W> (&a)[2]) {
    unrolled<W>([&](int w) {
      Parts<SLOTS>& parts = pair[w / 2];
      unrolled<SLOTS>([&](int slot) {
        const float x = parts.high[slot][w % 2] = a[slot].value[w];
        parts.rounded[slot][w % 2] = rounded_part(x);
        parts.low[slot][w % 2] = ::fminf(x - high_part(x), 0x1p117f);
      });
    });
  }
};

// c += a b, for W times eight fibres.
template <int W, int SLOTS>
__device__ __forceinline__ void multiply_add(Pack<float, W> (&c)[2],
                                             const PartsOfFibres<SLOTS, W>& a,
                                             const PartsOfTable<SLOTS>& b) {
  unrolled<(W + 1) / 2>([&](int pair) {
    float sum[2][2];
    multiply(sum, a.pair[pair], b);
    unrolled<2>([&](int one) {
      const int w = 2 * pair + one;
      if (w == W) return;
      unrolled<2>([&](int i) { c[i].value[w] += sum[one][i]; });
    });
  });
}

}  // namespace jaxmagma
