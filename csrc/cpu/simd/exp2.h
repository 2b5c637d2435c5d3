// 2^x for softmax, with the accuracy that each element type needs. For kernel files only.
#pragma once

#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

constexpr float kLog2E = 1.44269504089f;

// Exponent of 2 of e^(score + shift); exactly 0 where score = -shift.
TF_INLINE Vec exponent(Vec score, Vec shift) { return (score + shift) * set1(kLog2E); }

// c[0] + c[1] f + ...
template <int kDegree>
TF_INLINE Vec polynomial(const float (&c)[kDegree + 1], Vec f) {
  Vec p = set1(c[kDegree]);
  TF_UNROLL for (int i = kDegree - 1; i >= 0; --i) p = fma(p, f, set1(c[i]));
  return p;
}

// 2^x; 0 for -inf, NaN for NaN. The relative error, 8e-5 for bfloat16 and 3e-6 for float16, is
// small compared to the rounding of the type. Minimax polynomials for 2^f.
#if defined(__AVX512F__)

// f in [0, 1): scalef itself takes the floor of x. Denormal results would cost a hundred times as
// much without flush_denormals().
template <int kDegree>
TF_INLINE Vec exp2(Vec x, const float (&c)[kDegree + 1]) {
  return _mm512_scalef_ps(polynomial<kDegree>(c, _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | 8)),
                          x);
}
TF_INLINE Vec exp2(Vec x, BFloat16) {
  constexpr float c[] = {9.9992521901e-01f, 6.9583353789e-01f, 2.2606715784e-01f,
                         7.8024523144e-02f};
  return exp2<3>(x, c);
}
// Relative error 1.5e-7, exact at 0; the rounding of x itself dominates where |x| is large.
TF_INLINE Vec exp2(Vec x, float) {
  constexpr float c[] = {1.0f,
                         6.9315131182e-01f,
                         2.4016445004e-01f,
                         5.5799913425e-02f,
                         9.0170299625e-03f,
                         1.8671302120e-03f};
  return exp2<5>(x, c);
}
TF_INLINE Vec exp2(Vec x, Float16) {
  constexpr float c[] = {1.0000025934e+00f, 6.9300383469e-01f, 2.4144275636e-01f, 5.2011460921e-02f,
                         1.3534167975e-02f};
  return exp2<4>(x, c);
}

#else

// f in [-1/2, 1/2]; from 2^128 on the result is not exact but large or infinite.
template <class T>
TF_INLINE Vec exp2(Vec x, T) {
  constexpr float c[] = {9.9999926144e-01f, 6.9312181469e-01f, 2.4024744830e-01f, 5.5917860698e-02f,
                         9.5701019611e-03f};
  const Vec n = round(max(set1(-126.0f), min(set1(128.0f), x))), f = x - n;
  const Vec power = scale_by_power(polynomial<4>(c, f), n);
  return select(less(x, set1(-126.0f)), zero(), power);
}

#endif

// Sets DAZ and FTZ for this thread: denormals are read and written as 0. Returns the previous state
// for restore_denormals().
TF_INLINE unsigned flush_denormals() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
}
TF_INLINE void restore_denormals(unsigned before) { _mm_setcsr(before); }

}  // namespace
}  // namespace tf::TF_ISA
