#include "call.h"

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace ffi = xla::ffi;

namespace jaxmagma {
namespace {

constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostSharedBytes = 1 << 20;  // more than any device has
constexpr int64_t kMostElements = 1 << 20;     // of a block
constexpr size_t kMostBankBytes = 64 << 10;    // constant memory of a device

// Reads a list of numbers, which is preceded by its length.
class Numbers {
 public:
  explicit Numbers(const ffi::Span<const int64_t>& span) : span_(span) {}

  bool whole() const { return span_.size() > 0 && span_[0] == left() + static_cast<int64_t>(at_); }
  int64_t left() const { return static_cast<int64_t>(span_.size() - 1 - at_); }
  int64_t next() { return span_[1 + at_++]; }

 private:
  ffi::Span<const int64_t> span_;
  size_t at_ = 0;
};

std::string DecodeOrder(Numbers numbers, Signature& signature) {
  if (!numbers.whole() || numbers.left() < 2) return "the attribute `order` is too short";
  signature.kept = numbers.next();
  const int64_t rank = numbers.left();
  std::vector<bool> seen(rank, false);
  while (numbers.left() > 0) {
    const int64_t axis = numbers.next();
    if (axis < 0 || axis >= rank || seen[axis]) {
      return "the attribute `order` is no order of the batch axes";
    }
    seen[axis] = true;
    signature.order.push_back(axis);
  }
  if (signature.kept < 0 || signature.kept > rank) {
    return "the attribute `order` keeps " + std::to_string(signature.kept) + " batch axes of " +
           std::to_string(rank);
  }
  return "";
}

std::string DecodePointers(Numbers numbers, Signature& signature) {
  const std::string malformed = "the attribute `pointers` is malformed";
  if (!numbers.whole()) return malformed;
  const auto rank = static_cast<int64_t>(signature.order.size());
  while (numbers.left() > 0) {
    if (numbers.left() < 5) return malformed;
    Signature::Pointer pointer;
    pointer.buffer = numbers.next();
    pointer.size = numbers.next();
    pointer.itemsize = numbers.next();
    pointer.gathered = numbers.next() != 0;
    const int64_t count = numbers.next();
    if (pointer.buffer < 0 || pointer.size < 0 || pointer.itemsize < 1 || count < 0 ||
        count > std::min(rank, numbers.left())) {
      return malformed;
    }
    for (int64_t n = 0; n < count; ++n) {
      const int64_t axis = numbers.next();
      const auto& before = pointer.axes;
      if (axis < 0 || axis >= rank || std::count(before.begin(), before.end(), axis) > 0) {
        return "the attribute `pointers` names a batch axis that there is not, or one twice";
      }
      pointer.axes.push_back(axis);
    }
    signature.pointers.push_back(std::move(pointer));
  }
  return "";
}

std::string DecodeCopies(Numbers numbers, int64_t bank_bytes, std::vector<Copy>& copies) {
  if (!numbers.whole() || numbers.left() % 3 != 0) return "the attribute `copies` is malformed";
  while (numbers.left() > 0) {
    Copy copy = {};
    copy.operand = numbers.next();
    copy.offset = numbers.next();
    copy.bytes = numbers.next();
    if (copy.operand < 0 || copy.offset < 0 || copy.bytes < 1 || copy.offset > bank_bytes ||
        copy.bytes > bank_bytes - copy.offset) {
      return "the attribute `copies` goes beyond constant memory";
    }
    copies.push_back(copy);
  }
  return "";
}

std::string DecodeSums(Numbers numbers, std::vector<Signature::Sum>& sums) {
  if (!numbers.whole() || numbers.left() % 3 != 0) return "the attribute `sums` is malformed";
  while (numbers.left() > 0) {
    Signature::Sum sum = {};
    sum.result = numbers.next();
    sum.workspace = numbers.next();
    sum.size = numbers.next();
    if (sum.result < 0 || sum.workspace < 0 || sum.size < 0) {
      return "the attribute `sums` has a negative number";
    }
    sums.push_back(sum);
  }
  return "";
}

}  // namespace

std::string Decode(const ffi::Dictionary& attributes, Call& call) {
  auto name = attributes.get<std::string_view>("name");
  auto source = attributes.get<std::string_view>("source");
  auto threads = attributes.get<int64_t>("threads");
  auto elements = attributes.get<int64_t>("elements");
  auto shared = attributes.get<int64_t>("shared_bytes");
  auto resident = attributes.get<bool>("resident");
  auto order = attributes.get<ffi::Span<const int64_t>>("order");
  auto pointers = attributes.get<ffi::Span<const int64_t>>("pointers");
  auto copies = attributes.get<ffi::Span<const int64_t>>("copies");
  auto sums = attributes.get<ffi::Span<const int64_t>>("sums");
  auto bank = attributes.get<ffi::Span<const uint8_t>>("bank");
  auto table = attributes.get<ffi::Span<const uint8_t>>("table");
  if (name) call.name = std::string(*name);
  if (!name || !source || !threads || !elements || !shared || !resident || !order || !pointers ||
      !copies || !sums || !bank || !table) {
    return "an attribute of the call is missing, or has another type";
  }
  call.source = std::string(*source);
  call.threads = *threads;
  call.shared_bytes = *shared;
  call.signature.elements = *elements;
  call.signature.resident = *resident;
  if (call.threads < 1 || call.threads > kMostThreads) {
    return "a block of " + std::to_string(call.threads) + " threads";
  }
  if (call.shared_bytes < 0 || call.shared_bytes > kMostSharedBytes) {
    return "a block with " + std::to_string(call.shared_bytes) + " bytes of shared memory";
  }
  if (*elements < 1 || *elements > kMostElements) {
    return "a block of " + std::to_string(*elements) + " elements";
  }
  // The first byte only keeps the attribute from being empty.
  if (bank->size() < 1 || table->size() < 1) return "the attribute `bank` or `table` is empty";
  if (bank->size() - 1 > kMostBankBytes) {
    return std::to_string(bank->size() - 1) + " bytes of constant memory";
  }
  call.bank.assign(bank->begin() + 1, bank->end());
  call.table.assign(table->begin() + 1, table->end());

  std::string error = DecodeOrder(Numbers(*order), call.signature);
  if (error.empty()) error = DecodePointers(Numbers(*pointers), call.signature);
  const auto bank_bytes = static_cast<int64_t>(call.bank.size());
  if (error.empty()) error = DecodeCopies(Numbers(*copies), bank_bytes, call.copies);
  if (error.empty()) error = DecodeSums(Numbers(*sums), call.signature.sums);
  return error;
}

}  // namespace jaxmagma
