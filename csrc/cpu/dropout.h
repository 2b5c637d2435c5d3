// Dropout as kernels take it: which elements it drops depends on (seed, row, column) only.
#pragma once

#include <cstdint>

namespace tf {

struct Dropout {
  bool on;  // false: nothing is dropped, and the rest is not read
  uint64_t seed;
  uint32_t limit;  // an element is kept iff its random word is at least this
  float scale;     // of what is kept
};

}  // namespace tf
