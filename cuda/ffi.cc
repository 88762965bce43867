// The custom call "jaxmagma_cuda": a kernel specialised for its exact sizes.
//
// Instantiate, once for an executable, decodes the call and compiles its kernel; Initialize loads
// it on the device in use, so that nothing is loaded while a CUDA graph is recorded; Execute only
// launches. Constants are written to the kernel's constant bank when it is loaded; traced bases are
// copied there in stream order before each launch, into a module that this call alone owns.

#include "ffi.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "launch.h"
#include "specialise.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmagma {
namespace {

// ---- The call --------------------------------------------------------------------------------

struct Copy {
  int64_t operand;
  int64_t offset;  // in the constant bank
  int64_t bytes;
};

// The kernel on one device.
struct Loaded {
  CUfunction kernel = nullptr;
  CUfunction finish = nullptr;
  CUdeviceptr bank = 0;
  int64_t most_blocks = std::numeric_limits<int64_t>::max();
};

constexpr int kMostDevices = 64;

// A block of so many threads adds up so many values of what the others have; as in reduce.cuh.
constexpr int kTotalThreads = 512, kTotals = 4;

struct State {
  static ffi::TypeId id;

  std::string name;
  std::string source;
  Signature signature;
  std::vector<Copy> copies;
  int64_t threads = 0;
  int64_t shared_bytes = 0;
  std::string bank;  // the bytes of constants, and zeros for what is copied
  std::string table;

  std::mutex mutex;
  std::map<int, CUlibrary> libraries;                              // by compute capability
  std::array<std::atomic<const Loaded*>, kMostDevices> devices{};  // by device, set once

  ~State() {
    std::string why;
    const Driver* driver = GetDriver(&why);
    for (auto& device : devices) delete device.load();
    for (const auto& [arch, library] : libraries) {
      if (driver != nullptr) driver->library_unload(library);
    }
  }

  ffi::Error Fail(const std::string& what) const {
    return ffi::Error::Internal("jaxmagma_cuda: " + name + ": " + what);
  }
};
ffi::TypeId State::id = {};
constexpr XLA_FFI_TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

// A list of numbers, preceded by its length.
std::vector<int64_t> List(const ffi::Span<const int64_t>& span) {
  if (span.size() == 0) return {};
  return std::vector<int64_t>(span.begin() + 1, span.end());
}

std::string Decode(const ffi::Dictionary& attributes, State& state) {
  auto text = attributes.get<std::string_view>("source");
  auto name = attributes.get<std::string_view>("name");
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
  if (!text || !name || !threads || !elements || !shared || !resident || !order || !pointers ||
      !copies || !sums || !bank || !table) {
    return "an attribute of the call is missing";
  }
  state.source = std::string(*text);
  state.name = std::string(*name);
  state.threads = *threads;
  state.shared_bytes = *shared;
  Signature& signature = state.signature;
  signature.elements = *elements;
  signature.resident = *resident;
  if (*threads < 1 || *elements < 1 || *shared < 0) return "a launch parameter is not positive";

  const std::vector<int64_t> axes = List(*order);
  if (axes.size() < 2) return "the attribute `order` is too short";
  signature.kept = axes[0];
  signature.order.assign(axes.begin() + 1, axes.end());

  const std::vector<int64_t> numbers = List(*pointers);
  for (size_t at = 0; at < numbers.size();) {
    if (at + 2 > numbers.size() || numbers[at + 1] < 0 ||
        numbers[at + 1] > static_cast<int64_t>(numbers.size() - at - 2)) {
      return "the attribute `pointers` is malformed";
    }
    const auto begin = numbers.begin() + at + 2;
    signature.pointers.push_back({numbers[at], {begin, begin + numbers[at + 1]}});
    at += 2 + numbers[at + 1];
  }
  const std::vector<int64_t> copied = List(*copies);
  for (size_t at = 0; at + 3 <= copied.size(); at += 3) {
    state.copies.push_back({copied[at], copied[at + 1], copied[at + 2]});
  }
  const std::vector<int64_t> summed = List(*sums);
  for (size_t at = 0; at + 3 <= summed.size(); at += 3) {
    signature.sums.push_back({summed[at], summed[at + 1], summed[at + 2]});
  }
  // The first byte only keeps the attribute from being empty.
  state.bank.assign(bank->begin() + 1, bank->end());
  state.table.assign(table->begin() + 1, table->end());
  return "";
}

// ---- Loading ---------------------------------------------------------------------------------

int Capability(const Driver& driver, CUdevice device) {
  int major = 0, minor = 0;
  driver.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  driver.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  return 10 * major + minor;
}

// The device of the current context, else device number `ordinal`.
CUresult CurrentDevice(const Driver& driver, int ordinal, CUdevice* device) {
  CUcontext context = nullptr;
  if (driver.context_current(&context) == CUDA_SUCCESS && context != nullptr) {
    return driver.context_device(device);
  }
  return driver.device_get(device, ordinal);
}

// Compiles for compute capability `arch`, unless that is done, or again if `rebuild`. The caller
// holds the mutex.
std::string Build(State& state, const Driver& driver, int arch, bool rebuild = false) {
  if (auto found = state.libraries.find(arch); found != state.libraries.end()) {
    if (!rebuild) return "";
    driver.library_unload(found->second);
    state.libraries.erase(found);
  }
  const Compiled compiled = Specialise(state.source, arch, rebuild);
  if (compiled.code.empty()) return "cannot be compiled: " + compiled.log;
  CUlibrary library = nullptr;
  const CUresult result =
      driver.library_load(&library, compiled.code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) {
    state.libraries[arch] = library;
    return "";
  }
  // What the cache holds may be whole and yet not load, if it is another machine's.
  return rebuild ? "cannot be loaded: " + driver.Why(result) : Build(state, driver, arch, true);
}

std::string LoadOn(State& state, const Driver& driver, CUdevice device, bool rebuild,
                   Loaded& loaded) {
  const int arch = Capability(driver, device);
  if (std::string error = Build(state, driver, arch, rebuild); !error.empty()) return error;
  const CUlibrary library = state.libraries[arch];
  std::string error;
  auto check = [&](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS && error.empty()) {
      error = std::string(what) + ": " + driver.Why(result);
    }
    return result == CUDA_SUCCESS;
  };
  auto function = [&](const char* symbol, CUfunction* found) {
    CUkernel kernel = nullptr;
    return check(driver.library_kernel(&kernel, library, symbol), symbol) &&
           check(driver.kernel_function(found, kernel), symbol);
  };
  auto fill = [&](const char* symbol, const std::string& bytes, CUdeviceptr* found) {
    size_t size = 0;
    return bytes.empty() ||
           (check(driver.library_global(found, &size, library, symbol), symbol) &&
            check(size < bytes.size() ? CUDA_ERROR_INVALID_VALUE
                                      : driver.copy_to_device(*found, bytes.data(), bytes.size()),
                  symbol));
  };
  CUdeviceptr table = 0;
  if (!function("kernel", &loaded.kernel)) {
    // A library is read when the first kernel is asked for: only now does a bad one show.
    return rebuild ? error : LoadOn(state, driver, device, true, loaded);
  }
  if (!state.signature.sums.empty() && !function("finish", &loaded.finish)) return error;
  if (!fill("bank", state.bank, &loaded.bank) || !fill("table", state.table, &table)) return error;
  // Beyond 48 KB it must be asked for, and what the kernel has of its own counts as well.
  if (state.shared_bytes > 0) {
    check(driver.function_set_attribute(loaded.kernel,
                                        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(state.shared_bytes)),
          "this GPU has too little shared memory for a block");
  }
  if ((state.signature.resident || !state.signature.sums.empty()) && error.empty()) {
    int multiprocessors = 0, blocks = 0;
    driver.device_attribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    check(driver.most_blocks(&blocks, loaded.kernel, static_cast<int>(state.threads),
                             static_cast<size_t>(state.shared_bytes)),
          "occupancy");
    loaded.most_blocks = std::max<int64_t>(1, int64_t{multiprocessors} * blocks);
  }
  return error;
}

// The kernel on the current device, loaded at the first call.
ffi::Error Load(State& state, int ordinal, const Driver** driver, const Loaded** loaded) {
  std::string why;
  *driver = GetDriver(&why);
  if (*driver == nullptr) return state.Fail(why);
  CUdevice device = 0;
  CUresult result = CurrentDevice(**driver, ordinal, &device);
  if (result != CUDA_SUCCESS) return state.Fail((*driver)->Why(result));
  if (device < 0 || device >= kMostDevices) return state.Fail("too many devices");
  *loaded = state.devices[device].load(std::memory_order_acquire);
  if (*loaded != nullptr) return ffi::Error::Success();

  std::lock_guard<std::mutex> lock(state.mutex);
  *loaded = state.devices[device].load(std::memory_order_acquire);
  if (*loaded != nullptr) return ffi::Error::Success();
  CUcontext context = nullptr;
  if ((*driver)->context_current(&context) != CUDA_SUCCESS || context == nullptr) {
    result = (*driver)->primary_context_retain(&context, device);
    if (result == CUDA_SUCCESS) result = (*driver)->context_set_current(context);
    if (result != CUDA_SUCCESS) return state.Fail((*driver)->Why(result));
  }
  auto fresh = std::make_unique<Loaded>();
  if (std::string error = LoadOn(state, **driver, device, false, *fresh); !error.empty()) {
    return state.Fail(error);
  }
  *loaded = fresh.get();
  state.devices[device].store(fresh.release(), std::memory_order_release);
  return ffi::Error::Success();
}

// ---- Stages ----------------------------------------------------------------------------------

ffi::ErrorOr<std::unique_ptr<State>> DoInstantiate(ffi::Dictionary attributes) {
  try {
    auto state = std::make_unique<State>();
    if (std::string error = Decode(attributes, *state); !error.empty()) {
      return ffi::Unexpected(state->Fail(error));
    }
    // Executables are also built where there is no GPU; then the kernel is compiled when it is
    // used.
    std::string why;
    const Driver* driver = GetDriver(&why);
    int count = 0;
    if (driver != nullptr && driver->device_count(&count) == CUDA_SUCCESS && count > 0) {
      CUdevice device = 0;
      if (CurrentDevice(*driver, 0, &device) == CUDA_SUCCESS) {
        std::string error = Build(*state, *driver, Capability(*driver, device));
        if (!error.empty()) return ffi::Unexpected(state->Fail(error));
      }
    }
    return state;
  } catch (const std::exception& e) {
    return ffi::Unexpected(ffi::Error::Internal(std::string("jaxmagma_cuda: ") + e.what()));
  }
}

ffi::Error DoInitialize(State* state, int32_t ordinal) {
  try {
    const Driver* driver = nullptr;
    const Loaded* loaded = nullptr;
    return Load(*state, ordinal, &driver, &loaded);
  } catch (const std::exception& e) {
    return state->Fail(e.what());
  }
}

ffi::Error DoExecute(State* state, int32_t ordinal, CUstream stream, ffi::RemainingArgs operands,
                     ffi::RemainingRets results) {
  try {
    const Driver* driver = nullptr;
    const Loaded* loaded = nullptr;
    if (ffi::Error error = Load(*state, ordinal, &driver, &loaded); error.failure()) return error;

    std::vector<Array> arrays;
    auto append = [&](const ffi::AnyBuffer& buffer) {
      const auto dims = buffer.dimensions();
      arrays.push_back({buffer.untyped_data(), dims.begin(), dims.size()});
    };
    for (size_t i = 0; i < operands.size(); ++i) append(*operands.get<ffi::AnyBuffer>(i));
    for (size_t i = 0; i < results.size(); ++i) append(**results.get<ffi::AnyBuffer>(i));
    Launch launch;
    if (std::string error = Prepare(state->signature, arrays, loaded->most_blocks, launch);
        !error.empty()) {
      return state->Fail(error);
    }
    if (launch.blocks == 0) return ffi::Error::Success();
    if (launch.blocks > std::numeric_limits<int32_t>::max())
      return state->Fail("too many elements");

    for (const Copy& copy : state->copies) {
      const auto from = reinterpret_cast<CUdeviceptr>(arrays.at(copy.operand).data);
      const CUresult result =
          driver->copy_on_device(loaded->bank + copy.offset, from, copy.bytes, stream);
      if (result != CUDA_SUCCESS) return state->Fail(driver->Why(result));
    }
    // A single partial sum is the sum.
    const bool finish = !state->signature.sums.empty() && launch.chunks > 1;
    if (!finish) {
      for (size_t n = 0; n < state->signature.pointers.size(); ++n) {
        for (const auto& sum : state->signature.sums) {
          if (state->signature.pointers[n].buffer == sum.workspace) {
            launch.pointers[n] = arrays.at(sum.result).data;
          }
        }
      }
    }
    std::vector<void*> parameters = {launch.batch.data()};
    for (void*& pointer : launch.pointers) parameters.push_back(&pointer);
    CUresult result = driver->launch(loaded->kernel, static_cast<unsigned>(launch.blocks), 1, 1,
                                     static_cast<unsigned>(state->threads), 1, 1,
                                     static_cast<unsigned>(state->shared_bytes), stream,
                                     parameters.data(), nullptr);
    if (result != CUDA_SUCCESS) return state->Fail("launch: " + driver->Why(result));
    if (!finish) return ffi::Error::Success();

    for (const auto& sum : state->signature.sums) {
      int64_t values = launch.outer * sum.size, chunks = launch.chunks, size = sum.size;
      if (values == 0) continue;
      void* partial = arrays.at(sum.workspace).data;
      void* total = arrays.at(sum.result).data;
      void* arguments[] = {&partial, &total, &values, &chunks, &size};
      const int64_t blocks = (values + kTotals - 1) / kTotals;
      result = driver->launch(loaded->finish, static_cast<unsigned>(blocks), 1, 1, kTotalThreads, 1,
                              1, 0, stream, arguments, nullptr);
      if (result != CUDA_SUCCESS) return state->Fail("sum: " + driver->Why(result));
    }
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return state->Fail(e.what());
  }
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
