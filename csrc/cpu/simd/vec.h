// A vector of floats with one interface for all instruction sets. For kernel files only: everything
// has internal linkage, so that no two builds share a symbol.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstring>
#include <limits>

#include "types.h"

#ifdef TF_EMULATED_TILES
#include "cpu/simd/amx_emulation.h"
#endif

#define TF_INLINE inline __attribute__((always_inline))
#define TF_UNROLL _Pragma("GCC unroll 16")

namespace tf::TF_ISA {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kRootHalf = 0x3f3504f3;  // the bits of sqrt(0.5)

// After the last store_uncached(), whose address must be aligned: orders these stores before later
// ones.
TF_INLINE void finish_uncached_stores() {
#if !defined(__aarch64__)  // there they are ordinary stores
  _mm_sfence();
#endif
}

// Vector registers: limits how many sums a kernel keeps in them.
#if defined(__AVX512F__) || defined(__aarch64__)
#define TF_VECTOR_REGISTERS 32
#else
#define TF_VECTOR_REGISTERS 16
#endif

#if defined(__aarch64__)

using Vec = float32x4_t;
using Mask = uint32x4_t;
constexpr int kLanes = 4;

TF_INLINE Vec set1(float x) { return vdupq_n_f32(x); }
TF_INLINE Vec load(const float* p) { return vld1q_f32(p); }
TF_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
TF_INLINE void store_uncached(float* p, Vec x) { vst1q_f32(p, x); }
TF_INLINE Vec load_n(const float* p, Index n) {
  float buffer[kLanes] = {0, 0, 0, 0};
  for (Index i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
TF_INLINE void store_n(float* p, Vec x, Index n) {
  float buffer[kLanes];
  store(buffer, x);
  for (Index i = 0; i < n; ++i) p[i] = buffer[i];
}
TF_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
// Neither fmax nor fmaxnm: if y alone is NaN, fmax returns NaN, and fmaxnm returns x.
TF_INLINE Vec max(Vec x, Vec y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
TF_INLINE Vec min(Vec x, Vec y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
TF_INLINE Vec round(Vec x) { return vrndnq_f32(x); }
TF_INLINE Mask equal(Vec x, Vec y) { return vceqq_f32(x, y); }
TF_INLINE Mask less(Vec x, Vec y) { return vcltq_f32(x, y); }
TF_INLINE Mask not_less(Vec x, Vec y) { return vmvnq_u32(vcltq_f32(x, y)); }
TF_INLINE Mask is_nan(Vec x) { return vmvnq_u32(vceqq_f32(x, x)); }
TF_INLINE Vec select(Mask m, Vec x, Vec y) { return vbslq_f32(m, x, y); }
TF_INLINE bool any(Mask m) { return vmaxvq_u32(m) != 0; }
TF_INLINE float reduce_add(Vec x) { return vaddvq_f32(x); }
TF_INLINE float reduce_max(Vec x) { return vmaxvq_f32(x); }
TF_INLINE Vec scale_by_power(Vec x, Vec n) {
  const int32x4_t bits = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(bits, 23)));
}
TF_INLINE Vec scale_where(Mask m, Vec x, Vec n) {
  return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(scale_by_power(x, n))));
}
TF_INLINE Vec split_power(Vec x, Vec& m) {
  const int32x4_t bits = vreinterpretq_s32_f32(x);
  const int32x4_t n = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(kRootHalf)), 23);
  m = vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(n, 23)));
  return vcvtq_f32_s32(n);
}
TF_INLINE Mask bytes_nonzero(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const uint32x4_t b = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  return vtstq_u32(b, b);
}

#elif defined(__AVX512F__)

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;

TF_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
TF_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
TF_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
TF_INLINE void store_uncached(float* p, Vec x) { _mm512_stream_ps(p, x); }
TF_INLINE Mask first_lanes(Index n) { return static_cast<Mask>((1u << n) - 1u); }
// The first n < kLanes floats; the other lanes are 0.
TF_INLINE Vec load_n(const float* p, Index n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
TF_INLINE void store_n(float* p, Vec x, Index n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
TF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// max(x, y), returning y where x is NaN.
TF_INLINE Vec max(Vec x, Vec y) { return _mm512_max_ps(x, y); }
TF_INLINE Vec min(Vec x, Vec y) { return _mm512_min_ps(x, y); }
TF_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, 8); }
TF_INLINE Mask equal(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
TF_INLINE Mask less(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
// Lanes that hold NaN are not less.
TF_INLINE Mask not_less(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ); }
TF_INLINE Mask is_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
// mask ? x : y
TF_INLINE Vec select(Mask m, Vec x, Vec y) { return _mm512_mask_blend_ps(m, y, x); }
TF_INLINE bool any(Mask m) { return m != 0; }
TF_INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
TF_INLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
// x * 2^n for integral n from -126 to 127.
TF_INLINE Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
// The same where the mask is set, else 0, for any n.
TF_INLINE Vec scale_where(Mask m, Vec x, Vec n) { return _mm512_maskz_scalef_ps(m, x, n); }
// x = m 2^n with m from 0.707 to 1.414; returns n. x must be positive and normal.
TF_INLINE Vec split_power(Vec x, Vec& m) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i n = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(kRootHalf)), 23);
  m = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(n, 23)));
  return _mm512_cvtepi32_ps(n);
}
// 0 where the byte is zero, else all lanes of the mask set.
TF_INLINE Mask bytes_nonzero(const uint8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm_test_epi8_mask(b, b);
}

#elif defined(__AVX2__)

using Vec = __m256;
using Mask = __m256;
constexpr int kLanes = 8;

TF_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
TF_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
TF_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
TF_INLINE void store_uncached(float* p, Vec x) { _mm256_stream_ps(p, x); }
TF_INLINE __m256i first_lanes(Index n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TF_INLINE Vec load_n(const float* p, Index n) { return _mm256_maskload_ps(p, first_lanes(n)); }
TF_INLINE void store_n(float* p, Vec x, Index n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
TF_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
TF_INLINE Vec max(Vec x, Vec y) { return _mm256_max_ps(x, y); }
TF_INLINE Vec min(Vec x, Vec y) { return _mm256_min_ps(x, y); }
TF_INLINE Vec round(Vec x) { return _mm256_round_ps(x, 8); }
TF_INLINE Mask equal(Vec x, Vec y) { return _mm256_cmp_ps(x, y, _CMP_EQ_OQ); }
TF_INLINE Mask less(Vec x, Vec y) { return _mm256_cmp_ps(x, y, _CMP_LT_OQ); }
TF_INLINE Mask not_less(Vec x, Vec y) { return _mm256_cmp_ps(x, y, _CMP_NLT_UQ); }
TF_INLINE Mask is_nan(Vec x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
TF_INLINE Vec select(Mask m, Vec x, Vec y) { return _mm256_blendv_ps(y, x, m); }
TF_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
TF_INLINE float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
TF_INLINE float reduce_max(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
TF_INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
TF_INLINE Vec scale_where(Mask m, Vec x, Vec n) { return _mm256_and_ps(m, scale_by_power(x, n)); }
TF_INLINE Vec split_power(Vec x, Vec& m) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i n = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(kRootHalf)), 23);
  m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23)));
  return _mm256_cvtepi32_ps(n);
}
TF_INLINE Mask bytes_nonzero(const uint8_t* p) {
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_cvtepu8_epi32(b), _mm256_setzero_si256()));
}

#else

using Vec = __m128;
using Mask = __m128;
constexpr int kLanes = 4;

TF_INLINE Vec set1(float x) { return _mm_set1_ps(x); }
TF_INLINE Vec load(const float* p) { return _mm_loadu_ps(p); }
TF_INLINE void store(float* p, Vec x) { _mm_storeu_ps(p, x); }
TF_INLINE void store_uncached(float* p, Vec x) { _mm_stream_ps(p, x); }
TF_INLINE Vec load_n(const float* p, Index n) {
  float buffer[kLanes] = {0, 0, 0, 0};
  for (Index i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
TF_INLINE void store_n(float* p, Vec x, Index n) {
  float buffer[kLanes];
  store(buffer, x);
  for (Index i = 0; i < n; ++i) p[i] = buffer[i];
}
TF_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
TF_INLINE Vec max(Vec x, Vec y) { return _mm_max_ps(x, y); }
TF_INLINE Vec min(Vec x, Vec y) { return _mm_min_ps(x, y); }
TF_INLINE Vec round(Vec x) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(x)); }  // |x| < 2^31
TF_INLINE Mask equal(Vec x, Vec y) { return _mm_cmpeq_ps(x, y); }
TF_INLINE Mask less(Vec x, Vec y) { return _mm_cmplt_ps(x, y); }
TF_INLINE Mask not_less(Vec x, Vec y) { return _mm_cmpnlt_ps(x, y); }
TF_INLINE Mask is_nan(Vec x) { return _mm_cmpunord_ps(x, x); }
TF_INLINE Vec select(Mask m, Vec x, Vec y) {
  return _mm_or_ps(_mm_and_ps(m, x), _mm_andnot_ps(m, y));
}
TF_INLINE bool any(Mask m) { return _mm_movemask_ps(m) != 0; }
TF_INLINE float reduce_add(Vec x) {
  Vec s = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
TF_INLINE float reduce_max(Vec x) {
  Vec s = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
TF_INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m128i bits = _mm_add_epi32(_mm_cvtps_epi32(n), _mm_set1_epi32(127));
  return x * _mm_castsi128_ps(_mm_slli_epi32(bits, 23));
}
TF_INLINE Vec scale_where(Mask m, Vec x, Vec n) { return _mm_and_ps(m, scale_by_power(x, n)); }
TF_INLINE Vec split_power(Vec x, Vec& m) {
  const __m128i bits = _mm_castps_si128(x);
  const __m128i n = _mm_srai_epi32(_mm_sub_epi32(bits, _mm_set1_epi32(kRootHalf)), 23);
  m = _mm_castsi128_ps(_mm_sub_epi32(bits, _mm_slli_epi32(n, 23)));
  return _mm_cvtepi32_ps(n);
}
TF_INLINE Mask bytes_nonzero(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m128i zero = _mm_setzero_si128();
  const __m128i b = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero);
  return _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_unpacklo_epi16(b, zero), zero));
}

#endif

// Rounded like a vector lane, whether or not the compiler contracts a * b + c.
TF_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

TF_INLINE Index round_up(Index x, Index to) { return (x + to - 1) / to * to; }
TF_INLINE Index min(Index x, Index y) { return x < y ? x : y; }
TF_INLINE Index max(Index x, Index y) { return x > y ? x : y; }

TF_INLINE Vec zero() { return set1(0.0f); }

// The first n < kLanes lanes.
TF_INLINE Mask lanes_below(Index n) {
  static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return less(zero(), load_n(kOnes, n));
}

// Copies n floats and pads to `room` with zeros.
TF_INLINE void copy_row(const float* from, Index n, float* to, Index room) {
  Index j = 0;
  for (; j + kLanes <= n; j += kLanes) store(to + j, load(from + j));
  for (; j < n; ++j) to[j] = from[j];
  for (; j < room; ++j) to[j] = 0.0f;
}

// Denormal results cost hundreds of cycles on some CPUs, so e^x is 0 below this.
constexpr float kMinExponent = -87.3f;

// e^x = 2^n (p f + 1): returns p.
TF_INLINE Vec exp_parts(Vec x, Vec& n, Vec& f) {
  n = round(x * set1(1.44269504089f));
  f = fma(x, set1(1.44269502162933349609375f), set1(0.0f) - n);
  f = fma(x, set1(1.9259629911266175e-8f), f);
  Vec p = set1(1.5345811889e-04f);
  p = fma(p, f, set1(1.3399931218e-03f));
  p = fma(p, f, set1(9.6184889575e-03f));
  p = fma(p, f, set1(5.5503287770e-02f));
  p = fma(p, f, set1(2.4022646891e-01f));
  return fma(p, f, set1(6.9314720574e-01f));
}

// e^x, relative error below 2e-7 (a degree-6 minimax polynomial for 2^f); 0 below -87.3, -inf
// included; NaN stays NaN. x must not exceed 88.3 (callers subtract the maximum, or clamp).
TF_INLINE Vec exp(Vec x) {
  Vec n, f;
  const Vec p = exp_parts(x, n, f);
  return scale_where(not_less(x, set1(kMinExponent)), fma(p, f, set1(1.0f)), n);
}

// e^x - 1 for x <= 0, without the cancellation near 0; -1 below -87.3, -inf included. NaN stays
// NaN.
TF_INLINE Vec expm1(Vec x) {
  Vec n, f;
  const Vec p = exp_parts(x, n, f);
  const Mask counts = not_less(x, set1(kMinExponent));
  // p f is NaN for -inf, and overflows far from 0.
  return scale_where(counts, p * f, n) + (scale_where(counts, set1(1.0f), n) - set1(1.0f));
}

// The natural logarithm of a positive normal number, within 1 unit in the last place; NaN stays
// NaN.
TF_INLINE Vec log(Vec x) {
  Vec m;
  const Vec n = split_power(x, m);
  const Vec f = m - set1(1.0f);  // exact
  // log(1 + f) = 2 atanh(s) = f - s (f - r): its error is a fraction of f's last place.
  const Vec s = f / (f + set1(2.0f)), square = s * s;
  Vec r = fma(square, set1(2.0f / 9), set1(2.0f / 7));
  r = fma(square, r, set1(2.0f / 5));
  r = square * fma(square, r, set1(2.0f / 3));
  const Vec small = fma(n, set1(1.42860682030941723212e-6f), set1(0.0f) - s * (f - r));
  return fma(n, set1(0.693145751953125f), f + small) + (x - x);
}

}  // namespace
}  // namespace tf::TF_ISA
