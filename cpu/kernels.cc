// The steps of a schedule on one block of elements, compiled once per instruction set.
//
// Nothing here knows how many elements there are or which thread it runs on.

#include "kernels.h"

#include "direct.h"
#include "expression.h"
#include "gemm.h"
#include "half.h"
#include "lanes.h"
#include "matrix.h"
#include "stream.h"
#include "value.h"

namespace jaxmagma::JAXMAGMA_ISA {
namespace {

// `T` is the real type of the arithmetic, `Stored` that of the arrays.
template <typename T, bool kComplex, typename Stored = T>
struct Machine {
  static constexpr bool kConverts = !std::is_same_v<T, Stored>;
  using V = Value<T, kComplex>;
  static constexpr int W = kLanes<T>;
  static constexpr int kPlanes = kComplex ? 2 : 1;

  // ---- memory <-> lanes ----------------------------------------------------------------------

  // So many columns of an operand are multiplied before memory is seen to.
  static constexpr int64_t kRun = 32;

  // The rows of one vector of elements.
  template <typename P>
  static JAXMAGMA_INLINE void RowPointers(const Rows& rows, int64_t lane, P** pointers) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      pointers[j] = reinterpret_cast<P*>(rows.base + rows.offsets[lane + j]);
    }
  }

  // A product with what is loaded calls `between(work)` after each `run` of columns.
  template <bool kMultiply, typename Between>
  [[gnu::noinline]] static void LoadRows(const Step& s, Rows rows, T* staged, T* scratch,
                                         int64_t plane, int64_t run, const Between& between) {
    T* out = scratch + s.out;
    const T* right = scratch + s.right;
    for (int64_t lane = 0; lane < plane; lane += W, out += W, right += W) {
      const T* row[W];
      if constexpr (kConverts) {
        const Stored* stored[W];
        RowPointers(rows, lane, stored);
        for (int j = 0; j < W; ++j) {
          T* to = staged + j * s.count;
          WidenAll<Stored>(stored[j], to, s.count);
          row[j] = to;
        }
      } else {
        RowPointers(rows, lane, row);
      }
      const auto load = [&](auto piece, int64_t column) {
        constexpr int C = piece;
        Lanes<T> x[C];
        LoadColumns<T, C>(row, column, x);
        T* to = out + column * plane;
        if constexpr (kMultiply) {
#pragma GCC unroll 16
          for (int c = 0; c < C; c += kPlanes) {
            V loaded;
            loaded.re = x[c];
            if constexpr (kComplex) loaded.im = x[c + 1];
            V product = V::Product(V::At(right + (column + c) * plane, plane), loaded);
            if (s.accumulate) product.Add(V::At(to + c * plane, plane));
            product.To(to + c * plane, plane);
          }
        } else {
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c) StoreLanes(to + c * plane, x[c]);
        }
      };
      if constexpr (kMultiply) {
        // This comes in the midst of the work of a block, and is often most of what it reads.
        for (int64_t first = 0; first < s.count; first += run) {
          const int64_t last = first + run < s.count ? first + run : s.count;
          ForPieces<kPiece<T>, kPlanes>(first, last, load);
          between(s.work / (s.count * (plane / W)) * (last - first));
        }
      } else {
        ForPieces<kPiece<T>, kPlanes>(0, s.count, load);
      }
    }
  }

  // Asks for the rows that LoadColumns comes to two lines after these C columns, some for each
  // piece of a line. Hardware prefetchers do not follow as many rows as there are entries of all
  // lanes.
  template <int C>
  static JAXMAGMA_INLINE void AskForRows(const T* const* row, int64_t column, int64_t at) {
    constexpr int64_t kLine = kCacheLine / sizeof(T);
    constexpr int kPieces = kLine > C ? kLine / C : 1;
#pragma GCC unroll 16
    for (int j = 0; j < W; j += kPieces) {
      const int64_t mine = j + column / C % kPieces;
      if (kPieces <= W || mine < W) __builtin_prefetch(row[mine] + at + 2 * kLine, 0, 3);
    }
  }

  // A vector times the matrix of each point, of which nothing is kept: R by R, or, if symmetric,
  // what is on and above the diagonal.
  template <int R, bool kSymmetric, typename Between>
  [[gnu::noinline]] static void PointMatrix(const Step& s, Rows rows, T* scratch, int64_t plane,
                                            const Between& between) {
    const int64_t column_work = s.work / (s.count * (plane / W));
    for (int64_t lane = 0; lane < plane; lane += W, scratch += W) {
      const T* row[W];
      RowPointers(rows, lane, row);
      ForPieces<kPiece<T>, kPlanes>(0, s.count, [&](auto piece, int64_t column) {
        constexpr int C = piece;
        V sum[R][C / kPlanes];
#pragma GCC unroll 3
        for (int i = 0; i < R; ++i) {
#pragma GCC unroll 3
          for (int k = kSymmetric ? i : 0; k < R; ++k) {
            Lanes<T> x[C];
            const int64_t at = column + s.left_inner[i * R + k];
            LoadColumns<T, C>(row, at, x);
            if constexpr (C == kPiece<T>) AskForRows<C>(row, column, at);
            const auto add = [&](int to, int from) {
#pragma GCC unroll 16
              for (int c = 0; c < C; c += kPlanes) {
                V entry;
                entry.re = x[c];
                if constexpr (kComplex) entry.im = x[c + 1];
                const T* right = scratch + s.right_inner[from] + (column + c) * plane;
                V& value = sum[to][c / kPlanes];
                if (from == 0) {
                  value = V::Product(entry, V::At(right, plane));
                } else {
                  value.AddProduct(entry, V::At(right, plane));
                }
              }
            };
            add(i, k);
            if (kSymmetric && k != i) add(k, i);
          }
        }
#pragma GCC unroll 3
        for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
          for (int c = 0; c < C; c += kPlanes) {
            sum[i][c / kPlanes].To(scratch + s.out_row[i] + (column + c) * plane, plane);
          }
        }
        between(column_work * C);
      });
    }
  }

  // The same, one entry after the other for several columns. Rows of entries that are a multiple of
  // 4 KiB apart push each other's lines out of the nearest cache; those of one entry have room.
  template <int R, bool kSymmetric, typename Between>
  [[gnu::noinline]] static void StagedPointMatrix(const Step& s, Rows rows, T* scratch,
                                                  int64_t plane, const Between& between) {
    constexpr int64_t kColumns = kRun;
    alignas(kVectorBytes) T staged[R * R][kColumns * W];
    constexpr int kEntries = kSymmetric ? R * (R + 1) / 2 : R * R;
    const int64_t column_work = s.work / (s.count * (plane / W));
    for (int64_t lane = 0; lane < plane; lane += W, scratch += W) {
      const T* row[W];
      RowPointers(rows, lane, row);
      for (int64_t first = 0; first < s.count; first += kColumns) {
        const int64_t columns = s.count - first < kColumns ? s.count - first : kColumns;
        for (int i = 0; i < R; ++i) {
          for (int k = kSymmetric ? i : 0; k < R; ++k) {
            ForPieces<kPiece<T>, kPlanes>(0, columns, [&](auto piece, int64_t column) {
              constexpr int C = piece;
              Lanes<T> x[C];
              LoadColumns<T, C>(row, first + column + s.left_inner[i * R + k], x);
#pragma GCC unroll 16
              for (int c = 0; c < C; ++c) StoreLanes(staged[i * R + k] + (column + c) * W, x[c]);
            });
            between(column_work * columns / kEntries);
          }
        }
        for (int64_t column = 0; column < columns; column += kPlanes) {
          V sum[R];
#pragma GCC unroll 3
          for (int k = 0; k < R; ++k) {
            const V x = V::At(scratch + s.right_inner[k] + (first + column) * plane, plane);
#pragma GCC unroll 3
            for (int i = 0; i < R; ++i) {
              const int entry = kSymmetric && k < i ? k * R + i : i * R + k;
              const V d = V::At(staged[entry] + column * W, W);
              if (k == 0) {
                sum[i] = V::Product(d, x);
              } else {
                sum[i].AddProduct(d, x);
              }
            }
          }
#pragma GCC unroll 3
          for (int i = 0; i < R; ++i) {
            sum[i].To(scratch + s.out_row[i] + (first + column) * plane, plane);
          }
        }
      }
    }
  }

  template <int R, typename Between>
  static void PointMatrix(const Step& s, const Rows& rows, T* scratch, int64_t plane,
                          const Between& between) {
    bool symmetric = true;
    for (int i = 0; i < R; ++i) {
      for (int k = 0; k < i; ++k) {
        symmetric &= s.left_inner[i * R + k] == s.left_inner[k * R + i];
      }
    }
    constexpr int64_t kSameSet = 4096 / sizeof(T);
    const bool collide = (s.left_inner[1] - s.left_inner[0]) % kSameSet == 0;
    const auto run =
        symmetric ? collide ? StagedPointMatrix<R, true, Between> : PointMatrix<R, true, Between>
        : collide ? StagedPointMatrix<R, false, Between>
                  : PointMatrix<R, false, Between>;
    run(s, rows, scratch, plane, between);
  }

  // Whether a vector is a line of the cache, and rows are stored by lines.
  static constexpr bool kStoresLines = kVectorBytes == kCacheLine && std::is_same_v<T, double>;

  // Rows of sums over elements stay in the type of the arithmetic.
  template <bool kNarrow, bool kPastCaches = false>
  [[gnu::noinline]] static void StoreRows(const Step& s, const T* from, Rows rows, T* staged,
                                          int64_t plane) {
    for (int64_t lane = 0; lane < plane; lane += W, from += W) {
      T* row[W];
      if constexpr (kNarrow) {
        for (int j = 0; j < W; ++j) row[j] = staged + j * s.count;
      } else {
        RowPointers(rows, lane, row);
      }
#if defined(__AVX512F__)
      if constexpr (kStoresLines) {
        if (s.count >= W && (kPastCaches || !AreLines(row))) {
          StoreLines<kPastCaches>(row, from, plane, s.count);
          continue;
        }
      }
#endif
      ForPieces<kStoredPiece<T>, kPlanes>(0, s.count, [&](auto piece, int64_t column) {
        constexpr int C = piece;
        Lanes<T> x[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) x[c] = LoadLanes(from + (column + c) * plane);
        StoreColumns<T, C>(row, column, x);
      });
      if constexpr (kNarrow) {
        Stored* stored[W];
        RowPointers(rows, lane, stored);
        for (int j = 0; j < W; ++j) NarrowAll<Stored>(row[j], stored[j], s.count);
      }
    }
  }

  // Whether the rows of all elements of the block are one after the other.
  static bool InOneRun(const Step& s, const Rows& rows, int64_t plane) {
    bool one = true;
    for (int64_t j = 1; j < plane; ++j) {
      one &= rows.offsets[j] == rows.offsets[0] + j * s.count * static_cast<int64_t>(sizeof(T));
    }
    return one;
  }

  // As StoreRows, past the caches and later: the memory writes while the next block is computed.
  static void StageRows(const Step& s, const T* from, const Rows& rows, T* staged, int64_t plane,
                        Lines& late) {
    Send(late, late.count);
    T* const to = reinterpret_cast<T*>(rows.base + rows.offsets[0]);
    T* const first = LikeInLine(staged, to);
    const Rows stage{reinterpret_cast<uintptr_t>(first) - rows.offsets[0], rows.offsets};
    StoreRows<false>(s, from, stage, staged, plane);
    late = CopyEnds(first, to, plane * s.count);
  }

  static void StoreOutput(const Step& s, const T* from, const Block& block, int64_t plane) {
    const Rows& rows = block.outputs[s.array];
    T* sum = static_cast<T*>(block.sums[s.array]);
    T* staged = static_cast<T*>(block.staged);
    if (rows.offsets && sum) {
      StoreRows<false>(s, from, rows, staged, plane);
    } else if (rows.offsets) {
      if (kStoresLines && block.stream && s.count >= block.straight) {
        StoreRows<kConverts, kStoresLines>(s, from, rows, staged, plane);
      } else if (!kConverts && block.stream && InOneRun(s, rows, plane)) {
        StageRows(s, from, rows, staged, plane, *block.late);
      } else {
        StoreRows<kConverts>(s, from, rows, staged, plane);
      }
    } else if (sum) {
      AddTo(from, s.count * (plane / W), sum);
    }
  }

  static void AddTo(const T* from, int64_t vectors, T* sum) {
    for (int64_t i = 0; i < vectors * W; i += W) {
      StoreLanes(sum + i, LoadLanes(sum + i) + LoadLanes(from + i));
    }
  }

  static void Spread(const Step& s, const T* from, T* out, int64_t plane) {
    for (int64_t i = 0; i < s.count * kPlanes; ++i, out += plane) {
      for (int64_t lane = 0; lane < plane; lane += W) {
        StoreLanes(out + lane, Splat(from[i]));
      }
    }
  }

  // ---- pointwise -------------------------------------------------------------------------------

  template <bool kShared>
  static void Times(const Step& s, const T* left, T* scratch, int64_t plane) {
    const T* right = scratch + s.right;
    T* out = scratch + s.out;
    for (int64_t pair = 0; pair < s.pairs; ++pair) {
      V a;
      if constexpr (kShared) {
        a = V::Same(left + s.left_pair[pair]);
      } else {
        a = V::At(left + s.left_pair[pair], plane);
      }
      V x = V::Product(a, V::At(right + s.right_pair[pair], plane));
      T* p = out + s.out_pair[pair];
      if (s.accumulate) x.Add(V::At(p, plane));
      x.To(p, plane);
    }
  }

  static void Sum(const Step& s, T* scratch) {
    for (int64_t column = 0; column < s.columns; ++column) {
      const T* in = scratch + s.left + s.right_column[column];
      T* out = scratch + s.out + s.out_column[column];
      Lanes<T> sum = LoadLanes(in);
      for (int64_t k = 1; k < s.inner; ++k) sum += LoadLanes(in + s.right_inner[k]);
      if (s.accumulate) sum += LoadLanes(out);
      StoreLanes(out, sum);
    }
  }

  static void Zero(const Step& s, T* scratch) {
    for (int64_t i = 0; i < s.count; i += W) StoreLanes(scratch + s.out + i, Lanes<T>{});
  }

  // ---- rows that an index points to --------------------------------------------------------

  static void GatherRows(const Step& s, const Block& block, T* scratch, int64_t plane) {
    const Rows vector = block.inputs[s.left], index = block.inputs[s.array];
    T* out = scratch + s.out;
    const Stored zero{};
    for (int64_t lane = 0; lane < plane; lane += W, out += W) {
      const int32_t* at[W];
      RowPointers(index, lane, at);
      const Stored* base[W];
      RowPointers(vector, lane, base);
      T* to = out;
      for (int64_t row = 0; row < s.rows; ++row) {
        const Stored* from[W];
        bool present[W];
        for (int j = 0; j < W; ++j) {
          const int64_t i = at[j][row];
          present[j] = i >= 0 && i < s.limit;
          from[j] = present[j] ? base[j] + i * s.columns : &zero;
        }
        for (int64_t c = 0; c < s.columns; ++c, to += plane) {
          Lanes<T> x{};
          for (int j = 0; j < W; ++j) {
            const Stored value = present[j] ? from[j][c] : zero;
            if constexpr (kConverts) {
              x[j] = value.Widen();
            } else {
              x[j] = value;
            }
          }
          StoreLanes(to, x);
        }
      }
    }
  }

  // ---- the blocks before and after ---------------------------------------------------------

  // Sends what is left of the block before and asks for what the next one reads, a little at a time
  // between the arithmetic of this one: the queues of memory are short, and who finds them full has
  // to wait. Hardware prefetchers do not see that far.
  class Meanwhile {
   public:
    Meanwhile(const Block& block, int64_t work)
        : late_(*block.late),
          range_(block.ahead),
          last_(block.ahead + block.ahead_count),
          p_(block.ahead_count ? range_->begin : nullptr),
          writes_(kOne * late_.count / work),
          reads_(kOne * block.ahead_lines / work) {}

    // What is due after so much of the work. Apart, so that the arithmetic keeps its registers.
    [[gnu::noinline]] void After(int64_t work) {
      writes_due_ += work * writes_;
      const int64_t lines = writes_due_ / kOne;
      writes_due_ %= kOne;
      Send(late_, lines < late_.count ? lines : late_.count);
      reads_due_ += work * reads_;
      Ask(reads_due_ / kOne);
      reads_due_ %= kOne;
    }

   private:
    void Ask(int64_t lines) {
      while (lines > 0 && range_ != last_) {
        const int64_t left = (range_->end - p_ + kCacheLine - 1) / kCacheLine;
        const int64_t count = lines < left ? lines : left;
#pragma GCC unroll 4
        for (int64_t i = 0; i < count; ++i) __builtin_prefetch(p_ + i * kCacheLine, 0, 2);
        lines -= count;
        p_ += count * kCacheLine;
        if (count == left && ++range_ != last_) p_ = range_->begin;
      }
    }

    Lines& late_;
    const Range* range_;
    const Range* const last_;
    const char* p_;
    static constexpr int64_t kOne = 1 << 20;  // a line
    const int64_t writes_, reads_;            // parts of a line for each unit of work
    int64_t writes_due_ = 0, reads_due_ = 0;
  };

  // ---- the interpreter -------------------------------------------------------------------------

  static void Run(const Step* steps, int64_t count, int64_t plane, const Block& block) {
    T* scratch = static_cast<T*>(block.scratch);
    const T* shared = static_cast<const T*>(block.shared);
    const T* panels = static_cast<const T*>(block.panels);
    T* staged = static_cast<T*>(block.staged);
    int64_t work = 1;
    for (const Step* s = steps; s != steps + count; ++s) work += s->work;
    Meanwhile meanwhile(block, work);
    for (const Step* s = steps; s != steps + count; ++s) {
      const auto between = [&](int64_t done) { meanwhile.After(done); };
      switch (s->kind) {
        case Step::kLoad:
          LoadRows<false>(*s, block.inputs[s->array], staged, scratch, plane, s->count, between);
          break;
        case Step::kMultiply:
          LoadRows<true>(*s, block.inputs[s->array], staged, scratch, plane,
                         block.ahead_count ? kRun : s->count, between);
          continue;
        case Step::kStore:
          StoreOutput(*s, scratch + s->left, block, plane);
          break;
        case Step::kSpread:
          Spread(*s, shared + s->left, scratch + s->out, plane);
          break;
        case Step::kMatrix:
          MatrixProduct<T, kComplex>::Run(*s, panels, scratch, plane, between);
          continue;
        case Step::kScale:
          Times<true>(*s, shared + s->left, scratch, plane);
          break;
        case Step::kGemm:
          TileProduct<T, kComplex>::Run(*s, scratch, plane, between);
          continue;
        case Step::kTimes:
          Times<false>(*s, scratch + s->left, scratch, plane);
          break;
        case Step::kSum:
          Sum(*s, scratch);
          break;
        case Step::kZero:
          Zero(*s, scratch);
          break;
        case Step::kGather:
          GatherRows(*s, block, scratch, plane);
          break;
        case Step::kExpression:
          Pointwise<T, kComplex>::Run(*s, shared, scratch, static_cast<T*>(block.slots), plane,
                                      [&](int32_t input, int64_t first, int64_t count, T* out) {
                                        Rows rows = block.inputs[input];
                                        rows.base += first * kPlanes * sizeof(Stored);
                                        Step load{};
                                        load.count = count * kPlanes;
                                        LoadRows<false>(load, rows, staged, out, plane, load.count,
                                                        between);
                                      });
          break;
        case Step::kPointMatrix:
          if constexpr (!kConverts) {
            if (s->rows == 2) {
              PointMatrix<2>(*s, block.inputs[s->array], scratch, plane, between);
            } else {
              PointMatrix<3>(*s, block.inputs[s->array], scratch, plane, between);
            }
          }
          continue;
        case Step::kDirect:
          if constexpr (!kComplex && !kConverts) DirectProduct<T>::Run(*s, block);
          break;
      }
      between(s->work);
    }
  }
};

}  // namespace

#define JAXMAGMA_STRING(x) #x
#define JAXMAGMA_NAME(x) JAXMAGMA_STRING(x)

extern const Kernels kKernels = {
    JAXMAGMA_NAME(JAXMAGMA_ISA),
    {kLanes<float>, kLanes<double>},
    MatrixProduct<float, false>::kRows,
    MatrixProduct<float, true>::kRows,
    {Machine<float, false>::Run, Machine<double, false>::Run, Machine<float, true>::Run,
     Machine<double, true>::Run, Machine<float, false, Float16>::Run,
     Machine<float, false, BFloat16>::Run},
    {nullptr, nullptr, nullptr, nullptr, WidenAll<Float16>, WidenAll<BFloat16>},
    {nullptr, nullptr, nullptr, nullptr, NarrowAll<Float16>, NarrowAll<BFloat16>},
    {Pointwise<float, false>::One, Pointwise<double, false>::One, Pointwise<float, true>::One,
     Pointwise<double, true>::One, Pointwise<float, false>::One, Pointwise<float, false>::One},
    FinishStreams,
};

}  // namespace jaxmagma::JAXMAGMA_ISA
