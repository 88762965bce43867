// Products of small square matrices, compiled for every size: C = op(A) op(B).
#pragma once

#include <cstdint>

namespace jaxmagma {

constexpr int kMostBgemm = 48;

// Which of the two factors of an element are transposed in memory.
struct Transposed {
  bool a;
  bool b;
};

// A kernel (const T* a, const T* b, T* c, long long count, Transposed), and how to launch it.
struct Bgemm {
  const void* kernel;
  int threads;
  int elements;  // of a block
  int bytes;     // of its shared memory
};

// By size, from 1.
template <class T>
const Bgemm& GetBgemm(int size);

}  // namespace jaxmagma
