#include "sha256.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace jaxmagma {
namespace {

struct Tables {
  uint32_t start[8];
  uint32_t round[64];
};

// The first 32 bits of the fractional parts of the square (cube) roots of the first primes.
Tables MakeTables() {
  Tables tables;
  auto fraction = [](long double root) {
    return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
  };
  int found = 0;
  for (int n = 2; found < 64; ++n) {
    bool prime = true;
    for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    if (found < 8) tables.start[found] = fraction(std::sqrt(static_cast<long double>(n)));
    tables.round[found++] = fraction(std::cbrt(static_cast<long double>(n)));
  }
  return tables;
}

uint32_t Rotate(uint32_t x, int by) {
  return x >> by | x << (32 - by);
}

void Mix(const Tables& tables, const uint8_t* block, uint32_t* state) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
           uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (Rotate(a, 7) ^ Rotate(a, 18) ^ a >> 3) + w[i - 7] +
           (Rotate(b, 17) ^ Rotate(b, 19) ^ b >> 10);
  }
  uint32_t s[8];
  for (int i = 0; i < 8; ++i) s[i] = state[i];
  for (int i = 0; i < 64; ++i) {
    const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    const uint32_t one = s[7] + (Rotate(s[4], 6) ^ Rotate(s[4], 11) ^ Rotate(s[4], 25)) + choice +
                         tables.round[i] + w[i];
    const uint32_t two = (Rotate(s[0], 2) ^ Rotate(s[0], 13) ^ Rotate(s[0], 22)) + majority;
    for (int j = 7; j > 0; --j) s[j] = s[j - 1];
    s[4] += one;
    s[0] = one + two;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

}  // namespace

std::string Sha256(std::string_view data) {
  static const Tables tables = MakeTables();
  uint32_t state[8];
  for (int i = 0; i < 8; ++i) state[i] = tables.start[i];
  std::vector<uint8_t> bytes(data.begin(), data.end());
  bytes.push_back(0x80);
  while (bytes.size() % 64 != 56) bytes.push_back(0);
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(bits >> shift));
  for (size_t at = 0; at < bytes.size(); at += 64) Mix(tables, bytes.data() + at, state);
  std::string digits;
  for (uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  }
  return digits;
}

}  // namespace jaxmagma
