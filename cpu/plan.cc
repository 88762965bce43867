#include "plan.h"

#include <algorithm>

#include "functions.h"

namespace jaxmagma {
namespace {

constexpr int64_t kVersion = 5;
constexpr int64_t kLargest = int64_t{1} << 20;  // values of scratch, of shared memory, loops
constexpr int64_t kLargestVector = int64_t{1} << 48;
constexpr int64_t kMostTables = int64_t{1} << 26;  // entries of all tables of offsets and panels
constexpr int64_t kMostSlots = 1 << 16;
constexpr int64_t kMostPointRows = 3;

// Reads integers one by one; after the first impossible one, every read gives zero.
class Reader {
 public:
  Reader(const int64_t* code, size_t size) : code_(code), size_(size) {}

  int64_t Any() {
    if (next_ >= size_) {
      failed_ = true;
      return 0;
    }
    return code_[next_++];
  }

  int64_t UpTo(int64_t largest, int64_t smallest = 0) {
    int64_t x = Any();
    if (x < smallest || x > largest) {
      failed_ = true;
      return 0;
    }
    return x;
  }

  int64_t Count() { return UpTo(static_cast<int64_t>(size_ - next_)); }

  std::vector<int64_t> List(int64_t largest) {
    std::vector<int64_t> list(Count());
    for (int64_t& x : list) x = UpTo(largest);
    return list;
  }

  bool failed() const { return failed_; }
  bool finished() const { return next_ == size_; }

 private:
  const int64_t* code_;
  size_t size_;
  size_t next_ = 0;
  bool failed_ = false;
};

// The product of extents, or -1 if it is out of bounds.
int64_t Size(const std::vector<int64_t>& tile, int64_t largest = kLargest) {
  int64_t size = 1;
  for (int64_t extent : tile) {
    if (extent < 1 || extent > largest / size) return -1;
    size *= extent;
  }
  return size;
}

// Whether a tile that starts at `place` and is walked by `loops` ends within `size` values.
bool Fits(int64_t place, const std::vector<Loop>& loops, int64_t Loop::* stride, int64_t size) {
  int64_t lowest = place, highest = place;
  for (const Loop& loop : loops) {
    const int64_t way = (loop.extent - 1) * (loop.*stride);
    (way < 0 ? lowest : highest) += way;
    if (lowest < 0 || highest >= size) return false;
  }
  return highest < size;
}

// Loops over a result and so many operands, which may be walked backwards.
void ReadLoops(Reader& reader, int operands, std::vector<Loop>& loops) {
  loops.resize(reader.Count());
  for (Loop& loop : loops) {
    loop.extent = reader.UpTo(kLargest, 1);
    loop.out = reader.UpTo(kLargest, -kLargest);
    loop.left = reader.UpTo(kLargest, -kLargest);
    loop.right = operands > 1 ? reader.UpTo(kLargest, -kLargest) : 0;
    loop.third = operands > 2 ? reader.UpTo(kLargest, -kLargest) : 0;
  }
}

// Takes the tables of a loop nest, kept and summed loops apart, and the panel of a shared operand
// of a product from the `room` that is left for all of a plan. Returns whether there was as much.
bool Reserve(const std::vector<Loop>& loops, bool panel, int64_t& room) {
  int64_t kept = 1, summed = 1, packed = 1;
  for (const Loop& loop : loops) {
    int64_t& points = loop.out ? kept : summed;
    points *= loop.extent;
    if (points > kLargest) return false;
    if (!panel || (loop.out && !loop.left)) continue;
    packed *= loop.extent;
    if (packed > kMostTables) return false;
  }
  room -= kept + summed + packed;
  return room >= 0;
}

// The values behind the start of an operand of a Gemm; none if there is no such operand.
int64_t Room(const Plan& plan, int64_t operand, bool shared) {
  if (shared) return plan.shared_size - operand;
  if (operand >= static_cast<int64_t>(plan.inputs.size())) return 0;
  const Input& input = plan.inputs[operand];
  return input.kind == Input::kBatched ? input.size : 0;
}

// ---- Expressions -----------------------------------------------------------------------------

bool ReadAddress(Reader& reader, const Plan& plan, const Instruction& step, Address& a) {
  a.in_scratch = reader.UpTo(1);
  a.place = reader.UpTo(kLargest);
  a.offset = reader.UpTo(kLargest);
  a.stride = reader.UpTo(kLargest);
  if (reader.failed()) return false;
  if (a.in_scratch) {
    return a.offset == 0 && a.place + (step.count - 1) * a.stride < plan.scratch_size;
  }
  return a.stride >= 1 && a.offset < a.stride && a.place + a.stride <= step.slots;
}

bool ReadMicro(Reader& reader, const Plan& plan, const Instruction& step, int64_t& room,
               MicroOperation& m) {
  m.kind = static_cast<MicroOperation::Kind>(reader.UpTo(MicroOperation::kWhere));
  if (m.kind == MicroOperation::kFunction || m.kind == MicroOperation::kWhere) {
    m.function = reader.UpTo(kFunctions - 1);
    if (reader.failed()) return false;
    if (m.kind == MicroOperation::kWhere) {
      m.nonzero = reader.UpTo(1);
      if (IsComplex(plan.dtype) || !ReadAddress(reader, plan, step, m.where)) return false;
    }
    if (IsComplex(plan.dtype)) {
      const auto known = {Function::kAdd, Function::kSub, Function::kMul,
                          Function::kNeg, Function::kFma, Function::kFirst};
      if (std::find(known.begin(), known.end(), static_cast<Function>(m.function)) == known.end()) {
        return false;
      }
    }
    for (int k = 0; k <= kOperands[m.function]; ++k) {
      if (!ReadAddress(reader, plan, step, m.addresses[k])) return false;
    }
    return true;
  }
  if (m.kind == MicroOperation::kWindow) {
    m.input = reader.UpTo(static_cast<int64_t>(plan.inputs.size()) - 1);
    m.slot = reader.UpTo(kMostSlots);
    m.width = reader.UpTo(kMostSlots, 1);
    m.place = reader.UpTo(kLargest);
    if (reader.failed()) return false;
    const Input& input = plan.inputs[m.input];
    return input.kind == Input::kBatched && m.place + m.width * step.count <= input.size &&
           m.slot + m.width <= step.slots;
  }
  m.slot = reader.UpTo(kMostSlots);
  m.shared = reader.UpTo(1);
  m.place = reader.UpTo(kLargest);
  if (m.kind == MicroOperation::kCollect) {
    m.loops.resize(reader.Count());
    int64_t points = 1;
    for (Loop& loop : m.loops) {
      loop = {};
      loop.extent = reader.UpTo(kLargest, 1);
      loop.left = reader.UpTo(kLargest, -kLargest);
      points *= loop.extent;
      if (points > kLargest) return false;
    }
    room -= points;
    if (points != step.count || room < 0) return false;
  }
  return !reader.failed() && m.slot < step.slots &&
         Fits(m.place, m.loops, &Loop::left, m.shared ? plan.shared_size : plan.scratch_size);
}

// ---- Instructions ----------------------------------------------------------------------------

bool ReadInstruction(Reader& reader, const Plan& plan, bool shared, int64_t& room,
                     Instruction& step) {
  const int64_t here = shared ? plan.shared_size : plan.scratch_size;
  step.opcode = static_cast<Opcode>(reader.UpTo(static_cast<int64_t>(Opcode::kPointMatrix)));
  if (reader.failed()) return false;
  switch (step.opcode) {
    case Opcode::kLoad:
    case Opcode::kMultiply: {
      step.array = reader.UpTo(static_cast<int64_t>(plan.inputs.size()) - 1);
      step.out = reader.UpTo(kLargest);
      if (step.opcode == Opcode::kMultiply) {
        step.right = reader.UpTo(kLargest);
        step.accumulate = reader.UpTo(1);
      }
      step.count = reader.UpTo(kLargest, 1);
      if (reader.failed() || shared) return false;
      const Input& input = plan.inputs[step.array];
      return input.kind == Input::kBatched && step.count == input.size &&
             step.out + step.count <= here && step.right + step.count <= here;
    }
    case Opcode::kStore:
      step.array = reader.UpTo(static_cast<int64_t>(plan.outputs.size()) - 1);
      step.left = reader.UpTo(kLargest);
      step.count = reader.UpTo(kLargest, 1);
      return !reader.failed() && !shared && step.count == plan.outputs[step.array].size &&
             step.left + step.count <= here;
    case Opcode::kSpread:
      step.left = reader.UpTo(kLargest);
      step.out = reader.UpTo(kLargest);
      step.count = reader.UpTo(kLargest, 1);
      return !reader.failed() && !shared && step.left + step.count <= plan.shared_size &&
             step.out + step.count <= here;
    case Opcode::kProduct: {
      step.accumulate = reader.UpTo(1);
      step.out = reader.UpTo(kLargest);
      step.left = reader.UpTo(kLargest);
      step.right = reader.UpTo(kLargest);
      step.left_shared = reader.UpTo(1);
      step.right_shared = reader.UpTo(1);
      ReadLoops(reader, 2, step.loops);
      if (reader.failed() || step.right_shared != shared || (shared && !step.left_shared)) {
        return false;
      }
      return Reserve(step.loops, step.left_shared, room) &&
             Fits(step.out, step.loops, &Loop::out, here) &&
             Fits(step.left, step.loops, &Loop::left, step.left_shared ? plan.shared_size : here) &&
             Fits(step.right, step.loops, &Loop::right, here);
    }
    case Opcode::kRearrange:
      step.accumulate = reader.UpTo(1);
      step.out = reader.UpTo(kLargest);
      step.left = reader.UpTo(kLargest);
      ReadLoops(reader, 1, step.loops);
      return !reader.failed() && Reserve(step.loops, false, room) &&
             Fits(step.out, step.loops, &Loop::out, here) &&
             Fits(step.left, step.loops, &Loop::left, here);
    case Opcode::kZero:
      step.out = reader.UpTo(kLargest);
      step.count = reader.UpTo(kLargest, 1);
      return !reader.failed() && step.out + step.count <= here;
    case Opcode::kGather: {
      const int64_t last = static_cast<int64_t>(plan.inputs.size()) - 1;
      step.left = reader.UpTo(last);
      step.array = reader.UpTo(last);
      step.out = reader.UpTo(kLargest);
      step.count = reader.UpTo(kLargest, 1);
      step.third = reader.UpTo(kLargest, 1);
      if (reader.failed() || shared) return false;
      const Input& vector = plan.inputs[step.left];
      const Input& index = plan.inputs[step.array];
      return vector.kind == Input::kVector && index.kind == Input::kIndex &&
             index.size == step.count && vector.size % step.third == 0 &&
             step.out + step.count * step.third <= here;
    }
    case Opcode::kMap: {
      step.array = reader.UpTo(kFunctions - 1);
      step.out = reader.UpTo(kLargest);
      step.left = reader.UpTo(kLargest);
      step.right = reader.UpTo(kLargest);
      step.third = reader.UpTo(kLargest);
      ReadLoops(reader, 3, step.loops);
      if (reader.failed() || !shared || !Reserve(step.loops, false, room)) return false;
      for (const Loop& loop : step.loops) {
        if (loop.out == 0) return false;
      }
      // Functions of fewer operands read the others, too.
      return Fits(step.out, step.loops, &Loop::out, here) &&
             Fits(step.left, step.loops, &Loop::left, here) &&
             Fits(step.right, step.loops, &Loop::right, here) &&
             Fits(step.third, step.loops, &Loop::third, here);
    }
    case Opcode::kPointMatrix: {
      step.array = reader.UpTo(static_cast<int64_t>(plan.inputs.size()) - 1);
      step.count = reader.UpTo(kLargest, 1);
      const int64_t rows = reader.UpTo(kMostPointRows, 2);
      const auto places = [&](int64_t count, int64_t size) {
        std::vector<int64_t> found(count);
        for (int64_t& place : found) place = reader.UpTo(size - step.count);
        return found;
      };
      if (reader.failed() || shared || IsHalf(plan.dtype)) return false;
      step.outs = places(rows, here);
      step.rights = places(rows, here);
      step.entries = places(rows * rows, plan.inputs[step.array].size);
      return !reader.failed() && plan.inputs[step.array].kind == Input::kBatched;
    }
    case Opcode::kExpression:
      step.count = reader.UpTo(kLargest, 1);
      step.slots = reader.UpTo(kMostSlots);
      step.micros.resize(reader.Count());
      if (reader.failed() || shared) return false;
      for (MicroOperation& m : step.micros) {
        if (!ReadMicro(reader, plan, step, room, m)) return false;
      }
      return true;
    case Opcode::kGemm: {
      Gemm& g = step.gemm;
      step.array = reader.UpTo(static_cast<int64_t>(plan.outputs.size()) - 1);
      g.left = reader.UpTo(kLargest);
      g.right = reader.UpTo(kLargest);
      g.left_shared = reader.UpTo(1);
      g.right_shared = reader.UpTo(1);
      g.rows = reader.UpTo(kLargest, 1);
      g.columns = reader.UpTo(kLargest, 2);  // a vector of columns has at least two
      g.inner = reader.UpTo(kLargest, 1);
      for (int64_t* stride :
           {&g.left_row, &g.left_inner, &g.right_inner, &g.right_column, &g.out_row}) {
        *stride = reader.UpTo(kLargest);
      }
      if (reader.failed() || shared || IsComplex(plan.dtype) || IsHalf(plan.dtype)) return false;
      const Output& output = plan.outputs[step.array];
      const int64_t rows = g.rows - 1, columns = g.columns - 1, inner = g.inner - 1;
      return output.summed.empty() && rows * g.out_row + columns < output.size &&
             rows * g.left_row + inner * g.left_inner < Room(plan, g.left, g.left_shared) &&
             inner * g.right_inner + columns * g.right_column <
                 Room(plan, g.right, g.right_shared) &&
             (g.right_column == 1 || g.inner * g.columns <= here);
    }
  }
  return false;
}

bool Decode(Reader& reader, size_t constants_size, Plan& plan) {
  if (reader.Any() != kVersion) return false;
  plan.dtype = static_cast<DType>(reader.UpTo(kDTypes - 1));
  plan.batch_rank = reader.UpTo(64);
  plan.flops = reader.UpTo(INT64_MAX);
  plan.shared_size = reader.UpTo(kLargest);
  plan.scratch_size = reader.UpTo(kLargest);
  plan.block = reader.UpTo(kLargest);
  if (reader.failed()) return false;

  int64_t constant_values = 0;
  plan.inputs.resize(reader.Count());
  for (Input& input : plan.inputs) {
    input.kind = static_cast<Input::Kind>(reader.UpTo(Input::kIndex));
    input.place = reader.UpTo(kLargest);
    input.tile = reader.List(kLargestVector);
    input.batch = reader.List(plan.batch_rank - 1);
    input.size = Size(input.tile, input.kind == Input::kVector ? kLargestVector : kLargest);
    if (reader.failed() || input.size < 0) return false;
    const bool batched = input.kind == Input::kBatched || input.kind == Input::kIndex;
    if (input.kind != Input::kVector && batched == input.batch.empty()) return false;
    const bool shared = input.kind == Input::kShared || input.kind == Input::kConstant;
    if (shared && input.place + input.size > plan.shared_size) return false;
    if (input.kind == Input::kConstant) constant_values += input.size;
  }
  if (constant_values * plan.stored_bytes() != static_cast<int64_t>(constants_size)) return false;

  plan.outputs.resize(reader.Count());
  for (Output& output : plan.outputs) {
    output.tile = reader.List(kLargest);
    output.batch = reader.List(plan.batch_rank - 1);
    output.summed = reader.List(plan.batch_rank - 1);
    output.size = Size(output.tile);
    if (reader.failed() || output.size < 0) return false;
  }

  int64_t room = kMostTables;
  for (bool shared : {true, false}) {
    std::vector<Instruction>& steps = shared ? plan.shared_steps : plan.steps;
    steps.resize(reader.Count());
    for (Instruction& step : steps) {
      if (!ReadInstruction(reader, plan, shared, room, step)) return false;
      // Direct steps do not mix with those that work on lanes.
      if ((step.opcode == Opcode::kGemm) != (steps[0].opcode == Opcode::kGemm)) return false;
    }
  }
  return !reader.failed() && reader.finished() && !plan.steps.empty();
}

}  // namespace

bool DecodePlan(const int64_t* code, size_t size, const uint8_t* constants, size_t constants_size,
                Plan& plan, std::string& error) {
  Reader reader(code, size);
  if (!Decode(reader, constants_size, plan)) {
    error = "the attribute 'plan' is not one that this version of jaxmagma writes";
    return false;
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(constants);
  plan.constants.assign(bytes, bytes + constants_size);
  return true;
}

}  // namespace jaxmagma
