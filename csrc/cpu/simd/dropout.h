// Dropout parameters of the kernels: whether an element is dropped depends on (seed, row, column)
// only.
#pragma once

#include <cstdint>

namespace tf {

struct Dropout {
  bool on;  // false: no dropout, the other members are unused
  uint64_t seed;
  uint32_t limit;  // an element is kept iff its 16-bit random number is >= limit
  float scale;     // of the kept elements
};

// The limit for p in (0, 1): 2^16 p rounded to nearest, but never all or nothing.
inline uint32_t dropout_threshold(double p) {
  const auto nearest = static_cast<uint32_t>(p * 65536.0 + 0.5);
  return nearest < 1 ? 1 : nearest > 65535 ? 65535 : nearest;
}

}  // namespace tf
