// Types of the kernels' arguments: elements of tensors, dropout.
#pragma once

#include <cstdint>

namespace tf {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum class Element { boolean, float32, bfloat16, float16 };

constexpr long element_bytes(Element element) {
  return element == Element::boolean ? 1 : element == Element::float32 ? 4 : 2;
}

// Whether an element is dropped depends on (seed, row, column) only.
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
