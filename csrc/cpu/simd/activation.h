// Activations and their derivatives on vectors, for kernel files only.
#pragma once

#include "cpu/simd/exp2.h"
#include "types.h"

namespace tf::TF_ISA {
namespace {

// For large negative x activations and their derivatives vanish and are set to exactly 0: denormal
// numbers, slow on some CPUs, never occur, and -inf gives NaN where it does in torch.
TF_INLINE Vec zero_below(float bound, Vec x, Vec y) {
  return select(less(x, set1(bound)), zero(), y);
}

// s(x) = 1 / (1 + e^-x) and its derivative s (1 - s), computed without the cancellation in 1 - s.
struct Sigmoid {
  Vec value, slope;

  TF_INLINE explicit Sigmoid(Vec x) {
    // This operand order propagates NaN; e^-87 is a normal number.
    const Vec e = exp(min(set1(87.0f), zero() - x));
    const Vec s = set1(1.0f) / (set1(1.0f) + e);
    value = zero_below(-87.0f, x, s);
    slope = e * s * s;
  }
};

TF_INLINE Vec absolute(Vec x) { return max(x, zero() - x); }

// With e = e^-2|x|: (1 - e) / (1 + e), without the cancellation near 0, and where e is small
// 1 - 2 e / (1 + e), whose error is the last rounding's. NaN stays NaN.
TF_INLINE Vec tanh(Vec x) {
  const Vec power = set1(-2.0f) * absolute(x), e = exp(power);
  const Mask large = less(e, set1(0.25f));
  const Vec q = select(large, e + e, zero() - expm1(power)) / (set1(1.0f) + e);
  const Vec y = select(large, set1(1.0f) - q, q);
  return select(less(x, zero()), zero() - y, y);
}

// The normal distribution: phi(x) = e^(-x^2 / 2) / sqrt(2 pi) and its integral Phi(x). With u =
// |x|, Phi(-u) = e^(-u^2 / 2) t P(t), t = 1 / (1 + 0.375 u / sqrt 2), P a minimax polynomial for u
// < 13 (relative error 1.2e-8). So the tail on the negative side is the small number itself, not a
// difference of two large ones. Below -12.7, where it is less than 3e-37, it is 0.
struct Normal {
  Vec density, integral;

  TF_INLINE explicit Normal(Vec x) {
    const Vec bounded = min(set1(12.75f), absolute(x));
    const Vec square = bounded * bounded;
    // Corrects for the rounding error r of the square: e^(-r / 2) is 1 - r / 2.
    const Vec rest = fma(bounded, bounded, zero() - square);
    const Vec power = exp(set1(-0.5f) * square);
    const Vec e = fma(power, set1(-0.5f) * rest, power);
    const Vec t = set1(1.0f) / fma(set1(0.26516504294495535f), bounded, set1(1.0f));
    Vec p = set1(0.0308480637f);
    p = fma(p, t, set1(-0.144036517f));
    p = fma(p, t, set1(0.216944479f));
    p = fma(p, t, set1(-0.115535451f));
    p = fma(p, t, set1(0.137420136f));
    p = fma(p, t, set1(0.0605203167f));
    p = fma(p, t, set1(0.102714991f));
    p = fma(p, t, set1(0.105316782f));
    p = fma(p, t, set1(0.105807206f));
    const Vec tail = p * t * e;
    integral = select(less(x, zero()), zero_below(-12.7f, x, tail), set1(1.0f) - tail);
    density = set1(0.3989422804014327f) * e;
  }
};

// The factor of x in GELU's tanh approximation is sigmoid(2 u(x)). Returns 2 u(x).
TF_INLINE Vec gelu_tanh_inner(Vec x) {
  const Vec inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return inner + inner;
}
TF_INLINE Sigmoid gelu_tanh_sigmoid(Vec x) { return Sigmoid(gelu_tanh_inner(x)); }

// 1 / x with a relative error of at most 6e-5.
TF_INLINE Vec coarse_reciprocal(Vec x) {
#if defined(__AVX512F__)
  return _mm512_rcp14_ps(x);
#else
  return set1(1.0f) / x;
#endif
}

// Sigmoid with a relative error of 2e-4: a shorter polynomial for e^x. The bound 125.5, a little
// less than 87 log2 e, keeps the powers of 2 normal.
TF_INLINE Vec coarse_sigmoid(Vec x) {
  const Vec power = max(set1(-125.5f), min(set1(125.5f), set1(-1.44269504089f) * x));
  return zero_below(-87.0f, x, coarse_reciprocal(set1(1.0f) + exp2(power, BFloat16{})));
}

// max(x, 0), but NaN for -inf, where torch multiplies it by 0.
TF_INLINE Vec positive_part(Vec x) {
#if defined(__AVX512F__)
  // A class of x per digit, from the right: quiet and signalling NaN, 0, 1, -inf, inf, negative,
  // positive; 1 is x, 2 a NaN's own bits, 3 NaN, 8 zero.
  return _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x18131822), 0);
#else
  return fma(zero(), min(x, zero()), max(zero(), x));
#endif
}

// x Phi(x) with a relative error of 2.1e-4 from -12.75 on; below, it is -2e-36. With u = |x|,
// Phi(-u) is 2 to the power of a minimax polynomial in u.
TF_INLINE Vec coarse_gelu(Vec x) {
  const Vec u = min(set1(12.75f), absolute(x));
  constexpr float c[] = {-1.0001483f,     -1.14943612f,     -0.462053418f,
                         -0.0513061285f,  7.58870365e-03f,  -7.74772256e-04f,
                         5.06694814e-05f, -1.89211653e-06f, 3.05125916e-08f};
  return positive_part(x) - u * exp2(polynomial<8>(c, u), BFloat16{});
}

TF_INLINE Vec activate(Vec x, int activation) {
  switch (activation) {
    case kRelu:
      return max(zero(), x);
    case kGelu:
      return x * Normal(x).integral;
    case kGeluTanh:
      return x * gelu_tanh_sigmoid(x).value;
    case kSilu:
      return x * Sigmoid(x).value;
    case kCoarse | kGelu:
      return coarse_gelu(x);
    case kCoarse | kGeluTanh:
      return x * coarse_sigmoid(gelu_tanh_inner(x));
    case kCoarse | kSilu:
      return x * coarse_sigmoid(x);
    default:
      return x;
  }
}

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
