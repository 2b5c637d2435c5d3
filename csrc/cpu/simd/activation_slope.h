// Derivatives of the activations on vectors, for kernel files only.
#pragma once

#include "cpu/simd/activation.h"

namespace tf::TF_ISA {
namespace {

// Value and derivative of an activation.
struct Activated {
  Vec value, slope;
};

// d(x Phi(x))/dx = Phi(x) + x phi(x); below -11 less than 1e-25.
TF_INLINE Activated gelu_with_slope(Vec x) {
  const Normal normal(x);
  // phi was evaluated at a bounded x, so the product must not grow with x.
  const Vec product = min(set1(12.75f), x) * normal.density;
  return {x * normal.integral, zero_below(-11.0f, x, normal.integral + product)};
}

// With s = sigmoid(2 u(x)): s + x s (1 - s) 2 u'(x); below -9 less than 1e-25.
TF_INLINE Activated gelu_tanh_with_slope(Vec x) {
  const Sigmoid s = gelu_tanh_sigmoid(x);
  // For large x, 1 - s is not exactly 0, so its factor must not grow with x.
  const Vec near = min(set1(10.0f), x);
  const Vec slope = set1(1.5957691216057308f) * fma(set1(0.134145f) * near, near, set1(1.0f));
  return {x * s.value, zero_below(-9.0f, x, fma(near * slope, s.slope, s.value))};
}

// s + x s (1 - s); below -70 less than 1e-28.
TF_INLINE Activated silu_with_slope(Vec x) {
  const Sigmoid s(x);
  return {x * s.value, zero_below(-70.0f, x, fma(min(set1(88.0f), x), s.slope, s.value))};
}

// Gradient with respect to the input of the activation, from that of its output. Replaces x, the
// input, by the output: the two share most of their work.
TF_INLINE Vec activation_backward(Vec grad, Vec& x, int activation) {
  const auto through = [&](const Activated& made) __attribute__((always_inline)) {
    x = made.value;
    return grad * made.slope;
  };
  switch (activation) {
    case kRelu: {
      // NaN passes the gradient on, as in torch.
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
