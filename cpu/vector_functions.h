// The functions of whole vectors in glibc's libmvec, where it is found at run time.
//
// Plain data, which every instruction set may share.
#pragma once

namespace jaxmagma {

// The address of libm's function `name` for `operands` vectors of `lanes` values each. `isa` is a
// letter of the vector function ABI: b for SSE, d for AVX2, e for AVX-512, n for NEON. Null where
// there is none: other C libraries have no libmvec, and that of glibc before 2.35 (on x86) and 2.40
// (on aarch64) has few functions.
void* FindVectorFunction(char isa, int lanes, int operands, const char* name) noexcept;

}  // namespace jaxmagma
