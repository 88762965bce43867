// Vectors of elements side by side, and the transposition between them and memory.
//
// In memory a tile is one row per element; in scratch it is one row of lanes per value. Included by
// kernels.cc only, once per instruction set: everything is in the namespace JAXMAGMA_ISA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define JAXMAGMA_INLINE inline __attribute__((always_inline))

namespace jaxmagma::JAXMAGMA_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = sizeof(void*) == 8 ? 16 : 8;
#endif

// `N` values of T in a register, and the same at an address that need not be aligned, whatever type
// of value is there.
template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
};
template <typename T, int N>
using Vector = typename VectorOf<T, N>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / sizeof(T);
template <typename T>
using Lanes = Vector<T, kLanes<T>>;

template <int N, typename T>
JAXMAGMA_INLINE Vector<T, N> LoadN(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T, N>::unaligned*>(p);
}
template <int N, typename T>
JAXMAGMA_INLINE void StoreN(T* p, Vector<T, N> x) {
  *reinterpret_cast<typename VectorOf<T, N>::unaligned*>(p) = x;
}
// Scratch is aligned to whole vectors, and has values of T: those GCC and Clang let a vector of T
// alias. One that aliases everything would have to be stored before the next offset is read from a
// table, which costs up to a seventh of the speed of small products.
template <typename T>
JAXMAGMA_INLINE Lanes<T> LoadLanes(const T* p) {
  return *reinterpret_cast<const Lanes<T>*>(p);
}
template <typename T>
JAXMAGMA_INLINE void StoreLanes(T* p, Lanes<T> x) {
  *reinterpret_cast<Lanes<T>*>(p) = x;
}
template <typename T>
JAXMAGMA_INLINE Lanes<T> Splat(T x) {
  return x - Lanes<T>{};
}

// ---- Transposition -------------------------------------------------------------------------

template <typename T, int N, int... I>
JAXMAGMA_INLINE Vector<T, 2 * N> ConcatAt(Vector<T, N> a, Vector<T, N> b,
                                          std::integer_sequence<int, I...>) {
#if defined(__AVX512F__)
  if constexpr (N * sizeof(T) == kVectorBytes / 2) {
    // GCC would load `b` first and shuffle then; inserted from memory, it needs no shuffle.
    const auto low = _mm512_castpd256_pd512(reinterpret_cast<__m256d>(a));
    return reinterpret_cast<Vector<T, 2 * N>>(
        _mm512_insertf64x4(low, reinterpret_cast<__m256d>(b), 1));
  }
#endif
  return __builtin_shufflevector(a, b, I...);
}

// The pieces of `C` columns of the rows j, j + C, j + 2C, ... (N / C of them), end to end.
template <typename T, int C, int N>
JAXMAGMA_INLINE Vector<T, N> Gather(const T* const* rows, ptrdiff_t column) {
  if constexpr (N == C) {
    return LoadN<N>(rows[0] + column);
  } else if constexpr (N == 2 && C == 1) {
    return Vector<T, 2>{rows[0][column], rows[1][column]};
  } else {
    return ConcatAt<T, N / 2>(Gather<T, C, N / 2>(rows, column),
                              Gather<T, C, N / 2>(rows + N / 2 / C, column),
                              std::make_integer_sequence<int, N>());
  }
}

template <typename T, int N, int C, int Part, int... I>
JAXMAGMA_INLINE Vector<T, C> PieceAt(Vector<T, N> x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (Part * C + I)...);
}

template <typename T, int C, int N, int Part = 0>
JAXMAGMA_INLINE void Scatter(T* const* rows, ptrdiff_t column, Vector<T, N> x) {
  if constexpr (Part < N / C) {
    if constexpr (C == 1) {
      rows[Part][column] = x[Part];
    } else {
      StoreN<C>(rows[Part] + column,
                PieceAt<T, N, C, Part>(x, std::make_integer_sequence<int, C>()));
    }
    Scatter<T, C, N, Part + 1>(rows, column, x);
  }
}

// One stage of the butterfly that transposes C x C blocks: lanes whose index has the bit H set
// change places with those of the partner vector that do not.
template <typename T, int N, int H, int... I>
JAXMAGMA_INLINE void ExchangeAt(Vector<T, N>& a, Vector<T, N>& b,
                                std::integer_sequence<int, I...>) {
  Vector<T, N> low = __builtin_shufflevector(a, b, (I & H ? N + I - H : I)...);
  Vector<T, N> high = __builtin_shufflevector(a, b, (I & H ? N + I : I + H)...);
  a = low;
  b = high;
}

// Transposes C vectors whose lanes are N / C blocks of C.
template <typename T, int C, int N, int H = C / 2>
JAXMAGMA_INLINE void Transpose(Vector<T, N>* x) {
  if constexpr (H > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < C; ++i) {
      if (!(i & H)) ExchangeAt<T, N, H>(x[i], x[i + H], std::make_integer_sequence<int, N>());
    }
    Transpose<T, C, N, H / 2>(x);
  }
}

// The even and the odd quarters of two vectors, end to end.
template <typename T, int N, int... I>
JAXMAGMA_INLINE void SplitQuarters(Vector<T, N>& a, Vector<T, N>& b,
                                   std::integer_sequence<int, I...>) {
  constexpr int Q = N / 4;
  Vector<T, N> even = __builtin_shufflevector(a, b, (I / Q * 2 * Q + I % Q)...);
  Vector<T, N> odd = __builtin_shufflevector(a, b, (I / Q * 2 * Q + Q + I % Q)...);
  a = even;
  b = odd;
}

// C columns of as many rows as there are lanes: x[c] = rows[0..lanes)[column + c].
template <typename T, int C>
JAXMAGMA_INLINE void LoadColumns(const T* const* rows, ptrdiff_t column, Lanes<T>* x) {
  constexpr int N = kLanes<T>;
  // AVX-512 has an instruction that splits quarters, and needs two operands more for what a
  // butterfly does in its place: so rows go where the former brings them into order.
  constexpr bool kQuarters = kVectorBytes == 64 && N == 2 * C;
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) {
    // Row j + C * g goes to block g, so that transposing each block puts row r in lane r.
    const T* mine[N / C];
#pragma GCC unroll 16
    for (int g = 0; g < N / C; ++g)
      mine[g] = rows[kQuarters ? j + j / (C / 2) * (C / 2) + C / 2 * g : j + C * g];
    x[j] = Gather<T, C, N>(mine, column);
  }
  if constexpr (kQuarters) {
    Transpose<T, C, N, C / 4>(x);
#pragma GCC unroll 16
    for (int j = 0; j < C / 2; ++j) {
      SplitQuarters<T, N>(x[j], x[j + C / 2], std::make_integer_sequence<int, N>());
    }
  } else {
    Transpose<T, C, N>(x);
  }
}

template <typename T, int C>
JAXMAGMA_INLINE void StoreColumns(T* const* rows, ptrdiff_t column, Lanes<T>* x) {
  Transpose<T, C, kLanes<T>>(x);
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) {
    T* mine[kLanes<T> / C];
#pragma GCC unroll 16
    for (int g = 0; g < kLanes<T> / C; ++g) mine[g] = rows[j + C * g];
    Scatter<T, C, kLanes<T>>(mine, column, x[j]);
  }
}

// Calls `body(C, column)` for pieces of C columns, a constant, that make up the columns from
// `column` to `count`: C columns as often as they fit, then half as many, down to kLeast.
template <int C, int kLeast = 1, typename Body>
JAXMAGMA_INLINE void ForPieces(int64_t column, int64_t count, const Body& body) {
  for (; count - column >= C; column += C) body(std::integral_constant<int, C>(), column);
  if constexpr (C > kLeast) ForPieces<C / 2, kLeast>(column, count, body);
}

// The widest pieces. What is loaded in half vectors needs one exchange less. What is stored in
// whole ones crosses fewer lines of the cache and writes each once: rows that are a multiple of 4
// KiB apart push each other's lines out before the other half comes.
template <typename T>
constexpr int kPiece = kLanes<T> > 2 ? kLanes<T> / 2 : 2;
template <typename T>
constexpr int kStoredPiece = kLanes<T> > 8 ? 8 : kLanes<T>;

}  // namespace jaxmagma::JAXMAGMA_ISA
