// Handlers of the custom calls, and what they share.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxmagma {

// "jaxmagma_cuda": a kernel specialised at run time.
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame);

// "jaxmagma_cuda_bgemm": a product of small matrices from the compiled family.
XLA_FFI_Error* InitializeBgemm(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteBgemm(XLA_FFI_CallFrame* frame);

}  // namespace jaxmagma
