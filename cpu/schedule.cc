#include "schedule.h"

#include <algorithm>
#include <cstring>

#include "functions.h"

namespace jaxmagma {
namespace {

// The columns of a kMatrix step that go through all blocks of rows together read this much: it
// stays in the nearest cache, and does not take long, because memory is seen to in between.
constexpr int64_t kChunkBytes = 8 << 10;
// Each slot of an expression is long enough for fetching an operation to cost little. That is worth
// more than slots in the nearest cache: they only have to stay in the next one.
constexpr int64_t kSlotsBytes = 256 << 10;
constexpr int64_t kMostSlotVectors = 32;
constexpr int64_t kLeastSlotVectors = 4;

using Loops = std::vector<Loop>;

template <typename Keep>
Loops Filter(const Loops& loops, Keep keep) {
  Loops kept;
  std::copy_if(loops.begin(), loops.end(), std::back_inserter(kept), keep);
  return kept;
}

// The offset at every point of a loop nest, the last loop fastest.
std::vector<int32_t> Offsets(const Loops& loops, int64_t Loop::* stride, int64_t scale) {
  std::vector<int32_t> offsets{0};
  for (const Loop& loop : loops) {
    std::vector<int32_t> nested;
    nested.reserve(offsets.size() * loop.extent);
    for (int32_t start : offsets) {
      for (int64_t i = 0; i < loop.extent; ++i) {
        nested.push_back(static_cast<int32_t>(start + i * (loop.*stride) * scale));
      }
    }
    offsets = std::move(nested);
  }
  return offsets;
}

class Scheduler {
 public:
  Scheduler(const Plan& plan, const Kernels& kernels, int64_t block_elements)
      : plan_(plan),
        kernels_(kernels),
        elements_(block_elements),
        lanes_(kernels.lanes[IsDouble(plan.dtype)]),
        value_(block_elements * plan.planes()) {
    schedule_.block_elements = block_elements;
  }

  Schedule Make() {
    for (const Instruction& instruction : plan_.steps) Add(instruction);
    FindFirstReads();
    return std::move(schedule_);
  }

 private:
  const int32_t* Keep(std::vector<int32_t> table) {
    schedule_.tables.push_back(std::make_unique<std::vector<int32_t>>(std::move(table)));
    return schedule_.tables.back()->data();
  }

  const int32_t* Table(const Loops& loops, int64_t Loop::* stride, int64_t scale) {
    return Keep(Offsets(loops, stride, scale));
  }

  static std::vector<int32_t> Scaled(const std::vector<int64_t>& places, int64_t scale) {
    std::vector<int32_t> scaled;
    for (int64_t place : places) scaled.push_back(static_cast<int32_t>(place * scale));
    return scaled;
  }

  static int32_t Extent(const Loops& loops) {
    int64_t extent = 1;
    for (const Loop& loop : loops) extent *= loop.extent;
    return static_cast<int32_t>(extent);
  }

  // The vectors of one value as one more loop. `shared` is for an operand without lanes.
  Loops WithLanes(Loops loops, int64_t scale, bool shared = false) const {
    for (Loop& loop : loops) {
      loop.out *= scale;
      loop.right *= scale;
      if (!shared) loop.left *= scale;
    }
    if (elements_ > lanes_) {
      loops.push_back({elements_ / lanes_, lanes_, shared ? 0 : lanes_, lanes_});
    }
    return loops;
  }

  void Add(const Instruction& instruction) {
    Step s{};
    s.array = static_cast<int32_t>(instruction.array);
    s.accumulate = instruction.accumulate;
    s.count = instruction.count;
    s.out = instruction.out * value_;
    s.left = instruction.left * value_;
    s.right = instruction.right * value_;
    switch (instruction.opcode) {
      case Opcode::kLoad:
      case Opcode::kMultiply:
      case Opcode::kStore:
        s.kind = instruction.opcode == Opcode::kLoad       ? Step::kLoad
                 : instruction.opcode == Opcode::kMultiply ? Step::kMultiply
                                                           : Step::kStore;
        s.count *= plan_.planes();
        break;
      case Opcode::kSpread:
        s.kind = Step::kSpread;
        s.left = instruction.left * plan_.planes();
        break;
      case Opcode::kZero:
        s.kind = Step::kZero;
        s.count = instruction.count * value_;
        break;
      case Opcode::kGather:
        s.kind = Step::kGather;
        s.left = instruction.left;
        s.rows = static_cast<int32_t>(instruction.count);
        s.columns = static_cast<int32_t>(instruction.third * plan_.planes());
        s.limit = plan_.inputs[instruction.left].size / instruction.third;
        break;
      case Opcode::kExpression:
        Expression(instruction, s);
        break;
      case Opcode::kPointMatrix:
        s.kind = Step::kPointMatrix;
        s.count *= plan_.planes();
        s.rows = static_cast<int32_t>(instruction.outs.size());
        s.out_row = Keep(Scaled(instruction.outs, value_));
        s.right_inner = Keep(Scaled(instruction.rights, value_));
        s.left_inner = Keep(Scaled(instruction.entries, plan_.planes()));
        break;
      case Opcode::kMap:
        break;  // a shared step
      case Opcode::kGemm:
        Direct(instruction.gemm, s);
        break;
      case Opcode::kRearrange:
        Rearrange(instruction, s);
        break;
      case Opcode::kProduct:
        Product(instruction, s);
        break;
    }
    s.work = Work(s);
    schedule_.steps.push_back(s);
  }

  void FindFirstReads() {
    std::vector<double>& found = schedule_.first_reads;
    found.assign(plan_.inputs.size(), 1);
    int64_t all = 1, done = 0;
    for (const Step& s : schedule_.steps) all += s.work;
    for (const Step& s : schedule_.steps) {
      const auto read = [&](int64_t input) {
        found[input] = std::min(found[input], static_cast<double>(done) / static_cast<double>(all));
      };
      if (s.kind == Step::kLoad || s.kind == Step::kMultiply || s.kind == Step::kPointMatrix ||
          s.kind == Step::kGather) {
        read(s.array);
      }
      for (const Micro* m = s.micros; m != s.micros + s.micro_count; ++m) {
        if (m->kind == Micro::kWindow) read(m->input);
      }
      done += s.work;
    }
  }

  // Roughly, the cycles that a step takes.
  int64_t Work(const Step& s) const {
    const int64_t vectors = elements_ / lanes_;
    switch (s.kind) {
      case Step::kMatrix:
      case Step::kGemm: {
        const int64_t products = plan_.planes() * plan_.planes();
        return products * s.pairs * s.rows * s.columns * s.inner;
      }
      case Step::kScale:
      case Step::kTimes:
        return int64_t{2} * s.pairs;
      case Step::kSum:
        return int64_t{s.columns} * s.inner;
      case Step::kZero:
        return s.count / lanes_;
      case Step::kExpression:
        return 2 * s.points * s.micro_count * vectors;
      case Step::kGather:
        return int64_t{8} * s.rows * s.columns * vectors;
      case Step::kLoad:
      case Step::kMultiply:
      case Step::kStore:
      case Step::kSpread:
        return 4 * s.count * vectors;
      case Step::kPointMatrix:
        return 4 * s.count * s.rows * s.rows * vectors;
      case Step::kDirect:
        break;
    }
    return 1;
  }

  static void Direct(const Gemm& gemm, Step& s) {
    s.kind = Step::kDirect;
    s.left = gemm.left;
    s.right = gemm.right;
    s.left_shared = gemm.left_shared;
    s.right_shared = gemm.right_shared;
    s.rows = static_cast<int32_t>(gemm.rows);
    s.columns = static_cast<int32_t>(gemm.columns);
    s.inner = static_cast<int32_t>(gemm.inner);
    s.left_row_stride = gemm.left_row;
    s.left_inner_stride = gemm.left_inner;
    s.right_inner_stride = gemm.right_inner;
    s.right_column_stride = gemm.right_column;
    s.out_row_stride = gemm.out_row;
  }

  void Expression(const Instruction& instruction, Step& s) {
    const int64_t value_vectors = value_ / lanes_;
    const int64_t slots = std::max<int64_t>(instruction.slots, 1);
    const int64_t vector_bytes = lanes_ * plan_.real_bytes();
    const int64_t vectors =
        std::clamp(kSlotsBytes / (slots * vector_bytes), kLeastSlotVectors, kMostSlotVectors);
    const int64_t chunk = std::clamp<int64_t>(vectors / value_vectors, 1, instruction.count);
    const int64_t slot = chunk * value_;
    auto micros = std::make_unique<std::vector<Micro>>();
    for (const MicroOperation& from : instruction.micros) {
      Micro m{};
      m.kind = static_cast<Micro::Kind>(from.kind);
      m.function = static_cast<int32_t>(from.function);
      m.shared = from.shared;
      const bool where = from.kind == MicroOperation::kWhere;
      if (from.kind == MicroOperation::kFunction || where) {
        m.flat = true;
        m.nonzero = from.nonzero;
        const auto set = [&](int k, const Address& a) {
          m.in_scratch[k] = a.in_scratch;
          m.place[k] = a.in_scratch ? a.place * value_ : a.place * slot + a.offset * value_;
          m.stride[k] = a.stride * value_;
          m.flat &= a.stride == 1;
        };
        for (int k = 0; k <= kOperands[from.function]; ++k) set(k, from.addresses[k]);
        if (where) set(kMicroOperands - 1, from.where);
      } else {
        m.place[0] = from.slot * slot;
        if (from.kind == MicroOperation::kWindow) {
          m.place[1] = from.place;
        } else {
          m.place[1] = from.place * (from.shared ? plan_.planes() : value_);
        }
        m.input = static_cast<int32_t>(from.input);
        m.width = static_cast<int32_t>(from.width);
        if (from.kind == MicroOperation::kCollect) {
          m.table = Table(from.loops, &Loop::left, from.shared ? plan_.planes() : value_);
        }
      }
      micros->push_back(m);
    }
    s.kind = Step::kExpression;
    s.points = instruction.count;
    s.chunk = static_cast<int32_t>(chunk);
    s.micros = micros->data();
    s.micro_count = static_cast<int64_t>(micros->size());
    schedule_.slot_reals = std::max(schedule_.slot_reals, instruction.slots * slot);
    schedule_.expressions.push_back(std::move(micros));
  }

  void Rearrange(const Instruction& instruction, Step& s) {
    Loops columns = Filter(instruction.loops, [](const Loop& x) { return x.out != 0; });
    const Loops inner = Filter(instruction.loops, [](const Loop& x) { return x.out == 0; });
    // Real and imaginary parts go the same way.
    for (Loop& loop : columns) {
      loop.out *= value_;
      loop.left *= value_;
    }
    if (value_ > lanes_) columns.push_back({value_ / lanes_, lanes_, lanes_, 0});
    s.kind = Step::kSum;
    s.columns = Extent(columns);
    s.inner = Extent(inner);
    s.right_column = Table(columns, &Loop::left, 1);
    s.out_column = Table(columns, &Loop::out, 1);
    s.right_inner = Table(inner, &Loop::left, value_);
  }

  void Product(const Instruction& instruction, Step& s) {
    const Loops& loops = instruction.loops;
    const Loops rows = Filter(loops, [](const Loop& x) { return x.out && x.left && !x.right; });
    const Loops columns = Filter(loops, [](const Loop& x) { return x.out && !x.left; });
    const Loops pairs = Filter(loops, [](const Loop& x) { return x.out && x.left && x.right; });
    const Loops inner = Filter(loops, [](const Loop& x) { return !x.out; });
    s.rows = Extent(rows);
    s.inner = Extent(inner);
    if (instruction.left_shared) {
      if (s.rows == 1 && s.inner == 1) {
        Scale(instruction, s);
      } else {
        Matrix(instruction, rows, columns, pairs, inner, s);
      }
      return;
    }
    // What neither contracts nor repeats an operand is pointwise: all pairs.
    const bool pointwise = s.rows == 1 && s.inner == 1;
    const Loops lanes = WithLanes(pointwise ? loops : pairs, value_);
    s.kind = pointwise ? Step::kTimes : Step::kGemm;
    s.pairs = Extent(lanes);
    s.left_pair = Table(lanes, &Loop::left, 1);
    s.right_pair = Table(lanes, &Loop::right, 1);
    s.out_pair = Table(lanes, &Loop::out, 1);
    if (pointwise) return;
    s.columns = Extent(columns);
    s.left_row = Table(rows, &Loop::left, value_);
    s.left_inner = Table(inner, &Loop::left, value_);
    s.right_column = Table(columns, &Loop::right, value_);
    s.right_inner = Table(inner, &Loop::right, value_);
    s.out_row = Table(rows, &Loop::out, value_);
    s.out_column = Table(columns, &Loop::out, value_);
  }

  // One shared factor for each value: read straight from shared memory.
  void Scale(const Instruction& instruction, Step& s) {
    Loops loops = instruction.loops;
    for (Loop& loop : loops) loop.left *= plan_.planes();
    loops = WithLanes(loops, value_, /*shared=*/true);
    s.kind = Step::kScale;
    s.left = instruction.left * plan_.planes();
    s.pairs = Extent(loops);
    s.left_pair = Table(loops, &Loop::left, 1);
    s.right_pair = Table(loops, &Loop::right, 1);
    s.out_pair = Table(loops, &Loop::out, 1);
  }

  void Matrix(const Instruction& instruction, const Loops& rows, const Loops& columns,
              const Loops& pairs, const Loops& inner, Step& s) {
    const Loops lanes = WithLanes(columns, value_, /*shared=*/true);
    s.kind = Step::kMatrix;
    s.columns = Extent(lanes);
    s.right_column = Table(lanes, &Loop::right, 1);
    s.out_column = Table(lanes, &Loop::out, 1);
    s.right_inner = Table(inner, &Loop::right, value_);
    s.out_row = Table(rows, &Loop::out, value_);
    s.pairs = Extent(pairs);
    s.right_pair = Table(pairs, &Loop::right, value_);
    s.out_pair = Table(pairs, &Loop::out, value_);

    const int32_t most = static_cast<int32_t>(IsComplex(plan_.dtype) ? kernels_.block_rows_complex
                                                                     : kernels_.block_rows);
    s.blocks = (s.rows + most - 1) / most;
    s.block_rows = (s.rows + s.blocks - 1) / s.blocks;
    s.full_blocks = s.rows - s.blocks * (s.block_rows - 1);
    const int64_t column_bytes = s.inner * lanes_ * plan_.value_bytes();
    s.chunk = static_cast<int32_t>(
        std::min<int64_t>(std::max<int64_t>(kChunkBytes / column_bytes / 4 * 4, 4), s.columns));

    Packing packing{instruction.left, schedule_.panel_values, {}};
    const std::vector<int32_t> pair = Offsets(pairs, &Loop::left, 1);
    const std::vector<int32_t> row = Offsets(rows, &Loop::left, 1);
    const std::vector<int32_t> k = Offsets(inner, &Loop::left, 1);
    std::vector<int32_t> panel;
    for (int32_t p : pair) {
      panel.push_back(static_cast<int32_t>(packing.offsets.size() * plan_.planes()));
      int32_t first = 0;
      for (int32_t block = 0; block < s.blocks; ++block) {
        const int32_t height = s.block_rows - (block >= s.full_blocks);
        for (int32_t i : k) {
          for (int32_t r = 0; r < height; ++r) packing.offsets.push_back(p + i + row[first + r]);
        }
        first += height;
      }
    }
    s.left = packing.to * plan_.planes();
    s.left_pair = Keep(std::move(panel));
    schedule_.panel_values += static_cast<int64_t>(packing.offsets.size());
    schedule_.packings.push_back(std::move(packing));
  }

  const Plan& plan_;
  const Kernels& kernels_;
  const int64_t elements_;
  const int64_t lanes_;
  const int64_t value_;  // reals of one value of all elements of the block
  Schedule schedule_;
};

// Plain products: std::complex checks for NaN, which numpy does not.
template <typename T>
struct ComplexOf {
  T re, im;
  ComplexOf& operator+=(ComplexOf x) {
    re += x.re;
    im += x.im;
    return *this;
  }
  friend ComplexOf operator*(ComplexOf a, ComplexOf b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};

template <typename V>
void RunShared(const Plan& plan, const Kernels& kernels, V* shared) {
  for (const Instruction& step : plan.shared_steps) {
    V* out = shared + step.out;
    const V* left = shared + step.left;
    const V* right = shared + step.right;
    if (step.opcode == Opcode::kZero) {
      std::fill(out, out + step.count, V{});
      continue;
    }
    const Loops kept = Filter(step.loops, [](const Loop& x) { return x.out != 0; });
    const std::vector<int32_t> to = Offsets(kept, &Loop::out, 1);
    const std::vector<int32_t> a = Offsets(kept, &Loop::left, 1);
    const std::vector<int32_t> b = Offsets(kept, &Loop::right, 1);
    if (step.opcode == Opcode::kMap) {
      const std::vector<int32_t> c = Offsets(kept, &Loop::third, 1);
      const auto map = kernels.map[static_cast<int64_t>(plan.dtype)];
      for (size_t i = 0; i < to.size(); ++i) {
        map(static_cast<int32_t>(step.array), left + a[i], right + b[i], shared + step.third + c[i],
            out + to[i]);
      }
      continue;
    }
    const bool product = step.opcode == Opcode::kProduct;
    const Loops inner = Filter(step.loops, [](const Loop& x) { return x.out == 0; });
    const std::vector<int32_t> ka = Offsets(inner, &Loop::left, 1);
    const std::vector<int32_t> kb = Offsets(inner, &Loop::right, 1);
    for (size_t i = 0; i < to.size(); ++i) {
      V sum = step.accumulate ? out[to[i]] : V{};
      for (size_t k = 0; k < ka.size(); ++k) {
        V x = left[a[i] + ka[k]];
        if (product) x = x * right[b[i] + kb[k]];
        sum += x;
      }
      out[to[i]] = sum;
    }
  }
}

template <typename V>
void Pack(const Schedule& schedule, const V* shared, V* panels) {
  for (const Packing& packing : schedule.packings) {
    const V* from = shared + packing.from;
    V* to = panels + packing.to;
    for (int32_t offset : packing.offsets) *to++ = from[offset];
  }
}

// Calls `body` with the type of the plan's values.
template <typename Body>
void WithValueType(DType dtype, Body body) {
  switch (dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      return body(float{});
    case DType::kF64:
      return body(double{});
    case DType::kC64:
      return body(ComplexOf<float>{});
    case DType::kC128:
      return body(ComplexOf<double>{});
  }
}

}  // namespace

Schedule MakeSchedule(const Plan& plan, const Kernels& kernels, int64_t block_elements) {
  return Scheduler(plan, kernels, block_elements).Make();
}

void RunSharedSteps(const Plan& plan, const Kernels& kernels, void* shared) {
  WithValueType(plan.dtype, [&](auto value) {
    RunShared(plan, kernels, static_cast<decltype(value)*>(shared));
  });
}

void PackPanels(const Plan& plan, const Schedule& schedule, const void* shared, void* panels) {
  WithValueType(plan.dtype, [&](auto value) {
    using V = decltype(value);
    Pack(schedule, static_cast<const V*>(shared), static_cast<V*>(panels));
  });
}

}  // namespace jaxmagma
