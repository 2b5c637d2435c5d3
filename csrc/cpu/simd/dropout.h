// Dropout as kernels take it: which elements it drops depends on (seed, row, column) only.
#pragma once

#include <cstdint>

namespace tf {

struct Dropout {
  bool on;  // false: nothing is dropped, and the rest is not read
  uint64_t seed;
  uint32_t limit;  // an element is kept iff its random number of 16 bits is at least this
  float scale;     // of what is kept
};

// The limit for p in (0, 1): 2^16 p to the nearest, but neither all nor nothing is dropped.
inline uint32_t dropout_threshold(double p) {
  const auto nearest = static_cast<uint32_t>(p * 65536.0 + 0.5);
  return nearest < 1 ? 1 : nearest > 65535 ? 65535 : nearest;
}

}  // namespace tf
