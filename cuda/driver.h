// The CUDA driver, found at run time: nothing here is linked, so that the module can be imported
// where there is no driver.
#pragma once

#include <cuda.h>

#include <string>

namespace jaxmagma {

struct Driver {
  decltype(&::cuInit) init;
  decltype(&::cuGetErrorString) error_string;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetCount) device_count;
  decltype(&::cuDeviceGetAttribute) device_attribute;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&::cuCtxGetCurrent) context_current;
  decltype(&::cuCtxSetCurrent) context_set_current;
  decltype(&::cuCtxGetDevice) context_device;
  decltype(&::cuLibraryLoadData) library_load;
  decltype(&::cuLibraryUnload) library_unload;
  decltype(&::cuLibraryGetKernel) library_kernel;
  decltype(&::cuLibraryGetGlobal) library_global;
  decltype(&::cuKernelGetFunction) kernel_function;
  decltype(&::cuFuncSetAttribute) function_set_attribute;
  decltype(&::cuMemcpyHtoDAsync) copy_to_device;
  decltype(&::cuMemcpyDtoDAsync) copy_on_device;
  decltype(&::cuOccupancyMaxActiveBlocksPerMultiprocessor) most_blocks;
  decltype(&::cuLaunchKernel) launch;
  decltype(&::cuStreamCreate) stream_create;
  decltype(&::cuStreamDestroy) stream_destroy;
  decltype(&::cuStreamSynchronize) stream_synchronize;
  decltype(&::cuStreamGetId) stream_id;
  decltype(&::cuStreamWaitEvent) stream_wait;
  decltype(&::cuEventCreate) event_create;
  decltype(&::cuEventDestroy) event_destroy;
  decltype(&::cuEventRecord) event_record;
  decltype(&::cuEventQuery) event_query;
  decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&::cuUserObjectCreate) user_object_create;
  decltype(&::cuUserObjectRelease) user_object_release;
  decltype(&::cuGraphRetainUserObject) graph_retain;
  // The form that every supported toolkit and driver has.
  CUresult (*capture_info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                           const CUgraphNode**, size_t*);

  std::string Why(CUresult result) const;
};

// The driver, initialised; null where there is none, and then `why` says so.
const Driver* GetDriver(std::string* why);

}  // namespace jaxmagma
