// Runs of pointwise functions, a few points at a time.
//
// Included by kernels.cc only, once per instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "pointwise.h"
#include "value.h"

namespace jaxmagma::JAXMAGMA_ISA {

// `outer` times `inner` reals, the former `stride` apart.
struct Extent {
  int64_t outer, inner;
};

template <typename T, bool kComplex>
struct Pointwise {
  using V = Lanes<T>;
  using Body = void (*)(const Micro& m, T* const* at, Extent extent);

  template <int kOperands, typename F>
  static JAXMAGMA_INLINE void Loop(const Micro& m, T* const* at, Extent extent, const F& f) {
    T* out = at[0];
    const T *a = at[1], *b = at[2], *c = at[3];
    for (int64_t o = 0; o < extent.outer; ++o) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < extent.inner; i += kLanes<T>) {
        if constexpr (kOperands == 1) {
          StoreLanes(out + i, f(LoadLanes(a + i)));
        } else if constexpr (kOperands == 2) {
          StoreLanes(out + i, f(LoadLanes(a + i), LoadLanes(b + i)));
        } else {
          StoreLanes(out + i, f(LoadLanes(a + i), LoadLanes(b + i), LoadLanes(c + i)));
        }
      }
      out += m.stride[0];
      a += m.stride[1];
      b += m.stride[2];
      c += m.stride[3];
    }
  }

#define JAXMAGMA_ENTRY(Name, operands)                                          \
  static void Name(const Micro& m, T* const* at, Extent extent) {               \
    Loop<operands>(m, at, extent, [](auto... x) { return Of<T>::Name(x...); }); \
  }
  JAXMAGMA_ARITHMETIC(JAXMAGMA_ENTRY)
  JAXMAGMA_ROUNDING(JAXMAGMA_ENTRY)
#undef JAXMAGMA_ENTRY
#define JAXMAGMA_ENTRY(Name, operands)                                          \
  static void Name(const Micro& m, T* const* at, Extent extent) {               \
    const KeepSubnormals keep;                                                  \
    Loop<operands>(m, at, extent, [](auto... x) { return Of<T>::Name(x...); }); \
  }
  JAXMAGMA_ELEMENTARY(JAXMAGMA_ENTRY)
#undef JAXMAGMA_ENTRY

  static Body Real(int32_t function) {
    static constexpr Body bodies[] = {
#define JAXMAGMA_ENTRY(Name, operands) Name,
        JAXMAGMA_FUNCTIONS(JAXMAGMA_ENTRY)
#undef JAXMAGMA_ENTRY
    };
    return bodies[function];
  }

  // A product of complex values, added to a third one if there is one.
  static void ComplexProduct(const Micro& m, T* const* at, int64_t points, int64_t plane) {
    using C = Value<T, true>;
    const bool adds = m.function == static_cast<int32_t>(Function::kFma);
    for (int64_t p = 0; p < points; ++p) {
      for (int64_t i = 0; i < plane; i += kLanes<T>) {
        C x = C::Product(C::At(at[1] + p * m.stride[1] + i, plane),
                         C::At(at[2] + p * m.stride[2] + i, plane));
        if (adds) x.Add(C::At(at[3] + p * m.stride[3] + i, plane));
        x.To(at[0] + p * m.stride[0] + i, plane);
      }
    }
  }

  static JAXMAGMA_INLINE void Apply(const Micro& m, T* const* at, int64_t points, int64_t plane) {
    const int64_t value = kComplex ? 2 * plane : plane;
    if constexpr (kComplex) {
      if (m.function == static_cast<int32_t>(Function::kMul) ||
          m.function == static_cast<int32_t>(Function::kFma)) {
        return ComplexProduct(m, at, points, plane);
      }
    }
    const Extent extent = m.flat ? Extent{1, points * value} : Extent{points, value};
    Real(m.function)(m, at, extent);
  }

  // Whether a function is needed in a vector of elements.
  static JAXMAGMA_INLINE bool IsNeeded(const T* where, bool nonzero) {
    const Mask<T> is_zero = LoadLanes(where) == V{};
    return Any<T>(nonzero ? ~is_zero : is_zero);
  }

  // The function of those vectors in which it is needed, a run of them at a time; of a few others
  // it costs less than a call.
  static void Where(const Micro& m, T* const* at, int64_t points, int64_t plane) {
    constexpr int64_t kGap = 2 * kLanes<T>;
    const Extent extent = m.flat ? Extent{1, points * plane} : Extent{points, plane};
    const Body body = Real(m.function);
    for (int64_t o = 0; o < extent.outer; ++o) {
      T* run[kMicroOperands];
      for (int k = 0; k < kMicroOperands; ++k) run[k] = at[k] + o * m.stride[k];
      const T* where = run[kMicroOperands - 1];
      int64_t first = -1, last = 0;
      for (int64_t i = 0; i < extent.inner; i += kLanes<T>) {
        if (IsNeeded(where + i, m.nonzero)) {
          if (first < 0) first = i;
          last = i + kLanes<T>;
        }
        if (first >= 0 && (i >= last + kGap || i + kLanes<T> >= extent.inner)) {
          T* from[kMicroOperands];
          for (int k = 0; k < kMicroOperands; ++k) from[k] = run[k] + first;
          body(m, from, {1, last - first});
          first = -1;
        }
      }
    }
  }

  // Values of shared memory in all lanes, or of scratch, from a table of places.
  static void Collect(const T* from, const int32_t* table, bool shared, T* out, int64_t points,
                      int64_t plane) {
    constexpr int kPlanes = kComplex ? 2 : 1;
    for (int64_t p = 0; p < points; ++p) {
      const T* x = from + (table ? table[p] : 0);
      for (int part = 0; part < kPlanes; ++part) {
        for (int64_t i = 0; i < plane; i += kLanes<T>, out += kLanes<T>) {
          StoreLanes(out, shared ? Splat(x[part]) : LoadLanes(x + part * plane + i));
        }
      }
    }
  }

  template <typename LoadWindow>
  static void Run(const Step& s, const T* shared, T* scratch, T* slots, int64_t plane,
                  const LoadWindow& load_window) {
    for (int64_t first = 0; first < s.points; first += s.chunk) {
      const int64_t points = s.points - first < s.chunk ? s.points - first : s.chunk;
      for (const Micro* m = s.micros; m != s.micros + s.micro_count; ++m) {
        switch (m->kind) {
          case Micro::kFunction:
          case Micro::kWhere: {
            T* at[kMicroOperands];
#pragma GCC unroll 5
            for (int k = 0; k < kMicroOperands; ++k) {
              at[k] = m->in_scratch[k] ? scratch + m->place[k] + first * m->stride[k]
                                       : slots + m->place[k];
            }
            if constexpr (!kComplex) {
              if (m->kind == Micro::kWhere) {
                Where(*m, at, points, plane);
                break;
              }
            }
            Apply(*m, at, points, plane);
            break;
          }
          case Micro::kFill:
            // Once for all chunks, the first of which is the longest.
            if (first == 0) {
              Collect((m->shared ? shared : scratch) + m->place[1], nullptr, m->shared,
                      slots + m->place[0], points, plane);
            }
            break;
          case Micro::kCollect:
            Collect((m->shared ? shared : scratch) + m->place[1], m->table + first, m->shared,
                    slots + m->place[0], points, plane);
            break;
          case Micro::kWindow:
            load_window(m->input, m->place[1] + first * m->width, points * m->width,
                        slots + m->place[0]);
            break;
        }
      }
    }
  }

  // One value, for steps that are the same for all elements.
  static void One(int32_t function, const void* a, const void* b, const void* c, void* out) {
    constexpr int64_t kPlanes = kComplex ? 2 : 1;
    constexpr int64_t kReals = kPlanes * kLanes<T>;
    alignas(kVectorBytes) T values[4][kReals];
    const void* operands[] = {nullptr, a, b, c};
    T* at[4];
    for (int k = 0; k < 4; ++k) {
      at[k] = values[k];
      const T* x = static_cast<const T*>(operands[k]);
      for (int64_t part = 0; part < kPlanes; ++part) {
        StoreLanes(values[k] + part * kLanes<T>, x ? Splat(x[part]) : Lanes<T>{});
      }
    }
    Micro m{};
    m.function = function;
    m.flat = true;
    Apply(m, at, 1, kLanes<T>);
    for (int64_t part = 0; part < kPlanes; ++part) {
      static_cast<T*>(out)[part] = values[0][part * kLanes<T>];
    }
  }
};

}  // namespace jaxmagma::JAXMAGMA_ISA
