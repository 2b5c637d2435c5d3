// One row of scores into probabilities for half types. For kernel files only.
#pragma once

#include "cpu/gemm.h"

namespace tf::TF_ISA {
namespace {

constexpr float kLog2E = 1.44269504089f, kLn2 = 0.69314718056f;
// 2^x stops here, lest results become denormal.
constexpr float kLeastPower = -126.0f;

// 2^x for x <= 126, relative error below 3e-6, which is nothing beside the rounding of a half type;
// NaN stays NaN.
TF_INLINE Vec power_of_two(Vec x) {
  x = max(set1(kLeastPower), x);  // in this order NaN comes through
  const Vec n = round(x), f = x - n;
  Vec p = set1(9.5701019611e-03f);
  p = fma(p, f, set1(5.5917860698e-02f));
  p = fma(p, f, set1(2.4024744830e-01f));
  p = fma(p, f, set1(6.9312181469e-01f));
  p = fma(p, f, set1(9.9999926144e-01f));
  return scale_by_power(p, n);
}

// The largest of `count` scores, a multiple of kPanel of them; NaN is passed over.
TF_INLINE float highest(const float* scores, long count) {
  Vec best[2] = {set1(-kInf), set1(-kInf)};
  for (long j = 0; j < count; j += kPanel) {
    best[0] = max(load(scores + j), best[0]);
    best[1] = max(load(scores + j + kLanes), best[1]);
  }
  return reduce_max(max(best[0], best[1]));
}

// Calls put(j, low, high) with 2^(scores * factor - peak) for each kPanel of them, 0 for scores of
// -inf; returns the sum.
template <class Put>
TF_INLINE float each_power(const float* scores, long count, float factor, float peak,
                           bool any_hidden, const Put& put) {
  const Vec times = set1(factor), minus = set1(peak == -kInf ? 0.0f : -peak);
  Vec sum[2] = {zero(), zero()};
  if (any_hidden || peak == -kInf) {
    for (long j = 0; j < count; j += kPanel) {
      Vec e[2];
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        const Vec x = load(scores + j + u * kLanes);
        e[u] = select(equal(x, set1(-kInf)), zero(), power_of_two(fma(x, times, minus)));
        sum[u] = sum[u] + e[u];
      }
      put(j, e[0], e[1]);
    }
  } else {
    for (long j = 0; j < count; j += kPanel) {
      Vec e[2];
      TF_UNROLL for (int u = 0; u < 2; ++u) {
        e[u] = power_of_two(fma(load(scores + j + u * kLanes), times, minus));
        sum[u] = sum[u] + e[u];
      }
      put(j, e[0], e[1]);
    }
  }
  return reduce_add(sum[0] + sum[1]);
}

}  // namespace
}  // namespace tf::TF_ISA
