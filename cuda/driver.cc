#include "driver.h"

#include <dlfcn.h>

namespace jaxmagma {
namespace {

struct Loaded {
  Driver driver = {};
  std::string error;
};

Loaded Load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.error = "no CUDA driver: libcuda.so.1 cannot be loaded";
    return loaded;
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && loaded.error.empty()) {
      loaded.error = std::string("the CUDA driver is too old: it has no ") + name;
    }
  };
// cuda.h maps names to versioned ones by macros, which have to be expanded before they are quoted.
#define JAXMAGMA_QUOTE(name) #name
#define JAXMAGMA_FIND(member, function) find(loaded.driver.member, JAXMAGMA_QUOTE(function))
  JAXMAGMA_FIND(init, cuInit);
  JAXMAGMA_FIND(error_string, cuGetErrorString);
  JAXMAGMA_FIND(device_get, cuDeviceGet);
  JAXMAGMA_FIND(device_count, cuDeviceGetCount);
  JAXMAGMA_FIND(device_attribute, cuDeviceGetAttribute);
  JAXMAGMA_FIND(primary_context_retain, cuDevicePrimaryCtxRetain);
  JAXMAGMA_FIND(context_current, cuCtxGetCurrent);
  JAXMAGMA_FIND(context_set_current, cuCtxSetCurrent);
  JAXMAGMA_FIND(context_device, cuCtxGetDevice);
  JAXMAGMA_FIND(library_load, cuLibraryLoadData);
  JAXMAGMA_FIND(library_unload, cuLibraryUnload);
  JAXMAGMA_FIND(library_kernel, cuLibraryGetKernel);
  JAXMAGMA_FIND(library_global, cuLibraryGetGlobal);
  JAXMAGMA_FIND(kernel_function, cuKernelGetFunction);
  JAXMAGMA_FIND(function_set_attribute, cuFuncSetAttribute);
  JAXMAGMA_FIND(copy_to_device, cuMemcpyHtoDAsync);
  JAXMAGMA_FIND(copy_on_device, cuMemcpyDtoDAsync);
  JAXMAGMA_FIND(most_blocks, cuOccupancyMaxActiveBlocksPerMultiprocessor);
  JAXMAGMA_FIND(launch, cuLaunchKernel);
  JAXMAGMA_FIND(stream_create, cuStreamCreate);
  JAXMAGMA_FIND(stream_destroy, cuStreamDestroy);
  JAXMAGMA_FIND(stream_synchronize, cuStreamSynchronize);
  JAXMAGMA_FIND(stream_id, cuStreamGetId);
  JAXMAGMA_FIND(stream_wait, cuStreamWaitEvent);
  JAXMAGMA_FIND(event_create, cuEventCreate);
  JAXMAGMA_FIND(event_destroy, cuEventDestroy);
  JAXMAGMA_FIND(event_record, cuEventRecord);
  JAXMAGMA_FIND(event_query, cuEventQuery);
  JAXMAGMA_FIND(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);
  JAXMAGMA_FIND(user_object_create, cuUserObjectCreate);
  JAXMAGMA_FIND(user_object_release, cuUserObjectRelease);
  JAXMAGMA_FIND(graph_retain, cuGraphRetainUserObject);
  find(loaded.driver.capture_info, "cuStreamGetCaptureInfo_v2");
#undef JAXMAGMA_FIND
#undef JAXMAGMA_QUOTE
  if (loaded.error.empty()) {
    const CUresult result = loaded.driver.init(0);
    if (result != CUDA_SUCCESS) loaded.error = "cuInit: " + loaded.driver.Why(result);
  }
  return loaded;
}

}  // namespace

std::string Driver::Why(CUresult result) const {
  const char* text = nullptr;
  if (error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  return std::string(text) + " (" + std::to_string(static_cast<int>(result)) + ")";
}

const Driver* GetDriver(std::string* why) {
  static const Loaded* const loaded = new Loaded(Load());
  if (loaded->error.empty()) return &loaded->driver;
  *why = loaded->error;
  return nullptr;
}

}  // namespace jaxmagma
