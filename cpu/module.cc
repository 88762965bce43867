// The custom call `jaxmagma_cpu` and the Python module that hands it to JAX.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"
#include "plan.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace jaxmagma {
namespace {

// The executor as the state of the custom call: decoded once for an executable, run at every call.
struct State {
  static ffi::TypeId id;
  std::unique_ptr<const Executor> executor;
};
ffi::TypeId State::id = {};
constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

ffi::Error InvalidArgument(const std::string& why) {
  return ffi::Error::InvalidArgument("jaxmagma_cpu: " + why);
}

// The exception that is being handled, as an error. Nothing may be thrown into XLA, not even for
// want of memory for a message: so short a text needs none.
ffi::Error Caught() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& e) {
    try {
      const bool invalid = dynamic_cast<const std::invalid_argument*>(&e) != nullptr;
      return invalid ? InvalidArgument(e.what())
                     : ffi::Error::Internal(std::string("jaxmagma_cpu: ") + e.what());
    } catch (...) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
    }
  } catch (...) {
    return ffi::Error::Internal("unknown error");
  }
}

ffi::DataType ElementType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ffi::F32;
    case DType::kF64:
      return ffi::F64;
    case DType::kC64:
      return ffi::C64;
    case DType::kC128:
      return ffi::C128;
    case DType::kF16:
      return ffi::F16;
    case DType::kBF16:
      return ffi::BF16;
  }
  return ffi::DataType::INVALID;
}

// Of the complex numbers that have parts of such a dtype.
ffi::DataType ComplexOf(ffi::DataType parts) {
  if (parts == ffi::F32) return ffi::C64;
  return parts == ffi::F64 ? ffi::C128 : ffi::DataType::INVALID;
}

class PoolHelpers : public Helpers {
 public:
  explicit PoolHelpers(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t count() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Span<const int64_t> code,
                                                 ffi::Span<const uint8_t> constants) {
  try {
    Plan plan;
    std::string error;
    if (!DecodePlan(code.begin(), code.size(), constants.begin(), constants.size(), plan, error)) {
      return ffi::Unexpected(InvalidArgument(error));
    }
    auto state = std::make_unique<State>();
    state->executor = std::make_unique<const Executor>(std::move(plan));
    return state;
  } catch (...) {
    return ffi::Unexpected(Caught());
  }
}

ffi::Error Execute(State* state, ffi::ThreadPool pool, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Span<const int64_t>, ffi::Span<const uint8_t>) {
  try {
    const Executor& executor = *state->executor;
    const ffi::DataType dtype = ElementType(executor.plan().dtype);
    std::vector<Array> arguments, results;
    std::list<std::vector<int64_t>> in_parts;
    auto append = [&](std::vector<Array>& arrays, const ffi::AnyBuffer& buffer,
                      ffi::DataType wanted) {
      const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
      Array array = {static_cast<std::byte*>(buffer.untyped_data()), dims.begin(), dims.size()};
      bool is_wanted = buffer.element_type() == wanted;
      if (!is_wanted && buffer.element_type() == ComplexOf(wanted)) {
        // Complex numbers are two real ones along a last axis.
        in_parts.emplace_back(dims.begin(), dims.end()).push_back(2);
        array.dims = in_parts.back().data();
        array.rank = in_parts.back().size();
        is_wanted = true;
      }
      arrays.push_back(array);
      return is_wanted;
    };
    std::vector<ffi::DataType> dtypes;
    for (const Input& input : executor.plan().inputs) {
      if (input.kind == Input::kConstant) continue;
      dtypes.push_back(input.kind == Input::kIndex ? ffi::S32 : dtype);
    }
    dtypes.resize(args.size(), dtype);  // any further operands are an error of their own
    for (size_t i = 0; i < args.size(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer || !append(arguments, *buffer, dtypes[i])) {
        return InvalidArgument("operand " + std::to_string(i) + " has the wrong dtype");
      }
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer || !append(results, **buffer, dtype)) {
        return InvalidArgument("result " + std::to_string(i) + " has the wrong dtype");
      }
    }
    PoolHelpers helpers(pool);
    const std::string error = executor.Run(arguments, results, helpers);
    return error.empty() ? ffi::Error::Success() : InvalidArgument(error);
  } catch (...) {
    return Caught();
  }
}

// Calls what `handler()` makes. XLA's header takes memory around Instantiate and Execute, too.
template <typename Handler>
XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame, const Handler& handler) noexcept {
  try {
    return handler()->Call(frame);
  } catch (...) {
    XLA_FFI_Error_Create_Args args{};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = "jaxmagma_cpu: out of memory";
    args.errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

// XLA registers queued handlers before queued types. It asks every handler for its metadata when
// registering it, and that call brings the API table: so the type registers itself here.
XLA_FFI_Error* RegisterState(const XLA_FFI_Api* api) {
  static std::mutex mutex;
  static bool registered = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (registered) return nullptr;
  XLA_FFI_Error* const error =
      ffi::Ffi::RegisterTypeId(api, "jaxmagma.cpu.state", &State::id, &kStateInfo);
  registered = !error;
  return error;
}

XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* const error = RegisterState(frame->api)) return error;
  return Call(frame, [] {
    static auto* const handler = ffi::Ffi::BindInstantiate()
                                     .Attr<ffi::Span<const int64_t>>("plan")
                                     .Attr<ffi::Span<const uint8_t>>("constants")
                                     .To(Instantiate)
                                     .release();
    return handler;
  });
}

XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  return Call(frame, [] {
    static auto* const handler = ffi::Ffi::Bind<ffi::ExecutionStage::kExecute>()
                                     .Ctx<ffi::State<State>>()
                                     .Ctx<ffi::ThreadPool>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attr<ffi::Span<const int64_t>>("plan")
                                     .Attr<ffi::Span<const uint8_t>>("constants")
                                     .To(Execute)
                                     .release();
    return handler;
  });
}

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

NB_MODULE(_cpu, m) {
  m.def("registrations", [] {
    BestKernels();  // throws if there are none such as the environment asks for
    nb::dict stages;
    stages["instantiate"] = Capsule(InstantiateHandler);
    stages["execute"] = Capsule(ExecuteHandler);
    nb::dict targets;
    targets["jaxmagma_cpu"] = stages;
    return targets;
  });
  m.def("instruction_set", [] { return std::string(BestKernels().name); });
}

}  // namespace
}  // namespace jaxmagma
