// Derivatives of the activations on vectors, for kernel files only.
#pragma once

#include "cpu/activation.h"

namespace tf::TF_ISA {
namespace {

// d(x Phi(x))/dx = Phi(x) + x phi(x)
TF_INLINE Vec gelu_slope(Vec x) {
  const Vec density = set1(0.3989422804014327f) * exp(set1(-0.5f) * x * x);
  return fma(x, density, normal_cdf(x));
}

// With s = sigmoid(2 u(x)): s + x s (1 - s) 2 u'(x)
TF_INLINE Vec gelu_tanh_slope(Vec x) {
  const Vec square = x * x;
  const Vec twice = set1(1.5957691216057308f) * fma(set1(0.044715f) * square, x, x);
  const Vec slope = set1(1.5957691216057308f) * fma(set1(0.134145f), square, set1(1.0f));
  const Vec s = sigmoid(twice);
  return fma(x * slope, s * (set1(1.0f) - s), s);
}

TF_INLINE Vec silu_slope(Vec x) {
  const Vec s = sigmoid(x);
  return fma(x, s * (set1(1.0f) - s), s);
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
