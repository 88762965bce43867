// The custom call "jaxmagma_cuda_bgemm": one product of small square matrices for each element.

#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "bgemm.h"
#include "complex.cuh"
#include "ffi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmagma {
namespace {

ffi::Error Fail(const std::string& what) {
  return ffi::Error::Internal("jaxmagma_cuda_bgemm: " + what);
}

const Bgemm* Find(ffi::DataType type, int64_t size) {
  if (size < 1 || size > kMostBgemm) return nullptr;
  switch (type) {
    case ffi::F32:
      return &GetBgemm<float>(static_cast<int>(size));
    case ffi::F64:
      return &GetBgemm<double>(static_cast<int>(size));
    case ffi::C64:
      return &GetBgemm<Complex<float>>(static_cast<int>(size));
    case ffi::C128:
      return &GetBgemm<Complex<double>>(static_cast<int>(size));
    default:
      return nullptr;
  }
}

// Loads the kernel and lets it have its shared memory, neither of which may happen while a CUDA
// graph is recorded.
ffi::Error DoInitialize(ffi::AnyBuffer a, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t size,
                        int64_t) {
  const Bgemm* bgemm = Find(a.element_type(), size);
  if (bgemm == nullptr) return Fail("no kernel for matrices of size " + std::to_string(size));
  const cudaError_t result = cudaFuncSetAttribute(
      bgemm->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bgemm->bytes);
  return result == cudaSuccess ? ffi::Error::Success() : Fail(cudaGetErrorString(result));
}

// `transposed` has a bit for each of a, b and c.
ffi::Error DoExecute(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b,
                     ffi::Result<ffi::AnyBuffer> c, int64_t size, int64_t transposed) {
  try {
    const Bgemm* bgemm = Find(a.element_type(), size);
    if (bgemm == nullptr) return Fail("no kernel for matrices of size " + std::to_string(size));
    if (b.element_type() != a.element_type() || c->element_type() != a.element_type()) {
      return Fail("operands and result have different dtypes");
    }
    if (transposed < 0 || transposed > 7) return Fail("an attribute is out of range");
    const auto values = static_cast<int64_t>(a.element_count());
    if (values % (size * size) != 0 || b.element_count() != a.element_count() ||
        c->element_count() != a.element_count()) {
      return Fail("operands and result have different numbers of matrices");
    }
    long long count = values / (size * size);
    if (count == 0) return ffi::Error::Success();
    const long long blocks = (count + bgemm->elements - 1) / bgemm->elements;
    if (blocks > std::numeric_limits<int32_t>::max()) return Fail("too many elements");
    const void* left = a.untyped_data();
    const void* right = b.untyped_data();
    void* product = c->untyped_data();
    Transposed flags = {(transposed & 1) != 0, (transposed & 2) != 0};
    if ((transposed & 4) != 0) {  // C^T = op(B)^T op(A)^T
      std::swap(left, right);
      flags = {!flags.b, !flags.a};
    }
    void* parameters[] = {&left, &right, &product, &count, &flags};
    const cudaError_t result =
        cudaLaunchKernel(bgemm->kernel, dim3(static_cast<unsigned>(blocks)), dim3(bgemm->threads),
                         parameters, bgemm->bytes, stream);
    return result == cudaSuccess ? ffi::Error::Success() : Fail(cudaGetErrorString(result));
  } catch (const std::exception& e) {
    return Fail(e.what());
  } catch (...) {
    return Fail("an unknown exception");
  }
}

}  // namespace

XLA_FFI_Error* InitializeBgemm(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<int64_t>("size")
                                   .Attr<int64_t>("transposed")
                                   .To(DoInitialize)
                                   .release();
  return handler->Call(frame);
}

XLA_FFI_Error* ExecuteBgemm(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind<ffi::ExecutionStage::kExecute>()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<int64_t>("size")
                                   .Attr<int64_t>("transposed")
                                   .To(DoExecute, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

}  // namespace jaxmagma
