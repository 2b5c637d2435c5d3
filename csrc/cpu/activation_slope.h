// Derivatives of the activations on vectors, for kernel files only.
#pragma once

#include "cpu/activation.h"

namespace tf::TF_ISA {
namespace {

// Far to the left the slopes vanish; there they are exactly 0, so that no gradient falls below the
// smallest normal number, where arithmetic is slow on some CPUs.
TF_INLINE Vec zero_below(float bound, Vec x, Vec slope) {
  return select(less(x, set1(bound)), zero(), slope);
}

// d(x Phi(x))/dx = Phi(x) + x phi(x); below -11 less than 1e-25.
TF_INLINE Vec gelu_slope(Vec x) {
  const Vec bounded = min(set1(12.0f), absolute(x));
  const Vec density = set1(0.3989422804014327f) * exp(set1(-0.5f) * bounded * bounded);
  return zero_below(-11.0f, x, fma(x, density, normal_cdf(x)));
}

// With s = sigmoid(2 u(x)): s + x s (1 - s) 2 u'(x); below -9 less than 1e-25.
TF_INLINE Vec gelu_tanh_slope(Vec x) {
  const Vec square = x * x;
  const Vec twice = set1(1.5957691216057308f) * fma(set1(0.044715f) * square, x, x);
  const Vec slope = set1(1.5957691216057308f) * fma(set1(0.134145f), square, set1(1.0f));
  const Vec s = sigmoid(twice);
  return zero_below(-9.0f, x, fma(x * slope, s * (set1(1.0f) - s), s));
}

// s + x s (1 - s); below -70 less than 1e-28.
TF_INLINE Vec silu_slope(Vec x) {
  const Vec s = sigmoid(x);
  return zero_below(-70.0f, x, fma(x, s * (set1(1.0f) - s), s));
}

// The gradient before the activation from that behind it; x is what the activation was applied to.
TF_INLINE Vec through_activation(Vec grad, Vec x, int activation) {
  switch (activation) {
    case kRelu:
      // NaN lets the gradient through, as it does in torch.
      return select(less(zero(), x), grad, select(not_a_number(x), grad, zero()));
    case kGelu:
      return grad * gelu_slope(x);
    case kGeluTanh:
      return grad * gelu_tanh_slope(x);
    case kSilu:
      return grad * silu_slope(x);
    default:
      return grad;
  }
}

}  // namespace
}  // namespace tf::TF_ISA
