// The custom call "jaxmagma_cuda": a kernel specialised for its exact sizes.
//
// Instantiate, once for an executable, decodes the call and compiles its kernel; Initialize loads
// it on the device in use, so that nothing is loaded while a CUDA graph is recorded; Execute only
// launches. Executions share nothing that any of them changes: see instances.h.

#include "ffi.h"

#include <exception>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "driver.h"
#include "instances.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmagma {
namespace {

// A block of so many threads adds up so many values of what the others have; as in reduce.cuh.
constexpr int kTotalThreads = 512, kTotals = 4;

struct State {
  static ffi::TypeId id;

  Call call;
  std::shared_ptr<Instances> instances;
};
ffi::TypeId State::id = {};
constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

ffi::Error Fail(const Call& call, const std::string& what) {
  return ffi::Error::Internal("jaxmagma_cuda: " + call.name + ": " + what);
}

ffi::Error Ended(const Call& call, const std::string& error) {
  return error.empty() ? ffi::Error::Success() : Fail(call, error);
}

// What `body` returns; what it throws as an error of the call.
template <class Body>
ffi::Error Guarded(const Call& call, const Body& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return Fail(call, e.what());
  } catch (...) {
    return Fail(call, "an unknown exception");
  }
}

// ---- Stages ----------------------------------------------------------------------------------

ffi::ErrorOr<std::unique_ptr<State>> DoInstantiate(ffi::Dictionary attributes) {
  auto state = std::make_unique<State>();
  const ffi::Error error = Guarded(state->call, [&] {
    if (std::string wrong = Decode(attributes, state->call); !wrong.empty()) {
      return ffi::Error::InvalidArgument("jaxmagma_cuda: " + state->call.name + ": " + wrong);
    }
    state->instances = Instances::Of(state->call);
    // Executables are also built where there is no GPU; then the kernel is compiled when it is
    // used.
    return Ended(state->call, state->instances->Compile(0));
  });
  if (error.failure()) return ffi::Unexpected(error);
  return state;
}

ffi::Error DoInitialize(State* state, int32_t ordinal) {
  return Guarded(state->call, [&] { return Ended(state->call, state->instances->Load(ordinal)); });
}

bool IsComplex(ffi::DataType dtype) {
  return dtype == ffi::C64 || dtype == ffi::C128;
}

// Bytes of the values of a buffer as the kernel has them; 0 of one that it does not have.
int64_t ValueBytes(const Signature& signature, size_t buffer) {
  auto wanted = static_cast<int64_t>(buffer);
  for (const auto& sum : signature.sums) {
    if (sum.result == wanted) wanted = sum.workspace;
  }
  for (const auto& pointer : signature.pointers) {
    if (pointer.buffer == wanted) return pointer.itemsize;
  }
  return 0;
}

// The buffers of a call, whose shapes may be among `in_parts`; or what is wrong with them.
std::string ArraysOf(const Signature& signature, const ffi::RemainingArgs& operands,
                     const ffi::RemainingRets& results, std::vector<Array>& arrays,
                     std::list<std::vector<int64_t>>& in_parts) {
  const auto append = [&](const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    const auto itemsize = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
    Array array = {buffer.untyped_data(), dims.begin(), dims.size(), itemsize};
    if (IsComplex(buffer.element_type()) && itemsize == 2 * ValueBytes(signature, arrays.size())) {
      // To a kernel of real numbers complex ones are two of them along a last axis.
      in_parts.emplace_back(dims.begin(), dims.end()).push_back(2);
      array.dims = in_parts.back().data();
      array.rank = in_parts.back().size();
      array.itemsize /= 2;
    }
    arrays.push_back(array);
  };
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer) return "operand " + std::to_string(i) + " is no array";
    append(*buffer);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer) return "result " + std::to_string(i) + " is no array";
    append(**buffer);
  }
  return "";
}

// Where there is but one partial sum, it is the sum.
void SumInPlace(const Signature& signature, const std::vector<Array>& arrays, Launch& launch) {
  for (size_t n = 0; n < signature.pointers.size(); ++n) {
    for (const auto& sum : signature.sums) {
      if (signature.pointers[n].buffer == sum.workspace) {
        launch.pointers[n] = arrays[sum.result].data;
      }
    }
  }
}

ffi::Error Run(const State& state, int32_t ordinal, CUstream stream,
               const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  const Call& call = state.call;
  std::vector<Array> arrays;
  std::list<std::vector<int64_t>> in_parts;
  if (std::string error = ArraysOf(call.signature, operands, results, arrays, in_parts);
      !error.empty()) {
    return Fail(call, error);
  }
  for (const Copy& copy : call.copies) {
    const auto operand = static_cast<size_t>(copy.operand);
    if (operand >= operands.size() ||
        arrays[operand].values() * arrays[operand].itemsize != copy.bytes) {
      return Fail(call, "operand " + std::to_string(operand) + " is not " +
                            std::to_string(copy.bytes) + " bytes");
    }
  }
  Instances::Lease lease;
  if (std::string error = state.instances->Borrow(ordinal, stream, lease); !error.empty()) {
    return Fail(call, error);
  }
  const Driver& driver = lease.driver();
  const Instance& instance = lease.instance();

  Launch launch;
  if (std::string error = Prepare(call.signature, arrays, instance.most_blocks, launch);
      !error.empty()) {
    return Fail(call, error);
  }
  if (launch.blocks == 0) return ffi::Error::Success();
  if (launch.blocks > std::numeric_limits<int32_t>::max()) return Fail(call, "too many elements");

  for (const Copy& copy : call.copies) {
    const auto from = reinterpret_cast<CUdeviceptr>(arrays[copy.operand].data);
    const CUresult result = driver.copy_on_device(instance.bank + copy.offset, from,
                                                  static_cast<size_t>(copy.bytes), stream);
    if (result != CUDA_SUCCESS) return Fail(call, driver.Why(result));
  }
  const bool finish = !call.signature.sums.empty() && launch.chunks > 1;
  if (!finish) SumInPlace(call.signature, arrays, launch);
  std::vector<void*> parameters = {launch.batch.data()};
  for (void*& pointer : launch.pointers) parameters.push_back(&pointer);
  for (int& length : launch.lengths) parameters.push_back(&length);
  CUresult result =
      driver.launch(instance.kernel, static_cast<unsigned>(launch.blocks), 1, 1,
                    static_cast<unsigned>(call.threads), 1, 1,
                    static_cast<unsigned>(call.shared_bytes), stream, parameters.data(), nullptr);
  if (result != CUDA_SUCCESS) return Fail(call, "launch: " + driver.Why(result));
  if (!finish) return ffi::Error::Success();

  for (const auto& sum : call.signature.sums) {
    int64_t values = launch.outer * sum.size, chunks = launch.chunks, size = sum.size;
    if (values == 0) continue;
    const int64_t blocks = (values + kTotals - 1) / kTotals;
    if (blocks > std::numeric_limits<int32_t>::max()) return Fail(call, "too many sums");
    void* partial = arrays[sum.workspace].data;
    void* total = arrays[sum.result].data;
    void* arguments[] = {&partial, &total, &values, &chunks, &size};
    result = driver.launch(instance.finish, static_cast<unsigned>(blocks), 1, 1, kTotalThreads, 1,
                           1, 0, stream, arguments, nullptr);
    if (result != CUDA_SUCCESS) return Fail(call, "sum: " + driver.Why(result));
  }
  return ffi::Error::Success();
}

ffi::Error DoExecute(State* state, int32_t ordinal, CUstream stream, ffi::RemainingArgs operands,
                     ffi::RemainingRets results) {
  return Guarded(state->call, [&] { return Run(*state, ordinal, stream, operands, results); });
}

}  // namespace

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  // XLA registers queued handlers before queued types. It asks every handler for its metadata when
  // registering it, and that call brings the API table: so the type registers itself here.
  static XLA_FFI_Error* const error =
      ffi::Ffi::RegisterTypeId(frame->api, "jaxmagma.cuda.state", &State::id, &kStateInfo);
  if (error != nullptr) return error;
  static auto* const handler = ffi::Ffi::BindInstantiate().Attrs().To(DoInstantiate).release();
  return handler->Call(frame);
}

XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                   .Ctx<ffi::State<State>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .To(DoInitialize)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind<ffi::ExecutionStage::kExecute>()
                                   .Ctx<ffi::State<State>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::PlatformStream<CUstream>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(DoExecute, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

}  // namespace jaxmagma
