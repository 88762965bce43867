// How fast the float64 instructions of tensor cores, and multiply-adds, are from registers.
//
//   nvcc -arch=sm_90 -O3 -std=c++17 -o tensor_cores benchmarks/tensor_cores.cu && ./tensor_cores
#include <cstdio>

enum Instruction { M8N8K4, M16N8K4, M16N8K8, M16N8K16, FMA };

template <Instruction I>
__device__ __forceinline__ void multiply(double (&c)[4], const double (&a)[8],
                                         const double (&b)[4]) {
  if constexpr (I == M8N8K4) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%0,%1};"
                 : "+d"(c[0]), "+d"(c[1])
                 : "d"(a[0]), "d"(b[0]));
  } else if constexpr (I == M16N8K4) {
    asm volatile(
        "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(b[0]));
  } else if constexpr (I == M16N8K8) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
  } else if constexpr (I == M16N8K16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7,%8,%9,%10,%11},{%12,%13,%14,%15},{%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
  } else {
    c[0] = fma(a[0], b[0], c[0]);
  }
}

// CHAINS chains in each warp, every instruction of which waits for the one before.
template <Instruction I, int CHAINS>
__global__ void chains(double* to, const double* from, int rounds) {
  double a[8], b[4], c[CHAINS][4];
  for (int i = 0; i < 8; ++i) a[i] = from[threadIdx.x + 32 * i];
  for (int i = 0; i < 4; ++i) b[i] = from[threadIdx.x + 7 * i];
  for (int j = 0; j < CHAINS; ++j) {
    for (int i = 0; i < 4; ++i) c[j][i] = from[i + j];
  }
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int again = 0; again < 4; ++again) {
#pragma unroll
      for (int j = 0; j < CHAINS; ++j) multiply<I>(c[j], a, b);
    }
  }
  double sum = 0;
  for (int j = 0; j < CHAINS; ++j) {
    for (int i = 0; i < 4; ++i) sum += c[j][i];
  }
  to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

template <Instruction I, int CHAINS>
void measure(const char* name, double multiplications, int warps, double* to, const double* from) {
  constexpr int kBlocks = 132, kRounds = 4000;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  chains<I, CHAINS><<<kBlocks, 32 * warps>>>(to, from, kRounds);
  cudaEventRecord(begin);
  chains<I, CHAINS><<<kBlocks, 32 * warps>>>(to, from, kRounds);
  cudaEventRecord(end);
  cudaEventSynchronize(end);
  float ms;
  cudaEventElapsedTime(&ms, begin, end);
  const double count = 4.0 * kBlocks * warps * kRounds * CHAINS;
  printf("%-9s %d chains %2d warps %6.2f TFLOP/s %6.2f ns of a multiprocessor for one\n", name,
         CHAINS, warps, 2e-9 * multiplications * count / ms, 1e6 * ms * kBlocks / count);
}

template <Instruction I>
void measure_all(const char* name, double multiplications, double* to, const double* from) {
  for (int warps : {4, 8, 16}) {
    measure<I, 1>(name, multiplications, warps, to, from);
    measure<I, 2>(name, multiplications, warps, to, from);
    measure<I, 4>(name, multiplications, warps, to, from);
  }
}

int main() {
  constexpr int kValues = 8192;
  double values[kValues], *to, *from;
  for (int i = 0; i < kValues; ++i) values[i] = i * 2654435761u % 1000 / 1000.0 - 0.5;
  cudaMalloc(&to, 1 << 24);
  cudaMalloc(&from, sizeof(values));
  cudaMemcpy(from, values, sizeof(values), cudaMemcpyHostToDevice);
  measure_all<M8N8K4>("m8n8k4", 256, to, from);
  measure_all<M16N8K4>("m16n8k4", 512, to, from);
  measure_all<M16N8K8>("m16n8k8", 1024, to, from);
  measure_all<M16N8K16>("m16n8k16", 2048, to, from);
  measure_all<FMA>("fma", 32, to, from);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
