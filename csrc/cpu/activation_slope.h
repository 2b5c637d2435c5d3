// Derivatives of the activations on vectors, for kernel files only.
#pragma once

#include "cpu/activation.h"
#include "cpu/half.h"

namespace tf::TF_ISA {
namespace {

// s = sigmoid(x) and its slope s (1 - s), where 1 - s would lose its digits to cancellation.
struct Sigmoid {
  Vec value, slope;

  TF_INLINE explicit Sigmoid(Vec x) {
    const Vec e = exp(min(set1(87.0f), zero() - x));
    value = set1(1.0f) / (set1(1.0f) + e);
    slope = e * value * value;
  }
};

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
  const Sigmoid s(twice);
  return zero_below(-9.0f, x, fma(x * slope, s.slope, s.value));
}

// s + x s (1 - s); below -70 less than 1e-28.
TF_INLINE Vec silu_slope(Vec x) {
  const Sigmoid s(x);
  return zero_below(-70.0f, x, fma(x, s.slope, s.value));
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

// to[i][j] = grad[i][j] * act'(z[i][j]) for i from begin to end and j < n; z and to are contiguous.
template <class T>
void slope_rows(const T* grad, long grad_stride, const T* z, T* to, long n, int activation,
                long begin, long end) {
  for (long i = begin; i < end; ++i) {
    const T* from = grad + i * grad_stride;
    const long row = i * n;
    for (long j = 0; j < n; j += kLanes)
      store_some(
          to + row + j,
          through_activation(load_some(from + j, n - j), load_some(z + row + j, n - j), activation),
          n - j);
  }
}

}  // namespace
}  // namespace tf::TF_ISA
