#include "instances.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "sha256.h"
#include "specialise.h"

namespace jaxmagma {
namespace {

// So many instances of a kernel on a device are loaded before a launch waits, in stream order, for
// one that another stream is still using. Graphs have theirs beside these.
constexpr size_t kMostInstances = 16;

// Libraries and events of kernels that nobody has any more. A graph that is destroyed may drop the
// last of a kernel on a thread of the driver's, where nothing of CUDA may be called: so they wait
// for the next kernel that is loaded.
class Retired {
 public:
  void Add(std::unique_ptr<Instance> instance) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(instance));
  }

  void Unload(const Driver& driver) {
    std::vector<std::unique_ptr<Instance>> waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting.swap(waiting_);
    }
    for (const auto& instance : waiting) {
      if (instance->launched != nullptr) driver.event_destroy(instance->launched);
      if (instance->library != nullptr) driver.library_unload(instance->library);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Instance>> waiting_;
};

// Neither is destroyed: threads of the driver's may outlive other static objects.
Retired& TheRetired() {
  static auto* const retired = new Retired;
  return *retired;
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Instances>> known;
};

Registry& TheRegistry() {
  static auto* const registry = new Registry;
  return *registry;
}

// What a thread does meanwhile is not part of the graph that it records, and may load kernels.
class OutsideCapture {
 public:
  explicit OutsideCapture(const Driver& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
  }
  ~OutsideCapture() { driver_.exchange_capture_mode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Bytes to the memory of a device, where they are when this returns: a copy from memory that is not
// pinned may return sooner, and streams wait for no other stream.
CUresult Upload(const Driver& driver, CUdeviceptr to, const std::string& bytes) {
  CUstream stream = nullptr;
  CUresult result = driver.stream_create(&stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return result;
  result = driver.copy_to_device(to, bytes.data(), bytes.size(), stream);
  const CUresult done = driver.stream_synchronize(stream);
  driver.stream_destroy(stream);
  return result != CUDA_SUCCESS ? result : done;
}

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

}  // namespace

// ---- The pool --------------------------------------------------------------------------------

std::shared_ptr<Instances> Instances::Of(const Call& call) {
  std::string all;
  for (const std::string* part : {&call.source, &call.bank, &call.table}) {
    all += std::to_string(part->size()) + ":" + *part;
  }
  all += std::to_string(call.threads) + " " + std::to_string(call.shared_bytes);
  all += call.copies.empty() ? " shared" : " own";
  const std::string key = Sha256(all);

  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  for (auto at = registry.known.begin(); at != registry.known.end();) {
    at = at->second.expired() ? registry.known.erase(at) : std::next(at);
  }
  std::weak_ptr<Instances>& known = registry.known[key];
  std::shared_ptr<Instances> found = known.lock();
  if (found == nullptr) known = found = std::make_shared<Instances>(call);
  return found;
}

Instances::Instances(const Call& call)
    : source_(call.source),
      bank_(call.bank),
      table_(call.table),
      threads_(static_cast<int>(call.threads)),
      shared_bytes_(static_cast<int>(call.shared_bytes)),
      exclusive_(!call.copies.empty()),
      finishes_(!call.signature.sums.empty()),
      counts_(call.signature.resident || !call.signature.sums.empty()) {}

Instances::~Instances() {
  for (Device& device : devices_) {
    for (auto& instance : device.all) TheRetired().Add(std::move(instance));
  }
}

std::string Instances::Find(int ordinal, const Driver** driver, CUdevice* device) const {
  std::string why;
  *driver = GetDriver(&why);
  if (*driver == nullptr) return why;
  const CUresult result = CurrentDevice(**driver, ordinal, device);
  if (result != CUDA_SUCCESS) return (*driver)->Why(result);
  return *device < 0 || *device >= kMostDevices ? "too many devices" : "";
}

std::string Instances::Compile(int ordinal) {
  std::string why;
  const Driver* const driver = GetDriver(&why);
  int count = 0;
  if (driver == nullptr || driver->device_count(&count) != CUDA_SUCCESS || count < 1) return "";
  CUdevice device = 0;
  if (CurrentDevice(*driver, ordinal, &device) != CUDA_SUCCESS) return "";
  const std::string* code = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  return CodeFor(Capability(*driver, device), false, &code);
}

std::string Instances::Load(int ordinal) {
  const Driver* driver = nullptr;
  CUdevice device = 0;
  if (std::string error = Find(ordinal, &driver, &device); !error.empty()) return error;
  return LoadOn(*driver, device);
}

std::string Instances::LoadOn(const Driver& driver, CUdevice device) {
  Device& own = devices_[device];
  if (own.shared.load(std::memory_order_acquire) != nullptr) return "";

  const std::lock_guard<std::mutex> lock(mutex_);
  Collect(own);
  if (exclusive_ ? !own.free.empty() : own.shared.load() != nullptr) return "";
  Instance* loaded = nullptr;
  if (std::string error = LoadOne(driver, device, &loaded); !error.empty()) return error;
  if (exclusive_) {
    own.free.push_back(loaded);
  } else {
    own.shared.store(loaded, std::memory_order_release);
  }
  return "";
}

std::string Instances::Borrow(int ordinal, CUstream stream, Lease& lease) {
  const Driver* driver = nullptr;
  CUdevice device = 0;
  if (std::string error = Find(ordinal, &driver, &device); !error.empty()) return error;
  lease.driver_ = driver;
  Device& own = devices_[device];
  if (!exclusive_) {
    if (std::string error = LoadOn(*driver, device); !error.empty()) return error;
    lease.instance_ = own.shared.load(std::memory_order_acquire);
    return "";
  }

  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  CUresult result = driver->capture_info(stream, &status, nullptr, &graph, nullptr, nullptr);
  if (result != CUDA_SUCCESS) return driver->Why(result);
  const bool captured = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  Instance* taken = nullptr;
  if (std::string error = Take(*driver, device, stream, captured, &taken); !error.empty()) {
    return error;
  }
  lease.instance_ = taken;
  if (!captured) {
    lease.owner_ = shared_from_this();
    lease.device_ = device;
    lease.stream_ = stream;
    return "";
  }

  // The graph, and all that is made of it, owns the instance from now on.
  struct Owned {
    std::shared_ptr<Instances> owner;
    Instance* instance;
    int device;
  };
  const auto release = [](void* data) {
    const std::unique_ptr<Owned> owned(static_cast<Owned*>(data));
    owned->owner->GiveBack(owned->instance, owned->device);
  };
  auto* const owned = new Owned{shared_from_this(), taken, device};
  CUuserObject object = nullptr;
  result =
      driver->user_object_create(&object, owned, release, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  if (result != CUDA_SUCCESS) {
    release(owned);
    return driver->Why(result);
  }
  result = driver->graph_retain(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (result == CUDA_SUCCESS) return "";
  driver->user_object_release(object, 1);
  return driver->Why(result);
}

std::string Instances::Take(const Driver& driver, CUdevice device, CUstream stream, bool captured,
                            Instance** taken) {
  unsigned long long id = 0;
  if (!captured) {
    const CUresult result = driver.stream_id(stream, &id);
    if (result != CUDA_SUCCESS) return driver.Why(result);
  }
  Device& own = devices_[device];
  const OutsideCapture outside(driver);

  const std::lock_guard<std::mutex> lock(mutex_);
  Collect(own);
  // One whose launch is over, or comes before this one on the same stream. When a graph will launch
  // nobody knows.
  const auto found = std::find_if(own.free.begin(), own.free.end(), [&](const Instance* x) {
    return !x->used || (!captured && x->stream == id) ||
           driver.event_query(x->launched) == CUDA_SUCCESS;
  });
  if (found != own.free.end()) {
    *taken = *found;
    own.free.erase(found);
    return "";
  }
  if (captured || own.free.size() < kMostInstances) return LoadOne(driver, device, taken);
  *taken = own.free.front();
  own.free.erase(own.free.begin());
  const CUresult waits = driver.stream_wait(stream, (*taken)->launched, 0);
  if (waits == CUDA_SUCCESS) return "";
  own.free.push_back(*taken);
  return driver.Why(waits);
}

// What graphs gave back is free. The caller holds the mutex.
void Instances::Collect(Device& device) {
  const std::lock_guard<std::mutex> brief(device.returning);
  device.free.insert(device.free.end(), device.returned.begin(), device.returned.end());
  device.returned.clear();
}

void Instances::GiveBack(Instance* instance, int device) {
  instance->used = false;  // a graph is destroyed when none of its launches is under way
  const std::lock_guard<std::mutex> brief(devices_[device].returning);
  devices_[device].returned.push_back(instance);
}

Instances::Lease::~Lease() {
  if (owner_ != nullptr) owner_->End(*this);
}

void Instances::End(const Lease& lease) {
  Instance* const instance = lease.instance_;
  const CUresult result = lease.driver_->event_record(instance->launched, lease.stream_);
  if (result == CUDA_SUCCESS) {
    lease.driver_->stream_id(lease.stream_, &instance->stream);
    instance->used = true;
    const std::lock_guard<std::mutex> lock(mutex_);
    devices_[lease.device_].free.push_back(instance);
  }  // else nobody can know when it is free again
}

// ---- Loading ---------------------------------------------------------------------------------

// The machine code for a compute capability. The caller holds the mutex.
std::string Instances::CodeFor(int arch, bool rebuild, const std::string** code) {
  std::string& known = code_[arch];
  if (known.empty() || rebuild) {
    Compiled compiled = Specialise(source_, arch, rebuild);
    if (compiled.code.empty()) return "cannot be compiled: " + compiled.log;
    known = std::move(compiled.code);
  }
  *code = &known;
  return "";
}

// Loads another instance. The caller holds the mutex.
std::string Instances::LoadOne(const Driver& driver, CUdevice device, Instance** loaded) {
  TheRetired().Unload(driver);
  CUcontext context = nullptr;
  if (driver.context_current(&context) != CUDA_SUCCESS || context == nullptr) {
    CUresult result = driver.primary_context_retain(&context, device);
    if (result == CUDA_SUCCESS) result = driver.context_set_current(context);
    if (result != CUDA_SUCCESS) return driver.Why(result);
  }
  const int arch = Capability(driver, device);
  std::string error;
  // What the cache holds may be whole and yet not load, if it is another machine's: then it is
  // compiled anew. What has been loaded before stays as it is.
  for (const bool rebuild : {false, true}) {
    const std::string* code = nullptr;
    error = CodeFor(arch, rebuild, &code);
    if (!error.empty()) return error;
    auto fresh = std::make_unique<Instance>();
    error = LoadCode(driver, device, *code, *fresh);
    if (error.empty()) {
      *loaded = fresh.get();
      devices_[device].all.push_back(std::move(fresh));
      return "";
    }
    if (fresh->launched != nullptr) driver.event_destroy(fresh->launched);
    if (fresh->library != nullptr) driver.library_unload(fresh->library);
  }
  return error;
}

std::string Instances::LoadCode(const Driver& driver, CUdevice device, const std::string& code,
                                Instance& instance) const {
  std::string error;
  const auto check = [&](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS && error.empty()) {
      error = std::string(what) + ": " + driver.Why(result);
    }
    return result == CUDA_SUCCESS;
  };
  const auto function = [&](const char* symbol, CUfunction* found) {
    CUkernel kernel = nullptr;
    return check(driver.library_kernel(&kernel, instance.library, symbol), symbol) &&
           check(driver.kernel_function(found, kernel), symbol);
  };
  const auto fill = [&](const char* symbol, const std::string& bytes, CUdeviceptr* found) {
    size_t size = 0;
    if (bytes.empty()) return true;
    if (!check(driver.library_global(found, &size, instance.library, symbol), symbol)) return false;
    return check(size < bytes.size() ? CUDA_ERROR_INVALID_VALUE : Upload(driver, *found, bytes),
                 symbol);
  };
  if (!check(driver.library_load(&instance.library, code.data(), nullptr, nullptr, 0, nullptr,
                                 nullptr, 0),
             "cannot be loaded")) {
    instance.library = nullptr;
    return error;
  }
  CUdeviceptr table = 0;
  if (!function("kernel", &instance.kernel) ||
      (finishes_ && !function("finish", &instance.finish)) ||
      !fill("bank", bank_, &instance.bank) || !fill("table", table_, &table)) {
    return error;
  }
  // Beyond 48 KB it must be asked for, and what the kernel has of its own counts as well.
  if (shared_bytes_ > 0 &&
      !check(driver.function_set_attribute(
                 instance.kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes_),
             "this GPU has too little shared memory for a block")) {
    return error;
  }
  instance.most_blocks = std::numeric_limits<int64_t>::max();
  if (counts_) {
    int multiprocessors = 0, blocks = 0;
    driver.device_attribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    check(
        driver.most_blocks(&blocks, instance.kernel, threads_, static_cast<size_t>(shared_bytes_)),
        "occupancy");
    instance.most_blocks = std::max<int64_t>(1, int64_t{multiprocessors} * blocks);
  }
  if (exclusive_) {
    check(driver.event_create(&instance.launched, CU_EVENT_DISABLE_TIMING), "event");
  }
  return error;
}

}  // namespace jaxmagma
