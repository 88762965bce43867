// Matrices in constant memory that are read anew for each use.
//
// Their places are unknown to the compiler, and so, for all it knows, any store might change them:
// to ask that of every load took it a third of its time (benchmarks/results/compiling-epyc.txt). Of
// an instruction that it does not see through it asks nothing; a volatile one it leaves where it
// is, and does not take out of a loop.
#pragma once

#include "complex.cuh"

namespace jaxmagma {

#ifdef __CUDACC__
__device__ __forceinline__ double constant_at(size_t at, double x) {
  asm volatile("ld.const.f64 %0, [%1];" : "=d"(x) : "l"(at));
  return x;
}
__device__ __forceinline__ Complex<double> constant_at(size_t at, Complex<double> x) {
  asm volatile("ld.const.v2.f64 {%0, %1}, [%2];" : "=d"(x.real), "=d"(x.imag) : "l"(at));
  return x;
}

// Used like a pointer to what nothing changes while a kernel runs.
template <class T>
struct Constant {
  size_t at;
  __device__ __forceinline__ Constant operator+(int i) const { return {at + i * sizeof(T)}; }
  __device__ __forceinline__ T operator[](int i) const {
    return constant_at(at + i * sizeof(T), T{});
  }
};

__device__ __forceinline__ Constant<double> constant(const double* at) {
  return {__cvta_generic_to_constant(at)};
}
__device__ __forceinline__ Constant<Complex<double>> constant(const Complex<double>* at) {
  return {__cvta_generic_to_constant(at)};
}
#endif

// The compiler itself reads several small values at a time.
template <class T>
__device__ __forceinline__ const T* constant(const T* at) {
  return at;
}

}  // namespace jaxmagma
