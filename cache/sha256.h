// SHA-256 (FIPS 180-4), for the names and checksums of cached kernels.
#pragma once

#include <string>
#include <string_view>

namespace jaxmagma {

// The hash in 64 hexadecimal digits.
std::string Sha256(std::string_view data);

}  // namespace jaxmagma
