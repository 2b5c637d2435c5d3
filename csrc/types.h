// Types of the kernels' arguments: elements of tensors, activations, dropout.
#pragma once

#include <cstdint>

namespace tf {

// Sizes, strides and offsets of kernels, in elements unless the name says bytes. `long` has 32 bits
// under Windows.
using Index = int64_t;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum class Element { boolean, float32, bfloat16, float16 };

constexpr Index element_bytes(Element element) {
  return element == Element::boolean ? 1 : element == Element::float32 ? 4 : 2;
}

// Numbered as in transformer_fast/ops/linear.py.
enum Activation : int { kIdentity = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };
// Flag beside an activation: computed with a relative error of 2e-4, which is small compared to the
// rounding of results to bfloat16 or to 8 bits.
constexpr int kCoarse = 8;
inline int coarse(int activation) { return activation > kRelu ? kCoarse | activation : activation; }

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

// p in (0, 1).
inline Dropout dropout_of(double p, int64_t seed) {
  return {true, static_cast<uint64_t>(seed), dropout_threshold(p),
          static_cast<float>(1.0 / (1.0 - p))};
}

// Rows of a block of bfloat16 or 8-bit operands, at most.
constexpr Index kMostRows = 256;

}  // namespace tf
