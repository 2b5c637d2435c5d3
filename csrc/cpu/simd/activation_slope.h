// Derivatives of the activations on vectors, for kernel files only.
#pragma once

#include "cpu/simd/activation.h"

namespace tf::TF_ISA {
namespace {

// An activation's value at x, and its slope there.
struct Activated {
  Vec value, slope;
};

// d(x Phi(x))/dx = Phi(x) + x phi(x); below -11 less than 1e-25.
TF_INLINE Activated gelu_with_slope(Vec x) {
  const Normal normal(x);
  // phi is that of a bounded x, which far to the right must not grow with it.
  const Vec product = min(set1(12.75f), x) * normal.density;
  return {x * normal.integral, zero_below(-11.0f, x, normal.integral + product)};
}

// With s = sigmoid(2 u(x)): s + x s (1 - s) 2 u'(x); below -9 less than 1e-25.
TF_INLINE Activated gelu_tanh_with_slope(Vec x) {
  const Sigmoid s = gelu_tanh_sigmoid(x);
  // Far to the right 1 - s is not quite 0, which must not grow with x.
  const Vec near = min(set1(10.0f), x);
  const Vec slope = set1(1.5957691216057308f) * fma(set1(0.134145f) * near, near, set1(1.0f));
  return {x * s.value, zero_below(-9.0f, x, fma(near * slope, s.slope, s.value))};
}

// s + x s (1 - s); below -70 less than 1e-28.
TF_INLINE Activated silu_with_slope(Vec x) {
  const Sigmoid s(x);
  return {x * s.value, zero_below(-70.0f, x, fma(min(set1(88.0f), x), s.slope, s.value))};
}

// The gradient before the activation from that behind it. x is what the activation was applied to,
// and becomes what it made of that: the two share most of their work.
TF_INLINE Vec activation_backward(Vec grad, Vec& x, int activation) {
  const auto through = [&](const Activated& made) __attribute__((always_inline)) {
    x = made.value;
    return grad * made.slope;
  };
  switch (activation) {
    case kRelu: {
      // NaN lets the gradient through, as it does in torch.
      const Vec passed = select(less(zero(), x), grad, select(is_nan(x), grad, zero()));
      x = max(zero(), x);
      return passed;
    }
    case kGelu:
      return through(gelu_with_slope(x));
    case kGeluTanh:
      return through(gelu_tanh_with_slope(x));
    case kSilu:
      return through(silu_with_slope(x));
    default:
      return grad;
  }
}

}  // namespace
}  // namespace tf::TF_ISA
