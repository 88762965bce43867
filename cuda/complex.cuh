// Complex numbers, laid out as in numpy and XLA.
#pragma once

namespace jaxmagma {

template <class T>
struct alignas(2 * sizeof(T)) Complex {
  T real;
  T imag;
};

template <class T>
__device__ __forceinline__ Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.real + b.real, a.imag + b.imag};
}

template <class T>
__device__ __forceinline__ Complex<T> operator-(Complex<T> a, Complex<T> b) {
  return {a.real - b.real, a.imag - b.imag};
}

template <class T>
__device__ __forceinline__ Complex<T> operator-(Complex<T> a) {
  return {-a.real, -a.imag};
}

template <class T>
__device__ __forceinline__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

template <class T>
__device__ __forceinline__ Complex<T>& operator+=(Complex<T>& a, Complex<T> b) {
  return a = a + b;
}

// sum + a * b. Four fused multiply-adds if T is complex.
template <class T>
__device__ __forceinline__ T multiply_add(T a, T b, T sum) {
  return a * b + sum;
}

template <class T>
__device__ __forceinline__ Complex<T> multiply_add(Complex<T> a, Complex<T> b, Complex<T> sum) {
  sum.real = a.real * b.real + sum.real;
  sum.imag = a.real * b.imag + sum.imag;
  sum.real = -a.imag * b.imag + sum.real;
  sum.imag = a.imag * b.real + sum.imag;
  return sum;
}

}  // namespace jaxmagma
