// Activations on vectors, for kernel files only.
#pragma once

#include "cpu/vec.h"

namespace tf {
// Numbered as in transformer_fast/backends/cpu.py.
enum Activation : int { kIdentity = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };
}  // namespace tf

namespace tf::TF_ISA {
namespace {

// Far to the left activations and slopes vanish. There they are exactly 0: no number falls below
// the smallest normal one, where arithmetic is slow on some CPUs, and -inf becomes NaN where it
// does in torch.
TF_INLINE Vec zero_below(float bound, Vec x, Vec y) {
  return select(less(x, set1(bound)), zero(), y);
}

// 1 / (1 + e^-x)
TF_INLINE Vec sigmoid(Vec x) {
  // min's order lets NaN through; e^-87 is a normal number.
  const Vec e = exp(min(set1(87.0f), zero() - x));
  return zero_below(-87.0f, x, set1(1.0f) / (set1(1.0f) + e));
}

// tanh(x) = 2 sigmoid(2x) - 1
TF_INLINE Vec tanh(Vec x) { return fma(set1(2.0f), sigmoid(x + x), set1(-1.0f)); }

TF_INLINE Vec absolute(Vec x) { return max(x, zero() - x); }

// Phi(x) = (1 + erf(x / sqrt 2)) / 2, by erfc(z) = t P(t) e^(-z^2), t = 1 / (1 + p z), z >= 0
// (Abramowitz and Stegun 7.1.26; absolute error below 1.5e-7, here halved). For the tail on the
// negative side this is the small number itself, not a difference of two large ones.
TF_INLINE Vec normal_cdf(Vec x) {
  const Vec z = absolute(x) * set1(0.70710678118654752f);
  const Vec t = set1(1.0f) / fma(set1(0.3275911f), z, set1(1.0f));
  Vec p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  // Beyond 9 the tail falls below the smallest normal number.
  const Vec bounded = min(set1(9.0f), z);
  const Vec tail = set1(0.5f) * p * t * exp(zero() - bounded * bounded);
  return select(less(x, zero()), zero_below(-12.7f, x, tail), set1(1.0f) - tail);
}

TF_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return x * sigmoid(inner + inner);
}

TF_INLINE Vec activate(Vec x, int activation) {
  switch (activation) {
    case kRelu:
      return max(zero(), x);
    case kGelu:
      return x * normal_cdf(x);
    case kGeluTanh:
      return gelu_tanh(x);
    case kSilu:
      return x * sigmoid(x);
    default:
      return x;
  }
}

// In place over rows of a block whose columns are filled up to whole vectors.
TF_INLINE void activate_rows(float* c, long stride, long rows, long columns, int activation) {
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < columns; j += kLanes)
      store(c + i * stride + j, activate(load(c + i * stride + j), activation));
}

}  // namespace
}  // namespace tf::TF_ISA
