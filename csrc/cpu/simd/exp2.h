// 2^x and e^x for softmax and activations, with the accuracy that each element type needs. For
// kernel files only.
#pragma once

#include "cpu/simd/convert.h"

namespace tf::TF_ISA {
namespace {

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

// e^x for the probabilities of fp32; the same contract as exp(). x must not exceed 88.3.
#if defined(__AVX512F__)

// The bits of 2^(i / 16), less i << 19: the low bits of k are in the place where k / 16 is added to
// the exponent.
alignas(64) constexpr uint32_t kPowers[16] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};

// With x = (k / 16) ln 2 + f: a table entry times a minimax polynomial for e^f. Two multiply-adds
// fewer than exp(), on units that the products need. Relative error 1.1e-7 + 2.7e-9 |x|: ln 2 is
// rounded to fp32, which is a tenth of the rounding error of x itself, a difference of two scores.
TF_INLINE Vec softmax_exp(Vec x) {
  const Mask normal = not_less(x, set1(kMinExponent));
  const Vec magic = set1(0x1.8p19f);  // leaves k in the lowest bits
  const Vec shifted = fma(x, set1(1.44269504089f), magic);
  const Vec f = fma(magic - shifted, set1(0.693147180560f), x);
  const __m512i k = _mm512_castps_si512(shifted);
  const __m512i entry = _mm512_permutexvar_epi32(k, _mm512_load_si512(kPowers));
  const Vec power = _mm512_castsi512_ps(_mm512_add_epi32(entry, _mm512_slli_epi32(k, 19)));
  const Vec p = fma(fma(f, set1(0.1666671783f), set1(0.5000161529f)), f, set1(1.0f));
  return _mm512_maskz_fmadd_ps(normal, power * f, p, power);
}

#else

TF_INLINE Vec softmax_exp(Vec x) { return exp(x); }

#endif

// Sets DAZ and FTZ for this thread: denormals are read and written as 0. Returns the previous state
// for restore_denormals().
#if defined(__aarch64__)
TF_INLINE void set_fpcr(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
TF_INLINE unsigned flush_denormals() {
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  set_fpcr(before | 1u << 24);  // FZ
  return static_cast<unsigned>(before);
}
TF_INLINE void restore_denormals(unsigned before) { set_fpcr(before); }
#else
TF_INLINE unsigned flush_denormals() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
}
TF_INLINE void restore_denormals(unsigned before) { _mm_setcsr(before); }
#endif

}  // namespace
}  // namespace tf::TF_ISA
